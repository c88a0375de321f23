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
# # Before you launch: will it fit, how fast, how long, how much
#
# **60 minutes. No GPU. Exercises 12.1 to 12.4 (105 minutes).**
#
# *You need:* chapter 2's bytes of a parameter, chapter 5's time of a collective, chapter 9's bubble
# and what its stages hold, chapter 11's grid and its decision tree.
#
# *You will be able to:*
# - **estimate** days, memory and money of a training by hand, and say by which convention;
# - **run** the real step of one rank of a thousand on a laptop, and read its bytes;
# - **choose** a layout by search, and say what binds it.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron import cost

# %%
from minitron.launch import run
from minitron.config import (
    Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig,
)
from teaching.check import check
from teaching.figures import memory_bars, show
from teaching.figures_plan import errors, landscape, step_bars
from teaching.widgets_plan import planner
from minitron.measure.ledger import Ledger
from minitron.parallelize import lay_out

# %%
from minitron.plan import dryrun, dryrun_table
from minitron.plan.decide import decide
from minitron.plan.dryrun import dry_run
from minitron.plan.estimate import estimate
from minitron.plan.explain import RESOURCES, costs_most, doubled
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Decision, Job
from minitron.plan.money import GpuHour, bill, energy, training_days
from minitron.plan.published import published_rows
from minitron.plan.search import Candidate, search
from minitron.plan.systems import MINITRON
from minitron.plan.unseen import sharded_rows, unseen_rows
from minitron.run import Training

# %%
torch.set_num_threads(1)
GB, cpu = 1e9, torch.device("cpu")
A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# Somebody has 1,024 A100s for you, from Monday on, and you want to train GPT-3: 175 billion
# parameters on 300 billion tokens. Until Monday you have a laptop. What can you know by then?

# %% tags=["output-question", "nbval-check-output"]
gpt3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200, dropout=0.0)
S, tokens = 2048, 300e9
P = cost.num_parameters(gpt3)
state, work = 16 * P, 6 * P * tokens
hours = 24 * training_days(work, 1, 0.5 * A100.bf16_flops)
print(f"16 bytes for each parameter: {state / 1e12:.1f} TB, an A100 has "
      f"{A100.memory_bytes / GB:.0f} GB")
print(f"6 FLOPs for each parameter and token: {work:.2g}, at half of an A100's peak "
      f"{hours / 24 / 365:.0f} years")
print(f"that is {hours / 1e3:,.0f} thousand GPU-hours, and at 2 dollars each "
      f"{2 * hours / 1e6:.1f} million dollars")

# %% [markdown]
# (2 dollars for a GPU-hour is an assumption, that of the DeepSeek-V3 report. Put in yours.)
#
# A layout that does not fit says so on Monday. A layout that is half as fast as it could be says
# nothing at all, and costs another million. So before you launch there are four questions. Will it
# fit? How fast is a step? How long does the training take? And what does it cost?

# %% [markdown]
# ## 2. Estimate
#
# The oldest formula: a training has 6 N T FLOPs, for N parameters and T tokens. Divide by what all
# GPUs do in a second. The one thing you do not know is which share of the peak they reach.
#
# **Predict.** Take 40 %. By how much are you wrong?

# %%
TRAINED = {  # parameters, tokens, device, GPU-hours as published
    "LLaMA 65B": (65.2e9, 1.4e12, A100, 1_022_362),
    "Llama 2 70B": (69.0e9, 2.0e12, A100, 1_720_320),
    "BLOOM 176B": (176.2e9, 366e9, A100, 1_082_990),
    "Llama 3.1 70B": (70.6e9, 15e12, H100, 7_000_000),
    "Llama 3.1 405B": (405.9e9, 15.6e12, H100, 30_840_000),
}

# %% tags=["output-hours", "nbval-check-output"]
print("                  6 N T    hours, at 40 %     published   reached, of the peak")
for name, (number, read, device, hours) in TRAINED.items():
    flops = 6 * number * read
    by_hand = 24 * training_days(flops, 1, 0.4 * device.bf16_flops)
    print(f"{name:15} {flops:8.2g} {by_hand:17,.0f} {hours:13,} "
          f"{flops / (3600 * hours * device.bf16_flops):15.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# By less than a factor of two, from two numbers and no GPU. Two of these trainings did better and
# three worse: 40 % is what a good step reaches, and GPU-hours also count what is lost between the
# steps. (Llama 3.1's are those of the model card, which does not say what is in them.)
#
# </details>
#
# Sources: LLaMA paper, table 15; Llama 2 and Llama 3.1 model cards; BLOOM: Luccioni et al. 2022.
#
# **Which FLOPs?** Narayanan et al. 2021 (section 5.1) plan this very training: 1,024 A100s, 300
# billion tokens, 140 TFLOP/s on each, so 34 days. **Predict.** Is that 6 N T?

# %% tags=["output-convention", "nbval-check-output"]
for each in (6, 8):
    days = training_days(each * 175e9 * tokens, 1024, 140e12)
    print(f"{each} N T at 140 TFLOP/s a GPU: {days:.0f} days")
print(f"140 are {140e12 / A100.bf16_flops:.0%} of the peak; without what is computed again, "
      f"{0.75 * 140e12 / A100.bf16_flops:.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# It is 8 N T. They recompute all activations, so the forward pass is done twice, and their 140 are
# **hardware FLOPs**. The training needs the 6: **model FLOPs**. Who divides model FLOPs by a rate
# of hardware FLOPs plans nine days too few.
#
# </details>
#
# **Will it fit?** Take tp 8 inside the nodes, 8 stages, 16 copies with ZeRO-1, and one sequence a
# micro-batch. Gradients are summed in float32. **Predict.** How many GB does a GPU of the first
# stage hold, and what is most of it?

# %% tags=["output-memory", "nbval-check-output"]
t, p, d = 8, 8, 16
weights, gradients = 2 * P / (t * p), 4 * P / (t * p)
optimizer = 12 * P / (t * p * d)  # masters, mean and square: ZeRO-1 divides them
block = cost.activation_bytes_per_layer(gpt3, 1, S, layout=cost.Layout(t, sequence_parallel=True))
activations = p * (gpt3.num_layers // p) * block  # p micro-batches are on their way through it
by_hand = {"parameter": weights, "gradient": gradients, "optimizer state": optimizer,
           "activation": activations}
print(", ".join(f"{kind} {size / GB:.1f} GB" for kind, size in by_hand.items()))
print(f"in all {sum(by_hand.values()) / GB:.1f} GB of {A100.memory_bytes / GB:.0f}")

# %% [markdown]
# The largest part is gradients: they are accumulated in float32, and ZeRO-1 does not divide that
# sum. It fits, says the formula. You will see what the code says.

# %% [markdown]
# ## 3. Picture
#
# Days need the seconds of a step, and a step is more than products at a share of the peak. Where do
# its seconds go? Here are four layouts for the same GPUs, taken apart by a cost model. It adds up
# what each operator computes or moves, each message, and the waiting: section 7 tests it.


# %%
def cut(dp, tp=1, pp=1, chunks=1, recompute="none", micro_batch=1, zero=1, sequence=True):
    """A layout; with more than one rank along tp the sequence is divided, unless told otherwise."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    parallel = ParallelConfig(dp=dp, tp=tp, pp=pp, chunks=chunks, schedule=schedule,
                              sequence=sequence and tp > 1, zero=zero)
    return Decision(parallel, recompute, micro_batch)


job = Job(gpt3, 1024, A100, S, 1536, precision="bf16-fp32-grads")
LAYOUTS = {"tp 8, pp 8": cut(16, tp=8, pp=8), "tp 8, pp 8 x 4": cut(16, tp=8, pp=8, chunks=4),
           "tp 16, pp 4": cut(16, tp=16, pp=4), "ZeRO 3 alone": cut(1024, zero=3)}

# %% tags=["figure-parts"]
show(step_bars({name: estimate(job, layout).parts for name, layout in LAYOUTS.items()}), alt=(
    "A step of GPT-3 on 1,024 A100s in four layouts: what is not products, the bubble and what is "
    "sent along tp and dp, makes most of the difference."
))

# %% [markdown]
# In the first three the products take about as long: they are the training itself. Everything to
# their right is the layout, and that is what you choose. Along tp 16 each sum crosses two nodes.
#
# **Predict.** ZeRO-3 alone cuts no product, and recomputes none. Why do its products take longer?
#
# <details><summary>Answer</summary>
#
# A step has 1,536 sequences. Over 1,024 copies, half of them get two and half get one. All wait for
# those with two: a step takes as long as if there were 2,048 sequences.
#
# </details>

# %% [markdown]
# ## 4. By hand
#
# A formula knows what its author thought of. The code knows the rest: which tensors autograd keeps,
# what a bucket is padded to, which copy lives a moment longer. To ask the code, run it. But on
# what?
#
# A step needs values only for its loss. What it holds, sends and multiplies follows from *shapes*.
# PyTorch has both halves of a trick: **fake tensors**, which have a shape, a dtype and no memory;
# and a **fake process group**, which answers every message at once. Take one cut layer:


# %%
def toy_step(group, width, tokens):
    """Forward and backward through a layer cut over the group; bytes sent, and held at the end."""
    weight = torch.empty(width // group.size(), width, requires_grad=True)
    x = torch.empty(tokens, width, requires_grad=True)
    with Ledger() as ledger:
        (x @ weight.T).square().sum().backward()
        dist.all_reduce(x.grad, group=group)
    held = [weight, weight.grad, x, x.grad]
    return sum(call.sent for call in ledger.calls), sum(tensor.nbytes for tensor in held)


# %%
def pretend(fn, num_ranks, rank, *args):
    """Call fn on one rank of a group whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with FakeTensorMode():
            return fn(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()


# %% [markdown]
# **Predict.** Four real processes against one that pretends to be the fourth: which of the two
# numbers will differ?

# %% tags=["output-pretend", "nbval-check-output"]
real, fake = run(toy_step, 4, 512, 64)[3], pretend(toy_step, 4, 3, 512, 64)
print(f"rank 3 of 4, real:       sends {real[0]:,} B, holds {real[1]:,} B")
print(f"rank 3 of 4, pretended:  sends {fake[0]:,} B, holds {fake[1]:,} B")
sent, held = pretend(toy_step, 1024, 777, 2**20, 8192)
print(f"rank 777 of 1,024, with a matrix of {4 * 2**40 / 1e12:.1f} TB: sends {sent / GB:.1f} GB, "
      f"holds {held / GB:.1f} GB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# None. And the last line took no memory and no time, for 1,024 ranks as for four.
#
# </details>
#
# The package's step runs like this too, because it keeps three rules: the group is an argument, no
# branch depends on a value, and no device is hard-wired. `dry_run(config, num_gpus, rank)` does it
# with the *whole* training step, optimizer and all.

# %% [markdown]
# ## 5. Traps
#
# ### What is on its way
#
# GPT-3 again, with the layout of section 2, in a colleague's spreadsheet. The training state takes
# what it takes. A stage has 12 of 96 layers, so it keeps the activations of 12 layers. Then there
# is room for larger micro-batches, which means larger products, and fewer messages.


# %%
def config_of(job, layout):
    """What a run of this job in this layout is told."""
    train = TrainConfig(global_batch_size=job.global_batch_size, recompute=layout.recompute,
                        micro_batch_size=layout.micro_batch_size, precision=job.precision)
    data = DataConfig(sequence_length=job.sequence_length)
    return Config(job.model, data, train, layout.parallel)


# %% tags=["output-plausible", "nbval-check-output"]
for size in (1, 2, 4, 8):
    of_a_stage = size * block * gpt3.num_layers / p
    total = weights + gradients + optimizer + of_a_stage
    print(f"micro-batches of {size}: {total / GB:.0f} GB, of {A100.memory_bytes / GB:.0f}")

# %% [markdown]
# Eight at a time, then? On Monday, 1,024 GPUs would tell. The dry run tells now, of the first rank.
# (Each dry run is a process's work of some seconds. Two processes share those of this chapter: also
# those of section 6, which begin here, and which nobody has to wait for.)

# %%
pool = ProcessPoolExecutor(2, get_context("spawn"))


def begin(job, layout, rank):
    """Begin a dry run of a rank; ask for its `result()` later."""
    return pool.submit(dry_run, config_of(job, layout), job.num_gpus, rank)


# %% tags=["output-trap", "nbval-check-output"]
plain = LAYOUTS["tp 8, pp 8"]
begun = [begin(job, layout, stage * d * t) for layout, stage in (
    (cut(16, tp=8, pp=8, micro_batch=8), 0), (plain, 0), (plain, 4), (plain, 7))]
eight = begun[0].result()
print(f"{eight.peak.total / GB:.0f} GB:", ", ".join(
    f"{kind} {size / GB:.1f}" for kind, size in eight.peak.bytes.items()))

# %% [markdown]
# **Predict.** It is out of memory, by far. Which factor is missing, and why does no test on one
# node of eight GPUs, with pp 1, find it?
#
# <details><summary>Answer</summary>
#
# A factor of p. While the first micro-batch is on its way to the last stage and back, the first
# stage begins p - 1 others (chapter 9). It keeps 12 layers of *eight* micro-batches: as much as all
# 96 layers of one. Stages divide weights, and not the activations of the first of them. With pp 1
# nothing is on its way.
#
# </details>
#
# One can read that a model of 100 layers on four stages needs a quarter of the memory on each. That
# is this mistake. The formula is in Korthikanti et al. 2022, section 4.2.3.

# %% [markdown]
# ### The datasheet
#
# A planner of seconds is tested with trainings whose seconds are known. `published_rows` has some:
# from papers, what was trained, in which layout, on which GPUs, by which system, and how long a
# step took. Here are those on A100s.
#
# Now read the datasheet. "A100: 624 TFLOP/s, NVLink 600 GB/s." **Predict.** What does the planner
# say with these?

# %%
rows = published_rows()


def label(row):
    first = row.source.split()[0]
    return row.name if row.name.startswith(first) else f"{first} {row.name}"


def seconds_on(device, row):
    """The estimate; where a source leaves something open, the fastest that fits."""
    given = replace(row.job, device=device)
    return min(estimate(given, each, row.system).seconds for each in row.decisions)


sold = doubled(doubled(A100, "FLOP/s"), "NVLink bandwidth")  # as printed: 624 TFLOP/s, 600 GB/s

# %% tags=["output-datasheet", "nbval-check-output"]
print("on A100s                         published   312 TFLOP/s, 300 GB/s   624 and 600")
for row in rows:
    if row.job.device == A100:
        line = f"{label(row):30} {row.seconds:9.2f} s"
        for device in (A100, sold):
            predicted = seconds_on(device, row)
            line += f"{predicted:8.2f} s {predicted / row.seconds - 1:+6.0%}"
        print(line)

# %% [markdown]
# <details><summary>Answer</summary>
#
# That every step is far shorter than it was. 624 is the peak with *structured sparsity*, where half
# of each matrix is zero: no training here has that. 600 GB/s are both directions of NVLink
# together. One row alone could be bad luck. All rows on one side, by about as much, are a wrong
# constant.
#
# </details>
#
# The same peak under a measured rate prints half of the MFU. It is common: PyTorch Lightning had
# dense peaks for one H100 and sparse ones for another (Lightning-AI/pytorch-lightning, pull request
# 21743). OLMo-core halved the A100's peak, which was dense already, and so reported an MFU twice
# too high (allenai/OLMo-core, pull request 614).

# %% [markdown]
# ## 6. The real one
#
# ### The dry run
#
# It is `pretend`, with the training of `minitron train` inside:

# %%
print(inspect.getsource(dry_run))

# %% [markdown]
# `measured` runs short steps, each one micro-batch longer than the last (with interleaved stages
# p). Once two peaks are the same, byte by byte, all further micro-batches are like the last, and
# are not run. If no two are, the whole step is.
#
# But is it the same step? The **oracle** here: the same function on real ranks, and rank by rank on
# a fake one. Two tensor-parallel ranks times two stages, in bfloat16, eight sequences.

# %%
axes = ParallelConfig(dp=1, tp=2, sequence=True, pp=2)
tiny = ModelConfig("llama", 64, 16, 4, 32, 4, 2, 48, tied_embedding=False)
training = TrainConfig(global_batch_size=8, micro_batch_size=1, precision="bf16-fp32-grads")
small = Config(tiny, DataConfig(sequence_length=16), training, axes)


def real_step(group):
    """The second step of this rank: what it holds, sends and computes."""
    made = Training(small, lay_out(axes, group.size(), cpu), cpu)
    return [dryrun.run(made, num_sequences=8) for _ in range(2)][1]


# %% tags=["output-oracle", "nbval-check-output"]
for rank, real in enumerate(run(real_step, 4, watch=False)):
    fake = dry_run(small, 4, rank, kernels="cpu")
    same = (real.traffic, real.flops) == (fake.traffic, fake.flops)
    close = abs(fake.peak.total / real.peak.total - 1) < 0.01
    print(f"rank {rank}: {sum(real.bytes_sent.values()):,} B sent, {real.flops:,} FLOPs; "
          f"the dry run's the same: {same}, its peak within 1 %: {close}")

# %% [markdown]
# ### GPT-3, three ranks of 1,024
#
# A rank of the first stage, one of the fifth, and one of the last. (In a terminal: `minitron dryrun
# configs/gpt3-175b.toml --gpus 1024 --every-stage`.)
#
# **Predict.** Which of the three holds most? And which sends most along pp?

# %% tags=["output-dryrun", "nbval-check-output"]
stages = [run_of_a_rank.result() for run_of_a_rank in begun[1:]]
middle = stages[1]
print(dryrun_table.held(stages))
print("\nGB sent     tp      pp      dp")
for run_of_a_rank in stages:
    along = dict.fromkeys(("tp", "pp", "dp"), 0)
    for (_, axis), size in run_of_a_rank.bytes_sent.items():
        along[axis] += size
    print(f"{run_of_a_rank.rank:4}" + "".join(f"{size / GB:8.2f}" for size in along.values()))
print(f"\n{dryrun_table.largest(stages[0])}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The first stage: eight micro-batches are on their way through it, through the fifth four, through
# the last one. Along pp the middle sends most: activations to one side, gradients to the other.
# Along dp all send about the same, once a step.
#
# </details>
#
# The list says what is alive at the peak, the largest first. **Predict.** You have to save memory:
# where do you begin?
#
# <details><summary>Answer</summary>
#
# With the gradients: summed in 16 bits they take half (`--train.precision bf16`). Then with what
# the feed-forward layers keep, by computing it again. The optimizer state, which everybody thinks
# of first, is a small part already: 16 copies share it.
#
# </details>

# %% tags=["figure-byhand"]
held = {f"rank {run.rank}": run.peak.bytes for run in stages}
show(memory_bars(held, {"by hand, rank 0": by_hand}, job.limit, "kept free"), alt=(
    "What three ranks of 1,024 hold, by dry run, below the formula for the first of them: they "
    "agree; later stages hold fewer activations."
))

# %% [markdown]
# And the wire, of the middle stage, by the formulas of chapters 5 to 9:

# %%
m, layers = job.global_batch_size // d, gpt3.num_layers // p
two, one = (cost.tensor_parallel_parameters(replace(gpt3, num_layers=n), t) for n in (2, 1))
own = layers * (two - one)
between = cost.tensor_parallel_volume(1, S, gpt3.width, 2, 0, cost.Layout(t, True)).sent
formula = {
    "tp": m * layers * between,
    "pp": cost.pipeline_volume(1, S // t, gpt3.width, 2, p, m, rank=4).sent,
    "dp": cost.collective_volume("reduce_scatter", own, 4, d, 0).sent
    + cost.collective_volume("all_gather", own, 2, d, 0).sent,
}

# %% tags=["output-wire", "nbval-check-output"]
for axis, predicted in formula.items():
    ledger = sum(sent for (_, on), sent in middle.bytes_sent.items() if on == axis)
    print(f"{axis}: formula {predicted:>15,} B, dry run {ledger:>15,} B, "
          f"difference {ledger - predicted:>7,} B")

# %% [markdown]
# Of half a terabyte some kilobytes are missing in the formulas. **Predict.** What are they?
#
# <details><summary>Answer</summary>
#
# What is sent once a step, and small: along tp the gradients of norms and biases of which all ranks
# have copies, each rank those of its ZeRO shard; the norm of the gradient, and the loss.
#
# </details>

# %% [markdown]
# ## 7. Measure
#
# ### Seconds against papers
#
# The estimate of a step has a handful of constants, each with a physical meaning: of the fastest
# product's speed, what products in training reach; of a memory's bandwidth, what one kernel after
# the other reaches; what fused attention reaches. They were fitted once, on the rows of four
# sources. `benchmarks/results/estimate.md` has all errors. The test of a planner is what it has
# *not* seen: other rows of the same papers, and larger trainings.

# %% tags=["output-papers", "nbval-check-output"]
shown = {"fitted": [row for row in rows if "nanotron" not in row.source],
         "not fitted": unseen_rows()}
off = {group: {} for group in shown}
for group, listed in shown.items():
    print(f"{group:37} published   predicted    error")
    for row in listed:
        predicted = row.predict().seconds
        error = predicted / row.seconds - 1
        off[group].setdefault(label(row).split()[0], []).append(error)
        print(f"{label(row):35} {row.seconds:9.2f} s {predicted:9.2f} s {error:+8.1%}")
    print(f"median {median(abs(each) for some in off[group].values() for each in some):50.1%}")

# %% tags=["output-nanotron", "nbval-check-output"]
many = [row.predict().seconds / row.seconds for row in rows if "nanotron" in row.source]
print(f"{len(many)} rows of nanotron, fitted: median {median(abs(each - 1) for each in many):.1%}; "
      f"{sum(each < 0.5 for each in many)} took more than twice as long as predicted")

# %% tags=["figure-errors"]
show(errors(off), alt=(
    "Errors of predicted step times, a dot for each step, by source: most are within 10 %, also "
    "where nothing was fitted; Smith et al.'s MT-NLG took longer than predicted, at all sizes."
))

# %% [markdown]
# Sources: Narayanan et al. 2021, tables 1 and 2; Korthikanti et al. 2022, table 5; Smith et al.
# 2022, section 2.4; Llama Team 2024, table 4. What they leave open, such as the chunks of Llama's
# stages, is one rule for all: of those that fit, the fastest counts. A published rate is turned
# into seconds with *its* FLOPs: hardware FLOPs in Narayanan's tables, model FLOPs for Llama.
#
# The misses are as telling as the hits. Korthikanti's models were faster than predicted, the more
# so the wider they are: wide products come closer to the fastest one, and here all have one share
# of it. MT-NLG took 21 to 26 % longer, and the same cut of as large a model in
# Narayanan's table did not: an estimate says what a layout allows, not why a system stays below.
#
# None of these rows divides weights. **Predict.** ZeRO-3 sends its weights while a rank computes,
# and the estimate believes that they are hidden, but for a small part. Is it so?

# %% tags=["output-sharded", "nbval-check-output"]
print("ZeRO-3, Narayanan et al. 2021, table 2   published   hidden   one by one")
for row, hidden in zip(sharded_rows(), sharded_rows(MINITRON), strict=True):
    print(f"{row.name:40} {row.seconds:7.1f} s {hidden.predict().seconds:6.1f} s "
          f"{row.predict().seconds:10.1f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# There it was not. The measured steps took up to four times as long as if all were hidden. If each
# matrix is gathered when it is needed, and all wait for it, the estimate is still 10 to 32 % too
# fast, but no longer a factor of four off: that is how that system worked then. This package
# gathers ahead (chapter 6), on links that nobody has measured for you. So where a plan wins by
# ZeRO-3, `minitron plan` says so, and you measure before you believe.
#
# </details>

# %% [markdown]
# ### All layouts
#
# A formula that takes less than a millisecond can be asked for *every* layout.
#
# **Predict.** GPT-3 on 1,024 A100s. How many layouts are there? How many fit?

# %%
found = search(job)
best = found.candidates[0]


def brief(candidate):
    """The layout; b is the number of sequences in a micro-batch."""
    words = str(candidate).replace("micro-batches of", "b")
    return words.replace("full recomputation", "recomputed").replace(" recomputation", "")

# %% tags=["output-search", "nbval-check-output"]
print(f"{found.num_layouts:,} layouts: {found.refused.total():,} cannot be trained, "
      f"{len(found.too_large):,} do not fit, {len(found.candidates):,} do")
print("\n s a step     MFU   bubble   sending   GB   layout")
for each in found.candidates[:6]:
    print(f"{each.seconds:9.2f} {each.estimate.mfu:7.1%} {each.bubble:8.1%} "
          f"{each.communication:9.1%} {each.total_bytes / GB:4.0f}   {brief(each)}")


# %% tags=["figure-landscape"]
def place(candidate):
    return candidate.total_bytes / GB, candidate.seconds


tree = Candidate(job, decide(job))
show(landscape(
    [place(each) for each in found.candidates], [place(each) for each in found.too_large],
    job.limit / GB, {"fastest": place(best), "section 2": place(Candidate(job, plain)),
                     "tree": place(tree)},
), alt="Every layout of GPT-3 on 1,024 A100s as a dot, memory against seconds: among those that "
       "fit, the slowest takes many times as long as the fastest.")

# %% [markdown]
# Most layouts cannot be trained: heads or layers do not divide, a rank would get no sequence, or
# micro-batches do not suit the schedule (`minitron plan` counts the reasons). The best
# six are within a few percent of each other, closer than the error of the estimate. That is what a
# search is for: a handful to try on Monday, out of tens of thousands, and the reason why the others
# are not among them. (`minitron plan configs/gpt3-175b.toml --gpus 1024 --device a100 --explain`
# prints both.)
#
# ### What the papers chose
#
# Four jobs, each with the layout of its paper (GPT-3 with that of section 2), and with the best
# that this package could train. Both are timed as this package runs them, so that *layouts* are
# compared and nothing else.

# %%
mt_nlg, trillion = (
    ModelConfig("gpt", 51_200, S, layers, width, heads, heads, 4 * width, dropout=0.1)
    for layers, width, heads in ((105, 20_480, 128), (128, 25_600, 160)))
llama = cost.PUBLISHED["Llama 3.1 405B"]
CHOSEN = {
    "GPT-3 175B": (job, plain),
    "MT-NLG 530B": (Job(mt_nlg, 2240, A100, S, 1920), cut(8, 8, 35, recompute="full")),
    "1T": (Job(trillion, 3072, A100, S, 3072), cut(6, 8, 64, recompute="full")),
    "Llama 3.1 405B": (Job(llama, 16_384, H100, 8192, 2048), cut(128, 8, 16, chunks=4)),
}
last = {name: begin(given, layout, given.num_gpus - 1)  # they go on while we search
        for name, (given, layout) in CHOSEN.items() if given is not job}
searched = {name: found if given is job else search(given) for name, (given, _) in CHOSEN.items()}

# %% tags=["output-chosen", "nbval-check-output"]
print("                 s a step     MFU    GB   layout")
for name, (given, layout) in CHOSEN.items():
    for title, each in ((name, Candidate(given, layout)), ("", searched[name].candidates[0])):
        print(f"{title:15} {each.seconds:9.1f} {each.estimate.mfu:7.1%} "
              f"{each.total_bytes / GB:5.0f}   {brief(each)}")

# %% [markdown]
# **Predict.** The papers' authors knew what they did. Where does the difference come from?
#
# <details><summary>Answer</summary>
#
# From what did not exist yet. MT-NLG and the 1T model recompute everything. Sequence parallelism
# and fused attention came later; with them the activations fit, and a quarter of the FLOPs is
# gone. The others are a sharded state inside the pipeline, which then needs fewer stages, and zero
# bubble. Llama's authors freed tensors early by hand and divided gradients too; as the package
# holds them, their layout is too large, and the best that fits is slower.
#
# </details>
#
# And the dry run? A search believes formulas: 40 bytes here, 60 there, for tens of thousands of
# layouts a job. Before Monday one runs the real step of the layout it has chosen. Here are the
# papers' three, by the last of their ranks, which takes a few seconds each; and GPT-3's by its
# first, from section 6. The formula's GB are those of the rank that holds most.

# %% tags=["output-last", "nbval-check-output"]
print("                  GB by formula, fullest rank   by dry run, this rank   its TFLOP")
for name, chosen in CHOSEN.items():
    done = last[name].result() if name in last else stages[0]
    print(f"{name:17} {Candidate(*chosen).total_bytes / GB:28.1f} "
          f"{done.peak.total / GB:23.1f} {done.flops / 1e12:11,.0f}")
pool.shutdown()

# %% [markdown]
# For GPT-3 the rank is the fullest, and both agree. The last ranks hold less than the fullest: one
# micro-batch is on its way through them, not p, but the head stands on top. To confirm a layout,
# take rank 0. (The first stage of the trillion-parameter model takes 15 seconds, and no longer
# with a hundred times as many GPUs: `benchmarks/results/dryrun_cpu.md`.)

# %% [markdown]
# ### The decision tree
#
# Chapter 11's tree asks the same estimator, but along one path. How far is its choice from the
# best?

# %% tags=["output-tree", "nbval-check-output"]
print("                 the tree   the best            most in   the tree's layout")
for name, (given, _) in CHOSEN.items():
    chosen, fastest = Candidate(given, decide(given)), searched[name].candidates[0]
    most = costs_most(chosen, fastest) if chosen.seconds > fastest.seconds else "-"
    print(f"{name:15} {chosen.seconds:8.1f} s {fastest.seconds:8.1f} s "
          f"{chosen.seconds / fastest.seconds:6.2f} x {most:>8}   {brief(chosen)}")

# %% [markdown]
# The tree is 8 to 16 % slower than the best layout for three jobs, and takes almost twice as
# long for the fourth. As in chapter 11, it loses where it has no question to ask. Llama's
# batch leaves only a few sequences for each copy of the model, so its pipeline idles; the best
# layout interleaves its stages, and shares each layer among the GPUs of two nodes. For the others
# the best layout has a zero-bubble schedule and gathers its weights ahead, while it computes; the
# tree tries neither. One path is enough to explain a choice. It is not enough to bet a month
# on.
#
# ### What if the network were twice as fast?
#
# The best layout depends on the machine. So ask for another machine: twice the FLOP/s, or memory,
# or bandwidth, of memory or of a link, each alone; and for the best layout *there*, among the 300
# that were best and all that fit now.


# %%
def best_with(resource, found):
    """The fastest of a search's best layouts, on devices with twice as much of a resource."""
    given = replace(found.job, device=doubled(found.job.device, resource))
    now_fit = [each for each in found.too_large if each.total_bytes <= given.limit]
    layouts = [each.decision for each in found.candidates[:300] + now_fit]
    return min((Candidate(given, layout) for layout in layouts), key=lambda each: each.seconds)


# %% tags=["output-sensitivity", "nbval-check-output"]
print(f"{'twice the':17}" + "".join(
    f"{resource.replace(' bandwidth', ' B/s'):>13}" for resource in RESOURCES))
for name, each in searched.items():
    before = each.candidates[0].seconds
    faster = [best_with(resource, each).seconds / before - 1 for resource in RESOURCES]
    print(f"{name:17}" + "".join(f"{change:+13.0%}" for change in faster))
print(f"\nGPT-3 with twice the memory: {brief(best_with('memory', found))}")

# %% [markdown]
# **Predict.** Twice the FLOP/s: why is a step not half as long? Twice the network: why does it gain
# so little, for trainings on thousands of GPUs?
#
# <details><summary>Answer</summary>
#
# What is sent takes as long as before, and so does what waits for memory. With faster GPUs it is a
# larger share of the step: each generation needs faster links to stay where it is. And a good
# layout has put on the network what the network can bear: that is what made it the best.
#
# </details>
#
# The last line is a layout of another *kind*. **Predict.** What does memory buy there?
#
# <details><summary>Answer</summary>
#
# No pipeline, so no bubble: ZeRO-3 divides the state. What it gathers for each micro-batch is the
# same for one sequence or for many, and with room for more sequences there is more computing to
# hide it. By this estimate, that is: the measurements above say how much of such a promise a system
# may miss.
#
# </details>

# %% [markdown]
# ### Days, money, energy

# %% tags=["output-bill", "nbval-check-output"]
READ = {"GPT-3 175B": 300e9, "MT-NLG 530B": 270e9, "1T": 450e9, "Llama 3.1 405B": 15.6e12}
print("                  days   GPU-hours    million $    MWh")
for name, each in searched.items():
    given, fastest = each.job, each.candidates[0]
    total = bill(READ[name], given.global_batch_size * given.sequence_length, fastest.seconds,
                 given.num_gpus, GpuHour(given.device.watts, pue=1.1, price=2))
    print(f"{name:15} {total.days:6.0f} {total.gpu_hours:11,.0f} {total.price / 1e6:12.1f} "
          f"{total.megawatt_hours:6,.0f}")

# %% [markdown]
# Days are the step's seconds times the steps: nothing breaks, nobody restarts. The Llama Team
# counted 466 interruptions in 54 days (section 3.3.4), and 30.8 million GPU-hours (model card).
# Watts are the datasheet's, an upper bound; 1.1 is the **PUE**, the energy of the machine room over
# that of what computes in it.
#
# Energy has conventions too:

# %% tags=["output-energy", "nbval-check-output"]
POWER = {  # GPU-hours, watts, PUE, MWh as published
    "GPT-3 175B": (10_000 * 14.8 * 24, 330, 1.1, 1287),
    "T5 11B": (512 * 20 * 24, 310, 1.12, 85.7),
    "LLaMA 65B": (1_022_362, 400, 1.1, 449),
    "BLOOM 176B": (1_082_990, 400, 1.0, 433.2),
    "OPT 175B": (809_472, 400, 1.0, 324),
}
for name, (hours, watts, pue, megawatt_hours) in POWER.items():
    print(f"{name:11} {hours:11,.0f} h x {watts} W x {pue:<4} = "
          f"{energy(hours, watts, pue):7.1f} MWh, published {megawatt_hours}")

# %% [markdown]
# Every one of them can be recomputed, and few are comparable: GPT-3 and T5 have measured watts of a
# whole system (GPT-3's days are assumed); LLaMA has the datasheet's watts and a PUE, BLOOM and OPT
# the datasheet's watts alone. (Patterson et al. 2021, table 4; LLaMA, table 15; Luccioni et al.
# 2022, whose 433 MWh are the dynamic part; the OPT row is LLaMA's.)

# %% [markdown]
# ### Check the facts
#
# A dozen claims that one can read in articles about training large models. **Predict** for each:
# right, wrong, or right by a convention that it does not name?
#
# 1. Training GPT-3 took 1,287 MWh, training BLOOM 433: a third.
# 2. Training FLOPs of such a model are counted in hundreds of exaFLOPs.
# 3. Adam's states double the memory that the weights take.
# 4. 100 billion parameters need 10 to 15 H100s to hold the training state.
# 5. An all-reduce of 200 GB over 16 GPUs takes 0.22 s on NVLink's 900 GB/s.
# 6. 100 layers on four pipeline stages: each GPU needs a quarter of the memory.
# 7. GPT-3 on 1.5 trillion tokens takes 1,024 A100s 120 days.
# 8. An H100 has 4,000 TFLOP/s, so a training of 6e25 FLOPs would take it over 400 years.
# 9. ZeRO-3 makes computing 1.5 times as long.
# 10. With ZeRO-3 on 1,024 GPUs, a trillion parameters take 16 GB on each.
# 11. ZeRO-1 saves a factor of 4, ZeRO-2 a factor of 8.
# 12. Selective recomputation saves 70 % of GPT-3's activations for a few percent of the FLOPs.


# %%
def facts(*lines):
    """Print claimed and computed numbers; what differs by less than 5 % is right."""
    for number, what, claimed, computed, unit in lines:
        ratio = computed / claimed
        verdict = "right" if abs(ratio - 1) < 0.05 else f"{ratio:,.3g} times the claim"
        print(f"{number:>3} {what:39} {claimed:>8,.6g} {computed:>11,.4g} {unit:8} {verdict}")


# %% tags=["output-facts", "nbval-check-output"]
print("    claim                                    claimed    computed")
facts(
    (1, "GPT-3's energy, as Patterson counts", 1287, energy(10_000 * 14.8 * 24, 330), "MWh"),
    (1, "BLOOM's, as Luccioni counts", 433, energy(1_082_990, 400, 1), "MWh"),
    (1, "BLOOM's, with a PUE like GPT-3's", 433, energy(1_082_990, 400, 1.1), "MWh"),
    (2, "FLOPs of GPT-3", 300, 6 * P * tokens / 1e18, "exaFLOP"),
    (3, "Adam's states over bf16 weights", 1, (4 + 8) / 2, "times"),
    (4, "H100s for 16 B x 100 G, no activations", 15, 16 * 100e9 / H100.memory_bytes, "GPUs"),
    (5, "ring over 16 ranks, 450 GB/s each way", 0.22,
     cost.ring_all_reduce_seconds(200e9, 16, 0, 450e9), "s"),
    (6, "weights of a stage", 1 / 4, 25 / 100, "of all"),
    (6, "activations of the first stage", 1 / 4,
     cost.activations_held("1F1B", 4, 32, rank=0) * 25 / 100, "of all"),
)

# %%
more = 1.5e12
dropping = replace(gpt3, dropout=0.1)
ours = [cost.activation_bytes_per_layer(dropping, 1, S, attention="materialized", recompute=kind)
        for kind in ("none", "selective")]
again = cost.recompute_flops_per_token(gpt3, S, "selective") \
    / cost.training_flops_per_token(gpt3, S)
whole, divided = (estimate(job, cut(1024, zero=stage)).hardware_flops for stage in (0, 3))


def saved(stage, num_ranks):
    """Bytes of the training state without ZeRO, over those with it."""
    whole, divided = (sum(cost.zero_holdings(2**30, num_ranks, each).values())
                      for each in (0, stage))
    return whole / divided


# %% tags=["output-facts2", "nbval-check-output"]
facts(
    (7, "model FLOPs, at 40 % of the peak", 120,
     training_days(6 * 175e9 * more, 1024, 0.4 * A100.bf16_flops), "days"),
    (7, "all recomputed, at 140 TFLOP/s", 120, training_days(8 * 175e9 * more, 1024, 140e12),
     "days"),
    (8, "dense, at 40 % of the peak", 400, training_days(6e25, 1, 0.4 * H100.bf16_flops) / 365,
     "years"),
    (9, "FLOPs, stage 3 over stage 0", 1.5, divided / whole, "times"),
    (9, "bytes sent, stage 3 over stage 0", 1.5, cost.zero_volume(2**30, 2, 64, 0, 3).sent
     / cost.zero_volume(2**30, 2, 64, 0, 0).sent, "times"),
)

# %% tags=["output-facts3", "nbval-check-output"]
facts(
    (10, "16 B / 1,024 of 1e12 parameters", 16, 16e12 / 1024 / GB, "GB"),
    *((11, f"ZeRO-{stage} on {ranks:,} ranks", 4 * stage, saved(stage, ranks), "times")
      for stage in (1, 2) for ranks in (8, 64, 1024)),
    (12, "activations saved, separate kernels", 70, 100 * (1 - ours[1] / ours[0]), "%"),
    (12, "FLOPs on top (2.7 % in the paper)", 2.7, 100 * again, "%"),
)

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. Each number is right, the third is not: one counts measured watts and a PUE, the other a
#    datasheet and none.
# 2. Wrong by a factor of a thousand: hundreds of *zetta*FLOPs.
# 3. Wrong. Mean, square and the float32 master are 12 bytes, the weights 2.
# 4. Wrong: 20, and not one activation has a place yet.
# 5. Wrong by a factor of four. A ring sends almost twice the bytes, and 900 GB/s are both ways.
# 6. Right for weights, wrong for activations: section 5.
# 7. Hopeful: at 40 % of the peak it is 143 days, and as Narayanan et al. ran GPT-3, 170.
# 8. Wrong assumption: 4,000 is fp8 with sparsity. Dense bfloat16, at 40 %: thousands of years.
# 9. Wrong word. It *sends* 1.5 times the bytes; it computes the same.
# 10. Right, for the state alone.
# 11. Right in the limit of many ranks; on the eight of a node far from it.
# 12. Right, if attention keeps its S x S scores, and cheaper than is told: one more forward pass of
#     attention. Fused attention keeps no scores; then there is little left to save.
#
# </details>

# %% [markdown]
# ### Plan yourself
#
# The sliders set tp, pp and the micro-batch. The schedule and its chunks, ZeRO and what it keeps
# unsharded, replicas, sequence and recomputation are the best that go with them.

# %% tags=["figure-planner"]
planner()

# %% [markdown]
# ### On real GPUs
#
# ```
# minitron plan configs/gpt3-175b.toml --gpus 1024 --device a100 --tokens 300e9 --price 2
# minitron dryrun configs/gpt3-175b.toml --gpus 1024 --every-stage
# minitron plan configs/llama-8b.toml --gpus 8 --calibrate
# ```
#
# The last one measures *your* machine: products, memory, links. What none of these sees: CUDA's and
# NCCL's own memory, pieces of memory too small to use, a network that others use too, kernels that
# are slower for odd sizes, data that come late. So leave a fifth of the memory free, try the first
# three layouts for twenty steps each, and believe the clock.

# %% [markdown]
# ## 8. Recap
#
# 1. 6 N T over the GPUs' rate gives days to within a factor of two, if both are model FLOPs.
# 2. A first stage keeps the activations of p micro-batches: stages divide weights, not those.
# 3. Shapes are enough: one rank of 1,024 runs its real step on a laptop, and sends the same bytes.
# 4. Datasheets count sparse products and both directions. Known trainings show the mistake.
# 5. Tens of thousands of layouts can be searched; the first few are equals, and what binds them
#    changes with the machine.
#
# ## Exercises
#
# Write your answers into `exercises/ch12_before_you_launch.py`, save, and run the cell. In a
# terminal, `minitron hint 12.1` gives hints in three steps.
#
# **12.1 Training days** (25 minutes): from FLOPs to days, with the convention of each source.

# %%
check("12.1")

# %% [markdown]
# **12.2 What a rank holds** (25 minutes): weights, gradients, optimizer state and activations of
# any rank of a layout.

# %%
check("12.2")

# %% [markdown]
# **12.3 Bubble under a limit** (25 minutes): as few idle seconds as the memory allows.

# %%
check("12.3")

# %% [markdown]
# **12.4 Find the layout** (30 minutes): the core of the search.

# %%
check("12.4")

# %% [markdown]
# ## Further reading
#
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, 2021: section 3 (a model of the step) and 5.1 (days).
# - Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022:
#   section 4.2.3, memory of pipeline stages.
# - Chowdhery et al., *PaLM: Scaling Language Modeling with Pathways*, 2022: appendix B, MFU.
# - Patterson et al., *Carbon Emissions and Large Neural Network Training*, 2021: section 2 and
#   table 4.
# - Llama Team, *The Llama 3 Herd of Models*, 2024: section 3.3.
# - Smith et al., *Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B*, 2022: section 2.
