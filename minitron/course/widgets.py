"""Figures with sliders: the function that draws the page's picture also draws the widget's.

Without somebody at a live notebook there is nothing to drag: then the default picture and its
sentence stand there, as plain output that GitHub shows, and no widget state gets into the file.

Read in this order: explore, memory_calculator.
"""

import html
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from minitron import cost
from minitron.config import ModelConfig
from minitron.course.figures import memory_bars, plain_bytes, png, show

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
    text = ipywidgets.HTML(html.escape(sentence), layout={"height": "3em", "width": "44em"})

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
