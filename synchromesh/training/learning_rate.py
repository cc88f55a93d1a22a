"""Learning rates for batches of another size than the one that they were chosen for, and for
gradients of older parameters.

    linear     lr  =  lr_0 B / B_0          SGD: Goyal et al. 2017, arXiv 1706.02677, section 2.1
    sqrt       lr  =  lr_0 sqrt(B / B_0)    Adam's family: Malladi et al. 2022, arXiv 2205.10287
    adascale   lr  =  lr_0 r                SGD: Johnson et al. 2020, arXiv 2007.05105, section 3;
                                            r: `gain`, of the noise scale that is measured
    staleness  lr  =  lr_0 / max(1, t)      Zhang et al. 2016, "Staleness-aware Async-SGD for
                                            Distributed Deep Learning", IJCAI; t: how many
                                            updates of others a gradient knows nothing of

B_0 are the rows of the batch that lr_0 was chosen for, B those of a batch now, which may change
while training. In a gradual warm-up (Goyal et al., 2.2) the factor grows evenly from 1, step by
step. The workload's own scheduler goes on, what it says is multiplied: of its updates one of ours
counts as B / B_0, so that it takes as many epochs as with B_0, and under adascale as r, its
scale-invariant steps. What `staleness` divides is known to servers alone (`step_aged`)."""

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from math import ceil, isfinite, sqrt
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from synchromesh.cost.efficiency import gain
from synchromesh.workloads.workload import Workload, is_stream

RateRule = Literal["none", "linear", "sqrt", "adascale", "staleness"]


@dataclass(frozen=True)
class RateFactor:
    """What learning rates are multiplied by under a rule. base: B_0. batch: B to begin with.
    warm_up: steps until it is reached in full, these being so many epochs."""

    rule: str = "none"
    base: int = 1
    batch: int = 1
    warm_up: int = 0
    epochs: float = 0.0

    def __str__(self) -> str:
        if self.rule == "staleness":
            return "learning rates of servers are the workload's over a gradient's age (staleness)"
        grown = f", reached in {self.warm_up:,} steps" if self.warm_up else ""
        if self.rule == "adascale":
            most = f"1 to {self.batch / self.base:.4g} times the workload's, by the noise scale"
            return f"learning rates are {most} ({self.rule}{grown})"
        return f"learning rates are {self.factor:.4g} times the workload's ({self.rule}{grown})"

    @property
    def factor(self) -> float:
        """In full, to begin with; noise is not known then."""
        return self.of(self.batch, None)

    def of(self, batch: int, noise_scale: float | None) -> float:
        """In full, of batches of so many rows. noise_scale: in rows; None: not known."""
        if self.rule == "adascale":
            return self.progress(batch, noise_scale)
        grown = batch / self.base
        return {"linear": grown, "sqrt": sqrt(grown)}.get(self.rule, 1.0)

    def progress(self, batch: int, noise_scale: float | None) -> float:
        """How many updates of B_0 rows one of a batch counts as."""
        if self.rule != "adascale":
            return batch / self.base
        return 1.0 if noise_scale is None else gain(noise_scale, batch, self.base)

    def after(self, steps: int, full: float) -> float:
        """After so many steps, in full the factor being another."""
        done = min(1.0, steps / self.warm_up) if self.warm_up else 1.0
        return 1.0 + (full - 1.0) * done


KEYS = frozenset({"steps", "own", "inner"})  # of its state


class ScaledRate:
    """A scheduler that multiplies what another one, or nobody, makes of an optimizer's rates.

    batch: rows of the batches that come. rows: of the update that was done; None: as many. The
    last one of an epoch may have fewer, which count as whole updates of B_0. noise_scale: in rows,
    while it is known. lowered: by what rates are divided besides, where a batch could not grow in
    place of a decay."""

    def __init__(self, optimizer: Optimizer, inner: Any, rate: RateFactor) -> None:
        self.optimizer, self.inner, self.rate = optimizer, inner, rate
        self.batch, self.lowered = rate.batch, 1.0
        self.rows: int | None = None
        self.noise_scale: Callable[[], float | None] = lambda: None
        self.steps, self._own = 0, [float(group["lr"]) for group in optimizer.param_groups]
        self._due = 0.0  # updates of `inner` that were done as parts only
        self._multiply()

    @property
    def factor(self) -> float:
        """What the other's rates are multiplied by now."""
        full = self.rate.of(self.batch, self._noise())
        return self.rate.after(self.steps, full) / self.lowered

    def step(self) -> None:
        """After an update of the optimizer."""
        self._set(self._own)
        self._due += self._progress()
        while self._due >= 1.0:
            self._due -= 1.0
            if self.inner is not None:
                self.inner.step()
        self._own = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.steps += 1
        self._multiply()

    def _progress(self) -> float:
        rows = self.rows or self.batch
        if rows < self.batch and self.rate.rule != "adascale":
            return ceil(rows / self.rate.base)
        return self.rate.progress(rows, self._noise())

    def resize(self, batch: int, lowered: float = 1.0) -> None:
        """Between two steps: batches have so many rows from now on."""
        self.batch, self.lowered = batch, lowered
        self._multiply()

    def get_last_lr(self) -> list[float]:
        """Of each group, as the optimizer has it."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        inner = None if self.inner is None else self.inner.state_dict()
        return {"steps": self.steps, "own": self._own, "inner": inner, "due": self._due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of this one, or of the other alone; of batches as they are now. The optimizer's rates
        were restored before."""
        if not state.keys() >= KEYS:
            alone = self.get_last_lr()
            state = {"steps": 0, "own": alone, "inner": state}
        self.steps, self._own, self._due = state["steps"], [*state["own"]], state.get("due", 0.0)
        if self.inner is not None:
            self.inner.load_state_dict(dict(state["inner"]))
        self._multiply()

    def _noise(self) -> float | None:
        return self.noise_scale() if self.rate.rule == "adascale" else None

    def _multiply(self) -> None:
        factor = self.factor
        self._set([rate * factor for rate in self._own])

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def advance(scheduler: Any, rows: int) -> None:
    """After an update of so many rows."""
    if isinstance(scheduler, ScaledRate):
        scheduler.rows = rows
    scheduler.step()


def resume(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Goes on from the state of such a scheduler, or of one with a ScaledRate around it."""
    if state.keys() >= KEYS and not isinstance(scheduler, ScaledRate):
        state = state["inner"] or {}
    if state:
        scheduler.load_state_dict(dict(state))


def scaled(
    workload: Workload, rule: str, base: int, warm_up: float = 0.0, changes: bool = False
) -> tuple[Workload, RateFactor]:
    """The workload with learning rates by a rule, and by what they are multiplied. base: B_0.
    warm_up: epochs. changes: batches may change while training, so that there is something to do
    under `none` too. ValueError for an unknown rule, and for epochs of data without a length."""
    if rule not in get_args(RateRule):
        raise ValueError(f"{rule!r} is no rule of learning rates: {', '.join(get_args(RateRule))}")
    if not (isfinite(warm_up) and warm_up >= 0.0):
        raise ValueError(f"a warm-up lasts a number of epochs from 0, not {warm_up}")
    if rule in ("none", "staleness") and warm_up:
        raise ValueError("a warm-up goes with a rule of learning rates: linear, sqrt or adascale")
    steps = ceil(warm_up * _steps(workload, warm_up))
    rate = RateFactor(rule, base, workload.batch_size, steps, warm_up)
    if rule == "none" and not changes:
        return workload, rate

    def scheduler(optimizer: Optimizer) -> ScaledRate:
        return ScaledRate(optimizer, workload.build_scheduler(optimizer), rate)

    return replace(workload, scheduler=scheduler), rate


def usual_rule(workload: Workload) -> str:
    """The rule for batches that change, of the workload's optimizer."""
    optimizer = workload.build_optimizer([Parameter(torch.zeros(2, 2))])
    return "adascale" if type(optimizer).__name__ == "SGD" else "sqrt"


def _steps(workload: Workload, warm_up: float) -> int:
    """Of an epoch; not asked for without a warm-up."""
    data = workload.train_data
    if not warm_up:
        return 0
    if is_stream(data) or not isinstance(data, Sized):
        raise ValueError("a warm-up of epochs needs data with a length, and this is a stream")
    return ceil(len(data) / workload.batch_size)
