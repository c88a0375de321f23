"""ZeRO's formulas against the paper's printed table, and against each other."""

import csv
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from minitron.cost import RECIPES, ring_all_reduce_volume
from minitron.cost.sharding import STAGES, zero_bytes, zero_holdings, zero_volume

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


@pytest.mark.parametrize(("recipe", "by_stage"), [
    ("bf16", [(16, 0), (4, 12), (2, 14), (0, 16)]),
    ("fp32", [(16, 0), (8, 8), (4, 12), (0, 16)]),
    ("bf16, fp32 gradient", [(18, 0), (6, 12), (2, 16), (0, 18)]),
])
def test_whole_and_divided_bytes_per_parameter(recipe, by_stage):
    for stage, (whole, divided) in zip(STAGES, by_stage, strict=True):
        for num_ranks in (1, 2, 8):
            expected = 1000 * whole + 1000 * divided // num_ranks
            assert zero_bytes(1000, num_ranks, stage, RECIPES[recipe]) == expected


def test_holdings_round_up_to_parameters():
    assert zero_holdings(10, 4, 2) == {
        "parameter": 20, "gradient": 2 * 3, "optimizer state": 12 * 3
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
