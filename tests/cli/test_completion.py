"""What a shell completes, asked as argcomplete's functions of bash ask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from synchromesh.cli import completion
from synchromesh.workloads import BUNDLED


def test_the_names_are_those_of_bundled_workloads() -> None:
    assert set(completion.TARGETS) == set(BUNDLED)


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("synchromesh tr", {"train", "trace"}),
        ("synchromesh train digits/", {"digits/cnn", "digits/wide", "digits/vit"}),
        ("synchromesh compare digits/cnn shake", {"shakespeare/gpt2", "shakespeare/gpt2_small"}),
        ("synchromesh train m", {f"mnist/{net}" for net in completion.IMAGES.split()}
         | {"multi30k/gnmt", "multi30k/gnmt_small", "mine.py:", "models/"}),
        ("synchromesh plan digits/cnn --cluster h200x2", {"h200x2"}),
        ("synchromesh train digits/cnn --checkp", {"--checkpoint-every"}),
        ("synchromesh lab f", {"freeze"}),
    ],
)  # fmt: skip
def test_what_may_follow(line: str, proposed: set[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "more.txt").touch()
    (tmp_path / "models").mkdir()
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_TYPE": "9",
        "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer.txt"),
    }  # fmt: skip
    # as the installed command; torch takes longer than anybody waits for a word
    begin = "import sys; sys.modules['torch'] = None; from synchromesh.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", begin], env={**os.environ, **asked}, cwd=tmp_path, check=True
    )
    told = (tmp_path / "answer.txt").read_text().split("\n")
    assert {word.strip() for word in told} == proposed
