"""Where a number first stops being finite: the first module that makes an infinity or NaN.

    with FirstNonFinite(model, dict(model.named_parameters())) as fault:
        loss = ...
        loss.backward()
    print(fault)    # the output of blocks.3.mlp.down

Read in this order: FirstNonFinite, from __enter__ on.
"""

import math
import re
from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from minitron.pytorch.private import tensors_in


class FirstNonFinite:
    """Within it, watches what every module reads and returns, and its gradients.

    `weights` are looked at first. Looking at every tensor is slow: use it to repeat a step that
    has gone wrong. What a module reads is looked at too, since not all is computed in a module.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]):
        self.model, self.weights = model, weights
        self.place: str | None = None
        self.num_checked = 0  # until then: ranks that compute the same can tell who was first
        self.handles: list = []

    def __enter__(self) -> "FirstNonFinite":
        for name, weight in self.weights.items():
            self.look(weight, f"the weight {name}")
        for name, module in self.model.named_modules():
            path = name or "the model"
            self.handles += [
                module.register_forward_pre_hook(self.before(path)),
                module.register_forward_hook(self.after(path)),
            ]
        return self

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()

    def before(self, path: str):
        def look_at_inputs(module: nn.Module, inputs: tuple) -> None:
            for tensor in tensors_in(inputs):
                self.look(tensor, f"the input of {path}")

        return look_at_inputs

    def after(self, path: str):
        def look_at_outputs(module: nn.Module, inputs: tuple, output) -> None:
            for tensor in tensors_in(output):
                self.look(tensor, f"the output of {path}")
                if tensor.requires_grad:
                    place = f"the gradient of the output of {path}"
                    tensor.register_hook(partial(self.look, place=place))

        return look_at_outputs

    def look(self, tensor: Tensor, place: str) -> None:
        if self.place is not None:
            return
        self.num_checked += 1
        if tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            self.place = place

    @property
    def order(self) -> tuple:
        """Smaller on the rank that was first: ranks hold other layers, or other samples of them.

        What one layer gets wrong the next one reads; in the backward pass it is the other way
        round.
        """
        place = str(self)
        layer = re.search(r"\d+", place)
        depth = int(layer[0]) if layer else -1 if "embedding" in place else math.inf
        is_backward = "gradient" in place
        return self.place is None, is_backward, -depth if is_backward else depth, self.num_checked

    def __str__(self) -> str:
        return self.place or "in no module: a weight's gradient, or a computation after the model"
