"""This device calibrated as `minitron plan --calibrate` does, and the estimates of measured steps.

What the other parts have measured is read from their records: whole steps from `mfu`, peaks of
memory from `memory`. Each is estimated twice, for the device's datasheet and as calibrated here.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from on_gpu import memory, mfu
from on_gpu.findings import Findings, Machine

from minitron.measure.record import Record, Row, load
from minitron.plan.calibrate import calibrate, known_device
from minitron.plan.hardware import Device

PRECISION = {"ours": "bf16-autocast", "ours, bf16 weights": "bf16"}


def measure(machine: Machine, folder: Path) -> Findings:
    """Calibrate, then estimate what the records in `folder` hold; rows have both numbers."""
    findings, calibrated = Findings(), calibrate(machine.device.type)
    devices = {"calibrated": calibrated}
    known = known_device(torch.cuda.get_device_name(machine.device)) if machine.on_gpu else None
    if known is not None:
        devices["datasheet"] = known
    findings.rows.append({"case": "calibrated device", **numbers(calibrated)})
    for part, rows in (("mfu", step_rows), ("memory", memory_rows)):
        path = folder / f"{part}.json"
        if path.exists():
            findings.rows += rows(load(path), devices, machine)
        else:
            findings.notes.append(f"{part} has no record here: measure it first, then plan --again")
    return findings


def numbers(device: Device) -> Row:
    return {
        name: value for name, value in asdict(device).items() if not isinstance(value, dict | tuple)
    }


def step_rows(record: Record, devices: dict[str, Device], machine: Machine) -> list[Row]:
    """Estimate our eager steps: the estimate is of eager kernels."""
    steps = mfu.steps(machine)
    rows = []
    for measured in record.rows:
        if measured["side"] not in PRECISION or measured["compiled"]:
            continue
        for name, device in devices.items():
            guess = steps[measured["model"]].estimate(device, PRECISION[measured["side"]])
            rows.append(
                {
                    "case": f"{measured['case']}, {name}",
                    "device": name,
                    "of": measured["case"],
                    "measured_seconds": measured["seconds"],
                    "estimated_seconds": guess.seconds,
                    "error": guess.seconds / measured["seconds"] - 1,
                    **{f"{part}_seconds": seconds for part, seconds in guess.parts.items()},
                }
            )
    return rows


def memory_rows(record: Record, devices: dict[str, Device], machine: Machine) -> list[Row]:
    """Estimate the peaks of memory."""
    rows, device = [], devices["calibrated"]
    for measured in record.rows:
        if "recompute" not in measured:
            continue  # an experiment with the allocator
        guess = memory.step(machine).estimate(device, "bf16", measured["recompute"])
        held = sum(guess.memory.values())
        rows.append(
            {
                "case": f"memory, {measured['case']}",
                "of": measured["case"],
                "measured_bytes": measured["allocated_bytes"],
                "estimated_bytes": held,
                "error": held / measured["allocated_bytes"] - 1,
            }
        )
    return rows
