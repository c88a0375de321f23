"""The learning rate of a run that goes on longer than was planned: never a jump unasked."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest

from minitron import train, train_loop
from minitron.checkpoint import checkpoints, facts_of
from minitron.config import Config, ConfigError, DataConfig, TrainConfig
from minitron.launch import run
from minitron.running.schedule import Schedule, resumed
from minitron.step import learning_rate
from tests.tiers import exhaustive, tiered
from tests.train.test_train import MODEL, trained
from tests.train.test_train_ranks import kill_after, train_on_ranks

OLD = Schedule(1e-2, 1e-4, 5, 60)
FOLDER = Path("runs/x")
CHOICES = ["constant", "linear", "restart", "stretch"]


def go_on(choice: str, steps: int = 120, step: int = 60, old: Schedule = OLD, **numbers):
    return resumed(
        old,
        dataclasses.replace(
            old, steps=steps, continuation=choice, start=0, last_rate=0.0, **numbers
        ),
        step,
        FOLDER,
    )


def rates(schedule: Schedule) -> list[float]:
    return [schedule.rate(step) for step in range(schedule.steps)]


def test_a_schedule_that_was_never_continued_is_the_cosine():
    cosine = [learning_rate(step, 1e-2, 1e-4, 5, 60) for step in range(60)]
    for choice in ["none", *CHOICES]:  # which says what to do one day
        assert rates(dataclasses.replace(OLD, continuation=choice)) == cosine


def test_other_steps_are_refused_in_one_line_with_both_rates_and_the_choices():
    with pytest.raises(ConfigError) as caught:
        go_on("none")
    assert caught.value.field == "train.continuation"
    assert str(caught.value) == (
        "runs/x: at step 61 the learning rate would be 0.00532, where the run's own schedule has "
        "0.0001: the schedule was 5 steps of warm-up to 0.01, then a cosine to 0.0001, in "
        "steps 1 to 60, and "
        "is now 5 steps of warm-up to 0.01, then a cosine to 0.0001, in steps 1 to 120; set "
        "train.continuation to constant (keep 0.0001), linear (go from 0.0001 to 0 at step 120), "
        "restart (warm up again to 0.01, and decay over the steps that remain), or stretch (accept "
        "the jump to the new cosine); or leave the schedule as it was"
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"peak": 2e-2},
        {"minimum": 0.0},
        {"warmup_steps": 6},
        {"steps": 61},
        {"steps": 31},
    ],
    ids=str,
)
def test_each_number_of_the_schedule_counts(numbers):
    with pytest.raises(ConfigError, match="at step 31 the learning rate would be"):
        go_on("none", step=30, **{"steps": 60} | numbers)


def test_what_asks_for_nothing_else_changes_nothing():
    assert go_on("none", steps=60, step=30) == OLD
    assert go_on("none", steps=60) == OLD
    assert go_on("none", steps=30, step=30).steps == 30  # it stops here: no rate is asked for


def test_a_rate_that_does_not_jump_needs_no_continuation():
    constant = Schedule(1e-3, 1e-3, 2, 60)
    assert go_on("none", old=constant) == dataclasses.replace(constant, steps=120)
    in_warm_up = go_on("none", step=3)
    assert in_warm_up.rate(3) == OLD.rate(3) and in_warm_up.steps == 120


def test_constant_keeps_the_last_rate():
    assert rates(go_on("constant"))[60:] == [1e-4] * 60
    assert set(rates(go_on("constant", step=30))[30:]) == {OLD.rate(29)}


def test_linear_ends_at_the_minimum_or_at_zero_if_it_is_there():
    down = [OLD.rate(59), *rates(go_on("linear"))[60:]]
    assert down[0] == 1e-4 and down[-1] == 0.0
    assert [a - b for a, b in pairwise(down)] == pytest.approx([1e-4 / 60] * 60)
    halfway = [OLD.rate(29), *rates(go_on("linear", step=30))[30:]]
    assert halfway[-1] == 1e-4
    step = (OLD.rate(29) - 1e-4) / 90
    assert [a - b for a, b in pairwise(halfway)] == pytest.approx([step] * 90)
    assert go_on("linear").rate(500) == 0.0  # after the last step too


def test_restart_warms_up_again_and_decays_over_what_remains():
    again = go_on("restart", peak=5e-3, warmup_steps=10)
    expected = [learning_rate(step, 5e-3, 1e-4, 10, 60) for step in range(60)]
    assert rates(again)[60:] == expected


def test_what_the_documentation_says_of_the_jump():
    old = Schedule(0.01, 0.0001, 50, 60)
    assert f"{old.rate(59):.4f} {go_on('stretch', old=old).rate(60):.4f}" == "0.0001 0.0095"
    text = (Path(train.__file__).parents[1] / "docs" / "long_runs.md").read_text()
    assert "step 60 of 60 is trained at 0.0001, and step 61 of 120 at 0.0095" in text


def test_stretch_is_the_new_cosine_from_the_first_step():
    assert rates(go_on("stretch")) == rates(Schedule(1e-2, 1e-4, 5, 120))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("step", [30, 60])
def test_resumed_again_the_rates_stay(choice, step):
    """With the option or without it, at any step, and from what JSON has kept."""
    once = go_on(choice, step=step)
    kept = Schedule(**json.loads(json.dumps(dataclasses.asdict(once))))
    for later in (step, step + 1, 90, 120):
        for asked in (choice, "none"):
            again = go_on(asked, step=later, old=kept)
            assert rates(again)[later:] == rates(once)[later:], (later, asked)


def test_a_second_continuation_starts_from_the_first():
    first = go_on("constant", steps=100, step=30)
    second = go_on("linear", steps=150, step=100, old=first)
    assert second.last_rate == OLD.rate(29) and second.rate(149) == 1e-4
    assert go_on("linear", steps=100, step=50, old=first).rate(99) == 1e-4  # or another choice
    with pytest.raises(ConfigError, match=f"a constant {OLD.rate(29):.3g} in steps 31 to 100, and"):
        go_on("none", steps=150, step=100, old=first)


@pytest.mark.parametrize("choice", ["constant", "linear"])
def test_nothing_is_continued_from_a_rate_of_zero(choice):
    done = go_on("linear", steps=100)
    with pytest.raises(ConfigError, match=f"continuation = {choice}, but the last learning rate"):
        go_on(choice, steps=150, step=100, old=done)
    assert go_on("restart", steps=150, step=100, old=done).rate(104) == 1e-2


# A run

TRAIN = TrainConfig(
    steps=6,
    global_batch_size=6,
    micro_batch_size=6,
    warmup_steps=2,
    eval_every=0,
    eval_sequences=8,
    checkpoint_every=2,
    device="cpu",
)


@pytest.fixture
def config(stories) -> Config:
    return Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN)


def with_train(config: Config, **fields) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


@pytest.mark.parametrize("choice", tiered(["linear", "restart", "constant", "stretch"]))
def test_a_continued_run_that_is_killed_is_the_undisturbed_one(config, tmp_path, choice, capsys):
    longer = with_train(config, steps=12, continuation=choice, keep_checkpoints=9)
    columns = "step", "loss", "learning_rate"
    for name in ("whole", "killed"):
        train.train(config, tmp_path / name)
        train.train(longer, tmp_path / name, resume=True)
    told = capsys.readouterr().err
    assert (
        "the learning rate is a line from 0.0003 to 0 in steps 7 to 12 (train.continuation = "
        "linear)" in told
    ) == (choice == "linear")
    kill_after(tmp_path / "killed", 8)
    saved = train.load_saved(tmp_path / "killed")
    assert saved.train.continuation == choice
    for again in (saved, with_train(saved, continuation="none")):  # as its TOML file may say
        train.train(again, tmp_path / "killed", resume=True)
        assert trained(tmp_path / "killed", *columns) == trained(tmp_path / "whole", *columns)
        assert train.load_saved(tmp_path / "killed").train.continuation == choice
        kill_after(tmp_path / "killed", 10)


def test_a_run_killed_before_it_saved_its_continuation_continues_all_the_same(
    config, tmp_path, monkeypatch
):
    train.train(config, tmp_path)
    longer = with_train(config, steps=12, continuation="linear")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_loop, "loop", interrupt)
        train.train(longer, tmp_path, resume=True)
    train.train(train.load_saved(tmp_path), tmp_path, resume=True)
    found = [rate for _, rate in trained(tmp_path, "step", "learning_rate")]
    assert found[6:] == pytest.approx([3e-4 * left / 6 for left in (5, 4, 3, 2, 1, 0)])


def interrupt(*args) -> None:
    raise KeyboardInterrupt


def test_a_resumed_run_is_refused_another_peak_and_other_steps(config, tmp_path):
    train.train(config, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for change in ({"steps": 12}, {"steps": 12, "learning_rate": 1e-3}):
        with pytest.raises(ConfigError, match="at step 7 the learning rate would be .*, where the"):
            train.train(with_train(config, **change), tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert train.load_saved(tmp_path).train.steps == 6


def test_a_policy_of_a_new_run_waits_for_other_steps(config, tmp_path):
    """torchrun restarts a run with the same config: nothing is continued."""
    policy = with_train(config, continuation="linear", keep_checkpoints=9)
    train.train(policy, tmp_path / "policy")
    kill_after(tmp_path / "policy", 4)
    train.train(policy, tmp_path / "policy", restart=True)
    train.train(config, tmp_path / "plain")
    columns = "step", "loss", "learning_rate"
    assert trained(tmp_path / "policy", *columns) == trained(tmp_path / "plain", *columns)


def test_a_checkpoint_says_where_its_schedule_was_continued(config, tmp_path):
    train.train(config, tmp_path)
    [_, newest] = checkpoints(tmp_path / "checkpoints")
    assert facts_of(newest)["continued"] == {"start": 0, "last_rate": 0.0}
    train.train(with_train(config, steps=8, continuation="linear"), tmp_path, resume=True)
    [_, newest] = checkpoints(tmp_path / "checkpoints")
    assert facts_of(newest)["continued"] == {"start": 6, "last_rate": TRAIN.min_learning_rate}


@exhaustive
def test_ranks_continue_alike(config, tmp_path):
    plain = dataclasses.replace(config, model=dataclasses.replace(MODEL, dropout=0.0))
    longer = with_train(plain, steps=12, continuation="restart")
    train.train(plain, tmp_path / "one")
    train.train(longer, tmp_path / "one", resume=True)
    run(train_on_ranks, 2, plain, tmp_path / "two", timeout=120)
    run(train_on_ranks, 2, longer, tmp_path / "two", True, timeout=120)
    column = ("learning_rate",)
    assert trained(tmp_path / "two", *column) == trained(tmp_path / "one", *column)
