import math

import pytest

from minitron.measure.metrics import MetricsLog, read_metrics


def test_a_resumed_run_forgets_the_steps_it_will_repeat(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write(step=step, loss=1.0 / step)
    log.forget_after(2)
    log.write(step=3, loss=0.5)
    log.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (1, 1.0), (2, 0.5), (3, 0.5)]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    log = MetricsLog(path)
    log.forget_after(9)
    log.write(step=2)
    log.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_know_is_null(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(step=1, loss=0.5, grad_norm=value, sample="NaN")
    log.forget_after(1)
    log.close()
    assert path.read_text() == '{"step": 1, "loss": 0.5, "grad_norm": null, "sample": "NaN"}\n'
