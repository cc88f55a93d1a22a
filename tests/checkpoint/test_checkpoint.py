"""Checkpoints: any boxes load from any, faults are named, a kill leaves a good one."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from synchromesh.checkpoint import checkpoint, manifest, stored_boxes
from synchromesh.checkpoint.checkpoint import load, save
from synchromesh.checkpoint.local_tensor import LocalTensor, box_view
from synchromesh.checkpoint.manifest import CheckpointError, newest, verify
from synchromesh.engine.world import World
from synchromesh.values.boxes import full_box, local_shape
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement, shard
from tests.ranks import run

WHOLE = {
    "model/embed": torch.arange(24 * 36, dtype=torch.float32).view(24, 36),
    "model/bias": torch.arange(5, dtype=torch.float64),
    "model/count": torch.tensor(7),
    "model/empty": torch.empty(0, 3),
    "optimizer/embed/exp_avg": torch.arange(24 * 36, dtype=torch.bfloat16).view(24, 36),
}
PLACED = {"data": REPLICATED, "rows": shard(0), "segments": shard(0, 2), "columns": shard(1)}


def alone() -> World:
    return World.open(device="cpu")


def local_tensors(
    layout: Layout, placement: Placement, rank: int, fill: bool, step: int = 0
) -> dict[str, LocalTensor]:
    """The tensors of WHOLE as a rank holds them: the large ones placed, the small ones whole."""
    out = {}
    for name, tensor in WHOLE.items():
        shape = tuple(tensor.shape)
        placed = (
            placement if placement.fits(shape, layout.tensor) and tensor.dim() > 1 else REPLICATED
        )
        if 0 in shape:
            placed = REPLICATED
        boxes: Any = ()
        if rank < layout.devices:
            boxes = placed.boxes(shape, layout.tensor, layout.tensor_index(rank))
        local = torch.full(local_shape(boxes, len(shape)), 0, dtype=tensor.dtype)
        if fill:
            for box in boxes:
                part = tensor[tuple(slice(a, b) for a, b in box)] + step
                box_view(local, boxes, box).copy_(part)
        out[name] = LocalTensor(name, shape, boxes, local)
    return out


def correct(tensors: dict[str, LocalTensor], step: int = 0) -> bool:
    return all(
        torch.equal(h.view(box), (WHOLE[n] + step)[tuple(slice(a, b) for a, b in box)])
        for n, h in tensors.items()
        for box in h.boxes
    )


def write_alone(path: Path, step: int = 0, extra: Any = None) -> None:
    save(path, local_tensors(Layout(), REPLICATED, 0, True, step), extra, alone())


def read_alone(path: Path, **options: Any) -> tuple[dict[str, LocalTensor], Any]:
    tensors = local_tensors(Layout(), REPLICATED, 0, False)
    extra = load(path, tensors, alone(), **options)
    return tensors, extra


# Any ranks load what any ranks saved


def saving(path: str, layout: Layout, placement: Placement) -> None:
    world = World.open(device="cpu")
    save(path, local_tensors(layout, placement, world.rank, True), {"rank": world.rank}, world)


def loading(path: str, layouts: list[tuple[Layout, Placement]]) -> list[bool]:
    world = World.open(device="cpu")
    raised = []
    for layout, placement in layouts:
        tensors = local_tensors(layout, placement, world.rank, False)
        extra = load(path, tensors, world)
        raised.append(correct(tensors) and extra == {"rank": 0})
    return raised


@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        (Layout(1, 4), shard(1)), (Layout(2, 2), shard(0, 2)), (Layout(3, 1), REPLICATED),
        (Layout(1, 4), shard(0, 8)),
    ],
)  # fmt: skip
def test_any_ranks_load_what_any_saved(
    tmp_path: Path, layout: Layout, placement: Placement
) -> None:
    """Also where segments of three rows leave the fourth rank empty boxes between the others."""
    path = tmp_path / "step-1"
    run(4, saving, str(path), layout, placement)
    assert correct(read_alone(path)[0])
    layouts = [(Layout(3, 1), REPLICATED), (Layout(1, 3), shard(1)), (Layout(1, 2), shard(0, 3))]
    assert run(3, loading, str(path), layouts) == [[True] * 3] * 3


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    run(4, saving, str(tmp_path / "c"), Layout(2, 2), shard(0))
    files = verify(tmp_path / "c").files
    assert sorted(files) == [".metadata", *(f"__{r}_0.distcp" for r in range(4)), "state.json"]
    total = sum(t.numel() * t.element_size() for t in WHOLE.values())
    stored = sum(e.bytes for n, e in files.items() if n.endswith("distcp"))
    assert total < stored < total + 12 * 2000, "each box once, and torch.save's own bytes"


def test_torch_reads_it(tmp_path: Path) -> None:
    """torch's own tools load the folder."""
    from torch.distributed.checkpoint import state_dict_loader

    run(2, saving, str(tmp_path / "c"), Layout(1, 2), shard(1))
    plain = {n: torch.empty_like(t) for n, t in WHOLE.items() if t.numel()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        state_dict_loader.load(plain, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(plain[n], WHOLE[n]) for n in plain)


def test_large_boxes_are_stored_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_boxes.BoxWriter, "BOX_BYTES", 500)
    write_alone(tmp_path / "c")
    assert correct(read_alone(tmp_path / "c")[0])


def test_extra_is_any_json(tmp_path: Path) -> None:
    extra = {"cursor": {"seed": 1}, "lr": 0.1, "best": float("inf"), "names": ["ä", None]}
    write_alone(tmp_path / "c", extra=extra)
    assert read_alone(tmp_path / "c")[1] == extra
    assert checkpoint.read_extra(tmp_path / "c", alone()) == extra
    with pytest.raises(CheckpointError, match=r"no JSON: Object of type Tensor is not JSON"):
        write_alone(tmp_path / "d", extra={"x": torch.ones(1)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


# What does not fit


def test_all_differences_at_once(tmp_path: Path) -> None:
    write_alone(tmp_path / "c")
    tensors = local_tensors(Layout(), REPLICATED, 0, False)
    del tensors["model/count"]
    tensors["model/new"] = LocalTensor("model/new", (2,), (((0, 2),),), torch.zeros(2))
    tensors["model/bias"] = LocalTensor("model/bias", (6,), (((0, 6),),), torch.ones(6).double())
    half = torch.ones(24, 36).half()
    tensors["model/embed"] = LocalTensor("model/embed", (24, 36), (full_box((24, 36)),), half)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path / "c", tensors, alone())
    for sentence in (
        "model/new is missing",
        "model/count is unexpected",
        "model/bias has shape (5,) there, (6,) here",
        "model/embed is torch.float32 there, torch.float16 here",
    ):
        assert sentence in str(raised.value)
    assert bool((half == 1).all()), "nothing was filled"


def test_what_may_be_missing_or_left_unread(tmp_path: Path) -> None:
    write_alone(tmp_path / "c", extra=3)
    tensors = {
        n: h for n, h in local_tensors(Layout(), REPLICATED, 0, False).items() if n.startswith("m")
    }
    new = LocalTensor("model/new", (2,), (((0, 2),),), torch.full((2,), 5.0))
    with pytest.raises(CheckpointError, match="optimizer/embed/exp_avg is unexpected"):
        load(tmp_path / "c", tensors, alone())
    allow = ("optimizer/*", "model/new")
    assert load(tmp_path / "c", tensors | {"model/new": new}, alone(), allow=allow) == 3
    assert correct(tensors) and new.tensor.tolist() == [5.0, 5.0]


# Damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES = [
    (flip, "is damaged: its contents do not have the recorded SHA-256"),
    (truncate, r"bytes instead of \d+: it is truncated"),
    (Path.unlink, "is missing"),
    (replace_by_link, "is not a regular file"),
]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize(("damage", "sentence"), DAMAGES)
def test_damage_is_named_and_the_one_before_offered(
    tmp_path: Path, name: str, damage: Any, sentence: str
) -> None:
    write_alone(tmp_path / "step-1", 1)
    write_alone(tmp_path / "step-2", 2)
    assert newest(tmp_path) == tmp_path / "step-2"
    damage(tmp_path / "step-2" / name)
    with pytest.raises(CheckpointError, match=f"step-2/{name}.* {sentence}") as raised:
        read_alone(tmp_path / "step-2")
    assert f"the newest good one beside it is {tmp_path / 'step-1'}" in str(raised.value)
    assert newest(tmp_path) == tmp_path / "step-1"
    assert correct(read_alone(tmp_path / "step-1")[0], 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "is no finished checkpoint of Synchromesh: it has no MANIFEST.json"),
        ("{", "the manifest is damaged or foreign"),
        ('{"format": "other", "files": {}}', "the format is text 'other'"),
        (
            '{"format": "synchromesh checkpoint 1", "files": {"../x": {}}}',
            "'../x' is no plain file",
        ),
        ('{"format": "synchromesh checkpoint 1", "files": {}}', "does not list .metadata"),
        (
            '{"format": "synchromesh checkpoint 1", "files": {"a": {"bytes": 1}}}',
            "sha256 is missing",
        ),
    ],
)
def test_foreign_folders(tmp_path: Path, text: str | None, sentence: str) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    if text is not None:
        (folder / manifest.NAME).write_text(text)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        read_alone(folder)
    assert "no other good checkpoint lies beside it" in str(raised.value)
    with pytest.raises(CheckpointError, match="nowhere: there is no such checkpoint folder"):
        read_alone(tmp_path / "nowhere")
    (tmp_path / "file.pt").touch()
    with pytest.raises(CheckpointError, match=r"file\.pt: is a file, .* is a folder .*weights="):
        read_alone(tmp_path / "file.pt")


# Malice: the manifest is correct for what the attacker wrote


class Canary:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['CANARY']}",)


def tampered(folder: Path, change: Any) -> None:
    """Changes the index and makes the manifest fit it again."""
    with (folder / ".metadata").open("rb") as file:
        index = pickle.load(file)
    index = change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    remanifest(folder)


def remanifest(folder: Path) -> None:
    names = [p.name for p in folder.iterdir() if p.name != manifest.NAME]
    entries = ((n, manifest.digest(folder / n)) for n in names)
    manifest.manifest_of(entries, folder.parent).write(folder)


def with_code(index: Any) -> Any:
    index.planner_data = Canary()
    return index


def with_object(index: Any) -> Any:
    index.state_dict_metadata["model/bias"] = BytesStorageMetadata()
    return index


def with_path(to: str) -> Any:
    def change(index: Any) -> Any:
        for info in index.storage_data.values():
            info.relative_path = to
        return index

    return change


def with_place(index: Any) -> Any:
    for info in index.storage_data.values():
        info.length = 10**9
    return index


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_code, r"names (posix|nt)\.system, which no index needs"),
        (with_object, r"'model/bias' is a pickled object \(BYTE_IO\), which is not read"),
        (with_path("../secret"), r"the path '\.\./secret' is no file of this checkpoint"),
        (with_path("/etc/passwd"), "the path '/etc/passwd' is no file"),
        (with_path("other.distcp"), "the path 'other.distcp' is no file"),
        (with_place, "a box lies outside __0_0.distcp"),
        (lambda _: {"a": 1}, "is no index of a checkpoint"),
    ],
)
def test_malice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, sentence: str
) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    write_alone(tmp_path / "c")
    tampered(tmp_path / "c", change)
    with pytest.raises(CheckpointError, match=sentence):
        read_alone(tmp_path / "c")
    assert not (tmp_path / "canary").exists()


def test_a_pickled_object_in_place_of_a_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    write_alone(tmp_path / "c")
    data = tmp_path / "c" / "__0_0.distcp"
    code = pickle.dumps(Canary())
    data.write_bytes(code + data.read_bytes()[len(code) :])
    remanifest(tmp_path / "c")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_alone(tmp_path / "c")
    assert not (tmp_path / "canary").exists()


# Overwriting, failing, being killed


@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwriting_keeps_the_previous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(manifest, "exchange", lambda a, b: False)
    for step in (1, 2, 3):
        write_alone(tmp_path / "last", step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "last.previous"]
    assert correct(read_alone(tmp_path / "last")[0], 3)
    assert correct(read_alone(tmp_path / "last.previous")[0], 2)
    assert newest(tmp_path) == tmp_path / "last"


def test_the_newest_is_what_was_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run was resumed on a host whose clock is slow."""
    write_alone(tmp_path / "epoch-1")
    monkeypatch.setattr(manifest.time, "time", lambda: 1e6)
    write_alone(tmp_path / "epoch-2")
    assert newest(tmp_path) == tmp_path / "epoch-2"


def test_what_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="no checkpoint lies there and is not overwritten"):
        write_alone(tmp_path / "last")
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def failing(path: str) -> tuple[str, bool]:
    """The second save fails on rank 1; the first stays, the group goes on."""
    world = World.open(device="cpu")
    tensors = local_tensors(Layout(1, 2), shard(0), world.rank, True)
    save(path, tensors, None, world)
    original = stored_boxes.BoxWriter.resolve_data

    def full(self: Any, item: Any) -> Any:
        if world.rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, item)

    stored_boxes.BoxWriter.resolve_data = full  # type: ignore[method-assign]
    try:
        save(path, tensors, None, world)
        raised = ""
    except CheckpointError as error:
        raised = str(error)
    again = local_tensors(Layout(1, 2), shard(0), world.rank, False)
    load(path, again, world)
    return raised, correct(again)


def test_a_failure_on_one_rank_is_one_error_on_all(tmp_path: Path) -> None:
    answers = run(2, failing, str(tmp_path / "last"))
    assert answers[0] == answers[1]
    raised, intact = answers[0]
    assert intact and "free on that disk): No space left on device (rank 1)" in raised
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_a_fault_found_by_one_rank_is_one_error_on_all(tmp_path: Path) -> None:
    run(3, saving, str(tmp_path / "c"), Layout(1, 3), shard(1))
    flip(tmp_path / "c" / "__2_0.distcp")
    raised = run(3, refused, str(tmp_path / "c"))
    assert len(set(raised)) == 1 and "__2_0.distcp is damaged" in raised[0]


def refused(path: str) -> str:
    world = World.open(device="cpu")
    with pytest.raises(CheckpointError) as raised:
        load(path, local_tensors(Layout(1, 3), shard(1), world.rank, False), world)
    return str(raised.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB; needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def large(value: float, numbers: int) -> dict[str, LocalTensor]:
    tensor = torch.full((numbers,), value)
    return {"model/w": LocalTensor("model/w", (numbers,), (((0, numbers),),), tensor)}


def test_a_full_disk_leaves_the_previous(small_disk: Path) -> None:
    save(small_disk / "last", large(1.0, 300_000), None, alone())
    told = r"last: cannot be written \([01]\.\d MB free .*: a rank has 1\.2 MB to write"
    with pytest.raises(CheckpointError, match=told):
        save(small_disk / "last", large(2.0, 300_000), None, alone())
    assert [p.name for p in small_disk.iterdir()] == ["last"]
    again = large(0.0, 300_000)
    load(small_disk / "last", again, alone())
    assert again["model/w"].tensor[0] == 1.0


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(
    tmp_path: Path, small_disk: Path
) -> None:
    manifest.check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written there: Not a dir"):
        manifest.check_writable(tmp_path / "file" / "folder")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        manifest.check_writable(small_disk)
    with pytest.raises(CheckpointError, match="last: cannot be written: Read-only file system"):
        write_alone(small_disk / "last")


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    write_alone(tmp_path / "run" / "last")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("now a file")
    with pytest.raises(CheckpointError, match=r"cannot be written: (File exists|Not a directory)"):
        write_alone(tmp_path / "run" / "last")


def saves_for_ever(path: str) -> None:
    torch.set_num_threads(1)
    step = 1
    while True:
        step += 1
        write_alone(Path(path), step, step)


@pytest.mark.parametrize("kills", [10])
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments of repeated saves: `last` always loads, whole and of one step."""
    context = multiprocessing.get_context("fork")
    chance = random.Random(1)
    path = tmp_path / "last"
    write_alone(path, 1, 1)
    steps = []
    for _ in range(kills):
        process = context.Process(target=saves_for_ever, args=(str(path),))
        process.start()
        time.sleep(0.08 + chance.random() * 0.12)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        tensors, step = read_alone(path)
        assert correct(tensors, step), "all of one step"
        assert verify(path) and newest(tmp_path) == path
        steps.append(step)
    assert max(steps) > 1, "some saves were completed"
    write_alone(path, 5, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "last.previous"], "no litter"


def not_shared(path: str) -> str:
    """Each rank writes to a folder of its own, as on hosts without a common file system."""
    world = World.open(device="cpu")
    if world.rank:
        checkpoint._require_shared.__defaults__ = (0.2,)
        shared, exists = Path(path), Path.is_dir
        Path.is_dir = lambda p: exists(p) and shared.name not in p.name  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as raised:
        save(path, local_tensors(Layout(1, 2), shard(0), world.rank, True), None, world)
    return str(raised.value)


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    raised = run(2, not_shared, str(tmp_path / "last"))
    assert raised[0] == raised[1] and "rank 1 does not see what rank 0 writes there" in raised[0]
    assert list(tmp_path.iterdir()) == []


def test_names_do_not_steer_the_terminal() -> None:
    assert str(CheckpointError("a\x1b[31m\nb\u202e ä")) == "a\\x1b[31m\\nb\\u202e ä"


def test_the_manifest_is_readable_json(tmp_path: Path) -> None:
    write_alone(tmp_path / "c")
    value = json.loads((tmp_path / "c" / "MANIFEST.json").read_text())
    assert value["format"] == "synchromesh checkpoint 1"
    assert abs(value["created"] - time.time()) < 60 and sys.maxsize
