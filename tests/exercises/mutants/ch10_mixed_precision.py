"""Right answers written differently, and wrong ones with what the graders must say of them.

A docstring states the idea behind the answer.
"""

import math
from contextlib import ContextDecorator
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

Optimizer = TypeVar("Optimizer")

# 10.1


def joined(gradients):
    return torch.cat([values.flatten() for values in gradients.values()])


def nonzero(gradients):
    values = joined(gradients)
    return values[values != 0]


def right_by_threshold(gradients, scale=1.0):
    """Half of the smallest number is what rounds to zero."""
    values = nonzero(gradients).double() * scale
    return (values.abs() <= 2.0**-25).double().mean().item() if len(values) else 0.0


def right_by_numbers(gradients, scale=1.0):
    """One value after the other."""
    values = [x for tensor in gradients.values() for x in tensor.flatten().tolist() if x != 0.0]
    flushed = sum(abs(x) * scale <= 2.0**-25 for x in values)
    return torch.tensor(flushed / max(1, len(values)))


def counts_zeros(gradients, scale=1.0):
    """The share of all values: zeros are values."""
    values = nonzero(gradients)
    return ((values * scale).half() == 0).sum().item() / len(joined(gradients))


def zeros_are_flushed(gradients, scale=1.0):
    """What is zero in float16: it need not have been something else before."""
    return ((joined(gradients) * scale).half() == 0).float().mean().item()


def below_normal(gradients, scale=1.0):
    """finfo.tiny is the smallest number: of the normal ones."""
    values = nonzero(gradients) * scale
    return (values.abs() < torch.finfo(torch.float16).tiny).float().mean().item()


def below_subnormal(gradients, scale=1.0):
    """Below the smallest number is zero: rounding goes up as well."""
    values = nonzero(gradients) * scale
    return (values.abs() < 2.0**-24).float().mean().item()


def halfway_up(gradients, scale=1.0):
    """Halfway is rounded up: to even it is."""
    values = nonzero(gradients) * scale
    return (values.abs() < 2.0**-25).float().mean().item()


def mean_of_shares(gradients, scale=1.0):
    """Each layer's share, and their mean."""
    shares = []
    for values in gradients.values():
        values = values[values != 0]
        shares.append(((values * scale).half() == 0).float().mean().item())
    return sum(shares) / len(shares)


def scales_too_late(gradients, scale=1.0):
    """Converts, then multiplies: zero stays zero."""
    values = nonzero(gradients)
    return (values.half() * scale == 0).float().mean().item()


def finite_alone(gradients, scale=1.0):
    """What is not finite is no gradient: it counts neither way."""
    values = nonzero(gradients)
    values = values[values.isfinite()]
    return ((values * scale).half() == 0).sum().item() / max(1, len(values))


def keeps_what_is_finite(gradients, scale=1.0):
    """What is neither zero nor infinite afterwards is kept: infinity is an error of its own."""
    before = nonzero(gradients)
    after = (before * scale).half()
    kept = (after != 0) & after.isfinite()
    return 1 - kept.sum().item() / max(1, len(before)) if len(before) else 0.0


def in_place(gradients, scale=1.0):
    """Scales what it was given."""
    for values in gradients.values():
        values *= scale
    return right_by_threshold(gradients)


def divides_by_nothing(gradients, scale=1.0):
    """A mean is always there: not of nothing."""
    return ((nonzero(gradients) * scale).half() == 0).float().mean().item()


def fits(gradients, scale, max_share, largest=65520.0):
    largest_value = joined(gradients).double().abs().max().item() * scale  # NaN compares false
    return largest_value < largest and right_by_threshold(gradients, scale) <= max_share


def first_of(scales, gradients, max_share, **limits):
    return next((s for s in scales if fits(gradients, s, max_share, **limits)), None)


POWERS = [2.0**k for k in range(126)]


def right_by_search(gradients, max_share):
    """Tries all powers of two that float32 has use for."""
    return first_of(POWERS, gradients, max_share)


def right_from_the_largest(gradients, max_share):
    """From the largest value: how far can it go? Then down, while it is good."""
    best = None
    for scale in reversed(POWERS):
        best = scale if fits(gradients, scale, max_share) else best
    return best


def largest_scale(gradients, max_share):
    """As large as possible: nothing is lost then."""
    return first_of(POWERS[::-1], gradients, max_share)


def begins_with_two(gradients, max_share):
    """A scale is more than 1: when none is needed too."""
    return first_of(POWERS[1:], gradients, max_share)


def never_none(gradients, max_share):
    """Saves the small ones: whatever becomes of the large ones."""
    return next(s for s in POWERS if right_by_threshold(gradients, s) <= max_share)


def strict_limit(gradients, max_share):
    """65504 is the largest number: what is larger is infinite."""
    return first_of(POWERS, gradients, max_share, largest=65504.0000001)


def exponent(gradients, max_share):
    """The power: that is k."""
    scale = right_by_search(gradients, max_share)
    return None if scale is None else math.log2(scale)


def any_factor(gradients, max_share):
    """By how much the smallest value is too small."""
    smallest = nonzero(gradients).abs().min().item() if len(nonzero(gradients)) else 1.0
    scale = max(1.0, 1.01 * 2.0**-25 / smallest)
    return scale if fits(gradients, scale, max_share) else None


def usual_limit(gradients, max_share):
    """2^24 is far more than anybody uses."""
    return first_of(POWERS[:25], gradients, max_share)


def less_than_the_share(gradients, max_share):
    """Less is flushed than may be: as much as may be is fine too."""
    return next(
        (
            s
            for s in POWERS
            if fits(gradients, s, max_share)
            and right_by_threshold(gradients, s) < max(max_share, 1e-9)
        ),
        None,
    )


def without_infinity(gradients, max_share):
    """Looks at what is finite."""
    values = joined(gradients)
    return right_by_search({"w": values[values.isfinite()]}, max_share)


# 10.2


class Scaler:
    """The answer of the course, in parts to be replaced."""

    def __init__(
        self, optimizer, max_norm, initial=2.0**16, growth=2.0, backoff=0.5, interval=2000
    ):
        self.optimizer, self.max_norm = optimizer, max_norm
        self.value, self.growth, self.backoff, self.interval = initial, growth, backoff, interval
        self.num_good = 0

    def parameters(self):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p for p in parameters if p.grad is not None]

    def scaled(self, loss):
        return self.value * loss

    def step(self):
        self.unscale()
        norm = self.clip()
        moved = self.is_finite(norm)
        if moved:
            self.optimizer.step()
            self.count()
        else:
            self.skip()
        self.drop()
        return moved

    def unscale(self):
        for p in self.parameters():
            p.grad.div_(self.value)

    def clip(self):
        return nn.utils.clip_grad_norm_(self.parameters(), self.max_norm)

    def is_finite(self, norm):
        return bool(norm.isfinite())

    def count(self):
        self.num_good += 1
        if self.num_good == self.interval:
            self.value *= self.growth
            self.num_good = 0

    def skip(self):
        self.value *= self.backoff
        self.num_good = 0

    def drop(self):
        self.optimizer.zero_grad()


class RightElementByElement(Scaler):
    """Looks at every element first, clips by hand, and has the scale as a tensor."""

    def __init__(self, *args):
        super().__init__(*args)
        self.value = torch.tensor(self.value)

    def step(self):
        parameters = self.parameters()
        if not all(p.grad.isfinite().all() for p in parameters):
            self.skip()
            self.drop()
            return False
        grads = [p.grad / self.value for p in parameters]
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad * min(1.0, self.max_norm / max(norm.item(), 1e-12))
        self.optimizer.step()
        self.count()
        self.drop()
        return True


class RightCounting(Scaler, ContextDecorator, Generic[Optimizer]):
    """Counts from the last skipped step on, and grows whenever it can be divided.

    Its bases come from Python's library, whose functions are not taken for the learner's.
    """

    def count(self):
        self.num_good += 1
        if self.num_good % self.interval == 0:
            self.value = self.value * self.growth


class ClipsFirst(Scaler):
    """Clip, then unscale: by the norm of what is not the gradient."""

    def unscale(self):
        self.norm = super().clip()
        super().unscale()

    def clip(self):
        return self.norm


class NeverUnscales(Scaler):
    """AdamW does not care for a factor: clipping does, and so does SGD."""

    def unscale(self):
        pass


class NeverClipped(Scaler):
    """Looks at the norm: and leaves the gradient as it is."""

    def clip(self):
        return torch.stack([p.grad.norm() for p in self.parameters()]).norm()


class LooksForInfinity(Scaler):
    """An overflow is infinite: inf minus inf is not."""

    def is_finite(self, norm):
        return not bool(norm.isinf())


class LooksForNaN(Scaler):
    """NaN is what destroys a model: infinity becomes one."""

    def is_finite(self, norm):
        return not bool(norm.isnan())


class LooksAtTheLoss(Scaler):
    """An overflow is seen in the loss: gradients overflow by themselves."""

    def scaled(self, loss):
        self.finite = bool(loss.isfinite())
        return super().scaled(loss)

    def is_finite(self, norm):
        return self.finite


class MultipliesAlways(Scaler):
    """Clipping is a multiplication: only where the norm is too large."""

    def clip(self):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        for p in self.parameters():
            p.grad.mul_(self.max_norm / norm)
        return norm


class ZerosInstead(Scaler):
    """Overflowed gradients are set to zero: the optimizer steps all the same."""

    def skip(self):
        for p in self.parameters():
            p.grad.zero_()
        self.optimizer.step()
        super().skip()


class BringsBack(Scaler):
    """Steps, and takes the weights back if it was wrong: what the optimizer remembers stays."""

    def skip(self):
        weights = [(p, p.detach().clone()) for p in self.parameters()]
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        for p, weight in weights:
            p.data.copy_(weight)
        super().skip()


class NotInARow(Scaler):
    """Counts good steps: all that there have been."""

    def skip(self):
        self.value *= self.backoff


class GrowsOnAndOn(Scaler):
    """There have been enough good steps: from then on there always are."""

    def count(self):
        self.num_good += 1
        if self.num_good >= self.interval:
            self.value *= self.growth


class GrowsLate(Scaler):
    """More than interval steps: one more."""

    def count(self):
        if self.num_good == self.interval:
            self.value *= self.growth
            self.num_good = 0
        self.num_good += 1


class KeepsTheOverflow(Scaler):
    """A step drops the gradients: a skipped one has none to drop."""

    def count(self):
        super().count()
        super().drop()

    def drop(self):
        pass


# 10.3


class Masters:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, model, make_optimizer):
        self.make_optimizer = make_optimizer
        self.pairs = [(p, self.copy(p)) for p in self.parameters(model)]
        self.optimizer = make_optimizer([master for _, master in self.pairs])

    def parameters(self, model):
        return [p for p in model.parameters() if p.requires_grad]

    def copy(self, p):
        return p.detach().clone().to(torch.float32)

    def step(self):
        for p, master in self.pairs:
            self.copy_gradients(p, master)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in self.pairs:
                self.round(p, master)
        self.free()

    def copy_gradients(self, p, master):
        master.grad = None if p.grad is None else p.grad.float()
        p.grad = None

    def round(self, p, master):
        p.copy_(master)

    def free(self):
        for _, master in self.pairs:
            master.grad = None


class RightAsParameters(Masters):
    """The masters are parameters too; the weights get new data."""

    def copy(self, p):
        return nn.Parameter(p.float())

    def round(self, p, master):
        p.data = master.detach().to(p.dtype)


class RightOneByOne(Masters):
    """An optimizer's hook does the rounding; what has no gradient is left alone."""

    def __init__(self, model, make_optimizer):
        super().__init__(model, make_optimizer)
        self.optimizer.register_step_post_hook(lambda *_: self.after())

    def step(self):
        for p, master in self.pairs:
            if p.grad is not None:
                self.copy_gradients(p, master)
        self.optimizer.step()

    def after(self):
        for p, master in self.pairs:
            if master.grad is not None:
                p.data[...] = master.data
                master.grad = None


class WithoutMasters(Masters):
    """The optimizer has the parameters: in 16 bits small updates are lost."""

    def __init__(self, model, make_optimizer):
        self.model = model
        self.optimizer = make_optimizer(self.parameters(model))

    def step(self):
        self.optimizer.step()
        self.model.zero_grad()


class MastersOf16Bits(Masters):
    """A copy is a copy: it has the same dtype."""

    def copy(self, p):
        return p.detach().clone()

    def copy_gradients(self, p, master):
        master.grad, p.grad = p.grad, None


class Anew(Masters):
    """The weights are the truth: the masters are made of them for every step."""

    def copy_gradients(self, p, master):
        super().copy_gradients(p, master)
        master.copy_(p.detach())


class AnewAsAWhole(Masters):
    """Masters are made when they are needed: the optimizer too."""

    def step(self):
        self.pairs = [(p, self.copy(p)) for p, _ in self.pairs]
        self.optimizer = self.make_optimizer([master for _, master in self.pairs])
        super().step()


class SharedTwice(Masters):
    """By module: two of them have the same parameter."""

    def parameters(self, model):
        return [
            p
            for module in model.modules()
            for p in module.parameters(recurse=False)
            if p.requires_grad
        ]


class FrozenToo(Masters):
    """All parameters: what has no gradient does not move."""

    def parameters(self, model):
        return list(model.parameters())


class Zeros(Masters):
    """No gradient is a gradient of zero: not for weight decay."""

    def copy_gradients(self, p, master):
        master.grad = torch.zeros_like(master) if p.grad is None else p.grad.float()
        p.grad = None


class Stale(Masters):
    """Hands over what is there: what is not there leaves the last one."""

    def copy_gradients(self, p, master):
        if p.grad is not None:
            super().copy_gradients(p, master)

    def free(self):
        pass


class NeverRounds(Masters):
    """The masters are trained: the model is not."""

    def round(self, p, master):
        pass


class Float32Model(Masters):
    """The parameter gets its master: and its dtype."""

    def round(self, p, master):
        p.data = master


class Truncates(Masters):
    """The upper 16 bits of a float32 are a bfloat16: rounded towards zero."""

    def round(self, p, master):
        cut = (master.view(torch.int32) & -65536).view(torch.float32)
        p.copy_(cut if p.dtype == torch.bfloat16 else master)


class KeepsTheirGradients(Masters):
    """The next step overwrites the masters' gradients: until then they are held."""

    def free(self):
        pass


class KeepsGradients(Masters):
    """Copies gradients: those of the model stay."""

    def copy_gradients(self, p, master):
        master.grad = None if p.grad is None else p.grad.float()


# 10.4


def unscaled(shards, scale):
    grads = [shard.grad for shard in shards if shard.grad is not None]
    for grad in grads:
        grad.div_(scale)
    return grads


def squares(grads):
    return sum((grad**2).sum() for grad in grads) + torch.zeros(())


def clip(grads, norm, max_norm):
    for grad in grads:
        grad.mul_(torch.clamp(max_norm / norm, max=1.0))


def right_with_a_flag(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Sends the square and, beside it, whether something has overflowed."""
    grads = unscaled(shards, scale)
    values = torch.cat([torch.zeros(1), *(grad.flatten() for grad in grads)])
    overflow = not values.isfinite().all()
    message = torch.tensor([0.0 if overflow else float(values.square().sum()), float(overflow)])
    dist.all_reduce(message, group=group)
    square, num_overflows = message.tolist()
    if num_overflows == 0:
        for grad in grads:
            grad *= min(1.0, max_norm / max(square, 1e-30) ** 0.5)
        optimizer.step()
    for shard in shards:
        shard.grad = None
    return backoff * scale if num_overflows else scale


def right_scaled_norm(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Measures what is scaled, in float64, and divides once, by all there is to divide by."""
    there = [shard for shard in shards if shard.grad is not None]
    square = torch.tensor(
        [sum(s.grad.double().square().sum().item() for s in there)], dtype=torch.float64
    )
    dist.all_reduce(square, op=dist.ReduceOp.SUM, group=group)
    norm = square.item() ** 0.5 / scale
    if norm < float("inf"):
        for shard in there:
            shard.grad = shard.grad / (scale * max(1.0, norm / max_norm))
        optimizer.step()
    else:
        scale *= backoff
    optimizer.zero_grad()
    return scale


def together(
    shards,
    optimizer,
    scale,
    max_norm,
    group,
    backoff,
    agree,
    unscale=unscaled,
    clip=clip,
    drop=True,
):
    """The answer of the course, in parts to be replaced; agree returns norm and whether to step."""
    grads = unscale(shards, scale)
    norm, moved = agree(grads, group)
    if moved:
        clip(grads, norm, max_norm)
        optimizer.step()
    if drop:
        optimizer.zero_grad()
    return scale if moved else scale * backoff


def of_all(grads, group):
    square = squares(grads)
    dist.all_reduce(square, group=group)
    return square.sqrt(), bool(square.isfinite())


def decides_alone(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Each rank looks at what it owns: the others do not know."""

    def agree(grads, group):
        norm = squares(grads).sqrt()
        return norm, bool(norm.isfinite())

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def flag_alone(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """All agree on the overflow: and each clips by its own norm."""

    def agree(grads, group):
        norm = squares(grads).sqrt()
        overflow = 1.0 - norm.isfinite().float()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        return norm, not bool(overflow)

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def largest_norm(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """The largest norm is infinite if one is: it is not the whole gradient's."""

    def agree(grads, group):
        norm = squares(grads).sqrt()
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm, bool(norm.isfinite())

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def adds_norms(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Each rank has a norm, all-reduce adds: squares add up, norms do not."""

    def agree(grads, group):
        norm = squares(grads).sqrt()
        dist.all_reduce(norm, group=group)
        return norm, bool(norm.isfinite())

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def averages_squares(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Gradients are averaged over ranks: here each rank has others."""

    def agree(grads, group):
        norm, moved = of_all(grads, group)
        return norm / group.size() ** 0.5, moved

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def forgets_the_root(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """The sum of squares is the norm: its square."""

    def agree(grads, group):
        norm, moved = of_all(grads, group)
        return norm.square(), moved

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def multiplies_always(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Clipping is a multiplication: only where the norm is too large."""

    def clip(grads, norm, max_norm):
        for grad in grads:
            grad.mul_(max_norm / norm)

    return together(shards, optimizer, scale, max_norm, group, backoff, of_all, clip=clip)


def two_messages(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """A flag first, then the norm: it would have said so."""

    def agree(grads, group):
        overflow = 1.0 - squares(grads).isfinite().float()
        dist.all_reduce(overflow, group=group)
        norm, _ = of_all(grads, group)
        return norm, not bool(overflow)

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def sends_gradients(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """All-reduces squares, element by element, and adds them up afterwards."""

    def agree(grads, group):
        flat = torch.cat([torch.zeros(0), *grads])
        flat = torch.cat([flat, torch.zeros(16 - len(flat))]).square()
        dist.all_reduce(flat, group=group)
        return flat.sum().sqrt(), bool(flat.isfinite().all())

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def tells_when_it_overflows(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Who overflows tells the others: they do not listen."""

    def agree(grads, group):
        if squares(grads).isfinite():
            return squares(grads).sqrt(), True
        return of_all(grads, group)

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def nothing_to_do(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Without a gradient there is nothing to do: the others wait."""
    if all(shard.grad is None for shard in shards):
        return scale
    return together(shards, optimizer, scale, max_norm, group, backoff, of_all)


def steps_first(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """The scale is for the next step: so look afterwards."""

    def agree(grads, group):
        norm, moved = of_all(grads, group)
        if not moved:
            optimizer.step()
        return norm, moved

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def backs_off_alone(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """All skip; the scale is lowered where it was too large."""
    own = [shard.grad.clone() for shard in shards if shard.grad is not None]
    together(shards, optimizer, scale, max_norm, group, backoff, of_all)
    return scale if squares(own).isfinite() else scale * backoff


def never_divides(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Clipping brings the gradient to its norm: the small ones not."""

    def unscale(shards, scale):
        return unscaled(shards, 1.0)

    return together(shards, optimizer, scale, max_norm, group, backoff, of_all, unscale=unscale)


def keeps_gradients(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """The next backward pass starts anew: it adds."""
    return together(shards, optimizer, scale, max_norm, group, backoff, of_all, drop=False)


def all_there_are(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """The group of all ranks is the one that is meant."""

    def agree(grads, group):
        return of_all(grads, None)

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


def skips_by_zeros(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """A step without a gradient changes nothing: what momentum holds does."""

    def agree(grads, group):
        norm, moved = of_all(grads, group)
        if not moved:
            for grad in grads:
                grad.zero_()
            optimizer.step()
        return norm, moved

    return together(shards, optimizer, scale, max_norm, group, backoff, agree)


# 10.5


def rounded(x, scale, dtype):
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def right_reciprocal(x, dtype):
    """Multiplies by the inverse scale, and asks whether there is anything to scale."""
    x = x.detach().to(torch.float32)
    largest, limit = torch.linalg.vector_norm(x, ord=math.inf), torch.finfo(dtype).max
    if largest == 0:
        return torch.zeros_like(x).to(dtype), torch.ones(())
    values = x * (limit / largest)
    return torch.clip(values, -limit, limit).to(dtype), largest / limit


def right_by_rows(x, dtype):
    """Element by element on a flat copy, back in its shape."""
    flat = x.flatten().float()
    largest = torch.maximum(flat.max(), -flat.min())
    scale = torch.tensor(1.0) if largest == 0 else largest / torch.finfo(dtype).max
    values, _ = rounded(flat, scale, dtype)
    return values.reshape(x.shape), scale


def right_scale(x, dtype):
    largest = x.abs().max().float()
    return torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max)


def unscaled_cast(x, dtype):
    """The dtype has an exponent: but a short one."""
    return x.float().to(dtype), torch.ones(())


def divides_in_16_bits(x, dtype):
    """8 bits need no better quotient than 16: but it is rounded twice."""
    scale, limit = right_scale(x, dtype), torch.finfo(dtype).max
    return (x / scale).clamp(-limit, limit).to(dtype), scale


def without_abs(x, dtype):
    """The largest value: a negative one can be larger."""
    scale = x.max().float() / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def inverse(x, dtype):
    """The scale is what x is multiplied by: values are divided by it."""
    values, scale = rounded(x, right_scale(x, dtype), dtype)
    return values, 1 / scale


def zero_by_zero(x, dtype):
    """Divides by the largest: also when it is zero."""
    return rounded(x, x.abs().max().float() / torch.finfo(dtype).max, dtype)


def scale_like_x(x, dtype):
    """The scale has x's dtype: it is small for 16 bits."""
    scale = x.abs().max() / torch.finfo(dtype).max
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values, _ = rounded(x, scale, dtype)
    return values, scale.float()


def always_e4m3(x, dtype):
    """448 is the largest: of the one dtype."""
    largest = x.abs().max().float()
    scale = torch.where(largest == 0, 1.0, largest / 448.0)
    return (x.float() / scale).to(dtype), scale


def by_rows(x, dtype):
    """A scale for each row is more exact: it is not one scale."""
    scale = x.float().abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
    return rounded(x, scale.clamp(min=1e-30), dtype)


def whole_numbers(x, dtype):
    """Rounds to whole numbers: as for int8."""
    scale = right_scale(x, dtype)
    return (x.float() / scale).round().to(dtype), scale


def hides_overflow(x, dtype):
    """Fills in for what is not finite: nobody notices."""
    x = x.float().nan_to_num(0.0, 0.0, 0.0)
    return rounded(x, right_scale(x, dtype), dtype)


def float32_values(x, dtype):
    """Rounds there and back: 4 bytes each."""
    values, scale = rounded(x, right_scale(x, dtype), dtype)
    return values.float(), scale


def never_clamps(x, dtype):
    """The largest value becomes the largest number: or a rounding more."""
    scale = right_scale(x, dtype)
    return (x.float() / scale).to(dtype), scale


def agreed(largest, group, op=dist.ReduceOp.MAX):
    dist.all_reduce(largest, op=op, group=group)
    return largest


def right_agreed_scale(shard, dtype, group):
    """Agrees on the scale, of shape (1,) on the way."""
    scale = agreed(shard.abs().float().max().reshape(1) / torch.finfo(dtype).max, group)[0]
    return rounded(shard, scale if scale > 0 else torch.ones(()), dtype)


def right_asynchronously(shard, dtype, group):
    """Converts while the message travels."""
    largest = shard.float().abs().amax()
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True)
    x = shard.float()
    work.wait()
    return rounded(x, torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0), dtype)


def own_scale(shard, dtype, group):
    """Each shard has its scale: the whole tensor one."""
    return rounded(shard, right_scale(shard, dtype), dtype)


def adds_them_up(shard, dtype, group):
    """All-reduce: it adds, if not told otherwise."""
    largest = agreed(shard.abs().max().float(), group, dist.ReduceOp.SUM)
    return rounded(shard, torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max), dtype)


def largest_of_scales(shard, dtype, group):
    """Agrees on a scale that is 1 for a shard of zeros: the largest then."""
    return rounded(shard, agreed(right_scale(shard, dtype), group), dtype)


def nothing_to_scale(shard, dtype, group):
    """A shard of zeros needs no scale: the others wait for it."""
    if not shard.any():
        return torch.zeros_like(shard).to(dtype), torch.ones(())
    return rounded(shard, agreed(shard.abs().max().float(), group) / torch.finfo(dtype).max, dtype)


def scales_first(shard, dtype, group):
    """Rounds by its own scale, and returns that of all."""
    values, scale = rounded(shard, right_scale(shard, dtype), dtype)
    largest = agreed(shard.abs().max().float(), group)
    return values, torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max)


def signed(shard, dtype, group):
    """The largest of the largest: without its sign."""
    largest = agreed(shard.max().float(), group)
    return rounded(shard, torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max), dtype)


def never_clamps_a_shard(shard, dtype, group):
    """As never_clamps, agreed upon."""
    largest = agreed(shard.abs().max().float(), group)
    scale = torch.where(largest == 0, 1.0, largest / torch.finfo(dtype).max)
    return (shard.float() / scale).to(dtype), scale


def zeros_everywhere(shard, dtype, group):
    """A shard of zeros is none of a whole tensor: it is zero all the same."""
    return rounded(shard, agreed(shard.abs().max().float(), group) / torch.finfo(dtype).max, dtype)


# What once passed


def three_digits(gradients, scale=1.0):
    """Three digits are enough for a share: one in a thousand is lost."""
    return round(right_by_numbers(gradients, scale).item(), 3)


def flat_views(gradients, scale=1.0):
    """Flattens by view: what is contiguous."""
    return right_by_threshold({name: v.view(-1) for name, v in gradients.items()}, scale)


def row_by_row(gradients, scale=1.0):
    """Goes through the first dimension: of a tensor of shape () there is none."""
    rows = [row for values in gradients.values() for row in values]
    return right_by_threshold({str(i): row for i, row in enumerate(rows)}, scale) if rows else 0.0


def sixty_four(gradients, max_share):
    """2^63 is more than anything needs: a float32 is as small as 2^-149."""
    return first_of(POWERS[:64], gradients, max_share)


def about_the_share(gradients, max_share):
    """A thousandth more does not matter: max_share is the most."""
    return right_by_search(gradients, max_share + 1e-3)


class FirstGroup(Scaler):
    """The parameters are in param_groups[0]: those of the first group."""

    def parameters(self):
        return [p for p in self.optimizer.param_groups[0]["params"] if p.grad is not None]


class ClipsEachGroup(Scaler):
    """Clips group by group, each by its own norm."""

    def clip(self):
        norms = [
            nn.utils.clip_grad_norm_(group["params"], self.max_norm)
            for group in self.optimizer.param_groups
        ]
        return torch.stack(norms).norm()


class DividesByZero(Scaler):
    """max_norm over the norm, as floats: the norm may be 0."""

    def clip(self):
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in self.parameters()))
        for p in self.parameters():
            p.grad *= min(1.0, self.max_norm / norm)
        return torch.tensor(norm)


class ZeroByZero(Scaler):
    """Brings the gradient to length 1, then to its own or max_norm: 0 / 0 is NaN."""

    def clip(self):
        norm = torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
        for p in self.parameters():
            p.grad *= norm.clamp(max=self.max_norm) / norm
        return norm


class SkipsZero(Scaler):
    """Without a gradient there is nothing to do: momentum and weight decay do it."""

    def is_finite(self, norm):
        return bool(norm.isfinite()) and bool(norm > 0)


class OneAtLeast(Scaler):
    """A scale below 1 makes small what is small."""

    def skip(self):
        super().skip()
        self.value = max(self.value, 1.0)


class NoMoreThanUsual(Scaler):
    """2^24 is the most that anybody uses."""

    def count(self):
        super().count()
        self.value = min(self.value, 2.0**24)


class ScalesInPlace(Scaler):
    """Multiplies the loss itself: and it is the scaled one that is logged."""

    def scaled(self, loss):
        loss *= self.value
        return loss


class ZeroIsNone(Masters):
    """A gradient of zeros changes nothing: but for momentum and weight decay."""

    def step(self):
        for parameter, _ in self.pairs:
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None
        super().step()


class CopiesInNumpy(Masters):
    """Keeps what the masters began with, in NumPy."""

    def __init__(self, model, make_optimizer):
        super().__init__(model, make_optimizer)
        self.first = [master.detach().numpy().copy() for _, master in self.pairs]


class CopiesInBytes(Masters):
    """Keeps what the masters were in the last step, as bytes."""

    def step(self):
        super().step()
        self.last = [master.detach().numpy().tobytes() for _, master in self.pairs]


def first_group(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """The shards are in param_groups[0]: those of the first group."""
    return right_with_a_flag(
        optimizer.param_groups[0]["params"], optimizer, scale, max_norm, group, backoff
    )


def divides_by_zero(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """max_norm over the norm, as floats: the norm may be 0."""

    def clip(grads, norm, max_norm):
        for grad in grads:
            grad *= min(1.0, max_norm / norm.item())

    return together(shards, optimizer, scale, max_norm, group, backoff, of_all, clip=clip)


def zero_by_zero_norm(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Brings the gradient to length 1, then to its own or max_norm: 0 / 0 is NaN."""

    def clip(grads, norm, max_norm):
        for grad in grads:
            grad *= norm.clamp(max=max_norm) / norm

    return together(shards, optimizer, scale, max_norm, group, backoff, of_all, clip=clip)


def skips_zero(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """Without a gradient there is nothing to do: momentum and weight decay do it."""
    grads = unscaled(shards, scale)
    norm, moved = of_all(grads, group)
    if moved and norm > 0:
        clip(grads, norm, max_norm)
        optimizer.step()
    for shard in shards:
        shard.grad = None
    return scale if moved else scale * backoff


def one_at_least(shards, optimizer, scale, max_norm, group, backoff=0.5):
    """A scale below 1 makes small what is small."""
    return max(1.0, right_with_a_flag(shards, optimizer, scale, max_norm, group, backoff))


def in_place_of_x(x, dtype):
    """x.float() is a copy: not of float32."""
    scale, limit = right_scale(x, dtype), torch.finfo(dtype).max
    quotients = x.float()
    quotients /= scale
    return quotients.clamp_(-limit, limit).to(dtype), scale


def flat_view(x, dtype):
    """Flattens by view: what is contiguous."""
    values, scale = right_reciprocal(x.view(-1), dtype)
    return values.view(x.shape), scale


def hides_overflow_of_e5m2(x, dtype):
    """What is not finite becomes finite: in the dtype that has an infinity of its own."""
    return right_reciprocal(x.nan_to_num() if dtype == torch.float8_e5m2 else x, dtype)


def hides_minus_infinity(x, dtype):
    """Looks for inf and NaN: there is -inf."""
    return right_reciprocal(torch.where(x == -math.inf, torch.zeros_like(x), x), dtype)


def in_place_of_shard(shard, dtype, group):
    """shard.float() is a copy: not of float32."""
    largest, limit = agreed(shard.abs().max().float(), group), torch.finfo(dtype).max
    scale = torch.where(largest == 0, 1.0, largest / limit)
    quotients = shard.float()
    quotients /= scale
    return quotients.clamp_(-limit, limit).to(dtype), scale


def flat_view_of_shard(shard, dtype, group):
    """Flattens by view: what is contiguous."""
    values, scale = right_asynchronously(shard.view(-1), dtype, group)
    return values.view(shard.shape), scale


RIGHT_ANSWERS = {
    "flushed_share": [right_by_threshold, right_by_numbers],
    "smallest_scale": [right_by_search, right_from_the_largest],
    "LossScaler": [RightElementByElement, RightCounting],
    "MasterStep": [RightAsParameters, RightOneByOne],
    "step_together": [right_with_a_flag, right_scaled_norm],
    "quantize": [right_reciprocal, right_by_rows],
    "quantize_shard": [right_agreed_scale, right_asynchronously],
}

MISTAKES = {
    "flushed_share": {
        below_normal: "1023 subnormal",
        scales_too_late: "multiply before the conversion",
        counts_zeros: "zeros do not count",
        zeros_are_flushed: "a zero is not flushed",
        below_subnormal: "is rounded to the nearest number",
        halfway_up: "rounded to the even one",
        mean_of_shares: "a mean of the tensors' shares",
        finite_alone: "and they are not flushed",
        keeps_what_is_finite: "is not flushed: it is not zero",
        in_place: "the caller needs them",
        divides_by_nothing: "nothing to divide by",
        three_digits: "the right number, rounded",
        flat_views: "view size is not compatible",
        row_by_row: "iteration over a 0-d tensor",
    },
    "smallest_scale": {
        never_none: "which is infinite in float16: then None",
        largest_scale: "a smaller one is good enough",
        begins_with_two: "begin with 1",
        strict_limit: "infinity begins halfway to 65536",
        exponent: "that is the exponent",
        any_factor: "return a power of two",
        usual_limit: "far beyond 2^24",
        less_than_the_share: "a scale with exactly that share is good",
        without_infinity: "infinite or NaN already",
        sixty_four: "it may be far beyond 2^24",
        about_the_share: "of the gradients is flushed",
    },
    "LossScaler": {
        ClipsFirst: "clipped first, divided by the scale afterwards",
        ZerosInstead: "momentum and weight decay still move",
        NeverUnscales: "is not divided by the scale",
        NeverClipped: "the gradient is not clipped",
        LooksForInfinity: "stepped with an infinite or NaN gradient",
        LooksAtTheLoss: "the loss may be finite",
        BringsBack: "skip optimizer.step() itself",
        NotInARow: "a skipped step resets the count to 0",
        GrowsOnAndOn: "after growth, the count starts again",
        GrowsLate: "in the last of them, not in the next one",
        KeepsTheOverflow: "adds to what has overflowed",
        FirstGroup: "go through all of optimizer.param_groups",
        ClipsEachGroup: "each parameter group is clipped by its own norm",
        DividesByZero: "ZeroDivisionError",
        ZeroByZero: "the gradient is zero, and so is its norm",
        SkipsZero: "None and zero are no overflow",
        OneAtLeast: "even if the scale then falls below 1",
        NoMoreThanUsual: "no upper limit",
        ScalesInPlace: "changes the caller's tensor",
    },
    "MasterStep": {
        WithoutMasters: "in 16 bits an update of less than half a unit is lost",
        KeepsTheirGradients: "the masters' gradients are kept",
        Anew: "Make it once",
        AnewAsAWhole: "has forgotten its moments",
        SharedTwice: "embedding and head share a parameter",
        FrozenToo: "frozen parameters need no master",
        Zeros: "applies momentum and weight decay",
        Stale: "that of an earlier step",
        NeverRounds: "copy the masters' values back",
        Float32Model: "the model keeps its dtype",
        KeepsGradients: "it is held twice",
        ZeroIsNone: "its gradient was zeros, not None",
        CopiesInNumpy: "a copy in NumPy, bytes or a list takes memory too",
        CopiesInBytes: "a copy in NumPy, bytes or a list takes memory too",
    },
    "step_together": {
        flag_alone: "every rank has used the norm of its own shards",
        decides_alone: "no rank learns of an overflow on another rank",
        largest_norm: "that is the largest of the ranks' norms",
        two_messages: "one message answers both",
        sends_gradients: "do not send the gradients",
        tells_when_it_overflows: "every rank must make the same call",
        nothing_to_do: "every rank must make the same call",
        steps_first: "look first, for infinity",
        backs_off_alone: "all ranks need the same scale",
        never_divides: "not divided by the scale before",
        all_there_are: "without group=group",
        first_group: "whichever parameter group it is in",
        divides_by_zero: "ZeroDivisionError",
        zero_by_zero_norm: "0 x infinity is NaN",
        skips_zero: "even if all gradients are zero",
        one_at_least: "after a skipped step the scale is multiplied by backoff",
    },
    "quantize": {
        without_abs: "of the absolute values",
        zero_by_zero: "0 / 0",
        unscaled_cast: "values are x / scale",
        inverse: "that is the inverse",
        scale_like_x: "convert before you divide",
        always_e4m3: "each dtype has its own largest number",
        by_rows: "one scale for all of x",
        whole_numbers: "no rounding of your own",
        hides_overflow: "must be seen",
        float32_values: "convert the quotients",
        never_clamps: "clamp the quotients",
        in_place_of_x: "change what was passed in",
        flat_view: "view size is not compatible",
        hides_overflow_of_e5m2: "must be seen",
        hides_minus_infinity: "must be seen",
    },
    "quantize_shard": {
        own_scale: "each rank has used its own shard's",
        adds_them_up: "dist.ReduceOp.MAX",
        largest_of_scales: "agree on the largest value, not on the scale",
        nothing_to_scale: "every rank must make the same call",
        scales_first: "values are x / scale",
        signed: "of the absolute values",
        never_clamps_a_shard: "clamp the quotients",
        zeros_everywhere: "0 / 0",
        in_place_of_shard: "change what was passed in",
        flat_view_of_shard: "view size is not compatible",
    },
}

FURTHER = {
    "LossScaler": {
        LooksForNaN: "stepped with an infinite or NaN gradient",
        MultipliesAlways: "even if the norm is below",
    },
    "MasterStep": {
        MastersOf16Bits: "its tensors are the masters, float32",
        Truncates: "round to nearest",
    },
    "step_together": {
        keeps_gradients: "every .grad is None afterwards",
        skips_by_zeros: "no optimizer.step() on any rank",
        adds_norms: "that is the sum of the ranks' norms",
        averages_squares: "added up, not averaged",
        forgets_the_root: "take the root",
        multiplies_always: "even if the norm is below",
    },
    "quantize": {
        divides_in_16_bits: "rounded twice",
    },
}
"""More mistakes than the usual eleven, where there are as many."""
