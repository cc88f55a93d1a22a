"""Global batches that change while training, with the plan and the learning rate.

    GOODPUT(B)  =  B / T(B) x EFFICIENCY(B)         T(B): predicted seconds of a step of B rows

(cost/efficiency.py; Qiao et al. 2021, "Pollux", OSDI.) Whenever the noise scale was measured, the
batch of most goodput is taken if that is worth the change: a larger one by the low end of what the
noise scale may be, a smaller one by its high end, so that little is done while little is known.
It stays for as many steps as were done before. T is that of the quickest plan that fits, of the
one in force and, where the plan may change, of those that it was chosen from. The adapter looks
for further ones once batches have changed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any, ClassVar, cast

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import LIMITS, weigh
from synchromesh.adapt.live_run import LiveRun
from synchromesh.checkpoint.switch import Moved
from synchromesh.cost.efficiency import goodput
from synchromesh.data.loader import Loader
from synchromesh.engine.agreement import require_alike
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planning.session import quickest
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.training.active_plan import unmeasurable
from synchromesh.training.execution import Execution
from synchromesh.training.learning_rate import ScaledRate
from synchromesh.values.batch_sizes import BatchRange
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class BatchChange:
    """Batches have other rows from the step after `step` on, and why. goodput: predicted, in rows
    a second that are worth those of the first batch; None where it did not decide."""

    step: int
    before: int
    after: int
    reason: str
    goodput_before: float | None = None
    goodput_after: float | None = None
    learning_rate: float = 0.0  # of the optimizer's first group
    plan_from: str = ""
    plan_to: str = ""
    seconds: float = 0.0  # of pricing and moving

    def to_dict(self) -> dict[str, Any]:
        """As the log and `train --json` have it."""
        values = asdict(self)
        return {"from": values.pop("before"), "to": values.pop("after"), **values}


@dataclass
class _Prices:
    """The quickest of some plans for batches of so many rows each, as a profile tells."""

    profile: Profile | None
    plans: frozenset[Plan]
    of: dict[int, Candidate] = field(default_factory=dict)
    measured: set[int] = field(default_factory=set)  # rows of which nothing is extrapolated


class BatchSizes:
    """Changes the batches of one loader between steps. All ranks call alike.

    rates: of the optimizer, which follow; None: its user's."""

    ERRORS: ClassVar = 1.0  # standard errors between which a noise scale is thought to lie; chosen
    STEPS: ClassVar = 100  # to come, at least, where nobody says how many; chosen

    def __init__(
        self, execution: Execution, loader: Loader, switch: Callable[[Plan], Moved],
        rates: ScaledRate | None, adapter: Callable[[], Adapter | None],
    ) -> None:  # fmt: skip
        """ValueError where batches have to stay as they are."""
        if execution.options.carry is not None:
            raise ValueError(
                "batches cannot change where a carry goes from each row of one to the same row of "
                "the next: give a number of rows, and no schedule of batches"
            )
        self.loader, self.changes = loader, list[BatchChange]()
        self._execution, self._switch, self._rates = execution, switch, rates
        self._adapter = adapter
        self._base = execution.planning.rows
        self.of_ranks = False  # each keeps its rows
        self._sizes: list[int] = []  # to choose among; none: batches do not follow the noise
        self._prices: _Prices | None = None
        self._of_step: LiveFacts | None = None
        self._measured = 0  # steps whose noise was considered
        self._next = 0  # the step from which on batches may change again
        self._likely: list[Plan] = []

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
        why = unmeasurable(
            step, options, execution.model, execution.losses.several, execution.plan
        )
        if step.opaque:
            why = (
                why or f"no other batch has a known step, for the model runs whole: {step.reason}"
            )
        if why:
            raise ValueError(f"batch_size={str(among)!r}: {why}; give a number of rows")
        self._sizes = among.sizes(self._base, self.loader.samples)
        if self.loader.stream:  # of whose blocks each has a row at least
            most = self._sizes[-1]
            self._sizes = [n for n in self._sizes if n >= execution.world.size] or [most]
        execution.options = options
        execution.noise.follow(not execution.model.statistics)  # norms would see other rows
        self.loader.chosen = True
        self.loader.batch_size = self.loader.cursor.batch_size or self._base  # of a resumed run
        self.resume()

    def resume(self) -> None:
        """Goes on with the batch that the loader has, of a checkpoint maybe, as far as its size is
        one to choose."""
        loader, rates, self._next = self.loader, self._rates, 0
        if self._sizes:
            loader.batch_size = min(max(loader.batch_size, self._sizes[0]), self._sizes[-1])
        self._execution.planning.rows = loader.batch_size
        if rates is not None:
            rates.resize(loader.batch_size, rates.lowered)

    def regroup(self) -> None:
        """What was predicted is of the ranks before."""
        self._of_step = self._prices = None
        self._likely = []

    def note(self, step: int, to_come: int) -> BatchChange | None:
        """At the end of a step. step: done; to_come: 0 where that is not known."""
        began, meter = time.perf_counter(), self._execution.noise
        if not self._sizes or meter.measured == self._measured or step < self._next:
            return None
        self._measured = meter.measured
        for noise, larger in zip(meter.between(self.ERRORS) or (), (True, False), strict=False):
            change = self._better(noise, larger, step)
            if change is not None:
                return self._change(change, to_come or max(self.STEPS, step), began)
        return None

    def _better(self, noise: float, larger: bool, step: int) -> BatchChange | None:
        """The batch of most goodput, where it is larger, or smaller, and worth the change."""
        worth, here = self._worth(noise), self.loader.batch_size
        best = max(worth, key=worth.__getitem__, default=here)
        gain = worth[best] / worth[here] - 1 if here in worth else inf
        if best == here or (best > here) != larger or gain < LIMITS.gain:
            return None
        known = f"the noise scale is {noise:,.0f} rows or {'more' if larger else 'less'}"
        return BatchChange(step, here, best, known, worth.get(here), worth[best])

    def _worth(self, noise: float) -> dict[int, float]:
        """GOODPUT of each size that fits. By curves of programs that were measured with fewer rows
        first: then the best one is measured, until it is the best by that, too."""
        here, prices = self.loader.batch_size, self._known_prices()
        while True:
            seconds = {n: c.seconds for n, c in prices.of.items() if c.fits and c.time}
            worth = {n: goodput(n / t, noise, n, self._base) for n, t in seconds.items()}
            best = max(worth, key=worth.__getitem__, default=here)
            if best == here or best in prices.measured:
                return worth
            prices.measured.add(best)
            prices.of[best] = self._price(best, prices.of[best].plan)
            prices.profile = self._profile

    def _known_prices(self) -> "_Prices":
        """Of all sizes: those of before, unless the plans have changed or were measured anew."""
        plans, here = self._plans(), self.loader.batch_size
        if self._profile is None:
            self._measure(plans, here)
        known = self._prices
        if known is None or known.profile is not self._profile or known.plans != {*plans}:
            known = self._prices = _Prices(self._profile, frozenset(plans))
        known.of |= self._predicted([n for n in {*self._sizes, here} if n not in known.of], plans)
        return known

    def _predicted(self, sizes: Sequence[int], plans: Sequence[Plan]) -> dict[int, Candidate]:
        """The quickest plan for batches of so many rows each, by what is known. Each rank prices
        some of the plans: 45 prices of a small model took 2 s on 40 % of a core."""
        everyone, known = self._execution.world.everyone, cast(Profile, self._profile)
        own = plans[everyone.index :: everyone.size]
        found = [[price(self._facts.partitions, p, known, rows=n) for p in own] for n in sizes]
        records = [[candidate.to_record() for candidate in of_size] for of_size in found]
        told = everyone.all_gather_json(records) if sizes else []
        return {
            n: quickest(Candidate.from_record(x) for of_rank in told for x in of_rank[i])
            for i, n in enumerate(sizes)
        }

    def _price(self, rows: int, likely: Plan | None = None) -> Candidate:
        """The quickest plan with batches of so many rows, of the one in force and of `likely`,
        which are measured. None: the quickest by what is known."""
        plans = self._plans()
        if self._profile is not None:
            plans = [plans[0], likely or self._predicted([rows], plans)[rows].plan]
        self._measure(plans, rows)
        known = cast(Profile, self._profile)
        return quickest(
            price(self._facts.partitions, plan, known, rows=rows) for plan in dict.fromkeys(plans)
        )

    def _measure(self, plans: Sequence[Plan], rows: int) -> None:
        facts, counts = self._facts, {plan.micro_batches for plan in plans}
        for plan in dict.fromkeys(plans):
            self._profile = facts.profile(
                facts.partitions.possible([plan]), self._profile, facts.problem.ranks(plan),
                rows=rows, quick=True, micro_batches=counts,
            )  # fmt: skip

    @property
    def _facts(self) -> LiveFacts:
        """Those of the step with the partitions that were solved for it, whatever rows batches
        have since."""
        step = self._execution.active.step
        if self._of_step is None or self._of_step.problem.step is not step:
            self._of_step = self._execution.planning.facts(step)
        return self._of_step

    def _plans(self) -> list[Plan]:
        """The one in force, and those that the adapter has prices of, where it may change."""
        adapter, plan = self._adapter(), self._execution.plan
        if adapter is not None and adapter.known.predicted:
            self._likely = [*adapter.known.predicted]
        return [*dict.fromkeys([plan, *self._likely])] if plan.usual else [plan]

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
        while rows > self.loader.batch_size and self._lacks(rows):
            rows = max(rows // 2, self.loader.batch_size)
        lowered, rates, here = wanted / rows, self._rates, self.loader.batch_size
        if rows == here and (rates is None or (rates.batch, rates.lowered) == (rows, lowered)):
            return None
        if lowered > 1.0:
            reason += f"; {wanted:,} rows do not fit, learning rates are divided by {lowered:.4g}"
        return self._change(BatchChange(step, here, rows, reason), self.STEPS, began, lowered)

    def _lacks(self, rows: int) -> bool:
        """Whether no plan has the memory for so many rows, as far as that is known."""
        if self._execution.active.step.opaque:
            return False
        candidate = self._price(rows)
        return candidate.time is not None and not candidate.fits

    # As many as there are ranks

    def follow(self, rows: int, step: int, reason: str) -> BatchChange | None:
        """Batches of so many rows, of which no rank has more than before."""
        self.of_ranks = self.loader.chosen = True
        here, began = self.loader.batch_size, time.perf_counter()
        rows = max(1, min(rows, self.loader.samples or rows))
        if rows == here:
            self.resume()  # this rank may have come
            return None
        return self._change(BatchChange(step, here, rows, reason), self.STEPS, began)

    # The change

    def _change(
        self, asked: BatchChange, to_come: int, began: float, lowered: float = 1.0
    ) -> BatchChange:  # fmt: skip
        """As asked, with the plan that is worth it; what it has come to."""
        execution, rows = self._execution, asked.after
        plan, adapter = execution.plan, self._adapter() if rows != asked.before else None
        before, taken = str(execution.active.plan), plan
        if adapter is not None:
            to_come = max(1, to_come * asked.before // rows)
            taken = self._taken(rows, to_come)
        self.loader.batch_size = execution.planning.rows = rows
        if taken != plan:
            self._switch(taken)
        self._next = 2 * asked.step  # so that sizes do not take turns for ever
        if adapter is not None:
            # looks for more plans when that may take its time
            adapter.reconsider(f"global batches have {rows} rows, {asked.before} before")
        if self._rates is not None:
            self._rates.resize(rows, lowered)
        rate = float(execution.optimizer.param_groups[0]["lr"])
        seconds = time.perf_counter() - began
        made = replace(
            asked, learning_rate=rate, plan_from=before, plan_to=str(execution.active.plan),
            seconds=seconds,
        )  # fmt: skip
        self.changes.append(made)
        return made

    def _taken(self, rows: int, to_come: int) -> Plan:
        """The quickest plan that is known for such batches, or the one in force where it fits and
        a move is not worth it."""
        execution, prices, facts = self._execution, self._prices, self._facts
        known, plan = cast(Profile, self._profile), execution.plan
        stays = price(facts.partitions, plan, known, rows=rows)
        if prices is not None and rows in prices.of and prices.profile is known:
            best = prices.of[rows]
        else:
            best = self._predicted([rows], self._plans())[rows]
        target = best.plan if best.fits and best.time is not None else plan
        if stays.fits and stays.time is not None:
            run = LiveRun(facts, plan, execution.active.partition, self._switch)
            move = run.move(best.plan, known, stays.seconds)
            if not weigh(stays.seconds, best.seconds, to_come, move).switch:
                target = plan
        return Plan.parse(execution.world.everyone.broadcast_json(str(target)))
