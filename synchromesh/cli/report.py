"""`synchromesh report`: the page of a study, or of ordinary training runs."""

import argparse
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synchromesh.cli import options
from synchromesh.cli.command import command, option
from synchromesh.report.numbers import counted
from synchromesh.results.derive import derive, merged
from synchromesh.results.run import TimelineSpan
from synchromesh.results.study import StudyResults
from synchromesh.values import document

RESULTS, STUDY, LOG, TRACE = "results.json", "study.json", "log.jsonl", "trace.json.gz"
BROKEN = (OSError, EOFError, zlib.error, RecursionError, ValueError, KeyError, TypeError)


def main(args: argparse.Namespace) -> int:
    output = args.output or (None if args.json else "report.html")
    if output and (refused := options.refusal(output, args.force, (".html", ".htm"))):
        raise ValueError(refused)
    named = {Path(run).resolve(): Path(run) for run in args.runs}  # each once
    results = merged([load(path) for path in named.values()])
    if output is not None:
        from synchromesh.report.page import page

        document.write(output, page(results))
    done = f"{output}: {counted(len(results.runs), 'run')}"
    print(results.to_json() if args.json else done, file=args.out)
    return 0


COMMAND = command(
    "report", main, "makes one HTML page of a study or of training runs",
    "Makes one self-contained HTML page: the answer, charts, the layout chosen for every "
    "component, a summary, how it was measured. Several RUNs come on one page: runs of one "
    "workload on one machine are compared, others shown one after the other.",
    option("runs", metavar="RUN", nargs="+",
           help="a study's folder or its results.json, or a run folder of `synchromesh train`"),
    option("-o", "--output", metavar="FILE",
           help="the page; default report.html, with --json none"),
    option("--force", action="store_true", help="overwrite the page that --output names"),
    options.JSON,
)  # fmt: skip


def load(path: Path) -> StudyResults:
    """The results of a study or a run. ValueError, with the remedy, where there are none."""
    if not path.exists():
        raise ValueError(
            f"{path}: there is no such folder or file; name a study's folder, its {RESULTS}, or a "
            "run folder of `synchromesh train`"
        )
    file = path / RESULTS if path.is_dir() else path
    if file.is_file() and file.name not in (LOG, STUDY):
        return derive(StudyResults.load(file))
    folder = path if path.is_dir() else path.parent
    if (folder / STUDY).is_file():
        raise ValueError(
            f"{path}: this study has not ended and holds no {RESULTS} yet: repeat the command "
            f"that began it (`synchromesh compare ... -o {folder}`), and it goes on"
        )
    if not (folder / LOG).is_file():
        raise ValueError(
            f"{path}: holds no {RESULTS} of a study and no {LOG} of a run: name a study's folder "
            "(of `synchromesh compare`) or a run folder (of `synchromesh train`)"
        )
    from synchromesh.runs.result import of_log

    events, trace = log_lines(folder / LOG), folder / TRACE
    drawn = (TRACE, _timeline(trace)) if trace.is_file() else (None, ())
    return derive(of_log(events, str(folder / LOG), *drawn))


def log_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; of a killed run the last may be incomplete."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            event = document.read_json(line, f"{path}, line {number}")
            if not isinstance(event, dict):
                raise ValueError(f"{path}, line {number}: should be a mapping")
        except ValueError:
            if number == len(lines) and events:
                break
            raise
        events.append(event)
    return events


def _timeline(path: Path, most: int = 200_000_000) -> tuple[TimelineSpan, ...]:
    """The last step of a trace's first `most` bytes, unpacked. ValueError: not `train`'s."""
    try:
        with gzip.open(path) as file:
            events = json.loads(file.read(most))["traceEvents"]
        return tuple(_last_step([event for event in events if event["ph"] == "X"]))
    except BROKEN as error:
        raise ValueError(
            f"{path}: is no trace that `synchromesh train` wrote ({type(error).__name__}): remove "
            "it, and the page is made without the timeline of a step"
        ) from None


def _last_step(events: list[dict[str, Any]]) -> Iterator[TimelineSpan]:
    steps = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["cat"] == "step"}
    origin = min(begin for begin, _ in steps.values())
    for event in events:
        if event["cat"] not in ("computation", "communication", "waiting"):
            continue
        start, stop = event["ts"], event["ts"] + event["dur"]
        begin, end = steps[event["pid"]]
        if start < end and stop > begin:
            times = (max(start, begin) - origin) / 1e6, (min(stop, end) - origin) / 1e6
            yield TimelineSpan(int(event["pid"]), *times, event["cat"], str(event["name"]))
