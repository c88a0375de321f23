"""Figures with sliders: the function that draws the page's picture also draws the widget's.

Without somebody at a live notebook there is nothing to drag: then the default picture and its
sentence stand there, as plain output that GitHub shows, and no widget state gets into the file.

Read in this order: explore, memory_calculator and the others.
"""

import html
from collections.abc import Callable, Sequence

import torch
from matplotlib.figure import Figure

from minitron import cost
from minitron.config import ModelConfig
from minitron.cost.sharding import STAGES, zero_holdings
from minitron.course.figures import memory_bars, plain_bytes, png, show, timeline
from minitron.course.figures_ring import ring_frame, ring_sums
from minitron.course.overlap import compute_in_proportion, step_lanes, transfers
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.model.transformer import Transformer
from minitron.parallel.data_parallel import FIRST_BUCKET_BYTES, assign_buckets

Drawing = tuple[Figure, str]
"""A figure, and the sentence that states its numbers."""
H100_BYTES = 80e9

# In the proportions of Llama 3: heads of 128, 8 key-value heads, F = 3.5 D.
HEAD_WIDTH, NUM_KV_HEADS, VOCAB_SIZE = 128, 8, 128_256


def explore(
    draw: Callable[..., Drawing], controls: dict[str, Sequence], start: dict, task: str
) -> None:
    """Show `draw(**start)` and, in a live notebook, a control for each of its arguments.

    `controls` lists each argument's values, `start` is where they stand at first, `task` says
    what to try. `draw` makes figures of one size, so nothing jumps.
    """
    from IPython.display import Markdown, display

    figure, sentence = draw(**start)
    if is_live():
        _display_controls(draw, controls, start)
    else:
        show(figure, alt=sentence)
    display(Markdown(f"**Try:** {task}"))


def is_live() -> bool:
    """Whether a person runs this cell: a front end says which cell it is, a program does not."""
    from IPython import get_ipython

    parent = getattr(get_ipython(), "get_parent", dict)()
    return bool(parent.get("metadata"))


def _display_controls(
    draw: Callable[..., Drawing], controls: dict[str, Sequence], start: dict
) -> None:
    import ipywidgets
    from IPython.display import display

    def control(name: str):
        kind = ipywidgets.Dropdown if isinstance(start[name], str) else ipywidgets.SelectionSlider
        shown = [(f"{value:,}" if not isinstance(value, str) else value, value)
                 for value in controls[name]]
        # not continuous: a drag redraws once, when it ends
        extra = {} if kind is ipywidgets.Dropdown else {"continuous_update": False}
        return kind(options=shown, value=start[name], description=name.replace("_", " "),
                    style={"description_width": "9em"}, layout={"width": "30em"}, **extra)

    handles = {name: control(name) for name in controls}
    figure, sentence = draw(**start)
    image = ipywidgets.Image(value=png(figure), format="png", layout=_size(figure))
    text = ipywidgets.HTML(html.escape(sentence), layout={"height": "5em", "width": "44em"})

    def redraw(_change) -> None:
        figure, sentence = draw(**{name: handle.value for name, handle in handles.items()})
        image.value, text.value = png(figure), html.escape(sentence)

    for handle in handles.values():
        handle.observe(redraw, "value")
    box = ipywidgets.VBox([*handles.values(), image, text])
    bundle = {**box._repr_mimebundle_(), "image/png": png(figure), "text/plain": sentence}
    display(bundle, raw=True, metadata={"image/png": {"alt": sentence}})


def _size(figure: Figure) -> dict[str, str]:
    width, height = figure.get_size_inches()
    return {"width": f"{round(100 * width)}px", "height": f"{round(100 * height)}px"}


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
        start={"num_layers": 32, "width": 4096, "sequence_length": 8192, "micro_batch": 1,
               "recipe": "bf16"},
        task="find the largest model that still fits. Then see which sliders move the "
             "activations alone, and which move everything.",
    )


def draw_memory(
    num_layers: int, width: int, sequence_length: int, micro_batch: int, recipe: str
) -> Drawing:
    """Draw the bytes of training one Llama-like model, by the formulas of `minitron.cost`.

    `recipe` is a key of `cost.RECIPES`; attention is the fused kernel, nothing is recomputed.
    """
    model = ModelConfig(
        vocab_size=VOCAB_SIZE, max_sequence_length=sequence_length, num_layers=num_layers,
        width=width, num_heads=width // HEAD_WIDTH, num_kv_heads=NUM_KV_HEADS,
        ffn_width=7 * width // 2, tied_embedding=False,
    )
    parts = cost.RECIPES[recipe]
    count = cost.num_parameters(model)
    bytes_per_value = parts.parameter  # activations have the precision of the weights they meet
    kinds = {
        "parameter": parts.parameter * count,
        "gradient": parts.gradient * count,
        "optimizer state": (parts.master + parts.optimizer_state) * count,
        "activation": cost.activation_bytes(model, micro_batch, sequence_length, bytes_per_value),
    }

    total, activations = sum(kinds.values()), kinds["activation"]
    sentence = (
        f"{count / 1e9:.2f} billion parameters: {plain_bytes(total - activations)} of weights, "
        f"gradients and optimizer state, and {plain_bytes(activations)} of activations make "
        f"{plain_bytes(total)}, {total / H100_BYTES:.1f} times an H100's memory."
    )
    figure = memory_bars({}, {"one device": kinds}, H100_BYTES, "beyond an H100's 80 GB")
    return figure, sentence


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
             "last, and how large is it? Then take buckets of 1 MB: which slider hides them?",
    )


def draw_buckets(
    bucket_MB: int, latency_us: int, bandwidth_GB_s: int, tokens_per_rank: int
) -> Drawing:
    """Draw forward, backward and the buckets of Llama 3.2 1B on 64 H100s, predicted.

    Gradients are bfloat16; compute runs at 40 % of the dense peak.
    """
    model = cost.PUBLISHED["Llama 3.2 1B"]
    sizes = [2 * num_values for num_values in _parameter_sizes(model)]
    flops = tokens_per_rank * cost.forward_flops_per_token(model, min(tokens_per_rank, 8192))
    forward = flops / (0.4 * DENSE_BF16_PEAKS["H100"])

    compute = compute_in_proportion(sizes, forward, 2 * forward)
    first = assign_buckets(sizes, min(FIRST_BUCKET_BYTES, bucket_MB * 10**6))[0]
    buckets = [first, *assign_buckets(sizes[: -len(first)], bucket_MB * 10**6)]
    sent = transfers(compute.ready, sizes, buckets, 64, latency_us * 1e-6, bandwidth_GB_s * 1e9)
    exposed = max(0.0, sent[-1][1] - compute.backward)
    sentence = (
        f"{plain_bytes(sum(sizes))} of gradients in {len(buckets)} buckets: the network is busy "
        f"for {1e3 * sum(end - start for start, end in sent):.0f} ms, of which "
        f"{1e3 * exposed:.0f} ms are exposed, {exposed / (compute.backward + exposed):.0%} of the "
        "step."
    )
    return timeline({}, step_lanes(compute, sent)), sentence


def _parameter_sizes(model: ModelConfig) -> list[int]:
    """Values of each parameter, in the order of the forward pass, without making the model."""
    with torch.device("meta"):
        return [parameter.numel() for parameter in Transformer(model).parameters()]


def ring_explorer() -> None:
    """Show one step of the ring all-reduce, and let the reader walk through it."""
    explore(
        draw_ring,
        controls={"ranks": tuple(range(2, 7)), "step": tuple(range(11))},
        start={"ranks": 4, "step": 3},
        task="follow the outlined chunks from step to step. After which step does every rank "
             "hold its first finished sum, with 3 ranks, with 6?",
    )


def draw_ring(ranks: int, step: int) -> Drawing:
    """Draw the ring all-reduce after `step` steps, or after its last one."""
    last = 2 * (ranks - 1)
    step = min(step, last)
    finished = sum(len(summed) == ranks for summed in ring_sums(ranks, step)[0])
    sentence = (
        f"After step {step} of {last}, each of {ranks} ranks has sent {step}/{ranks} of the "
        f"tensor and holds {finished} of its {ranks} sums."
    )
    figure = ring_frame(ranks, step)
    figure.set_size_inches(7.0, 3.6)  # the same for any number of ranks, so that nothing jumps
    return figure, sentence


def zero_explorer() -> None:
    """Show what each stage of ZeRO leaves on a GPU, and let the reader choose model and ranks."""
    explore(
        draw_stages,
        controls={
            "billions": (1, 3, 8, 13, 30, 70, 175, 405, 1000),
            "ranks": tuple(2**k for k in range(13)),
            "recipe": tuple(cost.RECIPES),
        },
        start={"billions": 13, "ranks": 8, "recipe": "bf16"},
        task="find the fewest ranks on which 13 billion parameters fit, stage by stage. From "
             "which size on does no number of ranks help stage 1, and stage 2?",
    )


def draw_stages(billions: int, ranks: int, recipe: str) -> Drawing:
    """Draw what a rank holds in each stage: weights, gradients, optimizer state, by formula."""
    num_parameters = billions * 10**9
    bars = {
        f"stage {stage}": zero_holdings(num_parameters, ranks, stage, cost.RECIPES[recipe])
        for stage in STAGES
    }
    totals = {name: sum(kinds.values()) for name, kinds in bars.items()}
    fitting = [name for name, total in totals.items() if total <= H100_BYTES]
    sentence = (
        f"{billions:,} billion parameters on {ranks:,} ranks: "
        + ", ".join(f"{name} {plain_bytes(total)}" for name, total in totals.items())
        + (f"; {fitting[0]} is the first that fits." if fitting else "; none of them fits.")
    )
    return memory_bars({}, bars, H100_BYTES, "beyond an H100's 80 GB"), sentence
