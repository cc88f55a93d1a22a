"""Tests of views: crops of the padded image and their mirrors, alike for image and labels."""

import pytest
import torch

from synchromesh.workloads.view import View

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
def test_pictures(view: View, picture: str) -> None:
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
