"""The models of the planning benchmarks: small enough for emulated hosts, each with its own habit.

    conv      convolutions with few parameters, linear layers with many     data | tensor
    pooled    those convolutions alone                                     data
    vgg       a VGG-like network: more of both
    resnet18  ResNet-18 on 32x32 images
    vit       ViT-tiny on 32x32 images
    lstm      an LSTM language model with a large softmax at every position
    context   one of three layers that predicts the word after 32 others, of 20,000
    mlp       linear layers alone
    bert      a classifier of token sequences like BERT, of four layers

`make(name)` gives (model builder, loss, global batch, optimizer builder).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[
    Callable[[], nn.Module],
    Callable[[nn.Module, Any], Tensor],
    Any,
    Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
]


def _images(rows: int, classes: int = 100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 32, 32, generator=generator)
    return images, torch.randint(0, classes, (rows,), generator=generator)


def _classify(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch[0])
    return F.cross_entropy(getattr(found, "logits", found), batch[1])


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def conv() -> Made:
    from benchmarks.hybrid import build_batch, build_model, loss

    return build_model, loss, build_batch(), _sgd


def pooled() -> Made:
    """The convolutions of `conv` and means over the image: nearly no parameters."""

    def build() -> nn.Module:
        from benchmarks.hybrid import build_model

        features = build_model().features
        features.flatten = nn.Sequential(nn.AvgPool2d(4), nn.Flatten())  # 64 means
        return nn.Sequential(features, nn.Linear(64, 100))

    from benchmarks.hybrid import build_batch

    return build, _classify, build_batch(), _sgd


def vgg() -> Made:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        inputs = 3
        for outputs in (32, 64, 128, 128):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            inputs = outputs
        features = nn.Sequential(*layers, nn.Flatten())
        classifier = nn.Sequential(
            nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 100)
        )
        parts = nn.Sequential()
        parts.add_module("features", features)
        parts.add_module("classifier", classifier)
        return parts

    return build, _classify, _images(192), _sgd


def resnet18() -> Made:
    def build() -> nn.Module:
        from synchromesh.workloads.target import load

        torch.manual_seed(0)
        return load("cifar100/resnet18", None, synthetic=True).model()

    return build, _classify, _images(128), _sgd


def vit() -> Made:
    def build() -> nn.Module:
        from synchromesh.workloads.target import load

        torch.manual_seed(0)
        return load("cifar100/vit_tiny", None, synthetic=True).model()

    return build, _classify, _images(32), _adamw


class LanguageModel(nn.Module):
    """Embedding, LSTM, a softmax over `words` words: nearly all parameters are in the ends."""

    def __init__(self, words: int = 10_000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden)  # type: ignore[no-any-return]


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def lstm() -> Made:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return LanguageModel()

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 10_000, (32, 17), generator=generator)
    return build, _next_token, tokens, _sgd


class ContextModel(nn.Module):
    """Embedding, three LSTM layers over a context, a softmax for the word that comes after it."""

    def __init__(self, words: int = 20_000, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, num_layers=3, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embedding(tokens))
        return self.head(hidden[:, -1])  # type: ignore[no-any-return]


def context() -> Made:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return ContextModel()

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20_000, (256, 33), generator=generator)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]), batch[:, -1])

    return build, loss, tokens, _sgd


def mlp() -> Made:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU(),
            nn.Linear(1536, 1024), nn.ReLU(), nn.Linear(1024, 100),
        )  # fmt: skip

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 512, generator=generator)
    return build, _classify, (x, torch.randint(0, 100, (512,), generator=generator)), _adamw


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=2_000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=64, num_labels=4,
    )  # fmt: skip

    def build() -> nn.Module:
        torch.manual_seed(0)
        return BertForSequenceClassification(config)

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 2_000, (16, 32), generator=generator)
    return build, _classify, (tokens, torch.randint(0, 4, (16,), generator=generator)), _adamw


MODELS: dict[str, Callable[[], Made]] = {
    "conv": conv, "pooled": pooled, "vgg": vgg, "resnet18": resnet18, "vit": vit, "lstm": lstm,
    "context": context, "mlp": mlp, "bert": bert,
}  # fmt: skip


def make(name: str) -> Made:
    if "*" in name:
        from benchmarks import drawn

        return drawn.make(name)
    if name not in MODELS:
        raise SystemExit(f"no model {name!r}: choose of {', '.join(MODELS)}")
    return MODELS[name]()
