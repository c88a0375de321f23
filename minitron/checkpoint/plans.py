"""Who writes and who reads which boxes: what torch.distributed.checkpoint asks of us.

Its planners know whole tensors and DTensors; ours have several boxes of a tensor on one rank.
"""

from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from minitron.parallel.parts import Chunks


def chunks(boxes: Chunks) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(Size(offset), values.shape) for offset, values in boxes.at.items()]


class SavePlanner(DefaultSavePlanner):
    """Every rank offers its boxes; of equal ones the base class keeps one, spread over the ranks.

    It also refuses a plan whose boxes overlap, or leave a gap.
    """

    def set_up_planner(
        self, state_dict: dict[str, Chunks], storage_meta=None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.flatten_state_dict = False

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk, TensorProperties(boxes.dtype), Size(boxes.shape)
                    ),
                )
                for name, boxes in self.state_dict.items()
                for chunk in chunks(boxes)
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at[tuple(index.offset)]


class LoadPlanner(DefaultLoadPlanner):
    """Every rank asks for the parts of saved boxes that lie in its own."""

    def set_up_planner(
        self,
        state_dict: dict[str, Chunks],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator
        self.flatten_state_dict = False

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                item
                for name, boxes in self.state_dict.items()
                for item in create_read_items_for_chunk_list(
                    name, self.saved(name, Size(boxes.shape)), chunks(boxes)
                )
            ]
        )

    def saved(self, name: str, shape: Size) -> TensorStorageMetadata:
        """Find where the tensor of this name and shape is; raises ValueError if it is nowhere."""
        found = self.metadata.state_dict_metadata.get(name)
        if found is None:
            raise ValueError(f"it holds no {name}")
        if found.size != shape:
            raise ValueError(f"{name} has shape {list(found.size)} in it, not {list(shape)}")
        return found

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].at[tuple(index.offset)]
