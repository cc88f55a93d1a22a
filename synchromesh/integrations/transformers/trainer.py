"""`TransformersTrainer`: transformers' loop, callbacks, logs and folders; steps under a plan.

Ours is what concerns devices: the global batch, which has `per_device_train_batch_size` rows for
each rank, its rows on ranks, backward, clipping, the optimizer's step and checkpoints. Losses are
those of transformers' `Trainer` on one process with that batch."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from synchromesh.data.cursor import preserved_generators
from synchromesh.data.padding import Padding
from synchromesh.integrations.transformers.dealt_batches import DealtBatches
from synchromesh.integrations.transformers.refused_arguments import refuse
from synchromesh.launcher import rendezvous
from synchromesh.trace.capture.batch import take
from synchromesh.training.prepare import prepare
from synchromesh.values.plan import Plan

FOLDER = "synchromesh"  # in those of transformers' checkpoints


class TransformersTrainer(transformers.Trainer):
    """As `transformers.Trainer`, with a plan.

    synchromesh: from `train` on the `synchromesh.training.trainer.Trainer` that holds the model:
    `with trainer.synchromesh.whole() as model:` gives it back."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, *given: Any,
        plan: Plan | str = "auto", headroom: str | None = None, say: Any = None, allow: str = "",
        pad: Mapping[str, float] | None = None, lengths: Sequence[int] = (), **named: Any,
    ) -> None:  # fmt: skip
        """plan, headroom, say, allow: as of `prepare`. pad, lengths: as of `trainer.loader`, for
        collators that it does not know. ValueError for arguments that are refused."""
        args = TrainingArguments("tmp_trainer") if args is None else args
        refuse(args)
        _know_ranks(args)
        self.synchromesh: Any = None
        self._preparing: Any = {"plan": plan, "headroom": headroom, "say": say, "allow": allow}
        self._padding: Any = {"pad": pad, "lengths": lengths}
        super().__init__(model, args, *given, **named)

    def train(self, *args: Any, **named: Any) -> Any:
        """As that of transformers. All ranks call alike."""
        self._release()
        return super().train(*args, **named)

    def _release(self) -> None:
        """Makes the model and the optimizer plain ones again, entire on every rank."""
        if self.synchromesh is not None:
            self.model.train()
            if self.args.world_size > 1:
                self.synchromesh.switch("data")
            self.synchromesh.close()
            self.optimizer, self.synchromesh = self.synchromesh.optimizer, None

    # Data

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None,
        is_training: bool = False, dataloader_key: str | None = None,
    ) -> Any:  # fmt: skip
        """As torch has it; of global batches for training."""
        rows = batch_size * (self.args.world_size if is_training else 1)
        with patch.object(self.accelerator, "prepare", lambda loader: loader):
            return super()._get_dataloader(
                dataset, description, rows, sampler_fn, is_training, dataloader_key
            )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """As Accelerate changes it: with one order of each epoch, by seed or data_seed."""
        sampler = super()._get_train_sampler(train_dataset)
        if type(sampler) is not RandomSampler:
            return sampler
        return SeedableRandomSampler(sampler.data_source, data_seed=self.args.data_seed)

    def _run_epoch(self, **loop: Any) -> None:  # type: ignore[override]
        """While transformers' loop counts batches of nothing, it is given ours."""
        resumed = loop["resume_from_checkpoint"] and loop["epoch"] == loop["epochs_trained"]
        skipped = loop["steps_trained_in_current_epoch"] if resumed else 0
        loader, position = self._loader, skipped * self._loader.batch_size
        if not (skipped and loader.stream):  # whose place is in the checkpoint
            place = {"epoch": loop["epoch"], "position": position, "stream": None}
            loader.cursor = replace(loader.cursor, **place)
        self._batches = iter(loader)
        nothing: DataLoader[Any] = DataLoader([])  # type: ignore[arg-type]
        super()._run_epoch(**{**loop, "train_dataloader": nothing})  # type: ignore[no-untyped-call]

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """This rank's rows of the next batches."""
        taken = [(batch, self._loader.rows) for batch in islice(self._batches, num_batches)]
        self._rows = sum(rows for _, rows in taken) // max(1, len(taken))
        return [batch for batch, _ in taken], None

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """This rank's share of the global batch's: transformers adds them up."""
        name = getattr(self.model, "main_input_name", "input_ids")
        tokens = self._rows * inputs[name].shape[1:].numel() if name in inputs else 0
        share: int = 6 * self._entries * tokens // self.args.world_size
        return share

    # Steps

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Optimizer and scheduler as transformers makes them, and the trainer over both."""
        args = self.args
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        own = None if resume_from_checkpoint is None else Path(resume_from_checkpoint) / FOLDER
        if own is not None and not own.is_dir():
            super()._load_optimizer_and_scheduler(resume_from_checkpoint)
            own = None
        count = getattr(self.model, "num_parameters", None)  # of transformers' models
        self._entries = 0 if count is None else count(exclude_embeddings=True)
        self._set_signature_columns_if_needed()  # of the user's `forward`
        example = self._prepare_inputs(self._example(train_dataloader))
        self._look_at_loss(example)
        trainer = prepare(
            self.model.train(), self.optimizer, self._loss, example, seed=args.seed,
            device="cpu" if args.device.type == "cpu" else args.device,
            autocast=torch.bfloat16 if args.mixed_precision == "bf16" else None,
            timeout=args.ddp_timeout_delta, **self._preparing,
        )  # fmt: skip
        self._loader = trainer.loader(train_dataloader, seed=args.seed, **self._padding)
        if own is not None:
            trainer.resume(own)
            state = torch.load(own.with_name(SCHEDULER_NAME), weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        self.synchromesh, optimizer = trainer, trainer.optimizer
        self.optimizer = SimpleNamespace(step=trainer.update, param_groups=optimizer.param_groups)
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, train_dataloader
        return self.model, train_dataloader

    def _example(self, loader: DataLoader[Any]) -> Any:
        """A global batch, of the length that batches of such rows are padded to."""
        plain = DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
        with preserved_generators():
            batch = next(iter(plain))
        longest = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        padding = Padding.of(loader.collate_fn, **self._padding, most=longest)
        return batch if padding is None else padding.padded(batch, lambda value: [value])

    def _look_at_loss(self, example: Any) -> None:
        """How losses of micro-batches add up to that of a step, in transformers:

        sum_i S_i / sum_i N_i    where the loss is divided by `num_items_in_batch`
        sum_i mean_i             where it is given that, and is not
        sum_i mean_i / steps     where it is not given that"""
        rows = take(example, 0, self.args.per_device_train_batch_size)
        self._given = self._get_num_items_in_batch([rows], self.args.device) is not None
        self._divides = False
        if not self._given:
            return
        self.model.eval()  # no dropout, which would differ
        with torch.no_grad():
            one, two = (
                float(self.compute_loss(self.model, dict(rows), num_items_in_batch=n))  # type: ignore[arg-type]
                for n in torch.tensor([1.0, 2.0], device=self.args.device)
            )
        scaled = self.loss_is_scaled_for_ga is not False
        self._divides = scaled and math.isclose(one, 2 * two, rel_tol=1e-4)
        ignores = math.isclose(one, two, rel_tol=1e-4)
        if self.args.gradient_accumulation_steps > 1 and not (self._divides or ignores):
            raise ValueError(
                "the loss uses num_items_in_batch in another way than to be divided by it, and "
                "losses of micro-batches would not add up: give gradient_accumulation_steps=1"
            )

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, device = dict(batch), self.args.device
        if not self._divides:
            return self.compute_loss(model, inputs)
        weight = self._get_num_items_in_batch([inputs], device)
        return self.compute_loss(
            model, inputs, num_items_in_batch=torch.ones((), device=device)
        ), weight

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Forward and backward of this rank's rows; the loss of a step comes with its last."""
        model.train()
        share, last = None, self.accelerator.sync_gradients
        if self.args.gradient_accumulation_steps > 1 and not self._divides:
            scaled = self.loss_is_scaled_for_ga
            scaled = self._given if scaled is None else scaled
            share = 1.0 if scaled else 1.0 / self.current_gradient_accumulation_steps
        value: Tensor = self.synchromesh.backward(inputs, last, share=share)
        return value if last else torch.zeros_like(value)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.synchromesh.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Any:
        return self.synchromesh.clip(math.inf) if grad_norm is None else grad_norm

    def _maybe_log_save_evaluate(self, *args: Any, **named: Any) -> None:
        """As that of transformers; losses are of all ranks already, and need no gathering."""
        with patch.object(transformers.trainer, "nested_gather", lambda loss, *_: loss):
            super()._maybe_log_save_evaluate(*args, **named)

    # Evaluation and folders

    def _whole(self, rank: int | None = None) -> AbstractContextManager[Any]:
        return nullcontext() if self.synchromesh is None else self.synchromesh.whole(rank)

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        """That of transformers, of the entire model on each rank; they take batches in turns."""
        dealt: Any = DealtBatches(dataloader, self.accelerator)
        self.gather_function = dealt.gathered
        if not self.accelerator._models:
            self.accelerator._models.append(self.model)  # else it would be prepared
        with self._whole():
            return super().evaluation_loop(dealt, *args, **named)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Evaluation computes in the types of training."""
        enabled = self.args.mixed_precision == "bf16"
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled, cache_enabled)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with self._whole(rank=0):
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.synchromesh.save(Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_best_model(self) -> None:
        saved = Path(self.state.best_model_checkpoint or "") / FOLDER
        if saved.is_dir():
            self.synchromesh.resume(saved)
        else:
            self._release()
            super()._load_best_model()

    def end(self) -> None:
        if self.synchromesh is not None:
            self.synchromesh.close()
        super().end()  # type: ignore[no-untyped-call]


def _know_ranks(args: TrainingArguments) -> None:
    """Accelerate takes ranks on CPUs for processes that are alone, until `use_cpu` is set.
    ValueError where it sees another number of ranks than there are."""
    here = None if dist.is_initialized() else rendezvous.place()
    ranks = dist.get_world_size() if dist.is_initialized() else 1 if here is None else here.size
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False
        if args.world_size < ranks:
            args.use_cpu = True
            del vars(args)["_setup_devices"]  # to be made anew
    args._n_gpu = int(args.device.type != "cpu")  # a process has one device
    args.average_tokens_across_devices = False  # a loss is that of all ranks already
    if args.world_size != ranks:
        raise ValueError(
            f"accelerate sees {args.world_size} processes where there are {ranks}: start the "
            "script with torchrun or `synchromesh run`"
        )
