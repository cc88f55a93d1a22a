"""Lightning's Trainer under plans, beside Lightning alone in one process, in float64."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import run

pl = pytest.importorskip("pytorch_lightning")
import torchmetrics  # noqa: E402

from synchromesh.integrations.lightning import (  # noqa: E402
    LOADERS,
    METRICS,
    NO_LOSS,
    REFUSED,
    SynchromeshStrategy,
    refusal,
)

D = torch.float64
LIMIT = 1e-10
CHECKPOINT = "step={step}.ckpt"


def rows(count: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 6, generator=g, dtype=D), torch.randint(4, (count,), generator=g)
    )


TRAIN, VALID = rows(22, 1), rows(10, 2)
EVEN = rows(32, 3)


class Net(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, rate: float = 0.01, plateau: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.seen, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.to(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.encoder(x)
        scores = self.head(hidden)
        ignored = -100 if self.hparams["plateau"] else 3  # batches that accumulate weigh equally
        loss = F.cross_entropy(scores, y, ignore_index=ignored) * (1 + batch_idx / 8)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        right = (scores.argmax(1) == y).to(D).mean()
        self.log_dict({"right": right, "hidden": hidden.square().mean()}, on_epoch=True)
        self.log("most", right, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("val_loss", F.cross_entropy(scores, y), prog_bar=True, sync_dist=True)
        self.seen(len(y))
        self.mean(scores.square().mean())
        self.log_dict({"seen": self.seen, "mean": self.mean})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        if self.hparams["plateau"]:
            kind: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer, "lr_scheduler": {"scheduler": kind, "monitor": "val_loss"},
            }  # fmt: skip
        kind = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": kind, "interval": "step"}}


class Record(pl.Callback):  # type: ignore[misc,name-defined]
    """What a run does: the loss, what is logged, and the rate, of every batch."""

    def __init__(self) -> None:
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        logged = {n: float(v) for n, v in trainer.callback_metrics.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.batches.append({"": float(outputs["loss"]), "rate": rate, **logged})


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("error", r"(?s).*sync_dist=True")
        yield


def trained(
    plan: str | None, data: Any = TRAIN, resume: Any = None, model: Any = None, loader: Any = None,
    callbacks: Any = (), **words: Any,
) -> dict[str, Any]:  # fmt: skip
    """Of a fit, on a rank under a plan or in Lightning alone: what `Record` has, and its end."""
    record = Record()
    strategy = {} if plan is None else {"strategy": SynchromeshStrategy(plan)}
    if "RANK" in os.environ:  # of `run`; Lightning finds its place as under torchrun
        os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    saves = any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks)
    with silent():
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=saves,
            enable_model_summary=False, callbacks=[record, *callbacks], **strategy, **words,
        )  # fmt: skip
        model = model or Net()
        loaders = loader or DataLoader(data, batch_size=8), DataLoader(VALID, batch_size=4)
        trainer.fit(model, *loaders, ckpt_path=resume)
        tested = trainer.validate(model, loaders[1], verbose=False)
    return {
        "batches": record.batches, "end": {n: float(v) for of in tested for n, v in of.items()},
        "state": {n: x.clone() for n, x in model.state_dict().items()},
        "steps": trainer.global_step, "epochs": trainer.current_epoch,
    }  # fmt: skip


def agree(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert (found["steps"], found["epochs"]) == (wanted["steps"], wanted["epochs"])
    for a, b in zip(found["batches"], wanted["batches"], strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[n] - b[n]) < LIMIT for n in b), (a, b)
    assert all(abs(found["end"][n] - v) < LIMIT for n, v in wanted["end"].items())
    assert found["state"].keys() == wanted["state"].keys()
    for name, x in wanted["state"].items():
        assert torch.allclose(found["state"][name], x, rtol=0, atol=LIMIT), name


def stopping() -> dict[str, Any]:
    """Accumulated, clipped, by a rate that makes it worse until two callbacks act on it."""
    return {
        "data": EVEN, "model": Net(2.0, plateau=True), "max_epochs": 9,
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.05,
        "callbacks": [pl.callbacks.EarlyStopping("val_loss", patience=2)],
    }  # fmt: skip


def by_value() -> dict[str, Any]:
    return {"max_epochs": 1, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


def fits(plans: tuple[str, ...]) -> list[dict[str, Any]]:
    first, *_ = plans
    return [
        *(trained(plan, max_epochs=2) for plan in plans), trained(first, **stopping()),
        trained("single", **by_value()),  # under which one rank alone has gradients
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "plans"), [(1, ("data",)), (2, ("tensor", "pipeline:stages=2,microbatches=2"))]
)
def test_fits_are_those_of_lightning_alone(ranks: int, plans: tuple[str, ...]) -> None:
    wanted = trained(None, max_epochs=2)
    ended, clipped = trained(None, **stopping()), trained(None, **by_value())
    assert 2 < ended["epochs"] < 9 and ended["batches"][-1]["rate"] < 2.0
    for found in run(ranks, fits, plans, timeout=120.0):
        for got in found[:-2]:
            agree(got, wanted)
        agree(found[-2], ended)
        agree(found[-1], clipped)


def saving(plan: str | None, folder: str, steps: int) -> dict[str, Any]:
    saver = pl.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False
    )
    return trained(plan, callbacks=[saver], max_steps=steps)


def resumed(plan: str | None, folder: str, steps: int) -> dict[str, Any]:
    path = Path(folder) / f"step={steps}.ckpt"
    return trained(plan, resume=path, max_epochs=3)


def test_checkpoints_are_lightning_s_own_and_resume_on_other_ranks(tmp_path: Path) -> None:
    wanted = trained(None, max_epochs=3)
    middle, end = 5, 6  # of the second epoch, of three batches
    run(2, saving, "pipeline:stages=2,microbatches=2", str(tmp_path / "ours"), end)
    saving(None, str(tmp_path / "theirs"), end)
    for steps in (middle, end):
        paths = (tmp_path / x / f"step={steps}.ckpt" for x in ("ours", "theirs"))
        ours, theirs = (torch.load(path, weights_only=False) for path in paths)
        assert ours.keys() == {*theirs, "synchromesh_data"}
        torch.testing.assert_close(
            ours["optimizer_states"], theirs["optimizer_states"], rtol=0, atol=LIMIT
        )
        loaded = Net.load_from_checkpoint(tmp_path / "ours" / f"step={steps}.ckpt")
        for name, x in loaded.state_dict().items():
            assert torch.allclose(x, theirs["state_dict"][name], rtol=0, atol=LIMIT)

    def same(found: dict[str, Any]) -> None:
        assert all(
            torch.allclose(x, wanted["state"][n], rtol=0, atol=LIMIT)
            for n, x in found["state"].items()
        )
        assert (found["steps"], found["epochs"]) == (wanted["steps"], wanted["epochs"])

    same(resumed(None, str(tmp_path / "ours"), end))
    same(run(1, resumed, "data", str(tmp_path / "ours"), middle)[0])
    for found in run(4, resumed, "hybrid:tensor=2", str(tmp_path / "ours"), middle):
        same(found)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Untrained(Net):
    def configure_optimizers(self) -> Any:
        return None


class Iterating(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(*next(dataloader_iter))


class LogsMetric(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", self.mean)
        return super().training_step(batch, batch_idx)


class UpdatesMetric(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean(batch[1])
        return super().training_step(batch, batch_idx)


class WithoutLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


def refused() -> dict[str, str]:
    """What each refusal says."""
    asked: dict[str, dict[str, Any]] = {
        "manual optimisation, as of several optimizers": {"model": Manual()},
        "a module without an optimizer": {"model": Untrained()},
        "`precision` with scaled losses or types of its own": {
            "plugins": pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        },
        "a `training_step` that takes `dataloader_iter`": {"model": Iterating()},
        "callbacks that average, prune or thaw weights": {
            "callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]
        },
        LOADERS: {"loader": [next(iter(DataLoader(TRAIN, batch_size=8)))]},
        METRICS: {"model": LogsMetric()},
        NO_LOSS: {"model": WithoutLoss()},
    }
    assert asked.keys() == REFUSED.keys()
    told = {}
    for what, words in [*asked.items(), ("updates", {"model": UpdatesMetric()})]:
        with pytest.raises(ValueError) as error:
            trained("data", max_epochs=1, **words)
        told[what] = str(error.value)
    assert told.pop("updates") == told[METRICS]
    return told


def test_what_is_refused_is_told_in_the_words_of_the_docs() -> None:
    (told,) = run(1, refused, timeout=120.0)
    assert told == {what: refusal(what) for what in REFUSED}
    page = (Path(__file__).parents[2] / "docs/from-your-loop.md").read_text()
    rows = {f"| {what} | {remedy} |" for what, (remedy, _) in REFUSED.items()}
    assert rows <= set(page.partition("## From Lightning")[2].splitlines())


class Kept(pl.Callback):  # type: ignore[misc,name-defined]
    """What the trainer was prepared with, and its model when it is whole."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        held = trainer.strategy.trainer
        self.autocast = held.options.autocast
        with held.whole() as module:
            self.whole = sum(p.numel() for p in module.parameters())


def other_precisions() -> Any:
    kept, single = Kept(), TensorDataset(TRAIN.tensors[0].float(), TRAIN.tensors[1])
    words: dict[str, Any] = {"data": single, "max_epochs": 1, "limit_val_batches": 0}
    mixed = trained(
        "tensor", model=Net().float(), precision="bf16-mixed", callbacks=[kept], **words
    )
    double = trained("tensor", model=Net().float(), precision="64-true", **words)
    return mixed["batches"], kept.autocast, kept.whole, double["batches"]


def test_precisions_are_those_of_the_trainer() -> None:
    words: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    single = TensorDataset(TRAIN.tensors[0].float(), TRAIN.tensors[1])
    alone = trained(None, single, model=Net().float(), precision="64-true", **words)["batches"]
    for mixed, autocast, whole, double in run(2, other_precisions, timeout=120.0):
        assert autocast is torch.bfloat16 and whole == 92
        for got, low, want in zip(double, mixed, alone, strict=True):
            assert abs(got[""] - want[""]) < LIMIT and 0 < abs(low[""] - want[""]) < 0.02
