"""The README's picture, drawn from benchmarks/claims.json: `python -m benchmarks.picture`.

Left: step time of DistributedDataParallel and of the best uniform plan over that of the chosen
plan, for each model and lab of the row `choice`. Right: predicted and measured step time of every
candidate that was measured (row `prediction`). Writes docs/results-light.svg and
docs/results-dark.svg; equal figures give equal files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.record import Records, load

DOCS = Path(__file__).parents[1] / "docs"
TICKS = (200, 500, 1000, 2000, 5000)  # milliseconds
ROOM = 1.15  # times the longest bar, for its figure


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


def draw(theme: Theme, records: Records, path: Path) -> None:
    """Writes the picture for one background; a row without figures leaves its side empty."""
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
        _bars(left, theme, records["choice"].points or {})
        _scatter(right, theme, records["prediction"].points or [])
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _bars(axes: Any, theme: Theme, points: Mapping[str, Sequence[float]]) -> None:
    """points: DistributedDataParallel and the best uniform plan over the chosen one, by model and
    lab, as `conv 4x200`."""
    found = sorted(points.items(), key=lambda row: row[1])
    series = (("DistributedDataParallel", theme.ddp), ("best uniform plan", theme.uniform))
    for i, (label, colour) in enumerate(series):
        places = [y + 0.2 - 0.4 * i for y in range(len(found))]
        bars = axes.barh(places, [values[i] for _, values in found], 0.38, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=9)
        bars.set_label(label)
    axes.axvline(1, color=theme.text, linewidth=1)
    axes.set_yticks(range(len(found)), [case for case, _ in found])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, ROOM * max((max(values) for _, values in found), default=1.0))
    axes.set_xlabel("step time, 1 = the plan that Synchromesh chose")
    axes.set_title("models on emulated hosts x Mbit/s", loc="left")
    axes.legend(loc="lower right")


def _scatter(axes: Any, theme: Theme, points: Sequence[Sequence[float]]) -> None:
    """points: predicted and measured milliseconds of every candidate."""
    every = [*TICKS, *(x for point in points for x in point)]
    ends = [min(every) / 1.2, max(every) * 1.2]
    axes.plot(ends, ends, color=theme.text, linewidth=1)
    columns = [[point[i] for point in points] for i in (0, 1)]
    axes.plot(*columns, "o", color=theme.uniform, markersize=4, alpha=0.7)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(TICKS, [str(tick) for tick in TICKS])
        axis.set_ticks([], minor=True)
    axes.set_xlabel("predicted step time, ms")
    axes.set_ylabel("measured step time, ms")
    axes.grid(True, linewidth=0.5)
    axes.set_title(f"{len(points)} plans, predicted before they ran", loc="left")


def main(folder: Path = DOCS) -> None:
    """Draws the picture for each background."""
    records = load()
    for theme in THEMES:
        draw(theme, records, folder / f"results-{theme.name}.svg")


if __name__ == "__main__":
    main()
