"""Grader of 8.2: the gradients of sequence-parallel models against those of one process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.placement import Placement
from minitron.parallel.tensor.cuts import plan_placements
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from teaching.graders import Mistake, asked, expect
from teaching.graders.ch06_toy import ELEMENT
from teaching.graders.ranks import Wire, on_ranks, per_rank

FAMILIES = ("gpt", "llama")
BATCH, SEQUENCE, VOCABULARY = 2, 12, 24
MICRO_BATCHES = 2
FROZEN = "blocks.0.mlp_norm.weight"
STUCK = "every rank must make the same call: check whether yours depends on the rank, or on its " \
        "values"

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Seen:
    """One rank's gradients before and after the call, and the bytes of every all-reduce."""

    before: Gradients
    after: Gradients
    sent: list[int]
    moved: list[str]
    """Parameters that have other values than before."""


def grade_8_2(sum_partial_gradients: Callable) -> None:
    """Compare every gradient of a gpt and of a llama, then look at the wire."""
    call = "sum_partial_gradients(model, group)"
    after = f"after {MICRO_BATCHES} backward passes, on"
    with asked(f"{call}, a gpt and then a llama, {after} 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(all_families, sum_partial_gradients, stuck=STUCK)
    for number, family in enumerate(FAMILIES):
        for size, by_rank in by_size.items():
            with asked(f"{call}, a {family} {after} {size} rank{'s' * (size > 1)}"):
                seen = [mine[number] for mine in by_rank]
                expect(not any(mine.moved for mine in seen), seen=per_rank(
                    [f"{len(mine.moved)} parameters have changed" for mine in seen]),
                       likely="sum the gradients and leave the weights alone: the optimizer steps "
                              "later")
                _expect_gradients(seen, family)
                if size > 1:
                    _expect_one_message(seen, family)


def make_model(family: str) -> nn.Module:
    """Sizes that 1, 2, 3 and 4 ranks divide, float64; one norm is frozen."""
    config = ModelConfig(family, VOCABULARY, SEQUENCE, num_layers=3, width=24, num_heads=12,
                         num_kv_heads=12, ffn_width=36, tied_embedding=family == "gpt")
    model = Transformer(config).double()
    initialize(model, seed=8)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def samples(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: nn.Module) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def all_families(group, sum_partial_gradients: Callable) -> list[Seen]:
    return [backward_and_sum(group, sum_partial_gradients, family) for family in FAMILIES]


def backward_and_sum(group, sum_partial_gradients: Callable, family: str) -> Seen:
    model = make_model(family)
    parallel = apply_sequence_parallel(model, group)
    for number in range(MICRO_BATCHES):
        tokens, targets = samples(number)
        parallel.summed_loss(model(tokens), targets).backward()

    before, weights = gradients(model), {name: p.detach().clone()
                                         for name, p in model.named_parameters()}
    with Wire(allowed={"all_reduce"}) as wire:
        sum_partial_gradients(model, group)
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, weights[name])]
    return Seen(before, gradients(model), [call.payload for call in wire.calls], moved)


@cache
def alone(family: str) -> Gradients:
    model = make_model(family)
    for number in range(MICRO_BATCHES):
        tokens, targets = samples(number)
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    return gradients(model)


@cache
def cuts_of(family: str, rank: int, size: int) -> dict[str, Placement]:
    return plan_placements(make_model(family), rank, size)


def right_gradients(family: str, rank: int, size: int) -> Gradients:
    """One process's gradients, of cut parameters this rank's part."""
    cuts = cuts_of(family, rank, size)
    return {name: None if grad is None else cuts[name].local(grad)
            for name, grad in alone(family).items()}


def whole_names(family: str, size: int) -> set[str]:
    """The parameters that every rank holds whole, if there is more than one."""
    return {name for name, cut in cuts_of(family, 0, size).items() if cut.count == 1}


def _expect_gradients(seen: list[Seen], family: str) -> None:
    size = len(seen)
    right = [right_gradients(family, rank, size) for rank in range(size)]
    wrong = {}
    for name in right[0]:
        ranks = [rank for rank, mine in enumerate(seen)
                 if not _same(mine.after[name], right[rank][name])]
        if ranks:
            wrong[name] = ranks
    if wrong:
        name, ranks = next(iter(wrong.items()))
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        on = ", ".join(map(str, ranks))
        raise Mistake(f"the gradient of {name} is wrong on rank {on}{more}",
                      _why_wrong(name, list(wrong), seen, right, family))


def _same(seen: Tensor | None, right: Tensor | None) -> bool:
    if seen is None or right is None:
        return seen is right
    return seen.shape == right.shape and torch.allclose(seen, right, rtol=1e-9, atol=1e-12)


def _why_wrong(
    name: str, wrong: list[str], seen: list[Seen], right: list[Gradients], family: str
) -> str:
    size, whole = len(seen), whole_names(family, len(seen))
    if right[0][name] is None:
        return "a frozen parameter has no gradient, and needs none"
    if size > 1 and name not in whole:
        return f"{name} is sharded: its gradient was complete before the call. A sum over the " \
               "ranks adds other rows or columns to it"
    unchanged = all(_same(mine.after[name], mine.before[name]) for mine in seen)
    if unchanged and whole.issubset([*wrong, FROZEN]):
        return "the gradients did not change: write the sums back into .grad (flatten and cat " \
               "make copies)"
    if unchanged:
        return f"every rank holds {name} in full and uses it for its own tokens: its gradient is " \
               "a sum over the ranks, like that of the other replicated parameters"
    means = [right_grads[name] / size for right_grads in right]
    if all(_same(mine.after[name], mean) for mine, mean in zip(seen, means, strict=True)):
        return "that is the mean: each rank has the gradient of different tokens of the same " \
               "samples; add without dividing"
    return "each rank has the gradient of its own tokens: sum each parameter's values over the " \
           "ranks, once"


def _expect_one_message(seen: list[Seen], family: str) -> None:
    full = alone(family)
    values = sum(full[name].numel() for name in whole_names(family, len(seen)) - {FROZEN})
    expect(all(mine.sent == [values * ELEMENT] for mine in seen),
           seen=per_rank([f"{len(mine.sent)} all-reduces, of {sum(mine.sent):,} bytes in all"
                          for mine in seen]) + f"; expected 1, of {values * ELEMENT:,}",
           likely="concatenate the gradients into one tensor (flatten, torch.cat): every small "
                  "message costs its latency. Do not send gradients that are already complete")
