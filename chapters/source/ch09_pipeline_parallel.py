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
# # Pipeline parallelism: layers over ranks
#
# **55 minutes. No GPU. Exercises 9.1 to 9.4 (95 minutes).**
#
# *You need:* chapter 2's 16 bytes per parameter, chapter 3's activations of a block, chapter 4's
# scale of a gradient, and chapter 7's bytes of tensor parallelism.
#
# *You will be able to:*
# - **write** a pipeline schedule as a list, have it proven, and train with it on real ranks;
# - **predict** its idle time, the activations that each rank holds, and its messages;
# - **catch** two ranks that wait for each other, and a loss of the wrong scale.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import textwrap
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from minitron import cost
from minitron.launch import RankError, run
from minitron.comm.mesh import make_mesh
from minitron.config import ConfigError, ModelConfig

# %%
from teaching.check import check
from teaching.figures import measured_timeline, memory_bars, pipeline, show, wire
from teaching.widgets import schedule_explorer
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.proof.oracle import assert_same_training, small_model
from minitron.model.transformer import Transformer, initialize
from minitron.plan.hardware import DEVICES

# %%
from minitron.parallel.pipeline import schedule_check
from minitron.parallel.pipeline.schedule_check import peak_activations
from minitron.parallel.pipeline.schedules import (
    Action, Schedule, alternate, gpipe, interleaved, one_forward_one_backward, sequential,
    zero_bubble,
)
from minitron.parallel.pipeline.simulator import simulate

# %%
from minitron.parallel.grid import Grid
from minitron.model.linear import LinearFunction, accumulate_all
from minitron.parallel.pipeline.executor import ScheduleExecutor
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.pipeline.block_costs import count_multiplications, count_parameters
from minitron.parallel.pipeline.plan import Message, script, split_blocks
from minitron.parallel.data.zero import apply_zero1

torch.set_num_threads(1)
GB = 1e9

# %% [markdown]
# ## 1. The question
#
# Chapter 7 put GPT-3 on 1,024 GPUs: every layer cut over the eight of a node, and ZeRO 3 between
# 128 such groups, because the links between nodes are too slow to cut further. It fits. But ZeRO 3
# gathers the weights for every pass. A group reads one sequence at a time, as there. For how long
# does it compute, and for how long does it send?

# %% tags=["output-question", "nbval-check-output"]
gpt3, S = replace(cost.PUBLISHED["GPT-3 175B"], vocab_size=51_200), 2048  # so that 8 divide it
P, each = cost.num_parameters(gpt3), cost.tensor_parallel_parameters(gpt3, 8)
recipe, H100 = cost.RECIPES["bf16"], DEVICES["H100-SXM-80GB"]
sent = cost.zero_volume(each, recipe.parameter, 128, 0, stage=3).sent
compute = S * cost.training_flops_per_token(gpt3, S) / 8 / (0.4 * H100.bf16_flops)
print(f"{P * recipe.parameter / GB:.0f} GB of weights, on each of 8 GPUs "
      f"{each * recipe.parameter / GB:.0f} GB")
print(f"with gradients and optimizer {each * recipe.total / GB:.0f} GB, "
      f"without ZeRO; an H100 has {H100.memory_bytes / GB:.0f}")
print(f"ZeRO 3, each sequence: {sent / GB:.0f} GB between nodes, "
      f"{sent / H100.nic_bandwidth:.1f} s; computing, {compute:.1f} s")
print(f"the output of a layer: {S * gpt3.width * 2 / GB:.2f} GB")

# %% [markdown]
# Without ZeRO 3 it does not fit: weights and gradients alone are more than a GPU has. With it, the
# GPUs wait for weights most of the time. ZeRO brings the weights to the tokens. Look at the last
# line: it would be cheaper to bring the tokens to the weights. Put the first layers on one node and
# leave them there, the next ones on another, and send on what comes out.

# %% [markdown]
# ## 2. Estimate
#
# Cut the model into p **stages** of neighboring layers, one on each rank. A stage needs nothing of
# the others but its input, and in the backward pass the gradient of its output.
#
# **Predict.** Four stages of equal size, and one batch. Which share of the time does a rank work?
#
# <details><summary>Answer</summary>
#
# A quarter. Stage 1 waits for the output of stage 0, stage 2 for that of stage 1; on the way back
# the same in the other direction. At every moment one of four works. The idle time of a pipeline is
# called its **bubble**.
#
# </details>
#
# Now cut the batch into m **micro-batches** and send them one after the other. As soon as stage 0
# has passed the first one on, it can take the second. The first needs p - 1 steps to come to the
# last stage. From there on something arrives in every step:
#
# $$\text{time} = (m + p - 1)\,(t_F + t_B), \qquad
# \text{bubble} = (p - 1)\,(t_F + t_B)$$
#
# for $t_F$ and $t_B$ seconds of a stage's forward and backward pass of one micro-batch.

# %% tags=["output-estimate", "nbval-check-output"]
p = 4
print("micro-batches   a rank works   bubble of total   bubble of ideal time")
for m in (1, 2, 4, 8, 16, 32):
    bubble = cost.pipeline_bubble(p, m, forward=1, backward=2)
    print(f"{m:13} {1 - bubble.of_total:14.0%} {bubble.of_total:17.0%} {bubble.of_ideal:22.0%}")

# %% [markdown]
# Papers use two conventions: the bubble as a share of the **total** time, (p - 1)/(m + p - 1), or
# of the **ideal** time that the work alone would take, (p - 1)/m. The second can be above 100 %.
#
# **A claim.** One can read that in a pipeline of four GPUs "often only one works", at "25 %
# utilization". The table tells which line that is: the first, a batch in one piece. With 32
# micro-batches it is 91 %, on the same GPUs and with the same layers.

# %% [markdown]
# ## 3. Picture
#
# A **schedule** says for each rank in which order it works on what. It is a list of actions: F3 is
# the forward pass of micro-batch 3, B3 its backward pass.

# %% tags=["output-list", "nbval-check-output"]
for schedule in (sequential(3, 4), gpipe(3, 4)):
    print(f"{schedule.name:10}  rank 0:", *schedule.actions[0])

# %% [markdown]
# A list and the duration of each action give a timeline. Say that a stage takes 20 ms forward and
# 40 ms backward. Blue is forward, orange backward, the number is the micro-batch, hatching is idle.
# To the right stands the most micro-batches that a rank holds at once; more of that in section 4.

# %%
MS = {"F": 20, "B": 40}


def draw(schedule, alt, durations=MS):
    """The timeline that the simulator predicts."""
    show(pipeline(simulate(schedule, durations)), alt=alt)



# %% tags=["figure-sequential"]
draw(sequential(3, 4), (
    "Each micro-batch forward and back before the next: at every moment one rank of three works."
))

# %% tags=["figure-gpipe"]
draw(gpipe(3, 4), (
    "All micro-batches forward, then all backward (GPipe): the same work in half of the time; what "
    "is idle are the corners, where the pipeline fills, turns and empties."
))

# %% [markdown]
# ## 4. By hand
#
# A model that one can see through: twelve layers, each a matrix and a tanh. The loss is a sum over
# samples, divided by the number of targets of the *whole* batch. Remember that for section 5.

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
# A stage is a piece of the model, and a piece of its graph. In the forward pass it detaches its
# output. So the graph ends at the stage's border, and autograd has to be told what comes from
# behind it: `y.backward(gradient of y)`.
#
# **Predict.** What must a stage keep between the two?


# %%
class Stage:
    """A rank's layers, and the micro-batches that have gone forward and not yet back."""

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
    """Add to the gradients of the layers; returns that of the input, for the stage before."""
    x, y = stage.held.pop(i)
    if arrived is None:  # the last stage
        loss_of(y, stage.targets[i]).backward()
    else:
        y.backward(arrived)
    return x.grad


# %% [markdown]
# <details><summary>Answer</summary>
#
# Its input x, on which the gradient for the stage before appears, and its output y, from which the
# graph can be run back. The graph holds all activations of this micro-batch in between.
#
# </details>


# %%
def received(like, source, group):
    """What rank `source` sends; None beyond the ends of the pipeline."""
    if 0 <= source < group.size():
        tensor = torch.empty_like(like)
        dist.recv(tensor, group=group, group_src=source)
        return tensor


def wait_for(leaving):
    """Wait until all that was sent has left; until then its tensor must stay."""
    for work, _ in leaving:
        if work is not None:  # of `send`, which has waited itself
            work.wait()


# %% [markdown]
# A rank's program is its list. It receives what an action needs, computes, and sends what it has
# made. More ranks than processor cores would compute in turns, so a **sleep** stands for the work
# of a large stage. The ledger notes when each action begins and ends.


# %%
def play(group, schedule, send=dist.isend):
    """Run this rank's list: its gradients, and the ledger's spans."""
    rank, stage, leaving = group.rank(), Stage(group, schedule.num_micro_batches), []
    dist.barrier(group)
    with Ledger() as ledger:
        for action in schedule.actions[rank]:
            step, work = (1, Stage.forward) if action.kind == "F" else (-1, backward)
            with ledger.phase(f"{action} stage {rank}"):
                arrived = received(stage.inputs[0], rank - step, group)
                out = work(stage, action.micro_batch, arrived)
                time.sleep(MS[action.kind] / 1e3)
            if 0 <= rank + step < group.size():
                leaving.append((send(out, group=group, group_dst=rank + step), out))
    wait_for(leaving)
    return stage.layers.grad, ledger.spans


# %% [markdown]
# Is it the same gradient? And as fast as the simulator says? The fastest of three runs counts.

# %%
def alone():
    layers = start.clone().requires_grad_()
    loss_of(through(layers, inputs), targets).backward()
    return layers.grad


# %% tags=["output-byhand"]
measured = {}
print("three ranks, four micro-batches   gradients off by    predicted    measured")
for make_schedule in (sequential, gpipe, one_forward_one_backward):
    schedule = make_schedule(3, 4)
    runs = [zip(*run(play, 3, schedule, watch=False), strict=True) for _ in range(3)]
    lines = [(measured_timeline(schedule, spans), grads) for grads, spans in runs]
    measured[schedule.name], grads = min(lines, key=lambda pair: pair[0].seconds)
    print(f"{schedule.name:33} {(torch.cat(grads) - alone()).abs().max():16.0e} "
          f"{simulate(schedule, MS).seconds:9.0f} ms {measured[schedule.name].seconds:8.0f} ms")

# %% [markdown]
# The gradients are the same, but for rounding. And it is never faster than the simulator says: a
# sleep lasts at least its time. What the last column has on top are sleeps that end late, the
# products, the messages, and waits for a processor core.

# %% tags=["figure-byhand"]
show(pipeline(simulate(sequential(3, 4), MS), measured["sequential"]), alt=(
    "Sequential on three real ranks, measured below the prediction: one rank works, two wait."
))

# %% [markdown]
# ### What is held: 1F1B
#
# By the simulator, the third one in the table takes as long as GPipe. Then what is it for? Look at
# `held`: a micro-batch is in there from its forward to its backward pass, with all its activations.
#
# **Predict.** GPipe with m micro-batches: how many does a rank hold at most? What would you change
# in its list?
#
# <details><summary>Answer</summary>
#
# All m: no backward pass begins before the last forward pass. But the first micro-batch could come
# back much earlier: as soon as the last stage has its output, it can turn round. Let a rank go
# forward with as many micro-batches as there are stages after it (**warm-up**), then in turns one
# forward, one backward (**steady**), then back with what is left (**cool-down**). This is **1F1B**.
# Rank r holds at most p - r, for any m.
#
# </details>

# %% tags=["figure-1f1b"]
draw(one_forward_one_backward(3, 4), (
    "1F1B: the same bubble as GPipe, but rank 0 never holds more than three micro-batches."
))

# %% tags=["output-held", "nbval-check-output"]
p = 4
print("       micro-batches held, by rank      bubble of total")
print("    m  GPipe           1F1B             GPipe   1F1B")
for m in (2, 4, 8, 32):
    schedules = [make_schedule(p, m) for make_schedule in (gpipe, one_forward_one_backward)]
    held = [" ".join(f"{count:2}" for count in peak_activations(s)) for s in schedules]
    bubbles = [simulate(s, MS).bubble_of_total for s in schedules]
    print(f"{m:5}  {held[0]:15} {held[1]:15} {bubbles[0]:6.0%} {bubbles[1]:6.0%}")

# %% [markdown]
# So 1F1B saves memory, not time. A smaller bubble comes with it by a detour: with GPipe, memory
# limits m; now it does not. (The GPipe paper recomputes, as in chapter 3: it keeps the *inputs* of
# m micro-batches and the activations of one, and pays with a second forward pass.)
#
# ### A smaller bubble: interleaving
#
# The bubble lasts p - 1 times a stage's forward and backward pass. Make the stages smaller! With v
# times as many stages a stage takes a v-th of the time. Each rank gets v of them: of eight stages
# on four ranks, rank 0 has stages 0 and 4.
#
# **Predict.** Why not stages 0 and 1, so that fewer messages cross?

# %%
p, m = 4, 8
HALF = {kind: duration / 2 for kind, duration in MS.items()}  # a stage of half the layers

# %% tags=["figure-interleaved"]
draw(interleaved(p, m, num_chunks=2), (
    "Interleaved 1F1B with two stages a rank, light and dark: filling and emptying takes half of "
    "the time, since a stage takes half of it."
), HALF)

# %% [markdown]
# <details><summary>Answer</summary>
#
# Then a micro-batch would need as long to the last rank as before: filling the pipeline takes what
# the ranks *before* the last have to do. It has to run round all ranks once with a part of their
# layers, so that the last rank has something to do early.
#
# </details>
#
# The price: a micro-batch runs round v times, so there are v times as many messages. Every rank
# keeps more. And micro-batches go in groups of p, so p must divide m.
#
# ### Half of the backward pass can wait: zero bubble
#
# A backward pass computes two things, with about as many FLOPs each. **I**: the gradients of the
# stage's input. **W**: those of its weights. The stage before waits for one of them. Which? And who
# waits for the other?
#
# <details><summary>Answer</summary>
#
# For I. Nobody waits for W but the optimizer, at the end of the step. So W can be deferred until
# a rank would be idle: it fills the bubble.
#
# </details>

# %% tags=["figure-zero"]
SPLIT = {"F": 20, "I": 20, "W": 20}
draw(zero_bubble(p, m), (
    "ZB-H1: the backward pass in two halves; weight gradients (pale) fill most of what was idle."
), SPLIT)

# %% tags=["output-four", "nbval-check-output"]
MAKERS = {"GPipe": (gpipe, MS), "1F1B": (one_forward_one_backward, MS),
          "interleaved, v = 2": (partial(interleaved, num_chunks=2), HALF),
          "ZB-H1": (zero_bubble, SPLIT)}
print("                     ms of      bubble                 held by")
print(f"p = {p}, m = {m}       a step    of total   of ideal   rank 0   rank {p - 1}")
for name, (make_schedule, durations) in MAKERS.items():
    schedule = make_schedule(p, m)
    line, v = simulate(schedule, durations), schedule.num_stages // p
    held = [count / v for count in peak_activations(schedule)]  # in 1/p of the layers
    print(f"{name:18} {line.seconds:7g} {line.bubble_of_total:11.0%} {line.bubble_of_ideal:10.0%} "
          f"{held[0]:8g} {held[-1]:8g}")

# %% [markdown]
# Two ways to pay for a smaller bubble: with messages and some memory, or with memory that 1F1B
# leaves unused on the later ranks.

# %% [markdown]
# ## 5. Traps
#
# ### Two ranks that wait for each other
#
# Two ranks, two micro-batches. Rank 0 is impatient and wants its first gradient before it goes on.
#
# **Predict.** Does this run?

# %%
F, B = partial(Action, "F"), partial(Action, "B")  # (micro-batch, stage)
impatient = Schedule("impatient", 2, (
    (F(0, 0), B(0, 0), F(1, 0), B(1, 0)),
    (F(0, 1), F(1, 1), B(0, 1), B(1, 1)),
))


def verdict(function, *args, **options):
    try:
        function(*args, **options)
        return "runs"
    except (ConfigError, RankError, AssertionError) as error:
        return "\n".join(textwrap.fill(line, 76, subsequent_indent="  ")
                         for line in str(error).splitlines())


# %% [markdown]
# The **validator** needs no rank to tell. It plays the lists, and finds who waits for whom:

# %% tags=["output-validator", "nbval-check-output"]
print(verdict(schedule_check.check, impatient))

# %% [markdown]
# And if nobody asks it? Then the ranks wait, with no error. When time is up, the **launcher** names
# them, and the call in which each of them waits; of the package's executor, the action as well.

# %% tags=["output-circle"]
print(verdict(run, play, 2, impatient, timeout=2))

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. Rank 0 wants B0, which rank 1 runs after F1, for which rank 0 has to send first.
#
# </details>
#
# ### The order of sends and receives
#
# In section 4, `play` sent with `isend`, which does not wait. Most people would write `send` first.
#
# **Predict.** Six micro-batches on three ranks, all lists valid. `send` returns when the other rank
# takes the message. Does GPipe run? Does 1F1B?

# %% tags=["output-order"]
for make_schedule in (gpipe, one_forward_one_backward):
    schedule = make_schedule(3, 6)
    schedule_check.check(schedule)
    print(f"{schedule.name}: {verdict(run, play, 3, schedule, dist.send, timeout=3)}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# GPipe runs: while all go forward, nobody sends back. In 1F1B's steady phase a rank has an
# activation for the next one, while the next one has a gradient for it. Both send, and nobody
# receives.
#
# </details>
#
# The schedule was right; the *messages* were in a circle. With `isend` on CPUs the trouble is over.
# On GPUs it is not: between two ranks, NCCL runs messages in the order in which they were posted. A
# receive ahead of its turn holds up the send behind it. Megatron-LM posts both in one batch
# (`batch_isend_irecv`) where it knows that they meet. The package does without knowing: it puts all
# actions of all ranks into *one* order, and every rank posts its messages in that order. Take the
# first message of that order that has not gone through. Both its ranks have done everything before
# it, so both post it, and it goes through. Then the next.
#
# ### The scale of the loss
#
# A micro-batch's loss is a mean over its tokens, as everywhere. The reported loss is their mean.
#
# **Predict.** Write `loss.backward()` for each. What is wrong, and by which factor? Does the loss
# curve show it?


# %%
def cut(model, group, make_schedule=one_forward_one_backward):
    """The package's pipeline alone, with what a step and the oracle ask."""
    return Grid(model, pipeline=apply_pipeline_parallel(model, group, make_schedule))


def sum_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# %%
def mean_of_each(model, group, weight):
    """Every micro-batch's own mean, times `weight(m)`; the reported loss is their mean."""
    parallel = cut(model, group)
    real = parallel.pipeline.run

    def run(micro_batches, sum_loss, divisor):
        m = len(micro_batches)  # and `real` divides by its divisor, so 1/weight multiplies
        loss = real(micro_batches, lambda *pair: sum_loss(*pair) / pair[1].numel(), 1 / weight(m))
        return loss / (m * weight(m))

    parallel.pipeline.run = run
    return parallel


# %%
RULES = {
    "sum / all tokens": cut,
    "mean of each": partial(mean_of_each, weight=lambda m: 1),
    "mean of each, / m": partial(mean_of_each, weight=lambda m: 1 / m),
}
config = ModelConfig("gpt", 29, 12, 2, 24, 4, 4, 96)
OPTIMIZERS = {"AdamW": partial(torch.optim.AdamW, lr=1e-2), "SGD": partial(torch.optim.SGD, lr=0.3)}


def counting_rows(step):
    """Token ids (8, 13): the next token is the last one plus 7."""
    first = torch.randint(29, (8, 1), generator=torch.Generator().manual_seed(step))
    return (first + 7 * torch.arange(13)) % 29


# %%
def train(group, apply, make_optimizer, num_steps=30, m=4):
    """The reported loss of each step."""
    model, losses = Transformer(config), []
    initialize(model, seed=0)
    parallel = apply(model, group)
    optimizer = make_optimizer(model.parameters())
    for rows in map(counting_rows, range(num_steps)):
        optimizer.zero_grad()
        parts = [(part[:, :-1], part[:, 1:]) for part in rows.tensor_split(m)]
        loss = parallel.pipeline.run(parts, sum_loss, rows[:, 1:].numel())
        parallel.finish()  # a tied embedding's gradient has a part on both stages
        losses.append(loss.item())
        optimizer.step()
    return losses


# %% tags=["output-trap"]
print("two ranks, four micro-batches        loss after step")
print("gradient of           optimizer      1     15     30")
for name, apply in RULES.items():
    for optimizer, make_optimizer in OPTIMIZERS.items():
        losses = run(train, 2, apply, make_optimizer, watch=False)[0]
        print(f"{name:21} {optimizer:9} "
              + " ".join(f"{losses[step]:6.2f}" for step in (0, 14, 29)))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The gradients add up over micro-batches, so they are m times too large. The reported loss was
# divided, so it is right. AdamW divides the scale of a gradient away, and its curve is as good as
# the right one. SGD takes steps that are m times too long.
#
# </details>
#
# This has been built. picotron's pipeline runs backward on each micro-batch's mean, and divides
# only what it logs (huggingface/picotron, `pipeline_parallel.py`). In torchtitan a pipeline's
# gradients were too large by the number of tokens (pytorch/torchtitan, issue 2972). Dividing by m
# repairs the first. Always? Ask the **oracle**, with two micro-batches:

# %%
gpt = partial(small_model, "gpt", num_layers=4)
llama = partial(small_model, "llama", num_layers=4)


def oracle(apply, num_ranks, make_model=gpt, m=2, batch_sizes=(4, 5, 4)):
    """The first line of what the oracle says."""
    try:
        assert_same_training(apply, num_ranks, make_model, m, batch_sizes)
        return "the same training"
    except AssertionError as error:
        return str(error).splitlines()[0]


# %% tags=["output-oracle-trap"]
for rows in ((2, 2), (3, 2)):
    for name, apply in RULES.items():
        print(f"{name}, micro-batches of {rows[0]} and {rows[1]} rows")
        print(f"  {oracle(apply, 2, batch_sizes=(sum(rows),) * 2)}")

# %% [markdown]
# The mean of means is right for equal micro-batches, and wrong for others: a token in a small one
# weighs more. Padding and masked targets make them unequal all the time.
#
# So the package wants three things from a step: all micro-batches, the loss *summed* over tokens,
# and what to divide by: `run(micro_batches, sum_loss, divisor)`.

# %% [markdown]
# ## 6. The real one
#
# The executor knows no schedule. It takes the list, and does what stands there. First, where do the
# messages go? Rank 1 of three, 1F1B:

# %% tags=["output-script", "nbval-check-output"]
def written(step):
    if not isinstance(step, Message):
        return f"{step}"
    return f"send {step.action}" if step.is_send else f"receive {step.action}"


print(*map(written, script(one_forward_one_backward(3, 3), 1)), sep=", ")

# %%
print(inspect.getsource(script))

# %% [markdown]
# `in_order` yields all actions of all ranks, each after what it needs. A receive is posted early
# and awaited where its action begins. Then the step:

# %%
print(inspect.getsource(ScheduleExecutor.run))
print(inspect.getsource(ScheduleExecutor.backward))

# %% [markdown]
# Compare with section 4: the same backward from the output, with the gradient that has arrived. But
# what is kept is an `edge`, the place in the graph where the output was made, and not the output
# itself. Its values are needed no more once they are sent, so their memory is free again: B S D
# values less for each micro-batch in flight (Korthikanti et al. 2022, appendix B).
#
# New is what happens for I: a list collects what is deferred. How can a backward pass leave out the
# weights? The linear layers have one of their own. While the list is open, `deferral.takes` puts
# their `second_half` there, and W calls `accumulate_all`:

# %%
print(inspect.getsource(LinearFunction.backward))
print(inspect.getsource(accumulate_all))

# %% [markdown]
# ### Which layers make a stage?
#
# A pipeline is as fast as its slowest stage, and it fits if its fullest stage does. Embedding and
# head belong to a stage, too. Llama 3.2 1B has 16 layers and a vocabulary of 128,256.
#
# **Predict.** Four stages: how many layers does each get?
#
# The head multiplies with every weight. The embedding is a lookup: it is held, and costs no time.
# The package can count either way.

# %%
with torch.device("meta"):  # no weights
    llama_1b = Transformer(cost.PUBLISHED["Llama 3.2 1B"])
blocks, embedding, head = count_parameters(llama_1b)

# %% tags=["output-split", "nbval-check-output"]
ways = {"equal numbers": [range(4)] * 4}
for count in (count_parameters, count_multiplications):
    costs, first, last = count(llama_1b)
    ways[count.__name__] = split_blocks(costs, 4, first, last)
print("                       layers of     the largest stage, in million parameters")
print("                       each stage     held   multiplied")
for name, ranges in ways.items():
    multiplied = [len(layers) * blocks[0] for layers in ranges]
    multiplied[-1] += head
    held = [multiplied[0] + embedding, *multiplied[1:]]
    print(f"{name:22} {list(map(len, ranges))!s:12} {max(held) / 1e6:6.0f} "
          f"{max(multiplied) / 1e6:12.0f}")

# %% [markdown]
# Equal numbers make the slowest stage. The fastest cut makes the fullest one. Unless told otherwise
# (`count=`), the package takes the middle line: it balances what is held.
#
# Llama 3.2 1B ties its embedding to its head, as GPT does. The first and the last stage then have a
# copy each, and each a summand of its gradient: one more message, at the end of the step. With data
# parallelism beside the pipeline, each stage sums its gradients with its like, once a step. The
# oracle:


# %%
def cut_and_copied(model, group):
    """Two pipelines of half of the ranks, and ZeRO-1 between them."""
    mesh = make_mesh("cpu", dp=2, pp=group.size() // 2)
    pipeline_parallel = apply_pipeline_parallel(model, mesh.group("pp"))
    data = apply_zero1(model, mesh.group("dp"), pipeline=pipeline_parallel)
    return Grid(model, data=data, pipeline=pipeline_parallel)


# %% tags=["output-oracle", "nbval-check-output"]
two_stages = partial(interleaved, num_chunks=2)
for model, schedule, make_model, num_ranks, apply, m in (
    ("GPT (tied)", "1F1B", gpt, 3, cut, 2),
    ("GPT (tied)", "ZB-H1", gpt, 4, partial(cut, make_schedule=zero_bubble), 3),
    ("Llama", "interleaved", llama, 2, partial(cut, make_schedule=two_stages), 4),
    ("Llama", "1F1B, ZeRO-1", llama, 4, cut_and_copied, 2),
):
    found = oracle(apply, num_ranks, make_model, m)
    print(f"ranks: {num_ranks}  {model:10}  {schedule:12}  {found}")

# %% [markdown]
# ### A schedule of your own
#
# A schedule is any function of p and m that returns lists. Here is one: in 1F1B a rank waits for
# every message there and back. Over slow links that is idle time. What if it went forward with
# twice as many micro-batches first?


# %%
def eager(p, m):
    """1F1B with a warm-up of twice the length."""
    lists = []
    for rank in range(p):
        forwards, backwards = [F(i, rank) for i in range(m)], [B(i, rank) for i in range(m)]
        lists.append(tuple(alternate(forwards, backwards, 2 * (p - 1 - rank))))
    return Schedule("eager 1F1B", m, tuple(lists))


# %% tags=["output-eager", "nbval-check-output"]
print("                 ms of a step, if a message takes     held by")
print("p = 4, m = 16        0 ms     10 ms     20 ms         rank 0")
for make_schedule in (one_forward_one_backward, eager):
    schedule = make_schedule(4, 16)
    schedule_check.check(schedule)
    times = [simulate(schedule, MS, transfer).seconds for transfer in (0, 10, 20)]
    print(f"{schedule.name:13} " + " ".join(f"{time:9,.0f}" for time in times)
          + f"{peak_activations(schedule)[0]:15}")

# %% [markdown]
# It hides the messages, and pays with memory. Does it train?

# %% tags=["output-own"]
apply = partial(cut, make_schedule=eager)
losses = run(train, 2, apply, OPTIMIZERS["AdamW"], watch=False)[0]
print(f"eager 1F1B on 3 ranks: {oracle(apply, 3, gpt, 4, (4, 4, 4))}")
print(f"loss on 2 ranks: {losses[0]:.2f} to {losses[-1]:.2f}")

# %% [markdown]
# ## 7. Measure
#
# ### Time
#
# Does the real executor take the time that the simulator predicts? A Transformer of eight small
# blocks on four ranks. Each block sleeps, forward, for I and for W, as if it were large. The
# duration of a stage is **emulated**; schedule, messages and autograd are real.


# %%
class Sleeping(torch.autograd.Function):
    """Let a block take `seconds` forward, as many for I and as many for W."""

    @staticmethod
    def forward(ctx, x, seconds, deferral):
        ctx.seconds, ctx.deferral = seconds, deferral
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, out_grad):
        time.sleep(ctx.seconds)
        weights = SimpleNamespace(start=list, accumulate=partial(time.sleep, ctx.seconds))
        ctx.deferral.takes(weights) or weights.accumulate()
        return out_grad, None, None


# %%
small, nap = ModelConfig("gpt", 64, 16, 8, 16, 4, 4, 64), 0.01  # seconds; a stage is two blocks


def micro_batches(m, shape):
    """m times one sequence: inputs and targets (1, S)."""
    size, generator = (m, 1, shape.max_sequence_length + 1), torch.Generator().manual_seed(0)
    rows = torch.randint(shape.vocab_size, size, generator=generator)
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def prepared(group, shape, make_schedule):
    model = Transformer(shape)
    initialize(model, seed=0)
    return model, apply_pipeline_parallel(model, group, make_schedule)


# %%
def sleeping_steps(group, make_schedule, m, num_steps=4):
    """This rank's spans in each step."""
    model, pipeline_parallel = prepared(group, small, make_schedule)
    for block in model.blocks:
        block.register_forward_hook(
            lambda block, _, out: Sleeping.apply(out, nap, pipeline_parallel.deferral))
    steps = []
    for _ in range(num_steps):
        dist.barrier(group)
        with Ledger() as ledger:
            pipeline_parallel.run(micro_batches(m, small), sum_loss, 16 * m)
        steps.append(ledger.spans)
    return steps


# %%
def timelines(name, p, m):
    """What the simulator predicts, and what was measured in the fastest step."""
    make_schedule, durations = MAKERS[name]
    schedule = make_schedule(p, m)
    steps = zip(*run(sleeping_steps, p, make_schedule, m, watch=False), strict=True)
    measured = [measured_timeline(schedule, spans_by_rank) for spans_by_rank in steps]
    return simulate(schedule, durations), min(measured, key=lambda line: line.seconds)


def real_durations(line):
    """The mean of what the actions of each kind took, in ms."""
    durations = {}
    for one in (one for lane in line.passes for one in lane):
        durations.setdefault(one.action.kind, []).append(one.end - one.start)
    return {kind: sum(times) / len(times) for kind, times in durations.items()}


# %% tags=["output-measured"]
lines = {name: timelines(name, p=4, m=8) for name in MAKERS}
print("p = 4, m = 8       ms of a step: predicted for               bubble of total")
print("                     the naps  real passes   measured    predicted   measured")
for name, (predicted, line) in lines.items():
    longer = simulate(MAKERS[name][0](4, 8), real_durations(line))
    print(f"{name:18} {predicted.seconds:10.0f} {longer.seconds:12.0f} {line.seconds:10.0f} "
          f"{predicted.bubble_of_total:11.0%} {line.bubble_of_total:10.0%}")

# %% tags=["figure-measured"]
show(pipeline(*lines["1F1B"]), alt=(
    "1F1B on four real ranks, below what the simulator predicts: the same passes in the same "
    f"order, in {lines['1F1B'][1].seconds:.0f} ms in place of {lines['1F1B'][0].seconds:.0f}."
))

# %% tags=["figure-measuredzero"]
show(pipeline(*lines["ZB-H1"]), alt=(
    "ZB-H1 on four real ranks: weight gradients run where 1F1B was idle."
))

# %% [markdown]
# The order is the prediction's. What comes on top has two parts. From the first column to the
# second: the simulator is told how long an action really took on the mean, for a sleep ends a
# little late, and the small blocks do compute. From the second to the third: messages, and actions
# that are slower than the mean just where others wait for them. Both grow where other programs
# share the cores.
#
# ### Memory
#
# **Predict.** Four ranks, eight micro-batches. How many micro-batches' activations does the meter
# find at the peak, on rank 0 and on rank 3, in each schedule?

# %%
shape = ModelConfig("gpt", 64, 32, 8, 64, 4, 4, 256, tied_embedding=False)
stage_bytes = 2 * cost.activation_bytes_per_layer(shape, 1, 32, bytes_per_value=4)


def metered(group, make_schedule, m):
    """Activation bytes of this rank at the peak, the bytes it has sent, in how many messages."""
    model, parallel = prepared(group, shape, make_schedule)
    with Ledger() as ledger, Meter(model) as meter:
        parallel.run(micro_batches(m, shape), sum_loss, 32 * m)
    peak = max(moment.bytes["activation"] for moment in meter.timeline)
    return peak, ledger.bytes_sent("send"), sum(call.op == "send" for call in ledger.calls)


# %% tags=["output-meter", "nbval-check-output"]
m, results = 8, {}
print("micro-batches held,      by the meter                by the list")
print("in stages                rank 0  1     2     3       rank 0  1     2     3")
for name, (make_schedule, _) in MAKERS.items():
    schedule = make_schedule(4, m)
    results[name] = run(metered, 4, make_schedule, m, watch=False)
    held = [peak / stage_bytes for peak, *_ in results[name]]
    counted = [count * 4 / schedule.num_stages for count in peak_activations(schedule)]
    print(f"{name:22} " + " ".join(f"{count:5.1f}" for count in held) + "     "
          + " ".join(f"{count:5.1f}" for count in counted))

# %% [markdown]
# <details><summary>Answer</summary>
#
# GPipe: all eight, everywhere. 1F1B: four on rank 0, one on rank 3. The meter finds more than that
# on rank 3: it holds the logits and the loss as well. On the later ranks ZB-H1 stays below its
# count: once I has run, only what W needs is left, inputs and output gradients of the linear
# layers.
#
# </details>

# %% tags=["figure-held"]
rows = {name: {"activation": results[name][0][0]} for name in MAKERS}
counts = {name: cost.activations_held(s.name, 4, m, 0, s.num_stages // 4) * 4 / s.num_stages
          for name, (make_schedule, _) in MAKERS.items() for s in [make_schedule(4, m)]}
predicted = {f"{name}, formula": {"activation": count * stage_bytes}
             for name, count in counts.items()}
show(memory_bars(rows, predicted), alt=(
    "Activations of rank 0 with eight micro-batches: 1F1B and ZB-H1 hold half of what GPipe holds, "
    "interleaving lies between."
))

# %% [markdown]
# ### Messages
#
# **Predict.** Rank 1 of four, eight micro-batches: how many messages does it send in 1F1B? With two
# stages a rank?

# %% tags=["output-messages", "nbval-check-output"]
for name in ("1F1B", "interleaved, v = 2", "ZB-H1"):
    print(f"{name:18} messages sent by each rank:", *(count for *_, count in results[name]))

# %% tags=["figure-wire"]
chosen = {"1F1B": 1, "interleaved, v = 2": 2, "ZB-H1": 1}
sent = {name: [size for _, size, _ in results[name]] for name in chosen}
ticks = {name: [cost.pipeline_volume(1, 32, shape.width, 4, 4, m, rank, v).sent
                for rank in range(4)] for name, v in chosen.items()}
show(wire(sent, ticks), alt=(
    "Bytes sent by each rank, equal to the formula: two stages a rank send twice as much, at the "
    "ends of the pipeline three times, and a split backward pass sends no more."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Rank 1 sends each micro-batch once forward, once back, B S D values each; with two stages, each of
# them twice. The first and the last rank have a neighbor on one side; when a micro-batch runs
# round, they have one on the other side too, but for the first time and the last.
#
# </details>
#
# ### On real GPUs: who crosses the nodes?
#
# GPT-3 on 1,024 H100s in nodes of eight: tensor parallelism over 8, pipeline over 8, data
# parallelism over 16. A step of 1,536 sequences, so each pipeline gets 96.
#
# **Predict.** Of the three, which sends most, and which should stay inside a node?

# %% tags=["output-traffic", "nbval-check-output"]
t, p, d = 8, 8, 16
m = 1536 // d
layers, sizes = gpt3.num_layers // p, (1, S, gpt3.width, 2)
tensor = m * layers * cost.tensor_parallel_volume(*sizes, 0, cost.Layout(t)).sent
stages = cost.pipeline_volume(*sizes, p, m, rank=1).sent
data = cost.ring_all_reduce_volume(P // (t * p), 2, d, 0).sent
print("a GPU sends in a step      GB   seconds over NVLink   over InfiniBand")
for name, size in (("tensor parallelism", tensor), ("pipeline", stages), ("data", data)):
    print(f"{name:20} {size / GB:8.1f} {size / H100.nvlink_bandwidth:21.2f} "
          f"{size / H100.nic_bandwidth:17.2f}")
flops = m * S * cost.training_flops_per_token(gpt3, S) / (t * p)
work = flops / (0.4 * H100.bf16_flops)
print(f"computing, at 40 % of the peak: {work:.1f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Per micro-batch, tensor parallelism sends 8 B S D (t-1)/t values for *every layer*, the pipeline 2
# B S D for every *stage*, however many layers it has. Tensor parallelism over InfiniBand would take
# as long as the computing. So it gets the links inside the node, and the pipeline crosses. The
# package numbers its ranks so: tp innermost, then dp, and pp outermost.
#
# </details>
#
# With sequence parallelism each of the eight ranks sends its own tokens alone: an eighth of it.
# Megatron-LM's scatter/gather gets the same without (Narayanan et al. 2021, section 4.1).
#
# ### Choose m and v under a memory limit
#
# Those 96 sequences can go as 96 micro-batches of one sequence, 48 of two, or 24 of four. Larger
# ones run faster per token, which is not in the table. What fits into 80 GB, and which share of a
# step is idle? Take all 16 bytes per parameter, without ZeRO; activations with sequence parallelism
# and selective recomputation; messages over InfiniBand.


# %%
def idle(schedule, b):
    """Share of a step that a GPU is idle, messages included, b sequences a micro-batch."""
    each = b * work / m / 3 / schedule.num_stages * p  # seconds of F of a stage; B takes twice that
    message = b * S * gpt3.width * 2 / t / H100.nic_bandwidth  # each of t ranks its own tokens
    durations = {"F": each, "B": 2 * each, "I": each, "W": each}
    return simulate(schedule, durations, message).bubble_of_total


def gigabytes(schedule, b):
    """Model states and activations of the first rank."""
    layer = cost.activation_bytes_per_layer(
        gpt3, b, S, attention="materialized", recompute="selective", layout=cost.Layout(t, True))
    held = peak_activations(schedule)[0] * gpt3.num_layers / schedule.num_stages
    return (held * layer + P / (t * p) * recipe.total) / GB


# %% tags=["output-choose", "nbval-check-output"]
options = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "ZB-H1": zero_bubble} | {
    f"interleaved, v = {v}": partial(interleaved, num_chunks=v) for v in (2, 6, 12)}
print("                     b = 1, m = 96       b = 2, m = 48       b = 4, m = 24")
for name, make_schedule in options.items():
    cells = []
    for b in (1, 2, 4):
        schedule = make_schedule(p, m // b)
        size = gigabytes(schedule, b)
        cells.append(f"{idle(schedule, b):6.1%} {size:4.0f} GB {'' if size < 80 else 'no':2}")
    print(f"{name:20}" + "    ".join(cells))

# %% [markdown]
# GPipe fits nowhere. Among the others it is a choice: interleaving reaches the smallest bubble, and
# the more stages a rank has, the less it holds beyond 1F1B: the factor is 1 + (p-1)/(pv)
# (Korthikanti et al. 2022, section 4.2.3).
#
# By the table one would take b = 1 and v = 12, twelve times the messages included. Distrust it
# there. The simulator lets messages run beside the computing, and gives small products full speed.
# The kernels of one layer and one sequence do not reach it, and larger micro-batches run faster per
# token. So measure around the best lines.
#
# ZeRO 1 over the 16 copies of each stage would leave more room. In a run of the package all this is
# `--parallel.pp 8 --parallel.schedule interleaved --parallel.chunks 6`; at the start `minitron
# train` prints one line with the share of the time that the ranks will be idle.
#
# To close, the picture of a pipeline of eight stages, with 16 micro-batches.

# %% tags=["figure-large"]
line = simulate(one_forward_one_backward(8, 16), MS)
show(pipeline(line), alt=(
    "1F1B with eight stages and 16 micro-batches: warm-up, steady phase and cool-down, "
    f"{line.bubble_of_total:.0%} idle."
))

# %% tags=["figure-explorer"]
schedule_explorer()

# %% [markdown]
# ## 8. Recap
#
# 1. A stage needs its input and the gradient of its output. With m micro-batches p stages work
#    m/(m + p - 1) of the time: a quarter for one micro-batch on four, 91 % for 32.
# 2. A schedule is a list. GPipe and 1F1B have the same bubble; GPipe holds m micro-batches, 1F1B at
#    most as many as there are stages from a rank to the end.
# 3. v stages a rank make the bubble v times smaller and the messages v times more. Nobody waits for
#    weight gradients, so they can fill it.
# 4. A valid schedule can still hang if messages are awaited in a circle: post them in one order of
#    all ranks.
# 5. Losses are summed and divided by the tokens of the whole batch. Means add up to m times the
#    gradient, and AdamW hides it.
#
# ## Exercises
#
# Write your answers into `exercises/ch09_pipeline_parallel.py`, save, and run the cell. In a
# terminal, `minitron hint 9.1` gives hints in three steps.
#
# **9.1 Schedules** (20 minutes): GPipe and 1F1B as lists of actions.

# %%
check("9.1")

# %% [markdown]
# **9.2 Bubble and memory** (20 minutes): what a schedule costs, as formulas.

# %%
check("9.2")

# %% [markdown]
# **9.3 The cut** (25 minutes): which layers on which stage, with embedding and head.

# %%
check("9.3")

# %% [markdown]
# **9.4 Run a stage** (30 minutes): any schedule, on real ranks, with the right loss.

# %%
check("9.4")

# %% [markdown]
# ## Further reading
#
# - Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*,
#   2019: section 2.3 (bubble and memory).
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, 2021: section 2.2 (1F1B with a flush, interleaving), 3.2 (the traffic).
# - Qi et al., *Zero Bubble Pipeline Parallelism*, 2023: section 2, table 2.
# - Harlap et al., *PipeDream: Fast and Efficient Pipeline Parallel DNN Training*, 2018: 1F1B that
#   never empties the pipeline, at the price of older weights.
