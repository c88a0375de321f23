"""What must fit together before a run begins: its layout, the ranks there are, and the data."""

from minitron.config import Config, require


def require_ranks(config: Config, size: int) -> None:
    """Raise ConfigError if the run is not for as many ranks as there are."""
    dp, tp, pp = config.parallel.dp, config.parallel.tp, config.parallel.pp
    there = f"there {'is' if size == 1 else 'are'} {size} rank{'s' if size > 1 else ''}"
    model = " and ".join(f"parallel.{axis} = {ranks}" for axis, ranks in (("tp", tp), ("pp", pp))
                         if ranks > 1)
    require(
        size % (tp * pp) == 0,
        f"{model}, but {there}: start a multiple of {tp * pp} with torchrun --nproc-per-node, or "
        "change the layout",
    )
    readers = num_readers(config, size)
    require(
        dp in (0, readers),
        f"parallel.dp = {dp}{' and ' if model else ''}{model}, but {there}: start it with torchrun "
        f"--nproc-per-node {dp * tp * pp} -m minitron.train, or set parallel.dp to 0",
    )
    batch_size = config.train.global_batch_size
    require(
        batch_size >= readers,
        f"train.global_batch_size = {batch_size} leaves some of {readers} ranks without a "
        f"sequence: raise it to {readers}, or start fewer ranks",
    )


def num_readers(config: Config, size: int) -> int:
    """How many of the ranks read samples of their own."""
    return size // (config.parallel.tp * config.parallel.pp)


def require_micro_batches(config: Config, m: int) -> None:
    pp, size = config.parallel.pp, config.train.micro_batch_size
    require(config.parallel.schedule != "interleaved" or m % pp == 0, f"{m} micro-batches a step "
            f"(train.micro_batch_size = {size}) do not divide by parallel.pp = {pp}: choose a size "
            "that makes a multiple of it")


def require_validation(num_sequences: int, readers: int) -> None:
    require(num_sequences >= readers, f"{num_sequences} validation sequences for {readers} "
            f"data-parallel ranks: each needs one; raise train.eval_sequences to {readers} or more")
