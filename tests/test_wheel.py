"""The wheel, installed into an environment of its own: whole, typed, and it runs without the
source tree. What it depends on is that of the environment of the tests."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "synchromesh", source / "synchromesh", ignore=ignored)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    words = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    subprocess.run([sys.executable, *PIP, *words], check=True)
    (made,) = folder.glob("synchromesh-*.whl")
    return made


@pytest.fixture(scope="module")
def command(wheel: Path) -> Callable[..., str]:
    """Runs a program of the environment, outside the source tree; its standard output."""
    place = wheel.parent / "environment"
    venv.create(place, with_pip=False)
    python = place / "bin/python"
    words = ("--python", str(python), "install", "--no-deps", "--no-index", "--no-compile")
    subprocess.run([sys.executable, *PIP, *words, str(wheel)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(name: str, *arguments: str) -> str:
        done = subprocess.run(
            [place / "bin" / name, *arguments], cwd=wheel.parent, env=bare, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_file_of_the_package_is_in_it(wheel: Path) -> None:
    files = (p for p in (ROOT / "synchromesh").rglob("*") if p.is_file())
    wanted = {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
    with ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == wanted
    kinds = {"py.typed", "devices.yaml", "prices.yaml", "page.html"}
    assert kinds <= {Path(name).name for name in names}


def test_its_description_is_the_readme_without_links_to_nowhere(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        told = message_from_bytes(archive.read(name))
    page = str(told.get_payload())
    assert told["Description-Content-Type"] == "text/markdown" and told["License-File"]
    assert page.startswith("# Synchromesh\n") and "## Measured" in page
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)|src(?:set)?=\"(?!https?:)", page)


def test_it_runs_outside_the_source_tree(command: Callable[..., str]) -> None:
    assert command("synchromesh", "--version").startswith("synchromesh 0.")
    where = command("python", "-c", "import synchromesh; print(synchromesh.__file__)")
    assert "environment/lib" in where
    assert "classifier" in command("synchromesh", "explain", "digits/cnn", "--nproc", "2")
    command("python", "-c", "import synchromesh.report.page, synchromesh.catalogue.prices")
