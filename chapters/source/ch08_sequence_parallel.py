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
# # Sequence parallelism: the replicated rest
#
# **45 minutes. No GPU. Exercises 8.1 to 8.4.**
#
# *You need:* chapter 7's columns and rows with one all-reduce, chapter 5's reduce-scatter and
# all-gather, and chapter 3's count of what a block keeps for its backward pass. The number of ranks
# is t here: chapter 7's N, and the code's `tp`.
#
# *You will be able to:*
# - **divide** norms, dropout and the residual stream over the ranks, with no byte more on the wire;
# - **predict** the activations of a block on each rank, and what keeping less of them costs;
# - **catch** a gradient that is a part of a sum, on ranks whose losses agree to the last bit.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import textwrap
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from minitron import cost
from minitron.comm import differentiable
from minitron.comm.collectives import all_gather_single, all_reduce, reduce_scatter_single
from minitron.launch import run
from minitron.config import ModelConfig

# %%
from teaching.check import check
from teaching.figures import Matrix, curves, cut, memory_bars, show, wire
from teaching.widgets import sequence_explorer
from minitron.measure.ledger import Ledger, merged
from minitron.measure.meter import Meter
from minitron.proof.oracle import assert_same_training, small_model
from minitron.model.linear import LinearFunction, WeightGradients
from minitron.model.recompute import apply_selective_recompute
from minitron.model.transformer import Transformer, initialize, materialized_attention

# %%
from minitron.parallel.tensor.random_regions import OwnDropout
from minitron.parallel.tensor.sequence import SequenceParallelExchange, apply_sequence_parallel
from minitron.parallel.tensor.layers import TensorParallel, apply_tensor_parallel
from minitron.plan.hardware import DEVICES

torch.set_num_threads(1)
MB, GB = 1e6, 1e9

# %% [markdown]
# ## 1. The question
#
# Cut the layers of GPT-3 over the eight GPUs of a node, as in chapter 7, and replay attention in
# the backward pass, as in chapter 3. One sequence of 2,048 tokens: what is left of its activations
# on each GPU, and how much of that is the same on all eight?
#
# Two values of the formula answer it. Let R be the bytes that stay whole, and C those that are cut.
# One GPU holds R + C, each of eight holds R + C/8.

# %% tags=["output-question", "nbval-check-output"]
gpt3, S3 = cost.PUBLISHED["GPT-3 175B"], 2048
layer_bytes = partial(cost.activation_bytes_per_layer, gpt3, 1, S3, attention="materialized")
one, eighth = (layer_bytes(recompute="selective", layout=cost.Layout(t)) for t in (1, 8))
whole = (8 * eighth - one) / 7
layers = gpt3.num_layers
print(f"all {layers} layers, on each of 8 GPUs: {layers * eighth / GB:.1f} GB of activations")
print(f"the same on all eight: {layers * whole / GB:.1f} GB, {whole / eighth:.0%} of it")

# %% [markdown]
# Tensor parallelism has divided what it cuts so well that most of what is left is what it does not
# cut: numbers that all eight GPUs have computed, and all eight hold.

# %% [markdown]
# ## 2. Estimate
#
# What does a GPT block keep for its backward pass? The list of Korthikanti et al. (2022, section
# 4.1), in 16 bits, attention replayed (B sequences, S tokens, width D, F = 4 D):
#
# | kept | bytes, times B S D | divided by t? |
# |---|---|---|
# | inputs of the two norms | 4 | ? |
# | masks of the two dropouts | 2 | ? |
# | input of query, key and value; input of up | 4 | ? |
# | query, key, value | 6 | ? |
# | input of out | 2 | ? |
# | outputs of up and of GELU | 16 | ? |
#
# **Predict.** Fill in the last column for tensor parallelism over t ranks. What is left of the 34
# at t = 8?
#
# <details><summary>Answer</summary>
#
# The last three lines are divided: they are results of columns. The first three are not. A norm
# needs all of a token's D values, the residual stream is added up whole, and every rank's columns
# read the whole input. So 34 becomes 10 + 24/t.
#
# </details>

# %% tags=["output-estimate", "nbval-check-output"]
unit = S3 * gpt3.width
print("ranks   bytes x B S D   of them on every rank   if all were divided")
for t in (1, 2, 4, 8, 16, 32):
    held = layer_bytes(recompute="selective", layout=cost.Layout(t)) / unit
    print(f"{t:5} {held:15.1f} {whole / unit / held:23.0%} {one / unit / t:21.1f}")

# %% [markdown]
# What operations do these 10 bytes belong to? Norm, dropout, the addition to the residual stream.
# Each treats a token by itself. A norm cannot be divided along the width, but along the
# **sequence** nothing holds the tokens together (section 4.2.2).
#
# **Predict.** Give each rank S/t of the tokens, between the cut layers. But its columns read *all*
# tokens. Who brings them, and what does it cost, compared with chapter 7's all-reduce?

# %% [markdown]
# ## 3. Picture
#
# One block on two ranks. Grey is held whole by both. In the lower row each rank has its own tokens
# there.


# %%
def lanes(between, enter, leave):
    """A block from left to right: `between` draws what lies between the cut layers."""
    attention = Matrix("attention", "S x D/2", columns=(0, 1))
    feed_forward = Matrix("feed-\nforward", "S x F/2", columns=(0, 1))
    return [between("norm"), enter, attention, leave, between("dropout\nadd, norm"),
            enter, feed_forward, leave, between("dropout\nadd")]


# %% tags=["figure-lanes"]
show(cut({
    "tensor parallelism": lanes(
        lambda name: Matrix(name, "S x D"), ("", "all-reduce"), ("all-reduce", "")),
    "with sequence parallelism": lanes(
        lambda name: Matrix(name, "S/2 x D", rows=(0, 1)),
        ("all-gather", "reduce-scatter"), ("reduce-scatter", "all-gather")),
}), alt=(
    "Between the cut layers every rank held all tokens; with sequence parallelism each holds its "
    "own, and every all-reduce has become a reduce-scatter and an all-gather."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# An all-gather brings them, and it costs nothing more. A ring all-reduce *is* a reduce-scatter and
# then an all-gather (chapter 5). Between its two halves each rank has the sum for 1/t of the
# tokens. Put dropout, addition and norm there. The reduce-scatter ends one cut layer, the
# all-gather begins the next.
#
# </details>
#
# It is ZeRO's idea once more: chapter 6 put the optimizer between the two halves.

# %% [markdown]
# ## 4. By hand
#
# The second half of a block: norm, columns A, GELU, rows B, and the addition. First on one device.

# %%
S, D, width = 12, 16, 48
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
x, gain, A, B = random(S, D), random(D), random(D, width) / 4, random(width, D) / 7


def one_device(x, gain, A, B):
    normed = F.layer_norm(x, (D,), gain)
    return x + F.gelu(normed @ A) @ B


# %% [markdown]
# Now on t ranks. A and B are a rank's columns and rows. What lies between is written out twice: as
# in chapter 7, and with the tokens divided.


# %%
def tensor_parallel(x, gain, A, B, group):
    normed = F.layer_norm(x, (D,), gain)  # (S, D), the same work on every rank
    out_partial = F.gelu(normed @ A) @ B  # (S, D), a summand
    all_reduce(out_partial, group)
    return x + out_partial


def sequence_parallel(x, gain, A, B, group):
    normed = F.layer_norm(x, (D,), gain)  # (S/t, D), this rank's tokens
    normed_full = normed.new_empty(S, D)
    all_gather_single(normed_full, normed, group)
    out_partial = F.gelu(normed_full @ A) @ B  # (S, D), a summand
    out = torch.empty_like(x)
    reduce_scatter_single(out, out_partial, group)
    return x + out  # (S/t, D)


# %%
def forward(group):
    """Of both layers: this rank's largest error, and the bytes it has sent."""
    t, rank = group.size(), group.rank()
    columns, rows = A.chunk(t, 1)[rank], B.chunk(t)[rank]
    own, right = slice(rank * S // t, (rank + 1) * S // t), one_device(x, gain, A, B)
    found = []
    for layer, tokens in ((tensor_parallel, slice(None)), (sequence_parallel, own)):
        with Ledger() as ledger:
            out = layer(x[tokens], gain, columns, rows, group)
        found.append(((out - right[tokens]).abs().max(), ledger.bytes_sent()))
    return found


# %% tags=["output-byhand"]
print("         tensor parallel          sequence parallel")
print("ranks    off by   bytes sent      off by   bytes sent")
for t in (2, 3, 4):
    pairs = [[max(column) for column in zip(*by_rank, strict=True)]
             for by_rank in zip(*run(forward, t), strict=True)]
    print(f"{t:5} " + "     ".join(f"{error:9.0e} {sent:12,}" for error, sent in pairs))

# %% [markdown]
# The same result, the same bytes. And the norm has run over 1/t of the tokens on each rank: work
# was divided, too.
#
# ### The layout
#
# Above, x was one sequence, and tokens were its first dim. A model has (B, S, D).
# `all_gather_single` joins what the ranks bring along dim 0, whatever it means there.
#
# **Predict.** Two sequences of four tokens, each rank brings (2, 2) of them. In which order do they
# stand in the result, read as (2, 4)?


# %%
def gathered(group, num_sequences):
    """Tokens named 10 x sequence + position: as they arrive, and joined along the sequence."""
    names = 10 * torch.arange(num_sequences)[:, None] + torch.arange(4)  # (B, S)
    own = names.chunk(group.size(), dim=1)[group.rank()].contiguous()  # (B, S/t)
    arrived = own.new_empty(group.size() * len(own), own.shape[1])
    all_gather_single(arrived, own, group)
    return arrived.view_as(names), torch.cat(arrived.chunk(group.size()), dim=1)


# %% tags=["output-layout", "nbval-check-output"]
for num_sequences in (1, 2):
    arrived, joined = run(gathered, 2, num_sequences)[0]
    print(f"B = {num_sequences}   as they arrive {arrived.tolist()}")
    print(f"        along dim 1    {joined.tolist()}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Rank by rank: the second row begins with tokens of the first sequence. The shape is right, no
# error is raised, and attention would mix two texts. With one sequence nothing is wrong, so a test
# with B = 1 cannot see it.
#
# </details>
#
# Joining along dim 1 costs a copy. Megatron-LM stores activations as (S, B, D), where the sequence
# is dim 0 and no copy is needed.
#
# ### Backward
#
# **Predict.** A collective needs a partner in the backward pass. A rank's tokens have been read by
# the columns of all ranks. What must happen to their gradients? And what is the partner of the
# reduce-scatter?
#
# <details><summary>Answer</summary>
#
# Every rank's columns make a summand of the gradient of every token. The owner of a token needs
# their sum: a reduce-scatter. The other way round, each summand of the output has been added into
# tokens of all owners, so a rank needs the gradients of all tokens: an all-gather. The two are each
# other's partner.
#
# </details>
#
# `minitron.comm.differentiable` has them with their backward passes; exercise 8.1 writes them. Four
# gradients can be compared with those of one device.


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


# %%
def right_gradients():
    leaves = [tensor.clone().requires_grad_() for tensor in (x, gain, A, B)]
    one_device(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def off_by(got, want):
    return f"{(got - want).abs().max() / want.abs().max():.0e}"


# %% tags=["output-backward"]
t, dims = 2, {"tokens": 0, "gain of the norm": None, "columns": 1, "rows": 0}
by_rank = run(gradients, t)
print("gradient            rank 0   rank 1   their sum")
for (name, dim), want, *got in zip(dims.items(), right_gradients(), *by_rank, strict=True):
    parts = [want] * t if dim is None else want.chunk(t, dim)
    errors = [off_by(grad, part) for grad, part in zip(got, parts, strict=True)]
    total = off_by(sum(got), want) if dim is None else ""
    print(f"{name:18} {errors[0]:>7}  {errors[1]:>7} {total:>11}")

# %% [markdown]
# Three of the four are right. Keep the other one in mind for section 5.
#
# ### What is kept
#
# **Predict.** Look at the line `normed_full @ columns`. What does it keep for the backward pass,
# and what becomes of the 10?
#
# <details><summary>Answer</summary>
#
# The gradient of the columns needs their input: `normed_full`, all S tokens. The norms' inputs and
# the masks are divided now, 6 of the 10. The inputs of the columns, 4, are still on every rank: the
# block keeps 30/t + 4.
#
# </details>
#
# To keep 34/t, a layer must save its own part of the input, and gather the rest again in the
# backward pass. That is one more all-gather for each of the two cut regions of a block.

# %% tags=["output-regather", "nbval-check-output"]
LAYOUTS = {
    "tensor": cost.Layout(8),
    "sequence, whole input": cost.Layout(8, sequence_parallel=True, regather=False),
    "sequence": cost.Layout(8, sequence_parallel=True),
}
print("                       bytes     all-  reduce-     all-   elements")
print("t = 8                   kept   reduce  scatter   gather       sent")
for name, layout in LAYOUTS.items():
    kept = layer_bytes(recompute="selective", layout=layout) / unit
    phases = cost.tensor_parallel_calls(layout).values()
    calls = [sum(phase.get(op, 0) for phase in phases)
             for op in ("all_reduce", "reduce_scatter", "all_gather")]
    sent = cost.tensor_parallel_volume(1, S3, gpt3.width, 1, 0, layout).sent / unit * 8 / 7
    print(f"{name:21} {kept:6.2f} {calls[0]:8} {calls[1]:8} {calls[2]:8} {sent:10.0f}")

# %% [markdown]
# (Bytes over B S D, elements over B S D (t-1)/t, calls of forward and backward pass together.)
# The paper says that sequence parallelism sends no more, and it prints 34/t. Each is true of
# another row. It does not count the third gather, since that one travels while the device computes.
# We count its bytes below, and compute whether it is hidden.

# %% [markdown]
# ## 5. The trap
#
# ### Norm weights that saw other tokens
#
# The gain of a norm is on every rank, as before. With tensor parallelism every rank put the same
# tokens through it. Now each rank has put its own tokens through it, so the gradient on a rank is
# one summand. Nothing in the backward pass adds them up. What if nobody does?


# %%
def no_sum(model, group):
    """Sequence parallelism whose `finish` has been forgotten."""
    parallel = apply_sequence_parallel(model, group)
    parallel.finish = lambda: None
    return parallel


# %%
def mean(model, group):
    """As data parallelism does: the sum, divided by the number of ranks."""
    parallel = apply_sequence_parallel(model, group)
    add_up = parallel.finish

    def finish():
        add_up()
        for name, parameter in model.named_parameters():
            if parallel.cuts[name].is_partial and parameter.grad is not None:
                parameter.grad.div_(group.size())

    parallel.finish = finish
    return parallel


# %%
config = ModelConfig("llama", 36, 12, 1, 24, 4, 4, 96)
RULES = {"sum": apply_sequence_parallel, "nothing": no_sum, "mean": mean}


def counting_rows(step):
    """Token ids (8, 13): the next token is the last one plus 7."""
    first = torch.randint(36, (8, 1), generator=torch.Generator().manual_seed(step))
    return (first + 7 * torch.arange(13)) % 36


# %%
def train(group, apply, num_steps=60):
    """Each step's loss and final norm weights, as this rank has them."""
    model, losses, gains = Transformer(config), [], []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in map(counting_rows, range(num_steps)):
        optimizer.zero_grad()
        loss = parallel.summed_loss(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        parallel.finish()
        optimizer.step()
        losses.append(loss.item())
        gains.append(model.final_norm.weight.detach().clone())
    return losses, torch.stack(gains)


# %% [markdown]
# **Predict.** Two ranks, 60 steps, nothing done about the norms. Does the loss fall? Do the two
# ranks report the same loss? Have they the same norm weights?

# %% tags=["output-trap"]
trained = {name: run(train, 2, apply, watch=False) for name, apply in RULES.items()}
print("gradients   loss after step           the same on   norm weights")
print("of norms       1     20     60      both ranks      differ by")
for name, ((losses, gains), (other_losses, other_gains)) in trained.items():
    shown = "   ".join(f"{losses[step]:.2f}" for step in (0, 19, 59))
    print(f"{name:10}  {shown} {losses == other_losses!s:>14} "
          f"{(gains - other_gains)[-1].abs().max():14.0e}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The loss falls like the right one. Both ranks report the same loss in every step, to the last bit,
# because they compute it *together*: each holds half of the vocabulary, and sums are the same
# everywhere. Yet their norm weights part. The model that is being trained exists on no rank.
#
# </details>

# %% tags=["figure-drift"]
(_, gains), (_, other_gains) = trained["nothing"]
parted = (gains - other_gains).abs().amax(1)
(_, gains), (_, other_gains) = trained["sum"]
show(curves(range(1, 61), {
    "nothing done": parted.tolist(), "summed": (gains - other_gains).abs().amax(1).tolist(),
}, "step", "norm weights differ by"), alt=(
    "Without the sum the norm weights of the two ranks part from the first step on, while the loss "
    "falls; with it they stay the same."
))

# %% [markdown]
# A checkpoint takes the norm weights of one rank, and so does every conversion of one. Somebody who
# wanted to merge the shards of a run asked how to merge LayerNorm weights of different values
# (NVIDIA/Megatron-LM issue 474).
#
# And the mean? It keeps the ranks alike, and its loss is as good as the right one: AdamW divides a
# gradient's scale away, as in chapter 4. The **oracle** names both:


# %%
llama = partial(small_model, "llama", vocab_size=36, width=24, num_heads=12, num_kv_heads=12,
                ffn_width=24, max_sequence_length=12)


def verdict(apply, num_ranks, make_model=llama):
    try:
        assert_same_training(apply, num_ranks, make_model, vocabulary=36, sequence=12)
        return "the same training"
    except AssertionError as error:
        return str(error)


# %% tags=["output-oracle-trap"]
for name, apply in RULES.items():
    lines = verdict(apply, 2).splitlines()
    print(name, *(textwrap.fill(line, 70, subsequent_indent="  ") for line in lines), sep="\n  ")

# %% [markdown]
# Why a sum here, if data parallelism takes a mean? There each rank has a loss of its own, and the
# loss of the batch is their mean. Here all ranks share one loss, and each has a part of its
# gradient.
#
# Both mistakes have been made. On its way to sequence parallelism GPT-NeoX first summed nothing,
# then averaged (EleutherAI/gpt-neox, pull requests 1257 and 1259). Megatron-LM sums what carries a
# mark; Transformer Engine's norms once lost the mark (NVIDIA/TransformerEngine, pull request 1528).
#
# **Predict.** Norm weights are one kind of such parameters. Which others does a GPT have?

# %% tags=["output-partial", "nbval-check-output"]
gpt = partial(small_model, "gpt", vocab_size=36, width=24, num_heads=12, num_kv_heads=12,
              ffn_width=24, max_sequence_length=12)


def partial_gradients(group, make_model):
    cuts = apply_sequence_parallel(make_model(), group).cuts
    return [name for name, cut in cuts.items() if cut.is_partial]


for name in run(partial_gradients, 2, gpt)[0]:
    if not name.startswith("blocks.1"):  # as in block 0
        print(name)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Everything that a rank holds whole and uses for its own tokens: norms, the biases that are added
# after a sum, the learned positions. The positions' gradient is zero outside of a rank's own
# tokens; summed, they make the whole.
#
# </details>
#
# They are small. All of them travel in one message, once a step.
#
# ### Dropout: whose random numbers?
#
# A training script seeds all ranks alike.
#
# **Predict.** For each region, heads inside attention and residual stream between the layers: must
# the ranks draw the same dropout mask, or different ones? Under tensor parallelism? Under sequence
# parallelism?


# %%
def plain_dropout(model, group):
    parallel = apply_sequence_parallel(model, group)
    for module in model.modules():
        if type(module) is OwnDropout:
            module.__class__ = nn.Dropout
    return parallel


# %%
def masks(group, apply):
    """Which of 64 values this rank keeps, in its heads and in the residual stream."""
    seen = {}

    def attention(query, key, value, dropout):
        seen["heads"] = F.dropout(torch.ones(64), dropout) > 0
        return value

    torch.manual_seed(0)  # the same on all ranks
    model = Transformer(ModelConfig("gpt", 36, 12, 1, 64, 4, 4, 64, dropout=0.5))
    model.blocks[0].attention.attention_fn = attention
    apply(model, group)
    model.dropout.register_forward_hook(lambda *call: seen.update(stream=call[-1][0, 0] != 0))
    model(counting_rows(0)[:, :-1])
    return seen


# %% tags=["output-dropout", "nbval-check-output"]
print("masks of the two ranks alike?   heads   residual stream")
for name, apply in {"tensor parallel": apply_tensor_parallel,
                    "sequence parallel": apply_sequence_parallel,
                    "sequence, nn.Dropout as it is": plain_dropout}.items():
    first, second = run(masks, 2, apply)
    print(f"{name:31} " + "   ".join(
        f"{torch.equal(first[region], second[region])!s:5}" for region in ("heads", "stream")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# A rank's heads are its own: other masks on every rank, always. What all ranks hold alike must be
# dropped alike, or it is no longer the same on all: under tensor parallelism, the stream. Under
# sequence parallelism the stream is divided: each rank has other tokens and needs other masks. The
# last row is the mistake: tokens s and s + S/t always lose the same values. The oracle trains
# without dropout, so it cannot see this one. The masks themselves must be compared, as here.
#
# </details>

# %% [markdown]
# ## 6. The real one
#
# Chapter 7's cut layers ask an `exchange` what happens at their ends. There it was the whole
# sequence; here it is this. Three methods, for dim 1 of (B, S, D).

# %%
print(inspect.getsource(SequenceParallelExchange))

# %% [markdown]
# `reduce` also ends the embedding, and `start_gather` begins the head, so the stream is divided
# from the first block to the final norm. The layers themselves stay as they were. In the backward
# pass of the columns, find what travels while which product is computed:

# %%
print(inspect.getsource(LinearFunction.backward))
print(inspect.getsource(WeightGradients.start))
print(inspect.getsource(WeightGradients.compute))

# %% [markdown]
# `second_half.start()` asks for the input again. While it travels, `input_gradient` computes the
# input's gradient, which does not need the input. Then `start_reduce` sends that gradient, and
# `second_half.compute()` the weights' gradients meanwhile. Each of the two has a product to hide
# behind.
#
# And the sum that section 5 forgot, for everything that `is_partial`:

# %%
print(inspect.getsource(TensorParallel.finish))

# %% [markdown]
# The oracle, on one to four ranks, both families. Llama with two key-value heads, fewer than four
# ranks:

# %% tags=["output-oracle", "nbval-check-output"]
keeping = partial(apply_sequence_parallel, regather=False)
for name, make_model, apply, num_ranks in (
    ("GPT", gpt, apply_sequence_parallel, 1),
    ("GPT", gpt, apply_sequence_parallel, 3),
    ("GPT, whole input kept", gpt, keeping, 2),
    ("Llama", partial(llama, num_kv_heads=2), apply_sequence_parallel, 4),
):
    print(f"ranks: {num_ranks}  {name:22} {verdict(apply, num_ranks, make_model)}")

# %% [markdown]
# ## 7. Measure
#
# One GPT block of width 128 on four ranks, in bfloat16, with dropout and materialized attention.
# The **meter** reads the activations after the forward pass, the **ledger** the whole of forward
# and backward.

# %%
shape, B, S = ModelConfig("gpt", 64, 64, 1, 128, 8, 8, 512, dropout=0.1), 4, 64
t, BSD = 4, B * S * shape.width
APPLY = dict(zip(LAYOUTS, (apply_tensor_parallel, keeping, apply_sequence_parallel), strict=True))


def prepared(apply, group, selective):
    model = Transformer(shape)
    initialize(model, seed=0)
    model.bfloat16().blocks[0].attention.attention_fn = materialized_attention
    apply(model, group)
    if selective:
        apply_selective_recompute(model)
    return model


# %%
def measured(group, name, selective):
    """Activation bytes that this rank keeps for the backward pass, and its calls."""
    model = prepared(APPLY[name], group, selective)
    own = S if name == "tensor" else S // t
    x = torch.ones(B, own, shape.width, dtype=torch.bfloat16, requires_grad=True)
    with Ledger() as ledger, Meter(model) as meter:
        out = model.run_blocks(model.blocks, x.clone(), None)
        kept = meter.now()["activation"]
        out.sum().backward()
    return kept, ledger.calls


# %% [markdown]
# PyTorch's dropout on a CPU keeps a mask as wide as the values, 2 bytes here; CUDA keeps 1. The
# formula of `minitron.cost` takes the width of a mask, so it can predict both. Beside it stands the
# paper's.


# %%
def formula(name, recompute, mask_bytes):
    """Bytes of this block on each of t ranks."""
    layout = cost.Layout(t, LAYOUTS[name].sequence_parallel, LAYOUTS[name].regather)
    return cost.activation_bytes_per_layer(shape, B, S, 2, "materialized", recompute, mask_bytes,
                                           layout)


PAPER = dict(zip(LAYOUTS, (10 + 24 / t, 4 + 30 / t, 34 / t), strict=True))
scores = {"none": 5 * shape.num_heads * S / (shape.width * t), "selective": 0}

# %% tags=["output-meter", "nbval-check-output"]
results = {}
print("bytes kept,                            on a CPU     CUDA's masks")
print("over B S D                       measured  formula  formula  paper")
for recompute in ("none", "selective"):
    for name in LAYOUTS:
        by_rank = run(measured, t, name, recompute == "selective", watch=False)
        results[recompute, name] = by_rank
        columns = [by_rank[0][0], *(formula(name, recompute, size) for size in (2, 1))]
        kept, ours, cuda = (size / BSD for size in columns)
        print(f"{recompute:10} {name:21} {kept:8.2f} {ours:8.2f} {cuda:8.2f} "
              f"{PAPER[name] + scores[recompute]:6.2f}")

# %% [markdown]
# The three lower rows are 10 + 24/t, 4 + 30/t (not in the paper, but from its list) and 34/t; the
# upper ones have 5 a S/(D t) more, for a heads. Our formula adds what the paper leaves out as
# small: the norms' float32 statistics, which a CPU keeps in 16 bits, and the causal mask.

# %% tags=["figure-held"]
rows = {name: {"activation": results["selective", name][0][0]} for name in LAYOUTS}
predicted = {f"{name}, formula": {"activation": formula(name, "selective", 2)}
             for name in LAYOUTS}
show(memory_bars(rows, predicted), alt=(
    "A block on four ranks, selective recomputation: sequence parallelism that keeps inputs whole "
    "removes a third of the activations, gathering them again removes half."
))

# %% [markdown]
# **Predict.** Now the wire, on four ranks. Which of the three rows sends most, and by which factor?

# %% tags=["output-ledger", "nbval-check-output"]
for name in LAYOUTS:
    print(f"{name}\n{merged([calls for _, calls in results['none', name]])}\n")

# %% tags=["figure-wire"]
sent = {name: [sum(call.sent for call in calls) for _, calls in results["none", name]]
        for name in LAYOUTS}
ticks = {name: [cost.tensor_parallel_volume(
    B, S, shape.width, 2, rank, cost.Layout(t, layout.sequence_parallel, layout.regather)).sent
    for rank in range(t)] for name, layout in LAYOUTS.items()}
show(wire(sent, ticks), alt=(
    "Tensor parallelism and sequence parallelism that keeps its inputs send the same; gathering "
    "the inputs again adds a quarter."
))

# %% [markdown]
# The first two rows are equal to the byte: 8 B S D (t-1)/t elements of 2 bytes. The third has two
# more all-gathers in the backward pass and sends 10.
#
# ### On real GPUs
#
# Is the third gather worth it, and is it hidden? GPT-3 on a node of eight H100s, one sequence. The
# gather travels while the gradient of the same layer's input is computed. We give the product the
# dense peak, the hardest case to hide behind.

# %% tags=["output-hidden", "nbval-check-output"]
H100 = DEVICES["H100-SXM-80GB"]
input_bytes = 2 * S3 * gpt3.width
print("microseconds       product   gather in the node   over InfiniBand")
for name, columns in (("query, key, value", 3 * gpt3.width), ("up", gpt3.ffn_width)):
    product = 2 * S3 * gpt3.width * (columns // 8) / H100.bf16_flops
    gathers = [cost.ring_all_gather_seconds(input_bytes, 8, 0, link)
               for link in (H100.nvlink_bandwidth, H100.nic_bandwidth)]
    print(f"{name:17} {1e6 * product:8.0f} {1e6 * gathers[0]:20.0f} {1e6 * gathers[1]:17.0f}")
kept, again = (layer_bytes(recompute="selective", layout=LAYOUTS[name])
               for name in ("sequence, whole input", "sequence"))
print(f"gathering again saves {layers * (kept - again) / GB:.1f} GB of {layers * kept / GB:.1f} GB")

# %% [markdown]
# Inside a node the gather fits beside the product. Over InfiniBand most of it would stick out:
# tensor and sequence parallelism stay where the links are fast.
#
# Now all together. What does a block of GPT-3 keep on each of 8 GPUs?

# %% tags=["figure-gpt3"]
choices = {
    "tensor": (False, "none"), "tensor + sequence": (True, "none"),
    "tensor, selective": (False, "selective"), "tensor + sequence, selective": (True, "selective"),
    "tensor, full": (False, "full"), "tensor + sequence, full": (True, "full"),
}
per_layer = {name: layer_bytes(recompute=kind, layout=cost.Layout(8, sequence))
             for name, (sequence, kind) in choices.items()}
show(memory_bars({}, {name: {"activation": size} for name, size in per_layer.items()}), alt=(
    "One layer of GPT-3 on each of 8 GPUs, one sequence: neither sequence parallelism nor "
    "selective recomputation alone saves half, both together save four fifths."
))

# %% [markdown]
# The paper's abstract promises two things: activations "by 5x", and of the time that recomputation
# cost, over 90 % gone. The first we recompute for its four models (table 3: heads, width, layers,
# micro-batch; t = 8).

# %% tags=["output-5x", "nbval-check-output"]
models = {  # a, h, L, b
    "22B": (64, 6144, 48, 4), "175B": (96, 12288, 96, 1),
    "530B": (128, 20480, 105, 1), "1T": (160, 25600, 128, 1)}
print("        MB a layer   share of it with                      both")
print("        tensor       sequence  selective  both    full   saves")
for name, (a, h, L, b) in models.items():
    model = ModelConfig("gpt", 51200, 2048, L, h, a, a, 4 * h, dropout=0.1)
    sizes = [cost.activation_bytes_per_layer(model, b, 2048, 2, "materialized", kind,
                                             layout=cost.Layout(8, sequence))
             for sequence, kind in (*choices.values(),)[:5]]
    shares = [f"{size / sizes[0]:.0%}" for size in sizes]
    print(f"{name:6} {sizes[0] / MB:11,.0f} {shares[1]:>14} {shares[2]:>10} {shares[3]:>5} "
          f"{shares[4]:>7} {sizes[0] / sizes[3]:6.1f} x")

# %% [markdown]
# The claim holds: 5 times for the largest two, more for the others. Full recomputation keeps even
# less, 2 B S D, and every rank holds it whole unless it is divided, too. So why not full? For the
# second promise the paper measured one layer of the 22B model on A100s (table 4). Those times are
# theirs; the bytes are ours.

# %% tags=["output-time", "nbval-check-output"]
milliseconds = {"tensor": 19.6, "tensor + sequence": 19.0, "tensor, selective": 20.9,
                "tensor + sequence, selective": 20.3, "tensor, full": 27.2}
model_22b = ModelConfig("gpt", 51200, 2048, 48, 6144, 64, 64, 4 * 6144, dropout=0.1)
for name, time in milliseconds.items():
    sequence, kind = choices[name]
    size = cost.activation_bytes_per_layer(model_22b, 4, 2048, 2, "materialized", kind,
                                           layout=cost.Layout(8, sequence))
    print(f"{name:29} {size / MB:6,.0f} MB {time:6.1f} ms {time / 19.6 - 1:+5.0%}")
gone = 1 - (20.3 - 19.6) / (27.2 - 19.6)
print(f"of the time of full recomputation, {gone:.0%} is gone")

# %% [markdown]
# Sequence parallelism is even a little faster than tensor parallelism alone: norms and dropouts run
# over 1/t of the tokens. Today's fused attention replays itself (chapter 3), so "selective" comes
# with the kernel, and 34/t is what is left of a block.
#
# One confusion to avoid: attention itself still reads all S tokens here, for some of the heads.
# Dividing the sequence *inside* attention, for very long sequences, is **context parallelism**
# (ring attention, Ulysses), which some papers call sequence parallelism, too.

# %% tags=["figure-explorer"]
sequence_explorer()

# %% [markdown]
# ## 8. Recap
#
# 1. Tensor parallelism leaves norms, dropout and the residual stream on every rank: of the 34 bytes
#    that a block keeps, 10 + 24/t.
# 2. An all-reduce is a reduce-scatter and an all-gather. With the norm between the two, each rank
#    has its own tokens there, and the wire carries no byte more: 8 B S D (t-1)/t.
# 3. 34/t takes a third gather, of each cut layer's input in the backward pass: 10 in place of 8,
#    beside a product. Keeping the input whole is 30/t + 4.
# 4. What every rank holds whole has seen its own tokens alone. Its gradients are summed once a
#    step, and neither the loss nor the equality of losses shows that they were not.
# 5. With selective recomputation a block keeps a fifth of tensor parallelism alone, for a few per
#    cent of time.
#
# ## Exercises
#
# Write your answers into `exercises/ch08_sequence_parallel.py`, save, and run the cell. In a
# terminal, `minitron hint 8.1` gives hints in three steps.
#
# **8.1 Gather and scatter** (20 minutes): the pair along the sequence, each the other's backward
# pass.

# %%
check("8.1")

# %% [markdown]
# **8.2 Gradients of other tokens** (15 minutes): sum what is a part, and nothing else, in one
# message.

# %%
check("8.2")

# %% [markdown]
# **8.3 What a rank saves** (20 minutes): the activation formula, for every combination.

# %%
check("8.3")

# %% [markdown]
# **8.4 Gather it again** (20 minutes): a layer that keeps its own part of the input alone.

# %%
check("8.4")

# %% [markdown]
# ## Further reading
#
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022:
#   section 4.2.2 (sequence parallelism), table 2 (the formulas), section 6.1 (memory).
# - Shoeybi et al., *Megatron-LM*, 2019, section 3: the layers that are cut.
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, 2021, section 3.2: the volume.
# - Liu, Zaharia, Abbeel, *Ring Attention*, 2023, and Jacobs et al., *DeepSpeed Ulysses*, 2023: the
#   sequence divided inside attention.
