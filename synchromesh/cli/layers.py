"""The plans of a layer profile shown: what each should take, the stages of the quickest."""

from rich.table import Table
from rich.text import Text

from synchromesh.cli.console import Console
from synchromesh.planning.layers import LayerCandidate, LayerPlanned
from synchromesh.values.fault import printable
from synchromesh.values.size import readable


def show(name: str, made: LayerPlanned) -> None:
    """Two tables: the plans, the stages of the first one."""
    console = Console.wide(140)
    band = made.cluster.error_band
    certainty = f"links +-{band:.0%}" if band else "error not stated"
    title = f"{name} on {made.cluster.name}, {made.rows} rows a step ({certainty})"
    table = Table(title=Text(printable(title)), title_justify="left")
    for column in ("plan", "step", "memory per device", "idle", "gap"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for c in made.candidates:
        table.add_row(
            Text(printable(str(c.plan))), f"{c.seconds * 1e3:.1f} ms",
            readable(max(m.peak for m in c.memory)), f"{c.idle:.0%}", f"{c.gap:.1%}",
        )  # fmt: skip
    console.print(table)
    if made.candidates:
        console.print(_stages(made, made.candidates[0]))
    count = len(made.profile.layers)
    console.print(Text(f"{count} layers, searched in {made.planning_seconds:.2f} s"))


def _stages(made: LayerPlanned, candidate: LayerCandidate) -> Table:
    table = Table(title="stages of the first plan", title_justify="left")
    for column in ("layers", "from", "to", "devices", "a micro-batch", "memory"):
        left = column in ("from", "to")
        table.add_column(column, justify="left" if left else "right")
    layers = made.profile.layers
    rows = zip(candidate.stages, candidate.stage_seconds, candidate.memory, strict=True)
    for stage, seconds, memory in rows:
        ends = [layers[i] for i in (stage.first, stage.end - 1)]
        names = [f"{x.name} {x.description.partition('(')[0]}" for x in ends]
        table.add_row(
            str(stage.end - stage.first), *(Text(printable(x)) for x in names),
            str(stage.devices), f"{seconds * 1e3:.2f} ms", readable(memory.peak),
        )  # fmt: skip
    return table
