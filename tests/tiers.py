"""Two tiers: `make test` leaves out what is marked exhaustive, `make test-all` runs everything."""

from collections.abc import Iterable

import pytest

exhaustive = pytest.mark.exhaustive


def tiered(cases: Iterable, keep: int = 1) -> list:
    """Return cases for pytest.mark.parametrize: all but the first `keep` are exhaustive.

    Put the most telling cases first.
    """
    cases = list(cases)
    return cases[:keep] + [as_exhaustive(case) for case in cases[keep:]]


def in_tiers(kept: set, cases: Iterable) -> list:
    """Return cases for pytest.mark.parametrize: all but those in `kept` are exhaustive."""
    cases = list(cases)
    assert kept <= set(cases), f"no such cases: {kept - set(cases)}"
    return [
        pytest.param(case, id=str(case), marks=[] if case in kept else [exhaustive])
        for case in cases
    ]


def diagonal_of(first: Iterable, second: Iterable) -> list:
    """Return all pairs for pytest.mark.parametrize("one, other", ...); most are exhaustive.

    Kept is a diagonal, on which every value of either occurs: (a0, b0), (a1, b1), ...
    """
    first, second = list(first), list(second)
    length = max(len(first), len(second))
    kept = {(n % len(first), n % len(second)) for n in range(length)}
    return [
        (a, b) if (i, j) in kept else as_exhaustive((a, b))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


def as_exhaustive(case):
    """Return one case with the marker; a tuple is a row of values, as in pytest.param(*values)."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, exhaustive])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=exhaustive)


def in_turn(request: pytest.FixtureRequest, cases: Iterable) -> dict:
    """Return the names of the oracle's optimizers with which each case is trained.

    They are (None, for all) in `make test-all`. In `make test` they are one, SGD and AdamW in turn:
    the oracle compares every gradient under either, so that only what an optimizer itself makes of
    a gradient is seen by half of the cases.
    """
    cases = list(cases)
    if runs_all(request):
        return dict.fromkeys(cases)
    return {case: (("SGD", "AdamW")[number % 2],) for number, case in enumerate(cases)}


def runs_all(request: pytest.FixtureRequest) -> bool:
    """Return whether exhaustive tests of this module will run too."""
    return any(
        item.path == request.path and item.get_closest_marker("exhaustive")
        for item in request.session.items
    )


def collected(request: pytest.FixtureRequest, name: str) -> list:
    """Return the values of the parameter `name` in the tests of this module that will run.

    For a fixture that starts ranks once and tries all cases on them: it tries these alone.
    """
    calls = [
        item.callspec
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return list(dict.fromkeys(call.params[name] for call in calls if name in call.params))
