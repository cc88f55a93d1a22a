"""Epochs by batch size: the fit on curves that are known, its errors, files, goodput."""

from collections.abc import Sequence
from math import exp, inf, log
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares

from synchromesh.cost.efficiency import EpochCurve, EpochFit, Goal, document, efficiency, goodput

BATCHES = (16.0, 64.0, 250.0, 1024.0, 8192.0, 160_000.0)  # four orders of magnitude


def points(curve: EpochCurve, noise: Sequence[float] = ()) -> tuple[tuple[float, float], ...]:
    factors = noise or [1.0] * len(BATCHES)
    return tuple((b, curve.epochs(b) * f) for b, f in zip(BATCHES, factors, strict=True))


def squares(curve: EpochCurve, of: Sequence[tuple[float, float]]) -> float:
    return sum((curve.epochs(b) / e - 1.0) ** 2 for b, e in of)


def test_arithmetic_by_hand() -> None:
    curve = EpochCurve(3.0, 64.0)
    assert [curve.epochs(b) for b in (0, 64, 192)] == [3.0, 6.0, 12.0]
    assert curve.steps(64, 1000) == 94  # 6 epochs are 93.75 batches
    assert EpochCurve(3.0).epochs(1e9) == 3.0 and EpochCurve(3.0).steps(10, 10) == 3
    until = Goal("accuracy=0.9", curve, 1000).reached(64, 0.5, 0.25, 0.125)
    assert document(until) == {
        "epochs": 6.0, "steps": 94, "seconds": 47.0, "dollars": 11.75, "dollars_spot": 5.875,
    }  # fmt: skip
    assert Goal("", curve, 1000).reached(64, 0.5, None).dollars is None
    endless = document(Goal("", curve, 1000).reached(64, inf, 0.01))
    assert endless["seconds"] is endless["dollars"] is None
    for wrong in ((0.0, 1.0), (1.0, 0.0), (inf, 1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="above 0"):
            EpochCurve(*wrong)


def test_a_curve_without_noise_is_found_again() -> None:
    for minimum in (0.02, 3.0, 900.0):
        for critical in (20.0, 1000.0, 1e5, 1e7):
            found = EpochFit(points(EpochCurve(minimum, critical)))
            assert found.curve.minimum_epochs == pytest.approx(minimum, rel=1e-6)
            assert found.curve.critical_batch == pytest.approx(critical, rel=1e-6)
            assert found.slope_known
            assert found.to_dict()["left_out_largest_error"] < 1e-6


def test_with_noise_no_other_curve_is_nearer_and_errors_are_as_large_as_it() -> None:
    draw, truth = np.random.default_rng(0), EpochCurve(5.0, 2000.0)
    minima, criticals = [], []
    for _ in range(60):
        noisy = points(truth, np.exp(draw.normal(0.0, 0.1, len(BATCHES))).tolist())
        found = EpochFit(noisy).curve
        for start in (10.0, 1e3, 1e5, 1e7):  # in logarithms, from several points

            def residuals(x: Sequence[float], noisy: object = noisy) -> list[float]:
                curve = EpochCurve(exp(x[0]), exp(x[1]))
                return [curve.epochs(b) / e - 1.0 for b, e in noisy]  # type: ignore[attr-defined]

            other = least_squares(residuals, [log(5.0), log(start)])
            assert squares(found, noisy) <= 2.0 * other.cost * (1 + 1e-9)
        minima.append(found.minimum_epochs)
        criticals.append(found.critical_batch)
    # three of the six points tell the minimum, three the slope: 10 % / sqrt(3) each
    assert np.std(np.log(minima)) < 0.09 and abs(np.log(np.median(minima) / 5.0)) < 0.04
    assert np.std(np.log(criticals)) < 0.15 and abs(np.log(np.median(criticals) / 2e3)) < 0.06


def test_each_point_is_left_out_of_the_fit_that_predicts_it() -> None:
    wrong = points(EpochCurve(5.0, 2000.0), [1, 1, 1, 1.3, 1, 1])
    told = EpochFit(wrong).to_dict()["points"]
    assert told[3]["left_out"] == pytest.approx(0.3 / 1.3), "the others lie on the true curve"
    assert told[3]["error"] < told[3]["left_out"]
    assert [p["batch"] for p in told] == list(BATCHES)
    assert all(p["fitted"] == EpochFit(wrong).curve.epochs(p["batch"]) for p in told)
    whole = EpochFit(wrong).to_dict()
    for name, key in (("", "error"), ("left_out_", "left_out")):
        errors = [p[key] for p in told]
        assert whole[f"{name}largest_error"] == max(errors)
        assert whole[f"{name}mean_error"] == pytest.approx(sum(errors) / 6)


def test_points_without_a_slope_and_points_without_a_minimum() -> None:
    flat = EpochFit(points(EpochCurve(7.0)))
    assert flat.curve.critical_batch == inf and not flat.slope_known
    assert flat.curve.minimum_epochs == pytest.approx(7.0)
    assert flat.to_dict()["critical_batch"] is None
    falling = EpochFit(tuple((b, 9.0 - i) for i, b in enumerate(BATCHES)))
    assert falling.curve.critical_batch == inf and not falling.slope_known
    steep = EpochFit(tuple((b, b / 100.0) for b in BATCHES))
    assert steep.to_dict()["largest_error"] < 1e-5 and steep.curve.critical_batch < 16
    draw = np.random.default_rng(1)
    slopes = [
        EpochFit(
            points(EpochCurve(7.0), np.exp(draw.normal(0.0, 0.1, 6)).tolist())
        ).slope_known for _ in range(400)
    ]  # fmt: skip
    assert sum(slopes) < 0.06 * 400, "noise alone passes for a slope in 1 of 40"


def test_order_and_units_of_batches_change_nothing() -> None:
    noisy = points(EpochCurve(5.0, 2000.0), [1.1, 0.9, 1.05, 1.0, 0.93, 1.08])
    found = EpochFit(noisy).curve
    turned = EpochFit(noisy[::-1]).curve
    scaled = EpochFit(tuple((1e6 * b, 1e3 * e) for b, e in noisy)).curve
    assert turned.critical_batch == pytest.approx(found.critical_batch)
    assert scaled.critical_batch == pytest.approx(1e6 * found.critical_batch)
    assert scaled.minimum_epochs == pytest.approx(1e3 * found.minimum_epochs)
    twice = EpochFit(noisy + noisy).curve
    assert twice.critical_batch == pytest.approx(found.critical_batch)


def test_efficiency_and_goodput_are_pollux_s() -> None:
    assert efficiency(100.0, 300.0, 100.0) == 0.5 and efficiency(100.0, 64.0, 64.0) == 1.0
    assert goodput(1000.0, 100.0, 300.0, 100.0) == 500.0
    draw = np.random.default_rng(2)
    for phi, base, more in 10 ** draw.uniform(0, 5, (50, 3)):
        batch, curve = base + more, EpochCurve(3.0, phi)
        value = efficiency(phi, batch, base)
        assert base / batch < value < 1.0
        assert value < efficiency(phi, batch - more / 2, base), "the larger, the less"
        assert value == pytest.approx(curve.epochs(base) / curve.epochs(batch))


def test_files_as_they_come(tmp_path: Path) -> None:
    file = tmp_path / "e.csv"
    text = "batch, epochs \r\n1024,9\r\n 64 , 5.25\r\n\r\n64,5.5\r\n256,6e0\r\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert EpochFit.load(file).points == ((1024.0, 9.0), (64.0, 5.25), (64.0, 5.5), (256.0, 6.0))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1 should read `batch,epochs`, not ''"),
        ("batch;epochs\n", "line 1 should read"),
        ("64,5\n128,6\n256,7\n", "line 1 should read"),
        ("batch,epochs\n64,5\n64,6\n128,7\n", "at least three different batches, and there are 2"),
        ("batch,epochs\n", "there are 0"),
        *(
            (f"batch,epochs\n64,5\n\n{line}\n", "line 4 should be `batch,epochs`, two finite")
            for line in (
                "64",
                "64,5,1",
                "a,5",
                "0,5",
                "64,-1",
                "64,nan",
                "inf,5",
                "64,1e-300",
                ",",
            )
        ),
    ],
)
def test_bad_files_get_a_sentence(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(ValueError, match=told):
        EpochFit.load(tmp_path / "e.csv")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("e.csv", "none.csv", "."):
        with pytest.raises(ValueError, match="cannot be read as batches and epochs"):
            EpochFit.load(tmp_path / name)
