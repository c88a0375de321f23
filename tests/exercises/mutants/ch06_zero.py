"""Wrong answers to chapter 6's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import math
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from minitron.comm.collectives import all_gather_single, reduce_scatter_single
from minitron.parallel.data.buckets import assign_buckets

# 6.1


def right_by_elements(sizes, num_ranks, rank):
    """Asks every element."""
    length = (sum(sizes) + num_ranks - 1) // num_ranks
    mine = range(rank * length, (rank + 1) * length)
    owned, position = [], 0
    for size in sizes:
        own = [i for i in range(size) if position + i in mine]
        owned.append(range(own[0], own[-1] + 1) if own else range(0))
        position += size
    return owned


def between(sizes, edges):
    """The ranges between two positions in the whole."""
    low, high = edges
    starts = list(accumulate(sizes, initial=0))[:-1]
    return [
        range(min(max(low - start, 0), size), min(max(high - start, 0), size))
        for size, start in zip(sizes, starts, strict=True)
    ]


def right_between(sizes, num_ranks, rank):
    """Cuts the two edges of the shard."""
    length = -(-sum(sizes) // num_ranks)
    return between(sizes, (rank * length, (rank + 1) * length))


def floor(sizes, num_ranks, rank):
    """n // N elements for each: no rank owns the remainder."""
    length = sum(sizes) // num_ranks
    return between(sizes, (rank * length, (rank + 1) * length))


def last_takes_the_rest(sizes, num_ranks, rank):
    """n // N for each, and the last takes the rest: it may have twice as much to keep."""
    length = sum(sizes) // num_ranks
    stop = sum(sizes) if rank == num_ranks - 1 else (rank + 1) * length
    return between(sizes, (rank * length, stop))


def tensor_split(sizes, num_ranks, rank):
    """The first shards are longer by one: padding at the end wants equal ones."""
    edges = torch.arange(sum(sizes)).tensor_split(num_ranks)
    first = sum(map(len, edges[:rank]))
    return between(sizes, (first, first + len(edges[rank])))


def each_parameter(sizes, num_ranks, rank):
    """Every parameter is cut into N: then a bucket is not cut into shards."""
    return [right_between([size], num_ranks, rank)[0] for size in sizes]


def whole_parameters(sizes, num_ranks, rank):
    """Each parameter belongs to one rank: the largest decides how much one keeps."""
    return [range(size if number % num_ranks == rank else 0) for number, size in enumerate(sizes)]


def in_the_whole(sizes, num_ranks, rank):
    """Positions in the flat tensor: asked for are those in the parameter."""
    starts = accumulate(sizes, initial=0)
    return [
        range(own.start + start, own.stop + start)
        for own, start in zip(right_between(sizes, num_ranks, rank), starts, strict=False)
    ]


def not_cut_off(sizes, num_ranks, rank):
    """first to last, whether the parameter has such elements or not."""
    length = -(-sum(sizes) // num_ranks)
    starts = list(accumulate(sizes, initial=0))[:-1]
    return [range(rank * length - start, (rank + 1) * length - start) for start in starts]


def without_the_last(sizes, num_ranks, rank):
    """A range includes its stop: it does not."""
    return [range(own.start, own.stop - 1) for own in right_between(sizes, num_ranks, rank)]


# 6.2 to 6.4: what ours start from


def flatten(tensors, num_ranks):
    values = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return torch.cat([values, values.new_zeros(-len(values) % num_ranks)])


def unflatten(flat, parameters):
    start = 0
    for p in parameters:
        yield p, flat[start : start + p.numel()].view(p.shape)
        start += p.numel()


def grads_of(parameters):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def own(flat, group):
    return flat.chunk(group.size())[group.rank()]


# 6.2


class Sharded:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, model, group, make_optimizer):
        self.group = group
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.make_optimizer = make_optimizer
        self.start()

    def start(self):
        self.shard = own(flatten(self.parameters, self.group.size()), self.group).clone()
        self.optimizer = self.make_optimizer([self.shard])

    @torch.no_grad()
    def step(self, max_norm):
        self.shard.grad = self.reduce(self.flat_gradient())
        norm = self.norm()
        self.clip(norm, max_norm)
        self.optimizer.step()
        self.gather()
        self.drop()
        return norm

    def flat_gradient(self):
        return flatten(grads_of(self.parameters), self.group.size())

    def reduce(self, flat):
        part = torch.empty_like(self.shard)
        reduce_scatter_single(part, flat / self.group.size(), self.group)
        return part

    def norm(self):
        square = (self.shard.grad**2).sum()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def clip(self, norm, max_norm):
        self.shard.grad.mul_(torch.clamp(max_norm / norm, max=1.0))

    def gather(self):
        flat = self.shard.new_empty(self.group.size() * len(self.shard))
        all_gather_single(flat, self.shard, self.group)
        for p, values in unflatten(flat, self.parameters):
            p.copy_(values)

    def drop(self):
        for p in self.parameters:
            p.grad = None


class RightViews(Sharded):
    """The parameters are views of one flat tensor, the shard is another."""

    def start(self):
        self.flat = flatten(self.parameters, self.group.size())
        for p, view in unflatten(self.flat, self.parameters):
            p.data = view
        self.shard = own(self.flat, self.group)
        self.optimizer = self.make_optimizer([self.shard])

    def gather(self):
        all_gather_single(self.flat, self.shard, self.group)
        self.shard.grad = None


class RightAsynchronous(Sharded):
    """Starts what can run meanwhile, waits, and clips as PyTorch does."""

    def reduce(self, flat):
        part = torch.empty_like(self.shard)
        flat /= self.group.size()
        work = reduce_scatter_single(part, flat, self.group, async_op=True)
        self.drop()
        work.wait()
        return part

    def clip(self, norm, max_norm):
        nn.utils.clip_grads_with_norm_([self.shard], max_norm, norm)


class Unsharded(Sharded):
    """The gradients are shared out, the optimizer has all parameters (a well-known course's)."""

    def start(self):
        self.shard = own(flatten(self.parameters, self.group.size()), self.group).clone()
        self.optimizer = self.make_optimizer(self.parameters)

    def gather(self):
        flat = self.shard.new_empty(self.group.size() * len(self.shard))
        all_gather_single(flat, self.shard.grad, self.group)
        for p, values in unflatten(flat, self.parameters):
            p.grad = values.clone()
        self.optimizer.step()


class AllReduces(Sharded):
    """All-reduce, then keep this rank's part: twice the bytes."""

    def reduce(self, flat):
        dist.all_reduce(flat, group=self.group)
        return own(flat, self.group).clone() / self.group.size()


class SumsGradients(Sharded):
    """The reduce-scatter averages: it adds up."""

    def reduce(self, flat):
        return super().reduce(flat * self.group.size())


class LocalNorm(Sharded):
    """clip_grad_norm_ on what the optimizer has: that is the shard's norm, on each rank another."""

    def norm(self):
        return self.shard.grad.norm()


class AddsNorms(Sharded):
    """The global norm is the sum of the ranks' norms: the squares add up."""

    def norm(self):
        norm = self.shard.grad.norm()
        dist.all_reduce(norm, group=self.group)
        return norm


class NeverClips(Sharded):
    """The norm is returned: and nothing is done with it."""

    def clip(self, norm, max_norm):
        pass


class KeepsToItself(Sharded):
    """The parameters are updated: this rank's part of them."""

    def gather(self):
        flat = flatten(self.parameters, self.group.size())
        own(flat, self.group).copy_(self.shard)
        for p, values in unflatten(flat, self.parameters):
            p.copy_(values)


class GathersFirst(Sharded):
    """Gather, then step: the parameters are those of the step before."""

    def clip(self, norm, max_norm):
        super().clip(norm, max_norm)
        super().gather()

    def gather(self):
        pass


class KeepsGradients(Sharded):
    """The optimizer clears its gradients: the parameters' are not its own."""

    def drop(self):
        pass


class ShardIsAView(Sharded):
    """A chunk is small: it is a view, and the whole flat tensor lives as long."""

    def start(self):
        self.shard = own(flatten(self.parameters, self.group.size()), self.group)
        self.optimizer = self.make_optimizer([self.shard])


class MadeAnew(Sharded):
    """An optimizer for this step's shard: its state is forgotten every time."""

    def gather(self):
        super().gather()
        self.optimizer = self.make_optimizer([self.shard])


class ClipsByItsShard(Sharded):
    """The global norm is what is asked for: the shard is clipped by what the optimizer has."""

    def clip(self, norm, max_norm):
        nn.utils.clip_grad_norm_([self.shard], max_norm)


class AlwaysScales(Sharded):
    """max_norm is the norm that a gradient has afterwards: that is the most."""

    def clip(self, norm, max_norm):
        self.shard.grad *= max_norm / norm.clamp(min=1e-30)


class ClipsValues(Sharded):
    """Each element is clipped: then the direction is another one."""

    def clip(self, norm, max_norm):
        self.shard.grad.clamp_(-max_norm, max_norm)


class DividesByZero(Sharded):
    """A norm is never 0: in a step without a gradient it is."""

    def clip(self, norm, max_norm):
        self.shard.grad *= min(1.0, max_norm / norm.item())


class MakesNaN(Sharded):
    """Take the direction, then the length that is allowed: zeros have no direction."""

    def clip(self, norm, max_norm):
        self.shard.grad *= norm.clamp(max=max_norm) / norm


class KeepsTheGradientInNumpy(Sharded):
    """For a plot of the gradient: an array is as large as the tensor."""

    def flat_gradient(self):
        flat = super().flat_gradient()
        self.last = flat.numpy().copy()
        return flat


# 6.3


class Handing:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, model, group, bucket_bytes):
        self.group = group
        parameters = [p for p in model.parameters() if p.requires_grad]
        plan = assign_buckets([p.nbytes for p in parameters], bucket_bytes)
        self.buckets = [[parameters[index] for index in bucket] for bucket in plan]
        self.shards = [
            torch.zeros_like(own(flatten(bucket, group.size()), group)) for bucket in self.buckets
        ]
        self.reset()
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.collect)

    def reset(self):
        self.complete, self.num_sent = set(), 0

    def collect(self, p):
        self.complete.add(p)
        self.send_complete()

    def send_complete(self):
        while self.num_sent < len(self.buckets) and self.complete.issuperset(
            self.buckets[self.num_sent]
        ):
            self.reduce_bucket(self.num_sent)

    def reduce_bucket(self, index):
        flat = self.flat_gradient(self.buckets[index]) / self.group.size()
        self.free(self.buckets[index])
        self.reduce(index, flat)
        self.num_sent += 1

    def flat_gradient(self, bucket):
        return flatten(grads_of(bucket), self.group.size())

    def free(self, bucket):
        for p in bucket:
            p.grad = None

    def reduce(self, index, flat):
        arrived = torch.empty_like(self.shards[index])
        reduce_scatter_single(arrived, flat, self.group)
        self.add(index, arrived)

    def add(self, index, arrived):
        self.shards[index] += arrived

    def finish(self):
        for index in range(self.num_sent, len(self.buckets)):
            self.reduce_bucket(index)
        self.reset()


class RightOneUnderWay(Handing):
    """One reduce-scatter runs beside the backward pass; the next waits for it."""

    in_flight = None

    def reduce(self, index, flat):
        self.land()
        arrived = torch.empty_like(self.shards[index])
        work = reduce_scatter_single(arrived, flat, self.group, async_op=True)
        self.in_flight = index, arrived, work

    def land(self):
        if self.in_flight is not None:
            index, arrived, work = self.in_flight
            work.wait()
            self.shards[index].add_(arrived)
            self.in_flight = None

    def finish(self):
        super().finish()
        self.land()


class RightCountdown(Handing):
    """Counts down per bucket, and divides what arrives."""

    def reset(self):
        self.num_sent = 0
        self.missing = [len(bucket) for bucket in self.buckets]

    def collect(self, p):
        index = next(i for i, bucket in enumerate(self.buckets) if any(p is q for q in bucket))
        self.missing[index] -= 1
        while self.num_sent < len(self.buckets) and self.missing[self.num_sent] == 0:
            self.reduce_bucket(self.num_sent)

    def flat_gradient(self, bucket):
        return super().flat_gradient(bucket) * self.group.size()

    def add(self, index, arrived):
        self.shards[index].add_(arrived, alpha=1 / self.group.size())


class AllAtTheEnd(Handing):
    """finish() shares the gradients out: until then all are held."""

    def send_complete(self):
        pass


class ForgetsTheLast(Handing):
    """Hooks send everything: not a bucket with a parameter that nothing uses."""

    def finish(self):
        self.reset()


class WheneverComplete(Handing):
    """A bucket goes out when it is complete: in another order on another rank."""

    def reset(self):
        super().reset()
        self.sent = set()

    def send_complete(self):
        for index, bucket in enumerate(self.buckets):
            if index not in self.sent and self.complete.issuperset(bucket):
                self.sent.add(index)
                self.reduce_bucket(index)

    def finish(self):
        for index in set(range(len(self.buckets))) - self.sent:
            self.reduce_bucket(index)
        self.reset()


class TrustsTheOrder(Handing):
    """The last gradient of the list comes last: on another rank another one does."""

    def collect(self, p):
        if self.num_sent < len(self.buckets) and p is self.buckets[self.num_sent][-1]:
            self.reduce_bucket(self.num_sent)


class Overwrites(Handing):
    """The shard is what has arrived: of the last micro-batch alone."""

    def add(self, index, arrived):
        self.shards[index].copy_(arrived)


class KeepsGrad(Handing):
    """The shard is small: .grad is still there, and grows by the next micro-batch."""

    def free(self, bucket):
        pass


class SkipsNone(Handing):
    """A parameter without a gradient takes no room: the other ranks' tensor is longer."""

    def flat_gradient(self, bucket):
        there = [p.grad for p in bucket if p.grad is not None]
        return flatten(there or grads_of(bucket), self.group.size())


class AllReducesBuckets(Handing):
    """All-reduce, then keep this rank's part: twice the bytes, and the sum is held in full."""

    def reduce(self, index, flat):
        dist.all_reduce(flat, group=self.group)
        self.add(index, own(flat, self.group))


class NeverWaits(Handing):
    """async_op makes it faster: what it brings is not there yet."""

    def reduce(self, index, flat):
        arrived = torch.empty_like(self.shards[index])
        reduce_scatter_single(arrived, flat, self.group, async_op=True)
        self.add(index, arrived)


class HoldsEveryFlat(Handing):
    """Everything under way, waited for at the end: every flat gradient is held until then."""

    def reset(self):
        super().reset()
        self.in_flight = []

    def reduce(self, index, flat):
        arrived = torch.empty_like(self.shards[index])
        work = reduce_scatter_single(arrived, flat, self.group, async_op=True)
        self.in_flight.append((index, arrived, flat, work))

    def finish(self):
        for index in range(self.num_sent, len(self.buckets)):
            self.reduce_bucket(index)
        for index, arrived, _, work in self.in_flight:
            work.wait()
            self.add(index, arrived)
        self.reset()


class KeepsOneFlat(Handing):
    """One flat gradient is little: it is a bucket that lives as long as the run."""

    def reduce(self, index, flat):
        self.flat = flat
        super().reduce(index, flat)


class KeepsAllInNumpy(Handing):
    """An array of each gradient, to look at: as large as without ZeRO."""

    def reduce(self, index, flat):
        self.seen = [*getattr(self, "seen", []), flat.numpy().copy()]
        super().reduce(index, flat)


class NeverEmpty(Handing):
    """What was complete stays complete: the next backward pass sends what is not there yet."""

    def reset(self):
        self.complete, self.num_sent = getattr(self, "complete", set()), 0


# 6.4


class Unit:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, module, group):
        self.group, self.parameters = group, list(module.parameters())
        self.flat = flatten(self.parameters, group.size())
        self.num_bytes, self.missing = self.flat.nbytes, len(self.parameters)
        self.shard = self.make_shard()
        for p, view in unflatten(self.flat, self.parameters):
            p.data = view
        self.register(module)
        self.reshard()

    def make_shard(self):
        return nn.Parameter(own(self.flat, self.group).clone())

    def register(self, module):
        module.register_forward_pre_hook(self.unshard)
        module.register_forward_hook(self.reshard)
        module.register_full_backward_pre_hook(self.unshard)
        self.register_gradients(module)

    def register_gradients(self, module):
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.collect)

    def unshard(self, *_):
        self.flat.untyped_storage().resize_(self.num_bytes)
        all_gather_single(self.flat, self.shard.detach(), self.group)

    def reshard(self, *_):
        self.flat.untyped_storage().resize_(0)

    def collect(self, p):
        self.missing -= 1
        if self.missing == 0:
            self.reduce()
            self.reshard()
            self.missing = len(self.parameters)

    def reduce(self, *_):
        flat = flatten(grads_of(self.parameters), self.group.size()) / self.group.size()
        arrived = torch.empty_like(self.shard.detach())
        reduce_scatter_single(arrived, flat, self.group)
        self.add(arrived)
        self.free()

    def add(self, arrived):
        if self.shard.grad is not None:
            arrived += self.shard.grad
        self.shard.grad = arrived

    def free(self):
        for p in self.parameters:
            p.grad = None


class RightOutputHook(Unit):
    """Hears of the backward pass from the output's gradient."""

    def register(self, module):
        module.register_forward_pre_hook(self.unshard)
        module.register_forward_hook(self.after_forward)
        self.register_gradients(module)

    def after_forward(self, module, args, output):
        self.reshard()
        output.register_hook(self.unshard)


class RightGathersAside(Unit):
    """Gathers into a new tensor, copies, and lets the reduce-scatter run for a while."""

    def unshard(self, *_):
        whole = self.shard.new_empty(self.group.size() * len(self.shard))
        all_gather_single(whole, self.shard.detach(), self.group, async_op=True).wait()
        self.flat.untyped_storage().resize_(self.num_bytes)
        self.flat.copy_(whole)

    def reduce(self, *_):
        flat = flatten(grads_of(self.parameters), self.group.size()) / self.group.size()
        self.free()
        arrived = torch.empty_like(self.shard.detach())
        work = reduce_scatter_single(arrived, flat, self.group, async_op=True)
        work.wait()
        self.add(arrived)


class KeepsWhatItSent(Unit):
    """The flat gradient of a unit stays in an attribute: together they are the whole model's."""

    def reduce(self, *_):
        self.sent = flatten(grads_of(self.parameters), self.group.size())
        super().reduce()


class KeepsArrays(Unit):
    """The weights as arrays, for later: sharding was to save them."""

    def make_shard(self):
        self.array = self.flat.clone().numpy()
        return super().make_shard()


class ShardsNothing(Unit):
    """Every rank has a flat copy of everything, and averages: that is data parallelism."""

    def make_shard(self):
        return nn.Parameter(self.flat.clone())

    def unshard(self, *_):
        self.flat.copy_(self.shard.detach())

    def reshard(self, *_):
        pass

    def reduce(self, *_):
        flat = flatten(grads_of(self.parameters), self.group.size()) / self.group.size()
        part = torch.empty_like(own(flat, self.group))
        reduce_scatter_single(part, flat, self.group)
        all_gather_single(flat, part, self.group)
        self.add(flat)
        self.free()


class ShardsOnPaper(Unit):
    """There is a shard: and beside it the parameters, as ever."""

    def reshard(self, *_):
        pass


class NewTensorEachTime(Unit):
    """The parameters are emptied: autograd still refers to what they were."""

    def __init__(self, module, group):
        self.shapes = [p.shape for p in module.parameters()]
        super().__init__(module, group)

    def unshard(self, *_):
        flat = self.shard.new_empty(self.group.size() * len(self.shard))
        all_gather_single(flat, self.shard.detach(), self.group)
        parts = flat[: sum(map(math.prod, self.shapes))].split([*map(math.prod, self.shapes)])
        for p, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            p.data = part.view(shape)

    def reshard(self, *_):
        self.flat = None
        for p in self.parameters:
            p.data = p.data.new_empty(0)


class StaysAfterForward(Unit):
    """Backward needs them again: and meanwhile all units are there at once."""

    def register(self, module):
        module.register_forward_pre_hook(self.unshard)
        self.register_gradients(module)


class OnlyForForward(Unit):
    """The backward pass works on gradients: and on the parameters."""

    def register(self, module):
        module.register_forward_pre_hook(self.unshard)
        module.register_forward_hook(self.reshard)
        self.register_gradients(module)


class FullBackwardHook(Unit):
    """A module's backward hook comes last: not if its input needs no gradient."""

    def register_gradients(self, module):
        module.register_full_backward_hook(self.after_backward)

    def after_backward(self, *_):
        self.reduce()
        self.reshard()


class SumsUnits(Unit):
    """The reduce-scatter averages: it adds up."""

    def add(self, arrived):
        super().add(arrived * self.group.size())


class OverwritesGrad(Unit):
    """shard.grad is what has arrived: the micro-batch before is forgotten."""

    def add(self, arrived):
        self.shard.grad = arrived


class KeepsFullGradients(Unit):
    """The shard has its gradient: and every parameter still has the full one."""

    def add(self, arrived):
        self.shard.grad = arrived

    def free(self):
        pass


class Stale(Unit):
    """What was cut at the start is gathered: the optimizer has updated something else."""

    def make_shard(self):
        self.first = own(self.flat, self.group).clone()
        return super().make_shard()

    def unshard(self, *_):
        self.flat.untyped_storage().resize_(self.num_bytes)
        all_gather_single(self.flat, self.first, self.group)


class ForEveryLayer(Unit):
    """Hooks on every layer inside: the unit is gathered for each of them."""

    def register(self, module):
        for layer in module.modules():
            layer.register_forward_pre_hook(self.unshard)
        module.register_forward_hook(self.reshard)
        module.register_full_backward_pre_hook(self.unshard)
        self.register_gradients(module)


RIGHT_ANSWERS = {
    "owned_ranges": [right_by_elements, right_between],
    "ShardedOptimizer": [RightViews, RightAsynchronous],
    "ShardedGradients": [RightOneUnderWay, RightCountdown],
    "ShardedUnit": [RightOutputHook, RightGathersAside],
}

MISTAKES = {
    "owned_ranges": {
        floor: "L is rounded up",
        each_parameter: "not each parameter by itself",
        last_takes_the_rest: "every shard has L = ceil(n / N)",
        tensor_split: "every shard has L = ceil(n / N)",
        whole_parameters: "a cut may go through a parameter",
        in_the_whole: "count from the parameter's own",
        not_cut_off: "cut both ends",
        without_the_last: "stop is one past",
    },
    "ShardedOptimizer": {
        LocalNorm: "the norm of this rank's shard",
        Unsharded: "this optimizer is not sharded",
        AllReduces: "all_reduce is for one number here",
        SumsGradients: "the gradient is the mean",
        AddsNorms: "squares add up, norms do not",
        NeverClips: "the gradient was not clipped",
        KeepsToItself: "gathered after it",
        GathersFirst: "its values from the gathered shards",
        KeepsGradients: "the next backward pass adds to it",
        ShardIsAView: "a view of all of them",
        MadeAnew: "has forgotten its state",
        ClipsByItsShard: "each rank clipped by the norm of its own shard",
        AlwaysScales: "was enlarged to it",
        ClipsValues: "changes the direction",
        DividesByZero: "ZeroDivisionError",
        MakesNaN: "0 / 0 is nan",
        KeepsTheGradientInNumpy: "something of the model's size is kept",
    },
    "ShardedGradients": {
        Overwrites: "the last micro-batch only",
        AllAtTheEnd: "as they would be without ZeRO",
        ForgetsTheLast: "finish() sends those that remain",
        WheneverComplete: "send them in their order",
        TrustsTheOrder: "was sent too early",
        KeepsGrad: "free a gradient once it has been reduced",
        SkipsNone: "zeros for None",
        AllReducesBuckets: "all_reduce is called; use only reduce_scatter",
        NeverWaits: "waited for",
        HoldsEveryFlat: "wait for one reduce-scatter before the next starts",
        NeverEmpty: "was sent too early",
        KeepsOneFlat: "nothing is held but the shard",
        KeepsAllInNumpy: "nothing is held but the shard",
    },
    "ShardedUnit": {
        SumsUnits: "that is the sum",
        NewTensorEachTime: "autograd keeps views of the flat tensors",
        ShardsNothing: "the module is not sharded",
        ShardsOnPaper: "the module shards nothing",
        StaysAfterForward: "reshard in a forward hook",
        OnlyForForward: "again before backward",
        FullBackwardHook: "when no gradient is ",
        OverwritesGrad: "from the micro-batches before",
        KeepsFullGradients: "the full gradients are freed",
        Stale: "as they are now",
        ForEveryLayer: "not in between",
        KeepsWhatItSent: "flat tensors of them, before the next begins",
        KeepsArrays: "the module shards nothing",
    },
}
