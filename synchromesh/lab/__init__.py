"""The lab: emulated hosts on one machine, by network namespaces and control groups (root, Linux).

`Lab` is the face for tests and benchmarks; `synchromesh lab` the command."""

from synchromesh.lab.description import Description, Emulated
from synchromesh.lab.keeper import labs
from synchromesh.lab.lab import HostState, Lab
from synchromesh.lab.requirements import reason_unavailable
from synchromesh.lab.running import HostFailed, Result, Running, Way

__all__ = [
    "Description", "Emulated", "HostFailed", "HostState", "Lab", "Result", "Running", "Way",
    "labs", "reason_unavailable",
]  # fmt: skip
