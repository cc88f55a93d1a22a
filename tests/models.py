"""Small models of every family: `FAMILIES[name]()` is `(model, loss, make_batch)`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.outputs import named
from synchromesh.trace.step import Step
from tests.traces import remembered

Batch = Any
Loss = Callable[[nn.Module, Batch], Any]
Family = tuple[nn.Module, Loss, Callable[..., Batch]]  # make_batch(rows, seed=0, dtype=float32)

TOKENS = 8  # sequence length of every token model


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(channels: int, size: int, classes: int) -> Callable[..., Batch]:
    """(pixels, labels): `rows` random images."""

    def make(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
        g = generator(seed)
        x = torch.randn(rows, channels, size, size, generator=g, dtype=torch.float64).to(dtype)
        return x, torch.randint(0, classes, (rows,), generator=g)

    return make


def tokens(vocabulary: int, **classes: int) -> Callable[..., Batch]:
    """Token ids `x` and, where asked, `mask` (mixed lengths) and integer targets `y`, `t`."""

    def make(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
        g = generator(seed)
        batch = {"x": torch.randint(0, vocabulary, (rows, TOKENS), generator=g)}
        if "mask" in classes:
            length = torch.randint(TOKENS // 2, TOKENS + 1, (rows, 1), generator=g)
            batch["mask"] = (torch.arange(TOKENS) < length).long()
        if "y" in classes:
            batch["y"] = torch.randint(0, classes["y"], (rows,), generator=g)
        if "t" in classes:
            batch["t"] = torch.randint(0, classes["t"], (rows, TOKENS), generator=g)
        return batch

    return make


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    out = model(x)
    return F.cross_entropy(getattr(out, "logits", out), y)


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    mask = {"attention_mask": batch["mask"]} if "mask" in batch else {}
    out = model(batch["x"], **mask)
    return F.cross_entropy(getattr(out, "logits", out), batch["y"])


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"]).logits[:, :-1]
    targets = batch["x"][:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(input_ids=batch["x"], attention_mask=batch["mask"], decoder_input_ids=batch["t"])
    return F.cross_entropy(out.logits.flatten(0, 1), batch["t"].flatten())


def padded_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum over the tokens that are not padding, and their number."""
    each = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["t"].flatten(), reduction="none")
    mask = batch["mask"].flatten().to(each.dtype)
    return (each * mask).sum(), mask.sum()


def vit(dropout: float = 0.0) -> Family:
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=8, patch_size=4, num_labels=8, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), image_loss, images(3, 8, 8)


def bert(
    dropout: float = 0.0, attention: str = "sdpa", heads: int = 4, vocabulary: int = 40
) -> Family:
    config = hf.BertConfig(
        hidden_size=4 * heads, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=8 * heads, vocab_size=vocabulary, max_position_embeddings=16,
        num_labels=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config), text_loss, tokens(vocabulary, mask=1, y=4)


def bert_eager(dropout: float = 0.0) -> Family:
    return bert(dropout, "eager")


def gpt2(dropout: float = 0.0, vocabulary: int = 48) -> Family:
    config = hf.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=vocabulary, n_positions=16, embd_pdrop=dropout,
        resid_pdrop=dropout, attn_pdrop=dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config), language_loss, tokens(vocabulary)


def llama(dropout: float = 0.0) -> Family:
    config = hf.LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, vocab_size=48, max_position_embeddings=16, attention_dropout=dropout,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config), language_loss, tokens(48)


def t5(dropout: float = 0.0) -> Family:
    config = hf.T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=40,
        dropout_rate=dropout, relative_attention_num_buckets=8, relative_attention_max_distance=16,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config), translation_loss, tokens(40, mask=1, t=40)


def resnet(layer_type: str = "bottleneck") -> Family:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type=layer_type,
        num_labels=8,
    )  # fmt: skip
    return hf.ResNetForImageClassification(config), image_loss, images(3, 16, 8)


def resnet_basic() -> Family:
    return resnet("basic")


def swin(dropout: float = 0.0) -> Family:
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=2,
        mlp_ratio=2.0, num_labels=8, drop_path_rate=dropout, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return hf.SwinForImageClassification(config), image_loss, images(3, 16, 8)


class DoubleConvolution(nn.Module):
    """Two convolutions, each with group norm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Two levels: one comes up by transposed convolution, one by upsampling; skips concatenate."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.down1 = DoubleConvolution(3, c)
        self.down2 = DoubleConvolution(c, 2 * c)
        self.middle = DoubleConvolution(2 * c, 4 * c)
        self.rise2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
        self.up2 = DoubleConvolution(4 * c, 2 * c)
        self.rise1 = nn.Conv2d(2 * c, c, 1)
        self.up1 = DoubleConvolution(2 * c, c)
        self.head = nn.Conv2d(c, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        three = self.middle(F.max_pool2d(two, 2))
        two = self.up2(torch.cat([self.rise2(three), two], dim=1))
        up = F.interpolate(two, scale_factor=2, mode="nearest")
        one = self.up1(torch.cat([self.rise1(up), one], dim=1))
        return self.head(one)


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y[:, None, None].expand(-1, *x.shape[2:]))


def unet() -> Family:
    return UNet(), segmentation_loss, images(3, 8, 4)


class Recurrent(nn.Module):
    """Embedding, two recurrent layers, a classifier on the last step."""

    def __init__(self, cell: type[nn.RNNBase], vocabulary: int = 37, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.rnn = cell(16, 16, num_layers=2, batch_first=True, dropout=dropout)
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.rnn(self.embedding(x))
        return self.classifier(steps[:, -1])  # type: ignore[no-any-return]


def lstm(dropout: float = 0.0) -> Family:
    return Recurrent(nn.LSTM, dropout=dropout), text_loss, tokens(37, y=4)


class NextWord(nn.Module):
    """A recurrent model of the next word."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 18)
        self.rnn = nn.LSTM(18, 14, batch_first=True)
        self.head = nn.Linear(14, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0])  # type: ignore[no-any-return]


def word_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"])[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def gru(dropout: float = 0.0) -> Family:
    return Recurrent(nn.GRU, dropout=dropout), text_loss, tokens(37, y=4)


def odd_mlp() -> Family:
    """Sizes that nothing divides: 13-31-7-5."""
    model = nn.Sequential(
        nn.Linear(13, 31), nn.ReLU(), nn.Linear(31, 7), nn.Tanh(), nn.Linear(7, 5)
    )

    def make(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
        g = generator(seed)
        x = torch.randn(rows, 13, generator=g, dtype=torch.float64).to(dtype)
        return x, torch.randint(0, 5, (rows,), generator=g)

    return model, image_loss, make


def padded() -> Family:
    """Tokens of mixed lengths: the loss is a pair (sum, weight)."""
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 40))
    return model, padded_loss, tokens(40, mask=1, t=40)


class Convolutional(nn.Module):
    """Convolutions with pooling, then a hidden and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.hidden = nn.Linear(64, 32)
        self.classifier = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.hidden(self.features(x).flatten(1)).relu())  # type: ignore[no-any-return]


def cnn() -> Family:
    return Convolutional(), image_loss, images(1, 8, 8)


def seeded(build: Callable[..., Family]) -> Callable[..., Family]:
    """`build` with initial weights that depend on `seed` alone."""

    def make(seed: int = 0, **settings: Any) -> Family:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build(**settings)

    return make


def gpt2_251_words() -> Family:
    return gpt2(vocabulary=251)


def bert_6_heads() -> Family:
    return bert(heads=6, vocabulary=41)


def resnet_30_channels() -> Family:
    config = hf.ResNetConfig(
        embedding_size=30, hidden_sizes=[30, 54], depths=[1, 2], layer_type="basic", num_labels=7
    )
    return hf.ResNetForImageClassification(config), image_loss, images(3, 16, 7)


def lstm_101_words() -> Family:
    return NextWord(101), word_loss, tokens(101)


# sizes that few numbers of ranks divide
UNEVEN: dict[str, Callable[..., Family]] = {
    build.__name__: seeded(build)
    for build in (gpt2_251_words, bert_6_heads, resnet_30_channels, lstm_101_words)
}
FAMILIES: dict[str, Callable[..., Family]] = {
    build.__name__: seeded(build)
    for build in (
        vit, bert, bert_eager, gpt2, llama, t5, resnet, resnet_basic, swin, unet, lstm, gru,
        odd_mlp, padded, cnn,
    )
}  # fmt: skip


@cache
def family(name: str) -> Family:
    """A family in float64, for tests that leave its model as it is."""
    model, loss, make = FAMILIES[name]()
    return model.double(), loss, make


def traced(name: str, training: bool = True) -> Step:
    """The step of `family(name)`, traced once for all tests of a process: not to be changed."""
    model, loss, make = family(name)
    function = loss if training else lambda m, b: named(loss(m, b))  # a metric
    return remembered(name, model, function, make(5, dtype=torch.float64), training=training)
