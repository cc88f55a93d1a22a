"""Models on whose gradients rounding shows: `ROUNDING[name]()` is a family as in `models.py`.

mobilenet   depthwise convolutions and batch norm: gradients that cancel to nearly nothing
qwen3       norms in single precision, whatever the model's type
bloom       softmax in single precision
experts     two of four experts for each token, chosen by a router
mixtral     the products of experts exist in single precision only (not in float64)
"""

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

from tests.models import Family, image_loss, images, language_loss, seeded, text_loss, tokens


class InvertedResidual(nn.Module):
    """A block of MobileNetV2: expand, convolve each channel by itself, project."""

    def __init__(self, channels: int, factor: int = 4) -> None:
        super().__init__()
        wide = channels * factor
        self.layers = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(), nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)  # type: ignore[no-any-return]


def mobilenet() -> Family:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(),
        InvertedResidual(8), InvertedResidual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 8),
    )  # fmt: skip
    return model, image_loss, images(3, 16, 8)


def qwen3() -> Family:
    config = hf.Qwen3Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, intermediate_size=32, vocab_size=48, max_position_embeddings=16,
        use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config), language_loss, tokens(48)


def bloom() -> Family:
    config = hf.BloomConfig(
        hidden_size=16, n_layer=2, n_head=4, vocab_size=48, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return hf.BloomForCausalLM(config), language_loss, tokens(48)


def mixtral() -> Family:
    config = hf.MixtralConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=48, max_position_embeddings=16, num_local_experts=4,
        use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config), language_loss, tokens(48)


class Experts(nn.Module):
    """Embedding, experts of which each token takes the best two, a classifier on their mean."""

    def __init__(self, experts: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.classifier = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        shares = self.router(hidden).softmax(-1)
        chosen = shares >= shares.topk(2, -1).values[..., -1:]
        shares = shares * chosen
        made = torch.stack([expert(hidden) for expert in self.experts], -1)
        return self.classifier((made * shares.unsqueeze(-2)).sum(-1).mean(1))  # type: ignore[no-any-return]


def experts() -> Family:
    return Experts(), text_loss, tokens(40, y=4)


ROUNDING: dict[str, Callable[..., Family]] = {
    build.__name__: seeded(build) for build in (mobilenet, qwen3, bloom, experts, mixtral)
}
