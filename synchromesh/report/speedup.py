"""The figure of speedup: over one device, against the number of devices."""

from synchromesh.report.drawing import LINE, Drawing
from synchromesh.report.figure import PageFigure
from synchromesh.report.lines import Point, end_labels, label_room, style
from synchromesh.report.numbers import devices, plain, share
from synchromesh.report.palette import INKS
from synchromesh.report.subject import Subject
from synchromesh.results.groups import RunGroup


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One; none where nothing ran on one device, or nothing on several."""
    found = [(g, g.median(lambda run: run.speedup)) for g in subject.comparison.groups]
    known = [(group, speedup) for group, speedup in found if speedup is not None]
    if len({group.first.devices for group, _ in known}) < 2:
        return ()
    best, most = max(known, key=lambda pair: pair[1])
    kind = "weak" if subject.comparison.weak else "strong"
    return (
        subject.figure(
            "speedup",
            "Speedup over one device",
            f"Lines of the speedup against the number of devices, one for each strategy, and the "
            f"ideal line. The highest is {plain(most)}: {best.first.strategy} on "
            f"{devices(best.first.devices)}.",
            lambda width: _draw(width, subject, known),
            subject.table(
                f"Speedup and efficiency, {kind} scaling",
                ("speedup", "efficiency"),
                ((g, (plain(s), share(s / g.first.devices))) for g, s in known),
            ),
            "Dashed: ideal, as many times as there are devices. "
            + (
                "Weak scaling: samples per second over those of one device, each device with "
                "the same rows."
                if subject.comparison.weak
                else "Strong scaling: step time of one device over that of N, with the same batch."
            ),
        ),
    )


def _draw(width: int, subject: Subject, known: list[tuple[RunGroup, float]]) -> Drawing:
    lines: dict[str, list[Point]] = {}
    for group, value in known:
        lines.setdefault(group.first.strategy, []).append((group.first.devices, value))
    one = [p for p in lines.get("single", []) if p[0] == 1]
    ends = {name: sorted(one + points if name != "single" else points)
            for name, points in lines.items()}  # fmt: skip
    most = max(group.first.devices for group, _ in known)
    top = max(value for _, value in known)
    room = label_room(list(lines), width)
    sheet = Drawing(width, 330)
    axes = sheet.axes(34, LINE + 8, width - 34 - room, 330 - LINE - 8 - 44)
    numbers = sorted({group.first.devices for group, _ in known} | {1})
    axes.plot((1, most), (1, most), "--", color=INKS["muted"].paint, linewidth=1.2)
    for name, points in ends.items():
        axes.plot(*zip(*points, strict=True), **style(subject.marks[name]))
    axes.grid(True)
    axes.set(xscale="log", ylim=(0, max(top * 1.08, 1.1)), xlim=(0.94, most))
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("devices")
    sheet.text(0, 12, "times as fast as one device", "muted")
    end_labels(sheet, axes, ends, subject, room)
    return sheet
