"""In which order a model is cut and its training state divided: the only file that knows all of it.

    recomputation      first: it replaces how blocks are run, and what follows hooks onto blocks
    data parallelism   plain, or with the state divided over the ranks (ZeRO, stages 1 to 3)

Read in this order: parallelize, whole_state, load_whole_state.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minitron.config import Config
from minitron.model.recompute import RECOMPUTE_POLICIES
from minitron.parallel.data_parallel import (
    DataParallel,
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.parallel.fsdp import FullyShardedDataParallel, apply_fsdp
from minitron.parallel.zero import Zero1, apply_zero1, apply_zero2

Sharded = Zero1 | FullyShardedDataParallel


def parallelize(
    model: nn.Module, group: dist.ProcessGroup | None, config: Config
) -> DataParallel | FullyShardedDataParallel | None:
    """Change `model` as `config` says; returns what a step asks, None in a run of one process."""
    RECOMPUTE_POLICIES[config.train.recompute](model)
    if group is None:
        return None

    parallel = config.parallel
    if parallel.zero == 3:
        dtype = torch.bfloat16 if config.train.precision == "bf16" else None
        return apply_fsdp(model, group, compute_dtype=dtype)
    if parallel.zero > 0:
        return {1: apply_zero1, 2: apply_zero2}[parallel.zero](model, group)
    versions = {
        "naive": apply_naive_data_parallel,
        "hooked": apply_hooked_data_parallel,
        "bucketed": apply_bucketed_data_parallel,
    }
    return versions[parallel.data_parallel](model, group)


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, data_parallel
) -> tuple[dict[str, Tensor], dict]:
    """Weights by name and the optimizer's state, whole, whatever the layout.

    Every rank must call it.
    """
    if isinstance(data_parallel, FullyShardedDataParallel):
        weights = data_parallel.full_parameters()
    else:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if isinstance(data_parallel, Sharded):
        return weights, data_parallel.optimizer_state()
    return weights, optimizer.state_dict()


@torch.no_grad()
def load_whole_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_parallel,
    weights: dict[str, Tensor],
    state: dict,
) -> None:
    """Take what this rank holds of a whole state; every rank must call it."""
    if isinstance(data_parallel, FullyShardedDataParallel):
        data_parallel.fill(lambda name, shape: weights[name])
    else:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    if isinstance(data_parallel, Sharded):
        data_parallel.load_optimizer_state(state)
    else:
        optimizer.load_state_dict(state)
