"""A run whose steps are made up: plans on devices and links of which each takes a stated time,
with noise, outliers, pauses and short batches; conditions that change. What the adapter does.

    step   =  computing of the plan x slowest device  +  traffic of the plan x links
    known  =  the same by conditions as they were when they were measured last, off by each plan's
              own error of prediction
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import Decision
from synchromesh.adapt.monitor import Drift
from synchromesh.checkpoint.switch import Moved
from synchromesh.cost.step_time import StepTime
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice
from synchromesh.profiling.reprofile import IdleProbe
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

RANKS = 4


def candidate(plan: str, seconds: float, fits: bool = True) -> Candidate:
    """A plan that is predicted to take so long."""
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    return Candidate(Plan.parse(plan), time, (), fits, "")


@dataclass(frozen=True)
class Cost:
    """Seconds of a step under a plan: computing of each rank, and traffic."""

    computing: tuple[float, ...]
    traffic: float

    def under(self, devices: tuple[float, ...], links: float) -> float:
        slow = max(c * d for c, d in zip(self.computing, devices, strict=True))
        return slow + self.traffic * links


# four devices of which each does a quarter, one alone, and a plan that sends half as much
PLANS = {
    Plan.parse("data"): Cost((0.06,) * RANKS, 0.04),
    Plan.parse("data; head=tensor"): Cost((0.085,) * RANKS, 0.02),
    Plan.parse("hybrid:tensor=2"): Cost((0.07,) * RANKS, 0.05),
    Plan.parse("data; @rows=4,4,4,1"): Cost((0.08, 0.08, 0.08, 0.02), 0.04),
    Plan.parse("single"): Cost((0.24, 0.0, 0.0, 0.0), 0.0),
}
QUIET = ((1.0,) * RANKS, 1.0)


@dataclass(frozen=True)
class Noise:
    """How steps scatter: `usual` normally, `tail` of them several times as long, three in a row
    now and then, and batches that do not count."""

    usual: float
    tail: float = 0.0
    pause: float = 0.0
    short: float = 0.0


CALM = Noise(0.03)
ROUGH = Noise(0.1, tail=0.03, pause=0.002, short=0.05)


@dataclass
class SimulatedRun:
    """What `LiveRun` asks of ranks (adapt/live_run.py)."""

    errors: Mapping[Plan, float]  # of predictions, relative
    plan: Plan
    conditions: tuple[tuple[float, ...], float] = QUIET
    known: tuple[tuple[float, ...], float] = QUIET
    seconds: float = 0.0
    switches: list[Plan] = field(default_factory=list)
    on_switch: Callable[[Plan], None] = lambda plan: None
    scale: float = 1.0

    @property
    def idle(self) -> bool:
        return not all(PLANS[self.plan].computing)

    def candidates(self) -> tuple[Candidate, ...]:
        """All plans by what is known, the quickest first."""
        taken = {
            plan: self.scale * cost.under(*self.known) * (1 + self.errors.get(plan, 0.0))
            for plan, cost in PLANS.items()
        }
        times = {p: StepTime(t, 0.0, 0.0, 0.0, 0.0, 0.0, 1) for p, t in taken.items()}
        return tuple(
            Candidate(p, times[p], (), True, "") for p in sorted(taken, key=lambda p: taken[p])
        )

    def true(self, plan: Plan) -> float:
        return self.scale * PLANS[plan].under(*self.conditions)

    def clock(self) -> float:
        return self.seconds

    def agreed(self, find: Callable[[], Any]) -> Any:
        return find()

    def measure(self, known: Profile, drift: Drift) -> Choice:
        """Devices and links, as far as they are asked for."""
        devices, links = self.conditions
        self.known = (
            devices if drift.devices else self.known[0],
            links if drift.links else self.known[1],
        )
        self.seconds += 2.0
        return Choice(self.candidates(), known, 0.0)

    def probe(self, known: Profile, usual: Mapping[int, float]) -> IdleProbe:
        """What idle ranks compute and what links carry, beside what is known."""
        (devices, links), (before, carried) = self.conditions, self.known
        slow = [b / d for b, d, c in zip(before, devices, PLANS[self.plan].computing, strict=True)
                if not c and b > 1.5]  # fmt: skip
        seconds = usual.get(1, carried)
        return IdleProbe(max(slow, default=1.0), seconds / links, (1, links))

    def move(self, better: Plan, known: Profile, now: float) -> float:
        return 2 * now

    def switch(self, plan: Plan) -> Moved:
        self.plan = plan
        self.switches.append(plan)
        self.on_switch(plan)
        return Moved(0.1, 1000, 1000)


@dataclass
class Outcome:
    """What was decided, and what became of it."""

    first: Plan
    decisions: list[Decision]
    run: SimulatedRun
    short: list[int]  # steps that did not count

    @property
    def drifts(self) -> list[Decision]:
        """Those for what was noticed: all but trials."""
        return [d for d in self.decisions if not d.noticed.startswith("plans are predicted")]

    @property
    def regret(self) -> float:
        """What a step takes in the end over what it would take under the best plan."""
        run = self.run
        return run.true(run.plan) / min(map(run.true, PLANS))


def simulate(
    steps: int, changes: Mapping[int, tuple[tuple[float, ...], float]], noise: Noise, seed: int,
    error: float = 0.07, trials: bool = True, to_come: int = 20_000,
    scale: float = 1.0,
) -> Outcome:  # fmt: skip
    """A run of so many steps whose conditions change before some of them.

    error: standard deviation of the predictions of plans. trials: whether near plans are tried.
    to_come: steps, 0 where nobody says how many. scale: of the seconds of a step.
    """
    chance = random.Random(seed)
    errors = {p: max(-0.2, min(0.2, chance.gauss(0, error))) for p in PLANS}
    run = SimulatedRun(errors, Plan.parse("data"), scale=scale)
    found = run.candidates()
    run.plan = found[0].plan
    adapter = Adapter(Profile(RANKS), found if trials else found[:1])
    run.on_switch = adapter.restart
    decisions: list[Decision] = []
    table: list[tuple[int, ...]] | None = None
    short: list[int] = []
    pause = 0  # steps until there may be another one
    for step in range(steps):
        run.conditions = changes.get(step, run.conditions)
        if table is not None:  # of the step before: it travels with this one's rows
            adapter.record(table, range(RANKS))
        before = run.plan
        cost, (devices, links) = PLANS[run.plan], run.conditions
        longer = max(0.3, 1 + chance.gauss(0, noise.usual))
        longer *= chance.uniform(2, 6) if chance.random() < noise.tail else 1.0
        pause = 20 if not pause and chance.random() < noise.pause else max(0, pause - 1)
        whole = scale * cost.under(devices, links) * longer + (0.5 if pause > 17 else 0.0)
        share = [scale * c * d * longer for c, d in zip(cost.computing, devices, strict=True)]
        run.seconds += whole
        table = [(int(c * 1e6), int((whole - c) * 1e6)) for c in share]
        if chance.random() < noise.short:
            table = None
            short.append(step)
        decision = adapter.act(run, step, max(0, to_come - step))
        if decision is not None:
            decisions.append(decision)
            table = None if run.plan != before else table
    return Outcome(found[0].plan, decisions, run, short)
