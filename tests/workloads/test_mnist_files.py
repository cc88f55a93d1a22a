"""Tests of MNIST's files, IDX arrays: raw, packed and damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from synchromesh.workloads import mnist_files


def idx_bytes(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def test_idx_raw_and_packed(tmp_path: Path) -> None:
    values = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx_bytes(values))
    (tmp_path / "b.gz").write_bytes(gzip.compress(idx_bytes(values)))
    for name in "ab":
        assert mnist_files.read_idx(tmp_path, name, 3).tolist() == values.tolist()


def test_idx_faults(tmp_path: Path) -> None:
    content = idx_bytes(np.arange(24).reshape(2, 3, 4))
    (tmp_path / "short").write_bytes(content[:-1])
    (tmp_path / "labels").write_bytes(idx_bytes(np.arange(3)))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(content)[:-9])
    (tmp_path / "text.gz").write_bytes(b"<html>")
    for name, message in {
        "short": r"holds 23 values where its header \(2, 3, 4\) promises 24",
        "labels": "begins with 00000801, not 00000803",
        "cut": "not a whole gzip file",
        "text": "not a whole gzip file",
        "none": "has neither none nor none.gz: name the folder",
    }.items():
        with pytest.raises(ValueError, match=message):
            mnist_files.read_idx(tmp_path, name, 3)
