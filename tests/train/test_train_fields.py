"""Each field of [train] changes a run: one that has another value, beside one that has not.

A row names a field, another value, what to observe, and what must be observed for a run's config.
Ignoring the field makes both runs observe the same, and the expected values differ.
"""

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from minitron import checkpoint, train, train_loop
from minitron.config import Config, ConfigError, DataConfig, TrainConfig
from minitron.measure.metrics import read_metrics
from minitron.model.transformer import Block
from minitron.plan.dryrun import Flops
from minitron.run import Run
from tests.train.test_train import MODEL

TRAIN = TrainConfig(
    steps=4,
    global_batch_size=6,
    micro_batch_size=3,
    learning_rate=1e-2,
    min_learning_rate=1e-3,
    warmup_steps=2,
    eval_every=2,
    eval_sequences=4,
    checkpoint_every=1,
    keep_checkpoints=4,
    device="cpu",
)


FOLDERS: dict[Config, Path] = {}


def finished(config: Config, folder: Path) -> Path:
    """The folder of a run that is trained to its end: of each config there is one."""
    if config not in FOLDERS:
        train.train(config, folder)
        FOLDERS[config] = folder
    return FOLDERS[config]


def column(name: str) -> Callable[[Config, Path], list]:
    """Observe a column of a run's log."""

    def observe(config: Config, folder: Path) -> list:
        rows = read_metrics(finished(config, folder) / "metrics.jsonl")
        return [row[name] for row in rows if name in row]

    return observe


def saved_steps(config: Config, folder: Path) -> list[int]:
    return sorted(
        int(path.name.removeprefix("step_"))
        for path in (finished(config, folder) / "checkpoints").glob("step_*")
    )


def validated_steps(config: Config, folder: Path) -> list[int]:
    rows = read_metrics(finished(config, folder) / "metrics.jsonl")
    return [row["step"] for row in rows if "val_loss" in row]


def validated_sequences(config: Config, folder: Path) -> int:
    return count_rows(Run(config, folder).evaluate)


def forward_passes(config: Config, folder: Path) -> int:
    """Of a block's MLP, in a step."""
    run, calls = Run(config, folder), []
    run.model.blocks[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    run.train_step()
    return len(calls)


def flops_of_block(config: Config, folder: Path) -> float:
    """Of a step with one block, in multiples of a forward pass: 3, or 4 where it is recomputed."""
    model = replace(config.model, num_layers=1, ffn_width=2048)  # the head counts for little
    run = Run(replace(config, model=model), folder)
    inputs = run.next_batch()[:, :-1]
    with Flops() as step:
        run.train_step()
    with torch.no_grad(), Flops() as forward:
        run.model(inputs)
    return step.total / forward.total


def count_rows(function: Callable[[], object]) -> int:
    """Add up the sequences of all forward passes of first blocks."""
    rows, first = [], []

    def hook(module, inputs, _):
        if isinstance(module, Block):
            first.append(module)
            if module is first[0]:
                rows.append(len(inputs[0]))

    with torch.nn.modules.module.register_module_forward_hook(hook):
        function()
    return sum(rows)


def dtype_of_matmuls(config: Config, folder: Path) -> torch.dtype:
    """Of the last block's MLP."""
    run, dtypes = Run(config, folder), []
    run.model.blocks[-1].mlp.register_forward_hook(lambda *call: dtypes.append(call[2].dtype))
    run.train_step()
    return dtypes[0]


def optimizer_groups(key: str) -> Callable[[Config, Path], object]:
    return lambda config, folder: Run(config, folder).optimizer.param_groups[0][key]


def moments_norm(config: Config, folder: Path) -> float:
    """The norm of the gradient that the first step of AdamW has seen."""
    run = Run(config, folder)
    run.train_step()
    moments = [state["exp_avg"] for state in run.optimizer.state.values()]
    return float(torch.cat([moment.flatten() for moment in moments]).norm()) / (1 - TRAIN.beta1)


def seeds(config: Config, folder: Path) -> list:
    """Of the weights, of the order of samples, of dropout."""
    run = Run(config, folder)
    return [
        float(next(run.model.parameters()).detach().sum()),
        run.next_batch().tolist(),
        float(torch.rand(())),
    ]


def resumed_with_more_steps(config: Config, folder: Path) -> list | str:
    train.train(replace(config, train=replace(config.train, continuation="none")), folder)
    longer = replace(config, train=replace(config.train, steps=6))
    try:
        train.train(longer, folder, resume=True)
    except ConfigError as error:
        return error.field
    return [
        row["learning_rate"]
        for row in read_metrics(folder / "metrics.jsonl")
        if "learning_rate" in row
    ][-2:]


def chosen_device(config: Config, folder: Path) -> str:
    try:
        return str(Run(config, folder).device)
    except ConfigError:
        return "refused"


def watched_seconds(config: Config, folder: Path) -> float:
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        made = train_loop.Watchdog
        patch.setattr(train_loop, "Watchdog", lambda *a: seen.append(made(*a)) or seen[-1])
        train.train(config, folder)
    return seen[0].timeout


def waits_for_the_device(config: Config, folder: Path) -> int:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        log_rows = train_loop.log_rows
        patch.setattr(train_loop, "log_rows", lambda *a: calls.append(1) or log_rows(*a))
        train.train(config, folder)
    return len(calls)


def saves_itself(config: Config, folder: Path) -> bool:
    """Whether the thread that trains writes the checkpoints."""
    threads = []
    with pytest.MonkeyPatch.context() as patch:
        save = checkpoint.save
        patch.setattr(
            checkpoint, "save", lambda *a: threads.append(threading.current_thread()) or save(*a)
        )
        train.train(config, folder)
    return set(threads) == {threading.main_thread()}


def compiled(config: Config, folder: Path) -> int:
    models = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda model: models.append(model) or model)
        Run(config, folder).train_step()
    return len(models)


RARE = {"eval_every": 0, "checkpoint_every": 0}
ROWS = [  # field, what it is for both, the other value, what is observed without and with it
    ("steps", {}, 5, column("loss"), lambda seen: len(seen), 4, 5),
    ("global_batch_size", {}, 4, column("tokens"), lambda seen: seen[0], 6 * 32, 4 * 32),
    ("micro_batch_size", {}, 2, forward_passes, int, 2, 3),
    ("learning_rate", {}, 2e-2, column("learning_rate"), max, 1e-2, 2e-2),
    ("min_learning_rate", {}, 0.0, column("learning_rate"), lambda seen: seen[-1], 1e-3, 0.0),
    ("warmup_steps", {}, 1, column("learning_rate"), lambda seen: seen[0], 5e-3, 1e-2),
    (
        "continuation",
        {},
        "constant",
        resumed_with_more_steps,
        lambda seen: seen,
        "train.continuation",
        [1e-3, 1e-3],
    ),
    ("weight_decay", {}, 0.2, optimizer_groups("weight_decay"), float, 0.1, 0.2),
    ("beta1", {}, 0.8, optimizer_groups("betas"), lambda seen: seen[0], 0.9, 0.8),
    ("beta2", {}, 0.9, optimizer_groups("betas"), lambda seen: seen[1], 0.95, 0.9),
    ("clip_norm", {"clip_norm": 0.1}, 0.05, moments_norm, lambda seen: round(seen, 3), 0.1, 0.05),
    (
        "precision",
        {},
        "bf16-autocast",
        dtype_of_matmuls,
        lambda seen: seen,
        torch.float32,
        torch.bfloat16,
    ),
    ("recompute", {}, "full", flops_of_block, round, 3, 4),
    ("compile", {}, True, compiled, int, 0, 1),
    ("device", {}, "meta", chosen_device, str, "cpu", "refused"),
    ("log_every", RARE, 4, waits_for_the_device, int, 4, 1),
    ("eval_every", {}, 3, validated_steps, list, [2, 4], [3, 4]),
    ("eval_sequences", {}, 5, validated_sequences, int, 4, 5),
    ("checkpoint_every", {}, 3, saved_steps, list, [1, 2, 3, 4], [3, 4]),
    ("keep_checkpoints", {}, 2, saved_steps, list, [1, 2, 3, 4], [3, 4]),
    ("async_checkpoint", {}, True, saves_itself, bool, True, False),
    ("hang_timeout", {}, 60.0, watched_seconds, float, 900.0, 60.0),
]


@pytest.mark.parametrize(
    ("field", "both", "value", "observe", "part", "without", "with_it"),
    ROWS,
    ids=[row[0] for row in ROWS],
)
def test_a_field_changes_the_run(
    stories, tmp_path, field, both, value, observe, part, without, with_it
):
    assert without != with_it
    settings = replace(TRAIN, **both)
    for name, expected, train_config in [
        ("without", without, settings),
        ("with", with_it, replace(settings, **{field: value})),
    ]:
        config = Config(replace(MODEL, dropout=0.0), DataConfig(stories, 32), train_config)
        assert part(observe(config, tmp_path / name)) == pytest.approx(expected), name


def test_the_seed_is_of_weights_samples_and_dropout(stories, tmp_path):
    configs = [
        Config(MODEL, DataConfig(stories, 32), replace(TRAIN, seed=seed)) for seed in (0, 1, 0)
    ]
    first, other, again = [seeds(config, tmp_path) for config in configs]
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_every_field_is_tried():
    assert {row[0] for row in ROWS} | {"seed"} == {field.name for field in fields(TrainConfig)}
