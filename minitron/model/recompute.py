"""Recompute activations in the backward pass instead of keeping them from the forward pass.

Idea: a function's intermediate tensors are dropped as they are made. When the backward pass asks
for the first of them, the function is called again on its inputs, with the random number state and
autocast of the forward pass, and the same tensors are there again, bit for bit. The price is
compute: one more forward pass of what is recomputed.

The autograd graph stays that of the plain run; only the tensors that its nodes have saved are
recomputed. So every gradient is computed in the same way, whatever requires one.

Read in this order: recompute, RecomputedCall, ForwardContext, the policies, segments_for_budget.
Reference: Chen et al. 2016 (segments, section 4); Korthikanti et al. 2022 (selective, section 5).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitron.config import require
from minitron.model.transformer import Transformer, run_in_order
from minitron.pytorch.spans import span


def recompute(function: Callable, *tensors: Tensor):
    """Call `function(*tensors)`, keep `tensors` alone, and call it again in the backward pass.

    `function` must do the same both times; what else it reads, weights above all, it may hold in
    its closure. Without gradients this is the plain call.
    """
    if not torch.is_grad_enabled():
        return function(*tensors)
    call = RecomputedCall(function, tensors)
    with saved_tensors_hooks(call.drop, call.fetch):
        return function(*tensors)


class RecomputedCall:
    """One call of a function whose saved tensors are dropped, and made again when fetched."""

    def __init__(self, function: Callable, tensors: tuple[Tensor, ...]):
        self.function = function
        self.context = ForwardContext(tensors[0].device)
        # Saved as a node's tensors are: a recomputed call around this one drops them too. The
        # anchor requires a gradient: else nothing is saved when no input requires one.
        anchor = torch.empty(0, requires_grad=True)
        # The output, not its node: up to torch 2.11 a node loses its tensors with its output.
        self.inputs = Keep.apply(anchor, *tensors)
        self.num_dropped = 0
        self.kept: dict[int, Tensor] = {}

    def drop(self, tensor: Tensor) -> int:
        """Take the tensor that a node saves in the forward pass; the node gets its number."""
        self.num_dropped += 1
        return self.num_dropped - 1

    def fetch(self, number: int) -> Tensor:
        """Give the tensor back, and forget it: a node asks once, when its turn comes."""
        if number not in self.kept:
            self.run()
        return self.kept.pop(number)

    def run(self) -> None:
        """Call the function as in the forward pass, and keep what it saves this time."""
        inputs = self.inputs.grad_fn.saved_tensors
        self.kept = {}
        with self.context.restored(), torch.enable_grad(), span("recompute"):
            try:
                with saved_tensors_hooks(self.keep, _refuse):
                    self.function(*inputs)
            except Complete:
                return
        raise AssertionError(
            f"recomputation saved {len(self.kept)} tensors, the forward pass {self.num_dropped}: "
            "the function must do the same both times"
        )

    def keep(self, tensor: Tensor) -> None:
        self.kept[len(self.kept)] = tensor.detach()  # without the graph of this second call
        if len(self.kept) == self.num_dropped:
            raise Complete  # a matmul that comes last saves its inputs before it runs


class Complete(Exception):
    """Every tensor that was dropped is there again: the rest of the function is not needed."""


def _refuse(packed: None) -> Tensor:
    raise AssertionError("the graph of a recomputation is never walked")


class Keep(torch.autograd.Function):
    """A node that saves tensors and does nothing else."""

    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise AssertionError("nothing is computed from it")


class ForwardContext:
    """What a function reads besides its arguments: random generators and autocast, as they are."""

    def __init__(self, device: torch.device):
        self.device = device
        self.random_states = get_random_states(device)
        self.autocasts = [
            dict(
                device_type=kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them for a while; then the generators continue as if nothing had happened."""
        present = get_random_states(self.device)
        set_random_states(self.device, self.random_states)
        try:
            with ExitStack() as stack:
                for settings in self.autocasts:
                    stack.enter_context(torch.autocast(**settings))
                yield
        finally:
            set_random_states(self.device, present)


def get_random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of the CPU's generator and of the device's own, if it has one."""
    states = (torch.get_rng_state(),)
    if has_generator(device):
        states += (torch.get_device_module(device).get_rng_state(device),)
    return states


def set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if has_generator(device):
        torch.get_device_module(device).set_rng_state(states[1], device)


def has_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


# Policies: which calls are recomputed


def apply_full_recompute(model: Transformer) -> None:
    """Keep each block's input alone: 2 B S D bytes in 16-bit training, for one more forward."""
    apply_segmented_recompute(model, [1] * len(model.blocks))


def apply_segmented_recompute(model: Transformer, segment_lengths: list[int]) -> None:
    """Recompute the first blocks in segments of these lengths; the blocks after them keep all.

    Kept are the segments' inputs; recomputing holds one segment's activations at a time. Raises
    ConfigError if the lengths are not positive or exceed the model's blocks together.
    """
    num_blocks = len(model.blocks)
    require(
        min(segment_lengths, default=1) > 0 and sum(segment_lengths) <= num_blocks,
        f"segments of {segment_lengths} blocks, together {sum(segment_lengths)}, do not fit a "
        f"model of {num_blocks} blocks",
        f"use positive lengths that add up to {num_blocks} or less",
    )
    model.run_blocks = partial(run_in_segments, tuple(segment_lengths))


def apply_sqrt_recompute(model: Transformer) -> None:
    """Recompute about sqrt(L) segments of about sqrt(L) blocks."""
    apply_segmented_recompute(model, sqrt_segments(len(model.blocks)))


def run_in_segments(
    segment_lengths: tuple[int, ...],
    blocks: nn.ModuleList,
    x: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Send x (B, S, D) through the blocks, each segment of them as one recomputed call."""
    start = 0
    for length in segment_lengths:
        if start >= len(blocks):  # of a part of the model
            break
        segment = blocks[start : start + length]
        # rotation is shared by all blocks, so a closure that holds it costs nothing
        x = recompute(partial(run_in_order, segment, rotation=rotation), x)
        start += length
    return run_in_order(blocks[start:], x, rotation)


def apply_selective_recompute(model: Transformer) -> None:
    """Recompute the attention function alone: cheap to compute, and its S x S matrix is large.

    It keeps query, key and value (Korthikanti et al. 2022, section 5). A fused attention never
    stores the matrix, and only its output is saved.
    """
    for block in model.blocks:
        core = block.attention.attention_fn
        block.attention.attention_fn = partial(recompute_attention, core)


RECOMPUTE_POLICIES: dict[str, Callable[[Transformer], None]] = {
    "none": lambda model: None,
    "full": apply_full_recompute,
    "selective": apply_selective_recompute,
    "sqrt": apply_sqrt_recompute,
}


def recompute_attention(
    core: Callable, query: Tensor, key: Tensor, value: Tensor, dropout: float
) -> Tensor:
    return recompute(partial(core, dropout=dropout), query, key, value)


# Choosing segments: integers in, integers out


def even_segments(num_blocks: int, num_segments: int) -> list[int]:
    """Return lengths that differ by one at most: longer ones first, beside the fewest inputs."""
    shorter, num_longer = divmod(num_blocks, num_segments)
    return [shorter + (index < num_longer) for index in range(num_segments)]


def sqrt_segments(num_blocks: int) -> list[int]:
    """Return about sqrt(L) segments of about sqrt(L) blocks (Chen et al. 2016, section 4.1).

    The fewest tensors are alive so if a block keeps one. A Transformer's keeps more, and
    `segments_for_budget` counts them.
    """
    return even_segments(num_blocks, max(1, round(math.sqrt(num_blocks))))


def segments_for_budget(activation_bytes: list[int], boundary_bytes: int, budget: int) -> list[int]:
    """Choose segments that hold at most `budget` bytes at any time and recompute the fewest blocks.

    `activation_bytes` is what each block keeps for its backward pass, its input of
    `boundary_bytes` included. At the end of the forward pass the segments' inputs are held, and
    all of the blocks after them; when segment j is recomputed, the inputs of those before it and
    the activations of its own blocks. Raises ConfigError if no segments fit.
    """
    segments = _fitting_segments(activation_bytes, boundary_bytes, budget)
    if segments is None:
        larger = range(budget, sum(activation_bytes) + 1)
        least = larger[
            bisect_left(
                larger,
                True,
                key=lambda size: (
                    _fitting_segments(activation_bytes, boundary_bytes, size) is not None
                ),
            )
        ]
        require(
            False,
            f"activations cannot be held in {budget:,} bytes: recomputation needs "
            f"{least:,} at least",
            "raise the budget or make the micro-batch smaller",
        )
    return segments


def _fitting_segments(
    activation_bytes: list[int], boundary_bytes: int, budget: int
) -> list[int] | None:
    num_blocks = len(activation_bytes)
    for num_recomputed in range(num_blocks + 1):
        tail = sum(activation_bytes[num_recomputed:])
        segments = _longest_first(activation_bytes[:num_recomputed], boundary_bytes, budget)
        if segments is not None and len(segments) * boundary_bytes + tail <= budget:
            return segments
    return None


def _longest_first(
    activation_bytes: list[int], boundary_bytes: int, budget: int
) -> list[int] | None:
    # Each further segment has less room, for it is recomputed beside one more input: so the fewest
    # segments come from filling each as far as it goes.
    segments: list[int] = []
    room, filled = budget, math.inf
    for size in activation_bytes:
        if filled + size <= room:
            segments[-1] += 1
            filled += size
        else:
            room = budget - len(segments) * boundary_bytes
            segments.append(1)
            filled = size
        if filled > room:
            return None
    return segments
