"""Messages: what the groups of a pipeline send each other, put into the order of its schedule.

A message is all values that one stage hands to another for one micro-batch, or their gradients on
the way back. Its text form is that of torch.distributed.pipelining, `0SEND_F1` and `1RECV_F1`;
where the stages are no neighbours, as in a U-Net, the other one follows: `0SEND_F1>3`,
`3RECV_F1<0`. 1F1B of two micro-batches on two stages is

    group 0   0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
    group 1   1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

A send begins when the action that makes it has ended, and is waited for when the step ends. A
receive is posted ahead and waited for by the action that needs it.

Order. Messages are ordered by when they are made, one unit of time per action, and each pair of
groups posts its sends and receives in this order: NCCL pairs them by their order alone. A receive
stands in front of the action before the one that needs it, or, for the others' sake,

    after the sends to the same group that were made before it;
    before all that come after it on the same pair;
    before actions that begin when it has been made, or later.

Of the last follows that no step waits for ever, even where a send waits until its receive is
posted (as gloo's do): whatever a group waits for was made earlier, or at the same time and stands
before it in the order."""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from synchromesh.values.schedule import Action, ActionKind, Schedule


@dataclass(frozen=True, order=True)
class Message:
    """All values of a micro-batch that stage `source` makes and stage `target` reads: themselves
    (F), from source to target, or their gradients (B), from target to source."""

    kind: ActionKind
    source: int
    target: int
    micro_batch: int

    @property
    def sender(self) -> int:
        return self.source if self.kind == "F" else self.target

    @property
    def receiver(self) -> int:
        return self.target if self.kind == "F" else self.source

    @property
    def made_by(self) -> Action:
        """The action after which it is there."""
        return Action(self.sender, self.kind, self.micro_batch)

    @property
    def forward(self) -> "Message":
        """The message of the values themselves, of these or of their gradients."""
        return Message("F", self.source, self.target, self.micro_batch)

    @property
    def needed_by(self) -> Action:
        """The action that waits for it."""
        return Action(self.receiver, self.kind, self.micro_batch)

    def label(self, verb: str, other: str) -> str:
        """The text form without the stage; other: the other stage where it is no neighbour."""
        skips = self.target - self.source > 1
        return f"{verb}_{self.kind}{self.micro_batch}" + other * skips


@dataclass(frozen=True)
class Run:
    """The action is run; it waits for the messages that it needs."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclass(frozen=True)
class Send:
    """The message departs."""

    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"{m.sender}{m.label('SEND', f'>{m.receiver}')}"


@dataclass(frozen=True)
class Receive:
    """The receive of the message is posted."""

    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"{m.receiver}{m.label('RECV', f'<{m.sender}')}"


Instruction = Run | Send | Receive


@lru_cache(maxsize=64)
def instructions(
    schedule: Schedule, crossings: frozenset[tuple[int, int]]
) -> tuple[tuple[Instruction, ...], ...]:
    """What each group does, in order.

    crossings: the pairs (source, target) of stages whose target reads what the source makes. Those
    on one group need no message."""
    assert schedule.turns == 1 or not crossings, "micro-batches of a pipeline take no turns"
    for source, target in crossings:
        if not 0 <= source < target < len(schedule.of):
            raise ValueError(
                f"values go from a stage to a later one, not from {source} to {target} of "
                f"{len(schedule.of)} stages"
            )
    messages = _ordered(schedule, crossings)
    slots = _slots(schedule, messages)
    standing: list[list[list[Instruction]]] = [[[] for _ in (*a, None)] for a in schedule.groups]
    for message in messages:
        sender, receiver = _groups(schedule, message)
        standing[sender][slots[Send(message)]].append(Send(message))
        standing[receiver][slots[Receive(message)]].append(Receive(message))
    lists: list[tuple[Instruction, ...]] = []
    for actions, before in zip(schedule.groups, standing, strict=True):
        runs = zip(map(Run, actions), before, strict=False)
        lists.append((*(i for run, first in runs for i in (*first, run)), *before[-1]))
    return tuple(lists)


def _groups(schedule: Schedule, message: Message) -> tuple[int, int]:
    """The group that sends and the group that receives."""
    return schedule.of[message.sender], schedule.of[message.receiver]


def _ordered(schedule: Schedule, crossings: Collection[tuple[int, int]]) -> list[Message]:
    """All messages between groups, in the order in which they are made."""
    made = schedule.times()
    kinds: tuple[ActionKind, ...] = ("F", "B") if schedule.trains else ("F",)
    messages = [
        Message(kind, source, target, m)
        for kind in kinds
        for source, target in crossings
        if schedule.of[source] != schedule.of[target]
        for m in range(schedule.micro_batches)
    ]
    return sorted(messages, key=lambda m: (made[m.made_by], m))


def _slots(schedule: Schedule, messages: Sequence[Message]) -> dict[Send | Receive, int]:
    """In front of which of its group's actions each send and receive stands; sends that stand
    behind all of them count on. messages: in their order."""
    begun = schedule.times()
    starts = [[begun[a] for a in actions] for actions in schedule.groups]
    index = {a: i for actions in schedule.groups for i, a in enumerate(actions)}
    slots: dict[Send | Receive, int] = {}
    sent: dict[tuple[int, int], int] = {}  # from a group to another: where the last one stands
    earliest: dict[Message, int] = {}
    for message in messages:
        sender, receiver = _groups(schedule, message)
        slots[Send(message)] = sent[sender, receiver] = index[message.made_by] + 1
        earliest[message] = sent.get((receiver, sender), 0)
    latest: dict[tuple[int, int], int] = {}  # on a group, of the messages with another
    for message in reversed(messages):
        sender, receiver = _groups(schedule, message)
        ahead = max(0, index[message.needed_by] - 1)
        made = bisect_left(starts[receiver], begun[message.made_by] + 1)
        last = latest.get((receiver, sender), ahead)
        slot = max(earliest[message], min(ahead, made, last))
        slots[Receive(message)] = latest[receiver, sender] = slot
        latest[sender, receiver] = slots[Send(message)]
    return slots
