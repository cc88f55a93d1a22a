"""Frozen dataclasses from plain values, by the types of their fields, and back.

A field is a number, text, a truth value, another dataclass, one of these or None, a tuple of them
of any length, or a mapping from text; a field with a default may be left out. `Annotated` says
within which bounds a number lies, and which keys a mapping has. A class whose plain form is
another one has `from_plain(value, path)` and `to_plain()` of its own."""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, cast

from synchromesh.values import document

T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """The bounds of a number, both allowed."""

    least: float
    most: float = float("inf")


@dataclass(frozen=True)
class Keys:
    names: tuple[str, ...]


def of_plain(kind: type[T], value: Any, path: str, complete: bool = False) -> T:
    """The dataclass `kind` that plain lists, mappings, texts and numbers describe. ValueError
    begins with the path of the value at fault. complete: no field may be left out."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    needed = [
        f.name
        for f in fields(kind)  # type: ignore[arg-type]
        if complete or (f.default is MISSING and f.default_factory is MISSING)
    ]
    given = document.mapping(value, path, known, needed)
    hints = _hints(cast("Any", kind))
    read = {n: _read(hints[n], v, f"{path}.{n}", complete) for n, v in given.items()}
    with document.at(path):
        return kind(**read)


def to_plain(value: Any) -> Any:
    """The inverse: mappings, lists, texts and numbers."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _read(hint: Any, value: Any, path: str, complete: bool) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        kind, note = inner
        if isinstance(note, Within):
            return _scalar(kind, value, path, note)
        return _read(kind, document.mapping(value, path, note.names), path, complete)
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in inner if k is not type(None)]
        missing = value is None and len(kinds) < len(inner)
        return None if missing else _read(kinds[0], value, path, complete)
    if origin is Literal:
        if value not in inner:
            known = ", ".join(map(str, inner))
            raise ValueError(f"{path}: should be one of {known}, not {document.kind(value)}")
        return value
    if origin is not None:
        return _several(origin, inner, value, path, complete)
    if hasattr(hint, "from_plain"):
        return hint.from_plain(value, path)
    if is_dataclass(hint):
        return of_plain(cast("type[Any]", hint), value, path, complete)
    return _scalar(hint, value, path)


def _several(origin: type, inner: tuple[Any, ...], value: Any, path: str, complete: bool) -> Any:
    """A tuple of values of one kind, or a mapping to them."""
    if origin is tuple:
        items = enumerate(document.sequence(value, path))
        return tuple(_read(inner[0], x, f"{path}[{i}]", complete) for i, x in items)
    assert issubclass(origin, Mapping), origin
    if not isinstance(value, dict):
        raise ValueError(f"{path}: should be a mapping, not {document.kind(value)}")
    return {key: _read(inner[1], x, f"{path}.{key}", complete) for key, x in value.items()}


def _scalar(hint: Any, value: Any, path: str, within: Within | None = None) -> Any:
    if hint is bool:
        return document.boolean(value, path)
    if hint is int:
        least, most = (-(2**63), 2**63) if within is None else (within.least, within.most)
        return document.integer(value, path, least, most)
    if hint is float:
        within = within or Within(float("-inf"))
        return document.number(value, path, within.least, within.most)
    if hint is str:
        return document.text(value, path)
    assert hint is Any, hint
    return value
