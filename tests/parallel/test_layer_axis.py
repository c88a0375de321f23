"""Another layer axis is a class and a keyword of `Grid`; the package has never heard of this one.

Each rank computes attention for some of the heads, from all queries, keys and values: a toy, since
every rank holds and projects everything.
"""

from functools import partial

import pytest
import torch

from minitron.comm.collectives import broadcast_together
from minitron.comm.differentiable import equal_parts, start_all_gather
from minitron.comm.mesh import make_mesh
from minitron.launch import run
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.placement import Placement
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.proof.oracle import assert_same_training, small_model

HEADS = 1  # the dimension
SIZES = {"width": 16, "num_heads": 4, "num_kv_heads": 4, "ffn_width": 24, "vocab_size": 30}
make_model = partial(small_model, "gpt", **SIZES)


class OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return equal_parts(x, group.size(), HEADS)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return start_all_gather(grad.contiguous(), ctx.group, HEADS)(), None


class AllHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return start_all_gather(x.contiguous(), group, HEADS)()

    @staticmethod
    def backward(ctx, grad):
        return equal_parts(grad, ctx.group.size(), HEADS)[ctx.group.rank()], None


class SharedAttention(OneDevice):
    def __init__(self, model, group):
        super().__init__(model)
        self.group = group
        broadcast_together((p.detach() for p in model.parameters()), 0, group)
        for block in model.blocks:
            core = block.attention.attention_fn
            block.attention.attention_fn = partial(self.attend, core)

    def attend(self, core, query, key, value, dropout):
        own = (OwnHeads.apply(x, self.group) for x in (query, key, value))
        return AllHeads.apply(core(*own, dropout), self.group)

    def norm_groups(self):
        return [self.group]

    def placement(self, name):
        return Placement(copies=self.group.size())


def beside_data(model, world):
    mesh = make_mesh("cpu", dp=2, ep=2)
    toy = SharedAttention(model, mesh.group("ep"))
    return Grid(model, data=apply_fsdp(model, mesh.group("dp")), toy=toy)


def inside_tensor(model, world):
    mesh = make_mesh("cpu", ep=2, tp=2)
    tensor = apply_tensor_parallel(model, mesh.group("tp"))
    return Grid(model, tensor=tensor, toy=SharedAttention(model, mesh.group("ep")))


def in_stages(model, world):
    mesh = make_mesh("cpu", pp=2, ep=2)
    toy = SharedAttention(model, mesh.group("ep"))
    return Grid(model, toy=toy, pipeline=apply_pipeline_parallel(model, mesh.group("pp")))


@pytest.mark.parametrize("apply", [beside_data, inside_tensor, in_stages])
def test_it_is_the_same_training(apply):
    assert_same_training(apply, 4, make_model, 2, (4, 5), vocabulary=30)


def norm(world):
    model = make_model().double()
    parallel = inside_tensor(model, world)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return parallel.clip(list(model.parameters()), 1.0).item()


def test_what_several_ranks_hold_counts_once_in_the_norm():
    expected = sum(p.numel() for p in make_model().parameters()) ** 0.5
    assert run(norm, 4) == pytest.approx([expected] * 4)
