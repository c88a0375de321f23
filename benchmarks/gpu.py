"""Measure everything that this package says of a GPU, on the GPUs of this machine, in one command.

    python benchmarks/gpu.py                             # one GPU: `make gpu`, under 9 minutes
    python benchmarks/gpu.py --only kernels memory       # some parts
    torchrun --nproc-per-node 8 benchmarks/gpu.py        # several GPUs: what ranks do together
    python benchmarks/gpu.py --device cpu --tiny --out DIR    # that everything runs, nothing more

Each part writes one record, benchmarks/results/gpu/DEVICE/PART.json, as soon as it is done. A part
whose record is there, from this device and these versions, is not measured again, so a run that was
interrupted continues; `--again` measures anew. It ends with a table of what passed, and exits with
1 if a part failed or missed its target. Nothing is fetched from a network, and tyro, tqdm,
matplotlib and tokenizers need not be installed; where `transformers` is missing, its column is.

Read in this order: PARTS, main, measure_part; then on_gpu/mfu.py and its neighbors.
"""

import argparse
import importlib
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that nothing has to be installed

import torch  # noqa: E402
from on_gpu.findings import Findings, Machine, release  # noqa: E402

from minitron.config import ConfigError  # noqa: E402
from minitron.launch import torchrun_group  # noqa: E402
from minitron.measure.record import Record, conditions_here, load, save  # noqa: E402

PARTS = {  # of one device, in this order: the last one estimates what the others have measured
    "mfu": "tokens/s and MFU of whole steps, against plain PyTorch and transformers",
    "memory": "bytes held against the meter and the dry run; the allocator's blocks",
    "kernels": "rooflines of matmuls and of attention",
    "precision": "200 steps in each precision, against torch.amp",
    "overlap": "a profiler's trace of a step; what prefetch hides",
    "plan": "this device calibrated; estimates against the steps above",
}
RANK_PARTS = {  # of several ranks, which torchrun has started
    "collectives": "all-reduces: NCCL's against our ring",
    "parallel": "DDP, ZeRO, tensor and pipeline parallelism against PyTorch's own",
    "resume": "a run that is killed, and continued",
}
RESULTS = ROOT / "benchmarks" / "results" / "gpu"


def main() -> int:
    options = read_options()
    with torchrun_group() as group:
        machine = Machine(device_for(options.device), options.tiny, group)
        folder = options.out / folder_name(machine)
        parts = PARTS if group.size() == 1 else RANK_PARTS
        chosen = options.only or list(parts)
        unknown = [name for name in chosen if name not in parts]
        if unknown:
            raise ConfigError(
                f"--only {' '.join(unknown)}: no part of {group.size()} rank"
                f"{'s' * (group.size() > 1)}",
                f"choose from {', '.join(parts)}",
            )
        outcomes = {name: measure_part(name, machine, folder, options.again) for name in chosen}
        if group.rank() == 0:
            print(table(outcomes, folder))
    return int(not all(isinstance(each, Record) and passed(each) for each in outcomes.values()))


def device_for(name: str) -> torch.device:
    """Return the device; raises ConfigError if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} sees no CUDA GPU on this machine",
            "`minitron doctor` says what is missing; --device cpu --tiny --out "
            "FOLDER tries the command itself",
        )
    return (
        torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:12} {what}" for name, what in (PARTS | RANK_PARTS).items()),
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        help="these parts alone",
        type=lambda text: text.split(","),
        action="extend",
    )
    parser.add_argument("--again", action="store_true", help="measure anew what has a record")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes: that everything runs, nothing of its speed"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder of records; for a GPU's sizes benchmarks/results/gpu unless given",
    )
    options = parser.parse_args()
    options.only = [name for names in options.only or [] for name in names]
    if options.out is None:
        if options.tiny or options.device == "cpu":
            parser.error(
                "--out FOLDER is needed with --tiny or --device cpu: their records are no GPU's"
            )
        options.out = RESULTS
    return options


def folder_name(machine: Machine) -> str:
    """Name the records' folder after the device: "h100-80gb-hbm3", with "-x8" for eight."""
    words = conditions_here(machine.device).device.lower().replace("nvidia", "").split()
    name = "-".join("".join(c for c in word if c.isalnum()) for word in words) or "device"
    return name + (f"-x{machine.group.size()}" if machine.group.size() > 1 else "")


def measure_part(name: str, machine: Machine, folder: Path, again: bool) -> Record | None:
    """Return a part's record: the one that is there, or a new one; None if the part failed."""
    path, is_first = folder / f"{name}.json", machine.group.rank() == 0
    conditions = conditions_here(machine.device, machine.group.size())
    known = None if again else record_for(path, conditions, machine.tiny)
    if known is not None:
        say(machine, f"{name}: measured on {known.conditions.date}; --again measures anew")
        return known

    say(machine, f"{name}: {(PARTS | RANK_PARTS)[name]}")
    start = time.perf_counter()
    try:
        findings: Findings = importlib.import_module(f"on_gpu.{name}").measure(machine, folder)
    except ConfigError as error:
        say(machine, f"{name}: {error}")
        return None
    except Exception:  # another part may still be measured
        if machine.group.size() > 1:
            raise  # but not while other ranks wait for this one
        traceback.print_exc()
        return None
    finally:
        release(machine.device)
    record = Record(
        name,
        conditions,
        machine.tiny,
        time.perf_counter() - start,
        findings.rows,
        [] if machine.tiny else findings.targets,
        findings.notes,
    )
    if is_first:
        save(record, path)
    say(machine, f"{name}: {record.seconds:.0f} s, {len(record.rows)} rows -> {path}")
    return record


def record_for(path: Path, conditions, tiny: bool) -> Record | None:
    """Return the record in the file, if it is of such a device, versions and sizes."""
    if not path.exists():
        return None
    try:
        known = load(path)
    except ConfigError as error:
        print(f"{error}; measuring anew", file=sys.stderr)
        return None
    day, command = known.conditions.date, known.conditions.command
    same = replace(conditions, date=day, command=command) == known.conditions
    return known if same and known.tiny == tiny else None


def passed(record: Record) -> bool:
    return all(target.passed for target in record.targets)


def table(outcomes: dict[str, Record | None], folder: Path) -> str:
    """Write what was measured, and which targets were reached."""
    lines = ["", f"{'part':12} {'result':8} {'s':>5}  records in {folder}"]
    for name, record in outcomes.items():
        if record is None:
            lines.append(f"{name:12} {'FAILED':8}")
            continue
        result = "pass" if passed(record) else "MISS"
        lines.append(f"{name:12} {result:8} {record.seconds:5.0f}")
        lines += [f"    {target}" for target in record.targets]
        lines += [f"    note: {note}" for note in record.notes]
    return "\n".join(lines)


def say(machine: Machine, line: str) -> None:
    if machine.group.rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        sys.exit(2)
