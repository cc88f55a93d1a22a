"""Every row of the README's table, measured: `python -m benchmarks.claims`.

Goes on where it was stopped: what has figures of this commit is not measured again, and a run that
was killed is the only one that is lost. Emulated hosts need root; rows that this machine cannot
measure are skipped and keep their figures, marked. Exits with 1 where a row does not reach its
goal, has failed or was skipped, and with 130 after Ctrl-C.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.claims import page, record
from benchmarks.claims.claim import Claim
from benchmarks.claims.history import change_since, code_of, commit_of, depends_on
from benchmarks.claims.measure import measure, runs_of
from benchmarks.claims.record import Record, Records
from benchmarks.claims.rows import CLAIMS

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def named(names: Sequence[str], claims: Sequence[Claim] = CLAIMS) -> list[Claim]:
    """The rows of these names, and those that the same runs measure; all where none is named.
    ValueError with near names for one that is not there."""
    known = [claim.name for claim in claims]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known) or known
            raise ValueError(f"no row {name!r}: did you mean {_either(near)}?")
    runs = [claim.run for claim in claims if claim.name in names or not names]
    return [claim for claim in claims if claim.run in runs]


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def stale(claims: Sequence[Claim], records: Records) -> list[str]:
    """A line for each row that was measured before the last change of what it depends on."""
    found = []
    for claim in claims:
        known = records.get(claim.name, Record())
        if not known.commit:
            found.append(f"{claim.name}: never measured")
        elif change := change_since(known.commit, depends_on(claim)):
            found.append(f"{claim.name}: measured at {known.commit} ({known.date}), then {change}")
    return found


def plan(claims: Sequence[Claim]) -> None:
    """Prints the runs, what they need and how long they take."""
    runs = runs_of(claims)
    for run, rows in runs.items():
        needs = ["root"] * run.hosts + [f"data {run.data}"] * bool(run.data)
        names = ", ".join(claim.name for claim in rows)
        print(f"{run.seconds:5.0f} s  {names:28} {', '.join(needs):10} {run.command}")
    print(f"{sum(run.seconds for run in runs) / 60:5.1f} min")


def summary(claims: Sequence[Claim], records: Records) -> int:
    """Says in a line how many rows reach their goals; the exit code."""
    known = {claim.name: records[claim.name] for claim in claims}
    groups = {
        "failed": [name for name, r in known.items() if r.failed and not r.unmeasured],
        "skipped": [name for name, r in known.items() if r.unmeasured],
        "behind": [n for n, r in known.items() if r.values and not (r.reached or r.unmeasured)],
    }
    reached = len(known) - sum(map(len, groups.values()))
    told = [f"{len(names)} {what} ({', '.join(names)})" for what, names in groups.items() if names]
    print("; ".join([f"{reached} of {len(known)} rows reach their goals", *told]))
    return 0 if reached == len(known) else 1


def run(claims: Sequence[Claim], again: bool) -> int:
    """Measures what has no figures of this commit, or all of these rows `again`."""
    from benchmarks.machine import hardware

    with record.alone() as free:
        if not free:
            raise ValueError("another process measures these rows already")
        known = record.load()
        records = {claim.name: known.get(claim.name, Record()) for claim in CLAIMS}
        paths = code_of(CLAIMS)
        commit = commit_of(paths)
        wanted = {
            claim.run
            for claim in claims
            if again or not records[claim.name].holds(claim.run.command, commit)
        }
        todo = [claim for claim in claims if claim.run in wanted]
        if len(todo) < len(claims):
            print(f"{len(claims) - len(todo)} rows have figures of commit {commit}")
        try:
            measure(todo, records, paths, hardware(), partial(print, end="", flush=True))
        except KeyboardInterrupt:
            print("\nstopped; what was measured is kept, and the same command goes on from there")
            return INTERRUPTED
    return summary(claims, records)


def done(options: argparse.Namespace, claims: Sequence[Claim]) -> int:
    """Does what was asked for; the exit code. ValueError with one sentence where it cannot."""
    if options.plan:
        plan(claims)
        return 0
    if options.stale:
        lines = stale(claims, record.load())
        print("\n".join(lines), end="\n" * bool(lines))
        return 1 if lines else 0
    if options.render:
        from benchmarks import picture

        page.write(CLAIMS, record.load())
        picture.main()
        return 0
    return run(claims, again=bool(options.only))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[],
        help="measure this row again; may be given several times",
    )  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="only list runs and their seconds")
    parser.add_argument(
        "--stale", action="store_true",
        help="only list rows that were measured before the last change of what they depend on",
    )  # fmt: skip
    parser.add_argument(
        "--render", action="store_true", help="only make README's table and picture (make claims)"
    )
    options = parser.parse_args()
    try:
        return done(options, named(options.only))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
