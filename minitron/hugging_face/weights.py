"""model.safetensors, as `transformers` writes it for Llama and GPT-2, and our parameters.

The numbers are the same; names and shapes are not:

    Llama   linear layers are (outputs, inputs), rotary positions turn (x[i], x[i + K/2]): as here
    GPT-2   linear layers are (inputs, outputs); query, key and value are one tensor, side by side

What is large is in several files, with an index of which tensor is where. Parameters are read one
at a time, so that any layout can be filled: `parallel.fill(Weights(folder, model))`.

Read in this order: NAMES, Place, place_of, Weights, write.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitron.config import ConfigError, ModelConfig, require
from minitron.hugging_face.config import read_json, read_model_config, to_hugging_face
from minitron.model.transformer import Transformer

NAMES = {
    "gpt": {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "blocks.*.attention_norm": "transformer.h.{}.ln_1",
        "blocks.*.attention.query": "transformer.h.{}.attn.c_attn",
        "blocks.*.attention.key": "transformer.h.{}.attn.c_attn",
        "blocks.*.attention.value": "transformer.h.{}.attn.c_attn",
        "blocks.*.attention.out": "transformer.h.{}.attn.c_proj",
        "blocks.*.mlp_norm": "transformer.h.{}.ln_2",
        "blocks.*.mlp.up": "transformer.h.{}.mlp.c_fc",
        "blocks.*.mlp.down": "transformer.h.{}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "llama": {
        "token_embedding": "model.embed_tokens",
        "blocks.*.attention_norm": "model.layers.{}.input_layernorm",
        "blocks.*.attention.query": "model.layers.{}.self_attn.q_proj",
        "blocks.*.attention.key": "model.layers.{}.self_attn.k_proj",
        "blocks.*.attention.value": "model.layers.{}.self_attn.v_proj",
        "blocks.*.attention.out": "model.layers.{}.self_attn.o_proj",
        "blocks.*.mlp_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.*.mlp.gate": "model.layers.{}.mlp.gate_proj",
        "blocks.*.mlp.up": "model.layers.{}.mlp.up_proj",
        "blocks.*.mlp.down": "model.layers.{}.mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
}
"""Our modules, and theirs."""


@dataclass(frozen=True)
class Place:
    """Where a parameter is: in the tensor `key`, maybe transposed, maybe one of three parts."""

    key: str
    is_transposed: bool = False
    part: int | None = None  # of three, along the last dim

    def stored(self, parameter: Tensor) -> Tensor:
        """The parameter as it is stored, and back again."""
        return parameter.T if self.is_transposed else parameter

    def stored_shape(self, shape: torch.Size) -> list[int]:
        """The shape of the tensor that holds a parameter of this shape."""
        stored = list(reversed(shape)) if self.is_transposed else list(shape)
        if self.part is not None:
            stored[-1] *= 3
        return stored


def place_of(name: str, family: str) -> Place:
    """Where the parameter with our `name` is."""
    module, _, kind = name.rpartition(".")
    layer = re.findall(r"\d+", module)
    key = NAMES[family][re.sub(r"\d+", "*", module)].format(*layer) + "." + kind
    if family == "llama" or not layer or module.endswith("_norm"):
        return Place(key)
    part = {"query": 0, "key": 1, "value": 2}.get(module.rpartition(".")[2])
    return Place(key, kind == "weight", part)


# Reading


class Weights:
    """The parameters in a folder: `weights(name, full shape)` reads one, as `fill` wants it.

    If `model` has more tokens than the folder, the rows of the new ones are the mean of the others:
    their logits are mean logits. A row of zeros gives 0, which may be the largest of all (Hewitt
    2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Raises ConfigError for a tensor that is missing, or of another shape than `model` has;
    and for a model that cannot be built here.
    """

    def __init__(self, folder: Path, model: ModelConfig):
        self.folder, self.model = folder, model
        self.files = files_of_tensors(folder)
        family = read_model_config(folder).family
        require(family == model.family, f"{folder}: holds a {family}, but model.family = "
                f"{model.family}: leave [model] to the folder's config.json")
        self.opened: dict[str, safe_open] = {}

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        place = place_of(name, self.model.family)
        tensor = self.find(place.key)
        found, expected = tensor.get_shape(), place.stored_shape(shape)
        num_new = 0
        if name in ("token_embedding.weight", "head.weight"):
            num_new = max(0, expected[0] - found[0])
        require(
            [found[0] + num_new, *found[1:]] == expected,
            f"{self.folder}: {place.key} has shape {found}, but {name} needs {expected}: leave "
            "sizes out of [model], so that they are those of the folder's config.json",
        )
        start, end = 0, found[-1]
        if place.part is not None:
            width = found[-1] // 3
            start, end = place.part * width, (place.part + 1) * width
        parameter = place.stored(tensor[..., start:end])
        if num_new == 0:
            return parameter
        mean = parameter.double().mean(0, keepdim=True).to(parameter.dtype)
        return torch.cat([parameter, mean.expand(num_new, -1)])

    def find(self, key: str):
        """The tensor called `key`, not read yet."""
        if key not in self.files:  # saved without its head, a model has no prefix: GPT-2 itself
            shorter = key.partition(".")[2]
            require(shorter in self.files, f"{self.folder}: none of {len(self.files)} tensors is "
                    f"{key}; fetch the model again")
            key = shorter
        file = self.files[key]
        if file not in self.opened:
            self.opened[file] = open_file(self.folder / file)
        return self.opened[file].get_slice(key)


def files_of_tensors(folder: Path) -> dict[str, str]:
    """The file that each tensor is in."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return dict.fromkeys(open_file(whole).keys(), whole.name)
    require(index.is_file(), f"{folder}: holds neither {whole.name} nor {index.name}; name a "
            "folder that save_pretrained of transformers has written")
    return read_json(index)["weight_map"]


def open_file(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch the model again") from None


# Writing


def write(
    folder: Path, model: ModelConfig, value: Callable[[str], Tensor],
    dtype: torch.dtype = torch.float32, end: int | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `transformers` loads; one rank calls it.

    `value(name)` gives a full parameter, and is asked for those of one file at a time. `end` is the
    token between documents. Raises ConfigError if the folder holds weights, or cannot be written
    to: then it is left without any.
    """
    require(not any(folder.glob("*.safetensors*")), f"{folder}: holds weights already; choose "
            "another folder")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(model)
    sizes = {key: dtype.itemsize * sum(parts.values()) for key, parts in tensors.items()}
    files = split(sizes, max_file_bytes)

    weight_map = {}
    for number, keys in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file = file if len(files) > 1 else "model.safetensors"
        held = {key: join(tensors[key], model, value, dtype) for key in keys}
        weight_map |= dict.fromkeys(keys, file)
        try:
            save_file(held, folder / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            for written in set(weight_map.values()):
                (folder / written).unlink(missing_ok=True)
            raise ConfigError(f"{folder / file}: cannot be written ({error}); the model needs "
                              f"{sum(sizes.values()):,} bytes there") from None

    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    # last: a folder without it is not taken for a model
    config = to_hugging_face(model, str(dtype).removeprefix("torch."), end)
    write_json(folder / "config.json", config)


def tensors_of(model: ModelConfig) -> dict[str, dict[str, int]]:
    """The tensors to write: by key, the parameters in each and how many numbers they have."""
    with torch.device("meta"):
        parameters = Transformer(model).named_parameters()
    tensors: dict[str, dict[str, int]] = {}
    for name, parameter in parameters:
        tensors.setdefault(place_of(name, model.family).key, {})[name] = parameter.numel()
    return tensors


def join(
    names: Iterable[str], model: ModelConfig, value: Callable[[str], Tensor], dtype: torch.dtype
) -> Tensor:
    """The tensor in which the parameters called `names` are stored."""
    parts = [place_of(name, model.family).stored(value(name)).to("cpu", dtype) for name in names]
    return torch.cat(parts, dim=-1)


def split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Divide keys, in their order, over files of at most `limit` bytes, or of one tensor."""
    files, free = [], 0
    for key, size in sizes.items():
        if not files or size > free:
            files.append([])
            free = limit
        files[-1].append(key)
        free -= size
    return files


def write_json(path: Path, table: dict) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n")
