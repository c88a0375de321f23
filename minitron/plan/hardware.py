"""What a device can do: its datasheet, in FLOP/s, bytes, and bytes per second and direction.

The trap: datasheets count a link twice. NVLink 4 of an H100 is sold as 900 GB/s, which is 450 GB/s
out and 450 GB/s in at the same time. What one rank sends in a collective goes out, so its time is
bytes sent over 450 GB/s. Network cards are sold by the direction, but in bits: 400 Gbit/s are 50
GB/s. So NVLink is 9 times as fast as the card, not 18 times.

Read in this order: Device, DEVICES, find_device.
"""

import csv
from dataclasses import dataclass
from importlib.resources import files

from minitron.config import ConfigError

NVLINK_LATENCY, NIC_LATENCY = 3.4e-6, 14.0e-6
"""Seconds per hop of a ring inside a node and between nodes, by which NCCL 2.20.3 chooses its
algorithm (github.com/NVIDIA/nccl, src/graph/tuning.cc: hwLat, ring, simple protocol)."""
MATMUL_SHARE, LINK_SHARE = 0.8, 0.7
"""Of the peak, for devices without a measurement: the means of those that have one."""


@dataclass(frozen=True)
class Device:
    """One GPU and its share of the node's links; peaks, which no program reaches."""

    name: str
    bf16_flops: float
    """Dense bfloat16 FLOP/s; with structured sparsity datasheets print twice as many."""
    fp8_flops: float | None
    """Dense float8 FLOP/s; None if the device has no float8."""
    memory_bytes: float
    """As the driver reports them: 85.5e9 for an H100 that is sold as having 80 GB."""
    memory_bandwidth: float
    """Bytes per second between the device and its memory."""
    nvlink_bandwidth: float
    """Bytes per second and direction to the other devices of the node."""
    nic_bandwidth: float
    """Bytes per second and direction to other nodes, through the device's own network card."""
    watts: float
    source: str
    matmul_share: float = MATMUL_SHARE
    """Of the peak FLOP/s, what the fastest published matmul reaches."""
    nvlink_share: float = LINK_SHARE
    """Of the link's bandwidth, what a large collective inside a node reaches."""
    nic_share: float = LINK_SHARE
    """Of the cards' bandwidth, what a large collective between nodes reaches."""
    nvlink_latency: float = NVLINK_LATENCY
    """Seconds per hop of a ring inside a node."""
    nic_latency: float = NIC_LATENCY
    """Seconds per hop of a ring between nodes."""
    float32_share: float = 1 / 16
    """Of bfloat16's FLOP/s, what float32 has without tensor cores (A100 datasheet: 19.5 of 312)."""


def read_devices() -> dict[str, Device]:
    """Read the rows of hardware.csv by name; the file says where each is from."""
    text = (files("minitron.plan") / "hardware.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: _device(row) for row in rows}


def _device(row: dict[str, str]) -> Device:
    number = {name: float(text) for name, text in row.items() if is_number(text)}
    peak = number["bf16_tflops"]
    nvlink, nic = number["nvlink_gb_s_per_direction"], number["nic_gbit_s"] / 8
    return Device(
        name=row["name"],
        bf16_flops=peak * 1e12,
        fp8_flops=number["fp8_tflops"] * 1e12 if "fp8_tflops" in number else None,
        memory_bytes=number["memory_mib"] * 2**20,
        memory_bandwidth=number["memory_tb_s"] * 1e12,
        nvlink_bandwidth=nvlink * 1e9,
        nic_bandwidth=nic * 1e9,
        watts=number["watts"],
        source=row["source"],
        matmul_share=number.get("matmul_tflops", MATMUL_SHARE * peak) / peak,
        nvlink_share=number.get("nvlink_reached_gb_s", LINK_SHARE * nvlink) / nvlink,
        nic_share=number.get("nic_reached_gb_s", LINK_SHARE * nic) / nic,
        nic_latency=number["nic_latency_us"] * 1e-6,
    )


def is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


DEVICES = read_devices()


def find_device(name: str) -> Device:
    """Find a device by its name or by its first letters, in any case: "h100".

    The first row that fits counts. Raises ConfigError, with all names, if there is none.
    """
    for known, device in DEVICES.items():
        if name and known.lower().startswith(name.lower()):
            return device
    raise ConfigError(
        f"device {name!r} is unknown",
        f"use one of {', '.join(DEVICES)}, or its first "
        "letters; `minitron plan --calibrate` measures this machine instead",
    )
