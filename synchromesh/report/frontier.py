"""The page of a choice of plan, batch size and cluster: time against money to a target."""

from collections.abc import Sequence

from synchromesh.cost.target_plans import PlannedToTarget, TargetPlan
from synchromesh.report.drawing import SIZES, Drawing, SharedStyles, drawn
from synchromesh.report.figure import PageFigure, PageTable, Section
from synchromesh.report.lines import below_legend, style
from synchromesh.report.numbers import NUMBER, dollars, seconds, time_unit
from synchromesh.report.page import Chapter, rendered
from synchromesh.report.palette import INKS, marks
from synchromesh.report.panels import log_ticks
from synchromesh.simulator.simulated import UNTIL, until_cells

COLUMNS = ("cluster", "plan", *UNTIL)
MISSING = (
    "No price is known (--hourly-price says one), so that there is no money to set time against."
)


def page(made: PlannedToTarget, title: str, told: Sequence[str]) -> str:
    """One HTML page. told: sentences on where epochs and prices come from."""
    shared, chosen, answer = SharedStyles(), made.chosen, made.refusal
    if chosen is not None:
        takes = f"{seconds(chosen.until.seconds)} and {dollars(chosen.until.dollars)}"
        best = "costs least" if made.by_money else "is the quickest"
        where = f"{chosen.plan} on {chosen.cluster} in batches of {chosen.batch:,}"
        answer = f"Of what was tried, {where} {best}: {takes} to the target."
    priced = [p for p in made.plans if p.until.dollars]
    figures = (_figure(made, priced, shared),) if priced else ()
    sections = (Section("s-frontier", "Time against money", figures, MISSING),)
    return rendered(
        "frontier.html", shared, results={"title": title, "note": ""},
        chapters=[Chapter("s", title, (("", (answer,)),), sections, ())],
        tables=[("All that was found", [COLUMNS, *_rows(made.plans)])],
        told=[*told, *made.misfits],
        notices=("Nothing was run: all figures are predictions.",),
    )  # fmt: skip


def _rows(plans: Sequence[TargetPlan]) -> tuple[tuple[str, ...], ...]:
    return tuple((p.cluster, str(p.plan), *until_cells(p.batch, p.until)) for p in plans)


def _figure(
    made: PlannedToTarget, priced: Sequence[TargetPlan], shared: SharedStyles
) -> PageFigure:
    frontier = [p for p in made.frontier if p.until.dollars]
    drawings = drawn("frontier", lambda width: _draw(width, frontier, priced))
    return PageFigure(
        "frontier", "Time against money to the target",
        "A point for each cluster and batch size, by time and by dollars, and a line through the "
        f"{len(frontier)} to which no other is equal in both and better in one.",
        tuple(map(shared.classed, drawings)),
        PageTable("The frontier, the quickest first", COLUMNS, _rows(frontier), 2),
        "Dotted: the frontier. Both axes are logarithmic.",
    )  # fmt: skip


def _draw(width: int, frontier: Sequence[TargetPlan], priced: Sequence[TargetPlan]) -> Drawing:
    clusters = list(dict.fromkeys(p.cluster for p in priced))
    inks, tall = marks(clusters), 320
    sheet, top = below_legend(width, tall, inks, clusters)
    axes = sheet.axes(56, top + SIZES.line, width - 70, tall - SIZES.line - 44)
    axes.plot(*zip(*(p.cost for p in frontier), strict=True), ":", color=INKS["muted"].paint)
    for name in clusters:
        points = [p.cost for p in priced if p.cluster == name]
        axes.plot(*zip(*points, strict=True), **style(inks[name]) | {"linestyle": "none"})
    ends = [(min(x) / 1.3, max(x) * 1.3) for x in zip(*(p.cost for p in priced), strict=True)]
    unit = time_unit(*(p.cost[0] for p in priced))
    axes.set(xscale="log", yscale="log", xlim=ends[0], ylim=ends[1], xlabel="time to the target")
    axes.set_xticks(*log_ticks(*ends[0], max(width // 120, 3), unit))
    axes.set_yticks(*log_ticks(*ends[1], 8, NUMBER))
    axes.minorticks_off()
    axes.grid(True)
    sheet.text(0, top + 12, "dollars", "muted")
    return sheet
