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
# # 2. Memory: what a training step holds, and when
#
# **50 minutes. No GPU. [Exercises 2.1](exercise:2.1) to 2.4, 80 minutes more.**
#
# *You need:* the three phases of a step from [chapter 1](chapter:1) (forward, backward, optimizer).
#
# *You will be able to:*
# - **account** for every byte of a training step: which tensor, in which category, from when to
#   when;
# - **predict** the peak from the model's shape, before you rent the GPU;
# - **find** a memory leak with an instrument instead of guessing.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
import dataclasses

import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from minitron import cost
from minitron.config import ModelConfig, TrainConfig
from minitron.measure.meter import Meter
from minitron.model.transformer import (
    FeedForward, Transformer, fused_attention, initialize, materialized_attention,
)
from minitron.plan.hardware import DEVICES
from minitron.step import make_optimizer, train_step
from teaching.check import check
from teaching.claims import claim
from teaching.figures import Held, curves, holdings, memory_bars, show, skyline
from teaching.lab import recorded, show_source, show_text
from teaching.lab.allocator import MIB, CachingAllocator, OutOfDeviceMemory
from teaching.widgets import memory_calculator

torch.set_num_threads(1)
cpu = torch.device("cpu")
MB, GB, H100 = 1e6, 1e9, DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# Chapter 1 estimated the years it would take to train Llama 3 8B on one H100. Memory becomes the
# problem first. In bfloat16 the weights fill less than a fifth of the GPU's memory, and generating
# text works without trouble. Then you train it.
#
# The figure compares the two, and the lines under it have the numbers. Dashed bars are computed
# rather than measured; the gray band is memory that the GPU does not have.
#
# **Predict.** Training keeps weights and gradients in bfloat16 here, and yet the lower bar is as
# long as chapter 1's count in float32. Why? Section 2 answers.

# %% tags=["figure-question"]
llama_8b = ModelConfig(
    vocab_size=128_256, num_layers=32, width=4096, num_heads=32, num_kv_heads=8,
    ffn_width=14_336, max_sequence_length=8192, tied_embedding=False,
)
P, recipe = cost.num_parameters(llama_8b), cost.RECIPES["bf16"]
training = {
    "parameter": recipe.parameter * P,
    "gradient": recipe.gradient * P,
    "optimizer state": (recipe.master + recipe.optimizer_state) * P,
}
show(memory_bars(
    {}, {"inference": {"parameter": 2 * P}, "training": training}, limit=H100.memory_bytes,
    limit_label=f"beyond an H100's {H100.memory_bytes / GB:.1f} GB",
), alt="The weights fit on the GPU with room to spare; the training state does not.")

# %% tags=["nbval-check-output"]
print(f"{P:,} parameters")
print(f"weights in bfloat16  {2 * P / GB:6.1f} GB")
print(f"training state       {cost.model_state_bytes(llama_8b, recipe) / GB:6.1f} GB")
print(f"an H100 has          {H100.memory_bytes / GB:6.1f} GB = {H100.memory_bytes / MIB:,.0f} MiB")

# %% [markdown]
# The lower bar ends deep in the gray band, eight times as long as the upper one, and we have not
# read a single token: activations come on top. (An "80 GB" H100 has roughly 80 GiB, and a GiB is
# 2^30 bytes.) Where does every byte go?
#
# Section 2 counts what training stores, section 3 shows when, and section 4 derives the activations
# from what the backward pass needs. In section 5 one stored number keeps them all alive. Section 6
# checks the counts, and section 7 applies them to large models and GPUs.

# %% [markdown]
# ## 2. Estimate
#
# For each parameter, training stores up to four things: the weight that the forward pass uses; its
# gradient, which has the weight's dtype unless we say otherwise; Adam's two *moments* (moving
# averages of the gradient and of its square), which stay in float32; and, if the weight is in 16
# bits, a float32 [*master* copy](word:master-weights), which the optimizer updates. Together they
# are the [**training state**](word:training-state). In the figures, [*optimizer
# state*](word:optimizer-state) is the moments plus the master copy; in the code,
# `recipe.optimizer_state` is the moments alone.
#
# Why a master copy? Watch a weight of 1.0 receive an update of 0.001:

# %% tags=["nbval-check-output"]
weight = torch.tensor(1.0, dtype=torch.bfloat16)
print(f"1.0 + 0.001 in bfloat16 is {(weight + 0.001).item()}; the next number above 1.0 is "
      f"{1 + torch.finfo(torch.bfloat16).eps}")

# %% [markdown]
# In bfloat16, an update of less than half the distance to the next number is lost, however often it
# is repeated. In a float32 copy, such updates add up (Micikevicius et al. 2018, section 3.1).
#
# So why is the training state no smaller in bfloat16?
#
# <details><summary>Answer</summary>
#
# It takes 16 bytes per parameter before and after. In float32, weight and gradient take 4 bytes
# each, and the moments take 8. In bfloat16, weight and gradient take 2 bytes each, but the 4 bytes
# saved go to the master copy. What does shrink is activation memory: most values take 2 bytes
# instead of 4.
#
# </details>

# %% tags=["output-recipes", "nbval-check-output"]
print("bytes per parameter   weight gradient master moments   sum  8B model")
for name, recipe in cost.RECIPES.items():
    gigabytes = cost.model_state_bytes(llama_8b, recipe) / GB
    print(f"{name:21} {recipe.parameter:6} {recipe.gradient:8} {recipe.master:6} "
          f"{recipe.optimizer_state:7} {recipe.total:5} {gigabytes:6.0f} GB")

# %% [markdown]
# Each row is a *recipe*: the bytes of each of the four parts. The second is that of the [ZeRO
# paper](https://arxiv.org/abs/1910.02054) (Rajbhandari et al. 2020, section 3.1). The last holds
# the gradient in two dtypes: in bfloat16, as the backward pass computes it, and in float32, into
# which it is accumulated. None of this depends on the batch; activations do.
#
# To compute gradients, the backward pass needs some of the values that the forward pass has
# computed; section 4 derives which. These [**activations**](word:activation) are stored from the
# moment they are computed until the backward pass has used them. `minitron.cost` counts them
# operator by operator.
#
# [*Materialized* attention](word:materialized-attention) writes the attention weights, the softmax
# of the scores, to memory: for a sequence of S tokens, one S x S matrix per head and layer. (It
# also saves a causal mask per layer and, in Llama 3 8B, keys and values repeated from 8 heads to
# 32.) A [*fused* kernel](word:fused-attention) such as
# [FlashAttention](https://arxiv.org/abs/2205.14135) computes the weights tile by tile instead (Dao
# et al. 2022). After the next cell, attention is fused unless we say otherwise.
#
# The loss takes the log-softmax of the logits in float32. Its output is saved and counts among the
# activations; two more tensors live only briefly. The backward pass begins with the loss: it
# computes the gradient of log-softmax's input from the saved output and that output's gradient. The
# two gradients are float32 and have the logits' shape, so together they take 8 bytes per token and
# word of the vocabulary. For one sequence of 8,192 tokens, in bfloat16:

# %% tags=["output-activations", "nbval-check-output"]
for name, size in {
    "activations, fused attention": cost.activation_bytes(llama_8b, 1, 8192),
    "activations, materialized attention": cost.activation_bytes(
        llama_8b, 1, 8192, attention="materialized"),
    "  of these, S x S matrices": 2 * 32 * 32 * 8192**2,  # bytes, layers, heads, S x S
    "two temporary tensors of the loss": 8 * 8192 * 128_256,
}.items():
    print(f"{name:36} {size / GB:4.0f} GB")

# %% [markdown]
# Fused attention saves three quarters of the activations.
#
# ## 3. Picture: two steps, byte by byte
#
# We now know what is stored, but not when, and only what is stored *at the same time* has to fit.
# Our model has 12 layers in float32 and trains on any laptop. The [**meter**](word:meter) watches
# two training steps. It sees every operator, counts each new tensor until it is freed, and sorts
# the bytes into five kinds: parameter, gradient, optimizer state, activation, and *temporary*,
# which is everything else.
#
# The figure, a [*skyline*](word:skyline), stacks the five kinds over time. (The meter's own work
# adds to that time, so look at the order, not at how long a phase takes.) The strip above it names
# the phase of the step, and the triangle marks the peak, whose bytes are listed at the right.
#
# **Predict.** Sketch the bytes alive over two steps. Where is the peak: in the forward pass, the
# backward pass, or the optimizer? Do both steps hold the same bytes?

# %%
config = ModelConfig(
    family="gpt", vocab_size=256, num_layers=12, width=96, num_heads=4, num_kv_heads=4,
    ffn_width=384, max_sequence_length=512,
)
B, S = 8, 128  # sequences, tokens in each


# %%
def build(config):
    model = Transformer(config)
    initialize(model, seed=0)
    return model, make_optimizer(model, TrainConfig(), cpu)


def random_batch(batch_size, sequence_length):
    tokens = torch.randint(config.vocab_size, (batch_size, sequence_length + 1))
    return tokens[:, :-1], tokens[:, 1:]


# %% tags=["figure-skyline"]
model, optimizer = build(config)
batches = [random_batch(B, S) for _ in range(2)]  # drawn before the meter counts
with Meter(model, optimizer) as meter:
    for batch in batches:
        train_step(model, optimizer, [batch], rate=1e-3, clip_norm=1.0)
middle = max(i for i, entry in enumerate(meter.timeline)  # where step 2 begins
             if entry.phase == "forward" and meter.timeline[i - 1].phase == "optimizer")
first, second = meter.timeline[:middle], meter.timeline[middle:]
show(skyline(meter.timeline, meter.peak), alt=claim(
    second[0].total > first[0].total and meter.peak.total > max(entry.total for entry in first),
    "Activations pile up during the forward pass and shrink during the backward pass; the second "
    "step starts higher, because the optimizer's state now exists."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The peak is where forward turns into backward: all activations are stored, and so are the loss's
# two temporaries, 8 bytes x 8 sequences x 128 tokens x 256 words. From there on, each layer's
# activations are freed as its gradients are computed. The gold teeth on the way down are gradients
# of activations, each freed once it has been used. The optimizer's state does not exist before the
# first `optimizer.step()`: Adam allocates its moments when it first sees a gradient. The second
# step holds them from start to finish, so its peak is higher.
#
# </details>
#
# This is why a run can complete its first step, print a loss, and run out of memory in the second.
# Suppose a GPU had 90 MB:

# %% tags=["output-second"]
for name, entries in (("first", first), ("second", second)):
    peak = max(entry.total for entry in entries)
    verdict = "fits" if peak <= 90 * MB else "out of memory"
    print(f"{name:6} step: peak {peak / MB:5.1f} MB of 90 MB: {verdict}")

# %% [markdown]
# Never conclude from one step that a model fits. To see the lifetime of each kind of bytes, we run
# the same two steps by hand and read the meter after each part. The next figure has a row for each
# reading and a column for each kind but *temporary*, of which almost nothing is alive at a reading;
# the gray column is the sum. A full box is the most that its column ever holds.

# %%
def loss_of(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def step_by_hand(model, optimizer, batch, read):
    loss = loss_of(model, batch)
    read("forward")
    loss.backward()
    read("backward")
    optimizer.step()
    read("update")
    optimizer.zero_grad()
    read("zero_grad")


# %% tags=["figure-holdings"]
held = {}
model, optimizer = build(config)
with Meter(model, optimizer) as meter:
    for step, batch in enumerate(batches, start=1):
        step_by_hand(model, optimizer, batch, lambda part, step=step: held.update(
            {f"after {part} {step}": meter.now() | {"total": sum(meter.now().values())}}))
kinds = ("parameter", "gradient", "optimizer state", "activation", "total")
most = {kind: max(row[kind] for row in held.values()) for kind in kinds}
rows = {name: {kind: Held(row[kind], row[kind] / most[kind]) for kind in kinds}
        for name, row in held.items()}
show(holdings(rows), alt=claim(
    all([row[kind] > MB for kind in kinds[1:4]] == ["backward" in name or "update" in name, i > 1,
        "forward" in name] for i, (name, row) in enumerate(held.items())),
    "Parameters are held throughout, gradients from backward to zero_grad, optimizer state from "
    "the first update on, activations from forward to backward."))

# %% [markdown]
# Read it by column. Parameters are always in memory. Gradients live from the backward pass to
# `zero_grad`, which frees them (since PyTorch 2.0 it sets `.grad` to None). Optimizer state lives
# from the first update on, and activations only between forward and backward.
#
# The largest total is in the row after the second forward pass: parameters, optimizer state and
# activations, but no gradients, which `zero_grad` has freed. The skyline's peak is 2.1 MB higher,
# because it comes slightly later, when the loss's temporaries exist.
#
# **Predict.** Now accumulate gradients over several [micro-batches](word:micro-batch), as in
# [chapter 1](chapter:1). By how many MB does the peak grow from one micro-batch to two, and from
# two to four? And where is the peak if a step reads one sequence of 8 tokens, so that there are
# hardly any activations?

# %% tags=["output-accumulation"]
def peak_of_step(config, batches):
    """Return the peak of the second step, in which the optimizer's state exists."""
    model, optimizer = build(config)
    train_step(model, optimizer, batches, 1e-3, 1.0)
    with Meter(model, optimizer) as meter:
        train_step(model, optimizer, batches, 1e-3, 1.0)
    return meter.peak


print("micro-batches       peak, MB phase        gradient  activation   temporary")
for count, shape in ((1, (B, S)), (2, (B, S)), (4, (B, S)), (1, (1, 8))):
    peak = peak_of_step(config, [random_batch(*shape)] * count)
    print(f"{count} of {shape!s:10} {peak.total / MB:12.1f} {peak.phase:9}" + "".join(
        f"{peak.bytes[kind] / MB:12.1f}" for kind in ("gradient", "activation", "temporary")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# From one to two by the gradients, from two to four not at all. The second micro-batch's forward
# pass runs while the first one's gradients are in memory, so parameters, gradients, optimizer state
# and activations are all in memory at once. Further micro-batches add nothing, because each
# backward pass frees its own activations. With 8 tokens, the peak moves to the end of the backward
# pass, where the gradients are complete: the whole training state, and little else.
#
# </details>
#
# So plan with three parts: **the training state, the activations of one micro-batch, and the
# temporaries where its backward pass begins**. With a single micro-batch, the peak is lower by the
# gradients. (Some versions of AdamW need temporaries, too, but by then the activations are gone.)
#
# ## 4. By hand: what does the backward pass need?
#
# Section 2 took Llama's activations from a formula. Where does it come from? Autograd can tell us
# what the backward pass needs: it passes each tensor that an operator saves to a hook, which we
# set. Take one feed-forward layer: a projection up to width F (`F_width` in the code, where `F` is
# `torch.nn.functional`), GELU, and a projection down to width D.
#
# **Predict.** Which tensors are saved, and how large is each, for an input of shape (B, S, D)?
#
# <details><summary>Answer</summary>
#
# `up` needs its input to compute its weight's gradient: B S D values. GELU needs its input to
# compute its slope: B S F. `down` needs its input, which is GELU's output: B S F. Both projections
# also save their weights, which are in memory anyway. No operator here needs the output of `down`.
#
# </details>

# %%
def saved_by(function, *inputs, owned=()):
    """Return the tensors that autograd saves while `function` runs, without those in `owned`."""
    known = {tensor.untyped_storage()._cdata for tensor in owned}
    saved = {}

    def keep(tensor):
        saved.setdefault(tensor.untyped_storage()._cdata, tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*inputs)
    return [tensor for key, tensor in saved.items() if key not in known]


# %% tags=["output-byhand", "nbval-check-output"]
D, F_width = config.width, config.ffn_width
feed_forward = FeedForward(config)
x = torch.randn(B, S, D, requires_grad=True)

saved = saved_by(feed_forward, x, owned=list(feed_forward.parameters()))
for tensor in saved:
    print(f"{tuple(tensor.shape)!s:16} {tensor.untyped_storage().nbytes():9,} bytes")
total = sum(tensor.untyped_storage().nbytes() for tensor in saved)
print(f"{'measured':16} {total:9,} bytes")
print(f"{'4 B S (D + 2 F)':16} {4 * B * S * (D + 2 * F_width):9,} bytes")

# %% [markdown]
# (1024 is B S: for a linear layer, PyTorch flattens the first two dimensions.) The prediction is
# exact, because these operators save what their derivatives need and nothing more. An operator can
# also save less and recompute the rest, as fused attention does. Do the same on paper for a whole
# GPT block in 16 bits, with F = 4 D, materialized attention, and dropout with one byte per value of
# a mask. You get the formula of [Korthikanti et al.](https://arxiv.org/abs/2205.05198) (2022,
# section 4.1), with s = S, b = B, h = D, and a the number of heads:
#
# $$ s\,b\,h\left(34 + 5\,\frac{a\,s}{h}\right) \text{ bytes per layer} $$
#
# The first term is proportional to the number of tokens, the second to the square of the sequence
# length. [Exercise 2.2](exercise:2.2) derives both. The next cell compares the formula with
# `minitron.cost`.

# %% tags=["output-paper", "nbval-check-output"]
gpt_block = dataclasses.replace(llama_8b, family="gpt", num_kv_heads=32, ffn_width=4 * 4096,
                                dropout=0.1, num_layers=1)
s, b, h, a = 2048, 1, 4096, 32
paper = s * b * h * (34 + 5 * a * s / h)
ours = cost.activation_bytes_per_layer(gpt_block, b, s, attention="materialized")
print(f"paper {paper:13,.0f} bytes per layer")
print(f"cost  {ours:13,} bytes per layer, {ours / paper - 1:+.1%}")

# %% [markdown]
# The paper leaves out two small terms: the norms' statistics and the causal mask.
#
# Section 2's count for Llama 3 8B is such a sum, too: for each token, what 32 blocks save, and what
# the final norm and the loss save. Llama's feed-forward layer has a *gate*: `down` reads SiLU(gate)
# x up, where gate and up are two projections of the same input.

# %% tags=["output-llama", "nbval-check-output"]
width, kv_width, ffn_width = 4096, 8 * 128, 14_336
block = 2 * (  # bytes per value
    4 * width  # input and output of two norms
    + 2 * width + 2 * kv_width  # query and attention's output, key and value
    + 4 * ffn_width)  # gate, SiLU(gate), up, their product
end = 2 * 2 * width + 4 * 128_256  # input and output of the final norm, log-probabilities
by_hand, held = 8192 * (32 * block + end), cost.activation_bytes(llama_8b, 1, 8192)
print(f"8,192 tokens x (32 x {block:,} + {end:,} bytes) = {by_hand / GB:.1f} GB")
print(f"cost {held / GB:.1f} GB, {held / by_hand - 1:+.1%}")

# %% [markdown]
# The rest is statistics of norms and attention, and a table for the rotary positions.
#
# ### What grows, and how fast?
#
# **Predict.** With fused attention, double one thing at a time: the batch, the sequence length, the
# width (with the feed-forward's, but as many heads), the depth. By what factor do the activations
# grow? And the training state?

# %%
def activations(config, batch_size, sequence_length, attention=fused_attention):
    """Measure the bytes that a forward pass saves for the backward pass."""
    model, _ = build(config)
    for block in model.blocks:
        block.attention.attention_fn = attention
    batch = random_batch(batch_size, sequence_length)
    with Meter(model) as meter:
        loss = loss_of(model, batch)
        held = meter.now()["activation"]
    del loss  # until here it held the graph, and with it the activations
    return held


# %% tags=["output-doubling", "nbval-check-output"]
wide = dataclasses.replace(config, width=2 * config.width, ffn_width=2 * config.ffn_width)
deep = dataclasses.replace(config, num_layers=2 * config.num_layers)
one, state = activations(config, B, S), cost.num_parameters(config)
for name, model_config, batch_size, length in (
    ("batch", config, 2 * B, S), ("sequence", config, B, 2 * S),
    ("width", wide, B, S), ("depth", deep, B, S),
):
    factor = activations(model_config, batch_size, length) / one
    print(f"twice the {name:9} activations x {factor:.2f}, "
          f"state x {cost.num_parameters(model_config) / state:.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Activations double with the batch and the sequence length, and nearly double with the width and
# the depth, because a few tensors, such as the log-probabilities, depend on neither. The state does
# not depend on the tokens at all. The blocks' matrices quadruple with the width and double with the
# depth; the embeddings only double with the width and do not grow with the depth. So a wide model
# trained on few tokens per micro-batch is mostly state, and a narrow one trained on many is mostly
# activations.
#
# </details>
#
# Doubling the sequence length also doubled the number of tokens. Which of the two do activations
# depend on? Keep the number of tokens fixed at 2,048, and make the sequences longer and
# correspondingly fewer. Dots are measured and dashed lines are the formula. The line below the
# figure prints how much more materialized attention stores: in essence, the attention weights.
#
# **Predict.** From 64 sequences of 32 tokens to 4 sequences of 512, by what factor do the stored
# attention weights grow: 1, 16 or 256?

# %% tags=["figure-sequence", "exhaustive"]
lengths = [32, 64, 128, 256, 512]
measured, predicted = {}, {}
for name, function in (("fused", fused_attention), ("materialized", materialized_attention)):
    sizes = [(2048 // length, length) for length in lengths]
    measured[name] = [activations(config, *size, function) / MB for size in sizes]
    predicted[f"{name}, formula"] = [
        cost.activation_bytes(config, *size, 4, attention=name) / MB for size in sizes]
gaps = [more - less for less, more in zip(measured["fused"], measured["materialized"], strict=True)]
show(curves(lengths, measured, "sequence length, at 2,048 tokens in total", "activations (MB)",
            predicted), alt=claim(
    max(measured["fused"]) < 1.01 * min(measured["fused"]) and gaps[-1] > 16 * gaps[0],
    "With a fixed number of tokens, the fused kernel's activations do not grow with the sequence "
    "length; materialized attention's do."))
print("materialized minus fused:", " ".join(f"{gap:.1f}" for gap in gaps), "MB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# By 16. Each head stores an S x S matrix per sequence, and 2,048 tokens make 2,048/S sequences, so
# a head stores 2,048 S values: at a fixed number of tokens they are proportional to the sequence
# length, and the upper dots climb in a straight line. The fused kernel stores its inputs, its
# output, and one number per row of scores, so its dots lie on a level line: how tokens are divided
# into sequences does not matter. (The printed gap grows slightly more than 16-fold, mainly because
# that number per row, as many bytes at every length, has been subtracted.)
#
# </details>
#
# ## 5. The trap: a number that holds a graph
#
# So far, all memory was freed when the step no longer needed it. Sometimes it is not, and a run
# that has trained for hours runs out of memory. Here are two loops. The first stores the loss of
# every training step, to plot it later; [PyTorch's
# FAQ](https://docs.pytorch.org/docs/stable/notes/faq.html) warns against code of this kind. The
# second adds up the loss over the validation data. A loss refers to its *graph*: autograd's record
# of the operators that produced it, with the tensors they saved.

# %%
def train_and_keep(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss)
        yield loss


# %%
def validate(model, batches):
    total = 0.0
    for batch in batches:
        total = total + loss_of(model, batch)
        yield total


# %% [markdown]
# **Predict.** For each loop: how many more bytes are in memory after each additional batch?

# %%
model, optimizer = build(config)
train_step(model, optimizer, [random_batch(B, S)], 1e-3, 1.0)  # now Adam's state exists
batches = [random_batch(B, S) for _ in range(4)]


def held_after_each(loop):
    with Meter(model, optimizer) as meter:
        held = [sum(meter.now().values()) for _ in loop]
    return held, meter


kept, _ = held_after_each(train_and_keep(model, optimizer, batches))
summed, leak = held_after_each(validate(model, batches))

# %% tags=["output-trap", "nbval-check-output"]
def report(name, held):
    megabytes = "".join(f"{size / MB:7.1f}" for size in held)
    print(f"{name:15} {megabytes} MB, +{held[-1] - held[-2]:,} bytes")


report("training loop", kept)
report("validation loop", summed)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The training loop keeps 4 bytes per step, the loss itself. `backward()` has released the saved
# tensors; the graph's nodes still exist, but they are small objects in host memory, which the meter
# does not count. The validation loop never calls `backward()`, so each `total` holds the graph of
# its batch and of all earlier batches, with all their activations. Yet the number it reports is
# correct.
#
# </details>
#
# The meter's snapshot points at the second loop: it lists every tensor alive at the peak, with the
# module that created it.

# %% tags=["output-leak", "nbval-check-output"]
largest = leak.peak.tensors[0].bytes
twins = [tensor for tensor in leak.peak.tensors if tensor.bytes == largest]
print(f"{len(twins)} activations of {largest:,} bytes each, among them")
for module in ("blocks.0.mlp.up", "blocks.11.mlp.up"):
    copies = [tensor for tensor in twins if tensor.module == module]
    print(f"  {copies[0].shape} of {module}: {len(copies)} times")

# %% [markdown]
# Each layer's activation appears once per batch. The fix is to build no graph where nobody calls
# `backward()`:

# %% tags=["output-repaired", "nbval-check-output"]
with torch.no_grad():
    repaired, _ = held_after_each(validate(model, batches))
report("with no_grad", repaired)

# %% [markdown]
# Without a graph nothing accumulates.
#
# **Predict.** A running average, `average = 0.9 * average + 0.1 * loss`, is connected to the graphs
# of all losses so far. How many bytes does it add per step? And how many if `backward()` is called
# with `retain_graph` set?

# %% tags=["output-average", "nbval-check-output", "exhaustive"]
def train_and_average(model, optimizer, batches, retain_graph):
    average = 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward(retain_graph=retain_graph)
        optimizer.step()
        average = 0.9 * average + 0.1 * loss
        yield average


for name, retain_graph in (("graph released", False), ("graph retained", True)):
    averaged, _ = held_after_each(train_and_average(model, optimizer, batches, retain_graph))
    report(name, averaged)

# %% [markdown]
# <details><summary>Answer</summary>
#
# None, and as many as the validation loop. After a plain `backward()` the graphs hold no saved
# tensors any more, and the average keeps only their nodes. But it keeps the nodes of every step, in
# host memory, so a very long run does leak slowly. With `retain_graph` it keeps every step's
# activations as well. `loss.detach()` has no graph to keep, so an average or a list of detached
# losses is safe in either case.
#
# </details>
#
# The loop in [exercise 2.4](exercise:2.4) has several of these bugs.
#
# ## 6. The real one: can the meter be trusted?
#
# Sections 3 and 5 and the second half of section 4 rest on the meter's readings. How does the
# [`Meter`](code:minitron.measure.meter.Meter) count? PyTorch calls its `__torch_dispatch__` for
# every operator: in the forward pass, in the backward pass and in the optimizer.

# %%
show_source(Meter.__torch_dispatch__, Meter._pack)

# %% [markdown]
# An output whose *storage*, the memory behind a tensor, was among the inputs is a view or an
# in-place result, and takes no new memory. A new storage is *tracked* through a weak reference, so
# the meter learns when it is freed without keeping it alive. And `_pack` is the hook from section
# 4: what was temporary becomes an activation when autograd saves it. (You can skip the lines about
# recomputation and resized storages: they serve chapters 3 and 6.)
#
# Is it right? Three counts of the same step: the meter, the formula, and PyTorch's own memory
# tracker. The tracker watches operators as the meter does, so it is a second implementation of the
# same method; the formula is independent of both. For the peak, it adds the weights, Adam's
# moments, the activations, and section 2's two temporaries; with one micro-batch there are no
# gradients yet.

# %%
def predict_peak(config, batch_size, sequence_length):
    """Return bytes by kind where forward turns into backward, in float32 with AdamW."""
    P = cost.num_parameters(config)
    logits = 4 * batch_size * sequence_length * config.vocab_size
    return {
        "parameter": 4 * P,
        "optimizer state": 8 * P,
        "activation": cost.activation_bytes(config, batch_size, sequence_length, 4),
        "temporary": 2 * logits,
    }


# %%
def tracked_peak(config, batch):
    """Return the peak of the second step as PyTorch's tracker counts it."""
    model, optimizer = build(config)
    train_step(model, optimizer, [batch], 1e-3, 1.0)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        train_step(model, optimizer, [batch], 1e-3, 1.0)
    return tracker.get_tracker_snapshot("peak")[cpu]["Total"]


# %% tags=["output-agreement"]
batch = random_batch(B, S)
metered = peak_of_step(config, [batch])
formula = sum(predict_peak(config, B, S).values())
tracker = tracked_peak(config, batch)

print(f"meter              {metered.total / MB:6.1f} MB")
for name, count in (("formula", formula), ("PyTorch's tracker", tracker)):
    gap = abs(count / metered.total - 1)
    print(f"{name:18} {count / MB:6.1f} MB, {gap:.2%} away")
    assert gap < 0.02

# %% [markdown]
# ## 7. Measure: by category, at scale, on a GPU
#
# The totals agree, but errors in two categories could cancel. So the figure compares them by
# category. The dashed bar uses only the model's shape and the batch.

# %% tags=["figure-agreement"]
predicted = predict_peak(config, B, S)
gap = max(abs(size / metered.bytes[kind] - 1) for kind, size in predicted.items())
show(memory_bars({"measured": metered.bytes}, {"predicted": predicted}), alt=claim(
    gap < 0.01, f"In each category, the formula is within {gap:.3%} of the measured bytes."))

# %% [markdown]
# Every dashed part is as wide as the measured one below it.
#
# ### The calculator
#
# The calculator applies the planning rule of section 3 to models far too large for your laptop. The
# figure shows Llama 3 8B with one sequence of 8,192 tokens. In a live notebook you can change it
# with sliders. The table below it has the two models of the question.
#
# **Predict.** Section 2 counted 128 GB of state, 48 GB of activations and 8 GB of temporaries.
# Estimate both totals: half the layers, and half the width. (Half the width halves the feed-forward
# and the number of heads, but not the eight key-value heads. The embedding and the output head have
# 4,096 x 128,256 parameters each.)

# %% tags=["figure-calculator"]
memory_calculator()

# %% tags=["output-halves", "nbval-check-output"]
print("GB                  state  activations  temporaries  total")
for name, layers, width in (
    ("Llama 3 8B", 32, 4096), ("half the layers", 16, 4096), ("half the width", 32, 2048)
):
    shape = dataclasses.replace(llama_8b, num_layers=layers, width=width, num_heads=width // 128,
                                ffn_width=7 * width // 2)
    parts = (cost.model_state_bytes(shape, cost.RECIPES["bf16"]),
             cost.activation_bytes(shape, 1, 8192), 2 * 4 * 8192 * shape.vocab_size)
    state, saved, temporary, total = (size / GB for size in (*parts, sum(parts)))
    print(f"{name:16} {state:8.1f} {saved:12.1f} {temporary:12.1f} {total:6.1f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# 107 and 73 GB. Both nearly halve the activations, and neither changes the temporaries, so the
# state makes the difference. Half the width halves both dimensions of five of the seven matrices of
# a block; of the key and value projections it halves only the input. Half the layers leave the
# embedding and the output head as they are.
#
# </details>
#
# ### The allocator: memory that no tensor holds
#
# On a GPU, one more layer sits between tensors and memory. Asking the driver for memory is slow, so
# PyTorch keeps freed memory and reuses it. Memory that PyTorch has taken from the driver is
# **reserved**, in [*segments*](word:segment); memory that tensors occupy is **allocated**, in
# *blocks* within segments (unrelated to a Transformer's blocks). The meter counts allocated bytes;
# `nvidia-smi` sees the reserved ones. Free memory helps a request only if one free block is large
# enough; otherwise PyTorch asks the driver for a new segment.
#
# Without a GPU we use a model: [`CachingAllocator`](code:teaching.lab.allocator) follows the rules
# and constants of PyTorch's `CUDACachingAllocator.cpp`. Two of its methods matter here. (Small and
# large requests have separate *pools* of segments; all of ours are large.)

# %%
show_source(CachingAllocator.allocate, CachingAllocator.release_free_segments)

# %% [markdown]
# Take a device with 320 MiB. A program allocates ten tensors of 30 MiB and frees every second one.
# Half of what it reserved, 150 MiB, is then free. It asks for 40 MiB. We try it twice; before the
# second try, a batch of longer sequences had allocated, and freed, five tensors of 60 MiB.
#
# **Predict.** Does the request succeed in each case?

# %%
def every_second_freed(allocator):
    blocks = [allocator.allocate(30 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)


def request(allocator, size):
    print(f"before: {allocator.picture()}")
    try:
        allocator.allocate(size)
        print(f"after:  {allocator.picture()}")
    except OutOfDeviceMemory as error:
        print(error)


# %% tags=["output-allocator", "nbval-check-output"]
print("nothing ran before (# live, . free, 10 MiB each; a segment in brackets)")
allocator = CachingAllocator(320 * MIB)
every_second_freed(allocator)
request(allocator, 40 * MIB)

print("\nafter a batch of longer sequences")
allocator = CachingAllocator(320 * MIB)
for block in [allocator.allocate(60 * MIB) for _ in range(5)]:
    allocator.free(block)
every_second_freed(allocator)
request(allocator, 40 * MIB)

# %% [markdown]
# <details><summary>Answer</summary>
#
# In the first case it succeeds. Each tensor has a segment of its own, so five segments are entirely
# free: the allocator returns them to the device and tries again. In the second case each tensor
# occupies half of a 60 MiB segment, and each free half shares its segment with a live tensor, which
# pins it. Nothing can be returned.
#
# </details>
#
# This is **fragmentation**. PyTorch's out-of-memory error then reports a large amount "reserved by
# PyTorch but unallocated". Two remedies often help: keep shapes the same in every step, so that
# each freed block fits the next request, or set `PYTORCH_ALLOC_CONF=expandable_segments:True`. An
# expandable segment consists of pages. The allocator can return a free page to the driver, even
# between live tensors, and map a new one at the end of the segment.
#
# On your GPU, `torch.cuda.max_memory_allocated()` corresponds to the meter's peak, and
# `torch.cuda.max_memory_reserved()` is the most that PyTorch has taken from the driver. To see
# every block, call `torch.cuda.memory._record_memory_history()` before the step and
# `torch.cuda.memory._dump_snapshot(path)` after it, and open the file at pytorch.org/memory_viz.
# What `nvidia-smi` shows beyond *reserved* is the CUDA context, memory that libraries such as NCCL
# take from the driver themselves, and other processes.

# %% [markdown]
# ### On real GPUs
#
# **Predict.** How many H100s does it take to hold the training state of a 70B model, at 16 bytes
# per parameter? And of a 405B model?

# %% tags=["output-devices", "nbval-check-output"]
print("bf16, one sequence  tokens     state  activations  H100s for the state  filled")
for name, shape in cost.PUBLISHED.items():
    if "Llama" in name:
        state = cost.model_state_bytes(shape, cost.RECIPES["bf16"])
        tokens = shape.max_sequence_length
        held = cost.activation_bytes(shape, 1, tokens)
        count = -(-state // int(H100.memory_bytes))
        full = state / (count * H100.memory_bytes)
        print(f"{name:18} {tokens:7,} {state / GB:6,.0f} GB {held / GB:9,.0f} GB "
              f"{count:20,} {full:7.1%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# 14 for the 70B model and 76 for the 405B model, if the state can be split evenly. But 76 GPUs
# would be 99.9 % full of it, and not even the CUDA context would fit. The number of GPUs that can
# *hold* a model's state is a lower bound, not a plan.
#
# </details>
#
# Does a GPU's allocator count the same bytes? The cell shows what `benchmarks/gpu.py` recorded
# last, on the GPU that it names, beside the prediction. The model is a Llama with 12 layers, in
# bf16, over its first two steps. The x axis counts the entries of the allocator's trace,
# so a phase that allocates often is wide. The trace has no phases, so the strip is a guess: forward
# ends at the step's maximum, backward at the minimum after it, and the rest of the step follows.

# %%
shown = recorded.two_steps()
show_text(shown.sentence)
show(shown.figure, alt=shown.alt)

# %% [markdown]
# As in section 3's skyline, `allocated` climbs while the forward pass saves activations, and falls
# during the backward pass. The spike between them is three float32 tensors of the logits' shape:
# the log-probabilities and the loss's two temporaries. At the end of step 1 the optimizer allocates
# its moments, so the peak of step 2 is higher by their size, 8 bytes per parameter. Step 2 first
# frees step 1's float32 gradients in `zero_grad`, 4 bytes per parameter, so there `allocated` falls
# before it climbs. `reserved` does not fall, because the allocator keeps the segments it has taken.
#
# `allocated` also climbs right after the backward pass, before Adam runs. Adam updates float32
# master weights, so the step first converts the gradients from bfloat16 to float32, which takes 2
# bytes more per parameter. So 18 bytes per parameter are allocated after the update, as in section
# 2's third recipe, although during the backward pass the gradients were in bfloat16, as in the
# second.
#
# A limit bounds what is *reserved*. If it lies between what step 1 reserves and what step 2
# allocates at its peak, the run completes step 1 and fails in step 2, as the output's last line
# says. (Its numbers include cuBLAS's workspaces, which the peaks above leave out.)
#
# The allocator section's two requests were recorded as well. The second fails on the GPU, as in our
# model. The first tested nothing: there was memory for one more segment.
#
# Of the published models counted above, only the smallest fits on one GPU with its activations. The
# course covers three remedies: recompute activations instead of storing them ([chapter
# 3](chapter:3)), shard the training state that GPUs with different data would replicate ([chapter
# 6](chapter:6)), and split the matrices themselves over GPUs ([chapter 7](chapter:7)).

# %% [markdown]
# ## 8. Recap
#
# 1. Training with Adam stores 16 bytes per parameter, both in float32 and in bfloat16 with a
#    float32 master copy; float32 gradients beside bfloat16 weights add to that.
# 2. Unless activations are few, the peak is where forward turns into backward. Plan with the
#    training state, the activations of one micro-batch and two float32 tensors of the logits'
#    shape, and do not trust the first step, which runs before Adam's moments exist.
# 3. What an operator's derivative needs must be saved or recomputed, so activations can be counted
#    on paper. Formula, meter and PyTorch's tracker find the same peak.
# 4. With fused attention, activations are proportional to the number of tokens; with materialized
#    attention, a second term grows with the square of the length of each sequence. The training
#    state does not depend on the batch at all.
# 5. As long as you keep a loss on which nobody calls `backward()`, all of its graph's activations
#    stay in memory. On a GPU, live tensors can split free memory into pieces too small for the next
#    request.
#
# ## Exercises
#
# Write your answers into `exercises/ch02_memory.py`, save, and run the cell. In a terminal,
# `minitron hint 2.1` gives hints in three steps.
#
# - [**2.1 Bytes before any token**](exercise:2.1) (15 minutes): a model's training state, part by
#   part, and what fits.
# - [**2.2 What a block saves**](exercise:2.2) (30 minutes): the formula of section 4, to the byte.
# - [**2.3 What is held at the peak**](exercise:2.3) (15 minutes): read a step with the meter.
# - [**2.4 The leak**](exercise:2.4) (20 minutes): repair a loop that runs out of memory after some
#   hours.

# %%
check("2.1")

# %%
check("2.2")

# %%
check("2.3")

# %%
check("2.4")

# %% [markdown]
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase, He, [ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models](https://arxiv.org/abs/1910.02054), 2020, section 3: where the memory goes, 16 bytes per
#   parameter.
# - Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022, section 4: activations per layer.
# - Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018,
#   section 3.1: the float32 master copy.
# - Dao, Fu, Ermon, Rudra, Ré, [FlashAttention](https://arxiv.org/abs/2205.14135), 2022, section 3:
#   attention without the matrix.
# - PyTorch documentation, [Understanding CUDA Memory
#   Usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html) and [CUDA
#   semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), its section on memory
#   management.
