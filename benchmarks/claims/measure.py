"""Measures rows one run after the other; what is known is kept as soon as a run has ended."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.claims.claim import Claim, NoFigure
from benchmarks.claims.history import Unknown, commit_of
from benchmarks.claims.record import FILE, Record, Records, save
from benchmarks.claims.run import Run, RunFailed

NAMES = 18  # characters of a row's name on the terminal
LOOK = 0.5  # seconds for which others' work is looked at before a run


def busy_cores(seconds: float) -> float:
    """Cores that programs keep busy for so long; 0.0 where the system does not tell."""
    try:
        began, before = time.monotonic(), _busy_ticks()
        time.sleep(seconds)
        ticks, taken = _busy_ticks() - before, time.monotonic() - began
        return round(ticks / os.sysconf("SC_CLK_TCK") / taken, 2)
    except OSError:
        return 0.0


def _busy_ticks() -> int:
    """Of all cores since the start: without what is idle, or waits for a disk."""
    user, nice, system, _, _, *interrupts = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return user + nice + system + sum(interrupts[:2])


def runs_of(claims: Iterable[Claim]) -> dict[Run, list[Claim]]:
    """The rows by the run that measures them."""
    found: dict[Run, list[Claim]] = {}
    for claim in claims:
        found.setdefault(claim.run, []).append(claim)
    return found


def measured(run: Run, claims: Sequence[Claim], commit: str, machine: str) -> Iterator[Record]:
    """A record of each of these rows, all of this one run."""
    busy, began = busy_cores(LOOK), time.monotonic()
    common = Record(
        command=run.command, commit=commit, date=time.strftime("%Y-%m-%d"), machine=machine,
        busy=busy,
    )  # fmt: skip
    fault, document = "", None
    try:
        document = run.document()
    except RunFailed as error:
        fault = str(error)
    seconds = round(time.monotonic() - began, 1)
    for claim in claims:
        yield read(claim, document, common, seconds, fault)


def read(claim: Claim, document: object, common: Record, seconds: float, fault: str) -> Record:
    """The record of a row, failed where the document does not show what it is about."""
    given = {**vars(common), "seconds": seconds}
    if fault:
        return Record(**{**given, "failed": fault})
    try:
        found = claim.read(document)
    except NoFigure as error:
        return Record(**{**given, "failed": str(error)})
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"its document cannot be read ({type(error).__name__}: {error})"
        return Record(**{**given, "failed": reason})
    return Record(
        **{**given, "values": found.values, "words": found.words, "points": found.points}
    )


def measure(
    claims: Iterable[Claim], records: Records, paths: list[str], machine: str,
    say: Callable[[str], None], file: Path = FILE,
) -> None:  # fmt: skip
    """Measures these rows, and writes the file after each run; say: a row's name, and once it is
    known the rest of its line. Unknown where the code is changed meanwhile: the run it was at is
    not kept."""
    commit = commit_of(paths)
    for run, rows in runs_of(claims).items():
        say(f"{rows[0].name:{NAMES}}")
        if hindrance := run.hindrance():
            found = [records[claim.name].skipped(hindrance) for claim in rows]
        else:
            found = list(measured(run, rows, commit, machine))
            if commit_of(paths) != commit:
                raise Unknown(f"the code was changed while {rows[0].name} was measured")
        for claim, record in zip(rows, found, strict=True):
            records[claim.name] = record
            name = "" if claim is rows[0] else f"{claim.name:{NAMES}}"
            say(f"{name}{outcome(claim, record)}\n")
        save(records, file)


def outcome(claim: Claim, record: Record) -> str:
    """A row as the terminal shows it behind its name."""
    if record.unmeasured:
        return f"skipped: {record.unmeasured}"
    if record.failed:
        return f"FAILED after {record.seconds:.0f} s: {record.failed}"
    figures = ", ".join(map(claim.form.figure, record.values))
    goals = ", ".join(dict.fromkeys(map(claim.form.aim, record.values)))
    verdict = "" if record.reached else ", MISSED"
    return f"{figures} (goal {goals}{verdict}), {record.seconds:.0f} s"
