"""`synchromesh trace RUN`: the Chrome trace of a run's recorded steps."""

import argparse
import gzip
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

from synchromesh.cli import options
from synchromesh.cli.command import answer, command, option
from synchromesh.runs.run_folder import RunFolder


def main(args: argparse.Namespace) -> int:
    folder = RunFolder(Path(args.run))
    if not folder.path.is_dir():
        raise ValueError(f"{args.run}: there is no such folder; name a run's folder")
    if not folder.trace.is_file():
        raise ValueError(f"{args.run} has no trace: {_missing(folder.path)}")
    document = _read(folder.trace)
    path = folder.trace if args.output is None else _written(folder.trace, Path(args.output))
    notes = document["otherData"]
    shown = {"trace": str(path), "events": len(document["traceEvents"]), **notes}
    text = (
        f"{path}: {_steps(document)}, {shown['events']:,} events "
        f"({notes['computations_left_out']:,} operators below {notes['shorter_than_us']:g} µs "
        "left out); open it in ui.perfetto.dev"
    )
    answer(args, shown, text)
    return 0


COMMAND = command(
    "trace", main, "the Chrome trace of a run's recorded steps",
    "Writes what all ranks did in the recorded steps of a training run, as a Chrome trace: open "
    "it in ui.perfetto.dev or chrome://tracing. `train --trace-steps A-B` says which steps are "
    "recorded.",
    option("run", metavar="RUN", help="the run's folder, of `train` or below a study's runs/"),
    option("-o", "--output", metavar="FILE",
           help="a .json or .json.gz file; default: the trace stays in the run's folder, and "
           "its name is shown"),
    options.JSON,
)  # fmt: skip


def _missing(path: Path, named: int = 6) -> str:
    """Why a folder has no trace, and the remedy. named: runs of a study, at most."""
    if (path / "study.json").is_file():
        traces = sorted(str(trace.parent) for trace in path.glob("runs/*/trace.json.gz"))
        if not traces:
            return "it is a study's folder, and none of its runs has recorded steps yet"
        more = f" and {len(traces) - named} more" if len(traces) > named else ""
        return f"it is a study's folder; name one of its runs: {', '.join(traces[:named])}{more}"
    if (path.absolute().parent.parent / "study.json").is_file():
        return "this run of a study failed, or has not ended yet; name one that is done"
    return (
        "its run recorded no step; train with --trace-steps A-B, steps that the run comes to (one "
        "is recorded where it has 20 or more)"
    )


def _steps(document: dict[str, Any]) -> str:
    """Which steps it has; of a study's run their numbers are not known."""
    notes = document["otherData"]
    if "steps" not in notes:
        count = len({e["name"] for e in document["traceEvents"] if e.get("cat") == "step"})
        return f"{count} recorded step{'' if count == 1 else 's'} of a study's run"
    first, last = notes["steps"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{steps} under plan {notes['plan']}"


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        len(document["traceEvents"])
        for name in ("computations_left_out", "shorter_than_us"):
            document["otherData"][name]
        _steps(document)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no trace of a run ({error}): record one anew with train --trace-steps"
        ) from error
    return document


def _written(trace: Path, target: Path) -> Path:
    """A copy, compressed or not as its name says. ValueError where it cannot be written."""
    try:
        if target.suffix == ".gz":
            shutil.copyfile(trace, target)
        else:
            target.write_bytes(gzip.decompress(trace.read_bytes()))
    except OSError as error:
        raise ValueError(
            f"--output {target} cannot be written ({error.strerror}): name another file"
        ) from error
    return target
