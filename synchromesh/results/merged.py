"""Several documents as one: what ran alike is compared, what did not has another cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from synchromesh.results.derive import derive
from synchromesh.results.run import RunResult
from synchromesh.results.study import Settings, StudyResults


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
    machines = list(dict.fromkeys(study.machine for study in studies))
    runs: list[RunResult] = []
    for study in studies:
        where = f"{study.machine.processor} ({study.machine.cores} cores)"
        if len(machines) > 1:
            number = machines.index(study.machine) + 1
            where = f"machine {number}: {where}"
            study = replace(study, runs=tuple(_placed(run, where) for run in study.runs))
        runs += derive(study).runs
    prices = {study.price for study in studies}
    return derive(
        replace(
            first,
            title=_joined(study.title for study in studies),
            created=max(study.created for study in studies),
            command=_joined((study.command for study in studies), "\n"),
            note=_joined((study.note for study in studies), "\n"),
            runs=tuple(runs),
            settings=Settings(scaling=first.settings.scaling),
            cluster=first.cluster if all(s.cluster == first.cluster for s in studies) else None,
            emulated=any(study.emulated for study in studies),
            versions=_versions(studies),
            price=prices.pop() if len(prices) == 1 else None,
        )
    )


def _placed(run: RunResult, where: str) -> RunResult:
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
