"""A planning session: how a trainer's plan was found, and what its plans are predicted to take."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from synchromesh.cost.peak_memory import PeakMemory, held_bytes
from synchromesh.engine import batches, heap
from synchromesh.engine.groups import World
from synchromesh.launch.rank import forewarn
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice
from synchromesh.planner.decision.decide import survey, with_runners_up
from synchromesh.planner.headroom import RESERVE, Headroom
from synchromesh.planner.memory.shortage import Shortage
from synchromesh.planner.stages.cut import cut_plan
from synchromesh.planning import live
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_cache import Say
from synchromesh.programs.memory import process_bytes, storage_bytes
from synchromesh.programs.model import Model
from synchromesh.programs.optimizer import state_factor
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.values.holding import Holding
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

# A model that takes a smaller part of a device fits with the state of any optimizer. Chosen.
PLENTY = 8
# Bytes of a process for one of tensors, at most, where freed blocks stay on the heap: of an MLP
# with 4,096 rows under `tensor`; 2.8 of GPT-2 with 100 M parameters under `sharded-data`.
HOLES = 3.3
SELDOM = 8  # steps, until memory has been short; looking takes 20 to 45 us of a step
SHORT = 0.75  # of the memory that a rank may use; more is short. Chosen, not measured.


class PlanningSession:
    """What was measured, chosen and predicted for one model.

    rows: of the global batches that plans are made for.
    limits: bytes of tensors that each rank may hold, once `limit` was called; headrooms: what
    plans leave of them."""

    def __init__(
        self, model: Model, optimizer: Optimizer, example: Any, world: World,
        headroom: str | None, say: Say,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.world, self.say = model, optimizer, world, say
        self.headrooms, self._asked = list[Headroom](), headroom
        self.rows = batches.row_count(example)
        self.choice: Choice | None = None  # how the plan was found, where it was `auto`
        self.profile: Profile | None = None
        self._example = example
        self._choice_rows = self.rows  # that `choice` was made for
        self._facts: LiveFacts | None = None
        self.limits: tuple[float, ...] = ()
        self._forewarned: Plan | None = None
        self._share = live.memory_share(world)
        self._short = False  # whether this process has ever taken most of it

    def free_bytes(self) -> int:
        """Bytes that this rank may still use."""
        return live.free_bytes(self._share, self.world.device)

    def relieve(self, steps: int) -> None:
        """After so many steps: where this process has taken most of its memory, large tensors
        from now on come without holes, and what is free on the heap goes back to the system
        (`engine/heap.py`)."""
        if self.world.device.type != "cpu" or (not self._short and steps % SELDOM):
            return
        if process_bytes() > SHORT * self._share:
            self._short = True
            heap.keep_small()
            heap.release()

    def limit(self) -> None:
        """Notes what memory there is, while this process has no tensors but the model's and its
        optimizer's: others count as what planning may not use. All ranks call alike."""
        state = (x for s in self.optimizer.state.values() for x in s.values())
        tensors = (x for x in state if isinstance(x, Tensor))
        present = [*self.model.parameters.values(), *self.model.buffers.values(), *tensors]
        mine = self.free_bytes() + storage_bytes(x for x in present if not x.is_meta)
        self.limits = tuple(map(float, self.world.everyone.all_gather_json(mine)))
        reserve = RESERVE if self.world.device.type == "cpu" else 0
        self.headrooms = [Headroom.of(n, self._asked, reserve=reserve) for n in self.limits]

    def facts(self, step: Step) -> LiveFacts:
        """What a plan is wanted for; partitions that were solved for it are kept with it."""
        facts = self._facts
        if facts is None or facts.problem.step is not step or facts.problem.rows != self.rows:
            facts = self._facts = LiveFacts.of(
                self.world, self.model, step, self.optimizer, self._example, self.rows,
                self.headrooms,
            )  # fmt: skip
        return facts

    def solved(self, step: Step, plan: Plan) -> Partition | None:
        """The partition of `step` under `plan`, where a plan was searched for with it."""
        return None if self._facts is None else self._facts.solved(step, plan)

    def choose(self, step: Step) -> Plan:
        """The plan that is predicted to be best; measures what is not known yet."""
        self.choice = live.choose(self.facts(step), self.say)
        self._choice_rows = self.rows
        self.profile = self.choice.profile if self.choice.chosen.time else None
        return self.choice.chosen.plan

    def candidates(self) -> tuple[Candidate, ...]:
        """That the plan was chosen from, it first; none where it was given, or batches have
        another size since."""
        as_chosen = self.choice is not None and self.rows == self._choice_rows
        return self.choice.candidates if self.choice is not None and as_chosen else ()

    def cut(self, step: Step, plan: Plan) -> Plan:
        """`plan`, which leaves its cuts open, with stages of level work; measures the components
        under its layouts where that has not been done. ValueError where it has too many."""
        if plan.stage_count > len(step.chain.names):
            return cut_plan(step, plan, (), self.world.size)  # says so
        found = live.cut(self.facts(step), plan, self.profile, self.say)
        self.say(f"cut into stages that begin with {', '.join(s.first for s in found.stages)}")
        return found

    def predict(self, step: Step, plan: Plan, known: Profile | None) -> Candidate:
        """What `plan` is predicted to take; measures what is neither in `known` (else in
        this session's profile) nor among the profiles that are kept."""
        chosen = None if self.choice is None else self.choice.chosen
        as_chosen = self.rows == self._choice_rows
        if as_chosen and chosen and chosen.time is not None and chosen.plan == plan:
            return chosen
        known = self.profile if known is None else known
        found, self.profile = live.predict(self.facts(step), plan, known, self.say)
        if found.memory:
            self._forewarn(found)
        return found

    def check_held(self, plan: Plan, holdings: Mapping[str, Holding]) -> None:
        """Warns before anything is placed where parameters, gradients and optimizer state alone
        take more memory than there is. All ranks call alike."""
        if self.choice and self.choice.chosen.memory and self.choice.chosen.plan == plan:
            return self._forewarn(self.choice.chosen)
        ranks = plan.devices(self.world.size)
        held = [[h for h in holdings.values() if p in h.positions] for p in range(len(ranks))]
        least = (sum(held_bytes(h, 0.0, ()).values()) for h in held)
        tight = any(PLENTY * n > self.limits[r] for n, r in zip(least, ranks, strict=True))
        factor = self._state_factor() if tight else 0.0
        bytes_ = (round(sum(held_bytes(h, factor, h).values())) for h in held)
        self._forewarn(Candidate(plan, None, tuple(PeakMemory(n, n) for n in bytes_), True, ""))

    def _state_factor(self) -> float:
        """Bytes of optimizer state for a byte of a parameter."""
        dtypes = [p.dtype for group in self.optimizer.param_groups for p in group["params"]]
        try:
            return state_factor(self.optimizer, self.world.device, dtypes[0])
        except Exception:  # of the user's optimizer, whose own step will say it
            return 0.0

    def _forewarn(self, candidate: Candidate) -> None:
        """Says once of a plan that it will not fit, and leaves that for the launcher; where it
        comes near to that, large tensors come without holes."""
        most = max((m.peak for m in candidate.memory), default=0)
        if self.world.device.type == "cpu" and HOLES * most > min(self.limits):
            heap.keep_small()
        if self.world.rank:
            return
        given = self.choice is None or self.choice.chosen.plan != candidate.plan
        shortage = Shortage.of(candidate, self.limits, self.rows, given)
        forewarn(shortage.clause if shortage else "")
        if shortage and self._forewarned != candidate.plan:
            self._forewarned = candidate.plan
            warnings.warn(str(shortage), stacklevel=4)
        elif candidate.memory and not (shortage or candidate.fits):
            self.say(f"the plan {str(candidate.plan)!r} fits, but {candidate.reason}")

    def explained(self, step: Step) -> Choice | None:
        """`choice` with what each component's next best layout would cost."""
        choice = self.choice
        if choice is not None and choice.chosen.time is not None and not choice.components:
            self.choice = with_runners_up(self.facts(step).partitions, choice)
        return self.choice

    def surveyed(self, step: Step) -> Profile:
        """The profile of all layouts; measures them where the plan was given."""
        if self.choice is None or self.profile is None:
            self.say("measuring the other layouts, to know what there is to change to ...")
            facts = self.facts(step)
            self.profile = survey(facts.partitions, facts, self.profile)
        return self.profile
