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
# # ZeRO: what is redundant, and how to stop holding it
#
# **55 minutes. No GPU. Exercises 6.1 to 6.4.**
#
# *You need:* chapter 2's 16 bytes per parameter, chapter 4's gradient averaged over the ranks, and
# chapter 5's two halves of the ring, reduce-scatter and all-gather.
#
# *You will be able to:*
# - **divide** optimizer state, gradients and parameters over the ranks, with the same training;
# - **predict** for each stage what a rank holds and what it sends, to the byte;
# - **catch** the mistakes that sharding invites, which neither a falling loss nor equal ranks show.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minitron import cost
from minitron.comm.collectives import all_gather_ring, reduce_scatter_ring
from minitron.launch import RankError, run
from minitron.launch.slow_network import SlowNetwork
from minitron.config import ModelConfig

# %%
from minitron.cost.sharding import zero_bytes, zero_holdings, zero_volume
from teaching.check import check
from teaching.figures import (
    Block, Held, holdings, memory_bars, plain_bytes, rank_lanes, show, timeline, wire,
)
from teaching.widgets import zero_explorer
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.proof.difference import first_difference
from minitron.measure.ledger import Ledger, merged
from minitron.measure.meter import Meter
from minitron.proof.oracle import (
    assert_same_training, sample_batches, small_llama, trainings,
)

# %%
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.clipping import clip_pieces
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.data.fsdp import FullyShardedDataParallel, Unit, apply_fsdp
from minitron.parallel.data.zero import Zero1, apply_zero1, apply_zero2
from minitron.parallel.flat import FlatShards

torch.set_num_threads(1)
MB, GB, TB = 1e6, 1e9, 1e12

# %% [markdown]
# ## 1. The question
#
# Llama 3 8B in mixed precision with Adam. Chapter 2 counted 16 bytes for each parameter. Chapter 4
# put the model on many GPUs. How many bytes of weights, gradients and optimizer state, its training
# state, are there on 64 of them, and does it fit?

# %% tags=["output-question", "nbval-check-output"]
llama_8b = cost.published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
P_llama, num_gpus = cost.num_parameters(llama_8b), 64
one = zero_bytes(P_llama, num_gpus, stage=0)
print(f"on each GPU: {one / GB:.0f} GB of training state; an H100 has 80")
print(f"on {num_gpus} GPUs: {num_gpus * one / TB:.1f} TB, of which {one / TB:.2f} TB "
      "are different numbers")

# %% [markdown]
# Sixty-four copies, and none of them fits. The memory is there: it is full of the same numbers.

# %% [markdown]
# ## 2. Estimate
#
# Take the 16 bytes apart, and ask of each part: *when* does a rank need *all* of it?
#
# | bytes per parameter | what | needed whole |
# |---|---|---|
# | 12 | Adam's two averages and the float32 weight (optimizer state) | ? |
# | 2 | the gradient | ? |
# | 2 | the weight to compute with (parameter) | ? |
#
# **Predict.** Fill in the last column. Which of the three can be divided over N ranks, so that each
# holds an N-th, without any further byte on the wire?
#
# <details><summary>Answer</summary>
#
# Optimizer state: never. Adam treats each number by itself, so a rank can update an N-th of the
# weights with an N-th of the state. Gradients: never, for that update needs their sum for an N-th
# of the weights alone. Parameters: each layer's during its own forward and backward pass, the rest
# of the time not at all. The first two are free. The third costs traffic.
#
# </details>
#
# These are the three stages of ZeRO, the *zero redundancy optimizer* (Rajbhandari et al. 2019):
# stage 1 divides the optimizer state, stage 2 the gradients too, stage 3 the parameters too. For P
# parameters on N ranks, in bytes per rank:
#
# $$16P \quad\to\quad 4P + \frac{12P}{N} \quad\to\quad 2P + \frac{14P}{N} \quad\to\quad
# \frac{16P}{N}$$

# %% tags=["output-estimate", "nbval-check-output"]
print("GPUs          8      64   1,024")
for stage in range(4):
    sizes = [zero_bytes(P_llama, N, stage) / GB for N in (8, 64, 1024)]
    print(f"stage {stage} " + "".join(f"{size:8.1f}" for size in sizes) + " GB each")

# %% [markdown]
# Stage 0 is data parallelism. With stage 1 the model states fit, from 8 GPUs on. Why go further?
# Look along the rows. 4 bytes of each parameter stay however many GPUs there are, in stage 2 still
# 2 bytes. So a model ten times the size would fit in neither, on any number of GPUs.

# %% [markdown]
# ## 3. Picture
#
# Who holds what? Four ranks and Llama 3.2 1B, one row for each stage. Every rank of a row holds as
# much as the others. A box that is a quarter full is another quarter on every rank.


# %%
def stages_of_llama(num_ranks=4):
    """What each rank holds, by the formula; boxes show the share of the whole."""
    P = cost.num_parameters(cost.PUBLISHED["Llama 3.2 1B"])
    whole, rows = zero_holdings(P, 1, 0), {}
    for stage in range(4):
        held = zero_holdings(P, num_ranks, stage)
        rows[f"stage {stage}"] = {kind: Held(held[kind], held[kind] / whole[kind])
                                  for kind in whole}
    return holdings(rows)


# %% tags=["figure-holdings"]
show(stages_of_llama(), alt=(
    "Stage by stage one more kind of bytes is divided over the ranks: optimizer state, gradients, "
    "parameters."
))

# %% [markdown]
# Activations are not in the picture. They belong to the samples that a rank has read, and those
# were divided from the start.

# %% [markdown]
# ## 4. By hand
#
# A model that one can see through: six layers, each a matrix and a tanh. Forward and backward pass
# of one layer are a line each.

# %%
D, num_layers = 45, 6
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
start = random(num_layers, D, D) / D**0.5
inputs, targets = random(2, 24, D)


def forward(matrix, x):
    return torch.tanh(x @ matrix)


def backward(matrix, x, y, dy):
    """The gradients of the matrix and of the input x, from that of the output y."""
    dz = dy * (1 - y**2)
    return x.T @ dz, dz @ matrix.T


# %% [markdown]
# Adam (without its epsilon), and what it touches: one weight, its gradient, its two averages. No
# number looks at its neighbor, so this works on any part of the weights.


# %%
def adam(weight, grad, state, step):
    mean, square = state
    mean.lerp_(grad, 0.1)
    square.lerp_(grad**2, 0.01)
    update = (mean / (1 - 0.9**step)) / (square / (1 - 0.99**step)).sqrt()
    weight -= 1e-3 * update


def own_part(tensor, group):
    """The part (n/N,) of a tensor of n numbers that this rank is responsible for, a view."""
    return tensor.view(-1).tensor_split(group.size())[group.rank()]


# %% [markdown]
# A rank reads every N-th sample. Each divides by the number of samples of *all* ranks, so the sum
# of the ranks' gradients is the gradient.


# %%
def through(matrices, x):
    """The input and the outputs of all layers."""
    outputs = [x]
    for matrix in matrices:
        outputs.append(forward(matrix, outputs[-1]))
    return outputs


def samples(group):
    return inputs[group.rank() :: group.size()], targets[group.rank() :: group.size()]


def error_gradient(output, target):
    return 2 * (output - target) / len(inputs)


# %%
def gradients(weights, group):
    """The gradients (P,) of this rank's samples, from the last layer to the first."""
    x, target = samples(group)
    outputs, grads = through(weights, x), torch.empty_like(weights)
    dy = error_gradient(outputs[-1], target)
    for i in reversed(range(num_layers)):
        grads[i], dy = backward(weights[i], outputs[i], outputs[i + 1], dy)
    return grads.view(-1)


# %% [markdown]
# ### Stage 1: a part of the optimizer state
#
# Data parallelism sums the gradients in two halves, says chapter 5: a reduce-scatter, then an
# all-gather. After the first half each rank has the sum of its own part. That is all it needs to
# step. So step *between* the halves, and gather the new weights in place of the gradients.


# %%
def stage_1(group, num_steps=3):
    weights = start.clone()
    own = own_part(weights, group)  # (P/N,)
    state = torch.zeros(2, len(own), dtype=own.dtype)
    for step in range(1, num_steps + 1):
        grads = gradients(weights, group)  # (P,)
        adam(own, reduce_scatter_ring(grads, group), state, step)
        all_gather_ring(weights.view(-1), group)
    return {"parameter": [weights], "gradient": [grads], "optimizer state": [state]}


# %% [markdown]
# **Predict.** How many bytes does a rank send per step, compared with data parallelism?
#
# To judge it: how far are the weights from those of one process, what does a rank still hold at the
# end of a step (every storage once), and what has it sent?


# %%
def bytes_kept(tensors):
    """Bytes of the storages that these tensors keep alive."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def judged(group, stage):
    """Weights, bytes kept by kind, and bytes sent in the second and third step."""
    sent = []
    for num_steps in (1, 3):
        with Ledger() as ledger:
            kept = stage(group, num_steps)
        sent.append(ledger.bytes_sent())
    weights = torch.cat([t.view(-1) for t in kept["parameter"]])
    return weights, {k: bytes_kept(ts) for k, ts in kept.items()}, (sent[1] - sent[0]) // 2


# %%
alone = run(stage_1, 1)[0]["parameter"][0]  # the weights that one process ends with


def off_by(weights, rank, N):
    """The largest error, whether a rank holds all weights or its parts of each layer."""
    parts = alone.flatten(1).tensor_split(N, dim=1)
    right = alone if weights.numel() == alone.numel() else parts[rank]
    return (weights - right.reshape(-1)).abs().max()


# %%
def report(stage, formula, N=4):
    """Print error and bytes on the wire, rank by rank; returns the picture of what is kept."""
    picture, whole = {}, start.nbytes
    print("rank  off by   bytes sent     formula   sent in units of P")
    for rank, (weights, kept, sent) in enumerate(run(judged, N, stage)):
        print(f"{rank:4} {off_by(weights, rank, N):7.0e} {sent:12,} {formula(rank):11,} "
              f"{sent / whole:20.4f}")
        shares = {"parameter": whole, "gradient": whole, "optimizer state": 2 * whole}
        picture[f"rank {rank}"] = {kind: Held(kept[kind], kept[kind] / shares[kind])
                                   for kind in kept}
    return holdings(picture)


# %% tags=["figure-stage1"]
show(report(stage_1, lambda rank: zero_volume(start.numel(), 8, 4, rank, stage=1).sent), alt=(
    "Stage 1 by hand, measured: all parameters, all gradients, a quarter of the optimizer state."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The same: $2\,\frac{N-1}{N}P$, the two halves of the ring. One half carries gradients, the other
# new weights. The formula of `minitron.cost` knows which rank's part is one number longer.
#
# </details>
#
# ### Stage 2: a part of the gradients
#
# A rank keeps the sum of its own part. The rest of the gradient is waste as soon as it is sent. So
# do not wait for the end: cut every *layer* into N parts, and reduce each layer's gradient as soon
# as the backward pass has made it.


# %%
def stage_2(group, num_steps=3):
    weights, own_grads = start.clone(), [None] * num_layers
    owns = [own_part(matrix, group) for matrix in weights]
    states = [torch.zeros(2, len(own), dtype=own.dtype) for own in owns]
    x, target = samples(group)
    for step in range(1, num_steps + 1):
        outputs = through(weights, x)
        dy = error_gradient(outputs[-1], target)
        for i in reversed(range(num_layers)):
            grad, dy = backward(weights[i], outputs[i], outputs[i + 1], dy)
            own_grads[i] = reduce_scatter_ring(grad.view(-1), group).clone()
        for i in range(num_layers):
            adam(owns[i], own_grads[i], states[i], step)
            all_gather_ring(weights[i].view(-1), group)
    return {"parameter": [weights], "gradient": own_grads, "optimizer state": states}


# %% tags=["figure-stage2"]
def by_layer(stage):
    """The formula where each layer is cut for itself."""
    return lambda rank: num_layers * zero_volume(D * D, 8, 4, rank, stage).sent


show(report(stage_2, by_layer(2)), alt=(
    "Stage 2 by hand, measured: all parameters, a quarter of the gradients and of the state."
))

# %% [markdown]
# **Predict.** Why the `.clone()`? Take it away: are the weights still right, and the bytes on the
# wire?

# %% tags=["output-view", "nbval-check-output"]
def kept_of_a_layer(group, clones):
    """Bytes that this rank's part of a layer's gradient keeps alive."""
    grad = torch.ones(D * D, dtype=torch.float64)
    own = reduce_scatter_ring(grad, group)
    return bytes_kept([own.clone() if clones else own])


for name, clones in (("with clone", True), ("without", False)):
    print(f"{name:10}  {run(kept_of_a_layer, 4, clones)[0]:6,} bytes on rank 0")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Both are still right. But a view keeps its whole storage alive. All gradients would be held, and
# neither the loss nor the wire would tell: only counting bytes does.
#
# </details>
#
# ### Stage 3: a part of the parameters
#
# Now a rank holds no layer whole. Before it computes with one, all ranks gather it (**unshard**);
# afterwards it is thrown away (**reshard**). In the backward pass the same again.


# %%
def unshard(shard, group):
    whole = torch.empty(D * D, dtype=shard.dtype)
    own_part(whole, group).copy_(shard)
    all_gather_ring(whole, group)
    return whole.view(D, D)


def forward_sharded(shards, x, group):
    outputs = [x]
    for shard in shards:
        outputs.append(forward(unshard(shard, group), outputs[-1]))
    return outputs


# %%
def stage_3(group, num_steps=3):
    shards, own_grads = [own_part(m, group).clone() for m in start], [None] * num_layers
    states = [torch.zeros(2, len(shard), dtype=shard.dtype) for shard in shards]
    x, target = samples(group)
    for step in range(1, num_steps + 1):
        outputs = forward_sharded(shards, x, group)
        dy = error_gradient(outputs[-1], target)
        for i in reversed(range(num_layers)):
            matrix = unshard(shards[i], group)
            grad, dy = backward(matrix, outputs[i], outputs[i + 1], dy)
            own_grads[i] = reduce_scatter_ring(grad.view(-1), group).clone()
        for i in range(num_layers):
            adam(shards[i], own_grads[i], states[i], step)
    return {"parameter": shards, "gradient": own_grads, "optimizer state": states}


# %% [markdown]
# **Predict.** How many all-gathers and how many reduce-scatters of P numbers is a step now?

# %% tags=["figure-stage3"]
show(report(stage_3, by_layer(3)), alt=(
    "Stage 3 by hand, measured: a quarter of everything, kept between the layers."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# An all-gather for the forward pass, one for the backward pass, a reduce-scatter:
# $3\,\frac{N-1}{N}P$. The all-gather after the step is gone, because the next forward pass gathers
# anyway. So it is not two more than before but one.
#
# </details>

# %% [markdown]
# ## 5. The trap
#
# ### Clipping by a local norm
#
# Most training scripts have this line before `optimizer.step()`:
#
#     nn.utils.clip_grad_norm_(parameters, max_norm)
#
# It computes the norm of all gradients and, where that is above `max_norm`, scales them down to it.
# In stage 1 the optimizer's parameters are this rank's part, with the gradients of this part.
#
# **Predict.** Four ranks run the line unchanged. By what does each rank scale? Do the ranks'
# weights drift apart?

# %%
def local_norm(parallel, parameters):
    return nn.utils.clip_grad_norm_(parameters, 0.1)


def global_norm(parallel, parameters):
    return parallel.clip(parameters, 0.1)


def clipping(clip):
    """The package's stage 1, with `clip` as soon as the gradients are complete."""
    class Clipping(Zero1):
        def finish(self):
            super().finish()
            self.norm = clip(self, list(self.pieces.values()))
    return Clipping


# %% [markdown]
# Twenty steps on a task with an answer: the next token is the last one plus 7.


# %%
def counting_rows(step, vocabulary=29):
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocabulary, (16, 1), generator=generator)
    return (first + 7 * torch.arange(8)) % vocabulary


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3)


# %%
def train(group, apply, num_steps=20):
    """Each step's loss and norm as this rank sees it, and the weights at the end."""
    torch.manual_seed(0)
    model, seen = small_llama(), []
    parallel = apply(model, group)
    optimizer = parallel.shard(adamw(model.parameters()))
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, counting_rows(step)[group.rank() :: group.size()])
        loss.backward()
        parallel.finish()
        optimizer.step()
        seen.append((parallel.mean(loss).item(), parallel.norm.item()))
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()])


# %% tags=["output-clip"]
print("              loss           alike   norm that each rank sees")
for clip in (global_norm, local_norm):
    by_rank = run(train, 4, clipping(clip), watch=False)
    losses, alike = by_rank[0][0], all(torch.equal(w, by_rank[0][1]) for _, w in by_rank)
    print(f"{clip.__name__:13} {losses[0][0]:.2f} to {losses[-1][0]:.2f}   {alike!s:5}   "
          + " ".join(f"{seen[0][1]:.2f}" for seen, _ in by_rank))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Each rank scales its part by a factor of its own. And the weights do not drift apart, because
# every weight is updated by one rank and copied to the others. So the usual check, are all ranks
# alike, finds nothing. Nor does the loss: AdamW divides scales away, as in chapter 4. But parts of
# the gradient have been scaled differently, so it has another direction, and what is trained
# depends on the number of ranks.
#
# </details>
#
# The **oracle** compares with one process. Here that is the same code on one rank, whose local norm
# is the global one:


# %%
def compare(apply, num_ranks):
    arguments = (apply, small_llama, sample_batches((9, 9, 7)), 1)
    alone, by_rank = (run(trainings, size, *arguments) for size in (1, num_ranks))
    found = first_difference(alone[0]["SGD"], [records["SGD"] for records in by_rank])
    return found or "the same training"


# %% tags=["output-clip-oracle"]
for clip in (global_norm, local_norm):
    print(f"{clip.__name__}\n  {compare(clipping(clip), 4)}")

# %% [markdown]
# The repair is one number on the wire. The square of the global norm is the sum of the squares of
# the local ones:

# %%
print(inspect.getsource(clip_pieces))

# %% [markdown]
# The package's `train_step` calls this where the optimizer's parameters are sharded.
#
# ### Stepping before the gradients are complete
#
# Chapter 4 hid the communication behind the backward pass. Here is stage 1 again, with the sum
# started in the background. Would it pass your review?


# %%
def hasty(group, late_rank=None, num_steps=3):
    weights = start.clone()
    own = own_part(weights, group)
    state = torch.zeros(2, len(own), dtype=own.dtype)
    for step in range(1, num_steps + 1):
        grads = gradients(weights, group)
        time.sleep(0.2 if group.rank() == late_rank else 0)
        summing = dist.all_reduce(grads, group=group, async_op=True)
        time.sleep(0.1)  # stands for other work: the next micro-batch, say
        adam(own, own_part(grads, group), state, step)
        summing.wait()
        all_gather_ring(weights.view(-1), group)
    return weights


# %% [markdown]
# **Predict.** It has run for weeks, and was right every time. Then one rank is late.

# %% tags=["output-hasty"]
print("late rank   error / whole change   ranks alike")
for late_rank in (None, 2):
    by_rank = run(hasty, 4, late_rank)
    error = (by_rank[0] - alone).abs().max() / (start - alone).abs().max()
    alike = all(torch.equal(weights, by_rank[0]) for weights in by_rank)
    print(f"{late_rank!s:9} {error:20.1g}   {alike}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `summing.wait()` stands one line too low. As long as the network is faster than the other work,
# the sum is there in time, by luck. When a rank is late, the others step with their own gradient,
# or with half a sum. No error, no hang, and again the ranks are alike.
#
# </details>
#
# No test on a quiet machine finds this. So the package does not leave it to luck: its optimizer
# refuses to step before `finish`, which waits.

# %% tags=["output-refused"]
class Forgetful(Zero1):
    def finish(self):
        pass


try:
    assert_same_training(Forgetful, 2)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## 6. The real one
#
# The package's stages work on any model. Parameters have all sizes, so they are laid end to end in
# flat **buckets**, and each bucket is cut into N equal shards. A rank's shard may begin in the
# middle of a matrix. For an optimizer that treats each number alike it makes no difference.
#
# A bucket's gradients leave as in chapter 4, with another collective at the end of the way. Which
# line frees them?

# %%
print(inspect.getsource(FlatShards.start_reduce))
print(inspect.getsource(FlatShards.finish_reduce))

# %% [markdown]
# Stage 3 puts hooks on the model. Each block is a **unit**: its parameters are gathered together.
# Read the lifecycle, and find the line that makes the network work while the device computes.

# %%
print(inspect.getsource(FullyShardedDataParallel.pre_forward))
print(inspect.getsource(FullyShardedDataParallel.pre_backward))
print(inspect.getsource(FullyShardedDataParallel.post_backward))

# %% [markdown]
# `self.units[index + 1].unshard()` starts the next unit's all-gather and does not wait for it:
# **prefetch**. In the backward pass it is the unit before.
#
# The oracle, with several buckets, on two to four ranks. The small model has a frozen parameter and
# a tied embedding, and no size in it divides by four.

# %%
small_buckets = {"bucket_bytes": 12_000}
APPLY = {
    "stage 1": partial(apply_zero1, **small_buckets),
    "stage 2": partial(apply_zero2, **small_buckets),
    "stage 3": apply_fsdp,
}


def verdict(apply, num_ranks, **options):
    try:
        assert_same_training(apply, num_ranks, **options)
        return "the same training"
    except AssertionError as error:
        return str(error)


# %% tags=["output-oracle", "nbval-check-output"]
for num_ranks in (2, 3, 4):
    for name, apply in APPLY.items():
        print(f"ranks: {num_ranks}  {name}  {verdict(apply, num_ranks)}")

# %% [markdown]
# ## 7. Measure
#
# ### What is held, what is sent
#
# A Transformer with 0.7 million parameters in float32, two sequences per rank, AdamW. In float32
# there is no second copy of the weights: 4 bytes for the parameter, 4 for the gradient, 8 for Adam.
# That makes 16 again, and other shares:
#
# $$16P \quad\to\quad 8P + \frac{8P}{N} \quad\to\quad 4P + \frac{12P}{N} \quad\to\quad
# \frac{16P}{N}$$

# %%
def shape_of(num_layers):
    return ModelConfig("gpt", 64, 16, num_layers, 96, 4, 4, 384)


def prepare(group, apply, num_layers):
    model = Transformer(shape_of(num_layers))
    initialize(model, seed=0)
    parallel, optimizer = apply(model, group), adamw(model.parameters())
    if hasattr(parallel, "shard"):  # let it step this rank's part alone
        parallel.shard(optimizer)
    return model, parallel, optimizer


# %%
def take_step(model, parallel, optimizer, *micro_batches):
    *others, last = micro_batches
    optimizer.zero_grad()
    for rows in others:
        with parallel.no_sync():
            loss_of(model, rows).backward()
    loss_of(model, last).backward()
    parallel.finish()
    optimizer.step()


# %%
rows = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(0))
whole_buckets = {"bucket_bytes": 400_000}  # about a block
STAGES = {
    "stage 0": partial(apply_bucketed_data_parallel, **whole_buckets),
    "stage 1": partial(apply_zero1, **whole_buckets),
    "stage 2": partial(apply_zero2, **whole_buckets),
    "stage 3": apply_fsdp,
}


# %% [markdown]
# The **meter** watches the second step, of two micro-batches, so that gradients are accumulated.
# The **ledger** watches the third, of one. Gradients come and go: we take the most that is held at
# any moment. In stage 3 the model itself holds nothing between its layers, and the weights are the
# optimizer's. The meter calls such weights "master weight".


# %%
def peak_of(group, apply, num_layers):
    """What the meter sees in the second step, and the means to take a third."""
    model, parallel, optimizer = prepare(group, apply, num_layers)
    own = rows[group.rank() :: group.size()]
    step = partial(take_step, model, parallel, optimizer)
    step(own)
    with Meter(model, optimizer) as meter:
        step(*own.split(1))
    return meter, partial(step, own)


# %%
def measured(group, apply):
    """Bytes held by kind, bytes at the peak; the calls and the FLOPs of one step."""
    meter, step = peak_of(group, apply, num_layers=6)
    held = meter.now() | {"gradient": max(moment.bytes["gradient"] for moment in meter.timeline)}
    own = sum(t.bytes for t in meter.peak.tensors
              if (t.name, t.category) == ("master weight", "optimizer state"))
    held = {"parameter": held["parameter"] + own, "gradient": held["gradient"],
            "optimizer state": held["optimizer state"] - own}
    with Ledger() as ledger, FlopCounterMode(display=False) as flops:
        step()
    return held, meter.peak.total, ledger.calls, flops.get_total_flops()


# %%
results = {name: run(measured, 4, apply, watch=False) for name, apply in STAGES.items()}
P, fp32 = cost.num_parameters(shape_of(6)), cost.RECIPES["fp32"]
held = {name: by_rank[0][0] for name, by_rank in results.items()}
formula = {f"stage {stage}": zero_holdings(P, 4, stage, fp32) for stage in range(4)}

# %% tags=["figure-bars"]
print("largest difference of meter and formula:", ", ".join(
    f"{kind} {max(abs(held[s][kind] / formula[s][kind] - 1) for s in STAGES):.2%}"
    for kind in held["stage 0"]))
show(memory_bars(held, {f"{stage}, formula": kinds for stage, kinds in formula.items()}), alt=(
    "What four ranks hold in each stage, by formula (dashed) and by the meter: all bars agree."
))

# %% [markdown]
# And the wire. **Predict.** In which order of collectives do stages 2 and 3 send, and which of them
# carry gradients?

# %% tags=["output-ledger", "nbval-check-output"]
for name in ("stage 0", "stage 2", "stage 3"):
    print(f"{name}\n{merged([of_rank[2] for of_rank in results[name]])}\n")

# %% [markdown]
# An all-reduce is a reduce-scatter and an all-gather. Stages 1 and 2 put the optimizer between
# them. Stage 3 moves the all-gather from the end of the step into the forward pass, and has another
# in the backward pass. (What stands outside the blocks is one unit. The embedding comes first and
# the head last, so this unit is gathered twice in the forward pass, and is still there when the
# backward pass begins with it.)

# %% tags=["figure-wire"]
sent = {name: [sum(call.sent for call in of_rank[2]) for of_rank in by_rank]
        for name, by_rank in results.items()}
ticks = {f"stage {stage}": [zero_volume(P, 4, 4, rank, stage).sent for rank in range(4)]
         for stage in range(4)}
show(wire(sent, ticks), alt=(
    "Data parallelism and stages 1 and 2 send the same; stage 3 sends half as much again."
))

# %% [markdown]
# ### A claim
#
# One can read that stage 3 takes 1.5 times the *computing time*. The number is right. What does it
# count?

# %% tags=["output-claim"]
work = [results[f"stage {stage}"][0][3] for stage in (0, 3)]
print(f"FLOPs of a rank     {work[0]:,} and {work[1]:,}: {work[1] / work[0]:.2f} times")
print(f"bytes a rank sends  {sent['stage 0'][0]:,} and {sent['stage 3'][0]:,}: "
      f"{sent['stage 3'][0] / sent['stage 0'][0]:.2f} times")
ratio = sum(held["stage 3"].values()) / sum(held["stage 0"].values())
print(f"bytes a rank holds  {ratio:.2f} times")

# %% [markdown]
# Traffic, neither compute nor memory (Rajbhandari et al. 2019, section 7.2.2). Whether a step gets
# slower depends on whether the traffic can be hidden. That is the next measurement but one.
#
# ### The largest model under a limit
#
# Say a rank may use 8 MB, all included: activations, buckets, gathered units, temporary results.
#
# **Predict.** In float32 on four ranks, stage 3 holds a quarter of what stage 0 holds. Is its
# largest model four times as large?
#
# The formula tells the model states. What comes on top (buckets, units, activations) we measure
# with four layers and with six, and expect it to grow evenly.

# %%
limit = 8 * MB


def states(stage, layers):
    return zero_bytes(cost.num_parameters(shape_of(layers)), 4, stage, fp32)


def peaks(group, apply, layers):
    return [peak_of(group, apply, L)[0].peak.total for L in layers]


# %%
def fullest(apply, *layers):
    """Bytes at the peak of the fullest rank, for each number of layers."""
    return map(max, zip(*run(peaks, 4, apply, layers, watch=False), strict=True))


def predict_layers(stage, apply):
    """The most layers that stay below the limit."""
    four, six = fullest(apply, 4, 6)
    on_top = four - states(stage, 4)
    more = (six - states(stage, 6) - on_top) / 2  # with each layer
    return max(L for L in range(4, 50) if states(stage, L) + on_top + (L - 4) * more <= limit)


# %% tags=["output-largest"]
print("         layers   parameters      peak   with one layer more")
for stage, apply in enumerate(STAGES.values()):
    layers = predict_layers(stage, apply)
    fits, bursts = fullest(apply, layers, layers + 1)
    print(f"stage {stage} {layers:7} {cost.num_parameters(shape_of(layers)):12,} "
          f"{plain_bytes(fits):>9} {plain_bytes(bursts):>21}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Not quite: three times. What is unsharded for a moment does not shrink with N: a bucket or two of
# gradients in stage 2, and in stage 3 the parameters and gradients of two units. Activations do not
# shrink either. With wider and more layers all of this matters less.
#
# </details>

# %% [markdown]
# ### Prefetch
#
# Two ranks, a larger model, and a network that is slowed down. `SlowNetwork` is an **emulation**:
# the transfer happens, and whoever waits for it sleeps until a link of that latency and bandwidth
# would have delivered. We choose a bandwidth at which a block's all-gather takes 70 % of its
# forward pass.


# %%
wide, N = ModelConfig("gpt", 256, 128, 6, 192, 4, 4, 768), 2
tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))


def compute_alone(group):
    """Seconds of a forward and a backward pass without communication, the fastest of each."""
    model, fastest = Transformer(wide), (float("inf"),) * 2
    initialize(model, seed=0)
    for _ in range(10):
        with Ledger() as ledger:
            loss_of(model, tokens).backward()
        took = [sum(span.end - span.start for span in ledger.spans if span.phase == phase)
                for phase in ("forward", "backward")]
        fastest = list(map(min, fastest, took))
    return fastest


# %%
passes = run(compute_alone, N, watch=False)[0]
block_bytes = 4 * cost.num_block_parameters(wide)
network = 1e-4, round(block_bytes / 2 / (0.7 * passes[0] / wide.num_layers), -6)
gathering = cost.ring_all_gather_seconds(block_bytes, N, *network)
print(SlowNetwork(*network))
print(f"a block: forward {1e3 * passes[0] / wide.num_layers:.1f} ms, "
      f"all-gather {1e3 * gathering:.1f} ms")

# %% [markdown]
# The prediction is a queue again: the blocks of the forward pass, and the same blocks backwards.
# With prefetch the next block's parameters are sent for when this one begins to compute, without it
# when it ends. A block's gradients leave when its backward pass ends.


# %%
def send(link, asked):
    """Queue one block's transfer; returns when it is over, in ms."""
    begin = max(asked, link[-1].end if link else 0.0)
    link.append(Block("communication", begin, begin + 1e3 * gathering))
    return link[-1].end


# %%
def predict_lanes(prefetch):
    L, compute, link, now = wide.num_layers, [], [], 0.0
    for k in range(2 * L):
        kind = "forward" if k < L else "backward"
        if k in (0, L) or not prefetch:
            there = send(link, now)
        begin = max(now, there)
        now = begin + 1e3 * passes[k >= L] / L
        compute.append(Block(kind, begin, now))
        if prefetch and k not in (L - 1, 2 * L - 1):
            there = send(link, begin)
        if kind == "backward":
            send(link, now)
    return {"predicted compute": compute, "predicted network": link}


# %% [markdown]
# The package always prefetches. To see the difference, we take it away: asking for a unit ahead of
# time does nothing, and waiting for it asks first.


# %%
def without_prefetch(model, group):
    parallel = apply_fsdp(model, group)
    for unit in parallel.units:
        unit.unshard = lambda: None
        unit.wait_for_unshard = partial(ask_and_wait, unit)
    return parallel


def ask_and_wait(unit):
    Unit.unshard(unit)
    for gather in unit.gathers:
        gather.wait()
    unit.gathers = []


# %%
def slow_steps(group, apply, num_steps=6):
    """Calls, spans and seconds of each step on the slow network."""
    model, steps = Transformer(wide), []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = parallel.shard(adamw(model.parameters()))
    for _ in range(num_steps):
        dist.barrier(group)
        begin = time.perf_counter()
        with SlowNetwork(*network), Ledger() as ledger:
            take_step(model, parallel, optimizer, tokens)
        steps.append((ledger.calls, ledger.spans, time.perf_counter() - begin))
    return steps


# %%
def draw(apply, prefetch, alt):
    """The predicted lanes above those of rank 0 in its fastest step."""
    steps = run(slow_steps, N, apply, watch=False)[0]
    calls, spans, seconds = min(steps, key=lambda step: step[2])
    predicted = predict_lanes(prefetch)
    print(SlowNetwork(*network))
    print(f"forward and backward: predicted {predicted['predicted network'][-1].end:.0f} ms; "
          f"whole step measured {1e3 * seconds:.0f} ms")
    lanes = rank_lanes([calls], [spans])
    show(timeline(lanes, predicted, "ms, network emulated"), alt=alt)


# %% tags=["figure-without"]
draw(without_prefetch, False, (
    "Without prefetch compute and network take turns: whenever one works, the other waits."
))

# %% tags=["figure-prefetch"]
draw(apply_fsdp, True, (
    "With prefetch the network fetches the next block while this one computes: hardly any gap is "
    "left in the compute lane."
))

# %% [markdown]
# What is left exposed are the places where there is nothing to compute meanwhile: the very first
# unit, the turn from forward to backward, the last gradients. The measured step has more than the
# prediction: the root unit with its small transfers, copies into and out of flat tensors, the
# optimizer, and whatever else this machine does.

# %% [markdown]
# ### On real GPUs
#
# The paper's table 1: GB of model states per GPU, for models of 7.5 billion, 128 billion and a
# trillion parameters, mixed precision, stages 1 to 3. Here are its 54 numbers, and the formula.
#
# **Predict.** They trained on V100s with 32 GB. Which stage does the model of 7.5 billion need on
# 64 of them?

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
agree = 0
print("GPUs        7.5 billion             128 billion              1,000 billion")
for N, *numbers in table:
    ours = gigabytes(int(N))
    print(f"{N:>4} " + "".join(f"{size:8.1f}" for size in ours))
    for text, size in zip(numbers, ours, strict=True):
        last_digit = 10 ** -len(text.partition(".")[2])
        agree += abs(float(text) - size) < last_digit
print(f"{agree} of 54 agree with the paper to the last digit that it prints")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Stage 1, by the model states alone, and activations and buckets have no room beside it: stage 2 is
# the first to train.
#
# </details>
#
# The last number of the last row is the famous one: a trillion parameters are 16 TB, 1,024 GPUs
# make 16 GB each of it. An H100 has 80. Does the model fit?
#
# **Predict.** What else is in that memory? Take the shape that Narayanan et al. (2021, table 1)
# give for their model of a trillion parameters: 128 layers of width 25,600.

# %% tags=["output-trillion", "nbval-check-output"]
trillion = ModelConfig("gpt", 51_200, 2048, 128, 25_600, 160, 160, 102_400)
P_trillion, unit = cost.num_parameters(trillion), 2 * cost.num_block_parameters(trillion)
kept = cost.activation_bytes(trillion, 1, 2048, recompute="full")
parts = {
    f"one part of 1,024 of {16 * P_trillion / TB:.0f} TB": zero_bytes(P_trillion, 1024, 3),
    "parameters of two units": 2 * unit,
    "gradients of two units": 2 * unit,
    "one sequence, with full recomputation":
        kept + cost.activation_bytes_per_layer(trillion, 1, 2048),
}
for name, size in (parts | {"together": sum(parts.values())}).items():
    print(f"{name:40} {size / GB:6.1f} GB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# It does not fit. A layer of this model is so large that the two that are whole for a moment weigh
# more than all the shards.
#
# </details>
#
# Stage 3 divides what is *kept*. What *computes* is still whole. The next chapter cuts the layers
# themselves.
#
# And the traffic? Llama 3 8B on 64 H100s, 8,192 tokens each, 40 % of the dense peak, a link of 50
# GB/s (400 Gb/s) for each.
#
# **Predict.** Stage 3 sends most. Is its step the longest?

# %%
tokens_each, speed = 8192, 0.40 * DENSE_BF16_PEAKS["H100"]
forth = tokens_each * cost.forward_flops_per_token(llama_8b, tokens_each) / speed
back = tokens_each * cost.backward_flops_per_token(llama_8b, tokens_each) / speed
once = cost.ring_all_gather_seconds(2 * P_llama, 64, 0, 50 * GB)
exposed = {  # what no computing hides; at best, whole passes against whole transfers
    0: max(0, 2 * once - back),
    1: max(0, once - back) + once,
    2: max(0, once - back) + once,
    3: max(0, once - forth) + max(0, 2 * once - back),
}

# %% tags=["output-traffic", "nbval-check-output"]
print(f"forward {forth:.2f} s, backward {back:.2f} s, sending all parameters once {once:.2f} s")
print("          sent per step   exposed, at best   sent with 4 micro-batches")
for stage, seconds in exposed.items():
    sent_GB = [zero_volume(P_llama, 2, 64, 0, stage, count).sent / GB
               for count in (1, 4 if stage >= 2 else 1)]
    print(f"stage {stage} {sent_GB[0]:12.0f} GB {seconds:16.2f} s {sent_GB[1]:24.0f} GB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. By default, stages 1 and 2 gather the new parameters after the step, when there is nothing to
# compute. (`apply_zero1(..., overlap_gather=True)` overlaps that with the next forward pass.) Stage
# 3 spreads its traffic over the whole step: each pass has a transfer of its own size to hide.
#
# </details>
#
# With micro-batches it is another matter. Stages 0 and 1 add gradients up, whole, and send them
# once. Stages 2 and 3 reduce them after each micro-batch, or the sums would be whole: with
# `sync_every_micro_batch=False` they are, travel once, and stage 2 holds as many as stage 1. By
# default stage 3 also gathers the parameters twice per micro-batch; with `reshard_each_pass=False`
# it gathers them once a step and holds them in full. At the defaults, both stages pay off with few,
# large micro-batches.

# %% tags=["figure-explorer"]
zero_explorer()

# %% [markdown]
# ## 8. Recap
#
# 1. N data-parallel ranks hold N copies of 16 P bytes; an optimizer that treats each number alike
#    can be cut anywhere, so 12 of the 16 need not be held twice, and then 14, and then all.
# 2. Stages 1 and 2 send what data parallelism sends, $2\,\frac{N-1}{N}P$: the halves of the ring
#    with the step between them. Stage 3 sends $3\,\frac{N-1}{N}P$, and computes no more.
# 3. The training is the same, which neither a falling loss nor equal ranks can show: with local
#    norms and early steps it falls too. The oracle sees the first, the package refuses the second.
# 4. A view keeps the whole alive: only counting bytes shows whether sharding saves anything.
# 5. Prefetch hides the gathers behind the layer before; what stays whole for a moment, two units
#    and their gradients, does not shrink with N.
#
# ## Exercises
#
# Write your answers into `exercises/ch06_zero.py`, save, and run the cell. In a terminal, `minitron
# hint 6.1` gives hints in three steps.
#
# **6.1 Shard ranges** (10 minutes): who owns which elements, when parameters do not divide.

# %%
check("6.1")

# %% [markdown]
# **6.2 ZeRO-1 step** (25 minutes): an optimizer that keeps one part of its state, and clips by the
# global norm.

# %%
check("6.2")

# %% [markdown]
# **6.3 The ZeRO-2 hand-over** (25 minutes): gradients that leave during the backward pass.

# %%
check("6.3")

# %% [markdown]
# **6.4 A ZeRO-3 unit** (30 minutes): a module that holds nothing between its uses.

# %%
check("6.4")

# %% [markdown]
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase, He, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models*, 2019: section 3 (where the bytes are), 5 (the stages), 7 (the traffic).
# - Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023,
#   section 3: units, prefetch, and what the allocator does with freed parameters.
# - Xu, Lee, Chen et al., *Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
#   Training*, 2020: stage 1, found by a compiler.
# - Ren et al., *ZeRO-Offload*, 2021, and Rajbhandari et al., *ZeRO-Infinity*, 2021: the same parts
#   in the memory of the host, and on disks.
