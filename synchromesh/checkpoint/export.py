"""An export: the complete model in one safetensors file, under its own names and shapes; and back.

Tensors travel to rank 0 one at a time and are written as they come, so that no rank has more than
one complete tensor besides its own shards. A tensor that the model uses under several names is
stored once; the other names stand in the file's metadata (key `tied`, JSON: other name -> stored
name). In the other direction each rank reads its own boxes and nothing else.

The format (https://github.com/huggingface/safetensors): 8 bytes with the header's length, the
header as JSON, the bytes of the tensors one after the other."""

import json
import os
import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.manifest import CheckpointError, sync
from synchromesh.checkpoint.switch import redistribute
from synchromesh.engine.movable import bytes_of
from synchromesh.values import document
from synchromesh.values.boxes import Box, full_box

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def save_safetensors(
    path: str | Path, tensors: Mapping[str, LocalTensor], world: Any,
    aliases: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Writes `tensors`, each complete, to the file `path`. Collective; all or nothing. aliases:
    other names -> names in `tensors`. CheckpointError on all ranks if it cannot be."""
    path, group = Path(path), world.everyone
    ordered = sorted(tensors.values(), key=lambda h: (-h.dtype.itemsize, h.name))  # aligned
    odd = [f"{h.name} ({h.dtype})" for h in ordered if h.dtype not in DTYPES]
    if odd:
        raise CheckpointError(f"{path}: safetensors has no such type: {', '.join(odd)}")
    fresh = path.with_name(f".{path.name}.new-{uuid.uuid4().hex[:8]}")
    file: IO[bytes] | None = None
    faults: list[str] = []  # the others go on sending: they learn of it at the end

    def on_first(do: Callable[[IO[bytes]], object]) -> None:
        with _noted(faults):
            if file is not None and not faults:
                do(file)

    try:
        with _noted(faults):
            if group.index == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = fresh.open("wb")
                file.write(_header(ordered, aliases or {}))
        for local in ordered:
            tensor = _gathered(local, group)
            on_first(lambda file, tensor=tensor: file.write(bytes_of(tensor)))  # type: ignore[misc]
        on_first(lambda file: _put_in_place(file, fresh, path))
        if fault := group.broadcast_json("".join(faults)):
            raise CheckpointError(f"{path}: cannot be written: {fault}")
    finally:
        if file is not None:
            file.close()
            fresh.unlink(missing_ok=True)


def _put_in_place(file: IO[bytes], fresh: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    fresh.rename(path)
    sync(path.absolute().parent)


@contextmanager
def _noted(faults: list[str]) -> Iterator[None]:
    """What the system refuses inside is added to `faults`."""
    try:
        yield
    except OSError as error:
        faults.append(error.strerror or str(error))


def _header(ordered: Sequence[LocalTensor], aliases: Mapping[str, str]) -> bytes:
    """Names, dtypes, shapes and places of the tensors, padded to a multiple of 8 bytes."""
    tied = {other: name for other, name in sorted(aliases.items()) if other != name}
    metadata = {"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {})
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for local in ordered:
        start, end = end, end + local.dtype.itemsize * prod(local.shape)
        entry = {"dtype": DTYPES[local.dtype], "shape": list(local.shape)}
        header[local.name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _gathered(tensor: LocalTensor, group: Any) -> Tensor:
    """The complete tensor on rank 0; elsewhere the shards are only sent."""
    everyone = group.all_gather_json(tensor.boxes)
    have = [[tuple((a, b) for a, b in box) for box in boxes] for boxes in everyone]
    want: list[list[Box]] = [[full_box(tensor.shape)], *([] for _ in range(group.size - 1))]
    return redistribute(tensor.tensor.detach(), have, want, tensor.shape, group)


def load_safetensors(
    path: str | Path, wanted: Mapping[str, LocalTensor], aliases: Mapping[str, str] | None = None,
    cast: bool = False,
) -> None:  # fmt: skip
    """Fills the local tensors of `wanted`, this rank's boxes only. Not collective. path: a file, a
    folder with `model.safetensors` or with `model.safetensors.index.json`, or that index. aliases:
    other names -> names in `wanted`; a stored alias stands for its tensor. cast: whether other
    floating-point types are converted. CheckpointError with all faults, before anything is
    filled."""
    path = Path(path)
    sources = _sources(path)
    stored = dict(sources)
    for other, name in {**_tied(sources), **(aliases or {})}.items():
        if other in sources:
            stored.setdefault(name, sources[other])
        if name in sources:
            stored.setdefault(other, sources[name])
    faults, where = _plan(stored, wanted, cast, aliases or {})
    if faults:
        raise CheckpointError(f"{path}: does not fit: {'; '.join(faults)}")
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safe_open(file, framework="pt"))
            for file in {source[0] for _, source in where}
        }
        for target, (file, key, _, _) in where:
            for box in target.boxes:
                target.view(box).copy_(_read(opened[file], key, box))


Source = tuple[Path, str, tuple[int, ...], str]  # file, key in it, shape, dtype


def _sources(path: Path) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 -- no mapping
                    entry = opened.get_slice(key)
                    sources[key] = (file, key, tuple(entry.get_shape()), entry.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: is no readable safetensors file: {error}") from None
    return sources


def _tied(sources: Mapping[str, Source]) -> dict[str, str]:
    """The aliases that the files state themselves."""
    tied: dict[str, str] = {}
    for file in {source[0] for source in sources.values()}:
        with safe_open(file, framework="pt") as opened:
            text = (opened.metadata() or {}).get("tied")
        if text:
            value = document.read_json(text, f"{file}: tied")
            names = document.mapping(value, f"{file}: tied", value)
            tied |= {other: document.text(n, f"{file}: tied") for other, n in names.items()}
    return tied


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = [path / "model.safetensors", path / "model.safetensors.index.json"]
        path = next((p for p in inside if p.is_file()), inside[0])
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    return _indexed(path) if path.suffix == ".json" else [path]


def _indexed(path: Path) -> list[Path]:
    value = document.read(path)
    if not isinstance(value, dict) or "weight_map" not in value:
        raise CheckpointError(f"{path}: weight_map is missing: is this an index of safetensors?")
    names = document.mapping(value["weight_map"], f"{path}: weight_map", value["weight_map"])
    files = {document.text(name, f"{path}: weight_map") for name in names.values()}
    for name in files:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path}: {name[:80]!r} is no plain file name")
    return [path.parent / name for name in sorted(files)]


def _plan(
    stored: Mapping[str, Source], wanted: Mapping[str, LocalTensor], cast: bool,
    aliases: Collection[str],
) -> tuple[list[str], list[tuple[LocalTensor, Source]]]:  # fmt: skip
    """Where each wanted tensor is stored, and everything that does not fit."""
    faults: list[str] = []
    where, used = [], set()
    for name, local in wanted.items():
        source = stored.get(name)
        if source is not None:
            used.add(source[:2])
            faults += _misfits(local, source, cast)
            where.append((local, source))
        else:
            faults.append(f"{name} is missing")
    for name, source in stored.items():
        if source[:2] not in used and name not in aliases:
            faults.append(f"{name} is unexpected")
    return faults, where


def _misfits(local: LocalTensor, source: Source, cast: bool) -> Iterator[str]:
    """In what a stored tensor is not the one that is wanted."""
    _, _, shape, stored_type = source
    if shape != tuple(local.shape):
        yield f"{local.name} has shape {shape} there, {tuple(local.shape)} here"
    dtype = {name: dtype for dtype, name in DTYPES.items()}.get(stored_type)
    castable = cast and dtype is not None and _alike(dtype, local.dtype)
    if dtype != local.dtype and not castable:
        yield f"{local.name} is {dtype or stored_type} there, {local.dtype} here"


def _alike(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether two types differ in precision alone: both floating, both complex, or neither."""
    return (a.is_floating_point, a.is_complex) == (b.is_floating_point, b.is_complex)


def _read(opened: Any, key: str, box: Box) -> Tensor:
    part = tuple(slice(a, b) for a, b in box)
    tensor: Tensor = opened.get_slice(key)[part] if box else opened.get_tensor(key)
    return tensor
