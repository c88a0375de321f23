"""Grader of 12.4: jobs of several kinds, against the layouts of the package's own search."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, get_args

from minitron.config import ModelConfig, ParallelConfig
from minitron.cost import PUBLISHED, RecomputeKind, published_llama
from minitron.plan.estimate import estimate
from minitron.plan.hardware import find_device
from minitron.plan.job import Decision, Job
from minitron.plan.search import decisions, words
from teaching.graders import Mistake, asked, expect

SAME = 1e-9
"""Of the seconds: as fast."""


@dataclass(frozen=True)
class OddJob(Job):
    """A job whose limit follows from no number of the device."""

    usable: float = 0.0

    @property
    def limit(self) -> float:
        """Bytes that a GPU may hold."""
        return self.usable


class Case(NamedTuple):
    """A job, and what makes it interesting."""

    text: str
    job: Job


@cache
def cases() -> list[Case]:
    # round numbers of bytes, with which the fastest layouts differ most from case to case
    h100 = replace(find_device("H100-SXM-80GB"), memory_bytes=80e9)
    a100 = replace(find_device("A100-SXM-40GB"), memory_bytes=40e9)
    slow = replace(h100, nic_bandwidth=1e9)
    llama_8b = published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
    llama_70b = PUBLISHED["Llama 3.1 70B"]
    tiny = ModelConfig(num_layers=2, width=512, num_heads=4, num_kv_heads=4, ffn_width=1536,
                       vocab_size=4096, max_sequence_length=1024)
    odd = replace(tiny, num_layers=6, num_heads=6, num_kv_heads=6, width=1536, ffn_width=4608,
                  vocab_size=6144)
    rows = [
        ("one GPU", tiny, 1, h100, 1024, 4),
        ("6 heads and layers on 6 GPUs of one node", odd, 6, h100, 1024, 24),
        ("1.2 G parameters on one node", PUBLISHED["Llama 3.2 1B"], 8, h100, 4096, 64),
        ("8 G parameters on 8 GPUs of 40 GB", llama_8b, 8, a100, 4096, 32),
        ("7 G parameters on two nodes with a network of 1 GB/s", PUBLISHED["Llama 2 7B"], 16, slow,
         4096, 32),
        ("70 G parameters on four nodes", llama_70b, 32, h100, 4096, 64),
        ("70 G parameters on one node: nothing fits", llama_70b, 8, h100, 4096, 32),
    ]
    return [Case(text, Job(*row)) for text, *row in rows] + odd_cases()


def odd_cases() -> list[Case]:
    """Jobs in which no axis, size, stage of ZeRO or condition may be left out."""
    h100 = find_device("H100-SXM-80GB")
    rows = [  # GPUs, per node, heads, key-value heads, layers, F, V, S, network, batch, limit
        ("a batch of 3 on 8 GPUs in nodes of 6", 8, 6, 16, 4, 12, 6144, 128256, 4096, 1, 3, 21.5),
        ("one key-value head, 6 GPUs in nodes of 4", 6, 4, 6, 1, 3, 1154, 4096, 1026, 1, 48, 16.2),
        ("5 layers on two nodes", 16, 8, 8, 8, 5, 4096, 4096, 4096, 1, 2, 5.9),
        ("16 layers, a batch of 3", 8, 8, 8, 2, 16, 1536, 12294, 1026, 5, 3, 2.2),
        ("a large vocabulary and little memory", 8, 8, 8, 8, 12, 1536, 128256, 4096, 5, 4, 2.3),
    ]
    cases = []
    for text, gpus, node, heads, kv_heads, layers, F, V, S, network, batch, limit in rows:
        model = ModelConfig(num_layers=layers, width=128 * heads, num_heads=heads,
                            num_kv_heads=kv_heads, ffn_width=F, vocab_size=V,
                            max_sequence_length=S)
        device = replace(h100, nic_bandwidth=network * 1e9)
        job = OddJob(model, gpus, device, S, batch, node, usable=limit * 1e9)
        cases.append(Case(f"{text}, a network of {network} GB/s", job))
    return cases


class Timed(NamedTuple):
    """A layout as `estimate` sees it."""

    decision: Decision
    seconds: float
    hfu: float
    memory: dict[str, float]
    limit: float

    @classmethod
    def of(cls, job: Job, decision: Decision) -> "Timed":
        found = estimate(job, decision)
        return cls(decision, found.seconds, found.hfu, found.memory, job.limit)

    @property
    def total_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit

    def __str__(self) -> str:
        return f"{words(self.decision)} takes {self.seconds:.6g} s and holds " \
            f"{self.total_bytes / 1e9:.1f} GB"


def conditions(job: Job, decision: Decision) -> dict[str, bool]:
    """What is wrong if the layout breaks a condition, and whether it meets it."""
    axes, model, size = decision.parallel, job.model, decision.micro_batch_size
    dp, tp, pp, zero = axes.dp, axes.tp, axes.pp, axes.zero
    node = min(job.gpus_per_node, job.num_gpus)
    sequences = job.global_batch_size // max(dp, 1)
    return {
        f"dp x tp x pp is {dp * tp * pp}, not {job.num_gpus}": dp * tp * pp == job.num_gpus,
        f"tp = {tp} does not divide the {node} GPUs of a node": node % tp == 0,
        f"tp = {tp} does not divide num_kv_heads = {model.num_kv_heads}":
            model.num_kv_heads % tp == 0,
        f"tp = {tp} does not divide ffn_width or vocab_size":
            model.ffn_width % tp == 0 and model.vocab_size % tp == 0,
        f"sequence is {axes.sequence} with tp = {tp}": axes.sequence == (tp > 1),
        f"tp = {tp} does not divide the sequence length, {job.sequence_length}":
            job.sequence_length % tp == 0,
        f"pp = {pp} does not divide the {model.num_layers} layers": model.num_layers % pp == 0,
        f"dp = {dp} does not divide the global batch of {job.global_batch_size} sequences":
            job.global_batch_size % dp == 0,
        f"zero = {zero} with dp = 1: there is nothing to shard over, so zero must be 0":
            dp > 1 or zero == 0,
        f"recompute is {decision.recompute!r}": decision.recompute in get_args(RecomputeKind),
        f"a micro-batch size of {size} does not divide a rank's {sequences} sequences":
            size > 0 and sequences % size == 0,
        f"a micro-batch size of {size} is not a power of two": size & (size - 1) == 0,
        "set dp, tp, sequence, pp and zero; leave the other fields of ParallelConfig alone":
            axes == ParallelConfig(dp=dp, tp=tp, sequence=axes.sequence, pp=pp, zero=zero),
    }


@cache
def layouts(job: Job) -> list[Timed]:
    """Those of the package's search that the exercise allows, fastest first, fitting or not."""
    found = (Timed.of(job, decision) for decision in decisions(job, Counter())
             if all(conditions(job, decision).values()))
    return sorted(found, key=lambda each: each.seconds)


def grade_12_4(find_layout: Callable) -> None:
    """Compare with the fastest of all layouts, job by job."""
    for case in cases():
        job = case.job
        with asked(f"find_layout of {case.text}: {job.num_gpus} x {job.device.name}, "
                   f"{job.gpus_per_node} a node, {job.limit / 1e9:.1f} GB usable, "
                   f"{job.global_batch_size} sequences of {job.sequence_length} tokens a step"):
            _expect_best(find_layout(job), job)


def _expect_best(answer, job: Job) -> None:
    expect(answer is None or isinstance(answer, Decision), seen=f"it returned {answer!r:.80}",
           likely="return one Decision, the fastest that fits, or None")
    fitting = [each for each in layouts(job) if each.fits]
    right = str(fitting[0]) if fitting else "nothing fits"
    if answer is None:
        expect(not fitting, seen=f"None, though {right}",
               likely="a layout fits. Check that you try every size of dp, tp and pp (1 is one), "
                      "every ZeRO stage and every kind of recomputation")
        return
    broken = [why for why, holds in conditions(job, answer).items() if not holds]
    expect(not broken, seen=f"it returned {words(answer)}", likely=(broken or [""])[0])

    mine = Timed.of(job, answer)
    expect(mine.fits, seen=f"{mine}; {right}", likely=_why_too_large(mine, job))
    if mine.seconds > fitting[0].seconds * (1 + SAME):
        raise Mistake(f"{mine}; {right}", _why_slower(mine, fitting))


def _why_too_large(mine: Timed, job: Job) -> str:
    usable, largest = f"{job.limit / 1e9:.1f} GB", max(mine.memory, key=mine.memory.get)
    if mine.total_bytes <= job.device.memory_bytes:
        return f"job.limit is {usable}, less than the device's memory, because some of that is " \
               "not usable. Compare with job.limit itself"
    if mine.memory[largest] <= job.limit:
        return f"the sum over all kinds must be at most job.limit, {usable} here: no other " \
            f"number, and not each kind by itself (the largest, {largest}, does fit alone)"
    return f"skip layouts that do not fit: {largest} alone exceeds the {usable} of job.limit"


def _why_slower(mine: Timed, fitting: list[Timed]) -> str:
    """The likeliest reason for a layout that is allowed, fits, and is not the fastest."""
    best, axes = fitting[0].decision, mine.decision.parallel
    for name, is_like in ALONE.items():
        if is_like(mine) and _is_least(mine, filter(is_like, fitting), lambda each: each.seconds):
            return f"that is the fastest layout {name}: try the others too"
    if _is_least(mine, fitting, lambda each: -each.hfu):
        return "that has the highest HFU, which counts recomputed FLOPs as useful; rank by .seconds"
    if _is_least(mine, fitting, lambda each: each.total_bytes):
        return "that needs the least memory, but free memory makes no step faster; rank by .seconds"
    if axes.dp > best.parallel.dp:
        return "the largest dp is not always the fastest: gradients cross the network, and more " \
               "must be recomputed to fit"
    if axes.tp > best.parallel.tp:
        return "the largest tp is not always the fastest: every layer waits for its collectives"
    if mine.decision.micro_batch_size != best.micro_batch_size:
        return "try every micro-batch size: it changes kernel efficiency, the bubble, and what fits"
    return "of the layouts that fit, return the one with the fewest estimate(job, decision).seconds"


ALONE: dict[str, Callable[[Timed], bool]] = {
    "without tensor and pipeline parallelism":
        lambda each: each.decision.parallel.tp == each.decision.parallel.pp == 1,
    "without a pipeline": lambda each: each.decision.parallel.pp == 1,
    "without tensor parallelism": lambda each: each.decision.parallel.tp == 1,
    "with micro-batches of 1": lambda each: each.decision.micro_batch_size == 1,
    "without recomputation": lambda each: each.decision.recompute == "none",
    "with full recomputation": lambda each: each.decision.recompute == "full",
    "without ZeRO": lambda each: each.decision.parallel.zero == 0,
    "with at most ZeRO-1": lambda each: each.decision.parallel.zero <= 1,
}
"""What the learner may have left out, and which layouts remain then."""


def _is_least(mine: Timed, among: Iterable[Timed], key: Callable[[Timed], float]) -> bool:
    return key(mine) <= min(map(key, among)) + abs(key(mine)) * SAME
