"""Killings: processes that the kernel ended as they needed more memory than their host has."""

from collections.abc import Sequence
from pathlib import Path

from synchromesh.lab.cgroup import Groups
from synchromesh.launch.forewarning import forewarning
from synchromesh.values import size


class Killings:
    """Of one run, from now on, on hosts whose groups have the names `parts`; what runs may say
    before, in the file `said`, why it will be killed."""

    def __init__(self, groups: Groups, parts: Sequence[str], said: Path) -> None:
        self._groups, self._parts, self._said = groups, tuple(parts), said
        self._before = [groups.killed(part) for part in parts]
        said.unlink(missing_ok=True)  # of an earlier run

    def told(self) -> str:
        """Of which hosts the kernel has killed processes, with what these had said of their
        memory; empty where of none."""
        groups, parts = self._groups, self._parts
        hosts = [h for h, part in enumerate(parts) if groups.killed(part) > self._before[h]]
        limits = sorted({groups.memory(parts[h]) or 0 for h in hosts})
        if not hosts:
            return ""
        killed = (
            f"the kernel killed processes of host{'s' * (len(hosts) > 1)} "
            f"{', '.join(map(str, hosts))}, which needed more than their "
            f"{' or '.join(map(size.show, limits))} of memory"
        )
        said = forewarning(self._said)
        return f"{killed}; {said}" if said else killed
