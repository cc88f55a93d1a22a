"""What was simulated: plans on a cluster, failures and money beside them, and their scaling."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.cost.efficiency import Goal, ToTarget, document
from synchromesh.simulator.asynchronous import WorkersWalk
from synchromesh.simulator.failures import FailureOutcome
from synchromesh.simulator.step import SimulatedStep
from synchromesh.values.cluster import Cluster
from synchromesh.values.plan import Plan
from synchromesh.values.size import readable


@dataclass(frozen=True)
class Failing:
    """What comes of days with failures, on average over seeds. interval: of checkpoints. writing,
    down: seconds of one, and from a failure until steps run."""

    mean_between: float  # seconds
    interval: float
    best_interval: float
    outcomes: tuple[FailureOutcome, ...]
    writing: float
    down: float

    @property
    def useful_share(self) -> float:
        return mean(o.useful_share for o in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Its keys are interface; seconds that are infinite are None."""
        return {
            "mean_seconds_between": _finite(self.mean_between),
            "useful_share": self.useful_share,
            "lost_seconds": mean(o.lost for o in self.outcomes),
            "writing_seconds": mean(o.writing for o in self.outcomes),
            "down_seconds": mean(o.down for o in self.outcomes),
            "waiting_seconds": mean(o.waiting for o in self.outcomes),
            "restarts": mean(o.restarts for o in self.outcomes),
            "checkpoint_seconds": _finite(self.interval),
            "best_checkpoint_seconds": _finite(self.best_interval),
            "checkpoint_writing_seconds": self.writing, "recovery_seconds": self.down,
            "days": self.outcomes[0].seconds / 86_400, "seeds": len(self.outcomes),
        }  # fmt: skip


def _finite(seconds: float) -> float | None:
    return seconds if seconds < float("inf") else None


@dataclass(frozen=True)
class State:
    """Bytes of parameters, buffers and the optimizer's states: the `whole` that a checkpoint has,
    and what is `held` by the device that has most. kept: whether each piece is on two hosts."""

    whole: float = 0.0
    held: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan on all devices; `step` is None where it cannot run, for the `reason`."""

    plan: Plan
    rows: int
    step: SimulatedStep | None
    memory: tuple[float, ...] = ()  # bytes at the peak, of each device that takes part
    fits: bool = True
    reason: str = ""
    state: State = State()
    dollars: float | None = None  # of a step on demand
    spot: float | None = None  # ... and at a price that is not
    failures: Failing | None = None
    until: ToTarget | None = None

    @property
    def samples_per_second(self) -> float:
        """With failures, of the share of time that is useful."""
        if self.step is None:
            return 0.0
        useful = self.failures.useful_share if self.failures else 1.0
        return useful * self.rows / self.step.seconds

    @property
    def workers(self) -> WorkersWalk | None:
        """Those that go on without each other, if the plan has such."""
        return self.step.workers if self.step else None

    @property
    def samples_per_second_apart(self) -> float | None:
        """Of such workers, while all are under way."""
        return self.samples_per_second * self.workers.gain if self.workers else None

    def useful(self, dollars: float | None) -> float | None:
        """The same of a step with its share of what failures waste; None: not known, or all is."""
        share = self.failures.useful_share if self.failures else 0.0
        return dollars / share if dollars is not None and share else None

    def to_dict(self) -> dict[str, Any]:
        step = self.step
        return {
            "plan": str(self.plan), "step_seconds": step and step.seconds,
            "step_seconds_quantiles": step.quantiles if step else {},
            "samples_per_second": self.samples_per_second,
            "memory_bytes": list(self.memory), "state_bytes": self.state.whole,
            "fits": self.fits, "reason": self.reason,
            "shares": step.shares if step else {}, "dollars_per_step": self.dollars,
            "dollars_per_step_spot": self.spot,
            "dollars_per_useful_step": self.useful(self.dollars),
            "dollars_per_useful_step_spot": self.useful(self.spot),
            "failures": self.failures and self.failures.to_dict(),
            "to_target": self.until and document(self.until),
            "samples_per_second_apart": self.samples_per_second_apart,
            **(self.workers.to_dict() if self.workers else WorkersWalk.NOTHING),
        }  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """A plan on so many devices, which was `asked` for. alone: seconds of the same rows on one
    device, over `devices`. parts: of T_comm, each less an Nth of the same on one device:

    T_N  =  T_1 / N + T_comm"""

    asked: str
    plan: str
    devices: int
    rows: int
    seconds: float  # T_N
    alone: float  # T_1 / N
    parts: Mapping[str, float]

    @property
    def speedup(self) -> float:
        """T_1 / T_N."""
        return self.devices * self.alone / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan, "devices": self.devices, "rows": self.rows, "T_N": self.seconds,
            "T_1_over_N": self.alone, "T_comm": self.seconds - self.alone,
            "speedup": self.speedup, "efficiency": self.speedup / self.devices,
            "asked": self.asked, "T_comm_parts": dict(self.parts),
        }  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """`table()` for people, `to_dict()` for programs; what goes on in a step is in its `step`."""

    workload: str
    cluster: Cluster
    source: str
    error_band: float
    plans: tuple[SimulatedPlan, ...]
    names: tuple[str, ...]  # of the components
    seconds: float  # that simulating took
    scaling: tuple[Scale, ...] = ()
    price: HourlyPrice | None = None  # on demand
    spot: HourlyPrice | None = None
    goal: Goal | None = None

    @property
    def prices(self) -> dict[str, HourlyPrice]:
        """Those that are known, by kind."""
        known = {"on demand": self.price, "spot": self.spot}
        return {kind: price for kind, price in known.items() if price}

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        spans = [p.step.recorded.groups for p in self.plans if p.step]
        return {
            "workload": self.workload, "cluster": self.cluster.name,
            "devices": len(self.cluster.ranks), "source": self.source,
            "error_band": self.error_band, "emulated": self.cluster.emulated,
            "plans": [p.to_dict() for p in self.plans],
            "scaling": [s.to_dict() for s in self.scaling],
            "events": sum(len(group) for groups in spans for group in groups),
            "seconds": self.seconds, "price": self.price and self.price.to_dict("on demand"),
            "spot_price": self.spot and self.spot.to_dict("spot"),
        }  # fmt: skip

    def table(self) -> str:
        """A line for each plan, for each number of devices, and for each price."""
        prices = ((kind, str(price)) for kind, price in self.prices.items())
        workers = [*worker_rows(self.plans)]
        others = (*workers[len(workers) == 1 :], *self.scaling_rows(), *self.target_rows())
        rows = (*self.rows(), *others, *prices)
        return "\n".join(" | ".join(row) for row in rows)

    def tables(self) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
        """The title and the rows, headings first, of all tables that have any."""
        band = f"+-{self.error_band:.0%}" if self.error_band else "error not stated"
        what = "links" if self.source == "layer profile" else "time"
        title = f"{self.workload} on {self.cluster.name} ({self.source}, {what} {band})"
        until = f"until {self.goal.target}" if self.goal else ""
        titles = (
            title, "workers that go on without each other", "other numbers of devices",
            "days with failures", until,
        )  # fmt: skip
        found = (
            self.rows(), worker_rows(self.plans), self.scaling_rows(), failing_rows(self.plans),
            self.target_rows(),
        )  # fmt: skip
        tables = map(list[tuple[str, ...]], found)
        yield from (both for both in zip(titles, tables, strict=True) if len(both[1]) > 1)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Of the table of plans, its heading first."""
        parts = ("compute", "traffic", "bubble", "slower", "update", "host")
        yield ("plan", "a step", "5 to 95 %", "samples/s", "memory", *parts, "dollars")
        for p in self.plans:
            if p.step is None:
                yield (str(p.plan), p.reason, *[""] * 10)
                continue
            low, _, high = p.step.quantiles.values()
            yield (
                f"{p.plan}{'' if p.fits else ' (does not fit)'}", f"{p.step.seconds * 1e3:.2f} ms",
                f"{low * 1e3:.2f} to {high * 1e3:.2f} ms", f"{p.samples_per_second:.1f}",
                readable(max(p.memory)), *(f"{p.step.shares[part]:.0%}" for part in parts),
                _money(p.dollars, p.spot),
            )  # fmt: skip

    def scaling_rows(self) -> Iterator[tuple[str, ...]]:
        """Of the table of numbers of devices, its heading first; nothing where none were asked."""
        if self.scaling:
            parts = ("= compute", *(f"+ {part}" for part in [*self.scaling[0].parts][1:]))
            times = ("T_N", "T_1/N", "T_comm", *parts)
            yield ("plan", "devices", "rows", *times, "speedup", "efficiency")
        for s in self.scaling:
            seconds = (s.seconds, s.alone, s.seconds - s.alone, *s.parts.values())
            yield (
                s.plan, f"{s.devices:,}", f"{s.rows:,}", *(f"{t * 1e3:.2f} ms" for t in seconds),
                f"{s.speedup:.1f}", f"{s.speedup / s.devices:.0%}",
            )  # fmt: skip

    def target_rows(self) -> Iterator[tuple[str, ...]]:
        """Of the table until the target, its heading first, if there is a goal."""
        yield from [("plan", *UNTIL)][: self.goal is not None]
        yield from ((str(p.plan), *until_cells(p.rows, p.until)) for p in self.plans if p.until)


UNTIL = ("batch", "epochs", "steps", "time", "dollars")


def until_cells(batch: int, of: ToTarget) -> tuple[str, ...]:
    """Those of `UNTIL`."""
    time = f"{of.seconds / 3600:,.2f} h" if of.seconds >= 600 else f"{of.seconds:.4g} s"
    return (
        f"{batch:,}",
        f"{of.epochs:.4g}",
        f"{of.steps:,}",
        time,
        _money(of.dollars, of.dollars_spot),
    )


def _money(dollars: float | None, spot: float | None) -> str:
    told = "" if dollars is None else f"{dollars:.4g}"
    return told if spot is None else f"{told}, spot {spot:.4g}"


def worker_rows(plans: Sequence[SimulatedPlan]) -> Iterator[tuple[str, ...]]:
    """Of the table of workers that go on without each other, its heading first."""
    yield (
        "plan", "steps of each", "samples/s", "until the first ends", "waiting, by worker",
        "ages: mean", "most", "lead", "gradients by age",
    )  # fmt: skip
    for p in plans:
        if (made := p.workers) is not None:
            stale = made.staleness
            shares = (f"{a}: {x:.0%}" for a, x in enumerate(stale.shares if stale else ()) if x)
            yield (
                str(p.plan), str(made.steps), f"{p.samples_per_second:.1f}",
                f"{p.samples_per_second_apart:.1f}",
                ", ".join(f"{share:.0%}" for share in made.waiting_shares),
                *((f"{stale.mean:.2f}", str(stale.max), str(stale.lead)) if stale else [""] * 3),
                ", ".join(shares),
            )  # fmt: skip


def failing_rows(plans: Sequence[SimulatedPlan]) -> Iterator[tuple[str, ...]]:
    """Of the table of failures, its heading first."""
    yield (
        "plan", "between failures", "useful", "lost", "restarts", "recovery", "checkpoint",
        "every", "best",
        "dollars of a useful step",
    )  # fmt: skip
    for p in plans:
        if (found := p.failures) is not None:
            lost = mean(o.lost / o.seconds for o in found.outcomes)
            restarts = mean(o.restarts for o in found.outcomes)
            yield (
                str(p.plan), f"{found.mean_between / 3600:.2f} h", f"{found.useful_share:.1%}",
                f"{lost:.1%}", f"{restarts:.1f}", f"{found.down:.0f} s", f"{found.writing:.3g} s",
                f"{found.interval:.0f} s",
                f"{found.best_interval:.0f} s", _money(p.useful(p.dollars), p.useful(p.spot)),
            )  # fmt: skip
