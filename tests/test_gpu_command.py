"""`benchmarks/gpu.py` on a CPU, with tiny sizes: that the command a GPU gets once cannot rot.

One run of each kind is shared by all tests of it. What needs CUDA is tested in pieces: how a trace
of its allocator and of its streams is read.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minitron.comm.agreement import SINGLE_RANK
from minitron.measure.record import load
from teaching.lab import recorded
from tests.tiers import exhaustive

ROOT = Path(__file__).parents[1]
pytestmark = exhaustive
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--tiny"]
PARTS = ("mfu", "memory", "kernels", "precision", "overlap", "plan")
MISSING = ("tyro", "tqdm", "matplotlib", "tokenizers", "transformers")
BLOCKED = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {MISSING}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {MISSING} else found(name, *a)
"""


def gpu(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The records of all parts, measured without what a bare GPU machine may lack."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "sitecustomize.py").write_text(BLOCKED)
    done = gpu("--out", str(folder), PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    for part in PARTS:
        assert f"\n{part} " in done.stdout.split("records in")[1], "the table names each part"
    return folder


def record(out: Path, part: str):
    [path] = out.glob(f"*/{part}.json")
    return load(path)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_leaves_a_record_of_this_machine(out, part):
    found = record(out, part)
    assert found.part == part and found.tiny and found.rows and found.targets == []
    assert found.conditions.kind == "cpu" and "--tiny" in found.conditions.command
    assert len({row["case"] for row in found.rows}) == len(found.rows), "cases have names"


def test_it_measures_both_sides_eager_and_compiled(out):
    rows = record(out, "mfu").rows
    sides = {(row["side"], row["compiled"]) for row in rows}
    assert sides == {
        (side, compiled)
        for side in ("ours", "plain", "ours, bf16 weights")
        for compiled in (False, True)
    }
    assert all(
        row["tokens_per_second"] * row["seconds"]
        == pytest.approx(row["sequences"] * row["sequence_length"])
        for row in rows
    )
    assert "transformers is not installed: it has no rows" in record(out, "mfu").notes


def test_meter_and_dry_run_agree_with_what_was_held(out):
    rows = {row["recompute"]: row for row in record(out, "memory").rows}
    for row in rows.values():
        assert row["meter_bytes"] == row["allocated_bytes"]
        assert row["dry_run_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.02)
    assert rows["full"]["meter_activation"] < rows["none"]["meter_activation"]


def test_kernels_count_what_they_are_divided_by(out):
    rows = record(out, "kernels").rows
    assert {row["kind"] for row in rows} == {"matmul", "attention"}
    matmul = next(row for row in rows if row["case"] == "matmul 16 x 64 x 64")
    assert matmul["flops"] == 2 * 16 * 64 * 64
    assert matmul["bytes"] == 2 * (16 * 64 + 64 * 64 + 16 * 64)
    assert matmul["roof"] <= matmul["peak"]


def test_every_precision_trains_the_same_steps(out):
    rows = {row["case"]: row for row in record(out, "precision").rows}
    assert {"fp32", "tf32", "bf16-autocast", "fp16", "fp8", "torch.amp, bf16"} <= rows.keys()
    for row in rows.values():
        assert row["losses"][0] == pytest.approx(rows["fp32"]["losses"][0], rel=1e-2)
        assert len(row["losses"]) == row["steps"]
    assert rows["fp32"]["losses"] == pytest.approx(rows["torch, fp32"]["losses"], rel=1e-5)


def test_a_trace_names_the_phases_and_the_gathers(out):
    rows = {row["case"]: row for row in record(out, "overlap").rows}
    plain, sharded = rows["plain step"], rows["FSDP step"]
    assert 0 < plain["forward_end_ms"] < plain["update_start_ms"] < plain["update_end_ms"]
    assert {"forward", "backward"} <= set(plain["range"])
    assert any(name.startswith("ZeRO-3 gather") for name in sharded["range"])
    for row in rows.values():
        [trace] = out.glob(f"*/{row['trace']}")
        assert trace.stat().st_size > 0


def test_the_plan_estimates_what_the_other_parts_have_measured(out):
    rows = record(out, "plan").rows
    measured = {row["case"]: row for row in record(out, "mfu").rows}
    of_steps = [row for row in rows if "measured_seconds" in row]
    assert {row["of"] for row in of_steps} == {
        name
        for name, row in measured.items()
        if row["side"].startswith("ours") and not row["compiled"]
    }
    for row in of_steps:
        assert row["measured_seconds"] == measured[row["of"]]["seconds"]
        assert row["error"] == pytest.approx(row["estimated_seconds"] / row["measured_seconds"] - 1)
    assert sum("measured_bytes" in row for row in rows) == 3


def test_what_has_a_record_is_not_measured_again(out):
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*.json")}
    done = gpu("--out", str(out), "--only", "mfu,kernels", "memory")
    assert done.returncode == 0 and done.stdout.count("--again measures anew") == 3
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*.json")} == before


def test_a_damaged_record_and_again_are_measured_anew(out, tmp_path):
    assert gpu("--out", str(tmp_path), "--only", "kernels").returncode == 0
    [path] = tmp_path.glob("*/kernels.json")
    path.write_text("{")
    done = gpu("--out", str(tmp_path), "--only", "kernels")
    assert "not a record" in done.stderr and "measuring anew" in done.stderr
    first = load(path)
    assert gpu("--out", str(tmp_path), "--only", "kernels", "--again").returncode == 0
    assert load(path).seconds != first.seconds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nothing", "--out", "x"], "no part of 1 rank; choose from mfu, memory"),
        (["--only", "collectives", "--out", "x"], "no part of 1 rank"),
        ([], "--out FOLDER is needed"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(words, message, tmp_path):
    done = gpu(*words)
    assert done.returncode == 2 and message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        COMMAND[:2],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 2 and "sees no CUDA GPU" in done.stderr


def test_two_ranks_measure_collectives_and_continue_a_killed_run(tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *COMMAND[1:],
        "--out",
        str(tmp_path),
        "--only",
        "collectives",
        "resume",
    ]
    done = subprocess.run(
        torchrun,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = record(tmp_path, "collectives").rows
    assert {row["side"] for row in rows} == {"dist.all_reduce", "ring"}
    [row] = record(tmp_path, "resume").rows
    assert row["killed_after"] < row["steps"] == len(row["continued_losses"])
    assert row["off"] == 0, "on CPUs it is the same training, bit for bit"


# The parts' inner works, also those that only a GPU calls


@pytest.fixture
def part(monkeypatch):
    """Import a module of benchmarks/on_gpu as the command does."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return lambda name: importlib.import_module(f"on_gpu.{name}")


def test_a_part_that_fails_leaves_the_others(part, monkeypatch, tmp_path, capsys):
    gpu_command, kernels = importlib.import_module("gpu"), part("kernels")
    monkeypatch.setattr(kernels, "measure", lambda machine, folder: 1 / 0)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu.py",
            "--device",
            "cpu",
            "--tiny",
            "--out",
            str(tmp_path),
            "--only",
            "kernels",
            "overlap",
        ],
    )
    assert gpu_command.main() == 1
    said = capsys.readouterr()
    assert "ZeroDivisionError" in said.err
    assert "kernels      FAILED" in said.out and "overlap      pass" in said.out


def test_a_missed_target_fails_the_command(part, monkeypatch, tmp_path, capsys):
    gpu_command, findings = importlib.import_module("gpu"), part("findings").Findings()
    findings.at_least("speed", 0.9, 1.0)
    monkeypatch.setattr(part("kernels"), "measure", lambda machine, folder: findings)
    machine = part("findings").Machine(gpu_command.device_for("cpu"), False, SINGLE_RANK)
    found = gpu_command.measure_part("kernels", machine, tmp_path, again=True)
    assert not gpu_command.passed(found)
    assert "MISS  speed: 0.9, at least 1" in gpu_command.table({"kernels": found}, tmp_path)


def test_the_allocator_s_trace_adds_up(part):
    entries = [
        {"action": "segment_alloc", "size": 20},
        {"action": "alloc", "size": 8},
        {"action": "free_requested", "size": 8},
        {"action": "free_completed", "size": 8},
        {"action": "alloc", "size": 12},
        {"action": "segment_free", "size": 20},
        {"action": "oom", "size": 99},
    ]
    assert part("allocator").timeline(entries, allocated=100, reserved=200) == [
        (0, 100, 200),
        (1, 100, 220),
        (2, 108, 220),
        (4, 100, 220),
        (5, 112, 220),
        (6, 112, 200),
    ]


def test_a_thinned_timeline_keeps_its_peak(part):
    points = [(number, 1000 if number == 57 else number, 2000) for number in range(100)]
    kept = part("allocator").thinned(points, most=10)
    assert len(kept["entry"]) == 10 and max(kept["allocated"]) == 1000 and 57 in kept["entry"]


@pytest.mark.parametrize("after_longer", [False, True])
def test_the_model_of_the_allocator_decides_as_chapter_2_says(part, after_longer):
    allocator = part("allocator")
    model = allocator.CachingAllocator(allocator.CAPACITY)
    allocator.keep_every_second(model, after_longer)
    assert allocator.can_allocate(model, 40 * allocator.MIB) == (not after_longer)


def test_free_blocks_of_older_segments_are_occupied_the_largest_first(part, monkeypatch):
    allocator = part("allocator")
    blocks = [
        {"size": size, "state": state}
        for size, state in ((3000, "inactive"), (7000, "active_allocated"), (5000, "inactive"))
    ]
    snapshot = [
        {"segment_type": "large", "blocks": blocks},
        {"segment_type": "small", "blocks": [{"size": 512, "state": "inactive"}]},
    ]
    monkeypatch.setattr(allocator.torch.cuda, "memory_snapshot", lambda: snapshot)
    occupied = allocator.fill_free_blocks(allocator.torch.device("cpu"))
    assert [tensor.nbytes for tensor in occupied] == [5000, 3000]


def test_pictures_of_the_same_segments_are_alike_in_any_order(part):
    alike = part("allocator").alike
    assert alike("[###] [...]", "[...] [###]") and not alike("[###] [...]", "[###]")


def test_the_allocator_s_segments_are_drawn_as_in_chapter_2(part):
    live, free = (
        {"size": 30 * 2**20, "state": "active_allocated"},
        {"size": 30 * 2**20, "state": "inactive"},
    )
    assert (
        part("allocator").picture([{"blocks": [free, live]}, {"blocks": [live]}])
        == "[...###] [###]"
    )


def kernel(name: str, start: float, length: float, stream: int, kind: str = "kernel") -> dict:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": length,
        "args": {"stream": stream},
    }


def test_copies_beside_compute_are_hidden(part):
    phases = ("forward", 1000, 2000), ("Optimizer.step#AdamW", 9000, 500)
    named = [
        {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": start, "dur": length}
        for name, start, length in phases
    ]
    row = part("overlap").read_trace(
        [
            *named,
            {"ph": "M", "name": "process_name"},
            kernel("sm90_gemm", 1000, 4000, 7),
            kernel("flash_fwd", 5000, 1000, 7),
            kernel("Memcpy DtoD", 2000, 1000, 20, "gpu_memcpy"),  # hidden
            kernel("Memcpy DtoD", 5500, 1000, 20, "gpu_memcpy"),  # half of it
            kernel("multi_tensor_adam", 9000, 500, 7),
        ]
    )
    assert row["step_ms"] == 8.5 and row["busy_ms"] == 5.5
    assert row["other_streams_ms"] == 2.0 and row["hidden_ms"] == 1.5
    assert row["hidden_share"] == 0.75 and row["num_streams"] == 2
    assert (row["matmul_ms"], row["attention_ms"], row["optimizer_ms"]) == (4.0, 1.0, 0.5)
    assert (row["forward_end_ms"], row["update_start_ms"], row["update_end_ms"]) == (2.0, 8.0, 8.5)


# What the chapters draw from records


DRAWN = [
    recorded.mfu,
    recorded.matmul_roofline,
    recorded.two_steps,
    recorded.recomputation,
    recorded.one_step,
    recorded.prefetch,
    recorded.precisions,
    recorded.estimates,
]


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_a_chapter_draws_what_was_recorded(out, draw):
    shown = draw(out)
    assert shown.sentence.startswith("Recorded on ") and "--tiny" in shown.sentence
    assert shown.figure.axes and shown.alt.endswith(".")


@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
def test_without_a_record_a_chapter_says_so_and_draws_the_prediction(tmp_path, draw):
    shown = draw(tmp_path)
    assert shown.sentence.startswith("This has not been recorded on a GPU yet")
    assert shown.figure.axes and shown.alt.endswith(".")


def test_the_newest_record_of_one_device_counts(out, tmp_path):
    [path] = out.glob("*/mfu.json")
    table = json.loads(path.read_text())
    for name, device, date, devices in (
        ("a", "one", "2026-01-02", 1),
        ("b", "one", "2026-03-04", 1),
        ("b2", "two", "2026-03-04", 1),
        ("b3", "four", "2026-03-04", 1),
        ("c", "one", "2026-05-06", 8),
    ):
        table["conditions"] |= {"device": device, "date": date, "num_devices": devices}
        (tmp_path / name).mkdir()
        (tmp_path / name / "mfu.json").write_text(json.dumps(table))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mfu.json").write_text("{")
    newest = recorded.newest("mfu", tmp_path).conditions
    assert (newest.date, newest.device) == ("2026-03-04", "two")


def test_the_allocator_s_two_steps_are_drawn_as_recorded(out, tmp_path):
    [path] = out.glob("*/memory.json")
    table = json.loads(path.read_text())
    table["rows"].append(
        {
            "case": "two steps",
            "entries": [2, 4],
            "peak_of_step": [15e9, 21e9],
            "entry": [0, 1, 2, 4],
            "allocated": [1e9, 15e9, 9e9, 21e9],
            "reserved": [2e9, 16e9, 16e9, 22e9],
        }
    )
    for succeeds, picture in ((True, "[...] " * 9), (True, "[...] " * 10), (False, "[...###]")):
        table["rows"].append(
            {
                "case": "fragmentation, some case",
                "succeeds": succeeds,
                "predicted": succeeds,
                "picture": picture.strip(),
            }
        )
    table["rows"].append(
        {
            "case": "out of memory in the second step",
            "limit_bytes": 18e9,
            "failed_in_step": 2,
            "reserved_of_step": [16e9, 22e9],
            "allocated_of_step": [15e9, 21e9],
        }
    )
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "memory.json").write_text(json.dumps(table))
    shown = recorded.two_steps(tmp_path)
    assert "Recorded peaks: 15 GB in step 1, 21 GB in step 2." in shown.alt.replace(".0 GB", " GB")
    said = shown.sentence.replace(".0 GB", " GB")
    assert "a request for 40 MiB succeeds: the device had room for one more segment." in said
    assert "a request for 40 MiB succeeds: free segments were returned to the device." in said
    assert "With the segments [...###] a request for 40 MiB fails." in said
    assert (
        "Step 1 reserves 16 GB, and step 2 allocates 21 GB at its peak: with at most 18 GB of "
        "memory, the same training runs out of it in step 2." in said
    )


def test_phases_of_a_recorded_step_are_read_off_its_highest_and_lowest_bytes():
    row = {
        "entries": [4, 8],
        "entry": [0, 1, 2, 3, 4, 5, 6, 7, 8],
        "allocated": [1, 3, 9, 2, 4, 5, 12, 4, 6],
    }
    assert recorded.phases_of(row) == [
        ("forward", 0, 2),
        ("backward", 2, 3),
        ("optimizer", 3, 4),
        ("forward", 4, 6),
        ("backward", 6, 7),
        ("optimizer", 7, 8),
    ]
