"""The figures of ranks draw what the ledgers saw, and the ring as it goes round."""

from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minitron.cost import chunk_sizes, ring_reduce_scatter_volume
from minitron.measure.ledger import Call, Span
from teaching.figures import (
    Block,
    crossing,
    png,
    rank_lanes,
    ring_frame,
    ring_frames,
    timeline,
    wire,
)
from teaching.figures_ring import ring_sums, sent_chunks
from teaching.figures_style import RANK_COLOR
from tests.tiers import tiered


def call(started, finished, payload=4_200_000):
    return Call(
        0,
        "all_reduce",
        "dp",
        torch.float32,
        payload,
        payload,
        payload,
        "backward",
        None,
        2,
        started,
        finished,
    )


def texts(axes):
    return [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(
    "draw",
    tiered(
        [
            lambda: wire({"ring": [6e6, 6e6]}, {"ring": [6e6, 6e6]}),
            lambda: ring_frame(3, 2),
            lambda: ring_frames(3),
            lambda: crossing(
                [1, 10], {"ring": [1, 2], "tree": [2, 3]}, "bytes", "s", {"ring": [1, 2]}
            ),
        ]
    ),
    ids=["wire", "ring_frame", "ring_frames", "crossing"],
)
def test_the_same_numbers_give_the_same_bytes(draw):
    assert png(draw()) == png(draw())


def test_lanes_are_milliseconds_since_the_first_event_of_any_rank():
    spans = [[Span("forward", 10.002, 10.005)], [Span("forward", 10.001, 10.004)]]
    lanes = rank_lanes([[call(10.003, 10.006)], []], spans)
    assert list(lanes) == ["rank 0 compute", "rank 0 network", "rank 1 compute", "rank 1 network"]
    (forward,), (transfer,) = lanes["rank 0 compute"], lanes["rank 0 network"]
    assert (forward.kind, forward.start, forward.end) == ("forward", *map(pytest.approx, (1, 4)))
    assert (transfer.kind, transfer.label) == ("communication", "4.20 MB")
    assert (transfer.start, transfer.end) == (pytest.approx(2), pytest.approx(5))
    assert lanes["rank 1 network"] == []


def test_transfers_in_a_queue_are_drawn_one_after_the_other():
    calls = [call(0, 0.004), call(0.001, 0.006), call(0.001, None), call(0.008, 0.009)]
    lanes = rank_lanes([calls], [[]])
    drawn = [(round(b.start, 9), round(b.end, 9)) for b in lanes["rank 0 network"]]
    assert drawn == [(0, 4), (4, 6), (8, 9)], "the one without an end is left out"


def test_compute_too_short_to_be_seen_is_left_out():
    spans = [Span("forward", 0, 0.5), Span("backward", 0.6, 0.601), Span("optimizer", 0.9, 1)]
    lane = rank_lanes([[]], [spans])["rank 0 compute"]
    assert [block.kind for block in lane] == ["forward", "optimizer"]


def test_a_timeline_names_a_narrow_block_only_if_no_other_bears_the_name():
    lane = [Block("forward", 0, 1), Block("forward", 2, 90), Block("backward", 99, 100)]
    assert texts(timeline({"rank 0": lane}).axes[0]) == ["forward", "backward"]


def test_a_timeline_names_a_narrow_block_of_another_kind_though_the_name_stands_elsewhere():
    lane = [Block("forward", 0, 1, "attention"), Block("backward", 2, 100, "attention")]
    assert texts(timeline({"rank 0": lane}).axes[0]) == ["attention", "attention"]


def test_a_timeline_names_narrow_blocks_once_and_narrow_transfers_never():
    lane = [
        Block("forward", 0, 60),
        Block("communication", 60, 61),
        Block("optimizer", 98, 99),
        Block("optimizer", 99, 100),
    ]
    assert texts(timeline({"rank 0": lane, "rank 1": lane}).axes[0]) == [
        "forward",
        "optimizer",
        "forward",
    ]


SLIVERS = [  # as in ZeRO-3: narrow forward passes between waits, then backward passes
    *[Block("forward", start, start + 11) for start in range(10, 120, 20)],
    *[Block("backward", start, start + 16) for start in range(122, 320, 34)],
    *[Block("backward", start, start + 3) for start in range(140, 330, 34)],
]
LATE = [Block("forward", 0, 60), Block("backward", 61, 180), Block("optimizer", 190, 199)]


@pytest.mark.parametrize(
    ("measured", "predicted"),
    [
        ({"rank 0 compute": SLIVERS, "rank 0 network": []}, {"predicted compute": SLIVERS}),
        ({f"rank {rank}": LATE for rank in range(4)}, {"predicted compute": LATE}),
        ({f"rank {rank}": LATE for rank in range(8)}, None),
        ({"rank 0": [Block("forward", 0, 1), Block("backward", 98, 99)]}, None),
    ],
    ids=["slivers", "four ranks", "eight ranks", "both ends"],
)
def test_no_label_of_a_timeline_lies_on_another_or_leaves_the_page(measured, predicted):
    figure = timeline(measured, predicted)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    labels = [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label]
    boxes = [label.get_window_extent() for label in labels if label.get_text()]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1


def test_eight_lanes_have_room_each():
    lanes = {f"lane {i}": [Block("forward", 0, 1)] for i in range(8)}
    assert timeline(lanes).get_figheight() / 8 > 0.4


def test_wire_draws_a_bar_per_rank_where_they_differ_and_one_where_they_agree():
    measured = {"naive": [6e6, 2e6, 2e6], "ring": [3e6, 3e6, 3e6]}
    formula = {"naive": [6e6, 2e6, 1e6], "ring": [3e6, 3e6, 3e6]}
    axes = wire(measured, formula).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [6e6, 2e6, 2e6, 3e6]
    assert [line.get_xdata()[0] for line in axes.lines] == [6e6, 2e6, 1e6, 3e6]
    colors = [to_hex(bar.get_facecolor()).upper() for bar in axes.patches]
    assert colors[:3] == list(RANK_COLOR[:3])
    assert [t for t in texts(axes) if "rank" in t] == ["rank 0", "rank 1", "rank 2", "each rank"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "ring"]
    assert "MB sent" in axes.get_xlabel()


def test_wire_writes_a_name_behind_a_bar_that_is_too_short_for_it():
    axes = wire({"a": [9e6, 1e5], "b": [9e6, 1e5]}, {"a": [9e6, 1e5], "b": [1e5, 1e5]}).axes[0]
    assert texts(axes) == [
        "rank 0",
        "9.00 MB",
        "100 kB, rank 1",
        "9.00 MB, rank 0",
        "100 kB, rank 1",
    ], "nor may a tick cross it"


def test_wire_shows_ranks_apart_when_only_their_formulas_differ():
    axes = wire({"a": [1e6, 1e6]}, {"a": [1e6, 2e6]}).axes[0]
    assert len(axes.patches) == 2


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_ring_sums_every_chunk_once_on_its_rank_and_then_everywhere(size):
    everyone = set(range(size))
    half, done = ring_sums(size, size - 1), ring_sums(size, 2 * (size - 1))
    for rank in range(size):
        whole = [chunk for chunk in range(size) if len(half[rank][chunk]) == size]
        assert whole == [rank], "a reduce-scatter leaves chunk r on rank r"
        assert all({r % size for r in ranks} == everyone for ranks in done[rank])
    assert ring_sums(size, 0) == [[range(r, r + 1)] * size for r in range(size)]


def test_the_ring_sends_what_its_formula_counts():
    num_elements, size = 11, 4
    chunks = chunk_sizes(num_elements, size)
    for rank in range(size):
        sent = [
            chunk for time in range(size - 1) for r, chunk in sent_chunks(size, time) if r == rank
        ]
        volume = ring_reduce_scatter_volume(num_elements, 4, size, rank)
        assert volume.sent == 4 * sum(chunks[chunk] for chunk in sent)


def test_a_frame_fills_a_chunk_with_the_ranks_that_are_summed_in_it():
    axes = ring_frame(3, 1).axes[0]
    stripes = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_width() < 0.5]
    assert len(stripes) == 9 + 3, "each of three ranks has added one chunk"
    assert sum(text in "012" for text in texts(axes)) == 12 + 3, "numbers, and empty arrow texts"
    assert axes.get_title() == "step 1: reduce-scatter"
    assert ring_frame(3, 3).axes[0].get_title() == "step 3: all-gather"


def test_frames_show_the_start_and_every_step():
    titles = [axes.get_title() for axes in ring_frames(4).axes]
    assert titles[0] == "start" and len(titles) == 7
    assert titles[3:5] == ["step 3: reduce-scatter", "step 4: all-gather"]
    assert len(ring_frames(4, [0, 3]).axes) == 2


def test_crossing_names_every_line_and_dots_what_was_measured():
    axes = crossing(
        [1, 10, 100],
        {"ring": [2, 2, 9.9], "tree": [2, 3, 10]},
        "bytes",
        "seconds",
        {"ring": [1.1, 2.1, 9]},
    ).axes[0]
    assert axes.get_xscale() == axes.get_yscale() == "log"
    styles = [(line.get_linestyle(), list(line.get_ydata())) for line in axes.lines]
    assert ("--", [2, 3, 10]) in styles and ("None", [1.1, 2.1, 9]) in styles
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights["tree"] > 1.1 * heights["ring"], "names of lines that meet are pushed apart"


def test_crossing_names_lines_where_they_are_further_apart():
    lines = {"ring": [8, 9, 10], "tree": [1, 5, 11]}
    texts = crossing([1, 10, 100], lines, "x", "y").axes[0].texts
    starts = {text.get_text(): text.xy for text in texts}
    assert starts == {"ring": (1, 8), "tree": (1, 1)}


SIZES = [10 ** (k / 2) for k in range(10, 21)]


@pytest.mark.parametrize(
    "lines",
    [
        {"fitted": [2 + size / 1e6 for size in SIZES]},
        {  # as on 512 GPUs: far apart on the left, together on the right
            "ring": [0.015 + size / 2e11 for size in SIZES],
            "two trees": [0.0006 + size / 1.9e11 for size in SIZES],
            "hierarchical": [0.0021 + size / 1.5e11 for size in SIZES],
        },
        {"ring": [1e-9 * size for size in SIZES], "tree": [2e-9 * size for size in SIZES]},
    ],
    ids=["one line", "meeting", "parallel"],
)
def test_no_name_in_a_crossing_lies_on_another_or_on_a_line(lines):
    figure = crossing(SIZES, lines, "bytes", "seconds")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(lines)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    for line in axes.lines:
        points = axes.transData.transform(line.get_xydata())
        for one, other in zip(points, points[1:], strict=False):
            along = one + np.linspace(0, 1, 100)[:, None] * (other - one)
            for text, box in zip(axes.texts, boxes, strict=True):
                assert not any(box.contains(*point) for point in along), text.get_text()
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
