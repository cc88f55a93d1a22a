"""The page: all sections of a study's report in the template, which escapes every text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from synchromesh.report import (
    curves,
    memory,
    predictions,
    scaling,
    staleness,
    steps,
    strips,
    times,
)
from synchromesh.report.answer import answer
from synchromesh.report.drawing import SharedStyles
from synchromesh.report.figure import PageFigure, Section, Subject
from synchromesh.report.method import method, notices
from synchromesh.report.numbers import NONE, devices, joined
from synchromesh.report.palette import StrategyMark, marks, style
from synchromesh.report.summary import Summary, summary
from synchromesh.results.groups import RunComparison, comparisons
from synchromesh.results.study import StudyResults

SHARES = "No run was traced, so shares of communication are not known."
SECTIONS: tuple[tuple[str, str, Callable[[Subject], Iterator[PageFigure]], str], ...] = (
    ("time", "Training time", times.training_time, "No run has timed steps."),
    ("speedup", "Speedup", scaling.speedup,
     "Nothing ran on one device, or nothing on several, to compare."),
    ("communication", "Computation and communication", times.communication, SHARES),
    ("metrics", "Accuracy", curves.figures,
     "Only speed was measured: no run evaluated a metric on validation data."),
    ("workers", "Workers that go on without each other", staleness.figures,
     "No run let servers step by each worker's gradient when it came."),
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
    drawn, shared = marks(run.strategy for run in results.runs), SharedStyles()
    by_workload: dict[str, list[RunComparison]] = {}
    for comparison in comparisons(results):
        by_workload.setdefault(comparison.workload, []).append(comparison)
    chapters = [
        _chapter(f"w{i}", workload, of_workload, drawn, shared)
        for i, (workload, of_workload) in enumerate(by_workload.items())
    ]
    text = rendered(
        "page.html", shared, results=results, chapters=chapters, notices=notices(results),
        method=method(results),
    )  # fmt: skip
    size = len(text.encode())
    if size > most:
        raise ValueError(
            f"the page would have {size:,} bytes, more than {most:,}: report on fewer runs at "
            f"once ({len(results.runs)} of {len(chapters)} workloads are in it)"
        )
    return text


def _chapter(
    name: str, workload: str, of_workload: Sequence[RunComparison],
    drawn: Mapping[str, StrategyMark], shared: SharedStyles,
) -> Chapter:  # fmt: skip
    subjects = [
        Subject(comparison, drawn, f"{name}c{i}", place)
        for i, (comparison, place) in enumerate(_placed(of_workload))
    ]
    sections = []
    for ident, title, make, missing in SECTIONS:
        styled = (
            replace(figure, drawings=tuple(map(shared.classed, figure.drawings)))
            for subject in subjects
            for figure in make(subject)
        )
        sections.append(Section(f"{name}-{ident}", title, tuple(styled), missing))
    return Chapter(
        name, workload, tuple((s.place, answer(s.comparison)) for s in subjects), tuple(sections),
        tuple((s.place, summary(s.comparison)) for s in subjects),
    )  # fmt: skip


def _placed(of_workload: Sequence[RunComparison]) -> Iterator[tuple[RunComparison, str]]:
    places = [_place(comparison) if len(of_workload) > 1 else "" for comparison in of_workload]
    for comparison, place in zip(of_workload, places, strict=True):
        alone = places.count(place) == 1
        yield comparison, place if alone else f"{place}, on {devices(max(comparison.devices))}"


def _place(comparison: RunComparison) -> str:
    rows = f"{float(comparison.rows):g}"
    batch = f"{rows} rows on each device" if comparison.weak else f"batch {rows}"
    marks = ("emulated hosts" * comparison.emulated, "predicted" * comparison.predicted)
    return joined([comparison.cluster, batch, *marks])


def rendered(template: str, shared: SharedStyles, **known: Any) -> str:
    """A template of ours, by its name or as its text, with the page's colours and styles."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("synchromesh.report", "templates"), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.tests["number"] = _is_number
    inks = {"light": style(False), "dark": style(True), "shared": shared.rules()}
    find = environment.from_string if "{" in template else environment.get_template
    return find(template).render(**known, **inks, unknown=NONE)


def _is_number(cell: Any) -> bool:
    text = str(cell)
    return text[:1] in "-0123456789$−" and len(text) < 40
