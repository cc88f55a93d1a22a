"""Memory that is freed stays in the process: no page faults when it is asked for again."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from synchromesh.engine import heap
print({"keep": heap.keep, "small": lambda: heap.keep() and heap.keep_small()}[sys.argv[1]]())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(n << 20) for n in (1, 1, 10)]  # 4, 4 and 40 MiB
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min([faults() for _ in range(10)]))  # blocks may move before they find their places
"""
glibc = platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"


def faults(word: str) -> tuple[str, int]:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT, word], capture_output=True, text=True, check=True
    )
    done, count = told.stdout.split()
    return done, int(count)


@pytest.mark.skipif(not glibc, reason="mallopt is glibc's")
def test_freed_memory_is_kept() -> None:
    done, count = faults("keep")
    assert done == "True" and count < 1000, count  # 12,288 pages if they were handed back


@pytest.mark.skipif(not glibc, reason="mallopt is glibc's")
def test_large_blocks_go_back_where_only_small_ones_are_kept() -> None:
    done, count = faults("small")
    assert done == "True" and count > 10_000, count  # of 12,288 pages


def test_a_users_own_settings_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert faults("keep")[0] == faults("small")[0] == "False"


@pytest.mark.skipif(not glibc, reason="mallopt is glibc's")
def test_what_is_free_goes_back_to_the_system_when_it_is_asked_to() -> None:
    script = (
        "import torch; from synchromesh.engine import heap; heap.keep()\n"
        "from synchromesh.programs.memory import process_bytes\n"
        "def size(): return process_bytes() >> 20\n"
        "few, large = torch.ones(1), torch.ones(64 << 20)  # 256 MiB\n"
        "last, full = torch.ones(1), size(); del large; kept = size(); heap.release()\n"
        "print(full - kept, kept - size())"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    stayed, gone = map(int, told.stdout.split())
    assert stayed < 16 and gone > 200, told.stderr
