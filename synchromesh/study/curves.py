"""The TensorBoard logs of a contestant: what its record has, as curves."""

from pathlib import Path

from synchromesh.results.run import RunResult
from synchromesh.runs.tensorboard import TensorBoard
from synchromesh.study.record import RunRecord
from synchromesh.values.fields import to_plain


def write(record: RunRecord, result: RunResult, folder: Path) -> None:
    """Seconds by step (of rank 0), loss and metrics by epoch, memory, shares of the recorded
    steps, and each layout as text."""
    board = TensorBoard(folder)
    done = 0
    for turn in record.of("turn"):
        if turn["mode"] == "timed":
            board.log("steps", {"first": done + 1, "seconds": [s for s, _, _ in turn["steps"]]})
        done += len(turn["steps"])
    for epoch in result.metrics:
        board.log("epoch", {"step": epoch.step, "loss": epoch.loss, **epoch.values})
    for layout in result.layouts:
        board.log("layout", {"step": layout.step, "plan": layout.plan, "reason": layout.reason})
    memory = [to_plain(kinds) for kinds in result.peak_memory_bytes]
    board.log("memory", {"step": done, "peak_bytes": memory})
    if shares := record.shares():
        board.log("recording", {"steps": [done], "mean": shares.to_dict()})
    board.close()
