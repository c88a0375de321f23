"""What the widgets draw: a function per widget, from what its controls say to a `Drawing`.

A figure has the same size whatever they say, so nothing jumps. Every number comes from the
formulas of `minitron.cost` and the datasheets in `minitron.plan`.
"""

from matplotlib.figure import Figure

from minitron import cost
from minitron.config import ModelConfig
from minitron.cost.sharding import STAGES, zero_holdings
from minitron.cost.tensor import kv_heads_per_rank, share
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from minitron.plan.hardware import DEVICES
from teaching.figures import (
    Block,
    crossing,
    memory_bars,
    pipeline,
    plain_bytes,
    timeline,
)
from teaching.figures_ring import ring_frame, ring_sums
from teaching.overlap import (
    Compute,
    compute_in_proportion,
    exposed_seconds,
    gradient_sizes,
    in_buckets,
    step_lanes,
    transfers,
)

Drawing = tuple[Figure, str]
"""A figure, and the sentence that states its numbers."""
H100 = DEVICES["H100-SXM-80GB"]
H100_LIMIT = f"beyond an H100's {H100.memory_bytes / 1e9:.1f} GB"
GPUS_PER_NODE = 8

# In the proportions of Llama 3: heads of 128, 8 key-value heads, F = 3.5 D.
HEAD_WIDTH, NUM_KV_HEADS, VOCAB_SIZE = 128, 8, 128_256


def draw_memory(
    num_layers: int, width: int, sequence_length: int, micro_batch: int, recipe: str
) -> Drawing:
    """Draw the bytes of training one Llama-like model, by the formulas of `minitron.cost`.

    `recipe` is a key of `cost.RECIPES`; attention is the fused kernel, nothing is recomputed.
    """
    model = ModelConfig(
        vocab_size=VOCAB_SIZE,
        max_sequence_length=sequence_length,
        num_layers=num_layers,
        width=width,
        num_heads=width // HEAD_WIDTH,
        num_kv_heads=NUM_KV_HEADS,
        ffn_width=7 * width // 2,
        tied_embedding=False,
    )
    parts = cost.RECIPES[recipe]
    count = cost.num_parameters(model)
    bytes_per_value = parts.parameter  # activations have the precision of the weights they meet
    logits = 4 * micro_batch * sequence_length * VOCAB_SIZE  # in float32, as the loss needs them
    kinds = {
        "parameter": parts.parameter * count,
        "gradient": parts.gradient * count,
        "optimizer state": (parts.master + parts.optimizer_state) * count,
        "activation": cost.activation_bytes(model, micro_batch, sequence_length, bytes_per_value),
        "temporary": 2 * logits,  # the gradients that enter and leave log-softmax's backward pass
    }

    total, activations, temporary = sum(kinds.values()), kinds["activation"], kinds["temporary"]
    state = total - activations - temporary
    sentence = (
        f"{count / 1e9:.2f} billion parameters: {plain_bytes(state)} of weights, gradients and "
        f"optimizer state, {plain_bytes(activations)} of activations, and {plain_bytes(temporary)} "
        f"of temporary tensors make {plain_bytes(total)}, {total / H100.memory_bytes:.0%} of an "
        "H100's memory."
    )
    figure = memory_bars({}, {"one device": kinds}, H100.memory_bytes, H100_LIMIT)
    return figure, sentence


def draw_buckets(
    bucket_MB: int, latency_us: int, bandwidth_GB_s: int, tokens_per_rank: int
) -> Drawing:
    """Draw forward, backward and the buckets of Llama 3.2 1B on 64 H100s, predicted.

    Gradients are bfloat16; compute runs at 40 % of the dense peak. The backward pass begins with
    the head, whose matrix is the embedding's: its gradient is complete at the end.
    """
    model = cost.PUBLISHED["Llama 3.2 1B"]
    sizes = gradient_sizes(model)
    per_token = cost.forward_flops_per_token(model, min(tokens_per_rank, 8192))
    forward = tokens_per_rank * per_token / (0.4 * H100.bf16_flops)

    head = 2 * forward * 2 * model.vocab_size * model.width / per_token  # of the backward pass
    blocks = compute_in_proportion([0, *sizes[1:]], forward + head, 2 * forward - head)
    compute = Compute(forward, blocks.ready)
    buckets = in_buckets(sizes, bucket_MB * 10**6)
    sent = transfers(compute.ready, sizes, buckets, 64, latency_us * 1e-6, bandwidth_GB_s * 1e9)
    exposed = exposed_seconds(compute, sent)
    sentence = (
        f"{plain_bytes(sum(sizes))} of gradients in {len(buckets)} buckets: the network is busy "
        f"for {1e3 * sum(end - start for start, end in sent):.0f} ms, of which "
        f"{1e3 * exposed:.0f} ms are exposed, {exposed / (compute.backward + exposed):.0%} of the "
        "step."
    )
    return timeline({}, step_lanes(compute, sent)), sentence


def draw_ring(ranks: int, step: int) -> Drawing:
    """Draw the ring all-reduce after `step` steps, or after its last one."""
    last = 2 * (ranks - 1)
    step = min(step, last)
    finished = sum(len(summed) == ranks for summed in ring_sums(ranks, step)[0])
    sentence = (
        f"After step {step} of {last}, each of {ranks} ranks has sent {step}/{ranks} of the "
        f"tensor and holds {finished} of its {ranks} sums."
    )
    figure = ring_frame(ranks, step)
    figure.set_size_inches(7.0, 3.6)  # the same for any number of ranks, so that nothing jumps
    return figure, sentence


def draw_stages(billions: int, ranks: int, recipe: str) -> Drawing:
    """Draw what a rank holds with ZeRO-0 to 3: weights, gradients, optimizer state, by formula."""
    num_parameters = billions * 10**9
    bars = {
        f"ZeRO-{stage}": zero_holdings(num_parameters, ranks, stage, cost.RECIPES[recipe])
        for stage in STAGES
    }
    totals = {name: sum(kinds.values()) for name, kinds in bars.items()}
    fitting = [name for name, total in totals.items() if total <= H100.memory_bytes]
    sentence = (
        f"{billions:,} billion parameters on {ranks:,} ranks: "
        + ", ".join(f"{name} {plain_bytes(total)}" for name, total in totals.items())
        + (f"; {fitting[0]} is the first that fits." if fitting else "; none of them fits.")
    )
    return memory_bars({}, bars, H100.memory_bytes, H100_LIMIT), sentence


def draw_tensor(model: str, ranks: int, tokens: int, link: str) -> Drawing:
    """Draw the products of one block on `ranks` H100s, and the all-reduces that they wait for.

    All at the datasheet's peak, in bfloat16, latency left out. `model` is a key of
    `cost.PUBLISHED`; `link` is one of `LINKS`.
    """
    config = cost.PUBLISHED[model]
    alone, cut = (block_seconds(config, size, tokens) for size in (1, ranks))
    reduction = all_reduce_seconds(2 * tokens * config.width, ranks, link)
    free, _ = block_lanes(cut, 0.0)
    compute, network = block_lanes(cut, reduction)
    figure = timeline(
        {}, {"each rank": compute, f"{link}: all-reduces": network, "with a free link": free}
    )
    figure.axes[0].set_xlabel("time of one block, forward and backward (ms)")

    before = 3e3 * sum(map(sum, alone.values()))
    now = max(block.end for block in [*compute, *network])
    nodes = ranks // ranks_per_node(ranks, link)
    sentence = (
        f"One block of {model}, {tokens:,} tokens: {before:.2f} ms on one rank, {now:.2f} ms on "
        f"{ranks} in {nodes} node{'s' if nodes > 1 else ''}. That is {before / now:.1f} times as "
        f"fast; {1 - free[-1].end / now:.0%} of the time is waiting for the link."
    )
    return figure, sentence


LINKS = ("NVLink", "InfiniBand")
"""What connects the ranks: NVLink inside nodes of eight, or InfiniBand alone, a rank a node."""


def ranks_per_node(ranks: int, link: str) -> int:
    return min(ranks, GPUS_PER_NODE) if link == "NVLink" else 1


def all_reduce_seconds(num_bytes: float, ranks: int, link: str) -> float:
    """Time of an all-reduce on H100s by bandwidth alone, in levels if it leaves the node."""
    inside, across = cost.Link(0.0, H100.nvlink_bandwidth), cost.Link(0.0, H100.nic_bandwidth)
    per_node = ranks_per_node(ranks, link)
    return cost.hierarchical_all_reduce_seconds(
        num_bytes, per_node, ranks // per_node, inside, across
    )


def block_seconds(model: ModelConfig, ranks: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Forward time of one rank's products at an H100's peak, of attention and feed-forward.

    First of the products that read the block's input, then of those after them.
    """
    D, sequence_length = model.width, min(tokens, model.max_sequence_length)
    query_width = share("model.num_heads", model.num_heads, ranks) * model.head_width
    kv_width = kv_heads_per_rank(model, ranks) * model.head_width
    ffn_width = share("model.ffn_width", model.ffn_width, ranks)
    readers = 1 if model.family == "gpt" else 2  # up, and llama's gate
    flops = {
        "attention": (
            2 * D * (query_width + 2 * kv_width),
            2 * D * query_width + 4 * sequence_length * query_width,
        ),
        "feed-forward": (2 * D * readers * ffn_width, 2 * D * ffn_width),
    }
    return {
        name: (tokens * first / H100.bf16_flops, tokens * second / H100.bf16_flops)
        for name, (first, second) in flops.items()
    }


def block_lanes(
    seconds: dict[str, tuple[float, float]], reduction: float
) -> tuple[list[Block], list[Block]]:
    """Compute and link of one block, in ms; `seconds` are those of `block_seconds`.

    An all-reduce follows attention and feed-forward. In the forward pass everything waits for it.
    In the backward pass it starts with the weight gradients of the products that read the input,
    which take as long as these took in the forward pass.
    """
    compute, network, now = [], [], 0.0
    halves = [("forward", name, sum(times), 0.0) for name, times in seconds.items()]
    halves += [
        ("backward", name, 2 * sum(times), times[0]) for name, times in reversed(seconds.items())
    ]
    for phase, name, duration, meanwhile in halves:
        end = now + duration
        start = end - meanwhile
        compute.append(Block(phase, 1e3 * now, 1e3 * end, name))
        if reduction > 0:
            network.append(
                Block("communication", 1e3 * start, 1e3 * (start + reduction), "all-reduce")
            )
        now = max(end, start + reduction)
    return compute, network


TENSOR_RANKS = (1, 2, 4, 8, 16)


def draw_sequence(model: str, sequence_length: int, micro_batch: int, attention: str) -> Drawing:
    """Draw what a rank holds of all blocks' activations, in four ways, over the number of ranks.

    `model` is a key of `cost.PUBLISHED`; values have 2 bytes.
    """
    config = cost.PUBLISHED[model]

    def gigabytes(ranks: int, is_sequence_cut: bool, recompute: str) -> float:
        layout = cost.Layout(ranks, is_sequence_cut)
        block = cost.activation_bytes_per_layer(
            config, micro_batch, sequence_length, 2, attention, recompute, layout=layout
        )
        return config.num_layers * block / 1e9

    ways = {
        "tensor alone": (False, "none"),
        "+ sequence": (True, "none"),
        "+ selective": (False, "selective"),
        "+ both": (True, "selective"),
    }
    lines = {name: [gigabytes(ranks, *way) for ranks in TENSOR_RANKS] for name, way in ways.items()}
    figure = crossing(
        TENSOR_RANKS,
        lines,
        "tensor-parallel ranks",
        "activations (GB per rank)",
        limit=H100.memory_bytes / 1e9,
        limit_label=H100_LIMIT,
    )
    figure.axes[0].minorticks_off()
    figure.axes[0].set_xticks(TENSOR_RANKS, [str(ranks) for ranks in TENSOR_RANKS])

    node = TENSOR_RANKS.index(GPUS_PER_NODE)
    sentence = (
        f"All blocks of {model}, {micro_batch} x {sequence_length:,} tokens, {attention} "
        f"attention, {GPUS_PER_NODE} ranks: "
        + ", ".join(f"{name} {plain_bytes(1e9 * held[node])}" for name, held in lines.items())
        + " on each."
    )
    return figure, sentence


SCHEDULES = {
    "sequential": sequential,
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "interleaved 1F1B": interleaved,
    "ZB-H1": zero_bubble,
    "ZB-V": zb_v,
    "DualPipeV": dualpipe_v,
}


def fewest_micro_batches(schedule: str, ranks: int) -> int:
    """Return the fewest micro-batches with which a schedule runs: 2 a rank in DualPipeV."""
    return 2 * ranks if schedule == "DualPipeV" else 1


def draw_schedule(schedule: str, ranks: int, micro_batches: int, chunks: int) -> Drawing:
    """Draw a step as simulated: forward 1, backward 2, or I and W 1 each; messages take no time.

    These are times of all of a rank's layers. `schedule` is a key of `SCHEDULES`; `chunks` are
    those of the interleaved one.
    """
    extra = (chunks,) if schedule == "interleaved 1F1B" else ()
    plan = SCHEDULES[schedule](ranks, micro_batches, *extra)
    num_chunks = plan.num_stages // ranks
    each = 1 / num_chunks
    step = simulate(plan, {"F": each, "B": 2 * each, "I": each, "W": each})

    figure = pipeline(step, unit="forward passes of a rank")
    figure.set_size_inches(9.0, 4.0)  # the same for any number of ranks, so that nothing jumps
    held = peak_activations(plan)[0] / num_chunks
    sentence = (
        f"{schedule}{f' with {chunks} chunks a rank' if extra else ''}, {ranks} ranks, "
        f"{micro_batches} micro-batches: idle for {step.bubble_of_total:.1%} of the step, "
        f"{step.bubble_of_ideal:.1%} of what the work alone takes; the first rank holds the "
        f"activations of at most {held:g} micro-batch{'es' if held != 1 else ''}."
    )
    return figure, sentence
