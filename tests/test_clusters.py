"""The launch files, run with stand-ins for torchrun and Slurm that write down their words."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from minitron.train import read_options

yaml = pytest.importorskip("yaml")
REPOSITORY = Path(__file__).parents[1]
CLUSTERS = REPOSITORY / "clusters"
TORCHRUN = "clusters/torchrun.sh"
STAND_INS = {
    "torchrun": 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" '
    '"$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@" > "$WORDS"',
    "scontrol": '[[ "$*" = "show hostnames node[3-4]" ]] && printf "node3\\nnode4\\n"',
    "srun": '[[ "$1" = --kill-on-bad-exit=1 ]] && shift && exec "$@"',
}


@pytest.fixture
def launch(tmp_path):
    """Run a command with the stand-ins; returns torchrun's options and those of the training."""
    for name, line in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    folder = tmp_path / "repository"  # without a .venv, whose torchrun would come first
    folder.mkdir()
    for name in ("clusters", "configs"):
        (folder / name).symlink_to(REPOSITORY / name)

    def run(*command: str, **environment: str):
        words = tmp_path / "words"
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORDS": str(words)}
        subprocess.run(command, env=environment, cwd=folder, check=True, timeout=60)
        timeout, own_store, *options = words.read_text().splitlines()
        assert (timeout, own_store) == ("120", "1")
        parsed = get_args_parser().parse_args(options)
        assert parsed.module and parsed.training_script == "minitron.train"
        return parsed, read_options(parsed.training_script_args)

    return run


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def test_one_node_needs_no_words(launch):
    torchrun, options = launch(TORCHRUN, "configs/llama-1b.toml")
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.max_restarts) == ("1", "8", 3)
    assert torchrun.rdzv_endpoint == "localhost:29500" and torchrun.log_dir is None
    assert options.restart and options.run_dir == Path("runs/llama-1b")


def test_several_hosts(launch, tmp_path):
    torchrun, options = launch(
        TORCHRUN,
        "configs/llama-8b.toml",
        "--parallel.zero",
        "1",
        "--log.wandb",
        "two words",
        NODES="2",
        HEAD="node0",
        GPUS="4",
        LOGS=str(tmp_path / "logs"),
        RUN="runs/mine",
        RESTARTS="0",
    )
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.max_restarts) == ("2", "4", 0)
    assert torchrun.rdzv_endpoint == "node0:29500" and torchrun.tee == "3"
    assert options.parallel.zero == 1 and options.log.wandb == "two words"
    assert options.run_dir == Path("runs/mine")


def test_no_config_is_one_line():
    done = subprocess.run([TORCHRUN], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode != 0 and done.stderr.endswith("as in configs/llama-8b.toml\n")


def test_slurm(launch):
    torchrun, options = launch(
        "bash",
        "clusters/slurm.sbatch",
        "configs/llama-70b.toml",
        "--train.steps",
        "7",
        SLURM_JOB_NODELIST="node[3-4]",
        SLURM_JOB_ID="1234567",
    )
    assert torchrun.nnodes == "2" and torchrun.rdzv_endpoint == "node3:24567"
    assert torchrun.rdzv_id == "1234567"
    assert options.train.steps == 7 and options.parallel.pp == 4


def test_slurm_signals_torchrun_in_time_to_save():
    """In front of the first command, or sbatch reads past it; without B:, to the steps alone."""
    head, _, commands = (CLUSTERS / "slurm.sbatch").read_text().partition("set -euo")
    directives = dict(
        line.removeprefix("#SBATCH --").split("=", 1) if "=" in line else (line, "")
        for line in head.splitlines()
        if line.startswith("#SBATCH")
    )
    assert int(re.fullmatch(r"TERM@(\d+)", directives["signal"])[1]) > 120
    assert directives["ntasks-per-node"] == "1" and "#SBATCH" not in commands
    assert commands.rstrip().splitlines()[-1].startswith("srun ")
    assert "\nexec torchrun " in (REPOSITORY / TORCHRUN).read_text()  # no shell would pass it on


def test_skypilot(launch):
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    assert all(str(value) for value in task["envs"].values())  # an empty one must be given
    environment = {name: str(value) for name, value in task["envs"].items()}
    torchrun, options = launch(
        "bash",
        "-c",
        task["run"],
        **environment,
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SKYPILOT_NODE_IPS="10.0.0.3\n10.0.0.4",
    )
    assert torchrun.nnodes == "2" and torchrun.rdzv_endpoint == "10.0.0.3:29500"
    assert torchrun.nproc_per_node == task["resources"]["accelerators"].split(":")[1]
    [shared] = task["volumes"]
    assert options.run_dir == Path(shared) / "llama-8b" and options.train.log_every == 10


def commands_told() -> list[str]:
    """What the heads of the files and the READMEs tell to type."""
    files = [*CLUSTERS.iterdir(), REPOSITORY / "configs" / "README.md"]
    lines = "\n".join(path.read_text() for path in files).replace("\\\n#", " ")
    return re.findall(
        r"(?:clusters/torchrun.sh|slurm.sbatch) configs/[^`\n\[]*", lines
    ) + re.findall(r"sky jobs launch [^`\n]*", lines)


@pytest.mark.parametrize("command", commands_told())
def test_what_is_told_to_type_is_read_options(command):
    words = shlex.split(command)
    if words[0] == "sky":
        given = dict(word.split("=", 1) for word in words if "=" in word)
        words = ["", given["CONFIG"], *given.get("OPTIONS", "").split()]
    assert read_options(words[1:]).file.is_file()


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_a_script_is_one(name):
    text = (CLUSTERS / name).read_text()
    subprocess.run(["bash", "-n", CLUSTERS / name], check=True)
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert os.access(REPOSITORY / TORCHRUN, os.X_OK)
