"""Exercises of chapter 12: before you launch. Days, bytes, bubbles and layouts, on paper.

Write the body, save, and run `minitron check 12.1` in a terminal or check("12.1") in a notebook. If
you are stuck, `minitron hint 12.1` gives hints in three steps; `minitron reset 12.1` restores the
original. The exercises do not build on each other, so you can take them in any order.

Notation: P parameters, L layers, D width, S tokens per sequence. dp, tp and pp are the sizes of the
data-, tensor- and pipeline-parallel axes; zero is the ZeRO stage, 0 to 3. In exercise 12.3 a
pipeline has p ranks, m micro-batches per step, and v chunks (stages) per rank. FLOPs is a count,
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
    """Return the model FLOPs and the hardware FLOPs of training on one token, as exact integers.

    A multiply-add counts as 2 FLOPs. The forward pass costs, per token:

    - 2 FLOPs per parameter, as if every parameter took part in a matmul (nearly all of them do);
    - in each layer 2 S D for Q K^T and 2 S D for softmax(Q K^T) V. The causal mask is ignored:
      every token counts as if it attended to all S tokens.

    The backward pass costs twice as much as the forward pass. Model FLOPs are forward plus
    backward. Hardware FLOPs add what is recomputed in the backward pass:

        "none"         nothing
        "selective"    the forward of attention's two matmuls, Q K^T and softmax(Q K^T) V
        "full"         the whole forward pass

    Example: 10 parameters, 1 layer of width 2, sequences of 3 tokens. Forward costs 20 + 24, so
    training takes 132 model FLOPs. Hardware FLOPs are 132 with "none", 156 with "selective" and
    176 with "full". Without the attention term these are the 6 P and 8 P of many papers.
    """
    raise NotImplementedError("Exercise 12.1 - Training days.  Hint: minitron hint 12.1")


def days_and_mfu(
    flops: tuple[int, int],
    num_tokens: float,
    num_gpus: int,
    peak_flops: float,
    known: str,
    value: float,
) -> tuple[float, float]:
    """Return how many days a training run takes and its MFU, from the one number a paper reports.

    flops is (model FLOPs, hardware FLOPs) per token. peak_flops is the dense peak of one GPU, in
    FLOP/s. `known` says what the paper reports, and `value` is that number:

        known          value
        "MFU"          model FLOPs done, divided by what all GPUs could do at peak in that time
        "HFU"          the same for hardware FLOPs
        "TFLOP/s"      hardware FLOPs per second and GPU, in units of 10^12
        "GPU-hours"    the hours of all GPUs, summed

    Assume that all GPUs train the whole time. Return the MFU as a fraction, not a percentage.

    Example: 6e9 model FLOPs and, with recomputation, 8e9 hardware FLOPs per token; 864e9 tokens;
    100 GPUs with a peak of 1e14 FLOP/s. An HFU of 0.5 means 16 days and an MFU of 0.375. So does a
    report of 50 TFLOP/s, or of 38,400 GPU-hours: it is the same run. For GPT-3 on 1,024 A100s at
    140 TFLOP/s, Narayanan et al. 2021 (section 5.1) give 34 days, from 8 P without the attention
    term; with that term you will find one day more.
    """
    raise NotImplementedError("Exercise 12.1 - Training days.  Hint: minitron hint 12.1")


# Exercise 12.2 | What a rank holds | 25 min | difficulty 2
def state_bytes(
    model: ModelConfig, stages: list[int], stage: int, tp: int, dp: int, zero: int
) -> dict[str, int]:
    """Return the bytes of "parameter", "gradient" and "optimizer state" on one rank of a stage.

    The model is a Llama with V = vocab_size, D = width, F = ffn_width, and num_kv_heads key-value
    heads of model.head_width each.

    - Stage i has stages[i] blocks. The first stage also has the embedding, (V, D). The last stage
      also has the final norm and the head, (V, D).
    - With model.tied_embedding, the head is the embedding: a stage that has both stores one
      matrix. If they are on two stages, each of these stores a copy.
    - A block has no biases. Its matrices: query and output projection are (D, D), key and value
      (D, num_kv_heads x head_width), gate, up and down (D, F).
    - A block has two norms. Every norm, the final one included, has D weights.
    - Tensor parallelism splits every matrix, embedding and head included, into tp equal shards.
      Norms are replicated.
    - A parameter takes 2 bytes, its gradient 2, its optimizer state (with the float32 master
      weight) 12. ZeRO-1 shards the optimizer state over dp, ZeRO-2 the gradients too, ZeRO-3 the
      parameters too. Of what is sharded, a rank holds its number of parameters / dp, rounded up.

    Do not modify the arguments.

    Example: V 10, D 4, F 6, one key-value head of width 2. A block has 2 x 16 + 2 x 8 + 3 x 24 +
    2 x 4 = 128 parameters. With stages [1, 2] and tp 1, the first stage has 168 parameters and the
    last, untied, 300. With dp 8 and zero 1 a rank of the last stage holds 600 bytes of parameters,
    600 of gradients, and 12 x 38 = 456 of optimizer state.
    """
    raise NotImplementedError("Exercise 12.2 - What a rank holds.  Hint: minitron hint 12.2")


def fullest_stage(
    stages: list[int], states: list[int], num_micro_batches: int, block_bytes: int, head_bytes: int
) -> tuple[int, int]:
    """Return which pipeline stage holds the most bytes per rank, counted from 0, and how many.

    The schedule is 1F1B with one stage per rank. Stage i has stages[i] blocks and always holds
    states[i] bytes. On top of these it holds activations: for each micro-batch whose forward pass
    it has done and whose backward pass it has not, block_bytes per block. The last stage also
    holds head_bytes per such micro-batch, for the loss.

    How many micro-batches is that at most? A stage runs one forward pass for each stage after it,
    and one more, before its first backward pass; but never more than num_micro_batches.

    If several stages hold equally much, return any of them. Do not modify the arguments.

    Example: stages [3, 3], states [50, 50], block_bytes 10, head_bytes 20. With 4 micro-batches
    the first stage holds 50 + 2 x 30 and the last 50 + 30 + 20: return (0, 110). With one
    micro-batch, return (1, 100).
    """
    raise NotImplementedError("Exercise 12.2 - What a rank holds.  Hint: minitron hint 12.2")


# Exercise 12.3 | Bubble under a limit | 25 min | difficulty 2
def micro_batches_needed(num_ranks: int, num_chunks: int, part: int) -> int:
    """Return the fewest micro-batches per step with which the bubble is at most 1/part of the step.

    With num_chunks = 1 the schedule is 1F1B. With v > 1 chunks per rank it is interleaved 1F1B,
    which requires m to be a multiple of p. All stages take equally long; messages take no time.

    Measure time in passes: one micro-batch, forward and backward, through all the layers a rank
    holds. A rank computes for m passes and is idle for (p - 1) / v. The step is the sum of the two,
    and the bubble is the idle part of it. A single rank has no bubble.

    Example: 4 ranks, a bubble of at most 1/4 (part = 4). With one chunk and 9 micro-batches, 3 of
    12 passes are idle: return 9. With 2 chunks a rank is idle for 1.5 passes and must compute for
    at least 4.5, so m is at least 5: the next multiple of 4 is 8.
    """
    raise NotImplementedError("Exercise 12.3 - Bubble under a limit.  Hint: minitron hint 12.3")


def fastest_schedule(
    num_ranks: int,
    num_blocks: int,
    num_sequences: int,
    seconds: Callable[[int], float],
    block_bytes: int,
    limit: int,
) -> tuple[int, int] | None:
    """Return the (micro_batch_size, num_chunks) with the shortest step that fits, or None.

    Candidates: b sequences per micro-batch, where b divides num_sequences, so m = num_sequences /
    b. Each of the p ranks holds num_blocks / p blocks (a whole number) in v chunks, where v
    divides that number. With v = 1 the schedule is 1F1B; with v > 1 it is interleaved 1F1B, which
    requires m to be a multiple of p.

    Time: a step lasts m passes, forward and backward, through all the blocks of a rank, plus p - 1
    passes through one of its chunks. seconds(b) is the forward time of one block for b sequences;
    backward takes twice as long. seconds(b) need not be proportional to b. Messages take no time.

    Memory: from its forward pass to the end of its backward pass, a block holds block_bytes per
    sequence. Rank 0 holds the most, and that must not exceed `limit` bytes. The number of
    micro-batches it holds, where a micro-batch counts once for each chunk it is held in, is

        1F1B           the smaller of p and m
        interleaved    the smaller of (v - 1) p + 2 (p - 1) + 1 and m v

    If several candidates that fit are equally fast, return any of them.

    Example: 2 ranks, 4 blocks, 4 sequences; seconds(b) is 1 + b; a block holds 10 bytes per
    sequence.

        (b, v)     step                            rank 0 holds
        (1, 1)     (4 + 1) x 2 x 3 x 2 = 60 s      2 x 2 x 10 = 40 bytes
        (1, 2)     54 s                            50
        (2, 1)     54 s                            80
        (2, 2)     45 s                            80: 2 micro-batches in each of 2 chunks
        (4, 1)     60 s                            80: there is one micro-batch

    With a limit of 80 bytes return (2, 2), with 50 (1, 2), with 39 None.
    """
    raise NotImplementedError("Exercise 12.3 - Bubble under a limit.  Hint: minitron hint 12.3")


# Exercise 12.4 | Find the layout | 30 min | difficulty 3
def find_layout(job: Job) -> Decision | None:
    """Return the layout with the shortest estimated step that fits, or None if none fits.

    `minitron plan` is such a search. The job has .model, .num_gpus, .gpus_per_node,
    .global_batch_size (sequences per step), .sequence_length, and .limit, the bytes that a GPU may
    hold. A layout is written

        Decision(ParallelConfig(dp=2, tp=2, sequence=True, pp=1, zero=1), "none", 4)

    The last two are the recomputation and the micro-batch size. Try all of the layouts that meet
    these conditions, and no others:

    - dp x tp x pp is job.num_gpus;
    - tp divides the number of GPUs in a node: job.gpus_per_node, or job.num_gpus if that is less;
    - tp divides num_kv_heads, ffn_width and vocab_size of job.model, and job.sequence_length;
    - sequence is True if tp > 1, else False;
    - pp divides job.model.num_layers;
    - dp divides job.global_batch_size;
    - zero is 0, 1, 2 or 3; if dp is 1, it is 0;
    - recompute is "none", "selective" or "full";
    - the micro-batch size is a power of two (1 is one) that divides job.global_batch_size / dp.

    estimate(job, decision) returns the estimate for a layout. Its .seconds is the time of a step;
    its .memory maps each kind of bytes to what a GPU holds of it. A layout fits if these add up to
    at most job.limit. The estimate also has .mfu and .hfu. If several layouts are equally fast,
    return any of them.

    Example: on one GPU with 4 sequences per step, only recompute and a micro-batch size of 1, 2 or
    4 are left to choose: 9 layouts. If the GPU has enough memory, the answer is "none" with 4.
    """
    raise NotImplementedError("Exercise 12.4 - Find the layout.  Hint: minitron hint 12.4")
