"""A walk over micro-batches: what is called when, and what a forward leaves for its backward."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.pipeline import MicroBatch, PipelineWalk, Seeds, WeightCalls
from synchromesh.engine.program import ForwardResult, RankOutputs
from synchromesh.engine.sharding import Sharding
from synchromesh.values.plan import Plan
from synchromesh.values.schedule import Action


class Doubled:
    """A program of one stage, which doubles its micro-batch and notes what is asked of it."""

    of, group, deliveries = (0,), 0, ()

    def __init__(self) -> None:
        self.crossings, self.first_users = dict[Any, Any](), {"a": (0, 0), "b": (0, 1)}
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.asked: list[str] = []
        self.sharding, self.completing = Sharding(), dict[Any, Any]()

    def gathered(self, action: Action) -> tuple[()]:
        return ()

    def run(self, parts: Any, step: int, first: int, *rest: Any) -> ForwardResult:
        self.asked.append(f"forward {parts[0][0]} of draw {first}")
        result = RankOutputs(("loss",), [self.weight * parts[0][0]], 1, True)
        return ForwardResult([result], {}, {}, [])

    def backward(self) -> Any:
        self.asked.append("backward")
        return nullcontext()

    def after_backward(self, ran: bool) -> None:
        pass

    def end(self, forward: ForwardResult) -> None:
        self.asked.append("end")


def walk_of(program: Doubled, count: int) -> PipelineWalk:
    rows = GlobalRows((1,), Plan.parse("data"))
    batches = [MicroBatch(cast(Any, program), rows, [(m + 1, rows)]) for m in range(count)]
    return PipelineWalk(batches, cast(Any, SimpleNamespace()), 0, 10, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_in_the_order_of_its_schedule(schedule: str) -> None:
    program = Doubled()
    asked, walk = program.asked, walk_of(program, 2)

    def backwards(action: Action, results: Any) -> Seeds:
        asked.append(f"seeds {action}")
        return [(x, torch.ones(())) for result in results for x in result.outputs]

    walk.train(
        schedule,
        lambda results: asked.append(f"gave {results[0].outputs[0].item():g}"),
        lambda: asked.append("forwards over"),
        backwards,
        WeightCalls(
            lambda action: asked.append(f"weights of {action}"),
            lambda stage: asked.append(f"over {stage}"),
        ),
    )
    forwards = [
        ["forward 1 of draw 10", "gave 2"], ["forward 2 of draw 14", "gave 4"],
    ]  # fmt: skip
    backs = [[f"weights of 0B{m}", f"seeds 0B{m}", "backward", "end", "over 0"] for m in range(2)]
    wanted = {
        "gpipe": [*forwards, ["forwards over"], *backs],
        "1f1b": [forwards[0], backs[0], forwards[1], ["forwards over"], backs[1]],
    }
    assert asked == [word for words in wanted[schedule] for word in words]
    assert program.weight.grad is not None and program.weight.grad.item() == 1 + 2


def test_an_evaluation_keeps_nothing_for_a_backward() -> None:
    program = Doubled()
    with torch.no_grad():
        results = walk_of(program, 3).forward()
    assert [x.item() for result in results for x in result.outputs] == [2, 4, 6]
    assert program.asked.count("end") == 3 and "backward" not in program.asked


def test_gradients_are_complete_after_the_last_backward() -> None:
    program = Doubled()
    found = walk_of(program, 3).last_backwards("gpipe")
    assert {str(action): names for action, names in found.items()} == {
        "0B0": [], "0B1": [], "0B2": ["a", "b"],
    }  # fmt: skip
    assert walk_of(program, 3).last_backwards("gpipe") is found, "known once"
