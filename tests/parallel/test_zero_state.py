"""A sharded state is saved whole, and continues on any number of ranks."""

from functools import partial

import pytest
import torch
from torch import nn

from minitron.comm.agreement import SINGLE_RANK
from minitron.launch import run
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.precision import NO_MASTERS, MasterWeights
from minitron.proof.oracle import small_gpt
from tests.parallel.saving import load, optimizer_of, saved
from tests.tiers import tiered

SMALL = 6000  # bytes: several buckets in a small model
apply_small_zero2 = partial(apply_zero2, bucket_bytes=SMALL)


def train(model, parallel, optimizer, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(29, (6, 7), generator=generator)
        rank, size = parallel.data_part
        (model(tokens[rank::size]) ** 2).mean().backward()
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


def on_one_device(model, group) -> OneDevice:
    return OneDevice(model)


def cut(model, group, apply) -> Grid:
    return Grid(model, data=apply(model, group))


def two_steps(group, apply) -> tuple[dict, dict]:
    """The state after two steps, and after two more."""
    torch.manual_seed(0)
    model = small_gpt().double()
    parallel = cut(model, group, apply)
    optimizer = parallel.shard(start(model))
    train(model, parallel, optimizer, (0, 1))
    in_the_middle = saved(parallel, optimizer, group)
    if group is SINGLE_RANK:
        for name, value in optimizer_of(model, optimizer).items():
            assert torch.equal(in_the_middle[name], value)
    train(model, parallel, optimizer, (2, 3))
    return in_the_middle, saved(parallel, optimizer, group)


def continue_sharded(group, state, apply) -> dict:
    model = small_gpt().double()
    parallel = cut(model, group, apply)
    optimizer = parallel.shard(start(model))
    load(parallel, optimizer, state)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1]
    assert {float(values["step"]) for values in optimizer.state.values() if values} == {2.0}
    train(model, parallel, optimizer, (2, 3))
    return saved(parallel, optimizer, group)


def test_a_state_continues_on_another_number_of_ranks_and_on_one_process():
    expected = two_steps(SINGLE_RANK, on_one_device)
    trainable = [p.requires_grad for p in small_gpt().parameters()]
    assert 0 < sum(trainable) < len(trainable)
    assert len(expected[0]) == len(trainable) + 4 * sum(trainable)  # amsgrad has a third moment
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12, check_dtype=True)
    state, *others = run(two_steps, 3, apply_small_zero2)
    close(dict(state[0]), dict(expected[0]))
    for other in others:
        close(other, state, rtol=0, atol=0)

    continued = [continue_sharded(SINGLE_RANK, state[0], on_one_device)]
    for apply in (apply_zero1, apply_fsdp):
        continued += run(continue_sharded, 2, state[0], apply)
    for found in continued:
        close(found, expected[1])


# 16 bits


def low_precision_model():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.blocks = nn.Sequential(nn.Linear(59, 61), nn.Linear(61, 59), nn.Linear(59, 3)).bfloat16()
    model.forward = model.blocks.forward
    model.blocks[1].weight.requires_grad_(False)
    return model, torch.linspace(-1, 1, 59, dtype=torch.bfloat16)[None]


def train_low_precision(group, apply=apply_small_zero2, state=None):
    """Three steps; all ranks read the same, so that their mean is exact."""
    model, x = low_precision_model()
    masters = MasterWeights(model) if apply is on_one_device else NO_MASTERS
    parallel = Grid(model, masters, data=apply(model, group))
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=1e-4))
    if state is not None:
        load(parallel, optimizer, state)
    for _ in range(3):
        model(x).sum().backward()
        parallel.finish()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), saved(parallel, optimizer, group)


def test_16_bit_parameters_have_master_weights_that_are_saved():
    """Six steps at once, and three on 4 ranks and three on fewer, are the same bits."""
    _, halfway = train_low_precision(SINGLE_RANK, on_one_device)
    weights, expected = train_low_precision(SINGLE_RANK, on_one_device, halfway)
    trainable = [name for name, p in weights.items() if p.requires_grad]
    assert all(expected[f"model.{name}"].dtype == torch.float32 for name in trainable)
    assert any(not torch.equal(expected[f"model.{n}"], weights[n].float()) for n in trainable)

    first = run(train_low_precision, 4)[0][1]
    for size in (1, 2):
        for found, state in run(train_low_precision, size, apply_zero1, first):
            assert all(torch.equal(found[name], p) for name, p in weights.items())
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def load_into_float32(group, state, apply):
    """The weights that this rank computes with, and what it would save."""
    model = low_precision_model()[0].float()
    parallel = cut(model, group, apply)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=1e-4))
    load(parallel, optimizer, state)
    return parallel.full_parameters(), saved(parallel, optimizer, group)


@pytest.mark.parametrize("apply", tiered([apply_fsdp, apply_zero1]))
def test_a_state_of_16_bit_parameters_continues_in_float32(apply):
    """The master weights become the weights, on every rank."""
    state = run(train_low_precision, 2)[0][1]
    for weights, again in run(load_into_float32, 2, state, apply):
        for name, weight in weights.items():
            assert torch.equal(weight, state[f"model.{name}"].float())
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], t.float()) for name, t in state.items())
