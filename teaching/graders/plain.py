"""Values that cross from a learner's process to the judge: data, and never code.

A pickle can run anything when it is read, and an object of the learner's own class can claim to
equal everything. So only exact built-in types pass, tensors, and records: the dataclasses and
named tuples that the graders and the instruments define. Everything else is refused by name.

The format is one line of JSON, then the tensors' bytes. Read in this order: encode, decode.
"""

import dataclasses
import json
import sys
from collections import Counter, OrderedDict, defaultdict
from math import prod

import numpy
import torch
from torch import Tensor, nn

RECORDS = ("teaching.graders.", "minitron.measure.", "minitron.launch.rank_process",
           "minitron.parallel.", "minitron.cost.", "minitron.plan.", "minitron.config", "tests.")
"""Where the classes of records may come from."""
LITERALS = (type(None), bool, int, str)
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DICTS = (dict, Counter, OrderedDict, defaultdict)
"""These cross as dict, and NumPy's float64 as float: what it is in every other way."""
DEEPEST = 100


class NotPlain(TypeError):
    """A value that does not cross, and why."""


def encode(value) -> bytes:
    """Write a value for `decode`. Raises NotPlain for an object of any other type."""
    tensors: list[Tensor] = []
    try:
        tree = json.dumps(_tree(value, tensors, 0))
    except ValueError as error:
        raise NotPlain(f"it cannot be written: {error}") from None
    blobs = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
             for tensor in tensors]
    return b"".join([tree.encode(), b"\n", *blobs])


def decode(data: bytes):
    """Read what `encode` wrote, or raise NotPlain: runs no code, whatever `data` is."""
    line, _, rest = data.partition(b"\n")
    try:
        return _Reader(rest).read(json.loads(line))
    except (KeyError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
            RuntimeError) as error:
        raise NotPlain(f"not written by encode: {type(error).__name__}") from None


def name_of(kind: type) -> str:
    """How a type is called in a message."""
    module = getattr(kind, "__module__", "builtins")
    hidden = module == "builtins" or module.startswith("exercises.")
    return kind.__qualname__ if hidden else f"{module}.{kind.__qualname__}"


def _tree(value, tensors: list[Tensor], depth: int):
    kind = type(value)
    if depth > DEEPEST:
        raise NotPlain(f"a {kind.__name__} nested more than {DEEPEST} deep")

    def below(values) -> list:
        return [_tree(item, tensors, depth + 1) for item in values]

    if kind in LITERALS:
        return value
    if kind in (float, numpy.float64):
        return ["float", float(value).hex()]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is range:
        return ["range", value.start, value.stop, value.step]
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            return [name, below(value)]
    if kind in DICTS:
        return ["dict", below(value.keys()), below(value.values())]
    if kind is torch.Size:
        return ["size", list(value)]
    if kind is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if kind in (Tensor, nn.Parameter):
        return _tensor(value, tensors)
    fields = _fields(kind)
    if fields is None:
        raise NotPlain(f"an object of type {name_of(kind)}")
    return ["record", kind.__module__, kind.__qualname__,
            below(getattr(value, field) for field in fields)]


def _tensor(value: Tensor, tensors: list[Tensor]) -> list:
    if value.layout != torch.strided or value.is_quantized:
        raise NotPlain(f"a tensor of layout {value.layout}")
    device = value.device.type
    if device != "meta":
        tensors.append(value.detach().resolve_conj().resolve_neg().cpu())
    dtype = str(value.dtype).removeprefix("torch.")
    return ["tensor", dtype, list(value.shape), device == "meta", value.requires_grad]


def _fields(kind: type) -> tuple[str, ...] | None:
    """The fields of a record's class, None for any other class."""
    if not kind.__module__.startswith(RECORDS) or "<locals>" in kind.__qualname__:
        return None
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return kind._fields if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


class _Reader:
    """Builds the value of a tree; the tensors' bytes are taken in order."""

    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def read(self, tree):
        if type(tree) in LITERALS:
            return tree
        name, *parts = tree
        if name in SEQUENCES:
            return SEQUENCES[name](map(self.read, parts[0]))
        return getattr(self, f"read_{name}")(*parts)

    def read_float(self, text: str) -> float:
        return float.fromhex(text)

    def read_complex(self, real: str, imag: str) -> complex:
        return complex(float.fromhex(real), float.fromhex(imag))

    def read_bytes(self, text: str) -> bytes:
        return bytes.fromhex(text)

    def read_range(self, *numbers: int) -> range:
        return range(*numbers)

    def read_dict(self, keys: list, values: list) -> dict:
        return dict(zip(map(self.read, keys), map(self.read, values), strict=True))

    def read_size(self, sizes: list[int]) -> torch.Size:
        return torch.Size(sizes)

    def read_dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, name)
        if type(dtype) is not torch.dtype:
            raise ValueError(name)
        return dtype

    def read_tensor(self, dtype: str, shape: list[int], meta: bool, requires_grad: bool) -> Tensor:
        dtype = self.read_dtype(dtype)
        if meta:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
        num_bytes = prod(shape) * dtype.itemsize
        blob = self.data[self.place:self.place + num_bytes]
        self.place += num_bytes
        if len(blob) != num_bytes:
            raise ValueError("the bytes of a tensor are missing")
        tensor = torch.empty(shape, dtype=dtype) if not blob else \
            torch.frombuffer(bytearray(blob), dtype=torch.uint8).view(dtype).reshape(shape)
        return tensor.requires_grad_(requires_grad)

    def read_record(self, module: str, name: str, values: list):
        if not module.startswith(RECORDS):
            raise ValueError(module)
        kind = sys.modules[module]
        for part in name.split("."):
            kind = vars(kind)[part]
        values = list(map(self.read, values))
        if issubclass(kind, tuple):
            return kind(*values)
        record = object.__new__(kind)  # as it was, without what __init__ would make of it
        for field, value in zip(_fields(kind), values, strict=True):
            object.__setattr__(record, field, value)
        return record
