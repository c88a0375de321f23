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
# # 11. All axes together: the same training on every layout
#
# **50 minutes. No GPU. Exercises 11.1 to 11.5.**
#
# *You need:* averaged gradients ([chapter 4](chapter:4)), [ZeRO](word:zero) ([chapter
# 6](chapter:6)), column- and row-parallel layers ([chapter 7](chapter:7)), [sequence
# parallelism](word:sequence-parallelism) ([chapter 8](chapter:8)) and [pipeline
# stages](word:stage) ([chapter 9](chapter:9)).
#
# *You will be able to:*
# - **place** each axis of a layout on the links of a cluster, and predict its bytes and seconds;
# - **say**, for each number in a training step, over which ranks it must be summed;
# - **move** a run from one layout to another, even after a rank has died.
#
# Sections 1 to 3 ask where each [axis](word:axis) belongs, from its bytes and the cluster's links.
# Sections 4 to 6 train on all axes at once: by hand, with bugs, and with the package.
# Section 7 measures a step, tests rules for choosing a layout, and moves a run between layouts.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
import math
import os
import signal
import tempfile
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path

import torch
import torch.distributed as dist

from minitron import checkpoint, cost
from minitron.config import Config, ConfigError, DataConfig, ParallelConfig, TrainConfig
from minitron.corpus.stories import write_stories
from minitron.dataset import TokenDataset
from minitron.launch import RankError, run
from minitron.parallel.data.zero import apply_zero1
from minitron.parallel.grid import Grid
from minitron.parallel.parts import boxes_of
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallelize import lay_out, parallelize
from minitron.plan.decide import decide
from minitron.plan.estimate import estimate
from minitron.plan.hardware import DEVICES
from minitron.plan.job import USABLE, Decision, Job
from minitron.plan.traffic import link
from minitron.run import Run
from minitron.train import train
from teaching.check import check
from teaching.claims import claim
from teaching.figures import show, timeline, wire
from teaching.figures_grid import pieces, placed_steps, rank_grid, who_sums
from teaching.lab import ch11 as lab, reliability, show_source, show_text, stragglers, trees

torch.set_num_threads(1)
GB, cpu = 1e9, torch.device("cpu")
H100, A100 = DEVICES["H100-SXM-80GB"], DEVICES["A100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# We want to train Llama 3.1 70B on 256 H100s: 32 nodes of eight GPUs. The previous chapters have
# given us switches: [data parallelism](word:data-parallelism) (dp) with one of four ZeRO stages,
# [tensor parallelism](word:tensor-parallelism) (tp) with sequence parallelism, [pipeline
# parallelism](word:pipeline-parallelism) (pp), [recomputation](word:recompute), and the
# [micro-batch](word:micro-batch) size. In how many ways can they be set? In how many of these does
# the model fit? And how much does the choice matter?
#
# To keep the list short, all sizes are powers of two, tp and pp at most 64, micro-batches at most
# 4; pipelines have ZeRO-0 or ZeRO-1.

# %% tags=["output-question", "nbval-check-output"]
llama, S_llama = cost.PUBLISHED["Llama 3.1 70B"], 8192
big = Job(llama, num_gpus=256, device=H100, sequence_length=S_llama, global_batch_size=1024)
every = list(lab.all_layouts(big))
steps = {layout: estimate(big, layout) for layout in every if lab.fits(big, layout)}
ranked = sorted(steps, key=lambda layout: steps[layout].seconds)
no_zero3 = next(layout for layout in ranked if layout.parallel.zero < 3)
print(f"{len(every)} layouts; {len(steps)} fit into {big.limit / GB:.0f} GB, "
      f"{USABLE:.0%} of a GPU's memory")
for name, layout in (("fastest", ranked[0]), ("fastest without ZeRO-3", no_zero3),
                     ("slowest", ranked[-1])):
    print(f"{name}: {layout}\n  {lab.time_of(steps[layout])}")
print("slowest over these two:", *(f"{steps[ranked[-1]].seconds / steps[layout].seconds:.1f}"
                                   for layout in (ranked[0], no_zero3)))

# %% [markdown]
# More than half of them do not fit. (A fifth of the memory is reserved for CUDA, NCCL and
# fragmentation.) Of those that fit, the slowest takes almost eleven times as long as the fastest,
# and more than ten times as long as the fastest without ZeRO-3. (Section 7 says why we name both.)
# Most of the difference is waiting, nearly all of it for communication along one axis. The
# seconds come from the package's estimator, which adds up what a layout computes, sends and waits
# for; chapter 12 tests it against published step times. Which axis is so expensive, and why?
#
# ## 2. Estimate
#
# Take one layout: tensor parallelism over 8 ranks, 4 pipeline stages, and 8 copies of that, which
# shard the optimizer state (ZeRO-1). A step has 1,024 sequences, so each of the 8 copies processes
# 128 of them, one at a time. Inside a node, NVLink connects the eight GPUs; each GPU has one
# network card to reach all other nodes.
#
# **Predict.** Along which axis does a GPU send the most bytes per step, and along which the least?
# We count the bytes with the formulas of chapters 6 to 9:

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

# %% [markdown]
# Divided by the bandwidth of a link, they become seconds:

# %% tags=["output-traffic", "nbval-check-output"]
tokens = 1024 * S_llama / math.prod(sizes.values())
work = tokens * cost.training_flops_per_token(llama, S_llama) / (0.5 * H100.bf16_flops)
print("sent by a GPU per step   GB   s over NVLink   s over its network card")
for axis, num_bytes in sorted(sent.items(), key=lambda item: -item[1]):
    print(f"{axis:18} {num_bytes / GB:8.1f} {num_bytes / H100.nvlink_bandwidth:15.2f} "
          f"{num_bytes / H100.nic_bandwidth:25.2f}")
print(f"compute, at half of the peak: {work:.0f} s")
print(f"the slowest layout of section 1 waits {steps[ranked[-1]].parts['tp']:.0f} s along tp")

# %% [markdown]
# <details><summary>Answer</summary>
#
# tp sends activations for *every layer* of every micro-batch, forward and backward. pp sends one
# activation forward and one gradient back per micro-batch, however many layers a stage has. dp
# sends gradients and weights once per step, however many micro-batches there are. Here tp is first
# by far, and pp is last.
#
# </details>
#
# The three axes form a grid, and ranks are numbered through it in row-major order: the last axis
# varies fastest, so ranks that differ only along it are neighbors. Each node hosts eight
# consecutive ranks. The *order* in which you list the axes therefore decides which axis stays
# inside a node. There are six possible orders.
#
# A group that fits in one node communicates over NVLink. A ring that spans several nodes uses one
# network card per rank it has in each node. The package's `link` returns the bandwidth that large
# collectives reach there, so the seconds below are longer than those above.
#
# **Predict.** In how many of the six orders does tp stay inside a node? By how much do the others
# lengthen a step?
#
# In the figure, each column is a node, and ranks go down the columns. Rank 0 is black; the ranks of
# its groups have the color of the axis. The bars' "matmuls" are the compute of the table; what dp
# and pp send is a sliver at the end.

# %% tags=["figure-traffic"]
def seconds(axis, order):
    """Communication along an axis, from the distance between the ranks of its groups."""
    stride = math.prod(sizes[other] for other in order[order.index(axis) + 1:])
    return sent[axis] / link(big, sizes[axis], stride, is_ring=axis != "pp").bandwidth


spent = {order: {axis: seconds(axis, order) for axis in order} for order in permutations(sizes)}
by_time = sorted(spent, key=lambda order: sum(spent[order].values()))
show(placed_steps({order: {"matmul": work} | spent[order] for order in by_time}, sizes), alt=(
    f"After {work:.0f} s of compute, {sum(spent[by_time[0]].values()):.0f} s of communication "
    f"where tp fills a node, {sum(spent[by_time[-1]].values()):.0f} s where it spans eight."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Two: the ones with tp innermost. They take equally long; Megatron-LM and this package put pp
# outermost, Llama 3 puts dp there ([Llama Team 2024](https://arxiv.org/abs/2407.21783), section
# 3.3.2). In the other four, tensor-parallel traffic crosses nodes, and a ring is only as fast as
# its slowest link. In three of them a step takes 118 / 44.3 = 2.7 times as long. In the fourth it
# takes 75.1 / 44.3 = 1.7 times as long: there each node has two ranks of a tp group, and so two
# network cards for it.
#
# </details>
#
# This is why tp is rarely larger than a node, and why the slowest layout of section 1 is so slow.
#
# ## 3. Picture
#
# A grid small enough to see: eight ranks, two along each axis, on two nodes of four. Lines join
# rank 0, in black, to its neighbor along each axis, which has the axis' color.

# %% tags=["figure-grid"]
show(rank_grid({"pp": 2, "dp": 2, "tp": 2}, gpus_per_node=4), alt=(
    "Eight ranks as a grid of pp x dp x tp: tensor-parallel neighbors and data-parallel copies "
    "share a node, the two stages are on two nodes."
))

# %% [markdown]
# **Predict.** Which ranks share a group with rank 5: along tp, along dp, along pp?
#
# ## 4. By hand
#
# The grid is the numbers 0 to 7 in the shape (pp, dp, tp). A rank's position in this array is its
# place, and a [group](word:group) along an axis is a line of the array in that direction. PyTorch
# calls such a grid, with its groups, a *device mesh*. Below are three places and all groups.

# %%
AXES = {"pp": 2, "dp": 2, "tp": 2}
grid = torch.arange(8).view(tuple(AXES.values()))


def place_of(rank):
    """Where a rank is along each axis."""
    return dict(zip(AXES, (grid == rank).nonzero()[0].tolist(), strict=True))


def groups_along(axis):
    """All groups of ranks that differ only along `axis`."""
    lines = grid.movedim(list(AXES).index(axis), -1)
    return lines.reshape(-1, AXES[axis]).tolist()


# %% tags=["output-groups", "nbval-check-output"]
for rank in (0, 1, 5):
    print(f"rank {rank}: " + ", ".join(f"{axis} {i}" for axis, i in place_of(rank).items()))
for axis in reversed(AXES):
    print(f"groups along {axis}:", *groups_along(axis))

# %% [markdown]
# Rank 5 shares a group with rank 4 along tp, with rank 7 along dp, and with rank 1 along pp.
#
# Now with real ranks. First, each creates the groups:


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


# %% [markdown]
# Then each makes a vector of eight zeros, sets its own element to 1, and
# [all-reduces](word:all-reduce) the vector along each axis. The ones in a sum show who took part.


# %% tags=["output-sums", "nbval-check-output", "exhaustive"]
def who_is_in_the_sum(world):
    heard = {}
    for axis, group in my_groups(world).items():
        heard[axis] = torch.eye(8)[world.rank()]
        dist.all_reduce(heard[axis], group=group)
    return {axis: numbers.nonzero().flatten().tolist() for axis, numbers in heard.items()}


for rank, heard in list(enumerate(run(who_is_in_the_sum, 8)))[::5]:
    print(f"rank {rank} has summed over " + ", ".join(
        f"{axis}: {ranks[0]} and {ranks[1]}" for axis, ranks in reversed(heard.items())))

# %% [markdown]
# In `my_groups` every rank creates *all* groups, including those that it does not belong to.
# **Predict.** Why? What happens if each rank creates only its own three?

# %% tags=["output-own-groups", "exhaustive"]
def only_my_groups(world):
    for axis in AXES:
        [own] = (ranks for ranks in groups_along(axis) if world.rank() in ranks)
        dist.all_reduce(torch.eye(8)[world.rank()], group=dist.new_group(own))


try:
    run(only_my_groups, 8, timeout=5)
except RankError as error:
    lab.report(error)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `dist.new_group` must be called by all ranks: a group is identified by how many calls came before
# it, and its members find each other by that number. Here rank 0's first call means a different
# group from rank 2's, but both use the same number. So some ranks wait for partners that mean a
# different group, and the run hangs. (The axes have no names here, so the report numbers the
# groups.)
#
# </details>
#
# ### A step on all three axes
#
# A model that is easy to follow: two stages, each of them computing tanh(x A) B. Along tp, A is
# split by columns and B by rows, so each rank computes a [partial sum](word:partial-sum) of the
# output (chapter 7). Along pp, a rank holds one of the stages (chapter 9). Along dp, it reads its
# part of the samples (chapter 4).
#
# **Predict.** Which numbers must be summed over which axis, and how often per step? Write it down
# before you read the cells. The first is the model in one process; the second has two helpers, an
# all-reduce and a receive.

# %%
D, F = 8, 16
random = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
A, B = random(2, D, F) / D**0.5, random(2, F, D) / F**0.5  # of both stages
inputs, targets = random(2, 6, D)


def through(x, columns, rows):
    return torch.tanh(x @ columns) @ rows


def one_process():
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    out = through(through(inputs, a[0], b[0]), a[1], b[1])
    ((out - targets).square().sum() / targets.numel()).backward()
    return a.grad, b.grad


# %%
def summed(tensor, group):
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def received(like, source, group):
    tensor = torch.empty_like(like)
    dist.recv(tensor, group=group, group_src=source)
    return tensor


# %% [markdown]
# A pass, forward and backward, and then the step: it takes this rank's parts of A and B, and sums
# what the pass has left in the gradients.


# %%
def forward_and_backward(groups, at, columns, rows):
    """Add to the gradients of this rank's part of its stage, from its part of the samples."""
    x, target = (samples.chunk(2)[at["dp"]] for samples in (inputs, targets))
    is_first = at["pp"] == 0
    x = (x if is_first else received(x, 0, groups["pp"])).clone().requires_grad_()
    partial_out = through(x, columns, rows)
    out = summed(partial_out, groups["tp"])
    if is_first:
        dist.send(out, group=groups["pp"], group_dst=1)
    grad = received(out, 1, groups["pp"]) if is_first else 2 * (out - target) / targets.numel()
    partial_out.backward(grad)  # the gradient of a partial sum is that of the sum
    if not is_first:
        dist.send(summed(x.grad, groups["tp"]), group=groups["pp"], group_dst=0)


# %%
def step_by_hand(world):
    """This rank's place, its gradients, and the norm of the full model's gradient."""
    groups, at = my_groups(world), place_of(world.rank())
    columns = A[at["pp"]].chunk(2, dim=1)[at["tp"]].clone().requires_grad_()
    rows = B[at["pp"]].chunk(2, dim=0)[at["tp"]].clone().requires_grad_()
    forward_and_backward(groups, at, columns, rows)
    grads = [summed(weight.grad, groups["dp"]) for weight in (columns, rows)]
    square = sum(grad.square().sum() for grad in grads)
    for axis in ("tp", "pp"):
        square = summed(square, groups[axis])
    return at, grads, square.sqrt()


# %% [markdown]
# Do eight ranks find the gradients and the norm of one process?

# %% tags=["output-byhand"]
full_a, full_b = one_process()
norm = math.hypot(full_a.norm(), full_b.norm())
print("rank   place            error of gradients   norm   in one process")
for rank, (at, (a, b), found) in enumerate(run(step_by_hand, 8)):
    own_a = full_a[at["pp"]].chunk(2, dim=1)[at["tp"]]
    own_b = full_b[at["pp"]].chunk(2, dim=0)[at["tp"]]
    error = max((a - own_a).abs().max(), (b - own_b).abs().max())
    print(f"{rank:4}   {'pp {pp} dp {dp} tp {tp}'.format(**at)} {error:18.0e} {found:8.4f} "
          f"{norm:12.4f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# - Partial sums of a stage's output, over tp, once per micro-batch (here there is one). In the
#   backward pass also those of the gradient of its input, except on the first stage, where nobody
#   needs it.
# - Gradients of the weights, over dp, once per step; tp and pp hold different weights.
# - The squared norm, over tp and pp, once per step; after the sum, dp has copies.
#
# </details>
#
# The figure adds what a Transformer needs: with sequence parallelism, gradients of the norms'
# weights are partial sums over tp, and the last stage copies the loss to the others. Each panel has
# stage 0 on the left and stage 1 on the right; lines join ranks that sum.

# %% tags=["figure-sums"]
show(who_sums(lab.CROSSINGS), alt=(
    "Only outputs are summed more than once a step, and only the gradient's norm is summed over "
    "stages."))

# %% [markdown]
# The rule: **sum a number over an axis where ranks hold different parts of it, never where they
# hold copies.**
#
# ## 5. Traps
#
# Now the package trains the story model on 8 ranks. Along tp, the norms are
# [replicated](word:replicated), and so is the only key-value head. The embedding is tied to the
# output head, so both end stages have a copy and sum its gradients.

# %%
workspace = tempfile.TemporaryDirectory()
folder = Path(workspace.name) / "stories"
write_stories(folder, num_tokens=60_000)
(folder / "tokenizer.json").unlink()  # or each run below would end with a story
dataset = TokenDataset(folder, "train", lab.S, seed=0)
batches = [dataset.batch(step * lab.B, lab.B) for step in range(20)]
layout = ParallelConfig(tp=2, pp=2)  # and dp 2
[reference] = run(lab.trained, 1, ParallelConfig(), lab.unchanged, batches)

# %% [markdown]
# `lab.trained` returns what a rank sees: its losses, its gradient norms before clipping, the first
# step's clipped gradients of the full model, and a norm's weight at the end. `reference` has those
# of one process.
#
# ### A norm over the wrong ranks
#
# Clipping needs the norm of the full gradient; the limit here is 0.3 (`lab.CLIP`), so every step
# clips. There are three ways to get it wrong: use this
# rank's own norm (which is what `torch.nn.utils.clip_grad_norm_` computes for plain tensors); sum
# the squares over all ranks; or sum them over tp and pp as in section 4, as if no weight were
# replicated there.
#
# **Predict.** Which of them makes the norm too large, and which too small? What does the loss show?

# %% tags=["output-norm", "exhaustive"]
RULES = {"the package's": lab.unchanged, "this rank's own": lab.clip_over(),
         "sum over all ranks": lab.clip_over("tp", "pp", "dp"),
         "sum over tp and pp": lab.clip_over("tp", "pp")}
losses, norms, expected, _ = reference
print(f"one process            norm {norms[0]:.4f}, loss after 5 steps {losses[4]:.3f}")
for name, change in RULES.items():
    by_rank = run(lab.trained, 8, layout, change, batches[:5], watch=False, timeout=90)
    losses, norms, records, weights = zip(*by_rank, strict=True)
    first = sorted({f"{of_rank[0]:.4f}" for of_rank in norms})
    apart = (weights[0] - weights[1]).abs().max()  # on ranks 0 and 1, neighbors along tp
    print(f"{name:22} norm {' '.join(first)}, loss {losses[0][-1]:.3f}")
    print(f"    {lab.difference(expected, records)}\n    copies of a weight differ by {apart:.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# This rank's own norm is too small, because it is that of a part of the gradient. It also differs
# by rank, so each rank scales its gradients by its own factor: parts of one matrix no longer fit
# together, and copies of one weight drift apart. The other two norms are too large, because they
# count copies more than once, and clipping makes the gradients too small by the same factor. The
# losses agree to three decimals. A likely reason is that AdamW divides each gradient by its own
# magnitude, so a constant factor cancels (chapters 4 and 9).
#
# </details>
#
# The [**oracle**](word:oracle) compares the clipped gradients with those of one process and names
# the first one that is wrong. Real code has had norms too small and too large. In torchtitan, the
# norm was that of one stage, summed along tp but not along pp (pytorch/torchtitan, issue 596).
# TransformerEngine marked weights replicated over tp as sharded; the norm of a small
# DeepSeek-V3 was 1.36 times too large (ROCm/TransformerEngine, pull request 715).
#
# ### Different samples for every rank
#
# A data loader needs the number of ranks and its own rank, and `DistributedSampler` uses those of
# the *world* unless you tell it otherwise. DeepSpeed's loader did so under model parallelism
# (deepspeedai/DeepSpeed, issue 99). Then all ranks read different samples, even those that compute
# a layer together. `lab.samples_by_world_rank` makes the same mistake.
#
# **Predict.** All messages have the right sizes. Does the run hang? Does the loss fall?

# %% tags=["output-samples", "exhaustive"]
by_rank = run(lab.trained, 8, layout, lab.samples_by_world_rank, batches, timeout=90)
losses, _, records, _ = zip(*by_rank, strict=True)
print("loss after step       1      5     10     20")
for name, line in (("one process", reference[0]), ("8 ranks, rank 0", losses[0])):
    print(f"{name:16} " + " ".join(f"{line[step - 1]:6.2f}" for step in (1, 5, 10, 20)))
print(lab.difference(expected, records))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Nothing hangs. The loss falls at first and then stops, while that of one process keeps falling.
# The sums over tp mix the activations of different texts, and the last stage compares what comes
# from one text with the targets of another. A likely reason for the plateau: unrelated pairs of
# texts teach a model little more than how often each word occurs.
#
# </details>
#
# `parallel.data_part` is this rank's index along *dp* and the size of *dp*. A loader should choose
# its samples by these two numbers alone.
#
# ## 6. The real one
#
# `lay_out` makes the grid. Then `parallelize` applies one technique after another, each to what the
# previous one left.

# %%
show_source(lay_out, parallelize)

# %% [markdown]
# The order has reasons:
#
# | this | before | because |
# |---|---|---|
# | precision | all | whatever is split, sent and sharded must have its dtype |
# | tensor, sequence | pipeline | it finds layers by name, and a stage does not have all of them |
# | tensor, sequence | ZeRO | ZeRO copies parameters into flat buffers, in their current shapes |
# | recomputation | ZeRO | recomputation must repeat a layer's collectives, but not ZeRO's hooks |
# | pipeline | ZeRO | only the layers that a rank keeps have state to shard |
#
# **Predict.** We swap three of these pairs, one at a time. Does each run stop with an error, or
# does it train something else?


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


# %% [markdown]
# Each takes two steps on 4 ranks:

# %% tags=["output-swapped", "exhaustive"]
for apply, axes in ((stages_then_columns, {"pp": 2, "tp": 2}),
                    (zero_then_columns, {"dp": 2, "tp": 2}),
                    (zero_then_stages, {"pp": 2, "dp": 2})):
    try:
        first, second = run(lab.two_steps, 4, apply, axes, batches[0])[0]
        print(f"{apply.__name__}: runs; loss {first:.3f}, then {second:.3f}")
    except RankError as error:
        failure = next(each for each in error.failures.values() if each.error)
        show_text(f"{apply.__name__} {failure.text}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# All three stop. In the first, sharding finds layers by name and changes their class, but a stage
# without a head has an identity there, without a weight. In the second, ZeRO's flat buffers are
# laid out for full matrices, and a range of 64 x 32 = 2,048 elements does not have the shape of a
# shard. In the third, ZeRO did not know of the stages: both ends of the pipeline hold the tied
# embedding and must shard it in the same way.
#
# </details>
#
# These bugs are loud, because a name, a shape or an assertion does not hold. In section 5, the
# *group* or the index was wrong and every shape matched: such a bug is silent.
#
# ### The oracle
#
# The oracle now checks two copies x two tensor-parallel ranks x two stages, with ZeRO-1 along dp
# and sequence parallelism along tp. It checks both model families; GPT's embedding is tied and
# therefore on two stages. The third check leaves out one sum over tp: that of the norms' gradients,
# for which each rank has seen only its part of the tokens.

# %% tags=["output-oracle", "exhaustive"]
def all_axes(model, group):
    config = Config(model.config, DataConfig(sequence_length=12), TrainConfig(), lab.CUBE)
    return parallelize(model, lay_out(lab.CUBE, group.size(), cpu), config, cpu)


def without_norms(model, group):
    parallel = all_axes(model, group)
    parallel.layers["tensor"].sum_partial_gradients = lambda gradient: None
    return parallel


for apply, family in ((all_axes, "gpt"), (all_axes, "llama"), (without_norms, "llama")):
    show_text(f"{apply.__name__}, {family}: {lab.oracle(apply, family)}")

# %% [markdown]
# In the third check, the oracle names the first norm. Along tp, each rank keeps the gradient from
# its own tokens, so the copies differ, and none is correct. (Its question at the end is only a
# guess: here nothing was sent.)
#
# ## 7. Measure
#
# ### Read the ledger of a step
#
# We record one step of the story model, with a separate output head, on 2 x 2 x 2 ranks with
# ZeRO-1, sequence parallelism and 4 micro-batches. The [ledger](word:ledger) names each call's
# axis. When does a rank use which axis? A block in the figure lasts from the start of a call to its
# completion, so it includes waiting for the other ranks.

# %% tags=["figure-step"]
calls, held = zip(*run(lab.ledger_of_a_step, 8, batches[0], watch=False), strict=True)
show(timeline(lab.axis_lanes(calls, ranks=(0, 4)), unit="ms"), alt=(
    "One training step on rank 0 (first stage) and rank 4 (last stage): along tp they communicate "
    "in every layer, along pp after each pass of a micro-batch, along dp only at the ends of the "
    "step."
))

# %% [markdown]
# Along tp, the ranks communicate in every layer; along dp, only at the ends of the step. Along pp,
# the blocks are long because a receive lasts until the other stage has sent.
#
# Here are rank 0's calls by axis and operation. Which technique makes which?

# %% tags=["output-ledger", "nbval-check-output"]
by_axis = {}
for call in calls[0]:
    count, num_bytes = by_axis.get((call.axis, call.op), (0, 0))
    by_axis[call.axis, call.op] = count + 1, num_bytes + call.sent
print("rank 0: axis, operation    calls   bytes sent")
for (axis, op), (count, num_bytes) in sorted(by_axis.items()):
    print(f"        {axis}    {op:14} {count:5} {num_bytes:12,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Along tp: the all-gathers and reduce-scatters of sequence parallelism, and two all-reduces per
# step, one for the gradients of the norms and of the one key-value head, one for the norm used in
# clipping. Along pp: activations forward, gradients back, the loss from the last stage, and the
# norm. Along dp: ZeRO's reduce-scatter and all-gather, and all-reduces of the number of tokens, the
# loss and the norm.
#
# </details>
#
# Do the bytes of the large calls agree with the formulas of the previous chapters?

# %% tags=["figure-wire"]
measured, predicted, rest = lab.bytes_by_axis(calls, held)
print(f"ledger and formula agree: {measured == predicted}; not in the figure: "
      f"{rest:.1%} of all bytes")
show(wire(measured, predicted), alt="Bytes sent per step, by axis and stage: ledger and formula "
     "agree. tp sends most, as in the large model of section 2.")

# %% [markdown]
# Ledger and formula agree to the byte. As in section 2, tp sends most and pp least.
#
# ### The decision tree
#
# How do you choose among hundreds of layouts? A rule of thumb says: replicate the model if it fits;
# if it does not, shard its state with ZeRO; then use tensor parallelism up to a full node; then
# pipeline stages. The package's decision tree tries the cuts in this order, each with the lowest
# ZeRO stage that fits, or recomputes if none does. Without stages it doubles the micro-batch
# while that fits. At each cut it asks the estimator two questions and records the answers. It stops
# at one that is no faster, recomputes nothing, hardly waits along dp, and keeps the fastest:

# %% tags=["output-tree", "nbval-check-output"]
for line in decide(big).steps:
    show_text(line)

# %% [markdown]
# Here it finds the fastest layout of section 1. But a tree follows one path. A search asks the same
# estimator about *every* layout that it can time, with other schedules, hybrid sharding and
# selective recomputation too (chapter 12). From 64 GPUs on, the winners are read from a file.
# **Predict.** Does the tree lose more on few GPUs or on many?

# %% tags=["output-against", "nbval-check-output"]
gpt3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200)  # divisible by 8
MODELS = {"Llama 3.2 1B": (cost.PUBLISHED["Llama 3.2 1B"], 8192),
          "Llama 3.1 70B": (llama, 8192), "GPT-3 175B": (gpt3, 2048)}
print("seconds per step        tree    best   ratio   the tree's layout")
for name, num_gpus in product(MODELS, (8, 64, 1024)):
    job = Job(MODELS[name][0], num_gpus, H100, MODELS[name][1], global_batch_size=1024)
    try:
        tree, best = judged = trees.against_search(job)
    except ConfigError:
        continue  # it does not fit
    print(f"{name:13} {num_gpus:5} {tree.seconds:8.2f} {best.seconds:7.2f} {judged.ratio:7.2f}   "
          f"{str(tree.decision).split(', recomp')[0]}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# On many. Up to 64 GPUs it loses 6 % at most. On 1,024 its choice is within a tenth of the best
# for Llama, but slower by more than a quarter for GPT-3.
#
# </details>
#
# This comparison is circular, though: the tree and the search ask the same estimator, so it shows
# what the tree *does not look at*, not that either is right. The [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook) (2025) publishes step times
# of one model, with 8.86 billion parameters, in many layouts on 8 to 64 H100s. For each number of
# GPUs three rules pick one of them: the fewest cuts (the rule of thumb: least tp x pp, tensor
# before pipeline, lowest ZeRO stage, largest micro-batch), the estimator, and the estimator without
# the memory limit that the other two respect.
#
# **Predict.** How far are their picks from the fastest layout that was measured?

# %% tags=["output-judged", "nbval-check-output"]
print("GPUs   layouts   measured seconds over the fastest measured: the pick of ...")
print("      measured   fewest cuts   estimator   estimator, no limit   median layout")
for given in trees.measured_layouts():
    picks = given.fewest_cuts(), given.estimated(), given.estimated(fitting=False)
    middle = sorted(given.rows, key=lambda row: row.seconds)[len(given.rows) // 2]
    print(f"{given.num_gpus:4} {len(given.rows):9}" + "".join(
        f"{given.ratio(row):{width}.2f}"
        for row, width in zip((*picks, middle), (14, 12, 22, 16), strict=True)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The fewest cuts are within 6 % of the fastest measured layout in all four cases, and the estimator
# within 7 %, while the median layout takes up to 3.8 times as long. Without the limit, the
# estimator twice picks a layout over it that took almost three times as long as the fastest. Likely
# PyTorch's allocator, short of memory, kept freeing and allocating blocks; the source does not say.
# But on 64 GPUs, the pick over the limit is faster.
#
# </details>
#
# (The estimator's constants for this system were fitted to these runs.) So for this model, on up to
# eight nodes, a simple rule comes close. Nothing was fitted to the next runs: [Narayanan et al.
# (2021)](https://arxiv.org/abs/2104.04473), section 5.2, table 2, measured GPT-3 on A100s with full
# recomputation and 1,536 sequences per step, in two layouts: ZeRO-3 alone, where each GPU has 4, 2,
# or 1 sequences, and the model split into 96 parts, for which we take tp 8 x pp 12.
#
# **Predict.** For which of the two layouts is the estimate closer to the measurement?

# %% tags=["output-measured", "nbval-check-output"]
TABLE_2 = {384: (144, 153), 768: (88, 149), 1536: (44, 141)}  # measured TFLOP/s per GPU
work = 1536 * 2048 * (cost.training_flops_per_token(gpt3, 2048)
                      + cost.recompute_flops_per_token(gpt3, 2048, "full"))
print("TFLOP/s per GPU             ZeRO-3          tp 8 x pp 12")
print("        GPUs    estimate  measured    estimate  measured")
for num_gpus, measured_rates in TABLE_2.items():
    job, row = Job(gpt3, num_gpus, A100, 2048, 1536), f"{num_gpus:12}"
    sharded = Decision(ParallelConfig(dp=num_gpus, zero=3), "full", 1536 // num_gpus)
    cut = Decision(ParallelConfig(dp=num_gpus // 96, tp=8, pp=12), "full")
    for layout, rate in zip((sharded, cut), measured_rates, strict=True):
        row += f" {work / num_gpus / estimate(job, layout).seconds / 1e12:11.0f} {rate:9}"
    print(row)

# %% [markdown]
# <details><summary>Answer</summary>
#
# With tp and pp it is right within a few percent. With ZeRO-3, measured steps take 1.5 to 3.8 times
# as long as estimated (214 / 144, 167 / 44). The estimate assumes that weights are gathered while
# the GPU computes; likely that system did not (chapter 12 estimates both). From 768 to 1,536
# GPUs, the measured rate per GPU halves, so the step is no faster.
#
# </details>
#
# So treat a plan that relies on ZeRO-3's overlap as a hypothesis until you have measured it. Of any
# search, measure the first few choices.
#
# ### Save here, resume there
#
# A checkpoint that is tied to its layout ties the run to its cluster. In this package each rank
# writes what it holds under the names of the full tensors, as *boxes*: an offset and a size along
# each dimension. A rank that loads the checkpoint asks for the boxes it needs (see the Further
# section on boxes).
#
# We train for 12 steps in four jobs, each in a different layout: 2 copies of 2 tensor-parallel
# ranks; 4 stages; one process; ZeRO-3 on 3 ranks. For comparison, one process trains without
# interruption. `lab.job` calls the package's `train`, which resumes from the newest
# [checkpoint](word:checkpoint); float64 makes a mistake stand out from rounding.

# %% tags=["exhaustive"]
JOBS = {"dp 2 x tp 2, ZeRO-1": (4, ParallelConfig(tp=2, zero=1, sequence=True)),
        "pp 4": (4, ParallelConfig(pp=4)), "one process": (1, ParallelConfig()),
        "dp 3, ZeRO-3": (3, ParallelConfig(zero=3))}
root, job = Path(workspace.name), partial(lab.job, train, folder)
run(partial(job, steps=12), 1, root / "alone", ParallelConfig(), watch=False, timeout=90)
for number, (num_ranks, layout) in enumerate(JOBS.values(), start=1):
    steps = partial(job, steps=3 * number)
    run(steps, num_ranks, root / "moved", layout, watch=False, timeout=90)

# %% [markdown]
# Does a loss show where a job ended and the next began?

# %% tags=["output-moved", "exhaustive"]
uninterrupted, moved = lab.losses_in(root / "alone"), lab.losses_in(root / "moved")
print("steps       layout                last loss   largest relative difference")
for number, name in enumerate(JOBS):
    part = slice(3 * number, 3 * number + 3)
    error = max(abs(a / b - 1) for a, b in zip(moved[part], uninterrupted[part], strict=True))
    print(f"{3 * number + 1:2} to {3 * number + 3:2}    {name:20} {moved[part][-1]:10.4f} "
          f"{error:12.0e}")

# %% [markdown]
# Every loss agrees with the uninterrupted run's to rounding.
#
# ### Kill a rank
#
# What if a job ends without warning? We train on 2 x 2 x 2 ranks with a checkpoint every two steps.
# Rank 5 is killed with SIGKILL when it begins step 6, so it can neither save nor tell anyone.
#
# **Predict.** What do the other seven ranks do? From which step does the run resume?

# %% tags=["output-killed", "exhaustive"]
def job_with_a_death(group, *args, **more):
    take_step = Run.train_step
    Run.train_step = lambda run: os.kill(os.getpid(), signal.SIGKILL) \
        if (run.rank, run.step) == (5, 5) else take_step(run)
    job(group, *args, **more)


often = dict(checkpoint_every=2, steps=8)
saved = root / "killed" / "checkpoints"
try:
    run(partial(job_with_a_death, **often), 8, root / "killed", lab.CUBE, timeout=90)
except RankError as error:
    lab.report(error)
print("saved:", *(path.name for path in checkpoint.checkpoints(saved)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# They wait in a collective or a receive that cannot complete, until the launcher, which has noticed
# the death, ends them. The run resumes with step 5: the newest complete checkpoint is that of step
# 4, so step 5 has to be repeated.
#
# </details>
#
# Rank 5's partners are rank 4 along tp, rank 7 along dp and rank 1 along pp. Ranks 4 and 7 wait for
# it. So does rank 1, once it needs a gradient from stage 1, unless another wait comes first: one
# along tp for rank 0, say, which waits for rank 4. In this way all seven soon wait.
#
# A death in the middle of a save leaves a folder with a temporary name, which a restart ignores,
# and checksums reveal damage to a complete checkpoint. We try both:

# %% tags=["output-bit", "exhaustive"]
(saved / "step_00000006.tmp").mkdir()
newest = checkpoint.checkpoints(saved)[-1]
file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 1
file.write_bytes(content)
print("newest:", newest.name)
show_text(f"damage: {checkpoint.damage(newest)}")

# %% [markdown]
# Now restart the job on a different grid, tp 4 x dp 2. The checkpoint of step 4 is damaged, so it
# must resume from that of step 2:

# %% tags=["output-restarted", "exhaustive"]
layout = ParallelConfig(tp=4, zero=1, sequence=True)
run(partial(job, **often), 8, root / "killed", layout, watch=False, timeout=90)
print("set aside:", *(path.name for path in saved.glob("*.damaged")))
restarted = lab.losses_in(root / "killed")
error = max(abs(a / b - 1) for a, b in zip(restarted, uninterrupted[:8], strict=True))
print(f"{len(restarted)} steps; loss {restarted[-1]:.4f}, in one process {uninterrupted[7]:.4f}; "
      f"largest relative difference {error:.0e}")

# %% [markdown]
# After a death, a flipped bit and a change of layout, its losses are still those of one process.
#
# ### On real nodes
#
# There torchrun starts the ranks, with the same options, and starts them again after a death; see
# the Further section on clusters.
#
# ## 8. Recap
#
# 1. The ranks form a grid. The innermost axis has neighboring ranks and gets the links inside a
#    node: that should be tp, which sends activations for every layer.
# 2. Sum a number over an axis whose ranks hold parts of it, never over copies.
# 3. With a norm over the wrong ranks, or samples chosen by the wrong rank number, the loss still
#    falls at first. Compare gradients with one process.
# 4. Each technique is applied to what the previous one left: tensor, then stages, then the sharded
#    state. On 2 x 2 x 2 ranks, the oracle finds the same training as in one process.
# 5. A checkpoint knows names, not ranks: a run resumes in any layout, from the last intact
#    checkpoint.
#
# ## Exercises
#
# Write your answers into `exercises/ch11_all_axes.py`, save, and run the cell. In a terminal,
# `minitron hint 11.1` gives hints in three steps.
#
# - [**11.1 Rank and place**](exercise:11.1) (15 minutes): from a rank to its place in the grid, and
#   back.
# - [**11.2 Who talks to whom**](exercise:11.2) (30 minutes): the groups of an axis, which sum goes
#   over which, and the norm of a gradient that is sharded and replicated.
# - [**11.3 Layouts that fit**](exercise:11.3) (25 minutes): everything that divides, fits and stays
#   in the node.
# - [**11.4 Save here, resume there**](exercise:11.4) (25 minutes): who copies which range from
#   whom.
# - [**11.5 8 ranks, one limit**](exercise:11.5) (30 minutes): the capstone. You choose a layout,
#   and the grader trains the story model with it on 8 ranks with a memory limit.

# %%
check("11.1")

# %%
check("11.2")

# %%
check("11.3")

# %%
check("11.4")

# %%
check("11.5")

# %% [markdown]
# ## Further: on a cluster
#
# The same command on each of 8 nodes with eight GPUs:
#
# ```
# NODES=8 HEAD=node0 clusters/torchrun.sh configs/llama-8b.toml \
#     --parallel.zero 1 --parallel.tp 2 --parallel.sequence
# ```
#
# It tells torchrun to restart the ranks after a death (`--max-restarts`), and the training to
# resume from the last good checkpoint (`--restart`). The run's folder must be on a file system that
# all nodes share.
#
# Three things matter more on a cluster:
#
# - A rank can be stuck without having died, for example on a broken link. After
#   `train.hang_timeout` seconds without a step, every rank writes down where it is, one of them
#   reports who keeps the others waiting, and the job ends; torchrun restarts it.
# - A loss that is NaN or infinite stops the run before the weights are updated, and the report
#   names the step, its samples, the rank and the first module.
# - Saving takes long if the state is large. `--train.async-checkpoint` waits only for a copy in
#   host memory and writes it while training continues.
#
# ## Further: boxes
#
# How does a rank of a new layout know which part of a checkpoint it needs? ZeRO shards one flat
# buffer of many parameters, so a rank's part of a matrix may begin and end in the middle of a row.
# Such a range consists of at most three boxes: the end of a row, full rows, and the beginning of a
# row. Suppose three ranks of ZeRO hold elements 0 to 4, 5 to 16 and 17 to 23 of a (6, 4) matrix.
# What do they write?

# %% tags=["output-boxes", "nbval-check-output"]
shards = range(0, 5), range(5, 17), range(17, 24)
for rank, own in enumerate(shards):
    print(f"rank {rank}, elements {own.start} to {own.stop - 1}:")
    print("  ", ", ".join(f"{sizes} at {offset}" for offset, sizes in boxes_of((6, 4), own)))

# %% [markdown]
# Now two tensor-parallel ranks load it, each of which needs two columns. Two boxes either overlap
# in a box or not at all, and that overlap is what one rank copies from another's file. Each frame
# in the figure is a box, and its color says in whose file it is:

# %% tags=["figure-boxes"]
written = lab.written_by_ranges((6, 4), shards)
needed = [lab.read_by(written, range(6), columns) for columns in (range(0, 2), range(2, 4))]
show(pieces((6, 4), {"written by ZeRO's ranks": written, "read by tp rank 0": needed[0],
                     "read by tp rank 1": needed[1]}), alt=(
    f"Three ranks of ZeRO have written a matrix as {len(written)} boxes. Of two tensor-parallel "
    f"ranks, one reads {len(needed[0])} overlaps with them, the other {len(needed[1])}."))

# %% [markdown]
# Neither side knows the other's layout. The file names its boxes, the reader names what it needs,
# and the overlaps follow.
#
# ## Further: goodput
#
# MFU says how well the GPUs are used while the run makes progress. **Goodput** is the share of the
# time in which it makes progress. In a 54-day period of its training on 16,384 GPUs, Llama 3 405B
# had 466 interruptions, of which 419 were unexpected (Llama Team 2024, section 3.3.4). Each of
# these costs the time to restart, and the work since the last checkpoint. Saving more often loses
# less work but takes more time.
#
# Let a save take C seconds and a restart R, let failures strike every M seconds on average, and let
# the run save after every T seconds of work:

# %%
show_source(reliability.goodput, reliability.young_interval, reliability.daly_interval)

# %% [markdown]
# **Predict.** Suppose saving takes 60 s and restarting 10 minutes. How often should you save, and
# what share of the time is lost?

# %% tags=["output-goodput", "nbval-check-output"]
M, C, R = 54 * 24 * 3600 / 419, 60.0, 600.0
best = reliability.young_interval(C, M)
print(f"a failure every {M / 3600:.1f} hours; save every {best / 60:.0f} minutes (Young)")
costs = C / best, best / 2 / M, R / M
print("cost, relative to the work: saves {:.1%}, repeated work {:.1%}, restarts {:.1%}".format(
    *costs))
print(f"together {sum(costs):.1%}")
print("minutes between saves   goodput: formula   simulated")
for interval in (best / 8, best / 2, best, 2 * best, 8 * best):
    simulated = reliability.simulated_goodput(54 * 24 * 3600, interval, C, R, M)
    print(f"{interval / 60:21.0f} {reliability.goodput(interval, C, R, M):18.1%} {simulated:11.1%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Every 19 minutes. Saves then cost 5.2 % of the time that the work takes, repeating lost work as
# much, and restarts 5.4 %. So 1 / (1 + 15.8 %) = 86.4 % of the time is useful, and 13.6 % is lost.
#
# </details>
#
# The optimum is flat: half or twice the best interval costs little. The formula leaves out failures
# that strike during a save or while lost work is being repeated. So it is too optimistic, most of
# all if a run saves rarely.
#
# Daly's interval includes such failures. Where does that matter? A larger cluster of the same GPUs
# fails more often, in proportion to its size. `expected_goodput` also includes them:

# %% tags=["output-daly", "nbval-check-output"]
print("          save every (minutes)   goodput, Young's interval     Daly's interval")
print("   GPUs   Young     Daly         formula     expected          expected")
for factor in (1, 4, 16):
    often = C, R, M / factor
    young, daly = (each(C, M / factor) for each in (reliability.young_interval,
                                                    reliability.daly_interval))
    print(f"{16_384 * factor:7,} {young / 60:7.1f} {daly / 60:8.1f} "
          f"{reliability.goodput(young, *often):15.1%} "
          f"{reliability.expected_goodput(young, *often):12.1%} "
          f"{reliability.expected_goodput(daly, *often):17.1%}")

# %% [markdown]
# Daly's interval is shorter, here by about two thirds of a save: the first correction adds
# $\sqrt{2 C M} \cdot \sqrt{C / (2 M)} / 3 = C / 3$, then C is subtracted. A failure can strike
# during the save too, so what is at stake at a time is T + C, not T. Because the optimum is flat,
# the better interval gains little. The better *estimate* matters more: at 262,144 GPUs the
# first-order formula promises far more goodput than there is. At such sizes it pays to make saving
# and restarting fast, for example with asynchronous checkpoints, which shorten C.
#
# ### What Meta's number tells
#
# Meta reports that more than 90 % of the elapsed time was effective training, planned interruptions
# included. With our guesses for C and R, the formula gives 86.4 %, so at least one guess is too
# slow. How fast must a restart be for 90 %, if a save takes so long?

# %% tags=["output-meta", "nbval-check-output"]
print("save takes (s)   save every (minutes)   for 90 %, a restart may take (s)")
for saving in (60, 30, 10, 3):
    print(f"{saving:14} {reliability.young_interval(saving, M) / 60:22.1f} "
          f"{reliability.restart_for(0.9, saving, M):34.0f}")

# %% [markdown]
# If training stops for a full minute at each save, a restart may take no more than 81 s; if for 10
# seconds, almost 13 minutes. So one of our guesses is far too slow, or both are somewhat (30 s and
# seven minutes would do), and in truth Meta was faster than the table's rows, since the share is
# above 90 %, planned interruptions cost restarts too, and the formula is optimistic. The report
# states neither number, but the same section says that the team reduced the time to start a job and
# to save a checkpoint.
#
# ## Further: stragglers
#
# A step ends when its slowest rank is done. Suppose each rank's step time is normally distributed,
# with a standard deviation of 2 %. How long is a step, relative to the mean of one rank? The more
# ranks, the slower is the slowest of them:

# %% tags=["output-slowest", "nbval-check-output"]
print(" ranks    step")
for num_ranks in (1, 8, 256, 16_384):
    print(f"{num_ranks:6,} {reliability.slowest_of(num_ranks, 0.02):7.2f}")

# %% [markdown]
# That assumes that ranks meet once a step. How often they do depends on the axis. Along tp they
# meet in every layer, so a step takes a sum of maxima. Along dp they meet at its end, so it takes a
# maximum of sums. Along pp a stage waits for every micro-batch, in the order of the
# [schedule](word:schedule), so we play the schedule.
#
# Four ranks divide a step of four layers and four sequences. Along tp a rank has a quarter of each
# layer, for all sequences at once; along pp it has one layer, for one sequence at a time; along dp
# it has all layers, for one sequence. Each way it makes eight passes of the same size, four forward
# and four backward. A slow pass sleeps for 80 ms:

# %%
show_source(stragglers.predicted_extra)

# %% [markdown]
# **Predict.** First rank 1 is slow in every pass. Then the ranks are slow in turn, each in every
# fourth of its passes, so that all of them together sleep as long as rank 1 did alone. By how much
# does each lengthen a step along tp, pp and dp? And while rank 1 is slow, which rank waits least
# for others?

# %% tags=["output-stragglers", "exhaustive"]
along = {axis: stragglers.compared(axis) for axis in stragglers.LAYOUTS}
print("slow              a step is longer by (ms): predicted   measured")
for axis, found in along.items():
    for name, (predicted, measured) in found.extra.items():
        print(f"{axis}, {name:18} {predicted:28.0f} {measured:10.0f}")
print("rank 1 always slow: each rank waits (ms)")
for axis, found in along.items():
    print(f"{axis}  ", *(f"{ms:6.0f}" for ms in found.waits))

# %% tags=["exhaustive"]
always, turns = ([found.extra[name][1] for found in along.values()]
                 for name in ("rank 1 always", "in turn"))
show_text(claim(min(always) > 320, "A rank that is always slow lengthens a step along every axis, "
                "by most of what it sleeps at least."))
show_text(claim(turns == sorted(turns, reverse=True), "If ranks are slow in turn, tp pays most and "
                "dp least."))
show_text(claim(all(found.waits[1] == min(found.waits) for found in along.values()),
                "The slow rank waits least."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# A rank that is always slow costs about as much along every axis: most of what it sleeps (likely
# not all, as others compute). They wait for it in every layer (tp), for every micro-batch (pp),
# or once, at the end (dp).
#
# If the ranks take turns, it matters how often they meet. Along tp somebody sleeps in every layer
# and all others wait, so the step pays for all eight naps. Along dp each rank sleeps twice, and
# waits for nobody before the end, so the step pays for two. A pipeline is in between and pays for
# four. The more often ranks meet, the more of an irregular delay reaches everyone.
#
# </details>
#
# Every rank's step takes as long as that of the slowest, so step times cannot tell you which one is
# slow, and to the others it looks like a slow network (Llama Team 2024, section 3.3.4). Look at who
# *waits*: the straggler is the rank that spends the least time in collectives. On a cluster, the
# ledger's calls or a profiler's trace show that.
#
# ## Further: what the best layout does better
#
# For GPT-3 on 1,024 H100s, the tree ends where the rule of thumb does: tensor parallelism over a
# full node, then stages. What does the best layout of the search do better? Seconds per step:

# %% tags=["output-gains", "nbval-check-output"]
job = Job(gpt3, 1024, H100, 2048, global_batch_size=1024)
for name, each in zip(("the tree", "the best"), trees.against_search(job), strict=True):
    parts = each.estimate.parts
    print(f"{name}: {each.seconds:.2f} s, of which tp {parts['tp']:.2f}, bubble "
          f"{parts['bubble']:.2f}, dp {parts['dp']:.2f}")
    show_text(each)

# %% [markdown]
# It waits less along tp: its tensor-parallel groups fill half a node, so there are twice as many
# copies, and each GPU sends activations of half as many sequences. The tree filled the node before
# it tried a stage, and never went back. The best layout's pipelines have a quarter as many
# micro-batches (1024 / 32 / 2 = 16 instead of 1024 / 16 = 64), but zero bubble (chapter 9) keeps
# the wait about as short. Along dp, ZeRO-3 sends mostly while the GPU computes. The rest is faster
# compute. The tree tries neither zero bubble nor ZeRO-3 in a pipeline.
#
# ## Further reading
#
# - Narayanan et al., [Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM](https://arxiv.org/abs/2104.04473), 2021: section 3, which axis for what; 5.2 and
#   5.4, measured.
# - Smith et al., [Using DeepSpeed and Megatron to Train Megatron-Turing NLG
#   530B](https://arxiv.org/abs/2201.11990), 2022: section 2, three axes on nodes.
# - Llama Team, [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), 2024: section 3.3.2
#   (four axes, and their order) and 3.3.4 (what failed in 54 days).
# - Liang et al., [TorchTitan](https://arxiv.org/abs/2410.06511), 2024: section 2, the same
#   techniques from PyTorch; there the model is split into stages first.
# - Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022: sections 4 and 5.
# - Young, *A First Order Approximation to the Optimum Checkpoint Interval*, Communications of the
#   ACM 17(9), 1974; Daly, *A Higher Order Estimate of the Optimum Checkpoint Interval for Restart
#   Dumps*, Future Generation Computer Systems 22(3), 2006.
