"""The adapter: notices that steps have changed, measures what did, and switches where that pays.

    step ... step  ->  drift (monitor)  ->  measure what changed again (profiling/reprofile.py)
                   ->  reconsider the plan  ->  weigh (policy)  ->  switch, or stay and say why

Before all that come trials (trials.py) of plans that are predicted to be about as quick.

Algorithm 1 of Baligodugula and Amsaad 2025 (arXiv 2503.23186), on live measurements. Every rank
sees the same table of times, so all come here at the same step; rank 0 decides for all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from synchromesh.adapt import policy
from synchromesh.adapt.monitor import Drift, Monitor
from synchromesh.adapt.policy import Verdict, may_measure, weigh
from synchromesh.adapt.trials import Trials
from synchromesh.cost.move import most_received, transfer_seconds
from synchromesh.planner.candidate import Candidate, setting
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.planning import reconsider
from synchromesh.profiling.reprofile import probe_idle, reprofile
from synchromesh.state.switch import Moved
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class ReprofileLimits:
    """When measuring again may be tried, and what a switch is expected to cost. Chosen, not
    measured: lengths of measuring are kept on the safe side of its share of the run."""

    seconds: float = 3.0  # that it is expected to take at least
    growth: float = 1.5  # times as long as the one before it may take
    steps_to_come: int = 100  # assumed, at least, where nobody says how many
    retry_steps: int = 20  # after which one that was too expensive is considered again
    probe_share: float = 0.01  # of the time, for probes of what idle ranks wait for
    probe_steps: int = 10  # from one probe to the next, at least
    switch_steps: float = 2.0  # steps that tracing and partitioning for a new plan take


LIMITS = ReprofileLimits()


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


class Adapter:
    """`record` every step's table, `act` at the step's end; `decisions` are those so far."""

    def __init__(
        self, profile: Profile, switch: Callable[[Plan], Moved],
        candidates: Sequence[Candidate] = (),
    ) -> None:  # fmt: skip
        """candidates: that the plan in force was chosen from, it first; none: it was given."""
        self.profile, self._switch, self._candidates = profile, switch, candidates
        self.trials = Trials(candidates)
        self.monitor = Monitor()
        self.decisions: list[Decision] = []
        self.drift: Drift | None = None
        self._began = time.monotonic()
        self._measuring_seconds = 0.0  # spent so far
        self._next_seconds = LIMITS.seconds  # of the next reprofile, at most
        self._reprofiled = False
        self._retry_at = 0  # the step before which a refused reprofile is not considered again
        self._awaits_usual = False  # the last switch's measured time is still to come
        self._refusal_reported = False  # since the last reprofile
        self._resized = ""  # what to report of batches of another size
        # Seconds of an all-reduce by its payload where a probe led to a reprofile: known since
        self._probed_usual: dict[int, float] = {}
        self._probed: dict[int, float] = {}  # by the last probe
        self._probe_at = 0  # the step before which idle ranks are not probed

    def restart(self) -> None:
        """Forgets what was usual, as after a switch that was not this adapter's."""
        self.monitor.reset()
        self.drift = None
        self._awaits_usual = False
        self._retry_at = self._probe_at = 0

    def resize(self, before: int, rows: int) -> None:
        """Global batches have another number of rows from now on: what a step takes is learnt
        anew, then the plan is reconsidered."""
        self.restart()
        self.trials.over = True
        self._resized = f"global batches have {rows} rows, {before} before"

    def record(self, table: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> Decision | None:
        """table: microseconds computing and waiting of each of `ranks` in the last full-size step.
        Returns the last switch once it is known what steps take since.
        """
        if not self.trials.over:
            self.trials.record(max(c + w for c, w in table) * 1e-6)
        drift = self.monitor.record([(c * 1e-6, w * 1e-6) for c, w in table])
        self.drift = None if drift is None else replace(drift, ranks=tuple(ranks))
        usual = self.monitor.usual
        if not self._awaits_usual or usual is None:
            return None
        self._awaits_usual = False
        self.decisions[-1] = replace(self.decisions[-1], measured_after=usual.step)
        return self.decisions[-1]

    def act(
        self, facts: LiveFacts, plan: Plan, partition: Partition, step: int, to_come: int
    ) -> Decision | None:
        """What comes of a drift or a trial, if there is one; all ranks alike."""
        drift, self.drift = self.drift, None
        if not self.trials.over:
            return self._tried(facts, plan, step, to_come or max(LIMITS.steps_to_come, step))
        drift = drift or self._unseen_by_steps(facts, plan, step, to_come)
        if drift is None or step < self._retry_at:
            return None
        everyone = facts.world.everyone
        steps = to_come or max(LIMITS.steps_to_come, step)
        if not everyone.broadcast_json(self._may_reprofile(steps * drift.now)):
            return self._refused(drift, plan, step)
        began = time.monotonic()
        self._reprofile(facts, partition, drift)
        found: tuple[Candidate, ...] = ()
        misfit = ""
        try:
            choice = reconsider(facts, self.profile, plan)
            self.profile, found = choice.profile, choice.candidates
        except ValueError as error:  # the same on all ranks: nothing fits by these facts
            misfit = str(error)
        spent = time.monotonic() - began
        self._measuring_seconds += spent
        # what was new to the first one is known to the next
        usual_seconds = spent if self._reprofiled else spent / 2
        self._next_seconds = max(LIMITS.seconds, LIMITS.growth * usual_seconds)
        self._reprofiled = True
        if misfit:
            return self._stays(drift, plan, step, misfit, spent)
        verdict = everyone.broadcast_json(self._weighed(facts, found, plan, drift, steps))
        now, better = verdict["now"], verdict["better"]
        if not verdict["switch"]:
            return self._stays(drift, plan, step, verdict["reason"], spent, now, better)
        target = Plan.parse(verdict["plan"])
        moved = self._switch(target)
        self._awaits_usual = True
        return self._decided(
            Decision(
                step, str(drift), True, verdict["reason"], str(plan), str(target), drift.now,
                now, better, spent, moved.bytes, moved.most, moved.seconds,
            )
        )  # fmt: skip

    def _tried(self, facts: LiveFacts, plan: Plan, step: int, to_come: int) -> Decision | None:
        """The next trial, or the end of all."""
        now = self.trials.latest
        found = self.trials.next(plan, to_come, lambda p: self._move(facts, plan, p, now))
        if found is None:
            return None
        target, why = found
        measured, predicted = self.trials.measured, {c.plan: c.seconds for c in self._candidates}
        if self._awaits_usual:
            self.decisions[-1] = replace(self.decisions[-1], measured_after=measured[plan])
        moved = self._switch(target)
        self._awaits_usual = True
        return self._decided(
            Decision(
                step, "plans are predicted to be about as quick", True, why, str(plan),
                str(target), measured[plan], predicted[plan], predicted[target], 0.0,
                moved.bytes, moved.most, moved.seconds,
            )
        )  # fmt: skip

    def _reprofile(self, facts: LiveFacts, partition: Partition, drift: Drift) -> None:
        """Measures what has drifted again."""
        self._resized, self._refusal_reported = "", False
        self._probed_usual.clear()
        self.monitor.reset()  # whatever is found: what is measured from now on is usual
        world = facts.world
        if drift.noticed and drift.link_drift:
            self._probed_usual.update(self._probed)
        links = drift.link_drift or (drift.device_drift and world.device.type == "cuda")
        ranks = range(world.size)  # also those that the plan leaves idle
        self.profile = reprofile(facts, ranks, partition, self.profile, drift.device_drift, links)

    def _may_reprofile(self, to_come: float) -> bool:
        """Whether measuring again keeps below its share of the run; to_come: its seconds left."""
        elapsed = time.monotonic() - self._began + to_come
        return may_measure(self._measuring_seconds, elapsed, self._next_seconds)

    def _refused(self, drift: Drift, plan: Plan, step: int) -> Decision | None:
        """Considered again some steps later, but reported once."""
        self._retry_at = step + LIMITS.retry_steps
        if self._refusal_reported:
            return None
        self._refusal_reported = True
        share = f"measuring would take more than {policy.LIMITS.measuring_share:.0%} of the run"
        return self._stays(drift, plan, step, share, 0.0)

    def _unseen_by_steps(
        self, facts: LiveFacts, plan: Plan, step: int, to_come: int
    ) -> Drift | None:
        """What steps do not show: batches have another size, or what keeps ranks idle has become
        better. The same on all ranks."""
        usual = self.monitor.usual
        if usual is None:
            return None
        noticed, explained = self._resized, None  # until it has been measured again
        if not noticed:
            probed = self._probe(facts, plan, step, to_come, usual.step)
            if probed is None:
                return None
            noticed, explained = probed
        ratios = (1.0,) * len(usual.computing)
        active = tuple(plan.devices(facts.world.size))
        return Drift(usual.step, usual.step, ratios, explained, active, noticed)

    def _probe(
        self, facts: LiveFacts, plan: Plan, step: int, to_come: int, usual: float
    ) -> tuple[str, float | None] | None:
        """What has become better for idle ranks, and whether devices explain it (1.0) or links
        (0.0). Every rank probes at the same steps, as often as `probe_share` allows.
        """
        world = facts.world
        active = plan.devices(world.size)
        if len(active) == world.size or step < self._probe_at:
            return None
        everyone, began = world.everyone, time.monotonic()
        steps = to_come or max(LIMITS.steps_to_come, step)
        found = None
        if everyone.broadcast_json(self._may_reprofile(steps * usual)):
            probe = probe_idle(world, active, self.profile, self._probed_usual)
            self._probed = dict([probe.call] if probe.call else [])
            found = (str(probe), float(probe.devices > probe.links)) if probe else None
        spent = everyone.broadcast_json(time.monotonic() - began)
        self._measuring_seconds += spent
        pause = max(LIMITS.probe_steps, round(spent / LIMITS.probe_share / usual))
        self._probe_at = step + pause
        found = everyone.broadcast_json(found)
        return None if found is None else (found[0], found[1])

    def _weighed(
        self, facts: LiveFacts, found: Sequence[Candidate], plan: Plan, drift: Drift, steps: int
    ) -> dict[str, Any]:
        """The verdict on the chosen candidate or else on the quickest, which need not be as
        plain. A prediction counts times what the plan in force really takes over what it is
        predicted to take."""
        current = next((c for c in found if c.plan == plan), None)
        now = current.seconds if current is not None and current.time is not None else drift.now
        quickest = min((c for c in found if c.fits), key=lambda c: c.seconds)
        for better in dict.fromkeys((found[0], quickest)):
            if better.plan == plan:
                verdict = Verdict(False, "the plan is still the best that was found")
                continue
            seconds = better.seconds * drift.now / now
            move = self._move(facts, plan, better.plan, drift.now)
            verdict = weigh(drift.now, seconds, steps, move)
            if verdict.switch:
                break
        return {
            "switch": verdict.switch, "reason": verdict.reason, "plan": str(better.plan),
            "now": now, "better": better.seconds,
        }  # fmt: skip

    def _move(self, facts: LiveFacts, plan: Plan, better: Plan, now: float) -> float:
        """Seconds of the pause: the most bytes that a rank must receive, at the links' rate, and
        making the new programs. now: seconds of a step."""
        world = facts.world.size
        before, after = (setting(facts.partitions, p) for p in (plan, better))
        moved = most_received(before, after, world, 1 + self.profile.state_factor)
        return transfer_seconds(moved, world, self.profile) + LIMITS.switch_steps * now

    def _stays(
        self, drift: Drift, plan: Plan, step: int, reason: str, spent: float, now: float = 0.0,
        better: float = 0.0,
    ) -> Decision:  # fmt: skip
        """Notes that the plan is kept. now, better: predicted seconds of a step; 0: not known."""
        now = now or drift.now
        return self._decided(
            Decision(
                step, str(drift), False, reason, str(plan), str(plan), drift.now, now,
                better or now, spent,
            )
        )  # fmt: skip

    def _decided(self, decision: Decision) -> Decision:
        self.decisions.append(decision)
        return decision
