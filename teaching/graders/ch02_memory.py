"""Graders of chapter 2; the longer ones have a file of their own.

Each reads the meter: at real training steps with Adam in the planned precisions (2.1), at real
blocks after their forward pass (2.2), at the peak of steps that peak in different phases (2.3),
and at every step of the learner's loop (2.4).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minitron.measure.meter import Meter
from teaching.graders import asked, expect
from teaching.graders.ch02_activations import grade_2_2, held_now
from teaching.graders.ch02_leak import grade_2_4
from teaching.graders.ch02_peak import grade_2_3

__all__ = ["grade_2_1", "grade_2_2", "grade_2_3", "grade_2_4"]

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
PARTS = ("parameter", "gradient", "master", "moments")
PLANS = {
    name: dict(zip(PARTS, dtypes, strict=True)) for name, dtypes in {
        "float32": (f32, f32, None, f32),
        "bfloat16, float32 master": (bf16, bf16, f32, f32),
        "bfloat16, float32 gradient and master": (bf16, f32, f32, f32),
        "bfloat16": (bf16, bf16, None, bf16),
    }.items()
}
DOUBLE = {"float64": dict(zip(PARTS, (f64, f64, None, f64), strict=True))}


class SmallModel(nn.Module):
    """A table of 11 x 5 values, a layer of 5 x 7 with bias, and a head."""

    def __init__(self, tied: bool, frozen: bool):
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.mix = nn.Linear(5, 7)
        self.out = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.mix.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.out(self.mix(self.table(tokens))))


def grade_2_1(state_bytes: Callable, plans_that_fit: Callable) -> None:
    """Compare with what the meter finds after a real step, then with plans worked out by hand."""
    models = {
        "one linear layer, 13 to 3": lambda: nn.Linear(13, 3),
        "embedding, two layers, untied head": lambda: SmallModel(tied=False, frozen=False),
        "embedding, two layers, tied head": lambda: SmallModel(tied=True, frozen=False),
        "embedding, a frozen layer, another, tied head": lambda: SmallModel(tied=True, frozen=True),
    }
    for model_name, make in models.items():
        for plan_name, dtypes in (PLANS | DOUBLE).items():
            with asked(f"state_bytes({model_name}; {plan_name}), against the meter after a step"):
                seen = state_bytes(make(), dtypes)
                _expect_parts(seen, _measure(make(), dtypes), _faults(make(), dtypes))

    _grade_fitting(plans_that_fit)


def _measure(model: nn.Module, dtypes: dict) -> dict[str, int]:
    """Train one step in these dtypes, and read by part what the meter finds held after it."""
    model.to(dtypes["parameter"])
    trained = [p for p in model.parameters() if p.requires_grad]
    updated = trained
    if dtypes["master"]:
        updated = [p.detach().to(dtypes["master"]).requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(updated)

    with Meter(model, optimizer) as meter:
        is_linear = isinstance(model, nn.Linear)
        tokens = torch.zeros(2, 13, dtype=dtypes["parameter"]) if is_linear else torch.arange(3)
        model(tokens).sum().backward()
        for master, parameter in zip(updated, trained, strict=True):
            master.grad = parameter.grad.to(master.dtype)
        optimizer.step()
        for master, parameter in zip(updated, trained, strict=True):
            if dtypes["gradient"] == parameter.dtype and master is not parameter:
                master.grad = None
            elif master is not parameter:
                parameter.grad = None
        del tokens, master, parameter
        tensors = [tensor for tensor in held_now(meter).tensors if tensor.shape]

    parts = dict.fromkeys(PARTS, 0)
    for tensor in tensors:
        parts[_part(tensor)] += tensor.bytes
    return parts


def _part(tensor) -> str:
    if tensor.category == "optimizer state":
        return "moments" if "exp_avg" in tensor.name else "master"
    # the gradient of a master copy is a temporary to the meter: the model does not own it
    return "parameter" if tensor.category == "parameter" else "gradient"


def _expect_parts(seen: dict, right: dict[str, int], faults: dict) -> None:
    integers = isinstance(seen, dict) and set(seen) == set(PARTS) and \
        all(type(size) is int for size in seen.values())
    expect(integers, seen=f"it returned {seen!r}",
           likely=f"a dict of integers under {', '.join(PARTS)}: multiply, do not divide")
    for part in PARTS:
        expect(seen[part] == right[part], seen=f"{part}: {seen[part]} bytes, not {right[part]}",
               likely=faults.get((part, seen[part]),
                              f"number of values in {part}, times the bytes of {part}'s own dtype"))


def _faults(model: nn.Module, dtypes: dict) -> dict[tuple[str, int], str]:
    """What a wrong count of a part means."""
    named = [p for _, p in model.named_parameters(remove_duplicate=False)]
    stored = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = {part: dtype.itemsize if dtype else 4 for part, dtype in dtypes.items()}
    counts = {part: stored if part == "parameter" else trained for part in PARTS}

    faults = {}
    for part in PARTS:
        times = size[part] * (2 if part == "moments" else 1)
        faults |= {
            (part, counts[part]): "that is the number of values: multiply it by dtype.itemsize",
            (part, counts[part] * 4): "that is the size in float32: use the part's dtype from "
                                      "`dtypes`, whatever dtype the model has now",
            (part, counts[part] * size["parameter"]): "that uses the parameter's dtype: each "
                                                      "part has its own in `dtypes`",
            (part, stored * times): "a frozen parameter has no gradient, no master and no moments",
            (part, sum(p.numel() for p in named) * times): "a tied weight is counted twice: it "
                                                           "has two names but is one tensor",
            (part, sum(p.numel() for p in named if p.requires_grad) * times):
                "a tied weight is counted twice: it has two names but is one tensor",
        }
    faults["parameter", trained * size["parameter"]] = \
        "a frozen parameter is not trained, but it is stored: count its weights"
    faults["moments", trained * size["moments"]] = \
        "Adam keeps two moving averages: of the gradient, and of its square"
    if dtypes["master"] is None:
        faults["master", trained * 4] = "master is None: the optimizer updates the parameters"
    return faults


def _grade_fitting(plans_that_fit: Callable) -> None:
    for model_name, model, memory_gb, right, likely in _fitting_cases():
        with asked(f"plans_that_fit({model_name}; plans {'; '.join(PLANS)}; {memory_gb:g} GB)"):
            seen = plans_that_fit(model, dict(PLANS), memory_gb)
            expect(isinstance(seen, list), seen=f"it returned {seen!r}", likely="a list of names")
            expect(seen == right, seen=f"{seen}, not {right}", likely=likely)


def _fitting_cases() -> list[tuple[str, nn.Module, float, list[str], str]]:
    """Name, model, memory in GB, what fits, and what is likely wrong with another answer."""
    with torch.device("meta"):  # 5 x 10^9 parameters that need no memory here
        whole, partly = (nn.Linear(50_000, 100_000, bias=False) for _ in range(2))
        partly = nn.Sequential(partly, nn.Linear(100_000, 10_000, bias=False))
        more = nn.Linear(50_000, 100_000)  # 100,000 biases, that is 0.0016 GB in float32
    partly[1].requires_grad_(False)
    full, master, wide, narrow = PLANS

    return [
        ("5 x 10^9 parameters", whole, 100.0, [narrow, full, master, wide],
         "sort by bytes, the smallest first; ties stay in the order of the dict"),
        ("5 x 10^9 parameters", whole, 80.0, [narrow, full, master],
         "16 bytes per parameter fill 80 GB exactly, which fits; 18 do not: count all parts"),
        ("5 x 10^9 parameters", whole, 75.0, [narrow],
         "80 GB exceed 75: a GB is 10^9 bytes, not 2^30. Count all parts"),
        ("5 x 10^9 parameters", whole, 39.9, [],
         "even the smallest plan needs 40 GB, more than 39.9: return an empty list"),
        ("5 x 10^9 trained parameters, 10^9 frozen ones", partly, 83.0, [narrow, master],
         "a frozen parameter takes 4 bytes in float32 (84 GB in total), 2 in bfloat16 (82 GB)"),
        ("5.0001 x 10^9 parameters", more, 80.0, [narrow],
         "80.0016 GB exceed 80: compare bytes, not GB that were rounded"),
        ("5.0001 x 10^9 parameters", more, 80.5, [narrow, full, master],
         "80.0016 GB are less than 80.5: memory_gb need not be an integer"),
    ]
