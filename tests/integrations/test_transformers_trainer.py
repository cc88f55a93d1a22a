"""`Trainer` of transformers under plans, beside transformers' own on one process."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.ranks import run

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from synchromesh.integrations.transformers import Trainer  # noqa: E402
from synchromesh.integrations.transformers.refused_arguments import REFUSED, refuse  # noqa: E402

WORDS = ["[PAD]", "[UNK]", *"abcdefghijklmn"]
Log = list[dict[str, float]]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=known, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Tokens of 2 to 15 words, and whether the first one is in the first half of the alphabet."""
    draw, known = torch.Generator().manual_seed(seed), tokenizer()
    rows = []
    for length in torch.randint(2, 16, (count,), generator=draw).tolist():
        words = torch.randint(2, len(WORDS), (length,), generator=draw).tolist()
        row = known(" ".join(WORDS[w] for w in words))
        rows.append({**row, "label": int(words[0] < 9)})
    return rows


TRAIN, HELD_OUT = texts(14, 0), texts(9, 1)


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=32, num_labels=2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def arguments(folder: str, rows: int, **more: Any) -> Any:
    """rows: of a micro-batch over all ranks."""
    given = {
        "per_device_train_batch_size": rows // int(os.environ.get("WORLD_SIZE", 1)),
        "per_device_eval_batch_size": 2, "learning_rate": 1e-2, "num_train_epochs": 2,
        "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "report_to": "none",
    }  # fmt: skip
    return TrainingArguments(folder, **{**given, **more})


def classifying(kind: Any, args: Any, plan: str, **more: Any) -> Any:
    given = {
        "model": classifier(), "args": args, "train_dataset": TRAIN, "eval_dataset": HELD_OUT,
        "data_collator": DataCollatorWithPadding(tokenizer()), "compute_metrics": accuracy,
    }  # fmt: skip
    return kind(**{**given, **({"plan": plan} if kind is Trainer else {}), **more})


def rank(function: Callable[..., Any], kind: Any, *args: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    if kind is Trainer:
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # which launchers set
    else:
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    return function(kind, *args)


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return run(1, rank, function, transformers.Trainer, *args)[0]


def under(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return run(ranks, rank, function, Trainer, *args)


def assert_equal(got: Log, want: Log, tolerance: float = 1e-10) -> None:
    """What both say of losses, metrics, rates and steps."""
    assert [entry.keys() for entry in got] == [entry.keys() for entry in want]
    for ours, theirs in zip(got, want, strict=True):
        for name, value in theirs.items():
            if not re.search("runtime|per_second|flos", name):
                assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


# Training, evaluation and resuming


def trained(kind: Any, folder: str, plan: str, resume: str | None) -> dict[str, Any]:
    """Micro-batches of 4, 4, 4 and 2 rows, two of them a step; a checkpoint within an epoch."""
    args = arguments(
        folder, 4, gradient_accumulation_steps=2, max_grad_norm=0.5, weight_decay=0.1,
        lr_scheduler_type="cosine", warmup_steps=2, save_strategy="steps", save_steps=3,
    )  # fmt: skip
    trainer = classifying(kind, args, plan)
    trainer.train(resume_from_checkpoint=resume)
    predicted = trainer.predict(HELD_OUT)
    trainer.save_model()
    return {
        "log": trainer.state.log_history,
        "predictions": predicted.predictions,
        "labels": predicted.label_ids.tolist(),
        "metrics": predicted.metrics,
        "flos": trainer.state.total_flos,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = plain(trained, str(folder / "plain"), "", None)
    return result


def weights(folder: Path) -> Mapping[str, Tensor]:
    model = BertForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    state: Mapping[str, Tensor] = model.state_dict()
    return state


def assert_same_run(got: list[dict[str, Any]], want: dict[str, Any], ours: Path) -> None:
    for of_rank in got:
        assert_equal(of_rank["log"], want["log"])
        assert of_rank["predictions"] == pytest.approx(want["predictions"], abs=1e-10)
        assert of_rank["labels"] == want["labels"]
        assert_equal([of_rank["metrics"]], [want["metrics"]])
    theirs = weights(ours.parent / "plain")
    assert all(torch.allclose(w, theirs[n], atol=1e-10) for n, w in weights(ours).items())


def test_a_run_is_that_of_one_process(folder: Path, want: dict[str, Any]) -> None:
    """Its replicas have tensors divided; a data degree and a tensor degree alone are below."""
    ours = folder / "hybrid"
    got = under(4, trained, str(ours), "hybrid:tensor=2", None)
    assert_same_run(got, want, ours)
    assert got[0]["flos"] >= want["flos"]  # rows are padded to more


@pytest.mark.parametrize("ranks, plan, of", [(1, "single", "data"), (2, "tensor", "plain")])
def test_a_run_goes_on_under_another_plan(
    ranks: int, plan: str, of: str, folder: Path, want: dict[str, Any]
) -> None:
    """Also from a checkpoint of transformers' own trainer."""
    before = folder / of
    if of != "plain":
        before = folder / f"before-{of}"
        under(2, trained, str(before), of, None)
    assert (before / "checkpoint-3/synchromesh").is_dir() == (of != "plain")
    ours = folder / f"from-{of}"
    got = under(ranks, trained, str(ours), plan, str(before / "checkpoint-3"))
    for of_rank in got:
        del of_rank["log"][-1]["train_loss"]  # of the steps of this process
    *log, last = want["log"]
    last = {name: value for name, value in last.items() if name != "train_loss"}
    assert_same_run(got, {**want, "log": [*log, last]}, ours)


def with_own_loader(kind: Any, folder: str) -> Log:
    """Before which nothing asks for the columns that the model takes."""

    class Own(kind):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    collate = DataCollatorWithPadding(tokenizer())
    rows = [{**row, "text": "unread"} for row in HELD_OUT]
    plan = {"plan": "data"} if kind is Trainer else {}
    trainer = Own(
        model=classifier(), args=arguments(folder, 4, max_steps=1), eval_dataset=rows,
        train_dataset=TRAIN, data_collator=collate, **plan,
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    history: Log = trainer.state.log_history
    return history


def test_columns_that_the_model_does_not_take_are_left_out_after_training(tmp_path: Path) -> None:
    ours = run(1, rank, with_own_loader, Trainer, str(tmp_path))[0]
    assert_equal(ours, plain(with_own_loader, str(tmp_path)))


# Losses


def in_float64(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """transformers' own is computed in float32."""
    each = outputs["logits"][:, :-1].flatten(0, 1)
    return F.cross_entropy(each, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class Weighted:
    """Mixed in front of a trainer: classes have weights, and the loss is divided by them alone."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels, torch.tensor([1.0, 3.0]))
        return (loss, outputs) if return_outputs else loss


def language_model(kind: Any, folder: str, plan: str, **more: Any) -> Log:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(WORDS), n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    smoothing = more.pop("label_smoothing_factor", 0.0)
    args = arguments(
        folder, 4, gradient_accumulation_steps=2, num_train_epochs=1,
        label_smoothing_factor=smoothing,
    )  # fmt: skip
    rows = [{k: row[k] for k in ("input_ids", "attention_mask")} for row in TRAIN]
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    held_out = {"a": rows[:5], "b": rows[3:9]}
    trainer = classifying(
        kind, args, plan, model=model, data_collator=collate, train_dataset=rows,
        eval_dataset=held_out, compute_metrics=None, **more,
    )  # fmt: skip
    trainer.train()
    log: Log = trainer.state.log_history
    return log


def losses(kind: Any, folder: str, plan: str) -> list[Log]:
    own = type("Own", (Weighted, kind), {})
    args = arguments(folder, 4, gradient_accumulation_steps=2, num_train_epochs=1)
    weighted = own(
        model=classifier(), args=args, train_dataset=TRAIN, eval_dataset=HELD_OUT,
        data_collator=DataCollatorWithPadding(tokenizer()),
        **({"plan": plan} if kind is Trainer else {}),
    )  # fmt: skip
    weighted.train()
    return [
        language_model(kind, folder, plan, compute_loss_func=in_float64),
        language_model(kind, folder, plan),
        language_model(kind, folder, plan, label_smoothing_factor=0.1),
        weighted.state.log_history,
    ]


def test_losses_add_up_as_those_of_transformers(tmp_path: Path) -> None:
    """Of micro-batches with other numbers of tokens, also where the last one is short."""
    wanted = plain(losses, str(tmp_path), "")
    for got in under(2, losses, str(tmp_path), "data"):
        for ours, theirs, near in zip(got, wanted, (1e-10, 2e-6, 2e-6, 1e-10), strict=True):
            assert_equal(ours, theirs, near)


# Callbacks, precision, streams


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(TRAIN)


def features(kind: Any, folder: str, plan: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    patient = classifying(
        kind,
        arguments(
            f"{folder}/{plan}", 4, num_train_epochs=5, learning_rate=0.1, save_strategy="epoch",
            load_best_model_at_end=True, metric_for_best_model="accuracy", save_total_limit=1,
        ),
        plan, callbacks=[EarlyStoppingCallback(1)],
    )  # fmt: skip
    patient.train()
    best = patient.evaluate()
    folders = sorted(path.name for path in Path(f"{folder}/{plan}").glob("checkpoint-*"))
    found["best"] = [*patient.state.log_history, best], folders
    twice = classifying(
        kind, arguments(folder, 4, num_train_epochs=1, dataloader_drop_last=True), plan
    )
    twice.train()
    twice.train()
    found["twice"] = twice.state.log_history
    streamed = classifying(
        kind, arguments(folder, 4, max_steps=5, eval_strategy="steps", eval_steps=2), plan,
        train_dataset=Stream(), eval_dataset=Stream(),
    )  # fmt: skip
    streamed.train()
    found["stream"] = streamed.state.log_history
    torch.set_default_dtype(torch.float32)
    halves = classifying(kind, arguments(folder, 4, bf16=True, num_train_epochs=1), plan)
    halves.train()
    found["bf16"] = halves.state.log_history
    return found


def test_callbacks_second_runs_streams_and_bf16(tmp_path: Path) -> None:
    wanted = plain(features, str(tmp_path), "plain")
    assert len(wanted["best"][1]) == 1
    stopped = [entry["step"] for entry in wanted["best"][0] if "step" in entry]
    assert max(stopped) < 5 * 4  # patience has ended it
    for got in under(2, features, str(tmp_path), "tensor"):
        assert got["best"][1] == wanted["best"][1]
        assert_equal(got["best"][0], wanted["best"][0])
        assert_equal(got["twice"], wanted["twice"])
        assert_equal(got["stream"], wanted["stream"])
        assert_equal(got["bf16"], wanted["bf16"], 0.1)


# What is refused

SET: Mapping[str, Any] = {  # an argument that each of them is set by
    "mixed_precision": {"fp16": True},
    "fp16_full_eval": {"fp16_full_eval": True},
    "bf16_full_eval": {"bf16_full_eval": True},
    "gradient_checkpointing": {"activation_checkpointing": True},
    "activation_checkpointing": {"activation_checkpointing": True},
    "torch_compile": {"torch_compile": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "debug": {"debug": "underflow_overflow"},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "train_sampling_strategy": {"train_sampling_strategy": "batch_rebalance"},
    "dataloader_in_order": {"dataloader_in_order": False},
    "accelerator_config.split_batches": {"accelerator_config": {"split_batches": True}},
    "accelerator_config.dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
    "accelerator_config.use_seedable_sampler": {
        "accelerator_config": {"use_seedable_sampler": False}
    },
    "optim": {"optim": "galore_adamw_layerwise", "optim_target_modules": "all-linear"},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": True},
    "torch_empty_cache_steps": {"torch_empty_cache_steps": 2},
    "eval_use_gather_object": {"eval_use_gather_object": True},
    "save_on_each_node": {"save_on_each_node": True},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
}
ATTRIBUTES = {"fsdp": "full_shard", "deepspeed": {"stage": 3}, "parallelism_config": object()}


def test_what_cannot_be_honoured_is_refused_with_a_remedy(tmp_path: Path) -> None:
    names = {key.partition("=")[0] for keys in REFUSED for key in keys.split(", ")}
    assert names == {*SET, *ATTRIBUTES}
    refuse(arguments(str(tmp_path), 4))
    for name, given in SET.items():
        with pytest.raises(
            ValueError, match=rf"^TrainingArguments that .*: (\w+, )?{re.escape(name)}"
        ):
            refuse(arguments(str(tmp_path), 4, **given))
    for name, value in ATTRIBUTES.items():  # whose packages are not here
        args = arguments(str(tmp_path), 4)
        setattr(args, name, value)
        with pytest.raises(ValueError, match=f"{name} .leave it out: the plan divides the model"):
            Trainer(model=classifier(), args=args)


def test_what_auto_may_choose_is_given_to_prepare(tmp_path: Path) -> None:
    trainer = classifying(Trainer, arguments(str(tmp_path), 4), "auto", allow="gossip")
    with pytest.raises(ValueError, match="allow 'gossip': 'gossip' is none of local, compression"):
        trainer.train()


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/from-your-loop.md").read_text()
    section = page.partition("## From the Hugging Face Trainer")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \|$", section, re.M)
    assert dict(rows) == {keys.replace("|", "\\|"): told for keys, told in REFUSED.items()}


def test_what_is_overridden_is_there() -> None:
    """Methods of transformers that are not public may go with another version."""
    own = [name for name, value in vars(Trainer).items() if callable(value)]
    new = {name for name in own if not hasattr(transformers.Trainer, name)}
    assert new == {"_release", "_example", "_look_at_loss", "_loss", "_whole"}
