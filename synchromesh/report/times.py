"""The figures of time: what an epoch or a step takes, and where the time of a step goes."""

from collections.abc import Iterator

from synchromesh.report.drawing import SIZES
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.numbers import devices, seconds, share
from synchromesh.report.palette import PARTS, Fill
from synchromesh.report.panels import Bar, bars
from synchromesh.results.breakdown import StepParts, step_parts
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import Quartiles


def training_time(subject: Subject) -> Iterator[PageFigure]:
    """Of an epoch (else of a step) by strategy and devices; none where nothing was timed."""
    by_epoch = any(group.epoch_seconds for group in subject.comparison.groups)
    times = subject.known(lambda g: g.epoch_seconds if by_epoch else g.step_seconds)
    if not times:
        return
    times.sort(key=lambda pair: pair[0].first.devices)
    quickest, least = min(times, key=lambda pair: pair[1].median)
    unit = "an epoch" if by_epoch else "a step"
    drawn = [(group, _time(subject, group, time)) for group, time in times]
    yield subject.figure(
        "time",
        f"Time of {unit}",
        f"Bars of the time of {unit} by strategy and number of devices. The shortest is "
        f"{seconds(least.median)}: {quickest.first.strategy} on "
        f"{devices(quickest.first.devices)}.",
        lambda width: bars(width, drawn, (), subject.marks),
        subject.table(
            f"Time of {unit}: median and quartiles",
            ("median", "first quartile", "third quartile"),
            ((group, map(seconds, (t.median, t.q1, t.q3))) for group, t in times),
        ),
        "Whiskers are quartiles. " * any(bar.whiskers for _, bar in drawn)
        + "Without validation and checkpoints." * by_epoch,
    )


def _time(subject: Subject, group: RunGroup, time: Quartiles) -> Bar:
    strategy = group.first.strategy
    fill = Fill(subject.marks[strategy].ink, "", strategy)
    whiskers = (time.q1, time.q3) if time.q1 < time.q3 else None
    return Bar(strategy, ((fill, time.median),), time.median, whiskers)


def communication(subject: Subject) -> Iterator[PageFigure]:
    """Computation and communication in a step; none where their shares are not known."""
    steps = subject.known(step_parts)
    if not steps:
        return
    steps.sort(key=lambda pair: pair[0].first.devices)
    most, parts = max(steps, key=lambda pair: _exposed(pair[1]))
    drawn = [(group, _step(group, parts)) for group, parts in steps]
    seen = {fill for _, bar in drawn for fill, _ in bar.parts}
    used = [fill for fill in PARTS.values() if fill in seen]
    yield subject.figure(
        "communication",
        "Where a step's time goes",
        "Stacked bars of the parts of a step by strategy and number of devices. The largest "
        f"share of exposed communication is {share(_exposed(parts))}: {most.first.strategy} "
        f"on {most.first.devices} devices.",
        lambda width: bars(width, drawn, used, subject.marks),
        subject.table(
            "Parts of a step, in seconds and as shares, as the mean over devices",
            ("step", "computation", "of it with hidden communication", "exposed transfer",
             "waiting", "other", "share of communication, exposed", "share, hidden"),
            ((group, _cells(parts)) for group, parts in steps),
        ),
        "Exposed: a device computes nothing meanwhile."
        + " Hidden: it computes while messages are in flight, so hidden communication costs no "
        "time of its own." * (PARTS["hidden"] in seen),
    )  # fmt: skip


def _exposed(parts: StepParts) -> float:
    return (parts.transfer + parts.waiting) / parts.step if parts.step else 0.0


def _part(parts: StepParts, name: str) -> float:
    if name == "computation":
        return max(parts.computation - parts.hidden, 0.0)
    return float(getattr(parts, name))


def _step(group: RunGroup, parts: StepParts) -> Bar:
    """Without what is less than a pixel of a step as wide as the sheet."""
    pieces = ((fill, _part(parts, name)) for name, fill in PARTS.items())
    seen = tuple(piece for piece in pieces if piece[1] > parts.step / SIZES.wide)
    return Bar(group.first.strategy, seen, parts.step)


def _cells(p: StepParts) -> tuple[str, ...]:
    times = (p.step, p.computation, p.hidden, p.transfer, p.waiting, p.other)
    shares = (_exposed(p), p.hidden / p.step if p.step else 0.0)
    return (*map(seconds, times), *map(share, shares))
