"""Chapter 11's measurements: layouts, steps with a change, ledgers by axis, and their formulas."""

import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.comm.mesh import make_mesh
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.corpus.story_grammar import VOCABULARY
from minitron.launch import RankError
from minitron.measure.ledger import Call, Ledger
from minitron.measure.metrics import read_metrics
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.parts import boxes_of
from minitron.parallelize import build, lay_out
from minitron.plan.estimate import Estimate
from minitron.plan.job import Decision, Job
from minitron.plan.memory import memory_of
from minitron.proof.difference import Moment, first_difference
from minitron.proof.oracle import as_arrays, assert_same_training, small_model
from minitron.step import train_step
from teaching.figures_grid import Crossing, Piece
from teaching.figures_ranks import Block

CPU = torch.device("cpu")
S, B, CLIP = 32, 8, 0.3
SHAPE = ModelConfig("llama", -(-len(VOCABULARY) // 8) * 8, S, 4, 32, 4, 1, 64)
"""The story model; up to 8 ranks divide its vocabulary, and it has one key-value head."""
UNTIED = replace(SHAPE, tied_embedding=False)
CUBE = ParallelConfig(tp=2, pp=2, zero=1, sequence=True)
"""On 8 ranks: 2 stages x 2 copies x 2 tensor-parallel ranks."""
AXES = ("pp", "dp", "tp")
CROSSINGS = (
    Crossing("output\nof a layer", ("tp",), "in every layer"),
    Crossing("gradient\nof a matrix", ("dp",), "once a step"),
    Crossing("gradient of a\nnorm's weight", ("tp", "dp"), "once a step"),
    Crossing("loss", ("dp",), "once a step", copied=("pp",)),
    Crossing("norm of\nthe gradient", ("tp", "pp"), "once a step"),
)
"""What is summed in a step with sequence parallelism and without ZeRO."""
COMPUTE = ("matmul", "attention", "elementwise", "host", "optimizer")

# Layouts of a large job


def all_layouts(job: Job) -> Iterator[Decision]:
    """Yield every setting of the switches of chapters 3 to 9, in powers of two."""
    powers = [2**k for k in range(7)]
    for tp, pp, size in product(powers, powers, (1, 2, 4)):
        dp = job.num_gpus // (tp * pp)
        if job.model.num_heads % tp or not 1 <= dp * size <= job.global_batch_size:
            continue
        stages_of_zero = range(1 if dp == 1 else 4 if pp == 1 else 2)
        for zero, recompute in product(stages_of_zero, ("none", "selective", "full")):
            axes = ParallelConfig(dp=dp, tp=tp, sequence=tp > 1, pp=pp, zero=zero)
            yield Decision(axes, recompute, size)


def fits(job: Job, layout: Decision) -> bool:
    return sum(memory_of(job, layout).values()) <= job.limit


def time_of(step: Estimate) -> str:
    """Return how long a step computes, and how long it waits for a message or another stage."""
    computing = sum(step.parts[part] for part in COMPUTE)
    waiting = step.seconds - computing
    return f"{step.seconds:.1f} s per step: {computing:.1f} computing, {waiting:.1f} waiting"


def report(error: RankError) -> None:
    """Print what the launcher says, without the lines of our code."""
    for line in str(error).splitlines():
        print(line.split(" or an earlier call")[0].split(", cell")[0])


# Steps with one thing changed


def trained(
    group: ProcessGroup, layout: ParallelConfig, change: Callable, batches: Sequence[Tensor]
) -> tuple[tuple, tuple, Moment, Tensor]:
    """Train the story model in float64; return what a rank sees.

    These are its losses and gradient norms, the first step's clipped gradients of the full model,
    and the first norm's weight at the end. `change(parallel, group)` may break something first.
    """
    torch.set_default_dtype(torch.float64)
    config = Config(SHAPE, DataConfig(sequence_length=S), TrainConfig(), layout)
    model, parallel = build(config, lay_out(layout, group.size(), CPU), CPU)
    change(parallel, group)
    optimizer, history, record = parallel.shard(torch.optim.AdamW(model.parameters())), [], None
    for batch in batches:
        pairs = micro_batches(batch, *parallel.data_part)
        history.append(map(float, train_step(model, optimizer, pairs, 3e-3, CLIP, parallel)))
        record = record or Moment(0, "gradient", as_arrays(parallel.full_gradients()))
    weight = next(weight for name, weight in model.named_parameters() if "norm" in name)
    losses, norms = zip(*history, strict=True)
    return losses, norms, record, weight.detach()


def micro_batches(batch: Tensor, index: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's rows of a batch as inputs and targets, one sequence at a time."""
    return [(row[:, :-1], row[:, 1:]) for row in batch[index::count].split(1)]


def unchanged(parallel, group: ProcessGroup) -> None:
    """Break nothing."""


def samples_by_world_rank(parallel, group: ProcessGroup) -> None:
    """Let a rank read the samples of its number in the world, as if every rank were a copy."""
    wrong = {"data_part": (group.rank(), group.size())}
    parallel.__class__ = type("ByWorldRank", (type(parallel),), wrong)


def clip_over(*axes: str) -> Callable:
    """Return a change: clip by the squares of everything that the ranks along `axes` hold."""

    def clip(parallel, parameters, max_norm):
        groups = {
            "tp": parallel.layers["tensor"].group,
            "pp": parallel.pipeline.group,
            "dp": parallel.data.group,
        }
        return clip_pieces(parameters, max_norm, torch.zeros(()), [groups[axis] for axis in axes])

    def change(parallel, group):
        parallel.clip = partial(clip, parallel)

    return change


def difference(expected: Moment, by_rank: Sequence[Moment]) -> str:
    """Return what the oracle says of the first gradients, in one line or two."""
    found = first_difference([expected], [[moment] for moment in by_rank]) or "the same gradients"
    return textwrap.fill(found.splitlines()[0], 72, subsequent_indent="      ")


def two_steps(
    group: ProcessGroup, apply: Callable, axes: dict[str, int], batch: Tensor
) -> list[float]:
    """Return the losses of two steps on the same samples, with `apply(model, mesh)`."""
    model = Transformer(SHAPE)
    initialize(model, seed=0)
    parallel = apply(model, make_mesh("cpu", **axes))
    optimizer = parallel.shard(torch.optim.AdamW(model.parameters()))
    pairs = [(row[:, :-1], row[:, 1:]) for row in batch[:4].split(2)]
    return [train_step(model, optimizer, pairs, 1e-2, 1.0, parallel)[0].item() for _ in range(2)]


def oracle(apply: Callable[[nn.Module, ProcessGroup], object], family: str) -> str:
    """Return the oracle's verdict on 8 ranks: "the same training", or what is wrong."""
    sizes = dict(
        vocab_size=36,
        max_sequence_length=12,
        width=24,
        num_heads=6,
        num_kv_heads=6,
        ffn_width=36,
        num_layers=2,
    )
    try:
        assert_same_training(
            apply,
            8,
            partial(small_model, family, **sizes),
            2,
            (8, 6),
            timeout=90,
            vocabulary=36,
            sequence=12,
        )
        return "the same training"
    except AssertionError as error:
        return str(error).splitlines()[0]


# The ledger of a step on all three axes


def place_of(rank: int) -> dict[str, int]:
    """Return a rank's place along each axis of 2 x 2 x 2."""
    return {"pp": rank // 4, "dp": rank // 2 % 2, "tp": rank % 2}


def ledger_of_a_step(group: ProcessGroup, batch: Tensor) -> tuple[list[Call], int]:
    """Return a rank's calls in one step of CUBE, and how many parameters it holds."""
    config = Config(UNTIED, DataConfig(sequence_length=S), TrainConfig(), CUBE)
    model, parallel = build(config, lay_out(CUBE, 8, CPU), CPU)
    optimizer = parallel.shard(torch.optim.AdamW(model.parameters()))
    pairs = micro_batches(batch, *parallel.data_part)
    with Ledger() as ledger:
        train_step(model, optimizer, pairs, 1e-3, 1.0, parallel)
    return ledger.calls, sum(parameter.numel() for parameter in model.parameters())


def axis_lanes(calls: Sequence[Sequence[Call]], ranks: Sequence[int]) -> dict[str, list[Block]]:
    """Return a lane for each of `ranks` and axes: when its calls begin and end, in ms."""
    first = min(call.started for of_rank in calls for call in of_rank)
    lanes = {}
    for rank, axis in product(ranks, reversed(AXES)):
        own = [call for call in calls[rank] if call.axis == axis and call.finished is not None]
        lanes[f"rank {rank}, {axis}"] = [
            Block(axis, 1e3 * (call.started - first), 1e3 * (call.finished - first), " ")
            for call in own
        ]
    return lanes


def is_large(call: Call) -> bool:
    """Return whether a call carries activations, gradients or weights."""
    in_a_pass = call.phase[0] in "FB"  # such as "F2 stage 0"
    return {"tp": in_a_pass, "pp": call.op == "send", "dp": call.op != "all_reduce"}[call.axis]


def bytes_by_axis(
    calls: Sequence[Sequence[Call]], held: Sequence[int]
) -> tuple[dict[str, list[int]], dict[str, list[int]], float]:
    """Return the large calls' bytes and the formulas', by axis and stage; the others' share.

    `held` are the parameters on each rank.
    """
    measured, predicted = {}, {}
    for axis, stage in product(reversed(AXES), range(2)):
        ranks = [rank for rank in range(8) if place_of(rank)["pp"] == stage]
        measured[f"{axis}, stage {stage}"] = [
            sum(call.sent for call in calls[rank] if call.axis == axis and is_large(call))
            for rank in ranks
        ]
        predicted[f"{axis}, stage {stage}"] = [formula(axis, rank, held[rank]) for rank in ranks]
    total = sum(call.sent for of_rank in calls for call in of_rank)
    return measured, predicted, 1 - sum(map(sum, measured.values())) / total


def formula(axis: str, rank: int, num_parameters: int) -> int:
    """Return the bytes that a rank sends along an axis in a step of CUBE."""
    at = place_of(rank)
    if axis == "tp":
        return _activation_bytes(at["pp"], at["tp"])
    if axis == "pp":
        return cost.pipeline_volume(1, S // 2, UNTIED.width, 4, 2, B // 2, at["pp"]).sent
    return cost.zero_volume(num_parameters, 4, 2, at["dp"], stage=1).sent


def _activation_bytes(stage: int, rank: int) -> int:
    """Return the bytes along tp: two layers, and embedding or head, for each micro-batch."""
    block = cost.tensor_parallel_volume(1, S, UNTIED.width, 4, rank, cost.Layout(2, True)).sent
    values = partial(cost.collective_volume, element_size=4, size=2, rank=rank)
    embedding = ("all_gather", "reduce_scatter")
    head = ("all_gather", "all_gather", "reduce_scatter")  # the input is gathered again
    end = sum(values(op, S * UNTIED.width).sent for op in (head if stage else embedding))
    if stage:
        end += values("all_reduce", S).sent + values("all_reduce", 2 * S).sent  # the loss
    return B // 2 * (UNTIED.num_layers // 2 * block + end)


# Checkpoints


def job(
    train: Callable,
    folder: Path,
    group: ProcessGroup,
    run_dir: Path,
    layout: ParallelConfig,
    **more,
) -> None:
    """Train the story model on `folder` in float64: resume from the newest checkpoint, or start.

    `train` is the package's; `more` are settings of the training, such as steps.
    """
    torch.set_default_dtype(torch.float64)
    rate = dict(learning_rate=3e-3, min_learning_rate=3e-3, warmup_steps=2)  # then constant
    settings = TrainConfig(
        global_batch_size=B,
        micro_batch_size=1,
        eval_every=0,
        eval_sequences=8,
        device="cpu",
        **rate,
        **more,
    )
    config = Config(SHAPE, DataConfig(folder, S), settings, layout)
    with redirect_stderr(io.StringIO()):
        train(config, run_dir, group=group, restart=True)


def losses_in(run_dir: Path) -> list[float]:
    """Return the loss of each step of a run."""
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]


def written_by_ranges(shape: tuple[int, int], ranges: Sequence[range]) -> list[Piece]:
    """Return the boxes of a matrix that ranks write whose parts are `ranges` of its elements."""
    return [Piece(rank, *box) for rank, own in enumerate(ranges) for box in boxes_of(shape, own)]


def read_by(written: Sequence[Piece], rows: range, columns: range) -> list[Piece]:
    """Return what a rank that needs these rows and columns reads, from whose file."""
    found = []
    for piece in written:
        (row, column), (height, width) = piece.offset, piece.sizes
        down = range(max(row, rows.start), min(row + height, rows.stop))
        right = range(max(column, columns.start), min(column + width, columns.stop))
        if down and right:
            found.append(Piece(piece.rank, (down.start, right.start), (len(down), len(right))))
    return found
