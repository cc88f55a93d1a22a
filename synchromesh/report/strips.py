"""The figure of layouts, the page's picture: a coloured strip along the model for each plan.

the model   embeddings | layer.0 | layer.1 | ...   | classifier |    wide as the parameters are
auto        ===data===================== xx hybrid:tensor=2 xx ///
            stage 0                    | stage 1"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from synchromesh.report.drawing import SIZES, Box, Drawing, filled, fitted, lines, width_of
from synchromesh.report.figure import PageFigure, PageTable, Subject
from synchromesh.report.numbers import NONE, devices, joined, listed, seconds, size
from synchromesh.report.palette import INKS, LAYOUTS, layout_fill
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import ComponentLayout, Layouts, RunResult

Components = tuple[ComponentLayout, ...]


@dataclass(frozen=True)
class StripSizes:
    """Of a strip, in pixels; chosen by eye."""

    tall: int = 24
    least: float = 2.5  # of a component
    gap: float = 3.0  # between stages


STRIP = StripSizes()


@dataclass(frozen=True)
class Strip:
    """A plan's layouts under a title; the next of the same run came later."""

    title: str
    layouts: Layouts

    @property
    def components(self) -> Components:
        return self.layouts.components

    @property
    def staged(self) -> bool:
        return any(c.stage for c in self.components)


def figures(subject: Subject) -> Iterator[PageFigure]:
    """One; none where no run says its layouts."""
    plans = strips(subject)
    if not plans:
        return
    switches = sum(strip.layouts.step > 0 for strip in plans)
    kinds = sorted({c.layout for strip in plans for c in strip.components})
    staged = any(strip.staged for strip in plans)
    yield subject.figure(
        "layouts",
        "The layout of every component",
        f"A strip along the model for each of {len(plans)} plans, with a field for each of "
        f"{len(plans[0].components)} components as wide as its share of the parameters, coloured "
        f"by its layout: {listed(kinds)}."
        + (f" Plans were switched {switches} times." if switches else ""),
        lambda width: _draw(width, plans),
        _table(plans),
        "A field is as wide as the component's share of all parameters, the smallest a "
        f"little wider.{' Gaps divide pipeline stages.' * staged}{_reasons(plans)}",
    )


def strips(subject: Subject) -> list[Strip]:
    """Of each strategy on most devices, of `auto` on any number; seeds where they differ."""
    groups = subject.comparison.groups
    most: dict[str, int] = {}
    for group in groups:
        if any(run.layouts for run in group.done):
            strategy, number = group.first.strategy, group.first.devices
            most[strategy] = max(number, most.get(strategy, 0))
    return [
        strip
        for group in groups
        if group.first.strategy == "auto" or group.first.devices == most.get(group.first.strategy)
        for strip in _of_group(group)
    ]


def _of_group(group: RunGroup) -> Iterator[Strip]:
    runs = [run for run in group.done if any(s.components for s in run.layouts)]
    different = {tuple(s.plan for s in run.layouts): run for run in reversed(runs)}
    for run in sorted(different.values(), key=lambda run: run.seed):
        seed = f", seed {run.seed}" if len(different) > 1 else ""
        yield from _of_run(run, f"{run.strategy} on {devices(run.devices)}{seed}")


def _of_run(run: RunResult, title: str) -> Iterator[Strip]:
    stretches = [s for s in run.layouts if s.components]
    ends = [f"until step {later.step}" for later in stretches[1:]] + [""]
    for stretch, until in zip(stretches, ends, strict=True):
        since = f"from step {stretch.step + 1}" if stretch.step else ""
        yield Strip(joined([title, joined([since, until], " ")]), stretch)


def _reasons(plans: Sequence[Strip]) -> str:
    said = []
    for strip in (strip for strip in plans if strip.layouts.step):
        at = strip.layouts
        moved = f", {size(at.moved_bytes)} moved" if at.moved_bytes is not None else ""
        pause = f" (paused for {seconds(at.paused_seconds)}{moved})" if at.paused_seconds else ""
        reason = f": {at.reason}" if at.reason else ""
        said.append(f" {strip.title}{pause}{reason}.".replace("..", "."))
    return "".join(dict.fromkeys(said))


def _table(plans: Sequence[Strip]) -> PageTable:
    named = [(strip, {c.name: c for c in strip.components}) for strip in plans]
    rows = []
    for name in dict.fromkeys(name for _, by_name in named for name in by_name):
        sizes = [by_name[name].parameter_bytes for _, by_name in named if name in by_name]
        cells = [_cell(by_name.get(name), strip.staged) for strip, by_name in named]
        rows.append((name, size(max(sizes)), *cells))
    caption = "Layout of each component under each plan; with pipeline stages, its stage"
    columns = ("component", "parameters", *(strip.title for strip in plans))
    return PageTable(caption, columns, tuple(rows))


def _cell(component: ComponentLayout | None, staged: bool) -> str:
    if component is None:
        return NONE
    return component.layout + (f", stage {component.stage}" if staged else "")


def _draw(width: int, plans: Sequence[Strip]) -> Drawing:
    heights = [SIZES.line + STRIP.tall + 16 + 14 * strip.staged for strip in plans]
    model = SIZES.line + STRIP.tall + 10
    fills = dict.fromkeys(layout_fill(c.layout) for s in plans for c in s.components)
    legend = sorted(fills, key=lambda fill: [*LAYOUTS.values(), fill].index(fill))
    sheet = Drawing(width, 6 + model + sum(heights), legend)
    axes = sheet.axes(0, 0, width, sheet.height)
    axes.set(xlim=(0, width), ylim=(sheet.height, 0))
    axes.axis("off")
    y = sheet.top + 6
    sheet.text(0, y + 12, "the model, in order", fontweight="bold")
    _model(sheet, axes, plans[0].components, y + SIZES.line)
    y += model
    for strip, height in zip(plans, heights, strict=True):
        title = fitted(strip.title, SIZES.bold * width, SIZES.small + 1)
        sheet.text(0, y + 14, title, fontweight="bold")
        wide = width_of(title) / SIZES.bold + 12
        if plan := fitted(strip.layouts.plan, width - wide):
            sheet.text(wide, y + 14, plan, "muted")
        _strip(sheet, axes, strip.components, y + SIZES.line + 4)
        y += height
    return sheet


def _widths(components: Components, width: float) -> list[float]:
    """Pixels of a component: least + (width - n least) bytes / sum of bytes, if there is room."""
    least = min(STRIP.least, width / len(components) / 2)
    total = sum(c.parameter_bytes for c in components)
    rest = width - least * len(components)
    if not total:
        return [width / len(components)] * len(components)
    return [least + rest * c.parameter_bytes / total for c in components]


def _model(sheet: Drawing, axes: Any, model: Components, y: float) -> None:
    widths = _widths(model, sheet.width)
    _field(axes, 0, y, sheet.width, facecolor=INKS["grid"].paint)
    x = 0.0
    for component, wide in zip(model, widths, strict=True):
        names = (component.name, component.name.rpartition(".")[2])
        name = next((name for name in names if width_of(name) + 8 <= wide), "")
        sheet.text(x + wide / 2, y + 16, name, ha="center")
        x += wide
    _borders(axes, widths, y)


def _strip(sheet: Drawing, axes: Any, plan: Components, y: float) -> None:
    stages = sum(1 for _ in groupby(plan, key=lambda c: c.stage))
    widths = _widths(plan, sheet.width - STRIP.gap * (stages - 1))
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
                axes.add_patch(_box(middle - half, y + 4, 2 * half, STRIP.tall - 8))
                sheet.text(middle, y + 16, layout, ha="center")
            x, i = x + wide, i + count
        if stages > 1:
            label = f"stage {stage}" if width_of(f"stage {stage}") + 8 < x - start else str(stage)
            if width_of(label) + 4 <= x - start + STRIP.gap:
                sheet.text(start, y + STRIP.tall + 12, label, "muted")
        x += STRIP.gap


def _field(axes: Any, x: float, y: float, wide: float, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), wide, STRIP.tall, linewidth=0, **style))


def _box(x: float, y: float, wide: float, tall: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    style, ground = "round,pad=0,rounding_size=3", INKS["ground"].paint
    return FancyBboxPatch((x, y), wide, tall, boxstyle=style, linewidth=0, facecolor=ground)


def _borders(axes: Any, widths: list[float], y: float, start: float = 0.0) -> None:
    """Lines between components; none where they would be all that is seen."""
    ends: list[Box] = []
    for wide, following in pairwise(widths):
        start += wide
        if min(wide, following) > 1.5:
            ends.append((start, start, y, y + STRIP.tall))
    lines(axes, ends, "ground", linewidth=0.8)
