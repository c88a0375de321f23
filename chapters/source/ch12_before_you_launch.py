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
# # 12. Before you launch: will it fit, how fast, how long, how much
#
# **50 minutes. No GPU. Exercises 12.1 to 12.4.**
#
# *You need:* the bytes of a parameter ([chapter 2](chapter:2)), the time of a
# [collective](word:collective) ([chapter 5](chapter:5)), the pipeline's [bubble](word:bubble) and
# what stages hold ([chapter 9](chapter:9)), the grid and the decision tree of [chapter
# 11](chapter:11).
#
# *You will be able to:*
# - **estimate** days, memory and money of a training run by hand, and say by which convention;
# - **run** the real training step of one rank out of a thousand on a laptop, and read its bytes;
# - **choose** a layout by search, and say what limits it.
#
# *The way there:*
# - **Sections 1 to 3:** days, memory and the parts of a step, by formula;
# - **Sections 4 to 6:** the real step of any [rank](word:rank), run without the others, and traps;
# - **Section 7:** predictions against published steps, then every layout, and what it costs.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron import cost
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.parallelize import lay_out
from minitron.plan import dryrun, dryrun_table
from minitron.plan.dryrun import dry_run
from minitron.plan.estimate import estimate
from minitron.plan.explain import RESOURCES, costs_most, doubled
from minitron.plan.hardware import DEVICES
from minitron.plan.job import Job
from minitron.plan.money import GpuHour, bill, energy, training_days
from minitron.plan.published import published_rows
from minitron.plan.search import Candidate, search
from minitron.plan.systems import MINITRON
from minitron.plan.held_out import sharded_rows, unseen_rows
from minitron.run import Training
from teaching.check import check
from teaching.figures import memory_bars, show
from teaching.figures_plan import errors, landscape, step_bars
from teaching.lab import ch12 as lab, large_plans as plans, recorded, show_source, show_text, trees
from teaching.widgets_plan import planner

torch.set_num_threads(1)
GB, cpu = 1e9, torch.device("cpu")
A100, H100 = DEVICES["A100-SXM-80GB"], DEVICES["H100-SXM-80GB"]

# %% [markdown]
# ## 1. The question
#
# From Monday on you can have 1,024 A100s, and you want to train GPT-3: 175 billion parameters on
# 300 billion tokens. Until Monday you have a laptop. What can you find out by then?

# %% tags=["output-question", "nbval-check-output"]
gpt3 = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200, dropout=0.0)
S, tokens = 2048, 300e9
P = cost.num_parameters(gpt3)
state, work = 16 * P, 6 * P * tokens
hours = 24 * training_days(work, 1, 0.5 * A100.bf16_flops)
print(f"16 bytes per parameter: {state / 1e12:.1f} TB; an A100 has "
      f"{A100.memory_bytes / GB:.0f} GB")
print(f"6 FLOPs per parameter and token: {work:.2g}")
print(f"at half of an A100's peak: {hours / 24 / 365:.0f} years, or {hours / 1e3:,.0f} thousand "
      f"GPU-hours")
print(f"at 2 dollars per GPU-hour: {2 * hours / 1e6:.1f} million dollars")

# %% [markdown]
# (2 dollars per GPU-hour is an assumption: the report on
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437), 2024, makes it for an H800. Use your own price.)
#
# A layout that does not fit tells you so on Monday. A layout that is half as fast as it could be
# tells you nothing, and costs another million. So there are four questions before you launch. Will
# it fit? How fast is a step? How long does the training take? What does it cost?
#
# ## 2. Estimate
#
# The oldest formula: training takes 6 P T FLOPs, for P parameters and T tokens. Divide by what all
# GPUs compute per second. The one unknown is the share of the peak that they reach.
#
# **Predict.** The next cell assumes 40 % for five published runs. How far off is it?

# %% tags=["output-hours", "nbval-check-output"]
TRAINED = {  # parameters, tokens, device, GPU-hours as published
    "LLaMA 65B": (65.2e9, 1.4e12, A100, 1_022_362),
    "Llama 2 70B": (69.0e9, 2.0e12, A100, 1_720_320),
    "BLOOM 176B": (176.2e9, 366e9, A100, 1_082_990),
    "Llama 3.1 70B": (70.6e9, 15e12, H100, 7_000_000),
    "Llama 3.1 405B": (405.9e9, 15.6e12, H100, 30_840_000),
}
print("                  6 P T    hours, at 40 %     published   share of the peak")
for name, (number, read, device, hours) in TRAINED.items():
    flops = 6 * number * read
    by_hand = 24 * training_days(flops, 1, 0.4 * device.bf16_flops)
    print(f"{name:15} {flops:8.2g} {by_hand:17,.0f} {hours:13,} "
          f"{flops / (3600 * hours * device.bf16_flops):15.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# By less than a factor of two, from P, T, a peak and a guess. Two of these runs did better and
# three did worse. 40 % is what a good training step reaches, and GPU-hours also include what is
# lost between steps. (Llama 3.1's model card does not say what its hours include.)
#
# </details>
#
# Sources: LLaMA paper ([Touvron et al. 2023](https://arxiv.org/abs/2302.13971)), table 15; [Llama
# 2](https://arxiv.org/abs/2307.09288) and Llama 3.1 model cards; BLOOM: [Luccioni et al.
# 2022](https://arxiv.org/abs/2211.02001).
#
# **Which FLOPs?** [Narayanan et al. (2021)](https://arxiv.org/abs/2104.04473), section 5.1, plan
# exactly this training run: 1,024 A100s, 300 billion tokens, 140 TFLOP/s per GPU, hence 34 days.
# **Predict.** How many days does 6 P T give at that rate: fewer, as many, or more?

# %% tags=["output-convention", "nbval-check-output"]
for each in (6, 8):
    days = training_days(each * 175e9 * tokens, 1024, 140e12)
    print(f"{each} P T at 140 TFLOP/s per GPU: {days:.0f} days")
print(f"140 TFLOP/s are {140e12 / A100.bf16_flops:.0%} of the peak; without recomputation, "
      f"{0.75 * 140e12 / A100.bf16_flops:.0%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Fewer: theirs is 8 P T. They [recompute](word:recompute) all activations, so the forward pass runs
# twice, and their 140 TFLOP/s count **hardware FLOPs**. The model itself needs only 6 P T, its
# [**model FLOPs**](word:model-flops). If you divide model FLOPs by a rate of hardware FLOPs, your
# plan is short by a quarter of the days. (The 34 % is the same run, counted in model FLOPs.)
#
# </details>
#
# **Will it fit?** Take tp t = 8 inside the nodes, with sequence parallelism, p = 8
# [stages](word:stage), 16 copies with [ZeRO-1](word:zero), and [micro-batches](word:micro-batch)
# of one sequence. Gradients are [accumulated](word:accumulation) in float32: 2 + 4 + 12 = 18 bytes
# per parameter, not section 1's 16. A [block](word:block) saves 32 S D / t bytes of a
# sequence (chapters 2 and 8, less dropout's masks), and the first stage holds p micro-batches at
# once (chapter 9): its [activations](word:activation) are p x (L / p) x 32 S D / t bytes, where L
# is 96, S 2,048 and D 12,288. Of an A100's 86 GB (80 GiB) the package plans to use 0.8 x 86 = 69.
# **Predict.** How many GB does a GPU of the first stage hold, and which category is largest?

# %% tags=["output-memory", "nbval-check-output"]
t, p, d = 8, 8, 16
weights, gradients = 2 * P / (t * p), 4 * P / (t * p)
optimizer = 12 * P / (t * p * d)  # masters and two moments: ZeRO-1 shards them
block = cost.activation_bytes_per_layer(gpt3, 1, S, layout=cost.Layout(t, sequence_parallel=True))
activations = p * (gpt3.num_layers // p) * block  # block: 32 S D / t, and the norms' statistics
by_hand = {"parameter": weights, "gradient": gradients, "optimizer state": optimizer,
           "activation": activations}
print(", ".join(f"{kind} {size / GB:.1f} GB" for kind, size in by_hand.items()))
print(f"total {sum(by_hand.values()) / GB:.1f} GB of {A100.memory_bytes / GB:.0f}")

# %% [markdown]
# The largest category is gradients: they are accumulated in float32, and ZeRO-1 does not shard that
# sum. The formula says it fits.
#
# ## 3. Picture
#
# To get from FLOPs to days you need the seconds of a step, and a step is more than matmuls at a
# share of the peak. Where does its time go? The figure shows four layouts of one job: 1,024 A100s,
# steps of 1,536 sequences. A cost model, tested in section 7, adds up operators, messages, and
# waiting. ("x 4": four interleaved chunks per rank, chapter 9.)

# %% tags=["figure-parts"]
job = Job(gpt3, 1024, A100, S, 1536, precision="bf16-fp32-grads")
LAYOUTS = {"tp 8, pp 8": lab.cut(16, tp=8, pp=8),
           "tp 8, pp 8 x 4": lab.cut(16, tp=8, pp=8, chunks=4),
           "tp 16, pp 4": lab.cut(16, tp=16, pp=4), "ZeRO-3 only": lab.cut(1024, zero=3)}
print("do not fit:", *(name for name, layout in LAYOUTS.items()
                       if Candidate(job, layout).total_bytes > job.limit))
show(step_bars({name: estimate(job, layout).parts for name, layout in LAYOUTS.items()}), alt=(
    "A step of GPT-3 on 1,024 A100s in four layouts: the matmuls of the first three take about as "
    "long; the bubble, and communication along tp and dp, make most of the difference."
))

# %% [markdown]
# In the first three, matmuls, attention and elementwise operators take about the same time: they
# are the training itself. The bubble, tp, pp and dp depend on the layout, and that is what you
# choose. With tp 16, each collective along tp spans two nodes.
#
# **Predict.** ZeRO-3 alone splits no matmul and recomputes nothing. Why do its matmuls take longer?
#
# <details><summary>Answer</summary>
#
# A step has 1,536 sequences for 1,024 ranks: half of them process two, half one. All wait for those
# with two, so a step takes as long as with 2,048, a third more. (And 96 unsplit blocks do not fit.)
# The bars show less, because in the others the slowest stage also computes the head, and split
# matmuls are slower.
#
# </details>
#
# ## 4. By hand
#
# A formula covers what its author thought of. The code has the rest: which tensors autograd saves,
# how a bucket is padded, which copy lives a moment longer. To ask the code, run it.
#
# What a training step holds, sends and computes follows from *shapes*; only its results, the loss
# and the new weights, need values. PyTorch can leave out both the values and the other ranks:
# [**fake tensors**](word:fake-tensor), which have a shape and a dtype but no memory, and a **fake
# process group**, in which every collective returns immediately. Take a single
# [sharded](word:shard) layer:


# %%
def toy_step(group, width, tokens):
    """Forward and backward through a sharded layer; bytes sent, and bytes held at the end."""
    weight = torch.empty(width // group.size(), width, requires_grad=True)
    x = torch.empty(tokens, width, requires_grad=True)
    with Ledger() as ledger:
        (x @ weight.T).square().sum().backward()
        dist.all_reduce(x.grad, group=group)
    held = [weight, weight.grad, x, x.grad]
    return sum(call.sent for call in ledger.calls), sum(tensor.nbytes for tensor in held)


# %% [markdown]
# `pretend` calls it on one rank, with fake tensors, in a group whose other ranks do not exist:


# %%
def pretend(function, num_ranks, rank, *args):
    """Call function on this rank of a fake group, with fake tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with FakeTensorMode():
            return function(dist.group.WORLD, *args)
    finally:
        dist.destroy_process_group()


# %% [markdown]
# **Predict.** We run `toy_step` in four real processes, then in one that pretends to be the fourth,
# then as rank 777 of 1,024, where `x` is a matrix of 8,192 x 2^20. How many bytes does that rank
# send, and which tensors does it hold?

# %% tags=["output-pretend", "nbval-check-output", "exhaustive"]
real, fake = run(toy_step, 4, 512, 64)[3], pretend(toy_step, 4, 3, 512, 64)
print(f"rank 3 of 4, real:  sends {real[0]:,} B, holds {real[1]:,} B")
print(f"rank 3 of 4, fake:  sends {fake[0]:,} B, holds {fake[1]:,} B")
sent, held = pretend(toy_step, 1024, 777, 2**20, 8192)
print(f"rank 777 of 1,024, with a matrix of {4 * 2**40 / 1e12:.1f} TB: sends {sent / GB:.1f} GB, "
      f"holds {held / GB:.1f} GB")

# %% [markdown]
# <details><summary>Answer</summary>
#
# It sends almost twice the bytes of `x`'s gradient (chapter 5), and holds `x`, its part of the
# weight, and both gradients. The first two lines agree, a reason to believe the last. Nothing that
# it counts was allocated or sent.
#
# </details>
#
# The package's training step can run like this because it keeps three rules: the group is an
# argument, no branch depends on a value, and no device is hard-coded. `dry_run(config, num_gpus,
# rank)` does this with the *complete* training step, including the optimizer: a [**dry
# run**](word:dry-run).
#
# ## 5. Traps
#
# ### The spreadsheet
#
# A colleague's spreadsheet has GPT-3 in the layout of section 2. It reasons that the training state
# does not depend on the micro-batch size. A stage has 12 of 96 layers, so it saves the activations
# of 12 layers. That leaves room for larger micro-batches, which mean larger matmuls and fewer
# messages.

# %% tags=["output-plausible", "nbval-check-output"]
for size in (1, 2, 4, 8):
    of_a_stage = size * block * gpt3.num_layers / p
    total = weights + gradients + optimizer + of_a_stage
    print(f"micro-batches of {size}: {total / GB:.0f} GB of {A100.memory_bytes / GB:.0f}")

# %% [markdown]
# So, eight at a time? **Predict.** For micro-batches of one, section 2 had 28.1 GB. Which of the
# spreadsheet's four terms differs, and who is right?
#
# On Monday, 1,024 GPUs would tell you. A dry run of the first rank tells you today. Because large
# dry runs take a while, `plans.counted` reads them from a committed record. (If you change the job
# or the layout, it runs them.)

# %% tags=["output-trap", "nbval-check-output"]
plain = LAYOUTS["tp 8, pp 8"]
eight = plans.counted(job, lab.cut(16, tp=8, pp=8, micro_batch=8), rank=0)
show_text(f"{eight.peak.total / GB:.0f} GB: " + ", ".join(
    f"{kind} {size / GB:.1f}" for kind, size in eight.peak.bytes.items()))

# %% [markdown]
# That is more than the A100's 86 GB, so section 2 was right. Why does no test on a single node of
# eight GPUs, with pp 1, find this?
#
# <details><summary>Answer</summary>
#
# The spreadsheet's activations lack a factor of p. While the first micro-batch travels to the last
# stage and back, the first stage starts p - 1 others (chapter 9). It saves 12 layers of *eight*
# micro-batches: as much as all 96 layers of one. Stages divide the weights, but not the activations
# of the first stage. With pp 1 there is only one micro-batch in flight.
#
# </details>
#
# The formula for this is in [Korthikanti et al. (2022)](https://arxiv.org/abs/2205.05198), section
# 4.2.3.
#
# ### The datasheet
#
# A planner that predicts seconds is tested with training runs whose seconds are known.
# `published_rows` has some from papers; the next cell compares those on A100s.
#
# Now read the datasheet: "A100: 624 TFLOP/s, NVLink 600 GB/s." **Predict.** What does the planner
# say with these numbers instead of 312 and 300?

# %% tags=["output-datasheet", "nbval-check-output"]
rows = published_rows()
sold = doubled(doubled(A100, "FLOP/s"), "NVLink bandwidth")  # as printed: 624 TFLOP/s, 600 GB/s
print("on A100s                     published   312 TFLOP/s, 300 GB/s   624 and 600")
for row in rows:
    if row.job.device == A100:
        line = f"{lab.label(row):28} {row.seconds:7.2f} s"
        for device in (A100, sold):
            predicted = lab.seconds_on(device, row)
            line += f"{predicted:9.2f} s {predicted / row.seconds - 1:+6.0%}"
        print(line)

# %% [markdown]
# <details><summary>Answer</summary>
#
# That every step is far shorter than it was. 624 is the peak with *structured sparsity*, where half
# of each matrix is zero, which no training here uses. 600 GB/s adds up both directions of NVLink.
# If all rows are off in the same direction, by about as much, suspect a constant. But that 312 and
# 300 agree proves little: the estimator's constants were fitted to these rows with those numbers
# (section 7). Fitted with 624, they could hide part of the mistake.
#
# </details>
#
# If you divide a rate by the sparse peak, you get half of the [MFU](word:mfu). Such mistakes are
# common: PyTorch Lightning had dense peaks for one H100 and sparse ones for another
# (Lightning-AI/pytorch-lightning, pull request 21743). OLMo-core halved the A100's peak, which was
# dense already, and reported twice the true MFU (allenai/OLMo-core, pull request 614).
#
# ## 6. The real one
#
# ### The dry run
#
# `dry_run` is `pretend`, with the training step of `minitron train` inside:

# %%
show_source(dry_run)

# %% [markdown]
# `measured` runs a step with enough micro-batches to fill the pipeline, then with one more each
# time (p more for interleaved stages). Once two in a row have the same peak, it counts the
# remaining micro-batches like the last one instead of running them. If no two agree, it runs the
# complete step.
#
# But is it the same step? We check it against an [**oracle**](word:oracle): a tiny model runs on
# four real ranks (two tensor-parallel ranks times two stages), and we dry-run each of them.

# %%
axes = ParallelConfig(dp=1, tp=2, sequence=True, pp=2)
tiny = ModelConfig(
    family="llama", vocab_size=64, max_sequence_length=16, num_layers=4, width=32, num_heads=4,
    num_kv_heads=2, ffn_width=48, tied_embedding=False,
)
training = TrainConfig(global_batch_size=8, micro_batch_size=1, precision="bf16-fp32-grads")
small = Config(tiny, DataConfig(sequence_length=16), training, axes)


def real_step(group):
    """The second step of this rank: what it holds, sends and computes."""
    made = Training(small, lay_out(axes, group.size(), cpu), cpu)
    return [dryrun.run(made, num_sequences=8) for _ in range(2)][1]


# %% [markdown]
# Messages and FLOPs have to be equal, and the peaks to agree within 1 %:

# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
for rank, real in enumerate(run(real_step, 4, watch=False)):
    fake = dry_run(small, 4, rank, kernels="cpu")
    same = (real.traffic, real.flops) == (fake.traffic, fake.flops)
    close = abs(fake.peak.total / real.peak.total - 1) < 0.01
    print(f"rank {rank}: {sum(real.bytes_sent.values()):7,} B sent, {real.flops:,} FLOPs; "
          f"equal: {same}; peak within 1 %: {close}")

# %% [markdown]
# They do. So a dry run can stand for ranks that we do not have.
#
# ### GPT-3, three ranks of 1,024
#
# We dry-run a rank of the first stage, one of the fifth, and one of the last.
#
# **Predict.** Which of the three holds most? And which sends most along pp?

# %% tags=["output-dryrun", "nbval-check-output"]
stages = [plans.counted(job, plain, rank=stage * d * t) for stage in (0, 4, 7)]
print("GB held  " + "  ".join(stages[0].peak.bytes) + "   total")
for each in stages:
    print(f"rank {each.rank:3} " + "".join(
        f"{size / GB:{len(kind) + 2}.2f}" for kind, size in each.peak.bytes.items())
        + f"{each.peak.total / GB:8.2f}")
print("\nGB sent        tp      pp      dp")
for each in stages:
    along = dict.fromkeys(("tp", "pp", "dp"), 0)
    for (_, axis), size in each.bytes_sent.items():
        along[axis] += size
    print(f"rank {each.rank:3} " + "".join(f"{size / GB:8.2f}" for size in along.values()))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The first stage: it has eight micro-batches in flight, the fifth four, the last one. Along pp, the
# middle sends most: activations in one direction, gradients in the other. Along dp, all send about
# the same, once per step.
#
# </details>
#
# What is in memory at the peak of the first rank? **Predict.** Gradients lead the list. What comes
# next?

# %% tags=["output-largest", "nbval-check-output"]
print(dryrun_table.largest(stages[0]))

# %% [markdown]
# <details><summary>Answer</summary>
#
# What the feed-forward layers save for the backward pass, which you could recompute. (Gradients in
# 16 bits take half: `--train.precision bf16`.) The optimizer state is already a small part, because
# 16 copies share it.
#
# </details>
#
# Here are the three ranks beside the estimate by hand of section 2:

# %% tags=["figure-byhand"]
held = {f"rank {run.rank}": run.peak.bytes for run in stages}
show(memory_bars(held, {"by hand, rank 0": by_hand}, job.limit, "reserved"), alt=(
    "What three ranks of 1,024 hold, by dry run, below the formula for the first of them: they "
    "agree; later stages hold fewer activations."
))

# %% [markdown]
# By hand it was 28.1 GB; the dry run says 29.2. Temporary tensors are 0.5 GB; the rest is the
# embeddings: P / 64 spreads them over all stages, rank 0 holds them. ("reserved" is the fifth
# that a plan leaves free.)
#
# Next, the bytes that the middle stage sends, against the formulas of chapters 5 to 9:

# %% tags=["output-wire", "nbval-check-output"]
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
for axis, predicted in formula.items():
    ledger = sum(sent for (_, on), sent in stages[1].bytes_sent.items() if on == axis)
    print(f"{axis}: formula {predicted:>15,} B, dry run {ledger:>15,} B, {ledger - predicted:+,}")

# %% [markdown]
# Of half a terabyte, the formulas miss a few hundred kilobytes, all from small messages sent once
# per step. Along tp these are the gradients of norms and biases, which are replicated: each rank
# sends the part in its ZeRO shard. Along pp and dp they are scalars, such as the norm of the
# gradient and the loss.
#
# ## 7. Measure
#
# ### Seconds against papers
#
# The estimator has a handful of constants, each with a physical meaning: the share of the fastest
# matmul's speed that training reaches; the share of the memory bandwidth that a sequence of kernels
# reaches; fused attention's speed; host delays. They were fitted once, to the rows of four
# sources. `benchmarks/results/estimate.md` lists all errors. The test of a planner is what it has
# *not* seen: other rows of the same papers, and larger runs.

# %% tags=["output-papers", "nbval-check-output"]
shown = {"fitted": [row for row in rows if "nanotron" not in row.source],
         "fitted, nanotron": [row for row in rows if "nanotron" in row.source],
         "not fitted": unseen_rows()}
off = {group: lab.errors_by_source(listed) for group, listed in shown.items()}
for group, by_source in off.items():
    found = sorted(abs(each) for some in by_source.values() for each in some)
    print(f"{group:16} {len(found):3} steps, median error {median(found):5.1%}, "
          f"within 10 %: {sum(each < 0.1 for each in found) / len(found):4.0%}")
worst = {name: max(some, key=abs) for name, some in off["not fitted"].items()}
print("largest errors:", ", ".join(f"{name} {e:+.0%}" for name, e in worst.items()))

# %% [markdown]
# The same errors as dots, one for each step; to the left of 0, a step took longer than predicted:

# %% tags=["figure-errors"]
drawn = {group: off[group] for group in ("fitted", "not fitted")}
show(errors(drawn), alt=(
    "Errors of predicted step times, a dot for each step, by source: most are within 10 %, even "
    "where nothing was fitted; Smith et al.'s MT-NLG took longer than predicted, at all sizes."
))

# %% [markdown]
# Sources: Narayanan et al. 2021, tables 1 and 2; Korthikanti et al. 2022, table 5; Smith et al.
# 2022, section 2.4; Llama Team 2024, table 4; NVIDIA's table of Megatron-Core r0.8.0; Ultra-Scale
# Playbook 2025 (nanotron). Where a source is silent, we take the fastest option (that fits, if
# any); Llama's rows depend most on this. A published rate is converted to seconds with *its*
# FLOPs: hardware FLOPs in Narayanan's tables, model FLOPs for Llama.
#
# Of the rows not fitted, Korthikanti's 530B and 1T models were faster than predicted, the wider 1T
# by more. A likely reason: wide matmuls come closer to the device's fastest one, while the
# estimator assumes one share for all widths. MT-NLG took a fifth to a quarter longer, while a model
# of the same size in the same layout in Narayanan's table did not: an estimate says what a layout
# allows, not why a system stays below it.
#
# The figure leaves out nanotron's 176 runs, the worst predicted of the fitted rows.
#
# None of these rows shards weights. ZeRO-3 does, and gathers them while a rank computes; the
# estimator assumes that nearly all of this is hidden. **Predict.** With more GPUs for about the
# same batch, does that assumption get better or worse?

# %% tags=["output-sharded", "nbval-check-output"]
print("ZeRO-3, Narayanan et al. 2021, table 2   published   hidden   not hidden")
for row, hidden in zip(sharded_rows(), sharded_rows(MINITRON), strict=True):
    print(f"{row.name:40} {row.seconds:7.1f} s {hidden.predict().seconds:6.1f} s "
          f"{row.predict().seconds:10.1f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Worse: each GPU gathers as many bytes as before, with less compute to hide them. On the most GPUs,
# the measured steps took almost four times as long as the column "hidden" says. The last column
# assumes that each matrix is gathered when it is needed, and that everyone waits for it. Even that
# is a tenth to a third too fast, so that system probably hid little. This package gathers ahead
# (chapter 6), but how much that hides depends on your links. So where a plan wins because of
# ZeRO-3, `minitron plan` says so, and you measure before you believe it.
#
# </details>
#
# ### All layouts
#
# An estimate is cheap enough to compute for *every* layout.
#
# **Predict.** GPT-3 on 1,024 A100s. What share of all layouts can be trained and fit: most, half,
# or far fewer?

# %% tags=["output-search", "nbval-check-output", "exhaustive"]
found = search(job)
best = found.candidates[0]
print(f"{found.num_layouts:,} layouts: {found.refused.total():,} cannot be trained, "
      f"{len(found.too_large):,} do not fit, {len(found.candidates):,} do")
print("\nseconds   MFU  bubble  commun.  layout")
for each in [*found.candidates[:6], found.trusted]:
    print(f"{each.seconds:6.2f} {each.estimate.mfu:6.1%} {each.bubble:7.1%} "
          f"{each.communication:8.1%}  {lab.brief(each)}")

# %% [markdown]
# Fewer than one in five. Here is each of them as a dot, and each that does not fit:

# %% tags=["figure-landscape", "exhaustive"]
def place(candidate):
    return candidate.total_bytes / GB, candidate.seconds


judged = trees.against_search(job, best)
show(landscape(
    [place(each) for each in found.candidates], [place(each) for each in found.too_large],
    job.limit / GB, {"fastest": place(best), "tree": place(judged.tree),
                     "section 2": place(Candidate(job, plain))},
), alt="Every layout of GPT-3 on 1,024 A100s as a dot, memory against seconds: among those that "
       f"fit, the slowest takes {found.candidates[-1].seconds / best.seconds:.0f} times as long "
       "as the fastest.")

# %% [markdown]
# ("unsharded": ZeRO-3's weights and gradients stay unsharded during a step, which saves no memory
# over ZeRO-1, but hides messages along dp. "ZB" is the zero-bubble schedule of chapter 9. Wherever
# there is tp, there is sequence parallelism.) The fastest layout fills most of the memory. Most
# layouts cannot be trained: heads or layers are not divisible, a rank would get no sequence, or the
# number of micro-batches does not suit the schedule (`minitron plan` counts the reasons). In the
# figure, "tree" is what the decision tree below chooses.
#
# The best six are within about one percent, far less than the estimate's error. But all six rely on
# hiding ZeRO-3's messages. The last row, `found.trusted`, is the fastest layout without ZeRO-3. It
# is hardly slower, and `minitron plan configs/gpt3-175b.toml --gpus 1024 --device a100 --explain`
# recommends it. The tables below (papers, tree, twice as fast, days and money) use the first row.
# Except for the 1T model, whose best layout has no ZeRO-3, they rest on an estimate of ZeRO-3 that
# the measurements above do not confirm.
#
# ### What the papers chose
#
# We take four jobs (`plans.PUBLISHED`), each in its paper's layout (for GPT-3, that of section 2)
# and in the best that this package could train. Both are timed as this package would run them, so
# that only the *layouts* are compared. The layouts that won come from the record; their seconds are
# estimated here.

# %% tags=["exhaustive"]
searched = {name: plans.chosen(given) for name, (given, _) in plans.PUBLISHED.items()}
print("the record has the layout that the search above found:",
      searched["GPT-3 175B"].best.decision == best.decision)

# %% [markdown]
# So the record can be read for the others, too:

# %% tags=["output-chosen", "nbval-check-output", "exhaustive"]
print("                 s per step    MFU    GB   given layout, then the best")
for name, (given, layout) in plans.PUBLISHED.items():
    for title, each in ((name, Candidate(given, layout)), ("", searched[name].best)):
        print(f"{title:15} {each.seconds:9.1f} {each.estimate.mfu:9.1%} "
              f"{each.total_bytes / GB:5.0f}\n{'':12} {lab.brief(each)}")

# %% [markdown]
# ("In 8 replicas": eight groups of ranks each hold, and shard, a copy of their own.) **Predict.**
# Where does the difference come from?
#
# <details><summary>Answer</summary>
#
# Mostly from techniques that came later. MT-NLG and the 1T model recompute everything. With
# sequence parallelism and fused attention, the activations fit, and a quarter of the FLOPs is no
# longer needed. The rest comes from fewer stages, zero-bubble schedules, and ZeRO-3 inside the
# pipeline, which hides messages along dp. Llama is the exception: its authors freed tensors early
# by hand and sharded gradients, too. Without that, this package would need 91 GB for their layout,
# and the best one that fits is slower. They reached 400 of an H100's 989 TFLOP/s (Llama Team 2024,
# table 4): 40 %; our table has 34.6 %. By the estimator, most of the gap is tp's messages, which
# this package does not hide.
#
# </details>
#
# ### The decision tree
#
# Chapter 11's tree asks the same estimator, but cuts the model step by step and never goes back.
# How far is its choice from the best?

# %% tags=["output-tree", "nbval-check-output", "exhaustive"]
print("seconds per step     tree     best   ratio   slower mostly in")
for name, (given, _) in plans.PUBLISHED.items():
    tree, fastest = judged = trees.against_search(given, searched[name].best)
    most = costs_most(tree, fastest) if tree.seconds > fastest.seconds else "-"
    print(f"{name:15} {tree.seconds:9.1f} {fastest.seconds:8.1f} {judged.ratio:7.2f}   {most}")
    print(f"{'':15} {lab.brief(tree)}")

# %% [markdown]
# On a few nodes the tree loses little (chapter 11). Here it is slower by less than a fifth for
# three jobs, but by four fifths for Llama. Llama's batch leaves only a few sequences for each copy
# of the model, so its pipeline idles; the best layout interleaves its stages and splits each layer
# over the GPUs of two nodes. For the others, the best layout has a zero-bubble schedule, and all
# but the 1T model's use ZeRO-3 inside the pipeline; the tree tries neither. For GPT-3 it stops at
# ZeRO-0, which fits but sends about 2 x 4 bytes per parameter; ZeRO-1 sends 4 + 2, and ZeRO-3 hides
# most of it. A single path is enough to explain a choice, but too little to base a month of
# training on. (This does not test the estimator: it times both.)
#
# ### What if the network were twice as fast?
#
# The best layout depends on the machine. So we double one resource at a time, and find the best
# layout for *that* machine: among the 300 best for the real one, and all that fit only now.

# %% tags=["output-sensitivity", "nbval-check-output", "exhaustive"]
print(f"{'twice the':14}" + "".join(
    f"{resource.replace(' bandwidth', ' B/s'):>12}" for resource in RESOURCES))
for name, each in searched.items():
    faster = [each.with_twice[resource].seconds / each.best.seconds - 1 for resource in RESOURCES]
    print(f"{name:14}" + "".join(f"{change:+12.0%}" for change in faster))
print(f"\nGPT-3 with twice the memory: {lab.brief(searched['GPT-3 175B'].with_twice['memory'])}")

# %% [markdown]
# **Predict.** Why does twice the FLOP/s not halve the step? Why does twice the network gain so
# little, even on thousands of GPUs? And what does GPT-3's layout in the last line gain from twice
# the memory?
#
# <details><summary>Answer</summary>
#
# Communication takes as long as before, and so does whatever waits for memory. With faster GPUs,
# that is a larger share of the step: each generation of GPUs needs faster links just to keep up.
# And a good layout asks no more of the network than it can carry; that is what made it the best.
#
# With twice the memory there is no pipeline, so there is no bubble: ZeRO-3 shards the state. What
# it gathers for a micro-batch does not depend on the number of sequences, and with room for more of
# them there is more compute to hide it. By this estimate, that is: see the measurements above.
#
# </details>
#
# ### Days, money, energy
#
# From the seconds of the best layouts to the bill:

# %% tags=["output-bill", "nbval-check-output", "exhaustive"]
READ = {"GPT-3 175B": 300e9, "MT-NLG 530B": 270e9, "1T": 450e9, "Llama 3.1 405B": 15.6e12}
print("                  days   GPU-hours    million $    MWh")
for name, each in searched.items():
    given, fastest = each.job, each.best
    total = bill(READ[name], given.global_batch_size * given.sequence_length, fastest.seconds,
                 given.num_gpus, GpuHour(given.device.watts, pue=1.1, price=2))
    print(f"{name:15} {total.days:6.0f} {total.gpu_hours:11,.0f} {total.price / 1e6:12.1f} "
          f"{total.megawatt_hours:6,.0f}")

# %% [markdown]
# Days are the seconds of a step times the number of steps, if nothing ever breaks. The Llama Team
# (2024, section 3.3.4) counted 466 interruptions in 54 days; chapter 11's section on goodput shows
# what that costs. Watts are those of the GPU's datasheet: more than a GPU draws on average, but
# without CPUs, network and fans. 1.1 is the **PUE**, the energy of the whole data center divided by
# that of its computers. Llama's hours are more than the 30.8 million published (section 2): its own
# system holds less, and hides tp's messages.
#
# ### Check the facts
#
# A dozen claims that you can read in articles about training large models. **Predict** for each:
# right, wrong, or right by a convention that it does not name? (The formulas are in
# [`facts`](code:teaching.lab.ch12.facts).)
#
# 1. Training GPT-3 took 1,287 MWh, and training BLOOM took 433: a third.
# 2. The training FLOPs of such a model are hundreds of exaFLOPs.
# 3. Adam's moments take as much memory as the weights, so with them the memory doubles.
# 4. 100 billion parameters need 10 to 15 H100s to hold the training state.
# 5. An all-reduce of 200 GB over 16 GPUs takes 0.22 s, with NVLink's 900 GB/s.
# 6. 100 layers on four pipeline stages: each GPU needs a quarter of the memory.
# 7. GPT-3 on 1.5 trillion tokens takes 1,024 A100s 120 days.
# 8. An H100 has 4,000 TFLOP/s, so a training run of 6e25 FLOPs would take it over 400 years.
# 9. ZeRO-3 makes compute 1.5 times as long.
# 10. With ZeRO-3 on 1,024 GPUs, a trillion parameters take 16 GB on each.
# 11. ZeRO-1 saves a factor of 4, ZeRO-2 a factor of 8.
# 12. Selective recomputation saves 70 % of GPT-3's activations for a few percent of the FLOPs.

# %% tags=["output-facts", "nbval-check-output"]
print(lab.FACTS_HEADER, *lab.facts(1, 5), sep="\n")

# %% tags=["output-facts2", "nbval-check-output"]
print(lab.FACTS_HEADER, *lab.facts(6, 12), sep="\n")

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. Right, by two conventions: one counts measured watts and a PUE, the other a datasheet's watts
#    and no PUE. With one PUE it is 476.5 / 1,287 = 37 %. The claim does not say that GPT-3 ran
#    on V100s and BLOOM on A100s.
# 2. Wrong by a factor of a thousand: hundreds of *zetta*FLOPs.
# 3. Wrong. Two float32 moments take 8 bytes, four times the 2 bytes of a bfloat16 weight; with the
#    float32 master weight, the optimizer holds six times as much.
# 4. Wrong: 19, and that leaves no room for a single activation.
# 5. Wrong by a factor of four to six, from three errors (chapter 5): a ring sends almost twice the
#    bytes, 900 GB/s adds up both directions, and 16 GPUs are two nodes. (Chapter 5's 0.94 s, a
#    factor of 4.3, is a ring through both nodes, at the speed of their network cards. The table's
#    hierarchical one works inside the nodes, then between them, then inside.)
# 6. Right for weights, wrong for activations: section 5.
# 7. It names no share of the peak: at 40 % it is longer, in the best layout above it is shorter.
# 8. Wrong: 4,000 is fp8 with sparsity. At 40 % of dense bfloat16's peak, thousands of years.
# 9. The wrong word. It *sends* 1.5 times the bytes; it computes the same.
# 10. Right, for the training state alone.
# 11. Right in the limit of many ranks; on the eight of a node far from it.
# 12. Right if attention saves its S x S scores. Recomputing its two matmuls is 4 S D of 72 D^2 +
#     12 S D FLOPs, 0.9 %, a third of the paper's number. Fused attention saves no scores; then
#     there is little left to save.
#
# </details>
#
# ### Plan it yourself
#
# The sliders set tp, pp and the micro-batch size. For the rest (schedule, chunks, ZeRO, replicas,
# sequence parallelism, recomputation) the planner takes the best that goes with them.

# %% tags=["figure-planner"]
planner()

# %% [markdown]
# The search above found 19.4 s for GPT-3. How close did you come?
#
# ### On real GPUs
#
# ```
# minitron plan configs/gpt3-175b.toml --gpus 1024 --device a100 --tokens 300e9 --price 2
# minitron dryrun configs/gpt3-175b.toml --gpus 1024 --every-stage
# minitron plan configs/llama-8b.toml --gpus 8 --calibrate
# ```
#
# The last one measures *your* machine. None of the three sees the memory of CUDA and NCCL,
# fragmentation, a shared network, slow kernels for odd sizes, or late data. So leave a fifth of the
# memory free, try the first three layouts for twenty steps each, and believe the clock. Here is
# what it said on one GPU, beside the estimate ("ours" is minitron, "eager" is uncompiled):

# %%
shown = recorded.estimates()
show_text(shown.sentence)
show(shown.figure, alt=shown.alt)

# %% [markdown]
# In this recording every step took longer than estimated, by less with bfloat16 weights: converting
# float32 weights probably takes longer than the estimator says.
#
# ## 8. Recap
#
# 1. 6 P T at 40 % of the peak gives days to within a factor of two, if both count model FLOPs.
# 2. The first stage saves the activations of p micro-batches: stages divide the weights, but not
#    these.
# 3. Shapes are enough: one rank out of 1,024 runs its real step on a laptop, and sends the same
#    bytes.
# 4. Datasheets count sparse matmuls and both directions. If all published step times are missed in
#    the same direction, suspect such a constant.
# 5. Tens of thousands of layouts can be searched. The first few are about equally good, and which
#    they are changes with the machine.
#
# ## Exercises
#
# Write your answers into `exercises/ch12_before_you_launch.py`, save, and run the cell. In a
# terminal, `minitron hint 12.1` gives hints in three steps.
#
# - [**12.1 Training days**](exercise:12.1) (25 minutes): from FLOPs to days, with the convention of
#   each source.
# - [**12.2 What a rank holds**](exercise:12.2) (25 minutes): weights, gradients, optimizer state
#   and activations of any rank of a layout.
# - [**12.3 Bubble under a limit**](exercise:12.3) (25 minutes): as few idle seconds as the memory
#   allows.
# - [**12.4 Find the layout**](exercise:12.4) (30 minutes): the core of the search.

# %%
check("12.1")

# %%
check("12.2")

# %%
check("12.3")

# %%
check("12.4")

# %% [markdown]
# ## Further: confirm a search with dry runs
#
# A search relies on formulas for memory. Dry-run the one that you choose. Here are the given
# layouts: GPT-3's on its first rank (section 6), the others on their last. The formula's GB are
# those of the rank that holds most.

# %% tags=["output-last", "nbval-check-output", "exhaustive"]
print("                GB by formula, fullest rank   dry run, this rank   TFLOP")
for name, (given, layout) in plans.PUBLISHED.items():
    rank = 0 if given == job else given.num_gpus - 1
    done = plans.counted(given, layout, rank)
    print(f"{name:15} {Candidate(given, layout).total_bytes / GB:25.1f} "
          f"{done.peak.total / GB:22.1f} {done.flops / 1e12:10,.0f}")

# %% [markdown]
# For GPT-3, this rank is the fullest, and formula and dry run agree within about 1 %. The last
# ranks hold less than the fullest. In 1F1B they have one micro-batch in flight instead of p, but
# also the output head. Llama's stages are interleaved: by chapter 9's formula its last rank holds
# ((4 - 1) x 16 + 1) / 4, still 12 of 16 micro-batches. To be sure, use `--every-stage`.
#
# ## Further: the conventions of energy
#
# Published energies follow different conventions. Each can be reproduced:

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
# Few of them can be compared: GPT-3 and T5 use measured watts of a complete system (GPT-3's days
# are assumed); LLaMA uses the datasheet's watts and a PUE, BLOOM and OPT the datasheet's watts
# alone. (Patterson et al. 2021, table 4; Touvron et al. 2023, table 15, also OPT's hours; Luccioni
# et al. 2022, also OPT's MWh; their 433 MWh are the dynamic part.)
#
# ## Further reading
#
# - Narayanan et al., [Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM](https://arxiv.org/abs/2104.04473), 2021: section 3 (a model of the step) and 5.1
#   (days).
# - Korthikanti et al., [Reducing Activation Recomputation in Large Transformer
#   Models](https://arxiv.org/abs/2205.05198), 2022: section 4.2.3, memory of pipeline stages.
# - Chowdhery et al., [PaLM](https://arxiv.org/abs/2204.02311), 2022: appendix B, MFU.
# - Patterson et al., [Carbon Emissions and Large Neural Network
#   Training](https://arxiv.org/abs/2104.10350), 2021: section 2 and table 4.
# - Llama Team, [The Llama 3 Herd of Models](https://arxiv.org/abs/2407.21783), 2024: section 3.3.
# - Smith et al., [Using DeepSpeed and Megatron to Train Megatron-Turing NLG
#   530B](https://arxiv.org/abs/2201.11990), 2022: section 2.
