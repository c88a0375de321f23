"""What an answer does to its arguments is seen, and a copy of a tensor keeps its strides."""

import torch

from teaching.graders.arguments import call_and_look, copy_of


def test_the_arguments_are_seen_as_they_are_afterwards():
    def answer(costs, x):
        costs.append(1.0)
        x += 1
        return sum(costs)

    costs, x = [2.0], torch.zeros(2)
    result, after = call_and_look(answer, costs, x)
    assert result == 3.0 and after[0] == [2.0, 1.0] and after[1].tolist() == [1.0, 1.0]
    assert costs == [2.0] and not x.any()


def test_a_copy_keeps_strides_and_values():
    x = torch.arange(6.0).view(2, 3).T
    copy = copy_of({"x": x, "n": [1]})
    assert copy["x"].stride() == x.stride() and copy["x"].equal(x) and copy["n"] == [1]
    assert copy["x"].data_ptr() != x.data_ptr()
