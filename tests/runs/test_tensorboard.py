"""TensorBoard logs, read back record by record."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

from synchromesh.runs.events import (
    CheckpointSaved,
    EpochMeasured,
    LayoutInForce,
    MemoryTracked,
    StepLoss,
    StepsRecorded,
    StepsTimed,
)
from synchromesh.runs.tensorboard import TensorBoard
from synchromesh.values.memory_by_kind import MemoryByKind


def _read(folder: Path) -> dict[str, list[tuple[int, float | str]]]:
    """Values by tag, each with its step."""
    (file,) = folder.iterdir()
    data, found = file.read_bytes(), dict[str, list[tuple[int, float | str]]]()
    while data:  # length, its checksum, an event, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            text = value.tensor.string_val
            seen = text[0].decode() if text else value.simple_value
            found.setdefault(value.tag, []).append((event.step, seen))
    return found


def test_curves_and_switches(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.log(StepLoss(step=3, epoch=1, loss=0.5))
    board.log(StepsTimed(first=2, epoch=1, seconds=(0.25, 0.5), loading=(0, 0), rows=(8, 8)))
    metrics = {"accuracy": 0.75, "loss": 0.25}
    board.log(EpochMeasured(epoch=1, step=3, samples_per_second=8.0, metrics=metrics))
    shares = dict.fromkeys(("computation", "exposed", "hidden", "waiting", "other"), 0.125)
    board.log(StepsRecorded(steps=(2, 3), mean=shares))
    board.log(MemoryTracked(step=4, peak_bytes=(MemoryByKind(parameters=64, states=128),)))
    board.log(LayoutInForce(step=5, plan="tensor"))
    board.log(CheckpointSaved(step=5, path="x"))
    board.close()
    found = _read(tmp_path)
    assert found["loss"] == [(3, 0.5)] and found["step_seconds"] == [(2, 0.25), (3, 0.5)]
    assert found["epoch/accuracy"] == [(3, 0.75)] and found["share/exposed"] == [(3, 0.125)]
    assert found["epoch/samples_per_second"] == [(3, 8.0)]
    assert found["epoch/valid_loss"] == [(3, 0.25)] and "epoch/loss" not in found
    assert found["memory/rank0/parameters"] == [(4, 64.0)]
    assert found["memory/rank0/optimizer"] == [(4, 128.0)]
    ((step, text),) = found["layout/text_summary"]
    assert step == 5 and "plan: tensor" in str(text)
