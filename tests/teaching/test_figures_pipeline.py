"""The picture of a schedule: every pass where its timeline has it, and what the ranks hold."""

from functools import partial

import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb

from minitron.launch import run
from minitron.measure.ledger import Ledger, Span
from minitron.parallel.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.proof.oracle import small_model
from teaching.figures import measured_timeline, pipeline, png
from teaching.figures_pipeline import DARKEST
from teaching.figures_style import WORK_COLOR, pale

FORWARD, BACKWARD = WORK_COLOR["forward"], WORK_COLOR["backward"]
SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}


def lanes(figure):
    return [
        collection
        for collection in figure.axes[0].collections
        if isinstance(collection, PolyCollection)
    ]


def blocks(lane):
    """Start, end and color of each block of a lane."""
    extents = [path.get_extents() for path in lane.get_paths()]
    colors = [to_hex(color).upper() for color in lane.get_facecolor()]
    return [(box.x0, box.x1, color) for box, color in zip(extents, colors, strict=True)]


def texts(figure, row=None):
    return [
        text.get_text()
        for text in figure.axes[0].texts
        if row is None or text.get_position()[1] == row
    ]


@pytest.mark.parametrize(
    "schedule",
    [gpipe(3, 4), interleaved(2, 4, 2), zero_bubble(3, 4)],
    ids=lambda schedule: schedule.name,
)
def test_every_pass_has_a_block_with_its_number(schedule):
    timeline = simulate(schedule, SECONDS)
    figure = pipeline(timeline)
    assert len(lanes(figure)) == schedule.num_ranks
    for row, (lane, passes) in enumerate(zip(lanes(figure), timeline.passes, strict=True), 1):
        assert [block[:2] for block in blocks(lane)] == [(p.start, p.end) for p in passes]
        numbers = [str(each.action.micro_batch) for each in passes]
        assert [text for text in texts(figure, row) if not text.startswith(" ")] == numbers
    ticks = figure.axes[0].get_yticklabels()
    assert [tick.get_text() for tick in ticks] == [f"rank {r}" for r in range(schedule.num_ranks)]


def test_the_same_timeline_gives_the_same_bytes():
    timeline = simulate(gpipe(2, 3), SECONDS)
    assert png(pipeline(timeline)) == png(pipeline(timeline))


def test_colors_tell_the_kind_and_the_chunk():
    light = [to_rgb(FORWARD), to_rgb(BACKWARD)]
    dark = [tuple(DARKEST * channel for channel in color) for color in light]
    timeline = simulate(interleaved(2, 2, 2), SECONDS)
    for lane, passes in zip(lanes(pipeline(timeline)), timeline.passes, strict=True):
        for (_, _, color), each in zip(blocks(lane), passes, strict=True):
            shades = dark if each.action.stage >= 2 else light
            assert color.lower() == to_hex(shades[each.action.kind == "B"])

    timeline = simulate(zero_bubble(2, 2), SECONDS)
    colors = {"F": to_hex(FORWARD), "I": to_hex(BACKWARD), "W": to_hex(pale(BACKWARD))}
    for lane, passes in zip(lanes(pipeline(timeline)), timeline.passes, strict=True):
        assert [color.lower() for _, _, color in blocks(lane)] == [
            colors[each.action.kind] for each in passes
        ]


def test_three_chunks_are_three_shades():
    first_lane = lanes(pipeline(simulate(interleaved(1, 1, 3), SECONDS)))[0]
    assert len({color for _, _, color in blocks(first_lane)}) == 6


def test_what_nobody_does_is_hatched():
    figure = pipeline(simulate(gpipe(2, 1), SECONDS))
    idle = [
        (bar.get_y() + 0.35, bar.get_x(), bar.get_x() + bar.get_width())
        for bar in figure.axes[0].patches
        if bar.get_hatch()
    ]
    assert idle == [(1, 1, 4), (2, 0, 1), (2, 4, 6)]


@pytest.mark.parametrize(
    ("schedule", "held"),
    [
        (gpipe(3, 5), ["5", "5", "5"]),
        (one_forward_one_backward(3, 5), ["3", "2", "1"]),
        (interleaved(2, 4, 2), ["2.5", "1.5"]),  # of its 2 chunks a rank counts each half
    ],
)
def test_beside_a_lane_stands_what_its_rank_holds(schedule, held):
    figure = pipeline(simulate(schedule, SECONDS))
    shown = [texts(figure, row)[-1] for row in range(1, schedule.num_ranks + 1)]
    assert shown == [f" {each}" for each in held]


def test_the_predicted_stands_dashed_and_pale_above_the_measured():
    schedule = one_forward_one_backward(2, 3)
    figure = pipeline(simulate(schedule, SECONDS), simulate(schedule, SECONDS, 0.5), unit="s")
    assert len(lanes(figure)) == 4
    ys = [lane.get_paths()[0].get_extents().y0 for lane in lanes(figure)]
    assert ys == sorted(ys) and figure.axes[0].get_ylim()[1] < ys[0], "the first is the upper one"
    solid = [lane.get_linestyle()[0][1] is None for lane in lanes(figure)]
    assert solid == [False, False, True, True]
    assert [blocks(lane)[0][2].lower() for lane in lanes(figure)] == 2 * [
        to_hex(pale(FORWARD))
    ] + 2 * [to_hex(FORWARD)]
    assert [t for t in texts(figure) if t in ("predicted", "measured")] == ["predicted", "measured"]
    assert figure.axes[0].get_xlabel() == "time in one step (s)"


def test_eight_ranks_and_sixteen_micro_batches_have_all_their_numbers():
    timeline = simulate(one_forward_one_backward(8, 16), SECONDS)
    figure = pipeline(timeline)
    numbers = [text for text in figure.axes[0].texts if text.get_text().isdigit()]
    assert len(numbers) == 8 * 32 and len({text.get_size() for text in numbers}) == 1

    figure.draw_without_rendering()
    inverse = figure.axes[0].transData.inverted()
    widths = [inverse.transform_bbox(text.get_window_extent()).width for text in numbers]
    assert max(widths) <= 1, "a number is not wider than a forward pass"


def test_numbers_that_do_not_fit_are_left_out():
    figure = pipeline(simulate(gpipe(2, 100), SECONDS))
    assert not any(text.isdigit() for text in texts(figure))


# From a ledger


def test_passes_begin_when_the_work_does_and_end_with_it():
    schedule = gpipe(2, 1)
    spans = [
        [Span("F0 stage 0", 5.0, 6.0), Span("else", 6.0, 6.5), Span("B0 stage 0", 9.0, 10.0)],
        [
            Span("F0 stage 1", 5.0, 5.001),
            Span("F0 stage 1", 6.0, 6.4),
            Span("F0 stage 1", 6.6, 7.0),
            Span("B0 stage 1", 7.0, 9.0),
        ],
    ]
    timeline = measured_timeline(schedule, spans)
    assert [
        [(str(each.action), each.start, each.end) for each in passes] for passes in timeline.passes
    ] == [
        [("F0", 0, 1000), ("B0", 4000, 5000)],
        [("F0", 1000, 2000), ("B0", 2000, 4000)],
    ]
    assert timeline.bubble_of_total == pytest.approx(0.5)


def spans_of_a_step(group, make_schedule, micro_batches):
    model = small_model("gpt", num_layers=4)
    parallel = apply_pipeline_parallel(model, group, make_schedule)
    with Ledger() as ledger:
        parallel.run(micro_batches, lambda logits, targets: logits.sum(), 1.0)
    return ledger.spans


def test_a_step_on_real_ranks_gives_a_timeline_of_its_schedule():
    make_schedule = partial(interleaved, num_chunks=2)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    spans = run(spans_of_a_step, 2, make_schedule, 2 * [(tokens, tokens)])
    schedule = make_schedule(2, 2)
    timeline = measured_timeline(schedule, spans)
    for passes, actions in zip(timeline.passes, schedule.actions, strict=True):
        assert tuple(each.action for each in passes) == actions
        assert all(each.start < each.end for each in passes)
        assert all(a.end <= b.start for a, b in zip(passes, passes[1:], strict=False))
    assert 0 < timeline.bubble_of_total < 1
