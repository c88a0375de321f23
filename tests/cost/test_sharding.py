"""ZeRO's formulas against the paper's printed table, and against each other."""

import csv
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from itertools import product
from pathlib import Path

import pytest

from minitron.cost import RECIPES, ring_all_reduce_volume
from minitron.cost.sharding import (
    FULLY_SHARDED,
    STAGES,
    hybrid_volume,
    step_collectives,
    step_holdings,
    zero_bytes,
    zero_holdings,
    zero_volume,
)

with open(Path(__file__).parent / "zero2019_table1.csv") as file:
    TABLE_1 = list(csv.DictReader(line for line in file if not line.startswith("#")))

SIZES = {"7.5B": 7_500_000_000, "128B": 128 * 10**9, "1T": 10**12}
# How the paper prints: its first column is rounded, the other two are cut off.
ROUNDING = {"7.5B": ROUND_HALF_UP, "128B": ROUND_DOWN, "1T": ROUND_DOWN}


def test_the_table_is_whole():
    cells = {(row["model"], row["num_ranks"], row["stage"]) for row in TABLE_1}
    assert len(TABLE_1) == len(cells) == 54


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: "-".join(row.values()))
def test_every_cell_of_table_1(row):
    num_bytes = zero_bytes(SIZES[row["model"]], int(row["num_ranks"]), int(row["stage"]))
    printed = Decimal(row["gigabytes"])
    assert (Decimal(num_bytes) / 10**9).quantize(printed, ROUNDING[row["model"]]) == printed


@pytest.mark.parametrize(
    ("recipe", "by_stage"),
    [
        ("bf16", [(16, 0), (4, 12), (2, 14), (0, 16)]),
        ("fp32", [(16, 0), (8, 8), (4, 12), (0, 16)]),
        ("bf16, fp32 gradient", [(18, 0), (6, 12), (2, 16), (0, 18)]),
    ],
)
def test_whole_and_divided_bytes_per_parameter(recipe, by_stage):
    for stage, (whole, divided) in zip(STAGES, by_stage, strict=True):
        for num_ranks in (1, 2, 8):
            expected = 1000 * whole + 1000 * divided // num_ranks
            assert zero_bytes(1000, num_ranks, stage, RECIPES[recipe]) == expected


def test_holdings_round_up_to_parameters():
    assert zero_holdings(10, 4, 2) == {
        "parameter": 20,
        "gradient": 2 * 3,
        "optimizer state": 12 * 3,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_stages_1_and_2_send_what_an_all_reduce_sends_and_stage_3_half_more(size):
    num_elements = 120 * size
    for rank in range(size):
        one_way = 4 * num_elements * (size - 1) // size
        for stage in (0, 1, 2):
            volume = zero_volume(num_elements, 4, size, rank, stage)
            assert volume == ring_all_reduce_volume(num_elements, 4, size, rank)
            assert volume == (2 * one_way, 2 * one_way)
        assert zero_volume(num_elements, 4, size, rank, 3) == (3 * one_way, 3 * one_way)
        # four micro-batches, each reduced
        assert zero_volume(num_elements, 4, size, rank, 2, 4) == (5 * one_way, 5 * one_way)
        assert zero_volume(num_elements, 4, size, rank, 3, 4) == (12 * one_way, 12 * one_way)


# A step of several micro-batches, by hand: 12 parameters, 16-bit to compute, float32 shards

BF16 = RECIPES["bf16, fp32 gradient"]  # 2 and 4 bytes; master and moments 12


@pytest.mark.parametrize(
    ("reshards", "accumulation", "parameter", "gradient"),
    [
        (True, "sharded", 0, 4 * 3),
        (True, "reduced", 0, 4 * 3),
        (True, "unsharded", 0, 4 * 12),
        (False, "sharded", 2 * 12, 4 * 3),
        (False, "unsharded", 2 * 12, 4 * 12),
    ],
)
def test_what_stage_3_holds_between_micro_batches(reshards, accumulation, parameter, gradient):
    """On 4 shards of 3 parameters, in a pipeline or not, and in however many replicas."""
    held = step_holdings(12, 4, 3, FULLY_SHARDED, BF16, reshards, accumulation)
    assert held == {"parameter": parameter, "gradient": gradient, "optimizer state": 12 * 3}


def test_what_the_other_stages_hold_between_micro_batches():
    """Parameters stay as they are; gradients are sharded in stage 2, unless they add up whole."""
    for stage, accumulation, gradient, state in (
        (0, "sharded", 4 * 12, 12 * 12),
        (1, "sharded", 4 * 12, 12 * 3),
        (2, "sharded", 4 * 3, 12 * 3),
        (2, "unsharded", 4 * 12, 12 * 3),
    ):
        for reshards in (True, False):
            held = step_holdings(12, 4, stage, BF16, BF16, reshards, accumulation)
            assert held == {"parameter": 24, "gradient": gradient, "optimizer state": state}


def test_stage_2_with_unsharded_sums_holds_what_stage_1_holds():
    assert step_holdings(10, 4, 2, BF16, BF16, accumulation="unsharded") == zero_holdings(
        10, 4, 1, BF16
    )


@pytest.mark.parametrize(
    ("stage", "reshards", "accumulation", "expected"),
    [
        (0, True, "sharded", (1, 1, 1)),
        (1, True, "reduced", (1, 1, 1)),
        (2, True, "unsharded", (1, 1, 1)),
        (2, True, "sharded", (1, 5, 1)),
        (2, True, "reduced", (1, 5, 5)),
        (3, True, "sharded", (10, 5, 1)),
        (3, True, "unsharded", (10, 1, 1)),
        (3, False, "sharded", (1, 5, 1)),
        (3, False, "unsharded", (1, 1, 1)),
        (3, True, "reduced", (10, 5, 5)),
    ],
)
def test_how_often_a_step_of_5_micro_batches_sends(stage, reshards, accumulation, expected):
    assert step_collectives(stage, 5, reshards, accumulation) == expected


def test_bytes_of_hybrid_sharding_by_hand():
    """24 values on 2 replicas of 4 shards; 16-bit parameters, float32 gradients, 3 micro-batches.

    Over the shards a gather sends 3/4 of 24 x 2 = 36 bytes, a reduce-scatter 3/4 of 24 x 4 = 72.
    Over the replicas an all-reduce of 6 values sends 2 x 1/2 x 6 x 4 = 24.
    """
    for stage, accumulation, over_shards, over_replicas in (
        (2, "reduced", 36 + 3 * 72, 3 * 24),
        (2, "sharded", 36 + 3 * 72, 24),
        (2, "unsharded", 36 + 72, 24),
        (3, "reduced", 6 * 36 + 3 * 72, 3 * 24),
        (3, "sharded", 6 * 36 + 3 * 72, 24),
        (3, "unsharded", 6 * 36 + 72, 24),
    ):
        calls = step_collectives(stage, 3, accumulation=accumulation)
        for place in product(range(2), range(4)):
            sent = hybrid_volume(24, 2, 4, (2, 4), place, calls)
            assert sent == {"shards": (over_shards,) * 2, "replicas": (over_replicas,) * 2}


def test_one_replica_is_zero_and_one_shard_is_data_parallelism():
    once = step_collectives(1, 1)
    assert hybrid_volume(24, 4, 4, (1, 6), (0, 2), once) == {
        "shards": zero_volume(24, 4, 6, 2, stage=1),
        "replicas": (0, 0),
    }
    assert hybrid_volume(24, 4, 4, (6, 1), (2, 0), once) == {
        "shards": (0, 0),
        "replicas": ring_all_reduce_volume(24, 4, 6, 2),
    }


def test_a_step_that_keeps_parameters_unsharded_sends_what_stage_1_sends():
    """A stage of a pipeline, of 16 micro-batches: no more than for one."""
    kept = step_collectives(3, 16, reshards=False, accumulation="unsharded")
    assert hybrid_volume(24, 4, 4, (1, 4), (0, 1), kept)["shards"] == zero_volume(
        24, 4, 4, 1, stage=1
    )
