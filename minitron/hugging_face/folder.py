"""A folder in Hugging Face's format as a whole: written from a run, or where a run starts."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

from minitron import checkpoint
from minitron.config import Config, ConfigError, require
from minitron.config.file import from_dict
from minitron.corpus.folder import end_of_document, load_tokenizer
from minitron.hugging_face.sizes import require_layers, shapes_of
from minitron.hugging_face.weights import Weights, write
from minitron.precision import PRECISIONS
from minitron.running.folder import tokenizer_of_run
from minitron.system.disk import write_json


def export(run: Path, folder: Path, dtype: str = "as-trained") -> None:
    """Write the model of a run's newest checkpoint, and the tokenizer that it was trained with.

    `transformers` loads both by their Auto classes. `dtype` is float32, bfloat16, float16, or
    as-trained: what the parameters had when they were used. Raises ConfigError if there is no run,
    or its tokenizer cannot be told any more.
    """
    require(
        (run / "config.json").is_file(),
        f"{run}: there is no run to export",
        "name a folder that `minitron train` has written",
    )
    path = checkpoint.newest_good(run / "checkpoints")
    config = config_of(path)
    used = PRECISIONS[config.train.precision].parameters
    tokenizer = tokenizer_of_run(run, config, str(checkpoint.facts_of(path).get("fingerprint")))
    write(
        folder,
        config.model,
        lambda name: checkpoint.read_tensor(path, f"model.{name}"),
        dtype=used if dtype == "as-trained" else getattr(torch, dtype),
        end=None if tokenizer is None else end_of_document(tokenizer),
    )
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer, config.model.max_sequence_length)


def config_of(path: Path) -> Config:
    """Return the config that a checkpoint was trained with.

    Raises ConfigError unless its model has the shapes that the checkpoint holds: nothing is built
    of sizes that others have written.
    """
    tables = checkpoint.facts_of(path).get("config")
    require(
        isinstance(tables, dict), f"{path}: does not say how it was trained", "export another run"
    )
    config = from_dict(tables, where=str(path))
    saved = checkpoint.saved_tensors(path)
    found = {
        name.removeprefix("model."): list(shape)
        for name, (shape, _) in saved.items()
        if name.startswith("model.")
    }
    require_layers(config.model, len(found), str(path))
    for name, shape in shapes_of(config.model):
        require(
            found.get(name) == list(shape),
            f"{path}: says that {name} has shape {list(shape)},"
            f" but holds {found.get(name, 'none')}",
            "export another run",
        )
    return config


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write what AutoTokenizer needs; texts are at most `max_length` tokens long."""
    end = tokenizer.id_to_token(end_of_document(tokenizer))
    try:
        write_json(folder / "tokenizer.json", json.loads(tokenizer.to_str()))
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": end,
                "eos_token": end,
                "model_max_length": max_length,
                # "<end>" in a text is ordinary text, as in the corpus
                "split_special_tokens": True,
                "clean_up_tokenization_spaces": False,  # the tokenizer's own decoder does
            },
        )
    except OSError as error:
        raise ConfigError(
            f"{folder}: the tokenizer cannot be written ({error.strerror}), the weights have been",
            "make room, and export to another folder",
        ) from None


def require_fits(folder: Path, config: Config) -> None:
    """Raise ConfigError unless `config` can start from the weights in `folder`."""
    require_same_tokens(folder, config.data.path)
    if config.model.vocab_size > 0:  # or it is that of the data, which are not open yet
        Weights(folder, config.model).check_sizes()


def require_same_tokens(folder: Path, corpus: Path) -> None:
    """Raise ConfigError if the model's tokenizer and the corpus's give words other numbers.

    Nothing else would tell: the loss would only start higher.
    """
    model, data = load_tokenizer(folder), load_tokenizer(corpus)
    if model is None or data is None:
        return
    require(
        model.get_vocab() == data.get_vocab(),
        f"{folder}: its tokenizer ({model.get_vocab_size()} tokens) is not that of {corpus} "
        f"({data.get_vocab_size()} tokens)",
        "choose a corpus written with the model's tokenizer",
    )
