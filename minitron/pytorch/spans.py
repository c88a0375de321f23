"""Names for stretches of a step, as they stand in the trace of a profiler (see `measure.trace`)."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.distributed import ProcessGroup

TECHNIQUES = {"dp": "data parallel", "tp": "tensor parallel", "pp": "pipeline",
              "replicas": "replicas", "cp": "context parallel", "ep": "expert parallel"}
NOTHING = nullcontext()


def span(*words) -> AbstractContextManager:
    """Name what runs inside "word word ..."; costs next to nothing while no profiler runs.

    A process group is named after the technique that its axis is for.
    """
    if not profiler._is_profiler_enabled:
        return NOTHING
    return profiler.record_function(" ".join(map(name, words)))


def name(word) -> str:
    if not isinstance(word, ProcessGroup):
        return str(word)
    if word.group_desc == "default_pg":
        return "all ranks"
    return TECHNIQUES.get(word.group_desc.removeprefix("mesh_"), "some ranks")
