"""The language models on PTB: their sizes, their state, their text."""

import pytest
import torch

from synchromesh.workloads.target import load
from tests.real_data import data
from tests.recurrent import loss as plain_loss


def test_sizes_state_and_metric() -> None:
    job = load("ptb/lstm_small", synthetic=True)
    model, batch = job.build(), job.example(5)
    assert job.carry is not None and job.metric is not None
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    assert sum(sizes.values()) == 997_632
    assert sizes["softmax.weight"] == sizes["embedding.weight"] == 480_000 == max(sizes.values())
    value, state = job.loss(model, batch, job.carry(5))
    again, _ = job.loss(model, batch, state)
    assert not torch.equal(value, again)  # it goes on
    assert torch.equal(value, plain_loss(model, batch, job.carry(5))[0])
    found, _ = job.metric(model, batch, job.carry(5))
    assert list(found) == ["accuracy", "loss"]
    torch.testing.assert_close(found["loss"] / 5, value)
    with torch.device("meta"):
        large = load("ptb/lstm", synthetic=True).build()
    assert sum(p.numel() for p in large.parameters()) == 19_770_400


def test_text_of_the_treebank() -> None:
    job = load("ptb/lstm_small", data("ptb"))
    assert (len(job.train_data), len(job.valid_data)) == (46_479, 3_687)  # type: ignore[arg-type]
    named = r"ptb/lstm_small reads its data from a folder: name one that holds ptb\.train\.txt, "
    with pytest.raises(ValueError, match=named + r".* with --data DIR"):
        load("ptb/lstm_small")
