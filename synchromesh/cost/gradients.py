"""The gradients of a device group: buckets in their order, each sent when its last one is there.

A parameter that several stages use is summed over the ranks of all of them: its bucket begins when
the last of their groups comes to it.
"""

from synchromesh.cost.setting import Setting, collective_seconds, gradient_pattern
from synchromesh.cost.timeline import Spans
from synchromesh.cost.timelines import Timelines
from synchromesh.values import buckets
from synchromesh.values.buckets import SIZES, BucketSizes
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Profile


class Gradients:
    """Call `ready` after the last backward of each of the group's components, then `finish`."""

    def __init__(
        self, setting: Setting, profile: Profile, timelines: Timelines, group: int = 0,
        sizes: BucketSizes = SIZES,
    ) -> None:  # fmt: skip
        self.setting, self.profile = setting, profile
        self.timelines, self.group, self.line = timelines, group, timelines.lines[group]
        ranks = [setting.ranks[p] for p in setting.positions[group]]
        self._copy_byte = profile.copy_byte * profile.lateness(ranks)
        self._first_user: dict[str, int] = {}  # whose backward ends last
        for i in setting.components(group):
            for h in setting.trained(i):
                self._first_user.setdefault(h.tensor.name, i)
        self.buckets = buckets.fill(
            [h for n in self._first_user if (h := setting.holdings[n]).summed],
            lambda h: (gradient_pattern(h), tuple(h.positions), h.tensor.dtype),
            lambda h: h.local_bytes,
            sizes,
        )
        self._missing = [{h.tensor.name for h in bucket} for bucket in self.buckets]
        self._next = 0

    def ready(self, component: int) -> Spans:
        """The backward of `component` is done: its gradients go into their buckets."""
        names = {n for n, i in self._first_user.items() if i == component}
        for missing in self._missing:
            copied = sum(self.setting.holdings[n].local_bytes for n in missing & names)
            yield from self.line.compute(self._copy_byte * copied)
            missing -= names
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        ranks, payload = gradient_pattern(bucket[0]), sum(h.local_bytes for h in bucket)
        seconds = collective_seconds("all_reduce", ranks, payload, self.profile)
        parties = self._groups(bucket[0])
        self.timelines.come(self.group, self._key(bucket), parties, "all_reduce", seconds, ranks)
        self._next += 1

    def _groups(self, holding: Holding) -> int:
        """How many device groups hold a tensor."""
        return sum(its[0] in holding.positions for its in self.setting.positions)

    def _key(self, bucket: list[Holding]) -> object:
        shared = () if self._groups(bucket[0]) > 1 else (self.group,)
        return ("gradients", *shared, bucket[0].tensor.name)

    def finish(self) -> Spans:
        """Backward is over: what is left is sent, and all of it is waited for."""
        while self._next < len(self.buckets):
            self._launch()
        keys = [self._key(bucket) for bucket in self.buckets]
        yield from self.line.wait(lambda: all(map(self.timelines.arrived, keys)))
        yield from self.line.finish()
