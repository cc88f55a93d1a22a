"""Language modelling of tinyshakespeare (Karpathy's char-rnn), byte by byte, with GPT-2 from
`transformers`, random weights; a small form for CPUs.

The 256 bytes are the first tokens that GPT-2's own vocabulary is built from, so nothing has to be
downloaded; the full form keeps the published embedding of 50,257 tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from synchromesh.workloads import data_files
from synchromesh.workloads.text import token_loss, token_metric
from synchromesh.workloads.training import adamw, warm_up
from synchromesh.workloads.workload import Workload

FILE = "input.txt"
HOLDS = f"{FILE} (plain or .gz)"
Batch = tuple[Tensor, Tensor]  # bytes, and the byte after each, both (rows, length)


def _data(
    name: str, length: int, folder: Path | None, synthetic: bool, share: float = 0.9
) -> tuple[TensorDataset, TensorDataset]:
    """Blocks of the text, side by side. share: that is trained on, as in nanoGPT."""
    if synthetic:
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(256, (1024 * length,), generator=generator)
    else:
        text = read(data_files.needed(folder, name, HOLDS))
    first = int(len(text) * share)
    blocks = [_blocks(part, length) for part in (text[:first], text[first:])]
    if not len(blocks[1]):
        least = int((length + 1) / (1 - share)) + 1
        raise ValueError(
            f"{folder}/{FILE} has {len(text)} bytes: {name} needs at least {least}, of which the "
            f"last tenth fills a block of {length}; fetch the file again"
        )
    return blocks[0], blocks[1]


def read(folder: Path) -> Tensor:
    """The bytes of the text in `folder`, int64 (n). ValueError where there is none."""
    _, text = data_files.read_text(folder, FILE, HOLDS)
    return torch.tensor(list(text.encode()))


def _blocks(text: Tensor, length: int) -> TensorDataset:
    count = max(0, (len(text) - 1) // length)
    parts = (text[start : start + count * length].view(-1, length) for start in (0, 1))
    return TensorDataset(*parts)


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the next byte: its sum over all bytes, and their number."""
    return token_loss(model(batch[0]).logits, batch[1])


def metric(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Accuracy and negative log likelihood of the next byte, summed over the rows."""
    return token_metric(model(batch[0]).logits, batch[1])


def _gpt2(length: int, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_positions=length, use_cache=False, **sizes))

    return build


def _workload(
    name: str, length: int, sizes: dict[str, Any], folder: Path | None, synthetic: bool,
    **options: Any,
) -> Workload:  # fmt: skip
    """GPT-2 with these sizes on blocks of `length` bytes; `options` are further fields."""
    train, valid = _data(name, length, folder, synthetic)
    return Workload(
        model=_gpt2(length, **sizes), loss=loss, metric=metric, train_data=train, valid_data=valid,
        name=name, **options,
    )  # fmt: skip


def gpt2(folder: Path | None, synthetic: bool) -> Workload:
    """GPT-2 small (Radford et al. 2019), 124 M parameters, on blocks of 1024 bytes."""
    return _workload(
        "shakespeare/gpt2", 1024, {}, folder, synthetic,
        optimizer=adamw(6e-4, 0.1), scheduler=warm_up(100), batch_size=8, epochs=10,
    )  # fmt: skip


def gpt2_small(folder: Path | None, synthetic: bool) -> Workload:
    """0.4 M parameters: two layers of width 128, on blocks of 64 bytes."""
    sizes = {
        "vocab_size": 256, "n_embd": 128, "n_layer": 2, "n_head": 4, "bos_token_id": None,
        "eos_token_id": None, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    return _workload(
        "shakespeare/gpt2_small", 64, sizes, folder, synthetic,
        optimizer=adamw(1e-3, 0.1), scheduler=warm_up(50), batch_size=32, epochs=3,
    )  # fmt: skip


WORKLOADS = {"shakespeare/gpt2": gpt2, "shakespeare/gpt2_small": gpt2_small}
