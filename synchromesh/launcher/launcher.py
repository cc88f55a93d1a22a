"""The launcher: local ranks of one command under torchrun's elastic agent, and how they ended.

The first rank that fails ends the run: the others get SIGTERM and, three seconds later, SIGKILL. A
signal to the launcher goes to every rank, which may take `grace` seconds to checkpoint; a second
signal kills them at once. A rank dies with its launcher (rank.py). Nothing is restarted."""

import json
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, Signals, getsignal
from signal import signal as handle
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous

from synchromesh.launcher.forks import Fork
from synchromesh.launcher.rank import LAUNCHER, SHORTAGE, reported_shortage
from synchromesh.launcher.scratch import scratch
from synchromesh.values.fault import Fault

RANK = (sys.executable, "-u", "-m", "synchromesh.launcher.rank")  # a new rank's process


@dataclass(frozen=True)
class LaunchTuning:
    """Seconds; chosen, not measured."""

    end: int = 3  # for ranks that outlive a failed one
    poll: float = 0.1
    start: int = 60  # for the agent's own rendezvous


TUNING = LaunchTuning()


@dataclass(frozen=True)
class Failure:
    """The rank that failed first and what it left: a fault, a signal or an exit code."""

    rank: int
    ranks: int
    exit_code: int
    fault: Fault | None
    ended: tuple[int, ...] = ()  # ranks that had ended before, without an error
    shortage: str = ""  # a clause about the memory that the plan lacks, if one was left

    @property
    def code(self) -> int:
        """Exit code, as a shell has it."""
        if self.fault is not None:
            return self.fault.code
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code

    def __str__(self) -> str:
        """Its traceback first, then what became of the run; bad input is one sentence alone."""
        if self.fault is not None and not self.fault.traceback:
            return str(self.fault)
        if self.fault is not None:
            why = self.fault.sentence.partition("\n")[0]
        elif self.exit_code < 0:
            why = f"killed by {Signals(-self.exit_code).name}"
            if self.shortage and self.exit_code == -SIGKILL:
                why += f"; {self.shortage}"
        else:
            why = f"exit code {self.exit_code}"
        if self.ended:
            why += f"; ranks {list(self.ended)} had ended before, without an error"
        ended = f"synchromesh: rank {self.rank} of {self.ranks} failed ({why}); the run ended"
        return f"{self.fault}\n{ended}" if self.fault is not None else ended


@dataclass(frozen=True)
class Ending:
    """How the ranks ended; `signal` is the one that stopped the launcher or a rank, if any."""

    failure: Failure | None = None
    signal: Signals | None = None

    @property
    def code(self) -> int:
        """Exit code, as a shell has it: 128 + N for signal N."""
        if self.failure is not None:
            return self.failure.code
        return 128 + self.signal if self.signal else 0


def launch(
    command: Sequence[str], ranks: int, grace: int = 300, forks: Sequence[Fork] = ()
) -> Ending:
    """Runs `command` (a script, or -m and a module) on `ranks` processes: `forks`, if any."""
    if ranks < 1:
        raise ValueError(f"at least one process is needed: --nproc {ranks}")
    before = {s: getsignal(s) for s in (SIGTERM, SIGINT, SIGHUP, SIGQUIT)}
    with scratch() as folder, environment(ranks, folder), quiet():
        agent = _agent(command, ranks, folder, grace, forks)
        stopped = None
        try:
            agent.run()
        except SignalException as error:
            stopped = error.sigval
        finally:
            agent.kill()
            with suppress(Exception):
                agent.spec.rdzv_handler.shutdown()
            for number, handler in before.items():
                handle(number, handler)
        return Ending(agent.first_failure(stopped is not None), stopped or stop_of_a_rank(folder))


def _agent(
    command: Sequence[str], ranks: int, folder: Path, grace: int, forks: Sequence[Fork]
) -> "_Agent":
    handler = rendezvous.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint="localhost:0", run_id=uuid.uuid4().hex, min_nodes=1,
            max_nodes=1, local_addr="127.0.0.1", timeout=TUNING.start,
        )
    )  # fmt: skip
    spec = WorkerSpec(
        role="rank", local_world_size=ranks, entrypoint=RANK[0], args=(*RANK[1:], *command),
        rdzv_handler=handler, max_restarts=0, monitor_interval=TUNING.poll, local_addr="127.0.0.1",
    )  # fmt: skip
    return _Agent(spec, DefaultLogsSpecs(log_dir=str(folder)), grace, folder, forks)


class _Agent(LocalElasticAgent):
    """torch's agent; it notes who died first and gives the others 3 s, behind a signal `grace`,
    where torch has a fixed 30 (2.11 takes no other)."""

    _pcontext: Any  # of the class that has `subprocess_handlers`

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, grace: int, folder: Path,
        forks: Sequence[Fork],
    ) -> None:  # fmt: skip
        super().__init__(spec, logs, exit_barrier_timeout=TUNING.start)
        self.spec, self.grace, self.folder, self.forks = spec, grace, folder, forks
        self.exit_codes: dict[int, int] = {}  # when the agent began to end the others
        self.second_signal = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with _ranks_of(self.forks):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        close = self._pcontext.close

        def note_and_close(death_sig: Any = None, timeout: int = 0) -> None:
            if not self.exit_codes:
                polled = {rank: h.proc.poll() for rank, h in self._handlers().items()}
                self.exit_codes = {r: code for r, code in polled.items() if code is not None}
            if self.second_signal:
                return self.kill()
            try:
                close(death_sig, TUNING.end if death_sig is None else self.grace)
            except SignalException:  # torch would now wait once more
                self.second_signal = True
                raise

        self._pcontext.close = note_and_close
        return pids

    def _handlers(self) -> dict[int, Any]:
        return self._pcontext.subprocess_handlers if self._pcontext is not None else {}

    def kill(self) -> None:
        for handler in self._handlers().values():
            if handler.proc.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, SIGKILL)
                handler.proc.wait()

    def first_failure(self, stopped: bool) -> Failure | None:
        """The rank that failed first (`failure_of`)."""
        return failure_of(self.folder, self.exit_codes, self.spec.local_world_size, stopped)


def _records(folder: Path) -> dict[int, dict[str, Any]]:
    files = folder.rglob("error.json")
    records = [json.loads(file.read_text())["synchromesh"] for file in files]
    return {int(left["rank"]): left for left in records}


def stop_of_a_rank(folder: Path) -> Signals | None:
    """The signal that some rank got itself and all ended for, if any."""
    stops = [left["stopped"] for left in _records(folder).values() if "stopped" in left]
    return Signals(min(stops)) if stops else None


def failure_of(
    folder: Path, exit_codes: Mapping[int, int], ranks: int, stopped: bool
) -> Failure | None:
    """The rank that died of a signal or left the first record (if stopped: records only).
    exit_codes: by rank, of those that had ended when the others were."""
    records = {r: left for r, left in _records(folder).items() if "stopped" not in left}

    def order(rank: int) -> tuple[bool, bool, bool, float]:
        code = exit_codes.get(rank, 0)
        left = records.get(rank, {})
        killed = code < 0 and code != -SIGABRT  # gloo aborts when its peer is gone
        lost = code == -SIGABRT or left.get("lost", False)
        return not killed, lost, not left, left.get("when", 0.0)

    codes = {} if stopped else exit_codes
    candidates = {r for r, code in codes.items() if code != 0} or set(records)
    if not candidates:
        return None
    first = min(candidates, key=order)
    left = records.get(first)
    fault = None
    if left and left["sentence"]:
        fault = Fault(left["sentence"], left["traceback"], left["code"])
    ended = tuple(r for r, code in sorted(exit_codes.items()) if code == 0)
    shortage = reported_shortage(folder / "shortage")
    return Failure(first, ranks, exit_codes.get(first, 1), fault, ended, shortage)


def _ranks_of(forks: Sequence[Fork]) -> AbstractContextManager[object]:
    """Torch's agent starts a rank on each of `forks`, where there are any."""
    if not forks:
        return nullcontext()
    waiting = iter(forks)

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            fork = next(waiting)
            fork.begin(args[len(RANK) :], env)
            return fork

    return patch.object(multiprocessing, "get_subprocess_handler", Handler)


@contextmanager
def environment(ranks: int, folder: Path) -> Iterator[None]:
    """Inside, what ranks of either launcher have of it."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    wanted = {
        LAUNCHER: str(os.getpid()),
        SHORTAGE: str(folder / "shortage"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a shared store keeps stale gloo addresses
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    with patch.dict(os.environ, wanted):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without the agent's log lines: the launcher's caller says what happened, once."""
    known, prefix = list(logging.root.manager.loggerDict), "torch.distributed.elastic"
    loggers = [logging.getLogger(name) for name in known if name.startswith(prefix)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was
