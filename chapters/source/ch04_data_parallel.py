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
# # Data parallelism: many devices, one training
#
# **50 minutes. No GPU. Exercises 4.1 to 4.4.**
#
# *You need:* chapter 1's step and its global batch, and chapter 2's account of who holds what.
#
# *You will be able to:*
# - **train** one model on several processes, so that it is provably the training of one process;
# - **hide** the communication behind the backward pass, and predict what stays exposed;
# - **find** the bug that no loss curve shows, with an instrument that names the factor.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from minitron import cost
from minitron.launch import RankError, run
from minitron.launch.slow_network import SlowNetwork

# %%
from minitron.config import ModelConfig, TrainConfig
from teaching.check import check
from teaching.figures import (
    Held, curves, holdings, rank_lanes, scaling, show, timeline, wire,
)
from teaching.overlap import Compute, step_lanes, transfers
from teaching.widgets import bucket_explorer
from minitron.dataset import TokenDataset, write_shard
from minitron.measure.clock import DENSE_BF16_PEAKS
from minitron.measure.ledger import Ledger, merged
from minitron.proof.oracle import after_backward, assert_same_training

# %%
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.data.ddp import (
    FIRST_BUCKET_BYTES, BucketedDataParallel, HookedDataParallel, apply_bucketed_data_parallel,
    apply_hooked_data_parallel, apply_naive_data_parallel, assign_buckets, average_gradients,
)
from minitron.step import make_optimizer, train_step

torch.set_num_threads(1)
MB, GB = 1e6, 1e9

# %% [markdown]
# ## 1. The question
#
# The model card of Llama 3 8B says: 1.3 million GPU hours on H100s. How long is that on one of
# them, and how many would finish in a month?

# %% tags=["output-question", "nbval-check-output"]
hours = 1.3e6
print(f"one H100: {hours / 24 / 365:.0f} years")
print(f"in 30 days: {hours / 24 / 30:,.0f} H100s, if none of them ever waits")

# %% [markdown]
# The batch of a step has millions of tokens, and each sequence in it can be worked on by another
# device. So the work is easily shared. The *result* is not: at the end of the step there must be
# one model.

# %% [markdown]
# ## 2. Estimate
#
# Every process, a **rank**, holds the whole model and reads its own part of the global batch. Its
# backward pass gives the gradient of its part. The gradient of the whole batch is the mean of
# these, so the ranks need one operation: everyone contributes a tensor, everyone gets the sum. It
# is called **all-reduce**, and the best algorithms make each rank send
#
# $$2\,\frac{N-1}{N}\,G \text{ bytes, for gradients of } G \text{ bytes on } N \text{ ranks}$$
#
# (Patarasuk & Yuan 2009; chapter 5 builds one of them).
#
# **Predict.** Llama 3 8B with gradients in bfloat16, each H100 with its own 400 Gb/s network card
# (50 GB/s), 8,192 tokens per rank and step. What takes longer, the backward pass or the all-reduce?
# And with 2,048 ranks instead of 8?
#
# <details><summary>Answer</summary>
#
# The backward pass, but not by much. And the number of ranks hardly matters: from 8 to 2,048 the
# bytes grow by a seventh.
#
# </details>

# %% tags=["output-estimate", "nbval-check-output"]
llama_8b, tokens = cost.published_llama(32, 4096, 32, 8, 14336, 128256, 8192), 8192
G = 2 * cost.num_parameters(llama_8b)
speed = 0.40 * DENSE_BF16_PEAKS["H100"]  # FLOP/s, at 40 % of the peak
backward = tokens * cost.backward_flops_per_token(llama_8b, tokens) / speed
print(f"gradients {G / GB:.1f} GB, backward pass {backward:.2f} s")
print("ranks   sent by each   all-reduce")
for N in (2, 8, 64, 2048):
    sent = cost.ring_all_reduce_volume(G // 2, 2, N, rank=0).sent
    print(f"{N:5,} {sent / GB:11.1f} GB {sent / (50 * GB):10.2f} s")

# %% [markdown]
# If the ranks first compute and then talk, a good part of the time goes into talking. If they can
# do both at the same time, nearly all of it could vanish. That is the plot of this chapter: first
# make it right, then make it disappear.

# %% [markdown]
# ## 3. Picture
#
# Who holds what? Llama 3.2 1B, a batch of four sequences, four ranks. **Predict:** which of the
# four kinds of bytes does data parallelism divide by four?

# %% tags=["figure-holdings"]
llama_1b, recipe = cost.PUBLISHED["Llama 3.2 1B"], cost.RECIPES["bf16"]
P = cost.num_parameters(llama_1b)
state = {"parameter": recipe.parameter * P, "gradient": recipe.gradient * P,
         "optimizer state": (recipe.master + recipe.optimizer_state) * P}
four = cost.activation_bytes(llama_1b, 4, 2048)
row = {kind: Held(num_bytes) for kind, num_bytes in state.items()}
row["activation"] = Held(four / 4, 0.25)
show(holdings({f"rank {rank}": row for rank in range(4)}), alt=(
    "Every rank holds the whole model, its gradients and its optimizer state; "
    "only the activations are shared out."
))

# %% [markdown]
# Only the activations. Data parallelism shares work, not memory: a model that does not fit on one
# device does not fit on a thousand of them this way.
#
# ### Who reads what
#
# The sequences of one step are the **global batch** (GBS). A rank works through its part in
# micro-batches (MBS), and adds up the gradients of several of them (GA, accumulation) before the
# ranks talk:
#
# $$\text{GBS} = \text{MBS} \times \text{GA} \times \text{DP}$$
#
# with DP ranks. What the step computes must depend on GBS alone, not on how it was cut. So a rank
# does not own a part of the data set. It takes its share of the *sample numbers* of this step:

# %%
workspace = tempfile.TemporaryDirectory()
S, GBS = 4, 8
write_shard(Path(workspace.name) / "train_0.bin", np.arange(400))
data = TokenDataset(Path(workspace.name), "train", sequence_length=S, seed=0)

# %% tags=["output-samples", "nbval-check-output"]
whole = data.batch(position=16, batch_size=GBS)[:, 0] // S  # a sample's first token tells which
print("one process:", whole.tolist())
for DP in (2, 3, 4):
    parts = [data.batch(16, GBS, rank, DP)[:, 0] // S for rank in range(DP)]
    same = sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())
    print(f"{DP} ranks:    ", *(part.tolist() for part in parts), "together the same:", same)

# %% [markdown]
# With three ranks the parts are not equal, and that is allowed: each rank divides its summed loss
# by its *fair share* of all tokens, a third, not by its own number. A run can stop on 4 ranks and
# go on with 3: the position in the data is one number, and it counts the samples of all ranks.

# %% [markdown]
# ## 4. By hand
#
# `run(function, 4)` starts four processes and calls `function(group)` in each. `group` is how they
# reach each other: `group.rank()` is who I am, `group.size()` how many we are. Nothing else differs
# between them. They run the same code, with the same seed, so they hold the same weights.

# %%
generator = torch.Generator().manual_seed(0)
batch = torch.randint(64, (16, 25), generator=generator)


def build():
    model = Transformer(ModelConfig("gpt", 64, 24, 2, 32, 4, 4, 128))
    initialize(model, seed=0)
    return model.double()


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


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
for rank, gradient in enumerate(run(by_hand, 4)):
    error = (gradient - alone).abs().max() / alone.abs().max()
    print(f"rank {rank}: off by {error:.0e} of the largest value")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The same up to rounding: the numbers are added in another order, and floating-point addition
# notices. In float64 that is the sixteenth digit. All four ranks agree with each other exactly,
# because each gets the same sum. This matters: they never compare their weights again.
#
# </details>
#
# ### What a mistake looks like
#
# A collective is a meeting. If one rank does not come, the others wait. Here rank 2 has an empty
# part and goes home early:

# %% tags=["output-hang"]
def early(group):
    total = torch.ones(1000)
    if group.rank() == 2:
        return  # "nothing to do for me"
    dist.all_reduce(total, group=group)


try:
    run(early, 4)
except RankError as error:
    print(error)

# %% [markdown]
# On a cluster you would see GPUs at full load and nothing else, until NCCL's time-out some minutes
# later. Here the launcher asks each rank where it is. And if ranks meet in different calls, it says
# so before anyone waits long, for it compares what they announce:

# %% tags=["output-mismatch"]
def confused(group):
    loss = torch.ones(1)
    if group.rank() != 2:
        dist.all_reduce(loss, group=group)  # "rank 2 does not log anyway"
    dist.barrier(group)


try:
    run(confused, 4)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## 5. The trap: the loss looks fine
#
# Why wait for the end of the backward pass? A hook can send each gradient as soon as it is there.
# PyTorch offers `register_post_accumulate_grad_hook`: your function is called when a parameter's
# gradient is complete. Read the code. Would it pass your review?


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
# And a second version, which runs after the backward pass and leaves the division out. Both teach a
# table of 64 tokens to count in sevens: the next token is the last one plus 7, modulo 64. AdamW,
# four ranks.


# %%
def sum_by_hand(model, group):
    for p in trained(model):
        dist.all_reduce(p.grad, group=group)


def counting_rows(step):
    own = torch.Generator().manual_seed(step)
    return (torch.randint(64, (16, 1), generator=own) + 7 * torch.arange(25)) % 64


# %%
def train(group, hook, finish, num_steps=60):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hook(model, group)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, counting_rows(step)[group.rank() :: group.size()])
        loss.backward()
        finish(model, group)
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
def nothing(model, group):
    pass


def train_all(group):
    """Losses (version, step) of this rank."""
    versions = ((nothing, average_gradients), (nothing, sum_by_hand), (hook_by_hand, nothing))
    return torch.tensor([train(group, *version) for version in versions])


# %% tags=["figure-trap"]
mean_losses = torch.stack(run(train_all, 4, watch=False)).mean(0)
right, summed, hooked = mean_losses.tolist()
show(curves(range(1, 61), {"the sum": summed, "the hook": hooked}, "step",
            "loss (nats per token)", {"the mean, as it should be": right}), alt=(
    "Three losses fall to zero as if nothing were wrong. Two of the three trainings are wrong."
))

# %% [markdown]
# Three healthy curves, all the way to zero. Now the **oracle**: it trains a small model on N ranks
# and in one process, with the same samples, in float64, with SGD and with AdamW, and compares
# losses, every gradient and every parameter on every rank after every step. What does it say of
# ours?

# %% tags=["output-oracle-trap"]
def verdict(apply, num_ranks=4):
    try:
        assert_same_training(apply, num_ranks)
        return "the same training"
    except AssertionError as error:
        return str(error)


def with_hook(model, group):
    hook_by_hand(model, group)
    return after_backward(nothing)(model, group)  # equal weights at the start


print("SUM\n" + verdict(after_backward(sum_by_hand)))
print("\nHOOK\n" + verdict(with_hook))

# %% [markdown]
# **The sum** is a gradient N times too large. AdamW divides each gradient by its own size, so it
# does not care, and that is why the oracle also trains with SGD. You would notice the day you
# switch on gradient clipping, or change the number of ranks.
#
# **The hook** is worse. `register_post_accumulate_grad_hook` passes the *parameter*. The argument
# is called `grad`, and everyone who reads the function believes it. What it averages is the
# weights, half-way through the backward pass, while every rank keeps its own gradient. Each rank
# trains on its own data and is pulled back to the others one step late.
#
# This bug is not invented. A public code base for teaching has it, in its `DataParallelNaive`
# (huggingface/picotron, `picotron/data_parallel/data_parallel.py`, as of August 2025): the method
# `_allreduce_grads(self, grad)` is registered with this very hook. With `register_hook`, which
# passes the gradient, the same body is right. The cells above are all it takes to reproduce it.

# %% [markdown]
# ## 6. The real one
#
# The package has three versions. The naive one you know:

# %%
print(inspect.getsource(average_gradients))

# %% [markdown]
# It divides before the sum, so that N gradients in 16 bits cannot overflow, and it does not let a
# rank stay away whose data did not touch a parameter. The hooked one differs in *when*. Find the
# line that may make a gradient wait although it is ready, and the reason.

# %%
print(inspect.getsource(HookedDataParallel.collect))
print(inspect.getsource(HookedDataParallel.accept))
print(inspect.getsource(HookedDataParallel.send))

# %% [markdown]
# `async_op=True` starts the all-reduce and returns at once; `finish()` waits for all of them. The
# `while` loop sends in one fixed order. Autograd may complete gradients in another order on another
# rank, and then two ranks would meet with different tensors.
#
# The bucketed one differs in *how much*. A message costs a fixed time, the latency, however short
# it is, and a model has hundreds of small tensors. So gradients are copied into flat **buckets**,
# and each bucket is one message. `assign_buckets` starts with the last parameter, whose gradient is
# ready first:

# %%
print(assign_buckets([40, 10, 20, 30], bucket_bytes=50), "\n")
print(inspect.getsource(BucketedDataParallel.prepare))
print(inspect.getsource(BucketedDataParallel.send))

# %% [markdown]
# `torch.mul(..., out=view)` is the copy and the division in one. From then on `.grad` *is* a view
# into the bucket: nothing is copied back. The oracle, on every number of ranks:

# %% tags=["output-oracle", "nbval-check-output"]
small_buckets = partial(apply_bucketed_data_parallel, bucket_bytes=5_000)  # several of them
applies = {"naive": apply_naive_data_parallel, "hooked": apply_hooked_data_parallel,
           "bucketed": small_buckets}
for num_ranks in (1, 2, 3, 4):
    for name, apply in applies.items():
        print(f"ranks: {num_ranks}  {name:9} {verdict(apply, num_ranks)}")

# %% [markdown]
# That includes a batch that does not divide by the number of ranks, a frozen parameter, a tied
# embedding, and ranks that were seeded differently on purpose.
#
# ### Accumulation and `no_sync`
#
# With four micro-batches per step, the ranks could average after each backward pass.
#
# **Predict.** What would be wrong with the result? What would be wrong with the wire?

# %%
def accumulate(group, sync_each):
    model = build()
    parallel = apply_naive_data_parallel(model, group)
    mine = batch[group.rank() :: group.size()]
    with Ledger() as ledger:
        for row in mine.split(1):
            with parallel.no_sync():
                (loss_of(model, row) / len(mine)).backward()
            if sync_each:
                parallel.finish()
        if not sync_each:
            parallel.finish()
    return flat_gradient(model), ledger.calls


# %% tags=["output-nosync", "nbval-check-output"]
measured = {}
for name, sync_each in (("after each of 4", True), ("once, no_sync", False)):
    gradients, calls = zip(*run(accumulate, 4, sync_each), strict=True)
    right = torch.allclose(gradients[3], alone, rtol=1e-12, atol=1e-15)
    print(f"{name:16} gradient right: {right}")
    print(merged(calls), end="\n\n")
    measured[name] = [sum(call.sent for call in rank_calls) for rank_calls in calls]

# %% [markdown]
# <details><summary>Answer</summary>
#
# The result is right: a mean of sums is a sum of means, and averaging what is already equal changes
# nothing. But every pass sends all the bytes. Under `no_sync` gradients add up in `.grad`, and only
# the last pass of the step sends.
#
# </details>
#
# The **ledger** has counted these bytes. It sees every operation that a rank starts, also from
# hooks. Do they agree with the formula of section 2?

# %% tags=["figure-wire"]
elements = [p.numel() for p in build().parameters()]
once = [sum(cost.ring_all_reduce_volume(n, 8, 4, rank).sent for n in elements) for rank in range(4)]
formula = {"after each of 4": [4 * sent for sent in once], "once, no_sync": once}
show(wire(measured, formula), alt=(
    "Averaging after each of four micro-batches sends four times the bytes of averaging once; "
    "both are what the formula says."
))

# %% [markdown]
# ## 7. Measure
#
# Four processes on one machine talk through its memory, and there is hardly anything to hide. So we
# slow the network down. `SlowNetwork` is an **emulation**: each transfer really happens, and
# whoever waits for it sleeps until a link of that latency and bandwidth would have delivered. The
# processor is free meanwhile, so the overlap is real.
#
# Two ranks from here on, and a larger model. First the compute alone: when is each gradient ready?

# %%
wide = ModelConfig("gpt", 256, 128, 4, 256, 4, 4, 1024, tied_embedding=False)
N = 2


def start(seed=0):
    """A model, its optimizer, and one micro-batch of 512 tokens."""
    model = Transformer(wide)
    initialize(model, seed)
    rows = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(seed))
    optimizer = make_optimizer(model, TrainConfig(), torch.device("cpu"))
    return model, optimizer, [(rows[:, :-1], rows[:, 1:])]


# %%
def compute_alone(group, num_steps=6):
    """The fastest of some steps without any communication."""
    model, optimizer, micro_batches = start()
    number = {p: index for index, p in enumerate(model.parameters())}
    ready, steps = [0.0] * len(number), []
    for each in number:
        each.register_post_accumulate_grad_hook(
            lambda p: ready.__setitem__(number[p], time.perf_counter()))
    for _ in range(num_steps):
        with Ledger() as ledger:
            train_step(model, optimizer, micro_batches, 1e-3, 1.0)
        begin, end = ledger.spans[0].start, ledger.spans[-1].end
        forward = ledger.spans[0].end - begin
        steps.append(Compute(forward, [at - begin for at in ready], end - max(ready)))
    return min(steps, key=lambda step: step.backward + step.optimizer)


# %% [markdown]
# Now a network that suits the speed of your machine: all bytes of the gradients take 60 % of the
# backward pass, and the latencies of all of them, sent one by one, take as long as all of it.

# %% tags=["output-compute"]
compute = run(compute_alone, N, watch=False)[0]
backward = compute.backward - compute.forward
sizes = [p.nbytes for p in start()[0].parameters()]
one_by_one = [[index] for index in reversed(range(len(sizes)))]

bandwidth = round(sum(sizes) / (0.6 * backward), -6)
latency = round(backward / (2 * len(sizes)), 5)  # each all-reduce on 2 ranks has two messages
print(f"backward pass {1e3 * backward:.0f} ms, {len(sizes)} gradients, {sum(sizes) / MB:.1f} MB")
print(SlowNetwork(latency, bandwidth))

# %% [markdown]
# The rest of the prediction is a queue. A bucket leaves when its last gradient is ready and the
# link is free:

# %%
print(inspect.getsource(transfers))


# %%
def buckets_of(bucket_bytes):
    """The package's buckets: a small first one, then the others."""
    first = assign_buckets(sizes, min(FIRST_BUCKET_BYTES, bucket_bytes))[0]
    return [first, *assign_buckets(sizes[: -len(first)], bucket_bytes)]


def predict(buckets, overlapped=True):
    """When each transfer runs; without overlap every gradient is ready at the end of backward."""
    ready = compute.ready if overlapped else [compute.backward] * len(sizes)
    return transfers(ready, sizes, buckets, N, latency, bandwidth)


# %%
def slow_steps(group, apply, num_steps=3):
    """Calls, spans and seconds of each step on the slow network."""
    model, optimizer, micro_batches = start()
    parallel, steps = apply(model, group), []
    for _ in range(num_steps):
        dist.barrier(group)
        begin = time.perf_counter()
        with SlowNetwork(latency, bandwidth), Ledger() as ledger:
            train_step(model, optimizer, micro_batches, 1e-3, 1.0, parallel)
        steps.append((ledger.calls, ledger.spans, time.perf_counter() - begin))
    return steps


# %%
def fastest(apply):
    """Calls, spans and seconds, rank by rank, of the step that the slower rank finished first."""
    rank_0, rank_1 = run(slow_steps, N, apply, watch=False)
    steps = [list(zip(*both, strict=True)) for both in zip(rank_0, rank_1, strict=True)]
    return min(steps, key=lambda step: max(step[2]))


# %% [markdown]
# ### Naive: after the backward pass
#
# **Predict.** How long is the step, compared with its compute?

# %%
def draw(apply, sent, alt):
    """The predicted lanes above those that the ledgers have seen."""
    calls, spans, seconds = fastest(apply)
    predicted = step_lanes(compute, sent)
    print(SlowNetwork(latency, bandwidth))
    print(f"step: predicted {predicted['predicted compute'][-1].end:.0f} ms, "
          f"measured {max(seconds) * 1e3:.0f} ms in {len(calls[0])} calls")
    show(timeline(rank_lanes(calls, spans), predicted, "ms, network emulated"), alt=alt)


# %% tags=["figure-naive"]
draw(apply_naive_data_parallel, predict(one_by_one, overlapped=False), (
    "Naive: while gradients travel, nobody computes; while ranks compute, nothing travels."
))

# %% [markdown]
# Each stripe is one gradient. The narrow ones are hardly more than latency.
#
# ### Hooked: as soon as it is ready

# %% tags=["figure-hooked"]
draw(apply_hooked_data_parallel, predict(one_by_one), (
    "Hooked: the network works during the backward pass, but many small messages keep it "
    "busy long after."
))

# %% [markdown]
# Overlap, and still an exposed tail: not bytes but latency, once per tensor. In the measured lanes
# the backward pass itself has grown, too. Starting dozens of calls takes time on the processor.
#
# ### Bucketed: few messages

# %% tags=["figure-bucketed"]
best_size = 2 * 2**20
bucketed = partial(apply_bucketed_data_parallel, bucket_bytes=best_size)
draw(bucketed, predict(buckets_of(best_size)), (
    "Bucketed: the network keeps up with the backward pass, and what is exposed is little more "
    "than the last bucket."
))

# %% [markdown]
# The gap between prediction and measurement has names. Starting and ending a call costs time on the
# processor, most of all where there are many calls; so does copying gradients into buckets. Two
# more small all-reduces, of the number of tokens and of the loss, are not in the prediction. And a
# rank that is late makes the others wait: a stripe much longer than its bytes is such a wait.
#
# ### How large should a bucket be?
#
# **Predict.** Small buckets leave early and pay the latency often. Large ones pay it once and
# leave late. What does the curve of the step time look like, and what moves its lowest point to the
# left?

# %%
KiB = 2**10
candidates = [64 * KiB, 1024 * KiB, 4096 * KiB, 16_384 * KiB]


def milliseconds(bucket_bytes):
    apply = partial(apply_bucketed_data_parallel, bucket_bytes=bucket_bytes)
    return 1e3 * max(fastest(apply)[2])


rounds = [[milliseconds(size) for size in candidates] for _ in range(2)]
taken = [min(both) for both in zip(*rounds, strict=True)]
lanes = [step_lanes(compute, predict(buckets_of(size))) for size in candidates]
predicted = [each["predicted compute"][-1].end for each in lanes]

# %% tags=["figure-buckets"]
print("bucket KiB   buckets   predicted ms   measured ms")
for size, expected, found in zip(candidates, predicted, taken, strict=True):
    print(f"{size // KiB:10} {len(buckets_of(size)):9} {expected:14.0f} {found:13.0f}")
show(scaling([size // KiB for size in candidates], taken, "bucket size (KiB)", "step (ms)",
             predicted), alt=(
    "Small buckets pay the latency often, large ones leave late: the best size lies between."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# A valley. A shorter latency moves it to the left: then small buckets cost nothing. PyTorch's
# default is 25 MiB, with a first bucket of 1 MiB so that the network starts early; the package does
# the same.
#
# </details>
#
# ### On real GPUs
#
# The same functions, with an H100's numbers: 40 % of 989 TFLOP/s, 450 GB/s per direction through
# NVLink inside a node, 50 GB/s through a 400 Gb/s card between nodes (NVIDIA's data sheets), 64
# ranks.

# %% tags=["figure-explorer"]
bucket_explorer()

# %% [markdown]
# In the best of cases the all-reduce is hidden behind the backward pass. How much work must a rank
# have for that? Both are proportional to the number of parameters P. The backward pass takes about
# 4 P FLOPs per token, the all-reduce sends about 2 x 2 P bytes. P cancels.
#
# **Predict.** How many tokens per rank hide the all-reduce between nodes? Does a larger model need
# more of them, or fewer?

# %% tags=["output-tokens", "nbval-check-output"]
links = {"NVLink": 450 * GB, "400 Gb/s": 50 * GB, "100 Gb/s": 12.5 * GB}
print("tokens per rank and step that hide the all-reduce")
print("               rule    Llama 3.2 1B      Llama 3 8B")
for name, rate in links.items():
    needed = []
    for shape in (llama_1b, llama_8b):
        seconds = cost.ring_all_reduce_seconds(2 * cost.num_parameters(shape), 64, 0, rate)
        needed.append(seconds * speed / cost.backward_flops_per_token(shape, 8192))
    print(f"{name:9} {speed / rate:9,.0f}", *(f"{count:15,.0f}" for count in needed))

# %% [markdown]
# <details><summary>Answer</summary>
#
# About as many as the device's FLOP/s divided by the link's bytes per second, whatever the model.
# (Attention adds FLOPs but no gradients, so the exact numbers are somewhat lower.)
#
# </details>
#
# This rule is also the limit of data parallelism. Each rank needs its thousands of tokens, so the
# global batch grows with the number of ranks, and chapter 1 showed that a batch beyond a certain
# size buys less and less. Goyal et al. (2017) went to 256 GPUs with a warm-up and a learning rate
# in proportion to the batch. When the batch must not grow any more, the ranks have to share
# something else than samples.

# %% tags=["output-limit", "nbval-check-output"]
print(" ranks   tokens per step, 8,192 each")
for N_ranks in (8, 64, 512, 4096, 16384):
    print(f"{N_ranks:6,} {N_ranks * 8192 / 1e6:10.2f} million")

# %% [markdown]
# ## 8. Recap
#
# 1. Every rank holds the whole model and reads its own samples; the mean of the ranks' gradients is
#    the gradient of the global batch, up to the order of the additions.
# 2. An all-reduce sends 2 (N-1)/N of the gradients' bytes per rank: the number of ranks hardly
#    matters, and under `no_sync` nor does the number of micro-batches.
# 3. A sum in place of a mean, or a hook that averages weights, has a healthy loss: the oracle sees
#    it, and SGD tells it the factor.
# 4. Hooks let the network work during the backward pass, and buckets pay the latency once for many
#    tensors; the best size lies between.
# 5. What a rank must have to hide the all-reduce is a number of tokens, and it does not depend on
#    the model.
#
# ## Exercises
#
# Write your answers into `exercises/ch04_data_parallel.py`, save, and run the cell. In a terminal,
# `minitron hint 4.1` gives hints in three steps.
#
# **4.1 Naive averaging** (15 minutes): section 4's loop, for tied, frozen and unused parameters.

# %%
check("4.1")

# %% [markdown]
# **4.2 Fill the buckets** (10 minutes): which gradients travel together, from sizes and a limit.

# %%
check("4.2")

# %% [markdown]
# **4.3 Overlap by hooks** (20 minutes): section 5's idea, without its trap.

# %%
check("4.3")

# %% [markdown]
# **4.4 Buckets** (30 minutes): one all-reduce per bucket, none under `no_sync`.

# %%
check("4.4")

# %% [markdown]
# ## Further reading
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020,
#   sections 3 and 5: the three versions, and the bucket size measured on two networks.
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017, sections 2 and
#   3: the learning rate of a large batch, and mistakes in averaging that look like training.
# - Patarasuk, Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, 2009:
#   why 2 (N-1)/N is the least.
