"""What a device can do: its datasheet, in FLOP/s, bytes, and bytes per second and direction.

The trap: datasheets count a link twice. NVLink 4 of an H100 is sold as 900 GB/s, which is 450 GB/s
out and 450 GB/s in at the same time. What one rank sends in a collective goes out, so its time is
bytes sent over 450 GB/s. Network cards are sold by the direction, but in bits: 400 Gbit/s are 50
GB/s. So NVLink is 9 times as fast as the card, not 18 times.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Device:
    """One GPU and its share of the node's links; peaks, which no program reaches."""

    name: str
    bf16_flops: float
    """Dense bfloat16 FLOP/s; with structured sparsity datasheets print twice as many."""
    fp8_flops: float | None
    """Dense float8 FLOP/s; None if the device has no float8."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second between the device and its memory."""
    nvlink_bandwidth: float
    """Bytes per second and direction to the other devices of the node."""
    nic_bandwidth: float
    """Bytes per second and direction to other nodes, through the device's own network card."""
    watts: float
    source: str


def read_devices() -> dict[str, Device]:
    """The rows of hardware.csv by name; where each is from stands there."""
    text = (files("minitron.plan") / "hardware.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: _device(row) for row in rows}


def _device(row: dict[str, str]) -> Device:
    return Device(
        name=row["name"],
        bf16_flops=float(row["bf16_tflops"]) * 1e12,
        fp8_flops=float(row["fp8_tflops"]) * 1e12 if row["fp8_tflops"] else None,
        memory_bytes=float(row["memory_gb"]) * 1e9,
        memory_bandwidth=float(row["memory_tb_s"]) * 1e12,
        nvlink_bandwidth=float(row["nvlink_gb_s_per_direction"]) * 1e9,
        nic_bandwidth=float(row["nic_gbit_s"]) / 8 * 1e9,
        watts=float(row["watts"]),
        source=row["source"],
    )


DEVICES = read_devices()
