import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from minitron.comm.agreement import SINGLE_RANK
from minitron.config import ConfigError
from minitron.launch import RankError, run, starting, torchrun_group
from minitron.launch import ranks as ranks_module
from minitron.launch.starting import context_of, without_main
from tests.environment import finding
from tests.processes import descendants
from tests.tiers import exhaustive

REPOSITORY = Path(__file__).parents[2]

# Rank functions are nested, so that a rank need not import this file and pytest with it.


@pytest.fixture
def impatient(monkeypatch):
    """A stall is found after one second."""
    monkeypatch.setattr(ranks_module, "STALL_SECONDS", 1.0)


def fails(fn, num_ranks, *args, **options) -> RankError:
    with pytest.raises(RankError) as caught:
        run(fn, num_ranks, *args, **options)
    return caught.value


# What goes in and comes out


@pytest.mark.parametrize("size", [1, 3])
def test_results_in_rank_order(size):
    def total(group, x, scale):
        dist.all_reduce(x, group=group)
        return group.rank(), group.size(), x * scale, torch.get_num_threads()

    x = torch.ones(2)
    results = run(total, size, x, 10)
    assert [(rank, n, threads) for rank, n, _, threads in results] == [
        (rank, size, 1) for rank in range(size)
    ]
    assert all(torch.equal(result[2], torch.full((2,), 10.0 * size)) for result in results)
    assert torch.equal(x, torch.ones(2))  # ranks have copies


def test_prints_come_in_rank_order(capsys):
    def speak(group):
        import warnings

        time.sleep(0.05 * (group.size() - group.rank()))  # the last rank speaks first
        print("one")
        print("two", file=sys.stderr)
        os.write(1, b"from C\n")
        warnings.warn("careful", stacklevel=1)
        print("1 %\r2 %\r100 %")
        print("no end of line", end="")

    run(speak, 3)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert [line[:8] for line in lines] == sorted(line[:8] for line in lines)
    of_2 = [line[9:] for line in lines if line.startswith("[rank 2] ")]
    assert of_2[:3] == ["one", "two", "from C"]
    assert any("UserWarning: careful" in line for line in of_2)
    assert of_2[-2:] == ["100 %", "no end of line"]


def test_rank_0_is_heard_while_it_runs(tmp_path):
    heard = tmp_path / "heard"

    class Ear:
        def write(self, text):
            with heard.open("a") as file:
                file.write(text)

        def flush(self):
            pass

    def speak(group):
        print("early")
        while not heard.exists():  # else until the timeout
            time.sleep(0.01)

    before, sys.stdout = sys.stdout, Ear()
    try:
        run(speak, 1)
    finally:
        sys.stdout = before
    assert heard.read_text().startswith("[rank 0] early")


def test_a_chatty_rank_does_not_block(capsys):
    def speak(group):
        for _ in range(20_000):
            print("x" * 40)
        dist.barrier(group=group)

    run(speak, 2)
    assert capsys.readouterr().out.count("\n") == 40_000


def test_the_parents_surroundings_at_the_time_of_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITRON_TEST", "yes")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def look(group):
        return os.environ.get("MINITRON_TEST"), os.getcwd(), sys.path[0]

    assert run(look, 1) == [("yes", str(tmp_path), str(tmp_path))]
    monkeypatch.delenv("MINITRON_TEST")
    assert run(look, 1)[0][0] is None


def test_an_edited_file_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    exercise = tmp_path / "edited_exercise.py"
    exercise.write_text("def answer(group):\n    return 'before'\n")
    import edited_exercise

    assert run(edited_exercise.answer, 1) == ["before"]
    exercise.write_text("def answer(group):\n    return 'after the edit'\n")
    assert run(edited_exercise.answer, 1) == ["after the edit"]


LOADED = "import sys; sys.exit('minitron.launch.rank_process' not in sys.modules)"


def test_the_server_has_loaded_the_launcher():
    """Or every rank would: most of what an empty one computes."""
    with without_main():
        process = context_of("forkserver").Process(target=exec, args=(LOADED,))
        process.start()
    process.join()
    assert process.exitcode == 0


@exhaustive
def test_another_clone_in_the_current_folder_is_not_taken(tmp_path):
    (tmp_path / "minitron").mkdir()
    (tmp_path / "minitron" / "__init__.py").write_text("raise RuntimeError('the other clone')")
    script = tmp_path / "scripts" / "where.py"
    script.parent.mkdir()
    script.write_text(
        "from minitron.launch import run\n"
        "def where(group):\n"
        "    import minitron\n"
        "    return minitron.__file__\n"
        "print(*run(where, 1))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=finding(REPOSITORY),
        timeout=120,
    )
    assert done.stdout == f"{REPOSITORY / 'minitron' / '__init__.py'}\n", done.stderr


@exhaustive
def test_spawn(monkeypatch):
    monkeypatch.setenv("MINITRON_START", "spawn")
    assert run(lambda group: group.rank(), 1) == [0]


@exhaustive
def test_spawn_where_the_server_does_not_start(monkeypatch):
    def broken(*_):
        raise EOFError

    monkeypatch.setattr("multiprocessing.popen_forkserver.Popen._launch", broken)
    assert run(lambda group: group.rank(), 1) == [0]


# Mistakes of the caller, in one line


@pytest.mark.parametrize(("num_ranks", "message"), [(0, "num_ranks = 0: must be at least 1")])
def test_no_ranks(num_ranks, message):
    with pytest.raises(ConfigError, match=message):
        run(print, num_ranks)


def test_an_argument_that_cannot_be_sent():
    with pytest.raises(ConfigError, match="<lambda> or an argument cannot be sent.*generator"):
        run(lambda group, x: x, 1, (i for i in range(3)))


def test_a_result_that_cannot_be_sent():
    error = fails(lambda group: (i for i in range(3)), 1)
    assert str(error).startswith(
        "rank 0 returned a generator, which cannot be sent to the parent: cannot pickle"
    )


def test_a_run_within_a_rank():
    error = fails(lambda group: run(print, 1), 1)
    assert str(error).startswith("rank 0 raised ConfigError: run() was called within a rank")


# Failures


def test_an_exception_is_shown_with_its_source(capsys):
    def fail(group):
        print("so far")
        if group.rank() == 1:
            raise ValueError("no such thing")
        dist.barrier(group=group)

    error = fails(fail, 3)
    message = str(error)
    assert message.startswith("rank 1 raised ValueError: no such thing\n")
    assert '\n    raise ValueError("no such thing")\n' in message
    assert message.endswith("\nValueError: no such thing")
    assert "rank_process" not in message
    assert "ranks 0 and 2 wait in barrier #0" in message
    assert "test_launch.py line" in message and "dist.barrier(group=group)" in message
    assert capsys.readouterr().out == "".join(f"[rank {rank}] so far\n" for rank in range(3))

    failure = error.failures[1]
    assert (failure.error, failure.message) == ("ValueError", "no such thing")
    assert failure.frames[0].function == failure.frames[-1].function == "fail"
    assert failure.frames[-1].source == 'raise ValueError("no such thing")'
    assert sorted(error.failures) == [0, 1, 2]


def test_the_first_failure_in_full_the_others_in_a_line():
    def fail(group):
        time.sleep(0.1 * (2 - group.rank()))
        raise KeyError(group.rank())

    message = str(fails(fail, 3))
    assert message.startswith("rank 2 raised KeyError: 2\n")
    assert "  rank 1 raised KeyError: 1\n" in message
    assert message.count("Traceback") == 1
    assert message.endswith("KeyError: 2")


def test_a_wrong_number_of_arguments():
    def hello(group):
        pass

    message = str(fails(hello, 2, 5))
    assert "Traceback" not in message and "rank_process" not in message
    assert message.endswith("\n\nTypeError: " + message.split("\n")[0].partition("Error: ")[2])


def test_an_exception_that_cannot_be_shown():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail(group):
        raise Silent

    message = str(fails(fail, 1))
    assert message.startswith("rank 0 raised Silent: <exception str() failed>\n")
    assert "raise Silent" in message


def test_sys_exit_is_a_failure():
    assert str(fails(lambda group: sys.exit(3), 1)).startswith("rank 0 raised SystemExit: 3")


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), 40), "was killed by signal 40"),  # one without a name
        (lambda: os._exit(0), "exited with code 0 before it returned"),
        (lambda: os._exit(3), "exited with code 3 before it returned"),
    ],
)
def test_a_rank_that_dies(capsys, end, text):
    def die(group):
        if group.rank() == 2:
            print("last words", end="")
            end()
        dist.all_reduce(torch.ones(4), group=group)

    error = fails(die, 3)
    first, others = str(error).split("\n")
    assert first == f"rank 2 {text}"
    assert others.startswith("  ranks 0 and 1 wait in all_reduce #0 (16 B, axis world), test_")
    assert others.endswith("dist.all_reduce(torch.ones(4), group=group)")
    assert capsys.readouterr().out == "[rank 2] last words\n"


def test_a_rank_that_left_early(impatient):
    def leave(group):
        if group.rank() != 2:
            dist.all_reduce(torch.ones(4), group=group)

    for watch, call in ((True, "all_reduce #0 (16 B, axis world)"), (False, "all_reduce")):
        error = fails(leave, 3, watch=watch)
        headline, waiting, finished = str(error).split("\n")
        assert headline == "a hang: no rank has moved for 1 s"
        assert waiting.startswith(f"  ranks 0 and 1 wait in {call}, test_launch.py line ")
        assert finished == "  rank 2 has finished"


def test_a_rank_that_sleeps(impatient):
    def sleep(group):
        if group.rank() == 1:
            time.sleep(100)
        dist.all_reduce(torch.ones(4), async_op=True, group=group).wait()

    _, waiting, sleeping = str(fails(sleep, 3)).split("\n")
    assert waiting.startswith(
        "  ranks 0 and 2 wait for all_reduce #0 (16 B, axis world) or an earlier call, test_launch"
    )
    assert sleeping.startswith("  rank 1 is at test_launch.py line ")
    assert sleeping.endswith(": time.sleep(100)")


def test_sleeping_or_computing_is_no_stall(impatient):
    def work(group):
        if group.rank() == 0:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass
        dist.barrier(group=group)
        time.sleep(1.5)

    run(work, 2)


@exhaustive
@pytest.mark.parametrize(("seconds", "timeout"), [(3, 20), (100, 3)])
def test_a_note_while_some_wait_for_one_that_computes(monkeypatch, capsys, seconds, timeout):
    def work(group):
        end = time.monotonic() + seconds
        while group.rank() == 1 and time.monotonic() < end:
            pass
        dist.barrier(group=group)

    monkeypatch.setattr(ranks_module, "NOTE_SECONDS", 1.0)
    with pytest.raises(RankError) if seconds > timeout else nullcontext():
        run(work, 3, timeout=timeout)
    headline, waiting, computing = capsys.readouterr().out.splitlines()
    assert headline == f"no call for 1 s, still waiting (timeout {timeout} s)"
    assert waiting.startswith("  ranks 0 and 2 wait in barrier #0 (0 B, axis world), test_launch.")
    assert computing.startswith("  rank 1 is at test_launch.py line ")


@exhaustive
def test_no_note_while_all_compute(monkeypatch, capsys):
    def work(group):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass

    monkeypatch.setattr(ranks_module, "NOTE_SECONDS", 0.5)
    run(work, 2)
    assert capsys.readouterr().out == ""


def test_an_endless_loop():
    def loop(group):
        print("before")
        while group.rank() == 0:
            pass
        dist.barrier(group=group)

    headline, looping, waiting = str(fails(loop, 2, timeout=2)).split("\n")
    assert headline == "not finished after 2 s (the timeout)"
    assert looping.startswith("  rank 0 is at test_launch.py line ")
    assert waiting.startswith("  rank 1 waits in barrier #0")


def test_a_rank_that_can_answer_is_asked_without_a_signal(impatient, monkeypatch):
    """Whoever answers a signal reads frames that the main thread may be changing: a crash."""

    def loop_or_wait(group):
        while group.rank() == 0:
            time.sleep(1e-5)
        dist.barrier(group=group)

    monkeypatch.setattr("minitron.launch.rank_report.ASK", None)
    _, sleeping, waiting = str(fails(loop_or_wait, 2, timeout=3)).split("\n")
    assert sleeping.endswith((": time.sleep(1e-5)", ": while group.rank() == 0:"))
    assert waiting.startswith("  rank 1 waits in barrier #0") and waiting.endswith("(group=group)")


@exhaustive
@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])  # the second keeps Python's lock
def test_looking_at_a_rank_does_not_wake_it(impatient, library):
    """C's sleep ends early when a signal comes, and would be taken for over."""

    def sleep(group):
        import ctypes

        print("asleep")
        return getattr(ctypes, library)(None).sleep(1000)

    headline, sleeping = str(fails(sleep, 1, timeout=3)).split("\n")
    assert headline == "not finished after 3 s (the timeout)"
    assert sleeping.startswith("  rank 0 is at test_launch.py line ")
    assert sleeping.endswith("(None).sleep(1000)")


@exhaustive
@pytest.mark.parametrize("how", ["thread", "process"])
def test_waiting_for_a_thread_or_a_process_is_no_hang(impatient, how):
    def wait(group):
        import subprocess
        import threading

        dist.barrier(group=group)
        if how == "thread":
            threading.Event().wait(2.5)
        else:
            process = subprocess.Popen(["sleep", "2.5"])
            process.wait()

    run(wait, 2)


@exhaustive
def test_a_note_does_not_wake_a_rank(monkeypatch, capsys):
    def work(group):
        import ctypes

        dist.barrier(group=group)
        if group.rank() == 0:
            return ctypes.CDLL(None).sleep(3)
        if group.rank() == 1:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                pass
        dist.all_reduce(torch.ones(1), group=dist.new_group([1, 2], use_local_synchronization=True))

    monkeypatch.setattr(ranks_module, "NOTE_SECONDS", 1.0)
    assert run(work, 3)[0] == 0  # seconds that were left to sleep
    assert "no call for 1 s" in capsys.readouterr().out


def test_different_collectives_are_named_before_they_hang(monkeypatch):
    monkeypatch.setattr(ranks_module, "STALL_SECONDS", math.inf)

    def mismatch(group):
        dist.all_reduce(torch.ones(10), group=group)
        if group.rank() == 2:
            dist.all_reduce(torch.ones(1000), group=group)
        else:
            dist.all_gather([torch.ones(250) for _ in range(4)], torch.ones(250), group=group)

    message = str(fails(mismatch, 4))
    headline = message.split("\n")[0]
    assert headline.startswith("the ranks do not match: rank")
    assert "all_reduce #1" in headline and "all_gather #1" in headline
    assert "4.0 kB, axis world" in headline


def test_different_reductions_are_a_mismatch():
    def mismatch(group):
        kind = dist.ReduceOp.MAX if group.rank() else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(4), op=kind, group=group)

    headline = str(fails(mismatch, 2)).split("\n")[0]
    assert headline.startswith("the ranks do not match: rank ")
    assert "all_reduce #0 (sum" in headline and "all_reduce #0 (max" in headline


@pytest.mark.parametrize("groups", [((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (0, 1))])
def test_a_crossed_order_over_two_groups_is_a_mismatch(groups):
    """gloo would complete it, by luck: with NCCL it can deadlock."""

    def cross(group):
        tensors = [torch.ones(4), torch.ones(8)]
        pairs = list(zip(tensors, [dist.new_group(ranks) for ranks in groups], strict=True))
        if group.rank() == 1:
            pairs.reverse()
        mine = [(x, g) for x, g in pairs if g is not dist.GroupMember.NON_GROUP_MEMBER]
        works = [dist.all_reduce(x, group=g, async_op=True) for x, g in mine]
        for work in works:
            work.wait()

    headline = str(fails(cross, 3)).split("\n")[0]
    assert headline.startswith("the ranks do not match: rank ")
    assert "all_reduce #0 (16 B, axis group 1)" in headline
    assert "all_reduce #0 (32 B, axis group 2)" in headline
    assert "the same order, or they can deadlock with NCCL" in headline


def test_tags_that_differ_are_shown(impatient):
    def talk(group):
        if group.rank() == 0:
            dist.send(torch.ones(4), group_dst=1, group=group, tag=1)
        else:
            dist.recv(torch.empty(4), group_src=0, group=group, tag=2)

    _, sending, receiving = str(fails(talk, 2)).split("\n")
    assert sending.startswith("  rank 0 waits in send #0 to rank 1, tag 1 (16 B, axis world)")
    assert receiving.startswith("  rank 1 waits in recv #0 from rank 0, tag 2 (16 B, axis world)")


def test_a_receive_that_nobody_sends(impatient):
    def receive(group):
        if group.rank() == 0:
            dist.recv(torch.empty(4), group_src=1, group=group)

    _, waiting, finished = str(fails(receive, 2)).split("\n")
    assert waiting.startswith("  rank 0 waits in recv #0 from rank 1 (16 B, axis world), test_laun")
    assert finished == "  rank 1 has finished"


def test_a_run_after_each_failure():
    def fail(group):
        os._exit(1)

    fails(fail, 2)
    assert run(lambda group: group.rank(), 2) == [0, 1]


# Leaving nothing behind

SCRIPT = """
    import signal
    import time
    import psutil
    from minitron.launch import run

    def work(group):
        print(f"ready", flush=True)
        time.sleep(100)

    # As in a terminal: a shell that has started the tests with & lets them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("main", flush=True)
    run(work, 2)
    """


def start_script(tmp_path, text: str) -> subprocess.Popen:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=finding(REPOSITORY),
        start_new_session=True,
    )


def until_ranks_speak(script: subprocess.Popen) -> list[psutil.Process]:
    assert script.stdout.readline() == "main\n"
    assert script.stdout.readline() == "[rank 0] ready\n"
    return descendants(script.pid, at_least=3)  # the server, its ranks, multiprocessing's tracker


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=60)
    return not alive


@exhaustive  # test_descendants has the parent that is killed, test_launch_in_kernel has Ctrl-C
def test_a_killed_parent_leaves_no_process(tmp_path):
    script = start_script(tmp_path, SCRIPT)
    processes = until_ranks_speak(script)
    script.kill()
    script.communicate(timeout=60)
    assert gone(processes)


@exhaustive
def test_ctrl_c_in_a_terminal(tmp_path):
    """It reaches every process of the terminal; the script ends as any other, in silence."""
    script = start_script(tmp_path, SCRIPT)
    processes = until_ranks_speak(script)
    os.killpg(script.pid, signal.SIGINT)
    output, errors = script.communicate(timeout=60)
    assert output == "[rank 1] ready\n"
    assert errors.count("Traceback") == 1 and errors.endswith("KeyboardInterrupt\n")
    assert errors.count('  File "') == 2  # the script's line and run()
    assert gone(processes)


# Under torchrun


def torchrun(tmp_path, num_ranks: int, text: str) -> subprocess.CompletedProcess:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(num_ranks),
            path,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=finding(REPOSITORY, OMP_NUM_THREADS="1"),
    )


IN_TORCHRUN = """
        import os
        from minitron.launch import run, torchrun_group
        from minitron.config import ConfigError

        def pid(group, scale):
            return group.rank() * scale, os.getpid()

        first, again = run(pid, 2, 10), run(pid, 2, 10)
        assert first == again and [rank for rank, _ in first] == [0, 10]
        assert os.getpid() in [pid for _, pid in first]
        with torchrun_group() as group:
            assert group.size() == 2 and run(pid, 2, 1)[1][0] == 1
        try:
            run(pid, 4, 10)
        except ConfigError as error:
            assert str(error).startswith("run() was asked for 4 ranks, torchrun has started 2: "
                                         "start it with --nproc-per-node 4")
        else:
            raise AssertionError("4 ranks were not refused")
        """


@exhaustive  # its agent and its ranks import torch anew; tests/train has training under torchrun
def test_torchrun(tmp_path):
    finished = torchrun(tmp_path, 2, IN_TORCHRUN)
    assert finished.returncode == 0, finished.stderr


def test_processes_that_torchrun_has_started():
    """The function runs in these, as often as it is asked to."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its agent's
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = []
    for rank in "01":
        own = f"import os; os.environ.update({variables | {'RANK': rank, 'LOCAL_RANK': rank}})"
        code = own + textwrap.dedent(IN_TORCHRUN)
        with without_main():
            ranks.append(context_of("forkserver").Process(target=exec, args=(code, {})))
            ranks[-1].start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0]


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE = 1 is set, but MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}, "but MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "many", "MASTER_PORT": "1", "MASTER_ADDR": "a"}, "is 'many'"),
    ],
    ids=str,
)
def test_a_stranger_s_variables_are_one_line(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{said}.*unset RANK WORLD_SIZE"):
        run(print, 2)


def test_a_world_size_without_a_rank_is_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match="WORLD_SIZE = 2 is set, but RANK is not"),
        torchrun_group(),
    ):
        pass


def test_no_group_without_torchrun(monkeypatch):
    with torchrun_group() as group:
        assert group is SINGLE_RANK
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with torchrun_group() as group:
        assert group is SINGLE_RANK


# What the server has imported


def test_the_server_imports_the_libraries_that_its_caller_has_imported_and_not_its_modules():
    import safetensors  # noqa: F401

    imported = starting._public_modules_of(starting.LIBRARIES)
    assert {"torch.nn.functional", "safetensors"} <= set(imported) <= sys.modules.keys()
    assert {name.split(".")[0] for name in imported} <= set(starting.LIBRARIES)


@exhaustive
def test_a_rank_finds_the_libraries_that_its_caller_has_imported_and_not_its_modules():
    code = textwrap.dedent("""
        import sys
        import matplotlib.figure, minitron.plan
        from minitron.launch import run

        def imported(group):
            names = "matplotlib.figure", "minitron.plan"
            return [name for name in names if name in sys.modules]

        print(run(imported, 2))
    """)
    result = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert result.stdout.strip() == str(2 * [["matplotlib.figure"]]), result.stderr
