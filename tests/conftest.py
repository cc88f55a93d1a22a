"""Settings of every test: one thread (a fork hangs after a multi-threaded operator), seeds."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
