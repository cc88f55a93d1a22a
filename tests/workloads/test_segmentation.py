"""Tests of segmentation: its loss over any division of the rows, its metric by hand."""

import pytest
import torch
from torch import nn

from synchromesh.workloads.segmentation import loss, metric
from synchromesh.workloads.training import IGNORED


def test_the_loss_is_the_same_however_rows_are_divided() -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 4, 5, 5, dtype=torch.float64)
    labels = torch.randint(4, (6, 5, 5))
    labels[torch.rand(6, 5, 5) < torch.linspace(0, 1, 6).view(-1, 1, 1)] = IGNORED.pixel
    model = nn.Identity()
    total, weight = loss(model, (scores, labels))
    parts = [loss(model, (scores[a:b], labels[a:b])) for a, b in ((0, 1), (1, 4), (4, 6))]
    assert float(sum(w for _, w in parts)) == float(weight)
    assert float(sum(s for s, _ in parts)) == pytest.approx(float(total), rel=1e-14)
    mean = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORED.pixel)
    assert float(total / weight) == pytest.approx(float(mean), rel=1e-14)
    assert float(loss(model, (scores[5:], labels[5:]))[0]) == 0  # all is ignored


def test_metric_by_hand() -> None:
    """Over pixels that are counted:

    labels     predicted     both / either   class 0: 2 / 5   class 1: 1 / 3   class 2: 0 / 1
    0 0 0 -    0 0 1 2                       class 3 is in neither
    1 1 - 2    1 0 0 0       right: 3 of 6
    """
    labels = torch.tensor([[[0, 0, 0, IGNORED.pixel], [1, 1, IGNORED.pixel, 2]]])
    predicted = torch.tensor([[[0, 0, 1, 2], [1, 0, 0, 0]]])
    scores = nn.functional.one_hot(predicted, 4).movedim(-1, 1).float()
    found = metric(nn.Identity(), (scores, labels))
    assert float(found["mean_iou"]) == pytest.approx((2 / 5 + 1 / 3 + 0) / 3)
    assert float(found["pixel_accuracy"]) == pytest.approx(3 / 6)
    two = metric(nn.Identity(), (scores.repeat(2, 1, 1, 1), labels.repeat(2, 1, 1)))
    assert {n: float(x) for n, x in two.items()} == pytest.approx(
        {n: 2 * float(x) for n, x in found.items()}
    )
    assert next(iter(found)) == "mean_iou"
