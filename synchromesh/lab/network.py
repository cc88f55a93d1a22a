"""The network of a lab: a namespace for each host and one for the switch, links shaped both ways.

    host 0: eth0 10.77.0.1 ---tbf==tbf--- port0 |
    host 1: eth0 10.77.0.2 ---tbf==tbf--- port1 |  bridge0        in the namespace of the switch
    ...                                         |     uplink0 ---tbf==tbf--- uplink1
    host 3: eth0 10.77.0.4 ---tbf==tbf--- port3 |  bridge1        where there are two racks

Every interface is born in a namespace that belongs to one lab: the machine's own network is not
touched, two labs cannot meet, and removing the namespaces removes everything. pyroute2 would fork
to enter one, which torch's threads and memory forbid: a thread enters it and opens the socket."""

import ctypes
import errno
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from synchromesh.lab.description import Description
from synchromesh.lab.entry import Clone
from synchromesh.lab.record import Tag

if TYPE_CHECKING:
    from pyroute2 import IPRoute

UNSUPPORTED = (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL)
T = TypeVar("T")


@dataclass(frozen=True)
class ShapingTuning:
    """How links are shaped.

    After a pause of the link a burst passes unshaped: messages that are no larger cost nothing. It
    should be short, but where it does not hold one 64 KB segment of the sender's offload, tbf cuts
    segments into packets in software, which at 200 Mbit/s takes 0.07 of a core more for each end
    of a full link, and at 58 Mbit/s 0.03. So slow links have short bursts: with 64 KB a message of
    70 KB took 1.2 ms at 58 Mbit/s, 9.7 by its rate, with these 9.4 (2026-11-23, two cores)."""

    burst_bytes: int = 64 * 1024 + 1024
    burst_seconds: float = 1e-3  # of links below `slow_bits` ...
    slow_bits: int = 100_000_000  # ... a second
    least_burst: int = 2 * 1514  # bytes; two packets
    # What waits in a full queue, in seconds of the link: three senders that meet at one receiver
    # must not lose packets at once (chosen).
    queue_seconds: float = 0.1


TUNING = ShapingTuning()


class Network:
    def __init__(self, tag: Tag, description: Description) -> None:
        self._tag, self._description = tag, description

    def address(self, host: int) -> str:
        """The host's IPv4 address, 10.77.0.1 for host 0."""
        return f"10.77.0.{host + 1}"

    def build(self) -> None:
        """Make everything; ValueError where this kernel lacks a kind of link or shaper."""
        from pyroute2 import NetlinkError

        racks = max(1, len(self._description.racks))
        _make_namespace(self._tag.part("switch"))
        try:
            with self._switch() as switch:
                for rack in range(racks):
                    switch.link("add", ifname=f"bridge{rack}", kind="bridge")
                    switch.link("set", index=_index(switch, f"bridge{rack}"), state="up")
                if racks == 2:
                    switch.link("add", ifname="uplink0", kind="veth", peer={"ifname": "uplink1"})
                    for rack in range(racks):
                        _attach(switch, f"uplink{rack}", f"bridge{rack}")
                for host, shape in enumerate(self._description.hosts):
                    self._plug_in(switch, host)
                    self.set_rate(host, shape.bandwidth)
            if self._description.uplink is not None:
                self.set_uplink(self._description.uplink)
        except NetlinkError as error:
            if error.code not in UNSUPPORTED:
                raise
            raise ValueError(
                f"this kernel cannot make the links of a lab ({os.strerror(error.code)}): it "
                "needs veth, bridge and sch_tbf (modprobe veth bridge sch_tbf)"
            ) from None

    def _plug_in(self, switch: "IPRoute", host: int) -> None:
        space, port = self._tag.part(host), f"port{host}"
        _make_namespace(space)
        switch.link("add", ifname=port, kind="veth", peer={"ifname": "eth0", "net_ns_fd": space})
        _attach(switch, port, f"bridge{self._description.rack(host)}")
        with _inside(space) as inside:
            card = _index(inside, "eth0")
            inside.addr("add", index=card, address=self.address(host), prefixlen=24)
            for index in (card, _index(inside, "lo")):
                inside.link("set", index=index, state="up")

    def set_rate(self, host: int, bits: int) -> None:
        """Shape both ends of the host's link to `bits` a second, also while it is busy."""
        with _inside(self._tag.part(host)) as inside:
            _shape(inside, "eth0", bits)
        with self._switch() as switch:
            _shape(switch, f"port{host}", bits)

    def rate(self, host: int) -> int:
        with self._switch() as switch:
            return _shaped(switch, f"port{host}")

    def set_uplink(self, bits: int) -> None:
        with self._switch() as switch:
            for end in ("uplink0", "uplink1"):
                _shape(switch, end, bits)

    def uplink(self) -> int:
        with self._switch() as switch:
            return _shaped(switch, "uplink0")

    def connect(self, host: int, connected: bool) -> None:
        """Switch the host's port on or off; its shaping stays."""
        with self._switch() as switch:
            index = _index(switch, f"port{host}")
            switch.link("set", index=index, state="up" if connected else "down")

    def connected(self, host: int) -> bool:
        with self._switch() as switch:
            (port,) = switch.link("get", index=_index(switch, f"port{host}"))
            return bool(port["state"] == "up")

    @contextmanager
    def _switch(self) -> "Iterator[IPRoute]":
        with _inside(self._tag.part("switch")) as switch:
            yield switch


def namespaces() -> list[str]:
    from pyroute2 import netns

    return sorted(netns.listnetns())


def remove(name: str) -> None:
    """Remove a namespace with all its interfaces, once nothing runs in it."""
    from pyroute2 import netns

    with suppress(FileNotFoundError):
        netns.remove(name)


def _make_namespace(name: str) -> None:
    from pyroute2 import netns

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(Clone.NETWORK) != 0:  # of this thread alone
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
        netns.attach(name, "thread-self")  # /proc/thread-self/ns/net becomes the named one

    _in_a_thread(make)


@contextmanager
def _inside(name: str) -> "Iterator[IPRoute]":
    """A netlink socket that speaks to the kernel about the namespace `name`."""
    from pyroute2 import IPRoute, netns

    def enter() -> int:
        netns.setns(name, flags=0)  # of this thread alone; flags=0: do not make it
        return socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE).detach()

    with IPRoute(fileno=_in_a_thread(enter)) as link:
        yield link


def _in_a_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _index(link: "IPRoute", name: str) -> int:
    (index,) = link.link_lookup(ifname=name)
    return int(index)


def _attach(switch: "IPRoute", port: str, bridge: str) -> None:
    switch.link("set", index=_index(switch, port), master=_index(switch, bridge), state="up")


def burst_bytes(bits: int) -> int:
    """What passes a link of so many bits a second unshaped after a pause."""
    if bits >= TUNING.slow_bits:
        return TUNING.burst_bytes
    return max(TUNING.least_burst, int(bits / 8 * TUNING.burst_seconds))


def _shape(link: "IPRoute", name: str, bits: int) -> None:
    """What waits is dropped: a segment larger than the new burst would never pass, nor anything
    behind it."""
    burst, index = burst_bytes(bits), _index(link, name)
    if any(queue.get_attr("TCA_KIND") == "tbf" for queue in link.get_qdiscs(index)):
        link.tc("del", index=index, root=True)
    link.tc(
        "add", kind="tbf", index=index, handle="1:",
        rate=bits // 8,  # the library counts a shaper's rate in bytes
        burst=burst, limit=burst + int(bits / 8 * TUNING.queue_seconds),
    )  # fmt: skip


def _shaped(link: "IPRoute", name: str) -> int:
    (queue,) = link.get_qdiscs(_index(link, name))
    options: Any = queue.get_attr("TCA_OPTIONS")
    return int(options.get_attr("TCA_TBF_PARMS")["rate"]) * 8
