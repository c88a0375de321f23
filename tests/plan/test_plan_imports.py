"""What plans a training starts without PyTorch and NumPy, which take seconds to import."""

import subprocess
import sys

import pytest

from tests.tiers import exhaustive

HEAVY = ("torch", "numpy")
MODULES = (
    "minitron.config",
    "minitron.config.layout",
    "minitron.cost",
    "minitron.cost.precision",
    "minitron.parallel.pipeline.schedules",
    "minitron.parallel.pipeline.schedule_check",
    "minitron.parallel.pipeline.simulator",
    "minitron.parallel.pipeline.plan",
    "minitron.plan.decide",
    "minitron.plan.estimate",
    "minitron.plan.search",
    "minitron.plan.explain",
    "minitron.plan.money",
    "minitron.plan.held_out",
    "minitron.plan.command",
    "minitron.plan.dryrun_command",
    "minitron.cli",
)


def imported_by(code: str) -> list[str]:
    """Which of HEAVY a new process has imported once it has run `code`."""
    code += f"; import sys; print('imported', *({set(HEAVY)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


def test_what_plans_is_imported_without_torch_and_numpy():
    assert imported_by(f"import {', '.join(MODULES)}") == []


@exhaustive  # tells which
@pytest.mark.parametrize("module", MODULES)
def test_each_module_that_plans_is_imported_without_torch_and_numpy(module):
    assert imported_by(f"import {module}") == []


def test_a_whole_plan_needs_neither():
    words = ["plan", "configs/llama-1b.toml", "--gpus", "2", "--explain"]
    assert imported_by(f"from minitron.cli import dispatch; dispatch({words})") == []
    assert imported_by("import numpy") == ["numpy"], "this finds what is imported"
