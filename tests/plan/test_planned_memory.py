"""The formulas of memory against the real step's tensors, seen by dry runs; and by hand."""

from dataclasses import replace

import pytest

from minitron import cost
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.cost.compute import published_llama
from minitron.plan.dryrun import dry_run
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.memory import holdings, memory_of
from minitron.plan.systems import MINITRON, System, blocks_per_rank
from tests.tiers import in_tiers

H100 = DEVICES["H100-SXM-80GB"]
MODEL = published_llama(32, 4096, 32, 32, 14336, 131072, 4096)


# Against dry runs of all stages: shapes are real, values are not there

LLAMA = ModelConfig("llama", 16000, 1024, 4, 1024, 8, 4, 2816, tied_embedding=False)
GPT = ModelConfig("gpt", 16000, 1024, 4, 1024, 8, 8, 4096)
SHORT = {"vocab_size": 512}  # activations are most, not the loss
CHUNKS = {"schedule": "interleaved", "chunks": 2}
ONCE = {"sync_every_micro_batch": False}
KEPT = {"reshard_each_pass": False}


def case(model=LLAMA, precision="bf16", recompute="none", size=2, length=1024, m=0, **parallel):
    """A job and a layout on as many GPUs as it has ranks; `m` micro-batches a step, by default
    three, or enough to fill a pipeline."""
    m = m or (6 if "pp" in parallel else 3)
    layout = ParallelConfig(**{"dp": 1} | parallel)
    num_gpus = layout.dp * layout.tp * layout.pp
    job = Job(model, num_gpus, H100, length, m * size * layout.dp, precision=precision)
    return job, Decision(layout, recompute, size)


CASES = {
    "alone": case(),
    "alone, float32": case(GPT, "fp32"),
    "data": case(GPT, dp=4),
    "selective, ZeRO-1": case(recompute="selective", dp=4, zero=1),
    "fp8, ZeRO-1": case(GPT, "fp8", dp=4, zero=1),
    "fp32 gradients, ZeRO-2": case(GPT, "bf16-fp32-grads", dp=4, zero=2),
    "full, ZeRO-2": case(recompute="full", dp=4, zero=2),
    "ZeRO-2, reduced once": case(GPT, dp=4, zero=2, sync_every_micro_batch=False),
    "ZeRO-3, reduced once": case(dp=4, zero=3, sync_every_micro_batch=False),
    "ZeRO-2 in a pipeline": case(size=1, dp=2, pp=2, zero=2, sync_every_micro_batch=False),
    "ZeRO-2 in a pipeline, reduced each time": case(size=1, dp=2, pp=2, zero=2),
    "ZeRO-3, kept": case(dp=4, zero=3, **KEPT),
    "ZeRO-3, kept, reduced once": case(GPT, dp=4, zero=3, **KEPT, **ONCE),
    "ZeRO-3 in a pipeline": case(size=1, dp=2, pp=4, zero=3),
    "ZeRO-3 in a pipeline, kept": case(size=1, dp=2, pp=4, zero=3, **KEPT),
    "ZeRO-3, interleaved, kept": case(size=1, dp=2, pp=2, zero=3, **CHUNKS, **KEPT),
    "ZeRO-3, zero bubble": case(size=1, dp=2, pp=2, zero=3, schedule="zero-bubble"),
    "ZeRO-3, GPipe, full": case(
        GPT, recompute="full", size=1, dp=2, pp=2, zero=3, schedule="gpipe"
    ),
    "hybrid, ZeRO-2": case(dp=4, zero=2, replicas=2),
    "hybrid, ZeRO-3": case(dp=4, zero=3, replicas=2),
    "hybrid, ZeRO-3, all of it each time": case(
        GPT, dp=4, zero=3, replicas=2, sync_replicas_every_micro_batch=True
    ),
    "hybrid, ZeRO-3 in a pipeline, kept": case(size=1, dp=4, pp=2, zero=3, replicas=2, **KEPT),
    "ZeRO-3": case(dp=4, zero=3),
    "ZeRO-3, fp16": case(GPT, "fp16", dp=4, zero=3),
    "ZeRO-3, full": case(replace(LLAMA, **SHORT), recompute="full", dp=4, zero=3),
    "ZeRO-3, few tokens": case(GPT, size=1, length=64, m=2, dp=4, zero=3),
    "autocast": case(precision="bf16-autocast", size=4, m=2, dp=4),
    "autocast, selective": case(GPT, "bf16-autocast", "selective", size=4, m=2, dp=4, zero=1),
    "autocast, full": case(GPT, "bf16-autocast", "full", dp=4, zero=2),
    "autocast, full, no loss": case(replace(LLAMA, **SHORT), "bf16-autocast", "full", m=2, dp=4),
    "autocast, tensor": case(precision="bf16-autocast", dp=2, tp=2, sequence=True),
    "tensor": case(GPT, dp=2, tp=2),
    "sequence": case(dp=2, tp=2, sequence=True),
    "sequence, ZeRO-1, full": case(GPT, recompute="full", dp=2, tp=2, sequence=True, zero=1),
    "1F1B": case(replace(LLAMA, **SHORT), size=1, pp=4),
    "1F1B, full": case(replace(GPT, **SHORT), recompute="full", size=1, dp=2, pp=4, zero=1),
    "1F1B, selective": case(GPT, recompute="selective", size=1, pp=2, dp=2),
    "1F1B, tensor": case(size=1, tp=2, sequence=True, pp=2),
    "1F1B, autocast": case(replace(LLAMA, **SHORT), "bf16-autocast", size=1, pp=4),
    "interleaved": case(replace(LLAMA, **SHORT), size=1, dp=2, pp=2, **CHUNKS),
    "interleaved, full": case(GPT, recompute="full", size=1, dp=2, pp=2, zero=1, **CHUNKS),
    "once": case(dp=4, m=1),
    "once, ZeRO-1": case(GPT, dp=4, m=1, zero=1),
    "once, buckets that stay": case(replace(LLAMA, **SHORT), "bf16-autocast", dp=4, m=1),
    "1F1B, as many as stages": case(replace(LLAMA, **SHORT), size=1, m=4, pp=4),
    "GPipe": case(GPT, size=1, pp=2, schedule="gpipe"),
    "zero bubble": case(size=1, pp=2, schedule="zero-bubble"),
    "GPipe, chunks": case(GPT, size=1, pp=2, schedule="gpipe", chunks=2),
    "zero bubble, chunks": case(
        replace(LLAMA, **SHORT), size=1, pp=2, schedule="zero-bubble", chunks=2
    ),
    "zero bubble, chunks, full": case(
        GPT, recompute="full", size=1, pp=2, schedule="zero-bubble", chunks=2
    ),
    "zero bubble, full": case(
        replace(LLAMA, **SHORT), recompute="full", size=1, pp=4, schedule="zero-bubble"
    ),
    "zero bubble, selective, a loss": case(
        GPT, recompute="selective", size=1, pp=4, schedule="zero-bubble"
    ),
    "zero bubble, sequence": case(size=1, tp=2, sequence=True, pp=2, schedule="zero-bubble"),
    "few tokens": case(size=1, length=64, m=2, dp=4),  # the optimizer holds most
    "few tokens, ZeRO-2": case(size=1, length=64, m=2, dp=4, zero=2),
}


def fullest(job: Job, decision: Decision) -> int:
    """Bytes at the peak of the stage that holds most."""
    train = TrainConfig(
        global_batch_size=job.global_batch_size,
        precision=job.precision,
        micro_batch_size=decision.micro_batch_size,
        recompute=decision.recompute,
    )
    data = DataConfig(sequence_length=job.sequence_length)
    config = Config(job.model, data, train, decision.parallel)
    pp = decision.parallel.pp
    return max(
        dry_run(config, job.num_gpus, stage * job.num_gpus // pp).peak.total for stage in range(pp)
    )


KEPT = {"ZeRO-2 in a pipeline"}


@pytest.mark.parametrize("name", in_tiers(KEPT, CASES))
def test_it_is_what_the_fullest_stage_holds(name):
    job, decision = CASES[name]
    assert sum(memory_of(job, decision).values()) == pytest.approx(fullest(job, decision), rel=0.05)


def test_large_activations_are_counted_to_a_hundredth():
    """Of Llama, nothing recomputed, where they are most of what is held."""
    job, decision = case(replace(LLAMA, **SHORT), size=16, m=2)
    memory = memory_of(job, decision)
    assert memory["activation"] > 0.6 * sum(memory.values())
    assert sum(memory.values()) == pytest.approx(fullest(job, decision), rel=0.01)


# By hand


def held(parallel, recompute="none", batch=64, model=MODEL, precision="bf16"):
    num_gpus = parallel.dp * parallel.tp * parallel.pp
    job = Job(model, num_gpus, H100, 4096, batch, precision=precision)
    return memory_of(job, Decision(parallel, recompute))


def test_one_gpu_holds_the_state_of_the_recipe_and_all_activations():
    kinds = held(ParallelConfig(dp=1))
    state = sum(kinds[name] for name in ("parameter", "gradient", "optimizer state"))
    assert state == cost.model_state_bytes(MODEL, cost.RECIPES["bf16"])
    assert kinds["activation"] == cost.activation_bytes(MODEL, 1, 4096)
    assert kinds["temporary"] == 2 * 4 * 4096 * MODEL.vocab_size


def test_stages_of_zero_divide_what_they_say():
    whole, *divided = (held(ParallelConfig(dp=64, zero=zero)) for zero in (0, 1, 2))
    assert divided[0]["optimizer state"] == pytest.approx(whole["optimizer state"] / 64)
    assert divided[0]["gradient"] == whole["gradient"]
    assert divided[1]["gradient"] == pytest.approx(whole["gradient"] / 64)


def test_state_of_a_model_by_stage():
    """On 8 GPUs, bytes for each parameter: 16; 4 + 12/8; 2 + 14/8; 16/8."""
    num_parameters = cost.num_parameters(MODEL)
    for zero, each in ((0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        kinds = held(ParallelConfig(dp=8, zero=zero))
        state = kinds["parameter"] + kinds["gradient"] + kinds["optimizer state"]
        assert state == pytest.approx(each * num_parameters, rel=1e-6)
    assert kinds["parameter"] == 0, "in stage 3 the float32 masters are all that is kept"


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    blocks = MODEL.num_layers * cost.activation_bytes_per_layer(
        MODEL, 1, 4096, layout=cost.Layout(8, True)
    )
    model = replace(MODEL, vocab_size=256)
    kinds = held(ParallelConfig(dp=1, tp=8, sequence=True, pp=8), model=model)
    assert kinds["activation"] == pytest.approx(blocks, rel=0.01)


def test_an_interleaved_schedule_holds_more():
    """1 + (p - 1) / (p v) times 1F1B's activations (Korthikanti et al. 2022, section 4.2.3)."""
    model = published_llama(32, 4096, 32, 32, 14336, 128, 4096)
    plain = held(ParallelConfig(dp=1, pp=4), model=model)["activation"]
    for chunks in (2, 4):
        more = held(ParallelConfig(dp=1, pp=4, schedule="interleaved", chunks=chunks), model=model)
        factor = cost.interleaved_activation_factor(4, chunks)
        assert more["activation"] == pytest.approx(factor * plain)
    assert held(ParallelConfig(dp=1, pp=4, schedule="gpipe"), model=model)[
        "activation"
    ] == pytest.approx(64 / 4 * plain, rel=0.02)


def test_first_rank_and_last_rank_hold_an_end_each():
    """Two matrices of the vocabulary, on different ranks."""
    one, two = held(ParallelConfig(dp=1)), held(ParallelConfig(dp=1, pp=2))
    vocabulary = 2 * MODEL.vocab_size * MODEL.width
    blocks = one["parameter"] - 2 * vocabulary
    assert two["parameter"] == pytest.approx(blocks / 2 + vocabulary, rel=1e-3)


@pytest.mark.parametrize(("layers", "pp"), [(32, 8), (105, 56), (33, 4), (9, 8)])
def test_no_rank_holds_more_than_what_is_reported(layers, pp):
    model = published_llama(layers, 4096, 32, 32, 14336, 131072, 4096)
    parallel = ParallelConfig(dp=1, pp=pp)
    job, decision = Job(model, pp, H100, 4096, 64), Decision(parallel)
    counts = blocks_per_rank(model, parallel, MINITRON)
    largest = max(
        sum(holdings(job, decision, MINITRON, rank, counts).values()) for rank in range(pp)
    )
    assert sum(memory_of(job, decision).values()) == largest


def test_recomputation_holds_less():
    none, full = (sum(held(ParallelConfig(dp=1), kind).values()) for kind in ("none", "full"))
    assert full < none


def test_what_is_replayed_is_there_for_a_moment():
    """Beside its gradients, and a message from the next stage and one to it."""
    decision = Decision(ParallelConfig(dp=8, pp=8, zero=1), "full")
    counts = blocks_per_rank(MODEL, decision.parallel, MINITRON)
    first = holdings(Job(MODEL, 64, H100, 4096, 512), decision, MINITRON, 0, counts)
    block, stream = cost.activation_bytes_per_layer(MODEL, 1, 4096), 2 * 4096 * 4096
    down = 2 * (4096 * 14336 + 4096 * 14336)  # the gradients of its input and of its weight
    assert first["temporary"] == block + down + stream + 2 * stream


def test_autocast_keeps_float32_residuals_and_16_bit_copies():
    none, autocast = (
        held(ParallelConfig(dp=1), precision=name)["activation"]
        for name in ("bf16", "bf16-autocast")
    )
    weights = 2 * (32 * cost.num_block_parameters(MODEL) + MODEL.vocab_size * MODEL.width)
    residuals = (2 * 32 + 1) * 2  # two norms a block and the last one, two bytes more
    inputs = 32 * (5 - 2) * 2  # of query, key, value; of gate and up: five in place of two
    assert autocast - none == weights + (residuals + inputs) * 4096 * MODEL.width


def test_whole_units_of_zero_3_are_there_for_a_moment():
    """The root when the loss is computed; with hardly a loss, two blocks and one's gradients."""
    whole = held(ParallelConfig(dp=64, zero=3))["temporary"]
    ends = 2 * MODEL.vocab_size * MODEL.width + MODEL.width
    assert whole == 2 * 4 * 4096 * MODEL.vocab_size + 2 * ends

    model = replace(MODEL, vocab_size=256)
    block = cost.num_block_parameters(model)
    whole = held(ParallelConfig(dp=64, zero=3), "full", model=model)["temporary"]
    assert 2 * 2 * block < whole - cost.activation_bytes_per_layer(model, 1, 4096) < 4 * 2 * block


def test_copies_of_other_systems_are_those_of_cut_layers():
    def held_by(system, tp):
        job = Job(MODEL, tp, H100, 4096, 8)
        decision = Decision(ParallelConfig(dp=1, tp=tp, sequence=tp > 1))
        return memory_of(job, decision, system)["activation"]

    assert held_by(System(copies=6), 1) == held_by(MINITRON, 1)
    more = held_by(System(copies=6), 2) - held_by(MINITRON, 2)
    assert more == 32 * 6 * 2 * 4096 * MODEL.width / 2
