"""A plan: how a model trains on K devices; a layout per component, stages, rows, rank order.

The text form is one line, `DEFAULT(; PATTERN=LAYOUT)*(; @SETTING=VALUE)*`, each item split at its
first `=`. DEFAULT and LAYOUT are layout specs (layout_spec.py):

    data; classifier=tensor; encoder.layer.*=hybrid:tensor=2; @rows=3,3,2

Patterns are matched against module paths as by fnmatch (`*` crosses dots), and a part of a path
like `4-17` is any number from 4 to 17 (`layers.4-17.mlp=tensor`): against a component's name, the
modules around it and those inside it. The last match wins; a pattern without match is an error.
Settings:

    @stages=0-1:embeddings/2-3:encoder.layer.6       ranks and first component of each pipeline
                              stage; ranks that come again have several (interleaved schedules)
    @micro_batches=4          into how many parts the global batch is cut, each of which then lies
                              on the data ranks of every stage
    @schedule=gpipe           in which order stages run them (1f1b, gpipe, interleaved,
                              zero-bubble, zero-bubble-2: with twice the memory; pipedream and
                              pipedream-2bw: weight_versions.py, where @versions=one is too)
    @global_batch=256         rows of a step over all ranks; a run with another example is refused
    @synchronisation=every-step                      or server:2, local:8: synchronisation.py
    @compression=classifier:powersgd:4,*:int8        what gradients are sent as: compression.py
    @servers=4,5              ranks that serve and compute no rows
    @rows=3,3,2                                      shares of the rows, largest data degree
    @ranks=0,2,1                                     order of the ranks; those left out are idle
    @pieces=4                 into how many parts a step's rows are divided whose computation and
                              traffic overlap (not given: one and four are tried in the first
                              steps)

`Plan.parse(str(plan)) == plan`; JSON and YAML forms say the same with one key per field."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from synchromesh.values import compression, document, plan_item
from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import MOST, LayoutSpec
from synchromesh.values.plan_item import SETTINGS, Override, Stage
from synchromesh.values.schedule import SCHEDULES
from synchromesh.values.synchronisation import EVERY_STEP, Synchronisation, synchronisation
from synchromesh.values.weight_versions import WeightVersions, kept_versions

__all__ = ["SCHEDULES", "LayoutSpec", "Override", "Plan", "Stage"]


@dataclass(frozen=True)
class Plan(document.Document):
    """A frozen value; equal plans have equal texts."""

    yaml_flow = None
    default: LayoutSpec
    overrides: tuple[Override, ...] = ()
    stages: tuple[Stage, ...] = ()  # empty: as many equal ones as the default says
    micro_batches: int = 1
    schedule: str = "1f1b"
    global_batch: int | None = None  # None: as the caller's loader says
    synchronisation: str = EVERY_STEP
    rows: tuple[int, ...] | None = None  # None: equal shares
    ranks: tuple[int, ...] | None = None  # None: 0, 1, 2, ... all of them
    pieces: int | None = None  # that take turns; None: tried in the first steps
    compression: str = compression.NONE  # of gradients
    servers: tuple[int, ...] | None = None  # ranks that compute no rows; None: workers serve too
    versions: str = "own"  # of weights (weight_versions.py)

    def __post_init__(self) -> None:
        self._join_micro_batches()
        object.__setattr__(self, "compression", compression.canonical(self.compression))
        checked = (
            "schedule", "synchronisation", "micro_batches", "global_batch", "pieces", "rows",
            "versions",
        )  # fmt: skip
        faults = (plan_item.setting_fault(name, getattr(self, name)) for name in checked)
        if fault := next(filter(None, faults), self._rank_fault()):
            raise ValueError(fault)

    def _rank_fault(self) -> str:
        """What is wrong with the ranks of stages, or with their order."""
        if self.stages and (self.ranks is not None or (self.default.stages or 1) > 1):
            return "stages with their own ranks exclude @ranks and pipeline:stages=N"
        if faults := plan_item.stage_faults(self.stages):
            return "; ".join(faults)
        order = self.ranks or self._stage_ranks()
        if fault := plan_item.servers_fault(self.servers, self.synchronisation, self.sync.servers):
            return fault
        wrong = len(set(order)) < len(order) or any(not 0 <= r < MOST.degree for r in order)
        if self.ranks == () or wrong:
            ranks = plan_item.show_numbers(order)
            return f"ranks={ranks}: each rank once, none negative, at least one"
        return ""

    def _join_micro_batches(self) -> None:
        """`pipeline:microbatches=4` and `micro_batches=4` are the same fact."""
        if self.default.name != "pipeline":
            return
        stated = {n for n in (self.default.microbatches, self.micro_batches) if n and n > 1}
        if len(stated) > 1:
            raise ValueError(
                f"microbatches={self.default.microbatches} in {self.default} "
                f"and micro_batches={self.micro_batches} differ"
            )
        number = max(stated, default=1)
        object.__setattr__(self, "default", replace(self.default, microbatches=number))
        object.__setattr__(self, "micro_batches", number)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that a text says. ValueError with the item at fault."""
        first, *items = (item.strip() for item in text.strip().split(";"))
        if not first:
            raise ValueError("an empty plan: begin with a layout, like data or hybrid:tensor=2")
        overrides: list[Override] = []
        settings: dict[str, Any] = {}
        for item in items:
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not key or not value:
                raise ValueError(f"{item[:80]!r} should read PATTERN=LAYOUT or @SETTING=VALUE")
            if not key.startswith("@"):
                overrides.append(Override(key, LayoutSpec.parse(value)))
            elif key[1:] in settings:
                raise ValueError(f"the setting {key} stands there twice")
            else:
                settings[key[1:]] = plan_item.parse_setting(key[1:], value)
        return cls(LayoutSpec.parse(first), tuple(overrides), **settings)

    def __str__(self) -> str:
        items = [str(self.default), *(f"{o.pattern}={o.spec}" for o in self.overrides)]
        for name in SETTINGS:
            value = getattr(self, name)
            in_default = name == "micro_batches" and self.default.name == "pipeline"
            if value != _DEFAULTS[name] and not in_default:
                items.append(f"@{name}={plan_item.show_setting(name, value)}")
        return "; ".join(items)

    @property
    def words(self) -> int:
        """Names and values in the text but for @pieces, which need not be read to know a plan."""
        return len(re.findall(r"[^;=:,/\s]+", str(replace(self, pieces=None))))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, texts and numbers, one key per field that differs from its default."""
        out: dict[str, Any] = {"default": str(self.default)}
        if self.overrides:
            items = self.overrides
            out["overrides"] = [{"pattern": o.pattern, "word": str(o.spec)} for o in items]
        if self.stages:
            out["stages"] = [{"ranks": list(s.ranks), "first": s.first} for s in self.stages]
        for name in SETTINGS[1:]:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, value: Any, name: str = "plan") -> "Plan":
        """The plan that `to_dict` described. ValueError with the path and key at fault."""
        known = document.mapping(value, name, ("default", "overrides", *SETTINGS), ("default",))
        given = {k: plan_item.read_field(k, v, f"{name}: {k}") for k, v in known.items()}
        with document.at(name):
            return cls(**given)

    @property
    def automatic(self) -> bool:
        """Whether the planner is to find the plan: `auto` alone."""
        return self == Plan(LayoutSpec("auto"))

    @property
    def specs(self) -> tuple[LayoutSpec, ...]:
        """Every layout that the plan states: the default, then the overrides'."""
        return self.default, *(o.spec for o in self.overrides)

    @property
    def stage_count(self) -> int:
        return len(self.stages) or self.default.stages or 1

    @property
    def open_cuts(self) -> bool:
        """Whether the plan has stages of which it does not say where they begin (`cut`)."""
        return not self.stages and self.stage_count > 1

    def _stage_ranks(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(r for s in self.stages for r in s.ranks))

    def order(self, world: int) -> tuple[int, ...]:
        """The ranks that take part, in the plan's order, those that serve alone first."""
        order, first = self.ranks or self._stage_ranks() or tuple(range(world)), self.servers or ()
        return (*first, *(r for r in order if r not in first))

    def devices(self, world: int) -> tuple[int, ...]:
        """Those of `world`, in this order; the others are idle."""
        order = self.order(world)
        beyond = sorted(r for r in order if r >= world)
        if beyond:
            raise ValueError(
                f"the plan names rank {plan_item.show_numbers(beyond)}, "
                f"but there are {world} ranks (0 to {world - 1})"
            )
        return order[:1] if self.default.name == "single" and not self.stages else order

    def cut(self, firsts: Sequence[str], world: int) -> "Plan":
        """The plan with stages that begin with the components `firsts`, on equal groups of
        neighbouring ranks; under the interleaved schedule each group comes twice."""
        order, stages = self.devices(world), self.stage_count
        assert len(firsts) == stages, f"{stages} stages begin with {firsts}"
        groups = stages // 2 if self.schedule == "interleaved" else stages
        if self.schedule == "interleaved" and stages % 2:
            raise ValueError(
                f"{self.default}; @schedule=interleaved: each rank has two stages, so their "
                f"number is even, not {stages}; @stages=... says it by itself"
            )
        if len(order) % groups:
            raise ValueError(
                f"{self.default}: {groups} groups of equally many ranks do not divide "
                f"{len(order)} devices; @stages=... gives stages of any size, @ranks=... leaves "
                "devices idle"
            )
        size = len(order) // groups
        ranks = [order[g * size : (g + 1) * size] for g in range(groups)]
        made = tuple(Stage(ranks[s % groups], first) for s, first in enumerate(firsts))
        return replace(self, default=self.default.of_stage, stages=made, ranks=None)

    def layouts(
        self, names: Sequence[str], world: int, modules: Mapping[str, Sequence[str]] | None = None
    ) -> tuple[Layout, ...]:
        """The layout of each component in `names`; `modules` are the module paths inside each. All
        faults at once: patterns that match nothing, degrees that do not multiply to the devices,
        shares of rows that do not fit the largest data degree."""
        inside = modules or {}
        paths = {name: (name, *plan_item.around(name), *inside.get(name, ())) for name in names}
        groups = self._groups(names, paths, world)
        specs, faults = self._specs(paths)
        layouts: list[Layout] = []
        for name, spec in specs.items():
            try:
                layouts.append(replace(spec.layout(len(groups[name])), first=groups[name].start))
            except ValueError as error:
                faults.append(str(error))
        faults = faults or [*filter(None, [self._fault_of_all(layouts, world)])]
        if faults:
            raise ValueError("; ".join(dict.fromkeys(faults)))
        return tuple(layouts)

    def _specs(
        self, paths: Mapping[str, Sequence[str]]
    ) -> tuple[dict[str, LayoutSpec], list[str]]:
        """The spec of each component, and a fault for each pattern that matches none of them."""
        specs, faults = dict.fromkeys(paths, self.default), []
        for override in self.overrides:
            matches = partial(plan_item.matches, override.pattern)
            hits = [name for name, where in paths.items() if any(map(matches, where))]
            specs.update(dict.fromkeys(hits, override.spec))
            if not hits:
                known = list(dict.fromkeys(path for where in paths.values() for path in where))
                faults.append(plan_item.unmatched(override.pattern, list(paths), known))
        return specs, faults

    def _fault_of_all(self, layouts: Sequence[Layout], world: int) -> str:
        """What is wrong with layouts together of which each alone is right."""
        degrees = [layout.data for layout in layouts if layout.shard_states != "none"]
        if degrees and max(degrees) == 1 < len(self.devices(world)):
            return (
                f"{self}: every component whose states are to be sharded has one data rank, so "
                "there is nothing to shard over: leave the states out, or give stages more ranks"
            )
        largest = max((layout.data for layout in layouts), default=1)
        workers = largest - len(self.servers or ())
        word, count = self.synchronisation, self.sync.servers
        if fault := plan_item.too_many_servers(self.servers, word, count, largest):
            return fault
        if self.rows is not None and len(self.rows) != workers:
            return (
                f"@rows has {len(self.rows)} shares ({plan_item.show_numbers(self.rows)}), "
                f"but the largest data degree is {workers}"
            )
        return ""

    def _groups(
        self, names: Sequence[str], paths: Mapping[str, Sequence[str]], world: int
    ) -> dict[str, range]:
        order = self.devices(world)
        if not self.stages:
            self.check_components(len(names))
            if self.open_cuts:
                raise ValueError(f"{self.default} does not say where stages begin: `cut` it first")
            return dict.fromkeys(names, range(len(order)))
        starts = plan_item.stage_starts(self.stages, paths)
        groups = {}
        for stage, start, end in zip(self.stages, starts, [*starts[1:], len(names)], strict=True):
            first = order.index(stage.ranks[0])
            for name in names[start:end]:
                groups[name] = range(first, first + len(stage.ranks))
        return groups

    def cuts(self, module_names: Sequence[str]) -> tuple[str, ...]:
        """The module paths that patterns name, for the trace to cut there: the outermost of those
        that one matches (`encoder.*` names the children of the encoder, not all below them)."""
        patterns = [o.pattern for o in self.overrides] + [s.first for s in self.stages]
        named = set().union(*(_outermost(pattern, module_names) for pattern in patterns))
        return tuple(n for n in module_names if n in named)

    def row_ranges(self, rows: int, data: int) -> tuple[tuple[int, int], ...]:
        """The global batch rows [start, stop) of each data index of a component.

        Range i ends at ceil(rows * share), where `share` is the part of all rows that the indices
        0 to i have: (i + 1) / data, or as the plan's shares say. It depends on that fraction
        alone, so the ranges of a degree are unions of those of its multiples:

            10 rows, degree 4    0 1 2 | 3 4 | 5 6 7 | 8 9
                     degree 2    0 1 2   3 4 | 5 6 7   8 9"""
        ends = [0, *(-(-rows * s.numerator // s.denominator) for s in self._shares(data))]
        return tuple(pairwise(ends))

    def check_components(self, count: int, why: str = "") -> None:
        """ValueError where a model of `count` components has fewer than there are stages; why:
        the reason for so few."""
        if self.stage_count > count:
            raise ValueError(
                f"{self.default}: {self.stage_count} stages, but the model has {count} "
                f"component{'s' if count > 1 else ''}{f' ({why})' if why else ''}: take at most "
                f"{count} stage{'s' if count > 1 else ''}"
                f"{'' if why else ', or name modules at which to cut it, as MODULE=data does'}"
            )

    def check_rows(self, rows: int) -> None:
        """ValueError where `rows` are not those of @global_batch, or too few to be cut."""
        if self.global_batch not in (None, rows):
            raise ValueError(
                f"plan {str(self)!r}: @global_batch={self.global_batch}, but the global batch has "
                f"{rows} rows: give batches of {self.global_batch} rows, or leave it out"
            )
        if self.micro_batches > rows:
            raise ValueError(
                f"plan {str(self)!r}: a global batch of {rows} rows cannot be cut into "
                f"{self.micro_batches} micro-batches, each of which has a row at least: give "
                "larger batches, or cut them into fewer"
            )

    def micro_rows(self, rows: int) -> tuple[tuple[int, int], ...]:
        """The global batch rows [start, stop) of each micro-batch; of those that have any."""
        ends = [-(-rows * i // self.micro_batches) for i in range(self.micro_batches + 1)]
        return tuple((a, b) for a, b in pairwise(ends) if a < b)

    def own_rows(self, rows: int, data: int, index: int) -> tuple[tuple[int, int], ...]:
        """The global batch rows [start, stop) of a data index: its part of each micro-batch.

        12 rows in 2 micro-batches      0 1 2 3 4 5 | 6 7 8 9 10 11
        index 1 of 3                        2 3           8 9"""
        own = []
        for start, stop in self.micro_rows(rows):
            first, last = self.row_ranges(stop - start, data)[index]
            own.append((start + first, start + last))
        return tuple(own) or ((0, 0),)

    def _shares(self, data: int) -> list[Fraction]:
        """The part of the rows before index 1, 2, ..., `data`; servers of their own have none."""
        servers = len(self.servers or ())
        own = self.rows or (1,) * (data - servers)  # nothing of a degree that has no servers
        return plan_item.shares((0,) * servers + own if own else (1,), data)

    @cached_property
    def sync(self) -> Synchronisation:
        """How its workers agree."""
        return synchronisation(self.synchronisation)

    @property
    def divides(self) -> bool:
        """Whether the gradients of weights are made apart from those of inputs."""
        return self.stage_count > 1 and self.schedule.startswith("zero-bubble")

    @cached_property
    def kept(self) -> WeightVersions | None:
        """Of a pipeline without a flush."""
        return kept_versions(self.schedule, self.stage_count, self.versions)

    @property
    def compressed(self) -> bool:
        return self.compression != compression.NONE

    @property
    def exact(self) -> bool:
        """Whether it computes what one device does."""
        return self.sync.exact and not (self.compressed or self.kept)

    @property
    def usual(self) -> bool:
        """Whether the planner could have found it: sums of whole gradients in every step."""
        return self.sync.usual and not (self.compressed or self.kept)


def _outermost(pattern: str, module_names: Sequence[str]) -> set[str]:
    """The modules that a pattern matches and that are inside of no other such one."""
    hits = {n for n in module_names if n and plan_item.matches(pattern, n)}
    return {n for n in hits if hits.isdisjoint(plan_item.around(n))}


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Plan)}
