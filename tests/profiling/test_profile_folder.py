"""The stored profiles: what was stored is found again, no fault of it ends a run, and each thing
that numbers depend on changes the key."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.engine.world import World
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.profiling import profile_folder as module
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_folder import (
    ProfileFolder,
    of_optimizer,
    of_rank,
    of_ranks,
    profile_key,
)
from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import trace
from synchromesh.values import document
from tests.values.test_profile import FULL, changed

CPU = torch.device("cpu")
HERE = {"rows": 8, "hosts": [0, 0], "model": "abc", "optimizer": {"class": "SGD"}}
# two curves in each direction, as two ranks have
PROFILE = replace(
    FULL,
    compute={k: replace(c, backward=c.forward) for k, c in FULL.compute.items()},
)


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_round_trip(tmp_path: Path) -> None:
    cache = ProfileFolder(tmp_path / "made" / "when needed")
    assert cache.find(HERE) is None and not cache.folder.exists()
    cache.store(HERE, PROFILE)
    found = cache.find(HERE)
    assert found is not None and found.profile == PROFILE
    assert len(found.day) == len("2026-01-31") and found.written.startswith(found.day)
    assert cache.find({**HERE, "rows": 9}) is None
    cache.store(HERE, replace(PROFILE, host=7.0))
    found = cache.find(HERE)
    assert found is not None and found.profile.host == 7.0
    assert files(cache.folder) == [cache.path(HERE).name], "no draft is left"


def test_the_path_depends_on_every_circumstance_and_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProfileFolder(tmp_path)
    others = [
        {**HERE, "rows": 9}, {**HERE, "hosts": [0, 1]}, {**HERE, "model": "abd"},
        {**HERE, "optimizer": {"class": "Adam"}}, {k: v for k, v in HERE.items() if k != "rows"},
    ]  # fmt: skip
    paths = [cache.path(h) for h in (HERE, *others)]
    assert len(set(paths)) == len(paths)
    assert cache.path(dict(reversed(HERE.items()))) == paths[0], "their order means nothing"
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    assert cache.path(HERE) not in paths


DAMAGES: dict[str, Any] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no text": lambda text: "\x00\xff" * 40,
    "no mapping": lambda text: "[1, 2]",
    "older": lambda text: json.dumps({**json.loads(text), "format": 0}),
    "of others": lambda text: json.dumps({**json.loads(text), "circumstances": {}}),
    "a key more": lambda text: json.dumps({**json.loads(text), "more": 1}),
    "not a number": lambda text: text.replace("0.001", "NaN", 1),
    "curves of one rank and of two": lambda text: json.dumps(
        {**json.loads(text), "profile": FULL.to_dict()}
    ),
    "no curves": lambda text: json.dumps(
        {**json.loads(text), "profile": changed("compute.a.forward", [])}
    ),
    "deep": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_replaced(damage: str, tmp_path: Path) -> None:
    cache = ProfileFolder(tmp_path)
    cache.store(HERE, PROFILE)
    path = cache.path(HERE)
    path.write_text(DAMAGES[damage](path.read_text()), encoding="latin-1")
    with pytest.warns(UserWarning) as caught:
        assert cache.find(HERE) is None
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    assert "measured anew and the file replaced" in str(caught[0].message)
    cache.store(HERE, PROFILE)
    found = cache.find(HERE)
    assert found is not None and found.profile == PROFILE


def test_a_folder_in_place_of_the_file_is_no_failure(tmp_path: Path) -> None:
    cache = ProfileFolder(tmp_path)
    cache.path(HERE).mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert cache.find(HERE) is None
    with pytest.warns(UserWarning, match="cannot be kept"):
        cache.store(HERE, PROFILE)
    assert files(tmp_path) == [cache.path(HERE).name]


def test_an_unwritable_folder_is_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    cache = ProfileFolder(file / "profiles")
    with pytest.warns(UserWarning) as caught:
        assert cache.find(HERE) is None
        cache.store(HERE, PROFILE)
    (warning,) = caught
    assert str(file) in str(warning.message) and "SYNCHROMESH_CACHE" in str(warning.message)


def test_a_disk_that_fills_up_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProfileFolder(tmp_path)
    cache.store(HERE, PROFILE)

    def full(path: Path, text: str, **_: Any) -> int:
        with open(path, "w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        cache.store(HERE, replace(PROFILE, host=7.0))
    found = cache.find(HERE)
    assert found is not None and found.profile == PROFILE
    assert files(tmp_path) == [cache.path(HERE).name], "what was begun is gone"


def test_what_would_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "MAX_BYTES", 100)
    with pytest.warns(UserWarning, match="bytes are more than the 100 read"):
        ProfileFolder(tmp_path).store(HERE, PROFILE)
    assert files(tmp_path) == []


def folder_of(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Path | None:
    for name in ("SYNCHROMESH_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cache = ProfileFolder.open()
    return None if cache is None else cache.folder


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Path("synchromesh/profiles")
    assert folder_of(monkeypatch, HOME="/h") == Path("/h/.cache") / tail
    assert folder_of(monkeypatch, HOME="/h", XDG_CACHE_HOME="/x") == Path("/x") / tail
    assert folder_of(monkeypatch, HOME="/h", XDG_CACHE_HOME="x") == Path("/h/.cache") / tail
    assert folder_of(monkeypatch, HOME="/h", SYNCHROMESH_CACHE="") == Path("/h/.cache") / tail
    assert folder_of(monkeypatch, HOME="/h", SYNCHROMESH_CACHE="/other") == Path("/other")
    assert folder_of(monkeypatch, HOME="/h", SYNCHROMESH_CACHE="~/p") == Path("/h/p")
    assert folder_of(monkeypatch, HOME="/h", SYNCHROMESH_CACHE="p") == Path.cwd() / "p"
    assert folder_of(monkeypatch, HOME="/h", SYNCHROMESH_CACHE="off") is None


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without one
    with pytest.warns(UserWarning, match="no home folder"):
        assert folder_of(monkeypatch) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder_of(monkeypatch, SYNCHROMESH_CACHE="off") is None


def facts(rows: int = 8, optimizer: Any = torch.optim.SGD, **changed: Any) -> LiveFacts:
    """Of two linear layers."""
    width, dtype = changed.get("width", 8), changed.get("dtype", torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)).to(dtype)
    model[0].weight.requires_grad_(not changed.get("frozen", False))
    batch = torch.randn(rows, 4, dtype=dtype)
    if changed.get("strided"):
        batch = torch.randn(4, rows, dtype=dtype).T
    step = trace(
        model, lambda m, b: m(b).square().mean(), batch, training=True,
        autocast=changed.get("autocast"),
    )  # fmt: skip
    made = optimizer(model.parameters(), lr=0.1)
    partitions = PartitionCache(PlanningProblem(step, rows, 1))
    return LiveFacts(World.open(CPU), partitions, Model(model), batch, made)


def found(about: LiveFacts | None = None, ranks: tuple[int, ...] = (0,)) -> dict[str, Any]:
    return profile_key(about or facts(), ranks)


def test_equal_keys_are_equal_and_say_what_they_are() -> None:
    first = found()
    assert first == found() and first["rows"] == 8 and first["hosts"] == [0]
    (rank,) = first["ranks"]
    assert rank["device"] and rank["torch"] == torch.__version__ and rank["threads"] == 1
    assert "place" not in rank, "another night's host may be as good"


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": 9}, {"optimizer": torch.optim.AdamW}, {"width": 16}, {"dtype": torch.float64},
        {"frozen": True}, {"strided": True}, {"dtype": torch.bfloat16},
        {"autocast": torch.bfloat16},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_measured_counts(changed: dict[str, Any]) -> None:
    assert found(facts(**changed)) != found()


def test_which_ranks_take_part_counts() -> None:
    assert found(ranks=()) != found()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch, "__version__", "9.9"), (torch, "get_num_threads", lambda: 64),
        (module, "processor", lambda: "another"), (module, "cores", lambda: 0.4),
        (module.platform, "python_version", lambda: "9.9"),
        (module, "VERSION", "9.9"),
    ],
)  # fmt: skip
def test_what_it_is_measured_on_counts(
    where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_rank(CPU)
    monkeypatch.setattr(where, name, value)
    assert of_rank(CPU) != before


def test_emulated_hosts_are_no_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCHROMESH_LAB", raising=False)
    before = of_rank(CPU)
    monkeypatch.setenv("SYNCHROMESH_LAB", "/run/lab.yaml")
    assert of_rank(CPU) != before


def row(place: str, device: str = "cpu") -> dict[str, Any]:
    return {"device": device, "place": place}


def test_how_ranks_lie_on_hosts_counts_and_not_which_these_are() -> None:
    ranks = (0, 1, 2, 3)
    pairs = of_ranks([row("a"), row("a"), row("b"), row("b")], ranks)
    assert pairs["hosts"] == [0, 0, 1, 1]
    assert pairs == of_ranks([row("x"), row("x"), row("y"), row("y")], ranks)
    assert pairs != of_ranks([row("a"), row("b"), row("a"), row("b")], ranks)
    assert pairs != of_ranks([row("a")] * 4, ranks)
    assert pairs != of_ranks([row("a"), row("a"), row("b"), row("b", "H100")], ranks)
    assert of_ranks([row("a")] * 2, (0, 1)) != of_ranks([row("a")] * 4, (0, 1))


def test_settings_of_an_optimizer_count_as_far_as_they_cost() -> None:
    parameter = nn.Parameter(torch.ones(3))

    def settings(**changed: Any) -> dict[str, Any]:
        return of_optimizer(torch.optim.SGD([parameter], **{"lr": 0.1, **changed}))

    assert settings() == settings(lr=0.2), "the learning rate does not"
    assert settings(momentum=0.9) == settings(momentum=0.8) != settings()
    assert settings(foreach=True) != settings()
    scheduled = torch.optim.SGD([parameter], lr=0.1)
    torch.optim.lr_scheduler.LinearLR(scheduled)
    assert of_optimizer(scheduled) == settings(), "nor a schedule"
