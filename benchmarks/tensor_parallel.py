"""Tensor and sequence parallelism against PyTorch's DTensor (`parallelize_module`) in one run.

    python benchmarks/tensor_parallel.py             # CPU: gloo, 2 and 4 ranks
    torchrun --nproc-per-node 8 --local-ranks-filter 0 benchmarks/tensor_parallel.py --ranks 8

Every side trains the same Llama from the same weights on the same tokens: forward, loss over the
divided vocabulary, backward, AdamW. They take turns, round by round, so that a noisy machine
disturbs all alike; a ratio is the median over the rounds, of the slowest rank. A side whose loss
differs from the first one's is an error. Bytes are counted in separate steps, one side at a time:

    peak    bytes held at the peak of a step, of the rank with the most. On the CPU the real sizes
            of all storages that operators touch; on CUDA, what the allocator counted.
    sent    bytes that a rank sends in a step, the mean over the ranks, by the ledger's algorithms.
            Also in units of b s h (t-1)/t elements per block: tensor parallelism is 8, without
            embedding, head and loss.

The second table shows what the weight gradients hide of the all-reduces of input gradients, half
of all that travels in a block: "exposed" is how long a step waits for transfers, "alone" what these
would take one after the other. On the CPU the network is emulated, for collectives of
torch.distributed; DTensor's own bypass it.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    BANDWIDTH,
    LATENCY,
    Step,
    compare,
    conditions,
    overlap_rows,
    publish,
    read_options,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from minitron.config import ModelConfig
from minitron.launch.slow_network import SlowNetwork
from minitron.model.transformer import Transformer, initialize
from minitron.parallel.tensor.layers import AllReduceExchange, apply_tensor_parallel
from minitron.parallel.tensor.sequence import apply_sequence_parallel

SIZES = {  # model, sequences per step, S
    "cpu": (ModelConfig("llama", 4096, 128, 4, 512, 8, 8, 1536, tied_embedding=False), 4, 128),
    "cuda": (
        ModelConfig("llama", 32768, 4096, 4, 4096, 32, 8, 14336, tied_embedding=False),
        1,
        4096,
    ),
}
RIVALS = {  # ours -> theirs
    "tensor": "DTensor",
    "sequence": "DTensor, sequence",
    "sequence, kept": "DTensor, sequence",
}
OVERLAP_SIDES = ["tensor", "tensor, one after the other"]

make_optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)


# A step of each side


def make_step(side: str, group: dist.ProcessGroup, device: torch.device) -> Step:
    config, num_sequences, S = SIZES[device.type]
    model = Transformer(config).to(device)
    initialize(model, seed=0)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)  # the same samples on every rank
    tokens = torch.randint(config.vocab_size, (num_sequences, S + 1), generator=generator)
    inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    make = make_theirs if side.startswith("DTensor") else make_ours
    compute_gradients = make(side, model, group, device)
    # A fused step cannot mix DTensors with the plain tensors that PyTorch's plan leaves whole.
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizer = make_optimizer([{"params": alike} for alike in kinds.values()])

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = compute_gradients(inputs, targets)
        optimizer.step()
        return loss.detach()

    return step


def make_ours(side: str, model: nn.Module, group: dist.ProcessGroup, device: torch.device):
    if side.startswith("sequence"):
        parallel = apply_sequence_parallel(model, group, regather="kept" not in side)
    else:
        parallel = apply_tensor_parallel(model, group)
    if "one after the other" in side:
        parallel.exchange.__class__ = OneAfterTheOther

    def compute_gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = parallel.summed_loss(model(inputs), targets) / targets.numel()
        loss.backward()
        parallel.finish()
        return loss

    return compute_gradients


class OneAfterTheOther(AllReduceExchange):
    """Waits for the sum of the input gradients before the weight gradients are computed."""

    def start_reduce(self, grad_partial: Tensor) -> Callable[[], Tensor]:
        grad = super().start_reduce(grad_partial)()
        return lambda: grad


def make_theirs(side: str, model: nn.Module, group: dist.ProcessGroup, device: torch.device):
    mesh = DeviceMesh.from_group(group, device.type)
    parallelize_module(
        model, mesh, dtensor_plan(between=Shard(1) if "sequence" in side else Replicate())
    )

    def compute_gradients(inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            loss.backward()
        return loss

    return compute_gradients


def dtensor_plan(between: Shard | Replicate) -> dict:
    """PyTorch's plan for a Llama; `between` is the layout of (B, S, D) outside the cut layers.

    The inputs of a block's two branches are prepared once, so that the input gradients of query,
    key and value travel as one sum.
    """
    prepare = partial(PrepareModuleInput, use_local_output=False)
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention": prepare(
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        "blocks.*.mlp": prepare(input_layouts=between, desired_input_layouts=Replicate()),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel()
    if isinstance(between, Shard):
        for name in ("blocks.*.attention_norm", "blocks.*.mlp_norm", "final_norm"):
            plan[name] = SequenceParallel(use_local_output=True)
    return plan


def table(num_ranks: int, rounds: int) -> list[str]:
    """One row per side; sent also in units of b s h (t-1)/t elements per block."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    config, num_sequences, S = SIZES[kind]
    elements = num_sequences * S * config.width * config.num_layers
    unit = elements * (2 if kind == "cuda" else 4) * max(1, num_ranks - 1) / num_ranks
    return compare(make_step, RIVALS, num_ranks, rounds, unit)


def main() -> None:
    options = read_options(__doc__, rounds=12, sizes=SIZES)
    on_gpu = torch.cuda.is_available()
    lines = [
        conditions("bfloat16" if on_gpu else "float32"),
        "",
        "| ranks | version | ms per step | peak MB | sent MB | sent, b s h (t-1)/t per block "
        "| against | time, ours / theirs | peak, ours / theirs |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row for num_ranks in options.ranks for row in table(num_ranks, options.rounds)),
        "",
        "What the weight gradients hide"
        + ("" if on_gpu else f", {SlowNetwork(LATENCY, BANDWIDTH)}")
        + ":",
        "",
        "| ranks | version | ms per step | transfers alone, ms | exposed, ms | hidden |",
        "|---|---|---|---|---|---|",
        *overlap_rows(make_step, OVERLAP_SIDES, options.ranks[0], options.rounds),
    ]
    publish(lines, options.out)


if __name__ == "__main__":
    main()
