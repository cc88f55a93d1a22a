"""A tag: the name of one lab's namespaces and control groups, which says whose they are.

    smlab-1234-567890-switch      of the lab whose keeper is process 1234, started at tick 567890
    smlab-1234-567890-0           its host 0

A process id alone may be in use again by another process; with the start time it names one for
good. So what a dead keeper left can be distinguished from what is in use or not a lab's at all."""

import os
import re
import select
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TAG = re.compile(r"smlab-([0-9]+)-([0-9]+)")
PART = re.compile(r"smlab-([0-9]+)-([0-9]+)-(switch|[0-9]+)")


@dataclass(frozen=True, order=True)
class Tag:
    """A keeper's process id and the clock ticks from boot to its start."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"smlab-{self.pid}-{self.start}"

    def part(self, what: int | str) -> str:
        """The name of the namespace and control group of a host or of the switch."""
        return f"{self}-{what}"

    @classmethod
    def of(cls, pid: int) -> "Tag | None":
        """The tag of a process; None where it runs no more (a zombie does not)."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # from the third field, the state, on
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def parse(cls, text: str) -> "Tag":
        """The tag that a text like `smlab-1234-567890` names."""
        found = TAG.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a tag such as smlab-1234-567890")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def in_name(cls, name: str) -> "Tag | None":
        """The tag that the name of a part starts with; None where it is no part of a lab."""
        found = PART.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None

    @property
    def alive(self) -> bool:
        """Whether the keeper still runs."""
        return Tag.of(self.pid) == self

    def end(self, seconds: float) -> None:
        """SIGTERM to the process, and wait for its end; TimeoutError after `seconds`."""
        with suppress(ProcessLookupError):
            process = os.pidfd_open(self.pid)  # from here on the id cannot become another's
            try:
                if self.alive:
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    ended, _, _ = select.select([process], [], [], seconds)
                    if not ended:
                        raise TimeoutError(
                            f"the lab's keeper, process {self.pid}, does not end ({seconds:g} s): "
                            f"kill it (kill -9 {self.pid}) and repeat the command"
                        )
            finally:
                os.close(process)
