"""Training on CUDA devices: one against the CPU, several over NCCL, checkpoints between the two.

Without CUDA all of it is skipped. Ranks are spawned: a forked process cannot use CUDA.
"""

import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.data.fetch import Loading
from synchromesh.data.loader import Batching, Loader
from synchromesh.engine.world import World
from synchromesh.training.prepare import prepare
from synchromesh.verify.verify import verify
from tests.targets import target

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore:nothing of"),
    pytest.mark.timeout(300),  # spawned ranks import torch and start NCCL
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"2 CUDA devices are needed (there are {GPUS})")

STEPS = 4
TOLERANCE = 1e-4  # of losses and weights, in float32


class Net(nn.Module):
    """A convolution, a norm with statistics, attention and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.steps = torch.tensor(2.0)  # on the host, as in a user's own module

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        return self.head(self.attention(x).mean(1)) / self.steps  # type: ignore[no-any-return]


def batch(rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Images, labels in 16 bits, and which rows count."""
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 3, 4, 4, generator=g),
        "y": torch.randint(0, 4, (rows,), generator=g).to(torch.int16),
        "counts": torch.rand(rows, generator=g) > 0.2,
    }


def loss(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(model(b["x"]), b["y"].long(), reduction="none")
    return (each * b["counts"]).sum(), b["counts"].sum()


def accuracy(model: nn.Module, b: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(b["x"]).argmax(-1) == b["y"]).double().sum()}


def exact() -> None:
    """Single precision where the device would round to 10 bits."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def trained(
    device: str | None, plan: str = "data", folder: str = "", resume: bool = False, **settings: Any
) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, weights and an accuracy of `STEPS` steps; with a folder saved after half of them.

    resume: only the second half, from what is in the folder.
    """
    exact()
    torch.manual_seed(0)
    model = Net()
    # not AdamW: the gradient of a bias before a norm is rounding alone, which AdamW would enlarge
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = prepare(
        model, optimizer, loss, batch(12), plan, sync_batch_norm=True, device=device, **settings
    )
    try:
        if resume:
            trainer.resume(folder)
        losses = []
        for index in range(STEPS // 2 if resume else 0, STEPS):
            losses.append(float(trainer.step(trainer.shard(batch(12 - index, index)))))
            if folder and not resume and index == STEPS // 2 - 1:
                trainer.save(folder)
        share = trainer.evaluate([trainer.shard(batch(9, 99))], accuracy)["accuracy"]
        return losses, trainer.state_dict(), share
    finally:
        trainer.close()


def close(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    losses, weights, share = found
    assert losses == pytest.approx(expected[0], rel=tolerance)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=tolerance, atol=tolerance)
    assert share == pytest.approx(expected[2])


def test_one_device_equals_the_cpu() -> None:
    close(trained("cuda"), trained("cpu"))


def test_a_checkpoint_of_one_kind_of_device_resumes_on_the_other(tmp_path: Path) -> None:
    whole = trained("cpu")
    for first, second in (("cuda", "cpu"), ("cpu", "cuda")):
        folder = str(tmp_path / first)
        trained(first, folder=folder)
        losses, weights, share = trained(second, folder=folder, resume=True)
        close((losses, weights, share), (whole[0][STEPS // 2 :], *whole[1:]))


def test_counters_of_a_fused_optimizer_resume_on_the_device(tmp_path: Path) -> None:
    def run(resume: bool) -> list[float]:
        torch.manual_seed(0)
        model = Net()
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        trainer = prepare(model, optimizer, loss, batch(12), device="cuda")
        if resume:
            trainer.resume(tmp_path / "half")
        values = []
        for index in range(2 if resume else 0, 4):
            values.append(float(trainer.step(batch(12, index))))
            if index == 1:
                trainer.save(tmp_path / "half")
        trainer.close()
        return values

    whole = run(False)
    assert run(True) == pytest.approx(whole[2:], rel=TOLERANCE)


class Pixels(torch.utils.data.Dataset[Any]):
    """Rows on the host, as a data set has them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((64, 64), float(index)), index


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}, {"pin_memory": True}], ids=str)
def test_batches_come_on_the_device_while_it_computes(settings: dict[str, Any]) -> None:
    """Copies on a stream of their own are waited for, and their memory is not given away."""
    loader = Loader(
        Pixels(), 4, lambda n: ((0, n),), batching=Batching(shuffle=False),
        loading=Loading(**settings), device=torch.device("cuda", 0),
    )  # fmt: skip
    weight, seen = torch.eye(64, device="cuda"), []
    for images, labels in loader:
        assert images.device.type == labels.device.type == "cuda"
        for _ in range(200):  # the step: long after the next batch was copied
            images = images @ weight
        seen += [images[:, 0, 0], labels]
        del images, labels
    found = torch.stack([x.double() for x in seen]).view(-1, 2, 4)
    assert found[:, 0].flatten().tolist() == found[:, 1].flatten().tolist() == list(range(20))


def test_autocast_to_bfloat16_trains() -> None:
    mixed, exactly = (trained("cuda", autocast=t)[0] for t in (torch.bfloat16, None))
    assert mixed == pytest.approx(exactly, rel=5e-2)
    assert mixed != exactly  # it was done


def test_a_step_waits_for_its_forward_alone() -> None:
    """While the GPU is still in a backward, the host goes on with what follows it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = lambda m, b: m(b).square().mean()  # noqa: E731
    trainer = prepare(model, optimizer, mean, data, device="cuda")
    for _ in range(3):
        trainer.step(data)
    weight = next(model.parameters())
    hook = weight.register_hook(lambda _: torch.cuda._sleep(2_000_000_000))  # about a second
    torch.cuda.synchronize()
    begun = time.perf_counter()
    trainer.step(data)
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    device = time.perf_counter() - begun
    hook.remove()
    trainer.close()
    assert device > 0.5  # the hook ran
    assert host < device / 2


def test_dropout_draws_the_same_bits_again_and_leaves_the_users_generator() -> None:
    def drawn() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        data = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mean = lambda m, b: m(b).square().mean()  # noqa: E731
        trainer = prepare(model, optimizer, mean, data, device="cuda", seed=3)
        before = torch.cuda.get_rng_state()
        values = [float(trainer.step(data)) for _ in range(2)]
        assert torch.equal(torch.cuda.get_rng_state(), before)
        trainer.close()
        return values[-1]

    assert drawn() == drawn()


def test_a_model_on_the_meta_device_comes_into_being_on_the_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(4, 6)
    trainer = prepare(model, optimizer, lambda m, b: m(b).square().mean(), data, device="cuda")
    assert all(p.is_cuda for p in model.parameters())
    assert torch.isfinite(trainer.step(data))
    trainer.close()


def test_verify_compares_on_the_device() -> None:
    exact()
    document = verify(target("vit"), "data", steps=2, dtype="float64")
    assert document["passed"], document


def test_more_processes_than_devices_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(GPUS))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    sentence = (
        rf"local rank {GPUS} has no GPU of its own \({GPUS} on this machine\); start at most"
    )
    with pytest.raises(ValueError, match=sentence):
        World.open()


# Several devices


def _rank(rank: int, size: int, port: int, folder: str, function: Any, args: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    warnings.simplefilter("ignore")
    torch.save(function(*args), f"{folder}/{rank}")


def spawn(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on `size` devices; results by rank."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(r, size, port, folder, function, args))
            for r in range(size)
        ]
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(200)
            assert [rank.exitcode for rank in ranks] == [0] * size
        finally:
            for rank in ranks:
                rank.kill()
        return [torch.load(f"{folder}/{r}", weights_only=True) for r in range(size)]


@two_gpus
@pytest.mark.parametrize("plan", ["data", "tensor", "data; head=tensor"])
def test_two_devices_equal_one(plan: str) -> None:
    expected = trained("cuda:0")
    for found in spawn(2, trained, None, plan):
        close(found, expected)


@pytest.mark.skipif(GPUS < 4, reason=f"4 CUDA devices are needed (there are {GPUS})")
@pytest.mark.parametrize(
    "plan", ["hybrid:tensor=2", "data; attention=hybrid:tensor=2; head=tensor"]
)
def test_four_devices_equal_one(plan: str) -> None:
    expected = trained("cuda:0")
    for found in spawn(4, trained, None, plan):
        close(found, expected)


@two_gpus
def test_a_checkpoint_of_two_devices_resumes_on_the_cpu(tmp_path: Path) -> None:
    whole = trained("cpu")
    spawn(2, trained, None, "tensor", str(tmp_path / "half"))
    found = trained("cpu", folder=str(tmp_path / "half"), resume=True)
    close(found, (whole[0][STEPS // 2 :], *whole[1:]))
