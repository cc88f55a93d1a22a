"""Several documents as one: what ran alike is compared, what did not has another cluster."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from synchromesh.results.derive import derive
from synchromesh.results.run import RunResult
from synchromesh.results.study import StudyResults, StudySettings


def merged(studies: Sequence[StudyResults]) -> StudyResults:
    """The runs of all documents, in their order, with speedups anew.

    Runs of different machines get these in their cluster, so that they are not compared. Prices
    stay those of their documents. ValueError where scaling is not the same."""
    first, *others = studies
    if not others:
        return first
    scaling = {study.settings.scaling for study in studies}
    if len(scaling) > 1:
        raise ValueError(
            "strong and weak scaling are not compared on one page: report on each by itself"
        )
    prices = {study.price for study in studies}
    return derive(
        replace(
            first,
            title=_joined(study.title for study in studies),
            created=max(study.created for study in studies),
            command=_joined((study.command for study in studies), "\n"),
            note=_joined((study.note for study in studies), "\n"),
            runs=tuple(run for study in _placed(studies) for run in derive(study).runs),
            settings=StudySettings(scaling=first.settings.scaling),
            cluster=first.cluster if all(s.cluster == first.cluster for s in studies) else None,
            emulated=any(study.emulated for study in studies),
            versions=_versions(studies),
            price=prices.pop() if len(prices) == 1 else None,
        )
    )


def _placed(studies: Sequence[StudyResults]) -> Iterator[StudyResults]:
    """Of several machines each with its machine as the cluster of its runs."""
    machines = list(dict.fromkeys(study.machine for study in studies))
    if len(machines) == 1:
        yield from studies
        return
    for study in studies:
        machine = study.machine
        number = machines.index(machine) + 1
        where = f"machine {number}: {machine.processor} ({machine.cores} cores)"
        yield replace(study, runs=tuple(_on(where, run) for run in study.runs))


def _on(where: str, run: RunResult) -> RunResult:
    if run.predicted:
        return run
    return replace(run, cluster=f"{where}, {run.cluster}" if run.cluster else where)


def _joined(texts: Iterable[str], between: str = ", ") -> str:
    return between.join(dict.fromkeys(text for text in texts if text))


def _versions(studies: Sequence[StudyResults]) -> dict[str, str]:
    names = dict.fromkeys(name for study in studies for name in study.versions)
    return {
        name: _joined((study.versions.get(name, "") for study in studies), " and ")
        for name in names
    }
