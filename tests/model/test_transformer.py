"""The model against `transformers`, its own materialized form, and published parameter counts."""

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.llama import modeling_llama

from minitron import cost
from minitron.config import ModelConfig
from minitron.model.generate import generate
from minitron.model.transformer import Transformer, initialize, materialized_attention

GPT = ModelConfig(
    family="gpt",
    vocab_size=97,
    max_sequence_length=33,
    num_layers=3,
    width=24,
    num_heads=3,
    num_kv_heads=3,
    ffn_width=56,
    tied_embedding=True,
)
LLAMA = ModelConfig(
    family="llama",
    vocab_size=97,
    max_sequence_length=33,
    num_layers=3,
    width=24,
    num_heads=6,
    num_kv_heads=2,
    ffn_width=56,
    tied_embedding=False,
    rope_theta=500.0,
)
# ours -> theirs, inside one block; GPT-2 fuses query, key and value and stores transposed weights
LLAMA_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GPT_NAMES = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def random_model(config: ModelConfig) -> Transformer:
    """Float64, with random norms and biases too, so that no term can hide behind a 0 or a 1."""
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (parameter.dim() == 1))
    return model


def reference_gpt(config: ModelConfig):
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_sequence_length,
            n_embd=config.width,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ffn_width,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            attn_implementation="sdpa",
        )
    ).double()
    outside = {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    }

    def locate(name: str):
        module, _, kind = name.rpartition(".")
        if not module.startswith("blocks"):
            return f"{outside[module]}.{kind}", lambda theirs: theirs
        _, layer, inner = module.split(".", 2)
        theirs = f"transformer.h.{layer}.{GPT_NAMES[inner]}.{kind}"
        if inner.endswith("norm"):
            return theirs, lambda tensor: tensor
        third = {"attention.query": 0, "attention.key": 1, "attention.value": 2}.get(inner)

        def view(tensor):  # Conv1D keeps (in, out); c_attn keeps the three side by side
            columns = tensor if third is None else tensor.chunk(3, dim=-1)[third]
            return columns.T if columns.dim() == 2 else columns

        return theirs, view

    return reference, locate


def reference_llama(config: ModelConfig):
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_sequence_length,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.ffn_width,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_embedding,
            attn_implementation="sdpa",
        )
    ).double()
    outside = {
        "token_embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }

    def locate(name: str):
        module, _, kind = name.rpartition(".")
        if not module.startswith("blocks"):
            return f"{outside[module]}.{kind}", lambda theirs: theirs
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{LLAMA_NAMES[inner]}.{kind}", lambda theirs: theirs

    return reference, locate


@pytest.fixture
def float64_llama(monkeypatch):
    """Lift the two places where transformers computes in float32 whatever the model's dtype."""

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, True) + self.variance_epsilon)

    def rotary(self, x, position_ids):
        K = self.config.hidden_size // self.config.num_attention_heads
        theta = self.config.rope_parameters["rope_theta"]
        frequencies = theta ** -(torch.arange(0, K, 2, dtype=torch.float64) / K)
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary)


def compare(ours: Transformer, reference, locate, tolerance: float = 1e-10) -> None:
    """Copy our weights over; logits and every gradient must agree."""
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            other, view = locate(name)
            view(theirs[other]).copy_(parameter)
    covered = {locate(name)[0] for name, _ in ours.named_parameters()}
    assert covered == set(theirs)

    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(2))
    logits, expected = ours(tokens), reference(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)

    for output in (logits, expected):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in ours.named_parameters():
        other, view = locate(name)
        torch.testing.assert_close(
            parameter.grad,
            view(theirs[other].grad),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )


def test_gpt_agrees_with_transformers():
    compare(random_model(GPT), *reference_gpt(GPT))


def test_llama_agrees_with_transformers(float64_llama):
    compare(random_model(LLAMA), *reference_llama(LLAMA))


def test_llama_agrees_with_unpatched_transformers_in_float32():
    """Nothing lifted, so nothing of ours on their side; float32 keeps 24 bits."""
    reference, locate = reference_llama(LLAMA)
    compare(random_model(LLAMA).float(), reference.float(), locate, tolerance=1e-4)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_materialized_attention_is_the_fused_one(config):
    model = random_model(config)
    tokens = torch.randint(0, 97, (2, 20))
    fused = model(tokens)
    for block in model.blocks:
        block.attention.attention_fn = materialized_attention
    torch.testing.assert_close(model(tokens), fused, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_no_token_sees_the_future(config):
    model = random_model(config)
    tokens = torch.randint(0, 97, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 97
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=0)
    assert (before[:, 12:] - after[:, 12:]).abs().amax(-1).min() > 1e-6


def test_rotary_positions_survive_bfloat16_weights():
    model = Transformer(LLAMA).bfloat16()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[1]))
    model(torch.zeros(1, 33, dtype=torch.int64))
    assert {table.dtype for table in seen} == {torch.float32}


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_initial_weights_depend_on_the_name_alone(config):
    torch.manual_seed(5)
    model = Transformer(config)
    initialize(model, seed=3)
    torch.manual_seed(6)
    with torch.device("meta"):
        other = Transformer(config)
    other.to_empty(device="cpu")
    if config.tied_embedding:
        other.head.weight = other.token_embedding.weight
    state = torch.random.get_rng_state()
    initialize(other.double(), seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.double(), b), name

    first, second = model.blocks[0].attention.key.weight, model.blocks[1].attention.key.weight
    assert not torch.equal(first, second)
    assert model.blocks[0].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.15)
    initialize(other, seed=4)
    assert not torch.equal(first.double(), other.blocks[0].attention.key.weight)


def test_dropout_acts_in_training_only():
    model = random_model(
        ModelConfig(
            vocab_size=97,
            dropout=0.5,
            width=32,
            num_heads=2,
            num_kv_heads=2,
            ffn_width=48,
            num_layers=2,
        )
    )
    tokens = torch.randint(0, 97, (1, 10))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_generate_continues_the_prompt_and_leaves_the_random_state_alone():
    model = random_model(LLAMA).train()
    prompt = torch.randint(0, 97, (2, 5))
    state = torch.random.get_rng_state()
    text = generate(model, prompt, num_tokens=40, seed=1)
    assert text.shape == (2, 45)
    assert torch.equal(text[:, :5], prompt)
    assert torch.equal(text, generate(model, prompt, num_tokens=40, seed=1))
    assert not torch.equal(text, generate(model, prompt, num_tokens=40, seed=2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.training


PUBLISHED = list(csv.DictReader((Path(__file__).parent / "param_counts.csv").open()))


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row["model"])
def test_parameter_counts_are_the_published_ones(row):
    """The built model, the formula and the source (named in the table) agree to the parameter."""
    ints = {
        key: int(row[key])
        for key in (
            "vocab_size",
            "max_sequence_length",
            "num_layers",
            "width",
            "num_heads",
            "num_kv_heads",
            "ffn_width",
        )
    }
    config = ModelConfig(family=row["family"], tied_embedding=row["tied"] == "yes", **ints)
    with torch.device("meta"):
        model = Transformer(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == cost.num_parameters(config) == int(row["parameters"])
