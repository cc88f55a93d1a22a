"""The versions of weights that a pipeline without a flush keeps, and what plans say of them."""

import pytest

from synchromesh.values.plan import Plan
from synchromesh.values.unsupported import unsupported
from synchromesh.values.weight_versions import counts

FOUR = "pipeline:stages=4,microbatches=4"


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ("@schedule=pipedream", (4, 3, 2, 1)),  # p - s
        ("@schedule=pipedream; @versions=one", (4, 4, 4, 4)),
        ("@schedule=pipedream-2bw", (2, 2, 2, 2)),
        ("@schedule=1f1b", ()),
    ],
)
def test_how_many_versions_stages_keep(settings: str, kept: tuple[int, ...]) -> None:
    plan = Plan.parse(f"{FOUR}; {settings}")
    assert counts(plan.kept) == kept and not unsupported(plan)
    assert plan.exact == plan.usual == (plan.kept is None)
    assert Plan.from_json(plan.to_json()) == plan == Plan.parse(str(plan))


@pytest.mark.parametrize(
    ("stages", "micro", "steps"), [(4, 4, 1), (4, 8, 1), (4, 3, 2), (3, 1, 3)]
)
def test_how_many_steps_are_under_way(stages: int, micro: int, steps: int) -> None:
    plan = Plan.parse(f"pipeline:stages={stages},microbatches={micro}; @schedule=pipedream")
    assert plan.kept is not None and plan.kept.steps(micro) == steps


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("data; @schedule=pipedream-2bw", "is of stages"),
        (f"{FOUR}; @schedule=pipedream-2bw; @versions=one", "is of @schedule=pipedream"),
        (f"{FOUR}; @versions=one", "write that, or leave it out"),
        ("data; @stages=0:a/1:b/0:c; @schedule=pipedream", "leave ranks out that come again"),
        ("sharded-data; @stages=0-1:a/2-3:b; @schedule=pipedream", "leave sharded states"),
        (f"{FOUR}; @schedule=pipedream; @synchronisation=downpour:1", "@synchronisation"),
        (f"{FOUR}; @schedule=pipedream; @compression=int8", "@compression out"),
    ],
)
def test_what_no_plan_may_say(text: str, why: str) -> None:
    assert any(why in sentence for sentence in unsupported(Plan.parse(text)))
