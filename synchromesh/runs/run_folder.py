"""A run's folder: what was asked (run.json), the plan, the log, the checkpoints; docs/runs.md.

runs/digits-cnn-20260102-030405/
    run.json       workload, seed, batch size, bf16: what a resumed run takes over
    plan.yaml      the plan
    log.jsonl      one JSON object a line: step, epoch, checkpoint, resume, stop, end ...
    trace.json.gz  a Chrome trace of the recorded steps
    tensorboard/   the same as log.jsonl, as curves (`--tensorboard`)
    checkpoints/   epoch-N, step-N, best"""

import errno
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synchromesh.checkpoint.manifest import NAME, by_age
from synchromesh.values import document

if TYPE_CHECKING:
    from synchromesh.runs.events import RunEvent
    from synchromesh.training.learning_rate import RateFactor
    from synchromesh.values.batch_sizes import BatchRange, BatchSchedule, RankBatches
    from synchromesh.values.plan import Plan
    from synchromesh.workloads.workload import Workload

TAKEN_OVER = ("workload", "seed", "batch_size")
ASKED = (
    *TAKEN_OVER, "plan", "ranks", "bf16", "adapt", "lr_rule", "warm_up", "batches", "allow",
)  # fmt: skip


def default(name: str) -> Path:
    """`runs/NAME-TIME`; what a path part cannot hold becomes a dash."""
    part = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    return Path("runs") / f"{part}-{time.strftime('%Y%m%d-%H%M%S')}"


def finite(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have (NaN, infinity), also inside it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes what `make` made and a run that was refused has not filled, innermost first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, which may not be there yet."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json.gz"

    def holds_run(self) -> bool:
        return (self.path / "run.json").exists() or any(self.checkpoints.glob("*"))

    def make(self) -> list[Path]:
        """Makes the folder and proves that it can be written to, before any work is done.

        Returns the folders that were not there before, the innermost first."""
        missing = [p for p in (self.checkpoints, *self.checkpoints.parents) if not p.exists()]
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.checkpoints) as file:
                file.write(b"0")
        except OSError as error:
            raise ValueError(
                f"the output folder {self.path} cannot be written to ({error.strerror}): "
                "name another with --output DIR"
            ) from error
        return missing

    def write(self, asked: dict[str, Any], plan_yaml: str) -> None:
        """Writes what was asked and the plan in force, from which a resumed run goes on."""
        document.write(self.path / "run.json", json.dumps(asked, indent=1) + "\n")
        document.write(self.path / "plan.yaml", plan_yaml)

    def log(self, event: "RunEvent") -> None:
        """Appends a line in one write: of a killed run only the last may be incomplete. OSError
        where there is no room for all of it, and then nothing is written."""
        entry = {"event": event.name, "time": round(time.time(), 3), **finite(event.to_dict())}
        line = f"{json.dumps(entry, allow_nan=False)}\n".encode()
        with open(self.path / "log.jsonl", "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise

    def asked(self) -> dict[str, Any]:
        """What run.json says; nothing where there is none."""
        path = self.path / "run.json"
        if not path.is_file():
            return {}
        value = document.mapping(document.read(path), str(path), ASKED, TAKEN_OVER)
        return {
            "workload": document.text(value["workload"], f"{path}: workload"),
            "seed": document.integer(value["seed"], f"{path}: seed", 0, 2**63),
            "batch_size": document.integer(value["batch_size"], f"{path}: batch_size", 1),
            "plan": document.text(value.get("plan", "auto"), f"{path}: plan"),
            "ranks": document.integer(value.get("ranks", 0), f"{path}: ranks"),
            "bf16": document.boolean(value.get("bf16", False), f"{path}: bf16"),
            "adapt": document.boolean(value.get("adapt", False), f"{path}: adapt"),
            "lr_rule": document.text(value.get("lr_rule", "none"), f"{path}: lr_rule"),
            "warm_up": document.number(value.get("warm_up", 0.0), f"{path}: warm_up", 0.0),
            "batches": document.text(value.get("batches", ""), f"{path}: batches"),
            "allow": document.text(value.get("allow", ""), f"{path}: allow"),
        }

    def saved(self) -> list[Path]:
        """Checkpoints, newest first; `best`, which repeats one of them, last."""
        named = re.compile(r"(epoch|step)-\d+|best")
        saved = [p for p in by_age(self.checkpoints) if named.fullmatch(p.name)]
        return sorted(saved, key=lambda p: p.name == "best")


@dataclass(frozen=True)
class Resumed:
    """What --resume names: a checkpoint, and the run folder around it if there is one."""

    checkpoint: Path
    folder: RunFolder | None

    @classmethod
    def of(cls, name: str) -> "Resumed":
        """Of a run's folder its newest checkpoint. ValueError where there is none."""
        path = Path(name)
        if not path.is_dir():
            raise ValueError(
                f"--resume {name}: there is no such folder; name a run's folder or a checkpoint"
            )
        folder = RunFolder(path)
        if folder.checkpoints.is_dir():
            if not (saved := folder.saved()):
                raise ValueError(f"--resume {name}: the run has no checkpoint yet")
            return cls(saved[0], folder)
        if not (path / NAME).exists() and not by_age(path):
            raise ValueError(
                f"--resume {name}: no checkpoint lies in it; name a run's folder or a checkpoint"
            )
        folder = RunFolder(Path(os.path.abspath(path)).parent.parent)
        if path.resolve().parent.name != "checkpoints" or not folder.asked():
            return cls(path, None)
        return cls(path, folder)


@dataclass(frozen=True)
class Job:
    """What `train` was asked to do."""

    workload: "Workload"
    plan: "Plan"
    seed: int
    folder: RunFolder
    epochs: int
    steps: int | None  # instead of epochs
    every: int | None  # steps between checkpoints, besides one an epoch
    resumed: Resumed | None
    bf16: bool
    adapt: bool  # whether the plan may change while training runs
    trace_steps: tuple[int, int] | None = None  # that are recorded; None: one, after warm-up
    tensorboard: bool = False
    headroom: str | None = None  # of a device's memory
    allow: str = ""  # as of `fit`
    replicate: str = "auto"  # the same, as the next two
    skip_non_finite: int | None = None
    check_replicas: int | None = None
    roll_back_spikes: bool = False  # the same
    keep: int | None = None  # as the next two, of `fit`
    best: str | None = None
    noise_scale: bool = False  # whether it is measured
    rate: "RateFactor | None" = None  # of learning rates; None: the workload's own
    batches: "BatchRange | BatchSchedule | RankBatches | None" = None  # that change while training
    patience: int | None = None
    command: tuple[str, ...] = ()  # the words of the command line
