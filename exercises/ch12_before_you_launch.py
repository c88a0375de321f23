"""Exercises of chapter 12: before you launch. Days, bytes, bubbles and layouts, on paper.

Write a body, save, and ask `minitron check 12.1`, or check("12.1") in a notebook. Stuck:
`minitron hint 12.1`, three levels. Start again: `minitron reset 12.1`. The exercises do not build
on one another; take them in any order.

Notation: P parameters, L layers, D width, S tokens of a sequence. dp, tp and pp are ranks along
the axes of data, tensor and pipeline parallelism; zero is a stage of ZeRO, 0 to 3. A pipeline has p
ranks, m micro-batches a step, and v chunks, the stages that each rank holds. FLOPs are a number,
FLOP/s a rate.
"""

from collections.abc import Callable
from itertools import product
from math import inf

from minitron.config import ModelConfig, ParallelConfig
from minitron.plan.estimate import estimate
from minitron.plan.job import Decision, Job


# Exercise 12.1 | Training days | 25 min | difficulty 2
def flops_per_token(
    num_parameters: int, num_layers: int, width: int, sequence_length: int, recompute: str
) -> tuple[int, int]:
    """Count what a token costs in training: model FLOPs, and hardware FLOPs. Exact integers.

    A multiply-add is two. Forward, a token costs 2 for each parameter, as if all of them were
    factors of matrix products, which nearly all are; and in each layer 2 S D for Q K^T and 2 S D
    for P V: all of the square, though half of it is masked. Backward costs twice as much as
    forward. Model FLOPs are forward and backward. Hardware FLOPs are these and what recomputation
    does again:

        "none"         nothing
        "selective"    the two products of attention, forward
        "full"         all of the forward pass

    Example: 10 parameters, 1 layer of width 2, sequences of 3 tokens. Forward costs 20 + 24, so
    training has 132 model FLOPs; with "none" as many of the hardware, with "selective" 156, with
    "full" 176. Without attention these are the 6 P and 8 P of many papers.
    """
    raise NotImplementedError("Exercise 12.1 - Training days.  Hint: minitron hint 12.1")


def days_and_mfu(
    flops: tuple[int, int], num_tokens: float, num_gpus: int, peak_flops: float,
    known: str, value: float,
) -> tuple[float, float]:
    """How many days a training takes, and its MFU, from the one number that a paper tells.

    flops: of a token, of the model and of the hardware. peak_flops: dense FLOP/s of one GPU. All
    GPUs train all the time.

        known          value
        "MFU"          model FLOPs, over what all GPUs would do in the time at their peak: a share
        "HFU"          hardware FLOPs, over the same
        "TFLOP/s"      10^12 hardware FLOPs that each GPU does in a second
        "GPU-hours"    of all GPUs together

    Example: a token has 6e9 and, recomputed, 8e9 FLOPs. 864e9 tokens, 100 GPUs of 1e14 FLOP/s. With
    an HFU of 0.5 it takes 16 days, and the MFU is 0.375. With 50 TFLOP/s, or with 38,400 GPU-hours,
    it is the same training. For GPT-3 on 1,024 A100s at 140 TFLOP/s Narayanan et al. 2021 (section
    5.1) say 34 days, from 8 P and no attention; with it you will find one more.
    """
    raise NotImplementedError("Exercise 12.1 - Training days.  Hint: minitron hint 12.1")


# Exercise 12.2 | What a rank holds | 25 min | difficulty 2
def state_bytes(
    model: ModelConfig, stages: list[int], stage: int, tp: int, dp: int, zero: int
) -> dict[str, int]:
    """Count the bytes of "parameter", "gradient" and "optimizer state" on a rank of one stage.

    The model is a Llama of V = vocab_size words, D = width, F = ffn_width, and num_kv_heads heads
    of keys and values, model.head_width wide each. stages[i] is how many blocks stage i has. The
    first one also has the embedding, (V, D), the last one the final norm and the head, (V, D). If
    model.tied_embedding, the head is the embedding: a stage that has both stores one matrix; if
    they are on two stages, each stores it.

    A block has two norms, of D values like the final one, and no biases. Its matrices: query and
    out are (D, D), key and value (D, keys' width), gate, up and down (D, F). tp cuts each matrix,
    embedding and head too, into equal parts; a norm is whole on every rank.

    Each parameter has 2 bytes, its gradient 2, its optimizer state 12 with the master weight. Over
    dp ZeRO stage 1 divides the optimizer state, 2 the gradients too, 3 the parameters too: of what
    is divided a rank has its number of parameters / dp, rounded up to a whole one. Do not modify
    the arguments.

    Example: V 10, D 4, F 6, one key-value head of width 2. A block has 2 x 16 + 2 x 8 + 3 x 24 +
    2 x 4 = 128 parameters. Of stages [1, 2] with tp 1 the first has 168, untied the last 300. On
    the last, with dp 8 and zero = 1: 600, 600, and 12 x 38 = 456 bytes.
    """
    raise NotImplementedError("Exercise 12.2 - What a rank holds.  Hint: minitron hint 12.2")


def fullest_stage(
    stages: list[int], states: list[int], num_micro_batches: int, block_bytes: int, head_bytes: int
) -> tuple[int, int]:
    """Which stage of a pipeline holds most, counted from 0, and how many bytes on each rank.

    The schedule is 1F1B, one stage on each rank. stages[i] is how many blocks stage i has,
    states[i] are the bytes that it always holds. For a micro-batch that has gone forward and not
    yet back a stage holds block_bytes for each of its blocks, and the last one head_bytes for the
    loss. A stage sends a micro-batch forward, before the first one is back, for each stage behind
    it, and one more for itself; but there are only num_micro_batches. Where two hold equally much,
    name either. Do not modify the arguments.

    Example: stages [3, 3], states [50, 50], block_bytes 10. With 4 micro-batches and head_bytes 20
    the first holds 50 + 2 x 30, the last 50 + 30 + 20: (0, 110). With one micro-batch (1, 100).
    """
    raise NotImplementedError("Exercise 12.2 - What a rank holds.  Hint: minitron hint 12.2")


# Exercise 12.3 | Bubble under a limit | 25 min | difficulty 2
def micro_batches_needed(num_ranks: int, num_chunks: int, part: int) -> int:
    """The fewest micro-batches with which at most 1/part of a step is bubble.

    With one chunk the schedule is 1F1B, with v chunks interleaved 1F1B, whose m is a multiple of
    p. Stages take equally long, messages no time. A rank works for m passes, forward and back,
    through all it holds, and is idle for p - 1 such passes through one of its v chunks: work and
    idle time are the step. One rank has no bubble.

    Example: 4 ranks, at most 1/4. With one chunk and 9 micro-batches 3 of 12 passes are idle: the
    answer is 9. With 2 chunks a rank is idle for 1.5 passes and must work for 4.5: it is 8.
    """
    raise NotImplementedError("Exercise 12.3 - Bubble under a limit.  Hint: minitron hint 12.3")


def fastest_schedule(
    num_ranks: int, num_blocks: int, num_sequences: int, seconds: Callable[[int], float],
    block_bytes: int, limit: int,
) -> tuple[int, int] | None:
    """Choose (micro_batch_size, num_chunks) for the shortest step that fits; None if none does.

    A step takes num_sequences in micro-batches of b sequences, b a divisor. Each of the p ranks has
    num_blocks / p blocks, a whole number, in v chunks, v a divisor of it. With v = 1 the schedule
    is 1F1B. With more it is interleaved 1F1B: then m = num_sequences / b must be a multiple of p.
    A step lasts m passes, forward and back, through all that a rank holds, and p - 1 such passes
    through one chunk. One block takes seconds(b) forward for b sequences, and twice that back;
    twice b often takes less than twice as long. Messages take no time.

    A block holds block_bytes for each sequence from its forward pass until the backward pass is
    done. Rank 0 holds most, and must not hold more than `limit` bytes. A micro-batch in one chunk
    counts once, and at most there are

        1F1B           p, but never more than m
        interleaved    (v - 1) p + 2 (p - 1) + 1, but never more than m v

    Of equally fast ones that fit, any will do.

    Example: 2 ranks, 4 blocks, 4 sequences; seconds(b) is 1 + b; a block holds 10 bytes per
    sequence. (1, 1) takes (4 + 1) 3 x 2 x 2 = 60 s, holds 2 x 2 x 10 = 40 bytes; (1, 2) 54 s and
    50 bytes, (2, 1) 54 s and 80, (2, 2) 45 s and, of 2 micro-batches in 2 chunks, 80. (4, 1), one
    micro-batch, takes 60 s and holds 80. With limit 80 the answer is (2, 2), with 50 (1, 2), with
    39 None.
    """
    raise NotImplementedError("Exercise 12.3 - Bubble under a limit.  Hint: minitron hint 12.3")


# Exercise 12.4 | Find the layout | 30 min | difficulty 3
def find_layout(job: Job) -> Decision | None:
    """The layout in which a step of `job` is estimated to be shortest; None if none fits.

    `minitron plan` is such a search. job: .model, .num_gpus, .gpus_per_node, .global_batch_size
    (sequences a step), .sequence_length, .limit (bytes that a GPU may hold). A layout is

        Decision(ParallelConfig(dp=2, tp=2, sequence=True, pp=1, zero=1), "none", 4)

    with recompute and the micro-batch size behind. Try all of these, and no others:

    - dp x tp x pp is job.num_gpus;
    - tp divides the GPUs of a node, job.gpus_per_node or all job.num_gpus if these are fewer; and
      num_kv_heads, ffn_width and vocab_size of job.model;
    - sequence is tp > 1; then tp divides job.sequence_length;
    - pp divides job.model.num_layers, dp divides job.global_batch_size;
    - zero is 0 if dp is 1, else 0 to 3;
    - recompute is "none", "selective" or "full";
    - the micro-batch size is a power of two, 1 too, that divides job.global_batch_size / dp.

    estimate(job, decision) tells of a layout what it takes, .seconds of a step, and what a GPU
    holds, .memory, a dict of bytes by kind. Together these must be job.limit at most. It also has
    .mfu and .hfu. Of equally fast layouts any will do.

    Example: on one GPU, with 4 sequences a step, nothing is left but recompute and a micro-batch
    size of 1, 2 or 4: 9 layouts. If a GPU has memory enough, it is "none", and the largest.
    """
    raise NotImplementedError("Exercise 12.4 - Find the layout.  Hint: minitron hint 12.4")
