"""The study of docs/study: strategies on three small models, on emulated hosts and without them.

    sudo make study                                             all of it; goes on where it stopped
    sudo python -m benchmarks.study [--parts resnet,vit,lstm,accuracy] [--devices 1,2,4,8]
    python -m benchmarks.study --kills 20                       a small study, killed and started

Speed: a host has `SHARE` of a core, and links are to that what 10 Gbit Ethernet is to a V100:

    bytes/s of a link = 1.25e9 x FLOP/s of a host / FLOP/s of a V100

FLOP/s of a host are those of a large float32 product on one core here, times the share; those of a
V100 are the catalogue's (peak x achieved). Strategies of ours are predicted for V100s with NVLink
beside. Accuracy: two ranks of this machine, three seeds, to a stated target.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from synchromesh import catalogue
from synchromesh.report.page import page
from synchromesh.results.merged import merged
from synchromesh.results.study import StudyResults
from synchromesh.results.table import table

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SYNCHROMESH_DATA", ROOT / "../shared/data"))
STRATEGIES = "single,data,tensor,pipeline,hybrid,auto,ddp,fsdp2"
SHARE = 0.2  # of a core: eight hosts leave the machine a fifth of its two cores
STEPS = 30
ETHERNET = 1.25e9  # bytes a second
# part -> TARGET, data folder, rows of a global batch
SPEED = {
    "resnet": ("cifar100/resnet_small", "cifar100", 128),
    "vit": ("cifar100/vit_small", "cifar100", 128),
    "lstm": ("ptb/lstm_small", "ptb", 32),
}
ACCURACY = {
    "digits": ("digits/cnn", None, ["--epochs", "6", "--target", "accuracy=0.95"]),
    "cifar100": (
        "cifar100/resnet_small", "cifar100", ["--epochs", "6", "--target", "accuracy=0.2"],
    ),
}  # fmt: skip


def host_flops(seconds: float = 1.0, size: int = 768) -> float:
    """FLOP/s of float32 products on one core."""
    torch.set_num_threads(1)
    a = torch.randn(size, size)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        a @ a
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - began)


def lab(folder: Path, hosts: int) -> Path:
    """The file of the lab; measured once for a study."""
    path = folder / "lab.yaml"
    if not path.exists():
        core = host_flops()
        v100 = catalogue.cluster("v100x1").ranks[0][1].flops["float32"]
        bits = 8 * ETHERNET * core * SHARE / v100
        host = {"bandwidth": f"{bits / 1e6:.1f}mbit", "cpu": f"{SHARE:.0%}", "count": hosts}
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"# {core / 1e9:.1f} GFLOP/s of a core, {v100 / 1e12:.2f} TFLOP/s of a V100\n"
            + yaml.safe_dump({"hosts": [host]})
        )
    return path


def compare(target: str, data: str | None, words: list[str], output: Path) -> list[str]:
    """The command of one part."""
    named = [] if data is None else ["--data", str(DATA / data)]
    return [
        sys.executable, "-m", "synchromesh", "compare", target, *named, *words, "-o", str(output),
    ]  # fmt: skip


def commands(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """By part."""
    found: dict[str, list[str]] = {}
    hosts = max(int(n) for n in options.devices.split(","))
    for name, (target, data, rows) in SPEED.items():
        words = [
            "--strategies", STRATEGIES, "--nproc", options.devices, "--batch-sizes", str(rows),
            "--steps", str(STEPS), "--lab", str(lab(folder, hosts)), "--predict", "v100",
        ]  # fmt: skip
        found[name] = compare(target, data, words, folder / name)
    for name, (target, data, length) in ACCURACY.items():
        words = ["--strategies", STRATEGIES.replace("hybrid,", ""), "--nproc", "2", "--seeds", "3"]
        found[name] = compare(target, data, [*words, *length], folder / name)
    return found


def kills(count: int, seconds: float) -> bool:
    """A small study, killed `count` times at random moments: whether no finished run was repeated
    and the table came out as that of one that nobody has killed."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [
            "--strategies",
            "single,data,ddp",
            "--nproc",
            "2",
            "--epochs",
            "1",
            "--seeds",
            "2",
        ]
        whole, killed = Path(scratch) / "whole", Path(scratch) / "killed"
        subprocess.run(compare("digits/cnn", None, words, whole), check=True, capture_output=True)
        known: dict[str, float] = {}
        done = 0
        for _ in range(10 * count):
            process = subprocess.Popen(
                compare("digits/cnn", None, words, killed), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(random.uniform(0.5, seconds))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                done += 1
            times = {str(p): p.stat().st_mtime for p in killed.glob("runs/*/run.json")}
            if any(times.get(path) != at for path, at in known.items()):
                print("a finished run was repeated")
                return False
            known = times
            if done == count:
                break
            if process.returncode == 0:  # it has ended before the kill: once more from the start
                shutil.rmtree(killed)
                known = {}
        subprocess.run(compare("digits/cnn", None, words, killed), check=True, capture_output=True)
        return metrics(whole) == metrics(killed)


def metrics(folder: Path) -> list[Any]:
    """What a study's runs learnt, which does not depend on time."""
    runs = json.loads((folder / "results.json").read_text())["runs"]
    return [
        [r["strategy"], r["seed"], r["status"], r["plan"], [e["values"] for e in r["metrics"]]]
        for r in runs
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join([*SPEED, *ACCURACY]))
    parser.add_argument("--devices", default="1,2,4,8")
    parser.add_argument("--output", type=Path, default=ROOT / "study")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kill-seconds", type=float, default=40.0, help="at the latest")
    options = parser.parse_args()
    if options.kills:
        same = kills(options.kills, options.kill_seconds)
        print(f"{options.kills} kills: {'the same table' if same else 'ANOTHER TABLE'}")
        return 0 if same else 1
    parts = options.parts.split(",")
    for name, command in commands(options, options.output).items():
        if name in parts:
            print(f"{name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
            if subprocess.run(command, check=False).returncode:
                return 1
    found = [options.output / name / "results.json" for name in [*SPEED, *ACCURACY]]
    together = merged([StudyResults.load(path) for path in found if path.exists()])
    (options.output / "results.json").write_text(together.to_json())
    (options.output / "results.csv").write_text(table(together))
    (options.output / "report.html").write_text(page(together))
    print(f"{options.output}/report.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
