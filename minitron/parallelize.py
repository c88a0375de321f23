"""In which order a model is cut and its training state divided: the only file that knows all of it.

    tensor parallelism     first: what follows sees the layers that this rank computes
    sequence parallelism   is tensor parallelism with other collectives
    recomputation          replays calls with their collectives: hooks of what follows stay outside
    data parallelism       plain, or with the state divided over the ranks (ZeRO, stages 1 to 3)

Read in this order: build, parallelize.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from minitron.comm.mesh import make_mesh
from minitron.config import Config
from minitron.model.recompute import RECOMPUTE_POLICIES
from minitron.model.transformer import Transformer, fill, initial_value, materialise
from minitron.parallel.combined import Combined
from minitron.parallel.data_parallel import (
    DataParallel,
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.parallel.fsdp import FullyShardedDataParallel, apply_fsdp
from minitron.parallel.sequence_parallel import apply_sequence_parallel
from minitron.parallel.tensor_parallel import apply_tensor_parallel
from minitron.parallel.zero import apply_zero1, apply_zero2


def build(
    config: Config, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Transformer, Combined | None]:
    """A model with its initial weights, cut as `config` says, and what a step asks.

    No rank ever holds more than its parts and one whole parameter; in stage 3, and a unit.
    """
    value = partial(initial_value, seed=config.train.seed, num_layers=config.model.num_layers)
    with torch.device(device if group is None else "meta"):
        model = Transformer(config.model)
    if group is None:
        RECOMPUTE_POLICIES[config.train.recompute](model)
        fill(model, value)
        return model, None

    parallel = parallelize(model, group, config, device)
    parallel.fill(value)
    return model, parallel


def parallelize(
    model: nn.Module, group: dist.ProcessGroup, config: Config, device: torch.device
) -> Combined:
    """Change `model` as `config` says, over the ranks of `group`; returns what a step asks.

    `device` is where a model on the meta device shall train: its weights are NaN until `fill`.
    """
    tp = config.parallel.tp
    tensor = None
    if tp > 1:
        mesh = make_mesh(device.type, dp=group.size() // tp, tp=tp)
        group = mesh.group("dp")
        apply = apply_sequence_parallel if config.parallel.sequence else apply_tensor_parallel
        tensor = apply(model, mesh.group("tp"))

    RECOMPUTE_POLICIES[config.train.recompute](model)
    return Combined(model, apply_data_parallel(model, group, config, device), tensor)


def apply_data_parallel(
    model: nn.Module, group: dist.ProcessGroup, config: Config, device: torch.device
) -> DataParallel | FullyShardedDataParallel:
    """Divide the samples over `group`, and what the stage of ZeRO says."""
    parallel = config.parallel
    when = {"sync_every_micro_batch": parallel.sync_every_micro_batch}
    if parallel.zero == 3:
        dtype = torch.bfloat16 if config.train.precision == "bf16" else None
        return apply_fsdp(model, group, compute_dtype=dtype, device=device, **when)
    materialise(model, device)
    if parallel.zero == 2:
        return apply_zero2(model, group, **when)
    if parallel.zero == 1:
        return apply_zero1(model, group)
    versions = {
        "naive": apply_naive_data_parallel,
        "hooked": apply_hooked_data_parallel,
        "bucketed": apply_bucketed_data_parallel,
    }
    return versions[parallel.data_parallel](model, group)
