"""Chapter 12's helpers: layouts in words, estimates of published steps, claims."""

import pytest

from minitron import cost
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from minitron.plan.published import published_rows
from minitron.plan.search import Candidate
from teaching.lab import ch12 as lab

A100 = DEVICES["A100-SXM-80GB"]
JOB = Job(cost.PUBLISHED["Llama 3.2 1B"], 8, A100, 8192, 64)


def test_a_layout_in_few_words():
    layout = lab.cut(2, tp=2, pp=2, chunks=2, recompute="full", micro_batch=4)
    assert layout.parallel.sequence and layout.parallel.schedule == "interleaved"
    assert lab.brief(Candidate(JOB, layout)) == "tp 2, pp 2 x 2, dp 2, ZeRO-1, recomputed, b 4"


def test_estimates_of_published_steps():
    rows = [row for row in published_rows() if row.job.device == A100]
    errors = lab.errors_by_source(rows)
    assert set(errors) == {"Narayanan", "Korthikanti"}
    assert sum(map(len, errors.values())) == len(rows)
    first = rows[0]
    assert lab.seconds_on(A100, first) == pytest.approx(first.predict().seconds)
    assert lab.label(first) == "Narayanan 1.7B"


@pytest.mark.parametrize(
    ("computed", "verdict"), [(100, "right"), (104.9, "right"), (94, "0.94 x"), (200, "2 x")]
)
def test_a_claim_is_right_within_5_percent(computed, verdict):
    line = str(lab.Fact(3, "what is claimed", 100, computed, "GB"))
    assert line.endswith(verdict) and line.startswith(" 3 what") and len(line) <= 80


def test_every_claim_of_the_list_has_its_numbers():
    facts = lab.facts(1, 12)
    assert [each.number for each in facts] == sorted(each.number for each in facts)
    assert {each.number for each in facts} == set(range(1, 13))
    assert lab.facts(1, 5) + lab.facts(6, 12) == facts
    assert all(len(str(each)) <= 80 for each in facts)


def test_what_claims_are_compared_with_is_computed_as_the_chapters_do():
    by_what = {each.what: each.computed for each in lab.facts(1, 12)}
    around_both_nodes = 2 * 15 / 16 * 200 / 450
    assert by_what["ring of 16, 450 GB/s each way"] == pytest.approx(around_both_nodes)
    inside_then_across = 2 * 7 / 8 * 200 / 450 + 2 * 1 / 2 * 25 / 50
    assert by_what["two nodes of 8, hierarchical"] == pytest.approx(inside_then_across)
    assert by_what["8 P T at 140 TFLOP/s"] == pytest.approx(
        8 * 175e9 * 1.5e12 / 1024 / 140e12 / 86_400
    )
    assert by_what["16 B / 1,024 of 1e12 parameters"] == pytest.approx(15.625)


def test_zero_saves_as_much_as_its_paper_says():
    assert lab.saved(1, 10**6) == pytest.approx(4, rel=0.01)
    assert lab.saved(3, 64) == pytest.approx(64)
