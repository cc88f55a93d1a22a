"""The study of docs/study: strategies on small models, on emulated hosts and without them.

    sudo make study                                    all of it; goes on where it stopped
    sudo python -m benchmarks.study --parts resnet,vit,lstm,batch,digits,cifar100,two
    python -m benchmarks.study --pages docs/study      its pages anew, of its results.json
    python -m benchmarks.study --kills 20              a small study, killed and started

Speed: a host has a share of a core, and links are to that what 10 Gbit Ethernet is to a V100:

    bytes/s of a link = 1.25e9 x FLOP/s of a host / FLOP/s of a V100

FLOP/s of a host are those of a large float32 product on one core here, times the share; those of a
V100 are the catalogue's (peak x achieved). Eight hosts can have a fifth of a core each; up to four
have twice that, which halves the time, and `single` runs on a host of either kind. Strategies of
ours are predicted for V100s with NVLink beside. Accuracy: two ranks of this machine, three seeds,
to a stated target. `two`: one device and two of this machine, as in `seed002_results.csv`.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from synchromesh import catalogue
from synchromesh.report.page import page
from synchromesh.results.derive import merged
from synchromesh.results.study import StudyResults
from synchromesh.results.table import table

ROOT = Path(__file__).parents[1]
# relative, as commands are part of the results
DATA = Path(os.environ.get("SYNCHROMESH_DATA", os.path.relpath(ROOT / "../shared/data")))
STRATEGIES = "single,data,tensor,pipeline,hybrid,auto,ddp,fsdp2"
# numbers of devices -> the share of a core that each host has: eight leave 0.24 of two cores to
# the kernel and to the study
SHARES = {"1,2,4": 0.44, "1,8": 0.22}
STEPS, AT_MOST = 30, 20.0  # timed steps of a run, and their seconds where they are slow
ETHERNET = 1.25e9  # bytes a second
# part -> TARGET, data folder, rows of a global batch, strategies
SPEED = {
    "resnet": ("cifar100/resnet_small", "cifar100", 64, STRATEGIES),
    "vit": ("cifar100/vit_small", "cifar100", 64, STRATEGIES),
    "lstm": ("ptb/lstm_small", "ptb", 32, STRATEGIES),
    # where distributing pays on these links; what sends activations would need minutes a step
    "batch": ("cifar100/resnet_small", "cifar100", 256, "single,data,auto,ddp,fsdp2"),
}
ACCURACY = {
    "digits": ("digits/cnn", None, ["--epochs", "6", "--target", "accuracy=0.95"]),
    "cifar100": (
        "cifar100/vit_small", "cifar100", ["--epochs", "4", "--target", "accuracy=0.08"],
    ),
}  # fmt: skip
GPIPE = "pipeline:stages=2,microbatches=4"


def host_flops(seconds: float = 1.0, size: int = 768) -> float:
    """FLOP/s of float32 products on one core."""
    torch.set_num_threads(1)
    a = torch.randn(size, size)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        a @ a
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - began)


def lab(folder: Path, devices: str) -> Path:
    """The file of a lab; a core's speed is measured once for a study."""
    path, measured = folder / f"lab-{devices.replace(',', '-')}.yaml", folder / "core.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not measured.exists():
        measured.write_text(json.dumps(host_flops()))
    if not path.exists():
        core, share = json.loads(measured.read_text()), SHARES[devices]
        v100 = catalogue.cluster("v100x1").ranks[0][1].flops["float32"]
        bits = 8 * ETHERNET * core * share / v100
        count = max(int(n) for n in devices.split(","))
        host = {"bandwidth": f"{bits / 1e6:.1f}mbit", "cpu": f"{share:.0%}", "count": count}
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


def commands(folder: Path) -> dict[str, list[list[str]]]:
    """By part."""
    found: dict[str, list[list[str]]] = {}
    for name, (target, data, rows, strategies) in SPEED.items():
        for devices in SHARES:
            words = [
                "--strategies", strategies, "--nproc", devices, "--batch-sizes", str(rows),
                "--steps", str(STEPS), "--at-most", str(AT_MOST), "--predict", "v100",
                "--lab", str(lab(folder, devices)),
            ]  # fmt: skip
            output = folder / f"{name}-{devices.replace(',', '-')}"
            found.setdefault(name, []).append(compare(target, data, words, output))
    for name, (target, data, length) in ACCURACY.items():
        words = ["--strategies", STRATEGIES.replace("hybrid,", ""), "--nproc", "2", "--seeds", "3"]
        found[name] = [compare(target, data, [*words, *length], folder / name)]
    words = ["--strategies", "single,data", "--plan", GPIPE, "--nproc", "2"]
    words += ["--batch-sizes", "128,256", "--steps", str(STEPS)]
    target, data, *_ = SPEED["resnet"]
    found["two"] = [compare(target, data, words, folder / "two")]
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
    parser.add_argument("--parts", default=",".join([*SPEED, *ACCURACY, "two"]))
    parser.add_argument("--output", type=Path, default=Path("study"))
    parser.add_argument("--pages", type=Path, help="a folder whose pages are made anew")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--kill-seconds", type=float, default=40.0, help="at the latest")
    options = parser.parse_args()
    if options.kills:
        same = kills(options.kills, options.kill_seconds)
        print(f"{options.kills} kills: {'the same table' if same else 'ANOTHER TABLE'}")
        return 0 if same else 1
    if options.pages:
        write(options.pages, StudyResults.load(options.pages / "results.json"))
        return 0
    parts, asked = options.parts.split(","), commands(options.output)
    if unknown := set(parts) - set(asked):
        parser.error(f"--parts {','.join(unknown)}: choose of {','.join(asked)}")
    for command in [command for name in parts for command in asked[name]]:
        print(" ".join(command[1:]), file=sys.stderr, flush=True)
        if subprocess.run(command, check=False).returncode:
            return 1
    paths = [Path(command[-1]) / "results.json" for part in asked.values() for command in part]
    studies = [StudyResults.load(path) for path in paths if path.exists()]
    write(options.output, merged(studies))
    return 0


def write(folder: Path, together: StudyResults) -> None:
    """The results and two pages: speed in the lab with what was predicted, and the rest."""
    (folder / "results.json").write_text(together.to_json())
    (folder / "results.csv").write_text(table(together))
    for name, in_lab in (("report.html", True), ("accuracy.html", False)):
        runs = [run for run in together.runs if (run.emulated or run.predicted) is in_lab]
        commands = [c for c in together.command.splitlines() if ("--lab" in c) is in_lab]
        if runs:
            part = replace(
                together, title=", ".join(dict.fromkeys(run.workload for run in runs)),
                command="\n".join(commands), runs=tuple(runs),
                emulated=any(run.emulated for run in runs),
            )  # fmt: skip
            (folder / name).write_text(page(part), encoding="utf-8")
            print(folder / name)


if __name__ == "__main__":
    raise SystemExit(main())
