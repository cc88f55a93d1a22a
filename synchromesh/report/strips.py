"""The figure of layouts, the page's picture: a coloured strip along the model for each plan.

the model   embeddings | layer.0 | layer.1 | ...   | classifier |    wide as the parameters are
auto        ===data===================== xx hybrid:tensor=2 xx ///
            stage 0                    | stage 1"""

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from synchromesh.report.drawing import (
    BOLD,
    LINE,
    SMALL,
    Drawing,
    filled,
    fitted,
    legend_height,
    width_of,
)
from synchromesh.report.figure import PageFigure, PageTable
from synchromesh.report.numbers import NONE, devices, listed, seconds, size
from synchromesh.report.palette import INKS, LAYOUTS, layout_fill
from synchromesh.report.subject import Subject
from synchromesh.results.run import ComponentLayout, Layouts, RunResult

STRIP = 24  # pixels
LEAST = 2.5  # pixels of a component at least
STAGE_GAP = 3.0  # pixels between stages


@dataclass(frozen=True)
class Strip:
    """A plan's layouts under a title; the next of the same run came later."""

    title: str
    layouts: Layouts
    subtitle: str


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One; none where no run says its layouts."""
    found = strips(subject)
    if not found:
        return ()
    model = found[0].layouts.components
    switches = sum(strip.layouts.step > 0 for strip in found)
    kinds = sorted({c.layout for strip in found for c in strip.layouts.components})
    return (
        subject.figure(
            "layouts",
            "The layout of every component",
            f"A strip along the model for each of {len(found)} plans, with a field for each of "
            f"{len(model)} components as wide as its share of the parameters, coloured by its "
            f"layout: {listed(kinds)}."
            + (f" Plans were switched {switches} times." if switches else ""),
            lambda width: _draw(width, found),
            _table(found),
            "A field is as wide as the component's share of all parameters, the smallest a "
            f"little wider. Gaps divide pipeline stages.{_reasons(found)}",
        ),
    )


def strips(subject: Subject) -> list[Strip]:
    """Of each strategy on most devices, of `auto` on any number; seeds where they differ."""
    comparison = subject.comparison
    found: list[Strip] = []
    for group in comparison.groups:
        strategy, number = group.first.strategy, group.first.devices
        runs = [run for run in group.done if any(s.components for s in run.layouts)]
        alike = [g for g in comparison.groups if g.first.strategy == strategy]
        known = [g.first.devices for g in alike if any(run.layouts for run in g.done)]
        if not runs or (number < max(known) and strategy != "auto"):
            continue
        different = {tuple(s.plan for s in run.layouts): run for run in reversed(runs)}
        for run in sorted(different.values(), key=lambda run: run.seed):
            seed = f", seed {run.seed}" if len(different) > 1 else ""
            found += _of_run(run, f"{strategy} on {devices(number)}{seed}")
    return found


def _of_run(run: RunResult, title: str) -> list[Strip]:
    stretches = [s for s in run.layouts if s.components]
    found = []
    for i, stretch in enumerate(stretches):
        until = f"until step {stretches[i + 1].step}" if i + 1 < len(stretches) else ""
        since = f"from step {stretch.step + 1}" if stretch.step else ""
        when = " ".join(part for part in (since, until) if part)
        found.append(Strip(f"{title}, {when}" if when else title, stretch, stretch.plan))
    return found


def _reasons(found: list[Strip]) -> str:
    said = []
    for strip in found:
        at = strip.layouts
        if not at.step:
            continue
        moved = f", {size(at.moved_bytes)} moved" if at.moved_bytes is not None else ""
        pause = f" (paused for {seconds(at.paused_seconds)}{moved})" if at.paused_seconds else ""
        reason = f": {at.reason}" if at.reason else ""
        said.append(f" {strip.title}{pause}{reason}.".replace("..", "."))
    return "".join(dict.fromkeys(said))


def _table(found: list[Strip]) -> PageTable:
    names = list(dict.fromkeys(c.name for strip in found for c in strip.layouts.components))
    of = [{c.name: c for c in strip.layouts.components} for strip in found]
    staged = [any(c.stage for c in strip.layouts.components) for strip in found]
    rows = []
    for name in names:
        sizes = [by[name].parameter_bytes for by in of if name in by]
        cells = [_cell(by.get(name), s) for by, s in zip(of, staged, strict=True)]
        rows.append((name, size(max(sizes)), *cells))
    return PageTable(
        "Layout of each component under each plan; with pipeline stages, its stage",
        ("component", "parameters", *(strip.title for strip in found)),
        tuple(rows),
    )


def _cell(component: ComponentLayout | None, staged: bool) -> str:
    if component is None:
        return NONE
    return component.layout + (f", stage {component.stage}" if staged else "")


def _draw(width: int, found: list[Strip]) -> Drawing:
    fills = list(dict.fromkeys(layout_fill(c.layout) for s in found for c in s.layouts.components))
    fills.sort(key=lambda fill: [*LAYOUTS.values(), fill].index(fill))
    top = legend_height(fills, width) + 14
    heights = [_height(strip) for strip in found]
    sheet = Drawing(width, top + LINE + STRIP + 10 + sum(heights))
    sheet.legend(fills, 0)
    axes = sheet.axes(0, 0, width, sheet.height)
    axes.set(xlim=(0, width), ylim=(sheet.height, 0))
    axes.axis("off")
    sheet.text(0, top + 12, "the model, in order", fontweight="bold")
    _model(sheet, axes, found[0].layouts.components, top + LINE)
    y = top + LINE + STRIP + 10
    for strip, height in zip(found, heights, strict=True):
        title = fitted(strip.title, BOLD * width, SMALL + 1)
        sheet.text(0, y + 14, title, fontweight="bold")
        wide = width_of(title) / BOLD + 12
        plan = fitted(strip.subtitle, width - wide)
        if plan:
            sheet.text(wide, y + 14, plan, "muted")
        _strip(sheet, axes, strip.layouts.components, y + LINE + 4)
        y += height
    return sheet


def _height(strip: Strip) -> float:
    staged = any(c.stage for c in strip.layouts.components)
    return LINE + STRIP + 16 + (14 if staged else 0)


def _widths(components: tuple[ComponentLayout, ...], width: float) -> list[float]:
    """Pixels of each component: as its parameters, but at least `LEAST`, where there is room.

    width_i = least + (width - n least) bytes_i / sum of bytes"""
    least = min(LEAST, width / len(components) / 2)
    total = sum(c.parameter_bytes for c in components)
    rest = width - least * len(components)
    if not total:
        return [width / len(components)] * len(components)
    return [least + rest * c.parameter_bytes / total for c in components]


def _model(sheet: Drawing, axes: Any, model: tuple[ComponentLayout, ...], y: float) -> None:
    widths = _widths(model, sheet.width)
    _field(axes, 0, y, sheet.width, facecolor=INKS["grid"].paint)
    x = 0.0
    for component, wide in zip(model, widths, strict=True):
        name = component.name
        if wide < width_of(name) + 8:
            name = name.rpartition(".")[2]
        if width_of(name) + 8 <= wide:
            sheet.text(x + wide / 2, y + 16, name, ha="center")
        x += wide
    _borders(axes, widths, y)


def _strip(sheet: Drawing, axes: Any, plan: tuple[ComponentLayout, ...], y: float) -> None:
    stages = sum(1 for _ in groupby(plan, key=lambda c: c.stage))
    widths = _widths(plan, sheet.width - STAGE_GAP * (stages - 1))
    x, i = 0.0, 0
    for stage, in_stage in groupby(plan, key=lambda c: c.stage):
        start = x
        for layout, run in groupby(in_stage, key=lambda c: c.layout):
            count = len(list(run))
            wide = sum(widths[i : i + count])
            _field(axes, x, y, wide, **filled(layout_fill(layout)))
            _borders(axes, widths[i : i + count], y, x)
            if width_of(layout) + 12 <= wide:
                middle, half = x + wide / 2, width_of(layout) / 2 + 4
                axes.add_patch(_box(middle - half, y + 4, 2 * half, STRIP - 8))
                sheet.text(middle, y + 16, layout, ha="center")
            x, i = x + wide, i + count
        if stages > 1:
            label = f"stage {stage}" if width_of(f"stage {stage}") + 8 < x - start else str(stage)
            if width_of(label) + 4 <= x - start + STAGE_GAP:
                sheet.text(start, y + STRIP + 12, label, "muted")
        x += STAGE_GAP


def _field(axes: Any, x: float, y: float, wide: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), wide, STRIP, linewidth=0, **style))


def _box(x: float, y: float, wide: float, tall: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=3"
    return FancyBboxPatch(
        (x, y), wide, tall, boxstyle=style, linewidth=0, facecolor=INKS["ground"].paint
    )


def _borders(axes: Any, widths: list[float], y: float, start: float = 0.0) -> None:
    """Lines between components, as one path; none where they would be all that is seen."""
    xs: list[float] = []
    ys: list[float] = []
    x = start
    for wide, following in pairwise(widths):
        x += wide
        if min(wide, following) > 1.5:
            xs += [x, x, float("nan")]
            ys += [y, y + STRIP, float("nan")]
    if xs:
        axes.plot(xs, ys, color=INKS["ground"].paint, linewidth=0.8)
