"""Settings of every test: one thread (a fork hangs after a multi-threaded operator), seeds, no
cache of profiles."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["SYNCHROMESH_CACHE"] = "off"  # ranks and commands that a test starts inherit it


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
