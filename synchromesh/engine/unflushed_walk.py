"""A pipeline without a flush, walked with tensors by one rank: a `PipelineWalk` that goes on from
step to step. With w micro-batches under way behind it (`WeightVersions.under_way`) a stage does

    step t    B(a-1-w) F(a)  B(a-w) F(a+1)  ...  B(b-1-w) F(b)        a ... b: micro-batches
    step t+1  B(b-w) F(b+1)  ...

A step ends with a forward, and the next one begins with a backward: by the time that this has
run, the first forward's values have arrived. Between two ranks messages match in order, forwards
and backwards each by their number."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from synchromesh.engine.pipeline import MicroBatch, PipelineWalk, Seeds
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.program import RankOutputs
from synchromesh.engine.stashed_weights import StashedWeights
from synchromesh.values.messages import Message, Receive, Send
from synchromesh.values.schedule import PIECES, Action, ActionKind
from synchromesh.values.weight_versions import WeightVersions


class UnderWay(NamedTuple):
    """A micro-batch whose backward is to come: its number, its update and whether it is the last
    micro-batch of that; its place in its step, and how many these are."""

    number: int
    update: int
    last: bool
    place: tuple[int, int]


class UnflushedWalk(PipelineWalk):
    """Of one stage. seeds: gives gradients of a micro-batch's outputs before its backward. step:
    of the optimizer, by gradients of parameters."""

    def __init__(
        self, groups: PlanGroups, stage: int, kept: WeightVersions, stash: StashedWeights,
        seeds: Callable[[int, Sequence[RankOutputs]], Seeds], step: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__((), groups, 0, 0, PIECES)
        self.stage, self.kept, self.stash = stage, kept, stash
        self._seeds, self._step = seeds, step
        self._under_way: deque[UnderWay] = deque()
        self.coming = self._update = 0  # numbers of the next micro-batch and update

    def run(
        self, micro_batches: Sequence[MicroBatch], step: int,
        forwarded: Callable[[int, Sequence[RankOutputs]], None],
    ) -> None:  # fmt: skip
        """The forwards of a step's micro-batches, and as many backwards of earlier ones. step: of
        random operators. forwarded: is called after each forward with its number and outputs."""
        first, count = self.coming, len(micro_batches)
        self.coming += count
        self.micro_batches |= dict(enumerate(micro_batches, first))
        self.step, self.first = step, -first * self.apart
        self.sharding.expect((), False)
        most = self.kept.under_way(self.stage)
        for i in range(count):
            new = UnderWay(first + i, self._update, not self.kept.of_step, (i, count))
            if i + 1 == count:
                new = new._replace(last=True)
            self._receive("F", new.number)
            while len(self._under_way) > most or not self.stash.made(new.update):
                self._run_oldest(new.update)
            if i + 1 < count:
                self._receive("F", new.number + 1)
            if self._under_way:
                self._receive("B", self._under_way[0].number)
            self._arrived_by(new.number - self.kept.stages)
            forwarded(new.number, self._forward(new))
            self._update += new.last

    def drain(self) -> None:
        """Backwards of all that is under way. All stages call behind the same step."""
        while self._under_way:
            for of in (*self._under_way,)[:2]:
                self._receive("B", of.number)
            self._run_oldest(self._update)
        self._forget()
        self._arrived_by(self.coming)
        self.coming = self._update = 0
        self.stash.restart()

    def _forward(self, new: UnderWay) -> Sequence[RankOutputs]:
        self._under_way.append(new)
        batch = self.micro_batches[new.number]
        batch.program.weights = self.stash.leaves(new.update)
        results = self._run_forward(Action(self.stage, "F", new.number)).results
        batch.program.weights = {}
        self._send("F", new.number)
        return results

    def _place(self, m: int) -> tuple[int, int]:
        """One place later than its own: the first one's backward has not run either when buffers
        change again."""
        place, count = self._under_way[-1].place
        return place + 1, count + 1

    def _run_oldest(self, coming: int) -> None:
        """The backward of the oldest micro-batch that is under way, and an update where it is the
        last one of it. coming: the update of the next forward."""
        of = self._under_way.popleft()
        self._receive("B", of.number)
        action = Action(self.stage, "B", of.number)
        self._run_backward(action, lambda _, results: self._seeds(of.number, results))
        self._send("B", of.number)
        del self.micro_batches[of.number]
        if of.last:
            oldest = self._under_way[0].update if self._under_way else coming
            self.stash.update(of.update, oldest, self._step)

    def _messages(self, kind: ActionKind, m: int, sent: bool) -> list[Message]:
        """Those that this stage sends of a micro-batch, or receives."""
        program, at = self.micro_batches[m].program, 0 if (kind == "F") is sent else 1
        return [
            Message(kind, *way, m)
            for way, items in program.crossings.items()
            if way[at] == self.stage and items[0].crosses
        ]

    def _receive(self, kind: ActionKind, m: int) -> None:
        """Posts the receives of what a run needs, where that is not done."""
        for message in self._messages(kind, m, sent=False):
            if message not in self._receipts:
                self._communicate(Receive(message))

    def _send(self, kind: ActionKind, m: int) -> None:
        for message in self._messages(kind, m, sent=True):
            self._communicate(Send(message))

    def _arrived_by(self, number: int) -> None:
        """Lets go of messages of micro-batches up to `number`, of which later ones tell that they
        have arrived."""
        for message in [m for m in self._sent if m.micro_batch <= number]:
            self._sent.pop(message).wait()
