"""Chapter 7's measurements: what counts as standing still, what the two trainings report."""

from types import SimpleNamespace

import pytest
import torch

from minitron import cost
from minitron.launch import run
from minitron.parallel.tensor.layers import AllReduceExchange, TensorParallel, apply_tensor_parallel
from teaching.lab import ch07, counting_rows


def spans(*ends):
    return [SimpleNamespace(start=start, end=end) for start, end in ends]


def call(started, finished):
    return SimpleNamespace(started=started, finished=finished)


def test_a_transfer_that_compute_covers_leaves_no_standstill():
    covered = ch07.standstill([call(1, 3)], spans((0, 3), (3, 5)), transfer=2)
    partly = ch07.standstill([call(1, 3)], spans((0, 2), (3, 5)), transfer=2)
    assert covered == 0 and partly == pytest.approx(1)


def test_waiting_for_a_late_rank_does_not_count():
    assert ch07.standstill([call(1, 6)], spans((0, 1), (6, 7)), transfer=2) == pytest.approx(2)


class Forgotten(AllReduceExchange):
    def start_reduce(self, grad_partial):
        return lambda: grad_partial


def f_forgotten(model, group):
    return TensorParallel(model, Forgotten(group))


def test_the_report_shows_that_ranks_disagree(capsys):
    ch07.report(f_forgotten)
    header, correct, wrong = capsys.readouterr().out.splitlines()
    assert "ranks agree" in header
    assert correct.startswith("correct") and correct.endswith("True")
    assert wrong.startswith("f_forgotten") and wrong.endswith("False")
    assert "not proportional" in ch07.verdict(f_forgotten, 2)
    assert ch07.verdict(apply_tensor_parallel, 2) == "the same training"


def test_a_block_and_the_ends_send_what_the_formulas_say():
    block, ends = ch07.sent_per_block(2)
    shape = ch07.B, ch07.S, ch07.WIDTH, 4, 0, cost.Layout(2)
    assert block[0] == cost.tensor_parallel_volume(*shape).sent
    assert ends[0] == cost.vocabulary_parallel_volume(*shape).sent


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_layer_in_chunks_is_timed_after_a_first_run(num_chunks):
    times = run(ch07.row_parallel_seconds, 2, num_chunks, 1e12, 2, watch=False)[0]
    assert len(times) == 2 and all(seconds > 0 for seconds in times)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_layer_in_chunks_computes_what_it_does_in_one(num_ranks):
    """Also where the tokens do not divide by the chunks, and with more chunks than tokens."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 4, generator=generator), torch.randn(5, 4, generator=generator)

    def outputs(group):
        own = [tensor.chunk(num_ranks, 1)[group.rank()].double() for tensor in (x, weight)]
        return [ch07.row_parallel_in_chunks(*own, chunks, group) for chunks in (1, 2, 3, 7, 9)]

    for whole, *chunked in run(outputs, num_ranks):
        torch.testing.assert_close(whole, x.double() @ weight.double().T)
        for output in chunked:
            torch.testing.assert_close(output, whole)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({1: [30, 32], 2: [20, 25], 4: [26, 29]}, "2 chunks are fastest, 1.38 times as fast as 1"),
        ({1: [30, 32, 36], 2: [24, 28, 36]}, "2 chunks have the lowest median, but their spread"),
        ({1: [30, 32], 2: [33, 34]}, "chunks do not pay on this machine"),
    ],
)
def test_chunks_are_called_faster_only_if_the_spreads_are_apart(seconds, said):
    sentence = ch07.fastest_chunks(seconds)
    assert sentence.startswith(said) and len(sentence) <= 80


def test_a_layer_in_chunks_has_a_transfer_a_chunk_and_none_is_named():
    events = run(ch07.row_parallel_events, 2, 4, 1e9, 1, watch=False)[0]
    lanes = ch07.compute_and_network("4 chunks", events)
    compute, network = lanes.values()
    assert list(lanes) == ["4 chunks: compute", "4 chunks: network"]
    assert {block.kind for block in compute} == {"matmul"} and len(network) == 4
    assert network[0].start < compute[-1].end
    assert {block.label for block in network} == {" "}


def test_waiting_at_once_changes_no_gradient():
    def gradients(group, exchange):
        model = ch07.small_gpt()
        ch07.initialize(model, seed=0)
        parallel = TensorParallel(model, exchange(group))
        ch07.loss_of(model, parallel, counting_rows(0, 16, 9, 36)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    by_exchange = [
        run(gradients, 2, exchange, watch=False)[0]
        for exchange in (ch07.WaitsAtOnce, AllReduceExchange)
    ]
    assert torch.equal(*by_exchange)
