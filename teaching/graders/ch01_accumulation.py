"""Grader of 1.1: micro-batches against one large batch, and one pass alive at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from teaching.graders import apart, asked, expect
from teaching.graders.ch01_toy import SEQUENCE, VOCABULARY, TinyModel

IGNORED = -100
EMPTY_MEAN = "a micro-batch without a counted token has the mean 0 / 0 = nan: sum the losses, " \
             "and divide by the count of all micro-batches"


def grade_1_1(accumulate_gradients: Callable) -> None:
    """Compare loss and gradients with one large batch's; watch the order of the passes."""

    def accumulate(request: str, rows: list[int], num_ignored: list[int], held: float = 0) -> None:
        with asked(request):
            _compare_with_one_batch(accumulate_gradients, rows, num_ignored, held)

    accumulate("one micro-batch of 2 sequences, nothing ignored", [2], [0])
    accumulate("two micro-batches of 2 sequences, nothing ignored", [2, 2], [0, 0])
    unequal = "micro-batches of 2, 1 and 3 sequences of 5 tokens, of which 1, 3 and 0 targets " \
              "are ignored: the mean over 9 + 2 + 15 tokens"
    accumulate(unequal, [2, 1, 3], [1, 3, 0])
    accumulate(f"{unequal}, added to a .grad that holds 0.5 everywhere", [2, 1, 3], [1, 3, 0], 0.5)
    accumulate("three micro-batches; every target of the second is ignored", [2, 1, 2], [0, 5, 3])
    accumulate("one micro-batch, whose every target is ignored: the loss is 0", [1], [5])
    for divisor in (12.5, torch.tensor(104.0)):
        with asked(f"divisor={divisor} given, where 9, 2 and 15 targets count"):
            _expect_divided(accumulate_gradients, divisor)
    with asked("sum_loss given: a loss of its own, which is not the cross-entropy"):
        _expect_own_loss(apart(try_own_loss, accumulate_gradients))


@dataclass(frozen=True)
class Seen:
    """What there is after the call, beside what it returned."""

    loss: float | Tensor
    passes: list[str]
    grads: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    frozen: bool
    """Whether the shift is still frozen, and has no gradient."""
    handed_over: list[tuple[Tensor, Tensor]]
    num_alive: int
    num_evaluating: int


def trial(
    accumulate_gradients: Callable, rows: list[int], num_ignored: list[int], held: float, *divisor
) -> Seen:
    """Call the learner's function on a model of ours."""
    model, micro_batches = TinyModel(), _make_micro_batches(rows, num_ignored)
    for parameter in model.trainable().values():
        parameter.grad = torch.full_like(parameter, held) if held else None
    loss = accumulate_gradients(model, micro_batches, *divisor)
    return Seen(
        loss, model.passes, {name: p.grad for name, p in model.trainable().items()},
        {name: p.detach() for name, p in model.named_parameters()},
        model.shift.grad is None and not model.shift.requires_grad, micro_batches,
        model.num_alive, model.num_evaluating + (not model.training))


def _compare_with_one_batch(
    accumulate_gradients: Callable, rows: list[int], num_ignored: list[int], held: float
) -> None:
    seen = apart(trial, accumulate_gradients, rows, num_ignored, held)
    if 5 not in num_ignored:  # a micro-batch without targets may be skipped
        _expect_one_pass_at_a_time(seen.passes, rows)
    expect(seen.num_alive == 0,
           seen=f"{seen.num_alive} tensors of an earlier micro-batch's graph are alive when a "
                "forward pass begins",
           likely="backward() frees what its graph has saved: call it once, without retain_graph")
    expect(seen.num_evaluating == 0, seen="the model was put into eval mode",
           likely="dropout is on in training: leave the mode to the caller")
    loss = seen.loss
    expect(_is_number(loss), seen=f"it returned {loss!r}, of type {type(loss).__name__}",
           likely="the loss is a float, or a 0-d tensor whose graph does not keep memory alive: "
                  "loss.item() or loss.detach()")
    micro_batches = _make_micro_batches(rows, num_ignored)
    _expect_sum(seen.grads, float(loss), micro_batches, held)
    _expect_untouched(seen, micro_batches)


def _expect_divided(accumulate_gradients: Callable, divisor: float | Tensor) -> None:
    """Compare with the gradient and loss of the mean, times what the divisor makes of it."""
    rows, num_ignored, times = [2, 1, 3], [1, 3, 0], 26 / float(divisor)
    mine = apart(trial, accumulate_gradients, rows, num_ignored, 0.0, divisor)
    plain = apart(trial, accumulate_gradients, rows, num_ignored, 0.0)
    for name, right in plain.grads.items():
        seen = mine.grads[name]
        expect(seen is not None, seen=f"{name}.grad is None", likely="no backward pass reached it")
        expect(torch.allclose(seen, times * right, rtol=1e-9, atol=1e-12),
               seen=f"{name}.grad is {_ratio(seen, right):.4g} times that without a divisor; right "
                    f"is 26 / {float(divisor):g} = {times:.4g} times",
               likely="divide the sum of the losses by `divisor` if it is not None, instead of the "
                      "number of counted targets")
    expect(_is_number(mine.loss)
           and math.isclose(mine.loss, times * plain.loss, rel_tol=1e-9),
           seen=f"the gradients are right; the loss is {mine.loss}, not {times * plain.loss:.6f}",
           likely="divide the loss that you return by `divisor`, too: return the sum of what you "
                  "called .backward() on")


def _ratio(seen: Tensor, right: Tensor) -> float:
    return float((seen * right).sum() / (right * right).sum())


def try_own_loss(accumulate_gradients: Callable) -> tuple[list, float | Tensor]:
    """Pass a loss of 3 for every counted target; its calls, by shape, and what was returned."""
    calls = []

    def sum_loss(logits: Tensor, targets: Tensor) -> Tensor:
        calls.append((tuple(logits.shape), tuple(targets.shape)))
        return logits.sum() - logits.detach().sum() + 3.0 * (targets != IGNORED).sum()

    micro_batches = _make_micro_batches([2, 1], [1, 3])
    return calls, accumulate_gradients(TinyModel(), micro_batches, sum_loss=sum_loss)


def _expect_own_loss(seen: tuple[list, float | Tensor]) -> None:
    calls, loss = seen
    shapes = [((rows, SEQUENCE, VOCABULARY), (rows, SEQUENCE)) for rows in (2, 1)]
    expect(calls == shapes, seen=f"it was called {len(calls)} times, with shapes {calls}",
           likely="call sum_loss(logits, targets) once for each micro-batch, with logits (B, S, V) "
                  "and targets (B, S) as they are: if the vocabulary is sharded over ranks, only "
                  "sum_loss can compute the loss")
    expect(_is_number(loss) and abs(float(loss) - 3.0) < 1e-12,
           seen=f"the loss returned is {loss}, not 3",
           likely="return the sum of what sum_loss gave, divided by the number of counted targets")


def _is_number(loss) -> bool:
    if isinstance(loss, Tensor):
        return loss.dim() == 0 and not loss.requires_grad
    return isinstance(loss, float)


def _make_micro_batches(rows: list[int], num_ignored: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    micro_batches = []
    for count, ignored in zip(rows, num_ignored, strict=True):
        tokens = torch.randint(VOCABULARY, (count, SEQUENCE + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
        targets[-1, SEQUENCE - ignored:] = IGNORED
        micro_batches.append((inputs, targets))
    return micro_batches


def _expect_one_pass_at_a_time(passes: list[str], rows: list[int]) -> None:
    seen = "the passes, in order: " + (", ".join(passes) or "none at all")
    forwards = [p for p in passes if p != "backward"]
    expect(
        sorted(forwards) == sorted(f"forward of {count}" for count in rows), seen=seen,
        likely="call model(inputs) once for each micro-batch, as it is; joined into one batch "
               "they would not fit into memory",
    )
    alternating = passes[1::2] == ["backward"] * len(rows) and passes[::2] == forwards
    expect(
        alternating, seen=seen,
        likely="every micro-batch's activations are alive at once: call .backward() inside the "
               "loop, before the next forward pass",
    )


def _expect_sum(
    grads: dict[str, Tensor | None], loss: float, micro_batches: list, held: float
) -> None:
    """Compare gradients and loss with those of one batch that holds all micro-batches."""
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    reference = TinyModel()
    counted = targets != IGNORED
    log_probabilities = reference(inputs).log_softmax(-1)[counted]
    total = -log_probabilities.gather(-1, targets[counted][:, None]).sum()
    right_loss = total / max(1, int(counted.sum()))
    right_grads = torch.autograd.grad(right_loss, list(reference.trainable().values()))

    for (name, grad), right in zip(grads.items(), right_grads, strict=True):
        if grad is None and not right.any():
            continue  # nothing counted, nothing added
        expect(grad is not None, seen=f"{name}.grad is None",
               likely="no backward pass reached it")
        added = grad - held
        error = (added - right).abs().max().item()
        expect(
            error < 1e-12,
            seen=f"{name}.grad: largest error {error:.3g}, where the right gradient's largest "
                 f"entry is {right.abs().max().item():.3g}",
            likely=_explain_gradient(name, grad, right, micro_batches, held),
        )
    expect(math.isfinite(loss), seen=f"the loss returned is {loss}", likely=EMPTY_MEAN)
    expect(
        abs(loss - right_loss.item()) < 1e-12,
        seen=f"the gradients are right; the loss returned is {loss:.6f}, not {right_loss:.6f}",
        likely="return the loss whose gradient you added: the sum over all micro-batches of what "
               "you called .backward() on",
    )


def _explain_gradient(
    name: str, grad: Tensor, right: Tensor, micro_batches: list, held: float
) -> str:
    if not grad.isfinite().all():
        return EMPTY_MEAN
    if held and torch.allclose(grad, right):
        return "the gradient that was there is gone: add to .grad, without zero_grad"
    if held:
        return "what .grad held before was changed too: scale each loss, not .grad afterwards"

    counts = [int((targets != IGNORED).sum()) for _, targets in micro_batches]
    num_tokens = sum(targets.numel() for _, targets in micro_batches)
    faults = {
        "the mean of the micro-batches' means: one with few counted tokens weighs as much as one "
        "with many; divide each sum of losses by the count of all micro-batches":
            [1 / len(counts) / max(count, 1) for count in counts],
        "the means of the micro-batches, added up: divide each sum of losses by the count of all "
        "micro-batches instead": [1 / max(count, 1) for count in counts],
        "ignored targets are counted: divide by the number of targets that are not -100":
            [1 / num_tokens for _ in counts],
        "the sum of the tokens' losses, not their mean": [1.0 for _ in counts],
    }
    for fault, weights in faults.items():
        if torch.allclose(grad, _weighted_gradient(name, micro_batches, weights), atol=1e-9):
            return fault
    return "every counted token must weigh 1 / (number of counted tokens of all micro-batches)"


def _weighted_gradient(name: str, micro_batches: list, weights: list[float]) -> Tensor:
    model, total = TinyModel(), 0.0
    for (inputs, targets), weight in zip(micro_batches, weights, strict=True):
        logits = model(inputs).flatten(0, 1)
        total = total + weight * F.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return torch.autograd.grad(total, getattr(model, name))[0]


def _expect_untouched(seen: Seen, given: list) -> None:
    for name, parameter in TinyModel().named_parameters():
        expect(torch.equal(parameter, seen.weights[name]), seen=f"{name} itself has changed",
               likely="no optimizer step here: only .grad may change")
    expect(seen.frozen, seen="shift is frozen, and now has a gradient or requires one",
           likely="leave requires_grad as it is; backward() fills what is trainable")
    same = len(seen.handed_over) == len(given) and all(
        torch.equal(a, b) for mine, theirs in zip(seen.handed_over, given, strict=True)
        for a, b in zip(mine, theirs, strict=True))
    expect(same, seen="the list of micro-batches, or a tensor in it, has changed",
           likely="an in-place operation on inputs or targets, or a pop: the caller needs them")
