"""States of data sets and schedulers as JSON: every kind comes back; no form is an error."""

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from synchromesh.checkpoint.json_state import from_json, to_json


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"epoch": 0, "examples_iterable": {"shard_idx": 1, "type": "ArrowExamplesIterable"}},
        {3: (1.5, [True, "x"]), "y": b"\x00\xff", (1, 2): {}},
        {"milestones": Counter({2: 1, 5: 2})},
        {"rng": torch.get_rng_state(), "half": torch.tensor([[1.5]], dtype=torch.bfloat16)},
        {
            "python": random.getstate(),
            "numpy": np.arange(3, dtype=np.uint32),
            "no": torch.empty(0),
        },
    ],
    ids=["none", "hugging face", "keys", "counter", "tensors", "generators"],
)
def test_a_state_survives_json(state: Any) -> None:
    again = from_json(json.loads(json.dumps(to_json(state, "it"))), "state")
    assert same(again, state)


def test_numbers_of_numpy_become_plain_ones() -> None:
    assert to_json({"n": np.int64(3), "x": np.float32(0.5)}, "it") == {"dict": {"n": 3, "x": 0.5}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"tensor": ["float32", [2], "AAAA"]}, "3 bytes are no tensor of float32"),
        ({"tensor": ["load", [1], "AAAA"]}, "no tensor of load"),
        ({"tensor": ["uint8"]}, "its type, shape and bytes"),
        ({"bytes": "?"}, "is not base64"),
        ({"object": []}, "'object' is no type"),
        ({"tuple": [], "dict": {}}, "one key that names a type, not 2"),
    ],
)
def test_a_damaged_state(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(value, "state")


def test_what_has_no_form_is_refused() -> None:
    with pytest.raises(ValueError, match="of the data set holds a generator, which has no form"):
        to_json({"open": (x for x in ())}, "the data set")
