"""Tests of images: their format, the views that are drawn of them, loss and metric."""

import pytest
import torch
from torch import nn

from synchromesh.workloads.images import ImageFormat, Images, View, metric


def test_metric_counts_right_rows() -> None:
    model = nn.Identity()
    scores = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert float(metric(model, (scores, torch.tensor([0, 1, 1])))["accuracy"]) == 2


def test_images_are_padded_or_resized() -> None:
    pixels = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.int64)
    padded, _ = Images(pixels, labels, ImageFormat((0.5,), (0.5,), 6))[0]
    assert padded.shape == (1, 6, 6) and padded.sum() == 16  # (1 - 0.5) / 0.5 inside, 0 around
    resized, _ = Images(pixels, labels, ImageFormat((0.5,), (0.5,), 20))[0]
    assert resized.shape == (1, 20, 20) and torch.allclose(resized, torch.ones(1, 20, 20))


def test_views_are_drawn_of_training_images_alone() -> None:
    pixels = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4)
    labels, form = torch.zeros(1, dtype=torch.int64), ImageFormat((0.0,), (1.0,), 4)
    plain, augmented = Images(pixels, labels, form), Images(pixels, labels, form, padding=2)
    torch.manual_seed(0)
    assert all(torch.equal(plain[0][0], plain[0][0]) for _ in range(5))
    seen = [augmented[0][0] for _ in range(20)]
    assert len({tuple(x.flatten().tolist()) for x in seen}) > 10
    torch.manual_seed(0)
    assert all(torch.equal(augmented[0][0], x) for x in seen)


# Views: crops of the padded image and their mirrors, alike for image and labels

IMAGE = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("view", "picture"),
    [
        (View(1, 1, 1, mirrored=False), "123 456 789"),
        (View(1, 0, 0, mirrored=False), "000 012 045"),
        (View(1, 2, 1, mirrored=False), "456 789 000"),
        (View(1, 2, 1, mirrored=True), "654 987 000"),
        (View(1, 1, 2, mirrored=True), "032 065 098"),
    ],
)
def test_views_as_pictures(view: View, picture: str) -> None:
    seen = view.of(IMAGE)
    assert " ".join("".join(map(str, row)) for row in seen.tolist()) == picture
    assert torch.equal(view.of(IMAGE[None])[0], seen)


def test_all_views_are_drawn() -> None:
    torch.manual_seed(0)
    drawn = [View.drawn(1) for _ in range(600)]
    assert len(set(drawn)) == 3 * 3 * 2
    assert set(View.drawn(0).of(IMAGE)[0].tolist()) == {1, 2, 3}
    torch.manual_seed(0)
    assert [View.drawn(1) for _ in range(600)] == drawn


def test_what_is_outside_is_filled() -> None:
    seen = View(2, 0, 0, mirrored=False).of(IMAGE, fill=255)
    assert seen.tolist() == [[255] * 3, [255] * 3, [255, 255, 1]]
