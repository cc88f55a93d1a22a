"""Removal of labs by their tags: what runs in their hosts, control groups, namespaces, records."""

import time

from synchromesh.lab import cgroup, network
from synchromesh.lab.cgroup import Groups
from synchromesh.lab.record import Records
from synchromesh.lab.tag import Tag


def parts(tag: Tag, groups: Groups) -> list[str]:
    """Names of the namespaces and control groups of a lab."""
    names = [*network.namespaces(), *groups.names()]
    return [name for name in names if Tag.in_name(name) == tag]


def remove(tag: Tag, groups: Groups, records: Records) -> list[str]:
    """Remove a lab with all that runs in it; the names it was recorded under.

    Repeated until nothing is found, as the process that was building may not have stopped yet."""
    names = records.forget(tag)
    deadline = time.monotonic() + 30
    while found := parts(tag, groups):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(found)} cannot be removed (30 s)")
        for name in groups.names():
            if Tag.in_name(name) == tag:
                cgroup.remove(groups, name)
        for name in network.namespaces():
            if Tag.in_name(name) == tag:
                network.remove(name)
    return names


def remove_stale(groups: Groups, records: Records) -> dict[Tag, list[str]]:
    """Remove the labs whose keeper is no longer alive: their tags, the names by tag."""
    named = [Tag.in_name(name) for name in (*network.namespaces(), *groups.names())]
    tags = {tag for tag in named if tag is not None} | {r.tag for r in records.all()}
    return {tag: remove(tag, groups, records) for tag in sorted(tags) if not tag.alive}
