"""How tensor parallelism cuts each parameter: a plan for the modules, and what follows from it.

Read in this order: PLAN, plan_placements.
"""

import fnmatch
from collections.abc import Iterator

from torch import nn

from minitron.config import ModelConfig
from minitron.cost.tensor import kv_heads_per_rank, share
from minitron.parallel.placement import Placement

PLAN = {
    "token_embedding": "vocabulary",  # weight (V/tp, D)
    "blocks.*.attention.query": "columns",  # (D/tp, D): H/tp heads
    "blocks.*.attention.key": "columns",  # (G K/tp, D), or one head if G < tp
    "blocks.*.attention.value": "columns",
    "blocks.*.attention.out": "rows",  # (D, D/tp), the columns of H/tp heads
    "blocks.*.mlp.gate": "columns",  # (F/tp, D); Llama alone has it
    "blocks.*.mlp.up": "columns",
    "blocks.*.mlp.down": "rows",  # (D, F/tp)
    "head": "columns",  # (V/tp, D)
}
"""Which modules are cut, and how; the others are replicated.

A linear layer computes x A. Cut by columns of A, each rank computes some of the outputs; by rows,
it reads some of the inputs. PyTorch stores A transposed: weights are (outputs, inputs).
"""


def plan_placements(model: nn.Module, rank: int, size: int) -> dict[str, Placement]:
    """Return where rank `rank` of `size` has its block of every parameter, by name.

    Raises ConfigError for sizes of the model that do not divide.
    """
    require_sizes(model.config, size)
    dims: dict[str, int] = {}
    for path, kind in planned(model):
        dims[f"{path}.weight"] = 1 if kind == "rows" else 0
        if kind != "rows":  # whose bias is added to the sum: every rank holds it
            dims[f"{path}.bias"] = 0

    placements = {}
    for name, _ in model.named_parameters():
        count = size if name in dims else 1
        if name.rpartition(".")[0].endswith((".key", ".value")):
            count = min(count, model.config.num_kv_heads)
        copies = size // count
        is_shared = name in dims and copies > 1  # by ranks with other query heads
        placements[name] = Placement(
            dims.get(name, 0), rank // copies, count, copies, is_partial=is_shared
        )
    return placements


def planned(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that the plan cuts: path and kind, in the model's order."""
    for path, _ in model.named_modules():
        for pattern, kind in PLAN.items():
            if fnmatch.fnmatchcase(path, pattern):
                yield path, kind


def require_sizes(model: ModelConfig, size: int) -> None:
    """Raise ConfigError if a size of the model does not divide over `size` ranks."""
    for name in ("num_heads", "ffn_width", "vocab_size"):
        share(f"model.{name}", getattr(model, name), size)
    kv_heads_per_rank(model, size)
