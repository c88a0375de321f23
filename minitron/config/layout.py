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
    dp, tp, cp, pp = (getattr(config.parallel, axis) for axis in ("dp", "tp", "cp", "pp"))
    together = tp * cp * pp
    there = f"there {'is' if size == 1 else 'are'} {counted(size)}"
    model = " and ".join(
        f"parallel.{axis} = {ranks}"
        for axis, ranks in (("tp", tp), ("cp", cp), ("pp", pp))
        if ranks > 1
    )
    if size % together:
        needed = f"a multiple of {together}"
        raise WrongNumRanks(
            f"{model}, but {there}",
            needed,
            f"start {together}, or a multiple of it, with torchrun --nproc-per-node {together} "
            "-m minitron.train",
        )
    require_cuts(config.model, tp)
    require_heads(config)
    readers = data_parallel_size(config, size)
    if dp not in (0, readers):
        needed = str(dp * together)
        raise WrongNumRanks(
            f"parallel.dp = {dp}{' and ' if model else ''}{model}, but {there}",
            needed,
            f"start it with torchrun --nproc-per-node {needed} -m minitron.train",
        )
    batch_size = config.train.global_batch_size
    require(
        batch_size >= readers,
        f"train.global_batch_size = {batch_size} leaves some of {readers} ranks without a sequence",
        f"raise it to {readers}, or start fewer ranks",
        field="train.global_batch_size",
        kind="fewer sequences than ranks",
    )
    require_micro_batches(config, ceil(batch_size / readers))


def counted(size: int) -> str:
    return f"{size} rank{'' if size == 1 else 's'}"


def data_parallel_size(config: Config, size: int) -> int:
    """Return how many of the ranks read samples of their own."""
    return size // (config.parallel.tp * config.parallel.cp * config.parallel.pp)


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
            f"model.{name} = {count} is not divisible by {tp} ranks (parallel.tp); "
            f"{ceil(count / tp) * tp} would be",
            field=f"model.{name}",
            kind=f"tp does not divide model.{name}",
        )


def require_heads(config: Config) -> None:
    """Raise ConfigError if Ulysses cannot divide the key-value heads that a rank has."""
    tp, cp = config.parallel.tp, config.parallel.cp
    heads = max(1, config.model.num_kv_heads // tp)
    require(
        config.parallel.context != "ulysses" or heads % cp == 0,
        f"parallel.context = ulysses: parallel.cp = {cp} does not divide a rank's key-value heads, "
        f"{heads} (model.num_kv_heads = {config.model.num_kv_heads} over parallel.tp = {tp})",
        "use ring or all-gather, or a parallel.cp that divides them",
        field="parallel.context",
        kind="cp does not divide model.num_kv_heads",
    )


def require_micro_batches(config: Config, num_sequences: int) -> None:
    """Raise ConfigError unless the schedule can run a rank's `num_sequences` of a step."""
    parallel, size = config.parallel, config.train.micro_batch_size
    pp, (fewest, divisor) = parallel.pp, parallel.micro_batch_rule

    def suits(micro_batch_size: int) -> bool:
        m = ceil(num_sequences / micro_batch_size)
        return m >= fewest and m % divisor == 0

    if suits(size):
        return
    near = range(max(1, size - NUM_TRIED), min(num_sequences, size + NUM_TRIED) + 1)
    fitting = [other for other in {*near, ceil(num_sequences / fewest)} if suits(other)]
    nearest = sorted(fitting, key=lambda other: abs(other - size))[:NUM_OFFERED]
    remedy = (
        f"set train.micro_batch_size to {' or '.join(map(str, nearest))}"
        if nearest
        else f"raise train.global_batch_size: a rank gets only {num_sequences} of its sequences"
    )
    m = ceil(num_sequences / size)
    given = f"{m} micro-batch{'es' if m > 1 else ''} a step (train.micro_batch_size = {size})"
    if m < fewest and divisor == 1:
        needs = f"{given}, but {parallel.schedule} needs {fewest} or more on parallel.pp = {pp}"
        raise ConfigError(
            needs,
            remedy,
            field="train.micro_batch_size",
            kind="too few micro-batches for the schedule",
        )
    raise ConfigError(
        f"{given} {'are' if m > 1 else 'is'} not divisible by parallel.pp = {pp} "
        f"({parallel.schedule})",
        remedy,
        field="train.micro_batch_size",
        kind="micro-batches that pp does not divide",
    )


# What would fit


def layouts_that_fit(config: Config, size: int) -> list[tuple[int, int, int]]:
    """Return every (dp, tp, pp) of `size` ranks that suits the rest of `config`, nearest first.

    Near is what changes tp and pp by small factors; cp stays.
    """
    asked = config.parallel
    groups = size // asked.cp if size % asked.cp == 0 else 0
    layouts = [
        (groups // (tp * pp), tp, pp) for tp in divisors(groups) for pp in divisors(groups // tp)
    ]

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
        require_layout(replace(config, parallel=parallel), dp * tp * pp * parallel.cp)
    except ConfigError:
        return False
    return True


def flags(asked: ParallelConfig, dp: int, tp: int, pp: int) -> str:
    """Return the options that give this layout to a command line that asks for `asked`."""
    changes = [
        f"--parallel.{axis} {ranks}"
        for axis, ranks in (("tp", tp), ("pp", pp))
        if ranks != getattr(asked, axis)
    ]
    return " ".join([*changes, f"--parallel.dp {dp}" if asked.dp else f"(dp {dp})"])
