"""The patterns of an all-reduce: partners match, and a tree reaches every rank."""

import pytest

from teaching.figures import png
from teaching.figures_patterns import PARENT, SIZE, halving_partners, in_tree, message_patterns


def test_partners_exchange_with_each_other_and_halve_what_they_send():
    for rank in range(SIZE):
        for step, (partner, share) in enumerate(halving_partners(rank), 1):
            assert halving_partners(partner)[step - 1] == (rank, share)
            assert share == 2.0**-step


def test_a_tree_reaches_every_rank_and_its_leaves_are_odd():
    assert sorted([0, *PARENT]) == list(range(SIZE))
    assert set(PARENT) - set(PARENT.values()) == {1, 3, 5, 7}
    assert in_tree(0)[1] == 1 and in_tree(1)[1] == pytest.approx(-1)
    assert len({in_tree(rank) for rank in range(SIZE)}) == SIZE


def test_the_picture_names_each_pattern_s_steps():
    figure = message_patterns()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0].startswith("ring: 14 steps") and titles[1].startswith("halving: 6 steps")
    assert png(figure) == png(message_patterns())
