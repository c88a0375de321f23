"""A sharded state is saved whole, and continues on any number of ranks."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from minitron.comm.launch import run
from minitron.measure.oracle import small_gpt
from minitron.parallel.fsdp import apply_fsdp
from minitron.parallel.zero import apply_zero1, apply_zero2

SMALL = 6000  # bytes: several buckets in a small model


def train(model, parallel, optimizer, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(29, (6, 7), generator=generator)
        if parallel is None:
            (model(tokens)**2).mean().backward()
        else:
            rank, size = parallel.group.rank(), parallel.group.size()
            (model(tokens[rank::size])**2).mean().backward()
            parallel.finish()
        optimizer.step()
        optimizer.zero_grad()


def start(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() >= 2]},
    ]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-6, weight_decay=0.1, amsgrad=True)


def save_after_two_steps(group):
    torch.manual_seed(0)
    model = small_gpt().double()
    parallel = apply_zero2(model, group, SMALL)
    optimizer = parallel.shard(start(model))
    train(model, parallel, optimizer, (0, 1))
    return model.state_dict(), parallel.optimizer_state()


def continue_sharded(group, saved, apply):
    model = small_gpt().double()
    parallel = apply(model, group)
    optimizer = parallel.shard(start(model))
    model.load_state_dict(saved[0])
    parallel.load_optimizer_state(saved[1])
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1]
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    train(model, parallel, optimizer, (2, 3))
    assert {float(state["step"]) for state in saved[1]["state"].values()} == {2.0}  # untouched
    return model.state_dict()


def test_a_state_continues_on_another_number_of_ranks_and_on_one_process():
    torch.manual_seed(0)
    model = small_gpt().double()
    optimizer = start(model)
    train(model, None, optimizer, (0, 1))
    in_the_middle = deepcopy(optimizer.state_dict())
    train(model, None, optimizer, (2, 3))
    expected = model.state_dict()

    saved, *others = run(save_after_two_steps, 3)
    for other in others:
        torch.testing.assert_close(other, saved, rtol=0, atol=0)
    torch.testing.assert_close(
        saved[1]["state"], in_the_middle["state"], rtol=1e-9, atol=1e-15, check_dtype=True)
    assert [g["params"] for g in saved[1]["param_groups"]] == [
        g["params"] for g in in_the_middle["param_groups"]]

    plain = small_gpt().double()
    plain.load_state_dict(saved[0])
    optimizer = start(plain)
    optimizer.load_state_dict(deepcopy(saved[1]))
    train(plain, None, optimizer, (2, 3))
    continued = [plain.state_dict(), *run(continue_sharded, 2, saved, apply_zero1)]
    for state in continued:
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-12)


# 16 bits


def low_precision_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(59, 61), nn.Linear(61, 59), nn.Linear(59, 3)).bfloat16()
    model[1].weight.requires_grad_(False)
    return model, torch.linspace(-1, 1, 59, dtype=torch.bfloat16)[None]


def train_low_precision(group, saved=None):
    """Three steps; all ranks read the same, so that their mean is exact."""
    model, x = low_precision_model()
    parallel = apply_zero2(model, group, SMALL)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=1e-4))
    if saved is not None:
        model.load_state_dict(saved[0])
        parallel.load_optimizer_state(saved[1])
    for _ in range(3):
        model(x).sum().backward()
        parallel.finish()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), parallel.optimizer_state()


def test_16_bit_parameters_have_master_weights_that_are_saved():
    model, x = low_precision_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float() for p in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for _ in range(6):
        model(x).sum().backward()
        for p, master in zip(trained, masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        for p, master in zip(trained, masters, strict=True):
            p.data.copy_(master)

    saved, *_ = run(train_low_precision, 4)
    for size in (1, 2):
        for weights, state in run(train_low_precision, size, saved):
            assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
            for number, master in enumerate(masters):
                assert torch.equal(state["state"][number]["master"], master)
                assert torch.equal(
                    state["state"][number]["exp_avg"], optimizer.state[master]["exp_avg"])


def load_into_float32(group, saved, apply):
    """The weights that rank 0 and this rank compute with, and what the state then has."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.blocks = low_precision_model()[0].float()
    model.forward = model.blocks.forward
    parallel = apply(model, group)
    parallel.make_optimizer(partial(torch.optim.AdamW, lr=1e-4))
    weights = {f"blocks.{name}": value.float() for name, value in saved[0].items()}
    if apply is apply_fsdp:
        parallel.fill(lambda name, shape: weights[name])
    else:
        model.load_state_dict(weights)
    parallel.load_optimizer_state(saved[1])
    if apply is not apply_fsdp:
        return dict(model.named_parameters()), parallel.optimizer_state()
    return parallel.full_parameters(), parallel.optimizer_state()


@pytest.mark.parametrize("apply", [apply_zero1, apply_fsdp])
def test_a_state_of_16_bit_parameters_continues_in_float32(apply):
    """The master weights become the weights, on every rank, and stay no state of their own."""
    saved, *_ = run(train_low_precision, 2)
    names = [f"blocks.{n}" for n, p in low_precision_model()[0].named_parameters()
             if p.requires_grad]
    for weights, state in run(load_into_float32, 2, saved, apply):
        for number, name in enumerate(names):
            values = saved[1]["state"][number]
            assert torch.equal(weights[name], values["master"])
            assert torch.equal(state["state"][number]["exp_avg"], values["exp_avg"])
            assert "master" not in state["state"][number]
