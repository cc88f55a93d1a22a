"""The figures of scaling: the speedup, and T_1/N + T_comm, over the number of devices.

T_N = T_1 / N + T_comm      [results/breakdown.py has the equations of the parts]"""

from collections.abc import Iterator

from synchromesh.report.drawing import SIZES, Drawing, Point
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.lines import end_labels, label_room, style
from synchromesh.report.numbers import devices, plain, seconds, share
from synchromesh.report.palette import INKS, PARTS, Fill
from synchromesh.report.panels import ColumnPanel, ColumnPanels
from synchromesh.results.breakdown import Overhead, overhead
from synchromesh.results.groups import RunGroup

IDEAL = Fill(PARTS["computation"].ink, "", "T₁/N: one device's step, divided")
LEGEND = (IDEAL, PARTS["transfer"], PARTS["waiting"], PARTS["other"])
PANELS = ColumnPanels(46, 150, below=38, half=0.33, line=1.5, unit="N devices", number=seconds)
SCALING = {
    "weak": "Weak scaling: samples per second over those of one device, each device with the same "
    "rows.",
    "strong": "Strong scaling: step time of one device over that of N, with the same batch.",
}


def speedup(subject: Subject) -> Iterator[PageFigure]:
    """Over one device; none where nothing ran on one device, or nothing on several."""
    speedups = subject.known(lambda g: g.median(lambda run: run.speedup))
    if len({group.first.devices for group, _ in speedups}) < 2:
        return
    best, most = max(speedups, key=lambda pair: pair[1])
    kind = "weak" if subject.comparison.weak else "strong"
    yield subject.figure(
        "speedup",
        "Speedup over one device",
        f"Lines of the speedup against the number of devices, one for each strategy, and the "
        f"ideal line. The highest is {plain(most)}: {best.first.strategy} on "
        f"{devices(best.first.devices)}.",
        lambda width: _lines(width, subject, speedups),
        subject.table(
            f"Speedup and efficiency, {kind} scaling",
            ("speedup", "efficiency"),
            ((g, (plain(s), share(s / g.first.devices))) for g, s in speedups),
        ),
        f"Dashed: ideal, as many times as there are devices. {SCALING[kind]}",
    )


def _lines(width: int, subject: Subject, speedups: list[tuple[RunGroup, float]]) -> Drawing:
    points: dict[str, list[Point]] = {}
    for group, value in speedups:
        points.setdefault(group.first.strategy, []).append((group.first.devices, value))
    one = [p for p in points.get("single", []) if p[0] == 1]
    drawn = {name: sorted(of if name == "single" else one + of) for name, of in points.items()}
    numbers = sorted({group.first.devices for group, _ in speedups} | {1})
    most, top, tall = numbers[-1], max(value for _, value in speedups), 330
    room = label_room(list(points), width)
    sheet = Drawing(width, tall)
    axes = sheet.axes(34, SIZES.line + 8, width - 34 - room, tall - SIZES.line - 8 - 44)
    axes.plot((1, most), (1, most), "--", color=INKS["muted"].paint, linewidth=1.2)
    for name, of in drawn.items():
        axes.plot(*zip(*of, strict=True), **style(subject.marks[name]))
    axes.grid(True)
    axes.set(xscale="log", ylim=(0, max(top * 1.08, 1.1)), xlim=(0.94, most))
    axes.set_xticks(numbers, [str(n) for n in numbers])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("devices")
    sheet.text(0, 12, "times as fast as one device", "muted")
    end_labels(sheet, axes, drawn, subject.marks, room)
    return sheet


def scaling(subject: Subject) -> Iterator[PageFigure]:
    """T_1/N + T_comm against N, a panel for each strategy; none without one device and several."""
    comparison = subject.comparison
    every = subject.known(lambda g: overhead(g, comparison.one_device, comparison.weak))
    several = [(g, parts) for g, parts in every if g.first.devices > 1]
    if not several:
        return
    group, most = max(several, key=lambda pair: pair[1].total / pair[1].step)
    yield subject.figure(
        "scaling",
        "T₁/N + T_comm against N devices",
        "A panel for each strategy, in it a bar for each number of devices: one device's "
        "step time divided by N, and above it exposed transfer, waiting and other. T_comm "
        f"is the largest part of a step with {group.first.strategy} on "
        f"{group.first.devices} devices: {seconds(most.total)} of {seconds(most.step)}.",
        lambda width: _columns(width, several),
        subject.table(
            "Step time as T₁/N + T_comm, and the parts of T_comm",
            ("step", "T₁/N", "T_comm", "exposed transfer", "waiting", "other"),
            ((g, map(seconds, (p.step, p.ideal, p.total, p.transfer, p.waiting, p.other)))
             for g, p in several),
        ),
        "T_comm = T_N − T₁/N. Other is computation beyond T₁/N and overhead; where it is "
        "negative, N devices compute in less than T₁/N, and the bar of T₁/N is cut at the "
        "line that marks it.",
    )  # fmt: skip


def _columns(width: int, several: list[tuple[RunGroup, Overhead]]) -> Drawing:
    numbers = sorted({group.first.devices for group, _ in several})
    names = {i: str(number) for i, number in enumerate(numbers)}
    by_strategy: dict[str, list[tuple[int, Overhead]]] = {}
    for group, parts in several:
        of_strategy = by_strategy.setdefault(group.first.strategy, [])
        of_strategy.append((numbers.index(group.first.devices), parts))
    panels = [
        ColumnPanel(
            strategy, [(x, _stack(parts)) for x, parts in of_strategy], names,
            [(x - 0.42, x + 0.42, p.ideal, p.ideal) for x, p in of_strategy], len(numbers),
        )
        for strategy, of_strategy in by_strategy.items()
    ]  # fmt: skip
    most = max(max(parts.step, parts.ideal) for _, parts in several) * 1.05
    return PANELS.draw(width, LEGEND, panels, most)


def _stack(parts: Overhead) -> list[tuple[Fill, float]]:
    start = min(parts.ideal, parts.step - parts.transfer - parts.waiting)
    return list(zip(LEGEND, (start, parts.transfer, parts.waiting, parts.other), strict=True))
