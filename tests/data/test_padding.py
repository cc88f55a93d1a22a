"""Rows of different lengths: one length on all ranks, few in an epoch, the loss of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import synchromesh as sm
from synchromesh.data.padding import Padding
from tests.ranks import run
from tests.traces import known

WORDS = 40


def alone(lengths: list[int]) -> list[list[int]]:
    return [lengths]


@pytest.mark.parametrize(
    ("length", "padding", "to"),
    [
        (3, Padding({"0": 7}), 16),
        (16, Padding({"0": 7}), 16),
        (17, Padding({"0": 7}), 24),
        (25, Padding({"0": 7}), 32),
        (33, Padding({"0": 7}, most=40), 40),
        (49, Padding({"0": 7}), 64),
        (50, Padding({"0": 7}, most=48), 50),
        (9, Padding({"0": 7}, (8, 12, 20)), 12),
    ],
)
def test_a_length_is_rounded_up(length: int, padding: Padding, to: int) -> None:
    x, y = torch.arange(2 * length).view(2, length), torch.tensor([0, 1])
    (padded, kept) = padding.padded((x, y), alone)
    assert padded.shape == (2, to) and torch.equal(padded[:, :length], x) and kept is y
    assert (padded[:, length:] == 7).all() and padded.dtype == x.dtype


def test_in_front_of_dims_behind_and_by_path() -> None:
    batch = {"a": {"ids": torch.ones(2, 3, 5)}, "ids": torch.ones(2, 3), "n": 4}
    padding = Padding({"a.ids": -1.5}, (4,), left=True, named=("a.ids",))
    made = padding.padded(batch, alone)
    assert made["a"]["ids"].shape == (2, 4, 5) and (made["a"]["ids"][:, 0] == -1.5).all()
    assert made["ids"] is batch["ids"] and made["n"] == 4
    with pytest.raises(ValueError, match=r"a row of 3 is longer than the lengths .* \(2\)"):
        Padding({"ids": 0}, (2,)).padded(batch, alone)
    with pytest.raises(ValueError, match="that grow"):
        Padding({"ids": 0}, (8, 4))


def test_a_name_that_a_batch_has_not_is_told() -> None:
    padding = Padding.of(None, {0: 7})
    assert padding is not None and padding.padded((torch.ones(2, 3),), alone)[0].shape == (2, 16)
    with pytest.raises(ValueError, match=r"'0': .* no such tensor, but ids, mask"):
        padding.padded({"ids": torch.ones(2, 3), "mask": torch.ones(2, 3)}, alone)
    for pad, lengths in ((0, ()), (None, 16), ({"ids": 0}, "16")):
        with pytest.raises(ValueError, match="should be like"):
            Padding.of(None, pad, lengths)


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=48
    )


def sentences(count: int) -> list[dict[str, Any]]:
    """Of 3 to 40 words, the longest not always on the first rank."""
    tokens, made = tokenizer(), torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        length = int(torch.randint(3, 41, (), generator=made))
        text = " ".join(f"w{int(w)}" for w in torch.randint(2, WORDS, (length,), generator=made))
        samples.append({**tokens(text), "label": i % 2})
    return samples


def test_what_a_collator_of_transformers_fills_with() -> None:
    from transformers import (
        DataCollatorForMultipleChoice,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
    )

    tokens = tokenizer()
    padding = Padding.of(DataCollatorWithPadding(tokens), most=40)
    assert padding is not None and padding.most == 40 and not padding.left
    assert padding.values["input_ids"] == 0 and "labels" not in padding.values, "of several labels"
    rows = {"input_ids": torch.ones(2, 3), "labels": torch.ones(2, 5)}
    made = padding.padded(rows, alone)
    assert made["input_ids"].shape == (2, 16) and made["labels"] is rows["labels"]
    deep = {"input_ids": torch.ones(2, 4, 3)}
    assert padding.padded(deep, alone)["input_ids"] is deep["input_ids"], "choices are no length"
    assert Padding.of(DataCollatorForMultipleChoice(tokens)) is None
    tokens.padding_side = "left"
    both = Padding.of(DataCollatorWithPadding(tokens), {"positions": 1})
    assert both is not None and both.left and both.values["positions"] == 1
    assert both.values["attention_mask"] == 0
    labels = DataCollatorForTokenClassification(tokens, label_pad_token_id=-7)
    assert Padding.of(labels).values["labels"] == -7  # type: ignore[union-attr]
    assert Padding.of(DataCollatorWithPadding(tokens, padding="max_length", max_length=8)) is None
    assert Padding.of(torch.stack) is None


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    small = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=48, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(small).double().train()
    return model


def loss(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(**batch).loss
    return out


def batches() -> DataLoader[Any]:
    from transformers import DataCollatorWithPadding

    return DataLoader(sentences(26), 6, collate_fn=DataCollatorWithPadding(tokenizer()))  # type: ignore[arg-type]


def trained(plan: str) -> tuple[list[float], int]:
    model, data = bert(), batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = sm.prepare(model, optimizer, loss, next(iter(data)), plan)
    losses = [float(trainer.step(batch)) for _ in range(2) for batch in trainer.loader(data)]
    traces = len(trainer._execution.traces._steps)
    trainer.close()
    return losses, traces


def plain() -> list[float]:
    model, losses = bert(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (batch for _ in range(2) for batch in batches()):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_a_transformer_trains_on_dynamic_padding_as_a_plain_loop() -> None:
    """The traces of all lengths are made once, on one rank."""
    want, staged = plain(), "pipeline:stages=2"
    with known("bert"):
        found = [trained("single")]
        for plans in (["data", "tensor"], [staged]):
            for of_rank in run(2, lambda plans=plans: [trained(p) for p in plans]):
                found += of_rank
    assert len(found) == 7
    for losses, traces in found:
        assert losses == pytest.approx(want, rel=1e-10)
        assert traces <= 3


def test_lengths_without_what_fills_them_are_refused() -> None:
    def said() -> str:
        model = nn.Linear(2, 1)
        trainer = sm.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x[0]).mean(),
            (torch.ones(4, 2),), "single",
        )  # fmt: skip
        with pytest.raises(ValueError, match="give pad=") as refused:
            trainer.loader([torch.ones(2)] * 4, 2, lengths=(8, 16))
        return str(refused.value)

    assert run(1, said)
