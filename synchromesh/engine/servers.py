"""Servers: the first ranks of a group, each of which keeps one part of what all compute with.

    push     rank i sends part s of its gradient to server s, which adds up the parts of all ranks
    fetch    server s sends its part of the parameters to all others

Of n bytes in all, on N ranks of which S are servers, one that is none sends n in a push; a server
sends (S - 1)/S n, and (N - 1)/S n in a fetch. (Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server", OSDI; `values/traffic.served_bytes`.)"""

from torch import Tensor

from synchromesh.engine.groups import Group
from synchromesh.programs.communicator import Finish


def start_push(group: Group, parts: Tensor, told: int, payload: int) -> Finish:
    """parts: (servers, n), this rank's of what each server keeps -> (n,), the sum over all ranks
    on a server. On others only its last `told` numbers count, which the first server has told.
    payload: bytes to count."""
    servers, index = parts.shape[0], group.index
    came = parts.new_zeros(group.size if index < servers else 1, parts.shape[1])
    sends = [(server, parts[server]) for server in range(servers)]
    if index < servers:
        receives = [(i, came[i]) for i in range(group.size)]
    else:
        receives = [(0, came[0, -told:])]
    finish = group.start_exchange(sends, receives, payload)

    def summed() -> Tensor:
        finish()
        total = came.sum(0)
        if index == 0:
            others = range(servers, group.size)
            group.exchange([(i, total[-told:]) for i in others], [], 0)
        return total

    return summed


def start_fetch(group: Group, part: Tensor, servers: int) -> Finish:
    """part: (n,) of a server, of others any as long -> (servers, n) on all ranks."""
    everyone = range(group.size) if group.index < servers else ()
    parts = part.new_empty(servers, *part.shape)
    receives = [(server, parts[server]) for server in range(servers)]
    finish = group.start_exchange([(i, part) for i in everyone], receives)

    def fetched() -> Tensor:
        finish()
        return parts

    return fetched
