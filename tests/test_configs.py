"""Every config is one that runs: it fits the ranks it suggests, their memory, and the papers."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from minitron import cost
from minitron.config.layout import data_parallel_size, require_ranks
from minitron.cost import PUBLISHED
from minitron.measure.meter import Meter
from minitron.parallelize import build, lay_out
from minitron.plan.hardware import DEVICES
from minitron.precision import PRECISIONS, low_precision
from minitron.running.starting import require_validation
from minitron.step import make_optimizer, train_step
from minitron.train import read_options

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tools"))
import layouts  # noqa: E402

SUGGESTED = {
    (name, size): config
    for name in layouts.NAMES
    for size, config in layouts.suggested(name).items()
}
RUNS = [key for key, config in SUGGESTED.items() if config is not None]
GPU = DEVICES["H100-SXM-80GB"].memory_bytes
FOR_CUDA = 0.1  # of it, for CUDA itself, NCCL's buffers, and what is lost between tensors
FINEWEB_TOKENS = 10.3e9


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "configs").glob("*.toml")), ids=lambda path: path.name
)
def test_a_config_is_read(path):
    assert read_options([str(path)]).data.path.parts[0] == "data"


def test_every_large_model_has_a_layout_for_each_size():
    assert sorted(SUGGESTED) == sorted((name, n) for name in layouts.NAMES for n in (8, 64, 1024))
    assert len(RUNS) == 13


@pytest.mark.parametrize("name, size", RUNS)
def test_a_layout_fits_model_data_and_ranks(name, size):
    config = SUGGESTED[name, size]
    require_ranks(config, size)
    require_validation(config.train.eval_sequences, data_parallel_size(config, size))
    assert cost.tensor_parallel_parameters(config.model, config.parallel.tp) > 0
    assert config.parallel.tp <= 8  # a node's


@pytest.mark.parametrize("name, size", RUNS)
def test_a_layout_fits_into_memory(name, size):
    held = layouts.bytes_held(SUGGESTED[name, size], size)
    assert all(num_bytes >= 0 for num_bytes in held.values())
    assert sum(held.values()) < (1 - FOR_CUDA) * GPU


@pytest.mark.parametrize("name, size", sorted(set(SUGGESTED) - set(RUNS)))
def test_too_few_are_too_few(name, size):
    """The training state alone, divided evenly, is more than they have."""
    config = SUGGESTED[name, 64]
    recipe = PRECISIONS[config.train.precision].cost
    assert cost.model_state_bytes(config.model, recipe) > size * GPU


def test_the_weights_of_a_rank_are_those_of_the_whole():
    """Stages, blocks and ends add up to the model, cut or not."""
    whole = {
        key: config
        for key, config in SUGGESTED.items()
        if config is not None and config.parallel.pp == 1 and config.parallel.zero < 3
    }
    assert len(whole) > 5
    for (_, size), config in whole.items():
        held = layouts.bytes_held(config, size)["weights"]
        num_parameters = cost.tensor_parallel_parameters(config.model, config.parallel.tp)
        assert held == num_parameters * PRECISIONS[config.train.precision].cost.parameter


def test_what_is_added_up_is_what_a_step_holds():
    """A step of one rank of 64, with tensors that have no values, under the meter."""
    config = SUGGESTED["gpt2-124m", 64]
    config = replace(config, model=replace(config.model, num_layers=4))
    cpu = torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    try:
        mesh = lay_out(config.parallel, 64, cpu)
        with FakeTensorMode():
            model, parallel = build(config, mesh, cpu)
            optimizer = parallel.shard(make_optimizer(model, config.train, cpu))
            forward = low_precision(model, cpu, PRECISIONS[config.train.precision])
            tokens = torch.randint(100, (layouts.micro_batches(config, 64)[1], 1024))
            with Meter(model, optimizer) as meter:
                for _ in range(2):
                    train_step(forward, optimizer, [(tokens, tokens)], 1e-3, 1.0, parallel)
    finally:
        dist.destroy_process_group()
    expected = sum(layouts.bytes_held(config, 64).values())
    assert meter.peak.total == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "name, published", [("llama-1b", "Llama 3.2 1B"), ("llama-70b", "Llama 3.1 70B")]
)
def test_a_llama_has_its_published_shape(name, published):
    model = SUGGESTED[name, 64].model
    assert cost.num_parameters(model) == cost.num_parameters(PUBLISHED[published])
    assert model.rope_theta == 500_000  # Grattafiori et al. 2024, table 3


def test_the_others_have_their_published_size():
    assert round(cost.num_parameters(SUGGESTED["llama-8b", 64].model) / 1e9, 2) == 8.03
    assert round(cost.num_parameters(SUGGESTED["gpt3-175b", 64].model) / 1e9) == 175
    assert round(cost.num_parameters(SUGGESTED["gpt2-124m", 64].model) / 1e6) == 124


@pytest.mark.parametrize(
    "name, tokens, rate",
    [
        ("gpt2-124m", 0.5e6, 6e-4),  # Brown et al. 2020, table 2.1
        ("llama-1b", 4e6, 2e-4),  # of GPT-3 XL there
        ("llama-8b", 4e6, 3e-4),  # Grattafiori et al. 2024, table 3 and section 3.4.1
        ("llama-70b", 4e6, 1.5e-4),
        ("gpt3-175b", 3.2e6, 0.6e-4),
    ],
)
def test_a_step_is_that_of_the_paper(name, tokens, rate):
    for size in (64, 1024):
        config = SUGGESTED[name, size]
        step = config.train.global_batch_size * config.data.sequence_length
        assert step == pytest.approx(tokens, rel=0.05)
        assert config.train.learning_rate == rate
        assert config.train.steps * step < FINEWEB_TOKENS


def test_the_table_is_the_one_that_is_computed():
    readme = (REPOSITORY / "configs" / "README.md").read_text()
    found = re.search(r"^\| config .*?(?=\n\n)", readme, flags=re.MULTILINE | re.DOTALL)[0]
    assert found == layouts.table(), "write it again: python tools/layouts.py"
