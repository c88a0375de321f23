"""Is this machine ready for the course? One line per check, and what to do where the answer is no.

A check measures one thing and returns what it has seen. A GPU is reported, never required: every
chapter runs on CPU processes that talk through gloo.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from minitron.launch import RankError, run
from minitron.measure.record import driver_version

GIB = 2**30
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
FEWEST_CORES = 2
LEAST_MEMORY = 4 * GIB
LEAST_DISK = 2 * GIB
LEAST_GPU_MEMORY = 60 * GIB  # the 1.3B model: 21 GB of state, 27 GB of activations, and its loss
SLOW_S = 20.0  # for two processes that do nothing; 3 s is usual


@dataclass(frozen=True)
class Check:
    """What was looked at, whether it will do, what was seen, and what to do if it will not."""

    name: str
    ok: bool
    seen: str
    remedy: str = ""


def run_doctor() -> int:
    """Print one line per check; return 0 if all pass, else 1 (an exit code)."""
    passed = True
    for check in (
        check_python,
        check_torch,
        check_cores,
        check_memory,
        check_gpu,
        check_measuring,
        check_gloo,
        check_ranks,
        check_writing,
        check_disk,
        check_jupyter,
    ):
        result = check()
        passed = passed and result.ok
        print(report(result), flush=True)

    print("Ready." if passed else "Not ready: see the lines marked FAIL.")
    return 0 if passed else 1


def report(check: Check) -> str:
    """Write a check as its line."""
    line = f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<12} {check.seen}"
    return line if check.ok else f"{line}: {check.remedy}"


def check_python() -> Check:
    seen = f"{platform.python_version()} at {sys.executable}"
    ok = sys.version_info[:2] >= OLDEST_PYTHON
    return Check(
        "Python",
        ok,
        seen,
        f"needs {_dotted(OLDEST_PYTHON)} or newer; install it, then "
        "run `make clean setup PYTHON=python3.11`",
    )


def check_torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return Check(
        "PyTorch",
        version >= OLDEST_TORCH,
        torch.__version__,
        f"needs {_dotted(OLDEST_TORCH)} or newer; run `make setup`",
    )


def check_cores() -> Check:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))  # a container may grant fewer than there are
    return Check(
        "cores",
        cores >= FEWEST_CORES,
        str(cores),
        f"needs {FEWEST_CORES}; give the container or virtual machine more",
    )


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    seen = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB of it free"
    return Check(
        "memory",
        memory.available >= LEAST_MEMORY,
        seen,
        f"needs {LEAST_MEMORY / GIB:.0f} GiB free; close other programs, or give the "
        "container more",
    )


def check_gpu() -> Check:
    if not torch.cuda.is_available():
        return Check("GPU", True, "none; every chapter runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not dist.is_nccl_available():
        return Check("GPU", True, f"{len(names)} x {names[0]}; no NCCL, so gloo is used")
    nccl = _dotted(torch.cuda.nccl.version())
    return Check("GPU", True, f"{len(names)} x {names[0]}, NCCL {nccl}")


def check_measuring() -> Check:
    """Say whether `make gpu` can measure everything here; never a failure: it is optional."""
    if not torch.cuda.is_available():
        why = (
            "this torch has no CUDA"
            if torch.version.cuda is None
            else f"torch for CUDA {torch.version.cuda} sees no device; nvidia-smi may say why"
        )
        return Check("make gpu", True, f"not here: {why}")
    properties, lacks = torch.cuda.get_device_properties(0), []
    if properties.total_memory < LEAST_GPU_MEMORY:
        lacks.append(
            f"{properties.total_memory / GIB:.0f} GiB of memory, but the 1.3B model needs "
            f"{LEAST_GPU_MEMORY / GIB:.0f}"
        )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        lacks.append("no bf16 matmuls")
    if (properties.major, properties.minor) < (8, 9):
        lacks.append("no fp8 matmuls, so they are emulated")
    if find_spec("transformers") is None:
        lacks.append("transformers is not installed, so it is left out")
    seen = f"CUDA {torch.version.cuda}, driver {driver_version() or 'unknown'}"
    return Check("make gpu", True, "; ".join([seen, *lacks]))


def check_gloo(timeout_s: float = 60.0, start_s: float = 240.0) -> Check:
    """Start 2 processes that add a number over gloo, as every multi-process cell will.

    To start may take `start_s` on a busy machine; from then on they have `timeout_s` to agree.
    """
    start = time.monotonic()
    try:
        problem = _run_two_ranks(timeout_s, start_s)
    except TimeoutError as error:
        return Check(
            "gloo",
            False,
            f"slow: {error}",
            "the machine is busy; close other programs and try again",
        )
    seconds = time.monotonic() - start
    seen = f"{_slow(seconds)}2 processes agreed in {seconds:.1f} s" if problem is None else problem
    return Check(
        "gloo",
        problem is None,
        seen,
        "two processes on this machine could not connect; allow connections to 127.0.0.1 "
        "(firewall, VPN), unset GLOO_SOCKET_IFNAME and try again",
    )


def check_ranks(timeout_s: float = 240.0) -> Check:
    """Start 4 ranks, as a chapter's cells do; the first start in a notebook takes as long."""
    start = time.monotonic()
    try:
        run(lambda group: None, 4, timeout=timeout_s)
    except (RankError, OSError) as error:
        return Check(
            "ranks",
            False,
            str(error).split("\n")[0],
            "processes could not be started; try again with MINITRON_START=spawn set",
        )
    seconds = time.monotonic() - start
    return Check("ranks", True, f"{_slow(seconds)}4 started in {seconds:.1f} s")


def _slow(seconds: float) -> str:
    return "slow (the machine is busy): " if seconds > SLOW_S else ""


def check_writing(folder: Path | None = None) -> Check:
    folder = folder or Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"minitron")
    except OSError as error:
        return Check(
            "writing",
            False,
            f"{folder}: {error.strerror}",
            "data/ and runs/ are written here; change to a folder of your own",
        )
    return Check("writing", True, str(folder))


def check_disk(folder: Path | None = None) -> Check:
    free = shutil.disk_usage(folder or Path.cwd()).free
    return Check(
        "disk",
        free >= LEAST_DISK,
        f"{free / GIB:.1f} GiB free",
        f"needs {LEAST_DISK / GIB:.0f} GiB; delete old runs/, or work on another disk",
    )


def check_jupyter() -> Check:
    try:
        return Check("JupyterLab", True, importlib.metadata.version("jupyterlab"))
    except importlib.metadata.PackageNotFoundError:
        return Check("JupyterLab", True, "not installed; the chapters need it (`make setup`)")


def add_ranks(rank: int, store: str, timeout_s: float) -> None:
    """Add 1 + 2 over gloo: what each of the two processes of `check_gloo` does."""
    Path(f"{store}.{rank}").touch()  # the imports are done
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=2,
        store=dist.FileStore(store, 2),
        timeout=timedelta(seconds=timeout_s),
    )
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    assert value.item() == 3, f"1 + 2 = {value.item()}"
    dist.destroy_process_group()


def _run_two_ranks(timeout_s: float, start_s: float) -> str | None:
    """Return what went wrong, in one line, or None; TimeoutError if they have not started."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "win32":
        environment.pop("GLOO_SOCKET_IFNAME")  # interfaces have other names there

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        code = "from teaching.doctor import add_ranks; add_ranks({}, {!r}, {})"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code.format(rank, store, timeout_s)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            _await_start(ranks, [Path(f"{store}.{rank}") for rank in range(2)], start_s)
            deadline = time.monotonic() + timeout_s
            errors = [
                rank.communicate(timeout=max(0, deadline - time.monotonic()))[1] for rank in ranks
            ]
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s:.0f} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    failed = [error for rank, error in zip(ranks, errors, strict=True) if rank.returncode != 0]
    return failed[0].strip().splitlines()[-1] if failed else None


def _await_start(ranks: list[subprocess.Popen], started: list[Path], start_s: float) -> None:
    """Wait until each process has made its file or ended; raises TimeoutError."""
    begin, told = time.monotonic(), False
    while not all(
        file.exists() or rank.poll() is not None for rank, file in zip(ranks, started, strict=True)
    ):
        seconds = time.monotonic() - begin
        if seconds > start_s:
            raise TimeoutError(f"2 processes have not started within {start_s:.0f} s")
        if seconds > SLOW_S and not told:
            print(
                f"      gloo: 2 processes are still starting after {seconds:.0f} s, "
                f"waiting up to {start_s:.0f} s",
                file=sys.stderr,
            )
            told = True
        time.sleep(0.05)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
