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
# # 4. Data parallelism: many GPUs, one training run
#
# **50 minutes, and 75 for the exercises. No GPU. [Exercises 4.1](exercise:4.1) to 4.4.**
#
# *You need:* the training step and the [global batch](word:global-batch) from [chapter
# 1](chapter:1), and the categories of memory from [chapter 2](chapter:2).
#
# *You will be able to:*
# - **train** one model on several processes, and show that it is the same training as on one;
# - **overlap** communication with the backward pass, and predict how much of it still delays the
#   step;
# - **find** mistakes that leave the loss curve healthy, with an instrument that names their cause.
#
# *The way there:*
# - **Sections 1 to 3:** what many GPUs must exchange in each step, and how long it takes;
# - **Sections 4 to 6:** averaging by hand, sending earlier, and the package's three versions;
# - **Section 7:** step times, measured and predicted, and the limit of data parallelism.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from minitron import cost
from minitron.config import ModelConfig
from minitron.dataset import TokenDataset, write_shard
from minitron.launch import RankError, run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.measure.ledger import Ledger, merged
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import (
    BucketedDataParallel, HookedDataParallel, apply_bucketed_data_parallel,
    apply_hooked_data_parallel, apply_naive_data_parallel, assign_buckets, average_gradients,
)
from minitron.parallel.flat import FlatGradients
from minitron.proof.oracle import after_backward
from teaching.check import check
from teaching.claims import claim
from teaching.figures import curves, holdings, ranges, rank_lanes, show, timeline
from teaching.lab import ch04 as lab, loss_of, recorded, show_source, show_text, verdict
from teaching.overlap import exposed_seconds, in_buckets, step_lanes, transfers
from teaching.widgets import bucket_explorer

torch.set_num_threads(1)
MB, GB, KiB = 1e6, 1e9, 2**10

# %% [markdown]
# ## 1. The question
#
# The [model card of Llama 3 8B](https://huggingface.co/meta-llama/Meta-Llama-3-8B) reports 15
# trillion tokens and 1.3 million GPU hours on H100s. How long would that take on a single one? And
# how many would you need to finish in a month?

# %% tags=["output-question", "nbval-check-output"]
llama_8b = cost.published_llama(32, 4096, 32, 8, 14336, 128256, 8192)
hours, peak = 1.3e6, DENSE_BF16_PEAKS["H100"]
flops = 15e12 * cost.training_flops_per_token(llama_8b, 8192)
print(f"one H100: {hours / 24 / 365:.0f} years")
print(f"in 30 days: {hours / 24 / 30:,.0f} H100s")
print(f"in chapter 1, at an MFU of 40%: {flops / (0.4 * peak) / 3600 / 24 / 365:.0f} years")
print(f"the MFU of 1.3 million hours: {flops / peak / 3600 / hours:.0%}")

# %% [markdown]
# Chapter 1 estimated about half as many years, because it assumed an [MFU](word:mfu) that a good
# training loop reaches. Measured by the reported hours, the MFU is only 19 %. The model card does
# not say what the hours include. Waiting for the network, restarts and evaluation would all count,
# and this chapter looks at the first of them.
#
# The work is easy to split: a step's batch has millions of tokens, and each GPU can take some of
# its sequences. The *result* is not: at the end of the step, every GPU must have the same model.
#
# ## 2. Estimate
#
# What must the GPUs exchange so that every one of them ends the step with the same model? In **data
# parallelism**, one process drives each GPU. The process is called a **[rank](word:rank)**; it
# holds the full model and reads its own part of the global batch. Its backward pass computes the
# gradient of that part. If all parts have the same size, the gradient of the global batch is the
# mean of the ranks' gradients. To compute it, they need one operation, the
# **[all-reduce](word:all-reduce)**: every rank contributes a tensor, and every rank receives the
# sum. Divided by [N](word:N), the sum is the mean. If the ranks do the adding (some switches can do
# it for them), then with the best algorithms each rank sends
#
# $$2\,\frac{N-1}{N}\,G \text{ bytes, for gradients of } G \text{ bytes on } N \text{ ranks}$$
#
# ([Patarasuk & Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002); we build such an algorithm
# in [chapter 5](chapter:5)).
#
# **Predict.** Suppose that Llama 3 8B sends its gradients in bfloat16. (Meta sent them in float32:
# [Llama 3](https://arxiv.org/abs/2407.21783), section 3.3.2.) Each H100 processes 8,192 tokens per
# step at 40 % of the 989.4 TFLOP/s that NVIDIA lists (2023), and sends everything through one 400
# Gb/s network card (50 GB/s). Which takes longer, the backward pass or the all-reduce? And what
# changes with 2,048 ranks instead of 8?
#
# <details><summary>Answer</summary>
#
# The backward pass. In float32 the bytes double, and from 3 ranks on the all-reduce would take
# longer. The number of ranks hardly matters for the bytes: from 8 to 2,048 ranks, what each of them
# sends grows by a seventh. The latency does grow with the number of ranks; section 7 and chapter 5
# come back to it.
#
# </details>

# %% tags=["output-estimate", "nbval-check-output"]
tokens, G = 8192, 2 * cost.num_parameters(llama_8b)
speed = 0.40 * peak  # FLOP/s
backward = tokens * cost.backward_flops_per_token(llama_8b, tokens) / speed
print(f"gradients {G / GB:.1f} GB, backward pass {backward:.2f} s")
print("ranks   sent by each   all-reduce")
for N in (2, 8, 64, 2048):
    sent = cost.ring_all_reduce_volume(G // 2, 2, N, rank=0).sent
    print(f"{N:5,} {sent / GB:11.1f} GB {sent / (50 * GB):10.2f} s")

# %% [markdown]
# If 8 or more ranks communicate only after the backward pass, every step gets longer by 70 to 80 %
# of a backward pass. If they do both at once, most of that could be hidden. So this chapter has two
# goals: average the gradients correctly, then overlap the communication with the backward pass.
#
# ## 3. Picture
#
# First, what does data parallelism do to memory? Take Llama 3.2 1B, a batch of four sequences of
# 2,048 tokens, and four ranks. **Predict:** which of the four categories of memory does data
# parallelism divide by four? The figure has a row per rank and a column per category; the colored
# part of a box is what the rank holds.

# %% tags=["figure-holdings"]
llama_1b = cost.PUBLISHED["Llama 3.2 1B"]
held = lab.held_by_ranks(llama_1b, num_ranks=4, sequence_length=2048)
show(holdings(held), alt=(
    "Every rank holds the full model, its gradients and its optimizer state; only the activations "
    "are divided among the ranks."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Only the [activations](word:activation), because each rank processes one of the four sequences.
# All other boxes are full.
#
# </details>
#
# Data parallelism splits the work, not the model: if its weights, gradients and [optimizer
# state](word:optimizer-state) do not fit on one GPU, they do not fit on a thousand of them this
# way. ([Chapter 6](chapter:6) [shards](word:shard) them.)
#
# ### Which rank reads what
#
# The sequences of one step are the **global batch** (GBS). Each rank processes its part in
# [micro-batches](word:micro-batch) of MBS sequences and accumulates the gradients of GA
# micro-batches before the ranks communicate. If all parts are equal,
#
# $$\text{GBS} = \text{MBS} \times \text{GA} \times N \text{ for } N \text{ ranks}$$
#
# What a step computes must not depend on how its batch is divided. A rank therefore does not own a
# part of the data set. All samples have one shuffled order, each step reads the next GBS positions
# in it, and each of N ranks takes every N-th of them. The next cells write a tiny data set and
# print which samples a step of eight reads:

# %%
workspace = tempfile.TemporaryDirectory()
S, GBS = 4, 8
write_shard(Path(workspace.name) / "train_0.bin", np.arange(400))
data = TokenDataset(Path(workspace.name), "train", sequence_length=S, seed=0)

# %% tags=["output-samples", "nbval-check-output"]
batch_alone = data.batch(position=16, batch_size=GBS)[:, 0] // S  # by a sample's first token
print("one process:", batch_alone.tolist())
for N in (2, 3, 4):
    parts = [data.batch(16, GBS, rank, N)[:, 0] // S for rank in range(N)]
    same = sorted(torch.cat(parts).tolist()) == sorted(batch_alone.tolist())
    print(f"{N} ranks:    ", *(part.tolist() for part in parts), "together the same:", same)

# %% [markdown]
# However many ranks there are, together they read the same samples. With three ranks the parts have
# different sizes, and that is fine: each rank divides its summed loss by one third of the number of
# *all* tokens, so that averaging over the ranks gives the mean over all tokens. A run can stop on 4
# ranks and resume on 3 (one does in [chapter 11](chapter:11)), because its position in the data is
# a single number that counts all ranks' samples.
#
# ## 4. By hand
#
# Now we average gradients on real processes. `run(function, 4)` starts four processes and calls
# `function(group)` in each. Through `group` they communicate: `group.rank()` is this process's
# number, and `group.size()` is how many there are. They run the same code with the same seed, so
# they start with the same weights. The only new code is the loop over the parameters:

# %%
generator = torch.Generator().manual_seed(0)
batch = torch.randint(64, (16, 25), generator=generator)


def build():
    model = Transformer(ModelConfig(
        family="gpt", vocab_size=64, max_sequence_length=24, num_layers=2, width=32, num_heads=4,
        num_kv_heads=4, ffn_width=128,
    ))
    initialize(model, seed=0)
    return model.double()


# %%
def by_hand(group):
    model = build()
    mine = batch[group.rank() :: group.size()]
    loss_of(model, mine).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()
    print(f"{len(mine)} of {len(batch)} sequences")
    return flat_gradient(model)


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %% [markdown]
# **Predict.** Is the result the gradient that one process computes from all 16 sequences? To the
# last bit?

# %% tags=["output-byhand"]
model = build()
loss_of(model, batch).backward()
alone = flat_gradient(model)
by_rank = run(by_hand, 4)
for rank, gradient in enumerate(by_rank):
    error = (gradient - alone).abs().max() / alone.abs().max()
    print(f"rank {rank}: off by {error:.0e} of the largest value; "
          f"same bits as rank 0: {torch.equal(gradient, by_rank[0])}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Up to rounding, yes: the mean of the ranks' means is the overall mean, because every rank has four
# sequences of the same length. To the last bit, no, because the result of floating-point addition
# depends on the order. In float64 the difference is in the sixteenth digit. The four ranks agree
# with each other exactly, because each receives the same sum. That matters, because they never
# compare their weights again.
#
# </details>
#
# ### What a mistake looks like
#
# An operation such as all-reduce is a **[collective](word:collective)**: all ranks of a
# [group](word:group) must take part, and if one does not, the others wait. Here rank 2 has no work
# and returns early:

# %% tags=["output-hang"]
def early(group):
    total = torch.ones(1000)
    if group.rank() == 2:
        return  # nothing to do here
    dist.all_reduce(total, group=group)


try:
    run(early, 4)
except RankError as error:
    show_text(error)

# %% [markdown]
# (The [axis](word:axis) `world` is the group of all ranks.) On a cluster you would see GPUs at full
# utilization and no progress, until some minutes later PyTorch's watchdog over NCCL, NVIDIA's
# communication library, gives up. Here the launcher asks every rank where it is. It also compares
# the collectives that the ranks call, so a mismatch is reported right away. This time, rank 2 skips
# one collective:

# %% tags=["output-mismatch"]
def confused(group):
    loss = torch.ones(1)
    if group.rank() != 2:
        dist.all_reduce(loss, group=group)  # rank 2 does not log the loss
    dist.barrier(group)


try:
    run(confused, 4)
except RankError as error:
    show_text(error)

# %% [markdown]
# Both bugs stop the run, so you notice them.
#
# ## 5. Sending earlier
#
# Review the code below, with the documentation open. Would you approve it? Keep your answer for a
# moment. Section 4's loop starts when the backward pass has finished; this code sends each gradient
# as soon as it is complete. It uses a *hook*, a function that autograd calls. With
# [`register_post_accumulate_grad_hook`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.register_post_accumulate_grad_hook.html),
# PyTorch calls your hook when a parameter's gradient has been accumulated.


# %%
def trained(model):
    return [p for p in model.parameters() if p.requires_grad]  # some may be frozen


def hook_by_hand(model, group):
    def average(grad):
        dist.all_reduce(grad, group=group)
        grad /= group.size()

    for p in trained(model):
        p.register_post_accumulate_grad_hook(average)


# %% [markdown]
# Here is another version, for comparison: it runs after the backward pass and does not divide. We
# train with each version and with section 4's mean, which is dashed in the figure. An embedding and
# a linear layer learn to count in sevens (the next token is the current one plus 7, modulo 64),
# with AdamW on four ranks.


# %%
def sum_by_hand(model, group):
    for p in trained(model):
        dist.all_reduce(p.grad, group=group)


# %% tags=["figure-trap", "exhaustive"]
versions = [(lab.nothing, average_gradients), (lab.nothing, sum_by_hand),
            (hook_by_hand, lab.nothing)]
mean_losses = torch.stack(run(lab.train_all, 4, versions, timeout=300, watch=False)).mean(0)
right, summed, hooked = mean_losses.tolist()
show(curves(range(1, 61), {"sum": summed, "hook": hooked}, "step", "loss (nats per token)",
            {"mean (correct)": right}), alt=(
    "All three losses fall " + ("to nearly zero" if max(hooked[-1], summed[-1]) < 0.3 else "")
    + " as if nothing were wrong. Two of the three trainings are wrong."
))

# %% [markdown]
# Three healthy curves: the sum lies on the correct one, and the hook is a few steps behind. Now we
# ask the **[oracle](word:oracle)**. It trains a small model on N ranks and in one process, with the
# same samples, in float64, with SGD and with AdamW. At every step it compares the losses, every
# gradient and every parameter on every rank, and reports the first difference. What does it say
# about our two versions?

# %% tags=["output-oracle-trap", "exhaustive"]
def with_hook(model, group):
    hook_by_hand(model, group)
    return after_backward(lab.nothing)(model, group)  # equal weights at the start


for name, apply in (("sum", after_backward(sum_by_hand)), ("hook", with_hook)):
    print(f"{name}:")
    show_text(verdict(apply))

# %% [markdown]
# **The sum** gives a gradient that is N times too large. AdamW divides each gradient by its own
# magnitude, so the weights and the loss hardly change. With SGD, which does not, the losses differ
# visibly. The oracle needs no loss to notice: it compares the gradients themselves. (Two of the 35
# agree nevertheless, those of the key biases, because they are zero. Such a bias adds the same
# number to all of a query's scores, and softmax ignores that.) You would notice on the day you turn
# on gradient clipping, whose threshold is then N times too strict. Or when you resume on a
# different number of ranks: then the new gradients no longer match the scale of AdamW's moments.
#
# **The hook** is worse. `register_post_accumulate_grad_hook` passes the *parameter*, not its
# gradient. The argument is named `grad`, and readers believe it. So the hook averages the weights
# in the middle of the backward pass, while each rank keeps its own gradient, and the oracle sees
# gradients that differ between ranks. "Together they are right" means that the mean of the four is
# the gradient of one process: at this first step each rank's gradient is correct, but it was never
# averaged. Each rank trains on its own data, and its weights, not its gradients, are averaged
# with those of the others once per step, before its own update.
#
# This bug is real. [picotron](https://github.com/huggingface/picotron), a code base for teaching,
# has it in `DataParallelNaive` (huggingface/picotron, `picotron/data_parallel/data_parallel.py`,
# commit 5809434, [issue 39](https://github.com/huggingface/picotron/issues/39)): its method
# `_allreduce_grads(self, grad)` is registered with this very hook. `register_hook` does pass the
# gradient, that of the current backward pass alone. A hook that returns the mean is correct, but it
# communicates in every backward pass of a step.
#
# ## 6. The real one
#
# How does the package avoid these mistakes? It has three versions; the naive one is section 4's
# loop:

# %%
show_source(average_gradients)

# %% [markdown]
# It divides before it sums, so that the sum of N gradients cannot overflow in float16. And if a
# parameter got no gradient on this rank, the rank takes part with zeros.
#
# The hooked version, [`HookedDataParallel`](code:minitron.parallel.data.ddp.HookedDataParallel),
# differs in *when* it sends. Its hook is `collect`, and each of its `buckets` holds one gradient.
# Find the line that can make a gradient wait although it is ready, and the reason for it.

# %%
show_source(HookedDataParallel.collect, HookedDataParallel.accept, HookedDataParallel.send)

# %% [markdown]
# It is the `while` loop: it sends in one fixed order, so a gradient that is early waits for its
# turn. Autograd may complete gradients in a different order on another rank, and then two ranks
# would add up different tensors. `async_op=True` starts the all-reduce and returns immediately;
# `finish()` waits for all of them. (`is_last` is false under `no_sync`, explained below;
# `completes` and `incomplete` are for the pipelines of [chapter 9](chapter:9).)
#
# The bucketed version differs in *how much* it sends at once. Every message, however short, has a
# fixed cost, its latency, and a model has hundreds of small tensors. So gradients are copied into
# flat [buckets](word:bucket), and each bucket is one message. `assign_buckets` starts with the last
# parameter, because the backward pass completes its gradient first. Here are its buckets for four
# gradients of 40, 10, 20 and 30 bytes, and then the code that fills and sends one:

# %%
print(assign_buckets([40, 10, 20, 30], bucket_bytes=50), "\n")
show_source(BucketedDataParallel.prepare, FlatGradients.take, BucketedDataParallel.send)

# %% [markdown]
# The first line says that gradients 3 and 2 share a bucket, and so do 1 and 0. (A gradient larger
# than `bucket_bytes` would be a bucket by itself.) In `take`,
# `torch.mul(..., out=view)` copies and divides in one operation. From then on `.grad` *is* a view
# into the bucket, so nothing has to be copied back. Are all three versions correct? We ask the
# oracle, for several numbers of ranks:

# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
small_buckets = partial(apply_bucketed_data_parallel, bucket_bytes=5_000)  # to have several
applies = {"naive": apply_naive_data_parallel, "hooked": apply_hooked_data_parallel,
           "bucketed": small_buckets}
for name, apply in applies.items():
    verdicts = {verdict(apply, num_ranks) for num_ranks in (1, 2, 3, 4)}
    print(f"{name:9} on 1, 2, 3 and 4 ranks: {' / '.join(sorted(verdicts))}")

# %% [markdown]
# They are. The test includes a batch that is not divisible by the number of ranks, a frozen
# parameter, a tied embedding, and ranks that were deliberately given different seeds.
#
# ### Accumulation and `no_sync`
#
# With four micro-batches per step, the ranks could average after each backward pass. The hooked and
# the bucketed version do so unless you tell them otherwise, because they send from inside the
# backward pass. Under `no_sync`, they let gradients accumulate in `.grad`, and the last
# micro-batch, outside of it, sends the sum. The cells below compare both ways with the bucketed
# version. A **[ledger](word:ledger)** counts the bytes: it records every collective that a rank
# starts, including those started from hooks.
#
# **Predict.** Is the gradient wrong if the ranks average four times? And what does it cost on the
# network?

# %%
def accumulate(group, sync_each):
    model = build()
    parallel = apply_bucketed_data_parallel(model, group)
    *others, last = batch[group.rank() :: group.size()].split(1)
    with Ledger() as ledger:
        for row in others:
            with nullcontext() if sync_each else parallel.no_sync():
                (loss_of(model, row) / 4).backward()
            if sync_each:
                parallel.finish()
        (loss_of(model, last) / 4).backward()
        parallel.finish()
    return flat_gradient(model), ledger.calls


# %% tags=["output-nosync", "nbval-check-output"]
once = cost.ring_all_reduce_volume(len(alone), 8, 4, rank=0).sent  # float64
for name, sync_each in (("after each of 4", True), ("once, no_sync", False)):
    gradients, calls = zip(*run(accumulate, 4, sync_each), strict=True)
    correct = torch.allclose(gradients[3], alone, rtol=1e-12, atol=1e-15)
    print(f"{name}; gradient correct: {correct}; "
          f"by the formula: {4 * once if sync_each else once:,} bytes sent")
    print(merged(calls), end="\n\n")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The gradient is correct. After the second pass, `.grad` holds the mean of the first gradients, the
# same on every rank, plus this rank's own second one. Averaging changes only the second, so the
# result is the sum of the two means. But every backward pass sends all the bytes: four times as
# many as with `no_sync`. The ledger counts exactly what the formula says. (The model is so small
# that all gradients fit into one bucket: one all-reduce per averaging. The broadcast, once after
# the first of them, lets all ranks agree on the order in which they fill their buckets. Where ranks
# send different numbers of bytes, the ledger prints the least and the most: `0..576`.)
#
# </details>
#
# ## 7. Measure
#
# Processes on one machine communicate through its memory, so there is hardly anything to hide, and
# we slow the network down.
# [`SlowNetwork`](code:minitron.launch.slow_network.SlowNetwork) is an **emulation**: every transfer
# really takes place, and a rank that waits for one sleeps until a link of a given latency and
# bandwidth would have delivered it. The processor is free in the meantime, so the overlap is real.
# Communication that is not hidden behind compute is called *exposed*.
#
# From here on there are two ranks and a larger model. First we measure the compute alone: when is
# each gradient complete? Then we choose a network to match the speed of your machine. At its
# bandwidth, all gradients take three fifths of the backward pass. And with one all-reduce per
# gradient, their latencies alone (two each, with two ranks) take as long as the backward pass.

# %% tags=["output-compute", "exhaustive"]
compute = run(lab.compute_alone, 2, watch=False)[0]
sizes = lab.gradient_bytes()
network = lab.Network.for_machine(compute, sizes)
print(f"backward pass {1e3 * (compute.backward - compute.forward):.0f} ms, "
      f"{len(sizes)} gradients, {sum(sizes) / MB:.1f} MB")
print(SlowNetwork(*network))

# %% [markdown]
# From these numbers we can predict a step. The network is a queue: a bucket leaves when its last
# gradient is complete and the link is free. It then occupies the link for the time of an
# all-reduce. With a latency of $\alpha$ seconds per message and a bandwidth of $\beta$ bytes per
# second, a bucket of $n$ bytes takes
#
# $$2\,(N-1)\,\Big(\alpha + \frac{n}{N\,\beta}\Big) \text{ seconds on } N \text{ ranks}$$
#
# because each rank sends $2(N-1)$ messages of $n/N$ bytes, one after the other. (In this algorithm,
# which chapter 5 builds, the ranks form a *ring*: each sends only to the next.) The bytes are those
# of section 2; the latency is what buckets save.

# %%
show_source(transfers)

# %% [markdown]
# Now we measure three versions: naive (one message per gradient, after the backward pass), hooked
# (one message per gradient, when it is ready), and bucketed, with five sizes of buckets. They take
# turns, one step of each at a time, so that a drift of the machine's speed meets them all. A step
# that sends nothing is in every round; the predictions use its compute.
#
# First we compare these three, with buckets of 2 MiB in the third. The table lists for each version
# the step time (predicted, then the median of five with the middle half in parentheses), the
# exposed time and the length of the backward pass. `alone` is the backward pass of the step that
# sends nothing. Then each version has a figure: the dashed lanes are predicted, the solid ones are
# the median step, and hatching is idle time.
#
# **Predict.** The naive version overlaps nothing and exposes all of the communication, the bytes
# and the latencies. How much must the hooked version still expose, in backward passes? Which bucket
# of the bucketed version can never be hidden, whatever the network?

# %% tags=["exhaustive"]
candidates = {f"{size} KiB": size * KiB for size in (256, 1024, 2048, 4096, 16_384)}
applies = {"naive": apply_naive_data_parallel, "hooked": apply_hooked_data_parallel,
           **{name: lab.sized(size) for name, size in candidates.items()}}
compute, steps = lab.measure(applies, network)
one_by_one = [[index] for index in reversed(range(len(sizes)))]
sent = {"naive": network.predict(compute, one_by_one, overlapped=False),
        "hooked": network.predict(compute, one_by_one)}
for name, size in candidates.items():
    sent[name] = network.predict(compute, lab.buckets_of(size))
steps["bucketed"], sent["bucketed"] = steps["2048 KiB"], sent["2048 KiB"]

# %% tags=["output-three", "exhaustive"]
three = {name: steps[name] for name in ("naive", "hooked", "bucketed")}
lab.print_steps(compute, sent, three)

# %% tags=["figure-naive", "exhaustive"]
def draw(name, alt):
    """Draw the predicted lanes above what the ledgers saw in the median step."""
    step = lab.median_step(steps[name])
    lanes = rank_lanes(step.calls, step.spans)
    show(timeline(lanes, step_lanes(compute, sent[name]), "ms, network emulated"), alt=alt)


middle = {name: lab.median_step(found) for name, found in three.items()}
exposed, backward = ({name: 1e3 * getattr(step, kind) for name, step in middle.items()}
                     for kind in ("exposed", "backward"))
draw("naive", claim(exposed["naive"] == max(exposed.values()), (
    f"Naive: a rank computes, then it sends; {exposed['naive']:.0f} ms of communication are "
    "exposed, more than in the other two.")))

# %% [markdown]
# (In the table, two of the `calls` carry no gradients: the number of tokens and the loss.) In the
# predicted lane each stripe is a gradient, and a narrow one is almost only latency, paid twice.
# Measured stripes also include waiting: the faster rank's first gradient is on its way until the
# slower rank has finished its backward pass. (The thin stripe at the very start is the all-reduce
# of the number of tokens. What lies between the last all-reduce and the optimizer, such as
# clipping, has the color of the backward pass. Where several all-reduces complete together, only
# the first one's stripe is wide.) In the hooked version, gradients leave earlier:

# %% tags=["figure-hooked", "exhaustive"]
alone_ms = 1e3 * (compute.backward - compute.forward)
draw("hooked", claim(exposed["hooked"] < exposed["naive"] / 2, (
    f"Hooked: {exposed['hooked']:.0f} ms are exposed after the backward pass, which takes "
    f"{backward['hooked']:.0f} ms, and {alone_ms:.0f} if it sends nothing.")))

# %% [markdown]
# <details><summary>Answer</summary>
#
# A backward pass hides no more than its own length. The network was chosen to need three fifths of
# one for the bytes and a whole one for the latencies, so about three fifths remain exposed. (The
# table may say something else, because the machine's speed has changed since we chose the network,
# or because a slower backward pass hides more.) The bytes alone would fit; together with a latency
# for every tensor they do not. In the bucketed version the last bucket is complete only when the
# backward pass ends, so nothing can hide it; the one before may still be on its way.
#
# </details>
#
# Now compare the backward passes in the table. The naive one is a control: it is measured like the
# others, but its all-reduces start only afterwards. If it takes about as long as `alone`, and the
# hooked one takes longer, then the hooks, or the collectives that they start, slow the backward
# pass down. Buckets need only a few collectives:

# %% tags=["figure-bucketed", "exhaustive"]
medians = {name: lab.spread(steps[name])[1] for name in exposed}
draw("bucketed", claim(medians["bucketed"] == min(medians.values()), (
    f"Bucketed: {exposed['bucketed']:.0f} ms are exposed, the backward pass takes "
    f"{backward['bucketed']:.0f} ms, and the step is the shortest of the three: "
    f"{medians['bucketed']:.0f} ms, hooked {medians['hooked']:.0f}.")))

# %% [markdown]
# In the network lanes, each wide stripe is now a bucket. What lies below the backward pass is
# hidden, and the hatched gap behind the backward pass is what remains exposed.
#
# The prediction leaves out three things. Starting and completing collectives and copying gradients
# into buckets take processor time. Every collective waits for the slower of the two ranks. And
# there are two small all-reduces, of the number of tokens and of the loss.
#
# ### How large should a bucket be?
#
# We chose 2 MiB. Here are all five sizes, from the same measurement: the prediction (dashed), and
# the median (dot) and middle half (line) of the measured steps. In the table, `again` repeats the
# prediction with the measured length of the slower rank's backward pass.
#
# **Predict.** What speaks for small buckets, and what for large ones? So what does the step time
# look like as a function of the bucket size? What would move its minimum to smaller buckets?

# %% tags=["figure-buckets", "exhaustive"]
spreads = {name: lab.spread(steps[name]) for name in candidates}
predicted = {name: lab.end_of(compute, sent[name]) for name in candidates}
again = {name: lab.predict_again(network, compute, steps[name], size)
         for name, size in candidates.items()}
lab.print_buckets(compute, predicted, again, {name: steps[name] for name in candidates})
print(f"predicted best: {min(predicted, key=predicted.get)}")
show(ranges(spreads, predicted, "step (ms), network emulated"), alt=(
    "Step time by bucket size; the lines span the middle half of the repeats. "
    + lab.told_apart(spreads) + " "
    + lab.explained(spreads, predicted, again, {name: steps[name] for name in candidates})
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Small buckets leave early and pay the latency often; large ones leave late and pay it rarely. So
# the prediction is a valley. 256 KiB hold at most one matrix, so most gradients pay the latency. 16
# MiB hold all that the small first bucket leaves, so the second one waits for the end of the
# backward pass. Near the minimum the predicted times lie close together, so the measured order may
# be a different one. A shorter latency moves the minimum to smaller buckets, because then many
# messages cost little. PyTorch's default is 25 MiB, with a first bucket of 1 MiB so that the
# network starts early ([Li et al. 2020](https://arxiv.org/abs/2006.15704), section 5); the package
# does the same.
#
# </details>
#
# What does the gap between prediction and measurement consist of? The last two columns show how
# much longer the backward pass gets than alone. The second prediction includes that, so the part of
# the gap that it closes is a longer backward pass. With 16 MiB, hardly anything is sent during that
# pass. If it still takes longer than alone, the cause is what every bucketed version does there:
# its hooks, and the copies into the buckets. What smaller buckets add is the cost of more
# collectives, which compete with the computation for the processor. What remains of the gap has
# other causes; if it is no larger than the middle half, it may be noise.
#
# ### On real GPUs
#
# The same functions predict a step of Llama 3.2 1B on 64 H100s, each with 8,192 tokens and
# computing at 40 % of its peak. A *node* is one machine, here with eight GPUs. NVLink connects them
# with 450 GB/s per direction, and each network card connects the node to others with 50 GB/s
# (NVIDIA's datasheets, 2023; the cards have 400 Gb/s). One ring over all 64 enters and leaves each
# node through one card and is as fast as this slowest link, so we start with 50 GB/s, and we assume
# a latency of 10 microseconds per message. (Eight rings at once, each through its own card with an
# eighth of the bytes, make it 400 GB/s.) The next cell is an *explorer*: in a live notebook, it has
# sliders.

# %% tags=["figure-explorer"]
bucket_explorer()

# %% [markdown]
# Whatever lies to the right of the backward pass is exposed. The wide block at the end is the
# embedding's gradient. The head uses the same matrix, so this gradient has two parts: the backward
# pass begins with the head's and ends with the input embedding's. While it computes the first part,
# there is nothing to send, so the buckets leave late. Almost half of the time in which the network
# is busy is latency, not bytes: with 64 ranks, each bucket waits for $2(N-1)$ messages, one after
# the other.
#
# So how long is the backward pass on a real GPU? Here is a step of six layers of a 1.3B Llama on an
# H200, whose peak is that of the H100: four sequences of 2,048 tokens, bfloat16 autocast, no
# communication. The recorded lane is read off a profiler's trace. The predicted one is the
# planner's ([chapter 12](chapter:12)), which adds up the kernels' estimated times and gives a third
# of the sum to the forward pass. Below the figure, the same step in numbers:

# %%
shown = recorded.one_step()
show_text(shown.sentence)
show(shown.figure, alt=shown.alt)

# %% tags=["output-recorded", "nbval-check-output"]
for name, milliseconds in lab.recorded_times().items():
    print(f"{name:42}{milliseconds:6.1f} ms")

# %% [markdown]
# The planner's backward pass is a seventh too short. The trace shows the main reason. Over the
# whole step, kernels other than matrix multiplications, attention and the optimizer take 23.5 ms.
# The planner allows 16.0 ms for them, even with attention included. The explorer's flat 40 %
# happens to suit this model. Do not count on it for another one; measure.
#
# Suppose this step needed an all-reduce of its gradients, with 16 bits each. How many milliseconds
# would be exposed after the recorded backward pass? We take 10 microseconds per message between
# nodes, as in the explorer, and 3 on NVLink:

# %% tags=["output-verdict", "nbval-check-output"]
links = {"NVLink, 8 ranks": (8, 3e-6, 450 * GB), "8 cards, 64 ranks": (64, 10e-6, 400 * GB),
         "1 card, 64 ranks": (64, 10e-6, 50 * GB)}
layer_sizes, six_layers = lab.recorded_step()
buckets = in_buckets(layer_sizes)
print(f"backward pass {1e3 * (six_layers.backward - six_layers.forward):.1f} ms, gradients "
      f"{sum(layer_sizes) / MB:.0f} MB in {len(buckets)} buckets")
print("                            all-reduces (ms)              exposed (ms)")
print("                          bytes      latency  bytes alone with latency")
for name, (N, latency, rate) in links.items():
    queues = [transfers(six_layers.ready, layer_sizes, buckets, N, each, rate)
              for each in (0, latency)]
    row = [*lab.bytes_and_latency(layer_sizes, N, latency, rate),
           *(exposed_seconds(six_layers, queue) for queue in queues)]
    print(f"{name:18}", *(f"{1e3 * seconds:12.1f}" for seconds in row))

# %% [markdown]
# On NVLink, next to nothing. On one card, the bytes take a little less than the backward pass, and
# some are exposed even without latency: the embedding's gradient is complete only when the backward
# pass ends, so nothing hides its bucket, and it must queue behind what is left of two others. And
# the latency alone takes longer than the backward pass: PyTorch's 25 MiB make 32 buckets here, and
# each waits for all 2 (N-1) messages. Eight cards do not help against that; larger buckets would,
# and so would chapter 5's algorithms.
#
# To be hidden, the all-reduces must take no longer than the backward pass. (That is necessary but
# not sufficient: the last bucket is exposed in any case.) How many tokens must each rank have for
# that? With P parameters, the backward pass takes about 4 P FLOPs per token, and each rank sends
# about 2 x 2 P bytes (2 bytes per gradient, times nearly 2 by section 2's formula).
#
# **Predict.** How many tokens per rank does it take on one card? Does Llama 3 8B need more tokens
# than Llama 3.2 1B, or fewer? Take the bytes alone first. Then add the latency: which of the two
# models suffers more from it? (Compare their matrices with 25 MiB.)
#
# The first row of the table is the rule that you have found. Each further row adds one correction
# to those above it: what a rank sends precisely, attention's FLOPs (in sequences of 8,192 tokens),
# an input embedding with weights of its own, and the latency.

# %% tags=["output-tokens", "nbval-check-output"]
columns = [lab.tokens_to_hide(shape, *link, speed)
           for link in links.values() for shape in (llama_1b, llama_8b)]
print("tokens per rank", *(f"{name:>20}" for name in links), sep="")
print(" " * 15 + "  Llama 1B  Llama 8B" * len(links))
for row in columns[0]:
    print(f"{row:15}", *(f"{column[row]:10,.0f}" for column in columns), sep="")

# %% [markdown]
# <details><summary>Answer</summary>
#
# By the rule, neither: both times are proportional to P, so P cancels. What remains, for any model,
# is the FLOP/s that the GPU achieves, divided by the link's bytes per second: 7,915 tokens on one
# card, and in float32 twice as many. The corrections:
#
# - **Bytes:** fewer tokens. A rank sends (N-1)/N of 2 x 2 P bytes: a 64th less with 64 ranks, an
#   eighth less with 8.
# - **Attention:** fewer. Its scores and weighted sums take FLOPs but have no parameters. The larger
#   model saves less, because attention is a smaller share of its FLOPs. (A rank with fewer than
#   8,192 tokens has a shorter sequence and so less attention; its number lies between this row and
#   the one above.)
# - **Input embedding:** more for Llama 3 8B, where it has gradients but no FLOPs. Llama 3.2 1B uses
#   the same matrix in its head, so nothing changes.
# - **Latency:** more, above all for the smaller model. Most of the larger model's matrices exceed
#   25 MiB, so each is a long message by itself; the smaller model sends more messages per byte. On
#   one card it needs 10,074 tokens. The explorer has 8,192, so it exposes more than the last
#   bucket. Eight cards divide the bytes' part by eight, but the latency of a ring over 64 ranks
#   stays.
#
# Without the latency, the larger model needs more tokens; with that of 64 ranks, the smaller one
# does.
#
# </details>
#
# This is also the limit of data parallelism. Every rank needs its hundreds or thousands of tokens,
# so the global batch grows with the number of ranks, and chapter 1 showed that beyond a certain
# size a larger batch buys less and less. How large does it become for Llama 3 8B, at 50 GB/s?

# %% tags=["output-limit", "nbval-check-output"]
print("         tokens per step to hide (million)")
print(" ranks   the bytes   and a ring's latency")
for N in (8, 64, 1024, 16384):
    need = lab.tokens_to_hide(llama_8b, N, 10e-6, 50 * GB, speed)
    num_bytes, both = (N * need[row] / 1e6 for row in ("input embedding", "latency"))
    print(f"{N:6,} {num_bytes:11.2f} {both:22,.2f}")

# %% [markdown]
# The bytes alone ask for 108 million tokens on 16,384 ranks. One ring through all of them, with
# 25 MiB buckets, asks for over a hundred times as many, because every bucket then waits for 2 (N-1)
# messages. Larger buckets help against that, and so do algorithms with fewer messages (chapter 5);
# against the bytes they do not. Once the batch cannot grow any further, the ranks have to split
# something else, as in [chapter 7](chapter:7).
#
# ## 8. Recap
#
# 1. Every rank holds the full model and reads its own samples; the mean of the ranks' gradients is
#    the gradient of the global batch, up to the order of the additions.
# 2. In an all-reduce each rank sends 2 (N-1)/N times the gradients' bytes. These bytes hardly
#    depend on the number of ranks, though the latency does. With `no_sync` they do not depend on
#    the number of micro-batches either.
# 3. With AdamW, a sum instead of a mean, or a hook that averages weights, still gives a healthy
#    loss curve. The oracle finds both, because it compares gradients.
# 4. Hooks let the network work during the backward pass; buckets pay the latency once for many
#    tensors. By the queue's prediction, the best bucket size lies between the extremes.
# 5. To hide the bytes of the all-reduce, each rank needs, to a first approximation, as many tokens
#    as the FLOP/s that its GPU achieves, divided by the link's bytes per second, with 16-bit
#    gradients and whatever the model. Hiding the latency as well takes more, and the last bucket is
#    always exposed.
#
# ## Exercises
#
# Write your answers into `exercises/ch04_data_parallel.py`, save, and run the exercise's cell. In a
# terminal, `minitron hint 4.1` gives hints in three steps.
#
# - [**4.1 Naive averaging**](exercise:4.1) (15 minutes): section 4's loop, for tied, frozen and
#   unused parameters.
# - [**4.2 Fill the buckets**](exercise:4.2) (10 minutes): which gradients travel together, given
#   their sizes and a limit.
# - [**4.3 Overlap by hooks**](exercise:4.3) (20 minutes): section 5's idea, without its trap.
# - [**4.4 Buckets**](exercise:4.4) (30 minutes): one all-reduce per bucket, and none under
#   `no_sync`.

# %%
check("4.1")

# %%
check("4.2")

# %%
check("4.3")

# %%
check("4.4")

# %% [markdown]
# ## Further reading
#
# - Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel
#   Training](https://arxiv.org/abs/2006.15704), VLDB 2020, sections 3 and 5: the three versions,
#   and the bucket size measured with two backends.
# - Goyal et al., [Accurate, Large Minibatch SGD: Training ImageNet in 1
#   Hour](https://arxiv.org/abs/1706.02677), 2017, sections 2 and 3: the learning rate of a large
#   batch, and averaging mistakes that still train.
# - Patarasuk, Yuan, [*Bandwidth Optimal All-reduce Algorithms for Clusters of
#   Workstations*](https://doi.org/10.1016/j.jpdc.2008.09.002), Journal of Parallel and Distributed
#   Computing 69(2), 2009: why 2 (N-1)/N is the minimum.
