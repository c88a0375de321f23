"""Grader of 9.4: messages, order, loss and gradients of every stage, against one process."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitron.parallel.pipeline.schedules import Schedule
from teaching.graders import Mistake, asked, expect
from teaching.graders.ch06_toy import Held
from teaching.graders.ch07_toy import in_short
from teaching.graders.ch09_toy import (
    CASES,
    LARGE,
    TOKENS,
    WIDTH,
    Case,
    Stage,
    alone,
    data,
    flat,
    sum_loss,
)
from teaching.graders.numbers import apart
from teaching.graders.python_memory import python_bytes, variables
from teaching.graders.ranks import (
    Wire,
    factor,
    on_ranks,
    per_rank,
    relative_error,
    source_file,
)

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
ELEMENT, MESSAGES = 8, 2
STUCK = "with 1F1B a rank sends an activation while the next one sends it a gradient; with " \
        "dist.send each waits until the other receives. Start sends with isend, go on, and wait " \
        "for them at the end. Every message must be received, in the order in which it is sent"
FAULTS = {
    "do not match": "a message has as many tokens as its own micro-batch: T differs",
    "does not require grad": "keep the stage's output with its graph for the backward pass, and "
                             "detach only what is sent",
    "'NoneType'> instead": "a received activation needs requires_grad_() before it goes into the "
                           "stage, or there is no x.grad to send",
}
"""What a failed run says, and what it comes from."""
DTYPES = "a receive buffer must have the dtype of the message: torch.empty(shape) alone is " \
         "float32. Take torch.empty_like(x), or dtype=x.dtype; the gradient has the dtype of the " \
         "output"
OF_TOKENS = "divide the sum over the tokens by the number of tokens of all micro-batches, once"
MEAN_OF_MEANS = "that is the mean of the micro-batches' means: tokens of a short one count more. " \
                "Divide each sum by the tokens of all micro-batches"
SUM_OF_MEANS = "that adds up the micro-batches' means: divide each sum by the tokens of all " \
               "micro-batches"


# What runs on each rank


@dataclass(frozen=True)
class Seen:
    """What one rank has done and has."""

    loss: object
    grads: list[Tensor | None]
    passes: list[tuple[str, int]]
    """"F" or "B", and the micro-batch; -1 if there is none with as many tokens."""
    sent: dict[int, list[int]]
    """By rank, the bytes of each message to it."""
    kept: int
    """Most micro-batches that had gone back, and of which something was held; 0 if it is few."""
    changed: bool
    """Whether the micro-batches have other values than before."""


def run_all(group, run_stage: Callable) -> tuple[list[Seen], int, int]:
    return [run_one(group, run_stage, case) for case in CASES], *weigh(group, run_stage)


def run_one(group, run_stage: Callable, case: Case) -> Seen:
    rank, wire, m = group.rank(), Wire(allowed={"send", "recv"}), case.num_micro_batches
    stage = Stage(rank, wire.note, dtype=case.dtype)
    actions, micro_batches = actions_of(group, case), data(m, dtype=case.dtype)
    with wire:
        loss = run_stage(stage, actions, micro_batches, sum_loss, group)
    sent: dict[int, list[int]] = {}
    for call in wire.calls:
        if call.op == "send":
            sent.setdefault(call.peer, []).append(call.payload)
    passes = [(kind, TOKENS.index(tokens) if tokens in TOKENS else -1)
              for kind, tokens in wire.events if kind in ("F", "B")]
    changed = not all(torch.equal(mine, right) for pair, same in
                      zip(micro_batches, data(m, dtype=case.dtype), strict=True)
                      for mine, right in zip(pair, same, strict=True))
    return Seen(loss, [p.grad for p in stage.parameters()], passes, sent, stage.most_kept, changed)


def actions_of(group, case: Case) -> list:
    return list(case.make_schedule(group.size(), case.num_micro_batches).actions[group.rank()])


def weigh(group, run_stage: Callable) -> tuple[int, int]:
    """What copies there are when the last of 5 micro-batches of a wide stage goes back.

    Of each micro-batch, tensors of its size: one more than the message forward and the one back
    is a copy. And bytes of NumPy arrays and other Python objects.
    """
    most, objects = [0], [0]

    def note(kind: str, num_tokens: int) -> None:
        if kind == "B" and num_tokens == TOKENS[-1]:
            sizes = Counter(storage.nbytes() for storage in list(held.storages.values()))
            long_gone = TOKENS[:-2]  # of the one before, local variables may be left
            most[0] = max(sizes[LARGE * ELEMENT * tokens] for tokens in long_gone)
            objects[0] = python_bytes(*variables(source_file(run_stage)))

    stage, micro_batches = Stage(group.rank(), note, LARGE), data(len(TOKENS), LARGE)
    with Held() as held:
        run_stage(stage, actions_of(group, CASES[1]), micro_batches, sum_loss, group)
    return most[0], objects[0]


# The grader


def grade_9_4(run_stage: Callable) -> None:
    """Run several schedules; look at the messages, the order, the loss and the gradients."""
    call = "run_stage(stage, actions, micro_batches, sum_loss, group)"
    with asked(f"{call} on 1, 2, 3 and 4 ranks, with GPipe, 1F1B and others"):
        by_size = _run(run_stage)
    for size, by_rank in by_size.items():
        seen_by_rank, copies, objects = zip(*by_rank, strict=True)
        for number, case in enumerate(CASES):
            m = case.num_micro_batches
            schedule = case.make_schedule(size, m)
            tokens = ", ".join(map(str, TOKENS[:m]))
            with asked(f"{call} on {size} rank{'s' * (size > 1)}, {schedule.name}, {m} "
                       f"micro-batches of {tokens} tokens, {in_short(case.dtype)}"):
                seen = [mine[number] for mine in seen_by_rank]
                _expect_passes(seen, schedule)
                _expect_messages(seen, schedule, case.dtype.itemsize)
                _expect_loss(seen, m, CLOSE[case.dtype])
                _expect_gradients(seen, m, CLOSE[case.dtype])
                _expect_little(seen)
        with asked(f"{call} on {size} rank{'s' * (size > 1)}, 1F1B, {len(TOKENS)} micro-batches "
                   f"of width {LARGE}"):
            _expect_no_copies(copies, objects)


def _run(run_stage: Callable) -> dict[int, list[list[Seen]]]:
    try:
        return on_ranks(run_all, run_stage, stuck=STUCK)
    except Mistake as mistake:
        for words, likely in FAULTS.items():
            if words in mistake.seen:
                dtypes = set(re.findall(r"b?float\d+", mistake.seen))
                raise Mistake(mistake.seen, likely if len(dtypes) < 2 else DTYPES) from None
        raise


def _expect_passes(seen: list[Seen], schedule: Schedule) -> None:
    right = [[(kind, i) for kind, i, _ in actions] for actions in schedule.actions]
    wrong = {rank: f"{_words(mine.passes)}; the list says {_words(actions)}"
             for rank, (mine, actions) in enumerate(zip(seen, right, strict=True))
             if mine.passes != actions}
    first = next(iter(wrong), 0)
    passes, asked_for = seen[first].passes, right[first]
    likely = "run `actions` in their order: the schedule is given"
    if len(passes) > len(asked_for):
        likely = "run each pass once: the backward pass uses the graph of the forward pass, so " \
                 "keep input and output until then"
    elif not any(kind == "B" for kind, _ in passes):
        likely = "no backward pass reaches the stage: keep its output with its graph, and detach " \
                 "what you send"
    expect(not wrong, seen=per_rank(wrong), likely=likely)


def _words(passes: list[tuple[str, int]]) -> str:
    return " ".join(f"{kind}{i if i >= 0 else '?'}" for kind, i in passes) or "nothing"


def _expect_messages(seen: list[Seen], schedule: Schedule, element: int) -> None:
    for rank, mine in enumerate(seen):
        right = {}
        for kind, i, _ in schedule.actions[rank]:
            peer = rank + (1 if kind == "F" else -1)
            if 0 <= peer < len(seen):
                right.setdefault(peer, []).append(element * WIDTH * TOKENS[i])
        expect(mine.sent == right, seen=f"rank {rank} sends {_bytes(mine.sent)}; expected "
                                        f"{_bytes(right)}", likely="send one message per F to the "
                                                                   "next rank and one per B to the "
                                                                   "previous rank, each with as "
                                                                   "many values as the micro-batch")


def _bytes(sent: dict[int, list[int]]) -> str:
    return ", ".join(f"{' + '.join(map(str, messages))} bytes to rank {peer}"
                     for peer, messages in sorted(sent.items())) or "nothing"


def _expect_loss(seen: list[Seen], m: int, close: float) -> None:
    size = len(seen)
    *others, last = [mine.loss for mine in seen]
    expect(all(loss is None for loss in others),
           seen=per_rank([f"returned {loss!r:.40}" for loss in others]),
           likely="only the last rank has a loss; the others return None")
    expect(isinstance(last, Tensor) and last.shape == (), seen=f"rank {size - 1} returned "
           f"{last!r:.60}", likely="the loss is a tensor of shape () on the last rank")
    expect(not last.requires_grad, seen=f"rank {size - 1} returned a loss with its graph",
           likely="detach it: the graph lives as long as a tensor refers to it")
    right = alone(size, m)[0]
    if relative_error(last, right) >= close:
        seen, wanted = apart(last.item(), right.item())
        raise Mistake(f"rank {size - 1} returned the loss {seen}; one process has {wanted}",
                      _why_scaled(last, right, alone(size, m, True)[0], m) or OF_TOKENS)


def _expect_gradients(seen: list[Seen], m: int, close: float) -> None:
    size, right, of_means = len(seen), alone(len(seen), m)[1], alone(len(seen), m, True)[1]
    for rank in reversed(range(size)):  # whatever is wrong on one is wrong on those before
        grads = seen[rank].grads
        expect(all(grad is not None for grad in grads), seen=f"rank {rank}: .grad is None",
               likely="backward() through the stage's own graph leaves gradients in .grad")
        mine = flat(grads)
        if relative_error(mine, right[rank]) < close:
            continue
        f = factor(mine, right[rank])
        shown = f", all {f:.4g} times too large" if f and f > 1 else \
                f", all {1 / f:.4g} times too small" if f and f > 0 else ""
        before = "" if rank == size - 1 else \
            f"; they are right on rank {rank + 1}" if rank == size - 2 else \
            f"; they are right on ranks {rank + 1} to {size - 1}"
        raise Mistake(f"the gradients of rank {rank}'s stage are wrong{shown}{before}",
                      _why_other_gradients(mine, right[rank], of_means[rank], m, rank, size))


def _why_other_gradients(
    mine: Tensor, right: Tensor, of_means: Tensor, m: int, rank: int, size: int
) -> str:
    if rank == size - 1:
        return _why_scaled(mine, right, of_means, m) or \
            "each backward pass starts from the loss of its own micro-batch, and adds to .grad"
    if factor(mine, right):
        return "the gradient from the next rank is already that of the loss: only the last rank " \
               "scales anything"
    return "send back the gradient of the stage's input, x.grad; the one you receive is that of " \
           "the output: out.backward(grad)"


def _why_scaled(mine: Tensor, right: Tensor, of_means: Tensor, m: int) -> str:
    """What a loss or a gradient is, if it is another multiple of it; "" if it is none."""
    num_tokens = sum(TOKENS[:m])
    for share, text in ((1.0, MEAN_OF_MEANS), (float(m), SUM_OF_MEANS)):
        if relative_error(mine, share * of_means) < CLOSE[torch.float64]:
            return text
    causes = {
        num_tokens: "that is the sum over all tokens: divide by their number, before the backward "
                    "pass",
        1 / m: f"divided by the {m} micro-batches as well: the only divisor is the number of "
               "tokens of all micro-batches",
        num_tokens / m: f"that is divided by the {m} micro-batches: divide by the tokens",
    }
    for share, text in causes.items():
        if relative_error(mine, share * right) < CLOSE[torch.float64]:
            return text
    return ""


def _expect_little(seen: list[Seen]) -> None:
    kept = {rank: f"input or output of {mine.kept} micro-batches whose backward pass is done"
            for rank, mine in enumerate(seen) if mine.kept}
    expect(not kept, seen=f"held at one time: {per_rank(kept)}",
           likely="after B i nothing needs the input and output of micro-batch i: drop them, for "
                  "instance with pop(i). Otherwise every schedule holds all m, like GPipe")
    expect(not any(mine.changed for mine in seen),
           seen=per_rank(["the micro-batches have other values than before" if mine.changed else
                          "unchanged" for mine in seen]),
           likely="an in-place operation on x or targets, which belong to the caller")


def _expect_no_copies(copies: tuple[int, ...], objects: tuple[int, ...]) -> None:
    when = "when the last backward pass begins"
    expect(max(copies) <= MESSAGES, seen=per_rank(
        [f"of a micro-batch that finished long ago {num} tensors are held" for num in copies]
    ) + f" {when}; its messages forward and back would be {MESSAGES}",
           likely="copies of input or output of each micro-batch: drop them after its backward "
                  "pass")
    gone = sum(TOKENS[:-2]) * LARGE * ELEMENT
    expect(max(objects) < gone / 2, seen=per_rank(
        [f"{num:,} bytes of NumPy arrays or other Python objects are held" for num in objects])
           + f" {when}; the first {len(TOKENS) - 2} have {gone:,}",
           likely="a copy in NumPy, bytes or a list takes memory too: drop what belongs to a "
                  "micro-batch after its backward pass")
