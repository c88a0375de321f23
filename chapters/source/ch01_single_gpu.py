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
# # 1. One device: what a training step does
#
# **50 minutes, and 75 for the exercises. No GPU. [Exercises 1.1](exercise:1.1) to 1.4.**
#
# *You need:* to have trained a model in PyTorch, and to know what a loss and a gradient are.
#
# *You will be able to:*
# - **predict** how long a training step takes from the model's shape, the device's peak FLOP/s and
#   a measured share of it;
# - **choose** a batch size in tokens by measuring how noisy the gradient is;
# - **accumulate** a large batch from micro-batches that fit in memory, without changing the
#   training.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you run the next cell or open the answer.

# %%
import dataclasses
import math
import re
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.nn.functional as F

from minitron import cost
from minitron.config import ModelConfig
from minitron.corpus.folder import load_tokenizer
from minitron.corpus.stories import grammatical_share, write_stories
from minitron.corpus.story_grammar import VOCABULARY
from minitron.dataset import TokenDataset
from minitron.measure.clock import DENSE_BF16_PEAKS, Clock, peak_flops
from minitron.plan.hardware import DEVICES
from minitron.step import accumulate_gradients, forward_backward, learning_rate, train_step
from teaching.check import check
from teaching.claims import claim
from teaching.figures import Block, curves, loss_curve, scaling, show, timeline
from teaching.lab import recorded, show_source, show_text
from teaching.lab.ch01 import (
    batch_variances, continue_story, copy_bandwidth, counted_and_timed, eager_and_compiled,
    losses_by_kind, new_model, operator_times, relu_of_scaled, roof_line, roofline,
    sequence_gradients, step_operators, tokens_per_second, train_story_model,
)

torch.set_num_threads(1)  # one thread: steadier timings, and losses that this machine repeats
cpu = torch.device("cpu")

# %% [markdown]
# ## 1. The question
#
# Llama 3 8B was trained on 15 trillion tokens, according to its [model
# card](https://huggingface.co/meta-llama/Meta-Llama-3-8B). Suppose you have one H100 and keep it
# busy at 40 % of its peak, which is good. How long does the training take? Guess the unit first:
# weeks, months, or years?

# %% tags=["nbval-check-output", "output-question"]
llama_8b = ModelConfig(
    vocab_size=128_256, num_layers=32, width=4096, num_heads=32,
    num_kv_heads=8,  # heads of the keys and values: each serves four heads of the queries
    ffn_width=14_336, max_sequence_length=8192, tied_embedding=False,
)
tokens = 15e12
flops = tokens * cost.training_flops_per_token(llama_8b, sequence_length=8192)
peak = DENSE_BF16_PEAKS["H100"]

print(f"{cost.num_parameters(llama_8b):,} parameters, {flops:.2g} FLOPs")
print(f"one H100 at 40 % of {peak / 1e12:.0f} TFLOP/s: "
      f"{flops / (0.40 * peak) / 3600 / 24 / 365:.0f} years")

# %% [markdown]
# The rest of the course splits those years across thousands of GPUs. What it splits is always the
# training step. This chapter takes one step apart on a single device, with a model small enough for
# your laptop. Where does its time go (sections 2 and 3)? How many tokens should it process, and
# what if they do not fit in memory (4 to 6)? How close does it come to the device's limit (7)? The
# Further sections ask what keeps it below the limit, what a compiler can do about that, and how
# close this package comes on a GPU.

# %% [markdown]
# ## 2. Estimate
#
# Nearly all of a Transformer's arithmetic is in its matmuls. Multiplying one token's activations by
# a weight matrix of $n$ values costs $2n$ [FLOPs](word:model-flops), because each value takes one
# multiplication and one addition.
#
# **Predict.** The forward pass uses each weight matrix once. How many matmuls of the same size does
# the backward pass need for it? How many forward passes' worth of FLOPs is a whole step?
#
# <details><summary>Answer</summary>
#
# For $Y = XW^T$ the backward pass computes two matmuls of the same size: the gradient of the input,
# $dX = dY\,W$, which the layer below is waiting for, and the gradient of the weight, $dW = dY^T X$,
# which the optimizer is waiting for. So the backward pass costs two forward passes and the step
# costs three. A model with $P$ parameters needs about $2P$ FLOPs per token for the forward pass; a
# step needs about $6P$ per token.
#
# </details>

# %% tags=["nbval-check-output"]
S = 64  # tokens per sequence
config = ModelConfig(
    family="gpt",  # GPT-2's layers; section 1's model has Llama's, the default
    vocab_size=len(VOCABULARY), num_layers=2, width=64, num_heads=4, num_kv_heads=4,
    ffn_width=256, max_sequence_length=S,
)
P = cost.num_parameters(config)
forward = cost.forward_flops_per_token(config, S)
training = cost.training_flops_per_token(config, S)
print(f"{P:,} parameters")
print(f"forward  {forward:8,} FLOPs per token")
print(f"training {training:8,} FLOPs per token, {training / forward:.0f} forward passes")
print(f"6 P      {6 * P:8,}")
print(f"attention: {config.num_layers * 4 * S * config.width / forward:.0%} of the forward pass; "
      f"as much as its layers' weights at S = {6 * config.width}")

# %% [markdown]
# The $6P$ rule comes close but is not exact. It charges for position embeddings, norms, and biases
# (and for the token embedding, where the output projection has a matrix of its own), which cost
# almost nothing, and it misses attention's two matmuls (queries times keys, and scores times
# values), which have no weights. [`minitron.cost`](code:minitron.cost.compute) counts matmul by
# matmul.
#
# When does missing attention matter? A GPT layer of width $D$ has about $12 D^2$ weights, so its
# forward pass takes $24 D^2$ FLOPs per token. Attention over $S$ tokens adds $4SD$, which is as
# much at $S = 6D$: a short sequence for a narrow model, a long one for a wide model.
#
# The training text comes from a small grammar that writes stories; generating it takes a second. We
# use it because every story refers back to its people and things, and because its
# [entropy](word:entropy-floor), the lowest loss that any model can reach, is known.

# %% tags=["nbval-check-output"]
workspace = tempfile.TemporaryDirectory()
folder = Path(workspace.name) / "stories"
facts = write_stories(folder, num_tokens=1_000_000)
data = TokenDataset(folder, "train", S, seed=0)
tokenizer = load_tokenizer(folder)

batch = data.batch(position=0, batch_size=16)  # (B, S + 1)
inputs, targets = batch[:, :-1], batch[:, 1:]
print(f"{tuple(batch.shape)}: {targets.numel():,} tokens to predict")
story = tokenizer.decode(batch[0].tolist(), skip_special_tokens=False)
print(story[:75] + "\n" + story[75:150] + " ...")

# %% [markdown]
# We count work in tokens, not sequences: 16 sequences with 64 targets each are a batch of 1,024
# tokens. Each row holds 65 tokens, because the target of a position is the token after it.

# %% [markdown]
# ## 3. One step, by hand
#
# The estimate says how many FLOPs a step takes; now we measure its time. A step is three calls:
# forward, backward, optimizer. We read the clock between them.

# %%
model, optimizer = new_model(config)


def step_by_hand(x=inputs, y=targets):
    times = [time.perf_counter()]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    return [1000 * (end - start) for start, end in zip(times, times[1:], strict=False)]


# %% [markdown]
# To predict the time we need one more number, the peak. A GPU's is in its datasheet. For your CPU,
# or rather one thread of it in float32, we take the fastest run of a large square matmul:

# %%
cpu_peak = peak_flops(cpu, torch.float32).flops
step_flops = targets.numel() * training
print(f"{targets.numel():,} tokens x {training:,} FLOPs per token = {step_flops / 1e9:.3f} GFLOPs")
print(f"peak of one thread: {cpu_peak / 1e9:.0f} GFLOP/s")

# %% [markdown]
# **Predict.** How many milliseconds would the step take at the peak? And at 40 % of it, the share
# that section 1 assumed? AdamW performs about a dozen operations per *parameter*, however many
# tokens there are. Will the optimizer be a large or a small part of this step? And with a batch of
# one sequence?
#
# <details><summary>Answer</summary>
#
# At the peak, the step's GFLOPs divided by the peak's GFLOP/s; at 40 %, two and a half times that.
# The next cell prints the share that the step really reaches. With this many tokens the optimizer
# is a small part. Its FLOPs would make it 0.2 %, a dozen per parameter against 6 x 1,024 in the two
# passes. Expect a larger share: for that dozen AdamW reads four numbers and writes three, and
# starting each operation takes time too; neither counts as a FLOP. With one sequence instead of 16,
# forward and backward shrink while the optimizer stays the same, so its share grows. The second
# cell below measures that.
#
# </details>

# %% tags=["figure-timeline"]
runs = [step_by_hand() for _ in range(40)][10:]
forward_ms, backward_ms, optimizer_ms = (median(run[i] for run in runs) for i in range(3))
for name, times in zip(("forward", "backward", "optimizer"), zip(*runs, strict=True), strict=True):
    low, middle, high = quantiles(times, n=4)
    print(f"{name:9} {middle:6.2f} ms (half of {len(runs)} steps: {low:.2f} to {high:.2f})")
turn, update = forward_ms + backward_ms, forward_ms + backward_ms + optimizer_ms
ideal = 1000 * step_flops / cpu_peak
print(f"step      {update:6.2f} ms, at the peak {ideal:.2f} ms: it reaches {ideal / update:.0%}")
predicted = [Block("forward", 0, ideal / 3), Block("backward", ideal / 3, ideal)]
measured = [Block("forward", 0, forward_ms), Block("backward", forward_ms, turn),
            Block("optimizer", turn, update)]
show(timeline({"measured": measured}, {"at the peak": predicted}), alt=claim(
    optimizer_ms < forward_ms < backward_ms, f"Backward takes {backward_ms / forward_ms:.1f} times "
    f"as long as forward, where FLOPs predict 2; the optimizer takes {optimizer_ms / update:.0%} "
    f"of the step. Medians of {len(runs)} steps."))

# %%
small = [step_by_hand(inputs[:1], targets[:1]) for _ in range(40)][10:]
parts = [median(run[i] for run in small) for i in range(3)]
print(claim(parts[2] / sum(parts) > optimizer_ms / update, f"one sequence: {sum(parts):.2f} ms, "
            f"of which the optimizer {parts[2] / sum(parts):.0%}"))

# %% [markdown]
# The dashed bars are the step's FLOPs at the peak, a third of them forward and two thirds backward.
# The solid bars were measured. Where does the rest of the time go? `operator_times` puts a clock
# around every operator:

# %%
spent = operator_times(step_by_hand)
scale = update / sum(spent.values())  # to the step's time without that clock
for kind, milliseconds in spent.items():
    share = milliseconds * scale
    print(f"{kind:18}{share / update:5.0%}, {share:5.1f} ms of the {update:.1f} ms")

# %% [markdown]
# Matmuls and attention perform all the FLOPs that we counted. In our run even these take longer
# than they would at the peak: matmuls this small run below it. The rest is what the count leaves
# out: GELU, which computes a tanh for every value and in our run takes about as long as all the
# other operators together (norms, loss, optimizer, and many small ones); and what happens between
# the operators, in autograd and Python. (The clock slows the step, mostly between operators. So the
# last share is too large, and the others are too small.)
#
# So a step's time is its FLOPs divided by the peak and by the *share* of the peak that such a step
# reaches. The share has to be measured, for each shape and batch size; section 7 gives it a name.

# %% [markdown]
# ## 4. How many tokens should a step have?
#
# The gradient of a batch is an estimate. What we want is $G$, the gradient over *all* text; what we
# have is the mean over $B$ sequences drawn at random. The variance of a mean of independent draws
# falls as $1/B$.
#
# Call the variance of the batch's gradient, summed over all weights, its *noise*, and $|G|^2$ the
# *signal*.
#
# **Predict.** Doubling the batch doubles the FLOPs of a step. When is that worth it: while the
# noise of the batch exceeds the signal, or once it is below?
#
# <details><summary>Answer</summary>
#
# While it exceeds the signal. As long as noise dominates, a batch twice as large lets you take a
# step about twice as long, so you need about half as many. Once the noise is well below the signal,
# the direction is already nearly right, and the second half of the batch adds little.
#
# </details>
#
# The two regimes meet at the **critical batch size** $B_c$, where noise equals signal. A step with
# a batch of $B$, at the learning rate that suits it, makes $1 / (1 + B_c/B)$ of the progress of one
# with an unlimited batch: half of it at $B = B_c$. $B_c$, computed from gradients alone as here, is
# the *simple noise scale* of [McCandlish et al. 2018](https://arxiv.org/abs/1812.06162), section
# 2.2. The formula is derived for SGD. It is only a rough guide for AdamW, whose critical batch can
# be larger ([Zhang et al. 2019](https://arxiv.org/abs/1907.04164)).
#
# To measure it, we compute the gradient of each of 512 held-out sequences separately and average
# them in groups of $B$. We do this early in training, after 50 steps. The mean of all 512 stands in
# for $G$. Its squared length is too large, on average by 1/512 of one sequence's noise, so we
# subtract that. One cell prints the critical batch, and the figure under it tests the $1/B$.

# %%
def noise_and_signal(gradients):
    """Variance of one sequence's gradient, and |G|^2 corrected for the noise left in the mean."""
    mean = gradients.mean(0)
    noise = gradients.var(0).sum()
    return float(noise), float(mean.square().sum() - noise / len(gradients))


# %% tags=["exhaustive"]
model, _ = train_story_model(config, data, num_steps=50)
validation = TokenDataset(folder, "val", S, seed=0)  # a seed: in random order
gradients = sequence_gradients(model, validation.batch(0, 512))
noise, signal = noise_and_signal(gradients)

sizes = [1, 2, 4, 8, 16, 32, 64]
variances = batch_variances(gradients, sizes)
print(f"signal |G|^2 = {signal:.3f}, noise of one sequence = {noise:.3f}")
print(f"critical batch: {noise / signal:.1f} sequences, {S * noise / signal:,.0f} tokens")

# %% tags=["figure-gradient-noise", "exhaustive"]
off = max(abs(v * b / noise - 1) for v, b in zip(variances, sizes, strict=True))
show(scaling(
    [S * size for size in sizes], variances, "batch size (tokens)", "variance of the gradient",
    predicted=[noise / size for size in sizes], predicted_label="1/B",
    limit=signal, limit_label="noise below the signal |G|²", limit_is_above=False,
), alt=claim(off < 0.2, "The variance of the gradient falls as 1/B: at every batch size it is "
             f"within {off:.0%} of the line."))

# %% [markdown]
# The dashed line is drawn from the leftmost point alone, the variance of a single sequence; nothing
# forces the other points onto it. They enter the gray band where noise equals signal: that is the
# critical batch printed above.
#
# **Predict.** The file holds one story after another, and a story often runs over the end of a
# sequence. If you read the 512 sequences in *file order* instead of at random, will the variance of
# the batches' means come out above or below $1/B$?

# %% tags=["exhaustive"]
in_file_order = TokenDataset(folder, "val", S)  # no seed: as they stand in the file
neighbors = batch_variances(sequence_gradients(model, in_file_order.batch(0, 512)), sizes)
ratios = {name: [size * value / found[0] for size, value in zip(sizes, found, strict=True)][1:]
          for name, found in (("at random", variances), ("file order", neighbors))}
print("variance relative to 1/B, at B =" + "".join(f"{size:6}" for size in sizes[1:]))
for name, row in ratios.items():
    print(f"{name:>32}" + "".join(f"{ratio:6.2f}" for ratio in row))
show_text(claim(all(random < ordered for random, ordered in zip(*ratios.values(), strict=True)),
                "Read in file order, batches of every size have more noise."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Above: compare the two rows. The upper one is near 1 at every size, and its deviations are chance,
# most of all at the right, where only 8 batches are left. Neighboring sequences share a story, so
# their gradients resemble each other, and averaging two of them removes less noise than averaging
# two independent ones. A loader that reads in file order gives you a smaller effective batch than
# you pay for, by about a tenth here. That is why the training set above was opened with a seed:
# [`TokenDataset`](code:minitron.dataset.TokenDataset) then reads its sequences in random order.
#
# </details>
#
# The critical batch size is not a constant of the model; section 7 measures it again, later in
# training. A large one is what makes large-scale data parallelism possible: thousands of GPUs can
# share one step only if the step has enough tokens for all of them.

# %% [markdown]
# ## 5. Accumulate, and the trap
#
# A batch can be right for learning and too large for memory, because [activations](word:activation)
# grow with the number of tokens in flight. The remedy is [gradient
# accumulation](word:accumulation): cut the batch into [micro-batches](word:micro-batch), run
# forward and backward on each, and let `.grad` add up. PyTorch already adds into `.grad`, so all we
# choose is the number to divide the loss by.
#
# First by hand, in float64, so that "equal" can mean to 12 digits:

# %%
model = model.double()


def take_gradient():
    """All gradients of the model as one vector; the model's own are cleared."""
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


# %%
def mean_of_means(micro_batches):
    """Average each micro-batch's mean loss, and so its gradient."""
    total = 0.0
    for x, y in micro_batches:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


# %% tags=["nbval-check-output"]
def relative_difference(gradient, reference):
    return float((gradient - reference).norm() / reference.norm())


F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
one_batch = take_gradient()

mean_of_means(list(zip(inputs.split(4), targets.split(4), strict=True)))
difference = relative_difference(take_gradient(), one_batch)
print("4 micro-batches of 4 sequences equal 1 batch of 16:", difference < 1e-12)

# %% [markdown]
# The gradients agree, so the code is merged. Years later someone trains on texts of different
# lengths. Short ones are padded, and the target -100, which `cross_entropy` leaves out of its mean,
# marks the padding. Below, the last four sequences have 8 real tokens each and the others have 64.
#
# **Predict.** Compare one token of a short text with one token of a long text. How much more does
# it weigh in the gradient now?
#
# <details><summary>Answer</summary>
#
# 8 times as much. Every micro-batch gets the same weight, a quarter, and spreads it over its own
# tokens: 32 in the last micro-batch, 256 in each of the others. In one undivided batch all tokens
# would weigh the same.
#
# </details>
#
# First the weights, then what they do to the loss and to the gradient:

# %% tags=["nbval-check-output"]
padded = targets.clone()
padded[12:, 8:] = -100  # the last four texts end after 8 tokens
micro_batches = list(zip(inputs.split(4), padded.split(4), strict=True))

counts = [int((y != -100).sum()) for _, y in micro_batches]
for i, count in enumerate(counts):
    wrong, right = 1 / (len(counts) * count), 1 / sum(counts)
    print(f"micro-batch {i}: {count:3} tokens, each weighs {wrong / right:.2f} times its share")

# %% tags=["output-trap"]
loss = F.cross_entropy(model(inputs).flatten(0, 1), padded.flatten())
loss.backward()
one_batch = take_gradient()

wrong_loss = mean_of_means(micro_batches)
wrong_gradient = take_gradient()
print(f"loss: {loss.item():.3f} in one batch, {wrong_loss:.3f} as a mean of means")
print(f"gradient off by {relative_difference(wrong_gradient, one_batch):.0%} of its length")

# %% [markdown]
# Nobody would stop a run over that difference in the loss, yet the gradient is far off. To catch
# the bug, compare with the undivided batch: the loss, or better the gradient. Splitting into
# micro-batches has changed *what* is trained: a token of a short text now counts more than one of a
# long text.
#
# This is a real bug. Until October 2024 the Hugging Face Trainer averaged the means of its
# micro-batches, so changing the number of accumulation steps changed the model that came out
# ([huggingface/transformers, pull request
# 34191](https://github.com/huggingface/transformers/pull/34191)). The same mistake can occur
# wherever means are averaged, for example across GPUs.

# %% [markdown]
# ## 6. The real one
#
# [Exercise 1.1](exercise:1.1) asks you to write the correct function. To find it by yourself, do
# the exercise now: the next cell shows the package's own. Find the divisor.

# %%
show_source(accumulate_gradients, forward_backward)

# %% [markdown]
# `divisor` counts the targets of *all* micro-batches before the first one runs. Each micro-batch
# then contributes the *sum* of its losses divided by that one number. `backward()` frees a
# micro-batch's activations before the next one starts; without that, accumulation would save no
# memory.
#
# Is it the same gradient as that of the undivided batch? Yes, to 12 digits:

# %% tags=["nbval-check-output"]
cuts = {"[16]": [16], "4 x [4]": [4] * 4, "[13, 2, 1]": [13, 2, 1], "16 x [1]": [1] * 16}
for name, cut in cuts.items():
    accumulate_gradients(model, list(zip(inputs.split(cut), padded.split(cut), strict=True)))
    difference = relative_difference(take_gradient(), one_batch)
    print(f"micro-batches of {name:10}: same gradient: {difference < 1e-12}")

# %% [markdown]
# The whole step is [`train_step`](code:minitron.step.train_step): accumulate the gradient, clip it,
# set the learning rate, update. Its docstring speaks of [ranks](word:rank), the processes of a
# parallel run; here there is one, and `accumulate_over_ranks` does what `accumulate_gradients`
# does.

# %%
show_source(train_step)

# %% [markdown]
# `clip_norm` scales the gradient down if its norm is larger. `parallel` and `loss_scale` belong to
# chapters [4](chapter:4) and [10](chapter:10); their defaults do nothing. That leaves `rate`. AdamW
# divides a running mean of the gradient by a running estimate of the gradient's magnitude, so each
# update moves a weight by up to about the learning rate, however small its gradient is. In the very
# first step both rest on one and the same gradient, so every weight moves by about the full rate.
#
# Three runs share a peak rate of 0.02, twice that of the chapter's other runs to make differences
# easy to see. They warm up over 0, 10, and 50 steps; we stop them after 100 of the 600 steps over
# which their rate would fall. A longer warm-up also lowers the *mean* rate, so a fourth run is the
# control: no warm-up, but a lower peak, which gives it the same mean rate as the run with 50 steps.
# We repeat all four with the training set in another random order, to see how far chance moves a
# loss. (Losses are in [nats](word:nat).)
#
# **Predict.** Put the first three runs in order of their loss after 100 steps. Where would the
# control end if only the mean rate mattered, and where if only the warm-up did?

# %% tags=["figure-warmup", "exhaustive"]
warmed, last = {}, {}
orders = {seed: TokenDataset(folder, "train", S, seed=seed) for seed in (0, 1, 2)}
print("                        mean rate   loss of the last 10 steps, in two orders")
for peak_rate, warmup_steps in ((0.02, 0), (0.02, 10), (0.02, 50), (0.0153, 0)):
    name = f"warm-up {warmup_steps}" + ", lower peak" * (peak_rate < 0.02)
    pair = [train_story_model(config, orders[i], 100, peak_rate, warmup_steps)[1] for i in (0, 1)]
    warmed[name], last[name] = pair[0], [sum(losses[-10:]) / 10 for losses in pair]
    rates = [learning_rate(i, peak_rate, peak_rate / 10, warmup_steps, 600) for i in range(100)]
    print(f"{name:23} {sum(rates) / 100:9.4f} {last[name][0]:10.2f} {last[name][1]:10.2f}")
show(curves(range(1, 101), warmed, "step", "loss (nats per token)"), alt=claim(
    all(a > b > c and abs(d - a) < abs(d - c) for a, b, c, d in zip(*last.values(), strict=True)),
    "In both orders, a longer warm-up ends with a lower loss, and the run with the lower peak ends "
    "nearer to the one without a warm-up. The figure shows the first order."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# In our runs, in both orders, the longer the warm-up, the lower the loss. If only the mean rate
# mattered, the control would end beside the run with 50 steps of warm-up; if only the warm-up did,
# beside the run without any. It ends near the latter, below it in one order and above it in the
# other. So the mean rate does not explain the gap; *when* the rate is high does. The figure, which
# shows the first order, suggests when that is decided: the run without a warm-up falls behind
# within the first dozen steps. The usual explanation is that AdamW's two averages then rest on a
# handful of batches while the updates are full-sized already, and a few of those in a poorly known
# direction move the weights to a region from which descent is slow. These runs do not test that
# part.
#
# </details>
#
# After the warm-up the rate decays along half a cosine. The chapter's other runs use this schedule:

# %% tags=["figure-schedule"]
steps = range(600)
rates = [learning_rate(step, 0.01, 0.001, warmup_steps=50, total_steps=600) for step in steps]
show(curves(steps, {"rate": rates}, "step", "learning rate"), alt=(
    "The learning rate climbs linearly to its peak and then decays along half a cosine."
))

# %% [markdown]
# The rate climbs for 50 steps and then decays to a tenth: large updates while there is far to go,
# small ones at the end, so that more steps average out the noise that section 4 measured.
#
# ## 7. Measure
#
# ### How close to the limit?
#
# Tokens per second say how fast a run is, but not how much faster it could be. **Model FLOPs
# utilization** ([MFU](word:mfu)) compares it with what the device could do ([Chowdhery et al.
# 2022](https://arxiv.org/abs/2204.02311), appendix B):
#
# $$ \mathrm{MFU} = \frac{\text{tokens/s} \times \text{FLOPs per token}}{\text{peak FLOP/s}} $$
#
# The numerator counts the FLOPs that the *model* needs, so computing something twice does not raise
# it. Attention counts as the full square, although the causal mask makes half of it unnecessary;
# papers differ here, and at long sequences the convention alone moves an MFU by several points.
#
# How does the MFU depend on the batch size? First we time the package's step at two sizes, one
# sequence and 16:

# %%
clock = Clock(training, peak_flops(cpu, torch.float32), cpu)
limit = clock.peak.flops / training  # tokens per second at an MFU of 100 %
pair = tokens_per_second(config, data, clock, sizes=(1, 16))
(few, short), (many, long) = ((n, 1000 * n / median(laps)) for n, laps in pair.items())
print(f"{few:5,} tokens: {short:5.2f} ms per step")
print(f"{many:5,} tokens: {long:5.2f} ms per step")

# %% [markdown]
# Sixteen times the tokens do not take sixteen times as long. Suppose that a step costs a fixed time
# $a$, whatever its size, plus a time $b$ for each token.
#
# **Predict.** What are $a$ and $b$, from the two times above? At how many tokens does the MFU then
# reach half of its best value?
#
# <details><summary>Answer</summary>
#
# The difference of the two times is what the additional tokens cost: divide it by their number to
# get $b$. Then $a$ is the shorter time minus $64\,b$. A step of $n$ tokens takes $a + bn$, so its
# speed is $n/(a + bn)$. With very many tokens that approaches $1/b$, and it is half of that where
# both parts of the time are equal, at $n = a/b$. The next cell prints these numbers.
#
# </details>

# %%
per_token_ms = (long - short) / (many - few)
fixed_ms = short - few * per_token_ms
print(f"fixed: {fixed_ms:.2f} ms a step; {1000 * per_token_ms:.1f} us more for each token")
print(f"best MFU: {1000 / per_token_ms / limit:.0%}; half of it at {fixed_ms / per_token_ms:.0f} "
      "tokens")

# %% [markdown]
# Now the test: seven sizes, of which the prediction has seen two. In brackets, the slowest and the
# fastest step.

# %% tags=["figure-throughput"]
speeds = tokens_per_second(config, data, clock, sizes=(1, 2, 4, 8, 16, 32, 64))
foreseen = {n: 1000 * n / (fixed_ms + n * per_token_ms) for n in speeds}
for n, laps in speeds.items():
    speed, low, high = (f(laps) / limit for f in (median, min, max))
    print(f"{n:5,} tokens: MFU {speed:5.1%} ({low:.1%} to {high:.1%} of {len(laps)} steps), "
          f"predicted {foreseen[n] / limit:5.1%}")
middle = {n: median(laps) for n, laps in speeds.items()}
off = max(abs(foreseen[n] / middle[n] - 1) for n in speeds if n not in pair)
most, least = max(middle.values()), middle[few]
show(scaling(list(speeds), list(middle.values()), "batch size (tokens)", "tokens/s",
             list(foreseen.values()), "predicted", limit, "100 % MFU: the fastest matmul here"),
     alt=claim(most > 1.2 * least, f"The throughput grows up to {most / least:.1f} times; at the "
               f"five sizes it has not seen, the prediction is at most {off:.0%} off."))

# %% [markdown]
# The fixed part is what every step pays however few tokens it has. The optimizer's pass over all
# parameters belongs to it (section 3 printed its share of a step of one sequence), and so do
# clipping and the start of each operator, which we have not measured. With many tokens this part
# hardly matters, and a ceiling remains below the peak, for section 3's reasons: part of each step
# is not matmuls, and small matmuls run below the peak. (The row of 1,024 tokens repeats section 3's
# step; `train_step` also clips. The two shares differ in our runs, too; we have not found out why.)
#
# So two things favor a larger batch: the device runs it more efficiently, and up to about the
# critical batch, less noise is worth its cost. Memory limits the batch. Accumulation lifts that
# limit for the noise, but hardly for efficiency: the micro-batches share only the optimizer's pass
# and the clipping; the rest depends on the tokens in one *micro-batch*.

# %% [markdown]
# ### Train, and watch the loss
#
# Now a whole run of 600 steps with the package's step. Names, places, things, and their adjectives
# are *copyable* words if they occurred earlier in the same story, within the 64 tokens that the
# model sees; every other word has to be known or guessed. We record the loss on both kinds.
#
# **Predict.** Sketch both losses over the 600 steps. Do the two lines cross?

# %% tags=["exhaustive"]
held_out = validation.batch(0, 64)
end = tokenizer.token_to_id("<end>")
by_kind, written = {}, {}


def watch(step, model):
    by_kind[step] = losses_by_kind(model, held_out, end)  # all words, copyable ones, all others
    if step in (50, 150, 600):
        written[step] = continue_story(model, tokenizer)


model, losses = train_story_model(config, data, 600, watch=watch)
rows = [{"step": i, "tokens": i * 16 * S, "loss": loss} for i, loss in enumerate(losses, start=1)]
rows += [{"step": step, "val_loss": losses[0]} for step, losses in by_kind.items()]

# %% tags=["figure-loss", "exhaustive"]
floor = facts["entropy_in_window"][str(S)]
first, level, again = (by_kind[i][0] / by_kind[i + 75][0] for i in (25, 100, 175))
show(loss_curve(rows, floor), alt=claim(
    level < 1.2 < min(first, again), "The loss falls, levels off, and falls again, to "
    f"{by_kind[600][0]:.2f} nats on held-out text; the entropy of the text is {floor:.2f}."))

# %% [markdown]
# The dashed line is the entropy of the text as seen through windows of 64 tokens; no model of any
# size gets below it on average. In our run the curve has a shoulder between about 100 k and 180 k
# tokens, which is steps 100 to 175, and then falls again. What was learned in the second fall?
#
# The next figure has one line for each kind of word. The grammar has 10 adjectives and 10 things
# (and 8 names and 8 places), so the dashed line at ln 10 is the loss of a guess among 10. Below the
# figure is what the model writes at three points of the run.

# %% tags=["figure-copying", "exhaustive"]
steps = list(by_kind)
lines = {
    "copyable words": [by_kind[step][1] for step in steps],
    "all other words": [by_kind[step][2] for step in steps],
}
guess = {"a guess among 10": [math.log(10)] * len(steps)}
copied, others = by_kind[600][1:]
show(curves(steps, lines, "step", "loss (nats per token)", predicted=guess), alt=claim(
    by_kind[100][1] > math.log(10) and copied < others,
    f"At step 100 the loss on copyable words is {by_kind[100][1]:.2f} nats, and a guess among 10 "
    f"costs {math.log(10):.2f}; at step 600 it is {copied:.2f}, and {others:.2f} on other words."))

# %% tags=["exhaustive"]
for step, text in written.items():
    sentences, _ = grammatical_share(text)
    print(f"step {step}: {sentences:.0%} of the sentences are grammatical")
    print(f"  {text[:74]}\n  {text[74:146]} ...\n")

# %% [markdown]
# At step 150, on the shoulder, many sentences are correct, but the story is not: people and things
# change from one sentence to the next. The figure above suggests why. The other words are learned
# first, while the loss on copyable words stays a little above the dashed line. So the model mostly
# knows *which kind* of word comes next, but guesses within that kind, although the right word
# stands a few words back. In the second fall the copyable words are learned, and in our run they
# end below the others. The average loss shows that something happened; splitting it by kind of word
# shows what.
#
# Large models go through a similar fall when an *induction head* forms from two attention layers:
# one records at each position which token came before, and the other looks for an earlier position
# whose recorded token is the current one, and copies from there ([Olsson et al.
# 2022](https://arxiv.org/abs/2209.11895)).
#
# Is that what happened here? If so, a model with a single layer should fail to copy. We train one
# on the same batches. (It is also smaller: if it fails, that may be the reason instead.)

# %% tags=["exhaustive"]
def loss_on_copies(num_layers, order):
    """The loss on copyable words over the steps of a run."""
    found, other = [], dataclasses.replace(config, num_layers=num_layers)
    train_story_model(other, order, 600, watch=lambda step, model: found.append(
        losses_by_kind(model, held_out, end)[1]))
    return found


layers = {"2 layers": [by_kind[step][1] for step in steps]}
layers["1 layer, order 1"] = loss_on_copies(1, orders[0])
for name, line in layers.items():
    print(f"{name:16} loss on copyable words after 600 steps: {line[-1]:.2f} nats")

# %% [markdown]
# In our run the model with one layer is far behind, which looks like proof. But it is one run
# against one run. The next cell trains the same one-layer model twice more, with nothing changed
# but the random order of the training set.
#
# **Predict.** How far apart will its three losses end? Will any of them reach that of two layers?

# %% tags=["figure-layers", "exhaustive"]
layers |= {f"1 layer, order {i}": loss_on_copies(1, orders[i - 1]) for i in (2, 3)}
two, *ones = (line[-1] for line in layers.values())
show(curves(steps, layers, "step", "loss on copyable words (nats)", predicted=guess), alt=claim(
    ones[0] > 2 * two and min(ones) < 1.1 * two,
    f"The three runs with one layer end between {min(ones):.2f} and {max(ones):.2f} nats, the one "
    f"with two layers at {two:.2f}: one layer can copy, so depth is not needed here."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# In our runs they end far apart, and one of them does as well as two layers. So a single layer
# *can* learn to copy these stories, and the first comparison showed an accident of the order.
# (Perhaps one layer is enough because a story has so few people and things that any earlier name is
# nearly always the right one; we have not tested that. If none of your three does as well, three
# more orders may.) Before you explain a difference between two runs, look at how far the same run
# differs from itself.
#
# </details>
#
# **Predict.** Section 4 measured the critical batch after 50 steps. Is it larger or smaller now?

# %% tags=["output-critical", "exhaustive"]
late_gradients = sequence_gradients(model, validation.batch(0, 512))
late_noise, late_signal = noise_and_signal(late_gradients)
print("                      50 steps    600 steps")
print(f"noise of a sequence  {noise:9.3f} {late_noise:12.3f}")
print(f"signal |G|^2         {signal:9.4f} {late_signal:12.4f}")
critical, late_critical = S * noise / signal, S * late_noise / late_signal
print(f"critical batch       {critical:9,.0f} {late_critical:12,.0f} tokens")
for name, part in (("  from the first half", slice(256)), ("  from the second", slice(256, 512))):
    found = [S * a / b for a, b in (noise_and_signal(g[part]) for g in (gradients, late_gradients))]
    print(f"{name:21}{found[0]:9,.0f} {found[1]:12,.0f}")
gains = [(1 + c / (16 * S)) / (1 + c / (32 * S)) for c in (critical, late_critical)]
print(f"progress, if doubled {gains[0]:9.2f} {gains[1]:12.2f} times")
show_text(claim(critical < 16 * S < late_critical,
                "The critical batch grew from below a step's tokens to above them."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Much larger: the signal has nearly vanished, while much of the noise is still there. One reason
# may be that early in training the sequences agree about what is wrong, and later the easy things
# have been learned. Another may be that the learning rate has fallen to a tenth, which lets the
# weights settle where $G$ is small. This run does not separate the two. The estimates from each
# half of the 512 sequences show, by how far they differ, how rough the number is. The last row
# applies section 4's formula to a step of 2,048 tokens instead of 1,024: doubling the step pays at
# the end, and hardly after 50 steps.
#
# </details>
#
# Real runs use millions of tokens per step: GPT-3 175B 3.2 million ([Brown et al.
# 2020](https://arxiv.org/abs/2005.14165), table 2.1), and Llama 3 405B 4 million at first, then 8,
# then 16 ([Llama Team 2024](https://arxiv.org/abs/2407.21783), section 3.4.1). A batch that grows
# during the run fits our measurement, although the paper gives other reasons: stability early in
# training and efficiency later.
#
# ### On a real GPU
#
# The same functions, with the numbers of an H100 and of the model card:

# %% tags=["nbval-check-output", "output-h100"]
per_token = cost.training_flops_per_token(llama_8b, sequence_length=8192)
gpu_hours = 1.3e6  # of H100s that Llama 3 8B took, by its model card
spent_at = flops / (gpu_hours * 3600 * peak)
print("MFU   tokens/s on one H100   years on one   H100s for 30 days")
for mfu in (spent_at, 0.40, 0.60):
    rate = mfu * DENSE_BF16_PEAKS["H100"] / per_token
    days = tokens / rate / (24 * 3600)
    print(f"{mfu:.0%} {rate:22,.0f} {days / 365:14,.0f} {days / 30:19,.0f}")

held = 4 * 4 * cost.num_parameters(llama_8b)
print(f"weights, gradients and AdamW's moments in float32: {held / 1e9:.0f} GB; "
      f"an H100 has {DEVICES['H100-SXM-80GB'].memory_bytes / 1e9:.1f} GB")

# %% [markdown]
# Time is inversely proportional to MFU, so always ask which MFU an estimate assumes. At 40 % this
# training takes 70 years of one H100. The model card of Llama 3 8B reports 1.3 million H100 hours,
# which is 148 years, and corresponds to an MFU of 19 %; [chapter 4](chapter:4) starts from that
# number. The two do not contradict each other. 40 % describes a well-tuned training loop while it
# runs; GPU hours can also contain restarts, evaluation, and waiting, and the card does not break
# them down. The last column divides the years as if splitting the work over that many GPUs cost
# nothing. How near one can come to that is the subject of the course.
#
# If you time a GPU yourself, remember that its operations run asynchronously: a call returns before
# the work is done, so a clock must `synchronize` before it reads. And even large matmuls stay below
# the datasheet's peak, and small ones far below, as the next section shows.
#
# Time is not the only obstacle, though. The 128 GB printed above exceed an H100's memory before a
# single activation is stored. The next chapter counts the bytes.

# %% [markdown]
# ## Further: the roofline, or why small matrices are slow
#
# An operation has two speed limits. It cannot compute faster than the peak FLOP/s, and it cannot
# read its inputs and write its outputs faster than the memory bandwidth allows. Which one binds
# depends on its **arithmetic intensity**, the FLOPs it performs per byte it moves: the attainable
# rate is $\min(\text{peak}, \text{intensity} \times \text{bandwidth})$, the *roofline* ([Williams
# et al. 2009](https://doi.org/10.1145/1498765.1498785)).
#
# **Predict.** A matmul of $R$ rows with a 2,048 x 2,048 weight in float32 reads the weight once,
# whatever $R$ is. What happens to its intensity as $R$ grows? And what is the intensity of `x + 1`?

# %% tags=["figure-roofline"]
points = roofline(peak_flops(cpu, torch.float32).flops, copy_bandwidth())
print("operation           FLOPs/byte  roof GFLOP/s  reached (in 7 runs)   lower limit")
for point in points:
    low, high = (rate / point.roof for rate in point.spread)
    print(f"{point.name:20}{point.intensity:10.2f}{point.roof / 1e9:14.1f}"
          f"{point.reached / point.roof:9.0%} ({low:3.0%} to {high:4.0%})  {point.bound}")
x, roof = roof_line(points)
show(scaling(
    [round(point.intensity, 2) for point in points], [point.reached for point in points],
    "arithmetic intensity (FLOPs per byte)", "FLOP/s", roof, "roof", predicted_x=x,
), alt=claim([point.bound for point in points[::6]] == ["memory", "compute"],
             "The roof is memory bandwidth at low intensity and the peak at high intensity; "
             f"the largest matmul reaches {points[-1].reached / points[-1].roof:.0%} of its roof."))

# %% [markdown]
# <details><summary>Answer</summary>
#
# With few rows nearly all bytes are the weight's, so the intensity is $R/2$ FLOPs per byte, and it
# grows more slowly once the inputs and outputs count too. `x + 1` performs one FLOP for every 8
# bytes, however large the tensor is: that is the far left.
#
# </details>
#
# The roof is a bound, not a forecast. Its slope is the highest bandwidth that a plain copy or any
# run here reached, and its top the fastest matmul, so a run that touches the roof may do so by
# construction. (One possible reason for a low `x + 1`: if the weight fits into the last cache, the
# slope is the cache's bandwidth, and the larger tensors of `x + 1` keep that operation well below
# it.) If matmuls of a few rows stay far below the roof, neither limit binds; a likely reason is
# that the library first repacks the weight, and that a few rows do not pay for the copy.
#
# The same for a GPU's matmuls in bfloat16, a 16-bit format ([chapter 10](chapter:10)), from the
# latest record. The dots left of the corner are 1 to 256 rows times a weight of 4,096 x 4,096:

# %%
shown = recorded.matmul_roofline()
show_text(shown.sentence)
show(shown.figure, alt=shown.alt)

# %% [markdown]
# Right of the corner all dots but one level off at about 70 % of the top: no matmul here runs at
# the datasheet's peak. The exception, with its shape beside it, multiplies two small square
# matrices. It takes about as long as one row times the 4,096 x 4,096 weight, although the roof
# allows it 2.2 us and the row 8.1.
#
# Left of the corner the dots seem to climb along the roof, but look at the times. From 1 to 32 rows
# they stay near 15 us, where the weight's bytes allow 8; 64 rows take 12, with the FLOPs of the
# small square matmul and more than five times its bytes. So neither limit explains these times. Nor
# does a least time per operation: the shortest here is 12 us, and one row takes longer. A likely
# reason for the rest is that the library picks another kernel for each shape, and some suit their
# shape better than others.
#
# The corner lies much farther right than that of one CPU thread in float32, because a GPU's matrix
# units raise the peak more than its memory raises the bandwidth.
#
# The recorded roof combines a datasheet's peak with a measured bandwidth. Here is the corner of an
# H100, with both numbers from its datasheet: 989 TFLOP/s and 3.35 TB/s.
#
# **Predict.** A matmul of $R$ rows with a $D$ x $D$ weight in bfloat16 has $2RD^2$ FLOPs and moves
# $2(2RD + D^2)$ bytes. How many rows does it take, at least, to be compute-bound on an H100?

# %% tags=["nbval-check-output"]
h100_bandwidth = 3.35e12  # bytes/s, H100 SXM datasheet
corner = DENSE_BF16_PEAKS["H100"] / h100_bandwidth
print(f"H100: compute-bound above {corner:.0f} FLOPs per byte")
for width in (1024, 4096, 16384):
    rows = 8192  # tokens; bfloat16: 2 bytes a number
    intensity = 2 * rows * width**2 / (2 * (2 * rows * width + width**2))
    least_rows = corner / (1 - 2 * corner / width)
    print(f"{rows} tokens, {width:5} x {width:5}: {intensity:4.0f} FLOPs per byte; "
          f"compute-bound from {least_rows:.0f} tokens")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The intensity is $R / (1 + 2R/D)$: about $R$ while there are few rows beside $D$, and never above
# $D/2$. So in bfloat16 a device needs at least as many rows (tokens) as its corner has FLOPs
# per byte, and more if the weight is narrow. The last column is the exact number. Below it, the
# memory bandwidth sets the limit: a micro-batch that is cut too small, or a model that generates
# text one token at a time, waits for memory.
#
# </details>
#
# So with 8,192 tokens matmuls of these widths are compute-bound. Pointwise operations perform about
# one FLOP per several bytes, so on a GPU norms, activation functions, dropout, and the optimizer
# are memory-bound: they take at least the bytes they move divided by the bandwidth.
#
# How much of a whole training step is that? `step_operators` runs one step of Llama 3 8B, with one
# sequence of 8,192 tokens in bfloat16, on tensors without values, and adds up the FLOPs and the
# bytes of each operator. An operator that is not a matmul counts as one FLOP per value. Attention
# is counted without skipping the masked half, and its backward pass computes the scores again.

# %% tags=["nbval-check-output"]
found = step_operators(llama_8b, 8192)
print("one step             TFLOPs     GB   FLOPs/byte")
for kind, each in found.items():
    print(f"{kind:20}{each.flops / 1e12:7.1f}{each.bytes / 1e9:7.0f}"
          f"{each.flops / each.bytes:13.2f}")

# %% [markdown]
# The first two rows have nearly all of the FLOPs, the other three most of the bytes.
#
# **Predict.** An H100 performs up to 989 TFLOP/s and moves up to 3.35 TB/s. From the two columns,
# what share of the step's time goes to the last three rows, which have less than a thousandth of
# its FLOPs?

# %% tags=["nbval-check-output", "output-operators"]
least = {kind: max(each.flops / peak, each.bytes / h100_bandwidth) for kind, each in found.items()}
total = sum(least.values())
print("one step on an H100   bound by   least time")
for kind, each in found.items():
    by = "compute" if least[kind] * h100_bandwidth > each.bytes else "memory"
    print(f"{kind:20}{by:>10}{1000 * least[kind]:8.0f} ms {least[kind] / total:4.0%}")
memory = sum(seconds for kind, seconds in least.items() if kind not in ("matmuls", "attention"))
print(f"the last three {1000 * memory:23.0f} ms, of {1000 * total:.0f} ms")

at_peak = 8192 * per_token / peak  # what MFU counts
print(f"MFU at most {at_peak / total:.0%}, or {at_peak / (total - least['attention'] / 2):.0%} "
      "with attention that skips the masked half")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Nearly a third: 228 of 725 ms. The least time assumes that every operator runs on its roof. So
# kernels that ran exactly these operators one after the other, attention's masked half included,
# would reach an MFU of at most 66 %. A causal attention kernel skips that half, which raises the
# bound to 72 %. Most of what is missing is due to the pointwise operators: there are many of them
# between two matmuls, and each reads and writes a whole tensor. (The optimizer's part shrinks with
# more tokens per step.)
#
# </details>
#
# Does such a bound explain a step that we can time? Here is the same table for section 3's step on
# one CPU thread, under the roof measured above. The last two columns are the time of each kind,
# read with a clock around every operator, and how many times the least time that is.

# %%
model, optimizer = new_model(config)
found, peak, bandwidth = counted_and_timed(step_by_hand), points[0].peak, points[0].bandwidth
least = {kind: max(each.flops / peak, each.bytes / bandwidth) for kind, (each, _) in found.items()}
over = {kind: seconds / least[kind] for kind, (_, seconds) in found.items()}
print("section 3's step    MFLOPs     MB  bound by   least time    measured")
for kind, (each, seconds) in found.items():
    by = "compute" if least[kind] * bandwidth > each.bytes else "memory"
    print(f"{kind:18}{each.flops / 1e6:8.1f}{each.bytes / 1e6:7.1f}{by:>10}"
          f"{1000 * least[kind]:10.2f} ms{1000 * seconds:9.2f} ms, {over[kind]:4.1f} times")
show_text(claim(over["matmuls"] == min(over.values()), "Matmuls come closest to their roof, at "
                f"{over['matmuls']:.1f} times the least time."))

# %% [markdown]
# The least time is a bound, and matmuls come closest to it. The other kinds take several times as
# long as their FLOPs and bytes ask for, so neither limit explains them. The roof leaves out two
# things that are likely reasons: GELU's tanh takes many instructions per value, where we count one
# FLOP, and starting an operator takes time, however few numbers it works on.
#
# On the H100, faster matrix units do not shorten the 228 ms; moving fewer bytes does. The next
# section does that.

# %% [markdown]
# ## Further: kernels and `torch.compile`
#
# In eager mode each operation runs as its own *kernel* (one function on the device, which the CPU
# launches): it reads its input from memory and writes its output back. For memory-bound operations
# that traffic is the cost. `torch.compile` fuses a chain of pointwise operations into one kernel
# that reads once and writes once.
#
# **Predict.** `relu(x * scale + shift)` is three operations. Counting only the large tensors, by
# what factor does fusion reduce the bytes, and so at best the time? And does `tanh(x)`, which moves
# as many bytes as the fused kernel, take as long?

# %% tags=["exhaustive"]
try:
    rows = eager_and_compiled()
    bytes_per_second = rows[0][1] / median(rows[0][2])  # of x + 1
    print("                       by its bytes   measured")
    for name, moved, times in rows:
        print(f"{name:22}{1000 * moved / bytes_per_second:10.1f} ms{1000 * median(times):8.1f} ms "
              f"({1000 * min(times):.1f} to {1000 * max(times):.1f}, {len(times)} runs)")
except RuntimeError as error:
    print(str(error)[:300])

# %% [markdown]
# <details><summary>Answer</summary>
#
# Eagerly, three reads and three writes of the tensor; fused, one of each: 6 against 2, at best 3
# times faster. The column "by its bytes" divides the bytes by the bandwidth that `x + 1` reaches in
# the same loop, so the first row agrees by construction. Where another row's measured time is near
# that column, memory traffic explains the time. In our run it does not explain that of `tanh`: on
# one CPU thread its arithmetic takes several times as long as its bytes, so fusing it with its
# neighbors would gain less.
#
# All outputs were allocated before the clock started. Without that, the eager chain would also pay
# for two more fresh tensors, which costs a CPU more than the operations themselves and is not what
# this section is about.
#
# </details>
#
# What has been fused? The compiler wrote a program, and we can look for its kernels, and for the
# places where these read and write memory:

# %% tags=["exhaustive"]
from torch._inductor.utils import run_and_get_code  # here, for it takes seconds

x = torch.randn(64, 32)
try:
    _, [program] = run_and_get_code(torch.compile(relu_of_scaled), x, x[0], x[1])
    print("kernels:", *sorted(set(re.findall(r"cpp_fused_\w+", program))))
    print("reads of memory: ", program.count("loadu("))
    print("writes to memory:", program.count(".store("))
except Exception as error:
    print(str(error)[:300])

# %% [markdown]
# There is one kernel, and its name lists what it computes. The loop's body has one load per input
# and one store; everything between stays in registers. What is fused are pointwise operations, and
# reductions such as a norm's mean with what surrounds them. Matmuls are not: they call the same
# library as before, and compute-bound as they are, they would gain little. What compiling gains a
# whole model therefore depends on how much of its step is *not* matmuls; on a GPU it also saves the
# CPU's launch time per kernel, which matters when kernels are short.

# %% [markdown]
# ## Further: the MFU that this package reaches
#
# `make gpu` measures the MFU on a machine with a GPU; the figure shows the latest record, of the
# device named above it. Each row is a model and a way to train it, at 32,768 tokens per step: with
# this package ("ours"), with a plain PyTorch loop, or with `transformers`. All compute in
# bfloat16; weights are float32 unless the row says otherwise. The dots were measured, with a line
# for the spread. The dashed ticks are what the planner of [chapter 12](chapter:12) predicts from
# the shapes, for eager kernels.

# %%
shown = recorded.mfu()
show_text(shown.sentence)
show(shown.figure, alt=shown.alt)

# %% [markdown]
# Compare each eager row with the compiled row of the same name, four rows below: in this record
# compiled is faster every time. Of the two models, the larger one, whose matmuls are wider, reaches
# the higher MFU (but the two differ in more than that). The predicted ticks lie to the right of
# what was measured: the prediction is optimistic.

# %% [markdown]
# ## 8. Recap
#
# 1. A step is a forward pass, a backward pass with twice its FLOPs, and an update whose cost does
#    not depend on the number of tokens. The step takes at least its FLOPs divided by the peak.
# 2. The gradient's variance falls as $1/B$ if the samples are drawn independently. Well beyond the
#    critical batch size, more tokens per step buy little; that size grew during our run.
# 3. Gradient accumulation reproduces the undivided batch, to 12 digits in float64, if all
#    micro-batches share one divisor, the number of tokens. A mean of means trains something else,
#    and a loss curve alone does not show it.
# 4. Without a warm-up our runs fell behind, even at the same mean learning rate. Repeat a
#    comparison before you explain it: another order of the data overturned our test of depth.
# 5. MFU is tokens per second times FLOPs per token over the device's peak. It grows with the
#    batch, because a step costs a fixed time plus a time per token, and it bounds how much a better
#    program could still gain.
#
# ## Exercises
#
# Write your answers into `exercises/ch01_single_gpu.py`, save, and run the cell. In a terminal,
# `minitron hint 1.1` gives hints in three steps.
#
# [**1.1 Gradient accumulation**](exercise:1.1) (20 minutes): the function of section 6, for
# micro-batches with different numbers of tokens.

# %%
check("1.1")

# %% [markdown]
# [**1.2 Learning-rate schedule**](exercise:1.2) (10 minutes): warm-up and cosine, exact at both
# ends.

# %%
check("1.2")

# %% [markdown]
# [**1.3 What a model costs**](exercise:1.3) (30 minutes): parameters and FLOPs from the shapes of
# both kinds of model: GPT (`family="gpt"`, as here) and Llama (section 1's).

# %%
check("1.3")

# %% [markdown]
# [**1.4 Planning the batch**](exercise:1.4) (15 minutes): split a step's tokens into micro-batches
# that fit.

# %%
check("1.4")

# %% [markdown]
# ## Further reading
#
# - McCandlish, Kaplan, Amodei, [*An Empirical Model of Large-Batch
#   Training*](https://arxiv.org/abs/1812.06162), 2018, section 2.2 and appendix A: the critical
#   batch size and how to measure it.
# - Zhang et al., [*Which Algorithmic Choices Matter at Which Batch
#   Sizes?*](https://arxiv.org/abs/1907.04164), 2019: Adam's critical batch is larger than SGD's.
# - Chowdhery et al., [*PaLM*](https://arxiv.org/abs/2204.02311), 2022, appendix B: MFU and its
#   conventions.
# - Kaplan et al., [*Scaling Laws for Neural Language Models*](https://arxiv.org/abs/2001.08361),
#   2020, section 2.1: counting FLOPs.
# - Llama Team, [*The Llama 3 Herd of Models*](https://arxiv.org/abs/2407.21783), 2024, section 3.3:
#   a real run's hardware and MFU.
# - Goyal et al., [*Accurate, Large Minibatch SGD*](https://arxiv.org/abs/1706.02677), 2017,
#   section 2.2: warm-up.
# - Olsson et al., [*In-context Learning and Induction Heads*](https://arxiv.org/abs/2209.11895),
#   2022, argument 1: the sudden fall in large models.
# - Williams, Waterman, Patterson, [*Roofline*](https://doi.org/10.1145/1498765.1498785), 2009.
