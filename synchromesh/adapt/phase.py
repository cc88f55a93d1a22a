"""The phase of an adapter: which plans are tried, and what was noticed that still waits.

trying      plans that are predicted to be about as quick, some steps each (trials.py)
watching    the plan in force
postponed   the same, while what was noticed waits, of which measuring would take more than
            its share of the run; plans are tried, anew

from         what happens                                            to
trying       the quickest is known (`Trials.over`)                   watching
any          measured again, and conditions have changed             trying, else watching
any          measuring takes too much, or batches are resized        postponed
trying       the same, of a prediction that was wrong                trying
postponed    something more is noticed, or measuring takes too much  postponed
postponed    somebody else switches                                  watching"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from synchromesh.adapt.monitor import Drift
from synchromesh.adapt.trials import Trials
from synchromesh.planner.candidate import Candidate
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class Phase:
    """What is tried, and what waits until the step `until`; transitions return what follows."""

    trials: Trials = field(default_factory=lambda: Trials(()))
    waiting: Drift | None = None
    until: int = 0

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> "Phase":
        """Those that are near the first one, the plan in force, are tried; none: watching."""
        return cls(Trials(candidates))

    @property
    def trying(self) -> bool:
        """Whether plans are run for some steps each, postponed or not."""
        return not self.trials.over

    @property
    def reported(self) -> bool:
        return self.waiting is not None and self.until > 0

    def doubts(self, drift: Drift) -> bool:
        """Whether a wrong prediction is likelier than a change: plans are being tried."""
        return self.waiting is None and self.trying and drift.source == "predicted"

    def due(self, step: int) -> Drift | None:
        return self.waiting if step >= self.until else None

    def joined(self, drift: Drift, plan: Plan) -> "Phase":
        """Something more is noticed while something waits."""
        return replace(self._anew(plan), waiting=drift.joined(self.waiting), until=self.until)

    def postponed(self, drift: Drift, until: int, plan: Plan) -> "Phase":
        """Measuring takes too much now; `plan` is in force. What waits already is asked again."""
        if self.waiting is not None:
            return replace(self, until=until)
        return replace(self._anew(plan), waiting=drift, until=until)

    def restarted(self) -> "Phase":
        """Another plan is in force: what was noticed before says nothing of it."""
        return self if self.waiting is None else Phase()

    def _anew(self, plan: Plan) -> "Phase":
        """Trials of a time after a change, where those before it had not come to an end."""
        return Phase.of(self.trials.left(plan))
