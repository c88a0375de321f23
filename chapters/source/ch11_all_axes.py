# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # All axes together: one training on every layout
#
# **70 minutes. No GPU. Exercises 11.1 to 11.5.**
#
# *You need:* chapter 4's averaged gradients, chapter 6's ZeRO, chapter 7's columns and rows,
# chapter 8's divided sequence, and chapter 9's stages.
#
# *You will be able to:*
# - **place** each axis of a layout on the links of a cluster, and predict its bytes and seconds;
# - **say** for each number of a step over which ranks it must be summed, and over which not;
# - **move** a run from one layout to another, also after a rank has died.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import io
import math
import os
import signal
import tempfile
import textwrap
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path

import torch
import torch.distributed as dist

# %%
from minitron import checkpoint, cost
from minitron.launch import RankError, run
from minitron.comm.mesh import make_mesh
from minitron.config import (
    Config, ConfigError, DataConfig, ModelConfig, ParallelConfig, TrainConfig,
)
from minitron.corpus.stories import write_stories
from minitron.corpus.story_grammar import VOCABULARY
from teaching.check import check
from teaching.figures import show, wire
from teaching.figures_grid import rank_grid
from minitron.dataset import TokenDataset

# %%
from minitron.measure.calls import merged
from minitron.proof.difference import Moment, first_difference
from minitron.measure.ledger import Ledger
from minitron.measure.metrics import read_metrics
from minitron.proof.oracle import as_arrays, assert_same_training, small_model
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.grid import Grid
from minitron.parallel.parts import boxes_of
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.data.zero import apply_zero1

# %%
from minitron.parallelize import build, lay_out, parallelize
from minitron.plan.decide import decide
from minitron.plan.estimate import estimate, memory_of
from minitron.plan.hardware import DEVICES
from minitron.plan.job import USABLE, Decision, Job
from minitron.plan.search import Candidate, search
from minitron.plan.traffic import link
from minitron.run import Run
from minitron.step import train_step
from minitron.train import train

torch.set_num_threads(1)
GB, cpu = 1e9, torch.device("cpu")
H100 = DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# Llama 3.1 70B is to be trained on 256 H100s, 32 nodes of eight. The chapters before have left
# switches: data parallelism with one of four stages of ZeRO, tensor parallelism with the sequence
# divided, stages, recomputation, and the size of a micro-batch. In how many ways can they be set?
# In how many does it fit? And does it matter which one you take?
#
# In a pipeline this list stops at ZeRO-1, to keep it short. ZeRO-2 and ZeRO-3 train there too. By
# default they communicate for every micro-batch, and a pipeline needs many; they can also hold more
# and communicate once a step. Chapter 12 searches them all.

# %%
llama, S_llama = cost.PUBLISHED["Llama 3.1 70B"], 8192
big = Job(llama, num_gpus=256, device=H100, sequence_length=S_llama, global_batch_size=1024)


def all_layouts(job):
    """Every setting of the switches, in powers of two."""
    powers = [2**k for k in range(7)]
    for tp, pp, size in product(powers, powers, (1, 2, 4)):
        dp = job.num_gpus // (tp * pp)
        if job.model.num_heads % tp or not 1 <= dp * size <= job.global_batch_size:
            continue
        stages_of_zero = range(1 if dp == 1 else 4 if pp == 1 else 2)
        for zero, recompute in product(stages_of_zero, ("none", "selective", "full")):
            axes = ParallelConfig(dp=dp, tp=tp, sequence=tp > 1, pp=pp, zero=zero)
            yield Decision(axes, recompute, size)


# %%
def fits(job, layout):
    return sum(memory_of(job, layout).values()) <= job.limit


steps = {layout: estimate(big, layout) for layout in all_layouts(big) if fits(big, layout)}
fastest = min(steps, key=lambda layout: steps[layout].seconds)
slowest = max(steps, key=lambda layout: steps[layout].seconds)


# %% tags=["output-question", "nbval-check-output"]
print(f"{len(list(all_layouts(big)))} layouts, of which {len(steps)} fit into {big.limit / GB:.0f} "
      f"GB, {USABLE:.0%} of a GPU's memory")
for name, layout in (("fastest", fastest), ("slowest", slowest)):
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in steps[layout].parts.items())
    print(f"{name}: {layout}\n  {steps[layout].seconds:.1f} s a step:")
    print(textwrap.fill(parts, 90, initial_indent="  ", subsequent_indent="  "))
print(f"{steps[slowest].seconds / steps[fastest].seconds:.1f} times as long")

# %% [markdown]
# More than half of them do not fit. (A fifth of the memory is left for CUDA, NCCL and
# fragmentation.) Of those that do, the slowest takes eleven times as long as the fastest. Some
# of that is recomputation; most of it is waiting along one axis, tp. The seconds come from the
# package's estimator, which adds up what a layout computes, sends and waits for; chapter 12 tests
# it against published step times. Why does one axis cost so much?

# %% [markdown]
# ## 2. Estimate
#
# Take one layout: tensor parallelism over 8 ranks, 4 stages, and 8 copies of that, which divide the
# optimizer's state (ZeRO-1). A step has 1,024 sequences, so each of the 8 copies gets 128 of them,
# one at a time. In a node of eight GPUs each has NVLink to the others, and one network card to all
# other nodes.
#
# **Predict.** Along which axis does a GPU send most in a step, and along which least?

# %%
sizes, m = {"pp": 4, "dp": 8, "tp": 8}, 1024 // 8
layers = llama.num_layers // sizes["pp"]
each = cost.Layout(sizes["tp"], sequence_parallel=True)
per_layer = cost.tensor_parallel_volume(1, S_llama, llama.width, 2, 0, each).sent
parameters = cost.num_parameters(llama) // (sizes["tp"] * sizes["pp"])
sent = {
    "tp": m * layers * per_layer,
    "pp": cost.pipeline_volume(1, S_llama // sizes["tp"], llama.width, 2, 4, m, rank=1).sent,
    "dp": cost.zero_volume(parameters, 2, sizes["dp"], 0, stage=1).sent,
}

# %% tags=["output-traffic", "nbval-check-output"]
tokens = 1024 * S_llama / math.prod(sizes.values())
work = tokens * cost.training_flops_per_token(llama, S_llama) / (0.5 * H100.bf16_flops)
print("a GPU sends in a step    GB   s over NVLink   s over its network card")
for axis, size in sorted(sent.items(), key=lambda item: -item[1]):
    print(f"{axis:18} {size / GB:8.1f} {size / H100.nvlink_bandwidth:15.2f} "
          f"{size / H100.nic_bandwidth:25.2f}")
print(f"computing, at half of the peak: {work:.0f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# tp sends activations for *every layer* of every micro-batch, forward and backward. pp sends for
# each micro-batch one activation forward and one gradient back, however many layers a stage has. dp
# sends gradients and weights once a step, however many micro-batches it has. Here tp is first by
# far, and pp last.
#
# </details>
#
# The three axes form a grid, and ranks are numbered through it in row-major order: the last axis
# varies fastest, so ranks that differ only along it are neighbors. Each node hosts eight
# consecutive ranks. The *order* in which you list the axes therefore decides which axis stays
# inside a node. There are six possible orders.
#
# A group that fits in one node communicates over NVLink. A ring that spans several nodes uses one
# network card per rank it has in each node. The package's `link` computes the resulting bandwidth:
# the share of the datasheet's that large collectives reach.
#
# **Predict.** How many of the six orders are good?


# %%
def seconds(axis, order):
    """Of sending along an axis, from how far apart the ranks of its groups are."""
    stride = math.prod(sizes[other] for other in order[order.index(axis) + 1:])
    return sent[axis] / link(big, sizes[axis], stride, is_ring=axis != "pp").bandwidth


# %% tags=["output-orders", "nbval-check-output"]
print("outermost to innermost    seconds of sending")
sending = {order: sum(seconds(axis, order) for axis in order) for order in permutations(sizes)}
for order in sorted(sending, key=sending.get):
    print(f"{' '.join(order):25} {sending[order]:18.1f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Two: the ones with tp innermost. They perform about the same; Megatron-LM and this package put pp
# outermost, Llama 3 puts dp there (Llama Team 2024, section 3.3.2). In the other four,
# tensor-parallel traffic crosses nodes, and because a ring is only as fast as its slowest link, a
# step communicates for longer than it computes, in three of them almost three times as long.
#
# </details>
#
# This is why tp is seldom larger than a node, and why the slowest layout of section 1 is slow.

# %% [markdown]
# ## 3. Picture
#
# Small enough to see: eight ranks, two along each axis, on two nodes of four.

# %% tags=["figure-grid"]
show(rank_grid({"pp": 2, "dp": 2, "tp": 2}, gpus_per_node=4), alt=(
    "Eight ranks as a grid of pp x dp x tp: tensor-parallel neighbors and data-parallel copies "
    "share a node, the two stages are on two nodes."
))

# %% [markdown]
# **Predict.** Which ranks are in a group with rank 5: along tp, along dp, along pp?
#
# ## 4. By hand
#
# The grid is the numbers 0 to 7 in the shape (pp, dp, tp). A rank's place is where its number
# stands, and a group along an axis is a line of numbers in that direction. PyTorch calls such a
# grid with its groups a *device mesh*; the package's is `make_mesh`.

# %%
AXES = {"pp": 2, "dp": 2, "tp": 2}
grid = torch.arange(8).view(tuple(AXES.values()))


def place_of(rank):
    """Where a rank is along each axis."""
    return dict(zip(AXES, (grid == rank).nonzero()[0].tolist(), strict=True))


def groups_along(axis):
    """Who differs along `axis` alone: all groups that there are."""
    lines = grid.movedim(list(AXES).index(axis), -1)
    return lines.reshape(-1, AXES[axis]).tolist()


# %% tags=["output-groups", "nbval-check-output"]
for rank in (0, 1, 5):
    print(f"rank {rank}: " + ", ".join(f"{axis} {i}" for axis, i in place_of(rank).items()))
for axis in reversed(AXES):
    print(f"groups along {axis}:", *groups_along(axis))

# %% [markdown]
# Rank 5 is in a group with 4 along tp, with 7 along dp, with 1 along pp.
#
# Now for real. Each rank has eight zeros, but for a 1 at its own number, and sums them along each
# axis with an all-reduce: the ones show who took part.


# %%
def my_groups(world):
    """This rank's group along each axis."""
    own = {}
    for axis in AXES:
        for ranks in groups_along(axis):
            made = dist.new_group(ranks)
            if world.rank() in ranks:
                own[axis] = made
    return own


# %%
def who_is_in_the_sum(world):
    heard = {}
    for axis, group in my_groups(world).items():
        heard[axis] = torch.eye(8)[world.rank()]
        dist.all_reduce(heard[axis], group=group)
    return {axis: numbers.nonzero().flatten().tolist() for axis, numbers in heard.items()}


# %% tags=["output-sums", "nbval-check-output"]
for rank, heard in enumerate(run(who_is_in_the_sum, 8)):
    print(f"rank {rank} has summed over " + ", ".join(
        f"{axis}: {ranks[0]} and {ranks[1]}" for axis, ranks in reversed(heard.items())))

# %% [markdown]
# In `my_groups` every rank makes *all* groups, also those that it is not in. **Predict.** Why? What
# happens if each makes its own three alone?


# %%
def only_my_groups(world):
    for axis in AXES:
        [own] = (ranks for ranks in groups_along(axis) if world.rank() in ranks)
        dist.all_reduce(torch.eye(8)[world.rank()], group=dist.new_group(own))


def report(error):
    """What the launcher says, without the lines of our code."""
    for line in str(error).splitlines():
        print(line.split(" or an earlier call")[0].split(", cell")[0])


# %% tags=["output-own-groups"]
try:
    run(only_my_groups, 8, timeout=5)
except RankError as error:
    report(error)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `dist.new_group` is a call of all ranks: they count their calls to know which group is meant, and
# the members find each other by that number. Here the first call of rank 0 means one group and that
# of rank 2 another. They look for each other in the same place: whoever gets through may have
# summed with a rank of another group, and most of them wait for ever.
#
# </details>

# %% [markdown]
# ### A step on all three axes
#
# A model to see through: two stages, each of them tanh(x A) B. Along tp, A is cut by columns and B
# by rows, so that each rank makes a *summand* of the output (chapter 7). Along pp, a rank has one
# of the stages (chapter 9). Along dp, it has its part of the samples (chapter 4).
#
# **Predict.** Which numbers must be summed over which axis, and how often in a step? Write it down
# before you read the cells.

# %%
D, F = 8, 16
random = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
A, B = random(2, D, F) / D**0.5, random(2, F, D) / F**0.5  # of both stages
inputs, targets = random(2, 6, D)


# %%
def through(x, columns, rows):
    return torch.tanh(x @ columns) @ rows


def summed(tensor, group):
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def received(like, source, group):
    tensor = torch.empty_like(like)
    dist.recv(tensor, group=group, group_src=source)
    return tensor


# %%
def forward_and_backward(groups, at, columns, rows):
    """Add to the gradients of this rank's part of its stage, from its part of the samples."""
    x, target = (samples.chunk(2)[at["dp"]] for samples in (inputs, targets))
    is_first = at["pp"] == 0
    x = (x if is_first else received(x, 0, groups["pp"])).clone().requires_grad_()
    out_partial = through(x, columns, rows)
    out = summed(out_partial, groups["tp"])
    if is_first:
        dist.send(out, group=groups["pp"], group_dst=1)
    grad = received(out, 1, groups["pp"]) if is_first else 2 * (out - target) / targets.numel()
    out_partial.backward(grad)  # a summand's gradient is that of the sum
    if not is_first:
        dist.send(summed(x.grad, groups["tp"]), group=groups["pp"], group_dst=0)


# %%
def step_by_hand(world):
    """This rank's place, its gradients, and the norm of the whole model's gradient."""
    groups, at = my_groups(world), place_of(world.rank())
    columns = A[at["pp"]].chunk(2, dim=1)[at["tp"]].clone().requires_grad_()
    rows = B[at["pp"]].chunk(2, dim=0)[at["tp"]].clone().requires_grad_()
    forward_and_backward(groups, at, columns, rows)
    grads = [summed(weight.grad, groups["dp"]) for weight in (columns, rows)]
    square = sum(grad.square().sum() for grad in grads)
    for axis in ("tp", "pp"):
        square = summed(square, groups[axis])
    return at, grads, square.sqrt()


# %%
def alone():
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    out = through(through(inputs, a[0], b[0]), a[1], b[1])
    ((out - targets).square().sum() / targets.numel()).backward()
    return a.grad, b.grad


# %% tags=["output-byhand"]
whole_a, whole_b = alone()
norm = math.hypot(whole_a.norm(), whole_b.norm())
print("rank   place            gradients off by   norm   of one process")
for rank, (at, (a, b), found) in enumerate(run(step_by_hand, 8)):
    own_a = whole_a[at["pp"]].chunk(2, dim=1)[at["tp"]]
    own_b = whole_b[at["pp"]].chunk(2, dim=0)[at["tp"]]
    error = max((a - own_a).abs().max(), (b - own_b).abs().max())
    print(f"{rank:4}   {'pp {pp} dp {dp} tp {tp}'.format(**at)} {error:18.0e} {found:8.4f} "
          f"{norm:12.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# - Summands of a stage's output, over tp, for each micro-batch; and in the backward pass those of
#   the gradient of its input.
# - Gradients of the weights, over dp, once a step. Not over tp and not over pp: there the ranks
#   hold other weights.
# - The square of the norm, over tp and pp, which hold other weights. Not over dp: after the sum,
#   its ranks have the same gradients.
#
# </details>
#
# That is all of training on three axes. The rule behind it: **sum over an axis what its
# ranks have different parts of, and nothing that they have copies of.**

# %% [markdown]
# ## 5. Traps
#
# The story model, on 8 ranks, with the package's own parts. Who holds what is less tidy than in
# section 4. Along tp, the norms are whole on every rank, and the only key-value head too.
# Along pp, the embedding is tied to the head: the first and the last stage have a copy each.

# %%
workspace = tempfile.TemporaryDirectory()
folder = Path(workspace.name) / "stories"
write_stories(folder, num_tokens=60_000)
(folder / "tokenizer.json").unlink()  # or each run below would end with a story
S, B_all, CLIP = 32, 8, 0.3
dataset = TokenDataset(folder, "train", S, seed=0)
V = -(-len(VOCABULARY) // 8) * 8  # so that up to 8 ranks divide it
shape = ModelConfig("llama", V, S, 4, 32, 4, 1, 64)


# %%
def trained(group, layout, change, num_steps):
    """Losses, norms, the first step's gradients as they were clipped; a norm's weight at last."""
    torch.set_default_dtype(torch.float64)
    config = Config(shape, DataConfig(sequence_length=S), TrainConfig(), layout)
    model, parallel = build(config, lay_out(layout, group.size(), cpu), cpu)
    change(parallel, group)
    optimizer, history, record = parallel.shard(torch.optim.AdamW(model.parameters())), [], None
    for step in range(num_steps):
        index, count = parallel.data_part
        rows = dataset.batch(step * B_all, B_all)[index::count]
        pairs = [(row[:, :-1], row[:, 1:]) for row in rows.split(1)]
        history.append(map(float, train_step(model, optimizer, pairs, 3e-3, CLIP, parallel)))
        record = record or [Moment(0, "gradient", as_arrays(parallel.full_gradients()))]
    weight = next(weight for name, weight in model.named_parameters() if "norm" in name)
    return *zip(*history, strict=True), record, weight.detach()


# %% [markdown]
# ### A norm over the wrong ranks
#
# Clipping needs the norm of the whole gradient. Three ways to get it wrong: take this rank's own
# (what `torch.nn.utils.clip_grad_norm_` does with plain tensors); sum the squares over all ranks;
# sum them over tp and pp, as in section 4, and forget the copies.
#
# **Predict.** Which of them makes the norm too large, and which too small? What does the loss show?


# %%
def sum_over(axes, parallel, parameters, max_norm):
    """Clip by the squares of all that the ranks along `axes` hold."""
    groups = {"tp": parallel.tensor.group, "pp": parallel.pipeline.group,
              "dp": parallel.data.group}
    like = torch.zeros(())
    return clip_pieces(parameters, max_norm, like, [groups[axis] for axis in axes])


def clip_over(*axes):
    """Clip so, in place of what the package does."""
    def change(parallel, group):
        parallel.clip = partial(sum_over, axes, parallel)
    return change


# %%
RULES = {
    "copies counted once": lambda parallel, group: None,  # the package's
    "this rank's own": clip_over(),
    "sum over all ranks": clip_over("tp", "pp", "dp"),
    "sum over tp and pp": clip_over("tp", "pp"),
}
layout = ParallelConfig(tp=2, pp=2)
[reference] = run(trained, 1, ParallelConfig(), RULES["copies counted once"], 20)


def named(expected, by_rank):
    """What the oracle's comparison says of the first gradients."""
    found = first_difference(expected, by_rank) or "the same gradients"
    return textwrap.fill(found.splitlines()[0], 68, subsequent_indent="      ")


# %% tags=["output-norm"]
losses, norms, expected, _ = reference
print(f"one process            norm {norms[0]:.4f}, loss after 10 steps {losses[9]:.3f}")
for name, change in RULES.items():
    by_rank = run(trained, 8, layout, change, 10, watch=False, timeout=90)
    losses, norms, records, weights = zip(*by_rank, strict=True)
    first = sorted({f"{of_rank[0]:.4f}" for of_rank in norms})
    apart = (weights[0] - weights[1]).abs().max()  # of ranks 0 and 1, neighbors along tp
    print(f"{name:22} norm {' '.join(first)}, loss after 10 steps {losses[0][-1]:.3f}\n"
          f"    {named(expected, records)}\n    two copies of a weight, then: {apart:.0e} apart")

# %% [markdown]
# <details><summary>Answer</summary>
#
# A part of the gradient has a smaller norm than the whole, and each rank has another one: it scales
# its gradients by a factor of its own. So parts of one matrix no longer fit together, and copies of
# one weight drift apart. What is counted twice makes the norm too large, and the run clips too
# hard. The loss shows none of it: AdamW divides the factor away, as in chapters 4 and 9.
#
# </details>
#
# The **oracle**'s comparison (with one process, from chapter 4), here of clipped gradients, names
# the first gradient that is wrong. Two relatives are from the field. torchtitan's norm was that of
# a stage: summed along tp, not along pp (pytorch/torchtitan, issue 596). TransformerEngine marked
# weights that all tp ranks hold as divided; on a small DeepSeek-V3 with tp 8 the norm came out 1.36
# times too large (ROCm/TransformerEngine, pull request 715).
#
# ### Other samples for every rank
#
# Data loaders ask for the number of ranks and for their own number: `DistributedSampler` takes
# those of the *world* if it is told nothing. DeepSpeed's loader did so under model parallelism
# (deepspeedai/DeepSpeed, issue 99). Every rank then reads other samples, also where ranks compute a
# layer together.
#
# **Predict.** All messages have the right sizes. Does the run hang? Does the loss fall?


# %%
def read_by_world_rank(parallel, group):
    type(parallel).data_part = group.rank(), group.size()  # in this process alone


# %% tags=["output-samples"]
by_rank = run(trained, 8, layout, read_by_world_rank, 20, timeout=90)
losses, _, records, _ = zip(*by_rank, strict=True)
print("loss after step       1      5     10     20")
for name, line in (("one process", reference[0]), ("8 ranks, rank 0", losses[0])):
    print(f"{name:16} " + " ".join(f"{line[step - 1]:6.2f}" for step in (1, 5, 10, 20)))
print(named(expected, records))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Nothing hangs. The loss falls, and then stands still, where one process goes on. The sums over tp
# mix the activations of different texts, and the last stage compares what comes from one text with
# the words of another: what is left to learn is how often each word occurs.
#
# </details>
#
# `parallel.data_part` is the place along *dp* and the size of *dp*. Nothing else may tell a loader
# which samples are its own.

# %% [markdown]
# ## 6. The real one
#
# First the grid, then one technique after the other. Each finds the model as the one before it has
# left it.

# %%
print(inspect.getsource(lay_out))
print(inspect.getsource(parallelize))

# %% [markdown]
# Each line has a reason to stand where it stands:
#
# | this | before | because |
# |---|---|---|
# | precision | all | what is cut, sent and divided must have its dtype |
# | tensor, sequence | pipeline | the cuts look for embedding and head, wherever they are |
# | tensor, sequence | ZeRO | ZeRO lays parameters into flat buffers, in the shapes they then have |
# | recomputation | ZeRO | what is replayed must have its collectives inside, ZeRO's hooks outside |
# | pipeline | ZeRO | only what a rank keeps has a state to divide |
#
# `torch.compile` comes last of all, and only where no layer is cut: with dp, and ZeRO-1 or ZeRO-2.
#
# **Predict.** Swap two of them. Does the run stop, or does it train something else?


# %%
def stages_then_columns(model, mesh):
    pipeline = apply_pipeline_parallel(model, mesh.group("pp"))
    return Grid(model, tensor=apply_tensor_parallel(model, mesh.group("tp")), pipeline=pipeline)


def zero_then_columns(model, mesh):
    data = apply_zero1(model, mesh.group("dp"))
    return Grid(model, data=data, tensor=apply_tensor_parallel(model, mesh.group("tp")))


def zero_then_stages(model, mesh):
    data = apply_zero1(model, mesh.group("dp"))
    pipeline = apply_pipeline_parallel(model, mesh.group("pp"))
    return Grid(model, data=data, pipeline=pipeline)


# %%
def tried(group, apply, axes):
    """The losses of two steps on the same samples."""
    model = Transformer(shape)
    initialize(model, seed=0)
    parallel = apply(model, make_mesh("cpu", **axes))
    optimizer = parallel.shard(torch.optim.AdamW(model.parameters()))
    rows = dataset.batch(0, 4)
    pairs = [(row[:, :-1], row[:, 1:]) for row in rows.split(2)]
    return [train_step(model, optimizer, pairs, 1e-2, 1.0, parallel)[0].item() for _ in range(2)]


# %% tags=["output-swapped"]
for apply, axes in ((stages_then_columns, {"pp": 2, "tp": 2}),
                    (zero_then_columns, {"dp": 2, "tp": 2}),
                    (zero_then_stages, {"pp": 2, "dp": 2})):
    try:
        first, second = run(tried, 4, apply, axes)[0]
        told = f"runs; loss {first:.3f}, then {second:.3f}"
    except RankError as error:
        told = next(failure.text for failure in error.failures.values() if failure.error)
    print(textwrap.shorten(f"{apply.__name__} {told}", 98, placeholder=" ..."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# All three stop. The cuts find layers by name. Where a stage has no head an identity stands in its
# place, and it has no weight to cut. The flat buffers have room for whole matrices, and gradients
# of cut ones arrive. And ZeRO was applied before the stages were known: both ends of the pipeline
# hold the tied embedding, and must shard it alike on both.
#
# </details>
#
# All three are loud: shapes and names do not match. In section 5 it was a *group* that was wrong,
# and every shape fits: that is silent.
#
# That tensor comes before pipeline is this package's choice: its cuts look for names in the whole
# model. torchtitan splits first, and cuts each stage.

# %% [markdown]
# ### The oracle
#
# Two copies, two tensor-parallel ranks, two stages: ZeRO-1 along dp, sequence parallelism along tp.
# Both families; GPT's embedding is tied, and so on two stages. Then once more without one sum over
# tp: along it each rank has seen its part of the tokens alone, at the norms.
#
# **Predict.** What will the oracle say of that third one?


# %%
def all_axes(model, group):
    layout = ParallelConfig(tp=2, pp=2, zero=1, sequence=True)
    config = Config(model.config, DataConfig(sequence_length=12), TrainConfig(), layout)
    return parallelize(model, lay_out(layout, group.size(), cpu), config, cpu)


def without_norms(model, group):
    """The same, without the sum over tp of what each rank has seen for its tokens alone."""
    parallel = all_axes(model, group)
    parallel.tensor.sum_partial_gradients = lambda gradient: None
    return parallel


# %%
SIZES = dict(vocab_size=36, max_sequence_length=12, width=24, num_heads=6, num_kv_heads=6,
             ffn_width=36, num_layers=2)
LENGTHS = dict(vocabulary=36, sequence=12)


def oracle(apply, family):
    make_model = partial(small_model, family, **SIZES)
    try:
        assert_same_training(apply, 8, make_model, 2, (8, 6), timeout=90, **LENGTHS)
        return "the same training"
    except AssertionError as error:
        return textwrap.fill(str(error).splitlines()[0], 76, subsequent_indent="  ")


# %% tags=["output-oracle"]
for apply, family in ((all_axes, "gpt"), (all_axes, "llama"), (without_norms, "llama")):
    print(f"{apply.__name__}, {family}: {oracle(apply, family)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# It names the first norm. Along tp each rank keeps the gradient of its own tokens alone, so the
# copies differ, and none is right. The question at the end is a guess, for bugs of timing; here
# nothing was sent.
#
# </details>

# %% [markdown]
# ## 7. Measure
#
# ### Read the ledger of a step
#
# The story model once more, with a head of its own; 2 x 2 x 2 ranks, ZeRO-1, sequence parallelism,
# 4 micro-batches. The ledger names each call's axis.

# %%
untied, M = replace(shape, tied_embedding=False), B_all // 2


def ledger_of_a_step(group):
    """The calls of a step, and how many parameters this rank holds."""
    layout = ParallelConfig(tp=2, pp=2, zero=1, sequence=True)
    config = Config(untied, DataConfig(sequence_length=S), TrainConfig(), layout)
    model, parallel = build(config, lay_out(layout, 8, cpu), cpu)
    optimizer = parallel.shard(torch.optim.AdamW(model.parameters()))
    index, count = parallel.data_part
    pairs = [(row[:, :-1], row[:, 1:]) for row in dataset.batch(0, B_all)[index::count].split(1)]
    with Ledger() as ledger:
        train_step(model, optimizer, pairs, 1e-3, 1.0, parallel)
    return ledger.calls, sum(parameter.numel() for parameter in model.parameters())


# %% tags=["output-ledger", "nbval-check-output"]
calls, held = zip(*run(ledger_of_a_step, 8, watch=False), strict=True)
print(merged([[replace(call, phase="") for call in of_rank] for of_rank in calls]))

# %% [markdown]
# Line by line: which technique is it? **Predict** before you read on.
#
# <details><summary>Answer</summary>
#
# Along tp: the all-gathers and reduce-scatters of sequence parallelism, and all-reduces: of the
# loss on the last stage, once a step of the gradients of norms and of the one key-value head, and
# of the norm for the clip. Along pp: activations forward, gradients back, the loss from the last
# stage, the norm. Along dp: ZeRO's reduce-scatter and all-gather, and the number of tokens, the
# loss and the norm.
#
# </details>
#
# Now predict the large ones. A micro-batch is one sequence.


# %%
def of_activations(stage, rank):
    """Bytes along tp: two layers, and embedding or head, for each micro-batch."""
    block = cost.tensor_parallel_volume(1, S, untied.width, 4, rank, cost.Layout(2, True)).sent
    values = partial(cost.collective_volume, element_size=4, size=2, rank=rank)
    embedding = ("all_gather", "reduce_scatter")
    head = ("all_gather", "all_gather", "reduce_scatter")  # the input is gathered again
    end = sum(values(op, S * untied.width).sent for op in (head if stage else embedding))
    if stage:
        end += values("all_reduce", S).sent + values("all_reduce", 2 * S).sent  # the loss
    return M * (untied.num_layers // 2 * block + end)


# %%
def large(call):
    """Whether a call carries activations, gradients or weights."""
    in_a_pass = call.phase[0] in "FB"  # such as "F2 stage 0"
    return {"tp": in_a_pass, "pp": call.op == "send", "dp": call.op != "all_reduce"}[call.axis]


def formula(axis, rank):
    """Bytes that a rank sends along an axis in a step."""
    at = place_of(rank)
    if axis == "tp":
        return of_activations(at["pp"], at["tp"])
    if axis == "pp":
        return cost.pipeline_volume(1, S // 2, untied.width, 4, 2, M, at["pp"]).sent
    return cost.zero_volume(held[rank], 4, 2, at["dp"], stage=1).sent


# %%
measured, predicted = {}, {}
for axis, stage in product(reversed(AXES), range(2)):
    ranks = [rank for rank in range(8) if place_of(rank)["pp"] == stage]
    measured[f"{axis}, stage {stage}"] = [
        sum(call.sent for call in calls[rank] if call.axis == axis and large(call))
        for rank in ranks]
    predicted[f"{axis}, stage {stage}"] = [formula(axis, rank) for rank in ranks]

# %% tags=["figure-wire"]
everything = sum(call.sent for of_rank in calls for call in of_rank)
rest = sum(call.sent for of_rank in calls for call in of_rank if not large(call))
apart = max(abs(a - b) for row in measured
            for a, b in zip(measured[row], predicted[row], strict=True))
print(f"ledger and formula are at most {apart} bytes apart")
print(f"not in the picture: {rest / everything:.1%} of all bytes")
show(wire(measured, predicted), alt=(
    "Bytes sent in a step, by axis and stage: ledger and formula agree. tp sends most, as in the "
    "large model of section 2."
))

# %% [markdown]
# ### The decision tree
#
# How do you choose among hundreds of layouts? A rule of thumb says: replicate the model if it fits;
# shard its state with ZeRO if it does not; then tensor parallelism up to a whole node; then
# pipeline stages. The package's decision tree tries the cuts in this order, each with the lowest
# stage of ZeRO that fits. At each cut it asks the estimator two questions, and writes down the
# answers:

# %% tags=["output-tree", "nbval-check-output"]
for line in decide(big).steps:
    print(line.replace("; ", "\n    "))

# %% [markdown]
# A tree sees one path. A search asks the same estimator about *every* layout that the package can
# train: other schedules, hybrid sharding, selective recomputation, tensor parallelism across nodes
# (chapter 12). **Predict.** How much slower is the tree's choice than the best of them?

# %%
gpt3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200)  # so that 8 divide it
MODELS = {"Llama 3.2 1B": (cost.PUBLISHED["Llama 3.2 1B"], 8192),
          "Llama 3.1 70B": (llama, 8192), "GPT-3 175B": (gpt3, 2048)}


def step_of(job, layout):
    return estimate(job, layout).seconds


# %% tags=["output-against", "nbval-check-output"]
behind = []
print("model           GPUs   the tree's layout" + " " * 32 + "s a step   best of all")
for name, num_gpus in product(MODELS, (8, 64, 1024)):
    model, length = MODELS[name]
    job = Job(model, num_gpus, H100, length, global_batch_size=1024)
    try:
        chosen = decide(job)
    except ConfigError:
        print(f"{name:14} {num_gpus:5}   does not fit")
        continue
    best = search(job).candidates[0]
    behind.append(step_of(job, chosen) / best.seconds - 1)
    words = str(chosen).replace("sequences at once", "at once")
    print(f"{name:14} {num_gpus:5}   {words:47} {step_of(job, chosen):9.2f} {best.seconds:13.2f}")
print("the tree is slower by " + ", ".join(f"{each:.0%}" for each in behind))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Next to nothing while a few nodes are enough. On 1,024 GPUs it depends on the model: Llama's
# choices are within a tenth of the best, GPT-3's is slower by a quarter. Size alone does not decide
# it: chapter 12 has clusters of 2,240 to 16,384 GPUs.
#
# </details>
#
# For GPT-3 on 1,024 GPUs the tree ends where the rule of thumb does: tensor parallelism over a
# whole node, then stages. What does the best layout do better? Seconds a step:

# %% tags=["output-gains", "nbval-check-output"]
print("            tp    bubble    dp   a step   layout")
for name, each in (("the tree", Candidate(job, chosen)), ("the best", best)):
    parts = each.estimate.parts
    print(f"{name} {parts['tp']:5.2f} {parts['bubble']:9.2f} {parts['dp']:5.2f} "
          f"{each.seconds:8.2f}   {each}")

# %% [markdown]
# It waits less along tp, because it cuts the layers over half a node; the tree filled the node
# before it tried a stage, and never went back. With as many stages, its bubble is half as long: a
# zero-bubble schedule fills it with weight gradients (chapter 9). And along dp it gathers the
# weights while it computes. The tree tries neither zero bubble nor ZeRO-3 in a pipeline.
#
# Both follow the estimator. Should you? Narayanan et al. (2021, section 5.2, table 2) have measured
# two kinds of layout for GPT-3 on A100s, with full recomputation and 1,536 sequences a step: ZeRO-3
# alone, where each GPU has 4, 2, or 1 sequences, and the model cut into 96 parts, for which we take
# tp 8 x 12 stages.
#
# **Predict.** Where is the estimate right, and where is it not?

# %% tags=["output-measured", "nbval-check-output"]
A100 = DEVICES["A100-SXM-80GB"]
TABLE_2 = {384: (144, 153), 768: (88, 149), 1536: (44, 141)}  # TFLOP/s that they measured
work = 1536 * 2048 * (cost.training_flops_per_token(gpt3, 2048)
                      + cost.recompute_flops_per_token(gpt3, 2048, "full"))
print("TFLOP/s a GPU               ZeRO-3          tp 8 x pp 12")
print("        GPUs    estimate  measured    estimate  measured")
for num_gpus, measured_rates in TABLE_2.items():
    job, row = Job(gpt3, num_gpus, A100, 2048, 1536), f"{num_gpus:12}"
    sharded = Decision(ParallelConfig(dp=num_gpus, zero=3), "full", 1536 // num_gpus)
    cut = Decision(ParallelConfig(dp=num_gpus // 96, tp=8, pp=12), "full")
    for layout, rate in zip((sharded, cut), measured_rates, strict=True):
        row += f" {work / num_gpus / step_of(job, layout) / 1e12:11.0f} {rate:9}"
    print(row)

# %% [markdown]
# <details><summary>Answer</summary>
#
# With tp and pp it is right within a few percent. With ZeRO-3 the measured steps take one and a
# half to four times as long. The estimator assumes that ZeRO-3's weights travel while a GPU
# computes; in that system they did *not*. From 768 to 1,536 GPUs its rate halves, so a step takes
# as long as before: more GPUs do not help a network-bound run.
#
# </details>
#
# So treat a plan that relies on ZeRO-3's overlap as a hypothesis. The package's own `configs/` use
# the layouts that others have run: tp up to a node, then stages.
#
# A tree is fast to follow and easy to explain, a search misses nothing that the estimator knows,
# and both are only as good as the estimator. Take their first few choices, and measure them.

# %% [markdown]
# ### Save here, resume there
#
# A checkpoint that is tied to its layout ties the run to its cluster. Here each rank writes what it
# keeps, by the names of the whole tensors, as *boxes* of them: an offset and a size along each
# dimension. Whoever reads says which boxes it needs.
#
# Four jobs of three steps each: 2 copies of 2 tensor-parallel ranks; 4 stages; one process; ZeRO-3
# on 3 ranks. Beside it a run of one process that is never interrupted. In float64, so that rounding
# stays at 1e-16 and a mistake stands out.


# %%
def settings(**more):
    rate = dict(learning_rate=3e-3, min_learning_rate=3e-3, warmup_steps=2)  # then constant
    return TrainConfig(global_batch_size=B_all, micro_batch_size=1, eval_every=0, eval_sequences=8,
                       device="cpu", **rate, **more)


# %%
def job(group, run_dir, layout, **more):
    """Go on from the newest checkpoint, or begin; `train` writes its log for us."""
    torch.set_default_dtype(torch.float64)
    config = Config(shape, DataConfig(folder, S), settings(**more), layout)
    with redirect_stderr(io.StringIO()):
        train(config, run_dir, group=group, restart=True)


def losses_in(run_dir):
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]


# %%
JOBS = [(4, ParallelConfig(tp=2, zero=1, sequence=True)), (4, ParallelConfig(pp=4)),
        (1, ParallelConfig()), (3, ParallelConfig(zero=3))]
NAMES = ("dp 2 x tp 2, ZeRO-1", "pp 4", "one process", "dp 3, ZeRO-3")
root = Path(workspace.name)
run(partial(job, steps=12), 1, root / "whole", ParallelConfig(), watch=False, timeout=90)
for number, (num_ranks, layout) in enumerate(JOBS, start=1):
    steps = partial(job, steps=3 * number)
    run(steps, num_ranks, root / "moved", layout, watch=False, timeout=90)

# %% tags=["output-moved"]
whole, moved = losses_in(root / "whole"), losses_in(root / "moved")
print("steps       layout                last loss   off by at most")
for number, name in enumerate(NAMES):
    part = slice(3 * number, 3 * number + 3)
    error = max(abs(a / b - 1) for a, b in zip(moved[part], whole[part], strict=True))
    print(f"{3 * number + 1:2} to {3 * number + 3:2}    {name:20} {moved[part][-1]:10.4f} "
          f"{error:12.0e}")

# %% [markdown]
# How does a rank of the new layout know what it needs? ZeRO's part of a matrix may begin and end in
# the middle of a row. Such a range is at most three boxes of a matrix: the end of a row, whole
# rows, the beginning of a row. Two boxes overlap in a box, or not at all: that box is what one rank
# copies from another's file.

# %%
print(inspect.getsource(boxes_of))

# %% tags=["output-boxes", "nbval-check-output"]
for own in (range(0, 12), range(5, 17)):
    print(f"elements {own.start} to {own.stop - 1} of a (6, 4) matrix:",
          ", ".join(f"{sizes} at {offset}" for offset, sizes in boxes_of((6, 4), own)))

# %% [markdown]
# ### Kill a rank, and watch
#
# 8 ranks, 2 x 2 x 2. A checkpoint after every second step. Rank 5 is killed as it begins step 6,
# with SIGKILL: it can neither save nor say goodbye.
#
# **Predict.** What do the other seven do? From which step does the run go on?


# %%
def job_with_a_death(group, *args, **more):
    take_step = Run.train_step

    def step(run):
        if (run.rank, run.step) == (5, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(run)

    Run.train_step = step
    job(group, *args, **more)


# %% tags=["output-killed"]
cube, often = ParallelConfig(tp=2, pp=2, zero=1, sequence=True), dict(checkpoint_every=2, steps=8)
saved = root / "killed" / "checkpoints"
try:
    run(partial(job_with_a_death, **often), 8, root / "killed", cube, timeout=90)
except RankError as error:
    report(error)
print("saved:", *(path.name for path in checkpoint.checkpoints(saved)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# They wait in the next collective, for ever, if nobody ends them: here the launcher does. The run
# goes on from step 5: the newest complete checkpoint is that of step 4, and step 5 is computed
# again.
#
# </details>
#
# Read it backwards. Rank 4 misses rank 5, its neighbor along tp; rank 7 misses it along dp. Who
# needs one of these waits in turn: one death, and in a moment all seven wait, along all three axes.
#
# A death in the middle of a save leaves a folder with a temporary name, which nobody reads. Damage
# to a complete one is found by its checksums. Make such a folder, and flip one bit of the newest
# checkpoint:

# %% tags=["output-bit"]
(saved / "step_00000006.tmp").mkdir()
newest = checkpoint.checkpoints(saved)[-1]
file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 1
file.write_bytes(content)
print("newest:", newest.name)
print("damage:", checkpoint.damage(newest))

# %% [markdown]
# Now let the job be started again, on another grid, since the new node, say, has faster links: tp 4
# x dp 2.
#
# **Predict.** From which step does it go on? By how much is its last loss off from that of the one
# process?

# %% tags=["output-restarted"]
layout = ParallelConfig(tp=4, zero=1, sequence=True)
run(partial(job, **often), 8, root / "killed", layout, watch=False, timeout=90)
print("set aside:", *(path.name for path in saved.glob("*.damaged")))
restarted = losses_in(root / "killed")
error = max(abs(a / b - 1) for a, b in zip(restarted, whole[:8], strict=True))
print(f"{len(restarted)} steps; loss {restarted[-1]:.4f}, of one process {whole[7]:.4f}; "
      f"no step is off by more than {error:.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# From step 3: the checkpoint of step 4 is damaged, that of step 2 is not. And it ends where one
# process ends, after a death, a flipped bit and a change of the grid.
#
# </details>
#
# ### On real nodes
#
# The same line on each of 8 nodes with eight GPUs:
#
# ```
# NODES=8 HEAD=node0 clusters/torchrun.sh configs/llama-8b.toml \
#     --parallel.zero 1 --parallel.tp 2 --parallel.sequence
# ```
#
# In it torchrun is told to start the ranks again after a death (`--max-restarts`), and the training
# to go on from the last good checkpoint (`--restart`), as `restart=True` did here. What else is
# different:
#
# - The folder of the run must be one that all nodes see.
# - A rank that stands still, on a broken link say, has not died. After `train.hang_timeout` seconds
#   without a step every rank writes down where it is, one of them tells who keeps the others
#   waiting, and the job ends; torchrun starts it again.
# - A loss that is NaN or infinite stops the run before it reaches the weights, and the step, its
#   samples, the rank and the first module are named.
# - Saving takes long where the state is large. `--train.async-checkpoint` waits for a copy in the
#   host's memory alone, and writes while the training goes on.
#
# ## 8. Recap
#
# 1. The ranks are a grid. The axis that is named last has neighboring ranks, and gets the links
#    inside the node: tp, which sends activations for every layer. In any other order the cluster
#    waits.
# 2. Sum over an axis what its ranks have parts of, and nothing that they have copies of.
# 3. A norm over the wrong ranks and samples by the wrong number let the loss fall. Compare
#    gradients with one process.
# 4. Each technique finds the model as the one before has left it: here tensor, then stages, then
#    the state; three swaps stop at once. The oracle finds the same training on 2 x 2 x 2 ranks.
# 5. A checkpoint knows names, not ranks: a run goes on in any layout, from the last one that is
#    whole.
#
# ## Exercises
#
# Write your answers into `exercises/ch11_all_axes.py`, save, and run the cell. In a terminal,
# `minitron hint 11.1` gives hints in three steps.
#
# **11.1 Rank and place** (15 minutes): from a number to a place in the grid, and back.

# %%
check("11.1")

# %% [markdown]
# **11.2 Who talks to whom** (30 minutes): all groups of an axis, which sum goes over which, and the
# norm of a gradient that is cut and copied.

# %%
check("11.2")

# %% [markdown]
# **11.3 Layouts that fit** (25 minutes): everything that divides, fits and stays in the node.

# %%
check("11.3")

# %% [markdown]
# **11.4 Save here, resume there** (25 minutes): who copies which range from whom.

# %%
check("11.4")

# %% [markdown]
# **11.5 8 ranks, one limit** (30 minutes): the capstone. You choose a layout; the grader trains the
# story model with it, on 8 ranks with a meter each, down to a given loss.

# %%
check("11.5")

# %% [markdown]
# ## Further reading
#
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, 2021: section 3, which axis for what; 5.2 and 5.4, measured.
# - Smith et al., *Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B*, 2022: section
#   2, three axes on nodes.
# - Llama Team, *The Llama 3 Herd of Models*, 2024: section 3.3.2 (four axes, and their order) and
#   3.3.4 (what failed in 54 days).
# - Liang et al., *TorchTitan: One-stop PyTorch native solution for production ready LLM
#   pre-training*, 2024: section 2, the same parts from PyTorch; there the model is split into
#   stages first, and each is then cut, recomputed, compiled and divided.
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022:
#   sections 4 and 5.
