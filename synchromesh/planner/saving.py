"""Plans that need less memory than another one: states sharded, activations computed again.

They are slower than what they are made of, so they are asked for where a quick plan does not fit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from synchromesh.planner.candidate import Candidate
from synchromesh.values.layout import ShardStates
from synchromesh.values.layout_spec import OPTIONS, LayoutSpec
from synchromesh.values.plan import Plan


def savings(found: Sequence[Candidate]) -> list[Plan]:
    """What might fit, of the candidates that do not and are quicker than any that does."""
    least = min((c.seconds for c in found if c.fits), default=inf)
    large = [c.plan for c in found if c.time is not None and not c.fits and c.seconds < least]
    return list(dict.fromkeys(saving for plan in large for saving in _savings(plan)))


def _savings(plan: Plan) -> Iterator[Plan]:
    """Every level of sharding that frees more than the one before, without and with
    recomputation. Gradients of one micro-batch are sharded when they are there, whatever the
    level."""
    levels: list[ShardStates] = ["none", "optimizer", "parameters"]
    if plan.micro_batches > 1:
        levels.insert(2, "gradients")
    for states, recompute in product(levels, (False, True)):
        made = replace(
            plan,
            default=_spec(plan.default, states, recompute),
            overrides=tuple(
                replace(o, spec=_spec(o.spec, states, recompute)) for o in plan.overrides
            ),
        )
        if made != plan:
            yield made


def _spec(spec: LayoutSpec, states: ShardStates, recompute: bool) -> LayoutSpec:
    """The spec with what its layout allows: states are sharded over data ranks."""
    if spec.name == "sharded-data":
        spec = LayoutSpec("data")
    level = states if "states" in OPTIONS[spec.name] else "none"
    return replace(spec, states=level, recompute=recompute)
