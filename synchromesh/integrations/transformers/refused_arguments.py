"""Refused arguments: what of `transformers.TrainingArguments` cannot be honoured, and the remedy.

"fsdp"                       where it is set at all
"dataloader_in_order=False"  where its text is this, a regular expression"""

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

REFUSED: Mapping[str, str] = {
    "mixed_precision=fp16|fp8": "give bf16=True: small gradients vanish unless losses are scaled",
    "fp16_full_eval, bf16_full_eval": "give bf16=True, which evaluation computes in too",
    "fsdp, deepspeed, parallelism_config": "leave it out: the plan divides the model, its states "
    "and the rows",
    "gradient_checkpointing, activation_checkpointing": "give plan='data:recompute=yes', or "
    "plan='auto'",
    "torch_compile, use_liger_kernel": "leave it out: the model is traced, and runs as a graph",
    "neftune_noise_alpha, debug": "leave it out: its hooks would see the rows of one rank",
    "auto_find_batch_size": "give per_device_train_batch_size: plan='auto' takes what fits",
    "train_sampling_strategy=batch_rebalance": "give random, sequential or group_by_length",
    "dataloader_in_order=False": "leave it out: batches come in the order of the data",
    "accelerator_config.split_batches, accelerator_config.dispatch_batches": "leave it out: a "
    "rank reads its rows",
    "accelerator_config.use_seedable_sampler=False": "leave it out: ranks share a seeded order",
    "optim=.*(lomo|layerwise)": "give adamw_torch: this one steps before gradients are summed",
    "include_num_input_tokens_seen=all|non_padding": "count tokens in the data set",
    "torch_empty_cache_steps": "leave it out: the next step needs the cache",
    "eval_use_gather_object": "leave it out: tensors that the model returns are gathered",
    "save_on_each_node": "leave it out: all ranks write into one folder, which hosts share",
    "enable_jit_checkpoint": "leave it out: ranks would save at different steps",
}


def refuse(args: Any) -> None:
    """ValueError with all arguments that are refused, each with its remedy."""
    faults = []
    for keys, remedy in REFUSED.items():
        names = []
        for key in keys.split(", "):
            name, _, wanted = key.partition("=")
            value = attrgetter(name)(args)
            text = str(getattr(value, "value", value))
            if re.fullmatch(wanted, text) if wanted else value:
                names.append(f"{name}{f'={text}' if wanted else ''}")
        faults += [f"{', '.join(names)} ({remedy})"] if names else []
    if faults:
        raise ValueError(f"TrainingArguments that cannot be honoured: {'; '.join(faults)}")
