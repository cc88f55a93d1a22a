"""Plans of models that no device holds: `python -m benchmarks.llama`.

Llama of 7 and of 70 billion parameters (Touvron et al. 2023, arXiv 2302.13971, table 2, and
2307.09288), on the meta device, trained with AdamW on 2,048 tokens a row: 16 rows on `h100x8` in
float32 and with bfloat16, 64 rows on `h100x64` with bfloat16. Each is planned in a process of its
own. Goals: a plan that fits, in 60 s and 2 GB of this machine, whose bytes on a device agree with
sums by hand within 5 %.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from synchromesh.values.layout import Layout

TOKENS = 2048  # of a row
GOALS = {"seconds": 60.0, "bytes": 2e9, "off": 0.05}


@dataclass(frozen=True)
class Llama:
    """The numbers of a Llama."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    words: int = 32_000

    @property
    def kv(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer(self) -> int:
        """Parameters of a layer, without norms."""
        return 2 * self.hidden * (self.hidden + self.kv) + 3 * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer + 2 * self.words * self.hidden + norms

    def model(self) -> nn.Module:
        """On the meta device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=self.words, hidden_size=self.hidden, intermediate_size=self.inner,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, max_position_embeddings=TOKENS, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            made: nn.Module = LlamaForCausalLM(config)
        return made

    def by_hand(self, layout: Layout, rows: int, bf16: bool) -> float:
        """Bytes of a device under ZeRO 3 with AdamW in one micro-batch of `rows`, T tokens of a
        device, when the loss goes back through its softmax.

            parts        12 P / (d t)               parameters and two states, float32
            units        12 max(3 h i, v h) / t     one gathered, its gradient, the next on its way
            loss         12 T (v / t + h)           logarithms, their gradient and the logits';
                                                    what the last norm keeps
            layer        4 T (6 h + (2 h + 2 k + 4 i) / t)              kept in float32: twice the
                         sum, its norm, the norm's output; queries, keys, values, attention; gate,
                         its activation, up, their product
                         T (26 h + (4 h + 4 k + 8 i) / t) + 2 p / t     with bfloat16: the norms'
                         outputs once for each product, and copies of the parameters
                         8 T h                                          recomputed: two inputs
        """
        d, t, tokens = layout.data, layout.tensor, rows // layout.data * TOKENS
        h, i, k = self.hidden, self.inner, self.kv
        if layout.recompute:
            kept = 8.0 * tokens * h
        elif bf16:
            kept = tokens * (26 * h + (4 * h + 4 * k + 8 * i) / t) + 2 * self.layer / t
        else:
            kept = 4 * tokens * (6 * h + (2 * h + 2 * k + 4 * i) / t)
        units = 12 * max(3 * h * i, self.words * h) / t
        last = 12 * tokens * (self.words / t + h)
        return 12 * self.parameters / (d * t) + units + last + self.layers * kept


LLAMA_7B = Llama(32, 4096, 11008, 32, 32)
LLAMA_70B = Llama(80, 8192, 28672, 64, 8)
CASES: dict[str, tuple[Llama, int, str, bool]] = {  # model, rows, cluster, bfloat16
    "7B": (LLAMA_7B, 16, "h100x8", False),
    "7B bf16": (LLAMA_7B, 16, "h100x8", True),
    "70B bf16": (LLAMA_70B, 64, "h100x64", True),
}


def loss(model: nn.Module, ids: Tensor) -> Any:
    return model(input_ids=ids, labels=ids).loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def planned(case: str) -> dict[str, Any]:
    """Plans a case in this process."""
    import synchromesh as sm

    llama, rows, cluster, bf16 = CASES[case]
    ids = torch.zeros(rows, TOKENS, dtype=torch.int64)
    began = time.perf_counter()
    made = sm.plan(
        llama.model(), loss, ids, optimizer=adamw, cluster=cluster, explained=False,
        autocast=torch.bfloat16 if bf16 else None,
    )  # fmt: skip
    seconds, chosen = time.perf_counter() - began, made.choice.chosen
    assert chosen.fullest is not None
    assert not (chosen.plan.overrides or chosen.plan.stages), f"no sum by hand of {chosen.plan}"
    (layout,) = set(chosen.plan.layouts(["any"], len(made.cluster.ranks), {"any": ()}))
    return {
        "plan": str(chosen.plan),
        "fits": chosen.fits,
        "sharded": layout.shard_states == "parameters",
        "step": chosen.seconds,
        "kinds": dict(chosen.fullest.by_kind),
        "device": chosen.fullest.peak,
        "hand": llama.by_hand(layout, rows, bf16),
        "seconds": seconds,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", choices=list(CASES), help="this one, in this process, as JSON")
    if case := parser.parse_args().case:
        print(json.dumps(planned(case)))
        return 0
    print(machine())
    good = True
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.llama", "--case", case]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout)
        off = found["device"] / found["hand"] - 1
        kinds = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in found["kinds"].items())
        print(
            f"{case}: {found['plan']}, {found['step'] * 1e3:.0f} ms a step; planned in "
            f"{found['seconds']:.0f} s and {found['bytes'] / 1e9:.2f} GB\n    on a device "
            f"{found['device'] / 1e9:.1f} GB ({kinds}), by hand {found['hand'] / 1e9:.1f} "
            f"({off:+.1%})"
        )
        good &= found["fits"] and found["sharded"] and abs(off) <= GOALS["off"]
        good &= all(found[goal] <= GOALS[goal] for goal in ("seconds", "bytes"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
