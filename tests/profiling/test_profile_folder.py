"""The cache of profiles: what was stored is found again, and no fault of it ends a run."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from synchromesh.profiling import profile_folder as module
from synchromesh.profiling.profile_folder import ProfileFolder
from synchromesh.values import document
from tests.values.test_profile import FULL, changed

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
