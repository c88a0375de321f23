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
# # Tensor parallelism: cut the layer itself
#
# **50 minutes. No GPU. Exercises 7.1 to 7.4.**
#
# *You need:* chapter 2's activations, chapter 5's all-reduce and what it sends, chapter 6's
# question what a rank holds, and attention with heads.
#
# *You will be able to:*
# - **cut** a matrix product in the two possible ways, and put two products together so that one sum
#   over the ranks is all they need;
# - **predict** what a rank holds and sends, to the byte, and when a link eats the gain;
# - **catch** a bias that is added too often and a sum that stands in the wrong pass.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minitron import cost
from minitron.comm.differentiable import start_all_gather, start_all_reduce
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.model.linear import LinearFunction
from minitron.config import ConfigError, ModelConfig

# %%
from teaching.check import check
from teaching.figures import Matrix, cut, memory_bars, rank_lanes, show, timeline, wire
from teaching.widgets import tensor_explorer
from minitron.measure.ledger import Ledger, merged
from minitron.measure.meter import Meter
from minitron.parallel.one_device import OneDevice
from minitron.proof.oracle import assert_same_training, small_model
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.tensor.cuts import PLAN, require_sizes
from minitron.parallel.tensor.layers import (
    RowParallelLinear, TensorParallel, AllReduceExchange, apply_tensor_parallel,
)

# %%
from minitron.parallel.tensor.vocabulary import (
    VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy,
)
from minitron.plan.hardware import DEVICES

torch.set_num_threads(1)
GB, MB = 1e9, 1e6
H100 = DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# GPT-3: 96 layers, 175 billion parameters, sequences of 2,048 tokens. ZeRO stage 3 divides the
# training state over 1,024 GPUs. Each reads one sequence, less is not possible. Does it fit?

# %% tags=["output-question", "nbval-check-output"]
gpt3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200)  # padded, to divide by 8
S_gpt3, L_gpt3 = gpt3.max_sequence_length, gpt3.num_layers
unit = 2 * cost.num_block_parameters(gpt3)
parts = {
    "a 1,024th of the training state": cost.zero_bytes(cost.num_parameters(gpt3), 1024, 3),
    "two layers whole, parameters and gradients": 2 * (unit + unit),
    "the activations of one sequence": cost.activation_bytes(gpt3, 1, S_gpt3),
}
for name, size in (parts | {"together": sum(parts.values())}).items():
    print(f"{name:42} {size / GB:6.1f} GB")
print(f"an H100 has {H100.memory_bytes / GB:.0f} GB")

# %% [markdown]
# Two layers are whole: this one and the prefetched next (chapter 6). It does not fit on 1,024 GPUs,
# and not on a million: two of the three numbers do not depend on how
# many there are. Recomputation would shrink the last one, for a third more compute (chapter 3). And
# there is a second wall. A step of GPT-3's training read 3.2 million tokens (Brown et al. 2020,
# table 2.1).

# %% tags=["output-wall", "nbval-check-output"]
print(f"{3_200_000 // S_gpt3:,} sequences: at most so many GPUs can read one each")

# %% [markdown]
# Data parallelism ends where a rank has one sequence and one layer. To go on, several GPUs must
# compute one layer of one sequence *together*.

# %% [markdown]
# ## 2. Estimate
#
# Say N ranks share every layer, and each computes an N-th of it. What would be an N-th, and what
# would not?
#
# **Predict.** With N = 8, by which factor do a rank's parameters, its products, its activations
# shrink? And what is new on the wire?

# %% tags=["output-estimate", "nbval-check-output"]
D_gpt3 = gpt3.width
print("N   parameters   activations of a layer   sent per layer and sequence")
for N in (1, 2, 4, 8):
    layout = cost.Layout(tensor_parallel=N)
    parameters = 2 * cost.tensor_parallel_parameters(gpt3, N)
    activations = cost.activation_bytes_per_layer(gpt3, 1, S_gpt3, layout=layout)
    sent = cost.tensor_parallel_volume(1, S_gpt3, D_gpt3, 2, 0, layout).sent
    print(f"{N} {parameters / GB:9.1f} GB {activations / MB:17.0f} MB {sent / MB:17.0f} MB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Parameters and products: by 8, nearly. Activations: not even by 3, for what lies *between* the cut
# layers is still whole on every rank. On the wire: activations, forward and backward, in every
# layer, and none of it can wait for the end of the step.
#
# </details>
#
# The rest of the chapter finds out where these numbers come from. It begins with one product.

# %% [markdown]
# ## 3. Picture
#
# $Y = X A$, on two ranks. There are two ways to cut $A$, by columns and by rows.


# %%
def two_ways():
    X = Matrix("X", "S x D", 1.2, 1)
    columns = [X, "x", Matrix("A", "D x F/2", 1, 1.8, columns=(0, 1)),
               "=", Matrix("Y", "S x F/2", 1.2, 1.8, columns=(0, 1))]
    rows = [Matrix("X", "S x D/2", 1.2, 1, columns=(0, 1)), "x",
            Matrix("A", "D/2 x F", 1, 1.8, rows=(0, 1)), "=",
            Matrix("Y", "S x F", 1.2, 1.8, sum_of=(0, 1)),
            "all-reduce", Matrix("Y", "S x F", 1.2, 1.8)]
    return cut({"by columns: each rank computes some columns of Y": columns,
                "by rows: each rank computes a summand of Y": rows})


# %% tags=["figure-ways"]
show(two_ways(), alt=(
    "Cut by columns, A needs all of X and gives some columns of Y; cut by rows, it needs some "
    "columns of X and gives a summand of Y, which an all-reduce completes."
))

# %% [markdown]
# Look at what goes in and what comes out. By columns: whole in, cut out. By rows: cut in, a summand
# out. **Predict.** A feed-forward is two products with GELU between them. In which order do you cut
# them?

# %% [markdown]
# ## 4. By hand
#
# Small matrices, and two ranks that each take a part.

# %%
S, D, W, H, K = 6, 8, 32, 4, 2  # tokens, width, feed-forward width, heads, head width
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
X, up, down = random(S, D), random(D, W) / D**0.5, random(W, D) / W**0.5


def own(tensor, dim, group):
    """This rank's part of a tensor, cut along `dim`."""
    return tensor.chunk(group.size(), dim)[group.rank()]


# %%
def by_columns(group):
    return X @ own(up, 1, group)


def by_rows(group):
    return own(X, 1, group) @ own(up, 0, group)


def off(result, expected):
    """The largest error."""
    return (result - expected).abs().max().item()


# %% tags=["output-ways"]
columns, summands = run(by_columns, 2), run(by_rows, 2)
print(f"columns   each rank has {tuple(columns[0].shape)}, side by side "
      f"off by {off(torch.cat(columns, 1), X @ up):.0e}")
print(f"summands  each rank has {tuple(summands[0].shape)}, added        "
      f"off by {off(sum(summands), X @ up):.0e}")

# %% [markdown]
# ### GELU between two products
#
# The columns are finished numbers. A summand is not a number of Y at all. **Predict.** What would
# GELU do to it?

# %% tags=["output-gelu"]
gelu = F.gelu(X @ up)
joined = torch.cat([F.gelu(part) for part in columns], 1)
added = sum(F.gelu(part) for part in summands)
print(f"GELU of the columns, side by side  off by {off(joined, gelu):.0e}")
print(f"GELU of the summands, added        off by {off(added, gelu):.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# $\mathrm{GELU}(a + b)$ is not $\mathrm{GELU}(a) + \mathrm{GELU}(b)$. Summands would have to be
# added before GELU: an all-reduce, and of the widest tensor of the block. Columns need nothing from
# anybody.
#
# </details>
#
# So: the first matrix by columns. What comes out is cut as the second matrix needs it if that is
# cut by rows. Between the two nobody talks, and one all-reduce at the end makes the sum.


# %%
def feed_forward_cut():
    return cut({"up by columns, down by rows": [
        Matrix("X", "S x D", 1.2, 1), "x", Matrix("up", "D x F/2", 1, 1.8, columns=(0, 1)), "GELU",
        Matrix("hidden", "S x F/2", 1.2, 1.8, columns=(0, 1)), "x",
        Matrix("down", "F/2 x D", 1.8, 1, rows=(0, 1)), "=",
        Matrix("Y", "S x D", 1.2, 1, sum_of=(0, 1)), "all-reduce", Matrix("Y", "S x D", 1.2, 1),
    ]})


# %% tags=["figure-pair"]
show(feed_forward_cut(), alt=(
    "Columns, then rows: the hidden layer stays cut, and one all-reduce of the small output is all."
))

# %% [markdown]
# ### Forward and backward
#
# On each rank the layer is an ordinary layer, only narrower, and autograd knows its gradients. What
# has to be added by hand stands in two lines.
#
# **Predict.** All ranks have the same gradient of Y, since from Y on they compute the same. Of the
# gradients of X, `up` and `down`: which are whole, which are parts, which are summands?


# %%
def feed_forward(x, up, down):
    return F.gelu(x @ up) @ down


def with_gradients(layer, x, weights):
    """The layer's output, and the gradients of x and of all weights, for the gradient dY."""
    x, *weights = (tensor.clone().requires_grad_() for tensor in (x, *weights))
    y = layer(x, *weights)
    return [y.detach(), *torch.autograd.grad(y, (x, *weights), dY)]


dY = random(S, D)


# %%
def together(group, layer, *weights):
    """All weights but the last by columns, the last by rows: what this rank has in the end."""
    parts = [own(weight, 1, group) for weight in weights[:-1]]
    parts += [own(weights[-1], 0, group)]
    y, dx, *grads = with_gradients(layer, X, parts)
    dist.all_reduce(y, group=group)
    dist.all_reduce(dx, group=group)
    return y, dx, *grads


# %%
def compare_with_one(layer, *weights, N=2):
    whole = with_gradients(layer, X, weights)
    y, dx, *first, last = zip(*run(together, N, layer, *weights), strict=True)  # each by rank
    joined = [torch.cat(parts, 1) for parts in first] + [torch.cat(last, 0)]
    errors = [max(off(on_rank, right) for on_rank in by_rank)
              for by_rank, right in zip((y, dx), whole[:2], strict=True)]
    print(f"{layer.__name__:12} on {N} ranks, off by: Y {errors[0]:.0e}, dX {errors[1]:.0e}, "
          f"weights {max(map(off, joined, whole[2:])):.0e}")


# %% tags=["output-pair"]
for N in (2, 4):
    compare_with_one(feed_forward, up, down, N=N)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Each rank has the gradient of its own part of `up` and `down`, finished, and sends none of it. The
# gradient of X is a summand: every rank has used X, and knows what X did to its own columns.
#
# </details>
#
# One all-reduce where the region ends, in the forward pass; one where it begins, in the backward
# pass. Megatron calls the two places g and f (Shoeybi et al. 2019, section 3):
#
# | | forward | backward |
# |---|---|---|
# | f, where X goes in | nothing | all-reduce |
# | g, where Y comes out | all-reduce | nothing |

# %% [markdown]
# ### Heads
#
# Attention has four matrices: query, key, value, out. Between the first three and the last stands
# the attention itself. A head reads the columns of its own query, key and value, and no other's.
#
# **Predict.** What must be changed in `together`?


# %%
def attention(x, query, key, value, out):
    """Causal attention of x (S, D) by as many heads as the matrices have columns for."""
    q, k, v = ((x @ matrix).unflatten(-1, (-1, K)).transpose(0, 1)[None]  # (1, H, S, K)
               for matrix in (query, key, value))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1) @ out


query, key, value, out = random(4, D, D) / D**0.5

# %% tags=["output-heads"]
for N in (2, 4):
    compare_with_one(attention, query, key, value, out, N=N)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Nothing. Columns of query, key and value are heads, rows of out are the same heads. What stands
# between the two products, GELU or attention, needs no column of another rank.
#
# </details>
#
# ### Fewer key-value heads than ranks
#
# Llama 3.1 70B has fewer key-value heads than query heads. Each is read by several of them.

# %% tags=["output-grouped-heads", "nbval-check-output"]
llama_70b = cost.PUBLISHED["Llama 3.1 70B"]
print(f"{llama_70b.num_heads} query heads, {llama_70b.num_kv_heads} key-value heads")

# %% [markdown]
# On 16 ranks a key-value head would have to be halved. It is held twice instead.


# %%
def grouped_queries():
    ranks, pairs, X = (0, 1, 2, 3), ((0, 1), (2, 3)), Matrix("X", "S x D", 1.2, 1)
    return cut({
        "4 query heads on 4 ranks: one each":
            [X, "x", Matrix("query", "D x K", 1, 1.8, columns=ranks), "=",
             Matrix("queries", "S x K", 1.2, 1.8, columns=ranks)],
        "2 key-value heads on 4 ranks: each is held twice":
            [X, "x", Matrix("key", "D x K", 1, 1.8, columns=pairs), "=",
             Matrix("keys", "S x K", 1.2, 1.8, columns=pairs)],
    })


# %% tags=["figure-grouped"]
show(grouped_queries(), alt=(
    "Of four ranks each has a query head of its own, and two neighbors hold the same key-value "
    "head."
))

# %% [markdown]
# **Predict.** Ranks 0 and 1 hold the same key matrix. After the backward pass, is its gradient the
# same on both, and is it right?

# %%
G = 2
keys, values = random(D, G * K) / D**0.5, random(D, G * K) / D**0.5


def key_gradient(group):
    """Which key-value head this rank holds, and the gradient of its key matrix."""
    mine = group.rank() * G // group.size()  # the one that this rank's query head reads
    parts = [own(query, 1, group), keys.chunk(G, 1)[mine], values.chunk(G, 1)[mine],
             own(out, 0, group)]
    return mine, with_gradients(attention, X, parts)[3]


# %% tags=["output-grouped"]
by_rank = run(key_gradient, 4)
right = with_gradients(attention, X, (query, keys, values, out))[3].chunk(G, 1)
print("rank  head   its gradient off by   sum over the holders of the head off by")
for rank, (mine, grad) in enumerate(by_rank):
    total = sum(other for head, other in by_rank if head == mine)
    print(f"{rank:4} {mine:5} {off(grad, right[mine]):21.0e} {off(total, right[mine]):41.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Neither. A key-value head serves several query heads, and each rank has seen the gradient that
# comes through its own query head. The sum is right. Without it the two copies would drift apart,
# and what is called one matrix would be two.
#
# </details>
#
# So here, once a step, the ranks that hold the same head sum its gradient.

# %% [markdown]
# ### The vocabulary
#
# Two matrices are left, at the ends of the model: embedding and head. **Predict.** Llama 3.1 has
# more than a hundred thousand tokens in its vocabulary. How large are the logits of one sequence of
# several thousand tokens in float32, in which losses are computed?

# %% tags=["output-logits", "nbval-check-output"]
V_llama, S_llama = llama_70b.vocab_size, llama_70b.max_sequence_length
logits_bytes = 4 * S_llama * V_llama
print(f"{V_llama:,} tokens in the vocabulary, {S_llama:,} in a sequence")
print(f"{logits_bytes / GB:.1f} GB, and as much again for each tensor derived from them")
print(f"cut over 8 ranks: {logits_bytes / 8 / GB:.1f} GB")

# %% [markdown]
# These must not be put together on one rank, not even for a moment. Embedding and head are cut by
# tokens: a rank has the rows of the embedding for some of them, and their columns of the head.


# %%
def vocabulary_cut():
    x = Matrix("X", "S x D", 1.2, 1)
    return cut({
        "in: each rank looks up the tokens that it has": [
            Matrix("tokens, one-hot", "S x V/2", 1.2, 1.8, columns=(0, 1)), "x",
            Matrix("embedding", "V/2 x D", 1.8, 1, rows=(0, 1)), "=",
            Matrix("X", "S x D", 1.2, 1, sum_of=(0, 1)), "all-reduce", x],
        "out: each rank computes the logits of the tokens that it has": [
            x, "x", Matrix("head", "D x V/2", 1, 1.8, columns=(0, 1)), "=",
            Matrix("logits", "S x V/2", 1.2, 1.8, columns=(0, 1)), "all-reduce\nof 3 x S",
            Matrix("loss", "S", 1.2, 0.4)],
    })


# %% tags=["figure-vocabulary"]
show(vocabulary_cut(), alt=(
    "The embedding is cut by rows and summed; the head by columns, and of the logits only three "
    "numbers a token leave the rank."
))

# %% [markdown]
# How can a rank compute the loss without the others' logits? The loss of a token is
#
# $$\log \sum_v e^{z_v} - z_{\mathrm{target}}$$
#
# a sum over the vocabulary, and one logit that one rank has. **Predict.** Which numbers must a rank
# tell the others, so that they can put the loss together, and no exponential overflows?


# %%
V = 10
logits, targets = 100 * random(S, V).float(), torch.tensor([3, 9, 0, 5, 4, 7])


def three_numbers(group):
    """For each token: the largest logit here, the sum of exp(logit - it), the target's logit."""
    part = own(logits, 1, group)  # (S, V/N)
    tokens = torch.arange(V).chunk(group.size())[group.rank()]
    largest = part.amax(1)
    exponentials = (part - largest[:, None]).exp().sum(1)
    return largest, exponentials, (part * (tokens == targets[:, None])).sum(1)


# %% tags=["output-loss"]
largest, sums, known = map(torch.stack, zip(*run(three_numbers, 2), strict=True))
top = largest.amax(0)
total = (sums * (largest - top).exp()).sum(0)  # each rank's sum, counted from the same top
loss = (top + total.log() - known.sum(0)).sum()
print(f"from three numbers a token and rank  {loss:.2f}")
print(f"from all logits                      "
      f"{F.cross_entropy(logits, targets, reduction='sum'):.2f}")
print(f"without subtracting the largest      {logits.exp().sum(1).log().sum():.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The largest of its logits, the sum of the exponentials of how far the others are below it, and the
# target's logit, 0 if another rank has it. In the backward pass nothing is sent: a rank knows the
# top and the total, and so the probability of each of its tokens, which is the gradient but for a 1
# at the target.
#
# </details>

# %% [markdown]
# ## 5. The trap
#
# ### A bias that is added on every rank
#
# GPT's linear layers have biases. A column layer adds those of its columns. Would you let this row
# layer pass?


# %%
class BiasFirst(RowParallelLinear):
    def forward(self, x):
        return self.exchange.reduce(F.linear(x, self.weight, self.bias))


def bias_first(model, group):
    """The package's tensor parallelism, with another forward in the row layers."""
    parallel = apply_tensor_parallel(model, group)
    for layer in model.modules():
        if type(layer) is RowParallelLinear:
            layer.__class__ = BiasFirst
    return parallel


# %% [markdown]
# A training of twenty steps, on a task with an answer: the next token is the last one plus 7.

# %%
SIZES = {"vocab_size": 36, "width": 24, "num_heads": 12, "num_kv_heads": 12, "ffn_width": 96,
         "max_sequence_length": 12}
small_gpt = partial(small_model, "gpt", **SIZES)


def counting_rows(step, vocabulary=36):
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(vocabulary, (16, 1), generator=generator)
    return (first + 7 * torch.arange(9)) % vocabulary


def loss_of(model, parallel, rows):
    tokens, targets = rows[:, :-1], rows[:, 1:]
    return parallel.summed_loss(model(tokens), targets) / targets.numel()


# %%
def train(group, apply, num_steps=20):
    """Each step's loss, and in the end the parameters that every rank holds whole."""
    model, losses = small_gpt(), []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, parallel, counting_rows(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().flatten() for name, parameter
                              in model.named_parameters() if parallel.cuts[name].count == 1])


# %%
def report(*applies, N=2):
    """Train with each, and print what a careful person would look at."""
    print("                 loss: first      second     last     ranks alike")
    for apply in (apply_tensor_parallel, *applies):
        losses, whole = zip(*run(train, N, apply, watch=False), strict=True)
        alike = all(torch.equal(whole[0], other) for other in whole)
        print(f"{apply.__name__:22} {losses[0][0]:.6f} {losses[0][1]:11.6f} "
              f"{losses[0][-1]:8.2f}     {alike}")


# %% [markdown]
# **Predict.** Biases start at zero. In which step does one see the mistake? In the loss, or in what
# the ranks hold?

# %% tags=["output-bias"]
report(bias_first)


# %% [markdown]
# <details><summary>Answer</summary>
#
# The first loss is right to the last digit, for N times zero is zero. The first gradients are right
# too. From the second step on the model has N times its biases, on all ranks alike, and it learns
# with them. What is trained depends on the number of ranks, and a checkpoint of it is wrong on any
# other number.
#
# </details>
#
# The oracle starts from biases that are not zero:


# %%
def verdict(apply, N, make_model=small_gpt):
    try:
        assert_same_training(apply, N, make_model, vocabulary=36, sequence=12)
        return "the same training"
    except AssertionError as error:
        return str(error)


# %% tags=["output-bias-oracle"]
print(verdict(bias_first, 2))

# %% [markdown]
# It is the classic bug of this technique; PaddlePaddle had it (pull request 35186), and Slapo
# (issue 10). The package adds the bias of a row layer after the sum.
#
# ### The all-reduce in the wrong pass
#
# f does nothing in the forward pass, so one can forget it, and the forward pass is right. Or one
# knows that there is an all-reduce where X goes in, and lets it run forward:


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
# **Predict.** For each of the two: is the first loss right? Do the ranks stay alike? Does the model
# learn?

# %% tags=["output-direction"]
report(f_forgotten, f_runs_forward)

# %% tags=["output-direction-oracle"]
for apply in (f_forgotten, f_runs_forward):
    print(f"{apply.__name__}\n  {verdict(apply, 2)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Without f every number of the forward pass is right. But each rank goes back with the gradient
# that its own columns know of, so what is held whole, norms and row biases, moves differently on
# each rank. That they are not alike can be seen, if one looks. With f forward, X is in addition N
# times too large in front of every layer. The model learns around it, and here its loss is even the
# lowest of the three: a loss that falls proves nothing.
#
# </details>
#
# torchtitan's experts had the first one: the gradient of their input was this rank's summand (issue
# 1805). There is a third variant. Why does g do *nothing* in the backward pass, when PyTorch's own
# `torch.distributed.nn.functional.all_reduce` sums there once more (Megatron-LM's issue 559)? That
# function answers another question: what if each rank had a loss of its own, and all of them
# counted? Here all ranks have the same loss, and it counts once.

# %% [markdown]
# ## 6. The real one
#
# Which layers are cut, and how, is a table. The model itself does not know of it.

# %% tags=["output-plan", "nbval-check-output"]
for path, kind in PLAN.items():
    print(f"{path:26} {kind}")

# %% [markdown]
# Query, key and value read the same X, and so do gate and up. Their input gradients are one sum.
# One autograd function computes such layers together. What depends on the parallelism is in its
# `parts`: `exchange` is what the ranks send each other. **Find** the line where the all-reduce
# starts, the one that waits for it, and what is computed in between.

# %%
print(inspect.getsource(LinearFunction.backward))

# %% [markdown]
# `wait_for_grad_x()` stands in the last line. The weights' gradients, `second_half`, need no sum,
# so they are computed while it travels. (`second_half.start()` does nothing here; it is for the
# next chapter. `deferral` is for chapter 9.) And the two ends:

# %%
print(inspect.getsource(RowParallelLinear))
print(inspect.getsource(VocabularyParallelEmbedding))

# %% [markdown]
# The oracle, for both families, with a tied embedding (GPT) and with two key-value heads (Llama):

# %%
small_llama = partial(small_model, "llama", **SIZES | {"num_kv_heads": 2})
CASES = [(small_gpt, 2), (small_gpt, 3), (small_llama, 4)]

# %% tags=["output-oracle", "nbval-check-output"]
for make_model, N in CASES:
    print(f"{make_model.args[0]:5} on {N} ranks: {verdict(apply_tensor_parallel, N, make_model)}")

# %% [markdown]
# Cuts that do not come out even are refused before anything is cut:

# %% tags=["output-refused", "nbval-check-output"]
try:
    require_sizes(small_gpt().config, 5)
except ConfigError as error:
    print(error)

# %% [markdown]
# One thing must *differ* between ranks that do the same: dropout inside attention, where each has
# other heads. Everywhere else it must be the same, or the ranks would part.
#
# ## 7. Measure
#
# ### What is sent
#
# A GPT with blocks of width 96. The ledger sees one step.

# %%
B, S = 2, 48


def shape_of(num_layers):
    return ModelConfig("gpt", 192, S, num_layers, 96, 12, 12, 384)


def prepare(group, config):
    model = Transformer(config)
    initialize(model, seed=0)
    alone = group.size() == 1
    return model, OneDevice(model) if alone else apply_tensor_parallel(model, group)


# %%
rows = torch.randint(192, (B, S + 1), generator=torch.Generator().manual_seed(0))


def measured(group, num_layers):
    """What is held when the most activations are, and the calls of one step."""
    model, parallel = prepare(group, shape_of(num_layers))
    step = lambda: (loss_of(model, parallel, rows).backward(), parallel.finish())  # noqa: E731
    step()
    with Meter(model) as meter:
        step()
    with Ledger() as ledger:
        step()
    return max(meter.timeline, key=lambda m: m.bytes["activation"]).bytes, ledger.calls


# %%
results = {(N, L): run(measured, N, L, watch=False) for N, L in
           ((1, 3), (2, 1), (2, 3), (4, 1), (4, 3))}

# %% tags=["output-calls", "nbval-check-output"]
print(merged([calls for _, calls in results[4, 3]]))

# %% [markdown]
# Four ranks, three blocks. **Predict.** Account for the calls: 9 in the forward pass, 7 in the
# backward pass.
#
# <details><summary>Answer</summary>
#
# Two per block and pass: behind attention and behind the feed-forward, and on the way back in front
# of them. One for the embedding in the forward pass, one for the head in the backward pass. And the
# loss sends twice: the largest logits, then the sums with the targets' logits.
#
# </details>
#
# An all-reduce of n numbers sends $2\,\frac{N-1}{N}\,n$. Four of B S D numbers per block and
# micro-batch make
#
# $$8\,B S D\,\frac{N-1}{N}$$
#
# (Narayanan et al. 2021, section 3.2, there $8bsh\frac{t-1}{t}$). To see what a block sends,
# compare three blocks with one. The rest belongs to the ends: embedding and head, together half a
# block, and the loss.


# %%
def sent_by(N, L):
    return [sum(call.sent for call in calls) for _, calls in results[N, L]]


measured_bytes, formula = {}, {}
for N in (2, 4):
    one_block, three_blocks = (sent_by(N, L) for L in (1, 3))
    of_block = [(b - a) // 2 for a, b in zip(one_block, three_blocks, strict=True)]
    of_ends = [a - b for a, b in zip(one_block, of_block, strict=True)]
    measured_bytes |= {f"a block, {N} ranks": of_block, f"the ends, {N} ranks": of_ends}
    by_rank = [(B, S, 96, 4, rank, cost.Layout(N)) for rank in range(N)]
    formula |= {
        f"a block, {N} ranks": [cost.tensor_parallel_volume(*a).sent for a in by_rank],
        f"the ends, {N} ranks": [cost.vocabulary_parallel_volume(*a).sent for a in by_rank],
    }

# %% tags=["figure-wire"]
print("ledger and formula agree to the byte:", measured_bytes == formula)
show(wire(measured_bytes, formula), alt=(
    "What a block and what embedding, head and loss send: the ledger's bytes are the formula's."
))

# %% [markdown]
# ### A claim
#
# One can read that tensor parallelism puts its parts together with an *all-gather*, in place of the
# all-reduce of data parallelism. The table above has no all-gather in it. Could one build it so?
# Cut both matrices by columns, and gather after each:


# %%
def columns_then_rows(group):
    y = F.gelu(X @ own(up, 1, group)) @ own(down, 0, group)
    dist.all_reduce(y, group=group)
    return y


def columns_twice(group):
    hidden = start_all_gather(F.gelu(X @ own(up, 1, group)), group, 1)()
    return start_all_gather(hidden @ own(down, 1, group), group, 1)()


def on_the_wire(group, layer):
    with Ledger() as ledger:
        y = layer(group)
    return off(y, feed_forward(X, up, down)), ledger.calls


# %% [markdown]
# **Predict.** The feed-forward is four times as wide as the model. Which sends more, and by which
# factor?

# %% tags=["output-claim"]
for layer in (columns_then_rows, columns_twice):
    error, calls = run(on_the_wire, 4, layer)[0]
    print(f"{layer.__name__:18} {sum(call.sent for call in calls):5,} bytes, off by "
          f"{error:.0e}: {', '.join(call.op for call in calls)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# An all-gather sends half of what an all-reduce of the same tensor sends. But the hidden layer is
# four times as wide: 4 + 1 against 2, and then it is whole on every rank.
#
# </details>
#
# So the claim is wrong for this chapter's layers, and a poor plan. There is a truth near it: an
# all-reduce is a reduce-scatter *and* an all-gather (chapter 5), and the next chapter puts
# something between the two.
#
# ### What is held
#
# The meter took its measure when the most activations were held. The formulas are those of section
# 2, in float32.

# %%
held = {f"{N} ranks" if N > 1 else "1 rank": results[N, 3][0][0] for N in (1, 2, 4)}
kinds = ("parameter", "gradient", "activation")
held = {name: {kind: bytes[kind] for kind in kinds} for name, bytes in held.items()}
predicted = {}
for N, name in zip((1, 2, 4), held, strict=True):
    parameters = 4 * cost.tensor_parallel_parameters(shape_of(3), N)
    activations = cost.activation_bytes(shape_of(3), B, S, 4, layout=cost.Layout(N))
    sizes = parameters, parameters, activations
    predicted[f"{name}, formula"] = dict(zip(kinds, sizes, strict=True))

# %% tags=["figure-held"]
print(" " * 12 + "".join(f"{name + ', kB and off by':>26}" for name in held))
for kind in kinds:
    print(f"{kind:12}" + "".join(
        f"{kinds_held[kind] / 1e3:17,.1f} {kinds_held[kind] / formula[kind] - 1:8.2%}"
        for kinds_held, formula in zip(held.values(), predicted.values(), strict=True)))
show(memory_bars(held, predicted), alt=(
    "Parameters and gradients shrink nearly by the number of ranks, activations by less; formula "
    "and meter agree."
))

# %% [markdown]
# ### The logits
#
# A head with 12,288 tokens, 256 tokens of input, four ranks. The meter looks at two losses: one
# that gathers the logits and does the usual thing, and the package's.

# %%
V, tokens = 12_288, 256


def gathered_loss(part, targets, group):
    """From all logits, on every rank."""
    whole = start_all_gather(part.detach(), group, 1)().requires_grad_()
    loss = F.cross_entropy(whole, targets, reduction="sum")
    return loss, own(*torch.autograd.grad(loss, whole), 1, group)


def cut_loss(part, targets, group):
    """From the logits of this rank, and three numbers a token."""
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
    logits_at_peak = [t for t in meter.peak.tensors if t.category != "parameter"]
    return loss.detach(), grad, sum(t.bytes for t in logits_at_peak), logits_at_peak[0].shape


# %% [markdown]
# **Predict.** All logits are 12.6 MB. What does a rank hold of them at the peak, with each loss?

# %% tags=["output-vocabulary"]
losses = gathered_loss, cut_loss
of_gathered, of_cut = (run(at_the_head, 4, loss, watch=False)[0] for loss in losses)
print(f"all logits        {4 * V * tokens / MB:5.1f} MB")
for loss, (_, _, peak, shape) in zip(losses, (of_gathered, of_cut), strict=True):
    print(f"{loss.__name__:16}  {peak / MB:5.1f} MB at the peak, largest tensor {shape}")
print(f"the losses differ by {abs(of_gathered[0] / of_cut[0] - 1):.0e}, "
      f"their gradients by {off(of_gathered[1], of_cut[1]):.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# With gathering: all logits, and further tensors of that size, namely their log-probabilities and
# the gradient, beside this rank's own part. Cut: a few tensors of a quarter of that size. No tensor
# has 12,288 columns.
#
# </details>
#
# ### What eight ranks do not divide
#
# **Predict.** GPT-3 on 8 ranks: is it an eighth of the parameters? What is it in addition, and how
# much of the whole?

# %% tags=["output-undivided", "nbval-check-output"]
whole, N = cost.num_parameters(gpt3), 8
each = cost.tensor_parallel_parameters(gpt3, N)
undivided = (N * each - whole) // (N - 1)  # whole on each rank
biases = L_gpt3 * 2 * D_gpt3  # of out and down
norms = (2 * L_gpt3 + 1) * cost.num_norm_parameters(gpt3)
print(f"each rank holds {each / whole:.4%} of the parameters, an eighth is {1 / N:.4%}")
print(f"undivided: {undivided:,} = {biases:,} row biases + {norms:,} of the norms "
      f"+ {S_gpt3 * D_gpt3:,} of the positions: {undivided == biases + norms + S_gpt3 * D_gpt3}")
print(f"that is {undivided / whole:.3%} of the whole")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Norms, biases of the row layers, learned positions. Of the parameters that is next to nothing. Of
# the activations what lies between the cut layers is most of what is left, as section 2 has shown.
#
# </details>
#
# ### What overlaps
#
# In the forward pass nothing can be computed while an all-reduce runs: the next layer needs its
# result. In the backward pass there are the weights' gradients. Two ranks, and a slow network:
# `SlowNetwork` is an **emulation**. The transfer happens, and whoever waits for it sleeps until a
# link of that latency and bandwidth would have delivered.


# %%
class Waiting(AllReduceExchange):
    """Waits for the sum of the input gradients, and goes on then."""

    def start_reduce(self, grad_partial):
        total = super().start_reduce(grad_partial)()
        return lambda: total


wide = ModelConfig("gpt", 256, 128, 1, 768, 4, 4, 3072)
wide_rows = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(0))


# %%
NUM_ROWS = {"up": 3072 // 2, "query, key, value": 3 * 768 // 2, "head": 256 // 2}  # on a rank


def weight_gradient_seconds(group, num_tokens=512):
    """The fastest of some products that give the gradient of each weight."""
    fastest = dict.fromkeys(NUM_ROWS, float("inf"))
    for name, num_rows in 10 * [*NUM_ROWS.items()]:
        grad, x = torch.ones(num_tokens, num_rows), torch.ones(num_tokens, 768)
        begin = time.perf_counter()
        grad.T @ x
        fastest[name] = min(fastest[name], time.perf_counter() - begin)
    return fastest


meanwhile = run(weight_gradient_seconds, 2, watch=False)[0]

# %% [markdown]
# We choose a bandwidth at which an all-reduce takes as long as the gradient of `up`. In the
# backward pass there are three: for the inputs of the head, of `up`, of query, key and value.
# **Predict.** How long does the backward pass stand still, if it waits for each sum, and if it does
# not?


# %%
transfer = meanwhile["up"]
network = 0.0, 4 * 512 * 768 / transfer  # two ranks send 2 x 1/2 of the sum


# %%
def backward_of(events):
    return [event for event in events if event.phase == "backward"]


def standstill(calls, spans):
    """Seconds that the backward pass waits for the link; for a late rank they do not count."""
    total = 0.0
    gaps = pairwise(backward_of(spans))
    for call, (before, after) in zip(backward_of(calls), gaps, strict=True):
        late = max(0, call.finished - call.started - transfer)
        total += max(0, after.start - before.end - late)
    return total


# %%
def fastest_step(group, exchange, num_steps=8):
    """Calls and spans of the fastest of some steps, without the optimizer's."""
    model, steps = Transformer(wide), []
    initialize(model, seed=0)
    parallel = TensorParallel(model, exchange(group))
    for _ in range(num_steps):
        dist.barrier(group)
        with SlowNetwork(*network), Ledger() as ledger:
            loss_of(model, parallel, wide_rows).backward()
        steps.append((ledger.calls, ledger.spans))
    return min(steps, key=lambda step: step[1][-1].end - step[1][0].start)


# %% tags=["output-overlap"]
expected = {Waiting: 3 * transfer,
            AllReduceExchange: sum(max(0, transfer - seconds) for seconds in meanwhile.values())}
by_way = {way: run(fastest_step, 2, way, watch=False)[0] for way in expected}
print(SlowNetwork(*network))
print("the backward pass stands still: predicted   measured")
for way, seconds in expected.items():
    print(f"{way.__name__:15} {1e3 * seconds:23.1f} ms {1e3 * standstill(*by_way[way]):7.1f} ms")

# %% tags=["figure-overlap"]
lanes = {}
for name, way in (("waits", Waiting), ("overlaps", AllReduceExchange)):
    compute, link = rank_lanes(*([backward_of(events)] for events in by_way[way])).values()
    lanes |= {f"{name}: compute": compute, f"{name}: network": link}
show(timeline(lanes, unit="ms, its backward pass, network emulated"), alt=(
    "If the backward pass waits for each sum, compute and network take turns; otherwise the "
    "weights' gradients are computed while the sum travels."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Three transfers if it waits. Otherwise what the weight gradient of the same layers does not cover:
# nothing for `up`, a quarter for query, key and value, which have three quarters as many columns,
# and most of it for this small head. (Where other programs share the cores, compute takes longer
# than it did alone, and more is hidden.)
#
# </details>
#
# What is left exposed: the whole forward pass. The gradients of data parallelism can wait for the
# end of the step; these sums stand in the way of every single layer. That decides which link they
# need.

# %% [markdown]
# ### On real GPUs
#
# An H100 has two ways out: NVLink to the seven others of its node, and a network card to other
# nodes. (NVLink is sold as 900 GB/s, there and back together.) A layer of GPT-3, one sequence,
# compute at 40 % of the dense peak, nothing hidden. (The overlap of the last section is not for
# free on a GPU: it depends on the all-reduce being launched before the weight products. Megatron-LM
# sets CUDA_DEVICE_MAX_CONNECTIONS=1 so that kernels start in the order in which they were
# launched.)
#
# **Predict.** Eight ranks fill a node, sixteen fill two. How much faster is a layer on sixteen?

# %%
two_layers, one_layer = (
    cost.training_flops_per_token(replace(gpt3, num_layers=L), S_gpt3) for L in (2, 1)
)
layer_flops = S_gpt3 * (two_layers - one_layer)
message = 2 * S_gpt3 * D_gpt3  # bytes of each all-reduce
inside, across = cost.Link(0, H100.nvlink_bandwidth), cost.Link(0, H100.nic_bandwidth)
WAYS = {
    " 8 in one node, NVLink": (8, cost.ring_all_reduce_seconds(message, 8, *inside)),
    " 8 in eight nodes, a card each": (8, cost.ring_all_reduce_seconds(message, 8, *across)),
    "16 in two nodes, by levels": (
        16, cost.hierarchical_all_reduce_seconds(message, 8, 2, inside, across)),
    "16 in two nodes, one ring": (16, cost.ring_all_reduce_seconds(message, 16, *across)),
}

# %% tags=["output-links", "nbval-check-output"]
print(f"per direction: NVLink {inside.bandwidth / GB:.0f} GB/s, a card "
      f"{across.bandwidth / GB:.0f} GB/s; each all-reduce {message / MB:.0f} MB")
print("ranks                           compute   4 sums     layer   waiting")
for name, (N, seconds) in WAYS.items():
    compute, sums = layer_flops / N / (0.40 * H100.bf16_flops), 4 * seconds
    print(f"{name:31} {1e3 * compute:4.1f} ms {1e3 * sums:5.1f} ms "
          f"{1e3 * (compute + sums):6.1f} ms {sums / (compute + sums):9.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Far from twice. Compute is halved, the sums are not: each rank sends a little more than before,
# and a part of it goes through a link that is 9 times slower. At best the sum is taken by levels,
# inside the node first, so that all eight cards share what must cross (chapter 5). As one ring
# through one card, sixteen are slower than eight.
#
# </details>
#
# So tensor parallelism stays inside a node: N up to the number of GPUs there (Narayanan et al.
# 2021, takeaway 1). Where more GPUs hang on NVLink, N can be larger. And the question of the
# beginning? The 1,024 GPUs are now 128 groups of 8. Each group reads one sequence, and ZeRO works
# between the groups.

# %% tags=["output-answer", "nbval-check-output"]
layout = cost.Layout(tensor_parallel=8)
fits = {
    "a 128th of an 8th of the training state": cost.zero_bytes(each, 128, 3),
    "an 8th of two layers, parameters and gradients": 2 * (unit + unit) / 8,
    "the activations of one sequence": cost.activation_bytes(gpt3, 1, S_gpt3, layout=layout),
}
for name, size in (fits | {"together": sum(fits.values())}).items():
    print(f"{name:46} {size / GB:6.1f} GB")

# %% [markdown]
# It fits, with half of the memory to spare, and the wall of the batch stands eight times farther
# away. Most of what is held are activations between the layers. They are the next chapter.

# %% tags=["figure-explorer"]
tensor_explorer()

# %% [markdown]
# ## 8. Recap
#
# 1. A product can be cut by columns, whole in and cut out, or by rows, cut in and a summand out.
#    Columns, then rows: one all-reduce behind the pair, in the backward pass one in front of it.
#    GELU and attention heads stand between and need no other rank.
# 2. Embedding, head and loss are cut by tokens. Three numbers a token make the loss, and no rank
#    ever holds all logits.
# 3. A block sends $8\,BSD\,\frac{N-1}{N}$ numbers per micro-batch, all by all-reduce; a rank holds
#    nearly an N-th of the parameters, and more than that of the activations.
# 4. A bias added before the sum is right in the first step and wrong from then on; an all-reduce in
#    the wrong pass trains too, and its loss falls. The oracle sees both.
# 5. The sums stand in the way of every layer, and only the backward pass has something to compute
#    meanwhile. So tensor parallelism lives where the link is fast: inside a node.
#
# ## Exercises
#
# Write your answers into `exercises/ch07_tensor_parallel.py`, save, and run the cell. In a
# terminal, `minitron hint 7.1` gives hints in three steps.
#
# **7.1 f and g** (15 minutes): two autograd functions, each the other's mirror image.

# %%
check("7.1")

# %% [markdown]
# **7.2 Row-parallel linear** (20 minutes): partial sums, one all-reduce, a bias that counts
# once.

# %%
check("7.2")

# %% [markdown]
# **7.3 Cut vocabulary** (25 minutes): the loss of logits that nobody holds.

# %%
check("7.3")

# %% [markdown]
# **7.4 Heads for every rank** (30 minutes): also where there are fewer key-value heads than ranks.

# %%
check("7.4")

# %% [markdown]
# ## Further reading
#
# - Shoeybi, Patwary, Puri et al., *Megatron-LM: Training Multi-Billion Parameter Language Models
#   Using Model Parallelism*, 2019: section 3, all of this chapter in three pages.
# - Narayanan, Shoeybi, Casper et al., *Efficient Large-Scale Language Model Training on GPU
#   Clusters Using Megatron-LM*, 2021: section 3.2 (the volume) and 5.4 (where tensor parallelism
#   pays).
# - Korthikanti, Casper, Lym et al., *Reducing Activation Recomputation in Large Transformer
#   Models*, 2022: section 4.1 and 4.2, what is still whole on every rank.
# - Ainslie, Lee-Thorp, de Jong et al., *GQA*, 2023: section 2.2, heads that share keys and values.
