"""Chapter 8's figures and measurements: a block's regions, norms that drift, masks, bytes."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_selective_recompute
from minitron.model.transformer import Transformer, initialize, materialized_attention
from minitron.parallel.tensor.layers import TensorParallel, apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.proof.oracle import small_model
from teaching import lab
from teaching.figures import Matrix, cut
from teaching.lab import counting_rows

Apply = Callable[[nn.Module, ProcessGroup], TensorParallel]
keep_inputs = partial(apply_sequence_parallel, regather=False)
"""Sequence parallelism whose layers save all tokens of what they read."""

# Figures


def block_regions(with_backward: bool) -> Figure:
    """Draw one block on two ranks, with tensor parallelism alone and with sequence parallelism."""

    def arrows(forward: str, backward: str) -> str | tuple[str, str]:
        return (forward, backward) if with_backward else forward

    attention = Matrix("attention", "S x D/2", columns=(0, 1))
    feed_forward = Matrix("feed-\nforward", "S x F/2", columns=(0, 1))
    names = "norm", "dropout\nadd, norm", "dropout\nadd"
    replicated = [Matrix(name, "S x D") for name in names]
    sharded = [Matrix(name, "S/2 x D", rows=(0, 1)) for name in names]
    enter, leave = arrows("", "all-reduce"), arrows("all-reduce", "")
    gather = arrows("all-gather", "reduce-scatter")
    scatter = arrows("reduce-scatter", "all-gather")
    full_input = Matrix("full input", "S x D")
    return cut(
        {
            "tensor parallelism": [
                replicated[0],
                enter,
                attention,
                leave,
                replicated[1],
                enter,
                feed_forward,
                leave,
                replicated[2],
            ],
            "with sequence parallelism: attention": [
                sharded[0],
                gather,
                full_input,
                "",
                attention,
                scatter,
                sharded[1],
            ],
            "with sequence parallelism: feed-forward": [
                sharded[1],
                gather,
                full_input,
                "",
                feed_forward,
                scatter,
                sharded[2],
            ],
        }
    )


# The trap: norms whose gradients are not summed

CONFIG = ModelConfig("llama", 36, 12, 1, 24, 4, 4, 96)


def train(group: ProcessGroup, apply: Apply, num_steps: int = 60) -> tuple[list[float], Tensor]:
    """Return each step's loss, and the final norm's weights after it, (steps, D), on this rank."""
    model, losses, gains = Transformer(CONFIG), [], []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        rows = counting_rows(step, 8, 13, 36)
        optimizer.zero_grad()
        loss = parallel.summed_loss(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        parallel.finish()
        optimizer.step()
        losses.append(loss.item())
        gains.append(model.final_norm.weight.detach().clone())
    return losses, torch.stack(gains)


SIZES = {
    "vocab_size": 36,
    "width": 24,
    "num_heads": 12,
    "num_kv_heads": 12,
    "ffn_width": 24,
    "max_sequence_length": 12,
}
small_gpt = partial(small_model, "gpt", **SIZES)
small_llama = partial(small_model, "llama", **SIZES)


def verdict(apply: Apply, num_ranks: int, make_model: Callable = small_llama) -> str:
    """Return what the oracle says of a model divided by `apply`."""
    return lab.verdict(apply, num_ranks, make_model, vocabulary=36, sequence=12)


def gradients_before_finish(group: ProcessGroup, make_model: Callable) -> dict[str, Tensor]:
    """Return this rank's gradients after a backward pass, before `finish`."""
    torch.manual_seed(0)
    model = make_model().double()
    parallel = apply_sequence_parallel(model, group)
    rows = counting_rows(0, 8, 13, 36)
    parallel.summed_loss(model(rows[:, :-1]), rows[:, 1:]).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def parameters_whose_gradients_differ(
    num_ranks: int, make_model: Callable = small_gpt
) -> list[str]:
    """Name the parameters that every rank holds in full, with different gradients on the ranks."""
    first, *others = run(gradients_before_finish, num_ranks, make_model, watch=False)
    shapes = {name: parameter.shape for name, parameter in make_model().named_parameters()}
    return [
        name
        for name, grad in first.items()
        if grad.shape == shapes[name]
        and not all(torch.allclose(grad, other[name]) for other in others)
    ]


# Dropout


def masks(group: ProcessGroup, apply: Apply) -> dict[str, Tensor]:
    """Return which of 64 values this rank keeps, in its heads and in the residual stream."""
    seen = {}

    def attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        seen["heads"] = F.dropout(torch.ones(64), dropout) > 0
        return value

    torch.manual_seed(0)  # the same on all ranks
    model = Transformer(ModelConfig("gpt", 36, 12, 1, 64, 4, 4, 64, dropout=0.5))
    model.blocks[0].attention.attention_fn = attention
    apply(model, group)
    model.dropout.register_forward_hook(lambda *call: seen.update(stream=call[-1][0, 0] != 0))
    model(counting_rows(0, 8, 13, 36)[:, :-1])
    return seen


# Bytes kept and sent by one block

SHAPE, B, S, RANKS = ModelConfig("gpt", 64, 64, 1, 128, 8, 8, 512, dropout=0.1), 4, 64, 4
WAYS: dict[str, tuple[Apply, cost.Layout]] = {
    "tensor": (apply_tensor_parallel, cost.Layout(RANKS)),
    "sequence, inputs kept": (
        keep_inputs,
        cost.Layout(RANKS, sequence_parallel=True, regather=False),
    ),
    "sequence": (apply_sequence_parallel, cost.Layout(RANKS, sequence_parallel=True)),
}


def measured_block(group: ProcessGroup, way: str, selective: bool) -> tuple[int, list]:
    """Return the activation bytes this rank keeps for the backward pass, and its calls."""
    model = Transformer(SHAPE)
    initialize(model, seed=0)
    model.bfloat16().blocks[0].attention.attention_fn = materialized_attention
    WAYS[way][0](model, group)
    if selective:
        apply_selective_recompute(model)

    tokens = S if way == "tensor" else S // group.size()
    x = torch.ones(B, tokens, SHAPE.width, dtype=torch.bfloat16, requires_grad=True)
    with Ledger() as ledger, Meter(model) as meter:
        out = model.run_blocks(model.blocks, x.clone(), None)
        kept = meter.now()["activation"]
        out.sum().backward()
    return kept, ledger.calls


def block_formula(way: str, recompute: str, mask_bytes: int) -> int:
    """Return the bytes that the block keeps on each rank, by `cost`."""
    return cost.activation_bytes_per_layer(
        SHAPE, B, S, 2, "materialized", recompute, mask_bytes, WAYS[way][1]
    )


def sent_formula(way: str) -> list[int]:
    """Return the bytes that each rank sends for the block, by `cost`."""
    return [
        cost.tensor_parallel_volume(B, S, SHAPE.width, 2, rank, WAYS[way][1]).sent
        for rank in range(RANKS)
    ]
