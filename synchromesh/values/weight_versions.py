"""The versions of weights that a pipeline without a flush keeps: of a step, the first forwards run
while gradients of the steps before are still to come, and the backward of a micro-batch runs with
the weights that its forward saw.

    pipedream, 3 stages, updates as |                        stage 0 keeps 3 versions, stage 2 one
    stage 0   F0 F1 F2 B0 | F3 B1 | F4 B2 | F5 ...           F3 and B3: by the updates of B0
    stage 1   .. F0 F1 B0 | F2 B1 | F3 B2 | F4 ...           F3 and B3: by those of B0 and B1
    stage 2   .. .. F0 B0 | F1 B1 | F2 B2 | F3 ...           F3 and B3: by those of B0, B1 and B2

An update is made of each micro-batch (`pipedream`, Narayanan et al. 2019, SOSP, "PipeDream:
Generalized Pipeline Parallelism for DNN Training", section 3.3) or of all those of a step
(`pipedream-2bw`, Narayanan et al. 2021, ICML, arXiv 2006.09503, section 3.1). Update u, on stage s
of p, is made of gradients at version max(0, u - `behind(s)`), counted since the pipeline was
filled; one step of an optimizer at rate r without memory is

    pipedream                w_s(u + 1) = w_s(u) - r g(w_0(u - p + 1), w_1(u - p + 2), ..., w(u))
    pipedream, versions=one  w_s(u + 1) = w_s(u) - r g(w_0(u - p + 1), w_1(u - p + 1), ...)
    pipedream-2bw            w_s(u + 1) = w_s(u) - r g(w_0(u - 1), w_1(u - 1), ...)

A gradient is the mean over the rows of its micro-batch; of a step, their mean weighted by rows."""

from dataclasses import dataclass

from synchromesh.values.schedule import UNFLUSHED

OWN, ONE = VERSIONS = ("own", "one")
DOUBLE = "pipedream-2bw"  # two versions, "double-buffered weight updates"


@dataclass(frozen=True)
class WeightVersions:
    """Of the `schedule` of so many stages. versions: whether a micro-batch sees its first stage's
    version on all of them (`one`, vertical synchronisation) or each stage's latest (`own`)."""

    stages: int
    schedule: str
    versions: str = OWN

    @property
    def of_step(self) -> bool:
        """Whether the micro-batches of a step make one update together."""
        return self.schedule == DOUBLE

    def steps(self, micro_batches: int) -> int:
        """That some stage may still compute when another one begins the next."""
        return -(-self.stages // micro_batches)

    def under_way(self, stage: int) -> int:
        """Micro-batches whose backward a stage still waits for when it runs another one's."""
        return self.stages - 1 - stage

    def behind(self, stage: int) -> int:
        """Updates that a gradient does not know of when it makes one."""
        if self.of_step:
            return 1
        return self.under_way(0 if self.versions == ONE else stage)

    def count(self, stage: int) -> int:
        """Versions that a stage keeps at most, with the newest one."""
        return 1 + self.behind(stage)

    @property
    def sentence(self) -> str:
        """Why it does not compute what one device does."""
        most = self.behind(0)
        which = "all stages" if self.of_step or self.versions == ONE else "the first stage"
        updates = "of the step before" if self.of_step else f"of the last {most} micro-batches"
        return (
            f"the pipeline is not flushed: gradients are at weights that lack the updates "
            f"{updates} ({which}), and each "
            f"{'step' if self.of_step else 'micro-batch'} makes an update"
        )


def counts(kept: WeightVersions | None) -> tuple[int, ...]:
    """Versions that each stage keeps; of a pipeline that is flushed none are counted."""
    return () if kept is None else tuple(map(kept.count, range(kept.stages)))


def updates(kept: WeightVersions | None, micro_batches: int) -> int:
    """Updates of a step, for each of which data ranks sum gradients."""
    return 1 if kept is None or kept.of_step else micro_batches


def kept_versions(schedule: str, stages: int, versions: str) -> WeightVersions | None:
    """None where the pipeline is flushed, or there is none."""
    unflushed = stages > 1 and schedule in UNFLUSHED
    return WeightVersions(stages, schedule, versions) if unflushed else None
