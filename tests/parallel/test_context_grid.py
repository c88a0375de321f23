"""Context parallelism together with every other axis, as `parallelize` puts them together."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.mesh import Mesh
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.launch import run
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import IGNORED
from minitron.proof.difference import first_difference
from minitron.proof.oracle import sample_batches, trainings
from minitron.step import accumulate_over_ranks
from tests.parallel.records import SGD, assert_same
from tests.tiers import collected, in_tiers, in_turn
from tools.grid import apart, divide, leave_undivided, on_cpu, on_meta

V, S = 32, 24


def config_of(family: str, recompute: str = "none", **parallel) -> Config:
    """A llama has grouped queries; 4 layers, for as many stages or two segments of two."""
    num_layers = 4 if "pp" in parallel or recompute == "sqrt" else 2
    kv_heads = 12 if family == "gpt" else 4
    model = ModelConfig(
        family, V, S, num_layers, 24, 12, kv_heads, 24, tied_embedding=family == "gpt"
    )
    train = TrainConfig(global_batch_size=8, micro_batch_size=1, recompute=recompute)
    return Config(model, DataConfig(sequence_length=S), train, ParallelConfig(**parallel))


gpt, llama = partial(config_of, "gpt", cp=2), partial(config_of, "llama", cp=2)
V_SHAPED = {"pp": 2, "chunks": 2}
CASES = {
    "bucketed": llama(),
    "bucketed, all-gather": gpt(context="all-gather"),
    "bucketed, ulysses": llama(context="ulysses"),
    "zero 1": gpt(zero=1),
    "zero 1, overlapped, ulysses": llama(zero=1, overlap_gather=True, context="ulysses"),
    "zero 2, all-gather": llama(zero=2, context="all-gather"),
    "zero 2 once a step": gpt(zero=2, sync_every_micro_batch=False),
    "zero 3": llama(zero=3),
    "zero 3, ulysses, recomputed": gpt("full", zero=3, context="ulysses"),
    "zero 3 kept, recomputed by sqrt": llama("sqrt", zero=3, reshard_each_pass=False),
    "all ranks a sequence, zero 3": config_of("llama", cp=4, zero=3),
    "hybrid sharding": gpt(zero=2, dp=2, replicas=2),
    "hybrid sharding, zero 3": llama(zero=3, dp=2, replicas=2, context="all-gather"),
    # of a tied embedding both stages hold a copy, in a flat buffer of its own
    "tied embedding, replicas, zero 1": config_of("gpt", pp=2, dp=2, replicas=2, zero=1),
    "tied embedding, replicas, zero 2": config_of("gpt", pp=2, dp=2, replicas=2, zero=2),
    "tied embedding, replicas, zero 3": config_of("gpt", pp=2, dp=2, replicas=2, zero=3),
    "tensor": llama(tp=2),
    "tensor, all-gather": gpt("selective", tp=2, context="all-gather"),
    "sequence": gpt(tp=2, sequence=True),
    "sequence, ulysses, zero 1": llama("selective", tp=2, sequence=True, context="ulysses", zero=1),
    "sequence, recomputed": llama("full", tp=2, sequence=True, zero=3),
    "pipeline": gpt(pp=2),
    "zero bubble, all-gather": llama(pp=2, schedule="zero-bubble", context="all-gather"),
    "interleaved, ulysses, zero 1": llama(
        **V_SHAPED, schedule="interleaved", context="ulysses", zero=1
    ),
    "dualpipe-v, zero 3": gpt(**V_SHAPED, schedule="dualpipe-v", zero=3),
}
KEPT = {  # by `make test`: every kind of context parallelism, with every other axis and ZeRO stage
    "zero 1, overlapped, ulysses",
    "zero 3 kept, recomputed by sqrt",
    "hybrid sharding, zero 3",
    "tied embedding, replicas, zero 1",
    "sequence, ulysses, zero 1",
    "dualpipe-v, zero 3",
}

SEQUENCES = 9, 8  # of each step: with two data-parallel ranks one has more
EVEN = 8, 4  # or a mutant's messages do not match


def train(
    group,
    config: Config,
    apply,
    make_model,
    num_micro_batches: int,
    sequences=SEQUENCES,
    optimizers=None,
):
    batches = sample_batches(sequences, V, S)
    return trainings(
        group,
        partial(apply, config),
        partial(make_model, config),
        batches,
        num_micro_batches,
        optimizers,
    )


def of_one_process(config: Config, sequences=SEQUENCES):
    return train(SINGLE_RANK, config, leave_undivided, on_cpu, 1, sequences)


# Mutations: what only the grid can get wrong


MUTANTS = {
    "gradients and losses reduced over dp alone": (  # slime PR 1366
        patch.object(Mesh, "joined_group", lambda self, *axes: self.group(axes[0])),
        "differs between ranks, together they are right: never reduced?",
    ),
    "ranks of a sequence read other samples": (  # prime-rl 2359
        patch.object(Grid, "data_part", property(lambda self: self.data.data_part)),
        "model: loss",
    ),
    "none": (nullcontext(), None),
}


def train_all(group, cases):
    found = {"mutants": {}, "cases": {}, "counted": counted_unequally(group)}
    for name, (patched, _) in MUTANTS.items():
        with patched:
            found["mutants"][name] = train(group, CASES["bucketed"], divide, on_meta, 1, EVEN, SGD)
    for name, optimizers in cases.items():
        found["cases"][name] = train(
            group,
            CASES[name],
            divide,
            on_meta,
            4 if CASES[name].parallel.pp > 1 else 2,
            optimizers=optimizers,
        )
    return found


@pytest.fixture(scope="module")
def ranks(request):
    return run(train_all, 4, in_turn(request, collected(request, "case")), timeout=300, watch=False)


@pytest.mark.parametrize("case", in_tiers(KEPT, CASES))
def test_it_is_the_same_training(ranks, case):
    by_rank = [done["cases"][case] for done in ranks]
    assert_same(of_one_process(CASES[case]), by_rank)
    assert apart(by_rank) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutation_is_seen(ranks, name):
    message = MUTANTS[name][1]
    expected = of_one_process(CASES["bucketed"], EVEN)["SGD"]
    found = first_difference(expected, [done["mutants"][name]["SGD"] for done in ranks])
    assert found is None if message is None else message in found, found


# A step with unequal numbers of counted tokens, on data-parallel ranks and on parts of a sequence


def counted_unequally(group):
    config, apply, make_model = (
        (CASES["zero 3"], divide, on_meta)
        if group is not SINGLE_RANK
        else (CASES["zero 3"], leave_undivided, on_cpu)
    )
    model = make_model(config).double()
    parallel = apply(config, model, group)
    parallel.shard(torch.optim.SGD([p for p in model.parameters() if p.requires_grad]))

    (tokens,) = sample_batches((4,), V, S)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3:], targets[1, :17], targets[2, 5:9] = IGNORED, IGNORED, IGNORED
    index, count = parallel.data_part
    pairs = [(inputs[k : k + 1], targets[k : k + 1]) for k in range(index, 4, count)]
    loss = accumulate_over_ranks(model, pairs, parallel)
    total = parallel.sum_losses(model, pairs)
    return loss, parallel.mean(total) * count, parallel.full_gradients()


def test_each_counted_token_counts_once(ranks):
    expected = counted_unequally(SINGLE_RANK)
    for done in ranks:
        torch.testing.assert_close(done["counted"], expected, rtol=1e-12, atol=1e-15)
