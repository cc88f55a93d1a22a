"""The comparison of a verification: every rank compares what it has with what one process made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from synchromesh.checkpoint.switch import redistribute
from synchromesh.training.trainer import Trainer
from synchromesh.values.boxes import full_box
from synchromesh.verify.deviation import Deviation, merged, number
from synchromesh.verify.reference import Computed

KINDS = ("loss", "gradient", "buffer", "parameter")


class Comparison:
    """Deviations by kind. Rank 0 has the reference, which goes to the ranks box by box: an error
    in one of several equal shards is seen on the rank that has it. All ranks call alike."""

    def __init__(self, trainer: Trainer, tolerance: float) -> None:
        self._trainer = trainer
        self._deviations = {kind: Deviation(tolerance) for kind in KINDS}

    def loss(self, value: Tensor, computed: Computed | None, step: int) -> None:
        """Compares the global mean loss, which every rank has."""
        own = None if computed is None else computed.values["loss"][""].item()
        reference, noise = self._told((own, computed and computed.floors["loss"][""]))
        expected = torch.tensor(reference, dtype=torch.float64)
        self._deviations["loss"].add(value.cpu(), expected, noise, step=step)

    def shards(
        self, kind: str, local: Mapping[str, Tensor], computed: Computed | None, step: int
    ) -> None:
        """Compares this rank's shards, which lie as parameters and buffers of their names."""
        complete = {} if computed is None else computed.values[kind]
        floors = self._told(computed and computed.floors[kind])
        for name, shard in local.items():
            expected = self._expected(name, shard, complete.get(name))
            self._deviations[kind].add(
                shard.flatten(), expected.flatten(), floors[name], name, step
            )

    def _expected(self, name: str, shard: Tensor, complete: Tensor | None) -> Tensor:
        """This rank's boxes of a tensor of which rank 0 has all."""
        state = self._trainer.state
        shape = state.model.described[name].shape
        have = tuple((full_box(shape),) if r == 0 else () for r in range(self._trainer.world.size))
        want = state.sides(state.holdings[name], state.ranks)
        own = shard.new_empty(0) if complete is None else complete.to(shard)
        return redistribute(own, have, want, shape, self._trainer.world.everyone)

    def _told(self, value: Any) -> Any:
        """Rank 0's value."""
        return self._trainer.world.everyone.broadcast_json(value)

    def document(self) -> dict[str, Any]:
        """Deviations and noise floors, relative to the largest value of their kind, and `faults`,
        the worst error of each kind where there is one, relative to its own value."""
        everyone = self._trainer.world.everyone
        found = {
            k: merged(everyone.all_gather_json(d.to_dict())) for k, d in self._deviations.items()
        }
        faults = [
            {
                "kind": kind, "name": d.worst.name, "step": d.worst.step, "rank": d.worst.rank,
                "deviation": number(d.worst.deviation),
                "noise_floor": number(d.worst.noise_floor),
            }
            for kind, d in found.items()
            if d.wrong
        ]  # fmt: skip
        return {
            **{f"max_{kind}_deviation": number(d.relative) for kind, d in found.items()},
            "noise_floor": {kind: number(d.noise_floor) for kind, d in found.items()},
            "of_allowed": {kind: number(d.worst.excess) for kind, d in found.items()},
            "faults": faults,
        }
