"""Sizes of a model that a file states: compared with the tensors there before they are built."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from minitron.config import ModelConfig, require
from minitron.hugging_face.config import LARGEST
from minitron.model.transformer import Transformer


def require_layers(model: ModelConfig, num_tensors: int, where: str) -> None:
    """Raise ConfigError for sizes of which no file tells the truth, before they are built."""
    sizes = {name: value for name, value in vars(model).items() if type(value) is int}
    for name, value in sizes.items():
        require(value <= LARGEST, f"{where}: model.{name} = {value}: must be at most {LARGEST:,}")
    require(
        model.num_layers <= num_tensors,
        f"{where}: model.num_layers = {model.num_layers}, but there are {num_tensors} tensors",
        "leave sizes out of [model], or choose another model",
    )


def names_of(model: ModelConfig) -> Iterator[str]:
    """Name each parameter of all blocks."""
    for name, _ in shapes_of(replace(model, num_layers=1)):
        blocks = range(model.num_layers) if name.startswith("blocks.") else [0]
        yield from (name.replace("blocks.0.", f"blocks.{number}.") for number in blocks)


def shapes_of(model: ModelConfig) -> Iterator[tuple[str, torch.Size]]:
    """Name and full shape of each parameter, of the last block alone among the equal ones."""
    with torch.device("meta"):
        parameters = Transformer(replace(model, num_layers=1)).named_parameters()
    for name, parameter in parameters:
        yield name.replace("blocks.0.", f"blocks.{model.num_layers - 1}."), parameter.shape
