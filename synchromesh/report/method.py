"""How a study was measured, on what, and the command that repeats it: terms and descriptions."""

import re
from collections.abc import Iterable

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.report.numbers import counted, devices, joined, listed, short, size
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings

EMULATED = (
    "Hosts are emulated: their links and speed are limited on one machine. Times are of that "
    "emulation and carry over to real hosts only as far as it does."
)
PREDICTED = "Figures marked as predicted come from a model of the cluster: nothing was run there."


def notices(results: StudyResults) -> tuple[str, ...]:
    """What must be said at the top."""
    return tuple(text for text in (*_not_run(results), _priced_elsewhere(results)) if text)


def _not_run(results: StudyResults) -> list[str]:
    emulated = results.emulated or any(run.emulated for run in results.runs)
    predicted = any(run.predicted for run in results.runs)
    return [EMULATED] * emulated + [PREDICTED] * predicted


def _priced_elsewhere(results: StudyResults) -> str:
    """That another device has the price than was measured on, where that is known."""
    price, machine = results.price, results.machine
    if price is None or not price.device or all(run.dollars is None for run in results.runs):
        return ""
    if results.emulated:
        measured = "emulated hosts"
    elif any(_is_a(price.device, name) for name in machine.devices):
        return ""
    else:
        measured = listed(list(dict.fromkeys(machine.devices))) or "CPUs"
    return (
        f"The price is of an instance with {price.device}, times were measured on {measured}: "
        "dollars are what such an instance would cost at the speed measured here, not at its own."
    )


def _is_a(device: str, name: str) -> bool:
    """Whether `Tesla V100-SXM2-16GB` is the device of a price, `V100-16`, memory aside."""
    return device.lower().split("-")[0] in re.split(r"[\s_-]+", name.lower())


def method(results: StudyResults) -> tuple[tuple[str, str], ...]:
    """(term, description) in order; what is not known is left out."""
    terms = (
        ("Measured", results.created), ("Machine", _machine(results.machine)),
        ("Cluster", _cluster(results)), ("Asked for", _settings(results.settings)),
        ("Runs", _runs(results)),
        ("Emulated or predicted", " ".join(_not_run(results)) or "neither: all of it was run"),
        ("Price", _price(results.price)),
        ("Versions", ", ".join(f"{k} {v}" for k, v in results.versions.items())),
    )  # fmt: skip
    return tuple((term, text) for term, text in terms if text)


def _machine(machine: StudyMachine) -> str:
    parts = [
        machine.processor, f"{machine.cores} cores" if machine.cores else "",
        f"{size(machine.memory_bytes)} of memory" if machine.memory_bytes else "",
        listed(machine.devices) or "no accelerator", machine.system,
    ]  # fmt: skip
    return joined(parts)


def _cluster(results: StudyResults) -> str:
    measured, predicted = (
        dict.fromkeys(short(run.cluster, 200) for run in results.runs if run.predicted is which)
        for which in (False, True)
    )
    parts = [listed([name or _place(results) for name in measured])]
    parts += [f"predicted for {listed(list(predicted))}, where nothing ran"] if predicted else []
    return joined(parts, "; ")


def _place(results: StudyResults) -> str:
    if results.cluster is None:
        return "local processes on this machine"
    hosts = results.cluster.get("hosts")
    if not isinstance(hosts, list):
        return "in results.json"
    return f"{len(hosts)} hosts" + (", emulated" if results.emulated else "")


def _settings(settings: StudySettings) -> str:
    def some(before: str, values: Iterable[object], after: str = "") -> str:
        said = listed([str(value) for value in values])
        return f"{before} {said}{after}" if said else ""

    parts = [
        listed(list(settings.strategies)), some("on", settings.devices, " devices"),
        some("batch", settings.batch_sizes), f"{settings.scaling} scaling",
        some("seeds", settings.seeds), f"{settings.epochs} epochs" if settings.epochs else "",
        _timed(settings) if settings.steps else "", some("targets", settings.targets),
    ]  # fmt: skip
    return joined(parts, "; ")


def _timed(settings: StudySettings) -> str:
    limit = "" if settings.at_most is None else f", fewer where they take {settings.at_most:g} s"
    return f"{settings.steps} timed steps{limit}"


def _runs(results: StudyResults) -> str:
    failed = sum(run.status == "failed" for run in results.runs)
    steps = sum(run.timed_steps for run in results.runs)
    runs = counted(len(results.runs), "run")
    timed = f"{steps:,} timed steps" if steps else ""
    return joined([runs, f"{failed} of them failed" if failed else "", timed])


def _price(price: HourlyPrice | None) -> str:
    if price is None:
        return ""
    hourly = f"${price.dollars_per_hour:g} per hour for {devices(price.devices)}"
    date = f"of {price.date}" if price.date else ""
    return joined([price.name, hourly, price.region, date, price.source])
