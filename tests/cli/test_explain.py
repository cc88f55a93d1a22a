"""`synchromesh explain`: a model that a trace would lose something of is shown as it trains."""

import torch
from torch import Tensor, nn

from synchromesh.planning.offline import explain_plan
from synchromesh.trace.partition.explain import text
from synchromesh.values.plan import Plan
from synchromesh.workloads.workload import Workload
from tests.trace.capture.test_capture import Doubled


class Net(nn.Module):
    def __init__(self, doubled: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.doubled = doubled

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return self.second(Doubled.apply(h) if self.doubled else h)  # type: ignore[no-any-return, no-untyped-call]


def workload(doubled: bool) -> Workload:
    return Workload(
        model=lambda: Net(doubled),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.AdamW,
        train_data=[(torch.randn(8), i % 4) for i in range(16)],
        batch_size=8,
    )


def test_the_reason_of_a_model_that_stays_whole_is_said_once_with_what_to_do() -> None:
    plan = Plan.parse("tensor")
    told = explain_plan(workload(doubled=True), plan, 2)
    lines = text(told).splitlines()
    assert sum("custom autograd.Function Doubled" in line for line in lines) == 1
    assert any("under the plan 'data'" in line for line in lines)
    assert not any(line.strip().startswith("first.weight") for line in lines)
    assert told.components[0].sharded_parameter_bytes == 0

    cut = explain_plan(workload(doubled=False), plan, 2)
    assert not cut.opaque and sum(c.sharded_parameter_bytes for c in cut.components) > 0
