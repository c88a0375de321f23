"""Exercises of chapter 1: one device.

Write a function's body, save, and ask `minitron check 1.1`, or check("1.1") in a notebook.
Stuck: `minitron hint 1.1`, three levels. Start again: `minitron reset 1.1`. The exercises do not
build on one another; take them in any order.
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from minitron.config import ModelConfig

IGNORED = -100
"""A target with this value is padding: it is not predicted and not counted."""


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
    """Add the gradient of one large batch into .grad, one micro-batch at a time.

    The loss is the mean cross-entropy over all counted targets of all micro-batches together: the
    sum of the tokens' losses divided by the number of counted tokens. A target counts unless it is
    IGNORED. Your function must

    - add the gradient of that loss to whatever .grad already holds;
    - return the loss, as a float or as a detached tensor without dimensions (0 if nothing counts);
    - keep the activations of only one micro-batch alive at a time: run its backward pass before
      the next forward pass;
    - leave everything else alone: no optimizer step, no zero_grad, no change of train/eval mode.

    sum_loss(logits, targets) returns the cross-entropy of one micro-batch, summed over its counted
    targets. If `divisor` is given, divide by it instead of by the count: when several ranks share
    one batch, no rank sees all of its targets, so the package passes the divisor in.

    Shapes: each micro-batch is (inputs, targets), both (B, S) int64. B and the number of ignored
    targets differ between micro-batches, and all targets of one may be ignored.
    model(inputs) gives logits (B, S, V).

    Example: two micro-batches with 3 and 1 counted tokens, whose losses are 1, 1, 1 and 5. The
    loss is (1 + 1 + 1 + 5) / 4 = 2. The mean of the two means would be (1 + 5) / 2 = 3. With
    divisor = 8 it is 1.
    """
    ### BEGIN SOLUTION
    if divisor is None:
        num_counted = sum(int((targets != IGNORED).sum()) for _, targets in micro_batches)
        divisor = max(1, num_counted)
    total = 0.0
    for inputs, targets in micro_batches:
        share = sum_loss(model(inputs), targets) / divisor  # every token weighs the same
        share.backward()
        total += share.detach()
    return total
    ### END SOLUTION


# Exercise 1.2 | Learning-rate schedule | 10 min | difficulty 1 | replaces minitron.step
# Train with yours
def learning_rate(
    step: int, peak: float, minimum: float, warmup_steps: int, total_steps: int
) -> float:
    """Warm up linearly to `peak`, then fall along half a cosine to `minimum`.

    Steps count from 0.

    - Warm-up, while step < warmup_steps: step k gets (k + 1) / warmup_steps of the peak. So the
      first step already learns, and the last step of the warm-up has the peak rate.
    - Decay: the cosine starts at step warmup_steps with the peak and reaches `minimum` at the last
      step, total_steps - 1. If the decay is a single step long, that step has the minimum.
    - After the last step the rate stays at `minimum`.

    warmup_steps may be 0.

    Example: peak 1.0, minimum 0.0, warmup_steps 2, total_steps 7 gives, for steps 0 to 6,
    0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0.
    """
    ### BEGIN SOLUTION
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step >= total_steps - 1:
        return minimum
    progress = (step - warmup_steps) / (total_steps - 1 - warmup_steps)  # 0 at the peak
    height = (1 + math.cos(math.pi * progress)) / 2
    return minimum + (peak - minimum) * height
    ### END SOLUTION


# Exercise 1.3 | What a model costs | 30 min | difficulty 3 | replaces minitron.cost
# Train with your training_flops_per_token
def num_parameters(model: ModelConfig) -> int:
    """Count the model's trainable values from its shapes; a tied weight counts once.

    D = width, F = ffn_width, V = vocab_size, G = num_kv_heads, K = head_width. A linear layer
    stores one value for each pair of input and output, and one per output if it has a bias.

    Both families: a token embedding (V, D); per block a norm, attention (query D to D, key and
    value D to G K each, out D to D), another norm, a feed-forward; after the blocks a final norm
    and a head D to V without bias, which is the embedding's own weight if tied_embedding.
    gpt: learned positions (max_sequence_length, D); norms with weight and bias; every linear
    layer of a block has a bias; the feed-forward is up (D to F) and down (F to D).
    llama: rotary positions, which are not stored; norms with a weight only; no biases; the
    feed-forward is gate and up (D to F each) and down (F to D).

    Example: llama, V 10, D 4, two heads, two KV heads, F 6, one layer, tied: the embedding has
    40, attention 4 x 16, the feed-forward 3 x 24, three norms 4 each: 188.
    """
    ### BEGIN SOLUTION
    D, gpt = model.width, model.family == "gpt"
    kv_width = model.num_kv_heads * model.head_width
    norm = 2 * D if gpt else D

    matrices = 2 * D * D + 2 * D * kv_width + (2 if gpt else 3) * D * model.ffn_width
    biases = 2 * D + 2 * kv_width + model.ffn_width + D if gpt else 0
    block = matrices + biases + 2 * norm

    embedding = model.vocab_size * D
    positions = model.max_sequence_length * D if gpt else 0
    head = 0 if model.tied_embedding else embedding
    return embedding + positions + model.num_layers * block + norm + head
    ### END SOLUTION


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Count the floating-point operations that training spends on one token: matrices only.

    A matmul of (M, K) with (K, N) is 2 M K N operations: M K N multiplications and as many
    additions.

    | counts | does not count |
    |---|---|
    | every linear layer | looking up an embedding |
    | the head, tied or not: it is a matmul either way | norms, activation functions |
    | attention's two matmuls, query keys^T and scores values | |
    | the backward pass: twice the forward pass | |

    Attention over S = sequence_length tokens counts as the full S x S square, although half of it
    is masked. Grouped-query heads share keys and values but skip no work: all H query heads attend.

    Example: the model above with S = 3: the linear layers and the head hold 64 + 72 + 40 = 176
    weights, 2 x 176 = 352; attention 2 x 2 S D = 48; forward 400, training 1200 per token.
    """
    ### BEGIN SOLUTION
    D = model.width
    kv_width = model.num_kv_heads * model.head_width
    feed_forward = (2 if model.family == "gpt" else 3) * D * model.ffn_width
    block_weights = 2 * D * D + 2 * D * kv_width + feed_forward
    linear = 2 * (model.num_layers * block_weights + D * model.vocab_size)
    # per token and head: S scores of K multiplications each, then S values of width K; H K = D
    attention = model.num_layers * 2 * (2 * sequence_length * D)
    return 3 * (linear + attention)
    ### END SOLUTION


# Exercise 1.4 | Planning the batch | 15 min | difficulty 2
def plan_batch(
    tokens_per_step: int, sequence_length: int, num_ranks: int, largest_micro_batch: int
) -> tuple[int, int]:
    """Split a step's tokens into (micro_batch_size, accumulation_steps), the same on every rank.

    tokens_per_step = micro_batch_size x accumulation_steps x num_ranks x sequence_length must hold
    exactly, since a different batch would be a different training. micro_batch_size counts
    sequences and is at most largest_micro_batch, which is what memory allows. Among the sizes that
    divide, return the largest, which needs the fewest passes.

    Raises ValueError, with tokens_per_step and the product sequence_length x num_ranks in its
    message, when the first is not a multiple of the second.

    Example: 2**16 tokens per step, sequences of 1024, 4 ranks: 16 sequences per rank. If 6 fit
    into memory: (4, 4), because 6 and 5 do not divide 16.
    """
    ### BEGIN SOLUTION
    tokens_per_round = sequence_length * num_ranks
    if tokens_per_step % tokens_per_round != 0:
        raise ValueError(
            f"{tokens_per_step} tokens per step is not a multiple of {tokens_per_round}, "
            f"one sequence of {sequence_length} on each of {num_ranks} ranks"
        )
    per_rank = tokens_per_step // tokens_per_round
    fitting = range(1, min(per_rank, largest_micro_batch) + 1)
    micro_batch_size = max(size for size in fitting if per_rank % size == 0)
    return micro_batch_size, per_rank // micro_batch_size
    ### END SOLUTION
