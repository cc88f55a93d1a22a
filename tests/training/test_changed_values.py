"""Python numbers that the script sets between steps: read by the model or by the loss, they are
those of the step at hand, as in a plain loop."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.training import traces
from synchromesh.training.prepare import prepare
from tests.plain import Case, adamw, all_on_ranks, apart, exact, plain, sgd, under
from tests.ranks import RankFailed, run

D = torch.float64


@dataclass
class Settings:
    """An object of the user's own."""

    slope: float = 0.1


@dataclass(slots=True)
class Inner:
    """One without a table of attributes."""

    gain: float = 1.0


@dataclass
class Outer:
    """One that has another."""

    inner: Inner


GAIN, CONFIGURED = 1.0, Outer(Inner())


def gained(_: nn.Module, given: Any, found: Tensor) -> Tensor:
    """A hook, which reads a global."""
    return found * GAIN


class Nested(nn.Module):
    """Reads numbers of objects in objects and in containers, and calls what it has been given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 3)
        self.settings, self.held, self.function = Outer(Inner()), {"a": [Inner()]}, self.as_it_is
        self.activation = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.first.register_forward_hook(gained)
        self.double()

    def as_it_is(self, x: Tensor) -> Tensor:
        return x

    def doubled(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x)) * self.settings.inner.gain
        return self.last(self.function(x) * self.held["a"][0].gain)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Reads numbers of its own, of its layers and of an object, by which its graph differs."""

    rate = 1.0  # of the class

    def __init__(self, normed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        norm = nn.BatchNorm1d(9) if normed else nn.LayerNorm(9)
        self.norm, self.drop, self.last = norm, nn.Dropout(0.0), nn.Linear(9, 3)
        self.temperature, self.depth, self.gated = 1.0, 3, False
        self.scales, self.offset = [1.0, 1.0], torch.zeros(9, dtype=D)
        self.settings = Settings()
        self.steps_done = 0  # which no forward reads
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) + self.offset
        for block in self.blocks[: self.depth]:
            x = x + block(x).tanh() * self.scales[1]
        if self.gated:
            x = x * x.sigmoid()
        x = F.leaky_relu(x, self.settings.slope) * self.rate
        return self.last(self.drop(x)) / self.temperature  # type: ignore[no-any-return]


WEIGHT, OPTIONS = 1.0, SimpleNamespace(smoothing=0.0)


class Constants:
    decay = 1.0


def penalty(model: nn.Module) -> Tensor:
    factor = WEIGHT * Constants.decay * settings.scale
    return factor * sum(p.square().sum() for p in model.parameters())  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, label_smoothing=OPTIONS.smoothing) + 0.01 * penalty(model)


def made_loss() -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    """A loss with a number in its closure, and what sets it."""
    power = 1.0

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) * power, batch[1])

    def change(value: float) -> None:
        nonlocal power
        power = value

    return scaled, change


settings = ModuleType("settings")  # as one of the user's that is imported
settings.scale = 1.0
CLOSED, set_power = made_loss()
SMOOTHED = nn.CrossEntropyLoss()


def with_criterion(model: nn.Module, batch: Any) -> Tensor:
    return SMOOTHED(model(batch[0]), batch[1])  # type: ignore[no-any-return]


def rows(count: int, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=g, dtype=D), torch.randint(0, 3, (count,), generator=g)


BATCHES = [rows(n, n) for n in (8, 7, 5, 8)]


def sets(name: str, *values: Any) -> Callable[[nn.Module, int], None]:
    """Before step i the attribute is the i-th value."""

    def between(model: nn.Module, i: int) -> None:
        *path, key = name.split(".")
        setattr(functools.reduce(getattr, path, model), key, values[i])

    return between


def of_list(model: nn.Module, i: int) -> None:
    model.scales[1] = (1.0, 0.5, 0.5, 1.0)[i]  # type: ignore[operator, index]


def of_globals(_: nn.Module, i: int) -> None:
    global WEIGHT
    WEIGHT = (1.0, 2.0, 0.0, 1.0)[i]


def of_options(_: nn.Module, i: int) -> None:
    OPTIONS.smoothing = (0.0, 0.2, 0.2, 0.0)[i]


def of_class(_: nn.Module, i: int) -> None:
    Constants.decay = (1.0, 2.0, 2.0, 1.0)[i]


def of_module(_: nn.Module, i: int) -> None:
    settings.scale = (1.0, 2.0, 0.5, 0.5)[i]


def of_closure(_: nn.Module, i: int) -> None:
    set_power((1.0, 3.0, 3.0, 1.0)[i])


def of_criterion(_: nn.Module, i: int) -> None:
    SMOOTHED.label_smoothing = (0.0, 0.1, 0.1, 0.0)[i]


CHANGES: dict[str, tuple[Callable[[nn.Module, int], None], Callable[..., Tensor]]] = {
    "dropout": (sets("drop.p", 0.0, 1.0, 1.0, 0.0), loss),
    "momentum": (sets("norm.momentum", 0.1, 0.4, 0.4, 0.1), loss),
    "eps": (sets("norm.eps", 1e-5, 1e-2, 1e-2, 1e-5), loss),
    "temperature": (sets("temperature", 1.0, 2.0, 2.0, 0.5), loss),
    "depth": (sets("depth", 1, 3, 3, 1), loss),
    "flag": (sets("gated", False, True, False, True), loss),
    "class attribute": (sets("rate", 1.0, 0.5, 0.5, 1.0), loss),
    "object": (sets("settings.slope", 0.1, 0.3, 0.3, 0.1), loss),
    "list": (of_list, loss),
    "tensor": (
        sets("offset", *(torch.full((9,), x, dtype=D) for x in (0.0, 1.0, 0.5, 0.5))),
        loss,
    ),
    "global": (of_globals, loss),
    "namespace": (of_options, loss),
    "constants": (of_class, loss),
    "module": (of_module, loss),
    "closure": (of_closure, CLOSED),
    "criterion": (of_criterion, with_criterion),
}


GAINS = (1.0, 3.0, 3.0, 0.5)
CRITERION: nn.Module = nn.CrossEntropyLoss()


def with_nested(model: nn.Module, batch: Any) -> Tensor:
    return CRITERION(model(batch[0]), batch[1]) * CONFIGURED.inner.gain  # type: ignore[no-any-return]


WITH_GIVEN = functools.partial(
    lambda model, batch, to: with_nested(model, batch) * to.gain, to=SimpleNamespace(gain=1.0)
)


def of_hook(_: nn.Module, i: int) -> None:
    global GAIN
    GAIN = GAINS[i]


def of_replaced_criterion(_: nn.Module, i: int) -> None:
    global CRITERION
    CRITERION = nn.CrossEntropyLoss(label_smoothing=0.1 * GAINS[i] - 0.05)


def of_configured(_: nn.Module, i: int) -> None:
    CONFIGURED.inner.gain = GAINS[i]


def of_given(_: nn.Module, i: int) -> None:
    WITH_GIVEN.keywords["to"].gain = GAINS[i]


def of_held(model: Any, i: int) -> None:
    model.held["a"][0].gain = GAINS[i]


def of_function(model: Any, i: int) -> None:
    model.function = model.doubled if GAINS[i] == 3.0 else model.as_it_is


OF_OBJECTS: dict[str, Callable[[nn.Module, int], None]] = {
    "inner": sets("settings.inner.gain", *GAINS),
    "another inner": sets("settings.inner", *map(Inner, GAINS)),
    "another outer": sets("settings", *(Outer(Inner(x)) for x in GAINS)),
    "in containers": of_held,
    "method": of_function,
    "partial": sets("activation", *(functools.partial(F.leaky_relu, negative_slope=x)
                                    for x in GAINS)),
    "hook": of_hook,
    "criterion": of_replaced_criterion,
    "configured": of_configured,
    "given": of_given,
}  # fmt: skip


def nested() -> nn.Module:
    """A model, and the numbers elsewhere as at first."""
    model = Nested()
    for change in (of_hook, of_replaced_criterion, of_configured, of_given):
        change(model, 0)
    return model


class Looked:
    """Keeps its values in a dict of its own, as settings of many libraries do."""

    def __init__(self, **values: float) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> float:
        found: dict[str, float] = object.__getattribute__(self, "_values")
        if name not in found:
            raise AttributeError(name)
        return found[name]

    def __setattr__(self, name: str, value: float) -> None:
        self._values[name] = value  # type: ignore[index]


class Itself(dict[str, float]):
    """Whose items are its attributes; it has an answer of its own to all others."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def scaled() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    """A function, and what sets the number that it multiplies by."""
    by = 1.0

    def scale(x: Tensor) -> Tensor:
        return x * by

    def to(value: float) -> None:
        nonlocal by
        by = value

    return scale, to


class Held:
    """Of which a module has a method."""

    def __init__(self) -> None:
        self.gain = 1.0

    def scale(self, x: Tensor) -> Tensor:
        return x * self.gain


class Asking(nn.Module):
    """Asks for what is not there yet, of functions and objects that it was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 9), nn.Linear(9, 3)
        self.settings, self.looked, self.itself = Settings(), Looked(gain=1.0), Itself(gain=1.0)
        self.closed, self.close = scaled()
        self.other = Held()
        self.method, self.default = self.other.scale, lambda x, by=[1.0]: x * by[0]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.default(self.method(self.closed(torch.tanh(self.first(x)))))
        x = x * getattr(self, "late", 1.0) * getattr(self.settings, "late", 1.0)
        if hasattr(self, "shift"):
            x = x + self.shift
        return self.last(x * self.looked.gain * self.itself.gain)  # type: ignore[no-any-return]


GONE = "gone again"
ASKED: dict[str, Callable[[Any, int], None]] = {
    "late": lambda model, i: setattr(model, "late", GAINS[i]) if i else None,
    "asked for": lambda model, i: setattr(model, "shift", GAINS[i]) if i else None,
    "late of an object": lambda model, i: setattr(model.settings, "late", GAINS[i]) if i else None,
    GONE: lambda model, i: vars(model).update(late=2.0) if i == 1 else (
        vars(model).pop("late", None) and None),
    "looked up": lambda model, i: setattr(model.looked, "gain", GAINS[i]),
    "of itself": lambda model, i: setattr(model.itself, "gain", GAINS[i]),
    "closure": lambda model, i: model.close(GAINS[i]),
    "method of another": lambda model, i: setattr(model.other, "gain", GAINS[i]),
    "default": lambda model, i: model.default.__defaults__[0].__setitem__(0, GAINS[i]),
}  # fmt: skip


Change = Callable[[Any, int], None]


def in_turn(build: Callable[[], nn.Module], loss: Any, changes: dict[str, Change]) -> Case:
    """In each step after the first one another value changes, and no other: a change that is
    overlooked shows in that step's loss."""
    each = list(changes.items())

    def between(model: nn.Module, i: int) -> None:
        if i:
            name, change = each[i - 1]
            change(model, 3 if name == "another inner" else 1)  # which has had the other gain

    return Case(build, loss, [rows(8 - i % 3, i) for i in range(len(each) + 1)], between=between)


def test_what_is_asked_for_in_other_ways_is_that_of_the_step() -> None:
    changes = {name: change for name, change in ASKED.items() if name != GONE}
    again = Case(Asking, loss, BATCHES, between=ASKED[GONE])
    for asking in (in_turn(Asking, loss, changes), again):
        (found,) = exact(asking, "single", 1)
        assert not found.opaque and not found.warned


def test_values_of_objects_in_objects_are_those_of_the_step() -> None:
    exact(in_turn(nested, WITH_GIVEN, OF_OBJECTS), "single", 1)


def weighs(_: nn.Module, i: int) -> None:
    global WEIGHT
    WEIGHT = 1.0 - 0.05 * i


EVERY_STEP: dict[str, tuple[Callable[[nn.Module, int], None], Callable[..., Tensor]]] = {
    "anneals": (sets("temperature", *(1.0 + 0.1 * i for i in range(9))), loss),
    "forgets": (sets("norm.momentum", *(0.1 + 0.01 * i for i in range(9))), loss),
    "weighs": (weighs, loss),
    "closes": (lambda _, i: set_power(1.0 + 0.1 * i), CLOSED),
}
MANY = [rows(8 - i % 3, i) for i in range(9)]


def built(normed: bool = True) -> nn.Module:
    """A model, and the loss's numbers as at first: an earlier case may have left others."""
    model = Net(normed)
    for change in (of_globals, of_options, of_class, of_module, of_closure, of_criterion):
        change(model, 0)
    return model


def unnormed() -> nn.Module:
    return built(normed=False)


def case(name: str, normed: bool = True, micro_batches: int = 1) -> Case:
    """Of a model with batch norm, or with one that does not care for how rows are divided."""
    between, function = (CHANGES | EVERY_STEP)[name]
    batches, options = MANY if name in EVERY_STEP else BATCHES, {"sync_batch_norm": normed}
    build, optimizer = built if normed else unnormed, adamw if name == "depth" else sgd
    return Case(build, function, batches, optimizer, None, between, micro_batches, options)


@pytest.mark.slow
def test_each_step_has_its_numbers() -> None:
    of_loss = {name: change for name, (change, of) in CHANGES.items() if of is loss}
    del of_loss["depth"]  # which is another at first
    of_loss["dropout"] = of_loss.pop(
        "dropout"
    )  # the last one: of what comes before nothing is left
    others = [case(name) for name in CHANGES if name not in of_loss]
    for each in (in_turn(built, loss, of_loss), *others):
        (found,) = exact(each, "single", 1)
        assert not found.opaque and not found.warned


STAGES = "data; @stages=0:first/1:blocks.1; @micro_batches=3"
ON_TWO = {
    "tensor": [("temperature", {}), ("depth", {}), ("closure", {}), ("anneals", {})],
    "data": [("momentum", {}), ("object", {"micro_batches": 2, "normed": False})],
    "sharded-data; blocks.*=tensor": [("depth", {}), ("dropout", {})],
    "single": [("flag", {})],  # where one rank is idle
    STAGES: [("namespace", {"normed": False})],
}


@pytest.mark.wide(2)
@pytest.mark.parametrize("plan", ON_TWO)
def test_on_ranks_and_stages_and_micro_batches(plan: str) -> None:
    cases = [(case(name, **more), plan) for name, more in ON_TWO[plan]]
    for of_rank in all_on_ranks(cases, ranks=2):
        for (each, _), outcome in zip(cases, of_rank, strict=True):
            gap = apart(outcome, plain(each))
            assert gap <= 1e-10, f"differs by {gap:.1e}; {outcome.losses}"
            assert not outcome.opaque, outcome.opaque


class Centred(Net):
    """From its second block on its rows depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks[: self.depth]):
            x = block(x).tanh()
            x = x - x.mean(0) if i else x
        return self.last(x)  # type: ignore[no-any-return]


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()  # type: ignore[no-any-return]


def test_rows_that_come_to_depend_on_each_other_while_parameters_are_cut() -> None:
    exact(Case(Centred, squares, BATCHES, between=sets("depth", 1, 3, 3, 1)), "sharded-data", 2)


# How many traces there are


LOGGER = logging.getLogger("users")


def test_loggers_that_code_names_are_not_looked_into() -> None:
    """Torch asks its own loggers tens of thousands of times in a trace."""
    noting: list[bool] = []

    def logs(model: nn.Module, batch: Any) -> Tensor:
        LOGGER.debug("a step")
        noting.append("__getattribute__" in vars(logging.Logger))
        return loss(model, batch)

    step = trace(Net(), logs, BATCHES[0], training=True)
    assert not any(noting) and not any(read.owner is LOGGER for read in step.read)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets whether each trace that is made from now on has inputs for numbers."""
    made: list[bool] = []
    trace = traces.capture

    def capture(*args: Any, **more: Any) -> Any:
        made.append(bool(more["numbers"]))
        return trace(*args, **more)

    monkeypatch.setattr(traces, "capture", capture)
    return made


def test_what_nothing_reads_takes_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(model: nn.Module, i: int) -> None:
        model.steps_done = i  # type: ignore[assignment]
        model.noted = f"step {i}"  # type: ignore[assignment]

    made = counted(monkeypatch)
    under(Case(Net, loss, BATCHES, between=between), "single")
    assert made == [False]


def test_few_values_take_few_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    batches = [rows(6, n) for n in range(9)]
    between = sets("gated", *(bool(i % 2) for i in range(9)))
    turns = Case(Net, loss, batches, between=between)
    assert apart(under(turns, "single"), plain(turns)) <= 1e-12
    assert made == [False, False]


@pytest.mark.parametrize("name", ["anneals", "weighs", "closes"])
def test_a_number_of_every_step_becomes_an_input(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counted(monkeypatch)
    outcome = under(case(name), "single")
    assert apart(outcome, plain(case(name))) <= 1e-12
    assert made == [False, False, False, True] and not outcome.warned


def test_one_that_cannot_be_an_input_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    outcome = under(case("forgets"), "single")
    assert apart(outcome, plain(case("forgets"))) <= 1e-12
    (text,) = outcome.warned
    assert "norm.momentum has changed 7 times" in text and "0-d tensor" in text
    assert made.count(True) == 1 and len(made) == 10


def test_a_branch_on_a_number_keeps_it_from_being_an_input() -> None:
    """Else steps on the other side of the branch would be wrong."""

    class Branching(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if self.temperature > 1.4 else x * 2)

    between = sets("temperature", *(1.0 + 0.1 * i for i in range(9)))
    branching = Case(Branching, loss, [rows(6, n) for n in range(9)], between=between)
    assert apart(under(branching, "single"), plain(branching)) <= 1e-12


def test_metrics_have_the_numbers_of_now() -> None:
    model = Net()
    trainer = prepare(model, sgd(model), loss, BATCHES[0], "single")
    held_out = trainer.loader(Rows(BATCHES[0]), batch_size=3)

    def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"sum": (model(batch[0]) * WEIGHT).square().sum()}

    for i in range(5):
        of_globals(model, i % 3)
        model.temperature = 1.0 + i
        found = trainer.evaluate(held_out, metric)
        with torch.no_grad(), trainer.model.open() as plain_model:
            expected = metric(plain_model.eval(), BATCHES[0])["sum"].item() / 8
            plain_model.train()
        assert found["sum"] == pytest.approx(expected, rel=1e-12)
    trainer.close()


class Rows:
    """A data set of the rows of a batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch[0])

    def __getitem__(self, i: int) -> Any:
        return tuple(x[i] for x in self.batch)


# Ranks that differ


def other_on_one_rank(name: str, value: Any) -> None:
    model = Net()
    trainer = prepare(model, sgd(model), loss, BATCHES[0], "data", sync_batch_norm=True)
    trainer.step(trainer.shard(BATCHES[0]))
    if trainer.rank == 1:
        sets(name, value)(model, 0)
    trainer.step(trainer.shard(BATCHES[0]))


def test_ranks_with_other_numbers_are_an_error_on_all() -> None:
    with Case(Net, loss, BATCHES).one_trace("data", 2), pytest.raises(RankFailed) as raised:
        run(2, other_on_one_rank, "drop.p", 0.5)
    assert "other numbers" in str(raised.value)


def reads_its_rank() -> list[float]:
    """As code does that names its device, or tells of losses on one rank alone."""
    model, rank = Net(), torch.distributed.get_rank()
    device = torch.device("cpu", rank)

    def told(model: nn.Module, batch: Any) -> Tensor:
        found = loss(model, [x.to(device.type) for x in batch])
        return found * 1.0 if rank == 0 else found

    trainer = prepare(model, sgd(model), told, BATCHES[0], "data", sync_batch_norm=True)
    losses = [float(trainer.step(trainer.shard(b))) for b in BATCHES]
    trainer.close()
    return losses


def test_what_each_rank_has_of_its_own_from_the_start_may_be_read() -> None:
    expected = plain(Case(Net, loss, BATCHES)).losses
    for found in run(2, reads_its_rank):
        assert found == pytest.approx(expected, rel=1e-10)


def switches_with_others() -> None:
    model = Net()
    trainer = prepare(model, sgd(model), loss, BATCHES[0], "data", sync_batch_norm=True)
    if trainer.rank == 1:
        model.drop.p = 0.5
    trainer.switch("tensor")


def test_so_they_are_in_a_switch() -> None:
    with Case(Net, loss, BATCHES).one_trace("data", 2), pytest.raises(RankFailed) as raised:
        run(2, switches_with_others)
    assert "other numbers" in str(raised.value)


def test_numbers_change_between_accumulations_and_not_within() -> None:
    model = Net()
    trainer = prepare(model, sgd(model), loss, BATCHES[0], "single")
    trainer.backward(BATCHES[0], last=False)
    model.temperature = 2.0
    with pytest.raises(ValueError, match="modes, masks or numbers it reads"):
        trainer.backward(BATCHES[1])
    trainer.close()
