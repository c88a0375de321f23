"""A run on all ranks that is killed and continued: has it the losses of an undisturbed one?

`minitron train` runs three times under a torchrun of its own, which the first rank starts: once
undisturbed, once until all its processes are killed, and once more with --resume. The ranks that
measure wait meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist
from on_gpu.findings import Findings, Machine

from minitron.measure.record import Row

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("tyro", "tqdm", "tokenizers")
STEPS, SAVE_EVERY, KILL_AFTER = 60, 10, 25
TINY_STEPS = 12, 4, 6
LIMIT_S = 240.0
"""For each of the three."""
MOST_OFF = 1e-3
"""Relative: on GPUs sums may come in another order."""


def measure(machine: Machine, folder: Path) -> Findings:
    """Run it on the first rank; the row has the losses of both runs and how far they differ."""
    findings = Findings()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        findings.notes.append(f"minitron train needs {', '.join(missing)}: not run")
        return findings
    if machine.group.rank() == 0:
        with tempfile.TemporaryDirectory(prefix="minitron-resume-") as place:
            row = killed_and_continued(Path(place), machine)
        findings.rows.append(row)
        findings.at_most(
            "losses of the continued run off the undisturbed one's", row["off"], MOST_OFF
        )
    dist.barrier(machine.group)
    return findings


def killed_and_continued(place: Path, machine: Machine) -> Row:
    """Train undisturbed, then killed and continued; compare the losses of every step."""
    minitron = [sys.executable, "-m", "minitron.cli"]
    subprocess.run(
        [*minitron, "data", "stories", "--out", str(place / "data"), "--num-tokens", "200000"],
        cwd=ROOT,
        env=environment(),
        check=True,
        capture_output=True,
    )
    steps, save_every, kill_after = TINY_STEPS if machine.tiny else (STEPS, SAVE_EVERY, KILL_AFTER)
    start = time.perf_counter()
    finish(launch(place, "whole", machine), place / "whole.log")
    whole_seconds = time.perf_counter() - start

    process = launch(place, "killed", machine)
    wait_for_step(place / "killed", kill_after, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    killed_after = len(losses(place / "killed"))
    start = time.perf_counter()
    finish(launch(place, "killed", machine, "--resume"), place / "killed.log")
    seconds = time.perf_counter() - start

    whole, continued = losses(place / "whole"), losses(place / "killed")
    off = max(abs(a / b - 1) for a, b in zip(continued, whole, strict=True))
    return {
        "case": "killed and continued",
        "ranks": machine.group.size(),
        "steps": steps,
        "killed_after": killed_after,
        "saved_every": save_every,
        "off": off,
        "whole_seconds": whole_seconds,
        "continued_seconds": seconds,
        "losses": whole,
        "continued_losses": continued,
    }


def environment() -> dict[str, str]:
    """This process's environment without what torchrun has told it, with this clone's modules."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "MASTER_"))
        and name
        not in (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "ROLE_RANK",
            "ROLE_WORLD_SIZE",
            "ROLE_NAME",
        )
    }
    path = [str(ROOT), *filter(None, [ours.get("PYTHONPATH")])]
    return {**ours, "PYTHONPATH": os.pathsep.join(path)}


def launch(place: Path, name: str, machine: Machine, *options: str) -> subprocess.Popen:
    """Start `minitron train` under torchrun, in a process group of its own."""
    steps, save_every, _ = TINY_STEPS if machine.tiny else (STEPS, SAVE_EVERY, KILL_AFTER)
    settings = {
        "steps": steps,
        "checkpoint-every": save_every,
        "eval-every": 0,
        "device": machine.device.type,
        "warmup-steps": 5,
        "eval-sequences": 16,
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(machine.group.size()),
        "-m",
        "minitron.train",
        str(ROOT / "configs" / "stories.toml"),
        "--run-dir",
        str(place / name),
        "--data.path",
        str(place / "data"),
        "--parallel.zero",
        "1",
        *(word for key, value in settings.items() for word in (f"--train.{key}", str(value))),
        *options,
    ]
    with (place / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=place, env=environment(), stdout=log, stderr=log, start_new_session=True
        )


def finish(process: subprocess.Popen, log: Path) -> None:
    """Wait for a run's end; raises RuntimeError with the end of its log if it has failed."""
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = "none in time"
    if code != 0:
        raise RuntimeError(f"exit code {code}: {log.read_text(errors='replace')[-2000:]}")


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    """Return once the log of a run has the step; raises RuntimeError if that takes too long."""
    end = time.monotonic() + LIMIT_S
    while len(losses(folder)) < step:
        if time.monotonic() > end or process.poll() is not None:
            raise RuntimeError(f"the run ended, or hung, before step {step}")
        time.sleep(0.02)


def losses(folder: Path) -> list[float]:
    """Read the loss of every step from a run's log; nothing where there is none yet."""
    log = folder / "metrics.jsonl"
    if not log.exists():
        return []
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return [row["loss"] for row in rows if "loss" in row]
