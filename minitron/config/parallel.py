"""Along which axes a run is divided, and how: the table [parallel] of a config."""

from dataclasses import dataclass
from typing import Literal

from minitron.config.checks import require_at_least, require_positive, require_types
from minitron.system.errors import require

V_SCHEDULES = "zb-v", "dualpipe-v"  # rank r holds stages r and 2 pp - 1 - r


@dataclass(frozen=True, kw_only=True)  # so that a new axis cannot take the place of another
class ParallelConfig:
    dp: int = 0
    """Data-parallel ranks; 0: the ranks that torchrun started, divided by tp x cp x pp."""
    tp: int = 1
    """Ranks that split every layer (tensor parallelism); keep them within a node."""
    sequence: bool = False
    """With tp, also split the sequence in norms, dropout and the residual stream."""
    cp: int = 1
    """Ranks that split every sequence (context parallelism), for long sequences."""
    context: Literal["ring", "all-gather", "ulysses"] = "ring"
    """With cp, how attention gets the other ranks' keys and values. ring: passes them around while
    ranks compute; all-gather: gathers all of them first; ulysses: splits attention by heads
    instead."""
    pp: int = 1
    """Ranks of a pipeline (pipeline parallelism); the layers are split into pp x chunks stages."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"] = "1f1b"
    """Order of the forward and backward passes in the pipeline."""
    chunks: int = 1
    """Stages that each rank of the pipeline holds: 1 with 1f1b, 2 or more with interleaved, exactly
    2 with zb-v and dualpipe-v, any number with gpipe and zero-bubble."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ZeRO shards over the data-parallel ranks. 0: nothing; 1: optimizer state; 2: also
    gradients; 3: also weights."""
    replicas: int = 1
    """Hybrid sharding: how many copies of the sharded state there are. ZeRO shards it over dp /
    replicas neighboring ranks, such as those of a node."""
    sync_every_micro_batch: bool = True
    """ZeRO-2 and 3: reduce-scatter gradients after each micro-batch, so that only shards
    accumulate. Off: once per step, but each rank holds unsharded gradients until then."""
    reshard_each_pass: bool = True
    """ZeRO-3: free the weights after each pass of a micro-batch, and gather them again for the
    next one. Off: gather them once per step, and keep them unsharded until it ends."""
    sync_replicas_every_micro_batch: bool = False
    """ZeRO-2 and 3 with replicas: all-reduce the sharded gradients over the replicas after each
    micro-batch, instead of once per step."""
    overlap_gather: bool = False
    """ZeRO-1 and 2: gather the updated weights during the next forward pass, where each block waits
    only for its own, instead of at the end of the step."""

    def __post_init__(self):
        require_types("parallel", self)
        require_at_least("parallel", self, dp=0)
        require_positive("parallel", self, "tp", "cp", "pp", "chunks")
        require(
            not self.sequence or self.tp > 1,
            f"parallel.sequence with parallel.tp = {self.tp}:"
            " it divides what tensor parallelism replicates",
            "set parallel.tp to 2 or more",
            field="parallel.sequence",
        )
        require(
            self.context == "ring" or self.cp > 1,
            f"parallel.context = {self.context} with "
            f"parallel.cp = {self.cp}: the sequence is not divided inside attention",
            "set parallel.cp to 2 or more, or leave it out",
            field="parallel.context",
        )
        require(
            self.sync_every_micro_batch or self.zero >= 2,
            f"parallel.sync_every_micro_batch = {self.sync_every_micro_batch} with parallel.zero = "
            f"{self.zero}: below stage 2 gradients travel once a step anyway",
            "leave it out",
            field="parallel.sync_every_micro_batch",
        )
        require(
            not self.overlap_gather or self.zero in (1, 2),
            "parallel.overlap_gather with "
            f"parallel.zero = {self.zero}: only stages 1 and 2 gather weights after a step",
            "leave it out",
            field="parallel.overlap_gather",
        )
        self.require_replicas()
        if self.pp > 1:
            self.require_pipeline()
        else:
            require(
                self.schedule == "1f1b" and self.chunks == 1,
                f"parallel.schedule = "
                f"{self.schedule} and chunks = {self.chunks} with parallel.pp = 1: there is no "
                "pipeline",
                "set parallel.pp to 2 or more, or leave them out",
                field="parallel.schedule",
            )

    @property
    def is_v(self) -> bool:
        """Whether stages go down the ranks and back up, so that rank 0 has the first and last."""
        return self.schedule in V_SCHEDULES

    @property
    def sequence_parts(self) -> int:
        """What must divide a sequence: 2 chunks a rank of cp, each in tp parts with `sequence`."""
        return (1 if self.cp == 1 else 2 * self.cp) * (self.tp if self.sequence else 1)

    @property
    def words_for_sequence_parts(self) -> str:
        factors = ["2 x parallel.cp"] * (self.cp > 1) + ["parallel.tp"] * self.sequence
        reason = " (parallel.sequence is on)" if self.sequence else ""
        return f"{' x '.join(factors)} = {self.sequence_parts}{reason}"

    @property
    def micro_batch_rule(self) -> tuple[int, int]:
        """The fewest micro-batches of a step that the schedule runs, and what must divide them."""
        if self.schedule == "dualpipe-v":
            return 2 * self.pp, 1
        if self.chunks > 1 and self.schedule in ("interleaved", "zero-bubble"):
            return self.pp, self.pp
        return 1, 1

    def require_replicas(self) -> None:
        require_positive("parallel", self, "replicas")
        require(
            self.replicas == 1 or self.zero >= 1,
            f"parallel.replicas = {self.replicas} with "
            "parallel.zero = 0: nothing is sharded, so every rank is a replica anyway",
            "leave it out, or set parallel.zero to 1, 2 or 3",
            field="parallel.replicas",
        )
        require(
            self.dp % self.replicas == 0,
            f"parallel.replicas = {self.replicas} does not divide parallel.dp = {self.dp}",
            "use a divisor of it",
            field="parallel.replicas",
        )
        require(
            self.reshard_each_pass or self.zero == 3,
            "parallel.reshard_each_pass = False with "
            f"parallel.zero = {self.zero}: below stage 3 weights are never freed",
            "leave it out",
            field="parallel.reshard_each_pass",
        )
        require(
            not self.sync_replicas_every_micro_batch
            or (self.replicas > 1 and self.zero >= 2 and self.sync_every_micro_batch),
            "parallel.sync_replicas_every_micro_batch needs parallel.replicas of 2 or more (here "
            f"{self.replicas}), parallel.zero = 2 or 3 (here {self.zero}) and "
            "parallel.sync_every_micro_batch",
            "leave it out",
            field="parallel.sync_replicas_every_micro_batch",
        )

    def require_pipeline(self) -> None:
        problem = f"parallel.chunks = {self.chunks} with parallel.schedule = {self.schedule}"
        require(
            self.schedule != "interleaved" or self.chunks > 1,
            problem,
            "set parallel.chunks to 2 or more, or parallel.schedule to 1f1b",
            field="parallel.chunks",
        )
        require(
            self.schedule != "1f1b" or self.chunks == 1,
            problem,
            "set parallel.chunks to 1, or use interleaved, which is 1F1B with chunks",
            field="parallel.chunks",
        )
        require(
            not self.is_v or self.chunks == 2,
            problem,
            "set parallel.chunks to 2: a rank holds a stage on the way down and one on the way up",
            field="parallel.chunks",
        )
