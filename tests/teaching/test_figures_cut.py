"""Matrices in a picture: every part where its rank holds it, sums striped, and all on the page."""

from itertools import combinations

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from teaching.figures import Matrix, cut, png
from teaching.figures_cut import LEGEND, WIDTH
from teaching.figures_style import BAND, RANK_COLOR, WORK_COLOR
from tests.tiers import tiered

X = Matrix("X", "S x D")
BY_COLUMNS = [
    X,
    "x",
    Matrix("A", "D x F/2", 1, 2, columns=(0, 1)),
    "=",
    Matrix("Y", "S x F/2", 1, 2, columns=(0, 1)),
]
BY_ROWS = [
    Matrix("X", "S x D/2", columns=(0, 1)),
    "x",
    Matrix("A", "D/2 x F", 1, 2, rows=(0, 1)),
    "=",
    Matrix("Y", "S x F", 1, 2, sum_of=(0, 1)),
    "all-reduce",
    Matrix("Y", "S x F", 1, 2),
]
HALVES = Matrix("norm", "S/2 x D", rows=(0, 1))
HEADS = Matrix("attention", "S x D/2", columns=(0, 1))
BLOCK = [HALVES, ("all-gather", "reduce-scatter"), HEADS, ("reduce-scatter", "all-gather"), HALVES]


def cards(figure):
    """What is drawn above the legend: (color of a rank or grey, is striped, x, y, w, h)."""
    axes = figure.axes[0]
    above = [p for p in axes.patches if p.get_y() + p.get_height() < axes.get_ylim()[0] - LEGEND]
    return [
        (
            to_hex(p.get_edgecolor() if p.get_hatch() else p.get_facecolor()).upper(),
            bool(p.get_hatch()),
            *p.get_xy(),
            p.get_width(),
            p.get_height(),
        )
        for p in above
    ]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def arrows(figure):
    """(text, start, end, color) of every arrow, from the left as they were drawn."""
    axes = figure.axes[0]
    drawn = [
        (text, following)
        for text, following in zip(axes.texts, axes.texts[1:], strict=False)
        if isinstance(text, Annotation)
    ]
    return [
        (
            following.get_text(),
            text.xyann[0],
            text.xy[0],
            to_hex(text.arrow_patch.get_edgecolor()).upper(),
        )
        for text, following in drawn
    ]


@pytest.mark.parametrize(
    "row", tiered([BLOCK, BY_COLUMNS, BY_ROWS]), ids=["block", "columns", "rows"]
)
def test_the_same_matrices_give_the_same_bytes(row):
    assert png(cut({"row": row})) == png(cut({"row": row}))


def test_columns_stand_beside_each_other_in_their_ranks_colors():
    grey, first, second, *_ = cards(cut({"by columns": BY_COLUMNS}))
    assert grey[0] == BAND
    assert (first[0], second[0]) == RANK_COLOR[:2]
    assert first[2] + first[4] == pytest.approx(second[2]), "the second begins where one ends"
    assert first[3] == second[3] and first[5] == second[5] == grey[5]
    assert first[4] == second[4] == pytest.approx(grey[4]), "half of twice the width"


def test_rows_stand_below_each_other():
    _, _, first, second, *_ = cards(cut({"by rows": BY_ROWS}))
    assert (first[0], second[0]) == RANK_COLOR[:2]
    assert first[3] + first[5] == pytest.approx(second[3]) and first[2] == second[2]


def test_only_partial_sums_are_striped_and_each_is_as_large_as_the_sum():
    drawn = cards(cut({"by rows": BY_ROWS}))
    striped = [card for card in drawn if card[1]]
    assert [card[0] for card in striped] == list(RANK_COLOR[:2])
    total = drawn[-1]
    assert total[0] == BAND and not total[1]
    for card in striped:
        assert card[4] == pytest.approx(total[4], abs=0.06)
        assert card[5] == pytest.approx(total[5], abs=0.06)
    assert striped[0][2] < striped[1][2] and striped[0][3] < striped[1][3]


@pytest.mark.parametrize("ranks", tiered([4, 2, 8]))
def test_copies_of_a_part_overlap_within_the_part(ranks):
    half = ranks // 2
    key = Matrix("key", "D x 2K", columns=(tuple(range(half)), tuple(range(half, ranks))))
    drawn = cards(cut({"key": [key]}))
    assert [card[0] for card in drawn] == [RANK_COLOR[rank] for rank in range(ranks)]
    left, right = drawn[:half], drawn[half:]
    assert max(card[2] + card[4] for card in left) <= right[0][2]
    assert all(card[4] > 0.05 and card[5] > 0.05 for card in drawn)
    assert [text for text in texts(cut({"key": [key]})) if text.isdigit()] == [
        str(rank) for rank in range(ranks)
    ]


def test_each_matrix_has_its_name_its_shape_and_who_holds_it():
    said = texts(cut({"the product by rows": BY_ROWS}))
    assert said[0] == "the product by rows"
    for text in ("A", "D/2 x F", "all-\nreduce", "\u00d7", "=", "all"):
        assert said.count(text) == 1
    assert said.count("0") == said.count("1") == 3
    assert "S x D" in texts(cut({"by columns": BY_COLUMNS}))


def test_an_arrow_is_purple_where_bytes_cross_the_wire():
    row = [X, "GELU", X, "all-reduce", X, "all-gather\nof X", X]
    drawn = arrows(cut({"row": row}))
    assert [(text, color == WORK_COLOR["communication"]) for text, _, _, color in drawn] == [
        ("GELU", False),
        ("all-\nreduce", True),
        ("all-\ngather\nof X", True),
    ]
    assert all(start < end for _, start, end, _ in drawn)


def test_an_arrow_is_longer_than_its_text():
    figure = cut({"row": [X, "all-gather\nof every input", X]})
    figure.draw_without_rendering()
    ((text, start, end, _),) = arrows(figure)
    (label,) = [t for t in figure.axes[0].texts if t.get_text() == text]
    box = label.get_window_extent().transformed(figure.axes[0].transData.inverted())
    assert start <= box.x0 and box.x1 <= end


def test_a_pair_points_forward_and_back():
    there, back, *_ = arrows(cut({"block": BLOCK}))
    assert (there[0], back[0]) == ("all-\ngather", "reduce-\nscatter")
    assert there[1] < there[2] and back[1] > back[2]

    nothing, reduced = arrows(cut({"block": [X, ("", "all-reduce"), X]}))
    sent = WORK_COLOR["communication"]
    assert nothing[0] == "" and nothing[3] != sent and reduced[3] == sent


def test_like_regions_of_two_lanes_stand_above_each_other():
    tensor = [X, ("", "all-reduce"), HEADS, ("all-reduce", ""), X]
    drawn = cards(cut({"tensor": tensor, "sequence": BLOCK}))
    upper, lower = drawn[:4], drawn[4:]
    assert upper[1][2] == pytest.approx(lower[2][2]), "the first rank's heads"
    assert upper[3][2] == pytest.approx(lower[4][2]), "the last region"


@pytest.mark.parametrize(
    ("row", "said", "unsaid"),
    [
        (BY_COLUMNS, ["a shard", "replicated"], ["partial sums", "copy", "backward"]),
        (BY_ROWS, ["a shard", "partial sums"], ["copy", "backward"]),
        ([HALVES], ["a shard"], ["replicated", "copy", "partial sums", "backward"]),
        (
            [Matrix("key", "D x K", columns=((0, 1),))],
            ["copy"],
            ["a shard", "replicated", "partial sums"],
        ),
        (
            BLOCK,
            ["a shard", "upper arrow: forward, lower: backward"],
            ["replicated", "partial sums"],
        ),
    ],
    ids=["columns", "rows", "halves", "copies", "block"],
)
def test_the_legend_says_what_occurs_and_nothing_else(row, said, unsaid):
    figure = cut({"": row})
    bottom = figure.axes[0].get_ylim()[0] - LEGEND
    legend = " | ".join(
        text.get_text() for text in figure.axes[0].texts if text.get_position()[1] > bottom
    )
    assert all(text in legend for text in said), legend
    assert not any(text in legend for text in unsaid), legend


@pytest.mark.parametrize(
    "rows",
    [
        {"by columns": BY_COLUMNS, "by rows": BY_ROWS},
        {
            "block": [
                *BLOCK,
                ("all-gather", "reduce-scatter"),
                HEADS,
                ("reduce-scatter", "all-gather"),
                HALVES,
            ]
        },
        {"tall": [Matrix("logits\nof all tokens", "S x V/8", 4, 3, sum_of=tuple(range(8)))]},
    ],
    ids=["equations", "block", "tall"],
)
def test_everything_is_on_the_page_and_no_text_lies_on_another(rows):
    figure = cut(rows)
    figure.draw_without_rendering()
    page, (width, height) = figure.bbox, figure.get_size_inches()
    assert width == WIDTH and height < 8
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    for box in boxes + [patch.get_window_extent() for patch in figure.axes[0].patches]:
        assert page.x0 <= box.x0 and box.x1 <= page.x1
        assert page.y0 <= box.y0 and box.y1 <= page.y1
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_row_that_is_too_long_is_an_error_with_a_remedy():
    with pytest.raises(ValueError, match=r"'chain' with its 23 items does not fit on 7 inches"):
        cut({"chain": [X, *["x", X] * 11]})
