"""A plan: how a model trains on K devices; a layout per component, stages, rows, rank order.

The text form is one line, `DEFAULT(; PATTERN=WORD)*(; @SETTING=VALUE)*`, each item split at its
first `=`:

    data; classifier=tensor; encoder.layer.*=hybrid:tensor=2; @rows=3,3,2

Patterns are matched against module paths as by fnmatch (`*` crosses dots): against a component's
name, the modules around it and those inside it. The last match wins; a pattern without match is
an error. Settings:

    @stages=0-1:embeddings,encoder.*/2-3:decoder.*   ranks and components of each pipeline stage
    @micro_batches=4          @schedule=gpipe        of the pipeline, and accumulation
    @global_batch=256                                rows of a step over all ranks
    @synchronisation=every-step                      or local:8 (every 8 steps), stale:1 (1 late)
    @rows=3,3,2                                      shares of the rows, largest data degree
    @ranks=0,2,1                                     order of the ranks; those left out are idle
    @pieces=4                 in how many pieces a step's rows walk side by side, to hide traffic
                              (not given: one and four are tried in the first steps)

`Plan.parse(str(plan)) == plan`; JSON and YAML forms say the same with one key per field.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml

from synchromesh.values import document
from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import MOST, LayoutSpec, near

__all__ = ["SCHEDULES", "LayoutSpec", "Override", "Plan", "Stage"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
EVERY_STEP = "every-step"
_SETTINGS = (
    "stages", "micro_batches", "schedule", "global_batch", "synchronisation", "rows", "ranks",
    "pieces",
)  # fmt: skip
_WHOLE_PLAN = ("single", "pipeline", "auto")  # words that say nothing about one component


@dataclass(frozen=True)
class Override:
    """Components that `pattern` matches have the layout `word` instead of the plan's default."""

    pattern: str
    word: LayoutSpec

    def __post_init__(self) -> None:
        _check_pattern(self.pattern, "=;")
        if self.pattern.startswith("@"):
            raise ValueError(f"pattern {self.pattern!r}: @ begins a setting; write [@] instead")
        if self.word.name in _WHOLE_PLAN:
            raise ValueError(
                f"{self.pattern}={self.word}: {self.word.name} is a word for the whole plan; "
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
            _check_pattern(pattern, "=;,:/")


@dataclass(frozen=True)
class Plan:
    """A frozen value; equal plans have equal texts."""

    default: LayoutSpec
    overrides: tuple[Override, ...] = ()
    stages: tuple[Stage, ...] = ()  # empty: as many equal ones as the default word says
    micro_batches: int = 1
    schedule: str = "1f1b"
    global_batch: int | None = None  # None: as the caller's loader says
    synchronisation: str = EVERY_STEP
    rows: tuple[int, ...] | None = None  # None: equal shares
    ranks: tuple[int, ...] | None = None  # None: 0, 1, 2, ... all of them
    pieces: int | None = None  # None: tried in the first steps

    def __post_init__(self) -> None:
        self._join_micro_batches()
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"unknown schedule {self.schedule!r}{near(self.schedule, SCHEDULES)}; "
                f"known are {', '.join(SCHEDULES)}"
            )
        if self.synchronisation != EVERY_STEP:
            if not re.fullmatch(r"(local|stale):[1-9][0-9]{0,5}", self.synchronisation):
                raise ValueError(
                    f"synchronisation {self.synchronisation!r} is none of "
                    "every-step, local:N, stale:N"
                )
            if self.synchronisation == "local:1":
                object.__setattr__(self, "synchronisation", EVERY_STEP)
        for name in ("micro_batches", "global_batch", "pieces"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 2**31:
                raise ValueError(f"{name}={value} should be at least 1 and at most {2**31}")
        if self.rows is not None and not (
            self.rows and min(self.rows) >= 0 and 0 < max(self.rows) <= MOST
        ):
            raise ValueError(f"rows={_shown(self.rows)}: shares from 0 to {MOST}, not all zero")
        if self.stages and (self.ranks is not None or (self.default.stages or 1) > 1):
            raise ValueError("stages with their own ranks exclude @ranks and pipeline:stages=N")
        order = self.ranks or tuple(r for s in self.stages for r in s.ranks)
        wrong = len(set(order)) < len(order) or any(not 0 <= r < MOST for r in order)
        if self.ranks == () or wrong:
            raise ValueError(f"ranks={_shown(order)}: each rank once, none negative, at least one")

    def _join_micro_batches(self) -> None:
        """`pipeline:microbatches=4` and `micro_batches=4` are the same fact."""
        if self.default.name != "pipeline":
            return
        said = {n for n in (self.default.microbatches, self.micro_batches) if n and n > 1}
        if len(said) > 1:
            raise ValueError(
                f"microbatches={self.default.microbatches} in {self.default} "
                f"and micro_batches={self.micro_batches} differ"
            )
        number = max(said, default=1)
        object.__setattr__(self, "default", replace(self.default, microbatches=number))
        object.__setattr__(self, "micro_batches", number)

    # The text form

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that a text says. ValueError with the item at fault."""
        first, *items = (item.strip() for item in text.strip().split(";"))
        if not first:
            raise ValueError("an empty plan: begin with a word, like data or hybrid:tensor=2")
        overrides: list[Override] = []
        settings: dict[str, Any] = {}
        for item in items:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not key or not value:
                raise ValueError(f"{item[:80]!r} should read PATTERN=WORD or @SETTING=VALUE")
            if not key.startswith("@"):
                overrides.append(Override(key, LayoutSpec.parse(value)))
                continue
            name = key[1:]
            if name not in _SETTINGS:
                raise ValueError(
                    f"unknown setting {key[:60]!r}{near(name, _SETTINGS)}; "
                    f"known are {', '.join('@' + s for s in _SETTINGS)}"
                )
            if name in settings:
                raise ValueError(f"the setting {key} stands there twice")
            settings[name] = _setting(name, value)
        return cls(LayoutSpec.parse(first), tuple(overrides), **settings)

    def __str__(self) -> str:
        items = [str(self.default), *(f"{o.pattern}={o.word}" for o in self.overrides)]
        for name in _SETTINGS:
            value = getattr(self, name)
            in_word = name == "micro_batches" and self.default.name == "pipeline"
            if value == _DEFAULTS[name] or in_word:
                continue
            if name == "stages":
                value = "/".join(f"{_runs(s.ranks)}:{','.join(s.components)}" for s in value)
            elif isinstance(value, tuple):
                value = _runs(value) if name == "ranks" else ",".join(map(str, value))
            items.append(f"@{name}={value}")
        return "; ".join(items)

    # The JSON and YAML forms

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, texts and numbers, one key per field that differs from its default."""
        out: dict[str, Any] = {"default": str(self.default)}
        if self.overrides:
            out["overrides"] = [
                {"pattern": o.pattern, "word": str(o.word)} for o in self.overrides
            ]
        if self.stages:
            out["stages"] = [
                {"ranks": list(s.ranks), "components": list(s.components)} for s in self.stages
            ]
        for name in _SETTINGS[1:]:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, value: Any, name: str = "plan") -> "Plan":
        """The plan that `to_dict` described. ValueError with the path and key at fault."""
        known = document.mapping(value, name, ("default", "overrides", *_SETTINGS), ("default",))
        given: dict[str, Any] = {}
        for key, item in known.items():
            given[key] = _field(key, item, f"{name}: {key}")
        with document.at(name):
            return cls(**given)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=99)

    @classmethod
    def from_json(cls, text: str, name: str = "plan") -> "Plan":
        return cls.from_dict(document.read_json(text, name), name)

    @classmethod
    def from_yaml(cls, text: str, name: str = "plan") -> "Plan":
        return cls.from_dict(document.read_yaml(text, name), name)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """The plan in a `.json`, `.yaml` or `.yml` file."""
        return cls.from_dict(document.read(path), str(path))

    # What it means on a number of devices, for a model

    @property
    def automatic(self) -> bool:
        """Whether the planner is to find the plan: the word `auto` alone."""
        return self == Plan(LayoutSpec("auto"))

    @property
    def stage_count(self) -> int:
        return len(self.stages) or self.default.stages or 1

    def devices(self, world: int) -> tuple[int, ...]:
        """The ranks of `world` that take part, in the plan's order; the others are idle."""
        order = self.ranks or tuple(r for s in self.stages for r in s.ranks) or tuple(range(world))
        beyond = sorted(r for r in order if r >= world)
        if beyond:
            raise ValueError(
                f"the plan names rank {_shown(beyond)}, "
                f"but there are {world} ranks (0 to {world - 1})"
            )
        return order[:1] if self.default.name == "single" else order

    def layouts(
        self,
        names: Sequence[str],
        world: int,
        modules: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[Layout, ...]:
        """The layout of each component in `names`; `modules` are the module paths inside each.

        All faults at once: patterns that match nothing, degrees that do not multiply to the
        devices, shares of rows that do not fit the largest data degree.
        """
        inside = modules or {}
        paths = {name: (name, *_around(name), *inside.get(name, ())) for name in names}
        sizes = self._stage_devices(paths, world)
        words = dict.fromkeys(names, self.default)
        faults: list[str] = []
        for override in self.overrides:
            hits = [n for n, where in paths.items() if _matches(override.pattern, where)]
            if not hits:
                known = sorted({path for where in paths.values() for path in where})
                hint = near(override.pattern, known)
                hint = hint or f"; there are {', '.join(map(repr, names[:8]))}"
                faults.append(f"pattern {override.pattern!r} matches no component{hint}")
            words.update(dict.fromkeys(hits, override.word))
        found: list[Layout] = []
        for name in names:
            try:
                found.append(words[name].layout(sizes[name]))
            except ValueError as error:
                faults.append(str(error))
        largest = max((layout.data for layout in found), default=1)
        if self.rows is not None and not faults and len(self.rows) != largest:
            faults.append(
                f"@rows has {len(self.rows)} shares ({_shown(self.rows)}), "
                f"but the largest data degree is {largest}"
            )
        if faults:
            raise ValueError("; ".join(dict.fromkeys(faults)))
        return tuple(found)

    def _stage_devices(self, paths: Mapping[str, Sequence[str]], world: int) -> dict[str, int]:
        """How many devices each component's stage has."""
        total = len(self.devices(world))
        if not self.stages:
            if total % self.stage_count:
                raise ValueError(
                    f"{self.default}: {self.stage_count} stages do not divide {total} devices"
                )
            return dict.fromkeys(paths, total // self.stage_count)
        sizes = {}
        for name, where in paths.items():
            hits = [s for s in self.stages if any(_matches(p, where) for p in s.components)]
            if len(hits) != 1:
                raise ValueError(f"component {name!r} is in {len(hits)} stages: it needs one")
            sizes[name] = len(hits[0].ranks)
        return sizes

    def cuts(self, module_names: Sequence[str]) -> tuple[str, ...]:
        """The module paths that patterns name, for the trace to cut there.

        Of the modules that one pattern matches, the outermost: `encoder.*` names the children of
        the encoder, not everything below them.
        """
        patterns = [o.pattern for o in self.overrides]
        patterns += [p for s in self.stages for p in s.components]
        named: set[str] = set()
        for pattern in patterns:
            hits = {n for n in module_names if n and fnmatchcase(n, pattern)}
            named |= {n for n in hits if hits.isdisjoint(_around(n))}
        return tuple(n for n in module_names if n in named)

    def row_ranges(self, rows: int, data: int) -> tuple[tuple[int, int], ...]:
        """The global batch rows [start, stop) of each data index of a component.

        Range i ends at ceil(rows * share), where `share` is the part of all rows that the indices
        0 to i have: (i + 1) / data, or as the plan's shares say. It depends on that fraction
        alone, so the ranges of a degree are unions of those of its multiples:

            10 rows, degree 4    0 1 2 | 3 4 | 5 6 7 | 8 9
                     degree 2    0 1 2   3 4 | 5 6 7   8 9
        """
        ends = [0, *(-(-rows * s.numerator // s.denominator) for s in self._shares(data))]
        return tuple(pairwise(ends))

    def _shares(self, data: int) -> list[Fraction]:
        """The part of the rows before index 1, 2, ..., `data`; linear between given shares."""
        if self.rows is None:
            return [Fraction(i + 1, data) for i in range(data)]
        before, finest = (0, *accumulate(self.rows)), len(self.rows)
        shares = []
        for i in range(1, data + 1):
            whole, part = divmod(i * finest, data)
            begun = Fraction(self.rows[whole] * part, data) if part else 0
            shares.append((before[whole] + begun) / Fraction(before[-1]))
        return shares

    def unsupported(self) -> tuple[str, ...]:
        """What this version of the engine does not execute yet; a sentence each."""
        words = (self.default, *(o.word for o in self.overrides))
        told = []
        if self.default.name == "auto":
            told.append("auto is found by the planner: write it alone")
        if self.stage_count > 1:
            told.append(f"{self.stage_count} pipeline stages are not executed yet: use one")
        if self.micro_batches > 1:
            told.append(
                f"micro-batches of a plan ({self.micro_batches}) are not executed yet: "
                "accumulate with trainer.step(batch, micro_batches=...)"
            )
        if any(w.states != "none" for w in words):
            told.append("states sharded over data ranks are not executed yet: use data")
        if any(w.recompute for w in words):
            told.append("recomputation of activations is not executed yet: leave recompute out")
        if self.synchronisation != EVERY_STEP:
            told.append(f"synchronisation {self.synchronisation} is not executed yet")
        return tuple(told)


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Plan)}


def _check_pattern(pattern: str, reserved: str) -> None:
    wrong = [c for c in reserved if c in pattern]
    if not pattern or pattern != pattern.strip() or wrong or not pattern.isprintable():
        raise ValueError(
            f"pattern {pattern[:80]!r}: should be printable, without {' '.join(reserved)} "
            "and blanks around it; ? stands for any character"
        )


def _around(path: str) -> list[str]:
    """The module paths around `path`: a.b.c is inside a.b and a."""
    return [path[: m.start()] for m in re.finditer(r"\.", path)]


def _matches(pattern: str, paths: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for path in paths)


def _shown(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers[:16])) + (",..." if len(numbers) > 16 else "")


def _runs(numbers: Sequence[int]) -> str:
    """`0,1,2,3,6` as `0-3,6`, which `_ranks` reads."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)


def _ranks(text: str, what: str) -> tuple[int, ...]:
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


def _setting(name: str, value: str) -> Any:
    """The value of an item `@name=value`."""
    match name:
        case "stages":
            stages = []
            for part in value.split("/"):
                ranks, _, patterns = part.partition(":")
                names = tuple(p.strip() for p in patterns.split(","))
                stages.append(Stage(_ranks(ranks, "stages"), names))
            return tuple(stages)
        case "rows":
            if not re.fullmatch(r"[0-9]{1,7}(\s*,\s*[0-9]{1,7})*", value):
                raise ValueError(f"rows={value[:60]}: should be shares like 3,3,2")
            return tuple(int(n) for n in value.split(","))
        case "ranks":
            return _ranks(value, "ranks")
        case "micro_batches" | "global_batch" | "pieces":
            if not re.fullmatch(r"[0-9]{1,10}", value):
                raise ValueError(f"{name}={value[:40]}: should be a whole number")
            return int(value)
        case _:
            return value


def _field(key: str, value: Any, path: str) -> Any:
    """The value of one key of the JSON form."""
    match key:
        case "default":
            return _word(value, path)
        case "overrides" | "stages":
            make = _override if key == "overrides" else _stage
            items = enumerate(document.sequence(value, path))
            return tuple(make(item, f"{path}[{i}]") for i, item in items)
        case "rows" | "ranks":
            return None if value is None else _integers(value, path)
        case "global_batch" | "pieces":
            return None if value is None else document.integer(value, path, 1, 2**31)
        case "micro_batches":
            return document.integer(value, path, 1, 2**31)
        case _:
            return document.text(value, path)


def _word(value: Any, path: str) -> LayoutSpec:
    text = document.text(value, path)
    with document.at(path):
        return LayoutSpec.parse(text)


def _override(value: Any, path: str) -> Override:
    item = document.mapping(value, path, ("pattern", "word"), ("pattern", "word"))
    pattern = document.text(item["pattern"], f"{path}.pattern")
    word = _word(item["word"], f"{path}.word")
    with document.at(path):
        return Override(pattern, word)


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
