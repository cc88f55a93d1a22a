"""Estimates beside what others measured: `python -m benchmarks.published DIR`.

DIR holds tables (CSV) of published figures; each that is there is compared:

    nccl_allreduce_measured.csv       seconds of all-reduces of 1 MB and more
    data_parallel_throughput.csv      samples a second on more devices, from the smallest row of
                                      the same model, device, length and precision
    scaling_claims.csv                efficiency in per cent, from `from_devices`

Nothing is fitted but what the tables state: a device of a kind computes as quickly as makes its
smallest row right. Links are those of the catalogue's sources; what of an Ethernet's rate arrives
is stated (`--efficiency`). Batches that the tables do not say are in `BATCHES`, with their source.
Goals: a mean error of 9 % and 8 %, claims within 10 points.
"""

import argparse
import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh import catalogue
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.estimate.network import GroupPlacement, group_seconds
from synchromesh.planning.offline import traced
from synchromesh.planning.session import PlanningSession
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster, Host, Link
from synchromesh.values.plan import Plan

GOALS = {"all-reduce": 0.09, "throughput": 0.08, "claims": 10.0}
LEAST = 1 << 20  # bytes of an all-reduce
EFFICIENCY = 0.8  # of a network's rate: what links.yaml's source calls achievable
STEP_SECONDS = 8.5e-6  # of a network; NCCL's tree hop, as all of links.yaml
# The start of a system's name in the table, and its cluster in the catalogue.
SYSTEMS = {
    "8x A100": "a100x8", "8x H200": "h200x8", "8x B200": "b200x8", "4 nodes x 8 B200": "b200x32",
    "2x p4de": "a100x16", "2x p5": "h100x16", "Galvatron": "a100x8",
}  # fmt: skip
# A device's name in the table: the catalogue's, devices of a host, Gbit/s between hosts. DGX A100
# has eight adapters of 200; the P100 of the claims stand four and eight in a host.
DEVICES = {
    "A100-80": ("a100", 8, 1600.0), "V100-16 DGX-1": ("v100", 8, 400.0),
    "V100-32 DGX-1": ("v100-32gb", 8, 400.0),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Samples of a step: of all devices, or of each. most: rows of a device at once."""

    all: int = 0
    each: int = 0
    most: int = 256

    def rows(self, devices: int) -> int:
        return self.all or self.each * devices


# BERT: LAMB's two phases (You et al. 2020, arXiv 1904.00962, table 1), which the README at the
# source trains with. ResNet-50: 256 a device, 128 in fp32, as there; Goyal et al. 2017: 32.
BATCHES = {
    ("BERT-large", "128"): Batch(all=65_536), ("BERT-large", "512"): Batch(all=32_768, most=32),
    ("ResNet-50", "fp32"): Batch(each=128), ("ResNet-50", ""): Batch(each=256),
}  # fmt: skip

# Images a second of one P100, 64 at once: TensorFlow's benchmarks of 2017 on a DGX-1 with made-up
# images, as remembered: no table at hand has them. Others compute as their data sheet says.
RATES = {"Inception-V3": 142.0, "ResNet-50": 219.0, "VGG-16": 154.0}


@dataclass(frozen=True)
class Model:
    """A model on the meta device, and a batch of so many rows with its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def _images(side: int) -> Callable[[int], Any]:
    return lambda rows: (
        torch.empty(rows, 3, side, side, device="meta"),
        torch.zeros(rows, dtype=torch.long, device="meta"),
    )


def _classified(model: nn.Module, batch: Any) -> Tensor:
    made = model(batch[0])
    return nn.functional.cross_entropy(getattr(made, "logits", made), batch[1])


def resnet(depths: Sequence[int]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=list(depths))
    config.num_labels = 1000
    return ResNetForImageClassification(config)


def vgg16() -> nn.Module:
    """Simonyan and Zisserman 2015 (arXiv 1409.1556), table 1, column D."""
    layers: list[nn.Module] = []
    before = 3
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    wide = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *wide, nn.Linear(4096, 1000))


def inception() -> nn.Module:
    from synchromesh.workloads.inception import inception_v3

    return inception_v3(3, 1000)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    return BertForPreTraining(
        BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                   intermediate_size=4096)
    )  # fmt: skip


def _tokens(length: int) -> Callable[[int], Any]:
    def batch(rows: int) -> Any:
        ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids, "next_sentence_label": ids[:, 0]}

    return batch


def model_of(name: str, length: str) -> Model:
    if name == "BERT-large":
        return Model(bert, _tokens(int(length)), lambda m, b: m(**b).loss)
    depths = {"ResNet-50": (3, 4, 6, 3), "ResNet-101": (3, 4, 23, 3)}
    if name in depths:
        return Model(lambda: resnet(depths[name]), _images(224), _classified)
    known = {"VGG-16": (vgg16, 224), "Inception-V3": (inception, 299)}
    if name not in known:
        raise ValueError(f"no model {name!r} is known here: add it to `model_of`")
    build, side = known[name]
    return Model(build, _images(side), _classified)


@cache
def step_of(name: str, length: str, half: bool) -> tuple[Step, nn.Module]:
    """The step of a model, traced once. half: autocast in float16."""
    model = model_of(name, length)
    with torch.device("meta"):
        built = model.build()
    autocast = torch.float16 if half else None
    _, step = traced(built, model.loss, model.batch(64), autocast, None, lambda _: None)
    return step, built


def place(kind: str, devices: int, hosts: int, rate: float, speed: float) -> Cluster:
    """Devices of the catalogue on hosts, which bytes leave at `rate`. speed: of a device's data
    sheet."""
    sheet = catalogue.cluster(f"{kind}x2")
    (device, *_) = sheet.hosts[0].devices
    flops = {name: speed * rate for name, rate in device.flops.items()}
    quick = replace(device, flops=flops, bytes_per_second=speed * device.bytes_per_second)
    each = devices // hosts
    between = Link("*", "*", rate, STEP_SECONDS, "", 14e-6, lanes=each) if hosts > 1 else None
    return Cluster(
        f"{kind}x{devices}", tuple(Host(f"host{i}", (quick,) * each) for i in range(hosts)),
        source="datasheet", inside=sheet.inside if each > 1 else None, network=between,
        error_band=sheet.error_band,
    )  # fmt: skip


def seconds(step: Step, model: nn.Module, rows: int, most: int, cluster: Cluster) -> float:
    """Of a data-parallel step, gradients of `most` rows a device at a time."""
    devices = len(cluster.ranks)
    parts = -(-rows // (devices * most))
    plan = Plan.parse("single" if devices == 1 else "data")
    optimizer = torch.optim.AdamW(model.parameters())
    facts = DatasheetFacts.of(step, model, optimizer, rows, cluster, memory=1e15)
    found, _ = PlanningSession(facts).priced(replace(plan, micro_batches=parts), None)
    if found.time is None:
        raise ValueError(f"{cluster.name}: {found.reason}")
    return found.seconds


@dataclass(frozen=True)
class Case:
    """A model on devices of a kind, so many a host. rate: bytes a second between hosts."""

    step: Step
    model: nn.Module
    batch: Batch
    kind: str
    each: int
    rate: float

    def seconds(self, devices: int, speed: float) -> float:
        """Of a data-parallel step."""
        cluster = place(self.kind, devices, max(1, -(-devices // self.each)), self.rate, speed)
        rows = self.batch.rows(devices)
        return seconds(self.step, self.model, rows, self.batch.most, cluster)

    def speed(self, devices: int, samples_per_second: float) -> float:
        """With which a step takes what was measured."""
        found, wanted = 1.0, self.batch.rows(devices) / samples_per_second
        for _ in range(3):  # what does not go with the speed is little
            found *= self.seconds(devices, found) / wanted
        return found


def throughput(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Each row that is not the smallest of its kind."""
    kinds: dict[tuple[str, str, str, str], list[tuple[int, float]]] = {}
    for row in rows:
        kind = row["model"], row["device"], row["sequence_length"], row["precision"]
        measured = int(row["devices"]), float(row["samples_per_second"])
        kinds.setdefault(kind, []).append(measured)
    for (name, device, length, precision), its in kinds.items():
        batch = next(BATCHES[name, x] for x in (length, precision, "") if (name, x) in BATCHES)
        sheet, each, gbits = DEVICES[device]
        step, model = step_of(name, length, precision == "amp")
        case = Case(step, model, batch, sheet, each, EFFICIENCY * gbits * 1e9 / 8)
        smallest, *larger = sorted(its)
        speed = case.speed(*smallest)
        for devices, samples in larger:
            found = batch.rows(devices) / case.seconds(devices, speed)
            yield {
                "what": f"{name} {length} {precision}".replace("  ", " "), "on": device,
                "devices": devices, "measured": samples, "predicted": found,
                "error": found / samples - 1.0, "speed": speed,
            }  # fmt: skip


def claims(rows: Sequence[Mapping[str, str]], efficiency: float) -> Iterator[dict[str, Any]]:
    """Efficiencies in per cent."""
    for row in rows:
        count, first = int(row["devices"]), int(row["from_devices"])
        said = re.search(r"(\d+) Gbit/s", row["network"])
        assert said is not None, row["network"]
        rate = efficiency * int(said[1]) * 1e9 / 8
        batch = Batch(each=32 if "Goyal" in row["source"] else 64)
        step, model = step_of(row["model"], "", False)
        case = Case(step, model, batch, "p100", count // int(row["hosts"]), rate)
        rated, known = replace(case, batch=Batch(each=64)), RATES.get(row["model"])
        speed = rated.speed(1, known) if known else 1.0
        predicted = 100.0 * case.seconds(first, speed) / case.seconds(count, speed)
        yield {
            "what": row["model"], "on": row["network"], "devices": count,
            "measured": float(row["efficiency_pct"]), "predicted": predicted,
            "error": predicted - float(row["efficiency_pct"]),
        }  # fmt: skip


def all_reduces(rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Of at least `LEAST` bytes."""
    for row in rows:
        name = next((to for start, to in SYSTEMS.items() if row["system"].startswith(start)), None)
        size = int(row["bytes"])
        if name is None or size < LEAST:
            continue
        group = GroupPlacement.of(catalogue.cluster(name), range(int(row["ranks"])))
        found, measured = group_seconds("all_reduce", size, group), float(row["time_us"]) * 1e-6
        yield {
            "what": f"{size / 1e6:,.1f} MB", "on": row["system"], "devices": int(row["ranks"]),
            "measured": measured, "predicted": found, "error": found / measured - 1.0,
        }  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--efficiency", type=float, default=EFFICIENCY, metavar="SHARE",
                        help=f"of an Ethernet's rate; default {EFFICIENCY}")  # fmt: skip
    parser.add_argument("--only", choices=GOALS, help="one of the three")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    parts: dict[str, tuple[str, Callable[..., Iterator[dict[str, Any]]]]] = {
        "all-reduce": ("nccl_allreduce_measured.csv", all_reduces),
        "throughput": ("data_parallel_throughput.csv", throughput),
        "claims": ("scaling_claims.csv", lambda rows: claims(rows, args.efficiency)),
    }
    out: dict[str, Any] = {}
    for name, (file, compare) in parts.items():
        if args.only not in (None, name):
            continue
        if not (path := args.folder / file).is_file():
            print(f"{name}: no {path}")
            continue
        made = list(compare(read(path)))
        errors = [abs(row["error"]) for row in made]
        out[name] = {
            "rows": made,
            "mean": mean(errors),
            "largest": max(errors),
            "goal": GOALS[name],
        }
        if not args.json:
            show(name, out[name])
    if args.json:
        print(json.dumps(out))


def show(name: str, part: Mapping[str, Any]) -> None:
    unit = "points" if name == "claims" else "%"
    times = 1.0 if name == "claims" else 100.0
    if name != "all-reduce":  # of which there are a hundred
        for row in part["rows"]:
            print(f"{row['what']:24} {row['on'][:32]:32} {row['devices']:4} devices "
                  f"{row['measured']:10,.1f} measured {row['predicted']:10,.1f} predicted "
                  f"{times * row['error']:+6.1f} {unit}")  # fmt: skip
    print(f"{name}: {len(part['rows'])} rows, mean error {times * part['mean']:.1f} {unit}, "
          f"largest {times * part['largest']:.1f}, goal {times * part['goal']:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
