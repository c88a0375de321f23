"""Low precision: which numbers have how many bits, and what keeps the training the same.

16-bit numbers halve the bytes and double the speed of matrix products. They are too coarse for two
things. An update is often smaller than half a unit in the last place of its weight, and would be
rounded away: so the optimizer works on float32 master weights. And float16 ends at 6e-8: smaller
gradients would be zero; so the loss is multiplied by a large scale before the backward pass, and
the gradients are divided by it before anything looks at them.

Read in this order: Precision, PRECISIONS, apply_precision, MasterWeights, LossScale.

Reference: Micikevicius et al. 2018, "Mixed Precision Training" (sections 3.1 and 3.2).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitron.config import require
from minitron.cost import Recipe
from minitron.model.float8 import E4M3, apply_float8
from minitron.pytorch.private import host_value, multiply_tensors_


@dataclass(frozen=True)
class Precision:
    """Which dtype holds what in training."""

    parameters: torch.dtype
    """Of the model, held on the device and gathered from other ranks."""
    compute: torch.dtype
    """Of the operands of matrix products; their sums have 32 bits."""
    gradients: torch.dtype
    """In `.grad`, where those of the micro-batches add up."""
    reduction: torch.dtype
    """In messages that sum gradients over ranks."""
    master: torch.dtype | None
    """Of a copy that the optimizer updates in place of the parameters; None: there is none."""
    optimizer_state: torch.dtype = torch.float32
    scales_loss: bool = False
    """Multiply the loss, so that small gradients stay above the dtype's smallest number."""

    @property
    def cost(self) -> Recipe:
        """Bytes that each parameter costs with Adam."""
        return Recipe(
            parameter=self.parameters.itemsize,
            gradient=self.gradients.itemsize,
            master=self.master.itemsize if self.master else 0,
            optimizer_state=2 * self.optimizer_state.itemsize,
        )

    @property
    def autocasts(self) -> bool:
        """Whether parameters are converted each time they are used."""
        return self.parameters == torch.float32 and self.compute != torch.float32

    def tolerance(self, num_roundings: int) -> float:
        """How far apart two computations may be, relative to their result.

        Each rounding errs by up to half a unit in the last place, u, evenly: by u / sqrt(3) in the
        mean square. Independent ones add up in squares. Twice that is allowed.
        """
        unit_roundoff = torch.finfo(self.compute).eps / 2
        return 2 * math.sqrt(num_roundings / 3) * unit_roundoff

    @property
    def activations(self) -> torch.dtype:
        """Of what layers pass on."""
        return self.compute if self.autocasts else self.parameters


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16

PRECISIONS = {
    "fp32": Precision(f32, f32, f32, f32, None),
    "bf16-autocast": Precision(f32, bf16, f32, f32, None),
    "bf16": Precision(bf16, bf16, bf16, bf16, f32),
    "bf16-fp32-grads": Precision(bf16, bf16, f32, f32, f32),
    "fp16": Precision(f16, f16, f16, f16, f32, scales_loss=True),
    "fp8": Precision(bf16, E4M3, bf16, bf16, f32),
}
"""On the story model the 16-bit ones end within 0.3 % of float32's loss, fp8 within 1.5 %."""


def apply_precision(model: nn.Module, precision: Precision, is_sharded: bool = False) -> None:
    """Give the parameters their dtype, and the blocks' linear layers their products.

    In stage 3 of ZeRO (`is_sharded`) the model stays as it is: its shards are the masters, and are
    rounded each time they are gathered.
    """
    if precision.master is not None and not is_sharded:
        for parameter in model.parameters():  # not by model.to, which cannot swap fake ones
            parameter.data = parameter.detach().to(precision.parameters)
    if precision.compute == E4M3:
        apply_float8(model.blocks)


def hold_gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let autograd add up gradients in `dtype`, whatever the parameters have."""
    for parameter in model.parameters():
        if gradient_dtype(parameter) != dtype:
            require(hasattr(parameter, "grad_dtype"), f"gradients in {dtype} of parameters in "
                    f"{parameter.dtype} need torch 2.10 or newer; this is {torch.__version__}")
            parameter.grad_dtype = dtype


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """In which dtype autograd adds up the parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def zero_gradient(parameter: nn.Parameter) -> Tensor:
    """What counts where a parameter has not been used."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def low_precision(
    model: Callable, device: torch.device, precision: Precision = PRECISIONS["bf16-autocast"]
) -> Callable[[Tensor], Tensor]:
    """The model's forward pass, under autocast if asked; float32 logits (B, S, V)."""

    def forward(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, precision.activations, enabled=precision.autocasts):
            logits = model(tokens)
        return logits.float()  # the softmax of the loss needs it

    return forward


class MasterWeights:
    """Float32 copies of a model's trainable parameters, which an optimizer updates in their place.

    `pieces` are these copies, by parameter. A step of the optimizer ends with rounding them into
    the parameters; those that round to what the parameters are keep their bits.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32):
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.pieces = {p: p.detach().to(dtype, copy=True) for p in self.names}

    def hand_over(self) -> None:
        """Move every gradient to its master; call it after the last backward pass of a step."""
        for parameter, master in self.pieces.items():
            grad = parameter.grad
            master.grad = None if grad is None else grad.to(master.dtype)
            parameter.grad = None

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let `optimizer`, made for the parameters, update the masters; returns it."""
        for group in optimizer.param_groups:
            group["params"] = [self.pieces[p] for p in group["params"]]
        optimizer.register_step_post_hook(self.round)
        return optimizer

    @torch.no_grad()
    def round(self, *_) -> None:
        """Bring the masters into the parameters, to the nearest number that they can hold."""
        for parameter, master in self.pieces.items():
            parameter.copy_(master)

    bring_back = round

    def keep(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Take the parameter's new `value` as it was before it was rounded."""
        if parameter in self.pieces:
            self.pieces[parameter].copy_(value)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient after `hand_over`, by name."""
        return {name: self.pieces[p].grad for p, name in self.names.items()}


class LossScale:
    """By what the loss is multiplied, so that float16 gradients neither vanish nor overflow.

    The scale halves when a gradient has overflowed, and doubles after `interval` steps without; it
    stays a power of two, so that it changes no bit of a gradient's mantissa. The defaults are those
    of torch.amp.GradScaler. `interval` counts steps.
    """

    def __init__(
        self, initial: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5,
        interval: int = 2000,
    ):
        self.value, self.growth, self.backoff, self.interval = initial, growth, backoff, interval
        self.good_steps = 0  # since the scale has changed
        self.skipped = 0

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide every `.grad`: before clipping, which would take the scaled norm for the norm."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            multiply_tensors_(grads, 1 / self.value)

    def accepts(self, grad_norm: Tensor) -> bool:
        """Whether to step; changes the scale for the next one. Waits for the device.

        `grad_norm` is 0-d and that of all ranks: one overflow anywhere makes it infinite or NaN
        everywhere, so that all ranks skip together and keep the same scale.
        """
        if host_value(grad_norm.isfinite(), when_fake=True):
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.value, self.good_steps = self.value * self.growth, 0
            return True
        self.value, self.good_steps = self.value * self.backoff, 0
        self.skipped += 1
        return False

    def state_dict(self) -> dict:
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]
        self.skipped = state["skipped"]
