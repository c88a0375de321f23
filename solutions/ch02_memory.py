"""Exercises of chapter 2: where the memory goes.

Write a function's body, save, and ask `minitron check 2.1`, or check("2.1") in a notebook.
Stuck: `minitron hint 2.1`, three levels. Start again: `minitron reset 2.1`. The exercises do not
build on one another; take them in any order.
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
    """Return the bytes of the state that training `model` with Adam keeps, part by part.

    `dtypes` gives the dtype of each part, and the answer has the same keys:

        "parameter"   the weights that the forward and backward passes compute with
        "gradient"    the gradients, from the backward pass to the optimizer
        "master"      the copy of the weights that the optimizer updates; None: there is no copy
        "moments"     Adam's moving averages of the gradient and of its square, together

    A tied weight is one tensor. A frozen parameter (requires_grad is False) is stored, but it has
    no gradient, no master copy and no moments. Use the dtypes in `dtypes`, whatever dtype the model
    has now; it may even have no values (torch.device("meta")). Leave out buffers and Adam's step
    counters. Return exact integers.

    Example: nn.Linear(4, 5) has 25 parameters. In bfloat16 with gradient, master and moments in
    float32: 50, 100, 100 and 200 bytes.
    """
    ### BEGIN SOLUTION
    parameters = list(model.parameters())  # each tensor once, whatever its names
    stored = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return {
        "parameter": stored * dtypes["parameter"].itemsize,
        "gradient": trained * dtypes["gradient"].itemsize,
        "master": trained * dtypes["master"].itemsize if dtypes["master"] else 0,
        "moments": trained * 2 * dtypes["moments"].itemsize,
    }
    ### END SOLUTION


def plans_that_fit(
    model: nn.Module, plans: dict[str, dict[str, torch.dtype | None]], memory_gb: float
) -> list[str]:
    """Return the names of the plans whose state fits into `memory_gb`, the smallest first.

    `plans` maps a name to the dtypes of its parts. A GB is 10^9 bytes. All parts of the state must
    fit together; they may fill the memory exactly. Plans with the same number of bytes keep the
    order of the dict.

    Example: 10^9 parameters, all trained, in 15 GB. Everything in float32 needs 16 GB and does
    not fit; everything in bfloat16, without a master, needs 8 GB and does.
    """
    ### BEGIN SOLUTION
    needed = {name: sum(state_bytes(model, dtypes).values()) for name, dtypes in plans.items()}
    fitting = [name for name in plans if needed[name] <= memory_gb * 10**9]
    return sorted(fitting, key=needed.get)  # a stable sort: equals keep their order
    ### END SOLUTION


# Exercise 2.2 | What a block saves | 30 min | difficulty 3
def materialized_block_bytes(
    model: ModelConfig, batch_size: int, sequence_length: int, bytes_per_value: int
) -> int:
    """Return the bytes that one gpt block saves in the forward pass for the backward pass.

    Attention is `materialized_attention` of minitron/model/transformer.py, with the S x S matrix
    in memory. B = batch_size, S = sequence_length, D = model.width, H = model.num_heads,
    F = model.ffn_width. A value has `bytes_per_value` bytes; a dropout mask has 1 byte per value.
    Go through the block line by line and ask what the backward pass of each operation needs:

        linear    its input (and its weight, which is in memory anyway: do not count it)
        norm      its input
        gelu      its input
        softmax   its output
        matmul of two activations   both of them
        dropout   its mask; with model.dropout == 0 there is no dropout
        sums, transposes, division by a number, the causal mask   nothing

    A tensor that two operations need is stored once. Dropout acts on the attention probabilities
    and on the outputs of both branches. Leave out what is small: the norms' means and standard
    deviations, and the causal mask itself, (S, S).

    Example: B 1, S 2, D 4, H 2, F 16, 2 bytes. Without dropout 272 bytes, of which the
    probabilities, 1 x 2 x 2 x 2 values, are 16. With dropout 312: that is B S D (34 + 5 H S / D),
    the formula of Korthikanti et al. 2022 (section 4.1), which holds for F = 4 D.
    """
    ### BEGIN SOLUTION
    wide = batch_size * sequence_length * model.width
    square = batch_size * model.num_heads * sequence_length**2

    # norm, qkv input | query, key, value | input of out | norm, input of up
    values = 2 * wide + 3 * wide + wide + 2 * wide
    values += 2 * batch_size * sequence_length * model.ffn_width  # inputs of gelu and of down
    values += square  # softmax's output, which without dropout is also the product's input
    if model.dropout == 0:
        return values * bytes_per_value

    masks = square + 2 * wide
    return (values + square) * bytes_per_value + masks  # now the product has an input of its own
    ### END SOLUTION


def fused_block_bytes(
    model: ModelConfig, batch_size: int, sequence_length: int, bytes_per_value: int
) -> int:
    """Return the same when a fused kernel computes attention (Dao et al. 2022, section 3.1).

    In the forward pass the kernel works through the S x S matrix tile by tile and stores none of
    it; in the backward pass it recomputes the tiles. For that it saves query, key, value and its
    output, and one number per token and head (leave that out: it is small). It also regenerates its
    dropout mask from a seed. Dropout on the outputs of the two branches is as before.

    Example: the block above: 256 bytes without dropout, 272 with it, 34 B S D.
    """
    ### BEGIN SOLUTION
    wide = batch_size * sequence_length * model.width
    values = 8 * wide + 2 * batch_size * sequence_length * model.ffn_width
    branch_masks = 2 * wide if model.dropout > 0 else 0
    return values * bytes_per_value + branch_masks
    ### END SOLUTION


# Exercise 2.3 | What is held at the peak | 15 min | difficulty 2
def find_peak(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, num_holders: int
) -> tuple[str, int, list[tuple[str, str, int]]]:
    """Return the phase in which a training step's memory peaks, the bytes, and what holds them.

    `step()` trains `model` with `optimizer` for one step; call it as often as you need. Nothing
    has run yet. Describe the peak of a typical step of a long run.

    Read the peak with minitron's Meter (minitron/measure/meter.py): its Snapshot has the phase, the
    total, and every LiveTensor that was alive, with bytes, category and module. The third answer is
    a list of holders (category, module, bytes): the bytes are the sum over all tensors of that
    category and module. Return the `num_holders` largest, largest first; ties in any order.

    Example: alive at the peak are two activations of "blocks.0.mlp", 300 and 200 bytes, and a
    parameter of "head", 400 bytes. The largest holder is ("activation", "blocks.0.mlp", 500).
    """
    ### BEGIN SOLUTION
    step()  # Adam makes its state in the first step: later ones begin with it in memory
    with Meter(model, optimizer) as meter:  # now a step like all later ones
        step()

    held = Counter()
    for tensor in meter.peak.tensors:  # largest tensors first, not largest holders
        held[tensor.category, tensor.module] += tensor.bytes
    largest = [(*holder, size) for holder, size in held.most_common(num_holders)]
    return meter.peak.phase, meter.peak.total, largest
    ### END SOLUTION


# Exercise 2.4 | The leak | 20 min | difficulty 2
def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    validation: list[tuple[Tensor, Tensor]],
) -> dict[str, list[float]]:
    """Train like the loop below, with the same numbers but without its memory leaks.

    The loop is from a run that ran out of memory after some hours:

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

    The grader meters the peak of every step. The second step may need no more than a loop that
    keeps no history at all, and no later step more than the second, except for a few 0-d tensors.
    The number of live graphs must not grow either. Take the batches one at a time, because
    `batches` creates each one on request. Return the history as lists of floats, one per step.

    Shapes: inputs and targets (B, S) int64, model(inputs) gives logits (B, S, V).

    Example: the fourth step of the loop above holds the graphs of four steps and of four
    validations. Yours holds the graph of that step alone.
    """
    ### BEGIN SOLUTION
    history = {"loss": [], "average": [], "accuracy": [], "validation": []}
    average = 0.0
    for inputs, targets in batches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        average = 0.9 * average + 0.1 * loss.item()
        history["loss"].append(loss.item())
        history["average"].append(average)
        history["accuracy"].append((logits.argmax(-1) == targets).double().mean().item())
        del logits, loss  # else they live until the next step has made its own

        with torch.no_grad():  # no backward pass would free these graphs
            losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in validation]
        history["validation"].append(torch.stack(losses).mean().item())
    return history
    ### END SOLUTION
