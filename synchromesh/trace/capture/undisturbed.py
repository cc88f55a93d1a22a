"""What a model keeps from call to call, and leaving all of it as it was."""

import itertools
import random
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .modes import in_mode

TABLES = ("_parameters", "_buffers", "_modules")  # attributes of nn.Module that hold others
CONTAINERS = (list, tuple, dict, set, deque, SimpleNamespace)
DEEP = 4  # containers in containers that are looked into
KEPT = (
    Tensor,
    torch.Generator,
    bool,
    int,
    float,
    *CONTAINERS,
)  # kinds of attributes that hold state


def attributes_of(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(name, table, key) of what the modules keep: buffers, and attributes that hold state."""
    for path, module in model.named_modules():
        dot = f"{path}." if path else ""
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield dot + key, module._buffers, key
        for key, value in vars(module).items():
            private = key in TABLES or key.endswith("_hooks") or key == "training"
            if not private and isinstance(value, KEPT):
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
            if name in self.known and other(self.known[name], table[key])
        }


def forgotten(assigned: Mapping[str, bool], read: Container[str]) -> str | None:
    """The first attribute that a trace would forget.

    read: tensors that the trace reads. One that is neither read nor a buffer (the last attention,
    kept to be looked at) is no state.
    """
    return next((name for name, loose in assigned.items() if not loose or name in read), None)


def other(before: Any, after: Any) -> bool:
    """Whether an attribute holds another tensor."""
    return isinstance(before, Tensor) and before is not after


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and attributes are as before, changed in place or assigned anew, and so
    is the state of Python's and numpy's random numbers."""
    references = [
        (table, dict(table))
        for module in model.modules()
        for table in (*(vars(module).get(key) for key in TABLES), vars(module))
        if isinstance(table, dict)
    ]
    kept = [(table, key, copied(table[key])) for _, table, key in attributes_of(model)]
    chance, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(chance)
        np.random.set_state(numbers)
        for table, known in references:
            table.clear()
            table.update(known)
        for table, key, content in kept:
            table[key] = given_back(content)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator["Writes"]:
    """Inside, the modes of a training step, and random numbers of a fixed seed; gives the
    parameters that were written to so far.

    Afterwards everything is as before: `restored`, parameters, modes and random state.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    writes = Writes(model)
    try:
        with (
            restored(model), in_mode(model, True), torch.random.fork_rng(devices=devices), writes
        ):  # fmt: skip
            torch.manual_seed(0)
            yield writes
    finally:
        writes.undo()


def copied(value: Any, deep: int = DEEP) -> tuple[Any, Any]:
    """What an attribute holds, with a copy of its content: entries of a tensor, items."""
    if isinstance(value, Tensor):
        return value, (value.data, None if value.is_meta else value.detach().clone())
    if isinstance(value, torch.Generator):
        return value, value.get_state()
    if isinstance(value, CONTAINERS) and deep:
        return value, {key: copied(item, deep - 1) for key, item in items_of(value)}
    return value, None


def items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container, each with its key or place."""
    if isinstance(value, (dict, SimpleNamespace)):
        yield from (value if isinstance(value, dict) else vars(value)).items()
    else:
        yield from enumerate(value)


def given_back(kept: tuple[Any, Any]) -> Any:
    """The object that `copied` kept, with its content of then."""
    value, content = kept
    if content is None:
        return value
    if isinstance(value, Tensor):
        data, entries = content
        if value.data_ptr() != data.data_ptr():
            value.data = data
        if entries is not None and not torch.equal(value, entries):
            with torch.no_grad():
                value.copy_(entries)
        return value
    if isinstance(value, torch.Generator):
        value.set_state(content)
        return value
    items = {key: given_back(item) for key, item in content.items()}
    if isinstance(value, (dict, SimpleNamespace)):
        table = value if isinstance(value, dict) else vars(value)
        table.clear()
        table.update(items)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(items.values())
    elif isinstance(value, set):
        value.clear()
        value.update(items.values())
    return value


class Writes(TorchDispatchMode):
    """Notes which parameters operators write to, and keeps their values of before.

    A copy of all parameters would take the memory of another model for what hardly ever happens.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {
            p.untyped_storage().data_ptr(): (n, p)
            for n, p in model.named_parameters()
            if not p.is_meta and p.numel()
        }
        self.kept: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.data = [(n, p, p.data) for n, p in model.named_parameters() if not p.is_meta]

    def written(self) -> list[str]:
        """Names of the parameters that were written to, or given other memory (`p.data = ...`)."""
        moved = [n for n, p, data in self.data if p.data_ptr() != data.data_ptr()]
        return [*self.kept, *(n for n in moved if n not in self.kept)]

    def undo(self) -> None:
        with torch.no_grad():
            for _, parameter, data in self.data:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
            for parameter, value in self.kept.values():
                parameter.copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for x in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(x, Tensor):
                        self._keep(x)
        return func(*args, **kwargs)

    def _keep(self, x: Tensor) -> None:
        found = self.names.get(x.untyped_storage().data_ptr())
        if found is not None and found[0] not in self.kept:
            name, parameter = found
            self.kept[name] = (parameter, parameter.detach().clone())
