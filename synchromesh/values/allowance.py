"""What `auto` may choose besides plans that compute what one device does, `--allow`.

    local          local:8                                                @synchronisation
    compression    fp16, int8, powersgd:4                                 @compression
    asynchronous   stale:1, and downpour:N, ssp:N,stale=3, shat:N         @synchronisation

An allowed plan is an exact one with one of these in place of `every-step`, or of `none`. Chosen,
not measured: of each kind what is known to lose little. N: servers on all workers, so that no link
carries more than another. What sends less and asks for more care (`diloco`, `topk`, `onebit`), or
has one host (`hogwild`), is for users to name."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from synchromesh.values.fault import near
from synchromesh.values.plan import Plan
from synchromesh.values.unsupported import unsupported


@dataclass(frozen=True)
class Allowance:
    """Kinds of plans, each once, in the order of `VARIANTS`."""

    kinds: tuple[str, ...] = ()

    VARIANTS: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "local": ("synchronisation", ("local:8",)),
        "compression": ("compression", ("fp16", "int8", "powersgd:4")),
        "asynchronous": (
            "synchronisation", ("stale:1", "downpour:{0}", "ssp:{0},stale=3", "shat:{0}"),
        ),
    }  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> "Allowance":
        """Of a text like `local,compression`; nothing is allowed by an empty one. ValueError with
        the word at fault."""
        words = [word.strip() for word in text.split(",")] if text else []
        for word in words:
            if word not in cls.VARIANTS:
                known, hint = ", ".join(cls.VARIANTS), near(word, cls.VARIANTS)
                raise ValueError(f"allow {text[:60]!r}: {word[:40]!r} is none of {known}{hint}")
        return cls(tuple(kind for kind in cls.VARIANTS if kind in words))

    def __str__(self) -> str:
        return ",".join(self.kinds)

    def without(self, *kinds: str) -> "Allowance":
        return replace(self, kinds=tuple(kind for kind in self.kinds if kind not in kinds))

    def covers(self, plan: Plan) -> bool:
        """Whether `auto` may take it: what one device computes, or an allowed kind of another."""
        sync = plan.sync
        needed = {
            "local": sync.steps > 0,
            "compression": plan.compressed,
            "asynchronous": sync.asynchronous or sync.late > 0,
        }
        return plan.usual or (
            not plan.exact and all(kind in self.kinds for kind, of in needed.items() if of)
        )

    def fixed(self, plan: Plan) -> str:
        """Why no other plan is found in place of it while it trains; nothing where one may be."""
        if not self.covers(plan):
            other = "" if plan.exact else ": it computes something else, which was not allowed"
            return f"{plan} is no plan that would be found{other}"
        if plan.sync.asynchronous:
            return f"workers go on without each other ({plan.synchronisation}): no step is all's"
        return ""

    def variants(self, plan: Plan, workers: int) -> Iterator[Plan]:
        """Plans that are allowed besides an exact one of so many workers, and can be executed."""
        for kind in self.kinds if workers > 1 and plan.usual else ():
            name, values = self.VARIANTS[kind]
            for value in values:
                changed: dict[str, Any] = {name: value.format(workers)}
                if not unsupported(made := replace(plan, **changed)):
                    yield made


NOTHING = Allowance()
