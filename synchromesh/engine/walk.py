"""A walk through a local graph: its own code as a generator that pauses where a tensor moves."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import Tensor

Walk = Generator[None, None, tuple[Tensor, ...]]


def walking(graph: torch.fx.GraphModule) -> Callable[..., Walk]:
    """The graph's own code as a generator: where it moves a tensor it pauses while that is under
    way."""
    code = graph.graph.python_code("self")
    head, colon, body = code.src.replace("= axis.move(", "= yield from axis.moving(").partition(
        ":"
    )
    assert "self." not in body, "local graphs have no attributes"
    space: dict[str, Any] = dict(code.globals)
    exec(f"{head}{colon}\n    yield from (){body}", space)  # a generator even where nothing moves
    return partial(space["forward"], None)
