"""Tests of labs take turns with those whose dead lab any other command would remove."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

LOCK = Path(tempfile.gettempdir()) / "synchromesh-lab-tests.lock"


@pytest.fixture
def alone() -> None:
    """Asked for by a test beside which no other one of labs may run."""


@pytest.fixture(autouse=True)
def turns(request: pytest.FixtureRequest) -> Iterator[None]:
    with LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        yield
