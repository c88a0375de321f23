"""An emulated slow network: transfers take the time of the alpha-beta model, computing does not.

    with SlowNetwork(latency=1e-3, bandwidth=100e6) as network:
        train_step(model, optimizer, micro_batches, rate, clip_norm)
    print(network)

On one machine, ranks talk through memory, and what overlapping saves cannot be seen. Here each
operation really runs, and a rank that waits for it sleeps until it would have arrived:

    due = max(now, when the link is free) + cost.collective_seconds(...)

What is emulated: a link of this rank, of one latency and one bandwidth. Collectives queue for it,
one after the other, whatever their group; it carries one message each way at a time. Sleeping
leaves the processor to others, so compute that overlaps with a transfer is real overlap.

What is not: congestion between ranks, protocols, the cost of copies on the host. Time counts from
this rank's own call: if another rank joins late, this one waits for it really, and the transfer
costs it less than the model says, nothing if the delay was longer than the transfer. Functional
collectives (torch.ops._c10d_functional) return no work to wait for: they block at once.
"""

import time
from collections.abc import Callable

from minitron.cost import collective_seconds
from minitron.measure.ledger import Transfer, tracked
from minitron.measure.operation import OPERATORS, Operation, read_operation
from minitron.pytorch.private import DispatchMode


class SlowNetwork(DispatchMode):
    """Delay this rank's transfers while it is entered: `latency` in s, `bandwidth` in bytes/s.

    Use it with a Ledger in either order: its calls then finish when they are due.
    """

    def __init__(
        self,
        latency: float,
        bandwidth: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        super().__init__()
        self.latency, self.bandwidth = latency, bandwidth
        self.clock, self.sleep = clock, sleep
        self._free = {"out": float("-inf"), "in": float("-inf")}  # until when each way is busy
        self._transfers: set[Transfer] = set()  # alone, C++ would hold their C++ half only

    def __str__(self) -> str:
        return (
            f"emulated network: latency {1e3 * self.latency:g} ms, "
            f"bandwidth {self.bandwidth / 1e6:g} MB/s"
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in OPERATORS:
            return func(*args, **(kwargs or {}))
        operation = read_operation(func, args)
        due = self._occupy_link(operation)

        outputs, transfer = tracked(func(*args, **(kwargs or {})), self.clock)

        if transfer is None:
            self.sleep(max(0.0, due - self.clock()))
        else:
            transfer.due, transfer.sleep = due, self.sleep
            self._transfers.add(transfer)
            transfer.waited.append(self._forget)
        return outputs

    def _forget(self, transfer: Transfer, *_) -> None:
        self._transfers.discard(transfer)

    def _occupy_link(self, operation: Operation) -> float:
        """Queue the operation; returns when it is due."""
        ways = {"send": ["out"], "recv": ["in"]}.get(operation.op, ["out", "in"])
        start = max(self.clock(), *(self._free[way] for way in ways))
        due = start + collective_seconds(
            operation.op, operation.payload, operation.group.size(), self.latency, self.bandwidth
        )
        self._free.update(dict.fromkeys(ways, due))
        return due
