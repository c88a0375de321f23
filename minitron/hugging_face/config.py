"""config.json, as `transformers` writes it for Llama and GPT-2, and our `ModelConfig`.

Read in this order: KEYS, read_model_config, read_field, read_rope, to_hugging_face.
"""

from math import inf
from pathlib import Path

from minitron.config import ConfigError, ModelConfig, require
from minitron.system.files import file_in, read_json, reason

FAMILIES = {"gpt2": "gpt", "llama": "llama"}
"""Their model_type, and our family."""

KEYS = {
    "gpt": {
        "vocab_size": "vocab_size",
        "max_sequence_length": "n_positions",
        "num_layers": "n_layer",
        "width": "n_embd",
        "num_heads": "n_head",
        "ffn_width": "n_inner",
        "tied_embedding": "tie_word_embeddings",
        "norm_eps": "layer_norm_epsilon",
    },
    "llama": {
        "vocab_size": "vocab_size",
        "max_sequence_length": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "width": "hidden_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_width": "intermediate_size",
        "tied_embedding": "tie_word_embeddings",
        "norm_eps": "rms_norm_eps",
    },
}
"""Our field, and their key."""

DEFAULTS = {
    "gpt": {"n_inner": None, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
    "llama": {"num_key_value_heads": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
}
"""What `transformers` takes for keys that a file may leave out."""

KNOWN = {
    "gpt": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the tanh form
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
        "quantization_config": (None,),
    },
}
"""Keys that change what is computed, with what our model computes; the first is the default."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What `rope_scaling` means, beside its factor: every Llama since 3.1 has these."""


LARGEST = 2**24
"""Of every size of a model: more than any has, and a bound to what a file can ask for."""


def read_model_config(folder: Path) -> ModelConfig:
    """Read the model that `folder/config.json` describes; dropout is left to the run.

    Raises ConfigError for a model that cannot be built here.
    """
    file = folder / "config.json"
    theirs = read_file(folder, file.name)
    kind = theirs.get("model_type")
    require(
        isinstance(kind, str) and kind in FAMILIES,
        f"{file}: model_type = {kind!r:.50}, but only {' and '.join(FAMILIES)} can be loaded",
        "choose such a model",
    )
    family = FAMILIES[kind]
    for key, known in KNOWN[family].items():
        value = theirs.get(key, known[0])
        require(
            value in known,
            f"{file}: {key} = {value!r:.50}, but our model has {' or '.join(map(str, known))}",
            "choose another model",
        )

    theirs = DEFAULTS[family] | theirs
    ours = {field: read_field(theirs, key, field, file) for field, key in KEYS[family].items()}
    if family == "gpt":
        ours["num_kv_heads"] = ours["num_heads"]
        ours["ffn_width"] = ours["ffn_width"] or 4 * ours["width"]
    else:
        ours["num_kv_heads"] = ours["num_kv_heads"] or ours["num_heads"]
        ours |= read_rope(theirs, file)
    model = ModelConfig(family, **ours)

    head_width = theirs.get("head_dim") or model.head_width
    require(
        head_width == model.head_width,
        f"{file}: head_dim = {head_width!r:.50}, but our heads "
        f"have {model.width} / {model.num_heads} = {model.head_width}",
        "choose another model",
    )
    return model


def read_field(theirs: dict, key: str, field: str, file: Path):
    """Read what `key` says of our `field`, and check its type and size."""
    require(key in theirs, f"{file}: {key} is missing", "fetch the model again")
    value = theirs[key]
    if field == "tied_embedding":
        require(isinstance(value, bool), f"{file}: {key} = {value!r:.50}: must be true or false")
    elif field == "norm_eps":
        require_number(value, f"{file}: {key}")
    elif value is not None or field not in ("num_kv_heads", "ffn_width"):
        require(
            type(value) is int and 0 < value <= LARGEST,
            f"{file}: {key} = {value!r:.50}: must be a whole number from 1 to {LARGEST:,}",
            "fetch the model again",
        )
    return value


def require_number(value, where: str) -> None:
    is_number = type(value) in (int, float) and 0 < value < inf
    require(
        is_number, f"{where} = {value!r:.50}: must be a number above 0", "fetch the model again"
    )


def read_rope(theirs: dict, file: Path) -> dict[str, float]:
    """Read our rotary fields: transformers 5 has one table for them, 4 has two keys."""
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    require(
        isinstance(rope, dict),
        f"{file}: {rope!r:.50} does not describe rotary positions",
        "fetch the model again",
    )
    theta = rope.get("rope_theta") or theirs.get("rope_theta") or 10_000.0
    require_number(theta, f"{file}: rope_theta")
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return {"rope_theta": theta}
    for key, known in LLAMA3_ROPE.items():
        value = rope.get(key, rope.get("type") if key == "rope_type" else None)
        require(
            value == known,
            f"{file}: {key} = {value!r:.50} of the rotary positions, but our model has {known!r}",
            "choose another model",
        )
    require_number(rope.get("factor"), f"{file}: factor")
    return {"rope_theta": theta, "rope_scaling": rope["factor"]}


def to_hugging_face(model: ModelConfig, dtype: str, end: int | None) -> dict:
    """Describe `model` as config.json does; `end` is the token that stands between documents."""
    theirs = {key: getattr(model, field) for field, key in KEYS[model.family].items()}
    theirs |= {"dtype": dtype, "bos_token_id": end, "eos_token_id": end}
    if model.family == "gpt":
        dropout = {f"{place}_pdrop": model.dropout for place in ("resid", "embd", "attn")}
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **theirs, **dropout}

    theirs |= {"rope_theta": model.rope_theta, "attention_dropout": model.dropout}
    if model.rope_scaling > 1:
        theirs["rope_scaling"] = LLAMA3_ROPE | {"factor": model.rope_scaling}
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **theirs}


def read_file(folder: Path, name: str) -> dict:
    """Read a file of a model's folder; raises ConfigError if it is missing or damaged."""
    path = folder / name
    require(
        path.exists(),
        f"{path}: there is no such file",
        "name a folder that save_pretrained of transformers has written",
    )
    try:
        return read_json(file_in(folder, name))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {reason(error)}", "fetch the model again") from None
