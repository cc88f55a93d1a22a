"""Options that several commands share, and the kinds of values they take."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date
from math import inf, nextafter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from synchromesh.cli.command import Argument, either, option, together
from synchromesh.cli.completion import targets
from synchromesh.values.allowance import Allowance
from synchromesh.values.batch_sizes import BatchRange, BatchSchedule
from synchromesh.values.plan import Plan
from synchromesh.values.unsupported import unsupported

if TYPE_CHECKING:
    import torch

    from synchromesh.catalogue.prices import HourlyPrice
    from synchromesh.workloads.workload import Workload

N = TypeVar("N", int, float)
DOCUMENTS = (".yaml", ".yml", ".json")  # endings of files


def _number(kind: Callable[[str], N], text: str, least: N, most: float, what: str) -> N:
    """The number in a text, from `least` to below `most`; ArgumentTypeError for others."""
    with suppress(ValueError):
        number = kind(text)
        if least <= number < most:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def positive(text: str) -> int:
    return _number(int, text, 1, inf, "a whole number of at least 1")


def port(text: str) -> int:
    """A TCP port, 1 to 65535."""
    number = positive(text)
    if number > 65_535:
        raise argparse.ArgumentTypeError(f"{number} is no port: ports are 1 to 65535")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, each once."""
    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


def natural(text: str) -> int:
    """A whole number of at least 0 that fits a seed."""
    return _number(int, text, 0, 2**63, "a whole number from 0 to 2^63 - 1")


def seconds(text: str) -> float:
    return _number(float, text, nextafter(0.0, 1.0), 10**9, "a number of seconds above 0")


def rate(text: str) -> float:
    return _number(float, text, 0.0, 10**9, "a number from 0 and below 10^9")


def dated(text: str) -> "HourlyPrice":
    """Dollars an hour and the day of this price, `2.50@2026-11-01`."""
    from synchromesh.catalogue.prices import HourlyPrice

    told, _, day = text.partition("@")
    dollars = _number(float, told, nextafter(0.0, 1.0), 10**6, "a number of dollars above 0")
    with suppress(ValueError):
        return HourlyPrice(dollars, date=date.fromisoformat(day).isoformat())
    raise argparse.ArgumentTypeError(
        f"{text!r} does not say of which day this price is: give it as {told}@2026-11-01"
    )


def headroom(text: str) -> str:
    """A text that says one."""
    from synchromesh.planner.problem import Headroom

    try:
        Headroom.of(1e30, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def allowed(text: str) -> str:
    """The text of an allowance, each kind once."""
    try:
        return str(Allowance.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


TARGETS = together(
    option("targets", metavar="TARGET", nargs="+", completer=targets,
           help="a bundled workload, or path/to/file.py:function"),
    option("--data", metavar="DIR", action="append", default=[],
           help="folder of a bundled workload's data; once, or once for each TARGET"),
)  # fmt: skip
PRICE = together(
    either(
        option("--hourly-price", type=dated, metavar="DOLLARS@DATE",
               help="of one device for an hour, and the day of this price, as 2.50@2026-11-01"),
        option("--instance", metavar="NAME", help="of AWS or Google, as p3.2xlarge"),
    ),
    option("--region", metavar="R", help="of the instance's price"),
    option("--price-date", metavar="DATE", help="of the instance's price"),
)  # fmt: skip
HEADROOM = option("--headroom", type=headroom, metavar="SIZE",
    help="of a device's memory that plans leave free, as 10%% or 4GiB; default: 5%%, or more "
    "where predictions of memory are less exact")  # fmt: skip
ALLOW = option("--allow", type=allowed, default="", metavar="KINDS",
    help="what `auto` may choose besides what one device would compute: local, compression, "
    "asynchronous, by commas; what that costs in accuracy is in no predicted time")  # fmt: skip
BF16 = option("--bf16", action=argparse.BooleanOptionalAction, default=False,
              help="compute in bfloat16 by autocast; parameters keep their type")  # fmt: skip
FORCE = option("--force", action="store_true", help="overwrite that file")
JSON = option("--json", action="store_true",
              help="one document on stdout, everything else on stderr")  # fmt: skip


def rows(text: str) -> int | BatchRange:
    """Of a batch: a number, or what it may become while training."""
    if not text.startswith("auto"):
        return positive(text)
    try:
        return BatchRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def schedule(text: str) -> BatchSchedule:
    """Of batches that grow behind epochs."""
    try:
        return BatchSchedule.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def target(required: bool = True, changing: bool = False) -> Argument:
    """changing: whether batches may change."""
    help_, grows = (
        "rows of a global batch (the workload's)",
        (
            "; `auto` or `auto:MIN-MAX`: that of most samples a second, each counted by what the "
            "gradient noise scale, which is measured, says that it is worth"
        ),
    )
    return together(
        option("target", metavar="TARGET", nargs=None if required else "?", completer=targets,
               help="a bundled workload, or path/to/file.py:function"),
        option("--data", metavar="DIR", help="folder of a bundled workload's data"),
        option("--batch-size", type=rows if changing else positive, metavar="N",
               help=help_ + grows * changing),
    )  # fmt: skip


def plan_and_seed(default: str = "auto") -> Argument:
    return together(
        option("--plan", default=default, metavar="PLAN",
               help="a plan's text (`data; layers.4-17.mlp=tensor`), its .yaml or .json file, or "
               f"`auto`: what is measured to be the quickest; default {default}"),
        option("--seed", type=natural, default=0, metavar="N", help="default 0"),
    )  # fmt: skip


def nproc(what: str = "local processes") -> Argument:
    return option("--nproc", type=positive, metavar="N", help=f"{what}; default: the GPUs, else 2")


def precision(bf16: bool) -> "torch.dtype | None":
    """The type of autocast that --bf16 stands for."""
    import torch

    return torch.bfloat16 if bf16 else None


def processes(asked: int | None) -> int:
    """The number of local processes: as asked, else the GPUs, else 2."""
    if asked is not None:
        return asked
    import torch

    return torch.cuda.device_count() or 2


def example(args: argparse.Namespace) -> "Workload":
    """TARGET's workload with the batch size asked for; a bundled one makes rows without --data."""
    from synchromesh.workloads.target import load

    workload = load(args.target, args.data, synthetic=args.data is None)
    return replace(workload, batch_size=args.batch_size) if args.batch_size else workload


def refusal(
    output: str, force: bool, endings: tuple[str, ...] = DOCUMENTS, name: str = "--output"
) -> str:
    """Why the file of an option, `--output`, cannot be written; "" where it can."""
    path = Path(output)
    if path.suffix not in endings:
        known = " or ".join(filter(None, (", ".join(endings[:-1]), endings[-1])))
        return f"{name} {path}: the name should end in {known}"
    if not path.absolute().parent.is_dir():
        return f"{name} {path}: there is no folder {path.parent}"
    if path.is_dir():
        return f"{name} {path} is a folder"
    if path.exists() and not force:
        return f"{name} {path} exists: --force overwrites it, another {name} keeps it"
    return ""


def plan(text: str) -> Plan:
    """The plan that --plan says; ValueError where it is none or asks for what cannot run yet."""
    said = Plan.load(Path(text)) if text.endswith(DOCUMENTS) else Plan.parse(text)
    missing = () if said.automatic else unsupported(said)
    if missing:
        raise ValueError(f"plan {said}: {'; '.join(missing)}")
    return said


def check_degrees(plan: Plan, ranks: int) -> None:
    """Raises ValueError where a word of `plan` has no layout on so many ranks, for any model."""
    if plan.automatic or plan.stages:  # which component is in which is the model's to say
        return
    devices, faults = len(plan.devices(ranks)), []
    if plan.open_cuts:
        devices = len(plan.cut(["x"] * plan.stage_count, ranks).stages[0].ranks)
    for spec in plan.specs:
        try:
            spec.layout(devices)
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError("; ".join(dict.fromkeys(faults)))


def check_aged(plan: Plan) -> None:
    """ValueError where nothing would divide learning rates by a gradient's age."""
    if plan.automatic or not (plan.sync.asynchronous and plan.sync.servers):
        raise ValueError(
            f"--lr-rule staleness under plan {str(plan)!r}: no server steps by gradients of "
            "several ages; give a plan with @synchronisation=downpour, ssp or shat, or another "
            "--lr-rule"
        )


def price(args: argparse.Namespace) -> "HourlyPrice | None":
    """That of `PRICE`."""
    from synchromesh.catalogue import prices

    if args.instance is None and (args.region or args.price_date):
        raise ValueError("--region and --price-date are those of an --instance: name one")
    if args.hourly_price is not None:
        told: HourlyPrice = args.hourly_price
        return replace(told, source="--hourly-price")
    return args.instance and prices.price(args.instance, args.region, args.price_date)


def spot(args: argparse.Namespace, paid: "HourlyPrice | None") -> "HourlyPrice | None":
    """That of --spot-price, of what `paid` is the price of on demand."""
    if args.spot_price is None:
        return None
    if not paid:
        raise ValueError(
            "--spot-price is told beside the price on demand: --hourly-price or --instance"
        )
    told: HourlyPrice = args.spot_price
    of = replace(paid, dollars_per_hour=told.dollars_per_hour, date=told.date)
    return replace(of, source="--spot-price")
