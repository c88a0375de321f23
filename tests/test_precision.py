"""Low precision: the logic in float64 exactly, the numbers within what their roundings allow."""

import copy
import dataclasses
import math
from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

from minitron import cost
from minitron.comm.agreement import SINGLE_RANK
from minitron.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from minitron.cost.sharding import FULLY_SHARDED, zero_holdings
from minitron.launch import run
from minitron.measure.ledger import Ledger
from minitron.measure.meter import Meter
from minitron.model.transformer import Transformer
from minitron.parallel.data.ddp import (
    apply_bucketed_data_parallel,
    apply_hooked_data_parallel,
    apply_naive_data_parallel,
)
from minitron.parallel.grid import Grid
from minitron.parallelize import build, lay_out
from minitron.precision import (
    PRECISIONS,
    LossScale,
    MasterWeights,
    apply_precision,
    low_precision,
    set_grad_dtype,
    step_if_finite,
    update_instead,
)
from minitron.proof.oracle import assert_same_training
from minitron.step import accumulate_over_ranks, make_optimizer, train_step
from tests.parallel.saving import load, saved
from tests.tiers import diagonal_of, in_tiers, tiered

CPU = torch.device("cpu")
MODEL = ModelConfig("llama", 32, 16, 2, 48, 4, 2, 64)
S, BATCH = 8, 12


def config_of(name: str, **parallel) -> Config:
    return Config(
        MODEL,
        DataConfig(sequence_length=S),
        TrainConfig(precision=name, learning_rate=1e-2),
        ParallelConfig(**parallel),
    )


def made(group, config: Config):
    """A model on its ranks, what a step asks, and the forward pass."""
    model, parallel = build(config, lay_out(config.parallel, group.size(), CPU), CPU)
    optimizer = parallel.shard(make_optimizer(model, config.train, CPU))
    name = config.train.precision
    forward = model if name == "fp32" else low_precision(model, CPU, PRECISIONS[name])
    return model, parallel, optimizer, forward


def micro_batches(part: tuple[int, int], seed: int = 0):
    index, count = part
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(32, (BATCH, S + 1), generator=generator)[index::count]
    return [(pair[:, :-1], pair[:, 1:]) for pair in tokens.split(3)]


# What is said of them


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("bf16-fp32-grads", "bf16, fp32 gradient"),
        ("bf16-autocast", "fp32"),
        ("fp16", "bf16"),
        ("fp8", "bf16"),
    ],
)
def test_bytes_per_parameter_are_those_of_the_cost_model(name, recipe):
    assert PRECISIONS[name].cost == cost.RECIPES[recipe]


@pytest.mark.parametrize(
    "name", in_tiers({"fp32", "bf16", "bf16-fp32-grads", "bf16-autocast"}, PRECISIONS)
)
def test_the_meter_sees_these_bytes(name):
    precision, config = PRECISIONS[name], config_of(name)
    model, parallel, optimizer, forward = made(SINGLE_RANK, config)
    for step in range(2):
        with Meter(model, optimizer) as meter:
            train_step(forward, optimizer, micro_batches((0, 3), step), 1e-3, 1.0, parallel)
            held = meter.now()

    P = sum(p.numel() for p in model.parameters())
    expected = precision.cost
    assert held["parameter"] == expected.parameter * P
    state = (expected.master + expected.optimizer_state) * P
    assert held["optimizer state"] == pytest.approx(state, rel=0.01)  # and the counts of steps
    # handed over, they are float32: those of the model are gone by then
    after = 4 if precision.master else expected.gradient
    assert held["gradient"] == after * P


def held_by_recipe(group, stage: int) -> dict[str, tuple[int, dict, dict]]:
    """By recipe: parameters, bytes held between two micro-batches, and after the step."""
    seen = {}
    for name in PRECISIONS:
        model, parallel, optimizer, forward = made(group, config_of(name, zero=stage))
        (tokens, _), *_ = batches = micro_batches(parallel.data_part)
        train_step(forward, optimizer, batches, 1e-3, 1.0, parallel)
        optimizer.zero_grad()
        with Meter(model, optimizer) as meter:
            with parallel.no_sync():
                forward(tokens).sum().backward()
            between = meter.now()
            forward(tokens).sum().backward()
            parallel.finish()
            optimizer.step()
            after = meter.now()
        num_parameters = sum(full.numel() for full in parallel.full_parameters().values())
        seen[name] = num_parameters, between, after
    return seen


@pytest.mark.parametrize("stage", tiered([3, 1, 2]))
def test_the_meter_sees_what_zero_divides(stage):
    for by_recipe in run(held_by_recipe, 2, stage, watch=False):
        for name, (P, between, after) in by_recipe.items():
            recipe = FULLY_SHARDED if stage == 3 else PRECISIONS[name].cost
            expected = zero_holdings(P, 2, stage, recipe)
            # shards in which gradients add up, which the meter cannot know as such
            between["gradient"] += between["temporary"]
            handed_over = expected | {"gradient": 4 * P / 2}  # this rank's part, in float32
            for kind in expected:  # stage 3 has NaN, a few bytes, in place of freed weights
                assert between[kind] == pytest.approx(expected[kind], rel=0.01, abs=16), name
                assert after[kind] == pytest.approx(handed_over[kind], rel=0.01, abs=16), name


@pytest.mark.parametrize("name", ["bf16", "bf16-fp32-grads", "fp16"])
def test_gradients_add_up_in_their_dtype(name):
    precision = PRECISIONS[name]
    model = Transformer(MODEL)
    apply_precision(model, precision)
    set_grad_dtype(model, precision.gradients)
    for _ in range(2):
        model(torch.zeros(1, S, dtype=torch.long)).float().sum().backward()
    for parameter in model.parameters():
        assert parameter.dtype == precision.parameters
        assert parameter.grad.dtype == precision.gradients


# The logic, in float64


def with_masters(apply, masters=MasterWeights, **options):
    def change(model, group):
        parallel = apply(model, group, **options)
        return Grid(model, masters(model, torch.float64), data=parallel)

    return change


VERSIONS = [apply_bucketed_data_parallel, apply_naive_data_parallel, apply_hooked_data_parallel]


@pytest.mark.parametrize("num_ranks", tiered([3, 2]))
@pytest.mark.parametrize("apply", tiered(VERSIONS), ids=lambda f: f.__name__)
def test_master_weights_are_the_same_training(apply, num_ranks):
    assert_same_training(with_masters(apply), num_ranks, num_micro_batches=2)


class NeverRounds(MasterWeights):
    def copy_to_parameters(self, *_):
        pass


class KeepsGradients(MasterWeights):
    """Neither handing them over nor `zero_grad` lets go of them."""

    def take_gradients(self):
        gradients = [p.grad for p in self.pieces]
        super().take_gradients()
        for parameter, grad in zip(self.pieces, gradients, strict=True):
            parameter.grad = grad

    def discard(self):
        pass


class HalfHandedOver(MasterWeights):
    def take_gradients(self):
        super().take_gradients()
        next(iter(self.pieces.values())).grad = None


@pytest.mark.parametrize("masters", [NeverRounds, KeepsGradients, HalfHandedOver])
def test_the_oracle_sees_broken_masters(masters):
    with pytest.raises(AssertionError):
        assert_same_training(with_masters(apply_bucketed_data_parallel, masters), 2)


def test_what_16_bits_round_away_adds_up_in_the_masters():
    """1 + 2^-10 is 1 in bfloat16, whose next number is 1 + 2^-7; eight such steps are 1 + 2^-7."""
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(layer.weight)
    masters = MasterWeights(layer)
    optimizer = masters.shard(torch.optim.SGD(layer.parameters(), lr=2.0**-10))
    seen = []
    for _ in range(8):
        (-layer(torch.ones(1, 1, dtype=torch.bfloat16))).sum().backward()
        masters.take_gradients()
        assert layer.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        seen.append(layer.weight.item())
    assert seen == 4 * [1.0] + 4 * [1 + 2.0**-7]  # 4 steps are a tie, which goes to the even one
    assert masters.pieces[layer.weight].item() == 1 + 8 * 2.0**-10


def test_zero_grad_forgets_gradients_that_no_master_has_taken():
    """Those of a backward pass that has raised, say: they would be added to the next step's."""
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    parallel = Grid(layer, MasterWeights(layer))
    optimizer = parallel.make_optimizer(torch.optim.SGD)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    parallel.finish()
    assert all((grad == 1).all() for grad in parallel.full_gradients().values())


def test_state_before_the_first_step_moves_to_what_is_updated():
    weight, scale = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adagrad([weight, scale])
    optimizer.state[weight]["sum"].copy_(torch.arange(6.0).view(2, 3))
    optimizer.state[weight]["step"] += 1
    pieces = {weight: torch.zeros(3, dtype=torch.float64), scale: torch.zeros(0)}
    owned = {weight: range(2, 5), scale: range(0)}
    update_instead(optimizer, pieces, owned.__getitem__)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [*map(id, pieces.values())]
    assert {*map(id, optimizer.state)} == {*map(id, pieces.values())}
    state = optimizer.state[pieces[weight]]
    assert state["sum"].tolist() == [2, 3, 4] and state["sum"].dtype == torch.float64
    assert state["step"] == 1
    assert optimizer.state[pieces[scale]]["sum"].shape == (0,)


# The numbers: gradients of all layouts against those of one process in float32

# The longest path: embedding, per block two norms, two rounds of products, activations and sums,
# about 12 roundings, norm and head; as many back
ROUNDINGS = 2 * (12 * MODEL.num_layers + 4)


def gradients(group, config: Config) -> dict[str, torch.Tensor]:
    """Every full gradient of the first step."""
    model, parallel, _, forward = made(group, config)
    scale = LossScale().value if PRECISIONS[config.train.precision].scales_loss else 1.0
    accumulate_over_ranks(forward, micro_batches(parallel.data_part), parallel, scale)
    whole = parallel.full_gradients()
    return {name: grad.float() / scale for name, grad in whole.items()}


@cache
def exact_gradients() -> dict[str, torch.Tensor]:
    return gradients(SINGLE_RANK, config_of("fp32"))


LAYOUTS = {
    "one process": (1, {}),
    "bucketed": (2, {}),
    "ZeRO-1": (2, {"zero": 1}),
    "ZeRO-2": (3, {"zero": 2}),
    "ZeRO-3": (2, {"zero": 3}),
    "tp": (2, {"tp": 2}),
    "sequence": (2, {"tp": 2, "sequence": True}),
    "pp": (2, {"pp": 2}),
    "zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}),
    "zero-bubble, tp": (4, {"pp": 2, "schedule": "zero-bubble", "tp": 2, "sequence": True}),
    "dp, tp and pp": (8, {"tp": 2, "pp": 2, "sequence": True, "zero": 1}),
}


@pytest.mark.parametrize(
    "layout, name", diagonal_of(LAYOUTS, [name for name in PRECISIONS if name != "fp32"])
)
def test_gradients_are_within_their_roundings_of_float32(name, layout):
    num_ranks, parallel = LAYOUTS[layout]
    exact = exact_gradients()
    if num_ranks == 1:
        by_rank = [gradients(SINGLE_RANK, config_of(name))]
    else:
        by_rank = run(gradients, num_ranks, config_of(name, **parallel), watch=False)
    tolerance = PRECISIONS[name].tolerance(ROUNDINGS)
    for seen in by_rank:
        assert seen.keys() == exact.keys()
        for key, grad in seen.items():
            error = (grad - exact[key]).norm() / exact[key].norm()
            assert error < tolerance, (key, float(error), tolerance)


def reductions(group, config: Config) -> set[torch.dtype]:
    """In what the gradients of a step travel: the small messages are of tokens and losses."""
    _, parallel, _, forward = made(group, config)
    with Ledger() as ledger:
        accumulate_over_ranks(forward, micro_batches(parallel.data_part), parallel)
    return {call.dtype for call in ledger.calls if call.reduce and call.payload > 1000}


@pytest.mark.parametrize(
    "zero, name",
    diagonal_of([0, 1, 2, 3], ["bf16-autocast", "bf16", "bf16-fp32-grads", "fp16", "fp8"]),
)
def test_gradients_travel_in_the_dtype_that_the_recipe_names(name, zero):
    for seen in run(reductions, 2, config_of(name, zero=zero)):
        assert seen == {PRECISIONS[name].reduction}


def kept_and_recomputed(group, config: Config) -> list[dict[str, torch.Tensor]]:
    return [
        gradients(
            group,
            dataclasses.replace(config, train=dataclasses.replace(config.train, recompute=policy)),
        )
        for policy in ("none", "full")
    ]


@pytest.mark.parametrize(
    "parallel, name",
    tiered(
        [
            ({"zero": 3}, "bf16-autocast"),
            ({"tp": 2, "sequence": True}, "bf16"),
            ({}, "bf16-fp32-grads"),
            *product([{"zero": 3}], ["bf16", "bf16-fp32-grads", "fp16", "fp8"]),
            *product(
                [{"tp": 2, "sequence": True}], ["bf16-autocast", "bf16-fp32-grads", "fp16", "fp8"]
            ),
            *product([{}], ["bf16-autocast", "bf16", "fp16", "fp8"]),
        ],
        keep=3,
    ),
    ids=str,
)
def test_recomputing_changes_no_bit(name, parallel):
    for before, after in run(kept_and_recomputed, 2, config_of(name, **parallel), watch=False):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], grad) for key, grad in before.items())


def both_schedules(group, name, parallel):
    return [
        gradients(group, config_of(name, pp=2, schedule=schedule, **parallel))
        for schedule in ("1f1b", "zero-bubble")
    ]


@pytest.mark.parametrize(
    "parallel, name",
    tiered(
        [
            ({}, "fp8"),
            ({"tp": 2, "sequence": True}, "bf16-fp32-grads"),
            *product([{}], ["fp32", "bf16-autocast", "bf16-fp32-grads"]),
            *product([{"tp": 2}], ["fp32", "bf16-autocast", "bf16-fp32-grads", "fp8"]),
            *product([{"tp": 2, "sequence": True}], ["fp32", "bf16-autocast", "fp8"]),
        ],
        keep=2,
    ),
    ids=str,
)
def test_deferring_the_gradients_of_weights_changes_no_bit(name, parallel):
    """They are the same products of the same tensors, added up in the same order."""
    num_ranks = 2 * parallel.get("tp", 1)
    for at_once, deferred in run(both_schedules, num_ranks, name, parallel, watch=False):
        assert at_once.keys() == deferred.keys()
        assert all(torch.equal(deferred[key], grad) for key, grad in at_once.items())


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_tolerance_tells_a_sum_from_a_mean(name):
    """On 2 ranks a sum in place of a mean is off by 1, half of one by 0.5: fp8 hides the half."""
    limit = 0.55 if name == "fp8" else 0.1
    assert PRECISIONS[name].tolerance(ROUNDINGS) < limit


# A step is taken only if it is finite


def adamw_of_one_weight(fused: bool):
    weight = nn.Parameter(torch.ones(()))
    weight.grad = torch.ones(())
    return torch.optim.AdamW([weight], fused=fused), weight


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, math.nan)])
def test_a_loss_that_is_not_finite_leaves_weights_and_state(fused, loss, norm):
    """A fused AdamW is launched before the host knows, and must leave everything as it was."""
    optimizer, weight = adamw_of_one_weight(fused)
    assert step_if_finite(optimizer, torch.tensor(1.0), torch.tensor(1.0))
    before = copy.deepcopy([weight.detach(), optimizer.state_dict()])
    weight.grad.fill_(math.nan)
    with pytest.raises(FloatingPointError, match=f"the loss is {loss}"):
        step_if_finite(optimizer, torch.tensor(loss), torch.tensor(norm))
    assert [weight.detach(), optimizer.state_dict()] == before


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_does_not_count(fused):
    """Else AdamW's bias correction would differ from that of a training without the skipped one."""
    weights = []
    for norms in ([1.0, math.inf, 1.0], [1.0, 1.0]):
        optimizer, weight = adamw_of_one_weight(fused)
        stepped = [
            step_if_finite(optimizer, torch.tensor(1.0), torch.tensor(norm)) for norm in norms
        ]
        assert stepped == [math.isfinite(norm) for norm in norms]
        weights.append(weight.detach())
    assert weights[0] == weights[1]


# Loss scaling


def test_the_scale_backs_off_and_grows():
    scale = LossScale(initial=8.0, interval=2)
    norms = [1.0, float("inf"), 1.0, float("nan"), 1.0, 1.0, 1.0, 1.0]
    optimizer, weight = adamw_of_one_weight(fused=True)
    moved = []
    for norm in norms:
        before = weight.detach().clone()
        scale.step(optimizer, torch.tensor(1.0), torch.tensor(norm))
        moved.append(bool(weight != before))
    assert moved == [True, False, True, False, True, True, True, True]
    assert scale.value == 8.0 / 2 / 2 * 2 * 2 and scale.skipped == 2 and scale.good_steps == 0

    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert vars(again) | {"interval": 2} == vars(scale)


def overflow_on_one_rank(group, parallel):
    """One step in which rank 1 alone has an overflow, and one without: what moves."""
    config = config_of("fp16", **parallel)
    model, parallel, optimizer, forward = made(group, config)
    scale = LossScale()

    def overflow(grad):
        return grad * float("inf")

    before = {name: t.clone() for name, t in parallel.full_parameters().items()}
    first = next(p for p in model.parameters())
    hook = first.register_hook(overflow) if group.rank() == 1 else None
    train_step(forward, optimizer, micro_batches(parallel.data_part), 1e-2, 1.0, parallel, scale)
    if hook is not None:
        hook.remove()
    skipped = all(torch.equal(before[name], t) for name, t in parallel.full_parameters().items())
    state = [t for each in optimizer.state.values() for t in each.values()]
    after_first = scale.value, any(bool(t.any()) for t in state)

    loss, norm = train_step(
        forward, optimizer, micro_batches(parallel.data_part), 1e-2, 1.0, parallel, scale
    )
    moved = any(not torch.equal(before[n], t) for n, t in parallel.full_parameters().items())
    return skipped, after_first, moved, scale.value, float(loss), float(norm)


@pytest.mark.parametrize(
    ("num_ranks", "parallel"),
    tiered(
        [
            (2, {"zero": 3}),
            (4, {"tp": 2, "pp": 2}),
            (2, {}),
            (3, {"zero": 1}),
            (2, {"zero": 2}),
            (2, {"tp": 2}),
            (2, {"pp": 2}),
        ],
        keep=2,
    ),
    ids=str,
)
def test_an_overflow_on_one_rank_is_skipped_by_all(num_ranks, parallel):
    for done in run(overflow_on_one_rank, num_ranks, parallel, watch=False):
        skipped, (value, state_moved), moved, later, loss, norm = done
        assert skipped and not state_moved
        assert value == later == 2.0**15
        assert moved and torch.tensor([loss, norm]).isfinite().all()


def test_gradients_are_unscaled_before_they_are_clipped():
    """Else the norm would be 65536 times too large, and every step clipped."""
    _, parallel, optimizer, forward = made(SINGLE_RANK, config_of("fp16"))
    *_, norm = train_step(
        forward, optimizer, micro_batches((0, 1)), 1e-2, 1.0, parallel, LossScale()
    )
    _, _, optimizer, forward = made(SINGLE_RANK, config_of("fp32"))
    *_, expected = train_step(forward, optimizer, micro_batches((0, 1)), 1e-2, 1.0)
    torch.testing.assert_close(norm, expected, rtol=PRECISIONS["fp16"].tolerance(ROUNDINGS), atol=0)


def test_without_a_scale_small_gradients_are_zero():
    """A loss of 2^-20 of the model's: fp16 loses what the scale saves."""

    def lost(scale: float) -> float:
        model, parallel, _, forward = made(SINGLE_RANK, config_of("fp16"))
        parallel.masters.take_gradients = lambda: None
        accumulate_over_ranks(forward, micro_batches((0, 1)), parallel, scale * 2.0**-20)
        values = torch.cat([p.grad.flatten() for p in model.blocks.parameters()])
        return float((values == 0).float().mean())

    assert lost(1.0) > 0.5 and lost(2.0**16) < 0.1


def test_a_checkpoint_keeps_masters_in_all_bits():
    """Float32 weights, of which the model's are rounded."""
    config = config_of("bf16")
    model, parallel, optimizer, forward = made(SINGLE_RANK, config)
    train_step(forward, optimizer, micro_batches((0, 1)), 1e-2, 1.0, parallel)
    state = saved(parallel, optimizer)
    masters = {name: parallel.optimizer_tensor(p).clone() for name, p in model.named_parameters()}
    again, parallel, optimizer, _ = made(SINGLE_RANK, dataclasses.replace(config))
    load(parallel, optimizer, state)
    for name, parameter in again.named_parameters():
        assert torch.equal(parallel.optimizer_tensor(parameter), masters[name])
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
