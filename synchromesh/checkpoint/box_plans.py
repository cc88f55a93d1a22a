"""Plans of saves and loads in torch's distributed checkpoints: which rank writes which box, and
which stored boxes fill the wanted ones."""

import io
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from synchromesh.checkpoint.index import box_of, boxes_of, described
from synchromesh.checkpoint.local_tensor import LocalTensor, full_box, split
from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.values.placement import Box
from synchromesh.values.transfer import intersection, volume

BOX_BYTES = 32 * 2**20  # larger boxes are stored in parts: a reader has one part at a time


class BoxWriter(SavePlanner):
    """Plans a save: each rank lists its boxes, rank 0 keeps one writer for each."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes the local tensors to save."""
        self.tensors: dict[str, LocalTensor] = state_dict

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes, the large ones in parts."""
        items = []
        for name, local in self.tensors.items():
            properties = TensorProperties.create_from_tensor(local.tensor.detach())
            most = max(1, BOX_BYTES // local.dtype.itemsize)
            for box in (part for outer in local.boxes for part in split(outer, most)):
                data = TensorWriteData(_chunk(box), properties, torch.Size(local.shape))
                index = MetadataIndex(name, torch.Size(a for a, _ in box))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each box goes to the holder that writes least so far; boxes must tile each tensor."""
        holders: dict[tuple[str, Box], list[int]] = {}
        items: dict[tuple[str, Box], WriteItem] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                key = item.index.fqn, box_of(item.tensor_data.chunk)
                holders.setdefault(key, []).append(rank)
                items[key] = item
        load = [0] * len(all_plans)
        chosen: list[list[WriteItem]] = [[] for _ in all_plans]
        stored: dict[str, TensorStorageMetadata] = {}
        # large boxes first, so that small ones even out what each rank writes
        for key in sorted(items, key=lambda k: (-_stored_bytes(items[k]), k)):
            item, rank = items[key], min(holders[key], key=lambda r: load[r])
            load[rank] += _stored_bytes(item)
            assert item.tensor_data is not None
            data = item.tensor_data
            entry = stored.setdefault(
                key[0], TensorStorageMetadata(data.properties, data.size, [])
            )
            # a hint where the chunk stands in the tensor's list
            index = MetadataIndex(item.index.fqn, item.index.offset, len(entry.chunks))
            entry.chunks.append(data.chunk)
            chosen[rank].append(replace(item, index=index))
        for name, entry in stored.items():
            _check_tiling(name, entry)
        index_file = Metadata(dict(sorted(stored.items())))
        return [SavePlan(items) for items in chosen], index_file

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a box."""
        assert write_item.tensor_data is not None
        local = self.tensors[write_item.index.fqn]
        return local.view(box_of(write_item.tensor_data.chunk)).contiguous()


def _check_tiling(name: str, stored: TensorStorageMetadata) -> None:
    """Every element of a tensor is in exactly one stored box."""
    boxes = boxes_of(stored)
    total, wanted = sum(map(volume, boxes)), volume(full_box(stored.size))
    overlap = any(intersection(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a)
    if total != wanted or overlap:
        raise ValueError(f"{name}: boxes of {total} elements do not tile {tuple(stored.size)}")


def _stored_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return volume(box_of(item.tensor_data.chunk)) * item.tensor_data.properties.dtype.itemsize


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box))


class BoxReader(LoadPlanner):
    """Plans a load: the wanted boxes intersected with the stored ones."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes the local tensors to fill and the index of those stored."""
        self.tensors: dict[str, LocalTensor] = state_dict
        known = described(metadata)
        self.stored = {name: boxes_of(known[name]) for name in state_dict}

    def create_local_plan(self) -> LoadPlan:
        """Every part of a stored box that lies in a wanted one."""
        items = []
        for name, local in self.tensors.items():
            for box in local.boxes:
                for number, there in enumerate(self.stored[name]):
                    shared = intersection(box, there)
                    if shared is not None:
                        items.append(_read_item(name, number, box, there, shared))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        raise CheckpointError(f"{read_item.dest_index.fqn}: pickled objects are not read")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the values of a part go."""
        start = read_item.dest_index.offset
        assert start is not None
        box = tuple(
            (a + d, a + d + n)
            for a, d, n in zip(start, read_item.dest_offsets, read_item.lengths, strict=True)
        )
        return self.tensors[read_item.dest_index.fqn].view(box)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: what was resolved is a view of the local tensor."""


def _read_item(name: str, number: int, box: Box, there: Box, shared: Box) -> ReadItem:
    def offsets(outer: Box) -> torch.Size:
        return torch.Size(a - b for (a, _), (b, _) in zip(shared, outer, strict=True))

    return ReadItem(
        LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, torch.Size(a for a, _ in box)),
        dest_offsets=offsets(box),
        storage_index=MetadataIndex(name, torch.Size(a for a, _ in there), number),
        storage_offsets=offsets(there),
        lengths=torch.Size(b - a for a, b in shared),
    )
