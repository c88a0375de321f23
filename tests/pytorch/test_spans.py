"""Stretches of a step have names for a profiler, and phases for those who listen."""

import threading
from contextlib import contextmanager

import torch

from minitron.measure.ledger import Ledger
from minitron.pytorch.spans import NOTHING, listening, span


def recorder(events: list[str]):
    @contextmanager
    def listener(phase):
        events.append(f"begin {phase}")
        yield
        events.append(f"end {phase}")

    return listener


def test_a_listener_is_told_of_phases_while_it_listens():
    events = []
    with listening(recorder(events)):
        with span("pipeline", "F0", phase="F0"), span("all-gather"):
            events.append("work")
    with span("pipeline", "B0", phase="B0"):
        pass
    assert events == ["begin F0", "work", "end F0"]


def test_nobody_listening_costs_nothing():
    assert span("pipeline", "F0", phase="F0") is NOTHING
    with listening(recorder([])):
        assert span("all-gather") is NOTHING


def test_a_phase_is_in_the_profiles_trace_too():
    with torch.profiler.profile() as profile, listening(recorder([])):
        with span("pipeline", "F0", phase="F0"):
            torch.ones(1)
    assert "pipeline F0" in {event.name for event in profile.events()}


def test_other_threads_are_not_heard():
    events = []

    def work():
        with span("pipeline", "F0", phase="F0"):
            pass

    with listening(recorder(events)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert events == []


def test_ledgers_name_their_phases_and_stop_listening():
    with Ledger() as outer, Ledger() as inner:
        with span("pipeline", "F0", phase="F0 stage 0"):
            torch.ones(1)
    with span("pipeline", "B0", phase="B0 stage 0"):
        torch.ones(1)
    for ledger in (outer, inner):
        assert "F0 stage 0" in {span.phase for span in ledger.spans}
        assert "B0 stage 0" not in {span.phase for span in ledger.spans}
