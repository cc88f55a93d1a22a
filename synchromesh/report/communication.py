"""The figure of computation and communication: the parts of a step by strategy and devices."""

from synchromesh.report.bars import Bar, Panel, bars
from synchromesh.report.figure import PageFigure
from synchromesh.report.numbers import seconds, share
from synchromesh.report.palette import PARTS
from synchromesh.report.subject import Subject
from synchromesh.results.breakdown import StepParts, step_parts

COLUMNS = (
    "step", "computation", "of it with hidden communication", "exposed transfer", "waiting",
    "other", "share of communication, exposed", "share, hidden",
)  # fmt: skip


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One; none where shares of communication are not known."""
    found = subject.panels(step_parts)
    known = [(g, parts) for _, groups in found for g in groups if (parts := step_parts(g))]
    if not known:
        return ()
    panels = [
        Panel(
            title,
            tuple(_bar(g.first.strategy, parts) for g in groups if (parts := step_parts(g))),
        )
        for title, groups in found
    ]
    most, parts = max(known, key=lambda pair: _exposed(pair[1]))
    used = [fill for name, fill in PARTS.items() if any(_part(parts, name) for _, parts in known)]
    return (
        subject.figure(
            "communication",
            "Where a step's time goes",
            "Stacked bars of the parts of a step by strategy and number of devices. The largest "
            f"share of exposed communication is {share(_exposed(parts))}: {most.first.strategy} "
            f"on {most.first.devices} devices.",
            lambda width: bars(width, panels, used, seconds, subject.marks),
            subject.table(
                "Parts of a step, in seconds and as shares, as the mean over devices",
                COLUMNS,
                ((group, _cells(parts)) for group, parts in known),
            ),
            "Exposed: a device computes nothing meanwhile. Hidden: it computes while messages "
            "are in flight, so hidden communication costs no time of its own.",
        ),
    )


def _exposed(parts: StepParts) -> float:
    return (parts.transfer + parts.waiting) / parts.step if parts.step else 0.0


def _part(parts: StepParts, name: str) -> float:
    if name == "computation":
        return max(parts.computation - parts.hidden, 0.0)
    return float(getattr(parts, name))


def _bar(strategy: str, parts: StepParts) -> Bar:
    pieces = tuple((fill, _part(parts, name)) for name, fill in PARTS.items())
    return Bar(strategy, tuple(p for p in pieces if p[1] > 0), seconds(parts.step))


def _cells(parts: StepParts) -> tuple[str, ...]:
    times = (parts.step, parts.computation, parts.hidden, parts.transfer, parts.waiting)
    hidden = parts.hidden / parts.step if parts.step else 0.0
    return (
        *map(seconds, (*times, parts.other)), share(_exposed(parts)), share(hidden)
    )  # fmt: skip
