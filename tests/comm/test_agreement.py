"""What ranks tell each other arrives as it was sent."""

import pytest
import torch

from minitron.comm.agreement import SINGLE_RANK, all_gather_tensors, from_bytes, to_bytes
from minitron.launch import run

TENSORS = {
    "scalar": torch.tensor(1.5),
    "matrix": torch.arange(6.0).reshape(2, 3).T,
    "bfloat16": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
    "integers": torch.tensor([[1, 2]]),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_the_same_from_its_bytes(name):
    sent = TENSORS[name]
    came = from_bytes(*to_bytes(sent))
    assert came.dtype == sent.dtype and torch.equal(came, sent)


def gather(group):
    own = {"rank": torch.full((2,), float(group.rank())), "none": None}
    return [(theirs["rank"].tolist(), theirs["none"]) for theirs in all_gather_tensors(own, group)]


def test_every_rank_gets_what_all_have():
    assert run(gather, 3) == [[([0.0, 0.0], None), ([1.0, 1.0], None), ([2.0, 2.0], None)]] * 3


def test_one_rank_gets_its_own():
    assert gather(SINGLE_RANK) == [([0.0, 0.0], None)]
