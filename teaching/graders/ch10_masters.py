"""Grader of 10.3: who is updated, what the 16-bit weights become, and what is still held."""

import gc
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from teaching.graders import Mistake, apart, asked, expect
from teaching.graders.ch06_toy import Held
from teaching.graders.numbers import a_not_b
from teaching.graders.python_memory import python_bytes

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=2.0**-4, momentum=0.5),
}
CASES = [(torch.bfloat16, "AdamW"), (torch.float16, "SGD with momentum")]
STEPS = 20
ZERO_STEP = 6
"""In this one, from 0 on, `seldom` has a gradient of zeros: an update, with momentum and decay."""
ROUNDING = 1e-6  # of a float32 master
SQUARE, NUM_SQUARES = 192, 4
BYTES, MOST_BYTES = 14, 14.5


class Model(nn.Module):
    """Two layers that share 12 weights, 5 frozen ones, 4 unused ones, and 6 used now and then.

    The shared weights lie in memory column by column: they are not contiguous.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.empty(5), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(4))
        self.seldom = nn.Parameter(torch.empty(6))
        for parameter in self.parameters():
            parameter.data = 1 + torch.rand(parameter.shape, generator=generator)
            parameter.data.view(-1)[0] = 2.0**-12  # small beside its updates
        self.embedding.weight.data = self.embedding.weight.data.T.contiguous().T
        self.to(dtype)

    def fill(self, step: int) -> None:
        """Give the parameters their gradients of a step: of every second element a tiny one."""
        generator = torch.Generator().manual_seed(100 + step)
        for name, parameter in self.trained().items():
            grad = 1 + torch.rand(parameter.shape, generator=generator)
            grad.view(-1)[1::2] *= 2.0**-9
            if name == "seldom" and step == ZERO_STEP:
                grad.zero_()
            if name == "embedding.weight" or name == "seldom" and step % 3 == 0:
                parameter.grad = grad.to(parameter.dtype)

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


class Seen(NamedTuple):
    """What there is after some steps."""

    made: list[list[Tensor]]
    """Copies of the tensors that each optimizer was made for."""
    parameters: dict[str, Tensor]
    tied: bool
    left: list[str]
    """Whose .grad is not None."""


def grade_10_3(MasterStep: type) -> None:
    """Train 20 steps in both 16-bit dtypes; then weigh a larger model."""
    for dtype, name in CASES:
        with asked(f"MasterStep(model, make_optimizer) for {_word(dtype)} parameters and {name}"):
            _expect_masters(apart(train, MasterStep, dtype, name, 0).made, dtype)
        for step in range(STEPS):
            with asked(f"step {step + 1} of MasterStep with {_word(dtype)} parameters and {name}; "
                       "seldom has a gradient in steps 1, 4, 7 ..., which is zero in step "
                       f"{ZERO_STEP + 1}; unused never"):
                seen = apart(train, MasterStep, dtype, name, step + 1)
                _expect_step(seen, dtype, name, step)
    with asked(f"the bytes held after a step with AdamW: {NUM_SQUARES} weights of {SQUARE} x "
               f"{SQUARE}, bfloat16"):
        _expect_little(*apart(weigh, MasterStep))


def train(MasterStep: type, dtype: torch.dtype, name: str, num_steps: int) -> Seen:
    """Train from the beginning, so many steps."""
    model, made = Model(dtype), []

    def make_optimizer(tensors):
        tensors = list(tensors)
        made.append([tensor.detach().clone() for tensor in tensors])
        return OPTIMIZERS[name](tensors)

    masters = MasterStep(model, make_optimizer)
    for step in range(num_steps):
        model.fill(step)
        masters.step()
    return Seen(made, {key: p.detach() for key, p in model.named_parameters()},
                model.head.weight is model.embedding.weight,
                [key for key, p in model.named_parameters() if p.grad is not None])


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _expect_masters(made: list[list[Tensor]], dtype: torch.dtype) -> None:
    _expect_made_once(made)
    given = made[0]
    dtypes = {_word(tensor.dtype) for tensor in given}
    expect(dtypes == {"float32"}, seen=f"the optimizer updates {' and '.join(sorted(dtypes))}",
           likely="its tensors are the masters, float32: in 16 bits an update of less than half "
                  "a unit is lost")
    model = Model(dtype)
    right = sum(p.numel() for p in model.trained().values())
    tied, frozen = model.embedding.weight.numel(), model.frozen.numel()
    num = sum(tensor.numel() for tensor in given)
    likely = {
        right + frozen: "frozen parameters need no master: those that require a gradient do",
        right + tied: "embedding and head share a parameter: give it one master, or each "
                      "overwrites the other's update. model.parameters() lists it once",
        right + tied + frozen: "one master for a shared parameter, and none for frozen ones",
        right - model.unused.numel(): "a parameter may get its first gradient later",
    }.get(num, "one master for every parameter that requires a gradient")
    expect(num == right, seen=f"the optimizer has {num} elements; the model trains {right}",
           likely=likely)


def _expect_made_once(made: list[list[Tensor]]) -> None:
    expect(len(made) == 1, seen=f"make_optimizer was called {len(made)} times",
           likely="once, in __init__: an optimizer that is made anew has forgotten its moments")


@cache
def reference(dtype: torch.dtype, name: str, num_steps: int, mistake: str = "") -> dict:
    """What the float32 masters are after some steps, in plain words of PyTorch.

    `mistake`: "zeros" or "stale" for a gradient that is None; "none" for one that is zero; "anew"
    masters in every step.
    """
    model = Model(dtype)
    masters = {name: p.detach().float() for name, p in model.trained().items()}
    optimizer = OPTIMIZERS[name](list(masters.values()))
    for step in range(num_steps):
        model.zero_grad()
        model.fill(step)
        for key, parameter in model.trained().items():
            master = masters[key]
            if parameter.grad is not None and (mistake != "none" or parameter.grad.any()):
                master.grad = parameter.grad.float()
            elif mistake == "zeros":
                master.grad = torch.zeros_like(master)
            elif mistake != "stale":
                master.grad = None
        optimizer.step()
        if mistake == "anew":
            for master in masters.values():
                master.copy_(master.to(dtype))
    return {key: master.clone() for key, master in masters.items()}


def rounds_to(weight: Tensor, master: Tensor) -> bool:
    """Whether `weight` is `master` rounded to its dtype, whichever way its last bits came out."""
    slack = master.abs() * ROUNDING
    low, high = (master - slack).to(weight.dtype), (master + slack).to(weight.dtype)
    return bool(((low <= weight) & (weight <= high)).all())


def _expect_step(seen: Seen, dtype: torch.dtype, name: str, step: int) -> None:
    before = Model(dtype)
    dtypes = {_word(weight.dtype) for weight in seen.parameters.values()}
    expect(dtypes == {_word(dtype)}, seen=f"the parameters are {' and '.join(sorted(dtypes))}",
           likely="the model keeps its dtype: copy the master's value into the parameter, which "
                  "rounds it")
    expect(seen.tied, seen="embedding and head no longer share their weight",
           likely="change the parameters' values, with parameter.data.copy_: not the parameters")
    expect(torch.equal(seen.parameters["frozen"], before.frozen), seen="frozen has changed",
           likely="frozen parameters stay as they are")
    _expect_made_once(seen.made)

    right = reference(dtype, name, step + 1)
    for key in before.trained():
        if not rounds_to(seen.parameters[key], right[key]):
            raise Mistake(_difference(key, seen.parameters[key], right[key]),
                          _why_other(key, seen.parameters[key], dtype, name, step))
    expect(not seen.left, seen=f"a .grad is not None: that of {' and '.join(seen.left)}",
           likely="once the master has it, set parameter.grad = None: otherwise it is held twice, "
                  "and the next backward pass adds to it")


def _difference(key: str, weight: Tensor, master: Tensor) -> str:
    rounded = master.to(weight.dtype)
    place = int((weight != rounded).flatten().nonzero()[0])
    seen, right, exact = (float(t.flatten()[place]) for t in (weight, rounded, master))
    return f"element {place} of {key} is {a_not_b(seen, right)}; its master is {exact:.8g}"


def _why_other(
    key: str, weight: Tensor, dtype: torch.dtype, name: str, step: int
) -> str:
    def is_like(mistake: str) -> bool:
        return rounds_to(weight, reference(dtype, name, step + 1, mistake)[key])

    if torch.equal(weight, Model(dtype).trained()[key].detach()):
        return "no element has changed: after the optimizer's step, copy the masters' values " \
               "back into the parameters"
    if is_like("anew"):
        return "small updates are lost, because the master is recreated from the 16-bit weight " \
               "in every step. Make it once"
    if is_like("stale"):
        return "this parameter had no gradient in this step, but the master still has that of an " \
               "earlier step. Set it to None"
    if is_like("none"):
        return "its gradient was zeros, not None: the optimizer takes its step, and momentum and " \
               "weight decay move the weights. Check whether .grad is None, not whether it is zero"
    if is_like("zeros"):
        return "this parameter had no gradient: leave the master's at None. With zeros the " \
               "optimizer still applies momentum and weight decay"
    master = reference(dtype, name, step + 1)[key]
    if bool(((weight.float() - master).abs() <= master.abs() * torch.finfo(dtype).eps).all()):
        return "off by less than one unit, but not the nearest: copy_ and .to(dtype) round to " \
               "nearest"
    return "gradients go to the masters as float32, the optimizer updates them, and each " \
           "parameter gets its own master's value, rounded"


def weigh(MasterStep: type) -> tuple[float, float]:
    """Bytes for each parameter after a step: of tensors, and of other Python objects."""
    with Held() as held:
        layers = (nn.Linear(SQUARE, SQUARE, bias=False) for _ in range(NUM_SQUARES))
        model = nn.Sequential(*layers).bfloat16()
        masters = MasterStep(model, OPTIMIZERS["AdamW"])
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            masters.step()
        gc.collect()
        num = sum(parameter.numel() for parameter in model.parameters())
        return held.now() / num, python_bytes(masters) / num


def _expect_little(of_tensors: float, of_objects: float) -> None:
    expect(of_tensors < MOST_BYTES, seen=f"{of_tensors:.1f} bytes for each parameter after a "
           f"step, where {BYTES} are enough",
           likely="the masters' gradients are kept (4 bytes), the parameters' own (2), or one more "
                  "copy of the weights (2 or 4)")
    expect(of_objects < MOST_BYTES - BYTES, seen=f"in addition to the tensors, {of_objects:.1f} "
           "bytes of NumPy arrays or other Python objects for each parameter are held after a step",
           likely="a copy in NumPy, bytes or a list takes memory too: parameter, master and the "
                  "optimizer's moments are all that is needed")
