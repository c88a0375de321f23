"""Each measurement on its own, small; and that a device made of them can be planned for."""

from dataclasses import replace

import pytest
import torch

from minitron.config import ConfigError, ModelConfig, ParallelConfig
from minitron.launch import run
from minitron.plan import calibrate as calibration
from minitron.plan.calibrate import (
    alone,
    calibrate,
    fastest_seconds,
    known_device,
    matmul_flops,
    memory_bandwidth,
    ring_link,
)
from minitron.plan.estimate import estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.systems import System

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(calibration.MATMUL_SIZES, "cpu", (64, 128))
    monkeypatch.setitem(calibration.COPIED, "cpu", 2**20)


def test_a_plan_for_this_machine(monkeypatch):
    """With both ranks' work done here; the link is measured below."""
    link = calibration.cost.Link(1e-4, 1e9)
    monkeypatch.setattr(calibration.dist, "barrier", lambda group: None)
    monkeypatch.setattr(calibration, "ring_link", lambda group, kind: link)
    monkeypatch.setattr(calibration, "run", lambda fn, size, timeout: [fn(None)] * size)
    here = calibrate("cpu")
    assert (here.nvlink_latency, here.nvlink_bandwidth) == link
    assert (here.nic_latency, here.nic_bandwidth) == link
    assert here.nvlink_share == here.nic_share == 1
    assert here.watts == 0 and here.fp8_flops is None
    assert min(here.bf16_flops, here.memory_bytes, here.memory_bandwidth) > 1e6
    step = planned(here, "fp32")
    assert 0 < step.mfu < 1 and step.parts["dp"] >= 0


def planned(device, precision):
    job = Job(ModelConfig(vocab_size=512), 2, device, 128, 32, gpus_per_node=2, precision=precision)
    return estimate(job, Decision(ParallelConfig(dp=2)))


@pytest.mark.parametrize(("bf16", "fp32"), [(1e9, 30e9), (30e9, 1e9)])
def test_the_faster_of_two_dtypes_is_the_peak(monkeypatch, bf16, fp32):
    monkeypatch.setattr(
        calibration, "matmul_flops", lambda device, dtype: bf16 if dtype == torch.bfloat16 else fp32
    )
    device = replace(alone(CPU, None), memory_bandwidth=1e15, nvlink_bandwidth=1e15)
    assert device.bf16_flops == 30e9
    seconds = {dtype: planned(device, dtype).parts["matmul"] for dtype in ("bf16", "fp32")}
    assert seconds["bf16"] / seconds["fp32"] == pytest.approx(fp32 / bf16, rel=1e-3)
    assert all(0 < planned(device, dtype).mfu < 1 for dtype in seconds)


def test_of_a_known_gpu_the_datasheet_stays(monkeypatch):
    monkeypatch.setattr(
        calibration,
        "matmul_flops",
        lambda device, dtype: 700e12 if dtype == torch.bfloat16 else 50e12,
    )
    h100 = alone(CPU, DEVICES["H100-SXM-80GB"])
    assert h100.bf16_flops == 989.4e12 and h100.watts == 700
    assert h100.matmul_share == pytest.approx(700 / 989.4)
    assert h100.float32_share == pytest.approx(50 / 700)
    assert h100.nic_bandwidth == 50e9


@pytest.mark.parametrize(
    ("full", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("NVIDIA B200", "B200-SXM-180GB"),
    ],
)
def test_a_gpu_is_known_by_its_name(full, name):
    assert known_device(full).name == name


@pytest.mark.parametrize("full", ["NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe"])
def test_what_has_other_links_is_not_known(full):
    assert known_device(full) is None


def test_a_product_counts_two_flops_for_a_multiply_add(monkeypatch):
    monkeypatch.setattr(calibration, "fastest_seconds", lambda do, device, times=3: 1.0)
    assert matmul_flops(CPU, torch.float32) == 2 * 128**3
    assert memory_bandwidth(CPU) == 2 * 2**20, "a copy reads and writes"


def test_the_fastest_call_counts_and_not_the_first(monkeypatch):
    calls, readings = [], iter([0, 5, 10, 11, 20, 23])
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(readings))
    assert fastest_seconds(lambda: calls.append(0), CPU) == 1
    assert len(calls) == 4


def link_of_two(group):
    return ring_link(group, "cpu")


def test_a_link_of_two_ranks():
    links = run(link_of_two, 2)
    assert links[0] == links[1], "all ranks take the slowest one's times"
    assert links[0].latency >= 0
    assert 1e6 < links[0].bandwidth < 1e13


def test_a_link_from_made_up_times(monkeypatch):
    """Of hops of n/2 bytes that take 10 us and 1 GB/s, an all-reduce of n bytes takes two."""
    times = iter([2 * (1e-5 + n / 2 / 1e9) for n in calibration.MESSAGES])
    monkeypatch.setattr(calibration, "fastest_seconds", lambda *args, **options: next(times))
    monkeypatch.setattr(calibration.dist, "all_reduce", lambda *args, **options: None)
    link = ring_link(type("Group", (), {"rank": lambda self: 0})(), "cpu")
    assert link.latency == pytest.approx(1e-5) and link.bandwidth == pytest.approx(1e9)


def test_an_unknown_device_is_one_line():
    with pytest.raises(ConfigError) as refusal:
        calibrate("toaster")
    assert "\n" not in str(refusal.value) and "toaster" in str(refusal.value)


def test_a_slower_network_of_this_machine_is_slower():
    here = alone(CPU, None)
    slow = replace(here, nvlink_bandwidth=here.nvlink_bandwidth / 10)
    layout = Decision(ParallelConfig(dp=2))
    system = System(overlaps_gradients=False)
    job = Job(ModelConfig(vocab_size=512), 2, here, 128, 32, gpus_per_node=2)
    assert (
        estimate(replace(job, device=slow), layout, system).parts["dp"]
        > estimate(job, layout, system).parts["dp"]
    )
