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
# # Recomputation: memory bought with arithmetic
#
# **45 minutes. No GPU. Exercises 3.1 to 3.4.**
#
# *You need:* chapter 2's account of a step, above all what an activation is and when it dies.
#
# *You will be able to:*
# - **replay** a part of the forward pass in the backward pass, with every gradient bit the same;
# - **choose** what to replay, full, selective or in segments, for the memory you have;
# - **predict** both sides of the deal: the bytes saved and the FLOPs paid.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import dataclasses
import inspect
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from minitron import cost
from minitron.config import ModelConfig, TrainConfig
from teaching.check import check
from teaching.figures import curves, show, skyline
from minitron.measure.meter import Meter

# %%
from minitron.model.recompute import (
    ForwardContext, apply_full_recompute, apply_segmented_recompute, apply_selective_recompute,
    recompute, segments_for_budget, sqrt_segments,
)
from minitron.model.transformer import Transformer, initialize, materialized_attention
from minitron.step import make_optimizer, train_step

torch.set_num_threads(1)
MB, GB = 1e6, 1e9

# %% [markdown]
# ## 1. The question
#
# GPT-3 has 96 layers. Suppose that its weights and everything that belongs to them were somebody
# else's problem, and a device with 80 GB had nothing to hold but activations. How many sequences of
# 2,048 tokens could be in flight?

# %% tags=["output-question", "nbval-check-output"]
gpt3, S3 = cost.PUBLISHED["GPT-3 175B"], 2048
one_sequence = cost.activation_bytes(gpt3, 1, S3, attention="materialized")
print(f"activations of one sequence: {one_sequence / GB:.0f} GB")
print(f"sequences in 80 GB: {80 * GB / one_sequence:.2f}")

# %% [markdown]
# Less than a third of one. A smaller micro-batch does not exist. But nearly all of these bytes are
# results of a computation whose inputs are at hand, and which can be done again.

# %% [markdown]
# ## 2. Estimate
#
# A block turns one tensor (B, S, D) into another. Keep that input, forget everything inside. When
# the backward pass comes to the block, run its forward pass once more: the same activations are
# back, are used, and are freed before the next block's turn. This is **full recomputation** (many
# libraries call it activation checkpointing).
#
# **Predict.** In 16 bits the input is 2 bytes for each of B S D values. By which factor do the
# activations shrink, and how many FLOPs does a step have now, in forward passes?
#
# <details><summary>Answer</summary>
#
# A step was three forward passes, one forward and two for backward. It becomes four, a third more.
# The factor is the surprise: a block with materialized attention keeps more than fifty times its
# input at this size.
#
# </details>

# %% tags=["output-estimate", "nbval-check-output"]
training = cost.training_flops_per_token(gpt3, S3)
print("recompute   one layer   all layers with head and loss   FLOPs added")
for kind in ("none", "selective", "full"):
    layer = cost.activation_bytes_per_layer(gpt3, 1, S3, 2, "materialized", kind)
    model_bytes = cost.activation_bytes(gpt3, 1, S3, 2, "materialized", kind)
    added = cost.recompute_flops_per_token(gpt3, S3, kind) / training
    print(f"{kind:9} {layer / GB:9.2f} GB {model_bytes / GB:28.1f} GB {added:13.1%}")

# %% [markdown]
# With full recomputation 80 GB hold many sequences. The row between the two is the better deal of
# the three, and we come back to it: most of the bytes for almost no arithmetic.

# %% [markdown]
# ## 3. Picture
#
# Sixteen layers, materialized attention, dropout, and the meter. First a plain step, then the same
# step with every block replayed.
#
# **Predict.** Draw the second skyline. Where is its peak, and what does the backward pass look
# like?

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
    """One forward and backward pass under the meter."""
    model = build(policy)
    with Meter(model) as meter:
        loss_of(model).backward()
    return meter


plain, full = metered(lambda model: None), metered(apply_full_recompute)

# %% tags=["figure-plain"]
show(skyline(plain.timeline, plain.peak), alt=(
    "Without recomputation the activations of all layers are there when backward begins."
))

# %% tags=["figure-full"]
show(skyline(full.timeline, full.peak), alt=(
    "With full recomputation only the blocks' inputs pile up; in backward each block's "
    "activations come back for a moment, one tooth per layer."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The forward pass climbs slowly, by one block input per layer. The backward pass is a saw with
# sixteen teeth: each replay brings one block's activations back, and its backward pass eats them.
# The inputs melt from one tooth to the next while the gradients grow, so the last tooth is the
# highest here. The step has more operators, so the axis is longer: that is the price.
#
# </details>

# %% [markdown]
# ## 4. By hand
#
# Two things must be told to autograd: record nothing now, and here is what to do later. An
# `autograd.Function` says both. Its `forward` runs without a graph. Its `backward` gets the
# gradient of the output, builds the graph that was not built before, and walks it at once.


# %%
class Forgetful(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)  # the input, and nothing else
        return function(x)

    @staticmethod
    def backward(ctx, grad_out):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():  # backward itself runs with recording off
            out = ctx.function(x)  # once more, recorded this time
        out.backward(grad_out)  # the weights get their .grad on the way
        return None, x.grad


# %%
def run_forgetful(blocks, x, rotation):
    """What the model calls instead of running its blocks in order."""
    for block in blocks:
        x = Forgetful.apply(partial(block, rotation=rotation), x)
    return x


def forget(model):
    model.run_blocks = run_forgetful


# %%
def gradient_of(model, seed=1):
    """The loss, and all gradients in a line; `seed` draws the dropout."""
    torch.manual_seed(seed)
    loss = loss_of(model)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


# %% [markdown]
# `run_blocks` is one of the model's seams: the model calls it, and does not know what it does. We
# compare with the plain step, dropout switched off.

# %% tags=["output-byhand", "nbval-check-output"]
most = max(moment.bytes["activation"] for moment in plain.timeline)
ours = max(moment.bytes["activation"] for moment in metered(forget).timeline)
print(f"activations: {most / MB:.1f} MB plain, {ours / MB:.1f} MB by hand")

loss, gradient = gradient_of(build().eval())
our_loss, our_gradient = gradient_of(build(forget).eval())
print("same loss:", loss == our_loss)
print("same gradient, to the last bit:", torch.equal(gradient, our_gradient))

# %% [markdown]
# Bit for bit, with a dozen lines. A replay does the same operations on the same numbers, so there
# is no reason for even the last bit to differ.
#
# Is there?

# %% [markdown]
# ## 5. The trap: a replay of something else
#
# We switch dropout on, as in training, and seed it, so that both runs draw the same masks.
#
# **Predict.** Loss and gradient: which of the two are still the same?

# %% tags=["output-trap"]
loss, gradient = gradient_of(build())
wrong_loss, wrong_gradient = gradient_of(build(forget))
off = (wrong_gradient - gradient).norm() / gradient.norm()
print(f"loss      plain {loss:.6f}, by hand {wrong_loss:.6f}, equal: {loss == wrong_loss}")
print(f"gradient  off by {off:.0%} of its length")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The loss is the same, for the forward pass is untouched. The gradient is not. The replay draws
# *new* dropout masks: backward then differentiates a network that nobody ran. And the generator has
# moved on, so all that is drawn later differs, too.
#
# </details>
#
# No error, no warning, and the loss is right to the last bit. Would you see it in training? We
# teach both models to copy: the next token is the one that stood eight places earlier.

# %%
small = ModelConfig("gpt", 64, 64, 2, 64, 4, 4, 256, dropout=0.2)


def copying_batch(step):
    own = torch.Generator().manual_seed(step)
    tokens = torch.randint(small.vocab_size, (16, 8), generator=own).repeat(1, 3)
    return tokens[:, :-1], tokens[:, 1:]


# %%
def train(policy, num_steps=120):
    torch.manual_seed(0)
    model = Transformer(small)
    initialize(model, seed=0)
    policy(model)
    optimizer = make_optimizer(model, TrainConfig(), torch.device("cpu"))
    return [float(train_step(model, optimizer, [copying_batch(step)], 3e-3, 1.0)[0])
            for step in range(num_steps)]


# %% tags=["figure-trap"]
losses = {"plain": train(lambda model: None), "new masks in the replay": train(forget)}
show(curves(range(1, 121), losses, "step", "loss (nats per token)"), alt=(
    "Both losses fall; the run whose replays draw new masks is the worse one, and nothing says so."
))

# %% [markdown]
# A falling loss like so many others. Whoever has only this run would call it a matter of the
# learning rate. The instrument that sees the fault is the gradient of the plain step, compared to
# the last bit.
#
# PyTorch's own `torch.utils.checkpoint` saves the generator's state for this reason, and lets you
# switch it off to gain time (`preserve_rng_state=False`). With dropout in the block that switch is
# this bug.

# %% [markdown]
# ## 6. The real one
#
# The package's function goes another way than an `autograd.Function`. Find the two lines that know
# of the backward pass.

# %%
print(inspect.getsource(recompute))

# %% [markdown]
# Whenever autograd saves a tensor, `call.drop` takes it away and leaves a number in its place.
# When backward asks for it, `call.fetch` runs the function again and gives the new tensor out.
# The graph itself stays the one of the plain run; only the saved tensors come from a replay. So
# nothing special is needed for the weights, or for several inputs. A replay stops as soon as the
# last saved tensor is there again.
#
# And the replay happens where the forward pass happened:

# %%
print(inspect.getsource(ForwardContext.restored))

# %% [markdown]
# The generators are set back to what they were, and afterwards to what they are now, as if nothing
# had been drawn. Autocast is part of the surroundings, too: a replay in another precision would be
# a replay of something else.
#
# Three policies are built from this one function. Full: each block. Selective: only the attention
# between query, key, value and their mixture. Segments: several consecutive blocks as one. The
# oracle is the plain step, dropout on:

# %% tags=["output-oracle", "nbval-check-output"]
policies = {
    "full": apply_full_recompute,
    "selective": apply_selective_recompute,
    "sqrt(L) segments": partial(apply_segmented_recompute, segment_lengths=sqrt_segments(L)),
    "first 5, as 3 + 2": partial(apply_segmented_recompute, segment_lengths=[3, 2]),
}
loss, gradient = gradient_of(build())
drawn_next = torch.rand(1)
for name, policy in policies.items():
    its_loss, its_gradient = gradient_of(build(policy))
    same_gradient = torch.equal(gradient, its_gradient)
    same_generator = torch.equal(drawn_next, torch.rand(1))
    print(f"{name:18} loss {its_loss == loss}, gradient {same_gradient}, "
          f"generator {same_generator}")

# %% [markdown]
# One thing no surroundings can restore: a function that *counts*. Batch normalization keeps a
# running mean and the number of batches it has seen.
#
# **Predict.** One batch, one backward pass. How many batches has the norm counted?

# %% tags=["output-counter", "nbval-check-output"]
norm, x = nn.BatchNorm1d(3), torch.ones(4, 3, requires_grad=True)
recompute(norm, x).sum().backward()
plain_norm = nn.BatchNorm1d(3)
plain_norm(x)
for name, module in (("plain", plain_norm), ("replayed", norm)):
    print(f"{name:9} {int(module.num_batches_tracked)} batches, "
          f"running mean {module.running_mean[0]:.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Two, and the running mean has been moved twice as well. The gradient is right this time; the state
# is wrong, and shows at evaluation. What is replayed must do the same both times and leave nothing
# behind. LayerNorm and RMSNorm have no state, which is one reason why Transformers are easy to
# recompute.
#
# </details>

# %% [markdown]
# ## 7. Measure
#
# Both sides of the deal have an instrument: the meter counts bytes, and PyTorch's `FlopCounterMode`
# counts the FLOPs of every matrix product that runs, replays included.

# %%
def both_sides(policy):
    """Activation bytes after the forward pass and at the most, and the FLOPs of the step."""
    model = build(policy)
    with Meter(model) as meter, FlopCounterMode(display=False) as counter:
        loss = loss_of(model)
        kept = meter.now()["activation"]
        loss.backward()
    most = max(moment.bytes["activation"] for moment in meter.timeline)
    return kept, most, counter.get_total_flops()


# %% tags=["output-both", "nbval-check-output"]
_, plain_bytes, plain_flops = both_sides(lambda model: None)
per_token = cost.training_flops_per_token(config, S)
kinds = {"none": lambda model: None, **{k: policies[k] for k in ("selective", "full")}}
print("           after forward (MB)    at most    FLOPs added")
print("           formula   measured   measured   formula  measured")
for kind, policy in kinds.items():
    formula = cost.activation_bytes(config, B, S, 4, "materialized", kind, mask_bytes=4)
    kept, most, flops = both_sides(policy)
    added = cost.recompute_flops_per_token(config, S, kind) / per_token
    print(f"{kind:9} {formula / MB:8.2f} {kept / MB:10.2f} {most / MB:10.2f} "
          f"{added:9.1%} {flops / plain_flops - 1:9.1%}")

# %% [markdown]
# The bytes agree. (A CPU's dropout keeps its mask as wide as its values, 4 bytes here; CUDA keeps
# one byte.) The FLOPs of the full replay agree as well. Those of the selective one are half of the
# formula: it counts both products of attention, and the replay stops before the second one, whose
# output nobody asks for.

# %% [markdown]
# ### How long should a segment be?
#
# A segment of $k$ blocks keeps one input instead of $k$. But when it is replayed, the activations
# of $k$ blocks are there at once.
#
# **Predict.** The classic answer is about $\sqrt{L}$ segments (Chen et al. 2016, section 4.1), for
# 16 layers segments of 4. Is that the lowest peak here?

# %%
block_bytes = cost.activation_bytes_per_layer(config, B, S, 4, "materialized", mask_bytes=4)
boundary = cost.activation_bytes_per_layer(config, B, S, 4, recompute="full")
lengths = [1, 2, 3, 4, 6, 8, 12, 16]
peaks, predicted, added = [], [], []
for length in lengths:
    segments = [length] * (L // length) + [L % length] * (L % length > 0)
    _, most, flops = both_sides(partial(apply_segmented_recompute, segment_lengths=segments))
    peaks.append(most / MB)
    waiting = len(segments) - 1
    predicted.append(max((waiting - i) * boundary + n * block_bytes
                         for i, n in enumerate(reversed(segments))) / MB)
    added.append(flops / plain_flops - 1)

# %% tags=["figure-segments"]
print(f"a block keeps {block_bytes / boundary:.0f} times its input")
print("FLOPs added at every length:", *{f"{share:.1%}" for share in added})
show(curves(lengths, {"measured": peaks}, "blocks per segment", "activations at the peak (MB)",
            {"formula": predicted}), alt=(
    "Longer segments hold more: replaying block by block has the lowest peak."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# No: single blocks win, at the same price. The square root assumes a layer that keeps no more than
# its input. A segment of $k$ blocks holds about $\frac{L}{k} b + k A$ bytes, with $b$ for an input
# and $A$ for a block's activations, and that is smallest at $k = \sqrt{L\,b/A}$. Here $A$ is so
# much larger than $b$ that $k$ falls below 1. Exercise 3.4 finds the best length for any numbers.
#
# </details>
#
# ### The frontier
#
# All of these replay every block. With more memory, replay fewer. `segments_for_budget` takes the
# bytes of each block and a budget, and replays as few blocks as fit in it.

# %%
budgets = [round(share * L * block_bytes) for share in (0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.8, 1)]
block_flops = cost.recompute_flops_per_token(config, S) / L
paid, expected, rows = [], [], []
for budget in budgets:
    segments = segments_for_budget([block_bytes] * L, boundary, budget)
    _, most, flops = both_sides(partial(apply_segmented_recompute, segment_lengths=segments))
    paid.append(100 * (flops / plain_flops - 1))
    expected.append(100 * sum(segments) * block_flops / per_token)
    rows.append(f"{budget / MB:8.1f} {most / MB:8.1f} {sum(segments):11}   {segments}")

# %% tags=["figure-frontier"]
print("budget MB  held MB  replayed of 16, in segments of", *rows, sep="\n")
show(curves([budget / MB for budget in budgets], {"measured": paid}, "budget for activations (MB)",
            "FLOPs added (%)", {"formula": expected}), alt=(
    "Every further megabyte saves arithmetic, in a nearly straight line down to nothing."
))

# %% [markdown]
# A straight line is what a price per block must give. Where the held bytes exceed the budget by a
# little, it is what lies outside of the blocks: the loss, the head's input, the embedding's mask.
#
# The good deal lies off that line. Selective recomputation replays the few products whose results
# are large, instead of whole blocks in which large and small ones are mixed.

# %% [markdown]
# ### On real GPUs
#
# The paper on selective recomputation says of GPT-3: 70 % of the activations saved, for 2.7 % more
# FLOPs (Korthikanti et al. 2022, section 5). Both numbers can be computed here.

# %% tags=["output-claim", "nbval-check-output"]
h, a = gpt3.width, gpt3.num_heads
layer = {kind: cost.activation_bytes_per_layer(gpt3, 1, S3, 2, "materialized", kind)
         for kind in ("none", "selective", "full")}
saved = 1 - layer["selective"] / layer["none"]
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
# training step, forward and backward, while a replay repeats the forward products alone, a third of
# it. The claim errs on the safe side. Which count is right? The instruments can decide it at full
# size, on a laptop, because they need no values: **fake tensors** have a shape, a type and no
# memory. Here is one layer of GPT-3, in 16 bits:

# %%
def layer_of_gpt3(policy):
    """Activation bytes and FLOPs of forward and backward through one layer, nothing computed."""
    one_layer = dataclasses.replace(gpt3, num_layers=1)
    with FakeTensorMode():
        x = torch.zeros(1, S3, h, dtype=torch.bfloat16, requires_grad=True)
        model = half(lambda: Transformer(one_layer))
        model.blocks[0].attention.attention_fn = materialized_attention
        policy(model)
        with Meter(model) as meter, FlopCounterMode(display=False) as counter:
            out = model.run_blocks(model.blocks, x.clone(), None)
            kept = meter.now()["activation"]
            out.sum().backward()
    return kept, counter.get_total_flops()


# %%
def half(make):
    """Call `make` with bfloat16 as the type of new weights."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


# %% tags=["output-gpt3", "nbval-check-output"]
plain_layer = layer_of_gpt3(lambda model: None)
for kind, policy in kinds.items():
    kept, flops = layer_of_gpt3(policy)
    print(f"{kind:9} {kept / GB:5.2f} GB kept, {flops / 1e12:5.2f} TFLOPs, "
          f"{flops / plain_layer[1] - 1:6.2%} more")

# %% [markdown]
# (The first row is larger than the formula's, by the width of a CPU's dropout masks.) Under one per
# cent, and half of our own count, because the replay stops early. Time is another
# matter. The paper measured one layer of a 22-billion-parameter model on A100s (table 4):

# %% tags=["output-time", "nbval-check-output"]
milliseconds = {"none": 7.7 + 11.9, "selective": 7.7 + 13.2, "full": 7.7 + 19.5}
model_22b = ModelConfig("gpt", 51200, 2048, 48, 6144, 64, 64, 4 * 6144, dropout=0.1)
for kind, time in milliseconds.items():
    flops = cost.recompute_flops_per_token(model_22b, 2048, kind)
    flops /= cost.training_flops_per_token(model_22b, 2048)
    print(f"{kind:9} {time:5.1f} ms, {time / milliseconds['none'] - 1:4.0%} more time, "
          f"{flops:5.1%} more FLOPs")

# %% [markdown]
# What selective recomputation replays is short on FLOPs and long on memory traffic: softmax and
# dropout read and write the S x S matrix. It still costs a fraction of the full replay.
#
# Today a fused kernel (Dao et al. 2022) does the selective replay itself, tile by tile, inside
# attention's backward pass, without ever writing the matrix. That is why our models use it by
# default. The formula for it is the selective row plus one number per head and token. What is left
# to decide is how many blocks to replay. All layers of GPT-3, the 80 GB of section 1, several
# sequences:

# %% tags=["output-budget", "nbval-check-output"]
print("sequences   fused, all kept   replayed layers   FLOPs added")
for num_sequences in (1, 2, 4, 8, 14):
    layer = cost.activation_bytes_per_layer(gpt3, num_sequences, S3)
    outside = cost.activation_bytes(gpt3, num_sequences, S3) - layers * layer
    block_input = cost.activation_bytes_per_layer(gpt3, num_sequences, S3, recompute="full")
    segments = segments_for_budget([layer] * layers, block_input, int(80 * GB - outside))
    added = cost.recompute_flops_per_token(gpt3, S3) * sum(segments) / layers / training
    print(f"{num_sequences:9} {(layers * layer + outside) / GB:14.0f} GB {sum(segments):17} "
          f"{added:13.1%}")

# %% [markdown]
# A device that held not even a third of a sequence takes one for almost nothing, and 14 for a third
# more arithmetic. MFU does not count that third: it divides by the model's FLOPs, not by those
# that the hardware was made to do. On a real device the weights want their place, too. Sharing
# *them* is the next chapters' subject.

# %% [markdown]
# ## 8. Recap
#
# 1. Activations are results, and what can be computed again need not be kept: full recomputation
#    keeps one input per block, for one more forward pass of the blocks.
# 2. A replay gives the same gradient to the last bit, if it draws the same random numbers, runs in
#    the same precision, and the function leaves nothing behind.
# 3. A wrong replay has the right loss: only a comparison of gradients shows it.
# 4. Selective recomputation is the best deal where attention is materialized, most of the bytes for
#    hardly any FLOPs; fused attention has it built in.
# 5. Replay as few blocks as the budget allows, block by block: the square root is for layers that
#    keep no more than their input.
#
# ## Exercises
#
# Write your answers into `exercises/ch03_recompute.py`, save, and run the cell. In a terminal,
# `minitron hint 3.1` gives hints in three steps.
#
# **3.1 Recompute a function** (30 minutes): section 4's function, without the trap of section 5.

# %%
check("3.1")

# %% [markdown]
# **3.2 Fit a byte budget** (25 minutes): which blocks to replay, and in which segments.

# %%
check("3.2")

# %% [markdown]
# **3.3 What recomputation costs** (15 minutes): the FLOPs of both policies, from the shapes.

# %%
check("3.3")

# %% [markdown]
# **3.4 The best segment length** (15 minutes): the lowest peak for any depth, block and input.

# %%
check("3.4")

# %% [markdown]
# ## Further reading
#
# - Chen, Xu, Zhang, Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016, sections 3
#   and 4: replaying segments, and the square root.
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   sections 4 and 5: the bytes of a block, and what to replay.
# - Dao, Fu, Ermon, Rudra, Ré, *FlashAttention*, 2022, section 3.1: recomputation inside a kernel.
# - Chowdhery et al., *PaLM*, 2022, appendix B: why MFU leaves replays out.
