"""Chapter 5's measurements: what is timed, the fit that leaves out a point, and rails."""

from unittest.mock import patch

import pytest
import torch

from minitron import cost
from minitron.comm.collectives import all_reduce_naive, all_reduce_ring
from minitron.launch import run
from minitron.measure.ledger import Ledger
from teaching.lab import ch05 as lab
from teaching.lab import show_text

LINK = cost.Link(15e-6, 400e9)
NODES = [2, 4, 8]


def counted(group, all_reduce, num_elements):
    tensor = torch.ones(num_elements)
    with Ledger() as ledger:
        all_reduce(tensor, group)
    correct = bool((tensor == group.size()).all())
    return correct, ledger.bytes_sent(), ledger.bytes_received()


def alike_on_two_ranks(group, all_reduce, num_elements):
    return group.size() < 3


def forgotten(tensor, group):
    """An all-reduce that sends nothing, and so is right alone, and where there is nothing."""


def test_verdicts_count_sums_bytes_and_bits_by_rank_and_length(capsys):
    candidates = {
        "ring": (all_reduce_ring, cost.ring_all_reduce_volume),
        "wrong": (forgotten, cost.ring_all_reduce_volume),
    }
    lab.print_verdicts(candidates, counted, alike_on_two_ranks, longest=1003, most_ranks=3)
    head, ring, wrong = capsys.readouterr().out.splitlines()
    assert head == "               cases   correct sum   bytes as in the formula   same bits"
    # lengths: 0, 1, 2, 1003 on 1 rank; 0, 1, 3, 1003 on 2; 0, 1, 2, 4, 1003 on 3
    assert ring.split() == ["ring", "27", "27", "27", "12"]
    # on one rank everything is right; on more, only nothing is
    name, cases, correct, as_formula, _ = wrong.split()
    assert (name, cases, correct) == ("wrong", "27", str(4 + 2 + 3))
    assert 4 + 2 + 3 <= int(as_formula) < 27


def test_a_network_that_is_emulated_takes_its_time():
    slow = cost.Link(0.02, 1e9)
    algorithms = {"ring": all_reduce_ring, "naive": all_reduce_naive}
    by_rank = run(lab.emulated_seconds, 3, algorithms, 1000, slow, 2)
    assert all(list(seconds) == ["ring", "naive"] for seconds in by_rank)
    formulas = {"ring": cost.ring_all_reduce_seconds, "naive": cost.naive_all_reduce_seconds}
    for name, formula in formulas.items():  # nobody sleeps less than asked to
        assert max(seconds[name][0] for seconds in by_rank) >= 0.9 * formula(1000, 3, *slow)
        assert all(seconds[name] == sorted(seconds[name]) for seconds in by_rank)
        assert all(len(seconds[name]) == 2 for seconds in by_rank)


def test_every_run_is_as_long_as_its_slowest_rank():
    algorithms = {"ring": all_reduce_ring, "naive": all_reduce_naive}
    found = lab.timed_runs(algorithms, [1000, 4000], num_ranks=2, repeats=3)
    assert list(found) == ["ring", "naive"]
    for by_size in found.values():
        assert [len(took) for took in by_size] == [3, 3]
        assert all(took == sorted(took) and took[0] > 0 for took in by_size)
    assert [len(took) for took in lab.ring_runs([1000, 4000, 8000], 2, repeats=1)] == [1, 1, 1]

    ranks = [{"ring": [[1.0, 5.0]]}, {"ring": [[4.0, 2.0]]}]  # rank 1 is late first, rank 0 then
    with patch.object(lab, "run", return_value=ranks):
        assert lab.timed_runs({"ring": all_reduce_ring}, [1000]) == {"ring": [[4.0, 5.0]]}


def test_runs_are_printed_with_their_median_and_relative_to_another_s(capsys):
    runs = {"ours": [[0.002, 0.003, 0.009], [0.1] * 3], "theirs": [[0.001] * 3, [0.05] * 3]}
    lab.print_runs(runs, [16_000, 32_000_000], "theirs")
    assert capsys.readouterr().out.splitlines() == [
        "4 ranks, ms             16.0 kB              32.0 MB",
        "ours                2.00   3.00 (2.00) 100.00 100.00 (2.00)",
        "theirs              1.00   1.00 (1.00)  50.00  50.00 (1.00)",
    ]


def test_a_cluster_that_follows_the_model_is_found_from_any_of_its_points():
    rates = [lab.bus_bandwidth(count, LINK) for count in NODES]
    assert rates == sorted(rates, reverse=True)
    for index in range(len(NODES)):
        kept = [i for i in range(len(NODES)) if i != index]
        fitted = lab.fit_cluster([NODES[i] for i in kept], [rates[i] for i in kept])
        assert fitted == pytest.approx(LINK)
        assert lab.bus_bandwidth(NODES[index], fitted) == pytest.approx(rates[index])


def test_one_published_point_decides_the_bandwidth():
    """Why the chapter does not read beta as the eight links: the playbook's rates."""
    nodes, bus = [2, 4, 8, 16, 32, 64], [361.7492, 160.1395, 99.5643, 84.7405, 64.9254, 32.9378]
    assert lab.fit_cluster(nodes, bus).bandwidth > 2 * lab.fit_cluster(nodes[1:], bus[1:]).bandwidth


def ranks_of(group):
    return [
        torch.distributed.get_process_group_ranks(each)
        for each in lab.node_and_rail(group, gpus_per_node=2)
    ]


def test_a_rail_connects_the_same_place_of_every_node():
    assert run(ranks_of, 4) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]


def test_a_long_message_is_wrapped(capsys):
    show_text("word " * 40 + "\nnext")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 78 and lines[-1] == "  next" and len(lines) > 3
