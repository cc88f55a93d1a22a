"""Servers: the first ranks of a group, each of which keeps one part of what all compute with.

    push     rank i sends part s of its gradient to server s, which adds up the parts of all ranks
    fetch    server s sends its part of the parameters to all others

Of n bytes in all, on N ranks of which S are servers, one that is none sends n in a push; a server
sends (S - 1)/S n, and (N - 1)/S n in a fetch; a dedicated one nothing, and W/S n for W workers.
(Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI;
`values/traffic.Servers`.)"""

from enum import IntEnum

from torch import Tensor

from synchromesh.engine.groups import Group
from synchromesh.programs.communicator import Finish
from synchromesh.values.traffic import Servers


class MessageTag(IntEnum):
    """What a message is, where several may be under way between two ranks; 0: a push."""

    ASKED = 1  # what an asynchronous worker wants, as `WorkerRequest`
    GRADIENT = 2
    ANSWERED = 3  # as `ServerAnswer`
    PARAMETERS = 4
    FETCHED = 5  # by all at once


def start_push(group: Group, servers: Servers, parts: Tensor, told: int, payload: int) -> Finish:
    """parts: (servers, n), this rank's of what each server keeps -> (n,), the sum over all ranks
    on a server; on others (told,), its last numbers, which the first server has told. payload:
    bytes to count."""
    count, first, index = servers.count, servers.first, group.index
    serves = index < count
    came = parts.new_zeros(group.size - first if serves else 1, parts.shape[1] if serves else told)
    sends = [(server, parts[server]) for server in range(count)] if index >= first else []
    if serves:
        receives = [(i, came[i - first]) for i in range(first, group.size)]
    else:
        receives = [(0, came[0])]
    finish = group.start_exchange(sends, receives, payload)

    def summed() -> Tensor:
        finish()
        total = came.sum(0)
        if index == 0:
            others = range(count, group.size)
            group.exchange([(i, total[-told:]) for i in others], [], 0)
        return total

    return summed


def start_fetch(group: Group, servers: Servers, part: Tensor) -> Finish:
    """part: (n,) of a server, of others any as long -> (servers, n); zeros on a dedicated one."""
    count, first = servers.count, servers.first
    everyone = range(first, group.size) if group.index < count else ()
    fetches = group.index >= first
    parts = part.new_empty(count, *part.shape) if fetches else part.new_zeros(count, *part.shape)
    receives = [(server, parts[server]) for server in range(count)] if fetches else []
    sends = [(i, part) for i in everyone]
    # it may begin while gradients are still pushed
    finish = group.start_exchange(sends, receives, tag=MessageTag.FETCHED)

    def fetched() -> Tensor:
        finish()
        return parts

    return fetched
