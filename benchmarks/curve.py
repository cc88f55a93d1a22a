"""Loss curves across switches and a killed rank: `python -m benchmarks.curve [--json]`.

First, 60 steps of a tied GPT-2 in float64 with AdamW and a warm-up scheduler on four ranks that
shift data -> tensor -> hybrid -> data at steps 15, 30 and 45, against one process that never
shifts; then the same through data -> 2 stages -> interleaved stages -> tensor. Then `synchromesh
train` on four ranks of which one is killed with SIGKILL after step 12, resumed on two ranks under
another plan, against a run left alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from synchromesh.trace.capture.capture import trace
from tests.ranks import run
from tests.targets import MODELS
from tests.training.test_switch_training import losses as followed
from tests.training.test_switch_training import start, switched, unswitched

STEPS = 60
EACH = STEPS // 4  # under each plan; a checkpoint is written after half of them
TARGET = "tests/targets.py:gpt2"
ROOT = Path(__file__).parents[1]
GOAL = 1e-10  # relative deviation of a loss, in float64
GOAL_RESUMED = 1e-4  # of one in float32
RESUMED_STEPS = 30  # of the run of which a rank is killed


def deviation(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected), (len(found), len(expected))
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def plans() -> dict[str, str]:
    """Plans of two stages of two ranks, by what they are in words."""
    model, loss, make = MODELS["gpt2"]()
    names = trace(model, loss, make(6), training=True).chain.names
    quarter = [names[i * len(names) // 4] for i in range(4)]
    halves = f"@stages=0-1:{quarter[0]}/2-3:{quarter[2]}; @micro_batches=4"
    quarters = "/".join(f"{r}:{n}" for r, n in zip(("0-1", "2-3") * 2, quarter, strict=True))
    return {
        "two stages": f"data; {halves}",
        "interleaved": f"data; @stages={quarters}; @micro_batches=4; @schedule=interleaved",
        "two stages with tensor degree 2": f"hybrid:tensor=2; {halves}",
    }


def written(through: tuple[str, ...], folder: str) -> list[float]:
    """Losses through these plans, each of which writes a checkpoint named by its number."""
    trainer, data = start("gpt2", through[0])

    def after() -> None:
        number, step = divmod(trainer.steps, EACH)
        if step == EACH // 2:
            trainer.save(f"{folder}/{number}")
        if step == 0 and number < len(through):
            trainer.switch(through[number])

    found = followed(trainer, data, STEPS, after)
    trainer.close()
    return found


def resumed(through: tuple[str, ...], folder: str) -> list[tuple[int, list[float]]]:
    """The losses behind every checkpoint under every plan but its own, with the steps before."""
    found = []
    for own, plan in enumerate(through):
        trainer, data = start("gpt2", plan)
        for other in range(len(through)):
            if other != own:
                trainer.resume(f"{folder}/{other}")
                before = trainer.steps
                found.append((before, followed(trainer, data, EACH // 2)))
        trainer.close()
    return found


def train(*words: str) -> subprocess.Popen[str]:
    job = ["train", TARGET, "--steps", str(RESUMED_STEPS)]
    command = [sys.executable, "-m", "synchromesh", *job, *words]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss; a step that was repeated after a resumption counts as it was last."""
    log = folder / "log.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {e["step"]: e["loss"] for e in events if e.get("event") == "step"}


def workers(launcher: int) -> list[int]:
    """Processes below a launcher that run ranks."""
    listing = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    return [
        int(p) for p, parent, args in rows if int(parent) == launcher and "synchromesh" in args
    ]


def killed(folder: Path) -> tuple[float, int]:
    """Seconds from the kill to the end of the whole run, and its exit code."""
    process = train(
        "--plan", "data", "--nproc", "4", "--checkpoint-every", "5", "--output", str(folder)
    )
    deadline = time.monotonic() + 300
    while not (folder / "checkpoints" / "step-10" / "MANIFEST.json").exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint within 300 s"
        time.sleep(0.02)
    began = time.monotonic()
    os.kill(workers(process.pid)[1], signal.SIGKILL)
    process.communicate(timeout=60)
    return time.monotonic() - began, process.returncode


def switches(expected: list[float], say: Callable[[str], None]) -> dict[str, float]:
    """The largest deviation of runs through plans, by these in words, and of those that resume
    their checkpoints ("resumed")."""
    of = plans()
    shifts = {
        "tensor, a hybrid, data": ("tensor", "hybrid:tensor=2", "data"),
        "two stages, interleaved ones, tensor": (of["two stages"], of["interleaved"], "tensor"),
    }
    off: dict[str, float] = {}
    for words, behind in shifts.items():
        answers = run(4, switched, "gpt2", STEPS, behind, timeout=400)
        off[words] = max(deviation(found, expected) for found, _ in answers)
        say(f"{STEPS} steps, data, then {words}: largest relative loss deviation {off[words]:.1e}")
    through = ("data", of["two stages"], "sharded-data", of["two stages with tensor degree 2"])
    words = "two stages, ZeRO 3, two stages with tensor degree 2"
    with tempfile.TemporaryDirectory() as folder:
        ran = run(4, written, through, folder, timeout=400)
        off[words] = max(deviation(found, expected) for found in ran)
        say(f"data, {words}: {off[words]:.1e}")
        again = [pair for found in run(4, resumed, through, folder, timeout=400) for pair in found]
    off["resumed"] = max(deviation(found, expected[b : b + len(found)]) for b, found in again)
    pairs = len(again) // 4
    say(f"checkpoints of each resumed by each other, {pairs} pairs: {off['resumed']:.1e}")
    return off


def broken_off(say: Callable[[str], None]) -> dict[str, Any]:
    """A run of which a rank is killed, and which other ranks resume, against one left alone."""
    with tempfile.TemporaryDirectory() as place:
        alone, broken = Path(place) / "alone", Path(place) / "broken"
        train("--plan", "data", "--nproc", "1", "--output", str(alone)).communicate(timeout=300)
        seconds, code = killed(broken)
        say(f"a rank killed: the run ended {seconds:.1f} s later with exit code {code}")
        again = train(
            "--plan", "tensor", "--nproc", "2", "--resume", str(broken), "--output", str(broken)
        )
        _, told = again.communicate(timeout=300)
        assert again.returncode == 0, told
        reference, found = losses(alone), losses(broken)
    off = deviation(list(found.values()), [reference[step] for step in found])
    say(f"resumed on 2 ranks under tensor, {len(found)} steps: deviation {off:.1e} (float32)")
    told_of = {"seconds": seconds, "code": code, "deviation": off, "goal": GOAL_RESUMED}
    passed = code != 0 and off < GOAL_RESUMED and len(found) == RESUMED_STEPS
    return {**told_of, "steps": len(found), "passed": passed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    say = partial(print, file=sys.stderr if options.json else sys.stdout, flush=True)
    off = switches(run(1, unswitched, "gpt2", STEPS, timeout=200)[0], say)
    rest = broken_off(say)
    passed = max(off.values()) < GOAL and rest["passed"]
    told = {"steps": STEPS, "deviations": off, "goal": GOAL, "killed": rest, "passed": passed}
    if options.json:
        print(json.dumps({"machine": machine(), **told}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
