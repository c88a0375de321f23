"""A dry run of a rank against the rank: the same training on 1 to 4 processes, under the meter."""

from dataclasses import replace

import pytest

from minitron.comm.agreement import SINGLE_RANK
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.corpus.stories import write_stories
from minitron.launch import run as run_ranks
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.plan.dryrun import dry_run, summed
from minitron.run import Run
from tests.tiers import collected, in_tiers

LLAMA = ModelConfig(
    "llama", 512, 32, num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=128
)
GPT = replace(LLAMA, family="gpt", num_kv_heads=4, tied_embedding=False)
FOUR = replace(LLAMA, num_layers=4)


def case(
    model=LLAMA, precision="fp32", recompute="none", sequences=4, size=1, **parallel
) -> Config:
    train = TrainConfig(
        global_batch_size=sequences,
        micro_batch_size=size,
        precision=precision,
        recompute=recompute,
        eval_sequences=8,
        device="cpu",
    )
    return Config(model, DataConfig(sequence_length=32), train, ParallelConfig(**parallel))


CASES = {  # by the number of ranks
    1: {"alone": case(sequences=3), "alone, masters": case(GPT, "bf16", sequences=3)},
    2: {
        "data parallel": case(),
        "ZeRO-1": case(GPT, "bf16-autocast", "full", zero=1),
        "ZeRO-2": case(precision="bf16-fp32-grads", zero=2),
        "ZeRO-2, once a step": case(zero=2, sync_every_micro_batch=False),
        "ZeRO-3": case(GPT, recompute="full", zero=3),
        "ZeRO-3 of bf16": case(precision="bf16", zero=3),
        "fp16": case(precision="fp16", recompute="selective"),
        "tensor": case(GPT, sequences=2, tp=2),
        "sequence": case(precision="bf16", recompute="selective", sequences=2, tp=2, sequence=True),
        "1F1B": case(precision="bf16-autocast", pp=2),
        "GPipe": case(pp=2, schedule="gpipe"),
        "interleaved": case(FOUR, recompute="full", pp=2, schedule="interleaved", chunks=2),
        "zero bubble": case(GPT, "bf16-fp32-grads", pp=2, schedule="zero-bubble"),
    },
    3: {"uneven": case(sequences=10, size=2, zero=3), "uneven buckets": case(sequences=10, zero=1)},
    4: {
        "zero bubble, tensor": case(
            precision="fp8", pp=2, schedule="zero-bubble", tp=2, sequence=True
        ),
        "pipelines": case(GPT, pp=2, zero=1, sequences=10, size=2),
        "tensor, in stages": case(GPT, "bf16-fp32-grads", "full", tp=2, sequence=True, pp=2),
        "dp and tp": case(precision="bf16", tp=2, zero=2),
    },
}
NUM_RANKS = {name: num_ranks for num_ranks, cases in CASES.items() for name in cases}
KEPT = {"alone, masters", "ZeRO-3", "zero bubble, tensor"}


def third_steps(group, configs: dict[str, Config], folder) -> dict:
    """What this rank holds and sends in the third step of each training."""
    found = {}
    for name, config in configs.items():
        training = Run(config, folder, group)
        training.train_step()
        training.train_step()
        with Meter(training.model, training.optimizer) as meter, Ledger() as ledger:
            training.train_step()
        found[name] = meter.peak, summed(ledger.calls)
    return found


@pytest.fixture(scope="module")
def real(request, tmp_path_factory) -> dict:
    """By case, what each rank has measured."""
    found, folder = {}, tmp_path_factory.mktemp("run")
    stories = folder / "stories"
    write_stories(stories, num_tokens=30_000)
    asked = collected(request, "name")
    for num_ranks, cases in CASES.items():
        there = {
            name: replace(config, data=replace(config.data, path=stories))
            for name, config in cases.items()
            if name in asked
        }
        args = there, folder
        ranks = (
            [third_steps(SINGLE_RANK, *args)]
            if num_ranks == 1
            else run_ranks(third_steps, num_ranks, *args, timeout=300)
        )
        for name in there:
            found[name] = [rank[name] for rank in ranks]
    return found


@pytest.mark.parametrize("name", in_tiers(KEPT, NUM_RANKS))
def test_it_holds_and_sends_what_the_rank_does(real, name):
    num_ranks = NUM_RANKS[name]
    config = CASES[num_ranks][name]
    for rank in sorted({0, num_ranks - 1}):  # the first of all axes, and the last
        peak, traffic = real[name][rank]
        dry = dry_run(config, num_ranks, rank, kernels="cpu")
        assert dry.traffic == traffic
        assert dry.num_run == dry.num_micro_batches  # nothing of so short a step is left out
        if num_ranks == 1:
            assert dry.peak.bytes == peak.bytes
        # else a message's tensor may stay until a thread of gloo lets it go
        assert dry.peak.total == pytest.approx(peak.total, rel=0.02)
        assert dry.peak.bytes["optimizer state"] == peak.bytes["optimizer state"]


def test_the_cases_are_not_alike(real):
    """What one holds is not within 2 % of most others': the agreement is no accident."""
    peaks = sorted({ranks[0][0].total for ranks in real.values()})
    assert len(peaks) > len(real) / 2 and peaks[-1] > 3 * peaks[0]
