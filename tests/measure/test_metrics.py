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
        (1, 1.0),
        (2, 0.5),
        (3, 0.5),
    ]


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


BAD = {
    "a line that is no JSON": b"# damaged #\n",
    "no UTF-8": b'{"step": 2, "sample": "\xff"}\n',
    "a row without a step": b'{"loss": 2.0}\n',
    "a step that is none": b'{"step": "2"}\n',
    "a list": b"[2]\n",
    "nested deeply": b"[" * 100_000 + b"\n",
    "a number of 5,000 digits": b'{"step": ' + b"2" * 5000 + b"}\n",
}
GOOD = [b'{"step": 1, "loss": 1.5}\n', b'{"step": 3, "loss": 1.25e0}\n', b'{"step": 4}\n']


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_line_costs_no_other(tmp_path, capsys, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD[0] + bad + GOOD[1] + GOOD[2])
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4]
    log = MetricsLog(path)
    log.forget_after(3)
    log.write(step=4, loss=1.0)
    log.close()
    assert path.read_bytes() == GOOD[0] + GOOD[1] + b'{"step": 4, "loss": 1.0}\n'
    aside = tmp_path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == bad
    told = capsys.readouterr().err
    assert told == f"{path}: 1 of 4 lines cannot be read; they are now in {aside}\n"

    MetricsLog(path).forget_after(4)  # there is nothing more to tell
    assert capsys.readouterr().err == "" and aside.read_bytes() == bad


def test_a_block_of_nuls_from_a_crash_costs_no_row(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD[0] + b"\0" * 4096 + GOOD[1] + b"\0" * 100)
    log = MetricsLog(path)
    log.forget_after(3)
    log.close()
    assert path.read_bytes() == GOOD[0] + GOOD[1]
    assert capsys.readouterr().err == ""


def test_a_log_whose_rows_all_stay_is_not_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(GOOD))
    before = path.stat()
    MetricsLog(path).forget_after(4)
    assert path.stat().st_ino == before.st_ino and path.read_bytes() == b"".join(GOOD)
