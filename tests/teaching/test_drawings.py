"""What the widgets of chapters 7 to 9 draw is what the formulas and the datasheets say."""

import pytest

from minitron import cost
from minitron.config import ConfigError
from minitron.parallel.pipeline.simulator import simulate
from teaching import drawings
from teaching.drawings import (
    H100,
    LINKS,
    SCHEDULES,
    TENSOR_RANKS,
    all_reduce_seconds,
    block_lanes,
    block_seconds,
    draw_schedule,
    draw_sequence,
    draw_tensor,
    fewest_micro_batches,
)


@pytest.mark.parametrize("name", cost.PUBLISHED)
def test_the_products_of_all_blocks_and_the_head_are_the_forward_pass(name):
    model, tokens = cost.PUBLISHED[name], 2048
    alone = sum(map(sum, block_seconds(model, 1, tokens).values()))
    flops = tokens * (
        cost.forward_flops_per_token(model, tokens) - 2 * model.width * model.vocab_size
    )
    assert model.num_layers * alone == pytest.approx(flops / H100.bf16_flops)

    cut = sum(map(sum, block_seconds(model, 8, tokens).values()))
    assert cut == pytest.approx(alone / 8)


def test_ranks_that_share_a_key_value_head_all_compute_it():
    model = cost.PUBLISHED["Llama 3.1 70B"]  # 8 key-value heads, of 128
    (columns, _), _ = block_seconds(model, 16, 4096).values()
    expected = 4096 * 2 * 8192 * (8192 / 16 + 2 * 128) / H100.bf16_flops
    assert columns == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "link", "seconds"),
    [
        (1, "NVLink", 0.0),
        (8, "NVLink", 2 * 7 / 8 / 450),
        (16, "NVLink", 2 * 7 / 8 / 450 + 1 / 8 / 50),  # two nodes exchange an eighth per rank
        (8, "InfiniBand", 2 * 7 / 8 / 50),
    ],
)
def test_a_gigabyte_is_reduced_at_the_speed_of_each_link(ranks, link, seconds):
    assert all_reduce_seconds(1e9, ranks, link) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("reduction", "starts", "sent"),
    [
        (0.0, [0, 3, 7, 15], []),
        (1.0, [0, 4, 9, 17], [3, 8, 14, 22]),  # backward, the weight gradients hide it
        (5.0, [0, 8, 17, 27], [3, 12, 22, 32]),  # and here only a part of it
    ],
)
def test_an_all_reduce_follows_each_half_and_starts_before_the_weight_gradients(
    reduction, starts, sent
):
    compute, network = block_lanes(
        {"attention": (1e-3, 2e-3), "feed-forward": (3e-3, 1e-3)}, 1e-3 * reduction
    )
    assert [block.label for block in compute] == [
        "attention",
        "feed-forward",
        "feed-forward",
        "attention",
    ]
    assert [block.end - block.start for block in compute] == pytest.approx([3, 4, 8, 6])
    assert [block.start for block in compute] == pytest.approx(starts)
    assert [block.start for block in network] == pytest.approx(sent)
    assert all(block.end - block.start == pytest.approx(reduction) for block in network)


def test_the_block_says_how_long_its_ranks_wait():
    _, alone = draw_tensor("Llama 3.1 70B", 1, 8192, "NVLink")
    assert "on 1 in 1 node. That is 1.0 times as fast; 0% of the time" in alone

    model, tokens = cost.PUBLISHED["Llama 3.1 70B"], 8192
    seconds = block_seconds(model, 8, tokens)
    (qkv, _), (gate_up, _) = seconds.values()
    slow, busy = 2 * 7 / 8 * 2 * tokens * 8192 / 50e9, 3 * sum(map(sum, seconds.values()))
    total = busy + 2 * slow + (slow - gate_up) + (slow - qkv)
    _, sentence = draw_tensor("Llama 3.1 70B", 8, tokens, "InfiniBand")
    assert f" {1e3 * total:.2f} ms on 8 in 8 nodes" in sentence
    assert f"; {1 - busy / total:.0%} of the time is waiting" in sentence
    assert "16 in 2 nodes" in draw_tensor("Llama 3.1 70B", 16, tokens, "NVLink")[1]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("ranks", TENSOR_RANKS)
@pytest.mark.parametrize("name", cost.PUBLISHED)
def test_every_lane_and_both_halves_of_both_passes_have_a_name(name, ranks, link):
    figure, _ = draw_tensor(name, ranks, 8192, link)
    (axes,) = figure.axes
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["each rank", f"{link}: all-reduces", "with a free link"]
    written = [text.get_text() for text in axes.texts]
    for half in ("attention", "feed-forward"):
        assert written.count(half) >= 2, "once in the forward pass and once in the backward pass"


def test_activations_in_four_ways_follow_the_table_of_the_paper():
    figure, sentence = draw_sequence("GPT-3 175B", 2048, 1, "materialized")
    h, num_layers, num_heads, s = 12288, 96, 96, 2048
    scores, mask = 5 * num_heads * s / h, s / h  # the causal mask, s x s, is left out there
    expected = [  # Korthikanti et al. 2022, table 2: bytes per token and width, on t ranks
        lambda t: 10 + 24 / t + scores / t + mask,
        lambda t: 34 / t + scores / t + mask,
        lambda t: 10 + 24 / t,
        lambda t: 34 / t,
    ]
    lines = [tuple(line.get_ydata()) for line in figure.axes[0].lines]
    assert len(lines) == 4
    for bytes_of in expected:
        curve = [num_layers * s * h * bytes_of(t) / 1e9 for t in TENSOR_RANKS]
        assert any(line == pytest.approx(curve, rel=0.001) for line in lines)
    assert "8 ranks: tensor alone 56.0 GB, + sequence 34.8 GB, + selective 31.4 GB" in sentence

    (band,) = figure.axes[0].patches
    assert band.get_y() == H100.memory_bytes / 1e9 == 81559 * 2**20 / 1e9


def test_fused_attention_leaves_selective_recomputation_nothing_to_save():
    figure, _ = draw_sequence("GPT-3 175B", 2048, 1, "fused")
    both, sequence, selective, alone = sorted(
        (tuple(line.get_ydata()) for line in figure.axes[0].lines), key=lambda y: y[-1]
    )
    assert alone == pytest.approx(selective, rel=0.01)
    assert sequence == pytest.approx(both, rel=0.01) and sequence[-1] < alone[-1] / 4


@pytest.mark.parametrize("link", LINKS)
def test_the_tensor_explorer_can_be_answered(link):
    """What it suggests to try: where a quarter is waiting; that width matters, tokens do not."""

    def waiting(model="Llama 3.1 70B", ranks=8, tokens=8192):
        sentence = draw_tensor(model, ranks, tokens, link)[1]
        return int(sentence.split("; ")[1].split("%")[0])

    shares = [waiting(ranks=ranks) for ranks in TENSOR_RANKS]
    assert shares == sorted(shares) and shares[0] == 0
    assert [ranks for ranks, share in zip(TENSOR_RANKS, shares, strict=True) if share < 25] == (
        [1, 2, 4, 8] if link == "NVLink" else [1, 2]
    )
    assert abs(waiting(tokens=2048) - waiting(tokens=32_768)) <= 3
    assert waiting("Llama 3.2 1B") > waiting("Llama 3.1 70B") + 10


@pytest.mark.parametrize(
    ("schedule", "m", "bubble", "held"),
    [
        ("sequential", 8, cost.sequential_bubble(4, 8, 1, 2), "1 micro-batch."),
        ("GPipe", 8, cost.pipeline_bubble(4, 8, 1, 2), "8 micro-batches."),
        ("1F1B", 8, cost.pipeline_bubble(4, 8, 1, 2), "4 micro-batches."),
        ("interleaved 1F1B", 8, cost.pipeline_bubble(4, 8, 1, 2, 2), "5.5 micro-batches."),
        ("ZB-H1", 8, cost.zb_h1_bubble(4, 8, 1, 1, 1), "4 micro-batches."),
        ("ZB-V", 16, cost.v_bubble(4, 16, 1), "4 micro-batches."),
        ("DualPipeV", 16, cost.v_bubble(4, 16, 1), "4.5 micro-batches."),
    ],
)
def test_a_schedule_says_its_bubble_both_ways_and_what_it_holds(schedule, m, bubble, held):
    _, sentence = draw_schedule(schedule, 4, m, 2)
    chunks = " with 2 chunks a rank" if "interleaved" in schedule else ""
    assert sentence == (
        f"{schedule}{chunks}, 4 ranks, {m} micro-batches: idle for {bubble.of_total:.1%} of the "
        f"step, {bubble.of_ideal:.1%} of what the work alone takes; the first rank holds the "
        f"activations of at most {held}"
    )


def test_the_chunks_are_those_of_the_interleaved_schedule_alone():
    for schedule in SCHEDULES:
        one, four = (draw_schedule(schedule, 2, 8, chunks)[1] for chunks in (1, 4))
        assert (one != four) == (schedule == "interleaved 1F1B")


def test_the_passes_of_a_v_take_half_as_long_as_a_rank_s(monkeypatch):
    seen = {}

    def spy(plan, seconds):
        seen[plan.name] = seconds
        return simulate(plan, seconds)

    monkeypatch.setattr(drawings, "simulate", spy)
    for schedule in ("ZB-H1", "ZB-V", "DualPipeV"):
        draw_schedule(schedule, 2, 8, 4)
    assert seen["ZB-H1"] == {"F": 1, "B": 2, "I": 1, "W": 1}
    assert seen["ZB-V"] == seen["DualPipeV"] == {"F": 0.5, "B": 1, "I": 0.5, "W": 0.5}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_schedule_runs_with_fewer_micro_batches_than_it_says(schedule, ranks):
    fewest = fewest_micro_batches(schedule, ranks)
    draw_schedule(schedule, ranks, max(fewest, 8), 1)
    if fewest > 1:
        with pytest.raises(ConfigError, match=f"use {fewest} or more"):
            draw_schedule(schedule, ranks, fewest - 1, 1)


def test_the_schedule_explorer_can_be_answered():
    """What it suggests to try: who gets below 5 %, and with how many micro-batches."""

    def idle(schedule, ranks, micro_batches, chunks=2):
        sentence = draw_schedule(schedule, ranks, micro_batches, chunks)[1]
        return float(sentence.split("idle for ")[1].split("%")[0])

    counts = (8, 16, 24, 32, 48, 64)
    assert [m for m in counts if idle("1F1B", 4, m) < 5] == [64]
    assert idle("1F1B", 8, 64) > 5 and idle("interleaved 1F1B", 8, 64, 2) > 5
    assert idle("interleaved 1F1B", 8, 64, 4) < 5 and idle("ZB-H1", 8, 64) < 5
    assert idle("ZB-V", 8, 64) < 5 and idle("DualPipeV", 8, 64) < 5
    assert idle("GPipe", 8, 64) == idle("1F1B", 8, 64), "they differ in what they hold alone"
    assert idle("ZB-V", 8, 64) == idle("DualPipeV", 8, 64), "and so do these"


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 32, 48, 64, 128])
def test_a_dense_timeline_keeps_its_numbers_or_drops_them_all(ranks, micro_batches):
    figure, _ = draw_schedule("1F1B", ranks, micro_batches, 1)
    numbers = [text for text in figure.axes[0].texts if text.get_text().isdigit()]
    assert len(numbers) in (0, 2 * ranks * micro_batches)
