"""The strategies of a study: what each name runs on so many devices.

    single           one device
    data, tensor     every component alike, by that kind of parallelism alone
    pipeline         a stage on each device; the planner chooses the number of micro-batches
    gpipe, zero-bubble, pipedream, pipedream-2bw     the same in that schedule; the last two keep
                     the pipeline filled with gradients of older weights
    hybrid           the best mixture of these that is the same for every component, by the planner
    auto             the planner's plan, which may change while training runs
    server           all sum gradients at the first one, which sends the parameters back
    downpour, ssp,   workers that go on without each other, and a server that steps by each one's
    shat             gradient when it comes, which is not what one device computes
    hogwild          workers that write one set of parameters without locks
    stale            all step by the sum of gradients of the step before
    local, diloco    workers on all devices that train alone for 8 and for 50 steps, which is not
                     what one device computes; nor is
    int8, powersgd   data parallelism that sends compressed gradients
    ddp, fsdp2       torch.nn.parallel.DistributedDataParallel, torch.distributed.fsdp.fully_shard
    torch-pipeline   torch.distributed.pipelining, a stage on each device, 1F1B

Anything else is the text of a plan."""

from collections.abc import Iterable

from synchromesh.values.fault import near
from synchromesh.values.plan import Plan
from synchromesh.values.schedule import UNFLUSHED
from synchromesh.values.unsupported import unsupported

NAMED = {
    "server": "data; @synchronisation=server:1",
    "downpour": "data; @synchronisation=downpour:1",
    "ssp": "data; @synchronisation=ssp:1,stale=3",
    "shat": "data; @synchronisation=shat:1",
    "hogwild": "data; @synchronisation=hogwild",
    "stale": "data; @synchronisation=stale:1",
    "local": "data; @synchronisation=local:8",
    "diloco": "data; @synchronisation=diloco:50",
    "int8": "data; @compression=int8",
    "powersgd": "data; @compression=powersgd:4",
}
SCHEDULED = ("gpipe", "zero-bubble", *UNFLUSHED)  # others than 1f1b
OURS = ("single", "data", "tensor", "pipeline", *SCHEDULED, "hybrid", "auto", *NAMED)
TORCH_PIPELINE = "torch-pipeline"
RIVALS = ("ddp", "fsdp2", TORCH_PIPELINE)
ROW_EACH = (
    "data",
    "pipeline",
    *SCHEDULED,
    *NAMED,
    *RIVALS,
)  # that give each device rows of the batch
NAMES = (*OURS, *RIVALS)
DEFAULT = ("single", "data", "tensor", "pipeline", "hybrid", "auto")


def check(name: str) -> None:
    """ValueError for what is neither a strategy nor a plan."""
    if name in NAMES:
        return
    try:
        plan = Plan.parse(name)
    except ValueError as error:
        raise ValueError(
            f"{name!r} is no strategy{near(name, NAMES, brackets=True)}: choose of "
            f"{', '.join(NAMES)}, or write a plan ({error})"
        ) from None
    if missing := unsupported(plan):
        raise ValueError(f"strategy {name!r}: {'; '.join(missing)}")


def patterns(names: Iterable[str]) -> dict[str, str]:
    """The patterns for components in those that are plans, each with a plan that has it."""
    written = {name: Plan.parse(name) for name in names if name not in NAMES}
    return {o.pattern: name for name, plan in written.items() for o in plan.overrides}


def plans(name: str, devices: int, batch: int) -> list[str]:
    """The plans that a strategy of ours stands for, of which the planner takes the quickest.
    ValueError where there is none on so many devices."""
    if name in ("pipeline", *SCHEDULED):
        if batch < devices:
            raise ValueError(
                f"{name} needs a row of the batch for each stage: {devices} devices are as many "
                f"stages, there are {batch} rows"
            )
        order = "" if name == "pipeline" else f"; @schedule={name}"
        return [plan + order for plan in _pipelines(devices, 1, batch)]
    return _mixtures(devices, batch) if name == "hybrid" else [NAMED.get(name, name)]


def _mixtures(devices: int, batch: int) -> list[str]:
    if devices < 4:
        raise ValueError(f"hybrid needs at least 4 devices, there are {devices}")
    inner = _divisors(devices)[1:-1]
    if not inner:
        raise ValueError(
            f"hybrid needs a number of devices that can be divided, and {devices} is a prime"
        )
    mixed = [f"hybrid:tensor={m}" for m in inner]
    for stages in inner:
        for tensor in _divisors(devices // stages):
            mixed += _pipelines(stages, tensor, batch)
    return mixed


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _pipelines(
    stages: int, tensor: int, batch: int, tried: tuple[int, ...] = (1, 2, 4)
) -> list[str]:
    """Plans of so many stages, each with that tensor degree and data parallelism for the rest.

    tried: micro-batches per stage; 1 leaves (p-1)/(2p-1) of the step idle, 4 leaves (p-1)/(5p-1),
    and more of them are smaller and less efficient each."""
    degrees = f"stages={stages}" + (f",tensor={tensor}" if tensor > 1 else "")
    counts = [stages * m for m in tried if stages * m <= batch]
    return [f"pipeline:{degrees},microbatches={count}" for count in counts]
