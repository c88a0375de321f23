"""Which functions of the package would be an answer to which exercise.

The module that an exercise `replaces` has functions of the same names; here are the others, by
another name or in another module. An answer that calls one is told so.
"""

from teaching.exercises import Exercise, replaced

OTHERS: dict[str, tuple[str, ...]] = {
    "1.1": ("minitron.step:accumulate_over_ranks", "minitron.step:forward_backward"),
    "1.3": ("minitron.cost:num_block_parameters", "minitron.cost:forward_flops_per_token",
            "minitron.cost:backward_flops_per_token"),
    "2.1": ("minitron.cost:model_state_bytes", "minitron.cost:model_state_table"),
    "2.2": ("minitron.cost:activation_bytes_per_layer", "minitron.cost:activation_bytes",
            "minitron.cost:attention_bytes"),
    "3.2": ("minitron.model.recompute:segments_for_budget",),
    "4.1": ("minitron.parallel.data.ddp:DataParallel",),
    "4.3": ("minitron.parallel.data.ddp:DataParallel",
            "minitron.parallel.data.ddp:BucketedDataParallel"),
    "4.4": ("minitron.parallel.data.ddp:DataParallel",),
    "5.3": ("minitron.cost:ring_reduce_scatter_volume", "minitron.cost:ring_all_gather_volume"),
    "5.4": ("minitron.cost:fit_link",),
    **dict.fromkeys(("6.2", "6.3"), (
        "minitron.parallel.data.zero:Zero1", "minitron.parallel.data.zero:Zero2",
        "minitron.parallel.flat:FlatShards")),
    "6.4": ("minitron.parallel.data.fsdp:FullyShardedDataParallel",
            "minitron.parallel.data.units:Unit", "minitron.parallel.flat:FlatUnit"),
    "7.2": ("minitron.parallel.tensor.layers:RowParallelLinear",),
    "9.1": tuple(f"minitron.parallel.pipeline.schedules:{name}" for name in (
        "alternate", "sequential", "interleaved", "zero_bubble")),
    "9.2": ("minitron.cost.pipeline:pipeline_bubble", "minitron.cost.pipeline:activations_held",
            "minitron.parallel.pipeline.schedule_check:peak_activations",
            "minitron.parallel.pipeline.simulator:simulate"),
    "10.2": ("minitron.precision:LossScale",),
    "10.3": ("minitron.precision:MasterWeights",),
    "10.5": ("minitron.model.float8:quantize",),
    "11.3": ("minitron.plan.search:layouts", "minitron.plan.search:decisions"),
    "12.1": ("minitron.cost:training_flops_per_token", "minitron.cost:recompute_flops_per_token"),
    "12.2": ("minitron.cost:tensor_parallel_parameters", "minitron.cost:zero_holdings",
             "minitron.plan.dryrun:dry_run",
             "minitron.parallel.pipeline.schedule_check:peak_activations"),
    "12.3": ("minitron.parallel.pipeline.simulator:simulate",
             "minitron.parallel.pipeline.schedule_check:peak_activations"),
    "12.4": ("minitron.plan.search:search", "minitron.plan.search:decisions",
             "minitron.plan.search:layouts", "minitron.plan.decide:decide"),
}
"""By exercise: "module:function" or "module:Class"."""


def package_answers(exercise: Exercise) -> tuple[str, ...]:
    """All of them for this exercise."""
    own = replaced(exercise) if exercise.replaces else ()
    named = [f"{exercise.replaces}:{name}" for name in own]
    return tuple(dict.fromkeys([*named, *OTHERS.get(exercise.id, ())]))
