"""The picture of the rank grid: every rank in its node, rank 0's groups, and their links."""

import numpy
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from teaching.figures import png
from teaching.figures_grid import (
    Crossing,
    Piece,
    group_along,
    pieces,
    placed_steps,
    rank_grid,
    who_sums,
)
from teaching.figures_style import AXIS_COLOR, BAND, BLACK, RANK_COLOR

TP, DP, PP = (AXIS_COLOR[axis] for axis in ("tp", "dp", "pp"))

CUBE = {"pp": 2, "dp": 2, "tp": 2}
SHAPES = [
    (CUBE, 4),
    (CUBE, 8),
    ({"pp": 4, "dp": 2, "tp": 8}, 8),
    ({"dp": 16}, 8),
    ({"pp": 2, "dp": 1, "tp": 3}, 3),
    ({"dp": 2, "tp": 16}, 8),
    ({"pp": 1, "dp": 1}, 8),
]


def patches(figure, kind):
    return [patch for patch in figure.axes[0].patches if type(patch) is kind]


def squares(figure):
    """Each rank's square, by the number that stands in it."""
    found = {}
    texts = [text for text in figure.axes[0].texts if text.get_text().isdigit()]
    for square, text in zip(patches(figure, Rectangle), texts, strict=True):
        box = square.get_bbox()
        assert box.contains(*text.get_position())
        found[int(text.get_text())] = square
    return found


def overlaps(a, b):
    return a.x0 < b.x1 - 1e-9 and b.x0 < a.x1 - 1e-9 and a.y0 < b.y1 - 1e-9 and b.y0 < a.y1 - 1e-9


@pytest.mark.parametrize(
    ("axes", "gpus_per_node"),
    [*SHAPES, ({"dp": 2, "tp": 32}, 64), ({"pp": 2, "dp": 5, "tp": 6}, 12)],
)
def test_every_rank_has_a_square_in_its_node(axes, gpus_per_node):
    figure = rank_grid(axes, gpus_per_node)
    nodes = [patch.get_bbox() for patch in patches(figure, FancyBboxPatch)]
    num_ranks = numpy.prod(list(axes.values()))
    assert list(squares(figure)) == list(range(num_ranks))
    assert len(nodes) == -(-num_ranks // gpus_per_node)

    for rank, square in squares(figure).items():
        box, node = square.get_bbox(), nodes[rank // gpus_per_node]
        assert node.x0 < box.x0 and box.x1 < node.x1 and node.y0 < box.y0 and box.y1 < node.y1
    page = figure.axes[0]
    assert all(0 < node.x0 and node.x1 < page.get_xlim()[1] for node in nodes)
    assert not any(overlaps(a, b) for index, a in enumerate(nodes) for b in nodes[:index])


@pytest.mark.parametrize("axes", [CUBE, {"pp": 4, "dp": 2, "tp": 8}, {"dp": 3, "tp": 1, "pp": 5}])
def test_a_group_is_a_line_through_rank_0(axes):
    grid = numpy.arange(numpy.prod(list(axes.values()))).reshape(tuple(axes.values()))
    for number, axis in enumerate(axes):
        line = numpy.moveaxis(grid, number, 0).reshape(axes[axis], -1)[:, 0]
        assert list(group_along(axes, axis)) == list(line)


def test_colors_say_which_ranks_talk_with_rank_0():
    colors = {
        rank: to_hex(square.get_facecolor()).upper()
        for rank, square in squares(rank_grid(CUBE, 4)).items()
    }
    assert colors == {0: BLACK, 1: TP, 2: DP, 4: PP, 3: BAND, 5: BAND, 6: BAND, 7: BAND}


def links(figure):
    """Color and whether solid, in the order in which they are drawn: the fastest axis first."""
    return [
        (to_hex(link.get_edgecolor()).upper(), link.get_linestyle() == "-")
        for link in patches(figure, FancyArrowPatch)
    ]


def test_links_are_solid_inside_a_node_and_dashed_between_nodes():
    assert links(rank_grid(CUBE, 4)) == [(TP, True), (DP, True), (PP, False)]
    assert links(rank_grid(CUBE, 8)) == [(TP, True), (DP, True), (PP, True)]
    assert links(rank_grid(CUBE, 2)) == [(TP, True), (DP, False), (PP, False)]
    assert links(rank_grid({"dp": 4}, 2)) == [(DP, True), (DP, False), (DP, True)]


@pytest.mark.parametrize(("axes", "gpus_per_node"), SHAPES)
def test_no_link_runs_through_a_third_square(axes, gpus_per_node):
    figure = rank_grid(axes, gpus_per_node)
    boxes = [square.get_bbox() for square in squares(figure).values()]
    share = numpy.linspace(0, 1, 50)[:, None]
    for link in patches(figure, FancyArrowPatch):
        start, bend, end = link.get_path().vertices[:3]
        line = (1 - share) ** 2 * start + 2 * share * (1 - share) * bend + share**2 * end
        crossed = [box for box in boxes if any(box.contains(x, y) for x, y in line)]
        assert len(crossed) == 2


def test_words_below_say_the_same():
    def words(*arguments):
        return [
            text.get_text()
            for text in rank_grid(*arguments).axes[0].texts
            if "ranks" in text.get_text()
        ]

    assert words(CUBE, 4) == [
        "tp: ranks 0, 1, over NVLink",
        "dp: ranks 0, 2, over NVLink",
        "pp: ranks 0, 4, over the network",
    ]
    assert words({"pp": 1, "dp": 16}, 8) == ["dp: ranks 0, 1 ... 15, over NVLink and the network"]


def test_the_same_grid_gives_the_same_bytes():
    assert png(rank_grid(CUBE, 4)) == png(rank_grid(CUBE, 4))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"dp": 64, "tp": 8}, "512 ranks, of which 128 can be drawn"),
        ({"dp": 6, "tp": 2}, "12 ranks do not fill nodes of 8"),
    ],
)
def test_what_cannot_be_drawn_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        rank_grid(axes)


# Who sums what


def test_each_panel_joins_the_ranks_that_sum():
    figure = who_sums([Crossing("a", ("tp",), "once"), Crossing("b", ("dp",), "often", ("pp",))])
    assert list(map(link_ends, patches(figure, FancyArrowPatch)[:4])) == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
    second = patches(figure, FancyArrowPatch)[4:]
    colors = [to_hex(link.get_edgecolor()).upper() for link in second]
    assert colors == 4 * [DP] + 4 * [PP]
    heads = [link.get_arrowstyle().__class__.__name__ for link in second]
    assert heads == 4 * ["Curve"] + 4 * ["CurveFilledB"], "a copy is an arrow"
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"a", "b", "once", "often", "tp", "dp", "pp (copy)"} <= words


def link_ends(link):
    """The ranks at both ends of a straight link in the first panel."""
    texts = [text for text in link.axes.texts if text.get_text().isdigit()][:8]
    return tuple(
        int(min(texts, key=lambda text: numpy.hypot(*(text.get_position() - end))).get_text())
        for end in (link.get_path().vertices[0], link.get_path().vertices[-1])
    )


def test_links_between_stages_stay_on_the_page():
    crossing = Crossing("a", (), "once", ("pp",))
    for figure in (who_sums([crossing] * 5), who_sums([Crossing("a", ("pp",), "once")] * 5)):
        page = figure.axes[0]
        for link in patches(figure, FancyArrowPatch):
            x, y = link.get_path().vertices[:3].T  # and the bend
            assert 0 < x.min() and x.max() < page.get_xlim()[1]
            assert page.get_ylim()[1] < y.min() and y.max() < page.get_ylim()[0]


# What the order costs, and who stores what


def test_an_order_of_the_axes_says_where_the_groups_of_rank_0_are():
    parts = {"matmul": 3.0, "tp": 1.0, "dp": 0.001}
    steps = {("dp", "tp"): parts, ("tp", "dp"): parts}
    figure = placed_steps(steps, {"dp": 2, "tp": 4}, gpus_per_node=4)
    left, right = figure.axes
    black, tp, dp, grey = (to_rgb(c) for c in (BLACK, AXIS_COLOR["tp"], AXIS_COLOR["dp"], BAND))
    by_rank = [
        [tuple(color) for gpus in zip(*rows, strict=True) for color in gpus]  # down a node
        for rows in (mesh.get_array().reshape(4, 2, 3) for mesh in left.collections)
    ]
    assert by_rank == [
        [black, tp, tp, tp, dp, grey, grey, grey],
        [black, dp, tp, grey, tp, grey, tp, grey],
    ]
    assert [label.get_text() for label in left.get_yticklabels()] == ["dp tp", "tp dp"]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["matmuls", "tp", "dp"], "also what is too short to see"


def test_a_piece_has_its_ranks_color_and_its_elements():
    figure = pieces((3, 2), {"written": [Piece(0, (0, 0), (1, 2)), Piece(2, (1, 1), (2, 1))]})
    drawn = {
        to_hex(patch.get_facecolor()).upper(): patch.get_bbox()
        for patch in figure.axes[0].patches
        if patch.get_facecolor()[3] and patch.get_y() < 1.3
    }
    assert list(drawn) == [RANK_COLOR[0], RANK_COLOR[2]]
    inside = {
        color: [
            text.get_text()
            for text in figure.axes[0].texts
            if box.contains(*text.get_position()) and text.get_text().isdigit()
        ]
        for color, box in drawn.items()
    }
    assert inside == {RANK_COLOR[0]: ["0", "1"], RANK_COLOR[2]: ["3", "5"]}
    words = [text.get_text() for text in figure.axes[0].texts]
    assert {"written", "rank 0's file", "rank 2's file"} <= set(words)
