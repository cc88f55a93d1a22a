"""The peak memory of a plan: bytes alive on each device, walked through a step.

    resident     parameters, buffers, gradient buckets, optimizer state: always; of what is
                 sharded this rank's parts
    gathered     sharded parameters while they are there, and what they are gathered into
    scattered    gradients of which each rank gets a part: their buckets, and what arrives
    batch        this rank's rows of the batch's leaves
    kept         what forwards keep for backwards, and border values until their last reader
    gradients    of border values until their maker's backward; of parameters in no bucket
    messages     values of other stages, and for them, until their stage's backward of the
                 micro-batch; copies and buffers of what is not sent as it lies
    working      the most that the component at work has alive besides
    update       what the optimizer's step has alive besides

The step's peak is the highest sum. Each micro-batch keeps its part of the bytes from its own
forward to its own backward, in the order in which its device group runs them; and a parameter's
gradient lies beside its bucket from the backward of the first to that of the last. Those that take
turns share a backward, in which their gradients are added up out of place."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from synchromesh.cost.alive_bytes import KINDS, AliveBytes, MemoryKind
from synchromesh.cost.planned_step import PlannedStep, measured, sharded_bytes
from synchromesh.cost.scattered_gradients import PART, SCATTERED, ScatteredGradients
from synchromesh.cost.turns import Portion, walked
from synchromesh.trace.partition.local import LocalComponent
from synchromesh.values.component import Value
from synchromesh.values.exchange import Exchange
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, leaf_layout_at
from synchromesh.values.messages import Message, Receive, Run, Send
from synchromesh.values.placement import REPLICATED, Placement
from synchromesh.values.profile import Profile
from synchromesh.values.schedule import Action

Form = tuple[str, int, Placement]  # value, tensor degree, placement


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one device: always there, and at the highest moment of a step; by kind, what these
    are."""

    resident: int
    peak: int
    by_kind: Mapping[MemoryKind, int] = field(default_factory=dict, compare=False)


VALUE, KEPT, WAITING, SUMMED = "value", "kept", "waiting", "summed"
ARRIVED, SENT = "arrived", "sent"
GATHERED, ON_ITS_WAY = "gathered", "on its way"
Kinds = Mapping[MemoryKind, float]  # bytes
KIND_OF: Mapping[str, MemoryKind] = {
    SUMMED: "gradients", SCATTERED: "gradients", PART: "gradients",
    GATHERED: "parameters", ON_ITS_WAY: "buffers", SENT: "buffers",
}  # fmt: skip


def peak_memories(
    planned: PlannedStep, profile: Profile, pieces: int = 1
) -> tuple[PeakMemory, ...]:
    """The memory of every device; those of a group with equally many rows need equally much.

    pieces: how many micro-batches take turns on the only stage."""
    layouts = list(dict.fromkeys(c.layout for c in planned.partition.components))
    known: dict[tuple[Any, ...], PeakMemory] = {}
    found: dict[int, PeakMemory] = {}
    for group, positions in enumerate(planned.positions):
        its = [x for x in layouts if x.positions == positions]
        blocks = [planned.blocks(layout) for layout in its]
        for position in positions:
            rows = tuple(b[x.data_index(position)] for b, x in zip(blocks, its, strict=True))
            if (group, rows) not in known:
                known[group, rows] = peak_memory(planned, profile, position, pieces)
            found[position] = known[group, rows]
    return tuple(found[position] for position in sorted(found))


def peak_memory(
    planned: PlannedStep, profile: Profile, position: int, pieces: int = 1
) -> PeakMemory:
    """The memory of the device at `position`. Unmeasured: of which component nothing is known."""
    held = planned.held(position)
    buckets = [h for h in held if h.summed and h.parts == 1]  # there from the first step on
    resident = held_bytes(held, profile.state_factor, buckets)
    walk = _MemoryWalk(planned, profile, position, pieces)
    walk.run()
    moments = (walk.alive.of_highest, _update(held, profile))
    most = max(moments, key=lambda kinds: sum(kinds.values()))
    batch: Kinds = {"activations": walk.batch_bytes}
    always = round(sum(resident.values()))
    return PeakMemory(
        always,
        always + round(sum(most.values()) + walk.batch_bytes),
        {k: round(sum(x.get(k, 0.0) for x in (resident, most, batch))) for k in KINDS},
    )


def _update(held: list[Holding], profile: Profile) -> Kinds:
    """Bytes besides the resident ones while the optimizer steps: gradients in no bucket, its
    own."""
    trained = [h for h in held if h.tensor.trainable]
    sizes = [h.kept_bytes for h in trained]
    alone = sum(h.kept_bytes for h in trained if not h.summed or h.parts > 1)
    own = profile.work_largest * max(sizes, default=0) + profile.work_byte * sum(sizes)
    return {"gradients": alone, "states": own}


def held_bytes(
    held: Iterable[Holding], state_factor: float, gradients: Iterable[Holding]
) -> Kinds:
    """Bytes of the parameters, buffers and optimizer state of what one device holds, with the
    gradients of those among `gradients`. state_factor: bytes of state for one of a parameter."""
    found = dict.fromkeys(KINDS, 0.0)
    for h in held:
        found["buffers" if h.tensor.buffer else "parameters"] += h.kept_bytes
        found["states"] += state_factor * h.kept_bytes * h.tensor.trainable
    found["gradients"] += sum(h.kept_bytes for h in gradients if h.tensor.trainable)
    return found


class _MemoryWalk:
    """Bytes alive besides the resident ones, through what one device does in a step."""

    def __init__(self, planned: PlannedStep, profile: Profile, position: int, pieces: int) -> None:
        self.planned, self.position, self.pieces = planned, position, pieces
        self.group = next(g for g, its in enumerate(planned.positions) if position in its)
        self.parts = {i: planned.partition.components[i] for i in planned.components(self.group)}
        self.memory = {i: measured(planned, p, profile).memory for i, p in self.parts.items()}
        self.count = planned.plan.micro_batches * pieces
        uses = Counter(h.tensor.name for i in self.parts for h in planned.trained(i))
        # gradients that are still to be added up to a parameter's; those of one backward
        self.left = Counter({name: n * self.count for name, n in uses.items()})
        self.each = {name: n * pieces for name, n in uses.items()}
        self.last: dict[Form, int] = {}  # the last component that reads a form
        self.keepers: dict[Form, int] = {}  # the first one that keeps it for its backward
        for i, local in self.parts.items():
            for number, item in enumerate(local.inputs):
                form = self._sized(item.value, local.layout, item.want)[0]
                self.last[form] = i
                if item.source is None:
                    continue
                if number in self.memory[i].kept_inputs or local.layout.recompute:
                    self.keepers.setdefault(form, i)
                if item.source in self.parts:
                    maker = self.parts[item.source].layout
                    self.last[self._sized(item.value, maker, item.have)[0]] = i
        self.dies: dict[int, list[Form]] = {}
        for form, i in self.last.items():
            self.dies.setdefault(i, []).append(form)
        self.forms: dict[str, list[Form]] = {}  # of each value
        for form in self.last:
            self.forms.setdefault(form[0], []).append(form)
        self.handed = {  # until the maker's stage has run its backward
            self._sized(e.value, e.source, e.have)[0]: source
            for (source, _), items in planned.crossings.items()
            for e in items
            if planned.of[source] == self.group
        }
        self.alive = AliveBytes(KIND_OF)
        self.begun: set[tuple[str, int, int]] = set()  # passes through components
        self.passes = planned.passes(self.group, pieces)
        self.left_uses: Counter[int] = Counter()  # micro-batches that have passed a use
        self.scattered = ScatteredGradients(planned, self.group, self.alive)

    def rows(self, layout: Layout) -> float:
        """Rows of a micro-batch on this device."""
        return self.planned.blocks(layout)[layout.data_index(self.position)] / self.pieces

    def _sized(self, value: Value, layout: Layout, placement: Placement) -> tuple[Form, float]:
        """A form of a value, and its bytes for a micro-batch on this device."""
        whole = placement.padded_bytes(value.bytes(1), value.shape, layout.tensor)
        size = whole * (self.rows(layout) ** value.rows.power if value.rows else 1.0)
        form = value.name, layout.tensor, placement
        return form, size / layout.tensor if placement.sharded else size

    @property
    def batch_bytes(self) -> float:
        """This rank's rows of the batch's leaves, of those too that other stages read alone."""
        found: dict[Form, float] = {}
        own = leaf_layout_at(self.planned.partition.leaf_layouts, self.position)
        read = [(p.layout, x) for p in self.parts.values() for x in p.inputs if x.source is None]
        here = {item.value.name for _, item in read}
        every = (x for p in self.planned.partition.components for x in p.inputs)
        others = [x for x in every if x.source is None and x.value.name not in here]
        for layout, item in (*read, *((own, replace(x, want=REPLICATED)) for x in others)):
            form, size = self._sized(item.value, layout, item.want)
            found[form] = size * (self.count if item.value.rows else 1)
        return sum(found.values())

    def run(self) -> None:
        """Walks through the step."""
        before: Action | None = None
        for instruction in self.planned.instructions(self.pieces)[self.group]:
            if not isinstance(instruction, Run):
                self._communicate(instruction)
                continue
            action = instruction.action
            if before is not None and before.kind == "F" and action.kind == "B":
                self.alive.meanwhile(0.0)
            self._run(action)
            before = action

    # Messages

    def _communicate(self, instruction: Send | Receive) -> None:
        message = instruction.message
        exchanges = self._exchanges(message)
        if isinstance(instruction, Receive):
            for e in exchanges:
                size = self._received(e, message) + self._buffers(e, message)
                self.alive.set((ARRIVED, message, e), size)
            return
        self.alive.set((SENT, message), sum(self._copied(e, message) for e in exchanges))
        self.alive.meanwhile(0.0)
        if message.kind == "F":
            return
        for e in exchanges:  # a gradient that is sent as it lies stays with what is sent
            form, size = self._sized(e.value, e.target, e.want)
            self.alive.free((WAITING, message.micro_batch, form))
            if not self._copied(e, message):
                self.alive.set((SENT, message, e), size)

    def _copied(self, exchange: Exchange, message: Message) -> int:
        """Bytes of the copies that are sent: of parts of rows, and of rows that lie inside."""
        rows, backward = exchange.value.rows, message.kind == "B"
        if rows is None:
            return 0
        change = exchange.change(self.planned.row_ranges, backward)
        routes = [r for r in change.routes if r.sender == self.position]
        if all(r in change.whole for r in routes):
            return 0
        views = all(len(r.parts) == 1 for r in routes)
        if views and rows.dim == 0 and not (exchange.have.sharded or exchange.want.sharded):
            return 0
        return exchange.sent_bytes(self.planned.row_ranges, backward, self.position)

    def _buffers(self, exchange: Exchange, message: Message) -> float:
        """Bytes into which a value is received that is then put together: none where one rank
        sends all of it."""
        size, backward = self._received(exchange, message), message.kind == "B"
        if exchange.value.rows is None:
            return size * sum(to == self.position for _, to in exchange.copies(backward))
        change = exchange.change(self.planned.row_ranges, backward)
        senders = [r for r in change.routes if r.receiver == self.position]
        return size if len(senders) > 1 or change.partial else 0.0

    def _exchanges(self, message: Message) -> list[Exchange]:
        """What a message brings."""
        found = self.planned.crossings[message.source, message.target]
        return [e for e in found if e.flows or message.kind == "F"]

    def _received(self, exchange: Exchange, message: Message) -> float:
        """Bytes of a value, or of its gradient, at the receiver."""
        if message.kind == "F":
            return self._sized(exchange.value, exchange.target, exchange.want)[1]
        return self._sized(exchange.value, exchange.source, exchange.have)[1]

    def _needed(self, action: Action) -> list[tuple[Message, Exchange]]:
        """The messages without which an action does not begin, with what they bring."""
        messages = [
            Message(action.kind, source, target, action.micro_batch)
            for source, target in self.planned.crossings
            if self.planned.of[source] != self.planned.of[target]
        ]
        return [(m, e) for m in messages if m.needed_by == action for e in self._exchanges(m)]

    # Runs

    def _run(self, action: Action) -> None:
        """The components of a stage, or those that an action's turn comes to first."""
        m, stage = action.micro_batch, action.stage
        needed = self._needed(action)
        for message, e in needed:
            self.alive.set((ARRIVED, message, e), self._received(e, message))
            if message.kind == "B":  # it is back, so the value has arrived
                self.alive.free((SENT, replace(message, kind="F")))
        run = self._forward if action.kind == "F" else self._backward
        for item in walked(self.planned.turns[stage], action):
            if isinstance(item, Portion) and (action.kind, m, item.component) not in self.begun:
                self.begun.add((action.kind, m, item.component))
                at = self.passes.at(action, item.component)
                if at is not None:
                    self._enter(at)
                run(m, item.component, needed)
                if at is not None:
                    self._leave_use(at)
        if action.kind == "F" or action.turn:
            return
        if m % self.pieces == 0:
            self.scattered.end_backward()
        for message, e in (*needed, *self._needed(replace(action, kind="F"))):
            self.alive.free((ARRIVED, message, e))
        for form, maker in self.handed.items():
            if maker == stage:
                self.alive.free((VALUE, m, form))

    def _enter(self, at: int) -> None:
        """What a use gathers is there, and what the next one gathers on its way."""
        units = self.planned.gathering.units
        for unit in self.passes.uses[at].gathered if not self.left_uses[at] else ():
            held = units[unit].holdings
            self.alive.set((ON_ITS_WAY, unit), sharded_bytes(held))
            self.alive.set((GATHERED, unit), sum(h.local_bytes for h in held))
            self.alive.meanwhile(0.0)
            self.alive.free((ON_ITS_WAY, unit))
        for unit in self.passes.uses[at + 1].gathered if at + 1 < len(self.passes.uses) else ():
            held = units[unit].holdings
            own = sum(h.kept_bytes for h in held)  # a copy in one piece is what is sent
            self.alive.set((ON_ITS_WAY, unit), own + sharded_bytes(held))

    def _leave_use(self, at: int) -> None:
        self.left_uses[at] += 1
        if self.left_uses[at] == self.pieces:
            for unit in self.passes.uses[at].freed:
                self.alive.free((GATHERED, unit))

    def _forward(self, m: int, i: int, _: object) -> None:
        local, memory, alive = self.parts[i], self.memory[i], self.alive
        for item in local.inputs:
            if item.source in self.parts:
                form, size = self._sized(item.value, local.layout, item.want)
                if (VALUE, m, form) not in alive.bytes:
                    alive.set((VALUE, m, form), size)
        rows = self.rows(local.layout)
        alive.meanwhile(memory.forward(rows))
        recompute = local.layout.recompute
        alive.set((KEPT, m, i), 0.0 if recompute else memory.kept(rows))
        made = []
        for number, output in enumerate(local.outputs):
            form, size = self._sized(output.value, local.layout, output.placement)
            # kept outputs are counted among what the component keeps
            counted = number in memory.kept_outputs and not recompute
            alive.set((VALUE, m, form), 0.0 if counted else size)
            made.append(form)
        for form in (*self.dies.get(i, ()), *(f for f in made if f not in self.last)):
            if form not in self.keepers and form not in self.handed:
                alive.free((VALUE, m, form))

    def _backward(self, m: int, i: int, needed: Sequence[tuple[Message, Exchange]]) -> None:
        local, memory, alive = self.parts[i], self.memory[i], self.alive
        rows, trained = self.rows(local.layout), self.planned.trained(i)
        names = {output.value.name for output in local.outputs}
        brought = [(message, e) for message, e in needed if e.value.name in names]
        alive.free((KEPT, m, i))
        for name in names:  # gradients of outputs are among its working bytes
            for form in self.forms.get(name, ()):
                alive.free((WAITING, m, form))
        for message, e in brought:
            alive.free((ARRIVED, message, e))
        staying = not all(h.summed for h in trained)
        added = sum(alive.bytes.get((SUMMED, h.tensor.name), 0.0) for h in trained)
        if self.pieces == 1:  # each has a backward of its own, which adds in place to the earlier
            staying = staying and (self.count == 1 or not added)
            added = 0.0
        if local.layout.recompute:
            alive.meanwhile(memory.forward(rows))
        for holding in trained:
            if self._scatters(holding):
                self.scattered.open(holding)  # filled while the component is at work
        alive.meanwhile((memory.staying if staying else memory.backward)(rows) + added)
        for message, e in brought:  # autograd's caller holds them until it returns
            alive.set((ARRIVED, message, e), self._received(e, message))
        self._leave(m, local, trained)
        for form, keeper in self.keepers.items():
            if keeper == i and form not in self.handed:
                alive.free((VALUE, m, form))

    def _scatters(self, holding: Holding) -> bool:
        """Whether each rank gets a part of the sum after the use to come, which is the last one of
        a backward, of which micro-batches that take turns have one, or of the step."""
        name = holding.tensor.name
        of_backward = self.left[name] % self.each[name] == 1 % self.each[name]
        return holding.parts > 1 and (
            of_backward if holding.each_backward else self.left[name] == 1
        )

    def _leave(self, m: int, local: LocalComponent, trained: Sequence[Holding]) -> None:
        """The gradients that a component leaves: of what it read, and of its parameters."""
        for item in local.inputs:
            if item.source is not None and item.value.differentiable:
                form, size = self._sized(item.value, local.layout, item.want)
                self.alive.set((WAITING, m, form), size)
        for holding in trained:
            name = holding.tensor.name
            scatters = self._scatters(holding)
            self.left[name] -= 1
            if scatters:
                self.alive.free((SUMMED, name))
                self.scattered.add(holding)
            elif self.left[name] or not holding.summed:
                self.alive.set((SUMMED, name), float(holding.local_bytes))
            else:
                self.alive.free((SUMMED, name))  # it lies in its bucket
