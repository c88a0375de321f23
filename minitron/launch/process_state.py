"""CPU time and scheduler state of a process: they tell a hang from a busy machine."""

import psutil


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def wants_cpu(pid: int) -> bool:
    """Return whether a process computes, or would if it were given a CPU; else it sleeps."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except psutil.NoSuchProcess:
        return False
