"""A trainer state: what a checkpoint of a trainer keeps beside tensors, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from synchromesh.checkpoint.json_state import from_json, to_json
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.data.cursor import Cursor
from synchromesh.engine.noise_averages import NoiseState
from synchromesh.values import document
from synchromesh.values.fields import of_plain, to_plain


@dataclass(frozen=True)
class TrainerState:
    """All of it checked, so that a trainer that adopts it does so entirely.

    plan, ranks   under which the run was saved
    overlap       of the number of pieces (engine/pieces.py)
    optimizer     but for its tensors (`OptimizerState.describe`)
    scheduler     its state_dict; None where there was none
    cursors       of the trainer's loaders, in their order
    carry         rows of the carry among the tensors; 0: there is none
    extra         the caller's
    noise         of the averages of the noise scale; None where it is not measured"""

    steps: int
    seed: int
    plan: str
    ranks: int
    overlap: Mapping[str, int | None]
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None
    cursors: tuple[Cursor, ...]
    carry: int
    extra: Mapping[str, Any]
    noise: NoiseState | None = None

    def to_dict(self) -> dict[str, Any]:
        """As checkpoints keep it. ValueError for what JSON has no form of."""
        try:
            json.dumps(self.extra)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra cannot be kept: {error}; numbers, texts, and lists and dictionaries of "
                "them can"
            ) from None
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        state = None if self.scheduler is None else to_json(self.scheduler, "the scheduler")
        cursors = [c.to_dict() for c in self.cursors]
        return {**values, "scheduler": state, "cursors": cursors, "noise": to_plain(self.noise)}

    @classmethod
    def from_dict(cls, value: Any, path: Path) -> "TrainerState":
        """The inverse of `to_dict`. CheckpointError, which names `path`, for anything else."""
        later = ("carry", "noise")  # which older ones have not
        names = [f.name for f in fields(cls) if f.name not in later]
        if not isinstance(value, dict) or any(name not in value for name in names):
            raise CheckpointError(
                f"{path}: is no checkpoint of a trainer: trainer.save writes them"
            )
        try:
            scheduler = value["scheduler"]
            state = None if scheduler is None else from_json(scheduler, "scheduler")
            places = document.sequence(value["cursors"], "cursors")
            cursors = tuple(Cursor.from_dict(place) for place in places)
            steps, ranks = (document.integer(value[n], n) for n in ("steps", "ranks"))
            carry = document.integer(value.get("carry", 0), "carry")
            noise = value.get("noise")
            noise = None if noise is None else of_plain(NoiseState, noise, "noise")
            seed = document.integer(value["seed"], "seed", -(2**64), 2**64)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        plan, overlap, optimizer = value["plan"], value["overlap"], value["optimizer"]
        extra = value["extra"]
        return cls(
            steps, seed, plan, ranks, overlap, optimizer, state, cursors, carry, extra, noise
        )  # fmt: skip
