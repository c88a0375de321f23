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
    """Count the bytes that training `model` with Adam holds at all times, by part.

    `dtypes` is the plan, and the keys of the answer are the same:

        "parameter"   what forward and backward compute with
        "gradient"    the one copy of it that lasts from backward to the optimizer
        "master"      the copy of the weights that the optimizer updates; None: there is none
        "moments"     Adam's running means of the gradient and of its square, together

    A tied weight is one tensor. A frozen parameter (requires_grad is False) is stored like the
    others, and that is all: the optimizer does not know it. The model may be in another dtype
    now, or have shapes and no values (torch.device("meta")): the plan counts. Buffers and Adam's
    step counters are left out. Counts are exact integers.

    Example: nn.Linear(4, 5) has 25 parameters. In bfloat16 with gradient, master and moments in
    float32: 50, 100, 100 and 200 bytes.
    """
    raise NotImplementedError("Exercise 2.1 - Bytes before any token.  Hint: minitron hint 2.1")


def plans_that_fit(
    model: nn.Module, plans: dict[str, dict[str, torch.dtype | None]], memory_gb: float
) -> list[str]:
    """Name the plans (name -> dtypes) whose state fits into `memory_gb`, the smallest first.

    A GB is 10^9 bytes, as GPUs are sold. All parts of the state must fit at once, and may fill
    the memory exactly. Plans of equally many bytes keep the order of the dict.

    Example: 10^9 parameters, all trained, in 15 GB. Everything in float32 needs 16 GB and does
    not fit; everything in bfloat16, without a master, needs 8 GB and does.
    """
    raise NotImplementedError("Exercise 2.1 - Bytes before any token.  Hint: minitron hint 2.1")


# Exercise 2.2 | What a block saves | 30 min | difficulty 3
def materialized_block_bytes(
    model: ModelConfig, batch_size: int, sequence_length: int, bytes_per_value: int
) -> int:
    """Count the bytes that one gpt block saves in forward for its backward pass.

    Attention is `materialized_attention` of minitron/model/transformer.py, with the S x S matrix
    in memory. B = batch_size, S = sequence_length, D = model.width, H = model.num_heads,
    F = model.ffn_width. Values have `bytes_per_value` bytes, a dropout mask has 1 byte per value.
    Go through the block line by line and ask each operation what its backward pass needs:

        linear    its input (and its weight, which is there anyway: not counted)
        norm      its input
        gelu      its input
        softmax   its output
        product of two activations   both
        dropout   its mask; only if model.dropout > 0, else it is not there
        sums, transposes, a division by a number, masking out the future   nothing

    A tensor that two operations need is stored once. Dropout acts on the probabilities and on
    the outputs of both branches. Leave out what is small: the norms' means and deviations, and
    the (S, S) mask of the future.

    Example: B 1, S 2, D 4, H 2, F 16, 2 bytes. Without dropout 272 bytes, of which the
    probabilities, 1 x 2 x 2 x 2 values, are 16. With dropout 312: that is B S D (34 + 5 H S / D),
    the formula of Korthikanti et al. 2022 (section 4.1), which holds for F = 4 D.
    """
    raise NotImplementedError("Exercise 2.2 - What a block saves.  Hint: minitron hint 2.2")


def fused_block_bytes(
    model: ModelConfig, batch_size: int, sequence_length: int, bytes_per_value: int
) -> int:
    """Count the same when a fused kernel computes attention (Dao et al. 2022, section 3.1).

    In forward the kernel works through the S x S matrix piece by piece and stores none of it; in
    backward it computes the pieces again. For that it saves the query, key, value and its output,
    and one number per token and head (leave it out: it is small). It draws its dropout mask again
    from a seed, too. The dropout of the two branches is as before.

    Example: the block above: 256 bytes without dropout, 272 with it, 34 B S D.
    """
    raise NotImplementedError("Exercise 2.2 - What a block saves.  Hint: minitron hint 2.2")


# Exercise 2.3 | Who is there at the peak | 15 min | difficulty 2
def find_peak(
    step: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer, num_holders: int
) -> tuple[str, int, list[tuple[str, str, int]]]:
    """Find the largest moment of a training step, and who holds its bytes.

    Returns the phase it falls into, its bytes, and its largest holders.

    `step()` trains `model` with `optimizer` for one step; call it as often as you need. Nothing
    has run yet, and a run has thousands of steps: describe the step that they are like.

    Read the peak with minitron's Meter (minitron/measure/meter.py): a Snapshot has its phase, its
    total, and every LiveTensor that was alive, with bytes, category and module. A holder is
    (category, module, bytes), its bytes the sum over all tensors of that category and module.
    List the `num_holders` largest, the largest first; equals in any order.

    Example: alive at the peak are two activations of "blocks.0.mlp", 300 and 200 bytes, and a
    parameter of "head", 400 bytes. The largest holder is ("activation", "blocks.0.mlp", 500).
    """
    raise NotImplementedError("Exercise 2.3 - Who is there at the peak.  Hint: minitron hint 2.3")


# Exercise 2.4 | The leak | 20 min | difficulty 2
def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    validation: list[tuple[Tensor, Tensor]],
) -> dict[str, list[float]]:
    """Train as the loop below does, to the same numbers, and without its leaks.

    This loop was found in a run that died of memory after some hours:

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

    The meter reads the peak of every step. No step may need more than the second one, but for a
    few 0-d tensors, and the second no more than a loop that keeps nothing. Nor may the number of
    graphs that are alive grow. Take one batch after the other: `batches` makes each when it is
    asked for. The history is lists of floats, one per step.

    Shapes: inputs and targets (B, S) int64, model(inputs) gives logits (B, S, V).

    Example: the fourth step of the loop above holds the graphs of four steps and of four
    validations. Yours holds those of one step.
    """
    raise NotImplementedError("Exercise 2.4 - The leak.  Hint: minitron hint 2.4")
