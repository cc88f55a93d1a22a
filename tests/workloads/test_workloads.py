"""Tests of workloads: validation, TARGETs, the bundled ones."""

from pathlib import Path

import pytest
import torch
from torch import nn

from synchromesh.workloads import BUNDLED
from synchromesh.workloads.images import loss
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload

IMAGES = ("digits", "mnist", "cifar10", "cifar100", "coco")
ROWS = [(torch.full((3,), float(i)), torch.tensor(i % 2)) for i in range(5)]


def workload(**changes) -> Workload:
    given = {
        "model": lambda: nn.Linear(3, 2), "loss": loss, "train_data": ROWS, "batch_size": 2,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1),
    }  # fmt: skip
    return Workload(**{**given, **changes})


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


class Noisy:
    """Rows that draw from torch's own generator, as augmented ones do."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


def test_an_example_draws_by_seed_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    one = workload(train_data=Noisy()).example(3, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert torch.equal(workload(train_data=Noisy()).example(3, seed=1), one)
    assert not torch.equal(workload(train_data=Noisy()).example(3, seed=2), one)


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


@pytest.mark.parametrize("name", [n for n in BUNDLED if n.split("/")[0] in IMAGES])
def test_bundled_workload_makes_seeded_rows(name: str) -> None:
    found = load(name, synthetic=True)
    images, labels = found.example(3)
    labelled = images.shape[2:] if name.startswith("coco/") else ()
    assert found.name == name and images.dtype == torch.float32
    assert labels.shape == (3, *labelled)
    assert torch.equal(images, load(name, synthetic=True).example(3)[0])
    assert len({tuple(x[0, 0].tolist()) for x in images}) == 3
    if name in ("digits/cnn", "digits/wide", "digits/vit", "cifar100/resnet18"):
        model = found.model()
        value = found.loss(model, (images, labels))
        value.backward()
        assert value.shape == () and all(p.grad is not None for p in model.parameters())
        right = found.metric(model.eval(), (images, labels))["accuracy"]
        assert 0 <= float(right) <= 3


def test_digits_are_split_without_overlap() -> None:
    found = load("digits/cnn")
    rows = [tuple(x.flatten().tolist()) for part in (found.train_data, found.valid_data)
            for x, _ in (part[i] for i in range(len(part)))]  # fmt: skip
    assert len(rows) == 1797 and len(set(rows)) == 1797
    values = torch.tensor(rows[:1437])
    assert abs(float(values.mean())) < 0.01 and abs(float(values.std()) - 1) < 0.01
    with pytest.raises(ValueError, match="read no folder: leave --data /x out"):
        load("digits/cnn", "/x")
