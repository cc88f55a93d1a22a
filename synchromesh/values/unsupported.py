"""What plans may say that this version of the engine does not execute."""

from collections.abc import Collection, Iterable

from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.schedule import UNFLUSHED
from synchromesh.values.weight_versions import OWN


def unsupported(plan: Plan) -> tuple[str, ...]:
    """A sentence each, with what to write instead."""
    sharded = any(spec.states != "none" for spec in plan.specs)
    faults = _of_stages(plan, sharded) | _of_workers(plan, sharded) | _unflushed(plan, sharded)
    return tuple(sentence for sentence, found in faults.items() if found)


def _of_stages(plan: Plan, sharded: bool) -> dict[str, bool]:
    staged = plan.stage_count > 1
    return {
        "auto is found by the planner: write it alone": plan.default.name == "auto",
        f"@schedule={plan.schedule} makes the gradients of weights when sharded parameters "
        "are gone again: use 1f1b, or leave sharded states (states=, sharded-data) and "
        "servers out": plan.divides and (sharded or plan.sync.word == "server"),
        "@pieces take turns inside one stage: leave them out, or the stages":
            staged and (plan.pieces or 1) > 1,
        "@rows of several stages are not executed yet: leave them out":
            staged and plan.rows is not None,
        "@servers of tensor ranks or stages are not executed yet: write data, or leave @servers "
        "out, and workers serve":
            plan.servers is not None and (staged or any(_of_tensor(s) for s in plan.specs)),
    }  # fmt: skip


def _of_workers(plan: Plan, sharded: bool) -> dict[str, bool]:
    word, sync = plan.synchronisation, plan.sync
    return {
        f"{word}: sums that come late are of gradients that every rank gets whole, as they are: "
        "leave sharded states (states=, sharded-data) and @compression, or @synchronisation out":
            sync.late > 0 and (sharded or plan.compressed),
        f"{word} has a whole optimizer state on each worker, which trains alone: leave "
        "sharded states (states=, sharded-data) or @synchronisation out":
            sync.alone and sharded,
        "hogwild over tensor ranks, which need equal parameters, is not executed: write data, "
        "or stages of data": sync.in_common and any(_of_tensor(s) for s in plan.specs),
        f"{word}: servers have the optimizer's states, which data ranks cannot have as well: "
        "leave sharded states (states=, sharded-data) or servers out":
            sync.servers > 0 and sharded,
        f"@compression={plan.compression} is of sums that every rank gets whole: leave sharded"
        " states (states=, sharded-data) and servers, or @compression out":
            plan.compressed and (sharded or sync.servers > 0),
        f"workers that train alone ({word}) send no gradients that could be compressed: leave "
        "@synchronisation or @compression out": plan.compressed and sync.alone,
    }  # fmt: skip


def _unflushed(plan: Plan, sharded: bool) -> dict[str, bool]:
    """Of pipelines without a flush."""
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    inexact = not plan.sync.usual or plan.compressed
    return {
        f"@schedule={plan.schedule} is of stages: write pipeline:stages=2,microbatches=4 with "
        "it, or @stages": plan.schedule in UNFLUSHED and plan.stage_count == 1,
        f"@versions={plan.versions} is of @schedule=pipedream: write that, or leave it out":
            plan.versions != OWN and plan.schedule != "pipedream",
        f"@schedule={plan.schedule} has one stage on each rank: leave ranks out that come again":
            plan.kept is not None and len(ranks) > len({*ranks}),
        f"@schedule={plan.schedule} steps by whole gradients that its stages have: leave sharded "
        "states (states=, sharded-data), @synchronisation and @compression out":
            plan.kept is not None and (sharded or inexact),
    }  # fmt: skip


def _of_tensor(spec: LayoutSpec) -> bool:
    return spec.name in ("tensor", "hybrid") and spec.tensor != 1


def refuse_apart(plan: Plan, layouts: Collection[Layout], placed: Iterable[Holding]) -> None:
    """ValueError where workers that train alone are not the same for all components."""
    if not plan.sync.alone:
        return
    meshes = {layout.mesh for layout in layouts}
    odd = (h.tensor.name for h in placed if h.averaged and h.layout.mesh not in meshes)
    name, why = next(odd, ""), ""
    if len({mesh.data for mesh in meshes}) > 1:
        why = "components have several data degrees"
    elif name:
        why = f"{name} is used under several layouts"
    if why:
        raise ValueError(
            f"plan {str(plan)!r}: {why}, and workers that train alone have one of all: give all "
            "components one layout, or leave @synchronisation out"
        )
