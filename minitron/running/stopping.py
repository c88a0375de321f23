"""How all ranks of a run end after the same step: one was signalled, or could not write its log."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from minitron.comm.agreement import Group, all_reduce_max_int, raise_on_all_ranks
from minitron.config import ConfigError
from minitron.launch.process import StopSignals

FAULT = 1000  # among the numbers of signals


class Stop:
    """What has ended a run: `signal` is the same on all ranks, None if nothing has.

    `interruption` hears the signals of this rank, `fault` is what its disk has refused.
    """

    def __init__(self, group: Group):
        self.group, self.interruption = group, StopSignals()
        self.signal: signal.Signals | None = None
        self.fault: ConfigError | OSError | None = None

    @contextmanager
    def defer_errors(self) -> Iterator[None]:
        """Keep what the disk refuses to this rank until the ranks next agree."""
        try:
            yield
        except (ConfigError, OSError) as error:
            self.fault = self.fault or error

    def agreed(self) -> signal.Signals | None:
        """Return the signal that asked any rank to stop; all ranks call it after every step.

        Raises ConfigError on every rank if one could not tell what it had to.
        """
        number = all_reduce_max_int(
            FAULT if self.fault else self.interruption.signal or 0, self.group
        )
        if number == FAULT:
            with raise_on_all_ranks(self.group):
                if self.fault is not None:
                    raise self.fault
        if not number:
            return None  # one that has come since is kept for the next step
        self.signal = self.interruption.signal = signal.Signals(number)
        return self.signal
