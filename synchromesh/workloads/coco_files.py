"""COCO's files: images and instance annotations (https://cocodataset.org/#format-data), in a
folder or in a tar of one.

    annotations/instances_train2017.json   train2017/*.jpg
    annotations/instances_val2017.json     val2017/*.jpg"""

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synchromesh.workloads.training import IGNORED

# COCO's own grouping of its 80 categories, in the order of their ids
SUPERCATEGORIES = (
    "person", "vehicle", "outdoor", "animal", "accessory", "sports", "kitchen", "food",
    "furniture", "electronic", "appliance", "indoor",
)  # fmt: skip
CLASSES = ("background", *SUPERCATEGORIES)
LAYOUTS = (
    "annotations/instances_val2017.json and val2017/*.jpg (and those of train2017 where it is to "
    "train on these), or a .tar of them"
)


@dataclass(frozen=True)
class CocoFiles:
    """A folder, or an uncompressed tar with members: name -> (offset, bytes), to read from."""

    path: Path
    members: Mapping[str, tuple[int, int]] | None = None

    def __contains__(self, name: str) -> bool:
        if self.members is None:
            return (self.path / name).is_file()
        return name in self.members

    def content(self, name: str) -> bytes:
        if self.members is None:
            return (self.path / name).read_bytes()
        offset, size = self.members[name]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def place(self, name: str) -> str:
        return f"{self.path / name}" if self.members is None else f"{name} in {self.path}"


@dataclass(frozen=True)
class Instance:
    """An object in an image: its class, and where it is, as COCO writes it. segmentation: polygons
    [[x, y, x, y, ...], ...], or a run-length encoding {"size": [height, width], "counts": ...}.
    crowd: many objects that were not told apart."""

    label: int
    segmentation: Any
    area: float
    crowd: bool
    place: str


@dataclass(frozen=True)
class AnnotatedImage:
    """An image's file, size in pixels, and the objects in it."""

    name: str
    height: int
    width: int
    instances: tuple[Instance, ...]

    def mask(self) -> NDArray[np.uint8]:
        """The class of every pixel, (height, width): small objects are in front of large ones, and
        all are in front of crowds, which are ignored. ValueError names the record where a
        segmentation is malformed."""
        labels = np.zeros((self.height, self.width), np.uint8)
        for one in sorted(self.instances, key=lambda i: (not i.crowd, -i.area)):
            labels[self._covered(one)] = IGNORED.pixel if one.crowd else one.label
        return labels

    def _covered(self, instance: Instance) -> NDArray[np.bool_]:
        from pycocotools import mask

        segmentation = instance.segmentation  # C code would read it unchecked
        if isinstance(segmentation, dict):
            fault = self._run_length_fault(segmentation.get("size"), segmentation.get("counts"))
        else:
            fault = next(filter(None, map(self._polygon_fault, segmentation)), "")
        if not fault:
            try:
                encoded = mask.frPyObjects(segmentation, self.height, self.width)
                merged = mask.merge(encoded) if isinstance(encoded, list) else encoded
                covered: NDArray[np.bool_] = mask.decode(merged).astype(bool)
                return covered
            except Exception as error:  # the C code behind it raises what it likes
                fault = f"a segmentation that cannot be decoded ({error})"
        raise ValueError(f"{instance.place} has {fault}: fetch the file again")

    def _run_length_fault(self, size: Any, counts: Any) -> str:
        if size != [self.height, self.width]:
            return f"a run-length encoding of size {size}, not {[self.height, self.width]}"
        if isinstance(counts, list):
            whole = all(isinstance(n, int) and n >= 0 for n in counts)
            if not whole or sum(counts) != self.height * self.width:
                return f"run lengths that do not add up to {self.height * self.width} pixels"
            return ""
        return "" if isinstance(counts, str) else "a run-length encoding without counts"

    def _polygon_fault(self, polygon: Any) -> str:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            return "a polygon that is not a list of at least three pairs x, y"
        if not all(isinstance(x, int | float) and isfinite(x) for x in polygon):
            return "a polygon whose coordinates are not numbers"
        if max(map(abs, polygon)) > 2 * max(self.height, self.width):
            return (
                f"a polygon that reaches {max(map(abs, polygon)):g}, far outside of its image "
                f"of {self.width} x {self.height} pixels"
            )
        return ""


def find(folder: Path) -> CocoFiles:
    """The folder, or the tar in it (or that it is), with COCO's files; ValueError without."""
    if folder.is_dir():
        if (folder / "annotations").is_dir():
            return CocoFiles(folder)
        tars = sorted(folder.glob("*.tar"))
    else:
        tars = [folder] if folder.is_file() else []
    for path in tars:
        files = _tar_files(path)
        if any(name.startswith("annotations/") for name in files):
            return CocoFiles(path, files)
    there = "holds no COCO data" if folder.exists() else "is not there"
    raise ValueError(f"{folder} {there}: name a folder that holds {LAYOUTS} with --data DIR")


def _tar_files(path: Path) -> dict[str, tuple[int, int]]:
    """Where each file of a tar begins, and its bytes."""
    try:
        with tarfile.open(path, "r:") as tar:
            return {m.name.removeprefix("./"): (m.offset_data, m.size) for m in tar if m.isfile()}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a whole tar file ({error}): fetch it again") from error


def annotations(split: str) -> str:
    """The name of the file with the instances of a split, as val2017."""
    return f"annotations/instances_{split}.json"


def read(source: CocoFiles, split: str) -> list[AnnotatedImage]:
    """The images of a split, by id, with their instances. ValueError names file and record where
    one is malformed, or an image is missing."""
    document, place = _document(source, split)
    images, objects, categories = (
        _records(document, kind, place) for kind in ("images", "annotations", "categories")
    )
    labels = {c.number("id"): _label(c) for c in categories}
    known = {image.number("id"): image for image in images}
    instances: dict[int, list[Instance]] = {number: [] for number in known}
    for entry in objects:
        image, category = entry.number("image_id"), entry.number("category_id")
        if image not in known:
            raise entry.fault(f"is of an image {image}, which the file does not list")
        if category not in labels:
            raise entry.fault(f"has a category {category}, which the file does not list")
        instances[image].append(_instance(entry, labels[category]))
    if not known:
        raise ValueError(f"{place} lists no images: fetch it again")
    return [_image(source, split, known[n], instances[n]) for n in sorted(known)]


def _document(source: CocoFiles, split: str) -> tuple[Any, str]:
    """What a split's file says, and which file it is, for messages."""
    name = annotations(split)
    place = source.place(name)
    if name not in source:
        raise ValueError(
            f"{source.path} has no file {name}: name a folder that holds {LAYOUTS} with --data DIR"
        )
    try:
        return json.loads(source.content(name)), place
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not whole JSON ({error}): fetch it again") from error


@dataclass(frozen=True)
class _Record:
    fields: Mapping[str, Any]
    place: str

    def fault(self, what: str) -> ValueError:
        return ValueError(f"{self.place} {what}: fetch the file again")

    def number(self, key: str) -> int:
        number = self.fields.get(key)
        if not isinstance(number, int) or isinstance(number, bool):
            raise self.fault(f"has no whole number {key!r}")
        return number


def _records(document: Any, kind: str, place: str) -> list[_Record]:
    entries = document.get(kind) if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{place} has no list of {kind}: it is not a file of COCO's instances")
    records = []
    for index, entry in enumerate(entries):
        record = _Record(entry, f"{place}: {kind}[{index}]")
        if not isinstance(entry, dict):
            raise record.fault("is not a record")
        records.append(record)
    return records


def _label(category: _Record) -> int:
    group = category.fields.get("supercategory")
    if group not in SUPERCATEGORIES:
        raise category.fault(
            f"has a supercategory {group!r}, which is not one of {', '.join(SUPERCATEGORIES)}"
        )
    return CLASSES.index(group)


def _instance(entry: _Record, label: int) -> Instance:
    segmentation = entry.fields.get("segmentation")
    if not isinstance(segmentation, list | dict) or not segmentation:
        raise entry.fault("has no segmentation (polygons, or a run-length encoding)")
    area = entry.fields.get("area")
    if not isinstance(area, int | float) or not isfinite(area):
        raise entry.fault("has no area")
    return Instance(label, segmentation, area, bool(entry.fields.get("iscrowd")), entry.place)


def _image(
    source: CocoFiles, split: str, record: _Record, instances: list[Instance]
) -> AnnotatedImage:
    file = record.fields.get("file_name")
    height, width = record.number("height"), record.number("width")
    if not isinstance(file, str) or min(height, width) < 1:
        raise record.fault("has no file_name, or a height or width below 1")
    name = f"{split}/{file}"
    if name not in source:
        raise record.fault(f"names an image that is missing, {source.place(name)}")
    return AnnotatedImage(name, height, width, tuple(instances))
