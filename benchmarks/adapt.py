"""Plans that change while training runs: `sudo python -m benchmarks.adapt`.

Four emulated hosts train a model with `adapt`; at step 60 something changes:

    links     all links from 1000 to 50 Mbit/s; restored at step 240
    quota     one host's CPU quota to a third (200 Mbit/s); restored at step 240
    quiet     nothing changes in 500 steps: it must not switch
    short     one of two hosts' CPU quota at step 30, until step 54: the adaptive run alone

Each is set against a run that knew beforehand: `auto` under the new conditions from the start, its
best candidates and the plan that the adaptive run came to measured in turns, each after a switch.
Goals: a switch within 20 steps of the change, to a plan with at least 0.95 of the throughput of
the best in that run, a pause of at most 1.5 times (the most bytes that a host sends or receives /
bandwidth) and two steps, measuring at most 3 % of the run, the losses of one process. What steps
took in the adaptive run itself stands beside: runs some minutes apart differ by up to 15 % on a
machine like the one of the tables (the same plan before the change and after restoring, too).

--quick: the adaptive runs alone; when they switch and what measuring takes is known by these.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import machine
from benchmarks.zoo import make
from synchromesh.lab import HostFailed, Lab

CHANGE, RESTORE, STEPS, QUIET = 60, 240, 900, 500
HOSTS, CPU = 4, 0.4
WITHIN, THROUGHPUT, PAUSE, MEASURING = 20, 0.95, 1.5, 0.03
NEAR = 1.3  # times the best prediction: candidates that are measured by the run that knew
TURNS = 3  # of each of them
LOSS = 1e-3  # relative, of float32 losses of different plans after hundreds of steps
COMPARED = 160  # steps whose losses are compared
SETTLED = 3  # steps after a switch that are not counted


@dataclass(frozen=True)
class Case:
    """A run: its model, the links before and after, one host's share of a core afterwards."""

    model: str
    before: int  # Mbit/s
    after: int
    quota: float = CPU
    steps: int = STEPS
    ends: int = 0  # the step at which the run is ended early; 0: it is not
    hosts: int = HOSTS
    change: int = CHANGE

    @property
    def changes(self) -> bool:
        return self.before != self.after or self.quota != CPU


CASES = {
    "links": Case("conv", 1000, 50),
    "quota": Case("pooled", 200, 200, CPU / 3, steps=1200),
    "quiet": Case("conv", 1000, 1000, steps=QUIET),
    "short": Case("pooled", 200, 200, quota=CPU / 3, steps=5000, ends=54, hosts=2, change=30),
}


# On every rank


def train(model_name: str, steps: int, ends: int) -> None:
    """An adaptive run; rank 0 tells of every step and decision, a line each."""
    import synchromesh as sm

    build, loss, batch, optimizer = make(model_name)
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan="auto")
    leads = trainer.rank == 0
    if leads:
        _tell("plan", plan=str(trainer.plan), measuring=trainer.choice.profile.seconds)  # type: ignore[union-attr]
    trainer.adapt()
    watching = 0.0
    if trainer.adapter is not None:
        record = trainer.adapter.record

        def timed(*told: Any) -> Any:
            nonlocal watching
            began = time.perf_counter()
            found = record(*told)
            watching += time.perf_counter() - began
            return found

        trainer.adapter.record = timed  # type: ignore[method-assign]
    trainer.on_event = lambda e: _tell("event", **e.to_dict()) if leads else None
    for step in range(ends or steps):
        trainer.steps_to_come = steps - step
        began = time.perf_counter()
        value = trainer.step(trainer.shard(batch))
        seconds = time.perf_counter() - began
        if leads:
            _tell("step", step=step, seconds=seconds, loss=float(value), plan=str(trainer.plan))
    if leads:
        _tell("end", watching=watching, events=[e.to_dict() for e in trainer.decisions])
    trainer.close()


def know(model_name: str, besides: str) -> None:
    """A run that knows the conditions: the best candidates of `auto`, and the plan that the
    adaptive run has come to, measured in turns."""
    import synchromesh as sm

    build, loss, batch, optimizer = make(model_name)
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan="auto")
    assert trainer.choice is not None
    best = trainer.choice.chosen.seconds
    near = [c for c in trainer.choice.candidates if c.time and c.seconds <= NEAR * best][:4]
    plans = list(dict.fromkeys([*(str(c.plan) for c in near), besides]))
    taken: dict[str, list[float]] = {plan: [] for plan in plans}
    for turn in range(TURNS):
        for plan in plans if turn % 2 == 0 else plans[::-1]:
            trainer.switch(plan)
            mine = trainer.shard(batch)
            for step in range(2 + 5):
                dist.barrier()
                began = time.perf_counter()
                trainer.step(mine)
                slowest = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if step >= 2:
                    taken[plan].append(float(slowest))
    if trainer.rank == 0:
        _tell("known", plans={p: statistics.median(t) for p, t in taken.items()})
    trainer.close()


def alone(model_name: str, steps: int) -> list[float]:
    """The losses of one process."""
    import synchromesh as sm

    build, loss, batch, optimizer = make(model_name)
    model = build()
    trainer = sm.prepare(model, optimizer(model.parameters()), loss, batch, plan="single")
    losses = [float(trainer.step(batch)) for _ in range(steps)]
    trainer.close()
    return losses


def _tell(kind: str, **what: Any) -> None:
    print(json.dumps({"kind": kind, **what}), flush=True)


# The parent


def rows_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def adaptive(case: Case) -> list[dict[str, Any]]:
    """What rank 0 told; the lab is changed when it tells of the steps."""
    told: list[dict[str, Any]] = []
    with Lab(hosts=case.hosts, bandwidth=f"{case.before}mbit", cpu=CPU) as lab:

        def change(mbit: int, quota: float) -> None:
            if case.before != case.after:
                lab.set(bandwidth=f"{mbit}mbit")
            if case.quota != CPU:
                lab.set(host=case.hosts - 1, cpu=quota)

        def hear(host: int, stream: int, line: bytes) -> None:
            if stream == 2:
                sys.stderr.write(line.decode(errors="replace"))
            if host or stream != 1 or not line.startswith(b"{"):
                return
            told.append(json.loads(line))
            if case.changes and told[-1]["kind"] == "step":
                if told[-1]["step"] == case.change - 1:
                    change(case.after, case.quota)
                elif told[-1]["step"] == RESTORE - 1:
                    change(case.before, CPU)

        lab.start(
            _command("--train", case.model, "--steps", f"{case.steps}", "--ends", f"{case.ends}"),
            timeout=1500, cwd=Path(__file__).parents[1], listener=hear,
        ).wait()  # fmt: skip
    return told


def came_to(told: list[dict[str, Any]]) -> str:
    """The plan of the adaptive run before conditions are restored."""
    steps = (t for t in told if t["kind"] == "step")
    return next(str(t["plan"]) for t in steps if t["step"] == RESTORE - 1)


def known(case: Case, told: list[dict[str, Any]]) -> dict[str, float]:
    """Measured seconds a step of the best plans under the new conditions, and of the one that the
    adaptive run came to."""
    with Lab(hosts=case.hosts, bandwidth=f"{case.after}mbit", cpu=CPU) as lab:
        if case.quota != CPU:
            lab.set(host=case.hosts - 1, cpu=case.quota)
        results = lab.run(
            _command("--know", case.model, "--besides", came_to(told)),
            timeout=900,
            cwd=Path(__file__).parents[1],
        )
    plans: dict[str, float] = rows_of(results[0].output)[-1]["plans"]
    return plans


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.adapt", *words]


def report(case: Case, told: list[dict[str, Any]], plans: dict[str, float]) -> dict[str, Any]:
    """The run's figures beside the goals; without plans of a run that knew, those of the run."""
    steps = [t for t in told if t["kind"] == "step"]
    end = next(t for t in told if t["kind"] == "end")
    whole = sum(s["seconds"] for s in steps)
    found: dict[str, Any] = {
        "first": next(t["plan"] for t in told if t["kind"] == "plan"),
        "measured_first": next(t["measuring"] for t in told if t["kind"] == "plan"),
        "events": end["events"],
        "watching": end["watching"] / whole,
        "measuring": sum(e["measuring_seconds"] for e in end["events"]) / whole,
        "seconds": {
            name: statistics.median(s["seconds"] for s in steps[a:b])
            for name, a, b in (("before", 10, case.change), ("restored", RESTORE + 40, len(steps)))
            if b > a and case.changes
        },
    }
    switch = next((e for e in end["events"] if e["switched"] and e["step"] > case.change), None)
    if not case.changes or switch is None:
        return found
    after = [s["seconds"] for s in steps[switch["step"] + SETTLED : RESTORE]]
    usual = statistics.median(after)
    slow = sum(max(0.0, s["seconds"] - usual) for s in steps[switch["step"] :][:SETTLED])
    pause = switch["pause_seconds"] + slow
    allowed = PAUSE * switch["most_bytes"] * 8 / (case.after * 1e6) + 2 * usual
    found |= {
        "within": switch["step"] - case.change,
        "to": switch["to"],
        "slow": statistics.median(s["seconds"] for s in steps[case.change + 1 : switch["step"]]),
        "after": usual,
        "pause": pause,
        "pause_allowed": allowed,
    }
    if not plans:
        return found
    best = min(plans, key=lambda p: plans[p])
    return found | {
        "best": best,
        "best_seconds": plans[best],
        "of_the_run": plans[best] / usual,
        "throughput": plans[best] / plans[came_to(told)],
    }


def missed(name: str, case: Case, found: dict[str, Any]) -> list[str]:
    """Goals that are not reached, in words."""
    out = []
    switches = [e for e in found["events"] if e["switched"]]
    if not case.changes:
        return [f"switched {len(switches)} times in {case.steps} quiet steps"] if switches else []
    if "within" not in found:
        return ["did not switch after the change"]
    if found["within"] > WITHIN:
        out.append(f"switched {found['within']} steps after the change (goal {WITHIN})")
    if found.get("throughput", 1.0) < THROUGHPUT:
        out.append(f"{found['throughput']:.2f} of the best throughput (goal {THROUGHPUT})")
    if found["pause"] > found["pause_allowed"]:
        out.append(f"paused {found['pause']:.2f} s (goal {found['pause_allowed']:.2f} s)")
    if found["after"] >= found["slow"]:
        out.append(f"steps are no quicker since the switch than before it ({found['slow']:.3f} s)")
    if not case.ends and found["measuring"] > MEASURING:
        out.append(f"measuring took {found['measuring']:.1%} (goal {MEASURING:.0%})")
    if found.get("loss", 0.0) > LOSS:
        out.append(f"losses differ by {found['loss']:.1e} (goal {LOSS:.0e})")
    return out


def show(name: str, case: Case, found: dict[str, Any]) -> None:
    print(
        f"\n{name}: {case.model}, {case.before} -> {case.after} Mbit/s, one host at "
        f"{case.quota:.3f} of a core"
    )
    print(f"  began with {found['first']!r} (measured for {found['measured_first']:.1f} s)")
    for e in found["events"]:
        what = f"switched to {e['to']!r}" if e["switched"] else "stayed"
        print(f"  step {e['step']}: {e['noticed']}; {what}: {e['reason']}")
        print(
            f"    measured for {e['measuring_seconds']:.1f} s, moved {e['bytes_moved']:,} bytes, "
            f"paused {e['pause_seconds']:.2f} s; predicted {e['predicted_after'] * 1e3:.0f} ms"
        )
    for key, seconds in found["seconds"].items():
        print(f"  {key}: {seconds * 1e3:.0f} ms a step")
    if "best" in found:
        print(
            f"  the best plan that was measured, {found['best']!r}, takes "
            f"{found['best_seconds'] * 1e3:.0f} ms: in turns with it the plan switched to has "
            f"{found['throughput']:.2f} of its throughput"
        )
        print(
            f"  after the switch the run itself took {found['after'] * 1e3:.0f} ms a step: "
            f"{found['of_the_run']:.2f}"
        )
    if "within" in found:
        print(f"  pause {found['pause']:.2f} s of {found['pause_allowed']:.2f} s allowed")
    print(f"  measuring {found['measuring']:.1%}, watching {found['watching']:.3%} of the steps")
    if "loss" in found:
        print(f"  losses differ from one process's by {found['loss']:.1e} at most (relative)")
    for fault in missed(name, case, found):
        print(f"  missed: {fault}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--quick", action="store_true", help="without the runs that knew")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ends", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--train", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--know", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--besides", metavar="PLAN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train or options.know:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        if options.train:
            train(options.train, options.steps, options.ends)
        else:
            know(options.know, options.besides)
        dist.destroy_process_group()
        return 0
    torch.set_num_threads(1)
    results = {}
    for name in options.cases.split(","):
        if name not in CASES:
            raise SystemExit(f"no case {name!r}: choose of {', '.join(CASES)}")
        case = CASES[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            told = adaptive(case)
            compared = case.changes and not (options.quick or case.ends)
            found = report(case, told, known(case, told) if compared else {})
        except (ValueError, HostFailed) as error:
            print(error, file=sys.stderr)
            return 1
        if compared:
            losses = [t["loss"] for t in told if t["kind"] == "step"][:COMPARED]
            reference = alone(case.model, COMPARED)
            found["loss"] = max(abs(a / b - 1) for a, b in zip(losses, reference, strict=False))
        results[name] = found
        if not options.json:
            show(name, case, found)
    if options.json:
        goals = {"within": WITHIN, "measuring": MEASURING}
        document = {"cases": results, "goals": goals, "emulated": True, "machine": machine()}
        print(json.dumps(document))
    else:
        print(f"\nemulated hosts; {machine()}")
    return 1 if any(missed(n, CASES[n], f) for n, f in results.items()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
