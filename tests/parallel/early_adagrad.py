"""An optimizer that has state before its first step."""

import torch


class EarlyAdagrad(torch.optim.Adagrad):
    """Makes its state from the parameters it is given, and nowhere else, as in PyTorch 2.11."""

    def step(self, closure=None):
        updated = {p for group in self.param_groups for p in group["params"]}
        assert set(self.state) == updated, "state of what is not updated, or none of what is"
        return super().step(closure)
