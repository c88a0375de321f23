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
# # 5. Ring all-reduce: every link carries the same load
#
# **50 minutes. No GPU. [Exercises 5.1](exercise:5.1) to 5.4.**
#
# *You need:* `run(function, 4)` from [chapter 4](chapter:4) and the reason why ranks that read
# different data need the sum of their gradients.
#
# *You will be able to:*
# - **build** an all-reduce from sends and receives, with the fewest bytes possible;
# - **catch** a ring that computes the correct sum but sends too much, and one that hangs;
# - **predict** how long an all-reduce takes, on your machine from two measured numbers, and judge
#   such a prediction for a cluster.
#
# *The way there:*
# - **Sections 1 to 4:** the bytes of an all-reduce, counted, drawn and sent by hand;
# - **Sections 5 and 6:** rings that are wrong, and the package's;
# - **Section 7:** seconds, on your machine and on real GPUs.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the answer.

# %%
import torch
import torch.distributed as dist

from minitron import cost
from minitron.comm.collectives import (
    all_gather_ring, all_reduce_doubling, all_reduce_halving, all_reduce_naive, all_reduce_ring,
    pass_on, reduce_scatter_ring,
)
from minitron.launch import RankError, run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.ledger import Ledger
from teaching.check import check
from teaching.claims import claim
from teaching.figures import crossing, curves, plain_bytes, ring_frames, scaling, show, wire
from teaching.figures_patterns import message_patterns
from teaching.lab import ch05 as lab, show_source, show_text
from teaching.widgets import ring_explorer

torch.set_num_threads(1)
MB, GB = 1e6, 1e9

# %% [markdown]
# ## 1. The question
#
# Llama 2 7B trains on 64 GPUs. Each GPU has processed its own part of the batch and holds its own
# gradient. Before the optimizer step, all 64 need the sum, which takes an
# [all-reduce](word:all-reduce). Each GPU is one [rank](word:rank), and the obvious plan is the
# **naive** one: every rank sends its gradient to rank 0, which adds them up and sends the sum back.
# How long does that take, if each GPU's link to the network carries 50 GB/s in each direction?

# %% tags=["output-question", "nbval-check-output"]
llama, num_gpus, link = cost.PUBLISHED["Llama 2 7B"], 64, 50 * GB
gradient_bytes = 2 * cost.num_parameters(llama)  # 16-bit values
center = cost.naive_all_reduce_seconds(gradient_bytes, num_gpus, 0, link)
flops = 4096 * cost.training_flops_per_token(llama, 4096)
print(f"one gradient: {gradient_bytes / GB:.1f} GB")
print(f"the sum, through rank 0: {center:.1f} s")
print(f"computing it, from 4,096 tokens per GPU at 400 TFLOP/s: {flops / 400e12:.2f} s")

# %% [markdown]
# The GPUs compute for half a second, then communicate for more than half a minute, while all links
# but rank 0's are almost idle. There is enough hardware; the algorithm does not use it. This
# chapter builds one that does, and section 7 comes back to these 34 seconds.
#
# ## 2. Estimate
#
# We start with a case that we can run: four ranks each hold a 40 MB gradient, and all need the sum.
#
# **Predict.** With the naive plan, how many megabytes cross rank 0's link in each direction, and
# how many cross another rank's?
#
# <details><summary>Answer</summary>
#
# Three tensors of 40 MB come in to rank 0 and three go out, 120 MB in each direction. Every other
# link carries one tensor in each direction.
#
# </details>
#
# Here is the naive plan in code:

# %%
def through_rank_0(tensor, group):
    """Sum `tensor` over all ranks, in place: rank 0 does all the work."""
    if group.rank() > 0:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)
        return

    incoming = torch.empty_like(tensor)
    for peer in range(1, group.size()):
        dist.recv(incoming, group=group, group_src=peer)
        tensor += incoming
    for peer in range(1, group.size()):
        dist.send(tensor, group=group, group_dst=peer)


# %% [markdown]
# The [**ledger**](word:ledger) records what each rank sends and receives. `counted` runs any
# all-reduce under a ledger, on numbers whose sum we know. The table and the figure compare the
# ledger's bytes with the formula:


# %%
def counted(group, all_reduce, num_elements):
    """Return whether the sum is correct, and the bytes this rank has sent and received."""
    pattern = torch.arange(num_elements) % 7
    tensor = (pattern + group.rank()).float()
    with Ledger() as ledger:
        all_reduce(tensor, group)

    size = group.size()
    correct = torch.equal(tensor, (size * pattern + size * (size - 1) / 2).float())
    return correct, ledger.bytes_sent(), ledger.bytes_received()


# %% tags=["output-naive", "nbval-check-output", "exhaustive"]
n = 10_000_000  # 40 MB of float32
naive = run(counted, 4, through_rank_0, n)
volumes = [cost.naive_all_reduce_volume(n, 4, 4, rank) for rank in range(4)]
print("rank   correct      sent   formula  received   formula")
for rank, ((correct, sent, received), formula) in enumerate(zip(naive, volumes, strict=True)):
    print(f"{rank:4}   {correct!s:7} {sent / MB:6.0f} MB {formula.sent / MB:6.0f} MB "
          f"{received / MB:6.0f} MB {formula.received / MB:6.0f} MB")

thousand = cost.naive_all_reduce_volume(n, 4, 1000, rank=0)
print(f"rank 0 of 1,000: {sum(thousand) / GB:.0f} GB")

# %% tags=["figure-naive", "exhaustive"]
show(wire({"through rank 0": [sent for _, sent, _ in naive]},
          {"through rank 0": [formula.sent for formula in volumes]}),
     alt="Rank 0 sends three tensors, every other rank one: the link of rank 0 is the bottleneck.")

# %% [markdown]
# The bytes agree with the formula, and rank 0's bar is three times as long as the others. With
# 1,000 ranks, rank 0 would move 80 GB for a gradient of 40 MB. What would you change so that no
# link carries more than any other?
#
# ## 3. Picture
#
# Let every rank do rank 0's job for a part of the tensor. Split the tensor into as many chunks as
# there are ranks, and arrange the ranks in a ring. In each **step**, every rank sends one
# **message**, a chunk, to the next rank and receives another from the previous one, so the link of
# every rank is busy in both directions.
#
# A chunk starts out as one rank's contribution. In each step, the receiver adds its own
# contribution and passes the result on in the next step. After N - 1 steps, each rank holds one
# chunk of the complete sum: this is a [**reduce-scatter**](word:reduce-scatter). Rank r should end
# with chunk r, because then its number tells everyone which chunk it has. A chunk visits all ranks
# in order and is complete on the last one, so chunk c must set out from the rank after c, rank c +
# 1 (the last chunk from rank 0). Then the complete chunks travel around the ring once more, without
# adding: an [**all-gather**](word:all-gather).
#
# In the figure, a row is a rank and a column is a chunk. Each stripe is one rank's contribution, in
# that rank's color. A chunk with a thick outline has just arrived from the row above (in row 0,
# from the last row). In the widget below it, you choose the ranks and the step.

# %% tags=["figure-ring"]
show(ring_frames(4), alt=(
    "Every chunk travels around the ring and collects a contribution at each rank; after three "
    "steps each rank has one complete sum, after three more every rank has all of them."
))

# %%
ring_explorer()

# %% [markdown]
# Follow the leftmost column: its chunk starts on rank 1, collects a stripe on ranks 2 and 3, and is
# complete on rank 0 after step 3. Steps 4 to 6 copy it to the other ranks.
#
# **Predict.** As a multiple of the tensor's size, how many bytes does one of N ranks send in all
# steps together? And with 1,000 ranks?
#
# <details><summary>Answer</summary>
#
# It sends one N-th of the tensor in each of 2 (N - 1) steps, in total $2\,\frac{N-1}{N}$ of the
# tensor. That is 1.5 for four ranks and just under 2 for 1,000. The number of ranks has almost
# dropped out of the formula.
#
# </details>
#
# ## 4. By hand
#
# Now we write the ring, so that the ledger can check this formula. One step of one rank,
# `ring_step`, is a send and a receive at the same time. `isend` starts the send and returns
# immediately, so that the receive can run beside it. `reduce_scatter` and `all_gather` take N - 1
# steps each. `reduce_scatter` starts with chunk r - 1, which sets out from rank r, and `all_gather`
# with the complete chunk r; after that, each of them sends the chunk that has just arrived.


# %%
def ring_step(outgoing, incoming, group):
    """Send to the next rank while receiving from the previous one."""
    following = (group.rank() + 1) % group.size()
    previous = (group.rank() - 1) % group.size()
    sending = dist.isend(outgoing, group=group, group_dst=following)
    dist.recv(incoming, group=group, group_src=previous)
    sending.wait()


# %%
def reduce_scatter(chunks, group):
    """After N - 1 steps, chunk number `rank` is the sum over all ranks."""
    c = group.rank() - 1
    for _ in range(group.size() - 1):
        incoming = torch.empty_like(chunks[c - 1])
        ring_step(chunks[c], incoming, group)
        c -= 1  # a negative index counts from the end: the ring closes by itself
        chunks[c].add_(incoming)


# %%
def all_gather(chunks, group):
    """Chunk number `rank` is complete before, all chunks are complete afterwards."""
    c = group.rank()
    for _ in range(group.size() - 1):
        ring_step(chunks[c], chunks[c - 1], group)
        c -= 1


def ring(tensor, group):
    chunks = tensor.tensor_split(group.size())
    reduce_scatter(chunks, group)
    all_gather(chunks, group)


# %% [markdown]
# The chunks are views, so adding to a chunk changes the tensor. We also try 1,000,003 elements,
# which three ranks cannot share evenly:

# %% tags=["output-byhand", "nbval-check-output", "exhaustive"]
print("ranks  rank   correct        sent       formula  tensors sent")
for size, elements in ((4, n), (3, 1_000_003)):
    for rank, (correct, sent, _) in enumerate(run(counted, size, ring, elements)):
        formula = cost.ring_all_reduce_volume(elements, 4, size, rank)
        print(f"{size:5} {rank:5}   {correct!s:7} {sent:11,} {formula.sent:13,} "
              f"{sent / (4 * elements):13.6f}")

# %% [markdown]
# The counts agree to the byte on every rank, even where one chunk is an element longer than the
# others, and no rank sends much more than another. How does the volume depend on the number of
# ranks? The figure shows it for both algorithms; its dashed line marks two tensors:

# %%
def tensors_sent(group):
    """Tensors that this rank sends, through rank 0 and in a ring."""
    return [counted(group, all_reduce, 9600)[1] / (4 * 9600)
            for all_reduce in (through_rank_0, ring)]


sizes = [2, 3, 4, 6, 8]
by_center, by_ring = zip(*(run(tensors_sent, size)[0] for size in sizes), strict=True)

# %% tags=["figure-volume"]
show(curves(sizes, {"through rank 0": by_center, "ring": by_ring}, "ranks",
            "tensors sent by rank 0", {"twice the tensor": [2] * len(sizes)}), alt=(
    "Through rank 0, each additional rank means one more tensor for rank 0 to send; in a ring it "
    "never sends more than two."
))

# %% [markdown]
# Through rank 0, the volume grows by a tensor with every rank; in the ring, it stays below the
# line.
#
# Could another algorithm send less in total? No. Until some rank holds the complete sum of an
# element, that element has been sent N - 1 times or more, because each of the other ranks must send
# its contribution, alone or within a partial sum. After that, each of the other N - 1 ranks must
# still receive it. So the ranks together send at least 2 (N - 1) tensors. The plan through rank 0
# sends exactly that, too, but half of it leaves one rank. Divided evenly, it is $2\,\frac{N-1}{N}$
# of the tensor per rank, exactly what the ring sends (Patarasuk & Yuan 2009).
#
# ## 5. The trap: the sum is correct
#
# Do we need the chunks? In this simpler ring, whole tensors travel around, and every rank adds each
# one that arrives. PyTorch's tutorial [Writing Distributed
# Applications](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html) builds its
# all-reduce this way and leaves the chunks as an exercise.


# %%
def whole_ring(tensor, group):
    passing = tensor.clone()
    for _ in range(group.size() - 1):
        incoming = torch.empty_like(tensor)
        ring_step(passing, incoming, group)
        tensor += incoming
        passing = incoming


# %% [markdown]
# **Predict.** The sum will be correct. How many times as many bytes as in the chunked ring does a
# rank send, with 2 ranks, with 4, with 8? (In the figure, the tick is the chunked ring's formula.)

# %% tags=["output-trap", "nbval-check-output"]
print("ranks   correct      sent   ring's formula   ratio")
whole, least = {}, {}
for size in (2, 4, 8):
    everyone = run(counted, size, whole_ring, 9600)
    whole[f"{size} ranks"] = [sent for _, sent, _ in everyone]
    least[f"{size} ranks"] = [cost.ring_all_reduce_volume(9600, 4, size, 0).sent] * size
    sent, formula = everyone[0][1], least[f"{size} ranks"][0]
    correct = all(is_sum for is_sum, _, _ in everyone)
    print(f"{size:5}   {correct!s:7} {sent:9,} {formula:16,} {sent / formula:7.2f}")

# %% tags=["figure-trap"]
show(wire(whole, least), alt=(
    "With two ranks, sending whole tensors costs as much as the chunked ring; with eight ranks it "
    "costs four times as much."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# N/2 times as many: N - 1 whole tensors instead of $2\,\frac{N-1}{N}$. With two ranks the bar
# ends at the tick: a test on two ranks cannot show the difference.
#
# </details>
#
# This ring has a second bug. The numbers above were small integers, which add up without rounding
# error. Gradients do not. So we sum random numbers and compare the bits of the results:


# %%
def all_alike(group, all_reduce, num_elements):
    """Whether all ranks end up with the same bits."""
    torch.manual_seed(group.rank())
    tensor = torch.rand(num_elements)
    all_reduce(tensor, group)
    others = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(others, tensor, group=group)
    return all(torch.equal(tensor, other) for other in others)


# %% tags=["output-alike", "nbval-check-output"]
for size in (2, 4):
    for all_reduce in (whole_ring, ring):
        alike = all(run(all_alike, size, all_reduce, 9600))
        print(f"{size} ranks, {all_reduce.__name__:10}  same bits on all ranks: {alike}")

# %% [markdown]
# With four ranks, the ring without chunks leaves different bits on different ranks. Floating-point
# addition depends on the order, and here each rank adds in its own order. In training, the ranks'
# gradients would differ in the last bits, then their weights, and no later step would bring them
# back together. With chunks, each sum is computed once, along one path, and copied. Two ranks
# cannot show this bug either, because a + b equals b + a.
#
# Here is one more way to get a ring wrong: every rank first sends and then receives, with a
# blocking `send`. The launcher reports what each rank is doing:


# %%
def send_first(group):
    x = torch.ones(1000)
    following = (group.rank() + 1) % group.size()
    previous = (group.rank() - 1) % group.size()
    dist.send(x, following, group)
    dist.recv(x, previous, group)


# %% tags=["output-hang"]
try:
    run(send_first, 4)
except RankError as error:
    show_text(error)

# %% [markdown]
# A `send` may block until the other side receives, and here the other side is blocked in its own
# `send`, all the way around the ring. (`ring_step` avoids this with `isend`.) Many MPI libraries
# buffer short messages. With those, this code passes its tests and then hangs on the first long
# tensor.
#
# ## 6. The real one
#
# Our ring is correct; the package's is also written to be fast. Here are its reduce-scatter and
# `pass_on`, which sends and receives. Which lines do you recognize from section 4, and what is
# different?

# %%
show_source(reduce_scatter_ring)

# %%
show_source(pass_on)

# %% [markdown]
# The indices and the single addition are those of section 4. Four things are there for speed:
#
# - Receives are posted (started) up to two messages early (`ahead=2`), so that each message finds a
#   buffer waiting for it.
# - `receive_buffers` keeps its three buffers between calls: two are being filled while the third is
#   added.
# - A rank waits for its sends only at the end.
# - `in_pieces` splits a chunk larger than 1 MiB: one piece is added while the next arrives.
#
# (On GPUs, NCCL executes calls in the order in which they were posted, so there each step posts its
# send and its receive together.)
#
# The next test runs every all-reduce of the package on one to five ranks, with lengths that do not
# divide evenly, lengths below the number of ranks, and zero. (Section 7 explains doubling and
# halving.) A case in the table is one rank in one run: is its sum correct, do its bytes sent and
# received match the formula, and does it hold the same bits as the others? The ring of section 5 is
# included as "whole tensors", and compared with the formula of the chunked ring.

# %%
ALGORITHMS = {
    "naive": (all_reduce_naive, cost.naive_all_reduce_volume),
    "ring": (all_reduce_ring, cost.ring_all_reduce_volume),
    "doubling": (all_reduce_doubling, cost.doubling_all_reduce_volume),
    "halving": (all_reduce_halving, cost.halving_all_reduce_volume),
}
SUSPECT = {"whole tensors": (whole_ring, cost.ring_all_reduce_volume)}


def judged(group, all_reduce, volume, num_elements):
    """Whether the sum, the bytes and the bits are correct on this rank."""
    correct, *moved = counted(group, all_reduce, num_elements)
    formula = volume(num_elements, 4, group.size(), group.rank())
    return correct, tuple(moved) == formula, all_alike(group, all_reduce, num_elements)


# %%
def judge_all(group, candidates):
    lengths = {0, 1, group.size() - 1, group.size() + 1, 1003}
    return {name: [judged(group, *functions, length) for length in sorted(lengths)]
            for name, functions in candidates.items()}


# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
verdicts = [verdict for size in range(1, 6)
            for verdict in run(judge_all, size, ALGORITHMS | SUSPECT)]
print("               cases   correct sum   bytes as in the formula   same bits")
for name in verdicts[0]:
    cases = [case for verdict in verdicts for case in verdict[name]]
    sums, as_formula, bits = (sum(column) for column in zip(*cases, strict=True))
    print(f"{name:14} {len(cases):5} {sums:13} {as_formula:25} {bits:11}")

# %% [markdown]
# The package's four algorithms pass in every case. The ring of whole tensors always has the correct
# sum. Its bytes are right only with two ranks or with nothing to send. Its bits are right in those
# cases and in six more, very short tensors whose sums happen to round alike.
#
# ## 7. Measure
#
# ### What a message costs
#
# Bytes are half of the story; the question was about seconds. A message of $n$ bytes takes
# $\alpha + n/\beta$ seconds, where $\alpha$ is the **latency**, the cost of any message however
# short, and $\beta$ is the **bandwidth**. The ring sends few bytes, but in $2(N-1)$ steps, one
# after the other, and each of them costs a latency.
#
# Two algorithms need fewer steps. In **recursive doubling**, a rank exchanges the whole tensor with
# a partner at distance 1, then 2, then 4 (each time the rank whose number differs in that one
# binary digit). In **recursive halving and doubling** ("halving" for short), it exchanges only the
# part that it still has to sum: half of the tensor with a partner at distance 4, a quarter at
# distance 2, an eighth at distance 1. The same exchanges in reverse order gather the results. A
# **tree**, which we need for large clusters below, sums from child to parent and sends the total
# back down.
#
# The figure shows who communicates with whom on 8 ranks: all ranks of a ring, rank 0's three
# partners in halving (in gray, everybody else's), and a tree. A line is as thick as the part of
# the tensor that travels along it at a time; a tree's pieces are small.

# %% tags=["figure-patterns"]
show(message_patterns(), alt=(
    "In a ring, each rank sends an eighth of the tensor at a time to one neighbor; in halving, it "
    "has a new partner and half as much to send in each step; in a tree, children and parent."
))

# %% [markdown]
# In seconds, an all-reduce of $G$ bytes on $N$ ranks takes:
#
# | algorithm | steps | time |
# |---|---|---|
# | naive | $2(N-1)$ | $2(N-1)\,(\alpha + G/\beta)$ |
# | ring | $2(N-1)$ | $2(N-1)\,\big(\alpha + \frac{G}{N\beta}\big)$ |
# | doubling | $\log_2 N$ | $\log_2 N\,(\alpha + G/\beta)$ |
# | halving | $2\log_2 N$ | $2\log_2 N\;\alpha + 2\,\frac{N-1}{N}\,G/\beta$ |
# | two trees | $4L + 4k$ | $(\sqrt{4L\,\alpha} + \sqrt{2G/\beta})^2$ |
#
# (Doubling and halving are given for N a power of two; for any other N, some ranks first hand their
# tensor to a partner, which takes two more messages. A tree has $L = \lceil\log_2 N\rceil$ levels
# and sends its half of the tensor in $k$ pieces, as many as make the time shortest. `minitron.cost`
# has all five as functions.)
#
# **Predict.** Eight ranks communicate over slow links, with a latency of 5 ms and a bandwidth of
# 100 MB/s. Of naive (through rank 0), ring, doubling and halving, which is fastest for 1 kB? Which
# for 4 MB?
#
# The network is emulated: every transfer really takes place, and a rank that waits for one sleeps
# until such a link would have delivered it. The table shows each formula beside the measured times:

# %% tags=["exhaustive"]
FORMULA = {
    "naive": cost.naive_all_reduce_seconds, "ring": cost.ring_all_reduce_seconds,
    "doubling": cost.doubling_all_reduce_seconds, "halving": cost.halving_all_reduce_seconds,
}
slow = cost.Link(latency=5e-3, bandwidth=100 * MB)
functions = {name: all_reduce for name, (all_reduce, _) in ALGORITHMS.items()}
short, long = (run(lab.emulated_seconds, 8, functions, num_bytes, slow)[0]
               for num_bytes in (1000, 4_000_000))

# %% tags=["output-emulated", "exhaustive"]
print(SlowNetwork(*slow))
print("8 ranks, ms         1 kB                              4 MB")
print("          " + 2 * "formula    median (range of 3)    ")
for name, seconds in FORMULA.items():
    columns = []
    for num_bytes, times in ((1e3, short[name]), (4e6, long[name])):
        low, middle, high = (f"{1e3 * each:.0f}" for each in times)
        formula = 1e3 * seconds(num_bytes, 8, *slow)
        columns.append(f"{formula:7.0f} {middle:>9} ({low} to {high})")
    print(f"{name:10}{columns[0]:34}{columns[1]}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Doubling for the short tensor: three messages instead of fourteen. Halving for the long one: six
# messages, and as few bytes as the ring.
#
# </details>
#
# Where a median lies above its formula, the likely reason is the machine's own work, which the
# formula leaves out: starting messages, copying, adding.
#
# If halving sends as few bytes as the ring, in fewer messages, why use a ring? The formulas assume
# that each rank has one link and that messages between different pairs never share a wire. Halving
# relies on that: a rank has a different partner in each exchange, many of them far away, and their
# messages share wires along the way. In a ring, a rank communicates with two neighbors only, which
# any tree of switches supports without sharing if the ranks are in a suitable order (Patarasuk &
# Yuan 2009), and a ring works for any N.
#
# ### Your machine
#
# On an emulated network, the model holds by construction. Does it hold for processes on one
# computer, where the operating system copies what they send? We time the ring on four ranks at
# six sizes and keep the fastest of several runs, because anything else this machine does can only
# add time. A run is six steps, each with a quarter of the tensor, so a sixth of its time is one
# step. (Above 4 MiB, a step is several messages; the model ignores that.) To these times we fit
# $\alpha$ and $\beta$, by least squares of the relative errors.

# %%
fitted_sizes = [2**14 * 4**i for i in range(6)]
measured = lab.ring_seconds(fitted_sizes)
messages, chunk = 2 * (4 - 1), 1 / 4
mine = cost.fit_link([num_bytes * chunk for num_bytes in fitted_sizes],
                     [seconds / messages for seconds in measured])

# %% [markdown]
# **Predict.** The next cell uses the two numbers to predict three new sizes. Two lie between the
# fitted sizes, the third beyond them. Will the third one take longer than predicted, or less time?
# (In the figure, the dashed line is the fit.)

# %% tags=["output-fit", "exhaustive"]
print(f"alpha {1e6 * mine.latency:.0f} microseconds, beta {mine.bandwidth / GB:.2f} GB/s")
print("    size   predicted   measured   measured / predicted")
new_sizes = [500_000, 8_000_000, 32_000_000]
for num_bytes, seconds in zip(new_sizes, lab.ring_seconds(new_sizes), strict=True):
    predicted = cost.ring_all_reduce_seconds(num_bytes, 4, *mine)
    print(f"{num_bytes / MB:5.1f} MB {1e3 * predicted:8.2f} ms {1e3 * seconds:7.2f} ms "
          f"{seconds / predicted:14.2f}")

# %% tags=["figure-fit"]
show(crossing(
    fitted_sizes,
    {"fitted": [1e3 * cost.ring_all_reduce_seconds(size, 4, *mine) for size in fitted_sizes]},
    "tensor (bytes)", "ring all-reduce (ms; dots: measured)",
    {"fitted": [1e3 * seconds for seconds in measured]},
), alt=claim(measured[1] < 2 * measured[0] and measured[-1] > 2 * measured[-2], (
    "Four times the bytes take less than twice the time where tensors are short and latency "
    "dominates, and more than twice the time where they are long.")))

# %% [markdown]
# At the left end of the dashed line, the time is nearly all latency and hardly grows with the
# tensor; at the right end, it grows almost in proportion to the bytes.
#
# Where the last column of the table is far from 1, look at the model's assumptions. It assumes that
# adding costs nothing, but here the processor that adds also does the copying. It assumes that each
# rank has a link of its own, but these ranks share one memory and a few cores. And it assumes the
# same bandwidth for every size, but data that fits into the processor's cache is copied faster than
# data that does not.
#
# And what do the four ideas of section 6 gain? We time section 4's ring, the package's, and
# PyTorch's own `dist.all_reduce` in the same way. For tensors on the CPU, PyTorch uses the
# communication library gloo, whose all-reduce
# ([source](https://github.com/facebookincubator/gloo/blob/main/gloo/allreduce.cc)) is a ring, too,
# in C++, and also adds one piece of a chunk while the next arrives. The table shows the fastest of
# 20 runs, and in brackets the time relative to PyTorch's:

# %% tags=["output-rings", "exhaustive"]
rings = {"section 4's ring": ring, "the package's": all_reduce_ring,
         "dist.all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group)}
lengths = [16_000, 1_000_000, 32_000_000]
fastest = lab.fastest_seconds(rings, lengths)
print("4 ranks, ms        " + "".join(f"{plain_bytes(length):>16}" for length in lengths))
for name, seconds in fastest.items():
    relative = [a / b for a, b in zip(seconds, fastest["dist.all_reduce"], strict=True)]
    print(f"{name:19}" + "".join(f"{1e3 * each:9.2f} ({ratio:.2f})"
                                 for each, ratio in zip(seconds, relative, strict=True)))
by_hand, packaged, pytorch = (seconds[-1] for seconds in fastest.values())
show_text(claim(by_hand > packaged > pytorch, "For the longest tensor, the package's ring is "
                "faster than section 4's, and PyTorch's is the fastest."))

# %% [markdown]
# ### On real GPUs
#
# Do two numbers describe a cluster, too? The [Ultra-Scale
# Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook) (2025, section on pipeline
# parallelism) publishes the bandwidth of NCCL's all-reduce of 256 MB on nodes of 8 H100s, as the
# median of many runs and the range from their 5th to their 95th percentile. We read it as **bus
# bandwidth**: what a rank sends in a ring, $2\,\frac{N-1}{N}$ of the tensor, divided by the time.
# If only bandwidth mattered, it would be the same for every N. According to NVIDIA's datasheets
# (2023), an H100 has 450 GB/s in each direction to the other GPUs in its node (NVLink 4), and a
# network card of 50 GB/s (400 Gb/s); a node has eight of these cards. NCCL builds several rings
# that leave a node through different cards, so a ring all-reduce can send at up to 8 · 50 = 400
# GB/s between nodes.
#
# (That is what NCCL's own benchmark reports. As size divided by time, the playbook's 436 GB/s for
# a single node would be out of reach for a ring, which sends nearly two tensors through a link of
# 450 GB/s.)
#
# **Predict.** From 2 nodes to 64, does the bus bandwidth fall, and if so, how far? And if you fit
# $\alpha$ and $\beta$ to all node counts but one, how well do they predict the one you left out?
#
# Each row of the table shows the measurement, the fit to all six rows, and a fit made without this
# row, with its prediction. The figure draws the first two.

# %%
nodes = [2, 4, 8, 16, 32, 64]  # of 8 GPUs; GB/s
bus = [361.7492, 160.1395, 99.5643, 84.7405, 64.9254, 32.9378]  # medians
cluster = lab.fit_cluster(nodes, bus)
by_fit = [lab.bus_bandwidth(count, cluster) for count in nodes]

# %% tags=["output-cluster", "nbval-check-output"]
def summary(link):
    return f"alpha {1e6 * link.latency:4.1f} us, beta {link.bandwidth / GB:3.0f} GB/s"


print(f"fitted to all six: {summary(cluster)}")
print("nodes   measured   fitted   fitted without it           predicted")
for index, (count, rate) in enumerate(zip(nodes, bus, strict=True)):
    others = lab.fit_cluster(nodes[:index] + nodes[index + 1:], bus[:index] + bus[index + 1:])
    predicted = lab.bus_bandwidth(count, others)
    print(f"{count:5} {rate:10.0f} {by_fit[index]:8.0f}   {summary(others)} {predicted:8.0f}"
          f" ({predicted / rate - 1:+.0%})")
low, high = 12.4935, 177.36  # percentiles 5 and 95 of the runs on 64 nodes
print(f"64 nodes: {2 * (64 * 8 - 1):,} steps in a ring; runs from {low:.0f} to {high:.0f} GB/s")

# %% tags=["figure-cluster"]
show(scaling(nodes, bus, "nodes of 8 H100", "bus bandwidth (GB/s)", by_fit, "fitted",
             limit=400, limit_label="above 400 GB/s: more than eight links of 50 GB/s carry"), alt=(
    f"From 2 to 64 nodes the bus bandwidth falls to {bus[-1] / bus[0]:.0%}; a ring with a fixed "
    f"latency per step falls to {by_fit[-1] / by_fit[0]:.0%}."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# It falls to less than a tenth. A ring with a constant latency per step explains the direction and
# the rough size of the drop: on 64 nodes a chunk is 0.5 MB, which takes about a microsecond at
# $\beta$, and each of the thousand steps costs 15 more. The predictions for the node count left
# out miss by 14 % to 67 %.
#
# </details>
#
# Do not read more into the fit. Its $\beta$ is close to eight network links of 50 GB/s (the lower
# edge of the gray band, which a ring cannot enter but a hierarchical all-reduce can), which looks
# like a discovery, until you leave out the measurement on 2 nodes: then $\beta$ is less than half
# of that. One point decides it. On 4 and 8 nodes, the dashed line is about one and a half times the
# measurements, even though those are part of the fit. And the runs on 64 nodes differ among
# themselves by more than a factor of ten, even without the fastest and the slowest 5 %. The model
# does not know who else was using the network, nor which algorithm NCCL chose.
#
# ### Trees and hierarchies
#
# Two common ways avoid a thousand steps. (We compare them with the fit's numbers, as orders of
# magnitude only.) A **tree** has paths of length $\log_2 N$: pieces of the tensor travel from child
# to parent, the parent adds them, and the sums travel back down. With two trees at once, arranged
# so that the leaves of one are inner nodes of the other, all links are busy (Sanders, Speck & Träff
# 2009). A **hierarchical** all-reduce follows the structure of the machine: a reduce-scatter inside
# each node, then a ring across nodes for the eighth of the tensor that each GPU is left with, then
# an all-gather inside the node: with 64 nodes, 7 + 126 + 7 = 140 steps instead of 1,022. We compare
# their formulas on 512 GPUs, with the fitted $\alpha$ and $\beta$ (inside a node 450 GB/s, across
# nodes an eighth of $\beta$ per GPU):

# %%
tensors = [10 ** (k / 2) for k in range(10, 21)]


def hierarchical(num_bytes, latency, bandwidth):
    inside, across = cost.Link(latency, 450 * GB), cost.Link(latency, bandwidth / 8)
    return cost.hierarchical_all_reduce_seconds(num_bytes, 8, 64, inside, across)


lines = {
    "ring": [cost.ring_all_reduce_seconds(size, 512, *cluster) for size in tensors],
    "tree": [cost.tree_all_reduce_seconds(size, 512, *cluster) for size in tensors],
    "hierarchical": [hierarchical(size, *cluster) for size in tensors],
}

# %% tags=["figure-crossing"]
show(crossing(tensors, lines, "tensor (bytes)", "all-reduce on 512 GPUs (s)"), alt=(
    "With 512 GPUs the tree is fastest at every size shown; the ring comes close only where "
    "bandwidth is all that matters."
))

# %% [markdown]
# The ring's curve is flat over most of the range, because its thousand steps cost the same for
# every size; the path up and down a tree is short. (At the far right the hierarchical all-reduce is
# slower than the ring, because its formula runs the parts inside and across nodes one after the
# other.)
#
# **Predict.** With 512 ranks, the tree is faster than the ring at every size in the figure. From
# which size on is the ring faster with 64 ranks? With 8?

# %% tags=["output-crossing", "nbval-check-output"]
def crossing_bytes(size):
    """The smallest power of 1.1 bytes at which the ring is as fast as the tree."""
    num_bytes = 1.0
    while (cost.ring_all_reduce_seconds(num_bytes, size, *cluster)
           > cost.tree_all_reduce_seconds(num_bytes, size, *cluster)):
        num_bytes *= 1.1
    return num_bytes


for size in (8, 64, 512):
    print(f"{size:4} ranks: the ring is faster from {plain_bytes(crossing_bytes(size))} on")

# %% [markdown]
# Short tensors and many ranks favor a tree, long tensors and few ranks a ring. The sizes follow
# from the fitted $\alpha$ and $\beta$, so read them as orders of magnitude. NCCL chooses for
# every call, with a model that has a latency and a bandwidth for each algorithm (Hu et al. 2025).
#
# ### A plausible number, and the question of section 1
#
# These formulas also test other people's estimates. Suppose someone tells you that the all-reduce
# of the gradient of a 100-billion-parameter model, 200 GB over 16 GPUs, takes 0.22 s at 900 GB/s.
#
# **Predict.** The estimate contains three errors, all in the same direction. Which? The cell
# corrects them one by one.

# %% tags=["output-claim", "nbval-check-output"]
gradient, size, nvlink, network = 200 * GB, 16, 450 * GB, 50 * GB
volume = cost.ring_all_reduce_volume(100 * 10**9, 2, size, rank=0).sent
two_nodes = cost.hierarchical_all_reduce_seconds(
    gradient, 8, 2, cost.Link(0, nvlink), cost.Link(0, network)
)
print(f"the claim: 200 GB at 900 GB/s          {gradient / (900 * GB):.2f} s")
print(f"a rank sends {volume / GB:.0f} GB                    {volume / (900 * GB):.2f} s")
print(f"900 GB/s is both directions together   {volume / nvlink:.2f} s")
print(f"16 GPUs are two nodes: hierarchical    {two_nodes:.2f} s")
print(f"at the rate measured on two nodes      {volume / (bus[0] * GB):.2f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The tensor has to be sent nearly twice. The 900 GB/s of the datasheet are the sum of both
# directions of a link. And in these nodes NVLink connects only 8 GPUs; the other 8 are reached
# through the network. (The formula for the hierarchical all-reduce overshoots the last line,
# because it runs the parts one after the other; in NCCL they can overlap. Rings through all eight
# network cards need at least 375/400 = 0.94 s. The last line uses the rate measured for 256 MB, and
# a longer tensor should do better.)
#
# </details>
#
# The same functions answer the question of section 1: Llama 2 7B on 64 GPUs, which are 8 nodes,
# with half a second of computation per step.

# %% tags=["output-answer", "nbval-check-output"]
answers = {
    "naive, through rank 0": center,
    "one ring, 50 GB/s": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, network),
    "hierarchical, NVLink inside": cost.hierarchical_all_reduce_seconds(
        gradient_bytes, 8, 8, cost.Link(0, nvlink), cost.Link(0, network)),
    "rate measured on 8 nodes": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, bus[2] * GB),
}
for name, seconds in answers.items():
    print(f"{name:27} {seconds:6.2f} s")

# %% [markdown]
# On the same links, the ring needs 0.53 s instead of 34 s, about as long as the computation; with
# NVLink inside the nodes it would be 0.11 s. The last line, 0.27 s, again uses the rate for 256 MB;
# it is longer than 0.11 s because that formula assumes no latency and the full bandwidth of every
# link. Every training step pays this time, unless the all-reduce runs during the backward pass, as
# in chapter 4's bucketed data parallelism. Look once more at the state after N - 1 steps: each rank
# holds one chunk of the complete sum. Does every rank really need the rest? That is the question of
# [chapter 6](chapter:6).
#
# ## 8. Recap
#
# 1. If one rank adds everything, its link carries N - 1 tensors in each direction while the other
#    links wait.
# 2. A ring splits the tensor into N chunks; each rank sends $2\,\frac{N-1}{N}$ tensors, the minimum
#    possible, and the ledger agrees to the byte.
# 3. A correct sum is not enough: sending whole tensors costs N/2 times the bytes, and ranks that
#    add in different orders end with different bits. The ledger shows the first, a comparison of
#    bits the second.
# 4. A message of $n$ bytes costs $\alpha + n/\beta$ seconds. The ring needs $2(N-1)$ steps, so its
#    latency grows with N. For doubling, halving and trees it grows with $\log_2 N$, and a
#    hierarchical all-reduce on 64 nodes of 8 GPUs needs a seventh of the ring's steps.
# 5. Two fitted numbers can predict sizes that were not measured. Before you trust a fit, leave
#    out a point and see whether the fit predicts it.
#
# ## Exercises
#
# Write your answers into `exercises/ch05_ring_all_reduce.py`, save, and run the cell. In a
# terminal, `minitron hint 5.1` gives hints in three steps.
#
# - [**5.1 Ring reduce-scatter**](exercise:5.1) (30 minutes): on real ranks, for any length.
# - [**5.2 Ring all-gather**](exercise:5.2) (15 minutes): the second half.
# - [**5.3 Uneven chunks, to the byte**](exercise:5.3) (20 minutes): predict what the ledger will
#   count.
# - [**5.4 Measure, fit, choose**](exercise:5.4) (25 minutes): fit a link to measured messages, and
#   find where the ring wins.

# %%
check("5.1")

# %%
check("5.2")

# %%
check("5.3")

# %%
check("5.4")

# %% [markdown]
# ## Further: NCCL's protocols
#
# Where does a latency of 15 microseconds per step come from? Partly from the network, and partly
# from the way a GPU learns that data has arrived. NCCL has three protocols for that (Hu et al.
# 2025, [Demystifying NCCL](https://arxiv.org/abs/2507.04786)):
#
# - **Simple** sends large blocks and announces each after a memory fence, an instruction that makes
#   the data visible before the announcement. It reaches full bandwidth, but each step takes about 6
#   microseconds.
# - **LL** (low latency) sends a flag with every 4 bytes of data, in one 8-byte store. Each step
#   takes about 1 microsecond, at no more than half the bandwidth.
# - **LL128** sends 8 bytes of flags with every 120 bytes of data, which needs a link that keeps
#   128-byte stores together, as NVLink does. Each step takes about 2 microseconds, at 94 % of the
#   bandwidth.
#
# **Predict.** For a ring over the 8 GPUs of a node, which protocol is fastest for 64 kB? For
# 256 MB?
#
# The cell puts these latencies and bandwidths into the ring's formula.

# %% tags=["output-protocols", "nbval-check-output"]
protocols = {"LL": cost.Link(1e-6, nvlink * 4 / 8), "LL128": cost.Link(2e-6, nvlink * 120 / 128),
             "Simple": cost.Link(6e-6, nvlink)}
print("8 GPUs, microseconds of a ring   " + "".join(f"{name:>9}" for name in protocols))
for num_bytes in (64_000, 1e6, 16e6, 256e6):
    took = {name: 1e6 * cost.ring_all_reduce_seconds(num_bytes, 8, *each)
            for name, each in protocols.items()}
    print(f"{plain_bytes(num_bytes):>32} " + "".join(f"{each:9,.0f}" for each in took.values())
          + f"   {min(took, key=took.get)}")

# %% [markdown]
# LL is fastest for 64 kB and 1 MB, LL128 for 16 MB, and Simple for 256 MB, by a small margin.
# NCCL switches between protocols as it switches between rings and trees. If an all-reduce takes
# noticeably longer than another one of nearly the same size, you may be looking at such a switch:
# `NCCL_DEBUG=INFO` together with `NCCL_DEBUG_SUBSYS=TUNING` logs the choice.
#
# ## Further: NVSwitch, or adding inside the network
#
# The argument in section 4, that the ranks together cannot send less than the ring, assumes that
# only ranks can add. Inside a node of H100s, the GPUs are connected by NVSwitch chips, and these
# chips can add, too: NCCL uses this under the name NVLink SHARP (its algorithm NVLS). How much
# could that be worth? In the ideal case, each GPU sends its tensor to the switch once and receives
# the sum once. The cell computes time and bus bandwidth in this case for 256 MB on 8 GPUs, without
# latency.

# %% tags=["output-nvls", "nbval-check-output"]
G, N = 256e6, 8
sent_by = {"ring": 2 * (N - 1) / N * G, "in the switch": G}
print("8 GPUs, 256 MB    sent by each GPU      time    bus bandwidth")
for name, sent in sent_by.items():
    took = sent / nvlink
    print(f"{name:16} {plain_bytes(sent):>17} {1e6 * took:6.0f} us"
          f" {2 * (N - 1) / N * G / took / GB:11.0f} GB/s")
print(f"measured on one node: 436 GB/s, {436 * GB / nvlink:.0%} of a link")

# %% [markdown]
# In this ideal case, adding in the switch raises the bus bandwidth by three quarters. NVLS gains
# less, because each GPU also reads an N-th of the sums from the switch and sends it back to be
# distributed, so it sends (N + 1)/N tensors ([issue 2140 of
# NCCL](https://github.com/NVIDIA/nccl/issues/2140)). With 8 GPUs that is 9/8 of 256 MB, or 288 MB,
# which takes 640 microseconds: a bus bandwidth of 700 GB/s, 14/9 of the ring's. Bus bandwidth can
# be higher than the bandwidth of the link, because it counts the bytes that a ring would have sent.
# The 436 GB/s measured by the playbook were probably added in the switch: NCCL's rings on such
# nodes reach about 370 GB/s, and NVLS up to 480 GB/s ([issue 212 of
# nccl-tests](https://github.com/NVIDIA/nccl-tests/issues/212)).
#
# ## Further: rails
#
# Number the GPUs of every node from 0 to 7. In many clusters, the network cards of all GPUs with
# the same number are connected to the same switch; together they form a **rail**. Traffic between
# different rails takes a longer way, through switches that all rails share. Which messages of an
# all-reduce leave their rail? In the next cells, 8 ranks act as 2 nodes of 4 GPUs, and the table
# shows how many bytes each rank sends to the other node, in one ring and in a hierarchical
# all-reduce.

# %%
def hierarchical_by_hand(tensor, inside, across):
    chunk = reduce_scatter_ring(tensor, inside)
    with Ledger() as network:
        all_reduce_ring(chunk, across)
    all_gather_ring(tensor, inside)
    return network.bytes_sent()


def on_rails(group):
    """Bytes that this rank sends to the other node: in one ring, and hierarchically."""
    _, ring_bytes, _ = counted(group, all_reduce_ring, 9600)
    tensor = torch.full((9600,), float(group.rank()))
    crossed = hierarchical_by_hand(tensor, *lab.node_and_rail(group, gpus_per_node=4))
    assert (tensor == sum(range(8))).all()
    return ring_bytes if group.rank() % 4 == 3 else 0, crossed  # 3 and 7 send to the other node


# %% tags=["output-rails", "nbval-check-output"]
in_one_ring, on_own_rail = zip(*run(on_rails, 8), strict=True)
print("bytes to the other node, by rank")
for name, row in (("rank", range(8)), ("one ring", in_one_ring), ("hierarchical", on_own_rail)):
    print(f"{name:12}" + "".join(f"{value:8,}" for value in row))

# %% [markdown]
# A single ring sends everything between the nodes through two network cards, from rank 3 to rank 4
# and from rank 7 to rank 0, and each of these messages changes rails. (NCCL therefore builds
# several rings that leave the node through different cards.) The hierarchical all-reduce uses all
# cards equally: each card sends a seventh of what each of those two had to send, and every message
# between the nodes stays on its rail.
#
# ## Further reading
#
# - Patarasuk, Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, Journal
#   of Parallel and Distributed Computing 69(2), 2009: the minimum that must be sent, and the ring
#   that achieves it on any tree of switches.
# - Thakur, Rabenseifner, Gropp, *Optimization of Collective Communication Operations in MPICH*,
#   2005, sections 3 and 4: the cost model, doubling and halving.
# - Sanders, Speck, Träff, *Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan*,
#   2009: two trees that keep every link busy.
# - Sergeev, Del Balso, [Horovod: Fast and Easy Distributed Deep Learning in
#   TensorFlow](https://arxiv.org/abs/1802.05799), 2018: how the ring came to deep learning.
# - Hu et al., [Demystifying NCCL](https://arxiv.org/abs/2507.04786), 2025: protocols, algorithms
#   and how NCCL chooses.
# - Tazi et al., [The Ultra-Scale
#   Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), 2025, section on pipeline
#   parallelism: the bandwidths measured on 1 to 64 nodes.
