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
# # 7. Tensor parallelism: split the layer itself
#
# **50 minutes. No GPU. [Exercises 7.1](exercise:7.1) to 7.4.**
#
# *You need:* activations ([chapter 2](chapter:2)), what an all-reduce sends ([chapter
# 5](chapter:5)), ZeRO-3 ([chapter 6](chapter:6)), and multi-head attention.
#
# *You will be able to:*
# - **split** a matmul in two ways, and combine two matmuls so that one all-reduce completes both;
# - **predict** what a rank holds, what it sends (to the byte), and when the network cancels the
#   speedup;
# - **catch** mistakes in these layers that a falling loss does not reveal.
#
# *The way there:*
# - **Sections 1 to 3:** where data parallelism ends, and how to split a matmul;
# - **Sections 4 and 5:** layers split by hand, and two bugs in them;
# - **Sections 6 and 7:** the package's version, its bytes and its speed.
#
# Run the cells in order. When the text asks you to predict something, write your guess down
# before you open the answer.

# %%
from dataclasses import replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minitron import cost
from minitron.comm.differentiable import start_all_gather, start_all_reduce
from minitron.launch import run
from minitron.measure.ledger import Ledger, merged
from minitron.measure.meter import Meter
from minitron.model.linear import LinearFunction
from minitron.parallel.tensor.cuts import PLAN
from minitron.parallel.tensor.layers import (
    AllReduceExchange, RowParallelLinear, TensorParallel, apply_tensor_parallel,
)
from minitron.parallel.tensor.vocabulary import vocabulary_parallel_cross_entropy
from minitron.plan.hardware import DEVICES
from teaching.check import check
from teaching.claims import claim
from teaching.figures import memory_bars, show, timeline, wire
from teaching.lab import ch07 as lab, show_source
from teaching.widgets import tensor_explorer

torch.set_num_threads(1)
GB, MB, H100 = 1e9, 1e6, DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# GPT-3 has 96 layers, 175 billion parameters, and sequences of 2,048 tokens ([Brown et al.
# 2020](https://arxiv.org/abs/2005.14165), table 2.1). ZeRO-3 [shards](word:shard) its training
# state over 1,024 GPUs. Unsharded layers, their gradients, and most activations are in bfloat16, 2
# bytes per number. Each GPU reads one sequence, the least that it can read. Does it fit?

# %% tags=["output-question", "nbval-check-output"]
gpt3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200)  # from 50,257, see section 3
S_gpt3, L_gpt3, D_gpt3 = gpt3.max_sequence_length, gpt3.num_layers, gpt3.width
layer_bytes = 2 * cost.num_block_parameters(gpt3)  # bfloat16
parts = {
    "training state, a 1,024th": cost.zero_bytes(cost.num_parameters(gpt3), 1024, 3),
    "two unsharded layers and their gradients": 2 * (layer_bytes + layer_bytes),
    "activations of one sequence": cost.activation_bytes(gpt3, 1, S_gpt3),
}
for name, size in (parts | {"together": sum(parts.values())}).items():
    print(f"{name:42} {size / GB:6.1f} GB")
print(f"an H100 has {H100.memory_bytes / GB:.1f} GB")
print(f"sequences in a step of 3.2 million tokens: {3_200_000 // S_gpt3:,}")

# %% [markdown]
# It does not. ZeRO-3 keeps two layers unsharded at a time: the one that is computing and the next
# one, which is being prefetched. In the backward pass it also holds the gradients of two: of the
# layer that is computing, and of the one just finished, whose gradients are being reduce-scattered.
# These layers, their gradients, and the activations take as much memory on a million GPUs as on
# 1,024. Recomputation shrinks the activations at the cost of a third more compute ([chapter
# 3](chapter:3)), but a second wall is close. A training step of GPT-3 read 3.2 million tokens
# (Brown et al. 2020, table 2.1), which is 1,562 sequences, so at most that many GPUs have anything
# to read.
#
# One way past both walls is to let several GPUs compute one layer of one sequence *together*. This
# is [**tensor parallelism**](word:tensor-parallelism).

# %% [markdown]
# ## 2. Estimate
#
# What would it save? Suppose [t](word:t) ranks share the work of every layer equally.
#
# **Predict.** With t = 8, by what factor do a rank's parameters and matmuls shrink, at best? What
# must the ranks send each other that data parallelism never sends?

# %% tags=["output-estimate", "nbval-check-output"]
one, two = (cost.training_flops_per_token(replace(gpt3, num_layers=L), S_gpt3) for L in (1, 2))
block_flops = S_gpt3 * (two - one)  # forward and backward pass of one sequence
print("     whole model      one block, one sequence")
print("t     parameters      matmuls     activations  (/ BSD, 10 + 24/t)        sent")
for t in (1, 2, 4, 8):
    layout = cost.Layout(tensor_parallel=t)
    parameters = 2 * cost.tensor_parallel_parameters(gpt3, t)
    activations = cost.activation_bytes_per_layer(gpt3, 1, S_gpt3, layout=layout)
    sent = cost.tensor_parallel_volume(1, S_gpt3, D_gpt3, 2, 0, layout).sent
    print(f"{t} {parameters / GB:11.1f} GB {block_flops / t / 1e12:7.1f} TFLOP "
          f"{activations / MB:9.0f} MB  ({activations / S_gpt3 / D_gpt3:5.1f}, {10 + 24 / t:8.0f})"
          f"{sent / MB:9.0f} MB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The matmuls shrink by 8 and the parameters by almost 8. The new traffic is activations and, in the
# backward pass, their gradients. The next layer waits for them, so none of it can be deferred to
# the end of the step.
#
# </details>
#
# Activations shrink by less than 3. For B sequences of S tokens and width D, a block without tensor
# parallelism saves $34\,BSD$ bytes for the backward pass ([chapter 2](chapter:2); the term
# quadratic in S is gone, because attention is fused). On t ranks each saves $BSD\,(10 + 24/t)$
# ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), section 4.1, again without the
# quadratic term). Section 4 counts which bytes are sharded. (The table's parentheses show the
# activations divided by $BSD$ (B = 1), and the formula's $10 + 24/t$.) The last column is
# $8\,BSD\,\frac{t-1}{t}$ numbers of 2 bytes, which section 7 derives. We start with a single
# matmul.

# %% [markdown]
# ## 3. Picture
#
# You can split $Y = X A$ over two ranks by the columns of $A$ or by its rows. In the figure, color
# and number show the rank, gray is [replicated](word:replicated), and hatched matrices still have
# to be added up. Below each matrix is the shape that one rank holds, for S tokens, input width D
# and output width F.

# %% tags=["figure-ways"]
show(lab.two_ways(), alt=(
    "Split by columns, A needs all of X and produces some columns of Y. Split by rows, it needs "
    "some columns of X and produces a partial sum of Y, which an all-reduce completes."
))

# %% [markdown]
# Split by columns, $A$ needs all of the input and yields some columns of the output. Split by rows,
# it needs some columns of the input and yields a [**partial sum**](word:partial-sum): a tensor of
# the full shape whose values mean nothing until the ranks' versions are added.
#
# PyTorch's `nn.Linear` stores $A$ transposed, as (out, in), so splitting $A$ by columns means
# splitting `weight` along dimension 0. And the ranks get equal shards, so t must divide what is
# split, such as the vocabulary. GPT-3's 50,257 tokens are not divisible by 8. We padded them to
# 51,200, as Megatron-LM does: to the next multiple of 128 t = 1,024.
#
# **Predict.** A feed-forward is two matmuls with GELU between them. Which of the two do you split
# by columns, and which by rows?

# %% [markdown]
# ## 4. By hand
#
# To find out, we try both splits on small matrices. `own` returns a rank's shard.

# %%
S, D, W, H, K = 6, 8, 32, 4, 2  # tokens, width, feed-forward width, heads, head width
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
X, up, down = random(S, D), random(D, W) / D**0.5, random(W, D) / W**0.5


def own(tensor, dim, group):
    """This rank's shard of a tensor, split along `dim`."""
    return tensor.chunk(group.size(), dim)[group.rank()]


def error(result, expected):
    return (result - expected).abs().max().item()


# %% tags=["output-ways"]
def by_columns(group):
    return X @ own(up, 1, group)


def by_rows(group):
    return own(X, 1, group) @ own(up, 0, group)


columns, partial_sums = run(by_columns, 2), run(by_rows, 2)
print(f"by columns: {tuple(columns[0].shape)} per rank, concatenated, "
      f"error {error(torch.cat(columns, 1), X @ up):.0e}")
print(f"by rows:    {tuple(partial_sums[0].shape)} per rank, added,        "
      f"error {error(sum(partial_sums), X @ up):.0e}")

# %% [markdown]
# Both reproduce `X @ up`, up to rounding. **Predict.** What happens if each rank applies GELU to
# what it has, before anything is concatenated or added?

# %% tags=["output-gelu"]
gelu = F.gelu(X @ up)
joined = torch.cat([F.gelu(part) for part in columns], 1)
added = sum(F.gelu(part) for part in partial_sums)
print(f"GELU of the columns, concatenated  error {error(joined, gelu):.0e}")
print(f"GELU of the partial sums, added    error {error(added, gelu):.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Applying GELU first is right for the columns, which are finished values, and wrong for the partial
# sums, since $\mathrm{GELU}(a + b) \ne \mathrm{GELU}(a) + \mathrm{GELU}(b)$. Adding them before
# GELU would take an all-reduce of the widest tensor in the block.
#
# </details>
#
# So split the first matrix by columns. Its output is then sharded as the second, split by rows,
# needs it (F is the code's W):

# %% tags=["figure-pair"]
show(lab.columns_then_rows(), alt=(
    "Columns, then rows: the hidden activations stay sharded, and a single all-reduce of the "
    "narrow output is all the communication."
))

# %% [markdown]
# No communication happens between the two matmuls. One all-reduce at the end adds the partial
# sums.
#
# ### Forward and backward
#
# Training also needs gradients. On each rank the split feed-forward is an ordinary, narrower one,
# so autograd computes the gradients of what the rank has.
#
# **Predict.** Every rank has the same gradient of Y, because from Y on all ranks compute the same
# thing. Of the gradients of X, `up` and `down`, which are shards, and which are partial sums?


# %%
def feed_forward(x, up, down):
    return F.gelu(x @ up) @ down


def with_gradients(layer, x, weights):
    """The layer's output, and the gradients of x and of all weights, given dY."""
    x, *weights = (tensor.clone().requires_grad_() for tensor in (x, *weights))
    y = layer(x, *weights)
    return [y.detach(), *torch.autograd.grad(y, (x, *weights), dY)]


dY = random(S, D)


# %%
def together(group, layer, *weights):
    """All weights but the last split by columns, the last by rows; what this rank ends up with."""
    parts = [own(weight, 1, group) for weight in weights[:-1]]
    parts += [own(weights[-1], 0, group)]
    y, dx, *grads = with_gradients(layer, X, parts)
    dist.all_reduce(y, group=group)
    dist.all_reduce(dx, group=group)
    return y, dx, *grads


# %% tags=["output-pair"]
def compare_with_one(layer, *weights, t):
    right_y, right_dx, *right = with_gradients(layer, X, weights)
    ys, dxs, *first, last = zip(*run(together, t, layer, *weights), strict=True)  # each by rank
    joined = [torch.cat(parts, 1) for parts in first] + [torch.cat(last, 0)]
    print(f"{layer.__name__:12} on {t} ranks, error: Y {max(error(y, right_y) for y in ys):.0e}, "
          f"dX {max(error(dx, right_dx) for dx in dxs):.0e}, "
          f"weights {max(map(error, joined, right)):.0e}")


for t in (2, 4):
    compare_with_one(feed_forward, up, down, t=t)

# %% [markdown]
# <details><summary>Answer</summary>
#
# The gradients of `up` and `down` are finished shards, which need no communication. The gradient of
# X is a partial sum: every rank used all of X, but knows only the effect of X on its own columns.
#
# </details>
#
# The errors are rounding, so the two calls of `dist.all_reduce` in `together` are enough.
# Megatron-LM calls their places f and g
# ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3):
#
# | | forward | backward |
# |---|---|---|
# | f, where X enters | nothing | all-reduce |
# | g, where Y leaves | all-reduce | nothing |
#
# ### Heads
#
# Attention has four matrices: query, key, value, and out, with the attention itself between the
# first three and the last. `together` splits all matrices but the last by columns, and the last
# by rows. **Predict.** Does that work here without a change? What must be true of the columns
# that a rank gets?


# %% tags=["output-heads"]
def attention(x, query, key, value, out):
    """Causal attention of x (S, D), with as many heads as the matrices have columns for."""
    q, k, v = ((x @ matrix).unflatten(-1, (-1, K)).transpose(0, 1)[None]  # (1, H, S, K)
               for matrix in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1) @ out


query, key, value, out = random(4, D, D) / D**0.5
for t in (2, 4):
    compare_with_one(attention, query, key, value, out, t=t)

# %% [markdown]
# <details><summary>Answer</summary>
#
# It works if a rank's columns of query, key and value are the same whole heads, so t divides their
# number. Its rows of out then belong to these heads, too. A head attends with its own columns only,
# so attention, like GELU, needs no column of another rank.
#
# </details>
#
# Now we can count what section 2 announced: which of the 34 bytes that a GPT block saves per
# token and unit of width are sharded. (A 16-bit tensor of width D counts 2 bytes, one of width 4D
# 8, and a dropout mask 1.)
#
# | tensor saved | bytes | on t ranks |
# |---|---|---|
# | inputs of the two norms | 2 + 2 | 2 + 2 |
# | input of query, key and value; input of `up` | 2 + 2 | 2 + 2 |
# | dropout masks after `out` and after `down` | 1 + 1 | 1 + 1 |
# | queries, keys, values | 2 + 2 + 2 | 6 / t |
# | input of `out` | 2 | 2 / t |
# | input of GELU; input of `down` | 8 + 8 | 16 / t |
# | together | 34 | 10 + 24 / t |
#
# Everything between a matmul split by columns (*column-parallel*) and one split by rows
# (*row-parallel*) is sharded. Everything outside is replicated, because each rank needs all of X,
# and has all of Y after the all-reduce. (The table leaves out two small items in float32: 16 bytes
# per token for two norms' statistics, a mean and a scale each, and 4 per token and head for the
# log-sum-exp from which fused attention recomputes its softmax. On t ranks these are $16 + 4H/t$
# bytes per token for H heads.)
#
# ### Fewer key-value heads than ranks
#
# With grouped-query attention, several query heads read the same key-value head: Llama 3.1 70B has
# 64 query heads and 8 key-value heads ([Llama Team 2024](https://arxiv.org/abs/2407.21783), table
# 3). On 16 ranks, each key-value head would have to be cut in half. Instead, two ranks hold copies
# of it. The figure shows this for four query heads and two key-value heads on four ranks:

# %% tags=["figure-grouped"]
show(lab.grouped_queries(), alt=(
    "Of four ranks, each holds one query head, and two neighbors hold the same key-value head."
))

# %% [markdown]
# Ranks 0 and 1 have different query heads, but hold the same key-value head. **Predict.** After the
# backward pass, is the gradient of its key matrix the same on both? Is it right?

# %% tags=["output-grouped"]
G = 2
keys, values = random(D, G * K) / D**0.5, random(D, G * K) / D**0.5


def key_gradient(group):
    """Which key-value head this rank holds, and the gradient of its key matrix."""
    head = group.rank() * G // group.size()  # the one that this rank's query head reads
    parts = [own(query, 1, group), keys.chunk(G, 1)[head], values.chunk(G, 1)[head],
             own(out, 0, group)]
    return head, with_gradients(attention, X, parts)[3]


# %% tags=["output-grouped"]
by_rank = run(key_gradient, 4)
right = with_gradients(attention, X, (query, keys, values, out))[3].chunk(G, 1)
print("rank  head   error of its gradient   error of the sum over the head's holders")
for rank, (head, grad) in enumerate(by_rank):
    total = sum(other_grad for other, other_grad in by_rank if other == head)
    print(f"{rank:4} {head:5} {error(grad, right[head]):23.0e} {error(total, right[head]):41.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# It is neither the same nor right. A key-value head serves several query heads, and each rank has
# seen only the gradient that comes through its own. The sum over the ranks that hold the head is
# right; without it the two copies would drift apart. So these ranks sum that gradient once per
# step.
#
# </details>
#
# ### The vocabulary
#
# Two matrices remain, at the two ends of the model: embedding and head. **Predict.** Llama 3.1 has
# a vocabulary of 128,256 tokens and, before its long-context stage, was pre-trained on sequences of
# up to 8,192 (Llama Team 2024). How large are the logits of one such sequence in float32, the
# precision in which the loss is computed?

# %% tags=["figure-vocabulary"]
llama_70b = cost.PUBLISHED["Llama 3.1 70B"]
V_llama, S_llama = llama_70b.vocab_size, llama_70b.max_sequence_length
logits_bytes = 4 * S_llama * V_llama
print(f"{V_llama:,} tokens in the vocabulary, {S_llama:,} in a sequence")
print(f"{logits_bytes / GB:.1f} GB, and as much again for each tensor derived from them")
print(f"sharded over 8 ranks: {logits_bytes / 8 / GB:.1f} GB")
show(lab.vocabulary_cut(), alt=(
    "The embedding is split by rows and its output summed; the head is split by columns, so each "
    "rank has some tokens' logits, and an all-reduce yields the loss."
))

# %% [markdown]
# One such tensor would fit, but computing a loss from gathered logits takes several of this size at
# once, because the loss and its backward pass derive others from them. And every rank would hold
# the same ones. So the logits are never gathered, and embedding and head are split along the
# vocabulary, as in the figure: a rank holds some tokens' rows of the embedding and the same tokens'
# columns of the head. It looks up the tokens that it holds and returns zeros for all others, so its
# output of the embedding is a partial sum, which one all-reduce completes.
#
# At the other end, how can a rank compute the loss without the other ranks' logits? The loss of
# one token is
#
# $$\log \sum_v e^{z_v} - z_{\mathrm{target}}$$
#
# Here $z_v$ is the logit of token $v$. The sum runs over the whole vocabulary, but the target's
# logit is on a single rank. **Predict.** Which numbers must the ranks exchange to compute the loss,
# without any exponential overflowing?


# %%
V = 10
logits, targets = 100 * random(S, V).float(), torch.tensor([3, 9, 0, 5, 4, 7])


def contribution(group):
    """What this rank sends for the loss, from its own logits alone."""
    part = own(logits, 1, group)  # (S, V/t)
    tokens = torch.arange(V).chunk(group.size())[group.rank()]
    largest = part.amax(1)
    exponentials = (part - largest[:, None]).exp().sum(1)
    return largest, exponentials, (part * (tokens == targets[:, None])).sum(1)


# %% tags=["output-loss"]
largest, sums, known = map(torch.stack, zip(*run(contribution, 2), strict=True))
top = largest.amax(0)
total = (sums * (largest - top).exp()).sum(0)  # every rank's sum, relative to the same maximum
loss = (top + total.log() - known.sum(0)).sum()
print(f"from three numbers per token and rank  {loss:.2f}")
print(f"from all logits                        "
      f"{F.cross_entropy(logits, targets, reduction='sum'):.2f}")
print(f"without subtracting the maximum        {logits.exp().sum(1).log().sum():.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Three per token: each rank's largest logit, its sum of exponentials relative to that, and the
# target's logit (0 if another rank has it). Without subtracting a maximum, the exponentials
# overflow, as the last line shows. The package needs two all-reduces (one arrow in the figure): the
# first finds the global maximum, and the second adds the sums, now relative to it, and the target's
# logits.
#
# The backward pass of the loss itself sends nothing: each rank knows the maximum and the total,
# hence the probabilities of its own tokens. These, minus 1 at the target, are the gradient of its
# logits. (The head is column-parallel, so the gradient of its input is again a partial sum.)
#
# </details>

# %% [markdown]
# ## 5. The trap
#
# Two mistakes are easy to make here.
#
# ### A row-parallel layer in review
#
# GPT's linear layers have biases. A column-parallel layer adds those of its own columns. A
# row-parallel layer holds its whole bias, because its output has the full width.
# `self.exchange.reduce` in the code is g's all-reduce. Would you approve this row-parallel layer in
# a review?


# %%
class Reviewed(RowParallelLinear):
    def forward(self, x):
        return self.exchange.reduce(F.linear(x, self.weight, self.bias))


def reviewed(model, group):
    """The package's tensor parallelism, with the layer under review."""
    parallel = apply_tensor_parallel(model, group)
    for layer in model.modules():
        if type(layer) is RowParallelLinear:
            layer.__class__ = Reviewed
    return parallel


# %% [markdown]
# We train twenty steps on a task with a known answer: the next token is the last one plus 7, modulo
# the vocabulary size.
#
# **Predict.** Biases start at zero. If the layer is wrong, at which step does the loss show it?
# Does a comparison of what the ranks hold ever show it?

# %% tags=["output-bias"]
lab.report(reviewed)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Every rank adds the bias before the sum, so it counts t times. The first loss is right to the last
# digit, because t times zero is zero, and the first gradients are right for the same reason. From
# the second step on, the model runs with t times these biases, identically on all ranks, and learns
# with them. Only a correct run beside it shows the difference. Loaded on another number of ranks,
# its checkpoint is a different model.
#
# </details>
#
# The [oracle](word:oracle) compares with one process. It counts steps from 0, and its model starts
# from larger weights and from nonzero biases, so its losses are not those of the table:

# %% tags=["output-bias-oracle"]
print(lab.verdict(reviewed, 2))

# %% [markdown]
# It finds the bug in the first loss. ("1 of 1 differ" counts the tensors it compared there: one
# loss, and it is wrong.) PaddlePaddle had this bug ([pull request
# 35186](https://github.com/PaddlePaddle/Paddle/pull/35186)), and so did Slapo ([issue
# 10](https://github.com/awslabs/slapo/issues/10)). The package adds a row-parallel layer's bias
# after the sum.
#
# ### The all-reduce in the wrong pass
#
# f does nothing in the forward pass, so it is easily forgotten. Or somebody remembers that an
# all-reduce belongs where X enters, but runs it forward. In the package, an `exchange` with three
# methods serves both places. The first mistake changes one method, the second two:
#
# | method | called where | does | in Megatron's terms |
# |---|---|---|---|
# | `start_gather` | X enters, forward pass | nothing | f, forward |
# | `start_reduce` | X enters, backward pass | starts an all-reduce | f, backward |
# | `reduce` | Y leaves, forward pass | all-reduce; nothing in its backward pass | g |
#
# The two methods with `start` in their name return a function that waits for the result.
# `start_gather` has nothing to start here. It is named for chapter 8, where it gathers.


# %%
class Forgotten(AllReduceExchange):
    def start_reduce(self, grad_partial):
        return lambda: grad_partial


class Forward(Forgotten):
    def start_gather(self, x):
        return start_all_reduce(x.clone(), self.group)


# %%
def f_forgotten(model, group):
    return TensorParallel(model, Forgotten(group))


def f_runs_forward(model, group):
    return TensorParallel(model, Forward(group))


# %% [markdown]
# **Predict.** For each of the two: is the first loss right? Do the ranks stay identical? Does the
# model learn?

# %% tags=["output-direction", "exhaustive"]
lab.report(f_forgotten, f_runs_forward)
print()
for apply in (f_forgotten, f_runs_forward):
    print(f"{apply.__name__}: {lab.verdict(apply, 2)}".replace(" not prop", "\n  not prop"))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Without f the forward pass is exactly right. But each rank continues the backward pass with the
# gradient that its own columns produced, so replicated parameters, such as norms and row biases,
# move differently on each rank, and a comparison of the ranks shows that something is wrong. That
# comparison misses most of the wrong gradients, though: they belong to shards, and a shard exists
# only once, so it takes a run on one process to expose them. (The two gradients that the oracle
# finds right are those of the two blocks' key biases. A key bias adds the same number to all scores
# of a query, which softmax ignores, so its gradient is zero in any case.)
#
# With f run forward, the input of every column-parallel layer is also t times too large, so even
# the first loss is wrong. The backward pass still lacks its all-reduce, so these ranks drift apart,
# too. Still both models learn, and in our run this one ended lowest of all: a loss that falls
# proves nothing.
#
# </details>
#
# torchtitan's experts lacked f: the gradient of their input stayed a partial sum ([issue
# 1805](https://github.com/pytorch/torchtitan/issues/1805)). A third variant sums in g's backward
# pass, too, as PyTorch's own `torch.distributed.nn.functional.all_reduce` does. Why does g do
# *nothing* there (Megatron-LM, [issue 559](https://github.com/NVIDIA/Megatron-LM/issues/559))?
# PyTorch's function assumes that every rank has a loss of its own and that all of them count. Here
# all ranks compute the same loss, and it counts once.

# %% [markdown]
# ## 6. The real one
#
# In the package, a table says which layers are split, and how. The model itself knows nothing
# about it.

# %% tags=["output-plan", "nbval-check-output"]
for path, kind in PLAN.items():
    print(f"{path:26} {kind}")

# %% [markdown]
# Query, key and value read one X, and Llama's gate and up another, so one all-reduce per X can
# carry the sum of its gradients. [`LinearFunction`](code:minitron.model.linear.LinearFunction)
# therefore computes layers with a common input as one autograd function. Its `parts` hold
# everything that depends on the parallelism, including the `exchange` of section 5. **Find** the
# line that starts the all-reduce, the line that waits for it, and what is computed in between.

# %%
show_source(LinearFunction.backward)

# %% [markdown]
# `start_reduce` starts it, and `wait_for_grad_x()` in the last line waits. The weight gradients,
# `second_half`, do not need the sum, so they are computed while it travels.
# (`second_half.start()` and `deferral` are for chapters 8 and 9.) In the row-parallel layer, look
# for the bias:

# %%
show_source(RowParallelLinear)

# %% [markdown]
# It is added after the sum. Does all this train like one process? We ask the oracle, for GPT with a
# tied embedding on two and three ranks, and for Llama with two key-value heads on four. (Embedding
# and loss are in [`vocabulary.py`](code:minitron.parallel.tensor.vocabulary).)

# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
for make_model, t in ((lab.small_gpt, 2), (lab.small_gpt, 3), (lab.small_llama, 4)):
    print(f"{make_model.args[0]:5} on {t} ranks: "
          f"{lab.verdict(apply_tensor_parallel, t, make_model)}")

# %% [markdown]
# It does. Dropout needs care: inside attention each rank has different heads, so the ranks must
# draw *different* random numbers. GPT's other dropouts act on replicated activations, so all ranks
# must draw the same ones.
#
# ## 7. Measure
#
# ### What is sent
#
# Do the formulas of section 2 hold? The [ledger](word:ledger) records one step of a small GPT
# with three blocks on four ranks.

# %% tags=["output-calls", "nbval-check-output"]
results = {t: run(lab.measured_step, t, 3, watch=False) for t in (1, 2, 4)}
print(merged([calls for _, calls in results[4]]))

# %% [markdown]
# **Predict.** Account for the calls: 9 in the forward pass, 7 in the backward pass.
#
# <details><summary>Answer</summary>
#
# Two per block and pass: in the forward pass for the outputs of attention and feed-forward, in
# the backward pass for the gradients of their inputs. One more for the embedding in the forward
# pass and one for the head in the backward pass. The loss sends twice: the maxima, then the sums
# together with the target logits.
#
# </details>
#
# An all-reduce of n numbers sends $2\,\frac{t-1}{t}\,n$ per rank. Four of them per block and
# micro-batch, each of $B S D$ numbers, make
#
# $$8\,B S D\,\frac{t-1}{t}$$
#
# ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 3.2). To measure a block, we
# run models with one block and with three: half of the difference in bytes sent is one block's. The
# rest of what the one-block model sends comes from the two ends of the model: embedding and head,
# together as much as half a block, and the loss.

# %% tags=["figure-wire", "exhaustive"]
measured_bytes, formula = {}, {}
for t in (2, 4):
    names = f"a block, {t} ranks", f"the ends, {t} ranks"
    measured_bytes |= dict(zip(names, lab.sent_per_block(t), strict=True))
    shape = [(lab.B, lab.S, lab.WIDTH, 4, rank, cost.Layout(t)) for rank in range(t)]
    formula |= {names[0]: [cost.tensor_parallel_volume(*a).sent for a in shape],
                names[1]: [cost.vocabulary_parallel_volume(*a).sent for a in shape]}
equal = measured_bytes == formula
print("ledger and formula agree to the byte:", equal)
show(wire(measured_bytes, formula), alt=(
    "Bytes sent by a block and by the ends of the model on 2 and 4 ranks: the ledger "
    f"{'agrees with' if equal else 'differs from'} the formula."
))

# %% [markdown]
# Every bar (the ledger) ends at its tick (the formula).
#
# ### What is held
#
# The [meter](word:meter) reads the bytes at the moment when activations peak. The formula (dashed)
# is the function that computed section 2's table, here for float32 and without dropout. The two
# bytes of masks disappear, and all others double: a block saves $2\,BSD\,(8 + 24/t)$ bytes. The
# function also counts the two small items of section 4, $16 + 4H/t$ bytes per token. With this
# model's 12 heads these are $2\,(8 + 24/t)$ bytes per token, where the formula has $2\,D\,(8 +
# 24/t)$: about 1 % here.

# %%
kinds, held, predicted = ("parameter", "gradient", "activation"), {}, {}
for t, by_rank in results.items():
    parameters = 4 * cost.tensor_parallel_parameters(lab.shape_of(3), t)
    activations = cost.activation_bytes(lab.shape_of(3), lab.B, lab.S, 4, layout=cost.Layout(t))
    name, formulas = lab.ranks(t), (parameters, parameters, activations)
    held[name] = {kind: by_rank[0][0][kind] for kind in kinds}
    predicted[f"{name}, formula"] = dict(zip(kinds, formulas, strict=True))

# %% tags=["figure-held"]
print("kB held (error)        1 rank           2 ranks           4 ranks")
pairs = list(zip(held.values(), predicted.values(), strict=True))
for kind in kinds:
    print(f"{kind:12}" + "".join(f"{one[kind] / 1e3:9,.0f} ({one[kind] / two[kind] - 1:6.2%})"
                                 for one, two in pairs))
show(memory_bars(held, predicted), alt="From 1 to 4 ranks parameters shrink "
     f"{held['1 rank']['parameter'] / held['4 ranks']['parameter']:.1f} times, activations "
     f"{held['1 rank']['activation'] / held['4 ranks']['activation']:.1f} times.")

# %% [markdown]
# With these two items, function and meter agree on two and four ranks. On one rank the function
# leaves out what `F.cross_entropy` saves: a copy of the `lab.B * lab.S` targets, 8 bytes each, and
# one 4-byte scalar. These bytes are the whole error. From one rank to four, parameters and
# gradients shrink by a factor of nearly 4, activations by little more than 2 (for a block alone, by
# $(8 + 24)/(8 + 6)$; the ends of the model change it a little).
#
# ### On H100s, by arithmetic
#
# How far does this scale? An H100 has two links: NVLink to the seven other GPUs of its node, with
# 450 GB/s per direction, and a network card to other nodes, with 50 GB/s. We do not measure here;
# we compute the time of one block of GPT-3 and one sequence, with compute at 40 % of the dense peak
# and no overlap. The links are ideal: each has its datasheet's bandwidth and no latency. Multiplied
# by the number of GPUs, the time is what the block costs, in GPU-milliseconds.
#
# We compare three ways to all-reduce over two nodes. One ring through all 16 ranks crosses between
# the nodes through a single card in each direction. Two tiers (chapter 5's hierarchical all-reduce)
# do a reduce-scatter inside each node, an all-reduce of each GPU's eighth through its own card, and
# an all-gather inside. Eight rings run at the same time, each with an eighth of the tensor; each
# visits the GPUs in a different order, so that each crosses through a different card.
#
# **Predict.** Eight ranks fill one node, sixteen fill two. How much faster is a block on sixteen?

# %%
message = 2 * S_gpt3 * D_gpt3  # bytes of each all-reduce
reached = 0.40 * H100.bf16_flops  # FLOP/s
inside, across = cost.Link(0, H100.nvlink_bandwidth), cost.Link(0, H100.nic_bandwidth)
WAYS = {
    " 8 in one node, NVLink": (8, cost.ring_all_reduce_seconds(message, 8, *inside)),
    " 8 in eight nodes, a card each": (8, cost.ring_all_reduce_seconds(message, 8, *across)),
    "16 in two nodes, two tiers": (
        16, cost.hierarchical_all_reduce_seconds(message, 8, 2, inside, across)),
    "16 in two nodes, one ring": (16, cost.ring_all_reduce_seconds(message, 16, *across)),
    "16 in two nodes, eight rings": (16, cost.ring_all_reduce_seconds(message / 8, 16, *across)),
}

# %% tags=["output-links", "nbval-check-output"]
print(f"per direction: NVLink {inside.bandwidth / GB:.0f} GB/s, a card "
      f"{across.bandwidth / GB:.0f} GB/s; each all-reduce {message / MB:.0f} MB")
print("                                     ms for a block")
print("ranks                           compute  4 all-reduces   both  waiting  GPU-ms")
times = {}
for name, (t, seconds) in WAYS.items():
    compute, sums = block_flops / t / reached, 4 * seconds
    times[name] = compute + sums
    print(f"{name:31} {1e3 * compute:7.1f} {1e3 * sums:14.1f} {1e3 * (compute + sums):6.1f} "
          f"{sums / (compute + sums):8.0%} {1e3 * t * (compute + sums):7.0f}")
one_node, _, *two_nodes = times.values()
print("speedup of two nodes: two tiers {:.1f}, one ring {:.1f}, eight rings {:.1f}"
      .format(*(one_node / each for each in two_nodes)))
bounds = [72 / 16 * D_gpt3 * link.bandwidth / reached for link in (inside, across)]
print("t - 1 < {} D beta / F: {:.0f} with NVLink, {:.0f} with a card each".format(4.5, *bounds))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Less than twice: at most 1.8 times with eight rings, 1.6 times with two tiers, and with one ring
# 0.7 times, so sixteen ranks are slower than eight. Compute halves in each case, but the
# all-reduces take longer: each rank sends slightly more than before, and part of it crosses a link
# that is 9 times slower. Eight rings and two tiers spread the traffic between nodes over all eight
# cards. The rings use cards and NVLink at the same time (NVLink finishes its share before the
# cards), the tiers one after the other.
#
# Latency lowers all three speedups, because it adds little to one node's all-reduces and more to
# two nodes'. By [chapter 5](chapter:5)'s numbers NCCL's fastest protocol for this message is LL128,
# with 2 µs per hop and 15/16 of the datasheet's bandwidth. An all-reduce on eight ranks has 14
# hops, so it takes 28 + 209 = 237 µs instead of 196, and four of them 0.16 ms more.
#
# A ring of 16 ranks has 30 hops. At 15.3 µs per hop, chapter 5's rough fit to measurements on 2 to
# 64 nodes, four all-reduces take 4 x 30 x 15.3 µs = 1.8 ms longer, so eight rings are only
# (8.0 + 0.2) / (4.6 + 1.8) = 1.3 times as fast as one node. Two tiers have only 2 hops between
# nodes and stay close to 1.6. Chapter 5's measurement on two nodes alone (362 GB/s bus bandwidth
# for 256 MB, from the Ultra-Scale Playbook, 2025) is faster than that fit. At its rate the four
# all-reduces take 4 x 2 x 15/16 x 50 MB / (362 GB/s) = 1.04 ms, and our shorter messages at least
# that, because they reach less bandwidth. So for eight rings expect 1.3 to about
# (8.0 + 0.2) / (3.6 + 1.04) = 1.8.
#
# </details>
#
# Even at best, sixteen ranks spend 73 GPU-milliseconds on a block, where eight spend 64. Two groups
# of eight, each with its own sequence, get more done on the same GPUs. So unless one sequence must
# be faster, or does not fit otherwise, tensor parallelism stays inside a node: t goes up to the
# number of GPUs there (Narayanan et al. 2021, takeaway 1), or higher where more GPUs share NVLink.
#
# The output's last line is a rule of thumb for other models and links. A block's dense matmuls take
# about $72\,BSD^2/t$ FLOPs (24 per token and $D^2$ in the forward pass, twice that in the backward
# pass), and in 16 bits its all-reduces send $16\,BSD\,\frac{t-1}{t}$ bytes. With F now the FLOP/s
# that a GPU reaches, and $\beta$ the bandwidth of a ring's slowest link (times the number of
# rings), sending takes less time than computing as long as
#
# $$t - 1 < 4.5\,\frac{D\,\beta}{F}$$
#
# B and S cancel, up to latency and to attention's own matmuls, whose work grows with $S^2$. So only
# a wider model, a faster link or slower compute allows more ranks. For GPT-3 at 40 % of the H100's
# peak, the bound on $t - 1$ is 63 over NVLink and 7 over one card per rank. At the bound, waiting
# takes half of the time, about as in the table's second row (8 ranks in eight nodes, 49 %). To wait
# for only a quarter of the time, $t - 1$ must stay below a third of the bound.
#
# And the opening question? The 1,024 GPUs now form 128 groups of 8. Each group reads one
# sequence, and ZeRO-3 shards across groups.

# %% tags=["output-answer", "nbval-check-output"]
layout = cost.Layout(tensor_parallel=8)
each = cost.tensor_parallel_parameters(gpt3, 8)
fits = {
    "training state, a 128th of an 8th": cost.zero_bytes(each, 128, 3),
    "two unsharded layers and gradients, an 8th": 2 * (layer_bytes + layer_bytes) / 8,
    "activations of one sequence": cost.activation_bytes(gpt3, 1, S_gpt3, layout=layout),
}
for name, size in (fits | {"together": sum(fits.values())}).items():
    print(f"{name:46} {size / GB:6.1f} GB")

# %% [markdown]
# It fits, with more than half of the memory to spare, and the second wall, the batch, is eight
# times farther away. Most of what remains is replicated activations. The next chapter shards them.
#
# The widget draws one block of a model, with ranks and a link of your choice, and below it the same
# block with a free link. Forward is blue, backward tan, communication purple, idle time hatched. It
# opens with Llama 3.1 70B, and all-reduces across nodes take two tiers. Two assumptions differ from
# the table's. Matmuls run at the H100's peak, which raises the share of waiting. Backward, the
# all-reduces overlap with the weight gradients, which lowers it.

# %% tags=["figure-explorer"]
tensor_explorer()

# %% [markdown]
# Here the rank waits for both forward all-reduces in full. Of the two in the backward pass, weight
# gradients hide the first and about a third of the second.

# %% [markdown]
# ## Further: what overlaps
#
# Section 7's table assumed no overlap. In the forward pass nothing after a layer can be computed
# while its all-reduce runs: the next layer needs the result. (The next section cuts the layer
# itself into chunks.) In the backward pass there are weight gradients to compute. We run two ranks
# on an **emulated** network: the transfer really happens, and a rank that waits for it sleeps until
# a link of the given bandwidth would have delivered.
#
# The bandwidth is such that one all-reduce takes as long as computing the gradient of `up`. The
# model is a GPT with a vocabulary of 256, a width of three times that, and a feed-forward four
# times as wide as the model. It has one block, so the backward pass has three all-reduces: for the
# input gradients of the head, of `up`, and of query, key and value. **Predict.** For how many
# transfers does the backward pass stand still if it waits for each all-reduce at once? And if it
# computes weight gradients meanwhile?

# %% tags=["output-overlap", "exhaustive"]
stands, alone = {}, run(lab.weight_gradient_seconds, 2, watch=False)[0]  # each weight's, alone
transfer = alone["up"]
bandwidth = lab.all_reduce_bytes() / transfer
ways = {
    "waits at once": (lab.WaitsAtOnce, 3 * transfer),
    "overlaps": (AllReduceExchange, sum(max(0, transfer - each) for each in alone.values())),
}
print("standing still     predicted     measured   (spread)")
for name, (exchange, seconds) in ways.items():
    steps = run(lab.backward_steps, 2, exchange, bandwidth, watch=False)[0]
    still = sorted(1e3 * lab.standstill(*step, transfer) for step in steps)
    print(f"{name:15} {1e3 * seconds:9.1f} ms {median(still):9.1f} ms   "
          f"({still[0]:.1f} to {still[-1]:.1f} ms in {len(still)} steps)")
    stands[name] = median(still)
    ways[name] = min(steps, key=lambda step: step[1][-1].end - step[1][0].start)

# %% tags=["figure-overlap", "exhaustive"]
lanes = {}
for name, events in ways.items():
    lanes |= lab.compute_and_network(name, events)
show(timeline(lanes, unit="ms, the fastest repeat, network emulated"), alt=claim(
    stands["overlaps"] < stands["waits at once"], (
        f"A backward pass that waits for each all-reduce stands still for "
        f"{stands['waits at once']:.0f} ms; one that computes weight gradients while the sum "
        f"travels, for {stands['overlaps']:.0f}.")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Three transfers if it waits at once. If it overlaps, only what the weight gradient of the same
# layers does not cover: nothing for `up`, a quarter for query, key and value, which have three
# quarters as many columns, and 11/12 for the head, which has 1/12 as many (in our run, the long gap
# in the figure's third lane). Together that is 1/4 + 11/12 = 7/6 of a transfer, if the time of a
# matmul grows with its columns.
#
# Measured values may lie below the prediction, even all of them. There are three plausible reasons,
# none of which we tested. Launching an all-reduce counts as compute, so even a pass that waits at
# once stands still for a little less than three transfers. In the step, the bias gradients also run
# during the transfer. And other programs on the same cores may slow the matmul down, so that it
# covers more of the transfer than it did on its own. (In the figure, a bar of the network begins
# when this rank launches the all-reduce. If the other rank launches later, the bar is longer than a
# transfer.)
#
# </details>
#
# On a GPU, this overlap requires that the all-reduce is launched before the weight gradient's
# kernel. Megatron-LM asks for `CUDA_DEVICE_MAX_CONNECTIONS=1` so that kernels start in launch
# order.

# %% [markdown]
# ## Further: async tensor parallelism
#
# The forward all-reduce can overlap, too, with *the same* matmul: compute the output in chunks of
# tokens, and send each chunk while the next one is computed. [Wang et al.
# 2023](https://doi.org/10.1145/3567955.3567959) do this for the all-gathers and reduce-scatters
# that replace the all-reduce in the next chapter, and so does PyTorch, which calls it async
# tensor parallelism. Here we apply the idea to the all-reduce. By hand it takes two lines: launch
# every chunk's all-reduce as soon as its matmul is done, and wait for all of them at the end.

# %%
show_source(lab.row_parallel_in_chunks)

# %% [markdown]
# Does it compute the same? We run section 4's feed-forward on two ranks, its second layer in chunks
# of the six tokens:


# %% tags=["output-chunked"]
def in_chunks(group, num_chunks):
    hidden, weight = F.gelu(X @ own(up, 1, group)), own(down, 0, group).T  # (S, W/t), (D, W/t)
    return lab.row_parallel_in_chunks(hidden, weight, num_chunks, group)


for num_chunks in (1, 2, 3):
    errors = [error(y, feed_forward(X, up, down)) for y in run(in_chunks, 2, num_chunks)]
    print(f"chunks: {num_chunks}, error {max(errors):.0e}")

# %% [markdown]
# It does, up to rounding. How much time does it save? If compute and transfer take equally long, as
# in the cell below, c chunks need the compute plus one c-th of the transfer: only the last chunk's
# transfer has no compute to hide behind.
#
# **Predict.** Should c then be as large as possible?

# %% tags=["output-async", "exhaustive"]
compute = run(lab.row_parallel_compute_seconds, 2, watch=False)[0]
bandwidth = lab.all_reduce_bytes() / compute  # the whole all-reduce takes as long as the matmul
measured = {}
print("chunks   predicted   measured   (spread)")
for chunks in (1, 2, 4, 8, 16):
    times = measured[chunks] = run(lab.row_parallel_seconds, 2, chunks, bandwidth, watch=False)[0]
    print(f"{chunks:6} {1e3 * compute * (1 + 1 / chunks):8.1f} ms {1e3 * median(times):7.1f} ms   "
          f"({1e3 * min(times):.1f} to {1e3 * max(times):.1f} ms in {len(times)} runs)")
print(lab.fastest_chunks(measured))

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. Every chunk costs a message and a smaller, less efficient matmul. The prediction leaves both
# out, so it becomes more optimistic as c grows. Where it is too low even for c = 1, these two
# cannot be the reason; it also leaves out that the ranks really send and add the numbers, on the
# cores that compute. The last line calls a c faster only if its slowest run beat the fastest run of
# c = 1. Where the spreads overlap, another run may rank them differently.
#
# Over NVLink there is less to hide than in this cell, where transfer and compute take equally long:
# in section 7's table, eight ranks in one node wait for 10 % of the time.
#
# </details>
#
# The figure shows the fastest of nine runs, with one chunk and with four:

# %% tags=["figure-async", "exhaustive"]
lanes = {}
for chunks, name in ((1, "1 chunk"), (4, "4 chunks")):
    events = run(lab.row_parallel_events, 2, chunks, bandwidth, watch=False)[0]
    lanes |= lab.compute_and_network(name, events)
first, fourth = (lanes[f"{name}: network"][0].start for name in ("1 chunk", "4 chunks"))
show(timeline(lanes, unit="ms, the fastest run, network emulated"), alt=claim(fourth < first, (
    f"With one chunk the network starts after {first:.0f} ms, when the matmul is done; with four, "
    f"after {fourth:.0f} ms, and the first transfers travel while the matmul goes on.")))

# %% [markdown]
# With one chunk, rank and network hardly overlap. With four, the network starts after the first,
# and the rank waits only for what is left after the last. (Bars differ if sums come late.)
#
# What does it bring in training? torchtitan reports, for t = 8 inside nodes of H100s and in
# bfloat16, 652.4 instead of 597.3 tokens per second and GPU for Llama 3.1 70B on 256 GPUs, which is
# 9 % more, and 10 % more for the 8B model on 64 ([benchmark of June
# 2025](https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md)).
# Both use `torch.compile`, the 70B model with full recomputation and the 8B model with per-operator
# selective recomputation, and these H100s have 96 GB and a power limit of 500 W. There it hides
# all-gathers and reduce-scatters, not the all-reduce of our cell.

# %% [markdown]
# ## Further: a claim about all-gather
#
# You can read that tensor parallelism assembles its results with an *all-gather*, where data
# parallelism uses an all-reduce. The ledger above shows no all-gather. Could you build it that
# way? Split both matrices by columns and gather after each.
#
# **Predict.** The feed-forward is four times as wide as the model. Which variant sends more in
# the forward pass, and by what factor?


# %%
def columns_then_rows(group):
    y = F.gelu(X @ own(up, 1, group)) @ own(down, 0, group)
    dist.all_reduce(y, group=group)
    return y


def columns_twice(group):
    hidden = start_all_gather(F.gelu(X @ own(up, 1, group)), group, 1)()
    return start_all_gather(hidden @ own(down, 1, group), group, 1)()


def recorded(group, layer):
    with Ledger() as ledger:
        y = layer(group)
    return error(y, feed_forward(X, up, down)), ledger.calls


# %% tags=["output-claim"]
for layer in (columns_then_rows, columns_twice):
    off, calls = run(recorded, 4, layer)[0]
    print(f"{layer.__name__:18} {sum(call.sent for call in calls):5,} bytes, error {off:.0e}: "
          f"{', '.join(call.op for call in calls)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# An all-gather sends half of what an all-reduce of the same tensor sends. But the hidden
# activations are four times as wide as the output, so the all-gathers send 4 + 1 where the
# all-reduce sends 2, which is 5/2 times as much. They also leave the hidden activations
# replicated on every rank.
#
# </details>
#
# So the claim does not describe these layers. Something close to it is true: an all-reduce is a
# reduce-scatter *followed by* an all-gather, and the next chapter puts something between the two.

# %% [markdown]
# ## Further: no rank ever holds all logits
#
# We check this claim of section 4 for a vocabulary of 12,288 and 256 input tokens on four ranks.
# The meter watches two losses, with their backward pass. `gathered_loss` gathers the logits and
# leaves the rest to PyTorch; `sharded_loss` is the package's.
#
# **Predict.** All logits together take 4 x 256 x 12,288 bytes in float32. How many times that does
# a rank hold at the peak with each loss? Count the tensors of the logits' size that the loss and
# its backward pass need at once.

# %%
V, tokens = 12_288, 256


def gathered_loss(part, targets, group):
    """From all logits, on every rank."""
    full = start_all_gather(part.detach(), group, 1)().requires_grad_()
    loss = F.cross_entropy(full, targets, reduction="sum")
    return loss, own(*torch.autograd.grad(loss, full), 1, group)


def sharded_loss(part, targets, group):
    """From this rank's logits and three numbers per token."""
    loss = vocabulary_parallel_cross_entropy(part, targets, group)
    return loss, *torch.autograd.grad(loss, part)


# %%
def at_the_head(group, loss_of_part):
    """Loss, its gradient, bytes at the peak and the largest tensor there."""
    generator = torch.Generator().manual_seed(0)
    x, targets = torch.randn(tokens, 64, generator=generator), torch.arange(tokens)
    weights = torch.randn(V, 64, generator=generator)
    head = nn.Linear(64, V // group.size(), bias=False)
    head.weight.detach().copy_(own(weights, 0, group))
    del weights
    with Meter(head) as meter:
        loss, grad = loss_of_part(head(x), targets, group)
    at_peak = [tensor for tensor in meter.peak.tensors if tensor.category != "parameter"]
    return loss.detach(), grad, sum(tensor.bytes for tensor in at_peak), at_peak[0].shape


# %% tags=["output-vocabulary"]
losses = gathered_loss, sharded_loss
found = [run(at_the_head, 4, loss, watch=False)[0] for loss in losses]
print(f"all logits        {4 * V * tokens / MB:5.1f} MB")
for loss, (_, _, peak, shape) in zip(losses, found, strict=True):
    print(f"{loss.__name__:16}  {peak / MB:5.1f} MB at the peak, largest tensor {shape}")
(gathered, gathered_grad, *_), (sharded, sharded_grad, *_) = found
print(f"the losses differ by {abs(gathered / sharded - 1):.0e}, "
      f"their gradients by {error(gathered_grad, sharded_grad):.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# With gathering: this rank's own shard and four tensors of full size, namely the logits, their
# log-probabilities, and the gradients of both. (The shape with three dimensions is the buffer of
# the gather: for each of 256 tokens the logits of four ranks, together 256 x 12,288.) Without:
# three tensors of a quarter of that size, namely this rank's logits, their softmax, and the
# gradient, and none of them has 12,288 columns.
#
# </details>

# %% [markdown]
# ## Further: what eight ranks do not split
#
# **Predict.** A rank of eight holds slightly more than an eighth of GPT-3's parameters. What is the
# excess? (If r of n parameters are replicated and the others sharded, a rank holds e of them, with
# $e = r + (n - r)/t$. The cell solves this for r: $r = (te - n)/(t - 1)$.)

# %% tags=["output-undivided", "nbval-check-output"]
full, t = cost.num_parameters(gpt3), 8
replicated = (t * each - full) // (t - 1)
biases = L_gpt3 * 2 * D_gpt3  # of out and down
norms = (2 * L_gpt3 + 1) * cost.num_norm_parameters(gpt3)
positions = S_gpt3 * D_gpt3
print(f"a rank holds {each / full:.4%} of the parameters; an eighth is {1 / t:.4%}")
print(f"replicated: {replicated:,}, {replicated / full:.3%} of the model")
print(f"  = {biases:,} row biases + {norms:,} of norms + {positions:,} of positions: "
      f"{replicated == biases + norms + positions}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Norms, biases of the row-parallel layers, and learned positions are replicated. They are a
# negligible part of the parameters. The replicated *activations*, by contrast, are most of the
# activations that a rank holds, as the table in section 2 implies.
#
# </details>

# %% [markdown]
# ## 8. Recap
#
# 1. A matmul split by columns gives a shard of the output; split by rows, a partial sum. Columns,
#    then rows, need one all-reduce in each pass, and none for GELU or attention between them.
# 2. Embedding, head and loss are split along the vocabulary. Three numbers per token give the
#    loss, so the logits are never gathered.
# 3. For each block and micro-batch a rank sends $8\,BSD\,\frac{t-1}{t}$ numbers. It holds little
#    more than a t-th of the parameters, but a much larger share of the activations.
# 4. With a bias added before the sum, or f forgotten or run forward, the loss still falls. The
#    oracle catches all three.
# 5. Every block waits for its all-reduces. Two nodes spend more GPU time on it than one, so tensor
#    parallelism belongs where the link is fastest: inside a node.
#
# ## Exercises
#
# Write your answers into `exercises/ch07_tensor_parallel.py`, save, and run the cell. In a
# terminal, `minitron hint 7.1` gives hints in three steps.
#
# - [**7.1 f and g**](exercise:7.1) (15 minutes): two autograd functions that mirror each other.
# - [**7.2 Row-parallel linear**](exercise:7.2) (20 minutes): partial sums, one all-reduce, a bias
#   that counts once.
# - [**7.3 Sharded logits**](exercise:7.3) (25 minutes): the loss of logits that no rank holds in
#   full.
# - [**7.4 Heads for every rank**](exercise:7.4) (30 minutes): even with fewer key-value heads
#   than ranks.

# %%
check("7.1")

# %%
check("7.2")

# %%
check("7.3")

# %%
check("7.4")

# %% [markdown]
# ## Further reading
#
# - Shoeybi et al., [*Megatron-LM*](https://arxiv.org/abs/1909.08053), 2019, section 3: most of
#   this chapter in three pages.
# - Narayanan et al., [*Efficient Large-Scale Language Model Training on GPU
#   Clusters*](https://arxiv.org/abs/2104.04473), 2021, sections 3.2 (the volume) and 5.4 (where
#   tensor parallelism pays).
# - Korthikanti et al., [*Reducing Activation Recomputation*](https://arxiv.org/abs/2205.05198),
#   2022, sections 4.1 and 4.2: what is still replicated on every rank.
# - Ainslie et al., [*GQA*](https://arxiv.org/abs/2305.13245), 2023, section 2.2: heads that share
#   keys and values.
# - Wang et al., [*Overlap Communication with Dependent
#   Computation*](https://doi.org/10.1145/3567955.3567959), 2023: async tensor parallelism.
