"""The README's section of figures, from the records of all rows."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.claim import Claim
from benchmarks.claims.record import Record, Records
from benchmarks.claims.run import ROOT

PAGE = ROOT / "README.md"
BEGIN = "<!-- claims: written by `make claims` from benchmarks/claims.json -->"
END = "<!-- end of claims -->"
HEADER = "| what | result | goal | row |\n|---|---|---|---|"
WIDTH = 119  # characters of a line
QUIET = 0.2  # cores that others may keep busy while a figure is called undisturbed


def section(claims: Sequence[Claim], records: Records) -> str:
    """The table, and under it where its figures come from."""
    known = [(claim, records.get(claim.name, Record())) for claim in claims]
    table = "\n".join([HEADER, *(_row(claim, record) for claim, record in known)])
    told = (textwrap.fill(line, WIDTH, break_long_words=False) for line in origins(known))
    return "\n\n".join([table, *told])


def _row(claim: Claim, record: Record) -> str:
    what, goals = text(claim, record), ", ".join(dict.fromkeys(map(claim.form.aim, record.values)))
    if not record.values:
        figures = _bold("failed" if record.failed else "not measured")
    elif any(value.reached for value in record.values):
        written = [(claim.form.figure(value), value.reached) for value in record.values]
        figures = ", ".join(figure if good else _bold(figure) for figure, good in written)
    else:
        figures = _bold(", ".join(map(claim.form.figure, record.values)))
    what = what if record.reached else _bold(what)
    return f"| {what} | {figures} | {goals} | `{claim.name}` |"


class _NoFigure:
    """Stands in a text for a number that was not read."""

    def __format__(self, spec: str) -> str:
        return "?"


class _Words(dict[str, Any]):
    def __missing__(self, name: str) -> _NoFigure:
        return _NoFigure()


def text(claim: Claim, record: Record) -> str:
    """What the row says, with the numbers in it."""
    return claim.what.format_map(_Words(record.words))


def _bold(words: str) -> str:
    return f"**{words}**"


def origins(known: Sequence[tuple[Claim, Record]]) -> Iterator[str]:
    """Paragraphs: of which commits, days and machines the figures are, and what is wrong."""
    groups: dict[tuple[str, ...], list[tuple[Claim, Record]]] = {}
    for claim, record in known:
        if record.commit:
            key = (record.source, record.commit, record.machine)
            groups.setdefault(key, []).append((claim, record))
    whole = len(groups) == 1 and all(record.commit for _, record in known)
    for (source, commit, machine), rows in groups.items():
        days = sorted({record.date for _, record in rows})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        names = "All rows" if whole else _names(claim for claim, _ in rows)
        told = f", taken from {source}" if source else ""
        yield f"{names}: commit {commit}, {when}, {machine}{told}."
    if ranges := [told for claim, record in known if (told := _ranges(claim, record))]:
        yield f"Least and most of the rounds or cases behind the figures: {'; '.join(ranges)}."
    for claim, record in known:
        if record.failed:
            yield f"`{claim.name}` failed: {record.failed}."
        if record.unmeasured:
            yield f"`{claim.name}` was not measured with the others: {record.unmeasured}."
    if beside := [f"`{claim.name}` {r.busy:.1f}" for claim, r in known if r.busy > QUIET]:
        yield f"Other programs kept cores busy just before: {', '.join(beside)}."


def _ranges(claim: Claim, record: Record) -> str:
    """As `loop` 0.95 to 1.02; empty where no figure has several rounds or cases."""
    ranges = ", ".join(filter(None, map(claim.form.range, record.values)))
    return f"`{claim.name}` {ranges}" if ranges else ""


def _names(claims: Iterable[Claim]) -> str:
    return ", ".join(f"`{claim.name}`" for claim in claims)


def page(before: str, claims: Sequence[Claim], records: Records) -> str:
    """The page with its section made anew; ValueError where it has no such section."""
    head, begin, rest = before.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"no section between {BEGIN!r} and {END!r}")
    return f"{head}{begin}\n{section(claims, records)}\n{end}{tail}"


def write(claims: Sequence[Claim], records: Records, path: Path = PAGE) -> None:
    path.write_text(page(path.read_text(), claims, records))
