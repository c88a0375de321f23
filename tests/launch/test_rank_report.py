"""Where a rank is, in words that its user can use."""

import torch.distributed as dist

from minitron.launch import rank_report
from minitron.launch.rank_process import Frame
from minitron.launch.rank_report import PACKAGE, describe, is_hang, parse_stack, report

C10D = Frame(dist.distributed_c10d.__file__, 2169, "init_process_group", "store.get(key)")
LEDGER = Frame(str(PACKAGE / "measure" / "ledger.py"), 218, "__enter__", "super().__enter__()")
TORCH = Frame(dist.distributed_c10d.__file__, 12, "all_reduce", "work.wait()")


def test_a_rank_that_has_not_come_to_its_function():
    assert describe([C10D], None) == "is starting"
    assert describe([LEDGER, C10D], None) == "is starting"


def test_who_waits_for_one_that_is_still_starting_does_not_hang():
    """On a busy machine importing takes longer than a rank may stand still."""
    mine = Frame("/home/me/script.py", 2, "f", "step()")
    assert is_hang([([mine, TORCH], "barrier #0"), ([mine], None)])
    assert is_hang([([mine, TORCH], "barrier #0"), ([C10D], "barrier #0")])
    assert not is_hang([([mine, TORCH], "barrier #0"), ([C10D], None)])
    assert not is_hang([([mine, TORCH], "barrier #0"), ([], None)])


def test_the_users_line_counts():
    for file in ("<stdin>", "<string>", "/home/me/script.py"):
        mine = Frame(file, 6, "f", "step()")
        name = file.rpartition("/")[2]
        assert describe([mine, LEDGER], None) == f"is at {name} line 6: step()"
        assert describe([mine, TORCH, LEDGER], "all_reduce #0") == (
            f"waits in all_reduce #0, {name} line 6: step()"
        )


def test_an_installed_package_is_not_starting_for_ever(monkeypatch):
    """It lies among the libraries then."""
    monkeypatch.setattr(rank_report, "SITE_PACKAGES", PACKAGE.parent)
    file = PACKAGE.parent / "torch" / "distributed" / "distributed_c10d.py"
    torch = Frame(str(file), 12, "all_reduce", "work.wait()")
    ours = Frame(str(PACKAGE / "train.py"), 7, "train", "step()")
    assert describe([ours, torch], None) == "waits in all_reduce, train.py line 7: step()"


def test_ranks_of_the_same_text_share_a_line():
    assert report("a hang", {0: "waits for it", 1: "is starting", 2: "waits for it"}) == (
        "a hang\n  ranks 0 and 2 wait for it\n  rank 1 is starting"
    )


def test_ranks_that_do_not_answer():
    assert report("a hang", {0: "does not answer", 1: "does not answer"}) == (
        "a hang\n  ranks 0 and 1 do not answer"
    )


def test_only_the_main_threads_frames_count():
    """Python shows the newest thread first, and 100 at most."""
    thread = 'Thread 0x1 (most recent call first):\n  File "{}.py", line 3 in work\n'
    assert [
        frame.file for frame in parse_stack(thread.format("other") + thread.format("main"))
    ] == ["main.py"]
    assert parse_stack(thread.format("other") + "...\n") == []
