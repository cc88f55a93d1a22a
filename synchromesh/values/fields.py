"""Frozen dataclasses from plain values, by the types of their fields, and back.

A field is a number, text, a truth value, another dataclass, one of these or None, a tuple of them
of any length, or a mapping from text; a field with a default may be left out.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, cast

from synchromesh.values import document

T = TypeVar("T")


def of_plain(kind: type[T], value: Any, path: str) -> T:
    """The dataclass `kind` that plain lists, mappings, texts and numbers describe. ValueError
    begins with the path of the value at fault."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    needed = [
        f.name
        for f in fields(kind)  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING
    ]
    given = document.mapping(value, path, known, needed)
    hints = _hints(cast("Any", kind))
    read = {n: _read(hints[n], v, f"{path}.{n}") for n, v in given.items()}
    with document.at(path):
        return kind(**read)


def to_plain(value: Any) -> Any:
    """The inverse: mappings, lists, texts and numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(hint: Any, value: Any, path: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [k for k in inner if k is not type(None)]
        return None if value is None and len(kinds) < len(inner) else _read(kinds[0], value, path)
    if origin is Literal:
        if value not in inner:
            words = ", ".join(map(str, inner))
            raise ValueError(f"{path}: should be one of {words}, not {document.kind(value)}")
        return value
    if origin is tuple:
        items = document.sequence(value, path)
        return tuple(_read(inner[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{path}: should be a mapping, not {document.kind(value)}")
        return {key: _read(inner[1], item, f"{path}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return of_plain(cast("type[Any]", hint), value, path)
    return _scalar(hint, value, path)


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is bool:
        return document.boolean(value, path)
    if hint is int:
        return document.integer(value, path, -(2**63), 2**63)
    if hint is float:
        return document.number(value, path, float("-inf"))
    if hint is str:
        return document.text(value, path)
    assert hint is Any, hint
    return value
