"""An export: whole tensors in one safetensors file, tied names, reading a rank's boxes only."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from synchromesh.checkpoint.export import load_safetensors, save_safetensors
from synchromesh.checkpoint.local_tensor import LocalTensor, box_view
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.engine.world import World
from synchromesh.values.boxes import full_box, local_shape
from synchromesh.values.placement import shard
from tests.ranks import run

WHOLE = {
    "embed.weight": torch.arange(48.0).view(12, 4),
    "norm.bias": torch.arange(3, dtype=torch.bfloat16),
    "norm.count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "filter": torch.arange(24.0).view(12, 2) * (1 + 2j),
    "table": torch.arange(3).to(torch.uint16),
}
TIED = {"head.weight": "embed.weight", "embed.weight": "embed.weight"}


def local_tensors(rank: int, size: int, fill: bool) -> dict[str, LocalTensor]:
    out = {}
    for name, tensor in WHOLE.items():
        shape = tuple(tensor.shape)
        boxes: Any = (full_box(shape),)
        if tensor.dim() == 2 and size > 1:
            boxes = shard(0, 3).boxes(shape, size, rank)
        local = torch.zeros(local_shape(boxes, len(shape)), dtype=tensor.dtype)
        for box in boxes if fill else ():
            box_view(local, boxes, box).copy_(tensor[tuple(slice(a, b) for a, b in box)])
        out[name] = LocalTensor(name, shape, boxes, local)
    return out


def there_and_back(path: str) -> bool:
    world = World.open(device="cpu")
    save_safetensors(path, local_tensors(world.rank, world.size, True), world, TIED)
    again = local_tensors(world.rank, world.size, False)
    load_safetensors(path, again, TIED)
    wanted = local_tensors(world.rank, world.size, True)
    return all(torch.equal(again[n].tensor, wanted[n].tensor) for n in again)


@pytest.mark.parametrize("ranks", [1, 2])
def test_there_and_back(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "out" / "model.safetensors"
    assert run(ranks, there_and_back, str(path)) == [True] * ranks
    stored = load_file(path)
    assert sorted(stored) == sorted(WHOLE), "tied weights are stored once"
    assert all(
        torch.equal(stored[n], WHOLE[n]) and stored[n].dtype == WHOLE[n].dtype for n in WHOLE
    )
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert json.loads(header["__metadata__"]["tied"]) == {"head.weight": "embed.weight"}


def test_a_file_with_the_other_name_of_a_tied_tensor(tmp_path: Path) -> None:
    stored = {("head.weight" if n == "embed.weight" else n): t for n, t in WHOLE.items()}
    save_file(stored, tmp_path / "model.safetensors")
    wanted = local_tensors(0, 1, False)
    load_safetensors(tmp_path, wanted, TIED)
    assert torch.equal(wanted["embed.weight"].tensor, WHOLE["embed.weight"])


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    names = list(WHOLE)
    save_file({n: WHOLE[n] for n in names[:2]}, tmp_path / "a.safetensors")
    save_file({n: WHOLE[n] for n in names[2:]}, tmp_path / "b.safetensors")
    index = {n: "a.safetensors" if n in names[:2] else "b.safetensors" for n in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    wanted = local_tensors(1, 2, False)
    load_safetensors(tmp_path, wanted)
    assert torch.equal(
        wanted["embed.weight"].tensor, local_tensors(1, 2, True)["embed.weight"].tensor
    )
    index["mask"] = "../b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=r"'\.\./b\.safetensors' is no plain file name"):
        load_safetensors(tmp_path, wanted)


def test_all_differences_at_once(tmp_path: Path) -> None:
    stored = {**WHOLE, "norm.bias": torch.ones(4), "other": torch.ones(1)}
    del stored["mask"]
    save_file(stored, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as raised:
        load_safetensors(tmp_path / "m.safetensors", local_tensors(0, 1, False))
    for sentence in (
        "mask is missing",
        "other is unexpected",
        "norm.bias has shape (4,) there, (3,) here",
        "norm.bias is torch.float32 there, torch.bfloat16 here",
    ):
        assert sentence in str(raised.value)


def test_casting_is_asked_for(tmp_path: Path) -> None:
    stored = {n: t.double() if t.is_floating_point() else t for n, t in WHOLE.items()}
    save_file(stored, tmp_path / "m.safetensors")
    wanted = local_tensors(0, 1, False)
    with pytest.raises(CheckpointError, match=r"float64 there, torch\.float32 here"):
        load_safetensors(tmp_path / "m.safetensors", wanted)
    load_safetensors(tmp_path / "m.safetensors", wanted, cast=True)
    assert torch.equal(wanted["embed.weight"].tensor, WHOLE["embed.weight"])


def test_complex_entries_are_not_cast_into_counts(tmp_path: Path) -> None:
    stored = {**WHOLE, "norm.count": WHOLE["norm.count"].to(torch.complex64)}
    save_file(stored, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.count is torch.complex64 there, torch.int64"):
        load_safetensors(tmp_path / "m.safetensors", local_tensors(0, 1, False), cast=True)


def unwritable(path: str) -> str:
    world = World.open(device="cpu")
    with pytest.raises(CheckpointError) as raised:
        save_safetensors(path, local_tensors(world.rank, world.size, True), world)
    return str(raised.value)


def test_files_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no safetensors")
    raised = run(2, unwritable, str(tmp_path / "file" / "m.safetensors"))
    assert raised[0] == raised[1] and "cannot be written: " in raised[0]
    with pytest.raises(CheckpointError, match="is no readable safetensors file"):
        load_safetensors(tmp_path / "file", local_tensors(0, 1, False))
    with pytest.raises(CheckpointError, match="there is no such file"):
        load_safetensors(tmp_path, local_tensors(0, 1, False))
