"""What the benchmarks share: a command line, sides that take turns, what a step holds and sends."""

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from minitron import cost
from minitron.launch import run
from minitron.launch.slow_network import SlowNetwork
from minitron.measure.clock import synchronize
from minitron.measure.ledger import Ledger
from minitron.pytorch.private import tensors_in

Step = Callable[[], Tensor]  # returns the loss
MakeStep = Callable[[str, dist.ProcessGroup, torch.device], Step]  # of a side

LATENCY, BANDWIDTH = 0.2e-3, 400e6  # of the emulated network


def read_options(
    description: str, rounds: int, ranks: tuple[int, ...] = (2, 4), *, sizes: dict[str, tuple]
) -> argparse.Namespace:
    """The command line of a benchmark of many ranks: ranks, rounds, out, small.

    `sizes` has the model and its data by kind of device; `--small` makes the CPU's model tiny.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="write the tables here as Markdown too")
    parser.add_argument(
        "--small",
        action="store_true",
        help="a tiny model: that everything runs, nothing of its speed",
    )
    options = parser.parse_args()
    if options.small:
        shrink(sizes)
    return options


def shrink(sizes: dict[str, tuple]) -> None:
    """Replace the CPU's model by a tiny one."""
    config, *data = sizes["cpu"]
    tiny = replace(config, vocab_size=256, num_layers=4, width=64, ffn_width=128)
    sizes["cpu"] = tiny, *data


def have_gpus() -> bool:
    """Whether ranks compute on GPUs: those that `run` starts itself, without torchrun, do not."""
    return torch.cuda.is_available() and dist.is_torchelastic_launched()


def conditions(precision: str) -> str:
    """On which hardware, with which version and by which command."""
    device = torch.cuda.get_device_name() if have_gpus() else "CPU, 1 thread a rank"
    command = " ".join(["python", *sys.argv])
    return f"{device}, torch {torch.__version__}, {precision}; `{command}`"


def publish(lines: list[str], out: Path | None) -> None:
    """Print the tables, and write them to `out`."""
    print("\n".join(lines))
    if out:
        out.write_text("\n".join(lines) + "\n")


def race(
    steps: list[Callable[[], object]], device: torch.device, rounds: int, warm_up: int = 2
) -> list[list[float]]:
    """Seconds per step of each, round by round; each goes first in its turn."""
    for step in steps:  # allocate, choose kernels, compile, fill .grad
        for _ in range(warm_up):
            step()
    seconds = [[] for _ in steps]
    for turn in range(rounds):
        for offset in range(len(steps)):
            index = (turn + offset) % len(steps)
            synchronize(device)
            start = time.perf_counter()
            steps[index]()
            synchronize(device)
            seconds[index].append(time.perf_counter() - start)
    return seconds


def of_slowest(seconds_by_rank: list[list[list[float]]]) -> list[list[float]]:
    """The largest of the ranks' seconds, by side and round."""
    sides = zip(*seconds_by_rank, strict=True)
    return [[max(times) for times in zip(*side, strict=True)] for side in sides]


def device_of(group: dist.ProcessGroup) -> torch.device:
    on_gpu = "nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def peak_bytes(step: Callable[[], object], device: torch.device, before: int) -> int:
    """Most bytes held in a step; `before`, those that were there before its model was made.

    On CUDA the allocator's count, on the CPU the sizes of the storages that operators use.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with Storages() as storages:
        step()
        storages.start_counting()
        step()
    return storages.peak


class Storages(TorchDispatchMode):
    """Most bytes of the storages that operators use, by their sizes at each moment.

    The meter cannot follow FSDP2 on the CPU: it fills and empties storages by `resize_`, which no
    operator sees, and its optimizer works on DTensors, which hide the tensors they hold.
    """

    def __init__(self):
        super().__init__()
        self.storages: WeakValueDictionary = WeakValueDictionary()  # by address
        self.is_counting, self.peak = False, 0

    def start_counting(self) -> None:
        """From now on: before, storages that C++ code has made become known by their use."""
        self.is_counting = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        used, made = storages_in((args, kwargs)), storages_in(outputs)
        if self.is_counting:  # what is new and nobody has made is gloo's own, seen at some waits
            self.storages.update({key: made[key] for key in made.keys() - used.keys()})
            total = sum(storage.nbytes() for storage in self.storages.values())
            self.peak = max(self.peak, total)
        else:
            self.storages.update(used | made)
        return outputs


def storages_in(tree) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested lists, tuples and dicts, by address."""
    tensors = tensors_in(tree)
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return {storage._cdata: storage for storage in storages}


# What each side holds, sends and takes


def count(
    make_step: MakeStep, side: str, group: dist.ProcessGroup, device: torch.device
) -> tuple[int, int, float]:
    """Peak bytes of this rank, the bytes that it sends, and its loss in the fifth step."""
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    step = make_step(side, group, device)
    step()
    peak = peak_bytes(step, device, before)
    with Ledger() as ledger:
        step()
    return peak, ledger.bytes_sent(), step().item()


def measure(
    group: dist.ProcessGroup,
    make_step: MakeStep,
    sides: list[str],
    rounds: int,
    tolerance: float,
) -> tuple[list[tuple], list[list[float]]]:
    """What `count` says of each side on this rank, and the side's seconds round by round.

    Raises ValueError where a side's loss differs from the first one's by more than `tolerance`,
    relatively; on CUDA, where products have 16 bits, 2 % are always allowed.
    """
    device = device_of(group)
    counts = [count(make_step, side, group, device) for side in sides]
    allowed = max(tolerance, 0.02) if device.type == "cuda" else tolerance
    for side, (*_, loss) in zip(sides, counts, strict=True):
        if not math.isclose(loss, counts[0][-1], rel_tol=allowed):
            raise ValueError(f"{side}: loss {loss}, but {sides[0]}: {counts[0][-1]}")
    gc.collect()
    return counts, race([make_step(side, group, device) for side in sides], device, rounds)


@dataclass(frozen=True)
class Result:
    """What a side takes, holds and sends in a step."""

    seconds: float
    """Median over the rounds, of the slowest rank."""
    peak: int
    """Bytes, of the rank with the most."""
    sent: float
    """Bytes, the mean over the ranks."""
    rival: str = ""
    """The side that this one is compared with, if it is ours."""
    time_ratio: float = math.nan
    """Median over the rounds of this side's time over the rival's."""
    peak_ratio: float = math.nan

    @property
    def cells(self) -> str:
        """Three cells of a table: the rival, and time and peak over the rival's."""
        if not self.rival:
            return "| | "
        return f"{self.rival} | {self.time_ratio:.2f} | {self.peak_ratio:.2f}"


def contest(
    make_step: MakeStep,
    rivals: dict[str, str],
    num_ranks: int,
    rounds: int,
    tolerance: float = 1e-4,
) -> dict[str, Result]:
    """What each side needs, ours and theirs; `tolerance` as in `measure`."""
    sides = list(dict.fromkeys([*rivals, *rivals.values()]))
    arguments = make_step, sides, rounds, tolerance
    by_rank = run(measure, num_ranks, *arguments, timeout=600, watch=False)
    seconds = dict(zip(sides, of_slowest([times for _, times in by_rank]), strict=True))
    counts = dict(zip(sides, zip(*(counts for counts, _ in by_rank), strict=True), strict=True))
    peaks = {side: max(rank[0] for rank in ranks) for side, ranks in counts.items()}

    results = {}
    for side in sides:
        sent = statistics.mean(rank[1] for rank in counts[side])
        result = Result(statistics.median(seconds[side]), peaks[side], sent)
        if side in rivals:
            rival = rivals[side]
            times = zip(seconds[side], seconds[rival], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in times)
            result = replace(
                result, rival=rival, time_ratio=ratio, peak_ratio=peaks[side] / peaks[rival]
            )
        results[side] = result
    return results


def compare(
    make_step: MakeStep, rivals: dict[str, str], num_ranks: int, rounds: int, unit: float
) -> list[str]:
    """One row per side; ratios are ours over theirs, bytes sent also in units of `unit`."""
    return [
        f"| {num_ranks} | {side} | {1e3 * result.seconds:.1f} | {result.peak / 1e6:.1f} "
        f"| {result.sent / 1e6:.2f} | {result.sent / unit:.2f} | {result.cells} |"
        for side, result in contest(make_step, rivals, num_ranks, rounds).items()
    ]


# How much of the transfers computation hides


def over_slow_network(step: Step, waits: list[tuple[float, float]]) -> Callable[[], None]:
    """The step over the emulated network; appends how long it waits, and its transfers alone."""

    def slow_step() -> None:
        with SlowNetwork(LATENCY, BANDWIDTH), Ledger() as ledger:
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
        computing = sum(span.end - span.start for span in ledger.spans)
        alone = sum(
            cost.collective_seconds(call.op, call.payload, call.size, LATENCY, BANDWIDTH)
            for call in ledger.calls
        )
        waits.append((seconds - computing, alone))

    return slow_step


def measure_overlap(
    group: dist.ProcessGroup, make_step: MakeStep, sides: list[str], rounds: int
) -> tuple[list, list]:
    """Seconds on this rank, by side and round; on the CPU, the waits too."""
    device = device_of(group)
    steps = [make_step(side, group, device) for side in sides]
    if device.type == "cuda":
        return race(steps, device, rounds), []
    waits = [[] for _ in steps]
    return race(list(map(over_slow_network, steps, waits)), device, rounds), waits


def overlap_rows(make_step: MakeStep, sides: list[str], num_ranks: int, rounds: int) -> list[str]:
    """One row per side: how long a step waits, of its transfers; on the CPU, emulated ones."""
    arguments = make_step, sides, rounds
    by_rank = run(measure_overlap, num_ranks, *arguments, timeout=600, watch=False)
    seconds, waits = zip(*by_rank, strict=True)
    rows = []
    for index, (side, times) in enumerate(zip(sides, of_slowest(seconds), strict=True)):
        cells = "| | "
        if waits[0]:
            # The rank that waits least: another waits for that one as well.
            least = [min(ranks) for ranks in zip(*(sides[index] for sides in waits), strict=True)]
            exposed, alone = map(statistics.median, zip(*least[-rounds:], strict=True))
            cells = f"{1e3 * alone:.1f} | {1e3 * exposed:.1f} | {100 * (1 - exposed / alone):.0f} %"
        rows.append(f"| {num_ranks} | {side} | {1e3 * statistics.median(times):.1f} | {cells} |")
    return rows
