"""Rows of different lengths beside fixed padding: `python -m benchmarks.lengths --data DIR`.

BERT (4 layers of 256) on the sentences of SST-2, 32 rows a step, an epoch under each plan on 1, 2
and 4 ranks of this machine. The same rows in the same order, in turns:

    longest    transformers' `DataCollatorWithPadding`: to the longest row, which ranks round up
    fixed      the same collator with padding="max_length": every row has 64 tokens

goal: a token of the former takes at most 1.10 times a token of the latter, tokens of padding
included (medians of steps), and an epoch no longer; at most 3 traces; and its losses are
those of a plain loop in one process over batches padded to their own longest row, within 1e-4
relative (in float32; `tests/data/test_padding.py` has float64)."""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.machine import machine
from benchmarks.overhead import launch
from synchromesh.training import traces
from synchromesh.workloads import text, text_files

MOST = 64  # tokens of a row
ROWS, EPOCHS = 32, 4  # of a step; timed, of each side, behind one that is not
CASES = (
    (1, "single"), (2, "data"), (2, "tensor"), (2, "pipeline:stages=2,microbatches=4"),
    (4, "data"), (4, "tensor"), (4, "pipeline:stages=4,microbatches=4"),
)  # fmt: skip
GOALS = {"token": 1.10, "epoch": 1.0, "traces": 3, "deviation": 1e-4}


def tokenizer(sentences: list[list[str]]) -> Any:
    """Of words between spaces, the 8,000 most frequent."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = text.sentence_vocabulary(sentences, 8000)
    ids = {word: words.id(word) for sentence in sentences for word in sentence}
    known = {"<pad>": text.PAD, "<unk>": text.UNKNOWN}
    made = Tokenizer(models.WordLevel({**ids, **known}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", model_max_length=MOST
    )


def model() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=1024, max_position_embeddings=MOST, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def loss(module: Any, batch: Any) -> Any:
    return module(**batch).loss


def batches(folder: Path) -> dict[str, DataLoader[Any]]:
    from transformers import DataCollatorWithPadding

    sentences, labels = text_files.read_sst2(folder, "dev")
    tokens = tokenizer(sentences)
    rows = [
        {**tokens(" ".join(s), truncation=True, max_length=MOST), "labels": int(y)}
        for s, y in zip(sentences, labels, strict=True)
    ]
    longest = DataCollatorWithPadding(tokens)
    fixed = DataCollatorWithPadding(tokens, padding="max_length", max_length=MOST)
    return {
        name: DataLoader(rows, ROWS, collate_fn=collate, drop_last=True)  # type: ignore[arg-type]
        for name, collate in (("longest", longest), ("fixed", fixed))
    }


def plain(loader: DataLoader[Any]) -> list[float]:
    """Losses of an epoch by hand."""
    module, losses = model(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for batch in loader:
        optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


class Side:
    """A trainer with its loader: an epoch, and seconds and tokens of each of its steps."""

    def __init__(self, loader: DataLoader[Any], plan: str) -> None:
        import synchromesh as sm

        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        made, self.traces = traces.capture, 0

        def counted(*given: Any, **more: Any) -> Any:
            self.traces += 1
            return made(*given, **more)

        self._counting = mock.patch.object(traces, "capture", counted)
        with self._counting:
            self.trainer = sm.prepare(module, optimizer, loss, next(iter(loader)), plan)
        self.loader = self.trainer.loader(loader)

    def epoch(self) -> tuple[list[float], list[tuple[int, float]], float]:
        losses, steps = [], []
        with self._counting:
            began = last = time.perf_counter()
            for batch in self.loader:
                losses.append(float(self.trainer.step(batch)))
                now = time.perf_counter()
                steps.append((batch["input_ids"].shape[1], now - last))
                last = now
        return losses, steps, last - began


def measure(folder: Path, plan: str) -> dict[str, Any]:
    """On every rank."""
    loaders = batches(folder)
    want = plain(loaders["longest"]) if dist.get_rank() == 0 else []
    sides = {name: Side(loader, plan) for name, loader in loaders.items()}
    losses = {name: side.epoch()[0] for name, side in sides.items()}  # and their traces
    each: dict[str, list[float]] = {name: [] for name in sides}
    whole: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(EPOCHS):
        for name in sides if turn % 2 == 0 else reversed(sides):
            _, steps, seconds = sides[name].epoch()
            whole[name].append(seconds)
            each[name] += [taken / length for length, taken in steps]
    deviation = max((abs(a - b) / abs(b) for a, b in zip(losses["longest"], want)), default=0.0)  # noqa: B905
    lengths = [batch["input_ids"].shape[1] for batch in sides["longest"].loader]
    for side in sides.values():
        side.trainer.close()
    return {
        "traces": sides["longest"].traces,
        "deviation": deviation,
        "token": statistics.median(each["longest"]) / statistics.median(each["fixed"]),
        "epoch": statistics.median(whole["longest"]) / statistics.median(whole["fixed"]),
        "milliseconds": 1e3 * MOST * statistics.median(each["fixed"]),
        "tokens": sum(lengths) / (MOST * len(lengths)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of SST-2's files")
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured = measure(options.data, options.rank)
        if dist.get_rank() == 0:
            print(json.dumps(measured), flush=True)
        dist.destroy_process_group()
        return 0
    rows = []
    for ranks, plan in CASES if options.case is None else [CASES[options.case]]:
        print(f"{plan} on {ranks} ...", file=sys.stderr)
        given = [f"--rank={plan}", f"--data={options.data.resolve()}"]
        measured = launch("benchmarks.lengths", ranks, given, 900)
        passed = all(measured[name] <= goal for name, goal in GOALS.items())
        rows.append({"ranks": ranks, "plan": plan, **measured, "passed": passed})
    passed = all(row["passed"] for row in rows)
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows, "passed": passed}, indent=2))
        return 0 if passed else 1
    print(machine())
    print(f"\n{'plan':34} ranks  traces  fixed step  a token  an epoch  tokens  deviation")
    for row in rows:
        print(
            f"{row['plan']:34} {row['ranks']:5} {row['traces']:7} {row['milliseconds']:8.1f} ms"
            f" {row['token']:8.3f} {row['epoch']:9.3f} {row['tokens']:7.2f}"
            f" {row['deviation']:10.1e}"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
