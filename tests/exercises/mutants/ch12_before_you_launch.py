"""Right answers written differently, and wrong ones with what the graders must say of them.

A docstring states the idea behind the answer.
"""

from collections import Counter
from itertools import product
from math import ceil, inf

from minitron.config import ConfigError, ParallelConfig
from minitron.cost import tensor_parallel_parameters
from minitron.plan.estimate import estimate
from minitron.plan.job import Decision
from minitron.plan.search import decisions

# 12.1


def attention_of(num_layers, width, sequence_length):
    return 4 * sequence_length * width * num_layers


def counted(P, attention, recompute, backward=2):
    """Model and hardware FLOPs of a forward pass of 2 P and attention."""
    forward = 2 * P + attention
    again = {"none": 0, "selective": attention, "full": forward}[recompute]
    return (1 + backward) * forward, (1 + backward) * forward + again


def right_by_products(P, L, D, S, recompute):
    """Each product three times, or four times where it is done again."""
    times = 4 if recompute == "full" else 3
    attention = 2 * sum(2 * S * D for _ in range(L))
    more = attention * (recompute == "selective")
    return 3 * (2 * P + attention), times * (2 * P + attention) + more


def forward_alone(P, L, D, S, recompute):
    """What a token costs is its forward pass."""
    return counted(P, attention_of(L, D, S), recompute, backward=0)


def backward_once(P, L, D, S, recompute):
    """Backward costs as much as forward."""
    return counted(P, attention_of(L, D, S), recompute, backward=1)


def one_operation(P, L, D, S, recompute):
    """A multiply-add is one operation."""
    model, hardware = counted(P, attention_of(L, D, S), recompute)
    return model // 2, hardware // 2


def without_attention(P, L, D, S, recompute):
    """6 P, as everybody says."""
    return counted(P, 0, recompute)


def half_the_square(P, L, D, S, recompute):
    """Half of the square is masked."""
    return counted(P, attention_of(L, D, S) // 2, recompute)


def attention_forward_alone(P, L, D, S, recompute):
    """6 P and attention: once."""
    model, hardware = counted(P, 0, recompute)
    return model + attention_of(L, D, S), hardware + attention_of(L, D, S)


def one_layer(P, L, D, S, recompute):
    """4 S D, of one layer."""
    return counted(P, attention_of(1, D, S), recompute)


def nothing_again(P, L, D, S, recompute):
    """Recomputation is no progress: in neither of the two."""
    return counted(P, attention_of(L, D, S), "none")


def selective_is_full(P, L, D, S, recompute):
    """Recomputed is recomputed."""
    return counted(P, attention_of(L, D, S), "none" if recompute == "none" else "full")


def eight_p(P, L, D, S, recompute):
    """8 P in place of 6 P: attention is not done again."""
    model, hardware = counted(P, attention_of(L, D, S), recompute)
    return model, model + 2 * P if recompute == "full" else hardware


def in_the_model_too(P, L, D, S, recompute):
    """All FLOPs that are done are the model's."""
    return counted(P, attention_of(L, D, S), recompute)[1:] * 2


def hardware_first(P, L, D, S, recompute):
    """Hardware, then model."""
    return counted(P, attention_of(L, D, S), recompute)[::-1]


def a_float(P, L, D, S, recompute):
    """In units of 10^0."""
    return tuple(each / 1 for each in counted(P, attention_of(L, D, S), recompute))


def told(flops, num_tokens, num_gpus, peak_flops, known, value, hours_of=None, tera=1e12):
    """Days and MFU; `flops` are those that MFU counts and those that the others count."""
    rate = {"MFU": value * peak_flops, "HFU": value * peak_flops, "TFLOP/s": tera * value}
    if known == "GPU-hours":
        seconds = 3600 * value / (hours_of or num_gpus)
    else:
        seconds = num_tokens * flops[known != "MFU"] / rate[known] / num_gpus
    return seconds / 86400, num_tokens * flops[0] / (num_gpus * peak_flops * seconds)


def right_by_mfu(flops, num_tokens, num_gpus, peak_flops, known, value):
    """First the MFU, whatever is known; the days follow from it."""
    model, hardware = flops
    at_peak = num_tokens * model / (num_gpus * peak_flops) / 86400
    if known == "GPU-hours":
        mfu = at_peak / (value / num_gpus / 24)
    elif known == "TFLOP/s":
        mfu = value * 1e12 / peak_flops * model / hardware
    else:
        mfu = value * (model / hardware if known == "HFU" else 1)
    return at_peak / mfu, mfu


def model_flops_alone(flops, *rest):
    """A training has the FLOPs of its model."""
    return told((flops[0], flops[0]), *rest)


def hardware_flops_alone(flops, *rest):
    """A training takes as long as its hardware computes."""
    return told((flops[1], flops[1]), *rest)[0], told(flops, *rest)[1]


def one_gpu(flops, num_tokens, num_gpus, *rest):
    """FLOPs over FLOP/s: of one GPU."""
    days, mfu = told(flops, num_tokens, num_gpus, *rest)
    return days * num_gpus, mfu


def hours_of_each(*given):
    """GPU-hours are hours."""
    return told(*given, hours_of=1)


def giga(*given):
    """A thousand million."""
    return told(*given, tera=1e9)


def in_seconds(*given):
    """Seconds, as FLOP/s are per second."""
    days, mfu = told(*given)
    return days * 86400, mfu


def in_hours(*given):
    """Hours: as in GPU-hours."""
    days, mfu = told(*given)
    return days * 24, mfu


def at_the_peak(flops, num_tokens, num_gpus, peak_flops, known, value):
    """The datasheet's FLOP/s."""
    days = num_tokens * flops[1] / (num_gpus * peak_flops) / 86400
    return days, told(flops, num_tokens, num_gpus, peak_flops, known, value)[1]


def hfu_for_mfu(flops, *rest):
    """The share of the peak that the hardware reaches."""
    days, mfu = told(flops, *rest)
    return days, mfu * flops[1] / flops[0]


def percent(*given):
    """37.5 %."""
    days, mfu = told(*given)
    return days, 100 * mfu


def peak_of_one(flops, num_tokens, num_gpus, *rest):
    """The peak: of a GPU."""
    days, mfu = told(flops, num_tokens, num_gpus, *rest)
    return days, mfu * num_gpus


def days_alone(*given):
    """How many days?"""
    return told(*given)[0]


# 12.2


def matrices_of(model):
    D, keys = model.width, model.num_kv_heads * model.head_width
    return [D * D] * 2 + [D * keys] * 2 + [D * model.ffn_width] * 3


def number(model, stages, stage, tp, **change):
    """Parameters of a rank; `change` says what is taken for something else."""
    first, last = stage == 0, stage == len(stages) - 1
    D, matrix = model.width, model.vocab_size * model.width // tp
    block = change.get("matrices", sum(matrices_of(model))) // tp + change.get("norms", 2 * D)
    copies = first + last - (first and last and model.tied_embedding)
    total = change.get("blocks", stages[stage]) * block
    return int(
        total
        + change.get("copies", copies) * change.get("matrix", matrix)
        + change.get("final", D * last)
    )


def kinds(count, dp, zero, shard=None, optimizer=12, stages=(3, 2, 1)):
    """The three kinds of bytes; `stages` of ZeRO from which each is divided."""
    shard = -(-count // dp) if shard is None else shard
    names = "parameter", "gradient", "optimizer state"
    return {
        name: each * (shard if zero >= first else count)
        for name, each, first in zip(names, (2, 2, optimizer), stages, strict=True)
    }


def right_shape_by_shape(model, stages, stage, tp, dp, zero):
    """A list of all that there is."""
    D = model.width
    sizes = [size // tp for size in matrices_of(model)] + [D, D]
    held = sizes * stages[stage]
    if stage == 0:
        held.append(model.vocab_size * D // tp)
    if stage == len(stages) - 1:
        held.append(D)
        if not model.tied_embedding or stage > 0:
            held.append(model.vocab_size * D // tp)
    return kinds(sum(held), dp, zero)


def asks_the_package(model, stages, stage, tp, dp, zero):
    """A block of the package's, twice minus once; and the ends."""
    fields = {**vars(model), "tied_embedding": False}
    one, two = (
        tensor_parallel_parameters(type(model)(**fields | {"num_layers": n}), tp) for n in (1, 2)
    )
    matrix = model.vocab_size * model.width // tp
    ends = [0] * len(stages)
    ends[0] += matrix
    ends[-1] += model.width + matrix * (len(stages) > 1 or not model.tied_embedding)
    return kinds(stages[stage] * (two - one) + ends[stage], dp, zero)


def changed(name, says_doc, **fixed):
    """A wrong answer that takes something for something else."""

    def state_bytes(model, stages, stage, tp, dp, zero):
        change = {key: value(model, stages, stage, tp) for key, value in fixed.items()}
        return kinds(number(model, stages, stage, tp, **change), dp, zero)

    state_bytes.__name__, state_bytes.__doc__ = name, says_doc
    return state_bytes


both_ends = changed(
    "both_ends",
    "Every stage has an embedding and a head.",
    copies=lambda m, *_: 1 if m.tied_embedding else 2,
)
tied_is_once = changed(
    "tied_is_once",
    "A tied head is never stored: the embedding is.",
    copies=lambda m, stages, s, tp: (s == 0) + (s == len(stages) - 1 and not m.tied_embedding),
)
tied_is_twice = changed(
    "tied_is_twice",
    "Embedding and head.",
    copies=lambda m, stages, s, tp: (s == 0) + (s == len(stages) - 1),
)
one_norm = changed("one_norm", "A norm in each block.", norms=lambda m, *_: m.width)
no_final_norm = changed("no_final_norm", "Norms are in the blocks.", final=lambda *_: 0)
norms_cut = changed(
    "norms_cut", "tp divides everything.", norms=lambda m, stages, s, tp: 2 * m.width // tp
)
two_in_the_feed_forward = changed(
    "two_in_the_feed_forward",
    "Up and down.",
    matrices=lambda m, *_: sum(matrices_of(m)) - m.width * m.ffn_width,
)
keys_like_queries = changed(
    "keys_like_queries",
    "Query, key, value and out are (D, D).",
    matrices=lambda m, *_: 4 * m.width**2 + 3 * m.width * m.ffn_width,
)
vocabulary_whole = changed(
    "vocabulary_whole", "tp cuts the blocks.", matrix=lambda m, *_: m.vocab_size * m.width
)
equal_stages = changed(
    "equal_stages", "L / p blocks.", blocks=lambda m, stages, *_: sum(stages) / len(stages)
)
all_blocks = changed(
    "all_blocks", "The model has so many.", blocks=lambda m, stages, *_: sum(stages)
)
not_cut = changed(
    "not_cut",
    "The blocks of a stage, whole.",
    matrices=lambda m, stages, s, tp: tp * sum(matrices_of(m)),
    matrix=lambda m, *_: m.vocab_size * m.width,
)


def rounded_down(model, stages, stage, tp, dp, zero):
    """A rank's share: whole numbers."""
    count = number(model, stages, stage, tp)
    return kinds(count, dp, zero, shard=count // dp)


def bytes_rounded(model, stages, stage, tp, dp, zero):
    """Bytes over ranks, rounded up."""
    whole = kinds(number(model, stages, stage, tp), 1, 0)
    first = {"parameter": 3, "gradient": 2, "optimizer state": 1}
    return {kind: ceil(size / dp) if zero >= first[kind] else size for kind, size in whole.items()}


def moments_alone(model, stages, stage, tp, dp, zero):
    """The optimizer has two moments of 4 bytes."""
    return kinds(number(model, stages, stage, tp), dp, zero, optimizer=8)


def one_stage_early(model, stages, stage, tp, dp, zero):
    """ZeRO-1 divides the gradients too, 2 the parameters."""
    return kinds(number(model, stages, stage, tp), dp, zero, stages=(2, 1, 1))


def one_stage_late(model, stages, stage, tp, dp, zero):
    """ZeRO-2 divides the optimizer state, 3 the gradients."""
    return kinds(number(model, stages, stage, tp), dp, zero, stages=(4, 3, 2))


def shares(model, stages, stage, tp, dp, zero):
    """A share is a fraction."""
    count = number(model, stages, stage, tp)
    return kinds(count, dp, zero, shard=count / dp)


def fullest(pipeline, counts, heads=None):
    """The largest of the stages that hold `counts` micro-batches, the last one with the head."""
    stages, states, _, block, head = pipeline
    last = len(stages) - 1
    heads = heads or [0] * last + [head]
    held = [
        state + count * (blocks * block + extra)
        for state, count, blocks, extra in zip(states, counts, stages, heads, strict=True)
    ]
    return held.index(max(held)), max(held)


def in_flight(pipeline):
    p, m = len(pipeline[0]), pipeline[2]
    return [min(m, p - stage) for stage in range(p)]


def right_backwards(stages, states, m, block, head):
    """From the last stage to the first; of equal ones the last."""
    extra, best = head, (0, -1)
    for behind, (blocks, state) in enumerate(zip(stages[::-1], states[::-1], strict=True)):
        held = state + min(m, behind + 1) * (blocks * block + extra)
        best, extra = max(best, (len(stages) - 1 - behind, held), key=lambda pair: pair[1]), 0
    return best


def never_fewer(*pipeline):
    """As many as there are stages from here on."""
    p = len(pipeline[0])
    return fullest(pipeline, [p - stage for stage in range(p)])


def warm_up_alone(*pipeline):
    """One for each stage behind."""
    p, m = len(pipeline[0]), pipeline[2]
    return fullest(pipeline, [min(m, p - 1 - stage) for stage in range(p)])


def all_micro_batches(*pipeline):
    """All go forward first."""
    return fullest(pipeline, [pipeline[2]] * len(pipeline[0]))


def stages_before(*pipeline):
    """One for each stage before."""
    p, m = len(pipeline[0]), pipeline[2]
    return fullest(pipeline, [min(m, stage + 1) for stage in range(p)])


def one_on_each(*pipeline):
    """A rank works on one micro-batch."""
    return fullest(pipeline, [1] * len(pipeline[0]))


def first_is_fullest(stages, states, m, block, head):
    """The first stage has most on its way."""
    held = states[0] + min(m, len(stages)) * (stages[0] * block + head * (len(stages) == 1))
    return 0, held


def head_everywhere(*pipeline):
    """Each micro-batch has a loss."""
    return fullest(pipeline, in_flight(pipeline), [pipeline[4]] * len(pipeline[0]))


def headless(*pipeline):
    """Blocks and state."""
    return fullest(pipeline, in_flight(pipeline), [0] * len(pipeline[0]))


def stateless(*pipeline):
    """Activations are what a pipeline holds."""
    return fullest((pipeline[0], [0] * len(pipeline[0]), *pipeline[2:]), in_flight(pipeline))


def from_one(*pipeline):
    """The first stage is number 1."""
    stage, held = fullest(pipeline, in_flight(pipeline))
    return stage + 1, held


def bytes_alone(*pipeline):
    """How many bytes?"""
    return fullest(pipeline, in_flight(pipeline))[1]


# 12.3


def right_by_counting(p, v, part):
    """One group more until it is enough."""
    group = p if v > 1 else 1
    m = group
    while (p - 1) * part > (p - 1) + m * v:
        m += group
    return m


def over_the_work(p, v, part):
    """(p - 1) / (m v), as papers say."""
    group = p if v > 1 else 1
    return (
        max(1, -(-(p - 1) * part // v // group) * 1 if group == 1 else ceil((p - 1) * part / v / p))
        * group
    )


def without_chunks(p, v, part):
    """p - 1 passes, whatever the chunks."""
    group = p if v > 1 else 1
    return max(1, ceil((p - 1) * (part - 1) / group)) * group


def any_number(p, v, part):
    """As few as the bubble allows."""
    return max(1, -(-(p - 1) * (part - 1) // v))


def all_ranks(p, v, part):
    """p passes idle."""
    group = p if v > 1 else 1
    return max(1, ceil(p * (part - 1) / v / group)) * group


def always_groups(p, v, part):
    """A multiple of p: to be on the safe side."""
    return max(1, ceil((p - 1) * (part - 1) / v / p)) * p


def rounds_down(p, v, part):
    """A whole number."""
    group = p if v > 1 else 1
    return max(1, (p - 1) * (part - 1) // (v * group)) * group


def less_than(p, v, part):
    """Less than 1/part."""
    group = p if v > 1 else 1
    return ((p - 1) * (part - 1) // (v * group) + 1) * group


def none_for_one_rank(p, v, part):
    """Without a bubble none is needed."""
    group = p if v > 1 else 1
    return ceil((p - 1) * (part - 1) / v / group) * group


def a_fraction(p, v, part):
    """So many."""
    return (p - 1) * (part - 1) / v


def schedules(p, num_blocks, n, seconds, block_bytes, limit, *, held=None, groups=True):
    """Every (b, v) that fits, with its seconds and bytes; `held` counts b's bytes otherwise."""
    found = {}
    blocks = num_blocks // p
    for b, v in product(range(1, n + 1), range(1, blocks + 1)):
        m = n // b
        if n % b or blocks % v or (groups and v > 1 and m % p):
            continue
        count = min(m, p) if v == 1 else min(m * v, (v - 1) * p + 2 * (p - 1) + 1)
        size = (held or bytes_held)(count, blocks // v, b, block_bytes, min(m, p) * v)
        if size <= limit:
            found[b, v] = (m + (p - 1) / v) * 3 * blocks * seconds(b), size, (p - 1) / (m * v)
    return found


def bytes_held(count, blocks, b, block_bytes, _):
    return count * blocks * b * block_bytes


def least(found, key=0):
    return min(found, key=lambda pair: found[pair][key], default=None)


def right_from_lists(*case):
    """All in a list, sorted."""
    return least(schedules(*case))


def right_largest_first(*case):
    """From the largest micro-batch on: of equally fast ones another one."""
    return least(dict(reversed(schedules(*case).items())))


def smallest_bubble(*case):
    """The bubble is what is lost."""
    return least(schedules(*case), 2)


def holds_least(*case):
    """Small is good."""
    return least(schedules(*case), 1)


def largest_micro_batch(*case):
    """The largest micro-batch that fits."""
    found = schedules(*case)
    largest = max((b for b, _ in found), default=0)
    return least({pair: row for pair, row in found.items() if pair[0] == largest})


def without_interleaving(*case):
    """1F1B."""
    return least({pair: row for pair, row in schedules(*case).items() if pair[1] == 1})


def fewest_chunks(*case):
    """Of the best micro-batch size the simplest schedule."""
    found = schedules(*case)
    best = least(found)
    return best and min(pair for pair in found if pair[0] == best[0])


def without_limit(*case):
    """Time is what counts."""
    return least(schedules(*case[:-1], inf))


def like_1f1b(*case):
    """Chunks hold what 1F1B holds: p micro-batches."""
    return least(
        schedules(*case, held=lambda count, blocks, b, size, plain: plain * blocks * b * size)
    )


def of_one_sequence(*case):
    """block_bytes for each micro-batch."""
    return least(schedules(*case, held=lambda count, blocks, b, size, _: count * blocks * size))


def of_one_block(*case):
    """block_bytes for each stage."""
    return least(schedules(*case, held=lambda count, blocks, b, size, _: count * b * size))


def in_no_groups(*case):
    """Any m is interleaved."""
    return least(schedules(*case, groups=False))


def chunks_first(*case):
    """(chunks, size)."""
    answer = least(schedules(*case))
    return answer and answer[::-1]


def strictly_less(*case):
    """Less than the limit."""
    return least(schedules(*case[:-1], case[-1] - 1))


# 12.4


def allowed(job, leave_out=()):
    """(Decision, Estimate) of all layouts of the exercise; `leave_out` names what is not asked."""
    model, node = job.model, min(job.gpus_per_node, job.num_gpus)
    sizes = [size for size in range(1, job.num_gpus + 1) if job.num_gpus % size == 0]
    for dp, tp, pp, zero in product(sizes, sizes, sizes, range(4)):
        holds = {
            "product": dp * tp * pp == job.num_gpus,
            "node": node % tp == 0,
            "heads": model.num_kv_heads % tp == 0,
            "widths": not any(
                size % tp for size in (model.ffn_width, model.vocab_size, job.sequence_length)
            ),
            "layers": model.num_layers % pp == 0,
            "batch": job.global_batch_size % dp == 0,
            "zero": dp > 1 or zero == 0,
        }
        if all(holds[name] for name in holds if name not in leave_out):
            axes = ParallelConfig(dp=dp, tp=tp, sequence=tp > 1, pp=pp, zero=zero)
            yield from of_axes(job, axes, leave_out)


def of_axes(job, axes, leave_out):
    sequences = job.global_batch_size // axes.dp
    for size in range(1, sequences + 1):
        if sequences % size == 0 and (size & (size - 1) == 0 or "powers" in leave_out):
            for recompute in ("none", "selective", "full"):
                decision = Decision(axes, recompute, size)
                try:
                    yield decision, estimate(job, decision)
                except ConfigError:  # only for what was left out
                    assert leave_out


def best_of(
    job,
    key=lambda found: found.seconds,
    only=lambda decision: True,
    limit=None,
    held=lambda memory: sum(memory.values()),
    leave_out=(),
):
    """The Decision with the least key of those that fit, or None."""
    limit = job.limit if limit is None else limit
    fitting = [
        (decision, found)
        for decision, found in allowed(job, leave_out)
        if held(found.memory) <= limit and only(decision)
    ]
    return min(fitting, key=lambda pair: key(pair[1]), default=(None,))[0]


def right_by_trying(job):
    """All sizes that there are, and of these the allowed ones."""
    return best_of(job)


def the_packages_layouts(job):
    """The package's layouts: nothing is left to search for."""
    return next(decisions(job, Counter()))


def right_by_model_flops(job):
    """The highest MFU: of one job that is the shortest step."""
    return best_of(job, key=lambda found: -found.mfu)


def highest_hfu(job):
    """The GPUs that are busiest."""
    return best_of(job, key=lambda found: -found.hfu)


def smallest(job):
    """What holds least is safest."""
    return best_of(job, key=lambda found: sum(found.memory.values()))


def data_parallel_alone(job):
    """ZeRO divides all there is."""
    return best_of(job, only=lambda d: d.parallel.tp == d.parallel.pp == 1)


def most_tensor_parallel(job):
    """As many GPUs of a node as the model allows compute a layer together."""
    widest = max(
        (d.parallel.tp for d, found in allowed(job) if sum(found.memory.values()) <= job.limit),
        default=1,
    )
    return best_of(job, only=lambda d: d.parallel.tp == widest)


def one_sequence_at_a_time(job):
    """Small micro-batches fit."""
    return best_of(job, only=lambda d: d.micro_batch_size == 1)


def never_recomputed(job):
    """Recomputation takes time."""
    return best_of(job, only=lambda d: d.recompute == "none")


def without_zero(job):
    """Every rank its optimizer."""
    return best_of(job, only=lambda d: d.parallel.zero == 0)


def powers_of_two(job):
    """GPUs come in powers of two."""
    return best_of(
        job,
        only=lambda d: (
            not any(size & (size - 1) for size in (d.parallel.dp, d.parallel.tp, d.parallel.pp))
        ),
    )


def whole_memory(job):
    """All that the device has."""
    return best_of(job, limit=job.device.memory_bytes)


def largest_kind(job):
    """Each kind fits."""
    return best_of(job, held=lambda memory: max(memory.values()))


def time_alone(job):
    """The fastest."""
    return best_of(job, limit=inf)


def always_something(job):
    """If nothing fits, what fits almost."""
    return best_of(job) or best_of(job, key=lambda found: sum(found.memory.values()), limit=inf)


def never_none(job):
    """If nothing fits, that is an error."""
    answer = best_of(job)
    if answer is None:
        raise ConfigError("nothing fits")
    return answer


def with_its_seconds(job):
    """The layout and its time."""
    answer = best_of(job)
    return answer, estimate(job, answer).seconds


def sizes_alone(job):
    """tp, pp and dp."""
    answer = best_of(job)
    return (answer.parallel.tp, answer.parallel.pp, answer.parallel.dp)


def without_sequence(job):
    """Sequence parallelism is another technique."""
    answer = best_of(job)
    if answer is None:
        return None
    axes = answer.parallel
    plain = ParallelConfig(dp=axes.dp, tp=axes.tp, pp=axes.pp, zero=axes.zero)
    return Decision(plain, answer.recompute, answer.micro_batch_size)


# What once passed


def rounds_large_counts(P, L, D, S, recompute):
    """Counts in floats, and makes an int of it."""
    attention = 4.0 * S * D * L
    forward = 2.0 * P + attention
    again = {"none": 0.0, "selective": attention, "full": forward}[recompute]
    return int(3 * forward), int(3 * forward + again)


def three_digits(*given):
    """Nobody plans more exactly than to a tenth of a day."""
    days, mfu = right_by_mfu(*given)
    return round(days, 1), round(mfu, 3)


tied_everywhere = changed(
    "tied_everywhere",
    "A tied matrix is one on every stage.",
    copies=lambda m, stages, s, tp: 1 if m.tied_embedding else (s == 0) + (s == len(stages) - 1),
)


def adds_to_states(stages, states, m, block, head):
    """Adds the activations to the list of states: it is the caller's."""
    for stage in range(len(stages)):
        count = min(m, len(stages) - stage)
        each = stages[stage] * block + (head if stage == len(stages) - 1 else 0)
        states[stage] += count * each
    return states.index(max(states)), max(states)


def always_p(p, num_blocks, n, seconds, block_bytes, limit):
    """1F1B holds p micro-batches: also where there are fewer."""

    def held(count, blocks, b, block_bytes, most):
        return (max(count, p) if blocks == num_blocks // p else count) * blocks * b * block_bytes

    return least(schedules(p, num_blocks, n, seconds, block_bytes, limit, held=held))


def in_a_straight_line(p, num_blocks, n, seconds, block_bytes, limit):
    """From the seconds of one and of two sequences: those of all others."""
    one, two = seconds(1), seconds(2)
    return least(
        schedules(p, num_blocks, n, lambda b: one + (b - 1) * (two - one), block_bytes, limit)
    )


def share_of_the_device(job):
    """A GPU's memory, less a fifth: whatever the job says."""
    return best_of(job, limit=0.8 * job.device.memory_bytes)


def sixty_four_gigabytes(job):
    """What an H100 has, less a fifth."""
    return best_of(job, limit=64e9)


def any_micro_batch(job):
    """All that divide."""
    return best_of(job, leave_out=("powers",))


def across_nodes(job):
    """tp divides what is cut: it may be cut between nodes."""
    return best_of(job, leave_out=("node",))


def unequal_heads(job):
    """Key-value heads may be copied."""
    return best_of(job, leave_out=("heads",))


def unequal_stages(job):
    """Stages need not be equal."""
    return best_of(job, leave_out=("layers",))


def never_without_dp(job):
    """Where there are several GPUs, some hold the same."""
    return best_of(job, only=lambda d: d.parallel.dp > 1 or job.num_gpus == 1)


def four_at_most(job):
    """tp, pp and micro-batches of 1, 2 or 4."""
    return best_of(job, only=lambda d: max(d.parallel.tp, d.parallel.pp, d.micro_batch_size) <= 4)


def never_zero_2(job):
    """ZeRO-1 or 3: 2 is neither."""
    return best_of(job, only=lambda d: d.parallel.zero != 2)


RIGHT_ANSWERS = {
    "flops_per_token": [right_by_products],
    "days_and_mfu": [right_by_mfu],
    "state_bytes": [right_shape_by_shape],
    "fullest_stage": [right_backwards],
    "micro_batches_needed": [right_by_counting],
    "fastest_schedule": [right_from_lists, right_largest_first],
    "find_layout": [right_by_trying, right_by_model_flops],
}

MISTAKES = {
    "flops_per_token": {
        without_attention: "attention's two matmuls, which have no parameters, are missing",
        in_the_model_too: "that includes recomputation",
        forward_alone: "that is only the forward pass",
        backward_once: "together they cost 3 x forward",
        half_the_square: "the whole square counts",
        attention_forward_alone: "for attention's matmuls too",
        one_layer: "every layer has it",
        nothing_again: "the recomputed FLOPs are missing",
        selective_is_full: "selective recomputes attention's two matmuls and nothing else",
        eight_p: "with attention: 2 P + 4 S D L",
        hardware_first: "the two are swapped",
        rounds_large_counts: "only the rounding is wrong",
    },
    "days_and_mfu": {
        model_flops_alone: "HFU counts hardware FLOPs",
        hfu_for_mfu: "that is the HFU",
        hardware_flops_alone: "MFU counts model FLOPs",
        one_gpu: "that is how long a single GPU would take",
        hours_of_each: "GPU-hours are summed over all GPUs",
        giga: "a TFLOP is 10^12 FLOPs, not 10^9",
        in_seconds: "a day has 86,400",
        in_hours: "a day has 24",
        at_the_peak: "that assumes peak FLOP/s",
        percent: "not a percentage",
        peak_of_one: "use the peak of all num_gpus",
        three_digits: "the right number, rounded",
    },
    "state_bytes": {
        tied_is_once: "each stores its matrix, tied or not",
        one_stage_early: "ZeRO-1 does not shard the gradient",
        both_ends: "only the first stage has the embedding",
        tied_is_twice: "embedding and head are one matrix",
        one_norm: "a block has two norms",
        norms_cut: "norms are replicated",
        keys_like_queries: "key and value are narrower than the query",
        vocabulary_whole: "along the vocabulary",
        equal_stages: "stages differ in their number of blocks",
        rounded_down: "round up, or",
        moments_alone: "the float32 master weight",
        tied_everywhere: "a middle stage has neither",
        asks_the_package: "tensor_parallel_parameters of minitron is called",
    },
    "fullest_stage": {
        first_is_fullest: "another stage holds more",
        all_micro_batches: "that is GPipe",
        never_fewer: "cannot hold more than num_micro_batches",
        warm_up_alone: "a stage holds one for itself",
        stages_before: "count the stages after this one",
        one_on_each: "one micro-batch on each stage",
        head_everywhere: "only the last stage holds head_bytes",
        headless: "the last stage also holds head_bytes",
        stateless: "stage i always holds states[i]",
        from_one: "stages are counted from 0",
        bytes_alone: "two ints: a stage, and its bytes",
        adds_to_states: "build a new one",
    },
    "micro_batches_needed": {
        over_the_work: "relative to the compute time",
        any_number: "interleaved 1F1B requires a multiple of p",
        without_chunks: "with v chunks the bubble is v times shorter",
        all_ranks: "a rank waits for the p - 1 other ranks",
        always_groups: "plain 1F1B takes any number",
        rounds_down: "with fewer micro-batches the bubble exceeds 1/part",
        less_than: "a bubble of exactly 1/part is allowed",
        none_for_one_rank: "a step has at least one micro-batch",
        a_fraction: "an int",
    },
    "fastest_schedule": {
        smallest_bubble: "the smallest bubble does not make the shortest step",
        like_1f1b: "interleaved 1F1B holds more than 1F1B",
        largest_micro_batch: "the largest micro-batch that fits is not the fastest",
        without_interleaving: "more chunks shorten the bubble",
        without_limit: "skip schedules that hold more than the limit",
        of_one_sequence: "block_bytes is per sequence",
        of_one_block: "block_bytes is per block",
        in_no_groups: "interleaved 1F1B needs a multiple of",
        chunks_first: "the micro-batch size comes first",
        strictly_less: "a schedule that needs exactly the limit fits",
        fewest_chunks: "more chunks shorten the bubble",
        always_p: "but never more than m",
        in_a_straight_line: "need not lie on a straight line",
    },
    "find_layout": {
        highest_hfu: "that has the highest HFU",
        time_alone: "skip layouts that do not fit",
        smallest: "free memory makes no step faster",
        data_parallel_alone: "the fastest layout without tensor and pipeline parallelism",
        most_tensor_parallel: "the largest tp is not always the fastest",
        one_sequence_at_a_time: "with micro-batches of 1",
        never_recomputed: "without recomputation",
        powers_of_two: "a layout fits",
        whole_memory: "less than the device's memory",
        always_something: "nothing fits",
        with_its_seconds: "one Decision",
        share_of_the_device: "Compare with job.limit itself",
        sixty_four_gigabytes: "no other number",
        any_micro_batch: "is not a power of two",
        across_nodes: "GPUs of a node",
        unequal_heads: "does not divide num_kv_heads",
        unequal_stages: "does not divide",
        never_without_dp: "try every size of dp, tp and pp",
        four_at_most: "try every micro-batch size",
        never_zero_2: "the fastest layout with at most ZeRO-1",
        the_packages_layouts: "decisions of minitron is called",
    },
}

FURTHER = {
    "flops_per_token": {one_operation: "a multiply-add counts as 2", a_float: "exact integers"},
    "days_and_mfu": {days_alone: "two numbers: days and MFU"},
    "state_bytes": {
        no_final_norm: "the final one, on the last stage",
        two_in_the_feed_forward: "gate, up and down",
        all_blocks: "of its own stage",
        not_cut: "tp shards the matrices",
        bytes_rounded: "round up the number of parameters",
        one_stage_late: "ZeRO-1 shards the optimizer state",
        shares: "return exact integers",
    },
    "fastest_schedule": {holds_least: "that needs the least memory"},
    "find_layout": {
        without_zero: "without ZeRO",
        largest_kind: "not each kind by itself",
        never_none: "your code raised ConfigError",
        sizes_alone: "one Decision",
        without_sequence: "sequence is False",
    },
}
