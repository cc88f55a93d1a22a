"""Readings: the Python values that a trace has read, and whether they are as they were.

    self.p, self.settings.slope    of the modules and of objects that they have, as code reads them
    WEIGHT, beta, args.smoothing   globals, closures and objects that the code of the loss names

A trace holds for these values alone, so they are looked at in every step.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from inspect import getattr_static
from operator import call, getitem
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from .model_snapshot import CONTAINERS, MAX_DEPTH, items_of

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device,
    FunctionType, BuiltinFunctionType,
)  # fmt: skip
MOST = 256  # items of a container that is compared in every step: chosen, not measured
NATIVE = {*vars(nn.Module()), *dir(nn.Module)}  # what every module has: tables, hooks, its mode
NAMESPACES = (ModuleType, type)
INNER = ("function", "func", "__func__", "__self__")  # of our functions, partial ones, methods
NOTHING = object()


@dataclass(frozen=True, eq=False)
class ReadValue:
    """A value that code found as an attribute."""

    owner: Any
    key: str
    name: str  # for users
    value: Any = NOTHING

    @property
    def place(self) -> tuple[int, str]:
        """Equal where the same was read."""
        table = getattr(self.owner, "__dict__", None)
        return id(table if isinstance(table, dict) else self.owner), self.key

    @property
    def ask(self) -> Callable[[], Any]:
        """Gives what is there: of a dict, in a third of the time that an attribute takes."""
        table = getattr(self.owner, "__dict__", {})
        if self.key in table:
            return partial(getitem, table, self.key)
        return partial(getattr, self.owner, self.key, NOTHING)

    def now(self) -> Any:
        """A copy of what is there now (`frozen`)."""
        try:
            return frozen(self.ask())
        except ValueError:  # a cell without content
            return NOTHING


class Globals:
    """The globals of a function, as attributes."""


def frozen(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A copy to compare with later, or the tensor itself; `NOTHING` of what is neither that nor a
    number, flag, text, function, or small container of such."""
    if isinstance(value, Tensor):  # whose content a trace shares
        return value
    plain = isinstance(value, PLAIN)
    if isinstance(value, CONTAINERS):
        items = [item for _, item in items_of(value)]
        fit = (not isinstance(x, Tensor) and frozen(x, depth - 1) is not NOTHING for x in items)
        plain = bool(depth) and len(items) <= MOST and all(fit)
    return copy.deepcopy(value) if plain else NOTHING


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, or the same tensor."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))


def is_object(value: Any) -> bool:
    """Whether it is an object of a class in Python, of which reads can be noted."""
    changeable = type(value).__flags__ & 0x300 == 0x200  # made at run time, and not immutable
    other = isinstance(value, (*NAMESPACES, Tensor))
    return changeable and not other and hasattr(value, "__dict__")


def names_in(code: CodeType) -> set[str]:
    """Globals and attributes that code names, and that functions inside of it do."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


class Reads:
    """What a model and its loss read inside of `noted`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        self._owners: dict[int, tuple[Any, str]] = {}  # and how the names of its values begin
        self._read: dict[tuple[int, str], ReadValue] = {}
        for path, module in model.named_modules():
            dot = f"{path}." if path else ""
            self._owners[id(module)] = module, dot
            for key, value in vars(module).items():
                if is_object(value):
                    self._owners.setdefault(id(value), (value, f"{dot}{key}."))
        self._meet(function, "")

    def _meet(self, found: Any, name: str, module: str | None = None) -> None:
        """Of the loss, or of what its code names: an object, whose reads are noted, or a function
        of the same `module`, of which this is done in turn."""
        if id(found) in self._owners or isinstance(found, (*NAMESPACES, Tensor)):
            return
        self._owners[id(found)] = found, f"{name}."
        if not isinstance(found, FunctionType):
            inner = [getattr(found, key, None) for key in INNER]
            for part in (*inner, type(found).__call__ if module is None else None):
                self._meet(part, name, module)
        elif module in (None, found.__module__):
            code, known = found.__code__, Globals()
            known.__dict__ = found.__globals__
            names = sorted(names_in(code))
            cells = zip(found.__closure__ or (), code.co_freevars, strict=True)
            reads = [ReadValue(cell, "cell_contents", name) for cell, name in cells]
            reads += [ReadValue(known, name, name) for name in names if name in vars(known)]
            reads += [ReadValue(found, "__defaults__", f"{found.__name__}.__defaults__")]
            for read in reads:
                self._read[read.place] = replace(read, value=read.now())
                content = getattr(read.owner, read.key, None)
                self._meet(content, read.name, found.__module__)
                if isinstance(content, NAMESPACES) and id(content) not in self._owners:
                    self._owners[id(content)] = content, ""
                    own = (n for n in names if n in vars(content))
                    reads += [ReadValue(content, n, f"{read.name}.{n}") for n in own]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes reads of attributes."""
        objects = [owner for owner, _ in self._owners.values() if is_object(owner)]
        with ExitStack() as patches:
            for kind in {nn.Module if isinstance(x, nn.Module) else type(x) for x in objects}:
                noting = self._noting(kind.__getattribute__)  # type: ignore[arg-type]
                patches.enter_context(patch.object(kind, "__getattribute__", noting))
            yield

    def _noting(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        owners, read = self._owners, self._read

        def get(owner: Any, key: str) -> Any:
            place = id(owner), key
            if place[0] in owners and key not in NATIVE and place not in read:
                stored = frozen(getattr_static(owner, key, NOTHING))  # nothing is of a property
                read[place] = ReadValue(owner, key, owners[place[0]][1] + key, stored)
            return original(owner, key)

        return get

    def found(self) -> tuple[ReadValue, ...]:
        """What was read that is plain, and the same now: code does not change it itself."""
        plain = (read for read in self._read.values() if read.value is not NOTHING)
        return tuple(read for read in plain if same(read.now(), read.value))


class Readings:
    """What traces of a model have read, as it was at the last look.

    mark: a number that ranks share as long as they have the same values.
    """

    def __init__(self) -> None:
        self.mark = 0
        self.now: dict[tuple[int, str], Any] = {}
        self._reads: list[ReadValue] = []
        self._asks: list[Callable[[], Any]] = []
        self._values: list[Any] = []
        self._held: dict[int, tuple[tuple[ReadValue, ...], bool]] = {}

    def look(self, more: Iterable[ReadValue] = ()) -> bool:
        """Takes the values of now; whether one is another. more: what another trace has read."""
        for read in more:
            if read.place not in self.now:
                self._reads.append(read)
                self._asks.append(read.ask)
                self._values.append(self.now.setdefault(read.place, NOTHING))
        found: list[Any] = []
        try:
            found = list(map(call, self._asks))
            if found == self._values:  # in lists what is identical is equal, also a NaN
                return False
        except Exception:  # one is gone, or cannot be compared
            pass
        self._held = {}
        for i, read in enumerate(self._reads):
            if not found or found[i] is not self._values[i]:
                value = self._values[i] = self.now[read.place] = read.now()
                self._asks[i] = read.ask
                told = json.dumps((i, value), skipkeys=True, default=lambda x: str(type(x)))
                self.mark = crc32(told.encode(), self.mark)
        return True

    def hold(self, reads: tuple[ReadValue, ...]) -> bool:
        """Whether a trace that has read these stands for the model as it was at the last look."""
        if id(reads) not in self._held:
            fits = all(same(self.now.get(read.place, NOTHING), read.value) for read in reads)
            self._held[id(reads)] = reads, fits
        return self._held[id(reads)][1]
