"""A model that no host holds: `sudo python -m benchmarks.large [--built] [--json]`.

A GPT-2 of 100.7 M parameters with AdamW in float32, of which 16 bytes a parameter are held
(parameter, gradient, two moments): 1.5 times the memory of each of four emulated hosts. Through
the real commands, `synchromesh lab up`, `lab run -- synchromesh train`, `lab down`:

    reference  one process that has memory for everything, 20 steps
    auto       in the lab, from the meta device: ends, with losses within 1e-4 of the reference's;
               what hosts hold while a plan is found and while it trains stays below their limit
    data       is warned of before it begins, and ended by the kernel, which is told in one
               sentence with what was predicted, within seconds

--built: `auto` again with a model that every host builds with values (a quarter of what is held),
against a reference of its own, for an ordinary constructor draws other values.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import machine
from synchromesh.lab import Lab
from synchromesh.lab.cgroup import detect
from synchromesh.workloads.workload import Workload

ROOT = Path(__file__).parents[1]
HOSTS, LIMIT, BANDWIDTH, CPU = 4, 1 << 30, "1gbit", "40%"
BLOCKS, WIDTH, WORDS, LENGTH, ROWS, STEPS = 14, 768, 2048, 32, 8, 20
HELD_BYTES = 16  # of a float32 parameter: itself, its gradient, two moments
HELD_LIMITS = 1.5  # what is held, in limits of a host
GOAL = 1e-4  # relative deviation of a loss
END_SECONDS = 10.0  # from the kill to the end of the command
LAB = "large"
ENVIRONMENT = {"SYNCHROMESH_CACHE": "off", "OMP_NUM_THREADS": "1"}
NO_PLAN = "the plan 'data' is predicted to need"
KILLED = re.compile(r"the kernel killed processes of .* memory; the plan 'data' is predicted .*")


# The workload


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random words, the same at every reading."""

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"words": torch.randint(0, WORDS, (LENGTH,), generator=generator)}


def model() -> nn.Module:
    import transformers as hf

    config = hf.GPT2Config(
        n_embd=WIDTH, n_layer=BLOCKS, n_head=12, vocab_size=WORDS, n_positions=LENGTH,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def model_on_meta() -> nn.Module:
    with torch.device("meta"):
        return model()


def next_word(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = module(batch["words"]).logits[:, :-1]
    return F.cross_entropy(scores.reshape(-1, WORDS), batch["words"][:, 1:].reshape(-1))


def workload(build: Any) -> Workload:
    return Workload(
        build, next_word, lambda p: torch.optim.AdamW(p, lr=1e-4), Text(), ROWS, name="large"
    )


def meta() -> Workload:
    """The TARGET that begins on the meta device."""
    return workload(model_on_meta)


def built() -> Workload:
    """The TARGET that every host builds with values."""
    return workload(model)


# The runs


@dataclass
class Ran:
    """A command: its exit code and log, when its lines came and it ended, what hosts held when,
    and when the kernel first killed on one."""

    code: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)
    held: list[tuple[float, list[int]]] = field(default_factory=list)  # bytes by host
    log: list[dict[str, Any]] = field(default_factory=list)
    killed: float | None = None
    ended: float = 0.0

    @property
    def losses(self) -> list[float]:
        """Of each step."""
        return [float(entry["loss"]) for entry in self.log if entry["event"] == "step"]

    def logged(self, event: str) -> dict[str, Any]:
        """The first entry of the log of this kind; empty where there is none."""
        return next((entry for entry in self.log if entry["event"] == event), {})

    def when(self, text: str) -> float | None:
        """When a line with this text came; None where none did."""
        return next((at for at, line in self.lines if text in line), None)

    def peaks(self, first: float, last: float) -> list[int]:
        """The most bytes that each host held between two moments."""
        found = [held for at, held in self.held if first <= at <= last]
        return [max(column) for column in zip(*found, strict=True)] or [0] * HOSTS


def synchromesh(*words: str) -> list[str]:
    return [sys.executable, "-m", "synchromesh", *words]


def train(target: str, plan: str, folder: Path) -> list[str]:
    where = f"{Path(__file__).relative_to(ROOT)}:{target}"
    return synchromesh(
        "train", where, "--plan", plan, "--steps", str(STEPS), "--output", str(folder)
    )


def run(command: Sequence[str], folder: Path, watched: bool) -> Ran:
    """Runs a command to its end; its lines are passed on. watched: what hosts hold is read."""
    found, done = Ran(), threading.Event()
    watcher = threading.Thread(target=watch, args=(found, done))
    if watched:
        watcher.start()
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        found.lines.append((time.time(), line.rstrip()))
        print(f"    {line}", end="", file=sys.stderr, flush=True)
    found.code, found.ended = process.wait(), time.time()
    done.set()
    if watched:
        watcher.join()
    log = folder / "log.jsonl"
    if log.exists():
        found.log = [json.loads(line) for line in log.read_text().splitlines()]
    return found


def watch(found: Ran, done: threading.Event) -> None:
    """Reads what the lab's hosts hold, until `done`, and when the kernel first kills on one."""
    groups, tag = detect(), Lab.open(LAB).tag
    assert groups is not None
    parts = [tag.part(host) for host in range(HOSTS)]
    before = [groups.killed(part) for part in parts]
    while not done.wait(0.05):
        found.held.append((time.time(), [groups.held(part) for part in parts]))
        if found.killed is None and [groups.killed(part) for part in parts] != before:
            found.killed = time.time()


@contextmanager
def lab() -> Iterator[None]:
    """Four hosts that are up inside."""
    up = ("--hosts", str(HOSTS), "--bandwidth", BANDWIDTH, "--cpu", CPU, "--memory", "1GiB")
    subprocess.run(synchromesh("lab", "up", "--name", LAB, *up), cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        yield
    finally:
        down = synchromesh("lab", "down", "--name", LAB)
        subprocess.run(down, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def in_lab(command: Sequence[str]) -> list[str]:
    return synchromesh("lab", "run", "--name", LAB, "--", *command)


# What is asked of them


@dataclass(frozen=True)
class Goal:
    """What should be, whether it is, and in figures; a number that has a limit beside it."""

    what: str
    met: bool
    figures: str
    value: float | None = None
    limit: float | None = None


def mebibytes(sizes: Sequence[float]) -> str:
    return ", ".join(f"{size / 2**20:.0f}" for size in sizes) + " MiB"


def auto_goals(target: str, reference: Ran, auto: Ran) -> Iterator[Goal]:
    gaps = [abs(a / b - 1) for a, b in zip(auto.losses, reference.losses, strict=False)]
    trained = len(reference.losses) == len(auto.losses) == STEPS
    yield Goal(
        f"{target}: auto trains {STEPS} steps", auto.code == 0 and trained,
        f"exit code {auto.code}, {len(auto.losses)} of {len(reference.losses)} losses",
    )  # fmt: skip
    deviation = max(gaps, default=float("inf"))
    yield Goal(f"{target}: losses within {GOAL:g}", deviation <= GOAL, f"{deviation:.1e}",
               deviation if gaps else None, GOAL)  # fmt: skip
    predicted = auto.logged("prediction")
    began, first, *_ = *[at for at, _ in auto.held[:1]], predicted.get("time", auto.ended), 0.0
    for phase, peaks in {
        "finds a plan": auto.peaks(began, first), "trains": auto.peaks(first, auto.ended)
    }.items():  # fmt: skip
        below = 0 < max(peaks) < LIMIT
        yield Goal(f"{target}: hosts stay below {mebibytes([LIMIT])} while it {phase}", below,
                   mebibytes(peaks))  # fmt: skip
    end = auto.logged("end")
    yield Goal(
        f"{target}: the plan fits by its prediction", bool(predicted.get("fits")),
        f"{predicted.get('plan')}: {mebibytes(predicted.get('memory_bytes', [0]))} of tensors; "
        f"a step {predicted.get('step_seconds', 0.0):.2f} s, took "
        f"{end.get('measured_step_seconds') or 0.0:.2f} s",
    )  # fmt: skip


def data_goals(data: Ran) -> Iterator[Goal]:
    warned = data.when(f"warning: {NO_PLAN}")
    told = [line for _, line in data.lines if KILLED.search(line)] or [""]
    said = next((line for _, line in data.lines if NO_PLAN in line), "")
    yield Goal("data: is warned of before the first step",
               warned is not None and not data.losses, said)  # fmt: skip
    yield Goal("data: the kill is one sentence with the prediction",
               told == [data.lines[-1][1]], told[0])  # fmt: skip
    yield Goal("data: the exit code says so", data.code == 137, str(data.code))
    seconds = data.ended - data.killed if data.killed else float("inf")
    yield Goal(f"data: ends within {END_SECONDS:g} s", seconds < END_SECONDS, f"{seconds:.1f} s")


def measure(targets: Sequence[str]) -> Iterator[Goal]:
    """Runs everything; gives each goal as soon as it is known."""
    held = HELD_BYTES * sum(p.numel() for p in model_on_meta().parameters())
    yield Goal(f"what is held is {HELD_LIMITS} times a host's memory",
               held >= HELD_LIMITS * LIMIT, f"{held / LIMIT:.3f}", held / LIMIT)  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references = {}
        for target in targets:
            alone = train(target, "single", folder / f"{target}-alone")
            references[target] = run([*alone, "--nproc", "1"], folder / f"{target}-alone", False)
        with lab():
            for target, reference in references.items():
                auto = folder / f"{target}-auto"
                ran = run(in_lab(train(target, "auto", auto)), auto, watched=True)
                yield from auto_goals(target, reference, ran)
            data = folder / "data"
            yield from data_goals(run(in_lab(train("meta", "data", data)), data, watched=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--built", action="store_true", help="also a model built with values")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the lab would stay up
    began, goals = time.time(), []
    for goal in measure(("meta", "built") if options.built else ("meta",)):
        goals.append(goal)
        if not options.json:
            print(f"{'met' if goal.met else 'MISSED':7} {goal.what}: {goal.figures}", flush=True)
    if options.json:
        told = {"steps": STEPS, "goals": [asdict(goal) for goal in goals]}
        print(json.dumps({"machine": machine(), **told}))
    else:
        print(f"{machine()}; {time.time() - began:.0f} s")
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
