"""Graders of chapter 3; the one of the autograd function has a file of its own.

Each compares with something the answer cannot share a fault with: the plain call (3.1), every way
to cut a few blocks (3.2), a real model's matrix products (3.3), all segments by hand (3.4).
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
from torch.utils.flop_counter import FlopCounterMode

from minitron.config import ModelConfig
from minitron.model.transformer import Transformer, materialized_attention
from teaching.graders import asked, expect
from teaching.graders.ch03_function import grade_3_1

__all__ = ["grade_3_1", "grade_3_2", "grade_3_3", "grade_3_4"]


def grade_3_2(segments_for_budget: Callable) -> None:
    """Compare with the best of all ways to cut up to six blocks, for every budget."""
    for sizes in ([10] * 4, [10] * 6, [3, 9, 4, 4, 8, 5], [20, 4, 4, 4, 4, 30], [7]):
        plans = all_plans(len(sizes))
        for boundary, budget in product((1, 3), range(sum(sizes) + 2, 0, -1)):
            fitting = [plan for plan in plans if peak_of(plan, sizes, boundary) <= budget]
            with asked(f"segments_for_budget({sizes}, boundary_bytes={boundary}, "
                       f"budget={budget})"):
                if fitting:
                    plan = segments_for_budget(list(sizes), boundary, budget)
                    _expect_plan(plan, sizes, boundary, budget, min(fitting, key=sum))
                else:
                    _expect_refusal(segments_for_budget, sizes, boundary, budget)


def all_plans(num_blocks: int) -> list[list[int]]:
    """Every way to cut the first blocks into segments."""
    plans: list[list[int]] = [[]]
    for plan in plans:  # grows while it is walked
        plans += [[*plan, length] for length in range(1, num_blocks - sum(plan) + 1)]
    return plans


def moments_of(plan: list[int], sizes: list[int], boundary: int) -> list[int]:
    """Bytes held while each segment is recomputed, and last at the end of the forward pass."""
    starts = [sum(plan[:index]) for index in range(len(plan) + 1)]
    needs = [index * boundary + sum(sizes[start:start + length])
             for index, (start, length) in enumerate(zip(starts, plan, strict=False))]
    return [*needs, len(plan) * boundary + sum(sizes[starts[-1]:])]


def peak_of(plan: list[int], sizes: list[int], boundary: int) -> int:
    return max(moments_of(plan, sizes, boundary))


def _expect_plan(plan, sizes: list[int], boundary: int, budget: int, right: list[int]) -> None:
    lengths = isinstance(plan, list) and all(type(n) is int and n > 0 for n in plan)
    expect(lengths and sum(plan) <= len(sizes), seen=f"it returned {plan!r}",
           likely=f"a list of positive lengths, {len(sizes)} blocks in total at most; [] "
                  "recomputes nothing")
    *needs, end = moments_of(plan, sizes, boundary)
    seen = f"{plan} needs {end} bytes at the end of the forward pass and {needs or 'nothing'} " \
           f"while its segments are recomputed; a right answer is {right}"
    expect(end <= budget, seen=seen,
           likely="at the end of the forward pass, memory holds the inputs of all segments as well "
                  "as the tail's activations")
    expect(max(needs, default=0) <= budget, seen=seen,
           likely="while a segment is recomputed, the inputs of the segments before it are also in "
                  "memory: later segments have less room")
    expect(sum(plan) <= sum(right), seen=f"{seen}, which recomputes {sum(right)} blocks, not "
           f"{sum(plan)}", likely=_why_too_many(plan, sizes))


def _why_too_many(plan: list[int], sizes: list[int]) -> str:
    if sum(plan) == len(sizes):
        return "every block is recomputed: keep the last ones, whose activations have been " \
               "freed by the time the segments are recomputed"
    return "recompute fewer blocks: fill the first segments as far as they go, since they have " \
           "the most room, and do not count the tail while a segment is recomputed"


def _expect_refusal(
    segments_for_budget: Callable, sizes: list[int], boundary: int, budget: int
) -> None:
    try:
        plan = segments_for_budget(list(sizes), boundary, budget)
    except ValueError as error:
        message = str(error).replace(",", "").replace("_", "")
        expect(str(budget) in message, seen=f"{type(error).__name__}: {error}",
               likely=f"the message names the budget, {budget}")
    else:
        least = min(peak_of(plan, sizes, boundary) for plan in all_plans(len(sizes)))
        expect(False, seen=f"it returned {plan}",
               likely=f"nothing fits: every choice needs {least} bytes or more; raise ValueError")


def grade_3_3(recompute_flops_per_token: Callable) -> None:
    """Compare with the matrix products of a real model's blocks and of its attention."""
    sizes = dict(vocab_size=101, max_sequence_length=53, num_layers=3, width=44, ffn_width=118)
    models = {
        "llama": ModelConfig("llama", num_heads=2, num_kv_heads=2, **sizes),
        "llama, 11 heads on 1 KV head":
            ModelConfig("llama", num_heads=11, num_kv_heads=1, **sizes),
        "gpt": ModelConfig("gpt", num_heads=4, num_kv_heads=4, **sizes),
    }
    for (name, config), S, kind in product(
        models.items(), (29, 53), ("none", "selective", "full")
    ):
        D, L, kv_width = config.width, config.num_layers, config.num_kv_heads * config.head_width
        with asked(f"recompute_flops_per_token({name}: V 101, D {D}, F {config.ffn_width}, G K "
                   f"{kv_width}, L {L}, sequence_length={S}, recompute={kind!r})"):
            _expect_flops(recompute_flops_per_token(config, S, kind), config, S, kind)


@cache
def recomputed_flops(config: ModelConfig, sequence_length: int, kind: str) -> int:
    """FLOPs per token of the forward pass of what is recomputed, counted on a real model."""
    with torch.device("meta"):  # shapes only: nothing is stored or computed
        model = Transformer(config)
        tokens = torch.zeros(2, sequence_length, dtype=torch.int64)
    counts = {"none": 0, "selective": 0, "full": 0}

    def counted(kind: str, function: Callable) -> Callable:
        def call(*arguments):
            with FlopCounterMode(display=False) as counter:
                result = function(*arguments)
            counts[kind] += counter.get_total_flops()
            return result
        return call

    for block in model.blocks:
        block.attention.attention_fn = counted("selective", materialized_attention)
    model.run_blocks = counted("full", model.run_blocks)
    model(tokens)
    return counts[kind] // tokens.numel()


def _expect_flops(seen: int, config: ModelConfig, sequence_length: int, kind: str) -> None:
    expect(isinstance(seen, int), seen=f"{seen!r}, of type {type(seen).__name__}",
           likely="counts are exact integers: use // or no division at all, not /")
    right = recomputed_flops(config, sequence_length, kind)
    faults = _flops_faults(config, sequence_length, kind)
    expect(seen == right,
           seen=f"{seen:,} FLOPs per token, not {right:,} (difference {seen - right:+,})",
           likely=faults.get(seen, "add up the matmuls of one block, times L"))


def _flops_faults(config: ModelConfig, sequence_length: int, kind: str) -> dict[int, str]:
    """What a wrong count means."""
    D, L = config.width, config.num_layers
    kv_width = config.num_kv_heads * config.head_width
    full, core = (recomputed_flops(config, sequence_length, k) for k in ("full", "selective"))
    right = {"none": 0, "selective": core, "full": full}[kind]
    head, up = 2 * D * config.vocab_size, 2 * L * D * config.ffn_width
    linear = 2 * L * (2 * D * D + 2 * D * kv_width)
    per_head = "all H query heads attend, to keys that they share: 2 S D per matmul, not 2 S G K"
    faults = {
        full + head: "the head comes after the blocks: it is not recomputed",
        3 * (full + head): "that is the whole step: only the forward pass of the blocks is added",
        3 * right: "the backward pass runs once in any case: only the forward pass is added",
        2 * right: "twice the right number: it is recomputed once",
        right // L: "that is one layer: there are L",
        right // 2: "half is missing: a multiplication and an addition are two FLOPs, and the full "
                    "S x S square counts",
        right - core: "attention's two matmuls are missing",
        right - core // 2: "one of attention's two matmuls is missing",
        right + linear: "query, key, value and out are outside attention's core",
        right - up: "llama's feed-forward has three matrices: gate, up and down",
        right + up: "gpt's feed-forward has two matrices: up and down",
    }
    if kv_width < D:
        faults[right - core + core * kv_width // D] = per_head
    faults.pop(right, None)
    if kind == "none":
        return dict.fromkeys([*faults, full, core], "nothing is recomputed, nothing is added")
    return faults


def grade_3_4(best_segment_length: Callable) -> None:
    """Compare with every length, each of its segments added up by hand."""
    examples = [
        (6, 10, 1),  # even, so that a segment's own input counted twice is not a longer last one
        (7, 4, 2),
        (7, 7, 2),  # where the minimum of the smooth formula, rounded, is not the best
        (12, 2, 2), (10, 3, 2), (96, 34, 2), (97, 34, 2), (24, 5, 5), (1, 9, 2),
    ]
    cases = [*examples, *product(range(1, 31), (3, 10, 34), (1, 3))]
    for num_blocks, activation, boundary in cases:
        with asked(f"best_segment_length(num_blocks={num_blocks}, activation_bytes={activation}, "
                   f"boundary_bytes={boundary})"):
            answer = best_segment_length(num_blocks, activation, boundary)
            _expect_length(answer, num_blocks, activation, boundary)


def cut(num_blocks: int, length: int) -> list[int]:
    """The lengths of all segments, the last one shorter if it must."""
    return [min(length, num_blocks - start) for start in range(0, num_blocks, length)]


def _expect_length(answer, num_blocks: int, activation: int, boundary: int) -> None:
    sizes = [activation] * num_blocks
    peaks = {length: max(moments_of(cut(num_blocks, length), sizes, boundary)[:-1])
             for length in range(1, num_blocks + 1)}
    lowest = min(peaks.values())
    right = max(length for length in peaks if peaks[length] == lowest)
    integers = isinstance(answer, tuple) and [type(n) for n in answer] == [int, int]
    expect(integers and answer[0] in peaks, seen=f"it returned {answer!r}",
           likely=f"a tuple of two integers, a length from 1 to {num_blocks} and its peak in "
                  "bytes: divide with //")
    length, peak = answer
    needs = moments_of(cut(num_blocks, length), sizes, boundary)[:-1]
    seen = f"{answer}; length {length} cuts into {_short(cut(num_blocks, length))}; " \
           f"its segments need {_short(needs)}"
    expect(peak == peaks[length], seen=f"{seen}, {peaks[length]} at most",
           likely=_why_wrong_peak(peak, needs, length, activation, boundary))
    likely = f"length {right} peaks at {lowest}: compare all lengths"
    if peaks[length] == lowest:
        likely = f"length {right} has the same peak: return the longest"
    elif length == max(1, round(num_blocks ** 0.5)):
        likely += "; the square root is right where a block stores as much as its input"
    expect(length == right, seen=f"{seen}; right is {(right, lowest)}", likely=likely)


def _short(values: list[int]) -> str:
    shown = [str(value) for value in values]
    return ", ".join(shown if len(values) < 8 else [*shown[:2], "...", *shown[-2:]])


def _why_wrong_peak(
    peak: int, needs: list[int], length: int, activation: int, boundary: int
) -> str:
    inputs = (len(needs) - 1) * boundary
    faults = {
        needs[-1]: "that is the last segment, which may be short: the one before it can need "
                     "more",
        needs[0]: "that is the first segment: later ones also need the earlier inputs",
        max(needs) + boundary: "a segment's own input is among its activations: count the inputs "
                                 "of the segments before it",
        inputs + boundary + length * activation:
            "that is every input plus a full segment: a segment's own input is among its "
            "activations, and the last segment can be shorter",
        inputs + length * activation: "the last segment is shorter when the length does not divide "
                                      "the blocks: see which segment needs the most",
    }
    return faults.get(peak, "segment j, from 0, needs j inputs and the activations of its blocks")
