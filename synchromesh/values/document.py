"""A document, JSON or YAML read strictly: no duplicate keys, aliases, NaN or unknown keys.

The parsers are lenient: the last duplicate wins, `no` is False, NaN is a number, YAML aliases of
450 bytes expand to 254 MB, deep nesting ends in a RecursionError. Each of these is a ValueError
here: one sentence that starts with the document's name and the path of the key."""

import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

MAX_BYTES = 4_000_000
MAX_DEPTH = 32


class Document(ABC):
    """A value that a document describes; the JSON and the YAML form say the same."""

    yaml_flow: ClassVar[bool | None] = False  # None: lists and mappings without others in a line
    most_bytes: ClassVar[int] = MAX_BYTES  # of a file of this kind

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain lists, mappings, texts and numbers."""

    @classmethod
    @abstractmethod
    def from_dict(cls, value: Any, name: str) -> Self:
        """What `to_dict` described. ValueError begins with `name` and the key at fault."""

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_yaml(self) -> str:
        style = self.yaml_flow
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=style, width=99)

    @classmethod
    def from_json(cls, text: str, name: str = "") -> Self:
        """The value in a JSON text; without `name` messages begin with the class's own."""
        name = name or cls.__name__.lower()
        return cls.from_dict(read_json(text, name, cls.most_bytes), name)

    @classmethod
    def from_yaml(cls, text: str, name: str = "") -> Self:
        """The value in a YAML text; without `name` messages begin with the class's own."""
        name = name or cls.__name__.lower()
        return cls.from_dict(read_yaml(text, name), name)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The value in a `.json`, `.yaml` or `.yml` file."""
        return cls.from_dict(read(path, cls.most_bytes), str(path))


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML whose mappings have unique keys and whose integers mean what they show."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        # YAML 1.1 reads 010 as 8 and 1:30 as 90
        if not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value):
            raise ValueError(f"{node.value} is not a plain decimal number")
        return int(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        _refuse_duplicates(keys)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.yaml_implicit_resolvers = {  # dates stay text
    first: [(tag, regexp) for tag, regexp in pairs if not tag.endswith(":timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_StrictLoader.add_implicit_resolver(  # YAML 1.1 reads 1e-3 as text
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_json(text: str, name: str = "document", most: int = MAX_BYTES) -> Any:
    """The value of a JSON text of at most so many characters."""
    _refuse_size(text, name, most)

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not a number that this format has")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates([key for key, _ in items])
        return dict(items)

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"{name}: nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    _refuse_depth(value, name)
    return value


def read_yaml(text: str, name: str = "document") -> Any:
    """The value of a YAML text (safe types alone, no aliases)."""
    _refuse_size(text, name, MAX_BYTES)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_StrictLoader):  # events: nothing is built yet
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"aliases (*{event.anchor}) are not read: write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    _refuse_depth(value, name)
    return value


def read(path: str | Path, most: int = MAX_BYTES) -> Any:
    """The value of a `.json`, `.yaml` or `.yml` file; of JSON at most so many bytes."""
    path = Path(path)
    readers: dict[str, Callable[[str, str], Any]] = {".yaml": read_yaml, ".yml": read_yaml}
    readers[".json"] = partial(read_json, most=most)
    if path.suffix not in readers:
        raise ValueError(f"{path}: the name should end in .json, .yaml or .yml")
    try:
        size = path.stat().st_size
        if size > most:
            raise ValueError(f"{path}: {size} bytes are more than the {most} allowed")
        text = path.read_text(encoding="utf-8-sig")  # as editors on Windows write it
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None
    return readers[path.suffix](text, str(path))


def write(path: str | Path, text: str) -> None:
    """Writes a file entirely, or leaves what was there. OSError with the file's name."""
    path = Path(path)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def at(path: str) -> Iterator[None]:
    """A ValueError from inside says where in the document it stands."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def mapping(
    value: Any, path: str, known: Collection[str], needed: Collection[str] = ()
) -> dict[str, Any]:
    """`value`, which must be a mapping with only `known` and all `needed` keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{path}: should be a mapping, not {kind(value)}")
    unknown = [repr(key) for key in value if key not in known]
    if unknown:
        raise ValueError(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [key for key in needed if key not in value]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} is missing")
    return value


def sequence(value: Any, path: str) -> list[Any]:
    """`value`, which must be a list."""
    if not isinstance(value, list):
        raise ValueError(f"{path}: should be a list, not {kind(value)}")
    return value


def text(value: Any, path: str) -> str:
    """`value`, which must be text."""
    if not isinstance(value, str):
        raise ValueError(f"{path}: should be text, not {kind(value)}")
    return value


def integer(value: Any, path: str, least: float = 0, most: float = 2**40) -> int:
    """`value`, which must be a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{path}: should be a whole number, not {kind(value)}")
    if not least <= value <= most:
        raise ValueError(f"{path}: should be from {least} to {most}, not {_short(value)}")
    return value


def number(value: Any, path: str, least: float = 0.0, most: float = math.inf) -> float:
    """`value`, which must be a finite number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path}: should be a number, not {kind(value)}")
    if (isinstance(value, int) and abs(value) > 2**1000) or not math.isfinite(value):
        raise ValueError(f"{path}: should be a finite number, not {_short(value)}")
    if value < least:
        raise ValueError(f"{path}: should be at least {least}, not {value}")
    if value > most:
        raise ValueError(f"{path}: should be at most {most:g}, not {value}")
    return float(value)


def boolean(value: Any, path: str) -> bool:
    """`value`, which must be true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{path}: should be true or false, not {kind(value)}")
    return value


def kind(value: Any) -> str:
    """What a value is, for messages: `text 'abc'`, `a list`, `nothing`."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return f"text {_short(value)}"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _refuse_duplicates(keys: list[Any]) -> None:
    seen: set[Any] = set()
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(f"keys should be text, not {kind(key)}")
        if key in seen:
            raise ValueError(f"the key {_short(key)} stands there twice")
        seen.add(key)


def _refuse_size(text: str, name: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"{name}: {len(text)} characters are more than the {most} allowed")


def _refuse_depth(value: Any, name: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{name}: nested deeper than {MAX_DEPTH} levels")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        _refuse_depth(item, name, depth + 1)
