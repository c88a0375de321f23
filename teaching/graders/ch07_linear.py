"""Grader of 7.2: what a row-parallel layer holds, what it sends, and its gradients."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minitron.measure.ledger import Call
from teaching.graders import asked, expect
from teaching.graders.ch06_toy import Held
from teaching.graders.ch07_toy import (
    ELEMENT,
    ROUNDING,
    expect_calls,
    expect_close,
    expect_dtype,
    expect_little,
    expect_refusal,
    in_short,
    random,
    refusal,
    scattered,
)
from teaching.graders.python_memory import python_bytes
from teaching.graders.ranks import Wire, on_ranks, per_rank


@dataclass(frozen=True)
class Case:
    num_inputs: int
    num_outputs: int
    shape: tuple[int, ...]
    """Of x, without its inputs."""
    has_bias: bool = True
    dtype: torch.dtype = torch.float64
    contiguous: bool = True
    """Whether x is."""

    def __str__(self) -> str:
        kind = "" if self.has_bias else " without a bias"
        layout = "" if self.contiguous else ", x not contiguous"
        return f"{self.num_inputs} inputs, {self.num_outputs} outputs{kind}, " \
            f"{in_short(self.dtype)}{layout}"

    @property
    def rounding(self) -> float:
        return ROUNDING if self.dtype == torch.float64 else 1e-5

    def make(self) -> nn.Linear:
        linear = nn.Linear(self.num_inputs, self.num_outputs, self.has_bias, dtype=self.dtype)
        for number, parameter in enumerate(linear.parameters()):
            parameter.data.copy_(random(number, *parameter.shape))
        return linear

    def data(self, number: int) -> tuple[Tensor, Tensor]:
        """x of a micro-batch, and the gradient of its output."""
        x = random(7 + 10 * number, *self.shape, self.num_inputs)
        grad_out = random(8 + 10 * number, *self.shape, self.num_outputs)
        return x.to(self.dtype), grad_out.to(self.dtype)

    def shard(self, x: Tensor, rank: int, size: int) -> Tensor:
        part = x.chunk(size, dim=-1)[rank].contiguous()
        return part.clone() if self.contiguous else scattered(part)


CASES = [Case(12, 5, (2, 3)), Case(12, 1, (4,)), Case(12, 7, (), has_bias=False),
         Case(12, 5, (2, 3), contiguous=False), Case(12, 5, (2,), dtype=torch.float32)]
MICRO_BATCHES = 2
INDIVISIBLE = 10
LARGE, MANY = 256, 4


@dataclass(frozen=True)
class Computed:
    """What a rank has after two micro-batches; if its parameters have other shapes, those alone."""

    shapes: dict[str, tuple | None]
    dtype: torch.dtype | None = None
    weight: Tensor | None = None
    outs: list[Tensor] | None = None
    grads: dict[str, Tensor | None] | None = None
    forward: list[Call] | None = None
    backward: list[Call] | None = None


@dataclass(frozen=True)
class Seen:
    """What a rank saw."""

    computed: list[Computed]
    alive: tuple[int, int]
    """Bytes of a large layer, on 4 ranks: of tensors, and of other Python objects."""
    refusal: tuple[str, str]
    """What was raised of inputs that cannot be cut."""


def grade_7_2(RowParallelLinear: type) -> None:
    """Compare with the whole layer; then count what is left of it; then ask the impossible."""
    call = "RowParallelLinear(linear, group)"
    with asked(f"{call}, its output and its gradients on 1, 2, 3 and 4 ranks"):
        by_size = on_ranks(look, RowParallelLinear)
    for size, by_rank in by_size.items():
        for index, case in enumerate(CASES):
            with asked(f"{call} on {size} ranks: {case}"):
                _expect_computed([seen.computed[index] for seen in by_rank], case)

    with asked(f"the bytes held by {call}: {LARGE} inputs, {LARGE} outputs, float64, {MANY} ranks"):
        _expect_little([seen.alive for seen in by_size[MANY]])
    for size, by_rank in by_size.items():
        if INDIVISIBLE % size:
            with asked(f"RowParallelLinear(nn.Linear({INDIVISIBLE}, 2), group) on {size} ranks"):
                expect_refusal([seen.refusal for seen in by_rank], (INDIVISIBLE, size))


def look(group, RowParallelLinear: type) -> Seen:
    computed = [compute(group, RowParallelLinear, case) for case in CASES]
    return Seen(computed, hold(group, RowParallelLinear) if group.size() == MANY else (0, 0),
                refusal(lambda: RowParallelLinear(nn.Linear(INDIVISIBLE, 2), group)))


def compute(group, RowParallelLinear: type, case: Case) -> Computed:
    layer = RowParallelLinear(case.make(), group)
    parameters = {name: getattr(layer, name, None) for name in ("weight", "bias")}
    shapes = {name: tuple(p.shape) if isinstance(p, nn.Parameter) else None
              for name, p in parameters.items()}
    if shapes != right_shapes(case, group.size()):
        return Computed(shapes)

    outs, forward, backward = [], [], []
    for number in range(MICRO_BATCHES):
        x, grad_out = case.data(number)
        x_shard = case.shard(x, group.rank(), group.size()).requires_grad_()
        with Wire({"all_reduce"}) as wire:
            out = layer(x_shard)
            outs.append(out.detach().clone())
            forward += wire.calls
            num_forward = len(wire.calls)
            if out.shape == grad_out.shape:
                out.backward(grad_out)
            backward += wire.calls[num_forward:]
    grads = {"x_shard": x_shard.grad} | {
        name: p.grad for name, p in parameters.items() if p is not None}
    return Computed(shapes, layer.weight.dtype, layer.weight.detach(), outs, grads, forward,
                    backward)


def right_shapes(case: Case, size: int) -> dict[str, tuple | None]:
    return {"weight": (case.num_outputs, case.num_inputs // size),
            "bias": (case.num_outputs,) if case.has_bias else None}


def _expect_computed(seen: list[Computed], case: Case) -> None:
    size, right = len(seen), right_shapes(case, len(seen))
    for name, shape in right.items():
        shapes = [mine.shapes[name] for mine in seen]
        expect(all(mine == shape for mine in shapes),
               seen=per_rank([f"{name} is " + ("no nn.Parameter" if mine is None else
                                               f"of shape {mine}") for mine in shapes])
               + f"; right is {shape}",
               likely="a rank holds I/N columns of weight (O, I), and the full bias, as "
                      "parameters; bias is None where the layer has none")
    expect_dtype("weight", [mine.dtype for mine in seen], case.dtype)
    linear, xs, outs = case.make(), [], []
    for number in range(MICRO_BATCHES):
        x, grad_out = case.data(number)
        xs.append(x.requires_grad_())
        outs.append(linear(x))
        outs[-1].backward(grad_out)

    pieces = list(linear.weight.detach().chunk(size, dim=1))
    expect_close("weight", [mine.weight for mine in seen], pieces, [],
                 "rank r holds columns r I/N to (r + 1) I/N of weight, which multiply its x_shard")
    if size > 1:
        _expect_one_call_each(seen, outs[0])
    for number, (x, out) in enumerate(zip(xs, outs, strict=True)):
        first = "that is the output of the first call: compute it in every call"
        faults = [*wrong_outputs(linear, x.detach(), size), (first, [outs[0].detach()] * size)]
        expect_close(f"the output of call {number + 1}", [mine.outs[number] for mine in seen],
                     [out.detach()] * size, faults,
                     "sum x_shard @ weight.T over the ranks, then add the bias once",
                     case.rounding)
    _expect_gradients(seen, linear, xs[-1].grad, case.rounding)


def _expect_one_call_each(seen: list[Computed], out: Tensor) -> None:
    expect_calls(f"in {MICRO_BATCHES} forward passes:", [mine.forward for mine in seen],
                 [out.nbytes] * MICRO_BATCHES,
                 "one all-reduce of the partial sum per call; the bias is not sent")
    expect_calls("backward:", [mine.backward for mine in seen], [],
                 "every rank already has the full gradient of out, so its parameters' gradients "
                 "are complete; a sum over the ranks makes them N times too large")


def wrong_outputs(linear: nn.Linear, x: Tensor, size: int) -> Iterator[tuple[str, list[Tensor]]]:
    """What is likely, and what each rank's output would be then."""
    out, zero = linear(x).detach(), torch.zeros(())
    bias = zero if linear.bias is None else linear.bias.detach()
    pieces = zip(x.chunk(size, -1), linear.weight.detach().chunk(size, 1), strict=True)
    parts = [x_shard @ weight.T for x_shard, weight in pieces]
    yield f"the bias is in it {size} times: add it after the sum", [out + (size - 1) * bias] * size
    yield "the bias is missing", [out - bias] * size
    yield "that is the mean: add the partial sums without " \
          "dividing", [(out - bias) / size + bias] * size
    not_summed = "that is only this rank's partial sum: return the result of all_reduce"
    yield not_summed, [part + bias for part in parts]
    yield not_summed, parts


def _expect_gradients(
    seen: list[Computed], linear: nn.Linear, grad_x: Tensor, most: float
) -> None:
    size = len(seen)
    if linear.bias is not None:
        _expect_bias_gradient([mine.grads["bias"] for mine in seen], linear.bias.grad, most)
    pieces = {"x_shard": grad_x.chunk(size, dim=-1), "weight": linear.weight.grad.chunk(size, 1)}
    for name, right in pieces.items():
        faults = [(f"that is {size} times the gradient: the backward pass sums nothing",
                   [size * grad for grad in right])]
        expect_close(f"{name}.grad", [mine.grads[name] for mine in seen], list(right),
                     faults, "this rank's shard of the gradient on one process. Autograd computes "
                             "it if all_reduce passes the gradient through unchanged, and it adds "
                             "to the .grad of earlier micro-batches", most)


def _expect_bias_gradient(grads: list[Tensor | None], right: Tensor, most: float) -> None:
    size = len(grads)
    likely = "the gradient of out, summed over all dimensions but the last, on every rank"
    without = [grad is None or not grad.any() for grad in grads]
    if any(without) and not all(without):
        likely = "a bias added on one rank learns only there, and its replicas drift apart: add " \
                 "it on every rank, after the sum"
    faults = {
        f"the output is right, but each rank gets 1/{size} of the bias's gradient: add the whole "
        "bias, after the sum": [right / size] * size,
        f"that is {size} times the gradient: it is the same on all ranks, so do not sum it":
            [size * right] * size,
    }
    expect_close("bias.grad", grads, [right] * size, faults.items(), likely, most)


def hold(group, RowParallelLinear: type) -> tuple[int, int]:
    """Bytes that are alive after the layer has been made, and the whole one has been dropped."""
    with Held() as held:
        linear = nn.Linear(LARGE, LARGE, dtype=torch.float64)
        layer = RowParallelLinear(linear, group)
        del linear
        gc.collect()
        alive = held.now(), python_bytes(layer)
    assert layer is not None
    return alive


def _expect_little(seen: list[tuple[int, int]]) -> None:
    whole, bias = LARGE * LARGE * ELEMENT, LARGE * ELEMENT
    expect_little(seen, whole + bias, whole // len(seen) + bias,
                  "a view keeps the full weight alive: clone the shard, and do not keep linear")

