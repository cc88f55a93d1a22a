"""The gradient noise scale, measured while a step is trained: a number of rows.

    E |g_b|^2  =  |G|^2 + tr S / b          g_b: the mean gradient of b rows that are drawn anew
    phi  =  tr S / |G|^2                    G: of all rows; S: covariance of one row's gradient

(McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.) A block is the rows of one micro-batch on
one data rank, so that the n blocks of a step divide its B rows. Hooks of parameters see what each
backward gives, before it is added to anything. With b_i rows in block i, two norms have both:

    block  =  sum over blocks of b_i |g_i|^2 / B        E block  =  |G|^2 + n tr S / B
    whole  =  |g_B|^2                                   E whole  =  |G|^2 +   tr S / B

    |G|^2  =  (n whole - block) / (n - 1)               tr S  =  B (block - whole) / (n - 1)

which with b = B / n are the paper's, and are unbiased for unequal blocks too. Both are sums over
parameters: a rank adds up its shards, of copies its part; the sums travel with the next step's
rows. What a row adds to the sum of a loss (sum, weight) counts over the mean weight of a row.

Left out of both norms is a parameter of which no rank has a block's gradient: under several
layouts there are partial sums over all ranks (`Holding.partial_gradient`), and of several stages
on the same devices each gives a part in a backward of its own."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, nan, prod, sqrt
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.optimizer import norms
from synchromesh.values.fields import Within
from synchromesh.values.holding import Holding


@dataclass(frozen=True)
class Measuring:
    """How often is measured, and over how many steps it is averaged; chosen but for `share`."""

    # of a step's time, that what is timed of measuring may take on the slowest rank; what is not
    # (calls of hooks, cold caches) takes about as much again: 0.5 to 0.9 % in all on two CPU ranks
    share: float = 0.005
    most: int = 100  # steps from one that is measured to the next
    latest: int = 5  # measured steps whose median says what one takes
    window: int = 500  # measured steps that count, about
    least: int = 10  # measured steps before an interval is given
    deviations: float = 1.96  # of a normal distribution on either side: 95 %


MEASURING = Measuring()


@dataclass(frozen=True)
class NoiseScale:
    """What is known of the noise scale, and why not more (`reason`).

    value, low, high: in rows; of 95 %. None: not known, or (high) as large as it may be.
    squared_gradient, trace: |G|^2 and tr S. steps: that were measured. measured_share: of the
    entries of the parameters that are trained."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    squared_gradient: float | None = None
    trace: float | None = None
    steps: int = 0
    measured_share: float = 0.0
    reason: str = ""

    @property
    def known(self) -> float | None:
        """What decisions are made by: at least so much, where no value is known."""
        if self.steps < MEASURING.least:
            return None
        return self.low if self.value is None else self.value


@dataclass(frozen=True)
class NoiseState:
    """What a checkpoint keeps of averages: entries that are measured by data degree, their share
    of all, and what `NoiseAverages` has."""

    entries: Mapping[str, Annotated[int, Within(0)]]
    share: Annotated[float, Within(0.0, 1.0)]
    steps: Annotated[int, Within(0)]
    weights: Annotated[float, Within(0.0)]
    squares: Annotated[float, Within(0.0)]
    sums: tuple[Annotated[float, Within(-inf)], ...]

    def __post_init__(self) -> None:
        if len(self.sums) != 5 or not all(map(str.isdigit, self.entries)):
            raise ValueError("five sums are kept of the noise scale, and degrees are numbers")


class NoiseAverages:
    """Averages of both moments over steps, and the quotient of these: that of one step divides by
    what may be zero.

    Steps weigh alike until there are `window`; then each new one takes 1 / window of what those
    before weigh. Sums are divided by the sum of weights, so that no average is drawn to zero."""

    def __init__(self, window: int = MEASURING.window) -> None:
        self.steps, self._keep, self._window = 0, 1 - 1 / window, window
        self._weights = self._squares = 0.0
        self._sums = torch.zeros(5, dtype=torch.float64)  # of g, t, g g, g t, t t

    def add(self, squared: float, trace: float) -> None:
        """The estimates of |G|^2 and tr S of one step."""
        keep = self._keep if self.steps >= self._window else 1.0
        self.steps += 1
        self._weights, self._squares = keep * self._weights + 1, keep**2 * self._squares + 1
        products = (squared, trace, squared**2, squared * trace, trace**2)
        self._sums = keep * self._sums + torch.tensor(products, dtype=torch.float64)

    def scale(self, share: float = 1.0) -> NoiseScale:
        """share: of the parameters that was measured."""
        if not self.steps:
            return NoiseScale(measured_share=share, reason="no step has been measured yet")
        g, t, *_ = (self._sums / self._weights).tolist()
        low, high = self.interval(MEASURING.deviations)
        reason = "gradient and noise are not told apart yet: measure more steps or larger batches"
        if self.steps < MEASURING.least:
            reason = f"an interval needs {MEASURING.least} measured steps, and {self.steps} were"
        elif high is not None:
            reason = ""
        value = max(t, 0.0) / g if g > 0 else None
        return NoiseScale(value, low, high, g, t, self.steps, share, reason)

    def interval(self, deviations: float) -> tuple[float | None, float | None]:
        """All phi for which the mean of t - phi g lies within `deviations` standard errors of 0,
        as steps were independent (Fieller 1954); where g is well known it is the delta method's.

        (g^2 - z^2 V_gg) phi^2 - 2 (g t - z^2 V_gt) phi + t^2 - z^2 V_tt  <=  0"""
        if self.steps < MEASURING.least:
            return None, None
        part = self._squares / self._weights**2
        g, t, gg, gt, tt = (self._sums / self._weights).tolist()
        spread = deviations**2 * part / (1 - part)  # of means, unbiased
        a, c = g * g - spread * (gg - g * g), t * t - spread * (tt - t * t)
        half = g * t - spread * (gt - g * t)
        root = sqrt(max(half * half - a * c, 0.0))
        if a > 0 and g > 0:
            return max(0.0, (half - root) / a), max(0.0, (half + root) / a)
        return (max(0.0, (half - root) / a) if c > 0 and a < 0 else 0.0), None


@dataclass(frozen=True)
class BlockGradient:
    """A parameter on one position. leaf: what backward makes the gradient of a block of;
    `parameter` has the sum, or this position's part of it. data: blocks of a micro-batch."""

    parameter: nn.Parameter
    leaf: nn.Parameter
    holding: Holding
    position: int
    data: int

    def rows(self, rows: GlobalRows) -> int:
        """Of a micro-batch, those of this position's block."""
        start, stop = rows.ranges(self.data)[self.holding.layout.data_index(self.position)]
        return stop - start

    @property
    def alike(self) -> int:
        """Positions that have an equal gradient of the same block."""
        return 1 if self.holding.placement.sharded else self.holding.layout.tensor


class NoiseMeter:
    """Measures some of the steps on one rank; all ranks call alike. Where it was not `asked`, or
    cannot be measured, nothing is done.

        begin ( count  block ... block )*  finish       an accumulation
        take  collect                                   with the rows of the next backward"""

    def __init__(self, asked: bool = False) -> None:
        self.asked, self.cuts = asked, False  # cuts: steps that have one block are cut in two
        self.cut = False  # whether the last one was
        self._why = ""
        self._entries: dict[int, int] = {}  # of the parameters that are measured, by data degree
        self._trained = 1  # entries of all that are trained
        self._own: tuple[BlockGradient, ...] = ()
        self._averages, self._share = NoiseAverages(), 0.0  # of which share of all entries
        self._last, self._every, self._at_once = -inf, 1, MEASURING.least
        self._began = 0.0
        self._costs: deque[float] = deque(maxlen=MEASURING.latest)  # shares of a step's time
        self._usual: deque[float] = deque(maxlen=MEASURING.latest)  # seconds of those not measured
        self._hooks: list[Any] = []
        self._collected: Sequence[tuple[int, ...]] = ()
        self.abandon()

    def abandon(self) -> None:
        """After a step that failed, or before another plan: what was measured of it is dropped."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open, self._spent = [], False, 0.0
        self._parts: list[GlobalRows] = []
        self._norms: list[tuple[int, int, Tensor]] = []  # of own parameters, by rows of the block
        self._seen: set[int] = set()  # parameters in the backward that goes on
        self._pending: Tensor | None = None  # what all ranks are to know

    def adopt(
        self, users: Mapping[str, Sequence[int]], holdings: Mapping[str, Holding],
        position: int | None, parameters: Mapping[str, nn.Parameter],
        whole: Mapping[str, nn.Parameter], why: str,
    ) -> None:  # fmt: skip
        """A plan. users: the stages that use each parameter that is trained. position: of this
        rank, which keeps its part of `parameters` and computes with `whole`, where there is one.
        why: nothing can be measured; empty: it can be."""
        self.abandon()
        self._usual.clear()
        own, entries = list[BlockGradient](), Counter[int]()
        for name, stages in users.items():
            holding = holdings[name]
            if holding.partial_gradient or len(stages) > 1:
                continue
            data = holding.layout.data
            entries[data] += prod(holding.tensor.shape)
            if position is not None and position in holding.positions:
                p = parameters[name]
                own.append(BlockGradient(p, whole.get(name, p), holding, position, data))
        self._own, self._why = tuple(own), why
        self._trained = max(1, sum(prod(holdings[name].tensor.shape) for name in users))
        if not entries:
            self._why = why or (
                "every parameter is used under several layouts, so that no rank has the gradient "
                "of a block: give the components that share them equal layouts"
            )
        if entries != self._entries:
            self._entries, self._share, self._averages = dict(entries), 0.0, NoiseAverages()
            self._at_once = MEASURING.least

    def state(self) -> NoiseState | None:
        """What a checkpoint keeps, alike on all ranks; None where it was not asked for."""
        of, entries = self._averages, {str(n): count for n, count in self._entries.items()}
        sums = tuple(of._sums.tolist())
        known = NoiseState(entries, self._share, of.steps, of._weights, of._squares, sums)
        return known if self.asked else None

    def resume(self, known: NoiseState | None) -> None:
        """Goes on from that, where as many entries are measured under the plan in force."""
        if known and self.asked and {int(n): x for n, x in known.entries.items()} == self._entries:
            of, self._share = NoiseAverages(), known.share
            of.steps, of._weights, of._squares = known.steps, known.weights, known.squares
            of._sums = torch.tensor(known.sums, dtype=torch.float64)
            self._averages, self._at_once = of, max(0, MEASURING.least - known.steps)

    def begin(self, steps: int) -> None:
        """Before the first backward of an accumulation; measures it if its turn has come. steps:
        that were done. The first ones are measured one after the other."""
        self._began = perf_counter()
        if not self._due(steps):
            return
        self.abandon()
        self._at_once = max(0, self._at_once - 1)
        self._open, self._last = True, steps
        self._hooks = [
            of.leaf.register_hook(self._hook(number, of))
            for number, of in enumerate(self._own)
            if of.leaf.requires_grad
        ]
        self._spent = perf_counter() - self._began

    def _due(self, steps: int) -> bool:
        every = 1 if self._at_once else self._every
        return self.asked and not self._why and not 0 <= steps - self._last < every

    def parts(self, steps: int, micro_batches: int) -> int:
        """Micro-batches of the step that comes. micro_batches: of the plan. Where something
        depends on the noise scale, one that is measured has two blocks at least."""
        alone = micro_batches == 1 and max(self._entries, default=1) == 1
        self.cut = self.cuts and alone and self._due(steps)
        return 2 if self.cut else 1

    def _hook(self, number: int, of: BlockGradient) -> Callable[[Tensor], None]:
        def measure(gradient: Tensor) -> None:
            began = perf_counter()
            if rows := of.rows(self._micro_batch):
                (norm,) = norms([gradient])
                # where checkpoints nest backwards it may be a part
                part = number in self._seen
                self._seen.add(number)
                self._norms.append((number, rows, norm * nan if part else norm))
            self._spent += perf_counter() - began

        return measure

    def count(self, parts: Sequence[GlobalRows]) -> None:
        """These micro-batches will go forward and backward."""
        if self._open:
            self._parts += parts

    def block(self, rows: GlobalRows) -> None:
        """The backward that comes is of this micro-batch."""
        if self._open:
            self._seen.clear()
            self._micro_batch = rows

    def finish(self, scale: float) -> None:
        """Gradients are summed over the ranks and have been multiplied by `scale`."""
        if not self._open:
            self._usual.append(perf_counter() - self._began)
            return
        began = perf_counter()
        blocks = {data: self._blocks(data) for data in self._entries}
        several = {data: count for data, count in blocks.items() if count > 1}
        share = sum(self._entries[data] for data in several) / self._trained
        if share > self._share:
            self._share, self._averages = share, NoiseAverages()
        moments = self._moments(several, scale)
        measured, spent = float(0 < share == self._share), self._spent
        self.abandon()
        now = perf_counter()
        taken, spent = now - self._began, spent + now - began
        if self.cut and self._usual:  # two micro-batches take longer
            spent = max(spent, taken - median(self._usual))
        told = measured, spent / taken
        self._pending = torch.cat([moments.new_tensor(told), moments])

    def _blocks(self, data: int) -> int:
        """Of the step, under a data degree."""
        ranges = (block for part in self._parts for block in part.ranges(data))
        return sum(stop > start for start, stop in ranges)

    def _moments(self, several: Mapping[int, int], scale: float) -> Tensor:
        """(2,): this rank's part of |G|^2 and tr S. several: blocks, where there are several."""
        rows = sum(part.total for part in self._parts)
        found, factors = list[Tensor](), list[tuple[float, float]]()
        for number, size, norm in self._norms:
            of = self._own[number]
            if of.data in several:
                block = rows * scale**2 / (size * of.alike * (several[of.data] - 1))
                found.append(norm)
                factors.append((-block, rows * block))
        for of in self._own:
            n, gradient = several.get(of.data, 0), of.parameter.grad
            if n and gradient is not None:
                whole = 1 / (of.holding.copies * (n - 1))
                found.append(gradient)
                factors.append((n * whole, -rows * whole))
        if not found:
            return torch.zeros(2, dtype=torch.float64)
        # a norm is a number, whose norm is itself
        squares = torch.stack([norm.double() for norm in norms(found)]).square()
        return squares @ torch.tensor(factors, dtype=torch.float64, device=squares.device)

    def take(self) -> tuple[int, ...]:
        """What this rank has measured since the last call, in numbers for all ranks: the bits of
        four float64, zeros where it has not."""
        if not self.asked:
            return ()
        pending, self._pending = self._pending, None
        return (0,) * 4 if pending is None else tuple(pending.view(torch.int64).tolist())

    def collect(self, of_ranks: Sequence[tuple[int, ...]]) -> None:
        """of_ranks: what each rank has taken."""
        # where one rank works alone it may see numbers once more
        if not self.asked or of_ranks == self._collected:
            return
        self._collected = of_ranks
        numbers = torch.tensor(of_ranks).view(torch.float64)
        measured, cost = numbers[:, :2].max(0).values.tolist()
        squared, trace = numbers[:, 2:].sum(0).tolist()
        if cost:
            self._costs.append(cost)
            steps = ceil(median(self._costs) / MEASURING.share)
            self._every = min(max(steps, 1), MEASURING.most)
        if measured and isfinite(squared) and isfinite(trace):
            self._averages.add(squared, trace)

    @property
    def measured(self) -> int:
        """Steps that count so far."""
        return self._averages.steps

    def between(self, deviations: float) -> tuple[float, float] | None:
        """The noise scale in rows, give or take so many standard errors; None: too few steps."""
        low, high = self._averages.interval(deviations)
        return None if low is None else (low, inf if high is None else high)

    def scale(self) -> NoiseScale | None:
        """What is known so far, equal on all ranks; None where it was not asked for."""
        if not self.asked:
            return None
        why = self._why
        if not why and self._costs and not self._averages.steps:
            why = (
                "gradients were not finite, or came in parts (use_reentrant=True)"
                if self._share
                else "steps have had one block of rows each, and two are compared: train under a "
                "plan with two data ranks, or add @micro_batches=2 to the plan"
            )
        return NoiseScale(reason=why) if why else self._averages.scale(self._share)
