"""Real data sets for tests, where this machine has them: `$SYNCHROMESH_DATA` or ../shared/data."""

import os
from pathlib import Path

DATA = Path(os.environ.get("SYNCHROMESH_DATA", Path(__file__).parents[1] / "../shared/data"))


def data(folder: str) -> Path:
    """The folder of a data set; the test is skipped where there is none."""
    import pytest

    path = DATA / folder
    if not path.is_dir():
        pytest.skip(f"no data at {path}: set SYNCHROMESH_DATA")
    return path
