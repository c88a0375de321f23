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
# # Ring all-reduce: no link carries more than another
#
# **45 minutes. No GPU. Exercises 5.1 to 5.4.**
#
# *You need:* chapter 4's `run(fn, 4)`, and why ranks that read different data need the sum of
# their gradients.
#
# *You will be able to:*
# - **build** the sum over all ranks from sends and receives, with the fewest bytes that can do it;
# - **catch** the ring that is right and still moves too much, and the one that hangs;
# - **predict** how long it takes, on your machine and on a cluster, from two measured numbers.
#
# Run the cells in order. When the text asks you to predict something, write your guess down before
# you open the fold.

# %%
import inspect
import time

import torch
import torch.distributed as dist

from minitron import cost
from minitron.comm.collectives import (
    all_reduce_doubling, all_reduce_halving, all_reduce_naive, all_reduce_ring, pass_on,
    reduce_scatter_ring,
)
from minitron.launch import RankError, run
from minitron.launch.slow_network import SlowNetwork

# %%
from teaching.check import check
from teaching.figures import (
    crossing, curves, plain_bytes, ring_frames, scaling, show, wire,
)
from teaching.widgets import ring_explorer
from minitron.measure.ledger import Ledger

torch.set_num_threads(1)
MB, GB = 1e6, 1e9

# %% [markdown]
# ## 1. The question
#
# Llama 2 7B trains on 64 GPUs. Each GPU has read its own part of the batch and holds its own
# gradient; before the optimizer's step all 64 need the sum. The obvious plan: everyone sends to
# GPU 0, GPU 0 adds and sends the sum back. How long is that, if a GPU's link to the network takes
# 50 GB/s in each direction?

# %% tags=["output-question", "nbval-check-output"]
llama, num_gpus, link = cost.PUBLISHED["Llama 2 7B"], 64, 50 * GB
gradient_bytes = 2 * cost.num_parameters(llama)  # 16-bit values
center = cost.naive_all_reduce_seconds(gradient_bytes, num_gpus, 0, link)
flops = 4096 * cost.training_flops_per_token(llama, 4096)
print(f"one gradient: {gradient_bytes / GB:.1f} GB")
print(f"the sum, with GPU 0 in the middle: {center:.1f} s")
print(f"computing it, from 4,096 tokens a GPU at 400 TFLOP/s: {flops / 400e12:.2f} s")

# %% [markdown]
# Half a second of work, and then more than half a minute in which 63 links are almost idle. The
# links are there. They are used badly.

# %% [markdown]
# ## 2. Estimate
#
# Smaller, and real: four ranks each hold a 40 MB gradient and all need the sum.
#
# **Predict.** Everyone sends to rank 0, rank 0 adds and sends back. Which rank's link is the
# bottleneck, and how many megabytes cross it?
#
# <details><summary>Answer</summary>
#
# Rank 0's: three tensors of 40 MB come in, three go out. Every other link carries one each way.
#
# </details>

# %%
def in_the_middle(tensor, group):
    """Sum `tensor` over all ranks, in place: rank 0 does it."""
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
# The **ledger** writes down what each rank sends and receives. `counted` runs any all-reduce under
# it, on numbers whose sum we know.


# %%
def counted(group, all_reduce, num_elements):
    """Returns whether the sum is right, and the bytes that this rank has sent and received."""
    pattern = torch.arange(num_elements) % 7
    tensor = (pattern + group.rank()).float()
    with Ledger() as ledger:
        all_reduce(tensor, group)

    size = group.size()
    is_sum = torch.equal(tensor, (size * pattern + size * (size - 1) / 2).float())
    return is_sum, ledger.bytes_sent(), ledger.bytes_received()


# %% tags=["output-naive", "nbval-check-output"]
n = 10_000_000  # 40 MB of float32
in_middle = run(counted, 4, in_the_middle, n)
print("rank   right      sent   formula  received   formula")
for rank, (is_sum, sent, received) in enumerate(in_middle):
    formula = cost.naive_all_reduce_volume(n, 4, 4, rank)
    print(f"{rank:4}   {is_sum!s:5} {sent / MB:6.0f} MB {formula.sent / MB:6.0f} MB "
          f"{received / MB:6.0f} MB {formula.received / MB:6.0f} MB")

thousand = cost.naive_all_reduce_volume(n, 4, 1000, rank=0)
print(f"rank 0 of 1,000: {sum(thousand) / GB:.0f} GB")

# %% tags=["figure-naive"]
show(wire(
    {"in the middle": [sent for _, sent, _ in in_middle]},
    {"in the middle": [cost.naive_all_reduce_volume(n, 4, 4, rank).sent for rank in range(4)]},
), alt="Rank 0 sends three tensors, every other rank one: the link of rank 0 is the bottleneck.")

# %% [markdown]
# With 1,000 ranks, rank 0 would move 80 GB for a gradient of 40 MB. Nobody builds it this way. What
# would you change, so that no link carries more than any other?

# %% [markdown]
# ## 3. Picture
#
# Let every rank be the middle, for a part of the tensor. Cut it into as many chunks as there are
# ranks. In each step every rank sends one chunk to the next rank and receives another from the one
# before, so all links are busy at once, in both directions.
#
# A chunk starts as the part of one rank. At each hop the receiver adds its own part and, in the
# next step, sends the result on. After N - 1 steps each rank holds one chunk that has been
# everywhere: this is **reduce-scatter**. Then the finished chunks go round once more, without
# adding: **all-gather**.
#
# Below, a row is a rank and a column is a chunk. A stripe is the part of one rank, in its color,
# and an outlined chunk has just come from the row above (row 0 from the last).

# %% tags=["figure-ring"]
show(ring_frames(4), alt=(
    "Every chunk walks round the ring and collects a part at each rank; after three steps each "
    "rank has one complete sum, after three more all ranks have all of them."
))

# %%
ring_explorer()

# %% [markdown]
# **Predict.** How many bytes does a rank send in all, in units of the tensor? And with 1,000 ranks?
#
# <details><summary>Answer</summary>
#
# Twice N - 1 steps, each sends the N-th part: $2\,\frac{N-1}{N}$ of the tensor. That is 1.5 for
# four ranks and never reaches 2. The number of ranks has almost gone from the formula.
#
# </details>

# %% [markdown]
# ## 4. By hand
#
# One step is a send and a receive at the same time. `isend` starts the send and returns at once.


# %%
def hop(outgoing, incoming, group):
    """Send to the next rank while receiving from the one before."""
    after = (group.rank() + 1) % group.size()
    before = (group.rank() - 1) % group.size()
    sending = dist.isend(outgoing, group=group, group_dst=after)
    dist.recv(incoming, group=group, group_src=before)
    sending.wait()


# %%
def reduce_scatter(chunks, group):
    """After N - 1 steps chunk number `rank` is the sum over all ranks."""
    c = group.rank() - 1
    for _ in range(group.size() - 1):
        incoming = torch.empty_like(chunks[c - 1])
        hop(chunks[c], incoming, group)
        c -= 1  # below 0 it counts from the end: the ring closes by itself
        chunks[c].add_(incoming)


# %%
def all_gather(chunks, group):
    """Chunk number `rank` is finished before, all chunks are afterwards."""
    c = group.rank()
    for _ in range(group.size() - 1):
        hop(chunks[c], chunks[c - 1], group)
        c -= 1


def ring(tensor, group):
    chunks = tensor.tensor_split(group.size())
    reduce_scatter(chunks, group)
    all_gather(chunks, group)


# %% [markdown]
# The chunks are views: adding to a chunk adds to the tensor. And 1,000,003 elements, which three
# ranks cannot share evenly:

# %% tags=["output-byhand", "nbval-check-output"]
print("ranks  rank   right          sent       formula  tensors sent")
for size, elements in ((4, n), (3, 1_000_003)):
    for rank, (is_sum, sent, _) in enumerate(run(counted, size, ring, elements)):
        formula = cost.ring_all_reduce_volume(elements, 4, size, rank)
        print(f"{size:5} {rank:5}   {is_sum!s:5} {sent:13,} {formula.sent:13,} "
              f"{sent / (4 * elements):13.6f}")

# %% [markdown]
# To the byte, on every rank, also where a chunk is one element longer than the others. No rank
# sends much more than another, and the volume hardly depends on how many they are:

# %%
def tensors_sent(group):
    """Tensors that this rank sends, with rank 0 in the middle and in a ring."""
    return [counted(group, all_reduce, 9600)[1] / (4 * 9600)
            for all_reduce in (in_the_middle, ring)]


sizes = [2, 3, 4, 6, 8]
of_rank_0 = [run(tensors_sent, size)[0] for size in sizes]
middle, in_ring = zip(*of_rank_0, strict=True)

# %% tags=["figure-volume"]
show(curves(sizes, {"in the middle": middle, "ring": in_ring}, "ranks", "tensors sent by rank 0",
            {"twice the tensor": [2] * len(sizes)}), alt=(
    "In the middle, rank 0 sends one more tensor with each further rank; in a ring it never sends "
    "more than two."
))

# %% [markdown]
# Could another algorithm send less? No. Every part of the tensor must be sent N - 1 times before
# all N are in its sum, and the sum must be sent N - 1 times before all N ranks have it. Shared
# evenly, that is $2\,\frac{N-1}{N}$ of the tensor for each rank, which the ring reaches (Patarasuk
# and Yuan 2009).

# %% [markdown]
# ## 5. The trap: a ring that is right
#
# Here is a shorter ring, without chunks. A tensor goes round, everyone adds what comes by. This is
# no straw man: PyTorch's tutorial *Writing Distributed Applications* builds its all-reduce this
# way, and leaves the chunks as an exercise. The Gloo library lists it as `allreduce_ring`, above
# `allreduce_ring_chunked`.


# %%
def whole_ring(tensor, group):
    passing = tensor.clone()
    for _ in range(group.size() - 1):
        incoming = torch.empty_like(tensor)
        hop(passing, incoming, group)
        tensor += incoming
        passing = incoming


# %% [markdown]
# **Predict.** Is the sum right? How many times the ring's bytes does a rank send, with 2 ranks,
# with 4, with 8?

# %% tags=["output-trap", "nbval-check-output"]
print("ranks   right      sent   ring's formula   times")
whole, least = {}, {}
for size in (2, 4, 8):
    everyone = run(counted, size, whole_ring, 9600)
    whole[f"{size} ranks"] = [sent for _, sent, _ in everyone]
    least[f"{size} ranks"] = [cost.ring_all_reduce_volume(9600, 4, size, 0).sent] * size
    sent, formula = everyone[0][1], least[f"{size} ranks"][0]
    right = all(is_sum for is_sum, _, _ in everyone)
    print(f"{size:5}   {right!s:5} {sent:9,} {formula:16,} {sent / formula:7.2f}")

# %% tags=["figure-trap"]
show(wire(whole, least), alt=(
    "With two ranks whole tensors cost what the ring costs, with eight four times as much."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# The sum is right. But N - 1 whole tensors instead of $2\,\frac{N-1}{N}$ are N/2 times the bytes.
# With two ranks there is nothing to see, and a test on two ranks is the one most people write.
#
# </details>
#
# There is a second fault in it. Those were small whole numbers, which add up without rounding.
# Gradients are not.


# %%
def all_alike(group, all_reduce, num_elements):
    """Whether all ranks end with the same bits."""
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
        print(f"{size} ranks, {all_reduce.__name__:10}  all ranks hold the same bits: {alike}")

# %% [markdown]
# Floating-point addition depends on the order, and in the ring without chunks each rank adds in an
# order of its own. The ranks' gradients differ in the last bits, then their weights, and no later
# step brings them together again. With chunks a sum is made once, on one path, and copied. Two
# ranks are blind to this, too: a + b is b + a.
#
# One more way to get it wrong. Everyone sends first, and receives then, with the plain `send`.


# %%
def send_first(group):
    x = torch.ones(1000)
    after = (group.rank() + 1) % group.size()
    before = (group.rank() - 1) % group.size()
    dist.send(x, after, group)
    dist.recv(x, before, group)


# %% tags=["output-hang"]
try:
    run(send_first, 4)
except RankError as error:
    print(error)

# %% [markdown]
# A `send` may wait until the other side receives, and here the other side waits in its own `send`,
# all the way round. Some libraries have a buffer for short messages. Then this code passes its
# tests, and hangs on the first long tensor.

# %% [markdown]
# ## 6. The real one
#
# Which lines are those of section 4, and what is different?

# %%
print(inspect.getsource(reduce_scatter_ring))

# %%
print(inspect.getsource(pass_on))

# %% [markdown]
# The indices and the one addition are those of section 4. Three things make it fast. All receives
# are posted up to two steps early (`ahead=2`), so a message finds its place ready. There are three
# buffers, kept between calls: two fill while the third is added. And a send is waited for at the
# very end. On GPUs the order of the calls is the order on the wire, so there each step posts its
# send and its receive together. A chunk above 1 MiB travels in pieces.
#
# The oracle: each algorithm of the package, on one to five ranks, at lengths that do not divide,
# that are shorter than the ring, and zero. The sum is known; what each rank has sent and received
# is held against the formula. The ring of section 5 goes along, against the formula of the ring.

# %%
ALGORITHMS = {
    "naive": (all_reduce_naive, cost.naive_all_reduce_volume),
    "ring": (all_reduce_ring, cost.ring_all_reduce_volume),
    "doubling": (all_reduce_doubling, cost.doubling_all_reduce_volume),
    "halving": (all_reduce_halving, cost.halving_all_reduce_volume),
}
SUSPECT = {"whole tensors": (whole_ring, cost.ring_all_reduce_volume)}


def judged(group, all_reduce, volume, num_elements):
    """Whether the sum, the bytes and the bits are right on this rank."""
    is_sum, *moved = counted(group, all_reduce, num_elements)
    formula = volume(num_elements, 4, group.size(), group.rank())
    return is_sum, tuple(moved) == formula, all_alike(group, all_reduce, num_elements)


# %%
def judge_all(group, candidates):
    lengths = {0, 1, group.size() - 1, group.size() + 1, 1003}
    return {name: [judged(group, *functions, length) for length in sorted(lengths)]
            for name, functions in candidates.items()}


# %% tags=["output-oracle", "nbval-check-output"]
verdicts = [verdict for size in range(1, 6)
            for verdict in run(judge_all, size, ALGORITHMS | SUSPECT)]
print("               cases   right sum   bytes of the formula   same bits")
for name in verdicts[0]:
    cases = [case for verdict in verdicts for case in verdict[name]]
    sums, volumes, bits = (sum(column) for column in zip(*cases, strict=True))
    print(f"{name:14} {len(cases):5} {sums:11} {volumes:22} {bits:11}")

# %% [markdown]
# The package's four agree in every case. Whole tensors pass where there is nothing to send, or
# where one or two ranks cannot tell: the wrong bytes and the wrong bits are all on three ranks and
# more.

# %% [markdown]
# ## 7. Measure
#
# ### What a step costs
#
# Bytes are half of the story. A message takes $\alpha + n/\beta$ seconds: $\alpha$ is the
# **latency**, the price of any message, however short, and $\beta$ the **bandwidth**. The ring
# sends few bytes, but in $2(N-1)$ messages, one after the other.
#
# **Recursive doubling** needs fewer: swap the whole tensor with a partner at distance 1, then 2,
# then 4. **Recursive halving and doubling** swaps only the part that a rank still has to sum:
# half of the tensor, then a quarter, then an eighth, and the same way back.
#
# **Predict.** Eight ranks. Which of the four is best for 1 kB? Which for 4 MB?

# %%
def emulated(group, num_bytes, latency, bandwidth):
    """Seconds of each algorithm on a network made slow: an emulation, by waiting."""
    tensor, fastest = torch.zeros(num_bytes // 4), {}
    for name, (all_reduce, _) in 3 * list(ALGORITHMS.items()):
        dist.barrier(group=group)
        begin = time.perf_counter()
        with SlowNetwork(latency, bandwidth):
            all_reduce(tensor, group)
        seconds = time.perf_counter() - begin
        fastest[name] = min(seconds, fastest.get(name, seconds))
    return fastest


# %%
FORMULA = {
    "naive": cost.naive_all_reduce_seconds, "ring": cost.ring_all_reduce_seconds,
    "doubling": cost.doubling_all_reduce_seconds, "halving": cost.halving_all_reduce_seconds,
}
slow = (5e-3, 100 * MB)  # 5 ms, 100 MB/s
short, long = (run(emulated, 8, num_bytes, *slow)[0] for num_bytes in (1000, 4_000_000))

# %% tags=["output-emulated"]
print(SlowNetwork(*slow))
print("8 ranks                      1 kB                 4 MB")
print("                      formula   measured   formula   measured")
for name, seconds in FORMULA.items():
    print(f"{name:18} {1e3 * seconds(1e3, 8, *slow):8.0f} ms {1e3 * short[name]:7.0f} ms"
          f" {1e3 * seconds(4e6, 8, *slow):7.0f} ms {1e3 * long[name]:7.0f} ms")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Doubling for the short tensor: three messages instead of fourteen. Halving for the long one: six
# messages, and as few bytes as the ring.
#
# </details>
#
# The halving has as many bytes as the ring and fewer messages. Why a ring, then? The formula gives
# every pair of ranks a link of their own. Halving needs that: it has another partner in each step,
# many of them far away, and their messages meet on shared links. A ring talks to two neighbors
# alone, which any wiring allows without two messages on one link (Patarasuk and Yuan 2009), and it
# takes any N as it is.

# %% [markdown]
# ### Your machine
#
# Here the ranks are processes of one computer, and what they send is copied by its operating
# system. Two numbers should describe that, too. We time the ring at six sizes, keep the fastest of
# several runs (whatever else this machine does can only add time), and fit $\alpha$ and $\beta$ by
# least squares.


# %%
def fastest(group, sizes):
    """Seconds of this rank's fastest ring all-reduce of each size in bytes."""
    tensor, best = torch.zeros(max(sizes) // 4), [float("inf")] * len(sizes)
    for _ in range(20):
        for i, num_bytes in enumerate(sizes):
            dist.barrier(group=group)
            begin = time.perf_counter()
            all_reduce_ring(tensor[:num_bytes // 4], group)
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


# %%
def measure(sizes):
    return [max(ranks) for ranks in zip(*run(fastest, 4, sizes, watch=False), strict=True)]


fitted_sizes = [2**14 * 4**i for i in range(6)]
measured = measure(fitted_sizes)
messages, chunk = 2 * (4 - 1), 1 / 4
mine = cost.fit_link([num_bytes * chunk for num_bytes in fitted_sizes],
                     [seconds / messages for seconds in measured])

# %% [markdown]
# **Predict**, with the two numbers, three sizes that were not measured. Two lie between the others,
# the third is beyond them.

# %% tags=["output-fit"]
print(f"alpha {1e6 * mine.latency:.0f} microseconds, beta {mine.bandwidth / GB:.2f} GB/s")
print("    size   predicted   measured   measured / predicted")
new_sizes = [500_000, 8_000_000, 32_000_000]
for num_bytes, seconds in zip(new_sizes, measure(new_sizes), strict=True):
    predicted = cost.ring_all_reduce_seconds(num_bytes, 4, *mine)
    print(f"{num_bytes / MB:5.1f} MB {1e3 * predicted:8.2f} ms {1e3 * seconds:7.2f} ms "
          f"{seconds / predicted:14.2f}")

# %% tags=["figure-fit"]
show(crossing(
    fitted_sizes,
    {"fitted": [1e3 * cost.ring_all_reduce_seconds(size, 4, *mine) for size in fitted_sizes]},
    "tensor (bytes)", "ring all-reduce (ms; dots: measured)",
    {"fitted": [1e3 * seconds for seconds in measured]},
), alt="Short tensors all take the same time, the latency's; long ones grow with their bytes.")

# %% [markdown]
# Where the two disagree, an assumption of the model is broken, and here are several to choose from.
# Adding costs nothing, it says, but here the processor that adds is the one that copies. Each
# rank's link is its own, it says, but these share one memory and a few cores. And what fits into
# the processor's cache is copied faster than what does not.

# %% [markdown]
# ### On real GPUs
#
# The same two numbers for a cluster. The Ultra-Scale Playbook (2025, section on pipeline
# parallelism) shows NCCL's all-reduce of 256 MB on nodes of 8 H100 as **bus bandwidth**:
# $2\,\frac{N-1}{N}$ of the tensor over the time. It would be the same for any N if bandwidth were
# all that counts. By the datasheets an H100 has 450 GB/s in each direction to the others in its
# node (NVLink 4), and a network link of 50 GB/s (400 Gb/s); a node has eight of these. (The
# figure's axis says bandwidth. It gives 436 GB/s for one node, and only as bus bandwidth does that
# fit through a link of 450.)
#
# **Predict.** 2 nodes, then 64. Does the bus bandwidth fall, and to what?

# %%
nodes = [2, 4, 8, 16, 32, 64]  # of 8 GPUs; GB/s, over many runs
bus = [361.7492, 160.1395, 99.5643, 84.7405, 64.9254, 32.9378]
gpus = [8 * count for count in nodes]
taken = [cost.ring_all_reduce_seconds(256e6, size, 0, rate * GB)
         for size, rate in zip(gpus, bus, strict=True)]
cluster = cost.fit_link([256e6 / size for size in gpus],
                        [t / (2 * (size - 1)) for size, t in zip(gpus, taken, strict=True)])
by_fit = [2 * (size - 1) / size * 0.256 / cost.ring_all_reduce_seconds(256e6, size, *cluster)
          for size in gpus]

# %% tags=["output-cluster", "nbval-check-output"]
print(f"alpha {1e6 * cluster.latency:.1f} microseconds, beta {cluster.bandwidth / GB:.0f} GB/s; "
      f"eight links of 50 GB/s make {8 * 50}")
print("nodes   measured   fitted")
for count, rate, fit in zip(nodes, bus, by_fit, strict=True):
    print(f"{count:5} {rate:8.0f} {fit:8.0f} GB/s")
low, high = 12.4935, 177.36  # percentiles 5 and 95 of the runs on 64 nodes
print(f"64 nodes: {2 * (gpus[-1] - 1):,} hops in a ring; "
      f"runs from {low:.0f} to {high:.0f} GB/s")

# %% tags=["figure-cluster"]
show(scaling(nodes, bus, "nodes of 8 H100", "bus bandwidth (GB/s)", by_fit, "fitted",
             limit=400, limit_label="eight network links of 50 GB/s"), alt=(
    "The bus bandwidth falls to less than a tenth from 2 to 64 nodes; a ring with a fixed latency "
    "per hop falls the same way."
))

# %% [markdown]
# <details><summary>Answer</summary>
#
# It falls to less than a tenth. The fit finds the eight network links in $\beta$ without being
# told, and a latency per hop. That is nothing for one message, but a ring over 64 nodes has a
# thousand hops.
#
# </details>
#
# Two numbers describe the fall, roughly. That is no proof that latency is all of its cause: leave
# out the slowest and the fastest 5 % of the runs on 64 nodes, and the rest still spread as the last
# line says. What the model does not know is who else was using the network, and which algorithm
# NCCL chose.
#
# ### Trees and levels
#
# There are two ways out of a thousand hops. A **tree** has a path of $\log_2 N$: packet after
# packet goes up from child to parent, which adds, and the sums come down. With two trees at once,
# where a leaf of one is a branch of the other, all links are busy (Sanders, Speck, Träff 2009).
# **Levels** use the machine's shape: reduce-scatter inside each node, then a ring across the nodes
# for the eighth of the tensor that each GPU is left with, then all-gather inside.

# %%
sizes = [10 ** (k / 2) for k in range(10, 21)]


def levels(num_bytes, latency, bandwidth):
    inside, across = cost.Link(latency, 450 * GB), cost.Link(latency, bandwidth / 8)
    return cost.hierarchical_all_reduce_seconds(num_bytes, 8, 64, inside, across)


lines = {
    "ring": [cost.ring_all_reduce_seconds(size, 512, *cluster) for size in sizes],
    "tree": [cost.tree_all_reduce_seconds(size, 512, *cluster) for size in sizes],
    "levels": [levels(size, *cluster) for size in sizes],
}

# %% tags=["figure-crossing"]
show(crossing(sizes, lines, "tensor (bytes)", "all-reduce on 512 GPUs (s)"), alt=(
    "With 512 GPUs the tree is fastest at every size shown; the ring comes close only where "
    "bandwidth is everything."
))

# %% [markdown]
# **Predict.** From which size on is the ring faster than the tree, with 8 ranks? With 512?

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
# Short tensors and many ranks want a tree, long ones and few ranks a ring. (Levels lose at the very
# end, for here what is inside and what is across take place one after the other.) NCCL chooses in
# every call, by a model with a latency and a bandwidth for each algorithm.
#
# ### A claim, and the question of section 1
#
# One can read that the all-reduce of a 100-billion-parameter model's gradient, 200 GB over 16 GPUs,
# takes 0.22 s at 900 GB/s.
#
# **Predict.** It errs in three ways, all in the same direction. Which?

# %% tags=["output-claim", "nbval-check-output"]
gradient, size, nvlink, network = 200 * GB, 16, 450 * GB, 50 * GB
volume = cost.ring_all_reduce_volume(100 * 10**9, 2, size, rank=0).sent
two_nodes = cost.hierarchical_all_reduce_seconds(
    gradient, 8, 2, cost.Link(0, nvlink), cost.Link(0, network)
)
print(f"the claim: 200 GB at 900 GB/s          {gradient / (900 * GB):.2f} s")
print(f"a rank sends {volume / GB:.0f} GB                    {volume / (900 * GB):.2f} s")
print(f"900 GB/s is both directions together   {volume / nvlink:.2f} s")
print(f"16 GPUs are two nodes: in levels       {two_nodes:.2f} s")
print(f"at the rate measured on two nodes      {volume / (bus[0] * GB):.2f} s")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The tensor must be sent nearly twice. A link's datasheet adds up both directions. And NVLink
# connects the 8 GPUs of a node; to the other 8 the way is the network. (The measured rate beats
# levels that wait for each other: their parts can overlap.)
#
# </details>
#
# The same functions answer section 1. Llama 2 7B on 64 GPUs, 8 nodes, half a second of computing
# per step:

# %% tags=["output-answer", "nbval-check-output"]
answers = {
    "GPU 0 in the middle": center,
    "one ring, 50 GB/s": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, network),
    "levels, NVLink inside": cost.hierarchical_all_reduce_seconds(
        gradient_bytes, 8, 8, cost.Link(0, nvlink), cost.Link(0, network)),
    "rate measured on 8 nodes": cost.ring_all_reduce_seconds(gradient_bytes, 64, 0, bus[2] * GB),
}
for name, seconds in answers.items():
    print(f"{name:25} {seconds:6.2f} s")

# %% [markdown]
# Same network, same sum. What is left still has to be paid in every step, unless it happens while
# the backward pass computes: that is chapter 4's bucketed data parallelism. And look once more at
# the state after N - 1 steps: each rank holds the sum of one chunk. Why should every rank keep all
# of the rest? That question is the next chapter.

# %% [markdown]
# ## 8. Recap
#
# 1. With one rank in the middle its link carries N - 1 tensors each way, and the others wait.
# 2. A ring cuts the tensor into N chunks; each rank sends $2\,\frac{N-1}{N}$ tensors, the least
#    possible, exact to the byte.
# 3. A sum that is right can still be wrong: whole tensors cost N/2 times the bytes, and ranks that
#    add in different orders drift apart. The ledger and a comparison of bits show it.
# 4. A message costs $\alpha + n/\beta$. The ring has $2(N-1)$ of them, so its latency grows with N;
#    that of doubling, halving and trees grows with $\log_2 N$, and levels keep most hops inside a
#    node.
# 5. On an idle machine, two fitted numbers predict sizes that were not measured, within a factor of
#    two, and describe 16 to 512 GPUs in rough outline; where they fail, ask who shares the link.
#
# ## Exercises
#
# Write your answers into `exercises/ch05_ring_all_reduce.py`, save, and run the cell. In a
# terminal, `minitron hint 5.1` gives hints in three steps.
#
# **5.1 Ring reduce-scatter** (30 minutes): on real ranks, any length, without section 4 in sight.

# %%
check("5.1")

# %% [markdown]
# **5.2 Ring all-gather** (15 minutes): the second half of the way.

# %%
check("5.2")

# %% [markdown]
# **5.3 Uneven chunks, to the byte** (20 minutes): what the ledger will count, before it does.

# %%
check("5.3")

# %% [markdown]
# **5.4 Measure, fit, choose** (25 minutes): a link from measured messages, and where the ring wins.

# %%
check("5.4")

# %% [markdown]
# ## Further reading
#
# - Patarasuk, Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, 2009:
#   the least that must be sent, and the ring that reaches it on any wiring.
# - Thakur, Rabenseifner, Gropp, *Optimization of Collective Communication Operations in MPICH*,
#   2005, sections 3 and 4: the cost model, doubling and halving.
# - Sanders, Speck, Träff, *Two-Tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan*,
#   2009: two trees that keep every link busy.
# - Sergeev, Del Balso, *Horovod: Fast and Easy Distributed Deep Learning in TensorFlow*, 2018: how
#   the ring came to training.
# - Tazi et al., *The Ultra-Scale Playbook*, 2025, section on pipeline parallelism: the bandwidths
#   measured on 1 to 64 nodes.
