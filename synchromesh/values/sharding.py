"""Sharded states (ZeRO, Rajbhandari et al. 2020, arXiv 1910.02054): what is gathered when.

Whatever is sharded, each rank keeps one part of a parameter, with its gradient and the optimizer's
state. The level says how long more than that is there:

    optimizer    ZeRO 1    parameters from their first use in a step to the last; gradients are
                           summed once, after the last micro-batch
    gradients    ZeRO 2    the same; gradients are summed after each micro-batch
    parameters   ZeRO 3    parameters while a component computes, forward and backward

    components used    c0 c1 c2 | c2 c1 c0          gathered ahead of use    c0 c1 c2    - c1 c0
    (ZeRO 3)           forward  | backward          freed after it           c0 c1  -   c2 c1 c0

Between the last use in a step and the first one of the next no level has more than the parts. That
is less than ZeRO 1 and 2 have in the paper, where parameters stay; what is sent is the same."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from synchromesh.values.holding import Holding
from synchromesh.values.schedule import Action


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered at once: of one component, which is the first to use them, of
    one data type, over the same ranks."""

    holdings: tuple[Holding, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(h.tensor.name for h in self.holdings)

    @cached_property
    def bytes(self) -> int:
        """Of what a position computes with at most."""
        return sum(h.local_bytes for h in self.holdings)

    @property
    def lasting(self) -> bool:
        """Whether they are there from their first use to their last one."""
        return self.holdings[0].states != "parameters"


def units(components: Iterable[Sequence[Holding]]) -> tuple[Unit, ...]:
    """The units of the parameters of each component, as far as they are sharded."""
    made: list[Unit] = []
    known: set[str] = set()
    for parameters in components:
        kinds: dict[object, list[Holding]] = {}
        for h in parameters:
            if h.scattered and h.tensor.name not in known:
                known.add(h.tensor.name)
                kind = h.gradient_layout, h.tensor.dtype, h.states
                kinds.setdefault(kind, []).append(h)
        made += [Unit(tuple(alike)) for alike in kinds.values()]
    return tuple(made)


Run = tuple[tuple[int, tuple[int, ...]], ...]  # components that compute one after the other, by
# their place in the chain, with the units that each needs; those that need none are left out


@dataclass(frozen=True)
class Gathering:
    """The units of a chain; by component those that it needs, and whether a gradient flows back
    through it."""

    units: tuple[Unit, ...]
    needed: tuple[tuple[int, ...], ...]
    flows: tuple[bool, ...]

    @property
    def first_users(self) -> tuple[int, ...]:
        """The component of each unit, which is the first to need it."""
        return tuple(
            next(i for i, needed in enumerate(self.needed) if number in needed)
            for number in range(len(self.units))
        )

    def run(self, stage: Iterable[int], backward: bool) -> Run:
        """What the components of a stage do for one micro-batch."""
        order = [i for i in stage if self.needed[i] and (self.flows[i] or not backward)]
        return tuple((i, self.needed[i]) for i in (reversed(order) if backward else order))

    def uses(self, actions: Iterable[Action], stages: Sequence[Iterable[int]]) -> "Uses":
        """What a rank does in `actions`. stages: the components of each."""
        runs = [(a, self.run(stages[a.stage], a.kind == "B")) for a in actions]
        return uses_of(runs, self.units)


def gathering(
    units: tuple[Unit, ...], components: Iterable[tuple[Sequence[str], bool]]
) -> Gathering:
    """components: the parameters that each uses, and whether a gradient flows back through it."""
    number = {name: i for i, unit in enumerate(units) for name in unit.names}
    needed, flows = [], []
    for names, flowing in components:
        needed.append(tuple(dict.fromkeys(number[n] for n in names if n in number)))
        flows.append(flowing)
    return Gathering(units, tuple(needed), tuple(flows))


@dataclass(frozen=True)
class Use:
    """A component that computes, with units by their numbers: those that it needs; of these, those
    that are gathered for it, and those that are freed after it; those that are gathered while it
    computes, for the next one."""

    units: tuple[int, ...]
    gathered: tuple[int, ...]
    freed: tuple[int, ...]
    ahead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Uses:
    """The uses of a rank in their order, each with its action and component."""

    places: tuple[tuple[Action, int], ...] = ()
    uses: tuple[Use, ...] = ()

    @cached_property
    def number(self) -> Mapping[tuple[Action, int], int]:
        """Of the use of an action by a component; those that need no unit have none."""
        return {place: number for number, place in enumerate(self.places)}


def uses_of(
    runs: Sequence[tuple[Action, Run]], units: Sequence[Unit], goes_on: bool = False
) -> Uses:
    """What a rank does that computes `runs`. goes_on: whether others follow before the parameters
    change."""
    places = tuple((action, i) for action, run in runs for i, _ in run)
    needed = tuple(its for _, run in runs for _, its in run)
    return Uses(places, _uses(needed, tuple(unit.lasting for unit in units), goes_on))


@lru_cache(maxsize=64)
def _uses(
    needed: tuple[tuple[int, ...], ...], lasting: tuple[bool, ...], goes_on: bool
) -> tuple[Use, ...]:
    """needed: the units of each use, in their order. lasting: of each unit."""
    last = {unit: at for at, use in enumerate(needed) for unit in use}
    there: set[int] = set()
    uses: list[Use] = []
    for at, use in enumerate(needed):
        following = needed[at + 1] if at + 1 < len(needed) else ()

        def is_over(unit: int, at: int = at, following: tuple[int, ...] = following) -> bool:
            if lasting[unit]:
                return last[unit] == at and not goes_on
            return unit not in following

        gathered = tuple(unit for unit in use if unit not in there)
        uses.append(Use(use, gathered, tuple(filter(is_over, use))))
        there = (there | set(use)) - set(uses[-1].freed)
    ahead = (*(use.gathered for use in uses[1:]), ())
    return tuple(replace(use, ahead=units) for use, units in zip(uses, ahead, strict=False))


@dataclass(frozen=True)
class UnitEvent:
    """A unit's gather begins, has to be over, or its parameters are freed."""

    verb: Literal["gather", "await", "free"]
    unit: int

    def __str__(self) -> str:
        return f"{self.verb} {self.unit}"


@dataclass
class _InUse:
    """How many micro-batches have entered and left a use, and whether all will leave it."""

    leaves: bool
    entered: int = 0
    left: int = 0


class UseWalk:
    """What is gathered, awaited and freed as components come to their uses.

        ZeRO 3, c0 and c1          start      gather 0
                                   enter c0   await 0, gather 1
                                   leave c0   free 0
                                   enter c1   await 1
                                   leave c1

    together: how many micro-batches take turns, each of which enters and leaves every use: it is
    begins with the first of them and is over with the last one. Each says what is gathered ahead:
    whether that has begun is for those to know who carry the events out."""

    def __init__(self, uses: Uses) -> None:
        self.uses = uses
        self._begun: set[int] = set()
        self._at_work: dict[int, _InUse] = {}

    def start(self) -> list[UnitEvent]:
        """Before the first use."""
        return _events("gather", self.uses.uses[0].gathered if self.uses.uses else ())

    def enter(self, number: int, together: int = 1, leaves: bool = True) -> list[UnitEvent]:
        """Before a component computes. leaves: whether each micro-batch that enters will `leave`;
        if not, the use is over when all have entered and another one begins."""
        events: list[UnitEvent] = []
        for other, work in list(self._at_work.items()):
            if other != number and not work.leaves and work.entered == together:
                events += self._over(other)
        self._at_work.setdefault(number, _InUse(leaves)).entered += 1
        use = self.uses.uses[number]
        if number not in self._begun:
            self._begun.add(number)
            events += _events("await", use.gathered)
        return events + _events("gather", use.ahead)

    def leave(self, number: int, together: int = 1) -> list[UnitEvent]:
        """After a component has computed."""
        work = self._at_work[number]
        work.left += 1
        return self._over(number) if work.left == together else []

    def end_action(self) -> list[UnitEvent]:
        """What is in use is over, as the action is."""
        return [event for number in list(self._at_work) for event in self._over(number)]

    def _over(self, number: int) -> list[UnitEvent]:
        del self._at_work[number]
        return _events("free", self.uses.uses[number].freed)


def _events(verb: Literal["gather", "await", "free"], units: Iterable[int]) -> list[UnitEvent]:
    return [UnitEvent(verb, unit) for unit in units]
