"""Tests of workloads: validation, TARGETs, the bundled ones and their data formats."""

import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from synchromesh.workloads import BUNDLED, cifar_files, idx, sst2
from synchromesh.workloads.images import ImageFormat, Images, loss, metric
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload

DATA = Path(os.environ.get("SYNCHROMESH_DATA", Path(__file__).parents[2] / "../shared/data"))
ROWS = [(torch.full((3,), float(i)), torch.tensor(i % 2)) for i in range(5)]


def workload(**changes) -> Workload:
    given = {
        "model": lambda: nn.Linear(3, 2), "loss": loss, "train_data": ROWS, "batch_size": 2,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }  # fmt: skip
    return Workload(**{**given, **changes})


def data(folder: str) -> Path:
    path = DATA / folder
    if not path.is_dir():
        pytest.skip(f"no data at {path}: set SYNCHROMESH_DATA")
    return path


# The value


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError) as error:
        workload(
            model=nn.Linear(1, 1), batch_size=0, epochs=True, train_data=[], metric=3, name="w"
        )
    with pytest.raises(ValueError, match="name must be text, not 5"):
        workload(name=5)
    for part in (
        "workload w: ", "model must be a function that builds", "batch_size must", "epochs must",
        "train_data is empty (0 items)", "metric must be a function, not int",
    ):  # fmt: skip
        assert part in str(error.value)


def test_what_its_functions_return_is_checked() -> None:
    parameters = [*nn.Linear(1, 1).parameters()]
    nothing = workload(
        name="w", model=lambda: None, optimizer=lambda p: [], scheduler=lambda o: None
    )
    for build, part in {
        nothing.build: "model returned NoneType: it should return a torch.nn.Module",
        lambda: nothing.build_optimizer(parameters): "optimizer returned list: it should",
        lambda: nothing.build_scheduler(torch.optim.SGD(parameters)): "scheduler returned None",
    }.items():
        with pytest.raises(ValueError, match=f"workload w: {part}"):
            build()
    assert workload(scheduler=None).build_scheduler(torch.optim.SGD(parameters)) is None


def test_batch_larger_than_the_data() -> None:
    workload(batch_size=5).check_batch()
    with pytest.raises(
        ValueError, match=r"batch_size\(6\) > 5 items; use a batch size of at most 5"
    ):
        workload(batch_size=6).check_batch()


def test_example_is_drawn_by_seed() -> None:
    one, two = workload().example(7, seed=3), workload().example(7, seed=3)
    assert one[0].shape == (7, 3) and torch.equal(one[0], two[0])
    assert not torch.equal(one[0], workload().example(7, seed=4)[0])
    assert workload().example()[1].shape == (2,)
    assert workload(collate=len).example(4) == 4


# TARGETs

FILE = """
import torch
import synchromesh as sm
from torch import nn

def build():
    return sm.Workload(
        model=lambda: nn.Linear(2, 1), loss=lambda m, b: m(b).mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train_data=[torch.ones(2)] * 4, batch_size=2)

def wrong():
    return 3

def broken():
    missing = {}
    return missing["rows"]

def ended():
    raise SystemExit(3)
"""


def test_target_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    found = load(f"{file}:build")
    assert found.name == "build" and found.example().shape == (2, 2)
    for function, message in {
        "biuld": "has no function 'biuld' (did you mean build?)",
        "wrong": "mine.py:wrong returned int, not a synchromesh.Workload",
        "broken": """mine.py:broken failed: line 17 (return missing["rows"]): KeyError: 'rows'""",
        "ended": "mine.py:ended failed: line 20 (raise SystemExit(3)): SystemExit: 3",
    }.items():
        with pytest.raises(ValueError) as error:
            load(f"{file}:{function}")
        assert message in str(error.value)
    with pytest.raises(ValueError, match="chooses its own data: leave --data out"):
        load(f"{file}:build", "/data")
    with pytest.raises(ValueError, match="names a file but no function"):
        load(str(file))
    with pytest.raises(ValueError, match=r"there is no file .*mien.py \(did you mean mine.py\?\)"):
        load(f"{tmp_path}/mien.py:build")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ValueError, match=r"folder.py is a folder: a TARGET is path/to/file.py"):
        load(f"{tmp_path}/folder.py:build")
    file.write_text("x = 1\ndef build(:\n")
    with pytest.raises(ValueError, match="could not be imported: line 2: SyntaxError"):
        load(f"{file}:build")
    file.write_text("x = 1\nx.y\n")
    with pytest.raises(ValueError, match=r"could not be imported: line 2 \(x.y\): AttributeError"):
        load(f"{file}:build")


def test_unknown_bundled_workload() -> None:
    with pytest.raises(
        ValueError, match=r"'digits/cn' \(did you mean digits/cnn or digits/vit\?\)"
    ):
        load("digits/cn")


# Bundled workloads


@pytest.mark.parametrize("name", [n for n in BUNDLED if n not in sst2.WORKLOADS])
def test_bundled_workload_makes_seeded_rows(name: str) -> None:
    found = load(name, synthetic=True)
    images, labels = found.example(3)
    assert found.name == name and images.dtype == torch.float32 and labels.shape == (3,)
    assert torch.equal(images, load(name, synthetic=True).example(3)[0])
    assert len({tuple(x.flatten().tolist()) for x in images}) == 3
    if name in ("digits/cnn", "digits/vit", "cifar100/resnet18"):
        model = found.model()
        value = found.loss(model, (images, labels))
        value.backward()
        assert value.shape == () and all(p.grad is not None for p in model.parameters())
        right = found.metric(model.eval(), (images, labels))["accuracy"]
        assert 0 <= float(right) <= 3


def test_large_models_have_their_published_sizes() -> None:
    sizes = {"cifar100/vit_b16": 86e6, "cifar100/resnet50": 23.7e6, "cifar100/vit_tiny": 5.4e6,
             "mnist/vgg11": 28.1e6}  # fmt: skip
    for name, size in sizes.items():
        with torch.device("meta"):
            model = load(name, synthetic=True).model()
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.02)


def test_digits_are_split_without_overlap() -> None:
    found = load("digits/cnn")
    rows = [tuple(x.flatten().tolist()) for part in (found.train_data, found.valid_data)
            for x, _ in (part[i] for i in range(len(part)))]  # fmt: skip
    assert len(rows) == 1797 and len(set(rows)) == 1797
    values = torch.tensor(rows[:1437])
    assert abs(float(values.mean())) < 0.01 and abs(float(values.std()) - 1) < 0.01
    with pytest.raises(ValueError, match="read no folder: leave --data /x out"):
        load("digits/cnn", "/x")


def test_metric_counts_right_rows() -> None:
    model = nn.Identity()
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert float(metric(model, (scores, torch.tensor([0, 1, 1])))["accuracy"]) == 2


def test_images_are_padded_or_resized() -> None:
    pixels = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.int64)
    padded, _ = Images(pixels, labels, ImageFormat((0.5,), (0.5,), 6))[0]
    assert padded.shape == (1, 6, 6) and padded.sum() == 16  # (1 - 0.5) / 0.5 inside, 0 around
    resized, _ = Images(pixels, labels, ImageFormat((0.5,), (0.5,), 20))[0]
    assert resized.shape == (1, 20, 20) and torch.allclose(resized, torch.ones(1, 20, 20))


# IDX


def idx_bytes(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def test_idx_raw_and_packed(tmp_path: Path) -> None:
    values = np.arange(24).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx_bytes(values))
    (tmp_path / "b.gz").write_bytes(gzip.compress(idx_bytes(values)))
    for name in "ab":
        assert idx.read(tmp_path, name, 3).tolist() == values.tolist()


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
            idx.read(tmp_path, name, 3)


def test_mnist() -> None:
    found = load("mnist/vgg11", data("mnist"))
    assert (len(found.train_data), len(found.valid_data)) == (60000, 10000)
    image, label = found.train_data[0]
    assert image.shape == (1, 32, 32) and int(label) == 5


def test_mnist_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mnist/vgg11 reads its data from a folder"):
        load("mnist/vgg11")
    with pytest.raises(ValueError, match="there is no such folder"):
        load("mnist/vgg11", tmp_path / "none")


# CIFAR-100


def record_bytes(count: int, seed: int = 0) -> bytes:
    rows = np.random.default_rng(seed).integers(0, 256, (count, cifar_files.RECORD), np.uint8)
    rows[:, :2] %= 20
    return rows.tobytes()


def pack(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_every_layout_of_cifar100_gives_the_same_rows(tmp_path: Path) -> None:
    content = record_bytes(6)
    table = np.frombuffer(content, np.uint8).reshape(6, -1)
    python = pickle.dumps(
        {b"data": table[:, 2:], b"fine_labels": table[:, 1].tolist()}, protocol=2
    )
    for name in ("bin", "archive", "pieces", "python"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/train.bin").write_bytes(content)
    pack(tmp_path / "archive/cifar-100-binary.tar.gz", {"cifar-100-binary/train.bin": content})
    half = 2 * cifar_files.RECORD
    (tmp_path / "pieces/train-0.bin.xz").write_bytes(lzma.compress(content[:half]))
    (tmp_path / "pieces/train-1.bin.xz").write_bytes(lzma.compress(content[half:]))
    pack(tmp_path / "python/cifar-100-python.tar.gz", {"cifar-100-python/train": python})
    for name in ("bin", "archive", "pieces", "python"):
        pixels, labels = cifar_files.read(tmp_path / name, "train")
        assert pixels.shape == (6, 3, 32, 32) and labels.tolist() == table[:, 1].tolist()
        assert torch.equal(pixels.flatten(), torch.from_numpy(table[:, 2:].copy()).flatten())


def test_cifar100_faults(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        cifar_files.read(tmp_path / "none", "train")
    with pytest.raises(ValueError, match=r"holds no CIFAR-100 train data: looked for train\.bin"):
        cifar_files.read(tmp_path, "train")
    file = tmp_path / "train.bin"
    for content, message in {
        record_bytes(2)[:-1]: "not a multiple of 3074",
        b"": "0 bytes of records",
        b"\x00\xff" * (cifar_files.RECORD // 2): "a fine label 255, not 0 to 99",
    }.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            cifar_files.read(tmp_path, "train")
    file.unlink()
    (tmp_path / "train-0.bin.xz").write_bytes(lzma.compress(record_bytes(2))[:-20])
    with pytest.raises(ValueError, match="not a whole xz file"):
        cifar_files.read(tmp_path, "train")


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
            cifar_files.pickled(pickle.dumps(attack, protocol=2), Path(name))
    assert not canary.exists()
    with pytest.raises(ValueError, match="not CIFAR-100's Python version"):
        cifar_files.pickled(b"\x80\x02}.", Path("empty"))
    huge = b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7ftR."
    with pytest.raises(ValueError, match="not CIFAR-100's Python version"):
        cifar_files.pickled(huge, Path("huge"))


def test_cifar100_pieces() -> None:
    found = load("cifar100/resnet18", data("cifar100"))
    assert (len(found.train_data), len(found.valid_data)) == (10000, 2000)
    assert found.valid_data.labels[:2].tolist() == [0, 1]
    image, _ = replace(found).train_data[5]
    assert image.shape == (3, 32, 32)


def test_cifar100_python_version(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python-tiny.tar.gz").symlink_to(
        (data("cifar100") / "cifar-100-python-tiny.tar.gz").resolve()
    )
    pixels, labels = cifar_files.read(tmp_path, "test")
    assert pixels.shape[1:] == (3, 32, 32) and len(pixels) == len(labels) >= 100
