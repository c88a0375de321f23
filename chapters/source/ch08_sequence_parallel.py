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
# # 8. Sequence parallelism: shard the replicated rest
#
# **50 minutes. No GPU. [Exercises 8.1](exercise:8.1) to 8.4, 75 minutes more.**
#
# *You need:* column- and row-parallel layers with their all-reduces ([chapter 7](chapter:7)),
# reduce-scatter and all-gather ([chapter 5](chapter:5)), and what a block saves for its backward
# pass ([chapter 3](chapter:3)).
#
# *You will be able to:*
# - **shard** norms, dropout and the residual stream over the tensor-parallel ranks, and say what
#   that does to the traffic;
# - **predict** the activations that a block saves on each rank, and what it costs to save fewer;
# - **catch** a gradient that is only a [partial sum](word:partial-sum).
#
# Run the cells in order. When the text asks you to predict something, write your guess down
# before you open the answer.

# %%
import textwrap
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from minitron import cost
from minitron.comm import differentiable
from minitron.comm.collectives import all_gather_single, all_reduce, reduce_scatter_single
from minitron.config import ModelConfig
from minitron.launch import run
from minitron.measure.ledger import Ledger, merged
from minitron.model.linear import LinearFunction, WeightGradients
from minitron.parallel.tensor.layers import TensorParallel, apply_tensor_parallel
from minitron.parallel.tensor.random_regions import OwnDropout
from minitron.parallel.tensor.sequence import SequenceParallelExchange, apply_sequence_parallel
from minitron.plan.hardware import DEVICES
from teaching.check import check
from teaching.figures import curves, memory_bars, show, wire
from teaching.lab import ch08 as lab, show_source
from teaching.widgets import sequence_explorer

torch.set_num_threads(1)
MB, GB, H100 = 1e6, 1e9, DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# Split the layers of GPT-3 over the eight GPUs of a node, as in chapter 7, and recompute attention
# in the backward pass, as in chapter 3. For one sequence of 2,048 tokens, how many bytes of
# activations does each GPU save? And how many of them are the same on all eight? (This chapter is
# about activations only. Weights and gradients alone exceed the 85.5 GB of an "80 GB" H100, as the
# last line of the output below shows; they need [chapter 9](chapter:9), too.)
#
# The cell evaluates the activation formula of the blocks for one GPU and for eight. If R bytes are
# replicated and C are sharded, one GPU saves R + C and each of eight saves R + C/8. To find R:
# 8 (R + C/8) - (R + C) = 7 R.

# %% tags=["output-question", "nbval-check-output"]
gpt3, S3 = cost.PUBLISHED["GPT-3 175B"], 2048
layer_bytes = partial(cost.activation_bytes_per_layer, gpt3, 1, S3, attention="materialized")
one, eighth = (layer_bytes(recompute="selective", layout=cost.Layout(t)) for t in (1, 8))
replicated = (8 * eighth - one) / 7
layers = gpt3.num_layers
print(f"all {layers} layers, on each of 8 GPUs: {layers * eighth / GB:.1f} GB of activations")
print(f"the same on all eight: {layers * replicated / GB:.1f} GB, {replicated / eighth:.0%} of it")
weights = 2 * cost.num_parameters(gpt3) / 8  # 16 bits each; as many bytes of gradients
print(f"weights and gradients, on each of 8 GPUs: {2 * weights / GB:.0f} GB; "
      f"an H100 has {H100.memory_bytes / GB:.1f} GB")

# %% [markdown]
# Most of what remains is replicated: all eight GPUs compute it and save it. Can they share it
# without sending more?
#
# Sections 2 to 4 find the replicated tensors and shard them by hand. Sections 5 and 6 show how
# that can go wrong and how the package does it. Section 7 measures bytes and traffic and answers
# the question for GPT-3.

# %% [markdown]
# ## 2. Estimate
#
# First we find the replicated tensors. With attention recomputed, a GPT block of width D and
# feed-forward width F = 4 D saves these for B sequences of S tokens ([Korthikanti et al.
# 2022](https://arxiv.org/abs/2205.05198), section 4.1). Values take 2 bytes, entries of a dropout
# mask 1:
#
# | saved | bytes, times B S D | sharded over t? |
# |---|---|---|
# | inputs of the two norms | 4 | ? |
# | masks of the two dropouts | 2 | ? |
# | input of query, key and value; input of up | 4 | ? |
# | query, key, value | 6 | ? |
# | input of out | 2 | ? |
# | outputs of up and of GELU | 16 | ? |
#
# **Predict.** Fill in the last column for tensor parallelism over [t](word:t) ranks. What is left
# of the sum, 34, at t = 8?
#
# <details><summary>Answer</summary>
#
# The last three rows are sharded: they are outputs of column-parallel layers or computed from them.
# The first three are not. A norm needs all D values of a token, dropout acts on the all-reduced
# output, which every rank has in full, and every rank's columns read the full input. So 34 becomes
# 10 + 24/t, which is 13 at t = 8.
#
# </details>
#
# For 1 to 32 ranks:

# %% tags=["output-estimate", "nbval-check-output"]
unit = S3 * gpt3.width
print("ranks   bytes x B S D   of these replicated   if all were sharded")
for t in (1, 2, 4, 8, 16, 32):
    held = layer_bytes(recompute="selective", layout=cost.Layout(t)) / unit
    print(f"{t:5} {held:15.1f} {replicated / unit / held:21.0%} {one / unit / t:21.1f}")

# %% [markdown]
# However many ranks there are, 10 of the 34 remain on each. These are the inputs and outputs of
# norms, and the masks of dropout. Norms, dropout and the residual addition treat every token
# separately. Splitting a norm along the width would need communication, but along the
# **sequence** the tokens are independent (section 4.2.2 of the paper).
#
# **Predict.** Suppose that each rank has only S/t of the tokens between the tensor-parallel layers.
# Its column-parallel layers still read *all* tokens. Which collective brings the others, and what
# does it cost compared with chapter 7's all-reduce?
#
# <details><summary>Answer</summary>
#
# An all-gather, at half the cost of an all-reduce. The other half pays for the reduce-scatter that
# ends the region, so the pair costs nothing extra: a ring all-reduce *is* a reduce-scatter
# followed by an all-gather (chapter 5). Between its two halves, each rank has the sum for 1/t of
# the tokens. Put dropout, addition and norm there: the reduce-scatter ends one tensor-parallel
# region (attention or feed-forward), and the all-gather begins the next.
#
# </details>

# %% [markdown]
# ## 3. Picture
#
# Splitting the tokens between the tensor-parallel layers in this way is [**sequence
# parallelism**](word:sequence-parallelism). The figure shows the forward pass of one block on two
# ranks. Gray is replicated; 0 and 1 are the ranks' shards. Find what replaces each all-reduce in
# the lower two rows.

# %% tags=["figure-lanes"]
show(lab.block_regions(with_backward=False), alt=(
    "Between the tensor-parallel layers every rank held all tokens; with sequence parallelism each "
    "holds its own, and every all-reduce has become a reduce-scatter and an all-gather, which "
    "brings the full input to attention and feed-forward."
))

# %% [markdown]
# In the lower rows, each all-reduce becomes a reduce-scatter before dropout, addition and norm,
# and an all-gather after them (the last, in the next block). ZeRO puts the optimizer between the
# halves ([chapter 6](chapter:6)).

# %% [markdown]
# ## 4. By hand
#
# To check the result and the bytes, we write the second half of a block: norm, column-parallel A,
# GELU, row-parallel B, and the addition. We write it for one device, and then twice for t ranks,
# each of which has its columns of A and its rows of B: first as in chapter 7, then with the tokens
# sharded outside the two matmuls. The table shows the largest error against one device and the
# bytes that a rank sends.

# %%
S, D, width = 12, 16, 48
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
x, gain, A, B = random(S, D), random(D), random(D, width) / 4, random(width, D) / 7


def one_device(x, gain, A, B):
    normed = F.layer_norm(x, (D,), gain)
    return x + F.gelu(normed @ A) @ B


# %%
def tensor_parallel(x, gain, A, B, group):
    normed = F.layer_norm(x, (D,), gain)  # (S, D), the same work on every rank
    out_partial = F.gelu(normed @ A) @ B  # (S, D), a partial sum
    all_reduce(out_partial, group)
    return x + out_partial


def sequence_parallel(x, gain, A, B, group):
    normed = F.layer_norm(x, (D,), gain)  # (S/t, D), this rank's tokens
    normed_full = normed.new_empty(S, D)
    all_gather_single(normed_full, normed, group)
    out_partial = F.gelu(normed_full @ A) @ B  # (S, D), a partial sum
    out = torch.empty_like(x)
    reduce_scatter_single(out, out_partial, group)
    return x + out  # (S/t, D)


# %%
def forward(group):
    """For both versions: this rank's largest error and the bytes it sent."""
    t, rank = group.size(), group.rank()
    columns, rows = A.chunk(t, 1)[rank], B.chunk(t)[rank]
    own, right = slice(rank * S // t, (rank + 1) * S // t), one_device(x, gain, A, B)
    found = []
    for layer, tokens in ((tensor_parallel, slice(None)), (sequence_parallel, own)):
        with Ledger() as ledger:
            out = layer(x[tokens], gain, columns, rows, group)
        found.append(((out - right[tokens]).abs().max(), ledger.bytes_sent()))
    return found


# %% tags=["output-byhand", "exhaustive"]
print("         tensor parallel          sequence parallel")
print("ranks     error   bytes sent       error   bytes sent")
for t in (2, 3, 4):
    pairs = [[max(column) for column in zip(*by_rank, strict=True)]
             for by_rank in zip(*run(forward, t), strict=True)]
    print(f"{t:5} " + "     ".join(f"{error:9.0e} {sent:12,}" for error, sent in pairs))

# %% [markdown]
# Both versions are right to float64 rounding, and their forward passes send the same number of
# bytes. With the tokens sharded, each rank ran the norm over 1/t of them, so the ranks share the
# work as well.
#
# ### The layout
#
# Above, x was a single sequence and tokens were dimension 0. A model has (B, S, D), but
# `all_gather_single` always concatenates along dimension 0. To see what that does, we gather names
# of tokens instead of activations: 13 is token 3 of sequence 1, both counted from 0.
#
# **Predict.** Two sequences have four tokens each, and each of two ranks contributes two tokens of
# each sequence. In which order are the names if we view what arrives as (B, S) = (2, 4)?


# %% tags=["output-layout", "nbval-check-output"]
def gathered(group, num_sequences):
    """Tokens named 10 x sequence + position: as they arrive, and joined along the sequence."""
    names = 10 * torch.arange(num_sequences)[:, None] + torch.arange(4)  # (B, S)
    own = names.chunk(group.size(), dim=1)[group.rank()].contiguous()  # (B, S/t)
    arrived = own.new_empty(group.size() * len(own), own.shape[1])
    all_gather_single(arrived, own, group)
    return arrived.view_as(names), torch.cat(arrived.chunk(group.size()), dim=1)


for num_sequences in (1, 2):
    arrived, joined = run(gathered, 2, num_sequences)[0]
    print(f"B = {num_sequences}   as they arrive {arrived.tolist()}")
    print(f"        along dim 1    {joined.tolist()}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Rank by rank: the first row holds what rank 0 contributed, two tokens of each sequence.
# The shape is right and no error is raised, but attention would mix two texts. With a single
# sequence nothing is wrong, so a test with B = 1 cannot catch it.
#
# </details>
#
# Concatenating along dimension 1 gives the right order but costs a copy. Megatron-LM stores
# activations as (S, B, D), where the sequence is dimension 0 and no copy is needed.
#
# ### Backward
#
# That was the forward pass. Training also needs the gradients.
#
# **Predict.** Each of the two collectives needs a counterpart in the backward pass. Every rank's
# columns read every token, including those of other ranks. Which collective gives each rank the
# gradients of its tokens? And what is the counterpart of the reduce-scatter?
#
# <details><summary>Answer</summary>
#
# Every rank's columns produce a partial sum of the gradient of every token, and the rank that owns
# a token needs the total: a reduce-scatter. Conversely, each rank's partial output contributed to
# every token, so its gradient needs the output gradients of all tokens: an all-gather. Each is the
# other's counterpart.
#
# </details>
#
# The next figure adds the backward pass, which runs from right to left along the lower arrows:

# %% tags=["figure-backward"]
show(lab.block_regions(with_backward=True), alt=(
    "In the backward pass the counterpart of every all-gather is a reduce-scatter, and that of "
    "every reduce-scatter is an all-gather."
))

# %% [markdown]
# In the lower two rows, each pair of purple arrows is an all-gather in one direction and a
# reduce-scatter in the other. [`minitron.comm.differentiable`](code:minitron.comm.differentiable)
# implements both pairs; you write them in exercise 8.1. The table compares the gradients of
# tokens, gain (the norm's weight), A and B with those of one device:


# %%
def gradients(group):
    """The gradients of this rank's tokens, of the gain, of its columns and of its rows."""
    t, rank = group.size(), group.rank()
    parts = x.chunk(t)[rank], gain, A.chunk(t, 1)[rank], B.chunk(t)[rank]
    own, own_gain, columns, rows = leaves = [p.clone().requires_grad_() for p in parts]
    normed = F.layer_norm(own, (D,), own_gain)
    normed_full = differentiable.all_gather(normed, group, dim=0)
    out_partial = F.gelu(normed_full @ columns) @ rows
    out = own + differentiable.reduce_scatter(out_partial, group, dim=0)
    out.square().sum().backward()
    return [leaf.grad for leaf in leaves]


# %% tags=["output-backward"]
def error(got, right):
    return f"{(got - right).abs().max() / right.abs().max():.0e}"


leaves = [tensor.clone().requires_grad_() for tensor in (x, gain, A, B)]
one_device(*leaves).square().sum().backward()
t, dims = 2, {"tokens": 0, "gain of the norm": None, "columns": 1, "rows": 0}
print("error of            rank 0   rank 1   their sum")
for (name, dim), leaf, *got in zip(dims.items(), leaves, *run(gradients, t), strict=True):
    parts = [leaf.grad] * t if dim is None else leaf.grad.chunk(t, dim)
    errors = [error(grad, part) for grad, part in zip(got, parts, strict=True)]
    total = error(sum(got), leaf.grad) if dim is None else ""
    print(f"{name:18} {errors[0]:>7}  {errors[1]:>7} {total:>11}")

# %% [markdown]
# Three of the four are right. The gradient of the gain is wrong on each rank, and only the sum
# over the ranks is right; section 5 returns to it.
#
# ### What is saved
#
# Is everything sharded now?
#
# **Predict.** Look at the matmul `normed_full @ columns`. What does it save for the backward
# pass? What remains of the 10 replicated bytes?
#
# <details><summary>Answer</summary>
#
# The gradient of the columns needs their input, `normed_full`, for all S tokens. The norms'
# inputs and the masks, 6 of the 10, are sharded now. The inputs of the columns, 4, are still
# replicated, so the block saves 30/t + 4.
#
# </details>
#
# To get to 34/t, a layer must save only this rank's tokens of its input and gather the rest again
# in the backward pass. That is a region's third all-gather; the others are those of its input in
# the forward pass and of its output's gradient. The table counts bytes in units of B S D, and
# elements in units of B S D (t-1)/t, for forward and backward pass of one block together:

# %% tags=["output-regather", "nbval-check-output"]
LAYOUTS = {
    "tensor": cost.Layout(8),
    "sequence, inputs kept": cost.Layout(8, sequence_parallel=True, regather=False),
    "sequence": cost.Layout(8, sequence_parallel=True),
}
print("                       bytes     all-  reduce-     all-   elements")
print("t = 8                  saved   reduce  scatter   gather       sent")
for name, layout in LAYOUTS.items():
    saved = layer_bytes(recompute="selective", layout=layout) / unit
    phases = cost.tensor_parallel_calls(layout).values()
    calls = [sum(phase.get(op, 0) for phase in phases)
             for op in ("all_reduce", "reduce_scatter", "all_gather")]
    sent = cost.tensor_parallel_volume(1, S3, gpt3.width, 1, 0, layout).sent / unit * 8 / 7
    print(f"{name:21} {saved:6.2f} {calls[0]:8} {calls[1]:8} {calls[2]:8} {sent:10.0f}")

# %% [markdown]
# So the answer to section 1's question, can the ranks share the rest without sending more, is yes
# for 6 of the 10 bytes. Sharding the other 4 costs a quarter more traffic: 10 instead of 8. The
# package does that by default; with `regather=False` it keeps the inputs.
#
# The paper combines the traffic of the second row (no more than before) with the memory of the
# third (34/t). It mentions the extra all-gather, which it overlaps with compute, but does not
# count it. Section 7 estimates whether compute can hide it.

# %% [markdown]
# ## 5. The trap
#
# Why was the gradient of the gain wrong in section 4? Under tensor parallelism every rank applied
# the gain to the same tokens. Now each rank applies it to its own tokens, so the gradient on a
# rank is a partial sum, and the backward pass does not add the partial sums.
#
# In the package, each parameter has a [`Placement`](code:minitron.parallel.placement.Placement):
# which part of it this rank holds, and whether its gradient is a partial sum (`is_partial`).
# `finish` runs after `backward` and adds those partial sums over the ranks. What if it is
# forgotten? And what if it averages, as data parallelism does? The next two cells build both
# mistakes.


# %%
def no_sum(model, group):
    """Sequence parallelism whose `finish` was forgotten."""
    parallel = apply_sequence_parallel(model, group)
    parallel.finish = lambda: None
    return parallel


# %%
def mean(model, group):
    """The sum, divided by the number of ranks."""
    parallel = apply_sequence_parallel(model, group)
    add_up = parallel.finish

    def finish():
        add_up()
        for name, parameter in model.named_parameters():
            if parallel.placements[name].is_partial and parameter.grad is not None:
                parameter.grad.div_(group.size())

    parallel.finish = finish
    return parallel


# %% [markdown]
# **Predict.** Two ranks train with AdamW for 60 steps, with the sum and with each mistake. Without
# the sum, does the loss fall? Do the two ranks report the same loss (the head is split along the
# vocabulary, chapter 7)? Do they have the same norm weights?

# %% tags=["output-trap", "exhaustive"]
RULES = {"sum": apply_sequence_parallel, "nothing": no_sum, "mean": mean}
trained = {name: run(lab.train, 2, apply, watch=False) for name, apply in RULES.items()}
print("gradients   loss after step           same loss on   norm weights")
print("of norms       1     20     60      both ranks?      differ by")
for name, ((losses, gains), (other_losses, other_gains)) in trained.items():
    shown = "   ".join(f"{losses[step]:.2f}" for step in (0, 19, 59))
    print(f"{name:10}  {shown} {losses == other_losses!s:>14} "
          f"{(gains - other_gains)[-1].abs().max():14.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# In this run the loss falls as in the correct one. Both ranks report the same loss in every step,
# to the last bit, because they compute it *together*: each holds half of the vocabulary, and
# all-reduced sums are the same everywhere. Yet their norm weights drift apart, so neither rank
# holds the model that produced the loss.
#
# </details>
#
# The figure shows the largest difference between the two ranks' weights of the final norm after
# each step:

# %% tags=["figure-drift", "exhaustive"]
drift = {}
for name, label in (("nothing", "nothing done"), ("sum", "summed")):
    (_, gains), (_, other_gains) = trained[name]
    drift[label] = (gains - other_gains).abs().amax(1).tolist()
show(curves(range(1, 61), drift, "step", "norm weights differ by"), alt=(
    "Without the sum the norm weights of the two ranks drift apart from the first step on, while "
    "the loss falls; with it they stay the same."
))

# %% [markdown]
# Without the sum, the ranks differ from the first step on, so converting the shards to a single
# full model would have to pick one rank's norm weights, or average them: either gives a model that
# never ran.
#
# With the mean, the ranks stay identical, and here equal losses are no accident: AdamW divides by
# the gradient's magnitude, so a constant factor cancels. The [oracle](word:oracle) compares
# gradients, so it finds both mistakes:

# %% tags=["output-oracle-trap", "exhaustive"]
for name, apply in RULES.items():
    lines = lab.verdict(apply, 2).splitlines()
    print(name, *(textwrap.fill(line, 70, subsequent_indent="  ") for line in lines), sep="\n  ")

# %% [markdown]
# It also tells them apart: without the sum the gradient differs between ranks, with the mean it is
# too small on all of them. (The oracle's Llama has two blocks and 20 trained parameter tensors. The
# four that differ are as many as its trained norms; a fifth norm is frozen.)
#
# Why a sum here, when data parallelism takes a mean? There, each rank has its own loss, and the
# batch's loss is their mean. Here all ranks share one loss, and each has a part of its gradient.
#
# The symptom has been reported for Megatron-LM: norm gradients ([issue
# 1446](https://github.com/NVIDIA/Megatron-LM/issues/1446)) and norm weights ([issue
# 474](https://github.com/NVIDIA/Megatron-LM/issues/474), closed without a cause) that differ
# between tensor-parallel ranks. One way it can happen: Megatron-LM sums the gradients of parameters
# that have the attribute `sequence_parallel`, and a version of Transformer Engine did not always
# set it on its norms ([pull request 1528](https://github.com/NVIDIA/TransformerEngine/pull/1528)).
#
# Both mistakes have been made. While sequence parallelism was written for GPT-NeoX, the hooks that
# should reduce these gradients did not seem to run at all; the fix also made them sum where they
# had averaged (pull requests [1257](https://github.com/EleutherAI/gpt-neox/pull/1257) and
# [1259](https://github.com/EleutherAI/gpt-neox/pull/1259)). There, unlike here, the loss was
# bad: it flattened near 8, and the author blamed the unsynchronized gradients. With the fix it
# still flattened, near 7.5, so they were not the only cause.
#
# **Predict.** Which other parameters of a GPT, besides the norms' weights, have gradients that are
# partial sums?
#
# To find out, two ranks run a backward pass without `finish`. The cell lists the parameters that
# both hold in full, and whose gradients nevertheless differ between the ranks:

# %% tags=["output-partial", "nbval-check-output"]
for name in lab.parameters_whose_gradients_differ(num_ranks=2):
    if not name.startswith("blocks.1"):  # block 1: these and mlp_norm.weight
        print(name)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Every parameter that is replicated and applied to a rank's own tokens: norms with their biases,
# the biases that are added after a row-parallel layer's sum, and learned positions. On each rank
# the positions' gradient is zero outside its own tokens, so the sum puts the pieces together.
# (The test model freezes block 0's `mlp_norm.weight`, but not block 1's.)
#
# </details>
#
# All of these gradients travel in one message per step. All but the positions are small; section 7
# counts them. (Dropout is another trap: see the *Further* section on it.)

# %% [markdown]
# ## 6. The real one
#
# How does the package do this? Chapter 7's tensor-parallel layers ask an `exchange` what to do
# where their region begins and ends. Sequence parallelism passes this one, whose three methods
# communicate along the sequence, dimension 1 of (B, S, D):

# %%
show_source(SequenceParallelExchange)

# %% [markdown]
# `reduce` also sums the embedding's partial outputs, and `start_gather` brings the head its input,
# so the residual stream is sharded from the first block to the final norm. The layers themselves
# are unchanged. In the backward pass of the column-parallel layers, find which transfer runs during
# which matmul (`deferral` is for chapter 9):

# %%
show_source(LinearFunction.backward, WeightGradients.start, WeightGradients.compute)

# %% [markdown]
# `second_half.start()` starts gathering the input again. While it travels, `input_gradient`
# computes the gradient of the input, for which the input itself is not needed. Then `start_reduce`
# reduce-scatters that gradient while `second_half.compute()` computes the weight gradients. These
# two transfers have a matmul to overlap with. A third does not: the all-gather of the output
# gradient (the backward pass of `reduce`) comes first, and the region's gradients all need it.
# In the forward pass both transfers are exposed, because the next operation needs their result
# (unless it is cut into chunks, chapter 7).
#
# And this is the sum from section 5. `finish` calls it with the gradients of all parameters whose
# placement is marked `is_partial`. Find the one line that communicates:

# %%
show_source(TensorParallel.sum_in_one_message)

# %% [markdown]
# It is `all_reduce(flat, self.group)`: the gradients are copied into one flat tensor, summed, and
# copied back. In a Llama with fewer key-value heads than ranks, only some ranks share a head
# (chapter 7). So the flat tensor has one slot for each head; a rank fills the slot of its own and
# leaves zeros in the others. A replicated parameter has a single slot.
#
# We run the oracle on one to four ranks, for both model families, including a Llama with fewer
# key-value heads (two) than ranks (four):

# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
few_heads = partial(lab.small_llama, num_kv_heads=2)
for name, make_model, apply, num_ranks in (
    ("GPT", lab.small_gpt, apply_sequence_parallel, 1),
    ("GPT", lab.small_gpt, apply_sequence_parallel, 3),
    ("GPT, inputs kept", lab.small_gpt, lab.keep_inputs, 2),
    ("Llama", few_heads, apply_sequence_parallel, 4),
):
    print(f"ranks: {num_ranks}  {name:22} {lab.verdict(apply, num_ranks, make_model)}")

# %% [markdown]
# All four train like one process.
#
# ## 7. Measure
#
# Are the bytes saved and sent as predicted? We run one small GPT block on four ranks, in bfloat16,
# with dropout and [materialized attention](word:materialized-attention). The [meter](word:meter)
# reads the activations after the forward pass; the [ledger](word:ledger) records forward and
# backward.
#
# On a CPU, PyTorch's dropout saves a mask as wide as the values, here 2 bytes per entry; on CUDA it
# is 1 byte. The formula in `minitron.cost` takes this width as an argument, so the table shows it
# for both, and the paper's formula, which assumes 1 byte, in the last column.

# %% tags=["output-meter", "nbval-check-output"]
t, BSD, scores = lab.RANKS, lab.B * lab.S * lab.SHAPE.width, {"selective": 0}
PAPER = dict(zip(lab.WAYS, (10 + 24 / t, 4 + 30 / t, 34 / t), strict=True))
scores["none"] = 5 * lab.SHAPE.num_heads * lab.S / (lab.SHAPE.width * t)
results = {}
print("bytes saved,                           on a CPU     CUDA's masks")
print("over B S D                       measured  formula  formula  paper")
for recompute in ("none", "selective"):
    for way in lab.WAYS:
        by_rank = run(lab.measured_block, t, way, recompute == "selective", watch=False)
        results[recompute, way] = by_rank
        columns = [by_rank[0][0], *(lab.block_formula(way, recompute, size) for size in (2, 1))]
        saved, ours, cuda = (size / BSD for size in columns)
        print(f"{recompute:10} {way:21} {saved:8.2f} {ours:8.2f} {cuda:8.2f} "
              f"{PAPER[way] + scores[recompute]:6.2f}")

# %% [markdown]
# Measurement and formula agree to within 1 %. In the paper's column, the three lower rows are 10 +
# 24/t, 4 + 30/t (not in the paper, but it follows from its list of tensors) and 34/t. The three
# upper rows add the attention scores, 5 a S/(D t), where a is the number of heads. Our formula adds
# two small terms that the paper drops: the causal mask, and the norms' statistics. CUDA keeps those
# in float32, as the formula assumes, and a CPU in 16 bits, so we measure slightly less. The figure
# shows the three lower rows; dashed bars are the formula:

# %% tags=["figure-held"]
rows = {way: {"activation": results["selective", way][0][0]} for way in lab.WAYS}
predicted = {f"{way}, formula": {"activation": lab.block_formula(way, "selective", 2)}
             for way in lab.WAYS}
tensor, keeping, full = (row["activation"] for row in rows.values())
show(memory_bars(rows, predicted), alt=(
    "A block on four ranks with selective recomputation: sequence parallelism that keeps its "
    f"inputs removes {1 - keeping / tensor:.0%} of the activations, gathering them again "
    f"{1 - full / tensor:.0%}."
))

# %% [markdown]
# On a CPU, sequence parallelism that keeps its inputs removes a third of the activations, and
# gathering them again removes half. Both shares are a little smaller on CUDA, where the masks,
# which sequence parallelism shards, are narrower:

# %% tags=["output-masks", "nbval-check-output"]
for device, size in (("a CPU", 2), ("CUDA", 1)):
    alone, kept, again = (lab.block_formula(way, "selective", size) for way in lab.WAYS)
    print(f"with the masks of {device:5}: inputs kept {1 - kept / alone:.0%}, "
          f"gathered again {1 - again / alone:.0%} less")

# %% [markdown]
# **Predict.** Now the traffic, on four ranks. Section 4 counted 8, 8 and 10 for forward and
# backward pass together. The ledger separates the passes. How does each of the three numbers divide
# between forward and backward?

# %% tags=["output-ledger", "nbval-check-output"]
for way in lab.WAYS:
    print(f"{way}\n{merged([calls for _, calls in results['none', way]])}\n")

# %% tags=["figure-wire"]
sent = {way: [sum(call.sent for call in calls) for _, calls in results["none", way]]
        for way in lab.WAYS}
show(wire(sent, {way: lab.sent_formula(way) for way in lab.WAYS}), alt=(
    "Bytes sent per rank relative to tensor parallelism: "
    + ", ".join(f"{way} {by_rank[0] / sent['tensor'][0]:.2f}" for way, by_rank in sent.items())
    + "."
))

# %% [markdown]
# All three send 4 B S D (t-1)/t elements in the forward pass. In the backward pass the first two
# send 4 such units and the third, with two more all-gathers, sends 6. So the first two bars are
# equal to the byte, the third is a quarter longer, and all end at the formula's ticks.
#
# That leaves out `finish`, which runs once per step. Tensor parallelism alone has no partial sums
# in a GPT. The other two all-reduce 6 D gradients for each block (4 D of the two norms' weights and
# biases, 2 D of the biases of out and down), and those of the final norm and the learned positions.
#
# ### On real GPUs
#
# Is the third all-gather worth it, and can it be hidden? Take GPT-3 on a node of eight H100s, with
# one sequence. The all-gather overlaps with the matmul for the gradient of the same layer's input.
# We let that matmul run at the dense peak, which is pessimistic, because it leaves the least time
# to hide anything; and each link at its full bandwidth, which is optimistic. The last column is a
# threshold: the all-gather is hidden if NVLink delivers a larger share of its bandwidth.

# %% tags=["output-hidden", "nbval-check-output"]
input_bytes = 2 * S3 * gpt3.width
print("microseconds        matmul   gather in the node   over InfiniBand   hidden above")
for name, columns in (("query, key, value", 3 * gpt3.width), ("up", gpt3.ffn_width)):
    matmul = 2 * S3 * gpt3.width * (columns // 8) / H100.bf16_flops
    gathers = [cost.ring_all_gather_seconds(input_bytes, 8, 0, link)
               for link in (H100.nvlink_bandwidth, H100.nic_bandwidth)]
    print(f"{name:17} {1e6 * matmul:8.0f} {1e6 * gathers[0]:20.0f} {1e6 * gathers[1]:17.0f} "
          f"{gathers[0] / matmul:14.0%}")
saved, again = (layer_bytes(recompute="selective", layout=LAYOUTS[name])
                for name in ("sequence, inputs kept", "sequence"))
print(f"gathering again frees {layers * (saved - again) / GB:.1f} GB "
      f"of {layers * saved / GB:.1f} GB; one gathered input has {input_bytes / MB:.0f} MB")

# %% [markdown]
# By this estimate, inside a node the all-gather takes less than half as long as the matmul, so it
# can be hidden if NVLink delivers at least 42 % of its peak. (We have not measured this on a GPU,
# where the two also compete for memory and processors.) In return, each GPU stores 8.5 GB less. Its
# peak memory falls by slightly less than that, because one gathered input at a time needs a buffer
# of 50 MB. Over InfiniBand most of the all-gather would be exposed, so tensor and sequence
# parallelism stay where the links are fast.
#
# Now we can answer section 1's question. Bytes saved are those of all blocks on each of 8 GPUs,
# with attention recomputed; elements sent are in units of B S D (t-1)/t, per block. We call a
# transfer exposed if no matmul overlaps with it in the package: those of the forward pass and, with
# sequence parallelism, the all-gathers of the output gradient (section 6). Cutting the matmuls into
# chunks, as in chapter 7's async tensor parallelism, can hide part of these, too.

# %% tags=["output-answer", "nbval-check-output"]
UNITS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
summed = (6 * layers + 2 + gpt3.max_sequence_length) * gpt3.width  # by finish
print("GPT-3, t = 8             saved   elements   of them   finish, once per step,")
print("                            GB       sent   exposed   against one micro-batch")
for name, layout in LAYOUTS.items():
    forward, backward = (sum(UNITS[op] * count for op, count in phase.items())
                         for phase in cost.tensor_parallel_calls(layout).values())
    exposed = forward + 2 * layout.sequence_parallel
    saved = layers * layer_bytes(recompute="selective", layout=layout)
    sent_by_blocks = layers * (forward + backward) * unit
    finish = 2 * summed * layout.sequence_parallel / sent_by_blocks
    print(f"{name:21} {saved / GB:8.1f} {forward + backward:10} {exposed:9} {finish:25.1%}")
print(f"finish: {6 * layers * gpt3.width / 1e6:.1f} million gradients of the blocks, "
      f"{gpt3.max_sequence_length * gpt3.width / 1e6:.1f} million of the positions")

# %% [markdown]
# The blocks send no more, and each GPU stores 18.7 GB instead of 31.4; with a quarter more traffic,
# it stores 10.3 GB, a third of 31.4. But more is exposed, 6 units instead of 4. Tensor
# parallelism's backward all-reduces can overlap with the weight gradients; when each is split in
# two, only the reduce-scatter still can. What `finish` sums are mostly gradients of the positions,
# and they add less than 1 %.
#
# What does a block save on each of 8 GPUs if we choose the recomputation as well: none, selective,
# or full?

# %% tags=["figure-gpt3"]
choices = {
    "tensor": (False, "none"), "tensor + sequence": (True, "none"),
    "tensor, selective": (False, "selective"), "tensor + sequence, selective": (True, "selective"),
    "tensor, full": (False, "full"), "tensor + sequence, full": (True, "full"),
}
per_layer = {name: layer_bytes(recompute=kind, layout=cost.Layout(8, sequence))
             for name, (sequence, kind) in choices.items()}
per_layer["tensor + sequence, fused attention"] = layer_bytes(
    attention="fused", layout=cost.Layout(8, True))
show(memory_bars({}, {name: {"activation": size} for name, size in per_layer.items()}), alt=(
    "One layer of GPT-3 on each of 8 GPUs, one sequence: neither sequence parallelism nor "
    "selective recomputation alone removes half, together they remove four fifths."
))

# %% [markdown]
# Neither sequence parallelism nor selective recomputation alone removes half of the bytes; together
# they remove four fifths. Full recomputation leaves less still, but repeats the whole forward pass.
# Today's [fused attention](word:fused-attention) kernels recompute the scores in their own backward
# pass (chapter 3): with them, "none" saves little more than 34/t under sequence parallelism (last
# row).
#
# One confusion to avoid: here, the tensor-parallel layers still read all S tokens. For very long
# sequences, [**context parallelism**](word:context-parallelism) splits the sequence in *all*
# layers; for attention, the ranks then exchange keys and values ([ring
# attention](https://arxiv.org/abs/2310.01889)) or trade tokens for heads
# ([Ulysses](https://arxiv.org/abs/2309.14509)). Some papers call that sequence parallelism, too.
#
# The widget plots the activations of all blocks against the number of ranks:

# %% tags=["figure-explorer"]
sequence_explorer()

# %% [markdown]
# On one rank the lines start in pairs: sequence parallelism has nothing to split there, so only
# recomputation makes a difference.

# %% [markdown]
# ## Further: dropout, or whose random numbers?
#
# Suppose that a training script seeds all ranks with the same number.
#
# **Predict.** Dropout acts in two regions: the heads inside attention, and the residual stream
# between the layers. In each, must the ranks draw the same mask or different ones? What does
# sequence parallelism change?
#
# The ledger cannot show a mistake (masks are not sent), nor can the oracle (it trains without
# dropout); so we compare the masks. `lab.masks` records which of 64 values each rank keeps, and the
# table compares two ranks. For its last row, `plain_dropout` replaces the package's dropout in the
# residual stream by PyTorch's:


# %%
def plain_dropout(model, group):
    """Sequence parallelism without the package's own dropout."""
    parallel = apply_sequence_parallel(model, group)
    for module in model.modules():
        if type(module) is OwnDropout:
            module.__class__ = nn.Dropout
    return parallel


# %% tags=["output-dropout", "nbval-check-output"]
print("same masks on both ranks?       heads   residual stream")
for name, apply in {"tensor parallel": apply_tensor_parallel,
                    "sequence parallel": apply_sequence_parallel,
                    "sequence, plain nn.Dropout": plain_dropout}.items():
    first, second = run(lab.masks, 2, apply)
    print(f"{name:31} " + "   ".join(
        f"{torch.equal(first[region], second[region])!s:5}" for region in ("heads", "stream")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Each rank has different heads, so their masks must always differ. What is replicated must be
# dropped identically, or it stops being replicated: under tensor parallelism, that is the residual
# stream. Under sequence parallelism each rank has different tokens of the stream, so the masks must
# differ. The "True" in the last row is the mistake: with `plain_dropout` both ranks use the same
# mask in the stream, so tokens s and s + S/t always lose the same elements. To catch this in your
# own code, compare the masks of two ranks in a test.
#
# </details>

# %% [markdown]
# ## Further: the paper's two promises
#
# The abstract of Korthikanti et al. promises that activations shrink "by 5x", and that over 90 %
# of the overhead of full recomputation disappears. We evaluate the first claim for the paper's
# four models (table 3: heads, width, layers, micro-batch; t = 8).

# %% tags=["output-5x", "nbval-check-output"]
models = {  # a, h, L, b
    "22B": (64, 6144, 48, 4), "175B": (96, 12288, 96, 1),
    "530B": (128, 20480, 105, 1), "1T": (160, 25600, 128, 1)}
print("        MB a layer   share of it with                      both")
print("        tensor       sequence  selective  both    full   shrinks")
for name, (a, h, L, b) in models.items():
    model = ModelConfig(family="gpt", vocab_size=51_200, max_sequence_length=2048, num_layers=L,
                        width=h, num_heads=a, num_kv_heads=a, ffn_width=4 * h, dropout=0.1)
    sizes = [cost.activation_bytes_per_layer(model, b, 2048, 2, "materialized", kind,
                                             layout=cost.Layout(8, sequence))
             for sequence, kind in (*choices.values(),)[:5]]
    shares = [f"{size / sizes[0]:.0%}" for size in sizes]
    print(f"{name:6} {sizes[0] / MB:11,.0f} {shares[1]:>14} {shares[2]:>10} {shares[3]:>5} "
          f"{shares[4]:>7} {sizes[0] / sizes[3]:6.1f} x")

# %% [markdown]
# The first claim holds: a factor of about 5 for the largest two models, and more for the others.
# Full recomputation stores even less, only the layer's input of 2 B S D bytes, but takes time. For
# the second claim the paper measured one layer of the 22B model on A100s (table 4). The times below
# are the paper's; the bytes are computed here.

# %% tags=["output-time", "nbval-check-output"]
milliseconds = {"tensor": 19.6, "tensor + sequence": 19.0, "tensor, selective": 20.9,
                "tensor + sequence, selective": 20.3, "tensor, full": 27.2}
model_22b = ModelConfig(
    family="gpt", vocab_size=51_200, max_sequence_length=2048, num_layers=48, width=6144,
    num_heads=64, num_kv_heads=64, ffn_width=4 * 6144, dropout=0.1,
)
for name, time in milliseconds.items():
    sequence, kind = choices[name]
    size = cost.activation_bytes_per_layer(model_22b, 4, 2048, 2, "materialized", kind,
                                           layout=cost.Layout(8, sequence))
    print(f"{name:29} {size / MB:6,.0f} MB {time:6.1f} ms {time / 19.6 - 1:+5.0%}")
full = 27.2 - 19.6  # what full recomputation adds
print(f"avoided by both: {1 - (20.3 - 19.6) / full:.0%} of what full recomputation costs; "
      f"by selective alone: {1 - (20.3 - 19.0) / full:.0%}")
print(f"({20.3 - 19.6:.1f} and {20.3 - 19.0:.1f} of {full:.1f} ms)")

# %% [markdown]
# The second claim holds, too: with both, 91 % of the overhead disappears. But part of the gain does
# not come from recomputing less: sequence parallelism by itself is slightly faster than tensor
# parallelism alone (19.0 against 19.6 ms). A likely reason is that each rank runs norms and dropout
# over only 1/t of the tokens. Selective recomputation alone adds 1.3 ms to either block
# (20.9 - 19.6, 20.3 - 19.0), full recomputation 7.6 ms to the tensor-parallel one: 83 % is avoided.

# %% [markdown]
# ## 8. Recap
#
# In 1 to 3, bytes saved are in units of B S D and elements sent in units of B S D (t-1)/t, for one
# block, forward and backward, with attention recomputed.
#
# 1. Tensor parallelism leaves norms, dropout and the residual stream replicated: of the 34 bytes
#    that a block saves, 10 + 24/t remain on each rank.
# 2. An all-reduce is a reduce-scatter followed by an all-gather. With the norm between the two,
#    each rank holds only its own tokens there. If the ranks keep the gathered inputs, they save
#    30/t + 4 and send no more than before: 8, and once per step the sums of `finish`.
# 3. Saving only 34/t, the package's default, takes a third all-gather per region, of its input in
#    the backward pass: 10 instead of 8. It overlaps with a matmul; that of the output gradient
#    does not.
# 4. Each rank applies the replicated parameters to its own tokens only, so their gradients are
#    partial sums and must be added once per step. In our run without the sum, the loss fell as in
#    the correct one; the ranks reported the same loss because the head is split along the
#    vocabulary.
# 5. With selective recomputation as well, a block of GPT-3 saves less than a fifth of the
#    activations that it saves under tensor parallelism alone.
#
# ## Exercises
#
# Write your answers into `exercises/ch08_sequence_parallel.py`, save, and run the cell. In a
# terminal, `minitron hint 8.1` gives hints in three steps.
#
# - [**8.1 Gather and scatter**](exercise:8.1) (20 minutes): the two collectives along the
#   sequence, each the other's backward pass.
# - [**8.2 Gradients of other tokens**](exercise:8.2) (15 minutes): sum the partial gradients, and
#   nothing else, in one message.
# - [**8.3 What a rank saves**](exercise:8.3) (20 minutes): the activation formula for every
#   combination.
# - [**8.4 Gather it again**](exercise:8.4) (20 minutes): a layer that saves only its own tokens.

# %%
check("8.1")

# %%
check("8.2")

# %%
check("8.3")

# %%
check("8.4")

# %% [markdown]
# ## Further reading
#
# - Korthikanti et al., [*Reducing Activation Recomputation in Large Transformer
#   Models*](https://arxiv.org/abs/2205.05198), 2022: section 4.2.2 (sequence parallelism), table
#   2 (the formulas), section 6.1 (memory).
# - Shoeybi et al., [*Megatron-LM*](https://arxiv.org/abs/1909.08053), 2019, section 3: the
#   tensor-parallel layers.
# - Narayanan et al., [*Efficient Large-Scale Language Model Training on GPU
#   Clusters*](https://arxiv.org/abs/2104.04473), 2021, section 3.2: the volume.
# - Liu, Zaharia, Abbeel, [*Ring Attention*](https://arxiv.org/abs/2310.01889), 2023, and Jacobs
#   et al., [*DeepSpeed Ulysses*](https://arxiv.org/abs/2309.14509), 2023: context
#   parallelism.
