"""The profile cache on two ranks: what is kept is sampled, not measured, as far as it holds.

Devices and links are given their seconds, so that a busy machine changes no verdict.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh import prepare
from synchromesh.profiling import collectives as network_module
from synchromesh.profiling import live_facts
from synchromesh.profiling import reprofile as reprofiling
from synchromesh.profiling.collectives import TUNING as COLLECTIVES
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_cache import off, reuse_text
from synchromesh.profiling.profile_folder import StoredProfile
from synchromesh.programs.compute import Bench
from synchromesh.values.profile import (
    BurstSpeed,
    Calls,
    Compute,
    Curve,
    DeviceModel,
    Memory,
    Overlap,
    Pattern,
    Profile,
)
from tests.ranks import run

FRESH, SAMPLED = "measuring 2 components", "reused, sampled"


class Machine:
    """Two ranks whose programs and collectives take what is asked, and what was timed on them."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int) -> None:
        self.slower = [1.0, 1.0]  # each rank's programs
        self.links = 1.0
        self.pauses = 0  # programs, and collectives, during which something else runs
        self.programs: set[str] = set()
        self.most = 0  # rows of a program
        self.kinds: set[str] = set()
        made = Bench.__init__
        paused: set[Bench] = set()
        calls: Counter[tuple[str, int]] = Counter()
        self.forget = lambda: (paused.clear(), calls.clear())

        def begin(bench: Bench, step: Any, partition: Any, local: Any, *rest: Any) -> None:
            self.programs.add(local.program)
            made(bench, step, partition, local, *rest)
            self.most = max(self.most, bench.rows)
            paused.update([bench] if len(paused) < self.pauses and rank else [])

        def once(bench: Bench) -> tuple[float, float]:
            seconds = 2e-3 * bench.rows * self.slower[rank] * (1.45 if bench in paused else 1)
            return seconds, 2 * seconds

        def slowest(world: Any, group: Any, kind: str, ranks: int, payload: int) -> float:
            self.kinds.add(kind)
            calls[kind, ranks] += 1  # a sample begins with calls of the smallest size
            late = kind == "all_reduce" and calls[kind, ranks] <= COLLECTIVES.calls * self.pauses
            return (5e-3 + 1e-8 * payload) * self.links * (4 if late else 1)

        patch.setattr(reprofiling, "TUNING", replace(reprofiling.TUNING, programs=1))
        patch.setattr(Bench, "__init__", begin)
        patch.setattr(Bench, "once", once)
        patch.setattr(network_module, "slowest", slowest)
        patch.setattr(
            live_facts, "overlap", lambda w, r, kinds, *_: {k: Overlap(0.5, 0.5) for k in kinds}
        )

        def even(world: Any, runs: int = 6) -> DeviceModel:
            return DeviceModel(BurstSpeed(), (1.0,) * world.size)

        patch.setattr(live_facts, "call_seconds", lambda *_: Calls())
        for module in (live_facts, reprofiling):
            patch.setattr(module, "measure_device_model", even)
            patch.setattr(module, "agreement_seconds", lambda world: 0.001)

    def prepared(self, plan: str, rows: int = 8) -> dict[str, Any]:
        """A model prepared under `plan`, and what that took."""
        self.programs.clear()
        self.kinds.clear()
        self.forget()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        said: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = prepare(
                model, optimizer, lambda m, b: m(b).square().mean(), torch.randn(rows, 8),
                plan=plan, say=said.append,
            )  # fmt: skip
            predicted = trainer.predict().seconds
            trainer.close()
        choice, profile = trainer.choice, trainer.planning.profile
        assert profile is not None
        return {
            "plan": str(trainer.plan), "predicted": predicted, "said": said,
            "programs": sorted(self.programs), "kinds": sorted(self.kinds),
            "candidates": [] if choice is None else [c.to_dict() for c in choice.candidates],
            "known": sorted(profile.compute), "seconds": profile.seconds,
            "missing": profile.missing,
            "warned": [str(w.message) for w in caught if "profile" in str(w.message)],
        }  # fmt: skip


def machine() -> tuple[Machine, int]:
    """This rank's; only rank 0 is told where the cache is, as if the others had no such disk."""
    rank = int(os.environ["RANK"])
    if rank:
        os.environ["SYNCHROMESH_CACHE"] = "off"
    return Machine(pytest.MonkeyPatch(), rank), rank


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SYNCHROMESH_CACHE", str(tmp_path / "profiles"))
    yield tmp_path / "profiles"


def told(name: str) -> str:
    (path,) = Path(name).iterdir()
    return path.read_text()


def chosen_again(name: str) -> dict[str, Any]:
    at, rank = machine()
    out: dict[str, Any] = {"fresh": at.prepared("auto")}
    if rank == 0:  # measuring took long then, and lacked something
        (path,) = Path(name).iterdir()
        kept = json.loads(path.read_text())
        kept["profile"].update(seconds=1e6, missing=["no memory"])
        path.write_text(json.dumps(kept))
    before = told(name)
    out["equal"] = at.prepared("auto")
    at.slower = [1.2, 1.2]
    out["near"] = at.prepared("auto")
    out["unchanged"] = told(name) == before
    at.slower = [1.0, 3.0]
    out["slower"] = at.prepared("auto")
    out["slower, equal"] = at.prepared("auto")
    at.links = 1 / 3
    out["links"] = at.prepared("auto")
    out["given"] = at.prepared("tensor")
    return out


def test_a_second_choice_samples(folder: Path) -> None:
    one, other = run(2, chosen_again, str(folder), timeout=110)
    for case in ("fresh", "equal", "near", "slower", "links", "given"):
        for key in ("plan", "predicted", "candidates", "programs", "kinds", "known"):
            assert one[case][key] == other[case][key], f"{case}: ranks differ in {key}"
    fresh, equal = one["fresh"], one["equal"]
    assert fresh["said"][0].startswith(FRESH) and len(fresh["programs"]) >= 4
    assert len(fresh["kinds"]) > 1
    # a few programs and collectives instead of all, and the same choice to the last bit
    assert SAMPLED in equal["said"][0] and not any(FRESH in s for s in equal["said"])
    assert len(equal["programs"]) == 1 and equal["kinds"] == fresh["kinds"]
    assert equal["plan"] == fresh["plan"] and equal["candidates"] == fresh["candidates"]
    assert equal["known"] == fresh["known"] == fresh["programs"]
    assert not equal["warned"]
    assert 0 < equal["seconds"] < 1e5 and not equal["missing"], "of this run, not of that one"

    near = one["near"]  # scaled, and the file stays what was measured
    assert len(near["programs"]) == 1 and one["unchanged"]
    assert 1.05 < near["predicted"] / fresh["predicted"] < 1.2

    slower = one["slower"]  # programs anew, links as they were
    assert slower["programs"] == fresh["programs"] and slower["kinds"] == fresh["kinds"]
    assert "programs (off by a factor of" in slower["said"][0]
    assert "the rest is reused" in slower["said"][0]
    assert len(one["slower, equal"]["programs"]) == 1, "what was measured anew is kept"

    links = one["links"]  # the other way round
    assert len(links["programs"]) == 1 and links["kinds"] == fresh["kinds"]
    assert "links (off by a factor of" in links["said"][0]

    given = one["given"]  # a plan that is given is predicted from the same file
    assert len(given["programs"]) == 1 and SAMPLED in given["said"][0]


def paused() -> dict[str, Any]:
    at, _ = machine()
    out = {"fresh": at.prepared("auto")}
    at.pauses = 1
    out["paused"] = at.prepared("auto")
    at.pauses, at.slower, at.links = 0, [1.0, 1.45], 4.0
    out["slower"] = at.prepared("auto")
    return out


def test_a_sample_decides_nothing_alone(folder: Path) -> None:
    one, other = run(2, paused, timeout=110)
    assert [one[k]["candidates"] for k in one] == [other[k]["candidates"] for k in one]
    assert SAMPLED in one["paused"]["said"][0]
    assert one["paused"]["candidates"] == one["fresh"]["candidates"], "the next one was as known"
    slower = one["slower"]
    assert "links (off by a factor of 4.0) measured anew" in slower["said"][0]
    assert slower["predicted"] > 1.4 * one["fresh"]["predicted"], "it stays"


def grown(name: str) -> dict[str, Any]:
    at, rank = machine()
    out = {
        "given": at.prepared("tensor"),
        "auto": at.prepared("auto"),
        "other": at.prepared("data"),
    }
    if rank == 0:
        (path,) = Path(name).iterdir()
        path.write_text(path.read_text()[:1000])
    out["damaged"] = at.prepared("auto")
    out["mended"] = at.prepared("auto")
    out["more rows"] = at.prepared("auto", rows=10)
    out["files"] = len(list(Path(name).iterdir()))
    if rank == 0:
        os.environ["SYNCHROMESH_CACHE"] = "off"
    out["off"] = at.prepared("auto")
    return out


def test_a_profile_grows_and_is_mended(folder: Path) -> None:
    one, other = run(2, grown, str(folder), timeout=110)
    given, auto = one["given"], one["auto"]
    assert set(given["programs"]) < set(auto["known"])
    assert set(auto["programs"]) - set(given["programs"]), "what the file lacked was measured"
    assert len(set(auto["programs"]) & set(given["programs"])) == 1, "what it had was sampled"
    assert len(one["other"]["programs"]) == 1, "and kept"
    damaged = one["damaged"]
    assert damaged["programs"] == auto["known"] and damaged["said"][0].startswith(FRESH)
    (warning,) = damaged["warned"]
    assert str(folder) in warning and not other["damaged"]["warned"]
    assert len(one["mended"]["programs"]) == 1 and not one["mended"]["warned"]
    assert one["more rows"]["said"][0].startswith(FRESH) and one["files"] == 2
    assert one["off"]["programs"] == auto["known"] and not one["off"]["warned"]


def unequal(rows: int) -> tuple[int, list[str]]:
    """On ranks of which the second takes five times as long and links cost little: the most rows
    that a program was timed with for a plan of unequal rows, and the candidates."""
    at, _ = machine()
    at.slower, at.links = [1.0, 5.0], 0.01
    timed = LiveFacts.profile
    most: list[int] = []

    def measured(facts: Any, made: Any, known: Any, ranks: Any = None, **more: Any) -> Any:
        at.most = 0
        found = timed(facts, made, known, ranks, **more)
        if more.get("rows", rows) > rows:
            most.append(at.most)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveFacts, "profile", measured)
        told = at.prepared("auto", rows)
    return max(most, default=0), [c["plan"] for c in told["candidates"]]


@pytest.mark.parametrize("rows", [6, 12])  # fewer and more than values are tiled from
def test_uneven_rows_are_timed_before_they_win(folder: Path, rows: int) -> None:
    one, other = run(2, unequal, rows, timeout=110)
    assert one == other
    most, candidates = one
    (shared,) = (c for c in candidates if c.startswith("data; @rows"))
    assert most > 1.5 * rows / 2, f"{shared} was timed with {most} rows only"


def unwritable() -> dict[str, Any]:
    at, _ = machine()
    return at.prepared("auto")


def test_a_folder_that_cannot_be_written_is_a_warning_of_one_rank(folder: Path) -> None:
    folder.write_text("a file")
    one, other = run(2, unwritable, timeout=110)
    (warning,) = one["warned"]
    assert str(folder) in warning and not other["warned"]
    assert one["plan"] == other["plan"] and one["said"][0].startswith(FRESH)


def profile(first: float, second: float, link: float) -> Profile:
    """One program on two ranks, one link; thousands of what calls differ by on any day."""
    curves = tuple(Curve(((8.0, s),)) for s in (first, second))
    program = Compute(curves, curves, Memory())
    return Profile(2, {"a": program}, {("all_reduce", Pattern(2)): Curve(((1e3, link),))})


def test_the_farthest_rank_counts() -> None:
    known = profile(1.0, 1.0, 1.0)
    assert off(known, profile(1.0, 1.0, 1.0)) == [1.0, 1.0]
    assert off(known, profile(1.0, 3.0, 0.25)) == pytest.approx([3.0, 4.0], rel=1e-3)
    assert off(known, profile(0.5, 1.2, 1.0)) == pytest.approx([2.0, 1.0], rel=1e-3)
    small = profile(1e-5, 1e-5, 1e-5)
    assert max(off(small, profile(3e-5, 3e-5, 3e-5))) < 1.5, "microseconds tell nothing"
    assert off(known, known) == [float("inf")] * 2, "the same objects: nothing was sampled"
    assert off(Profile(2), Profile(2)) == [1.0, 1.0]


def test_one_collective_of_many_is_chance() -> None:
    def links(*seconds: float) -> Profile:
        kinds = ("all_reduce", "all_gather", "all_to_all")
        curves = (Curve(((1e3, 0.01), (1e6, s))) for s in seconds)
        return Profile(2, network={(k, Pattern(2)): c for k, c in zip(kinds, curves, strict=True)})

    assert off(links(1, 1, 1), links(1, 3, 1))[1] == 1.0
    assert off(links(1, 1, 1), links(1, 3, 4))[1] == pytest.approx(3.0, rel=1e-3)


def test_what_is_said() -> None:
    kept, found = (
        StoredProfile(Profile(2), "2026-11-20T10:00:00+00:00"),
        replace(Profile(2), seconds=1.23),
    )
    assert reuse_text(kept, found, 1.0, 1.2) == "profile of 2026-11-20 reused, sampled in 1.2 s"
    assert reuse_text(kept, found, 3.0, 1.2) == (
        "profile of 2026-11-20, sampled in 1.2 s: programs (off by a factor of 3.0) measured "
        "anew, the rest is reused"
    )
    assert reuse_text(kept, found, float("inf"), 2.0) == (
        "profile of 2026-11-20, sampled in 1.2 s: programs (not sampled) and links (off by a "
        "factor of 2.0) measured anew"
    )
