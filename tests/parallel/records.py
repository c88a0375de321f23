"""Records of the oracle's trainings, on ranks and in one process."""

from minitron.proof.difference import Moment, first_difference

SGD = ("SGD",)

Records = dict[str, list[Moment]]
"""By optimizer."""


def assert_same(expected: Records, by_rank: list[Records]) -> None:
    """Assert that each rank's records are those of one process, by each optimizer that it used."""
    assert by_rank[0]
    for optimizer in by_rank[0]:
        found = first_difference(expected[optimizer], [records[optimizer] for records in by_rank])
        assert found is None, f"{found} with {optimizer}"
