"""model.safetensors, as `transformers` writes it for Llama and GPT-2, and our parameters.

The numbers are the same; names and shapes are not:

    Llama   linear layers are (outputs, inputs), rotary positions turn (x[i], x[i + K/2]): as here
    GPT-2   linear layers are (inputs, outputs); query, key and value are one tensor, side by side

What is large is in several files, with an index of which tensor is where. Parameters are read one
at a time, so that any layout can be filled: `parallel.fill(Weights(folder, model))`.

Read in this order: NAMES, Place, place_of, Weights, write.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitron.config import ConfigError, ModelConfig, require
from minitron.hugging_face.config import read_model_config, to_hugging_face
from minitron.hugging_face.files import files_of_tensors, open_file
from minitron.hugging_face.sizes import names_of, require_layers, shapes_of
from minitron.model.transformer import Transformer
from minitron.system.disk import write_json
from minitron.system.files import reason

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

BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
"""Causal masks and rotary frequencies, which old versions saved too: the config determines them."""

HEAD = "lm_head.weight"
FLOATS = "F64", "F32", "BF16", "F16"
"""What weights may be stored as: others need scales, which are in tensors that are not read."""


@dataclass(frozen=True)
class Place:
    """Where a parameter is: in the tensor `key`, maybe transposed, maybe one of three parts."""

    key: str
    is_transposed: bool = False
    part: int | None = None  # of three, along the last dim

    def stored(self, parameter: Tensor) -> Tensor:
        """Return the parameter as it is stored, and back again."""
        return parameter.T if self.is_transposed else parameter

    def stored_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of the tensor that holds a parameter of this shape."""
        stored = list(reversed(shape)) if self.is_transposed else list(shape)
        if self.part is not None:
            stored[-1] *= 3
        return stored


def place_of(name: str, family: str) -> Place:
    """Find where the parameter with our `name` is."""
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

    Raises ConfigError for a tensor that is missing, of another shape than `model` has, or that no
    parameter of `model` reads; for a head other than the embedding that config.json ties it to;
    and for a model that cannot be built here.
    """

    def __init__(self, folder: Path, model: ModelConfig):
        self.folder, self.model = folder, model
        self.files = files_of_tensors(folder)
        family = read_model_config(folder).family
        require(
            family == model.family,
            f"{folder}: holds a {family} model, but model.family = {model.family}",
            "leave [model] to the folder's config.json",
        )
        self.opened: dict[str, safe_open] = {}
        require_layers(model, len(self.files), str(folder))
        self.require_all_read()

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        if name == "token_embedding.weight" and self.model.tied_embedding:
            self.require_tied()
        place = place_of(name, self.model.family)
        tensor, num_new = self.find(name, shape)
        start, end = 0, tensor.get_shape()[-1]
        if place.part is not None:
            width = end // 3
            start, end = place.part * width, (place.part + 1) * width
        parameter = place.stored(tensor[..., start:end])
        if num_new == 0:
            return parameter
        mean = parameter.double().mean(0, keepdim=True).to(parameter.dtype)
        return torch.cat([parameter, mean.expand(num_new, -1)])

    def check_sizes(self) -> None:
        """Raise ConfigError unless the files hold a model of this size: before it is built."""
        for name, shape in shapes_of(self.model):
            self.find(name, shape)
        self.opened.clear()

    def require_all_read(self) -> None:
        """Raise ConfigError if a tensor is left over: without it, this is another model."""
        keys = {place_of(name, self.model.family).key for name in names_of(self.model)}
        read = {self.present(key) for key in keys} | {HEAD}  # a tied one is compared when read
        unread = [key for key in self.files if key not in read and not BUFFERS.search(key)]
        require(
            not unread,
            f"{self.folder}: our model has no place for {len(unread)} of its "
            f"{len(self.files)} tensors, {unread[0] if unread else ''} among them",
            "leave sizes out of [model]; if there are none, config.json is of another model: "
            "fetch it again, or choose another model",
        )

    def require_tied(self) -> None:
        """Raise ConfigError if the files hold a head of its own, unlike the embedding."""
        if HEAD not in self.files:
            return
        embedding = place_of("token_embedding.weight", self.model.family).key
        tied, head = self.open(embedding)[...], self.open(HEAD)[...]
        require(
            tied.shape == head.shape and bool((tied == head).all()),
            f"{self.folder}: "
            f"{HEAD} is not {self.present(embedding)}, although tie_word_embeddings says so",
            "set tie_word_embeddings to false in config.json, or remove the head's tensor if "
            "the embedding is right",
        )

    def present(self, key: str) -> str | None:
        """Return the name under which the files hold the tensor `key`; None if they do not."""
        shorter = key.partition(".")[2]  # saved without its head, a model has no prefix: GPT-2
        return next((each for each in (key, shorter) if each in self.files), None)

    def find(self, name: str, shape: torch.Size):
        """Find the tensor with the parameter called `name`, unread, and how many rows it lacks."""
        place = place_of(name, self.model.family)
        tensor = self.open(place.key)
        found, expected = tensor.get_shape(), place.stored_shape(shape)
        num_new = 0
        if name in ("token_embedding.weight", "head.weight") and len(found) == len(expected):
            num_new = max(0, expected[0] - found[0])
        require(
            len(found) > 0 and [found[0] + num_new, *found[1:]] == expected,
            f"{self.folder}: {place.key} has shape {found}, but {name} needs {expected}",
            "leave sizes out of [model], so that they are those of the folder's config.json",
        )
        require(
            tensor.get_dtype() in FLOATS,
            f"{self.folder}: {place.key} holds "
            f"{tensor.get_dtype()}, but weights are {', '.join(FLOATS)}",
            "choose another model",
        )
        return tensor, num_new

    def open(self, key: str):
        """Open the tensor called `key`."""
        present = self.present(key)
        require(
            present is not None or not key.startswith("lm_head."),
            f"{self.folder}: holds no "
            f"{key}, the head of a model whose embedding is not tied: if the head is the "
            "embedding, set --model.tied-embedding; otherwise choose a model that has its head",
        )
        require(
            present is not None,
            f"{self.folder}: none of {len(self.files)} tensors is {key}; "
            "leave sizes out of [model]; if there are none, fetch the model again",
        )
        file = self.files[present]
        if file not in self.opened:
            self.opened[file] = open_file(self.folder, file)
        try:
            return self.opened[file].get_slice(present)
        except SafetensorError as error:
            raise ConfigError(
                f"{self.folder / file}: {reason(error)}", "fetch the model again"
            ) from None


# Writing


def write(
    folder: Path,
    model: ModelConfig,
    value: Callable[[str], Tensor],
    dtype: torch.dtype = torch.float32,
    end: int | None = None,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write a folder that `transformers` loads; one rank calls it.

    `value(name)` gives a full parameter, and is asked for those of one file at a time. `end` is the
    token between documents. Raises ConfigError if the folder holds weights, or cannot be written
    to: then it is left without any.
    """
    require(
        not any(folder.glob("*.safetensors*")),
        f"{folder}: holds weights already",
        "choose another folder",
    )
    tensors = tensors_of(model)
    sizes = {key: dtype.itemsize * sum(parts.values()) for key, parts in tensors.items()}
    files = name_files(split(sizes, max_file_bytes))
    index = folder / "model.safetensors.index.json"

    with all_or_nothing(folder, [*files, index.name], sum(sizes.values())):
        folder.mkdir(parents=True, exist_ok=True)
        for file, keys in files.items():
            held = {key: join(tensors[key], model, value, dtype) for key in keys}
            save_file(held, folder / file, metadata={"format": "pt"})
        if len(files) > 1:
            weight_map = {key: file for file, keys in files.items() for key in keys}
            total = {"total_size": sum(sizes.values())}
            write_json(index, {"metadata": total, "weight_map": weight_map})
        # last: a folder without it is not taken for a model
        config = to_hugging_face(model, str(dtype).removeprefix("torch."), end)
        write_json(folder / "config.json", config)


def name_files(parts: list[list[str]]) -> dict[str, list[str]]:
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": keys
        for number, keys in enumerate(parts, start=1)
    }


@contextmanager
def all_or_nothing(folder: Path, files: list[str], num_bytes: int) -> Iterator[None]:
    """Remove the files if not all can be written, whatever happens; tell what a user can mend."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            for file in files:
                (folder / file).unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(
                f"{folder}: cannot be written ({reason(error)}); the model needs "
                f"{num_bytes:,} bytes there"
            ) from None
        raise


def tensors_of(model: ModelConfig) -> dict[str, dict[str, int]]:
    """Return the tensors to write: by key, the parameters in each and their number of elements."""
    with torch.device("meta"):
        parameters = Transformer(model).named_parameters()
    tensors: dict[str, dict[str, int]] = {}
    for name, parameter in parameters:
        tensors.setdefault(place_of(name, model.family).key, {})[name] = parameter.numel()
    return tensors


def join(
    names: Iterable[str], model: ModelConfig, value: Callable[[str], Tensor], dtype: torch.dtype
) -> Tensor:
    """Build the tensor in which the parameters called `names` are stored."""
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
