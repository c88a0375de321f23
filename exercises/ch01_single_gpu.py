"""Exercises of chapter 1: one device.

Write the body, save, and run `minitron check 1.1` in a terminal or check("1.1") in a notebook. If
you are stuck, `minitron hint 1.1` gives hints in three steps; `minitron reset 1.1` restores the
original. The exercises do not build on each other, so you can take them in any order.
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from minitron.config import ModelConfig

IGNORED = -100
"""A target with this value is padding: it adds nothing to the loss and is not counted."""


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, S, V) and targets (B, S), summed over the counted targets."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


# Exercise 1.1 | Gradient accumulation | 20 min | difficulty 2 | replaces minitron.step
# Train with yours
def accumulate_gradients(
    model: Callable[[Tensor], Tensor],
    micro_batches: list[tuple[Tensor, Tensor]],
    divisor: Tensor | float | None = None,
    sum_loss: Callable[[Tensor, Tensor], Tensor] = summed_loss,
) -> Tensor:
    """Accumulate the gradient of one large batch in .grad, one micro-batch at a time.

    The loss is the mean cross-entropy over all counted targets of all micro-batches together: the
    sum of the tokens' losses divided by the number of counted tokens. A target counts unless it is
    IGNORED. Your function must

    - add the gradient of that loss to whatever .grad already holds;
    - return the loss, as a float or as a detached 0-d tensor (0 if no target counts);
    - keep the activations of only one micro-batch alive at a time: run its backward pass before
      the next forward pass;
    - change nothing else: no optimizer step, no zero_grad, no switch between train and eval mode.

    sum_loss(logits, targets) returns the cross-entropy of one micro-batch, summed over its counted
    targets. If `divisor` is given, divide by it instead of by the number of counted tokens. The
    package passes a divisor when several ranks share one batch, because then no rank sees all of
    the batch's targets.

    Shapes: each micro-batch is (inputs, targets), both (B, S) int64. B and the number of ignored
    targets differ between micro-batches, and a micro-batch may have no counted target at all.
    model(inputs) returns logits (B, S, V).

    Example: two micro-batches with 3 and 1 counted tokens, whose losses are 1, 1, 1 and 5. The
    loss is (1 + 1 + 1 + 5) / 4 = 2. The mean of the two means would be (1 + 5) / 2 = 3. With
    divisor = 8 the loss is 1.
    """
    raise NotImplementedError("Exercise 1.1 - Gradient accumulation.  Hint: minitron hint 1.1")


# Exercise 1.2 | Learning-rate schedule | 10 min | difficulty 1 | replaces minitron.step
# Train with yours
def learning_rate(
    step: int, peak: float, minimum: float, warmup_steps: int, total_steps: int
) -> float:
    """Return the rate of `step`: a linear warm-up to `peak`, then half a cosine to `minimum`.

    Steps count from 0.

    - Warm-up, while step < warmup_steps: step k gets (k + 1) / warmup_steps of the peak. The first
      step therefore has a rate above 0, and the last step of the warm-up has the peak rate.
    - Decay: the cosine starts at the peak in step warmup_steps and reaches `minimum` in the last
      step, total_steps - 1. If the decay lasts a single step, that step has the minimum.
    - After the last step, the rate stays at `minimum`.

    warmup_steps may be 0.

    Example: with peak 1.0, minimum 0.0, warmup_steps 2 and total_steps 7, the rates of steps 0 to
    6 are 0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0.
    """
    raise NotImplementedError("Exercise 1.2 - Learning-rate schedule.  Hint: minitron hint 1.2")


# Exercise 1.3 | What a model costs | 30 min | difficulty 3 | replaces minitron.cost
# Train with your training_flops_per_token
def num_parameters(model: ModelConfig) -> int:
    """Return the number of the model's parameters, from its shapes; a tied weight counts once.

    D = width, F = ffn_width, V = vocab_size, G = num_kv_heads, K = head_width. A linear layer has
    one weight for each pair of an input and an output, and one bias per output if it has biases.

    Both families have

    - a token embedding (V, D);
    - in each of the num_layers blocks: a norm, attention (query D to D, key and value D to G K
      each, out D to D), a second norm, and a feed-forward;
    - after the blocks: a final norm, and a head D to V without bias. With tied_embedding, the head
      uses the embedding's weight.

    They differ in the rest:

    | | gpt | llama |
    |---|---|---|
    | positions | learned: (max_sequence_length, D) | rotary: not stored |
    | norm | a weight and a bias, D values each | a weight, D values |
    | linear layers of a block | with bias | without bias |
    | feed-forward | up D to F, down F to D | gate and up D to F each, down F to D |

    Example: llama with V 10, D 4, two heads, two KV heads, F 6, one layer, tied. The embedding has
    40 parameters, attention 4 x 16, the feed-forward 3 x 24, and the three norms 4 each: 188.
    """
    raise NotImplementedError("Exercise 1.3 - What a model costs.  Hint: minitron hint 1.3")


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the FLOPs that training spends on one token, counting only matmuls.

    A matmul of (M, K) with (K, N) takes 2 M K N floating-point operations: M K N multiplications
    and as many additions.

    | counts | does not count |
    |---|---|
    | the weights of every linear layer | embedding lookups, biases |
    | the head, tied or not: it is a matmul either way | norms, activation functions |
    | attention's two matmuls: queries times keys, scores times values | |
    | the backward pass: twice the forward pass | |

    Attention over S = sequence_length tokens counts as the full S x S square, although half of it
    is masked. Grouped-query heads share keys and values but skip no work: all H query heads attend.

    Example: the model above with S = 3. The linear layers and the head have 64 + 72 + 40 = 176
    weights, which take 2 x 176 = 352 FLOPs; attention takes 2 x 2 S D = 48. The forward pass
    therefore takes 400 FLOPs per token, and training 1200.
    """
    raise NotImplementedError("Exercise 1.3 - What a model costs.  Hint: minitron hint 1.3")


# Exercise 1.4 | Planning the batch | 15 min | difficulty 2
def plan_batch(
    tokens_per_step: int, sequence_length: int, num_ranks: int, largest_micro_batch: int
) -> tuple[int, int]:
    """Split a step's tokens into (micro_batch_size, accumulation_steps), the same on every rank.

    micro_batch_size x accumulation_steps x num_ranks x sequence_length must equal tokens_per_step
    exactly, because a different batch size would change the training. micro_batch_size is a number
    of sequences, at most largest_micro_batch, which is the most that fits in memory. If several
    sizes qualify, return the largest, because it needs the fewest passes.

    Raise ValueError if tokens_per_step is not a multiple of sequence_length x num_ranks. The
    message must contain tokens_per_step and that product.

    Example: 2**16 tokens per step, sequences of 1024 tokens, 4 ranks. Each rank gets 16 sequences
    per step. If 6 fit in memory, the answer is (4, 4), because neither 6 nor 5 divides 16.
    """
    raise NotImplementedError("Exercise 1.4 - Planning the batch.  Hint: minitron hint 1.4")
