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
# # 6. ZeRO: shard the training state
#
# **50 minutes, and 90 for the exercises. No GPU. [Exercises 6.1](exercise:6.1) to 6.4.**
#
# *You need:* the 16 bytes per parameter of [chapter 2](chapter:2), averaged gradients ([chapter
# 4](chapter:4)), and the two halves of the ring [all-reduce](word:all-reduce):
# [reduce-scatter](word:reduce-scatter) and [all-gather](word:all-gather) ([chapter 5](chapter:5)).
#
# *You will be able to:*
# - **[shard](word:shard)** [optimizer state](word:optimizer-state), gradients and parameters over
#   the [ranks](word:rank) without changing the training;
# - **predict** what a rank holds with [ZeRO-1](word:zero), 2 and 3, and, to the byte, what it
#   sends;
# - **catch** the mistakes that sharding invites.
#
# *The way there:*
# - **Sections 1 to 3:** which bytes a rank needs, and what each [stage](word:stage) saves;
# - **Sections 4 and 5:** the stages by hand, and a mistake that goes unnoticed;
# - **Sections 6 and 7:** the package's version, and its memory, traffic and overlap, measured.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from minitron import cost
from minitron.comm.collectives import all_gather_ring, reduce_scatter_ring
from minitron.config import ModelConfig
from minitron.cost.sharding import zero_bytes, zero_holdings, zero_volume
from minitron.launch import RankError, run
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.measure.ledger import merged
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.data.fsdp import FullyShardedDataParallel, apply_fsdp
from minitron.parallel.data.zero import Zero1, apply_zero1, apply_zero2
from minitron.parallel.flat import FlatShards
from minitron.plan.hardware import DEVICES
from minitron.proof.oracle import assert_same_training
from teaching.check import check
from teaching.claims import claim
from teaching.figures import memory_bars, plain_bytes, show, wire
from teaching.lab import ch06 as lab, recorded, show_source, show_text, verdict
from teaching.lab import ch06_prefetch as overlap
from teaching.widgets import zero_explorer

torch.set_num_threads(1)
MB, GB, TB, H100 = 1e6, 1e9, 1e12, DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# Take Llama 3 8B, trained in mixed precision with Adam. Chapter 2 counted 16 bytes per parameter
# for its [training state](word:training-state): weights, gradients and optimizer state. Chapter 4
# replicated the model on every GPU. How many bytes of training state do 64 GPUs hold together, and
# does one copy fit on a GPU?

# %% tags=["output-question", "nbval-check-output"]
llama_8b = cost.published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
P_llama, num_gpus = cost.num_parameters(llama_8b), 64
one = zero_bytes(P_llama, num_gpus, stage=0)
print(f"per GPU: {one / GB:.0f} GB of training state; an H100 has {H100.memory_bytes / GB:.1f} GB")
print(f"on {num_gpus} GPUs: {num_gpus * one / TB:.1f} TB, of which {one / TB:.2f} TB "
      "are distinct values")

# %% [markdown]
# One copy does not fit on a GPU. Together, the 64 GPUs have far more memory than the 0.13 TB of
# distinct values need, but data parallelism would put all of these values on every GPU.
#
# ## 2. Estimate
#
# What can be sharded? Split the 16 bytes into their parts and ask of each: *when* does a rank need
# *all* of it?
#
# | bytes per parameter | contents | when is all of it needed? |
# |---|---|---|
# | 12 | Adam's moments and the float32 [master weight](word:master-weights) (optimizer state) | ? |
# | 2 | the gradient | ? |
# | 2 | the bfloat16 weight used for compute (parameter) | ? |
#
# **Predict.** Fill in the last column. Which of the three can be sharded over [N](word:N) ranks, so
# that each holds one N-th, without any additional communication?
#
# <details><summary>Answer</summary>
#
# Optimizer state: never. Adam treats every value independently, so a rank can update one N-th of
# the weights with one N-th of the state. Gradients: never all at once. The backward pass produces
# them layer by layer, and the update needs the sum over the ranks for the same N-th only.
# Parameters: one layer at a time, in its forward and backward pass. Sharding the first two adds no
# communication with one [micro-batch](word:micro-batch) per step (section 4); the third does.
#
# </details>
#
# Sharding one kind after the other gives the three stages of ZeRO, the *zero redundancy optimizer*
# ([Rajbhandari et al. 2019](https://arxiv.org/abs/1910.02054)): ZeRO-1 shards the optimizer state,
# ZeRO-2 the gradients too, ZeRO-3 the parameters as well. ZeRO-0 is plain data parallelism. For P
# parameters on N ranks, the bytes per rank, from ZeRO-0 to ZeRO-3, are
#
# $$16P \quad\to\quad 4P + \frac{12P}{N} \quad\to\quad 2P + \frac{14P}{N} \quad\to\quad
# \frac{16P}{N}$$
#
# For Llama 3 8B:

# %% tags=["output-estimate", "nbval-check-output"]
print("GPUs         8      64   1,024")
for stage in range(4):
    sizes = [zero_bytes(P_llama, N, stage) / GB for N in (8, 64, 1024)]
    print(f"ZeRO-{stage} " + "".join(f"{size:8.1f}" for size in sizes) + " GB each")

# %% [markdown]
# On 8 GPUs, ZeRO-1 already makes the training state fit. Why go further? Read along the rows: with
# ZeRO-1, 4 bytes per parameter remain no matter how many GPUs there are, and with ZeRO-2, 2 bytes
# remain. A model ten times the size would not fit with either of them on any number of GPUs.
#
# ## 3. Picture
#
# Here are the stages for Llama 3.2 1B on four ranks, one row for each of ZeRO-0 to 3. The colored
# part of a box is what a rank holds (boxes are not to scale). All ranks hold the same amount, but a
# quarter-full box stands for a different quarter on each.

# %% tags=["figure-holdings"]
show(lab.stages_of_llama(), alt=(
    "From ZeRO-1 to ZeRO-3, one more kind of bytes is sharded over the ranks each time: optimizer "
    "state, gradients, parameters."
))

# %% [markdown]
# The optimizer state, the largest of the three, shrinks first.
#
# [Activations](word:activation) are not in the picture. They belong to the samples that a rank
# reads, and samples are divided among the ranks already.
#
# ## 4. By hand
#
# We build the three stages from plain tensors and chapter 5's ring, for a model that is small
# enough to follow: six layers, each a matrix and a tanh. A layer's forward pass takes one line, its
# backward pass two.

# %%
D, num_layers = 45, 6
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
start = random(num_layers, D, D) / D**0.5
inputs, targets = random(2, 24, D)


def forward(matrix, x):
    return torch.tanh(x @ matrix)


def backward(matrix, x, y, dy):
    """The gradients of the matrix and of the input x, given that of the output y."""
    dz = dy * (1 - y**2)
    return x.T @ dz, dz @ matrix.T


# %% [markdown]
# Next comes Adam (without epsilon). To update a weight, it reads only that weight, its gradient,
# and its two moments. So it works on any slice of the weights, such as the part that a rank owns.


# %%
def adam(weight, grad, state, step):
    mean, square = state
    mean.lerp_(grad, 0.1)
    square.lerp_(grad**2, 0.01)
    update = (mean / (1 - 0.9**step)) / (square / (1 - 0.99**step)).sqrt()
    weight -= 1e-3 * update


def own_part(tensor, group):
    """The slice (n/N,) of a tensor of n values that this rank owns, as a view."""
    return tensor.view(-1).tensor_split(group.size())[group.rank()]


# %% [markdown]
# Each rank reads every N-th sample, starting with the one of its own number, and divides its loss
# by the number of samples of *all* ranks, so that summing the ranks' gradients gives the gradient
# of the full batch.


# %%
def activations(matrices, x):
    """The input and the outputs of all layers."""
    outputs = [x]
    for matrix in matrices:
        outputs.append(forward(matrix, outputs[-1]))
    return outputs


def own_samples(tensor, group):
    return tensor[group.rank() :: group.size()]


def error_gradient(output, group):
    """The derivative, by the output, of the squared error averaged over all ranks' samples."""
    return 2 * (output - own_samples(targets, group)) / len(inputs)


# %%
def gradients(weights, group):
    """The gradients (P,) of this rank's samples, computed from the last layer to the first."""
    outputs, grads = activations(weights, own_samples(inputs, group)), torch.empty_like(weights)
    dy = error_gradient(outputs[-1], group)
    for i in reversed(range(num_layers)):
        grads[i], dy = backward(weights[i], outputs[i], outputs[i + 1], dy)
    return grads.view(-1)


# %% [markdown]
# ### ZeRO-1: shard the optimizer state
#
# Chapter 5 split the all-reduce of data parallelism into two halves, a reduce-scatter and an
# all-gather. After the first half, each rank has the complete sum for its own part, which is all it
# needs for its update. So run the optimizer *between* the halves, and gather the updated weights
# instead of the gradients. (`own` is a view of `weights`, so Adam updates the weights in place.)


# %%
def zero_1(group, num_steps=3):
    weights = start.clone()
    own = own_part(weights, group)  # (P/N,)
    state = torch.zeros(2, len(own), dtype=own.dtype)
    for step in range(1, num_steps + 1):
        grads = gradients(weights, group)  # (P,)
        adam(own, reduce_scatter_ring(grads, group), state, step)
        all_gather_ring(weights.view(-1), group)
    return {"parameter": [weights], "gradient": [grads], "optimizer state": [state]}


# %% [markdown]
# **Predict.** P is 6 × 45 × 45 values of 8 bytes. On four ranks, how many bytes does each send per
# step?
#
# For each rank, `lab.report` prints how far its weights are from those of one process and how
# many bytes it sends per step, beside the formula's. The figure shows the bytes that each rank
# still holds at the end of a step; two tensors that share memory count once.

# %% tags=["figure-stage1"]
alone = run(zero_1, 1)[0]["parameter"][0]  # the weights that one process ends with
show(lab.report(zero_1, 1, start, alone), alt=(
    "ZeRO-1 by hand, measured: all parameters, all gradients, a quarter of the optimizer state."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# As many as with data parallelism: $2\,\frac{N-1}{N}P$ values, or 2 × 3/4 × 6 × 45 × 45 × 8 bytes,
# which is what ranks 1 and 3 send. (P is not divisible by four, so two parts are one value longer,
# and rank 0 sends one value less, rank 2 one more; the formula in `minitron.cost` accounts for
# that.) One half of the ring carries gradients, the other updated weights.
#
# </details>
#
# The errors are no larger than rounding. Only the optimizer state is sharded.
#
# ### ZeRO-2: shard the gradients
#
# A rank needs the sum for its own part only. The rest of the gradient is useless once it has been
# sent, so there is no reason to keep it until the end of the backward pass. Split every *layer*
# into N parts, and reduce-scatter each layer's gradient as soon as the backward pass has produced
# it.


# %%
def zero_2(group, num_steps=3):
    weights, own_grads = start.clone(), [None] * num_layers
    owns = [own_part(matrix, group) for matrix in weights]
    states = [torch.zeros(2, len(own), dtype=own.dtype) for own in owns]
    for step in range(1, num_steps + 1):
        outputs = activations(weights, own_samples(inputs, group))
        dy = error_gradient(outputs[-1], group)
        for i in reversed(range(num_layers)):
            grad, dy = backward(weights[i], outputs[i], outputs[i + 1], dy)
            own_grads[i] = reduce_scatter_ring(grad.view(-1), group).clone()
            del grad  # else it would still be there while the next one is computed
        for i in range(num_layers):
            adam(owns[i], own_grads[i], states[i], step)
            all_gather_ring(weights[i].view(-1), group)
    return {"parameter": [weights], "gradient": own_grads, "optimizer state": states}


# %% tags=["figure-stage2"]
show(lab.report(zero_2, 2, start, alone), alt=(
    "ZeRO-2 by hand, measured: all parameters, a quarter of the gradients and of the state."
))

# %% [markdown]
# The gradients shrink too, for the same traffic (apart from the remainders, which now fall in every
# layer).
#
# **Predict.** Why does `zero_2` call `.clone()`? Without it, are the weights and the bytes sent
# still right? What changes?

# %% tags=["output-view", "nbval-check-output"]
def kept_of_a_layer(group, clones):
    """Bytes that this rank's part of a layer's gradient keeps alive."""
    grad = torch.ones(D * D, dtype=torch.float64)
    own = reduce_scatter_ring(grad, group)
    return lab.bytes_kept([own.clone() if clones else own])


for name, clones in (("with clone", True), ("without", False)):
    print(f"{name:10}  {run(kept_of_a_layer, 4, clones)[0]:6,} bytes on rank 0")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Both are still right. But `reduce_scatter_ring` returns a view, and a view keeps its entire
# storage alive, so the full gradients would stay in memory. Neither the loss nor the traffic
# shows it, only a count of bytes.
#
# </details>
#
# ### ZeRO-3: shard the parameters
#
# Now no rank stores a full layer. Before a layer computes, all ranks gather it (**unshard**);
# afterwards they free it (**reshard**). In `zero_3`, only the call of `forward` or `backward`
# refers to the full weight matrix, so it is freed when the call returns. With `del grad` as before,
# a rank never has more than one full matrix and one full gradient.


# %%
def unshard(shard, group):
    full = torch.empty(D * D, dtype=shard.dtype)
    own_part(full, group).copy_(shard)
    all_gather_ring(full, group)
    return full.view(D, D)


def forward_sharded(shards, x, group):
    outputs = [x]
    for shard in shards:
        outputs.append(forward(unshard(shard, group), outputs[-1]))
    return outputs


# %%
def zero_3(group, num_steps=3):
    shards, own_grads = [own_part(m, group).clone() for m in start], [None] * num_layers
    states = [torch.zeros(2, len(shard), dtype=shard.dtype) for shard in shards]
    for step in range(1, num_steps + 1):
        outputs = forward_sharded(shards, own_samples(inputs, group), group)
        dy = error_gradient(outputs[-1], group)
        for i in reversed(range(num_layers)):
            grad, dy = backward(unshard(shards[i], group), outputs[i], outputs[i + 1], dy)
            own_grads[i] = reduce_scatter_ring(grad.view(-1), group).clone()
            del grad
        for i in range(num_layers):
            adam(shards[i], own_grads[i], states[i], step)
    return {"parameter": shards, "gradient": own_grads, "optimizer state": states}


# %% [markdown]
# **Predict.** How many all-gathers and how many reduce-scatters of P values does a step need now?

# %% tags=["figure-stage3"]
show(lab.report(zero_3, 3, start, alone), alt=(
    "ZeRO-3 by hand, measured: a quarter of everything is held between the layers."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# One all-gather for the forward pass, one for the backward pass, and one reduce-scatter:
# $3\,\frac{N-1}{N}P$. The all-gather after the update is gone, because the next forward pass
# gathers anyway. So ZeRO-3 adds one [collective](word:collective), not two.
#
# </details>
#
# In the figure, every box is a quarter full: after a step, no rank holds a full copy of
# anything.

# %% [markdown]
# ## 5. The trap: clipping by a local norm
#
# Our stages train like one process. But many training scripts contain this line before
# `optimizer.step()`:
#
#     nn.utils.clip_grad_norm_(parameters, max_norm)
#
# It computes the norm of all gradients and, if that exceeds `max_norm`, scales them down to it.
# With ZeRO-1, suppose that `parameters` are the optimizer's: this rank's shard, with its gradients.
# (With `model.parameters()`, the line would do nothing here: the package has already freed those
# gradients.)
#
# **Predict.** Four ranks run the line unchanged. By what factor does each rank scale? Do the ranks'
# weights drift apart?
#
# (We train twenty steps on a task with a known answer: each token is the previous one plus 7,
# modulo the size of the vocabulary. In the code, `pieces` are this rank's parts of the parameters.
# The table shows the norms that ranks 0 to 3 see, before clipping.)

# %%
def local_norm(parallel, parameters):
    return nn.utils.clip_grad_norm_(parameters, 0.1)


def global_norm(parallel, parameters):
    return parallel.clip(parameters, 0.1)


def clipping(clip):
    """The package's ZeRO-1, which calls `clip` as soon as the gradients are complete."""
    class Clipping(Zero1):
        def finish(self):
            super().finish()
            self.norm = clip(self, list(self.pieces.values()))
    return Clipping


# %% tags=["output-clip"]
clips = (global_norm, local_norm)
trained = {clip: run(lab.train, 4, clipping(clip), watch=False) for clip in clips}
print("              loss           agree   norms, first step     norms, last step")
for clip, by_rank in trained.items():
    losses, agree = by_rank[0][0], all(torch.equal(w, by_rank[0][1]) for _, w in by_rank)
    print(f"{clip.__name__:13} {losses[0][0]:.2f} to {losses[-1][0]:.2f}   {agree!s:5}   "
          + "   ".join(" ".join(f"{seen[step][1]:.2f}" for seen, _ in by_rank) for step in (0, -1)))
w_start = run(lab.train, 1, clipping(global_norm), 0)[0][1]
w_global, w_local = (by_rank[0][1] for by_rank in trained.values())
difference, change = (w_local - w_global).abs().max(), (w_global - w_start).abs().max()
print(f"max |w_local - w_global| is {difference / change:.1%} of max |w_global - w_start|")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Each rank scales its shard by 0.1 over its own norm, so each scales down too little, most of all
# those with the smallest norms. The weights do not drift apart, because every weight is updated by
# one rank and copied to the others. So comparing the ranks with each other finds nothing. Nor does
# watching the loss, because AdamW divides each value by a running average of its size (chapter 4).
# If a rank's factor were wrong by the same ratio in every step, AdamW would cancel it, even if the
# ratio differed from rank to rank. But as the first and the last step show, the ratio of a local
# norm to the global norm changes during training. So the weights take a different path, which
# depends on the number of ranks.
#
# </details>
#
# The [oracle](word:oracle) compares the ranks with one process instead, which runs the same code:
# on a single rank, the local norm is the global norm. Here it trains with SGD, which cancels no
# factor, and on batches of its own.

# %% tags=["output-clip-oracle"]
for clip in clips:
    print(f"{clip.__name__}\n  {lab.compare(clipping(clip), 4)}")

# %% [markdown]
# With the local norm, the oracle names the first tensor that differs, and the factor. This tensor
# lies in the shard of one rank, so its gradient is too large by the ratio of the global norm to
# that rank's local norm. It is wrong "on all ranks" because they all gather it from its owner.
#
# The fix costs one all-reduce of a single number, because the square of the global norm is the sum
# of the squares of the local norms.

# %%
show_source(clip_pieces)

# %% [markdown]
# The package's [`train_step`](code:minitron.step.train_step) calls `parallel.clip`, which ends up
# here when the optimizer's parameters are sharded.
#
# ## 6. The real one
#
# The package's ZeRO-1 and 2 work on any model. Parameters have many sizes, so they are laid end to
# end in flat [**buckets**](word:bucket), and each bucket, padded to a multiple of N, is split into
# N equal shards. A shard may begin in the middle of a matrix, which does not matter to an optimizer
# that treats every value independently.
#
# A bucket's gradients are sent during the backward pass, as in chapter 4, but by reduce-scatter.
# Which line below frees the full gradients? (Of the second method you see the part that matters
# here. Replicas belong to hybrid sharding, a *Further* section.)

# %%
show_source(FlatShards.start_reduce)
show_source(FlatShards.finish_reduce, first="self.work.wait()", last="self.work = COMPLETED")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The line that sets `self.grad_full` and its views to `None`.
#
# </details>
#
# ZeRO-3 needs `model.blocks`: PyTorch calls its hooks before and after each block computes. A block
# is a **unit**, whose parameters are gathered together. Everything outside the blocks is one more
# unit, the **root**: embedding, final norm and head.
#
# Here is what happens before a block's forward pass, before its backward pass, and after its
# backward pass. (After its forward pass, a block is freed.) Which lines let communication overlap
# with compute? (The lines left out deal with [recomputation](word:recompute) and with the start of
# the backward pass.)

# %%
show_source(FullyShardedDataParallel.pre_forward, first="if self.frees", last="self.prefetch")
show_source(FullyShardedDataParallel.pre_backward, first="self.active = i", last="self.prefetch")
show_source(FullyShardedDataParallel.post_backward)

# %% [markdown]
# <details><summary>Answer</summary>
#
# `self.prefetch(index + 1)` starts the next unit's all-gather without waiting for it. The backward
# pass goes through the units in reverse, so there it is `self.prefetch(index - 1)`. And
# `self.reduce(unit)` starts a reduce-scatter, which travels while the next unit computes.
#
# </details>
#
# Autograd has saved views of a unit's parameters for the backward pass. This is the exception to
# section 4's lesson: `reshard` empties the storage behind the views, so they do not keep the memory
# alive, and the next all-gather refills it.
#
# Now the oracle, with several buckets, on two to four ranks. Its small model has a frozen parameter
# and a tied embedding, and odd sizes, so that shards begin and end inside matrices.

# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
small_buckets = {"bucket_bytes": 12_000}
APPLY = {"ZeRO-1": partial(apply_zero1, **small_buckets),
         "ZeRO-2": partial(apply_zero2, **small_buckets), "ZeRO-3": apply_fsdp}
for name, apply in APPLY.items():
    verdicts = {verdict(apply, num_ranks) for num_ranks in (2, 3, 4)}
    print(f"{name}, on 2, 3 and 4 ranks: {' / '.join(sorted(verdicts))}")

# %% [markdown]
# ## 7. Measure
#
# What do the stages save, and what do they cost?
#
# ### What is held, what is sent
#
# We train a small Transformer of six blocks in float32 on four ranks, with two sequences per rank
# and AdamW. In float32 there is no master copy of the weights: 4 bytes for the parameter,
# 4 for the gradient, 8 for Adam. That adds up to 16 again, but divided differently:
#
# $$16P \quad\to\quad 8P + \frac{8P}{N} \quad\to\quad 4P + \frac{12P}{N} \quad\to\quad
# \frac{16P}{N}$$
#
# The [meter](word:meter) watches a step with two micro-batches, so that gradients accumulate, and
# the [ledger](word:ledger) a step with one. For gradients, which come and go, we take the maximum
# over the step. The figure shows the formula (dashed), then the meter (solid).

# %% tags=["figure-bars", "exhaustive"]
results = {name: run(lab.measured, 4, apply, watch=False) for name, apply in lab.STAGES.items()}
P = cost.num_parameters(lab.shape_of(6))
held = {name: by_rank[0][0] for name, by_rank in results.items()}
formula = {f"ZeRO-{stage}": zero_holdings(P, 4, stage, lab.FP32) for stage in range(4)}
worst = {kind: max(abs(held[s][kind] / formula[s][kind] - 1) for s in formula)
         for kind in held["ZeRO-0"]}
print("largest error:", ", ".join(f"{kind} {error:.2%}" for kind, error in worst.items()))
show(memory_bars(held, {f"{stage}, formula": kinds for stage, kinds in formula.items()}), alt=(
    "What each of four ranks holds with ZeRO-0 to 3, by formula (dashed) and by the meter: they "
    f"differ by {max(worst.values()):.2%} at most."
))

# %% [markdown]
# (What the formula lacks are AdamW's step counters, one per parameter tensor.) In ZeRO-2 and
# ZeRO-3, full gradients exist only until they are sent. The meter counts them as temporary tensors,
# which this figure omits; the trillion-parameter example includes them.
#
# Now the traffic. With ZeRO-3, the model has seven units: six blocks and the root, whose embedding
# comes first in the forward pass, and whose head comes last. **Predict.** How many all-gathers does
# ZeRO-3 need in the forward pass, how many in the backward pass, and how many reduce-scatters?

# %% tags=["output-ledger", "nbval-check-output", "exhaustive"]
for name in ("ZeRO-0", "ZeRO-2", "ZeRO-3"):
    print(f"{name}\n{merged([of_rank[2] for of_rank in results[name]])}\n")

# %% [markdown]
# <details><summary>Answer</summary>
#
# In the forward pass, ZeRO-3 gathers six blocks once and the root twice, for the embedding and for
# the head: 8 all-gathers. The root is still there when the backward pass starts, which leaves the
# blocks' 6. (The last block is freed too, although it is needed again soon: its memory is free
# while the logits exist, and its second all-gather can overlap with the head's backward pass.) Each
# of the 7 units reduces its gradients once.
#
# </details>
#
# The 8 calls of ZeRO-0 and ZeRO-2 are one per bucket. An all-reduce is a reduce-scatter followed by
# an all-gather. ZeRO-1 and ZeRO-2 run the optimizer between them: the reduce-scatter carries
# gradients, the all-gather parameters. ZeRO-3 moves the all-gather from the end of the step into
# the forward pass and needs a second one in the backward pass.
#
# The figure adds up each stage's bytes (bars: ledger, ticks: formula).

# %% tags=["figure-wire", "exhaustive"]
sent = {name: [sum(call.sent for call in of_rank[2]) for of_rank in by_rank]
        for name, by_rank in results.items()}
ticks = {f"ZeRO-{stage}": [zero_volume(P, 4, 4, rank, stage).sent for rank in range(4)]
         for stage in range(4)}
ratio = {name: by_rank[0] / sent["ZeRO-0"][0] for name, by_rank in sent.items()}
show(wire(sent, ticks), alt=(
    "Bytes sent per step relative to data parallelism: "
    + ", ".join(f"{name} {each:.2f}" for name, each in ratio.items()) + "."
))

# %% [markdown]
# Only ZeRO-3 sends more than data parallelism, 1.50 times as much.
#
# ### Prefetch
#
# How much of this traffic does prefetch hide? We use two ranks, a larger model, and an **emulated**
# slow network: each transfer really happens, and a rank that waits for it sleeps until a link of
# the given latency and bandwidth would have delivered it. We choose the bandwidth so that a block's
# all-gather takes 70 % of its forward pass, measured alone.
#
# The prediction treats the link as a queue. With prefetch, a block's all-gather is requested when
# the previous block starts to compute; without prefetch, when the previous block ends. A block's
# gradients are sent when its backward pass ends. In the code, `k` counts the blocks, first of the
# forward and then of the backward pass; `send` puts a transfer into the queue and returns the time
# of its arrival:

# %%
show_source(overlap.predict_lanes, first="for k in", last="return")

# %% [markdown]
# Compute times come from a run without communication, with the compute of embedding, head, and loss
# spread over the blocks. Prediction and measurement cover the same span: from the start of the
# forward pass until the last gradient has arrived, without the optimizer.
#
# **Predict.** The model has six blocks, so there are 18 transfers: an all-gather per block and
# pass, and a reduce-scatter per block. (The prediction leaves out the root's transfers.) How many
# of the 18 does prefetch hide at best, and under which conditions?

# %% tags=["output-prefetch", "exhaustive"]
passes = run(overlap.compute_alone, 2, watch=False)[0]  # forward, backward
block_bytes, blocks = 4 * cost.num_block_parameters(overlap.WIDE), overlap.WIDE.num_layers
network = 1e-4, round(block_bytes / 2 / (0.7 * passes[0] / blocks), -6)  # latency, bandwidth
transfer = cost.ring_all_gather_seconds(block_bytes, 2, *network)
steps = overlap.measure(network)
print(f"a block: forward {1e3 * passes[0] / blocks:.1f} ms, all-gather {1e3 * transfer:.1f} ms")
compared = overlap.compare(steps, passes, transfer)
overlap.print_times(compared)

# %% [markdown]
# In the step, computing can take longer than alone: FSDP also copies gradients into flat buffers,
# and the cores are shared with both ranks' communication threads. The last column therefore repeats
# the prediction with the compute time that the ledger recorded *in the step*. That splits each
# error in two:

# %% tags=["output-errors", "exhaustive"]
overlap.print_errors(compared)

# %% [markdown]
# *The rest* is what the queue leaves out, such as the root's transfers, or waiting for a rank that
# is late. Each row has five repeats; a difference smaller than their spread may be noise. A gain
# that agrees with its prediction proves little by itself, since errors of the two rows can cancel
# in it. With prefetch, the communication threads work while the rank computes, not while it waits.
# If that lengthens the compute, the gain's part *due to compute* becomes negative.
#
# The timelines show the fastest step, without prefetch and with it; idle time is hatched. In the
# measured lanes, a transfer is drawn for as long as it occupies the emulated link. The thin purple
# stripes are the root's transfers. The thin orange ones are what a rank computes between two waits,
# mostly copies of a block's gradients into its flat buffer.

# %% tags=["figure-without", "exhaustive"]
draw = partial(overlap.draw_fastest, steps, passes, transfer, network)
hidden = {name: overlap.hidden_in_fastest(each, network) for name, each in steps.items()}
show(draw("without prefetch"), alt=(
    "Without prefetch, a block waits for its parameters before it computes: "
    f"{hidden['without prefetch']:.0%} of the communication is hidden."
))

# %% tags=["figure-prefetch", "exhaustive"]
show(draw("with prefetch"), alt=claim(hidden["with prefetch"] > hidden["without prefetch"], (
    "With prefetch, the network fetches the next block while this one computes: "
    f"{hidden['with prefetch']:.0%} of the communication is hidden. Gaps remain at the start, at "
    "the turn from forward to backward, and at the end."
)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# At best 15. In the prediction, three transfers are **exposed**, which means that nothing is
# computed meanwhile: the first all-gather, the first one of the backward pass, and the last
# gradients. They are the gaps in the second figure's predicted compute. (In the real step, the
# embedding or head briefly computes then; other gaps can appear.)
#
# The other 15 are hidden under two conditions. A transfer takes no longer than a block's forward
# pass, and two transfers take no longer than its backward pass, which has to hide the next block's
# all-gather and the previous block's gradients. We chose the bandwidth for the first; the second
# follows, because a backward pass has twice the FLOPs of a forward pass.
#
# Without prefetch, the prediction exposes all 18: in the backward pass, a block's all-gather even
# waits until the previous block's gradients have left. So the predicted gain is 15 times one
# transfer.
#
# </details>

# %% [markdown]
# ### On a cluster
#
# How much communication stays exposed on real GPUs? We estimate it for Llama 3 8B on 64 H100s, with
# 8,192 tokens on each, compute at 40 % of the dense peak, and a link of 50 GB/s (400 Gb/s) per GPU.
# (A recording of one GPU is in *Further*.)

# %% tags=["output-passes", "nbval-check-output"]
tokens_each, speed = 8192, 0.40 * DENSE_BF16_PEAKS["H100"]
forth = tokens_each * cost.forward_flops_per_token(llama_8b, tokens_each) / speed
back = tokens_each * cost.backward_flops_per_token(llama_8b, tokens_each) / speed
once = cost.ring_all_gather_seconds(2 * P_llama, 64, 0, 50 * GB)
print(f"compute: forward pass {forth:.2f} s, backward pass {back:.2f} s")
print(f"sending: one reduce-scatter or all-gather of all parameters {once:.2f} s")

# %% [markdown]
# **Predict.** At best, a pass hides communication for as long as it computes. Which of ZeRO-0 to 3
# then leaves the most communication exposed? (The answer explains the option `overlap_gather`.)

# %% tags=["output-traffic", "nbval-check-output"]
after, overlapped = (max(0, once - back) + rest for rest in (once, max(0, once - forth)))
exposed = {
    "ZeRO-0": max(0, 2 * once - back), "ZeRO-1": after, "ZeRO-2": after,
    "ZeRO-1, overlap_gather": overlapped, "ZeRO-2, overlap_gather": overlapped,
    "ZeRO-3": max(0, once - forth) + max(0, 2 * once - back),
}
print("                       training state   fits     sent   exposed  4 micro-batches")
for name, seconds in exposed.items():
    stage, count = int(name[5]), 4 if int(name[5]) >= 2 else 1
    state = zero_bytes(P_llama, 64, stage)
    sent_GB = [zero_volume(P_llama, 2, 64, 0, stage, n).sent / GB for n in (1, count)]
    print(f"{name:22} {state / GB:11.1f} GB   {'yes' if state < H100.memory_bytes else 'no':4}"
          f"{sent_GB[0]:6.0f} GB {seconds:7.2f} s {sent_GB[1]:13.0f} GB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Not ZeRO-3, although it sends the most, but ZeRO-1 and ZeRO-2. By default, they gather the updated
# parameters after the step, when there is nothing to compute, so both expose that transfer. With
# `overlap_gather=True`, the package overlaps it with the next forward pass. ZeRO-3 spreads its
# traffic over the entire step: the forward pass has one transfer to hide; the backward pass, twice
# as long, has two. (ZeRO-0 is here for comparison only, since its state does not fit. "Fits" is
# about the training state alone.)
#
# </details>
#
# With the same batch on more GPUs, each gets fewer tokens, and its compute can hide less.
#
# **Predict.** A forward pass takes about 2 P FLOPs per token; a transfer moves about 2 P bytes.
# From how many tokens per GPU on can ZeRO-3 hide all of its traffic? Does a larger model need more?

# %% tags=["output-threshold", "nbval-check-output"]
print(f"estimate: {speed / (50 * GB):,.0f} tokens per GPU")
print(f"in proportion to the times above: {tokens_each * once / forth:,.0f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# For T tokens, compute and transfer take equally long when 2 P T / speed = 2 P / bandwidth. P
# cancels: T is speed / bandwidth, for a model of any size. The backward pass doubles both sides.
# The times above (without latency) give a lower number, mainly because attention's FLOPs
# come on top of 2 P per token. So a batch of 4 million tokens lets about 600 GPUs hide this
# traffic. (With several micro-batches, the tokens of *one* count.)
#
# </details>
#
# Micro-batches change the picture: the last column of the table of stages is what a step of four
# sends. ZeRO-0 and ZeRO-1 accumulate full gradients and send them once per step. ZeRO-2 and ZeRO-3
# avoid holding full gradients by reducing them after every micro-batch; with
# `sync_every_micro_batch=False`, they hold full gradients after all, and send them once. By
# default, ZeRO-3 also gathers the parameters twice per micro-batch; with `reshard_each_pass=False`
# it gathers them once per step and holds them in full. So with the defaults of ZeRO-2 and ZeRO-3,
# use few, large micro-batches.
#
# So which stage when? Usually the first that fits (ZeRO-1 and 2 with `overlap_gather`), since each
# further stage buys memory with communication or with a constraint, such as an optimizer that
# treats every value independently. Hybrid sharding is a variant of ZeRO-3 that holds more and sends
# less between nodes. ([m](word:m) is the number of micro-batches; the traffic is in units of
# $\frac{N-1}{N}P$ values per step, with the package's defaults.)
#
# | | choose it when | bytes per parameter | traffic |
# |---|---|---|---|
# | ZeRO-0 | everything fits on every GPU | 16 | 2 |
# | ZeRO-1 | the optimizer state does not fit (better than ZeRO-2 if m is large) | 4 + 12/N | 2 |
# | ZeRO-2 | the gradients do not fit either, and m is small, but above 1 | 2 + 14/N | m + 1 |
# | ZeRO-3 | the parameters do not fit, but two units do (see below) | 16/N, two units | 3 m |
# | hybrid | ZeRO-3 in groups of S: slow links between nodes | 16/S, two units | *Further* |
# | none of them | a unit or one sequence's activations do not fit | | chapter 7 |
#
# Beside the unit that computes, a rank holds the previous one's gradients and, with prefetch, the
# next one's parameters. With one micro-batch, our ZeRO-1 frees each bucket once it is reduced, so
# it holds what ZeRO-2 holds; its formula is for m > 1.
#
# ### A trillion parameters?
#
# Here is the ZeRO paper's famous number: the training state of a trillion parameters is 16 TB, so
# each of 1,024 GPUs holds 16 GB. Does everything else fit beside them on an H100? Take the shape of
# Narayanan et al.'s trillion-parameter model ([2021](https://arxiv.org/abs/2104.04473), table 1):
# 128 layers of width 25,600.
#
# **Predict.** With prefetch, which is larger: a rank's shards or what is temporarily unsharded? By
# what factor?

# %%
trillion = ModelConfig(family="gpt", vocab_size=51_200, max_sequence_length=2048, num_layers=128,
                       width=25_600, num_heads=160, num_kv_heads=160, ffn_width=102_400)
P_trillion, block = cost.num_parameters(trillion), cost.num_block_parameters(trillion)
unit, root = 2 * block, 2 * (P_trillion - 128 * block)  # bytes
kept = cost.activation_bytes(trillion, 1, 2048, recompute="full")
recomputed = cost.activation_bytes_per_layer(trillion, 1, 2048)  # one layer at a time

# %% tags=["output-trillion", "nbval-check-output"]
print("GB                                       with prefetch   without")
parts = {
    f"a 1,024th of {16 * P_trillion / TB:.0f} TB": 2 * [zero_bytes(P_trillion, 1024, 3)],
    "parameters of two units, or of one": [2 * unit, unit],
    "gradients of two units": 2 * [2 * unit],
    "gradient of the root": 2 * [root],
    "one sequence, with full recomputation": 2 * [kept + recomputed],
}
parts["together"] = [sum(column) for column in zip(*parts.values(), strict=True)]
parts["an H100 has"] = 2 * [H100.memory_bytes]
for name, (with_it, without) in parts.items():
    print(f"{name:40} {with_it / GB:13.1f} {without / GB:9.1f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# It does not fit. A layer of this model is so large that its temporarily unsharded tensors weigh
# four times as much as the rank's shards. In the backward pass there are the parameters of two
# units, the one that computes and the next, which is prefetched, and the gradients of two: those
# that are computed, and those of the unit before, which travel. The root's gradient stays until the
# backward pass ends. Without prefetch, only one unit's parameters are there, and the sum fits, on
# paper: CUDA's own memory and fragmentation come on top, and every all-gather is exposed.
#
# </details>
#
# ZeRO-3 shards what a rank *stores*. To *compute*, every rank still needs a full layer. The next
# chapter splits the layers themselves.
#
# The explorer draws section 2's formula for sizes that you choose.

# %% tags=["figure-explorer"]
zero_explorer()

# %% [markdown]
# On any number of ranks, ZeRO-1 cannot fit once the 4 bytes per parameter that it does not shard
# fill the GPU, nor ZeRO-2 at twice that size.
#
# ## 8. Recap
#
# 1. N data-parallel ranks hold N copies of 16 P bytes. An optimizer that treats every value
#    independently can be split anywhere, and with it the gradients; parameters can be, because
#    they are needed one layer at a time. So ZeRO shards 12 of the 16 bytes, then 14, then all.
# 2. With one micro-batch per step, ZeRO-1 and ZeRO-2 send what data parallelism sends,
#    $2\,\frac{N-1}{N}P$: the two halves of the ring with the optimizer between them. ZeRO-3 sends
#    $3\,\frac{N-1}{N}P$.
# 3. If each rank clips by its local norm, the result is a different training run, which neither a
#    falling loss nor identical ranks reveal. The oracle does.
# 4. A view keeps its whole storage alive. Only counting bytes shows whether sharding saves
#    anything.
# 5. Prefetch overlaps all-gathers with the previous unit's compute. Temporarily unsharded units and
#    their gradients do not shrink with N.
#
# ## Exercises
#
# Write your answers into `exercises/ch06_zero.py`, save, and run the exercise's cell below. In a
# terminal, `minitron hint 6.1` gives hints in three steps.
#
# - [**6.1 Shard ranges**](exercise:6.1) (10 minutes): who owns which elements when parameters do
#   not divide evenly.
# - [**6.2 ZeRO-1 step**](exercise:6.2) (25 minutes): an optimizer that keeps one shard of its state
#   and clips by the global norm.
# - [**6.3 ZeRO-2 gradients**](exercise:6.3) (25 minutes): gradients that are reduced and freed
#   during the backward pass.
# - [**6.4 A ZeRO-3 unit**](exercise:6.4) (30 minutes): a module that stores only its shard between
#   uses.

# %%
check("6.1")

# %%
check("6.2")

# %%
check("6.3")

# %%
check("6.4")

# %% [markdown]
# ## Further: a code review
#
# Chapter 4 overlapped communication with the backward pass. Here is a colleague's ZeRO-1, which
# starts the sum asynchronously.


# %%
def hasty(group, late_rank=None, num_steps=3):
    weights = start.clone()
    own = own_part(weights, group)
    state = torch.zeros(2, len(own), dtype=own.dtype)
    for step in range(1, num_steps + 1):
        grads = gradients(weights, group)
        time.sleep(0.2 if group.rank() == late_rank else 0)
        summing = dist.all_reduce(grads, group=group, async_op=True)
        time.sleep(0.1)  # stands for other work, such as the next micro-batch
        adam(own, own_part(grads, group), state, step)
        summing.wait()
        all_gather_ring(weights.view(-1), group)
    return weights


# %% [markdown]
# **Predict.** It has run for weeks, and the weights were right. Do you approve it? And what happens
# if one rank is 0.2 s late: a hang, an error, ranks that differ, or none of these?

# %% tags=["output-hasty"]
print("late rank   error / total change   ranks agree")
for late_rank in (None, 2):
    by_rank = run(hasty, 4, late_rank)
    error = (by_rank[0] - alone).abs().max() / (start - alone).abs().max()
    agree = all(torch.equal(weights, by_rank[0]) for weights in by_rank)
    print(f"{late_rank!s:9} {error:20.1g}   {agree}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# None of these, but the weights are wrong. `summing.wait()` comes one line too late. As long as the
# network is faster than the other work, the sum happens to arrive in time. (If the first row is not
# about 1e-14 either, a rank was late by itself.) When a rank is late, the others update their parts
# with their own gradient or with a [partial sum](word:partial-sum). Again the ranks agree, because
# each part has one owner.
#
# A second defect costs only traffic: an all-reduce and an all-gather send $3\,\frac{N-1}{N}P$. With
# a reduce-scatter instead of the all-reduce, it would be ZeRO-1's $2\,\frac{N-1}{N}P$.
#
# </details>
#
# A test in which no rank is late does not find this. The package rules it out: its optimizer
# refuses to step before `finish`, which waits for the sums. Here is what it says if `finish` does
# nothing:

# %% tags=["output-refused"]
class Forgetful(Zero1):
    def finish(self):
        pass


try:
    assert_same_training(Forgetful, 2)
except RankError as error:
    print(str(error).splitlines()[0].replace(": the", ":\n  the"))

# %% [markdown]
# ## Further: prefetch on one GPU
#
# Does prefetch hide anything on a GPU? A single one can show it: its group has one rank, so each
# all-gather and each reduce-scatter is a copy, on a second CUDA stream. How much of the copying
# does the compute of six layers hide? The table compares the recorded steps without and with FSDP.
# Its column `idle` is the time in which the compute stream is idle; the last column is the part of
# that time in which the other stream copies.
#
# The dashed lines in the figure are predictions: two all-gathers and a reduce-scatter each read and
# write P values of 2 bytes at the memory's full bandwidth, and the compute hides all of that.

# %%
shown = recorded.prefetch()
show_text(shown.sentence)
print("ms             step   GPU computes   of it elementwise   idle   of it copying")
for name, row in overlap.recorded_steps().items():
    idle, copying = row["step_ms"] - row["busy_ms"], row["other_streams_ms"] - row["hidden_ms"]
    print(f"{name:10} {row['step_ms']:8.1f} {row['busy_ms']:14.1f} {row['elementwise_ms']:19.1f} "
          f"{idle:6.1f} {copying:15.1f}")
show(overlap.draw_copies(), alt=shown.alt)

# %% [markdown]
# In this recording, most of the copying was not hidden, and yet the step took no longer. Why no
# longer? The two steps differ in more than the copies. Under autocast, the residual stream and its
# gradient are float32; in the FSDP step, they have 16 bits. (Both steps convert the weights to 16
# bits.) So FSDP's elementwise kernels move fewer bytes, and the GPU computes for less time. But its
# compute stream is also idle for longer, and here the two differences cancel. The copies explain
# only a part of the longer idle time, as the last column shows. In the traces of both steps, most
# of the other idle time passes before the host has launched the next kernel.
#
# Why was most of the copying not hidden? The
# [trace of the FSDP step](../benchmarks/results/gpu/h200/trace_fsdp.json.gz) shows when the exposed
# copies run (open it at [ui.perfetto.dev](https://ui.perfetto.dev)). Early in the forward pass, the
# GPU waits for the host: kernels start as soon as they are launched, and the copies fall into the
# pauses between them. Later, the host is ahead. In the backward pass, most copies of parameters
# then run beside the compute. But the compute stream pauses during the copies of gradients, and
# during the last copies of parameters in the forward pass. What it waits for, the trace does not
# say, so we leave that open.
#
# The copies also take longer than predicted. Those beside the compute take longest, presumably
# because both use the memory.

# %% [markdown]
# ## Further: a claim about compute
#
# You may read that ZeRO-3 takes 1.5 times the *computing time*. The factor is right. What does it
# count?

# %% tags=["output-claim", "nbval-check-output", "exhaustive"]
work = [results[f"ZeRO-{stage}"][0][3] for stage in (0, 3)]
print(f"FLOPs of a rank     {work[0]:,} and {work[1]:,}: {work[1] / work[0]:.2f} times")
print(f"bytes a rank sends  {sent['ZeRO-0'][0]:,} and {sent['ZeRO-3'][0]:,}: "
      f"{sent['ZeRO-3'][0] / sent['ZeRO-0'][0]:.2f} times")
ratio = sum(held["ZeRO-3"].values()) / sum(held["ZeRO-0"].values())
print(f"bytes a rank holds  {ratio:.2f} times")

# %% [markdown]
# It counts traffic, not compute (Rajbhandari et al. 2019, section 7.2.2). Whether the step gets
# slower depends on how much of the traffic overlaps with compute.

# %% [markdown]
# ## Further: the largest model under a limit
#
# Suppose a rank may use 8 MB for everything: training state, activations, buckets, gathered units,
# temporary tensors.
#
# **Predict.** In float32 on four ranks, ZeRO-3 holds a quarter of what ZeRO-0 holds. Is its largest
# model four times as large?
#
# Formulas give the training state and the activations. We measure what comes on top (buckets,
# units, temporary tensors) once per stage, with three layers, and assume that it does not grow with
# depth. This predicts the peak for any depth, and thus how many layers fit. The last two columns
# test it: the measured peak with so many layers, and with one more.

# %% tags=["output-largest", "exhaustive"]
print("         layers   parameters   predicted     peak   with one layer more")
for stage, (name, apply) in enumerate(lab.STAGES.items()):
    layers, predicted = lab.predict_layers(stage, apply, 8 * MB)
    fits, exceeds = lab.fullest(apply, layers, layers + 1)
    print(f"{name:8} {layers:6} {cost.num_parameters(lab.shape_of(layers)):12,} "
          f"{plain_bytes(predicted):>11}{plain_bytes(fits):>9} {plain_bytes(exceeds):>21}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Not quite: three times. Temporarily unsharded tensors do not shrink with N: a bucket or two of
# gradients in ZeRO-2, and in ZeRO-3 the parameters and gradients of two units. Activations do not
# shrink either. In a deeper model, two units are a smaller share; in a wider one, the activations
# are.
#
# </details>

# %% [markdown]
# ## Further: hybrid sharding (HSDP)
#
# ZeRO-3's collectives run over all ranks. On many nodes, each unit's all-gathers and
# reduce-scatter then cross the network between nodes. **Hybrid sharding** shards within a group
# of S ranks, such as a node, and replicates over R groups ([Zhao et al.
# 2023](https://arxiv.org/abs/2304.11277), section 3.2.2). All-gathers and reduce-scatters stay
# inside the group; between groups, each rank all-reduces only its *shard* of the gradient. If a
# node holds one group, only these all-reduces cross the network.
#
# **Predict.** Four ranks stand for two nodes of two GPUs. They form either one group of four, or
# two groups of two, one in each node. What does each rank store, what does it send inside and
# across the groups, and how many bytes cross between the nodes?

# %% tags=["output-hybrid", "nbval-check-output", "exhaustive"]
print("        weights of   bytes sent by each rank    formula   same       all ranks,")
print("groups  each rank    in its group     across    agrees    training   other node")
for grid, apply in (((1, 4), apply_fsdp), ((2, 2), lab.apply_hybrid)):
    by_rank = run(lab.hybrid_step, 4, grid, watch=False)
    traffic, stored = by_rank[0]
    crossing = lab.between_nodes(grid, [sent for sent, _ in by_rank], ranks_per_node=2)
    print(f"{grid[0]} of {grid[1]}  {plain_bytes(stored):10} {traffic['dp']:14,} "
          f"{traffic['replicas']:10,}    {traffic == lab.hybrid_formula(grid)!s:9} "
          f"{verdict(apply, 4) == 'the same training'!s:10} {plain_bytes(crossing)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# With two groups of two, each rank stores twice as many parameters, gradients and moments. Inside
# a group it sends $3\,\frac{S-1}{S}P$, less than before because the group is smaller. Across
# groups it sends $2\,\frac{R-1}{R}\,\frac{P}{S}$, and that is all that crosses between the nodes:
# each of the four ranks sends its 0.9 MB to the other node. In the one group of four, a ring
# crosses between the nodes twice, from rank 1 to 2 and from rank 3 to 0, with 4.1 MB each time. You
# pay with memory for less traffic between nodes.
#
# </details>

# %% [markdown]
# ## Further: other libraries' names
#
# PyTorch's [FSDP2](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) offers
# ZeRO-3 and hybrid sharding, and [DeepSpeed](https://www.deepspeed.ai/docs/config-json/) all three
# stages, under other names. Most of DeepSpeed's are JSON keys: `bf16` and
# `communication_data_type` at the top level, the other keys under `zero_optimization`. For ZeRO-1,
# PyTorch has `torch.distributed.optim.ZeroRedundancyOptimizer`. Closest to ZeRO-2 is
# `ShardingStrategy.SHARD_GRAD_OP` of the older FSDP; unlike ZeRO-2, it also shards the parameters
# between steps.
#
# | here | PyTorch FSDP2 | DeepSpeed |
# |---|---|---|
# | `apply_zero1`, `apply_zero2` | not in FSDP2 (see above) | `stage`: 1, 2 |
# | `apply_fsdp` | `fully_shard` on each block, then on the model | `stage`: 3 |
# | a unit | a module that `fully_shard` was called on | each module |
# | `bucket_bytes` | one bucket per unit | `reduce_bucket_size`, in values |
# | prefetch of one unit | the same by default | `stage3_prefetch_bucket_size` |
# | `unshard`, `reshard` | `unshard()`, `reshard()` | `deepspeed.zero.GatheredParameters` |
# | `reshard_after_forward=False` | the same | a large `stage3_max_reuse_distance` |
# | `replicas` | a two-dimensional mesh | `zero_hpz_partition_size`, for weights alone |
# | `compute_dtype` | `MixedPrecisionPolicy(param_dtype=...)` | `bf16` |
# | `reduce_dtype` | `MixedPrecisionPolicy(reduce_dtype=...)` | `communication_data_type` |
# | `no_sync()` | `set_requires_gradient_sync(False)` | `no_sync()`, for stages 0 and 1 |
# | shards of a flat unit | shards of each parameter (dimension 0) | shards of each flat parameter |

# %% [markdown]
# ## Further: the paper's table
#
# Table 1 of Rajbhandari et al. 2019 lists GB of training state per GPU with ZeRO-1 to 3, for models
# of 7.5 billion, 128 billion and a trillion parameters in mixed precision. Below each row of the
# table, we print the formula's. Some of the paper's numbers are rounded, others cut off; we count
# both.
#
# **Predict.** They trained on V100s with 32 GB. Which stage does the model with 7.5 billion
# parameters need on 64 of them?

# %%
published = """
    1    120   120   120   2048  2048  2048  16000 16000 16000
    4    52.5  41.3  30    896   704   512   7000  5500  4000
    16   35.6  21.6  7.5   608   368   128   4750  2875  1000
    64   31.4  16.6  1.88  536   284   32    4187  2218  250
    256  30.4  15.4  0.47  518   263   8     4046  2054  62.5
    1024 30.1  15.1  0.12  513   257   2     4011  2013  15.6"""
table = [line.split() for line in published.splitlines() if line]


def gigabytes(N):
    return [zero_bytes(millions * 10**6, N, stage) / GB
            for millions in (7_500, 128_000, 1_000_000) for stage in (1, 2, 3)]


# %% tags=["output-table1", "nbval-check-output"]
rounded, cut_off = 0, 0
print("GPUs         7.5 billion             128 billion           1,000 billion")
for N, *numbers in table:
    ours = gigabytes(int(N))
    print(f"{N:>4}" + "".join(f"{text:>8}" for text in numbers))
    print("ours" + "".join(f"{size:8.5g}" for size in ours))
    for text, size in zip(numbers, ours, strict=True):
        digits = 10 ** len(text.partition(".")[2])
        is_rounded = round(float(text) * digits) == int(size * digits + 0.5)
        rounded += is_rounded
        cut_off += not is_rounded and round(float(text) * digits) == int(size * digits)
print(f"of the paper's 54 numbers, {rounded} are ours rounded and {cut_off} are ours cut off")

# %% [markdown]
# <details><summary>Answer</summary>
#
# ZeRO-1, going by the training state alone: 31.4 GB. But that leaves no room for activations and
# buckets, so ZeRO-2, at 16.6 GB, is the first with room to spare.
#
# </details>

# %% [markdown]
# ## Further reading
#
# - Rajbhandari et al., [*ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models*](https://arxiv.org/abs/1910.02054), 2019: sections 3 (where the bytes are), 5 (the
#   stages) and 7 (the traffic).
# - Zhao et al., [*PyTorch FSDP*](https://arxiv.org/abs/2304.11277), VLDB 2023, section 3: units,
#   prefetch, hybrid sharding, and what the allocator does with freed parameters.
# - Xu et al., [*Automatic Cross-Replica Sharding of Weight
#   Update*](https://arxiv.org/abs/2004.13336), 2020: the idea of ZeRO-1, applied by a compiler.
# - Ren et al., [*ZeRO-Offload*](https://arxiv.org/abs/2101.06840), 2021, and Rajbhandari et al.,
#   [*ZeRO-Infinity*](https://arxiv.org/abs/2104.07857), 2021: the same shards in host memory and on
#   disk.
