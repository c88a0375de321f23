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
# # 9. Pipeline parallelism: stages on different ranks
#
# **50 minutes. No GPU. [Exercises 9.1](exercise:9.1) to 9.4.**
#
# *You need:* the 16 bytes per parameter of [chapter 2](chapter:2), the activations of a block
# ([chapter 3](chapter:3)), why gradients are averaged ([chapter 4](chapter:4)), the traffic of
# tensor parallelism ([chapter 7](chapter:7)), and sequence parallelism ([chapter 8](chapter:8)).
#
# *You will be able to:*
# - **write** a pipeline schedule as a list of actions, validate it, and train with it on real
#   ranks;
# - **predict** its idle time, the activations each rank holds, and the messages it sends;
# - **catch** two ranks that wait for each other, and a loss with the wrong scale.
#
# *The way there:*
# - **Sections 1 to 3:** why pipelines, how long they idle, and schedules as pictures;
# - **Sections 4 and 5:** four schedules, by hand and simulated, and three traps;
# - **Sections 6 and 7:** the package's executor; its time, memory and messages, measured.
#
# Run the cells in order. When the text asks you to predict something, write your guess down
# before you open the answer.

# %%
import textwrap
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from minitron import cost
from minitron.comm.mesh import make_mesh
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.model.transformer import Transformer
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.pipeline import schedule_check
from minitron.parallel.pipeline.block_costs import count_multiplications, count_parameters
from minitron.parallel.pipeline.executor import ScheduleExecutor
from minitron.parallel.pipeline.plan import rank_program, split_blocks
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    Action, Schedule, alternate, gpipe, interleaved, one_forward_one_backward, sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from minitron.plan.hardware import DEVICES
from teaching.check import check
from teaching.figures import pipeline, show
from teaching.lab import ch09 as lab, show_source
from teaching.widgets import schedule_explorer

torch.set_num_threads(1)
GB = 1e9

# %% [markdown]
# ## 1. The question
#
# Chapter 7 put GPT-3 on 1,024 GPUs: tensor parallelism over the eight GPUs of a node, and ZeRO-3
# across 128 such nodes, because the links between nodes are too slow for tensor parallelism. It
# fits. But ZeRO-3 gathers the weights in every pass, however few sequences they are used on. How
# long does a node compute, and how long does it communicate?

# %% tags=["output-question", "nbval-check-output"]
gpt3, S = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200), 2048  # divisible by 8
parameters, each = cost.num_parameters(gpt3), cost.tensor_parallel_parameters(gpt3, 8)
recipe, H100 = cost.RECIPES["bf16"], DEVICES["H100-SXM-80GB"]
zero3 = cost.zero_volume(each, recipe.parameter, 128, 0, stage=3).sent / H100.nic_bandwidth
compute = S * cost.training_flops_per_token(gpt3, S) / 8 / (0.4 * H100.bf16_flops)
print(f"weights: {parameters * recipe.parameter / GB:.0f} GB; on each of 8 GPUs "
      f"{each * recipe.parameter / GB:.0f} GB")
print(f"with gradients and optimizer states, without ZeRO: {each * recipe.total / GB:.0f} GB "
      f"per GPU; it has {H100.memory_bytes / GB:.1f}")
print(f"ZeRO-3, per micro-batch: a GPU sends {zero3 * H100.nic_bandwidth / GB:.0f} GB to other "
      f"nodes in {zero3:.1f} s\n  and computes for",
      ", ".join(f"{b * compute:.1f} s on {b}" for b in (1, 2, 6)), "sequences")
print(f"one layer's output for one sequence: {S * gpt3.width * 2 / GB:.2f} GB")

# %% [markdown]
# Without ZeRO the training state does not fit (an "80GB" card has almost 80 GiB, or 85.5 GB). With
# ZeRO-3 it does. But ZeRO moves the weights to the tokens, and with one sequence at a time, as in
# chapter 7, a node communicates almost four times as long as it computes (at 40 % of the H100's
# peak). Larger micro-batches help as far as memory and the batch allow; section 7 counts how far.
# The last line suggests the opposite: keep each layer on one node and send the activations, which
# are three orders of magnitude smaller.
#
# ## 2. Estimate
#
# Split the model into [p](word:p) [**stages**](word:stage) of consecutive layers, one stage per
# rank: this is [**pipeline parallelism**](word:pipeline-parallelism). In the forward pass a stage
# needs the previous stage's output; in the backward pass, the gradient of its own. For now we
# assume that only these cross between ranks, and take no time.
#
# **Predict.** Four stages of equal size process one batch. For what fraction of the time is a
# rank busy?
#
# <details><summary>Answer</summary>
#
# A quarter. Each stage waits for the previous one, and in the backward pass for the next one, so
# at any moment only one of the four ranks works. The idle time of a pipeline is called its
# [**bubble**](word:bubble).
#
# </details>
#
# Now split the batch into [m](word:m) [**micro-batches**](word:micro-batch) and send them in one
# after another: as soon as stage 0 has finished the first, it can start the second. The last stage
# starts after p - 1 forward passes and then works without a pause; when it is done, the last
# gradient still passes back through p - 1 stages. With $t_F$ and $t_B$ seconds for the forward and
# backward pass of one micro-batch through one stage,
#
# $$\text{time} = (m + p - 1)\,(t_F + t_B), \qquad
# \text{bubble} = (p - 1)\,(t_F + t_B).$$
#
# The table evaluates this for four stages:

# %% tags=["output-estimate", "nbval-check-output"]
p = 4
print("micro-batches   busy   bubble / total time   bubble / ideal time")
for m in (1, 2, 4, 8, 16, 32):
    bubble = cost.pipeline_bubble(p, m, forward=1, backward=2)
    print(f"{m:13} {1 - bubble.of_total:6.0%} {bubble.of_total:21.1%} {bubble.of_ideal:21.1%}")

# %% [markdown]
# Papers use two conventions: the bubble as a fraction of the **total** time, (p - 1)/(m + p - 1),
# or of the **ideal** time without any bubble, (p - 1)/m. The second can exceed 100 %, so check
# which one a paper means.
#
# Why not raise m until the bubble is negligible? The [global batch](word:global-batch) limits it.
# [N](word:N) pipelines that take b sequences per micro-batch share a step's GBS sequences, so m =
# GBS/(N b). Beyond some size, a larger batch hardly improves an update, and a smaller b makes the
# matmuls less efficient and cannot go below one sequence. So m is nearly fixed, and the bubble has
# to shrink by other means.
#
# ## 3. Picture
#
# Where the bubble lies depends on the order of the work. A [**schedule**](word:schedule) is a list
# of actions for each rank, in the order in which the rank performs them. F3 is the forward pass of
# micro-batch 3, B3 its backward pass. (F and B name passes in this chapter, so we write b where
# other chapters write B for the sequences of a micro-batch.) Here is rank 0's list in two
# schedules:

# %% tags=["output-list", "nbval-check-output"]
for schedule in (sequential(3, 4), gpipe(3, 4)):
    print(f"{schedule.name:10}  rank 0:", *schedule.actions[0])

# %% [markdown]
# The lists and a duration for each kind of action determine a timeline, which the package's
# [simulator](code:minitron.parallel.pipeline.simulator) computes. Let a stage take 20 ms forward
# and 40 ms backward. Forward passes are light blue, backward passes tan, idle time is hatched, and
# the number in a block is the micro-batch. The number on the right is how many micro-batches'
# activations the rank holds at its peak. (In figures with a measurement, predictions are
# dashed.) The first figure shows the sequential schedule, the second GPipe:

# %% tags=["figure-sequential"]
MS = {"F": 20, "B": 40}
show(pipeline(simulate(sequential(3, 4), MS)), alt=(
    "Sequential: each micro-batch goes forward and back before the next one starts, so one rank of "
    "three works at any moment."
))

# %% tags=["figure-gpipe"]
show(pipeline(simulate(gpipe(3, 4), MS)), alt=(
    "GPipe: all micro-batches forward, then all backward. Ranks idle only while the pipeline "
    "fills, turns around, and drains."
))

# %% [markdown]
# In the first figure one rank works at a time, in the second twice as many on average, so the
# passes take half as long.
#
# ## 4. By hand
#
# Now we execute such lists on real ranks, with a model of twelve layers, each a matrix and a tanh.
# The loss is a sum over samples divided by the number of targets in the *whole* batch; section 5
# shows why that matters.

# %%
D, num_layers = 16, 12
generator = torch.Generator().manual_seed(0)
random = partial(torch.randn, dtype=torch.float64, generator=generator)
start = random(num_layers, D, D) / D**0.5
inputs, targets = random(2, 24, D)


def through(layers, x):
    for matrix in layers:
        x = torch.tanh(x @ matrix)
    return x


def loss_of(y, target):
    return (y - target).square().sum() / targets.numel()


# %% [markdown]
# A stage owns some layers and their part of the autograd graph. In the forward pass it sends a
# *detached* output, so the graph ends at the stage's boundary. In the backward pass the next stage
# sends back the gradient of that output, and `y.backward(arrived)` continues from there.
#
# **Predict.** What must a stage keep between the forward and the backward pass of a micro-batch?
#
# <details><summary>Answer</summary>
#
# Its input x, because the previous stage needs x.grad, and its output y, because the backward
# pass starts there. Through y it also keeps the graph, with all of this micro-batch's
# activations.
#
# </details>


# %%
class Stage:
    """A rank's layers, and the micro-batches that have gone forward but not yet back."""

    def __init__(self, group, m):
        self.layers = start.chunk(group.size())[group.rank()].clone().requires_grad_()
        self.inputs, self.targets, self.held = inputs.chunk(m), targets.chunk(m), {}

    def forward(self, i, arrived):
        x = self.inputs[i].clone() if arrived is None else arrived
        y = through(self.layers, x.requires_grad_())
        self.held[i] = x, y
        return y.detach()


# %%
def backward(stage, i, arrived):
    """Accumulate the layers' gradients; returns the input's gradient for the previous stage."""
    x, y = stage.held.pop(i)
    if arrived is None:  # the last stage
        loss_of(y, stage.targets[i]).backward()
    else:
        y.backward(arrived)
    return x.grad


# %% [markdown]
# Each rank executes its list: it receives what an action needs, computes, and sends the result. For
# stage 0's forward pass and the last stage's backward pass nothing arrives, so `arrived` is None.
# Your machine has fewer cores than a cluster has GPUs, so a `sleep`, which needs no core, stands in
# for the time a large stage would take; the messages and the gradients are real. The
# [ledger](word:ledger) records when each action starts and ends.


# %%
def play(group, schedule, send=dist.isend):
    """Execute this rank's list; returns its gradients and the ledger's spans."""
    rank, stage, leaving = group.rank(), Stage(group, schedule.num_micro_batches), []
    dist.barrier(group)
    with Ledger() as ledger:
        for action in schedule.actions[rank]:
            step, work = (1, Stage.forward) if action.kind == "F" else (-1, backward)
            with ledger.phase(f"{action} stage {rank}"):
                arrived = lab.receive_from(rank - step, group, like=stage.inputs[0])
                out = work(stage, action.micro_batch, arrived)
                time.sleep(MS[action.kind] / 1e3)
            if 0 <= rank + step < group.size():
                leaving.append((send(out, group=group, group_dst=rank + step), out))
    lab.wait_for(leaving)
    return stage.layers.grad, ledger.spans


# %% [markdown]
# Do the three ranks compute the gradients that one process computes, and does a step take as long
# as the simulator predicts? Each schedule runs three times; 1F1B is explained below.

# %% tags=["output-byhand"]
layers, measured = start.clone().requires_grad_(), {}
loss_of(through(layers, inputs), targets).backward()
print("3 ranks, 4 micro-batches   gradients    ms: predicted   median (min-max)")
for make_schedule in (sequential, gpipe, one_forward_one_backward):
    schedule = make_schedule(3, 4)
    timelines, grads = lab.play_repeatedly(play, schedule)
    measured[schedule.name] = min(timelines, key=lambda line: line.seconds)
    print(f"{schedule.name:24} off by {(grads - layers.grad).abs().max():.0e}"
          f"{simulate(schedule, MS).seconds:15.0f}   "
          f"{lab.spread([line.seconds for line in timelines])}")

# %% [markdown]
# The gradients agree to rounding error. No step is faster than predicted, because a sleep never
# ends early. The figure shows the fastest sequential step:

# %% tags=["figure-byhand"]
show(pipeline(simulate(sequential(3, 4), MS), measured["sequential"]), alt=(
    "The sequential schedule on three real ranks, measured below the prediction: one rank works "
    "while two wait."
))

# %% [markdown]
# The measured step falls behind from left to right. Every pass waits for the one before, so late
# sleeps, matmuls, messages, and waiting for a core add up.
#
# ### 1F1B: hold fewer activations
#
# In the simulator, the third schedule takes as long as GPipe. Its advantage is in memory, which the
# right-hand column of the timelines counts: a rank holds all activations of a micro-batch from its
# forward to its backward pass.
#
# **Predict.** With GPipe a rank holds all m micro-batches at its peak. How would you reorder its
# list to hold fewer?
#
# <details><summary>Answer</summary>
#
# The first micro-batch could come back much earlier: the last stage can start its backward pass as
# soon as it has the loss. So let each rank run as many forward passes as there are stages after it
# (**warm-up**), then alternate one forward and one backward pass (**steady state**), then finish
# the remaining backward passes (**cool-down**). This is **1F1B**. Rank r holds at most p - r
# micro-batches, however large m is.
#
# </details>
#
# The figure shows 1F1B on three ranks; the table compares it with GPipe on four.

# %% tags=["figure-1f1b"]
show(pipeline(simulate(one_forward_one_backward(3, 4), MS)), alt=(
    "1F1B: the same bubble as GPipe, but rank 0 never holds more than three micro-batches."
))

# %% tags=["output-held", "nbval-check-output"]
p = 4
print("       micro-batches held, by rank      bubble / total time")
print("    m  GPipe           1F1B             GPipe   1F1B")
for m in (2, 4, 8, 32):
    schedules = [make_schedule(p, m) for make_schedule in (gpipe, one_forward_one_backward)]
    held = [" ".join(f"{count:2}" for count in peak_activations(s)) for s in schedules]
    bubbles = [simulate(s, MS).bubble_of_total for s in schedules]
    print(f"{m:5}  {held[0]:15} {held[1]:15} {bubbles[0]:6.0%} {bubbles[1]:6.0%}")

# %% [markdown]
# 1F1B's counts stop growing at p - r, and the bubbles are equal: 1F1B saves memory, not time. It
# reduces the bubble only indirectly: GPipe holds all m b = GBS/N sequences of a pipeline, so memory
# limits GBS/N. 1F1B holds at most p b, so memory does not limit m. (The published GPipe also
# recomputes, so it keeps only the *inputs* of m micro-batches; [Huang et al.
# 2019](https://arxiv.org/abs/1811.06965), section 2.3.)
#
# ### Interleaving: a smaller bubble
#
# The bubble lasts as long as p - 1 forward and backward passes through a stage, so make the
# stages smaller. With v stages per rank, each takes 1/v of the time. With eight stages on four
# ranks, rank 0 holds stages 0 and 4; the stages of one rank are also called its chunks.
#
# **Predict.** Why not stages 0 and 1, so that fewer messages cross between ranks?
#
# In the figure, a rank's second stage is dark.

# %% tags=["figure-interleaved"]
p, m = 4, 8
HALF = {kind: duration / 2 for kind, duration in MS.items()}  # a stage of half the layers
show(pipeline(simulate(interleaved(p, m, num_chunks=2), HALF)), alt=(
    "Interleaved 1F1B with two stages per rank, light and dark: filling and draining the pipeline "
    "takes half as long, because a stage takes half as long."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# With stages 0 and 1 on rank 0, the first micro-batch would pass through *all* layers of the
# other ranks before it reaches the last one, exactly as with one stage per rank. In the figure it
# first passes through half of each rank's layers, so the last rank starts in half the time.
#
# </details>
#
# A rank takes p micro-batches through its first stage, then the same p through its next, so p must
# divide m; backward passes visit the stages in reverse. The warm-up of rank r has
# $(v-1)p + 2(p-1-r)$ forward passes. The price is twofold: micro-batches visit every rank v times,
# so each rank sends at least v times as many messages, and it holds more activations.
#
# ### Zero bubble: split the backward pass
#
# Instead of shrinking the bubble, we can fill it. A backward pass computes **I**, the gradient of
# the stage's input, and **W**, the gradients of its weights. In a GPT, W takes $24D^2$ FLOPs per
# token and layer and I, with attention, $24D^2 + 8SD$; the figure treats them as equal.
#
# **Predict.** Which of the two does the previous stage wait for? And what waits for the other?
#
# <details><summary>Answer</summary>
#
# The previous stage waits for I. No stage waits for W: it is needed only at the end of the step,
# for data parallelism, a tied embedding, and the optimizer. So W can be deferred to when the rank
# would otherwise be idle ([Qi et al. 2023](https://arxiv.org/abs/2401.10241)).
#
# </details>
#
# The figure shows **ZB-H1**. It is 1F1B, except that rank r defers each W by r micro-batches; I is
# tan, W pale.

# %% tags=["figure-zero"]
SPLIT = {"F": 20, "I": 20, "W": 20}
show(pipeline(simulate(zero_bubble(p, m), SPLIT)), alt=(
    "ZB-H1: the backward pass split in two. Weight gradients (pale) fill most of the idle time."
))

# %% [markdown]
# With ZB-H1 no rank idles at the end of the step. The papers give each schedule's bubble and how
# many micro-batches rank 0 holds at its peak, for large enough m and, in ZB-H1, $t_W \le t_F, t_I$.
# We derived the other ranks: in 1F1B and interleaved, the warm-up and one more; in ZB-H1, 1F1B's
# $p-r$ and r deferred. (A micro-batch in one of a rank's v stages counts 1/v, as in [Korthikanti et
# al. 2022](https://arxiv.org/abs/2205.05198), 4.2.3, for interleaving. The times $t_F$, $t_B$,
# $t_I$ and $t_W$ are for all of a rank's stages.)
#
# | schedule | bubble | held by rank r | source, section |
# |---|---|---|---|
# | GPipe | $(p-1)(t_F+t_B)$ | $m$ | Huang 2019, 2.3 |
# | 1F1B | $(p-1)(t_F+t_B)$ | $p-r$ | [Narayanan 2021](https://arxiv.org/abs/2104.04473), 2.2.1 |
# | interleaved | $(p-1)(t_F+t_B)/v$ | $p + (p-1-2r)/v$ | there, 2.2.2 |
# | ZB-H1 | $(p-1)(t_F+t_I-t_W)$ | $p$ | Qi 2023, table 2 |
#
# Do the lists reach these numbers? "List" is the simulation, "paper" the formula:

# %%
MAKERS = {"GPipe": (gpipe, MS), "1F1B": (one_forward_one_backward, MS),
          "interleaved, v = 2": (partial(interleaved, num_chunks=2), HALF),
          "ZB-H1": (zero_bubble, SPLIT)}
PAPERS = {"GPipe": cost.pipeline_bubble(p, m, 20, 40).seconds,
          "1F1B": cost.pipeline_bubble(p, m, 20, 40).seconds,
          "interleaved, v = 2": cost.pipeline_bubble(p, m, 20, 40, num_chunks=2).seconds,
          "ZB-H1": cost.zb_h1_bubble(p, m, 20, 20, 20).seconds}


# %% tags=["output-four", "nbval-check-output"]
def compare(makers, papers):
    print("                      ms of    bubble, ms      bubble over    held by rank")
    print(f"p = {p}, m = {m}         a step   list   paper   total   ideal     0      {p - 1}")
    for name, (make_schedule, durations) in makers.items():
        schedule = make_schedule(p, m)
        line, v = simulate(schedule, durations), schedule.num_stages // p
        held = [count / v for count in peak_activations(schedule)]  # of 1/p of the layers
        bubble = line.bubble_of_total * line.seconds
        print(f"{name:18} {line.seconds:8g} {bubble:7.0f} {papers[name]:7.0f} "
              f"{line.bubble_of_total:8.1%} {line.bubble_of_ideal:7.1%} {held[0]:6g} {held[-1]:6g}")


compare(MAKERS, PAPERS)

# %% [markdown]
# The lists reach the papers' bubbles, and the counts of the table. Interleaving pays for its
# smaller bubble with messages and some memory, ZB-H1 with memory that 1F1B leaves unused on all
# ranks but the first.
#
# ## 5. Traps
#
# Section 4 avoided three mistakes.
#
# ### The order of the actions
#
# In this schedule for two ranks, rank 0 runs B0 before F1.
#
# **Predict.** What does each rank wait for?

# %%
F, B = partial(Action, "F"), partial(Action, "B")  # (micro-batch, stage)
impatient = Schedule("impatient", 2, (
    (F(0, 0), B(0, 0), F(1, 0), B(1, 0)),
    (F(0, 1), F(1, 1), B(0, 1), B(1, 1)),
))

# %% [markdown]
# The package's [validator](code:minitron.parallel.pipeline.schedule_check) steps through the lists
# without starting a process:

# %% tags=["output-validator", "nbval-check-output"]
print(lab.verdict(schedule_check.check, impatient))

# %% [markdown]
# Without the validator, the ranks hang silently until the timeout; then the launcher reports each
# stuck rank and the call it is waiting in:

# %% tags=["output-circle"]
print(lab.verdict(run, play, 2, impatient, timeout=4))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Rank 0 waits for the gradient of micro-batch 0, which rank 1 computes only after F1. But rank 1
# cannot start F1 without rank 0's second output.
#
# </details>
#
# ### The order of sends and receives
#
# In section 4, `play` used `isend`, which returns immediately (so `leaving` keeps each tensor until
# its send has finished). The obvious choice is `send`, which returns when the receiver has taken
# the message.
#
# **Predict.** We use `send` for six micro-batches on three ranks; both schedules are valid. Does
# GPipe run? Does 1F1B?

# %% tags=["output-order", "exhaustive"]
for make_schedule in (gpipe, one_forward_one_backward):
    schedule = make_schedule(3, 6)
    schedule_check.check(schedule)
    print(f"{schedule.name}: {lab.verdict(run, play, 3, schedule, dist.send, timeout=5)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# GPipe runs: each rank sends all its outputs forward before it sends a gradient back, so no two
# ranks send to each other at the same time. 1F1B deadlocks: in the steady state rank 1 has an
# activation for rank 2 while rank 2 has a gradient for rank 1. Both send, and neither receives.
# Rank 0 is not part of the cycle; it waits for rank 1 to receive its third output (`send #2`,
# counted from zero).
#
# </details>
#
# So a valid schedule can hang, too, if its *messages* form a cycle. On CPUs `isend` solves this,
# because the send waits in the background while the rank posts (starts) its receive. On GPUs it
# does not: PyTorch runs the messages between two ranks in the order in which they were posted, on
# one CUDA stream, and NCCL's send [may wait for the
# receiver](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html). In 1F1B both
# neighbors queue a send before their receive, so each send waits for a receive that is queued
# behind the other send.
#
# Megatron-LM posts the two messages as one batch (`batch_isend_irecv`), within which they do not
# wait for each other. This package uses a rule that works for any schedule: it sorts the actions
# of *all* ranks into one global order, and every rank posts its messages in that order.
#
# This cannot deadlock, because in the global order each action comes after everything it depends on
# and after its rank's earlier actions. Suppose that some messages are never delivered, and take the
# first of them. What its sender and its receiver do before they post it depends only on earlier
# messages, which are delivered. So both post it, and it is delivered: a contradiction.
#
# ### The scale of the loss
#
# A training loop usually computes a micro-batch's loss as a mean over its tokens and reports the
# mean of these means.
#
# **Predict.** Call `loss.backward()` on each micro-batch's mean. By which factor are the
# gradients wrong? Does the loss curve show it with AdamW? With SGD?
#
# The table compares training with these gradients, with the correct ones, and with an attempt to
# fix them.


# %%
def cut(model, group, make_schedule=one_forward_one_backward):
    """The package's pipeline, in the form the training step and the oracle expect."""
    return Grid(model, pipeline=apply_pipeline_parallel(model, group, make_schedule))


# %%
def mean_of_each(model, group, scale_of=lambda m: 1):
    """The mistake: call backward on each micro-batch's own mean, times `scale_of(m)`."""
    parallel = cut(model, group)
    correct_run = parallel.pipeline.run

    def run(micro_batches, sum_loss, divisor):  # the right divisor is ignored
        def scaled_mean(out, targets):
            return scale_of(m) * sum_loss(out, targets) / targets.numel()

        m = len(micro_batches)
        total = correct_run(micro_batches, scaled_mean, divisor=1)
        return total / (m * scale_of(m))  # reports the mean of the means

    parallel.pipeline.run = run
    return parallel


# %% tags=["output-trap", "exhaustive"]
RULES = {"sum / all tokens": cut, "mean of each": mean_of_each,
         "mean of each, / m": partial(mean_of_each, scale_of=lambda m: 1 / m)}
print("2 ranks, 4 micro-batches             reported loss after step")
print("gradient of           optimizer      1     15     30")
for name, apply in RULES.items():
    for optimizer in ("AdamW", "SGD"):
        losses = lab.losses_of(apply, optimizer)
        print(f"{name:21} {optimizer:9} "
              + " ".join(f"{losses[step]:6.2f}" for step in (0, 14, 29)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Gradients accumulate over micro-batches, so they are m times too large, while the reported loss
# is divided by m and looks right. AdamW normalizes the scale of the gradient away, so its curve
# is as good as the correct one. SGD takes steps m times too large.
#
# </details>
#
# This bug has shipped. picotron's pipeline calls backward on each micro-batch's mean and divides
# only the loss it logs
# ([`pipeline_parallel.py`](https://github.com/huggingface/picotron/blob/main/picotron/pipeline_parallel/pipeline_parallel.py)).
# In torchtitan, a pipeline's gradients were too large by the number of tokens ([issue
# 2972](https://github.com/pytorch/torchtitan/issues/2972)). Dividing by m fixes the former. Is that
# always enough? Ask the [oracle](word:oracle), with two micro-batches of equal and of unequal size.
# The oracle stops at the first difference, so the cell also prints by how much the first step's
# gradients are off, relative to each tensor's largest value:

# %% tags=["output-oracle-trap", "exhaustive"]
for rows in ((2, 2), (3, 2)):
    for name, apply in RULES.items():
        off = lab.gradient_error(apply, 2, batch_size=sum(rows))
        print(f"{name}, {rows[0]} and {rows[1]} rows: gradients off by up to {off:.1%}")
        found = lab.oracle(apply, 2, batch_sizes=(sum(rows),) * 2)
        print(textwrap.indent(textwrap.fill(found, 76), "  "))

# %% [markdown]
# The oracle finds the factor m = 2. Dividing by m is enough only when all micro-batches have the
# same number of tokens. With 3 and 2 rows, a token in the small micro-batch counts 5/4 of what it
# should and one in the large micro-batch 5/6, so the gradients and the reported loss are wrong.
# Padding and masked targets often make micro-batches unequal. So the package's pipeline takes the
# micro-batches, a loss *summed* over tokens, and the number to divide by:
# `run(micro_batches, sum_loss, divisor)`.
#
# ## 6. The real one
#
# How does the package avoid these traps? Its
# [executor](code:minitron.parallel.pipeline.executor.ScheduleExecutor) knows no particular
# schedule; it executes the list it is given. Here are rank 1's list, with 1F1B on three ranks, and
# the function that makes it:

# %% tags=["output-script", "nbval-check-output"]
print(lab.written(rank_program(one_forward_one_backward(3, 3), 1)))

# %%
show_source(rank_program)

# %% [markdown]
# Rank 1 posts two receives before it computes, in the order of `topological_order`, section 5's
# global order. The executor waits for a receive where its action begins. This is how it runs the
# list:

# %%
show_source(ScheduleExecutor.run, ScheduleExecutor.backward)

# %% [markdown]
# The backward pass continues from the output, as in section 4. One difference saves memory: the
# executor keeps an `edge`, the graph node that produced the output, instead of the output itself.
# The output's values are not needed once it has been sent, so b x S x D values per micro-batch in
# flight are freed (Korthikanti et al. 2022, appendix B).
#
# The other difference makes I possible, a backward pass that skips the weights. The package's
# linear layers have their own autograd function, whose
# [`backward`](code:minitron.model.linear.LinearFunction.backward) chapters 7 and 8 read. It packs
# the computation of the weight gradients into an object. Within `deferral.collecting()`, which I
# enters, these objects go into the list `later`, and W computes them.
#
# ### Which layers make a stage?
#
# A pipeline is as fast as its slowest stage, and each stage has to fit on its rank. So far all
# stages were equal, but embedding and head belong to stages, too. Llama 3.2 1B has 16 layers of 61
# million parameters, and embedding and head hold 263 million each. The head multiplies by all its
# weights, while the embedding is a lookup: it takes memory but almost no time.
#
# **Predict.** Cut the model into four stages so that the largest holds as few parameters as
# possible. Then cut it so that the slowest stage computes as little as possible.

# %% tags=["output-split", "nbval-check-output"]
with torch.device("meta"):  # no memory for weights
    llama_1b = Transformer(cost.PUBLISHED["Llama 3.2 1B"])
blocks, embedding, head = count_parameters(llama_1b)
ways = {"equal numbers": [range(4)] * 4}
for count in (count_parameters, count_multiplications):
    costs, first, last = count(llama_1b)
    ways[count.__name__] = split_blocks(costs, 4, first, last)
print(f"millions of parameters: layer {blocks[0] / 1e6:.1f}, embedding or head {head / 1e6:.1f}")
print("                       layers by stage   largest: held   multiplied")
for name, ranges in ways.items():
    multiplied = [len(layers) * blocks[0] for layers in ranges]
    multiplied[-1] += head
    held = [multiplied[0] + embedding, *multiplied[1:]]
    print(f"{name:22} {list(map(len, ranges))!s:25} {max(held) / 1e6:5.0f} "
          f"{max(multiplied) / 1e6:12.0f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# To hold least, the stages at both ends get two layers and the others six, because embedding and
# head are larger than four layers each. To compute least, only the last stage gets fewer.
#
# </details>
#
# By default the package balances the parameters held (the middle line). It counts neither
# activations nor attention's own multiplications, which grow with S.
#
# Llama 3.2 1B ties its embedding to its head. The first and the last stage then each
# have a copy and each compute a partial sum of its gradient, which they exchange and add at the end
# of the step. With data parallelism, every stage averages its gradients with the same stage of the
# other pipelines, once per step. The oracle checks both, and three schedules:


# %%
def cut_and_copied(model, group, apply_data=apply_zero1, make_schedule=one_forward_one_backward):
    """Two pipelines on half of the ranks each, and data parallelism between them."""
    mesh = make_mesh("cpu", dp=2, pp=group.size() // 2)
    pipeline_parallel = apply_pipeline_parallel(model, mesh.group("pp"), make_schedule)
    data = apply_data(model, mesh.group("dp"), pipeline=pipeline_parallel)
    return Grid(model, data=data, pipeline=pipeline_parallel)


# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
two_chunks = partial(interleaved, num_chunks=2)
for family, schedule, num_ranks, apply, m in (
    ("gpt", "1F1B, tied embedding", 3, cut, 2),
    ("gpt", "ZB-H1, tied embedding", 4, partial(cut, make_schedule=zero_bubble), 3),
    ("llama", "interleaved", 2, partial(cut, make_schedule=two_chunks), 4),
    ("llama", "1F1B and ZeRO-1", 4, cut_and_copied, 2),
):
    found = lab.oracle(apply, num_ranks, family, m)
    print(f"{num_ranks} ranks  {family:6} {schedule:22} {found}")

# %% [markdown]
# All four train like one process.
#
# ## 7. Measure
#
# ### Time
#
# Does the real executor take the time that the simulator predicts? We run a Transformer of eight
# small blocks on four ranks. Each block sleeps for F, for I, and for W, as if it were large: the
# duration of a stage is **emulated**, while the schedule, the messages and autograd are real. The
# simulator predicts twice: with the durations we asked for, and with the mean durations the passes
# had. The figure shows 1F1B, with the first prediction dashed.

# %% tags=["output-measured", "exhaustive"]
p, m, lines = 4, 8, {}
print("p = 4, m = 8         ms of a step: predicted from    measured")
print("                     durations asked    as measured    median (min-max)")
for name, (make_schedule, durations) in MAKERS.items():
    schedule, steps = make_schedule(p, m), lab.emulated_steps(make_schedule, p, m)
    steps.sort(key=lambda line: line.seconds)
    predicted, lines[name] = simulate(schedule, durations), steps[len(steps) // 2]
    longer = simulate(schedule, lab.mean_durations(lines[name]))
    print(f"{name:18} {predicted.seconds:17.0f} {longer.seconds:14.0f}    "
          f"{lab.spread([line.seconds for line in steps])}")

# %% tags=["figure-measured", "exhaustive"]
predicted = simulate(one_forward_one_backward(p, m), MS)
show(pipeline(predicted, lines["1F1B"]), alt=(
    "1F1B on four real ranks below the simulator's prediction: the same passes in the same order, "
    f"in {lines['1F1B'].seconds:.0f} ms instead of {predicted.seconds:.0f}."
))

# %% tags=["output-ratios", "exhaustive"]
print("a step / 1F1B's step    predicted   measured")
for name in ("interleaved, v = 2", "ZB-H1"):
    make_schedule, durations = MAKERS[name]
    ratio = simulate(make_schedule(p, m), durations).seconds / predicted.seconds
    print(f"{name:18} {ratio:14.2f} {lines[name].seconds / lines['1F1B'].seconds:10.2f}")

# %% [markdown]
# A step takes longer than its first prediction. The second accounts for passes that take longer
# than asked for, because a sleep ends late and the small blocks do compute. Only the measurement
# includes messages and single late passes, which delay every rank that waits and which a mean
# hides. GPipe and 1F1B are predicted to take equally long: in the second table, trust only gains
# larger than the gap between their medians.
#
# ### Memory
#
# Do the ranks hold what their lists say? The [meter](word:meter) measures each rank's peak of
# activations, and the table divides it by those of one micro-batch:

# %% tags=["output-meter", "nbval-check-output", "exhaustive"]
shape = lab.SHAPE  # eight blocks, one sequence of 32 tokens in a micro-batch
stage_bytes = 2 * cost.activation_bytes_per_layer(shape, 1, 32, bytes_per_value=4)
results = {name: lab.metered(make_schedule, p, m) for name, (make_schedule, _) in MAKERS.items()}
print("micro-batches held,      by the meter                by the list")
print("in stages                rank 0  1     2     3       rank 0  1     2     3")
for name, (make_schedule, _) in MAKERS.items():
    schedule = make_schedule(p, m)
    held = [rank.peak_activation_bytes / stage_bytes for rank in results[name]]
    counted = [count * p / schedule.num_stages for count in peak_activations(schedule)]
    print(f"{name:22} " + " ".join(f"{count:5.1f}" for count in held) + "     "
          + " ".join(f"{count:5.1f}" for count in counted))

# %% [markdown]
# GPipe, 1F1B and interleaved match, except that rank 3 holds 0.1 more for each micro-batch whose
# logits it holds. For ZB-H1 the meter finds less: after I only what W needs is left, the inputs
# and output gradients of the linear layers.
#
# ### Messages
#
# **Predict.** With four ranks and eight micro-batches, how many messages does rank 1 send in 1F1B?
# And rank 0 with two stages per rank? The table also divides the bytes in the ledger by those that
# the cost model predicts.

# %% tags=["output-messages", "nbval-check-output", "exhaustive"]
print("                     messages sent by rank   bytes sent / formula")
for name, v in {"1F1B": 1, "interleaved, v = 2": 2, "ZB-H1": 1}.items():
    messages = " ".join(f"{each.messages_sent:2}" for each in results[name])
    ratios = [each.bytes_sent / cost.pipeline_volume(1, 32, shape.width, 4, p, m, rank, v).sent
              for rank, each in enumerate(results[name])]
    print(f"{name:20} {messages:23}", *(f"{ratio:.2f}" for ratio in ratios))

# %% [markdown]
# <details><summary>Answer</summary>
#
# With 1F1B, rank 1 sends 16: each micro-batch once forward and once back, b x S x D values per
# message. The first and the last rank send half as much, because they have only one neighbor. With
# two stages per rank, rank 1 sends twice as many, and rank 0 sends 24: forward from both its
# stages, back from its second, whose input came from the last rank.
#
# </details>
#
# ### On real GPUs: which axis crosses nodes?
#
# Put GPT-3 on 1,024 H100s in nodes of eight: tensor-parallel size t = 8, p = 8 stages of 12 layers,
# and N = 16 data-parallel replicas. A step processes 1,536 sequences, so each pipeline gets 96.
#
# **Predict.** For each micro-batch, how many times as many bytes does tensor parallelism send as
# the pipeline?

# %% tags=["output-traffic", "nbval-check-output"]
t, p, N = 8, 8, 16
m = 1536 // N
layers, sizes = gpt3.num_layers // p, (1, S, gpt3.width, 2)
tensor = m * layers * cost.tensor_parallel_volume(*sizes, 0, cost.Layout(t)).sent
stages = cost.pipeline_volume(*sizes, p, m, rank=1).sent
data = cost.ring_all_reduce_volume(parameters // (t * p), 2, N, 0).sent
print("a GPU sends per step       GB   seconds over NVLink   over InfiniBand")
for name, size in (("tensor parallelism", tensor), ("pipeline", stages), ("data", data)):
    print(f"{name:20} {size / GB:8.1f} {size / H100.nvlink_bandwidth:21.2f} "
          f"{size / H100.nic_bandwidth:17.2f}")
flops = m * S * cost.training_flops_per_token(gpt3, S) / (t * p)
work = flops / (0.4 * H100.bf16_flops)
print(f"compute, at 40 % of the peak: {work:.1f} s; "
      f"tensor parallelism / pipeline: {tensor / stages:.0f}")

# %% tags=["output-verdict", "nbval-check-output"]
layer_bytes = partial(  # of the activations of a number of sequences
    cost.activation_bytes_per_layer, gpt3, sequence_length=S, layout=cost.Layout(t, True),
    attention="materialized", recompute="selective")
first_rank = cost.tensor_parallel_parameters(replace(gpt3, num_layers=layers), t)
bubble = cost.pipeline_bubble(p, m, work / m / 3, work / m * 2 / 3).seconds
held = layer_bytes(1) * gpt3.num_layers  # a pipeline's rank 0: p micro-batches, L/p layers
two_layers = 2 * 2 * recipe.parameter * cost.num_block_parameters(gpt3) / t  # and gradients
rows = {f"ZeRO-3, b = {b}": (cost.zero_bytes(each, 128, 3) + two_layers + b * held,
                             zero3 * 1536 / 128 / b, 0) for b in (1, 6, 12)}
rows["1F1B, b = 1"] = first_rank * recipe.total + held, (stages + data) / H100.nic_bandwidth, bubble
print("a step               GB on a GPU   s between nodes   s of bubble")
for name, (size, sent, idle_time) in rows.items():
    fits = "" if size < 0.9 * H100.memory_bytes else "no"
    print(f"{name:17} {size / GB:14.1f} {fits:2} {sent:14.1f} {idle_time:13.1f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# 42 times. Tensor parallelism sends 8 b S D (t-1)/t values for *every layer*; the pipeline sends 2
# b S D for *every stage*, so the ratio is 12 x 8 x 7/8 / 2. Over InfiniBand, tensor parallelism
# would take about as long as the compute, so tp gets the links inside the node. The pipeline and
# data parallelism both need 0.2 s, so either may cross nodes.
#
# </details>
#
# The second table answers section 1. Its memory, not its messages, assumes sequence parallelism and
# selective recomputation; a tenth is left to CUDA and NCCL. With b = 6, the table's largest that
# fits, ZeRO-3 adds 5.2 s to 8.4 s of compute, less what hides behind it. Without
# overlap, 1F1B adds 0.4 + 0.6 = 1.0 s. So ZeRO-3 is faster only if it hides over four fifths of its
# traffic, and ZB-H1 or interleaving would shrink the bubble.
#
# The widget simulates a schedule of your choice. Before you move a slider, use section 2's formula
# to answer the first question below it. (The next section explains ZB-V and DualPipeV.)

# %% tags=["figure-explorer"]
schedule_explorer()

# %% [markdown]
# In 1F1B every rank idles equally long: rank 0 mostly before its first gradient arrives, rank 3
# only at both ends.

# %% [markdown]
# ## Further: V-shaped schedules, ZB-V and DualPipeV
#
# Interleaving places stages 0 to p - 1 on the ranks in order, then stages p to 2p - 1 in the
# *same* order. Place the second half in reverse order instead, so that rank r holds stages r and
# 2p - 1 - r. A micro-batch then goes down the ranks and comes back up. The last rank passes it on
# to itself, and rank 0 holds both ends of the model, so it can start a backward pass as soon as
# it has the loss.
#
# **ZB-V** (Qi et al. 2023, section 6) combines the V with split backward passes. If F, I and W
# take equally long and m is at least 2p - 1, each rank is busy without interruption from its first
# to its last pass.
#
# **DualPipe** ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 3.2.1) feeds
# micro-batches in from both ends of the pipeline and pairs the forward pass of one direction with
# the backward pass of the other, so that on a GPU one computes while the other communicates. It
# needs two copies of the parameters and holds p + 1 micro-batches (table 2 of the report).
# **DualPipeV** folds it into a V, which produces the same pairs with a single copy. Both are
# PyTorch's lists (`torch.distributed.pipelining`, `ScheduleZBVZeroBubble` and
# `ScheduleDualPipeV`); a test compares them. The figures show ZB-V, then DualPipeV, where a wide
# block is a whole B.

# %% tags=["figure-zbv"]
p, m = 4, 8
HALVES = HALF | {"I": 10, "W": 10}  # I and W, too, for a stage of half the layers
show(pipeline(simulate(zb_v(p, m), HALVES)), alt=(
    "ZB-V: micro-batches go down the ranks (light) and back up (dark). Each rank is busy from its "
    "first pass to its last; what is left of the bubble is that ranks start and end staggered."
))

# %% tags=["figure-dualpipev"]
show(pipeline(simulate(dualpipe_v(p, m), HALVES)), alt=(
    "DualPipeV on the same ranks: in the steady state every forward pass has a backward pass of "
    "the other direction next to it."
))

# %% tags=["output-v", "nbval-check-output"]
VS = {"ZB-V": (zb_v, HALVES), "DualPipeV": (dualpipe_v, HALVES)}
REPORTED = {"ZB-V": 0, "DualPipeV": (p - 1) * (30 + 20 - 3 * 10)}
compare({"1F1B": MAKERS["1F1B"], "ZB-H1": MAKERS["ZB-H1"], **VS}, PAPERS | REPORTED)
pairs = len(dualpipe_v(p, m).overlapped)
print(f"DualPipeV pairs {pairs} of {2 * p * m} forward passes with a backward pass")

# %% [markdown]
# Both reduce the bubble to $(p - 1)\,t_F / 2$, with $t_F$ for a rank's two stages: the time the
# first micro-batch takes to come down to the last rank. (If F, I and W are equally long, and m is
# at least 2p - 1 in ZB-V, 2p in DualPipeV.)
#
# The authors, in the column "paper", count differently. Qi et al. call ZB-V's bubble zero: they
# count gaps between a rank's first and last pass only, as ranks start the next step staggered.
# [DualPipe's repository](https://github.com/deepseek-ai/DualPipe) gives
# $(s/2 - 1)(F\&B + B - 3W)$, in a stage's durations, for s = 2p stages; the column assumes
# $F\&B = F + B$ for a pair. The formula treats the pair as one block, whose forward result is sent
# when the block is done; in our lists F sends its result before B starts.
#
# Every rank holds the same, whereas 1F1B loads the first rank most. DualPipeV pairs only 25 of 64
# forward passes here because m = 2p, the fewest it accepts, leaves a short steady state.
# `Schedule.overlapped` marks the pairs, but this package's executor runs the two passes of a pair
# one after the other. So the table shows the bubble, not the overlap of communication and
# computation that DualPipe was built for.
#
# With a tied embedding the V has a catch: rank 0 holds both ends of the model, so a single
# parameter receives gradients from its first *and* its last stage, and data parallelism may send
# the gradient only when both are complete. Does it train like one process, alone and with data
# parallelism?

# %% tags=["output-v-oracle", "nbval-check-output", "exhaustive"]
DATA = {"data parallelism": lambda *args, pipeline: apply_bucketed_data_parallel(*args),
        "ZeRO-1": apply_zero1, "ZeRO-2": apply_zero2}
for name, (make_schedule, _) in VS.items():
    for p_small in (2, 3):
        apply = partial(cut, make_schedule=make_schedule)
        found = lab.oracle(apply, p_small, "gpt", 2 * p_small, (9, 8), num_layers=2 * p_small)
        print(f"{name:9}  {p_small} ranks       {'':16}  {found}")
    for kind, apply_data in DATA.items():
        apply = partial(cut_and_copied, apply_data=apply_data, make_schedule=make_schedule)
        print(f"{name:9}  2 ranks x 2   {kind:16}  {lab.oracle(apply, 4, 'gpt', 4, (8, 8))}")

# %% [markdown]
# Do the ranks hold and send what the lists say? We repeat section 7's two measurements.
#
# **Predict.** In interleaved 1F1B, too, each rank has two stages, and with eight micro-batches the
# four ranks send 24, 32, 32 and 24 messages. How many do they send in a V?

# %% tags=["output-vheld", "nbval-check-output", "exhaustive"]
print("p = 4     held in stages, by rank            messages     bytes sent /")
print("m = 8     by the meter     by the list       by rank      formula, by rank")
for name, (make_schedule, _) in VS.items():
    by_rank, lists = lab.metered(make_schedule, p, m), peak_activations(make_schedule(p, m))
    held = " ".join(f"{each.peak_activation_bytes / stage_bytes:.1f}" for each in by_rank)
    counted = " ".join(f"{count / 2:.1f}" for count in lists)
    messages = " ".join(f"{each.messages_sent}" for each in by_rank)
    volumes = [cost.v_volume(1, 32, shape.width, 4, p, m, rank).sent for rank in range(p)]
    ratios = [each.bytes_sent / sent for each, sent in zip(by_rank, volumes, strict=True)]
    print(f"{name:9} {held}  {counted}   {messages}  ", *(f"{ratio:.2f}" for ratio in ratios))

# %% [markdown]
# <details><summary>Answer</summary>
#
# 16, 32, 32 and 16. Eight stages have seven boundaries, and each carries one message forward and
# one back per micro-batch. With interleaving, the boundary between stages 3 and 4 is also one
# between ranks, rank 3 and rank 0. In a V both of these stages are on rank 3, which hands its
# output on to itself. So the first and the last rank have only one neighbor to send to. The cost
# model has a formula of its own for this, [`v_volume`](code:minitron.cost.pipeline.v_volume).
#
# </details>
#
# Every rank holds what its list counts: unlike in ZB-H1, it peaks with no W pending. Rank 0 holds
# 0.1 more, a micro-batch's logits: it has the last stage.
#
# The next cell runs both with the real executor and emulated stages, as in section 7:

# %% tags=["output-vmeasured", "exhaustive"]
print("p = 4, m = 8         ms of a step: predicted from    measured")
print("                     durations asked    as measured    median (min-max)")
for name, (make_schedule, durations) in VS.items():
    schedule, steps = make_schedule(p, m), lab.emulated_steps(make_schedule, p, m)
    middle = sorted(steps, key=lambda line: line.seconds)[len(steps) // 2]
    longer = simulate(schedule, {**durations, **lab.mean_durations(middle)})
    print(f"{name:18} {simulate(schedule, durations).seconds:17.0f} {longer.seconds:14.0f}    "
          f"{lab.spread([line.seconds for line in steps])}")

# %% [markdown]
# In the first column every pass takes exactly as long as its sleep was asked to, in the second as
# long as the passes of its kind did on average. The gap between these two is sleeps that end late
# and the small blocks' own compute. The gap between the second column and the measured median is
# messages, and single late passes, which an average hides and for which other ranks wait. We did
# not measure these two separately. The second gap can be larger here than in 1F1B: a rank runs each
# micro-batch through two stages that take half as long, and the ranks send twice as many messages.
# The simulator predicts the same step for both schedules, so call one of them faster only if their
# spreads are apart.

# %% [markdown]
# ## Further: write your own schedule
#
# A schedule is any function of p and m that returns lists. The warm-up of 1F1B is just long enough
# for a steady state without pauses if messages take no time. On slow links every gradient returns
# later, so a rank idles in each round. What if its warm-up were twice as long?


# %%
def eager(p, m):
    """1F1B with a warm-up of twice the length."""
    lists = []
    for rank in range(p):
        forwards, backwards = [F(i, rank) for i in range(m)], [B(i, rank) for i in range(m)]
        lists.append(tuple(alternate(forwards, backwards, 2 * (p - 1 - rank))))
    return Schedule("eager 1F1B", m, tuple(lists))


# %% tags=["output-eager", "nbval-check-output"]
print("                 ms of a step, if a message takes     micro-batches")
print("p = 4, m = 16        0 ms     10 ms     20 ms         on rank 0")
for make_schedule in (one_forward_one_backward, eager):
    schedule = make_schedule(4, 16)
    schedule_check.check(schedule)
    times = [simulate(schedule, MS, transfer).seconds for transfer in (0, 10, 20)]
    print(f"{schedule.name:13} " + " ".join(f"{time:9,.0f}" for time in times)
          + f"{peak_activations(schedule)[0]:15}")
apply = partial(cut, make_schedule=eager)
print(f"on 3 ranks: {lab.oracle(apply, 3, 'gpt', 4, (4, 4, 4))}")

# %% [markdown]
# The longer warm-up hides most of the message time and pays with memory. The oracle confirms that
# it trains like one process.
#
# ## Further: choose m and v under a memory limit
#
# The 96 sequences of each pipeline in section 7 can go as 96 micro-batches of one sequence, 48 of
# two, or 24 of four. What fits on an H100, and what fraction of a step is idle? We look at the
# first rank, which also holds the embedding and the most activations. We count all 16 bytes per
# parameter, without ZeRO; activations with sequence parallelism and selective recomputation; and
# messages over InfiniBand. A "no" marks what takes more than 90 % of the memory.
#
# With sequence parallelism each of the t ranks sends only its own tokens to the next stage, 1/t
# of the bytes; Megatron-LM's scatter/gather optimization achieves the same without it (Narayanan
# et al. 2021, section 4.1).


# %%
def idle(schedule, b):
    """Fraction of a step that a GPU idles, messages included, with b sequences a micro-batch."""
    each = b * work / 96 / 3 / schedule.num_stages * 8  # seconds of F; B takes twice that
    message = b * S * gpt3.width * 2 / t / H100.nic_bandwidth  # each of t ranks, its own tokens
    durations = {"F": each, "B": 2 * each, "I": each, "W": each}
    return simulate(schedule, durations, message).bubble_of_total


def gigabytes(schedule, b):
    """Training state, embedding included, and activations of the first rank."""
    held = peak_activations(schedule)[0] * gpt3.num_layers / schedule.num_stages
    return (held * layer_bytes(b) + first_rank * recipe.total) / GB


# %% tags=["output-choose", "nbval-check-output"]
options = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "ZB-H1": zero_bubble} | {
    f"interleaved, v = {v}": partial(interleaved, num_chunks=v) for v in (2, 6, 12)}
print("                     b = 1, m = 96        b = 2, m = 48        b = 4, m = 24")
for name, make_schedule in options.items():
    cells = []
    for b in (1, 2, 4):
        schedule = make_schedule(8, 96 // b)
        size = gigabytes(schedule, b)
        fits = "" if size * GB < 0.9 * H100.memory_bytes else "no"
        cells.append(f"{idle(schedule, b):6.1%} {size:5.1f} GB {fits:2}")
    print(f"{name:20}" + "   ".join(cells))

# %% [markdown]
# GPipe fits nowhere. Interleaving reaches the smallest bubbles with v = 6 and v = 12, while ZB-H1
# beats v = 2. Interleaving holds 1 + (p-1)/(pv) times as many activations as 1F1B: 1.44 for v = 2,
# but only 1.07 for v = 12 (Korthikanti et al. 2022, section 4.2.3).
#
# According to the table you would choose b = 1 and v = 12. Be skeptical of that choice: the
# simulator lets messages overlap with compute perfectly, starts a pass without any overhead, and
# assumes that matmuls over one sequence are as efficient as over four. So measure the best few
# lines. In a run of the package, v = 6 is
# `--parallel.pp 8 --parallel.schedule interleaved --parallel.chunks 6`.
#
# The bubble also decides section 7's comparison on more GPUs. With the same batch on 4,096 GPUs, a
# node computes for 3 x 0.7 s. ZeRO-3 takes at least the 2.6 s of its messages. 1F1B's bubble is
# still 0.6 s; that and messages take it beyond. Only a smaller bubble surely wins.

# %% [markdown]
# ## 8. Recap
#
# 1. A stage needs its input and the gradient of its output. With m micro-batches, p stages are
#    busy m/(m + p - 1) of the time: a quarter for one micro-batch on four stages, 91 % for 32.
# 2. A schedule is a list of actions for each rank. GPipe and 1F1B have the same bubble; GPipe
#    holds m micro-batches, while in 1F1B rank r holds at most p - r.
# 3. With v stages per rank the bubble is v times smaller, and each rank sends at least v times as
#    many messages. No stage waits for weight gradients, so they can fill the bubble.
# 4. A valid schedule can still deadlock if its messages form a cycle. Post them in one global
#    order.
# 5. Sum the loss over tokens and divide by the tokens of the whole batch. Summing the means of m
#    micro-batches gives m times the gradient, and AdamW hides the factor.
#
# ## Exercises
#
# Write your answers into `exercises/ch09_pipeline_parallel.py`, save, and run the cell below each
# exercise. In a terminal, `minitron hint 9.1` gives hints in three steps.
#
# - [**9.1 Schedules**](exercise:9.1) (20 minutes): GPipe and 1F1B as lists of actions.
# - [**9.2 Bubble and memory**](exercise:9.2) (20 minutes): what a schedule costs, as formulas.
# - [**9.3 Layers per stage**](exercise:9.3) (25 minutes): which layers go to which stage, with
#   embedding and head.
# - [**9.4 Run a stage**](exercise:9.4) (30 minutes): any schedule, on real ranks, with the right
#   loss.

# %%
check("9.1")

# %%
check("9.2")

# %%
check("9.3")

# %%
check("9.4")

# %% [markdown]
# ## Further reading
#
# - Huang et al., [*GPipe*](https://arxiv.org/abs/1811.06965), 2019: section 2.3 (bubble and
#   memory).
# - Narayanan et al., [*Efficient Large-Scale Language Model Training on GPU
#   Clusters*](https://arxiv.org/abs/2104.04473), 2021: section 2.2 (1F1B with a flush,
#   interleaving), section 3.2 (the traffic).
# - Qi et al., [*Zero Bubble Pipeline Parallelism*](https://arxiv.org/abs/2401.10241), 2023:
#   section 2, table 2, section 6 (ZB-V).
# - DeepSeek-AI, [*DeepSeek-V3 Technical Report*](https://arxiv.org/abs/2412.19437), 2024: section
#   3.2.1 (DualPipe).
# - Harlap et al., [*PipeDream*](https://arxiv.org/abs/1806.03377), 2018: 1F1B that never drains the
#   pipeline, at the price of stale weights.
