"""The adapter: notices that steps are not what was expected, has measured again what changed, and
switches where that pays.

    Trying      plans that are predicted to be about as quick, some steps each (trials.py)
    Watching    the plan in force
    Postponed   the same, while what was noticed waits, of which measuring would take more than
                its share of the run; plans are tried, anew

    Trying    --the quickest is known-->    Watching
    any       --a drift (monitor.py), batches of another size, idle ranks that could help-->
              measure again --> weigh (policy.py) --> switch or stay --> Trying
              or, where that takes too much, Postponed, and considered again some steps later

Algorithm 1 of Baligodugula and Amsaad 2025 (arXiv 2503.23186), on live measurements. Every rank
sees the same table of times, so all come here at the same step; rank 0 decides for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from synchromesh.adapt import policy
from synchromesh.adapt.known_plans import KnownPlans
from synchromesh.adapt.monitor import LIMITS, Drift, Monitor
from synchromesh.adapt.policy import Budget, Verdict, weigh
from synchromesh.adapt.trials import Trials, first
from synchromesh.checkpoint.switch import Moved
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice
from synchromesh.profiling.reprofile import IdleProbe
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class AdapterTuning:
    """When what was noticed is looked into. Chosen, not measured."""

    steps_to_come: int = 100  # assumed, at least, where nobody says how many ...
    seconds_to_come: float = 60.0  # ... and as many as take so long
    retry_steps: int = 20  # after which measuring that was too expensive is considered again ...
    retry_seconds: float = 1.0  # ... and as many as take so long, since ranks must agree
    probe_share: float = 0.01  # of the time, for probes of what idle ranks wait for
    probe_steps: int = 10  # from one probe to the next, at least


TUNING = AdapterTuning()


class AdaptedRun(Protocol):
    """The run that is adapted, at the end of a step (live_run.py); all ranks call alike."""

    @property
    def plan(self) -> Plan:
        """The plan in force, as candidates are written."""

    @property
    def idle(self) -> bool:
        """Whether it leaves ranks idle."""

    def clock(self) -> float:
        """Seconds, as rank 0 has them."""

    def agreed(self, find: Callable[[], Any]) -> Any:
        """What rank 0 finds, as JSON."""

    def measure(self, known: Profile, drift: Drift) -> Choice:
        """Plans by what has been measured again. ValueError where none fits."""

    def probe(self, known: Profile, usual: Mapping[int, float]) -> IdleProbe:
        """Whether what keeps ranks idle has become better; `usual`: see `probe_idle`."""

    def move(self, better: Plan, known: Profile, now: float) -> float:
        """Seconds of pause of a switch; now: of a step."""

    def switch(self, plan: Plan) -> Moved:
        """Shifts to another plan."""


@dataclass(frozen=True)
class Decision:
    """What was noticed, what was done or why not, predicted and measured."""

    step: int
    noticed: str
    switched: bool
    reason: str
    plan_from: str
    plan_to: str
    measured_before: float  # seconds a step
    predicted_before: float
    predicted_after: float
    measuring_seconds: float
    bytes_moved: int = 0
    most_bytes: int = 0  # that one rank sent or received
    pause_seconds: float = 0.0
    measured_after: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As the log and `train --json` have it."""
        values = asdict(self)
        return {"from": values.pop("plan_from"), "to": values.pop("plan_to"), **values}


@dataclass(frozen=True)
class Trying:
    """Near plans are run for some steps each."""

    trials: Trials


@dataclass(frozen=True)
class Watching:
    """Nothing is tried."""


@dataclass(frozen=True)
class Postponed:
    """What was noticed is to be looked into, not before the step `until`; until then near plans
    are run."""

    drift: Drift
    until: int
    trials: Trials


class Adapter:
    """`record` every step's table, `act` at the step's end; `decisions` are those so far."""

    def __init__(
        self, profile: Profile, candidates: Sequence[Candidate] = (), began: float = 0.0
    ) -> None:
        """candidates: the plan in force, then those that it was chosen from. began: the run's
        clock now."""
        self.profile = profile
        self.state: Trying | Watching | Postponed = _trying(candidates)
        self.monitor = Monitor()
        self.budget = Budget(began)
        self.plans = KnownPlans(candidates)
        self.decisions: list[Decision] = []
        self._noticed: Drift | None = None  # in the step that ends
        self._awaited = False  # whether what steps take since the last switch is still to come
        self._idle = _IdleRanks()
        if candidates:
            self.restart(candidates[0].plan)

    def restart(self, plan: Plan) -> None:
        """Another plan is in force, or an earlier step: what is known of its steps is its
        prediction, if that."""
        self.monitor.follow(self.plans.expected(plan, plan, 0.0)[:1])
        self._noticed, self._awaited, self._idle.next_at = None, False, 0
        if isinstance(self.state, Postponed):
            self.state = Watching()

    @property
    def trying(self) -> bool:
        """Whether plans are run for some steps each."""
        return not isinstance(self.state, Watching) and not self.state.trials.over

    def resize(self, before: int, rows: int) -> None:
        """Global batches have another number of rows from now on: what a step takes is learnt
        anew, then the plan is reconsidered."""
        self.plans = KnownPlans(())
        self.monitor.follow()
        noticed = f"global batches have {rows} rows, {before} before"
        self.state = Postponed(Drift(0.0, 0.0, False, False, noticed), 0, Trials(()))

    def record(self, table: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> Decision | None:
        """table: microseconds computing and waiting of each of `ranks` in the last full-size step.
        Returns the last switch once it is known what steps take since."""
        self._noticed = self.monitor.record([(c * 1e-6, w * 1e-6) for c, w in table], ranks)
        now = self.monitor.measured
        return self._measured(now) if self._awaited and now is not None else None

    def _measured(self, now: float) -> Decision:
        """The last switch, since which a step takes `now`."""
        self._awaited = False
        self.decisions[-1] = replace(self.decisions[-1], measured_after=now)
        return self.decisions[-1]

    def act(self, run: AdaptedRun, step: int, to_come: int) -> Decision | None:
        """What comes of what was noticed or of a trial, if there is one; all ranks alike."""
        latest = self.monitor.latest
        least = round(TUNING.seconds_to_come / latest) if latest else 0
        steps = to_come or max(TUNING.steps_to_come, step, least)
        drift, self._noticed = self._noticed, None
        if isinstance(self.state, Postponed):
            if drift is not None:
                joined = drift.joined(self.state.drift)
                self.state = Postponed(joined, self.state.until, self._anew(run.plan))
                self.monitor.accept()
            drift = self.state.drift if step >= self.state.until else None
        elif drift is None:
            drift = self._idle_ranks(run, step, steps)
        if drift is not None:
            now = self.monitor.measured or drift.now
            return self._reconsidered(run, replace(drift, now=now), step, steps) if now else None
        if not isinstance(self.state, Watching) and self.trying and self.monitor.steady:
            return self._tried(run, self.state.trials, step, steps)
        return None

    def _anew(self, plan: Plan) -> Trials:
        """Trials of a time after a change, where those before it had not come to an end."""
        self.plans.seen.clear()
        return Trials([] if isinstance(self.state, Watching) else self.state.trials.left(plan))

    def _tried(self, run: AdaptedRun, trials: Trials, step: int, steps: int) -> Decision | None:
        """The next trial, or the end of all."""
        plan, counted, latest = run.plan, self.monitor.counted, self.monitor.latest
        found = trials.next(plan, counted, steps, lambda p: run.move(p, self.profile, latest))
        self.plans.seen.update(trials.tables)
        if trials.over and isinstance(self.state, Trying):
            self.state = Watching()
        if found is None:
            return None
        target, why = found
        now = trials.measured(plan)
        if self._awaited:
            self._measured(now)
        noticed = "plans are predicted to be about as quick"
        return self._switched(run, target, Drift(now, now, False, False, noticed), step, why, 0.0)

    def _reconsidered(
        self, run: AdaptedRun, drift: Drift, step: int, steps: int
    ) -> Decision | None:
        """Measures again what has changed, and weighs the plans that are found by it."""
        allowed = self.budget.allows
        if not run.agreed(lambda: allowed(run.clock(), steps * drift.now)):
            return self._postponed(run, drift, step)
        self._idle.measured(drift)
        plan, began, explains = run.plan, run.clock(), self.plans.explains
        try:
            choice = run.measure(self.profile, drift)
            if drift.source is not None and not explains(choice.candidates, plan):
                choice = run.measure(choice.profile, replace(drift, devices=True, links=True))
        except ValueError as error:  # the same on all ranks: nothing fits by these facts
            self.budget.spend(spent := run.clock() - began)
            return self._stays(plan, drift, step, str(error), spent)
        self.budget.spend(spent := run.clock() - began)
        self.profile, found = choice.profile, choice.candidates
        # else the prediction was wrong, and what was tried before holds
        changed = drift.source != "predicted" or explains(found, plan)
        if isinstance(self.state, Trying) and not changed:
            return self._stays(plan, drift, step, "measured again, nothing has changed", spent)
        self.plans.renew(found, changed)
        verdict = run.agreed(lambda: self._weighed(run, found, drift, steps))
        target, reason = Plan.parse(verdict["plan"]), verdict["reason"]
        following = target if verdict["switch"] else plan
        self.state = _trying(first(found, following)) if changed else Watching()
        if not verdict["switch"]:
            return self._stays(plan, drift, step, reason, spent, verdict["better"])
        self.plans.seen[plan] = self.monitor.counted[-LIMITS.fewest :]
        return self._switched(run, target, drift, step, reason, spent)

    def _weighed(
        self, run: AdaptedRun, found: Sequence[Candidate], drift: Drift, steps: int
    ) -> dict[str, Any]:
        """The verdict on the chosen candidate or else on the quickest, which need not be as
        plain."""
        quickest = min((c for c in found if c.fits), key=lambda c: c.seconds)
        for better in dict.fromkeys((found[0], quickest)):
            if better.plan == run.plan:
                verdict = Verdict(False, "the plan is still the best that was found")
                continue
            seconds = self.plans.weighed(better.plan, run.plan, drift.now)
            move = run.move(better.plan, self.profile, drift.now)
            verdict = weigh(drift.now, seconds, steps, move)
            if verdict.switch:
                break
        return {
            "switch": verdict.switch, "reason": verdict.reason, "plan": str(better.plan),
            "better": better.seconds,
        }  # fmt: skip

    def _postponed(self, run: AdaptedRun, drift: Drift, step: int) -> Decision | None:
        """Considered again some steps later, but reported once. Trials begin anew, or go on where
        a prediction that was wrong is likelier than a change behind it."""
        later = round(TUNING.retry_seconds / drift.now)
        state, until = self.state, step + max(TUNING.retry_steps, later)
        reported = isinstance(state, Postponed) and state.until
        if isinstance(state, Postponed):
            self.state = replace(state, until=until)
        elif not (isinstance(state, Trying) and drift.source == "predicted"):
            self.state = Postponed(drift, until, self._anew(run.plan))
        if reported:
            return None
        share = f"measuring would take more than {policy.LIMITS.measuring_share:.0%} of the run"
        return self._stays(run.plan, drift, step, share, 0.0)

    def _idle_ranks(self, run: AdaptedRun, step: int, steps: int) -> Drift | None:
        """What has become better for idle ranks, of which steps say nothing."""
        idle = self._idle
        if step < idle.next_at or not run.idle or self.monitor.usual is None:
            return None
        usual, began, found = self.monitor.usual.step, run.clock(), None
        if run.agreed(lambda: self.budget.allows(run.clock(), steps * usual)):
            found = run.agreed(idle.noticed(run.probe(self.profile, idle.usual)))
        spent = run.agreed(lambda: run.clock() - began)
        self.budget.spend(spent, again=False)
        pause = round(spent / TUNING.probe_share / usual)
        idle.next_at = step + max(TUNING.probe_steps, pause)
        if found is None:
            return None
        noticed, devices = found
        return Drift(usual, usual, devices, not devices, noticed)

    def _switched(
        self, run: AdaptedRun, target: Plan, drift: Drift, step: int, why: str, spent: float
    ) -> Decision:
        """Shifts to `target`, and says what is expected of it."""
        plan, now, state = run.plan, drift.now, self.state
        expected = self.plans.expected(target, plan, now)
        moved = run.switch(target)
        self.state = state
        self.monitor.follow(expected, self.plans.seen.get(target, ()))
        self._awaited = True
        return self._decided(
            Decision(
                step, str(drift), True, why, str(plan), str(target), now,
                self.plans.predicted.get(plan, now), expected[0], spent,
                moved.bytes, moved.most, moved.seconds,
            )
        )  # fmt: skip

    def _stays(
        self, plan: Plan, drift: Drift, step: int, reason: str, spent: float, better: float = 0.0
    ) -> Decision:
        """Notes that the plan is kept, and that what steps take now is usual. better: predicted
        seconds of a step; 0: not known."""
        self.monitor.accept()
        now = self.plans.predicted.get(plan, drift.now)
        return self._decided(
            Decision(
                step, str(drift), False, reason, str(plan), str(plan), drift.now, now,
                better or now, spent,
            )
        )  # fmt: skip

    def _decided(self, decision: Decision) -> Decision:
        self.decisions.append(decision)
        return decision


class _IdleRanks:
    """Probes of what keeps ranks idle. next_at: the step before which there is none. usual:
    seconds of an all-reduce by its payload, since a probe led to measuring again."""

    def __init__(self) -> None:
        self.next_at = 0
        self.usual: dict[int, float] = {}
        self._probed: dict[int, float] = {}  # by the last probe

    def noticed(self, probe: IdleProbe) -> Callable[[], tuple[str, bool] | None]:
        """What has become better, and whether devices have."""
        self._probed = dict([probe.call] if probe.call else [])
        return lambda: (str(probe), probe.devices > probe.links) if probe else None

    def measured(self, drift: Drift) -> None:
        """What has drifted was measured again."""
        self.usual = self._probed if drift.source is None and drift.links else {}


def _trying(candidates: Sequence[Candidate]) -> Trying | Watching:
    """The plan in force first."""
    trials = Trials(candidates)
    return Watching() if trials.over else Trying(trials)
