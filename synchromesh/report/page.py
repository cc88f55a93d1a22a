"""The page: all sections of a study's report in the template, which escapes every text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from synchromesh.report import curves, memory, predictions, scaling, steps, strips, times
from synchromesh.report.answer import answer
from synchromesh.report.drawing import SharedStyles
from synchromesh.report.figure import PageFigure, Section, Subject
from synchromesh.report.method import method, notices
from synchromesh.report.numbers import NONE, devices, joined
from synchromesh.report.palette import StrategyMark, marks, style
from synchromesh.report.summary import Summary, summary
from synchromesh.results.groups import RunComparison, comparisons
from synchromesh.results.study import StudyResults

if TYPE_CHECKING:
    import jinja2

NOT_TIMED = "No run has timed steps."
SHARES = "No run was traced, so shares of communication are not known."
SECTIONS: tuple[tuple[str, str, Callable[[Subject], Iterator[PageFigure]], str], ...] = (
    ("time", "Training time", times.training_time, NOT_TIMED),
    ("speedup", "Speedup", scaling.speedup,
     "Nothing ran on one device, or nothing on several, to compare."),
    ("communication", "Computation and communication", times.communication, SHARES),
    ("metrics", "Accuracy", curves.figures,
     "Only speed was measured: no run evaluated a metric on validation data."),
    ("memory", "Memory", memory.figures, "Peak memory was not measured."),
    ("layouts", "Layouts", strips.figures,
     "No run is under a plan of ours that says the layout of each component."),
    ("predicted", "Predicted and measured", predictions.figures, "Nothing was predicted."),
    ("scaling", "What more devices cost", scaling.scaling,
     "A run on one device and shares of communication on several would show it."),
    ("steps", "The timeline of a step", steps.figures, "No step was recorded."),
)  # fmt: skip


@dataclass(frozen=True)
class Chapter:
    """A workload: its answers (place, sentences), sections and summaries (place, table)."""

    name: str
    title: str
    answers: tuple[tuple[str, tuple[str, ...]], ...]
    sections: tuple[Section, ...]
    summaries: tuple[tuple[str, Summary], ...]


def page(results: StudyResults, most: int = 2_000_000) -> str:
    """The report as one HTML page: it asks the network for nothing and runs no script.

    ValueError where it would have more than `most` bytes."""
    found = comparisons(results)
    drawn, shared = marks(run.strategy for run in results.runs), SharedStyles()
    workloads = list(dict.fromkeys(c.workload for c in found))
    chapters = tuple(
        _chapter(workload, [c for c in found if c.workload == workload], drawn, f"w{i}", shared)
        for i, workload in enumerate(workloads)
    )
    text = _template().render(
        results=results, chapters=chapters, notices=notices(results), method=method(results),
        marks=drawn, light=style(False), dark=style(True), shared=shared.rules(),
        unknown=NONE,
    )  # fmt: skip
    size = len(text.encode())
    if size > most:
        raise ValueError(
            f"the page would have {size:,} bytes, more than {most:,}: report on fewer runs at "
            f"once ({len(results.runs)} of {len(workloads)} workloads are in it)"
        )
    return text


def _chapter(
    workload: str, found: list[RunComparison], drawn: dict[str, StrategyMark], name: str,
    shared: SharedStyles,
) -> Chapter:  # fmt: skip
    places = _places(found)
    subjects = [
        Subject(comparison, drawn, f"{name}c{i}", place)
        for i, (comparison, place) in enumerate(zip(found, places, strict=True))
    ]
    sections = tuple(
        Section(f"{name}-{ident}", title, tuple(_figures(subjects, make, shared)), missing)
        for ident, title, make, missing in SECTIONS
    )
    return Chapter(
        name,
        workload,
        tuple((s.place, answer(s.comparison)) for s in subjects),
        sections,
        tuple((s.place, summary(s.comparison)) for s in subjects),
    )


def _figures(
    subjects: list[Subject], make: Callable[[Subject], Iterator[PageFigure]],
    shared: SharedStyles,
) -> Iterator[PageFigure]:  # fmt: skip
    for subject in subjects:
        for figure in make(subject):
            yield replace(figure, drawings=tuple(map(shared.classed, figure.drawings)))


def _places(found: list[RunComparison]) -> list[str]:
    """What tells the comparisons of a workload apart, in words; of one alone nothing."""
    if len(found) == 1:
        return [""]
    said = []
    for comparison in found:
        rows = f"{float(comparison.rows):g} rows"
        words = [
            comparison.cluster,
            f"{rows} on each device" if comparison.weak else f"batch {float(comparison.rows):g}",
            "emulated hosts" if comparison.emulated else "",
            "predicted" if comparison.predicted else "",
        ]
        said.append(joined(words))
    return [
        place if said.count(place) == 1 else f"{place}, on {devices(max(c.devices))}"
        for place, c in zip(said, found, strict=True)
    ]


@cache
def _template() -> "jinja2.Template":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("synchromesh.report", "templates"), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.tests["number"] = _is_number
    return environment.get_template("page.html")


def _is_number(cell: Any) -> bool:
    text = str(cell)
    return text[:1] in "0123456789$−" and len(text) < 40
