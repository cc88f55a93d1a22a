"""The adapter: notices that steps are not what was expected, has measured again what changed, and
switches where that pays.

    a drift (monitor.py), batches of another size, or idle ranks that could help
      -> measure again (reprofile)  -> weigh (decision.py)  -> switch or stay, and try near plans
      or, where that takes too much, postponed (phase.py), and considered again some steps later

    known      what was measured, and what steps under each plan take by it (known_plans.py)
    phase      which plans are tried, and what waits (phase.py)
    history    what was decided (decision.py)

Algorithm 1 of Baligodugula and Amsaad 2025 (arXiv 2503.23186), on live measurements. Every rank
sees the same table of times, so all come here at the same step; rank 0 decides for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from synchromesh.adapt import decision
from synchromesh.adapt.decision import Budget, Decision, History, Verdict, weigh
from synchromesh.adapt.known_plans import KnownPlans
from synchromesh.adapt.live_run import LiveRun
from synchromesh.adapt.monitor import LIMITS, Drift, Monitor
from synchromesh.adapt.phase import Phase
from synchromesh.adapt.trials import first
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


@dataclass(frozen=True)
class StepEnd:
    """The end of a step of a run, with the steps that are still to come."""

    run: LiveRun
    step: int
    to_come: int


class Adapter:
    """`record` every step's table, `act` at the step's end; `decisions` are those so far."""

    def __init__(
        self, profile: Profile, candidates: Sequence[Candidate] = (), began: float = 0.0
    ) -> None:
        """candidates: the plan in force, then those it was chosen from. began: a clock's time."""
        self.known = KnownPlans(profile, candidates)
        self.phase = Phase.of(candidates)
        self.history = History()
        self.monitor = Monitor()
        self.budget = Budget(began)
        self._idle = _IdleRanks()
        self._noticed: Drift | None = None  # in the step that ends
        if candidates:
            self.restart(candidates[0].plan)

    @property
    def profile(self) -> Profile:
        return self.known.profile

    @property
    def decisions(self) -> list[Decision]:
        return self.history.decisions

    def restart(self, plan: Plan) -> None:
        """Another plan is in force, or an earlier step: steps are known by prediction only."""
        self.monitor.follow(self.known.expected(plan, plan, 0.0)[:1])
        self.history.awaited, self._idle.next_at = None, 0
        self.phase, self._noticed = self.phase.restarted(), None

    def reconsider(self, noticed: str, sampled: bool = False) -> None:
        """Steps take something else from now on, for what is `noticed`: they are learnt anew.
        sampled: devices and links are, too, for what is known of them is of others."""
        self.known = KnownPlans(self.profile)
        self.monitor.follow()
        self.history.awaited = None  # it would be of other steps
        self.phase = Phase(waiting=Drift(0.0, 0.0, sampled, sampled, noticed))

    def record(self, table: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> Decision | None:
        """table: microseconds computing and waiting of each of `ranks` in the last full-size step.
        Returns the last switch once it is known what steps take since."""
        self._noticed = self.monitor.record([(c * 1e-6, w * 1e-6) for c, w in table], ranks)
        now = self.monitor.measured
        return None if now is None else self.history.measured(now)

    def act(self, run: LiveRun, step: int, to_come: int) -> Decision | None:
        """What comes of what was noticed, or of a trial. to_come: steps; 0: not known."""
        latest = self.monitor.latest
        least = round(TUNING.seconds_to_come / latest) if latest else 0
        end = StepEnd(run, step, to_come or max(TUNING.steps_to_come, step, least))
        drift = self._to_be_considered(end)
        if drift is not None:
            now = self.monitor.measured or drift.now
            return self._reconsidered(end, replace(drift, now=now)) if now else None
        return self._tried(end) if self.phase.trying and self.monitor.steady else None

    def _to_be_considered(self, end: StepEnd) -> Drift | None:
        drift, self._noticed = self._noticed, None
        if self.phase.waiting is None:
            return self._idle_ranks(end) if drift is None else drift
        if drift is not None:
            self.phase = self.phase.joined(drift, end.run.plan)
            self.known.seen.clear()
            self.monitor.accept()
        return self.phase.due(end.step)

    def _tried(self, end: StepEnd) -> Decision | None:
        plan, trials, latest = end.run.plan, self.phase.trials, self.monitor.latest
        following = trials.next(
            plan, self.monitor.counted, end.to_come,
            lambda p: end.run.move(p, self.profile, latest),
        )  # fmt: skip
        self.known.seen.update(trials.tables)
        if following is None:
            return None
        target, why = following
        now = trials.measured(plan)
        self.history.measured(now)
        noticed = "plans are predicted to be about as quick"
        return self._switched(end, target, Drift(now, now, False, False, noticed), why, 0.0)

    def _reconsidered(self, end: StepEnd, drift: Drift) -> Decision | None:
        """Measures again what has changed, and weighs the plans that are found by it."""
        run, budget = end.run, self.budget
        if not run.agreed(lambda: budget.allows(run.clock(), end.to_come * drift.now)):
            return self._postponed(end, drift)
        self._idle.measured(drift)
        began = run.clock()
        try:
            choice = self._measured_again(run, drift)
        except ValueError as error:  # the same on all ranks: nothing fits by these facts
            budget.spend(spent := run.clock() - began)
            return self._stays(end, drift, str(error), spent)
        budget.spend(spent := run.clock() - began)
        self.known.profile = choice.profile
        # else the prediction was wrong, and what was tried before holds
        changed = drift.source != "predicted" or self.known.explains(choice.candidates, run.plan)
        if self.phase.doubts(drift) and not changed:
            return self._stays(end, drift, "measured again, nothing has changed", spent)
        return self._decided(end, drift, choice.candidates, changed, spent)

    def _measured_again(self, run: LiveRun, drift: Drift) -> Choice:
        """Plans by what is measured where it drifted; by all, where that does not explain it."""
        choice = run.measure(self.profile, drift)
        if drift.source is None or self.known.explains(choice.candidates, run.plan):
            return choice
        return run.measure(choice.profile, replace(drift, devices=True, links=True))

    def _decided(
        self, end: StepEnd, drift: Drift, plans: Sequence[Candidate], changed: bool, spent: float
    ) -> Decision:
        """Switches to the best of `plans`, which were measured again, or stays. changed: whether
        conditions have; then what is near the better plan is tried anew."""
        plan = end.run.plan
        self.known.renew(plans, changed)
        verdict = end.run.agreed(lambda: self._weighed(end, plans, drift))
        target, reason = Plan.parse(verdict["plan"]), verdict["reason"]
        following = target if verdict["switch"] else plan
        self.phase = Phase.of(first(plans, following)) if changed else Phase()
        if not verdict["switch"]:
            return self._stays(end, drift, reason, spent, verdict["better"])
        self.known.seen[plan] = self.monitor.counted[-LIMITS.fewest :]
        return self._switched(end, target, drift, reason, spent)

    def _weighed(self, end: StepEnd, plans: Sequence[Candidate], drift: Drift) -> dict[str, Any]:
        """The verdict on the chosen candidate, else on the quickest, which may be less plain."""
        quickest = min((c for c in plans if c.fits), key=lambda c: c.seconds)
        for better in dict.fromkeys((plans[0], quickest)):
            if better.plan == end.run.plan:
                verdict = Verdict(False, "the plan is still the best that was found")
                continue
            seconds = self.known.weighed(better.plan, end.run.plan, drift.now)
            move = end.run.move(better.plan, self.profile, drift.now)
            verdict = weigh(drift.now, seconds, end.to_come, move)
            if verdict.switch:
                break
        return {
            "switch": verdict.switch, "reason": verdict.reason, "plan": str(better.plan),
            "better": better.seconds,
        }  # fmt: skip

    def _postponed(self, end: StepEnd, drift: Drift) -> Decision | None:
        """Considered again some steps later, but reported once."""
        reported = self.phase.reported
        if not self.phase.doubts(drift):
            if self.phase.waiting is None:  # what was seen is of a time before the change
                self.known.seen.clear()
            later = max(TUNING.retry_steps, round(TUNING.retry_seconds / drift.now))
            self.phase = self.phase.postponed(drift, end.step + later, end.run.plan)
        if reported:
            return None
        share = f"{decision.LIMITS.measuring_share:.0%} of the run"
        return self._stays(end, drift, f"measuring would take more than {share}", 0.0)

    def _idle_ranks(self, end: StepEnd) -> Drift | None:
        run, idle = end.run, self._idle
        if end.step < idle.next_at or not run.idle or self.monitor.usual is None:
            return None
        usual, began, better = self.monitor.usual.step, run.clock(), None
        if run.agreed(lambda: self.budget.allows(run.clock(), end.to_come * usual)):
            better = run.agreed(idle.noticed(run.probe(self.profile, idle.usual)))
        spent = run.agreed(lambda: run.clock() - began)
        self.budget.spend(spent, again=False)
        pause = round(spent / TUNING.probe_share / usual)
        idle.next_at = end.step + max(TUNING.probe_steps, pause)
        if better is None:
            return None
        noticed, devices = better
        return Drift(usual, usual, devices, not devices, noticed)

    def _switched(self, end: StepEnd, to: Plan, drift: Drift, why: str, spent: float) -> Decision:
        plan, now, phase = end.run.plan, drift.now, self.phase
        expected = self.known.expected(to, plan, now)
        moved = end.run.switch(to)  # which restarts the adapter
        self.phase = phase
        self.monitor.follow(expected, self.known.seen.get(to, ()))
        return self.history.add(Decision(
            end.step, str(drift), True, why, str(plan), str(to), now,
            self.known.predicted.get(plan, now), expected[0], spent, moved.bytes, moved.most,
            moved.seconds,
        ))  # fmt: skip

    def _stays(
        self, end: StepEnd, drift: Drift, reason: str, spent: float, better: float = 0.0
    ) -> Decision:
        """Keeps the plan; what steps take is usual now. better: predicted seconds, or 0."""
        self.monitor.accept()
        plan, now = str(end.run.plan), self.known.predicted.get(end.run.plan, drift.now)
        return self.history.add(Decision(
            end.step, str(drift), False, reason, plan, plan, drift.now, now, better or now, spent,
        ))  # fmt: skip


class _IdleRanks:
    """Probes of what keeps ranks idle, not before the step next_at. usual: seconds of an
    all-reduce by its payload, since a probe led to measuring again."""

    def __init__(self) -> None:
        self.next_at = 0
        self.usual: dict[int, float] = {}
        self._probed: dict[int, float] = {}  # by the last probe

    def noticed(self, probe: IdleProbe) -> Callable[[], tuple[str, bool] | None]:
        """What has become better, and whether devices have."""
        self._probed = dict([probe.call] if probe.call else [])
        return lambda: (str(probe), probe.devices > probe.links) if probe else None

    def measured(self, drift: Drift) -> None:
        self.usual = self._probed if drift.source is None and drift.links else {}
