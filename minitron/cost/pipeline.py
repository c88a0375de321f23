"""What a pipeline costs: idle time, activations held, bytes between its stages.

Notation: p ranks; m micro-batches a step; v chunks, the stages that a rank holds. t_F and t_B are
the seconds that one micro-batch takes forward and backward through all stages of a rank; t_B is
t_I + t_W where it is cut into the gradients of inputs and of weights. All ranks are equally fast
and messages take no time: `parallel.simulator` plays what is not so.

A bubble is the time that a rank is idle in a step. Papers give it as a share of two things: of the
whole step, (p-1) / (m+p-1), or of the time that the work alone takes, (p-1) / m.

Read in this order: Bubble, pipeline_bubble, activations_held, pipeline_volume, v_volume.
Reference: Huang et al. 2019, "GPipe" (section 2.3); Narayanan et al. 2021 (sections 2.2, 3.2);
Korthikanti et al. 2022 (section 4.2.3); Qi et al. 2023, "Zero Bubble" (table 2, section 6);
DeepSeek-AI 2024, "DeepSeek-V3" (table 2).
"""

from typing import NamedTuple

from minitron.cost.communication import Volume


class Bubble(NamedTuple):
    """Seconds of a step in which a rank is idle, and those that its work alone takes."""

    seconds: float
    ideal_seconds: float

    @property
    def of_total(self) -> float:
        """Share of the whole step."""
        return self.seconds / (self.ideal_seconds + self.seconds)

    @property
    def of_ideal(self) -> float:
        """In proportion to the work; may exceed 1."""
        return self.seconds / self.ideal_seconds


# Idle time


def sequential_bubble(
    num_ranks: int, num_micro_batches: int, forward: float, backward: float
) -> Bubble:
    """Return (p-1) m (t_F + t_B): while one rank works, all others wait."""
    ideal = num_micro_batches * (forward + backward)
    return Bubble((num_ranks - 1) * ideal, ideal)


def pipeline_bubble(
    num_ranks: int, num_micro_batches: int, forward: float, backward: float, num_chunks: int = 1
) -> Bubble:
    """Return (p-1) (t_F + t_B) / v, for GPipe, 1F1B, and interleaved 1F1B with v chunks a rank.

    For any m; interleaved, for m that p divides. Reference: Narayanan et al. 2021, sections 2.2.1
    and 2.2.2; as a share of the total, Huang et al. 2019, section 2.3.
    """
    each = forward + backward
    return Bubble((num_ranks - 1) * each / num_chunks, num_micro_batches * each)


def zb_h1_bubble(
    num_ranks: int,
    num_micro_batches: int,
    forward: float,
    inputs: float,
    weights: float,
    num_chunks: int = 1,
) -> Bubble:
    """Return (p-1) (t_F + t_I - t_W) / v, for ZB-H1, whose backward pass is cut into I and W.

    For m >= p, and t_W no longer than t_F or t_I; with chunks, for m that p divides. Reference: Qi
    et al. 2023, table 2, where t_I is T_B.
    """
    idle = (forward + inputs - weights) / num_chunks
    return Bubble((num_ranks - 1) * idle, num_micro_batches * (forward + inputs + weights))


def v_bubble(num_ranks: int, num_micro_batches: int, each: float) -> Bubble:
    """Return (p-1) t_F / 2, for ZB-V and DualPipeV where t_F = t_I = t_W = `each`.

    For ZB-V with m of 2p - 1 or more. A micro-batch takes that long to come down to the last rank,
    and nothing can fill it. Papers call ZB-V's bubble zero because each rank is busy from its own
    first pass to its last; a step that waits for all ranks waits for this too. Reference: Qi et al.
    2023, section 6; DeepSeek-AI 2024, table 2, counts a pair of overlapped passes as one.
    """
    return Bubble((num_ranks - 1) * each / 2, num_micro_batches * 3 * each)


# Held


def activations_held(
    schedule: str, num_ranks: int, num_micro_batches: int, rank: int, num_chunks: int = 1
) -> int:
    """Return the most micro-batches whose activations a rank holds at once, counted for each stage.

    `schedule` is the name of a `parallel.schedules.Schedule`. Each count is a v-th of the rank's
    layers, held until W: what I frees before is not taken off, nor added what it leaves for W, the
    gradients of the linear layers' outputs. Reference: Narayanan et al. 2021, section 2.2; Qi et
    al. 2023, table 2.
    """
    p, v = num_ranks, num_chunks
    counts = {
        "sequential": 1,
        "GPipe": num_micro_batches * v,
        "1F1B": p - rank,
        "interleaved 1F1B": (v - 1) * p + 2 * (p - 1 - rank) + 1,
        "ZB-H1": p * v,
        "ZB-V": min(2 * p - 1 - rank, num_micro_batches) + rank + 1,
        "DualPipeV": 2 * p + 1,
    }
    return min(counts[schedule], num_micro_batches * v)


def interleaved_activation_factor(num_ranks: int, num_chunks: int) -> float:
    """Return 1 + (p-1)/(p v): the first rank's activations over those of 1F1B, for m > p.

    Reference: Korthikanti et al. 2022, section 4.2.3.
    """
    return 1 + (num_ranks - 1) / (num_ranks * num_chunks)


# Sent


def pipeline_volume(
    batch_size: int,
    sequence_length: int,
    width: int,
    element_size: int,
    num_ranks: int,
    num_micro_batches: int,
    rank: int,
    num_chunks: int = 1,
) -> Volume:
    """Return the bytes that one rank sends and receives per step.

    Between two stages each micro-batch sends B S D values forward, and as many gradients back
    (Narayanan et al. 2021, section 3.2). Stage number rank + p c follows the one before on the
    next rank, so that v chunks send v times as much (section 2.2.2).
    """
    if num_ranks == 1:
        return Volume(0, 0)
    after = num_chunks - (rank == num_ranks - 1)  # the model's last stage has none after it
    before = num_chunks - (rank == 0)
    message = batch_size * sequence_length * width * element_size
    num_bytes = num_micro_batches * (after + before) * message
    return Volume(num_bytes, num_bytes)


def v_volume(
    batch_size: int,
    sequence_length: int,
    width: int,
    element_size: int,
    num_ranks: int,
    num_micro_batches: int,
    rank: int,
) -> Volume:
    """Return the bytes that one rank sends and receives per step in ZB-V or DualPipeV.

    Rank r holds stages r and 2p - 1 - r, so it exchanges B S D values with each neighbor twice in
    the forward pass and twice in the backward pass of a micro-batch. The last rank hands stage
    p - 1's output to its own stage p, and the first rank holds both ends of the model: both have
    one neighbor, where interleaving closes a ring.
    """
    neighbors = (rank > 0) + (rank < num_ranks - 1)
    message = batch_size * sequence_length * width * element_size
    num_bytes = num_micro_batches * 2 * neighbors * message
    return Volume(num_bytes, num_bytes)
