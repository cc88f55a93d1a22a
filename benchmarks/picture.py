"""The README's picture, drawn from the committed tables: `python -m benchmarks.picture`.

Left: step time of DistributedDataParallel and of the best uniform plan over that of the chosen
plan (tables/choice.txt). Right: predicted and measured step time of every candidate that was
measured (tables/prediction.txt). Writes docs/results-light.svg and docs/results-dark.svg; equal
tables give equal files.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLES, DOCS = ROOT / "benchmarks" / "tables", ROOT / "docs"
LAB = "4x200"  # hosts x Mbit/s, of the bars
TICKS = (200, 500, 1000, 2000, 5000)  # milliseconds


@dataclass(frozen=True)
class Theme:
    """Colours for one background, which itself stays transparent."""

    name: str
    text: str
    grid: str
    ddp: str
    uniform: str


THEMES = (
    Theme("light", text="#1f2328", grid="#d1d9e0", ddp="#bc4c00", uniform="#0969da"),
    Theme("dark", text="#e6edf3", grid="#3d444d", ddp="#f0883e", uniform="#58a6ff"),
)


def ratios(text: str) -> dict[str, tuple[float, float]]:
    """By model in `LAB`: DistributedDataParallel and the best uniform plan over the chosen one."""
    row = re.compile(rf"^(\w+) {LAB} +\d+ms +[\d.]+ +([\d.]+) +\S+ +\S+ +([\d.]+) ", re.M)
    return {model: (float(ddp), float(uniform)) for model, ddp, uniform in row.findall(text)}


def pairs(text: str) -> list[tuple[float, float]]:
    """Predicted and measured milliseconds of every candidate."""
    rows = re.findall(r"^\w+ +\d+x\d+ +(\d+)ms +(\d+)ms ", text, re.M)
    return [(float(predicted), float(measured)) for predicted, measured in rows]


def draw(theme: Theme, path: Path) -> None:
    """Write the picture for one background."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: dict[str, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "synchromesh", "font.size": 10,
        "text.color": theme.text, "axes.labelcolor": theme.text, "axes.edgecolor": theme.grid,
        "xtick.color": theme.text, "ytick.color": theme.text, "grid.color": theme.grid,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "axes.titlesize": 11, "axes.axisbelow": True,
    }  # fmt: skip
    with pyplot.rc_context(style):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        _bars(left, theme)
        _scatter(right, theme)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _bars(axes: Any, theme: Theme) -> None:
    found = sorted(ratios((TABLES / "choice.txt").read_text()).items(), key=lambda row: row[1])
    series = (("DistributedDataParallel", theme.ddp), ("best uniform plan", theme.uniform))
    for i, (label, colour) in enumerate(series):
        places = [y + 0.2 - 0.4 * i for y in range(len(found))]
        bars = axes.barh(places, [values[i] for _, values in found], 0.38, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        bars.set_label(label)
    axes.axvline(1, color=theme.text, linewidth=1)
    axes.set_yticks(range(len(found)), [model for model, _ in found])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 9)
    axes.set_xlabel("step time, 1 = the plan that Synchromesh chose")
    axes.set_title("4 emulated hosts, 200 Mbit/s", loc="left")
    axes.legend(loc="lower right")


def _scatter(axes: Any, theme: Theme) -> None:
    found = pairs((TABLES / "prediction.txt").read_text())
    ends = [min(map(min, found)) / 1.2, max(map(max, found)) * 1.2]
    axes.plot(ends, ends, color=theme.text, linewidth=1)
    axes.plot(*zip(*found, strict=True), "o", color=theme.uniform, markersize=4, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(TICKS, [str(tick) for tick in TICKS])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("predicted step time, ms")
    axes.set_ylabel("measured step time, ms")
    axes.grid(True, linewidth=0.5)
    axes.set_title(f"{len(found)} plans, predicted before they ran", loc="left")


def main() -> None:
    """Draw the picture for each background."""
    for theme in THEMES:
        draw(theme, DOCS / f"results-{theme.name}.svg")


if __name__ == "__main__":
    main()
