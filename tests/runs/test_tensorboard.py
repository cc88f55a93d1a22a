"""TensorBoard logs, read back record by record."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event

from synchromesh.runs.tensorboard import TensorBoard


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
    board.log("step", {"step": 3, "epoch": 1, "loss": 0.5})
    board.log("steps", {"first": 2, "epoch": 1, "seconds": [0.25, 0.5]})
    board.log("epoch", {"epoch": 1, "step": 3, "samples_per_second": 8.0, "accuracy": 0.75})
    shares = dict.fromkeys(("computation", "exposed", "hidden", "waiting", "other"), 0.125)
    board.log("recording", {"steps": [2, 3], "mean": shares})
    board.log("memory", {"step": 4, "peak_bytes": [{"parameters": 64}]})
    board.log("layout", {"step": 5, "plan": "tensor", "components": []})
    board.log("checkpoint", {"step": 5, "path": "x"})
    board.close()
    found = _read(tmp_path)
    assert found["loss"] == [(3, 0.5)] and found["step_seconds"] == [(2, 0.25), (3, 0.5)]
    assert found["epoch/accuracy"] == [(3, 0.75)] and found["share/exposed"] == [(3, 0.125)]
    assert found["epoch/samples_per_second"] == [(3, 8.0)]
    assert found["memory/rank0/parameters"] == [(4, 64.0)]
    ((step, text),) = found["layout/text_summary"]
    assert step == 5 and "plan: tensor" in str(text)
