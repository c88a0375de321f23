"""The constants of the estimate are where the fit ends, and the tables are those of the code."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from minitron.plan.published import EFA

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
fit_of = import_module("estimate")
sys.path.pop(0)

ROWS = fit_of.published_rows()


def lose(constants):
    return fit_of.loss(fit_of.errors(constants, ROWS))


def test_the_fit_finds_the_least():
    def distance(constants):
        return abs(constants["matmul"] - 0.31) + abs(constants["memory"] - 0.95)

    found = fit_of.fit(distance, {"matmul": 0.9, "memory": 0.1})
    assert found["matmul"] == pytest.approx(0.31, rel=0.01)
    assert found["memory"] == pytest.approx(0.95, rel=0.01)


@pytest.mark.parametrize("name", fit_of.START)
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_no_stored_constant_is_better_elsewhere(name, factor):
    stored = fit_of.stored()
    assert lose(stored | {name: stored[name] * factor}) > lose(stored)


def test_an_error_counts_up_to_a_limit_and_a_source_by_the_root_of_its_rows():
    found = {"one": [("row", -5.0)], "four": [("row", 0.1)] * 4}
    assert fit_of.loss(found) == pytest.approx((1 * 0.3 + 2 * 0.1) / 3)


def test_the_network_of_efa_is_what_the_device_says():
    network = fit_of.network_of_efa()
    assert EFA.nic_latency == pytest.approx(network.latency, rel=0.01)
    assert 8 * EFA.nic_share * EFA.nic_bandwidth == pytest.approx(network.bandwidth, rel=0.01)


def test_the_stored_tables_are_of_these_constants():
    text = (ROOT / "benchmarks" / "results" / "estimate.md").read_text(encoding="utf-8")
    unseen = fit_of.unseen_rows()
    for line in [
        *fit_of.summary(fit_of.errors(fit_of.stored(), ROWS)),
        *fit_of.not_fitted(ROWS, unseen),
        *fit_of.sharded(),
        *fit_of.layers(),
        *fit_of.memory(ROWS),
        *fit_of.steps(ROWS),
        *fit_of.steps(unseen),
    ]:
        assert line in text


def test_without_nanotron_no_host_is_known():
    others = [row for row in ROWS if row.system != fit_of.NANOTRON]
    found = fit_of.fitted(others)
    assert [found[name] for name in fit_of.HOST_NAMES] == [0, 0]
