"""The heap of this process on a CPU: memory that a step frees stays for the next one.

glibc hands large blocks back to the system when they are freed and gets them anew, page by page,
a page fault for every 4 KiB: 57,000 of them, a quarter of the time of a step, where three
convolutions work on 256 images of 32x32 on one core. All tensors come from the heap then, which
is not trimmed. (M_MMAP_THRESHOLD alone does not do: above 32 MiB glibc would map blocks still.)

`man 3 mallopt`, https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html (memory allocator)
"""

import ctypes
import os
from contextlib import suppress
from enum import IntEnum


class Mallopt(IntEnum):
    """Of mallopt (malloc.h)."""

    M_TRIM_THRESHOLD = -1
    M_MMAP_THRESHOLD = -3
    M_MMAP_MAX = -4


SET_BY_USER = (
    "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES",
)  # fmt: skip


def keep() -> bool:
    """Asks glibc to keep what is freed; False where it is not glibc, or the user's environment
    says how it should behave."""
    return _ask((Mallopt.M_MMAP_MAX, 0), (Mallopt.M_TRIM_THRESHOLD, -1))


def keep_small() -> bool:
    """Asks glibc to keep only blocks below 128 KiB, from now on: where memory is short. Freed ones
    leave holes that later ones fit into badly, so that ranks with 594 MiB of tensors held 1,644
    more than before there were any; 600 so. Page faults take 5 to 20 % of a step's processor time.
    """
    return _ask((Mallopt.M_MMAP_THRESHOLD, 1 << 17), (Mallopt.M_MMAP_MAX, 1 << 16))


def _ask(*options: tuple[Mallopt, int]) -> bool:
    if any(name in os.environ for name in SET_BY_USER):
        return False
    with suppress(AttributeError, OSError, TypeError):  # where it is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        return all([mallopt(*option) for option in options])
    return False


def release() -> None:
    """Gives the system back what is free now: what is freed later is kept. After something that
    will not come again, as measuring, and where memory is short: of 881 MiB that steps of a model
    of 100 M parameters under `tensor` on four ranks took, 158 were holes between blocks, and steps
    without them were as quick. Nothing where it is not glibc."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
