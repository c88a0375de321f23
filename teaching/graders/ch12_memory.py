"""Grader of 12.2: what a rank holds, against the real step's dry run and the cost formulas."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil
from typing import NamedTuple

from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.cost import Recipe, tensor_parallel_parameters, zero_holdings
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import one_forward_one_backward
from minitron.plan.dryrun import dry_run
from minitron.plan.systems import MINITRON, blocks_per_rank
from teaching.graders import Mistake, asked, expect
from teaching.graders.arguments import call_unchanged

RECIPE = Recipe(parameter=2, gradient=2, master=4, optimizer_state=8)
CALLERS = "the list belongs to the caller: build a new one"
EACH = {"parameter": 2, "gradient": 2, "optimizer state": 12}
DIVIDED_FROM = {"parameter": 3, "gradient": 2, "optimizer state": 1}
"""The stage of ZeRO that begins to divide a kind."""


class Place(NamedTuple):
    """What `state_bytes` is asked."""

    model: ModelConfig
    stages: list[int]
    stage: int
    tp: int
    dp: int
    zero: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.stages) - 1

    def __str__(self) -> str:
        model = self.model
        return f"V {model.vocab_size}, D {model.width}, F {model.ffn_width}, " \
            f"num_heads {model.num_heads}, num_kv_heads {model.num_kv_heads}, " \
            f"{'tied' if model.tied_embedding else 'untied'}; stages={self.stages}, " \
            f"stage={self.stage}, tp={self.tp}, dp={self.dp}, zero={self.zero}"


def llama(num_layers: int = 5, tied: bool = False) -> ModelConfig:
    """No two of its parts have the same size."""
    return ModelConfig(
        num_layers=num_layers, width=32, num_heads=4, num_kv_heads=2, ffn_width=88, vocab_size=70,
        max_sequence_length=8, tied_embedding=tied)


def places() -> list[Place]:
    """First stages, tp and ties, one after the other; only then anything is sharded over dp."""
    untied, tied, stages = llama(7), llama(7, tied=True), [3, 2, 2]
    rows = [
        (untied, stages, 1, 1, 1, 0), (untied, stages, 0, 1, 1, 0), (untied, stages, 2, 1, 1, 0),
        (untied, [7], 0, 1, 1, 0), (tied, [7], 0, 1, 1, 0), (tied, stages, 0, 1, 1, 0),
        (tied, stages, 2, 1, 1, 0), (untied, stages, 1, 2, 1, 0), (untied, stages, 0, 2, 1, 0),
        (untied, stages, 2, 2, 1, 0), (tied, stages, 1, 1, 1, 0), (tied, stages, 1, 2, 1, 0),
        (tied, stages, 0, 2, 1, 0), (tied, stages, 2, 2, 1, 0), (tied, stages, 1, 2, 5, 1),
    ]
    rows += [(untied, stages, 2, 2, dp, zero) for dp, zero in ((1, 3), (8, 1), (5, 1))]
    rows += [(model, [7], 0, 2, dp, zero)
             for dp in (8, 3) for zero in (0, 1, 2, 3) for model in (untied, tied)]
    return [Place(*row) for row in rows]


def right_state(place: Place) -> dict[str, int]:
    return zero_holdings(num_parameters(place), place.dp, place.zero, RECIPE)


def num_parameters(place: Place) -> int:
    """Of one rank: those of a model of this stage's blocks, without the ends that it has not."""
    stage = replace(place.model, num_layers=place.stages[place.stage])
    matrix = stage.vocab_size * stage.width // place.tp
    count = tensor_parallel_parameters(stage, place.tp)
    if len(place.stages) > 1 and stage.tied_embedding:
        count += matrix  # counted once, but the ends are two stages
    return count - (not place.is_first) * matrix - (not place.is_last) * (matrix + stage.width)


@cache
def dry_runs() -> list[tuple[str, Place, dict[str, int]]]:
    """The first and the last of 8 ranks, 2 x 2 x 2 of them: what the meter finds on them."""
    model = llama()
    config = Config(
        model, DataConfig(sequence_length=8), TrainConfig(global_batch_size=4, precision="bf16"),
        ParallelConfig(dp=2, tp=2, pp=2))
    found = []
    for rank in (0, 7):
        tensors = dry_run(config, 8, rank).peak.tensors
        held = {kind: sum(t.bytes for t in tensors if t.category == kind and t.shape)
                for kind in EACH}  # without AdamW's step counters, of no dimension
        stages = blocks_per_rank(model, config.parallel, MINITRON)
        place = Place(model, stages, 0 if rank == 0 else 1, 2, 2, 0)
        where = f", compared with rank {rank} of 8 in a dry run of the real step"
        found.append((where, place, held))
    return found


def grade_12_2(state_bytes: Callable, fullest_stage: Callable) -> None:
    """Compare with formulas, then with dry runs; then the pipelines."""
    cases = [("", place, right_state(place)) for place in places()]
    for where, place, right in [*cases, *dry_runs()]:
        with asked(f"state_bytes({place}){where}"):
            answer = call_unchanged(state_bytes, *place, names="model, stages", likely=CALLERS)
            _expect_state(answer, right, place)

    for pipeline in pipelines():
        words = ", ".join(f"{name}={value}" for name, value in pipeline._asdict().items())
        with asked(f"fullest_stage({words})"):
            answer = call_unchanged(fullest_stage, *pipeline, names="stages, states",
                                    likely=CALLERS)
            _expect_fullest(answer, pipeline)


def _expect_state(answer, right: dict[str, int], place: Place) -> None:
    expect(isinstance(answer, dict) and set(answer) == set(right),
           seen=f"it returned {answer!r:.90}",
           likely=f"return a dict with the keys {', '.join(map(repr, right))}")
    for kind, wanted in right.items():
        seen = answer[kind]
        expect(type(seen) is int, seen=f"{kind}: {seen!r}, of type {type(seen).__name__}",
               likely="return exact integers: divide with //, and round up")
        if seen != wanted:
            each = EACH[kind]
            raise Mistake(f"{kind}: {seen:,} bytes, not {wanted:,} ({seen / each:,g} x {each} "
                          f"instead of {wanted // each:,} x {each})",
                          _why_other_state(kind, seen, place))


def _why_other_state(kind: str, seen: int, place: Place) -> str:
    count, dp, each, first = num_parameters(place), place.dp, EACH[kind], DIVIDED_FROM[kind]
    whole = f"ZeRO-{place.zero} does not shard the {kind}: ZeRO-{first} is the first that does"
    faults = {  # where two are the same number, the later one counts
        ceil(each * count / dp): "round up the number of parameters, then multiply by their bytes",
        each * count // dp: "round up the number of parameters, then multiply by their bytes",
        each * (count // dp): "round up, or the last few parameters belong to no rank",
        each * count: f"ZeRO-{place.zero} shards the {kind} over {dp} ranks",
        each * ceil(count / dp): whole,
    }
    if kind == "optimizer state":
        faults |= {8 * n: "it takes 12 bytes: two moments and the float32 master weight, 4 each"
                   for n in (count, ceil(count / dp))}
    return faults.get(seen) or _why_other_count(seen / each, place)


def _why_other_count(seen: float, place: Place) -> str:
    """What a difference in the number of parameters means, where none is divided."""
    model, tp, blocks = place.model, place.tp, place.stages[place.stage]
    D, keys = model.width, model.num_kv_heads * model.head_width
    matrix, norms = model.vocab_size * D // tp, 2 * D * blocks
    one_copy = "tied and on the same stage, embedding and head are one matrix"
    two_copies = "embedding and head are on two stages: each stores its matrix, tied or not"
    tied = one_copy if len(place.stages) == 1 else two_copies
    if not place.is_first and not place.is_last:
        tied = "the difference is V x D: a middle stage has neither embedding nor head, tied or not"
    ends = "the difference is V x D: only the first stage has the embedding, only the last the head"
    difference = seen - num_parameters(place)
    faults = {
        matrix: tied if model.tied_embedding else ends,
        -matrix: tied if model.tied_embedding else ends,
        2 * matrix: ends, -2 * matrix: ends, 2 * matrix + D: ends, matrix + D: ends,
        matrix * (tp - 1): "tp shards embedding and head too, along the vocabulary",
        -D: "one norm is missing: the final one, on the last stage",
        D: "that is one norm too many: only the last stage has the final one",
        -norms: "the blocks' norms are missing, two in each",
        -norms / 2: "a block has two norms",
        -blocks * D * model.ffn_width // tp: "one of the three, gate, up and down, is missing",
        blocks * 2 * D * (D - keys) // tp: "key and value are narrower than the query: they "
                                           "have num_kv_heads heads",
        -blocks * D * keys // tp: "one matrix is missing: key and value are two",
        norms / tp - norms:
            "norms are replicated, not sharded: each tp rank has all of their weights",
        (norms + D * place.is_last) * (1 / tp - 1):
            "norms are replicated, not sharded: each tp rank has all of their weights",
    }
    whole = num_parameters(place._replace(tp=1))
    if seen == whole and tp > 1:
        return "tp shards the matrices: that is the whole stage, not one rank's part"
    mean = sum(place.stages) / len(place.stages)
    block = (num_parameters(place) - num_parameters(_one_block_less(place)))
    if mean != blocks and abs(difference - (mean - blocks) * block) < 1:
        return "stages differ in their number of blocks: this one has stages[stage]"
    if len(place.stages) > 1 and difference >= (sum(place.stages) - blocks) * block:
        return "a rank holds the blocks of its own stage, not those of the whole model"
    return faults.get(difference, "add up the stage's block matrices / tp, its norms, and the "
                                  "embedding or head if the stage has one")


def _one_block_less(place: Place) -> Place:
    fewer = list(place.stages)
    fewer[place.stage] -= 1
    return place._replace(stages=fewer)


# The fullest stage


class Pipeline(NamedTuple):
    """What `fullest_stage` is asked."""

    stages: list[int]
    states: list[int]
    num_micro_batches: int
    block_bytes: int
    head_bytes: int


def pipelines() -> list[Pipeline]:
    rows = [
        ([4, 4, 4, 3], [100, 90, 90, 110], 8, 10, 7), ([2, 2, 6], [10, 10, 30], 8, 10, 7),
        ([3, 3], [50, 50], 4, 10, 20), ([3, 3], [50, 50], 1, 10, 20),
        ([4, 4, 4, 3], [100, 90, 90, 110], 2, 10, 7), ([2, 5, 4], [60, 90, 70], 8, 10, 3),
        ([4, 4, 4, 3], [100, 90, 90, 110], 8, 10, 400),
        ([3, 4, 5, 2], [70, 80, 90, 85], 2, 11, 13), ([6], [80], 5, 10, 33),
        ([1, 1, 1], [10, 300, 20], 6, 1, 1), ([2, 2, 2, 2], [10, 10, 10, 10], 3, 50, 99),
    ]
    return [Pipeline(*row) for row in rows]


def held(pipeline: Pipeline, counts: list[int], head_on: Callable[[int], bool] | None = None
         ) -> list[int]:
    """Bytes of each stage that holds `counts` micro-batches; the head is on the last one."""
    last = len(counts) - 1
    head_on = head_on or (lambda stage: stage == last)
    return [state + count * (blocks * pipeline.block_bytes + head_on(stage) * pipeline.head_bytes)
            for stage, (blocks, state, count) in
            enumerate(zip(pipeline.stages, pipeline.states, counts, strict=True))]


def right_counts(pipeline: Pipeline) -> list[int]:
    schedule = one_forward_one_backward(len(pipeline.stages), pipeline.num_micro_batches)
    return peak_activations(schedule)


def _expect_fullest(answer, pipeline: Pipeline) -> None:
    fits = isinstance(answer, tuple) and len(answer) == 2 and all(type(n) is int for n in answer)
    expect(fits, seen=f"it returned {answer!r:.80}",
           likely="return two ints: a stage, and its bytes")
    stages = held(pipeline, right_counts(pipeline))
    most = max(stages)
    if answer[1] != most or stages[answer[0] % len(stages)] != most or answer[0] not in range(
            len(stages)):
        raise Mistake(f"stage {answer[0]} with {answer[1]} bytes; in fact the stages hold {stages}",
                      _why_other_stage(answer, pipeline))


def _why_other_stage(answer: tuple[int, int], pipeline: Pipeline) -> str:
    p, m, counts = len(pipeline.stages), pipeline.num_micro_batches, right_counts(pipeline)
    stages = held(pipeline, counts)
    mean = pipeline._replace(stages=[sum(pipeline.stages) / p] * p)
    faults = {
        "a stage cannot hold more than num_micro_batches micro-batches":
            held(pipeline, [p - stage for stage in range(p)]),
        "one more: besides one for each stage after it, a stage holds one for itself": held(
            pipeline, [min(m, p - 1 - stage) for stage in range(p)]),
        "that is GPipe: with 1F1B, stage i holds at most p - i micro-batches":
            held(pipeline, [m] * p),
        "count the stages after this one, not those before it: the first stage waits longest":
            held(pipeline, [min(m, stage + 1) for stage in range(p)]),
        "later stages hold fewer micro-batches: stage i at most p - i":
            held(pipeline, [min(m, p)] * p),
        "the last stage also holds head_bytes": held(pipeline, counts, lambda stage: False),
        "only the last stage holds head_bytes": held(pipeline, counts, lambda stage: True),
        "the state is missing: stage i always holds states[i]":
            held(pipeline._replace(states=[0] * p), counts),
        "stages differ in their number of blocks: stage i has stages[i]": held(mean, counts),
        "that is one micro-batch on each stage, but earlier stages hold several at a time":
            held(pipeline, [1] * p),
    }
    if answer == (stages.index(max(stages)) + 1, max(stages)):
        return "stages are counted from 0"
    for why, values in faults.items():
        if answer == (values.index(max(values)), max(values)):
            return why
    if answer[1] in stages:
        return "that is what the stage holds, but another stage holds more: compute all of them, " \
               "because blocks, state and head differ"
    return "a stage holds its state and, for each micro-batch it keeps, block_bytes per block; " \
           "the last stage adds head_bytes per micro-batch"
