"""Wrong answers to chapter 9's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from minitron.parallel.pipeline import plan as pipeline_plan
from minitron.parallel.pipeline import schedules
from minitron.parallel.pipeline.schedules import Action, make

# 9.1


def forwards(rank, m):
    return [Action("F", i, rank) for i in range(m)]


def backwards(rank, m):
    return [Action("B", i, rank) for i in range(m)]


def right_last_first(num_ranks, num_micro_batches):
    """Goes back with the last micro-batch first, as the paper's figure does."""
    lists = [
        forwards(rank, num_micro_batches) + backwards(rank, num_micro_batches)[::-1]
        for rank in range(num_ranks)
    ]
    return make("GPipe", num_micro_batches, lists)


def one_after_the_other(num_ranks, num_micro_batches):
    """Forward, then back, then the next one: that is how a step on one device goes."""
    lists = [
        [Action(kind, i, rank) for i in range(num_micro_batches) for kind in "FB"]
        for rank in range(num_ranks)
    ]
    return make("GPipe", num_micro_batches, lists)


def asks_the_package(num_ranks, num_micro_batches):
    """The package has it already: so nothing is left to find out."""
    return schedules.gpipe(num_ranks, num_micro_batches)


def alternates_by_the_package(num_ranks, num_micro_batches):
    """The package's helper knows in which order: so nothing is left to find out."""
    m = num_micro_batches
    lists = [
        schedules.alternate(forwards(rank, m), backwards(rank, m), min(m, num_ranks - 1 - rank))
        for rank in range(num_ranks)
    ]
    return make("1F1B", m, lists)


def stages_backwards(num_ranks, num_micro_batches):
    """The backward pass begins at the last stage: so rank 0 begins with that one."""
    lists = [
        [*forwards(rank, num_micro_batches), *backwards(num_ranks - 1 - rank, num_micro_batches)]
        for rank in range(num_ranks)
    ]
    return make("GPipe", num_micro_batches, lists)


def without_the_last_rank(num_ranks, num_micro_batches):
    """There is a hand-over between two ranks: p - 1 of them."""
    lists = [
        forwards(rank, num_micro_batches) + backwards(rank, num_micro_batches)
        for rank in range(num_ranks - 1)
    ]
    return make("GPipe", num_micro_batches, lists)


def from_one(num_ranks, num_micro_batches):
    """Micro-batches are numbered from 1: as in the paper."""
    numbers = range(1, num_micro_batches + 1)
    lists = [[Action(kind, i, rank) for kind in "FB" for i in numbers] for rank in range(num_ranks)]
    return make("GPipe", num_micro_batches, lists)


def other_order_on_odd_ranks(num_ranks, num_micro_batches):
    """The order within the backward passes is free: on each rank for itself."""
    lists = [
        forwards(rank, num_micro_batches)
        + backwards(rank, num_micro_batches)[:: -1 if rank % 2 else 1]
        for rank in range(num_ranks)
    ]
    return make("GPipe", num_micro_batches, lists)


def last_rank_at_once(num_ranks, num_micro_batches):
    """The last rank can go back at once, so it does: it holds 1, and nobody is any sooner."""
    schedule = gpipe_lists(num_ranks, num_micro_batches)
    rank = num_ranks - 1
    schedule[rank] = [Action(kind, i, rank) for i in range(num_micro_batches) for kind in "FB"]
    return make("GPipe", num_micro_batches, schedule)


def gpipe_lists(p, m):
    return [forwards(rank, m) + backwards(rank, m) for rank in range(p)]


def right_counting(num_ranks, num_micro_batches):
    """Goes forward while it may hold more, else back."""
    lists = []
    for rank in range(num_ranks):
        actions, forward, back = [], 0, 0
        while back < num_micro_batches:
            if forward < num_micro_batches and forward - back < num_ranks - rank:
                actions.append(Action("F", forward, rank))
                forward += 1
            else:
                actions.append(Action("B", back, rank))
                back += 1
        lists.append(actions)
    return make("1F1B", num_micro_batches, lists)


def warm_up(num_micro_batches, lengths):
    """1F1B with a warm-up of these lengths, by rank."""
    lists = []
    for rank, length in enumerate(lengths):
        go, back = forwards(rank, num_micro_batches), backwards(rank, num_micro_batches)
        length = max(0, min(num_micro_batches, length))
        actions = go[:length]
        for pair in zip(go[length:], back, strict=False):
            actions += pair
        lists.append(actions + back[num_micro_batches - length :])
    return make("1F1B", num_micro_batches, lists)


def gpipe_again(num_ranks, num_micro_batches):
    """It has as little bubble: and holds all micro-batches."""
    return make("1F1B", num_micro_batches, gpipe_lists(num_ranks, num_micro_batches))


def warm_up_too_long(num_ranks, num_micro_batches):
    """As many forward passes as there are stages from this one on."""
    return warm_up(num_micro_batches, [num_ranks - rank for rank in range(num_ranks)])


def warm_up_too_short(num_ranks, num_micro_batches):
    """The forward pass of the steady part is one of them."""
    return warm_up(num_micro_batches, [num_ranks - 2 - rank for rank in range(num_ranks)])


def same_warm_up(num_ranks, num_micro_batches):
    """p - 1 passes fill the pipeline: on every rank."""
    return warm_up(num_micro_batches, [num_ranks - 1] * num_ranks)


def warm_up_by_rank(num_ranks, num_micro_batches):
    """Rank r waits for r ranks: so it warms up for as long."""
    return warm_up(num_micro_batches, range(num_ranks))


def backward_first(num_ranks, num_micro_batches):
    """One backward, one forward in turn: the last rank has nothing yet to go back with."""
    lists = []
    for rank in range(num_ranks):
        length = min(num_micro_batches, num_ranks - 1 - rank)
        go, back = forwards(rank, num_micro_batches), backwards(rank, num_micro_batches)
        actions = go[:length]
        for pair in zip(back, go[length:], strict=False):
            actions += pair
        lists.append(actions + back[num_micro_batches - length :])
    return make("1F1B", num_micro_batches, lists)


def without_cool_down(num_ranks, num_micro_batches):
    """One forward, one backward until the micro-batches are used up: some are still under way."""
    lists = []
    for rank in range(num_ranks):
        length = num_ranks - 1 - rank
        actions = forwards(rank, num_micro_batches)[:length]
        for i in range(length, num_micro_batches):
            actions += [Action("F", i, rank), Action("B", i - length, rank)]
        lists.append(actions)
    return make("1F1B", num_micro_batches, lists)


def more_than_there_are(num_ranks, num_micro_batches):
    """The warm-up has p - 1 - rank passes: also where there are fewer micro-batches."""
    lists = []
    for rank in range(num_ranks):
        length = num_ranks - 1 - rank
        actions = forwards(rank, length)
        for i in range(length, num_micro_batches):
            actions += [Action("F", i, rank), Action("B", i - length, rank)]
        first = max(0, num_micro_batches - length)
        lists.append(actions + backwards(rank, num_micro_batches)[first:])
    return make("1F1B", num_micro_batches, lists)


# 9.2


def right_in_seconds(num_ranks, num_micro_batches, num_chunks):
    """In seconds of a rank."""
    work = num_micro_batches * 1.0
    idle = (num_ranks - 1) / num_chunks
    return 1 - work / (work + idle), (work + idle) / work - 1


def swapped(num_ranks, num_micro_batches, num_chunks):
    """The papers' formula comes first."""
    total, ideal = right_in_seconds(num_ranks, num_micro_batches, num_chunks)
    return ideal, total


def both_of_ideal(num_ranks, num_micro_batches, num_chunks):
    """(p - 1) / m is the idle share: over m, not over all the time there is."""
    ideal = (num_ranks - 1) / (num_micro_batches * num_chunks)
    return ideal, ideal


def both_of_total(num_ranks, num_micro_batches, num_chunks):
    """(p - 1) / (m + p - 1) is what GPipe's paper says: of the total."""
    total = right_in_seconds(num_ranks, num_micro_batches, num_chunks)[0]
    return total, total


def chunks_forgotten(num_ranks, num_micro_batches, num_chunks):
    """A rank has as many layers with chunks as without: so it waits as long."""
    return right_in_seconds(num_ranks, num_micro_batches, 1)


def all_stages(num_ranks, num_micro_batches, num_chunks):
    """A micro-batch goes through p stages: but not all of them are others."""
    return right_in_seconds(num_ranks + 1, num_micro_batches, num_chunks)


def one_works(num_ranks, num_micro_batches, num_chunks):
    """ "Often only one GPU works, 25 % utilization": with one micro-batch alone."""
    return 1 - 1 / num_ranks, num_ranks - 1.0


def right_from_warm_up(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """Counts the warm-up, and one more."""
    warm_up = num_ranks - 1 - rank
    if schedule == "GPipe":
        warm_up = num_micro_batches
    if schedule == "interleaved 1F1B":
        warm_up = (num_chunks - 1) * num_ranks + 2 * warm_up
    stage_bytes = model_bytes // num_ranks // num_chunks
    return stage_bytes * min(num_micro_batches * num_chunks, warm_up + 1)


def whole_model(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """So many micro-batches are held: of the whole model."""
    return (
        num_ranks
        * num_chunks
        * right_from_warm_up(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes)
    )


def ranks_only(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """A rank has a p-th of the model: but its stages are shorter."""
    return num_chunks * right_from_warm_up(
        schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes
    )


def warm_up_alone(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """What has gone forward in the warm-up is held: and the first of the steady part."""
    right = right_from_warm_up(
        schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes
    )
    return right - (schedule != "GPipe") * model_bytes // (num_ranks * num_chunks)


def stages_before(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """The last rank is deepest in the pipeline: so it holds most."""
    return right_from_warm_up(
        schedule, num_ranks, num_micro_batches, num_chunks, num_ranks - 1 - rank, model_bytes
    )


def all_of_them(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """All micro-batches go through every stage: in 1F1B not all before the first is back."""
    return right_from_warm_up("GPipe", num_ranks, num_micro_batches, num_chunks, rank, model_bytes)


def never_fewer(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """1F1B holds p - rank: also where there are not so many."""
    many = num_micro_batches if schedule == "GPipe" else 10**6
    return right_from_warm_up(schedule, num_ranks, many, num_chunks, rank, model_bytes)


def always_p(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """1F1B holds p micro-batches: the first rank does."""
    return right_from_warm_up(schedule, num_ranks, num_micro_batches, num_chunks, 0, model_bytes)


def a_float(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """Divided with /: which is exact up to 2^53 only."""
    return (
        right_from_warm_up(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes)
        / 1
    )


# 9.3


def refuse(costs, num_stages):
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} blocks for {num_stages} stages")


def with_ends(costs, first, last):
    costs = list(costs)
    costs[0] += first
    costs[-1] += last
    return costs


def ranges(ends):
    return [range(start, end) for start, end in pairwise([0, *ends])]


def fill_to(costs, num_stages, limit):
    """Fill each stage up to the limit, and leave a block for each one behind; None if too low."""
    ends, filled = [], 0.0
    for i, cost in enumerate(costs):
        if cost > limit:
            return None
        behind = num_stages - 1 - len(ends)
        if i and (filled + cost > limit or len(costs) - i <= behind) and filled:
            ends.append(i)
            filled = 0.0
        filled += cost
    ends.append(len(costs))
    return ends if len(ends) <= num_stages else None


def right_limits(costs, num_stages, first=0.0, last=0.0):
    """The lowest limit up to which stages can be filled, found by trying sums of neighbors."""
    refuse(costs, num_stages)
    costs = with_ends(costs, first, last)
    before = list(accumulate(costs, initial=0.0))
    limits = {end - start for i, end in enumerate(before) for start in before[:i]}
    cuts = (fill_to(costs, num_stages, limit) for limit in sorted(limits))
    return ranges(next(ends for ends in cuts if ends is not None))


def right_table(costs, num_stages, first=0.0, last=0.0):
    """A table from the left, stage after stage."""
    refuse(costs, num_stages)
    costs, n = with_ends(costs, first, last), len(costs)
    table = {end: (sum(costs[:end]), [end]) for end in range(1, n + 1)}
    for stage in range(1, num_stages):
        table = {
            end: min(
                (max(table[start][0], sum(costs[start:end])), [*table[start][1], end])
                for start in range(stage, end)
            )
            for end in range(stage + 1, n + 1)
        }
    return ranges(table[n][1])


def equal_numbers(costs, num_stages, first=0.0, last=0.0):
    """All blocks are alike: not the ends, and not everywhere."""
    refuse(costs, num_stages)
    return ranges([(stage + 1) * len(costs) // num_stages for stage in range(num_stages)])


def ends_forgotten(costs, num_stages, first=0.0, last=0.0):
    """Embedding and head are no blocks: they cost all the same."""
    return right_table(costs, num_stages)


def last_forgotten(costs, num_stages, first=0.0, last=0.0):
    """The embedding is looked up first: the head is a matrix of the same size."""
    return right_table(costs, num_stages, first)


def up_to_the_mean(costs, num_stages, first=0.0, last=0.0):
    """Each stage is filled until it has its share: the last one gets what is left."""
    refuse(costs, num_stages)
    costs = with_ends(costs, first, last)
    share, ends, filled = sum(costs) / num_stages, [], 0.0
    for i, cost in enumerate(costs):
        filled += cost
        left = len(costs) - 1 - i
        if len(ends) < num_stages - 1 and (filled >= share or left == num_stages - 1 - len(ends)):
            ends.append(i + 1)
            filled = 0.0
    return ranges([*ends, len(costs)])


def empty_stages(costs, num_stages, first=0.0, last=0.0):
    """A stage that only has the head is best off without a block: it must have one."""
    refuse(costs, num_stages)
    padded = right_table([first, *costs, last], num_stages)
    n = len(costs)
    return [range(max(0, stage.start - 1), min(n, stage.stop - 1)) for stage in padded]


def shared_blocks(costs, num_stages, first=0.0, last=0.0):
    """A range includes its end: so the next one begins behind it."""
    stages = right_table(costs, num_stages, first, last)
    return [range(stage.start, stage.stop - 1) if len(stage) > 1 else stage for stage in stages]


def dealt_out(costs, num_stages, first=0.0, last=0.0):
    """The most expensive block to the cheapest stage: but neighbors belong together."""
    refuse(costs, num_stages)
    return [range(stage, len(costs), num_stages) for stage in range(num_stages)]


def changes_costs(costs, num_stages, first=0.0, last=0.0):
    """The ends are added to the list: to the caller's."""
    refuse(costs, num_stages)
    costs[0] += first
    costs[-1] += last
    return right_table(costs, num_stages)


def fewer_stages(costs, num_stages, first=0.0, last=0.0):
    """Where there are not enough blocks, some stages stay empty."""
    used = min(num_stages, len(costs))
    n = len(costs)
    return right_table(costs, used, first, last) + [range(n, n)] * (num_stages - used)


def without_numbers(costs, num_stages, first=0.0, last=0.0):
    """An error is an error: which numbers do not fit is for the reader to find out."""
    if len(costs) < num_stages:
        raise ValueError("too few blocks")
    return right_table(costs, num_stages, first, last)


def cut_by_the_package(costs, num_stages, first=0.0, last=0.0):
    """The package has it already: so nothing is left to find out."""
    return pipeline_plan.split_blocks(costs, num_stages, first, last)


# 9.4


class Run:
    """The answer of the course, in parts to be replaced."""

    def __init__(self, stage, micro_batches, sum_loss, group):
        self.stage, self.micro_batches, self.sum_loss = stage, micro_batches, sum_loss
        self.group, self.rank, self.last = group, group.rank(), group.size() - 1
        self.num_tokens = sum(len(x) for x, _ in micro_batches)
        self.held, self.sends, self.losses = {}, [], []

    def scale(self, loss, targets):
        return loss / self.num_tokens

    def send(self, tensor, peer):
        self.sends.append(dist.isend(tensor, group=self.group, group_dst=peer))

    def receive(self, like, peer):
        tensor = torch.empty_like(like)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor

    def received(self, x):
        return x.requires_grad_()

    def forward(self, i):
        x, targets = self.micro_batches[i]
        if self.rank > 0:
            x = self.received(self.receive(x, self.rank - 1))
        out = self.stage(x)
        if self.rank == self.last:
            out = self.scale(self.sum_loss(out, targets), targets)
            self.losses.append(out.detach())
        else:
            self.send(out.detach(), self.rank + 1)
        self.held[i] = x, out

    def backward(self, i):
        x, out = self.held.pop(i)
        grad = None if self.rank == self.last else self.receive(out, self.rank + 1)
        out.backward(grad)
        if self.rank > 0:
            self.send(self.input_grad(x), self.rank - 1)

    def input_grad(self, x):
        return x.grad

    def order(self, actions):
        return actions

    def run(self, actions):
        for action in self.order(actions):
            (self.forward if action.kind == "F" else self.backward)(action.micro_batch)
        return self.finish()

    def finish(self):
        for work in self.sends:
            work.wait()
        return sum(self.losses) if self.rank == self.last else None


def answer(Run):
    """The function that runs a stage by this class."""

    def run_stage(stage, actions, micro_batches, sum_loss, group):
        return Run(stage, micro_batches, sum_loss, group).run(actions)

    run_stage.__name__, run_stage.__doc__ = Run.__name__, Run.__doc__
    return run_stage


class RightAutograd(Run):
    """Receives early, asks autograd for the gradients, scales the gradient instead of the loss."""

    def receive(self, like, peer):
        tensor = torch.zeros_like(like)
        dist.irecv(tensor, group=self.group, group_src=peer).wait()
        return tensor.detach()

    def scale(self, loss, targets):
        return loss

    def backward(self, i):
        x, out = self.held.pop(i)
        parameters = list(self.stage.parameters())
        wanted = parameters if self.rank == 0 else [*parameters, x]
        grad = torch.tensor(1 / self.num_tokens, dtype=out.dtype)
        if self.rank < self.last:
            grad = self.receive(out, self.rank + 1)
        grads = torch.autograd.grad(out, wanted, grad)
        for parameter, mine in zip(parameters, grads, strict=False):
            parameter.grad = mine if parameter.grad is None else parameter.grad + mine
        if self.rank > 0:
            self.send(grads[-1], self.rank - 1)

    def finish(self):
        total = super().finish()
        return None if total is None else total / self.num_tokens


class RightWaitsSoon(Run):
    """Posts all receives at the start, and lets go of what has been sent."""

    def order(self, actions):
        self.works = {}
        for kind, i, _ in actions:
            peer = self.rank + (-1 if kind == "F" else 1)
            if 0 <= peer <= self.last:
                tensor = torch.zeros_like(self.micro_batches[i][0])
                work = dist.irecv(tensor, group=self.group, group_src=peer)
                self.works.setdefault(peer, []).append((work, tensor))
        return actions

    def receive(self, like, peer):
        work, tensor = self.works[peer].pop(0)
        work.wait()
        return tensor

    def send(self, tensor, peer):
        super().send(tensor, peer)
        self.sends = [work for work in self.sends if not work.is_completed()]


class BlockingSend(Run):
    """Send, then go on: the next rank may be sending as well."""

    def send(self, tensor, peer):
        dist.send(tensor, group=self.group, group_dst=peer)


class Unscaled(Run):
    """sum_loss is the loss: of a sum, and the step's is a mean."""

    def scale(self, loss, targets):
        return loss


class MeanOfMeans(Run):
    """A mean in every micro-batch, then a mean of those: right where all are of one length."""

    def scale(self, loss, targets):
        return loss / len(targets) / len(self.micro_batches)


class SumOfMeans(Run):
    """A mean in every micro-batch, and gradients add up: so does the mean."""

    def scale(self, loss, targets):
        return loss / len(targets)


class DividedTwice(Run):
    """Over the tokens, and as always with accumulation over the micro-batches."""

    def scale(self, loss, targets):
        return loss / self.num_tokens / len(self.micro_batches)


class ScaledAfterwards(Run):
    """The number that is returned is right: the backward pass began with another."""

    def scale(self, loss, targets):
        return loss

    def finish(self):
        total = super().finish()
        return None if total is None else total / self.num_tokens


class ScaledByEveryRank(Run):
    """Every rank has its part in the mean: what arrives is scaled already."""

    def receive(self, like, peer):
        tensor = super().receive(like, peer)
        return tensor / len(self.micro_batches) if peer > self.rank else tensor


class OwnOrder(Run):
    """1F1B is known to be best: whatever the list says."""

    def order(self, actions):
        m, num_warm_up = len(self.micro_batches), self.last - self.rank
        return warm_up(m, [num_warm_up] * (self.rank + 1)).actions[self.rank]


class ForwardAgain(Run):
    """To go back, compute the loss and go back from there: the graph was there already."""

    def backward(self, i):
        x, _ = self.held[i]
        self.held[i] = x, self.again(x, i)
        super().backward(i)

    def again(self, x, i):
        out = self.stage(x)
        if self.rank < self.last:
            return out
        targets = self.micro_batches[i][1]
        return self.scale(self.sum_loss(out, targets), targets)


class KeepsDetached(Run):
    """What is sent has no graph, and the same is kept: then there is nothing to go back through."""

    def forward(self, i):
        super().forward(i)
        x, out = self.held[i]
        if self.rank < self.last:
            self.held[i] = x, out.detach()


class NeedsNoGradient(Run):
    """What is received is data, and data needs no gradient: the rank before waits for one."""

    def received(self, x):
        return x


class ToldToAll(Run):
    """All ranks want to know the loss: it is sent, which was not asked for."""

    def finish(self):
        super().finish()
        total = torch.as_tensor(sum(self.losses), dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total


class KeepsGraph(Run):
    """The losses are added up: with their graphs."""

    def scale(self, loss, targets):
        loss = super().scale(loss, targets)
        self.with_graph = [*getattr(self, "with_graph", []), loss]
        return loss

    def finish(self):
        return super().finish() if self.rank < self.last else sum(self.with_graph)


class ZeroElsewhere(Run):
    """Where there is no loss it is zero."""

    def finish(self):
        total = super().finish()
        return torch.zeros(()) if total is None else total


class PassesOn(Run):
    """The gradient that has come goes on to the rank before: as it came."""

    def receive(self, like, peer):
        self.arrived = super().receive(like, peer)
        return self.arrived.clone()

    def input_grad(self, x):
        return x.grad if self.rank == self.last else self.arrived


class NeverFrees(Run):
    """What a micro-batch has kept stays where it is: until the step ends."""

    def backward(self, i):
        kept = self.held[i]
        super().backward(i)
        self.held[i] = kept


class KeepsInputs(Run):
    """The output is let go: the input, whose gradient was sent, is not."""

    def backward(self, i):
        self.inputs = [*getattr(self, "inputs", []), self.held[i][0]]
        super().backward(i)


# What once passed


def three_digits(num_ranks, num_micro_batches, num_chunks):
    """Nobody reads more digits: of a share that is computed on, they are needed."""
    return tuple(round(x, 3) for x in right_in_seconds(num_ranks, num_micro_batches, num_chunks))


def rounds_large_bytes(schedule, num_ranks, num_micro_batches, num_chunks, rank, model_bytes):
    """Divides with /, and makes an int of it."""
    one = num_ranks * num_chunks
    num_held = right_from_warm_up(schedule, num_ranks, num_micro_batches, num_chunks, rank, one)
    return int(num_held * (model_bytes / one))


def whole_limits(costs, num_stages, first=0.0, last=0.0):
    """The lowest limit, halving between whole numbers: costs need not be whole."""
    refuse(costs, num_stages)
    costs = with_ends(costs, first, last)
    low, high = int(max(costs)), int(sum(costs)) + 1
    while low < high:
        middle = (low + high) // 2
        ends = fill_to(costs, num_stages, middle)
        stages = [] if ends is None else [sum(costs[i] for i in part) for part in ranges(ends)]
        if ends and max(stages) <= middle:
            high = middle
        else:
            low = middle + 1
    return ranges(fill_to(costs, num_stages, low))


class Float32Buffers(Run):
    """Receives into torch.empty(shape): which is float32."""

    def receive(self, like, peer):
        tensor = torch.empty(like.shape)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor


class Float64Buffers(Run):
    """Receives in the dtype that was tried."""

    def receive(self, like, peer):
        tensor = torch.empty(like.shape, dtype=torch.float64)
        dist.recv(tensor, group=self.group, group_src=peer)
        return tensor


class KeepsCopies(Run):
    """Detached copies hold no graph: they hold memory."""

    def backward(self, i):
        self.copies = [
            *getattr(self, "copies", []),
            *(tensor.detach().clone() for tensor in self.held[i]),
        ]
        super().backward(i)


class KeepsNumpy(Run):
    """Copies in NumPy: no tensors, and as many bytes."""

    def backward(self, i):
        self.copies = [*getattr(self, "copies", []), self.held[i][0].detach().numpy().copy()]
        super().backward(i)


class ZeroesMicroBatches(Run):
    """Zeroes the inputs when they have gone back: they are the caller's."""

    def backward(self, i):
        super().backward(i)
        self.micro_batches[i][0].zero_()


MISTAKES_9_4 = {
    MeanOfMeans: "the mean of the micro-batches' means",
    NeverFrees: "micro-batches whose backward pass is done",
    BlockingSend: "with dist.send each waits until the other receives",
    Unscaled: "that is the sum over all tokens",
    DividedTwice: "micro-batches as well",
    ScaledAfterwards: "before the backward pass",
    ScaledByEveryRank: "the gradient from the next rank is already that of the loss",
    ForwardAgain: "each pass once",
    KeepsDetached: "detach only what is sent",
    NeedsNoGradient: "needs requires_grad_()",
    ToldToAll: "all_reduce is called; use only recv and send",
    OwnOrder: "run `actions` in their order",
    KeepsInputs: "after B i nothing needs the input and output of micro-batch i",
    SumOfMeans: "adds up the micro-batches' means",
    KeepsGraph: "the graph lives as long as a tensor refers to it",
    ZeroElsewhere: "the others return None",
    PassesOn: "send back the gradient of the stage's input",
    Float32Buffers: "a receive buffer must have the dtype of the message",
    Float64Buffers: "a receive buffer must have the dtype of the message",
    KeepsCopies: "copies of input or output of each micro-batch",
    KeepsNumpy: "a copy in NumPy, bytes or a list takes memory too",
    ZeroesMicroBatches: "an in-place operation on x or targets",
}

RIGHT_ANSWERS = {
    "gpipe": [right_last_first],
    "one_forward_one_backward": [right_counting],
    "bubble": [right_in_seconds],
    "activation_bytes": [right_from_warm_up],
    "split_blocks": [right_limits, right_table],
    "run_stage": [answer(RightAutograd), answer(RightWaitsSoon)],
}

MISTAKES = {
    "gpipe": {
        one_after_the_other: "rank 0 holds 1 micro-batch, GPipe holds 4",
        other_order_on_odd_ranks: "in the same order",
        stages_backwards: "rank r holds only stage r",
        without_the_last_rank: "1 lists; there are 2 ranks",
        from_one: "numbered 0 to m - 1",
        last_rank_at_once: "the first backward pass comes after the last forward pass",
        asks_the_package: "gpipe of minitron is called",
    },
    "one_forward_one_backward": {
        gpipe_again: "rank 0 holds 4 micro-batches, 1F1B holds 2",
        warm_up_too_short: "the warm-up is too short",
        one_after_the_other: "the warm-up is too short",
        warm_up_too_long: "the warm-up is too long",
        same_warm_up: "the more stages come after a rank, the longer its warm-up",
        warm_up_by_rank: "stage 1 waits for F1 from stage 0, which stage 0 runs after B0",
        backward_first: "a rank cannot run backward for a micro-batch before running",
        without_cool_down: "every forward pass needs its backward pass",
        more_than_there_are: "with fewer micro-batches than stages after this one",
        alternates_by_the_package: "alternate of minitron is called",
    },
    "bubble": {
        both_of_ideal: "the first is also idle / compute time",
        chunks_forgotten: "v times shorter",
        swapped: "the two are swapped",
        both_of_total: "the second is also a share of the total",
        all_stages: "a rank waits for the other p - 1 stages",
        one_works: "that is one micro-batch at a time through all stages",
        three_digits: "the right number, rounded",
    },
    "activation_bytes": {
        all_of_them: "that is GPipe",
        stages_before: "not those before it",
        whole_model: "a rank does not hold a micro-batch's activations of the whole",
        ranks_only: "with chunks a stage is shorter",
        warm_up_alone: "the micro-batch whose backward pass is next is held as well",
        never_fewer: "no rank can hold more",
        always_p: "the sooner its backward pass follows",
        a_float: "return exact integers",
        rounds_large_bytes: "only the rounding is wrong",
    },
    "split_blocks": {
        ends_forgotten: "the first stage also has the embedding",
        up_to_the_mean: "leaves too much or too little for the last",
        equal_numbers: "equal numbers of blocks are not equal costs",
        last_forgotten: "the first stage also has the embedding",
        empty_stages: "each stage needs at least one block",
        shared_blocks: "the next range starts there",
        dealt_out: "blocks keep their order",
        changes_costs: "it belongs to the caller",
        fewer_stages: "raise a ValueError",
        without_numbers: "both numbers",
        cut_by_the_package: "split_blocks of minitron is called",
        whole_limits: "the largest cost is",
    },
    "run_stage": {answer(Mistake): says for Mistake, says in MISTAKES_9_4.items()},
}
