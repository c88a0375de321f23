"""Exercises of chapter 2: where the memory goes.

Write the body, save, and run `minitron check 2.1` in a terminal or check("2.1") in a notebook. If
you are stuck, `minitron hint 2.1` gives hints in three steps; `minitron reset 2.1` restores the
original. The exercises do not build on each other, so you can take them in any order.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.measure.meter import Meter


# Exercise 2.1 | Bytes before any token | 15 min | difficulty 1
def state_bytes(model: nn.Module, dtypes: dict[str, torch.dtype | None]) -> dict[str, int]:
    """Return the bytes of each part of `model`'s training state, with Adam as the optimizer.

    `dtypes` gives the dtype of each part. Return a dict with the same keys:

        "parameter"   the weights that the forward and backward passes compute with
        "gradient"    the gradients, which the backward pass computes and the optimizer reads
        "master"      the copy of the weights that the optimizer updates; a dtype of None means
                      that there is no copy, which takes 0 bytes
        "moments"     Adam's moving averages of the gradient and of its square, together

    A tied weight is one tensor. A frozen parameter (requires_grad is False) is stored, but it has
    no gradient, no master copy and no moments. Use the dtypes in `dtypes`, whatever dtype the
    parameters have now. The model may be on torch.device("meta"), where parameters have a shape but
    no values. Leave out buffers and Adam's step counters. Return exact integers.

    Example: nn.Linear(4, 5) has 25 parameters. With the weights in bfloat16 and the gradients,
    master copy and moments in float32, the parts take 50, 100, 100 and 200 bytes.
    """
    raise NotImplementedError("Exercise 2.1 - Bytes before any token.  Hint: minitron hint 2.1")


def plans_that_fit(
    model: nn.Module, plans: dict[str, dict[str, torch.dtype | None]], memory_gb: float
) -> list[str]:
    """Return the names of the plans whose training state fits in `memory_gb`, smallest first.

    `plans` maps the name of each plan to its dtypes, in the format of state_bytes. A plan fits if
    all parts of its state together take at most `memory_gb` GB, where a GB is 10^9 bytes. Plans of
    the same size keep their order in `plans`.

    Example: 10^9 parameters, all trained, in 15 GB. Everything in float32 needs 16 GB and does
    not fit; everything in bfloat16, without a master copy, needs 8 GB and does.
    """
    raise NotImplementedError("Exercise 2.1 - Bytes before any token.  Hint: minitron hint 2.1")


# Exercise 2.2 | What a block saves | 30 min | difficulty 3
def materialized_block_bytes(
    model: ModelConfig, batch_size: int, sequence_length: int, bytes_per_value: int
) -> int:
    """Return the bytes that one gpt block saves in the forward pass for the backward pass.

    Attention is `materialized_attention` from minitron/model/transformer.py, which writes the
    S x S matrix of scores to memory. B = batch_size, S = sequence_length, D = model.width,
    H = model.num_heads, F = model.ffn_width. Each value takes `bytes_per_value` bytes, except in a
    dropout mask, where it takes 1 byte. Go through the block line by line and ask what the backward
    pass of each operation needs:

        linear    its input (and its weight, which is in memory anyway: do not count it)
        norm      its input
        gelu      its input
        softmax   its output
        matmul of two activations   both of them
        dropout   its mask; with model.dropout == 0 there is no dropout
        sums, transposes, division by a number, the causal mask   nothing

    A tensor that two operations need is stored once. Dropout is applied to the attention
    probabilities and to the outputs of both branches, attention and feed-forward. Leave out two
    small items: the norms' means and standard deviations, and the (S, S) causal mask.

    Example: B 1, S 2, D 4, H 2, F 16, 2 bytes per value. Without dropout the block saves 272 bytes,
    of which the probabilities, 1 x 2 x 2 x 2 values, take 16. With dropout it saves 312. That is
    B S D (34 + 5 H S / D), the formula of Korthikanti et al. 2022 (section 4.1), which holds for
    F = 4 D and 2 bytes per value.
    """
    raise NotImplementedError("Exercise 2.2 - What a block saves.  Hint: minitron hint 2.2")


def fused_block_bytes(
    model: ModelConfig, batch_size: int, sequence_length: int, bytes_per_value: int
) -> int:
    """Return the same count for a block with fused attention (Dao et al. 2022, section 3.1).

    In the forward pass the fused kernel computes the S x S matrix tile by tile and stores none of
    it; in the backward pass it recomputes the tiles. To do so it saves query, key, value and its
    output. It also saves one number per token and head, which is small: leave it out. It
    regenerates its dropout mask from a seed, so it saves no mask. Dropout on the outputs of the two
    branches saves its masks as before.

    Example: the block above saves 256 bytes without dropout and 272 with it, which is 34 B S D.
    """
    raise NotImplementedError("Exercise 2.2 - What a block saves.  Hint: minitron hint 2.2")


# Exercise 2.3 | What is held at the peak | 15 min | difficulty 2
def find_peak(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, num_holders: int
) -> tuple[str, int, list[tuple[str, str, int]]]:
    """Return the phase of a training step's memory peak, its bytes, and its largest holders.

    `step()` trains `model` with `optimizer` for one step; call it as often as you need. No step
    has run yet. Report the peak of a typical step of a long run.

    Measure with minitron's Meter (minitron/measure/meter.py). Its `peak` is a Snapshot, which has
    the phase, the total number of bytes, and a LiveTensor for every tensor alive at that moment,
    with its bytes, category and module. A holder is (category, module, bytes), where the bytes are
    the sum over all tensors of that category and module. The third item that you return is a list
    of the `num_holders` largest holders, largest first, with ties in any order.

    Example: at the peak, two activations of "blocks.0.mlp" are alive, of 300 and 200 bytes, and a
    parameter of "head", of 400 bytes. The largest holder is ("activation", "blocks.0.mlp", 500).
    """
    raise NotImplementedError("Exercise 2.3 - What is held at the peak.  Hint: minitron hint 2.3")


# Exercise 2.4 | The leak | 20 min | difficulty 2
def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    validation: list[tuple[Tensor, Tensor]],
) -> dict[str, list[float]]:
    """Train as the loop below does, with the same results but without its memory leaks.

    This loop ran out of memory after some hours:

        history = {"loss": [], "average": [], "accuracy": [], "validation": []}
        average = 0.0
        for inputs, targets in batches:
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()

            average = 0.9 * average + 0.1 * loss
            correct = (logits.argmax(-1) == targets).double()
            history["loss"].append(loss)
            history["average"].append(average)
            history["accuracy"].append(correct)
            total = 0.0
            for x, y in validation:
                total += F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            history["validation"].append(total / len(validation))
        history["accuracy"] = [correct.mean() for correct in history["accuracy"]]
        return {key: [value.item() for value in values] for key, values in history.items()}

    The grader measures the peak memory of every step. Apart from a few 0-d tensors, the second step
    may need no more than it would in a loop that keeps no history at all, and no later step may
    need more than the second. The number of autograd graphs that are alive must not grow either.
    Take the batches one at a time, because `batches` creates each one on request. Leave the model
    in training mode, as the loop does. Return the history as lists of floats, one per step.

    Shapes: inputs and targets are (B, S) int64, and model(inputs) returns logits (B, S, V).

    Example: in its fourth step, the loop above holds the graphs of four training steps and of four
    validations. Yours holds only the graph of the current training step.
    """
    raise NotImplementedError("Exercise 2.4 - The leak.  Hint: minitron hint 2.4")
