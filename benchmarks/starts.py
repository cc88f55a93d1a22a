"""How long commands take to begin: medians of this commit in turns with another.

    python -m benchmarks.starts [--before COMMIT] [--rounds 5] [--json]

Commands run as processes with bytecode cached, both commits in one interpreter's environment,
profiles of earlier runs off. `train` counts until the plan has been chosen, before the first step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import synchromesh as sm
from benchmarks.machine import machine

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
GOALS = {  # seconds on two cores
    "--help": 0.2,
    "explain digits/cnn --nproc 4": 3.0,
    "plan digits/cnn --cluster h100x8": 5.0,
    f"plan {HERE}:gpt2_small --cluster h100x8": 10.0,
    "train digits/cnn --nproc 4 --steps 1": 10.0,
    f"train {HERE}:encoder --nproc 4 --steps 1": 10.0,
}


def words(rows: int, length: int, vocabulary: int) -> list[dict[str, Any]]:
    """Rows of a language model's data, seeded."""
    import torch

    drawn = torch.randint(
        0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)
    )
    return [{"input_ids": row, "labels": row} for row in drawn]


def _causal(layers: int, width: int, heads: int, vocabulary: int, rows: int, length: int) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=1024
    )
    return sm.Workload(
        model=lambda: GPT2LMHeadModel(config),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
        train_data=words(4 * rows, length, vocabulary),
        batch_size=rows,
    )


def gpt2_small() -> Any:
    """GPT-2 small, 124 million parameters, 8 x 128 tokens."""
    return _causal(12, 768, 12, 50257, rows=8, length=128)


def encoder() -> Any:
    """A transformer of 19 components and half a million parameters."""
    return _causal(8, 64, 4, 500, rows=32, length=32)


def seconds(command: str, checkout: Path) -> float:
    """Seconds of one command of the package as it is in `checkout`."""
    environment = {
        **os.environ, "PYTHONPATH": str(checkout), "SYNCHROMESH_CACHE": "off",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        output = ["--output", str(run)] if command.startswith("train") else []
        began = time.time()
        ended = subprocess.run(
            [sys.executable, "-m", "synchromesh", *command.split(), *output],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        taken = time.time() - began
        if ended.returncode:
            raise SystemExit(f"{command}: {ended.stderr}")
        if not output:
            return taken
        events = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        return float(next(e["time"] for e in events if e["event"] == "prediction") - began)


@dataclass(frozen=True)
class Row:
    """Medians of one command, in seconds."""

    command: str
    before: float
    now: float
    goal: float


def measured(before: Path, rounds: int) -> Iterator[Row]:
    """Every command, in turns."""
    for command, goal in GOALS.items():
        taken: dict[Path, list[float]] = {before: [], ROOT: []}
        for checkout in taken:
            seconds(command, checkout)  # caches bytecode
        for turn in range(rounds):
            for checkout in sorted(taken, reverse=bool(turn % 2)):
                taken[checkout].append(seconds(command, checkout))
        old, new = (median(taken[c]) for c in (before, ROOT))
        yield Row(command.replace(f"{HERE}:", ""), old, new, goal)


def main() -> int:
    """Runs the benchmark; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", default="HEAD~1", help="the other commit; default HEAD~1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(before), asked.before], check=True)
        try:
            for row in measured(before, asked.rounds):
                rows.append(row)
                print(f"{row.command}: {row.now:.2f} s", file=sys.stderr, flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}))
    else:
        print(machine())
        print("| command | before, s | now, s | now / before | goal, s |\n|---|---|---|---|---|")
        for row in rows:
            ratio = row.now / row.before
            print(
                f"| `{row.command}` | {row.before:.2f} | {row.now:.2f} | {ratio:.2f} "
                f"| {row.goal:g} |"
            )
    return int(any(row.now > row.goal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
