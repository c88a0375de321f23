"""The files of a folder of weights: one, or many with an index, and which tensor is in which."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from minitron.config import ConfigError, require
from minitron.hugging_face.config import read_file
from minitron.system.files import file_in, reason


def files_of_tensors(folder: Path) -> dict[str, str]:
    """Return the file that each tensor is in."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return dict.fromkeys(open_file(folder, whole.name).keys(), whole.name)
    require(
        index.exists(),
        f"{folder}: holds neither {whole.name} nor {index.name}",
        "name a folder that save_pretrained of transformers has written",
    )
    files = read_file(folder, index.name).get("weight_map")
    is_map = isinstance(files, dict) and all(isinstance(name, str) for name in files.values())
    require(
        is_map,
        f"{index}: weight_map does not say which tensor is in which file",
        "fetch the model again",
    )
    return files


def open_file(folder: Path, name: str) -> safe_open:
    """Open a file of tensors in the folder; an index may name anything, also what is not there."""
    try:
        return safe_open(file_in(folder, name), framework="pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}/{name:.80}: cannot be read ({reason(error)})", "fetch the model again"
        ) from None
