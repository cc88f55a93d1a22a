"""Which host this process is on, as its kernel says."""

import os
import socket
from pathlib import Path


def boot() -> str:
    """Equal for all that run on one kernel, and so have one clock."""
    return told("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def told(path: str) -> str:
    """What a file of the system says; "" where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def namespace() -> str:
    """The network namespace, where there are such things."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
