"""Parts of a text: each goes on where the one before it ends."""

import pytest
import torch

from synchromesh.workloads.continuing_text import ContinuingText


def test_parts_follow_each_other_and_what_fills_none_is_left_out() -> None:
    text = ContinuingText(torch.arange(12), 4)
    assert [(x.tolist(), y.tolist()) for x, y in text] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]
    assert len(ContinuingText(torch.arange(13), 4)) == 3
    with pytest.raises(ValueError, match="a text of 4 tokens has no part of 4 with one behind"):
        ContinuingText(torch.arange(4), 4)
