"""The files of the Stanford sentiment treebank's two classes (Socher et al. 2013), tokenised, as
Kim (2014, arXiv:1408.5882) published them: a sentence a line, its label before it."""

from pathlib import Path

import torch
from torch import Tensor

from synchromesh.workloads import text_lines

SPLITS = ("train", "dev", "test")
HOLDS = f"{', '.join(f'stsa.binary.{split}' for split in SPLITS)} (plain or .gz)"


def read(folder: Path, split: str) -> tuple[list[list[str]], Tensor]:
    """The words of the sentences of `split` (train, dev or test), and their labels, int64 (n), 1
    for a positive one. ValueError for a missing file and a malformed line."""
    path, lines = text_lines.read(folder, f"stsa.binary.{split}", HOLDS)
    sentences, labels = [], []
    for number, line in enumerate(lines, 1):
        label, _, sentence = line.partition(" ")
        words = sentence.split()
        if label not in ("0", "1") or not words:
            raise ValueError(
                f"{path}, line {number}: {line[:40]!r} is not a label, 0 or 1, a space and a "
                "sentence: mend the line or fetch the file again"
            )
        sentences.append(words)
        labels.append(int(label))
    return sentences, torch.tensor(labels)
