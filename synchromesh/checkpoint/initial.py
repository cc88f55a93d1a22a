"""Initial values of a model on the meta device, module after module; ranks keep their shards.

The tensors of one module come into being at a time; all others stay on the meta device, where
initialisers cost nothing and change nothing. So the module's own initialiser can run and those of
the modules around it, which initialise parts of it in many models."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from synchromesh.programs.model import Model
from synchromesh.programs.random import mix
from synchromesh.trace.capture.model_snapshot import attributes_of


def initial_values(
    model: Model, seed: int, device: torch.device, without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Complete tensors by name, but for `without`, in the order of the modules that own them; keep
    one at a time. `reset_parameters` of modules (torch) or `_init_weights` of models
    (transformers) fill them, from a seed of (seed, the module's place), so that every rank makes
    equal values. ValueError for a tensor that nobody fills."""
    for values in _by_module(model, seed, device, without):
        if missed := [n for n, value in values.items() if _untouched(value)]:
            raise ValueError(_uninitialised(model, missed))
        while values:  # so that the caller alone has a reference
            yield values.popitem()


def _by_module(
    model: Model, seed: int, device: torch.device, without: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """Of each module with tensors on the meta device, these as they are initialised, if at all."""
    done = {n for n in model.described if not model.local(n).is_meta} | set(without)
    modules = dict(model.module.named_modules())
    with _on_meta(model):
        for index, (path, module) in enumerate(modules.items()):
            own = {n: k for part, k, n in model.slots if part is module and n not in done}
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
            yield values


def refuse_uninitialised(
    model: Model, device: torch.device, without: Collection[str] = ()
) -> None:
    """ValueError that names the tensors on the meta device, but for `without`, that no initialiser
    fills; takes no longer than initialisers on the meta device."""
    on_meta = {n for n in model.described if (x := model.local(n)).is_meta and x.numel()}
    missed = on_meta - set(without)
    missed -= _written(model) if missed else set()
    if not missed:
        return
    # an initialiser may do less on the meta device: with values, it tells; a bool never does
    lacking: list[str] = []
    for values in _by_module(model, 0, device, model.described.keys() - missed):
        lacking += [n for n, x in values.items() if _untouched(x) or x.dtype is torch.bool]
    if lacking:
        raise ValueError(_uninitialised(model, lacking))


def refuse_lost_attributes(model: nn.Module) -> None:
    """ValueError that names attributes on the meta device that are no parameters or buffers."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    attributes = ((n, table[key]) for n, table, key in attributes_of(model) if n not in buffers)
    if lost := [n for n, x in attributes if isinstance(x, Tensor) and x.is_meta]:
        raise ValueError(
            f"{', '.join(lost)}: tensors on the meta device that the model computes with and that "
            "are neither parameters nor buffers, so that nothing gives them values: register them "
            "as buffers that a reset_parameters of their module fills, or make them with "
            "device='cpu'"
        )


class _Writes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(x, Tensor):
                        self.storages.add(x.untyped_storage()._cdata)
        return func(*args, **kwargs)


def _written(model: Model) -> set[str]:
    """Names of the tensors that initialisers write to, or make anew, on the meta device."""
    modules = dict(model.module.named_modules())
    written = set()
    with torch.random.fork_rng([]), torch.no_grad(), _on_meta(model), _Writes() as writes:
        before = [getattr(part, key) for part, key, _ in model.slots]
        storages = [x.untyped_storage()._cdata for x in before]
        for path in modules:
            around = [modules[p] for p in _around(path)]
            for initialise in itertools.islice(_initialisers(around), 1):
                with suppress(Exception):  # it needs values; with these it is asked again
                    initialise()
        for (part, key, name), old, storage in zip(model.slots, before, storages, strict=True):
            anew = getattr(part, key) is not old or old.untyped_storage()._cdata != storage
            if anew or storage in writes.storages:
                written.add(name)
            setattr(part, key, old)
    return written


def _uninitialised(model: Model, names: Sequence[str], shown: int = 3) -> str:
    """A sentence about tensors that nothing initialises, with what would; it names `shown`."""
    owners = {name: part for part, _, name in reversed(model.slots)}
    paths = {part: path for path, part in model.module.named_modules()}

    def place(name: str) -> str:
        part = owners[name]
        return f"{name} of {paths[part] or 'the model'} ({type(part).__name__})"

    named = ", ".join(map(place, names[:shown])) + (" ..." if len(names) > shown else "")
    remedy = "or start from weights with prepare(..., weights='model.safetensors' or a checkpoint)"
    if any(name not in model.persistent for name in names):
        remedy = "weights do not have it, as state_dict leaves it out"
    return (
        f"{named}: on the meta device, and nothing initialises it: give its module a "
        f"reset_parameters that fills it; {remedy}"
    )


def _around(path: str) -> list[str]:
    """`a.b`, `a` and the model itself for `a.b`."""
    parts = path.split(".") if path else []
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _initialisers(around: list[nn.Module]) -> Iterator[Callable[[], object]]:
    """A module's own initialiser and those of modules around it, as a constructor runs them."""
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
def _on_meta(model: Model) -> Iterator[None]:
    """With tensors of the meta device in the place of all, whether they have values or not: the
    initialisers of modules around another one must not change what is there already."""
    stand_ins = {}
    for name in model.described:
        x = model.local(name)
        meta = torch.empty(model.described[name].shape, dtype=x.dtype, device="meta")
        is_parameter = name in model.parameters
        stand_ins[name] = nn.Parameter(meta, x.requires_grad) if is_parameter else meta
    kept = [(part, key, name, getattr(part, key)) for part, key, name in model.slots]
    try:
        for part, key, name, _ in kept:
            setattr(part, key, stand_ins[name])
        yield
    finally:
        for part, key, name, x in kept:
            if getattr(part, key) is stand_ins[name]:  # no buffer that was placed meanwhile
                setattr(part, key, x)


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
            parameter = isinstance(old, nn.Parameter)
            setattr(module, key, nn.Parameter(mark, old.requires_grad) if parameter else mark)
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
