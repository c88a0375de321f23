"""What training costs, as formulas: parameters and FLOPs, bytes held, bytes on the wire.

Each function takes the few integers it needs and cites where its formula comes from.
Counts are exact integers; FLOPs count a multiply-add as two.
"""

from minitron.cost.communication import (
    Link,
    Volume,
    all_to_all_volume,
    broadcast_seconds,
    broadcast_volume,
    chunk_sizes,
    collective_seconds,
    collective_volume,
    doubling_all_reduce_seconds,
    doubling_all_reduce_volume,
    fit_link,
    gather_volume,
    halving_all_reduce_seconds,
    halving_all_reduce_volume,
    hierarchical_all_reduce_seconds,
    message_seconds,
    naive_all_reduce_seconds,
    naive_all_reduce_volume,
    power_of_two,
    reduce_volume,
    ring_all_gather_seconds,
    ring_all_gather_volume,
    ring_all_reduce_seconds,
    ring_all_reduce_volume,
    ring_reduce_scatter_seconds,
    ring_reduce_scatter_volume,
    scatter_volume,
    tree_all_reduce_seconds,
)
from minitron.cost.compute import (
    PUBLISHED,
    RecomputeKind,
    backward_flops_per_token,
    forward_flops_per_token,
    num_block_parameters,
    num_norm_parameters,
    num_parameters,
    published_llama,
    recompute_flops_per_token,
    training_flops_per_token,
)
from minitron.cost.context import ContextKind, context_parallel_volume
from minitron.cost.memory import (
    RECIPES,
    AttentionKind,
    Recipe,
    activation_bytes,
    activation_bytes_per_layer,
    attention_bytes,
    model_state_bytes,
    model_state_table,
    norm_statistics_bytes,
)
from minitron.cost.pipeline import (
    Bubble,
    activations_held,
    interleaved_activation_factor,
    pipeline_bubble,
    pipeline_volume,
    sequential_bubble,
    v_bubble,
    zb_h1_bubble,
)
from minitron.cost.sharding import (
    Accumulation,
    StepCollectives,
    hybrid_volume,
    step_collectives,
    step_holdings,
    zero_bytes,
    zero_holdings,
    zero_volume,
)
from minitron.cost.tensor import (
    Layout,
    tensor_parallel_calls,
    tensor_parallel_parameters,
    tensor_parallel_volume,
    vocabulary_parallel_volume,
)

__all__ = [
    "PUBLISHED", "RECIPES", "Accumulation", "AttentionKind", "Bubble", "ContextKind", "Layout",
    "Link", "Recipe", "RecomputeKind", "StepCollectives", "Volume", "activation_bytes",
    "activation_bytes_per_layer", "activations_held", "all_to_all_volume", "attention_bytes",
    "backward_flops_per_token", "broadcast_seconds", "broadcast_volume", "chunk_sizes",
    "collective_seconds", "collective_volume", "context_parallel_volume",
    "doubling_all_reduce_seconds", "doubling_all_reduce_volume", "fit_link",
    "forward_flops_per_token", "gather_volume", "halving_all_reduce_seconds",
    "halving_all_reduce_volume", "hierarchical_all_reduce_seconds", "hybrid_volume",
    "interleaved_activation_factor", "message_seconds", "model_state_bytes", "model_state_table",
    "naive_all_reduce_seconds", "naive_all_reduce_volume", "norm_statistics_bytes",
    "num_block_parameters", "num_norm_parameters", "num_parameters", "pipeline_bubble",
    "pipeline_volume", "power_of_two", "published_llama", "recompute_flops_per_token",
    "reduce_volume", "ring_all_gather_seconds", "ring_all_gather_volume",
    "ring_all_reduce_seconds", "ring_all_reduce_volume", "ring_reduce_scatter_seconds",
    "ring_reduce_scatter_volume", "scatter_volume", "sequential_bubble", "step_collectives",
    "step_holdings", "tensor_parallel_calls", "tensor_parallel_parameters",
    "tensor_parallel_volume", "training_flops_per_token", "tree_all_reduce_seconds", "v_bubble",
    "vocabulary_parallel_volume", "zb_h1_bubble", "zero_bytes", "zero_holdings", "zero_volume",
]
