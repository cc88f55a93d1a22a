"""The choice of a plan shown: the candidates and what they should take, the components."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from synchromesh.cost.alive_bytes import KINDS
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice, RunnerUp
from synchromesh.training.trainer import Trainer
from synchromesh.values.fault import printable
from synchromesh.values.size import readable

SHOWN, REJECTED = 9, 3  # candidates, and of those that do not fit
WIDTH = 60  # characters of a plan in the table; longer ones stand below it
LISTED = 24  # components; longer chains are shown as runs of equal layouts


def choice_table(choice: Choice) -> Table:
    """A line per candidate, the chosen one first."""
    table = Table(title="plans by predicted step time", title_justify="left")
    for name in ("plan", "step", "memory per device", "waits", "why"):
        table.add_column(name, justify="left" if name in ("plan", "why") else "right")
    shown = _shown(choice)
    for number, candidate in shown:
        table.add_row(*(Text(printable(cell)) for cell in _cells(number, candidate)))
    if more := len(choice.candidates) - len(shown):
        table.caption, table.caption_justify = f"and {more} more (--json has all)", "left"
    return table


def notes(choice: Choice) -> list[str]:
    """What stands below the table: the plans that are too long for it, whole; why the first one is
    taken; what is left of the devices' memory."""
    long = [f"plan {n}: {c.plan}" for n, c in _shown(choice) if len(str(c.plan)) > WIDTH]
    return [line for line in (*long, choice.why, str(choice.headroom or "")) if line]


def _shown(choice: Choice) -> list[tuple[int, Candidate]]:
    """Some candidates, with their places among all."""
    left = {True: SHOWN, False: REJECTED}
    found = []
    for number, candidate in enumerate(choice.candidates, 1):
        left[candidate.fits] -= 1
        if left[candidate.fits] >= 0 or candidate.given:
            found.append((number, candidate))
    return found


def _cells(number: int, candidate: Candidate) -> tuple[str, ...]:
    name, why = _short(number, candidate), "yours; " * candidate.given + candidate.reason
    if candidate.time is None:
        return (name, "-", "-", "-", why)
    waits = f"{candidate.time.communication_share:.0%}"
    memory = readable(candidate.fullest.peak if candidate.fullest else 0)
    return (name, f"{candidate.seconds * 1e3:.1f} ms", memory, waits, why)


def _short(number: int, candidate: Candidate) -> str:
    text = str(candidate.plan)
    return f"{number:2} {text if len(text) <= WIDTH else text[: WIDTH - 1] + '…'}"


def memory_table(choice: Choice) -> Table:
    """What the memory of the fullest device is at the highest moment of a step, under the plans
    that `choice_table` shows; empty where nothing is known."""
    table = Table(title="memory per device, at the highest moment", title_justify="left")
    table.add_column("plan")
    for kind in KINDS:
        table.add_column(kind, justify="right")
    for number, candidate in _shown(choice):
        if most := candidate.fullest:
            kinds = (readable(most.by_kind.get(kind, 0)) for kind in KINDS)
            table.add_row(Text(printable(_short(number, candidate))), *kinds)
    return table


def component_table(trainer: Trainer) -> Table:
    """What each component does: its layout, the parameter bytes of a rank of all it has."""
    made, choice = trainer.partition, trainer.choice
    known = () if choice is None or choice.of else choice.components
    others = {r.component: r for r in known}
    rows: list[_Row] = []
    for local in made.components:
        total, held = local.component.parameter_bytes, local.component.parameters
        local_bytes = sum(trainer.state.holdings[p.name].kept_bytes for p in held)
        name, other = local.component.name, others.get(local.component.name)
        rows.append(_Row(name, str(local.layout), total, local_bytes, other))
    table = Table(title="components (data x tensor)", title_justify="left")
    why = ("next best", "a step more") if any(row.other for row in rows) else ()
    for name in ("component", "layout", "parameters", "on a device", *why):
        table.add_column(name, justify="left" if name == "component" else "right")
    if len(rows) <= LISTED:
        groups = [[row] for row in rows]
    else:
        groups = [list(g) for _, g in groupby(rows, key=lambda row: row.layout)]
    for group in groups:
        first, last = group[0].name, group[-1].name
        name = first if len(group) == 1 else f"{first} ... {last} ({len(group)})"
        total, local_bytes = sum(row.total for row in group), sum(row.local_bytes for row in group)
        table.add_row(
            Text(printable(name)), group[0].layout, readable(total), readable(local_bytes),
            *(_next(group) if why else ()),
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class _Row:
    """A component under its layout: bytes of its parameters, those on a device, its runner-up."""

    name: str
    layout: str
    total: int
    local_bytes: int
    other: RunnerUp | None


def _next(group: Sequence[_Row]) -> tuple[str, str]:
    """The layout that would cost least instead, of any of the group, and what."""
    known = [r.other for r in group if r.other and r.other.seconds is not None]
    if not known:
        return "", ""
    least = min(known, key=lambda other: other.seconds or 0.0)
    return str(least.other), f"{(least.seconds or 0.0) * 1e3:+.1f} ms"


def prediction_text(candidate: Candidate) -> str:
    """One sentence: what a step is predicted to take."""
    return f"{'no prediction' if candidate.time is None else 'predicted'}: {candidate}"
