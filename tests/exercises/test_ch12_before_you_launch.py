"""The exercises of chapter 12: their examples, published trainings, and what the judges rest on."""

from dataclasses import replace
from itertools import product

import pytest

from minitron.config import ModelConfig
from minitron.plan.decide import decide
from minitron.plan.search import search
from teaching.exercises import ROOT, load
from teaching.graders import ch12_days, ch12_layout, ch12_memory, ch12_schedule
from tests.exercises.common import Chapter
from tests.exercises.grading import Grading
from tests.exercises.mutants.ch12_before_you_launch import FURTHER
from tests.tiers import tiered

CHAPTER = Chapter("ch12_before_you_launch")


class TestGrading(Grading):
    chapter = CHAPTER


def solution(exercise_id):
    exercise = CHAPTER.exercises[exercise_id]
    return list(load(exercise, ROOT / exercise.solution_file).values())


def test_the_examples_of_days_are_true():
    flops_per_token, days_and_mfu = solution("12.1")
    assert [flops_per_token(10, 1, 2, 3, kind) for kind in ("none", "selective", "full")] == [
        (132, 132),
        (132, 156),
        (132, 176),
    ]
    for known, value in {"HFU": 0.5, "TFLOP/s": 50, "GPU-hours": 38400, "MFU": 0.375}.items():
        training = (6e9, 8e9), 864e9, 100, 1e14, known, value
        assert days_and_mfu(*training) == pytest.approx((16, 0.375))


def test_the_examples_of_memory_are_true():
    state_bytes, fullest_stage = solution("12.2")
    model = ModelConfig(
        width=4, num_heads=2, num_kv_heads=1, ffn_width=6, vocab_size=10, tied_embedding=False
    )
    assert state_bytes(model, [1, 2], 0, 1, 1, 0)["parameter"] == 2 * 168
    assert state_bytes(model, [1, 2], 1, 1, 1, 0)["parameter"] == 2 * 300
    assert state_bytes(model, [1, 2], 1, 1, 8, 1) == {
        "parameter": 600,
        "gradient": 600,
        "optimizer state": 12 * 38,
    }
    assert fullest_stage([3, 3], [50, 50], 4, 10, 20) == (0, 110)
    assert fullest_stage([3, 3], [50, 50], 1, 10, 20) == (1, 100)


def test_the_examples_of_schedules_are_true():
    micro_batches_needed, fastest_schedule = solution("12.3")
    assert (micro_batches_needed(4, 1, 4), micro_batches_needed(4, 2, 4)) == (9, 8)
    case = ch12_schedule.cases()[1]
    assert {pair: tuple(step) for pair, step in ch12_schedule.all_steps(case).items()} == {
        (1, 1): (60, 40),
        (1, 2): (54, 50),
        (2, 1): (54, 80),
        (2, 2): (45, 80),
        (4, 1): (60, 80),
    }
    answers = {limit: fastest_schedule(2, 4, 4, case.seconds, 10, limit) for limit in (80, 50, 39)}
    assert answers == {80: (2, 2), 50: (1, 2), 39: None}


def test_the_example_of_layouts_is_true():
    (find_layout,) = solution("12.4")
    job = ch12_layout.cases()[0].job
    best = find_layout(job)
    assert job.num_gpus == 1 and job.global_batch_size == 4 and len(ch12_layout.layouts(job)) == 9
    assert (best.recompute, best.micro_batch_size) == ("none", 4)


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    tiered(
        (
            (name, answer, says)
            for name, answers in FURTHER.items()
            for answer, says in answers.items()
        ),
        keep=1,
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_further_mistakes_are_recognized(name, answer, says):
    verdict = CHAPTER.grade(name, answer)
    assert verdict.state == "failed" and says in f"{verdict.seen}\n{verdict.likely}"


# Published trainings


@pytest.mark.parametrize(
    ("num_parameters", "shape", "training", "days"),
    [
        # Narayanan et al. 2021, section 5.1: 8 T P / (n X), without attention: a little less
        (175e9, (96, 12288, 2048), (300e9, 1024, 140), 34),
        (1008e9, (128, 25600, 2048), (450e9, 3072, 163), 84),
    ],
)
def test_days_are_those_that_narayanan_et_al_estimate(num_parameters, shape, training, days):
    flops_per_token, days_and_mfu = solution("12.1")
    num_tokens, num_gpus, rate = training
    flops = flops_per_token(int(num_parameters), *shape, "full")
    seen, mfu = days_and_mfu(flops, num_tokens, num_gpus, 312e12, "TFLOP/s", rate)
    assert days < seen < days + 1.5  # "one more", as the exercise says
    assert mfu == pytest.approx(0.75 * rate / 312, rel=0.01)


def test_a_step_of_mt_nlg_has_the_flops_that_its_paper_says():
    # Smith et al. 2022, section 2.4: 1920 sequences in 60.1 s on 2240 GPUs, 126 TFLOP/s each
    flops_per_token, _ = solution("12.1")
    _, hardware = flops_per_token(*ch12_days.MT_NLG, "full")
    assert hardware * 1920 * 2048 / 60.1 / 2240 == pytest.approx(126e12, rel=0.02)


def test_every_training_of_the_grader_takes_a_plausible_time():
    for run in ch12_days.runs():
        days, mfu = ch12_days.right_answer(run)
        assert 5 < days < 130 and 0.2 < mfu < 0.55, run.text


# What the graders rest on


def test_the_dry_runs_agree_with_the_formulas_on_both_ends():
    found = ch12_memory.dry_runs()
    assert {place.stage for _, place, _ in found} == {0, 1}
    for _, place, held in found:
        assert held == ch12_memory.right_state(place)
        assert sum(place.stages) == place.model.num_layers


def test_the_pipelines_have_different_fullest_stages():
    fullest = []
    for pipeline in ch12_memory.pipelines():
        stages = ch12_memory.held(pipeline, ch12_memory.right_counts(pipeline))
        fullest.append((stages.index(max(stages)), len(stages)))
    assert (0, 4) in fullest and (3, 4) in fullest and (1, 3) in fullest


def test_the_least_number_of_micro_batches_is_the_least():
    for p, v, part in ch12_schedule.NEEDED:
        m, group = ch12_schedule.right_number(p, v, part), p if v > 1 else 1
        assert m % group == 0 and ch12_schedule.is_small(p, m, v, part)
        assert m == group or not ch12_schedule.is_small(p, m - group, v, part)


def test_every_way_to_choose_a_schedule_loses_somewhere():
    wins = {"bubble": True, "bytes": True, "size": True, "none": False}
    for case in ch12_schedule.cases():
        fitting = {
            pair: step
            for pair, step in ch12_schedule.all_steps(case).items()
            if step.bytes <= case.limit
        }
        if not fitting:
            wins["none"] = True
            continue
        least = min(step.seconds for step in fitting.values())
        wins["bytes"] &= min(fitting.values(), key=lambda step: step.bytes).seconds == least
        wins["size"] &= fitting[max(fitting)].seconds == least
        smallest_bubble = min(fitting, key=lambda pair: pair[0] / pair[1])
        wins["bubble"] &= fitting[smallest_bubble].seconds == least
    assert wins == {"bubble": False, "bytes": False, "size": False, "none": True}


@pytest.mark.parametrize(
    "case",
    tiered(pytest.param(case) for case in ch12_layout.cases() if "nothing" not in case[0]),
    ids=lambda case: case.text,
)
def test_the_judge_of_layouts_agrees_with_the_search(case):
    found = [
        each
        for each in search(case.job).candidates
        if all(ch12_layout.conditions(case.job, each.decision).values())
    ]
    fitting = [each for each in ch12_layout.layouts(case.job) if each.fits]
    assert len(found) == len(fitting)
    assert fitting[0].seconds == pytest.approx(found[0].seconds)


def test_the_obvious_layouts_lose_somewhere():
    loses = {"data parallel": 0, "tree": 0, "recomputed": 0, "nothing fits": 0}
    for _, job in ch12_layout.cases():
        fitting = [each for each in ch12_layout.layouts(job) if each.fits]
        if not fitting:
            loses["nothing fits"] += 1
            continue
        best = fitting[0].decision
        loses["data parallel"] += best.parallel.dp < job.num_gpus
        loses["recomputed"] += best.recompute == "full"
        tree = replace(decide(job), steps=())
        loses["tree"] += tree != best
    assert all(loses.values()), loses


def test_each_condition_of_a_layout_is_told():
    job = ch12_layout.cases()[2].job
    best = ch12_layout.layouts(job)[0].decision
    for field, value in product(("dp", "tp"), (3,)):
        wrong = replace(best, parallel=replace(best.parallel, **{field: value}))
        assert not all(ch12_layout.conditions(job, wrong).values())
