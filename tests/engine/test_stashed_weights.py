"""Stashed weights: which version a forward gets, what its memory is, and when it is used again."""

import torch
from torch import nn

from synchromesh.engine.stashed_weights import StashedWeights


def test_backwards_go_by_the_weights_of_their_forward() -> None:
    """loss = w^2 / 2, two updates behind, rate 0.5: w(u + 1) = w(u) - 0.5 w(u - 2)."""
    w = nn.Parameter(torch.tensor([1.0]))
    sgd, stash = torch.optim.SGD([w], lr=0.5), StashedWeights([w], behind=2)
    expected, losses, memory = [1.0], [], set()
    for update in range(8):
        leaf = stash.leaves(update)[id(w)]
        losses.append((leaf**2).sum() / 2)
        memory.add(leaf.data_ptr())
        if update >= 2:
            losses[update - 2].backward()
            stash.update(update - 2, update - 1, sgd.step)
            expected.append(expected[-1] - 0.5 * expected[max(0, len(expected) - 3)])
            assert w.item() == expected[-1] and w.grad is None
    assert len(memory) == 3 and stash.most_bytes == 2 * w.nbytes
    assert stash.record.ages == {0: 1, 1: 1, 2: 4}


def test_the_last_stage_steps_in_place() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    sgd, stash, place = torch.optim.SGD([w], lr=0.5), StashedWeights([w], 0), w.data_ptr()
    for update in range(3):
        (stash.leaves(update)[id(w)] ** 2).sum().backward()
        stash.update(update, update + 1, sgd.step)
    assert w.item() == 0.0 and w.data_ptr() == place and not stash.most_bytes


def test_a_pipeline_that_is_filled_anew_begins_with_what_is_there() -> None:
    w = nn.Parameter(torch.tensor([1.0]))
    sgd, stash = torch.optim.SGD([w], lr=0.5), StashedWeights([w], 1)
    (stash.leaves(0)[id(w)] ** 2).sum().backward()
    stash.update(0, 1, sgd.step)
    assert stash.made(2) and not stash.made(3)
    stash.restart()
    assert stash.leaves(1)[id(w)].item() == w.item() == 0.0
