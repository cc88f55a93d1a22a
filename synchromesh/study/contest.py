"""A contest: the contestants of a study in turns, and their results. Goes on where it stopped."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from synchromesh.launcher.scratch import scratch
from synchromesh.results.run import RunResult
from synchromesh.runs.events import RunEnded, RunEvent
from synchromesh.study import strategy, turns
from synchromesh.study.cell import CellJob, StudyCell
from synchromesh.study.channel import Listener
from synchromesh.study.folder import StudyFolder
from synchromesh.study.processes import RankProcesses, Start, reason
from synchromesh.study.record import RunRecord
from synchromesh.study.target import Target
from synchromesh.study.turns import Turn


@dataclass(frozen=True)
class Progress:
    """How far a study is, for whoever watches.

    left   seconds until the group's end, by the steps so far; None: not known (yet)
    stays  whether it is news that should stay: a run has ended, another one is prepared"""

    doing: str
    done: int  # runs that have ended
    runs: int
    left: float | None = None
    stays: bool = False


@dataclass(frozen=True)
class Trained:
    """A workload: its TARGET, the folder of its data, samples of an epoch where that is known."""

    target: str
    data: str | None = None
    samples: int | None = None
    carries: bool = False  # a state from batch to batch, which needs full ones

    def steps_of_epoch(self, cell: StudyCell) -> int | None:
        """None where it is not known."""
        if self.samples is None:
            return None
        full, rest = divmod(self.samples, cell.batch)
        dropped = self.carries or cell.strategy == strategy.TORCH_PIPELINE
        return full + (rest > 0 and not dropped)


@dataclass(frozen=True)
class Common:
    """What the runs of a study share.

    epochs, steps   one of them
    at_most         seconds of timed steps of a run, where steps are asked for
    processors      cores that rank r of a contestant on N devices may use
    allow           what `auto` may choose that one device would not compute"""

    workloads: Mapping[str, Trained]
    start: Start
    targets: tuple[Target, ...] = ()
    bf16: bool = False
    epochs: int | None = None
    steps: int | None = None
    at_most: float | None = None
    emulated: bool = False
    processors: Callable[[int, int], float] = lambda rank, ranks: 1.0
    allow: str = ""


@dataclass
class _Contestant:
    cell: StudyCell
    processes: RankProcesses
    log: Path
    record: RunRecord
    listener: Listener
    waiting: set[int] = field(default_factory=set)  # ranks that wait for their turn
    silent: bool = False

    @property
    def ended(self) -> bool:
        return all(self.record.of(RunEnded, rank) for rank in range(self.cell.devices))

    def hear(self, seconds: float) -> bool:
        """Whether a rank has said something, waited for at most so long."""
        messages = self.listener.messages(self.cell.key, seconds)
        for rank, message in messages:
            if isinstance(message, RunEvent):
                self.record.add(rank, message)
            else:
                self.waiting.add(rank)
        return bool(messages)


class Contest:
    """Runs the cells of a study in groups. progress: is called before each turn."""

    POLL_SECONDS = 0.5  # between looks at processes that say nothing
    SILENT_SECONDS = 1800.0  # after which a contestant that says nothing is taken to hang; chosen

    def __init__(
        self, common: Common, folder: StudyFolder, progress: Callable[[Progress], None]
    ) -> None:
        self.common, self.folder, self._progress = common, folder, progress
        self._done = self._runs = 0

    def run(self, groups: Sequence[Sequence[StudyCell]]) -> list[RunResult]:
        """The results of every cell, in order; those that have ended before are not run again."""
        cells = [cell for group in groups for cell in group]
        self._runs = len(cells)
        self._done = sum(self.folder.ended(cell) is not None for cell in cells)
        for group in groups:
            self._group([cell for cell in group if self.folder.ended(cell) is None])
        return [result for result in map(self.folder.ended, cells) if result is not None]

    def _group(self, cells: Sequence[StudyCell]) -> None:
        if not cells:
            return
        running: list[_Contestant] = []
        with scratch() as folder:
            try:
                with closing(Listener(folder)) as listener:
                    for cell in cells:
                        self._say(f"preparing {cell}", stays=True)
                        if (contestant := self._begin(cell, listener)) is not None:
                            running.append(contestant)
                    self._turns(running)
            finally:
                for contestant in running:
                    contestant.processes.end()

    def _begin(self, cell: StudyCell, listener: Listener) -> _Contestant | None:
        """The contestant, ready for its first turn; None where it has failed."""
        common, trained = self.common, self.common.workloads[cell.workload]
        record = RunRecord(
            cell, [common.processors(rank, cell.devices) for rank in range(cell.devices)],
            common.emulated,
        )  # fmt: skip
        folder = self.folder.begin(cell)
        try:
            ours = cell.strategy not in strategy.RIVALS
            plans = strategy.plans(cell.strategy, cell.devices, cell.batch) if ours else []
        except ValueError as error:
            self._keep(cell, record.failed(str(error)))
            return None
        job = CellJob(
            cell, trained.target, listener.path, tuple(plans), trained.data, common.epochs,
            common.bf16, common.allow,
        )  # fmt: skip
        job.write(folder / "job.json")
        log = folder / "log.txt"
        processes = common.start(cell.devices, (folder / "job.json").absolute(), log)
        contestant = _Contestant(cell, processes, log, record, listener)
        return contestant if self._goes_on(contestant) else None

    def _turns(self, running: list[_Contestant]) -> None:
        """Turns of all: until none warms up any more, then until all have ended."""
        rounds = 0
        for turns_of, ends in ((turns.warm_up, False), (self._after_warm_up, True)):
            schedules = {contestant.cell: turns_of(contestant.record) for contestant in running}
            while schedules:
                for contestant in turns.there_and_back(list(running), rounds):
                    if contestant.cell not in schedules:
                        continue
                    turn = next(schedules[contestant.cell], None)
                    if turn is None:
                        del schedules[contestant.cell]
                    if (turn or ends) and not self._turn(contestant, turn, self._left(running)):
                        schedules.pop(contestant.cell, None)
                        running.remove(contestant)
                rounds += 1

    def _after_warm_up(self, record: RunRecord) -> Iterator[Turn]:
        common = self.common
        if common.steps is None:
            return turns.by_epochs(record)
        return turns.by_steps(record, common.steps, common.at_most)

    def _turn(self, contestant: _Contestant, turn: Turn | None, left: float | None) -> bool:
        """One turn, or the end; whether it goes on. left: seconds until the group's end."""
        doing = "ending" if turn is None else f"{turn.steps} steps of"
        self._say(f"{doing} {contestant.cell}", left)
        contestant.waiting.clear()
        contestant.listener.resume(contestant.cell.key)
        contestant.listener.grant(contestant.cell.key, turn)
        return self._goes_on(contestant)

    def _left(self, running: Sequence[_Contestant]) -> float | None:
        """Seconds until the group's end: of each the steps to come, at what its others took."""
        seconds = 0.0
        for contestant in running:
            spent, done = contestant.record.spent()
            total = self._steps(contestant)
            if total is None or not done:
                return None
            seconds += spent / done * max(0, total - done)
        return seconds

    def _steps(self, contestant: _Contestant) -> int | None:
        """How many steps its run has, timed or not; None where it is not known."""
        cell, common, record = contestant.cell, self.common, contestant.record
        if common.steps is not None:
            timed = turns.timed_steps(common.steps, common.at_most, record.step_seconds())
            warm_up = record.steps("warm-up") or turns.TUNING.warm_up
            return warm_up + turns.count([*turns.timed(timed), *turns.observed()])
        each = common.workloads[cell.workload].steps_of_epoch(cell)
        return None if each is None or common.epochs is None else each * common.epochs

    def _goes_on(self, contestant: _Contestant) -> bool:
        """Once all its ranks wait, for which they are suspended. False: it has ended or failed."""
        heard = time.monotonic()
        while len(contestant.waiting) < contestant.cell.devices:
            # asked first, so that what it said last is read
            over = contestant.processes.code() is not None
            if contestant.hear(self.POLL_SECONDS):
                heard = time.monotonic()
                continue
            over = over or contestant.ended
            contestant.silent = not over and time.monotonic() - heard > self.SILENT_SECONDS
            if over or contestant.silent:
                self._end(contestant)
                return False
        if not contestant.record.cuda:  # what waits there is no burden, and NCCL has watchdogs
            contestant.listener.suspend(contestant.cell.key)
        return True

    def _end(self, contestant: _Contestant) -> None:
        cell, record = contestant.cell, contestant.record
        contestant.listener.resume(cell.key)
        contestant.processes.end()
        while contestant.hear(0.0):
            pass
        code = contestant.processes.code()
        if contestant.ended:
            steps = self.common.workloads[cell.workload].steps_of_epoch(cell)
            try:
                result = record.result(self.common.targets, steps, self.common.steps)
                return self._keep(cell, result, record)
            except ValueError as error:
                return self._keep(cell, record.failed(str(error)))
        why = f"it said nothing for {self.SILENT_SECONDS:.0f} s" if contestant.silent else ""
        self._keep(cell, record.failed(why or reason(code or 0, contestant.log)))

    def _keep(self, cell: StudyCell, result: RunResult, record: RunRecord | None = None) -> None:
        trace = None if record is None else record.trace()
        if record is not None:
            record.draw(self.folder.run(cell) / "tensorboard")
        if trace is not None:
            result = replace(result, trace=f"runs/{cell.key}/trace.json.gz")
        self.folder.keep(cell, result, trace)
        self._done += 1
        failed = f"failed: {result.reason}"
        self._say(f"{cell}: {failed if result.status == 'failed' else 'done'}", stays=True)

    def _say(self, doing: str, left: float | None = None, stays: bool = False) -> None:
        self._progress(Progress(doing, self._done, self._runs, left, stays))
