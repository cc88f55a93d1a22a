"""`synchromesh plan --for`: the frontier, the choice, deadlines, what it says to bad input."""

import json
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from synchromesh.cli import main
from tests.cli.test_efficiency import ROWS, curve
from tests.cli.test_plan import document, outside, sentence
from tests.report.test_page import Elements

__all__ = ["curve", "outside"]  # fixtures

FOR = "plan digits/cnn --efficiency e.csv --clusters v100x1,v100x2"


@pytest.mark.slow
def test_the_frontier_and_the_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"{FOR} --batch-sizes 64,1024 --hourly-price 2@2026-11-01"
    told = document(f"{words} --for time --output plan.yaml", capsys)
    found, chosen = told["frontier"], told["chosen"]
    assert told["for"] == "time" and told["deadline_seconds"] is None and chosen == found[0]
    assert (tmp_path / "plan.yaml").is_file()
    for p in found:
        assert p["epochs"] == pytest.approx(4 * (1 + p["batch"] / 512))
        assert p["steps"] == ceil(4 * (1 + p["batch"] / 512) * ROWS / p["batch"])
        devices = int(p["cluster"].removeprefix("v100x"))
        assert p["dollars"] == pytest.approx(devices * 2 * p["seconds"] / 3600)
        again = document(
            f"plan digits/cnn --cluster {p['cluster']} --batch-size {p['batch']}", capsys
        )
        seconds = again["candidates"][0]["step_seconds"]
        assert p["seconds"] == pytest.approx(p["steps"] * seconds), "what sm.plan finds"
        assert p["plan"] == again["chosen"]
    for quick, slow in pairwise(found):
        assert quick["seconds"] < slow["seconds"] and quick["dollars"] > slow["dollars"]
    cheap = document(f"{words} --for money", capsys)
    assert cheap["frontier"] == found and cheap["chosen"] == found[-1]
    assert cheap["prices"]["v100x2"]["date"] == "2026-11-01"
    assert main([*words.split(), "--for", "money"]) == 0
    shown = capsys.readouterr().out
    assert f"│ * │ {found[-1]['cluster']}" in shown and "$2 an hour for a device" in shown


def test_the_page_has_the_answer_first_and_all_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = f"{FOR} --batch-sizes 64,1024 --hourly-price 2@2026-11-01 --for money"
    told = document(f"{words} --output page.html", capsys)
    text = (tmp_path / "page.html").read_text()
    chosen = told["chosen"]
    where = f"{chosen['plan']} on {chosen['cluster']} in batches of {chosen['batch']:,}"
    assert f"Of what was tried, {where} costs least" in text and "<script" not in text
    assert text.index("costs least") < text.index("<svg") and text.count("<svg") == 2
    found = Elements(text)
    assert not found.tags & {"script", "iframe", "img", "object", "embed", "base", "form"}
    for p in told["frontier"]:
        assert text.count(f">{p['dollars']:.4g}<") == 2, "in the figure's table, and in all"
    assert "$2 an hour for a device" in text and "E(B)" in text
    without = document(f"{FOR} --batch-sizes 64 --for time --output bare.html", capsys)
    bare = (tmp_path / "bare.html").read_text()
    priced = any(without["prices"].values())
    assert ("<svg" in bare) == priced and ("No price is known" in bare) != priced
    assert without["chosen"]["plan"] in bare
    assert main([*words.split()[:2], "--output", "plan.html", "--cluster", "v100x1"]) == 2
    assert "the name should end in .yaml, .yml or .json" in capsys.readouterr().err


def test_a_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{FOR} --batch-sizes 64 --for money --json --deadline"
    assert main([*words.split(), "1h"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["deadline_seconds"] == 3600 and found["chosen"] == found["frontier"][-1]
    assert main([*words.split(), "0.001s"]) == 1
    out, err = capsys.readouterr()
    told, quickest = json.loads(out), found["frontier"][0]
    assert told["chosen"] is None and told["refusal"] in err and err.count("\n") == 1
    assert f"in batches of 64, takes {quickest['seconds']:,.4g} s and $" in err


def test_batches_and_clusters_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan digits/cnn --for time --clusters v100-pciex1,v100x1"
    told = document(f"{words} --efficiency e.csv --dataset-rows 300", capsys)
    assert {p["batch"] for p in told["frontier"]} <= {64, 128, 256}
    assert told["prices"]["v100-pciex1"] is None
    assert told["prices"]["v100x1"]["name"] == "p3.2xlarge"
    alone = document(words, capsys)
    assert {(p["batch"], p["epochs"]) for p in alone["frontier"]} == {(64, 10.0)}


def test_what_lacks_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan digits/cnn --for time --cluster v100x1 --memory 100KB --json"
    assert main(words.split()) == 1
    out, err = capsys.readouterr()
    (misfit,) = json.loads(out)["misfits"]
    assert misfit.startswith("batches of 64 on v100x1: no plan fits") and misfit in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan digits/cnn --clusters v100x2", "--clusters: only with --for"),
        ("plan digits/cnn --efficiency e.csv --deadline 1h", "--deadline, --efficiency: only"),
        (f"{FOR} --for speed", "invalid choice: 'speed'"),
        (f"{FOR} --for time --plan data", "--plan: not with --for"),
        (f"{FOR} --for time --deadline 24", "'24' is no time as 24h, 90min"),
        (f"{FOR} --for time --deadline 0h", "'0' is not a number of seconds above 0"),
        (f"{FOR} --for time --batch-sizes 2000", "2,000 rows are more than the 1,437"),
        (f"{FOR} --for time --batch-sizes 0", "'0' is not a whole number"),
        ("plan digits/cnn --for time --cluster v100x2 --batch-sizes 8", "needs --efficiency FILE"),
        ("plan digits/cnn --for money --cluster p100x2", "no price is known of p100x2"),
        ("plan digits/cnn --for time --clusters v101x2", "the catalogue has no cluster 'v101x2'"),
        ("plan --profile l.csv --for time --cluster v100x2", "--profile: not with --for"),
        ("plan digits/cnn --for time", "--cluster NAME of the catalogue"),
    ],
)
def test_bad_input(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in sentence(words, capsys)
