"""README and docs: every Python block runs as it is printed, every command parses, links lead
somewhere.

The blocks of a section share a namespace, which begins with what the page's preparation names."""

import argparse
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import synchromesh as sm
from synchromesh.cli import parser
from tests.profiling.hurried import hurried
from tests.ranks import run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
COMMAND = re.compile(r"^(?: {4,7})?(?:sudo )?(?:\.venv/bin/)?(synchromesh .*)$", re.M)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
TRACKERS = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
ELSEWHERE = {  # pages whose blocks another test runs
    "from-your-loop.md": "tests/training/test_from_your_loop.py",
    "tutorial.md": "tests/cli/test_compare.py",
}


def sections(page: Path) -> dict[str, list[str]]:
    """Python blocks by the heading that they stand under."""
    parts = re.split(r"^## ", page.read_text(), flags=re.M)
    found = {part.partition("\n")[0]: BLOCK.findall(part) for part in parts}
    return {title: blocks for title, blocks in found.items() if blocks}


class Recurrent(nn.Module):
    """Two LSTM layers over embedded bytes; the carry has rows in front, as `zeros` of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(16, 64), nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 16)

    def forward(self, ids: Tensor, carry: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h, c = (carry[name].transpose(0, 1).contiguous() for name in ("h", "c"))
        out, (h, c) = self.lstm(self.embedding(ids), (h, c))
        return self.head(out), {"h": h.transpose(0, 1), "c": c.transpose(0, 1)}


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def right(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).sum()}


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def prepared() -> dict[str, Any]:
    """What the blocks of docs/python.md and docs/events.md take as given."""
    model, recurrent = small_model(), Recurrent()
    points = torch.randn(640, 16)
    rows = TensorDataset(points, points[:, :4].argmax(1))
    text = [{"ids": ids, "next": ids.roll(-1)} for ids in torch.randint(16, (40, 6))]
    workload = sm.Workload(
        model=small_model, loss=mean_loss, metric=right, train_data=rows, valid_data=rows,
        optimizer=torch.optim.AdamW, batch_size=64,
    )  # fmt: skip
    return {
        "__name__": "script", "sm": sm, "torch": torch, "F": F, "model": model, "loss": mean_loss,
        "optimizer": torch.optim.AdamW(model.parameters()), "metric": right, "dataset": rows,
        "test_set": rows, "example_batch": rows[:64], "workload": workload,
        "recurrent": recurrent, "its_optimizer": torch.optim.AdamW(recurrent.parameters()),
        "parts_of_a_text": text,
        "example_text": {name: torch.stack([x[name] for x in text[:20]]) for name in text[0]},
    }  # fmt: skip


PREPARATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": lambda: {"__name__": "script"}, "python.md": prepared,
}  # fmt: skip


def test_no_page_is_left_out() -> None:
    known = {*PREPARATIONS, *ELSEWHERE, "events.md"}
    assert {page.name for page in PAGES if sections(page)} == known
    for name, other in ELSEWHERE.items():
        assert name in (ROOT / other).read_text() or "TUTORIAL" in (ROOT / other).read_text()


def execute(page: str, blocks: list[str], folder: str) -> dict[str, Any]:
    """What the blocks leave that is a number, on this rank."""
    os.chdir(folder)
    names = PREPARATIONS[page]()
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return {n: v for n, v in names.items() if isinstance(v, int | float)}


def cases() -> Iterator[Any]:
    for page in PAGES:
        if page.name in PREPARATIONS:
            for title, blocks in sections(page).items():
                yield pytest.param(page.name, blocks, id=f"{page.name}: {title}")


@pytest.mark.parametrize(("page", "blocks"), [*cases()])
def test_blocks_run_as_they_are_printed(page: str, blocks: list[str], tmp_path: Path) -> None:
    ranks = 2 if any("trainer.rank" in b or "trainer.switch" in b for b in blocks) else 1
    with hurried():
        first, *others = run(ranks, execute, page, blocks, str(tmp_path))
    assert all(other == first for other in others)
    if page == "README.md":
        assert blocks[0].count("\n") <= 30 and (tmp_path / "first-checkpoint").is_dir()


def follow(block: str, folder: str) -> None:
    os.chdir(folder)
    os.environ["WANDB_SILENT"] = "true"
    warnings.simplefilter("ignore")  # the tracker's own
    exec(compile(block, "events.md", "exec"), prepared())


@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers_get_what_happens(tracker: str, tmp_path: Path) -> None:
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: it is too large for the development extras")
    (block,) = sections(ROOT / "docs/events.md")[TRACKERS[tracker]]
    run(1, follow, block, str(tmp_path))  # with its threads in a process of its own
    if tracker == "wandb":
        (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
        assert b"accuracy" in written.read_bytes()
    else:
        (written,) = tmp_path.glob("mlruns/*/*/metrics/loss")
        steps = [int(line.split()[2]) for line in written.read_text().splitlines()]
        assert steps == list(range(1, 21))


def commands() -> Iterator[Any]:
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text().replace("\\\n", " ")
        for found in COMMAND.findall(text):
            command = " ".join(found.partition("  #")[0].split())
            yield pytest.param(command, id=f"{page.name}: {command}")


@pytest.mark.parametrize("command", [*commands()])
def test_commands_parse(command: str) -> None:
    words = shlex.split(command)[1:]
    asked = parser().parse_args(words)
    if "--" in words:  # what `lab run` or `submit` starts
        started = words[words.index("--") + 1 :]
        parser().parse_args(started[started[0] == "synchromesh" :])
    assert isinstance(asked, argparse.Namespace) and callable(asked.main)


def test_links_lead_to_pages_and_headings() -> None:
    def anchors(page: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
        return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}

    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for target, anchor in LINK.findall(text):
            file = page.parent / target
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor[1:] in anchors(file), f"{page.name}: {target}{anchor}"
