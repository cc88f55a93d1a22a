"""The figure of staleness: how old gradients were that came to servers one by one, beside what all
strategies send, wait for and reach."""

from collections.abc import Iterator

from synchromesh.report.drawing import Drawing
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.numbers import NONE, Unit, devices, plain, seconds, share, size, spread
from synchromesh.report.palette import MEMORY
from synchromesh.report.panels import ColumnPanel, ColumnPanels
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import RunResult

PANELS = ColumnPanels(
    left=46, tall=110, below=34, half=0.4, line=1.2, places="age", unit=lambda _: Unit("%", 0.01)
)


def figures(subject: Subject) -> Iterator[PageFigure]:
    """One, of the number of devices on which most groups have it; its table has the others on as
    many devices, as every-step is."""
    number = subject.comparison.most_devices(_measured)
    if number is None:
        return
    groups = [g for g in subject.comparison.groups if g.done and g.first.devices == number]
    shown = [run for group in groups if (run := _measured(group))]
    means = (f"{run.strategy}: {_ages(run)[0]}" for run in shown)
    metrics = subject.comparison.metrics[:1]
    yield subject.figure(
        "staleness",
        f"Age of gradients, on {devices(number)}",
        "A panel for each strategy, in it a bar for each age, as high as its share of gradients. "
        f"Mean ages: {', '.join(means)}.",
        lambda width: _draw(width, shown),
        subject.table(
            f"Ages, beside what all strategies on {devices(number)} send, wait for and reach",
            ("mean age", "most", "most steps ahead", "sent in a step, most", "waiting, exposed",
             "samples/s", *(f"{name} at the end" for name in metrics), "to target"),
            ((group, _cells(group, metrics)) for group in groups),
        ),
        "The age of a gradient is how many updates of others came between what it was computed on "
        "and its own. Strategies without one sum gradients, or take means, of all workers.",
    )  # fmt: skip


def _measured(group: RunGroup) -> RunResult | None:
    return next((run for run in group.done if run.staleness and run.staleness.histogram), None)


def _ages(run: RunResult | None) -> tuple[str, str, str]:
    stale = run.staleness if run else None
    return (plain(stale.mean), str(stale.max), str(stale.lead)) if stale else (NONE, NONE, NONE)


def _cells(group: RunGroup, metrics: tuple[str, ...]) -> Iterator[str]:
    yield from _ages(_measured(group))
    yield size(group.median(lambda run: max(run.sent_bytes_per_step, default=None)))
    yield share(group.median(lambda run: run.exposed_share))
    yield plain(group.median(lambda run: run.samples_per_second))
    yield from (spread(group.ends(name)) for name in metrics)
    yield seconds(group.median(lambda run: run.to_target.seconds if run.to_target else None))


def _draw(width: int, shown: list[RunResult]) -> Drawing:
    fill = MEMORY["gradients"]
    of = [(run.strategy, run.staleness.shares) for run in shown if run.staleness]
    panels = [
        ColumnPanel(
            name, [(age, [(fill, x)]) for age, x in enumerate(shares)],
            {age: str(age) for age in range(0, len(shares), -(-len(shares) // 8))}, [],
            max(len(shares), 4),
        )
        for name, shares in of
    ]  # fmt: skip
    return PANELS.draw(width, [fill], panels, 1.05 * max(max(shares) for _, shares in of))
