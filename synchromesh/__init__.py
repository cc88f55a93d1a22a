"""Synchromesh: trains a PyTorch model over the devices you have, under a plan per component.

Names are imported when they are first used, so that `synchromesh --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from synchromesh.values.version import VERSION

if TYPE_CHECKING:
    from synchromesh.checkpoint.switch import Moved as Moved
    from synchromesh.launcher.function import launch as launch
    from synchromesh.planning.offline import Planned as Planned
    from synchromesh.planning.offline import plan as plan
    from synchromesh.planning.simulation import simulate as simulate
    from synchromesh.simulator.simulated import Simulated as Simulated
    from synchromesh.training.events import FitResult as FitResult
    from synchromesh.training.fit import fit as fit
    from synchromesh.training.prepare import prepare as prepare
    from synchromesh.training.trainer import Trainer as Trainer
    from synchromesh.values.cluster import Cluster as Cluster
    from synchromesh.values.component import Chain as Chain
    from synchromesh.values.component import Component as Component
    from synchromesh.values.layout import Layout as Layout
    from synchromesh.values.plan import Plan as Plan
    from synchromesh.workloads.workload import Workload as Workload

__version__ = VERSION

_HOME = {
    "Chain": "values.component",
    "Cluster": "values.cluster",
    "Component": "values.component",
    "FitResult": "training.events",
    "Layout": "values.layout",
    "Moved": "checkpoint.switch",
    "Plan": "values.plan",
    "Planned": "planning.offline",
    "Simulated": "simulator.simulated",
    "Trainer": "training.trainer",
    "Workload": "workloads.workload",
    "fit": "training.fit",
    "launch": "launcher.function",
    "plan": "planning.offline",
    "prepare": "training.prepare",
    "simulate": "planning.simulation",
}
__all__ = sorted([*_HOME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
