"""A lab: emulated hosts on one machine, each with a stated link rate, share of a core and memory.

    with Lab(hosts=4, bandwidth="200mbit", cpu=0.4) as lab:
        results = lab.run([sys.executable, "train.py"], timeout=120)

    running = lab.start([sys.executable, "train.py"])     # ... while something runs:
    lab.set(host=2, bandwidth="20mbit", cpu=0.1)
    lab.freeze(1); lab.thaw(1); lab.cut(3); lab.heal(3)
    results = running.wait()

A keeper process removes the namespaces and control groups at the end (keeper.py); a lab whose
keeper was killed as well is removed by the next command or `Lab`. Needs Linux, root, and the cpu
controller of cgroup v1 or v2. Figures from it are emulated, and its cluster says so."""

import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from synchromesh.lab import cgroup, keeper
from synchromesh.lab.description import (
    Description,
    Emulated,
    parse_bandwidth,
    parse_memory,
    parse_share,
)
from synchromesh.lab.keeper import KeeperProcess
from synchromesh.lab.network import Network
from synchromesh.lab.record import Record, Records, Tag
from synchromesh.lab.requirements import require
from synchromesh.lab.running import Killings, Listener, Result, Running, Way
from synchromesh.values.cluster import Cluster

Bandwidth = str | float  # `200mbit`, or bits a second
Share = str | float  # `40%`, or cores
Memory = str | int  # `1GiB`, or bytes


@dataclass(frozen=True)
class HostState:
    host: int
    address: str
    bandwidth: int  # bits a second each way
    cpu: float  # cores
    memory: int | None  # bytes that its processes may hold; None: no limit
    state: str  # up, frozen, cut, frozen and cut
    processes: int


class Lab:
    """`hosts` emulated hosts; `bandwidth`, `cpu` and `memory` are one value for all, or one by
    host (no memory: the machine's). `racks`, two lists of hosts, and `uplink`, the rate between
    them, go together. ValueError for what cannot be, in one sentence."""

    def __init__(
        self, hosts: int | None = None, bandwidth: Bandwidth | Sequence[Bandwidth] = "200mbit",
        cpu: Share | Sequence[Share] = 0.4, racks: Sequence[Sequence[int]] = (),
        uplink: Bandwidth | None = None, memory: Memory | Sequence[Memory | None] | None = None,
    ) -> None:  # fmt: skip
        self._begin(Description.alike(hosts, bandwidth, cpu, racks, uplink, memory), None)

    @classmethod
    def of(cls, description: Description, name: str | None = None) -> "Lab":
        """A lab that is described already, under a name that `Lab.open` finds."""
        lab = cls.__new__(cls)
        lab._begin(description, name)
        return lab

    @classmethod
    def open(cls, name: str) -> "Lab":
        """The lab of this name that is up, whoever brought it up. ValueError where none is."""
        lab = cls.__new__(cls)
        require()
        records = Records()
        with records.locked():
            record = records.read(name) if records.has(name) else None
        if record is None or not record.tag.alive:
            raise ValueError(f"there is no lab {name!r}: synchromesh lab up --name {name}")
        lab._begin(record.lab, name)
        lab._attach(record.tag)
        return lab

    def _begin(self, description: Description, name: str | None) -> None:
        self.description, self.name = description, name or ""
        self._records = Records()
        self._keeper: KeeperProcess | None = None
        self._tag: Tag | None = None

    def _attach(self, tag: Tag) -> None:
        self._tag, self._groups = tag, require()
        self._network = Network(tag, self.description)

    def __enter__(self) -> "Lab":
        self.up()
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # ---- up and down

    def up(self) -> None:
        """Make the hosts. They end with this process, unless `stay` is called."""
        assert self._tag is None, "this lab is up already"
        groups = require()
        self._warn(self.description)
        with self._records.locked():
            keeper.remove_stale(groups, self._records)
            self._check_name()
            self._keeper = KeeperProcess()
            self._attach(self._keeper.tag)
            self.name = self.name or str(self._keeper.tag)
            try:
                self._build()
            except BaseException:
                self.down()
                raise

    def stay(self) -> None:
        """Leave the lab to its keeper: it stays when this process ends, until `down`."""
        assert self._keeper is not None, "brought up elsewhere"
        self._keeper.stay()

    def down(self) -> None:
        """Remove the hosts with all that runs in them; a second call does nothing."""
        if self._tag is None:
            return
        patience = 60.0  # seconds for a keeper to remove its lab
        self._tag.end(patience)
        if self._keeper is not None:
            self._keeper.wait(patience)
        keeper.remove(self._tag, self._groups, self._records)  # what a killed keeper left
        self._tag = self._keeper = None

    def _check_name(self) -> None:
        if self.name and self._records.has(self.name):
            pid = self._records.read(self.name).tag.pid
            raise ValueError(
                f"a lab {self.name!r} is up already (its keeper is process {pid}): end it with "
                f"synchromesh lab down --name {self.name}, or give this one another --name"
            )

    def _build(self) -> None:
        assert self._tag is not None and self._keeper is not None
        for host, shape in enumerate(self.description.hosts):
            part = self._tag.part(host)
            self._groups.make(part)
            self._groups.set_cpu(part, shape.cpu)
            if shape.memory is not None:
                self._groups.set_memory(part, shape.memory)
        self._network.build()
        self._keeper.await_ready()
        date = time.strftime("%Y-%m-%d")
        self._records.write(Record(self.name, self._tag, date, self.description))
        self._write_cluster()

    # ---- what runs in it

    def run(
        self, command: Sequence[str], timeout: float | None = 120.0,
        environment: Mapping[str, str] | None = None, cwd: str | Path | None = None,
    ) -> list[Result]:  # fmt: skip
        """Start `command` once on every host and wait; the results by rank.

        Raises `HostFailed` for the host that failed first, or when the command runs longer than
        `timeout` seconds; nothing of it is left running."""
        running = self.start(command, timeout, environment, cwd)
        try:
            return running.wait()
        finally:
            running.end()

    def start(
        self, command: Sequence[str], timeout: float | None = None,
        environment: Mapping[str, str] | None = None, cwd: str | Path | None = None,
        listener: Listener | None = None, hosts: Sequence[int] | None = None,
    ) -> Running:  # fmt: skip
        """Start `command` once on every host, or on these. The process on the r-th of them has
        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and
        SYNCHROMESH_LAB (the file of the lab's cluster) set and one thread per operator. It dies
        with this process where the main thread starts it."""
        processes: list[subprocess.Popen[bytes]] = []
        parts = [*map(self._part, self._hosts())]
        why = Killings(self._groups, parts, self._records.shortage(self.name))
        # The signal of a parent's death is that of its thread: no other may end before the run.
        main = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if main else 0
        try:
            for way in self.ways(hosts):
                processes.append(way.start(command, parent, environment or {}, cwd))
        except BaseException:
            for process in processes:
                process.kill()
                process.communicate()
            raise
        used = self._hosts() if hosts is None else hosts
        return Running(processes, timeout, self._thaw_all, listener, why.told, used)

    def ways(self, hosts: Sequence[int] | None = None) -> list[Way]:
        """How a run gets onto every host, or onto these. ValueError where one is not up."""
        used = self._hosts() if hosts is None else [h for n in hosts for h in self._hosts(n)]
        for now in self.states():
            if now.host in used and now.state != "up":
                raise ValueError(
                    f"host {now.host} of lab {self.name} is {now.state}: thaw or heal it first"
                )
        # of the rendezvous: below those that the kernel gives away; an earlier run's may be in use
        port = random.SystemRandom().randrange(20_000, 30_000)
        pins = self.description.pins(_cores())
        return [
            Way(
                (
                    self._part(host), ",".join(map(str, pins[host])),
                    *(str(door) for door in self._groups.doors(self._part(host))),
                ),
                self._variables(rank, len(used), self._network.address(used[0]), port),
            )
            for rank, host in enumerate(used)
        ]  # fmt: skip

    def _variables(self, rank: int, ranks: int, first: str, port: int) -> dict[str, str]:
        # sudo's path leaves out the folder of a virtual environment, and so `synchromesh` itself
        path = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
        return {
            "PATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "RANK": str(rank),
            "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": first,
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0",
            **self._records.variables(self.name),
        }  # fmt: skip

    # ---- what happens to its hosts

    def set(
        self, host: int | None = None, bandwidth: Bandwidth | None = None,
        cpu: Share | None = None, uplink: Bandwidth | None = None, memory: Memory | None = None,
    ) -> None:  # fmt: skip
        """Change the link, share or memory of one host or all, or the uplink; also during a run.

        A share is at most the cores the host came up with, as its processes are pinned to them."""
        if all(x is None for x in (bandwidth, cpu, uplink, memory)):
            raise ValueError("nothing to set: give a bandwidth, a share, memory, or an uplink")
        if uplink is not None and self.description.uplink is None:
            raise ValueError(f"lab {self.name} has no racks, so there is no uplink to set")
        changes = [c for h in self._hosts(host) for c in self._changes(h, bandwidth, cpu, memory)]
        if uplink is not None:
            changes.append(partial(self._network.set_uplink, parse_bandwidth(uplink)))
        with self._records.locked():
            for change in changes:
                change()
            self._write_cluster()
        if cpu is not None:
            self._warn(self.current())

    def _changes(
        self, host: int, bandwidth: Bandwidth | None, cpu: Share | None, memory: Memory | None
    ) -> Iterator[Callable[[], None]]:
        """What brings a host to these values; ValueError before any of it where one cannot be."""
        share = None if cpu is None else parse_share(cpu, self.description.hosts[host].cores)
        rate = None if bandwidth is None else parse_bandwidth(bandwidth)
        limit = None if memory is None else parse_memory(memory)
        if limit is not None:
            yield partial(self._groups.set_memory, self._part(host), limit)
        if rate is not None:
            yield partial(self._network.set_rate, host, rate)
        if share is not None:
            yield partial(self._groups.set_cpu, self._part(host), share)

    def freeze(self, host: int) -> None:
        """Stop every process of the host where it is; its link stays."""
        self._groups.freeze(self._part(host))

    def thaw(self, host: int) -> None:
        self._groups.thaw(self._part(host))

    def cut(self, host: int) -> None:
        """Cut the host off: its port on the switch goes down, and nothing passes."""
        self._network.connect(self._one(host), False)

    def heal(self, host: int) -> None:
        """Reconnect a host that was cut off, at the rate it had."""
        self._network.connect(self._one(host), True)

    def kill(self, host: int) -> None:
        """SIGKILL to everything on the host; it is thawed for that, and stays usable."""
        cgroup.kill(self._groups, self._part(host))

    # ---- what it is

    def states(self) -> list[HostState]:
        return [self._state(host, now) for host, now in enumerate(self.current().hosts)]

    def current(self) -> Description:
        """The description with the rates, shares and memory of this moment."""
        hosts = tuple(
            Emulated(self._network.rate(h), self._groups.cpu(part), self._groups.memory(part))
            for h, part in enumerate(map(self._part, self._hosts()))
        )
        uplink = None if self.description.uplink is None else self._network.uplink()
        return replace(self.description, hosts=hosts, uplink=uplink)

    def cluster(self) -> Cluster:
        """The lab as a cluster: emulated, with the rates of this moment."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return self.current().cluster(self.name, memory, time.strftime("%Y-%m-%d"))

    @property
    def cluster_file(self) -> Path:
        return self._records.cluster(self.name)

    @property
    def tag(self) -> Tag:
        assert self._tag is not None, "bring the lab up first: with Lab(...) as lab"
        return self._tag

    def _state(self, host: int, now: Emulated) -> HostState:
        part = self._part(host)
        faults = ["frozen"] if self._groups.frozen(part) else []
        faults += [] if self._network.connected(host) else ["cut"]
        return HostState(
            host, self._network.address(host), now.bandwidth, now.cpu, now.memory,
            " and ".join(faults) or "up", len(self._groups.processes(part)),
        )  # fmt: skip

    def _hosts(self, host: int | None = None) -> list[int]:
        return [*range(len(self.description.hosts))] if host is None else [self._one(host)]

    def _one(self, host: int) -> int:
        count = len(self.description.hosts)
        if not 0 <= host < count:
            raise ValueError(
                f"there is no host {host}: lab {self.name} has {count}, 0 to {count - 1}"
            )
        return host

    def _part(self, host: int) -> str:
        return self.tag.part(self._one(host))

    def _thaw_all(self) -> None:
        for host in self._hosts():
            with suppress(FileNotFoundError):  # the lab is going down
                self._groups.thaw(self._part(host))

    def _write_cluster(self) -> None:
        self._records.write_cluster(self.name, self.cluster().to_json())

    def _warn(self, description: Description) -> None:
        if excess := description.excess(_cores()):
            warnings.warn(excess, stacklevel=1)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))
