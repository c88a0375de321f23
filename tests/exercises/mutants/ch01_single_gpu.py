"""Wrong answers to chapter 1's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import math

import torch
import torch.nn.functional as F

from minitron.config import ModelConfig

# 1.1


def token_losses(model, inputs, targets, reduction="sum"):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def count(targets):
    return int((targets != -100).sum())


def mean_of_means(model, micro_batches):
    """The mean over micro-batches of their means is the mean over tokens."""
    total = 0.0
    for inputs, targets in micro_batches:
        loss = token_losses(model, inputs, targets, "mean") / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


def sum_of_means(model, micro_batches):
    """backward() adds up, so nothing needs to be divided."""
    total = 0.0
    for inputs, targets in micro_batches:
        loss = token_losses(model, inputs, targets, "mean")
        loss.backward()
        total += loss.item()
    return total


def counts_padding(model, micro_batches):
    """A micro-batch has B x S targets, whether ignored or not."""
    num_tokens = sum(targets.numel() for _, targets in micro_batches)
    total = 0.0
    for inputs, targets in micro_batches:
        loss = token_losses(model, inputs, targets) / num_tokens
        loss.backward()
        total += loss.item()
    return total


def sum_of_losses(model, micro_batches):
    """The sum of the losses has the same direction, so it is as good as the mean."""
    total = 0.0
    for inputs, targets in micro_batches:
        loss = token_losses(model, inputs, targets)
        loss.backward()
        total += loss.item()
    return total


def weighs_the_means(model, micro_batches):
    """mean x count is the sum: not for no tokens at all, whose mean is nan."""
    num_counted = sum(count(targets) for _, targets in micro_batches)
    total = 0.0
    for inputs, targets in micro_batches:
        mean = token_losses(model, inputs, targets, "mean")
        loss = mean * (count(targets) / num_counted)
        loss.backward()
        total += loss.item()
    return total


def clears_gradients(model, micro_batches):
    """Every backward pass starts from zero_grad."""
    model.zero_grad()
    return right_sums(model, micro_batches)


def scales_afterwards(model, micro_batches):
    """Dividing .grad at the end is the same as dividing each loss: not if it held something."""
    num_counted = sum(count(targets) for _, targets in micro_batches)
    total = sum_of_losses(model, micro_batches)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= num_counted
    return total / num_counted


def one_large_batch(model, micro_batches):
    """Joining the micro-batches gives the right gradient: and needs the memory of them all."""
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss = token_losses(model, inputs, targets, "mean")
    loss.backward()
    return loss.item()


def one_backward_pass(model, micro_batches):
    """Adding up the losses and going back once keeps every graph alive until then."""
    num_counted = sum(count(targets) for _, targets in micro_batches)
    loss = sum(token_losses(model, *pair) for pair in micro_batches) / num_counted
    loss.backward()
    return loss.item()


def last_loss(model, micro_batches):
    """The loss of the step is the loss of its last micro-batch."""
    right_sums(model, micro_batches)
    with torch.no_grad():
        passes = list(model.passes)
        loss = token_losses(model, *micro_batches[-1], "mean").item()
        model.passes[:] = passes
    return loss


def keeps_the_graph(model, micro_batches):
    """The loss can be returned as it is: its graph, and what that holds, stay alive with it."""
    num_counted = sum(count(targets) for _, targets in micro_batches)
    total = 0.0
    for inputs, targets in micro_batches:
        loss = token_losses(model, inputs, targets) / num_counted
        loss.backward()
        total = total + loss
    return total


def right_sums(model, micro_batches, divisor=None, sum_loss=None):
    if divisor is None:
        divisor = sum(count(targets) for _, targets in micro_batches) or 1
    losses = []
    for inputs, targets in micro_batches:
        loss = (
            token_losses(model, inputs, targets)
            if sum_loss is None
            else sum_loss(model(inputs), targets)
        )
        losses.append(loss / divisor)
        losses[-1].backward()
        losses[-1] = float(losses[-1].detach())
    return math.fsum(losses)


def right_by_scaling(model, micro_batches, divisor=None, sum_loss=None):
    """Skips empty micro-batches, and scales the gradient in place of the loss."""
    if divisor is None:
        divisor = max(1, sum(count(targets) for _, targets in micro_batches))
    total = torch.zeros(())
    for inputs, targets in micro_batches:
        if (targets != -100).any():
            logits = model(inputs)
            losses = (sum_loss or token_sum)(logits, targets)
            losses.backward(losses.new_ones(()) / divisor)
            total = total + losses.detach() / divisor
    return total


def token_sum(logits, targets):
    log_probabilities = logits.log_softmax(-1)[targets != -100]
    return -log_probabilities.gather(-1, targets[targets != -100][:, None]).sum()


def evaluates(model, micro_batches, divisor=None, sum_loss=None):
    """Dropout would make the loss noisy: it belongs to training."""
    model.eval()
    return right_sums(model, micro_batches, divisor, sum_loss)


def retains_graphs(model, micro_batches, divisor=None, sum_loss=None):
    """retain_graph=True keeps PyTorch from complaining: and all that it has saved."""
    divisor = divisor or sum(count(targets) for _, targets in micro_batches) or 1
    losses = []
    for inputs, targets in micro_batches:
        losses.append(token_losses(model, inputs, targets) / divisor)
        losses[-1].backward(retain_graph=True)
    return sum(losses).item()


def ignores_the_divisor(model, micro_batches, divisor=None, sum_loss=None):
    """A step's tokens are all here: on several ranks others have more."""
    return right_sums(model, micro_batches, None, sum_loss)


def divides_twice(model, micro_batches, divisor=None, sum_loss=None):
    """The divisor comes on top of the number of tokens."""
    own = sum(count(targets) for _, targets in micro_batches) or 1
    return right_sums(model, micro_batches, own * (divisor or 1), sum_loss)


def own_cross_entropy(model, micro_batches, divisor=None, sum_loss=None):
    """A loss is the cross-entropy: not where each rank has some columns of the logits."""
    return right_sums(model, micro_batches, divisor)


def nothing_to_divide_by(model, micro_batches, divisor=None, sum_loss=None):
    """There is always a target that counts."""
    divisor = divisor or sum((targets != -100).sum() for _, targets in micro_batches)
    return right_sums(model, micro_batches, divisor, sum_loss)


# 1.2


def starts_at_zero(step, peak, minimum, warmup_steps, total_steps):
    """The warm-up starts from nothing: then the first step trains on nothing."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    return right_schedule(step, peak, minimum, warmup_steps, total_steps)


def never_arrives(step, peak, minimum, warmup_steps, total_steps):
    """total_steps is the last step: it is total_steps - 1, counted from 0."""
    return right_schedule(step, peak, minimum, warmup_steps, total_steps + 1)


def straight_line(step, peak, minimum, warmup_steps, total_steps):
    """Any decay from peak to minimum will do."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return peak + (minimum - peak) * progress


def falls_to_zero(step, peak, minimum, warmup_steps, total_steps):
    """The cosine falls to zero, and the minimum is a floor under it."""
    rate = right_schedule(step, peak, 0.0, warmup_steps, total_steps)
    return rate if step < warmup_steps else max(minimum, rate)


def adds_the_minimum(step, peak, minimum, warmup_steps, total_steps):
    """The minimum is added to a cosine of the full height: the rate starts above the peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return minimum + right_schedule(step, peak, 0.0, warmup_steps, total_steps)


def rises_again(step, peak, minimum, warmup_steps, total_steps):
    """Nobody asks for a step past the end: a resumed run does, and the cosine comes back up."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


def counts_the_warm_up(step, peak, minimum, warmup_steps, total_steps):
    """Progress is step / total: the rate jumps down when the warm-up ends."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return right_schedule(step, peak, minimum, 0, total_steps)


def needs_a_warm_up(step, peak, minimum, warmup_steps, total_steps):
    """Every run has a warm-up: without one this divides by zero."""
    warm = (step + 1) / warmup_steps
    if warm <= 1:
        return peak * warm
    return right_schedule(step, peak, minimum, warmup_steps, total_steps)


def needs_a_long_run(step, peak, minimum, warmup_steps, total_steps):
    """There are always several steps after the warm-up: a trial run of a few has one."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / (total_steps - 1 - warmup_steps))
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


def ends_a_short_run_at_the_peak(step, peak, minimum, warmup_steps, total_steps):
    """Dividing by at least 1 is enough: a decay of one step is then all peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2


def rounds(step, peak, minimum, warmup_steps, total_steps):
    """Three digits are enough for a rate: of 0.000857 they leave one."""
    return round(right_schedule(step, peak, minimum, warmup_steps, total_steps), 3)


def right_schedule(step, peak, minimum, warmup_steps, total_steps):
    """Clips first, then averages peak and minimum with weights cos^2 and sin^2."""
    if step >= warmup_steps:
        last = total_steps - 1
        progress = 1 if step >= last else (step - warmup_steps) / (last - warmup_steps)
        angle = progress * math.pi / 2
        return peak * math.cos(angle) ** 2 + minimum * math.sin(angle) ** 2
    return (step + 1) * peak / warmup_steps


# 1.3


def right_parameters(model: ModelConfig) -> int:
    """Lists every weight's shape and adds up the products."""
    D, ffn, kv_width = model.width, model.ffn_width, model.num_kv_heads * model.head_width
    linear = [(D, D), (D, kv_width), (D, kv_width), (D, D), (D, ffn), (ffn, D)]
    norm = [(D,)]
    if model.family == "gpt":
        linear += [(out,) for _, out in linear]
        norm += [(D,)]
    else:
        linear += [(D, ffn)]
    shapes = (linear + norm * 2) * model.num_layers + norm + [(model.vocab_size, D)]
    if model.family == "gpt":
        shapes += [(model.max_sequence_length, D)]
    if not model.tied_embedding:
        shapes += [(D, model.vocab_size)]
    return sum(math.prod(shape) for shape in shapes)


def counts_tied_head(model):
    """The head is a matrix like any other: tied, it is the embedding's."""
    extra = model.vocab_size * model.width if model.tied_embedding else 0
    return right_parameters(model) + extra


def always_ties(model):
    """Every model shares the head with the embedding."""
    missing = 0 if model.tied_embedding else model.vocab_size * model.width
    return right_parameters(model) - missing


def forgets_final_norm(model):
    """A block has two norms, and that is all there are."""
    return right_parameters(model) - model.width * (2 if model.family == "gpt" else 1)


def forgets_positions(model):
    """Positions are computed: gpt learns them."""
    positions = model.max_sequence_length * model.width
    return right_parameters(model) - (positions if model.family == "gpt" else 0)


def forgets_biases(model):
    """Linear layers are matrices: gpt's have biases."""
    biases = 5 * model.width + model.ffn_width
    return right_parameters(model) - (model.num_layers * biases if model.family == "gpt" else 0)


def full_keys_and_values(model):
    """Keys and values are as wide as queries: not when the queries share them."""
    narrow = model.width - model.num_kv_heads * model.head_width
    return right_parameters(model) + 2 * model.num_layers * model.width * narrow


def two_matrices_everywhere(model):
    """A feed-forward is up and down: llama's has a gate."""
    gate = model.num_layers * model.width * model.ffn_width
    return right_parameters(model) - (gate if model.family == "llama" else 0)


def counts_in_floats(model):
    """Large counts are fine as floats: above 2^53 they are not exact."""
    return right_parameters(model) / 1


def right_flops(model: ModelConfig, sequence_length: int) -> int:
    """Counts the products of a whole sequence and divides by its tokens."""
    D, ffn, S = model.width, model.ffn_width, sequence_length
    kv_width = model.num_kv_heads * model.head_width
    products = [(S, D, D)] * 2 + [(S, D, kv_width)] * 2 + [(S, ffn, D)]
    products += [(S, D, ffn)] * (1 if model.family == "gpt" else 2)
    products += [(S, model.head_width, S), (S, S, model.head_width)] * model.num_heads
    products = products * model.num_layers + [(S, D, model.vocab_size)]
    return sum(6 * m * k * n for m, k, n in products) // S


def forward_only(model, sequence_length):
    """A training step is a forward pass."""
    return right_flops(model, sequence_length) // 3


def multiply_add_is_one(model, sequence_length):
    """A multiply-add is one operation: it is one instruction, and two operations."""
    return right_flops(model, sequence_length) // 2


def six_per_parameter(model, sequence_length):
    """6 N is the whole cost: it leaves out attention's products and counts look-ups."""
    return 6 * right_parameters(model)


def no_attention(model, sequence_length):
    """What has no weights costs nothing."""
    return right_flops(model, 1) - 12 * model.num_layers * model.width


def half_the_square(model, sequence_length):
    """Masked scores are not computed: by convention the full square counts."""
    return (
        right_flops(model, sequence_length) - 6 * model.num_layers * sequence_length * model.width
    )


def free_tied_head(model, sequence_length):
    """A tied head costs nothing, since it has no weight of its own."""
    head = 6 * model.vocab_size * model.width
    return right_flops(model, sequence_length) - (head if model.tied_embedding else 0)


def counts_the_look_up(model, sequence_length):
    """The embedding is multiplied with a one-hot vector: it is looked up."""
    return right_flops(model, sequence_length) + 6 * model.vocab_size * model.width


def fewer_heads_attend(model, sequence_length):
    """Grouped queries compute fewer scores: they only share the keys."""
    narrow = model.width - model.num_kv_heads * model.head_width
    return right_flops(model, sequence_length) - 12 * model.num_layers * sequence_length * narrow


# 1.4


def refuse(tokens_per_step, sequence_length, num_ranks):
    unit = sequence_length * num_ranks
    if tokens_per_step % unit:
        raise ValueError(f"{tokens_per_step:,} tokens do not divide into rounds of {unit:,}")
    return tokens_per_step // unit


def takes_the_largest(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Fill the memory and round the number of passes down: the batch shrinks."""
    per_rank = refuse(tokens_per_step, sequence_length, num_ranks)
    size = min(per_rank, largest_micro_batch)
    return size, per_rank // size


def rounds_up(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Fill the memory and add a pass for the rest: the batch grows."""
    per_rank = refuse(tokens_per_step, sequence_length, num_ranks)
    size = min(per_rank, largest_micro_batch)
    return size, math.ceil(per_rank / size)


def forgets_ranks(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Every rank trains on the whole batch."""
    refuse(tokens_per_step, sequence_length, num_ranks)
    return right_loop(tokens_per_step, sequence_length, 1, largest_micro_batch)


def powers_of_two(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Halve until it fits: 12 sequences with room for 5 take micro-batches of 4, not of 3."""
    size = per_rank = refuse(tokens_per_step, sequence_length, num_ranks)
    while size > largest_micro_batch:
        size = size // 2 if size % 2 == 0 else 1
    return size, per_rank // size


def one_at_a_time(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Micro-batches of 1 always fit: and leave the device idle."""
    return 1, refuse(tokens_per_step, sequence_length, num_ranks)


def ignores_memory(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """One pass is the fastest."""
    return refuse(tokens_per_step, sequence_length, num_ranks), 1


def rounds_down_silently(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Integer division takes care of what does not fit."""
    rounded = tokens_per_step - tokens_per_step % (sequence_length * num_ranks)
    rounded = rounded or sequence_length * num_ranks
    return right_loop(rounded, sequence_length, num_ranks, largest_micro_batch)


def says_nothing(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """An error without numbers is enough."""
    if tokens_per_step % (sequence_length * num_ranks):
        raise ValueError("the batch does not divide")
    return right_loop(tokens_per_step, sequence_length, num_ranks, largest_micro_batch)


def asserts(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """assert is how one refuses a user's numbers: python -O takes it away."""
    assert tokens_per_step % (sequence_length * num_ranks) == 0
    return right_loop(tokens_per_step, sequence_length, num_ranks, largest_micro_batch)


def true_division(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """4.0 steps are 4 steps: range(4.0) says no."""
    size, steps = right_loop(tokens_per_step, sequence_length, num_ranks, largest_micro_batch)
    return size, steps / 1


def right_loop(tokens_per_step, sequence_length, num_ranks, largest_micro_batch):
    """Searches upwards from the fewest passes that fit."""
    per_rank = refuse(tokens_per_step, sequence_length, num_ranks)
    steps = -(-per_rank // largest_micro_batch)
    while per_rank % steps:
        steps += 1
    return per_rank // steps, steps


MISTAKES = {
    "accumulate_gradients": {
        mean_of_means: "the mean of the micro-batches' means",
        one_backward_pass: "every micro-batch's activations are alive at once",
        sum_of_means: "divide each sum of losses by the count of all micro-batches",
        counts_padding: "divide by the number of targets that are not -100",
        sum_of_losses: "the sum of the tokens' losses, not their mean",
        weighs_the_means: "0 / 0 = nan",
        clears_gradients: "the gradient that was there is gone",
        scales_afterwards: "what .grad held before was changed too",
        one_large_batch: "forward of 4, backward",
        last_loss: "the gradients are right; the loss returned is",
        keeps_the_graph: "does not keep memory alive",
        evaluates: "put into eval mode",
        retains_graphs: "without retain_graph",
        ignores_the_divisor: "divide the sum of the losses by `divisor` if it is not None",
        divides_twice: "divide the sum of the losses by `divisor` if it is not None",
        own_cross_entropy: "if the vocabulary is sharded over ranks",
        nothing_to_divide_by: "0 / 0 = nan",
    },
    "learning_rate": {
        starts_at_zero: "steps count from 0",
        counts_the_warm_up: "the cosine begins at warmup_steps, at the peak",
        never_arrives: "the last step, total_steps - 1, has the minimum",
        straight_line: "a straight line would be at 2/3",
        falls_to_zero: "halfway down is the mean of peak and minimum",
        adds_the_minimum: "the cosine begins at warmup_steps, at the peak",
        rises_again: "past the end",
        needs_a_warm_up: "ZeroDivisionError",
        needs_a_long_run: "ZeroDivisionError",
        ends_a_short_run_at_the_peak: "the decay is one step long, and the last step has",
        rounds: "a small one loses most of its digits",
    },
    "num_parameters": {
        counts_tied_head: "a tied head is the embedding's weight",
        full_keys_and_values: "key and value map D to G K",
        always_ties: "an untied head has its own weight",
        forgets_final_norm: "the difference is one norm",
        forgets_positions: "gpt's table of learned positions",
        forgets_biases: "the biases of the blocks' linear layers",
        two_matrices_everywhere: "the difference is one feed-forward matrix per block",
        counts_in_floats: "of type float",
    },
    "training_flops_per_token": {
        six_per_parameter: "and attention's two matmuls have no parameters",
        forward_only: "the backward pass costs twice as much on top",
        multiply_add_is_one: "a multiply-add counts as 2 FLOPs",
        no_attention: "attention's two matmuls are missing",
        half_the_square: "half of attention is missing",
        free_tied_head: "the difference is V x D",
        counts_the_look_up: "an embedding lookup is not a matmul",
        fewer_heads_attend: "all H query heads still attend",
    },
    "plan_batch": {
        takes_the_largest: "the batch changed",
        rounds_down_silently: "rounds down and drops tokens",
        rounds_up: "the batch changed",
        forgets_ranks: "the batch changed",
        powers_of_two: "a larger micro-batch divides too",
        one_at_a_time: "a larger micro-batch divides too",
        ignores_memory: "do not fit",
        says_nothing: "the message must contain both numbers",
        asserts: "AssertionError",
        true_division: "a tuple of two integers",
    },
}

RIGHT_ANSWERS = {
    "accumulate_gradients": [right_sums, right_by_scaling],
    "learning_rate": [right_schedule],
    "num_parameters": [right_parameters],
    "training_flops_per_token": [right_flops],
    "plan_batch": [right_loop],
}
