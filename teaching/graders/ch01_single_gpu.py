"""Graders of chapter 1; the longer ones have a file of their own.

Each compares with something the answer cannot share a fault with: one large batch (1.1), points
of the schedule worked out by hand (1.2), a real model's weights and matrix products (1.3), and
all batches of small numbers tried one by one (1.4).
"""

from collections.abc import Callable
from itertools import product

from teaching.graders import asked, expect
from teaching.graders.ch01_accumulation import grade_1_1
from teaching.graders.ch01_model_cost import grade_1_3

__all__ = ["grade_1_1", "grade_1_2", "grade_1_3", "grade_1_4"]


# peak 2, minimum 0.5, 4 steps of warm-up, then 13 of cosine: 12 intervals, halves and thirds
RUN = 2.0, 0.5, 4, 17
POINTS = [  # step, arguments, the rate, and what is likely wrong if it is another
    (0, RUN, 0.5, "steps count from 0: the first has (0 + 1) / warmup_steps of the peak"),
    (2, RUN, 1.5, "step k of the warm-up has (k + 1) / warmup_steps of the peak"),
    (3, RUN, 2.0, "the last step of the warm-up has the full peak"),
    (4, RUN, 2.0, "the cosine begins at warmup_steps, at the peak: progress is "
                  "(step - warmup_steps) / ..., and the height runs from 1 to 0"),
    (16, RUN, 0.5, "the last step, total_steps - 1, has the minimum: the cosine takes "
                   "total_steps - 1 - warmup_steps intervals"),
    (10, RUN, 1.25, "halfway down is the mean of peak and minimum: scale the cosine to (peak - "
                    "minimum), and add minimum"),
    (8, RUN, 1.625, "a third of the way a cosine is still at 3/4 of the height (a straight "
                    "line would be at 2/3)"),
    (17, RUN, 0.5, "past the end the rate stays at the minimum: clip progress to 1, or the "
                   "cosine rises again"),
    (29, RUN, 0.5, "past the end the rate stays at the minimum: clip progress to 1"),
    (0, (2.0, 0.5, 0, 9), 2.0, "without warm-up the first step is the cosine's first"),
    (4, (2.0, 0.5, 0, 9), 1.25, "without warm-up the cosine takes total_steps - 1 intervals"),
    (3, (2.0, 0.5, 3, 4), 0.5, "the decay is one step long, and the last step has the minimum: "
                               "total_steps - 1 - warmup_steps is 0, so return the minimum "
                               "before you divide"),
    (0, (2.0, 0.5, 0, 1), 0.5, "the only step is the last step, which has the minimum"),
    (7, (3.0, 3.0, 2, 11), 3.0, "minimum equal to peak is a constant rate"),
    (1, (0.003, 0.0003, 7, 23), 0.006 / 7, "do not round the rate: a small one loses most of "
                                           "its digits"),
]


def grade_1_2(learning_rate: Callable) -> None:
    """Compare with points worked out by hand, then with the cosine's symmetry."""
    for step, arguments, right, likely in POINTS:
        _expect_rate(learning_rate, step, arguments, right, likely)

    # the cosine is symmetric about its middle, whatever the numbers
    arguments = (1.7, 0.3, 5, 31)
    for k in range(26):
        with asked(f"rates {k} steps into the cosine and {k} before its end, which add up to "
                   f"peak + minimum, for {_arguments(arguments)}"):
            pair = learning_rate(5 + k, *arguments), learning_rate(30 - k, *arguments)
            expect(abs(sum(pair) - 2.0) < 1e-12, seen=f"{pair[0]:.6g} + {pair[1]:.6g}, not 2",
                   likely="the cosine is not symmetric: minimum + (peak - minimum) * "
                          "a height that runs from 1 to 0")


def _expect_rate(
    learning_rate: Callable, step: int, arguments: tuple, right: float, likely: str
) -> None:
    with asked(f"learning_rate(step={step}, {_arguments(arguments)})"):
        rate = learning_rate(step, *arguments)
        expect(isinstance(rate, int | float) and not isinstance(rate, bool),
               seen=f"it returned {rate!r}, of type {type(rate).__name__}",
               likely="the rate is a Python float")
        expect(abs(rate - right) < 1e-12, seen=f"{rate:.12g}, not {right:.12g}", likely=likely)


def _arguments(values: tuple) -> str:
    names = ("peak", "minimum", "warmup_steps", "total_steps")
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def grade_1_4(plan_batch: Callable) -> None:
    """Compare with every divisor tried, then expect refusals that name both numbers."""
    by_hand = [
        (2**16, 1024, 4, 6, (4, 4)), (2**19, 1024, 8, 16, (16, 4)), (12 * 30, 10, 3, 100, (12, 1)),
        (7 * 33, 11, 3, 4, (1, 7)), (12 * 35, 5, 7, 5, (4, 3)),
    ]
    for *arguments, right in by_hand:
        _expect_plan(plan_batch, tuple(arguments), right)

    for per_rank, num_ranks, largest in product(range(1, 31), (1, 3), range(1, 32)):
        divisors = [n for n in range(1, per_rank + 1) if per_rank % n == 0 and n <= largest]
        right = divisors[-1], per_rank // divisors[-1]
        _expect_plan(plan_batch, (per_rank * num_ranks * 9, 9, num_ranks, largest), right)

    for tokens, sequence_length, num_ranks in ((1000, 128, 1), (1024, 128, 3), (128, 128, 2)):
        _expect_refusal(plan_batch, tokens, sequence_length, num_ranks)


def _expect_plan(plan_batch: Callable, arguments: tuple, right: tuple[int, int]) -> None:
    tokens, sequence_length, num_ranks, largest = arguments
    with asked(f"plan_batch(tokens_per_step={tokens}, sequence_length={sequence_length}, "
               f"num_ranks={num_ranks}, largest_micro_batch={largest})"):
        plan = plan_batch(*arguments)
        integers = isinstance(plan, tuple) and [type(n) for n in plan] == [int, int]
        expect(integers, seen=f"it returned {plan!r}",
               likely="a tuple of two integers: divide with //, and return both")
        micro_batch_size, accumulation_steps = plan
        planned = micro_batch_size * accumulation_steps * num_ranks * sequence_length
        seen = f"{plan}, which trains on {planned} tokens; right is {right}"
        expect(micro_batch_size <= largest, seen=seen,
               likely=f"micro-batches of {micro_batch_size} do not fit, {largest} is the most: "
                      "divide by sequence_length and num_ranks first, and put the size first")
        expect(planned == tokens, seen=seen,
               likely="the batch changed: micro_batch_size must divide the sequences per rank, "
                      "tokens_per_step / (sequence_length x num_ranks)")
        expect(plan == right, seen=seen,
               likely=f"a larger micro-batch divides too: try every size from {largest} down, not "
                      "only powers of two, nor only the first that works")


def _expect_refusal(
    plan_batch: Callable, tokens: int, sequence_length: int, num_ranks: int
) -> None:
    unit = sequence_length * num_ranks
    with asked(f"plan_batch({tokens}, {sequence_length}, {num_ranks}, 4), where {tokens} is no "
               f"multiple of {sequence_length} x {num_ranks} = {unit}: a ValueError"):
        try:
            plan = plan_batch(tokens, sequence_length, num_ranks, 4)
        except ValueError as error:
            message = str(error).replace(",", "").replace("_", "")
            expect(str(tokens) in message and str(unit) in message, seen=f"ValueError: {error}",
                   likely=f"the message must contain both numbers, {tokens} and {unit}, so that "
                          "the reader can change one of them")
        else:
            expect(False, seen=f"it returned {plan}",
                   likely="// rounds down and drops tokens: test with % and raise ValueError")
