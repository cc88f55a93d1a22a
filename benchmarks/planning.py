"""How long planning takes: `python -m benchmarks.planning [--stages] [--json]`.

Made-up models whose numbers follow the usual laws: a component's compute shrinks with the devices
and loses some to each doubling of the tensor degree, which adds blocking collectives too; its
gradients (bytes / tensor degree, all-reduced) are traffic that may hide; a move costs more the
farther apart its layouts are. A device has all divisors of the devices as tensor degrees, each
with three states of its border. `repeated`: blocks of six kinds of components; `all different`:
every component has its own numbers. `x of memory`: a limit so far above the least memory, as a
part of the way to what the quickest plan takes. Medians of three runs; the goal holds for elapsed
seconds, processor seconds stand beside them because other work on the machine lengthens the first.

--stages: instead, the search of pipeline stages on the transformers of `benchmarks.stages`, with
what makes their ways; the limit is bytes of a device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.stages import CASES as CASES_OF_STAGES
from benchmarks.stages import Transformer
from synchromesh.planner.chain.problem import BATCH, Option, PricedEdge, Prices, Problem
from synchromesh.planner.chain.search import runners_up, search
from synchromesh.planner.stages.search import search as search_stages

STATES = 3  # of a border: replicated, sharded along rows of the value, sharded along columns


def moves(degrees: int, chance: np.random.Generator) -> Prices:
    """Prices between all borders (degree, state); a move to the same border is free."""
    count = degrees * STATES
    degree, state = np.divmod(np.arange(count), STATES)
    apart = np.abs(degree[:, None] - degree)
    other = state[:, None] != state
    forward = 2e-4 + 2e-3 * apart * chance.uniform(0.5, 1.5, apart.shape)
    forward += 1e-3 * other * chance.uniform(0.5, 1.5, apart.shape)
    np.fill_diagonal(forward, 0.0)
    return Prices(forward, forward * chance.uniform(0.5, 1.5, forward.shape), tuple(range(count)))


def component(devices: int, degrees: int, chance: np.random.Generator) -> tuple[Option, ...]:
    """The options of one component: every tensor degree with every state."""
    work = chance.uniform(2e-3, 2e-2)  # s of forward on all devices
    parameters, activations = chance.uniform(1e6, 2e8), chance.uniform(1e7, 1e8)  # count, bytes
    options = []
    for degree in range(degrees):
        tensor = 2**degree
        loss = 1 + 0.05 * degree * chance.uniform(0.5, 1.5)
        gradient = 4 * parameters / tensor / 1e10 * (1 - tensor / devices)
        for state in range(STATES):
            blocking = 2e-3 * degree * chance.uniform(0.5, 1.5)
            held = 16 * parameters / tensor + activations * (1 + 0.3 * state) / (1 + 0.3 * degree)
            options.append(
                Option(
                    forward=work * loss + blocking * (state != 1),
                    backward=2 * work * loss + blocking * (state != 2),
                    gradient=gradient,
                    update=parameters / tensor / 1e11,
                    memory=int(held),
                    border=degree * STATES + state,
                )
            )
    return tuple(options)


def chain(count: int, devices: int, kinds: int = 6, residual: bool = False) -> Problem:
    """A chain; with `residual` every value is read by the component after the next, too."""
    chance = np.random.default_rng(0)
    degrees = devices.bit_length()  # 64: 1, 2, 4, ... 64
    prices = moves(degrees, chance)
    base = [component(devices, degrees, chance) for _ in range(min(kinds, count))]
    links = [PricedEdge(BATCH, (0,), prices)]
    for i in range(count - 1):
        targets = (i + 1, i + 2) if residual and i + 2 < count else (i + 1,)
        links.append(PricedEdge(i, targets, prices))
    return Problem(tuple(base[i % len(base)] for i in range(count)), tuple(links))


def u_net(levels: int, devices: int, blocks: int = 2) -> Problem:
    """`blocks` components a level on the way down and up, a skip per level."""
    line = chain(4 * blocks * levels, devices)
    count, prices = 2 * levels * blocks + 1, line.links[0].prices
    links = [PricedEdge(BATCH, (0,), prices)]
    for i in range(count - 1):
        skips = i < levels * blocks and i % blocks == blocks - 1
        links.append(PricedEdge(i, (i + 1, count - 1 - i) if skips else (i + 1,), prices))
    components = tuple(line.components[min(i, count - 1 - i)] for i in range(count))
    merged = tuple(PricedEdge(x.source, tuple(sorted(set(x.targets))), prices) for x in links)
    return Problem(components, merged)


Case = tuple[str, Callable[[], Problem], float]  # name, problem, goal in seconds
CASES: tuple[Case, ...] = (
    ("100 components, 64 devices, repeated", lambda: chain(100, 64), 1.0),
    ("100 components, 64 devices, all different", lambda: chain(100, 64, kinds=100), 1.0),
    ("400 components, 4096 devices, repeated", lambda: chain(400, 4096), 10.0),
    ("400 components, 4096 devices, all different", lambda: chain(400, 4096, kinds=400), 10.0),
    ("48-layer transformer, 8 devices", lambda: chain(96, 8, kinds=2, residual=True), 0.5),
    ("48-layer transformer, 64 devices", lambda: chain(96, 64, kinds=2, residual=True), 0.5),
    ("U-Net of 4 levels, 8 devices", lambda: u_net(4, 8), 1.0),
    ("U-Net of 6 levels, 64 devices", lambda: u_net(6, 64), 10.0),
)
PARTS = (0.7, 0.3)


def timed(run: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """What it returns; median seconds elapsed and of the processor."""
    elapsed, processor = [], []
    for _ in range(3):
        start = time.perf_counter(), time.process_time()
        found = run()
        elapsed.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return found, (statistics.median(elapsed), statistics.median(processor))


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(case: str, memory: str, plan: Any, seconds: tuple[float, float], goal: float) -> None:
        row = {"case": case, "memory": memory, "seconds": seconds[0], "cpu": seconds[1]}
        verdict = {"goal": goal, "passed": seconds[0] <= goal}
        found.append({**row, "step": plan.seconds, "gap": plan.gap, **verdict})

    for name, make, goal in CASES:
        problem = make()
        free, seconds = timed(lambda problem=problem: search(problem))
        add(name, "free", free, seconds, goal)
        least = sum(min(o.memory for o in options) for options in problem.components)
        for part in PARTS:
            limit = least + part * (free.memory - least)
            plan, seconds = timed(lambda problem=problem, limit=limit: search(problem, limit))
            add(name, f"{part} of memory", plan, seconds, goal)
    problem = chain(100, 64)
    best = search(problem)
    others, seconds = timed(lambda: runners_up(problem, best))
    near = min((other for other in others if other), key=lambda other: other.seconds)
    add("100 components, 64 devices, all runners-up", "free", near, seconds, 5.0)
    return found


def stage_rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, model, devices, limits, goal in CASES_OF_STAGES:
        for limit in limits:

            def run(
                model: Transformer = model, devices: int = devices, limit: float = limit
            ) -> Any:
                return search_stages(model.problem(devices, limit))

            plan, seconds = timed(run)
            memory = "free" if limit > 1e15 else f"{limit / 1e9:g} GB"
            shape = f"{len(plan.stages)} stages, {plan.micro_batches} micro-batches"
            row = {"case": name, "memory": memory, "seconds": seconds[0], "cpu": seconds[1]}
            verdict = {"goal": goal, "passed": seconds[0] <= goal, "plan": shape}
            found.append({**row, "step": plan.seconds, "gap": plan.gap, **verdict})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stages", action="store_true", help="the search of pipeline stages")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    options = parser.parse_args()
    found = stage_rows() if options.stages else rows()
    passed = all(row["passed"] for row in found)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": found, "passed": passed}, indent=2))
        return 0 if passed else 1
    print(machine())
    print(f"\n| {'case':44} | {'limit':13} | planning | processor | goal | step | gap |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        times = f"{row['seconds']:.2f} s | {row['cpu']:.2f} s | {row['goal']:g} s"
        step = f"{row['step']:.4f} s"
        verdict = "" if row["passed"] else " missed"
        rest = f"{times} | {step} | {row['gap']:.1e} |{row.get('plan', '')}{verdict}"
        print(f"| {row['case']:44} | {row['memory']:13} | {rest}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
