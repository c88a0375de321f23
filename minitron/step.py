"""What one training step does, on one device or on each of many.

Read in this order: `train_step`, then its ideas: `accumulate_gradients` on one device, the same
over many (`accumulate_over_ranks`), and `learning_rate`.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minitron.config import TrainConfig
from minitron.parallel.interface import MicroBatches, ParallelModel, SumLoss
from minitron.parallel.one_device import IGNORED, OneDevice, summed_loss
from minitron.precision import LossScale, NoLossScale, widest_float
from minitron.pytorch.spans import span

ONE_DEVICE = OneDevice(nn.Module())
"""What a step asks of a model that is all on this device, whatever the model."""
UNSCALED = NoLossScale()


def train_step(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    micro_batches: MicroBatches,
    rate: float,
    clip_norm: float,
    parallel: ParallelModel = ONE_DEVICE,
    loss_scale: LossScale | NoLossScale = UNSCALED,
) -> tuple[Tensor, Tensor]:
    """Move the weights once; returns the loss and the gradient's norm before clipping, 0-d.

    `micro_batches` are this rank's share; loss, gradient and norm are those of the global batch,
    the same on every rank. With a `LossScale` a step is skipped, on all ranks, if a gradient has
    overflowed: the norm is then not finite. Otherwise raises FloatingPointError on all ranks, with
    the weights as they were, if loss or norm are not finite; for that the host waits for the
    device, once.
    """
    optimizer.zero_grad()
    loss = accumulate_over_ranks(model, micro_batches, parallel, loss_scale.value)

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loss_scale.unscale(parameters)  # before the norm is taken
    grad_norm = parallel.clip(parameters, clip_norm or math.inf)

    for group in optimizer.param_groups:
        group["lr"] = rate
    loss_scale.step(optimizer, loss, grad_norm)
    return loss, grad_norm


def accumulate_gradients(
    model: Callable[[Tensor], Tensor],
    micro_batches: MicroBatches,
    divisor: Tensor | float | None = None,
    sum_loss: SumLoss = summed_loss,
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
    model: Callable[[Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    divisor: Tensor | float,
    sum_loss: SumLoss,
) -> Tensor:
    """Add one micro-batch's part of the gradient to `.grad`; returns its part of the loss."""
    with span("forward"):
        loss = sum_loss(model(inputs), targets) / divisor
    with span("backward"):
        loss.backward()
    return loss.detach()


def accumulate_over_ranks(
    model: Callable[[Tensor], Tensor],
    micro_batches: MicroBatches,
    parallel: ParallelModel,
    scale: float = 1.0,
) -> Tensor:
    """Do the same for the micro-batches of all ranks, whose numbers of tokens may differ.

    `micro_batches` are this rank's, one at least. The gradient is multiplied by `scale`. Loss and
    gradient are the same on every rank.
    """
    # Ranks average their gradients, so each divides by its fair share of all tokens.
    count = count_targets(micro_batches)
    share = parallel.mean(count.to(widest_float(count.device)))
    share = torch.where(share > 0, share, 1) / scale
    accumulate = partial(accumulate_gradients, model)
    loss = parallel.forward_backward(accumulate, micro_batches, share)
    return parallel.mean(loss) / scale


def count_targets(micro_batches: MicroBatches) -> Tensor:
    """Count the targets that are not ignored, 0-d."""
    return sum((targets != IGNORED).sum() for _, targets in micro_batches)


def learning_rate(
    step: int, peak: float, minimum: float, warmup_steps: int, total_steps: int
) -> float:
    """Return the rate of `step`, from 0: a line up to `peak`, then half a cosine to `minimum`.

    The line reaches `peak` at the last warm-up step. The cosine starts at `peak` in the step after
    and reaches `minimum` at the last step, `total_steps - 1`, even if that is its only one; the
    rate stays there afterwards.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= total_steps - 1:
        return minimum
    progress = (step - warmup_steps) / (total_steps - 1 - warmup_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device):
    """Make AdamW, with weight decay for matrices but not for vectors (norms and biases)."""
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
