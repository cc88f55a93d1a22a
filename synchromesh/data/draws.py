"""Draws: what reading samples draws at random depends on their place in the data alone.

Python's, numpy's and torch's own generators are seeded for every reading and are the caller's
again behind it. Ranks that read the same rows draw the same, others draw others, and a resumed
run draws what it would have drawn, whichever process reads."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from synchromesh.data.cursor import Cursor


@contextmanager
def own_draws() -> Iterator[None]:
    """Inside, `draw_from` may be called; afterwards all three generators are as they were."""
    python, numbers, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(host)


def draw_from(*place: int) -> None:
    """Seeds all three by a place."""
    seed = Cursor.mixed(*place)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
