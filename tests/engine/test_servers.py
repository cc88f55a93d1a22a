"""Pushes and fetches in one message or several: what comes, and that a part comes before the
rest."""

import pytest
import torch
from torch import Tensor

from synchromesh.engine.groups import Group
from synchromesh.engine.servers import FetchUnderWay, PushUnderWay
from synchromesh.engine.world import World
from synchromesh.values.traffic import Servers
from tests.ranks import run

SIZE, ENTRIES, TOLD = 3, 10, 2


def everyone() -> Group:
    return World.open("cpu").everyone


def pushed(servers: Servers, count: int) -> list[tuple[int, int, Tensor]]:
    group = everyone()
    parts = (group.index + 1) * torch.arange(servers.count * (ENTRIES + TOLD)).float()
    parts = parts.view(servers.count, ENTRIES + TOLD)
    return [*PushUnderWay(group, servers, parts, TOLD, 0, count).sums()]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("servers", [Servers(1), Servers(2), Servers(3), Servers(1, True)])
def test_servers_get_the_sum_of_their_part(servers: Servers, count: int) -> None:
    total = sum(range(1 + servers.first, 1 + SIZE))
    parts = total * torch.arange(servers.count * (ENTRIES + TOLD)).float()
    for rank, sums in enumerate(run(SIZE, pushed, servers, count)):
        assert len(sums) == (1 if count == 1 else 1 + count)
        told = parts[ENTRIES : ENTRIES + TOLD]  # by the first server
        if rank >= servers.count:
            assert torch.equal(sums[0][2], told) and not any(len(x) for *_, x in sums[1:])
            continue
        due = parts.view(servers.count, -1)[rank]
        assert sums[0][1] == ENTRIES + TOLD  # those that are told first
        assert sum(stop - start for start, stop, _ in sums) == ENTRIES + TOLD
        for start, stop, found in sums:
            assert torch.equal(found, due[start:stop])


def fetched(servers: Servers, count: int) -> Tensor:
    """Of a server that fills the second half of its part when others have the first one."""
    group = everyone()
    part = torch.full((ENTRIES,), torch.nan)
    fetch = FetchUnderWay(group, servers, part, count, number=3)
    half = ENTRIES // 2
    if group.index < servers.count:
        part[:half] = group.index + torch.arange(half)
        fetch.send(half)
    elif count > 1:
        for finish in fetch._begun[: count // 2]:
            finish()
        assert not fetch.parts[:, :half].isnan().any()
    if count > 1:
        group.barrier()
    if group.index < servers.count:
        part[half:] = group.index + torch.arange(half, ENTRIES)
    return fetch()


@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("servers", [Servers(1), Servers(2), Servers(3), Servers(1, True)])
def test_all_get_what_servers_have(servers: Servers, count: int) -> None:
    due = torch.arange(servers.count)[:, None] + torch.arange(ENTRIES)
    for rank, parts in enumerate(run(SIZE, fetched, servers, count)):
        assert torch.equal(parts, torch.zeros_like(parts) if rank < servers.first else due.float())
