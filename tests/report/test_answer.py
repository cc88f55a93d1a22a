"""The answer: what is quickest, by how much, and what is no more than noise."""

from dataclasses import replace

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.report.answer import answer
from synchromesh.results.derive import derive
from synchromesh.results.groups import comparisons
from synchromesh.results.run import Epoch, Quartiles, RunResult
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings
from tests.report import sample


def run(strategy: str, devices: int, step: float, seed: int = 0, **more: object) -> RunResult:
    times = Quartiles(step, step * 0.99, step * 1.01)
    plain = RunResult("m", strategy, devices, 60, seed, "done", step_seconds=times)
    return replace(plain, **more)  # type: ignore[arg-type]


def said(*runs: RunResult, **more: object) -> tuple[str, ...]:
    study = derive(replace(StudyResults("m", "", "", StudyMachine(), runs), **more))  # type: ignore[arg-type]
    (found,) = comparisons(study)
    return answer(found)


def test_the_full_study() -> None:
    (found,) = comparisons(sample.full())
    first, *others = answer(found)
    assert first.startswith("auto on 8 devices is quickest: ")
    assert (
        "times as fast as data parallelism and" in first and "times as fast as one device" in first
    )
    assert "to accuracy=0.6" in first
    assert any(s.startswith("Final accuracy lies between 0.6") for s in others)
    assert "Failed: 1 of 66 runs; the summary has the reasons." in others


def test_ratios_and_costs_are_those_of_the_runs() -> None:
    runs = run("single", 1, 0.6), run("data", 2, 0.4), run("auto", 2, 0.2, seconds=7200.0)
    (first,) = said(*runs, price=HourlyPrice(3.0))
    assert first == (
        "auto on 2 devices is quickest: 200 ms a step, 300 samples per second; 2.00 times as fast "
        "as data parallelism and 3.00 times as fast as one device; the run cost $12.0."
    )


def test_noise_is_said() -> None:
    first, second = said(run("data", 2, 0.201), run("auto", 2, 0.2), run("ddp", 2, 0.3))
    assert "1.00 times as fast as data parallelism (within noise)" in first
    assert second.startswith("data on 2 (201 ms) differs from it by no more than noise")
    (first,) = said(run("data", 2, 0.3), run("auto", 2, 0.2))
    assert "noise" not in first


def test_few_timed_steps_are_said() -> None:
    first, second = said(
        run("data", 2, 0.3, timed_steps=10), run("auto", 2, 0.2, seed=0, timed_steps=4),
        run("auto", 2, 0.2, seed=1, timed_steps=30),
    )  # fmt: skip
    assert first.startswith("auto on 2 devices is quickest")
    assert second == (
        "Few steps were timed: 4 of auto on 2. With fewer than 10 a difference beyond noise may "
        "be chance."
    )
    many = [run(f"p{i}", 2, 0.2 + i, timed_steps=4) for i in range(6)]
    assert "4 of p3 on 2 and as few of 2 others." in said(*many)[-1]


def test_one_device_may_be_quickest() -> None:
    first, second = said(run("single", 1, 0.2), run("data", 2, 0.5))
    assert first.startswith("single on 1 device is quickest: 200 ms a step")
    assert second == "More devices do not pay here: data on 2 devices takes 500 ms a step."


def test_weak_scaling_is_judged_by_samples() -> None:
    runs = run("single", 1, 0.2, batch=30), run("data", 2, 0.25)
    first, *_ = said(*runs, settings=StudySettings(scaling="weak"))
    assert (
        first.startswith("data on 2 devices is quickest") and "1.60 times as fast as one" in first
    )


def test_nothing_timed_and_predictions() -> None:
    (one, two) = said(run("a", 1, 0.2, status="failed"))
    assert (one, two) == (
        "No run has timed steps.",
        "Failed: 1 of 1 run; the summary has the reasons.",
    )
    assert "was timed alone" in said(run("data", 2, 0.2))[0]
    predicted = said(*(run(name, 2, 0.2 + i, predicted=True) for i, name in enumerate("ab")))
    assert "is predicted to be quickest" in predicted[0]


def predicted(**seconds: float) -> tuple[str, ...]:
    """What is said of predicted steps: `auto_2=0.3` for `auto` on two devices."""
    found = []
    for name, step in seconds.items():
        strategy, _, devices = name.partition("_")
        times = Quartiles(step, step, step)
        found.append(run(strategy, int(devices), step, predicted=True, step_seconds=times))
    return said(*found)


def test_predictions_that_are_nearly_equal_have_no_quickest() -> None:
    first, second = predicted(single_1=0.768, auto_2=0.767, data_2=0.792)
    assert first.startswith("Nothing is predicted to be quicker than single on 1 device: 768 ms")
    assert second == (
        "auto on 2 (767 ms) differs from it by less than 1 %, which predictions cannot tell apart."
    )
    first, second = predicted(single_1=0.9, auto_2=0.497, data_2=0.5)
    assert first.startswith("auto on 2 devices is predicted to be quickest: 497 ms")
    assert "1.01 times as fast as data parallelism (within 1 %) and 1.81 times as fast as" in first
    assert second.startswith("data on 2 (500 ms) differs from it by less than 1 %")
    first, second = predicted(single_1=0.5, data_2=0.9)
    assert first.startswith("Nothing is predicted to be quicker than single on 1 device")
    assert second == "More devices do not pay here: data on 2 devices takes 900 ms a step."


def test_metrics_are_compared() -> None:
    ends = [run(s, 2, 0.2 + v, metrics=(Epoch(1, 1, 1.0, values={"accuracy": v}),))
            for s, v in (("data", 0.9), ("auto", 0.91))]  # fmt: skip
    assert said(*ends)[-1] == "Final accuracy lies between 0.9000 and 0.9100."
    alike = [replace(end, metrics=ends[0].metrics) for end in ends]
    assert said(*alike)[-1] == "Final accuracy is 0.9000 for all."
