"""Every model family under every plan against one process: `python -m benchmarks.equality [--dtype
float32] [--uneven | --stages | --states] [--cases N]`.

--uneven: models of sizes that few degrees divide, `tensor` and mixed on 2, 3, 4 and 5 ranks.
--stages: all families as two stages of two ranks, 1F1B with four micro-batches; GPT-2 with tied
embeddings, a U-Net whose skips cross stages and a ResNet of basic blocks under every schedule,
with 1, 4 and 7 micro-batches on 2 and 4 stages; groups of 3 + 1 ranks; 2 stages of 2 x 2 on 8.
--states: all families with parameters sharded (ZeRO 3) and recomputed on 4 x 1, 2 x 2, two stages
of two ranks, and with unequal rows; four of them under ZeRO 1 and 2; odd sizes on 3 ranks.
Else global batches of 12 rows on four ranks. A short last batch, five steps of AdamW; deviations
as `synchromesh verify` prints them, with the bytes it measured against those that `explain`
predicts. --cases draws so many of all, by a seed.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from synchromesh.trace.capture.capture import trace
from synchromesh.values import buckets
from synchromesh.values.schedule import PIPELINES
from synchromesh.verify.verify import verify
from tests.bucket_sizes import SEVERAL
from tests.models import FAMILIES, UNEVEN
from tests.ranks import RankFailed, run
from tests.targets import MODELS, target

PLANS = ("data", "tensor", "hybrid:tensor=2", "mixed")
RANKS = 4


def mixed(family: str, ranks: int) -> str:
    """Different degrees in neighbouring components."""
    model, loss, make = MODELS[family]()
    names = trace(model, loss, make(6), training=True).chain.names
    words = ("data", "tensor", "hybrid:tensor=2" if ranks == RANKS else "data")
    return "; ".join(["data", *(f"{n}={words[i % 3]}" for i, n in enumerate(names) if i % 3)])


def stages(family: str, groups: list[str], schedule: str, micro_batches: int, rest: str) -> str:
    """Stages of about equally many components on groups of ranks; interleaved ones come again."""
    model, loss, make = MODELS[family]()
    names = trace(model, loss, make(6), training=True).chain.names
    turns = groups * (2 if schedule == "interleaved" else 1)
    firsts = [names[i * len(names) // len(turns)] for i in range(len(turns))]
    text = "/".join(f"{ranks}:{first}" for ranks, first in zip(turns, firsts, strict=True))
    return f"{rest}; @stages={text}; @micro_batches={micro_batches}; @schedule={schedule}"


def stage_cases() -> Iterator[tuple[str, int, str, tuple[Any, ...]]]:
    """Family, ranks, name of the plan, arguments of `stages`."""
    pairs = ["0-1", "2-3"]
    for family in FAMILIES:
        yield family, 4, "2 stages of 2x1", (pairs, "1f1b", 4, "data")
    schedules = [pair for pair in product((2, 4), PIPELINES) if pair != (2, "interleaved")]
    for family in ("gpt2", "unet", "resnet_basic"):
        for (count, schedule), m in product(schedules, (1, 4, 7)):
            groups = [str(g) for g in range(2 if schedule == "interleaved" else count)]
            name = f"{count} stages, {schedule}, {m}"
            yield family, len(groups), name, (groups, schedule, m, "data")
    for family in ("gpt2", "cnn", "resnet_basic"):
        yield family, 4, "3 + 1 ranks", (["0-2", "3"], "1f1b", 4, "data")
        yield family, 8, "2 stages of 2x2", (["0-3", "4-7"], "1f1b", 4, "hybrid:tensor=2")


def state_cases() -> Iterator[tuple[str, int, str, Any, tuple[Any, ...]]]:
    """Family, ranks, plan or its name, what writes the plan, its arguments after the family."""
    pairs = ["0-1", "2-3"]
    rest = "sharded-data:recompute=yes"
    for family in FAMILIES:
        for plan in (
            "sharded-data", "data:recompute=yes", f"{rest}; @rows=3,2,1,2",
            "hybrid:tensor=2,states=parameters,recompute=yes",
        ):  # fmt: skip
            yield family, 4, plan, None, ()
        yield family, 4, "sharded, 2 stages of 2x1", stages, (pairs, "1f1b", 4, rest)
    levels = {"zero1": "optimizer", "zero2": "gradients"}
    for family, level in product(("cnn", "gpt2", "resnet_basic", "unet"), levels):
        yield family, 4, level, None, ()
        yield family, 4, f"{level}, 2 stages of 2x1", stages, (pairs, "1f1b", 4, level)
        yield family, 4, f"hybrid:tensor=2,states={levels[level]}", None, ()
    for family in UNEVEN:
        yield family, 3, rest, None, ()


def one(family: str, plan: str, steps: int, dtype: str) -> dict[str, Any]:
    return verify(target(family), plan, steps, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--families")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cases", type=int, help="so many of them, drawn by a seed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    buckets.SIZES = SEVERAL  # every model fills many, as models of real sizes do
    families = args.families.split(",") if args.families else UNEVEN if args.uneven else FAMILIES
    settings = product((2, 3, 4, 5), ("tensor", "mixed")) if args.uneven else product((4,), PLANS)
    cases = [
        (family, ranks, plan, mixed if plan == "mixed" else None, (ranks,))
        for family, (ranks, plan) in product(families, list(settings))
    ]
    if args.stages:
        cases = [(*case[:3], stages, case[3]) for case in stage_cases() if case[0] in families]
    if args.states:
        known = families if args.families else (*families, *UNEVEN)
        cases = [case for case in state_cases() if case[0] in known]
    if args.cases:
        drawn = random.Random(0).sample(range(len(cases)), min(args.cases, len(cases)))
        cases = [cases[i] for i in sorted(drawn)]
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(
            f"{'family':18} ranks {'plan':24}{'loss':>9} {'gradient':>9} {'parameter':>9}  bytes"
        )
    for family, ranks, plan, write, given in cases:
        text = run(1, write, family, *given)[0] if write else plan
        try:
            row = run(ranks, one, family, text, args.steps, args.dtype, timeout=180)[0]
        except RankFailed as error:
            row = {"passed": False, "error": str(error)}
        rows.append({"family": family, "word": plan, **row})
        if not args.json:
            print(f"{family:18} {ranks:5} {_line(plan, row)}", flush=True)
    passed = sum(row["passed"] for row in rows)
    print(json.dumps(rows) if args.json else f"{passed} of {len(rows)} passed in {args.dtype}")
    return 0 if passed == len(rows) else 1


def _line(plan: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{plan:24} {row['error'].splitlines()[-1]}"
    same = all(
        row[key] == row[f"explained_{key}"]
        for key in ("parameter_bytes_per_rank", "sent_bytes_per_step")
    )
    deviations = " ".join(
        f"{row[f'max_{n}_deviation']:9.1e}" for n in ("loss", "gradient", "parameter")
    )
    verdict = "passed" if row["passed"] else "FAILED"
    known = row["sent_bytes_compared"]  # else the mean of ranks that send unequal amounts
    told = "as explained" if same else "NOT AS EXPLAINED" if known else "in the mean"
    return f"{plan:24}{deviations}  {told}  {verdict}"


if __name__ == "__main__":
    sys.exit(main())
