"""Checks of the doctor: what each one says of which machines, and that it is silent otherwise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from synchromesh.doctor.checks import GB, Finding, Ports, alone, checks
from synchromesh.doctor.links import CollectiveTiming, MessageTiming
from synchromesh.doctor.survey import Survey
from synchromesh.launcher.machine import Machine

FINE = Machine(
    rank=0, host="a", place="a 1", boot="a", device="cpu", cuda=False, nccl=False, nvidia=False,
    memory_bytes=16 * GB, physical_bytes=32 * GB, limit_bytes=16 * GB, free_bytes=12 * GB,
    disk_bytes=100 * GB, processors=(0, 1, 2, 3), quota=0.0, load=0.2, threads=2,
    torch="2.13.0", python="3.11.7", synchromesh="0.1.0", addresses={"eth0": "10.0.0.1"},
    own_address="10.0.0.1", variables={"OMP_NUM_THREADS": "2"},
)  # fmt: skip


def line(rate: float) -> tuple[tuple[int, float], ...]:
    return tuple((n, 1e-3 + n / rate) for n in (1 << 10, 1 << 20))


def survey(hosts: int = 2, each: int = 2, **changes: Any) -> Survey:
    """Machines a, b, ... without a fault but `changes`, which are those of the last rank."""
    machines = [
        replace(FINE, rank=h * each + i, host=chr(97 + h), place=f"{h}", boot=f"{h}")
        for h in range(hosts)
        for i in range(each)
    ]
    machines[-1] = replace(machines[-1], **changes)
    n = len(machines)
    return Survey(
        tuple(machines), ({"float32": 5e10},) * n, (1e10,) * n, (0.0,) * n,
        (CollectiveTiming("all_reduce", "", n, line(1e9)),),
        tuple(MessageTiming(a, b, line(1e8)) for a in range(n) for b in range(a + 1, n)),
        emulated=False, date="2026-01-31",
    )  # fmt: skip


def told(found: Survey, port: Ports | None = None) -> list[Finding]:
    return [x for x in checks(found, port) if x.level != "ok"]


def test_nothing_is_wrong_with_good_machines() -> None:
    found = checks(survey(), Ports(29500, taken=False))
    assert [x.level for x in found] == ["ok"] * 12
    assert len({x.check for x in found}) == 12 and all(x.sentence for x in found)


@pytest.mark.parametrize(
    ("changes", "level", "check", "sentence"),
    [
        ({"torch": "2.11.0"}, "problem", "versions",
         "ranks differ in torch (2.13.0 on ranks 0, 1, 2; 2.11.0 on rank 3): install the same "
         "everywhere"),
        ({"load": 8.5}, "warning", "load",
         "b has had 8.5 programs for each of its cores in the last minutes, which what is "
         "measured now shares with them: end them, or measure again later"),
        ({"synchromesh": "0.0.9"}, "problem", "versions", "ranks differ in synchromesh (0.1.0"),
        ({"python": "3.12.1"}, "warning", "versions", "ranks differ in python (3.11.7"),
        ({"variables": {}, "threads": 4}, "warning", "threads",
         "OMP_NUM_THREADS is not set for rank 3 of b, which then use 4 threads"),
        ({"threads": 8}, "warning", "threads",
         "b has 4 cores for 10 threads of 2 ranks: set OMP_NUM_THREADS to 2"),
        ({"variables": {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "ib0"}}, "problem",
         "interfaces", "GLOO_SOCKET_IFNAME=ib0 names no interface of b that is up: set it to one "
         "of its own (eth0)"),
        ({"variables": {"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo"}}, "problem",
         "interfaces", "GLOO_SOCKET_IFNAME=lo keeps b from other hosts"),
        ({"free_bytes": GB}, "warning", "memory",
         "a rank of b has 0.50 GB of free cpu memory (its control group allows 16.0 GB): end"),
        ({"disk_bytes": GB}, "warning", "disk", "b has 1.00 GB of free disk where the run writes"),
        ({"cuda": True}, "problem", "gpus", "rank 3: CUDA, but a torch without NCCL"),
        ({"nvidia": True}, "warning", "gpus", "rank 3: an NVIDIA device that torch there"),
        ({"device": "NVIDIA T4"}, "warning", "devices",
         "the ranks have different devices (cpu on ranks 0, 1, 2; NVIDIA T4 on rank 3)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_fault_of_one_rank(
    changes: dict[str, Any], level: str, check: str, sentence: str
) -> None:
    (finding,) = told(survey(**changes))
    assert (finding.level, finding.check) == (level, check)
    assert finding.sentence.startswith(sentence)
    assert "\n" not in finding.sentence


def all_of(**changes: Any) -> Survey:
    found = survey()
    return replace(found, machines=tuple(replace(m, **changes) for m in found.machines))


@pytest.mark.parametrize(
    ("make", "check", "sentence"),
    [
        (lambda: all_of(processors=(0,), threads=1), "cores",
         "a runs 2 ranks on 1 cores, which take turns: start at most 1 there"),
        (lambda: all_of(quota=1.5, threads=1), "cores", "a runs 2 ranks on 1.5 cores"),
        (lambda: all_of(addresses={"eth0": "10.0.0.1", "ib0": "10.1.0.1"}), "interfaces",
         "a has 2 interfaces (eth0 10.0.0.1, ib0 10.1.0.1) and uses the one of 10.0.0.1, be it "
         "the fastest or not: set GLOO_SOCKET_IFNAME (with GPUs NCCL_SOCKET_IFNAME)"),
        (lambda: all_of(own_address="127.0.1.1"), "interfaces",
         "a's own name 'a' resolves to 127.0.1.1, which other hosts cannot reach: set "
         "GLOO_SOCKET_IFNAME to one of its own (eth0)"),
        (lambda: all_of(own_address=""), "interfaces", "a's own name 'a' resolves to no address"),
        (lambda: replace(survey(), clocks=(0.0, 0.1, -1.2, 0.0)), "clocks",
         "rank 1's clock is 1.3 s ahead of rank 2's"),
        (lambda: replace(survey(), flops=({"float32": 5e10},) * 3 + ({"float32": 2e10},)),
         "devices", "rank 3 computes 20 GFLOP/s and rank 0 50"),
        (lambda: replace(survey(), messages=(
            MessageTiming(0, 1, line(1e9)), MessageTiming(2, 3, line(2e8)),
            MessageTiming(0, 2, line(1e8)))),
         "links", "messages inside b go at 200 MB/s, inside a at 1,000 MB/s: keep"),
    ],
)  # fmt: skip
def test_faults_of_several(make: Callable[[], Survey], check: str, sentence: str) -> None:
    found = told(make())
    assert {x.check for x in found} == {check} and found[0].sentence.startswith(sentence), found


def test_a_port_in_use() -> None:
    (finding,) = told(survey(), Ports(29500, taken=True))
    assert finding.check == "port" and "port 29500" in finding.sentence


def test_interfaces_of_a_single_host_do_not_matter() -> None:
    changes = {"own_address": "127.0.0.1", "addresses": {"a": "10.0.0.1", "b": "10.0.0.2"}}
    assert told(survey(hosts=1, each=1, **changes)) == []


def test_a_rank_that_cannot_reach_the_others_looks_at_itself() -> None:
    lonely = replace(FINE, own_address="127.0.0.1")
    assert "cannot reach" in alone(lonely, several=True)[0].sentence
    assert alone(lonely, several=False) == []
