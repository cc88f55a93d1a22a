"""TARGETs: the text that names a workload, a bundled one or a function of the user's own file."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from synchromesh.values.fault import message, near
from synchromesh.workloads import BUNDLED
from synchromesh.workloads.workload import Workload, is_stream

# of training sets, for which seeded rows of another number stand in
PUBLISHED = {"digits": 1437, "mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
PUBLISHED |= {"multi30k": 29_000}  # SST-2 is published with 6,920 and with 67,349


def load(target: str, data: str | Path | None = None, synthetic: bool = False) -> Workload:
    """A bundled workload, or `path/to/file.py:function`. `data` is the folder of a bundled one's
    data; with `synthetic` it makes seeded rows instead."""
    path, colon, function = target.rpartition(":")
    if colon and (path.endswith(".py") or "/" in path):
        if data is not None:
            raise ValueError(
                f"--data names the folder of a bundled workload's data; {target} chooses its own "
                "data: leave --data out"
            )
        return _named(_call(path, function), function)
    if target.endswith(".py"):
        raise ValueError(f"{target} names a file but no function in it: write {target}:FUNCTION")
    if target not in BUNDLED:
        raise ValueError(
            f"there is no bundled workload {target!r}{near(target, BUNDLED, brackets=True)}; "
            f"bundled are {', '.join(BUNDLED)}; your own is path/to/file.py:function"
        )
    return _named(BUNDLED[target](None if data is None else Path(data), synthetic), target)


def rows_of_an_epoch(workload: Workload, target: str, synthetic: bool) -> int | None:
    """Of the data, where seeded rows stand in of the published one; None: nobody knows."""
    data = workload.train_data
    if target in BUNDLED and synthetic:
        return PUBLISHED.get(target.partition("/")[0])
    return len(data) if isinstance(data, Sized) and not is_stream(data) else None


def _named(workload: Workload, name: str) -> Workload:
    return workload if workload.name else replace(workload, name=name)


def _call(path: str, function: str) -> Workload:
    build = _function(path, function)
    try:
        workload = build()
    except (Exception, SystemExit) as error:
        raise ValueError(_blame(Path(path), error, f"{path}:{function} failed")) from error
    if not isinstance(workload, Workload):
        raise ValueError(
            f"{path}:{function} returned {type(workload).__name__}, not a synchromesh.Workload"
        )
    return workload


def _function(path: str, function: str) -> Callable[[], object]:
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{path} is a folder: a TARGET is path/to/file.py:function")
    if not file.is_file():
        beside = [p.name for p in file.parent.glob("*.py") if p.is_file()]
        raise ValueError(f"there is no file {path}{near(file.name, beside, brackets=True)}")
    module = _module(file)
    build: Callable[[], object] | None = getattr(module, function, None)
    if build is None or not callable(build):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(
            f"{path} has no function {function!r}{near(function, functions, brackets=True)}"
        )
    return build


def _module(file: Path) -> ModuleType:
    """The user's file as a module; its folder and the current one are importable."""
    name = f"synchromesh_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    for folder in (str(Path.cwd()), str(file.resolve().parent)):  # as a script has it
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(_blame(file, error, f"{file} could not be imported")) from error
    return module


def _blame(file: Path, error: Exception | SystemExit, what: str) -> str:
    """One sentence with the last line of the user's own file that took part in `error`."""
    reason = f"{type(error).__name__}: {message(error)}"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{what}: line {error.lineno}: {reason}"
    frames: Sequence[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename) == file.resolve()]
    if not own:
        return f"{what}: {reason}"
    return f"{what}: line {own[-1].lineno} ({own[-1].line}): {reason}"
