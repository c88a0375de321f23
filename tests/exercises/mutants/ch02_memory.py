"""Wrong answers to chapter 2's exercises that people really give, and other right ones.

Each wrong answer's docstring is the misconception; `MISTAKES` pairs it with what the grader must
say of it. `RIGHT_ANSWERS` are written differently from ours and must pass.
"""

import numpy
import torch
import torch.nn.functional as F

from minitron.measure.meter import Meter

# 2.1


def right_states(model, dtypes):
    """Adds up parameter by parameter, with the number of moments in a table."""
    copies = {"parameter": 1, "gradient": 1, "master": 1, "moments": 2}
    total = dict.fromkeys(dtypes, 0)
    for parameter in {id(p): p for p in model.parameters()}.values():
        for part, dtype in dtypes.items():
            if dtype is not None and (part == "parameter" or parameter.requires_grad):
                total[part] += copies[part] * parameter.numel() * torch.finfo(dtype).bits // 8
    return total


def two_or_four(model, dtypes):
    """A value has 4 bytes in float32, else 2: float64 has 8."""
    half = {part: 2 if dtype else 0 for part, dtype in dtypes.items()}
    size = half | {part: 4 for part, dtype in dtypes.items() if dtype == torch.float32}
    counted = right_states(model, dtypes)
    return {
        part: counted[part] // (dtypes[part].itemsize if dtypes[part] else 1) * size[part]
        for part in dtypes
    }


def counts_tied_twice(model, dtypes):
    """Every name in the state dict is a tensor: a tied weight has two."""
    counted = right_states(model, dtypes)
    twice = sum(p.numel() for p in model.state_dict().values())
    return counted | {"parameter": twice * dtypes["parameter"].itemsize}


def trains_frozen(model, dtypes):
    """All parameters have gradients."""
    stored = sum(p.numel() for p in model.parameters())
    return right_states(model, dtypes) | {"gradient": stored * dtypes["gradient"].itemsize}


def drops_frozen(model, dtypes):
    """What is not trained costs nothing."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return right_states(model, dtypes) | {"parameter": trained * dtypes["parameter"].itemsize}


def copies_frozen(model, dtypes):
    """The master copy is a copy of the model: only trained parameters need one."""
    stored = sum(p.numel() for p in model.parameters())
    size = dtypes["master"].itemsize if dtypes["master"] else 0
    return right_states(model, dtypes) | {"master": stored * size}


def one_moment(model, dtypes):
    """Adam keeps a running mean: it keeps two."""
    counted = right_states(model, dtypes)
    return counted | {"moments": counted["moments"] // 2}


def always_a_master(model, dtypes):
    """Every training has a float32 master: in float32 the parameters are it."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return right_states(model, dtypes) | {"master": 4 * trained}


def gradient_like_parameter(model, dtypes):
    """A gradient has its parameter's dtype: not where it is accumulated in float32."""
    return right_states(model, dtypes | {"gradient": dtypes["parameter"]})


def as_it_is_now(model, dtypes):
    """The model's bytes are those it has now: the plan says bfloat16."""
    nbytes = sum(p.nbytes for p in model.parameters())
    return right_states(model, dtypes) | {"parameter": nbytes}


def counts_values(model, dtypes):
    """The size of a model is its number of parameters."""
    stored = sum(p.numel() for p in model.parameters())
    return right_states(model, dtypes) | {"parameter": stored}


def in_floats(model, dtypes):
    """bits / 8 is the number of bytes: as a float."""
    return {part: size / 1 for part, size in right_states(model, dtypes).items()}


def right_fit(model, plans, memory_gb):
    """Filters after sorting pairs of bytes and position."""
    order = sorted(
        (sum(right_states(model, dtypes).values()), position, name)
        for position, (name, dtypes) in enumerate(plans.items())
    )
    return [name for size, _, name in order if size / 1e9 <= memory_gb]


def in_gibibytes(model, plans, memory_gb):
    """A GB is 2^30 bytes: that is a GiB, 7 % more."""
    return right_fit(model, plans, memory_gb * 2**30 / 10**9)


def in_given_order(model, plans, memory_gb):
    """The dict's order is as good as any."""
    fitting = right_fit(model, plans, memory_gb)
    return [name for name in plans if name in fitting]


def largest_first(model, plans, memory_gb):
    """The most precise plan that fits comes first."""
    return right_fit(model, plans, memory_gb)[::-1]


def strictly_less(model, plans, memory_gb):
    """Full is too full."""
    return right_fit(model, plans, memory_gb - 1e-6)


def weights_alone(model, plans, memory_gb):
    """A model fits if its weights do."""
    sizes = {name: right_states(model, dtypes)["parameter"] for name, dtypes in plans.items()}
    everything = right_fit(model, plans, float("inf"))
    return [name for name in everything if sizes[name] <= memory_gb * 1e9]


def alphabetical_ties(model, plans, memory_gb):
    """Equals are sorted by name."""
    fitting = right_fit(model, plans, memory_gb)
    return sorted(fitting, key=lambda n: (sum(right_states(model, plans[n]).values()), n))


def whole_gigabytes(model, plans, memory_gb):
    """Divide by 10^9 and compare: // drops what is beyond a whole GB."""
    sizes = {name: sum(right_states(model, dtypes).values()) for name, dtypes in plans.items()}
    everything = right_fit(model, plans, float("inf"))
    return [name for name in everything if sizes[name] // 10**9 <= memory_gb]


def truncated_memory(model, plans, memory_gb):
    """GPUs have whole GB: a budget need not."""
    return right_fit(model, plans, int(memory_gb))


# 2.2


def sizes(model, batch_size, sequence_length):
    tokens = batch_size * sequence_length
    square = tokens * model.num_heads * sequence_length
    return tokens * model.width, tokens * model.ffn_width, square


def right_materialized(model, batch_size, sequence_length, bytes_per_value):
    """Adds up the branches one after the other, bytes per token."""
    n, dropout, D = bytes_per_value, model.dropout > 0, model.width
    scores = model.num_heads * sequence_length
    attention = 6 * D * n + scores * (n + dropout * (n + 1)) + dropout * D
    feed_forward = 2 * D * n + 2 * model.ffn_width * n + dropout * D
    return batch_size * sequence_length * (attention + feed_forward)


def paper_formula(model, batch_size, sequence_length, bytes_per_value):
    """s b h (34 + 5 a s / h) is the formula: for F = 4 D, 2 bytes and dropout."""
    wide, _, square = sizes(model, batch_size, sequence_length)
    return 34 * wide + 5 * square


def width_times_four(model, batch_size, sequence_length, bytes_per_value):
    """The feed-forward is 4 D wide: it is ffn_width wide."""
    wide, inner, _ = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right + 2 * (4 * wide - inner) * bytes_per_value


def input_of_each(model, batch_size, sequence_length, bytes_per_value):
    """Three linear layers save three inputs: it is one tensor."""
    wide, *_ = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right + 2 * wide * bytes_per_value


def saves_the_scores(model, batch_size, sequence_length, bytes_per_value):
    """Softmax needs its input: its output is enough."""
    *_, square = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right + square * bytes_per_value


def no_norm_inputs(model, batch_size, sequence_length, bytes_per_value):
    """Norms are small, so they save little: they save their input."""
    wide, *_ = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right - 2 * wide * bytes_per_value


def forgets_gelu(model, batch_size, sequence_length, bytes_per_value):
    """Only matrix products save something: gelu needs its input."""
    _, inner, _ = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right - inner * bytes_per_value


def wide_masks(model, batch_size, sequence_length, bytes_per_value):
    """A mask is a tensor like any other: it takes 1 byte per value."""
    wide, _, square = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right + (model.dropout > 0) * (bytes_per_value - 1) * (square + 2 * wide)


def masks_alone(model, batch_size, sequence_length, bytes_per_value):
    """Dropout adds its masks, and nothing else."""
    *_, square = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right - (model.dropout > 0) * square * bytes_per_value


def no_branch_masks(model, batch_size, sequence_length, bytes_per_value):
    """Dropout acts on the probabilities: and on the outputs of the branches."""
    wide, *_ = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right - (model.dropout > 0) * 2 * wide


def always_masks(model, batch_size, sequence_length, bytes_per_value):
    """Dropout's masks are always there: with probability 0 it does nothing."""
    wide, _, square = sizes(model, batch_size, sequence_length)
    right = right_materialized(model, batch_size, sequence_length, bytes_per_value)
    return right + (model.dropout == 0) * (2 * wide + square)


def values_not_bytes(model, batch_size, sequence_length, bytes_per_value):
    """The count of values is the answer."""
    return (
        right_materialized(model, batch_size, sequence_length, bytes_per_value) // bytes_per_value
    )


def right_fused(model, batch_size, sequence_length, bytes_per_value):
    """Takes away from the materialized block what has S twice."""
    *_, square = sizes(model, batch_size, sequence_length)
    n, dropout = bytes_per_value, model.dropout > 0
    whole = right_materialized(model, batch_size, sequence_length, n)
    return whole - square * (n + dropout * (n + 1))


def still_square(model, batch_size, sequence_length, bytes_per_value):
    """The kernel is faster and saves the same."""
    return right_materialized(model, batch_size, sequence_length, bytes_per_value)


def keeps_the_mask(model, batch_size, sequence_length, bytes_per_value):
    """The dropout mask must be stored, or backward would draw another one."""
    *_, square = sizes(model, batch_size, sequence_length)
    right = right_fused(model, batch_size, sequence_length, bytes_per_value)
    return right + (model.dropout > 0) * square


def output_alone(model, batch_size, sequence_length, bytes_per_value):
    """The kernel saves its inputs; the output is only out's: that is one and the same tensor."""
    wide, *_ = sizes(model, batch_size, sequence_length)
    right = right_fused(model, batch_size, sequence_length, bytes_per_value)
    return right + wide * bytes_per_value


def saves_nothing(model, batch_size, sequence_length, bytes_per_value):
    """A fused kernel recomputes everything: from query, key, value and its output."""
    wide, *_ = sizes(model, batch_size, sequence_length)
    right = right_fused(model, batch_size, sequence_length, bytes_per_value)
    return right - 4 * wide * bytes_per_value


def no_dropout_at_all(model, batch_size, sequence_length, bytes_per_value):
    """The kernel takes care of dropout: of attention's, not of the branches'."""
    wide, *_ = sizes(model, batch_size, sequence_length)
    right = right_fused(model, batch_size, sequence_length, bytes_per_value)
    return right - (model.dropout > 0) * 2 * wide


# 2.3


def group(tensors):
    held = {}
    for tensor in tensors:
        key = tensor.category, tensor.module
        held[key] = held.get(key, 0) + tensor.bytes
    return sorted(((*key, size) for key, size in held.items()), key=lambda h: h[2], reverse=True)


def right_peak(step, model, optimizer, num_holders):
    """Watches three steps at once: the peak is one of the later ones'."""
    with Meter(model, optimizer) as meter:
        for _ in range(3):
            step()
    largest = max(meter.timeline, key=lambda moment: moment.total)
    return largest.phase, largest.total, group(meter.peak.tensors)[:num_holders]


def first_step(step, model, optimizer, num_holders):
    """One step is like the other: the first has no optimizer state yet."""
    with Meter(model, optimizer) as meter:
        step()
    peak = meter.peak
    return peak.phase, peak.total, group(peak.tensors)[:num_holders]


def after_the_step(step, model, optimizer, num_holders):
    """What is held after the step is what the step needs."""
    step()
    with Meter(model, optimizer) as meter:
        step()
        held = meter.now()
    return "optimizer", sum(held.values()), group(meter.peak.tensors)[:num_holders]


def without_the_optimizer(step, model, optimizer, num_holders):
    """The meter sees everything by itself: not what was there before and is nobody's."""
    step()
    return first_step(step, model, None, num_holders)


def last_phase(step, model, optimizer, num_holders):
    """The step ends in its largest moment."""
    _, total, holders = right_peak(step, model, optimizer, num_holders)
    return "optimizer", total, holders


def tensors_not_holders(step, model, optimizer, num_holders):
    """The largest tensors are the largest holders: not if others have many."""
    step()
    with Meter(model, optimizer) as meter:
        step()
    peak = meter.peak
    largest = [(t.category, t.module, t.bytes) for t in peak.tensors[:num_holders]]
    return peak.phase, peak.total, largest


def by_category(step, model, optimizer, num_holders):
    """A category is a holder."""
    step()
    with Meter(model, optimizer) as meter:
        step()
    peak = meter.peak
    holders = [(category, "", size) for category, size in peak.bytes.items()]
    holders.sort(key=lambda holder: -holder[2])
    return peak.phase, peak.total, holders[:num_holders]


def cuts_before_sorting(step, model, optimizer, num_holders):
    """The first holders found are the largest, since the tensors are sorted."""
    step()
    with Meter(model, optimizer) as meter:
        step()
    peak, held = meter.peak, {}
    for tensor in peak.tensors:
        key = tensor.category, tensor.module
        held[key] = held.get(key, 0) + tensor.bytes
    return peak.phase, peak.total, [(*key, held[key]) for key in list(held)[:num_holders]]


def smallest_first(step, model, optimizer, num_holders):
    """Sorted is sorted."""
    phase, total, holders = right_peak(step, model, optimizer, num_holders)
    return phase, total, holders[::-1]


def everyone(step, model, optimizer, num_holders):
    """The whole list says more."""
    return right_peak(step, model, optimizer, None)


# 2.4


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loop(train_one, validate, convert=float):
    """A loop from a step, (model, optimizer, x, y) -> loss, correct, and a validation."""

    def train(model, optimizer, batches, validation):
        history = {"loss": [], "average": [], "accuracy": [], "validation": []}
        average = 0.0
        for inputs, targets in batches:
            loss, correct = train_one(model, optimizer, inputs, targets)
            average = 0.9 * average + 0.1 * loss
            history["loss"].append(loss)
            history["average"].append(average)
            history["accuracy"].append(correct)
            history["validation"].append(validate(model, validation))
        return {key: [convert(v) for v in values] for key, values in history.items()}

    return train


def to_float(value):
    return value.mean().item() if isinstance(value, torch.Tensor) else value


def train_once(model, optimizer, inputs, targets, **backward):
    logits = model(inputs)
    loss = loss_of(logits, targets)
    optimizer.zero_grad()
    loss.backward(**backward)
    optimizer.step()
    return loss, (logits.argmax(-1) == targets).double()


def train_to_floats(model, optimizer, inputs, targets):
    loss, correct = train_once(model, optimizer, inputs, targets)
    return loss.item(), correct.mean().item()


@torch.no_grad()
def validate_to_float(model, validation):
    return sum(loss_of(model(x), y).item() for x, y in validation) / len(validation)


def right_functions(model, optimizer, batches, validation):
    """A function for each pass: what it made is gone when it returns."""
    return loop(train_to_floats, validate_to_float)(model, optimizer, batches, validation)


def right_detached(model, optimizer, batches, validation):
    """Keeps 0-d tensors without a graph, and asks for their values at the end."""

    def train_one(*arguments):
        loss, correct = train_once(*arguments)
        return loss.detach(), correct.mean()

    return loop(train_one, validate_to_float)(model, optimizer, batches, validation)


def keeps_the_loss(model, optimizer, batches, validation):
    """A loss is one number: it is one number with a graph."""

    def train_one(*arguments):
        loss, correct = train_once(*arguments)
        return loss, correct.mean().item()

    return loop(train_one, validate_to_float, to_float)(model, optimizer, batches, validation)


def keeps_the_average(model, optimizer, batches, validation):
    """The history has floats; the running average is a tensor that remembers every step."""
    history = {"loss": [], "average": [], "accuracy": [], "validation": []}
    average = 0.0
    for inputs, targets in batches:
        loss, correct = train_once(model, optimizer, inputs, targets)
        average = 0.9 * average + 0.1 * loss
        history["loss"].append(loss.item())
        history["average"].append(average.item())
        history["accuracy"].append(correct.mean().item())
        history["validation"].append(validate_to_float(model, validation))
    return history


def keeps_the_tokens(model, optimizer, batches, validation):
    """Without a graph anything may be kept: it grows with the batch."""

    def train_one(*arguments):
        loss, correct = train_once(*arguments)
        return loss.item(), correct

    return loop(train_one, validate_to_float, to_float)(model, optimizer, batches, validation)


def keeps_validation_graphs(model, optimizer, batches, validation):
    """Whoever does not call backward makes no graph."""

    def validate(model, validation):
        return sum(loss_of(model(x), y) for x, y in validation) / len(validation)

    return loop(train_to_floats, validate, to_float)(model, optimizer, batches, validation)


def adds_up_graphs(model, optimizer, batches, validation):
    """item() at the end frees the graphs: until then all validation batches' are alive."""

    def validate(model, validation):
        return (sum(loss_of(model(x), y) for x, y in validation) / len(validation)).item()

    return loop(train_to_floats, validate)(model, optimizer, batches, validation)


def retains_the_graph(model, optimizer, batches, validation):
    """retain_graph=True is harmless if the next step replaces the loss."""
    history = {"loss": [], "average": [], "accuracy": [], "validation": []}
    average = 0.0
    for inputs, targets in batches:
        logits = model(inputs)
        loss = loss_of(logits, targets)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        average = 0.9 * average + 0.1 * loss.item()
        history["loss"].append(loss.item())
        history["average"].append(average)
        history["accuracy"].append((logits.argmax(-1) == targets).double().mean().item())
        history["validation"].append(validate_to_float(model, validation))
    return history


def lists_the_batches(model, optimizer, batches, validation):
    """An iterator is a list that one has not made yet."""
    return right_functions(model, optimizer, iter(list(batches)), validation)


def returns_tensors(model, optimizer, batches, validation):
    """A 0-d tensor is a number."""
    history = right_functions(model, optimizer, batches, validation)
    return history | {"loss": [torch.tensor(value) for value in history["loss"]]}


def detaches_too_early(model, optimizer, batches, validation):
    """The graph is the leak, so it is taken away: and nothing is learned."""

    def train_one(model, optimizer, inputs, targets):
        with torch.no_grad():
            logits = model(inputs)
        correct = (logits.argmax(-1) == targets).double().mean().item()
        return loss_of(logits, targets).item(), correct

    return loop(train_one, validate_to_float)(model, optimizer, batches, validation)


def validates_first(model, optimizer, batches, validation):
    """Whether one validates before or after the update does not matter."""
    before = []

    def train_one(*arguments):
        before.append(validate_to_float(model, validation))
        return train_to_floats(*arguments)

    return loop(train_one, lambda *_: before[-1])(model, optimizer, batches, validation)


def stays_in_eval_mode(model, optimizer, batches, validation):
    """Validation calls eval(): and nobody calls train() afterwards."""

    def validate(model, validation):
        model.eval()
        return validate_to_float(model, validation)

    return loop(train_to_floats, validate)(model, optimizer, batches, validation)


def keeps_tokens_in_numpy(model, optimizer, batches, validation):
    """An array has no graph: it has as many values as the tensor."""

    def train_one(*arguments):
        loss, correct = train_once(*arguments)
        return loss.item(), correct.numpy().copy()

    return loop(train_one, validate_to_float, lambda value: float(numpy.mean(value)))(
        model, optimizer, batches, validation
    )


MISTAKES = {
    "state_bytes": {
        counts_tied_twice: "it has two names but is one tensor",
        one_moment: "Adam keeps two moving averages",
        trains_frozen: "a frozen parameter has no gradient, no master and no moments",
        drops_frozen: "a frozen parameter is not trained, but it is stored",
        copies_frozen: "a frozen parameter has no gradient, no master and no moments",
        always_a_master: "master is None",
        gradient_like_parameter: "that uses the parameter's dtype",
        as_it_is_now: "whatever dtype the model has now",
        counts_values: "multiply it by dtype.itemsize",
        in_floats: "a dict of integers",
        two_or_four: "the bytes of parameter's own dtype",
    },
    "plans_that_fit": {
        weights_alone: "ount all parts",
        in_gibibytes: "a GB is 10^9 bytes, not 2^30",
        in_given_order: "the smallest first",
        largest_first: "the smallest first",
        strictly_less: "16 bytes per parameter fill 80 GB exactly",
        alphabetical_ties: "ties stay in the order of the dict",
        whole_gigabytes: "compare bytes, not GB that were rounded",
        truncated_memory: "memory_gb need not be an integer",
    },
    "materialized_block_bytes": {
        paper_formula: "right for F = 4 D, 2 bytes, dropout",
        input_of_each: "read one and the same input",
        width_times_four: "the feed-forward is F = ffn_width wide, not 4 D",
        saves_the_scores: "softmax needs its output, not its input",
        no_norm_inputs: "a norm needs its input",
        forgets_gelu: "gelu needs its input",
        wide_masks: "a mask has 1 byte per value",
        masks_alone: "a second S x S tensor",
        no_branch_masks: "the masks of the two branches' outputs are missing",
        always_masks: "without dropout there are none",
        values_not_bytes: "multiply by bytes_per_value",
    },
    "fused_block_bytes": {
        still_square: "the fused kernel stores nothing of S x S",
        keeps_the_mask: "regenerates its mask from a seed",
        output_alone: "one tensor of B S D too many",
        saves_nothing: "attention saves query, key, value and output",
        no_dropout_at_all: "the masks of the two branches' outputs are missing",
    },
    "find_peak": {
        first_step: "that is the first step",
        tensors_not_holders: "add up all of one category and module",
        after_the_step: "the peak is over when the step ends",
        without_the_optimizer: "give the meter the optimizer",
        last_phase: "the phase of the peak itself",
        by_category: "group by the meter's own category and module",
        cuts_before_sorting: "then sort by bytes, then cut the list",
        smallest_first: "largest first",
        everyone: "holders, not 3",
    },
    "train": {
        keeps_the_loss: "still has its graph",
        detaches_too_early: "the training must be the same",
        keeps_the_average: "still has its graph",
        keeps_the_tokens: "whose size grows with the batch",
        keeps_validation_graphs: "still has its graph",
        adds_up_graphs: "validation batches whose graphs live until the sum is complete",
        retains_the_graph: "retain_graph",
        lists_the_batches: "take the batches one at a time",
        returns_tensors: "a list of Python floats",
        validates_first: "after the update",
        stays_in_eval_mode: "ran in eval mode",
        keeps_tokens_in_numpy: "a copy in NumPy, bytes or a list of floats",
    },
}

RIGHT_ANSWERS = {
    "state_bytes": [right_states],
    "plans_that_fit": [right_fit],
    "materialized_block_bytes": [right_materialized],
    "fused_block_bytes": [right_fused],
    "find_peak": [right_peak],
    "train": [right_functions, right_detached],
}
