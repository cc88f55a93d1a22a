"""The problem that the planner solves: components with options, links with prices, one step time.

A step runs its components 0 .. n-1 forward in topological order, then backward from last to first.
For component i the planner picks one option o_i. Sums over links run over their wanted forms:

    wanted(l) = { form_l[border of o_j]  for every target j of l }       each form is paid once
    F_i       = forward of o_i     + sum over links l from i, f in wanted(l), of forward_l[border of o_i, f]
    B_i       = backward of o_i    + sum over links l from i, f in wanted(l), of backward_l[border of o_i, f]
    t_i       = t_(i+1) + B_i                                            compute clock, t_n = 0
    N_i       = max(N_(i+1), t_i) + g_i   if g_i > 0, else N_(i+1)       network clock, N_n = 0
    step time = sum of F_i + max(t, N at the front) + sum of update_i
    memory    = sum of memory_i <= limit

A link's backward price stands where its source's backward begins, because the gradient is
converted before the source can use it; gradient traffic of later components hides it. The batch
is the source -1: its only border is 0, it costs nothing, and its links' prices are paid in front
of component 0 (forward) and behind it (backward).
"""  # noqa: E501

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BATCH = -1  # the source of a link that carries the batch


@dataclass(frozen=True)
class Option:
    """One way to run a component: seconds of a step, bytes on a device, its border. Options of
    equal border look the same to their neighbours (layout, placements of values)."""

    forward: float  # s on the critical path, blocking collectives included
    backward: float  # s, the same for backward
    gradient: float = 0.0  # s of traffic that begins when the backward ends and may be hidden
    update: float = 0.0  # s of the optimizer's step
    memory: int = 0  # bytes on a device: parameters, gradients, states, kept activations
    border: int = 0


@dataclass(frozen=True, eq=False)
class Prices:
    """What it costs to bring a value from the source's border to a wanted form. `forward`,
    `backward`: seconds [border of the source, form], inf where it is not allowed. `form`: the form
    that a target wants, by the target's border. Links of equal prices share one object; it is
    compared by identity."""

    forward: Floats
    backward: Floats
    form: tuple[int, ...]

    def faults(self) -> Iterator[str]:
        if self.forward.ndim != 2 or self.forward.shape != self.backward.shape:
            yield f"forward {self.forward.shape} and backward {self.backward.shape} differ"
            return
        if not all((table >= 0).all() for table in (self.forward, self.backward)):
            yield "prices must be at least 0"
        if not all(0 <= form < self.forward.shape[1] for form in self.form):
            yield f"forms {self.form} are not all below {self.forward.shape[1]}"


@dataclass(frozen=True)
class PricedEdge:
    """A value: the component that makes it (or `BATCH`), the later ones that read it."""

    source: int
    targets: tuple[int, ...]
    prices: Prices


@dataclass(frozen=True)
class Problem:
    """Options of each component, in topological order, and the links between them. Raises
    ValueError with every fault found. Components of equal options share one tuple."""

    components: tuple[tuple[Option, ...], ...]
    links: tuple[PricedEdge, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[int, str] = {}
        faults = []
        for i, options in enumerate(self.components):
            if id(options) not in seen:
                seen[id(options)] = _fault(options)
            if fault := seen[id(options)]:
                faults.append(f"component {i}: {fault}")
        if faults:
            raise ValueError("; ".join(faults))
        borders = [{o.border for o in options} for options in self.components]
        faults = [f"{link.source} -> {link.targets}: {fault}"
                 for link in self.links for fault in self._faults(link, borders)]  # fmt: skip
        if faults:
            raise ValueError("links: " + "; ".join(faults))

    def _faults(self, link: PricedEdge, borders: Sequence[set[int]]) -> list[str]:
        faults = [*link.prices.faults()]
        if not link.targets or not all(
            link.source < j < len(self.components) for j in link.targets
        ):
            faults.append(f"targets must lie in {link.source + 1} .. {len(self.components) - 1}")
        elif max(max(borders[j]) for j in link.targets) >= len(link.prices.form):
            faults.append(f"a target has a border without a form ({len(link.prices.form)} forms)")
        made = {0} if link.source == BATCH else borders[link.source]
        if not faults and max(made) >= len(link.prices.forward):
            faults.append(f"the source has a border without prices ({len(link.prices.forward)})")
        return faults


def _fault(options: Sequence[Option]) -> str:
    if not options:
        return "no option"
    for o in options:
        seconds = (o.forward, o.backward, o.gradient, o.update)
        if not all(0 <= s < math.inf for s in seconds) or o.memory < 0 or o.border < 0:
            return f"seconds, bytes and borders must be finite and at least 0: {o}"
    return ""


def evaluate(problem: Problem, choice: Sequence[int]) -> tuple[float, int]:
    """(step time in seconds, bytes on a device) of an option index for every component."""
    chosen = [options[k] for options, k in zip(problem.components, choice, strict=True)]
    forward = [o.forward for o in chosen]
    backward = [o.backward for o in chosen]
    batch = [0.0, 0.0]  # the prices of its links: forward, backward
    for link in problem.links:
        border = 0 if link.source == BATCH else chosen[link.source].border
        for form in sorted({link.prices.form[chosen[j].border] for j in link.targets}):
            there = float(link.prices.forward[border, form])
            back = float(link.prices.backward[border, form])
            if link.source == BATCH:
                batch[0] += there
                batch[1] += back
            else:
                forward[link.source] += there
                backward[link.source] += back
    compute = network = 0.0
    for i in reversed(range(len(chosen))):
        compute += backward[i]
        if chosen[i].gradient > 0:
            network = max(network, compute) + chosen[i].gradient
    seconds = sum(forward) + batch[0] + max(compute + batch[1], network)
    return seconds + sum(o.update for o in chosen), sum(o.memory for o in chosen)


EXACT = 1e-9  # relative difference of seconds that is rounding (see `table`)


@dataclass(frozen=True)
class ChainPlan:
    """An option index per component, seconds of a step, bytes on a device. gap: no plan takes less
    than (1 - gap) of the seconds; 0 where this one is the best. within: the limit of memory; if
    not, this is the (quickest) plan of least memory."""

    choice: tuple[int, ...]
    seconds: float
    memory: int
    gap: float = 0.0
    within: bool = True
    alternatives: tuple["ChainPlan", ...] = ()

    @classmethod
    def of(cls, problem: Problem, choice: tuple[int, ...]) -> "ChainPlan":
        return cls(choice, *evaluate(problem, choice))


def gap(seconds: float, lower: float) -> float:
    """How far below the seconds a plan might be, as a part of them."""
    missing = 1 - lower / seconds if seconds > 0 else 0.0
    return missing if missing > EXACT else 0.0
