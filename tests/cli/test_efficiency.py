"""`synchromesh efficiency`, and what `simulate --to` makes of its curve."""

from math import ceil
from pathlib import Path

import pytest

from synchromesh.cli import main
from tests.cli.test_plan import document, outside, sentence

__all__ = ["outside"]  # a fixture
CNN = "simulate digits/cnn --cluster v100x4 --plan data,tensor"
ROWS = 1437  # of the digits that are trained on


@pytest.fixture(autouse=True)
def curve(outside: None, tmp_path: Path) -> None:
    """E(B) = 4 (1 + B / 512), in a file."""
    rows = "".join(f"{b},{4 * (1 + b / 512)}\n" for b in (2048, 64, 256, 512))
    (tmp_path / "e.csv").write_text(f"batch,epochs\n{rows}")


def test_the_document_and_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = document("efficiency e.csv", capsys)
    assert told["minimum_epochs"] == pytest.approx(4.0, rel=1e-6)
    assert told["critical_batch"] == pytest.approx(512.0, rel=1e-6)
    errors = [told[f"{x}{y}_error"] for x in ("", "left_out_") for y in ("mean", "largest")]
    assert max(errors) < 1e-6 and told["slope_known"] and len(told["points"]) == 4
    assert main(["efficiency", "e.csv"]) == 0
    shown = capsys.readouterr().out
    assert "4 (1 + B / 512)" in shown and "left_out" in shown and "no slope" not in shown
    (tmp_path / "flat.csv").write_text("batch,epochs\n8,3\n16,3\n32,3\n64,3\n")
    assert document("efficiency flat.csv", capsys)["critical_batch"] is None
    assert main(["efficiency", "flat.csv"]) == 0
    assert "no slope: the critical batch is beyond what they can tell" in capsys.readouterr().out


def test_simulated_to_a_target(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = f"{CNN} --to accuracy=0.9 --efficiency e.csv"
    priced = f"{words} --instance p3.8xlarge --spot-price 4@2026-11-02"
    told = document(f"{priced} -o page.html", capsys)
    for plan in told["plans"]:
        until = plan["to_target"]
        assert until["epochs"] == pytest.approx(4.5)
        assert until["steps"] == ceil(4.5 * ROWS / 64) == 102
        assert until["seconds"] == pytest.approx(102 * plan["step_seconds"])
        assert until["dollars"] == pytest.approx(102 * plan["dollars_per_step"])
        assert until["dollars_spot"] == pytest.approx(102 * plan["dollars_per_step_spot"])
    assert "until accuracy=0.9" in (tmp_path / "page.html").read_text()
    (plan, _) = document(f"{words} --failures 900 --draws 2 --dataset-rows 640000", capsys)[
        "plans"
    ]
    share, until = plan["failures"]["useful_share"], plan["to_target"]
    assert 0.1 < share < 0.999 and until["steps"] == 45_000 and until["dollars"] is None
    assert until["seconds"] == pytest.approx(45_000 * plan["step_seconds"] / share)
    assert main(words.split()) == 0
    assert "until accuracy=0.9" in capsys.readouterr().out
    assert document(CNN, capsys)["plans"][0]["to_target"] is None


LAYERS = "component,rows,forward_seconds,backward_seconds,parameter_bytes,output_bytes\n"


def test_layers_have_no_data_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(LAYERS + "a,4,0.02,0.04,4000000,4000\n")
    words = "simulate --profile l.csv --cluster v100x2 --plan data --batch-size 64"
    words += " --to loss<=1 --efficiency e.csv"
    assert "an epoch of l.csv has is not known: --dataset-rows N" in sentence(words, capsys)
    (plan,) = document(f"{words} --dataset-rows 6400", capsys)["plans"]
    assert plan["to_target"]["steps"] == 450


TO = "--to METRIC=VALUE needs --efficiency FILE"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("efficiency none.csv", "none.csv cannot be read as batches and epochs"),
        ("efficiency", "FILE"),
        (f"{CNN} --to accuracy=0.9", TO),
        (f"{CNN} --efficiency e.csv", TO),
        (f"{CNN} --dataset-rows 9", TO),
        (f"{CNN} --to accuracy --efficiency e.csv", "write a metric and its value"),
        (f"{CNN} --to accuracy=0.9 --efficiency none.csv", "none.csv cannot be read"),
        (
            "simulate shakespeare/gpt2_small --cluster v100x2 --to nll<=1 --efficiency e.csv",
            "how many rows an epoch of shakespeare/gpt2_small has is not known",
        ),
    ],
)
def test_bad_input(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in sentence(words, capsys)
