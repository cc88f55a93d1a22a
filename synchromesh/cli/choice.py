"""Plans shown: the candidates and what they should take, the chosen one's components or stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from synchromesh.cli.console import Console, table
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice, RunnerUp
from synchromesh.planning.layers import LayerCandidate, LayerPlanned
from synchromesh.planning.offline import Planned
from synchromesh.trace.partition.local import LocalComponent
from synchromesh.values.fault import printable
from synchromesh.values.memory_by_kind import KINDS
from synchromesh.values.size import readable

if TYPE_CHECKING:
    from synchromesh.training.trainer import Trainer


@dataclass(frozen=True)
class Shown:
    """How much of a choice is shown; chosen so that it fits a screen."""

    candidates: int = 9
    rejected: int = 3  # of those that do not fit
    width: int = 60  # characters of a plan in the table; longer ones stand below it
    components: int = 24  # longer chains are shown as runs of equal layouts


SHOWN = Shown()


def show_planned(target: str, made: Planned) -> None:
    """The tables of a model's plans on a cluster."""
    choice, console = made.choice, Console.wide(140)
    title = f"{target} on {made.cluster.name}, {made.rows} rows a step ({made.certainty})"
    console.print(choice_table(choice, title))
    if (memory := memory_table(choice)).row_count:
        console.print(memory)
    for line in (*notes(choice), *filter(None, [made.warning])):
        console.print(Text(printable(line)), soft_wrap=True)
    if made.components:
        of = f" {choice.of}," if choice.of else ""
        title = f"components (data x tensor){of} and what the next layout costs ({made.certainty})"
        rows = (
            (
                row.component, str(row.layout), str(row.other or "none"),
                "" if row.seconds is None else f"{row.seconds * 1e3:+.3f} ms",
            )
            for row in made.components
        )  # fmt: skip
        names = ("component", "layout", "runner-up", "a step more")
        console.print(table(title, names, rows))
    programs, seconds = len(choice.profile.compute), choice.profile.seconds
    searched = f"searched and priced in {choice.planning_seconds:.2f} s"
    console.print(Text(f"profile of {programs} programs in {seconds:.1f} s, {searched}"))


def show_layers(name: str, made: LayerPlanned) -> None:
    """Two tables: the plans of a layer profile, the stages of the first one."""
    console = Console.wide(140)
    band = made.cluster.error_band
    certainty = f"links +-{band:.0%}" if band else "error not stated"
    title = f"{name} on {made.cluster.name}, {made.rows} rows a step ({certainty})"
    rows = (
        (
            str(c.plan), f"{c.seconds * 1e3:.1f} ms",
            readable(max(m.peak for m in c.memory)), f"{c.idle:.0%}", f"{c.gap:.1%}",
        )
        for c in made.candidates
    )  # fmt: skip
    console.print(table(title, ("plan", "step", "memory per device", "idle", "gap"), rows))
    if made.candidates:
        names = ("layers", "from", "to", "devices", "a micro-batch", "memory")
        stages = _stages(made, made.candidates[0])
        console.print(table("stages of the first plan", names, stages, left=("from", "to")))
    count = len(made.profile.layers)
    console.print(Text(f"{count} layers, searched in {made.planning_seconds:.2f} s"))


def _stages(made: LayerPlanned, candidate: LayerCandidate) -> Iterator[Sequence[str]]:
    layers = made.profile.layers
    stages = zip(candidate.stages, candidate.stage_seconds, candidate.memory, strict=True)
    for stage, seconds, memory in stages:
        ends = [layers[i] for i in (stage.first, stage.end - 1)]
        names = [f"{x.name} {x.description.partition('(')[0]}" for x in ends]
        count = str(stage.end - stage.first)
        yield count, *names, str(stage.devices), f"{seconds * 1e3:.2f} ms", readable(memory.peak)


def choice_table(choice: Choice, title: str = "plans by predicted step time") -> Table:
    """A line per candidate, the chosen one first."""
    shown = _shown(choice)
    columns = ("plan", "step", "memory per device", "waits", "why")
    made = table(title, columns, (_cells(*pair) for pair in shown), left=("plan", "why"))
    if more := len(choice.candidates) - len(shown):
        made.caption, made.caption_justify = f"and {more} more (--json has all)", "left"
    return made


def notes(choice: Choice) -> list[str]:
    """Below the table: plans that are too long for it, why the first is taken, the memory left."""
    plans = [(number, str(candidate.plan)) for number, candidate in _shown(choice)]
    long = [f"plan {number}: {plan}" for number, plan in plans if len(plan) > SHOWN.width]
    told = (*long, choice.why, choice.of_accuracy, str(choice.headroom or ""))
    return [line for line in told if line]


def _shown(choice: Choice) -> list[tuple[int, Candidate]]:
    left = {True: SHOWN.candidates, False: SHOWN.rejected}
    shown = []
    for number, candidate in enumerate(choice.candidates, 1):
        left[candidate.fits] -= 1
        if left[candidate.fits] >= 0 or candidate.given:
            shown.append((number, candidate))
    return shown


def _cells(number: int, candidate: Candidate) -> tuple[str, ...]:
    name, why = _short(number, candidate), "yours; " * candidate.given + candidate.reason
    if candidate.time is None:
        return (name, "-", "-", "-", why)
    waits = f"{candidate.time.communication_share:.0%}"
    memory = readable(candidate.fullest.peak if candidate.fullest else 0)
    return (name, f"{candidate.seconds * 1e3:.1f} ms", memory, waits, why)


def _short(number: int, candidate: Candidate) -> str:
    text = str(candidate.plan)
    return f"{number:2} {text if len(text) <= SHOWN.width else text[: SHOWN.width - 1] + '…'}"


def memory_table(choice: Choice) -> Table:
    """The fullest device's memory at a step's highest moment, of plans shown; empty: not known."""
    rows = (
        (_short(number, candidate), *(readable(most.by_kind.get(kind, 0)) for kind in KINDS))
        for number, candidate in _shown(choice)
        if (most := candidate.fullest)
    )
    return table("memory per device, at the highest moment", ("plan", *KINDS), rows)


def component_table(trainer: "Trainer") -> Table:
    """What each component does: its layout, the parameter bytes of a rank of all it has."""
    choice, made = trainer.choice, trainer.partition.components
    known = () if choice is None or choice.of else choice.components
    others = {runner_up.component: runner_up for runner_up in known}
    groups = [[local] for local in made]
    if len(made) > SHOWN.components:
        groups = [list(group) for _, group in groupby(made, key=lambda local: str(local.layout))]
    columns = ["component", "layout", "parameters", "on a device"]
    columns += ["next best", "a step more"] if others else []
    cells = ((*_of_group(trainer, g), *(_next(g, others) if others else ())) for g in groups)
    return table("components (data x tensor)", columns, cells)


def _of_group(trainer: "Trainer", group: Sequence[LocalComponent]) -> tuple[str, ...]:
    components = [local.component for local in group]
    first, last = components[0].name, components[-1].name
    name = first if len(group) == 1 else f"{first} ... {last} ({len(group)})"
    held = (trainer.state.holdings[p.name].kept_bytes for c in components for p in c.parameters)
    total = sum(component.parameter_bytes for component in components)
    return name, str(group[0].layout), readable(total), readable(sum(held))


def _next(group: Sequence[LocalComponent], others: Mapping[str, RunnerUp]) -> tuple[str, str]:
    """The layout that would cost least instead, of any of the group, and what."""
    next_best = [others.get(local.component.name) for local in group]
    known = [other for other in next_best if other and other.seconds is not None]
    if not known:
        return "", ""
    least = min(known, key=lambda other: other.seconds or 0.0)
    return str(least.other), f"{(least.seconds or 0.0) * 1e3:+.1f} ms"


def prediction_text(candidate: Candidate) -> str:
    return f"{'no prediction' if candidate.time is None else 'predicted'}: {candidate}"
