"""Grader of 2.3: steps that peak in different phases, against our own reading of a twin."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from minitron.config import ModelConfig
from minitron.measure.meter import Meter, Snapshot
from minitron.model.transformer import Transformer, initialize
from teaching.graders import apart, asked, expect

SIZES = dict(family="gpt", max_sequence_length=32, num_heads=2, num_kv_heads=2, ffn_width=52)
STEPS = {
    "many tokens and a large vocabulary":
        (dict(vocab_size=499, width=10, num_layers=1), (4, 31)),
    "many tokens and many layers": (dict(vocab_size=17, width=26, num_layers=5), (4, 29)),
    "one sequence of three tokens, the head untied":
        (dict(vocab_size=37, width=38, num_layers=2, tied_embedding=False), (1, 3)),
}


class Training:
    """A model, its optimizer and a step; two of the same arguments train alike."""

    def __init__(self, fields: dict, shape: tuple[int, int]):
        self.model = Transformer(ModelConfig(**SIZES, **fields))
        initialize(self.model, seed=3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        generator = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(fields["vocab_size"], shape, generator=generator)
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        self.optimizer.zero_grad()
        logits = self.model(self.tokens)
        F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        self.optimizer.step()

    def read(self) -> Snapshot:
        with Meter(self.model, self.optimizer) as meter:
            self.step()
        return meter.peak


@dataclass(frozen=True)
class Right:
    """What the meter says of a step, and of the first one, which is unlike the others."""

    peak: Snapshot
    first: Snapshot

    @property
    def held(self) -> Counter:
        held = Counter()
        for tensor in self.peak.tensors:
            held[tensor.category, tensor.module] += tensor.bytes
        return held


def grade_2_3(find_peak: Callable) -> None:
    """Compare phase, bytes and holders for steps that peak in backward and in the optimizer."""
    for num_holders in (3, 7):
        for name, (fields, shape) in STEPS.items():
            right = right_of(name)
            with asked(f"find_peak(step, model, optimizer, {num_holders}) for a step with {name}"):
                answer, num_steps = apart(trial, find_peak, fields, shape, num_holders)
                _expect_peak(answer, right, num_steps)
                _expect_holders(answer[2], right.held, num_holders)


@cache
def right_of(name: str) -> Right:
    """The meter's readings of a twin's first two steps."""
    twin = Training(*STEPS[name])
    first = twin.read()
    return Right(twin.read(), first)


def trial(
    find_peak: Callable, fields: dict, shape: tuple[int, int], num_holders: int
) -> tuple[object, int]:
    """What the learner's function says of a training, and how many steps it took."""
    training = Training(fields, shape)
    answer = find_peak(training.step, training.model, training.optimizer, num_holders)
    return answer, training.num_steps


def _expect_peak(answer: tuple, right: Right, num_steps: int) -> None:
    shaped = isinstance(answer, tuple) and [type(part) for part in answer] == [str, int, list]
    expect(shaped, seen=f"it returned {answer!r}"[:300],
           likely="a tuple: the phase (str), the bytes (int), a list of holders")
    phase, size, _ = answer
    seen = f"{size:,} bytes in {phase}, not {right.peak.total:,} in {right.peak.phase}"
    states = right.peak.bytes["optimizer state"]

    likely = "the most bytes at one moment: meter.peak.total and meter.peak.phase, read after " \
             "Meter(model, optimizer) has watched a whole step"
    if num_steps == 1:
        likely = "that is the first step: Adam allocates its state at its end, so its forward " \
                 "and backward passes run without it. Run one step before the one you measure"
    elif size == right.peak.total - states:
        likely = "the optimizer's state is missing: give the meter the optimizer, too"
    elif size == 2 * right.peak.bytes["parameter"] + states:  # as many bytes of gradients
        likely = "that is what remains at the end: the peak is over when the step ends"
    expect(size == right.peak.total, seen=seen, likely=likely)
    expect(phase == right.peak.phase, seen=seen,
           likely="the phase of the peak itself, meter.peak.phase, not of the step's last moment")


def _expect_holders(holders: list, held: Counter, num_holders: int) -> None:
    largest = held.most_common(num_holders)
    shaped = all(
        isinstance(holder, tuple) and [type(part) for part in holder] == [str, str, int]
        for holder in holders)
    expect(shaped, seen=f"holders {holders!r}"[:300],
           likely="each is (category, module, bytes), a tuple of str, str and int")
    expect(len(holders) == num_holders, seen=f"{len(holders)} holders, not {num_holders}",
           likely="the `num_holders` largest, however many there are")

    for category, module, size in holders:
        expect((category, module) in held,
               seen=f"holder ({category!r}, {module!r}); there is {largest[0][0]}, for example",
               likely="group by the meter's own category and module of each tensor, together")
        of_category = sum(size for key, size in held.items() if key[0] == category)
        expect(size != of_category or size == held[category, module],
               seen=f"({category!r}, {module!r}): {size:,} bytes, those of all its modules",
               likely="group by the meter's own category and module of each tensor, together")
        expect(size == held[category, module],
               seen=f"({category!r}, {module!r}): {size:,} bytes, not {held[category, module]:,}",
               likely="a holder can have several tensors: add up all of one category and module")
    expect(len({holder[:2] for holder in holders}) == num_holders,
           seen=f"a holder is listed twice: {holders}"[:300],
           likely="one entry for each category and module: add up before you list")
    sizes = [size for *_, size in holders]
    expect(sizes == [size for _, size in largest],
           seen=f"holders of {sizes} bytes, not {[size for _, size in largest]}",
           likely="largest first: add up everything, then sort by bytes, then cut the list")
