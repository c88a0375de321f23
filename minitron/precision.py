"""Low precision: which tensors use which dtype, and what keeps the training the same.

16-bit numbers halve the bytes and at least double the speed of matmuls, but they fail in two
places. An update is often smaller than half an ulp of its weight and would be rounded away, so the
optimizer updates float32 master weights. And float16's smallest number is 6e-8, so smaller
gradients would underflow to zero: the loss is multiplied by a large scale before the backward pass,
and the gradients are divided by it before anything reads them.

Read in this order: Precision, PRECISIONS, apply_precision, MasterWeights, LossScale.

Reference: Micikevicius et al. 2018, "Mixed Precision Training" (sections 3.1 and 3.2).
"""

import math
from collections.abc import Callable, Iterable
from functools import wraps

import torch
from torch import Tensor, nn

from minitron.config import require
from minitron.cost import precision as formats
from minitron.model.float8 import E4M3, apply_float8
from minitron.pytorch.private import launch_step_if, multiply_tensors_, start_host_copy


class Precision(formats.Precision):
    """Which PyTorch dtype holds what in training."""

    def tolerance(self, num_roundings: int) -> float:
        """Return by how much two computations may differ, relative to their result.

        Rounding error is uniform in plus or minus u, half an ulp: u / sqrt(3) as a root mean
        square. The squares of independent errors add up. Twice the result is allowed.
        """
        unit_roundoff = torch.finfo(self.compute).eps / 2
        return 2 * math.sqrt(num_roundings / 3) * unit_roundoff

    def make_loss_scale(self) -> "LossScale | NoLossScale":
        """Make the loss scale that a run starts with."""
        return LossScale() if self.scales_loss else NoLossScale()


def with_torch_dtypes(named: formats.Precision) -> Precision:
    """Replace the names of dtypes by PyTorch's dtypes."""
    return Precision(
        **{
            field: getattr(torch, value.name) if isinstance(value, formats.Dtype) else value
            for field, value in vars(named).items()
        }
    )


PRECISIONS = {name: with_torch_dtypes(named) for name, named in formats.PRECISIONS.items()}


def apply_precision(model: nn.Module, precision: Precision, is_sharded: bool = False) -> None:
    """Convert the parameters to their dtype and give the blocks' linear layers their matmuls.

    With ZeRO-3 (`is_sharded`) the parameters keep their dtype: their shards are the masters, and
    each all-gather rounds them.
    """
    if precision.master is not None and not is_sharded:
        for parameter in model.parameters():  # model.to cannot swap fake tensors
            parameter.data = parameter.detach().to(precision.parameters)
    if precision.compute == E4M3:
        apply_float8(model.blocks)


def set_grad_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let autograd accumulate gradients in `dtype`, whatever the dtype of the parameters."""
    for parameter in model.parameters():
        if gradient_dtype(parameter) != dtype:
            require(
                hasattr(parameter, "grad_dtype"),
                f"gradients in {dtype} of parameters in "
                f"{parameter.dtype} need torch 2.10 or newer; this is {torch.__version__}",
            )
            parameter.grad_dtype = dtype


def gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which autograd accumulates the parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def zero_gradient(parameter: nn.Parameter) -> Tensor:
    """Return zeros in place of the missing gradient of an unused parameter."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices."""


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for counts and sums that should be exact: float64 where the device has it.

    float32 counts exactly up to 2**24.
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def low_precision(
    model: Callable, device: torch.device, precision: Precision = PRECISIONS["bf16-autocast"]
) -> Callable[[Tensor], Tensor]:
    """Return the model's forward pass, under autocast if the recipe says so; float32 logits."""

    def forward(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, precision.activations, enabled=precision.autocasts):
            logits = model(tokens)
        return logits.float()  # the softmax of the loss needs it

    return forward


def step_if_finite(optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> bool:
    """Step unless the loss or the gradient's norm (0-d) is not finite; returns whether it stepped.

    Raises FloatingPointError if the loss is not finite. The host waits for both numbers once. A
    fused optimizer is launched before that: it reads on the device whether to change anything,
    so the device does not idle while the host launches it.
    """
    finite = torch.stack([loss.isfinite(), grad_norm.isfinite()])
    answers = start_host_copy(finite, when_fake=(True, True))
    is_launched = launch_step_if(finite.all(), optimizer)
    loss_finite, norm_finite = answers()
    if not loss_finite:
        raise FloatingPointError(f"the loss is {float(loss)}")
    if norm_finite and not is_launched:
        optimizer.step()
    return norm_finite


class MasterWeights:
    """Float32 copies of a model's trainable parameters, which the optimizer updates instead.

    `pieces` maps each parameter to its copy. At the end of an optimizer step every parameter
    becomes its copy, rounded; the copy keeps what the rounding has cut off.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32):
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.pieces = {p: p.detach().to(dtype, copy=True) for p in self.names}

    def take_gradients(self) -> None:
        """Move every gradient to its master; call this after a step's last backward pass."""
        for parameter, master in self.pieces.items():
            grad = parameter.grad
            master.grad = None if grad is None else grad.to(master.dtype)
            parameter.grad = None

    def shard(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make `optimizer`, which was built for the parameters, update the masters; returns it."""
        update_instead(optimizer, self.pieces, lambda parameter: range(parameter.numel()))
        discard_on_zero_grad(optimizer, self.discard)
        optimizer.register_step_post_hook(self.copy_to_parameters)
        return optimizer

    def discard(self) -> None:
        """Drop the gradients that `take_gradients` has not moved yet."""
        for parameter in self.pieces:
            parameter.grad = None

    @torch.no_grad()
    def copy_to_parameters(self, *_) -> None:
        """Set every parameter to its master, rounded to the nearest number of its dtype."""
        for parameter, master in self.pieces.items():
            parameter.copy_(master)

    def set(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set the parameter's master, if it has one, to the unrounded `value`."""
        if parameter in self.pieces:
            self.pieces[parameter].copy_(value)

    def optimizer_tensor(self, parameter: nn.Parameter, without: Tensor) -> Tensor:
        """Return what the optimizer updates: the master, or `without` if there is none."""
        return self.pieces.get(parameter, without)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return every gradient after `take_gradients`, by name."""
        return {name: self.pieces[p].grad for p, name in self.names.items()}


def update_instead(
    optimizer: torch.optim.Optimizer,
    pieces: dict[nn.Parameter, Tensor],
    owned: Callable[[nn.Parameter], range],
) -> None:
    """Make `optimizer` update `pieces` instead of the parameters that they belong to.

    `owned` returns which elements of its flattened parameter a piece holds. State that exists
    before the first step (Adagrad's) moves along: a tensor of the parameter's shape is cut as the
    parameter is; the number of steps is kept.
    """
    for group in optimizer.param_groups:
        group["params"] = [pieces.get(p, p) for p in group["params"]]
    for parameter, piece in pieces.items():
        own = owned(parameter)
        for key, value in optimizer.state.pop(parameter, {}).items():
            if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                value = value.flatten()[own.start : own.stop].view_as(piece).to(piece, copy=True)
            optimizer.state[piece][key] = value


def discard_on_zero_grad(optimizer: torch.optim.Optimizer, discard: Callable[[], None]) -> None:
    """Make `optimizer.zero_grad` call `discard` too: the optimizer knows only the masters.

    So a step starts without old gradients even after a backward pass that raised.
    """
    zero_grad = optimizer.zero_grad

    @wraps(zero_grad)
    def zero_all(set_to_none: bool = True) -> None:
        discard()
        zero_grad(set_to_none)

    optimizer.zero_grad = zero_all


NO_MASTERS = MasterWeights(nn.Module())
"""The null case: the optimizer updates the parameters directly."""


class NoLossScale:
    """The null case of `LossScale`: gradients are not scaled and must be finite."""

    value = 1.0

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Leave every `.grad` as it is."""

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> None:
        """Step; raises FloatingPointError if the loss or the norm (0-d) is not finite."""
        if not step_if_finite(optimizer, loss, grad_norm):
            raise FloatingPointError(f"the gradient norm is {float(grad_norm)}")

    def row(self) -> dict:
        """Return the fields for the log: none."""
        return {}

    def __str__(self) -> str:
        return ""

    def state_dict(self) -> None:
        """Return None: there is nothing to resume."""

    def load_state_dict(self, state: None) -> None:
        """Accept the result of `state_dict`."""


class LossScale:
    """The factor on the loss that keeps float16 gradients from underflowing and overflowing.

    The scale halves after a step whose gradients overflowed and doubles after `interval` good steps
    in a row. It stays a power of two, so it changes no bit of a gradient's mantissa. The defaults
    are those of torch.amp.GradScaler.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ):
        self.value, self.growth, self.backoff, self.interval = initial, growth, backoff, interval
        self.good_steps = 0  # since the scale last changed
        self.skipped = 0

    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide every `.grad` by the scale; do this before clipping, which needs the true norm."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            multiply_tensors_(grads, 1 / self.value)

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor, grad_norm: Tensor) -> None:
        """Step unless the gradients have overflowed, and set the next step's scale.

        `grad_norm` (0-d) is the norm over all ranks. One overflow anywhere makes it infinite or NaN
        everywhere, so all ranks skip together and keep the same scale. Raises FloatingPointError
        if the loss (0-d) is not finite: no scale would change that.
        """
        if step_if_finite(optimizer, loss, grad_norm):
            self.good_steps += 1
            if self.good_steps == self.interval:
                self.value, self.good_steps = self.value * self.growth, 0
        else:
            self.value, self.good_steps = self.value * self.backoff, 0
            self.skipped += 1

    def row(self) -> dict:
        """Return the fields for the log: the next step's scale and the number of skipped steps."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped}

    def __str__(self) -> str:
        return f", loss scale 2^{math.log2(self.value):.0f}, {self.skipped:,} skipped"

    def state_dict(self) -> dict:
        return {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]
        self.skipped = state["skipped"]
