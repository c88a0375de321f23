"""Figures with sliders: the function that draws the page's picture also draws the widget's.

Without somebody at a live notebook there is nothing to drag: then the default picture and its
sentence stand there, as plain output that GitHub shows, and no widget state gets into the file.

Read in this order: explore, memory_calculator and the others; what they draw is in `drawings`.
"""

import html
from collections.abc import Callable, Sequence

from minitron import cost
from teaching.drawings import (
    LINKS,
    SCHEDULES,
    TENSOR_RANKS,
    Drawing,
    draw_buckets,
    draw_memory,
    draw_ring,
    draw_schedule,
    draw_sequence,
    draw_stages,
    draw_tensor,
    fewest_micro_batches,
)
from teaching.figures import image_tag, is_live, png, show
from teaching.figures_numbers import draw_number_line
from teaching.floats import FORMATS

LABELS = {
    "num_layers": "layers",
    "sequence_length": "sequence length, tokens",
    "micro_batch": "micro-batch, sequences",
    "recipe": "precision",
    "bucket_MB": "bucket size, MB",
    "latency_us": "latency, µs",
    "bandwidth_GB_s": "bandwidth, GB/s",
    "tokens_per_rank": "tokens per rank",
    "billions": "parameters, billions",
    "micro_batches": "micro-batches",
    "chunks": "chunks per rank",
    "plus": "number to add",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
}
"""What stands beside a control whose argument's name is not the words for it."""


def explore(
    draw: Callable[..., Drawing],
    controls: dict[str, Sequence],
    start: dict,
    task: str,
    allowed: Callable[[dict], dict[str, Sequence]] = lambda now: {},
) -> None:
    """Show `draw(**start)` and, in a live notebook, a control for each of its arguments.

    `controls` lists each argument's values, `start` is where they stand at first, `task` says
    what to try. `allowed(now)` has the values that some controls can take while they stand at
    `now`; none: that control does nothing and is disabled. `draw` makes figures of one size, so
    nothing jumps.
    """
    from IPython.display import Markdown, display

    figure, sentence = draw(**start)
    if is_live():
        _display_controls(draw, controls, start, allowed)
    else:
        show(figure, alt=sentence)
    display(Markdown(f"**Try:** {task}"))


def _display_controls(
    draw: Callable[..., Drawing],
    controls: dict[str, Sequence],
    start: dict,
    allowed: Callable[[dict], dict[str, Sequence]],
) -> None:
    import ipywidgets
    from IPython.display import display

    handles = {name: _control(name, values, start[name]) for name, values in controls.items()}
    figure, sentence = draw(**start)
    image = ipywidgets.HTML(image_tag(figure, sentence))
    text = ipywidgets.HTML(html.escape(sentence), layout={"min_height": "4em", "width": "100%"})
    narrowing = False

    def values() -> dict:
        return {name: handle.value for name, handle in handles.items()}

    def narrow() -> None:
        nonlocal narrowing
        narrowing = True  # new options notify, too
        for name, possible in allowed(values()).items():
            handles[name].disabled = not possible
            _set_options(handles[name], possible or controls[name])
        narrowing = False

    def redraw(_change) -> None:
        if narrowing:
            return
        narrow()
        figure, sentence = draw(**values())
        image.value, text.value = image_tag(figure, sentence), html.escape(sentence)

    narrow()
    for handle in handles.values():
        handle.observe(redraw, "value")
    box = ipywidgets.VBox([*handles.values(), text, image])
    bundle = {**box._repr_mimebundle_(), "image/png": png(figure), "text/plain": sentence}
    display(bundle, raw=True, metadata={"image/png": {"alt": sentence}})


def _control(name: str, values: Sequence, start):
    import ipywidgets

    kind = ipywidgets.Dropdown if isinstance(start, str) else ipywidgets.SelectionSlider
    # not continuous: a drag redraws once, when it ends
    extra = {} if kind is ipywidgets.Dropdown else {"continuous_update": False}
    return kind(
        options=_options(values),
        value=start,
        description=LABELS.get(name, name.replace("_", " ")),
        style={"description_width": "13em"},
        layout={"width": "36em"},
        **extra,
    )


def _options(values: Sequence) -> tuple[tuple[str, object], ...]:
    return tuple((value if isinstance(value, str) else f"{value:,}", value) for value in values)


def _set_options(handle, values: Sequence) -> None:
    """Give a control other values; it stays where it is, or goes to the nearest of them."""
    if tuple(handle.options) != _options(values):
        now = handle.value
        handle.options = _options(values)
        handle.value = now if now in values else min(values, key=lambda value: abs(value - now))


def memory_calculator() -> None:
    """Ask how much memory a Llama-like model needs on one device, and let the reader turn it."""
    explore(
        draw_memory,
        controls={
            "num_layers": (16, 24, 32, 48, 80, 126),
            "width": (1024, 2048, 4096, 5120, 8192, 16_384),
            "sequence_length": (1024, 2048, 4096, 8192, 16_384, 32_768, 131_072),
            "micro_batch": (1, 2, 4, 8, 16),
            "recipe": tuple(cost.RECIPES),
        },
        start={
            "num_layers": 32,
            "width": 4096,
            "sequence_length": 8192,
            "micro_batch": 1,
            "recipe": "bf16",
        },
        task="find the largest model that still fits. Then see which sliders leave the "
        "training state as it is, and which leave the activations.",
    )


def bucket_explorer() -> None:
    """Ask which bucket size hides the communication of a data-parallel step on a given network."""
    explore(
        draw_buckets,
        controls={
            "bucket_MB": (1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500),
            "latency_us": (1, 3, 10, 30, 100),
            "bandwidth_GB_s": (6, 12, 25, 50, 100, 200, 450),
            "tokens_per_rank": (2048, 4096, 8192, 16_384, 32_768),
        },
        start={"bucket_MB": 25, "latency_us": 10, "bandwidth_GB_s": 50, "tokens_per_rank": 8192},
        task="find the bucket size that exposes least. It is not zero: whose gradient is ready "
        "last, and how large is it? Then take buckets of 1 MB: which two sliders bring the exposed "
        "time below 30 ms, and why can the bandwidth not?",
    )


def ring_explorer() -> None:
    """Show one step of the ring all-reduce, and let the reader walk through it."""
    explore(
        draw_ring,
        controls={"ranks": tuple(range(2, 7)), "step": tuple(range(11))},
        start={"ranks": 4, "step": 3},
        allowed=lambda now: {"step": tuple(range(2 * now["ranks"] - 1))},
        task="follow the outlined chunks from step to step. After which step does every rank "
        "hold its first finished sum, with 3 ranks, with 6?",
    )


def zero_explorer() -> None:
    """Show what ZeRO-0 to 3 leave on a GPU, and let the reader choose model and ranks."""
    explore(
        draw_stages,
        controls={
            "billions": (1, 3, 8, 13, 30, 70, 175, 405, 1000),
            "ranks": tuple(2**k for k in range(13)),
            "recipe": tuple(cost.RECIPES),
        },
        start={"billions": 13, "ranks": 8, "recipe": "bf16"},
        task="find the fewest ranks on which 13 billion parameters fit, with ZeRO-1, with ZeRO-2, "
        "with ZeRO-3. From which size on does ZeRO-1 not fit on any number of ranks? And "
        "ZeRO-2?",
    )


def tensor_explorer() -> None:
    """Ask how many ranks a block can be cut over before its all-reduces eat the gain."""
    explore(
        draw_tensor,
        controls={
            "model": tuple(cost.PUBLISHED),
            "ranks": TENSOR_RANKS,
            "tokens": (1024, 2048, 4096, 8192, 16_384, 32_768),
            "link": LINKS,
        },
        start={"model": "Llama 3.1 70B", "ranks": 8, "tokens": 8192, "link": "NVLink"},
        allowed=lambda now: {"link": LINKS if now["ranks"] > 1 else ()},
        task="go from 8 ranks to 16: what does leaving the node cost? Then take InfiniBand and "
        "look for the most ranks that still wait less than a quarter of the time. Which of "
        "the other two controls moves that share, and which does not?",
    )


def sequence_explorer() -> None:
    """Ask from how many ranks on a model's activations fit, for four ways to hold them."""
    explore(
        draw_sequence,
        controls={
            "model": tuple(cost.PUBLISHED),
            "sequence_length": (1024, 2048, 4096, 8192, 16_384, 32_768),
            "micro_batch": (1, 2, 4, 8),
            "attention": ("materialized", "fused"),
        },
        start={
            "model": "GPT-3 175B",
            "sequence_length": 2048,
            "micro_batch": 1,
            "attention": "materialized",
        },
        task="find the fewest ranks with which each line gets below the band. Which lines bend, "
        "and what does not shrink there? Then take the fused attention: what is selective "
        "recomputation still worth?",
    )


def schedule_explorer() -> None:
    """Ask how many micro-batches a pipeline needs, and what each schedule makes the ranks hold."""
    counts, chunks = (8, 16, 24, 32, 48, 64, 96, 128), (1, 2, 4)

    def allowed(now: dict) -> dict[str, Sequence]:
        fewest = fewest_micro_batches(now["schedule"], now["ranks"])
        return {
            "chunks": chunks if now["schedule"] == "interleaved 1F1B" else (),
            "micro_batches": tuple(count for count in counts if count >= fewest),
        }

    explore(
        draw_schedule,
        controls={
            "schedule": tuple(SCHEDULES),
            "ranks": (2, 4, 8),
            "micro_batches": counts,
            "chunks": chunks,
        },
        start={"schedule": "1F1B", "ranks": 4, "micro_batches": 8, "chunks": 2},
        allowed=allowed,
        task="raise the micro-batches until less than 5 % of the step is idle. Then take 8 ranks: "
        "which schedules get there with as many micro-batches, and what does the first rank "
        "hold for it? Which pairs differ only in what they hold?",
    )


def number_line_explorer() -> None:
    """Show the numbers that a format has around a position, and what an addition there does."""
    explore(
        draw_number_line,
        controls={
            "format": tuple(FORMATS),
            "position": (1e-7, 1e-5, 0.001, 0.1, *(2**k for k in range(25))),
            "plus": (1e-7, 1e-5, 1e-4, 0.001, 0.002, 0.003, 0.004, 0.005, 0.01, 0.1, 1, 2, 3, 10),
            "zoom": (1, 2, 4, 8, 16, 32),
        },
        start={"format": "bf16", "position": 1, "plus": 0.001, "zoom": 16},
        task="add 1, and move the position until nothing changes: the next integer is the first "
        "that bf16 cannot hold. Which one is it in the other formats? Then go back to "
        "position 1: what is the smallest update that a weight of 1 does not lose in bf16?",
    )
