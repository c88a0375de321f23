"""The attention layer of 7.4's grader: what each rank's part of it is, and all right gradients."""

from functools import cache

from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.model.transformer import Attention
from teaching.graders.ch07_toy import random

HEADS, HEAD_WIDTH = 12, 2  # H, K
LAYERS = ("query", "key", "value", "out")
MICRO_BATCHES, STEPS = 2, 2
B, S = 2, 5


def make_attention(H: int, G: int, head_width: int = HEAD_WIDTH) -> Attention:
    config = ModelConfig("llama", 1, S, 1, H * head_width, H, G, 1)
    attention = Attention(config).double()
    for number, name in enumerate(LAYERS):
        weight = getattr(attention, name).weight
        weight.data.copy_(random(number, *weight.shape))
    return attention


def right_heads(rank: int, size: int, G: int) -> tuple[range, range]:
    """By asking every query head what it reads."""
    held = HEADS // size
    query_heads = range(rank * held, (rank + 1) * held)
    read = sorted({head // (HEADS // G) for head in query_heads})
    return query_heads, range(read[0], read[-1] + 1)


def part_of(full: Tensor, name: str, rank: int, size: int, G: int) -> Tensor:
    """The rows or columns of a weight, or of its gradient, that belong to a rank's heads."""
    query_heads, kv_heads = right_heads(rank, size, G)
    heads = kv_heads if name in ("key", "value") else query_heads
    rows = slice(heads.start * HEAD_WIDTH, heads.stop * HEAD_WIDTH)
    return full[:, rows] if name == "out" else full[rows]


def attend(attention: nn.Module, step: int) -> None:
    """A step's backward passes; the gradient of a sum is that of each of its parts."""
    width = HEADS * HEAD_WIDTH
    for number in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
        out_partial = attention(random(10 + number, B, S, width), None)
        out_partial.backward(random(20 + number, B, S, width))


@cache
def right_gradients(G: int, step: int) -> dict[str, Tensor]:
    attention = make_attention(HEADS, G)
    attend(attention, step)
    return {name: getattr(attention, name).weight.grad for name in LAYERS}


@cache
def own_gradients(rank: int, size: int, G: int, step: int) -> dict[str, Tensor]:
    """What a rank's backward passes bring: of a shared head, its own part."""
    attention = make_attention(HEADS, G)
    for name in LAYERS:
        layer = getattr(attention, name)
        layer.weight = nn.Parameter(part_of(layer.weight.detach(), name, rank, size, G).clone())
    attend(attention, step)
    return {name: getattr(attention, name).weight.grad for name in LAYERS}
