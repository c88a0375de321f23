"""Llama and GPT-2 of `transformers`, read and written: the same logits on both sides."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from minitron.config import ConfigError, ModelConfig
from minitron.corpus.folder import END
from minitron.corpus.text import train_tokenizer
from minitron.hugging_face.config import read_model_config
from minitron.hugging_face.folder import write_tokenizer
from minitron.hugging_face.weights import Weights, split, write
from minitron.model.transformer import Transformer, fill
from tests.model.test_transformer import float64_llama, random_model  # noqa: F401

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def random_reference(kind: str, **changes) -> nn.Module:
    """A tiny model of theirs with random norms and biases, in float64."""
    if kind == "gpt2":
        sizes = {
            "vocab_size": 97,
            "n_positions": 40,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 56,
            "layer_norm_epsilon": 1e-3,
        }
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | changes))
    else:
        sizes = {
            "vocab_size": 97,
            "max_position_embeddings": 40,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 56,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        }
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise + (parameter.dim() == 1))
    return model.double().eval()


def read(folder: Path, dtype: torch.dtype = torch.float64, **changes) -> Transformer:
    config = dataclasses.replace(read_model_config(folder), **changes)
    model = Transformer(config).to(dtype)
    fill(model, Weights(folder, config))
    return model.eval()


def tokens(num_tokens: int = 30) -> torch.Tensor:
    return torch.randint(0, 97, (2, num_tokens), generator=torch.Generator().manual_seed(2))


def assert_same_logits(ours: Transformer, theirs: nn.Module, tolerance: float) -> None:
    with torch.no_grad():
        found, expected = ours(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def edit_json(file: Path, **changes) -> None:
    table = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in table.items() if value != "absent"}))


# Reading


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("float64_llama")
def test_their_model_has_the_same_logits_here(tmp_path, kind, changes):
    theirs = random_reference(kind, **changes)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(read(tmp_path), theirs, 1e-12)


@pytest.mark.parametrize("rope", [LLAMA3, LLAMA3 | {"factor": 8.0}], ids=["3.2", "3.1"])
def test_rotary_positions_of_llama_3_in_float32(tmp_path, rope):
    """Theta 5e5 and 4 pairs: one keeps its frequency, one is in between, two are slowed down."""
    theirs = random_reference("llama", rope_parameters=rope).float()
    theirs.save_pretrained(tmp_path)
    ours = read(tmp_path, torch.float32)
    assert ours.config.rope_scaling == rope["factor"]
    assert_same_logits(ours, theirs, 1e-5)


def test_the_frequencies_of_llama_3():
    """16 of them: some stay, some are in between, some are slowed down. At position 1 the sine."""
    theirs = random_reference("llama", rope_parameters=LLAMA3, head_dim=32).float()
    config = ModelConfig(vocab_size=97, width=32, num_heads=1, num_kv_heads=1, rope_theta=5e5)
    first = torch.tensor([1])
    _, expected = theirs.model.rotary_emb(torch.zeros(1), first[None])
    slowed = dataclasses.replace(config, rope_scaling=32.0)
    _, sine = Transformer(slowed).rotation(first, torch.float32)
    torch.testing.assert_close(sine, expected[0], rtol=2e-6, atol=0)
    _, plain = Transformer(config).rotation(first, torch.float32)
    ratios = (plain / sine)[0, :16].round(decimals=3)
    assert ratios[0] == 1 and ratios[-1] == 32 and any(1 < ratio < 32 for ratio in ratios)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.usefixtures("float64_llama")
def test_many_files_and_an_index(tmp_path, kind):
    theirs = random_reference(kind)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_same_logits(read(tmp_path), theirs, 1e-12)


def test_one_parameter_is_read_without_the_others(tmp_path):
    theirs = random_reference("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    weights = Weights(tmp_path, read_model_config(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in tmp_path.glob("model-*.safetensors"):
        if file.name != index["model.layers.1.mlp.up_proj.weight"]:
            file.unlink()
    expected = theirs.model.layers[1].mlp.up_proj.weight
    assert torch.equal(weights("blocks.1.mlp.up.weight", expected.shape), expected)
    with pytest.raises(ConfigError, match="cannot be read .*fetch the model again"):
        weights("token_embedding.weight", torch.Size([97, 32]))


@pytest.mark.usefixtures("float64_llama")
def test_a_model_saved_without_its_head(tmp_path):
    """So is OpenAI's GPT-2, whose config.json says nothing of tied embeddings either."""
    for kind, prefix in (("gpt2", "transformer."), ("llama", "model.")):
        theirs = random_reference(kind, tie_word_embeddings=True)
        theirs.save_pretrained(tmp_path / kind)
        file = tmp_path / kind / "model.safetensors"
        tensors = {key.removeprefix(prefix): value for key, value in load_file(file).items()}
        tensors["h.0.attn.bias"] = torch.ones(1)  # a mask, which old versions have saved too
        save_file(tensors, file)
        if kind == "gpt2":
            edit_json(
                tmp_path / kind / "config.json",
                tie_word_embeddings="absent",
                layer_norm_epsilon=1e-3,
            )
        assert_same_logits(read(tmp_path / kind), theirs, 1e-12)


def test_the_config_as_transformers_4_has_written_it(tmp_path):
    random_reference("llama", rope_parameters=LLAMA3).save_pretrained(tmp_path)
    expected = read_model_config(tmp_path)
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    edit_json(
        tmp_path / "config.json",
        rope_parameters="absent",
        rope_theta=5e5,
        rope_scaling=scaling,
        head_dim="absent",
    )
    assert read_model_config(tmp_path) == expected
    assert (expected.rope_theta, expected.rope_scaling) == (5e5, 32.0)
    scaling["type"] = scaling.pop("rope_type")  # older still
    edit_json(tmp_path / "config.json", rope_scaling=scaling)
    assert read_model_config(tmp_path) == expected
    edit_json(tmp_path / "config.json", rope_scaling=None, num_key_value_heads="absent")
    assert read_model_config(tmp_path) == dataclasses.replace(
        expected, rope_scaling=1.0, num_kv_heads=4
    )


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_have_the_mean_logit(tmp_path, tied):
    """Rows of zeros have logit 0, and GPT-2's logits are far below: it would write nothing else."""
    theirs = random_reference("gpt2", tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        logits, expected = read(tmp_path, vocab_size=104)(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(logits[..., :97], expected, rtol=1e-12, atol=1e-12)
    mean = expected.mean(-1, keepdim=True).expand(-1, -1, 7)
    torch.testing.assert_close(logits[..., 97:], mean, rtol=1e-6, atol=1e-6)


def test_a_head_that_config_json_calls_tied_must_be_the_embedding(tmp_path):
    theirs = random_reference("llama")
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    with pytest.raises(
        ConfigError,
        match="lm_head.weight is not model.embed_tokens.weight, "
        "although tie_word_embeddings says so; set tie_word_embeddings to false",
    ):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.usefixtures("float64_llama")
def test_a_tied_head_that_was_saved_all_the_same(tmp_path, kind):
    theirs = random_reference(kind, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    file, embedding = tmp_path / "model.safetensors", theirs.get_input_embeddings().weight
    save_file(load_file(file) | {"lm_head.weight": embedding.detach().clone()}, file)
    assert_same_logits(read(tmp_path), theirs, 1e-12)


@pytest.mark.parametrize(
    "kind, extra",
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.self_attn.q_norm"),
        ("gpt2", "transformer.h.0.crossattention.c_attn.weight"),
        ("gpt2", "lm_head.bias"),
    ],
)
def test_a_tensor_that_no_parameter_reads_is_refused(tmp_path, kind, extra):
    random_reference(kind).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {extra: torch.ones(3)}, file)
    with pytest.raises(
        ConfigError,
        match=f"no place for 1 of its {len(tensors) + 1} tensors, "
        f"{re.escape(extra)} among them; leave sizes out",
    ):
        read(tmp_path)


@pytest.mark.parametrize("kind, key", [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_layers_that_config_json_leaves_out_are_refused(tmp_path, kind, key):
    random_reference(kind).save_pretrained(tmp_path, max_shard_size="30KB")
    edit_json(tmp_path / "config.json", **{key: 1})
    with pytest.raises(ConfigError, match="our model has no place for .* tensors"):
        read(tmp_path)


# Writing


OURS = {
    "gpt": ModelConfig("gpt", 97, 40, 2, 24, 3, 3, 56, dropout=0.25, norm_eps=1e-3),
    "gpt-untied": ModelConfig("gpt", 97, 40, 2, 24, 3, 3, 56, tied_embedding=False),
    "llama": ModelConfig("llama", 97, 40, 3, 32, 4, 2, 56, rope_theta=500.0, norm_eps=1e-3),
    "llama-untied": ModelConfig("llama", 97, 40, 3, 32, 4, 4, 56, tied_embedding=False),
    "llama-3": ModelConfig("llama", 97, 40, 3, 32, 4, 1, 56, rope_theta=5e5, rope_scaling=32.0),
}


def write_model(model: Transformer, folder: Path, **options) -> None:
    write(folder, model.config, dict(model.named_parameters()).__getitem__, **options)


@pytest.mark.parametrize("config", OURS.values(), ids=OURS)
@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
@pytest.mark.usefixtures("float64_llama")
def test_transformers_loads_our_model_with_the_same_logits(tmp_path, config, max_file_bytes):
    ours = random_model(config).eval()
    options = {"dtype": torch.float64, "max_file_bytes": max_file_bytes}
    write_model(ours, tmp_path, **options)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_file_bytes < 10**9)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert theirs.dtype == torch.float64
    if config.rope_scaling == 1:  # the float64 form of their rotary positions knows no scaling
        assert_same_logits(ours, theirs, 1e-12)


def test_transformers_scales_rotary_positions_as_we_do(tmp_path):
    ours = random_model(OURS["llama-3"]).float()
    write_model(ours, tmp_path)
    assert_same_logits(ours, transformers.AutoModelForCausalLM.from_pretrained(tmp_path), 1e-5)


@pytest.mark.parametrize("config", OURS.values(), ids=OURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_bit_for_bit(tmp_path, config, dtype):
    ours = random_model(config).to(dtype)
    write_model(ours, tmp_path, dtype=dtype, max_file_bytes=20_000)
    read_config = read_model_config(tmp_path)
    assert dataclasses.replace(read_config, dropout=config.dropout) == config
    again = dict(read(tmp_path, dtype).named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, again[name]), name
    assert len(again) == len(list(ours.parameters()))


def test_their_config_says_our_dropout(tmp_path):
    write_model(random_model(OURS["gpt"]), tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.resid_pdrop, theirs.embd_pdrop, theirs.attn_pdrop) == (0.25, 0.25, 0.25)


def test_no_more_than_a_file_is_held(tmp_path):
    """A parameter is asked for after the file before has been written, and once."""
    ours = random_model(OURS["gpt"])
    parameters, asked = dict(ours.named_parameters()), []

    def value(name: str) -> torch.Tensor:
        asked.append((name, len(list(tmp_path.glob("model-*.safetensors")))))
        assert not (tmp_path / "config.json").exists()  # a folder that is not complete has none
        return parameters[name]

    write(tmp_path, ours.config, value, max_file_bytes=10_000)
    assert sorted(name for name, _ in asked) == sorted(parameters)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert [number for _, number in asked] == sorted(number for _, number in asked)
    assert {number for _, number in asked} == set(range(len(files)))
    sizes = []
    for file in files:
        with safe_open(tmp_path / file, "pt") as opened:
            sizes.append(sum(4 * opened.get_tensor(key).numel() for key in opened.keys()))
    assert index["metadata"]["total_size"] == sum(sizes)
    assert sum(sizes) == 4 * sum(parameter.numel() for parameter in parameters.values())
    assert max(sizes) <= 10_000


def test_a_full_disk_leaves_a_folder_to_try_again(tmp_path, monkeypatch):
    ours = random_model(OURS["gpt"])
    written = []

    def until_full(tensors, path, metadata):
        if len(written) == 2:
            raise SafetensorError("No space left on device")
        save_file(tensors, path, metadata)
        written.append(path)

    monkeypatch.setattr("minitron.hugging_face.weights.save_file", until_full)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        write_model(ours, tmp_path, max_file_bytes=20_000)
    assert len(written) == 2 and not any(tmp_path.iterdir())
    monkeypatch.undo()
    write_model(ours, tmp_path, max_file_bytes=20_000)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("file", ["model.safetensors.index.json", "config.json"])
def test_what_comes_after_the_weights_may_fail_as_well(tmp_path, monkeypatch, error, file):
    def fails(path, table):
        if path.name == file:
            raise error

    monkeypatch.setattr("minitron.hugging_face.weights.write_json", fails)
    with pytest.raises((ConfigError, KeyboardInterrupt)):
        write_model(random_model(OURS["gpt"]), tmp_path, max_file_bytes=20_000)
    assert not any(tmp_path.iterdir())


def test_the_name_of_a_special_token_is_text_for_their_tokenizer_too(tmp_path):
    ours = train_tokenizer(["one text and another one"], 270)
    write_tokenizer(tmp_path, ours, max_length=40)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = f"a {END} b{END}"
    tokens = ours.encode(text).ids
    assert theirs(text)["input_ids"] == tokens and theirs.eos_token_id not in tokens
    assert theirs.decode([*tokens, theirs.eos_token_id], skip_special_tokens=True) == text
    assert theirs.decode([*tokens, theirs.eos_token_id]) == text + END


def test_files_are_filled_in_order():
    assert split({"a": 3, "b": 3, "c": 4, "d": 11, "e": 1}, 10) == [["a", "b", "c"], ["d"], ["e"]]
    assert split({"a": 11}, 10) == [["a"]]
    assert split({"a": 5, "b": 5, "c": 1}, 10) == [["a", "b"], ["c"]]


# What a user can get wrong


MISTAKES = [
    ("llama", {"model_type": "mistral"}, "'mistral', but only gpt2 and llama can be loaded"),
    ("llama", {"attention_bias": True}, "attention_bias = True, but our model has False"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu', but our model has silu"),
    ("llama", {"sliding_window": 4096}, "sliding_window = 4096, but our model has None"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}, but"),
    ("llama", {"head_dim": 16}, "head_dim = 16, but our heads have 32 / 4 = 8"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type = 'yarn' of the rotary positions, but our model has 'llama3'",
    ),
    (
        "llama",
        {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}},
        "high_freq_factor = 8.0 of the rotary positions, but our model has 4.0",
    ),
    (
        "llama",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
        "original_max_position_embeddings = 16 of the rotary positions, but our model has 8192",
    ),
    ("llama", {"hidden_size": "absent"}, "hidden_size is missing"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function = 'gelu', but .* gelu_new or"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "idx = True, but our model has False"),
    ("gpt2", {"n_head": 5}, "model.width = 24 is not a multiple of model.num_heads = 5"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for kind in ("gpt2", "llama"):
        random_reference(kind).float().save_pretrained(folder / kind)
    return folder


@pytest.mark.parametrize("kind, changes, message", MISTAKES, ids=lambda value: str(value)[:30])
def test_a_model_that_cannot_be_built_is_one_line(saved, tmp_path, kind, changes, message):
    shutil.copytree(saved / kind, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_one_line(saved, tmp_path):
    config = read_model_config(saved / "llama")
    shape = torch.Size([56, 32])
    other = dataclasses.replace(config, ffn_width=64)
    with pytest.raises(
        ConfigError,
        match=r"gate_proj.weight has shape \[56, 32\], but "
        r"blocks.0.mlp.gate.weight needs \[64, 32\]; leave sizes out",
    ):
        fill(Transformer(other), Weights(saved / "llama", other))
    with pytest.raises(ConfigError, match=r"shape \[97, 32\], .* needs \[90, 32\]"):  # fewer tokens
        Weights(saved / "llama", config)("token_embedding.weight", torch.Size([90, 32]))
    with pytest.raises(ConfigError, match=r"c_attn.weight has shape \[24, 72\], .* \[24, 75\]"):
        Weights(saved / "gpt2", read_model_config(saved / "gpt2"))(
            "blocks.0.attention.key.weight", torch.Size([25, 24])
        )
    with pytest.raises(ConfigError, match="holds a llama model, but model.family = gpt; leave"):
        Weights(saved / "llama", OURS["gpt"])
    with pytest.raises(ConfigError, match="none of 21 tensors is model.layers.7.mlp.up_proj"):
        Weights(saved / "llama", config)("blocks.7.mlp.up.weight", shape)


def test_folders_that_are_none_are_one_line(saved, tmp_path):
    config = read_model_config(saved / "llama")
    with pytest.raises(ConfigError, match="config.json: there is no such file; name a folder"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: not valid JSON"):
        read_model_config(tmp_path)
    shutil.copy(saved / "llama" / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="holds neither model.safetensors nor"):
        Weights(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="model.safetensors: cannot be read .*fetch the model"):
        Weights(tmp_path, config)
    with pytest.raises(ConfigError, match="holds weights already; choose another folder"):
        write_model(random_model(OURS["gpt"]), tmp_path)
    with pytest.raises(ConfigError, match=r"rope_scaling = 0.5: must be 1 or more"):
        ModelConfig(rope_scaling=0.5)
