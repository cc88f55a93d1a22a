"""Plans to a target: what each takes, the frontier of time against money, the choice."""

from dataclasses import dataclass
from math import inf
from typing import Any

from synchromesh.cost.efficiency import ToTarget, document
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class TargetPlan:
    """The quickest plan of a cluster and a batch size, and what it takes to the target."""

    cluster: str
    batch: int
    plan: Plan
    until: ToTarget

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds, and dollars: infinite where no price is known, so that they dominate none."""
        return self.until.seconds, inf if self.until.dollars is None else self.until.dollars

    def to_dict(self) -> dict[str, Any]:
        plan = {"cluster": self.cluster, "batch": self.batch, "plan": str(self.plan)}
        return plan | document(self.until)


@dataclass(frozen=True)
class PlannedToTarget:
    """The plans that were found; misfits: which batches fit no plan where, and why. The choice
    among them is `by_money` or by time, and within a deadline in seconds."""

    plans: tuple[TargetPlan, ...]
    misfits: tuple[str, ...] = ()
    by_money: bool = False
    deadline: float = inf

    @property
    def frontier(self) -> tuple[TargetPlan, ...]:
        """The plans that none dominates, the quickest first."""
        kept: list[TargetPlan] = []
        for plan in sorted(self.plans, key=lambda p: p.cost):
            if not kept or plan.cost[1] < kept[-1].cost[1]:
                kept.append(plan)
        return tuple(kept)

    @property
    def candidates(self) -> list[TargetPlan]:
        """Those of the frontier that can be chosen at all: by money, with a price."""
        return [p for p in self.frontier if not self.by_money or p.cost[1] < inf]

    @property
    def chosen(self) -> TargetPlan | None:
        """The quickest, or cheapest, candidate within the deadline; None: there is none."""
        found = [p for p in self.candidates if p.cost[0] <= self.deadline]
        return found[-1 if self.by_money else 0] if found else None

    @property
    def plan(self) -> Plan:
        """The chosen one, where there is one."""
        assert self.chosen is not None, self.refusal
        return self.chosen.plan

    @property
    def refusal(self) -> str:
        """Why there is none; nothing where there is one."""
        if self.chosen or not self.candidates:
            return "" if self.chosen else "; ".join(self.misfits)
        p, (seconds, dollars) = self.candidates[0], self.candidates[0].cost
        return (
            f"nothing reaches the target within {self.deadline:,.4g} s: the quickest, {p.plan} on "
            f"{p.cluster} in batches of {p.batch:,}, takes {seconds:,.4g} s and ${dollars:,.4g}"
        ).removesuffix(" and $inf")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        return {
            "for": "money" if self.by_money else "time",
            "deadline_seconds": self.deadline if self.deadline < inf else None,
            "frontier": [p.to_dict() for p in self.frontier], "misfits": list(self.misfits),
            "chosen": self.chosen and self.chosen.to_dict(), "refusal": self.refusal,
        }  # fmt: skip
