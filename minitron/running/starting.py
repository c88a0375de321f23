"""What must hold as a run starts or goes on: its GPUs, its data, and the checkpoint it continues.

Read in this order: require_a_gpu_each, with_vocabulary_of_data, require_same_training.
"""

from dataclasses import replace
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Size, dtype

from minitron.checkpoint.manifest import MANIFEST
from minitron.comm.agreement import Group
from minitron.config import Config, require
from minitron.config.file import from_dict, to_dict
from minitron.corpus.folder import read_corpus_info
from minitron.precision import PRECISIONS


def require_validation(num_sequences: int, readers: int) -> None:
    require(
        num_sequences >= readers,
        f"{num_sequences} validation sequences for {readers} data-parallel ranks: each needs one",
        f"raise train.eval_sequences to {readers} or more; if it is, write more validation tokens",
        field="train.eval_sequences",
    )


def require_a_gpu_each(device: torch.device, group: Group) -> None:
    """Raise ConfigError if ranks would share a GPU: they have joined without NCCL then."""
    if device.type == "cuda" and group.size() > 1:
        num_devices = torch.cuda.device_count()
        require(
            "cuda:nccl" in dist.get_backend_config(group),
            f"{group.size()} ranks, but this machine has {num_devices} "
            f"GPU{'s' * (num_devices != 1)}",
            f"start torchrun with --nproc-per-node {num_devices}, or set train.device to cpu",
        )


def with_vocabulary_of_data(config: Config) -> Config:
    """Fill in `model.vocab_size` from the data, or check that the data's tokens fit in it."""
    data_size = read_corpus_info(config.data.path)["vocab_size"]
    model_size = config.model.vocab_size
    require(
        model_size == 0 or model_size >= data_size,
        f"model.vocab_size = {model_size} is smaller than the {data_size} tokens of "
        f"{config.data.path}",
        f"set it to 0 or to at least {data_size}",
        field="model.vocab_size",
    )
    if model_size > 0:
        return config
    return replace(config, model=replace(config.model, vocab_size=data_size))


MAY_CHANGE = {
    "steps",
    "log_every",
    "eval_every",
    "eval_sequences",
    "checkpoint_every",
    "keep_checkpoints",
    "async_checkpoint",
    "hang_timeout",
    "device",
    "recompute",
    "micro_batch_size",
    "compile",
}
"""Fields of TrainConfig that a resumed run may be given anew, as it may be another layout: every
step is the same but for the order of its sums, and for the learning rate if `steps` is another."""
OF_SCHEDULE = {"learning_rate", "min_learning_rate", "warmup_steps", "continuation"}
"""Fields that may change, with `steps`, where `train.continuation` says how: `schedule.resumed`."""


NEVER = {"start": 0, "last_rate": 0.0}
"""When, and after which rate, the schedule of a run was continued that never was."""


def read_facts(facts: dict, where: Path) -> dict:
    """Return what a checkpoint says of its run, checked, since others may have written it.

    Raises ConfigError for anything that `Run.save` would not write.
    """
    scale = {"value": float, "good_steps": int, "skipped": int}
    match facts:
        case {
            "step": int(step),
            "position": int(position),
            "num_ranks": int(num_ranks),
            "config": dict(tables),
            "fingerprint": str(),
            "loss_scale": None | dict() as loss_scale,
        }:
            config = to_dict(from_dict(tables, where=str(where)))
            is_sound = min(step, position, num_ranks) >= 0 and position < 2**62
            continued = facts.get("continued", NEVER)  # an old run's facts do not say
            is_sound &= is_continuation(continued, step, config["train"]["steps"])
            if loss_scale is not None:
                types = {name: type(value) for name, value in loss_scale.items()}
                is_sound &= types == scale and 0 < loss_scale["value"] < inf
        case _:
            is_sound = False
    require(
        is_sound,
        f"{where}: its {MANIFEST} was not written by a run",
        "move this checkpoint away to resume from the one before",
    )
    precision = config["train"]["precision"]
    require(
        (loss_scale is not None) == PRECISIONS[precision].scales_loss,
        f"{where}: its {MANIFEST} has a loss scale that does not fit train.precision = {precision}",
        "move this checkpoint away to resume from the one before",
    )
    return facts | {"config": config, "continued": continued}


def is_continuation(continued: object, step: int, steps: int) -> bool:
    """Return whether this can be where the schedule of a run at `step` of `steps` was continued."""
    match continued:
        case {"start": int(start), "last_rate": float(rate)} if len(continued) == 2:
            return 0 <= rate < inf and (start == 0 or 0 < start <= min(step, steps - 1))
    return False


def require_complete_state(saved: dict[str, tuple[Size, dtype]], where: Path) -> None:
    """Raise ConfigError unless a checkpoint has AdamW's state of each parameter, or of none.

    It has none while float16 has overflowed in every step.
    """
    if not any(name.startswith("optimizer.") for name in saved):
        return
    for name, (shape, _) in saved.items():
        kind, _, parameter = name.partition(".")
        for key in ("step", "exp_avg", "exp_avg_sq") if kind == "model" else ():
            found = saved.get(f"optimizer.{parameter}.{key}")
            expected = Size() if key == "step" else shape
            require(
                found is not None and found[0] == expected and found[1].is_floating_point,
                f"{where}: holds no {key} of shape {list(expected)} for {parameter}",
                "move this checkpoint away to resume from the one before",
            )


def require_same_training(facts: dict, config: Config, folder: Path, fingerprint: str) -> None:
    """Raise ConfigError if the run would not continue what the checkpoint's `facts` tell of."""
    saved, asked = facts["config"], to_dict(config)
    fixed = [("model", key) for key in saved["model"]] + [("data", "sequence_length")]
    fixed += [("train", key) for key in saved["train"] if key not in MAY_CHANGE | OF_SCHEDULE]
    for section, key in fixed:
        before, now = saved[section][key], asked[section][key]
        require(
            before == now,
            f"{section}.{key} = {now}, but {folder} was trained with {before}",
            f"set it to {before}, or start a new run without --resume",
            field=f"{section}.{key}",
        )
    require(
        facts["fingerprint"] in (fingerprint, fingerprint[:64]),  # an old run's is the first half
        f"{config.data.path}: does not hold the tokens that {folder} was trained on",
        "write the same corpus again, or start a new run without --resume",
        field="data.path",
    )
    require(
        facts["step"] <= config.train.steps,
        f"train.steps = {config.train.steps}, but {folder} is at step {facts['step']}",
        f"set train.steps to {facts['step']} or more",
        field="train.steps",
    )
