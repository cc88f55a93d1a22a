"""Tests of CIFAR's files: every layout gives the same rows, damaged ones a sentence."""

import io
import lzma
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from synchromesh.workloads.cifar_files import CIFAR10, CIFAR100, Cifar
from tests.real_data import data

BOTH = pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda k: k.name)


def record_bytes(kind: Cifar, count: int, seed: int = 0) -> bytes:
    rows = np.random.default_rng(seed).integers(0, 256, (count, kind.record), np.uint8)
    rows[:, : kind.labels] %= kind.classes
    return rows.tobytes()


def pack(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write(folder: Path, members: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in members.items():
        (folder / name).write_bytes(content)


@BOTH
def test_every_layout_gives_the_same_rows(kind: Cifar, tmp_path: Path) -> None:
    names = kind.members["train"]
    parts = [record_bytes(kind, 3, seed) for seed in range(len(names))]
    content = b"".join(parts)
    table = np.frombuffer(content, np.uint8).reshape(-1, kind.record)
    classes, pixels = table[:, kind.labels - 1], table[:, kind.labels :]
    python = {
        name: pickle.dumps({b"data": rows[:, kind.labels :],
                            kind.key: rows[:, kind.labels - 1].tolist()}, protocol=2)
        for name, rows in zip(names, np.split(table, len(names)), strict=True)
    }  # fmt: skip
    binary = {f"{name}.bin": part for name, part in zip(names, parts, strict=True)}
    write(tmp_path / "plain", binary)
    write(tmp_path / "unpacked" / kind.binary, binary)
    write(tmp_path / "archive", {})
    members = [*binary.items()][::-1]  # the order in the archive is not that of the files
    pack(
        tmp_path / f"archive/{kind.archive}-binary.tar.gz",
        {f"{kind.binary}/{name}": part for name, part in members},
    )
    half = 2 * kind.record
    halves = {"train-0.bin.xz": content[:half], "train-1.bin.xz": content[half:]}
    write(tmp_path / "pieces", {name: lzma.compress(x) for name, x in halves.items()})
    write(tmp_path / "python" / kind.python, python)
    write(tmp_path / "packed", {})
    pack(
        tmp_path / f"packed/{kind.archive}-python.tar.gz",
        {f"{kind.python}/{name}": part for name, part in python.items()},
    )
    for layout in ("plain", "unpacked", "archive", "pieces", "python", "packed"):
        found, labels = kind.read(tmp_path / layout, "train")
        assert found.shape == (len(table), 3, 32, 32) and labels.tolist() == classes.tolist()
        assert found.flatten().tolist() == pixels.flatten().tolist()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        CIFAR100.read(tmp_path / "none", "train")
    with pytest.raises(ValueError, match=r"holds no CIFAR-100 train data: looked for train\.bin"):
        CIFAR100.read(tmp_path, "train")
    with pytest.raises(
        ValueError, match=r"data_batch_1.bin to data_batch_5.bin and test_batch.bin, cifar-10-bin"
    ):
        CIFAR10.read(tmp_path, "test")
    (tmp_path / "data_batch_1.bin").write_bytes(record_bytes(CIFAR10, 1))
    with pytest.raises(ValueError, match=r"has no file data_batch_2\.bin: fetch"):
        CIFAR10.read(tmp_path, "train")
    (tmp_path / "data_batch_1.bin").unlink()
    pack(tmp_path / "cifar-10-binary.tar.gz", {"data_batch_3.bin": b""})
    with pytest.raises(ValueError, match=r"tar.gz has no file data_batch_1\.bin, data_batch_2\."):
        CIFAR10.read(tmp_path, "train")


def test_damaged_records(tmp_path: Path) -> None:
    file = tmp_path / "train.bin"
    for content, message in {
        record_bytes(CIFAR100, 2)[:-1]: "not a multiple of 3074",
        b"": "0 bytes of records",
        b"\x00\xff" * (CIFAR100.record // 2): "a label 255, not 0 to 99",
    }.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            CIFAR100.read(tmp_path, "train")
    with pytest.raises(ValueError, match="a label 10, not 0 to 9: it is not CIFAR-10,"):
        CIFAR10.records(b"\x0a" + bytes(CIFAR10.record - 1), file)
    file.unlink()
    (tmp_path / "train-0.bin.xz").write_bytes(lzma.compress(record_bytes(CIFAR100, 2))[:-20])
    with pytest.raises(ValueError, match="not a whole xz file"):
        CIFAR100.read(tmp_path, "train")


class Attack:
    """A pickle that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attacks = {
        "call": Attack(canary),
        "inside": {b"data": np.array([Attack(canary)], dtype=object), b"fine_labels": [1]},
        "objects": {b"data": np.array([[1]], dtype=object), b"fine_labels": [1]},
    }
    for name, attack in attacks.items():
        with pytest.raises(ValueError, match="which no CIFAR-100 file needs: it is not loaded"):
            CIFAR100.pickled(pickle.dumps(attack, protocol=2), Path(name))
    assert not canary.exists()
    with pytest.raises(ValueError, match="not CIFAR-100's Python version"):
        CIFAR100.pickled(b"\x80\x02}.", Path("empty"))
    huge = b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7ftR."
    with pytest.raises(ValueError, match="not CIFAR-100's Python version"):
        CIFAR100.pickled(huge, Path("huge"))


def test_the_tiny_python_version(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python-tiny.tar.gz").symlink_to(
        (data("cifar100") / "cifar-100-python-tiny.tar.gz").resolve()
    )
    pixels, labels = CIFAR100.read(tmp_path, "test")
    assert pixels.shape[1:] == (3, 32, 32) and len(pixels) == len(labels) >= 100
