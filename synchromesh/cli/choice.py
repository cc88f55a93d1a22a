"""The choice of a plan shown: the candidates and what they should take, the components."""

from itertools import groupby

from rich.table import Table
from rich.text import Text

from synchromesh.choosing import Choice
from synchromesh.component import Parameter
from synchromesh.fault import printable
from synchromesh.planner.candidate import Candidate, readable
from synchromesh.trainer import Trainer

SHOWN = 9  # candidates
LISTED = 24  # components; longer chains are shown as runs of equal layouts


def choice_table(choice: Choice) -> Table:
    """A line per candidate, the chosen one first."""
    table = Table(title="plans by predicted step time", title_justify="left")
    for name in ("plan", "step", "memory per device", "waits", "why"):
        table.add_column(name, justify="left" if name in ("plan", "why") else "right")
    for candidate in choice.candidates[:SHOWN]:
        table.add_row(*(Text(printable(cell)) for cell in _cells(candidate)))
    return table


def _cells(candidate: Candidate) -> tuple[str, ...]:
    if candidate.time is None:
        return (str(candidate.plan), "-", "-", "-", candidate.reason)
    return (
        str(candidate.plan),
        f"{candidate.seconds * 1e3:.1f} ms",
        _memory(candidate),
        f"{candidate.time.communication_share:.0%}",
        candidate.reason,
    )


def _memory(candidate: Candidate) -> str:
    return readable(max((m.peak for m in candidate.memory), default=0))


def component_table(trainer: Trainer) -> Table:
    """What each component does: its layout, the parameter bytes of a rank of all it has."""
    made = trainer.partition
    rows: list[tuple[str, str, int, int]] = []
    for local in made.components:
        whole = local.component.parameter_bytes
        held = sum(
            Parameter("", made.local_shape(local, p.name), p.dtype).bytes
            for p in local.component.parameters
        )
        rows.append((local.component.name, str(local.layout), whole, held))
    table = Table(title="components (data x tensor)", title_justify="left")
    for name in ("component", "layout", "parameters", "on a device"):
        table.add_column(name, justify="left" if name == "component" else "right")
    if len(rows) <= LISTED:
        groups = [[row] for row in rows]
    else:
        groups = [list(g) for _, g in groupby(rows, key=lambda row: row[1])]
    for group in groups:
        first, last = group[0][0], group[-1][0]
        name = first if len(group) == 1 else f"{first} ... {last} ({len(group)})"
        whole, held = sum(row[2] for row in group), sum(row[3] for row in group)
        table.add_row(Text(printable(name)), group[0][1], readable(whole), readable(held))
    return table


def prediction_text(candidate: Candidate) -> str:
    """One sentence: what a step is predicted to take."""
    if candidate.time is None:
        return f"no prediction: {candidate.reason}"
    time = candidate.time
    return (
        f"predicted: {time.seconds * 1e3:.1f} ms a step, {_memory(candidate)} on a device, "
        f"{time.communication_share:.0%} of the step waiting for traffic"
    )
