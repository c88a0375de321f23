"""Grader of 8.4: outputs and gradients against one process, the wire, and what is held between."""

import gc
from dataclasses import dataclass

import torch
from torch import Tensor

from teaching.graders import asked, expect
from teaching.graders.ch06_toy import ELEMENT, Held, ShardWire, is_close
from teaching.graders.ch07_toy import scattered
from teaching.graders.ch08_pair import TALK, ContiguousOnly, calls_by_phase
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import on_ranks, per_rank

BATCH, TOKENS, WIDTH, COLUMNS = 2, 3, 5, 4  # B, S/N, D, F/N
LAYERS = 2  # both run forward before the first runs backward
LARGER = 10
"""In tokens and in width, where bytes are counted: a copy must stand out."""
NAMES = "x_shard", "weight_shard", "the gradient of y_shard"


@dataclass(frozen=True)
class Seen:
    """What one rank has after forward and backward of one layer."""

    out: Tensor
    grad_x: Tensor | None
    grad_weight: Tensor | None
    calls: dict[str, list[tuple[str, int]]]
    """Of both layers, by phase: op and bytes of the full tensor."""
    changed: str
    """Which of the arguments has other values than before."""


def grade_8_4(GatheredLinear: type) -> None:
    """Run two layers forward, then both backward."""
    call = "GatheredLinear.apply(x_shard, weight_shard, group) and backward"
    with asked(f"{call}, for two layers, on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(two_layers, GatheredLinear)
    for size, by_rank in by_size.items():
        with asked(f"{call}, for two layers, on {size} rank{'s' * (size > 1)}"):
            seen, held, hidden = zip(*by_rank, strict=True)
            by_layer = list(zip(*seen, strict=True))
            for layer in range(LAYERS):
                _expect_unchanged(by_layer[layer])
            for layer in range(LAYERS):
                _expect_output(by_layer[layer], layer)
            if size > 1:
                _expect_little(held, hidden)
                _expect_calls(by_layer[0])
            for layer in range(LAYERS):
                _expect_gradients(by_layer[layer], layer)


def given(rank: int, size: int, layer: int, larger: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x_shard, weight_shard, and the gradient of y_shard, of one rank.

    Those of the second layer are not contiguous, except for the weight.
    """
    generator = torch.Generator().manual_seed(10 * rank + layer)
    tokens, width = larger * TOKENS, larger * WIDTH
    shapes = ((BATCH, tokens, width), (COLUMNS, width), (BATCH, tokens * size, COLUMNS))
    x, weight, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return (scattered(x), weight, scattered(grad)) if layer else (x, weight, grad)


def two_layers(group, GatheredLinear: type) -> tuple[list[Seen], int, int]:
    """What was seen of each layer, and the bytes that both hold until the backward pass."""
    layers = [given(group.rank(), group.size(), layer) for layer in range(LAYERS)]
    for x, weight, _ in layers:
        x.requires_grad_()
        weight.requires_grad_()

    with ShardWire(allowed=TALK) as wire, ContiguousOnly():
        outs = [GatheredLinear.apply(x, weight, group) for x, weight, _ in layers]
        wire.note("backward")
        for out, (_, _, grad) in zip(outs, layers, strict=True):
            if out.shape == grad.shape:
                out.backward(grad)
    calls = calls_by_phase(wire.events)
    seen = []
    for layer, (out, tensors) in enumerate(zip(outs, layers, strict=True)):
        pairs = zip(NAMES, tensors, given(group.rank(), group.size(), layer), strict=True)
        changed = [name for name, after, before in pairs if not torch.equal(after, before)]
        x, weight, _ = tensors
        seen.append(Seen(out.detach(), x.grad, weight.grad, calls, " and ".join(changed)))
    return seen, *held_until_backward(group, GatheredLinear)


def held_until_backward(group, GatheredLinear: type) -> tuple[int, int]:
    """Bytes that were not there before and are not the outputs': of tensors, and of objects."""
    layers = [given(group.rank(), group.size(), layer, LARGER) for layer in range(LAYERS)]
    for x, weight, _ in layers:
        x.requires_grad_()
        weight.requires_grad_()
    with Held() as held:
        outs = [GatheredLinear.apply(x, weight, group) for x, weight, _ in layers]
        gc.collect()
        expected = sum(out.nbytes for out in outs)
        contexts = [vars(out.grad_fn) for out in outs]
        return held.settled(expected) - expected, python_bytes(*contexts)


@dataclass(frozen=True)
class Whole:
    """One process: x (B, S, D), and every rank's weight, output and summand of x's gradient."""

    x: Tensor
    weights: list[Tensor]
    grads: list[Tensor]

    @property
    def outs(self) -> list[Tensor]:
        return [self.x @ weight.T for weight in self.weights]

    @property
    def partial(self) -> list[Tensor]:
        return [grad @ weight for grad, weight in zip(self.grads, self.weights, strict=True)]

    def grad_weight(self, rank: int) -> Tensor:
        return torch.einsum("bsf,bsd->fd", self.grads[rank], self.x)


def whole(size: int, layer: int) -> Whole:
    xs, weights, grads = zip(*(given(rank, size, layer) for rank in range(size)), strict=True)
    return Whole(torch.cat(xs, dim=1), list(weights), list(grads))


def _expect_output(seen: tuple[Seen, ...], layer: int) -> None:
    right = whole(len(seen), layer)
    shapes = [tuple(mine.out.shape) for mine in seen]
    expect(all(shape == tuple(right.outs[0].shape) for shape in shapes),
           seen=per_rank([f"y_shard has the shape {shape}" for shape in shapes])
           + f"; right is {tuple(right.outs[0].shape)}",
           likely="every rank computes its columns for all tokens of all sequences: concatenate "
                  "the shards along dim 1")
    same = [is_close(mine.out, out) for mine, out in zip(seen, right.outs, strict=True)]
    expect(all(same), seen=_which("y_shard", same),
           likely="x is the ranks' shards, (B, S/N, D), concatenated along dim 1; "
                  "all_gather_single concatenates along dim 0")


def _expect_unchanged(seen: tuple[Seen, ...]) -> None:
    expect(not any(mine.changed for mine in seen),
           seen=per_rank([f"{mine.changed or 'nothing'} has other values than before"
                          for mine in seen]),
           likely="an in-place operation: the caller still needs inputs and gradients")


def _which(what: str, same: list[bool]) -> str:
    return f"{what} is wrong on rank " + ", ".join(str(r) for r, ok in enumerate(same) if not ok)


def _expect_calls(seen: tuple[Seen, ...]) -> None:
    payload = ELEMENT * len(seen) * BATCH * TOKENS * WIDTH
    right = {"forward": ["all_gather"], "backward": ["all_gather", "reduce_scatter"]}
    likely = {"forward": "forward: one all-gather of x_shard, and nothing else",
              "backward": "gather x again, from the x_shard that was saved, and reduce-scatter the "
                          "gradient of x: once each"}
    for phase, ops in right.items():
        for op in sorted(TALK):
            sent = [[payload for name, payload in mine.calls[phase] if name == op]
                    for mine in seen]
            wanted = [payload] * LAYERS * ops.count(op)
            each = f"one of {payload} bytes for each of the {LAYERS} layers" if wanted else "none"
            expect(all(mine == wanted for mine in sent),
                   seen=per_rank([f"{_messages(op, mine)} in {phase}" for mine in sent])
                   + f"; right is {each}", likely=likely[phase])


def _messages(op: str, payloads: list[int]) -> str:
    sizes = ", ".join(map(str, payloads))
    return f"{len(payloads)} x {op}, of {sizes} bytes," if payloads else f"no {op}"


def _expect_little(held: tuple[int, ...], hidden: tuple[int, ...]) -> None:
    size = len(held)
    shard = ELEMENT * BATCH * TOKENS * WIDTH * LARGER**2
    sizes = f"; of {LAYERS} layers, x_shard has {LAYERS * shard:,} bytes, all tokens of x have " \
            f"{LAYERS * size * shard:,}"
    expect(not any(held),
           seen=per_rank([f"between forward and backward {n:,} bytes are held" for n in held])
           + f", besides inputs and outputs{sizes}",
           likely="save x_shard and weight_shard themselves, not copies, and nothing made from all "
                  "tokens: a slice of x is a view and keeps all of x alive, and so does an "
                  "attribute of ctx")
    expect(all(n < shard for n in hidden),
           seen=per_rank([f"{n:,} bytes of NumPy arrays or other Python objects are held between "
                          "forward and backward" for n in hidden]) + sizes,
           likely="a copy in NumPy, bytes or a list takes memory too: save x_shard and "
                  "weight_shard, and gather x again")


def _expect_gradients(seen: tuple[Seen, ...], layer: int) -> None:
    size, right = len(seen), whole(len(seen), layer)
    parts = sum(right.partial).chunk(size, dim=1)
    mine = [one.grad_x for one in seen]
    same = [is_close(*pair) for pair in zip(mine, parts, strict=True)]
    expect(all(same), seen=_which("the gradient of x_shard", same),
           likely=_why_other_input(mine, right.partial))

    weights = [right.grad_weight(rank) for rank in range(size)]
    mine = [one.grad_weight for one in seen]
    same = [is_close(*pair) for pair in zip(mine, weights, strict=True)]
    expect(all(same), seen=_which("the gradient of weight_shard", same),
           likely=_why_other_weight(mine, right))


def _why_other_input(mine: list[Tensor | None], partial: list[Tensor]) -> str:
    size, parts = len(partial), sum(partial).chunk(len(partial), dim=1)
    rows = [part.view_as(parts[0]) for part in sum(partial).flatten().chunk(size)]
    return _first_fault(mine, {
        "that is the mean over the ranks: the columns of all ranks read x, so add without dividing":
            [part / size for part in parts],
        "reduce_scatter_single splits along dim 0: first lay the N parts of dim 1 one after the "
        "other": rows,
    }, "sum grad @ weight_shard over the ranks, and return this rank's part along dim 1")


def _why_other_weight(mine: list[Tensor | None], right: Whole) -> str:
    size = len(mine)
    return _first_fault(mine, {
        "that is divided by N: the gradient of this rank's columns is complete":
            [right.grad_weight(rank) / size for rank in range(size)],
    }, "grad.T @ x, both with all tokens of all sequences as rows, in the same order")


def _first_fault(
    mine: list[Tensor | None], faults: dict[str, list[Tensor]], otherwise: str
) -> str:
    for why, tensors in faults.items():
        if all(is_close(*pair) for pair in zip(mine, tensors, strict=True)):
            return why
    return otherwise
