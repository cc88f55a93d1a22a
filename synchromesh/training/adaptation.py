"""An adaptation: how the plan of a trainer, and its batches, change while it trains.

Each rank's cost of a step travels with the rows of the next one, so that all ranks get to know
the same table; costs of steps that say nothing of the plan (short batches, trials) are zero."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

from synchromesh.adapt import decision
from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import Decision
from synchromesh.adapt.live_run import LiveRun
from synchromesh.checkpoint.switch import Moved
from synchromesh.data.loader import Loader
from synchromesh.planner.candidate import Candidate
from synchromesh.training.batch_sizes import BatchChange, BatchSizes
from synchromesh.training.execution import Execution
from synchromesh.training.learning_rate import ScaledRate
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

NO_COST = (0, 0)


class Adaptation:
    """Switches plans where what steps take says so; from `begin` on. All ranks call alike.

    cost: microseconds computing and waiting of the last step here, as all ranks are to know it
    with the next one."""

    # when plans are made for another size of batches; chosen
    MOST: ClassVar = 8  # of the last batches that must have the other size ...
    LAST: ClassVar = 12  # ... of so many; both grow with each change

    def __init__(self, execution: Execution, switch: Callable[[Plan], Moved]) -> None:
        self._execution, self._switch = execution, switch
        self.adapter: Adapter | None = None
        self._earlier: list[Decision] = []  # of other ranks' times
        self.batches: BatchSizes | None = None
        self.cost: tuple[int, ...] = NO_COST
        self._sizes: deque[int] = deque(maxlen=self.LAST)  # of the last global batches
        self._costs: list[tuple[int, int]] = []  # of steps that count together, under `local:H`
        # for which plans were looked for last; 0: by ranks that this one was not among
        self._ranks = 0 if execution.world.alone else execution.world.size

    def begin(self, predict: Callable[[], Candidate]) -> None:
        """Measures what is not known first. predict: the plan in force, if it was not chosen."""
        planning = self._execution.planning
        profile = planning.surveyed(self._execution.active.step)
        known = planning.candidates() or (predict(),)
        apart = self._execution.active.plan.sync.asynchronous  # no step is all ranks'
        candidates = [c for c in known if not (apart or c.plan.sync.asynchronous)]
        self._earlier = self.decisions
        self.adapter = Adapter(profile, candidates, time.monotonic())
        self._sizes = deque(maxlen=self.LAST)
        self._forget_costs()
        counts = self._execution.world.everyone.all_gather_json(self._ranks)
        self._ranks, before = self._execution.world.size, max(counts)
        if {*counts} == {self._ranks}:
            return self.prepare()
        others = f"{before} before" if before != self._ranks else "not those of before"
        self.adapter.reconsider(f"the run has {self._ranks} ranks, {others}", sampled=True)

    @property
    def profile(self) -> Profile | None:
        """What is known of the ranks that there are."""
        return self.adapter.profile if self.adapter else self._execution.planning.profile

    def prepare(self) -> None:
        """Plans for other ranks, by what is known of these, where this one may change, or was
        chosen; all call alike."""
        execution, known, own = self._execution, self.profile, self._execution.world.member
        if own is None:  # as each step of a run that is not elastic asks
            return
        plan, world = execution.plan, execution.world
        # a loss ends runs on GPUs; of one rank no link is known
        possible = plan.usual and world.size > 1 and world.backend == "gloo"
        if possible and known and (self.adapter or execution.planning.choice):
            step, gain = execution.active.step, decision.LIMITS.gain
            follow = self.batches is not None and self.batches.of_ranks
            execution.planning.prepare(step, known, own.hosts, plan, gain, follow)

    @property
    def decisions(self) -> list[Decision]:
        """All so far."""
        return self._earlier + ([] if self.adapter is None else self.adapter.decisions)

    @property
    def known(self) -> list[Plan]:
        """What is exact, fits these ranks and has a prediction, the best first."""
        planned = self._execution.planning.candidates()
        known = planned if self.adapter is None else self.adapter.known.candidates
        return [c.plan for c in known if c.fits and c.time is not None and c.plan.exact]

    @property
    def trying(self) -> bool:
        """Whether plans are run for some steps each, to know what they take."""
        return self.adapter is not None and self.adapter.phase.trying

    def collect(self, costs: Sequence[tuple[int, ...]]) -> Decision | None:
        """costs: of the last step, by rank. The last switch, once its effect is known."""
        self.cost = NO_COST
        if self.adapter is None:
            return None
        ranks = self._execution.active.groups.ranks
        table = [costs[r] for r in ranks]
        return self.adapter.record(table, ranks) if all(sum(c) > 0 for c in table) else None

    def note(
        self, seconds: float, waited: float, rows: int, steps: int, to_come: int
    ) -> Decision | None:
        """Notes what a step on `rows` global rows took, of which it waited a part for other
        ranks; the adapter acts on a drift. steps: done; to_come: 0 where that is not known."""
        adapter, active = self.adapter, self._execution.active
        planning, pieces = self._execution.planning, self._execution.pieces
        if adapter is None or self._execution.nothing_to_adapt:  # which a switch has asked for
            return None
        if self._resized(rows, planning.rows):
            adapter.reconsider(f"global batches have {rows} rows, {planning.rows} before")
            planning.rows = rows
        cut = self._execution.noise.cut  # not what a step of the plan takes
        if rows == planning.rows and pieces.chosen is not None and not cut:
            waited = min(waited, seconds)  # a wait may end after the clock was read
            self._costs.append((int((seconds - waited) * 1e6), int(waited * 1e6)))
            if len(self._costs) >= active.plan.sync.steps:  # of which one step has the mean
                self.cost = tuple(
                    sum(c) // len(self._costs) for c in zip(*self._costs, strict=True)
                )
                self._costs = []
        plan, facts = self._execution.plan, planning.facts(active.step)
        run = LiveRun(facts, plan, active.partition, self._switch)
        return self._acted(adapter.act(run, steps, to_come))

    def _acted(self, made: Decision | None) -> Decision | None:
        """Behind a decision: costs may be of a plan that is gone, and prepared plans, too."""
        if made is not None and made.measuring_seconds:
            self._forget_costs()
        outdated = made and (made.measuring_seconds or (made.switched and not self.trying))
        if outdated or not (self._awaited or self._execution.planning.prepared.current):
            self.prepare()
        return made

    @property
    def _awaited(self) -> bool:
        """Whether a decision on what was noticed is to come at once."""
        phase = None if self.adapter is None else self.adapter.phase
        return phase is not None and phase.waiting is not None and not phase.reported

    def sizes(self, loader: Loader, rates: object) -> BatchSizes:
        """That change the batches of `loader`, the only one; rates: the trainer's scheduler."""
        if self.batches is None:
            scaled = rates if isinstance(rates, ScaledRate) else None
            self.batches = BatchSizes(
                self._execution, loader, self._switch, scaled, lambda: self.adapter
            )
        if self.batches.loader is not loader:
            raise ValueError(
                "batches of one loader change while training, and these are another's"
            )
        return self.batches

    def resize(self, steps: int, to_come: int) -> BatchChange | None:
        """Behind `note`: batches of another size, where the noise scale says so."""
        change = None if self.batches is None else self.batches.note(steps, to_come)
        if change is not None:
            self._forget_costs()
        return change

    def _resized(self, rows: int, planned: int) -> bool:
        """Whether plans should be made for global batches of `rows` rows, which the last one had,
        instead of `planned`: most of the last ones have had them. Each time more of them must, so
        that sizes that take turns are not followed for ever."""
        sizes = self._sizes
        sizes.append(rows)
        times = (sizes.maxlen or self.LAST) // self.LAST
        if rows == planned or sizes.count(rows) < self.MOST * times:
            return False
        self._sizes = deque(maxlen=2 * times * self.LAST)
        return True

    @property
    def events(self) -> int:
        """Decisions and changes of batches so far."""
        return len(self.decisions) + (0 if self.batches is None else len(self.batches.changes))

    def resume(self) -> None:
        """A checkpoint's state is in force: steps may have gone back."""
        if self.batches is not None:
            self.batches.resume()
        self.restart()

    def end(self) -> None:
        """What is known is of the ranks before."""
        self._earlier, self.adapter = self.decisions, None
        if self.batches is not None:
            self.batches.regroup()
        self._forget_costs()

    def _forget_costs(self) -> None:
        self.cost, self._costs = NO_COST, []

    def restart(self) -> None:
        """Forgets what was noted of a plan that is gone, or of steps that come again."""
        self._forget_costs()
        if self.adapter is not None:
            self.adapter.restart(self._execution.active.plan)
