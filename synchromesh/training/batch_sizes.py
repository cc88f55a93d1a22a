"""Global batches that change while training, with the plan and the learning rate.

    GOODPUT(B)  =  B / T(B) x EFFICIENCY(B)         T(B): predicted seconds of a step of B rows

(cost/efficiency.py; Qiao et al. 2021, "Pollux", OSDI.) When the noise scale is known, and whenever
it has moved since, the batch of most goodput is taken if that is worth the change. T is that of
the quickest plan that fits, of the one in force and, where the plan may change, of those that were
the quickest with other batches; the plan of the batch that is taken is searched for entirely."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import LIMITS, weigh
from synchromesh.adapt.live_run import LiveRun
from synchromesh.checkpoint.switch import Moved
from synchromesh.cost.efficiency import goodput
from synchromesh.data.loader import Loader
from synchromesh.engine.agreement import require_alike
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.choice import Choice
from synchromesh.planning.session import quickest
from synchromesh.training.active_plan import unmeasurable
from synchromesh.training.execution import Execution
from synchromesh.values.batch_sizes import BatchRange
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.workloads.learning_rate import ScaledRate


@dataclass(frozen=True)
class BatchChange:
    """Batches have other rows from the step after `step` on, and why. goodput: predicted, in rows
    a second that are worth those of the first batch; None where it did not decide."""

    step: int
    before: int
    after: int
    reason: str
    goodput_before: float | None
    goodput_after: float | None
    learning_rate: float  # of the optimizer's first group
    plan_from: str
    plan_to: str
    seconds: float  # of measuring, searching and moving

    def to_dict(self) -> dict[str, Any]:
        """As the log and `train --json` have it."""
        values = asdict(self)
        return {"from": values.pop("before"), "to": values.pop("after"), **values}


class BatchSizes:
    """Changes the batches of one loader between steps. All ranks call alike.

    rates: of the optimizer, which follow; None: its user's."""

    MOVED: ClassVar = 1.2  # times the noise scale by which was chosen, or a part: again; chosen
    PLANS: ClassVar = 3  # besides the one in force, whose steps are priced at all sizes; chosen
    STEPS: ClassVar = 100  # to come, at least, where nobody says how many; chosen

    def __init__(
        self, execution: Execution, loader: Loader, switch: Callable[[Plan], Moved],
        rates: ScaledRate | None, adapter: Callable[[], Adapter | None],
    ) -> None:  # fmt: skip
        self.loader, self.changes = loader, list[BatchChange]()
        self._execution, self._switch, self._rates = execution, switch, rates
        self._adapter = adapter
        self._base = execution.planning.rows
        self._sizes: list[int] = []  # to choose among; none: batches do not follow the noise
        self._priced: tuple[Any, dict[int, Candidate]] = (None, {})  # by profile and plan in force
        self._considered, self._measured = 0.0, 0  # the noise scale, and measurements of it

    # By the noise scale

    def choose(self, words: str) -> None:
        """From now on by goodput, among `auto` or `auto:MIN-MAX`. ValueError where it cannot be
        told."""
        among = BatchRange.parse(words)
        execution = self._execution
        step, options = execution.active.step, replace(execution.options, noise_scale=True)
        require_alike(execution.world.everyone, {"the batches to choose among": str(among)})
        if self._sizes:
            return  # asked for again
        why = unmeasurable(step, options, execution.model, execution.losses.several)
        if step.opaque:
            why = (
                why or f"no other batch has a known step, for the model runs whole: {step.reason}"
            )
        if options.carry is not None:
            why = why or "a carry goes from each row of a batch to the same row of the next"
        if why:
            raise ValueError(f"batch_size={str(among)!r}: {why}; give a number of rows")
        self._sizes = among.sizes(self._base, self.loader.samples)
        execution.options = options
        execution.noise.asked = True
        self.loader.chosen = True
        first = self.loader.cursor.batch_size or self._base  # of a resumed run, else
        self.loader.batch_size = min(max(first, self._sizes[0]), self._sizes[-1])
        execution.planning.rows = self.loader.batch_size

    def restart(self) -> None:
        """Steps come again, or another plan is in force: what was considered is forgotten."""
        self._considered, self._execution.planning.rows = 0.0, self.loader.batch_size

    def note(self, step: int, to_come: int) -> BatchChange | None:
        """At the end of a step. step: done; to_come: 0 where that is not known."""
        began, noise = time.perf_counter(), self._moved_noise()
        if noise is None:
            return None
        self._considered = noise
        here = self.loader.batch_size
        worth = self._worth(noise)
        best = max(worth, key=worth.__getitem__, default=here)
        best = self._execution.world.everyone.broadcast_json(best)
        if here in worth and worth[best] < (1 + LIMITS.gain) * worth[here]:
            return None
        reason = f"the noise scale is {noise:,.0f} rows"
        goodputs = worth.get(here), worth.get(best)
        return self._change(best, reason, step, to_come or max(self.STEPS, step), goodputs, began)

    def _moved_noise(self) -> float | None:
        """The noise scale, where there is one that is not about as it was considered."""
        meter = self._execution.noise
        if not self._sizes or meter.measured == self._measured:
            return None
        self._measured, scale = meter.measured, meter.scale()
        noise, last = None if scale is None else scale.known, self._considered
        if noise is None or (last and 1 / self.MOVED < noise / last < self.MOVED):
            return None
        return noise

    def _worth(self, noise: float) -> dict[int, float]:
        """GOODPUT of each size that fits. By curves of programs that were measured with fewer rows
        first: then the best one is measured, until it is the best by that, too."""
        here, plan = self.loader.batch_size, self._execution.plan
        if self._priced[0] != (self._profile, plan):
            self._priced = (self._profile, plan), {}
        found, measured = self._priced[1], {here}
        for rows in {*self._sizes, here} - found.keys():
            found[rows] = self._price(rows, measure=False)
        while True:
            seconds = {n: c.seconds for n, c in found.items() if c.fits and c.time}
            worth = {n: goodput(n / t, noise, n, self._base) for n, t in seconds.items()}
            best = max(worth, key=worth.__getitem__, default=here)
            if best in measured:
                return worth
            measured.add(best)
            found[best] = self._price(best)
            self._priced = (self._profile, plan), found

    def _price(self, rows: int, measure: bool = True) -> Candidate:
        """The quickest of some plans with batches of so many rows. measure: what is not known."""
        execution, known = self._execution, self._profile
        session = execution.planning.session(execution.active.step, rows)
        priced = list[Candidate]()
        for plan in dict.fromkeys((execution.plan, *self._others())):
            if measure or known is None:
                candidate, known = session.priced(plan, known)
            else:
                candidate = price(session.partitions, plan, known)
            priced.append(candidate)
        self._profile = known
        return quickest(priced)

    def _others(self) -> list[Plan]:
        """Those that were the quickest, where the plan may change."""
        adapter = self._adapter()
        predicted = {} if adapter is None else adapter.known.predicted
        return sorted(predicted, key=predicted.__getitem__)[: self.PLANS]

    @property
    def _profile(self) -> Profile | None:
        adapter = self._adapter()
        return self._execution.planning.profile if adapter is None else adapter.profile

    @_profile.setter
    def _profile(self, known: Profile | None) -> None:
        adapter = self._adapter()
        if adapter is None:
            self._execution.planning.profile = known
        elif known is not None:
            adapter.known.profile = known

    # As a schedule says

    def grow(self, wanted: int, step: int, reason: str) -> BatchChange | None:
        """Batches of `wanted` rows, or as many as memory and data allow; learning rates are
        divided by what is missing."""
        began, entire = time.perf_counter(), self.loader.samples
        rows = wanted if entire is None else min(wanted, entire)
        while rows > self.loader.batch_size and not self._price(rows).fits:
            rows = max(rows // 2, self.loader.batch_size)
        lowered = wanted / rows
        present = self._rates.lowered if self._rates else lowered
        if (rows, lowered) == (self.loader.batch_size, present):
            return None
        if lowered > 1.0:
            reason += f"; {wanted:,} rows do not fit, learning rates are divided by {lowered:.4g}"
        return self._change(rows, reason, step, self.STEPS, (None, None), began, lowered)

    # The change

    def _change(
        self, rows: int, reason: str, step: int, to_come: int,
        goodputs: tuple[float | None, float | None], began: float, lowered: float = 1.0,
    ) -> BatchChange:  # fmt: skip
        before, plan = self.loader.batch_size, self._execution.active.plan
        self.loader.batch_size = self._execution.planning.rows = rows
        if (adapter := self._adapter()) is not None:
            self._replan(adapter, max(1, to_come * before // rows))
        if self._rates is not None:
            self._rates.resize(rows, lowered)
        rate = float(self._execution.optimizer.param_groups[0]["lr"])
        after = str(self._execution.active.plan)
        seconds = time.perf_counter() - began
        change = BatchChange(
            step, before, rows, reason, *goodputs, rate, str(plan), after, seconds
        )  # fmt: skip
        self.changes.append(change)
        return change

    def _replan(self, adapter: Adapter, to_come: int) -> None:
        """Searches the plan of the batches that come, and switches where it is worth that."""
        execution, plan = self._execution, self._execution.plan
        session = execution.planning.session(execution.active.step)
        choice = session.reconsider(adapter.profile, plan)
        found = self._target(choice, plan, to_come)
        target = Plan.parse(execution.world.everyone.broadcast_json(str(found)))
        if target != plan:
            self._switch(target)
        adapter.replanned(choice, target)

    def _target(self, choice: Choice, plan: Plan, to_come: int) -> Plan:
        """The chosen plan, or the one in force where it fits and a move is not worth it."""
        best, execution = choice.chosen, self._execution
        stays = next((c for c in choice.candidates if c.plan == plan and c.fits), best)
        if stays is best or stays.time is None:
            return best.plan
        active, planning = execution.active, execution.planning
        run = LiveRun(planning.facts(active.step), plan, active.partition, self._switch)
        move = run.move(best.plan, choice.profile, stays.seconds)
        worth = weigh(stays.seconds, best.seconds, to_come, move).switch
        return best.plan if worth else plan
