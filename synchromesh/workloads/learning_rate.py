"""Learning rates for batches of another size than the one that they were chosen for.

    linear    lr  =  lr_0 B / B_0          SGD: Goyal et al. 2017, arXiv 1706.02677, section 2.1
    sqrt      lr  =  lr_0 sqrt(B / B_0)    Adam's family: Malladi et al. 2022, arXiv 2205.10287

B_0 are the rows of the batch that lr_0 was chosen for, B those of a batch now. In a gradual
warm-up (Goyal et al., 2.2) the factor grows evenly from 1, step by step. The workload's own
scheduler goes on as it would: what it says is multiplied."""

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from math import ceil, isfinite, sqrt
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from synchromesh.workloads.workload import Workload, is_stream

RateRule = Literal["none", "linear", "sqrt"]
FACTORS: Mapping[str, Callable[[float], float]] = {"linear": float, "sqrt": sqrt}  # of B / B_0


@dataclass(frozen=True)
class RateFactor:
    """What a learning rate is multiplied by, after `warm_up` steps in full: by a rule, these steps
    being so many epochs."""

    factor: float = 1.0
    warm_up: int = 0
    rule: str = "none"
    epochs: float = 0.0

    def __str__(self) -> str:
        grown = f", reached in {self.warm_up:,} steps" if self.warm_up else ""
        return f"learning rates are {self.factor:.4g} times the workload's ({self.rule}{grown})"

    def after(self, steps: int) -> float:
        """After so many steps."""
        done = min(1.0, steps / self.warm_up) if self.warm_up else 1.0
        return 1.0 + (self.factor - 1.0) * done


class ScaledRate:
    """A scheduler that multiplies what another one, or nobody, makes of an optimizer's rates."""

    def __init__(self, optimizer: Optimizer, inner: Any, rate: RateFactor) -> None:
        self.optimizer, self.inner, self.rate = optimizer, inner, rate
        self.steps, self._own = 0, [float(group["lr"]) for group in optimizer.param_groups]
        self._multiply()

    def step(self) -> None:
        """After an update of the optimizer."""
        self._set(self._own)
        if self.inner is not None:
            self.inner.step()
        self._own = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.steps += 1
        self._multiply()

    def state_dict(self) -> dict[str, Any]:
        inner = None if self.inner is None else self.inner.state_dict()
        return {"steps": self.steps, "own": self._own, "inner": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rates are the optimizer's to restore."""
        self.steps, self._own = state["steps"], [*state["own"]]
        if self.inner is not None:
            self.inner.load_state_dict(state["inner"])

    def _multiply(self) -> None:
        factor = self.rate.after(self.steps)
        self._set([rate * factor for rate in self._own])

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def scaled(
    workload: Workload, rule: str, base: int, warm_up: float = 0.0
) -> tuple[Workload, RateFactor]:
    """The workload with learning rates by a rule, and by what they are multiplied. base: B_0.
    warm_up: epochs. ValueError for an unknown rule, and for epochs of data without a length."""
    if rule not in get_args(RateRule):
        raise ValueError(f"{rule!r} is no rule of learning rates: {', '.join(get_args(RateRule))}")
    if not (isfinite(warm_up) and warm_up >= 0.0):
        raise ValueError(f"a warm-up lasts a number of epochs from 0, not {warm_up}")
    if rule == "none":
        if warm_up:
            raise ValueError("a warm-up goes with a rule of learning rates: linear or sqrt")
        return workload, RateFactor()
    steps = ceil(warm_up * _steps(workload, warm_up))
    rate = RateFactor(FACTORS[rule](workload.batch_size / base), steps, rule, warm_up)

    def scheduler(optimizer: Optimizer) -> ScaledRate:
        return ScaledRate(optimizer, workload.build_scheduler(optimizer), rate)

    return replace(workload, scheduler=scheduler), rate


def _steps(workload: Workload, warm_up: float) -> int:
    """Of an epoch; not asked for without a warm-up."""
    data = workload.train_data
    if not warm_up:
        return 0
    if is_stream(data) or not isinstance(data, Sized):
        raise ValueError("a warm-up of epochs needs data with a length, and this is a stream")
    return ceil(len(data) / workload.batch_size)
