"""Exercises of chapter 3: recompute activations instead of keeping them.

Write the body, save, and run `minitron check 3.1` in a terminal or check("3.1") in a notebook. If
you are stuck, `minitron hint 3.1` gives hints in three steps; `minitron reset 3.1` restores the
original. The exercises do not build on each other, so you can take them in any order.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minitron.config import ModelConfig


# Exercise 3.1 | Recompute a function | 30 min | difficulty 3 | replaces minitron.model.recompute
# Train with yours: --train.recompute full
def recompute(function: Callable, *tensors: Tensor) -> Tensor:
    """Call `function(*tensors)`, keep only `tensors`, and call it again in the backward pass.

    The result and all gradients must equal those of the plain call, `function(*tensors)`.

    - `function` returns one tensor. Some of `tensors` may require no gradient, or may hold
      integers: the gradient of these is None.
    - `function` may read weights from its closure. Their gradients must be added to their .grad as
      well, even if none of `tensors` requires a gradient.
    - `function` may draw random numbers (dropout, on the CPU). Recomputation must draw the same
      numbers again, and must leave torch.get_rng_state() as it was before recomputation.
    - Under torch.no_grad(), `recompute` must do what the plain call does. You may ignore autocast.

    One way is an autograd.Function; write the class inside this function or above it. Neither its
    `forward` nor its `backward` records a graph unless you enable recording.

    Example: with w = 3 and x = 2, recompute(lambda x: w * x * x, x) is 12 and keeps only x.
    backward() then calls the lambda again and sets x.grad = 12 and w.grad = 4.
    """

    raise NotImplementedError("Exercise 3.1 - Recompute a function.  Hint: minitron hint 3.1")


# Exercise 3.2 | Fit a byte budget | 25 min | difficulty 3
def segments_for_budget(activation_bytes: list[int], boundary_bytes: int, budget: int) -> list[int]:
    """Return segment lengths that need at most `budget` bytes and recompute the fewest blocks.

    Block i stores activation_bytes[i] for its backward pass. This includes its own input, which
    takes boundary_bytes. The lengths you return divide the first blocks into segments, each of
    which is recomputed as one call. The blocks after the last segment, the tail, keep their
    activations. An empty list recomputes nothing. Memory holds

    - at the end of the forward pass: the inputs of all segments, boundary_bytes each, and the
      activations of the tail;
    - while a segment is recomputed: the inputs of the segments before it, and the activations of
      its own blocks. Everything after it has been freed by then.

    At no time may this exceed `budget`. If several answers recompute the fewest blocks, any of them
    is right. If nothing fits, raise ValueError with the budget in its message.

    Example: four blocks store 10 bytes each, and boundary_bytes is 1. A budget of 40 gives []. A
    budget of 21 gives [2]: memory holds 1 + 20 bytes at the end of the forward pass, and 20 while
    the segment is recomputed.
    """
    raise NotImplementedError("Exercise 3.2 - Fit a byte budget.  Hint: minitron hint 3.2")


# Exercise 3.3 | What recomputation costs | 15 min | difficulty 2 | replaces minitron.cost
def recompute_flops_per_token(
    model: ModelConfig, sequence_length: int, recompute: str = "full"
) -> int:
    """Return the FLOPs that recomputation adds to a training step, per token.

        "none"        nothing
        "full"        the forward pass of every block; the embedding and the output head are
                      outside the blocks
        "selective"   only attention's core: the scores QK^T and their matmul with the values,
                      without the four linear layers around them

    D = width, F = ffn_width, G = num_kv_heads, K = head_width, S = sequence_length. The weight
    matrices of a block are query and out, D x D each; key and value, D x G K each; and in the
    feed-forward two (gpt) or three (llama) of D x F each. A linear layer costs 2 FLOPs per weight
    and token. Each of attention's two matmuls costs 2 S D FLOPs per token, for all heads together
    and the full S x S square. Ignore norms and activation functions. Count every matmul, even one
    that recomputation skips because it does not need the output again.

    Example: llama, one layer, V 10, D 4, two heads, two KV heads, F 6, S 3. Full recomputation adds
    320 FLOPs per token and selective adds 48, which is 27 % and 4 % of the training step's 1200.
    """
    raise NotImplementedError("Exercise 3.3 - What recomputation costs.  Hint: minitron hint 3.3")


# Exercise 3.4 | The best segment length | 15 min | difficulty 2
def best_segment_length(
    num_blocks: int, activation_bytes: int, boundary_bytes: int
) -> tuple[int, int]:
    """Return the segment length with the lowest memory peak, and that peak: (length, bytes).

    Every block is recomputed. All segments have the same length, except that the last one is
    shorter if the length does not divide num_blocks. While a segment is recomputed, memory holds
    boundary_bytes for the input of each segment before it, and activation_bytes for each of its own
    blocks. Do not add the segment's own input: the activations of its first block include it. The
    peak is the largest of these sums. If several lengths have the same peak, return the longest of
    them, because it keeps the fewest inputs.

    Example: num_blocks 7, activation_bytes 4, boundary_bytes 2. Length 2 gives segments of 2, 2, 2
    and 1 blocks, which need 8, 2 + 8, 4 + 8 and 6 + 4 bytes: the peak is 12. Length 3 gives
    segments of 3, 3 and 1, which need 12, 2 + 12 and 4 + 4: the peak is 14. Length 1 needs up to
    6 x 2 + 4 = 16. The answer is (2, 12).
    """

    raise NotImplementedError("Exercise 3.4 - The best segment length.  Hint: minitron hint 3.4")
