"""Lightning's Trainer over a plan: `Trainer(strategy=SynchromeshStrategy("auto"), devices=4)`.

The loop stays Lightning's. From the first training batch on a trainer of `prepare` has the module:

    training_step      backward of this rank's rows, of a trace of the module's `training_step`;
                       what that logs are reports of the loss, and is logged with their values
    optimizer_step     clip and update, with Lightning's hooks in front
    validation         Lightning's, of all rows on every rank, with the entire module
    checkpoints        Lightning's, with entire tensors

The strategy is none that Lightning calls distributed: logs of such ones it would reduce, which are
of all ranks here, and their samplers it would exchange."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from synchromesh.data.cursor import Cursor, preserved_generators
from synchromesh.data.loader import Loader
from synchromesh.trace.capture.outputs import BadOutput
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan

pl: Any = sys.modules.get("lightning.pytorch") or import_module("pytorch_lightning")
ddp = pl.strategies.DDPStrategy
is_overridden = pl.utilities.model_helpers.is_overridden
rank_zero_warn = pl.utilities.rank_zero.rank_zero_warn
WEIGHTS = ("StochasticWeightAveraging", "WeightAveraging", "ModelPruning", "BaseFinetuning")
PLACE, LOSS = "synchromesh_data", "its loss"  # names in checkpoints, among what is logged
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
LOADERS = "several training loaders, or one that is no torch `DataLoader`"
METRICS = "a metric object that `training_step` updates or logs"
NO_LOSS = "a `training_step` that returns no loss"
# the remedy for what is refused, and whether a strategy is asked for it when `fit` begins
REFUSED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "manual optimisation, as of several optimizers": (
        "let Lightning step one, or write the loop with `sm.prepare`",
        lambda s: not s.lightning_module.automatic_optimization),
    "a module without an optimizer": ("let `configure_optimizers` give one",
        lambda s: not any(o.param_groups for o in s.optimizers)),
    "`precision` with scaled losses or types of its own": (
        "use one of " + ", ".join(f"`{p}`" for p in PRECISIONS),
        lambda s: s.precision_plugin.precision not in PRECISIONS),
    "a `training_step` that takes `dataloader_iter`": ("let it take `batch, batch_idx`",
        lambda s: "dataloader_iter" in signature(s.lightning_module.training_step).parameters),
    "callbacks that average, prune or thaw weights": (
        "average in `on_train_batch_end`, in `with strategy.trainer.whole()`",
        lambda s: any(k.__name__ in WEIGHTS for c in s.callbacks for k in type(c).__mro__)),
    LOADERS: ("give one, with the batch size of all ranks together", lambda _: False),
    METRICS: ("log a number, as `torchmetrics.functional` gives it", lambda _: False),
    NO_LOSS: ("let it return one for every batch", lambda _: False),
}  # fmt: skip


def refusal(what: str) -> str:
    """The sentence for what is refused."""
    return f"SynchromeshStrategy does not take {what}: {REFUSED[what][0]}".replace("`", "")


class Batches:
    """A training loader as Lightning iterates over it: this rank's rows of an epoch, or of what is
    left of one where a run is resumed. begun: the trainer's loader for it, at that epoch."""

    def __init__(
        self, of: DataLoader[Any], begun: Callable[[DataLoader[Any], int], Loader]
    ) -> None:
        self._of, self._begun, self._epoch = of, begun, 0
        self.sampler = self  # whose epoch Lightning sets

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Any]:
        yield from self._begun(self._of, self._epoch)


class SynchromeshStrategy(pl.strategies.ParallelStrategy):  # type: ignore[misc]
    """Trains a module with automatic optimisation; ValueError in `fit` for what is `REFUSED`.

    plan, and options by name: as of `prepare`. trainer: what that gives, from the first batch on.
    The batch size of the training loader is that of all ranks together."""

    root_device, num_nodes, num_processes = ddp.root_device, ddp.num_nodes, ddp.num_processes
    model_to_device, set_world_ranks = ddp.model_to_device, ddp.set_world_ranks
    setup_distributed, barrier, broadcast = ddp.setup_distributed, ddp.barrier, ddp.broadcast
    reduce, determine_ddp_device_ids = ddp.reduce, ddp.determine_ddp_device_ids
    _get_process_group_backend = ddp._get_process_group_backend

    def __init__(self, plan: Plan | str = "auto", **options: Any) -> None:
        super().__init__()
        self.plan, self.options = plan, options
        self.trainer: Trainer | None = None
        self._whole = ExitStack()
        self._loader: Loader | None = None
        self._place: Cursor | None = None  # in the data, of a checkpoint
        self._logged: dict[str, tuple[Any, dict[str, Any]]] = {}  # how, by name
        self._num_nodes, self._process_group_backend = 1, None
        self._timeout = options.get("timeout", timedelta(minutes=5))

    def _configure_launcher(self) -> None:
        place = self.cluster_environment
        if place.creates_processes_externally and self.parallel_devices == [torch.device("cpu")]:
            self.parallel_devices *= place.world_size() // self.num_nodes  # devices="auto" is 1
        launcher = pl.strategies.launchers._SubprocessScriptLauncher
        self._launcher = launcher(place, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """The device and the process group."""
        super().setup_environment()
        self.setup_distributed()

    def setup(self, trainer: Any) -> None:
        """Module and optimizer as on one process."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        self.callbacks = trainer.callbacks
        for what, (_, asked) in REFUSED.items():
            if asked(self):
                raise ValueError(refusal(what))
        # what is logged is of all rows already, and the loader goes on where it was
        warnings.filterwarnings("ignore", r"(?s).*(sync_dist=True|is not resumable)")
        self.optimizers[0].zero_grad = lambda *_, **__: None  # the trainer lets go of gradients
        for metric in self._metrics():
            metric.distributed_available_fn = lambda: False  # of all rows on every rank

    def _metrics(self) -> list[Any]:
        modules = self.lightning_module.modules()
        return [m for m in modules if hasattr(m, "distributed_available_fn")]

    # Training

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader as `Batches`; others as they are."""
        trainer = self.lightning_module.trainer
        if trainer.state.fn != "fit" or not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise ValueError(refusal(LOADERS))
        return Batches(dataloader, self._begun)

    def _begun(self, loader: DataLoader[Any], epoch: int) -> Loader:
        """The trainer's loader for it; the first time the trainer comes into being."""
        loop = self.lightning_module.trainer.fit_loop
        if len(loop._combined_loader.flattened) > 1:
            raise ValueError(refusal(LOADERS))
        seed = self.options.setdefault("seed", int(os.environ.get("PL_GLOBAL_SEED", 0)))
        if self.trainer is None:
            with preserved_generators():
                batch = self.precision_plugin.convert_input(next(iter(loader)))
            batch = self.lightning_module._on_before_batch_transfer(batch)
            given = loop.epoch_loop._build_kwargs({}, self.batch_to_device(batch), 0)
            self.trainer = self._prepared(*given.values())
        own = self._loader = self.trainer.loader(loader, seed=seed)
        place, self._place = self._place, None
        goes_on = place is not None and place.epoch == epoch
        own.cursor = place if place and goes_on else Cursor(own.cursor.seed, epoch)
        return own

    def _prepared(self, *given: Any) -> Trainer:
        options, precision = {"device": self.root_device, **self.options}, self.precision_plugin
        if precision.precision == "bf16-mixed":
            options.setdefault("autocast", torch.bfloat16)
        options.setdefault("sync_batch_norm", self._layer_sync is not None)
        module, optimizer = self.lightning_module, self.optimizers[0]
        trainer = prepare(module, optimizer, self._loss, _numbered(*given), self.plan, **options)
        trainer.steps = module.trainer.global_step
        precision.clip_grad_by_norm = lambda _, limit: trainer.clip(float(limit))
        precision.clip_grad_by_value = _clip_values
        if trainer.world.size > 1 and is_overridden("on_before_optimizer_step", module):
            rank_zero_warn(
                "on_before_optimizer_step sees this rank's part of the gradients, where the plan "
                "divides parameters: `strategy.trainer.clip(math.inf)` gives the norm of all"
            )
        return trainer

    def _loss(self, module: Any, given: tuple[Any, ...]) -> Any:
        """The module's `training_step`, with what it logs as reports."""
        values: dict[str, Any] = {}

        def log(name: str, value: Any, *rest: Any, **words: Any) -> None:
            if not isinstance(value, Tensor | int | float):
                raise BadOutput(refusal(METRICS))
            values[name] = value.squeeze() if isinstance(value, Tensor) else value
            self._logged[name] = rest, words

        def update(*_: Any, **__: Any) -> None:
            raise BadOutput(refusal(METRICS))

        precision = self.precision_plugin  # casts are the trainer's, and default types Lightning's
        with ExitStack() as stack:
            stack.enter_context(patch.object(module, "log", log))
            for metric in self._metrics():
                stack.enter_context(patch.object(metric, "update", update))
            if precision.precision != "bf16-mixed":
                stack.enter_context(precision.forward_context())
            result = module.training_step(*given)
        loss = result["loss"] if isinstance(result, Mapping) else result
        if loss is None:
            raise BadOutput(refusal(NO_LOSS))
        return loss, {LOSS: loss, **values}

    def training_step(self, *given: Any) -> Tensor:
        """Forward and backward of this rank's rows; logs what the module's own one does."""
        assert self.trainer is not None, "batches come from `Batches`"
        module = self.lightning_module
        last = not module.trainer.fit_loop._should_accumulate()
        self.trainer.backward(_numbered(*given), last)
        reports = self.trainer.reports
        values = {n: torch.tensor(v, dtype=torch.float64) for n, v in reports.latest.items()}
        loss = values.pop(LOSS)
        for name, value in values.items():
            rest, words = self._logged[name]
            module.log(name, value, *rest, **{**words, "batch_size": reports.rows})
        return loss.requires_grad_()  # Lightning's backward, with its hooks, ends here

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Lightning's closure, hooks and clip, then the update."""
        assert self.trainer is not None, "batches come from `Batches`"
        loss = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
        self.trainer.update()
        return loss

    # Evaluation and checkpoints

    def on_validation_start(self) -> None:
        if self.trainer is not None:
            self._whole.enter_context(self.trainer.whole())

    def on_validation_end(self) -> None:
        self._whole.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's, with entire tensors."""
        self.on_validation_end()  # behind which callbacks save
        of_all = self.lightning_module if self.trainer is None else self.trainer
        return dict(of_all.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's, with entire tensors."""
        held = self.trainer is not None and self.trainer.state
        return dict(held.optimizer_state_dict() if held else super().optimizer_state(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], *given: Any, **words: Any) -> None:
        """Lightning's, with the place in the data."""
        place = {} if self._loader is None else {PLACE: self._loader.cursor.to_dict()}
        super().save_checkpoint({**checkpoint, **place}, *given, **words)

    def load_checkpoint(self, *given: Any, **words: Any) -> dict[str, Any]:
        """The inverse."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*given, **words)
        self._place = Cursor.from_dict(checkpoint[PLACE]) if PLACE in checkpoint else None
        return checkpoint

    def teardown(self) -> None:
        """Gives the module back, entire on every rank unless one has failed."""
        self.on_validation_end()
        if self.trainer is not None:
            if not self.lightning_module.trainer.interrupted:
                self._give_back(self.trainer)
            self.trainer.close()
        self.trainer = self._loader = None
        for optimizer in self.optimizers:
            vars(optimizer).pop("zero_grad", None)
        super().teardown()

    def _give_back(self, trainer: Trainer) -> None:
        """The entire module and optimizer, in host memory, where Lightning leaves them."""
        states = trainer.state.optimizer_state_dict()
        for name, x in trainer.state.gathered({**trainer.parameters(), **trainer.buffers()}):
            trainer.model.place(name, x.cpu())
        trainer.optimizer.load_state_dict(states)
        self.lightning_module.zero_grad()  # of shards


def _clip_values(optimizer: Any, limit: float) -> None:
    """Lightning's, where a rank may have no gradients, or parts of them."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            p.grad.data.clamp_(-limit, limit)  # `data`: entry by entry, of which nobody warns


def _numbered(batch: Any, *number: int) -> tuple[Any, ...]:
    """A batch and its number, where a step takes it: as a tensor, for it is another every time."""
    return batch, *map(torch.tensor, number)
