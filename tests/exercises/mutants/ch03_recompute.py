"""Wrong answers to chapter 3's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import math

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from minitron import cost

# 3.1


def write_recompute(
    function,
    tensors,
    restore=True,
    go_back=True,
    detach=True,
    anchored=True,
    num_calls=1,
    start=lambda grad: grad,
    record=True,
    weights=True,
    keep=None,
    wants=lambda tensor: tensor.requires_grad,
):
    """The answer of the course with one of its parts left out."""

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, *tensors):
            ctx.random_state = torch.get_rng_state()
            ctx.save_for_backward(*tensors)
            ctx.kept = [keep(t) for t in tensors] if keep else []
            return function(*tensors)

        @staticmethod
        def backward(ctx, grad):
            inputs = list(ctx.saved_tensors)
            if detach:
                inputs = [t.detach().requires_grad_(wants(t)) for t in inputs]
            present = torch.get_rng_state()
            for _ in range(num_calls):
                if restore:
                    torch.set_rng_state(ctx.random_state)
                with torch.set_grad_enabled(record):
                    result = function(*inputs)
            if go_back:
                torch.set_rng_state(present)
            if not weights:
                wanted = [t for t in inputs if t.requires_grad]
                grads = iter(torch.autograd.grad(result, wanted, grad) if wanted else ())
                return None, *(next(grads) if t.requires_grad else None for t in inputs)
            torch.autograd.backward(result, start(grad))
            return None, *(t.grad if t.is_leaf else None for t in inputs)

    return Recompute.apply(torch.empty(0, requires_grad=anchored), *tensors)


def plain_call(function, *tensors):
    """The gradients are right, so it works: everything is kept."""
    return function(*tensors)


def other_random_numbers(function, *tensors):
    """Calling the function again gives the same tensors: not with dropout in it."""
    return write_recompute(function, tensors, restore=False)


def stays_in_the_past(function, *tensors):
    """Setting the old random state is enough: what comes next draws the same numbers again."""
    return write_recompute(function, tensors, go_back=False)


def seeds_both(function, *tensors):
    """A seed makes both calls draw the same numbers: and every layer, and every step."""

    def seeded(*inputs):
        torch.manual_seed(0)
        return function(*inputs)

    return write_recompute(seeded, tensors)


def goes_through(function, *tensors):
    """The saved inputs can be used as they are: they still hang on the graph before them."""
    return write_recompute(function, tensors, detach=False)


def needs_an_input(function, *tensors):
    """Some input always requires a gradient: not the first layer's, above a frozen embedding."""
    return write_recompute(function, tensors, anchored=False)


def recomputes_twice(function, *tensors):
    """One recomputation for the inputs' gradients, one for the weights'."""
    return write_recompute(function, tensors, num_calls=2)


def starts_from_one(function, *tensors):
    """backward() starts from ones, as it does for a loss."""
    return write_recompute(function, tensors, start=torch.ones_like)


def records_nothing(function, *tensors):
    """Recomputation builds a graph like any call: inside `backward` recording is off."""
    return write_recompute(function, tensors, record=False)


def inputs_only(function, *tensors):
    """The gradients of the inputs are all there is: the weights are in the closure."""
    return write_recompute(function, tensors, weights=False)


def cut_off(function, *tensors):
    """no_grad keeps nothing: and connects nothing."""
    with torch.no_grad():
        return function(*tensors)


def saves_copies(function, *tensors):
    """The caller may change x, so a copy is safer: the memory is what it is about."""
    return write_recompute(function, tensors, keep=torch.clone)


def saves_in_numpy(function, *tensors):
    """An array is no tensor: it has as many bytes."""
    return write_recompute(function, tensors, keep=lambda t: t.detach().numpy().copy())


REPLAYED = []


def never_lets_go(function, *tensors):
    """A list outside of ctx does as well: nobody empties it."""

    def noted(*inputs):
        REPLAYED.append(function(*inputs))
        return REPLAYED[-1]

    return write_recompute(noted, tensors)


def all_require_a_gradient(function, *tensors):
    """Every input gets a gradient: integers have none."""
    return write_recompute(function, tensors, wants=lambda t: True)


def marks_the_callers(function, *tensors):
    """A tensor gets a gradient if it requires one: so do the caller's, for good."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.is_floating_point():
            tensor.requires_grad_()
    return write_recompute(function, tensors)


def right_by_hooks(function, *tensors):
    """Drops every saved tensor, and recomputes for the first that is asked for."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    state, dropped, kept = torch.get_rng_state(), [], []

    def fetch(number):
        if not kept:
            with torch.random.fork_rng(), torch.enable_grad():
                torch.set_rng_state(state)
                with saved_tensors_hooks(lambda t: kept.append(t.detach()), lambda t: t):
                    function(*tensors)
        return kept[number]

    def drop(tensor):
        dropped.append(None)
        return len(dropped) - 1

    with saved_tensors_hooks(drop, fetch):
        return function(*tensors)


def right_by_library(function, *tensors):
    return checkpoint(function, *tensors, use_reentrant=False)


# 3.2


def right_dynamic(activation_bytes, boundary_bytes, budget):
    """Grows all reachable cuts by one segment at a time."""
    num_blocks, plans, best = len(activation_bytes), [[]], None
    reached = set()
    for plan in plans:
        done = sum(plan)
        tail = sum(activation_bytes[done:])
        if len(plan) * boundary_bytes + tail <= budget and (best is None or done < sum(best)):
            best = plan
        for end in range(num_blocks, done, -1):
            inside = sum(activation_bytes[done:end])
            if len(plan) * boundary_bytes + inside <= budget and (len(plan), end) not in reached:
                reached.add((len(plan), end))
                plans.append([*plan, end - done])
    if best is None:
        raise ValueError(f"the budget of {budget:,} bytes is too small")
    return best


def recomputes_everything(activation_bytes, boundary_bytes, budget):
    """A block is either kept or recomputed, so all are: unless everything fits."""
    if sum(activation_bytes) <= budget:
        return []
    right_dynamic(activation_bytes, boundary_bytes, budget)
    segments, held = [], 0
    for size in activation_bytes:
        if segments and (len(segments) - 1) * boundary_bytes + held + size <= budget:
            segments[-1] += 1
            held += size
        else:
            segments.append(1)
            held = size
    return segments


def forgets_boundaries(activation_bytes, boundary_bytes, budget):
    """The inputs are small: they add up."""
    return right_dynamic(activation_bytes, 0, budget)


def counts_the_tail_while_recomputing(activation_bytes, boundary_bytes, budget):
    """The tail is held all the time: it is gone when the segments are recomputed."""
    for done in range(len(activation_bytes) + 1):
        tail = sum(activation_bytes[done:])
        inside = max(activation_bytes[:done], default=0)
        if done * boundary_bytes + tail + inside <= budget:
            return [1] * done
    return right_dynamic(activation_bytes, boundary_bytes, budget)


def one_block_each(activation_bytes, boundary_bytes, budget):
    """Every segment is one block: many inputs are held, so more blocks are recomputed."""
    for done in range(len(activation_bytes) + 1):
        tail = sum(activation_bytes[done:])
        if done * boundary_bytes + tail <= budget and all(
            index * boundary_bytes + size <= budget
            for index, size in enumerate(activation_bytes[:done])
        ):
            return [1] * done
    return right_dynamic(activation_bytes, boundary_bytes, budget)


def never_refuses(activation_bytes, boundary_bytes, budget):
    """Recomputing every block alone is the best that can be done."""
    try:
        return right_dynamic(activation_bytes, boundary_bytes, budget)
    except ValueError:
        return [1] * len(activation_bytes)


def says_nothing(activation_bytes, boundary_bytes, budget):
    """An error without a number is enough."""
    try:
        return right_dynamic(activation_bytes, boundary_bytes, budget)
    except ValueError:
        raise ValueError("does not fit") from None


# 3.3


def right_by_difference(model, sequence_length, recompute="full"):
    """The whole forward pass without the head; attention by what grows with S."""
    if recompute == "none":
        return 0
    forward = cost.forward_flops_per_token(model, sequence_length)
    if recompute == "full":
        return forward - 2 * model.width * model.vocab_size
    return forward - cost.forward_flops_per_token(model, 0)


def with_head(model, sequence_length, recompute="full"):
    """Full recomputation is one more forward pass: of the blocks, not of the head."""
    head = 2 * model.width * model.vocab_size if recompute == "full" else 0
    return right_by_difference(model, sequence_length, recompute) + head


def three_passes(model, sequence_length, recompute="full"):
    """What is recomputed goes backward too: it did so before."""
    return 3 * right_by_difference(model, sequence_length, recompute)


def one_layer(model, sequence_length, recompute="full"):
    """The cost of one block."""
    return right_by_difference(model, sequence_length, recompute) // model.num_layers


def no_attention(model, sequence_length, recompute="full"):
    """What has no weights costs nothing."""
    return right_by_difference(model, 0, recompute)


def whole_attention(model, sequence_length, recompute="full"):
    """Selective recomputes the attention layer: only its core."""
    seen = right_by_difference(model, sequence_length, recompute)
    narrow = model.num_kv_heads * model.head_width
    linear = 4 * model.num_layers * model.width * (model.width + narrow)
    return seen + (linear if recompute == "selective" else 0)


def one_product(model, sequence_length, recompute="full"):
    """Attention is the scores: and their product with the values."""
    half = 2 * model.num_layers * sequence_length * model.width
    return right_by_difference(model, sequence_length, recompute) - (
        half if recompute == "full" else 0
    )


def fewer_heads_attend(model, sequence_length, recompute="full"):
    """Grouped queries compute fewer scores: they only share the keys."""
    narrow = model.width - model.num_kv_heads * model.head_width
    saved = 4 * model.num_layers * sequence_length * narrow
    return right_by_difference(model, sequence_length, recompute) - (
        saved if recompute != "none" else 0
    )


def in_floats(model, sequence_length, recompute="full"):
    """A third of the step, by true division."""
    return right_by_difference(model, sequence_length, recompute) / 1


# 3.4


def peak_of(num_blocks, length, activation, boundary):
    lengths = [length] * (num_blocks // length)
    if num_blocks % length:
        lengths.append(num_blocks % length)
    return max(index * boundary + n * activation for index, n in enumerate(lengths))


def right_downwards(num_blocks, activation_bytes, boundary_bytes):
    """Sorts all lengths by peak, then by minus the length."""
    _, negative = min(
        (peak_of(num_blocks, n, activation_bytes, boundary_bytes), -n)
        for n in range(1, num_blocks + 1)
    )
    return -negative, peak_of(num_blocks, -negative, activation_bytes, boundary_bytes)


def square_root(num_blocks, activation_bytes, boundary_bytes):
    """sqrt(L), as in the paper: its layers keep one tensor each."""
    length = max(1, round(math.sqrt(num_blocks)))
    return length, peak_of(num_blocks, length, activation_bytes, boundary_bytes)


def by_the_derivative(num_blocks, activation_bytes, boundary_bytes):
    """The minimum of (L / k) b + k a: for numbers that divide."""
    length = max(1, round(math.sqrt(num_blocks * boundary_bytes / activation_bytes)))
    return length, peak_of(num_blocks, length, activation_bytes, boundary_bytes)


def all_full(num_blocks, activation_bytes, boundary_bytes):
    """Every segment is full: the last need not be."""

    def peak(length):
        return (math.ceil(num_blocks / length) - 1) * boundary_bytes + length * activation_bytes

    best = min(range(num_blocks, 0, -1), key=peak)
    return best, peak(best)


def last_segment_only(num_blocks, activation_bytes, boundary_bytes):
    """The most inputs are held in the last segment, so it is the peak: if it is full."""

    def peak(length):
        before = math.ceil(num_blocks / length) - 1
        return before * boundary_bytes + (num_blocks - before * length) * activation_bytes

    best = min(range(num_blocks, 0, -1), key=peak)
    return best, peak(best)


def own_input_twice(num_blocks, activation_bytes, boundary_bytes):
    """A segment's input is held beside its activations: it is one of them."""
    length, peak = right_downwards(num_blocks, activation_bytes, boundary_bytes)
    return length, peak + boundary_bytes


def shortest(num_blocks, activation_bytes, boundary_bytes):
    """Of equal peaks the first: more inputs are held than need be."""

    def peak(length):
        return peak_of(num_blocks, length, activation_bytes, boundary_bytes)

    best = min(range(1, num_blocks + 1), key=peak)
    return best, peak(best)


def length_alone(num_blocks, activation_bytes, boundary_bytes):
    """The length is the answer."""
    return right_downwards(num_blocks, activation_bytes, boundary_bytes)[0]


MISTAKES = {
    "recompute": {
        other_random_numbers: "recomputation dropped other values",
        plain_call: "are held after the forward pass",
        stays_in_the_past: "the random generator is not where it would be",
        seeds_both: "the result itself differs",
        goes_through: "Trying to backward through the graph a second time",
        needs_an_input: "autograd sees no input that requires a gradient",
        recomputes_twice: "recompute each call once",
        starts_from_one: "start the inner backward pass from the gradient that you were given",
        records_nothing: "does not require grad",
        inputs_only: "torch.autograd.grad fills no .grad",
        cut_off: "cuts it off",
        saves_copies: "copies of the inputs",
        saves_in_numpy: "a copy in NumPy or bytes",
        never_lets_go: "still held after the backward pass",
        marks_the_callers: "the tensors are the caller's",
        all_require_a_gradient: "only Tensors of floating point",
    },
    "segments_for_budget": {
        forgets_boundaries: "memory holds the inputs of all segments",
        recomputes_everything: "every block is recomputed",
        counts_the_tail_while_recomputing: "do not count the tail while a segment is recomputed",
        one_block_each: "fill the first segments as far as they go",
        never_refuses: "nothing fits",
        says_nothing: "the message names the budget",
    },
    "recompute_flops_per_token": {
        three_passes: "only the forward pass is added",
        whole_attention: "are outside attention's core",
        with_head: "the head comes after the blocks",
        one_layer: "that is one layer",
        no_attention: "attention's two matmuls are missing",
        one_product: "one of attention's two matmuls is missing",
        fewer_heads_attend: "all H query heads attend",
        in_floats: "of type float",
    },
    "best_segment_length": {
        square_root: "the square root is right where",
        last_segment_only: "the one before it can need more",
        by_the_derivative: "compare all lengths",
        all_full: "the last segment is shorter",
        own_input_twice: "a segment's own input is among its activations",
        shortest: "return the longest",
        length_alone: "a tuple of two integers",
    },
}

RIGHT_ANSWERS = {
    "recompute": [right_by_hooks, right_by_library],
    "segments_for_budget": [right_dynamic],
    "recompute_flops_per_token": [right_by_difference],
    "best_segment_length": [right_downwards],
}
