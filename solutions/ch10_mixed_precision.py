"""Exercises of chapter 10: mixed precision. Fewer bits for each number, and the same training.

Write a body, save, and ask `minitron check 10.1`, or check("10.1") in a notebook. Stuck:
`minitron hint 10.1`, three levels. Start again: `minitron reset 10.1`. The exercises do not build
on one another; take them in any order.

In 10.4 and in the second half of 10.5 every rank runs your code. `group` is the group of the ranks:
group.rank(), group.size(). Allowed is dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group):
tensor becomes the sum, or with dist.ReduceOp.MAX the largest, over the ranks, on all of them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


# Exercise 10.1 | Find the underflow | 20 min | difficulty 2
def flushed_share(gradients: dict[str, Tensor], scale: float = 1.0) -> float:
    """Which share of the gradients becomes zero in float16, if they are multiplied by `scale`?

    gradients: by name, float32, any shape, some without elements; they need not be contiguous.
    Count the values of all tensors together that are not zero, and which of them float16 rounds to
    zero; return the quotient, from 0 to 1, and 0 if all are zero. Infinity and NaN are not zero
    either: they count, as kept.

    The smallest normal number of float16 is 2^-14. Below it there are still the multiples of
    2^-24. A number becomes the nearest one; halfway, the one whose last bit is 0.

    Example: w = [2^-30, 2^-24, 0] and b = [1, -1]. Of 4 values that are not zero, 2^-30 is
    flushed: 1/4. With scale 64 it becomes 2^-24, and nothing is flushed.
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
    """The smallest of 1, 2, 4, 8 ... that is a good loss scale, or None.

    Multiplied by it, `max_share` of the gradients at most is flushed, as flushed_share counts, and
    none is infinite or NaN in float16. The largest number of float16 is 65504; what is nearer to
    it than to 65536 becomes 65504, the rest infinity. Gradients that are all zero are good as they
    are, so the answer is 1.

    Example: w = [2^-30, 2^-24, 0] and b = [1, -1]. With max_share 0.25 it is 1, with 0.1 it is 64.
    With b = [2000, -1] and 0.1 it is None: 64 times 2000 is too large.
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
    """Multiply the loss so that float16 gradients do not vanish, and find out by how much.

        scaler = LossScaler(optimizer, max_norm)        # once; then in every step:
        scaler.scaled(loss).backward()
        moved = scaler.step()

    scaled: the loss times self.value, which every gradient is then multiplied by. The loss itself
    stays as it is: it is logged.

    step begins with the .grad of the optimizer's parameters, in all of its parameter groups, some
    of them None. The true gradient is .grad / self.value. If all of it is finite, it is clipped: if
    its norm, the root of the sum of the squares of all elements, exceeds max_norm, it is multiplied
    by max_norm / norm. Then the optimizer takes its step. If an element is infinite or NaN, there
    is none: weights, and what the optimizer remembers, stay as they are. Return whether there was a
    step. Either way every .grad is None afterwards.

    self.value follows: after a skipped step it is multiplied by `backoff`; after `interval` steps
    in a row that were not skipped, by `growth`, and the count starts again.

    Example: value 8, interval 2, and gradients that are fine, fine, NaN, fine, fine: the value
    afterwards is 8, 16, 8, 8, 16.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, max_norm: float, initial: float = 2.0**16,
        growth: float = 2.0, backoff: float = 0.5, interval: int = 2000,
    ):
        self.optimizer, self.max_norm = optimizer, max_norm
        self.value, self.growth, self.backoff, self.interval = initial, growth, backoff, interval
        self.num_good = 0  # steps in a row

    def scaled(self, loss: Tensor) -> Tensor:
        """What backward() is called on."""
        ### BEGIN SOLUTION
        return loss * self.value
        ### END SOLUTION

    def step(self) -> bool:
        """Unscale, then clip and step, or skip; returns whether there was a step."""
        ### BEGIN SOLUTION
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]
                      if p.grad is not None]
        for parameter in parameters:
            parameter.grad /= self.value
        norm = nn.utils.clip_grad_norm_(parameters, self.max_norm)

        moved = bool(norm.isfinite())  # one element that is not, and neither is the norm
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
    """Train a model of 16-bit parameters by an optimizer that updates float32 copies of them.

        masters = MasterStep(model, make_optimizer)     # once; then in every step:
        loss.backward()                                 # per micro-batch; adds up in .grad
        masters.step()

    Every parameter that requires a gradient has a master: a float32 copy, made once. A parameter
    that two layers share has one. make_optimizer([tensor, ...]) returns a torch.optim optimizer:
    call it once, for the masters.

    step: each gradient goes to its master as float32, and the parameter's .grad becomes None. The
    optimizer updates the masters; then each parameter gets its master's value, rounded to what it
    can hold. A parameter whose .grad is None, in this step, gets no update, nor weight decay: its
    master has no gradient. Frozen parameters stay as they are, and all keep their dtype.

    Between two steps a trainable parameter of n elements holds 2 n bytes, its master 4 n, AdamW's
    two moments 8 n: 14 n in all. No gradient is held, and no other copy.

    Example: w = 1 in bfloat16, whose neighbors are 1 - 2^-8 and 1 + 2^-7, and plain SGD, which
    subtracts 2^-10 in every step. Without a master w stays 1 for ever. With one it is 1 after one
    step, 1 - 2^-8 after four.
    """

    def __init__(
        self, model: nn.Module,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ):
        ### BEGIN SOLUTION
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer = make_optimizer(self.masters)
        ### END SOLUTION

    def step(self) -> None:
        """Hand the gradients over, update the masters, round them into the parameters."""
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
    shards: list[Tensor], optimizer: torch.optim.Optimizer, scale: float, max_norm: float,
    group: dist.ProcessGroup, backoff: float = 0.5,
) -> float:
    """Clip and step on all ranks, or skip on all ranks; returns the loss scale of the next step.

    Each rank owns a part of the gradient, as in ZeRO: the .grad of its `shards`, float32, which
    `optimizer` updates. They are multiplied by `scale`, which is the same on all ranks. A .grad may
    be None, and a rank may have none at all.

    The true gradient is that of all ranks' shards, divided by `scale`. If all of it is finite, it
    is clipped: if its norm, the root of the sum of the squares of all elements on all ranks,
    exceeds max_norm, every rank multiplies its part by max_norm / norm. Then every rank steps, and
    the scale stays. If an element on any rank is infinite or NaN, no rank steps, nothing of its
    optimizer changes, and the scale is multiplied by `backoff`. Either way every .grad is None
    afterwards.

    On the wire: one all-reduce of 16 bytes at most, on every rank, whatever it holds.

    Example: on 2 ranks the shards' .grad are [24] and [32], scale 8, max_norm 2.5. The true
    gradient is [3] and [4], its norm 5: plain SGD at rate 1 subtracts 1.5 and 2, and both return 8.
    With [24] and [NaN] neither rank moves, and both return 4.
    """
    ### BEGIN SOLUTION
    grads = [shard.grad for shard in shards if shard.grad is not None]
    square = torch.zeros(())
    for grad in grads:
        grad /= scale
        square += grad.square().sum()
    dist.all_reduce(square, group=group)  # squares never cancel: inf and NaN arrive everywhere

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
    """Round x to 8 bits with one scale; returns values and scale: x is about values * scale.

    x: float32, bfloat16 or float16, not empty. dtype: torch.float8_e4m3fn, whose largest number is
    448, or torch.float8_e5m2, 57344: torch.finfo(dtype).max. values has x's shape and that dtype;
    scale, shape () and float32, is the largest |x| over that number. If x is all zeros, scale is 1
    and the values are 0. Divide in float32, and let no quotient lie beyond the largest number: what
    a conversion makes of one depends on dtype, device and version of PyTorch, the largest number,
    infinity or NaN. But if x has an infinity or a NaN, so has values * scale. x, which need not be
    contiguous, keeps its values: the caller needs them.

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
    """As `quantize`, of a tensor that is cut over the ranks: all have the whole tensor's scale.

    Each rank has its shard, not empty and not always of the same shape, and returns the shard's
    values, and the scale that one process would find for the whole tensor. Here no value is
    infinite or NaN. On the wire: one all-reduce of one float32.

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
