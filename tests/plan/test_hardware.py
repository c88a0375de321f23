"""The table against itself, against the link's generations, and against the clock's peaks."""

import csv
from importlib.resources import files

import pytest

from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.plan.hardware import DEVICES

TEXT = (files("minitron.plan") / "hardware.csv").read_text(encoding="utf-8")
ROWS = list(csv.DictReader(line for line in TEXT.splitlines() if not line.startswith("#")))
LINKS = {"3": 12, "4": 18, "5": 18}  # NVLink's generations: links of a device,
GIGABYTES = {"3": 25, "4": 25, "5": 50}  # and GB/s of a link and direction


def test_every_row_is_a_device_and_says_where_it_is_from():
    assert list(DEVICES) == [row["name"] for row in ROWS]
    assert {"A100-SXM-80GB", "H100-SXM-80GB"} <= set(DEVICES)
    assert all(device.source for device in DEVICES.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_a_direction_is_half_of_what_is_sold(row):
    per_direction = float(row["nvlink_gb_s_per_direction"])
    assert per_direction == float(row["nvlink_gb_s_bidirectional"]) / 2
    assert per_direction == LINKS[row["nvlink"]] * GIGABYTES[row["nvlink"]]
    assert DEVICES[row["name"]].nvlink_bandwidth == per_direction * 1e9


def test_units_are_flops_bytes_and_seconds():
    h100 = DEVICES["H100-SXM-80GB"]
    assert (h100.bf16_flops, h100.fp8_flops) == (989.4e12, 1978.9e12)
    assert (h100.memory_bytes, h100.memory_bandwidth) == (80e9, 3.35e12)
    assert (h100.nvlink_bandwidth, h100.nic_bandwidth) == (450e9, 50e9)
    assert h100.watts == 700
    assert DEVICES["A100-SXM-80GB"].fp8_flops is None


def test_the_clock_divides_by_the_same_peaks():
    for device in DEVICES.values():
        assert DENSE_BF16_PEAKS[device.name.split("-")[0]] == device.bf16_flops


def test_float8_is_twice_as_fast_and_nobody_sells_sparsity_here():
    """Twice bfloat16, both dense, is what tensor cores do; four times would be a sparse figure."""
    for device in DEVICES.values():
        if device.fp8_flops is not None:
            assert device.fp8_flops == pytest.approx(2 * device.bf16_flops, rel=1e-3)
