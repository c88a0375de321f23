"""Wrong answers to chapter 4's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

# 4.1


def learning(model):
    return [p for p in model.parameters() if p.requires_grad]


def fill(parameters):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return parameters


def right_one_flat_tensor(model, group):
    """One all-reduce of everything, copied back."""
    parameters = fill(learning(model))
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat, group=group)
    start = 0
    for p in parameters:
        p.grad = flat[start : start + p.numel()].reshape(p.shape) / group.size()
        start += p.numel()


def right_all_at_once(model, group):
    """Everything under way at once, waited for and divided afterwards."""
    parameters = fill(learning(model))
    works = [dist.all_reduce(p.grad, group=group, async_op=True) for p in parameters]
    for p, work in zip(parameters, works, strict=True):
        work.wait()
        p.grad.div_(group.size())


def sums(model, group):
    """all_reduce gives the mean: it gives the sum."""
    for p in fill(learning(model)):
        dist.all_reduce(p.grad, group=group)


def all_ranks_there_are(model, group):
    """The number of ranks is the world size: of this group it is group.size()."""
    for p in fill(learning(model)):
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size()


def default_group(model, group):
    """There is only one group: the call without it takes all ranks there are."""
    for p in fill(learning(model)):
        dist.all_reduce(p.grad)
        p.grad /= group.size()


def divides_twice(model, group):
    """Each rank divides before, and everything is divided after."""
    for p in fill(learning(model)):
        p.grad /= group.size()
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()


def skips_none(model, group):
    """Without a gradient there is nothing to send: the other ranks wait for it."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()


def sends_tied_twice(model, group):
    """Every name is a parameter: two names can be one."""
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            fill([p])
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()


def frozen_too(model, group):
    """Every parameter has a gradient: a frozen one has none and needs none."""
    for p in fill(list(model.parameters())):
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()


def averages_weights(model, group):
    """Averaging the parameters is as good: the gradients stay apart."""
    for p in learning(model):
        dist.all_reduce(p.data, group=group)
        p.data /= group.size()


def forgets_to_wait(model, group):
    """async_op makes it faster: the result is not there yet."""
    for p in fill(learning(model)):
        dist.all_reduce(p.grad, group=group, async_op=True)
        p.grad /= group.size()


def gathers(model, group):
    """Collecting all gradients and averaging them: N times the bytes."""
    for p in fill(learning(model)):
        parts = [torch.empty_like(p.grad) for _ in range(group.size())]
        dist.all_gather(parts, p.grad, group=group)
        p.grad = sum(parts) / group.size()


def in_float32(model, group):
    """Half the bytes, and nobody needs 15 digits: the result is rounded."""
    for p in fill(learning(model)):
        small = p.grad.float()
        dist.all_reduce(small, group=group)
        p.grad.copy_(small.double() / group.size())


def sends_twice(model, group):
    """Averaging once more does no harm: it costs as much again."""
    right_all_at_once(model, group)
    right_all_at_once(model, group)


def sends_frozen(model, group):
    """Zeros for a frozen parameter cost little: they are sent, whatever they are."""
    for p in model.parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(grad, group=group)
        if p.requires_grad:
            p.grad = grad / group.size()


def flat_with_frozen(model, group):
    """One flat tensor of all parameters: the frozen one's zeros travel in it."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads]) / group.size()
    dist.all_reduce(flat, group=group)
    parts = flat.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        if p.requires_grad:
            p.grad = part.view_as(p)


def asks_for_each(model, group):
    """Before a gradient is sent, all agree that somebody has one: a message for each."""
    for p in learning(model):
        has = torch.tensor(float(p.grad is not None))
        dist.all_reduce(has, group=group)
        if has:
            fill([p])
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()


def thaws(model, group):
    """Everything shall train: what is frozen is the caller's choice."""
    right_all_at_once(model, group)
    model.requires_grad_()


def right_asks_once(model, group):
    """One message says who has what; then only what somebody has is sent."""
    parameters = learning(model)
    has = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(has, group=group)
    for p, number in zip(parameters, has, strict=True):
        if number:
            fill([p])
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()


# 4.2


def right_recursive(sizes, bucket_bytes):
    """Takes the longest run from the end, then the rest."""
    if not sizes:
        return []
    count, held = 1, sizes[-1]
    while count < len(sizes) and held + sizes[-1 - count] <= bucket_bytes:
        held += sizes[-1 - count]
        count += 1
    first = len(sizes) - count
    return [
        list(range(len(sizes) - 1, first - 1, -1)),
        *right_recursive(sizes[:first], bucket_bytes),
    ]


def forgets_the_last(sizes, bucket_bytes):
    """A bucket is kept when it is full: the last one never is."""
    buckets, bucket, held = [], [], 0
    for index in reversed(range(len(sizes))):
        if bucket and held + sizes[index] > bucket_bytes:
            buckets.append(bucket)
            bucket, held = [], 0
        bucket.append(index)
        held += sizes[index]
    return buckets


def starts_with_an_empty_one(sizes, bucket_bytes):
    """The first bucket is there from the start: it stays empty before a large gradient."""
    buckets, held = [[]], 0
    for index in reversed(range(len(sizes))):
        if held + sizes[index] > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def forwards(sizes, bucket_bytes):
    """The order of registration: the bucket of the first layer is complete last."""
    mirrored = right_recursive(sizes[::-1], bucket_bytes)
    return [[len(sizes) - 1 - index for index in bucket] for bucket in mirrored]


def overflows(sizes, bucket_bytes):
    """A bucket is full when it holds bucket_bytes or more: then it holds too much."""
    buckets, held = [], bucket_bytes
    for index in reversed(range(len(sizes))):
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def strictly_less(sizes, bucket_bytes):
    """Less than bucket_bytes: exactly is allowed too."""
    return right_recursive(sizes, bucket_bytes - 1)


def sorts(sizes, bucket_bytes):
    """Large ones first packs best: but they are not complete first."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    positions = right_recursive([sizes[index] for index in reversed(order)], bucket_bytes)
    return [[order[len(sizes) - 1 - p] for p in bucket] for bucket in positions]


def first_fit(sizes, bucket_bytes):
    """A small gradient fills up an older bucket: which has been sent by then."""
    buckets = []
    for index in reversed(range(len(sizes))):
        for bucket in buckets:
            if sum(sizes[i] for i in bucket) + sizes[index] <= bucket_bytes:
                bucket.append(index)
                break
        else:
            buckets.append([index])
    return buckets


# 4.3


class Hooked:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, model, group):
        self.model, self.group, self.synchronizes, self.works = model, group, True, []
        for p in self.hooked():
            p.register_post_accumulate_grad_hook(self.reduce)

    def hooked(self):
        return learning(self.model)

    def send(self, tensor):
        self.works.append(dist.all_reduce(tensor, group=self.group, async_op=True))

    def reduce(self, p):
        if self.synchronizes:
            p.grad /= self.group.size()
            self.send(p.grad)

    def finish(self):
        for work in self.works:
            work.wait()
        self.works = []

    @contextmanager
    def no_sync(self):
        self.synchronizes = False
        yield
        self.synchronizes = True


class RightCopies(Hooked):
    """Sends a flat copy, and divides when it has arrived."""

    def reduce(self, p):
        if self.synchronizes:
            copy = p.grad.reshape(-1).clone()
            work = dist.all_reduce(copy, group=self.group, async_op=True)
            self.works.append((p, copy, work))

    def finish(self):
        for p, copy, work in self.works:
            work.wait()
            p.grad = copy.view(p.shape) / self.group.size()
        self.works = []


class RightClosures(Hooked):
    """A closure per parameter, and futures instead of works."""

    def __init__(self, model, group):
        self.group, self.synchronizes, self.works = group, True, {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p, name=name: self.start(name, p))

    def start(self, name, p):
        if self.synchronizes:
            self.works[name] = p, dist.all_reduce(p.grad, group=self.group, async_op=True)

    def finish(self):
        while self.works:
            _, (p, work) = self.works.popitem()
            work.get_future().wait()
            p.grad.mul_(1 / self.group.size())


class NeverClears(Hooked):
    """A work that was waited for costs nothing: it holds its tensor, and the list grows."""

    def finish(self):
        for work in self.works:
            work.wait()


class KeepsGradients(Hooked):
    """A copy of each gradient, to look at later: more of them in every step."""

    def reduce(self, p):
        super().reduce(p)
        self.history = [*getattr(self, "history", []), p.grad.clone()]


class KeepsArraysOfGradients(Hooked):
    """The same in NumPy."""

    def finish(self):
        super().finish()
        grads = [p.grad.numpy().copy() for p in self.hooked() if p.grad is not None]
        self.history = [*getattr(self, "history", []), grads]


class DividesEachMicroBatch(Hooked):
    """Every micro-batch's hook divides: what was there before is divided again."""

    def reduce(self, p):
        p.grad /= self.group.size()
        if self.synchronizes:
            self.send(p.grad)


class InFloat32(Hooked):
    """Gradients may travel in half the bytes: they arrive with half the digits."""

    def reduce(self, p):
        if self.synchronizes:
            small = (p.grad / self.group.size()).float()
            work = dist.all_reduce(small, group=self.group, async_op=True)
            self.works.append((p, small, work))

    def finish(self):
        for p, small, work in self.works:
            work.wait()
            p.grad.copy_(small)
        self.works = []


class Blocks(Hooked):
    """A hook is enough for overlap: not if it waits."""

    def send(self, tensor):
        dist.all_reduce(tensor, group=self.group)


class WaitsInTheHook(Hooked):
    """async_op, then wait() on the next line: the backward pass stands still."""

    def send(self, tensor):
        dist.all_reduce(tensor, group=self.group, async_op=True).wait()


class NothingInBackward(Hooked):
    """Everything in finish(): right, and nothing overlaps."""

    def reduce(self, p):
        pass

    def finish(self):
        for p in self.hooked():
            if p.grad is not None:
                super().reduce(p)
        super().finish()


class NeverWaits(Hooked):
    """Nobody waits: the optimizer takes what is there."""

    def finish(self):
        self.works = []


class ReducesParameter(Hooked):
    """The hook's argument is the gradient: it is the parameter (a bug of a public code base)."""

    def reduce(self, p):
        if self.synchronizes:
            self.send(p.data)


class Sums(Hooked):
    """The sum will do, AdamW does not mind the scale: SGD and clipping do."""

    def reduce(self, p):
        if self.synchronizes:
            self.send(p.grad)


class DividesUnderWay(Hooked):
    """Start the all-reduce, then divide: the network still reads and writes that tensor."""

    def reduce(self, p):
        if self.synchronizes:
            self.send(p.grad)
            p.grad /= self.group.size()


class SendsAlways(Hooked):
    """Every micro-batch is sent: no_sync() is there to avoid that."""

    def reduce(self, p):
        p.grad /= self.group.size()
        self.send(p.grad)


class HooksTwice(Hooked):
    """Every name is a parameter: the tied weight gets two hooks, and is averaged twice."""

    def hooked(self):
        return [
            p for _, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad
        ]


class HooksAgain(Hooked):
    """finish() registers the hooks for the next step: they are still there."""

    def finish(self):
        super().finish()
        for p in self.hooked():
            p.register_post_accumulate_grad_hook(self.reduce)


class ForgetsScalars(Hooked):
    """Only matrices are worth sending: every rank then has another bias."""

    def hooked(self):
        return [p for p in learning(self.model) if p.dim() > 1]


# 4.4


class Bucketed:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, model, group, bucket_bytes):
        self.group, self.synchronizes = group, True
        self.buckets = self.fill(learning(model), bucket_bytes)
        self.reset()
        for p in learning(model):
            p.register_post_accumulate_grad_hook(self.collect)

    @staticmethod
    def fill(parameters, bucket_bytes):
        plan = right_recursive([p.nbytes for p in parameters], bucket_bytes)
        return [[parameters[index] for index in bucket] for bucket in plan]

    def reset(self):
        self.complete, self.works, self.num_sent = set(), [], 0

    def collect(self, p):
        if self.synchronizes:
            self.complete.add(p)
            self.send_complete()

    def send_complete(self):
        while self.num_sent < len(self.buckets) and self.complete.issuperset(
            self.buckets[self.num_sent]
        ):
            self.send(self.buckets[self.num_sent])

    def flatten(self, bucket):
        return torch.cat([p.grad.flatten() for p in fill(bucket)]) / self.group.size()

    def issue(self, flat):
        self.works.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def send(self, bucket):
        flat = self.flatten(bucket)
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view_as(p)
        self.issue(flat)
        self.num_sent += 1

    def finish(self):
        for bucket in self.buckets[self.num_sent :]:
            self.send(bucket)
        for work in self.works:
            work.wait()
        self.reset()

    @contextmanager
    def no_sync(self):
        self.synchronizes = False
        yield
        self.synchronizes = True


class RightCountdown(Bucketed):
    """Counts down per bucket, and copies back from flat tensors that are dropped."""

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.in_flight = []

    def collect(self, p):
        if self.synchronizes:
            number = next(
                n for n, bucket in enumerate(self.buckets) if any(p is other for other in bucket)
            )
            self.missing[number] -= 1
            while len(self.in_flight) < len(self.buckets) and not self.missing[len(self.in_flight)]:
                self.send(self.buckets[len(self.in_flight)])

    def send(self, bucket):
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        )
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.in_flight.append((bucket, flat, work))

    def finish(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            self.send(bucket)
        for bucket, flat, work in self.in_flight:
            work.wait()
            flat /= self.group.size()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.clone().view_as(p)
        self.reset()


class RightViews(Bucketed):
    """Flat tensors that stay, each .grad a view of one."""

    def reset(self):
        super().reset()
        if not hasattr(self, "flats"):
            self.flats = [
                torch.empty(sum(p.numel() for p in bucket), dtype=bucket[0].dtype)
                for bucket in self.buckets
            ]

    def send(self, bucket):
        flat = self.flats[self.num_sent]
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
            p.grad = part.view(p.shape)
        flat /= self.group.size()
        self.issue(flat)
        self.num_sent += 1


class OnePerGradient(Bucketed):
    """A bucket is a list of all-reduces: it is one, of one flat tensor."""

    def send(self, bucket):
        for p in fill(bucket):
            p.grad /= self.group.size()
            self.issue(p.grad)
        self.num_sent += 1


class DropsTheLast(Bucketed):
    """Hooks send everything: not a bucket with a parameter that nothing uses."""

    def finish(self):
        for work in self.works:
            work.wait()
        self.reset()


class WheneverComplete(Bucketed):
    """A bucket goes out when it is complete: in another order on another rank."""

    def reset(self):
        super().reset()
        self.sent = set()

    def send_complete(self):
        for number, bucket in enumerate(self.buckets):
            if number not in self.sent and self.complete.issuperset(bucket):
                self.sent.add(number)
                self.send(bucket)

    def finish(self):
        for number, bucket in enumerate(self.buckets):
            if number not in self.sent:
                self.send(bucket)
        for work in self.works:
            work.wait()
        self.reset()


class TrustsTheOrder(Bucketed):
    """The last gradient of the list comes last: on another rank another one does."""

    def collect(self, p):
        if (
            self.synchronizes
            and self.num_sent < len(self.buckets)
            and p is self.buckets[self.num_sent][-1]
        ):
            self.send(self.buckets[self.num_sent])


class NeverForgets(Bucketed):
    """What was complete stays complete: in the next step it is not."""

    def reset(self):
        self.complete, self.works, self.num_sent = getattr(self, "complete", set()), [], 0


class NeverCopiesBack(Bucketed):
    """The flat tensor is averaged: .grad is not."""

    def send(self, bucket):
        self.issue(self.flatten(bucket))
        self.num_sent += 1


class BlocksPerBucket(Bucketed):
    """One all-reduce per bucket, and wait for it."""

    def issue(self, flat):
        dist.all_reduce(flat, group=self.group)


class OverlapsInOneOrder(Bucketed):
    """Only its last gradient can send a bucket: in another order it stays until finish()."""

    def collect(self, p):
        if self.synchronizes:
            self.complete.add(p)
            if self.num_sent < len(self.buckets) and p is self.buckets[self.num_sent][-1]:
                self.send_complete()


class CountsUnderNoSync(Bucketed):
    """Complete is complete: a gradient that was complete before the last micro-batch is not."""

    def collect(self, p):
        self.complete.add(p)
        if self.synchronizes:
            self.send_complete()


class SkipsNone(Bucketed):
    """A parameter without a gradient takes no room: the other ranks' tensor is longer."""

    def send(self, bucket):
        super().send([p for p in bucket if p.grad is not None] or bucket)


class NeverForgetsWorks(Bucketed):
    """The works of all steps may stay in a list: each holds its flat tensor."""

    def reset(self):
        self.complete, self.num_sent = set(), 0
        self.works = getattr(self, "works", [])


class KeepsArrays(Bucketed):
    """An array beside .grad is no tensor: it has as many bytes."""

    def finish(self):
        super().finish()
        self.copies = [p.grad.numpy().copy() for bucket in self.buckets for p in bucket]


class KeepsFlatTensors(Bucketed):
    """Flat tensors for ever, and .grad copied out of them: the gradients are held twice."""

    def send(self, bucket):
        flat = self.flatten(bucket)
        self.issue(flat)
        if not hasattr(self, "flat"):
            self.flat = {}
        self.flat[self.num_sent] = flat
        self.num_sent += 1

    def finish(self):
        super().finish()
        for number, bucket in enumerate(self.buckets):
            parts = self.flat[number].split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                p.grad = part.clone().view_as(p)


RIGHT_ANSWERS = {
    "average_gradients": [right_one_flat_tensor, right_all_at_once, right_asks_once],
    "assign_buckets": [right_recursive],
    "HookedDataParallel": [RightCopies, RightClosures],
    "BucketedDataParallel": [RightCountdown, RightViews],
}

MISTAKES = {
    "average_gradients": {
        sums: "the sum",
        sends_tied_twice: "the tied weight is sent under both of its names",
        all_ranks_there_are: "the number of all ranks",
        default_group: "without group=group",
        divides_twice: "divided twice",
        skips_none: "a gradient being None",
        frozen_too: "which is frozen, has a gradient",
        averages_weights: "reduce .grad itself",
        forgets_to_wait: "wait for every asynchronous all_reduce",
        gathers: "all_gather is called; use only all_reduce",
        in_float32: "float32 has 7 digits",
        sends_twice: "everything is sent twice",
        sends_frozen: "second.bias is frozen but sent",
        flat_with_frozen: "second.bias is frozen but sent",
        thaws: "do not set requires_grad",
        asks_for_each: "more calls than gradients",
    },
    "assign_buckets": {
        forwards: "start at the end",
        overflows: "check before the gradient joins",
        forgets_the_last: "is the last one kept",
        starts_with_an_empty_one: "a bucket is empty",
        strictly_less: "may hold exactly",
        sorts: "do not sort by size",
        first_fit: "add to an earlier bucket",
    },
    "HookedDataParallel": {
        Sums: "the sum",
        WaitsInTheHook: "each wait blocks the backward pass",
        Blocks: "each wait blocks the backward pass",
        NothingInBackward: "nothing overlaps",
        NeverWaits: "wait for every asynchronous all_reduce",
        ReducesParameter: "a parameter was reduced, not its gradient",
        DividesUnderWay: "either before you start it",
        SendsAlways: "all-reduces under no_sync()",
        HooksTwice: "is a hook registered twice",
        HooksAgain: "again in every step",
        ForgetsScalars: "a parameter without a hook",
        KeepsGradients: "tensors or arrays of every step are kept",
        KeepsArraysOfGradients: "tensors or arrays of every step are kept",
        NeverClears: "the works of earlier steps are never dropped",
        DividesEachMicroBatch: "is .grad changed between all_reduce and wait()",
        InFloat32: "send .grad itself",
    },
    "BucketedDataParallel": {
        NeverCopiesBack: "its own gradient",
        OnePerGradient: "concatenate its gradients",
        DropsTheLast: "finish() sends the rest",
        WheneverComplete: "send them in their order",
        TrustsTheOrder: "a bucket was sent before all of its gradients were complete",
        NeverForgets: "does finish() reset",
        BlocksPerBucket: "each wait blocks the backward pass",
        OverlapsInOneOrder: "nothing overlaps",
        CountsUnderNoSync: "complete after the last micro-batch",
        SkipsNone: "zeros for None",
        KeepsFlatTensors: "still held besides .grad",
        KeepsArrays: "still held besides .grad",
        NeverForgetsWorks: "the works of earlier steps are never dropped",
    },
}
