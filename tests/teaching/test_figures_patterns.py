"""The patterns of an all-reduce: partners match, and a tree reaches every rank."""

from itertools import combinations

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


def test_no_label_lies_on_another_on_a_rank_or_on_a_line():
    figure = message_patterns()
    figure.draw_without_rendering()
    for axes in figure.axes:
        texts = [*axes.texts, axes.title]
        boxes = {text: text.get_window_extent() for text in texts}
        for one, other in combinations(texts, 2):
            pair = one.get_text(), other.get_text()
            assert not boxes[one].overlaps(boxes[other]), pair
        labels = [text for text in texts if not text.get_text().isdigit()]  # not a rank's number
        for label in labels:
            for line in axes.patches:
                for part in line.get_path().interpolated(50).to_polygons(closed_only=False):
                    points = line.get_transform().transform(part)
                    on_it = any(boxes[label].contains(*point) for point in points)
                    assert not on_it, (label.get_text(), line)
            for circle in axes.lines:
                x, y = axes.transData.transform(circle.get_xydata())[0]
                radius = circle.get_markersize() / 2 * figure.dpi / 72
                nearest = [
                    min(max(at, low), high)
                    for at, low, high in zip(
                        (x, y), boxes[label].min, boxes[label].max, strict=True
                    )
                ]
                distance = ((nearest[0] - x) ** 2 + (nearest[1] - y) ** 2) ** 0.5
                assert distance > radius, label.get_text()
