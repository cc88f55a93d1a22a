"""docs/from-your-loop.md: every block as it is printed, each "after" beside its "before"."""

import os
import re
import socket
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run

pytest.importorskip("pytorch_lightning")  # once here rather than in every rank

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from-your-loop.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
FIRST, *SECTIONS = PAGE.split("\n## ")
(TRANSFORMERS,) = (s for s in SECTIONS if s.startswith("From the Hugging Face Trainer"))
LOOPS = {
    s.splitlines()[0]: BLOCK.findall(s)
    for s in SECTIONS
    if "Before" in s and s is not TRANSFORMERS
}
(COMMON,) = BLOCK.findall(FIRST)


def weights(block: str, folder: str) -> dict[str, Tensor]:
    """What a block leaves, in a folder that ranks share."""
    os.chdir(folder)
    if "lightning" in block:  # which finds its place as under torchrun, and says much
        os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        warnings.simplefilter("ignore")
    if "init_process_group" in block:
        dist.destroy_process_group()
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            port = free.getsockname()[1]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    exec(compile(COMMON + block, "from-your-loop.md", "exec"), {"__name__": "script"})
    if dist.is_initialized():
        dist.barrier()
    left: dict[str, Tensor] = torch.load("weights.pt")
    return left


@pytest.mark.wide(5)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_behind_is_as_the_one_before(name: str, ranks: int, tmp_path: Path) -> None:
    *both, before, after = LOOPS[name]
    want = run(1, weights, "".join([*both, before]), str(tmp_path))[0]
    for got in run(ranks, weights, "".join([*both, after]), str(tmp_path)):
        assert got.keys() == want.keys()
        assert all(torch.allclose(got[n], want[n], rtol=1e-4, atol=1e-6) for n in want)


@pytest.mark.slow
def test_a_lightning_script_starts_its_own_ranks(tmp_path: Path) -> None:
    *both, before, after = LOOPS["From Lightning"]
    want = run(1, weights, "".join([*both, before]), str(tmp_path))[0]
    own = after.replace("max_epochs=2", 'max_epochs=2, devices=2, accelerator="cpu"')
    (tmp_path / "script.py").write_text(COMMON + "".join([*both, own]))
    (tmp_path / "weights.pt").unlink()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, check=True, timeout=120)
    got = torch.load(tmp_path / "weights.pt")
    assert all(torch.allclose(got[n], want[n], rtol=1e-4, atol=1e-6) for n in want)


def save_pretrained(folder: Path) -> Any:
    """A small classifier and its tokenizer; returns the class that loads it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    kind = transformers.AutoModelForSequenceClassification
    small = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    kind.from_config(small).save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "a", "dull", "film", "fine", "good", "not", "very"]
    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=known, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    return kind


def pretrained(block: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]  # which launchers set
    exec(compile("import torch\n" + block, "from-your-loop.md", "exec"), {"__name__": "script"})


def test_a_pretrained_model_is_saved_as_one(tmp_path: Path) -> None:
    kind = save_pretrained(tmp_path / "pretrained")
    (block,) = (b for s in SECTIONS for b in BLOCK.findall(s) if "save_pretrained" in b)
    run(2, pretrained, block, str(tmp_path))
    folders = tmp_path / "pretrained", tmp_path / "trained"
    before, after = (kind.from_pretrained(folder).state_dict() for folder in folders)
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    assert before.keys() == after.keys() and len(changed) > len(before) // 2


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_of_transformers(ranks: int, tmp_path: Path) -> None:
    """As transformers prints it, with its own on one process, and with ours on one and two."""
    pytest.importorskip("accelerate")
    common, *blocks = BLOCK.findall(TRANSFORMERS)
    states = []
    for number, block in zip((1, ranks), blocks, strict=True):
        folder = tmp_path / f"of-{len(states)}"
        torch.manual_seed(0)
        kind = save_pretrained(folder / "pretrained")
        divided = common.replace("train_batch_size=8", f"train_batch_size={8 // number}")
        run(number, pretrained, divided + block, str(folder))
        states.append(kind.from_pretrained(folder / "trained").state_dict())
    want, got = states
    assert all(torch.allclose(got[n], want[n], rtol=1e-4, atol=1e-6) for n in want)
