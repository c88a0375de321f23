"""Our training step against plain PyTorch and `transformers`, side by side in one run.

    python benchmarks/train_step.py                  # CPU: float32
    python benchmarks/train_step.py --device cuda    # GPU: bf16, with and without compile

All train the same architecture, of the same shapes, on the same tokens with the same optimizer:
forward, loss, backward, clip, fused AdamW. Plain is the loop that calls these one after the other
on our model: what our step adds to the sum of its parts. They take turns, round by round, so that a
noisy machine disturbs all alike; a ratio is the median over the rounds. Results of a run go to
benchmarks/results/ with the hardware, the versions and the command.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from common import race
from torch import Tensor, nn

from minitron import cost
from minitron.config import ModelConfig, TrainConfig
from minitron.measure.clock import Clock, peak_flops
from minitron.model.transformer import Transformer, initialize
from minitron.precision import low_precision
from minitron.step import make_optimizer, train_step
from teaching.lab.gpu_models import SPEED, MeasuredStep

Step = Callable[[list[tuple[Tensor, Tensor]]], object]
"""Of micro-batches: inputs and targets (B, S)."""

SIZES = {
    "cpu": {
        "gpt": MeasuredStep(ModelConfig("gpt", 4096, 256, 4, 256, 4, 4, 1024), 8, 8),
        "llama": MeasuredStep(ModelConfig("llama", 4096, 256, 4, 256, 4, 2, 768), 8, 8),
    },
    "cuda": {"gpt": SPEED["GPT-2 124M"], "llama": SPEED["Llama 1.3B"]},
}


def our_step(model: Transformer, device: torch.device, optimizer=None, compiled=False) -> Step:
    forward = low_precision(model, device) if device.type == "cuda" else model
    if compiled:
        forward = torch.compile(forward)
    optimizer = optimizer or make_optimizer(model, TrainConfig(), device)
    return lambda micro_batches: train_step(forward, optimizer, micro_batches, 1e-4, 1.0)


def plain_step(model: Transformer, device: torch.device, optimizer=None, compiled=False) -> Step:
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of
    return loop(loss_of, model, optimizer or make_optimizer(model, TrainConfig(), device))


def their_step(model: nn.Module, device: torch.device, optimizer=None, compiled=False) -> Step:
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return model(inputs, shift_labels=targets, labels=targets, use_cache=False).loss

    loss_of = torch.compile(loss_of) if compiled else loss_of
    return loop(loss_of, model, optimizer or make_optimizer(model, TrainConfig(), device))


def loop(
    loss_of: Callable[[Tensor, Tensor], Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Step:
    """What everybody writes."""

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> None:
        optimizer.zero_grad()
        for inputs, targets in micro_batches:
            (loss_of(inputs, targets) / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def our_model(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    initialize(model, seed=0)
    return model


def their_model(config: ModelConfig) -> nn.Module:
    import transformers  # here: on_gpu/mfu.py runs where it is not installed

    if config.family == "gpt":
        return transformers.GPT2LMHeadModel(
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
                bos_token_id=None,
                eos_token_id=None,
                loss_type="ForCausalLM",
            )
        )
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_sequence_length,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.ffn_width,
            tie_word_embeddings=config.tied_embedding,
            attn_implementation="sdpa",
            loss_type="ForCausalLM",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write the table here as Markdown too")
    options = parser.parse_args()
    device = torch.device(options.device)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = peak_flops(device, dtype)
    lines = [
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {version('transformers')}, {dtype}; `{' '.join(['python', *sys.argv])}`",
        "",
        "| model | parameters | compile | ours, tokens/s | plain, tokens/s "
        "| transformers, tokens/s | ours / plain | ours / transformers | our MFU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for family, measured in SIZES[device.type].items():
        for compiled in (False, True) if device.type == "cuda" else (False,):
            row = compare(family, measured, device, compiled, options.rounds, peak)
            print(row)
            lines.append(row)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def random_micro_batches(step: MeasuredStep, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return a step's inputs and targets, of random tokens."""
    shape = step.sequences, step.sequence_length + 1
    tokens = torch.randint(0, step.model.vocab_size, shape, device=device)
    return [
        (part[:, :-1].contiguous(), part[:, 1:].contiguous())
        for part in tokens.split(step.micro_batch_size)
    ]


def compare(
    family: str, measured: MeasuredStep, device: torch.device, compiled: bool, rounds: int, peak
) -> str:
    """One row of the table."""
    config = measured.model
    torch.manual_seed(0)
    micro_batches = random_micro_batches(measured, device)
    models = {our_step: our_model, plain_step: our_model, their_step: their_model}
    steps = [
        build(model(config).to(device), device, compiled=compiled)
        for build, model in models.items()
    ]
    sides = race([partial(step, micro_batches) for step in steps], device, rounds, warm_up=3)

    plain, theirs = (
        statistics.median(b / a for a, b in zip(sides[0], other, strict=True))
        for other in sides[1:]
    )
    speeds = [measured.num_tokens / statistics.median(seconds) for seconds in sides]
    clock = Clock(cost.training_flops_per_token(config, measured.sequence_length), peak, device)
    mfu = clock.mfu(speeds[0])
    share = "unknown" if mfu is None else f"{100 * mfu:.1f} %"
    return (
        f"| {family} | {cost.num_parameters(config) / 1e6:.1f} M | {'yes' if compiled else 'no'} "
        f"| {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[2]:,.0f} | {plain:.2f} | {theirs:.2f} "
        f"| {share} |"
    )


if __name__ == "__main__":
    main()
