"""What a component takes by itself: laws over degrees, ranks and recomputation."""

from dataclasses import replace

import pytest

from synchromesh.cost.planned_step import Unmeasured
from synchromesh.planner.chain.component_costs import ComponentCosts, component_costs
from synchromesh.planner.uniform import UniformPartitions, holdings_of
from synchromesh.values.profile import Curve, Memory, Profile
from tests.planner.chain.test_assemble import planned, profiled
from tests.planner.chain.test_links import DEVICES, ROWS


@pytest.fixture(scope="module")
def uniform() -> UniformPartitions:
    return planned("odd_mlp")[1]


@pytest.fixture
def told(uniform: UniformPartitions) -> Profile:
    """Every component keeps 8 bytes of a row."""
    profile = profiled(uniform)
    memory = Memory(kept=Curve(((0.0, 0.0), (1.0, 8.0))))
    compute = {key: replace(c, memory=memory) for key, c in profile.compute.items()}
    return replace(profile, compute=compute)


def costs(
    uniform: UniformPartitions, profile: Profile, degree: int, recompute: bool = False
) -> ComponentCosts:
    """Of the first component."""
    held = holdings_of(uniform, degree)
    return component_costs(uniform, degree, 0, held, profile, recompute=recompute)


def test_gradients_are_summed_over_data_ranks_alone(
    uniform: UniformPartitions, told: Profile
) -> None:
    assert costs(uniform, told, 1).gradient > 0
    assert costs(uniform, told, DEVICES).gradient == 0
    assert costs(uniform, told, 1).resident > costs(uniform, told, DEVICES).resident


def test_recomputation_is_a_forward_more_and_keeps_nothing(
    uniform: UniformPartitions, told: Profile
) -> None:
    kept, again = (costs(uniform, told, 1, recompute) for recompute in (False, True))
    assert again.backward == pytest.approx(kept.backward + kept.forward)
    assert (kept.kept, again.kept) == (8.0 * ROWS / DEVICES, 0.0)
    assert again.resident == kept.resident and again.forward == kept.forward


def test_the_slowest_of_the_ranks_that_are_asked_about_counts(
    uniform: UniformPartitions, told: Profile
) -> None:
    def on(curve: Curve) -> tuple[Curve, ...]:
        return curve, curve.scaled(3.0)

    slow = {
        key: replace(c, forward=on(c.forward[0]), backward=on(c.backward[0]))
        for key, c in told.compute.items()
    }
    both, held = replace(told, compute=slow), holdings_of(uniform, 1)
    first = component_costs(uniform, 1, 0, held, both, ranks=[0])
    assert first == costs(uniform, told, 1)
    assert costs(uniform, both, 1).forward == pytest.approx(3.0 * first.forward)


def test_of_what_nothing_is_known_there_are_no_costs(
    uniform: UniformPartitions, told: Profile
) -> None:
    held = holdings_of(uniform, 1)
    for lacking in (replace(told, compute={}), replace(told, network={})):
        with pytest.raises(Unmeasured):
            component_costs(uniform, 1, 0, held, lacking)
