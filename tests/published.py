"""Figures from papers and vendors that tests compare with, where they are at hand."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("SYNCHROMESH_DATA", Path(__file__).parent.parent / "../shared/data"))


def published(name: str) -> Path:
    """A file of the folder `published` beside the data; skips the test where there is none."""
    path = DATA.parent / "published" / name
    if not path.is_file():
        pytest.skip(f"no {path}: set SYNCHROMESH_DATA to the data folder beside `published`")
    return path
