"""Readings: the Python values that a trace has read, and whether they are as they were.

    self.p, self.settings.slope    of the modules and of objects that they have, as code reads them
    WEIGHT, beta, args.smoothing   globals, closures and objects that the code of the loss names,
                                   of hooks and of the forward methods

A trace holds for these values alone, so they are looked at in every step."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from dis import get_instructions
from enum import Enum
from functools import partial
from inspect import getattr_static, ismethod
from operator import call, getitem
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any
from unittest.mock import patch
from weakref import ReferenceType
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from .model_snapshot import CONTAINER_LIMITS, CONTAINERS, TABLES, items_of

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device,
    FunctionType, BuiltinFunctionType,
)  # fmt: skip
NATIVE = {*vars(nn.Module()), *dir(nn.Module)}  # what every module has: tables, hooks, its mode
NAMESPACES = (ModuleType, type)
APART = (*NAMESPACES, ReferenceType)  # not compared: torch swaps no tensor that is referred to
# of our functions, partial ones, methods
INNER = ("function", "func", "__func__", "__self__")
GIVEN = ("args", "keywords")  # to a partial function
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
        try:
            return frozen(self.ask())
        except ValueError:  # a cell without content
            return NOTHING


class Globals:
    """The globals of a function, as attributes."""


@dataclass(frozen=True, eq=False)
class Identity:
    """Equal to one object alone, in whatever way it compares itself."""

    content: Any
    __array_ufunc__ = None  # numpy's arrays leave the comparison to it

    def __eq__(self, other: object) -> bool:
        return self.content is (other.content if isinstance(other, Identity) else other)

    __hash__ = object.__hash__


def frozen(value: Any) -> Any:
    """A copy to compare with later of a number, flag, text, function, or small container; of other
    objects, in it too, what is equal to these alone. `NOTHING` of what is not compared."""
    if not isinstance(value, (*CONTAINERS, *APART, property)):
        return value if isinstance(value, PLAIN) else Identity(value)
    objects: dict[int, Any] = {}
    return _copy(value, objects) if is_small(value, objects) else NOTHING


def _copy(value: Any, objects: dict[int, Any]) -> Any:
    """Of a container, with those in it: of a class of one's own as what that compares as, since
    it may find all that is asked of it among its items, `__deepcopy__` too."""
    kind: Any = next((c for c in CONTAINERS if isinstance(value, c)), None)
    if kind is None:
        return objects.get(id(value), value)
    items = {key: _copy(item, objects) for key, item in items_of(value)}
    if kind is dict:
        return items
    return kind(items.values()) if hasattr(kind, "__iter__") else kind(**items)


def is_small(value: Any, objects: dict[int, Any], depth: int = CONTAINER_LIMITS.depth) -> bool:
    """Whether it is a small container without tensors, or in one; notes the objects in it."""
    if isinstance(value, CONTAINERS):
        items = [item for _, item in items_of(value)] if depth else []
        few = depth > 0 and len(items) <= CONTAINER_LIMITS.items
        return few and all(is_small(x, objects, depth - 1) for x in items)
    if not isinstance(value, PLAIN):
        objects[id(value)] = Identity(value)
    return depth < CONTAINER_LIMITS.depth and not isinstance(value, (Tensor, *APART))


def same(a: Any, b: Any) -> bool:
    return a is b or bool(a == b)


def is_object(value: Any) -> bool:
    """Whether it is an object of a class in Python, of which reads can be noted."""
    changeable = type(value).__flags__ & 0x300 == 0x200  # made at run time, and not immutable
    package = type(value).__module__.partition(".")[0]
    other = isinstance(value, (*APART, *PLAIN, Tensor)) or package in ("logging", "torch", "sympy")
    attributes = hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    return isinstance(value, nn.Module) or (changeable and not other and attributes)


def in_tables(owner: Any, key: str) -> bool:
    return isinstance(owner, nn.Module) and any(key in vars(owner).get(t, ()) for t in TABLES)


def of_class(owner: Any, key: str) -> Any:
    """What `__getattr__` of a class finds, where nothing else does; `NOTHING` if that."""
    try:
        return type(owner).__getattr__(owner, key)
    except AttributeError:
        return NOTHING


def names_in(code: CodeType) -> tuple[set[str], set[str]]:
    """Globals that code names, and attributes, and that functions inside of it do."""
    inner = [names_in(c) for c in code.co_consts if isinstance(c, CodeType)]
    of_globals = {i.argval for i in get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return of_globals.union(*(g for g, _ in inner)), {*code.co_names}.union(*(n for _, n in inner))


class Reads:
    """What a model and its loss read inside of `noted`."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        self._owners: dict[int, tuple[Any, str]] = {}  # and how the names of its values begin
        self._read: dict[tuple[int, str], ReadValue] = {}
        self._patches = ExitStack()
        self._watched: set[type] = set()
        self._noting = False
        self._own(model, "")
        for module in model.modules():
            hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
            own = () if type(module).__module__.startswith("torch.") else (type(module).forward,)
            for code in (*hooks, *own):
                self._meet(code, "")
        self._meet(function, "")

    def _own(self, value: Any, dot: str, depth: int = CONTAINER_LIMITS.depth) -> None:
        if isinstance(value, CONTAINERS) and depth:
            for key, item in items_of(value):
                self._own(item, f"{dot}{key}.", depth - 1)
        elif is_object(value) and id(value) not in self._owners:
            self._owners[id(value)] = value, dot
            self._watch(value)
            if isinstance(value, nn.Module):
                for key, child in value.named_children():
                    self._own(child, f"{dot}{key}.")

    def _meet(self, met: Any, name: str, module: str | None = None) -> None:
        """Notes reads of an object, or meets a function of the same `module` in turn."""
        if id(met) in self._owners or isinstance(met, (*NAMESPACES, Tensor)):
            return
        self._own(met, f"{name}.")
        self._owners.setdefault(id(met), (met, f"{name}."))
        if not isinstance(met, FunctionType):
            for inner in self._inside(met, name, module):
                self._meet(inner, name, module)
        elif module in (None, met.__module__):
            self._meet_code(met, name)

    def _inside(self, met: Any, name: str, module: str | None) -> list[Any]:
        """What a call of an object calls; the arguments of a partial function are read."""
        if isinstance(met, partial):
            for key in GIVEN:
                self._own(self._read_now(ReadValue(met, key, f"{name}.{key}")), f"{name}.")
        inner = [getattr(met, key, None) for key in INNER]
        return [*inner, type(met).__call__] if module is None else inner

    def _meet_code(self, function: FunctionType, name: str) -> None:
        """Meets what a function's code reads: cells, globals, defaults, and names in modules."""
        code, known = function.__code__, Globals()
        known.__dict__ = function.__globals__
        of_globals, names = names_in(code)
        cells = zip(function.__closure__ or (), code.co_freevars, strict=True)
        reads = [ReadValue(cell, "cell_contents", name) for cell, name in cells]
        reads += [ReadValue(known, n, n) for n in sorted(of_globals & vars(known).keys())]
        reads += [ReadValue(function, "__defaults__", f"{function.__name__}.__defaults__")]
        for read in reads:
            content = self._read_now(read)
            self._meet(content, read.name, function.__module__)
            if isinstance(content, NAMESPACES) and id(content) not in self._owners:
                self._owners[id(content)] = content, ""
                own = sorted(names & vars(content).keys())
                reads += [ReadValue(content, n, f"{read.name}.{n}") for n in own]

    def _read_now(self, read: ReadValue) -> Any:
        self._read[read.place] = replace(read, value=read.now())
        return getattr(read.owner, read.key, None)

    @contextmanager
    def noted(self) -> Iterator[None]:
        with self._patches:
            self._noting = True
            for owner, _ in [*self._owners.values()]:
                self._watch(owner)
            yield
        self._noting = False

    def _watch(self, owner: Any) -> None:
        kind: type = nn.Module if isinstance(owner, nn.Module) else type(owner)
        if self._noting and is_object(owner) and kind not in self._watched:
            self._watched.add(kind)
            noting = self._noting_of(kind.__getattribute__)  # type: ignore[arg-type]
            self._patches.enter_context(patch.object(kind, "__getattribute__", noting))

    def _noting_of(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        owners, read = self._owners, self._read

        def get(owner: Any, key: str) -> Any:
            place = id(owner), key
            is_new = place[0] in owners and key not in NATIVE and place not in read
            try:
                value = original(owner, key)
            except AttributeError:
                if is_new and not in_tables(owner, key):
                    self._note(owner, key, of_class(owner, key))
                raise
            if is_new:
                self._note(owner, key, value)
            return value

        return get

    def _note(self, owner: Any, key: str, value: Any) -> None:
        """Code has read `value` as an attribute; `NOTHING`: asked for one that is not there."""
        stored = getattr_static(owner, key, NOTHING)  # a property itself
        if stored is NOTHING or isinstance(stored, MemberDescriptorType):
            stored = value
        name = self._owners[id(owner)][1] + key
        self._read[id(owner), key] = ReadValue(owner, key, name, frozen(stored))
        self._own(value, f"{name}.")
        held = key in getattr(owner, "__dict__", {})  # not of the class
        if held and (isinstance(value, (FunctionType, partial)) or ismethod(value)):
            self._meet(value, name)

    def unchanged(self) -> tuple[ReadValue, ...]:
        """What was read that is plain, and the same now: code does not change it itself."""
        plain = (read for read in self._read.values() if read.value is not NOTHING)
        return tuple(read for read in plain if same(read.now(), read.value))


class Readings:
    """What traces of a model have read, as it was at the last look. mark: a number that ranks
    share as long as the same values change alike. What a rank has of its own from the start (its
    number, its device) may be read."""

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
        values: list[Any] = []
        try:
            values = list(map(call, self._asks))
            if values == self._values:  # in lists what is identical is equal, also a NaN
                return False
        except Exception:  # one is gone, or cannot be compared
            pass
        self._held = {}
        for i, read in enumerate(self._reads):
            if not values or values[i] is not self._values[i]:
                before = self._values[i]
                value = self._values[i] = self.now[read.place] = read.now()
                self._asks[i] = read.ask
                if before is NOTHING or same(before, value):
                    continue
                told = json.dumps(
                    (read.name, value), skipkeys=True, default=lambda x: str(type(x))
                )
                self.mark = crc32(told.encode(), self.mark)
        return True

    def hold(self, reads: tuple[ReadValue, ...]) -> bool:
        """Whether a trace that has read these stands for the model as it was at the last look."""
        if id(reads) not in self._held:
            fits = all(same(self.now.get(read.place, NOTHING), read.value) for read in reads)
            self._held[id(reads)] = reads, fits
        return self._held[id(reads)][1]
