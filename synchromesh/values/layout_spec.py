"""A layout spec: the layout that a user states in a plan, before the number of devices is known.

    layout spec               layout on K devices             options
    single                    1 x 1, the other devices idle   recompute
    data                      K x 1                           recompute
    sharded-data              K x 1, states sharded (ZeRO 3)  states, recompute
    zero1, zero2              K x 1, states sharded           recompute
    tensor                    1 x K                           recompute
    hybrid:tensor=2           K/2 x 2                         tensor, data, states, recompute,
                                                              stages, microbatches
    pipeline:stages=2         K/2 x 1 in each of two stages   those of hybrid
    auto                      the planner's choice            none

K are the devices of a stage; `stages=2` halves those of the plan into two equal groups, each with
about half of the work (`Plan.cut`). `states` is none, optimizer, gradients or parameters (ZeRO 0
to 3); `recompute=yes` computes activations again in the backward pass. Specs are canonical:
`hybrid:tensor=1` is `data`, `data:states=optimizer` and `sharded-data:states=optimizer` are
`zero1`, `hybrid:stages=2,tensor=2` is `pipeline:stages=2,tensor=2`."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from synchromesh.values.fault import near
from synchromesh.values.layout import LEVELS, STATES, Layout, ShardStates

Name = Literal["single", "data", "sharded-data", "tensor", "hybrid", "pipeline", "auto"]
NAMES: tuple[Name, ...] = get_args(Name)
OPTIONS: dict[Name, tuple[str, ...]] = {
    "single": ("recompute",),
    "data": ("states", "recompute"),
    "sharded-data": ("states", "recompute"),
    "tensor": ("recompute",),
    "hybrid": ("stages", "microbatches", "tensor", "data", "states", "recompute"),
    "pipeline": ("stages", "microbatches", "tensor", "data", "states", "recompute"),
    "auto": (),
}
STATES_OF = {level.word: states for states, level in LEVELS.items() if level.word}
# that a plan may begin with; `zero3` is `sharded-data`
WORDS = (*NAMES[:3], *(w for w in STATES_OF if w != "zero3"), *NAMES[3:])
NUMBERS = ("tensor", "data", "stages", "microbatches")


@dataclass(frozen=True)
class PlanLimits:
    """The largest numbers of a plan: larger ones are typing errors."""

    degree: int = 1_000_000  # of a layout, or number of a rank, or share of the rows
    count: int = 2**31  # of micro-batches or rows


MOST = PlanLimits()


def count(text: str, what: str) -> int:
    """The number that `text` states in plain digits, from 1 to a million."""
    digits = text.isascii() and text.isdigit() and len(text) <= 7
    if not digits or not 1 <= int(text) <= MOST.degree:
        raise ValueError(f"{what}={text[:40]}: should be a whole number from 1 to {MOST.degree}")
    return int(text)


@dataclass(frozen=True)
class LayoutSpec:
    """A name and its options; an option that is None follows from the number of devices."""

    name: Name
    tensor: int | None = None
    data: int | None = None
    stages: int | None = None
    microbatches: int | None = None
    states: ShardStates = "none"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(
                f"unknown layout {self.name!r}{near(self.name, NAMES)}; "
                f"known are {', '.join(NAMES)}"
            )
        if self.states not in STATES:
            raise ValueError(f"{self.name}: states={self.states} is none of {', '.join(STATES)}")
        for option in (*NUMBERS, "states", "recompute"):
            value = getattr(self, option)
            if value in (None, False, "none"):
                continue
            if option not in OPTIONS[self.name]:
                known = ", ".join(OPTIONS[self.name]) or "none"
                raise ValueError(f"{self.name} has no option {option!r}; it has {known}")
            if option in NUMBERS and not 1 <= value <= MOST.degree:
                raise ValueError(f"{self.name}: {option}={value} is not from 1 to {MOST.degree}")
        while changes := self._plainer():  # one form for what means the same
            for field, value in changes.items():
                object.__setattr__(self, field, value)

    def _plainer(self) -> dict[str, object]:
        """The fields in which the canonical form, or one that is nearer to it, differs."""
        match self.name:
            case "hybrid" if self.stages or self.microbatches:
                return {"name": "pipeline"}
            case "hybrid" if self.tensor is None and self.data is None:
                raise ValueError("hybrid needs a degree: hybrid:tensor=2, hybrid:data=2 or both")
            case "hybrid" if self.tensor == 1 and self.data is None:
                return {"name": "data", "tensor": None}
            case "hybrid" if self.tensor is None and self.data == 1 and self.states == "none":
                return {"name": "tensor", "data": None}
            case "data" if self.states != "none":
                return {"name": "sharded-data"}
            case "sharded-data" if self.states == "none":
                return {"states": "parameters"}
            case "pipeline" if not (self.stages and self.microbatches):
                return {"stages": self.stages or 1, "microbatches": self.microbatches or 1}
        return {}

    @property
    def of_stage(self) -> "LayoutSpec":
        """The layout of components inside a stage."""
        if self.name != "pipeline":
            return self
        if self.tensor is None and self.data is None:
            return LayoutSpec("data", states=self.states, recompute=self.recompute)
        return replace(self, name="hybrid", stages=None, microbatches=None)

    @classmethod
    def parse(cls, text: str) -> "LayoutSpec":
        """The spec that a text like `hybrid:tensor=2,recompute=yes` says."""
        word, colon, rest = text.strip().partition(":")
        word = word.strip()
        name = "sharded-data" if word in STATES_OF else word
        if name not in NAMES:
            raise ValueError(
                f"unknown layout {word[:60]!r}{near(word, WORDS)}; known are {', '.join(WORDS)}"
            )
        options = ("recompute",) if word in STATES_OF else OPTIONS[name]
        stated: dict[str, object] = {"states": STATES_OF[word]} if word in STATES_OF else {}
        for item in rest.split(",") if colon else ():
            option, equals, value = (part.strip() for part in item.partition("="))
            if option not in options:
                known = ", ".join(options) or "none"
                raise ValueError(f"{word} has no option {option[:60]!r}; it has {known}")
            if not equals or option in stated:
                raise ValueError(f"{word}: write each option once, as {option}=VALUE")
            stated[option] = _value(name, option, value)
        return cls(name, **stated)  # type: ignore[arg-type]

    def __str__(self) -> str:
        word: str = self.name
        options = [f"{n}={v}" for n in NUMBERS if (v := getattr(self, n)) is not None]
        if self.name == "sharded-data" and self.states != "parameters":
            word = LEVELS[self.states].word
        elif self.name != "sharded-data" and self.states != "none":
            options.append(f"states={self.states}")
        if self.recompute:
            options.append("recompute=yes")
        return f"{word}:{','.join(options)}" if options else word

    def layout(self, devices: int) -> Layout:
        """The layout on a stage's `devices`. ValueError where the degrees do not multiply."""
        if self.name == "auto":
            raise ValueError("auto is no layout: the planner replaces it by one")
        if self.name == "single" and devices != 1:
            raise ValueError(
                f"single is one device, not {devices}: it is a layout of the whole plan; "
                "a component among others is data, tensor or hybrid"
            )
        # a degree that is not stated follows from the other
        data = (1 if self.name == "tensor" else self.data) or devices // (self.tensor or 1) or 1
        tensor = self.tensor or devices // data or 1
        if data * tensor != devices:
            factors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
            raise ValueError(
                f"{self}: data({data}) x tensor({tensor}) != {devices} devices: "
                f"degrees that divide {devices} are {factors}; @ranks=... leaves devices idle"
            )
        if self.states != "none" and data == 1 < devices:
            raise ValueError(
                f"{self}: data(1) x tensor({tensor}) has one data rank, so there is nothing to "
                "shard over: give it a smaller tensor degree, or leave the states out"
            )
        return Layout(data, tensor, self.states, self.recompute)


def _value(name: str, option: str, value: str) -> object:
    if option == "states":
        if value not in STATES or (name == "sharded-data" and value == "none"):
            known = [s for s in STATES if s != "none"] if name == "sharded-data" else STATES
            raise ValueError(f"{name}: states={value[:40]} is none of {', '.join(known)}")
        return value
    if option == "recompute":
        if value not in ("yes", "no"):
            raise ValueError(f"{name}: recompute={value[:40]} is neither yes nor no")
        return value == "yes"
    return count(value, f"{name}: {option}")
