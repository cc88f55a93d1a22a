"""Every model family under every plan against one process: `python -m benchmarks.equality [--dtype
float32] [--uneven]`.

--uneven: models of sizes that few degrees divide, `tensor` and mixed on 2, 3, 4 and 5 ranks. Else
global batches of 12 rows on four ranks. A short last batch, five steps of AdamW; deviations as
`synchromesh verify` prints them, with the bytes it measured against those that `explain` predicts.
"""

import argparse
import json
import sys
from itertools import product
from typing import Any

import torch

from synchromesh.trace.capture.capture import trace
from synchromesh.training.verify import verify
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


def one(family: str, plan: str, steps: int, dtype: str) -> dict[str, Any]:
    return verify(target(family), plan, steps, dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--families")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    families = args.families.split(",") if args.families else UNEVEN if args.uneven else FAMILIES
    settings = product((2, 3, 4, 5), ("tensor", "mixed")) if args.uneven else product((4,), PLANS)
    rows: list[dict[str, Any]] = []
    if not args.json:
        print(
            f"{'family':18} ranks {'plan':16}{'loss':>9} {'gradient':>9} {'parameter':>9}  bytes"
        )
    for family, (ranks, plan) in product(families, list(settings)):
        text = run(1, mixed, family, ranks)[0] if plan == "mixed" else plan
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
        return f"{plan:16} {row['error'].splitlines()[-1]}"
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
    return f"{plan:16}{deviations}  {told}  {verdict}"


if __name__ == "__main__":
    sys.exit(main())
