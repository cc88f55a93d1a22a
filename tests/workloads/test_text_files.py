"""Tests of the readers of text: lines, vocabularies, and what is said of damaged files."""

import gzip
from pathlib import Path

import pytest
import torch

from synchromesh.workloads import text
from synchromesh.workloads.data_files import read_lines
from synchromesh.workloads.text import Vocabulary, most_frequent
from synchromesh.workloads.text_files import read_multi30k, read_ptb, read_sst2
from tests.real_data import data


def write(folder: Path, **files: str) -> Path:
    """`folder` with these files, of which `_` in a name is a dot."""
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


# Lines


def test_lines_end_with_a_line_feed_and_nothing_else(tmp_path: Path) -> None:
    content = "Bäume\r\n\na\u2028b\x0bc\n"
    (tmp_path / "a").write_bytes(content.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(content.encode()))
    for name in "ab":
        path, lines = read_lines(tmp_path, name, "a and b")
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
            read_lines(tmp_path, name, "a and b")
    with pytest.raises(ValueError, match=r"\(there is no such folder\)"):
        read_lines(tmp_path / "x", "a", "a")


# Vocabularies


def test_a_vocabulary_is_in_order_of_frequency() -> None:
    texts = [["b", "a", "c"], ["c", "b", "<pad>"]]
    assert most_frequent(texts).words == ("b", "c", "<pad>", "a")
    found = most_frequent(texts, 4, ("<pad>", "<unk>"), "<unk>")
    assert found.words == ("<pad>", "<unk>", "b", "c") and len(found) == 4
    assert [found.id(word) for word in ("c", "a", "<unk>")] == [3, 1, 1]
    with pytest.raises(KeyError, match="z"):
        Vocabulary(("a",)).id("z")


# Sentences


def test_sentences_are_padded_and_cut() -> None:
    texts = [["a", "b", "a"], ["b", "b", "b", "a", "c"]]
    words = text.sentence_vocabulary(texts, 6)
    assert words.words[4:] == ("b", "a")
    assert text.sentence_rows(texts, words, 6).tolist() == [[2, 5, 4, 5, 3, 0], [2, 4, 4, 4, 5, 3]]
    assert text.sentence_rows([["c"]], words, 4).tolist() == [[2, 1, 3, 0]]


def test_synthetic_sentences_have_that_form() -> None:
    table = text.synthetic_sentences(200, 50, 9, seed=1)
    assert torch.equal(table, text.synthetic_sentences(200, 50, 9, seed=1))
    ends = (table == text.END).int().argmax(1)
    assert (ends.min(), ends.max()) == (4, 8) and (table[:, 0] == text.BEGIN).all()
    for row, end in zip(table.tolist(), ends.tolist(), strict=True):
        assert all(4 <= word < 50 for word in row[1:end]) and not any(row[end + 1 :])


# SST-2


def test_faults_of_sst2(tmp_path: Path) -> None:
    for content, line in {
        "1 good\nbad film\n": 2,
        "2 fine\n": 1,
        "1 a\n\n0 b": 2,
        "0 \n": 1,
    }.items():
        (tmp_path / "stsa.binary.dev").write_text(content)
        with pytest.raises(ValueError, match=f"dev, line {line}: .* is not a label, 0 or 1, a"):
            read_sst2(tmp_path, "dev")
    with pytest.raises(ValueError, match=r"neither stsa\.binary\.test nor .* holds stsa\.b"):
        read_sst2(tmp_path, "test")


def test_sst2() -> None:
    sizes = {"train": (6920, 3610), "dev": (872, 444), "test": (1821, 909)}
    for split, (count, positive) in sizes.items():
        found, labels = read_sst2(data("sst2"), split)
        assert (len(found), len(labels), int(labels.sum())) == (count, count, positive)
    assert found[0][:3] == ["no", "movement", ","] and labels[0] == 0


# Multi30k


def test_multi30k_words(tmp_path: Path) -> None:
    write(tmp_path, val_en="Two men's T-shirts.\n", val_de="Größe 38!\n")
    assert read_multi30k(tmp_path, "val") == (
        [["two", "men", "'", "s", "t", "-", "shirts", "."]], [["größe", "38", "!"]],
    )  # fmt: skip


def test_faults_of_multi30k(tmp_path: Path) -> None:
    write(tmp_path, val_en="a\nb\nc\n", val_de="a\nb\n", train_en="a\n \n", train_de="a\nb\n")
    with pytest.raises(ValueError, match=r"val\.en has 3 lines but .*val\.de 2: line by line"):
        read_multi30k(tmp_path, "val")
    with pytest.raises(ValueError, match=r"train\.en, line 2 has no words: remove the line"):
        read_multi30k(tmp_path, "train")
    with pytest.raises(
        ValueError, match=r"neither test_2016_flickr\.en nor .*holds train\.en, tr"
    ):
        read_multi30k(tmp_path, "test_2016_flickr")


def test_multi30k() -> None:
    for split, count in {"val": 1014, "test_2016_flickr": 1000}.items():
        english, german = read_multi30k(data("multi30k"), split)
        assert len(english) == len(german) == count
    assert english[0][:3] == ["a", "man", "in"] and german[0][:3] == ["ein", "mann", "mit"]


# PTB


def test_ptb_is_three_streams(tmp_path: Path) -> None:
    write(tmp_path, ptb_train_txt=" a b <unk> \n b\n", ptb_valid_txt="z b\n", ptb_test_txt="a\n")
    train, valid, test, vocabulary = read_ptb(tmp_path)
    assert vocabulary.words == ("<eos>", "b", "<unk>", "a")
    assert train.tolist() == [3, 1, 2, 0, 1, 0]
    assert (valid.tolist(), test.tolist()) == ([2, 1, 0], [3, 0])


def test_faults_of_ptb(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"neither ptb\.train\.txt nor .*holds ptb\.train\.txt, ptb\.valid\.txt, "
    ):
        read_ptb(tmp_path)
    write(tmp_path, ptb_train_txt="a b\n", ptb_valid_txt="a\n", ptb_test_txt="a\nb z\n")
    with pytest.raises(
        ValueError, match=r"ptb\.test\.txt, line 2: the word 'z' is not in ptb\.train"
    ):
        read_ptb(tmp_path)


def test_ptb() -> None:
    train, valid, test, vocabulary = read_ptb(data("ptb"))
    assert len(vocabulary) == 10_000
    assert (len(train), len(valid), len(test)) == (929_589, 73_760, 82_430)
