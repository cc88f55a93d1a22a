"""Sparse gradients of embeddings that ask for them: where no rank adds them up they stay so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from synchromesh.verify.verify import verify
from synchromesh.workloads.workload import Workload
from tests.ranks import run
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of", "ignore:Sparse invariant checks")
WORD = "data; @synchronisation=hogwild"


class Bags(nn.Module):
    """Two tables that ask for sparse gradients, one of which a layer shares."""

    def __init__(self, head: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(60, 4, mode="mean", sparse=True)
        self.words = nn.Embedding(60, 4, sparse=True, padding_idx=2)
        self.head = nn.Linear(4, 60) if head else None
        if self.head is not None:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        found = self.bag(ids) + self.words(ids).tanh().sum(1)
        return found if self.head is None else self.head(found)


def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(9, (rows, 3), generator=g), torch.randint(4, (rows,), generator=g)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.1)


def sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([*parameters], lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


Build = Callable[[Any], torch.optim.Optimizer]


def plain(build: Build, head: bool, count: int) -> tuple[dict[str, Tensor], Tensor]:
    model = Bags(head)
    optimizer = build(model.parameters())
    for seed in range(count):
        optimizer.zero_grad()
        for part, rows in ((seed, 8), (seed + 9, 4)):
            (loss(model, batch(rows, part)) * rows / 12).backward()
        # torch has no norms of sparse gradients
        norms = [p.grad.to_dense().norm() for p in model.parameters()]
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.2, torch.stack(norms).norm())
        optimizer.step()
    return dict(model.named_parameters()), model.bag.weight.grad


def trained(plan: str, build: Build, head: bool, count: int) -> tuple[dict[str, Tensor], bool]:
    """Of ranks that take turns, each with all rows; whether the bag's gradient was sparse."""
    model = Bags(head)
    trainer = prepare(model, build(model.parameters()), loss, batch(12, 0), plan)
    trainer.steps = 1  # behind the first one, for which all meet
    sparse = False
    for seed in range(count):
        if "hogwild" not in plan or trainer.rank == seed % trainer.world.size:
            given = [batch(8, seed), batch(4, seed + 9)]
            if "hogwild" not in plan:
                given = [trainer.shard(b) for b in given]
            trainer.backward(given[0], last=False)
            trainer.backward(given[1])
            trainer.clip(0.2)
            found = trainer.model.parameters["bag.weight"].grad
            sparse = found is not None and found.is_sparse
            trainer.update()
        trainer.world.everyone.barrier()
    state = trainer.state_dict()
    trainer.close()
    return state, sparse


@pytest.mark.parametrize(
    ("plan", "ranks", "build", "head", "sparse"),
    [
        ("data", 1, sgd, True, True),
        ("data", 1, adagrad, True, True),
        ("data", 1, sparse_adam, False, True),
        ("data", 1, momentum, True, False),  # its state would be sparse
        ("data", 2, sgd, True, False),  # ranks sum it
        (WORD, 2, sgd, True, True),
    ],
)
def test_training_is_torchs_own(
    plan: str, ranks: int, build: Build, head: bool, sparse: bool
) -> None:
    expected, gradient = plain(build, head, 4)
    assert gradient.is_sparse
    with shared(("Bags", head), Bags(head), loss, batch(12, 0), plan, ranks=ranks):
        answers = run(ranks, trained, plan, build, head, 4)
    for state, kept in answers:
        assert kept == sparse
        for name, p in expected.items():
            torch.testing.assert_close(state[name], p.detach(), rtol=0, atol=1e-12)


def verified(plan: str, build: Build, head: bool) -> dict[str, Any]:
    ids, labels = batch(30, 7)
    rows = torch.utils.data.TensorDataset(ids, labels)
    job = Workload(lambda: Bags(head), loss, build, rows, 12, name="bags")
    return verify(job, plan, 3)


@pytest.mark.parametrize(
    ("plan", "ranks", "build", "head"),
    [(WORD, 1, sparse_adam, False), ("data", 1, adagrad, True)],
)
def test_one_process_proves_it(plan: str, ranks: int, build: Build, head: bool) -> None:
    with shared(("Bags", head), Bags(head), loss, batch(12, 0), plan, ranks=ranks):
        found = run(ranks, verified, plan, build, head)[0]
    assert found["passed"] and found["exact"], found["faults"]


def refused() -> str:
    model = Bags(False)
    with pytest.raises(ValueError, match="takes sparse gradients alone") as raised:
        prepare(model, sparse_adam(model.parameters()), loss, batch(12, 0), "data")
    return str(raised.value)


def test_sparse_gradients_alone_are_not_summed() -> None:
    with shared(("Bags", False), Bags(False), loss, batch(12, 0), "data"):
        for text in run(2, refused):
            assert "sum that of bag.weight" in text and "@synchronisation=hogwild" in text
