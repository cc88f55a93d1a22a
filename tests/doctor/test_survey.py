"""The doctor: what it measures on two ranks, the cluster made of it, its file and its words."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from synchromesh.cli import main, ranks
from synchromesh.doctor import links
from synchromesh.doctor import survey as module
from synchromesh.doctor.links import CollectiveTiming, Line, MessageTiming
from synchromesh.doctor.survey import hosts, pairs, survey
from synchromesh.engine.reduce_scatter import PLAIN
from synchromesh.engine.world import World
from synchromesh.launcher import machine
from synchromesh.values.cluster import Cluster
from tests.doctor.test_checks import FINE
from tests.doctor.test_checks import survey as surveyed
from tests.ranks import run

ROOT = Path(__file__).parents[2]


def test_a_line_through_times_finds_latency_and_bandwidth() -> None:
    def points(latency: float, rate: float) -> list[tuple[float, float]]:
        return [(n, latency + n / rate) for n in (1e3, 1e5, 1e6)]

    exact = Line.through(points(1e-4, 1e9))
    assert exact.latency_seconds == pytest.approx(1e-4)
    assert exact.bytes_per_second == pytest.approx(1e9)
    assert Line.through([(1e6, 0.5)]) == Line(0.0, 2e6)  # one point: through the origin
    below = Line.through([(1e3, 1e-6), (1e6, 5e-3)])  # latency would be negative
    assert below.latency_seconds == 0.0 and 2e8 <= below.bytes_per_second <= 1e9
    falling = Line.through([(1e3, 2e-3), (1e6, 1e-3)])
    assert falling == Line(1e-3, 1e9)


def test_hosts_are_told_apart_by_place_and_named_once() -> None:
    def at(rank: int, host: str, place: str) -> machine.Machine:
        return replace(FINE, rank=rank, host=host, place=place)

    machines = [at(0, "vm", "x"), at(1, "vm", "y"), at(2, "vm", "x"), at(3, "a b", "z")]
    assert hosts(machines) == {"vm-0": [0, 2], "vm-1": [1], "a-b": [3]}
    assert pairs(hosts(machines)) == [(0, 2), (0, 1), (0, 3), (1, 3)]
    many = {f"h{i}": [2 * i, 2 * i + 1] for i in range(8)}
    ring = [(2 * i, 2 * i + 2) for i in range(7)] + [(0, 14)]
    assert pairs(many) == [(2 * i, 2 * i + 1) for i in range(8)] + ring


def test_a_cluster_of_what_was_measured() -> None:
    found = surveyed()
    # inside a: 1 GB/s after ~1.1 ms
    message = [MessageTiming(0, 1, ((1000, 0.0011), (10**6, 0.0021))),
               MessageTiming(0, 2, ((1000, 0.003), (10**6, 0.013)))]  # fmt: skip
    timing = CollectiveTiming("all_reduce", "", 4, ((1024, 0.05), (1 << 20, 0.1)))
    cluster = replace(found, messages=tuple(message), timings=(timing,), emulated=True).cluster(
        "here"
    )
    assert str(cluster) == "here: 2 hosts, 4 devices, emulated" and cluster.source == "measured"
    assert [d.memory_bytes for _, d in cluster.ranks] == [8 * 10**9] * 4  # two ranks share 16 GB
    assert cluster.link("a", "a").bytes_per_second == pytest.approx(1e9, rel=0.01)
    wire = cluster.link("a", "b")
    assert wire.bytes_per_second == pytest.approx(1e8, rel=0.01)
    step = (wire.latency_seconds + cluster.link("a", "a").latency_seconds) / 2  # the median
    assert wire.start_seconds == pytest.approx(0.05 - 6 * step, rel=0.01)
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    with pytest.raises(ValueError, match="no link between 'b' and 'b'"):
        cluster.link("b", "b")


def test_memory_is_shared_by_what_runs_on_one_kernel_unless_limited() -> None:
    found = surveyed(hosts=2, each=1)
    one = [replace(m, boot="x", limit_bytes=0) for m in found.machines]
    assert [m.sharers(one) for m in one] == [2, 2]
    limited = [replace(m, boot="x") for m in found.machines]
    assert [m.sharers(limited) for m in limited] == [1, 1]
    gpus = [replace(m, device="NVIDIA T4", limit_bytes=0) for m in one]
    assert [m.sharers(gpus) for m in gpus] == [1, 1]


def test_many_hosts_have_a_link_for_pairs_that_were_not_measured() -> None:
    found = surveyed(hosts=8, each=1)
    measured = [MessageTiming(a, b, found.messages[0].points) for a, b in pairs(found.hosts)]
    cluster = replace(found, messages=tuple(measured)).cluster()
    assert cluster.link("a", "e").bytes_per_second == cluster.link("a", "b").bytes_per_second
    assert cluster.links == ()  # they say what the default says


def _surveyed() -> Any:
    world = World.open("cpu")
    mine = machine.machine_of(world.rank, world.device)
    found = survey(world, mine, quick=True)
    left = world.choices, world.ledger.sent
    world.close()
    return found.to_dict(), found.cluster().to_dict(), left


def test_two_ranks_survey_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EDGES", {"cpu": (32, 64)})
    monkeypatch.setattr(module, "COPIED", {"cpu": 1 << 16})
    monkeypatch.setattr(module, "_median", _once)
    monkeypatch.setattr(links, "TUNING", links.LinkTuning(most_calls=3))
    monkeypatch.setenv("SYNCHROMESH_LAB", "1")
    first, second = run(2, _surveyed)
    assert first == second  # every rank knows everything
    document, cluster, (choices, sent) = first
    assert choices == {} and sent == 0  # nothing of it shows in the run that follows
    assert [r["rank"] for r in document["ranks"]] == [0, 1]
    for rank in document["ranks"]:
        assert rank["flops"]["float32"] > 0 and rank["bytes_per_second"] > 0
        assert rank["torch"] == torch.__version__ and rank["memory_bytes"] > 10**6
        assert abs(rank["clock_seconds_ahead"]) < 60
    told = [(c["kind"], c["way"]) for c in document["collectives"]]
    assert told == [
        ("all_reduce", ""), ("all_gather", ""), *(("reduce_scatter", way) for way in PLAIN),
        ("all_to_all", ""),
    ]  # fmt: skip
    for c in document["collectives"]:
        assert [n for n, _ in c["points"]] == list(links.TUNING.quick_sizes)
        assert all(t > 0 for _, t in c["points"]) and c["bytes_per_second"] > 0
    (message,) = document["messages"]
    assert (message["a"], message["b"]) == (0, 1)
    made = Cluster.from_dict(cluster)
    (host,) = made.hosts
    assert made.emulated and len(host.devices) == 2
    assert made.link(host.name, host.name).seconds(1 << 20) > 0


def _once(call: Any, device: torch.device, seconds: float) -> float:
    return module._timed(call, device)


def test_one_rank_has_no_links() -> None:
    world = World(0, 1, torch.device("cpu"), timedelta(minutes=1), owner=False)
    assert links.collectives(world, 0.1) == [] and links.messages(world, []) == []


def test_a_port_that_somebody_listens_at() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert machine.port_taken(port)
    assert not machine.port_taken(port)


def test_limits_of_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.setattr(machine, "_groups", lambda _: [inner, inner.parent, tmp_path])
    assert machine._memory_group(10**9) == (0, 0) and machine._quota() == 0.0
    (inner / "memory.max").write_text("max\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "memory.max").write_text("5000000\n")
    (inner.parent / "memory.current").write_text("2000000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine._memory_group(10**9) == (5_000_000, 2_000_000) and machine._quota() == 1.5
    (inner / "cpu.cfs_quota_us").write_text("40000")
    (inner / "cpu.cfs_period_us").write_text("100000")
    assert machine._quota() == 0.4


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """No rank of a group, a folder of its own; the words with which ranks would be started."""
    started: list[list[str]] = []
    for name in ("RANK", "WORLD_SIZE", "SYNCHROMESH_LAUNCHER", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    start = lambda words, n, _: started.append([*words[2:], str(n)]) or 0  # noqa: E731
    monkeypatch.setattr(ranks, "start", start)
    return started


def test_a_file_that_cannot_be_written(
    outside: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("precious")
    Path("d.yaml").mkdir()
    for words, sentence in {
        "--output mine.yaml": "mine.yaml exists: --force overwrites it, another --output keeps it",
        "--output mine.txt": "mine.txt: the name should end in .yaml, .yml or .json",
        "--output no/where.yaml": "no/where.yaml: there is no folder no",
        "--output d.yaml --force": "d.yaml is a folder",
    }.items():
        assert main(["doctor", *words.split()]) == 2
        assert sentence in capsys.readouterr().err
    assert not outside and Path("mine.yaml").read_text() == "precious"


def test_ranks_are_started_and_told_the_port(
    outside: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--nproc", "3", "--quick"]) == 0
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert main(["doctor", "--nproc", "1"]) == 0
    assert outside == [
        ["doctor", "--nproc", "3", "--quick", "3"],
        ["doctor", "--nproc", "1", "--port", "1234", "1"],
    ]


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    drop = ("RANK", "WORLD_SIZE", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "SYNCHROMESH_LAUNCHER")
    env = {k: v for k, v in os.environ.items() if k not in drop}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SYNCHROMESH_LAB": "four hosts"}
    command = [sys.executable, "-m", "synchromesh", "doctor", "--nproc", "2", "--quick"]
    done = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["passed"] and len(document["ranks"]) == 2
    assert {"level", "check", "sentence"} == set(document["checks"][0])
    written = Cluster.load(tmp_path / "cluster.yaml")
    assert written == Cluster.from_dict(document["cluster"])
    assert written.emulated and len(written.ranks) == 2


def test_a_problem_is_shown_and_exits_with_one(
    outside: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from synchromesh.cli import doctor
    from synchromesh.doctor import survey as module

    world = World(0, 1, torch.device("cpu"), timedelta(minutes=1), owner=False)
    monkeypatch.setattr(doctor, "_open", lambda: world)
    monkeypatch.setattr(module, "survey", lambda *a: surveyed(torch="1.0\x1b[2J"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["doctor", "--output", "c.json"]) == 1
    out, err = capsys.readouterr()
    assert "PROBLEM  versions: ranks differ in torch" in out and "ok       cores" in out
    assert "Collectives on 4 ranks" in out and "a, b" in out and "\x1b" not in out
    assert err.startswith("synchromesh: 1 problem: ranks differ in torch (2.13.0 on ranks 0, 1, 2")
    assert Cluster.load("c.json").hosts[1].name == "b"
    assert main(["doctor", "--output", "c.json"]) == 2  # it exists now
    assert "c.json exists" in capsys.readouterr().err


def test_ranks_that_do_not_meet_are_told_what_this_host_may_have_to_do_with_it(
    outside: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise TimeoutError("ranks [1] of 2 did not start")

    monkeypatch.setattr(World, "open", fail)
    monkeypatch.setattr(machine, "machine_of", lambda *_: replace(FINE, own_address="127.0.1.1"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "synchromesh: the ranks do not reach each other (ranks [1] of 2 did not start); this "
        "host's own name 'a' resolves to 127.0.1.1"
    )
