"""What must fit together before a run begins: its layout, ranks, data, and what it continues.

What cannot work is refused, with the nearest layouts that do. What works
slowly is not: fewer micro-batches than stages leave ranks idle, and a run says for how long.

Read in this order: require_ranks, require_layout, layouts_that_fit; require_same_training.
"""

from dataclasses import replace
from math import ceil, inf, isqrt, log
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Size, dtype

from minitron.checkpoint.manifest import MANIFEST
from minitron.comm.agreement import Group
from minitron.config import Config, ConfigError, ModelConfig, ParallelConfig, require
from minitron.config.file import from_dict, to_dict
from minitron.corpus.folder import read_corpus_info
from minitron.precision import PRECISIONS

NUM_OFFERED = 2  # layouts in a message
NUM_TRIED = 1000  # sizes of a micro-batch, to both sides, that are tried for a remedy


def require_ranks(config: Config, size: int) -> None:
    """Raise ConfigError, with the nearest layouts that fit, if `size` ranks cannot run `config`."""
    try:
        require_layout(config, size)
    except ConfigError as error:
        nearest = layouts_that_fit(config, size)[:NUM_OFFERED]
        words = " or ".join(flags(config.parallel, *layout) for layout in nearest)
        error.remedies += (f"with {counted(size)} {words} would do",) * bool(nearest)
        raise


class WrongNumRanks(ConfigError):
    """A layout that needs another number of ranks: `needed`, such as "a multiple of 8"."""

    def __init__(self, problem: str, needed: str, start: str):
        super().__init__(problem, start, kind="wrong number of ranks")
        self.args = problem, needed, start  # with which pickle makes it again
        self.needed = needed


def require_layout(config: Config, size: int) -> None:
    """Raise ConfigError for the first of what does not fit: ranks, model, batch, micro-batches."""
    dp, tp, pp = config.parallel.dp, config.parallel.tp, config.parallel.pp
    there = f"there {'is' if size == 1 else 'are'} {counted(size)}"
    model = " and ".join(f"parallel.{axis} = {ranks}" for axis, ranks in (("tp", tp), ("pp", pp))
                         if ranks > 1)
    if size % (tp * pp):
        needed = f"a multiple of {tp * pp}"
        raise WrongNumRanks(f"{model}, but {there}", needed,
                            f"start {needed} with torchrun --nproc-per-node")
    require_cuts(config.model, tp)
    readers = num_readers(config, size)
    if dp not in (0, readers):
        needed = str(dp * tp * pp)
        raise WrongNumRanks(
            f"parallel.dp = {dp}{' and ' if model else ''}{model}, but {there}", needed,
            f"start it with torchrun --nproc-per-node {needed} -m minitron.train")
    batch_size = config.train.global_batch_size
    require(
        batch_size >= readers,
        f"train.global_batch_size = {batch_size} leaves some of {readers} ranks without a "
        "sequence", f"raise it to {readers}, or start fewer ranks",
        field="train.global_batch_size", kind="fewer sequences than ranks",
    )
    require_groups(config, ceil(batch_size / readers))


def counted(size: int) -> str:
    return f"{size} rank{'' if size == 1 else 's'}"


def num_readers(config: Config, size: int) -> int:
    """How many of the ranks read samples of their own."""
    return size // (config.parallel.tp * config.parallel.pp)


def require_cuts(model: ModelConfig, tp: int) -> None:
    """Raise ConfigError for layers that `tp` ranks cannot divide evenly.

    A vocabulary of 0 is not known yet. If there are fewer key-value heads than ranks, each is on
    several of them.
    """
    for name in ("num_heads", "num_kv_heads", "ffn_width", "vocab_size"):
        count = getattr(model, name)
        is_copied = name == "num_kv_heads" and tp % count == 0
        require(
            is_copied or count % tp == 0,
            f"model.{name} = {count} does not divide by {tp} ranks (parallel.tp), "
            f"{ceil(count / tp) * tp} would",
            field=f"model.{name}", kind=f"tp does not divide model.{name}",
        )


def require_groups(config: Config, num_sequences: int) -> None:
    """Raise ConfigError unless a rank's `num_sequences` make what an interleaved schedule needs."""
    size, pp = config.train.micro_batch_size, config.parallel.pp
    if config.parallel.schedule != "interleaved" or ceil(num_sequences / size) % pp == 0:
        return
    near = range(max(1, size - NUM_TRIED), min(num_sequences, size + NUM_TRIED) + 1)
    fitting = [other for other in {*near, ceil(num_sequences / pp)}
               if ceil(num_sequences / other) % pp == 0]
    nearest = sorted(fitting, key=lambda other: abs(other - size))[:NUM_OFFERED]
    remedy = f"set train.micro_batch_size to {' or '.join(map(str, nearest))}" if nearest else \
        f"raise train.global_batch_size, of which a rank has {num_sequences}"
    raise ConfigError(f"{ceil(num_sequences / size)} micro-batches a step (train.micro_batch_size "
                      f"= {size}) do not divide by parallel.pp = {pp} (interleaved)", remedy,
                      field="train.micro_batch_size", kind="micro-batches that pp does not divide")


def require_validation(num_sequences: int, readers: int) -> None:
    require(num_sequences >= readers, f"{num_sequences} validation sequences for {readers} "
            "data-parallel ranks: each needs one",
            f"raise train.eval_sequences to {readers} or more", field="train.eval_sequences")


# What would fit


def layouts_that_fit(config: Config, size: int) -> list[tuple[int, int, int]]:
    """Every (dp, tp, pp) of `size` ranks that suits all else in `config`, the nearest one first.

    Near is what changes tp and pp by small factors.
    """
    asked = config.parallel
    layouts = [(size // (tp * pp), tp, pp)
               for tp in divisors(size) for pp in divisors(size // tp)]

    def distance(layout: tuple[int, int, int]) -> float:
        _, tp, pp = layout
        return abs(log(tp / asked.tp)) + abs(log(pp / asked.pp))

    return sorted((layout for layout in layouts if fits(config, *layout)), key=distance)


def divisors(number: int) -> list[int]:
    """From 1 to `number`."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def fits(config: Config, dp: int, tp: int, pp: int) -> bool:
    try:
        parallel = replace(config.parallel, dp=dp, tp=tp, pp=pp)
        require_layout(replace(config, parallel=parallel), dp * tp * pp)
    except ConfigError:
        return False
    return True


def flags(asked: ParallelConfig, dp: int, tp: int, pp: int) -> str:
    """What to add to a command line that asks for `asked` to have this layout."""
    changes = [f"--parallel.{axis} {ranks}" for axis, ranks in (("tp", tp), ("pp", pp))
               if ranks != getattr(asked, axis)]
    return " ".join([*changes, f"--parallel.dp {dp}" if asked.dp else f"(dp {dp})"])


def require_a_gpu_each(device: torch.device, group: Group) -> None:
    """Raise ConfigError if ranks would share a GPU: they have joined without NCCL then."""
    if device.type == "cuda" and group is not None:
        num_devices = torch.cuda.device_count()
        require(
            "cuda:nccl" in dist.get_backend_config(group),
            f"{group.size()} ranks without a GPU each, of which this machine has {num_devices}",
            f"start torchrun with --nproc-per-node {num_devices}, or set train.device to cpu",
        )


def with_vocabulary_of_data(config: Config) -> Config:
    """Fill in `model.vocab_size` from the data, or check that the data's tokens fit in it."""
    data_size = read_corpus_info(config.data.path)["vocab_size"]
    model_size = config.model.vocab_size
    require(
        model_size == 0 or model_size >= data_size,
        f"model.vocab_size = {model_size} is smaller than the {data_size} tokens of "
        f"{config.data.path}", f"set it to 0 or to at least {data_size}", field="model.vocab_size",
    )
    if model_size > 0:
        return config
    return replace(config, model=replace(config.model, vocab_size=data_size))


MAY_CHANGE = {"steps", "log_every", "eval_every", "eval_sequences", "checkpoint_every",
              "keep_checkpoints", "async_checkpoint", "hang_timeout", "device", "recompute",
              "micro_batch_size", "compile"}
"""Fields of TrainConfig that a resumed run may be given anew, as it may be another layout: every
step is the same but for the order of its sums."""


def read_facts(facts: dict, where: Path) -> dict:
    """What a checkpoint says of its run, checked, for others may have written it.

    Raises ConfigError for anything that `Run.save` would not write.
    """
    scale = {"value": float, "good_steps": int, "skipped": int}
    match facts:
        case {
            "step": int(step), "position": int(position), "num_ranks": int(num_ranks),
            "config": dict(tables), "fingerprint": str(), "loss_scale": None | dict() as loss_scale,
        }:
            config = to_dict(from_dict(tables, where=str(where)))
            is_sound = min(step, position, num_ranks) >= 0 and position < 2**62
            if loss_scale is not None:
                types = {name: type(value) for name, value in loss_scale.items()}
                is_sound &= types == scale and 0 < loss_scale["value"] < inf
        case _:
            is_sound = False
    require(is_sound, f"{where}: its {MANIFEST} does not say what a run would have written",
            "resume from another checkpoint")
    precision = config["train"]["precision"]
    require((loss_scale is not None) == PRECISIONS[precision].scales_loss, f"{where}: its "
            f"{MANIFEST} has a loss scale that does not fit train.precision = {precision}",
            "resume from another checkpoint")
    return facts | {"config": config}


def require_whole_state(saved: dict[str, tuple[Size, dtype]], where: Path) -> None:
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
                "resume from another checkpoint",
            )


def require_same_training(facts: dict, config: Config, folder: Path, fingerprint: str) -> None:
    """Raise ConfigError if the run would not continue what the checkpoint's `facts` tell of."""
    saved, asked = facts["config"], to_dict(config)
    fixed = [("model", key) for key in saved["model"]] + [("data", "sequence_length")]
    fixed += [("train", key) for key in saved["train"] if key not in MAY_CHANGE]
    for section, key in fixed:
        before, now = saved[section][key], asked[section][key]
        require(
            before == now,
            f"{section}.{key} = {now}, but {folder} was trained with {before}",
            f"set it to {before}, or start a new run without --resume", field=f"{section}.{key}",
        )
    require(
        facts["fingerprint"] in (fingerprint, fingerprint[:64]),  # an old run's is the first half
        f"{config.data.path}: holds other tokens than {folder} was trained on",
        "write the same corpus again, or start a new run without --resume", field="data.path",
    )
    require(
        facts["step"] <= config.train.steps,
        f"train.steps = {config.train.steps}, but {folder} is at step {facts['step']}",
        "ask for more steps", field="train.steps",
    )
