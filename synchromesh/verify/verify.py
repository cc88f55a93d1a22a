"""Verification: a workload under a plan against one process, with the same batches and weights."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from synchromesh.engine.batches import checksum, row_count, to_device
from synchromesh.trace.capture.carry import joined
from synchromesh.trace.capture.export import BATCHED, REMEDY, products
from synchromesh.trace.partition.explain import explain
from synchromesh.trace.partition.local import Input, LocalComponent, Partition, exchange_of
from synchromesh.training.active_plan import checked_plan
from synchromesh.training.learning_rate import RateFactor, ScaledRate
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.fault import message
from synchromesh.values.plan import Plan
from synchromesh.verify.compressed import PlayedCompression
from synchromesh.verify.deviation import TOLERANCE, Deviations
from synchromesh.verify.reference import computed
from synchromesh.verify.replay import OrderReplay
from synchromesh.verify.versions import VersionReplay
from synchromesh.verify.workers import Workers
from synchromesh.workloads.workload import Workload

DTYPES = {"float64": torch.float64, "float32": torch.float32}
ALONE = "workers train alone for {} steps, then take the mean of their parameters{}"
LOSSY = (
    "gradients are sent with a loss ({}), which each rank owes the steps to come: those that "
    "ranks had are compared with one device, what is made of them with compressors in one process"
)
LATE = "the optimizer steps by the sum of gradients of {} steps before"
OUTER = ", by which an outer optimizer steps"
WILD = "processes write one set of parameters without locks, in an order that nobody knows"
ASYNCHRONOUS = "servers step by a worker's gradient when it comes, computed on older parameters"


def without_dropout(model: nn.Module) -> int:
    """Sets every dropout probability of the model to zero; returns how many were not."""
    changed = 0
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for key, value in list(vars(module).items()):
            named = "drop" in key.lower() or (is_dropout and key == "p")
            if named and isinstance(value, float) and value > 0.0:
                setattr(module, key, 0.0)
                changed += 1
    return changed


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating point tensors in `dtype`, complex ones of such parts."""
    return pytree.tree_map(lambda x: _as(x, dtype) if isinstance(x, Tensor) else x, batch)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return x.to(dtype.to_complex())
    return x.to(dtype) if x.is_floating_point() else x


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in `dtype`. `Module.to` would take the imaginary part from complex tensors."""
    model._apply(lambda x: _as(x, dtype))
    return model


def global_batches(workload: Workload, steps: int, dtype: torch.dtype) -> Iterator[Any]:
    """Seeded global batches; of several the last one is short: a row less than half of them."""
    for index in range(steps):
        rows = workload.batch_size
        if index == steps - 1 and steps > 1:
            rows = max(1, rows // 2 - 1)
        yield cast(workload.example(rows, seed=index + 1), dtype)


def verify(
    workload: Workload, plan: str, steps: int = 5, dtype: str | None = None, seed: int = 0,
    say: Callable[[str], None] | None = None, autocast: torch.dtype | None = None,
    by_age: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Trains under `plan` and, on rank 0, alone; the document of `synchromesh verify`.

    In each step losses, gradients and buffers are compared, and the parameters in the end; each
    difference with what rounding alone does (`noise_floor`). Dropout is set to zero and batch norm
    synchronised, so that both compute the same function. Where workers train alone the reference
    is as many models on one process (`oracle`), whose batch norms are their own.
    dtype: of both; float64, or with autocast float32. say: receives what is measured where `plan`
    is `auto`. autocast: e.g. torch.bfloat16, in both. by_age: servers divide learning rates by a
    gradient's age (`--lr-rule staleness`).

    Raises ValueError for a model that computes in single precision only, under float64."""
    dtype = dtype or ("float64" if autocast is None else "float32")
    assert autocast is None or dtype != "float64", "autocast leaves float64 as it is"
    kind = DTYPES[dtype]
    workload = _cast_carry(workload, kind)
    torch.manual_seed(seed)
    model = cast_model(workload.build(), kind)
    dropped = without_dropout(model)
    reference = copy.deepcopy(model)
    optimizer = workload.build_optimizer(model.parameters())
    example = cast(workload.example(workload.batch_size, seed=0), kind)
    rates = ScaledRate(optimizer, None, RateFactor("staleness")) if by_age else None
    try:
        trainer = prepare(
            model, optimizer, workload.loss, example, plan=plan, seed=seed, autocast=autocast,
            sync_batch_norm=not checked_plan(plan).sync.alone, carry=workload.carry, say=say,
            scheduler=rates,
        )  # fmt: skip
        try:
            # CUDA convolutions would round float32 to 10 bits, more than what is allowed here
            cudnn = torch.backends.cudnn
            with cudnn.flags(enabled=cudnn.enabled, allow_tf32=False):
                return _compare(trainer, reference, workload, steps, dtype, dropped)
        finally:
            trainer.close()
    except RuntimeError as error:
        if dtype == "float64" and computes_in_float32_only(workload):
            setting = f", or {REMEDY}" if products(error) not in ("", BATCHED) else ""
            first = next(iter(message(error).splitlines()), type(error).__name__)
            raise ValueError(
                f"the model does not compute in float64 ({first}), but it does in float32: "
                f"verify it with --dtype float32{setting}"
            ) from error
        raise


def _cast_carry(workload: Workload, dtype: torch.dtype) -> Workload:
    start = workload.carry
    if start is None:
        return workload
    return replace(workload, carry=lambda rows: cast(start(rows), dtype))


def computes_in_float32_only(workload: Workload) -> bool:
    """Whether a step of the workload fails in float64 on this process, and not in float32."""

    def works(dtype: torch.dtype) -> bool:
        model = cast_model(workload.build(), dtype)
        start = _cast_carry(workload, dtype).carry
        loss, batch = joined(workload.loss, cast(workload.example(), dtype), start)
        try:
            computed(model, loss, [batch])
        except RuntimeError:
            return False
        return True

    return not works(torch.float64) and works(torch.float32)


def _compare(
    trainer: Trainer, reference: nn.Module, workload: Workload, steps: int, dtype: str,
    dropped: int,
) -> dict[str, Any]:  # fmt: skip
    autocast = trainer.options.autocast
    tolerance = TOLERANCE[dtype if autocast is None else "autocast"]
    compared = Deviations(trainer, tolerance)
    sync, wild = trainer.plan.sync, trainer.plan.sync.in_common and trainer.workers.count > 1
    train = _wild if wild else _replay if sync.servers and sync.asynchronous else _train
    train = _unflushed if trainer.plan.kept else train
    sent = train(trainer, reference, compared, workload, steps, DTYPES[dtype])
    deviations = compared.document()
    held = trainer.gather_numbers(parameter_bytes(trainer))
    explained = explain(
        trainer.traced, trainer.partition, trainer.plan, trainer.world.size, workload.batch_size,
        trainer.options.sync_batch_norm,
    )  # fmt: skip
    held_due = list(explained.parameter_bytes_per_rank)
    sent_due = list(explained.sent_bytes_per_step)
    exact = steps >= sync.steps and _exactly_explained(trainer, workload.batch_size)
    # it fetches as it comes, or some of its steps are to come
    exact = exact and not (sync.word == "ssp" or steps % sync.push or steps % sync.fetch)
    document = {
        "plan": str(trainer.plan), "ranks": trainer.world.size, "steps": steps, "dtype": dtype,
        "autocast": None if autocast is None else str(autocast).removeprefix("torch."),
        **deviations, "tolerance": tolerance,
        "parameter_bytes_per_rank": held, "sent_bytes_per_step": sent,
        "explained_parameter_bytes_per_rank": held_due, "explained_sent_bytes_per_step": sent_due,
        "sent_bytes_compared": exact, "dropout_set_to_zero": dropped,
        "batch_norm": "per row block" if sync.alone else "synchronised",
        "exact": trainer.plan.exact or (sync.in_common and not wild),
        "reason": _reason(trainer.plan, wild), "oracle": _oracle(trainer.plan, wild),
        "staleness": trainer.workers.staleness(), "updates": trainer.workers.updates(),
        "passed": not deviations["faults"] and held == held_due
        and (not exact or sent == sent_due),
    }  # fmt: skip
    everyone: dict[str, Any] = trainer.world.everyone.broadcast_json(document)
    return everyone


def _reason(plan: Plan, wild: bool) -> str:
    """Why a plan does not compute what one device does."""
    if plan.kept:
        return plan.kept.sentence
    if plan.compressed:
        return LOSSY.format(plan.compression)
    if plan.sync.asynchronous:
        return WILD if wild else "" if plan.sync.in_common else ASYNCHRONOUS
    if plan.sync.late:
        return LATE.format(plan.sync.late)
    outer = OUTER if plan.sync.outer_step else ""
    return ALONE.format(plan.sync.steps, outer) if plan.sync.steps else ""


def _oracle(plan: Plan, wild: bool) -> str | None:
    """What one process plays; None where nothing can be proved."""
    if wild:
        return None
    if plan.exact or plan.sync.in_common:
        return "one device"
    return "replay" if plan.sync.asynchronous else "simulated workers"


def parameter_bytes(trainer: Trainer) -> int:
    """Bytes of the parameters of the chain that live on this rank."""
    names = {p.name for c in trainer.traced.chain.components for p in c.parameters}
    return sum(p.nbytes for n, p in trainer.model.parameters.items() if n in names)


def _train(
    trainer: Trainer, reference: nn.Module, deviations: Deviations, workload: Workload, steps: int,
    dtype: torch.dtype,
) -> list[int]:  # fmt: skip
    """Trains both and compares them; the bytes that each rank sent in a step: the first one, or
    the mean of those from one mean of parameters to the next. A carry goes from batch to batch,
    but for the last one, which begins new streams."""
    world, every = trainer.world, trainer.plan.sync.steps
    compressed = PlayedCompression(trainer) if trainer.plan.compressed else None
    workers = Workers(trainer, reference, workload)
    sent, counted = 0, every or 1
    for step, batch in enumerate(global_batches(workload, steps, dtype), 1):
        _require_equal(trainer, batch, step)
        if step == steps:
            trainer.forget_carry()
            workers.forget_carry()
        world.ledger.reset()
        value = trainer.backward(trainer.shard(batch))
        sent += world.ledger.sent * (step <= counted)
        gradients = whole = trainer.gradients()
        if compressed is not None:
            whole, expected = compressed.step(gradients)
            deviations.shards("compressed", gradients, expected, step)
        workers.backward(to_device(batch, world.device))
        deviations.loss(value, workers.joint, step)
        for ranks, made in workers.made:
            deviations.shards("gradient", whole, made, step, ranks)
        complete = workers.gathered(gradients)
        world.ledger.reset()
        trainer.update()
        sent += world.ledger.sent * (step <= counted)
        workers.update(complete, step)
        # buffers are settled when they are asked for, and parameters
        if not (every or trainer.plan.sync.late):
            deviations.shards("buffer", trainer.buffers(), workers.buffers(), step)
    for _ in zip(trainer.sums.late(), workers.late(), strict=False):
        gradients = trainer.gradients()
        for ranks, made in workers.made:
            deviations.shards("gradient", gradients, made, steps, ranks)
        workers.update(workers.gathered(gradients), steps)
    deviations.shards("buffer", trainer.buffers(), workers.buffers(), steps)
    deviations.shards("parameter", trainer.parameters(), workers.trained(), steps)
    return trainer.gather_numbers(sent // min(counted, steps))


def _replay(
    trainer: Trainer, reference: nn.Module, deviations: Deviations, workload: Workload, steps: int,
    dtype: torch.dtype,
) -> list[int]:  # fmt: skip
    """Trains workers that go on without each other, replays what they did in the end; the bytes
    that each rank sent in a step on average."""
    replay, ledger = OrderReplay(trainer, reference, workload, deviations), trainer.world.ledger
    within = between = 0  # of the first step, whose batch is not short; of all exchanges
    for step, batch in enumerate(global_batches(workload, steps, dtype)):
        ledger.reset()
        value = trainer.backward(trainer.shard(batch))
        within += ledger.sent * (not step)
        replay.note(batch, value)
        ledger.reset()
        trainer.update()
        between += ledger.sent
    ledger.reset()
    trainer.workers.end()
    sent = trainer.gather_numbers(within + (between + ledger.sent) // steps)
    replay.compare(steps)
    return sent


def _unflushed(
    trainer: Trainer, reference: nn.Module, deviations: Deviations, workload: Workload, steps: int,
    dtype: torch.dtype,
) -> list[int]:  # fmt: skip
    """Trains a pipeline without a flush and one process that keeps its versions of weights."""
    replay = VersionReplay(trainer, reference, workload, deviations)
    return replay.train(global_batches(workload, steps, dtype))


def _wild(
    trainer: Trainer, reference: nn.Module, deviations: Deviations, workload: Workload, steps: int,
    dtype: torch.dtype,
) -> list[int]:  # fmt: skip
    """Trains workers that write one set of parameters without locks: losses have to be finite."""
    sent = 0
    for step, batch in enumerate(global_batches(workload, steps, dtype), 1):
        trainer.world.ledger.reset()
        rows = trainer.shard(batch)
        value = trainer.step(rows)
        sent += trainer.world.ledger.sent * (step == 1)
        if row_count(rows) and not value.isfinite():
            raise ValueError(
                f"the loss of step {step} is {float(value)} on rank {trainer.rank}, where nothing "
                "but finite losses can be asked for: lower the learning rate"
            )
    return trainer.gather_numbers(sent)


def _require_equal(trainer: Trainer, batch: object, step: int) -> None:
    """ValueError where ranks made other data: no plan could then agree with one process."""
    sums = trainer.gather_numbers(checksum(batch))
    other = [rank for rank, of_rank in enumerate(sums) if of_rank != sums[0]]
    if other:
        raise ValueError(
            f"ranks {other} read another batch than rank 0 in step {step}: every rank makes the "
            "data set itself, so random data need a seed of their own "
            "(torch.Generator().manual_seed(0)) and no rank a part of its own"
        )


def _even(made: Partition, reader: LocalComponent, item: Input) -> bool:
    """Whether all ranks send as much of a value to the component that reads it; of what crosses
    between stages the messages are known to the byte."""
    edge = exchange_of(made, reader, item)
    if edge.crosses:
        return True
    sides = ((item.have, edge.source), (item.want, edge.target))
    return all(
        placement.even(item.value.shape[placement.dim] if placement.sharded else 0, layout.tensor)
        for placement, layout in sides
    )


def _exactly_explained(trainer: Trainer, rows: int) -> bool:
    """Whether `explain` knows the bytes of each rank: on edges between layouts of a stage that do
    not divide the rows evenly it knows their mean, and of unequal parts that of the largest."""
    made, plan = trainer.partition, trainer.plan
    layouts = {c.layout.mesh for c in made.components}
    if len(layouts) == len({x.positions for x in layouts}):  # there are no such edges
        return True
    sizes = [stop - start for start, stop in plan.micro_rows(rows)]
    shares = plan.rows is None and not any(n % x.data for n in sizes for x in layouts)
    return shares and all(_even(made, c, item) for c in made.components for item in c.inputs)
