"""How good is a decision tree's layout? Against a search's best, and against measured layouts.

Against a search: both ask the same estimator, so the ratio says what the tree does not look at,
not what is true. Against measurements: nobody is asked.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minitron.plan.decide import decide
from minitron.plan.job import Job
from minitron.plan.memory import memory_of
from minitron.plan.published import Row, published_rows
from minitron.plan.search import Candidate
from teaching.lab.large_plans import chosen


class Judged(NamedTuple):
    """The tree's layout and the best of a search, by one estimator."""

    tree: Candidate
    best: Candidate

    @property
    def ratio(self) -> float:
        """The tree's seconds over the best's; 1 or more."""
        return self.tree.seconds / self.best.seconds


def against_search(job: Job, best: Candidate | None = None) -> Judged:
    """Compare the tree's choice with a search's: `best`, or what is recorded of a large job.

    Raises ConfigError if the model fits in no layout.
    """
    tree = Candidate(job, decide(job))
    best = best or chosen(job).best
    return Judged(tree, min(tree, best, key=lambda each: each.seconds))


class Measured(NamedTuple):
    """Layouts of one model on one number of GPUs that have been measured; seconds are measured."""

    num_gpus: int
    rows: Sequence[Row]

    @property
    def best(self) -> Row:
        return min(self.rows, key=lambda row: row.seconds)

    @property
    def fitting(self) -> list[Row]:
        """Those that a planner would try: within its limit, by its formula of memory."""
        return [
            row
            for row in self.rows
            if sum(memory_of(row.job, row.decisions[0], row.system).values()) <= row.job.limit
        ]

    def fewest_cuts(self) -> Row:
        """Return the one with which a tree starts: it cuts least, layers rather than stages."""

        def cuts(row: Row) -> tuple:
            axes = row.decisions[0].parallel
            return axes.tp * axes.pp, axes.pp, axes.zero, -row.decisions[0].micro_batch_size

        return min(self.fitting, key=cuts)

    def estimated(self, fitting: bool = True) -> Row:
        """Return the one that the estimator calls the fastest, of those that fit or of all."""
        return min(self.fitting if fitting else self.rows, key=lambda row: row.predict().seconds)

    def ratio(self, row: Row) -> float:
        """Return a row's measured seconds over the least measured."""
        return row.seconds / self.best.seconds


def measured_layouts() -> list[Measured]:
    """Return the Ultra-Scale Playbook's runs of an 8.86B model, by the number of H100s."""
    rows = [row for row in published_rows() if row.source.startswith("nanotron")]
    return [
        Measured(n, [row for row in rows if row.job.num_gpus == n])
        for n in sorted({row.job.num_gpus for row in rows})
    ]
