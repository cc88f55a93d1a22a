"""Checks: what will go wrong on these machines, one sentence and a remedy each. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from synchromesh.doctor.survey import Survey, hosts
from synchromesh.launcher.machine import Machine

Level = Literal["ok", "warning", "problem"]
GB = 10**9
GLOO, NCCL, OMP = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"


@dataclass(frozen=True)
class CheckLimits:
    """From where a check complains. Chosen, not measured."""

    clock_seconds: float = 1.0  # between two hosts' clocks
    rate_ratio: float = 1.5  # of the fastest device over the slowest
    link_ratio: float = 2.0  # of the fastest link over the slowest
    load: float = 0.75  # programs for a core, of others
    memory_bytes: int = GB  # free for a rank
    disk_bytes: int = 2 * GB  # free where checkpoints are written


LIMITS = CheckLimits()


@dataclass(frozen=True)
class Finding:
    """One check's answer: how bad it is, and a sentence that ends with what to do."""

    level: Level
    check: str
    sentence: str


@dataclass(frozen=True)
class Ports:
    """The port that a run of several hosts would meet at, and whether somebody has it already."""

    port: int
    taken: bool


Answer = tuple[Level, str]
Answers = Iterator[Answer]


def _warning(sentence: str) -> Answer:
    return "warning", sentence


def _problem(sentence: str) -> Answer:
    return "problem", sentence


def checks(survey: Survey, port: Ports | None = None) -> list[Finding]:
    """Every check's findings, in a fixed order; one that finds nothing says so with `ok`."""
    machines = survey.machines
    table: tuple[tuple[str, Answers, str], ...] = (  # and what is said where there are none
        ("versions", versions(machines), "all ranks run the same torch, Python and synchromesh"),
        ("clocks", clocks(survey), "the ranks' clocks agree to a second"),
        ("cores", cores(machines), "every rank has a core"),
        ("load", load(machines), "the machines are idle"),
        ("threads", threads(machines), "the ranks' threads fit the cores"),
        ("interfaces", interfaces(machines), "the network interface is clear"),
        ("port", ports(port), "the port is free"),
        ("memory", memory(machines), "there is memory"),
        ("disk", disk(machines), "there is room for checkpoints"),
        ("gpus", gpus(machines), "torch uses what is there"),
        ("devices", devices(survey), "the devices are alike"),
        ("links", links(survey), "the links are alike"),
    )
    return [
        Finding(level, name, sentence)
        for name, answers, fine in table
        for level, sentence in [*answers] or [("ok", fine)]
    ]


def alone(machine: Machine, several: bool) -> list[Finding]:
    """What one rank knows of itself while it cannot reach the others (`several`: hosts)."""
    answers = [*_interfaces_of([machine], "this host", several), *gpus([machine])]
    return [Finding(level, "interfaces", sentence) for level, sentence in answers]


def versions(machines: tuple[Machine, ...]) -> Answers:
    """torch and synchromesh must be equal: what ranks send each other depends on them."""
    for name in ("torch", "synchromesh", "python"):
        ranks = _by({m.rank: getattr(m, name) for m in machines})
        if len(ranks) > 1:
            level: Level = "warning" if name == "python" else "problem"
            yield level, f"ranks differ in {name} ({_ranks(ranks)}): install the same everywhere"


def clocks(survey: Survey) -> Answers:
    """Hosts whose clocks differ."""
    ahead = max(survey.clocks) - min(survey.clocks)
    if ahead > LIMITS.clock_seconds:
        last, first = (survey.clocks.index(f(survey.clocks)) for f in (max, min))
        yield _warning(
            f"rank {last}'s clock is {ahead:.1f} s ahead of rank {first}'s, so that logs and "
            "checkpoints of the two are in the wrong order: set the clocks by NTP"
        )


def cores(machines: tuple[Machine, ...]) -> Answers:
    """Hosts with more ranks than cores."""
    for host, group in _hosts(machines).items():
        there = _cores(group)
        if len(group) > max(1.0, there):
            yield _warning(
                f"{host} runs {len(group)} ranks on {there:g} cores, which take turns: start at "
                f"most {max(1, int(there))} there"
            )


def load(machines: tuple[Machine, ...]) -> Answers:
    """Hosts that other programs keep busy."""
    for host, group in _hosts(machines).items():
        if (busy := max(m.load for m in group)) > LIMITS.load:
            yield _warning(
                f"{host} has had {busy:.1f} programs for each of its cores in the last minutes, "
                "which what is measured now shares with them: end them, or measure again later"
            )


def threads(machines: tuple[Machine, ...]) -> Answers:
    """Ranks whose threads take turns on their cores."""
    for host, group in _hosts(machines).items():
        there, wanted = _cores(group), sum(m.threads for m in group)
        fit = max(1, int(there) // len(group))
        unset = [m for m in group if OMP not in m.variables]
        if len(group) > 1 and unset:
            yield _warning(
                f"{OMP} is not set for {_list([m.rank for m in unset])} of {host}, which then use "
                f"{unset[0].threads} threads each: set it to {fit}"
            )
        elif wanted > max(1.0, there) and any(m.threads > 1 for m in group):
            yield _warning(
                f"{host} has {there:g} cores for {wanted} threads of {len(group)} ranks: set "
                f"{OMP} to {fit}"
            )


def interfaces(machines: tuple[Machine, ...]) -> Answers:
    """Hosts that would listen where others cannot reach them."""
    groups = _hosts(machines)
    for host, group in groups.items():
        yield from _interfaces_of(group, host, len(groups) > 1)


def _interfaces_of(group: list[Machine], host: str, several: bool) -> Answers:
    first = group[0]
    there = ", ".join(first.addresses) or "none is up"
    chosen = {m.variables[GLOO] for m in group if GLOO in m.variables}
    for name in sorted(chosen):
        missing = set(name.split(",")) - {*first.addresses, "lo"}
        if missing:
            yield _problem(
                f"{GLOO}={name} names no interface of {host} that is up: set it to one of its own "
                f"({there})"
            )
        elif several and name == "lo":
            yield _problem(
                f"{GLOO}=lo keeps {host} from other hosts: set it to one of its own ({there})"
            )
    if not several or chosen:
        return
    if not first.own_address or first.own_address.startswith("127."):
        yield _problem(
            f"{host}'s own name {first.host!r} resolves to {first.own_address or 'no address'}, "
            f"which other hosts cannot reach: set {GLOO} to one of its own ({there})"
        )
    elif len(first.addresses) > 1:
        addresses = ", ".join(f"{name} {address}" for name, address in first.addresses.items())
        yield _warning(
            f"{host} has {len(first.addresses)} interfaces ({addresses}) and uses the one of "
            f"{first.own_address}, be it the fastest or not: set {GLOO} (with GPUs {NCCL})"
        )


def ports(port: Ports | None) -> Answers:
    if port is not None and port.taken:
        yield _warning(
            f"port {port.port} of rank 0's host is in use, so that a run that meets there cannot "
            "start: choose a free MASTER_PORT (`torchrun --master-port`)"
        )


def memory(machines: tuple[Machine, ...]) -> Answers:
    """Devices with little free memory for a rank."""
    for host, group in _hosts(machines).items():
        for kind in dict.fromkeys(m.device for m in group):
            ranks = [m for m in group if m.device == kind]
            least = min(m.free_bytes // m.sharers(machines) for m in ranks)
            if least < LIMITS.memory_bytes:
                limit = ranks[0].limit_bytes if kind == "cpu" else 0
                why = f" (its control group allows {limit / GB:.1f} GB)" if limit else ""
                yield _warning(
                    f"a rank of {host} has {least / GB:.2f} GB of free {kind} memory{why}: end "
                    "other programs, start fewer ranks or raise the limit"
                )


def disk(machines: tuple[Machine, ...]) -> Answers:
    """Hosts without room for a checkpoint."""
    for host, group in _hosts(machines).items():
        least = min(m.disk_bytes for m in group)
        if least < LIMITS.disk_bytes:
            yield _warning(
                f"{host} has {least / GB:.2f} GB of free disk where the run writes its "
                "checkpoints: free some or give another --output"
            )


def gpus(machines: tuple[Machine, ...] | list[Machine]) -> Answers:
    """GPUs that cannot be used, or cannot talk."""
    without = [m.rank for m in machines if m.cuda and not m.nccl]
    if without:
        yield _problem(
            f"{_list(without)}: CUDA, but a torch without NCCL, so that the GPUs "
            "cannot talk: install the torch that PyTorch's page gives for CUDA on Linux"
        )
    unused = [m.rank for m in machines if m.nvidia and not m.cuda]
    if unused:
        yield _warning(
            f"{_list(unused)}: an NVIDIA device that torch there cannot use; install a "
            "torch with CUDA and a driver for it, or unset CUDA_VISIBLE_DEVICES"
        )


def devices(survey: Survey) -> Answers:
    """Ranks that compute at different rates."""
    kinds = _by({m.rank: m.device for m in survey.machines})
    if len(kinds) > 1:
        yield _warning(
            f"the ranks have different devices ({_ranks(kinds)}): give each rows by its speed, "
            "or a stage of its own"
        )
        return
    flops = [rates.get("float32", 0.0) for rates in survey.flops]
    slow, fast = min(flops), max(flops)
    if slow > 0 and fast / slow > LIMITS.rate_ratio:
        yield _warning(
            f"rank {flops.index(slow)} computes {slow / GB:.3g} GFLOP/s and rank "
            f"{flops.index(fast)} {fast / GB:.3g}: the slowest is what the others wait for, see "
            "what else runs there or give it fewer rows"
        )


def links(survey: Survey) -> Answers:
    """Links that are much slower than others of their kind."""
    host_of = {rank: h for h, ranks in hosts(survey.machines).items() for rank in ranks}
    for inside in (True, False):
        rates = {
            (host_of[m.a], host_of[m.b]): m.line.bytes_per_second
            for m in survey.messages
            if (host_of[m.a] == host_of[m.b]) == inside
        }
        if not rates:
            continue
        slow, fast = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
        if rates[fast] / rates[slow] > LIMITS.link_ratio:
            yield _warning(
                f"messages {_between(slow)} go at {rates[slow] / 1e6:,.0f} MB/s, {_between(fast)} "
                f"at {rates[fast] / 1e6:,.0f} MB/s: keep heavy traffic off the slow link, or see "
                "why it is slow"
            )


def _between(ends: tuple[str, str]) -> str:
    a, b = ends
    return f"inside {a}" if a == b else f"between {a} and {b}"


def _hosts(machines: tuple[Machine, ...]) -> dict[str, list[Machine]]:
    return {h: [machines[r] for r in ranks] for h, ranks in hosts(machines).items()}


def _cores(group: list[Machine]) -> float:
    """Cores of a host: those that any of its ranks may run on, as far as their quota goes."""
    there = float(len({p for m in group for p in m.processors}))
    quotas = [m.quota for m in group if m.quota]
    return min(there, max(quotas)) if len(quotas) == len(group) else there


def _by(values: Mapping[int, str]) -> dict[str, list[int]]:
    count = Counter(values.values())
    return {v: [r for r, x in values.items() if x == v] for v, _ in count.most_common()}


def _ranks(values: Mapping[str, list[int]]) -> str:
    return "; ".join(f"{value} on {_list(ranks)}" for value, ranks in values.items())


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) == 1:
        return f"rank {shown}"
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
