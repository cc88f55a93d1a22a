"""The page of a simulation: its figures, its numbers, what it says of their error."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import synchromesh as sm
from synchromesh.report.numbers import plain, share
from synchromesh.report.palette import marks
from synchromesh.report.scaling import lines
from synchromesh.report.simulation import page
from synchromesh.simulator.simulated import Simulated
from tests.report.test_page import Elements

PLANS = ("single", "data", "pipeline:stages=2,microbatches=2")
ROWS = 10  # which 4 devices do not divide


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@cache
def made(memory: float | None = None) -> Simulated:
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)]
    batch = torch.randn(ROWS, 32), torch.randint(8, (ROWS,))
    return sm.simulate(
        nn.Sequential(*layers), loss, batch, cluster="v100x4", plans=PLANS, workload="<tiny>",
        devices=(1, 2, 4), memory=memory,
    )  # fmt: skip


def test_parts_of_communication_sum_to_it_and_are_those_of_steps() -> None:
    steps = dict(zip(PLANS, (p.step for p in made().plans), strict=True))
    alone = steps["single"]
    assert alone is not None
    for row in made().to_dict()["scaling"]:
        parts, step = row["T_comm_parts"], steps[row["asked"]]
        assert row["T_N"] == pytest.approx(row["T_1_over_N"] + row["T_comm"], rel=1e-12)
        assert sum(parts.values()) == pytest.approx(row["T_comm"], rel=1e-9, abs=1e-15)
        if row["devices"] == 4:  # as many as the plans beside it have
            assert step is not None
            for name, part in parts.items():
                assert part == pytest.approx(step.parts[name] - alone.parts[name] / 4), name
    data, piped = (
        next(s.parts for s in made().scaling if s.asked == plan and s.devices == 4)
        for plan in PLANS[1:]
    )
    assert data["compute"] > 0.0 and data["traffic"] > 0.0 and data["bubble"] == 0.0
    assert piped["bubble"] > 0.0


def test_the_page_is_whole_and_its_numbers_are_those_of_the_document() -> None:
    text = page(made())
    found = Elements(text)
    assert not found.tags & {"script", "iframe", "img", "object", "embed", "base", "form"}
    assert all(link.startswith("#") or link == "data:," for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids)) and text.count("<svg") == 4
    assert "<tiny>" not in text and any("<tiny>" in words for words in found.texts)
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in rows]
    for row in made().to_dict()["scaling"]:
        seconds = (row["T_N"], row["T_1_over_N"], row["T_comm"], *row["T_comm_parts"].values())
        of_row = [row["plan"], str(row["devices"]), str(ROWS)]
        assert any(c[:11] == of_row + [f"{1e3 * s:.2f} ms" for s in seconds] for c in cells)
        for kind, write in (("speedup", plain), ("efficiency", share)):
            assert [row["asked"], str(row["devices"]), write(row[kind])] in cells
    for plan in made().to_dict()["plans"]:
        (own,) = [c for c in cells if c[0] == plan["plan"] and len(c) == 12]
        assert own[1] == f"{1e3 * plan['step_seconds']:.2f} ms"
        assert own[5:11] == [f"{s:.0%}" for s in plan["shares"].values()]
    assert "source is: datasheet" in text and "Nothing was run" in text


def test_the_error_is_drawn_and_said_where_it_is_stated() -> None:
    stated, other = page(made()), page(replace(made(), error_band=0.0))
    assert "bands are ±50.0 %" in stated and "stated as ±50.0 %" in stated
    assert "bands" not in other and "seconds is not stated" in other
    assert stated.count("opacity:0.15") > other.count("opacity:0.15") == 0


@pytest.mark.parametrize("band", [0.3, 1.5])
def test_a_band_is_as_wide_as_the_error_beyond_one_device(band: float) -> None:
    ran = {("data", 2): 1.5, ("data", 4): 2.0}
    for shares in (False, True):
        values = {key: v / key[1] if shares else v for key, v in ran.items()}
        drawing = lines(960, values, marks(["data"]), band, shares)
        (axes,) = drawing.figure.axes
        (around,) = axes.collections
        points = {(round(x), round(y, 9)) for x, y in around.get_paths()[0].vertices}
        of = [(n, values["data", n] * (1 + sign * band)) for n in (2, 4) for sign in (-1, 1)]
        assert {(n, round(y, 9)) for n, y in [(1, 1.0), *of]} == points
        ideal = axes.lines[0].get_ydata()
        assert list(ideal) == ([1, 1] if shares else [1, 4])
        low, high = axes.get_ylim()
        assert high > max(y for _, y in of) and low < 1


def test_what_cannot_run_and_what_was_not_asked_is_said() -> None:
    text = page(replace(made(memory=1000.0), scaling=()))
    assert "not able to run, nor is any other plan: rank" in text
    assert "data (does not fit)" in text
    assert "simulate --devices 1,8,64" in text and "<svg" not in text
