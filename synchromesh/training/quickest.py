"""The quickest of several plans, by what they are predicted to take."""

from collections.abc import Sequence

from synchromesh.planner.candidate import Candidate
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan


def quickest(trainer: Trainer, plans: Sequence[Plan | str]) -> Candidate:
    """The candidate of least predicted time among those that fit the devices; measures what is
    not known yet, so all ranks call alike. ValueError, with each plan's reason, where none can
    run."""
    found, faults = list[Candidate](), list[str]()
    for asked in plans:
        plan = Plan.parse(asked) if isinstance(asked, str) else asked
        try:
            if plan.open_cuts:
                plan = trainer.planning.cut(trainer.traced, plan)
            candidate = trainer.planning.predict(trainer.traced, plan, None)
        except ValueError as error:
            faults.append(f"{asked}: {error}")
            continue
        found.append(candidate)
        if not candidate.fits or candidate.time is None:
            faults.append(f"{asked}: {candidate.reason}")
    fitting = [c for c in found if c.fits and c.time is not None]
    if not fitting:
        raise ValueError(f"none of these plans can run: {'; '.join(faults)}")
    return min(fitting, key=lambda c: c.seconds)
