"""`synchromesh plan`: its document, its tables, what it says to bad input."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from synchromesh import catalogue
from synchromesh.cli import main
from synchromesh.planning.offline import lacking
from synchromesh.values.plan import Plan


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No rank of a group; a folder of its own."""
    for name in ("RANK", "WORLD_SIZE", "SYNCHROMESH_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def document(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*words.split(), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def sentence(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        found = main(words.split())
    except SystemExit as error:  # argparse
        found = int(str(error.code))
    err = capsys.readouterr().err
    assert found == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    return err.strip()


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    told = document("plan digits/cnn --cluster v100x8", capsys)
    keys = {"plan", "step_seconds", "memory_bytes", "communication_share", "fits", "reason"}
    keys |= {"memory_by_kind", "given", "exact"}
    for candidate in told["candidates"]:
        assert set(candidate) == keys
        assert str(Plan.parse(candidate["plan"])) == candidate["plan"]  # canonical
        assert candidate["step_seconds"] > 0 and 0 <= candidate["communication_share"] <= 1
        devices = Plan.parse(candidate["plan"]).devices(8)
        assert len(candidate["memory_bytes"]) == len(devices)
        kinds = [sum(of_device.values()) for of_device in candidate["memory_by_kind"]]
        assert kinds == pytest.approx(candidate["memory_bytes"])
    texts = [c["plan"] for c in told["candidates"]]
    assert told["chosen"] == texts[0] and len(set(texts)) == len(texts)
    for plain in ("single", "data", "hybrid:tensor=2", "hybrid:tensor=4", "tensor"):
        assert any(text.partition("; @")[0] == plain for text in texts), texts
    assert any("@ranks=0-3" in text for text in texts), "fewer devices are candidates too"
    assert told["planning_seconds"] > 0
    assert (told["source"], told["error_band"], told["devices"]) == ("datasheet", 0.5, 8)
    assert told["memory_error"] == 0.1 and told["why"].startswith("plan 1 ")
    assert told["headroom"] == {
        "usable": pytest.approx(160e9 / 11), "kept": pytest.approx(16e9 / 11),
        "why": "predictions may be off by 10%",
    }  # fmt: skip


def test_bfloat16_is_another_question(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan digits/cnn --cluster h100x2"
    plain, mixed = document(words, capsys), document(f"{words} --bf16", capsys)
    assert (plain["bf16"], mixed["bf16"]) == (False, True)
    assert plain["warning"] == mixed["warning"] == ""

    def single(told: dict[str, Any]) -> float:
        found = [c["memory_bytes"][0] for c in told["candidates"] if "single" in c["plan"]]
        return float(found[0])

    assert single(mixed) < single(plain), "activations are smaller"
    assert main([*words.split(), "--bf16"]) == 0
    assert "digits/cnn, bf16 on h100x2" in capsys.readouterr().out


def test_devices_without_bfloat16_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits/cnn", "--cluster", "v100x2", "--bf16"]) == 0
    out = capsys.readouterr().out
    assert "v100: no bfloat16 is among the device's rates" in out and "without it\n" in out
    v100, t4, h100 = (catalogue.cluster(f"{kind}x1") for kind in ("v100", "t4", "h100"))
    mixed = replace(v100, hosts=(*v100.hosts, replace(t4.hosts[0], name="b")))
    assert lacking(mixed, torch.bfloat16).startswith("t4, v100: no bfloat16 is")
    assert lacking(h100, torch.bfloat16) == lacking(v100, None) == ""


def test_the_table_the_runners_up_and_the_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan digits/cnn --cluster v100x2 --batch-size 64 --explain --output p.yaml"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "64 rows a step (datasheet, time +-50%, memory +-10%)" in out
    assert "plan 1 has the fewest words within 3% of the least time of those that fit" in out
    assert "leaves 1 of 2 devices idle" in out
    assert "plans may use 14.5 GB of a device's 16.0 GB: 1.5 GB are headroom" in out
    assert "best plan of one stage on all devices" in " ".join(out.split())
    assert "runner-up" in out and "classifier" in out
    assert str(Plan.load("p.yaml")) in out
    assert "exists: --force overwrites it" in sentence(words, capsys)
    assert main([*words.split(), "--force"]) == 0


LONG = "data; features.0=tensor; features.2=hybrid:tensor=2; features.5=hybrid:tensor=4"


def test_long_plans_stand_below_the_table_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "digits/cnn", "--cluster", "v100x8", "--plan", LONG]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole = [line.partition(": ")[2] for line in lines if line.startswith("plan ")]
    assert f"{LONG}; @pieces=1" in whole and not any(
        LONG in line for line in lines if line.startswith("│")
    )
    assert all(str(Plan.parse(text)) == text for text in whole if text.startswith("data"))


def test_plans_of_the_users_are_priced_beside_those_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text(Plan.parse("data; classifier=hybrid:tensor=4").to_yaml())
    words = ["plan", "digits/cnn", "--cluster", "v100x8", "--json"]
    words += [
        "--plan",
        "tensor",
        "--plan",
        LONG,
        "--plan",
        "p.yaml",
        "--plan",
        "pipeline:stages=2",
    ]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    texts = [c["plan"].partition("; @pieces")[0] for c in told["candidates"]]
    given = [t for t, c in zip(texts, told["candidates"], strict=True) if c["given"]]
    assert {LONG, "tensor", "data; classifier=hybrid:tensor=4"} <= set(given) and len(given) == 4
    assert texts.count("tensor") == 1, "found and given"
    assert any("@stages=0-3:" in plan for plan in given), "its cuts are found"
    seconds = [c["step_seconds"] for c in told["candidates"][1:]]
    assert seconds == sorted(seconds) and all(c["fits"] for c in told["candidates"])


def test_a_given_plan_that_lacks_memory_or_eats_into_the_headroom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "digits/cnn", "--cluster", "v100x2", "--json", "--plan", "data"]
    needed = reasons(words, capsys)["data"]["memory_bytes"][0]
    for memory, headroom, reason in [
        (0.9 * needed, "5%", "lacks"), (1.01 * needed, "0%", ""),
        (1.01 * needed, None, "of its headroom"),
    ]:  # fmt: skip
        limits = ["--memory", f"{memory:.0f}B", *(["--headroom", headroom] if headroom else [])]
        found = reasons([*words, *limits], capsys)["data"]
        assert reason in found["reason"] and found["fits"] == (not reason)


def reasons(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(words)
    told = json.loads(capsys.readouterr().out)
    return {c["plan"].partition("; @pieces")[0]: c for c in told["candidates"]}


def test_a_cluster_that_was_measured_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--cluster NAME of the catalogue" in sentence("plan digits/cnn", capsys)
    Path("cluster.yaml").write_text(catalogue.cluster("v100x2").to_yaml())
    assert document("plan digits/cnn", capsys)["cluster"] == "v100x2"


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan digits/cnn --cluster v100x2 --memory 100KB --json"
    assert main(words.split()) == 1
    out, err = capsys.readouterr()
    assert "no plan fits the devices' memory; the nearest of" in err and err.count("\n") == 1
    told = json.loads(out)
    assert told["chosen"] is None and "lacks" in told["refusal"]
    assert not any(c["fits"] for c in told["candidates"])
    assert all("lacks" in c["reason"] for c in told["candidates"])


def test_the_names_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--clusters"]) == 0
    names = capsys.readouterr().out.split()
    assert {"v100x8", "h100x16"} <= set(names)
    assert document("plan --clusters", capsys) == {"clusters": names}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("plan", "plan needs either a TARGET"),
        ("plan digits/cnn --cluster v101x8", "the catalogue has no cluster 'v101x8'"),
        ("plan digits/cnn --cluster no.yaml", "there is no file no.yaml"),
        ("plan digits/cnn --cluster v100x8 --memory 8", "'8' is no size as 8GiB"),
        ("plan digits/cnn --cluster v100x8 --output p.txt", "should end in .yaml, .yml or .json"),
        ("plan digits/cn --cluster v100x8", "digits/cn"),
        ("plan digits/cnn --cluster v100x8 --headroom 5", "'5': no part, as 10%"),
        ("plan digits/cnn --cluster v100x8 --headroom 16GB", "16GB leaves nothing of 16.0 GB"),
        ("plan digits/cnn --cluster v100x8 --plan dta", "unknown layout 'dta'; did you mean"),
        ("plan digits/cnn --cluster v100x8 --plan data;feat=tensor", "did you mean 'features"),
        ("plan digits/cnn --cluster v100x8 --plan hybrid:tensor=3", "data(2) x tensor(3) != 8"),
        ("plan digits/cnn --cluster v100x8 --plan no.yaml", "No such file"),
        ("plan digits/cnn --cluster v100x8 --plan auto", "auto"),
    ],
)
def test_bad_input(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in sentence(words, capsys)


PROFILE = """\
node1 -- Conv2d() -- forward_compute_time=40, backward_compute_time=80, activation_size=4e6, parameter_size=4e6
node2 -- Linear(out_features=4096) -- forward_compute_time=4, backward_compute_time=8, activation_size=2097152, parameter_size=4e8
\tnode1 -- node2
"""  # noqa: E501


def test_layers_that_somebody_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "layers.txt").write_text(PROFILE)
    words = "plan --profile layers.txt --cluster v100-pciex8"
    told = document(words, capsys)
    assert told["chosen"] == "data; @stages=0-6:node1/7:node2; @micro_batches=32"
    assert [s["devices"] for s in told["candidates"][0]["stages"]] == [7, 1]
    assert main([*words.split(), "--output", "plan.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "layers.txt on v100-pciex8, 1024 rows a step" in shown
    assert "node1 Conv2d" in shown
    assert "node2 Linear" in shown
    assert Plan.from_yaml((tmp_path / "plan.yaml").read_text()) == Plan.parse(told["chosen"])
    assert document(f"{words} --batch-size 64", capsys)["rows"] == 64


def test_bad_layers_get_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "layers.txt").write_text(PROFILE.replace("4e8", "much"))
    words = "plan --profile layers.txt --cluster v100x8"
    assert "line 2: parameter_size=much is no number" in sentence(words, capsys)
    (tmp_path / "layers.txt").write_text(PROFILE.replace("Linear(out_features=4096)", "ReLU"))
    assert "--profile-rows N does" in sentence(words, capsys)
    assert "either a TARGET or a --profile" in sentence(f"{words} digits/cnn", capsys)
    assert "are of a TARGET" in sentence(f"{words} --bf16", capsys)
    assert "are of a TARGET" in sentence(f"{words} --plan data", capsys)
    assert "cannot be read" in sentence("plan --profile none.txt --cluster v100x8", capsys)
