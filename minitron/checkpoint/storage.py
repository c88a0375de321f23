"""How a checkpoint lies on the disk: safetensors and JSON, which can be read without trust.

torch.distributed.checkpoint plans who writes and who reads what. Its own files are pickles, and
reading a pickle executes what its writer wanted. Here each rank writes one safetensors file,
`rank_00000.safetensors`, and rank 0 a table of them, `tensors.json`: each tensor's dtype and shape,
and the boxes it is saved in, each with its file.

Read in this order: Writer, read_table, Reader.
"""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Size, Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from minitron.system.disk import write_json
from minitron.system.files import file_in, read_json

TABLE = "tensors.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_DIMS = 8


class Writer(StorageWriter):
    """Writes this rank's boxes to one file, one tensor after the other; rank 0 adds the table."""

    def __init__(self, folder: Path):
        self.folder = folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            replace(plan, storage_data=f"rank_{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # The largest elements first, so that each tensor is aligned in the file.
        items = sorted(plan.items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)
        with (self.folder / plan.storage_data).open("wb") as file:
            file.write(header(items))
            for item in items:
                values = planner.resolve_data(item).detach().cpu().contiguous()
                file.write(values.view(-1).view(torch.uint8).numpy())
            file.flush()
            os.fsync(file.fileno())
        return done([WriteResult(item.index, num_bytes(item), plan.storage_data) for item in items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.index: result.storage_data for of_rank in results for result in of_rank}
        write_json(
            self.folder / TABLE,
            {
                name: {
                    "dtype": NAMES[tensor.properties.dtype],
                    "shape": list(tensor.size),
                    "boxes": [
                        [
                            list(chunk.offsets),
                            list(chunk.sizes),
                            files[MetadataIndex(name, chunk.offsets)],
                        ]
                        for chunk in tensor.chunks
                    ],
                }
                for name, tensor in metadata.state_dict_metadata.items()
            },
        )

    # What else is asked of a StorageWriter

    def reset(self, checkpoint_id=None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


def header(items: list[WriteItem]) -> bytes:
    """Return the header of a safetensors file: its length, then names, dtypes, shapes and offsets.

    `save_file` of safetensors would want all tensors in the host's memory at once.
    """
    table, end = {}, 0
    for item in items:
        start, end = end, end + num_bytes(item)
        tensor, chunk = item.tensor_data, item.tensor_data.chunk
        table[key(item.index, chunk.sizes, tensor.size)] = {
            "dtype": NAMES[tensor.properties.dtype],
            "shape": list(chunk.sizes),
            "data_offsets": [start, end],
        }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def num_bytes(item: WriteItem) -> int:
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def key(index: MetadataIndex, sizes: Size, shape: Size) -> str:
    """Return a box's name in its file: the tensor's name, and the offset if it is only a part."""
    if sizes == shape:
        return index.fqn
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


def done(value) -> Future:
    future = Future()
    future.set_result(value)
    return future


def read_table(folder: Path) -> Metadata:
    """Read what a checkpoint holds; check that boxes fill their tensors and fit their files.

    So nothing that is allocated for it is larger than the files are. `storage_data` has each box's
    file. Raises OSError, or ValueError in a few words.
    """
    tensors, files, claimed = {}, {}, Counter()
    for name, entry in read_json(folder / TABLE).items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "boxes": list(boxes)}:
                shape = sizes_in(shape)
            case _:
                raise ValueError(f"{TABLE}: {name!r:.80} does not describe a tensor")
        if dtype not in DTYPES:
            raise ValueError(f"{TABLE}: {name!r:.80} has an unknown dtype, {dtype!r:.20}")
        chunks = []
        for box in boxes:
            chunk, file = read_box(box, shape, f"{TABLE}: {name!r:.80}")
            chunks.append(chunk)
            files[MetadataIndex(name, chunk.offsets)] = file
            claimed[file] += prod(chunk.sizes) * DTYPES[dtype].itemsize
        volume = sum(prod(chunk.sizes) for chunk in chunks)
        if volume != prod(shape) or any(map(overlap, *neighbors(chunks))):
            raise ValueError(f"{TABLE}: the boxes of {name!r:.80} do not fill it")
        tensors[name] = TensorStorageMetadata(TensorProperties(DTYPES[dtype]), shape, chunks)

    for file, size in claimed.items():
        found = file_in(folder, file).stat().st_size
        if size > found:
            raise ValueError(f"{TABLE}: promises {size:,} bytes in {file}, which has {found:,}")
    return Metadata(tensors, storage_data=files)


def neighbors(chunks: list[ChunkStorageMetadata]) -> tuple[list, list]:
    """Return the pairs of boxes that share an index of the first dim, as two lists."""
    pairs, open_boxes = [], []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets):
        start = chunk.offsets[:1]
        open_boxes = [box for box in open_boxes if not start or end_of(box) > start[0]]
        pairs += [(box, chunk) for box in open_boxes]
        open_boxes.append(chunk)
    return [a for a, _ in pairs], [b for _, b in pairs]


def end_of(box: ChunkStorageMetadata) -> int:
    return box.offsets[0] + box.sizes[0]


def overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    """Return whether two boxes of a tensor share an element, or are both of a 0-d tensor."""
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def read_box(box, shape: Size, where: str) -> tuple[ChunkStorageMetadata, str]:
    """Return a box of a tensor of this shape, and its file."""
    match box:
        case [list(offset), list(sizes), str(file)] if re.fullmatch(
            r"rank_[0-9]{5,9}\.safetensors", file
        ):
            offset, sizes = sizes_in(offset), sizes_in(sizes)
        case _:
            raise ValueError(f"{where} has a malformed box")
    inside = len(offset) == len(sizes) == len(shape) and all(
        start + size <= end for start, size, end in zip(offset, sizes, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"{where} has a box outside its shape")
    return ChunkStorageMetadata(offset, sizes), file


def sizes_in(values: list) -> Size:
    """Return sizes or offsets that were read from JSON, checked."""
    if len(values) > MOST_DIMS or any(
        type(value) is not int or not 0 <= value < 2**62 for value in values
    ):
        raise ValueError(f"{TABLE}: {str(values)[:80]} are not valid sizes")
    return Size(values)


class Reader(StorageReader):
    """Reads the parts of boxes that a plan asks for: of a mapped file, only those are touched."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read_metadata(self) -> Metadata:
        return read_table(self.folder)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args, **kwargs
    ) -> None:
        self.metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with safe_open(file_in(self.folder, file), framework="pt") as opened:
                for item in items:
                    place = zip(item.storage_offsets, item.lengths, strict=True)
                    saved = self.box(opened, item.storage_index)
                    part = saved[tuple(slice(start, start + size) for start, size in place)]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        return done(None)

    def box(self, opened: safe_open, index: MetadataIndex) -> Tensor:
        """Return a box as it lies in its file, which must agree with the table."""
        tensor = self.metadata.state_dict_metadata[index.fqn]
        sizes = tensor.chunks[index.index].sizes
        name = key(index, sizes, tensor.size)
        stored = opened.get_slice(name)
        found, expected = (
            (stored.get_dtype(), stored.get_shape()),
            (NAMES[tensor.properties.dtype], list(sizes)),
        )
        if found != expected:
            raise ValueError(f"{name} is {found} in its file, but {expected} in {TABLE}")
        return opened.get_tensor(name)

    # What else is asked of a StorageReader

    def reset(self, checkpoint_id=None) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True
