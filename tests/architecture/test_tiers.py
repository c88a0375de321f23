"""Which cases of a parametrized test are in `make test`, and what a module's fixture tries."""

import pytest

from tests.tiers import as_exhaustive, collected, diagonal_of, exhaustive, in_tiers, tiered


def is_exhaustive(case) -> bool:
    return any(mark in (exhaustive, exhaustive.mark) for mark in getattr(case, "marks", ()))


def test_all_but_the_first_cases_are_exhaustive():
    first, *others = tiered(["a", ("b", 2), pytest.param("c", id="see")])
    assert first == "a"
    assert [other.values for other in others] == [("b", 2), ("c",)]
    assert all(map(is_exhaustive, others))
    assert as_exhaustive(pytest.param("c", id="see")).id == "see"


def test_all_but_the_named_cases_are_exhaustive():
    kept, left = in_tiers({"a"}, ["a", ("b", 2)])
    assert (kept.values, kept.id) == (("a",), "a") and not is_exhaustive(kept)
    assert (left.values, left.id) == ((("b", 2),), "('b', 2)") and is_exhaustive(left)
    with pytest.raises(AssertionError, match="c"):
        in_tiers({"a", "c"}, ["a", "b"])


def test_every_value_of_a_pair_is_kept_once():
    pairs = diagonal_of("abc", [1, 2])
    assert [pair for pair in pairs if not is_exhaustive(pair)] == [("a", 1), ("b", 2), ("c", 1)]
    assert len(pairs) == 6


@pytest.fixture(scope="module")
def tried(request):
    return collected(request, "letter"), collected(request, "other")


@pytest.mark.parametrize("letter", tiered(["a", "b"]))
def test_a_fixture_tries_what_will_run(tried, request, letter):
    will_run = [
        item.callspec.params["letter"]
        for item in request.session.items
        if item.path == request.path and "[" in item.name
    ]
    assert tried == (will_run, []) and letter in will_run
