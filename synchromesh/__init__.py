"""Synchromesh: trains a PyTorch model over the devices you have, under a plan per component.

Names are imported when they are first used, so that `synchromesh --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synchromesh.cluster import Cluster as Cluster
    from synchromesh.component import Chain as Chain
    from synchromesh.component import Component as Component
    from synchromesh.layout import Layout as Layout
    from synchromesh.plan import Plan as Plan
    from synchromesh.planning import Planned as Planned
    from synchromesh.planning import plan as plan
    from synchromesh.preparing import prepare as prepare
    from synchromesh.trainer import Moved as Moved
    from synchromesh.trainer import Trainer as Trainer
    from synchromesh.workload import Workload as Workload

__version__ = "0.1.0"

_HOME = {
    "Chain": "component",
    "Cluster": "cluster",
    "Component": "component",
    "Layout": "layout",
    "Moved": "trainer",
    "Plan": "plan",
    "Planned": "planning",
    "Trainer": "trainer",
    "Workload": "workload",
    "prepare": "preparing",
}
__all__ = sorted([*_HOME, "__version__", "plan"])  # pyright: ignore[reportUnsupportedDunderAll]


# The module `synchromesh.plan` and the function `plan` share a name. Whichever comes last is the
# attribute, so the module comes first: nobody asks for it by attribute.
importlib.import_module(f"{__name__}.plan")
if not TYPE_CHECKING:

    def plan(*args: Any, **settings: Any) -> Any:
        """See `synchromesh.planning.plan`: a plan for devices that need not be there."""
        return importlib.import_module(f"{__name__}.planning").plan(*args, **settings)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
