"""Speeds of devices as a run's recorded steps tell them: for `simulate --slow runs/NAME`."""

from collections.abc import Mapping, Sequence
from typing import Any

from synchromesh.runs.events import LayoutInForce, StepsRecorded
from synchromesh.values import document
from synchromesh.values.plan import Plan


def measured_speeds(lines: Sequence[Mapping[str, Any]], log: str) -> dict[int, float]:
    """Of each rank, by the lines of a log: seconds that the quickest one computed in the last
    recorded steps, over its own. ValueError where none was recorded, or where ranks had different
    things to compute."""
    found: dict[int, float] = {}
    layout = recording = None
    for number, line in enumerate(lines, 1):
        if line.get("event") == LayoutInForce.name:
            layout = line
        elif line.get("event") == StepsRecorded.name:
            recording = line, layout, f"{log}, line {number}"
    if recording is not None:
        line, layout, at = recording
        try:
            plan = Plan.parse(LayoutInForce.of(layout).plan if layout else "data")
            recorded = StepsRecorded.of(line)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from error
        found = _speeds(recorded, plan, at)
    if not found:
        raise ValueError(
            f"{log}: no step was recorded; a run of 20 steps or more, or `train --trace-steps "
            "A-B`, records some"
        )
    return found


def _speeds(recorded: StepsRecorded, plan: Plan, at: str) -> dict[int, float]:
    if plan.stages or plan.stage_count > 1 or plan.rows or plan.overrides:
        raise ValueError(
            f"{at}: under {plan} the ranks compute different things, so that their seconds are no "
            "speeds; a run under `data` or `tensor` tells these"
        )
    shares = enumerate(recorded.shares)
    seconds = {rank: _computed(x, f"{at}: shares[{rank}]") for rank, x in shares}
    quickest = min(filter(None, seconds.values()), default=0.0)
    return {rank: quickest / s for rank, s in seconds.items() if s}


def _computed(share: Any, path: str) -> float:
    item = document.mapping(share, path, share if isinstance(share, Mapping) else ())
    part, seconds = (
        document.number(item.get(key), f"{path}.{key}", 0.0) for key in ("computation", "seconds")
    )
    return part * seconds
