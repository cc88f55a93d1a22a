"""The files of Multi30k (Elliott et al. 2016, arXiv:1605.00459): captions of images, one a line;
the same line of `.en` and `.de` says the same in English and German."""

import re
from pathlib import Path

from synchromesh.workloads import text_lines

SPLITS = ("train", "val", "test_2016_flickr")
LANGUAGES = ("en", "de")
HOLDS = (
    f"{', '.join(f'{split}.{language}' for split in SPLITS for language in LANGUAGES)} "
    "(plain or .gz)"
)
WORD = re.compile(r"\w+|[^\w\s]")  # letters and digits in a row, or one other sign


def read(folder: Path, split: str) -> tuple[list[list[str]], list[list[str]]]:
    """The words, in lower case, of the English and the German sentences of `split`.

    ValueError for a missing file, a line without words, and files of different lengths."""
    files = [text_lines.read(folder, f"{split}.{language}", HOLDS) for language in LANGUAGES]
    (one, english), (other, german) = files
    if len(english) != len(german):
        raise ValueError(
            f"{one} has {len(english)} lines but {other} {len(german)}: line by line they are "
            "translations, so fetch both again"
        )
    return _sentences(one, english), _sentences(other, german)


def _sentences(path: Path, lines: list[str]) -> list[list[str]]:
    found = [WORD.findall(line.lower()) for line in lines]
    for number, words in enumerate(found, 1):
        if not words:
            raise ValueError(
                f"{path}, line {number} has no words: remove the line from both languages, or "
                "fetch the file again"
            )
    return found
