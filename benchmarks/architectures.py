"""The architectures of `benchmarks.models`: small configurations of `transformers`.

`ARCHITECTURES[name]()` is `(model, loss, make_batch)`, as a family of `tests/models.py`; widths
are 32 or 64, depths 2. `OWN` has another head of one of them, PyTorch's own layers and
recommendation models beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import (
    TOKENS,
    Batch,
    Family,
    Loss,
    generator,
    image_loss,
    images,
    language_loss,
    seeded,
    text_loss,
    tokens,
    translation_loss,
)

WORDS, CLASSES = 64, 8
SAMPLES = 320  # of a sound


@dataclass(frozen=True)
class Task:
    """What a model is trained for: its head in `transformers`, its loss and its batches."""

    head: str
    loss: Loss
    batches: Callable[..., Batch]
    settings: dict[str, Any] = field(default_factory=dict)


def sounds(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """(samples, labels): random sounds."""
    g = generator(seed)
    x = torch.randn(rows, SAMPLES, generator=g, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, CLASSES, (rows,), generator=g)


def spectra(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """(spectrogram, labels) with 16 frames of 16 frequencies."""
    g = generator(seed)
    x = torch.randn(rows, 16, 16, generator=g, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, CLASSES, (rows,), generator=g)


def speech(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """A spectrogram `x` of 16 frequencies and 16 frames, and target tokens `t`."""
    g = generator(seed)
    x = torch.randn(rows, 16, 16, generator=g, dtype=torch.float64).to(dtype)
    return {"x": x, "t": torch.randint(3, WORDS, (rows, TOKENS), generator=g)}


def transcription_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(input_features=batch["x"], decoder_input_ids=batch["t"])
    return F.cross_entropy(out.logits.flatten(0, 1), batch["t"].flatten())


LANGUAGE = dict(
    vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
TRANSLATION = dict(
    vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
    forced_eos_token_id=2,
)  # fmt: skip
VISION = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    image_size=16, patch_size=4, num_labels=CLASSES,
)  # fmt: skip
SOUND = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2, classifier_proj_size=32, num_labels=CLASSES,
    apply_spec_augment=False, layerdrop=0.0,
)  # fmt: skip

TASKS = {
    "language": Task(
        "CausalLM", language_loss, tokens(WORDS), {**LANGUAGE, "use_cache": False}
    ),
    "text": Task(
        "SequenceClassification", text_loss, tokens(WORDS, mask=1, y=4),
        {**LANGUAGE, "num_labels": 4},
    ),
    "translation": Task(
        "Seq2SeqLM", translation_loss, tokens(WORDS, mask=1, t=WORDS), TRANSLATION
    ),
    "image": Task("ImageClassification", image_loss, images(3, 16, CLASSES), VISION),
    "large image": Task(
        "ImageClassification", image_loss, images(3, 32, CLASSES), {**VISION, "image_size": 32}
    ),
    "sound": Task("AudioClassification", image_loss, sounds, SOUND),
    "spectrum": Task(
        "AudioClassification", image_loss, spectra,
        {**VISION, "max_length": 16, "num_mel_bins": 16},
    ),
    "transcription": Task("SpeechSeq2Seq", transcription_loss, speech, TRANSLATION),
}  # fmt: skip

GROUPED = dict(num_key_value_heads=2)
BATCHED = dict(experts_implementation="batched_mm")  # the loop is not traced, grouped: no float64
MIXTURE = dict(**GROUPED, **BATCHED, num_experts_per_tok=2)  # two of four experts a token
DEEPSEEK = dict(
    **MIXTURE, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=32,
    first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8,
) | dict(num_key_value_heads=4)  # fmt: skip
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=64)
STAGES = dict(hidden_sizes=[32, 64], depths=[2, 2])
PYRAMID = dict(
    num_encoder_blocks=2, depths=[2, 2], hidden_sizes=[32, 64], patch_sizes=[4, 2], strides=[4, 2],
    num_attention_heads=[2, 4], image_size=32,
)  # fmt: skip

# name in `transformers` -> its task and the settings that are its own
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # decoders
    "gpt_neox": ("language", {}),
    "opt": ("language", dict(ffn_dim=64, word_embed_proj_dim=32)),
    "bloom": ("language", dict(n_layer=2, n_head=4)),
    "gptj": ("language", dict(**GPT, rotary_dim=4)),
    "codegen": ("language", dict(**GPT, rotary_dim=4, n_ctx=32)),
    "gpt_bigcode": ("language", GPT),
    "gpt_neo": (
        "language",
        dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    ),
    "mpt": ("language", dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=32)),
    "falcon": ("language", dict(ffn_hidden_size=64)),
    "mistral": ("language", GROUPED),
    "qwen2": ("language", GROUPED),
    "qwen3": ("language", dict(**GROUPED, head_dim=8)),
    "gemma2": ("language", dict(**GROUPED, head_dim=8)),
    "gemma3_text": ("language", dict(**GROUPED, head_dim=8)),
    "phi": ("language", {}),
    "phi3": ("language", GROUPED),
    "stablelm": ("language", GROUPED),
    "cohere": ("language", GROUPED),
    "olmo2": ("language", GROUPED),
    "granite": ("language", GROUPED),
    "starcoder2": ("language", GROUPED),
    "biogpt": ("language", {}),
    "mamba": ("language", dict(state_size=4, time_step_rank=4)),
    "mamba2": (
        "language",
        dict(state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    ),
    # decoders with experts
    "mixtral": ("language", dict(**MIXTURE, num_local_experts=4)),
    "qwen2_moe": (
        "language",
        dict(
            **MIXTURE, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
        ),
    ),
    "qwen3_moe": (
        "language", dict(**MIXTURE, head_dim=8, num_experts=4, moe_intermediate_size=32)
    ),
    "olmoe": ("language", dict(**MIXTURE, num_experts=4)),
    "granitemoe": ("language", dict(**MIXTURE, num_local_experts=4)),
    "gpt_oss": (
        "language",
        dict(
            **MIXTURE, head_dim=8, num_local_experts=4, sliding_window=4,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8
            ),
        ),
    ),
    "deepseek_v2": ("language", DEEPSEEK),
    "deepseek_v3": ("language", dict(**DEEPSEEK, n_group=2, topk_group=1)),
    "ernie4_5_moe": (
        "language",
        dict(
            **GROUPED, **BATCHED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32,
            moe_num_shared_experts=1, moe_layer_start_index=1,
        ),
    ),
    "jamba": (
        "language",
        dict(
            **MIXTURE, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4,
            mamba_dt_rank=4,
        ),
    ),
    "llama4_text": (
        "language",
        dict(
            **GROUPED, head_dim=8, intermediate_size_mlp=64, num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "dbrx": (
        "language",
        dict(
            d_model=32, n_heads=4, n_layers=2, max_seq_len=32,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
            ffn_config=dict(
                hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2,
                moe_jitter_eps=None,
            ),
        ),
    ),
    "jetmoe": (
        "language",
        dict(**GROUPED, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    ),
    # encoders
    "roberta": ("text", {}),
    "electra": ("text", dict(embedding_size=32)),
    "distilbert": ("text", dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64)),
    "albert": ("text", dict(embedding_size=32)),
    "deberta-v2": ("text", dict(relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "mpnet": ("text", {}),
    "convbert": ("text", dict(embedding_size=32, conv_kernel_size=3)),
    "squeezebert": ("text", dict(embedding_size=32)),
    "roformer": ("text", dict(embedding_size=32)),
    "modernbert": ("text", dict(cls_token_id=1, sep_token_id=2)),
    # encoders and decoders
    "bart": ("translation", {}),
    "marian": ("translation", dict(decoder_vocab_size=WORDS)),
    "pegasus": ("translation", {}),
    "m2m_100": ("translation", {}),
    "mt5": (
        "translation", dict(d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4),
    ),
    # images
    "deit": ("image", dict(architectures=["DeiTForImageClassification"])),
    "beit": ("image", {}),
    "dinov2": ("image", dict(mlp_ratio=2)),
    "convnext": ("image", dict(**STAGES, num_stages=2)),
    "convnextv2": ("image", dict(**STAGES, num_stages=2)),
    "swinv2": (
        "image",
        dict(embed_dim=32, depths=[2, 2], num_attention_heads=[2, 4], window_size=2, patch_size=2),
    ),
    "segformer": (
        "large image", dict(**PYRAMID, sr_ratios=[2, 1], mlp_ratios=[2, 2]),
    ),
    "pvt": ("large image", dict(**PYRAMID, sequence_reduction_ratios=[2, 1], mlp_ratios=[2, 2])),
    "poolformer": (
        "large image",
        dict(
            num_encoder_blocks=2, depths=[2, 2], hidden_sizes=[32, 64], patch_sizes=[3, 2],
            strides=[2, 2], padding=[1, 0], mlp_ratio=2.0,
        ),
    ),
    "mobilenet_v2": ("large image", {}),
    "efficientnet": (
        "large image",
        dict(
            width_coefficient=1.0, depth_coefficient=1.0, kernel_sizes=[3, 5],
            in_channels=[32, 16], out_channels=[16, 24], strides=[1, 2],
            num_block_repeats=[1, 2], expand_ratios=[1, 6],
            hidden_dim=1280,
        ),
    ),
    # sounds
    "wav2vec2": ("sound", {}),
    "hubert": ("sound", {}),
    "wavlm": ("sound", dict(num_buckets=8, max_bucket_distance=16)),
    "audio-spectrogram-transformer": ("spectrum", dict(frequency_stride=4, time_stride=4)),
    "whisper": ("transcription", dict(num_mel_bins=16, max_source_positions=8)),
}  # fmt: skip


# settings that say how wide a model is
WIDTHS = {
    "hidden_size", "intermediate_size", "d_model", "encoder_ffn_dim", "decoder_ffn_dim", "n_embd",
    "n_inner", "ffn_dim", "word_embed_proj_dim", "ffn_hidden_size", "embedding_size", "dim",
    "hidden_dim", "d_kv", "d_ff", "head_dim", "hidden_sizes", "embed_dim", "conv_dim",
    "width_coefficient",
}  # fmt: skip
NARROW = ("mixtral", "mobilenet_v2")  # the one is not traced, the other has no such setting


def configured(name: str, times: int = 1) -> Family:
    """The model of one configuration, `times` as wide."""
    task, own = CONFIGURATIONS[name]
    kind = TASKS[task]
    settings: dict[str, Any] = {**kind.settings, **own}
    for key in WIDTHS & set(settings):
        width = settings[key]
        one = isinstance(width, int | float)
        settings[key] = width * times if one else type(width)(x * times for x in width)
    config = hf.AutoConfig.for_model(name, **settings)
    build = getattr(hf, f"AutoModelFor{kind.head}").from_config
    return build(config), kind.loss, kind.batches


def scenes(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """(image, labels): a class for each of 16 x 16 places."""
    x, _ = images(3, 32, CLASSES)(rows, seed, dtype)
    return x, torch.randint(0, CLASSES, (rows, 16, 16), generator=generator(seed + 1))


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(pixel_values=x).logits
    return F.cross_entropy(F.interpolate(logits, y.shape[-2:], mode="bilinear"), y)


def segmenter() -> Family:
    """The head reads what hooks of all encoder blocks collect."""
    own = dict(sr_ratios=[2, 1], mlp_ratios=[2, 2], decoder_hidden_size=32, num_labels=CLASSES)
    config = hf.SegformerConfig(**PYRAMID, **own)
    return hf.SegformerForSemanticSegmentation(config), segmentation_loss, scenes


# -- beside `transformers` ---------------------------------------------------------------


class CausalTransformer(nn.Module):
    """`nn.Transformer` with a causal mask that is made in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], dtype=self.embedding.weight.dtype
        )
        decoded = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask)
        return self.head(decoded)  # type: ignore[no-any-return]


def target_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["t"]).flatten(0, 1), batch["t"].flatten())


def transformer() -> Family:
    return CausalTransformer(), target_loss, tokens(WORDS, t=WORDS)


class Recommender(nn.Module):
    """DLRM: bags of ids and numbers, their products in pairs, and a click as the target."""

    def __init__(self, tables: int = 3, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(WORDS, width, mode=mode) for mode in ("sum", "mean", "max")[:tables]
        )
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        each = torch.stack([dense, *found], 1)
        products = each @ each.transpose(1, 2)
        first, second = torch.triu_indices(each.shape[1], each.shape[1], 1)
        return self.top(torch.cat([dense, products[:, first, second]], 1)).squeeze(1)  # type: ignore[no-any-return]


def clicks(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Numbers `x`, bags of four ids for each of three tables, and targets `y`."""
    g = generator(seed)
    x = torch.randn(rows, 8, generator=g, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, WORDS, (rows, 3, 4), generator=g)
    return {"x": x, "ids": ids, "y": torch.randint(0, 2, (rows,), generator=g).to(dtype)}


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"], batch["ids"])
    return F.binary_cross_entropy_with_logits(logits, batch["y"].to(logits.dtype))


def dlrm() -> Family:
    return Recommender(), click_loss, clicks


def _of(name: str) -> Callable[..., Family]:
    return seeded(lambda: configured(name))


OWN = {
    "segformer-segmentation": seeded(segmenter), "nn.Transformer": seeded(transformer),
    "dlrm": seeded(dlrm),
}  # fmt: skip
ARCHITECTURES: dict[str, Callable[..., Family]] = {**{n: _of(n) for n in CONFIGURATIONS}, **OWN}
