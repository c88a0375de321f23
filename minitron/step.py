"""What one training step does, on one device or on each of many.

Read in this order: `train_step`, then its ideas: `accumulate_gradients`, on one device and on each
of many, and `learning_rate`.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.config import TrainConfig
from minitron.parallel.data.ddp import DataParallel
from minitron.parallel.grid import Combined
from minitron.precision import LossScale
from minitron.pytorch.private import host_value
from minitron.pytorch.spans import span

IGNORED = -100  # a target with this value is no target: padding, say


def train_step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    micro_batches: list[tuple[Tensor, Tensor]],
    rate: float,
    clip_norm: float,
    parallel: Combined | DataParallel | None = None,
    loss_scale: LossScale | None = None,
) -> tuple[Tensor, Tensor]:
    """Move the weights once; returns the loss and the gradient's norm before clipping, 0-d.

    With `parallel` the micro-batches are this rank's share; loss, gradient and norm are those of
    the global batch, the same on every rank. With `loss_scale` a step is skipped, on all ranks, if
    a gradient has overflowed: the norm is then not finite. Otherwise raises FloatingPointError
    on all ranks, with the weights as they were, if loss or norm are not finite; for that the host
    waits for the device.
    """
    optimizer.zero_grad()
    scale = 1.0 if loss_scale is None else loss_scale.value
    if parallel is None:
        divisor = count_targets(micro_batches).clamp(min=1) / scale
        loss = accumulate_gradients(model, micro_batches, divisor) / scale
    else:
        loss = accumulate_over_ranks(model, micro_batches, parallel, scale)

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if loss_scale is not None:
        loss_scale.unscale(parameters)  # before the norm is taken
    # Where gradients are sharded, the norm of this rank's part is not the norm.
    clip = getattr(parallel, "clip", nn.utils.clip_grad_norm_)
    grad_norm = clip(parameters, clip_norm or math.inf)

    for group in optimizer.param_groups:
        group["lr"] = rate
    require_finite(loss if loss_scale is not None else loss + grad_norm)
    if loss_scale is None or loss_scale.accepts(grad_norm):
        optimizer.step()
    return loss, grad_norm


def require_finite(loss: Tensor) -> None:
    if not host_value(loss.isfinite(), when_fake=True):
        raise FloatingPointError(f"loss and gradient are not finite, but {float(loss)}")


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, S, V) and targets (B, S), summed over counted tokens, nats."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


def accumulate_gradients(
    model: Callable[[Tensor], Tensor], micro_batches: list[tuple[Tensor, Tensor]],
    divisor: Tensor | float | None = None,
    sum_loss: Callable[[Tensor, Tensor], Tensor] = summed_loss,
) -> Tensor:
    """Add to `.grad` the gradient of the mean loss over all tokens, one micro-batch at a time.

    `micro_batches` are pairs of inputs and targets, (B, S) token ids; B may differ, and a target
    of -100 does not count. Returns the mean loss, nats per token, 0-d. The mean is the sum of
    `sum_loss(logits, targets)` over `divisor`, which is the number of counted tokens unless given.
    """
    # One divisor for all: a mean of micro-batch means would favor the tokens of short ones.
    if divisor is None:
        divisor = count_targets(micro_batches).clamp(min=1)
    mean = 0.0
    for inputs, targets in micro_batches:
        mean = mean + forward_backward(model, inputs, targets, divisor, sum_loss)
    return mean


def forward_backward(
    model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, divisor: Tensor | float,
    sum_loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Add one micro-batch's part of the gradient to `.grad`; returns its part of the loss."""
    with span("forward"):
        loss = sum_loss(model(inputs), targets) / divisor
    with span("backward"):
        loss.backward()
    return loss.detach()


def accumulate_over_ranks(
    model: Callable[[Tensor], Tensor],
    micro_batches: list[tuple[Tensor, Tensor]],
    parallel: Combined | DataParallel,
    scale: float = 1.0,
) -> Tensor:
    """Do the same for the micro-batches of all ranks, whose numbers of tokens may differ.

    `micro_batches` are this rank's, one at least. `.grad` is `scale` times the gradient. Loss and
    `.grad` are the same on every rank.
    """
    # Ranks average their gradients, so each divides by its fair share of all tokens.
    share = parallel.mean(count_targets(micro_batches).double())
    share = torch.where(share > 0, share, 1) / scale
    # Where logits are sharded, their cross-entropy is not the loss.
    sum_loss = getattr(parallel, "summed_loss", summed_loss)
    run = getattr(parallel, "run", None)  # where the model is a pipeline
    mean = torch.zeros((), device=share.device)
    if run is not None:
        mean = run(micro_batches, sum_loss, share)
    else:
        for number, micro_batch in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            with nullcontext() if last else parallel.no_sync(), span("micro-batch", number):
                mean = mean + accumulate_gradients(model, [micro_batch], share, sum_loss)
    parallel.finish()
    return parallel.mean(mean) / scale


def count_targets(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The number of targets that count, 0-d."""
    return sum((targets != IGNORED).sum() for _, targets in micro_batches)


def learning_rate(
    step: int, peak: float, minimum: float, warmup_steps: int, total_steps: int
) -> float:
    """Rate of `step`, counted from 0: a line up to `peak`, then half a cosine to `minimum`.

    The line reaches `peak` at the last warm-up step, the cosine `minimum` at the last step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device):
    """AdamW; matrices decay, vectors (norms and biases) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=device.type in ("cpu", "cuda"),
    )
