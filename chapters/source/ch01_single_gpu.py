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
# # One device: what a training step does
#
# **45 minutes. No GPU. Exercises 1.1 to 1.4.**
#
# *You need:* one model that you have trained yourself in PyTorch, and the words "loss" and
# "gradient".
#
# *You will be able to:*
# - **predict** how long a training step takes, from the model's shape and the device's peak;
# - **choose** a batch size in tokens, from the noise of the gradient;
# - **accumulate** that batch in pieces that fit in memory, without changing the training.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import dataclasses
import inspect
import math
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from minitron import cost
from minitron.config import ModelConfig, TrainConfig
from teaching.check import check
from teaching.figures import Block, curves, loss_curve, scaling, show, timeline

# %%
from minitron.corpus.folder import load_tokenizer
from minitron.corpus.stories import grammatical_share, write_stories
from minitron.corpus.story_grammar import ADJECTIVES, BOYS, GIRLS, OBJECTS, PLACES, VOCABULARY
from minitron.dataset import TokenDataset
from minitron.measure.clock import DENSE_BF16_PEAKS, Clock, peak_flops
from minitron.model.generate import generate
from minitron.model.transformer import Transformer, initialize
from minitron.step import (
    accumulate_gradients, forward_backward, learning_rate, make_optimizer, train_step,
)

torch.set_num_threads(1)  # one thread: steadier clocks, and the same losses every time
cpu = torch.device("cpu")

# %% [markdown]
# ## 1. The question
#
# Llama 3 8B was trained on 15 trillion tokens (Llama Team 2024, section 1). You have one H100, and
# you keep it at 40 % of its peak, which is good. How long does it take? Guess the unit first:
# weeks, months, years?

# %% tags=["nbval-check-output"]
llama_8b = ModelConfig(
    vocab_size=128_256, num_layers=32, width=4096, num_heads=32, num_kv_heads=8,
    ffn_width=14_336, max_sequence_length=8192, tied_embedding=False,
)
tokens = 15e12
flops = tokens * cost.training_flops_per_token(llama_8b, sequence_length=8192)
peak = DENSE_BF16_PEAKS["H100"]

print(f"{cost.num_parameters(llama_8b):,} parameters, {flops:.2g} FLOPs")
print(f"one H100 at 40 % of {peak / 1e12:.0f} TFLOP/s")
print(f"{flops / (0.40 * peak) / 3600 / 24 / 365:.0f} years")

# %% [markdown]
# That is what the other chapters are about: sharing these years among thousands of devices. But
# what is shared out is one thing, repeated: the training step. This chapter takes it apart on one
# device, with a model small enough for your laptop. Where does its time go? How many tokens should
# it have? How near is it to the limit of the device?

# %% [markdown]
# ## 2. Estimate
#
# Nearly all arithmetic of a Transformer is in its matrix products. A product with a weight of
# $n$ values costs $2n$ FLOPs per token: one multiplication and one addition per value.
#
# **Predict.** The forward pass uses each weight matrix once. How often does the backward pass use
# it, and so how many FLOPs does a whole step take, in forward passes?
#
# <details><summary>Answer</summary>
#
# For $Y = XW^T$ the backward pass computes two products of the same size: the gradient of the
# input, $dX = dY\,W$, which the layer below waits for, and the gradient of the weight,
# $dW = dY^T X$, which the optimizer waits for. Backward costs two forward passes, a step costs
# three. With $2N$ for the forward pass, that is the rule of thumb of $6N$ FLOPs per token.
#
# </details>

# %% tags=["nbval-check-output"]
S = 64  # tokens per sequence
config = ModelConfig(
    family="gpt", vocab_size=len(VOCABULARY), num_layers=2, width=64, num_heads=4, num_kv_heads=4,
    ffn_width=256, max_sequence_length=S,
)
N = cost.num_parameters(config)
forward = cost.forward_flops_per_token(config, S)
training = cost.training_flops_per_token(config, S)
print(f"{N:,} parameters")
print(f"forward  {forward:8,} FLOPs per token")
print(f"training {training:8,} FLOPs per token, {training / forward:.0f} forward passes")
print(f"6 N      {6 * N:8,}")

# %% [markdown]
# The rule of thumb is close but not equal: it counts embedding rows and norms, which cost almost
# nothing, and leaves out attention's $QK^T$ and $PV$, which have no weights. `minitron.cost` counts
# the products one by one.
#
# What the model reads is text of a small grammar, written here in a second. It is made for this
# course: every story mentions people and things again, and its entropy is known, so we know the
# best loss that any model can reach.

# %% tags=["nbval-check-output"]
workspace = tempfile.TemporaryDirectory()
folder = Path(workspace.name) / "stories"
facts = write_stories(folder, num_tokens=1_000_000)
data, validation = TokenDataset(folder, "train", S, seed=0), TokenDataset(folder, "val", S)
tokenizer = load_tokenizer(folder)

batch = data.batch(position=0, batch_size=16)  # (B, S + 1)
inputs, targets = batch[:, :-1], batch[:, 1:]
print(f"{tuple(batch.shape)}: {targets.numel():,} tokens to predict")
print(tokenizer.decode(batch[0].tolist(), skip_special_tokens=False))

# %% [markdown]
# The unit of work is the token, not the sequence: 16 sequences of 64 targets are a batch of 1,024
# tokens. Neighboring columns of the same row serve as input and target.

# %% [markdown]
# ## 3. One step, by hand
#
# A step is three calls. We stop the time between them.

# %%
model = Transformer(config)
initialize(model, seed=0)
optimizer = make_optimizer(model, TrainConfig(learning_rate=1e-3), cpu)


# %%
def step_by_hand():
    times = [time.perf_counter()]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    return [1000 * (end - start) for start, end in zip(times, times[1:], strict=False)]


# %% [markdown]
# **Predict.** Forward is one part, backward two. AdamW does a dozen operations per *parameter*, not
# per token. Is it a large or a small part of the step here, and what if the batch had one sequence?
#
# <details><summary>Answer</summary>
#
# Small, and it does not depend on the batch: the arithmetic above is per parameter *and* per token,
# AdamW's is per parameter only. Divide the batch by 16 and the optimizer's share grows. Try it:
# replace `inputs, targets` by `inputs[:1], targets[:1]`.
#
# </details>

# %% tags=["figure-timeline"]
runs = [step_by_hand() for _ in range(40)]
forward_ms, backward_ms, optimizer_ms = (median(run[i] for run in runs[10:]) for i in range(3))
turn, update = forward_ms + backward_ms, forward_ms + backward_ms + optimizer_ms

predicted = [Block("forward", 0, forward_ms), Block("backward", forward_ms, 3 * forward_ms)]
measured = [Block("forward", 0, forward_ms), Block("backward", forward_ms, turn),
            Block("optimizer", turn, update)]
show(timeline({"measured": measured}, {"predicted": predicted}), alt=(
    "A step is a forward pass, a backward pass of about twice its length, and a short update."
))

# %%
print(f"backward / forward: predicted 2, measured {backward_ms / forward_ms:.2f}")
print(f"optimizer: {optimizer_ms / update:.0%} of the step")

# %% [markdown]
# The prediction takes the forward time from the clock and everything else from the count of FLOPs.
# What it misses is work that is not a matrix product: norms, GELU, softmax, the loss, and the cost
# of calling many small operations.

# %% [markdown]
# ## 4. How many tokens should a step have?
#
# The gradient of a batch is an estimate. The quantity we want is the gradient over *all* text,
# $G$; the batch gives its mean over $B$ sequences that were drawn at random. So it carries noise,
# and like every mean of independent draws, its variance falls as $1/B$.
#
# **Predict.** You double the batch, and with it the cost of the step. When is that worth it: when
# the noise is larger than $|G|^2$, or when it is smaller?
#
# <details><summary>Answer</summary>
#
# When it is larger. As long as noise dominates, twice the batch gives a step that you can trust
# about twice as far, so you need half as many steps. Once the noise is far below $|G|^2$, the
# direction is already right, and the second half of the batch tells you what you knew.
#
# </details>
#
# Both regimes meet at the **critical batch size**, where noise equals signal (McCandlish et al.
# 2018, section 2.2; measured from gradients alone, as here, they call it the *noise scale*). Take
# the gradient of each of 512 held-out sequences alone, then average them in groups. We do it early
# in a training, after 50 steps; section 6 says what `train_step` does.

# %%
def train_steps(num_steps, peak=0.01, warmup_steps=50, config=config, watch=None):
    """Train a new model for the first `num_steps` of 600; returns it and its losses."""
    model = Transformer(config)
    initialize(model, seed=0)
    optimizer = make_optimizer(model, TrainConfig(), cpu)
    losses = []
    for step in range(num_steps):
        batch = data.batch(step * 16, 16)
        rate = learning_rate(step, peak, peak / 10, warmup_steps, total_steps=600)
        loss, _ = train_step(model, optimizer, [(batch[:, :-1], batch[:, 1:])], rate, 1.0)
        losses.append(float(loss))
        if watch and (step + 1) % 25 == 0:
            watch(step + 1, model)
    return model, losses


# %%
model, _ = train_steps(50)

# %%
def sequence_gradients(model, batch):
    """One row per sequence of `batch` (B, S+1): its gradient, all parameters in a line."""
    rows = []
    for sequence in batch.split(1):
        model.zero_grad()
        accumulate_gradients(model, [(sequence[:, :-1], sequence[:, 1:])])
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    model.zero_grad()
    return torch.stack(rows)


# %%
def noise_and_signal(gradients):
    """Variance of one sequence's gradient, and |G|^2 freed of the noise that is left in it."""
    mean = gradients.mean(0)
    noise = gradients.var(0).sum()
    return float(noise), float(mean.square().sum() - noise / len(gradients))


# %%
gradients = sequence_gradients(model, validation.batch(0, 512))
noise, signal = noise_and_signal(gradients)

sizes = [1, 2, 4, 8, 16, 32, 64]
variances = []
for size in sizes:
    means = gradients.view(-1, size, N).mean(1)  # a row per batch of `size` sequences
    variances.append(float(means.var(0).sum()))
    print(f"B = {size:3} sequences: variance {variances[-1]:.4f}, noise/B {noise / size:.4f}")
print(f"signal |G|^2 = {signal:.4f}, so the critical batch is {noise / signal:.1f} sequences, "
      f"{S * noise / signal:,.0f} tokens")

# %% tags=["figure-gradient-noise"]
show(scaling(
    [S * size for size in sizes], variances, "batch size (tokens)", "variance of the gradient",
    predicted=[noise / size for size in sizes], predicted_label="1/B",
    limit=signal, limit_label="below |G|²: a larger batch adds little", limit_is_above=False,
), alt="The variance of the gradient falls as 1/B, and below |G|² a larger batch buys little.")

# %% [markdown]
# The dashed line has one measured number in it, the variance at one sequence; the other points had
# to fall on it, and would not if neighboring samples were alike. That is why `TokenDataset` reads
# them in a shuffled order.
#
# The critical batch is not a constant of the model. Early in training nearly all sequences agree on
# what is wrong. Later the easy things are learned, $|G|^2$ shrinks, and what remains is noise. We
# measure it again at the end of the chapter. A large critical batch is what lets thousands of
# devices share one step: there must be enough tokens in it to go round.

# %% [markdown]
# ## 5. Accumulate, and the trap
#
# A batch may be right for learning and too large for memory, because activations grow with the
# tokens in flight. The remedy: cut it into micro-batches, run forward and backward for each, and
# let `.grad` add up. PyTorch adds into `.grad` anyway. Only the divisor is ours to choose.
#
# By hand, in float64, where equal means equal to about 16 digits:

# %%
model = model.double()


def flat_gradient():
    """Take all gradients out of the model, as one vector."""
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


# %%
def mean_of_means(micro_batches):
    """Every micro-batch takes its own mean, and the means are averaged. The losses alike."""
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
one_batch = flat_gradient()

mean_of_means(list(zip(inputs.split(4), targets.split(4), strict=True)))
difference = relative_difference(flat_gradient(), one_batch)
print("4 micro-batches of 4 sequences equal 1 batch of 16:", difference < 1e-12)

# %% [markdown]
# The gradients agree. It works, it goes into the code base, and it stays there for years.
#
# Then someone trains on texts of different lengths. Short ones are padded, and the target -100
# (which `cross_entropy` leaves out of its mean) marks the padding. Here the last four sequences
# have 8 real tokens each, the others 64.
#
# **Predict.** One token of a short text against one token of a long text: how much more does it
# weigh in the gradient now?
#
# <details><summary>Answer</summary>
#
# Every micro-batch has the same weight, a quarter, and divides it among its tokens: 32 of them in
# the last micro-batch, 256 in the others. A token of the short texts weighs 8 times as much. In one
# batch of all sequences each token would weigh the same.
#
# </details>

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
one_batch = flat_gradient()

wrong_loss = mean_of_means(micro_batches)
wrong_gradient = flat_gradient()
print(f"loss of one batch {loss.item():.3f}, mean of means {wrong_loss:.3f}")
print(f"gradient off by {relative_difference(wrong_gradient, one_batch):.0%} of its length")

# %% [markdown]
# The loss looks fine: nobody would stop a run for that difference. The gradient is far off. The
# instrument that sees the fault is the comparison with the gradient of the undivided batch.
# Micro-batching has changed *what* is trained: short texts count more than long ones.
#
# This is a bug from the field. Until October 2024 the Hugging Face Trainer averaged the means of
# its micro-batches, so the same data gave another model with another number of accumulation steps
# (huggingface/transformers, pull request 34191, "Fix Gradient Accumulation issue"). The same
# mistake waits wherever a mean of means is taken: across devices, too.

# %% [markdown]
# ## 6. The real one
#
# The package's own function. Find the divisor.

# %%
print(inspect.getsource(accumulate_gradients))
print(inspect.getsource(forward_backward))

# %% [markdown]
# `divisor` counts the targets of *all* micro-batches before the first one runs. Each micro-batch
# adds a *sum* divided by that one number. `loss.backward()` frees its activations before the next
# micro-batch starts, which is the whole point.
#
# Does it compute the same gradient as the undivided batch? Not roughly: to the last digits.

# %% tags=["nbval-check-output"]
for cut in ([16], [4, 4, 4, 4], [13, 2, 1], [1] * 16):
    accumulate_gradients(model, list(zip(inputs.split(cut), padded.split(cut), strict=True)))
    difference = relative_difference(flat_gradient(), one_batch)
    print(f"micro-batches of {cut}: same gradient: {difference < 1e-12}")

# %% [markdown]
# Around it stands the whole step: gradients, clip, set the rate, update.

# %%
print(inspect.getsource(train_step))

# %% [markdown]
# One argument is left to explain, `rate`. AdamW divides each gradient by a running estimate of its
# size. In the first steps the estimate rests on a handful of batches, yet the steps it allows are
# full-sized.
#
# **Predict.** Three runs of 100 steps with the same peak rate, 0.02, and a warm-up of 0, 10 and 50
# steps. The run without warm-up spends the most time at the full rate. Does it learn fastest?

# %%
warmed = {
    f"warm-up {steps}": train_steps(100, peak=0.02, warmup_steps=steps)[1] for steps in (0, 10, 50)
}

# %% tags=["figure-warmup"]
show(curves(range(1, 101), warmed, "step", "loss (nats per token)"), alt=(
    "The same data and the same peak rate: without a warm-up the run stays behind."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# It learns slowest, and has not caught up after 100 steps. The usual explanation: a few steps of
# full size in a badly known direction carry the weights to a place from which descent is slow.
#
# </details>
#
# After the warm-up the rate falls along half a cosine: large steps while there is far to go, small
# ones to settle in the noise that section 4 measured.

# %% tags=["figure-schedule"]
steps = range(600)
rates = [learning_rate(step, 0.01, 0.001, warmup_steps=50, total_steps=600) for step in steps]
show(curves(steps, {"rate": rates}, "step", "learning rate"), alt=(
    "The learning rate climbs in a line to its peak and falls along half a cosine."
))

# %% [markdown]
# ## 7. Measure
#
# ### How near to the limit?
#
# Tokens per second say how fast a run is, but not whether that is good. **Model FLOPs utilization**
# divides by what the device could do (Chowdhery et al. 2022, appendix B):
#
# $$ \mathrm{MFU} = \frac{\text{tokens/s} \times \text{FLOPs per token}}{\text{peak FLOP/s}} $$
#
# The FLOPs are those the *model* needs. Doing the same work twice does not raise it. The peak of a
# GPU stands in its datasheet; for your CPU the clock measures the fastest matrix product it can
# find.
#
# **Predict.** Does a batch of 1 sequence reach the same MFU as a batch of 64?

# %%
model = Transformer(config)
initialize(model, seed=0)
optimizer = make_optimizer(model, TrainConfig(), cpu)
clock = Clock(training, peak_flops(cpu, torch.float32), cpu)

speeds = {}
for size in (1, 2, 4, 8, 16, 32, 64):
    batch = data.batch(0, size)
    laps = []
    for _ in range(max(4, 64 // size)):
        clock.start()
        train_step(model, optimizer, [(batch[:, :-1], batch[:, 1:])], 1e-3, 1.0)
        laps.append(clock.lap(num_tokens=size * S).tokens_per_second)
    speeds[size * S] = median(laps)

# %% tags=["figure-throughput"]
limit = clock.peak.flops / training
for tokens, speed in speeds.items():
    print(f"{tokens:5,} tokens per step: {speed:8,.0f} tokens/s, MFU {speed / limit:.1%}")
show(scaling(
    list(speeds), list(speeds.values()), "batch size (tokens)", "tokens/s",
    limit=limit, limit_label="100 % MFU: the fastest matrix product here",
), alt="More tokens per step use the device better, up to a ceiling well below its peak.")

# %% [markdown]
# <details><summary>Answer</summary>
#
# No. A step has fixed costs: calling each operation, and the optimizer's pass over all parameters.
# With few tokens they dominate. With many they vanish in the matrix products, and a ceiling
# remains, because these matrices are too small to fill the device. Wider models come nearer.
#
# </details>
#
# So there are two reasons for more tokens per step, and one against: the device likes them, the
# noise of section 4 allows them up to the critical batch, and memory forbids them, until you
# accumulate.

# %% [markdown]
# ### Train, and watch the loss
#
# Now a whole run, with the package's step. A word that has occurred earlier in the same story can
# be copied; every other word has to be known or guessed. We follow the two kinds separately.
#
# **Predict.** A loss curve is usually drawn as a smooth slope. Will both kinds of words be learned
# at the same time?

# %%
held_out = validation.batch(0, 64)
end = tokenizer.token_to_id("<end>")
names_and_things = {*BOYS, *GIRLS, *ADJECTIVES, *OBJECTS, *PLACES}
is_name = torch.tensor([word in names_and_things for word in VOCABULARY])


def copyable(inputs, targets):
    """Targets (B, S) that are names or things and stand earlier in their own story."""
    story = (inputs == end).cumsum(1)
    same_story = story[:, :, None] == story[:, None, :]
    earlier = (targets[:, :, None] == inputs[:, None, :]) & same_story
    return earlier.tril().any(-1) & is_name[targets]


# %%
@torch.no_grad()
def losses_by_kind(model):
    """Loss over the held-out text: all words, words that can be copied, all others."""
    inputs, targets = held_out[:, :-1], held_out[:, 1:]
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
    copied = copyable(inputs, targets)
    return losses.mean().item(), losses[copied].mean().item(), losses[~copied].mean().item()


def tell(model, num_tokens=600):
    """Text that the model continues after the end of a story."""
    story = generate(model, torch.tensor([[end]]), num_tokens)
    return tokenizer.decode(story[0, 1:].tolist(), skip_special_tokens=False)


# %%
by_kind, told = {}, {}


def watch(step, model):
    by_kind[step] = losses_by_kind(model)
    if step in (50, 150, 600):
        told[step] = tell(model)


model, losses = train_steps(600, watch=watch)
rows = [{"step": i, "tokens": i * 16 * S, "loss": loss} for i, loss in enumerate(losses, start=1)]
rows += [{"step": step, "val_loss": losses[0]} for step, losses in by_kind.items()]

# %% tags=["figure-loss"]
floor = facts["entropy_in_window"][str(S)]
show(loss_curve(rows, floor), alt=(
    "The loss falls, rests on a plateau, and falls again: a second thing was learned late."
))

# %% [markdown]
# The dashed line is the entropy of the text as seen through windows of 64 tokens, known to about
# 1 %: no model of any size gets below it on average. The curve comes down in two falls with a
# plateau between them. What was learned in the second one?

# %% tags=["figure-copying"]
steps = list(by_kind)
lines = {
    "names seen before": [by_kind[step][1] for step in steps],
    "all other words": [by_kind[step][2] for step in steps],
}
guess = {"a guess among 10": [math.log(10)] * len(steps)}
show(curves(steps, lines, "step", "loss (nats per token)", predicted=guess), alt=(
    "For a while names and things seen before are only guessed, then the model looks them up."
))

# %%
for step, text in told.items():
    sentences, _ = grammatical_share(text)
    print(f"step {step}: {sentences:.0%} of the sentences are grammatical\n  {text[:190]} ...\n")

# %% [markdown]
# On the plateau many sentences are right and the story is not: from one sentence to the next,
# people and things change. The figure says why. The model knows that a name or a thing comes next,
# and guesses among the ten or so of its kind, although the right one stands a few words back. The
# cliff is where attention begins to look there. A smooth average hides a sudden event; a loss
# split by kind shows it.
#
# Large models fall off a similar cliff when two attention layers begin to work together as an
# *induction head*: one marks each word with the word before it, the other looks for an earlier
# place with the same mark and copies from there (Olsson et al. 2022).
#
# **Predict.** Then what should a model with one layer do? The same training, once more:

# %% tags=["figure-layers"]
shallow = {}
train_steps(
    600, config=dataclasses.replace(config, num_layers=1),
    watch=lambda step, model: shallow.update({step: losses_by_kind(model)}),
)
lines = {
    "two layers": [by_kind[step][1] for step in steps],
    "one layer": [shallow[step][1] for step in steps],
}
show(curves(steps, lines, "step", "loss on names seen before (nats)", predicted=guess), alt=(
    "One layer learns to look back in part; with two layers most of the guessing is gone."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# One layer can look for "a name, somewhere earlier", and gains something by it. To find *which*
# thing followed the same word the last time takes two. The measurement fits the explanation; had
# both lines fallen alike, it would have refuted it.
#
# </details>
#
# **Predict.** Section 4 measured the critical batch after 50 steps. Is it larger or smaller now?

# %% tags=["output-critical"]
late_noise, late_signal = noise_and_signal(sequence_gradients(model, validation.batch(0, 512)))
print("                      50 steps    600 steps")
print(f"noise of a sequence  {noise:9.3f} {late_noise:12.3f}")
print(f"signal |G|^2         {signal:9.4f} {late_signal:12.4f}")
critical, late_critical = S * noise / signal, S * late_noise / late_signal
print(f"critical batch       {critical:9,.0f} {late_critical:12,.0f} tokens")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Much larger. The signal has nearly vanished, because little is left to learn that all sequences
# agree on; the noise is still there. By this measure a batch that was wasteful early is too small
# late.
#
# </details>
#
# ### On a real GPU
#
# The same functions with an H100's numbers. Nothing in the formula knows how small our model was.

# %% tags=["nbval-check-output"]
per_token = cost.training_flops_per_token(llama_8b, sequence_length=8192)
tokens = 15e12
print("  MFU   tokens/s on one H100   H100s for 30 days")
for mfu in (0.2, 0.4, 0.6):
    rate = mfu * DENSE_BF16_PEAKS["H100"] / per_token
    print(f"{mfu:5.0%} {rate:22,.0f} {tokens / rate / (30 * 24 * 3600):19,.0f}")

held = 4 * 4 * cost.num_parameters(llama_8b)
print(f"weights, gradients and AdamW's two averages in float32: {held / 1e9:.0f} GB")

# %% [markdown]
# Hundreds of devices, if each keeps 40 % of its peak while it shares the work, which is
# what the rest of the course is for. On a GPU two things differ from your CPU. Its operations run
# after the call has returned, so a clock must wait for the device (`synchronize`) before it reads.
# And its matrix units want bfloat16 and wide matrices: small ones leave most of them idle.
#
# The next obstacle is not time, though. An H100 has 80 GB, and the last line above has counted no
# activations yet: this model does not even fit. The next chapter counts its bytes.

# %% [markdown]
# ## 8. Recap
#
# 1. A step is a forward pass, a backward pass of twice its FLOPs, and an update that does not
#    depend on the number of tokens.
# 2. The gradient's variance falls as $1/B$; beyond the critical batch more tokens per step
#    buy little, and the critical batch grows during training.
# 3. Accumulated gradients equal the large batch to the last digits if all micro-batches share one
#    divisor, the number of tokens; a mean of means trains something else, and the loss hides it.
# 4. The learning rate warms up, because the first steps are the least informed, and decays, because
#    the last ones fight noise.
# 5. MFU is tokens per second, times FLOPs per token, over the device's peak: it says how much a
#    better program could still gain.
#
# ## Exercises
#
# Write your answers into `exercises/ch01_single_gpu.py`, save, and run the cell. In a terminal,
# `minitron hint 1.1` gives hints in three steps.
#
# **1.1 Gradient accumulation** (20 minutes): the function of section 6, for ragged micro-batches.

# %%
check("1.1")

# %% [markdown]
# **1.2 Learning-rate schedule** (10 minutes): warm-up and cosine, with the ends exactly right.

# %%
check("1.2")

# %% [markdown]
# **1.3 What a model costs** (30 minutes): parameters and FLOPs from the shapes of both families.

# %%
check("1.3")

# %% [markdown]
# **1.4 Planning the batch** (15 minutes): tokens per step into micro-batches that fit.

# %%
check("1.4")

# %% [markdown]
# ## Further reading
#
# - McCandlish, Kaplan, Amodei, *An Empirical Model of Large-Batch Training*, 2018, section 2.2 and
#   appendix A: the critical batch size, and how to measure it.
# - Chowdhery et al., *PaLM*, 2022, appendix B: MFU and its conventions.
# - Kaplan et al., *Scaling Laws for Neural Language Models*, 2020, section 2.1: counting FLOPs.
# - Llama Team, *The Llama 3 Herd of Models*, 2024, section 3.3: a real run's hardware and MFU.
# - Goyal et al., *Accurate, Large Minibatch SGD*, 2017, section 2.2: warm-up.
# - Olsson et al., *In-context Learning and Induction Heads*, 2022, argument 1: the cliff of large
#   models.
