"""The machine as one rank sees it: device, memory, cores, versions, interfaces; untimed."""

import fcntl
import os
import platform
import re
import shutil
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from synchromesh.values.version import VERSION

LAB = "SYNCHROMESH_LAB"  # set where hosts are emulated
CGROUPS = Path("/sys/fs/cgroup")
SIOCGIFADDR = 0x8915
ESTABLISHED = "01"  # a state in /proc/net/tcp
VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")


@dataclass(frozen=True)
class Machine:
    """Facts of one rank; bytes, cores (a quota of the control group may be a fraction).

    place: equal for the ranks of one host; network namespaces and containers of one machine count
    as hosts, since their traffic goes over a network. boot: equal on one kernel."""

    rank: int
    host: str
    place: str
    boot: str
    device: str  # cpu, or the GPU's name
    cuda: bool
    nccl: bool
    nvidia: bool  # the kernel knows an NVIDIA device, whether torch can use it or not
    memory_bytes: int  # of the GPU, or of the host as far as its control group allows
    physical_bytes: int  # of the host
    limit_bytes: int  # of the control group; 0: none
    free_bytes: int  # of the device
    disk_bytes: int  # free where the command was started
    processors: tuple[int, ...]  # that this process may run on
    quota: float  # cores that the control group allows; 0: all
    load: float  # programs that wanted to compute, over its cores: the mean of five minutes
    threads: int
    torch: str
    python: str
    synchromesh: str
    addresses: Mapping[str, str]  # IPv4 by interface that is up, loopback left out
    own_address: str  # what the host's name resolves to; "" if it does not
    variables: Mapping[str, str]  # those of VARIABLES that are set

    def sharers(self, machines: Sequence["Machine"]) -> int:
        """How many ranks of `machines` share this one's memory: of its control group where that
        has a limit, else of its kernel. A GPU is a rank's own."""
        cpus = [m for m in machines if m.device == self.device == "cpu"]
        if self.limit_bytes:
            return sum(m.place == self.place for m in cpus) or 1
        return sum(m.boot == self.boot for m in cpus) or 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Machine":
        assert set(value) == {f.name for f in fields(cls)}, sorted(value)
        return cls(**{**value, "processors": tuple(value["processors"])})


def machine_of(rank: int, device: torch.device) -> Machine:
    physical = _physical()
    limit, used = _memory_group(physical)
    if device.type == "cuda":
        free, memory = torch.cuda.mem_get_info(device)
        kind = torch.cuda.get_device_name(device)
    else:
        memory = device_bytes(device)
        free = min(_available(physical), memory - used if limit else memory)
        kind = "cpu"
    return Machine(
        rank=rank, host=socket.gethostname(), place=place(), boot=boot(), device=kind,
        cuda=torch.cuda.is_available(), nccl=dist.is_available() and dist.is_nccl_available(),
        nvidia=Path("/dev/nvidiactl").exists(), memory_bytes=memory, physical_bytes=physical,
        limit_bytes=limit, free_bytes=max(0, free), disk_bytes=shutil.disk_usage(".").free,
        processors=_processors(), quota=_quota(), load=os.getloadavg()[1] / (os.cpu_count() or 1),
        threads=torch.get_num_threads(), torch=torch.__version__,
        python=platform.python_version(), synchromesh=VERSION,
        addresses={n: a for n, a in addresses().items() if not a.startswith("127.")},
        own_address=_own_address(),
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    )  # fmt: skip


def device_bytes(device: torch.device) -> int:
    """Bytes of the GPU, else of the machine as far as the control group allows."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical = _physical()
    return min(physical, _memory_group(physical)[0] or physical)


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def boot() -> str:
    """Equal for all that run on one kernel, and so have one clock."""
    return system_file("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def system_file(path: str) -> str:
    """What a file of the system says; "" where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def namespace() -> str:
    """The network namespace, where there are such things."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def place() -> str:
    """Equal for all processes of one host, as `Machine.place`."""
    return f"{socket.gethostname()} {boot()} {namespace()}"


def processor() -> str:
    """The name of the processor, of its architecture where the system does not tell."""
    lines = system_file("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> float:
    """Cores that this process may use: those it may run on, or the quota of its control group."""
    return min(float(len(_processors())), _quota() or float("inf"))


def _processors() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _available(otherwise: int) -> int:
    lines = system_file("/proc/meminfo").splitlines()
    fields_ = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields_[0][1]) * 1024 if fields_ else otherwise


def _groups(controller: str) -> list[Path]:
    """The folders of this process's control group and of those above it, v2 or v1."""
    folders = []
    for line in system_file("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            root = CGROUPS
        elif controller in names.split(","):
            root = CGROUPS / controller
        else:
            continue
        inner = Path(path.lstrip("/"))
        folders += [root / p for p in (inner, *inner.parents)]
    return list(dict.fromkeys(folders))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" among others
        return None


def _memory_group(physical: int) -> tuple[int, int]:
    """The least limit of the control groups, 0 where there is none, and what is used of it."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    limits = [
        (limit, _number(folder / usage) or 0)
        for folder in _groups("memory")
        for name, usage in names
        if (limit := _number(folder / name)) is not None and limit < physical
    ]
    return min(limits, default=(0, 0))


def memory_kills() -> int:
    """How many processes of this control group the kernel has killed for want of memory."""
    for folder in _groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            if found := re.search(r"^oom_kill (\d+)$", system_file(str(folder / name)), re.M):
                return int(found[1])
    return 0


class MemoryKills:
    """Of this process's control groups, noted when asked for."""

    def __init__(self) -> None:
        self._count, self._noted = memory_kills(), -inf

    def lately(self, seconds: float) -> bool:
        """Whether there was one since this was asked last, or that was noted so recently."""
        before, self._count = self._count, memory_kills()
        now = time.monotonic()
        self._noted = now if self._count > before else self._noted
        return now - self._noted < seconds


def _quota() -> float:
    """Cores that the control groups allow, 0 where they do not say."""
    quotas: list[float] = []
    for folder in _groups("cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # "max 100000": no limit
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        if quota and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=0.0)


def addresses() -> dict[str, str]:
    """IPv4 addresses by interface; those that are down have none."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def linked(port: int) -> set[str] | None:
    """Addresses from which others have connections with this host's port; None where the kernel
    does not tell."""
    rows = [line.split()[1:4] for line in system_file("/proc/net/tcp").splitlines()[1:]]
    found = [far for near, far, state in rows if state == ESTABLISHED and _port(near) == port]
    hosts = {struct.pack("=I", int(far.partition(":")[0], 16)) for far in found}
    return {socket.inet_ntoa(host) for host in hosts} if rows else None


def _port(end: str) -> int:
    return int(end.partition(":")[2], 16)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def port_taken(port: int) -> bool:
    """Whether another program listens at this port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
