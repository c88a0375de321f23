"""The watch: each collective, send and receive of this rank is announced before it is issued.

    with Watch(announce):
        train_step(model, optimizer, micro_batches, rate, clip_norm)

It sees communication alone, and all other operators run as fast as without it. (A Ledger also
times the compute in between: it sees every operator, and makes the small ones three times as slow.)
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from minitron.measure.calls import Call, Numbering
from minitron.measure.operation import OPERATORS, read_operation
from minitron.pytorch.private import in_backward, in_place_of
from minitron.pytorch.spans import listening


class Watch:
    """Call `announce` with each Call of this thread, and of backward passes, before it is issued.

    And with the name of each phase that is given one (`pytorch.spans`); None when it has ended.
    """

    def __init__(self, announce: Callable[[Call | str | None], None]):
        self.announce = announce
        self._numbering, self._named = Numbering(), None

    def __enter__(self):
        self._thread = threading.get_ident()
        with ExitStack() as exits:
            exits.enter_context(listening(self._phase))
            # Functional collectives call those of c10d.
            watched = [operator for operator in OPERATORS if operator.namespace == "c10d"]
            exits.enter_context(in_place_of(watched, self._see))
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *error):
        self._exits.__exit__(*error)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        outer, self._named = self._named, name
        self.announce(name)
        try:
            yield
        finally:
            self._named = outer
            self.announce(outer)

    def _see(self, run: Callable, operator, args, kwargs):
        if threading.get_ident() == self._thread or in_backward():
            operation = read_operation(operator, args)
            self.announce(self._numbering.call(operation, self._named or "", time.perf_counter()))
        return run(*args, **kwargs)
