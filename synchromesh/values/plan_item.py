"""An item of a plan, as text and in a document: an override, a pipeline stage or a setting."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

from synchromesh.values import document
from synchromesh.values.fault import near
from synchromesh.values.fields import Within, of_plain
from synchromesh.values.layout_spec import MOST, LayoutSpec
from synchromesh.values.schedule import SCHEDULES
from synchromesh.values.synchronisation import synchronisation
from synchromesh.values.weight_versions import VERSIONS

SETTINGS = (
    "stages", "micro_batches", "schedule", "global_batch", "synchronisation", "servers",
    "compression", "rows", "ranks", "pieces", "versions",
)  # fmt: skip
WHOLE_PLAN = ("single", "pipeline", "auto")  # layouts that no component can have on its own
NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")  # that is a part of a module path
RANGE = re.compile(r"(?<![^.])([0-9]{1,9})-([0-9]{1,9})(?![^.])")  # of them, in a pattern


@dataclass(frozen=True)
class Override:
    """Components that `pattern` matches have the layout `spec` instead of the plan's default."""

    pattern: str
    spec: LayoutSpec

    def __post_init__(self) -> None:
        check_pattern(self.pattern, "=;")
        if self.pattern.startswith("@"):
            raise ValueError(f"pattern {self.pattern!r}: @ begins a setting; write [@] instead")
        for first, last in RANGE.findall(self.pattern):
            if int(first) > int(last):
                raise ValueError(
                    f"pattern {self.pattern!r}: {first}-{last} runs backwards; a module of that "
                    f"name is written [{first[0]}]{first[1:]}-{last}"
                )
        if self.spec.name in WHOLE_PLAN:
            raise ValueError(
                f"{self.pattern}={self.spec}: {self.spec.name} is a layout of the whole plan; "
                "for a component write data, tensor or hybrid:tensor=2"
            )


@dataclass(frozen=True)
class Stage:
    """Neighbouring components on their own ranks, from `first`, a component or a module, on."""

    ranks: tuple[Annotated[int, Within(0, MOST.degree)], ...]
    first: str

    def __post_init__(self) -> None:
        if not self.ranks or not self.first:
            raise ValueError("a stage needs ranks and its first component, like 0-1:embeddings")
        if len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"stage {self}: each rank stands once in a stage")
        check_pattern(self.first, "=;,:/")

    def __str__(self) -> str:
        return f"{show_ranks(self.ranks)}:{self.first}"


def stage_faults(stages: Sequence[Stage]) -> list[str]:
    """What is wrong with ranks: returning ones come alike, neighbours have different ones."""
    faults = []
    for i, stage in enumerate(stages):
        for other in stages[:i]:
            if other.ranks != stage.ranks and set(other.ranks) & set(stage.ranks):
                faults.append(
                    f"stages {other} and {stage} overlap in part: two stages have the same ranks "
                    "in the same order, or none in common"
                )
        if i and stages[i - 1].ranks == stage.ranks:
            faults.append(
                f"stages {stages[i - 1]} and {stage} follow each other on the same ranks: "
                "they are one stage"
            )
    return faults


def around(path: str) -> list[str]:
    """The module paths around `path`: a.b.c is inside a.b and a."""
    return [path[: m.start()] for m in re.finditer(r"\.", path)]


def stage_starts(stages: Sequence[Stage], paths: Mapping[str, Sequence[str]]) -> list[int]:
    """The index of the first component of each stage. paths: the module paths of each component.
    ValueError with all faults: names that begin no component, stages out of order."""
    names = list(paths)
    starts: list[int] = []
    faults = []
    for stage in stages:
        start = next((i for i, n in enumerate(names) if stage.first in (n, *around(n))), None)
        before = [-1, *starts][-1]
        if start is None:
            faults.append(_absent(stage, paths))
        elif start <= before:
            faults.append(
                f"stage {stage} begins with {names[start]!r}, which does not come after "
                f"{names[before]!r}, with which the stage before it begins: stages stand in the "
                "order of the model's components"
            )
        else:
            starts.append(start)
    if starts and starts[0] and not faults:
        faults.append(
            f"stage {stages[0]}: the first stage begins with the model's first component, "
            f"{names[0]!r}"
        )
    if faults:
        raise ValueError("; ".join(faults))
    return starts


def _absent(stage: Stage, paths: Mapping[str, Sequence[str]]) -> str:
    """That no component begins a stage as it says, with what it may have meant."""
    component = next((n for n, where in paths.items() if stage.first in where), None)
    if component is not None:
        why = f"is inside {component!r}, which is one component"
    else:
        known = sorted({path for where in paths.values() for path in where})
        there = f"; there are {', '.join(map(repr, list(paths)[:8]))}"
        why = f"is none{near(stage.first, known) or there}"
    return f"stage {stage}: its first component {stage.first!r} {why}"


def check_pattern(pattern: str, reserved: str) -> None:
    """ValueError where a pattern is empty, unprintable or has one of the `reserved` characters."""
    wrong = [c for c in reserved if c in pattern]
    if not pattern or pattern != pattern.strip() or wrong or not pattern.isprintable():
        raise ValueError(
            f"pattern {pattern[:80]!r}: should be printable, without {' '.join(reserved)} "
            "and blanks around it; ? stands for any character"
        )


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` says this module path, as by fnmatch; a part `4-17` is 4 to 17."""
    numbers = RANGE.search(pattern)
    if numbers is None:
        return fnmatchcase(path, pattern)
    return any(
        int(numbers[1]) <= int(number[0]) <= int(numbers[2])
        and fnmatchcase(path[: number.start()], pattern[: numbers.start()])
        and matches(pattern[numbers.end() :], path[number.end() :])
        for number in NUMBER.finditer(path)
    )


def unmatched(pattern: str, names: Sequence[str], known: Sequence[str]) -> str:
    """That a pattern matches none of the module paths `known`, with what it may have meant."""
    others = [p for p in known if matches(RANGE.sub("0-999999999", pattern), p)]
    hint = f"; there are {others[0]!r} to {others[-1]!r}" if others else ""
    hint = hint or near(pattern, sorted(known)) or f"; there are {', '.join(map(repr, names[:8]))}"
    return f"pattern {pattern!r} matches no component{hint}"


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
    if name not in SETTINGS:
        raise ValueError(
            f"unknown setting {'@' + name[:59]!r}{near(name, SETTINGS)}; "
            f"known are {', '.join('@' + s for s in SETTINGS)}"
        )
    match name:
        case "stages":
            stages = (stage.partition(":") for stage in value.split("/"))
            return tuple(Stage(parse_ranks(r, name), first.strip()) for r, _, first in stages)
        case "rows":
            if not re.fullmatch(r"[0-9]{1,7}(\s*,\s*[0-9]{1,7})*", value):
                raise ValueError(f"rows={value[:60]}: should be shares like 3,3,2")
            return tuple(int(n) for n in value.split(","))
        case "ranks" | "servers":
            return parse_ranks(value, name)
        case "micro_batches" | "global_batch" | "pieces":
            if not re.fullmatch(r"[0-9]{1,10}", value):
                raise ValueError(f"{name}={value[:40]}: should be a whole number")
            return int(value)
        case _:
            return value


def show_setting(name: str, value: Any) -> str:
    """The text behind `@name=` that `parse_setting` reads."""
    match name:
        case "stages":
            return "/".join(map(str, value))
        case "rows":
            return ",".join(map(str, value))
        case "ranks" | "servers":
            return show_ranks(value)
        case _:
            return str(value)


def setting_fault(name: str, value: Any) -> str:
    """What is wrong with the value of a setting; nothing where it is not given."""
    match name:
        case "schedule" if value not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            return f"unknown schedule {value!r}{near(value, SCHEDULES)}; known are {known}"
        case "versions" if value not in VERSIONS:
            return f"unknown versions {value!r}; known are {', '.join(VERSIONS)}"
        case "synchronisation":
            return _fault(synchronisation, value)
        case "micro_batches" | "global_batch" | "pieces":
            if value is not None and not 1 <= value <= MOST.count:
                return f"{name}={value} should be at least 1 and at most {MOST.count}"
        case "rows" if value is not None:
            if not (value and min(value) >= 0 and 0 < max(value) <= MOST.degree):
                return f"rows={show_numbers(value)}: shares from 0 to {MOST.degree}, not all zero"
    return ""


def servers_fault(ranks: Sequence[int] | None, word: str, servers: int) -> str:
    """What is wrong with ranks that serve alone, of a word with so many servers."""
    if ranks is None:
        return ""
    if not servers:
        return (
            f"@servers={show_ranks(ranks)}, but @synchronisation={word} has no servers: write one "
            "that has (server:S, downpour:S, ssp:S,stale=K, shat:S), or leave @servers out"
        )
    if len({*ranks}) < len(ranks) or len(ranks) != servers:
        return (
            f"@servers={show_ranks(ranks)} should name the ranks of {servers} "
            f"server{'s' if servers > 1 else ''} ({word}), each once"
        )
    return ""


def too_many_servers(ranks: Sequence[int] | None, word: str, servers: int, data: int) -> str:
    """What is wrong with so many servers of so many data ranks, of which `ranks` serve alone."""
    if ranks is not None and len(ranks) >= data:
        return (
            f"@servers={show_ranks(ranks)} leaves none of {data} ranks to compute rows: name "
            "fewer, or take more ranks"
        )
    if servers > data:
        return (
            f"@synchronisation={word}: servers are workers too, of which there are {data} (the "
            f"largest data degree): take at most {data} server{'s' if data > 1 else ''}, or ranks "
            "of their own (@servers=)"
        )
    return ""


def shares(given: Sequence[int], data: int) -> list[Fraction]:
    """The part of the rows before index 1, 2, ..., `data`; linear between given shares."""
    before, finest, made = (0, *accumulate(given)), len(given), []
    for i in range(1, data + 1):
        full, rest = divmod(i * finest, data)
        partial = Fraction(given[full] * rest, data) if rest else 0
        made.append((before[full] + partial) / Fraction(before[-1]))
    return made


def _fault(parse: Callable[[str], Any], value: str) -> str:
    try:
        parse(value)
    except ValueError as error:
        return str(error)
    return ""


def read_field(key: str, value: Any, path: str) -> Any:
    """The value of one key of the JSON form; ValueError begins with the path."""
    match key:
        case "default":
            return _spec(value, path)
        case "overrides" | "stages":
            items = enumerate(document.sequence(value, path))
            make = _override if key == "overrides" else partial(of_plain, Stage)
            return tuple(make(item, f"{path}[{i}]") for i, item in items)
        case "rows" | "ranks" | "servers" | "global_batch" | "pieces" if value is None:
            return None
        case "rows" | "ranks" | "servers":
            numbers = enumerate(document.sequence(value, path))
            return tuple(document.integer(n, f"{path}[{i}]", 0, MOST.degree) for i, n in numbers)
        case "global_batch" | "pieces" | "micro_batches":
            return document.integer(value, path, 1, MOST.count)
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
