import collections
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import psutil
import pytest
import torch

from minitron.launch import RankError
from teaching import doctor
from teaching.doctor import GIB, Check, report, run_doctor
from tests.tiers import exhaustive


def fails(check: Check, seen: str, remedy: str) -> None:
    assert not check.ok
    assert seen in check.seen
    assert remedy in check.remedy


def test_python(monkeypatch):
    assert doctor.check_python().ok
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    monkeypatch.setattr("platform.python_version", lambda: "3.10.9")
    fails(doctor.check_python(), "3.10.9 at", "needs 3.11 or newer")


@pytest.mark.parametrize(
    ("version", "ok"),
    [("2.11.0", True), ("2.13.0+cpu", True), ("3.0.1", True), ("2.10.2+cu126", False)],
)
def test_torch(monkeypatch, version, ok):
    monkeypatch.setattr(torch, "__version__", version)
    check = doctor.check_torch()
    assert (check.ok, check.seen) == (ok, version)
    assert "needs 2.11 or newer" in check.remedy


def test_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert doctor.check_cores().ok
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5}, raising=False)
    fails(doctor.check_cores(), "1", "needs 2")


@pytest.mark.parametrize(("free", "ok"), [(4.0, True), (3.9, False)])
def test_memory(monkeypatch, free, ok):
    Memory = collections.namedtuple("Memory", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(8 * GIB, int(free * GIB)))
    check = doctor.check_memory()
    assert (check.ok, check.seen) == (ok, f"8.0 GiB, {free} GiB of it free")
    assert "needs 4 GiB free" in check.remedy


def test_measuring_on_a_gpu_says_what_would_be_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not here: this torch has no CUDA" in doctor.check_measuring().seen
    Properties = collections.namedtuple("Properties", "total_memory major minor")
    found = Properties(80 * GIB, 9, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: found.major >= 8
    )
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.1")
    assert doctor.check_measuring() == Check("make gpu", True, "CUDA 13.0, driver 580.1")

    found = Properties(24 * GIB, 7, 5)
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    check = doctor.check_measuring()
    assert check.ok and check.seen.split("; ")[1:] == [
        "24 GiB of memory, but the 1.3B model needs 60",
        "no bf16 matmuls",
        "no fp8 matmuls, so they are emulated",
        "transformers is not installed, so it is left out",
    ]


def test_no_gpu_is_no_failure(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_gpu() == Check("GPU", True, "none; every chapter runs on the CPU")


@pytest.mark.parametrize(
    ("nccl", "seen"), [(True, "2 x H100, NCCL 2.27.5"), (False, "2 x H100; no NCCL, so gloo")]
)
def test_gpus_are_named(monkeypatch, nccl, seen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    check = doctor.check_gpu()
    assert check.ok and check.seen.startswith(seen)


@exhaustive  # two new Pythons
def test_two_processes_agree_over_gloo():
    check = doctor.check_gloo(timeout_s=60)
    assert check.ok, check.seen
    assert "2 processes agreed in" in check.seen


@exhaustive
def test_gloo_without_its_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    fails(doctor.check_gloo(timeout_s=60), "nosuch0", "127.0.0.1")


@exhaustive
def test_gloo_that_does_not_answer(monkeypatch):
    fails(doctor.check_gloo(timeout_s=0.01), "no answer within 0 s", "unset GLOO_SOCKET_IFNAME")


@exhaustive
def test_processes_that_start_slowly_are_slow_and_not_a_firewall(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_S", 0.0)
    check = doctor.check_gloo(timeout_s=60)
    assert check.ok and check.seen.startswith("slow (the machine is busy): 2 processes agreed in")
    assert "2 processes are still starting after" in capsys.readouterr().err

    check = doctor.check_gloo(timeout_s=60, start_s=0.0)
    fails(check, "slow: 2 processes have not started within 0 s", "the machine is busy")
    assert "firewall" not in report(check)


def test_ranks_start(monkeypatch):
    check = doctor.check_ranks()
    assert check.ok and re.search(r"4 started in \d+\.\d s$", check.seen)
    monkeypatch.setattr(doctor, "SLOW_S", 0.0)
    assert doctor.check_ranks().seen.startswith("slow (the machine is busy): 4 started in")


def test_ranks_that_do_not_start(monkeypatch):
    def fail(*_, **__):
        raise RankError("rank 0 was killed by SIGSEGV\n  rank 1 ...", {})

    monkeypatch.setattr(doctor, "run", fail)
    fails(doctor.check_ranks(), "rank 0 was killed by SIGSEGV", "MINITRON_START=spawn")


def test_writing(tmp_path):
    assert doctor.check_writing(tmp_path).ok
    assert list(tmp_path.iterdir()) == []
    fails(doctor.check_writing(tmp_path / "nowhere"), "No such file", "a folder of your own")
    file = tmp_path / "file"
    file.write_text("")
    fails(doctor.check_writing(file), "file: ", "a folder of your own")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_writing_in_a_read_only_folder():
    # Permissions do not stop a superuser, /proc does.
    fails(doctor.check_writing(Path("/proc/self")), "/proc/self: ", "a folder of your own")


def test_disk(monkeypatch, tmp_path):
    Usage = collections.namedtuple("Usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2 * GIB))
    assert doctor.check_disk(tmp_path).ok
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(GIB))
    fails(doctor.check_disk(tmp_path), "1.0 GiB free", "needs 2 GiB")


def test_jupyter(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.6.6")
    assert doctor.check_jupyter().ok

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    missing = doctor.check_jupyter()  # a GPU node trains without it
    assert missing.ok and "not installed" in missing.seen


CHECKS = [name for name in vars(doctor) if name.startswith("check_")]


@pytest.mark.parametrize("failing", [None, *CHECKS])
def test_one_line_per_check_and_the_exit_code(monkeypatch, capsys, failing):
    for name in CHECKS:
        result = Check(name, name != failing, "seen", "do this")
        monkeypatch.setattr(doctor, name, lambda result=result: result)

    assert run_doctor() == (1 if failing else 0)
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) == 11
    failed = [line.split()[1] for line in lines if line.startswith("FAIL")]
    assert failed == ([failing] if failing else [])
    assert sum("seen: do this" in line for line in lines) == bool(failing)
    assert verdict.startswith("Not ready" if failing else "Ready")


def test_a_passing_line_has_no_remedy():
    assert report(Check("disk", True, "9 GiB", "buy one")) == "ok    disk         9 GiB"
