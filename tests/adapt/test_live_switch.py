"""Links that become slow while the demo trains are noticed, and lead to a quicker plan. (A host
that becomes slow: `python -m benchmarks.adapt --cases short`.)"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.conftest import turns as turns  # with tests of labs
from tests.lab.hosts import needs_hosts

ROOT = Path(__file__).parents[2]
pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_demo_ends_with_what_the_switch_has_brought() -> None:
    done = subprocess.run(
        [sys.executable, "examples/demo.py", "switch"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.strip().splitlines()[-1]
    found = re.fullmatch(
        r"(\d+) ms a step before, (\d+) ms over slow links, (\d+) ms since the switch to .*", told
    )
    assert found is not None, done.stdout
    before, slow, after = map(int, found.groups())
    assert before < slow and after < slow
