"""Chapter 5's measurements: timed all-reduces, a cluster's link from published rates, rails."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.comm.collectives import all_reduce_ring
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from teaching.lab import MEASURING

AllReduce = Callable[[Tensor, ProcessGroup], None]

# On this machine


def emulated_seconds(
    group: ProcessGroup,
    algorithms: dict[str, AllReduce],
    num_bytes: int,
    link: cost.Link,
    repeats: int = 3,
) -> dict[str, list[float]]:
    """Return the seconds of each algorithm's runs on an emulated network of `link`, sorted."""
    tensor, took = torch.zeros(num_bytes // 4), {name: [] for name in algorithms}
    for name, all_reduce in repeats * list(algorithms.items()):
        dist.barrier(group=group)
        begin = time.perf_counter()
        with SlowNetwork(*link):
            all_reduce(tensor, group)
        took[name].append(time.perf_counter() - begin)
    return {name: sorted(seconds) for name, seconds in took.items()}


def ring_seconds(sizes: Sequence[int], num_ranks: int = 4, repeats: int = 20) -> list[float]:
    """Return the slowest rank's seconds of the fastest ring all-reduce of each size in bytes."""
    return fastest_seconds({"ring": all_reduce_ring}, sizes, num_ranks, repeats)["ring"]


def fastest_seconds(
    algorithms: dict[str, AllReduce], sizes: Sequence[int], num_ranks: int = 4, repeats: int = 20
) -> dict[str, list[float]]:
    """Return, by algorithm, the slowest rank's seconds of the fastest run of each size in bytes."""
    by_rank = run(
        fastest_runs, num_ranks, algorithms, sizes, repeats, timeout=MEASURING, watch=False
    )
    return {
        name: [max(ranks) for ranks in zip(*(best[name] for best in by_rank), strict=True)]
        for name in algorithms
    }


def fastest_runs(
    group: ProcessGroup, algorithms: dict[str, AllReduce], sizes: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """Return this rank's seconds of its fastest runs; sizes and algorithms take turns."""
    tensor = torch.zeros(max(sizes) // 4)
    best = {name: [float("inf")] * len(sizes) for name in algorithms}
    for _ in range(repeats):
        for i, num_bytes in enumerate(sizes):
            for name, all_reduce in algorithms.items():
                dist.barrier(group=group)
                begin = time.perf_counter()
                all_reduce(tensor[: num_bytes // 4], group)
                best[name][i] = min(best[name][i], time.perf_counter() - begin)
    return best


# On a cluster: bus bandwidths in GB/s of an all-reduce, by the number of nodes

GPUS_PER_NODE, TENSOR_BYTES = 8, 256e6


def fit_cluster(nodes: Sequence[int], bus: Sequence[float]) -> cost.Link:
    """Fit the link of a ring over all GPUs to bus bandwidths measured on `nodes` nodes."""
    sizes = [GPUS_PER_NODE * count for count in nodes]
    seconds = [
        cost.ring_all_reduce_seconds(TENSOR_BYTES, size, 0, rate * 1e9)
        for size, rate in zip(sizes, bus, strict=True)
    ]
    return cost.fit_link(
        [TENSOR_BYTES / size for size in sizes],
        [t / (2 * (size - 1)) for size, t in zip(sizes, seconds, strict=True)],
    )


def bus_bandwidth(num_nodes: int, link: cost.Link) -> float:
    """Return the GB/s that a ring over all GPUs of `num_nodes` nodes would show."""
    size = GPUS_PER_NODE * num_nodes
    seconds = cost.ring_all_reduce_seconds(TENSOR_BYTES, size, *link)
    return 2 * (size - 1) / size * TENSOR_BYTES / seconds / 1e9


def node_and_rail(group: ProcessGroup, gpus_per_node: int) -> tuple[ProcessGroup, ProcessGroup]:
    """Return two groups of this rank: of its node, and of its like in every node."""
    ranks = torch.arange(group.size()).view(-1, gpus_per_node)
    node, place = divmod(group.rank(), gpus_per_node)
    inside = [dist.new_group(row) for row in ranks.tolist()]
    across = [dist.new_group(column) for column in ranks.T.tolist()]
    return inside[node], across[place]
