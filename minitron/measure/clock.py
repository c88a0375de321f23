"""The clock: how fast is a step, and how near the limit of the device?

Model FLOPs utilization (MFU) is the share of the device's peak that does the model's own work:

    MFU = tokens/s x model FLOPs per token / peak FLOP/s        (Chowdhery et al. 2022, appendix B)

Model FLOPs are `cost.training_flops_per_token`: forward and backward matmuls, attention
counted in full (not halved for causality), recomputation not counted. The peak is the vendor's
dense figure where the device is in the table, else the fastest matmul measured here.
A run faster than that peak reports no MFU, since it was not the peak.

On a CPU, which other programs use too, one step may take half as long as the next, and the peak was
measured at a third moment. So a run's clock reads the mean of its last seconds, and shows no MFU
before they have passed.
"""

import operator
import time
from collections import deque
from dataclasses import dataclass, replace

import torch

# Dense bfloat16 peaks in FLOP/s, without structured sparsity, from NVIDIA's datasheets, which give
# float16 the same. The first name that occurs in the device's name counts, so variants stand before
# the plain one.
MEASURING_SECONDS = 0.3
DENSE_BF16_PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
}


@dataclass(frozen=True)
class Peak:
    """The most FLOP/s a device can do, and where the figure comes from."""

    flops: float
    source: str


@dataclass(frozen=True)
class Speed:
    """What the clock read over some steps; `mfu` is None where the peak cannot be right."""

    tokens_per_second: float
    step_seconds: float
    mfu: float | None
    is_steady: bool = True
    """Whether it was read over all of the clock's window."""

    def __str__(self) -> str:
        if not self.is_steady:
            return f"{self.tokens_per_second:,.0f} tokens/s"
        mfu = "unknown" if self.mfu is None else f"{100 * self.mfu:.1f} %"
        return f"{self.tokens_per_second:,.0f} tokens/s, MFU {mfu}"


class Clock:
    """Times steps: `start` before the first, `lap` after one or several.

    `flops_per_token` are model FLOPs of a training step per token; `peak` is one device's, of
    `num_devices` that share the work. A lap's speed is the mean of the laps in the last `window`
    seconds, pauses not counted; with 0 it is the lap's own.
    """

    def __init__(
        self,
        flops_per_token: int,
        peak: Peak,
        device: torch.device,
        num_devices: int = 1,
        window: float = 0.0,
    ):
        self.flops_per_token = flops_per_token
        self.peak = replace(peak, flops=num_devices * peak.flops)
        self.device, self.window = device, window
        self.laps: deque[tuple[float, int, int]] = deque()  # seconds, tokens, steps
        self.total = (0.0, 0, 0)
        self.start()

    def start(self) -> None:
        synchronize(self.device)
        self.started = time.perf_counter()

    def lap(self, num_tokens: int, num_steps: int = 1) -> Speed:
        """Read the speed after a lap, since `start` or the last one, of `num_tokens`."""
        synchronize(self.device)
        now = time.perf_counter()
        self.add((now - self.started, num_tokens, num_steps))
        self.started = now
        seconds, num_tokens, num_steps = self.total
        tokens_per_second = num_tokens / seconds
        return Speed(
            tokens_per_second,
            seconds / num_steps,
            self.mfu(tokens_per_second),
            is_steady=seconds >= self.window,
        )

    def add(self, lap: tuple[float, int, int]) -> None:
        """Add a lap to those of the window, and drop what the window holds no more."""
        self.laps.append(lap)
        self.total = tuple(map(operator.add, self.total, lap))
        while len(self.laps) > 1 and self.total[0] - self.laps[0][0] >= self.window:
            self.total = tuple(map(operator.sub, self.total, self.laps.popleft()))

    def mfu(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak, 0 to 1; None if the peak is below what was achieved."""
        share = tokens_per_second * self.flops_per_token / self.peak.flops
        return share if share <= 1 else None


def peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the device's dense peak for `dtype`: from the table, else measured."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for known, flops in DENSE_BF16_PEAKS.items():
            if known in name:
                return Peak(flops, f"{known} datasheet, dense 16 bits")
    return Peak(measured_matmul_flops(device, dtype, MEASURING_SECONDS), "the fastest matmul here")


def measured_matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Measure the FLOP/s of the fastest of several square matmuls, for about `seconds`.

    Rows meet rows, a times a transposed, as in a linear layer: where a CPU has no instruction for
    `dtype`, other orders may be 20 times slower, and a model faster than such a peak.
    """
    size = 8192 if device.type == "cuda" else 1024
    own = torch.Generator(device).manual_seed(0)  # or measuring would shift the run's dropout
    a = torch.randn(size, size, device=device, dtype=dtype, generator=own)
    fastest = float("inf")
    a @ a.T  # the first one pays for set-up
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        synchronize(device)
        start = time.perf_counter()
        a @ a.T
        synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size**3 / fastest


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished what was asked of it; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
