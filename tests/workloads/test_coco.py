"""Tests of the COCO workloads: images with their masks, splits, faults, the nets' sizes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from synchromesh.workloads import coco, coco_files
from synchromesh.workloads.coco_files import CLASSES
from synchromesh.workloads.target import load
from synchromesh.workloads.training import IGNORED
from tests.real_data import data

DOG = CLASSES.index("animal")


def write(folder: Path, count: int, split: str = "val2017") -> Path:
    """Black images of 60 x 40 whose left half is white, and a dog."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    (folder / split).mkdir()
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, :30] = 255
    for number in range(count):
        Image.fromarray(pixels).save(folder / split / f"{number}.jpg", quality=95)
    half = [[0, 0, 30, 0, 30, 40, 0, 40]]
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", "height": 40, "width": 60}
                   for n in range(count)],
        "categories": [{"id": 18, "supercategory": "animal"}],
        "annotations": [{"image_id": n, "category_id": 18, "segmentation": half, "area": 1200,
                         "iscrowd": 0} for n in range(count)],
    }  # fmt: skip
    (folder / coco_files.annotations(split)).write_text(json.dumps(content))
    return folder


def test_image_and_mask_are_seen_alike(tmp_path: Path) -> None:
    train, valid = coco.masks(write(tmp_path, 5), size=16)
    image, labels = valid[0]
    assert image.shape == (3, 16, 16) and labels.dtype == torch.int64
    assert torch.equal(labels == DOG, image[0] > 0) and set(labels.flatten().tolist()) == {0, DOG}
    torch.manual_seed(0)
    seen = [train[0] for _ in range(20)]
    black = image[:, 0, -1]  # what is outside of the image, too
    for image, labels in seen:
        outside = labels == IGNORED.pixel
        assert torch.equal((labels == DOG)[~outside], image[0][~outside] > 0)
        assert torch.allclose(image[:, outside], black[:, None], atol=0.02)
    assert len({tuple(labels.flatten().tolist()) for _, labels in seen}) > 5


def test_splits(tmp_path: Path) -> None:
    train, valid = coco.masks(write(tmp_path, 11), size=8)
    assert (len(train), len(valid)) == (8, 3)
    names = {image.name for part in (train, valid) for image in part.images}
    assert len(names) == 11
    train, valid = coco.masks(write(tmp_path, 4, "train2017"), size=8)
    assert (len(train), len(valid)) == (4, 11)


def test_images_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write(tmp_path, 5)
    (tmp_path / "val2017/0.jpg").write_bytes(b"no image")
    Image.new("RGB", (8, 8)).save(tmp_path / "val2017/1.jpg")
    whole = (tmp_path / "val2017/2.jpg").read_bytes()
    (tmp_path / "val2017/2.jpg").write_bytes(whole[: len(whole) // 2])
    train, valid = coco.masks(tmp_path, size=8)
    with pytest.raises(ValueError, match=r"val2017/0\.jpg cannot be read .*: fetch it again"):
        valid[0]
    with pytest.raises(ValueError, match=r"1\.jpg has 8 x 8 pixels where .* say 60 x 40"):
        train[0]
    with pytest.raises(ValueError, match=r"val2017/2\.jpg cannot be read"):
        train[1]
    with pytest.raises(ValueError, match="coco/unet reads its data from a folder"):
        load("coco/unet")


def test_nets_have_their_published_sizes() -> None:
    with torch.device("meta"):
        sizes = [
            sum(p.numel() for p in net.parameters())
            for net in (
                coco.NETS["unet"].model(channels=1, classes=2),
                coco.NETS["segnet"].model(channels=3, classes=12),
                *(load(f"coco/{n}_small", synthetic=True).model() for n in ("unet", "segnet")),
            )
        ]  # fmt: skip
    assert sizes[:2] == pytest.approx([31.0e6, 29.5e6], rel=0.01)
    assert max(sizes[2:]) <= 1e6


@pytest.mark.parametrize("name", ["coco/unet_small", "coco/segnet_small"])
def test_small_nets_train(name: str) -> None:
    found = load(name, data("coco"))
    assert (len(found.train_data), len(found.valid_data)) == (45, 12)
    torch.manual_seed(0)
    model, batch = found.model(), found.example()
    optimizer = found.build_optimizer(model.parameters())
    means = []
    for _ in range(8):
        total, weight = found.loss(model, batch)
        means.append(float(total.detach() / weight))
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert means[-1] < 0.9 * means[0]
    assert set(found.metric(model, batch)) == {"mean_iou", "pixel_accuracy"}
