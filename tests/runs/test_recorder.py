"""Recordings of real steps on real ranks: every way of training shows its communications."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from synchromesh.engine.world import World
from synchromesh.runs import recorder as recorder_module
from synchromesh.runs.recorder import Recorder, common_clock, gathered
from synchromesh.runs.shares import shares
from synchromesh.runs.spans import Recording
from tests import ranks


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _recorded(step: object, world: World) -> tuple[Counter[str], list[Recording]]:
    for _ in range(2):  # DDP divides its gradients anew in the second step
        step()  # type: ignore[operator]
    with Recorder(world.device) as recorder:
        world.everyone.barrier()
        with recorder.step():
            step()  # type: ignore[operator]
    start, end = recorder.recording.steps[0]
    inside = [
        s
        for s in recorder.recording.spans
        if s.kind == "communication" and start <= s.start <= end
    ]
    assert all(s.ranks for s in inside), inside
    return Counter(s.name for s in inside), gathered(recorder.recording, world.everyone)


def _ways() -> dict[str, Counter[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    world, x = World.open("cpu"), torch.randn(4, 8)
    replica = nn.parallel.DistributedDataParallel(_net())
    found = {"ddp": _recorded(lambda: replica(x).sum().backward(), world)[0]}
    sharded = fully_shard(_net(), mesh=init_device_mesh("cpu", (2,)))
    found["fsdp2"] = _recorded(lambda: sharded(x).sum().backward(), world)[0]
    part = PipelineStage(_net(), world.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(part, 2, loss_fn=lambda a, b: (a - b).square().mean())
    arguments = ((x,), {}) if world.rank == 0 else ((), {"target": x})
    found["pipeline"] = _recorded(lambda: schedule.step(*arguments[0], **arguments[1]), world)[0]

    def ours() -> None:
        world.everyone.start_all_reduce(x)()
        world.everyone.all_gather(x)
        world.everyone.exchange([(1 - world.rank, x)], [(1 - world.rank, torch.empty(4, 8))])

    found["ours"], recordings = _recorded(ours, world)
    assert [r.rank for r in recordings] == [0, 1]
    assert recordings == [Recording.from_dict(r.to_dict()) for r in recordings]
    world.close()
    return found


def test_every_way_of_training_shows_its_communications() -> None:
    first, second = ranks.run(2, _ways)
    assert first == {
        "ddp": {"all_reduce": 1},
        "fsdp2": {"all_gather": 1, "reduce_scatter": 1},
        "pipeline": {"send": 2, "receive": 2},
        "ours": {"all_reduce": 1, "all_gather": 1, "send": 1, "receive": 1},
    }
    assert second == first


def _late() -> list[dict[str, float]]:
    world, x = World.open("cpu"), torch.zeros(4)
    methods = dict(vars(dist.ProcessGroup))
    with Recorder(world.device) as recorder:
        world.everyone.barrier()
        with recorder.step():
            if world.rank == 1:
                time.sleep(0.2)
            world.everyone.all_gather(x)
    assert dict(vars(dist.ProcessGroup)) == methods, "nothing is wrapped any more"
    found = shares(gathered(recorder.recording, world.everyone))
    assert common_clock(world.everyone) == 0.0
    world.close()
    return [{"exposed": s.exposed, "waiting": s.waiting} for s in found]


def test_a_late_rank_is_waited_for() -> None:
    found, _ = ranks.run(2, _late)
    assert found[0]["exposed"] > 0.8 and found[0]["waiting"] > 0.7, found
    assert found[1]["waiting"] < 0.1, found


def _offset(seconds: float) -> float:
    """Of a rank 1 whose clock shows `seconds` more and whose machine is another one."""
    world, now = World.open("cpu"), time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(recorder_module, "boot", lambda: "another")
            patch.setattr(time, "time_ns", lambda: now() + round(seconds * 1e9))
        return common_clock(world.everyone)


def test_the_clock_of_another_machine() -> None:
    assert ranks.run(2, _offset, 5.0) == [0.0, pytest.approx(-5.0, abs=0.005)]
