"""Requirements of emulated hosts: what this machine lacks, in one sentence each."""

import importlib.util
import os
import sys
from pathlib import Path

from synchromesh.lab import cgroup
from synchromesh.lab.cgroup import Groups

CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bits of linux/capability.h


def reason_unavailable() -> str | None:
    """Why hosts cannot be emulated here, in one sentence; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"emulated hosts need Linux network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"emulated hosts need root (user id {os.geteuid()}): run the command with sudo"
    missing = _missing_capabilities()
    if missing:
        return (
            f"emulated hosts need {' and '.join(missing)}, which this container's root lacks: "
            "start it with --privileged"
        )
    if importlib.util.find_spec("pyroute2") is None:
        return "emulated hosts need the package pyroute2: pip install pyroute2"
    if cgroup.detect() is None:
        return (
            "emulated hosts need the cpu controller of cgroup v1 or v2, writable below "
            f"{cgroup.ROOT}: mount it, or start the container with --privileged"
        )
    return None


def require() -> Groups:
    """This machine's control groups; ValueError with the reason where it cannot emulate hosts."""
    reason = reason_unavailable()
    groups = cgroup.detect() if reason is None else None
    if groups is None:
        raise ValueError(reason)
    return groups


def _missing_capabilities() -> list[str]:
    status = Path("/proc/self/status").read_text()
    bits = next(int(line.split()[1], 16) for line in status.splitlines() if "CapEff" in line)
    return [name for name, bit in CAPABILITIES.items() if not bits >> bit & 1]
