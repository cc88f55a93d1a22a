"""Extras: what parts of the package need that a plain installation does not bring."""

from collections.abc import Mapping
from importlib.util import find_spec

EXTRAS: Mapping[str, tuple[str, ...]] = {  # modules, as they are imported
    "workloads": ("transformers", "sklearn", "PIL", "pycocotools"),
    "report": ("matplotlib", "jinja2"),
    "tensorboard": ("tensorboardX",),
    "lightning": ("pytorch_lightning",),
    "elastic": ("torchft",),
    "transformers": ("transformers", "accelerate"),
}


def remedy(module: str, extra: str = "") -> str:
    """A sentence for one that is missing; empty where no extra has it. extra: the one to name."""
    extra = extra or next((extra for extra, modules in EXTRAS.items() if module in modules), "")
    told = f"{module} is not installed: pip install 'synchromesh[{extra}]'"
    return told if extra else ""


def require(extra: str) -> None:
    """ValueError where a module of the extra is missing."""
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            raise ValueError(remedy(module, extra))
