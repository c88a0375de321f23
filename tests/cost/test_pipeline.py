"""The formulas of a pipeline against the papers that print them, and against the schedules."""

import csv
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from minitron import cost
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from minitron.proof.oracle import small_model

LINES = (Path(__file__).parent / "pipeline_bubble_formulas.csv").read_text().splitlines()
PRINTED = list(csv.DictReader(line for line in LINES if not line.startswith("#")))
ONE_STAGE = (sequential, gpipe, one_forward_one_backward, zero_bubble)


def bubble(schedule, p, m, v, tf, ti, tw):
    if schedule == "ZB-H1":
        return cost.zb_h1_bubble(p, m, tf, ti, tw)
    return cost.pipeline_bubble(p, m, tf, ti + tw, v)


@pytest.mark.parametrize("row", PRINTED, ids=lambda row: row["schedule"])
def test_every_printed_formula(row):
    times = [(Fraction(1), Fraction(1), Fraction(1)), (Fraction(3, 2), Fraction(2), Fraction(1, 3))]
    chunks = (1, 2, 3) if "interleaved" in row["schedule"] else (1,)
    for p, groups, v, (tf, ti, tw) in product((2, 3, 4, 8), (2, 3, 10), chunks, times):
        values = {
            "p": Fraction(p),
            "m": Fraction(groups * p),
            "v": v,
            "tf": tf,
            "ti": ti,
            "tw": tw,
            "tb": ti + tw,
        }

        def printed(column, values=values):
            return eval(row[column], values)

        m = groups * p
        answer = bubble(row["schedule"], p, m, v, tf, ti, tw)
        assert answer.seconds == printed("bubble_seconds")
        assert answer.ideal_seconds == m * (tf + ti + tw)
        if row["share_of_total"]:
            assert answer.of_total == printed("share_of_total")
            assert answer.of_ideal == printed("share_of_ideal")
        held = cost.activations_held(row["schedule"], p, m, 0, v)
        assert Fraction(held, v) == printed("held")


def test_four_ranks_and_eight_micro_batches_by_hand():
    """3 of 11 slots of the whole step, 3 for every 8 of work."""
    one_chunk, two_chunks = (cost.pipeline_bubble(4, 8, 1, 2, v) for v in (1, 2))
    assert (one_chunk.seconds, one_chunk.ideal_seconds) == (9, 24)
    assert (one_chunk.of_total, one_chunk.of_ideal) == (9 / 33, 9 / 24)
    assert (two_chunks.seconds, two_chunks.ideal_seconds) == (4.5, 24)
    assert cost.sequential_bubble(4, 8, 1, 2).of_total == 3 / 4, "one of four ranks works"
    assert cost.zb_h1_bubble(4, 8, 1, 1, 1).seconds == 3


def test_every_rank_of_every_schedule_holds_what_the_formula_counts():
    num_cases = 0
    for p, m in product(range(1, 7), range(1, 14)):
        schedules = [(1, make(p, m)) for make in ONE_STAGE]
        if m % p == 0:
            schedules += [(v, interleaved(p, m, v)) for v in (1, 2, 3, 4)]
        schedules.append((2, zb_v(p, m)))
        if m >= 2 * p:
            schedules.append((2, dualpipe_v(p, m)))
        for v, schedule in schedules:
            expected = [cost.activations_held(schedule.name, p, m, rank, v) for rank in range(p)]
            assert peak_activations(schedule) == expected, (schedule.name, p, m, v)
            num_cases += 1
    assert num_cases > 400


@pytest.mark.parametrize(("p", "v"), [(2, 1), (4, 1), (4, 2), (8, 3), (3, 4)])
def test_interleaving_holds_more_by_the_factor_of_the_paper(p, v):
    held = cost.activations_held("interleaved 1F1B", p, 2 * p, 0, v) / v
    alone = cost.activations_held("1F1B", p, 2 * p, 0)
    assert held / alone == pytest.approx(cost.interleaved_activation_factor(p, v))


def messages(schedule, rank):
    """Sent and received by a rank, counted action by action."""
    sent = received = 0
    for action in schedule.all_actions:
        for need in schedule.needs(action):
            source, target = schedule.rank_of[need.stage], schedule.rank_of[action.stage]
            sent += source == rank != target
            received += target == rank != source
    return sent, received


@pytest.mark.parametrize(
    ("p", "m", "v"),
    [
        (1, 3, 1),
        (2, 3, 1),
        (4, 2, 1),
        (5, 7, 1),
        (1, 2, 2),
        (2, 4, 2),
        (4, 8, 3),
    ],
)
def test_a_rank_sends_an_activation_for_every_message_of_its_schedule(p, m, v):
    B, S, D, element_size = 2, 7, 10, 2
    for schedule in [interleaved(p, m, v)] if v > 1 else [gpipe(p, m), zero_bubble(p, m)]:
        for rank in range(p):
            volume = cost.pipeline_volume(B, S, D, element_size, p, m, rank, v)
            expected = tuple(count * B * S * D * element_size for count in messages(schedule, rank))
            assert tuple(volume) == expected


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (3, 6), (4, 8), (5, 12)])
def test_in_a_v_the_last_rank_sends_nothing_to_itself(p, m):
    B, S, D, element_size = 2, 7, 10, 2
    for schedule in (zb_v(p, m), dualpipe_v(p, m)):
        for rank in range(p):
            volume = cost.v_volume(B, S, D, element_size, p, m, rank)
            expected = tuple(count * B * S * D * element_size for count in messages(schedule, rank))
            assert tuple(volume) == expected


def test_two_chunks_send_twice_as_much_between_neighbors_and_close_the_ring():
    one, two = (
        [cost.pipeline_volume(1, 1, 1, 1, 4, 8, rank, v).sent for rank in range(4)] for v in (1, 2)
    )
    assert one == [8, 16, 16, 8]
    assert two == [24, 32, 32, 24], "from the last rank to the first, too"
    v = [cost.v_volume(1, 1, 1, 1, 4, 8, rank).sent for rank in range(4)]
    assert v == [16, 32, 32, 16], "the last rank passes a micro-batch on to itself"


# Ranks that do it

B, S = 2, 6
SCHEDULES = {
    "sequential": (sequential, 1),
    "GPipe": (gpipe, 1),
    "1F1B": (one_forward_one_backward, 1),
    "ZB-H1": (zero_bubble, 1),
    "interleaved 1F1B": (partial(interleaved, num_chunks=2), 2),
    "ZB-V": (zb_v, 2),
    "DualPipeV": (dualpipe_v, 2),
}


def one_step(group, make_schedule, m):
    """Bytes that this rank sends, most bytes of activations that it holds, width of the model."""
    model = small_model("llama", num_layers=4, tied_embedding=False)
    parallel = apply_pipeline_parallel(model, group, make_schedule)
    tokens = torch.zeros(B, S, dtype=torch.int64)
    with Ledger() as ledger, Meter(model) as meter:
        parallel.run(m * [(tokens, tokens)], lambda logits, targets: logits.sum(), 1.0)
    held = max(moment.bytes["activation"] for moment in meter.timeline)
    return ledger.bytes_sent(op="send"), held, model.config.width


def test_ranks_send_and_hold_what_the_formulas_say():
    """To the byte; but chunks are only about half of a rank, and I frees a part before W."""
    m, makers = 4, [make_schedule for make_schedule, _ in SCHEDULES.values()]
    ranks = run(lambda group: [one_step(group, make, m) for make in makers], 2)
    for rank, seen in enumerate(ranks):
        one_micro_batch = seen[0][1]  # of the sequential schedule
        for (name, (_, v)), (sent, held, width) in zip(SCHEDULES.items(), seen, strict=True):
            is_v = name in ("ZB-V", "DualPipeV")
            arguments = B, S, width, 4, 2, m, rank
            volume = cost.v_volume(*arguments) if is_v else cost.pipeline_volume(*arguments, v)
            assert sent == volume.sent
            expected = cost.activations_held(name, 2, m, rank, v) * one_micro_batch / v
            if is_v:  # the last rank has no logits here
                without_logits = expected / one_micro_batch * ranks[0][0][1]
                assert held == pytest.approx(without_logits, rel=0.05)
            elif name == "interleaved 1F1B":
                assert held == pytest.approx(expected, rel=0.03)
            elif (name, rank) == ("ZB-H1", 1):
                assert one_micro_batch < held < expected
            else:
                assert held == expected, (name, rank)
