"""Hybrid sharding: replicas of shards train as one process, and send what the formulas say."""

from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from minitron.comm.agreement import SINGLE_RANK
from minitron.comm.collectives import broadcast_together
from minitron.comm.mesh import make_mesh
from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.cost import num_parameters
from minitron.cost.communication import ring_all_gather_volume, ring_reduce_scatter_volume
from minitron.cost.sharding import replica_volume
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.parallel.data.axis import DataAxis
from minitron.parallel.data.fsdp import apply_fsdp
from minitron.parallel.data.zero import apply_zero1, apply_zero2
from minitron.parallel.flat import FlatShards
from minitron.parallel.grid import Grid
from minitron.parallel.one_device import OneDevice
from minitron.parallelize import lay_out
from minitron.proof.difference import first_difference
from minitron.proof.oracle import sample_batches, small_gpt, small_llama, trainings
from minitron.running.training import Training
from tests.parallel.records import SGD, assert_same
from tests.parallel.saving import load, saved
from tests.tiers import collected, in_tiers, in_turn, tiered

SMALL = 6000  # bytes: several buckets in a small model
STAGES = {
    1: partial(apply_zero1, bucket_bytes=SMALL),
    2: partial(apply_zero2, bucket_bytes=SMALL),
    3: apply_fsdp,
}
MODES = {  # how often a gradient is reduce-scattered and all-reduced, of m micro-batches
    "all of it each time": dict(sync_replicas_every_micro_batch=True),
    "replicas once": {},
    "once": dict(sync_every_micro_batch=False),
}
CASES = [(stage, mode) for stage in STAGES for mode in MODES if stage > 1 or mode == "once"]
KEPT = {(1, "once"), (2, "all of it each time"), (3, "replicas once"), (3, "once")}
"""By `make test`."""
STEPS = (9, 8)
MICRO_BATCHES = 2  # on each rank


def groups_of(world):
    """The ranks as 2 replicas of 2 shards."""
    mesh = make_mesh("cpu", replicas=2, dp=2)
    return mesh.group("dp"), mesh.group("replicas")


def applied(groups, stage, mode):
    def apply(model, world):
        shards, replicas = groups
        return STAGES[stage](model, shards, replicas=replicas, **MODES[mode])

    return apply


# Mutations


def within_a_replica(self, tensors):
    """The replicas start from weights of their own."""
    broadcast_together(list(tensors), 0, self.group)


def earlier_lost(self, over_replicas=True):
    """What earlier micro-batches have left is overwritten before it travels."""
    self.replica_sum = None
    finish_reduce(self, over_replicas)


def earlier_not_sent(self, over_replicas=True):
    """It is added after the all-reduce, to each replica's own (PyTorch's pull request 125484)."""
    earlier, self.replica_sum = self.replica_sum, None
    finish_reduce(self, over_replicas)
    self.accumulate_reduced()
    if earlier is not None:
        if over_replicas:
            self.grad_shard += earlier
        else:
            self.replica_sum += earlier


finish_reduce = FlatShards.finish_reduce
MUTANTS = {
    "replicas start differently": (
        DataAxis,
        "copy_from_rank_0",
        within_a_replica,
        "initial weights differ on rank 2, 3 alone: no broadcast",
    ),
    "earlier micro-batches lost": (
        FlatShards,
        "finish_reduce",
        earlier_lost,
        "gradient not proportional",
    ),
    "earlier micro-batches not sent to the replicas": (
        FlatShards,
        "finish_reduce",
        earlier_not_sent,
        "gradient differs between ranks",
    ),
}


# On four ranks


def train_all(world, cases, mutants, wires, stages, modes):
    groups, batches = groups_of(world), sample_batches(STEPS)
    done = {
        case: trainings(
            world, applied(groups, *case), small_gpt, batches, MICRO_BATCHES, optimizers
        )
        for case, optimizers in cases.items()
    }
    for name, stage in mutants:
        where, method, replacement, _ = MUTANTS[name]
        with patch.object(where, method, replacement):
            done[name, stage] = trainings(
                world,
                applied(groups, stage, "replicas once"),
                small_gpt,
                batches[:1],
                MICRO_BATCHES,
                SGD,
            )["SGD"]
    done["wire"] = {case: wire(groups, *case) for case in wires}
    done["fully_shard"] = torchs(world), {mode: ours(groups, mode) for mode in modes}
    done["pieces"] = {stage: num_pieces(world, stage) for stage in stages}
    done["clipped"] = {stage: clipped(groups, stage) for stage in stages}
    done["state"] = {stage: state_of(world, groups, stage) for stage in stages}
    return done


@pytest.fixture(scope="module")
def ranks(request):
    cases = in_turn(request, collected(request, "trained"))
    others = (collected(request, name) for name in ("mutant", "case", "stage", "mode"))
    return run(train_all, 4, cases, *others, timeout=120, watch=False)


@pytest.fixture(scope="module")
def reference():
    return trainings(
        SINGLE_RANK, lambda model, group: OneDevice(model), small_gpt, sample_batches(STEPS), 1
    )


@pytest.mark.parametrize("trained", in_tiers(KEPT, CASES))
def test_it_is_the_same_training(ranks, reference, trained):
    assert_same(reference, [done[trained] for done in ranks])


@pytest.mark.parametrize(
    "mutant", in_tiers({*zip(MUTANTS, (2, 3, 2), strict=True)}, product(MUTANTS, (2, 3)))
)
def test_the_oracle_names_the_mutation(ranks, reference, mutant):
    of_one_step = [moment for moment in reference["SGD"] if moment.step == 0]
    found = first_difference(of_one_step, [done[mutant] for done in ranks])
    assert found is not None and MUTANTS[mutant[0]][-1] in found, found


# What crosses the wire


def wire(groups, stage, mode):
    """Bytes sent and received in a step of 3 micro-batches, and by the formulas."""
    model = small_llama()
    parallel = applied(groups, stage, mode)(model, None)
    optimizer = parallel.make_optimizer(torch.optim.SGD)
    tokens = torch.zeros(1, 7, dtype=torch.long)
    with Ledger() as ledger:
        for _ in range(2):
            with parallel.no_sync():
                model(tokens).sum().backward()
        model(tokens).sum().backward()
        parallel.finish()
        optimizer.step()

    shards, replicas = groups
    gathers = 6 if stage == 3 else 1  # before each forward and each backward pass
    scatters = 3 if parallel.sync_every_micro_batch else 1
    sums = 3 if parallel.sync_replicas_every_micro_batch else 1
    place = shards.size(), shards.rank()
    formula = torch.zeros(2)
    for flat in parallel.flats:
        n = flat.num_elements
        formula += gathers * torch.tensor(ring_all_gather_volume(n, 4, *place))
        if flat.parameters[0].requires_grad:
            formula += scatters * torch.tensor(ring_reduce_scatter_volume(n, 4, *place))
            formula += torch.tensor(
                replica_volume(n, 4, shards.size(), replicas.size(), replicas.rank(), sums)
            )
    return [ledger.bytes_sent(), ledger.bytes_received()], formula.tolist()


@pytest.mark.parametrize("case", in_tiers(KEPT, CASES))
def test_the_volume_is_that_of_the_formulas(ranks, case):
    for done in ranks:
        counted, formula = done["wire"][case]
        assert counted == formula


# Against PyTorch's


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def parts(rank):
    """Two micro-batches of one sequence for each of two steps."""
    return [tokens[rank::4].split(1) for tokens in sample_batches((8, 8))]


def torchs(world):
    torch.manual_seed(0)
    model = small_llama().double()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-6
    )
    for micro_batches in parts(world.rank()):
        optimizer.zero_grad()
        for tokens in micro_batches:
            (loss_of(model, tokens) / len(micro_batches)).backward()
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def ours(groups, mode):
    torch.manual_seed(0)
    model = small_llama().double()
    parallel = applied(groups, 3, mode)(model, None)
    optimizer = parallel.make_optimizer(partial(torch.optim.AdamW, lr=0.01, eps=1e-6))
    for first, last in parts(parallel.data_part[0]):
        optimizer.zero_grad()
        with parallel.no_sync():
            (loss_of(model, first) / 2).backward()
        (loss_of(model, last) / 2).backward()
        parallel.finish()
        optimizer.step()
    return parallel.full_parameters()


@pytest.mark.parametrize("mode", tiered(MODES, keep=2))
def test_it_is_fully_shard_on_a_mesh_of_two_axes(ranks, mode):
    for done in ranks:
        theirs, by_mode = done["fully_shard"]
        for name, parameter in theirs.items():
            torch.testing.assert_close(by_mode[mode][name], parameter, rtol=1e-10, atol=1e-12)


# A state that is saved


def state_of(world, groups, stage):
    """What is saved after a step, and after one more; the first replica writes."""
    model, parallel, optimizer = started(applied(groups, stage, "once"), world)
    take_step(model, parallel, optimizer, 0)
    state = saved(parallel, optimizer, world)
    take_step(model, parallel, optimizer, 1)
    return state, saved(parallel, optimizer, world)


def started(apply, group):
    torch.manual_seed(0)
    model = small_gpt().double()
    parallel = Grid(model, data=apply(model, group))
    return model, parallel, parallel.make_optimizer(partial(torch.optim.AdamW, lr=0.01, eps=1e-6))


def take_step(model, parallel, optimizer, number):
    optimizer.zero_grad()
    index, count = parallel.data_part
    loss_of(model, sample_batches((8, 8))[number][index::count]).backward()
    parallel.finish()
    optimizer.step()


@pytest.mark.parametrize("stage", tiered([3, 1, 2], keep=2))
def test_a_state_continues_on_one_process(ranks, stage):
    state, expected = ranks[0]["state"][stage]
    model, parallel, optimizer = started(lambda model, group: OneDevice(model), SINGLE_RANK)
    load(parallel, optimizer, state)
    take_step(model, parallel, optimizer, 1)
    torch.testing.assert_close(
        saved(parallel, optimizer, SINGLE_RANK), expected, rtol=1e-9, atol=1e-12
    )


# A run with `parallel.replicas`


def num_pieces(world, stage):
    """How many ranks read samples of their own, and elements that the optimizer updates here."""
    model = ModelConfig("gpt", 32, 8, 2, 16, 2, 2, 32)
    config = Config(
        model,
        DataConfig(sequence_length=8),
        TrainConfig(global_batch_size=4),
        ParallelConfig(zero=stage, replicas=2),
    )
    mesh = lay_out(config.parallel, world.size(), torch.device("cpu"))
    training = Training(config, mesh, torch.device("cpu"))
    pieces = [p for group in training.optimizer.param_groups for p in group["params"]]
    return training.data_size, sum(map(torch.numel, pieces)), num_parameters(model)


@pytest.mark.parametrize("stage", tiered([3, 1, 2], keep=2))
def test_four_ranks_of_a_run_read_samples_and_two_divide_the_state(ranks, stage):
    readers, counts, (total, *_) = zip(*(done["pieces"][stage] for done in ranks), strict=True)
    assert readers == (4, 4, 4, 4)
    assert counts[0] + counts[1] == counts[2] + counts[3] == total
    assert counts[:2] == counts[2:] and max(counts) < 0.55 * total


def clipped(groups, stage):
    """The gradient's norm before clipping, and the gradients after it."""
    torch.manual_seed(0)
    model = small_gpt().double()
    parallel = Grid(model, data=applied(groups, stage, "once")(model, None))
    optimizer = parallel.make_optimizer(partial(torch.optim.SGD, lr=0.1))
    index, count = parallel.data_part
    loss_of(model, sample_batches((8,))[0][index::count]).backward()
    parallel.finish()
    norm = parallel.clip([p for group in optimizer.param_groups for p in group["params"]], 0.01)
    return norm, parallel.full_gradients()


@pytest.mark.parametrize("stage", tiered([3, 1, 2], keep=2))
def test_the_norm_counts_a_gradient_once_however_many_replicas_hold_it(ranks, stage):
    torch.manual_seed(0)
    model = small_gpt().double()
    loss_of(model, sample_batches((8,))[0]).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    for done in ranks:
        norm, gradients = done["clipped"][stage]
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-14)


# Mistakes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(replicas=2), "parallel.replicas = 2 with parallel.zero = 0: nothing is sharded"),
        (dict(replicas=3, dp=4, zero=1), "replicas = 3 does not divide parallel.dp = 4"),
        (dict(replicas=0), "parallel.replicas = 0"),
        (dict(sync_replicas_every_micro_batch=True), "needs parallel.replicas of 2 or more"),
        (
            dict(sync_replicas_every_micro_batch=True, replicas=2, zero=1),
            "parallel.zero = 2 or 3 .here 1.*: leave it out",
        ),
        (
            dict(
                sync_replicas_every_micro_batch=True,
                replicas=2,
                zero=2,
                sync_every_micro_batch=False,
            ),
            "and parallel.sync_every_micro_batch",
        ),
    ],
)
def test_mistakes_are_named(fields, words):
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**fields)


def test_shards_are_neighbors():
    def places(world):
        mesh = lay_out(ParallelConfig(replicas=2, zero=3), world.size(), torch.device("cpu"))
        with pytest.raises(ConfigError, match="replicas = 3 does not divide 4 data-parallel ranks"):
            lay_out(ParallelConfig(replicas=3, zero=3), world.size(), torch.device("cpu"))
        return mesh.rank("replicas"), mesh.rank("dp")

    assert run(places, 4) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Config(ModelConfig(), parallel=ParallelConfig(replicas=2, zero=3)).parallel.replicas == 2
