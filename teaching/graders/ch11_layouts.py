"""Grader of 11.3: clusters, models and costs, against all layouts there are, tried one by one."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

from minitron.config import ModelConfig
from minitron.cost import PUBLISHED, num_parameters
from minitron.cost.sharding import zero_bytes
from teaching.graders import Mistake, apart, asked, expect

Layout = tuple[int, int, int, int]


def state_bytes(model: ModelConfig, dp: int, tp: int, pp: int, zero: int) -> int:
    """Weights, gradients and optimizer state in mixed precision, split evenly."""
    return zero_bytes(-(-num_parameters(model) // (tp * pp)), dp, zero)


def of_parts(needed: dict[int, int], dp: int, tp: int, pp: int, zero: int) -> int:
    """So many bytes in so many parts, whatever ZeRO does; else far too many."""
    return needed.get(tp * pp, 10**6)


def uneven(model, dp: int, tp: int, pp: int, zero: int) -> int:
    """No rule that could be guessed."""
    return (dp * 7 + tp * 5 + pp * 3 + zero * 11) % 17


class Case(NamedTuple):
    """What `layouts` is asked, and in words."""

    text: str
    model: ModelConfig
    num_gpus: int
    gpus_per_node: int
    batch_size: int
    bytes_per_gpu: int
    bytes_needed: Callable[..., int]


def small(num_heads: int = 4, num_kv_heads: int = 0, num_layers: int = 4, ffn_width: int = 48,
          width: int = 48) -> ModelConfig:
    return ModelConfig(num_layers=num_layers, width=width, num_heads=num_heads,
                       num_kv_heads=num_kv_heads or num_heads, ffn_width=ffn_width, vocab_size=60)


def cases() -> list[Case]:
    free = partial(of_parts, dict.fromkeys(range(1, 200), 1))
    small_models = [
        ("4 heads, 2 layers, only tp x pp = 4 fits", small(num_layers=2), 8, 4, 8, 10,
         partial(of_parts, {4: 1})),
        ("4 heads, 4 layers, only tp x pp = 4 fits, exactly", small(), 8, 8, 8, 10,
         partial(of_parts, {4: 10})),
        ("6 heads, 6 layers, all fit", small(6, num_layers=6), 12, 8, 12, 10, free),
        ("6 heads on 6 GPUs of one node, all fit", small(6), 6, 8, 6, 10, free),
        ("6 heads, all fit", small(6, num_layers=2), 6, 4, 6, 10, free),
        ("4 heads, 2 key-value heads, all fit", small(4, 2), 8, 8, 8, 10, free),
        ("4 heads, ffn_width 42, all fit", small(ffn_width=42), 4, 8, 8, 10, free),
        ("4 heads, 3 layers, all fit", small(num_layers=3), 12, 8, 12, 10, free),
        ("4 heads, 4 layers, a batch of 6, all fit", small(), 8, 8, 6, 10, free),
        ("bytes_needed without a pattern", small(), 16, 8, 16, 7, partial(uneven, None)),
        ("16 heads on 32 GPUs in nodes of 16, 32 layers, all fit",
         small(16, num_layers=32, width=64), 32, 16, 32, 10, free),
        ("one GPU", small(), 1, 8, 4, 10, free),
        ("nothing fits", small(), 8, 8, 8, 10, partial(of_parts, {})),
    ]
    return [Case(*row) for row in small_models] + published_cases()


def published_cases() -> list[Case]:
    memory = 80 * 10**9
    llama, giant = PUBLISHED["Llama 3.1 70B"], PUBLISHED["Llama 3.1 405B"]
    return [
        Case("Llama 3.1 70B's state in 80 GB", llama, 64, 8, 512, memory,
             partial(state_bytes, llama)),
        Case("Llama 3.1 405B's state in 80 GB", giant, 128, 8, 1024, memory,
             partial(state_bytes, giant)),
    ]


def conditions(case: Case, layout: Layout) -> dict[str, bool]:
    """What is wrong if the layout breaks a condition (all but the last), and whether it meets it.

    Key-value heads divide the heads, so what divides the first divides the second.
    """
    dp, tp, pp, zero = layout
    model, node = case.model, case.gpus_per_node
    groups = [range(first, first + tp) for first in range(0, case.num_gpus, tp)]
    return {
        f"dp x tp x pp is {dp * tp * pp}, not {case.num_gpus}": dp * tp * pp == case.num_gpus,
        f"tp = {tp} does not divide the {model.num_kv_heads} key-value heads":
            model.num_kv_heads % tp == 0,
        f"tp = {tp} does not divide the feed-forward width, {model.ffn_width}":
            model.ffn_width % tp == 0,
        f"a group of tp = {tp} neighbors spans two nodes of {node} GPUs":
            all(group[0] // node == group[-1] // node for group in groups),
        f"pp = {pp} does not divide the {model.num_layers} layers": model.num_layers % pp == 0,
        f"dp = {dp} does not divide the batch of {case.batch_size}": case.batch_size % dp == 0,
        f"zero = {zero} with dp = 1 shards nothing: with dp = 1 only zero = 0 is a "
        "layout": dp > 1 or zero == 0,
        f"zero = {zero} with pp = {pp}: a pipeline allows 0 and 1 only": pp == 1 or zero < 2,
        f"zero = {zero} is not 0 to 3": zero in range(4),
    }


def right_layouts(case: Case) -> list[Layout]:
    """By trying them all."""
    sizes = [size for size in range(1, case.num_gpus + 1) if case.num_gpus % size == 0]
    tried = [(dp, tp, pp, zero) for tp, pp, zero, dp in product(sizes, sizes, range(4), sizes)]
    possible = [layout for layout in tried if all(conditions(case, layout).values())]
    return [layout for layout in possible if case.bytes_needed(*layout) <= case.bytes_per_gpu]


def grade_11_3(layouts: Callable) -> None:
    """Compare with all layouts; name the first that is too many, missing, or out of place."""
    for case in cases():
        with asked(f"layouts of {case.num_gpus} GPUs, {case.gpus_per_node} a node, batch "
                   f"{case.batch_size}: {case.text}"):
            answer, called = apart(ask, layouts, case)
            _expect_layouts(answer)
            _expect_right([tuple(layout) for layout in answer], case)
            impossible = [each for each in called if not all(conditions(case, each).values())]
            _expect_asked_of_possible(impossible, case)


def ask(layouts: Callable, case: Case) -> tuple:
    """What is returned, and the layouts for which bytes_needed was called."""
    called: list[Layout] = []

    def bytes_needed(dp: int, tp: int, pp: int, zero: int) -> int:
        called.append((dp, tp, pp, zero))
        return case.bytes_needed(dp, tp, pp, zero)

    return layouts(*case[1:6], bytes_needed), called


def _expect_layouts(answer) -> None:
    fits = isinstance(answer, list) and all(
        isinstance(layout, tuple) and len(layout) == 4 and all(type(n) is int for n in layout)
        for layout in answer)
    expect(fits, seen=f"it returned {answer!r:.120}",
           likely="return a list of tuples of four ints: dp, tp, pp, zero")


def _expect_right(answer: list[Layout], case: Case) -> None:
    right = right_layouts(case)
    for layout in answer:
        broken = [why for why, holds in conditions(case, layout).items() if not holds]
        expect(not broken, seen=f"{layout} is among them", likely=(broken or [""])[0])
        needed = case.bytes_needed(*layout)
        expect(needed <= case.bytes_per_gpu, seen=f"{layout} is among them",
               likely=f"it needs {needed} bytes, of {case.bytes_per_gpu} that a GPU has: ask "
                      "bytes_needed(dp, tp, pp, zero), in this order")
    missing = [layout for layout in right if layout not in answer]
    if missing:
        raise Mistake(f"{missing[0]} is not among {in_words(answer)}",
                      _why_missing(missing[0], answer, case))
    twice = [layout for layout in right if answer.count(layout) > 1]
    expect(not twice, seen=f"{twice} more than once", likely="each layout once")
    if answer != right:
        place = next(n for n, pair in enumerate(zip(answer, right, strict=True))
                     if pair[0] != pair[1])
        raise Mistake(f"number {place + 1} is {answer[place]}, not {right[place]}",
                      "sort by tp, then by pp, then by zero, smallest first")


def in_words(answer: list[Layout]) -> str:
    return str(answer) if len(answer) <= 6 else f"the {len(answer)} layouts"


def _why_missing(layout: Layout, answer: list[Layout], case: Case) -> str:
    dp, tp, pp, zero = layout
    if case.bytes_needed(*layout) == case.bytes_per_gpu:
        return "it needs exactly the bytes that a GPU has: that fits"
    if len(answer) == 1:
        return "return all layouts that fit, not only the first"
    if any(other[:3] == layout[:3] for other in answer):
        return "return every ZeRO stage that fits: a higher one sends more, but it is a layout too"
    if case.num_gpus <= case.gpus_per_node and case.gpus_per_node % tp:
        return f"all {case.num_gpus} GPUs are in one node, so every group is too"
    if any(size & (size - 1) for size in layout[:3]) and \
            not any(size & (size - 1) for other in answer for size in other[:3]):
        return "sizes need not be powers of two: any divisor counts"
    if case.gpus_per_node < case.num_gpus and tp == case.gpus_per_node:
        return "tp may be as large as the node"
    if answer and any(layout[axis] > max(other[axis] for other in answer) for axis in range(3)):
        return "there is no upper limit on a size, other than the conditions and the memory"
    return "it meets every condition, and fits"


def _expect_asked_of_possible(impossible: list[Layout], case: Case) -> None:
    if impossible:
        broken = [why for why, holds in conditions(case, impossible[0]).items() if not holds]
        raise Mistake(f"bytes_needed{impossible[0]} is called, though {broken[0]}",
                      "check the other conditions first: a cost model may raise for sizes that do "
                      "not divide")
