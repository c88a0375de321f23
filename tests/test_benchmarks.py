"""Every benchmark of many ranks runs, one round of a tiny model, and names all its sides."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from minitron.measure.record import load
from tests.tiers import exhaustive

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SIDES = {
    "launch.py": ["yes", "no"],
    "all_reduce.py": ["dist.all_reduce", "ring", "halving", "doubling", "naive"],
    "data_parallel.py": ["naive", "hooked", "bucketed", "torch DDP", "no communication"],
    "zero.py": [
        "data parallel",
        "stage 1",
        "stage 2",
        "stage 3",
        "DistributedDataParallel",
        "ZeroRedundancyOptimizer",
        "fully_shard",
        "stage 3, gathered late",
    ],
    "tensor_parallel.py": [
        "tensor",
        "sequence",
        "sequence, kept",
        "DTensor",
        "DTensor, sequence",
        "tensor, one after the other",
    ],
    "pipeline.py": [
        "GPipe",
        "1F1B",
        "interleaved 1F1B",
        "torch GPipe",
        "torch 1F1B",
        "torch interleaved 1F1B",
        "ZB-H1",
    ],
    "precision.py": [
        "fp32",
        "bf16-autocast",
        "bf16",
        "bf16-fp32-grads",
        "fp16",
        "fp8",
        "torch, fp32",
        "torch.amp, bf16",
        "torch.amp, fp16",
    ],
    "dryrun.py": ["fp32", "ZeRO-3", "sequence", "1F1B"],
}
SMALL = {"launch.py": [], "all_reduce.py": ["--megabytes", "1"]}  # the others: --small


def words_of(name: str) -> list[str]:
    return [str(BENCHMARKS / name), "--ranks", "2", "--rounds", "1", *SMALL.get(name, ["--small"])]


def test_a_round_of_launching_two_ranks(monkeypatch, capsys):
    """In this process: a new one, and its server of ranks, would import torch for seconds."""
    words = words_of("launch.py")
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(words[0], run_name="__main__")
    expect_sides("launch.py", capsys.readouterr().out)


@exhaustive
@pytest.mark.parametrize("name", SIDES)
def test_a_round_on_two_ranks(name):
    command = [sys.executable, *words_of(name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expect_sides(name, done.stdout)


def expect_sides(name: str, printed: str) -> None:
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("|")]
    for side in SIDES[name]:
        assert any(side in (cell.strip("| ") for cell in row) for row in rows), side


def test_the_pages_quote_what_the_gpu_s_records_say():
    """The numbers under "On GPUs" in benchmarks/results/README.md, and README's own."""
    folder = BENCHMARKS / "results" / "gpu" / "h200"
    rows = {
        part: {row["case"]: row for row in load(folder / f"{part}.json").rows}
        for part in ("mfu", "kernels", "precision", "plan")
    }
    mfu, kernels, precision = rows["mfu"], rows["kernels"], rows["precision"]
    llama = {
        side: mfu[f"Llama 1.3B, {side}"]["mfu"]
        for side in ("compiled, ours, bf16 weights", "compiled, ours", "eager, ours")
    }
    ours = [row["speed_of_plain"] for row in mfu.values() if row["side"] == "ours"]
    theirs = [row["speed_of_plain"] for row in mfu.values() if row["side"] == "transformers"]
    fastest = max(
        row["flops_per_second"] / row["peak"] for row in kernels.values() if row["kind"] == "matmul"
    )
    fused, slow = (kernels[f"attention {kind}, 8192 tokens"] for kind in ("fused", "materialized"))
    seconds = {name: row["seconds"] for name, row in precision.items()}
    errors = {
        device: [row["error"] for row in rows["plan"].values() if row.get("device") == device]
        for device in ("calibrated", "datasheet")
    }

    text = " ".join((BENCHMARKS / "results" / "README.md").read_text().split())
    for quoted in (
        "reaches {:.0%} MFU with bf16 weights and compiled blocks, {:.0%} under autocast, {:.0%} "
        "without".format(*llama.values()),
        f"runs at {min(ours):.3f} to {max(ours):.3f} times the speed of the plain PyTorch loop",
        f"`transformers` runs at {min(theirs):.2f} to {max(theirs):.2f}",
        f"matmul reaches {fastest:.0%} of the datasheet's peak",
        f"fused attention is {slow['seconds'] / fused['seconds']:.0f} times as fast",
        f"with {fused['peak_bytes'] / 1e9:.1f} GB in place of {slow['peak_bytes'] / 1e9:.0f}",
        f"bf16 is {seconds['fp32'] / seconds['bf16']:.1f} times as fast as float32",
        f"TF32 {seconds['fp32'] / seconds['tf32']:.1f} times",
        f"fp8 takes {seconds['fp8'] / seconds['bf16']:.1f} times as long as bf16",
        f"between {-min(errors['calibrated']):.0%} too low and {max(errors['calibrated']):.0%}",
        f"between {-min(errors['datasheet']):.0%} and {-max(errors['datasheet']):.0%} too low",
    ):
        assert quoted.replace("%", " %") in text, quoted
    readme = (BENCHMARKS.parent / "README.md").read_text()
    assert (
        f"a 1.3B Llama reaches {llama['compiled, ours, bf16 weights']:.0%}".replace("%", " %")
        in readme
    )


def test_the_page_quotes_what_an_h100_s_records_say():
    folder = BENCHMARKS / "results" / "gpu" / "h100-80gb-hbm3"
    steps, estimates = (load(folder / f"{part}.json").rows for part in ("mfu", "plan"))
    mfu = max(row["mfu"] for row in steps if row["model"] == "Llama 1.3B")
    ours = [row["speed_of_plain"] for row in steps if row["side"] == "ours"]
    errors = [row["error"] for row in estimates if row.get("device") == "calibrated"]
    text = " ".join((BENCHMARKS / "results" / "README.md").read_text().split())
    page = text[text.index("An H100 with 80 GB") :]
    for quoted in (
        f"reaches {mfu:.0%} MFU",
        f"at {min(ours):.3f} to {max(ours):.3f} times the speed of the plain PyTorch loop",
        f"between {-min(errors):.0%} too low and {max(errors):.0%} too high",
    ):
        assert quoted.replace("%", " %") in page, quoted
