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
# # Mixed precision: 16 bits where they are enough
#
# **55 minutes. No GPU. Exercises 10.1 to 10.5.**
#
# *You need:* chapter 2's 16 bytes per parameter, chapter 4's averaged gradients, and for one of the
# traps chapter 6's optimizer state divided over ranks.
#
# *You will be able to:*
# - **predict** which numbers a 16-bit or 8-bit format loses, and what the training loses with them;
# - **choose** which format holds parameters, gradients, sums and what the optimizer keeps;
# - **catch** an overflow that one rank sees and the others do not.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import math
import tempfile
import textwrap
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from minitron import cost
from minitron.launch import RankError, run

# %%
from minitron.comm.agreement import ALONE
from minitron.comm.collectives import (
    all_gather_single, all_reduce, all_reduce_doubling, all_reduce_ring, reduce_scatter_single,
)
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.corpus.stories import write_stories
from minitron.corpus.story_grammar import VOCABULARY
from teaching.check import check
from teaching.figures import crossing, curves, memory_bars, show
from teaching.figures_numbers import number_line, ranges
from teaching.figures_precision import exponent_histogram, one_weight
from teaching.floats import flushed
from teaching.widgets import number_line_explorer
from minitron.dataset import TokenDataset

# %%
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.proof.oracle import assert_same_training
from minitron.model.transformer import Transformer, initialize
from minitron.plan.hardware import DEVICES
from minitron.parallel.grid import Grid
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallelize import build, lay_out
from minitron.precision import PRECISIONS, LossScale, MasterWeights, low_precision
from minitron.step import (
    accumulate_gradients, accumulate_over_ranks, learning_rate, make_optimizer, summed_loss,
    train_step,
)


# %%
from minitron.model.float8 import Float8Matmuls, quantize

torch.set_num_threads(1)  # the same losses every time
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
GB = 1e9

# %% [markdown]
# ## 1. The question
#
# In float32 a parameter costs 16 bytes in training: the weight, its gradient, and Adam's two
# averages. PyTorch has a line that halves all of it: `model.half()`. There is another 16-bit
# format, bfloat16, and a line for it: `model.bfloat16()`. GPUs multiply both faster than float32.
#
# So why not? Here is the story model of chapter 1, made smaller, and a training loop. Everything is
# in the dtype that the function is given: weights, activations, gradients and averages.

# %%
workspace = tempfile.TemporaryDirectory()
folder = Path(workspace.name) / "stories"
write_stories(folder, num_tokens=100_000)
S, B, num_steps = 64, 4, 120
dataset = TokenDataset(folder, "train", S, seed=0)
shape = ModelConfig("llama", len(VOCABULARY), S, 2, 64, 4, 4, 168)
adamw = partial(torch.optim.AdamW, betas=(0.9, 0.98))


def story_model(dtype=f32):
    model = Transformer(shape)
    initialize(model, seed=0)
    return model.to(dtype)


# %%
def add_gradients(model, step, factor=1 / (S * B)):
    """Add `factor` times the gradient of the summed loss of batch `step`; returns the mean loss."""
    tokens = dataset.batch(step * B, B)
    summed = summed_loss(model(tokens[:, :-1]).float(), tokens[:, 1:])
    (summed * factor).backward()
    return summed.item() / (S * B)


def set_rate(optimizer, step, peak=3e-3):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, peak, peak / 100, 20, num_steps)


def smoothed(losses):
    return sum(losses[-20:]) / 20


# %%
def train_all_in(dtype, skipped=()):
    """The model and its losses, until one is NaN; the steps in `skipped` move no weight."""
    model, losses = story_model(dtype), []
    optimizer = adamw(model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        losses.append(add_gradients(model, step))
        if math.isnan(losses[-1]):
            break
        set_rate(optimizer, step)
        if step not in skipped:
            optimizer.step()
    return model, losses


# %% tags=["output-question"]
trained = {dtype: train_all_in(dtype) for dtype in (f32, bf16, f16)}
print("everything in     bytes a parameter   steps   loss (last 20)")
for dtype, (_, losses) in trained.items():
    print(f"{dtype!s:17} {4 * dtype.itemsize:17} {len(losses):7} {smoothed(losses):16.3f}")

# %% [markdown]
# float16 fails at once: after one step its loss is NaN, not a number. bfloat16 trains, but to a
# higher loss than float32 in the same number of steps. What is lost, and where? At the end of the
# chapter the matrix products are in 16 bits, or even in 8, and the loss is that of float32.

# %% [markdown]
# ## 2. Estimate
#
# A float is a sign, an exponent of e bits and a mantissa of m bits:
#
# $$\pm\; 2^{E}\,\times\,1.\underbrace{b_1 b_2 \ldots b_m}_{\text{mantissa}}$$
#
# The exponent says between which powers of two the number lies, the mantissa divides the space
# between the two into $2^m$ equal steps. So the exponent's bits are **range**, the mantissa's are
# **precision**. With $b = 2^{e-1} - 1$, E goes from 1 - b to b, so about half of the powers of two
# are below 1. Of the $2^e$ codes of the exponent two are left. One is for infinity and NaN. The
# other is for zero and for the numbers below the smallest power of two: there the steps keep the
# length that they have right above it, down to zero. These numbers are called **subnormal**.
#
# **Predict.** float16 has 5 bits of exponent, bfloat16 has 8, as float32. Each has 16 bits in all.
# What is the largest number of each, the smallest above zero, and the next one after 1?

# %%
BITS = {f32: (8, 23), bf16: (8, 7), f16: (5, 10), e5m2: (5, 2), e4m3: (4, 3)}


def limits(e, m):
    """Largest number, smallest normal, smallest of all, and the step from 1 to the next."""
    b = 2 ** (e - 1) - 1
    return (2 - 2.0**-m) * 2.0**b, 2.0 ** (1 - b), 2.0 ** (1 - b - m), 2.0**-m


def limits_found(dtype):
    """What PyTorch says of them; the smallest of all is the one whose last bit alone is set."""
    info = torch.finfo(dtype)
    pattern = torch.ones((), dtype={4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize])
    return info.max, info.smallest_normal, pattern.view(dtype).item(), info.eps


# %% tags=["output-formats", "nbval-check-output"]
print("              exponent  mantissa    largest   smallest normal   smallest  step at 1")
for dtype, (e, m) in BITS.items():
    predicted, found = limits(e, m), limits_found(dtype)
    print(f"{str(dtype)[6:]:15} {e:6} {m:9} {predicted[0]:10.5g} {predicted[1]:17.1e} "
          f"{predicted[2]:10.1e} {predicted[3]:10.3g}")
    for ours, theirs in zip(predicted, found, strict=True):
        if ours != theirs:
            print(f"{'':15} but PyTorch says {theirs:g}, not {ours:g}")

# %% [markdown]
# bfloat16 is float32 with its last 16 bits cut off: the same exponents, but two to three decimal
# digits in place of seven. float16 has three more bits of mantissa, and pays for them with range:
# it ends at 65,504, and there is nothing below 6e-8.
#
# The formula is wrong for e4m3. Four bits of exponent give so small a range that its authors did
# without infinity: the last exponent holds numbers too, but for one code of either sign, which is
# NaN (Micikevicius et al. 2022, section 3).

# %% [markdown]
# ## 3. Picture
#
# Bits and ranges, side by side. Equal distances on the axis are equal factors; the pale parts are
# subnormal numbers.

# %% tags=["figure-ranges"]
show(ranges(), alt=(
    "bfloat16 reaches as far as float32 and is coarse; float16 is finer and ends early on both "
    "sides; e5m2 has the range of float16 with two bits of mantissa."
))

# %% [markdown]
# And the numbers themselves, around 1. The ring is the number that a format has for 1.05:

# %% tags=["figure-line"]
show(number_line(("fp32", "fp16", "bf16", "e4m3", "e5m2"), 0.98, 1.3, at=1, plus=0.05), alt=(
    "From 1 on, bfloat16 goes in steps of 1/128, float16 in steps of 1/1024. In e4m3 and e5m2, 1 + "
    "0.05 is 1."
))

# %% [markdown]
# **Predict.** Above 1 the steps of bfloat16 are 1/128. From 2 on they are twice as long, from 4 on
# four times. What is the first integer that bfloat16 cannot hold?
#
# <details><summary>Answer</summary>
#
# 257. From 128 on the steps are 1, from 256 on they are 2. For float16 it is 2,049, for float32
# 16,777,217.
#
# </details>

# %% tags=["figure-explorer"]
number_line_explorer()

# %% [markdown]
# ## 4. By hand
#
# Two things can go wrong: a number lies *between* two numbers of the format, or *outside* its
# range, too large or too small.
#
# ### Too coarse: a weight that does not move
#
# **Predict.** A weight is 1, and every step adds 0.001 to it. Where is it after 100 steps in
# float32? In bfloat16? And with a float32 copy that the optimizer updates, while the model reads
# that copy rounded to bfloat16?

# %%
update, steps = 0.001, 100


def alone(dtype):
    weight, history = torch.ones((), dtype=dtype), [1.0]
    for _ in range(steps):
        weight += update
        history.append(weight.item())
    return history


master = torch.tensor(alone(f32))
histories = {"float32": alone(f32), "bfloat16": alone(bf16),
             "bfloat16, with a master": master.to(bf16).tolist()}

# %% tags=["figure-oneweight"]
show(one_weight(histories, grid="bf16"), alt=(
    "In bfloat16 the weight stays at 1 for ever. With a float32 master it climbs, in steps of "
    "1/128, along the line of float32."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# 1.1, and 1. Each sum is rounded to the nearest number: 1.001 is nearer to 1 than to 1.0078, so
# *every* update is lost, and so are a hundred of them. What is smaller than half a step vanishes.
# The copy keeps what is not yet visible: this is the **master weight** (Micikevicius et al. 2018,
# section 3.1).
#
# </details>
#
# How often does this happen? A step of AdamW moves a weight by about its learning rate. Take the
# weights of the story model, and count those that stay where they are.


# %%
weights = torch.cat([w.detach().flatten() for w in trained[f32][0].parameters()])


def lost(dtype, rate):
    """The share of the weights that do not move when `rate` is added."""
    held = weights.to(dtype)
    return ((held.float() + rate).to(dtype) == held).float().mean()


# %% tags=["output-lost", "nbval-check-output"]
print("learning rate   updates lost in bfloat16   in float16")
for rate in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
    print(f"{rate:13.0e} {lost(bf16, rate):26.1%} {lost(f16, rate):12.1%}")

# %% [markdown]
# Large runs end at small rates: Llama 3 405B went from 8e-5 down to 8e-7 (Llama Team 2024, section
# 3.4.1). At that rate bfloat16 alone would move hardly any weight of the size of these.
#
# Now the story model with masters. After the backward pass the gradients go to the masters, the
# optimizer updates these, and the weights become the masters, rounded.


# %%
def to_nearest(master):
    return master.to(bf16)


@torch.no_grad()
def copy_weights(weights, masters, rounded):
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(rounded(master))


# %%
def with_masters(dtype):
    model = story_model(dtype)
    weights = list(model.parameters())
    return model, weights, [weight.detach().float().requires_grad_() for weight in weights]


def copy_gradients(weights, masters, scale=1.0):
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.float() / scale


# %%
def train_with_masters(rounded=to_nearest, keep=True):
    """The losses; without `keep` the masters are made anew from the weights in every step."""
    model, weights, masters = with_masters(bf16)
    optimizer, losses = adamw(masters), []
    for step in range(num_steps):
        if not keep:
            copy_weights(masters, weights, torch.Tensor.float)
        model.zero_grad()
        losses.append(add_gradients(model, step))
        copy_gradients(weights, masters)
        set_rate(optimizer, step)
        optimizer.step()
        copy_weights(weights, masters, rounded)
    return losses


# %% tags=["output-masters"]
losses = {"float32": trained[f32][1], "bfloat16": trained[bf16][1],
          "bfloat16, with masters": train_with_masters(),
          "masters forgotten": train_with_masters(keep=False)}
print("                         bytes a parameter   loss")
for (name, line), size in zip(losses.items(), (16, 8, 16, 12), strict=True):
    print(f"{name:24} {size:17} {smoothed(line):8.3f}")

# %% [markdown]
# With masters, the loss is that of float32. The last line has everything but their memory: Adam's
# averages in float32, the update computed in float32, and then only its rounded result is kept. It
# is as bad as bfloat16 alone. What counts is that the copy *stays*.
#
# The bytes are as many as in float32: 2 for the weight, 2 for the gradient, 4 for the master, 8 for
# Adam. Mixed precision saves no memory in the training state. It saves half of what the forward and
# the backward pass read, keep and send: weights, activations, gradients.

# %% [markdown]
# ### Rounding at random
#
# Is there a way without the copy? 1.001 lies an eighth of the way from 1 to the next number of
# bfloat16. So go up in an eighth of all cases, and stay in the others. Now and then the weight
# moves by too much, but *on average* by the right amount. This is **stochastic rounding** (Gupta et
# al. 2015, section 3.1).
#
# bfloat16 is the first half of a float32. Add a random number to the second half, then cut it off:
# the larger the second half, the more often the sum carries over into the first.


# %%
def at_random(x):
    """Round float32 to bfloat16, up or down: the nearer of the two the more likely."""
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, generator=generator)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(f32).to(bf16)


generator = torch.Generator().manual_seed(0)
many = torch.full((100_000,), 1.001)
hundred, history = torch.ones(100, dtype=bf16), [torch.ones(100)]  # weights
for _ in range(steps):
    hundred = at_random(hundred.float() + update)
    history.append(hundred.float())

# %% tags=["figure-random"]
rounded = at_random(many).float()
print(f"1.001 in bfloat16, on average: {many.to(bf16).float().mean():.4f} to the nearest, "
      f"{rounded.mean():.4f} at random: up in {(rounded > 1).float().mean():.0%} of all cases")
show(one_weight({"float32": histories["float32"], "to the nearest": histories["bfloat16"],
                 "at random": [weights[0].item() for weights in history],
                 "mean of 100": [weights.mean().item() for weights in history]}), alt=(
    "Rounded at random, one bfloat16 weight climbs in jumps, and the mean of a hundred along the "
    "line of float32, without masters."
))

# %% tags=["output-random"]
losses["no masters, at random"] = train_with_masters(at_random, keep=False)
for name in ("float32", "masters forgotten", "no masters, at random"):
    print(f"{name:24} {smoothed(losses[name]):6.3f}")

# %% [markdown]
# 12 bytes for each parameter, and a loss near that of float32. What it costs is noise, in every
# weight, in every step. AWS's Trainium, for one, can round like this in hardware (AWS Neuron
# documentation, *Trainium architecture*). The recipes of this package keep masters.

# %% [markdown]
# ### Sums that stop
#
# Add 1 to a sum, a hundred thousand times.
#
# **Predict.** Where does the sum end in float16? In bfloat16?


# %%
def count_up(dtype, times=100_000):
    total, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    for _ in range(times):
        total += one
    return total.item()


# %% tags=["output-ones", "nbval-check-output"]
for dtype in (f32, f16, bf16):
    print(f"{dtype!s:15} one by one {count_up(dtype):9,.0f}   "
          f"torch.sum {torch.ones(100_000, dtype=dtype).sum().item():9,.0f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# 2,048 and 256. There the steps become 2, so 1 is half a step, and a tie goes to the neighbor
# whose last bit is 0: down.
#
# </details>
#
# `torch.sum` does better: it adds in float32 and rounds once, at the end (for float16, 100,000 is
# beyond the largest number). Matrix products do the same: 16-bit operands, 32-bit sums. The rule of
# mixed precision is this: **multiply in 16 bits, add in 32** (Micikevicius et al. 2018, section
# 3.3). Kernels keep it for you, nearly: on GPUs PyTorch lets a product that is split into partial
# sums round these, unless `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` is
# False. Where *you* add, you have to keep the rule: gradients over micro-batches, and gradients
# over ranks.
#
# `.grad` has the dtype of its parameter, so with bfloat16 weights autograd adds in bfloat16.
# Since version 2.10 of PyTorch that can be changed: `parameter.grad_dtype = torch.float32`.
#
# **Predict.** The gradient of 64 micro-batches, one sequence each. Added up in bfloat16, by how
# much is it off from the sum in float32?


# %%
def accumulated(dtype, counts=(1, 2, 4, 8, 16, 32, 64)):
    """The gradients of sequences in a bfloat16 model, added up in `dtype`, by their number."""
    model, seen = story_model(bf16), {}
    for weight in model.parameters():
        weight.grad_dtype = dtype
    for index in range(max(counts)):
        tokens = dataset.batch(index, 1)
        summed_loss(model(tokens[:, :-1]).float(), tokens[:, 1:]).backward()
        if index + 1 in counts:
            parts = [weight.grad.double().flatten() for weight in model.parameters()]
            seen[index + 1] = torch.cat(parts)
    return seen


# %% tags=["output-accumulated"]
coarse, fine = accumulated(bf16), accumulated(f32)
print("micro-batches   added in bfloat16: off by")
for count, exact in fine.items():
    print(f"{count:13} {(coarse[count] - exact).norm() / exact.norm():18.2%}")

# %% [markdown]
# Even one micro-batch adds: embedding and head share their weight, and each has a gradient for it.
# Then every addition rounds a sum that has become larger. Accumulating in float32 costs 2 bytes
# more for each parameter, 18 in all. Llama 3 405B did so (Llama Team 2024, section 3.3.2).

# %% [markdown]
# ### Too small: gradients that are zero
#
# So much for numbers between two numbers. Which numbers are outside the range? Not the weights, as
# the first line below will show. Gradients are small, and a large run makes them smaller: the loss
# is a mean over all tokens of a step, so each token's gradient is divided by their number. Llama 3
# 405B began with 4 million tokens a step (Llama Team 2024, section 3.4.1).
#
# We take a batch of 256 tokens, as one micro-batch of so large a step, and look at two kinds of
# gradients: those of the linear layers' outputs, which travel back through the model, and those of
# the weights.


# %%
def gradients(model, factor):
    """All gradients of outputs of linear layers (n,), and all of weights (P,)."""
    outputs = []
    hooks = [layer.register_full_backward_hook(lambda _, grads, out: outputs.append(out[0]))
             for layer in model.modules() if isinstance(layer, nn.Linear)]
    model.zero_grad()
    add_gradients(model, num_steps, factor)
    for hook in hooks:
        hook.remove()
    weights = [weight.grad.flatten() for weight in model.parameters()]
    return {"outputs": torch.cat([grad.flatten() for grad in outputs]),
            "weights": torch.cat(weights)}


# %% [markdown]
# **Predict.** 256 tokens a step: which share of the outputs' gradients becomes zero in float16? And
# with 4 million?

# %% tags=["output-flushed"]
model = trained[f32][0]
print(f"weights that become zero in float16: {flushed(weights, f16):.1%}\n")
print("gradients        become zero in float16         in bfloat16")
print("tokens a step    of outputs   of weights        of outputs")
for num_tokens in (S * B, 65_536, 4_000_000):
    grads = gradients(model, 1 / num_tokens)
    print(f"{num_tokens:13,} {flushed(grads['outputs'], f16):13.1%} "
          f"{flushed(grads['weights'], f16):12.1%} {flushed(grads['outputs'], bf16):17.1%}")

# %% tags=["figure-histogram"]
large_step = 4_000_000
tiny = gradients(model, 1 / large_step)
show(exponent_histogram(tiny), alt=(
    "Nearly all gradients of outputs, and many of those of weights, lie below float16's "
    "smallest number. bfloat16 holds them all."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Hardly any, and nearly all. bfloat16 loses none of them: it has the exponents of float32.
#
# </details>
#
# Look at the other end of the picture. From the largest gradient up to 65,504, float16 has a large
# empty range. Multiply the loss by a number, and by the chain rule all gradients are multiplied by
# it: the heap moves to the right. Divide the weights' gradients by it in float32, in the masters,
# and the training is the same. This is **loss scaling** (Micikevicius et al. 2018, section 3.2).
#
# **Predict.** Now find a scale by hand: by which power of two would you multiply?

# %% tags=["output-byhand"]
print("scale    zero in float16   infinite")
for power in (0, 8, 16, 24, 32, 36, 40):
    scaled = tiny["outputs"] * 2.0**power
    print(f"2^{power:<6} {flushed(scaled, f16):13.1%} {scaled.half().isinf().float().mean():10.1%}")

# %% tags=["figure-scaled"]
show(exponent_histogram(tiny, loss_scale=2.0**24), alt=(
    "Times 2^24, the gradients lie in the range of float16, with room to its largest number. The "
    "outline is where they were."
))

# %% [markdown]
# A power of two changes the exponent alone. As long as a gradient is a normal number, no bit of its
# mantissa is lost on the way there and back.
#
# Between too small and too large there is room, but it moves while the model trains. So let the
# training look for it. Begin high. If a gradient is infinite or NaN, throw this step away and halve
# the scale; if none was for a while, double it. That is **dynamic** loss scaling, as in PyTorch's
# `torch.amp.GradScaler`:


# %%
class Scaler:
    def __init__(self, value, interval=30):
        self.value, self.interval, self.good = value, interval, 0

    def accepts(self, grads):
        finite = all(grad.isfinite().all() for grad in grads)
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good % self.interval == 0:
            self.value *= 2
        return finite


# %%
def train_float16(scaler):
    """The losses and the scale at each step, as a micro-batch of a large step."""
    model, weights, masters = with_masters(f16)
    # AdamW divides by the root of the averaged squares plus eps: 1e-8 would be far above it here
    optimizer, losses, scales = adamw(masters, eps=1e-16), [], []
    for step in range(num_steps):
        model.zero_grad()
        scales.append(scaler.value)
        losses.append(add_gradients(model, step, scaler.value / large_step))
        copy_gradients(weights, masters, scaler.value)
        set_rate(optimizer, step)
        if scaler.accepts(master.grad for master in masters):
            optimizer.step()
            copy_weights(weights, masters, torch.Tensor.half)
    return losses, scales


# %% [markdown]
# **Predict.** Without scaling (an infinite interval, a scale of 1): does the loss stop falling?

# %% tags=["output-scaling"]
unscaled, _ = train_float16(Scaler(1.0, interval=math.inf))
scaled, scales = train_float16(Scaler(2.0**34))
skipped = [step for step in range(num_steps - 1) if scales[step + 1] < scales[step]]
print(f"float32                          {smoothed(trained[f32][1]):6.3f}")
print(f"float16 without scaling          {smoothed(unscaled):6.3f}, at first {unscaled[0]:.3f}")
print(f"float16 with scaling             {smoothed(scaled):6.3f}, {len(skipped)} steps skipped")
print(f"float32 that skips the same steps {smoothed(train_all_in(f32, skipped)[1]):5.3f}")

# %% tags=["figure-scale"]
relative = [scale / 2.0**30 for scale in scales]
show(curves(range(num_steps), {"scale": relative}, "step", "loss scale / 2^30"), alt=(
    "The scale falls until nothing overflows, and tries twice as much after every 30 good steps."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Yes, near where it began. Most gradients are zero, the others have lost most of their bits, and
# AdamW makes full steps of them all the same.
#
# </details>
#
# With scaling, float16 ends above float32. Is that rounding? No: float32 that leaves out the same
# steps ends at the same loss. Four steps of 120 were thrown away to find the scale; a run of a
# hundred thousand would not notice them.
#
# bfloat16 needs none of this: it has float32's exponents (Kalamkar et al. 2019).
#
# And the NaN of section 1? There Adam's averages had 16 bits as well. AdamW divides by the root of
# its averaged squares, plus an epsilon of 1e-8.
#
# **Predict.** What becomes of both in float16?

# %% tags=["output-division"]
model = story_model(f16)
add_gradients(model, 0)
grads = torch.cat([weight.grad.flatten() for weight in model.parameters()])
squares = (1 - 0.98) * grads.square()  # the average after one step
print(f"gradients that are zero {(grads == 0).float().mean():9.1%}")
print(f"averages that are zero  {(squares == 0).float().mean():9.1%}")
print(f"epsilon                 {torch.tensor(1e-8, dtype=f16).item():9}")

# %% [markdown]
# The square of a small number is much smaller. Most averages are zero, and so is epsilon: the first
# step divides by zero. So Adam's averages have 32 bits in every recipe of the package.

# %% [markdown]
# ## 5. Traps
#
# ### Unscale, then clip
#
# Two lines stand between the backward pass and the optimizer: divide by the scale, and clip the
# gradient's norm to 1.
#
# **Predict.** In the other order, what does the clip see, and what arrives at the optimizer? Does
# the loss show it?


# %%
def unscale(weights, scale):
    torch._foreach_div_([weight.grad for weight in weights], scale)


def clip(weights, scale):
    nn.utils.clip_grad_norm_(weights, 1.0)


def norm_of(weights):
    return nn.utils.get_total_norm([weight.grad for weight in weights]).item()


# %%
def train_clipped(order, make_optimizer, peak, scale=2.0**16):
    """The losses, and the largest norm that the optimizer was given."""
    weights = list((model := story_model()).parameters())
    optimizer, losses, norms = make_optimizer(weights), [], []
    for step in range(num_steps // 2):
        optimizer.zero_grad()
        losses.append(add_gradients(model, step, scale / (S * B)))
        for action in order:
            action(weights, scale)
        norms.append(norm_of(weights))
        set_rate(optimizer, step, peak)
        optimizer.step()
    return losses, max(norms)


# %% tags=["output-clip"]
print("                          loss            largest norm that arrived")
for optimizer, peak in ((partial(torch.optim.SGD, lr=0.0), 0.5), (adamw, 3e-3)):
    for order in ((unscale, clip), (clip, unscale)):
        line, norm = train_clipped(order, optimizer, peak)
        print(f"{optimizer.func.__name__:6} {order[0].__name__:7} first  {line[0]:.2f} to "
              f"{smoothed(line):.2f}   {norm:16.2g}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The clip sees a norm that is 65,536 times too large, and cuts every gradient down to 1. After the
# division 1/65,536 is left. SGD stands still. AdamW divides the scale of a gradient away, as in
# chapters 4 and 9, all but the part that its epsilon sees. So the loss falls, a little slower, as
# if the learning rate were badly chosen. The norm tells: log the one that the optimizer gets.
#
# </details>

# %% [markdown]
# ### An overflow that one rank sees
#
# ZeRO 1, float16, four ranks, twelve weights, of which each rank owns three. After the
# reduce-scatter a rank has the sum of its own part of the gradients, and nothing of the others'.
# Then it checks its gradients, as `Scaler` does above.
#
# The gradient of every weight is 1, on every rank, times the scale. But in step 2, counted from 0,
# the gradient of weight 4 overflows on rank 3.
#
# **Predict.** Who sees the infinity? What does that rank do, and the others?


# %%
def scaled_gradients(group, step, scale):
    grads = torch.full((3 * group.size(),), scale)
    if step == 2 and group.rank() == 3:
        grads[4] = math.inf
    return grads


# %%
def zero_steps(group, decide, num_steps=5):
    """This rank's scale in the end, and all weights."""
    size, scale = group.size(), 2.0**16
    weights, own_grad = torch.zeros(3 * size), torch.empty(3)
    own = weights.chunk(size)[group.rank()]
    for step in range(num_steps):
        reduce_scatter_single(own_grad, scaled_gradients(group, step, scale), group)
        accepts, sends = decide(own_grad, group)
        own -= accepts * (own_grad / (size * scale)).nan_to_num(posinf=0.0)
        scale *= 1.0 if accepts else 0.5
        if sends:
            all_gather_single(weights, own.clone(), group)
    return scale, weights


# %% [markdown]
# The obvious way is to leave the step early: `if not finite: continue`.


# %%
def leave_early(own_grad, group):
    finite = bool(own_grad.isfinite().all())
    return finite, finite


def verdict(function, *args, **options):
    try:
        return function(*args, **options)
    except (AssertionError, RankError) as error:
        return textwrap.fill(str(error).splitlines()[0], 90, subsequent_indent="  ")


# %% tags=["output-early"]
print(verdict(run, zero_steps, 4, leave_early, timeout=5))

# %% [markdown]
# The launcher names the rank that is elsewhere. On a cluster that would be a hang, at a random hour
# of a long run. So the rank must not leave: it does not step, but takes part in everything that is
# sent. `each_for_itself` does that below; `together` asks all ranks first.


# %%
def each_for_itself(own_grad, group):
    return bool(own_grad.isfinite().all()), True


def together(own_grad, group):
    squares = own_grad.square().sum()  # infinite, if one of them is
    all_reduce(squares, group)
    return bool(squares.isfinite()), True


# %% tags=["output-nan", "nbval-check-output"]
print("                 scale of each rank, 2^     a weight of each rank's part     ranks alike")
for decide in (each_for_itself, together):
    scales, by_rank = zip(*run(zero_steps, 4, decide), strict=True)
    alike = all(torch.equal(weights, by_rank[0]) for weights in by_rank)
    print(f"{decide.__name__:16} {str([int(math.log2(scale)) for scale in scales]):26} "
          f"{str([round(w, 3) for w in by_rank[0][::3].tolist()]):32} {alike}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Rank 1 owns weights 3 to 5, and it alone sees that the sum is infinite. It leaves, and the others
# wait for its part. If it stays, it skips alone and halves its own scale. The others step. From
# then on four ranks add gradients of two different scales, and each divides the sum by its own. So
# in each of the last two steps the others' weights move by (3 + 1/2) / 4 = 0.875, and those of rank
# 1 by twice as much, where 1 is right. No error, and all ranks hold the same weights.
#
# </details>
#
# Five steps of length 1, one of them skipped: all weights must be -4. So all ranks have to decide
# alike, and that costs nothing new: clipping needs the norm over all ranks anyway (chapter 6), and
# the norm of a vector with an infinity or a NaN in it is infinite or NaN. PyTorch's
# `ShardedGradScaler` all-reduces a flag instead. One version copied the flag before it had arrived,
# for gradients kept on the CPU, and ranks missed the overflow of another (pytorch/pytorch#115710).

# %% [markdown]
# ### Where 16 bits are not enough inside a layer
#
# Three small pieces of a Transformer, written out in 16 bits.
#
# **Predict.** Which goes wrong in float16, which in bfloat16?


# %%
def root_mean_square(x):
    return x / x.square().mean().sqrt()


def softmax(x):
    return x.exp() / x.exp().sum()


activations, logits = torch.full((64,), 300.0), torch.tensor([12.0, 11.0, 10.0])
positions = torch.arange(8192.0)

# %% tags=["output-inside", "nbval-check-output"]
print("                        norm of 300s   softmax of 12, 11, 10   different positions of 8,192")
for dtype in (f32, bf16, f16):
    probabilities = [round(p, 3) for p in softmax(logits.to(dtype)).tolist()]
    print(f"{dtype!s:15} {root_mean_square(activations.to(dtype))[0]:20.3g}   "
          f"{probabilities!s:23} {len(positions.to(dtype).unique()):9,}")
kernels = F.rms_norm(activations.half(), (64,))[0], F.softmax(logits.half(), 0)
print(f"float16, PyTorch's own {kernels[0]:13.3g}   {[round(p, 3) for p in kernels[1].tolist()]}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# In float16 the square of 300 is beyond 65,504, and so is the exponential of 12: infinity over
# infinity is NaN. In bfloat16 both are fine. But beyond 256 it does not have every integer:
# neighboring tokens get the same position, and would be turned by the same angle. Rotary tables in
# 16 bits have been a bug in real code (EleutherAI/gpt-neox#1003, huggingface/transformers#29285).
#
# </details>
#
# So norms and softmax are computed in float32, with inputs and outputs in 16 bits (Micikevicius et
# al. 2018, section 3.3). PyTorch's kernels do so inside; its softmax subtracts the largest logit as
# well. What you write out yourself has to do the same. In the package that is the rotary table, and
# the logits, which the loss gets as float32.

# %% [markdown]
# ### Gradients summed over many ranks in bfloat16
#
# An all-reduce of bfloat16 gradients sends half the bytes. But every rank that adds its summand
# rounds the sum.
#
# **Predict.** Four ranks, then a thousand: how does the error grow in a ring, where one sum goes
# through all ranks? And in a tree, where pairs of ranks add, then pairs of pairs?
#
# Let r be the relative error of one rounding, as a root mean square over all mantissas. In the ring
# the k-th of N roundings happens to a sum that has grown to the size of $\sqrt k$ summands, if
# these are independent. In a tree there are only $\log_2 N$ roundings on the way:
#
# $$\text{ring: } r \sqrt{N/2} \qquad\qquad \text{tree: } r \sqrt{\log_2 N}$$

# %%
# a rounding errs evenly by half a step, 2^-8 of a mantissa f from 1 to 2, as likely as 1/f
r = 2.0**-8 / math.sqrt(3) * math.sqrt(3 / 8 / math.log(2))
print(f"one rounding to bfloat16 is off by r = {r:.2%}")


def in_tree(parts):
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


# %%
def in_ring(parts):
    """The sum over ranks of (N, n), each chunk in the order of the ring."""
    N, n = parts.shape
    chunk = torch.arange(n) * N // n  # chunk c starts at rank c + 1 and ends at c
    order = (chunk + 1 + torch.arange(N)[:, None]) % N
    total, *others = parts.gather(0, order)
    for part in others:
        total = total + part
    return total


# %%
def of_rank(rank):
    """A gradient (4096,) in bfloat16."""
    return torch.randn(4096, generator=torch.Generator().manual_seed(rank)).to(bf16)


def by_ranks(group, reduce):
    summed = of_rank(group.rank())
    reduce(summed, group)
    return summed


# %% [markdown]
# First: do these two add in the order of real ranks, to the bit? Then one process can stand for a
# thousand.

# %% tags=["output-order", "nbval-check-output"]
parts = torch.stack([of_rank(rank) for rank in range(4)])
for name, reduce, summed_here in (("ring", all_reduce_ring, in_ring),
                                  ("tree", all_reduce_doubling, in_tree)):
    print(f"{name}: the bits of four real ranks", all(
        torch.equal(summed, summed_here(parts)) for summed in run(by_ranks, 4, reduce)))
print("ring and tree end with the same bits:", torch.equal(in_ring(parts), in_tree(parts)))


# %%
def error(summed, parts):
    exact = parts.double().sum(0)
    return ((summed.double() - exact).norm() / exact.norm()).item()


sizes, measured = [4, 16, 64, 256, 1024], {"ring": [], "tree": [], "float32, rounded once": []}
for N in sizes:
    parts = torch.stack([of_rank(rank) for rank in range(N)])
    sums = in_ring(parts), in_tree(parts), in_ring(parts.float()).to(bf16)
    for name, summed in zip(measured, sums, strict=True):
        measured[name].append(100 * error(summed, parts))

# %% tags=["figure-ring"]
predicted = {"ring": [100 * r * math.sqrt(N / 2) for N in sizes],
             "tree": [100 * r * math.sqrt(math.log2(N)) for N in sizes],
             "float32, rounded once": [100 * r for _ in sizes]}
show(crossing(sizes, predicted, "ranks", "error of the sum (%)", measured), alt=(
    f"The error of a bfloat16 sum grows with the root of the ranks in a ring, to "
    f"{measured['ring'][-1]:.1f} % at {sizes[-1]:,}, and hardly in a tree; summed in float32 it is "
    "that of one rounding."
))

# %% [markdown]
# Dots are measured, dashes predicted. The order of a ring, and so the bits of your run, depend on
# the number of ranks. Does an error of a few percent matter? A gradient is noisy anyway, since its
# samples are chosen at random. But this noise grows with the cluster, and twice the bytes remove
# it. Llama 3 405B reduced its gradients in float32 (Llama Team 2024, section 3.3.2).

# %% tags=["output-wire", "nbval-check-output"]
def bytes_of(group, dtype):
    with Ledger() as ledger:
        all_reduce_ring(of_rank(group.rank()).to(dtype), group)
    return ledger.bytes_sent()


for dtype in (bf16, f32):
    print(f"{dtype!s:15} {run(bytes_of, 4, dtype)[0]:7,} bytes from rank 0")

# %% [markdown]
# ## 6. The real one
#
# ### Recipes are data
#
# A **recipe** says which dtype holds what. It is one line of a table, and for a run it is one word:
# `--train.precision bf16`.

# %% tags=["output-recipes", "nbval-check-output"]
def short(dtype):
    names = {f32: "f32", bf16: "bf16", f16: "f16", e4m3: "e4m3", None: "-"}
    return names[dtype]


print("                 parameters  products  gradients  sent   master   bytes a parameter")
for name, precision in PRECISIONS.items():
    print(f"{name:16} {short(precision.parameters):11} {short(precision.compute):9} "
          f"{short(precision.gradients):10} {short(precision.reduction):6} "
          f"{short(precision.master):8} {precision.cost.total}")

# %% [markdown]
# `bf16-autocast` is the one line with float32 parameters and 16-bit products: PyTorch's
# `torch.autocast` converts each weight when it is used. Sums of products have 32 bits in all lines,
# and so have Adam's averages.
#
# And here are the two ideas of section 4, for any model. Find the line that lets a 16-bit gradient
# go before the next one is copied.

# %%
print(inspect.getsource(MasterWeights.take_gradients))
print(inspect.getsource(MasterWeights.copy_to_parameters))

# %%
print(inspect.getsource(LossScale.unscale))
print(inspect.getsource(LossScale.accepts))

# %% [markdown]
# `accepts` gets the norm over all ranks, the one number of the trap above. (A fake tensor has a
# shape and no values: that line is for rehearsals without data, as in chapter 3.) With ZeRO the
# masters are divided: each rank has those of its part.
#
# ### Eight bits
#
# e4m3 has 3 bits of mantissa and ends at 448, e5m2 has 2 and ends at 57,344. A loss scale moves
# gradients alone, all of them together. In so small a range that is not enough: weights and
# activations need a scale as well. So each tensor gets one of its own, from its largest value
# (Micikevicius et al. 2022, section 2):

# %%
print(inspect.getsource(quantize))

# %% [markdown]
# **Predict.** Normal random numbers, rounded to each format with its best scale: by how much are
# they off? And if one of the 65,536 numbers is 100,000?

# %% tags=["output-eight"]
x = torch.randn(65_536, generator=torch.Generator().manual_seed(0))
outlier = x.clone()
outlier[0] = 100_000.0
print("               off by   with an outlier: the others off by   become zero")
for dtype in (bf16, f16, e4m3, e5m2):
    errors = []
    for tensor in (x, outlier):
        values, scale = quantize(tensor, dtype)
        back = values.float() * scale
        errors.append(((back - tensor)[1:].norm() / tensor[1:].norm()).item())
    print(f"{str(dtype)[6:]:14} {errors[0]:6.2%} {errors[1]:36.2%} "
          f"{(back[1:] == 0).float().mean():13.2%}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Each bit less of mantissa doubles the error: with two or three bits it is a few percent. An
# outlier takes the top of the range, and pushes the others down. e4m3 has little range: they fall
# among its subnormal numbers, or become zero. e5m2 has room for both. Some recipes give each block
# of a tensor a scale of its own, so that an outlier spoils its block alone (DeepSeek-V3:
# DeepSeek-AI 2024, section 3.3.2).
#
# </details>
#
# Errors of several percent, in every number? A product sums many of them, with errors of either
# sign. Only the operands have 8 bits: parameters, gradients and what layers pass on keep 16, sums
# have 32. Gradients take e5m2, since they are spread further (Micikevicius et al. 2022, section 3):

# %%
print(inspect.getsource(Float8Matmuls.grad_weight))

# %% [markdown]
# Most processors have no 8-bit product. There the package **emulates** it: it rounds to 8 bits, and
# multiplies the rounded numbers in 16. That shows the numerics, not the speed.
#
# ### The oracle
#
# Is it the same training? First the logic. With masters and weights in float64 nothing is rounded
# away, and the oracle's 12 digits must hold. Then the same without the line that brings the masters
# back into the weights: the oracle must notice.

# %%
def with_float64_masters(model, group):
    parallel = apply_bucketed_data_parallel(model, group)
    return Grid(model, MasterWeights(model, torch.float64), data=parallel)


class NeverRounds(MasterWeights):
    def copy_to_parameters(self, *_):
        pass


def without_rounding(model, group):
    parallel = apply_bucketed_data_parallel(model, group)
    return Grid(model, NeverRounds(model, torch.float64), data=parallel)


# %% tags=["output-oracle"]
for apply in (with_float64_masters, without_rounding):
    found = verdict(assert_same_training, apply, 3, num_micro_batches=2)
    print(f"{apply.__name__}: {found or 'the same training'}")

# %% [markdown]
# In 16 bits the numbers cannot be the same to 12 digits: they are rounded. By how much may they
# differ? A rounding errs evenly by up to half a unit in the last place, u, so by $u / \sqrt 3$ in
# the mean square. k independent ones add up in squares: $u \sqrt{k / 3}$. The longest path through
# the model is a chain of about 12 roundings a block and 4 at its ends, forward and backward. Twice
# that is allowed. A sum that should have been a mean is off by 100 % or more, far outside.

# %%
num_roundings = 2 * (12 * shape.num_layers + 4)


def config_of(name, **parallel):
    return Config(shape, DataConfig(sequence_length=S), TrainConfig(precision=name),
                  ParallelConfig(**parallel))


def made(config, group=ALONE):
    """A model as its config says, what a step asks, and the forward pass."""
    cpu = torch.device("cpu")
    model, parallel = build(config, lay_out(config.parallel, group.size(), cpu), cpu)
    forward = low_precision(model, cpu, PRECISIONS[config.train.precision])
    return model, parallel, forward


# %%
def first_gradients(group, config):
    """Every full gradient of the first step, of the float32 master where there is one."""
    model, parallel, forward = made(config, group)
    index, count = parallel.data_part
    tokens = dataset.batch(0, B)[index::count]
    scale = LossScale().value if PRECISIONS[config.train.precision].scales_loss else 1.0
    accumulate_over_ranks(forward, [(tokens[:, :-1], tokens[:, 1:])], parallel, scale)
    return {name: grad / scale for name, grad in parallel.full_gradients().items()}


# %% tags=["output-tolerance"]
exact = first_gradients(ALONE, config_of("fp32"))
print("four ranks, ZeRO 1 and tensor parallelism      largest error   allowed")
for name in ("fp32", "bf16", "fp16", "fp8"):
    grads = run(first_gradients, 4, config_of(name, zero=1, tp=2), watch=False)[0]
    worst = max(((grads[key] - exact[key]).norm() / exact[key].norm()).item() for key in exact)
    print(f"{name:46} {worst:13.1e} "
          f"{PRECISIONS[name].tolerance(num_roundings):9.1e}")

# %% [markdown]
# ## 7. Measure
#
# ### Bytes
#
# **Predict.** In place of float32, bfloat16 with masters: which kind of bytes shrinks, and which
# grows?
#
# After one step (so that Adam has its averages), the meter watches a backward pass.


# %%
def held_by(name):
    """Bytes of the training state at the end of a backward pass, by the meter."""
    config = config_of(name)
    model, parallel, forward = made(config)
    optimizer = parallel.shard(make_optimizer(model, config.train, torch.device("cpu")))
    tokens = dataset.batch(0, 1)
    pairs = [(tokens[:, :-1], tokens[:, 1:])]
    train_step(forward, optimizer, pairs, 1e-3, 1.0, parallel)
    optimizer.zero_grad()
    with Meter(model, optimizer) as meter:
        accumulate_gradients(forward, pairs)
    return {kind: meter.now()[kind] for kind in ("parameter", "gradient", "optimizer state")}


# %%
P = cost.num_parameters(shape)
held = {name: held_by(name) for name in PRECISIONS}
formula = {f"{name}, formula": {
    "parameter": P * recipe.parameter, "gradient": P * recipe.gradient,
    "optimizer state": P * (recipe.master + recipe.optimizer_state)}
    for name in PRECISIONS for recipe in [PRECISIONS[name].cost]}

# %% tags=["figure-bars"]
print("largest difference of meter and formula:", max(
    f"{abs(held[name][kind] / formula[f'{name}, formula'][kind] - 1):.2%}"
    for name in held for kind in held[name]))
drawn = ("fp32", "bf16", "bf16-fp32-grads", "fp16")
show(memory_bars({name: held[name] for name in drawn},
                 {key: formula[key] for key in (f"{name}, formula" for name in drawn)}), alt=(
    "All recipes hold 16 bytes per parameter but one: 18 with float32 gradients. Only the shares "
    "differ; the masters are counted with the optimizer state."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# Parameters and gradients halve, and the masters take what was saved: 16 bytes again, or 18 with
# gradients in float32. What is saved is elsewhere: activations, messages, time.
#
# </details>
#
# This is the end of a backward pass. Then `take_gradients` makes them float32, one by one, and
# lets the 16-bit ones go: while the optimizer steps, all recipes with masters hold 18 bytes.
#
# ### The loss
#
# The recipes side by side, with the package's own step, on the same batches.


# %%
def train_recipe(name):
    config = config_of(name)
    model, parallel, forward = made(config)
    optimizer = parallel.shard(adamw(model.parameters()))
    loss_scale = PRECISIONS[name].make_loss_scale()
    losses = []
    for step in range(num_steps):
        tokens = dataset.batch(step * B, B)
        rate = learning_rate(step, 3e-3, 3e-5, 20, num_steps)
        loss, _ = train_step(forward, optimizer, [(tokens[:, :-1], tokens[:, 1:])], rate, 1.0,
                             parallel, loss_scale)
        losses.append(loss.item())
    return losses


# %% tags=["output-losses"]
by_recipe = {name: train_recipe(name) for name in PRECISIONS}
reference = smoothed(by_recipe["fp32"])
print("                   loss   from fp32")
for name, line in by_recipe.items():
    print(f"{name:16} {smoothed(line):6.3f} {smoothed(line) / reference - 1:+11.1%}")

# %% [markdown]
# Every recipe ends within a fraction of a percent of float32. (They all end lower than in section
# 1: this step clips the gradient, and that loop did not.) And float16 without a scale, in section
# 4, learned next to nothing.
#
# ### On real GPUs
#
# What does it buy? Take Llama 3 8B on 64 H100s: 8,192 tokens on each, ZeRO 1, 40 % of the peak.

# %% tags=["output-gpu", "nbval-check-output"]
llama, H100, N = cost.published_llama(32, 4096, 32, 8, 14336, 128256, 8192), \
    DEVICES["H100-SXM-80GB"], 64
flops, P_llama = 8192 * cost.training_flops_per_token(llama, 8192), cost.num_parameters(llama)
for name, peak in (("bf16", H100.bf16_flops), ("fp8", H100.fp8_flops)):
    print(f"products in {name:5} at least {flops / peak:.2f} s, at 40 % {flops / 0.4 / peak:.2f} s")
for dtype in (bf16, f32):
    sent = cost.ring_all_reduce_volume(P_llama, dtype.itemsize, N, 0).sent
    kept = cost.activation_bytes(llama, 1, 8192, bytes_per_value=dtype.itemsize)
    print(f"{dtype!s:15} gradients and weights sent {sent / GB:5.1f} GB, "
          f"{sent / H100.nic_bandwidth:.2f} s; activations {kept / GB:5.1f} GB")

# %% [markdown]
# The datasheet says twice the speed for 8 bits. What is left of it depends on what is not a
# product: norms, attention's softmax, the optimizer, and the rounding itself, which reads every
# operand twice, once for its largest value.
#
# ## 8. Recap
#
# 1. Exponent bits are range, mantissa bits are precision. bfloat16 is float32 cut in half; float16
#    is finer, and ends at 65,504 and at 6e-8.
# 2. An update of less than half a step vanishes. A float32 master keeps it, and rounding at random
#    keeps it on average. A copy that is thrown away after each step keeps nothing.
# 3. float16 loses small gradients, and bfloat16 does not. A loss scale moves them into the range;
#    a dynamic one finds its way by overflowing now and then.
# 4. Multiply in 16 bits, add in 32: for sums over micro-batches and ranks the choice is yours.
# 5. Unscale before you clip, and decide by the norm over all ranks: an overflow is often seen by
#    one alone.
#
# ## Exercises
#
# Write your answers into `exercises/ch10_mixed_precision.py`, save, and run the cell. In a
# terminal, `minitron hint 10.1` gives hints in three steps.
#
# **10.1 Find the underflow** (20 minutes): what float16 loses, and the scale that saves it.

# %%
check("10.1")

# %% [markdown]
# **10.2 A dynamic loss scaler** (25 minutes): unscale, clip, step or skip.

# %%
check("10.2")

# %% [markdown]
# **10.3 A step with master weights** (20 minutes): gradients there, weights back.

# %%
check("10.3")

# %% [markdown]
# **10.4 Overflow on one rank** (20 minutes): all ranks skip together.

# %%
check("10.4")

# %% [markdown]
# **10.5 Eight bits with a scale** (20 minutes): quantize, and get back.

# %%
check("10.5")

# %% [markdown]
# ## Further reading
#
# - Micikevicius et al., *Mixed Precision Training*, ICLR 2018: section 3 (masters, loss scaling,
#   sums in float32).
# - Kalamkar et al., *A Study of BFLOAT16 for Deep Learning Training*, 2019.
# - Micikevicius et al., *FP8 Formats for Deep Learning*, 2022: sections 2 (scales) and 3 (formats).
# - Gupta et al., *Deep Learning with Limited Numerical Precision*, 2015: section 3.1, rounding at
#   random.
# - Llama Team, *The Llama 3 Herd of Models*, 2024: sections 3.3.2 (sums in float32) and 3.4.1.
# - DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024: section 3.3, a model trained in 8 bits.
