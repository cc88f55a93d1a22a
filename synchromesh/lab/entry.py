"""The way into a host: joins its control groups, cores and namespaces, then becomes the command.

    python -S -I entry.py NAMESPACE CORES PARENT DOORS... -- COMMAND...

PARENT is the process whose death is this one's (0: none); CORES and the host's cgroup.procs files
(DOORS) come from `Lab`. A program of its own, with nothing imported that starts slowly, so that
nothing of the command runs outside, and a process with threads need run no code between fork and
exec. As in a container, what runs on a host sees the memory limit of its host, read-only."""

import ctypes
import os
import signal
import sys
from enum import IntEnum, IntFlag

CGROUPS = "/sys/fs/cgroup"


class Clone(IntEnum):
    """Kinds of namespaces, for `setns` and `unshare` (linux/sched.h)."""

    MOUNTS = 0x00020000
    CGROUP = 0x02000000
    NETWORK = 0x40000000


class Mount(IntFlag):
    """Flags of `mount` and `umount2` (linux/mount.h)."""

    READ_ONLY = 1
    DETACH = 2
    RECURSIVE = 0x4000
    SLAVE = 1 << 19


def enter(namespace: str, cores: set[int], parent: int, doors: list[str]) -> None:
    """Join the host's namespace, cores and control groups; OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if parent:
        _done(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os.kill(os.getpid(), signal.SIGKILL)
    handle = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    _done(libc.setns(handle, Clone.NETWORK), "setns")
    os.close(handle)
    # As `ip netns exec` does: /sys/class/net shows the interfaces of where it was mounted.
    _done(libc.unshare(Clone.MOUNTS), "unshare")
    _done(libc.mount(b"", b"/", b"none", Mount.SLAVE | Mount.RECURSIVE, None), "mount /")
    os.sched_setaffinity(0, cores)
    for door in doors:
        with open(door, "w") as file:
            file.write(str(os.getpid()))
    unified = os.path.exists(f"{CGROUPS}/cgroup.controllers")
    limited = any(door.startswith(f"{CGROUPS}/memory/") for door in doors)
    # what is mounted from now on shows this group as the root: no other can be reached
    _done(libc.unshare(Clone.CGROUP), "unshare")
    libc.umount2(b"/sys", Mount.DETACH)  # with the control groups below it: none can be left
    _done(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None), "mount /sys")
    if unified:
        _show(libc, CGROUPS, "cgroup2", "")
    elif limited:
        _done(libc.mount(b"none", CGROUPS.encode(), b"tmpfs", 0, None), f"mount {CGROUPS}")
        os.mkdir(f"{CGROUPS}/memory")
        _show(libc, f"{CGROUPS}/memory", "cgroup", "memory")


def _show(libc: ctypes.CDLL, place: str, kind: str, controller: str) -> None:
    """Mounts a tree of control groups there, read-only: its limits can be seen."""
    fields = place.encode(), kind.encode(), Mount.READ_ONLY, controller.encode() or None
    _done(libc.mount(b"none", *fields), f"mount {place}")


def _done(code: int, what: str) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main(arguments: list[str]) -> None:
    """Enter the host that the arguments name, and become the command."""
    split = arguments.index("--")
    namespace, cores, parent, *doors = arguments[:split]
    command = arguments[split + 1 :]
    try:
        enter(namespace, {int(core) for core in cores.split(",")}, int(parent), doors)
    except OSError as error:
        sys.exit(f"synchromesh: the way into {namespace} is barred: {error}")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"synchromesh: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
