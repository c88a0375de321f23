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
# # 3. Recomputation: trade compute for memory
#
# **40 minutes. No GPU. [Exercises 3.1](exercise:3.1) to 3.4, 85 minutes more.**
#
# *You need:* [chapter 2](chapter:2)'s account of a step, in particular what an activation is and
# when it is freed.
#
# *You will be able to:*
# - **recompute** part of the forward pass during the backward pass, with every bit of the gradient
#   unchanged;
# - **choose** what to recompute, given the memory you have: every block, some of them, in segments,
#   or attention's core only;
# - **predict** both sides of the trade, the bytes you save and the FLOPs you add.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minitron import cost
from minitron.config import ConfigError, ModelConfig
from minitron.measure.meter import Meter
from minitron.model.recompute import (
    RecomputedCall, apply_full_recompute, apply_segmented_recompute,
    apply_selective_recompute, recompute, segments_for_budget,
)
from minitron.model.transformer import Transformer, initialize, materialized_attention
from minitron.plan.hardware import DEVICES
from teaching.check import check
from teaching.claims import claim
from teaching.figures import curves, show, skyline
from teaching.lab import ch03 as lab, recorded, show_source, show_text

torch.set_num_threads(1)
MB, GB, H100 = 1e6, 1e9, DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# Suppose GPT-3's weights, gradients and optimizer state were somebody else's problem, and an H100
# had to hold nothing but its activations. How many sequences of 2,048 tokens would fit?

# %% tags=["output-question", "nbval-check-output"]
gpt3, S3 = cost.PUBLISHED["GPT-3 175B"], 2048
one_sequence = cost.activation_bytes(gpt3, 1, S3, attention="materialized")
print(f"activations of one sequence, {gpt3.num_layers} layers: {one_sequence / GB:.0f} GB")
print(f"sequences in {H100.memory_bytes / GB:.1f} GB: {H100.memory_bytes / one_sequence:.2f}")

# %% [markdown]
# Less than a third of one, and a micro-batch cannot be smaller than one sequence. But nearly all of
# these bytes are intermediate results, and each block can compute its own again from its input.
#
# Sections 2 to 4 do so block by block: on paper, in a picture, and by hand. Section 5 shows how a
# wrong recomputation hides, and section 6 reads the package's own. Section 7 measures the trade and
# then chooses *what* to recompute: how many blocks, and in which groups.
#
# ## 2. Estimate
#
# A [block](word:block), one layer of the Transformer, maps one tensor of shape (B, S, D) to
# another. Keep the input and drop everything the block computes inside. When the backward pass
# reaches the block, run its forward pass once more. The same [activations](word:activation) exist
# again, the backward pass uses them, and they are freed before it reaches the previous block. This
# is **full [recomputation](word:recompute)**, which many libraries call *activation checkpointing*.
#
# **Predict.** In 16 bits, the block's input takes 2 bytes for each of its B S D values. By chapter
# 2's formula, a block with [materialized attention](word:materialized-attention) keeps
# 34 + 5 a s / h bytes for each of these values. In GPT-3, the number of heads is a = 96, the
# sequence length s = 2,048 and the width h = 12,288. By what factor do the activations shrink? And
# how many forward passes' worth of FLOPs does a training step now take?
#
# <details><summary>Answer</summary>
#
# A block keeps 34 + 5 x 96 x 2048 / 12288 = 114 bytes for each value of its input. The input itself
# has 2, so a block's activations shrink to a 57th (the table counts the loss and the head, too,
# which stay). The compute grows far less. In FLOPs, a step used to cost three forward passes, one
# for forward and two for backward. Now it costs four, a third more.
#
# </details>

# %% tags=["output-estimate", "nbval-check-output"]
training = cost.training_flops_per_token(gpt3, S3)
print("recompute   one block   all blocks, head and loss   FLOPs added")
for policy in ("none", "selective", "full"):
    block = cost.activation_bytes_per_layer(gpt3, 1, S3, 2, "materialized", policy)
    model_bytes = cost.activation_bytes(gpt3, 1, S3, 2, "materialized", policy)
    added = cost.recompute_flops_per_token(gpt3, S3, policy) / training
    print(f"{policy:9} {block / GB:9.2f} GB {model_bytes / GB:24.1f} GB {added:13.1%}")
at_most = model_bytes + cost.activation_bytes_per_layer(gpt3, 1, S3, 2, "materialized")
print(f"full, and one block's activations: {at_most / GB:.1f} GB, "
      f"{H100.memory_bytes / at_most:.1f} sequences in {H100.memory_bytes / GB:.1f} GB")

# %% [markdown]
# With full recomputation, the GPU holds the activations of ten sequences. Each sequence keeps 5.4
# GB, and needs at most another 2.87 GB while a block is recomputed, as section 3 shows. (The FLOPs
# are not quite a third: the output head is not recomputed.) The choice of what is recomputed is
# called a *policy*, and each row is one. The middle policy recomputes only attention's core, which
# section 6 defines. It saves most of GPT-3's bytes for almost no extra FLOPs.
#
# ## 3. Picture
#
# The table says how much is kept, but recomputation also puts bytes back, during the backward pass.
# To see when, we run a model of sixteen blocks, with materialized attention and dropout, under the
# [meter](word:meter): first a *plain* step, without recomputation, then the same step with every
# block recomputed. The figures are [skylines](word:skyline) as in chapter 2.

# %%
config = ModelConfig(
    family="gpt", vocab_size=64, num_layers=16, width=64, num_heads=4, num_kv_heads=4,
    ffn_width=256, max_sequence_length=64, dropout=0.1,
)
B, S, L = 4, 64, config.num_layers
generator = torch.Generator().manual_seed(0)
batch = torch.randint(config.vocab_size, (B, S + 1), generator=generator)
inputs, targets = batch[:, :-1], batch[:, 1:]


# %%
def build(policy=lambda model: None):
    model = Transformer(config)
    initialize(model, seed=0)
    for block in model.blocks:
        block.attention.attention_fn = materialized_attention
    policy(model)
    return model


def loss_of(model):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# %%
def metered(policy):
    """Run one forward and backward pass under the meter."""
    model = build(policy)
    with Meter(model) as meter:
        loss_of(model).backward()
    return meter


# %% tags=["figure-plain"]
plain = metered(lambda model: None)
all_blocks = cost.activation_bytes(config, B, S, 4, "materialized", mask_bytes=4)
show(skyline(plain.timeline, plain.peak), alt=claim(
    plain.peak.phase == "backward" and plain.peak.bytes["activation"] > 0.95 * all_blocks,
    "Without recomputation, the activations of all blocks are in memory when the backward pass "
    "begins."
))

# %% [markdown]
# Activations climb until the backward pass begins, and then are freed block by block. For the
# recomputed step you need two sizes:

# %% tags=["output-sizes", "nbval-check-output"]
block = build().blocks[0]
print(f"one block's input: {4 * B * S * config.width / 1e3:.0f} kB, "
      f"gradients: {sum(p.nbytes for p in block.parameters()) / 1e3:.0f} kB")

# %% [markdown]
# **Predict.** Sketch the memory over time of the recomputed step. What does the backward pass look
# like? Given these two sizes, where is the peak?

# %% tags=["figure-full"]
full = metered(apply_full_recompute)
show(skyline(full.timeline, full.peak), alt=claim(
    lab.num_teeth(full.timeline) == L and full.peak.total < plain.peak.total / 3,
    "With full recomputation, only the blocks' inputs accumulate; in the backward pass each "
    "block's activations exist for a moment, one tooth per block."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# In the forward pass memory climbs slowly, by the input of one block after the other. On the slope
# each block makes two spikes, attention's and the feed-forward's; the first alone is at least as
# tall as the whole climb. They are intermediate results, dropped as soon as nothing in the forward
# pass needs them. The backward pass is a sawtooth with sixteen teeth: each recomputation allocates
# one block's activations, and that block's backward pass frees them. From tooth to tooth one
# block's input is freed and one block's gradients are added. In this model the gradients are three
# times as large as the input, so the last tooth is the highest. Mind the scales: the first figure's
# peak is about four times the second's.
#
# </details>
#
# ## 4. By hand
#
# How do you make autograd do this? We have to tell it two things: do not record this now, and here
# is what to do later. An `autograd.Function` can say both. Its `forward` runs without building a
# graph. Its `backward` gets the gradient of the output; ours builds the graph that was skipped, and
# runs the backward pass through it immediately.


# %%
class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)  # the input and nothing else
        return function(x)

    @staticmethod
    def backward(ctx, grad_out):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():  # inside backward, recording is off by default
            out = ctx.function(x)  # again, and recorded this time
        out.backward(grad_out)  # this also accumulates into the weights' .grad
        return None, x.grad


# %%
def run_recomputed(blocks, x, rotation):
    """Run the blocks in order; the model calls this instead of doing so itself."""
    for block in blocks:
        x = Recomputed.apply(partial(block, rotation=rotation), x)
    return x


def by_hand(model):
    model.run_blocks = run_recomputed


# %%
def gradient_of(model, seed=1):
    """Return the loss, and all gradients in one vector; `seed` determines the dropout masks."""
    torch.manual_seed(seed)
    loss = loss_of(model)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


# %% [markdown]
# `run_blocks` is one of the model's extension points: the model calls it without knowing what it
# does. (Its last argument, `rotation`, belongs to Llama's position encoding; in a GPT it is None.)
# We compare bytes with the plain step's, and then, with dropout switched off, loss and gradient.

# %% tags=["output-byhand", "nbval-check-output"]
most = max(moment.bytes["activation"] for moment in plain.timeline)
ours = max(moment.bytes["activation"] for moment in metered(by_hand).timeline)
print(f"activations: {most / MB:.1f} MB plain, {ours / MB:.1f} MB by hand")

loss, gradient = gradient_of(build().eval())
our_loss, our_gradient = gradient_of(build(by_hand).eval())
print("same loss:", loss == our_loss)
print("same gradient, to the last bit:", torch.equal(gradient, our_gradient))

# %% [markdown]
# A short class, and the gradient is identical bit for bit. Recomputation performs the same
# operations on the same numbers, so there is no reason why even the last bit should differ. (Some
# GPU kernels are not deterministic: they add in whatever order threads finish, so two runs may
# differ in the last bit.)
#
# Or is there?
#
# ## 5. The trap
#
# The comparison above left something out: dropout. We switch it on, as in training, set the same
# seed before each run, and compare again.
#
# **Predict.** What is still the same as in the plain step: the loss, the gradient, both, or
# neither?

# %% tags=["output-trap"]
loss, gradient = gradient_of(build())
wrong_loss, wrong_gradient = gradient_of(build(by_hand))
off = (wrong_gradient - gradient).norm() / gradient.norm()
print(f"loss      plain {loss:.6f}, by hand {wrong_loss:.6f}, equal: {loss == wrong_loss}")
print(f"gradient  relative error {off:.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The loss is the same: the forward pass has not changed, and with the same seed it draws the same
# masks. The gradient is not. Recomputation draws *new* masks, so the backward pass differentiates a
# network that never ran. It also advances the random number generator, so everything drawn later
# differs as well.
#
# </details>
#
# There is no error and no warning, and this step's loss is correct to the last bit. Would you
# notice during training? To find out, we train a small model with three seeds, plain and recomputed
# by hand. Its task is copying: from the ninth on, each token repeats the one eight places before
# it. The first eight are random, so 7 of a sequence's 23 targets cannot be predicted. The table has
# each run's end, the figure the means, and as a dashed floor the loss of a model that copies
# perfectly and guesses those seven.

# %% tags=["output-seeds", "exhaustive"]
runs = {"plain": [lab.train(lambda model: None, seed) for seed in range(3)],
        "new masks": [lab.train(by_hand, seed) for seed in range(3)]}
ends = {name: [sum(losses[-20:]) / 20 for losses in each] for name, each in runs.items()}
print("mean loss of the last 20 steps, for each seed")
for name, means in ends.items():
    print(f"{name:9}", *(f"{mean:6.2f}" for mean in means))

# %% tags=["figure-trap", "exhaustive"]
means = {name: [sum(step) / 3 for step in zip(*each, strict=True)] for name, each in runs.items()}
worse = all(wrong > right for right, wrong in zip(*ends.values(), strict=True))
floor = {"floor": [lab.COPYING_FLOOR] * 120}
falls = all(each[0] > each[-1] for each in means.values())
show(curves(range(1, 121), means, "step", "loss (nats per token)", floor), alt=claim(
    falls and worse, "Means over three seeds: both losses fall. With new dropout masks the loss "
    "ends higher, for each seed, and nothing says so."))

# %% [markdown]
# With the plain runs beside it, the bug shows. But whoever has the bug sees the upper curve alone:
# it falls as many others do, and you would probably blame the learning rate. What exposes the bug
# is a comparison with the plain step's gradient, bit by bit, and that takes one step.
#
# PyTorch's `torch.utils.checkpoint` saves and restores the generator's state for this reason. Its
# option [`preserve_rng_state=False`](https://docs.pytorch.org/docs/stable/checkpoint.html) skips
# that to save time. If the block contains dropout, you then have exactly this bug.
#
# ## 6. The real one
#
# The package's [`recompute`](code:minitron.model.recompute.recompute) does not use an
# `autograd.Function`. It uses chapter 2's saved-tensor hooks. There they only looked at what
# autograd saves; here they replace it. As you read, look for the line that runs the function a
# second time:

# %%
show_source(
    recompute,
    RecomputedCall.drop, RecomputedCall.fetch, RecomputedCall.run, RecomputedCall.keep,
)

# %% [markdown]
# Whenever autograd saves a tensor, `drop` discards it and gives autograd a number to keep instead.
# When the backward pass asks for any of these tensors for the first time, `fetch` calls `run`, and
# there `self.function(*inputs)` is the second run. During this run, `keep` collects each tensor
# that the function saves, and raises `Complete` at the last: the rest of the function need not run.
# This is **early stopping**, and section 7 measures what it is worth.
#
# (Three details: a node of the graph, `self.inputs.grad_fn`, saves the inputs, so that a recomputed
# call around this one can drop them too; `span` is a label for profilers; and `_refuse` raises an
# error if anything asks for a tensor that the second run saved, since nothing walks that run's
# graph.)
#
# The autograd graph is the one from the plain run; only the saved tensors are recomputed. This
# removes two limits of section 4's class. That class takes a single tensor, and autograd calls its
# `backward` only if this tensor requires a gradient: with frozen embeddings, the blocks' weights
# would get no gradient at all.
#
# `self.context.restored()` ([source](code:minitron.model.recompute.ForwardContext.restored)) avoids
# the trap. Recomputation starts from the generator state of the forward pass. Afterwards, the
# generators continue from where they were before the recomputation. Autocast, PyTorch's switch for
# computing matmuls in 16 bits ([chapter 10](chapter:10)), is restored as well, because a different
# precision would give different activations.
#
# The package builds three policies from this one function. *Full* recomputes each block.
# *Selective* recomputes only attention's core, from query, key and value to the weighted sum of
# the values. [*Segments*](word:segment) (unrelated to the allocator's segments) recompute several
# consecutive blocks as one call. We compare each policy with the plain step, with dropout on:

# %% tags=["output-oracle", "nbval-check-output"]
policies = {
    "full": apply_full_recompute,
    "selective": apply_selective_recompute,
    "4 segments of 4": partial(apply_segmented_recompute, segment_lengths=[4, 4, 4, 4]),
    "first 5, as 3 + 2": partial(apply_segmented_recompute, segment_lengths=[3, 2]),
}
print("equal to the plain step's:   loss  gradient  generator")
loss, gradient = gradient_of(build())
drawn_next = torch.rand(1)
for name, policy in policies.items():
    its_loss, its_gradient = gradient_of(build(policy))
    print(f"{name:27} {its_loss == loss!s:>6} {torch.equal(gradient, its_gradient)!s:>9} "
          f"{torch.equal(drawn_next, torch.rand(1))!s:>10}")

# %% [markdown]
# Now we recompute a layer that is not in our model, batch normalization, for one batch and one
# backward pass.
#
# **Predict.** Compare with the same layer without recomputation. What is different afterwards?

# %% tags=["output-counter", "nbval-check-output"]
for name, run in (("plain", lambda norm, x: norm(x)), ("recomputed", recompute)):
    norm, x = nn.BatchNorm1d(1), torch.tensor([[0.0], [1.0], [2.0]], requires_grad=True)
    run(norm, x).square().sum().backward()
    print(f"{name:10} gradient {norm.weight.grad.item():.2f}, running mean "
          f"{norm.running_mean.item():.2f}, batches seen {int(norm.num_batches_tracked)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The gradient is correct, but the layer's state is wrong. In training mode, batch normalization
# updates a running mean and counts the batches it has seen. These are side effects, and they
# happened twice, which shows up at evaluation. Restoring the generators cannot prevent it: a
# function that is recomputed must do the same thing both times and have no side effects. LayerNorm
# and RMSNorm keep no state, which is one reason why Transformers are easy to recompute.
#
# </details>
#
# ## 7. Measure
#
# We measure both sides of the trade: the meter counts bytes, and PyTorch's `FlopCounterMode` counts
# the FLOPs of every matmul that runs, including the recomputed ones.
#
# **Predict.** Section 2's formula counts every matmul of what is recomputed. Early stopping skips
# whatever would run after the last tensor is saved, and a matmul saves its inputs before it runs.
# Attention's core computes the scores $QK^T$, turns them into probabilities $P$ by softmax and
# dropout, and then computes $PV$. A block ends with the matmul `down` and a dropout of its output.
# Will the counter find fewer FLOPs than the formula with the selective policy, with the full
# policy, or with both?

# %%
def both_sides(policy):
    """Return activation bytes after the forward pass and at most, and the FLOPs of the step."""
    model = build(policy)
    with Meter(model) as meter, FlopCounterMode(display=False) as counter:
        loss = loss_of(model)
        kept = meter.now()["activation"]
        loss.backward()
    most = max(moment.bytes["activation"] for moment in meter.timeline)
    return kept, most, counter.get_total_flops()


# %% tags=["output-both", "nbval-check-output"]
compared = {"none": lambda model: None, **{k: policies[k] for k in ("selective", "full")}}
sides = {name: both_sides(policy) for name, policy in compared.items()}
_, plain_bytes, plain_flops = sides["none"]
per_token = cost.training_flops_per_token(config, S)
print("           after forward (MB)    at most    FLOPs added")
print("           formula   measured   measured   formula  measured")
for name, (kept, most, flops) in sides.items():
    formula = cost.activation_bytes(config, B, S, 4, "materialized", name, mask_bytes=4)
    added = cost.recompute_flops_per_token(config, S, name) / per_token
    print(f"{name:9} {formula / MB:8.2f} {kept / MB:10.2f} {most / MB:10.2f} "
          f"{added:9.1%} {flops / plain_flops - 1:9.1%}")

# %% [markdown]
# The bytes agree. (On the CPU, a dropout mask takes 4 bytes per value here; on CUDA it takes one.)
# Full recomputation peaks above what it keeps: the block being recomputed comes on top.
#
# <details><summary>Answer</summary>
#
# With the selective policy only, which costs half of what the formula says. $PV$ need not run
# again: it saves $P$ and $V$, which exist before it runs, and its output was kept by the next
# linear layer. Full recomputation gains nothing. The dropout at the block's end saves its mask,
# which it draws when it gets the output of `down`, so `down` must run.
#
# </details>
#
# So the FLOPs formula is an upper bound. Without dropout, as in Llama, the last tensor that a block
# saves is `down`'s input, and `down` is skipped. We recompute every block of three other small
# models and count; the last column is a recorded time:

# %% tags=["output-earlystop", "nbval-check-output"]
show_text(f"Recorded on a {lab.recorded_on()}.")
print("              FLOPs added                time added")
print("              all repeated    counted      recorded")
for name, model in lab.RECORDED_MODELS.items():
    formula = cost.recompute_flops_per_token(model, 128) / cost.training_flops_per_token(model, 128)
    counted = lab.flops_of_step(model, apply_full_recompute) / lab.flops_of_step(model) - 1
    print(f"{name:12} {formula:13.1%} {counted:10.1%} {lab.recorded_time(name) - 1:13.0%}")

# %% [markdown]
# Without dropout, recomputing a block costs less than its forward pass did: almost a third less in
# this GPT, almost a quarter less in this Llama. The recorded times do not follow the counted FLOPs
# exactly. What is repeated or skipped does not take the same time per FLOP as the rest of the step,
# so a count of FLOPs alone cannot predict the time.
#
# ### How long should a segment be?
#
# A segment of $k$ blocks keeps one input instead of $k$. But when it is recomputed, the activations
# of all $k$ blocks are in memory at once, together with the inputs of the segments before it, which
# still wait for their turn. `peak_bytes` computes this sum for every segment and returns the
# largest.
#
# **Predict.** Let an input take $b$ bytes (chapter 2's b was the batch size) and a block's
# activations $A$. The classic answer is about $\sqrt{L}$ segments ([Chen et al.
# 2016](https://arxiv.org/abs/1604.06174), section 4.1): 4, of 4 blocks each, if $L$ is 16. Our
# model has $L = 16$ and $A = 30\,b$. GPT-3 with [fused attention](word:fused-attention), which
# never stores the scores, has $L = 96$ and $A = 17\,b$. Which $k$ gives each model the lowest peak?
# (The figure measures our model; the table under it has both.)

# %%
def peak_bytes(num_blocks, k, A, b):
    """Inputs of the segments before, and a segment's activations: the largest sum."""
    return max(num_before * b + length * A
               for num_before, length in enumerate(lab.cut(num_blocks, k)))


def flops_without_dropout(policy):
    model = build(policy).eval()
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    return counter.get_total_flops()


# %%
block_bytes = cost.activation_bytes_per_layer(config, B, S, 4, "materialized", mask_bytes=4)
input_bytes = cost.activation_bytes_per_layer(config, B, S, 4, recompute="full")
lengths = [1, 2, 3, 4, 8, 16]
predicted = [peak_bytes(L, k, block_bytes, input_bytes) / MB for k in lengths]
cuts = [partial(apply_segmented_recompute, segment_lengths=lab.cut(L, k)) for k in lengths]
peaks = [max(moment.bytes["activation"] for moment in metered(policy).timeline) / MB
         for policy in cuts]

# %% tags=["figure-segments"]
gap = max(abs(found / foreseen - 1) for found, foreseen in zip(peaks, predicted, strict=True))
show(curves(lengths, {"measured": peaks}, "blocks per segment", "activations at the peak (MB)",
            {"formula": predicted}), alt=claim(
    peaks == sorted(peaks) and gap < 0.05, "The peak grows with the segment's length, as the "
    f"formula predicts, within {gap:.1%}: single blocks have the lowest peak."))

# %% tags=["output-lengths", "nbval-check-output"]
A3, b3 = (cost.activation_bytes_per_layer(gpt3, 1, S3, recompute=kind) for kind in ("none", "full"))
rows = {"our model": (L, block_bytes, input_bytes), "GPT-3, fused": (gpt3.num_layers, A3, b3),
        "16 layers, A = b": (16, 1, 1)}
print("peak, in inputs    A / b  k =" + "".join(f"{k:6}" for k in lengths) + "   any")
for name, (num_blocks, A, b) in rows.items():
    peak = [peak_bytes(num_blocks, k, A, b) for k in lengths]
    peak.append(lab.least_peak(num_blocks, A, b))
    print(f"{name:18} {A / b:5.0f}     " + "".join(f"{each / b:6.0f}" for each in peak))
print("FLOPs added without dropout", end="")
for k, policy in zip(lengths, cuts, strict=True):
    if k in (1, 4, 16):
        print(f"   k = {k}: {flops_without_dropout(policy) / plain_flops - 1:.0%}", end="")

# %% [markdown]
# <details><summary>Answer</summary>
#
# With equal segments of $k$ blocks, memory peaks at about $\frac{L}{k} b + k A$ bytes. This is
# smallest at $k = \sqrt{L\,b/A}$. For our model that is 0.7, so single blocks are best: the
# measured dots lie on the dashed formula and climb from left to right. For GPT-3 it is 2.4, and the
# best length is 2: 81 inputs at the peak, where single blocks have 112. The classic answer is the
# table's third row, $A = b$: a layer that stores no more than its input.
#
# </details>
#
# Segments need not be equal. The later a segment, the more inputs wait beside it, so later segments
# should be shorter. The table's last column has the lowest peak of segments of any lengths: for
# GPT-3, it is 65 inputs instead of 81.
#
# The last line counts our model's FLOPs. Without dropout, short segments are cheaper, because early
# stopping skips one `down` per segment. With dropout nothing is skipped: in the next figure,
# segments of 1, 3, 5 and 7 blocks all cost the same FLOPs per block.
#
# ### Recompute only as much as you must
#
# With more memory we can recompute fewer blocks.
# [`segments_for_budget`](code:minitron.model.recompute.segments_for_budget) takes the bytes of each
# block, those of an input (`boundary_bytes`) and a budget, and recomputes as few blocks as possible
# within that budget. Those it recomputes are the first ones. The last ones keep everything, because
# the backward pass uses them first: they are freed before any segment is recomputed. We run the
# function with five budgets and measure the FLOPs and the peak of the activations. The table lists
# the peaks. In the figure, a dot is a budget and its measured FLOPs, and the dashed line is the
# formula for budgets in between.

# %%
budgets = [round(share * L * block_bytes) for share in (0.1, 0.2, 0.45, 0.7, 1)]
paid, rows = [], []
for budget in budgets:
    segments = segments_for_budget([block_bytes] * L, input_bytes, budget)
    _, most, flops = both_sides(partial(apply_segmented_recompute, segment_lengths=segments))
    paid.append(flops / plain_flops - 1)
    rows.append(f"{budget / MB:9.1f} {most / MB:8.1f} {sum(segments):11}   {segments}")

block_flops = cost.recompute_flops_per_token(config, S) / L / per_token
every = [*range(budgets[0], budgets[-1], 100_000), budgets[-1]]
formula = [block_flops * sum(segments_for_budget([block_bytes] * L, input_bytes, budget))
           for budget in every]

# %% tags=["figure-frontier"]
print("budget MB  peak MB  recomputed of 16, in segments of", *rows, sep="\n")
show(lab.frontier(budgets, paid, every, formula), alt=claim(
    paid == sorted(paid, reverse=True) and paid[0] > paid[-1] == 0,
    "The more memory, the less recomputation: one step down for each block that fits."))

# %% [markdown]
# The smallest budget recomputes 15 blocks, not 16, so the stairs begin at 31 % instead of 33 %. The
# backward pass needs the last block's activations at once, so nothing is gained by dropping them:
# by the formula, the peak is 15 inputs and one block's activations either way. The `full` policy
# drops them all the same, which leaves more room at the loss, where the logits are in memory.
#
# All blocks are alike, so the stairs follow a nearly straight line. Blocks are recomputed whole or
# not at all, so between two steps additional memory buys nothing. Where the budget has room for
# several blocks at once, the function joins them into a segment, which keeps one input instead of
# several. Where the peak exceeds the budget slightly, the difference is what lies outside the
# blocks: the loss, the inputs of the final norm and of the output head, the embedding's dropout
# mask.
#
# Other choices do better than these stairs, because some operators' outputs are large and cheap to
# recompute, others small and expensive. The Further section on operators ranks them.

# %% [markdown]
# ### On real GPUs
#
# By the formula, selective recomputation adds less than 1 % to the FLOPs of GPT-3's step. What does
# it add to the time? It repeats softmax and dropout: a few FLOPs for each score, but each of them
# reads and writes the whole S x S matrix. The paper on it measured one layer of a
# 22-billion-parameter model on A100s, forward plus backward ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), table 4).
#
# **Predict.** For that model the formula says 1.7 % more FLOPs. Is the added share of the time
# smaller, about as large, or several times as large?

# %% tags=["output-time", "nbval-check-output"]
model, baseline = lab.PAPER_22B, sum(lab.PAPER_MILLISECONDS["none"])
for policy, (forward, backward) in lab.PAPER_MILLISECONDS.items():
    flops = cost.recompute_flops_per_token(model, 2048, policy)
    flops /= cost.training_flops_per_token(model, 2048)
    time = forward + backward
    print(f"{policy:9} {forward} + {backward} = {time:.1f} ms, "
          f"{time / baseline - 1:4.0%} more time, {flops:5.1%} more FLOPs")

# %% [markdown]
# <details><summary>Answer</summary>
#
# About four times as large. What selective recomputation repeats takes few FLOPs but a lot of
# memory traffic. (The times are those of one layer, the FLOPs those of the whole model with its
# head; for a layer alone they would be a little larger.)
#
# </details>
#
# Full recomputation adds more time than FLOPs, too. It repeats the forward pass, and here that is
# 7.7 of 19.6 ms, more than a third: the backward pass (the second term) has twice the forward's
# FLOPs but takes only about one and a half times as long.
#
# Today a [fused kernel](word:fused-attention) ([Dao et al. 2022](https://arxiv.org/abs/2205.14135))
# performs the selective recomputation inside attention's backward pass, tile by tile, and never
# writes the matrix. Our models use it by default. It keeps what the selective policy keeps, plus
# one number per head and token (the logarithm of the softmax's denominator).
#
# Does a GPU hold what these formulas say? The next figure shows the peak of a training step under
# each policy, predicted (dashed) above recorded by the meter. The model is a 1.3B Llama in bf16
# with half of its layers. The line above the figure compares three counts: the meter's, the
# allocator's, and that of a [dry run](word:dry-run) (the same step on [fake
# tensors](word:fake-tensor), which have a shape and a dtype but no memory).

# %%
shown = recorded.recomputation()
show_text(shown.sentence)
show(shown.figure, alt=shown.alt)

# %% [markdown]
# Predicted and recorded bars agree. Full recomputation shrinks the activations to a small part of
# the bar. Selective recomputation saves next to nothing, because this model's attention is fused
# and saves no scores in the first place.
#
# No bar contains gradients, although they made section 3's last tooth the highest. This model
# peaks earlier, at the loss, when the backward pass has not produced any yet. The temporary bytes
# are those of [chapter 2](chapter:2)'s planning rule: two float32 tensors of the logits' shape.
#
# With fused attention, we still have to choose how many blocks to recompute. For all of GPT-3, we
# return to section 1's H100. There it held the activations alone; now it also has to hold the two
# temporary tensors:

# %% tags=["output-budget", "nbval-check-output"]
layers, temporary = gpt3.num_layers, 2 * 4 * S3 * gpt3.vocab_size
outside = cost.activation_bytes(gpt3, 1, S3) - layers * A3 + temporary  # of the blocks
print("sequences   nothing recomputed   blocks recomputed   FLOPs added")
for n in (1, 2, 4, 8, 18, 19):
    print(f"{n:9} {n * (layers * A3 + outside) / GB:17.0f} GB", end="")
    try:
        segments = segments_for_budget([n * A3] * layers, n * b3,
                                       int(H100.memory_bytes - n * outside))
    except ConfigError:
        print("     does not fit")
    else:
        added = cost.recompute_flops_per_token(gpt3, S3) * sum(segments) / layers / training
        print(f" {sum(segments):19} {added:13.1%}")

# %% [markdown]
# Section 1's GPU could not hold a third of a sequence. With fused attention it holds one without
# recomputing any block, and with recomputation it holds 18, for less than a third more compute. (A
# few more might fit, because the two temporary tensors are gone before any block is recomputed.)
# [MFU](word:mfu) does not count this compute: its numerator has the FLOPs that the model requires,
# not those that the hardware executed ([chapter 1](chapter:1)). The ratio that does count
# recomputation is called HFU, hardware FLOPs utilization.
#
# On a real GPU the weights and the optimizer state need room, too. In the figure, with full
# recomputation, they are most of the bar. How to split *them* over GPUs is the subject of the next
# chapters.

# %% [markdown]
# ## Further: check the paper's count
#
# For GPT-3, the paper on selective recomputation reports 70 % of the activation memory saved, for
# 2.7 % more FLOPs ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 5). We can
# compute both numbers.

# %% tags=["output-claim", "nbval-check-output"]
h, a = gpt3.width, gpt3.num_heads
block = {policy: cost.activation_bytes_per_layer(gpt3, 1, S3, 2, "materialized", policy)
         for policy in ("none", "selective")}
saved = 1 - block["selective"] / block["none"]
counted = cost.recompute_flops_per_token(gpt3, S3, "selective") / training
v, layers = 51200, gpt3.num_layers
equation_7 = 1 + S3 / (6 * h) + v / (12 * h * layers)
equation_8 = 1 + S3 / (3 * h) + v / (12 * h * layers)
square = 5 * a * S3 / h
print(f"bytes saved, equation 1            {square / (34 + square):.1%}, counted {saved:.1%}")
print(f"FLOPs, equation 8 over equation 7  {equation_8 / equation_7 - 1:.1%}")
print(f"FLOPs of QK^T and PV, once more    {counted:.1%}")

# %% [markdown]
# The bytes agree. The FLOPs do not: the paper's equation 8 adds attention's share of a *whole*
# training step, forward and backward, whereas recomputation repeats only the forward matmuls, a
# third of that. So the paper's claim errs on the safe side. To decide which count is right, we
# count at full size, on a laptop. The instruments do not need values, so fake tensors will do. One
# block of GPT-3 in 16 bits:

# %% tags=["output-gpt3", "nbval-check-output"]
counts = {name: lab.layer_without_values(gpt3, S3, policy) for name, policy in compared.items()}
for name, (kept, flops) in counts.items():
    print(f"{name:9} {kept / GB:5.2f} GB kept, {flops / 1e12:5.2f} TFLOPs, "
          f"{flops / counts['none'][1] - 1:6.2%} more")

# %% [markdown]
# (The first two rows exceed section 2's formula because the CPU's dropout masks are larger.)
# So which count is right? With early stopping, selective recomputation adds 0.45 %. Early stopping
# skips $PV$, which has as many FLOPs as $QK^T$, so without it our formula's 0.9 % is right. In
# neither case does repeating the forward matmuls cost 2.7 %.

# %% [markdown]
# ## Further: recompute per operator
#
# Which operators' outputs are worth keeping? Compare FLOPs per byte: the cost of recomputing one
# byte of the output. In a matmul, each output value is a sum over the contracted dimension, so it
# costs 2 FLOPs per term. Everything else in a block (norms, GELU, softmax, dropout) costs a few
# FLOPs per value.
#
# **Predict.** Selective recomputation has told you which matmul's output to recompute first. Which
# would you recompute last?

# %% tags=["output-operators", "nbval-check-output"]
K, D, FF = gpt3.head_width, gpt3.width, gpt3.ffn_width
print("GPT-3 in bf16           contracted   FLOPs per byte   MB per sequence")
for name, terms, values in (
    ("scores, QK^T", K, gpt3.num_heads * S3 * S3), ("weighted sum, PV", S3, S3 * D),
    ("query, key, value", D, 3 * S3 * D), ("out", D, S3 * D), ("up", D, S3 * FF),
    ("down", FF, S3 * D),
):
    print(f"{name:23} {terms:10,} {2 * terms // 2:16,} {2 * values / MB:17,.0f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# `down`: it has the longest sum, for one of the smallest outputs. At the other end are the scores:
# each value takes only as many terms as a head is wide, and the matrix is by far the largest.
#
# </details>
#
# PyTorch can make this choice per operator: with
# `torch.utils.checkpoint.create_selective_checkpoint_contexts`, it asks a function of yours about
# each one whether to keep its output. Ours keeps the outputs of matmuls above a threshold of FLOPs
# per byte. In our small float32 model, the scores are at 8 FLOPs per byte, `down` is at 128, and
# all other matmuls are at 32, so there are four thresholds to try. The column `kept` has the bytes
# after the forward pass, including those the meter calls temporary: PyTorch keeps these outputs
# itself, not through autograd. `whole blocks` is what it would cost to reach the same `kept` bytes
# by recomputing some blocks entirely: a straight line between none and all.

# %% tags=["output-peroperator", "nbval-check-output"]
def per_operator(threshold):
    model = build(lab.keep_if_expensive(threshold))
    torch.manual_seed(1)
    with Meter(model) as meter, FlopCounterMode(display=False) as counter:
        loss = loss_of(model)
        kept = meter.now()["activation"] + meter.now()["temporary"]
        loss.backward()
    same = torch.equal(gradient, torch.cat([p.grad.flatten() for p in model.parameters()]))
    return kept, counter.get_total_flops() / plain_flops - 1, same


# %% tags=["output-thresholds", "nbval-check-output", "exhaustive"]
least, _, full_flops = both_sides(apply_full_recompute)
terms = {"QK^T": config.head_width, "PV": S, "qkv": config.width, "out": config.width,
         "up": config.width, "down": config.ffn_width}
per_byte = {name: 2 * count // 4 for name, count in terms.items()}
print("FLOPs per byte:", ", ".join(f"{name} {flops}" for name, flops in per_byte.items()))
print("above   matmuls kept                 kept   added   whole blocks   same gradient")
for threshold in (0, 10, 40, 1000):
    kept, added, same = per_operator(threshold)
    names = " ".join(name for name, flops in per_byte.items() if flops > threshold) or "none"
    whole = (plain_bytes - kept) / (plain_bytes - least) * (full_flops / plain_flops - 1)
    print(f"{threshold:5}   {names:24} {kept / MB:5.1f} MB {added:7.1%} {whole:14.1%} {same!s:>15}")

# %% [markdown]
# Keeping all matmul outputs (first row) halves the memory without recomputing a single matmul: what
# is recomputed are the norms, GELU, softmax and dropout, which take memory traffic rather than
# FLOPs. Recomputing the scores as well (second row) adds a few percent. The third row keeps the
# output of `down` alone: 2.4 MB instead of the 1.3 MB of full recomputation in the last row, and
# clearly fewer FLOPs. (Without dropout, early stopping skips `down` anyway, and keeping its output
# would buy nothing.) In each of the first three rows, the added FLOPs are fewer than those of
# recomputing whole blocks within the same bytes.

# %% [markdown]
# ## Further: offload activations to host memory
#
# Instead of recomputing an activation, you can copy it to the CPU's memory and fetch it when the
# backward pass needs it: [offloading](word:offloading). The hooks of [chapter 2](chapter:2)
# suffice, and PyTorch has a ready-made version:
# `torch.autograd.graph.save_on_cpu(pin_memory=True)`. Without a GPU, NumPy's memory stands in for
# the host's, because our meter does not see it.

# %% tags=["output-offload", "nbval-check-output"]
model = build()
host = lab.Host(model)
lab.offload_blocks(host)(model)
torch.manual_seed(1)
with Meter(model) as meter:
    loss = loss_of(model)
    left = meter.now()["activation"]
    loss.backward()
offloaded = torch.cat([p.grad.flatten() for p in model.parameters()])
print(f"activations on the device: {plain_bytes / MB:.1f} MB kept, {left / MB:.1f} MB offloaded")
print(f"sent to the host: {host.bytes_sent / MB:.1f} MB, back: {host.bytes_fetched / MB:.1f} MB")
print("same gradient, to the last bit:", torch.equal(gradient, offloaded))

# %% [markdown]
# The gradient has not changed, and each tensor crosses the link once in each direction. So the
# price is time on the link, unless the copy runs while the GPU computes.
#
# An H100's PCIe 5.0 link has 16 lanes. Each moves 32 Gbit/s in either direction, with 130 bits on
# the wire for 128 bits of data. Suppose that the GPU computes at 40 % of its peak, and that a block
# sends all of its activations, with one sequence per micro-batch: 8,192 tokens for Llama 3.2 1B
# (width 2,048) and Llama 3.1 70B (width 8,192), 2,048 tokens for GPT-3 (width 12,288).
#
# **Predict.** As models get wider, is the copy of one token's activations easier or harder to hide
# behind that token's compute?

# %% tags=["output-pcie", "nbval-check-output"]
pcie = 32e9 * 16 / 8 * 128 / 130
print(f"PCIe 5.0 x16: {pcie / GB:.0f} GB/s. One block, one sequence, in ms:")
print("               compute at 40 %     copy   stall, link at   copy of")
print("model          forward backward   one way   100 %    85 %   the input")
for name, length in (("Llama 3.2 1B", 8192), ("Llama 3.1 70B", 8192), ("GPT-3 175B", 2048)):
    shape = cost.PUBLISHED[name]
    flops = cost.recompute_flops_per_token(shape, length) * length / shape.num_layers
    forward = 1e3 * flops / (0.4 * H100.bf16_flops)
    copy, copy_input = (
        1e3 * cost.activation_bytes_per_layer(shape, 1, length, recompute=policy) / pcie
        for policy in ("none", "full"))
    stalls = [sum(max(0, copy / speed - compute) for compute in (forward, 2 * forward))
              for speed in (1, 0.85)]
    print(f"{name:13} {forward:8.1f} {2 * forward:8.1f} {copy:9.1f} "
          f"{stalls[0]:7.1f} {stalls[1]:7.1f} {copy_input:11.1f}")

# %% [markdown]
# A stall is the part of a copy that the compute does not hide. Sending overlaps with the block's
# forward pass, fetching with its backward pass; the columns add both. We let the backward pass take
# twice as long, as its FLOPs suggest. At one and a half times, as on the A100s above, the 1B
# model's stalls would be longer and the other two models' the same. Packet headers keep real copies
# below the wire's limit, so the second stall is that of a link at 85 % of it.
#
# Compare the stalls with the first column, because recomputing the block would cost its forward
# pass once more. For the 1B model they are longer, so recompute. For the 70B model the stall is 2
# ms, or 10 on the slower link, and recomputing takes up to 41 ms, about a quarter less with early
# stopping: offload. For GPT-3 the copy is hidden entirely. The reason is the width: per token, the
# linear layers' FLOPs grow with its square, the bytes only in proportion to it.
#
# Sending only the blocks' inputs is hidden in all three models, and it combines with full
# recomputation: then the GPU keeps almost nothing per block. What it takes is host memory, and a
# PCIe link that is not busy with something else, such as a data loader or a network card.

# %% [markdown]
# ## 8. Recap
#
# 1. Activations can be computed again, so they need not be kept: full recomputation keeps one input
#    per block and costs at most one more forward pass through the blocks.
# 2. Recomputation gives the same gradient to the last bit (we saw it on a CPU), provided that it
#    draws the same random numbers and runs in the same precision with deterministic kernels. To
#    leave the model's state the same as well, it must have no side effects.
# 3. If it is wrong, that step's loss is still right. Compare gradients, generator and buffers with
#    the plain step's.
# 4. Where attention is materialized, begin with selective recomputation: for GPT-3 it saves 70 % of
#    the bytes and adds under 1 % to the FLOPs. The time can grow by more: on a 22B model by 7 %,
#    for 1.7 % more FLOPs. Fused attention has it built in.
# 5. Recompute as few blocks as the budget allows. If all are recomputed in equal segments, the best
#    length is about $\sqrt{L\,b/A}$ blocks: 1 for our small model, 2 for GPT-3 with fused
#    attention. The classic $\sqrt{L}$ is the special case $A = b$.
#
# ## Exercises
#
# Write your answers in `exercises/ch03_recompute.py`, save, and run the exercise's cell below. In a
# terminal, `minitron hint 3.1` gives hints in three steps.
#
# - [**3.1 Recompute a function**](exercise:3.1) (30 minutes): section 4's function, without the
#   trap of section 5.
# - [**3.2 Fit a byte budget**](exercise:3.2) (25 minutes): which blocks to recompute, and in which
#   segments.
# - [**3.3 What recomputation costs**](exercise:3.3) (15 minutes): the FLOPs of both policies, from
#   the shapes.
# - [**3.4 The best segment length**](exercise:3.4) (15 minutes): the lowest peak for any depth,
#   block and input.

# %%
check("3.1")

# %%
check("3.2")

# %%
check("3.3")

# %%
check("3.4")

# %% [markdown]
# ## Further reading
#
# - Chen, Xu, Zhang, Guestrin, [Training Deep Nets with Sublinear Memory
#   Cost](https://arxiv.org/abs/1604.06174), 2016, sections 3 and 4: recomputing segments, and the
#   square root.
# - Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022, sections 4 and 5: the bytes of a block, and
#   what to recompute.
# - Dao, Fu, Ermon, Rudra, Ré, [FlashAttention](https://arxiv.org/abs/2205.14135), 2022, section
#   3.1: recomputation inside a kernel.
# - Chowdhery et al., [PaLM](https://arxiv.org/abs/2204.02311), 2022, appendix B: why MFU does not
#   count recomputation.
# - PyTorch documentation,
#   [torch.utils.checkpoint](https://docs.pytorch.org/docs/stable/checkpoint.html): selective
#   checkpointing per operator.
