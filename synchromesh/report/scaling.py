"""The figures of scaling: the speedup, and T_1/N + T_comm, over the number of devices.

T_N = T_1 / N + T_comm      [results/breakdown.py has the equations of the parts]"""

from collections.abc import Iterator, Mapping

from synchromesh.report.drawing import SIZES, Drawing
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.lines import end_labels, label_room, style
from synchromesh.report.numbers import NUMBER, Unit, devices, plain, seconds, share, time_unit
from synchromesh.report.palette import INKS, PARTS, Fill, StrategyMark
from synchromesh.report.panels import ColumnPanel, ColumnPanels, log_ticks, round_ticks
from synchromesh.results.breakdown import Overhead, overhead
from synchromesh.results.groups import RunGroup

DIVIDED = Fill(PARTS["computation"].ink, "", "T₁/N: one device's step, divided")
LEGEND = (DIVIDED, PARTS["transfer"], PARTS["waiting"], PARTS["other"])
PANELS = ColumnPanels(50, 150, below=38, half=0.33, line=1.5, places="N devices", unit=time_unit)
IDEAL = StrategyMark(INKS["muted"], "")
SCALING = {
    "weak": "Weak scaling: samples per second over those of one device, each device with the same "
    "rows.",
    "strong": "Strong scaling: step time of one device over that of N, with the same batch.",
}


def speedup(subject: Subject) -> Iterator[PageFigure]:
    """Over one device; none where nothing ran on one device, or nothing on several."""
    speedups = subject.known(lambda g: g.median(lambda run: run.speedup) or None)
    if len({group.first.devices for group, _ in speedups}) < 2:
        return
    best, most = max(speedups, key=lambda pair: pair[1])
    ran = {(g.first.strategy, g.first.devices): value for g, value in speedups}
    kind = "weak" if subject.comparison.weak else "strong"
    yield subject.figure(
        "speedup",
        "Speedup over one device",
        f"Lines of the speedup against the number of devices, one for each strategy, and the "
        f"ideal line. The highest is {plain(most)}: {best.first.strategy} on "
        f"{devices(best.first.devices)}.",
        lambda width: lines(width, ran, subject.marks),
        subject.table(
            f"Speedup and efficiency, {kind} scaling",
            ("speedup", "efficiency"),
            ((g, (plain(s), share(s / g.first.devices))) for g, s in speedups),
        ),
        "Dotted: ideal, as many times as there are devices. Both axes are logarithmic. "
        + SCALING[kind],
    )


def lines(
    width: int, ran: Mapping[tuple[str, int], float], marks: Mapping[str, StrategyMark],
    band: float = 0.0, shares: bool = False,
) -> Drawing:  # fmt: skip
    """Speedups by name and devices, each from one device on; what ran on one alone goes on level,
    to be compared with. band: relative error beyond one device. shares: of efficiencies."""
    numbers = sorted({1} | {number for _, number in ran})
    most, tall, marks = numbers[-1], 380, {**marks, "ideal": IDEAL}
    points: dict[str, dict[float, float]] = {"ideal": {1: 1, most: 1 if shares else most}}
    for (name, number), value in ran.items():
        points.setdefault(name, {1: 1})[number] = value
    drawn = {n: sorted(({most: of[1]} | of if len(of) == 1 else of).items())
             for n, of in points.items()}  # fmt: skip
    room = label_room(list(drawn), width)
    sheet = Drawing(width, tall)
    axes = sheet.axes(40, SIZES.line + 8, width - 40 - room, tall - SIZES.line - 8 - 44)
    low, high = min(1, *ran.values()), max(points["ideal"][most], *ran.values())
    ends = low * max(1 - band, 0.1) / 1.15, high * (1 + band) * 1.15
    axes.set(xscale="log", yscale="log", xlim=(0.94, most), ylim=ends, xlabel="devices")
    axes.set_xticks(numbers, list(map(str, numbers)))
    axes.set_yticks(*log_ticks(*ends, 8, NUMBER))
    if shares:
        axes.set(yscale="linear", ylim=(0, ends[1]))
        axes.set_yticks(*round_ticks(ends[1], 6, Unit("%", 0.01)))
    axes.minorticks_off()
    axes.grid(True)
    for name, of in drawn.items():
        if band and name != "ideal":
            ink, error = marks[name].ink.paint, {x: band * (x > 1) for x, _ in of}
            around = ((x, y * (1 - error[x]), y * (1 + error[x])) for x, y in of)
            axes.fill_between(*zip(*around, strict=True), color=ink, alpha=0.15, linewidth=0)
        measured = [i for i, (number, _) in enumerate(of) if (name, number) in ran]
        axes.plot(*zip(*of, strict=True), **style(marks[name]), markevery=measured)
    sheet.text(0, 12, "speedup / devices" if shares else "times as fast as one device", "muted")
    end_labels(sheet, axes, drawn, marks, room)
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
        "T_comm = T_N − T₁/N. Other is computation beyond T₁/N and overhead."
        + " Where it is negative, N devices compute in less than T₁/N, and the bar of T₁/N is "
        "cut at the line that marks it." * any(parts.other < 0 for _, parts in several),
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
