"""The command line that trains a config in another layout, on one node or on many."""

import shlex
from dataclasses import replace

from minitron.config import Config, ConfigError
from minitron.config.layout import divisors
from minitron.plan.job import Decision
from minitron.plan.search import Candidate


def launcher(best: Candidate) -> str:
    """Write what starts the training, on every node; with several, $HEAD is the name of one.

    Each has as many GPUs; where those of a node do not divide the job's, fewer are used.
    """
    job, tp = best.job, best.decision.parallel.tp
    if job.num_gpus == 1:
        return "minitron train"
    on_node = max(
        number
        for number in divisors(job.num_gpus)
        if number <= job.gpus_per_node and (number % tp == 0 or tp % number == 0)
    )
    nodes = f"--nnodes {job.num_gpus // on_node} --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 "
    return (
        f"torchrun {nodes if on_node < job.num_gpus else ''}--nproc-per-node {on_node} "
        "-m minitron.train"
    )


def flags(config: Config, decision: Decision) -> str:
    """Return the options that give the command line that trains `config` this layout."""
    return shlex.join(changes(config, in_layout(config, decision)))


def changes(before: Config, after: Config) -> list[str]:
    """Return the words of a command line that turn one config into the other."""
    words = []
    for section in ("parallel", "train", "model", "data"):
        for name, value in vars(getattr(after, section)).items():
            if value == getattr(getattr(before, section), name):
                continue
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{section}.{option if value else 'no-' + option}")
            else:
                words += [f"--{section}.{option}", str(value)]
    return words


def in_layout(config: Config, decision: Decision) -> Config:
    """Return the same training in another layout; not compiled, if it cannot be with that."""
    axes = decision.parallel
    dp = axes.dp if config.parallel.dp else 0  # 0: it follows from the number of ranks
    parallel = replace(axes, dp=dp)
    changes = {"recompute": decision.recompute, "micro_batch_size": decision.micro_batch_size}
    try:
        return replace(config, parallel=parallel, train=replace(config.train, **changes))
    except ConfigError:
        train = replace(config.train, **changes, compile=False)
        return replace(config, parallel=parallel, train=train)
