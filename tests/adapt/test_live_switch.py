"""What changes while training runs is noticed, and leads to a quicker plan: links in the demo, a
host in a short case of `benchmarks/adapt.py`."""

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from benchmarks.adapt import CPU, WITHIN, Case, adaptive, report
from tests.lab.conftest import turns as turns  # with tests of labs
from tests.lab.hosts import needs_hosts

ROOT = Path(__file__).parents[2]
pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(300)]
SLOW_HOST = Case("pooled", 200, 200, quota=CPU / 3, steps=5000, ends=54, hosts=2, change=30)


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


def test_a_host_that_becomes_slow_gets_fewer_rows() -> None:
    told = adaptive(SLOW_HOST)
    found = report(SLOW_HOST, told, {})
    assert found.get("within", WITHIN + 1) <= WITHIN, found["events"]
    steps = [t for t in told if t["kind"] == "step"]
    slow = steps[SLOW_HOST.change + 1 : SLOW_HOST.change + found["within"]]
    assert found["after"] < median(s["seconds"] for s in slow), found["events"]
