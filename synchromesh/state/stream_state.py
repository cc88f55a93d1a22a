"""The state of a stateful data set in JSON: numbers and texts, nests of them, tensors and bytes.

What JSON does not have is an object with one key that names its type: a tuple is {"tuple": [...]},
a dictionary {"dict": {...}}, or {"pairs": [[key, value], ...]} where keys are no texts. Nothing is
unpickled.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from synchromesh.values import document


def to_json(state: Any) -> Any:
    """The JSON form. ValueError for what has none."""
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, list):
        return [to_json(x) for x in state]
    if isinstance(state, tuple):
        return {"tuple": [to_json(x) for x in state]}
    if isinstance(state, Mapping) and all(isinstance(k, str) for k in state):
        return {"dict": {k: to_json(v) for k, v in state.items()}}
    if isinstance(state, Mapping):
        return {"pairs": [[to_json(k), to_json(v)] for k, v in state.items()]}
    if isinstance(state, np.generic):
        return to_json(state.item())
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    if isinstance(state, np.ndarray) and state.dtype.kind in "biuf":
        return {"array": _packed(torch.from_numpy(np.ascontiguousarray(state)))}
    if isinstance(state, Tensor):
        return {"tensor": _packed(state)}
    raise ValueError(
        f"the state_dict of the data set holds a {type(state).__name__}, which has no form in a "
        "checkpoint: numbers, texts, bytes, tensors, and lists, tuples and dictionaries of them do"
    )


def _packed(x: Tensor) -> list[Any]:
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(x.dtype).removeprefix("torch.")
    return [dtype, list(x.shape), base64.b64encode(data).decode()]


def from_json(value: Any, name: str) -> Any:
    """The inverse of `to_json`. ValueError, which calls it `name`, for anything else."""
    if isinstance(value, list):
        return [from_json(x, name) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ValueError(f"{name}: should have one key that names a type, not {len(value)}")
    ((kind, content),) = value.items()
    if kind == "bytes":
        return _bytes(content, name)
    if kind == "dict" and isinstance(content, dict):
        return {k: from_json(v, name) for k, v in content.items()}
    listed = document.sequence(content, f"{name}: {kind}")
    if kind == "tuple":
        return tuple(from_json(x, name) for x in listed)
    if kind == "pairs":
        pairs = [document.sequence(x, f"{name}: pairs") for x in listed]
        return {from_json(k, name): from_json(v, name) for k, v in pairs}
    if kind in ("tensor", "array"):
        found = _tensor(listed, name)
        return found if kind == "tensor" else found.numpy()
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
    if not isinstance(dtype, torch.dtype) or len(data) != dtype.itemsize * np.prod(
        shape, dtype=int
    ):
        raise ValueError(f"{name}: {len(data)} bytes are no tensor of {listed[0]} {shape}")
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
