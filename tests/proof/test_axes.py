"""Every axis, the same training: one small case of each, for the seconds of `make quick`.

The case of each technique's own tests are many, and `tests/test_grid.py` combines them.
"""

from functools import partial

import pytest

from minitron.comm.mesh import make_mesh
from minitron.parallel.context.axis import apply_context_parallel
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.proof.oracle import assert_same_training, small_llama
from tools.grid import Case, try_each

ONE = Case(1, 1, 1, "llama", "bucketed", False, "none", "1f1b", "2 pp")
AXES = {
    "data": ONE._replace(dp=2),
    "ZeRO-1": ONE._replace(dp=2, data="zero1"),
    "ZeRO-2": ONE._replace(dp=2, data="zero2"),
    "ZeRO-3": ONE._replace(dp=2, data="zero3"),
    "tensor": ONE._replace(tp=2),
    "sequence": ONE._replace(tp=2, sequence=True),
    "pipeline": ONE._replace(pp=2),
}


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    return dict(zip(AXES, try_each(list(AXES.values())), strict=True))


@pytest.mark.parametrize("axis", AXES)
def test_it_is_the_same_training(wrong, axis):
    assert wrong[axis] == []


def test_context_parallelism_is_the_same_training():
    make_model = partial(small_llama, max_sequence_length=8)
    assert_same_training(apply_context_parallel, 2, make_model, sequence=8)


def test_hybrid_sharding_is_the_same_training():
    def apply(model, world):
        mesh = make_mesh("cpu", replicas=2, dp=2)
        return apply_fsdp(model, mesh.group("dp"), replicas=mesh.group("replicas"))

    assert_same_training(apply, 4)
