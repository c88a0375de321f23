"""What ranks start ends with the run, however that ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from minitron.launch import RankError, ranks, run, starting
from tests.environment import finding
from tests.processes import descendants
from tests.tiers import exhaustive, tiered

REPOSITORY = Path(__file__).parents[2]


def start_children(folder: Path) -> None:
    """Start processes of four kinds; each writes its pid into `folder`."""
    script = 'echo $$ > "$0"; exec sleep 1000'
    subprocess.Popen(["sh", "-c", script, folder / "child"])
    subprocess.Popen(
        ["sh", "-c", script, folder / "session"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for kind in ("daemon", "forked daemon"):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if kind == "daemon":
                    os.execvp("sh", ["sh", "-c", script, folder / kind])
                (folder / kind).write_text(f"{os.getpid()}\n")
                time.sleep(1000)
            os._exit(0)
    while len(pids(folder)) < 4:
        time.sleep(0.01)


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.iterdir() if file.read_text().endswith("\n")]


def survivors(folder: Path) -> list[str]:
    """The names of the children of `start_children` that do not end soon."""
    found = {int(file.read_text()): file.name for file in folder.iterdir()}
    assert len(found) == 4
    processes = []
    for pid in found:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    deadline = time.monotonic() + 30
    while processes and time.monotonic() < deadline:
        processes = [process for process in processes if is_alive(process)]
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [found[process.pid] for process in processes]


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


ENDS = {
    "returns": lambda: None,
    "raises": lambda: 1 / 0,
    "hangs": lambda: time.sleep(1000),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leaves": lambda: os._exit(0),
}


@pytest.mark.skipif(sys.platform != "linux", reason="daemons are found on Linux alone")
@pytest.mark.parametrize("end", tiered(ENDS, keep=4))
def test_what_a_rank_has_started_ends_with_it(tmp_path, end):
    def work(group, finish):
        if group.rank() == 1:
            start_children(tmp_path)
            finish()

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test
    try:
        with suppress(RankError):
            run(work, 2, ENDS[end], timeout=3 if end == "hangs" else 30)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert survivors(tmp_path) == []


SCRIPT = """
    import ctypes, signal, sys, time
    from pathlib import Path
    from minitron.launch import run, starting
    from test_descendants import start_children

    def work(group, folder):
        start_children(Path(folder))
        print("ready")
        time.sleep(1000)

    def stuck(group):
        print("ready")
        ctypes.PyDLL(None).sleep(1000)

    starting.PRELOADED.remove(starting.SLOW_TO_IMPORT)  # which no rank needs here
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if len(sys.argv) > 1:
        run(work, 1, sys.argv[1])
    else:
        run(stuck, 1)
    """


def script(tmp_path, *arguments) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A script whose ranks have said that they are ready, and all processes below it."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, file, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=finding(REPOSITORY, Path(__file__).parent),
        start_new_session=True,
    )
    assert process.stdout.readline() == "[rank 0] ready\n"
    return process, descendants(process.pid, at_least=3)  # a server, its rank and a tracker


@pytest.mark.skipif(sys.platform != "linux", reason="daemons are found on Linux alone")
@pytest.mark.parametrize("sent", tiered([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
def test_what_a_rank_has_started_ends_with_the_parent(tmp_path, sent):
    folder = tmp_path / "children"
    folder.mkdir()
    parent, below = script(tmp_path, folder)
    parent.send_signal(sent)
    parent.wait(60)
    assert survivors(folder) == []
    _, alive = psutil.wait_procs(below, timeout=60)  # the server, its rank and the tracker too
    assert not alive


@exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_a_rank_that_keeps_pythons_lock_ends_with_a_killed_parent(tmp_path):
    parent, below = script(tmp_path)
    parent.kill()
    parent.wait(60)
    _, alive = psutil.wait_procs(below, timeout=30)
    for process in alive:
        process.kill()
    assert not alive


def test_a_process_that_computes_for_a_rank_is_no_hang(monkeypatch):
    """Though its rank waits for it, and the others wait for the rank."""

    def work(group):
        if group.rank() == 0:
            loop = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
            subprocess.run([sys.executable, "-c", loop], check=True)
        dist.barrier(group=group)

    monkeypatch.setattr(ranks, "STALL_SECONDS", 1.0)
    run(work, 2)


def test_a_second_interrupt_waits_until_the_ranks_have_ended():
    done = []
    # a shell that has started the tests with & lets them ignore Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), starting.interrupted_later():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["first", "second"]
