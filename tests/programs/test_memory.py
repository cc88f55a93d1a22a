"""Live bytes against sequences whose storages are known."""

import gc

import pytest
import torch

from synchromesh.launcher.machine import device_bytes
from synchromesh.programs.memory import LiveBytes, process_bytes, storage_bytes

KB = 1000


def kb() -> torch.Tensor:
    return torch.ones(KB // 4)


def test_a_sequence() -> None:
    with LiveBytes() as live:
        a = kb()
        b = a + 1
        assert (live.now, live.peak) == (2 * KB, 2 * KB)
        del a
        assert (live.now, live.peak) == (KB, 2 * KB)
        c = b * 2
        assert (live.now, live.peak) == (2 * KB, 2 * KB)
        del b, c
    assert (live.now, live.peak) == (0, 2 * KB)


def test_views_and_writes_make_nothing() -> None:
    before = kb()
    with LiveBytes() as live:
        before.view(10, -1).t()
        before.add_(1)
        before[3:7].zero_()
        assert live.peak == 0
        made = before + 1
        rows = made.view(10, -1)
        del made
        assert live.now == KB  # the view keeps it
        del rows
        assert live.now == 0


def test_what_should_stay_counts_on_when_it_has_died() -> None:
    with LiveBytes() as live:
        a = kb()
        live.stays(a)
        b = a + 1
        del b
        view = a[1:]
        del a
        assert (live.now, live.peak, live.peak_staying) == (KB, 2 * KB, 2 * KB)
        del view  # now it has died
        c = kb()
        d = c + 1
        assert (live.now, live.peak, live.peak_staying) == (2 * KB, 2 * KB, 3 * KB)
        del c, d
    with LiveBytes(limit=2 * KB) as live, pytest.raises(MemoryError, match="3000 bytes"):
        a = kb()
        live.stays(a)
        del a
        b = kb()
        b + 1


def test_known_tensors_count_once() -> None:
    x = kb()
    with LiveBytes([x, x.view(10, -1)]) as live:
        y = x * 2
        assert live.now == 2 * KB
        del y
        del x
    assert (live.now, live.peak) == (0, 2 * KB)


def test_backward() -> None:
    x = kb().requires_grad_()
    with LiveBytes() as live:
        y = x.exp()  # kept by its backward
        total = y.sum()
        del y
        assert live.now == KB + 4
        total.backward()
        del total
        gc.collect()
        assert live.now == KB, "the gradient alone is left"
    assert x.grad is not None and live.peak >= 2 * KB


def test_bytes_of_storages() -> None:
    x = kb()
    assert storage_bytes([x, x[:3], kb()]) == 2 * KB
    assert process_bytes() > 1 << 20
    assert device_bytes(torch.device("cpu")) > 1 << 24
