"""Settings of every test: one thread (a fork hangs after a multi-threaded operator), seeds, no
cache of profiles, no search for cycles in what is imported."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["SYNCHROMESH_CACHE"] = "off"  # ranks and commands that a test starts inherit it
gc.disable()  # until tests are imported: more than a million objects, next to none of them garbage


def pytest_collection_finish() -> None:
    """What is imported stays: later collections need not walk through it, nor copy its pages in
    every rank that is forked."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
