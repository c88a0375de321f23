"""What must fit together before a run begins: its layout, ranks, model and batch.

What cannot work is refused, with the nearest layouts that do. What works
slowly is not: fewer micro-batches than stages leave ranks idle, and a run says for how long.

Read in this order: require_ranks, require_layout, layouts_that_fit.
"""

from dataclasses import replace
from math import ceil, isqrt, log

from minitron.config.schema import Config, ModelConfig, ParallelConfig
from minitron.system.errors import ConfigError, require

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
    """Return how many of the ranks read samples of their own."""
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
    """Raise ConfigError unless a rank's `num_sequences` make what a schedule with chunks needs."""
    parallel, size = config.parallel, config.train.micro_batch_size
    pp, needs_groups = parallel.pp, parallel.chunks > 1 and parallel.schedule != "gpipe"
    if not needs_groups or ceil(num_sequences / size) % pp == 0:
        return
    near = range(max(1, size - NUM_TRIED), min(num_sequences, size + NUM_TRIED) + 1)
    fitting = [other for other in {*near, ceil(num_sequences / pp)}
               if ceil(num_sequences / other) % pp == 0]
    nearest = sorted(fitting, key=lambda other: abs(other - size))[:NUM_OFFERED]
    remedy = f"set train.micro_batch_size to {' or '.join(map(str, nearest))}" if nearest else \
        f"raise train.global_batch_size, of which a rank has {num_sequences}"
    problem = f"{ceil(num_sequences / size)} micro-batches a step (train.micro_batch_size = " \
        f"{size}) do not divide by parallel.pp = {pp} ({parallel.schedule})"
    raise ConfigError(problem, remedy, field="train.micro_batch_size",
                      kind="micro-batches that pp does not divide")


# What would fit


def layouts_that_fit(config: Config, size: int) -> list[tuple[int, int, int]]:
    """Return every (dp, tp, pp) of `size` ranks that suits the rest of `config`, nearest first.

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
    """Return the divisors of `number`, from 1 to `number`."""
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
    """Return the options that give this layout to a command line that asks for `asked`."""
    changes = [f"--parallel.{axis} {ranks}" for axis, ranks in (("tp", tp), ("pp", pp))
               if ranks != getattr(asked, axis)]
    return " ".join([*changes, f"--parallel.dp {dp}" if asked.dp else f"(dp {dp})"])
