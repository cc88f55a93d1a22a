"""The adapter: notices that steps have changed, measures what did, and shifts where that pays.

    step ... step  ->  drift (monitor)  ->  sample what changed (profiling.reprofile)
                   ->  reconsider (planning)  ->  weigh (policy)  ->  switch, or stay and say why

Algorithm 1 of Baligodugula and Amsaad 2025 (arXiv 2503.23186), on live measurements. Every rank
sees the same table of times, so all come here at the same step; rank 0 decides for all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from synchromesh.adapt.monitor import Drift, Monitor
from synchromesh.adapt.policy import MEASURING, Verdict, may_measure, weigh
from synchromesh.cost.move import most_received, transfer_seconds
from synchromesh.planner.candidate import Candidate, setting
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.planning import reconsider
from synchromesh.profiling.reprofile import probe_idle, reprofile
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

SAMPLING = 3.0  # seconds that a look at what changed is expected to take at least
LONGER = 1.5  # times as long as the one before it may take
FEWEST = 100  # steps that are assumed to come where nobody says how many
PATIENCE = 20  # steps after which a look that was too much is asked for again
GLANCE_SHARE = 0.01  # of the time that may go into glances at what idle ranks wait for
GLANCE_STEPS = 10  # from one to the next, at least
PAUSE_STEPS = 2  # steps that arranging anew is expected to take


class Shifted(Protocol):
    """What a switch took: seconds of pause, bytes that all ranks sent, and the most of one."""

    @property
    def seconds(self) -> float: ...

    @property
    def bytes(self) -> int: ...

    @property
    def most(self) -> int: ...


@dataclass(frozen=True)
class Event:
    """A decision: what was noticed, what was done or why not, predicted and measured."""

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
        told = asdict(self)
        return {"from": told.pop("plan_from"), "to": told.pop("plan_to"), **told}


class Adapter:
    """`see` every step's table, `act` at the step's end; `events` are the decisions so far."""

    def __init__(self, profile: Profile, switch: Callable[[Plan], Shifted]) -> None:
        self.profile, self._switch = profile, switch
        self.monitor = Monitor()
        self.events: list[Event] = []
        self.drift: Drift | None = None
        self._began = time.monotonic()
        self._measured, self._look = 0.0, SAMPLING  # seconds spent, and of the next look at most
        self._looked = False
        self._ask_at = 0  # the step before which a look, that was too much, is not asked for
        self._awaits = False  # whether the last switch's measured time is still to come
        self._share_told = False  # whether it was said, since the last look, that one is too much
        self._resized = ""  # what is to be said of batches of another size
        # Seconds of an all-reduce by its payload, where a glance led to a look: no news any more
        self._usual_glance: dict[int, float] = {}
        self._seen: dict[int, float] = {}  # of the last glance
        self._glance_at = 0  # the step before which idle ranks are not looked at

    def restart(self) -> None:
        """Forgets what was usual, as after a switch that was not this adapter's."""
        self.monitor.reset()
        self.drift = None
        self._awaits = False
        self._ask_at = self._glance_at = 0

    def resize(self, before: int, rows: int) -> None:
        """Global batches have another number of rows from now on: what a step takes is learnt
        anew, then the plan is thought over."""
        self.restart()
        self._resized = f"global batches have {rows} rows, {before} before"

    def see(self, table: Sequence[tuple[int, ...]], ranks: Sequence[int] = ()) -> Event | None:
        """table: microseconds computing and waiting of each of `ranks` in the last full-size step.
        Returns the last switch once it is known what steps take since.
        """
        drift = self.monitor.tell([(c * 1e-6, w * 1e-6) for c, w in table])
        self.drift = None if drift is None else replace(drift, ranks=tuple(ranks))
        usual = self.monitor.usual
        if not self._awaits or usual is None:
            return None
        self._awaits = False
        self.events[-1] = replace(self.events[-1], measured_after=usual.step)
        return self.events[-1]

    def act(
        self, question: LiveFacts, plan: Plan, partition: Partition, step: int, to_come: int
    ) -> Event | None:
        """What comes of a drift, if there is one; all ranks alike."""
        drift, self.drift = self.drift, None
        drift = drift or self._told(question, plan, step, to_come)
        if drift is None or step < self._ask_at:
            return None
        world, everyone = question.world, question.world.everyone
        steps = to_come or max(FEWEST, step)
        if not everyone.broadcast_json(self._may_look(steps * drift.now)):
            self._ask_at = step + PATIENCE
            if self._share_told:
                return None
            self._share_told = True
            share = f"measuring would take more than {MEASURING:.0%} of the run"
            return self._stays(drift, plan, step, share, 0.0)
        self._resized, self._share_told = "", False
        self._usual_glance.clear()
        self.monitor.reset()  # whatever is found: what is measured from now on is usual
        began = time.monotonic()
        ranks = range(world.size)  # also those that the plan leaves idle
        if drift.told and drift.link_drift:
            self._usual_glance.update(self._seen)
        links = drift.link_drift or (drift.device_drift and world.device.type == "cuda")
        self.profile = reprofile(
            question, ranks, partition, self.profile, drift.device_drift, links
        )
        found: tuple[Candidate, ...] = ()
        misfit = ""
        try:
            choice = reconsider(question, self.profile, plan)
            self.profile, found = choice.profile, choice.candidates
        except ValueError as error:  # the same on all ranks: nothing fits by these facts
            misfit = str(error)
        spent = time.monotonic() - began
        self._measured += spent
        # what was new to the first one is known to the next
        self._look = max(SAMPLING, LONGER * (spent if self._looked else spent / 2))
        self._looked = True
        if misfit:
            return self._stays(drift, plan, step, misfit, spent)
        told = everyone.broadcast_json(self._weighed(question, found, plan, drift, steps))
        if not told["switch"]:
            return self._stays(
                drift, plan, step, told["reason"], spent, told["now"], told["better"]
            )
        better = Plan.parse(told["plan"])
        moved = self._switch(better)
        self._awaits = True
        self.events.append(
            Event(
                step, str(drift), True, told["reason"], str(plan), str(better), drift.now,
                told["now"], told["better"], spent, moved.bytes, moved.most, moved.seconds,
            )
        )  # fmt: skip
        return self.events[-1]

    def _may_look(self, to_come: float) -> bool:
        """Whether a look keeps measuring below its share of the run; to_come: its seconds left."""
        elapsed = time.monotonic() - self._began + to_come
        return may_measure(self._measured, elapsed, self._look)

    def _told(self, question: LiveFacts, plan: Plan, step: int, to_come: int) -> Drift | None:
        """What steps do not show: batches have another size, or what keeps ranks idle has become
        better. The same on all ranks."""
        usual = self.monitor.usual
        if usual is None:
            return None
        explained: float | None = None
        if self._resized:
            told = self._resized  # until a look has been taken
        else:
            seen = self._glanced(question, plan, step, to_come, usual.step)
            if seen is None:
                return None
            told, explained = seen
        ratios = (1.0,) * len(usual.computing)
        active = tuple(plan.devices(question.world.size))
        return Drift(usual.step, usual.step, ratios, explained, active, told)

    def _glanced(
        self, question: LiveFacts, plan: Plan, step: int, to_come: int, usual: float
    ) -> tuple[str, float] | None:
        """What has become better for idle ranks, and whether devices explain it (1.0) or links
        (0.0). Every rank glances at the same steps, as often as `GLANCE_SHARE` of the time allows.
        """
        world = question.world
        active = plan.devices(world.size)
        if len(active) == world.size or step < self._glance_at:
            return None
        everyone, began = world.everyone, time.monotonic()
        steps = to_come or max(FEWEST, step)
        told = None
        if everyone.broadcast_json(self._may_look(steps * usual)):
            seen = probe_idle(world, active, self.profile, self._usual_glance)
            self._seen = dict([seen.call] if seen.call else [])
            told = (str(seen), float(seen.devices > seen.links)) if seen else None
        spent = everyone.broadcast_json(time.monotonic() - began)
        self._measured += spent
        self._glance_at = step + max(GLANCE_STEPS, round(spent / GLANCE_SHARE / usual))
        told = everyone.broadcast_json(told)
        return None if told is None else (told[0], told[1])

    def _weighed(
        self,
        question: LiveFacts,
        found: Sequence[Candidate],
        plan: Plan,
        drift: Drift,
        steps: int,
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
            move = self._move(question, plan, better.plan, drift)
            verdict = weigh(drift.now, seconds, steps, move)
            if verdict.switch:
                break
        return {
            "switch": verdict.switch, "reason": verdict.reason, "plan": str(better.plan),
            "now": now, "better": better.seconds,
        }  # fmt: skip

    def _move(self, question: LiveFacts, plan: Plan, better: Plan, drift: Drift) -> float:
        """Seconds of the pause: the most bytes that a rank must receive, at the links' rate, and
        arranging anew."""
        world = question.world.size
        before, after = (setting(question.partitions, p) for p in (plan, better))
        moved = most_received(before, after, world, 1 + self.profile.state_factor)
        seconds = transfer_seconds(moved, world, self.profile)
        return seconds + PAUSE_STEPS * drift.now

    def _stays(
        self,
        drift: Drift,
        plan: Plan,
        step: int,
        reason: str,
        spent: float,
        now: float = 0.0,
        better: float = 0.0,
    ) -> Event:
        self.events.append(
            Event(
                step, str(drift), False, reason, str(plan), str(plan), drift.now,
                now or drift.now, better or now or drift.now, spent,
            )
        )  # fmt: skip
        return self.events[-1]
