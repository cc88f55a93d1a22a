"""The figure of training time: seconds of an epoch (else of a step) by strategy and devices."""

from synchromesh.report.bars import Bar, Panel, bars
from synchromesh.report.figure import PageFigure
from synchromesh.report.numbers import devices, seconds
from synchromesh.report.palette import Fill
from synchromesh.report.subject import Subject
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import Quartiles


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One; none where nothing was timed."""
    by_epoch = any(group.epoch_seconds for group in subject.comparison.groups)

    def time(group: RunGroup) -> Quartiles | None:
        return group.epoch_seconds if by_epoch else group.step_seconds

    found = subject.panels(time)
    if not found:
        return ()
    timed = [(group, t) for _, groups in found for group in groups if (t := time(group))]
    quickest, least = min(timed, key=lambda pair: pair[1].median)
    unit = "an epoch" if by_epoch else "a step"
    panels = [
        Panel(title, tuple(_bar(subject, group, t) for group in groups if (t := time(group))))
        for title, groups in found
    ]
    return (
        subject.figure(
            "time",
            f"Seconds of {unit}",
            f"Bars of the time of {unit} by strategy and number of devices. The shortest is "
            f"{seconds(least.median)}: {quickest.first.strategy} on "
            f"{devices(quickest.first.devices)}.",
            lambda width: bars(width, panels, (), seconds, subject.marks),
            subject.table(
                f"Time of {unit}: median and quartiles",
                ("median", "first quartile", "third quartile"),
                ((group, map(seconds, (t.median, t.q1, t.q3))) for group, t in timed),
            ),
            "Whiskers are quartiles."
            + (" Without validation and checkpoints." if by_epoch else ""),
        ),
    )


def _bar(subject: Subject, group: RunGroup, time: Quartiles) -> Bar:
    strategy = group.first.strategy
    fill = Fill(subject.marks[strategy].ink, "", strategy)
    whiskers = (time.q1, time.q3) if time.q1 < time.q3 else None
    return Bar(strategy, ((fill, time.median),), seconds(time.median), whiskers)
