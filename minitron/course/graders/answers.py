"""Which functions of the package would be an answer to which exercise.

The module that an exercise `replaces` has functions of the same names; here are the others, by
another name or in another module. An answer that calls one is told so.
"""

from minitron.course.exercises import Exercise

OTHERS: dict[str, tuple[str, ...]] = {
    "1.3": ("minitron.cost:num_block_parameters",),
}
"""By exercise: "module:function" or "module:Class"."""


def package_answers(exercise: Exercise) -> tuple[str, ...]:
    """All of them for this exercise."""
    own = [f"{exercise.replaces}:{name}" for name in exercise.names] if exercise.replaces else []
    return (*own, *OTHERS.get(exercise.id, ()))
