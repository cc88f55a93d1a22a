"""A checked gather: a few numbers of every rank, which say in which method they are.

One small exchange, of one size for all methods, so that ranks in different ones get a sentence:

    rank 0    save   ]
    rank 1    step   ]->  an error on both, no wait for ever and no message of a wrong size"""

from collections.abc import Callable, Sequence

import torch

from synchromesh.engine import control_channel

EXCHANGE, STEP, EVALUATE, EVALUATED = "exchange", "step", "evaluate", "evaluated"
WORDS = {
    EXCHANGE: "in prepare, in gather_numbers or at a batch of a stream",
    STEP: "in step or backward",
    EVALUATE: "in evaluate",
    EVALUATED: "at the end of evaluate",
}
METHODS = (
    *WORDS, "adapt", "buffers", "export", "predict", "resume", "save", "state_dict", "switch",
)  # fmt: skip
NUMBERS = 17  # that a rank may send with the method's


def checked_gather(
    group: control_channel.Reachable,
    method: str,
    numbers: Sequence[int] = (),
    device: torch.device | None = None,
) -> list[tuple[int, ...]]:
    """The numbers of every rank, at most `NUMBERS`; ValueError on all where one is in another
    method."""
    return start_checked_gather(group, method, numbers, device)(numbers)


def start_checked_gather(
    group: control_channel.Reachable,
    method: str,
    numbers: Sequence[int],
    device: torch.device | None,
) -> Callable[[Sequence[int]], list[tuple[int, ...]]]:
    """Begins one; the function that waits for it (`control_channel.start_numbers`)."""
    here, padding = METHODS.index(method), [0] * (NUMBERS - len(numbers))
    finish = control_channel.start_numbers(group, [here, *numbers, *padding], device)
    return lambda last: _checked(group, finish([here, *last, *padding]), len(numbers))


def _checked(
    group: control_channel.Reachable, table: list[tuple[int, ...]], count: int
) -> list[tuple[int, ...]]:
    places = [METHODS[row[0]] for row in table]
    if {*places} == {EVALUATE, EVALUATED}:
        ended = [group.ranks[i] for i, place in enumerate(places) if place == EVALUATED]
        raise ValueError(
            f"ranks {ended} have no more batches while the others have: give every rank equally "
            "many, with 0 rows where it has none; trainer.loader does"
        )
    if odd := [i for i, place in enumerate(places) if place != places[0]]:
        first, other = (WORDS.get(places[i], f"in {places[i]}") for i in (0, odd[0]))
        raise ValueError(
            f"rank {group.ranks[0]} is {first}, rank {group.ranks[odd[0]]} {other}: every rank "
            "calls the trainer's methods alike and in the same order, also those of which only "
            "one needs the result (no `if rank == 0:` around save, evaluate or state_dict)"
        )
    return [row[1 : 1 + count] for row in table]
