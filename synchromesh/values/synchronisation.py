"""How the workers of a plan agree, `@synchronisation`. A worker is a data index.

    every-step               gradients are summed by all who have them            as one device
    server:S                 by S servers, who also keep the optimizer's state    as one device
    local:H, diloco:H        parameters are averaged after H steps                simulated workers
    downpour:S               a server steps by each gradient when it comes        a replay
    ssp:S,stale=3            ... and nobody is more steps ahead of the slowest
    shat:S                   ... and a worker goes a part of the way to the server's parameters
    hogwild                  all write one set of parameters in shared memory     one worker alone
    stale:k                  all step by the sum of k steps before                simulated workers

What each is said to be exact by, `verify` shows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from synchromesh.values.fault import near

EVERY_STEP = "every-step"


@dataclass(frozen=True)
class Synchronisation:
    """A word with its number, and what is behind commas.

    servers: 0 where there are none. steps: of `local` and `diloco`. stale: steps that a worker is
    ahead of the slowest at most, or that a sum is late. push, fetch: steps between two."""

    word: str = EVERY_STEP
    servers: int = 0
    steps: int = 0
    stale: int = 0
    push: int = 1
    fetch: int = 1

    # what the number behind a word is, and which options may follow
    WORDS: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        EVERY_STEP: ("", ()),
        "server": ("servers", ()),
        "downpour": ("servers", ("push", "fetch")),
        "ssp": ("servers", ("stale",)),
        "shat": ("servers", ()),
        "local": ("steps", ()),
        "diloco": ("steps", ()),
        "stale": ("stale", ()),
        "hogwild": ("", ()),
    }

    @classmethod
    def parse(cls, text: str) -> "Synchronisation":
        """The value of a text like `ssp:2,stale=3`. ValueError with what is wrong in it."""
        head, *options = (part.strip() for part in text.split(","))
        word, colon, number = head.partition(":")
        if word not in cls.WORDS:
            known = ", ".join(map(cls.form, cls.WORDS))
            hint = near(word, cls.WORDS)
            raise ValueError(f"synchronisation {text[:60]!r} is none of {known}{hint}")
        wanted, allowed = cls.WORDS[word]
        given = [(wanted, number)] if colon or wanted else []
        for option in options:
            key, _, value = (part.strip() for part in option.partition("="))
            given.append((key, value))
        if fault := cls._fault(wanted, allowed, given):
            raise ValueError(f"synchronisation {text[:60]!r} {fault}: write {cls.form(word)}")
        return cls(word, **{key: int(n) for key, n in given})

    @staticmethod
    def _fault(wanted: str, allowed: Sequence[str], given: Sequence[tuple[str, str]]) -> str:
        keys = [key for key, _ in given]
        if len({*keys}) < len(keys) or not {*keys} <= {wanted, *allowed} - {""}:
            return "has what it does not take, or one thing twice"
        if any(not re.fullmatch("[1-9][0-9]{0,5}", number) for _, number in given):
            return "needs whole numbers from 1 to 999999"
        return "lacks stale=" if "stale" in allowed and "stale" not in keys else ""

    @classmethod
    def form(cls, word: str) -> str:
        """How it is written: `downpour:S[,push=N][,fetch=N]`."""
        wanted, allowed = cls.WORDS[word]
        number = {"": "", "servers": ":S", "steps": ":H", "stale": ":K"}[wanted]
        options = (f",{key}=N" if key == "stale" else f"[,{key}=N]" for key in allowed)
        return f"{word}{number}{''.join(options)}"

    @property
    def asynchronous(self) -> bool:
        """Whether workers go on without each other."""
        return self.word in ("downpour", "ssp", "shat", "hogwild")

    @property
    def in_common(self) -> bool:
        """Whether they write one set of parameters, in the memory of a host."""
        return self.word == "hogwild"

    @property
    def alone(self) -> bool:
        """Whether a worker steps by its own gradient."""
        return self.steps > 0 or self.asynchronous

    @property
    def steps_itself(self) -> bool:
        """Whether a worker steps what it computes with between two fetches, besides servers."""
        return self.word in ("ssp", "shat") or self.fetch > 1

    @property
    def between_fetches(self) -> int:
        """Steps from one fetch to the next, where workers are as quick as each other: under `ssp`
        what one has fetched in step c has seen step c - 1 of all, and serves until c + stale."""
        return max(1, self.stale) if self.word == "ssp" else self.fetch

    @property
    def late(self) -> int:
        """Steps from a sum of gradients to the step that it is taken for."""
        return self.stale if self.word == "stale" else 0

    @property
    def sums(self) -> int:
        """How many sums of a bucket take memory: under way, taken, being filled."""
        return self.late + 2 if self.late else 1

    @property
    def outer_step(self) -> bool:
        """Whether an outer optimizer steps by what a mean of parameters has moved."""
        return self.word == "diloco"

    @property
    def usual(self) -> bool:
        """Whether all who have a gradient sum it, in every step."""
        return self.word == EVERY_STEP

    @property
    def exact(self) -> bool:
        """Whether it computes what one device does."""
        return self.usual or self.word == "server"


@lru_cache(maxsize=256)
def synchronisation(text: str) -> Synchronisation:
    """`Synchronisation.parse`, once for each text."""
    return Synchronisation.parse(text)
