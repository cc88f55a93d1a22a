"""Initial values of a model on the meta device: module after module, of which each rank keeps its
own shards.

The tensors of one module come into being at a time; all others stay on the meta device, where
initialisers cost nothing and change nothing. So the module's own initialiser can run and those of
the modules around it, which initialise parts of it in many models.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from synchromesh.engine.model import Model
from synchromesh.engine.random import mix


def initial_values(
    model: Model, seed: int, device: torch.device, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Complete tensors by name, but for `without`, in the order of the modules that own them;
    keep one at a time.

    `reset_parameters` of modules (torch) or `_init_weights` of models (transformers) fill them,
    from a seed of (seed, the module's place), so that every rank makes equal values. ValueError
    for a tensor that nobody fills.
    """
    done = set(without)
    modules = dict(model.module.named_modules())
    for index, (path, module) in enumerate(modules.items()):
        own = {n: k for part, k, n in model.slots if part is module and n not in done}
        own = {n: k for n, k in own.items() if getattr(module, k).is_meta}
        if not own:
            continue
        done |= own.keys()
        around = [modules[p] for p in _around(path)]  # the innermost first
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            _real(module, own.values(), device),
        ):
            torch.manual_seed(mix(seed, index))
            with torch.no_grad():
                for initialise in _initialisers(around):
                    initialise()
            values = {n: getattr(module, k).detach() for n, k in own.items()}
        missed = [n for n, value in values.items() if _untouched(value)]
        if missed:
            raise ValueError(
                f"{missed[0]} of {path or 'the model'} ({type(module).__name__}) is on the meta "
                "device and nothing "
                "initialises it: give its module a reset_parameters, or start from weights with "
                "prepare(..., weights='model.safetensors' or a checkpoint)"
            )
        while values:  # so that the caller alone has a reference
            yield values.popitem()


def _around(path: str) -> list[str]:
    """`a.b`, `a` and the model itself for `a.b`."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _initialisers(around: list[nn.Module]) -> Iterator[Callable[[], object]]:
    """What initialises a module: its own initialiser and those of the modules around it, as a
    constructor would.
    """
    for place, part in enumerate(around):
        # transformers: the nearest model around a module says how it is initialised
        of_model = next((m for m in around[place:] if hasattr(m, "_init_weights")), None)
        if of_model is not None:
            yield lambda m=of_model, p=part: m._init_weights(p)  # type: ignore[misc]
            continue
        for name in ("reset_parameters", "_reset_parameters"):
            own = getattr(part, name, None)
            if callable(own):
                yield own
                break


@contextmanager
def _real(module: nn.Module, keys: Collection[str], device: torch.device) -> Iterator[None]:
    """`module` with real tensors under `keys`, marked as untouched; afterwards as it was."""
    kept = {key: getattr(module, key) for key in keys}
    try:
        for key, old in kept.items():
            mark = torch.empty(old.shape, dtype=old.dtype, device=device)
            if old.is_floating_point() or old.is_complex():
                mark.fill_(torch.nan)
            elif old.dtype != torch.bool:
                mark.fill_(torch.iinfo(old.dtype).max)
            setattr(
                module,
                key,
                nn.Parameter(mark, old.requires_grad) if isinstance(old, nn.Parameter) else mark,
            )
        yield
    finally:
        for key, old in kept.items():
            setattr(module, key, old)


def _untouched(value: Tensor) -> bool:
    if not value.numel() or value.dtype == torch.bool:
        return False
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).max).any())
