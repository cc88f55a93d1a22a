"""Tests of COCO's files: masks as pictures, folder and tar alike, damaged records named."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from synchromesh.workloads import coco_files
from synchromesh.workloads.coco_files import CLASSES, AnnotatedImage, Instance
from synchromesh.workloads.training import IGNORED

PERSON, VEHICLE, ANIMAL = (CLASSES.index(name) for name in ("person", "vehicle", "animal"))
SQUARE = [[1, 1, 5, 1, 5, 5, 1, 5]]


def instance(label: int, segmentation: Any, area: float = 1, crowd: bool = False) -> Instance:
    return Instance(label, segmentation, area, crowd, "f.json: annotations[7]")


def image(*instances: Instance) -> AnnotatedImage:
    return AnnotatedImage("val2017/1.jpg", 6, 8, instances)


def picture(found: AnnotatedImage) -> list[str]:
    names = {0: ".", PERSON: "p", VEHICLE: "v", IGNORED.pixel: "#"}
    return ["".join(names[x] for x in row) for row in found.mask().tolist()]


def document(**changes: Any) -> dict[str, Any]:
    entry = {"id": 5, "image_id": 1, "category_id": 18, "segmentation": SQUARE, "area": 16,
             "iscrowd": 0, "bbox": [1, 1, 4, 4]}  # fmt: skip
    return {
        "images": [{"id": 2, "file_name": "2.jpg", "height": 6, "width": 8},
                   {"id": 1, "file_name": "1.jpg", "height": 6, "width": 8}],
        "categories": [{"id": 18, "name": "dog", "supercategory": "animal"}],
        "annotations": [entry],
    } | changes  # fmt: skip


def folder(path: Path, content: dict[str, Any] | bytes, split: str = "val2017") -> Path:
    (path / "annotations").mkdir(parents=True, exist_ok=True)
    (path / split).mkdir(exist_ok=True)
    for name in ("1.jpg", "2.jpg"):
        (path / split / name).write_bytes(b"image " + name.encode())
    whole = content if isinstance(content, bytes) else json.dumps(content).encode()
    (path / coco_files.annotations(split)).write_bytes(whole)
    return path


def test_small_objects_are_in_front_and_crowds_behind() -> None:
    large = instance(VEHICLE, [[0, 0, 6, 0, 6, 6, 0, 6]], area=36)
    small = instance(PERSON, [[1, 1, 4, 1, 4, 3, 1, 3], [4, 4, 7, 4, 7, 6, 4, 6]], area=12)
    counts = [24, 24]  # column by column: the right half
    crowd = instance(PERSON, {"size": [6, 8], "counts": counts}, area=24, crowd=True)
    expected = [
        "vvvvvv##",
        "vpppvv##",
        "vpppvv##",
        "vvvvvv##",
        "vvvvppp#",
        "vvvvppp#",
    ]
    assert picture(image(small, large, crowd)) == expected
    assert picture(image(crowd, large, small)) == expected
    assert picture(image()) == ["." * 8] * 6


def test_malformed_segmentations_name_their_record() -> None:
    for segmentation, message in {
        "short": ([[1, 1, 5, 5]], "a polygon that is not a list of at least three pairs"),
        "odd": ([[1, 1, 5, 1, 5, 5, 1]], "a polygon that is not a list of at least three pairs"),
        "text": ([[1, 1, 5, 1, 5, "x"]], "a polygon whose coordinates are not numbers"),
        "nan": ([[1, 1, 5, 1, 5, float("nan")]], "a polygon whose coordinates are not numbers"),
        "far": ([[1, 1, 5, 1, 5, 1e9]], "a polygon that reaches 1e.09, far outside of its image"),
        "size": ({"size": [8, 6], "counts": [48]}, r"of size \[8, 6\], not \[6, 8\]"),
        "sum": ({"size": [6, 8], "counts": [40]}, "run lengths that do not add up to 48 pixels"),
        "counts": ({"size": [6, 8]}, "a run-length encoding without counts"),
    }.values():
        with pytest.raises(ValueError, match=message) as error:
            image(instance(PERSON, segmentation)).mask()
        assert str(error.value).startswith("f.json: annotations[7] has ")


def test_folder_and_tar_hold_the_same(tmp_path: Path) -> None:
    plain = coco_files.find(folder(tmp_path / "plain", document()))
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed/coco.tar", "w") as tar:
        for name in ("annotations", "val2017"):
            tar.add(tmp_path / "plain" / name, f"./{name}")
    for place in (tmp_path / "packed", tmp_path / "packed/coco.tar"):
        packed = coco_files.find(place)
        assert [(i.name, i.mask().tolist()) for i in coco_files.read(packed, "val2017")] == [
            (i.name, i.mask().tolist()) for i in coco_files.read(plain, "val2017")
        ]
        assert packed.content("val2017/2.jpg") == plain.content("val2017/2.jpg") == b"image 2.jpg"
    first, second = coco_files.read(plain, "val2017")
    assert (first.name, second.name) == ("val2017/1.jpg", "val2017/2.jpg")
    assert set(first.mask().flatten().tolist()) == {0, ANIMAL} and not second.instances


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    expected = r"annotations/instances_val2017\.json and val2017/\*\.jpg"
    with pytest.raises(ValueError, match=f"none is not there: name a folder .* {expected}"):
        coco_files.find(tmp_path / "none")
    with pytest.raises(ValueError, match=f"holds no COCO data: name a folder .* {expected}"):
        coco_files.find(tmp_path)
    (tmp_path / "cut.tar").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"cut\.tar is not a whole tar file"):
        coco_files.find(tmp_path)
    source = coco_files.find(folder(tmp_path / "a", document()))
    with pytest.raises(ValueError, match=r"a has no file annotations/instances_train2017\.json"):
        coco_files.read(source, "train2017")


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != key}


def test_malformed_records_are_named(tmp_path: Path) -> None:
    good = document()
    entry, picture, category = good["annotations"][0], good["images"][0], good["categories"][0]
    for changes, message in [
        ({"images": 3}, "has no list of images: it is not a file of COCO's instances"),
        ({"images": []}, r"annotations\[0\] is of an image 1, which the file does not list"),
        ({"annotations": [entry, 3]}, r"annotations\[1\] is not a record"),
        ({"annotations": [without(entry, "segmentation")]}, r"\[0\] has no segmentation \(poly"),
        ({"annotations": [entry | {"segmentation": []}]}, r"\[0\] has no segmentation \(poly"),
        ({"annotations": [without(entry, "image_id")]}, r"\[0\] has no whole number 'image_id'"),
        ({"annotations": [entry | {"category_id": 91}]}, r"\[0\] has a category 91, which the f"),
        ({"annotations": [without(entry, "area")]}, r"annotations\[0\] has no area"),
        ({"categories": [category | {"supercategory": "x"}]}, r"\[0\] has a supercategory 'x', w"),
        ({"images": [picture, picture | {"id": 1, "file_name": "9.jpg"}]},
         r"images\[1\] names an image that is missing, .*val2017/9\.jpg"),
        ({"images": [picture, picture | {"id": 1, "height": 0}]}, r"images\[1\] has no file_name"),
    ]:  # fmt: skip
        source = coco_files.find(folder(tmp_path, document(**changes)))
        with pytest.raises(ValueError, match=message) as error:
            coco_files.read(source, "val2017")
        assert "annotations/instances_val2017.json" in str(error.value)
    for content in (b'{"images": [', b"\xff", b"[" * 10**6):
        source = coco_files.find(folder(tmp_path, content))
        with pytest.raises(ValueError, match="is not whole JSON"):
            coco_files.read(source, "val2017")
