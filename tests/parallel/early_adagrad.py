"""An optimizer that has state before its first step."""

import torch


class EarlyAdagrad(torch.optim.Adagrad):
    """Makes its state from the parameters it is given, and nowhere else, as in PyTorch 2.11.

    It checks that in a hook: an overridden `step` would run all hooks twice, clipping among them,
    once anything in the process has made a plain Adagrad, whose `step` then runs them as well.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_step_pre_hook(require_early_state)


def require_early_state(optimizer: torch.optim.Optimizer, *_) -> None:
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    assert set(optimizer.state) == updated, "state of what is not updated, or none of what is"
