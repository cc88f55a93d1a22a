"""What `prediction` and `choice` print tables of: `sudo python -m benchmarks.pairs --out FILE`.

For each model and lab (hosts x Mbit/s) the trainer finds its plan (`auto`), which predicts every
candidate; then the candidates, DistributedDataParallel and FSDP2 are trained in turns in the same
processes, in ABBA order, and the median full-size step of each (of the slowest rank) is noted.

--sample: each model in one lab, drawn by a seed; of given plans, one model in each lab.

--stages, --states: instead of candidates of `auto`, given plans are predicted and trained in turns
on four hosts: with stages, which leave their cuts open; with sharded states and recomputation.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.machine import machine
from benchmarks.zoo import MODELS, make
from synchromesh.lab import HostFailed, Lab

LABS = "4x200,4x1000,2x50,8x200"
PAIRED = ",".join(m for m in MODELS if m not in ("pooled", "bert"))
BLOCK = 3.0  # seconds that the steps of one strategy should take at most in one turn
FEWEST, MOST = 2, 6  # steps of a turn, after one that is not counted
ALIKE = 0.02  # predictions that differ by less are of one plan in other words
# five of the 17 models and labs of tables/prediction.txt, by random.Random(9).sample(sorted, 5),
# drawn before the package was rearranged, which had to leave every prediction as good as it was
QUARTER = {
    "2x50": ("conv",),
    "4x200": ("conv", "vgg"),
    "4x1000": ("resnet18", "vgg"),
}
SEED = 1  # of samples; the first whose draw of models and labs has all four labs
# each model of these 17 in one lab: its labs shuffled, of these the one that was taken least
SAMPLE = {
    "2x50": ("lstm",),
    "4x200": ("context", "vgg", "vit"),
    "4x1000": ("mlp", "resnet18"),
    "8x200": ("conv",),
}
STAGES = (
    "pipeline:stages=2,microbatches=4",
    "pipeline:stages=4,microbatches=4",
    "pipeline:stages=4,microbatches=8; @schedule=gpipe",
    "hybrid:stages=2,tensor=2,microbatches=2",
)
Given = dict[str, dict[str, tuple[str, ...]]]  # lab -> model -> plans
STAGED: Given = {  # 16 pairs
    "4x200": {"vgg": STAGES, "resnet18": STAGES},
    "4x1000": {"vit": STAGES, "resnet18": STAGES},
}
# each plan once for both models and in both labs
LEVELS = (
    "zero1",
    "sharded-data",
    "hybrid:tensor=2,states=gradients",
    "pipeline:stages=2,microbatches=4,states=optimizer,recompute=yes",
)
SAVING = (
    "zero2; @micro_batches=4",
    "data:recompute=yes",
    "hybrid:tensor=2,states=parameters,recompute=yes",
    "pipeline:stages=2,microbatches=4,states=parameters",
)
SHARDED: Given = {  # 16 pairs
    "4x200": {"vit": LEVELS, "vgg": SAVING},
    "4x1000": {"vit": SAVING, "vgg": LEVELS},
}
Row = dict[str, Any]


class Rival:
    """PyTorch alone on this rank's rows, the model wrapped by `wrap`."""

    def __init__(self, made: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
        build, self.loss, batch, optimizer = made
        self.model = wrap(build())
        self.optimizer = optimizer(self.model.parameters())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.batch = pytree.tree_map(lambda x: x.chunk(ranks)[rank].clone(), batch)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model, self.batch).backward()
        self.optimizer.step()


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2: every module of the top two levels that has parameters is a unit, and the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        units = [m for m in child.children() if any(True for _ in m.parameters())]
        for unit in units if len(units) > 1 else [child]:
            if any(True for _ in unit.parameters()) and not isinstance(unit, nn.ModuleList):
                fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp-bucket-view": lambda m: nn.parallel.DistributedDataParallel(
        m, gradient_as_bucket_view=True
    ),
    "fsdp2": sharded,
}


def measure(name: str, most: int, rounds: int, rivals: Iterable[str]) -> list[Row]:
    """On every rank: the candidates of `auto` and the rivals, predicted and measured."""
    import synchromesh as sm

    made = make(name)
    build, loss, batch, optimizer = made
    model = build()
    began = time.perf_counter()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan="auto")
    found = time.perf_counter() - began
    assert trainer.choice is not None
    chosen = trainer.choice.chosen.plan
    candidates = _among(trainer.choice.candidates, most)
    mine: list[Any] = [None]  # this rank's rows under the plan in force

    def arranged(candidate: Any) -> Callable[[], None]:
        def begin() -> None:
            trainer.switch(candidate.plan)
            trainer._execution.pieces.chosen = candidate.time.pieces
            mine[0] = pytree.tree_map(Tensor.clone, trainer.shard(batch))  # alone in its storage

        return begin

    turns: list[tuple[str, Callable[[], None], Callable[[], Any]]] = [
        (str(c.plan), arranged(c), lambda: trainer.step(mine[0])) for c in candidates
    ]
    for rival in rivals:
        strategy = Rival(made, RIVALS[rival])
        turns.append((rival, lambda: None, strategy.step))
    taken: dict[str, list[float]] = {what: [] for what, *_ in turns}
    told: dict[str, Any] = {}
    bytes_: dict[str, float] = {}
    for turn in range(rounds):
        for what, begin, step in turns if turn % 2 == 0 else turns[::-1]:
            if taken[what] and statistics.median(taken[what]) > BLOCK:
                continue  # slow enough to be sure
            begin()
            if what not in RIVALS and what not in told:
                told[what] = trainer.predict()  # before its first step, as `train` says it
            taken[what] += _timed(step)
            if what not in RIVALS and what not in bytes_:
                bytes_[what] = _peak(trainer, mine[0])
    rows = []
    for c in candidates:
        said = told[str(c.plan)]
        rows.append(
            {
                "model": name,
                "plan": str(c.plan),
                "chosen": c.plan == chosen,
                "guessed": c.seconds,  # when it was chosen or not
                "predicted": said.seconds,
                "measured": statistics.median(taken[str(c.plan)]),
                "predicted_bytes": max(m.peak for m in said.memory),
                "measured_bytes": bytes_[str(c.plan)],
                "share": c.time.communication_share if c.time else 0.0,
                "measuring_seconds": trainer.choice.profile.seconds,
                "prepare_seconds": found,
            }
        )
    rows += [
        {"model": name, "rival": r, "measured": statistics.median(taken[r])}
        for r in taken
        if r in RIVALS
    ]
    assert trainer.planning.profile is not None
    rows[0]["profile"] = trainer.planning.profile.to_dict()  # from which all were predicted
    trainer.close()
    return rows


def measure_given(name: str, texts: Sequence[str], rounds: int) -> list[Row]:
    """On every rank: these plans, predicted and measured. If `auto` is one it is the first."""
    import synchromesh as sm

    build, loss, batch, optimizer = make(name)
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan=texts[0])
    plans, told, bytes_ = {texts[0]: trainer.plan}, {}, {}
    taken: dict[str, list[float]] = {text: [] for text in texts}
    for turn in range(rounds):
        for text in texts if turn % 2 == 0 else texts[::-1]:
            trainer.switch(plans.get(text, text))
            plans[text] = trainer.plan
            mine = pytree.tree_map(Tensor.clone, trainer.shard(batch))
            if text not in told:
                told[text] = trainer.predict()
            trainer._execution.pieces.chosen = told[text].time.pieces
            taken[text] += _timed(lambda mine=mine: trainer.step(mine))  # type: ignore[misc]
            if text not in bytes_:
                bytes_[text] = _peak(trainer, mine)
    least = min(told.values(), key=lambda c: c.seconds)
    rows = [
        {
            "model": name,
            "plan": text,
            "stands_for": str(plans[text]),
            "chosen": told[text] is least,
            "guessed": told[text].seconds,
            "predicted": told[text].seconds,
            "measured": statistics.median(taken[text]),
            "predicted_bytes": max(m.peak for m in told[text].memory),
            "measured_bytes": bytes_[text],
        }
        for text in texts
    ]
    trainer.close()
    return rows


def _among(found: Sequence[Any], most: int) -> list[Any]:
    """The chosen plan, the plans that anybody would try, and the best of the others; of those that
    are predicted to be equally quick, one: they have no order."""
    known = [c for c in found if c.time is not None]
    taken = [c for c in known if not (c.plan.overrides or c.plan.ranks or c.plan.stages)]
    taken += [c for c in known[:1] if c not in taken]
    for c in known:
        apart = all(abs(c.seconds / other.seconds - 1) > ALIKE for other in taken)
        if len(taken) < most and apart:
            taken.append(c)
    return [c for c in known if c in taken]


def _timed(step: Callable[[], Any]) -> list[float]:
    """Seconds of some steps, each of the rank that is slowest."""
    first = _slowest(step)
    return [_slowest(step) for _ in range(max(FEWEST, min(MOST, int(BLOCK / first))))]


def _slowest(step: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _peak(trainer: Any, mine: Any) -> float:
    """The most bytes of tensors that a rank has alive in a step, of the rank that has most."""
    from synchromesh.engine.gradients import FlatBucket
    from synchromesh.programs.memory import LiveBytes

    execution = trainer._execution
    known = [
        *trainer.model.parameters.values(),
        *trainer.model.buffers.values(),
        *execution.sharding.whole.values(),
        *(b.flat for b in execution.sync._buckets if isinstance(b, FlatBucket)),
        *(x for s in trainer.optimizer.state.values() for x in s.values() if torch.is_tensor(x)),
        *pytree.tree_leaves(mine),
    ]
    with LiveBytes(known) as live:
        trainer.step(mine)
    peak = torch.tensor(float(live.peak))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return float(peak)


def emulated(lab_name: str, cpu: float | None) -> Lab:
    """The hosts of `lab_name` (hosts x Mbit/s), each with `cpu` of a core, else a usual share."""
    hosts, mbit = (int(n) for n in lab_name.split("x"))
    return Lab(hosts=hosts, bandwidth=f"{mbit}mbit", cpu=cpu or (0.2 if hosts > 4 else 0.4))


def run(options: argparse.Namespace) -> list[Row]:
    """The rows of every model in every lab; ValueError or HostFailed where a lab fails."""
    found: list[Row] = []
    root = Path(__file__).parents[1]
    given = SHARDED if options.states else STAGED if options.stages else {}
    if options.drawn is not None:
        from benchmarks import drawn  # imports transformers

        given = {drawn.LAB: dict.fromkeys(drawn.widened(options.drawn), drawn.PLANS)}
    if options.sample:
        chance = random.Random(SEED)
        given = {lab: dict([chance.choice(list(of.items()))]) for lab, of in given.items()}
    cases = given or (SAMPLE if options.sample else QUARTER if options.quarter else {})
    for lab_name, models in (
        cases or dict.fromkeys((options.labs or LABS).split(","), ())
    ).items():
        with emulated(lab_name, options.cpu) as lab:
            for name in models or (options.models or PAIRED).split(","):
                print(f"{name} on {lab_name} ...", file=sys.stderr, flush=True)
                command = [
                    sys.executable, "-m", "benchmarks.pairs", "--rank", name,
                    "--most", str(options.most), "--rounds", str(options.rounds),
                    "--rivals", options.rivals, "--plans", *given.get(lab_name, {}).get(name, ()),
                ]  # fmt: skip
                results = lab.run(command, timeout=1200, cwd=root)
                rows = json.loads(results[0].output.splitlines()[-1])
                found += [{**row, "lab": lab_name} for row in rows]
                if options.out:
                    Path(options.out).write_text(json.dumps(found))
    return found


def asked(description: str) -> argparse.Namespace:
    """The options that all who use these pairs have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--from", dest="given", metavar="FILE", help="pairs that --out wrote")
    parser.add_argument("--out", metavar="FILE", help="where to keep the pairs, as JSON")
    parser.add_argument("--models", help=f"of the zoo ({PAIRED})")
    parser.add_argument("--labs", help=f"hosts x Mbit/s ({LABS})")
    parser.add_argument(
        "--starts",
        type=int,
        nargs="?",
        const=10,
        metavar="N",
        help="`choice`: how alike the plans of N starts of each model are",
    )
    parser.add_argument("--short", action="store_true", help="`prediction`: steps of few rows")
    parser.add_argument("--quarter", action="store_true", help="a sample of models and labs")
    parser.add_argument("--sample", action="store_true", help="drawn: each model in one lab")
    parser.add_argument("--stages", action="store_true", help="plans with stages on four hosts")
    parser.add_argument("--states", action="store_true", help="plans that shard and recompute")
    parser.add_argument(
        "--drawn", type=int, metavar="SEED", help="`prediction`: models of docs/models.md, widened"
    )
    parser.add_argument("--cpu", type=float, help="share of a core (0.4; 0.2 above 4 hosts)")
    parser.add_argument("--most", type=int, default=8, help="candidates of a model and lab")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each strategy")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--plans", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--rank", metavar="MODEL", help=argparse.SUPPRESS)
    return parser.parse_args()


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The pairs of a file, or measured now. SystemExit with one sentence where that fails."""
    if options.given:
        return list(json.loads(Path(options.given).read_text()))
    try:
        return run(options)
    except (ValueError, HostFailed) as error:
        raise SystemExit(str(error)) from None


def main() -> int:
    options = asked(__doc__.splitlines()[0] if __doc__ else "")
    if not options.rank:
        rows = rows_of(options)
        print(f"{len(rows)} rows; emulated hosts; {machine()}", file=sys.stderr)
        return 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rivals = [r for r in options.rivals.split(",") if r]
    if options.plans:
        rows = measure_given(options.rank, options.plans, options.rounds)
    else:
        rows = measure(options.rank, options.most, options.rounds, rivals)
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
