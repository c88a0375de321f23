"""What a learner sees in JupyterLab: the four accidents and an interrupt, in a real kernel."""

import re

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

SECONDS = 300
"""For a cell. What it shows says what it waited for; how long that took, how busy a machine is."""

IMPORTS = """
import os, signal, time
import torch
import psutil
import torch.distributed as dist
from minitron.launch import run, starting

starting.PRELOADED.remove(starting.SLOW_TO_IMPORT)  # which no rank needs here

def until_others_wait():
    me, quiet_looks = psutil.Process(), 0
    while quiet_looks < 5:
        others = [rank.status() for rank in me.parent().children() if rank.pid != me.pid]
        quiet_looks = 0 if psutil.STATUS_RUNNING in others else quiet_looks + 1
        time.sleep(0.02)
"""

USABLE = """
def total(group):
    x = torch.tensor([group.rank()])
    dist.all_reduce(x, group=group)
    print("adding")
    return x.item()

run(total, 4)
"""


class Notebook:
    """A kernel, cell by cell."""

    def __init__(self):
        self.kernel, self.client = start_new_kernel()

    def run(self, cell: str, at_output=None) -> tuple[str, str]:
        """Returns what the cell printed or showed, and its traceback as a notebook shows it."""
        shown, traceback = [], []

        def keep(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
                if at_output is not None:
                    at_output()
            elif message["msg_type"] == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                traceback.append("\n".join(content["traceback"]))

        self.client.execute_interactive(cell.strip(), timeout=SECONDS, output_hook=keep)
        return "".join(shown), re.sub(r"\x1b\[[0-9;]*m", "", "".join(traceback))

    def num_processes(self) -> int:
        return len(psutil.Process(self.kernel.provisioner.pid).children(recursive=True))


@pytest.fixture(scope="module")
def notebook():
    notebook = Notebook()
    try:
        notebook.run(IMPORTS)
        notebook.run(USABLE)  # the server starts
        yield notebook
    finally:
        notebook.client.stop_channels()
        notebook.kernel.shutdown_kernel(now=True)


@pytest.fixture(autouse=True)
def usable_afterwards(notebook):
    processes = notebook.num_processes()
    yield
    shown, traceback = notebook.run(USABLE)
    assert traceback == ""
    assert shown == "".join(f"[rank {rank}] adding\n" for rank in range(4)) + "[6, 6, 6, 6]"
    assert notebook.num_processes() == processes


def message_of(traceback: str) -> list[str]:
    """The lines of what a notebook shows: the message alone, nothing of the launcher."""
    assert traceback.startswith("RankError: ")
    return traceback.removeprefix("RankError: ").split("\n")


def test_an_exception(notebook):
    shown, traceback = notebook.run("""
def double(x):
    raise ValueError(f"cannot double {x}")

def fail(group):
    print("starting")
    if group.rank() == 2:
        until_others_wait()
        double(21)
    dist.barrier(group=group)

run(fail, 4)
""")
    assert shown == "".join(f"[rank {rank}] starting\n" for rank in range(4))
    assert message_of(traceback) == [
        "rank 2 raised ValueError: cannot double 21",
        "  ranks 0, 1 and 3 wait in barrier #0 (0 B, axis world), "
        "cell line 9: dist.barrier(group=group)",
        "",
        "Traceback (most recent call last):",
        "  Cell, line 8, in fail",
        "    double(21)",
        "  Cell, line 2, in double",
        '    raise ValueError(f"cannot double {x}")',
        "ValueError: cannot double 21",
    ]


def test_a_rank_is_killed(notebook):
    _, traceback = notebook.run("""
def fail(group):
    if group.rank() == 2:
        until_others_wait()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4), group=group)

run(fail, 4)
""")
    assert message_of(traceback) == [
        "rank 2 was killed by SIGKILL",
        "  ranks 0, 1 and 3 wait in all_reduce #0 (16 B, axis world), "
        "cell line 5: dist.all_reduce(torch.ones(4), group=group)",
    ]


def test_a_rank_hangs(notebook):
    _, traceback = notebook.run("""
def fail(group):
    if group.rank() == 2:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4), group=group)

run(fail, 4)
""")
    assert message_of(traceback) == [
        "a hang: no rank has moved for 5 s",
        "  ranks 0, 1 and 3 wait in all_reduce #0 (16 B, axis world), "
        "cell line 4: dist.all_reduce(torch.ones(4), group=group)",
        "  rank 2 is at cell line 3: time.sleep(1000)",
    ]


def test_a_mismatched_collective(notebook):
    _, traceback = notebook.run("""
def fail(group):
    x = torch.ones(1_050_000)
    if group.rank() == 2:
        dist.all_reduce(x, group=group)
    else:
        dist.all_gather(list(x.chunk(4)), x.chunk(4)[0].clone(), group=group)

run(fail, 4)
""")
    headline, *places = message_of(traceback)
    assert headline.startswith("the ranks do not match: rank")  # before it becomes a hang
    assert "all_reduce #0" in headline and "all_gather #0" in headline
    assert "(4.2 MB, axis world)" in headline
    assert any(
        "rank 2 waits in all_reduce #0 (4.2 MB, axis world), cell line 4" in line for line in places
    )


def test_an_interrupt(notebook):
    interrupted = []

    def interrupt():
        if not interrupted:
            interrupted.append(True)
            notebook.kernel.interrupt_kernel()

    shown, traceback = notebook.run(
        """
def stay(group):
    print("here")
    dist.barrier(group=group)
    time.sleep(1000)

run(stay, 4)
""",
        at_output=interrupt,
    )
    assert shown == "".join(f"[rank {rank}] here\n" for rank in range(4))
    assert traceback.rstrip().endswith("KeyboardInterrupt:")
    assert "run(stay, 4)" in traceback
    assert not re.search(r"ranks\.py|selectors|multiprocessing", traceback)
