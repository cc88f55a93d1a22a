"""What changes while training runs is noticed, and leads to a quicker plan: the demo, and short
cases of `benchmarks/adapt.py` on two emulated hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from benchmarks.adapt import CPU, WITHIN, Case, adaptive, report
from tests.lab.hosts import needs_hosts

ROOT = Path(__file__).parents[2]
pytestmark = [needs_hosts, pytest.mark.timeout(300)]
LINKS = Case("conv", 1000, 25, steps=5000, ends=54, hosts=2, change=30)
SLOW_HOST = Case("pooled", 200, 200, quota=CPU / 3, steps=5000, ends=54, hosts=2, change=30)


def test_the_demo_ends_with_what_the_switch_has_brought() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "synchromesh.lab.demo"],
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


@pytest.mark.parametrize("case", [LINKS, SLOW_HOST], ids=["links", "host"])
def test_a_change_leads_to_a_quicker_plan(case: Case) -> None:
    told = adaptive(case)
    found = report(case, told, {})
    assert found.get("within", WITHIN + 1) <= WITHIN, found["events"]
    steps = [t for t in told if t["kind"] == "step"]
    slow = steps[case.change + 1 : case.change + found["within"]]
    assert found["after"] < median(s["seconds"] for s in slow), found["events"]
