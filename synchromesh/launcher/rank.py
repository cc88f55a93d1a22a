"""One rank's process: it dies with its launcher, leaves a record of its error, and ends cleanly.

    python -m synchromesh.launcher.rank [-m MODULE | SCRIPT] [ARGUMENTS]

`launch` starts it so, or as a fork (launcher/forks.py), in torchrun's environment.

A process that the kernel kills cannot say why. So a rank whose plan is predicted not to fit leaves
that shortage in the file that `SYNCHROMESH_SHORTAGE` names, and whoever has started the ranks says
it together with the kill."""

import atexit
import ctypes
import json
import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from synchromesh.launcher.generation import SOCKET
from synchromesh.values.fault import Fault, Stopped

LAUNCHER = "SYNCHROMESH_LAUNCHER"  # process id of the launcher; set in its ranks only
OUTPUT = "SYNCHROMESH_OUTPUT"  # descriptor of the standard output that a rank does not write to
SHORTAGE = "SYNCHROMESH_SHORTAGE"  # for `report_shortage`; set by launchers


def launched() -> bool:
    """Whether this process is a rank of `launch`, which then reports its errors."""
    return LAUNCHER in os.environ


def open_closed_streams() -> None:
    """Opens standard streams that this process was started without (`>&-`) on the null device: no
    file or socket takes their place, and what is written to them is lost."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def main(arguments: list[str]) -> None:
    """Run the command that the arguments name as this rank, and end the process."""
    open_closed_streams()
    die_with(int(os.environ[LAUNCHER]))
    if os.environ["RANK"] != "0":
        fall_silent()
    try:
        _run(arguments)
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
        if code:
            _leave({"sentence": "", "traceback": "", "code": code})
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Stopped as error:  # no failure: the launcher would end the others
        _leave({"stopped": int(error.signal), "sentence": str(error), "traceback": ""})
        code = 0
    except BaseException as error:
        code = record(error)
    _end(code)


def fall_silent() -> None:
    """Only rank 0 writes to standard output; one that may become that keeps it."""
    if SOCKET in os.environ and OUTPUT not in os.environ:
        os.environ[OUTPUT] = str(os.dup(1))
    null = os.open(os.devnull, os.O_WRONLY)
    _write_to(null)
    os.close(null)


def speak() -> None:
    """This rank has become rank 0."""
    if OUTPUT in os.environ:
        _write_to(int(os.environ[OUTPUT]))


def _write_to(descriptor: int) -> None:
    sys.stdout.flush()  # what was written before goes where it was to go
    os.dup2(descriptor, 1)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def record(error: BaseException) -> int:
    """Leaves `error` for the launcher; returns the exit code."""
    fault = Fault.of(error)
    if not _leave(asdict(fault)):
        print(fault, file=sys.stderr)
    return fault.code


def _leave(entry: dict[str, Any]) -> bool:
    """Writes a record in the form of torch's own, with a finer clock; whether there is a place."""
    path, when = os.environ.get("TORCHELASTIC_ERROR_FILE"), time.time()
    if not path:
        return False
    sentence, trace = entry["sentence"], entry["traceback"]
    extra = {"py_callstack": trace or sentence, "timestamp": str(int(when))}
    left = {**entry, "when": when, "rank": int(os.environ["RANK"])}
    document = {"message": {"message": sentence, "extraInfo": extra}, "synchromesh": left}
    fresh = Path(f"{path}.new")  # the launcher may read while this is written
    fresh.write_text(json.dumps(document))
    os.replace(fresh, path)
    return True


def report_shortage(clause: str) -> None:
    """Leaves a clause for the launcher, in place of an earlier one; empty where all is well."""
    if path := os.environ.get(SHORTAGE):
        with suppress(OSError):  # the launcher is gone, or has left its folder
            Path(path).write_text(clause)


def reported_shortage(path: Path) -> str:
    """The clause that ranks have left, empty where they left none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def die_with(launcher: int) -> None:
    """Asks the kernel to kill this process when its launcher is gone, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:  # it died before the line above
        os._exit(1)


def _end(code: int) -> None:
    """Leaves without the interpreter's teardown, which at times aborts in gloo's threads.

    A rank that failed closes its sockets by dying, so that its neighbours notice at once."""
    if code == 0:
        atexit._run_exitfuncs()
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1  # a closed pipe: what was written is lost
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
