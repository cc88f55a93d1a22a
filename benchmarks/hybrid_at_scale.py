"""When a hybrid beats data parallelism: `python -m benchmarks.hybrid_at_scale [-o page.html]`.

After Pal et al. 2019 (arXiv 1907.13257): N workers, each with the same rows and of M devices, on
which a worker's model is split (tensor) or staged. E(B) epochs reach the target with batches of B
rows, E_N those of N workers; T are simulated seconds of a step.

    SE_N       =  T_1 / T_N                                scaling efficiency of N workers
    SU^M       =  T_1 / T of one worker of M devices       of several kinds of worker the best
    SU_N       =  SE_N N E_1 / E_N                         speedup to the target, N devices
    SU^M_N     =  SU^M SE^M_N N E_1 / E_N                  ... M N devices, as a hybrid
    hybrid wins on M N devices  <=>  SU^M  >  M (SE_MN / SE^M_N) (E_N / E_MN)

SE^M_N is the hybrid's own efficiency; with data parallelism's SE_N in its place it is the paper's
rule. E(B) = E_min (1 + B / B_crit) (McCandlish et al. 2018, arXiv 1812.06162), so that for given
steps a critical batch is all that decides. The paper's curves of epochs are not public: which
critical batches would give its gains is worked out, none is claimed to be theirs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.published import inception, read
from synchromesh import catalogue
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planning.offline import traced
from synchromesh.planning.session import PlanningSession
from synchromesh.report.drawing import SharedStyles, drawn
from synchromesh.report.figure import PageFigure, PageTable, Section
from synchromesh.report.page import Chapter, rendered
from synchromesh.report.palette import marks
from synchromesh.report.scaling import lines
from synchromesh.values.document import write
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.workloads.recurrent import Gnmt, LstmModel, beginning

MOST = 1_024  # devices
WIDTHS = (2, 4)  # M
NETWORKS = ("ethernet25", "ethernet100")  # between hosts of 8 V100 of 32 GB
CRITICAL = tuple(2.0 ** (k / 2) for k in range(10, 41))  # batches, 32 to a million
MICRO_BATCHES = (1, 2, 4, 8)  # of a staged worker


@dataclass(frozen=True)
class Case:
    """A workload. rows: of a worker. batch, loss: of so many rows; carry: of what goes on."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[..., Any]
    rows: int
    carry: Callable[[int], Any] | None = None


def _images(rows: int) -> tuple[Tensor, Tensor]:
    images = torch.empty(rows, 3, 299, 299, device="meta")
    return images, torch.zeros(rows, dtype=torch.long, device="meta")


def _ids(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device="meta")


def _classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _translated(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = model(*batch)
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


def _foretold(model: nn.Module, batch: tuple[Tensor, Tensor], state: Any) -> tuple[Tensor, Any]:
    scores, state = model(batch[0], state)
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten()), state


# GNMT: eight layers of 1,024 on either side, 32,000 word pieces, sentences of 50 (Wu et al. 2016).
# BigLSTM: two layers, a softmax over as many words as its sampled one has, 8,192, steps of 20
# (Jozefowicz et al. 2016); layers of 2,048 in place of 8,192 cells with projections.
CASES: Mapping[str, Case] = {
    "Inception-V3": Case(inception, _images, _classified, 64),
    "GNMT": Case(
        partial(Gnmt, (32_000, 32_000), 1_024, 8, 0.2, 0),
        lambda rows: (_ids(rows, 50), _ids(rows, 50)), _translated, 128,
    ),
    "BigLSTM": Case(
        partial(LstmModel, 8_192, 2_048, 2, 0.1),
        lambda rows: (_ids(rows, 20), _ids(rows, 20)), _foretold, 128,
        partial(beginning, width=2_048, layers=2),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Seconds of steps in which each worker has the same rows: `data[N]` of N devices, and
    `hybrid[M][N]` of N workers of M devices, of the kind `worker[M]`."""

    rows: int
    data: Mapping[int, float]
    hybrid: Mapping[int, Mapping[int, float]]
    worker: Mapping[int, str] = field(default_factory=dict)

    def epochs(self, workers: int, critical: float) -> float:
        """E_N / E_min."""
        return 1.0 + workers * self.rows / critical

    def speedup(self, devices: int, critical: float) -> float:
        """SU_N."""
        efficiency = self.data[1] / self.data[devices]
        return efficiency * devices * self.epochs(1, critical) / self.epochs(devices, critical)

    def hybrid_speedup(self, width: int, workers: int, critical: float) -> float:
        """SU^M_N."""
        gained = self.data[1] / self.hybrid[width][workers]
        return gained * workers * self.epochs(1, critical) / self.epochs(workers, critical)

    def wins(self, width: int, workers: int, critical: float, own: bool) -> bool:
        """The inequality. own: with the hybrid's SE_N; else with data parallelism's."""
        its = self.hybrid[width]
        split = self.data[1] / its[1]
        efficiency = its[1] / its[workers] if own else self.data[1] / self.data[workers]
        wide = self.data[1] / self.data[width * workers]
        epochs = self.epochs(workers, critical) / self.epochs(width * workers, critical)
        return split > width * (wide / efficiency) * epochs

    def best(self, critical: float) -> tuple[float, int]:
        """The highest speedup of data parallelism, and on how many devices."""
        return max((self.speedup(n, critical), n) for n in self.data)

    def best_hybrid(self, critical: float) -> tuple[float, int, int]:
        """The highest of hybrids, with M and N; 0 where no worker fits."""
        found = ((self.hybrid_speedup(m, n, critical), m, n)
                 for m, its in self.hybrid.items() for n in its)  # fmt: skip
        return max(found, default=(0.0, 0, 0))

    def gain(self, critical: float) -> float:
        """Of the best hybrid over the best data parallelism, whatever their devices."""
        return self.best_hybrid(critical)[0] / self.best(critical)[0] - 1.0

    def crossing(self, critical: float) -> int | None:
        """The fewest devices on which a hybrid wins, and on all more."""
        found = None
        for devices in sorted(self.data, reverse=True):
            its = [m for m, of in self.hybrid.items() if devices % m == 0 and devices // m in of]
            if not any(self.wins(m, devices // m, critical, True) for m in its):
                break
            found = devices
        return found


class Steps:
    """Seconds of steps of a model on V100s, traced once; programs are looked at once, too."""

    def __init__(self, case: Case) -> None:
        self.case = case
        with torch.device("meta"):
            self.model = case.build()
        _, self.step = traced(
            self.model, case.loss, case.batch(case.rows), None, case.carry, lambda _: None
        )
        self._known: Profile | None = None
        self._seconds: dict[tuple[str, str, int], float | None] = {}

    def seconds(self, network: str, plan: str, devices: int, workers: int) -> float | None:
        """None where the plan does not fit, or cannot be."""
        name = f"v100-32gbx{devices}" + (f"-{network}" if devices > 8 else "")
        if (name, plan, workers) not in self._seconds:
            made = Plan.parse(plan)
            if made.stage_count > 1:  # a worker's stages are neighbours, in one host
                width = devices // workers
                order = (n * width + stage for stage in range(width) for n in range(workers))
                made = replace(made, ranks=tuple(order))
            self._seconds[name, plan, workers] = self._priced(name, made, workers)
        return self._seconds[name, plan, workers]

    def _priced(self, name: str, plan: Plan, workers: int) -> float | None:
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        rows, place = workers * self.case.rows, catalogue.cluster(name)
        facts = DatasheetFacts.of(self.step, self.model, optimizer, rows, place)
        found, profile = PlanningSession(facts).priced(plan, self._known)
        if profile is not None:  # programs are the same everywhere, links are not
            self._known = replace(profile, network={})
        return found.seconds if found.time is not None and found.fits else None

    def times(self, network: str) -> Times:
        """Behind a network."""
        seconds = partial(self.seconds, network)
        numbers = [1 << k for k in range(MOST.bit_length())]
        data = {n: t for n in numbers
                if (t := seconds("data" if n > 1 else "single", n, n)) is not None}  # fmt: skip
        hybrid, worker = {}, {}
        for width in WIDTHS:
            alone = {kind: t for kind in kinds(width)
                     if (t := seconds(plan_of(kind, width), width, 1)) is not None}  # fmt: skip
            if not alone:
                continue
            worker[width] = kind = min(alone, key=lambda kind: alone[kind])
            hybrid[width] = {
                n: t for n in numbers if n * width <= MOST
                and (t := seconds(plan_of(kind, width), n * width, n)) is not None
            }  # fmt: skip
        return Times(self.case.rows, data, hybrid, worker)


def kinds(width: int) -> list[str]:
    """How a worker of so many devices may share a model."""
    return ["tensor", *(f"{width} stages, {m} micro-batches" for m in MICRO_BATCHES)]


def plan_of(kind: str, width: int) -> str:
    if kind == "tensor":
        return f"hybrid:tensor={width}"
    return f"pipeline:stages={width},microbatches={kind.split()[2]}"


def studied(steps: Steps, name: str, network: str, claimed: float | None) -> dict[str, Any]:
    """What comes of a workload behind a network. claimed: the paper's gain."""
    began = time.perf_counter()
    times = steps.times(network)
    every = [(m, n, c) for m, its in times.hybrid.items() for n in its
             if n * m in times.data for c in CRITICAL]  # fmt: skip
    simulated = [times.hybrid_speedup(m, n, c) > times.speedup(m * n, c) for m, n, c in every]
    own, papers = ([times.wins(*case, of) for case in every] for of in (True, False))
    gains = {critical: times.gain(critical) for critical in CRITICAL}
    reached = [c for c, gain in gains.items() if claimed is not None and gain >= claimed]
    return {
        "workload": name, "network": network, "seconds": time.perf_counter() - began,
        "times": times, "cases": len(every), "claimed": claimed, "gains": gains,
        "identity_fails": sum(a != b for a, b in zip(own, simulated, strict=True)),
        "rule_differs": sum(a != b for a, b in zip(papers, simulated, strict=True)),
        "wins": sum(simulated), "largest_gain": max(gains.values()),
        "reached_below": max(reached, default=None),
    }  # fmt: skip


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    return {**found, "times": vars(found["times"])}


def said(found: Mapping[str, Any]) -> str:
    """The answer for a workload in a sentence."""
    times: Times = found["times"]
    where = f"{found['workload']} on V100s behind {found['network']}"
    wins = [c for c, gain in found["gains"].items() if gain > 0.0]
    if not wins:
        return f"{where}: no hybrid reaches the target sooner than the best data parallelism."
    most = max(wins)
    text = (
        f"{where}: a hybrid reaches the target sooner where the critical batch is at most "
        f"{most:,.0f} rows ({most / times.rows:,.1f} times a worker's batch)"
    )
    if claimed := found["claimed"]:
        least = found["reached_below"]
        text += (
            f"; the paper's {claimed:.1%} follows from these steps for critical batches up to "
            f"{least:,.0f} rows" if least is not None
            else f"; the paper's {claimed:.1%} follows for none (at most "
                 f"{found['largest_gain']:.1%})"
        )  # fmt: skip
    return f"{text}."


def answer(found: Sequence[Mapping[str, Any]]) -> str:
    """Of all workloads and networks, in a sentence."""
    each = []
    for one in found:
        most = max((c for c, gain in one["gains"].items() if gain > 0.0), default=0.0)
        each.append(f"{one['workload']} behind {one['network']} up to {most:,.0f} rows")
    return (
        "A hybrid reaches the target sooner than any data parallelism where the critical batch is "
        f"small beside what {MOST:,} devices compute at once: {', '.join(each)}; above these, "
        "data parallelism does."
    )


def tables(found: Sequence[Mapping[str, Any]]) -> Iterator[PageTable]:
    """Of what was found in all, and of steps."""
    rows = []
    for one in found:
        times: Times = one["times"]
        for critical in CRITICAL[::6]:
            (data, n), (best, m, workers) = times.best(critical), times.best_hybrid(critical)
            cross = times.crossing(critical)
            rows.append((
                one["workload"], one["network"], f"{critical:,.0f}", f"{data:.1f} on {n:,}",
                f"{best:.1f} on {workers * m:,} ({times.worker.get(m, 'none fits')})",
                f"{best / data - 1:+.1%}",
                "none" if cross is None else f"{cross:,}",
            ))  # fmt: skip
    heading = (
        "workload", "network", "critical batch", "data parallelism", "hybrid", "gain",
        "wins from devices on",
    )  # fmt: skip
    yield PageTable("Best speedups to the target over one device", heading, tuple(rows), 3)
    steps = [
        (one["workload"], one["network"], kind, f"{n * m:,}", f"{1e3 * t:.1f}")
        for one in found
        for m, kind, its in (
            (1, "data", one["times"].data),
            *((m, one["times"].worker[m], of) for m, of in one["times"].hybrid.items()),
        )
        for n, t in its.items()
    ]
    heading = ("workload", "network", "worker", "devices", "milliseconds of a step")
    yield PageTable("Simulated steps, the same rows for each worker", heading, tuple(steps), 4)


def figure(one: Mapping[str, Any], critical: float, shared: SharedStyles) -> PageFigure:
    """Speedups to the target over devices."""
    times: Times = one["times"]
    ran = {("data", n): times.speedup(n, critical) for n in times.data if n > 1}
    for m, its in times.hybrid.items():
        ran |= {(f"M={m}", m * n): times.hybrid_speedup(m, n, critical) for n in its}
    inks, name = marks(dict.fromkeys(kind for kind, _ in ran)), one["workload"].lower()
    title = f"{one['workload']} behind {one['network']}, critical batch {critical:,.0f}"
    (kind, n), most = max(ran.items(), key=lambda item: item[1])
    rows = tuple((kind, f"{n:,}", f"{x:.2f}") for (kind, n), x in ran.items())
    return PageFigure(
        f"{name}-{one['network']}", title,
        f"Lines of the speedup to the target against devices, one for data parallelism, one for "
        f"each hybrid. The highest is {most:.1f}: {kind} on {n:,} devices.",
        tuple(map(shared.classed, drawn(name, lambda width: lines(width, ran, inks)))),
        PageTable(f"{title}: speedup to the target", ("plan", "devices", "speedup"), rows, 2),
        "Dotted: ideal. M: devices of a hybrid's worker.",
    )  # fmt: skip


PAGE = """{% extends "page.html" %}
{% block said %}, a study{% endblock %}
{% block kind %}study{% endblock %}
{% block heading %}Method{% endblock %}
{% block tables %}{% for each in tables %}{{ table(each, '') }}{% endfor %}{% endblock %}
{% block method %}<h2 id="method">Method</h2>
<p>After Pal et al. 2019 (arXiv 1907.13257). T are seconds of a step, E(B) epochs to the target in
batches of B rows, N workers, M devices of a hybrid's worker; each worker has the same rows.</p>
<pre>{{ equations }}</pre>
<p>{{ rule }}</p>
{% endblock %}
{% block source %}: python -m benchmarks.hybrid_at_scale --json has every number{% endblock %}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claims", type=Path, help="hybrid_at_scale_claims.csv of the paper")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="one HTML page")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    claims = {row["model"]: float(row["gain_over_best_data_parallel_pct"]) / 100.0
              for row in (read(args.claims) if args.claims else ())}  # fmt: skip
    found = []
    for name in [args.only] if args.only else CASES:
        steps = Steps(CASES[name])
        for network in NETWORKS:
            found.append(studied(steps, name, network, claims.get(name)))
            if not args.json:
                print(said(found[-1]), flush=True)
    if args.output:
        write(args.output, page(found))
    if args.json:
        print(json.dumps([plain(one) for one in found]))
        return
    for table in tables(found):
        print(
            f"\n{table.caption}\n" + "\n".join(" | ".join(r) for r in (table.columns, *table.rows))
        )
    cases, wins = (sum(one[key] for one in found) for key in ("cases", "wins"))
    own, paper = (sum(one[key] for one in found) for key in ("identity_fails", "rule_differs"))
    print(f"\n{cases} cases, of which a hybrid wins {wins}: with its own SE_N the inequality "
          f"names the other in {own}, with that of data parallelism in {paper}; "
          f"{time.perf_counter() - began:.0f} s (goal 600); {machine()}")  # fmt: skip


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The answers first, then the curves of each workload behind each network, all numbers."""
    shared, sections, answers = SharedStyles(), [], []
    for one in found:
        shown = one["reached_below"] or max(one["gains"], key=lambda c: one["gains"][c])
        drawings = (figure(one, shown, shared),) if one["times"].hybrid else ()
        name = f"{one['workload']}-{one['network']}".lower()
        sections.append(Section(f"s-{name}", name, drawings, "No hybrid fits."))
        answers.append(("", (said(one),)))
    chapter = Chapter("s", "hybrids at scale", tuple(answers), tuple(sections), ())
    return rendered(
        PAGE, shared, chapters=[chapter], tables=[*tables(found)],
        results={"title": "When does a hybrid beat data parallelism?", "note": ""},
        notices=(answer(found), "Nothing was run: figures are predictions from data sheets."),
        equations=__doc__.split("\n\n")[2], rule=__doc__.split("\n\n")[3],
    )  # fmt: skip


if __name__ == "__main__":
    main()
