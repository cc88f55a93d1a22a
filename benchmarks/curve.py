"""Loss curves across switches and a killed rank: `python -m benchmarks.curve`.

First, 60 steps of a tied GPT-2 in float64 with AdamW and a warm-up scheduler on four ranks that
shift data -> tensor -> hybrid -> data at steps 15, 30 and 45, against one process that never
shifts; then the same through data -> 2 stages -> interleaved stages -> tensor. Then `synchromesh
train` on four ranks of which one is killed with SIGKILL after step 12, resumed on two ranks under
another plan, against a run left alone.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from synchromesh.trace.capture.capture import trace
from tests.ranks import run
from tests.targets import MODELS
from tests.training.test_switch_training import losses as followed
from tests.training.test_switch_training import start, switched, unswitched

STEPS = 60
EACH = STEPS // 4  # under each plan; a checkpoint is written after half of them
TARGET = "tests/targets.py:gpt2"
ROOT = Path(__file__).parents[1]


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
    command = [sys.executable, "-m", "synchromesh", "train", TARGET, "--steps", "30", *words]
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


def switches(expected: list[float]) -> float:
    """The largest deviation of runs through plans, and of those that resume their checkpoints."""
    of = plans()
    shifts = {
        "tensor, a hybrid, data": ("tensor", "hybrid:tensor=2", "data"),
        "two stages, interleaved ones, tensor": (of["two stages"], of["interleaved"], "tensor"),
    }
    worst = 0.0
    for words, behind in shifts.items():
        answers = run(4, switched, "gpt2", STEPS, behind, timeout=400)
        off = max(deviation(found, expected) for found, _ in answers)
        print(f"{STEPS} steps, data, then {words}: largest relative loss deviation {off:.1e}")
        worst = max(worst, off)
    through = ("data", of["two stages"], "sharded-data", of["two stages with tensor degree 2"])
    with tempfile.TemporaryDirectory() as folder:
        ran = run(4, written, through, folder, timeout=400)
        off = max(deviation(found, expected) for found in ran)
        print(f"data, two stages, ZeRO 3, two stages with tensor degree 2: {off:.1e}")
        again = [pair for found in run(4, resumed, through, folder, timeout=400) for pair in found]
    late = max(deviation(found, expected[b : b + len(found)]) for b, found in again)
    print(f"checkpoints of each resumed by each other, {len(again) // 4} pairs: {late:.1e}")
    return max(worst, off, late)


def main() -> int:
    torch.set_num_threads(1)
    worst = switches(run(1, unswitched, "gpt2", STEPS, timeout=200)[0])
    with tempfile.TemporaryDirectory() as place:
        alone, broken = Path(place) / "alone", Path(place) / "broken"
        train("--plan", "data", "--nproc", "1", "--output", str(alone)).communicate(timeout=300)
        seconds, code = killed(broken)
        print(f"a rank killed: the run ended {seconds:.1f} s later with exit code {code}")
        again = train(
            "--plan", "tensor", "--nproc", "2", "--resume", str(broken), "--output", str(broken)
        )
        _, told = again.communicate(timeout=300)
        assert again.returncode == 0, told
        reference, resumed = losses(alone), losses(broken)
        off = deviation(list(resumed.values()), [reference[s] for s in resumed])
        print(
            f"resumed on 2 ranks under tensor, {len(resumed)} steps: deviation {off:.1e} (float32)"
        )
    return 0 if worst < 1e-10 and code != 0 and off < 1e-4 and len(resumed) == 30 else 1


if __name__ == "__main__":
    sys.exit(main())
