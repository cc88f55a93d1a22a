"""`prepare`: from a model, an optimizer and a loss to a trainer on the ranks of this run."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from synchromesh.engine import batches, heap
from synchromesh.engine.agreement import refuse_first, require_alike
from synchromesh.engine.device import emulated
from synchromesh.engine.gradients import GradientSync
from synchromesh.engine.groups import Group
from synchromesh.engine.optimizer import check as check_optimizer
from synchromesh.engine.optimizer import refuse_foreign
from synchromesh.engine.world import World
from synchromesh.programs.model import Model
from synchromesh.trace.capture.batch import know_encodings
from synchromesh.trace.capture.capture import signature
from synchromesh.trace.capture.carry import joined
from synchromesh.training.active_plan import Loss, Options, checked_plan
from synchromesh.training.learning_rate import ScaledRate
from synchromesh.training.losses import NamedLosses
from synchromesh.training.recovery import Survival
from synchromesh.training.trainer import Trainer
from synchromesh.values.allowance import Allowance
from synchromesh.values.caution import caution
from synchromesh.values.optimizer import JoinedOptimizer, kind_of, needed_arguments
from synchromesh.values.plan import Plan


def prepare(
    model: nn.Module, optimizer: Optimizer | Mapping[str, Optimizer],
    loss: Loss | Mapping[str, Loss], example_batch: Any,
    plan: Plan | str = "auto", *, scheduler: LRScheduler | ScaledRate | None = None, seed: int = 0,
    sync_batch_norm: bool = False, autocast: torch.dtype | None = None,
    device: torch.device | str | None = None, timeout: timedelta = timedelta(minutes=5),
    weights: str | Path | None = None, carry: Callable[[int], Any] | None = None,
    headroom: str | None = None, noise_scale: bool = False, allow: str = "",
    say: Callable[[str], None] | None = None,
) -> Trainer:  # fmt: skip
    """A trainer of `model` under `plan` on the ranks of this run (one, unless anything says more).

    optimizer: over parameters of the model; it stays the caller's, schedulers go on working.
    loss(model, batch): a scalar, the mean over the batch's rows, or a pair (sum, weight), or such
    a loss and what it reports, (loss, {name: value}), as `Trainer.reports` has it. With `carry`
    loss(model, batch, carry) -> (such a loss, the carry for the next batch).
    Losses that take turns (a GAN's) are a dict by name, with a dict of their optimizers over
    parameters of their own, or with one for all: step(batch, loss=name) computes one of them, and
    its optimizer updates. The plan is made for a step of each, one after the other.
    example_batch: a global batch; the model is traced with it, and measured under `auto`.
    plan: a Plan or its text; `auto` measures the model and the links and takes what is predicted
    to be the quickest (`trainer.choice` says why). What was measured is kept for the next run
    (docs/python.md: "What is measured is kept").
    scheduler: stepped once per update and saved in checkpoints; leave it out to step it yourself,
    as one that is stepped with a metric.
    seed: of dropout and other random operators. autocast: torch.bfloat16, or None.
    timeout: of every collective.
    weights: a checkpoint, or a safetensors file or folder, to begin with.
    carry: of a recurrent model, rows -> the carry at the beginning of streams: a tensor, or a
    tuple or dict of tensors, whose dim 0 is rows (docs/python.md: "Recurrent language models").
    headroom: what `auto` leaves of a device's memory, as `10%` or `4GiB`; default: 5 %.
    noise_scale: whether the gradient noise scale is measured while training (docs/python.md: "The
    gradient noise scale"). ValueError where rows depend on each other.
    allow: what `auto` may choose besides what one device would compute: `local`, `compression`,
    `asynchronous`, by commas (values/allowance.py). What that costs in accuracy is in no time.
    say: receives on every rank, a sentence at a time, what is measured and what is reused.

    All ranks start from rank 0's weights. Of a model on the meta device only this rank's shards
    come into being, from `weights` or its own initialisers (`reset_parameters`, `_init_weights`):
    values follow from the seed, equally under every plan and on one process, and are others than
    those of a model that was built with values. Raises ValueError for a plan that does not fit,
    for ranks that disagree, and for a tensor on the meta device that nothing initialises."""
    losses = dict(loss) if isinstance(loss, Mapping) else {"": loss}
    of = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    _check_kinds(model, of, losses, scheduler, seed, timeout, carry, autocast)
    if len({*of, *losses}) > 1:
        _check_turns(of, losses, carry, scheduler)
    optimizer = of[""] if "" in of else JoinedOptimizer(of)
    know_encodings()
    _check_tensors(model)
    _check_free(model)
    chosen, allowed = checked_plan(plan), Allowance.parse(allow)
    if scheduler is not None:
        _check_scheduler(scheduler, optimizer)
    world = World.open(device, timeout)
    chosen = Survival.first_plan(chosen, world)
    if world.device.type == "cpu":
        heap.keep()
    if warning := emulated(world.device, autocast):
        caution(warning)
    wrapped: Model | None = None
    try:
        check_optimizer(optimizer, sharded=False)
        if carry is not None:
            losses[""], example_batch = joined(losses[""], example_batch, carry)
        wrapped = Model(_placed(model, world.device))
        _compare_ranks(world.everyone, wrapped, chosen, optimizer, seed, example_batch)
        _check_hooks(wrapped, world)
        source = None if weights is None else Path(weights)
        rates = scheduler if isinstance(scheduler, ScaledRate) else None
        rule = "none" if rates is None else rates.rate.rule
        follows = rule == "adascale"
        options = Options(
            seed, sync_batch_norm, autocast, source, carry, headroom, noise_scale or follows,
            follows, rule == "staleness", say or (lambda _: None), allowed,
        )  # fmt: skip
        example = batches.to_device(example_batch, world.device)
        turns = NamedLosses(losses, optimizer, wrapped)
        trainer = Trainer(wrapped, optimizer, turns, example, chosen, world, options)
        trainer.scheduler = scheduler
        if rates is not None:
            rates.noise_scale = lambda: noise.known if (noise := trainer.noise_scale) else None
        wrapped.block()
        return trainer
    except BaseException:
        if wrapped is not None:
            wrapped.release()
        world.close()
        raise


def _check_kinds(
    model: Any, optimizers: Mapping[str, Any], losses: Mapping[str, Any], scheduler: Any,
    seed: Any, timeout: Any, carry: Any, autocast: Any,
) -> None:  # fmt: skip
    """ValueError for arguments of another kind than `prepare` says, all at once."""
    over = "an optimizer over its parameters, like torch.optim.AdamW(model.parameters())"
    steps = scheduler is None or (hasattr(scheduler, "step") and not isinstance(scheduler, type))
    computes = "a function loss(model, batch), like lambda m, b: cross_entropy(m(b[0]), b[1])"
    of_rows, starts = "a function of the number of rows, or None", carry is None or callable(carry)
    computing = (
        "None or torch.bfloat16 (float16's small gradients vanish unless losses are scaled)"
    )
    wanted = (
        ("model", model, isinstance(model, nn.Module), "an nn.Module"),
        *(("optimizer", x, isinstance(x, Optimizer), over) for x in optimizers.values()),
        *(("loss", x, callable(x) and not _is_criterion(x), computes) for x in losses.values()),
        *(("a loss's name", n, isinstance(n, str), "a text") for n in losses),
        ("scheduler", scheduler, steps, "a scheduler over that optimizer, or None"),
        ("carry", carry, starts, of_rows),
        ("seed", seed, isinstance(seed, int), "a whole number"),
        ("autocast", autocast, autocast in (None, torch.bfloat16), computing),
        ("timeout", timeout, isinstance(timeout, timedelta), "a datetime.timedelta"),
    )
    faults = [
        f"{name} should be {kind}, not {_kind(value)}"
        for name, value, fits, kind in wanted
        if not fits
    ]
    if not losses:
        faults.append(f"loss should be {computes}, or a dict of such by name, not an empty one")
    if faults:
        raise ValueError(f"prepare: {'; '.join(dict.fromkeys(faults))}")


def _is_criterion(loss: Any) -> bool:
    """Whether it is one of torch's losses, which take predictions and targets."""
    known = "torch.nn.modules.loss", "torch.nn.functional"
    return isinstance(loss, _Loss) or getattr(loss, "__module__", "") in known


def _check_turns(
    optimizers: Mapping[str, Any], losses: Mapping[str, Any], carry: Any, scheduler: Any
) -> None:  # fmt: skip
    """ValueError for losses that cannot take turns."""
    names, with_optimizer = (", ".join(x) or "one" for x in (losses, optimizers))
    if optimizers.keys() not in ({""}, losses.keys()):
        raise ValueError(
            f"prepare: there are optimizers of the losses {with_optimizer}, and the losses are "
            f"{names}: give each loss its optimizer, or one optimizer to all"
        )
    once = {"carry": carry, "scheduler": scheduler if len(optimizers) > 1 else None}
    if faults := [name for name, value in once.items() if value is not None]:
        raise ValueError(
            f"prepare: {' and '.join(faults)} cannot be of losses that take turns ({names}): "
            "leave a scheduler out, step it yourself on all ranks, and keep its state_dict by "
            "trainer.save(path, extra=...); a model with a carry is trained by one loss"
        )


def _check_tensors(model: nn.Module) -> None:
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise ValueError(
            f"the model's {lazy[0]} has no shape yet, as its module is a lazy one: call the model "
            "once with a batch, and build the optimizer then, before prepare"
        )
    if frozen := [name for name, tensor in tensors if tensor.is_inference()]:
        raise ValueError(
            f"the model's {frozen[0]} was made under torch.inference_mode, so that it cannot be "
            "trained: build the model outside of it"
        )


def _check_free(model: nn.Module) -> None:
    """ValueError for a model of which another trainer holds parameters, and may have cut them."""
    owners = {id(p): type(m.module).__name__ for m in Model.held for p in m.parameters.values()}
    ours = GradientSync.__module__  # of one that was dropped
    for name, p in model.named_parameters():
        hooks = (p._post_accumulate_grad_hooks or {}).values()
        if id(p) in owners or any(hook.__module__ == ours for hook in hooks):
            raise ValueError(
                f"the model's {name} belongs to another trainer, of a "
                f"{owners.get(id(p), 'model')}: call its switch('data') and close() before; two "
                "losses over one model (a GAN's) are trained by one trainer, of a module that has "
                "all parts: prepare(model, {'d': ..., 'g': ...}, {'d': ..., 'g': ...}, ...) takes "
                "an optimizer and a loss of each"
            )


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.dtype):
        return str(value)
    return "None" if value is None else f"of type {type(value).__name__}"


def _compare_ranks(
    everyone: Group, model: Model, plan: Plan, optimizer: Optimizer, seed: int, example: Any
) -> None:
    """ValueError on every rank where ranks have other models, plans, optimizers, seeds or batches.

    Names are compared, for equal shapes alone do not tell models apart. A fault of one rank's own
    is an error on all: none is left waiting for it."""
    fault = ""
    described: dict[str, Any] = {}
    try:
        described = _described(model, plan, optimizer, seed, example)
    except ValueError as error:
        fault = str(error)
    gathered = everyone.all_gather_json([fault, batches.fingerprint(repr(described))])
    refuse_first([text for text, _ in gathered])
    if len({mark for _, mark in gathered}) > 1:
        require_alike(everyone, described)


def _described(
    model: Model, plan: Plan, optimizer: Optimizer, seed: int, example: Any
) -> dict[str, Any]:
    known = {p: n for n, p in model.parameters.items()}
    refuse_foreign(optimizer, known)
    return {
        "the plan": str(plan),
        "the seed": seed,
        "the model's tensors": [
            [d.name, list(d.shape), d.dtype, d.trainable] for d in model.described.values()
        ],
        "the optimizer": kind_of(optimizer),
        "the optimizer's groups": [
            [known[p] for p in group["params"]] for group in optimizer.param_groups
        ],
        "the optimizer's settings": [
            [f"{key}={value!r}" for key, value in group.items() if key != "params"]
            for group in optimizer.param_groups
        ],
        "the example batch": [batches.row_count(example), repr(signature(example))],
    }


def _check_hooks(model: Model, world: World) -> None:
    """Hooks of parameters run in backward, when a rank has the gradient of its own rows alone:
    ValueError for one behind it, which would train with that; a warning where one changes it."""
    if world.size == 1:
        return
    behind = [n for n, p in model.parameters.items() if p._post_accumulate_grad_hooks]
    if behind:
        raise ValueError(
            f"the parameter {behind[0]} has a hook behind its gradient "
            "(register_post_accumulate_grad_hook), which would see the gradient of this rank's "
            "rows alone: remove it, and change gradients between trainer.backward and "
            "trainer.update, where they are summed"
        )
    changing = [n for n, p in model.parameters.items() if p._backward_hooks]
    if changing and not world.rank:
        caution(
            f"the parameter {changing[0]} has a gradient hook, which sees the gradient of one "
            "rank's rows: one that is not linear (a limit, a norm) trains another model than one "
            "device would; change gradients between trainer.backward and trainer.update instead, "
            "where they are summed (trainer.clip limits their norm)"
        )


def _check_scheduler(scheduler: LRScheduler | ScaledRate, optimizer: Optimizer) -> None:
    kind = type(scheduler).__name__
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"the scheduler {kind} is of another optimizer than the one that is given to prepare"
        )
    if needed := needed_arguments(scheduler.step):
        raise ValueError(
            f"the scheduler {kind} is stepped with {', '.join(needed)}, which an update does not "
            "know: leave it out of prepare and call its step yourself on all ranks, with what "
            "trainer.evaluate returns; trainer.save(path, extra=...) keeps its state_dict"
        )


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on `device`, but for what is on the meta device."""
    tensors = (*model.parameters(), *model.buffers())
    if not any(t.is_meta for t in tensors):
        return model.to(device)
    if all(t.is_meta or t.device == device for t in tensors):
        return model
    placed: nn.Module = model._apply(lambda t: t if t.is_meta else t.to(device))
    return placed
