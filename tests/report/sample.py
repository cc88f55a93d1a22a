"""Documents to draw: a full study, the smallest one, and one whose every text is an attack."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.derive import derive
from synchromesh.results.run import (
    CommunicationShares,
    ComponentLayout,
    Epoch,
    Layouts,
    Quartiles,
    Reached,
    RunResult,
    TimelineSpan,
)
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings
from synchromesh.study.strategy import NAMED
from synchromesh.values.memory_by_kind import MemoryByKind
from synchromesh.values.staleness import Staleness

OURS = ("single", "data", "tensor", "pipeline", "hybrid", "auto")
RIVALS = ("ddp", "fsdp2")
SEEDS, EPOCHS, STEPS = 3, 6, 196
MODEL = [("patch_embedding", 80_000), *((f"encoder.layer.{i}", 450_000) for i in range(12)),
         ("head.norm", 800), ("head.classifier", 1_900_000)]  # fmt: skip
# seconds of a step on one device; by strategy the exposed and hidden share on 2, 4, 8 devices
ONE = 0.82
SHARES = {
    "data": ((0.30, 0.12), (0.45, 0.10), (0.58, 0.07)),
    "tensor": ((0.38, 0.05), (0.57, 0.04), (0.74, 0.02)),
    "pipeline": ((0.12, 0.06), (0.19, 0.06), (0.27, 0.05)),
    "hybrid": ((0.30, 0.10), (0.37, 0.10), (0.46, 0.08)),
    "auto": ((0.11, 0.09), (0.17, 0.12), (0.25, 0.13)),
    "ddp": ((0.29, 0.13), (0.46, 0.10), (0.57, 0.07)),
    "fsdp2": ((0.41, 0.08), (0.56, 0.06), (0.69, 0.05)),
}
PLANS = {"hybrid": "hybrid:tensor=2", "pipeline": "pipeline:stages=4,microbatches=8"}


def full() -> StudyResults:
    """Eight strategies on 1, 2, 4 and 8 devices, three seeds; `auto` switches, one run fails."""
    runs = tuple(_runs())
    return derive(
        StudyResults(
            "cifar100/vit_tiny",
            "2026-11-22T12:00:00+00:00",
            "sudo synchromesh compare cifar100/vit_tiny --strategies "
            "single,data,tensor,pipeline,hybrid,auto,ddp,fsdp2 --nproc 1,2,4,8 --seeds 3 "
            "--epochs 6 --target accuracy=0.6 --lab lab.yaml --instance p3.2xlarge -o study/",
            StudyMachine("AMD EPYC 7B13", 2, 8 * 2**30, (), "Linux 6.1"),
            runs,
            StudySettings((*OURS, *RIVALS), (1, 2, 4, 8), (256,), (0, 1, 2), "strong", EPOCHS,
                     targets=("accuracy=0.6",)),
            {"hosts": [{"name": f"host{i}"} for i in range(8)]}, True,
            {"synchromesh": "0.1.0", "torch": "2.13.0", "python": "3.12.3"},
            HourlyPrice(3.06, 1, "p3.2xlarge", "us-east-1", "2026-10-01", "aws.amazon.com"),
            "Ratio of computation to bandwidth as of V100 on 10 Gbit Ethernet.",
        )
    )  # fmt: skip


def minimal() -> StudyResults:
    """Two strategies on two processes, one seed, steps alone."""
    steps = {"data": Quartiles(0.0213, 0.0208, 0.0221), "auto": Quartiles(0.0209, 0.0204, 0.0214)}
    runs = tuple(
        RunResult("digits/cnn", name, 2, 64, 0, "done", name if name == "data" else "single",
                  step_seconds=step, timed_steps=30, samples_per_second=64 / step.median)
        for name, step in steps.items()
    )  # fmt: skip
    return derive(
        StudyResults("digits/cnn", "2026-11-22T12:00:00+00:00",
                     "synchromesh compare digits/cnn --strategies data,auto --steps 30 -o study/",
                     StudyMachine("cpu", 2), runs,
                     StudySettings(("data", "auto"), (2,), (64,), (0,)))
    )  # fmt: skip


def asynchronous() -> StudyResults:
    """All sum gradients, servers step by each of them, and gradients are compressed."""
    stale = Staleness(2.0, 3, 2, (10, 20, 30, 40)), Staleness(1.5, 2, 1, (0, 50, 50))
    of = {"data": None, "downpour": stale[0], "ssp": stale[1], "int8": None}
    runs = tuple(
        RunResult("digits/cnn", name, 4, 64, 0, "done", NAMED.get(name, name),
                  step_seconds=Quartiles(0.02, 0.019, 0.021), timed_steps=60, staleness=known,
                  samples_per_second=3200.0 + i, sent_bytes_per_step=(800 - i, 400, 400, 400),
                  communication_share=CommunicationShares(0.25 - i / 100, 0.1),
                  computation_share=0.5, waiting_share=0.05,
                  to_target=Reached("accuracy=0.9", 2, 3.0 + i),
                  metrics=tuple(Epoch(e, 30 * e, 0.6 * e, 0.5, {"accuracy": 0.9 + i / 100})
                                for e in (1, 2)))
        for i, (name, known) in enumerate(of.items())
    )  # fmt: skip
    return derive(
        StudyResults("digits/cnn", "2026-11-27T12:00:00+00:00",
                     "synchromesh compare digits/cnn --strategies data,downpour,ssp,int8 -o study",
                     StudyMachine("cpu", 2), runs, StudySettings(tuple(of), (4,), (64,), (0,)))
    )  # fmt: skip


def several() -> StudyResults:
    """Two workloads, one measured in a lab, without one and predicted; plans as strategies."""
    study = full()
    few = ("single", "data", "auto", "ddp")
    fast = [r for r in study.runs if r.strategy in few and r.seed == 0 and r.devices < 4]
    here = [replace(run, emulated=False, metrics=()) for run in fast if run.devices == 2]
    absent = [
        replace(run, predicted=True, emulated=False, cluster="8 V100 with NVLink", timeline=())
        for run in fast
    ]
    plan = "data; encoder.layer.*.attention=tensor; encoder.layer.1*=hybrid:tensor=2; head=tensor"
    other = [
        replace(run, workload="a/very/long/name/of/a/workload/in/a/file.py:function",
                strategy=f"{plan}{i}", plan=plan)
        for i, run in enumerate(here)
    ]  # fmt: skip
    return derive(replace(study, runs=(*fast, *here, *absent, *other)))


# speedups by strategy and devices, each over a step of one device that takes so many seconds
DIFFICULT: Mapping[str, tuple[float, Mapping[str, Mapping[int, float]]]] = {
    "crowded": (0.3, {
        "single": {1: 1.0},
        **{name: {2: 1.3 + i / 200, 8: 5.0 + i / 50} for i, name in enumerate((
            "data", "tensor", "pipeline:stages=4,microbatches=8", "hybrid:tensor=2", "auto", "ddp",
            "fsdp2", "data; encoder.layer.*.attention=tensor; head=tensor"))},
    }),
    "ending early": (0.3, {
        "single": {1: 1.0}, "data": {2: 1.0, 4: 2.0, 7: 3.5, 8: 4.0}, "pipeline": {2: 1.4, 4: 2.8},
        "tensor": {2: 0.6}, "auto": {2: 1.8, 4: 3.6, 8: 7.2}, "fsdp2": {2: 0.96, 4: 1.92},
        "hybrid:tensor=2": {2: 1.2, 4: 2.4, 7: 4.2}, "ddp": {2: 0.98, 4: 1.96, 8: 3.92},
    }),
    "slower": (0.3, {
        "single": {1: 1.0}, "data": {2: 0.28, 8: 0.19}, "ddp": {2: 0.29, 8: 0.18},
        "tensor": {2: 0.11, 8: 0.07}, "auto": {2: 0.96, 8: 0.94},
    }),
    "seconds and minutes": (1200.0, {
        "single": {1: 1.0}, "data": {2: 2.0, 4: 4.0}, "auto": {2: 13.0, 4: 26.0},
        "ddp": {2: 1200.0, 4: 2400.0},
    }),
    "minutes": (400.0, {
        "single": {1: 1.0}, "data": {2: 1.9, 4: 3.8}, "auto": {2: 3.0, 4: 6.0},
    }),
    "one count": (0.3, {"data": {4: 1.9}, "auto": {4: 3.0}, "ddp": {4: 1.8}}),
}  # fmt: skip


def difficult(*names: str, spread: float = 0.01) -> StudyResults:
    """Cases of `DIFFICULT`, a workload each; quartiles are so far from the median."""
    names = names or ("crowded", "ending early", "seconds and minutes")

    def run(case: str, name: str, devices: int, step: float) -> RunResult:
        exposed = 0.3 if devices > 1 else 0.0
        return RunResult(
            case, name, devices, 64, 0, "done", name, timed_steps=12,
            step_seconds=Quartiles(step, step * (1 - spread), step * (1 + spread)),
            samples_per_second=64 / step, predicted_step_seconds=step * 1.1,
            communication_share=CommunicationShares(exposed, 0.0), computation_share=1 - exposed,
            metrics=tuple(Epoch(i, i, step * i, None, {"accuracy": 1 - 0.5**i})
                          for i in range(1, 4)),
            peak_memory_bytes=(MemoryByKind(2**28, 2**28, 2**29, 0, 2**27),) * devices,
            timeline=tuple(TimelineSpan(d, 0, step * 0.9, "computation", "layer")
                           for d in range(devices)),
        )  # fmt: skip

    runs = tuple(
        run(case, name, devices, one / speedup)
        for case, (one, of) in DIFFICULT.items()
        if case in names
        for name, by_devices in of.items()
        for devices, speedup in by_devices.items()
    )
    return derive(
        StudyResults(", ".join(names), "2026-11-25T12:00:00+00:00",
                     "synchromesh compare digits/cnn -o study/", StudyMachine("cpu", 2), runs)
    )  # fmt: skip


ATTACKS = (
    "<script>alert(1)</script>",
    "<img onerror=alert(1) src=x>",
    "/home/</script><script>alert(2)</script>",
    '"><svg onload=alert(3)>',
    "javascript:alert(4)",
    "$\\frac{1}{0}$ {{ 7*7 }} {% include 'x' %} ]]> &amp; &#60;b&#62;",
)


def hostile() -> StudyResults:
    """The full study with an attack in every text that a user or a machine may choose."""
    model, note, path, host, link, template = ATTACKS
    study, few = full(), ("single", "tensor", "hybrid", "auto")
    runs = [r for r in study.runs if r.strategy in few and r.devices in (1, 8) and r.seed != 1]
    study = replace(study, runs=tuple(runs))
    names = {"auto": template, "hybrid": host}

    def changed(run: RunResult) -> RunResult:
        layouts = tuple(
            replace(
                stretch, plan=path, reason=note and f"{note} {stretch.reason}",
                components=tuple(
                    replace(c, name=model if i == 0 else c.name,
                            layout=host if i == 1 else c.layout)
                    for i, c in enumerate(stretch.components)
                ),
            )
            for stretch in run.layouts
        )  # fmt: skip
        return replace(
            run, workload=model, strategy=names.get(run.strategy, run.strategy), plan=path,
            reason=run.reason and f"{note} {path}", layouts=layouts, utilisation_of=host,
            timeline=tuple(replace(span, name=note) for span in run.timeline),
            metrics=tuple(replace(e, values={host: e.values["accuracy"]})
                          for e in run.metrics),
            cluster=host,
        )  # fmt: skip

    return replace(
        study, title=model, note=note, command=f"synchromesh compare {path} {template}",
        machine=replace(study.machine, processor=host, devices=(link, note), system=path),
        versions={host: model}, created=template,
        price=HourlyPrice(3.06, 1, note, host, link, path),
        settings=replace(study.settings, strategies=(model, host), targets=(note,)),
        runs=tuple(map(changed, study.runs)),
    )  # fmt: skip


def _runs() -> Iterator[RunResult]:
    draw = random.Random(0)
    for devices in (1, 2, 4, 8):
        for seed in range(SEEDS):
            for strategy in (*OURS, *RIVALS):
                if (strategy == "single") != (devices == 1):
                    continue
                if strategy == "tensor" and devices == 8 and seed == 2:
                    yield RunResult(
                        "cifar100/vit_tiny", strategy, devices, 256, seed, "failed", "tensor",
                        "out of memory on device 5: 1.2 GiB were asked for, 0.4 GiB were free; a "
                        "smaller batch or more stages need less", emulated=True,
                    )  # fmt: skip
                    continue
                yield _run(strategy, devices, seed, draw)


def _run(strategy: str, devices: int, seed: int, draw: random.Random) -> RunResult:
    at = {1: None, 2: 0, 4: 1, 8: 2}[devices]
    exposed, hidden = (0.0, 0.0) if at is None else SHARES[strategy][at]
    waiting = exposed * (0.6 if strategy == "pipeline" else 0.25)
    step = ONE / devices * 1.03 / (1 - exposed - 0.02) * draw.gauss(1, 0.008)
    seconds = step * STEPS * EPOCHS
    plan = PLANS.get(strategy, strategy)
    return RunResult(
        "cifar100/vit_tiny", strategy, devices, 256, seed, "done",
        None if strategy in RIVALS else "data; head*=tensor" if strategy == "auto" else plan,
        step_seconds=Quartiles(step, step * 0.985, step * 1.02), timed_steps=STEPS * EPOCHS,
        samples_per_second=256 / step / 1.02, data_waiting_share=0.015,
        seconds_per_epoch=step * STEPS,
        epoch_seconds=Quartiles(step * STEPS, step * STEPS * 0.98, step * STEPS * 1.03),
        communication_share=CommunicationShares(exposed, hidden),
        computation_share=1 - exposed - 0.02, waiting_share=waiting,
        utilisation=0.97 - exposed, utilisation_of="processor time over wall time",
        flops_utilisation=0.31 * (1 - exposed),
        peak_memory_bytes=_memory(strategy, devices),
        sent_bytes_per_step=tuple(int(23e6 * exposed * (1 + i / 50)) for i in range(devices)),
        metrics=_metrics(seconds, draw),
        to_target=Reached("accuracy=0.6", *((5, step * STEPS * 5) if seed else ())),
        predicted_step_seconds=None if strategy in RIVALS else step * draw.gauss(1.0, 0.06),
        predicted_peak_bytes=None if strategy in RIVALS else int(
            max(m.total for m in _memory(strategy, devices)) * 1.01),
        seconds=seconds,
        layouts=() if strategy in RIVALS else _layouts(strategy, devices, step),
        timeline=_timeline(strategy, devices, step, exposed, hidden, waiting),
        emulated=True,
    )  # fmt: skip


def _memory(strategy: str, devices: int) -> tuple[MemoryByKind, ...]:
    total = 4 * sum(size for _, size in MODEL)
    part = 1 if strategy in ("single", "data", "ddp") else devices
    rows = 240_000_000 // devices
    return tuple(
        MemoryByKind(total // part, total // part, 2 * total // part, 4096,
                     int(rows * (1.5 - i / devices if strategy == "pipeline" else 1)))
        for i in range(devices)
    )  # fmt: skip


def _metrics(seconds: float, draw: random.Random) -> tuple[Epoch, ...]:
    return tuple(
        Epoch(
            i,
            i * STEPS,
            seconds * i / EPOCHS,
            4.0 * 0.7**i,
            {
                "accuracy": 0.68 - 0.55 * 0.55**i + draw.gauss(0, 0.006),
                "top5_accuracy": 0.93 - 0.5 * 0.5**i + draw.gauss(0, 0.004),
            },
        )
        for i in range(1, EPOCHS + 1)
    )


def _layouts(strategy: str, devices: int, step: float) -> tuple[Layouts, ...]:
    def under(plan: str, layouts: list[str], stages: int = 1) -> Layouts:
        parts = [
            ComponentLayout(name, layout, min(i * stages // len(MODEL), stages - 1), 4 * size)
            for i, ((name, size), layout) in enumerate(zip(MODEL, layouts, strict=True))
        ]
        return Layouts(0, plan, tuple(parts))

    if strategy == "pipeline":
        return (under(PLANS["pipeline"], ["single"] * 15, min(devices, 4)),)
    if strategy != "auto":
        return (under(PLANS.get(strategy, strategy), [PLANS.get(strategy, strategy)] * 15),)
    mixed = under("data; head*=tensor", ["data"] * 13 + ["tensor"] * 2)
    if devices < 8:
        return (mixed,)
    later = under(
        "data; @stages=0-3:patch_embedding/4-7:encoder.layer.7; encoder.layer.1*=hybrid:tensor=2; "
        "head*=tensor",
        ["data"] * 10 + ["hybrid:tensor=2"] * 3 + ["tensor"] * 2, 2,
    )  # fmt: skip
    return (
        mixed,
        replace(later, step=390, seconds=390 * step, paused_seconds=0.41, moved_bytes=31_000_000,
                reason="messages between host 3 and host 4 take 2.1 times as long as before"),
    )  # fmt: skip


def _timeline(
    strategy: str, devices: int, step: float, exposed: float, hidden: float, waiting: float
) -> tuple[TimelineSpan, ...]:
    spans = []
    for device in range(devices):
        at, shift = 0.0, device * 0.004 * step
        for i in range(12):
            piece = (1 - exposed) * step / 12
            spans.append(
                TimelineSpan(
                    device,
                    at + shift,
                    at + shift + piece * 0.96,
                    "computation",
                    f"encoder.layer.{i}",
                )
            )
            if hidden:
                start = at + shift + piece * 0.3
                spans.append(
                    TimelineSpan(
                        device, start, start + hidden * step / 12, "communication", "all_reduce"
                    )
                )
            at += piece + exposed * step / 12
            if exposed:
                middle = at + shift - (exposed - waiting) * step / 12
                spans.append(
                    TimelineSpan(
                        device, at + shift - exposed * step / 12, middle, "waiting", "all_reduce"
                    )
                )
                spans.append(
                    TimelineSpan(device, middle, at + shift, "communication", "all_reduce")
                )
    return tuple(spans)  # fmt: skip
