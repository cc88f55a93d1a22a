"""Who uses a loop over experts is told the setting that has them traced."""

from typing import Any

import pytest
import transformers as hf
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.step import Step
from tests.models import language_loss, tokens

SIZES: dict[str, Any] = dict(vocab_size=48, use_cache=False, pad_token_id=0, eos_token_id=0)
SETTING = 'model.set_experts_implementation("batched_mm")'


def mixture(products: str) -> hf.MixtralForCausalLM:
    config = hf.MixtralConfig(
        **SIZES, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, num_local_experts=4,
        experts_implementation=products,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def traced(model: nn.Module) -> Step:
    return trace(model, language_loss, tokens(48)(4), training=True)


def test_the_loop_names_the_setting_that_is_traced() -> None:
    model = mixture("eager")
    reason = traced(model).reason
    assert "for expert_idx in expert_hit" in reason and SETTING in reason, reason
    assert 'experts_implementation="batched_mm"' in reason and "plan 'data'" in reason
    assert "torch.where" not in reason
    model.set_experts_implementation("batched_mm")
    assert not traced(model).opaque


def test_experts_apart_from_their_model_use_the_loop_too() -> None:
    model = mixture("eager")
    model.config._experts_implementation = None
    assert SETTING in traced(model).reason


def test_a_loop_that_no_setting_replaces_names_none() -> None:
    config = hf.DbrxConfig(
        **SIZES, d_model=16, n_heads=4, n_layers=1, max_seq_len=16,
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
        ffn_config=dict(hidden_size=16, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    )  # fmt: skip
    reason = traced(hf.DbrxForCausalLM(config)).reason
    assert "for expert_idx in expert_hit" in reason and "torch.where" in reason, reason
    assert "experts_implementation" not in reason


@pytest.mark.wide(1)
@pytest.mark.parametrize("products", ["eager", "grouped_mm", "batched_mm"])
def test_another_line_of_a_model_with_experts_is_told_as_any(products: str) -> None:
    """Before the experts where they are a loop, else between their products."""

    def branch(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return inputs if inputs[0].sum() > 0 else (inputs[0] * 2,)

    model = mixture(products)
    block = model.model.layers[0].mlp
    (block.gate if products == "eager" else block.experts.act_fn).register_forward_pre_hook(branch)
    reason = traced(model).reason
    assert "inputs[0].sum() > 0" in reason and "torch.where" in reason, reason
    assert "experts_implementation" not in reason
