"""The ledger: which bytes crossed the wire, in which operation, and when?

    with Ledger() as ledger:
        train_step(model, optimizer, micro_batches, rate, clip_norm)
    print(merged([ledger.calls]))

A `DispatchMode` sees every collective, send and receive of this rank: the package's, your own,
those that autograd hooks start, those inside object collectives and those that torch's
DistributedDataParallel starts from C++; on CPU, on CUDA and with fake tensors alike.

The bytes that a rank sends and receives are those of the algorithms in `cost.communication`: rings
for all-reduce, reduce-scatter and all-gather, trees for broadcast and reduce. A library may use
others. The phase of a call is

    forward      from a module's forward on
    backward     from a backward pass on, so also what follows it
    optimizer    during an optimizer's `step`
    else         the name given to `Ledger.phase`

Not seen: what other threads do; when functional collectives (torch.ops._c10d_functional) end; a
wait for a future instead of the work, as in DistributedDataParallel: it counts as compute.

Read in this order: `calls.Call`, Ledger.__torch_dispatch__, its _record, Transfer; then
`calls.merged` and `calls.first_mismatch`, what several ranks' calls say together.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minitron.measure.calls import (
    MESSAGES,
    Call,
    Matcher,
    Numbering,
    Row,
    Table,
    first_mismatch,
    merged,
)
from minitron.measure.operation import OPERATORS, read_operation
from minitron.pytorch.private import DispatchMode, WorkAround, in_backward
from minitron.pytorch.spans import listening

__all__ = [
    "Call",
    "Ledger",
    "Matcher",
    "Row",
    "Span",
    "Table",
    "Transfer",
    "first_mismatch",
    "merged",
    "tracked",
]


@dataclass(frozen=True)
class Span:
    """A stretch of compute in one phase, in seconds of the ledger's clock; waits lie between."""

    phase: str
    start: float
    end: float


class Transfer(WorkAround):
    """The handle of a started operation: it can be held back, and remembers when it was over.

    Complete is what has really arrived and is not due later (`launch.slow_network` sets `due`).
    """

    def __init__(self, work: dist.Work, clock: Callable[[], float]):
        super().__init__(work)
        self.clock = clock
        self.arrived: float | None = None
        self.due, self.sleep = float("-inf"), time.sleep
        # Told of each wait its start and end. They get the transfer, for one that kept it would
        # be kept by it, and with it the tensors.
        self.waited: list[Callable[[Transfer, float, float], None]] = []

    @property
    def finished(self) -> float | None:
        return None if self.arrived is None else max(self.arrived, self.due)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        start = self.clock()
        self.work.wait(timeout)
        self._arrive()
        self._sleep_until_due()
        for tell in self.waited:
            tell(self, start, self.clock())
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.clock() >= self.due

    def result(self) -> list[torch.Tensor]:
        return self.work.result()

    def synchronize(self) -> None:
        self.work.synchronize()

    def get_future(self) -> torch.futures.Future:
        """Return a future that is done when `wait` would return; torch's C++ code waits for it."""
        return self.work.get_future().then(self._hold)

    def follow(self) -> None:
        """Note the arrival at once, not only when a rank waits for it."""
        try:
            self.work.get_future().add_done_callback(lambda _: self._arrive())
        except RuntimeError:
            pass  # gloo's reduce-scatter has no future

    def _arrive(self) -> None:
        if self.arrived is None:
            self.arrived = self.clock()

    def _hold(self, future: torch.futures.Future):
        self._sleep_until_due()
        return future.value()

    def _sleep_until_due(self) -> None:
        remaining = self.due - self.clock()
        if remaining > 0:
            self.sleep(remaining)


def tracked(outputs, clock: Callable[[], float]) -> tuple:
    """Put a Transfer in the place of the Work among an operator's outputs, if it is none yet.

    Returns the outputs and the Transfer: None for functional collectives, and where the backend
    (NCCL) returns no work from a blocking call.
    """
    handle = outputs[-1] if isinstance(outputs, tuple) else outputs
    work = dist.Work.unbox(handle) if isinstance(handle, torch.ScriptObject) else None
    if work is None or isinstance(work, Transfer):
        return outputs, work
    transfer = Transfer(work, clock)
    boxed = transfer.boxed()
    return (*outputs[:-1], boxed) if isinstance(outputs, tuple) else boxed, transfer


class Ledger(DispatchMode):
    """Record this rank's communication while it is entered; each `with` starts a new record.

    `announce` is called with each Call before it is issued, and with the name of each phase (None:
    it has ended). Such a ledger leaves the backend's threads alone and notes an end when this rank
    has waited for it. Under a FakeTensorMode, enter that mode first.
    """

    def __init__(
        self,
        announce: Callable[[Call | str | None], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__()
        self.announce, self.clock = announce, clock
        self._start_over()

    def _start_over(self) -> None:
        self._calls: list[Call] = []
        self._transfers: dict[int, Transfer] = {}  # of the calls not waited for yet
        self._numbering = Numbering()
        self._spans: list[Span] = []
        self._recent, self._named = "forward", None
        self._phase: str | None = None  # of the stretch of compute that began at _start
        self._start = self._last = 0.0

    @property
    def calls(self) -> list[Call]:
        """In the order in which they were issued."""
        calls = list(self._calls)
        for index, transfer in list(self._transfers.items()):
            calls[index] = replace(calls[index], finished=transfer.finished)
        return calls

    @property
    def spans(self) -> list[Span]:
        """The stretches of compute, in order."""
        return self._spans + self._unfinished_span(self._last)

    def bytes_sent(
        self, op: str | None = None, axis: str | None = None, phase: str | None = None
    ) -> int:
        """Return the bytes that this rank has sent, in all or of one op, axis or phase."""
        return sum(call.sent for call in self._of(op, axis, phase))

    def bytes_received(
        self, op: str | None = None, axis: str | None = None, phase: str | None = None
    ) -> int:
        """Return the bytes that this rank has received, in all or of one op, axis or phase."""
        return sum(call.received for call in self._of(op, axis, phase))

    def _of(self, op: str | None, axis: str | None, phase: str | None) -> list[Call]:
        return [
            call
            for call in self._calls
            if op in (None, call.op) and axis in (None, call.axis) and phase in (None, call.phase)
        ]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the phase of the block, instead of forward, backward or optimizer."""
        outer, announce = self._named, self.announce or (lambda _: None)
        self._named = name
        announce(name)
        self._change_phase(self.clock())
        try:
            yield
        finally:
            self._spans += self._unfinished_span(self.clock())
            self._named, self._phase = outer, None
            announce(outer)

    # Where it listens

    def __enter__(self):
        self._start_over()
        with ExitStack() as exits:
            for hook in (
                register_module_forward_pre_hook(self._enter_module),
                register_optimizer_step_pre_hook(self._enter_optimizer),
                register_optimizer_step_post_hook(self._leave_optimizer),
            ):
                exits.callback(hook.remove)
            exits.enter_context(listening(self.phase))
            super().__enter__()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error):
        super().__exit__(*error)
        self._exits.__exit__(*error)

    def _enter_module(self, *_) -> None:
        self._recent = "forward"

    def _enter_optimizer(self, *_) -> None:
        self._recent = "optimizer"

    def _leave_optimizer(self, *_) -> None:
        self._recent = "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._change_phase(self.clock())
        if func in OPERATORS:
            return self._record(func, args, kwargs or {})
        outputs = func(*args, **(kwargs or {}))
        self._last = self.clock()
        return outputs

    def _record(self, func, args, kwargs):
        operation = read_operation(func, args)
        call = self._numbering.call(operation, self._phase, self.clock())
        if self.announce is not None:
            self.announce(call)
        index = len(self._calls)
        self._calls.append(call)

        outputs, transfer = tracked(func(*args, **kwargs), self.clock)

        if transfer is not None:
            self._transfers[index] = transfer
            transfer.waited.append(partial(self._leave_wait, index))
            # Messages have no future, and CUDA's is done as soon as the kernel is queued.
            on_cpu = operation.device.type == "cpu"
            if self.announce is None and on_cpu and call.op not in MESSAGES:
                transfer.follow()
        self._last = self.clock()
        return outputs

    # Stretches of compute

    def _change_phase(self, now: float) -> None:
        if in_backward():
            self._recent = "backward"
        phase = self._named or self._recent
        if phase != self._phase:
            self._spans += self._unfinished_span(self._last)
            self._phase, self._start = phase, now

    def _leave_wait(self, index: int, transfer: Transfer, start: float, end: float) -> None:
        if self._transfers.get(index) is transfer:
            del self._transfers[index]  # it holds the tensors
            self._calls[index] = replace(self._calls[index], finished=transfer.finished)
        self._spans += self._unfinished_span(start)
        self._start = self._last = end

    def _unfinished_span(self, end: float) -> list[Span]:
        is_open = self._phase is not None and end > self._start
        return [Span(self._phase, self._start, end)] if is_open else []
