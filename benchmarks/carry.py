"""A language model with carried state on PTB: `python -m benchmarks.carry [DIR]
[--steps 50] [--json]`.

`ptb/lstm_small` in float64 with AdamW, from the files of PTB in DIR (`$SYNCHROMESH_DATA/ptb`):
under plans, across a switch in the middle and across a checkpoint that other ranks resume, against
a plain PyTorch loop on one process that hands its state on; then the perplexity of validation
text. Deviations are the largest of all steps and ranks, relative to the loop's.
"""

import argparse
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import synchromesh as sm
from benchmarks.machine import machine
from synchromesh.training.trainer import Trainer
from synchromesh.verify.verify import cast, cast_model
from synchromesh.workloads.target import load
from synchromesh.workloads.text import ContinuingText
from synchromesh.workloads.workload import Workload
from tests.ranks import run
from tests.real_data import DATA

GOAL = 1e-10  # relative deviation of a loss
STAGES = "data; @stages=0:embedding/1:layers.1"
PAIRS = "data; @stages=0-1:embedding/2-3:layers.1; @micro_batches=4"
HYBRID = "hybrid:tensor=2"
VALIDATED = 4  # batches of validation text
CASES: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("`data`", 2, ("data",)),
    ("`data`", 4, ("data",)),
    (f"`{HYBRID}`", 4, (HYBRID,)),
    ("two stages of one rank", 2, (STAGES,)),
    ("two stages of two ranks, 4 micro-batches", 4, (PAIRS,)),
    (f"`data`, switched to two stages, then to `{HYBRID}`", 4, ("data", PAIRS, HYBRID)),
)


def job(folder: str) -> Workload:
    """The workload in float64, with a few batches of validation text."""
    found = load("ptb/lstm_small", folder)
    start, valid = found.carry, found.valid_data
    assert start is not None and isinstance(valid, ContinuingText)
    ids = valid.ids[: VALIDATED * found.batch_size * valid.length + 1]
    return replace(
        found, carry=lambda rows: cast(start(rows), torch.float64),
        valid_data=ContinuingText(ids, valid.length),
    )  # fmt: skip


def built(work: Workload, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = cast_model(work.build(), torch.float64)
    return model, work.build_optimizer(model.parameters())


def streams(data: Any, rows: int, count: int) -> list[Any]:
    """The first batches of a text, each of whose rows goes on where it ended."""
    steps = len(data) // rows
    return [
        tuple(
            torch.stack(x) for x in zip(*(data[i * steps + t] for i in range(rows)), strict=True)
        )
        for t in range(count)
    ]


def alone(folder: str, steps: int) -> list[float]:
    """Losses of a plain loop, and the validation loss behind it."""
    work = job(folder)
    model, optimizer = built(work, 0)
    losses, carry = [], work.carry(work.batch_size)  # type: ignore[misc]
    for batch in streams(work.train_data, work.batch_size, steps):
        value, carry = work.loss(model, batch, carry)
        carry = pytree.tree_map(Tensor.detach, carry)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    total, carry = 0.0, work.carry(work.batch_size)  # type: ignore[misc]
    with torch.no_grad():
        for batch in streams(work.valid_data, work.batch_size, VALIDATED):
            value, carry = work.loss(model, batch, carry)
            total += value.item()
    return [*losses, total / VALIDATED]


def prepared(work: Workload, plan: str, seed: int) -> Trainer:
    warnings.simplefilter("ignore")  # no tensor degree cuts LSTM layers
    model, optimizer = built(work, seed)
    return sm.prepare(model, optimizer, work.loss, work.example(), plan=plan, carry=work.carry)


def trained(folder: str, plans: tuple[str, ...], first: int, last: int, path: str) -> list[float]:
    """Losses of the steps first to last, the plans in equal parts, and the validation loss; from
    the checkpoint at `path`, where first is not 0, else to one."""
    work = job(folder)
    trainer = prepared(work, plans[0], seed=first)  # other weights than the checkpoint's
    loader = trainer.loader(work.train_data, work.batch_size, continuing=True)
    if first:
        trainer.resume(path)
    losses, part = [], (last - first) // len(plans) + 1
    for done, batch in enumerate(loader, first + 1):
        losses.append(trainer.step(batch).item())
        if done == last:
            break
        if (done - first) % part == 0:
            trainer.switch(plans[(done - first) // part])
    if not first:
        trainer.save(path)
    held_out = trainer.loader(work.valid_data, work.batch_size, continuing=True)
    losses.append(trainer.evaluate(held_out, work.metric)["loss"])  # type: ignore[arg-type]
    trainer.close()
    return losses


def deviation(found: list[list[float]], expected: list[float]) -> float:
    assert all(len(losses) == len(expected) for losses in found)
    return max(abs(a - b) / b for losses in found for a, b in zip(losses, expected, strict=True))


def measured(folder: str, steps: int, expected: list[float]) -> Iterator[dict[str, Any]]:
    """A row for each case, as soon as it is known."""
    with tempfile.TemporaryDirectory() as path:
        for name, ranks, plans in CASES:
            given = folder, plans, 0, steps, f"{path}/all"
            found = run(ranks, trained, *given, timeout=600)
            yield {"plan": name, "ranks": [ranks], "deviation": deviation(found, expected)}
        half = steps // 2
        run(4, trained, folder, (PAIRS,), 0, half, f"{path}/half", timeout=600)
        rest = folder, ("data",), half, steps, f"{path}/half"
        found = run(2, trained, *rest, timeout=600)
        name = f"two stages of two ranks, resumed at step {half} under `data`"
        yield {"plan": name, "ranks": [4, 2], "deviation": deviation(found, expected[half:])}


def main() -> int:
    parser = argparse.ArgumentParser(description="A carried state, under plans and across them.")
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", type=Path, default=DATA / "ptb",
        help="the folder of PTB's files (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"no files of PTB at {args.folder}: name their folder")
    torch.set_num_threads(1)
    folder = str(args.folder)
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    expected = alone(folder, args.steps)
    first, last, validation = (math.exp(loss) for loss in (expected[0], *expected[-2:]))
    say(f"plain loop: perplexity {first:.1f} -> {last:.1f}, validation {validation:.1f}")
    say("\n| plan | ranks | losses and validation loss, relative deviation |\n|---|---|---|")
    rows = []
    for row in measured(folder, args.steps, expected):
        rows.append(row)
        ranks = ", then ".join(map(str, row["ranks"]))
        say(f"| {row['plan']} | {ranks} | {row['deviation']:.1e} |")
    passed = all(row["deviation"] <= GOAL for row in rows)
    told = {"steps": args.steps, "rows": rows, "goal": GOAL, "passed": passed}
    if args.json:
        print(json.dumps({"machine": machine(), **told}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
