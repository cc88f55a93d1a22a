"""Hosts as the tests of the lab see them: where they can be, and what a lab has left behind."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from synchromesh.lab import cgroup, network, reason_unavailable
from synchromesh.lab.record import Tag

needs_hosts = pytest.mark.skipif(
    reason_unavailable() is not None, reason=str(reason_unavailable())
)


def _limits_memory() -> bool:
    controllers = cgroup.ROOT / "cgroup.controllers"
    if controllers.exists():
        return "memory" in controllers.read_text().split()
    return os.access(cgroup.ROOT / "memory", os.W_OK)


needs_memory = pytest.mark.skipif(
    not _limits_memory(), reason="there is no memory controller of cgroup v1 or v2"
)


def traces(tag: Tag) -> list[str]:
    """What the lab of a keeper has on this machine: namespaces and control groups."""
    groups = cgroup.detect()
    assert groups is not None
    names = (*network.namespaces(), *groups.names())
    return [name for name in names if name.startswith(f"{tag}-")]  # not those of a longer tag


def alive(pid: int) -> bool:
    """Whether the process runs: one that is dead but not yet reaped by its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def until(true: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
