"""Runs that start from a folder of Hugging Face's, and end in one: in any layout, same numbers.

Every rank imports this module: `transformers`, which takes seconds, is a fixture.
"""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minitron import cli, train
from minitron.config import Config, ConfigError, DataConfig, ModelConfig, ParallelConfig
from minitron.corpus.folder import end_of_document, load_tokenizer
from minitron.corpus.text import write_text
from minitron.hugging_face.folder import export
from minitron.hugging_face.weights import Weights, write
from minitron.launch import run
from minitron.measure.metrics import read_metrics
from minitron.model.transformer import Transformer
from minitron.parallelize import build, lay_out
from minitron.run import Run
from tests.tiers import tiered
from tests.train.test_train_layouts import describe
from tests.train.test_train_ranks import TRAIN, train_on_ranks

GPT = ModelConfig("gpt", 720, 32, 2, 36, 6, 6, 48)
LLAMA = ModelConfig("llama", 720, 32, 2, 32, 4, 1, 48, tied_embedding=False)
CPU = torch.device("cpu")


def read_and_write(group, config: Config, source: Path, target: Path) -> None:
    """Fill a model in its layout from one folder, and write it to another."""
    _, parallel = build(config, lay_out(config.parallel, group.size(), CPU), CPU)
    parallel.fill(Weights(source, config.model))
    parameters = parallel.full_parameters()
    if group.rank() == 0:
        write(target, config.model, parameters.__getitem__)


@pytest.mark.parametrize(
    "model, num_ranks, parallel",
    tiered(
        [
            (GPT, 3, {"zero": 3}),
            (GPT, 2, {"pp": 2}),
            (GPT, 4, {"tp": 2, "pp": 2}),
            (LLAMA, 2, {"tp": 2}),
            (LLAMA, 4, {"tp": 2, "zero": 3}),
            (LLAMA, 2, {"pp": 2, "zero": 1}),
        ]
    ),
    ids=describe,
)
def test_any_layout_reads_and_writes_the_same_bits(tmp_path, model, num_ranks, parallel):
    torch.manual_seed(0)
    parameters = {
        name: torch.randn(parameter.shape)
        for name, parameter in Transformer(model).named_parameters()
    }
    write(tmp_path / "source", model, parameters.__getitem__, max_file_bytes=40_000)
    write(tmp_path / "expected", model, parameters.__getitem__)
    config = Config(model, DataConfig(sequence_length=32), TRAIN, ParallelConfig(**parallel))
    run(read_and_write, num_ranks, config, tmp_path / "source", tmp_path / "found")
    found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("found", "expected")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


# From run to folder to run


@pytest.fixture
def transformers():
    import transformers

    return transformers


@pytest.fixture(scope="module")
def exported(stories, tmp_path_factory) -> tuple[Run, Path]:
    """A short run of a tied Llama, and its export."""
    folder = tmp_path_factory.mktemp("exported")
    config = Config(
        dataclasses.replace(LLAMA, vocab_size=0, tied_embedding=True),
        DataConfig(stories, sequence_length=32),
        TRAIN,
    )
    finished = train.train(config, folder / "run")
    assert cli.dispatch(["export", str(folder / "run"), str(folder / "model")]) == 0
    return finished, folder / "model"


def evaluations(folder: Path) -> list[dict]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if "val_loss" in row]


def train_from(group, config: Config, folder: Path, weights: Path) -> None:
    train.train(config, folder, group=group, weights=weights)


@pytest.mark.parametrize(
    "num_ranks, parallel",
    tiered(
        [
            (2, {"tp": 2, "sequence": True}),
            (1, {}),
            (2, {"pp": 2}),
            (2, {"zero": 3}),
        ]
    ),
    ids=str,
)
def test_a_run_writes_the_same_text_from_its_export(exported, tmp_path, num_ranks, parallel):
    """One step that changes nothing, then the evaluation and the sample of every run."""
    first, weights = exported
    still = dataclasses.replace(TRAIN, steps=1, learning_rate=1e-20, min_learning_rate=0.0)
    config = dataclasses.replace(first.config, train=still, parallel=ParallelConfig(**parallel))
    run(train_from, num_ranks, config, tmp_path / "run", weights)
    [found], expected = evaluations(tmp_path / "run"), evaluations(first.folder)[-1]
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert found["sample"] == expected["sample"]


def test_transformers_reads_and_speaks_as_the_run_does(exported, transformers):
    first, folder = exported
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(first.config.data.path)
    end = end_of_document(ours)
    assert (theirs.config.eos_token_id, tokenizer.eos_token_id) == (end, end)

    text = first.sample(num_texts=1, num_tokens=30)[0]
    tokens = ours.encode(text).ids
    assert tokenizer(text)["input_ids"] == tokens and len(tokens) > 20
    assert tokenizer.decode(tokens) == ours.decode(tokens, skip_special_tokens=False)
    batch = torch.tensor([tokens])
    with torch.no_grad():
        torch.testing.assert_close(first.model(batch), theirs(batch).logits, rtol=1e-5, atol=1e-5)
    written = theirs.generate(batch[:, :4], do_sample=False, max_new_tokens=12)
    with torch.no_grad():
        likeliest = first.model(written[:, :-1]).argmax(-1)
    assert written.shape[1] > 6 and torch.equal(written[:, 4:], likeliest[:, 3:])


@pytest.mark.parametrize("zero", tiered([3, 0]))
def test_the_dtype_is_the_one_that_was_used(stories, tmp_path, zero, transformers):
    """In stage 3 the checkpoint has float32 masters, but computed was with 16 bits."""
    low = dataclasses.replace(TRAIN, steps=2, precision="bf16")
    config = Config(
        dataclasses.replace(LLAMA, vocab_size=0),
        DataConfig(stories, 32),
        low,
        ParallelConfig(zero=zero),
    )
    run(train_on_ranks, 2, config, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "used")
    export(tmp_path / "run", tmp_path / "wide", "float32")
    used, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("used", "wide"))
    assert {tensor.dtype for tensor in used.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert all(torch.equal(used[key], wide[key].bfloat16()) for key in used)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "used")
    assert loaded.dtype == torch.bfloat16


def test_masters_start_from_what_is_in_the_file(exported, tmp_path):
    """Not from what the 16-bit parameters make of it."""
    first, weights = exported
    low = dataclasses.replace(TRAIN, precision="bf16")
    second = Run(dataclasses.replace(first.config, train=low), tmp_path)
    second.parallel.fill(Weights(weights, second.config.model))
    for name, parameter in first.model.named_parameters():
        ours = second.model.get_parameter(name)
        assert torch.equal(ours, parameter.bfloat16())
        assert torch.equal(second.parallel.masters.pieces[ours], parameter)


# The command line


def write_toml(first: Run, file: Path, model: str = "") -> str:
    """Settings under which a step changes nothing."""
    file.write_text(
        f"[model]\n{model}\n[data]\npath = '{first.config.data.path}'\nsequence_length = 32\n"
        "[train]\nsteps = 1\nglobal_batch_size = 4\nlearning_rate = 1e-20\n"
        "min_learning_rate = 0\neval_sequences = 6\ndevice = 'cpu'\n"
    )
    return str(file)


def test_the_folder_fills_in_the_model(exported, tmp_path):
    """What the TOML file or the command line says comes before it."""
    first, folder = exported
    file = write_toml(first, tmp_path / "a.toml", "dropout = 0.1")
    options = train.read_options([file, "--weights", str(folder)])
    expected = dataclasses.replace(first.config.model, dropout=0.1)
    assert (options.model, options.weights) == (expected, folder)
    options = train.read_options([file, f"--weights={folder}", "--model.vocab-size", "800"])
    assert options.model == dataclasses.replace(expected, vocab_size=800)


def test_train_weights_starts_from_an_export(exported, tmp_path, monkeypatch, capsys):
    first, folder = exported
    monkeypatch.chdir(tmp_path)
    file = write_toml(first, tmp_path / "a.toml")
    assert cli.dispatch(["train", file, "--weights", str(folder), "--run-dir", "again"]) == 0
    [found], expected = evaluations(tmp_path / "again"), evaluations(first.folder)[-1]
    first_sample = expected["sample"]
    assert found["sample"] == first_sample
    assert cli.dispatch(["export", "again", "model"]) == 0
    assert "model: wrote the model and its tokenizer; load it" in capsys.readouterr().out
    found, expected = (load_file(path / "model.safetensors") for path in (Path("model"), folder))
    assert all(torch.equal(found[key], expected[key]) for key in expected)

    shutil.rmtree("again/checkpoints")  # as if it had been killed: --resume knows no weights
    with pytest.raises(ConfigError, match="again: the run started from --weights.*with --restart"):
        cli.dispatch(["train", file, "--resume", "--run-dir", "again"])
    words = ["--weights", str(folder), "--restart", "--run-dir", "again"]
    assert cli.dispatch(["train", file, *words]) == 0
    [found] = evaluations(tmp_path / "again")
    assert found["sample"] == first_sample


def test_mistakes_are_one_line(exported, tmp_path):
    first, folder = exported
    with pytest.raises(ConfigError, match="/nowhere: there is no run to export; name a folder"):
        cli.dispatch(["export", "/nowhere", str(tmp_path / "model")])
    with pytest.raises(ConfigError, match="model: holds weights already; choose another folder"):
        cli.dispatch(["export", str(first.folder), str(folder)])
    with pytest.raises(ConfigError, match="--weights with --resume"):
        train.read_options(["--weights", str(folder), "--resume"])
    with pytest.raises(ConfigError, match="/nowhere/config.json: there is no such file"):
        train.read_options(["--weights", "/nowhere"])


def test_other_tokens_are_refused(exported, tmp_path):
    first, folder = exported
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 400)
    write_text([tmp_path / "a.txt"], tmp_path / "text", vocab_size=270)
    config = dataclasses.replace(first.config, data=DataConfig(tmp_path / "text", 32))
    with pytest.raises(
        ConfigError,
        match=r"its tokenizer \(\d+ tokens\) is not that of .*text "
        r"\(\d+ tokens\); choose a corpus",
    ):
        train.train(config, tmp_path / "run", weights=folder)
    assert not (tmp_path / "run").exists()
