"""Tests of the readers of text: lines, vocabularies, and what is said of damaged files."""

import gzip
import os
from pathlib import Path

import pytest

from synchromesh.workloads import ptb_files, text_lines
from synchromesh.workloads.vocabulary import Vocabulary, most_frequent

DATA = Path(os.environ.get("SYNCHROMESH_DATA", Path(__file__).parents[2] / "../shared/data"))


def data(folder: str) -> Path:
    path = DATA / folder
    if not path.is_dir():
        pytest.skip(f"no data at {path}: set SYNCHROMESH_DATA")
    return path


def write(folder: Path, **files: str) -> Path:
    """`folder` with these files, of which `_` in a name is a dot."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


# Lines


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path: Path) -> None:
    text = "Bäume\r\n\na\u2028b\x0bc\n"
    (tmp_path / "a").write_bytes(text.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(text.encode()))
    for name in "ab":
        path, lines = text_lines.read(tmp_path, name, "a and b")
        assert lines == ["Bäume", "", "a\u2028b\x0bc"] and path.stem == name


def test_faults_of_lines(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("one\nBäume\n".encode("latin1"))
    (tmp_path / "empty").write_bytes(b"\n\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"text" * 99)[:-9])
    for name, message in {
        "latin": r"latin, line 2: the byte 0xe4 is no UTF-8 .*; convert the file to UTF-8",
        "empty": "empty has no text",
        "cut": "cut.gz is not a whole gzip file",
        "none": r"has neither none nor none\.gz: name the folder that holds a and b with --data",
    }.items():
        with pytest.raises(ValueError, match=message):
            text_lines.read(tmp_path, name, "a and b")
    with pytest.raises(ValueError, match=r"\(there is no such folder\)"):
        text_lines.read(tmp_path / "x", "a", "a")


# Vocabularies


def test_a_vocabulary_is_in_order_of_frequency() -> None:
    texts = [["b", "a", "c"], ["c", "b", "<pad>"]]
    assert most_frequent(texts).words == ("b", "c", "<pad>", "a")
    found = most_frequent(texts, 4, ("<pad>", "<unk>"), "<unk>")
    assert found.words == ("<pad>", "<unk>", "b", "c") and len(found) == 4
    assert [found.id(word) for word in ("c", "a", "<unk>")] == [3, 1, 1]
    with pytest.raises(KeyError, match="z"):
        Vocabulary(("a",)).id("z")


# PTB


def test_ptb_is_three_streams(tmp_path: Path) -> None:
    write(tmp_path, ptb_train_txt=" a b <unk> \n b\n", ptb_valid_txt="z b\n", ptb_test_txt="a\n")
    train, valid, test, vocabulary = ptb_files.read(tmp_path)
    assert vocabulary.words == ("<eos>", "b", "<unk>", "a")
    assert train.tolist() == [3, 1, 2, 0, 1, 0]
    assert (valid.tolist(), test.tolist()) == ([2, 1, 0], [3, 0])


def test_faults_of_ptb(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"neither ptb\.train\.txt nor .*holds ptb\.train\.txt, ptb\.valid\.txt, "
    ):
        ptb_files.read(tmp_path)
    write(tmp_path, ptb_train_txt="a b\n", ptb_valid_txt="a\n", ptb_test_txt="a\nb z\n")
    with pytest.raises(
        ValueError, match=r"ptb\.test\.txt, line 2: the word 'z' is not in ptb\.train"
    ):
        ptb_files.read(tmp_path)


def test_ptb() -> None:
    train, valid, test, vocabulary = ptb_files.read(data("ptb"))
    assert len(vocabulary) == 10_000
    assert (len(train), len(valid), len(test)) == (929_589, 73_760, 82_430)
