"""Chapter 3's measurements: which matmuls are kept, and what offloading leaves on the device."""

from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minitron import cost
from minitron.config import ConfigError, ModelConfig
from minitron.measure.live import Moment
from minitron.measure.meter import Meter
from minitron.model.recompute import apply_full_recompute, segments_for_budget
from minitron.model.transformer import Transformer, initialize, materialized_attention
from teaching.exercises import ROOT
from teaching.lab import ch03 as lab

CONFIG = ModelConfig("gpt", 64, 64, 3, 64, 4, 4, 256, dropout=0.1)
TOKENS = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
MATMUL = torch.ops.aten.mm.default


def build(policy=lambda model: None):
    model = Transformer(CONFIG)
    initialize(model, seed=0)
    for block in model.blocks:
        block.attention.attention_fn = materialized_attention
    policy(model)
    return model


def step(model):
    """Gradient, bytes kept after the forward pass and FLOPs."""
    torch.manual_seed(1)
    with Meter(model) as meter, FlopCounterMode(display=False) as counter:
        loss = model(TOKENS).square().mean()
        kept = meter.now()["activation"] + meter.now()["temporary"]
        loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradient, kept, counter.get_total_flops()


def test_each_recomputed_block_is_a_tooth():
    kinds = {"forward": [0, 9, 0, 9], "backward": [2, 6, 2, 5, 1, 4, 1]}
    timeline = [
        Moment(phase, "", {"activation": size}, 0.0)
        for phase, sizes in kinds.items()
        for size in sizes
    ]
    assert lab.num_teeth(timeline) == 3
    assert lab.num_teeth([m for m in timeline if m.bytes["activation"] != 5]) == 2


def test_a_byte_of_a_matmul_takes_two_flops_per_term():
    left, right = torch.zeros(3, 10), torch.zeros(10, 7)
    assert lab.flops_per_byte(MATMUL, (left, right)) == 2 * 10 / 4
    assert lab.flops_per_byte(torch.ops.aten.addmm.default, (right, left, right)) == 2 * 10 / 4
    assert lab.flops_per_byte(torch.ops.aten.gelu.default, (left,)) == 0


def test_the_lower_the_threshold_the_more_is_kept_and_the_less_recomputed():
    plain, most, flops = step(build())
    _, least, full_flops = step(build(apply_full_recompute))
    rows = [step(build(lab.keep_if_expensive(threshold))) for threshold in (0, 10, 40, 1000)]
    assert all(torch.equal(gradient, plain) for gradient, *_ in rows)
    kept, costs = [row[1] for row in rows], [row[2] for row in rows]
    assert kept == sorted(kept, reverse=True) and costs == sorted(costs)
    assert (costs[0], costs[-1], kept[-1]) == (flops, full_flops, least) and kept[0] < most


def test_offloading_leaves_nothing_of_the_blocks_on_the_device():
    plain, most, flops = step(build())
    model = build()
    host = lab.Host(model)
    lab.offload_blocks(host)(model)
    gradient, left, its_flops = step(model)
    assert torch.equal(gradient, plain) and its_flops == flops
    assert left < most / 4
    assert host.bytes_sent == pytest.approx(most - left, rel=0.05)
    assert host.bytes_fetched == host.bytes_sent


def test_a_storage_that_two_operators_save_is_sent_once_and_weights_never():
    layer = torch.nn.Linear(8, 8)
    x = torch.zeros(4, 8, requires_grad=True)
    host = lab.Host(layer)
    first = host.send(x)
    assert host.send(x[:2]) is not first and host.bytes_sent == x.nbytes
    assert host.send(layer.weight)() is layer.weight and host.bytes_sent == x.nbytes


def test_a_storage_that_two_operators_read_is_fetched_once():
    x = torch.arange(32.0).reshape(4, 8)
    host = lab.Host(torch.nn.Linear(8, 8))
    fetch, fetch_part = host.send(x), host.send(x[1:, 2:])
    assert torch.equal(fetch(), x) and torch.equal(fetch_part(), x[1:, 2:])
    assert host.bytes_fetched == x.nbytes


def test_a_layer_without_values_costs_what_the_formula_says():
    config = ModelConfig("gpt", 64, 64, 5, 64, 4, 4, 256)
    kept, flops = lab.layer_without_values(config, 64, lambda model: None)
    assert flops == 3 * (2 * 12 * 64**2 + 4 * 64 * 64) * 64
    full, more = lab.layer_without_values(config, 64, apply_full_recompute)
    down = 2 * 64 * 256 * 64  # comes last: its output is needed by nothing in the block
    assert full < kept / 10 and more == flops * 4 / 3 - down


def test_the_recorded_models_are_the_benchmark_s(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    sizes = import_module("recompute").SIZES["cpu"]
    assert {name: (model, 4, 128) for name, model in lab.RECORDED_MODELS.items()} == {
        name: sizes[name] for name in lab.RECORDED_MODELS
    }
    assert all(lab.recorded_time(name) > 1 for name in lab.RECORDED_MODELS)


@pytest.mark.parametrize("name", lab.RECORDED_MODELS)
def test_without_dropout_recomputing_a_block_skips_its_last_matmul(name):
    model = lab.RECORDED_MODELS[name]
    counted = lab.flops_of_step(model, apply_full_recompute) - lab.flops_of_step(model)
    everything = cost.recompute_flops_per_token(model, 128) * 128
    skipped = 0 if model.dropout else 6 * 2 * model.width * model.ffn_width * 128
    assert counted == everything - skipped


@pytest.mark.parametrize("sizes", [(16, 1, 1), (16, 30, 1), (7, 4, 2), (5, 3, 7), (1, 2, 1)])
def test_the_least_peak_is_the_least_budget_that_segments_fit(sizes):
    num_blocks, block, boundary = sizes
    least = lab.least_peak(*sizes)
    segments = segments_for_budget([block] * num_blocks, boundary, least)
    assert sum(segments) <= num_blocks
    with pytest.raises(ConfigError):
        segments_for_budget([block] * num_blocks, boundary, least - 1)
