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
# **50 minutes, and 90 for the exercises. No GPU. [Exercises 5.1](exercise:5.1) to 5.4.**
#
# *You need:* `run(function, 4)` from [chapter 4](chapter:4) and the reason why [ranks](word:rank)
# that read different data need the sum of their gradients.
#
# *You will be able to:*
# - **build** an [all-reduce](word:all-reduce) from sends and receives, with the fewest bytes
#   possible;
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
from statistics import median

import torch
import torch.distributed as dist

from minitron import cost
from minitron.comm.collectives import (
    all_gather_ring, all_reduce_doubling, all_reduce_halving, all_reduce_naive, all_reduce_ring,
    ring_shift, reduce_scatter_ring,
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
# How long does that take, without latency, if each GPU's link to the network carries 50 GB/s in
# each direction?

# %% tags=["output-question", "nbval-check-output"]
llama, num_gpus, link = cost.PUBLISHED["Llama 2 7B"], 64, 50 * GB
gradient_bytes = 2 * cost.num_parameters(llama)  # 16-bit values
center = cost.naive_all_reduce_seconds(gradient_bytes, num_gpus, 0, link)
flops = 4096 * cost.training_flops_per_token(llama, 4096)
print(f"one gradient: {gradient_bytes / GB:.1f} GB")
print(f"the sum, through rank 0: {center:.1f} s")
print(f"computing it, from 4,096 tokens per GPU at 400 TFLOP/s: {flops / 400e12:.2f} s")

# %% [markdown]
# The GPUs compute for half a second, then communicate for more than half a minute. This chapter
# builds an all-reduce that needs far less time on the same links, and section 7 comes back to these
# 34 seconds.
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
# ledger's bytes with the formula for [N](word:N) ranks: N - 1 tensors in each direction at rank 0,
# one at every other rank.


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
# The bytes agree with the formula, and rank 0's bar is three times as long as the others: while
# rank 0's link is always busy in one direction or the other, the others are idle most of the time.
# With 1,000 ranks, rank 0 would move 80 GB for a gradient of 40 MB. What would you change so that
# no link carries more than any other?
#
# ## 3. Picture
#
# Let every rank do rank 0's job for a part of the tensor. Split the tensor into as many chunks as
# there are ranks, and arrange the ranks in a ring. In each **step**, every rank sends one
# **message**, a chunk, to the next rank and receives another from the previous one, so the link of
# every rank is busy in both directions.
#
# A chunk starts out as one rank's contribution. In each step, the receiver adds its own
# contribution and passes the result on in the next step. N - 1 other contributions have to be
# added, so after N - 1 steps each rank holds one chunk of the complete sum: this is a
# [**reduce-scatter**](word:reduce-scatter). Rank r should end with chunk r, because then its number
# tells everyone which chunk it has. A chunk visits all ranks in order and is complete on the last
# one, so chunk c must set out from the rank after c, rank c + 1 (the last chunk from rank 0). Then
# the complete chunks travel around the ring once more, without adding: an
# [**all-gather**](word:all-gather).
#
# In the figure, a row is a rank and a column is a chunk. Each stripe is one rank's contribution, in
# that rank's color. A chunk with a thick outline has just arrived from the row above (in row 0,
# from the last row).

# %% tags=["figure-ring"]
show(ring_frames(4), alt=(
    "Every chunk travels around the ring and collects a contribution at each rank; after three "
    "steps each rank has one complete sum, after three more every rank has all of them."
))

# %% [markdown]
# Follow the leftmost column: its chunk starts on rank 1, collects a stripe on ranks 2 and 3, and is
# complete on rank 0 after step 3. Steps 4 to 6 copy it to the other ranks.
#
# **Predict.** What part of the tensor has a rank in the figure sent after step 3? And with 1,000
# ranks, what part has it sent when the reduce-scatter is done, and after how many steps?
#
# <details><summary>Answer</summary>
#
# Three quarters: a chunk in each of three steps. With 1,000 ranks, all but a thousandth, in $N-1$
# steps: many more steps, but hardly more bytes. The all-gather sends as much again. So in total a
# rank sends $2\,\frac{N-1}{N}$ of the tensor, as chapter 4 stated: 1.5 for four ranks, just under 2
# for 1,000.
#
# </details>
#
# The widget steps through rings of other sizes and counts what each rank has sent:

# %%
ring_explorer()

# %% [markdown]
# ## 4. By hand
#
# Now we write the ring, so that the ledger can check the formula. In one step, `ring_step`, a rank
# sends and receives at the same time: `isend` starts the send and returns immediately, `recv` waits
# for the incoming chunk, and `wait` for the end of the send.
#
# `reduce_scatter` and `all_gather` take N - 1 steps each. In `reduce_scatter`, rank r first sends
# chunk r - 1, the one that sets out from rank r. In `all_gather`, it first sends chunk r, which is
# complete. In every later step, a rank sends the chunk that it received in the step before.


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
# (With two ranks, the dots coincide.) Through rank 0, the volume grows by a tensor with every
# further rank; in the ring, it stays below the line.
#
# Could another algorithm send less in total? No. Follow one element of the tensor, up to the moment
# when the first rank holds its complete sum. By then, each of the other N - 1 ranks must have sent
# its contribution at least once, alone or within a [partial sum](word:partial-sum). None of them
# has the complete sum yet, so each must still receive at least one more message about this element.
# This holds for every element, so the ranks together send at least 2 (N - 1) tensors. The plan
# through rank 0 sends exactly that, too, but half of it leaves one rank. Divided evenly, it is
# $2\,\frac{N-1}{N}$ of the tensor per rank, exactly what the ring sends ([Patarasuk & Yuan
# 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)).
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
# **Predict.** The sum will be correct. By what factor does a rank send more bytes than in the
# chunked ring, with 2 ranks, with 4, with 8? (In the figure, the tick marks the chunked ring.)

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
# By N/2: it sends N - 1 whole tensors instead of $2\,\frac{N-1}{N}$. With two ranks the bar
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
# gradients would differ in the last bits, then their weights, and nothing in a later step compares
# or corrects them. With chunks, each sum is computed once, along one path, and copied. Two ranks
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


# %% tags=["output-hang", "exhaustive"]
try:
    run(send_first, 4)
except RankError as error:
    show_text(error)

# %% [markdown]
# A `send` may block until the other side receives, and here the other side is blocked in its own
# `send`, all the way around the ring. (`ring_step` avoids this with `isend`.) Many libraries of
# MPI, the message-passing standard of supercomputers, buffer short messages. With those, this code
# passes every test on short tensors and hangs on the first long one.
#
# ## 6. The real one
#
# Our ring is correct; the package's is also written to be fast. Here are its reduce-scatter and
# `ring_shift`, which sends and receives. Which lines do you recognize from section 4, and what is
# different?

# %%
show_source(reduce_scatter_ring)

# %%
show_source(ring_shift)

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
# The next test runs the package's four all-reduces on one to five ranks, with lengths that do not
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

# %% tags=["output-oracle", "nbval-check-output", "exhaustive"]
lab.print_verdicts(ALGORITHMS | SUSPECT, counted, all_alike, longest=1003)

# %% [markdown]
# The package's four algorithms pass in every case. In doubling, every rank computes every sum
# itself; the bits agree because partners add the same two numbers, and a + b equals b + a. The ring
# of whole tensors always has the correct sum. Its bytes are right only with two ranks or with
# nothing to send. Its bits are the same in those cases and in six more: on three ranks, sums of one
# or two elements happen to round alike.
#
# ## 7. Measure
#
# ### What a message costs
#
# Bytes are half of the story; the question was about seconds. In the usual model, a message of $n$
# bytes takes $\alpha + n/\beta$ seconds, where $\alpha$ is the **latency**, the cost of any message
# however short, and $\beta$ is the **bandwidth**. The ring sends few bytes, but in $2(N-1)$ steps,
# one after the other, and each of them costs a latency.
#
# Two algorithms need fewer steps. In **recursive doubling**, a rank exchanges the whole tensor with
# a partner at distance 1, then 2, then 4, and adds what it receives. The numbers of two partners
# differ in one binary digit only: rank 5 ($101_2$) meets 4 ($100_2$), then 7 ($111_2$), then 1
# ($001_2$). In **recursive halving and doubling** ("halving" for short), two partners share the
# work: each keeps one half of the elements and sends its values of the other half. On 8 ranks, a
# rank sends half of the tensor to the partner at distance 4, a quarter to the one at distance 2 and
# an eighth to the one at distance 1; then the same exchanges in reverse order gather the results. A
# **tree**, which we need for large clusters below, sums from child to parent and sends the total
# back down.
#
# The figure shows who communicates with whom on 8 ranks: all ranks of a ring, rank 0's three
# partners in halving (in gray, everybody else's), and a tree. A line is as thick as the part of
# the tensor that travels along it at a time; a tree's pieces are small.

# %% tags=["figure-patterns"]
show(message_patterns(), alt=(
    "In a ring, each rank sends an eighth of the tensor at a time to one neighbor. In halving, it "
    "sends a half, a quarter and an eighth to three partners, then the same in reverse. In a tree, "
    "it communicates with its parent and its children."
))

# %% [markdown]
# In the middle, the thickest line is also the longest: in halving's first step, every rank sends
# half of the tensor to the far side of the circle, and all of these lines cross.
#
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
# tensor to a partner and get the sum back at the end, which takes two more messages. In the last
# row, each of two trees with $L = \lceil\log_2 N\rceil$ levels sums one half of the tensor, in $k$
# pieces. A parent receives from its two children in turn, so a piece takes $2L$ steps up, and the
# others follow two steps apart: about $2L + 2k$ steps, and as many down. The time is for the best
# $k$. `minitron.cost` has all five as functions.)
#
# **A rule for the ring.** Its latency, $2(N-1)\,\alpha$, equals the time of its bytes when
# $G = N\alpha\beta$. Far below this size, fewer steps help; far above it, fewer bytes do.
#
# **Predict.** Eight ranks communicate over slow links, with a latency of 5 ms and a bandwidth of
# 100 MB/s. Of naive (through rank 0), ring, doubling and halving, which is fastest for 1 kB? Which
# for 4 MB?
#
# The network is emulated: every transfer really takes place, and the receiving rank sleeps until a
# link of this latency and bandwidth would have delivered the message. The table shows each formula
# beside the measured times:

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
# messages, and as few bytes as the ring. (4 MB are $N\alpha\beta$ here: half of the ring's 140 ms
# is latency.)
#
# </details>
#
# Where a median lies above its formula, remember what the formula leaves out: starting messages,
# copying and adding, and here also that eight ranks share this machine's cores.
#
# If halving sends as few bytes as the ring, in fewer messages, why use a ring? The formulas assume
# that messages between different pairs never share a wire. Halving depends on that: in its first
# exchange, every rank sends half of the tensor to a partner at distance N/2, all at the same time.
# In a ring, a rank communicates with two neighbors only. With the ranks in a suitable order, the
# messages of a ring never share a wire on any tree of switches (Patarasuk & Yuan 2009). And a ring
# needs no extra messages where N is not a power of two.
#
# ### Your machine
#
# On an emulated network, the model holds by construction. Does it hold for processes on one
# computer, where the operating system copies what they send? We time the ring on four ranks at
# six sizes and keep the fastest of 20 runs, because anything else this machine does can only add
# time. A run is six steps, each with a quarter of the tensor, so a sixth of its time is one
# step. (Above 4 MiB, a step is several messages; the model ignores that.) To these times we fit
# $\alpha$ and $\beta$, by least squares of the relative errors.

# %%
fitted_sizes = [2**14 * 4**i for i in range(6)]
measured = [runs[0] for runs in lab.ring_runs(fitted_sizes)]  # the fastest
messages, chunk = 2 * (4 - 1), 1 / 4
mine = cost.fit_link([num_bytes * chunk for num_bytes in fitted_sizes],
                     [seconds / messages for seconds in measured])

# %% [markdown]
# **Predict.** The next cell uses the two numbers to predict three new sizes. Two lie between the
# fitted sizes, the third beyond them. The model has one bandwidth for all sizes, but four tensors
# of 32 MB do not fit into the cache of many processors. Does this speak for more time than
# predicted, or for less? (The distance of the median from the fastest of the 20 runs shows how far
# they spread.)

# %% tags=["output-fit", "exhaustive"]
print(f"alpha {1e6 * mine.latency:.0f} microseconds, beta {mine.bandwidth / GB:.2f} GB/s")
print("    size   predicted    fastest      median   fastest / predicted")
new_sizes = [500_000, 8_000_000, 32_000_000]
for num_bytes, runs in zip(new_sizes, lab.ring_runs(new_sizes), strict=True):
    predicted = cost.ring_all_reduce_seconds(num_bytes, 4, *mine)
    print(f"{num_bytes / MB:5.1f} MB {1e3 * predicted:8.2f} ms {1e3 * runs[0]:7.2f} ms "
          f"{1e3 * median(runs):8.2f} ms {runs[0] / predicted:14.2f}")

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
# <details><summary>Answer</summary>
#
# For more: data outside the cache is copied more slowly.
#
# </details>
#
# The dashed line bends near $N\alpha\beta$: at its left end, the time is nearly all latency; at its
# right end, it grows almost in proportion to the bytes.
#
# Besides the single bandwidth, two more assumptions can move the last column away from 1. The model
# assumes that adding costs nothing, but here the processor that adds also does the copying. And it
# assumes that each rank has a link of its own, but these ranks share one memory and a few cores.
#
# And what do the four ideas of section 6 gain together? We time section 4's ring, the package's,
# and PyTorch's own `dist.all_reduce` in the same way. For CPU tensors, PyTorch calls a library
# named gloo. Its all-reduce
# ([source](https://github.com/facebookincubator/gloo/blob/main/gloo/allreduce.cc)) is also a ring,
# written in C++, and it also adds one piece of a chunk while the next arrives. The table shows the
# fastest of 20 runs and their median, and in brackets the fastest relative to PyTorch's:

# %% tags=["output-rings", "exhaustive"]
rings = {"section 4's ring": ring, "the package's": all_reduce_ring,
         "dist.all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group)}
lengths = [16_000, 1_000_000, 32_000_000]
runs = lab.timed_runs(rings, lengths)
lab.print_runs(runs, lengths, "dist.all_reduce")
by_hand, packaged, pytorch = (by_size[-1][0] for by_size in runs.values())
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
# If only bandwidth mattered, it would be the same for every N.
#
# We assume the links of NVIDIA's datasheets (2023): an H100 has 450 GB/s in each direction to the
# other GPUs in its node (NVLink 4), and a network card of 50 GB/s (400 Gb/s). A single ring would
# leave each node through one card. NCCL therefore builds several rings that leave through different
# cards, each for a part of the tensor. With all eight cards of a node, a ring all-reduce can send
# at up to 8 · 50 = 400 GB/s between nodes.
#
# (Bus bandwidth is what NCCL's own benchmark reports. If the 436 GB/s that the playbook reports for
# one node were size divided by time, a ring would have to send nearly twice that, 2 · 7/8 · 436
# GB/s, through a link of 450.)
#
# **Predict.** From 2 nodes to 64, does the bus bandwidth fall, and if so, how far? And if each of
# the six measurements in turn is predicted by a fit to the other five, how many of the six
# predictions are within 10 %?
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
print(f"2 nodes: one run in twenty reached {436.13:.0f} GB/s or more")  # percentile 95

# %% tags=["figure-cluster"]
show(scaling(nodes, bus, "nodes of 8 H100", "bus bandwidth (GB/s)", by_fit, "fitted",
             limit=400, limit_label="above 400 GB/s: a ring needs more than eight links"), alt=(
    f"From 2 to 64 nodes the bus bandwidth falls to {bus[-1] / bus[0]:.0%}; a ring with a fixed "
    f"latency per step falls to {by_fit[-1] / by_fit[0]:.0%}."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# It falls to less than a tenth, and none of the six is predicted to within 10 %: the errors are
# between 14 % and 67 %. A ring with a constant latency per step can reproduce the direction and the
# rough size of the drop. On 64 nodes, a chunk is 0.5 MB, which takes about a microsecond at
# $\beta$, and each of the thousand steps costs 15 more.
#
# </details>
#
# Do not read more into the fit. Its $\beta$ is close to eight network links of 50 GB/s (the lower
# edge of the gray band), which looks like a discovery, until you leave out the measurement on 2
# nodes: then $\beta$ is less than half of that. One point decides it. On 4 and 8 nodes, the dashed
# line is about one and a half times the measurements, even though those are part of the fit. On 64
# nodes, the runs differ among themselves by more than a factor of ten, even without the fastest and
# the slowest 5 %. And on 2 nodes, one run in twenty was faster than a ring through eight such links
# can be. (The 436 GB/s of a single node, a median, are a different measurement.) The model does not
# know who else was using the network, nor which algorithm NCCL chose.
#
# ### Trees and hierarchies
#
# Two common ways avoid a thousand steps. In a **tree**, the paths up and down have length
# $\log_2 N$. But the leaves only send on the way up and only receive on the way down, so half of
# the capacity of their links is idle. Therefore two trees run at once, arranged so that the leaves
# of one are inner nodes of the other ([Sanders, Speck & Träff
# 2009](https://doi.org/10.1016/j.parco.2009.09.001)).
#
# A **hierarchical** all-reduce follows the structure of the machine: a reduce-scatter inside each
# node, then a ring across nodes for the eighth of the tensor that each GPU is left with, then an
# all-gather inside the node.
#
# The cell counts its steps on 64 nodes and evaluates the formulas with the fitted $\alpha$ and
# $\beta$; read the times as orders of magnitude. The hierarchical all-reduce gets the same
# $\alpha$, 450 GB/s inside a node, and an eighth of $\beta$ per GPU across nodes.

# %% tags=["output-steps", "nbval-check-output"]
print(f"steps: {2 * (512 - 1):,} in a ring, {7 + 2 * (64 - 1) + 7} in a hierarchical all-reduce")
print(f"N alpha beta = {512 * cluster.latency * cluster.bandwidth / GB:.1f} GB")
tensors = [10 ** (k / 2) for k in range(10, 21)]


def hierarchical(num_bytes, latency, bandwidth):
    inside, across = cost.Link(latency, 450 * GB), cost.Link(latency, bandwidth / 8)
    return cost.hierarchical_all_reduce_seconds(num_bytes, 8, 64, inside, across)


lines = {
    "ring": [cost.ring_all_reduce_seconds(size, 512, *cluster) for size in tensors],
    "two trees": [cost.tree_all_reduce_seconds(size, 512, *cluster) for size in tensors],
    "hierarchical": [hierarchical(size, *cluster) for size in tensors],
}

# %% tags=["figure-crossing"]
show(crossing(tensors, lines, "tensor (bytes)", "all-reduce on 512 GPUs (s)"), alt=(
    "With 512 GPUs the two trees are fastest at every size shown; the ring comes close only at the "
    "largest sizes, where bandwidth matters most."
))

# %% [markdown]
# The ring's curve is flat over most of the range and bends near $N\alpha\beta$, here 3.2 GB: up to
# there, the latency of its thousand steps outweighs its bytes. The path up and down a tree is
# short. (At the far right, the hierarchical all-reduce is slower than the ring, because its formula
# runs the parts inside and across nodes one after the other.)
#
# **Predict.** With 512 ranks, the two trees are faster than the ring at every size in the figure.
# From which size on is the ring faster with 64 ranks, and with 8: kilobytes, megabytes or
# gigabytes? Compare how many latencies each of them pays.

# %% tags=["output-crossing", "nbval-check-output"]
def crossing_bytes(size):
    """The smallest power of 1.1 bytes at which the ring is as fast as two trees."""
    num_bytes = 1.0
    while (cost.ring_all_reduce_seconds(num_bytes, size, *cluster)
           > cost.tree_all_reduce_seconds(num_bytes, size, *cluster)):
        num_bytes *= 1.1
    return num_bytes


for size in (8, 64, 512):
    found = crossing_bytes(size)
    print(f"{size:4} ranks: the ring is faster from {plain_bytes(found):>7} on, "
          f"{found / cluster.latency / cluster.bandwidth:8,.2f} alpha beta")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Multiplied out, the trees' time is $4L\,\alpha + 2\,G/\beta + 2\sqrt{8L\,\alpha\,G/\beta}$. The
# ring sends about as many bytes and has no third term, but pays $D = 2(N-1) - 4L$ more latencies:
# 14 - 12 = 2 with 8 ranks, 102 with 64. The times are equal where the third term is about
# $D\alpha$, at $G = \frac{D^2}{32L}\,\alpha\beta$: 0.04 $\alpha\beta$ with 8 ranks and 54
# $\alpha\beta$ with 64, where $\alpha\beta$ is about 6 MB.
#
# </details>
#
# Short tensors and many ranks favor trees, long tensors and few ranks a ring. NCCL chooses for
# every call, with a model that has a latency and a bandwidth for each algorithm ([Hu et al.
# 2025](https://arxiv.org/abs/2507.04786)).
#
# ### A plausible number, and the question of section 1
#
# These formulas also test other people's estimates. Suppose someone tells you that the all-reduce
# of the gradient of a 100-billion-parameter model, 200 GB over 16 GPUs, takes 0.22 s at 900 GB/s.
#
# **Predict.** The estimate contains three errors, all in the same direction. Which? The cell
# corrects them one by one.

# %% tags=["output-claim", "nbval-check-output"]
gradient, nvlink, network = 200 * GB, 450 * GB, 50 * GB
volume = cost.ring_all_reduce_volume(100 * 10**9, 2, 16, rank=0).sent
print(f"the claim: 200 GB at 900 GB/s          {gradient / (900 * GB):.2f} s")
print(f"a rank sends {volume / GB:.0f} GB                    {volume / (900 * GB):.2f} s")
print(f"900 GB/s is both directions together   {volume / nvlink:.2f} s")
print(f"16 GPUs are two nodes: eight cards     {volume / (8 * network):.2f} s")
print(f"at the rate measured on two nodes      {volume / (bus[0] * GB):.2f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The tensor has to be sent nearly twice. The 900 GB/s of the datasheet are the sum of both
# directions of a link. And NVLink connects only the 8 GPUs of a node; between the two nodes, a ring
# has the eight network cards, together 400 GB/s.
#
# </details>
#
# The same functions answer the question of section 1: Llama 2 7B on 64 GPUs, which are 8 nodes,
# with half a second of computation per step. The latency is 0 again, except that the measured rate
# includes it.

# %% tags=["output-answer", "nbval-check-output"]
answers = {
    "naive, through rank 0": center,
    "one ring, 50 GB/s": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, network),
    "eight rings, 400 GB/s": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, 8 * network),
    "rate measured on 8 nodes": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, bus[2] * GB),
}
for name, seconds in answers.items():
    print(f"{name:24} {seconds:6.2f} s")

# %% [markdown]
# On the same links, one ring needs 0.53 s instead of 34 s, about as long as the computation. With
# NVLink inside the nodes, eight rings, each through a network card of its own, need 0.07 s. The
# last line, 0.27 s, follows from the 100 GB/s measured on 8 nodes, a quarter of 400 GB/s. That was
# for 256 MB, so it fits a gradient that is sent in pieces of this size; in one long tensor, latency
# would matter less.
#
# This time adds to every training step, unless the all-reduce runs during the backward pass, as
# with the [buckets](word:bucket) of chapter 4. And look once more at the state after N - 1 steps:
# each rank holds one chunk of the complete sum. Does every rank really need the rest? That is the
# question of [chapter 6](chapter:6).
#
# ## 8. Recap
#
# 1. If one rank adds everything, its link carries N - 1 tensors in each direction while the other
#    links wait.
# 2. A ring splits the tensor into N chunks; each rank sends $2\,\frac{N-1}{N}$ tensors, an even
#    share of the smallest possible total, and the ledger agrees to the byte.
# 3. A correct sum is not enough: sending whole tensors costs N/2 times the bytes, and ranks that
#    add in different orders can end with different bits. The ledger shows the first, a comparison
#    of bits the second.
# 4. A message of $n$ bytes costs $\alpha + n/\beta$ seconds. The ring needs $2(N-1)$ steps, so its
#    latency grows with N and outweighs its bytes below $N\alpha\beta$. For doubling, halving and
#    trees it grows with $\log_2 N$, and a hierarchical all-reduce on 64 nodes of 8 GPUs needs a
#    seventh of the ring's steps.
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
#   the data visible before the announcement. It adds no bytes to the data, but each step takes
#   about 6 microseconds.
# - **LL** (low latency) sends a flag with every 4 bytes of data, in one 8-byte store. Each step
#   takes about 1 microsecond, at no more than half the bandwidth.
# - **LL128** sends 8 bytes of flags with every 120 bytes of data, which needs a link that keeps
#   128-byte stores together, as NVLink does. Each step takes about 2 microseconds, at 94 % of the
#   bandwidth.
#
# **Predict.** For a ring over the 8 GPUs of a node, which protocol is fastest for 64 kB? For
# 256 MB?
#
# The cell puts these latencies and shares of the bandwidth, which are the paper's, into the ring's
# formula. The times are results of the formula, not measurements. They assume that data can use all
# of NVLink's 450 GB/s; in practice, about a fifth of it is overhead (see the next section).

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
# By the formula, LL is fastest for 64 kB and 1 MB, LL128 for 16 MB, and Simple for 256 MB, by a
# small margin. The paper's measurements (section V, figure 6) have the same order inside a node of
# GH200s: LL is best for small tensors and Simple for large ones, and LL128 is close to the best
# everywhere, 5 % behind Simple at the large end. On 16 nodes, flags cost more than the formula
# knows: for gigabytes, LL and LL128 fall far behind Simple.
#
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
# the sum once. In NVLS, each GPU also reads an N-th of the sums from the switch and sends it back
# to be distributed, so it sends (N + 1)/N tensors ([pull request 239 of
# nccl-tests](https://github.com/NVIDIA/nccl-tests/pull/239)). The cell computes time and bus
# bandwidth for 256 MB on 8 GPUs, without latency.

# %% tags=["output-nvls", "nbval-check-output"]
G, N = 256e6, 8
sent_by = {"ring": 2 * (N - 1) / N * G, "switch, ideal": G, "switch, NVLS": (N + 1) / N * G}
print("8 GPUs, 256 MB    sent by each GPU      time    bus bandwidth")
for name, sent in sent_by.items():
    took = sent / nvlink
    print(f"{name:16} {plain_bytes(sent):>17} {1e6 * took:6.0f} us"
          f" {2 * (N - 1) / N * G / took / GB:11.0f} GB/s")
print(f"measured on one node: 436 GB/s, {436 * GB / nvlink:.0%} of a link")
print(f"NVLS, size divided by time: {nvlink * N / (N + 1) / GB:.0f} GB/s")

# %% [markdown]
# In the ideal case, adding in the switch raises the bus bandwidth by three quarters; with NVLS, by
# no more than 56 %. Bus bandwidth can be higher than the bandwidth of the link, because it counts
# the bytes that a ring would have sent. Measurements stay below these bounds. According to a
# maintainer of NCCL, protocol overhead takes about 20 % of a link's 450 GB/s, so that rings reach
# about 370 GB/s on such nodes, and NVLS reaches up to 480 GB/s in bus bandwidth, but only for
# tensors larger than 256 MB ([issue 212 of
# nccl-tests](https://github.com/NVIDIA/nccl-tests/issues/212)). The playbook's 436 GB/s, for
# 256 MB, lie in between, so these sums were probably added in the switch. The reading as bus
# bandwidth survives this: as size divided by time, even NVLS cannot exceed 400 GB/s.
#
# Switches between nodes can add, too: InfiniBand switches do with SHARP, which NCCL uses through a
# plugin ([NVIDIA's
# documentation](https://docs.nvidia.com/networking/display/sharpltsv391/using+nvidia+sharp+with+nvidia+nccl)).
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
# In a single ring, everything between the nodes is sent from rank 3 to rank 4 and from rank 7 to
# rank 0: only two of the eight network cards send, and each of these messages changes rails. The
# hierarchical all-reduce uses all cards equally: each card sends a seventh of what each of those
# two had to send, and every message between the nodes stays on its rail. If nearly all traffic can
# be kept on rails, the switches that connect them can go: [Wang et al.
# 2023](https://arxiv.org/abs/2307.12169) estimate that this saves 38 to 77 % of the network's cost,
# at the same training speed.
#
# ## Further reading
#
# - Patarasuk, Yuan, [*Bandwidth Optimal All-reduce Algorithms for Clusters of
#   Workstations*](https://doi.org/10.1016/j.jpdc.2008.09.002), Journal of Parallel and Distributed
#   Computing 69(2), 2009: the minimum that must be sent, and the ring that achieves it on any tree
#   of switches.
# - Thakur, Rabenseifner, Gropp, [*Optimization of Collective Communication Operations in
#   MPICH*](https://doi.org/10.1177/1094342005051521), 2005, sections 3 and 4: the cost model,
#   doubling and halving.
# - Sanders, Speck, Träff, [*Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and
#   Scan*](https://doi.org/10.1016/j.parco.2009.09.001), 2009: two trees that keep every link busy.
# - Sergeev, Del Balso, [Horovod: Fast and Easy Distributed Deep Learning in
#   TensorFlow](https://arxiv.org/abs/1802.05799), 2018: how the ring came to deep learning.
# - Hu et al., [Demystifying NCCL](https://arxiv.org/abs/2507.04786), 2025: protocols, algorithms
#   and how NCCL chooses.
# - Tazi et al., [The Ultra-Scale
#   Playbook](https://huggingface.co/spaces/nanotron/ultrascale-playbook), 2025, section on pipeline
#   parallelism: the bandwidths measured on 1 to 64 nodes.
