"""A schedule: the order of forward and backward micro-batches on each group of devices, as data.

An action is `2F0`: on stage 2, forward of micro-batch 0; `2B0` is its backward. A schedule that
divides backwards has a third kind, `2W0`: the gradients of weights, `2B0` then being those of what
the stage was given alone, for which the stage in front waits. A schedule is one list of actions
per group, in the order in which its devices run them; a group that comes again runs several
stages. The engine walks it with tensors, the predictions of `cost` with durations and bytes. One
unit of time per action, a line per group:

    gpipe   F0 F1 F2 .. .. B0 B1 B2   1f1b   F0 F1 .. B0 F2 B1 .. B2   interleaved: stage 2 is on
            .. F0 F1 F2 B0 B1 B2             .. F0 B0 F1 B1 F2 B2      group 0 again, 3 on group 1

            0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1        half the idle time, each action being
            ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1            half as long

    zero-bubble   F0 F1 .. B0 W0 F2 B1 W1 B2 W2    W waits for nobody, and is done where nothing
                  .. F0 B0 F1 B1 W0 F2 B2 W1 W2    else can be

Pieces that take turns share one backward. Their forwards are cut into turns where a tensor is
under way between ranks, so that another one computes meanwhile; `2F0.1` is the second turn of
`2F0`. Autograd runs backward in the reverse order, turn by turn:

    taking_turns(2, turns=2)   F0.0 F1.0 F0.1 F1.1 B1.1 B0.1 B1.0 B0.0"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from math import inf
from typing import Literal, cast

ActionKind = Literal["F", "B", "W"]
PIECES = 4  # micro-batches, where taking turns is tried: chosen, not measured against others
PIPELINES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-2")
UNFLUSHED = ("pipedream", "pipedream-2bw")  # that stay filled (values/weight_versions.py)
SCHEDULES = (*PIPELINES, *UNFLUSHED)


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """Forward (F) or backward (B) of one micro-batch on one stage, or one turn of it; or the part
    of a backward that makes the gradients of weights (W)."""

    stage: int
    kind: ActionKind
    micro_batch: int
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.label(self.turn > 0)}"

    def label(self, turns: bool) -> str:
        """The text form without the stage; turns: whether to name the turn."""
        return f"{self.kind}{self.micro_batch}" + (f".{self.turn}" if turns else "")

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action whose text form is `text`; ValueError where it is none."""
        match = re.fullmatch(r"([0-9]{1,6})([FBW])([0-9]{1,6})(?:\.([0-9]{1,6}))?", text)
        if not match:
            raise ValueError(f"{text[:40]!r} is no action: write it as 2F0")
        kind = cast(ActionKind, match[2])
        return cls(int(match[1]), kind, int(match[3]), int(match[4] or 0))

    def of_all(self, together: int) -> "Action":
        """The same of all `together` micro-batches that share a backward, which count as one."""
        if together == 1 and not self.turn:
            return self
        return Action(self.stage, self.kind, self.micro_batch // together)

    def waits_for(self, stages: int, turns: int = 1) -> tuple["Action", ...]:
        """The actions on this or a neighbouring stage that have to be done before."""
        stage, m, turn = self.stage, self.micro_batch, self.turn
        if self.kind == "F":
            if turn:
                return (Action(stage, "F", m, turn - 1),)
            return (Action(stage - 1, "F", m, turns - 1),) if stage else ()
        if self.kind == "W":
            return (Action(stage, "B", m),)
        own = Action(stage, "F", m, turn)
        if turn < turns - 1:
            return (own, Action(stage, "B", m, turn + 1))
        return (own,) if stage == stages - 1 else (own, Action(stage + 1, "B", m))


@dataclass(frozen=True)
class Schedule:
    """The actions of each group of devices in order. Checked once: complete, no deadlock.

    A schedule without backwards is that of an evaluation."""

    groups: tuple[tuple[Action, ...], ...]
    turns: int = 1  # of each forward and each backward

    def __post_init__(self) -> None:
        if not all(self.groups) or not self.groups:
            raise ValueError("each group of a schedule runs at least one action")
        by_stage: dict[int, list[tuple[Action, int]]] = {}
        for group, actions in enumerate(self.groups):
            for action in actions:
                by_stage.setdefault(action.stage, []).append((action, group))
        for stage in range(max(by_stage) + 1):
            self._check(stage, by_stage.get(stage, []))
        self.times()

    def _check(self, stage: int, its: Sequence[tuple[Action, int]]) -> None:
        """its: the actions of a stage, and on which groups they are."""
        kinds = self.kinds
        numbers = product(kinds, range(self.micro_batches), range(self.turns))
        complete = {Action(stage, *number) for number in numbers}
        if len(its) != len(complete) or {a for a, _ in its} != complete:
            raise ValueError(
                f"stage {stage} should run {' and '.join(kinds)} of micro-batches 0 to "
                f"{self.micro_batches - 1} once each, not "
                f"{' '.join(str(a) for a, _ in its[:12]) or 'nothing'}"
            )
        if len(on := sorted({group for _, group in its})) > 1:
            raise ValueError(
                f"stage {stage} is on groups {' and '.join(map(str, on))}: it runs on one"
            )

    def __hash__(self) -> int:  # not of all actions: each step asks what its schedule instructs
        return hash((self.of, self.micro_batches, self.turns))

    @cached_property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds of actions that there are, forwards always."""
        there = {a.kind for actions in self.groups for a in actions}
        return "F", *(kind for kind in ("B", "W") if kind in there)

    @property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return "B" in self.kinds

    @property
    def divides(self) -> bool:
        """Whether the gradients of weights have actions of their own."""
        return "W" in self.kinds

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches each stage runs."""
        return 1 + max(a.micro_batch for actions in self.groups for a in actions)

    @cached_property
    def of(self) -> tuple[int, ...]:
        """The group of each stage."""
        group_of = {a.stage: g for g, actions in enumerate(self.groups) for a in actions}
        return tuple(group_of[s] for s in range(len(group_of)))

    def times(self, seconds: Callable[[Action], float] = lambda _: 1) -> dict[Action, float]:
        """When each action begins if it takes `seconds` and begins as soon as it can."""
        stages = 1 + max(a.stage for actions in self.groups for a in actions)
        begun: dict[Action, float] = {}
        ended: dict[Action, float] = {}
        free: list[float] = [0] * len(self.groups)
        done = [0] * len(self.groups)
        asleep: dict[Action, list[int]] = {}  # groups by the action that they wait for
        awake = list(range(len(self.groups)))
        while awake:
            g = awake.pop()
            for action in self.groups[g][done[g] :]:
                waits = action.waits_for(stages, self.turns)
                missing = next((w for w in waits if w not in ended), None)
                if missing is not None:
                    asleep.setdefault(missing, []).append(g)
                    break
                begun[action] = max([free[g], *(ended[w] for w in waits)])
                ended[action] = free[g] = begun[action] + seconds(action)
                done[g] += 1
                awake += asleep.pop(action, ())
        if asleep:
            stuck = [str(a[n]) for a, n in zip(self.groups, done, strict=True) if n < len(a)]
            raise ValueError(f"the schedule waits for ever at {', '.join(stuck)}")
        return begun

    def in_flight(self, group: int, stage: int | None = None) -> int:
        """The most forwards of a group, or of one of its stages, that await their backward, or
        the last part of it."""
        change = {"F": 1, "B": -1, "W": 0} | ({"B": 0, "W": -1} if self.divides else {})
        actions = (a for a in self.groups[group] if stage in (None, a.stage) and not a.turn)
        return max(accumulate((change[a.kind] for a in actions), initial=0))

    def grid(self) -> str:
        """A line per group, a column per unit of time; `..` where the group is idle. Actions have
        their stage where a group runs several."""
        times = self.times()
        named = len(self.of) > len(self.groups)
        texts = {a: str(a.stage) * named + a.label(self.turns > 1) for a in times}
        width = max(map(len, texts.values()))
        lines = []
        for actions in self.groups:
            at = {times[a]: texts[a].ljust(width) for a in actions}
            cells = (at.get(t, "." * width) for t in range(int(max(at)) + 1))
            lines.append(" ".join(cells).rstrip())
        return "\n".join(lines)


def weights_kind(actions: Iterable[Action]) -> ActionKind:
    """The kind of those that make the gradients of weights."""
    return "W" if any(action.kind == "W" for action in actions) else "B"


@lru_cache(maxsize=256)
def taking_turns(micro_batches: int, turns: int = 1, at_once: int | None = None) -> Schedule:
    """One stage on which `at_once` micro-batches (none: all) share a backward, taking turns.

    Those that do not fit into one backward follow one after the other: gradient accumulation."""
    actions: list[Action] = []
    for first in range(0, micro_batches, at_once or micro_batches):
        group = range(first, min(micro_batches, first + (at_once or micro_batches)))
        forward = [(m, turn) for turn in range(turns) for m in group]
        actions += [Action(0, "F", m, turn) for m, turn in forward]
        actions += [Action(0, "B", m, turn) for m, turn in reversed(forward)]
    return Schedule((tuple(actions),), turns)


@lru_cache(maxsize=64)
def pipeline(name: str, of: tuple[int, ...], micro_batches: int) -> Schedule:
    """The schedule of one of `SCHEDULES`. of: the group of each stage.

    gpipe         all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)
    1f1b          a stage holds the activations of few micro-batches (PipeDream-Flush, Narayanan
                  et al. 2021, arXiv 2006.09503)
    interleaved   as many micro-batches as there are groups go through a stage one after another,
                  then through the group's next (Narayanan et al. 2021, arXiv 2104.04473, 2.2)

    zero-bubble   1f1b that fills its waiting with the gradients of weights, and holds no more
                  micro-batches than 1f1b's first stage (ZB-H1, Qi et al. 2023, arXiv 2401.10241,
                  section 2.1)
    zero-bubble-2 nearly twice as many: 2 p - 1 (ZB-H2, section 2.2)
    pipedream, pipedream-2bw   1f1b whose next step begins before this one has ended

    Where no group comes again, interleaved is 1f1b; where one group is alone, zero-bubble is.
    Where p groups have v equal stages each, and messages take no time, m micro-batches of f and b
    seconds on each group take

        m (f + b) + (p - 1) (f + b) / v             v = 1 for gpipe and 1f1b, else p divides m

    and where b is divided, into b seconds for inputs and w for weights,

        m (f + b + w) + (p - 1) max(f + b - w, f, b)            zero-bubble, m >= p
        m (f + b + w) + (p - 1) max(f + b - 2 w, f, b - f)      zero-bubble-2, m >= 2 p - 1, w <= b

    The first of each are the paper's of table 2. It leaves out that a first stage waits for its
    first backward and a last one for its first forward: its steps begin one after the other."""
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r} is built; there are {', '.join(SCHEDULES)}")
    listing = _Listing(of, micro_batches, max(of) + 1 if name == "interleaved" else 1)
    if name == "gpipe":
        return listing.schedule("F", "B")
    if not name.startswith("zero-bubble") or len(listing.stages) == 1:
        return listing.schedule("FB")
    if name == "zero-bubble-2":
        listing.caps = [2 * cap - 1 for cap in listing.caps]
    return listing.schedule("FBW")


@lru_cache(maxsize=64)
def forward_only(of: tuple[int, ...], micro_batches: int) -> Schedule:
    """The schedule of an evaluation. of: the group of each stage."""
    return _Listing(of, micro_batches).schedule("F")


def most_in_flight(stages: int, own: Sequence[int], micro_batches: int) -> int:
    """The most forwards under 1F1B, interleaved or not, that await their backward on the group
    whose stages are `own`, ascending, of S:

        min(sum of (S - s) over its stages s, 2 S - 1 - first - last, all that it runs)

    The sum is what 1F1B holds on each of its stages. The other is the units of time between its
    first forward (`first`, its first stage) and its first backward, in which a group that comes
    again is kept busy: (v - 1) p + 2 (p - r - 1) + 1 on group r of p with v stages each."""
    held, busy = sum(stages - s for s in own), 2 * stages - 1 - own[0] - own[-1]
    return min(held, busy, len(own) * micro_batches)


class _Listing:
    """A list scheduler: in each unit of time each group begins the first of its ready actions.

    Forwards come before backwards while a group has fewer in flight than its cap. Of either, the
    first `block` micro-batches come first, by stage (backward from the last one), then the
    next. Gradients of weights come last, but before a forward for which there is no room: no group
    keeps more micro-batches, from forward to those gradients, than the largest cap."""

    def __init__(self, of: Sequence[int], micro_batches: int, block: int = 1) -> None:
        if micro_batches < 1 or set(of) != set(range(max(of, default=-1) + 1)) or not of:
            raise ValueError(
                f"a schedule of {micro_batches} micro-batches on groups {of[:16]}: at least one "
                "micro-batch and stage, groups counted from 0 without gaps"
            )
        self.of, self.micro_batches, self.block = of, micro_batches, block
        self.stages: list[list[int]] = [[] for _ in range(max(of) + 1)]
        for stage, group in enumerate(of):
            self.stages[group].append(stage)
        count = len(of)
        self.caps = [most_in_flight(count, its, micro_batches) for its in self.stages]
        self.held = [0] * len(self.stages)  # forwards on each group that await their backward
        self.kept = [0] * len(self.stages)  # and those that await the gradients of weights
        self.done: dict[ActionKind, list[int]] = {kind: [0] * count for kind in ("F", "B", "W")}
        self.lists: list[list[Action]] = [[] for _ in self.stages]

    def schedule(self, *phases: str) -> Schedule:
        """Of phases one after another; caps hold where one has forwards and backwards."""
        for kinds in phases:
            self._add(kinds)
        return Schedule(tuple(map(tuple, self.lists)))

    def _add(self, kinds: str) -> None:
        room = max(self.caps) if "W" in kinds else inf
        left = len(kinds) * len(self.of) * self.micro_batches
        groups = range(len(self.stages))
        while left:
            begun = [a for g in groups if (a := self._next(g, kinds, room)) is not None]
            # every group may be full of micro-batches that wait for one in front of a full group
            for action in begun or [min(self._ready("F", groups), key=self._priority)]:
                group = self.of[action.stage]
                self.lists[group].append(action)
                self.done[action.kind][action.stage] += 1
                self.held[group] += {"F": 1, "B": -1, "W": 0}[action.kind]
                self.kept[group] += {"F": 1, "B": 0, "W": -1}[action.kind]
                left -= 1

    def _next(self, group: int, kinds: str, room: float) -> Action | None:
        full = len(kinds) > 1 and self.held[group] >= self.caps[group]
        for kind in kinds[1:] if full else kinds:
            ready = self._ready(cast(ActionKind, kind), (group,))
            if kind == "F" and ready and self.kept[group] >= room:
                ready = self._ready("W", (group,))
            if ready:
                return min(ready, key=self._priority)
        return None

    def _ready(self, kind: ActionKind, groups: Iterable[int]) -> list[Action]:
        """The next actions of stages that need not wait for others."""
        ready = []
        for stage in (s for g in groups for s in self.stages[g]):
            m, limits = self.done[kind][stage], [self.micro_batches]
            if kind == "F":
                limits += self.done["F"][stage - 1 : stage]
            elif kind == "W":
                limits += [self.done["B"][stage]]
            else:
                limits += [self.done["F"][stage], *self.done["B"][stage + 1 : stage + 2]]
            if m < min(limits):
                ready.append(Action(stage, kind, m))
        return ready

    def _priority(self, action: Action) -> tuple[int, int, int]:
        stage = action.stage if action.kind == "F" else -action.stage
        return action.micro_batch // self.block, stage, action.micro_batch
