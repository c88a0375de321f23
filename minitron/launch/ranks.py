"""The processes of a run, as their parent sees them: started, listened to, ended.

A rank tells over its pipe that it has started and what came of it, and writes each call it is about
to make to a file. The parent reads until all have an outcome, or until it is clear that some will
not:

    a rank has raised or died            the others cannot go on without it
    two ranks make different calls       both would wait for ever
    no rank computes and one waits       for 5 seconds: a hang
    the time is over                     an endless loop, say; after 8 seconds a note says where

Read in this order: Ranks.wait, Rank.receive, Ranks._have_stalled.
"""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import connection

from minitron.launch.descendants import kill_descendants, kill_run_descendants, work_below
from minitron.launch.messages import Announcements, read_message
from minitron.launch.process_state import cpu_seconds, wants_cpu
from minitron.launch.rank_process import (
    Failure,
    Frame,
    JobSpec,
    Returned,
    Started,
    calls_file,
    output_file,
    rank_main,
    stack_file,
)
from minitron.launch.rank_report import (
    Prints,
    RankError,
    collective,
    describe,
    is_hang,
    is_waiting,
    killed,
    read_stacks,
    report,
    say,
)
from minitron.launch.starting import (
    context_of,
    ignore_interrupts,
    interrupted_later,
    without_main,
)
from minitron.measure.ledger import Call, Matcher

PROCESS_NAME = "minitron rank"
LOOK_SECONDS = 0.1
STALL_SECONDS = 5.0
NOTE_SECONDS = 8.0
BUSY_SECONDS = 0.05  # less CPU time than this during a stall is waiting
GRACE_SECONDS = 0.3  # after a failure, for those of other ranks
LEAVE_SECONDS = 5.0  # to tear a group down


class Rank:
    """One process, as its parent sees it."""

    def __init__(self, number: int, context, orders: JobSpec):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=rank_main, args=(number, orders, theirs), name=f"{PROCESS_NAME} {number}"
        )
        self.announcements = Announcements(calls_file(orders.folder, number))
        self.number, self.orders, self._theirs = number, orders, theirs
        self.has_started = False
        self.last_call: Call | None = None
        self.phase: str | None = None  # that it has given a name
        self.outcome: Returned | Failure | None = None

    def start(self) -> None:
        self.process.start()
        self._theirs.close()

    def receive(self) -> Iterator[Call]:
        """Read what it has sent and announced; the calls are for the caller."""
        has_ended = bool(connection.wait([self.process.sentinel], 0))
        try:
            while self.outcome is None and self.pipe.poll():
                message = read_message(self.pipe.recv_bytes())
                if isinstance(message, Started):
                    self.has_started = True
                else:
                    self.outcome = message
        except (EOFError, OSError):
            has_ended = True

        for announced in self.announcements.read():
            if isinstance(announced, Call):
                self.last_call = announced
                yield announced
            else:
                self.phase = announced

        if has_ended and self.outcome is None:
            self.process.join(1)
            self.outcome = killed(self.process.exitcode)

    @property
    def text(self) -> str:
        return "has finished" if isinstance(self.outcome, Returned) else self.outcome.text

    def where(self, frames: list[Frame]) -> str:
        return describe(frames, self.last_call, self.phase)

    def release(self, may_leave: bool) -> None:
        """Let it tear its group down, or kill it."""
        if may_leave:
            with suppress(OSError):  # killed after it had returned
                self.pipe.send_bytes(b"leave")
        elif self.process.pid is not None:
            if self.process.is_alive():
                kill_descendants(self.process.pid)
            self.process.kill()

    @property
    def has_died(self) -> bool:
        return self.process.pid is not None and not self.process.is_alive()

    def end(self) -> None:
        """Wait until it is gone."""
        if self.process.pid is not None:
            self.process.join(LEAVE_SECONDS)
            self.process.kill()
            self.process.join()
        self.pipe.close()
        self.announcements.close()


class Ranks:
    """All processes of a run."""

    def __init__(self, orders: JobSpec):
        self.orders = orders
        self.ranks: list[Rank] = []
        self.prints = Prints([output_file(orders.folder, n) for n in range(orders.num_ranks)])
        self.matcher, self.mismatch = Matcher(), None
        self._cpu: dict[int, float] = {}
        self._quiet_looks = 0  # at ranks that did nothing
        self._silent_looks = 0  # at ranks that sent nothing, but may compute

    def start(self, method: str) -> None:
        """Start every process, by spawn where the fork server does not start."""
        try:
            self._start(method)
        except (OSError, EOFError):
            if method == "spawn":
                raise
            self._end_processes()
            self._start("spawn")

    def _start(self, method: str) -> None:
        self.ranks = []
        with ignore_interrupts(), without_main():
            context = context_of(method)
            for number in range(self.orders.num_ranks):
                self.ranks.append(Rank(number, context, self.orders))
                self.ranks[-1].start()

    def wait(self, timeout: float, most_cpu: float = math.inf) -> RankError | None:
        """Return when all have returned, or with what keeps them from it.

        They have `timeout` seconds, and `most_cpu` seconds of CPU time each.
        """
        start = time.monotonic()
        while self._running():
            something_came = self._receive(LOOK_SECONDS)
            if self.mismatch or self._failed():
                break
            if self._running() and time.monotonic() > start + timeout:
                return self._error(f"not finished after {timeout:g} s (the timeout)")
            if most_cpu < math.inf and self._most_cpu() > most_cpu:
                return self._error(f"not finished after {most_cpu:g} s of CPU time (the limit)")
            if not something_came and self._have_stalled():
                return self._error(f"a hang: no rank has moved for {STALL_SECONDS:g} s")
            if self.orders.watch and self._silent_looks == round(NOTE_SECONDS / LOOK_SECONDS):
                self._note(f"no call for {NOTE_SECONDS:g} s, still waiting (timeout {timeout:g} s)")
        if self._failed():
            self._hear_the_others()
        if self.mismatch:
            return self._error(f"the ranks do not match: {self.mismatch}")
        return self._first_failure() if self._failed() else None

    def values(self) -> list[bytes]:
        """Return what each rank returned, pickled."""
        return [rank.outcome.value for rank in self.ranks]

    def end(self) -> None:
        """Leave no process behind, and show what has been printed."""
        with interrupted_later():
            self._end_processes()
        self.prints.close()

    def _end_processes(self) -> None:
        all_returned = all(isinstance(rank.outcome, Returned) for rank in self.ranks)
        died = any(rank.has_died for rank in self.ranks)
        for rank in self.ranks:
            rank.release(may_leave=all_returned)
        for rank in self.ranks:
            rank.end()
        if died:
            kill_run_descendants(self.orders.folder)

    def _running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.outcome is None]

    def _failed(self) -> list[Rank]:
        return [rank for rank in self.ranks if isinstance(rank.outcome, Failure)]

    def _receive(self, seconds: float) -> bool:
        """Read what comes within `seconds`; returns whether anything did."""
        running = self._running()
        handles = [handle for rank in running for handle in (rank.pipe, rank.process.sentinel)]
        something_came = bool(connection.wait(handles, seconds))
        for rank in running:
            for call in rank.receive():
                something_came = True
                self.mismatch = self.mismatch or self.matcher.add(rank.number, call)
        self.prints.show([rank.outcome is not None for rank in self.ranks])
        self._silent_looks += 1
        if something_came:
            self._quiet_looks = self._silent_looks = 0
        return something_came

    def _hear_the_others(self) -> None:
        end = time.monotonic() + GRACE_SECONDS
        while self._running() and not self.mismatch and time.monotonic() < end:
            self._receive(LOOK_SECONDS)

    def _most_cpu(self) -> float:
        return max((cpu_seconds(rank.process.pid) for rank in self._running()), default=0.0)

    def _have_stalled(self) -> bool:
        """Count a look at ranks that send nothing; tell whether it has become a hang."""
        cpu = {rank.number: cpu_seconds(rank.process.pid) for rank in self._running()}
        self._quiet_looks += 1
        moved = any(cpu[n] - self._cpu.get(n, -1.0) > BUSY_SECONDS for n in cpu)
        if moved or any(wants_cpu(rank.process.pid) for rank in self._running()):
            self._cpu, self._quiet_looks = cpu, 0
        # Looks, not the clock: where the machine is overloaded, the parent looks less often too.
        if self._quiet_looks * LOOK_SECONDS < STALL_SECONDS:
            return False
        self._quiet_looks = 0
        places = [(frames, rank.last_call) for rank, frames in self._stacks()]
        if not is_hang(places) or work_below([rank.process.pid for rank in self._running()]):
            return False
        return not self._receive(LOOK_SECONDS)

    def _stacks(self) -> list:
        """Return the running ranks, each with its frames."""
        asked = [rank for rank in self._running() if rank.has_started]
        files = {r.process.pid: stack_file(self.orders.folder, r.number) for r in asked}
        stacks = read_stacks(files, {r.process.pid: r.pipe for r in asked})
        return [(rank, stacks.get(rank.process.pid, [])) for rank in self._running()]

    def _note(self, headline: str) -> None:
        """Tell where the ranks are, if some wait for one that computes: it may be at work."""
        stacks = self._stacks()
        waiting = [rank for rank, frames in stacks if rank.last_call and is_waiting(frames, None)]
        if 0 < len(waiting) < len(stacks):
            texts = {rank.number: rank.where(frames) for rank, frames in stacks}
            texts |= {rank.number: rank.text for rank in self.ranks if rank.outcome}
            print(report(headline, texts), flush=True)

    def _error(self, headline: str) -> RankError:
        for rank, frames in self._stacks():
            rank.outcome = Failure(rank.where(frames), frames=frames)
        texts = {rank.number: rank.text for rank in self.ranks}
        return RankError(report(headline, texts), self._failures())

    def _first_failure(self) -> RankError:
        # The others' errors may follow from a death, never the other way round.
        first = min(self._failed(), key=lambda r: (bool(r.outcome.error), r.outcome.seconds))
        for rank, frames in self._stacks():
            rank.outcome = Failure(rank.where(frames), frames=frames)

        texts = {rank.number: rank.text for rank in self.ranks if rank is not first}
        if first.outcome.error is None:
            texts |= {
                rank.number: rank.where(rank.outcome.frames)
                for rank in self._failed()
                if collective(rank.outcome.frames)
            }
        headline = say([first.number], first.text)
        return RankError(report(headline, texts, first.outcome.traceback), self._failures())

    def _failures(self) -> dict[int, Failure]:
        return {rank.number: rank.outcome for rank in self._failed()}
