"""Extras: what is missing is told in one sentence, before anything is lost."""

import sys
import tomllib
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path

import pytest

from synchromesh.cli import main
from synchromesh.values import extras
from synchromesh.values.extras import EXTRAS, remedy, require
from synchromesh.values.fault import Fault

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert set(project["optional-dependencies"]) == {*EXTRAS, "dev"}
    for extra, modules in EXTRAS.items():
        assert len(project["optional-dependencies"][extra]) == len(modules)
    assert requires("synchromesh") is not None


def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "jinja2 is not installed: pip install 'synchromesh[report]'"
    require("report")
    assert remedy("jinja2") == told and not remedy("numpy")
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "jinja2" else 1)
    with pytest.raises(ValueError, match="jinja2 is not installed"):
        require("report")
    assert main(["compare", "digits/cnn"]) == 2
    assert told in capsys.readouterr().err


def test_an_integration_names_its_own_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.startswith("synchromesh.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    told = "^transformers is not installed: pip install 'synchromesh.transformers.'$"
    with pytest.raises(ValueError, match=told):
        import_module("synchromesh.integrations.transformers")


def test_a_module_that_is_not_found_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    try:
        import pycocotools  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError as error:
        fault = Fault.of(error)
    assert fault.code == 2 and str(fault).endswith("pip install 'synchromesh[workloads]'")
