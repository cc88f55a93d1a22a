"""Bad input to the trainer: one sentence with numbers and remedy, on every rank, and never a
hang.
"""

import re
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.ranks import run
from tests.traces import shared
from tests.training.test_trainer_features import Net, Rows, adamw, batch, mean_loss

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")


def fault(do: Callable[[], object]) -> str:
    try:
        do()
    except (ValueError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Renamed(nn.Module):
    """A model of the shapes of another one."""

    def __init__(self, order: tuple[str, str]) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(6, 6).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def start(model: nn.Module, plan: str = "data", **settings: Any) -> Trainer:
    optimizer = settings.pop("optimizer", adamw)(model)
    return prepare(model, optimizer, settings.pop("loss", mean_loss), batch(8), plan, **settings)


def at_start() -> dict[str, str]:
    """Ranks that do not agree, before anything is trained."""
    rank = dist.get_rank()
    adam = lambda m: torch.optim.Adam(m.parameters(), lr=0.01 * (1 + rank))  # noqa: E731
    other = nn.Linear(2, 2)

    def foreign(m: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*m.parameters(), *(other.parameters() if rank else ())])

    rows = lambda: prepare(m := Net(), adamw(m), mean_loss, batch(8 + rank))  # noqa: E731
    names = ("a", "b") if rank else ("b", "a")
    return {
        "names": fault(lambda: start(Renamed(names))),
        "seed": fault(lambda: start(Net(), seed=rank)),
        "plan": fault(lambda: start(Net(), "tensor" if rank else "data")),
        "frozen": fault(lambda: start(Net(frozen=bool(rank)))),
        "settings": fault(lambda: start(Net(), optimizer=adam)),
        "foreign": fault(lambda: start(Net(), optimizer=foreign)),
        "example": fault(rows),
        "kind": fault(lambda: start(Net(), optimizer=adamw if rank else adam)),
    }


def misread(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def always_raises() -> str:
    with pytest.raises(TypeError) as raised:
        start(Net(), loss=misread)
    return f"{raised.traceback[-1].name}: {raised.value}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_raises_of_the_example_is_told_as_it_is(ranks: int) -> None:
    said = "misread: tuple indices must be integers or slices, not str"
    assert run(ranks, always_raises) == [said] * ranks


def test_ranks_that_disagree_at_the_start_are_told_so_on_all() -> None:
    first, second = run(2, at_start)
    assert first == second
    expected = {
        "names": r"the model's tensors: .*'b.weight' on rank 0, 'a.weight' on rank 1; start",
        "seed": "the seed: 0 on rank 0, 1 on rank 1",
        "plan": "the plan: 'data' on rank 0, 'tensor' on rank 1",
        "frozen": "the model's tensors: True on rank 0, False on rank 1",
        "settings": "settings: 'lr=0.01' on rank 0, 'lr=0.02' on rank 1",
        "foreign": r"rank 1: the optimizer has 2 parameters \(shapes .* that are not the model's",
        "example": "the example batch: 8 on rank 0, 9 on rank 1",
        "kind": "the optimizer: 'Adam' on rank 0, 'AdamW' on rank 1",
    }
    for key, pattern in expected.items():
        assert re.search(pattern, first[key]), first[key]


class Closed(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def other_kinds() -> dict[str, str]:
    adam = torch.optim.AdamW
    net, lazy = Net(), nn.LazyLinear(4)
    with torch.inference_mode():
        inferred = Net()
    make: Callable[..., Any] = prepare
    return {
        "all": fault(lambda: make(Net, adam, None, batch(8), scheduler=adam, seed=1.5, timeout=3)),
        "nothing": fault(lambda: make(net, None, mean_loss, batch(8))),
        "lazy": fault(lambda: make(lazy, adam(lazy.parameters()), mean_loss, batch(8))),
        "inferred": fault(lambda: make(inferred, adamw(inferred), mean_loss, batch(8))),
        "closure": fault(lambda: start(Net(), optimizer=lambda m: Closed(m.parameters()))),
        "device": fault(lambda: start(Net(), device="cudda")),
        "half": fault(lambda: start(Net(), autocast=torch.float16)),
        "criterion": fault(lambda: start(Net(), loss=nn.CrossEntropyLoss())),
        "functional": fault(lambda: start(Net(), loss=F.mse_loss)),
        "no losses": fault(lambda: start(Net(), loss={})),
        "names of losses": fault(lambda: start(Net(), loss={0: mean_loss, 1: mean_loss})),
    }


def test_arguments_of_another_kind() -> None:
    expected = {
        "all": "^ValueError: prepare: model should be an nn.Module, not the class Net; optimizer "
        r"should be an optimizer .*, not the class AdamW; loss should be .*, not None; scheduler "
        "should .*; seed should be a whole number, not of type float; timeout should be .* int$",
        "nothing": r"like torch.optim.AdamW\(model.parameters\(\)\), not None",
        "lazy": "ValueError: the model's weight has no shape yet",
        "inferred": "made under torch.inference_mode",
        "closure": "the optimizer Closed is stepped with closure, which",
        "device": "ValueError: 'cudda' names no device",
        "half": r"autocast should be None or torch.bfloat16 \(float16.*, not torch.float16$",
        "criterion": r"loss should be a function loss\(model, batch\), like .* CrossEntropyLoss$",
        "functional": r"loss should be a function loss\(model, batch\), like .* type function$",
        "no losses": r"loss should be a function .*, or a dict of such by name, not an empty one$",
        "names of losses": "prepare: a loss's name should be a text, not of type int$",
    }
    (found,) = run(1, other_kinds)
    for key, pattern in expected.items():
        assert re.search(pattern, found[key]), (key, found[key])


def in_training() -> tuple[dict[str, str], float, bool]:
    """Ranks that are given other batches; afterwards training goes on."""
    rank = dist.get_rank()
    before = dist.group.WORLD
    trainer = start(Net(), "tensor")
    x, y = batch(8)
    sentences = {
        "shapes": fault(lambda: trainer.step((x[:, : 5 + rank], y))),
        "rows": fault(lambda: trainer.step((x[: 7 + rank], y[: 7 + rank]))),
        "other rows": fault(lambda: trainer.step((x + rank, y))),
        "torn": fault(lambda: trainer.step((x, y[: 8 - rank]))),
        "structure": fault(lambda: trainer.step({"x": x, "y": y} if rank else (x, y))),
        "shared": fault(lambda: trainer.step((x, y, torch.tensor(0.5 + rank)))),
        "numbers": fault(lambda: trainer.step((x, y, 3 + rank))),
        "nothing": fault(lambda: trainer.step((x[:0], y[:0]))),
        "micro": fault(lambda: trainer.step((x, y), micro_batches=0)),
        "call": fault(lambda: trainer.model.module(x)),
        "plan": fault(lambda: trainer.switch("data; hed=tensor")),
        "degrees": fault(lambda: trainer.switch("hybrid:tensor=3")),
        "switch": fault(lambda: trainer.switch("tensor" if rank else "data")),
        "micro-batches": fault(lambda: trainer.step((x, y), micro_batches=1 + rank)),
    }
    evaluated = (trainer.evaluate, [(x, y)] * (1 + rank), lambda m, b: {"n": mean_loss(m, b)})
    alone: dict[str, Callable[[], object]] = {
        "save": lambda: trainer.save("nowhere"),
        "resume": lambda: trainer.resume("nowhere"),
        "export": lambda: trainer.export("nowhere"),
        "state_dict": trainer.state_dict,
        "predict": trainer.predict,
        "evaluate": partial(*evaluated),
        "gather_numbers": lambda: trainer.gather_numbers(1),
    }
    for name, call in alone.items():  # on one rank; the other trains
        sentences[name] = fault(call if rank == 0 else lambda: trainer.step((x, y)))
    sentences["uneven evaluation"] = fault(partial(*evaluated))
    trainer.optimizer.param_groups[0]["lr"] *= 1 + rank
    sentences["settings"] = fault(lambda: trainer.step((x, y)))
    trainer.optimizer.param_groups[0]["lr"] /= 1 + rank
    trainer.model.module.requires_grad_(rank == 0)
    sentences["frozen"] = fault(lambda: trainer.step((x, y)))
    trainer.model.module.requires_grad_(True)
    value = float(trainer.step(trainer.shard(batch(8))))
    trainer.close()
    mine = torch.ones(1)
    dist.all_reduce(mine)  # the caller's default group is as it was
    return sentences, value, dist.group.WORLD is before and mine.item() == 2


def test_ranks_with_other_batches_are_told_so_on_all() -> None:
    expected = {
        "shapes": r"ranks \[1\] have .* another structure or shape than rank 0: .*pad",
        "rows": r"ranks \[0, 1\] work on the same rows .* \(rows \[7, 8\]\); use trainer.loader",
        "other rows": r"ranks \[0, 1\] work on the same rows but were given different batches",
        "torn": r"rank 1: the tensors of a batch must have the same number of .* got \[7, 8\]",
        "structure": r"ranks \[1\] have a batch of another structure",
        "shared": r"ranks \[1\] have other values than rank 0 of what all rows share .*: seed",
        "numbers": r"ranks \[1\] have other values than rank 0 of what all rows share .*: seed",
        "nothing": "at least one row",
        "micro": "micro_batches must be at least 1, got 0",
        "call": r"held by Synchromesh.*trainer.step\(batch\).*trainer.whole\(\)",
        "plan": "pattern 'hed' matches no component; did you mean 'head'",
        "degrees": r"data\(1\) x tensor\(3\) != 2|data\(0\)|!= 2 devices",
        "switch": "ranks came to different partitions",
        "micro-batches": r"ranks \[1\] are at another step than rank 0: .*`micro_batches`",
        "gather_numbers": "rank 0 is in prepare, in gather_numbers .*, rank 1 in step or backward",
        "uneven evaluation": "ranks .0. have no more batches while the others have",
        "settings": r"ranks \[1\] have other settings of the optimizer than rank 0",
        "frozen": r"ranks \[1\] have a model with other frozen parameters",
    } | {
        name: f"rank 0 is in {name}, rank 1 in step or backward: every rank calls .*alike"
        for name in ("save", "resume", "export", "state_dict", "predict", "evaluate")
    }
    whole = Net()
    value = mean_loss(whole, batch(8)).item()
    with shared("Net", whole, mean_loss, batch(8), "tensor"):
        answers = run(2, in_training)
    for sentences, found, untouched in answers:
        for key, pattern in expected.items():
            assert re.search(pattern, sentences[key]), (key, sentences[key])
        assert found == pytest.approx(value) and untouched


def one_rank_works() -> tuple[dict[str, str], float]:
    """Rank 0 begins before it knows what the idle rank does; afterwards training goes on."""
    trainer = start(Net(), "single")
    rank, own = dist.get_rank(), trainer.shard(batch(8))
    sentences: dict[str, str] = {}
    for idle in (0, 1):
        elsewhere = partial(trainer.gather_numbers, 1)
        call = elsewhere if rank == idle else partial(trainer.step, own)
        sentences[f"rank {idle} elsewhere"] = fault(call)
    trainer.model.module.requires_grad_(rank == 0)
    sentences["frozen"] = fault(lambda: trainer.step(own))
    trainer.model.module.requires_grad_(True)
    x, y = batch(8)
    sentences["torn"] = fault(lambda: trainer.step(own if rank else (x, y[:7])))
    sentences["nothing"] = fault(lambda: trainer.step((x[:0], y[:0])))
    trainer.stop_request = 3 + rank
    value = float(trainer.step(own))
    assert trainer.agreed_stop_request == 4
    trainer.close()
    return sentences, value


def test_a_rank_that_works_alone_learns_of_the_idle_ones_faults() -> None:
    expected = {
        "rank 0 elsewhere": "rank 0 is in prepare, in gather_numbers .*, rank 1 in step",
        "rank 1 elsewhere": "rank 0 is in step or backward, rank 1 in prepare, in gather_numbers",
        "frozen": r"ranks \[1\] have a model with other frozen parameters",
        "torn": r"rank 0: the tensors of a batch must have the same number of .* got \[7, 8\]",
        "nothing": "at least one row",
    }
    whole = Net()
    with shared("Net", whole, mean_loss, batch(8), "single"):
        answers = run(2, one_rank_works)
    for sentences, found in answers:
        for key, pattern in expected.items():
            assert re.search(pattern, sentences[key]), (key, sentences[key])
        assert found == pytest.approx(mean_loss(whole, batch(8)).item())


def test_close_gives_the_model_back() -> None:
    def closed() -> bool:
        trainer = start(model := Net())
        trainer.close()
        return bool(model(batch(2)[0]).shape == (2, 4))

    assert run(1, closed) == [True]


def left_cut() -> list[str]:
    whole = adamw(Net()).state_dict()
    trainer = start(model := Net(), "tensor")
    for of_optimizer in (
        trainer.optimizer.state_dict,
        partial(trainer.optimizer.load_state_dict, whole),
    ):
        assert "trainer.save and trainer.resume keep it" in fault(of_optimizer)
    told = [fault(lambda: model(batch(2)[0]))]
    trainer.close()
    again = partial(start, model, "tensor")
    return [*told, fault(lambda: model(batch(2)[0])), fault(model.state_dict), fault(again)]


def test_close_leaves_a_cut_model_that_says_so() -> None:
    for held, *left in run(2, left_cut):
        assert "held by Synchromesh" in held and "close()" not in held
        assert ["left cut over devices" in sentence for sentence in left] == [True] * 3, left


def changed_by_hand() -> dict[str, str]:
    """What is done to a model that is prepared, or to a trainer that is closed."""
    found = {}
    for what in ("replaced", "parameter", "added"):
        trainer = start(Net())
        module = trainer.model.module
        match what:
            case "replaced":
                module.head = nn.Linear(6, 3).double()
            case "parameter":
                module.head.weight = nn.Parameter(module.head.weight.detach().clone())
            case "added":
                module.extra = nn.Linear(6, 3).double()
        found[what] = fault(lambda t=trainer: t.step(t.shard(batch(8))))  # type: ignore[misc]
        trainer.close()
    foreign = start(Net())
    foreign.optimizer.add_param_group({"params": [*nn.Linear(2, 2).parameters()]})
    found["group"] = fault(lambda: foreign.step(foreign.shard(batch(8))))
    found["saved group"] = fault(lambda: foreign.save("nowhere"))
    foreign.close()
    found["closed"] = fault(
        lambda: trainer.evaluate([batch(8)], lambda m, b: {"n": mean_loss(m, b)})
    )
    net = Net()
    net.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    found["behind"] = fault(lambda: start(net))
    net = Net()
    net.head.weight.register_hook(lambda g: g.clamp(-1, 1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        start(net).close()
    found["hook"] = "".join(str(w.message) for w in told)
    return found


def test_a_model_that_is_changed_by_hand_is_told_so() -> None:
    first, second = run(2, changed_by_hand)
    assert "head.weight has a gradient hook" in first.pop("hook") and not second.pop("hook")
    assert first == second
    expected = {
        "replaced": "the model's head is another object than the one that was prepared",
        "parameter": "the model's head.weight is another object",
        "added": r"parameters that it was prepared without: extra.weight, extra.bias; ",
        "group": "^ValueError: the optimizer has 2 parameters .* that are not the model's",
        "saved group": "the optimizer has 2 parameters .* that are not the model's",
        "closed": "this trainer is closed",
        "behind": "the parameter head.weight has a hook behind its gradient",
    }
    for key, pattern in expected.items():
        assert re.search(pattern, first[key]), (key, first[key])


def with_own_forward() -> tuple[float, float, bool, float]:
    patched = Net()
    patched.forward = lambda x: Net.forward(patched, 2 * x)  # type: ignore[method-assign]
    plain = mean_loss(patched, batch(8)).item()
    trainer = start(patched)
    blocked = "held by Synchromesh" in fault(lambda: patched(batch(8)[0]))
    found = float(trainer.step(trainer.shard(batch(8))))
    before = trainer.state_dict()
    trainer.close()
    fresh = Net()
    fresh.load_state_dict(before)
    after = float((patched(batch(8)[0]) - fresh(2 * batch(8)[0])).detach().abs().max())
    return plain, found, blocked, after


def test_a_forward_of_the_model_alone_is_the_one_that_trains() -> None:
    for plain, found, blocked, after in run(2, with_own_forward):
        assert found == pytest.approx(plain, rel=1e-12) and blocked and after == 0


class Learnable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]) * self.scale, b[1])


def closing_over(own: nn.Module) -> Callable[[nn.Module, Any], Tensor]:
    return lambda m, b: own(m, b)


def refused() -> dict[str, str]:
    lbfgs = lambda m: torch.optim.LBFGS(m.parameters())  # noqa: E731
    factors = lambda m: torch.optim.Adafactor(m.parameters())  # noqa: E731
    whole = start(Net(), "data", optimizer=factors)
    sentences = {"switch": fault(lambda: whole.switch("data; head=tensor"))}
    whole.step(whole.shard(batch(8)))
    whole.close()
    return sentences | {
        "loss": fault(lambda: start(Net(), loss=Learnable())),
        "closure": fault(lambda: start(Net(), loss=closing_over(Learnable()))),
        "lbfgs": fault(lambda: start(Net(), optimizer=lbfgs)),
        "pieces": fault(lambda: start(Net(), "data; head=tensor", optimizer=factors)),
        "scalar": fault(lambda: start(Net(), loss=lambda m, b: m(b[0]))),
        "detached": fault(lambda: one_step(lambda m, b: mean_loss(m, b).detach())),
        "named": fault(lambda: one_step(lambda m, b: {"a": mean_loss(m, b), "n": b[1].sum()})),
    }


def one_step(loss: Any) -> None:
    trainer = start(Net(), loss=loss)
    try:
        trainer.step(trainer.shard(batch(8)))
    finally:
        trainer.close()


def test_what_would_train_wrongly_is_refused() -> None:
    with shared("Net", Net(), mean_loss, batch(8), "data", "data; head=tensor"):
        answers = run(2, refused)
    for sentences in answers:
        for key in ("loss", "closure"):
            pattern = r"learnable parameters of its own \(.*4.*\).*part of the model"
            assert re.search(pattern, sentences[key]), sentences[key]
        assert "LBFGS cannot be used" in sentences["lbfgs"]
        assert re.search("Adafactor cannot update pieces.*the plan 'data'", sentences["pieces"])
        assert sentences["pieces"] == sentences["switch"]
        assert "2 dimensions: return a scalar" in sentences["scalar"]
        assert "loss depends on no parameter that is trained" in sentences["detached"]
        assert "loss returned a dict (a, n), as metrics do" in sentences["named"]


def with_teacher() -> float:
    """A loss that holds a frozen model of its own."""
    teacher = Net().requires_grad_(False)

    class Distil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = teacher

        def forward(self, model: nn.Module, b: Any) -> Tensor:
            return (model(b[0]) - self.teacher(b[0]) * 2).square().mean()

    trainer = start(Net(), "tensor", loss=Distil())
    value = float(trainer.step(trainer.shard(batch(8))))
    trainer.close()
    return value


def test_a_frozen_part_of_the_loss_is_a_constant() -> None:
    expected = Net()(batch(8)[0]).square().mean().item()
    assert run(2, with_teacher) == pytest.approx([expected] * 2)


def on_disk(folder: str) -> dict[str, str]:
    rank = dist.get_rank()
    trainer = start(Net(), "tensor")
    (Path(folder) / "file").touch()
    trainer.step(trainer.shard(batch(8)))
    trainer.save(f"{folder}/good", extra={"epoch": 3})
    sentences = {
        "unwritable": fault(lambda: trainer.save(f"{folder}/file/checkpoint")),
        "export": fault(lambda: trainer.export(f"{folder}/file/model.safetensors")),
        "extra is kept": fault(lambda: trainer.save(f"{folder}/x", {"x": torch.ones(1 + rank)})),
        "missing": fault(lambda: trainer.resume(f"{folder}/nowhere")),
    }
    other = start(Renamed(("a", "b")))
    sentences["model"] = fault(lambda: other.resume(f"{folder}/good"))
    sentences["after"] = str(len(other.optimizer.state))
    other.close()
    one_each = lambda m: [{"params": [p]} for p in m.parameters()]  # noqa: E731
    for key, kind in {"groups": torch.optim.AdamW, "kind": torch.optim.SGD}.items():
        another = start(Net(), optimizer=lambda m, kind=kind: kind(one_each(m), lr=0.1))
        sentences[key] = fault(lambda t=another: t.resume(f"{folder}/good"))  # type: ignore[misc]
        another.close()
    from synchromesh.checkpoint import checkpoint

    checkpoint.save(f"{folder}/foreign", {}, {"x": 1}, trainer.world)
    sentences["foreign"] = fault(lambda: trainer.resume(f"{folder}/foreign"))
    mine = "nowhere" if rank else "good"  # rank 0's counts, as in saving
    sentences["extra"] = str(trainer.resume(f"{folder}/{mine}"))
    trainer.export(f"{folder}/good.safetensors")
    trainer.close()
    missing = f"{folder}/{mine}.safetensors"  # on rank 1 alone
    sentences["weights"] = fault(lambda: start(Net(), weights=missing))
    assert rank in (0, 1)
    return sentences


def test_disks_give_checkpoint_errors(tmp_path: Path) -> None:
    assert issubclass(CheckpointError, ValueError)
    expected = {
        "unwritable": "CheckpointError: .*file/checkpoint: cannot .*(Not a directory|File exists)",
        "extra is kept": "CheckpointError: .*/x: extra cannot be kept: Object of type Tensor",
        "export": "CheckpointError: .*cannot be written: (Not a directory|File exists)",
        "missing": "CheckpointError: .*nowhere",
        "model": "CheckpointError: .*does not fit",
        "after": "0",
        "groups": r"CheckpointError: .*other parameter groups",
        "kind": "CheckpointError: .*does not fit: it was saved with the optimizer AdamW, this is",
        "foreign": "CheckpointError: .*is no checkpoint of a trainer",
        "extra": r"\{'epoch': 3\}",
        "weights": "CheckpointError: .*there is no such file",
    }
    with shared("Net", Net(), mean_loss, batch(8), "data"):
        first, second = run(2, on_disk, str(tmp_path))
    assert first == second
    for key, pattern in expected.items():
        assert re.search(pattern, first[key]), (key, first[key])


def loaders() -> tuple[bool, str, int, list[int]]:
    trainer = start(Net())
    data = Rows(10)
    one = trainer.loader(data, 4, shuffle=True, seed=3)
    same = one is trainer.loader(data, 4, shuffle=True, seed=3, timeout=0.0)
    sentences = fault(lambda: trainer.loader(data, 5, shuffle=True, seed=4))
    for b in one:
        trainer.step(b)
        break
    other = trainer.loader(data, 4)  # in order, for evaluation: the training order is not touched
    trainer.evaluate(other, lambda m, b: {"loss": mean_loss(m, b)})
    position = one.cursor.position
    one.batch_size = 3
    sizes = [len(y) for _, y in one]
    trainer.close()
    return same, sentences, position, sizes


def test_a_data_set_has_one_order() -> None:
    ((same, sentences, position, sizes),) = run(1, loaders)
    assert same and position == 4 and sizes == [3, 3]
    assert "other settings: batch_size=5 (was 4), seed=4 (was 3)" in sentences


def data_by_rank() -> list[str]:
    """Loaders that are not the same on both ranks; the last one is."""
    trainer, rank = start(Net()), dist.get_rank()

    def epoch(rows: int = 8, size: int = 4, shuffle: bool = True, seed: int = 0) -> None:
        for b in trainer.loader(Rows(rows), size, shuffle=shuffle, seed=seed):
            trainer.step(b)

    def evaluation() -> None:
        trainer.evaluate(trainer.loader(Rows(8 - rank), 4), lambda m, b: {"loss": mean_loss(m, b)})

    sentences = [
        fault(lambda: epoch(rows=8 - rank)),
        fault(lambda: epoch(size=4 + rank)),
        fault(lambda: epoch(shuffle=rank == 0)),
        fault(lambda: epoch(seed=rank)),
        fault(evaluation),
        fault(epoch),
    ]
    trainer.close()
    return sentences


def test_ranks_that_read_different_data_are_told_so() -> None:
    """Of other lengths, sizes and orders; such runs trained on rows twice and left others out."""
    with shared("Net", Net(), mean_loss, batch(8), "data"):
        first, second = run(2, data_by_rank)
    assert first == second and first.pop() == "nothing was raised"
    expected = (
        "0 8 samples, shuffled by seed 0, in batches of 4, at row 4 of epoch 1, rank 1 7 samples",
        "rank 1 8 samples, shuffled by seed 0, in batches of 5, at row 5",
        "rank 1 8 samples, in their order, in batches of 4",
        "rank 1 8 samples, shuffled by seed 1, ",
        "rank 1 7 samples, in their order",
    )
    for sentence, part in zip(first, expected, strict=True):
        assert sentence.startswith("ValueError: ranks read different data: rank 0 8 samples")
        assert part in sentence, sentence


def metrics_by_rank() -> list[str]:
    """Of lists of other lengths, and of other names."""
    trainer, rank = start(Net()), dist.get_rank()
    name = f"loss of {rank}"

    def mean(batches: int, name: str = "loss") -> None:
        rows = [trainer.shard(batch(8, i)) for i in range(batches)]
        trainer.evaluate(rows, lambda m, b: {name: mean_loss(m, b)})

    sentences = [
        fault(lambda: mean(2 + rank)),
        fault(lambda: mean(2 - rank)),
        fault(lambda: mean(2, name)),
        fault(lambda: mean(2)),
    ]
    trainer.close()
    return sentences


def test_evaluation_that_differs_by_rank_is_refused() -> None:
    with shared("Net", Net(), mean_loss, batch(8), "data"):
        first, second = run(2, metrics_by_rank)
    assert first == second and first.pop() == "nothing was raised"
    expected = (
        r"ranks \[0\] have no more batches while the others have: give every rank equally many",
        r"ranks \[1\] have no more batches",
        "metric gives loss of 0 on rank 0 and loss of 1 on rank 1: it should give the same names",
    )
    for sentence, pattern in zip(first, expected, strict=True):
        assert re.search(f"ValueError: .*{pattern}", sentence), sentence


def test_schedulers_that_an_update_cannot_step_are_refused() -> None:
    net = Net()
    optimizer = adamw(net)
    by_metric: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau is stepped with metrics, which"):
        start(net, optimizer=lambda _: optimizer, scheduler=by_metric)
    other = torch.optim.lr_scheduler.StepLR(adamw(net), 1)
    with pytest.raises(ValueError, match="StepLR is of another optimizer"):
        start(net, optimizer=lambda _: optimizer, scheduler=other)


def other_data(folder: str) -> list[list[int]]:
    """Rows of the batches of the rest of an epoch, resumed with more data, then with the same."""
    found = []
    for count in (10, 16, 10):
        trainer = start(Net())
        loader = trainer.loader(Rows(count), 4, shuffle=True)
        if found:
            trainer.resume(f"{folder}/first")
        sizes = []
        for _, labels in loader:
            sizes.append(len(labels))
            if not found:
                trainer.save(f"{folder}/first")
                break
        found.append(sizes)
        trainer.close()
    return found


def test_a_run_that_goes_on_with_other_data_is_warned_of(tmp_path: Path) -> None:
    sentence = "behind sample 4 of a data set of 10, this one has 16: it has another order"
    with shared("Net", Net(), mean_loss, batch(8), "data"), pytest.warns(UserWarning) as caught:
        assert other_data(str(tmp_path)) == [[4], [4, 4, 4], [4, 2]]
    assert len([w for w in caught if sentence in str(w.message)]) == len(caught) == 1


def weightless(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """Only rows of class 3 count."""
    counts = (b[1] == 3).to(b[0].dtype)
    return (F.cross_entropy(model(b[0]), b[1], reduction="none") * counts).sum(), counts.sum()


def out_of_order() -> tuple[dict[str, str], bool]:
    """Parts of a step in an order that would lose or double gradients; training goes on after."""
    trainer = start(Net(), loss=weightless)
    x, y = batch(8)
    good, void = (trainer.shard((x, torch.full_like(y, c))) for c in (3, 0))
    sentences = {"update first": fault(trainer.update)}
    trainer.backward(good, last=False)
    sentences["clip"] = fault(lambda: trainer.clip(1.0))
    sentences["update"] = fault(trainer.update)
    sentences["step"] = fault(lambda: trainer.step(good))
    trainer.backward(good)
    sentences["twice"] = fault(lambda: trainer.backward(good))
    trainer.update()
    sentences["void"] = fault(lambda: trainer.step(void))
    trainer.backward(void, last=False)  # the one that failed is forgotten: nothing is summed here
    trainer.backward(good)
    trainer.update()
    plain = Net()
    optimizer = adamw(plain)
    for _ in range(2):
        optimizer.zero_grad()
        total, weight = weightless(plain, (x, torch.full_like(y, 3)))
        (total / weight).backward()
        optimizer.step()
    state = trainer.state_dict()
    trainer.close()
    return sentences, all(torch.allclose(state[n], t) for n, t in plain.state_dict().items())


def test_parts_of_a_step_out_of_order_are_told_so_and_nothing_is_lost() -> None:
    expected = {
        "update first": r"update needs the whole gradient, .* \(backward calls so far: 0,",
        "clip": r"clip needs the whole gradient, .* \(backward calls so far: 1,.*call backward",
        "update": r"update needs the whole gradient, .* \(backward calls so far: 1,",
        "step": r"step in the middle of an accumulation .*: 1\).*call update first",
        "twice": r"backward after the last one .*call update first, or give last=False",
        "void": "weight is 0 over all ranks .* leave such a batch out",
    }
    with shared("Net", Net(), weightless, batch(8), "data"):
        answers = run(2, out_of_order)
    for sentences, same in answers:
        assert same
        for key, pattern in expected.items():
            assert re.search(f"ValueError: .*{pattern}", f"{sentences[key]}"), key


class Backwards(nn.Module):
    """Its parameters are used in the reverse of the order in which they are declared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.z, self.y, self.x = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.z(self.y(self.x(x).tanh()).tanh())  # type: ignore[no-any-return]


def traced_on_one_rank(doubtful: int) -> tuple[bool, bool]:
    """One rank finds that its trace is not to be trusted, as rounding may let it."""
    from synchromesh.trace.capture.comparison import Comparison
    from synchromesh.training import trace_check

    if dist.get_rank() == doubtful:
        trace_check.compare = lambda *_: Comparison("the gradient of y differs")
    trainer = start(Backwards())
    for i in range(2):
        trainer.step(trainer.shard(batch(8, i)))
    plain = Backwards()
    optimizer = adamw(plain)
    for i in range(2):
        optimizer.zero_grad()
        mean_loss(plain, batch(8, i)).backward()
        optimizer.step()
    state, whole = trainer.state_dict(), trainer.traced.opaque
    trainer.close()
    return whole, all(torch.allclose(state[n], t) for n, t in plain.state_dict().items())


@pytest.mark.filterwarnings("ignore:the model runs whole")
@pytest.mark.filterwarnings("ignore:the loss is not seen to be a mean over rows")
@pytest.mark.parametrize("doubtful", [0, 1])
def test_a_trace_that_one_rank_does_not_trust_is_used_by_none(doubtful: int) -> None:
    assert run(2, traced_on_one_rank, doubtful) == [(True, True)] * 2


class Shifted(Net):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = torch.full((4,), shift, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def with_constants() -> list[str]:
    alike, unlike = Shifted(1.0), Shifted(float(dist.get_rank()))
    return [fault(lambda m=model: start(m).close()) for model in (alike, unlike)]


def test_constants_that_differ_between_ranks_are_refused() -> None:
    for alike, unlike in run(2, with_constants):
        assert alike == "nothing was raised"
        assert re.search(
            r"ranks 0 and 1 have different values of 1 tensors .*\(.*shift.*register_buffer",
            unlike,
        )


def catching() -> tuple[list[str], float]:
    """The second batch is one of which the last rank alone can compute nothing."""
    rows = torch.arange(8) % 4
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)).double()
    trainer = prepare(
        model, adamw(model), lambda m, b: F.cross_entropy(m(b), b), rows, "data",
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    wrong = rows.clone()
    wrong[-1] = 4
    told, began = [], time.monotonic()
    for b in (rows, wrong, rows, rows):
        told.append(fault(partial(trainer.step, trainer.shard(b))))
    trainer.close()
    return told, time.monotonic() - began


def test_an_error_that_one_rank_catches_ends_the_steps_of_all() -> None:
    for rank, (told, seconds) in enumerate(run(2, catching)):
        assert told[0] == "nothing was raised" and seconds < 20.0
        assert all("lost" in sentence for sentence in told[2:]), told
        assert "this trainer cannot go on" in told[3]
        assert ("IndexError" if rank else "catch or none") in told[1]


def clipped_by_hand(plan: str) -> list[str]:
    trainer = start(model := Net(), plan)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for own in (False, True):
            trainer.backward(trainer.shard(batch(8)))
            trainer.clip(0.1)
            if own:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            trainer.update()
            told += [warnings.WarningMessage(Warning("step"), Warning, "", 0)]
    trainer.close()
    return [str(w.message) for w in told]


@pytest.mark.parametrize("plan", ["tensor", "sharded-data", "data"])
def test_clipping_of_parts_by_ones_own_norm_is_warned_of(plan: str) -> None:
    first, *_ = run(2, clipped_by_hand, plan)
    mine = [text for text in first if "clip_grad_norm_" in text or text == "step"]
    assert [text[:4] for text in mine] == ["step", *(["grad"] * (plan != "data")), "step"]
