"""Emulated hosts: links and cores as slow as stated, faults on request, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from synchromesh.lab import HostFailed, Lab, Running, network, requirements
from synchromesh.lab import running as running_module
from synchromesh.lab.record import Tag
from synchromesh.values.cluster import Cluster
from tests.lab.hosts import alive, needs_hosts, needs_memory, python, traces, until

ROOT = Path(__file__).parents[2]
pytestmark = needs_hosts


@pytest.fixture(scope="module")
def pair() -> Iterator[Lab]:
    with Lab(hosts=2, bandwidth="100mbit", cpu=0.5) as lab:
        yield lab


def test_every_host_knows_its_rank_and_the_rendezvous(pair: Lab) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS EXTRA"
    program = f"import os; print(*(os.environ[n] for n in {names.split()}))"
    results = pair.run(python(program), timeout=20, environment={"EXTRA": "more"})
    assert [result.output.split() for result in results] == [
        ["0", "2", "0", "10.77.0.1", "eth0", "1", "more"],
        ["1", "2", "0", "10.77.0.1", "eth0", "1", "more"],
    ]


def test_a_process_sees_its_host_alone(pair: Lab) -> None:
    program = (
        "import os; print(*sorted(os.listdir('/sys/class/net'))); print(os.path.exists("
        "'/sys/fs/cgroup/cpu')); print(len(os.sched_getaffinity(0)))"
    )
    results = pair.run(python(program), timeout=20)
    assert [r.output.split("\n")[:3] for r in results] == [["eth0 lo", "False", "1"]] * 2


def test_what_runs_in_a_lab_can_read_its_cluster(pair: Lab) -> None:
    program = "import os; print(open(os.environ['SYNCHROMESH_LAB']).read())"
    text = pair.run(python(program), timeout=20)[1].output
    cluster = Cluster.from_json(text)
    assert cluster == pair.cluster() and cluster.emulated and cluster.source == "lab"
    assert cluster.link("host0", "host1").bytes_per_second == 100e6 / 8
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert [device.memory_bytes for _, device in cluster.ranks] == [memory // 2] * 2
    assert str(cluster).endswith("2 hosts, 2 devices, lab, emulated")


TRANSFER = """
import os, socket, sys, time
size, sender = int(sys.argv[1]), sys.argv[2]
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        server.settimeout(20)
        link, _ = server.accept()
    link.settimeout(20)
    received, start = 0, time.perf_counter()
    while received < size:
        received += len(link.recv(1 << 16))
    print(size * 8 / (time.perf_counter() - start) / 1e6)
elif os.environ["RANK"] == sender:
    for _ in range(200):
        try:
            link = socket.create_connection(address, timeout=20)
            break
        except OSError:
            time.sleep(0.05)
    link.sendall(bytes(size))
"""


def rate(lab: Lab, sender: int, size: int) -> float:
    """Mbit/s from a host to host 0."""
    command = [*python(TRANSFER), str(size), str(sender)]
    return float(lab.run(command, timeout=40)[0].output)


@pytest.mark.parametrize("mbit", [100, 40])
def test_links_carry_what_they_are_shaped_to(pair: Lab, mbit: int) -> None:
    pair.set(bandwidth=f"{mbit}mbit")
    # The headers take 3 to 5 %, the burst of 64 KB that passes unshaped gives as much back.
    assert 0.8 * mbit < rate(pair, sender=1, size=2_000_000) < 1.1 * mbit


@pytest.mark.slow
def test_a_link_that_becomes_slow_while_it_is_busy_goes_on(pair: Lab) -> None:
    for _ in range(5):  # segments that wait were in the way in one of five
        pair.set(bandwidth="200mbit")
        running = pair.start([*python(TRANSFER), "40000000", "1"])
        time.sleep(1.2)
        pair.set(bandwidth="80mbit")
        running.wait(15.0)


def test_a_small_message_on_a_slow_link_takes_what_its_bytes_take(pair: Lab) -> None:
    pair.set(bandwidth="20mbit")
    slowest = min(rate(pair, sender=1, size=100_000) for _ in range(3))  # a clock may start late
    assert slowest < 1.2 * 20, "a burst of 64 KB would make it 50"
    whole = network.TUNING.burst_bytes
    bursts = [network.burst_bytes(bits) for bits in (10**5, 40_000_000, 10**8, 10**10)]
    assert bursts == [network.TUNING.least_burst, 5000, whole, whole]


def test_a_healed_link_has_the_rate_it_had(pair: Lab) -> None:
    pair.set(bandwidth="40mbit")
    pair.cut(1)
    assert [s.state for s in pair.states()] == ["up", "cut"]
    with pytest.raises(ValueError, match=r"host 1 of lab .* is cut: thaw or heal it first"):
        pair.start(python(""))
    pair.heal(1)
    assert [(s.state, s.bandwidth) for s in pair.states()] == [("up", 40_000_000)] * 2
    assert 0.8 * 40 < rate(pair, sender=1, size=2_000_000) < 1.1 * 40


def test_racks_share_the_uplink() -> None:
    racks = [[0, 1], [2]]
    with Lab(3, bandwidth="100mbit", cpu=0.5, racks=racks, uplink="10mbit") as lab:
        near, far = rate(lab, sender=1, size=2_000_000), rate(lab, sender=2, size=500_000)
        assert far < 12 and near > 3 * far
        speeds = {(a.a, a.b): a.bytes_per_second for a in lab.cluster().links}
        fast, slow = 100e6 / 8, 10e6 / 8
        assert speeds == {
            ("host0", "host1"): fast, ("host0", "host2"): slow, ("host1", "host2"): slow,
        }  # fmt: skip
        lab.set(uplink="40mbit")
        assert lab.current().uplink == 40_000_000
        assert rate(lab, sender=2, size=1_000_000) > 1.5 * far


def test_a_host_gets_its_share_of_a_core_and_no_more(pair: Lab) -> None:
    program = (
        "import time; end, before = time.perf_counter() + 1.0, time.process_time()\n"
        "while time.perf_counter() < end: pass\n"
        "print(time.process_time() - before)"
    )
    pair.set(host=1, cpu="25%")
    shares = [float(result.output) for result in pair.run(python(program), timeout=20)]
    pair.set(cpu=0.5)
    assert shares[0] < 0.62
    assert shares[1] < 0.34
    assert shares[0] > 1.3 * shares[1]


COUNT = """
import sys, time
count = 0
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.01)
"""


class Counts:
    """The last number that each host has counted to."""

    def __init__(self) -> None:
        self.of = {0: 0, 1: 0}

    def count(self, host: int, stream: int, line: bytes) -> None:
        self.of[host] = int(line)

    def go_on(self, host: int) -> bool:
        before = self.of[host]
        return until(lambda: self.of[host] > before)

    def stand_still(self, host: int) -> bool:
        time.sleep(0.1)  # what was under way
        before, other = self.of[host], self.of[1 - host]
        return until(lambda: self.of[1 - host] > other + 3) and self.of[host] == before


def test_a_frozen_host_stands_still_until_it_is_thawed(pair: Lab) -> None:
    counts = Counts()
    running = pair.start(python(COUNT), listener=counts.count)
    try:
        assert counts.go_on(0) and counts.go_on(1)
        pair.freeze(1)
        assert [s.state for s in pair.states()] == ["up", "frozen"]
        assert counts.stand_still(1)
        pair.thaw(1)
        assert counts.go_on(1) and running.poll() is None
        pair.freeze(0)
    finally:
        running.end()  # also where a host is frozen
    assert [(s.state, s.processes) for s in pair.states()] == [("up", 0)] * 2


def test_a_lab_can_be_changed_while_something_runs(pair: Lab) -> None:
    pair.set(bandwidth="10mbit")
    start = time.perf_counter()
    running = pair.start([*python(TRANSFER), "6000000", "1"], timeout=40)  # 4.8 s at this rate
    time.sleep(0.8)
    assert running.poll() is None
    pair.set(bandwidth="200mbit")
    assert float(running.wait(30)[0].output) > 13
    assert time.perf_counter() - start < 20


def test_a_killed_host_ends_the_run(pair: Lab) -> None:
    counts = Counts()
    running = pair.start(python(COUNT), listener=counts.count)
    assert counts.go_on(1)
    start = time.monotonic()
    pair.kill(1)
    with pytest.raises(HostFailed, match=r"host 1 of 2 was ended by SIGKILL") as failed:
        running.wait(20)
    assert failed.value.code == 128 + signal.SIGKILL
    assert time.monotonic() - start < 10
    assert [s.processes for s in pair.states()] == [0, 0]


@needs_memory
def test_a_host_holds_no_more_memory_than_stated(pair: Lab) -> None:
    holds = "import os; x = b'x' * (int(os.environ['RANK']) * {} << 20); print(len(x))"
    pair.set(memory="64MiB")
    assert [s.memory for s in pair.states()] == [2**26] * 2
    assert Cluster.load(pair.cluster_file).hosts[1].devices[0].memory_bytes == 2**26
    assert [r.output for r in pair.run(python(holds.format(32)))] == ["0\n", f"{2**25}\n"]
    shown = (
        "import pathlib; print(*(path.read_text().strip() for path in pathlib.Path("
        "'/sys/fs/cgroup').rglob('memory.*') if path.name in ('memory.max', "
        "'memory.limit_in_bytes')))"
    )
    assert [r.output for r in pair.run(python(shown))] == [f"{2**26}\n"] * 2
    killed = (
        "host 1 of 2 was ended by SIGKILL: the kernel killed processes of host 1, which needed "
        "more than their 64MiB of memory"
    )
    with pytest.raises(HostFailed, match=f"{killed}$"):
        pair.run(python(holds.format(200)))
    said = "open(os.environ['SYNCHROMESH_SHORTAGE'], 'w').write('the plan needs 200 MiB'); x"
    with pytest.raises(HostFailed, match=f"{killed}; the plan needs 200 MiB$"):
        pair.run(python(holds.format(200).replace(" x", f" {said}")))
    pair.set(memory="1GiB")
    assert len(pair.run(python(holds.format(200)))) == 2


def test_a_host_that_fails_ends_all_and_its_words_are_told(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = running_module.RunLimits(end_seconds=0.5)
    monkeypatch.setattr(running_module, "LIMITS", limits)  # the other ignores SIGTERM
    program = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(30) if os.environ['RANK'] == '0' else 1 / 0"
    )
    start = time.monotonic()
    with pytest.raises(HostFailed, match=r"(?s)host 1 of 2 ended with code 1.*ZeroDivisionError"):
        pair.run(python(program), timeout=25)
    assert time.monotonic() - start < 15


def test_a_host_that_hangs_is_ended_in_time_with_its_children(pair: Lab) -> None:
    start = time.monotonic()
    with pytest.raises(HostFailed, match=r"host 0 of 2 did not finish in 1 s") as failed:
        pair.run(["sh", "-c", "sleep 60 & sleep 60"], timeout=1)
    assert failed.value.code == 124 and time.monotonic() - start < 10
    assert [s.processes for s in pair.states()] == [0, 0]


def test_the_time_of_a_wait_is_not_that_of_the_run(pair: Lab) -> None:
    running = pair.start(python("import time; time.sleep(0.5); print('done')"), timeout=20)
    with pytest.raises(TimeoutError, match=r"still runs after 0\.1 s"):
        running.wait(0.1)
    assert [r.output for r in running.wait()] == ["done\n"] * 2


def test_programs_beside_the_interpreter_are_found(
    pair: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # as sudo sets it
    name = Path(sys.executable).name
    assert [r.code for r in pair.run([name, "-S", "-c", ""], timeout=20)] == [0, 0]


def test_a_program_that_does_not_exist_is_told(pair: Lab) -> None:
    with pytest.raises(HostFailed, match=r"(?s)code 127.*nonesuch cannot be started: No such"):
        pair.run(["nonesuch"], timeout=20)


@pytest.mark.parametrize("victims", ["owner", "keeper", "both"])
def test_a_lab_is_gone_whoever_is_killed(victims: str, alone: None) -> None:
    program = (
        "import sys; from synchromesh.lab import Lab\n"
        "with Lab(1) as lab:\n"
        "    print(lab.tag, flush=True)\n"
        "    lab.run([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    tag = Tag.from_plain(owner.stdout.readline().strip(), "tag")
    group = Path("/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu").exists() else "/sys/fs/cgroup")
    inside: list[int] = []

    def busy() -> bool:
        inside[:] = [int(p) for p in (group / tag.part(0) / "cgroup.procs").read_text().split()]
        return bool(inside)

    assert until(busy)
    if victims in ("keeper", "both"):
        os.kill(tag.pid, signal.SIGKILL)
    if victims in ("owner", "both"):
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    if victims == "owner":
        assert until(lambda: not traces(tag)), "the keeper removes it"
    else:
        assert until(lambda: not tag.alive) and traces(tag)
        with Lab(1):
            assert traces(tag) == [], "the next lab removes it"
    assert until(lambda: not any(alive(pid) for pid in inside))
    owner.kill()
    owner.wait()
    owner.stdout.close()


def test_what_a_dead_keeper_left_is_removed_and_nothing_else(pair: Lab, alone: None) -> None:
    dead = Tag(os.getpid(), 1)  # the id is in use, by a process that started at another time
    strangers = [f"smlab-{os.getpid()}-1", "smlab-x-1-0", f"smlab-{os.getpid()}-1-0-mine"]
    cards = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    for name in (dead.part(0), *strangers):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with Lab(1):
            assert dead.part(0) not in network.namespaces()
            assert set(strangers) <= set(network.namespaces())
            assert len(traces(pair.tag)) == 5  # three namespaces, two control groups
    finally:
        for name in strangers:
            subprocess.run(["ip", "netns", "delete", name], check=True)
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == cards


def test_numbers_out_of_range_are_told(pair: Lab) -> None:
    with pytest.raises(ValueError, match="must be 1 to 200, not 0"):
        Lab(0)
    with pytest.raises(ValueError, match=r"there is no host 2: lab .* has 2, 0 to 1"):
        pair.set(host=2, cpu=0.2)
    with pytest.raises(ValueError, match=r"150% of a core is outside 2% to 100% \(1 cores\)"):
        pair.set(cpu="150%")
    with pytest.raises(ValueError, match="nothing to set"):
        pair.set(host=1)
    with pytest.raises(ValueError, match="has no racks, so there is no uplink"):
        pair.set(uplink="10mbit")


def test_more_than_the_machine_has_is_warned_of() -> None:
    cores = len(os.sched_getaffinity(0))
    lab = Lab(2 * cores, cpu=0.6)
    with pytest.warns(UserWarning, match=r"x 60% ask for .*; --cpu 50% would fit"), lab:
        pass


def test_hosts_that_differ() -> None:
    with Lab(bandwidth=["50mbit", "20mbit"], cpu=[0.3, "20%"]) as lab:
        assert [(s.bandwidth, s.cpu) for s in lab.states()] == [
            (50_000_000, 0.3), (20_000_000, 0.2)
        ]  # fmt: skip
        assert json.loads(lab.cluster_file.read_text())["emulated"] is True
        running = lab.start(python(""))
        assert isinstance(running, Running) and [r.code for r in running.wait(20)] == [0, 0]
        file = lab.cluster_file
    assert not file.exists()


def test_without_root_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements.os, "geteuid", lambda: 1000)
    with pytest.raises(ValueError, match=r"need root \(user id 1000\): run the command with sudo"):
        Lab(4).up()
