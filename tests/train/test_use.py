"""Training with the exercises' functions: the same weights as without, and they are called."""

import dataclasses
import inspect
import shutil
import subprocess
import sys
import types
from collections import Counter

import pytest
import torch

from minitron import cost, parallelize, step
from minitron.comm import collectives
from minitron.comm.agreement import SINGLE_RANK
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.launch import RankError, run
from minitron.parallel.data import ddp
from minitron.plan.estimate import estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.train import read_options
from minitron.train import train as loop
from teaching.exercises import ROOT, known, load, replaced
from teaching.report import report_use
from teaching.use import use
from tests.environment import finding
from tests.tiers import exhaustive, tiered

REACHES = "teaching/graders", "solutions"  # by name: for tools/affected.py

EXERCISES = known()
REPLACING = [e for e in EXERCISES.values() if e.replaces]
TRAINING = [e for e in REPLACING if e.trained]
# On two ranks also those that one process calls, there with plain data parallelism.
LAYOUTS = (
    [(e, e.num_ranks, e.options) for e in TRAINING]
    + [(e, 2, e.options) for e in TRAINING if e.num_ranks == 1]
    + [
        (EXERCISES["1.1"], 2, ("--parallel.tp", "2")),
        (EXERCISES["9.1"], 2, ("--parallel.pp", "2", "--parallel.schedule", "gpipe")),
        (EXERCISES["6.1"], 2, ("--parallel.zero", "3")),
    ]
)
MODEL = ModelConfig(
    max_sequence_length=32, num_layers=2, width=32, num_heads=2, num_kv_heads=2, ffn_width=48
)
TRAIN = TrainConfig(
    steps=3,
    global_batch_size=8,
    micro_batch_size=2,
    warmup_steps=1,
    eval_every=0,
    checkpoint_every=0,
    device="cpu",
)
COUNTED = """

def _counted(name, function):
    def count(*args, **kwargs):
        with open({calls!r}, "a") as file:
            file.write(name + "\\n")
        return function(*args, **kwargs)
    return count

for _name in {names!r}:
    _mine = globals()[_name]
    if not isinstance(_mine, type):
        globals()[_name] = _counted(_name, _mine)
    elif hasattr(_mine, "apply"):
        _mine.forward = staticmethod(_counted(_name, _mine.forward))
    else:
        _mine.__init__ = _counted(_name, _mine.__init__)
"""


@pytest.fixture
def solved(tmp_path):
    """A clone whose exercises are the course's own solutions, and a file that counts their calls.

    Returns a function that prepares one of them.
    """
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    shutil.copytree(ROOT / "solutions", tmp_path / "exercises")
    calls = tmp_path / "calls.txt"
    calls.touch()

    def prepare(exercise):
        path = tmp_path / exercise.file
        counted = COUNTED.format(calls=str(calls), names=exercise.names)
        path.write_text(path.read_text() + counted)
        return tmp_path

    prepare.count = lambda: Counter(calls.read_text().split())
    return prepare


def shape(function) -> list[tuple]:
    """A signature's names, kinds and defaults; a default that is a function, by its name."""
    return [
        (p.name, p.kind, getattr(p.default, "__name__", p.default))
        for p in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("exercise", REPLACING, ids=str)
def test_an_exercise_has_the_signatures_of_what_it_replaces(exercise):
    solution, package = load(exercise, ROOT / exercise.solution_file), replaced(exercise)
    assert set(exercise.trained) <= set(package)
    assert set(solution) - set(package) == ({"Replicate"} if exercise.id == "7.1" else set())
    for name, theirs in package.items():
        mine = solution[name]
        assert type(mine) is type(theirs) and shape(mine) == shape(theirs)
        if not isinstance(mine, type):
            continue
        both = {name for name in vars(mine) if not name.startswith("__")} & set(dir(theirs))
        for method in both:
            pair = getattr(mine, method), getattr(theirs, method)
            if all(isinstance(m, types.FunctionType) for m in pair):
                assert shape(pair[0]) == shape(pair[1]), method


def weights_after(group, config: Config, folder) -> dict[str, torch.Tensor]:
    """Train as `config` says, in float64, and return all weights."""
    torch.set_default_dtype(torch.float64)
    try:
        training = loop(config, folder, group=group)
        return {n: p.clone() for n, p in training.parallel.full_parameters().items()}
    finally:
        torch.set_default_dtype(torch.float32)


def train(num_ranks: int, config: Config, folder) -> list[dict[str, torch.Tensor]]:
    if num_ranks == 1:
        return [weights_after(SINGLE_RANK, config, folder)]
    return run(weights_after, num_ranks, config, folder, timeout=60)


@pytest.fixture(scope="module")
def packages_own():
    return {}


@pytest.mark.parametrize("exercise, num_ranks, options", tiered(LAYOUTS, 4), ids=lambda v: str(v))
def test_training_calls_it_and_ends_with_the_same_weights(
    exercise, num_ranks, options, solved, stories, tmp_path, packages_own
):
    config = read_options([str(ROOT / "configs" / "stories.toml"), *options])
    config = Config(
        MODEL,
        DataConfig(stories, sequence_length=32),
        dataclasses.replace(TRAIN, recompute=config.train.recompute),
        config.parallel,
    )
    layout = num_ranks, options
    if layout not in packages_own:
        packages_own[layout] = train(num_ranks, config, tmp_path / "ours")
    with use(exercise.id, root=solved(exercise)) as calls:
        theirs = train(num_ranks, config, tmp_path / "theirs")

    for mine, right in zip(theirs, packages_own[layout], strict=True):
        assert mine.keys() == right.keys() and len(mine) > 10
        for name, weight in right.items():
            assert weight.dtype == torch.float64
            torch.testing.assert_close(mine[name], weight, rtol=0, atol=1e-10)
    called = set(solved.count())
    assert called and called <= set(exercise.names)
    if num_ranks == 1:
        assert {name: count for (_, name), count in calls.items() if count} == solved.count()
    if layout == (exercise.num_ranks, exercise.options):
        assert called == set(exercise.trained)


@pytest.mark.parametrize("exercise", TRAINING, ids=str)
def test_the_command_that_check_prints_is_one(exercise):
    words = exercise.command.split()
    options = read_options(words[words.index("train") + 1 :])
    assert options.use == (exercise.id,)
    assert words[0] == ("minitron" if exercise.num_ranks == 1 else "torchrun")


def ring_sum(group) -> list[float]:
    values = torch.full((5,), 10.0 ** group.rank())
    collectives.all_reduce_ring(values, group)
    return values.tolist()


def ring_volumes() -> list[cost.Volume]:
    return [cost.collective_volume("all_reduce", 10, 4, size, 0) for size in (2, 3)]


@exhaustive  # both at once: test_ranks_that_run_starts_use_what_the_caller_uses
@pytest.mark.parametrize("id", ["5.1", "5.2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_package_s_ring_calls_it_with_the_same_result(id, num_ranks, solved):
    right = run(ring_sum, num_ranks)
    with use(id, root=solved(EXERCISES[id])):
        assert run(ring_sum, num_ranks) == right
    assert solved.count() == {EXERCISES[id].names[0]: num_ranks}


def test_the_package_s_table_of_volumes_calls_5_3(solved):
    right = ring_volumes()
    with use("5.3", root=solved(EXERCISES["5.3"])):
        assert ring_volumes() == right
    assert set(solved.count()) == set(EXERCISES["5.3"].names)
    before = solved.count()
    assert ring_volumes() == right and solved.count() == before  # given back


def test_ranks_that_run_starts_use_what_the_caller_uses(solved):
    with use("5.1", "5.2", root=solved(EXERCISES["5.1"])):
        assert run(ring_sum, 3) == [[111.0] * 5] * 3
    assert solved.count() == {"reduce_scatter_ring": 3}
    assert run(ring_sum, 3) == [[111.0] * 5] * 3
    assert solved.count() == {"reduce_scatter_ring": 3}  # not any more


def test_a_run_says_how_often_it_called_the_learner_s_functions(solved, stories, tmp_path, capsys):
    config = Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)
    with use("1.1", "4.2", "5.1", root=solved(EXERCISES["1.1"])) as calls:
        finished = loop(config, tmp_path / "run")
        report_use(finished, calls)
    printed = capsys.readouterr()
    assert printed.out == "exercise 1.1: the run called your accumulate_gradients 12 times\n"
    never = "minitron: warning: the run never called your"
    assert [line for line in printed.err.splitlines() if line.startswith("minitron")] == [
        f"{never} assign_buckets (exercise 4.2); this one does: torchrun --nproc-per-node 2 -m "
        "minitron.cli train configs/stories.toml --use 4.2",
        f"{never} reduce_scatter_ring (exercise 5.1): training does not need it",
    ]
    finished.first_step = finished.step  # it was through already
    report_use(finished, calls)
    assert capsys.readouterr() == ("", "")


def test_counting_compiles_nothing_again(solved, tmp_path):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with use("1.2", root=tmp_path) as calls:
        compiled = torch.compile(lambda x: x * step.learning_rate(1, 2.0, 1.0, 4, 8), backend=keep)
        assert [float(compiled(torch.ones(()))) for _ in range(3)] == [1.0] * 3
    assert len(graphs) == 1 and calls["1.2", "learning_rate"] == 0


@pytest.mark.parametrize("kept", tiered(["finish", "__init__"]))
def test_a_part_that_is_not_written_ends_in_one_line(kept, solved, stories, tmp_path):
    """Of 4.4 one method holds the stub: the package calls it in the midst of a step."""
    root = solved(EXERCISES["4.4"])
    path = root / EXERCISES["4.4"].file
    stub = 'raise NotImplementedError("Exercise 4.4 - Buckets.  Hint: minitron hint 4.4")'
    name = EXERCISES["4.4"].names[-1]
    path.write_text(
        path.read_text()
        + f"""

def {kept}(self, *args, **kwargs):
    {stub}

{name}.{kept} = {kept}
"""
    )
    config = Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)
    told = rf"4\.4 is not complete: {kept}, in line \d+ of ch04_\w+.py, still holds the stub; write"
    with use("4.4", root=root), pytest.raises(RankError, match=told):
        run(weights_after, 2, config, tmp_path / "run")


UNDER_TORCHRUN = """
import sys
from pathlib import Path
from minitron.launch import torchrun_group
from teaching.use import use
from tests.train.test_use import ring_sum

with torchrun_group() as group, use("5.1", root=Path(sys.argv[1])):
    assert ring_sum(group) == [11.0] * 5
"""


@exhaustive
def test_ranks_that_torchrun_starts_use_it_too(solved, tmp_path):
    root = solved(EXERCISES["5.1"])
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(root),
    ]
    subprocess.run(command, cwd=ROOT, env=finding(ROOT), check=True)
    assert solved.count() == {"reduce_scatter_ring": 2}


@pytest.mark.parametrize(
    "id, variant", [("4.1", ddp.apply_naive_data_parallel), ("4.3", ddp.apply_hooked_data_parallel)]
)
def test_another_version_takes_the_place_of_the_default_and_gives_it_back(id, variant, solved):
    default = ddp.apply_bucketed_data_parallel
    with use(id, root=solved(EXERCISES[id])):
        assert parallelize.apply_bucketed_data_parallel.func is variant
    assert parallelize.apply_bucketed_data_parallel is ddp.apply_bucketed_data_parallel is default
    assert variant in vars(ddp).values()


def test_a_name_that_a_module_imports_meanwhile_is_given_back(solved, monkeypatch):
    later = types.ModuleType("imported_later")
    monkeypatch.setitem(sys.modules, "imported_later", later)
    original = collectives.reduce_scatter_ring
    with use("5.1", root=solved(EXERCISES["5.1"])):
        exec("from minitron.comm.collectives import reduce_scatter_ring", vars(later))
        assert later.reduce_scatter_ring is not original
    assert later.reduce_scatter_ring is original


def test_the_planner_s_estimate_calls_3_3(solved):
    job = Job(MODEL, 1, DEVICES["H100-SXM-80GB"], 32, 8)
    decision = Decision(ParallelConfig(dp=1), "full")
    right = estimate(job, decision).hardware_flops
    with use("3.3", root=solved(EXERCISES["3.3"])):
        assert estimate(job, decision).hardware_flops == right
    assert set(solved.count()) == {"recompute_flops_per_token"}
