"""The state of the user's objects (a stream, a scheduler) in JSON, tensors and bytes included.

What JSON does not have is an object with one key that names its type: a tuple is {"tuple": [...]},
a dictionary {"dict": {...}}, or {"pairs": [[key, value], ...]} where keys are no texts; so is a
Counter. Nothing is unpickled."""

import base64
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from synchromesh.engine.movable import bytes_of
from synchromesh.values import document


def to_json(state: Any, what: str) -> Any:
    """The JSON form. ValueError, which calls it `what`, for what has none."""
    match state:
        case None | bool() | int() | float() | str():
            return state
        case list() | tuple():
            items = [to_json(x, what) for x in state]
            return items if isinstance(state, list) else {"tuple": items}
        case Mapping():
            return _mapping(state, what)
        case np.generic():
            return to_json(state.item(), what)
        case bytes():
            return {"bytes": base64.b64encode(state).decode()}
        case np.ndarray() if state.dtype.kind in "biuf":
            return {"array": _packed(torch.from_numpy(np.ascontiguousarray(state)))}
        case Tensor():
            return {"tensor": _packed(state)}
    raise ValueError(
        f"the state_dict of {what} holds a {type(state).__name__}, which has no form in a "
        "checkpoint: numbers, texts, bytes, tensors, and lists, tuples and dictionaries of them do"
    )


def _mapping(state: Mapping[Any, Any], what: str) -> dict[str, Any]:
    counter = isinstance(state, Counter)
    if not counter and all(isinstance(k, str) for k in state):
        return {"dict": {k: to_json(v, what) for k, v in state.items()}}
    pairs = [[to_json(k, what), to_json(v, what)] for k, v in state.items()]
    return {"counter" if counter else "pairs": pairs}


def _packed(x: Tensor) -> list[Any]:
    dtype = str(x.dtype).removeprefix("torch.")
    return [dtype, list(x.shape), base64.b64encode(bytes_of(x)).decode()]


def from_json(value: Any, name: str) -> Any:
    """The inverse of `to_json`. ValueError, which calls it `name`, for anything else."""
    if isinstance(value, list):
        return [from_json(x, name) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"{name}: should have one key that names a type, not {len(value)}")
    ((kind, content),) = value.items()
    return _of_kind(kind, content, name)


def _of_kind(kind: str, content: Any, name: str) -> Any:
    if kind == "bytes":
        return _bytes(content, name)
    if kind == "dict" and isinstance(content, dict):
        return {k: from_json(v, name) for k, v in content.items()}
    listed = document.sequence(content, f"{name}: {kind}")
    match kind:
        case "tuple":
            return tuple(from_json(listed, name))
        case "pairs" | "counter":
            pairs = (document.sequence(x, f"{name}: {kind}") for x in listed)
            table = {from_json(k, name): from_json(v, name) for k, v in pairs}
            return table if kind == "pairs" else Counter(table)
        case "tensor":
            return _tensor(listed, name)
        case "array":
            return _tensor(listed, name).numpy()
    raise ValueError(f"{name}: {kind!r} is no type of a state")


def _bytes(content: Any, name: str) -> bytes:
    try:
        return base64.b64decode(document.text(content, name), validate=True)
    except ValueError:
        raise ValueError(f"{name}: is not base64") from None


def _tensor(listed: Any, name: str) -> Tensor:
    if len(listed) != 3:
        raise ValueError(f"{name}: a tensor should be its type, shape and bytes")
    dtype = getattr(torch, document.text(listed[0], f"{name}: type"), None)
    shape = [document.integer(n, f"{name}: shape", 0, 2**40) for n in listed[1]]
    data = bytearray(_bytes(listed[2], name))
    if not isinstance(dtype, torch.dtype) or len(data) != dtype.itemsize * prod(shape):
        raise ValueError(f"{name}: {len(data)} bytes are no tensor of {listed[0]} {shape}")
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
