"""Chapter 5's measurements: what is timed, the fit that leaves out a point, and rails."""

import pytest
import torch

from minitron import cost
from minitron.comm.collectives import all_reduce_naive, all_reduce_ring
from minitron.launch import run
from teaching.lab import ch05 as lab
from teaching.lab import show_text

LINK = cost.Link(15e-6, 400e9)
NODES = [2, 4, 8]


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


def test_the_slowest_rank_is_the_ring_s_time():
    algorithms = {"ring": all_reduce_ring, "naive": all_reduce_naive}
    by_rank = run(lab.fastest_runs, 2, algorithms, [1000, 4000], 2, watch=False)
    assert all(
        len(best[name]) == 2 and min(best[name]) > 0 for best in by_rank for name in algorithms
    )
    assert list(lab.fastest_seconds(algorithms, [1000], 2, repeats=1)) == ["ring", "naive"]
    assert len(lab.ring_seconds([1000, 4000, 8000], num_ranks=2, repeats=1)) == 3


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
