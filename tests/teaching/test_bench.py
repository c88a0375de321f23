"""The bench: what crosses from it, what becomes of it, and how much time it has."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from minitron.launch import RankError, run, run_apart
from minitron.measure.ledger import Call
from teaching import graders
from teaching.exercises import known
from teaching.graders import Mistake, bench, plain
from teaching.graders.bench import TimeLimit
from teaching.graders.guard import Guard

CALL = Call(0, "send", "dp", torch.float32, 8, 8, 0, "", 1, 2, 0.5)
PLAIN = [
    None,
    True,
    3,
    -(10**30),
    0.1,
    float("inf"),
    -0.0,
    1 + 2j,
    "ä\ud800",
    b"\x00\xff",
    [1, [2.0]],
    (1, (2,)),
    {"a": 1, 2: (None,)},
    {1, 2},
    frozenset({3}),
    range(3, 9, 2),
    torch.bfloat16,
    torch.Size([2, 3]),
    CALL,
    {"calls": [(CALL,)]},
]
TENSORS = [
    torch.arange(6).reshape(2, 3),
    torch.randn(3, 4).T,
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.randn(4).to(torch.float8_e4m3fn),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.empty(2, 3, device="meta"),
    nn.Parameter(torch.ones(2)),
]


class Own(float):
    pass


@dataclass
class Elsewhere:
    """A dataclass of a module that is no grader's."""

    x: int = 1


Elsewhere.__module__ = "exercises.ch01_single_gpu"
REFUSED = [
    Own(1.0),
    Elsewhere(),
    object(),
    lambda: 0,
    nn.Linear(1, 1),
    [Own(1.0)],
    torch.ones(2).to_sparse(),
    iter([]),
    int,
    Own,
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_cross_as_they_are(value):
    back = plain.decode(plain.encode(value))
    assert type(back) is type(value) and back == value and repr(back) == repr(value)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
def test_tensors_cross_as_they_are(tensor):
    back = plain.decode(plain.encode((tensor, 1)))[0]
    assert type(back) is torch.Tensor and back.dtype == tensor.dtype
    assert back.shape == tensor.shape and back.device == tensor.device
    assert back.requires_grad == tensor.requires_grad
    assert tensor.is_meta or torch.equal(
        back.double() if tensor.dtype.itemsize == 1 else back,
        tensor.double() if tensor.dtype.itemsize == 1 else tensor,
    )


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_other_objects_are_refused_by_name(value):
    with pytest.raises(plain.NotPlain, match=r"object of type|tensor of layout"):
        plain.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04.",
        b"[" * 10**6,
        b'["tensor", "float32", [9], false, false]\n',
        b'["tensor", "load", [1], false, false]\n',
        b'["record", "os", "system", ["true"]]\n',
        b'["record", "minitron.config", "require", [false, "x"]]\n',
        b'["no_such", 1]\n',
        b'{"a": 1}\n',
        b'["tensor", "float32", [1000000000000], false, false]\n',
    ],
    ids=range(10),
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises(plain.NotPlain):
        plain.decode(data)


# Time


class Machine:
    """A clock and a process to look at, both under the test's hand."""

    def __init__(self, monkeypatch):
        self.seconds, self.cpu, self.wants = 0.0, 0.0, True
        monkeypatch.setattr(bench, "cpu_seconds", lambda pid: self.cpu)
        monkeypatch.setattr(bench, "wants_cpu", lambda pid: self.wants)
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)

    def look(self, patience, looks, cpu_per_look):
        for _ in range(looks):
            self.seconds += bench.LOOK_SECONDS
            self.cpu += cpu_per_look
            why = patience.lost()
            if why:
                return why
        return None


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_a_busy_machine_makes_nobody_late(machine):
    patience = TimeLimit(1, 20.0)
    assert machine.look(patience, 1900, 0.01) is None  # 190 s, of which it got a tenth
    assert "20 s of computing" in machine.look(patience, 1900, 0.1)


def test_one_that_gets_no_cpu_at_all_is_not_asleep(machine):
    assert machine.look(TimeLimit(1, 20.0), 1900, 0.0) is None


def test_sleep_is_told_soon_and_a_starved_process_late(machine):
    machine.wants = False
    assert "computed nothing for 5 s" in machine.look(TimeLimit(1, 20.0), 60, 0.0)
    machine.wants = True
    assert "after 200 s" in machine.look(TimeLimit(1, 20.0), 2100, 0.0)


def compute_for(group, seconds):
    start = time.process_time()
    while time.process_time() < start + seconds:
        pass
    return b"done"


def test_ranks_have_a_limit_of_cpu_time():
    assert run_apart(compute_for, 1, 0.1, cpu_seconds=5.0) == [b"done"]
    with pytest.raises(RankError, match=r"not finished after 1 s of CPU time"):
        run_apart(compute_for, 1, 60.0, cpu_seconds=1.0)


# What becomes of a bench


def grade(tmp_path, body):
    exercise = known()["1.4"]
    (tmp_path / "exercises").mkdir()
    path = tmp_path / exercise.file
    path.write_text(f"import time\n\ndef plan_batch(*sizes):\n    {body}\n")
    return graders.grade_file(exercise, path, limit=2.0)


def test_a_loop_and_a_sleep_are_told_with_their_line(tmp_path):
    verdict = grade(tmp_path, "time.sleep(1000)")
    assert "computed nothing for 5 s, at line 4 of ch01_single_gpu.py" in verdict.seen


def test_what_a_function_raises_keeps_its_kind_and_its_lines(tmp_path):
    verdict = grade(tmp_path, "raise KeyError('a')")
    assert verdict.seen.endswith("KeyError: 'a'") and "line 4, in plan_batch" in verdict.seen


def test_a_trial_s_mistake_is_the_grader_s():
    mistake = bench.Raised(graders.bench.Failure("", "Mistake"), ("Exception",), ("seen", "why"))
    with pytest.raises(Mistake, match="seen"):
        bench.raise_again(plain.decode(plain.encode(mistake)))


def temporary_folder_under_guard(group):
    tempfile.tempdir = None
    Guard(known()["1.2"], Path("exercises/ch01_single_gpu.py"))
    return tempfile.tempdir


def test_a_first_temporary_file_is_not_the_learners_writing():
    """Python tries the folder with a file of its own, once in a process: before the answer runs."""
    (folder,) = run(temporary_folder_under_guard, 1)  # a guard stays for the process's life
    assert folder is not None
