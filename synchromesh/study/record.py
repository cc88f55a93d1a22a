"""A record: what the ranks of one contestant have said, and the run's results that follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Any

from synchromesh.results.run import (
    CommunicationShares,
    Epoch,
    Layouts,
    MemoryByKind,
    Quartiles,
    RunResult,
)
from synchromesh.runs.chrome import chrome_trace
from synchromesh.runs.shares import Shares, mean, shares
from synchromesh.runs.spans import Recording
from synchromesh.runs.timeline import timeline
from synchromesh.study.cell import StudyCell
from synchromesh.study.target import Target
from synchromesh.values import fields


@dataclass
class RunRecord:
    """What ranks said, by rank and kind of message, in order.

    processors   cores that each rank may use, for the utilisation of processors"""

    cell: StudyCell
    processors: Sequence[float]
    emulated: bool = False
    said: dict[tuple[int, str], list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, rank: int, message: dict[str, Any]) -> None:
        self.said.setdefault((rank, message["says"]), []).append(message)

    def of(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """The messages of a kind of one rank."""
        return self.said.get((rank, kind), [])

    def settled(self) -> bool:
        """Whether no rank tries any more what is quicker."""
        last = [self.of("turn", rank)[-1:] for rank in range(self.cell.devices)]
        return all(turn and turn[0]["settled"] for turn in last)

    def step_seconds(self) -> float | None:
        """The quickest of the last turn, which held no switch, on the slowest rank."""
        last = [self.of("turn", rank)[-1:] for rank in range(self.cell.devices)]
        times = [[s for s, _, _ in turn[0]["steps"]] for turn in last if turn]
        return max((min(of_rank) for of_rank in times if of_rank), default=None)

    def steps(self, mode: str) -> int:
        """How many steps it has had in turns of a mode."""
        return sum(len(turn["steps"]) for turn in self.of("turn") if turn["mode"] == mode)

    def spent(self) -> tuple[float, int]:
        """Seconds of rank 0's turns so far, with what validation they held; and their steps."""
        said = self.of("turn")
        return sum(turn["wall"] for turn in said), sum(len(turn["steps"]) for turn in said)

    def failed(self, why: str) -> RunResult:
        """A run that did not end well."""
        c = self.cell
        return RunResult(
            c.workload, c.strategy, c.devices, c.batch, c.seed, "failed", reason=why,
            emulated=self.emulated,
        )  # fmt: skip

    def result(
        self, targets: Sequence[Target], steps_of_epoch: int | None, asked_steps: int | None = None
    ) -> RunResult:
        """What was measured. steps_of_epoch: None where it is not known. asked_steps: of a study
        by steps, whose seconds are those of so many, however many were timed. ValueError where the
        loss or a metric is no finite number."""
        c = self.cell
        steps, samples, waiting, wall = self._timed()
        predicted, ended = self.of("predicted")[-1:], self.of("ended")[0]
        _require_finite(self.of("epoch"))
        epochs = [fields.of_plain(Epoch, _bare(m), "epoch") for m in self.of("epoch")]
        lengths = [b - a for a, b in pairwise([0.0, *(e.seconds for e in epochs)])]
        reached = [target.reached(epochs) for target in targets]
        each, step = Quartiles.of(lengths), Quartiles.of(steps)
        by_step = step.median * steps_of_epoch if step and steps_of_epoch else None
        by_asked = step.median * asked_steps if step and asked_steps else None
        return RunResult(
            c.workload, c.strategy, c.devices, c.batch, c.seed, "done", plan=ended["plan"],
            reason="" if steps else self._untimed(), step_seconds=step, timed_steps=len(steps),
            samples_per_second=samples / wall if wall else None,
            data_waiting_share=waiting / wall if wall else None,
            seconds_per_epoch=each.median if each else by_step,
            epoch_seconds=each, metrics=tuple(epochs),
            to_target=reached[0] if reached else None, further_targets=tuple(reached[1:]),
            predicted_step_seconds=predicted[0]["seconds"] if predicted else None,
            predicted_peak_bytes=predicted[0]["bytes"] if predicted else None,
            seconds=epochs[-1].seconds if epochs else by_asked,
            layouts=tuple(
                fields.of_plain(Layouts, _bare(m), "layouts") for m in self.of("layouts")
            ),
            emulated=self.emulated, **self._utilisation(wall), **self._observed(),
        )  # fmt: skip

    def _untimed(self) -> str:
        """Why no step was timed."""
        count = sum(len(turn["steps"]) for turn in self.of("turn"))
        return (
            f"no step of full size was timed: the run had {count} in all, of which the first ones "
            "and those that are watched are not; train for more epochs"
        )

    def _turns(self, mode: str) -> list[list[dict[str, Any]]]:
        ranks = range(self.cell.devices)
        return [[t for t in self.of("turn", rank) if t["mode"] == mode] for rank in ranks]

    def _timed(self) -> tuple[list[float], int, float, float]:
        """Seconds of the timed steps of full size, samples, seconds of waiting for data, seconds
        end to end. The first step of a turn is not timed.

        A step begins when the last rank has its data: ranks that have theirs before wait for it
        inside their step.

            step = max over ranks (waited + seconds) - max over ranks (waited)"""
        steps: list[float] = []
        samples, waiting, wall = 0, 0.0, 0.0
        for turns in zip(*self._turns("timed"), strict=True):
            taken = list(zip(*(turn["steps"][1:] for turn in turns), strict=True))
            for of_ranks in taken:
                rows = of_ranks[0][2]
                samples += rows
                waited = max(waited for _, waited, _ in of_ranks)
                whole = max(seconds + waited for seconds, waited, _ in of_ranks)
                if rows == self.cell.batch:
                    steps.append(whole - waited)
                waiting += waited
                wall += whole
        return steps, samples, waiting, wall

    def _utilisation(self, wall: float) -> dict[str, Any]:
        """Processor time over wall time and cores of a rank; of GPUs what NVML says."""
        shares_of_ranks = []
        for rank, turns in enumerate(self._turns("timed")):
            told = [(t["used"], t["wall"]) for t in turns if t["used"] is not None]
            took = sum(seconds for _, seconds in told)
            if took:
                used = sum(share * seconds for share, seconds in told) / took
                shares_of_ranks.append(used if self.cuda else used / self.processors[rank])
        if not shares_of_ranks or not wall:
            return {}
        of = "NVML: time with a kernel running" if self.cuda else "processor time"
        return {"utilisation": fmean(shares_of_ranks), "utilisation_of": of}

    @property
    def cuda(self) -> bool:
        return any(m.get("device") == "cuda" for m in self.of("prepared"))

    def _observed(self) -> dict[str, Any]:
        """Memory, traffic, and the shares of the recorded steps."""
        found: dict[str, Any] = {}
        memory = [t[-1]["seen"] for t in self._turns("memory") if t]
        if memory and all("memory" in seen for seen in memory):
            found["peak_memory_bytes"] = tuple(
                fields.of_plain(MemoryByKind, seen["memory"], "memory") for seen in memory
            )
        recordings, whole = self.recordings(), self.shares()
        if whole is not None:
            found["communication_share"] = CommunicationShares(whole.exposed, whole.hidden)
            found["computation_share"] = whole.computation
            found["waiting_share"] = whole.waiting
            if self.cell.seed == 0:  # one picture of each strategy is enough
                found["timeline"] = timeline(recordings)
        sent = [t[-1]["seen"].get("sent") for t in self._turns("recorded") if t]
        if sent and all(n is not None for n in sent):
            found["sent_bytes_per_step"] = tuple(int(n) for n in sent if n is not None)
        return found

    def shares(self) -> Shares | None:
        """Of the recorded steps, the mean over the ranks; None where they were not recorded."""
        found = self.recordings()
        return mean(shares(found)) if found else None

    def recordings(self) -> list[Recording]:
        """What every rank recorded, if all did."""
        turns = [t[-1]["seen"].get("recording") for t in self._turns("recorded") if t]
        if len(turns) < self.cell.devices or None in turns:
            return []
        return [Recording.from_dict(found) for found in turns]

    def trace(self) -> dict[str, Any] | None:
        """The Chrome trace of the recorded steps, if there are any."""
        found = self.recordings()
        return chrome_trace(found) if found else None


def _require_finite(epochs: Sequence[Mapping[str, Any]]) -> None:
    for said in epochs:
        loss, epoch = said["loss"], said["epoch"]
        if loss is not None and not isfinite(loss):
            raise ValueError(
                f"training diverged: loss is {loss} after epoch {epoch}: a smaller learning rate "
                "may help"
            )
        for name, value in said["values"].items():
            if not isfinite(value):
                finite = "" if loss is None else f", though the epoch's mean loss is {loss:.4g}"
                raise ValueError(
                    f"the workload's metric gave {name}={value} after epoch {epoch}{finite}: see "
                    "whether it divides by 0, or training diverged in the last steps"
                )


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "says"}
