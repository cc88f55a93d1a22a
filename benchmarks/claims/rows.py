"""The rows of the README's table: what each says, what measures it, and what it depends on."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.claims.claim import Claim, Form, NoFigure, Reading, Value, at_least, at_most
from benchmarks.claims.run import Run

Document = Mapping[str, Any]

RATIO, TIMES = Form(".3f", ".2f"), Form(".2f", ".2f")
PERCENT = Form(".1f", ".0f", " %", 100.0)
DEVIATION = Form(".1e", ".0e")
SECONDS, STEPS = Form(".1f", ".0f", " s"), Form(".0f", ".0f")
COUNTED = Form(".0f", counted=True)

STEP = (
    "synchromesh/values", "synchromesh/trace", "synchromesh/programs", "synchromesh/engine",
    "synchromesh/training",
)  # fmt: skip
PLAN = (
    *STEP, "synchromesh/cost", "synchromesh/planner", "synchromesh/profiling",
    "synchromesh/planning",
)  # fmt: skip
HOSTS = ("synchromesh/lab",)
VERIFY = "synchromesh/verify"
STATE = ("synchromesh/checkpoint", "synchromesh/data")

ONE = Run("overhead", "--ranks 1 --steps 8", 55)
TWO = Run("overhead", "--ranks 2 --steps 8", 80)
SHORT = Run("short", "--rounds 4", 150)
HYBRID = Run(
    "hybrid", "--rounds 3 --strategies ddp,ddp-bucket-view,synchromesh,by-hand", 95, hosts=True
)
NARROW = Run("pipeline", "--parts narrow --rounds 3 --only auto,ddp,single", 155, hosts=True)
UNEQUAL = Run("pipeline", "--parts unequal --rounds 3 --only auto,ours", 135, hosts=True)
LOCAL = Run("pipeline", "--parts local4 --rounds 3", 105)
CHOICE = Run("choice", "--sample --most 6 --rivals ddp", 720, hosts=True)
STAGED = Run("prediction", "--stages --sample", 175, hosts=True)
EQUAL = Run("equality", "--cases 20", 80)
EQUAL_STAGES = Run("equality", "--stages --cases 20", 80)
EQUAL_STATES = Run("equality", "--states --cases 20", 80)
# six families: each kind of error and each plan once
POWER = Run("verify_power", "--errors 36 --plans 24", 100)
CURVE = Run("curve", "", 75)
CARRY = Run("carry", "", 70, data="ptb")
LARGE = Run("large", "", 205, hosts=True)
ADAPT = Run("adapt", "--cases links --quick", 275, hosts=True)
PLANNING = Run("planning", "", 60)


# From documents to figures


def throughput(document: Document) -> Reading:
    rows = document["rows"]
    return Reading(tuple(at_least(r["ratio"], r["goal"], r["ratios"]) for r in rows))


def short(document: Document) -> Reading:
    """Of each length of step the lower ratio of the models."""
    found: dict[float, list[tuple[float, list[float]]]] = {}
    for row in document["rows"]:
        each = (row["ratio"]["data"], row["ratios"]["data"])
        found.setdefault(row["wanted"], []).append(each)
    goal = document["rows"][0]["goals"]["data"]
    return Reading(tuple(at_least(value, goal, each) for value, each in map(min, found.values())))


def mixed(document: Document) -> Reading:
    strategies = document["strategies"]
    each = strategies["synchromesh"]["ratios"]
    value = at_most(document["ratio"], document["goal"], each)
    return Reading((value,), {"by_hand": strategies["by-hand"]["ratio"]})


def _quicker(row: Mapping[str, Any]) -> Value:
    return at_least(row["ratio"], row["times"], row["ratios"])


def _part(document: Document, name: str) -> Mapping[str, Any]:
    """What was measured of one part, whose strategies must have trained alike."""
    part: Mapping[str, Any] = document["parts"][name]
    if not part["alike"]:
        raise NoFigure(f"losses of the strategies are {part['losses_apart']:.1e} apart")
    return part


def narrow(document: Document) -> Reading:
    part = _part(document, "narrow")
    rows = {row["rival"]: row for row in part["comparisons"]}
    _, staged, rest = part["strategies"]["auto"]["plan"].partition("@stages=")
    count = rest.split(";")[0].count("/") + 1 if staged else 1
    words = {"stages": count, "blocks": document["shape"]["blocks"]}
    return Reading((_quicker(rows["single"]), _quicker(rows["ddp"])), words)


def unequal(document: Document) -> Reading:
    return Reading(tuple(map(_quicker, _part(document, "unequal")["comparisons"])))


def schedules(document: Document) -> Reading:
    return Reading(tuple(map(_quicker, _part(document, "local4")["comparisons"])))


def chosen(document: Document) -> Reading:
    found, goals = document["found"], document["goals"]
    each = [case["behind"] for case in found.values()]
    mean = at_most(sum(each) / len(each), goals["mean"], each)
    bars = {
        name: [case["ddp"], case["uniform"]] for name, case in found.items() if case["uniform"]
    }
    return Reading((mean, at_most(max(each), goals["most"])), {"cases": len(each)}, bars)


def _errors(told: Document, least: float, predicted: str, measured: str) -> list[float]:
    """Of the plans whose step takes so many seconds."""
    rows = [row for row in told["rows"] if row["measured"] >= least]
    return [abs(row[predicted] / row[measured] - 1) for row in rows]


def _time(told: Document) -> Value:
    each = _errors(told, told["least"], "predicted", "measured")
    return at_most(told["time"], told["goals"]["time"], each)


def _memory(told: Document) -> Value:
    each = _errors(told, 0.0, "predicted_bytes", "measured_bytes")
    return at_most(told["memory"], told["goals"]["memory"], each)


def predicted(document: Document) -> Reading:
    told = document["prediction"]
    points = [[round(1e3 * r[k], 1) for k in ("predicted", "measured")] for r in told["rows"]]
    return Reading((_time(told),), {"plans": told["pairs"]}, points)


def memory(document: Document) -> Reading:
    told = document["prediction"]
    return Reading((_memory(told),), {"plans": len(told["rows"])})


def staged(document: Document) -> Reading:
    return Reading((_time(document), _memory(document)), {"plans": len(document["rows"])})


def passed(document: Sequence[Document]) -> Reading:
    return Reading((at_least(sum(row["passed"] for row in document), len(document)),))


def power(document: Document) -> Reading:
    rows = document["rows"]
    planted, plans = (sum(row[key] for row in rows) for key in ("planted", "plans"))
    found = sum(row["found"] for row in rows)
    return Reading((at_least(found, planted), at_least(plans - document["alarms"], plans)))


def switched(document: Document) -> Reading:
    off = dict(document["deviations"])
    resumed, goal = off.pop("resumed"), document["goal"]
    switched, *staged = off.values()
    if not document["killed"]["passed"]:
        raise NoFigure(f"the run that was killed did not go on as it was: {document['killed']}")
    values = tuple(at_most(value, goal) for value in (switched, max(staged), resumed))
    return Reading(values, {"steps": document["steps"]})


def carried(document: Document) -> Reading:
    rows = document["rows"]
    worst = at_most(max(row["deviation"] for row in rows), document["goal"])
    return Reading((worst,), {"steps": document["steps"], "plans": len(rows)})


def large(document: Document) -> Reading:
    held, trained, losses, *_ = document["goals"]
    if not (held["met"] and trained["met"]):
        raise NoFigure("; ".join(f"{g['what']}: {g['figures']}" for g in (held, trained)))
    words = {"held": held["value"], "steps": document["steps"]}
    return Reading((at_most(losses["value"], losses["limit"]),), words)


def _links(document: Document) -> Document:
    found: Document = document["cases"]["links"]
    if "within" not in found:
        raise NoFigure("no plan was switched after links became slow")
    return found


def noticed(document: Document) -> Reading:
    return Reading((at_most(_links(document)["within"], document["goals"]["within"]),))


def measuring(document: Document) -> Reading:
    return Reading((at_most(_links(document)["measuring"], document["goals"]["measuring"]),))


def search(document: Document) -> Reading:
    rows = [row for row in document["rows"] if row["case"].startswith("400 components")]
    each = [row["seconds"] for row in rows]
    return Reading((at_most(max(each), rows[0]["goal"], each),))


CLAIMS = (
    Claim(
        "loop", "throughput over a plain loop, one process: ViT-tiny, ResNet-18",
        ONE, throughput, RATIO, (*STEP, "synchromesh/workloads"),
    ),
    Claim(
        "ddp", "the same over DistributedDataParallel, two processes",
        TWO, throughput, RATIO, (*STEP, "synchromesh/workloads"),
    ),
    Claim(
        "short", "the same of steps of 5, 10, 20 ms, the lower of two small models",
        SHORT, short, RATIO, (*STEP, "synchromesh/workloads"),
    ),
    Claim(
        "hybrid", "step time, mixed plan over DDP, 4 hosts (by hand {by_hand:.3f})",
        HYBRID, mixed, RATIO, (*STEP, *HOSTS),
    ),
    Claim(
        "narrow", "speed of `auto` ({stages} stages, {blocks} blocks, 50 Mbit/s) over one device, "
        "DDP",
        NARROW, narrow, TIMES, (*PLAN, *HOSTS),
    ),
    Claim(
        "unequal", "speed of its stages over equal ones, two of four hosts at half speed",
        UNEQUAL, unequal, TIMES, (*PLAN, *HOSTS),
    ),
    Claim(
        "choice", "the chosen plan over the best measured: mean, most of {cases} cases",
        CHOICE, chosen, RATIO, (*PLAN, *HOSTS, *STATE),
    ),
    Claim(
        "prediction", "predicted step time, mean absolute error of {plans} plans",
        CHOICE, predicted, PERCENT, (*PLAN, *HOSTS, *STATE),
    ),
    Claim(
        "memory", "predicted peak memory, mean absolute error of {plans} plans",
        CHOICE, memory, PERCENT, (*PLAN, *HOSTS, *STATE),
    ),
    Claim(
        "stages", "the same of {plans} plans with stages: time, memory",
        STAGED, staged, PERCENT, (*PLAN, *HOSTS, *STATE),
    ),
    Claim(
        "schedules", "stages over torch's own, 4 ranks: GPipe, 1F1B, interleaved",
        LOCAL, schedules, TIMES, STEP,
    ),
    Claim(
        "equality", "model families and plans equal to one process within 1e-10",
        EQUAL, passed, COUNTED, (*STEP, VERIFY),
    ),
    Claim("equality-stages", "the same in stages", EQUAL_STAGES, passed, COUNTED, (*STEP, VERIFY)),
    Claim(
        "equality-states", "the same with sharded states, recomputation",
        EQUAL_STATES, passed, COUNTED, (*STEP, VERIFY),
    ),
    Claim(
        "verify", "planted errors that `verify` finds, correct plans that it passes",
        POWER, power, COUNTED, (*STEP, VERIFY),
    ),
    Claim(
        "curve", "deviation of {steps} losses: switched, in stages, resumed",
        CURVE, switched, DEVIATION,
        (*STEP, *STATE, "synchromesh/cli", "synchromesh/launcher", "synchromesh/runs"),
    ),
    Claim(
        "carry", "LSTM with carried state on PTB, deviation of {steps} losses in {plans} ways",
        CARRY, carried, DEVIATION, (*STEP, *STATE, "synchromesh/workloads"),
    ),
    Claim(
        "large", "`auto` on hosts of 1 GiB, {held:.1f} times that held: deviation of {steps} "
        "losses",
        LARGE, large, DEVIATION,
        (*PLAN, *HOSTS, *STATE, "synchromesh/cli", "synchromesh/launcher"),
    ),
    Claim(
        "adapt", "steps until a plan is switched after links became slow",
        ADAPT, noticed, STEPS, (*PLAN, *HOSTS, *STATE, "synchromesh/adapt"),
    ),
    Claim(
        "measuring", "part of the time that measuring takes meanwhile",
        ADAPT, measuring, PERCENT, (*PLAN, *HOSTS, *STATE, "synchromesh/adapt"),
    ),
    Claim(
        "planning", "search for 400 components on 4,096 devices, the longest",
        PLANNING, search, SECONDS, ("synchromesh/planner", "synchromesh/values"),
    ),
)  # fmt: skip
