"""The state that a model keeps from call to call, modes, and a run that does not change any."""

import itertools
import random
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_not
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TABLES = ("_parameters", "_buffers", "_modules")  # attributes of nn.Module that hold others
CONTAINERS = (list, tuple, dict, set, deque, SimpleNamespace)
STATE_TYPES = (Tensor, torch.Generator, bool, int, float, *CONTAINERS)  # of attributes


@dataclass(frozen=True)
class ContainerLimits:
    """How far the containers of a model's attributes are looked into. Chosen, not measured."""

    depth: int = 4  # of containers in containers
    items: int = 256  # of one that is compared in every step


CONTAINER_LIMITS = ContainerLimits()


def attributes_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, table, key) of what the modules keep: buffers, and attributes that hold state."""
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield dot + key, module._buffers, key
        for key, value in vars(module).items():
            private = key in TABLES or key.endswith("_hooks") or key == "training"
            if not private and isinstance(value, STATE_TYPES):
                yield dot + key, vars(module), key


class Attributes:
    """The attributes of a model's modules at one moment; containers and tensors by identity."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.known = {name: table[key] for name, table, key in attributes_of(model)}

    def assigned(self) -> dict[str, bool]:
        """Names of the tensors that were assigned anew, each with whether it is no buffer."""
        return {
            name: name not in self.buffers
            for name, table, key in attributes_of(self.model)
            if isinstance(self.known.get(name), Tensor) and self.known[name] is not table[key]
        }


def untraced(assigned: Mapping[str, bool], read: Container[str]) -> str | None:
    """The first attribute whose assignment (`Attributes.assigned`) a trace would lose. read:
    tensors that the trace reads. One that is neither read nor a buffer (the last attention
    weights, kept for inspection) is no state."""
    return next((n for n, no_buffer in assigned.items() if not no_buffer or n in read), None)


def tables_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The dicts that hold what a module keeps, and the attributes of objects that it has."""
    yield vars(module)
    for value in vars(module).values():
        table = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(table, dict) and not isinstance(value, ModuleType):
            yield table


def training_modes(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    """The modes in which a training step runs modules: those that they have, so that a frozen
    batch norm stays in evaluation mode; if none is training (as pretrained weights are loaded),
    all."""
    modes = tuple(module.training for module in modules)
    return modes if any(modes) else (True,) * len(modes)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The modes of a training step (`training_modes`) or of evaluation; afterwards as before."""
    before = [(module, module.training) for module in model.modules()]
    if not training:
        model.eval()
    elif not any(mode for _, mode in before):
        model.train()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers, attributes, hooks, Python's and numpy's random state are as before."""
    tables = (table for module in model.modules() for table in tables_of(module))
    references = [(table, dict(table)) for table in {id(t): t for t in tables}.values()]
    saved = [(table, key, copied(table[key])) for _, table, key in attributes_of(model)]
    python_random, numpy_random = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_random)
        np.random.set_state(numpy_random)
        for table, known in references:
            if list(table) != list(known) or any(map(is_not, table.values(), known.values())):
                table.clear()
                table.update(known)
        for table, key, copy in saved:
            table[key] = written_back(copy)


@contextmanager
def preserved(model: nn.Module, training: bool = True) -> Iterator["ParameterWrites"]:
    """Inside, the modes of a training step or of evaluation, and random numbers of a fixed seed;
    gives the parameters that were written to so far. Afterwards everything is as before:
    `restored`, parameters, modes and random state."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    writes = ParameterWrites(model)
    try:
        random_state = torch.random.fork_rng(devices=devices)
        with restored(model), in_mode(model, training), random_state, writes:
            torch.manual_seed(0)
            yield writes
    finally:
        writes.undo()


def copied(value: Any, depth: int = CONTAINER_LIMITS.depth) -> tuple[Any, Any]:
    """What an attribute holds, with a copy of its content: entries of a tensor, items."""
    if isinstance(value, Tensor):
        return value, (value.data, None if value.is_meta else value.detach().clone())
    if isinstance(value, torch.Generator):
        return value, value.get_state()
    if isinstance(value, CONTAINERS) and depth:
        return value, {key: copied(item, depth - 1) for key, item in items_of(value)}
    return value, None


def items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, SimpleNamespace)):
        yield from (value if isinstance(value, dict) else vars(value)).items()
    else:
        yield from enumerate(value)


def written_back(copy: tuple[Any, Any]) -> Any:
    """The object that `copied` was given, with its content of then."""
    value, content = copy
    if content is None:
        return value
    if isinstance(value, Tensor):
        data, entries = content  # None: those are not known
        if value.data_ptr() != data.data_ptr():
            value.data = data
        if entries is not None and not torch.equal(value, entries):
            with torch.no_grad():
                value.copy_(entries)
        return value
    if isinstance(value, torch.Generator):
        value.set_state(content)
        return value
    items = {key: written_back(item) for key, item in content.items()}
    container = value.__dict__ if isinstance(value, SimpleNamespace) else value
    if isinstance(container, (dict, set, list, deque)):
        container.clear()
        fill = container.extend if isinstance(container, (list, deque)) else container.update
        fill(items if isinstance(container, dict) else items.values())
    return value


class ParameterWrites(TorchDispatchMode):
    """Notes which parameters operators write to, and keeps their values of before: a copy of all
    would take the memory of another model for what hardly ever happens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_storage = {
            p.untyped_storage().data_ptr(): (n, p)
            for n, p in model.named_parameters()
            if not p.is_meta and p.numel()
        }
        self.saved: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.data = [(n, p, p.data) for n, p in model.named_parameters() if not p.is_meta]

    def written(self) -> list[str]:
        """Names of the parameters that were written to, or given other memory (`p.data = ...`)."""
        moved = [n for n, p, data in self.data if p.data_ptr() != data.data_ptr()]
        return [*self.saved, *(n for n in moved if n not in self.saved)]

    def undo(self) -> None:
        with torch.no_grad():
            for _, parameter, data in self.data:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for parameter, value in self.saved.values():
                parameter.copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if not argument.is_write:
                    continue
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(x, Tensor):
                        self._save(x)
        return func(*args, **kwargs)

    def _save(self, x: Tensor) -> None:
        name, parameter = self.by_storage.get(x.untyped_storage().data_ptr(), ("", None))
        if parameter is not None and name not in self.saved:
            self.saved[name] = (parameter, parameter.detach().clone())
