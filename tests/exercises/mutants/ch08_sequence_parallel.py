"""Wrong answers to chapter 8's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import torch
import torch.distributed as dist
from torch import nn

from minitron.comm.collectives import all_gather_single, reduce_scatter_single

# 8.1, 8.4: what ours start from


def join(shard, group, dim):
    """The whole of (..., n/N, ...)."""
    parts = [
        torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim)


def share(partial, group, dim):
    """This rank's part of the sum."""
    parts = torch.stack(partial.chunk(group.size(), dim))
    shard = torch.empty_like(parts[0])
    reduce_scatter_single(shard, parts.flatten(0, 1), group)
    return shard


def own(tensor, group, dim):
    return tensor.chunk(group.size(), dim)[group.rank()].contiguous()


def join_rows(shard, group, dim):
    """Along dim 0, in the shape that is wanted."""
    shape = list(shard.shape)
    shape[dim] *= group.size()
    whole = shard.new_empty(shape)
    all_gather_single(whole.view(-1), shard.reshape(-1), group)
    return whole


def share_rows(partial, group, dim):
    """Along dim 0, in the shape that is wanted."""
    shard = torch.empty_like(own(partial, group, dim))
    reduce_scatter_single(shard.view(-1), partial.reshape(-1), group)
    return shard


# 8.1


class Gathers(torch.autograd.Function):
    """The answer of the course, in parts to be replaced."""

    there, back = staticmethod(join), staticmethod(share)

    @classmethod
    def forward(cls, ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        return cls.there(x, group, dim)

    @classmethod
    def backward(cls, ctx, grad):
        return cls.back(grad, ctx.group, ctx.dim), None, None


class Scatters(Gathers):
    """Likewise, the other way round."""

    there, back = staticmethod(share), staticmethod(join)


class RightLists(torch.autograd.Function):
    """Lists of tensors instead of one."""

    @staticmethod
    def forward(ctx, x_shard, group, dim):
        ctx.arguments = group, dim
        return join(x_shard, group, dim)

    @staticmethod
    def backward(ctx, grad):
        group, dim = ctx.arguments
        parts = [part.contiguous() for part in grad.chunk(group.size(), dim)]
        shard = torch.empty_like(parts[0])
        dist.reduce_scatter(shard, parts, group=group)
        return shard, None, None


class RightInFront(torch.autograd.Function):
    """Moves dim to the front, where the collectives work, and back again."""

    @staticmethod
    def forward(ctx, x_partial, group, dim):
        ctx.group, ctx.dim = group, dim
        front = x_partial.movedim(dim, 0).contiguous()
        part = front.new_empty(len(front) // group.size(), *front.shape[1:])
        reduce_scatter_single(part, front, group, async_op=True).wait()
        return part.movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        front = grad.movedim(ctx.dim, 0).contiguous()
        whole = front.new_empty(ctx.group.size() * len(front), *front.shape[1:])
        all_gather_single(whole, front, ctx.group, async_op=True).wait()
        return whole.movedim(0, ctx.dim), None, None


class GathersRows(Gathers):
    """(B, S, D) is filled as it comes in: rank after rank, which is not sequence after sequence."""

    there = staticmethod(join_rows)


class JoinsAlongZero(Gathers):
    """all_gather_single joins: along dim 0, whatever dim is."""

    @staticmethod
    def there(x, group, dim):
        return join(x, group, 0)


class TakesItsOwnPart(Gathers):
    """Backward is forward the other way round, so cut out this rank's part: the sum is missing."""

    back = staticmethod(own)


class AllReducesGradient(Gathers):
    """Sum, then cut: N times the bytes that a reduce-scatter leaves here, twice on the wire."""

    @staticmethod
    def back(grad, group, dim):
        total = grad.clone()
        dist.all_reduce(total, group=group)
        return own(total, group, dim)


class AveragesGradient(Gathers):
    """Gradients of N ranks are averaged: in data parallelism, where each has other samples."""

    @staticmethod
    def back(grad, group, dim):
        return share(grad, group, dim) / group.size()


class ScattersGradientRows(Gathers):
    """The gradient is cut by the collective: along dim 0."""

    back = staticmethod(share_rows)


class NeedsContiguous(Gathers):
    """Everything is contiguous: until autograd hands over a transposed gradient."""

    @staticmethod
    def back(grad, group, dim):
        parts = list(grad.movedim(dim, 0).chunk(group.size()))
        shard = torch.empty(parts[0].shape, dtype=grad.dtype)
        reduce_scatter_single(shard, grad.movedim(dim, 0), group)
        return shard.movedim(0, dim)


class NeverWaits(Gathers):
    """async_op makes it faster: what it brings is not there yet."""

    @staticmethod
    def there(x, group, dim):
        parts = x.new_zeros(group.size() * len(x), *x.shape[1:])
        all_gather_single(parts, x.contiguous(), group, async_op=True)
        return torch.cat(parts.chunk(group.size()), dim)


class GathersGradients(Gathers):
    """Its backward pass gathers, too: then the gradient is as large as x."""

    back = staticmethod(join)


class ScattersRows(Scatters):
    """The sum is cut by the collective: along dim 0."""

    there = staticmethod(share_rows)


class CutsWithoutSum(Scatters):
    """Each rank takes its part: of its own summand."""

    there = staticmethod(own)


class AllReducesFirst(Scatters):
    """An all-reduce, then this rank's part: twice the bytes."""

    @staticmethod
    def there(x, group, dim):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return own(total, group, dim)


class AveragesParts(Scatters):
    """The reduce-scatter averages: it adds up."""

    @staticmethod
    def there(x, group, dim):
        return share(x, group, dim) / group.size()


class ZerosElsewhere(Scatters):
    """What this rank has not got has no gradient: other ranks have it."""

    @staticmethod
    def back(grad, group, dim):
        parts = [torch.zeros_like(grad) for _ in range(group.size())]
        parts[group.rank()] = grad
        return torch.cat(parts, dim)


class GathersGradientRows(Scatters):
    """(B, S, D) is filled as it comes in: rank after rank."""

    back = staticmethod(join_rows)


class DividesGradient(Scatters):
    """The gradient of a sum is shared out among its summands: each has all of it."""

    @staticmethod
    def back(grad, group, dim):
        return join(grad, group, dim) / group.size()


class SumsInPlace(Scatters):
    """The input is not needed any more: to others it is."""

    @staticmethod
    def there(x, group, dim):
        part = share(x, group, dim)
        own_part = x.chunk(group.size(), dim)[group.rank()]
        return own_part.copy_(part).clone()


# 8.2


def gradients(model, chosen):
    return [p.grad for name, p in model.named_parameters() if p.grad is not None and chosen(name)]


def sum_in_one(grads, group, divisor=1):
    flat = nn.utils.parameters_to_vector(grads)
    dist.all_reduce(flat, group=group)
    nn.utils.vector_to_parameters(flat / divisor, grads)


def is_whole(name):
    cut = ("query", "key", "value", "up", "gate", "head", "token_embedding")
    layer, kind = name.split(".")[-2:]
    return layer not in cut and not (layer in ("out", "down") and kind == "weight")


def right_by_exclusion(model, group):
    """Everything but what is cut."""
    sum_in_one(gradients(model, is_whole), group)


def right_by_module(model, group):
    """By the kind of module, in a buffer that is filled and emptied."""
    whole = [
        p
        for m in model.modules()
        if isinstance(m, nn.LayerNorm | nn.RMSNorm)
        for p in m.parameters()
    ]
    whole += [
        layer.bias for block in model.blocks for layer in (block.attention.out, block.mlp.down)
    ]
    whole += [
        p
        for p in model.parameters()
        if p is getattr(getattr(model, "position_embedding", None), "weight", None)
    ]
    grads = [p.grad for p in whole if p is not None and p.grad is not None]
    buffer = torch.cat([grad.reshape(-1) for grad in grads])
    work = dist.all_reduce(buffer, group=group, async_op=True)
    work.wait()
    start = 0
    for grad in grads:
        grad.view(-1)[:] = buffer[start : start + grad.numel()]
        start += grad.numel()


def norms_alone(model, group):
    """The norms are what sequence parallelism moved: out's and down's biases moved, too."""
    sum_in_one(gradients(model, lambda name: "norm" in name or "position" in name), group)


def without_positions(model, group):
    """Norms and biases: learned positions are whole on every rank as well."""
    sum_in_one(gradients(model, lambda name: is_whole(name) and "position" not in name), group)


def everything(model, group):
    """As in data parallelism: there every rank has the same parameters."""
    sum_in_one(gradients(model, lambda name: True), group)


def every_vector(model, group):
    """What is a vector is not cut: the biases of query, key, value and up are."""
    sum_in_one(gradients(model, lambda name: is_whole(name) or name.endswith("bias")), group)


def every_embedding(model, group):
    """Both embeddings are looked up: the vocabulary's rows are cut."""
    sum_in_one(gradients(model, lambda name: is_whole(name) or "embedding" in name), group)


def all_of_out(model, group):
    """out and down end in a sum, so their gradients do: their weights are cut."""
    chosen = ("out.weight", "down.weight")
    sum_in_one(gradients(model, lambda name: is_whole(name) or name.endswith(chosen)), group)


def averages(model, group):
    """Gradients are averaged: over samples, and these are of the same samples."""
    sum_in_one(gradients(model, is_whole), group, divisor=group.size())


def one_by_one(model, group):
    """A message for each: they are small, and each costs a round."""
    for grad in gradients(model, is_whole):
        dist.all_reduce(grad, group=group)


def never_written_back(model, group):
    """The flat tensor is the gradients: it is a copy of them."""
    flat = torch.cat([grad.flatten() for grad in gradients(model, is_whole)])
    dist.all_reduce(flat, group=group)


def to_rank_0(model, group):
    """Rank 0 has the sum: every rank updates these parameters."""
    for grad in gradients(model, is_whole):
        dist.reduce(grad, group=group, group_dst=0)


def frozen_too(model, group):
    """Every norm has a gradient: not a frozen one."""
    grads = [p.grad for name, p in model.named_parameters() if is_whole(name)]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)


# 8.3


def bytes_of(B, S, D, H, N, sequence_parallel, selective, **other):
    """The answer of the course, with numbers to be replaced; per value of B S D and of B H S S."""
    numbers = dict(full=0, around=10, inside=24, scores=5, cut=N) | other
    wide, square = B * S * D, B * H * S * S
    around = numbers["around"] * wide // (N if sequence_parallel else 1)
    scores = 0 if selective else numbers["scores"] * square // numbers["cut"]
    return around + numbers["full"] * wide + numbers["inside"] * wide // N + scores


def right_by_tensor(B, S, D, H, N, sequence_parallel, selective):
    """Adds up tensor by tensor."""
    tokens = S // N if sequence_parallel else S
    heads, ffn = H // N, 4 * D // N
    values = 2 * tokens * D + 2 * tokens * D + 3 * S * (D // N) + S * (D // N) + 2 * S * ffn
    masks = 2 * tokens * D
    if not selective:
        values, masks = values + 2 * heads * S * S, masks + heads * S * S
    return B * (2 * values + masks)


def right_by_fractions(B, S, D, H, N, sequence_parallel, selective):
    """The published row, all over N."""
    per_value = 34 if sequence_parallel else 10 * N + 24
    scores = 0 if selective else 5 * H * S * S
    return B * (S * D * per_value + scores) // N


def everything_is_cut(*arguments):
    """N ranks have an N-th of everything: not of what lies between the cut layers."""
    *sizes, _, selective = arguments
    return bytes_of(*sizes, True, selective)


def nothing_more_is_cut(*arguments):
    """Sequence parallelism is for the norms' parameters: it is for what they read."""
    *sizes, _, selective = arguments
    return bytes_of(*sizes, False, selective)


def inputs_in_full(B, S, D, H, N, sequence_parallel, selective):
    """The cut layers need all tokens, so they save them: they gather them again."""
    other = dict(full=4, around=6) if sequence_parallel else {}
    return bytes_of(B, S, D, H, N, sequence_parallel, selective, **other)


def scores_in_full(*arguments):
    """Every rank has all of the S x S matrix: of some of the heads."""
    return bytes_of(*arguments, cut=1)


def scores_cut_twice(B, S, D, H, N, sequence_parallel, selective):
    """With S/N tokens, there are S/N rows of scores: inside attention there are S."""
    cut = N * N if sequence_parallel else N
    return bytes_of(B, S, D, H, N, sequence_parallel, selective, cut=cut)


def nothing_inside_is_cut(B, S, D, H, N, sequence_parallel, selective):
    """Weights are cut, activations are not: what comes out of a cut layer is."""
    other = dict(full=24, inside=0)
    return bytes_of(B, S, D, H, N, sequence_parallel, selective, **other)


def no_masks(*arguments):
    """Dropout saves nothing: it saves which values it has dropped."""
    return bytes_of(*arguments, around=8)


def selective_of_nothing(*arguments):
    """What is recomputed is saved as well."""
    return bytes_of(*arguments[:-1], False)


def selective_of_inputs(*arguments):
    """Attention is recomputed, with query, key and value: it starts from them."""
    return bytes_of(*arguments, inside=18 if arguments[-1] else 24)


def one_of_two_scores(*arguments):
    """Softmax's output is saved: and the one after dropout, which the product reads."""
    return bytes_of(*arguments, scores=3)


def in_floats(*arguments):
    """24 / N is as good: bytes are whole numbers."""
    return bytes_of(*arguments) / 1


# 8.4


class Linear(torch.autograd.Function):
    """The answer of the course, in parts to be replaced."""

    @classmethod
    def forward(cls, ctx, x_shard, weight, group):
        ctx.group = group
        x = cls.join(x_shard, group, 1)
        cls.save(ctx, x_shard, x, weight)
        return x @ weight.T

    @classmethod
    def backward(cls, ctx, grad):
        saved, weight = ctx.saved_tensors
        x = cls.again(ctx, saved)
        grad_x = cls.share(grad @ weight, ctx.group, 1)
        return grad_x, cls.grad_weight(ctx, grad, x, saved), None

    join, share = staticmethod(join), staticmethod(share)

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.save_for_backward(x_shard, weight)

    @staticmethod
    def again(ctx, saved):
        return join(saved, ctx.group, 1)

    @staticmethod
    def grad_weight(ctx, grad, x, saved):
        return torch.einsum("bsf,bsd->fd", grad, x)


class RightMeanwhile(torch.autograd.Function):
    """Gathers while the input's gradient is computed, and scatters while the weight's is."""

    @staticmethod
    def forward(ctx, x_shard, weight, group):
        ctx.save_for_backward(x_shard, weight)
        ctx.group = group
        return nn.functional.linear(join(x_shard, group, 1), weight)

    @staticmethod
    def backward(ctx, grad):
        (x_shard, weight), group = ctx.saved_tensors, ctx.group
        size = group.size()
        stacked = x_shard.new_empty(size, *x_shard.shape)
        gathering = all_gather_single(stacked.view(-1), x_shard.reshape(-1), group, async_op=True)
        parts = torch.stack((grad @ weight).chunk(size, 1))
        gathering.wait()
        grad_x = torch.empty_like(parts[0])
        scattering = reduce_scatter_single(grad_x.view(-1), parts.view(-1), group, async_op=True)
        x = stacked.movedim(0, 1).flatten(1, 2)
        grad_weight = (grad.transpose(1, 2) @ x).sum(0)
        scattering.wait()
        return grad_x, grad_weight, None


class RightByParts(Linear):
    """Adds the weight's gradient up, rank's part after rank's part."""

    @staticmethod
    def grad_weight(ctx, grad, x, saved):
        size = ctx.group.size()
        pairs = zip(grad.chunk(size, 1), x.chunk(size, 1), strict=True)
        return sum(g.flatten(0, 1).T @ part.flatten(0, 1) for g, part in pairs)


class SavesWhole(Linear):
    """x is there, so save it: N times the bytes (as plain autograd does)."""

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.save_for_backward(x, weight)

    @staticmethod
    def again(ctx, saved):
        return saved


class SavesBoth(Linear):
    """The shard is saved, and x is gathered again: and ctx keeps x all the same."""

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.x = x
        ctx.save_for_backward(x_shard, weight)


class SavesAView(Linear):
    """A chunk of x is small: it is a view, and x lives as long."""

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.save_for_backward(x.chunk(ctx.group.size(), 1)[ctx.group.rank()], weight)


class LinearJoinsRows(Linear):
    """(B, S, D) is filled as it comes in: rank after rank."""

    join = staticmethod(join_rows)


class LinearJoinsAlongZero(Linear):
    """all_gather_single joins: along dim 0."""

    @staticmethod
    def join(x_shard, group, dim):
        return join(x_shard, group, 0)


class NeverGathersAgain(Linear):
    """x_shard was saved, so its tokens make the gradient: the columns have seen all tokens."""

    @staticmethod
    def again(ctx, saved):
        return saved

    @staticmethod
    def grad_weight(ctx, grad, x, saved):
        return torch.einsum("bsf,bsd->fd", own(grad, ctx.group, 1), saved)


class OwnColumns(Linear):
    """This rank's part of the input's gradient: of one summand."""

    share = staticmethod(own)


class AllReducesInput(Linear):
    """Megatron's f sums the input's gradient, then it is cut: twice the bytes."""

    @staticmethod
    def share(grad, group, dim):
        dist.all_reduce(grad, group=group)
        return own(grad, group, dim)


class AveragesInput(Linear):
    """The gradient of x is the mean of the ranks': they are summands."""

    @staticmethod
    def share(grad, group, dim):
        return share(grad, group, dim) / group.size()


class ScattersInputRows(Linear):
    """The gradient of x is cut by the collective: along dim 0."""

    share = staticmethod(share_rows)


class DividesWeight(Linear):
    """N ranks have seen the same tokens, so divide by N: they have other columns."""

    @staticmethod
    def grad_weight(ctx, grad, x, saved):
        return torch.einsum("bsf,bsd->fd", grad, x) / ctx.group.size()


# What once passed


class ThreeDims(Gathers):
    """Tensors have three dimensions: (B, S, D)."""

    @classmethod
    def forward(cls, ctx, x, group, dim):
        B, S, D = x.shape
        return super().forward(ctx, x.view(B, S, D) if x.is_contiguous() else x, group, dim)


class GathersDouble(Gathers):
    """Hands out float64, whatever comes in."""

    @staticmethod
    def there(x, group, dim):
        return join(x.double(), group, dim)


class GathersOnce(Gathers):
    """What a tensor of this shape was gathered to is known: since the first call."""

    known = {}

    @classmethod
    def there(cls, x, group, dim):
        whole = join(x, group, dim)
        return cls.known.setdefault((x.shape, dim, group.size()), whole).clone()


class ScattersDouble(Scatters):
    """Hands out float64, whatever comes in."""

    @staticmethod
    def there(x, group, dim):
        return share(x.double(), group, dim)


def two_layers(model, group):
    """The blocks of the model that was tried: two of them."""
    sum_in_one(
        gradients(
            model,
            lambda name: (
                is_whole(name) and (not name.startswith("blocks.") or name.split(".")[1] in "01")
            ),
        ),
        group,
    )


def moves_the_weights(model, group):
    """Sums, and takes a step on the way."""
    sum_in_one(gradients(model, is_whole), group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad


def rounds_large_counts(B, S, D, H, N, sequence_parallel, selective):
    """Divides with /, and makes an int of it."""
    wide, square = B * S * D, B * H * S * S
    around = 10 * wide / (N if sequence_parallel else 1)
    return int(around + 24 * wide / N + (0 if selective else 5 * square / N))


class SavesACopy(Linear):
    """A copy of x_shard, to be safe: as many bytes again."""

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.save_for_backward(x_shard.clone(), weight)


class SavesWeightCopy(Linear):
    """A copy of the weight, which might change."""

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.save_for_backward(x_shard, weight.clone())


class SavesNumpy(Linear):
    """All of x, in NumPy: no tensor, and as many bytes."""

    @staticmethod
    def save(ctx, x_shard, x, weight):
        ctx.save_for_backward(x_shard, weight)
        ctx.whole = x.numpy().copy()


class ViewsGradient(Linear):
    """All tokens as rows, by view: of a contiguous gradient."""

    @staticmethod
    def grad_weight(ctx, grad, x, saved):
        return grad.view(-1, grad.shape[-1]).T @ x.flatten(0, 1)


class ScalesGradientInPlace(Linear):
    """Scales the gradient that it was handed, and scales back its own results."""

    @classmethod
    def backward(cls, ctx, grad):
        grad *= 2
        grad_x, grad_weight, _ = super().backward(ctx, grad)
        return grad_x / 2, grad_weight / 2, None


RIGHT_ANSWERS = {
    "AllGather": [RightLists],
    "ReduceScatter": [RightInFront],
    "sum_partial_gradients": [right_by_exclusion, right_by_module],
    "saved_bytes": [right_by_tensor, right_by_fractions],
    "GatheredLinear": [RightMeanwhile, RightByParts],
}

MISTAKES = {
    "AllGather": {
        TakesItsOwnPart: "right is reduce_scatter of",
        AllReducesGradient: "all_reduce is called; use only all_gather and reduce_scatter",
        GathersRows: "so split the output into N parts and concatenate these along",
        JoinsAlongZero: "the collectives concatenate and split along dim 0",
        AveragesGradient: "that is the mean",
        ScattersGradientRows: "that is split along dim 0",
        NeedsContiguous: "Tensors must be contiguous",
        NeverWaits: "wait for the collective",
        GathersGradients: "returned an invalid gradient",
        ThreeDims: "not enough values to unpack",
        GathersDouble: "the output is float64; the input is float32",
        GathersOnce: "compute it in every call",
    },
    "ReduceScatter": {
        ScattersRows: "that is split along dim 0",
        CutsWithoutSum: "nothing is sent; right is reduce_scatter of",
        AllReducesFirst: "all_reduce is called; use only all_gather and reduce_scatter",
        AveragesParts: "that is the mean",
        ZerosElsewhere: "right is all_gather of",
        GathersGradientRows: "so split the output into N parts and concatenate these along",
        DividesGradient: "an all-gather sums nothing",
        SumsInPlace: "changed in place: input",
        ScattersDouble: "the output is float64; the input is float32",
    },
    "sum_partial_gradients": {
        norms_alone: "uses it for its own tokens",
        one_by_one: "into one tensor",
        without_positions: "every rank holds position_embedding.weight in full",
        everything: "token_embedding.weight is sharded",
        every_vector: "query.bias is sharded",
        every_embedding: "token_embedding.weight is sharded",
        all_of_out: "attention.out.weight is sharded",
        averages: "that is the mean",
        never_written_back: "write the sums back into .grad (flatten and cat make copies)",
        to_rank_0: "reduce is called; use only all_reduce",
        frozen_too: "NoneType",
        two_layers: "every rank holds blocks.2.",
        moves_the_weights: "sum the gradients and leave the weights alone",
    },
    "saved_bytes": {
        everything_is_cut: "and the masks have S tokens on every rank",
        inputs_in_full: "value and up save their shard of the input",
        nothing_more_is_cut: "a rank has S/N tokens between the tensor-parallel layers",
        scores_in_full: "a rank has H/N heads",
        scores_cut_twice: "each of a rank's heads has S x S scores",
        nothing_inside_is_cut: "a rank has 1/N of the heads and of F",
        no_masks: "masks of both branches' outputs are missing",
        selective_of_nothing: "selective saves nothing of size S x S",
        selective_of_inputs: "these are saved",
        one_of_two_scores: "are two tensors",
        in_floats: "return exact integers",
        rounds_large_counts: "only the rounding is wrong",
    },
    "GatheredLinear": {
        OwnColumns: "reduce-scatter the gradient of x",
        SavesWhole: "a slice of x is a view and keeps all of x alive",
        SavesBoth: "so does an attribute of ctx",
        SavesAView: "a slice of x is a view and keeps all of x alive",
        LinearJoinsRows: "all_gather_single concatenates along dim 0",
        LinearJoinsAlongZero: "every rank computes its columns for all tokens of all",
        NeverGathersAgain: "gather x again",
        AllReducesInput: "all_reduce is called; use only all_gather and reduce_scatter",
        AveragesInput: "that is the mean over the ranks",
        ScattersInputRows: "first lay the N parts of dim 1 one after the other",
        DividesWeight: "divided by N",
        SavesACopy: "a slice of x is a view and keeps all of x alive",
        SavesWeightCopy: "a slice of x is a view and keeps all of x alive",
        SavesNumpy: "a copy in NumPy, bytes or a list takes memory too",
        ViewsGradient: "view size is not compatible",
        ScalesGradientInPlace: "the gradient of y_shard has other values than before",
    },
}
