"""The mesh: who is in which group, and under which name the ledger sees it."""

import pytest
import torch
import torch.distributed as dist

from minitron.comm.mesh import make_mesh
from minitron.config import ConfigError
from minitron.launch import run
from minitron.measure.ledger import Ledger


def two_by_three(group):
    mesh = make_mesh("cpu", dp=2, tp=3)
    places = {axis: (mesh.rank(axis), mesh.size(axis)) for axis in mesh.axes}
    members = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in mesh.axes}
    return mesh.axes, places, members


def test_the_last_axis_varies_fastest():
    for rank, (axes, places, members) in enumerate(run(two_by_three, 6)):
        dp, tp = divmod(rank, 3)
        assert list(axes.items()) == [("dp", 2), ("tp", 3)]
        assert places == {"dp": (dp, 2), "tp": (tp, 3)}
        assert members == {"dp": [tp, tp + 3], "tp": [3 * dp, 3 * dp + 1, 3 * dp + 2]}


def one_axis_over_all(group):
    mesh = make_mesh("cpu", pp=1, dp=2)
    with Ledger() as ledger:
        for reduced in (mesh.group("pp"), mesh.group("dp"), group):
            dist.all_reduce(torch.ones(3), group=reduced)
    return [(call.axis, call.number, call.sent) for call in ledger.calls]


def test_the_ledger_names_the_axis_also_where_it_covers_all_ranks():
    for rank, calls in enumerate(run(one_axis_over_all, 2)):
        # chunks of 2 and 1 values: each rank sends both of them, 12 bytes
        assert calls == [("pp", 0, 0), ("dp", 0, 12), ("world", 0, 12)], rank


def again(group):
    mesh = make_mesh("cpu", dp=2, tp=1)
    same, other = make_mesh("cpu", dp=2, tp=1), make_mesh("cpu", tp=1, dp=2)
    return same.group("dp") is mesh.group("dp"), list(same.axes), list(other.axes)


def test_the_same_axes_give_the_same_groups():
    for reused, axes, others in run(again, 2):
        assert reused and axes == ["dp", "tp"] and others == ["tp", "dp"]


def two_axes_together(group):
    mesh = make_mesh("cpu", pp=2, dp=2, cp=2, tp=1)
    joined = mesh.joined_group("dp", "cp")
    with Ledger() as ledger:
        dist.all_reduce(torch.ones(4), group=joined)
    others = dist.get_process_group_ranks(mesh.joined_group("pp", "cp"))
    members, again = dist.get_process_group_ranks(joined), mesh.joined_group("dp", "cp") is joined
    return members, joined.rank(), [call.axis for call in ledger.calls], others, again


def test_a_group_over_two_axes_is_in_the_order_of_the_mesh():
    for rank, (members, own, axes, others, again) in enumerate(run(two_axes_together, 8)):
        pp, place = divmod(rank, 4)
        assert members == list(range(4 * pp, 4 * pp + 4)) and own == place
        assert axes == ["dp_cp"] and again
        dp = place // 2
        assert others == [2 * dp, 2 * dp + 1, 4 + 2 * dp, 5 + 2 * dp]


def wrong_meshes(group):
    messages = []
    for axes in ({"dp": 2, "tp": 2}, {"data": 2}):
        with pytest.raises(ConfigError) as error:
            make_mesh("cpu", **axes)
        messages.append(str(error.value))
    return messages


def test_a_mesh_that_does_not_fit_says_so():
    for too_large, unknown in run(wrong_meshes, 2):
        assert too_large.startswith("a mesh of dp 2 x tp 2 = 4 ranks does not fit 2 processes")
        assert unknown == "mesh axes ['data'] are unknown: choose from dp, replicas, pp, cp, tp, ep"
