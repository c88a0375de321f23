"""The table against itself, against the link's generations, and against the clock's peaks."""

import csv
from importlib.resources import files
from statistics import mean

import pytest

from minitron.config import ConfigError
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.plan import hardware
from minitron.plan.hardware import DEVICES, find_device
from minitron.plan.published import table

TEXT = (files("minitron.plan") / "hardware.csv").read_text(encoding="utf-8")
ROWS = list(csv.DictReader(line for line in TEXT.splitlines() if not line.startswith("#")))
LINKS = {"2": 6, "3": 12, "4": 18, "5": 18}  # NVLink's generations: links of a device,
GIGABYTES = {"2": 25, "3": 25, "4": 25, "5": 50}  # and GB/s of a link and direction


def test_every_row_is_a_device_and_says_where_it_is_from():
    assert list(DEVICES) == [row["name"] for row in ROWS]
    assert {
        "V100-SXM-32GB",
        "A100-SXM-40GB",
        "A100-SXM-80GB",
        "H100-SXM-80GB",
        "H200-SXM-141GB",
        "B200-SXM-180GB",
    } <= set(DEVICES)
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
    assert (h100.memory_bytes, h100.memory_bandwidth) == (81559 * 2**20, 3.35e12)
    assert (h100.nvlink_bandwidth, h100.nic_bandwidth) == (450e9, 50e9)
    assert h100.watts == 700
    assert (h100.nvlink_latency, h100.nic_latency) == (3.4e-6, pytest.approx(14e-6))
    assert h100.matmul_share * h100.bf16_flops == pytest.approx(794.5e12)
    assert h100.nvlink_share * h100.nvlink_bandwidth == pytest.approx(249.8e9)
    assert DEVICES["A100-SXM-80GB"].fp8_flops is None


def test_links_are_those_of_the_sources_that_are_named():
    """NVLink of an H100 as the playbook measured it; NCCL's latency where nobody measured one."""
    row = next(
        row
        for row in table("playbook_comm_bandwidth")
        if (row["collective"], row["nodes"]) == ("all_gather", "1")
    )
    for device in DEVICES.values():
        reached = device.nvlink_share * device.nvlink_bandwidth / 1e9
        if device.name.startswith(("H100", "H200")):
            assert reached == pytest.approx(float(row["mean_gb_s"]), abs=0.1)
        if "EFA" not in device.name:
            assert device.nic_latency == pytest.approx(hardware.NIC_LATENCY)


def test_nothing_reaches_its_peak_and_what_is_not_measured_counts_as_the_mean():
    for device in DEVICES.values():
        assert 0.5 < device.matmul_share < 0.9
        assert 0.5 < device.nvlink_share < 0.9 and 0.5 < device.nic_share < 0.9
    matmuls = {
        row["name"].split("-")[0]: float(row["matmul_tflops"]) / float(row["bf16_tflops"])
        for row in ROWS
        if row["matmul_tflops"]
    }
    assert mean(matmuls.values()) == pytest.approx(hardware.MATMUL_SHARE, abs=0.02)
    links = {
        float(row["nvlink_reached_gb_s"]) / float(row["nvlink_gb_s_per_direction"])
        for row in ROWS
        if row["nvlink_reached_gb_s"]
    }
    cards = {
        8 * float(row["nic_reached_gb_s"]) / float(row["nic_gbit_s"])
        for row in ROWS
        if row["nic_reached_gb_s"]
    }
    assert mean(links | cards) == pytest.approx(hardware.LINK_SHARE, abs=0.02)


def test_the_clock_divides_by_the_same_peaks():
    for device in DEVICES.values():
        chip = device.name.split("-")[0]
        if chip != "V100":  # has no bfloat16, so its clock measures a peak
            assert DENSE_BF16_PEAKS[chip] == device.bf16_flops


def test_float8_is_twice_as_fast_and_nobody_sells_sparsity_here():
    """Twice bfloat16, both dense, is what tensor cores do; four times would be a sparse figure."""
    for device in DEVICES.values():
        if device.fp8_flops is not None:
            assert device.fp8_flops == pytest.approx(2 * device.bf16_flops, rel=1e-3)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "H100-SXM-80GB"),
        ("A100", "A100-SXM-80GB"),
        ("a100-sxm-40gb", "A100-SXM-40GB"),
        ("H100-SXM-80GB-EFA", "H100-SXM-80GB-EFA"),
        ("b200", "B200-SXM-180GB"),
    ],
)
def test_a_device_is_found_by_how_it_begins(typed, name):
    assert find_device(typed) is DEVICES[name]


@pytest.mark.parametrize("typed", ["tpu", "", "80GB", "A100x"])
def test_an_unknown_device_is_one_line_that_names_all(typed):
    with pytest.raises(ConfigError) as refusal:
        find_device(typed)
    message = str(refusal.value)
    assert "\n" not in message and repr(typed) in message
    assert all(name in message for name in DEVICES)
