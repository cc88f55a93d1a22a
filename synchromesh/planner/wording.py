"""The wording of a plan: the shortest text found for a layout of every component.

encoder.layer.0.attention  1x4        data; encoder.layer.*.attention=tensor
encoder.layer.0.mlp        4x1   ->
encoder.layer.1.attention  1x4
...

A pattern is made of the name of a component or of a module around it, each number in it being
itself, any (`*`), or one of the numbers around it under which all have the same layout (`4-17`).

The search decides for each component alone, and saves every millisecond: its plans have patterns
that bring next to nothing. And of blocks that take the same seconds and bytes it matters little
which ones save memory. So a plan has relatives of fewer words, to be priced beside it:

zero1 on 0 3 4 7, sharded-data on 1 2 5 6 8 9    ->    zero1 on 0-3, sharded-data on 4-9"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from synchromesh.planner.problem import PlanningProblem
from synchromesh.planner.uniform import UniformPartitions
from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Override, Plan
from synchromesh.values.plan_item import NUMBER, RANGE, around, matches

Form = tuple[str | None, ...]  # parts of a pattern; None: where a range may be
Forms = Mapping[Form, Mapping[int, Sequence[str]]]  # the components of each, by that number


def spec_of(layout: Layout) -> LayoutSpec:
    if layout.data == 1 and layout.tensor > 1:
        return LayoutSpec("tensor", recompute=layout.recompute)
    states, recompute = layout.shard_states, layout.recompute
    return LayoutSpec("hybrid", layout.tensor, states=states, recompute=recompute)


def worded(
    names: Sequence[str], layouts: Sequence[Layout],
    modules: Mapping[str, Sequence[str]] | None = None, free: Collection[str] = (),
    defaults: int = 3,
) -> Plan:  # fmt: skip
    """A plan under which each component has its layout; equal layouts give an equal plan. Those of
    `free` components follow from the model, so that they have none of their own in the plan. Of
    the plans that begin with one of the commonest layouts, the one of fewest words. defaults: how
    many of these are tried; chosen."""
    (devices,) = {layout.devices for layout in layouts}
    wanted = {n: x for n, x in zip(names, layouts, strict=True) if n not in free}
    count = Counter(wanted.values())
    order = sorted(count, key=lambda x: (-count[x], -x.data)) or [Layout(devices, 1)]
    paths = {n: (n, *around(n), *(modules or {}).get(n, ())) for n in names}
    forms: dict[Form, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        for form, number in _forms(name):
            forms[form][number].append(name)
    plans = [Plan(spec_of(x), _overrides(wanted, x, paths, forms)) for x in order[:defaults]]
    return min(plans, key=lambda plan: plan.words)


def _overrides(
    wanted: Mapping[str, Layout], default: Layout, paths: Mapping[str, Sequence[str]], forms: Forms
) -> tuple[Override, ...]:
    overrides: list[Override] = []
    named: set[str] = set()
    for name, layout in wanted.items():
        if layout == default or name in named:
            continue
        alike = {n for n in paths if wanted.get(n, layout) == layout}
        for pattern in _patterns(name, alike - named, forms):
            hits = {n for n, at in paths.items() if any(matches(pattern, p) for p in at)}
            if name in hits <= alike:
                overrides.append(Override(pattern, spec_of(layout)))
                named |= hits
                break
        else:  # one lies inside another: each by its name, outer ones first
            outer = sorted(wanted, key=lambda n: n.count("."))
            return tuple(Override(_literal(n), spec_of(wanted[n])) for n in outer)
    return tuple(overrides)


def _patterns(name: str, new: set[str], forms: Forms) -> list[str]:
    """That match the name: of most of `new` first, then with fewer ranges, then the closest."""
    hits_of = {_literal(name): 1}
    for form, number in _forms(name):
        at, first, last = forms[form], number, number
        if None in form:
            first, last = (_reached(at, number, new, step) for step in (-1, 1))
        numbers = str(number) if first == last else f"{first}-{last}"
        pattern = ".".join(numbers if part is None else part for part in form)
        hits = new.intersection(n for k in range(first, last + 1) for n in at[k])
        hits_of.setdefault(pattern, len(hits))
    rank = {p: (-hits, len(RANGE.findall(p)), -p.count(".")) for p, hits in hits_of.items()}
    return sorted(hits_of, key=rank.__getitem__)


def _reached(at: Mapping[int, Sequence[str]], number: int, new: set[str], step: int) -> int:
    """How far a range goes from a number on, all of whose names are new."""
    while number + step in at and new.issuperset(at[number + step]):
        number += step
    return number


def _forms(name: str, most: int = 3) -> Iterator[tuple[Form, int]]:
    """Patterns of a name and the modules around it, with the number for which a range may stand.
    most: numbers of a path that are generalised, each of which doubles the patterns."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if NUMBER.fullmatch(part)][:most]
    for end in range(1, len(parts) + 1):
        known = enumerate(parts[:end])
        ways = [(p, "*", None) if i in numbers else (_literal(p),) for i, p in known]
        for form in product(*ways):
            places = [i for i, part in enumerate(form) if part is None]
            if len(places) <= 1 and set(form) != {"*"}:
                yield form, int(parts[places[0]]) if places else 0


def _literal(name: str) -> str:
    """A pattern of this name alone and what is inside; `?` for what a plan's text cannot hold."""
    pattern = re.sub(r"([*?\[@])", r"[\1]", name)
    pattern = RANGE.sub(lambda match: f"[{match[0][0]}]{match[0][1:]}", pattern)
    return "".join("?" if c in "=;" or c.isspace() or not c.isprintable() else c for c in pattern)


def relatives(uniform: UniformPartitions, problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """Plans of fewer words: without one of the patterns of `plan`; and where it has one stage,
    with the layouts of components of equal programs in runs."""
    each = range(len(plan.overrides))
    plans = [replace(plan, overrides=plan.overrides[:i] + plan.overrides[i + 1 :]) for i in each]
    if not plan.stages:
        made = _in_runs(problem.layouts(plan), uniform)
        text = worded(problem.names, made, problem.modules, free=problem.step.coupling)
        plans.append(replace(plan, default=text.default, overrides=text.overrides))
    return [p for p in dict.fromkeys(plans) if p.words < plan.words]


def _in_runs(layouts: Sequence[Layout], uniform: UniformPartitions) -> list[Layout]:
    """The layouts, those of equal programs exchanged so that equal ones follow each other."""
    made, alike = list(layouts), defaultdict[object, list[int]](list)
    for i in range(len(made)):
        alike[tuple(p.components[i].program for p in uniform.partitions.values())].append(i)
    for its in alike.values():
        first = [made[i] for i in its].index
        for i, layout in zip(its, sorted((made[i] for i in its), key=first), strict=True):
            made[i] = layout
    return made
