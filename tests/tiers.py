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


def as_exhaustive(case):
    """Return one case with the marker; a tuple is a row of values, as in pytest.param(*values)."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, exhaustive])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=exhaustive)
