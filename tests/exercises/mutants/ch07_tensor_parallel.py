"""Wrong answers to chapter 7's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minitron.comm.differentiable import all_reduce

IGNORED = -100


def summed(tensor, group, **options):
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group, **options)
    return total


# 7.1: f


class F7(torch.autograd.Function):
    """Neither forward nor backward does anything."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RightAsynchronousF(F7):
    """Starts the sum of a contiguous copy, and waits for it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        total = torch.empty_like(grad).copy_(grad)
        dist.all_reduce(total, group=ctx.group, async_op=True).wait()
        return total, None


class NothingAtAll(F7):
    """x is there, the gradient is there: each rank has its own part of it alone."""


class WrongDirection(F7):
    """The sum comes first: f and g exchanged."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)


class BothDirections(F7):
    """All ranks must agree, on the way there and on the way back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class Averages(F7):
    """As in data parallelism: here the parts belong to one and the same sample."""

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group) / ctx.group.size(), None


class InTheGradient(F7):
    """Sums in place: the residual branch is handed the same tensor."""

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class NeverWaits(F7):
    """The sum is under way: what is returned is not it yet."""

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group, async_op=True)
        return total, None


class OneGradient(F7):
    """The group needs no gradient: backward returns one value for every argument all the same."""

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group)


class AllThereAre(F7):
    """Forgets the group: tensor parallelism runs inside of each data-parallel rank."""

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, None), None


# 7.1: g


class G7(torch.autograd.Function):
    """Sums forward, hands the gradient on."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class RightMarkedG(G7):
    """Works in place on a copy, and hands out a copy of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        work = dist.all_reduce(total := x + 0, group=group, async_op=True)
        work.wait()
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class SumsBothWays(G7):
    """The gradient of a sum over ranks is a sum over ranks: as torch.distributed.nn has it."""

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class SumsBackwardOnly(G7):
    """f in the place of g: the partial sums stay partial."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


class SharesTheGradient(G7):
    """N ranks have made the sum: each takes 1/N of the gradient."""

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.group.size(), None


class MeanOfParts(G7):
    """The ranks' results are averaged."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group) / group.size()


class IntoX(G7):
    """Sums x in place: who else reads x finds the sum."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        return x.clone()


class ReturnsX(G7):
    """all_reduce returns the sum: it returns nothing, and the copy has it."""

    @staticmethod
    def forward(ctx, x, group):
        summed(x, group)
        return x.clone()


class OneForTwo(G7):
    """backward returns the gradient of x alone."""

    @staticmethod
    def backward(ctx, grad):
        return grad


# 7.2


class Row(nn.Module):
    """The answer of the course, in parts to be replaced."""

    def __init__(self, linear, group):
        super().__init__()
        self.group = group
        self.check(linear.weight.shape[1], group.size())
        self.weight = nn.Parameter(self.cut(linear.weight.detach()))
        self.take_bias(linear)

    def check(self, num_inputs, size):
        if num_inputs % size:
            raise ValueError(f"{size} ranks cannot share {num_inputs} inputs: choose a multiple")

    def cut(self, weight):
        length = weight.shape[1] // self.group.size()
        return weight.narrow(1, self.group.rank() * length, length).clone()

    def take_bias(self, linear):
        self.bias = linear.bias

    def forward(self, x):
        out = all_reduce(x @ self.weight.T, self.group)
        return out if self.bias is None else out + self.bias


class RightOwnFunction(Row):
    """A copy of the bias, and a g of its own."""

    def take_bias(self, linear):
        bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        self.register_parameter("bias", bias)

    def forward(self, x):
        out = G7.apply(F.linear(x, self.weight), self.group)
        return out + (0 if self.bias is None else self.bias)


class RightSubclass(nn.Linear):
    """A linear layer of I/N inputs whose bias waits outside of F.linear."""

    def __init__(self, linear, group):
        (size, rank), (outputs, inputs) = (group.size(), group.rank()), linear.weight.shape
        if inputs % size != 0:
            raise ValueError(f"in_features = {inputs} must be a multiple of {size}")
        super().__init__(inputs // size, outputs, linear.bias is not None)
        self.to(linear.weight).group = group
        with torch.no_grad():
            self.weight.copy_(linear.weight.view(outputs, size, -1)[:, rank])
            if self.bias is not None:
                self.bias.copy_(linear.bias)

    def forward(self, x):
        total = all_reduce(F.linear(x, self.weight), self.group)
        if self.bias is not None:
            total = total + self.bias
        return total


class BiasOnEveryRank(Row):
    """F.linear with its bias, then the sum: the bias is added N times."""

    def forward(self, x):
        return all_reduce(F.linear(x, self.weight, self.bias), self.group)


class BiasDivided(Row):
    """Adds 1/N of the bias on every rank: right forward, 1/N of the gradient backward."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias / self.group.size()
        return all_reduce(F.linear(x, self.weight, bias), self.group)


class BiasOnRankZero(Row):
    """Adds the bias on rank 0 alone: the others never learn theirs."""

    def forward(self, x):
        bias = self.bias if self.group.rank() == 0 else None
        return all_reduce(F.linear(x, self.weight, bias), self.group)


class NoBias(Row):
    """Forgets the bias."""

    def take_bias(self, linear):
        self.bias = None


class CutsOutputs(Row):
    """Cuts weight's own rows: nn.Linear keeps the transpose of what x is multiplied by."""

    def cut(self, weight):
        return weight.tensor_split(self.group.size())[self.group.rank()].clone()


class FirstColumns(Row):
    """Every rank takes the first columns."""

    def cut(self, weight):
        return weight.chunk(self.group.size(), dim=1)[0].clone()


class KeepsAView(Row):
    """A chunk is smaller than the whole: its memory is not."""

    def cut(self, weight):
        return weight.chunk(self.group.size(), dim=1)[self.group.rank()]


class GathersInput(Row):
    """All of x first, then everybody multiplies: nothing is shared out."""

    def forward(self, x):
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x.detach(), group=self.group)
        return super().forward(x)


class SumsGradientsToo(Row):
    """Its all-reduce is its own gradient: every gradient is N times too large."""

    def forward(self, x):
        out = SumsBothWays.apply(x @ self.weight.T, self.group)
        return out if self.bias is None else out + self.bias


class MeanOfOutputs(Row):
    """The ranks' outputs are averaged."""

    def forward(self, x):
        out = all_reduce(x @ self.weight.T, self.group) / self.group.size()
        return out if self.bias is None else out + self.bias


class NeverChecks(Row):
    """chunk takes any size, and the last rank gets less."""

    def check(self, num_inputs, size):
        pass

    def cut(self, weight):
        return weight.tensor_split(self.group.size(), dim=1)[self.group.rank()].clone()


# 7.3


class Loss(torch.autograd.Function):
    """The closed form: softmax, less 1 at the target."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        top = summed(logits.max(dim=-1).values, group, op=dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(-1)
        probabilities = shifted.exp()
        total = summed(probabilities.sum(-1), group)
        probabilities /= total.unsqueeze(-1)

        start = group.rank() * logits.shape[-1]
        ids = torch.arange(start, start + logits.shape[-1])
        hits = targets.unsqueeze(-1) == ids  # (B, S, V/N)
        own = summed((shifted * hits).sum(-1), group)
        counts = targets != IGNORED
        ctx.save_for_backward((probabilities - hits.to(logits.dtype)) * counts.unsqueeze(-1))
        return ((total.log() - own) * counts).sum()

    @staticmethod
    def backward(ctx, grad):
        (grad_logits,) = ctx.saved_tensors
        return grad * grad_logits, None, None


def right_closed_form(logits, targets, group):
    """A function of its own, with its gradient written out."""
    return Loss.apply(logits, targets, group)


def right_flat(logits, targets, group):
    """Flattened, without the ignored ones, in three all-reduces."""
    rows = logits.flatten(0, 1)[targets.flatten() != IGNORED]
    ids = targets[targets != IGNORED] - group.rank() * logits.shape[-1]
    if not len(rows):
        return logits.sum() * 0
    top = summed(rows.amax(1, keepdim=True), group, op=dist.ReduceOp.MAX)
    rows = rows - top
    total = all_reduce(rows.exp().sum(1), group)
    here = torch.logical_and(ids >= 0, ids < logits.shape[-1])
    own = torch.zeros(len(ids), dtype=rows.dtype)
    own = own.masked_scatter(here, rows[here].gather(1, ids[here].unsqueeze(1)))
    return (torch.log(total) - all_reduce(own, group)).sum()


def largest_of(logits, group):
    return summed(logits.amax(-1), group, op=dist.ReduceOp.MAX)


def own_logit(shifted, targets, group):
    """The target's, or 0 if another rank has it."""
    column = targets - group.rank() * shifted.shape[-1]
    mine = (column >= 0) & (column < shifted.shape[-1])
    return shifted.gather(-1, column.where(mine, 0)[..., None])[..., 0].where(mine, 0)


def token_losses(logits, targets, group, largest):
    shifted = logits - largest[..., None]
    sums = torch.stack([shifted.exp().sum(-1), own_logit(shifted, targets, group)])
    total, own = all_reduce(sums, group)
    return total.log() - own


def count_only(losses, targets):
    return losses.where(targets != IGNORED, 0).sum()


def gathers_logits(logits, targets, group):
    """All columns on every rank: the tensor that was too large."""
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[group.rank()] = logits
    return F.cross_entropy(torch.cat(parts, -1).flatten(0, 1), targets.flatten(), reduction="sum")


def gathers_by_sum(logits, targets, group):
    """The same with what is allowed: columns of zeros for the others."""
    size, rank, width = group.size(), group.rank(), logits.shape[-1]
    whole = F.pad(logits, (rank * width, (size - 1 - rank) * width))
    whole = all_reduce(whole, group)
    return F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")


def own_largest(logits, targets, group):
    """The largest logit of the rank: the others' exps are of another scale."""
    return count_only(token_losses(logits, targets, group, logits.detach().amax(-1)), targets)


def no_largest(logits, targets, group):
    """exp of the logits themselves: right, until one of them is large."""
    zeros = torch.zeros_like(logits[..., 0])
    return count_only(token_losses(logits, targets, group, zeros), targets)


class Largest(torch.autograd.Function):
    """A max over ranks through which a gradient flows."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group, op=dist.ReduceOp.MAX)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def largest_not_detached(logits, targets, group):
    """m is a function of the logits: on one process its gradient cancels, here it does not."""
    largest = Largest.apply(logits.amax(-1), group)
    return count_only(token_losses(logits, targets, group, largest), targets)


def forgets_the_mask(logits, targets, group):
    """clamp finds a column on every rank: and every rank adds its logit."""
    shifted = logits - largest_of(logits, group)[..., None]
    width = logits.shape[-1]
    column = (targets - group.rank() * width).clamp(0, width - 1)
    own = shifted.gather(-1, column[..., None]).squeeze(-1)
    total, own = all_reduce(torch.stack([shifted.exp().sum(-1), own]), group)
    return count_only(total.log() - own, targets)


def mean_loss(logits, targets, group):
    """The mean over the targets, as PyTorch's default."""
    losses = token_losses(logits, targets, group, largest_of(logits, group))
    return count_only(losses, targets) / (targets != IGNORED).sum()


def counts_ignored(logits, targets, group):
    """Nobody has id -100, so its logit is 0: its log(sum) is not."""
    return token_losses(logits, targets, group, largest_of(logits, group)).sum()


def backward_sums_too(logits, targets, group):
    """An all-reduce in the backward pass as well: N times the gradient."""
    shifted = logits - largest_of(logits, group)[..., None]
    sums = torch.stack([shifted.exp().sum(-1), own_logit(shifted, targets, group)])
    total, own = SumsBothWays.apply(sums, group)
    return count_only(total.log() - own, targets)


def own_columns_alone(logits, targets, group):
    """The loss of each rank's own softmax."""
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    losses = shifted.exp().sum(-1).log() - own_logit(shifted, targets, group)
    summed(losses, group)
    return count_only(losses, targets)


def keeps_the_shift(logits, targets, group):
    """The sum is of shifted logits, the target's is not."""
    largest = largest_of(logits, group)
    total = all_reduce((logits - largest[..., None]).exp().sum(-1), group)
    own = all_reduce(own_logit(logits, targets, group), group)
    return count_only(total.log() - own, targets)


# 7.4


class Split:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, attention, group):
        self.attention, self.group = attention, group
        self.K = attention.head_width
        self.H = attention.query.weight.shape[0] // self.K
        self.G = attention.key.weight.shape[0] // self.K
        self.check(self.H, self.G, group.size())
        self.query_heads = self.choose_query_heads(group.rank(), group.size())
        self.kv_heads = self.choose_kv_heads(group.rank(), group.size())
        self.cut()

    def check(self, H, G, N):
        if H % N or max(G, N) % min(G, N):
            raise ValueError(f"H = {H}, G = {G} and N = {N} do not divide")

    def choose_query_heads(self, rank, size):
        each = self.H // size
        return range(rank * each, rank * each + each)

    def choose_kv_heads(self, rank, size):
        read = [head * self.G // self.H for head in self.query_heads]
        return range(read[0], read[-1] + 1)

    def part(self, weight, heads):
        return weight.unflatten(0, (-1, self.K))[heads.start : heads.stop].flatten(0, 1).clone()

    def cut(self):
        a = self.attention
        for layer, heads in (
            (a.query, self.query_heads),
            (a.key, self.kv_heads),
            (a.value, self.kv_heads),
        ):
            layer.weight = nn.Parameter(self.part(layer.weight.detach(), heads))
        a.out.weight = nn.Parameter(self.cut_out(a.out.weight.detach()))

    def cut_out(self, weight):
        return self.part(weight.T, self.query_heads).T.contiguous()

    def finish(self):
        if self.group.size() > self.G:
            for layer in (self.attention.key, self.attention.value):
                layer.weight.grad = self.mend(layer.weight.grad)

    def mend(self, grad):
        return self.sum_places(grad)

    def sum_places(self, grad):
        places = torch.zeros(self.G, *grad.shape, dtype=grad.dtype)
        places[self.kv_heads[0]] += grad
        dist.all_reduce(places, group=self.group)
        return places[self.kv_heads[0]].clone()


class RightOneMessage(Split):
    """Keys and values in one all-reduce, which runs until it is waited for."""

    def check(self, H, G, N):
        if H % N:
            raise ValueError(f"{N} does not divide the {H} heads")
        if G % N and N % G:
            raise ValueError(f"{N} ranks, {G} key-value heads")

    def finish(self):
        if self.G >= self.group.size():
            return
        weights = [self.attention.key.weight, self.attention.value.weight]
        mine = torch.stack([weight.grad for weight in weights])
        flat = mine.new_zeros(self.G, mine.numel())
        flat[self.kv_heads.start] = mine.flatten()
        dist.all_reduce(flat, group=self.group, async_op=True).wait()
        for weight, grad in zip(weights, flat[self.kv_heads.start].view(mine.shape), strict=True):
            weight.grad = grad


class RightByMask(Split):
    """Picks rows by an index for each."""

    def part(self, weight, heads):
        rows = [head * self.K + k for head in heads for k in range(self.K)]
        return weight[rows]


class RoundRobin(Split):
    """Deals the query heads out like cards."""

    def choose_query_heads(self, rank, size):
        return range(rank, self.H, size)


class DealsKvHeads(Split):
    """Head r % G for rank r: but which one do its query heads read?"""

    def choose_kv_heads(self, rank, size):
        if self.G >= size:
            return super().choose_kv_heads(rank, size)
        return range(rank % self.G, rank % self.G + 1)


class AllKvHeads(Split):
    """G is not divisible by N, so everybody keeps all of them."""

    def choose_kv_heads(self, rank, size):
        return range(self.G) if self.G < size else super().choose_kv_heads(rank, size)


class NoneLeft(Split):
    """G // N heads for each rank, which is 0 if G < N."""

    def choose_kv_heads(self, rank, size):
        each = self.G // size
        return range(rank * each, (rank + 1) * each)


class CutsOutByRows(Split):
    """All four weights alike: but out reads the heads."""

    def cut_out(self, weight):
        return self.part(weight, self.query_heads)


class CutsInsideHeads(Split):
    """The rows of a weight are dealt out in turns: a rank has a bit of every head."""

    def part(self, weight, heads):
        step = weight.shape[0] // (len(heads) * self.K)
        return weight[heads.start // len(heads) :: step].clone()


class NeverSums(Split):
    """Each rank has a head's gradient: from its own query heads alone."""

    def finish(self):
        pass


class SumsOverAll(Split):
    """One all-reduce of the gradient over the group, whoever holds which head."""

    def mend(self, grad):
        dist.all_reduce(grad, group=self.group)
        return grad


class FillsEveryPlace(Split):
    """Its own gradient in the place of every head."""

    def sum_places(self, grad):
        places = grad.repeat(self.G, 1, 1)
        dist.all_reduce(places, group=self.group)
        return places[self.kv_heads.start]


class MeanOfSharers(Split):
    """The ranks hold the same head, so they average, as in data parallelism."""

    def mend(self, grad):
        return self.sum_places(grad) * self.G / self.group.size()


class SumsEveryTime(Split):
    """A hook sums .grad after each backward pass: what was summed before is summed again."""

    def cut(self):
        super().cut()
        if self.G < self.group.size():
            for layer in (self.attention.key, self.attention.value):
                layer.weight.register_post_accumulate_grad_hook(self.hook)

    def hook(self, weight):
        weight.grad = self.sum_places(weight.grad)

    def finish(self):
        pass


# What once passed


class SumsOnce(F7):
    """A sum for a tensor of this shape is known already: from the first backward pass."""

    sums = {}

    @classmethod
    def backward(cls, ctx, grad):
        total = summed(grad, ctx.group)
        return cls.sums.setdefault((grad.shape, ctx.group.size()), total), None


class FlatGradient(F7):
    """A view is flat without a copy: where the gradient is contiguous."""

    @staticmethod
    def backward(ctx, grad):
        return summed(grad.view(-1), ctx.group).view(grad.shape), None


class SumsInDouble(F7):
    """Sums in float64: with twice the bytes on the wire."""

    @staticmethod
    def backward(ctx, grad):
        return summed(grad.double(), ctx.group).to(grad.dtype), None


class ReturnsDouble(G7):
    """Sums in float64, and leaves it at that."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x.double(), group)


class RemembersTheSum(G7):
    """What has been summed once need not be summed again."""

    sums = {}

    @classmethod
    def forward(cls, ctx, x, group):
        return cls.sums.setdefault((x.shape, group.size()), summed(x, group)).clone()


class KeepsNumpy(Row):
    """A copy of the whole weight in NumPy: no tensor, and as many bytes."""

    def cut(self, weight):
        self.whole = weight.numpy().copy()
        return super().cut(weight)


class KeepsBytes(Row):
    """A copy of the whole weight, as bytes."""

    def cut(self, weight):
        self.whole = weight.numpy().tobytes()
        return super().cut(weight)


class ComputesOnce(Row):
    """The output of the first call, for all calls."""

    def forward(self, x):
        if not hasattr(self, "out"):
            self.out = super().forward(x)
        return self.out


class ViewsRows(Row):
    """All dimensions but the last as one, by view: of a contiguous input."""

    def forward(self, x):
        return super().forward(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class DoubleWeight(Row):
    """Holds its part in float64, whatever the layer had."""

    def cut(self, weight):
        return super().cut(weight).double()

    def forward(self, x):
        return super().forward(x.double())


def shifts_in_place(logits, targets, group):
    """Subtracts the largest from the logits themselves: nobody needs them any more."""
    largest = largest_of(logits.detach(), group)
    logits.data -= largest[..., None]
    return count_only(token_losses(logits, targets, group, torch.zeros_like(largest)), targets)


def clears_ignored(logits, targets, group):
    """The ignored targets become id 0: in the tensor of the caller."""
    counts = targets != IGNORED
    targets[~counts] = 0
    losses = token_losses(logits, targets, group, largest_of(logits.detach(), group))
    return losses.where(counts, 0).sum()


def wide_enough(logits, targets, group):
    """In float64 no exp overflows: up to 709."""
    logits = logits.double()
    largest = logits.new_zeros(targets.shape)
    return count_only(token_losses(logits, targets, group, largest), targets)


def views_rows(logits, targets, group):
    """One row for each token, by view: of contiguous logits."""
    rows, ids = logits.view(-1, logits.shape[-1]), targets.flatten()
    return count_only(token_losses(rows, ids, group, largest_of(rows.detach(), group)), ids)


class KeepsWholeInNumpy(Split):
    """The whole weights, in NumPy: perhaps a checkpoint will need them."""

    def cut(self):
        self.whole = [
            layer.weight.detach().numpy().copy()
            for layer in (self.attention.query, self.attention.out)
        ]
        super().cut()


class OneBuffer(Split):
    """Makes the places once, and fills in its own in every step: others hold old sums."""

    places = None

    def finish(self):
        self.places = self.places or {}
        for layer in (self.attention.key, self.attention.value):
            if self.group.size() > self.G:
                grad = layer.weight.grad
                if layer not in self.places:
                    self.places[layer] = grad.new_zeros(self.G, *grad.shape)
                self.places[layer][self.kv_heads[0]] = grad
                dist.all_reduce(self.places[layer], group=self.group)
                layer.weight.grad = self.places[layer][self.kv_heads[0]].clone()


class FinishesOnce(Split):
    """Mends the gradients of the first step alone."""

    def finish(self):
        if not hasattr(self, "done"):
            super().finish()
        self.done = True


RIGHT_ANSWERS = {
    "Replicate": [RightAsynchronousF],
    "AllReduce": [RightMarkedG],
    "RowParallelLinear": [RightOwnFunction, RightSubclass],
    "vocabulary_parallel_cross_entropy": [right_closed_form, right_flat],
    "SplitAttention": [RightOneMessage, RightByMask],
}

MISTAKES = {
    "Replicate": {
        NothingAtAll: "each rank's backward pass has a partial sum of the gradient",
        InTheGradient: "the gradient of y has other values than before",
        WrongDirection: "where each rank has a partial sum of the gradient",
        BothDirections: "where each rank has a partial sum of the gradient",
        Averages: "that is the mean",
        NeverWaits: "after waiting for the all-reduce",
        OneGradient: "incorrect number of gradients (expected 2, got 1)",
        AllThereAre: "without group=group",
        SumsOnce: "that is the sum from an earlier call with tensors of the same",
        FlatGradient: "view size is not compatible",
        SumsInDouble: "each of twice the bytes",
    },
    "AllReduce": {
        SumsBothWays: "A sum over the ranks would make it N times too large",
        IntoX: "x has other values than before",
        SumsBackwardOnly: "each rank's x is a partial sum",
        SharesTheGradient: "the input is already complete",
        MeanOfParts: "that is the mean",
        ReturnsX: "after waiting for the all-reduce",
        OneForTwo: "incorrect number of gradients (expected 2, got 1)",
        ReturnsDouble: "y is float64; the input is float32",
        RemembersTheSum: "that is the sum from an earlier call with tensors of the same",
    },
    "RowParallelLinear": {
        BiasOnEveryRank: "add it after the sum",
        KeepsAView: "a view keeps the full weight alive",
        BiasDivided: "of the bias's gradient",
        BiasOnRankZero: "a bias added on one rank learns only there",
        NoBias: "bias is no nn.Parameter",
        CutsOutputs: "columns of weight (O, I)",
        FirstColumns: "which multiply its x_shard",
        GathersInput: "all_gather is called; use only all_reduce",
        SumsGradientsToo: "a sum over the ranks makes them N times too large",
        MeanOfOutputs: "that is the mean",
        NeverChecks: "raise a ValueError before splitting anything",
        KeepsNumpy: "a copy in NumPy, bytes or a list takes memory too",
        KeepsBytes: "a copy in NumPy, bytes or a list takes memory too",
        ComputesOnce: "through the graph a second time",
        ViewsRows: "view size is not compatible",
        DoubleWeight: "weight is float64; the input is float32",
    },
    "vocabulary_parallel_cross_entropy": {
        own_largest: "each rank subtracts its own largest logit",
        gathers_by_sum: "look for the target among the rank's own columns",
        gathers_logits: "all_gather is called; use only all_reduce",
        no_largest: "exp overflows",
        largest_not_detached: "m is a constant",
        forgets_the_mask: "adds another id's logit",
        mean_loss: "that is the mean",
        counts_ignored: "an ignored target contributes nothing",
        backward_sums_too: "as all_reduce of minitron.comm.differentiable does",
        own_columns_alone: "the ranks have different losses",
        keeps_the_shift: "shift both by the same m",
        shifts_in_place: "logits_shard has other values than before",
        clears_ignored: "targets has other values than before",
        wide_enough: "from 710 on in float64",
        views_rows: "view size is not compatible",
    },
    "SplitAttention": {
        NeverSums: "every rank that holds a key-value head has a partial sum of",
        DealsKvHeads: "that deals out the key-value heads in turn",
        RoundRobin: "not every N-th",
        AllKvHeads: "the query heads of a rank read one key-value head here",
        NoneLeft: "a rank holds at least one head",
        CutsOutByRows: "K consecutive columns belong to a head",
        CutsInsideHeads: "K consecutive rows are a head",
        SumsOverAll: "that adds up the gradients of different heads",
        FillsEveryPlace: "that is the sum over all ranks",
        MeanOfSharers: "that is the mean",
        SumsEveryTime: "the earlier parts are summed again with the later ones",
        KeepsWholeInNumpy: "a copy in NumPy, bytes or a list takes memory too",
        OneBuffer: "zero the places of the other heads at the start of every",
        FinishesOnce: "every rank that holds a key-value head has a partial sum of",
    },
}
