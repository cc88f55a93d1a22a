"""The way of a process onto a host of a lab, for processes that are there already."""

import os
from dataclasses import dataclass

from synchromesh.lab import entry


@dataclass(frozen=True)
class Way:
    """How a process of a run gets onto its host. place: namespace, cores, and the doors of its
    control groups (lab/entry.py); variables: of its environment."""

    place: tuple[str, ...]
    variables: dict[str, str]

    def take(self) -> None:
        """Takes this process there, which must have one thread. OSError where the kernel
        refuses."""
        namespace, cores, *doors = self.place
        os.environ.update(self.variables)
        entry.enter(namespace, {int(core) for core in cores.split(",")}, 0, doors)
