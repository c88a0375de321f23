"""In which order a model is cut and its training state divided: the only file that knows all of it.

    precision              first: what is cut, sent and divided has its dtype
    context parallelism    replaces the attention function, which what follows wraps
    tensor parallelism     then: what follows sees the layers that this rank computes
    sequence parallelism   is tensor parallelism with other collectives
    recomputation          repeats calls with their collectives: hooks of what follows stay outside
    pipeline parallelism   leaves a rank its stages: only these have a state to divide
    data parallelism       plain, or with the state divided over the ranks (ZeRO, stages 1 to 3);
                           over those of context parallelism too, which have other tokens
    compilation            last, by `Run`: it sees what a step calls; no layer may be cut then

Read in this order: lay_out, build, parallelize.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.mesh import Mesh, OneRankMesh, make_mesh
from minitron.config import Config, ParallelConfig, require
from minitron.model.recompute import RECOMPUTE_POLICIES
from minitron.model.transformer import Transformer, initial_value, materialize
from minitron.parallel.context.axis import apply_context_parallel
from minitron.parallel.context.chunks import contiguous
from minitron.parallel.context.gather import gathered_attention
from minitron.parallel.context.ulysses import ulysses_attention
from minitron.parallel.data.ddp import apply_bucketed_data_parallel
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.grid import Grid
from minitron.parallel.interface import ParallelModel
from minitron.parallel.one_device import OneDevice
from minitron.parallel.pipeline.schedules import (
    Schedule,
    breadth_first,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from minitron.parallel.pipeline.stages import apply_pipeline_parallel
from minitron.parallel.pipeline.v_schedules import dualpipe_v, zb_v
from minitron.parallel.tensor.layers import apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel
from minitron.precision import (
    PRECISIONS,
    MasterWeights,
    apply_precision,
    set_grad_dtype,
)


def lay_out(parallel: ParallelConfig, num_ranks: int, device: torch.device) -> Mesh | OneRankMesh:
    """Lay the ranks out as a grid; neighbors communicate most: tensor-parallel ones.

    Stages, which communicate least, are furthest from each other: on other nodes, if there are any.
    """
    if num_ranks == 1:
        return OneRankMesh()
    dp, replicas = num_ranks // (parallel.pp * parallel.cp * parallel.tp), parallel.replicas
    require(
        dp % replicas == 0,
        f"parallel.replicas = {replicas} does not divide {dp} data-parallel ranks",
        "use a divisor of them",
    )
    sizes = {
        "pp": parallel.pp,
        "replicas": replicas,
        "dp": dp // replicas,
        "cp": parallel.cp,
        "tp": parallel.tp,
    }
    present = {
        axis: size for axis, size in sizes.items() if size > 1 or axis not in ("replicas", "cp")
    }
    return make_mesh(device.type, **present)


def build(
    config: Config, mesh: Mesh | OneRankMesh, device: torch.device
) -> tuple[Transformer, ParallelModel]:
    """Build a model with its initial weights, divided as `config` says, and its `ParallelModel`.

    No rank ever holds more than its parts and one full parameter; in stage 3, and a unit.
    """
    with torch.device("meta"):
        model = Transformer(config.model)
    parallel = parallelize(model, mesh, config, device)
    parallel.fill(
        partial(initial_value, seed=config.train.seed, num_layers=config.model.num_layers)
    )
    return model, parallel


def parallelize(
    model: nn.Module, mesh: Mesh | OneRankMesh, config: Config, device: torch.device
) -> ParallelModel:
    """Change `model` as `config` says; returns what a step asks.

    `device` is where a model on the meta device shall train: its weights are NaN until `fill`.
    """
    if mesh.num_ranks == 1:  # which has nothing to share out
        config = replace(config, parallel=ParallelConfig())
    precision, zero = PRECISIONS[config.train.precision], config.parallel.zero
    axes: dict[str, ParallelModel] = {}
    apply_precision(model, precision, is_sharded=zero == 3)
    if config.parallel.cp > 1:
        axes["context"] = CONTEXTS[config.parallel.context](model, mesh.group("cp"))
    if mesh.size("tp") > 1:
        apply = apply_sequence_parallel if config.parallel.sequence else apply_tensor_parallel
        axes["tensor"] = apply(model, mesh.group("tp"))
    RECOMPUTE_POLICIES[config.train.recompute](model)
    if mesh.size("pp") > 1:
        axes["pipeline"] = apply_pipeline_parallel(
            model,
            mesh.group("pp"),
            make_schedule(config.parallel),
            sequence_parts=config.parallel.tp if config.parallel.sequence else 1,
            autocast=precision.activations if precision.autocasts else None,
        )
    data = apply_data_parallel(model, mesh, config, device, axes.get("pipeline"))
    if precision.master is not None and zero == 0:
        return Grid(model, MasterWeights(model), data=data, **axes)
    if mesh.num_ranks == 1:
        return data
    return Grid(model, data=data, **axes)


CONTEXTS = {
    "ring": apply_context_parallel,
    "all-gather": partial(apply_context_parallel, attention=gathered_attention),
    "ulysses": partial(apply_context_parallel, attention=ulysses_attention, chunks_of=contiguous),
}


def make_schedule(parallel: ParallelConfig) -> Callable[[int, int], Schedule]:
    """Return the function of p ranks and m micro-batches that makes the schedule."""
    schedules = {
        "gpipe": gpipe
        if parallel.chunks == 1
        else partial(breadth_first, num_chunks=parallel.chunks),
        "1f1b": one_forward_one_backward,
        "interleaved": partial(interleaved, num_chunks=parallel.chunks),
        "zero-bubble": partial(zero_bubble, num_chunks=parallel.chunks),
        "zb-v": zb_v,
        "dualpipe-v": dualpipe_v,
    }
    return schedules[parallel.schedule]


def apply_data_parallel(
    model: nn.Module,
    mesh: Mesh,
    config: Config,
    device: torch.device,
    pipeline: ParallelModel | None,
) -> ParallelModel:
    """Divide the samples over the ranks, and what the stage of ZeRO says."""
    parallel = config.parallel
    group = mesh.group("dp") if parallel.cp == 1 else mesh.joined_group("dp", "cp")
    precision = PRECISIONS[config.train.precision]
    replicas = mesh.group("replicas") if parallel.replicas > 1 else SINGLE_RANK
    common = {"pipeline": pipeline, "replicas": replicas}
    when = {
        "sync_every_micro_batch": parallel.sync_every_micro_batch,
        "sync_replicas_every_micro_batch": parallel.sync_replicas_every_micro_batch,
    }
    if parallel.zero == 3:
        dtypes = {"compute_dtype": precision.activations, "reduce_dtype": precision.reduction}
        if config.train.precision == "fp32":
            dtypes = {}  # those that the model has
        sharded = apply_fsdp(
            model,
            group,
            device=device,
            **dtypes,
            **common,
            **when,
            reshard_each_pass=parallel.reshard_each_pass,
        )
        if precision.gradients != precision.activations:
            set_grad_dtype(model, precision.gradients)
        return sharded
    materialize(model, device)
    if precision.master is not None:
        set_grad_dtype(model, precision.gradients)
    if mesh.num_ranks == 1:
        return OneDevice(model)
    late = {"overlap_gather": parallel.overlap_gather}
    if parallel.zero == 2:
        return apply_zero2(model, group, **common, **when, **late)
    if parallel.zero == 1:
        return apply_zero1(model, group, **common, **late)
    return apply_bucketed_data_parallel(model, group)
