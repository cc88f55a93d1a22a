"""`synchromesh simulate`: its document, its tables, what it says to bad input."""

import json
from pathlib import Path

import pytest

from synchromesh.cli import main
from tests.cli.test_plan import document, outside, sentence

__all__ = ["outside"]  # a fixture
CNN = "simulate digits/cnn --cluster v100x4"


def test_the_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = document(
        f"{CNN} --plan data,tensor --jitter 0.03 --slow 1:0.5 --failures 6.5 --devices 1,2,4 "
        "--hourly-price 3.6@2026-11-01 --draws 3",
        capsys,
    )
    assert {"workload", "cluster", "devices", "source", "error_band", "plans", "scaling"} <= {
        *told
    }
    assert told["events"] > 0 and told["seconds"] > 0 and told["devices"] == 4
    for plan in told["plans"]:
        low, middle, high = plan["step_seconds_quantiles"].values()
        assert low < middle < high and low < plan["step_seconds"] < high
        assert sum(plan["shares"].values()) == pytest.approx(1.0)
        assert plan["shares"]["slower"] > 0.1
        assert len(plan["memory_bytes"]) == 4
        assert plan["dollars_per_step"] == pytest.approx(4 * 3.6 * plan["step_seconds"] / 3600)
        failures = plan["failures"]
        assert failures["mean_seconds_between"] == pytest.approx(1000 / 6.5 * 86_400)  # one host
        rate = failures["useful_share"] * 64 / plan["step_seconds"]
        assert plan["samples_per_second"] == pytest.approx(rate)
    for row in told["scaling"]:
        assert row["T_N"] == pytest.approx(row["T_1_over_N"] + row["T_comm"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["devices"])
        assert row["devices"] > 1 or row["T_comm"] == 0.0
        parts = row["T_comm_parts"]
        assert [*parts] == ["compute", "traffic", "bubble", "update", "host"]
        assert sum(parts.values()) == pytest.approx(row["T_comm"], rel=1e-9, abs=1e-15)
        assert row["devices"] == 1 or parts["traffic"] > 0.0
    assert [(r["devices"], r["rows"]) for r in told["scaling"][:3]] == [(1, 64), (2, 64), (4, 64)]


def test_the_table_and_the_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*CNN.split(), "--plan", "data", "--trace", "t.json"]) == 0
    shown = capsys.readouterr().out
    assert "digits/cnn on v100x4 (datasheet, time +-50%)" in shown and "bubble" in shown
    assert "failures" not in shown and "T_comm" not in shown
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["name"] for e in events}
    assert {"all_reduce", "update", "wait"} <= names and any("0B0" in name for name in names)


def test_checkpoints_that_cost_nothing_and_hosts_that_are_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = document(f"{CNN} --plan data --failures 100 --checkpoint-seconds 0 --draws 1", capsys)
    (plan,) = told["plans"]
    assert plan["failures"]["checkpoint_seconds"] == pytest.approx(plan["step_seconds"])
    (tmp_path / "p.csv").write_text("seconds,instances\n0,1\n9000,0\n12000,1\n18000,0\n21000,1\n")
    told = document(f"{CNN} --plan data --presence p.csv --days 1 --draws 1", capsys)
    (plan,) = told["plans"]
    failures = plan["failures"]
    assert failures["mean_seconds_between"] == pytest.approx(10_500)
    assert failures["checkpoint_seconds"] < 1000 and failures["restarts"] == 2


def test_state_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """AdamW: parameters and two moments, written by both hosts, read again, or over a link."""
    words = "simulate digits/cnn --plan data --batch-size 64 --cluster v100x16-ethernet25"
    failing = f"{words} --failures 6.5 --draws 1 --detection 10 --restart 20 --storage 1MB"
    (plan,) = document(failing, capsys)["plans"]
    state, failures = plan["state_bytes"], plan["failures"]
    (alone,) = document(f"{words} --plan single", capsys)["plans"]
    assert state == pytest.approx(alone["state_bytes"]) and state % 12 == 0
    assert failures["checkpoint_writing_seconds"] == pytest.approx(state / 2e6)
    assert failures["recovery_seconds"] == pytest.approx(30 + state / 2e6)
    (plan,) = document(f"{failing} --recovery continue --checkpoint-seconds 3", capsys)["plans"]
    failures = plan["failures"]
    assert failures["checkpoint_writing_seconds"] == 3.0
    assert failures["recovery_seconds"] == pytest.approx(
        30 + 8 * state / 1.09e9
    )  # the catalogue's
    (plan,) = document(f"{failing} --plan sharded-data", capsys)["plans"]
    assert plan["state_bytes"] == pytest.approx(state)
    assert "--storage" in sentence(f"{failing} --storage 0B", capsys)


def test_speeds_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shares = [{"computation": c, "seconds": 2.0} for c in (0.4, 0.8, 0.4, 0.4)]
    lines = [{"event": "recording", "time": 1.0, "steps": [20, 20], "shares": shares}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    of_run = document(f"{CNN} --plan data --slow run", capsys)["plans"]
    stated = document(f"{CNN} --plan data --slow 1:0.5", capsys)["plans"]
    assert of_run == stated and of_run[0]["shares"]["slower"] > 0.1
    assert "from 1e-06 to 1000" in sentence(f"{CNN} --slow 1:1e-9", capsys)
    assert "no DEVICE:SPEED" in sentence(f"{CNN} --slow elsewhere", capsys)
    assert "there is no device 2" in sentence(
        "simulate digits/cnn --cluster v100x2 --slow run", capsys
    )


LAYERS = "component,rows,forward_seconds,backward_seconds,parameter_bytes,output_bytes\n"
PROFILE = "simulate --profile layers.csv --cluster v100x4"


def test_layers_that_somebody_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = LAYERS + "".join(f"b{i},4,0.02,0.04,4000000,4000\n" for i in range(4))
    (tmp_path / "layers.csv").write_text(table)
    plans = "data,pipeline:stages=2,microbatches=4,auto"
    told = document(f"{PROFILE} --plan {plans} --batch-size 64 --jitter 0.03", capsys)
    assert [p["plan"].partition(";")[0] for p in told["plans"]][:2] == ["data", "data"]
    assert "@micro_batches=4" in told["plans"][1]["plan"] and len(told["plans"]) == 3
    assert (told["workload"], told["source"]) == ("layers.csv", "layer profile")
    assert all(p["step_seconds"] > 4 * 0.06 * 64 / 4 / 4 for p in told["plans"])
    assert main([*PROFILE.split(), "--plan", "data"]) == 0
    shown = capsys.readouterr().out
    assert "layers.csv on v100x4 (layer profile, links +-50%)" in shown
    assert main([*PROFILE.split(), "--plan", "tensor"]) == 1
    capsys.readouterr()
    assert "are of a TARGET" in sentence(f"{PROFILE} --bf16", capsys)
    assert "either a TARGET or a --profile" in sentence(f"{PROFILE} digits/cnn", capsys)
    assert "either a TARGET or a --profile" in sentence("simulate --cluster v100x4", capsys)


def test_hosts_that_are_left_train_as_they_would_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "one.csv").write_text("seconds,instances\n0,1\n")
    words = "simulate digits/vit --plan data --batch-size 65536 --cluster"
    told = document(
        f"{words} v100x16 --presence one.csv --recovery continue --days 1 --checkpoint-seconds 0 "
        "--restart 0 --draws 1", capsys,
    )["plans"][0]  # fmt: skip
    alone = document(f"{words} v100x8", capsys)["plans"][0]["step_seconds"]
    share = told["failures"]["useful_share"]
    assert share == pytest.approx(told["step_seconds"] / alone, rel=2e-3) and share < 0.8


@pytest.mark.parametrize(("hosts", "left"), [(8, 3), (4, 1)])
def test_few_hosts_that_are_left_go_on(
    hosts: int, left: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And a plan that is quicker on fewer hosts counts as with all."""
    (tmp_path / "few.csv").write_text(f"seconds,instances\n0,{left}\n")
    (plan,) = document(
        f"simulate digits/cnn --plan data --cluster v100x{8 * hosts} --presence few.csv "
        "--recovery continue --days 1 --checkpoint-seconds 0 --draws 1", capsys,
    )["plans"]  # fmt: skip
    assert 0.9 < plan["failures"]["useful_share"] <= 1.0
    assert plan["failures"]["waiting_seconds"] == 0.0


def test_state_that_is_on_one_host_alone_is_lost_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "simulate digits/cnn --cluster v100x16 --recovery continue --failures 5000 --draws 2 "
        "--plan"
    )
    (kept,) = document(f"{words} data", capsys)["plans"]
    assert kept["failures"]["lost_seconds"] == 0.0 and kept["failures"]["restarts"] > 10
    order = ",".join(f"{n},{n + 8}" for n in range(8))  # each host has one half of a model
    for plan in (
        "sharded-data",
        "pipeline:stages=2,microbatches=2",
        f"hybrid:tensor=2;@ranks={order}",
    ):
        (lost,) = document(f"{words} {plan}", capsys)["plans"]
        assert lost["failures"]["lost_seconds"] > 0.0, plan
    (kept,) = document(f"{words} hybrid:tensor=2", capsys)["plans"]
    assert kept["failures"]["lost_seconds"] == 0.0


def test_prices_have_their_day(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{CNN} --plan data --instance p3.8xlarge --spot-price 4@2026-11-02"
    told = document(f"{words} --failures 6.5 --draws 3", capsys)
    (plan,) = told["plans"]
    price, spot = told["price"], told["spot_price"]
    assert (price["date"], price["region"], price["kind"]) == (
        "2026-09-24", "us-east-1", "on demand",
    )  # fmt: skip
    assert price["dollars_per_hour"] == 12.24 and "AWS" in price["source"]
    assert (spot["dollars_per_hour"], spot["devices"], spot["date"], spot["kind"]) == (
        4.0, 4, "2026-11-02", "spot",
    )  # fmt: skip
    seconds, useful = plan["step_seconds"], plan["failures"]["useful_share"]
    for key, hourly in (("", 12.24), ("_spot", 4.0)):
        dollars = plan[f"dollars_per_step{key}"]
        assert dollars == pytest.approx(hourly * seconds / 3600)  # four devices are one instance
        assert plan[f"dollars_per_useful_step{key}"] == pytest.approx(dollars / useful)
    assert main(words.split()) == 0
    shown = capsys.readouterr().out
    assert "on demand: $12.24 an hour for 4 devices, p3.8xlarge, us-east-1, of 2026-09-24" in shown
    assert "spot: $4 an hour for 4 devices" in shown and "of 2026-11-02, --spot-price" in shown
    told = document(f"{CNN} --plan data", capsys)
    assert told["price"] is told["spot_price"] is told["plans"][0]["dollars_per_step"] is None


def test_a_page_is_written_and_never_over_another_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = f"{CNN} --plan data --devices 1,2 -o page.html"
    row = document(words, capsys)["scaling"][1]
    text = (tmp_path / "page.html").read_text()
    for seconds in (row["T_N"], row["T_1_over_N"], *row["T_comm_parts"].values()):
        assert f">{1e3 * seconds:.2f} ms<" in text
    (tmp_path / "page.html").write_text("mine")
    assert "--output page.html exists: --force overwrites it" in sentence(words, capsys)
    assert "--trace page.html: the name should end in .json" in sentence(
        f"{CNN} --plan data --trace page.html", capsys
    )
    assert (tmp_path / "page.html").read_text() == "mine"
    document(f"{words} --force", capsys)
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{CNN} --plan data --slow 9:0.5", "there is no device 9: v100x4 has 0 to 3"),
        (f"{CNN} --slow 1", "'1' is no DEVICE:SPEED, as 17:0.5"),
        (f"{CNN} --slow 1:0", "is no DEVICE:SPEED"),
        (f"{CNN} --plan hybrid:tensor=3", "data(1) x tensor(3) != 4"),
        (f"{CNN} --plan data,tensor --trace t.json", "--trace is of one plan"),
        (f"{CNN} -o page.txt", "--output page.txt: the name should end in .html or .htm"),
        (f"{CNN} --failures -1", "a number from 0"),
        (f"{CNN} --failures inf", "a number from 0"),
        (f"{CNN} --jitter nan", "'nan' is not a number from 0"),
        (f"{CNN} --storage 1MB --days 3", "--days, --storage: only with --failures RATE"),
        (f"{CNN} --devices 0", "'0' is not a whole number of at least 1"),
        (f"{CNN} --plan data --devices 100000", "100000 devices are none of 1 to 65,536"),
        (f"{CNN} --plan pipeline:stages=3", "3 groups of equally many ranks do not divide 4"),
        (f"{CNN} --hourly-price 2", "'2' does not say of which day this price is: give it as 2@"),
        (f"{CNN} --hourly-price 2@soon", "does not say of which day"),
        (f"{CNN} --hourly-price inf@2026-11-01", "'inf' is not a number of dollars above 0"),
        (f"{CNN} --hourly-price=-2@2026-11-01", "'-2' is not a number of dollars above 0"),
        (f"{CNN} --spot-price 1", "does not say of which day"),
        (f"{CNN} --spot-price 1@2026-11-01", "beside the price on demand: --hourly-price or"),
        (f"{CNN} --failures 1 --recovery spares", "restart, spares:COUNT or continue"),
        (f"{CNN} --presence no.csv", "no.csv cannot be read as a record of instances"),
        (f"{CNN} --region us-east-1", "are those of an --instance"),
        ("simulate digits/cnn --cluster v100x70000", "70000 devices are more than the 65536"),
        ("simulate digits/cnn", "--cluster"),
    ],
)
def test_bad_input(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in sentence(words, capsys)


@pytest.mark.parametrize(
    ("host", "rest", "told"),
    [
        ("{name: a, count: 100000, devices: [CPU]}", "", "unknown key 'count'; known are name"),
        ("{name: a, devices: [MANY]}", "", "has 100000 devices; a cluster has 1 to 65,536"),
        (
            "{name: a, devices: [CPU]}",
            "topology: [{name: host, size: 1, link: {bytes_per_second: 1e9}}, "
            "{name: rack, size: 3, link: {bytes_per_second: 1e9}}]",
            "topology: 1 x 3 are 3 devices, but the hosts have 1",
        ),
    ],
)
def test_clusters_that_cannot_be(
    host: str, rest: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cpu = "{kind: cpu, memory_bytes: 8000000000}"
    host = host.replace("CPU", cpu).replace("MANY", cpu.replace("cpu,", "cpu, count: 100000,"))
    (tmp_path / "c.yaml").write_text(f"name: c\nhosts: [{host}]\n{rest}\n")
    assert told in sentence("simulate digits/cnn --plan data --cluster c.yaml", capsys)
