"""Grader of 7.4: which heads a rank has, what is cut, and whose gradients are summed."""

import gc
from dataclasses import dataclass

from torch import Tensor, nn

from minitron.measure.ledger import Call
from teaching.graders import Mistake, asked, expect
from teaching.graders.ch06_toy import Held
from teaching.graders.ch07_attention import (
    HEAD_WIDTH,
    HEADS,
    LAYERS,
    STEPS,
    attend,
    make_attention,
    own_gradients,
    part_of,
    right_gradients,
    right_heads,
)
from teaching.graders.ch07_toy import (
    ELEMENT,
    expect_calls,
    expect_close,
    expect_little,
    expect_refusal,
    in_words,
    refusal,
)
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import Wire, on_ranks, per_rank

KV_HEADS = {1: (3,), 2: (4, 2, 1), 3: (6, 3, 1), 4: (12, 4, 2, 1)}
"""G, by the number of ranks."""
IMPOSSIBLE = {1: [], 2: [(6, 3, 3)], 3: [(12, 4, 4)], 4: [(6, 6, 6), (12, 3, 3)]}
"""By the number of ranks: H, G, and the one of the two that does not fit."""
LARGE, MANY = 16, 4  # the head width where bytes are counted, and ranks


@dataclass(frozen=True)
class Cut:
    """What a rank has after __init__."""

    query_heads: object
    kv_heads: object
    weights: dict[str, Tensor | None]
    """None is no nn.Parameter."""


@dataclass(frozen=True)
class Trained:
    """What a rank has after two backward passes and finish(), in one step."""

    grads: dict[str, Tensor | None]
    early: list[Call]
    """What was sent before finish()."""
    calls: list[Call]


@dataclass(frozen=True)
class Seen:
    """What a rank saw."""

    cuts: list[Cut]
    trained: list[list[Trained] | None]
    """By step; None where what was cut has other shapes."""
    alive: tuple[int, int]
    """Bytes of a large layer, on 4 ranks: of tensors, and of other Python objects."""
    refusals: list[tuple[str, str]]


def grade_7_4(SplitAttention: type) -> None:
    """Look at ranges and slices, then at gradients, at bytes, and at what cannot be cut."""
    call = "split = SplitAttention(attention, group)"
    with asked(f"{call}; two backward(); split.finish() on 1, 2, 3 and 4 ranks, with H = {HEADS}"):
        by_size = on_ranks(look, SplitAttention)
    for what, judge, of_case in (("", _expect_cut, lambda seen: seen.cuts),
                                 ("; two backward(); split.finish()", _expect_trained,
                                  lambda seen: seen.trained)):
        for size, by_rank in by_size.items():
            for index, G in enumerate(KV_HEADS[size]):
                with asked(f"{call}{what} on {size} ranks, with H = {HEADS} and G = {G}"):
                    judge([of_case(seen)[index] for seen in by_rank], G)

    with asked(f"the bytes held by {call}: H = {HEADS}, G = 2, K = {LARGE}, {MANY} ranks"):
        _expect_little([seen.alive for seen in by_size[MANY]])
    for size, by_rank in by_size.items():
        for index, (H, G, wrong) in enumerate(IMPOSSIBLE[size]):
            with asked(f"{call} on {size} ranks, with H = {H} and G = {G}"):
                expect_refusal([seen.refusals[index] for seen in by_rank], (wrong, size))


def look(group, SplitAttention: type) -> Seen:
    cuts = [cut(group, SplitAttention, G) for G in KV_HEADS[group.size()]]
    trained = [train(group, SplitAttention, G) if has_right_shapes(mine, group, G) else None
               for mine, G in zip(cuts, KV_HEADS[group.size()], strict=True)]
    alive = hold(group, SplitAttention) if group.size() == MANY else (0, 0)
    return Seen(cuts, trained, alive, [
        refusal(lambda H=H, G=G: SplitAttention(make_attention(H, G), group))
        for H, G, _ in IMPOSSIBLE[group.size()]])


def cut(group, SplitAttention: type, G: int) -> Cut:
    attention = make_attention(HEADS, G)
    with Wire(allowed=set()):
        split = SplitAttention(attention, group)
    weights = {name: getattr(attention, name).weight for name in LAYERS}
    return Cut(getattr(split, "query_heads", None), getattr(split, "kv_heads", None),
               {name: weight.detach() if isinstance(weight, nn.Parameter) else None
                for name, weight in weights.items()})


def has_right_shapes(mine: Cut, group, G: int) -> bool:
    attention, where = make_attention(HEADS, G), (group.rank(), group.size(), G)
    parts = {name: part_of(getattr(attention, name).weight, name, *where) for name in LAYERS}
    return all(weight is not None and weight.shape == parts[name].shape
               for name, weight in mine.weights.items())


def _expect_cut(seen: list[Cut], G: int) -> None:
    size = len(seen)
    right = [right_heads(rank, size, G) for rank in range(size)]
    for index, what in enumerate(("query_heads", "kv_heads")):
        mine, heads = [getattr(cut, what) for cut in seen], [pair[index] for pair in right]
        if mine != heads:
            raise Mistake(per_rank([f"{what} is {answer!r:.60}" for answer in mine]) + "; right: "
                          + per_rank([repr(answer) for answer in heads]),
                          _why_other_query_heads(mine) if what == "query_heads" else
                          _why_other_kv_heads(mine, size, G))

    attention = make_attention(HEADS, G)
    for name in LAYERS:
        full = getattr(attention, name).weight.detach()
        parts = [part_of(full, name, rank, size, G) for rank in range(size)]
        likely = f"{name}.weight is (heads x K, D): K consecutive rows are a head"
        if name == "out":
            likely = "out.weight is (D, H K), and reads the heads: K consecutive columns belong " \
                     "to a head"
        expect_close(f"{name}.weight", [cut.weights[name] for cut in seen], parts, [],
                     f"{likely}; a new nn.Parameter of those of this rank")


def _why_other_query_heads(mine: list) -> str:
    if any(isinstance(answer, range) and answer.step > 1 for answer in mine):
        return "take consecutive heads, not every N-th: neighbors read the same key-value head"
    return f"a range of H/N = {HEADS // len(mine)} heads, and that of rank 0 begins with head 0"


def _why_other_kv_heads(mine: list, size: int, G: int) -> str:
    if size > G and mine == [range(rank % G, rank % G + 1) for rank in range(size)]:
        return "that deals out the key-value heads in turn; query head h reads head h // (H/G), " \
               f"so the first {size // G} ranks all need head 0"
    if size > G and all(answer == range(G) for answer in mine):
        return "the query heads of a rank read one key-value head here, so it holds only that one"
    if any(isinstance(answer, range) and not len(answer) for answer in mine):
        return f"G/N = {G}/{size} is 0 in integers: a rank holds at least one head"
    return "which key-value heads do this rank's query heads read? Query head h reads head " \
           f"h // (H/G) = h // {HEADS // G}"


# Gradients


def train(group, SplitAttention: type, G: int) -> list[Trained]:
    attention, steps = make_attention(HEADS, G), []
    split = SplitAttention(attention, group)
    for step in range(STEPS):
        with Wire({"all_reduce"}) as wire:
            attend(attention, step)
            num_early = len(wire.calls)
            split.finish()
        grads = {name: getattr(attention, name).weight.grad for name in LAYERS}
        steps.append(Trained(grads, wire.calls[:num_early], wire.calls[num_early:]))
        attention.zero_grad()
    return steps


def _expect_trained(seen: list[list[Trained]], G: int) -> None:
    for step, by_rank in enumerate(zip(*seen, strict=True)):
        with asked(f"step {step + 1} of {STEPS} with H = {HEADS} and G = {G} on {len(seen)} ranks: "
                   "two backward(); split.finish()"):
            _expect_gradients(list(by_rank), G, step)


def _expect_gradients(seen: list[Trained], G: int, step: int) -> None:
    size = len(seen)
    if size > 1:
        _expect_traffic(seen, G)
    for name in LAYERS:
        full = right_gradients(G, step)[name]
        right = [part_of(full, name, rank, size, G) for rank in range(size)]
        grads = [mine.grads[name] for mine in seen]
        likely = "the rows or columns of one process's gradient that belong to this rank's heads"
        faults = {}
        if name in ("key", "value"):
            faults = _wrong_sums(name, size, G, step)
            likely = "sum the gradients of the ranks that hold this head, each once"
        expect_close(f"{name}.weight.grad", grads, right, faults.items(), likely)


def _wrong_sums(name: str, size: int, G: int, step: int) -> dict[str, list[Tensor]]:
    own = [own_gradients(rank, size, G, step)[name] for rank in range(size)]
    copies = max(1, size // G)
    sums = [sum(own[rank - rank % copies:][:copies]) for rank in range(size)]
    before = [part_of(right_gradients(G, 0)[name], name, rank, size, G) for rank in range(size)]
    return {
        "it still contains the sums of the previous step: zero the places of the other heads at "
        "the start of every finish()": [total + (size - copies) * old
                            for total, old in zip(sums, before, strict=True)],
        "that is only this rank's part: query heads of other ranks read this head too": own,
        "that is the mean: each rank has a partial sum, so add without dividing":
            [total / copies for total in sums],
        "that is the sum divided by N: add without dividing": [total / size for total in sums],
        "that is the sum over all ranks: add only the gradients of ranks that hold the same "
        "head": [sum(own)] * size,
        f"it contains each part {copies} times: on every rank zero the places of all heads but its "
        "own, and sum once": [copies * total for total in sums],
    }


def _expect_traffic(seen: list[Trained], G: int) -> None:
    size = len(seen)
    early = [in_words(mine.early) for mine in seen]
    expect(not any(mine.early for mine in seen),
           seen=per_rank([f"before finish() {words} is sent" for words in early]),
           likely="reduce once per step, in finish(): if you reduce after every micro-batch, the "
                  "earlier parts are summed again with the later ones")
    calls = [mine.calls for mine in seen]
    places = G * HEAD_WIDTH * HEADS * HEAD_WIDTH * ELEMENT  # of the keys alone
    if G >= size:
        expect_calls("in finish()", calls, [],
                     "with G >= N no two ranks hold the same head, so every gradient is already "
                     "complete")
        return
    likely = f"a tensor with a place for each of the {G} heads, (G K, D): zeros in it, but for " \
             "this rank's own head. One all-reduce of it for the keys, one for the values"
    sent = [sum(call.payload for call in mine) for mine in calls]
    if all(n == 2 * places // G for n in sent) and G > 1:
        likely = f"that adds up the gradients of different heads: send {likely}"
    elif not any(calls):
        likely = "every rank that holds a key-value head has a partial sum of its gradient, from " \
                 "its own query heads: add these up in finish()"
    expect(all(n == 2 * places for n in sent),
           seen=per_rank([f"in finish() {in_words(mine)} is sent" for mine in calls])
           + f"; expected {places} bytes for the keys, as many for the values", likely=likely)


# What is held


def hold(group, SplitAttention: type) -> tuple[int, int]:
    """Bytes that are alive after __init__."""
    with Held() as held:
        attention = make_attention(HEADS, 2, LARGE)
        split = SplitAttention(attention, group)
        gc.collect()
        alive = held.now(), python_bytes(split)
    assert split is not None
    return alive


def _expect_little(seen: list[tuple[int, int]]) -> None:
    width, size = HEADS * LARGE, len(seen)
    part = (2 * width // size + 2 * LARGE) * width * ELEMENT
    whole = (2 * width + 2 * 2 * LARGE) * width * ELEMENT
    expect_little(seen, whole, part,
                  "a view keeps the full weight alive: clone the shard, and keep nothing else")

