import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitron.measure import clock
from minitron.measure.clock import Clock, Peak

CPU = torch.device("cpu")


def at(monkeypatch, *seconds: float) -> None:
    """Let the clock read these times, one after the other."""
    times = iter(seconds)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))


def test_a_lap_reads_tokens_steps_and_the_share_of_the_peak(monkeypatch):
    at(monkeypatch, 10.0, 14.0, 15.0)
    watch = Clock(flops_per_token=100, peak=Peak(1e6, "table"), device=CPU)
    speed = watch.lap(num_tokens=8000, num_steps=2)
    assert (speed.tokens_per_second, speed.step_seconds, speed.mfu) == (2000, 2.0, 0.2)
    assert str(speed) == "2,000 tokens/s, MFU 20.0 %"
    assert watch.lap(num_tokens=500).tokens_per_second == 500


def test_a_window_reads_the_mean_of_its_laps_and_shows_no_mfu_before_it_is_full(monkeypatch):
    """One step in an eighth of the usual time would read 80 %, where the run does 10 %."""
    at(monkeypatch, 0.0, 0.125, 1.125, 2.125, 10.0, 11.0, 12.0)
    watch = Clock(100, Peak(1e6, "table"), CPU, window=2.0)
    first, second, third = (watch.lap(num_tokens=1000) for _ in range(3))
    assert str(first) == "8,000 tokens/s" and "MFU" not in str(second)
    assert str(third) == "1,000 tokens/s, MFU 10.0 %"
    watch.start()  # a pause counts for nothing
    assert watch.lap(num_tokens=3000).tokens_per_second == 4000 / 2
    assert watch.lap(num_tokens=3000, num_steps=4).step_seconds == 2 / 5


def test_more_than_the_peak_is_no_share_of_it(monkeypatch):
    at(monkeypatch, 0.0, 1.0, 2.0)
    watch = Clock(100, Peak(1e6, "table"), CPU)
    speed = watch.lap(num_tokens=10_001)
    assert speed.mfu is None
    assert "MFU unknown" in str(speed)
    assert watch.lap(num_tokens=10_000).mfu == 1.0


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_a_known_gpu_has_its_dense_peak(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for dtype in (torch.bfloat16, torch.float16):
        assert clock.peak_flops(torch.device("cuda"), dtype).flops == teraflops * 1e12


def test_the_cpu_peak_is_measured_by_its_fastest_matmul(monkeypatch):
    at(monkeypatch, 0.0, 0.0, 0.05, 0.25, 0.25, 0.3, 0.4, 9.0)
    monkeypatch.setattr(clock, "MEASURING_SECONDS", 0.3)
    # two products, of 0.2 s and of 0.1 s: the faster one counts
    peak = clock.peak_flops(CPU, torch.float32)
    assert peak.flops == pytest.approx(2 * 1024**3 / 0.1)


def test_measuring_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    clock.measured_matmul_flops(CPU, torch.float32, seconds=0.01)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_peak_is_that_of_the_product_a_linear_layer_makes(dtype):
    """Its weight is (F, D): the order of the operands is worth a factor of 20 in float16."""
    seen = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                seen.append((args[0].dtype, args[0].stride(), args[1].stride()))
            return func(*args, **(kwargs or {}))

    with Products():
        torch.nn.functional.linear(torch.ones(4, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype))
        clock.measured_matmul_flops(CPU, dtype, seconds=0.0)
    (_, *layer), *measured = seen
    assert layer == [(4, 1), (1, 4)]
    assert measured == [(dtype, (1024, 1), (1, 1024))]
