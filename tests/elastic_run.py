"""A run whose ranks end themselves: `python -m tests.elastic_run FILE PLAN EPOCHS [replicate=K |
compare=K | data=KIND | spike=STEP | batches=ranks | own=LOOP | resume=PATH | adapt=STEPS |
known=PLAN,...] [RANK:STEPS:PLACE ...] [room=BYTES] [switch@STEPS=PLAN] [freeze@STEPS]`, as the
command of an elastic launch.
Rank 0 of the end writes losses and parameters to FILE; FILE.begun is there once it trains. own: a
loop of its own in place of `fit`'s, whose batches come from `loader`, by `shard`, or are its
`rows`, or whose steps are made of `parts`, or that evaluates in `between`, or what is read `once`,
that has a `sampler` and workers, that takes batches `ahead`, `twice`, or `changed`. spike: goes
back behind this step.
rows=STEPS=ROWS,...: in plain PyTorch, with batches of so many rows behind so many steps. room:
a rank's memory behind one. adapt: the plan is, so many steps behind a loss. known: plans, as if
they were predicted to be the quickest."""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import synchromesh as sm
from synchromesh.adapt import decision
from synchromesh.checkpoint import switch
from synchromesh.checkpoint.model_state import ModelState
from synchromesh.checkpoint.peer_copies import PeerCopies
from synchromesh.cost.alive_bytes import copies_bytes
from synchromesh.data.cursor import Cursor
from synchromesh.data.loader import Batching, Loader
from synchromesh.engine.asynchronous import Worker
from synchromesh.engine.control_channel import ControlChannel
from synchromesh.engine.groups import Group
from synchromesh.engine.replica import Replica
from synchromesh.engine.update_server import Server
from synchromesh.engine.world import World
from synchromesh.launcher.generation import SLOT
from synchromesh.planning import rank_memory
from synchromesh.profiling import reprofile
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.trace.capture.batch import take_parts
from synchromesh.training import events
from synchromesh.training.adaptation import Adaptation
from synchromesh.training.fit import fit
from synchromesh.training.integrity import Spike, Spikes
from synchromesh.training.learning_rate import RateFactor, ScaledRate, advance
from synchromesh.training.loop import Loop
from synchromesh.training.replication import Replication
from synchromesh.values.plan import Plan
from tests.data.datasets import Sharded, Stateful

ROWS, BATCH = 56, 12
STEPS = -(-ROWS // BATCH)  # of an epoch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


class Tied(Net):
    """A weight of two names, which is used three times; a frozen one, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.mid, self.out, self.unused = (nn.Linear(16, 16) for _ in range(3))
        self.out.weight = self.mid.weight
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.mid(torch.tanh(self.mid(self.first(x))))
        out: Tensor = self.last(self.norm(self.out(middle)))
        return out


class Cased(Net):
    """The same, but traced once for few rows and once for many."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) > 10 else x + 0)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).sum()}


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    return [(row, (row.sum() > 0).long() + (row[0] > 1).long()) for row in rows]


class Shards(Sharded):
    def __iter__(self) -> Iterator[Any]:
        rows = samples()
        yield from (rows[n % ROWS] for _, n in super().__iter__())


class Stated(Stateful):
    def __iter__(self) -> Iterator[Any]:
        rows = samples()
        yield from (rows[n % ROWS] for _, n in super().__iter__())


def workload(data: str = "") -> sm.Workload:
    """data: `shards` or `stated`, a stream of six files, or that knows its state; usual data for a
    model that is `tied`, or `cased`."""
    streams: dict[str, Callable[[], Any]] = {
        "shards": lambda: Shards(9, 9, 9, 9, 9, 9, states=False), "stated": lambda: Stated(54),
    }  # fmt: skip
    models = {"tied": Tied, "cased": Cased}
    return sm.Workload(
        model=lambda: models.get(data, Net)().double(), loss=loss, metric=metric,
        train_data=streams.get(data, samples)(),
        valid_data=samples()[:10], batch_size=BATCH,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.97),
    )  # fmt: skip


class Faults:
    """Where this process ends itself. words: RANK:STEPS:PLACE; the rank is of the beginning, steps
    are done then. Places are what `install` names, and `behind` a step; behind one with a `!` the
    rank lives, and its call fails as one does where another rank is lost; with a `~` a bit of it
    flips."""

    def __init__(self, words: Sequence[str], begun: Path) -> None:
        self.begun = begun
        switches = [word.partition("=") for word in words if word.startswith("switch@")]
        self.switches = {int(of.partition("@")[2]): plan for of, _, plan in switches}
        self.known: list[Plan] = []
        self.room = next((int(w[5:]) for w in words if w.startswith("room=")), 0)
        self.freezes = next((int(w[7:]) for w in words if w.startswith("freeze@")), -1)
        split = [w.split(":") for w in words if w[:5] not in ("switc", "room=", "freez")]
        own = os.environ.get(SLOT, os.environ["LOCAL_RANK"])
        self.waits = [
            (int(n), p[:4], int(p[4:])) for _, n, p in split if p[:4] in ("wait", "best")
        ]
        self.sleeps = {int(n): float(p[5:]) for _, n, p in split if p.startswith("sleep")}
        self.mine = {(int(steps), place) for rank, steps, place in split if rank == own}
        self.trainer: sm.Trainer | None = None
        self.result: dict[str, Any] = {}
        self.seconds: list[float] = []  # of steps
        self.places = Counter[str]()  # how often each was come to
        self.epochs: list[tuple[int, float | None]] = []  # that have ended, with their losses

    def install(self, trainer: sm.Trainer) -> None:
        for place in ("step", "update", "evaluate", "save"):
            self.before(trainer, place, place)
        self.before(trainer._execution, "shift", "regroup")
        self.before(trainer._execution, "load", "load")
        self.behind(trainer._execution, "load", "loaded")
        self.behind(trainer.survival, "agree", "agree-all")
        self.before(World, "enter", "enter")
        self.before(Group, "all_reduce", "sum")
        self.before(Group, "start_exchange", "exchange")
        self.before(ControlChannel, "start", "agree")
        self.before(PeerCopies, "take", "copy")
        self.behind(PeerCopies, "restore", "restored")
        self.behind(ModelState, "move", "moved")
        self.before(Replication, "read", "room")
        self.before(Group, "exchange", "send")
        self.before(switch, "_exchange", "move")
        self.behind(Worker, "_post", "push")
        self.before(Server, "_update", "served")
        self.before(Replica, "take", "fetch")
        self.before(Worker, "end", "drain")

    def before(self, owner: Any, name: str, place: str) -> None:
        do: Callable[..., Any] = getattr(owner, name)

        def done(*args: Any, **named: Any) -> Any:
            self.at(place)
            return do(*args, **named)

        setattr(owner, name, done)

    def behind(self, owner: Any, name: str, place: str) -> None:
        do: Callable[..., Any] = getattr(owner, name)

        def done(*args: Any, **named: Any) -> Any:
            result = do(*args, **named)
            self.at(place)
            return result

        setattr(owner, name, done)

    def at(self, place: str) -> None:
        self.places[place] += 1
        self.wait(place)
        if self.trainer is not None and (self.trainer.steps, f"{place}~") in self.mine:
            self.mine.remove((self.trainer.steps, f"{place}~"))
            weight = self.trainer.model.parameters["first.weight"].data
            weight.view(-1).view(torch.int64)[0] ^= 1 << 30  # a bit of the mantissa
        if self.trainer is not None and (self.trainer.steps, place) in self.mine:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trainer is not None and (self.trainer.steps, f"{place}!") in self.mine:
            self.mine.remove((self.trainer.steps, f"{place}!"))
            raise RuntimeError("connection with rank 9 lost: it has ended")

    def wait(self, place: str) -> None:
        """Behind these steps for so long, `*:STEPS:sleepSECONDS`, or until there are as many
        ranks: `*:STEPS:waitRANKS`, and `bestRANKS` once the epoch behind them is the best one."""
        if self.trainer is None or place not in ("behind", "best"):
            return
        time.sleep(self.sleeps.get(self.trainer.steps, 0.0) if place == "behind" else 0.0)
        for steps, at, ranks in self.waits:
            here = (at == "best") == (place == "best") and steps == self.trainer.steps
            if here and self.trainer.world.size < ranks:
                own = self.trainer.world.member
                while own is not None and not own.told:
                    time.sleep(0.01)

    def take(self, event: events.FitEvent) -> None:
        match event:
            case events.Started(trainer):
                self.trainer = trainer
                if self.known:
                    Adaptation.known = self.known  # type: ignore[assignment, method-assign]
                if self.room:
                    memory = trainer.planning.memory
                    memory._mine, share = self.room, memory._share
                    rank_memory.memory_share = lambda world: share
                if self.mine:
                    self.install(trainer)
                self.begun.touch()
            case events.Saved(path) if path.name == "best":
                self.wait("best")
            case events.EpochEnded(epoch, _, loss):
                self.epochs.append((epoch, loss))
            case events.StepDone(seconds=seconds):
                self.seconds.append(seconds)
                self.at("behind")
                if self.trainer is not None and (self.trainer.steps, "hang") in self.mine:
                    time.sleep(1e6)
                if self.trainer is not None and self.trainer.steps == self.freezes:
                    self.trainer.model.parameters["norm.bias"].requires_grad_(False)
                if self.trainer is not None and self.trainer.steps in self.switches:
                    self.trainer.switch(self.switches.pop(self.trainer.steps))
            case events.Finished(trainer, result):
                parameters = {n: x.tolist() for n, x in trainer.state_dict().items()}
                found = {"losses": result.losses, "parameters": parameters}
                found["generations"] = [r.to_dict() for r in result.recoveries]
                found["decisions"] = [asdict(d) for d in result.decisions]
                found["seconds"], state = self.seconds, trainer.state
                found["places"] = self.places
                found["updates"], found["epochs"] = result.updates, self.epochs
                if (own := trainer.world.member) is not None:
                    held, adam = state.holdings.values(), 2.0  # bytes of state for one
                    predicted = copies_bytes(held, adam, state.ranks, own.hosts)[trainer.rank]
                    found["copies"] = [trainer.survival.replication.copies.bytes, predicted]
                self.result = {**found, "metrics": result.metrics, "rank": trainer.rank}


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """Each once the next one was taken."""
    before = None
    for batch in batches:
        if before is not None:
            yield before
        before = batch
    yield before


def jump(step: int) -> None:
    """The loss of this step counts as a spike, once."""
    look, left = Spikes.look, [step]

    def found(self: Spikes, first: int, losses: Sequence[float]) -> list[Spike]:
        look(self, first, losses)
        here = bool(left) and first <= left[0] < first + len(losses)
        self.new = [Spike(left.pop(), 9.0, 1.0, 99.0)] if here else []
        self.found += self.new
        return self.new

    Spikes.look = found  # type: ignore[method-assign]


def own_loop(kind: str, faults: Faults, plan: str, epochs: int, file: Path) -> None:
    own, losses = workload(), list[float]()
    torch.manual_seed(3)
    model = own.build()
    optimizer = own.build_optimizer(model.parameters())
    trainer = sm.prepare(
        model, optimizer, loss, own.example(seed=3), plan, seed=3,
        scheduler=own.build_scheduler(optimizer),
    )  # fmt: skip
    faults.take(events.Started(trainer, None, 0, True))
    if kind == "sampler":
        weights, generator = [1.0 + i % 3 for i in range(ROWS)], torch.Generator().manual_seed(5)
        sampler = WeightedRandomSampler(weights, ROWS, generator=generator)
        rows = trainer.loader(DataLoader(samples(), BATCH, sampler=sampler, num_workers=2))
    else:
        rows = trainer.loader(own.train_data, BATCH, shuffle=True, seed=3)
    whole = Loader(own.train_data, BATCH, lambda n: ((0, n),), Cursor(3), Batching(True))
    for _ in range(epochs):
        given = whole if kind in ("shard", "rows") else rows
        for batch in ahead(given) if kind == "ahead" else given:
            if kind == "parts":
                losses.append(float(trainer.backward(batch)))
                trainer.update()
            elif kind == "rows":
                ranges = trainer.own_rows(len(batch[1]))
                losses.append(float(trainer.step(take_parts(batch, ranges))))
            else:
                if kind == "between":
                    trainer.evaluate(trainer.loader(own.valid_data, BATCH), metric)
                given = trainer.shard(batch) if kind == "shard" else batch
                given = [x + 0 for x in batch] if kind == "changed" else given
                if kind == "twice":
                    trainer.step(given)
                losses.append(float(trainer.step(given)))
            faults.at("behind")
        held_out = trainer.loader(own.valid_data, BATCH)
        metrics = trainer.evaluate(iter(held_out) if kind == "once" else held_out, metric)
        trainer.save(file.with_suffix(".own"))
    parameters = {n: x.tolist() for n, x in trainer.state_dict().items()}
    if trainer.rank == 0:
        found = {"losses": losses, "parameters": parameters, "metrics": metrics}
        file.write_text(json.dumps(found))


def one_process(rows: dict[int, int], epochs: int, file: Path) -> None:
    """rows: of batches, behind so many steps; without a trainer."""
    own, losses = workload(), list[float]()
    torch.manual_seed(3)
    model = own.build()
    optimizer = own.build_optimizer(model.parameters())
    rate = RateFactor("none", BATCH, BATCH)
    scheduler = ScaledRate(optimizer, own.build_scheduler(optimizer), rate)
    loader = Loader(own.train_data, BATCH, lambda n: ((0, n),), Cursor(3), Batching(True))
    while loader.cursor.epoch < epochs:
        if len(losses) in rows:
            loader.batch_size = rows[len(losses)]
            scheduler.resize(loader.batch_size)
        for batch in loader:
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            advance(scheduler, len(batch[1]))
            losses.append(float(value.detach()))
            if len(losses) in rows:
                break
    parameters = {n: x.tolist() for n, x in model.state_dict().items()}
    file.write_text(json.dumps({"losses": losses, "parameters": parameters}))


def main(file: str, plan: str, epochs: str, *words: str, replicate: str = "auto") -> None:
    names = [
        "replicate", "own", "batches", "rows", "resume", "compare", "data", "spike", "adapt",
        "known",
    ]  # fmt: skip
    said = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    asked = {name: said[name] for name in names if name in said}
    words = tuple(word for word in words if word.partition("=")[0] not in names)
    torch.set_num_threads(1)
    folder = Path(file)
    faults = Faults(words, folder.with_suffix(".begun"))
    saves = bool(words) or not {"resume", "spike"}.isdisjoint(asked)
    saved = folder.with_suffix(".saved") if saves else None
    if "rows" in asked:
        pairs = [pair.split("=") for pair in asked["rows"].split(",")]
        return one_process({int(step): int(rows) for step, rows in pairs}, int(epochs), folder)
    if "own" in asked:
        return own_loop(asked["own"], faults, plan, int(epochs), folder)
    every = asked.get("compare")
    faults.known = [Plan.parse(text) for text in asked.get("known", "").split(",") if text]
    if "adapt" in asked:
        Loop.SETTLED = int(asked["adapt"])
        decision.LIMITS = replace(decision.LIMITS, measuring_share=9.0)
        faults.before(LiveFacts, "_besides", "all measured")
        faults.before(reprofile, "_devices_again", "devices sampled")
        faults.before(reprofile, "_links_again", "links sampled")
    if "spike" in asked:
        jump(int(asked["spike"]))
    fit(
        workload(asked.get("data", "")), plan, epochs=int(epochs), on_event=faults.take, seed=3,
        checkpoints=saved, replicate=asked.get("replicate", replicate),
        batches=asked.get("batches"), resume=asked.get("resume"),
        check_replicas=None if every is None else int(every), roll_back_spikes="spike" in asked,
        adapt="adapt" in asked,
    )  # fmt: skip
    if faults.result["rank"] == 0:
        folder.write_text(json.dumps(faults.result))


if __name__ == "__main__":
    main(*sys.argv[1:])
