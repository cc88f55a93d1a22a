"""Many architectures: what of each is sharded, whether it is exact, and why the rest stays whole:
`python -m benchmarks.models [--only opt,mamba]`; writes docs/models.md.

Each is traced once; the ranks that verify it are forked from the process that did. What was found
is kept in tables/models.json, of which `--only` renews some lines.
"""

import argparse
import json
import re
import sys
import textwrap
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.architectures import ARCHITECTURES, BATCHED, CONFIGURATIONS
from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import opaque
from synchromesh.trace.capture.comparison import compare
from synchromesh.trace.partition.explain import explain
from synchromesh.trace.partition.partition import partition
from synchromesh.trace.step import Step
from synchromesh.values.plan import Plan
from synchromesh.verify.verify import cast, cast_model, verify, without_dropout
from synchromesh.workloads.workload import Workload
from tests.ranks import RankFailed, run
from tests.targets import workload
from tests.traces import known, remembered

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "tables" / "models.json", HERE.parent / "docs" / "models.md"
PLANS = {"tensor": 2, "hybrid:tensor=2": 4}  # with how many ranks each is verified
STEPS = 3


@dataclass(frozen=True)
class Goal:
    """So many architectures are to be exact and sharded: the issue's figures."""

    architectures: int = 30
    share: float = 0.6  # of the bytes of parameters, under `tensor` on two ranks


@dataclass
class Finding:
    """What is known of one architecture. verified: by plan, empty or why it was not."""

    name: str
    components: int = 0
    parameter_bytes: int = 0
    share: float = 0.0
    largest: str = ""  # the largest parameter that is not sharded, and its part of all bytes
    why: str = ""  # it is not sharded, or the model not cut at all
    verified: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.share >= Goal.share and not any(self.verified.values())


def examined(name: str) -> Finding:
    """One architecture: traced, explained, verified."""
    began = time.monotonic()
    found = Finding(name)
    try:
        job = workload(name, ARCHITECTURES[name])
        torch.manual_seed(0)
        model = cast_model(job.model(), torch.float64)
        without_dropout(model)
        example = cast(job.example(job.batch_size, seed=0), torch.float64)
        step = remembered(name, model, job.loss, example, training=True)
        if fault := compare(model, job.loss, example, step).fault:
            step = opaque(model, example, fault)
        explained(found, step, model)
    except Exception as error:
        found.why = sentence(error)
    else:
        for plan, ranks in PLANS.items():
            found.verified[plan] = deviation(job, plan, ranks)
    found.seconds = round(time.monotonic() - began, 1)
    return found


def explained(found: Finding, step: Step, model: nn.Module) -> None:
    """Adds what `tensor` on two ranks does to the step."""
    plan = Plan.parse("tensor")
    layouts = plan.layouts(step.chain.names, 2, Model(model).inside(step.chain.names))
    told = explain(step, partition(step, layouts, rows=12), plan, 2, 12)
    sizes = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    placements = {n: s for part in told.components for n, s in part.placements.items()}
    sharded = sum(sizes[n] for n, state in placements.items() if state.startswith("S"))
    found.components = len(told.components)
    found.parameter_bytes = sum(sizes[n] for n in placements)
    found.share = sharded / (found.parameter_bytes or 1)
    reasons = {n: why for part in told.components for n, why in part.not_sharded.items()}
    if reasons and not step.opaque:
        name = max(reasons, key=lambda n: sizes[n])
        part = sizes[name] / found.parameter_bytes
        found.largest = f"`{'.'.join(name.split('.')[-2:])}` {part:.1%}"
        found.why = general(reasons[name])
    why = "; ".join(filter(None, (step.reason, step.merged, found.why)))
    found.why = re.sub(r"\S*/site-packages/", "", why)


def general(reason: str) -> str:
    """A reason without the sizes of one parameter."""
    return re.sub(r" of shape \[[^]]*\]", "", re.sub(r"its \d+ bytes", "its bytes", reason))


def one(job: Workload, plan: str) -> dict[str, Any]:
    """On each rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verify(job, plan, STEPS)


def deviation(job: Workload, plan: str, ranks: int) -> str:
    """Empty where the plan computes what one process does; else how far it is off, or why not."""
    try:
        with known(job.name):
            row = run(ranks, one, job, plan, timeout=300)[0]
    except RankFailed as error:
        return sentence(error)
    if row["passed"]:
        return ""
    if not row["faults"]:
        return "other bytes than explained"
    return f"off by {max(fault['deviation'] for fault in row['faults']):.0e}"


def sentence(error: Exception) -> str:
    """The last line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def page(findings: Iterable[Finding]) -> str:
    """The document."""
    rows = list(findings)
    good = sum(f.good for f in rows)
    out = [
        "# Models",
        "",
        f"{len(rows)} architectures, most of `transformers`, by configuration: widths of 32 and",
        f"64, two layers, random weights. {good} of them shard at least {Goal.share:.0%} of their",
        "bytes under `tensor` on two ranks and compute under that and `hybrid:tensor=2` (four",
        "ranks) what one process does, by `verify`: losses, gradients, and parameters after",
        f"{STEPS} steps of AdamW in float64 within 1e-10, beyond what rounding alone does.",
        "`python -m benchmarks.models` measures it and writes this page "
        f"(torch {torch.__version__}, transformers {transformers.__version__}).",
        "",
        *textwrap.wrap(experts(rows), 110, break_on_hyphens=False),
        "",
        "The last columns have the largest parameter that stays whole, its part of the bytes, and",
        "the number of the reason below.",
        "",
        "| architecture | components | sharded | `tensor` | `hybrid:tensor=2` | whole | why |",
        "|---|---|---|---|---|---|---|",
    ]
    reasons: dict[str, int] = {}
    for f in rows:
        told = [f.verified.get(plan, "-") or "exact" for plan in PLANS]
        number = reasons.setdefault(f.why, len(reasons) + 1) if f.why else ""
        out.append(
            f"| {f.name} | {f.components} | {f.share:.2f} | {told[0]} | {told[1]} | {f.largest} | "
            f"{number} |"
        )
    out.append("")
    for why, number in reasons.items():
        out += textwrap.wrap(f"{number}. {why}", 110, subsequent_indent="   ")
    return "\n".join(out) + "\n"


def experts(findings: Iterable[Finding]) -> str:
    """How experts are configured: the products that have float64."""
    settings = {name: own for name, (_, own) in CONFIGURATIONS.items()}
    names = [f.name for f in findings if BATCHED.items() <= settings.get(f.name, {}).items()]
    return (
        f"{len(names)} of them have experts whose products are a setting ({', '.join(names)}): "
        '`experts_implementation="batched_mm"`, in the configuration or by '
        '`model.set_experts_implementation("batched_mm")`. The default, `"grouped_mm"`, is '
        "traced and sharded as well and takes less memory, but has no float64 (`verify --dtype "
        'float32`); the loop, `"eager"`, cannot be traced. llama4_text computes all of its '
        "experts; dbrx and jetmoe have a loop alone. phimoe draws its experts at random, so that "
        "float64 shows nothing of it, and is left out."
    )


def kept() -> dict[str, Finding]:
    """What is known from earlier runs."""
    if not TABLE.exists():
        return {}
    return {row["name"]: Finding(**row) for row in json.loads(TABLE.read_text())}


def write(findings: dict[str, Finding]) -> list[Finding]:
    """Keeps the findings, and writes the page."""
    rows = [findings[n] for n in ARCHITECTURES if n in findings]
    TABLE.write_text(json.dumps([asdict(f) for f in rows], indent=1) + "\n")
    PAGE.write_text(page(rows))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="names, with commas; the other lines stay")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in args.only.split(",") if n] or list(ARCHITECTURES)
    rows: list[Finding] = []
    for name in names:
        found = examined(name)
        rows = write({**kept(), name: found})
        if not args.json:
            told = " | ".join(v or "exact" for v in found.verified.values())
            print(
                f"{name:30} {found.components:3} {found.share:5.2f} {found.seconds:5.1f} s  {told}"
                f"  {found.largest} {found.why}",
                flush=True,
            )
    good = sum(f.good for f in rows)
    print(json.dumps([asdict(f) for f in rows]) if args.json else f"{good} of {len(rows)}")
    return 0 if good >= Goal.architectures else 1


if __name__ == "__main__":
    sys.exit(main())
