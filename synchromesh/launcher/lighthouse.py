"""How the launchers of an elastic run's hosts hear of each other: torchft's Lighthouse.

Each asks it for a quorum ten times a second and gives its own state along; the answer has what all
others gave. One of them, the coordinator, runs the Lighthouse and decides from that what holds for
all (coordinator.py); its orders are what it gives along.

The Lighthouse lets anybody in. So what a launcher says is proved by a token that all have, with
HMAC-SHA256 over the text; the text has a random number of each side, of this run, and a counter
that only grows, so that nothing can be said a second time. What is not proved is passed over.

    member       {"from", "own", "to", "turn", "state"}      own: its random number; to: that of
    coordinator  {"from", "own", "of", "turn", "orders"}     the other side, `of` each member"""

import hashlib
import hmac
import importlib
import json
import secrets
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from synchromesh.launcher.coordinator import Coordinator, HostRanks, Orders, Seat
from synchromesh.launcher.generation import address_of
from synchromesh.launcher.machine import addresses, linked
from synchromesh.values.extras import require
from synchromesh.values.fields import of_plain, to_plain


@dataclass(frozen=True)
class LighthouseTuning:
    """Seconds; chosen. A quorum of three takes 0.002 (measured), a pause of 3 is no fault."""

    turn: float = 0.1  # between two quorums
    silent: float = 4.0  # a host without a word ...
    # the same where a rank has lost a connection with it, and it has none with the Lighthouse for
    # so long, as it makes another one within 0.12 s where it lives (measured) ...
    quiet: float = 0.1
    missing: float = 0.15
    parted: float = 0.6  # ... or misses quorums, where the kernel does not tell of that
    join: float = 0.1  # for hosts that have spoken before, until there is a quorum without them
    call: float = 1.0  # a connection or an answer ...
    # ... or as long, where nothing was heard for twice as long as the former, and no longer than
    # until this host ends its ranks: its launcher ends no sooner than the call
    hurried: float = 0.4
    beat: float = 1.5  # one that is silent counts for the Lighthouse's majority no longer
    unreached: float = 3.9  # the Lighthouse, until this host ends its ranks: before others go on
    forget: float = 30.0  # a host without a word, also what it said
    answer: float = 30.0  # of a coordinator, which may be started later
    refused: float = 1.0  # the same, where its host says that there is none
    away: float = 1.0  # between two looks of this host: then it stood still itself ...
    again: float = 2.0  # ... and may hear so long what has become of the run
    tick: float = 0.05  # of the Lighthouse, between two looks whether a quorum is complete

    @staticmethod
    def of(seconds: float) -> timedelta:
        return timedelta(seconds=seconds)


LIMITS = LighthouseTuning()


def token_of(path: Path) -> bytes:
    """The token in a file that its owner alone may read. ValueError where there is none."""
    try:
        mode, token = stat.S_IMODE(path.stat().st_mode), path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--token-file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ValueError(
            f"--token-file {path} may be read by others (mode {mode:o}): chmod 600 {path}"
        )
    if len(token) < Sealed.LEAST:
        raise ValueError(
            f"--token-file {path} has {len(token)} bytes, at least {Sealed.LEAST} are needed: "
            f"openssl rand -hex 32 > {path}"
        )
    return token


@dataclass
class Sealed:
    """What one launcher says to others, proved by the token."""

    LEAST: ClassVar = 16  # bytes of a token
    MOST: ClassVar = 1 << 20  # characters of a text

    token: bytes
    name: str

    def __post_init__(self) -> None:
        self.own, self._turn = secrets.token_hex(16), 0
        self._turns: dict[str, int] = {}  # the last of each that speaks, by its random number

    def seal(self, **said: Any) -> dict[str, str]:
        self._turn += 1
        said |= {"from": self.name, "own": self.own, "turn": self._turn}
        text = json.dumps(said)
        return {"text": text, "proof": self._proof(text)}

    def forget(self, own: str) -> None:
        """One that speaks no more, as its random number is not answered any more."""
        self._turns.pop(own, None)

    def _proof(self, text: str) -> str:
        return hmac.new(self.token, text.encode(), hashlib.sha256).hexdigest()

    def opened(self, name: str, data: Any) -> dict[str, Any] | None:
        """What `name` has said; None where it is not proved, or was said before."""
        text, proof = (data.get(k) if isinstance(data, dict) else None for k in ("text", "proof"))
        if not (isinstance(text, str) and isinstance(proof, str)) or len(text) > self.MOST:
            return None
        if not hmac.compare_digest(proof.encode(), self._proof(text).encode()):
            return None
        said: dict[str, Any] = json.loads(text)
        if said["from"] != name or said["turn"] <= self._turns.get(said["own"], 0):
            return None
        self._turns[said["own"]] = said["turn"]
        return said


class Lighthouse:
    """What a host knows of the run (`Coordination`). url: of the Lighthouse. coordinator: on the
    host that decides; None: on all others. words: the run's, which others hear."""

    def __init__(
        self, url: str, sealed: Sealed, coordinator: Coordinator | None = None,
        words: Sequence[str] = (), observes: bool = False,
    ) -> None:  # fmt: skip
        require("elastic")
        self.url, self.orders, self.words = url, Orders(), tuple(words)
        self._sealed, self._coordinator, self._observes = sealed, coordinator, observes
        self._state = HostRanks(sealed.name, ())
        self._server: Any = None
        self._others: dict[str, tuple[str, float, HostRanks]] = {}  # its number, when it spoke
        self._to = ""  # the coordinator's random number
        self._asked: dict[str, str] = {}  # by name, those that are to hear theirs
        self._spoke: dict[str, float] = {}  # when each did last
        self._direct: set[str] = set()  # whose connections this kernel has seen
        self._missing: dict[str, float] = {}  # of these, who has none any more, and since when
        self.asks = ""  # the address of a host that is to leave, where this one observes
        self._heard = self._looked = time.monotonic()
        self._excused = False  # it stood still since it heard last
        self._quorum = 0.0  # when the last one was
        self._closed = threading.Event()
        self.shown: list[Any] = []  # of all hosts, what they tell
        self.known = threading.Event()  # the coordinator has answered
        self.leads = coordinator is not None
        self._thread = threading.Thread(target=self._run, daemon=True, name="lighthouse")

    @classmethod
    def serve(
        cls, address: str, port: int, sealed: Sealed, coordinator: Coordinator,
        words: Sequence[str],
    ) -> "Lighthouse":  # fmt: skip
        """Runs the Lighthouse at an address of this host. ValueError where it cannot listen."""
        own = cls(f"http://{address}:{port}", sealed, coordinator, words)
        _check_free(address, port)
        own._server = _torchft().LighthouseServer(
            bind=f"{address}:{port}", min_replicas=1, quorum_tick_ms=round(1000 * LIMITS.tick),
            join_timeout_ms=round(1000 * LIMITS.join),
            heartbeat_timeout_ms=round(1000 * LIMITS.beat),
        )  # fmt: skip
        return own

    def start(self) -> "Lighthouse":
        self._thread.start()
        return self

    def __call__(self, state: HostRanks) -> Orders:
        self._state = state
        if self._coordinator is not None:
            self.orders = self._coordinator.decide([state, *self._there()])
        else:
            self._look()
        return self.orders

    def _there(self) -> list[HostRanks]:
        """Other hosts that are not silent."""
        now, others, there = time.monotonic(), [*self._others.items()], list[HostRanks]()
        ended = self._ended({n: heard for n, (_, heard, _) in others}, now)
        for name, (_, heard, state) in others:
            if name in ended or now - heard > LIMITS.silent:
                self._others.pop(name, None)
            else:
                there.append(replace(state, unheard=now - heard))
        return there

    def _ended(self, heard: Mapping[str, float], now: float) -> set[str]:
        """Hosts whose launchers have ended: of their ranks connections are lost, and they are
        quiet, without a connection with the Lighthouse. heard: when each spoke."""
        parted, changing = self._parted(), self._changing
        asked = self._quorum if len(heard) > 1 else now  # one of two is no majority: no quorum
        launchers = Counter(map(address_of, (self._sealed.name, *heard)))
        quiet = {n: address_of(n) for n, at in heard.items() if now - at > LIMITS.quiet}
        connected = linked(self._address[1]) if quiet else None
        missing, ended = dict[str, float](), set[str]()
        for name, address in quiet.items():
            if connected is None or name not in self._direct or launchers[address] > 1:
                if address in parted and asked - heard[name] > LIMITS.parted:
                    ended.add(name)
            elif (changing or address in parted) and address not in connected:
                missing[name] = self._missing.get(name, now)
        self._missing = missing
        return ended | {n for n, since in missing.items() if now - since > LIMITS.missing}

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def _changing(self) -> bool:
        """Whether ranks leave a generation, or have not all come to the next one: who is lost
        meanwhile has no connections that others could miss."""
        known = {Seat(s.host, r.slot): r for s in (self._state, *self._states) for r in s.ranks}
        number, seats = self.orders.number, self.orders.seats
        meet = any(known[s].settled < number for s in seats if s in known)
        return self.orders.leave or (number > 1 and meet)

    def _parted(self) -> set[str]:
        """Addresses with which ranks have lost a connection, while nobody is known to be lost."""
        states = () if self.orders.leave else (self._state, *self._states)
        return {r.parted for s in states for r in s.ranks if r.met == self.orders.number}

    @property
    def _states(self) -> list[HostRanks]:
        return [state for _, _, state in [*self._others.values()]]

    @property
    def over(self) -> bool:
        """Whether no other host needs this one any more."""
        now = time.monotonic()
        return self._coordinator is None or self._server is None or not any(
            now - heard < LIMITS.call and any(not r.ended and not r.why for r in state.ranks)
            for _, heard, state in [*self._others.values()]
        )  # fmt: skip

    def close(self) -> None:
        """Others hear the last orders, and the Lighthouse ends."""
        if self._thread.is_alive() and not self.orders.apart:
            self._closed.wait(3 * LIMITS.turn)
        self._closed.set()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._server is not None:
            self._server.shutdown()  # ends the thread's call
            self._server = None
        if self._thread.is_alive():  # the interpreter does not end with a thread in such a call
            self._thread.join(3 * LIMITS.call)

    def _run(self) -> None:
        client, late = None, False  # the last call took too long
        while not self._closed.wait(LIMITS.turn):
            try:
                said, within = self._said(), LIMITS.of(self._patience)
                client = client or _torchft().LighthouseClient(self.url, within)
                # no address, store or step: all is in what is given along
                quorum = client.quorum(self._sealed.name, within, "", "", 0, 1, False, said)
            except Exception as error:  # also what is not JSON, of a stranger
                # a connection that was cut is slow to go on; half of all may have died at once
                client, late = (
                    client if isinstance(error, TimeoutError) and not late else None,
                    True,
                )
            else:
                late = False
                for member in quorum.participants:
                    with suppress(ValueError, KeyError, TypeError, RecursionError):
                        self._hear(member.replica_id, member.data)
                self._quorum = time.monotonic()

    @property
    def _patience(self) -> float:
        """Seconds for an answer."""
        silent = time.monotonic() - self._heard
        if self.leads or not self.known.is_set() or silent <= 2 * LIMITS.call:
            return LIMITS.call
        return min(LIMITS.hurried, max(LIMITS.turn, LIMITS.unreached - silent))

    def _said(self) -> dict[str, str]:
        if self._coordinator is None:
            return self._sealed.seal(
                to=self._to,
                observes=self._observes,
                asks=self.asks,
                state=to_plain(self._state),
            )
        for name in [n for n, at in self._spoke.items() if time.monotonic() - at > LIMITS.forget]:
            self._sealed.forget(self._asked.pop(name))
            self._direct.discard(name)
            self._others.pop(name, None)
            del self._spoke[name]
        return self._sealed.seal(
            of=self._asked, orders=to_plain(self.orders), words=[*self.words],
            states=[to_plain(s) for s in (self._state, *self._states)],
        )  # fmt: skip

    def _hear(self, name: str, data: Any) -> None:
        said = None if name == self._sealed.name else self._sealed.opened(name, data)
        if said is None:
            return
        if self._coordinator is None:
            if "orders" in said and said["of"].get(self._sealed.name) == self._sealed.own:
                self._to, self._heard, self._excused = said["own"], time.monotonic(), False
                if not self._closed.is_set():
                    self.orders = of_plain(Orders, said["orders"], "orders")
                    self.words, self.shown = tuple(said["words"]), said["states"]
                    self.known.set()
        elif "state" in said:
            self._asked[name] = said["own"]
            self._spoke[name] = time.monotonic()
            if said["to"] == self._sealed.own and said["observes"]:
                self._coordinator.asked.add(said["asks"])
            elif said["to"] == self._sealed.own:
                state = of_plain(HostRanks, said["state"], "state")
                if name not in self._others and address_of(name) in (
                    linked(self._address[1]) or ()
                ):
                    self._direct.add(name)
                self._others[name] = said["own"], time.monotonic(), state

    def _look(self) -> None:
        """Ends this host's part where the coordinator is not there any more."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > LIMITS.away and not self._excused:
            self._excused = True
            self._heard = max(self._heard, self._looked - LIMITS.unreached + LIMITS.again)
        silent = self._looked - self._heard
        if silent > LIMITS.unreached or (silent > LIMITS.refused and self._refused()):
            why = f"the coordinator at {self.url} is not reached any more"
            self.orders = Orders(self.orders.number, apart=True, end=why)

    def _refused(self) -> bool:
        try:
            socket.create_connection(self._address, LIMITS.turn).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False


def _torchft() -> Any:
    return importlib.import_module("torchft.coordination")


def _check_free(address: str, port: int) -> None:
    try:
        socket.create_server((address, port)).close()
    except OSError as error:
        raise ValueError(
            f"the coordinator cannot listen at {address}:{port} ({error.strerror}): give another "
            "port"
        ) from None


def reaching(host: str, port: int, interface: str | None = None) -> tuple[str, str]:
    """The address by which this host reaches another, and the name of its interface. ValueError
    where it does not, or where the interface has none."""
    known = addresses()
    if interface is not None:
        if interface not in known:
            named = ", ".join(sorted(known))
            raise ValueError(f"--interface {interface}: this host has {named} with an address")
        return known[interface], interface
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
            link.connect((host, port))
            own = link.getsockname()[0]
    except OSError as error:
        raise ValueError(f"the coordinator {host}:{port} is not reached: {error}") from None
    return own, next((name for name, address in known.items() if address == own), "")
