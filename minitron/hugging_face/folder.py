"""A folder in Hugging Face's format as a whole: written from a run, or where a run starts."""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from minitron import checkpoint
from minitron.config import require
from minitron.config_file import from_dict
from minitron.corpus.folder import end_of_document, load_tokenizer
from minitron.hugging_face.weights import write, write_json
from minitron.precision import PRECISIONS


def export(run: Path, folder: Path, dtype: str = "as-trained") -> None:
    """Write the model of a run's newest checkpoint, and the tokenizer of its corpus.

    `transformers` loads both by their Auto classes. `dtype` is float32, bfloat16, float16, or
    as-trained: what the parameters had when they were used.
    """
    require((run / "config.json").is_file(), f"{run}: there is no run to export; name a folder "
            "that `minitron train` has written")
    path = checkpoint.newest_good(run / "checkpoints")
    config = from_dict(checkpoint.facts_of(path)["config"], where=str(run))
    used = PRECISIONS[config.train.precision].parameters
    tokenizer = load_tokenizer(config.data.path)
    write(
        folder, config.model, lambda name: checkpoint.read_tensor(path, f"model.{name}"),
        dtype=used if dtype == "as-trained" else getattr(torch, dtype),
        end=None if tokenizer is None else end_of_document(tokenizer),
    )
    if tokenizer is not None:
        write_tokenizer(folder, tokenizer, config.model.max_sequence_length)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write what AutoTokenizer needs; texts are at most `max_length` tokens long."""
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(end_of_document(tokenizer))
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,  # the tokenizer's own decoder does
    })


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
        f"({data.get_vocab_size()} tokens): choose a corpus written with the model's tokenizer",
    )
