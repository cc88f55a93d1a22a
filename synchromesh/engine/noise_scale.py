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
from math import ceil, inf, isfinite, nan, prod
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.noise_averages import MEASURING, NoiseAverages, NoiseScale, NoiseState
from synchromesh.engine.optimizer import norms
from synchromesh.values.holding import Holding
from synchromesh.values.plan import Plan


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
        self.asked = asked
        # what depends on the noise scale follows it; cuts: steps of one block in two; cut: the
        # last one was
        self.follows = self.cuts = self.cut = False
        self._why = ""
        self._entries: dict[int, int] = {}  # of the parameters that are measured, by data degree
        self._trained = 1  # entries of all that are trained
        self._own: tuple[BlockGradient, ...] = ()
        self._averages, self._share = NoiseAverages(), 0.0  # of which share of all entries
        self._last, self._every, self._begun = -inf, 1, 0
        self._began = 0.0
        self._costs: deque[float] = deque(maxlen=MEASURING.latest)  # shares of a step's time
        self._usual: deque[float] = deque(maxlen=MEASURING.latest)  # seconds of those not measured
        self._hooks: list[Any] = []
        self._collected: Sequence[tuple[int, ...]] = ()
        self.abandon()

    def follow(self, divisible: bool) -> None:
        """Something depends on the noise scale. divisible: two micro-batches train what one does,
        so that a step of one block is cut in two where it is measured."""
        self.asked = self.follows = True
        self.cuts = divisible

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
        alone = (n for n, of in users.items() if len(of) == 1)
        for name in (n for n in alone if not holdings[n].partial_gradient):
            holding = holdings[name]
            data = holding.layout.data
            entries[data] += prod(holding.tensor.shape)
            if position is not None and position in holding.positions:
                p = parameters[name]
                own.append(BlockGradient(p, whole.get(name, p), holding, position, data))
        self._own, self._why = tuple(own), why
        trained = max(1, sum(prod(holdings[name].tensor.shape) for name in users))
        of_all = self._share == 1.0 and self._trained == trained == entries.total()
        self._trained = trained
        if not entries:
            self._why = why or (
                "every parameter is used under several layouts, so that no rank has the gradient "
                "of a block: give the components that share them equal layouts"
            )
        if entries != self._entries and not of_all:
            self._share, self._averages, self._begun = 0.0, NoiseAverages(), 0
        self._entries = dict(entries)

    def state(self) -> NoiseState | None:
        """What a checkpoint keeps, alike on all ranks; None where it was not asked for."""
        of, entries = self._averages, {str(n): count for n, count in self._entries.items()}
        sums = tuple(of._sums.tolist())
        known = NoiseState(entries, self._share, of.steps, of._weights, of._squares, sums)
        return known if self.asked else None

    def resume(self, known: NoiseState | None) -> None:
        """Goes on from that, where the same entries are measured under the plan in force."""
        if not known or not self.asked:
            return
        entries = {int(n): count for n, count in known.entries.items()}
        here = sum(self._entries.values())
        of_all = known.share == 1.0 and sum(entries.values()) == here == self._trained
        if entries == self._entries or of_all:
            of, self._share = NoiseAverages(), known.share
            of.steps, of._weights, of._squares = known.steps, known.weights, known.squares
            of._sums = torch.tensor(known.sums, dtype=torch.float64)
            self._averages, self._begun = of, known.steps

    def begin(self, steps: int) -> None:
        """Before the first backward of an accumulation; measures it if its turn has come. steps:
        that were done. The first ones are measured one after the other."""
        self._began = perf_counter()
        if not self._due(steps):
            return
        self.abandon()
        self._begun += 1
        self._open, self._last = True, steps
        self._hooks = [
            of.leaf.register_hook(self._hook(number, of))
            for number, of in enumerate(self._own)
            if of.leaf.requires_grad
        ]
        self._spent = perf_counter() - self._began

    def _due(self, steps: int) -> bool:
        every = 1 if self._begins else self._every
        return self.asked and not self._why and not 0 <= steps - self._last < every

    @property
    def _begins(self) -> bool:
        """Whether steps are measured one after the other."""
        if self._begun < MEASURING.least or not self.follows or self._begun >= MEASURING.first:
            return self._begun < MEASURING.least
        low, high = self.between(1.0) or (0.0, inf)
        return high > MEASURING.apart * low

    def parts(self, steps: int, plan: Plan) -> int:
        """Micro-batches of the step that comes, under a plan that may have stages, which say
        themselves into how many. Where something depends on the noise scale, one that is measured
        has two blocks at least."""
        one = plan.micro_batches == plan.stage_count == 1
        alone = one and max(self._entries, default=1) == 1
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
            # of a cut step it is known what it takes longer once another one was not
            self._every = min(max(steps, 1 + self.cuts), MEASURING.most)
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
