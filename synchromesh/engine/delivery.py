"""A delivery: the carry that the components of a step have made comes, behind the step, to the
ranks that read it with the next batch, as they have the rows of a batch.

    stage 0   reads h, and has its rows as 2x1     h' <~~~ sent      where a later stage makes h'
    stage 1   makes h' as 1x2                      h' ~~~> sent

Most models make and read a layer's state in the same component; then nothing is sent."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.crossing import Arrival, outward
from synchromesh.engine.exchange import depart
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.values.exchange import Exchange

Ways = Sequence[tuple[str, Sequence[Exchange]]]  # of each leaf, to the ranks of each stage


def deliver(
    made: Mapping[str, Tensor], ways: Ways, rows: GlobalRows, groups: PlanGroups
) -> dict[str, Tensor]:
    """The leaves of a (micro-)batch's carry that this rank reads next, of its own rows.

    made: what this rank's components made, of one row where it has none. Every rank of the plan
    calls, in equal order."""
    position = groups.position
    found: dict[str, Tensor] = {}
    arrivals: list[tuple[str, Arrival]] = []
    letters: list[tuple[int, Tensor]] = []
    for leaf, exchanges in ways:
        for way in exchanges:
            if position in way.source.positions:
                if way.crosses:
                    letters += outward(way, made[leaf], False, rows.ranges, groups)
                elif way.source.mesh == way.target.mesh:
                    found[leaf] = made[leaf]
                else:
                    found[leaf] = depart(made[leaf], way, groups, rows.ranges)()
            elif position in way.target.positions:
                arrivals.append((leaf, Arrival(way, False, rows.ranges, groups)))
    groups.everyone.exchange(letters, [letter for _, a in arrivals for letter in a.inward])
    return found | {leaf: arrival.tensor() for leaf, arrival in arrivals}
