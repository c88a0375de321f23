"""Grader of 2.4: the same numbers as the leaking loop, and the meter at every step."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitron.config import ModelConfig
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer, initialize
from teaching.graders import apart, asked, expect
from teaching.graders.python_memory import python_bytes, variables
from teaching.graders.ranks import source_file

NUM_STEPS, B, S, V = 5, 8, 61, 29
CONFIG = ModelConfig(
    family="gpt", vocab_size=V, num_layers=2, width=12, num_heads=3, num_kv_heads=3,
    ffn_width=44, max_sequence_length=S,
)
KEYS = ("loss", "average", "accuracy", "validation")
SCALARS = 4 * 8
"""Bytes a step may leave behind: four 0-d tensors of float64."""
OBJECTS = 400
"""Bytes of Python objects a step may leave behind: four floats, and lists that grow ahead."""


class Beacon(torch.autograd.Function):
    """Does nothing, and is alive as long as the graph that it is a part of."""

    @staticmethod
    def forward(ctx, x: Tensor, alive: weakref.WeakSet) -> Tensor:
        ctx.beacon = nn.Module()  # any object that a weak reference can follow
        alive.add(ctx.beacon)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Watched(nn.Module):
    """A float64 model that counts its forward passes and its graphs that are still alive."""

    def __init__(self):
        super().__init__()
        self.inner = Transformer(CONFIG)
        initialize(self.inner, seed=1)
        self.double()
        self.num_forwards = self.num_evaluating = 0
        self.graphs = weakref.WeakSet()

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_forwards += 1
        self.num_evaluating += not self.training
        return Beacon.apply(self.inner(tokens), self.graphs)


class Watch:
    """Batches that note, whenever one is asked for, what the meter has seen so far."""

    def __init__(self, model: Watched, meter: Meter, file: str):
        self.model, self.meter, self.file = model, meter, file
        self.moments, self.forwards, self.graphs, self.objects = [], [], [], []

    def note(self) -> None:
        self.moments.append(len(self.meter.timeline))
        self.forwards.append(self.model.num_forwards)
        self.graphs.append(len(self.model.graphs))
        self.objects.append(python_bytes(*variables(self.file)))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(NUM_STEPS):
            self.note()
            yield make_batch(step)
        self.note()

    @property
    def peaks(self) -> list[int]:
        """Bytes at the peak of each step, from the request for its batch to the next request."""
        totals = [moment.total for moment in self.meter.timeline]
        spans = zip(self.moments, self.moments[1:], strict=False)
        return [max(totals[start:stop], default=0) for start, stop in spans]


@dataclass(frozen=True)
class Seen:
    """What there is after the loop, and what was noted whenever it asked for a batch."""

    history: dict
    weights: dict[str, Tensor]
    forwards: list[int]
    graphs: list[int]
    peaks: list[int]
    objects: list[int]
    num_evaluating: int
    """Forward passes in eval mode."""


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, S + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def grade_2_4(train: Callable) -> None:
    """Compare history and weights with the leaking loop's, then the peaks with a clean loop's."""
    right, clean = loops()
    with asked(f"train(model, optimizer, {NUM_STEPS} batches of {B} x {S}, 3 validation batches)"):
        seen = apart(_run, train)
        _expect_history(seen.history, right.history)
        _expect_training_mode(seen)
        for name, wanted in right.weights.items():
            expect(torch.allclose(seen.weights[name], wanted, rtol=0, atol=1e-12),
                   seen=f"{name} differs after {NUM_STEPS} steps",
                   likely="take the same steps on the same batches: change only what is stored")
        _expect_memory(seen, clean)


@cache
def loops() -> tuple[Seen, Seen]:
    """What the leaking loop and the clean one leave."""
    return _run(leaking_loop), _run(clean_loop)


def _run(train: Callable) -> Seen:
    model = Watched()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    validation = [make_batch(100 + i) for i in range(3)]
    with Meter(model, optimizer) as meter:
        watch = Watch(model, meter, source_file(train))
        history = train(model, optimizer, watch.batches(), validation)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Seen(history, weights, watch.forwards, watch.graphs, watch.peaks, watch.objects,
                model.num_evaluating)


def leaking_loop(model, optimizer, batches, validation) -> dict[str, list[float]]:
    """The loop in the docstring of the exercise."""
    history = {key: [] for key in KEYS}
    average = 0.0
    for inputs, targets in batches:
        logits = model(inputs)
        loss = loss_of(logits, targets)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()

        average = 0.9 * average + 0.1 * loss
        history["loss"].append(loss)
        history["average"].append(average)
        history["accuracy"].append((logits.argmax(-1) == targets).double())
        total = 0.0
        for x, y in validation:
            total += loss_of(model(x), y)
        history["validation"].append(total / len(validation))
    history["accuracy"] = [correct.mean() for correct in history["accuracy"]]
    return {key: [value.item() for value in values] for key, values in history.items()}


def clean_loop(model, optimizer, batches, validation) -> dict[str, list[float]]:
    """The same work, nothing kept: what a step needs."""
    for inputs, targets in batches:
        logits = model(inputs)  # alive to the end of the step: the accuracy reads them
        loss = loss_of(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for x, y in validation:
                loss_of(model(x), y)
    return {}


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _expect_history(history: dict, right: dict[str, list[float]]) -> None:
    expect(isinstance(history, dict) and set(history) == set(KEYS),
           seen=f"it returned {history!r}"[:300],
           likely=f"a dict with the lists {', '.join(KEYS)}")
    for key, wanted in right.items():
        values = history[key]
        floats = isinstance(values, list) and all(type(value) is float for value in values)
        expect(floats, seen=f"history[{key!r}] is {values!r}"[:300],
               likely="a list of Python floats: .item() makes one of a 0-d tensor, without graph")
        expect(len(values) == len(wanted), seen=f"{len(values)} values of {key}, for "
               f"{len(wanted)} steps", likely="one value per step")
        error = max(abs(a - b) for a, b in zip(values, wanted, strict=True))
        expect(error < 1e-12, seen=f"{key}: {values[1]:.6f} in the second step, not "
               f"{wanted[1]:.6f}; largest error {error:.3g}", likely=_explain(key))


def _explain(key: str) -> str:
    return {
        "loss": "the loss is taken before the update, and the training must be the same: the "
                "same forward, backward and step, on every batch",
        "average": "0.9 times the average so far plus 0.1 times the new loss, starting from 0.0",
        "accuracy": "the fraction of all B x S tokens whose largest logit is the target's, from "
                    "the logits of the training step, before the update",
        "validation": "the mean over the validation batches, after the update",
    }[key]


def _expect_training_mode(seen: Seen) -> None:
    expect(seen.num_evaluating == 0,
           seen=f"{seen.num_evaluating} of {seen.forwards[-1]} forward passes ran in eval mode",
           likely="the loop in the exercise never leaves training mode. model.eval() switches "
                  "dropout off, and without model.train() after it, for the rest of the training. "
                  "What saves memory is torch.no_grad()")


def _expect_memory(watch: Seen, clean: Seen) -> None:
    work = clean.forwards
    expect(watch.forwards == work,
           seen=f"forward passes before each request for a batch: {watch.forwards}, not {work}",
           likely="take the batches one at a time, each with its step and its validation: "
                  "list(batches) creates them all and keeps them all")

    objects = watch.objects
    expect(objects[-1] - objects[1] <= OBJECTS * (NUM_STEPS - 1),
           seen=f"bytes of Python objects and NumPy arrays that are kept when each step begins: "
                f"{_list(objects)}",
           likely=f"each step leaves something behind that grows with the batch of {B * S} tokens; "
                  "a copy in NumPy, bytes or a list of floats takes memory, too: reduce it to one "
                  "float immediately")
    peaks, allowed = watch.peaks, clean.peaks[1] + 8 * SCALARS
    seen = f"bytes at the peak of each step: {_list(peaks)}; a loop that keeps nothing: " \
           f"{_list(clean.peaks)}; graphs alive when each ends: {watch.graphs[1:]}"
    growth = peaks[-1] - peaks[1]
    per_step = B * S
    expect(growth <= SCALARS * (NUM_STEPS - 2) or watch.graphs[-1] > watch.graphs[1], seen=seen,
           likely=f"each step leaves something behind whose size grows with the batch, such as "
                  f"{per_step} values, one per token: reduce it to a float immediately")
    expect(watch.graphs[-1] <= watch.graphs[1], seen=seen,
           likely="what each step leaves behind still has its graph, and the graph keeps its saved "
                  "tensors: store .item() or .detach(), for the average too, and validate under "
                  "torch.no_grad()")
    expect(peaks[1] <= allowed, seen=seen,
           likely="nothing grows, but more is alive at once than a step needs: a graph that "
                  "outlives its backward pass (retain_graph), or validation batches whose graphs "
                  "live until the sum is complete (torch.no_grad() builds none)")


def _list(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)
