"""An item of a plan, as text and in a document: an override, a pipeline stage or a setting."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from synchromesh.values import document
from synchromesh.values.layout_spec import MOST, LayoutSpec

WHOLE_PLAN = ("single", "pipeline", "auto")  # layouts that no component can have on its own
MOST_COUNT = 2**31  # of micro-batches or rows: larger numbers are typing errors


@dataclass(frozen=True)
class Override:
    """Components that `pattern` matches have the layout `spec` instead of the plan's default."""

    pattern: str
    spec: LayoutSpec

    def __post_init__(self) -> None:
        check_pattern(self.pattern, "=;")
        if self.pattern.startswith("@"):
            raise ValueError(f"pattern {self.pattern!r}: @ begins a setting; write [@] instead")
        if self.spec.name in WHOLE_PLAN:
            raise ValueError(
                f"{self.pattern}={self.spec}: {self.spec.name} is a layout of the whole plan; "
                "for a component write data, tensor or hybrid:tensor=2"
            )


@dataclass(frozen=True)
class Stage:
    """Neighbouring components (patterns over module paths) on their own ranks."""

    ranks: tuple[int, ...]
    components: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.ranks or not self.components:
            raise ValueError("a stage needs ranks and components, like 0-1:encoder.*")
        for pattern in self.components:
            check_pattern(pattern, "=;,:/")


def check_pattern(pattern: str, reserved: str) -> None:
    """ValueError where a pattern is empty, unprintable or has one of the `reserved` characters."""
    wrong = [c for c in reserved if c in pattern]
    if not pattern or pattern != pattern.strip() or wrong or not pattern.isprintable():
        raise ValueError(
            f"pattern {pattern[:80]!r}: should be printable, without {' '.join(reserved)} "
            "and blanks around it; ? stands for any character"
        )


def show_numbers(numbers: Sequence[int]) -> str:
    """`0,1,2`, shortened after 16 numbers; for messages."""
    return ",".join(map(str, numbers[:16])) + (",..." if len(numbers) > 16 else "")


def show_ranks(numbers: Sequence[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3 and 6, which `parse_ranks` reads."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)


def parse_ranks(text: str, what: str) -> tuple[int, ...]:
    """The numbers of a text like `0-3,6`."""
    numbers: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", item.strip())
        if not match:
            raise ValueError(f"{what}={text[:60]}: should be numbers like 0,2,1 or 0-3")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{what}={text[:60]}: {item.strip()} runs backwards")
        numbers += range(first, last + 1)
    return tuple(numbers)


def parse_setting(name: str, value: str) -> Any:
    """The value of an item `@name=value`; ValueError names the setting at fault."""
    match name:
        case "stages":
            stages = []
            for part in value.split("/"):
                ranks, _, patterns = part.partition(":")
                names = tuple(p.strip() for p in patterns.split(","))
                stages.append(Stage(parse_ranks(ranks, "stages"), names))
            return tuple(stages)
        case "rows":
            if not re.fullmatch(r"[0-9]{1,7}(\s*,\s*[0-9]{1,7})*", value):
                raise ValueError(f"rows={value[:60]}: should be shares like 3,3,2")
            return tuple(int(n) for n in value.split(","))
        case "ranks":
            return parse_ranks(value, "ranks")
        case "micro_batches" | "global_batch" | "pieces":
            if not re.fullmatch(r"[0-9]{1,10}", value):
                raise ValueError(f"{name}={value[:40]}: should be a whole number")
            return int(value)
        case _:
            return value


def read_field(key: str, value: Any, path: str) -> Any:
    """The value of one key of the JSON form; ValueError begins with the path."""
    match key:
        case "default":
            return _spec(value, path)
        case "overrides" | "stages":
            make = _override if key == "overrides" else _stage
            items = enumerate(document.sequence(value, path))
            return tuple(make(item, f"{path}[{i}]") for i, item in items)
        case "rows" | "ranks":
            return None if value is None else _integers(value, path)
        case "global_batch" | "pieces":
            return None if value is None else document.integer(value, path, 1, MOST_COUNT)
        case "micro_batches":
            return document.integer(value, path, 1, MOST_COUNT)
        case _:
            return document.text(value, path)


def _spec(value: Any, path: str) -> LayoutSpec:
    text = document.text(value, path)
    with document.at(path):
        return LayoutSpec.parse(text)


def _override(value: Any, path: str) -> Override:
    item = document.mapping(value, path, ("pattern", "word"), ("pattern", "word"))
    pattern = document.text(item["pattern"], f"{path}.pattern")
    spec = _spec(item["word"], f"{path}.word")
    with document.at(path):
        return Override(pattern, spec)


def _stage(value: Any, path: str) -> Stage:
    item = document.mapping(value, path, ("ranks", "components"), ("ranks", "components"))
    names = document.sequence(item["components"], f"{path}.components")
    patterns = tuple(document.text(n, f"{path}.components[{i}]") for i, n in enumerate(names))
    ranks = _integers(item["ranks"], f"{path}.ranks")
    with document.at(path):
        return Stage(ranks, patterns)


def _integers(value: Any, path: str) -> tuple[int, ...]:
    items = document.sequence(value, path)
    return tuple(document.integer(n, f"{path}[{i}]", 0, MOST) for i, n in enumerate(items))
