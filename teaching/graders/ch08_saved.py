"""Grader of 8.3: the formula against the meter on real blocks, then against published numbers."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_selective_recompute
from minitron.model.transformer import Transformer
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from teaching.graders import asked, expect
from teaching.graders.ch02_activations import MaskedDropout, held_now, masked_attention
from teaching.graders.ranks import on_ranks, per_rank

METHODS = list(product((False, True), repeat=2))
"""Sequence parallelism, selective recomputation."""


@dataclass(frozen=True)
class Sizes:
    """B, S, D and H of a block."""

    batch_size: int
    sequence_length: int
    width: int
    num_heads: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {n}" for name, n in zip("BSDH", astuple(self), strict=True))

    @property
    def wide(self) -> int:
        return self.batch_size * self.sequence_length * self.width

    @property
    def square(self) -> int:
        return self.batch_size * self.num_heads * self.sequence_length**2


MEASURED = Sizes(2, 12, 60, 12)
# Korthikanti et al. 2022, section 5: attention is 5 a s / h = 80 of GPT-3's 34 + 80 bytes per
# value, and 64 of 34 + 64 of MT-NLG's; recomputing it saves 70 % and 65 %.
PUBLISHED = {"GPT-3": (Sizes(1, 2048, 12288, 96), 80), "MT-NLG": (Sizes(1, 2048, 20480, 128), 64)}
PUBLISHED_RANKS = (1, 8, 16)
HUGE, HUGE_INSIDE = Sizes(1_000_003, 3_032_121, 150_105, 3), 303
"""No such model exists: its counts are beyond what a float holds exactly."""


def grade_8_3(saved_bytes: Callable) -> None:
    """Measure every method on real blocks; then ask for models that no laptop holds."""
    by_size = measured()
    for size, (number, method) in product(sorted(by_size), enumerate(METHODS)):
        with asked(f"saved_bytes of {MEASURED} on {size} rank{'s' * (size > 1)}{words(*method)}: "
                   "against the meter after a real block's forward pass"):
            seen = saved_bytes(*astuple(MEASURED), size, *method)
            _expect_bytes(seen, [mine[number] for mine in by_size[size]], MEASURED, size, method)

    for (name, (sizes, inside)), method in product(PUBLISHED.items(), METHODS):
        for size in PUBLISHED_RANKS:
            with asked(f"saved_bytes of {name}, {sizes}, on {size} ranks{words(*method)}: against "
                       "table 2 of Korthikanti et al. 2022"):
                right = published(sizes, size, *method, inside)
                seen = saved_bytes(*astuple(sizes), size, *method)
                _expect_bytes(seen, [right] * size, sizes, size, method)


    for method in METHODS:
        with asked(f"saved_bytes of {HUGE}, on 3 ranks{words(*method)}"):
            right = published(HUGE, 3, *method, HUGE_INSIDE)
            seen = saved_bytes(*astuple(HUGE), 3, *method)
            expect(seen == right, seen=f"{seen:,}, not {right:,}", likely="only the rounding is "
                                                                          "wrong: / makes a float, "
                                                                          "which has 16 digits. "
                                                                          "Divide integers with //")


def words(sequence_parallel: bool, selective: bool) -> str:
    return ", sequence_parallel" * sequence_parallel + ", selective" * selective


def published(
    sizes: Sizes, num_ranks: int, sequence_parallel: bool, selective: bool, inside: int
) -> int:
    """Table 2, in bytes; `inside` is 5 a s / h."""
    per_value = 34 if sequence_parallel else 10 * num_ranks + 24
    return sizes.wide * (per_value + (0 if selective else inside)) // num_ranks


# A block as it runs on a GPU, on each rank


@cache
def measured() -> dict[int, list[list[int]]]:
    """By the number of ranks, and by rank, what a block has saved with each method."""
    return on_ranks(measure_all, sizes=(1, 2, 3, 4))


def measure_all(group) -> list[int]:
    return [measure(group, *method) for method in METHODS]


def measure(group, sequence_parallel: bool, selective: bool) -> int:
    """Bytes that a block has saved after forward, in bfloat16, without what is small."""
    B, S, D, H = astuple(MEASURED)
    config = ModelConfig("gpt", vocab_size=12, max_sequence_length=S, num_layers=1, width=D,
                         num_heads=H, num_kv_heads=H, ffn_width=4 * D, dropout=0.1)
    model = Transformer(config).bfloat16()
    block = model.blocks[0]
    block.attention.attention_fn = masked_attention
    block.dropout = MaskedDropout(config.dropout)
    if selective:
        apply_selective_recompute(model)
    apply = apply_sequence_parallel if sequence_parallel else apply_tensor_parallel
    apply(model, group)
    tokens = S // group.size() if sequence_parallel else S
    return saved_by(block, (B, tokens, D), S)


def saved_by(block: nn.Module, shape: tuple[int, ...], num_tokens: int) -> int:
    with Meter(block) as meter:
        x: Tensor = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        out = block(x, None)
        saved = [t for t in held_now(meter).tensors if t.category == "activation"]
        del out
    left_out = ((*shape[:2], 1), (num_tokens, num_tokens))  # norms' statistics, the mask
    return sum(t.bytes for t in saved if t.shape not in left_out)


# What a difference means


def _expect_bytes(
    seen: int, right: list[int], sizes: Sizes, size: int, method: tuple[bool, bool]
) -> None:
    expect(type(seen) is int, seen=f"{seen!r}, of type {type(seen).__name__}",
           likely="return exact integers: divide with //, not /")
    likely = _faults(sizes, size, *method).get(
        seen - right[0], "go through the table: which tensors have S tokens on every rank, and "
                         "which S/N? Which have all heads or all of F, and which 1/N of them?")
    expect(all(seen == bytes_ for bytes_ in right),
           seen=f"{seen:,}; expected {per_rank([f'{n:,}' for n in right])}, the difference is "
           f"{(seen - right[0]) / sizes.wide:+.3g} bytes for each of the B S D values",
           likely=likely)


def _faults(
    sizes: Sizes, size: int, sequence_parallel: bool, selective: bool
) -> dict[int, str]:
    """What is seen less what is right, and why."""
    wide, square = sizes.wide, sizes.square
    uncut, uncut_square = wide - wide // size, square - square // size
    faults = {
        24 * uncut: "a rank has 1/N of the heads and of F: query, key, value and the inputs of "
                    "out, gelu and down are sharded",
        -2 * wide // (size if sequence_parallel else 1):
            "the masks of both branches' outputs are missing, 1 byte per value",
    }
    if sequence_parallel:
        faults |= {
            10 * uncut: "with sequence_parallel a rank has S/N tokens between the tensor-parallel "
                        "layers: nothing is held in full",
            4 * uncut: "query, key, value and up save their shard of the input: S/N tokens",
        }
    else:
        faults[-10 * uncut] = "the norms, the inputs of query, key, value and up, and the masks " \
                              "have S tokens on every rank: only sequence_parallel shards them"
    if selective:
        return faults | {
            5 * square // size: "selective saves nothing of size S x S: it is recomputed",
            -6 * wide // size: "selective recomputes from query, key and value: these are saved",
        }
    return faults | {
        5 * uncut_square: "a rank has H/N heads: a matrix of S x S for each of them",
        -5 * uncut_square // size: "attention is sharded by heads only: each of a rank's heads has "
                                   "S x S scores, over all tokens",
        -2 * square // size: "softmax's output and the same after dropout are two tensors",
    }
