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
# # Memory: what a training step holds, and when
#
# **45 minutes. No GPU. Exercises 2.1 to 2.4.**
#
# *You need:* chapter 1's three parts of a step (forward, backward, optimizer), and a model that
# once ran out of memory on you.
#
# *You will be able to:*
# - **account** for every byte of a step: which tensor, held by whom, from when to when;
# - **predict** the peak from the model's shape, before you rent the device;
# - **find** a leak with an instrument, instead of guessing at it.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import dataclasses
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minitron import cost
from minitron.config import ModelConfig, TrainConfig
from teaching.check import check
from teaching.figures import Held, curves, holdings, memory_bars, show, skyline
from teaching.widgets import memory_calculator

# %%
from minitron.measure.meter import Meter
from minitron.model.transformer import (
    FeedForward, Transformer, fused_attention, initialize, materialized_attention,
)
from minitron.step import make_optimizer, train_step

torch.set_num_threads(1)
cpu = torch.device("cpu")
MB, GB = 1e6, 1e9

# %% [markdown]
# ## 1. The question
#
# Chapter 1 ended with Llama 3 8B and years of computing on one H100. There is an obstacle before
# that one. The weights in bfloat16 fill a fifth of the H100's 80 GB, and the model answers
# questions there without trouble. Then you call `optimizer.step()`.

# %% tags=["figure-question"]
llama_8b = ModelConfig(
    vocab_size=128_256, num_layers=32, width=4096, num_heads=32, num_kv_heads=8,
    ffn_width=14_336, max_sequence_length=8192, tied_embedding=False,
)
N, recipe = cost.num_parameters(llama_8b), cost.RECIPES["bf16"]
training = {
    "parameter": recipe.parameter * N,
    "gradient": recipe.gradient * N,
    "optimizer state": (recipe.master + recipe.optimizer_state) * N,
}
show(memory_bars(
    {}, {"answering": {"parameter": 2 * N}, "training": training}, limit=80 * GB,
    limit_label="beyond an H100's 80 GB",
), alt="The weights fit on the device with room to spare; with training's state they do not.")

# %% tags=["nbval-check-output"]
print(f"{N:,} parameters")
print(f"weights in bfloat16  {2 * N / GB:6.1f} GB")
print(f"state of training    {cost.model_state_bytes(llama_8b, recipe) / GB:6.1f} GB")

# %% [markdown]
# 128 GB, and not one token has been read. Activations come on top. This chapter finds out where
# each byte is, first on paper, then with an instrument, on a model that fits on your laptop. The
# bytes follow the same rules there.

# %% [markdown]
# ## 2. Estimate
#
# Four things belong to each parameter: the weight that the forward pass reads, its gradient, Adam's
# two running averages, and, when the weight is kept in 16 bits, a 32-bit *master* copy that the
# optimizer updates. Why a copy? A weight of 1.0 gets an update of 0.001:

# %% tags=["nbval-check-output"]
weight = torch.tensor(1.0, dtype=torch.bfloat16)
print(f"1.0 + 0.001 in bfloat16 is {(weight + 0.001).item()}, the next number above 1.0 is "
      f"{1 + torch.finfo(torch.bfloat16).eps}")

# %% [markdown]
# Every small step would be rounded away. In the float32 copy they add up.
#
# **Predict.** You change from float32 to bfloat16, which has half the bytes. By how much does this
# memory fall?
#
# <details><summary>Answer</summary>
#
# Not at all. Weight and gradient shrink from 8 bytes to 4, and the master copy adds 4. What gets
# smaller are the activations, and what gets faster are the matrix products. If gradients are added
# up in 32 bits, which long accumulations want, the recipe is even larger than plain float32.
#
# </details>

# %% tags=["output-recipes", "nbval-check-output"]
print("bytes per parameter   weight gradient master Adam   sum  8B model")
for name, recipe in cost.RECIPES.items():
    gigabytes = cost.model_state_bytes(llama_8b, recipe) / GB
    print(f"{name:21} {recipe.parameter:6} {recipe.gradient:8} {recipe.master:6} "
          f"{recipe.optimizer_state:4} {recipe.total:5} {gigabytes:6.0f} GB")

# %% [markdown]
# The rows are the recipes in use: the second one is the count of the ZeRO paper (Rajbhandari et al.
# 2020, section 3.1), 16 bytes per parameter. None of it depends on the batch.
#
# The rest does. To compute gradients, the backward pass needs values from the forward pass: the
# input of each matrix product, the input of each nonlinearity. These **activations** are kept from
# the moment they are made until backward has used them. `minitron.cost` counts them operator by
# operator; here for one sequence:

# %% tags=["output-activations", "nbval-check-output"]
for attention in ("fused", "materialized"):
    held = cost.activation_bytes(llama_8b, batch_size=1, sequence_length=8192, attention=attention)
    print(f"activations of one sequence of 8,192 tokens, {attention:12} attention "
          f"{held / GB:6.0f} GB")

# %% [markdown]
# *Materialized* attention writes the S x S matrix of scores to memory, as the formula in the paper
# does. The *fused* kernel computes it in tiles and never stores it (Dao et al. 2022). We take the
# fused one unless we say otherwise, and come back to the difference.

# %% [markdown]
# ## 3. Picture: two steps, byte by byte
#
# A model of 12 layers, small enough for any laptop, in float32. The **meter** watches two training
# steps. It sees every operator, counts every new tensor until it dies, and sorts the bytes by who
# needs them.
#
# **Predict.** Draw the bytes alive over two steps. Where is the peak: in the forward pass, in the
# backward pass, or in the optimizer? Are both steps alike?

# %%
config = ModelConfig(
    family="gpt", vocab_size=256, num_layers=12, width=96, num_heads=4, num_kv_heads=4,
    ffn_width=384, max_sequence_length=512,
)
B, S = 8, 128  # sequences, tokens each


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
with Meter(model, optimizer) as meter:
    for _ in range(2):
        train_step(model, optimizer, [random_batch(B, S)], rate=1e-3, clip_norm=1.0)

show(skyline(meter.timeline, meter.peak), alt=(
    "Activations pile up in forward and melt in backward; the second step starts higher, because "
    "the optimizer's state has come to stay."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The peak is where forward turns into backward: every activation is there and none has been used.
# From there on each layer's activations are freed as its gradients appear. The optimizer's state
# does not exist before the first `optimizer.step()`: Adam makes its averages when it first sees a
# gradient. So the second step carries them through its whole length, and the first does not.
#
# </details>
#
# That explains a sight from the field: a run does its first step, prints a loss, and dies in the
# second. Say the device had this much memory, and no more:

# %% tags=["output-second"]
starts = [i for i, moment in enumerate(meter.timeline)
          if moment.phase == "forward" and (i == 0 or meter.timeline[i - 1].phase == "optimizer")]
first, second = (
    max(moment.total for moment in steps)
    for steps in (meter.timeline[: starts[1]], meter.timeline[starts[1] :])
)
device = 90 * MB
for name, peak in (("first", first), ("second", second)):
    verdict = "fits" if peak <= device else "out of memory"
    print(f"{name:6} step: peak {peak / MB:5.1f} MB of {device / MB:.0f} MB: {verdict}")

# %% [markdown]
# Never judge by one step whether a model fits. The same by hand, read after each part of a step:

# %%
def loss_of(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def step_by_hand(model, optimizer, read):
    loss = loss_of(model, random_batch(B, S))
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
    for step in (1, 2):
        step_by_hand(model, optimizer, lambda part, step=step: held.update(
            {f"after {part} {step}": meter.now()}))

kinds = ("parameter", "gradient", "optimizer state", "activation")
most = {kind: max(row[kind] for row in held.values()) for kind in kinds}
rows = {name: {kind: Held(row[kind], row[kind] / most[kind]) for kind in kinds}
        for name, row in held.items()}
show(holdings(rows), alt=(
    "Parameters are always held, gradients from backward to the next step, optimizer state from "
    "the first update on, activations from forward to backward."
))

# %% [markdown]
# **Predict.** At the peak there are no gradients yet. With accumulation, chapter 1's remedy for a
# large batch, a step has two or more micro-batches. What does that change at the peak?

# %% tags=["output-accumulation"]
def peak_of_step(config, batches):
    """The peak of the second step, for which the state exists."""
    model, optimizer = build(config)
    train_step(model, optimizer, batches, 1e-3, 1.0)
    with Meter(model, optimizer) as meter:
        train_step(model, optimizer, batches, 1e-3, 1.0)
    return meter.peak


for count in (1, 2, 4):
    peak = peak_of_step(config, [random_batch(B, S)] * count)
    print(f"micro-batches {count}: peak {peak.total / MB:6.1f} MB in {peak.phase}, "
          f"gradients {peak.bytes['gradient'] / MB:.1f} MB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The second micro-batch's forward pass runs while the first one's gradients are held: parameters,
# gradients, optimizer state and activations are all there at once. More micro-batches add nothing.
# That is the rule to plan with: **the full recipe plus the activations of one micro-batch**.
#
# </details>
#
# That is an upper bound. What if there are hardly any activations?

# %% tags=["output-short"]
peak = peak_of_step(config, [random_batch(1, 8)])
print(f"one sequence of 8 tokens: peak {peak.total / MB:.1f} MB in {peak.phase}, "
      f"gradients {peak.bytes['gradient'] / MB:.1f} MB")

# %% [markdown]
# Then the peak is the end of the backward pass or the optimizer, where gradients and state meet.

# %% [markdown]
# ## 4. By hand: what does backward need?
#
# Autograd tells you, if you ask. A pair of hooks is called with each tensor that an operator saves.
# Take one feed-forward: up to width F, GELU, down to width D.
#
# **Predict.** Which tensors are saved, and how large is each, for an input of shape (B, S, D)?
#
# <details><summary>Answer</summary>
#
# `up` needs its input for its weight's gradient: B S D values. GELU needs its input, to know its
# slope: B S F. `down` needs its input, GELU's output: B S F. Both products also save their weights,
# which are in memory anyway. What `down` returns is not needed by anyone here.
#
# </details>

# %%
def saved_by(function, *inputs, owned=()):
    """The tensors that autograd saves while `function` runs, without those in `owned`."""
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
# The guess is exact, because nothing here is a matter of taste: an operator's derivative says what
# it needs. Do this for a whole GPT block, with materialized attention and dropout, in 16 bits, and
# you get the formula of Korthikanti et al. (2022, section 4.1), with their names for our S, B, D
# and H:
#
# $$ s\,b\,h\left(34 + 5\,\frac{a\,s}{h}\right) \text{ bytes per layer} $$
#
# The first term grows with the number of tokens. The second one has the square of the sequence
# length in it. Exercise 2.2 derives both.

# %% tags=["output-paper", "nbval-check-output"]
gpt_block = dataclasses.replace(llama_8b, family="gpt", num_kv_heads=32, ffn_width=4 * 4096,
                                dropout=0.1, num_layers=1)
s, b, h, a = 2048, 1, 4096, 32
paper = s * b * h * (34 + 5 * a * s / h)
ours = cost.activation_bytes_per_layer(gpt_block, b, s, attention="materialized")
print(f"paper {paper:13,.0f} bytes per layer")
print(f"cost  {ours:13,} bytes per layer, {ours / paper - 1:+.1%}")

# %% [markdown]
# The difference is what the paper leaves out as small: the statistics of the norms, and the causal
# mask.
#
# ### What grows, and how fast?
#
# **Predict.** Double one thing at a time: the batch, the sequence, the width, the depth. By which
# factor do the activations grow? And the state?

# %%
def activations(config, batch_size, sequence_length, attention=fused_attention):
    """Measured bytes that forward leaves for backward."""
    model, _ = build(config)
    for block in model.blocks:
        block.attention.attention_fn = attention
    with Meter(model) as meter:
        loss = loss_of(model, random_batch(batch_size, sequence_length))
        held = meter.now()["activation"]
    del loss  # it kept the graph until here
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
# With the fused kernel activations are linear in everything; what depends neither on width nor on
# depth (the loss over the vocabulary, say) keeps some factors below 2. The state does not care for
# tokens, and grows with the square of the width. So a wide model with a short batch is all state,
# and a small model with long sequences is all activations. They need different remedies.
#
# </details>
#
# Now the sequence alone, with the number of tokens held fixed: twice the length, half the batch.
#
# **Predict.** Which of the two attentions notices?

# %% tags=["figure-sequence"]
lengths = [32, 64, 128, 256, 512]
measured, predicted = {}, {}
for name, function in (("fused", fused_attention), ("materialized", materialized_attention)):
    batches = [2048 // length for length in lengths]
    measured[name] = [activations(config, b, s, function) / MB
                      for b, s in zip(batches, lengths, strict=True)]
    predicted[f"{name}, formula"] = [
        cost.activation_bytes(config, b, s, 4, attention=name) / MB
        for b, s in zip(batches, lengths, strict=True)
    ]
show(curves(lengths, measured, "sequence length, at 2,048 tokens in all", "activations (MB)",
            predicted), alt=(
    "At a fixed number of tokens the fused kernel's activations stay flat, the others' climb."
))

# %% [markdown]
# The fused kernel does not: it keeps its inputs, its output, and one number per row of scores. The
# other one keeps the square. This is why long contexts became affordable, and the flat line is why
# one may say that a modern block's activations depend on the number of tokens alone.

# %% [markdown]
# ## 5. The trap: a number that holds a graph
#
# Two pieces of code, both from real training loops. The first keeps the loss of each training
# step, to plot it later. The second averages the loss over the validation data. Each has
# been called a memory leak.

# %%
def train_and_keep(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
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
# **Predict.** For each: how many bytes more are held after every further batch?

# %%
model, optimizer = build(config)
train_step(model, optimizer, [random_batch(B, S)], 1e-3, 1.0)  # Adam's state is there
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
# The training loop leaks 4 bytes per step, the loss itself: `backward()` has used the saved tensors
# and let them go, although the graph's nodes are still there. The validation loop never calls
# `backward()`. Each `total` holds the graph of its batch and of all batches before it, with all
# their activations. Nothing about the number is wrong, so nobody looks here.
#
# </details>
#
# Folklore accuses the first loop, so that is where people search. The meter's snapshot names the
# second one. It lists every tensor alive at the peak, with the module that made it:

# %% tags=["output-leak", "nbval-check-output"]
largest = leak.peak.tensors[0].bytes
twins = [tensor for tensor in leak.peak.tensors if tensor.bytes == largest]
print(f"{len(twins)} activations of {largest:,} bytes each, among them")
for module in ("blocks.0.mlp.up", "blocks.11.mlp.up"):
    copies = [tensor for tensor in twins if tensor.module == module]
    print(f"  {copies[0].shape} of {module}: {len(copies)} times")

# %% [markdown]
# One layer's activation, once for each batch. In a healthy step it is there once. The repair is to
# build no graph where nobody calls `backward()`:

# %% tags=["output-repaired", "nbval-check-output"]
with torch.no_grad():
    repaired, _ = held_after_each(validate(model, batches))
report("with no_grad", repaired)

# %% [markdown]
# The same happens with a running average, `average = 0.9 * average + 0.1 * loss`, also in training:
# the average holds the graphs of all losses. `loss.detach()` ends it. Exercise 2.4 has a loop with
# several of these.

# %% [markdown]
# ## 6. The real one
#
# How does the meter know? PyTorch calls it for every operator, in forward, in backward, and in the
# optimizer.

# %%
print(inspect.getsource(Meter.__torch_dispatch__))

# %%
print(inspect.getsource(Meter._pack))

# %% [markdown]
# Three things to see. A tensor whose storage was among the inputs is a view, or was changed in
# place: nothing new. What is new is *tracked*, through a weak reference, so the meter notices its
# death without keeping it alive. And `_pack` is the hook of section 4: whatever autograd saves is
# marked, and counts as activation instead of temporary.
#
# Is it right? Three counts that know nothing of one another: the meter, the formula, and PyTorch's
# own memory tracker, on the model of 12 layers, in the second step. The formula for its peak: the
# weights, Adam's averages, the activations, and the gradient of the logits twice, once as it enters
# the softmax's backward and once as it leaves.

# %%
def predict_peak(config, batch_size, sequence_length):
    """Bytes by kind where forward turns into backward, in float32 with AdamW."""
    N = cost.num_parameters(config)
    logits = 4 * batch_size * sequence_length * config.vocab_size
    return {
        "parameter": 4 * N,
        "optimizer state": 8 * N,
        "activation": cost.activation_bytes(config, batch_size, sequence_length, 4),
        "temporary": 2 * logits,
    }


# %%
from torch.distributed._tools.mem_tracker import MemTracker


def tracked_peak(config, batch):
    """What PyTorch's own tracker sees at the peak of the second step."""
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
# ## 7. Measure
#
# The same comparison by kind. The dashed bar was known before anything ran.

# %% tags=["figure-agreement"]
show(memory_bars({"measured": metered.bytes}, {"predicted": predict_peak(config, B, S)}), alt=(
    "Kind by kind, the peak is what the formula said before the step ran."
))

# %% [markdown]
# ### The calculator
#
# Since the formula holds, it can be asked about models that fit nowhere near your laptop. The
# figure is for a model in the proportions of Llama 3. In a live notebook it has sliders.
#
# **Predict.** Which shrinks the total more at the default: half the layers, or half the width?

# %% tags=["figure-calculator"]
memory_calculator()

# %% [markdown]
# <details><summary>Answer</summary>
#
# Half the width: the matrices have two sides. Half the layers halves the blocks and leaves the
# embedding and the head, which at a vocabulary of 128,256 are not small.
#
# </details>

# %% [markdown]
# ### The allocator: bytes that nobody holds
#
# On a GPU one more layer sits between tensors and memory. Asking the driver for memory is slow, so
# PyTorch keeps what was freed and hands it out again. `nvidia-smi` therefore shows what PyTorch has
# **reserved**; the meter counts what is **allocated**. The difference can be large: a free block
# helps only if it is long enough.
#
# You have no GPU here, so this is a simulation, not a measurement: the allocator's rules, as
# PyTorch's `CUDACachingAllocator.cpp` states them, in a few lines. Sizes are rounded up to 512
# bytes. Small blocks (up to 1 MiB) are cut from segments of 2 MiB, larger ones from segments of 20
# MiB, and from 10 MiB on a segment is made to measure. The smallest free block that fits is taken.

# %%
MIB = 2**20


def round_up(size, multiple):
    return -(-size // multiple) * multiple


def segment_bytes(size):
    """How much the driver is asked for when no free block fits `size` bytes."""
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else round_up(size, 2 * MIB)


# %%
@dataclass(eq=False)
class Cell:
    size: int
    used: bool = False


def take(pool, asked):
    """Hand out a block from `pool`, a list of segments, each a list of cells in address order."""
    size = round_up(asked, 512)
    fitting = [(cell.size, i, j) for i, segment in enumerate(pool)
               for j, cell in enumerate(segment) if not cell.used and cell.size >= size]
    if not fitting:
        pool.append([Cell(segment_bytes(size))])
        return take(pool, asked)
    return cut(pool, size, *min(fitting)[1:])


# %%
def cut(pool, size, i, j):
    """Use the first `size` bytes of a cell; a rest worth keeping becomes a free cell."""
    cell = pool[i][j]
    cell.used = True
    rest = cell.size - size
    if rest >= (512 if size <= MIB else MIB + 1):
        cell.size = size
        pool[i].insert(j + 1, Cell(rest))
    return cell


# %%
def give_back(pool, cell):
    """Free a cell and join it with free neighbors of its segment."""
    cell.used = False
    for segment in pool:
        joined = []
        for cell in segment:
            if joined and not joined[-1].used and not cell.used:
                joined[-1].size += cell.size
            else:
                joined.append(cell)
        segment[:] = joined


# %%
def mebibytes(pool):
    """Allocated, reserved, and the longest free cell."""
    cells = [cell for segment in pool for cell in segment]
    used, free = ([c.size for c in cells if c.used is state] for state in (True, False))
    return sum(used) // MIB, (sum(used) + sum(free)) // MIB, max(free, default=0) // MIB


# %% [markdown]
# A model works on sequences of 30 MiB activations. Then every second of them is freed, and a longer
# sequence comes, which needs 40 MiB.
#
# **Predict.** Ten tensors of 30 MiB, five freed: 150 MiB are free. Does a tensor of 40 MiB fit?

# %% tags=["output-allocator", "nbval-check-output"]
def state_of(event, pool):
    allocated, reserved, largest = mebibytes(pool)
    print(f"{event:22} allocated {allocated}, reserved {reserved}, longest free {largest:2}")


pool = []  # all numbers in MiB
cells = [take(pool, 30 * MIB) for _ in range(10)]
state_of("10 tensors of 30 MiB", pool)
for cell in cells[::2]:
    give_back(pool, cell)
state_of("every second one freed", pool)
take(pool, 40 * MIB)
state_of("one tensor of 40 MiB", pool)

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. The free bytes lie in five pieces, and none is 40 MiB long. The allocator reserves more, while
# 150 MiB of what it has stay unused. This is **fragmentation**, and on a full GPU that last line is
# the out-of-memory error that reports plenty of "reserved but unallocated" memory.
#
# </details>
#
# Two remedies. Let shapes be the same in every step, so that each freed block fits its successor.
# Or set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, which maps memory in small pages into
# one long segment, so that free neighbors join. On your GPU, four calls tell the story:
# `torch.cuda.max_memory_allocated()` is what the meter predicts, `torch.cuda.max_memory_reserved()`
# is what the device gives up, `torch.cuda.memory._record_memory_history()` before the step and
# `torch.cuda.memory._dump_snapshot(path)` after it draw every block at pytorch.org/memory_viz.
# What `nvidia-smi` shows beyond *reserved* is the CUDA context and the libraries' own workspaces.

# %% [markdown]
# ### On real GPUs
#
# The same functions, with the shapes of published models and an H100's 80 GB.
#
# **Predict.** How many H100s hold the state of a 70B model, at 16 bytes per parameter? And of 405B?

# %% tags=["output-models", "nbval-check-output"]
models = {name: shape for name, shape in cost.PUBLISHED.items() if "Llama" in name}
states = cost.model_state_table(models)
print("state in GB           " + "".join(f"{name:>16}" for name in models))
for recipe in cost.RECIPES:
    row = "".join(f"{states[name][recipe] / GB:16,.0f}" for name in models)
    print(f"{recipe:22}{row}")

# %% tags=["output-devices", "nbval-check-output"]
print("bf16, 8,192 tokens     state   activations   H100s for the state")
for name, shape in models.items():
    state = cost.model_state_bytes(shape, cost.RECIPES["bf16"])
    held = cost.activation_bytes(shape, 1, 8192)
    print(f"{name:18} {state / GB:6,.0f} GB {held / GB:10,.0f} GB {-(-state // int(80 * GB)):21,}")

# %% [markdown]
# Only the first model leaves room on one device. There are three ways out, and the course takes
# them in turn. The activations can be computed again instead of kept: chapter 3. The state is the
# same on every device that works on another part of the batch, so it can be cut instead of copied.
# And the matrices themselves can be cut.

# %% [markdown]
# ## 8. Recap
#
# 1. Training with Adam holds 16 bytes per parameter, in float32 and in bfloat16 with a float32
#    master copy alike; a 32-bit gradient adds to it.
# 2. Unless activations are few, the peak comes where forward turns into backward. Plan with the
#    full recipe plus the activations of one micro-batch, and never judge by the first step: it has
#    no optimizer state.
# 3. What an operator saves follows from its derivative, so activations can be counted on paper, and
#    paper, meter and PyTorch's tracker agree within 2 %.
# 4. With a fused attention kernel, activations grow with the tokens; with a materialized one, with
#    the sequence length squared. The state does not depend on either.
# 5. A number that still has its graph holds every activation of that graph; what is reserved on a
#    GPU is more than what is allocated, because free bytes may lie in pieces.
#
# ## Exercises
#
# Write your answers into `exercises/ch02_memory.py`, save, and run the cell. In a terminal,
# `minitron hint 2.1` gives hints in three steps.
#
# **2.1 Bytes before any token** (15 minutes): a model's state, part by part, and what fits.

# %%
check("2.1")

# %% [markdown]
# **2.2 What a block saves** (30 minutes): the formula of section 4, to the byte.

# %%
check("2.2")

# %% [markdown]
# **2.3 Who is there at the peak** (15 minutes): read a step with the meter.

# %%
check("2.3")

# %% [markdown]
# **2.4 The leak** (20 minutes): a loop that dies after some hours, to be repaired.

# %%
check("2.4")

# %% [markdown]
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase, He, *ZeRO: Memory Optimizations Toward Training Trillion Parameter
#   Models*, 2020, section 3: where the memory goes, 16 bytes per parameter.
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   section 4: activations per layer, counted.
# - Micikevicius et al., *Mixed Precision Training*, 2018, section 3.1: the float32 master copy.
# - Dao, Fu, Ermon, Rudra, Ré, *FlashAttention*, 2022, section 3: attention without the matrix.
# - PyTorch documentation, *Understanding CUDA Memory Usage*, and *CUDA semantics*, its section on
#   memory management.
