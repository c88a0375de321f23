"""Chapter 4's measurements: a network that suits the machine, a queue, and what repeats carry."""

from types import SimpleNamespace

import pytest
import torch

from minitron import cost
from minitron.launch import run
from minitron.parallel.data.ddp import apply_naive_data_parallel, average_gradients
from teaching.claims import REFUTED
from teaching.lab import ch04 as lab
from teaching.overlap import Compute, compute_in_proportion, in_buckets, transfers
from tests.tiers import exhaustive

SIZES = lab.gradient_bytes()


def test_the_network_s_two_costs_are_those_it_promises():
    compute = compute_in_proportion(SIZES, 0.05, 0.1)
    network = lab.Network.for_machine(compute, SIZES)
    assert sum(SIZES) / network.bandwidth == pytest.approx(0.06, rel=0.02)
    assert 2 * len(SIZES) * network.latency == pytest.approx(0.1, rel=0.02)


def test_without_overlap_nothing_travels_before_the_backward_pass_is_over():
    compute = compute_in_proportion(SIZES, 0.05, 0.1)
    network, buckets = lab.Network(1e-4, 1e8), lab.buckets_of(2**20)
    late = network.predict(compute, buckets, overlapped=False)
    early = network.predict(compute, buckets)
    assert late[0][0] == compute.backward > early[0][0]
    assert late[-1][1] > early[-1][1]
    assert [len(spans) for spans in (late, early)] == [len(buckets)] * 2


def test_every_gradient_is_in_one_bucket_and_the_first_is_small():
    buckets = lab.buckets_of(16 * 2**20)
    assert sorted(sum(buckets, [])) == list(range(len(SIZES)))
    assert sum(SIZES[i] for i in buckets[0]) <= 2**20 < sum(SIZES[i] for i in buckets[-1])


@exhaustive  # chapter 4 measures so when it is executed
def test_steps_take_turns_and_are_those_of_the_slowest_rank():
    network = lab.Network(1e-4, 1e9)
    applies = {"naive": apply_naive_data_parallel, "bucketed": lab.sized(2**20)}
    compute, found = lab.measure(applies, network, num_steps=2)
    assert isinstance(compute, Compute) and list(found) == list(applies)
    for steps in found.values():
        assert [len(step.calls) for step in steps] == [2, 2], "both ranks"
        assert steps[0].seconds <= steps[1].seconds
        assert lab.median_step(steps) is steps[1]
        assert all(0 < step.backward < step.seconds for step in steps)
    naive, bucketed = (len(steps[0].calls[0]) for steps in found.values())
    assert naive > 2 * bucketed > 0
    link = sum(SIZES) / network.bandwidth + 2 * len(SIZES) * network.latency
    assert all(step.exposed > 0.9 * link for step in found["naive"]), "nothing is hidden"


def test_the_table_has_predicted_and_measured_side_by_side(capsys):
    compute = Compute(1.0, [3.0, 2.0], optimizer=0.5)
    steps = {"naive": [lab.Step([[1, 2]], [], seconds, 2.25, 0.75, 2.5) for seconds in (4, 5, 6)]}
    lab.print_steps(compute, {"naive": [(2.0, 2.5), (3.0, 4.0)]}, steps)
    *titles, row = capsys.readouterr().out.splitlines()
    assert max(map(len, [*titles, row])) <= 80
    assert row.split() == "naive 2 4500 5000 (4500 to 5500) 1000 750 2000 2250".split()


def test_a_longer_backward_pass_is_predicted_again():
    compute = compute_in_proportion(SIZES, 0.05, 0.1)
    network, size = lab.Network(1e-4, 1e9), 2**20
    first = lab.end_of(compute, network.predict(compute, lab.buckets_of(size)))
    same, longer = (
        lab.predict_again(network, compute, [lab.Step([], [], 0, 0, 0, slowest)], size)
        for slowest in (0.1, 0.12)
    )
    assert same == pytest.approx(first) and longer == pytest.approx(first + 20, abs=1)


def test_the_second_prediction_is_said_to_be_better_only_if_it_is():
    spreads, far, near = {"a": (0, 10, 20), "b": (0, 30, 40)}, {"a": 5, "b": 35}, {"a": 9, "b": 33}
    steps = {
        name: [lab.Step([], [], 0, 0, 0, slowest)] for name, slowest in (("a", 0.2), ("b", 0.1))
    }
    said = lab.explained(spreads, far, near, steps)
    assert "200 ms with a and 100 ms with b" in said and "off by 5 ms on average, with it" in said
    assert said.endswith("by 2 ms.") and not said.startswith(REFUTED)
    assert lab.explained(spreads, near, far, steps).startswith(REFUTED)
    swapped = dict(zip(steps, reversed(steps.values()), strict=True))
    assert lab.explained(spreads, far, near, swapped).startswith(REFUTED)


def test_the_table_of_bucket_sizes_fits_a_page(capsys):
    compute, calls = Compute(1.0, [3.0, 2.0], optimizer=0.5), [[1, 2, 3, 4]]
    steps = {"1024 KiB": [lab.Step(calls, [], each, 2.25, 0.75, 2.5) for each in (4, 5, 6)]}
    lab.print_buckets(compute, {"1024 KiB": 4500}, {"1024 KiB": 4800}, steps)
    *titles, row = capsys.readouterr().out.splitlines()
    assert max(map(len, [*titles, row])) <= 80
    assert row.split() == "1024 KiB 2 4500 4800 5000 (4500 to 5500) 2000 2500".split()


def test_exposed_is_from_the_last_gradient_to_the_last_all_reduce_of_one():
    calls = [
        SimpleNamespace(finished=at, payload=payload)
        for at, payload in [(1.0, 8), (4.0, 100), (3.0, 100), (9.0, 4)]
    ]
    assert lab.exposed_in(SimpleNamespace(calls=calls), 2.5) == 1.5
    assert lab.exposed_in(SimpleNamespace(calls=calls), 5.0) == 0


def test_compute_alone_ends_with_the_first_parameter_s_gradient():
    compute = run(lab.compute_alone, 1, 3, watch=False)[0]
    assert isinstance(compute, Compute) and len(compute.ready) == len(SIZES)
    assert 0 < compute.forward < min(compute.ready) and compute.optimizer > 0


@pytest.mark.parametrize(
    ("spreads", "said"),
    [
        ({"a": (10, 11, 12), "b": (20, 21, 22)}, "a was the fastest; b was slower."),
        (
            {"a": (10, 11, 30), "b": (20, 21, 22)},
            "a was the fastest; these repeats cannot tell it from b.",
        ),
        (
            {
                "a": (10, 13, 14),
                "b": (12, 15, 22),
                "c": (30, 31, 32),
                "d": (40, 41, 42),
                "e": (50, 51, 52),
            },
            "a was the fastest; these repeats cannot tell it from b; c, d and e were slower.",
        ),
        ({"a": (10, 11, 12), "b": (11.5, 15, 22)}, "a was the fastest; b was slower."),
    ],
)
def test_only_what_the_repeats_carry_is_said(spreads, said):
    assert lab.told_apart(spreads) == said


def test_three_versions_start_alike_and_learn():
    versions = [(lab.nothing, average_gradients), (lab.nothing, lab.nothing)]
    losses = torch.stack(run(lab.train_all, 2, versions, 20, watch=False))
    assert torch.equal(losses[:, 0, 0], losses[:, 1, 0]), "the first loss, before any update"
    assert losses[:, 0, -1].mean() < 0.7 * losses[:, 0, 0].mean()


def test_the_spread_leaves_out_what_happens_once():
    steps = [lab.Step([], [], seconds, 0, 0, 0) for seconds in (0.010, 0.011, 0.012, 0.013, 0.9)]
    assert lab.spread(steps) == pytest.approx((11, 12, 13))


def test_the_recorded_step_has_a_backward_pass_that_could_hide_its_gradients():
    sizes, compute = lab.recorded_step()
    assert sum(sizes) == 2 * cost.num_parameters(lab.OVERLAP.model)
    assert 0.01 < compute.backward - compute.forward < 1
    assert compute.ready[0] == compute.ready[1] == compute.backward, "the embedding takes no time"


def test_a_rank_holds_one_sequence_s_activations_and_all_else_in_full():
    model = cost.PUBLISHED["Llama 3.2 1B"]
    rows = lab.held_by_ranks(model, num_ranks=4, sequence_length=2048)
    activations = [row["activation"] for row in rows.values()]
    assert len(rows) == 4 and {held.share for held in activations} == {1 / 4}
    assert {held.bytes for held in activations} == {cost.activation_bytes(model, 1, 2048)}
    assert all(row["parameter"].bytes == 2 * cost.num_parameters(model) for row in rows.values())


def test_each_correction_changes_the_tokens_in_its_own_direction():
    model = cost.published_llama(32, 4096, 32, 8, 14336, 128256, 8192)  # two embeddings
    rule, sent, attention, embedding, latency = lab.tokens_to_hide(
        model, 64, 1e-5, 50e9, 4e14
    ).values()
    assert rule == pytest.approx(4e14 / 50e9) and sent == pytest.approx(rule * 63 / 64)
    assert attention < embedding < sent and latency > embedding
    tied = lab.tokens_to_hide(cost.PUBLISHED["Llama 3.2 1B"], 64, 1e-5, 50e9, 4e14)
    assert tied["input embedding"] == pytest.approx(tied["attention"], rel=1e-3)


def test_the_recorded_times_are_parts_of_the_recorded_step():
    times = list(lab.recorded_times().values())
    _, compute = lab.recorded_step()
    assert times[0] == pytest.approx(1e3 * (compute.backward - compute.forward))
    assert all(1 < each < 1e3 * (compute.backward) for each in times)


def test_bytes_and_latency_add_up_to_the_queue_that_never_idles():
    sizes = [2**20, 30 * 2**20, 30 * 2**20]
    seconds = lab.bytes_and_latency(sizes, 8, 1e-5, 1e9)
    sent = transfers([0.0] * 3, sizes, in_buckets(sizes), 8, 1e-5, 1e9)
    assert sum(seconds) == pytest.approx(sent[-1][1]) and seconds[1] == pytest.approx(3 * 14e-5)
