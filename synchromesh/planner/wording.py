"""The wording of a plan: the shortest text found for a layout of every component.

encoder.layer.0.attention  1x4        data; encoder.layer.*.attention=tensor
encoder.layer.0.mlp        4x1   ->
encoder.layer.1.attention  1x4
...
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Override, Plan


def spec_of(layout: Layout) -> LayoutSpec:
    """The spec whose layout this is."""
    if layout.data == 1 and layout.tensor > 1:
        return LayoutSpec("tensor", recompute=layout.recompute)
    return LayoutSpec(
        "hybrid", layout.tensor, states=layout.shard_states, recompute=layout.recompute
    )


def worded(
    names: Sequence[str],
    layouts: Sequence[Layout],
    modules: Mapping[str, Sequence[str]] | None = None,
    free: Collection[str] = (),
) -> Plan:
    """A plan under which each component has its layout; equal layouts give an equal plan. Those of
    `free` components follow from the model, so that they have none of their own in the plan.

    The commonest layout is the default; the others are patterns with numbers replaced by `*`
    where that matches no component of another layout, else names.
    """
    devices = layouts[0].devices
    assert all(layout.devices == devices for layout in layouts)
    count = Counter(x for n, x in zip(names, layouts, strict=True) if n not in free)
    default = max(count, key=lambda x: (count[x], x.data), default=Layout(devices, 1))
    layouts = [default if n in free else x for n, x in zip(names, layouts, strict=True)]
    wanted = dict(zip(names, layouts, strict=True))
    overrides: list[Override] = []
    named: set[str] = set()
    for name, layout in wanted.items():
        if layout == default or name in named:
            continue
        for pattern in _patterns(name):
            trial = Plan(spec_of(default), (Override(pattern, spec_of(layout)),))
            found = trial.layouts(names, devices, modules)
            hit = {n for n, x in zip(names, found, strict=True) if x == layout}
            if all(wanted[n] == layout for n in hit) and name in hit:
                overrides.append(Override(pattern, spec_of(layout)))
                named |= hit
                break
    plan = Plan(spec_of(default), tuple(overrides))
    if plan.layouts(names, devices, modules) != tuple(layouts):  # one lies inside another
        outer_first = sorted(wanted, key=lambda n: n.count("."))
        overrides = [Override(_literal(n), spec_of(wanted[n])) for n in outer_first]
        plan = Plan(spec_of(default), tuple(overrides))
    assert plan.layouts(names, devices, modules) == tuple(layouts), f"{plan} is not {layouts}"
    return plan


def _patterns(name: str) -> list[str]:
    """From the most general to the very name: numbers starred from the right, then all."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if re.fullmatch(r"\d+", part)]
    found = []
    for keep in range(len(numbers) + 1):
        starred = set(numbers[keep:])
        found.append(".".join("*" if i in starred else _literal(p) for i, p in enumerate(parts)))
    return [p for p in found if p.strip("*.")] + [_literal(name)]


def _literal(name: str) -> str:
    """A pattern that matches this name alone, and what lies inside it; `?` stands for what a
    plan's text cannot hold."""
    pattern = re.sub(r"([*?\[@])", r"[\1]", name)
    return "".join("?" if c in "=;" or c.isspace() or not c.isprintable() else c for c in pattern)
