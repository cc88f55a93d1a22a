"""Stashed weights: the versions of a rank's parameters that micro-batches under way need.

    version    3         4         5         6            micro-batches 3 and 4 are under way
    memory    [spare]   [F3]      [F4]      [newest]      and run back with these

Forwards compute with leaves of a version, so that autograd keeps their memory as it was; the
optimizer's parameters move to other memory before a step that would change it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from synchromesh.engine.update_server import ServedRecord


class StashedWeights:
    """Of the trained parameters of one stage. behind: updates that a version is older than the
    newest one could be (`values/weight_versions.py`)."""

    def __init__(self, parameters: Sequence[nn.Parameter], behind: int) -> None:
        self.parameters, self._behind = parameters, behind
        self.most_bytes = 0  # of versions besides the newest one, so far
        self.record = ServedRecord()  # its ages and updates
        self.restart()

    def restart(self) -> None:
        """The pipeline is empty: what parameters are is version 0."""
        self._made = 0  # updates
        self._kept: dict[int, list[Tensor]] = {}  # leaves, by version
        self._spare: list[list[Tensor]] = []

    def _version(self, update: int) -> int:
        """What micro-batches of that update compute with."""
        return max(0, update - self._behind)

    def made(self, update: int) -> bool:
        """Whether what micro-batches of that update compute with is there."""
        return self._version(update) <= self._made

    def leaves(self, update: int) -> Mapping[int, Tensor]:
        """What micro-batches of that update compute with, by the parameter's id."""
        return dict(zip(map(id, self.parameters), self._of(self._version(update)), strict=True))

    def _of(self, version: int) -> list[Tensor]:
        if version not in self._kept:
            assert version == self._made, "older versions are kept while they are needed"
            # `data`: autograd is not to see that the optimizer changes the same memory later on
            self._kept[version] = [p.data.requires_grad_() for p in self.parameters]
        return self._kept[version]

    def update(self, number: int, oldest: int, step: Callable[[], None]) -> None:
        """Makes an update of what its micro-batches have left on their leaves. oldest: the update
        of the oldest micro-batch that is under way or to come. step: by `grad` of parameters."""
        for p, leaf in zip(self.parameters, self._of(self._version(number)), strict=True):
            p.grad, leaf.grad = leaf.grad, None
        needed = self._version(oldest)
        for version in [v for v in self._kept if v < needed]:
            leaves = self._kept.pop(version)
            if version < self._made:
                self._spare.append(leaves)
        if needed <= self._made:
            self._keep_newest()
        step()
        self.record.ages[self._made - self._version(number)] += 1
        self.record.updates += 1
        self._made += 1
        for p in self.parameters:
            p.grad = None

    def _keep_newest(self) -> None:
        """Parameters get other memory, with equal values."""
        newest = self._of(self._made)
        spare = self._spare.pop() if self._spare else [*map(torch.empty_like, newest)]
        for p, leaf, memory in zip(self.parameters, newest, spare, strict=True):
            p.data = memory.data.copy_(leaf.data)
        versions = len(self._kept) + len(self._spare)
        self.most_bytes = max(self.most_bytes, versions * sum(p.nbytes for p in self.parameters))
