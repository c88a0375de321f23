"""Exercises of chapter 10: mixed precision. Fewer bits for each number, and the same training.

Write the body, save, and run `minitron check 10.1` in a terminal or check("10.1") in a notebook. If
you are stuck, `minitron hint 10.1` gives hints in three steps; `minitron reset 10.1` restores the
original. The exercises do not build on each other, so you can take them in any order.

In 10.4 and in the second half of 10.5, every rank runs your code. `group` is the process group of
the ranks: group.rank(), group.size(). The only collective you may use is
dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group), which replaces tensor by the sum over
the ranks, on all of them; with dist.ReduceOp.MAX it is the maximum.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


# Exercise 10.1 | Find the underflow | 20 min | difficulty 2
def flushed_share(gradients: dict[str, Tensor], scale: float = 1.0) -> float:
    """Return the share of the gradients that becomes zero in float16, after scaling by `scale`.

    gradients: float32 tensors by name, of any shape; some may have no elements or not be
    contiguous. Over all tensors together, count the nonzero values, and those among them that
    float16 rounds to zero once multiplied by scale ("flushed"). Return the second number divided
    by the first, or 0 if all values are zero. Infinity and NaN are nonzero and not flushed.

    The smallest normal number of float16 is 2^-14. Below it are the multiples of 2^-24. A value is
    rounded to the nearest number of the format, and in a tie to the one whose last bit is 0.

    Example: w = [2^-30, 2^-24, 0] and b = [1, -1]. Of 4 nonzero values, 2^-30 is flushed: 1/4.
    With scale 64 it becomes 2^-24, and nothing is flushed.
    """
    ### BEGIN SOLUTION
    num_nonzero = num_flushed = 0
    for values in gradients.values():
        nonzero = values != 0  # true of NaN
        num_nonzero += int(nonzero.sum())
        num_flushed += int((nonzero & ((values * scale).half() == 0)).sum())
    return num_flushed / num_nonzero if num_nonzero else 0.0
    ### END SOLUTION


def smallest_scale(gradients: dict[str, Tensor], max_share: float) -> float | None:
    """Return the smallest of 1, 2, 4, 8 ... that is a good loss scale, or None if there is none.

    A scale is good if, after scaling, at most the share `max_share` of the gradients is flushed
    (as in flushed_share) and none is infinite or NaN in float16. The largest number of float16 is
    65504; a value becomes infinite if it is at least as close to 65536. If all gradients are zero,
    the answer is 1.

    Example: w = [2^-30, 2^-24, 0] and b = [1, -1]. With max_share 0.25 the answer is 1, with 0.1
    it is 64. With b = [2000, -1] and 0.1 it is None, because 64 times 2000 is too large.
    """
    ### BEGIN SOLUTION
    scale = 1.0
    while all((values * scale).half().isfinite().all() for values in gradients.values()):
        if flushed_share(gradients, scale) <= max_share:
            return scale
        scale *= 2
    return None
    ### END SOLUTION


# Exercise 10.2 | Dynamic loss scaler | 25 min | difficulty 2
class LossScaler:
    """Multiply the loss so that float16 gradients do not vanish, and adapt the factor.

        scaler = LossScaler(optimizer, max_norm)        # once; then in every step:
        scaler.scaled(loss).backward()
        moved = scaler.step()

    scaled returns the loss times self.value, so that every gradient is multiplied by it. The loss
    tensor itself must not change, because it is logged.

    step finds scaled gradients in the .grad of the parameters in all of the optimizer's parameter
    groups; some are None. The true gradient is .grad / self.value.

    - If all its elements are finite, clip it: if its norm over all parameters together (the root
      of the sum of squares) exceeds max_norm, multiply it by max_norm / norm. Then let the
      optimizer take its step, and return True.
    - If an element is infinite or NaN, skip the step: weights and optimizer state do not change.
      Return False.

    Either way, every .grad is None afterwards. Then self.value is adapted: after a skipped step it
    is multiplied by `backoff`; after `interval` consecutive steps that were not skipped it is
    multiplied by `growth`, and the count starts again.

    Example: with value 8, interval 2, and gradients that are finite, finite, NaN, finite, finite,
    self.value after each step is 8, 16, 8, 8, 16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ):
        self.optimizer, self.max_norm = optimizer, max_norm
        self.value, self.growth, self.backoff, self.interval = initial, growth, backoff, interval
        self.num_good = 0  # consecutive steps that were not skipped

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the tensor to call backward() on."""
        ### BEGIN SOLUTION
        return loss * self.value
        ### END SOLUTION

    def step(self) -> bool:
        """Unscale, then clip and step, or skip; return whether there was a step."""
        ### BEGIN SOLUTION
        parameters = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        for parameter in parameters:
            parameter.grad /= self.value
        norm = nn.utils.clip_grad_norm_(parameters, self.max_norm)

        moved = bool(norm.isfinite())  # it is not if one element is not
        if moved:
            self.optimizer.step()
            self.num_good += 1
            if self.num_good == self.interval:
                self.value *= self.growth
                self.num_good = 0
        else:
            self.value *= self.backoff
            self.num_good = 0
        self.optimizer.zero_grad()
        return moved
        ### END SOLUTION


# Exercise 10.3 | Master weights | 20 min | difficulty 2
class MasterStep:
    """Train a model with 16-bit parameters through an optimizer that updates float32 copies.

        masters = MasterStep(model, make_optimizer)     # once; then in every step:
        loss.backward()                                 # per micro-batch; accumulates in .grad
        masters.step()

    Every parameter that requires a gradient has a master: a float32 copy, made once. A parameter
    shared by two layers has one master. make_optimizer([tensor, ...]) returns a torch.optim
    optimizer: call it once, with the masters.

    step moves each gradient to its master, in float32, and sets the parameter's .grad to None. The
    optimizer updates the masters. Then each parameter is set to its master's value, rounded to the
    parameter's dtype. If a parameter's .grad is None in this step, its master gets no gradient
    either, so there is no update and no weight decay. Frozen parameters do not change, and all
    parameters keep their dtype.

    Between two steps, a trainable parameter of n elements takes 2 n bytes, its master 4 n, and
    AdamW's two moments 8 n: 14 n in total. No gradients and no other copies are kept.

    Example: w = 1 in bfloat16, whose neighbors are 1 - 2^-8 and 1 + 2^-7, and plain SGD, which
    subtracts 2^-10 in every step. Without a master, w stays 1 forever. With one, it is 1 after one
    step and 1 - 2^-8 after four.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ):
        ### BEGIN SOLUTION
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer = make_optimizer(self.masters)
        ### END SOLUTION

    def step(self) -> None:
        """Move the gradients to the masters, update them, and round them into the parameters."""
        ### BEGIN SOLUTION
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
                parameter.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.data.copy_(master)
        ### END SOLUTION


# Exercise 10.4 | Overflow on one rank | 20 min | difficulty 2
def step_together(
    shards: list[Tensor],
    optimizer: torch.optim.Optimizer,
    scale: float,
    max_norm: float,
    group: dist.ProcessGroup,
    backoff: float = 0.5,
) -> float:
    """Clip and step on all ranks, or skip on all ranks; return the loss scale of the next step.

    Each rank owns a part of the gradient, as in ZeRO: the .grad of its `shards`, float32, which
    `optimizer` updates. The gradients have been multiplied by `scale`, the same on all ranks. Some
    .grad may be None, and a rank may have no gradient at all.

    The true gradient is that of all ranks' shards together, divided by `scale`.

    - If all its elements are finite, clip it: if its norm (the root of the sum of squares over all
      ranks) exceeds max_norm, every rank multiplies its part by max_norm / norm. Then every rank
      steps, and the scale stays the same.
    - If an element on any rank is infinite or NaN, no rank steps, no optimizer state changes, and
      the scale is multiplied by `backoff`.

    Either way, every .grad is None afterwards. Communication: exactly one all-reduce of at most 16
    bytes on every rank, whatever its gradients are.

    Example: on 2 ranks the shards' .grad are [24] and [32], scale 8, max_norm 2.5. The true
    gradient is [3] and [4], its norm 5: plain SGD at rate 1 subtracts 1.5 and 2, and both return 8.
    With [24] and [NaN] neither rank steps, and both return 4.
    """
    ### BEGIN SOLUTION
    grads = [shard.grad for shard in shards if shard.grad is not None]
    square = torch.zeros(())
    for grad in grads:
        grad /= scale
        square += grad.square().sum()
    dist.all_reduce(square, group=group)  # squares cannot cancel: inf and NaN reach every rank

    norm = square.sqrt()
    moved = bool(norm.isfinite())
    if moved:
        for grad in grads:
            grad *= (max_norm / norm).clamp(max=1)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return scale if moved else scale * backoff
    ### END SOLUTION


# Exercise 10.5 | An fp8 scale | 20 min | difficulty 2
def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round x to 8 bits with one scale; return (values, scale), where x is about values * scale.

    x: float32, bfloat16 or float16, not empty, not necessarily contiguous. Do not change it.
    dtype: torch.float8_e4m3fn or torch.float8_e5m2, whose largest numbers are 448 and 57344; see
    torch.finfo(dtype).max.

    scale has shape () and dtype float32, and is the largest |x| divided by the largest number of
    dtype; if x is all zeros, it is 1. values has the shape of x and the given dtype, and is x /
    scale, computed in float32 and converted. Clamp the quotients to the largest number before you
    convert: what a larger one becomes (the largest number, infinity or NaN) depends on the dtype,
    the device and the version of PyTorch. If x contains an infinity or a NaN, values * scale must
    contain one, too.

    Example: x = [-896, 2, 0], e4m3: scale 2, values [-448, 1, 0].
    """
    ### BEGIN SOLUTION
    limit = torch.finfo(dtype).max
    largest = x.abs().amax().float()
    scale = torch.where(largest == 0, 1.0, largest / limit)
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale
    ### END SOLUTION


def quantize_shard(
    shard: Tensor, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Like `quantize`, for a tensor that is sharded over the ranks, with one scale for all of it.

    Each rank passes its shard, which is not empty; shards may have different shapes. It returns
    the values of its shard, and the scale that one process would compute for the full tensor. No
    value is infinite or NaN. Communication: one all-reduce of one float32.

    Example: on 2 ranks the shards are [-896, 2] and [4, 0]; e4m3. Both return scale 2; the values
    are [-448, 1] and [2, 0].
    """
    ### BEGIN SOLUTION
    limit = torch.finfo(dtype).max
    largest = shard.abs().amax().float()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scale = torch.where(largest == 0, 1.0, largest / limit)
    return (shard.float() / scale).clamp(-limit, limit).to(dtype), scale
    ### END SOLUTION
