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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from synchromesh.values.holding import Holding


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered at once: of one component, which is the first to use them, of
    one data type, over the same ranks."""

    holdings: tuple[Holding, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(h.tensor.name for h in self.holdings)

    @property
    def lasting(self) -> bool:
        """Whether they are there from their first use to their last one."""
        return self.holdings[0].states != "parameters"


def units(components: Iterable[Sequence[Holding]]) -> tuple[Unit, ...]:
    """The units of the parameters of each component, as far as they are sharded."""
    found: list[Unit] = []
    known: set[str] = set()
    for parameters in components:
        kinds: dict[object, list[Holding]] = {}
        for h in parameters:
            if h.parts > 1 and h.tensor.name not in known:
                known.add(h.tensor.name)
                kind = h.gradient_layout, h.tensor.dtype, h.states
                kinds.setdefault(kind, []).append(h)
        found += [Unit(tuple(alike)) for alike in kinds.values()]
    return tuple(found)


Run = tuple[tuple[int, tuple[int, ...]], ...]  # components that compute one after the other, by
# their place in the chain, with the units that each needs; those that need none are left out


@dataclass(frozen=True)
class Gathering:
    """The units of a chain; by component those that it needs, and whether a gradient flows back
    through it."""

    units: tuple[Unit, ...]
    needed: tuple[tuple[int, ...], ...]
    flows: tuple[bool, ...]

    def run(self, stage: Iterable[int], backward: bool) -> Run:
        """What the components of a stage do for one micro-batch."""
        order = [i for i in stage if self.needed[i] and (self.flows[i] or not backward)]
        return tuple((i, self.needed[i]) for i in (reversed(order) if backward else order))

    def uses(self, runs: Iterable[Run], goes_on: bool = False) -> tuple["Use", ...]:
        """What a rank does that computes `runs`."""
        needed = tuple(units for run in runs for _, units in run)
        return uses(needed, tuple(unit.lasting for unit in self.units), goes_on)


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
    """A component that computes: which units it needs, by their numbers; which of them are
    gathered for it, and which are freed after it."""

    units: tuple[int, ...]
    gathered: tuple[int, ...]
    freed: tuple[int, ...]


@lru_cache(maxsize=64)
def uses(
    needed: tuple[tuple[int, ...], ...], lasting: tuple[bool, ...], goes_on: bool = False
) -> tuple[Use, ...]:
    """What each use of a component does.

    needed: the units of each use, in their order. lasting: of each unit. goes_on: whether uses
    follow that are not listed."""
    last = {unit: at for at, use in enumerate(needed) for unit in use}
    there: set[int] = set()
    found = []
    for at, use in enumerate(needed):
        following = needed[at + 1] if at + 1 < len(needed) else ()
        over = tuple(
            unit
            for unit in use
            if (last[unit] == at and not goes_on if lasting[unit] else unit not in following)
        )
        found.append(Use(use, tuple(u for u in use if u not in there), over))
        there = (there | set(use)) - set(over)
    return tuple(found)
