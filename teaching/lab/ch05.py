"""Chapter 5's measurements: verdicts, times, a cluster's link from published rates, rails."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from minitron import cost
from minitron.comm.collectives import all_reduce_ring
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from teaching.figures import plain_bytes
from teaching.lab import MEASURING

AllReduce = Callable[[Tensor, ProcessGroup], None]

# Is it right?


def print_verdicts(
    candidates: dict[str, tuple[AllReduce, Callable]],
    counted: Callable,
    all_alike: Callable,
    longest: int,
    most_ranks: int = 5,
) -> None:
    """Print how often each all-reduce was right, on 1 to `most_ranks` ranks.

    Lengths are short, or `longest`. A candidate comes with its formula. A case is one rank of one
    run; `counted` and `all_alike` are the chapter's.
    """
    verdicts = [
        verdict
        for size in range(1, most_ranks + 1)
        for verdict in run(judge, size, candidates, counted, all_alike, longest)
    ]
    print("               cases   correct sum   bytes as in the formula   same bits")
    for name in candidates:
        cases = [case for verdict in verdicts for case in verdict[name]]
        sums, as_formula, bits = (sum(column) for column in zip(*cases, strict=True))
        print(f"{name:14} {len(cases):5} {sums:13} {as_formula:25} {bits:11}")


def judge(
    group: ProcessGroup,
    candidates: dict[str, tuple[AllReduce, Callable]],
    counted: Callable,
    all_alike: Callable,
    longest: int,
) -> dict[str, list[tuple[bool, bool, bool]]]:
    """Return whether sum, bytes and bits are right on this rank, by candidate and length."""
    size, found = group.size(), {}
    for name, (all_reduce, volume) in candidates.items():
        found[name] = []
        for length in sorted({0, 1, size - 1, size + 1, longest}):
            correct, *moved = counted(group, all_reduce, length)
            as_formula = tuple(moved) == volume(length, 4, size, group.rank())
            found[name].append((correct, as_formula, all_alike(group, all_reduce, length)))
    return found


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


def ring_runs(sizes: Sequence[int], num_ranks: int = 4, repeats: int = 20) -> list[list[float]]:
    """Return the sorted seconds of every run of the ring all-reduce, by size in bytes."""
    return timed_runs({"ring": all_reduce_ring}, sizes, num_ranks, repeats)["ring"]


def timed_runs(
    algorithms: dict[str, AllReduce], sizes: Sequence[int], num_ranks: int = 4, repeats: int = 20
) -> dict[str, list[list[float]]]:
    """Return, by algorithm and size in bytes, the sorted seconds of every run.

    A run takes as long as its slowest rank.
    """
    by_rank = run(
        runs_of_rank, num_ranks, algorithms, sizes, repeats, timeout=MEASURING, watch=False
    )
    return {
        name: [
            sorted(map(max, zip(*ranks, strict=True)))
            for ranks in zip(*(took[name] for took in by_rank), strict=True)
        ]
        for name in algorithms
    }


def runs_of_rank(
    group: ProcessGroup, algorithms: dict[str, AllReduce], sizes: Sequence[int], repeats: int
) -> dict[str, list[list[float]]]:
    """Return this rank's seconds of every run; sizes and algorithms take turns."""
    tensor = torch.zeros(max(sizes) // 4)
    took: dict[str, list[list[float]]] = {name: [[] for _ in sizes] for name in algorithms}
    for _ in range(repeats):
        for i, num_bytes in enumerate(sizes):
            for name, all_reduce in algorithms.items():
                dist.barrier(group=group)
                begin = time.perf_counter()
                all_reduce(tensor[: num_bytes // 4], group)
                took[name][i].append(time.perf_counter() - begin)
    return took


def print_runs(runs: dict[str, list[list[float]]], sizes: Sequence[int], base: str) -> None:
    """Print the fastest run and the median, and the fastest relative to `base`'s."""
    print(
        "4 ranks, ms      " + "".join(f"{plain_bytes(size):>14}       " for size in sizes).rstrip()
    )
    for name, by_size in runs.items():
        columns = (
            f"{1e3 * took[0]:7.2f}{1e3 * median(took):7.2f} ({took[0] / other[0]:.2f})"
            for took, other in zip(by_size, runs[base], strict=True)
        )
        print(f"{name:17}" + "".join(columns))


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
