"""The peak memory of a plan: bytes alive on each device, walked through a step.

    resident     parameters, buffers, gradient buckets, optimizer state: always; of what is
                 sharded this rank's parts
    gathered     sharded parameters while they are there, and what they are gathered into
    scattered    gradients of which each rank gets a part: their buckets, and what arrives
    batch        this rank's rows of the batch's leaves
    kept         what forwards keep for backwards, and border values until their last reader; of a
                 divided backward what the gradients of weights wait for
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from synchromesh.cost import alive_bytes
from synchromesh.cost.alive_bytes import AliveBytes, Form, Kinds, Lifetimes, PeakMemory, form_of
from synchromesh.cost.compression import kept_bytes
from synchromesh.cost.gradients import COMPRESSED, PART, SCATTERED, GroupGradients, ScatteredBytes
from synchromesh.cost.planned_step import (
    ComputeShare,
    PlannedStep,
    bytes_apart,
    measured,
    sharded_bytes,
    walked,
)
from synchromesh.trace.partition.local import Input, LocalComponent
from synchromesh.values.component import Value
from synchromesh.values.exchange import Exchange
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, leaf_layout_at
from synchromesh.values.memory_by_kind import KINDS
from synchromesh.values.messages import Message, Receive, Run, Send
from synchromesh.values.placement import REPLICATED, Placement
from synchromesh.values.profile import Memory, Profile
from synchromesh.values.schedule import Action, ActionKind
from synchromesh.values.sharding import UnitEvent, UseWalk

Brought = Sequence[tuple[Message, Exchange]]  # messages with what they bring


VALUE, KEPT, WAITING, SUMMED = "value", "kept", "waiting", "summed"
LATER = "later"
ARRIVED, SENT = "arrived", "sent"
GATHERED, ON_ITS_WAY = "gathered", "on its way"
KIND_OF: Mapping[str, str] = {
    SUMMED: "gradients", SCATTERED: "gradients", PART: "gradients", COMPRESSED: "gradients",
    GATHERED: "parameters", ON_ITS_WAY: "buffers", SENT: "buffers",
}  # fmt: skip


def peak_memories(
    planned: PlannedStep, profile: Profile, pieces: int = 1
) -> tuple[PeakMemory, ...]:
    """The memory of every device; those of a group that have as many rows need as much, where
    servers are among them those that keep as many tensors.

    pieces: how many pieces take turns on the only stage."""
    layouts = list(dict.fromkeys(c.layout for c in planned.partition.components))
    known: dict[tuple[Any, ...], PeakMemory] = {}
    memories = []
    for group, positions in enumerate(planned.positions):
        its = [x for x in layouts if x.positions == positions]
        blocks = [planned.blocks(layout) for layout in its]
        for position in positions:
            rows = tuple(b[x.data_index(position)] for b, x in zip(blocks, its, strict=True))
            kept = len(planned.kept(position)) if planned.plan.sync.servers else 0
            key = group, rows, kept
            if key not in known:
                known[key] = peak_memory(planned, profile, position, pieces)
            memories.append(known[key])
    return tuple(memories)


def peak_memory(
    planned: PlannedStep, profile: Profile, position: int, pieces: int = 1
) -> PeakMemory:
    """The memory of the device at `position`. Unmeasured: of which component nothing is known."""
    held = planned.kept(position)
    buckets = [h for h in held if h.summed and not h.scattered] * planned.plan.sync.sums
    resident = dict(alive_bytes.held_bytes(held, profile.state_factor, buckets))
    copies, states, messages = bytes_apart(planned, position, profile.state_factor)
    resident["parameters"] += copies
    resident["states"] += states
    resident["buffers"] += messages
    walk = _MemoryWalk(planned, profile, position, pieces)
    resident["states"] += sum(map(kept_bytes, walk.gradients.buckets))
    if not any(h.dedicated and h.replica for h in held):  # a server alone has no step
        walk.run()
    updating = alive_bytes.update_bytes(planned.held(position), position, profile)
    moments = (walk.alive.of_highest, updating)
    most = max(moments, key=lambda kinds: sum(kinds.values()))
    batch: Kinds = {"activations": walk.batch_bytes * (2 if planned.plan.kept else 1)}
    always = round(sum(resident.values()))
    return PeakMemory(
        always,
        always + round(sum(most.values()) + sum(batch.values())),
        {k: round(sum(x.get(k, 0.0) for x in (resident, most, batch))) for k in KINDS},
    )


def _leaves(parts: Iterable[LocalComponent]) -> list[tuple[Layout, Input]]:
    """What components read of the batch."""
    return [(part.layout, item) for part in parts for item in part.inputs if item.source is None]


class _MemoryWalk:
    """Bytes alive besides the resident ones, through what one device does in a step."""

    def __init__(self, whole: PlannedStep, profile: Profile, position: int, pieces: int) -> None:
        self.planned = planned = whole.shortened
        self.position, self.pieces = position, pieces
        self.group = next(g for g, its in enumerate(planned.positions) if position in its)
        self.parts = {i: planned.partition.components[i] for i in planned.components(self.group)}
        self.memory = {i: measured(p, profile).memory for i, p in self.parts.items()}
        self.count = whole.plan.micro_batches * pieces
        self.lifetimes = Lifetimes(self.parts, self.memory, self._handed())
        self.alive = AliveBytes(KIND_OF)
        self.passed = Counter[tuple[Action, int]]()  # micro-batches, by action and component
        self.begun: set[tuple[str, int, int]] = set()  # passes through components
        self.copied, self.buffers = cache(self._copied), cache(self._buffers)
        actions = planned.actions(self.group, pieces)
        self.uses = UseWalk(planned.gathering.uses(actions, planned.stages))
        self.gradients = GroupGradients(planned, self.group, pieces)
        self.scattered = ScatteredBytes(self.gradients, self.alive, position)

    def _handed(self) -> dict[Form, int]:
        """The forms of values that other stages read, with the stage that makes them."""
        return {
            form_of(e.value, e.source, e.have): source
            for (source, _), items in self.planned.crossings.items()
            for e in items
            if self.planned.of[source] == self.group
        }

    def rows(self, layout: Layout) -> float:
        """Rows of a micro-batch on this device."""
        return self.planned.blocks(layout)[layout.data_index(self.position)] / self.pieces

    def _bytes(self, value: Value, layout: Layout, placement: Placement) -> float:
        """Bytes of a value for a micro-batch on this device."""
        whole = placement.padded_bytes(value.bytes(1), value.shape, layout.tensor)
        size = whole * (self.rows(layout) ** value.rows.power if value.rows else 1.0)
        return size / layout.tensor if placement.sharded else size

    @property
    def batch_bytes(self) -> float:
        """This rank's rows of the batch's leaves, of those too that other stages read alone."""
        own = leaf_layout_at(self.planned.partition.leaf_layouts, self.position)
        read = _leaves(self.parts.values())
        here = {item.value.name for _, item in read}
        for _, item in _leaves(self.planned.partition.components):
            if item.value.name not in here:
                read.append((own, replace(item, want=REPLICATED)))
        return sum({
            form_of(item.value, layout, item.want): (self.count if item.value.rows else 1)
            * self._bytes(item.value, layout, item.want)
            for layout, item in read
        }.values())  # fmt: skip

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
            (self._run_weights if action.kind == "W" else self._run)(action)
            before = action

    # Messages

    def _communicate(self, instruction: Send | Receive) -> None:
        message = instruction.message
        exchanges = self._exchanges(message)
        if isinstance(instruction, Receive):
            for e in exchanges:
                size = self._received(e, message.kind) + self.buffers(e, message.kind)
                self.alive.set((ARRIVED, message, e), size)
            return
        copied = [self.copied(e, message.kind == "B") for e in exchanges]
        self.alive.set((SENT, message), sum(copied))
        self.alive.meanwhile(0.0)
        if message.kind == "F":
            return
        # a gradient that is sent as it lies stays with what is sent
        for e, copies in zip(exchanges, copied, strict=True):
            form = form_of(e.value, e.target, e.want)
            self.alive.free((WAITING, message.micro_batch, form))
            if not copies:
                self.alive.set((SENT, message, e), self._bytes(e.value, e.target, e.want))

    def _copied(self, exchange: Exchange, backward: bool) -> int:
        """Bytes of the copies that are sent: of parts of rows, and of rows that lie inside."""
        rows = exchange.value.rows
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

    def _buffers(self, exchange: Exchange, kind: ActionKind) -> float:
        """Bytes into which a value is received that is then put together: none where one rank
        sends all of it."""
        size, backward = self._received(exchange, kind), kind == "B"
        if exchange.value.rows is None:
            return size * sum(to == self.position for _, to in exchange.copies(backward))
        change = exchange.change(self.planned.row_ranges, backward)
        senders = [r for r in change.routes if r.receiver == self.position]
        return size if len(senders) > 1 or change.partial else 0.0

    def _exchanges(self, message: Message) -> list[Exchange]:
        """What a message brings."""
        exchanges = self.planned.crossings[message.source, message.target]
        return [e for e in exchanges if e.flows or message.kind == "F"]

    def _received(self, exchange: Exchange, kind: ActionKind) -> float:
        """Bytes of a value, or of its gradient, at the receiver."""
        if kind == "F":
            return self._bytes(exchange.value, exchange.target, exchange.want)
        return self._bytes(exchange.value, exchange.source, exchange.have)

    def _needed(self, action: Action) -> list[tuple[Message, Exchange]]:
        """The messages without which an action does not begin, with what they bring."""
        of, kind = self.planned.of, action.kind
        here = (
            Message(kind, source, target, action.micro_batch)
            for source, target in self.planned.crossings
            if action.stage == (target if kind == "F" else source) and of[source] != of[target]
        )
        return [(m, e) for m in here if m.needed_by == action for e in self._exchanges(m)]

    # Runs

    def _run(self, action: Action) -> None:
        """The components of a stage, or those that an action's turn comes to first."""
        needed = self._needed(action)
        for message, e in needed:
            self.alive.set((ARRIVED, message, e), self._received(e, message.kind))
            if message.kind == "B":  # it is back, so the value has arrived
                self.alive.free((SENT, message.forward))
        for item in walked(self.planned.turns[action.stage], action):
            key = action.kind, action.micro_batch, item.component
            if isinstance(item, ComputeShare) and key not in self.begun:
                self.begun.add(key)
                self._component(action, item.component, needed)
        if action.kind == "F" or action.turn:
            return
        m, stage = action.micro_batch, action.stage
        if m % self.pieces == 0:
            self.scattered.end_backward(stage)
        for message, e in (*needed, *self._needed(Action(stage, "F", m))):
            self.alive.free((ARRIVED, message, e))
        for form in self.lifetimes.after_stage(stage):
            self.alive.free((VALUE, m, form))

    def _component(self, action: Action, i: int, needed: Brought) -> None:
        place = action.of_all(self.pieces), i
        use = self.uses.uses.number.get(place)
        if use is not None:
            self._carry_out(self.uses.enter(use, self.pieces))
        self.passed[place] += 1
        if action.kind == "F":
            self._forward(action.micro_batch, i)
        else:
            last = self.passed[place] == self.pieces
            complete = self.gradients.complete(action, i) if last else ()
            self._backward(action.micro_batch, i, needed, complete)
        if use is not None:
            self._carry_out(self.uses.leave(use, self.pieces))

    def _carry_out(self, events: Iterable[UnitEvent]) -> None:
        """A gather's copy of this rank's parts and room for all ranks', then the parameters beside
        that room, then these alone."""
        for event in events:
            held = self.planned.gathering.units[event.unit].holdings
            there, coming = (GATHERED, event.unit), (ON_ITS_WAY, event.unit)
            match event.verb:
                case "gather":
                    # a copy in one piece is what is sent
                    own = sum(h.kept_bytes for h in held if h.kept_at(self.position))
                    self.alive.set(coming, own + sharded_bytes(held))
                case "await":
                    self.alive.set(coming, sharded_bytes(held))
                    self.alive.set(there, sum(h.local_bytes for h in held))
                    self.alive.meanwhile(0.0)
                    self.alive.free(coming)
                case "free":
                    self.alive.free(there)

    def _forward(self, m: int, i: int) -> None:
        local, memory, alive = self.parts[i], self.memory[i], self.alive
        for item in local.inputs:
            key = VALUE, m, form_of(item.value, local.layout, item.want)
            if item.source in self.parts and key not in alive.bytes:
                alive.set(key, self._bytes(item.value, local.layout, item.want))
        rows, recompute = self.rows(local.layout), local.layout.recompute
        alive.meanwhile(memory.forward(rows))
        alive.set((KEPT, m, i), 0.0 if recompute else memory.kept(rows))
        for number, o in enumerate(local.outputs):
            # kept outputs are counted among what the component keeps
            counted = number in memory.kept_outputs and not recompute
            size = 0.0 if counted else self._bytes(o.value, local.layout, o.placement)
            alive.set((VALUE, m, form_of(o.value, local.layout, o.placement)), size)
        for form in self.lifetimes.after_forward[i]:
            alive.free((VALUE, m, form))

    def _backward(self, m: int, i: int, needed: Brought, complete: Collection[str]) -> None:
        """complete: the parameters whose gradients are, after it."""
        local, memory, alive = self.parts[i], self.memory[i], self.alive
        rows, trained = self.rows(local.layout), self.planned.trained(i)
        names = {output.value.name for output in local.outputs}
        brought = [(message, e) for message, e in needed if e.value.name in names]
        alive.free((KEPT, m, i))
        for form in self.lifetimes.forms_of(names):  # are among its working bytes
            alive.free((WAITING, m, form))
        for message, e in brought:
            alive.free((ARRIVED, message, e))
        working = self._working(memory, rows, trained)  # beside what lies there before
        if local.layout.recompute:
            alive.meanwhile(memory.forward(rows))
        for holding in trained:
            if holding.scattered and holding.tensor.name in complete:
                self.scattered.open(holding)  # filled while the component is at work
        alive.meanwhile(working)
        for message, e in brought:  # autograd's caller holds them until it returns
            alive.set((ARRIVED, message, e), self._received(e, message.kind))
        self._leave_gradients(m, local)
        self._leave_weights(m, i, complete)
        for form in self.lifetimes.after_backward[i]:
            alive.free((VALUE, m, form))

    def _working(self, memory: Memory, rows: float, trained: Sequence[Holding]) -> float:
        """What a backward works in. Where each micro-batch has a backward of its own, it adds in
        place to the gradients of earlier ones; of those that share one, out of place."""
        staying = not all(h.summed for h in trained)
        added = sum(self.alive.bytes.get((SUMMED, h.tensor.name), 0.0) for h in trained)
        if self.pieces == 1:
            staying = staying and (self.count == 1 or not added)
            added = 0.0
        return (memory.staying if staying else memory.backward)(rows) + added

    def _run_weights(self, action: Action) -> None:
        """Gradients of weights, each of which is made and then added."""
        for item in walked(self.planned.turns[action.stage], action):
            i = item.component
            trained = self.planned.trained(i)
            self.alive.meanwhile(float(max((h.local_bytes for h in trained), default=0)))
            self.alive.free((LATER, action.micro_batch, i))
            self._sum_gradients(trained, self.gradients.complete(action, i))

    def _leave_weights(self, m: int, i: int, complete: Collection[str]) -> None:
        """The gradients of a component's parameters, or what these wait for."""
        if self.planned.divides:
            local = self.parts[i]
            waiting = (self._bytes(v, local.layout, p) for v, p in local.division.waiting)
            self.alive.set((LATER, m, i), sum(waiting))
        else:
            self._sum_gradients(self.planned.trained(i), complete)

    def _leave_gradients(self, m: int, local: LocalComponent) -> None:
        """The gradients that a component leaves of what it read."""
        for item in local.inputs:
            if item.source is not None and item.value.differentiable:
                form = form_of(item.value, local.layout, item.want)
                size = self._bytes(item.value, local.layout, item.want)
                self.alive.set((WAITING, m, form), size)

    def _sum_gradients(self, trained: Sequence[Holding], complete: Collection[str]) -> None:
        """Those that it leaves of its parameters."""
        for holding in trained:
            name = holding.tensor.name
            if name in complete and holding.summed:
                self.alive.free((SUMMED, name))  # it lies in its bucket
                self.scattered.add(holding)
            else:
                self.alive.set((SUMMED, name), float(holding.local_bytes))
