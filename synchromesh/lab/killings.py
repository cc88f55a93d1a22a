"""Killings: processes that the kernel ended as they needed more memory than their host has."""

from collections.abc import Callable, Sequence

from synchromesh.lab.cgroup import Groups
from synchromesh.values import size


def killings(groups: Groups, parts: Sequence[str]) -> Callable[[], str]:
    """Says, whenever it is called, of which hosts the kernel has killed processes since now; empty
    where of none. parts: names of the hosts' groups."""
    before = [groups.killed(part) for part in parts]

    def told() -> str:
        hosts = [h for h, part in enumerate(parts) if groups.killed(part) > before[h]]
        limits = sorted({groups.memory(parts[h]) or 0 for h in hosts})
        if not hosts:
            return ""
        return (
            f"the kernel killed processes of host{'s' * (len(hosts) > 1)} "
            f"{', '.join(map(str, hosts))}, which needed more than their "
            f"{' or '.join(map(size.show, limits))} of memory"
        )

    return told
