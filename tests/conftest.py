"""Settings of every test: one thread (a fork hangs after a multi-threaded operator), seeds, no
cache of profiles, no search for cycles in what is imported.

Unless `--all` says so, or a test is named, slow tests are left out, and of the cases of a test
that is `wide(n)` as many are run, evenly spread."""

import gc
import os
from collections import defaultdict

import pytest
import torch

torch.set_num_threads(1)
os.environ["SYNCHROMESH_CACHE"] = "off"  # ranks and commands that a test starts inherit it
gc.disable()  # until tests are imported: more than a million objects, next to none of them garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="slow tests, and all cases of wide ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all") or any("::" in word for word in config.args):
        return
    left = {item for item in items if item.get_closest_marker("slow")}
    wide = defaultdict[tuple[str, int], list[pytest.Item]](list)
    for item in items:
        if (marker := item.get_closest_marker("wide")) is not None:
            wide[item.nodeid.partition("[")[0], *marker.args].append(item)
    for (_, count), cases in wide.items():
        left |= {*cases} - {cases[len(cases) * i // count] for i in range(count)}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """What is imported stays: later collections need not walk through it, nor copy its pages in
    every rank that is forked."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
