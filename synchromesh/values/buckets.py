"""Gradient buckets: which gradients are summed over ranks in one collective, and when.

    backward makes gradients of   p9 p8 p7 | p6 p5 | p4 p3 p2 p1 | p0      (last parameter first)
    buckets are sent as filled    ---- 0 --> -- 1 -> ------ 2 ---->

Only gradients of one kind can share a bucket. Buckets are sent in their order, which is that of
every rank. `Sending` says so of a step, gradient by gradient: the engine carries its events out
with tensors, the predictions of `cost` with seconds and bytes."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, TypeVar

from synchromesh.values.placement import Placement
from synchromesh.values.schedule import Action, weights_kind

T = TypeVar("T")
MIB = 1 << 20


@dataclass(frozen=True)
class BucketSizes:
    """Bytes at which a bucket is full and takes no further gradient.

    Both are those of DDP (`bucket_cap_mb` and its first bucket, Li et al. 2020, arXiv 2006.15704).
    """

    full: int = 25 * MIB
    first: int = MIB  # of the first bucket of a kind: small, so that communication begins early
    # Buckets of which each rank gets a part that are under way at once, and take memory as long.
    # Chosen: one is sent while another fills.
    under_way: int = 2
    # Of those that servers step by, and of messages of larger ones: servers send the parameters of
    # one while they get the next one's gradients. So many of all bytes, at least so many bytes.
    # The longest that a push and a fetch then take together is 1 + 1/16 of one of them. Chosen.
    served_parts: int = 16
    served: int = 1 << 16

    def of(self, kind: Hashable, total: int, is_first: bool) -> int:
        """Of a bucket of a kind, of which there are so many bytes."""
        if isinstance(kind, BucketKind) and kind.served:
            return max(self.served, total // self.served_parts)
        return self.first if is_first else self.full

    def messages(self, size: int, total: int) -> int:
        """Into how many equal ones servers get so many bytes of `total`, and send them."""
        return max(1, size // max(self.served, total // self.served_parts))


SIZES = BucketSizes()


@dataclass(frozen=True)
class BucketKind:
    """What the gradients of a bucket have in common.

    ranks: that sum them. scattered: whether each of these gets a part of the sum, not all of it.
    stages: of this device group that use them, where they are summed after each backward; (): once
    in a step, after the last one. compressor: what they are sent by; "": as they are. served:
    whether servers keep the parts."""

    ranks: Hashable
    dtype: Hashable
    scattered: bool = False
    stages: tuple[int, ...] = ()
    compressor: str = ""
    served: bool = False

    @classmethod
    def of(
        cls, ranks: Hashable, dtype: Hashable, part: Placement, users: tuple[int, ...],
        each_backward: bool, compressor: str = "", served: bool = False,
    ) -> "BucketKind":  # fmt: skip
        """Of a parameter of which a rank keeps `part`, which the stages `users` use."""
        stages = users if each_backward else ()
        return cls(ranks, dtype, part.sharded, stages, compressor, served)


def fill(
    parameters: Sequence[T], kind: Callable[[T], Hashable], size: Callable[[T], int]
) -> list[list[T]]:
    """The buckets in the order in which they are sent, each with its parameters.

    parameters: in the order of the model; backward makes their gradients in the reverse one.
    kind: what the gradients of a bucket have in common. size: bytes of a gradient on one rank."""
    filling: dict[Hashable, list[T]] = {}
    left: dict[Hashable, int] = {}  # bytes until the bucket of a kind is full
    total = Counter[Hashable]()
    for parameter in parameters:
        total[kind(parameter)] += size(parameter)
    done: list[list[T]] = []
    for parameter in reversed(parameters):
        key = kind(parameter)
        filling.setdefault(key, []).append(parameter)
        left[key] = left.get(key, SIZES.of(key, total[key], True)) - size(parameter)
        if left[key] <= 0:
            done.append(filling.pop(key))
            left[key] = SIZES.of(key, total[key], False)
    return done + list(filling.values())


@dataclass(frozen=True)
class BucketEvent:
    """A bucket's collective begins, or has to be over."""

    verb: Literal["send", "await"]
    bucket: int

    def __str__(self) -> str:
        return f"{self.verb} {self.bucket}"


@dataclass(frozen=True)
class SendingRules:
    """What a bucket waits for, all of which the engine keeps to.

    Predictions leave some out, each of which was found where both came to walk the same events;
    to keep to it would change what is predicted (docs/design.md, "Sharded states")."""

    in_order: bool = True  # until those before it have been sent
    of_stages: bool = True  # where the backwards of several stages add up: until the first's ends
    reuse: bool = True  # before it is filled again, for its last sum: it is the same memory
    late: bool = False  # until a backward, or the last of all, is over


RULES = SendingRules()


class Sending:
    """Which buckets are sent, and which are awaited, as gradients come in.

        two buckets that are scattered      fill(0)  send 0       fill(1)  send 1
        once more                           open(0)  await 0      fill(0)  send 0

    Those that are summed once are sent between `begin` and `finish`, those that are summed in each
    backward before its `end_backward`. items: of each bucket, by any names."""

    def __init__(
        self,
        buckets: Sequence[tuple[BucketKind, Collection[Hashable]]],
        rules: SendingRules = RULES,
    ) -> None:
        self._kinds = [kind for kind, _ in buckets]
        self._items = [frozenset(items) for _, items in buckets]
        self._rules = rules
        self._missing = [set(items) for items in self._items]
        self._unsent: dict[int | None, list[int]] = {}  # by `_round`, in their order
        for round_ in dict.fromkeys(map(self._round, range(len(buckets)))):
            self._restart(round_)
        self._under_way: list[int] = []

    def _round(self, bucket: int) -> int | None:
        """The stage with whose backward a bucket is sent; None: with the last one of all."""
        stages = self._kinds[bucket].stages
        return stages[0] if stages else None

    def _restart(self, round_: int | None) -> None:
        its = [n for n in range(len(self._kinds)) if self._round(n) == round_]
        self._unsent[round_] = its
        for bucket in its:
            self._missing[bucket] = set(self._items[bucket])

    def begin(self) -> None:
        """A step's last backwards begin."""
        self._restart(None)

    def open(self, bucket: int) -> list[BucketEvent]:
        """Before a gradient is filled in: the sum of an earlier backward has come."""
        if not self._rules.reuse or bucket not in self._under_way:
            return []
        self._under_way.remove(bucket)
        return [BucketEvent("await", bucket)]

    def fill(self, bucket: int, item: Hashable) -> list[BucketEvent]:
        """A gradient is in its bucket."""
        self._missing[bucket].discard(item)
        unsent = self._unsent[self._round(bucket)]
        if self._rules.in_order:
            ready = list(takewhile(self._full, unsent))
        else:
            ready = [bucket] if bucket in unsent and self._full(bucket) else []
        for one in ready:
            unsent.remove(one)
        return [event for one in ready for event in self._send(one)]

    def _full(self, bucket: int) -> bool:
        several = self._rules.of_stages and len(self._kinds[bucket].stages) > 1
        return not (self._missing[bucket] or several or self._rules.late)

    def end_backward(self, stage: int) -> list[BucketEvent]:
        """A backward of a stage is over: what is summed in each one is sent."""
        if stage not in self._unsent:
            return []
        events = self._rest(stage)
        self._restart(stage)
        return events

    def finish(self) -> list[BucketEvent]:
        """The last backward is over: what is left is sent, and all of it awaited."""
        events = self._rest(None)
        self._under_way.clear()
        return events

    def abandon(self) -> None:
        """A step has failed: nothing of it is sent or awaited."""
        for round_ in self._unsent:
            self._restart(round_)
        self._under_way.clear()

    def _rest(self, round_: int | None) -> list[BucketEvent]:
        unsent = self._unsent.get(round_, [])
        events = [event for bucket in unsent for event in self._send(bucket)]
        unsent.clear()
        return events

    def _send(self, bucket: int) -> list[BucketEvent]:
        """Of those that are scattered no more than `SIZES.under_way` remain under way, but where
        servers have them, of whose buckets there are few."""
        events = [*self.open(bucket), BucketEvent("send", bucket)]
        if self._kinds[bucket].scattered and not self._kinds[bucket].served:
            self._under_way.append(bucket)
        if len(self._under_way) > SIZES.under_way:
            events.append(BucketEvent("await", self._under_way.pop(0)))
        return events


def completing(
    actions: Sequence[Action], users: Mapping[str, tuple[int, int]], each: Collection[str] = ()
) -> dict[Action, dict[int, tuple[str, ...]]]:
    """By backward of a device group, and by component in it: the parameters whose gradients are
    complete then. Of a schedule that divides backwards it is the part that makes these gradients.

    That is when the first of the components that use it is done, which backward comes to last, in
    the last backward of its stage. actions: of the group, in their order. users: the stage and the
    place in the chain of that component. each: those that are summed in each backward."""
    kind = weights_kind(actions)
    backwards = [action for action in actions if action.kind == kind]
    last = {action.stage: action for action in backwards}
    complete: dict[Action, dict[int, tuple[str, ...]]] = {}
    for stage, last_one in last.items():
        own = {name: component for name, (s, component) in users.items() if s == stage}
        every = _by_component({name: i for name, i in own.items() if name in each})
        complete |= {action: every for action in backwards if action.stage == stage}
        complete[last_one] = _by_component(own)
    return complete


def _by_component(components: Mapping[str, int]) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, component in components.items():
        names[component] = (*names.get(component, ()), name)
    return names
