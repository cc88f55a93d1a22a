"""A study's folder: what was asked, the runs that have ended, and the results of all.

study.json            what was asked; a study goes on where that is the same
runs/KEY/job.json     what the ranks of a contestant were told, and log.txt, what they said
runs/KEY/run.json     its results, once it has ended: done, or failed with a reason
runs/KEY/trace.json.gz  the Chrome trace of its recorded steps
results.json, results.csv, report.html"""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synchromesh.results.run import RunResult
from synchromesh.runs.timeline import write_chrome_trace
from synchromesh.study.cell import StudyCell
from synchromesh.values import document, fields


@dataclass(frozen=True)
class StudyFolder:
    """The folder, which may not be there yet."""

    path: Path

    def open(self, asked: dict[str, Any]) -> None:
        """Makes the folder, or goes on in it. ValueError where another study lies there."""
        known = self.path / "study.json"
        if known.exists():
            before, now = self._asked_before(known), json.loads(json.dumps(asked))
            if before != now:
                changed = [k for k in {**before, **now} if before.get(k) != now.get(k)]
                raise ValueError(
                    f"{self.path} holds another study, which differs in {', '.join(changed)}: "
                    "name another folder with --output, or remove this one"
                )
            return
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ValueError(
                f"{self.path} is no folder of a study and not empty: name another with --output"
            )
        try:
            (self.path / "runs").mkdir(parents=True, exist_ok=True)
            document.write(known, json.dumps(asked, indent=2))
        except OSError as error:
            raise ValueError(
                f"the study's folder {self.path} cannot be made ({error.strerror}): name another "
                "with --output"
            ) from error

    def _asked_before(self, known: Path) -> dict[str, Any]:
        try:
            before = document.read(known)
            if not isinstance(before, dict):
                raise ValueError(f"{known}: should be a mapping, not {document.kind(before)}")
        except ValueError as error:
            raise ValueError(
                f"{error}; what this study was asked is lost with it, so it cannot go on: name "
                f"another folder with --output, and the runs that have ended stay in {self.path}"
            ) from None
        return before

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile no other process has this study; it has been opened. ValueError where one has.
        The lock ends with this process, however that ends."""
        with (self.path / "study.json").open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another `compare` is running the study in {self.path}: wait for it, or name "
                    "another folder with --output"
                ) from None
            yield

    def run(self, cell: StudyCell) -> Path:
        return self.path / "runs" / cell.key

    def begin(self, cell: StudyCell) -> Path:
        """A fresh folder of a run that has not ended."""
        shutil.rmtree(self.run(cell), ignore_errors=True)
        self.run(cell).mkdir(parents=True)
        return self.run(cell)

    def ended(self, cell: StudyCell) -> RunResult | None:
        """The results of a run that has ended; None of others. ValueError for a damaged file."""
        path = self.run(cell) / "run.json"
        if not path.exists():
            return None
        try:
            return fields.of_plain(RunResult, document.read(path), str(path))
        except ValueError as error:
            raise ValueError(f"{error}; remove {path.parent} and the run is made anew") from None

    def keep(self, cell: StudyCell, result: RunResult, trace: dict[str, Any] | None) -> None:
        """Writes what came of a run; its results last, and entirely or not at all."""
        if trace is not None:
            write_chrome_trace(self.run(cell) / "trace.json.gz", trace)
        document.write(self.run(cell) / "run.json", json.dumps(fields.to_plain(result), indent=1))
