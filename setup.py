"""The README as a package index shows it, where links into the repository lead nowhere: they are
written with the address that `[project.urls]` calls Repository, and as names without one."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RELATIVE = r"(?!https?:|#)"
PICTURE = re.compile(r"<picture>.*?</picture>\n*|!\[[^\]]*\]\(" + RELATIVE + r"[^)]*\)\n*", re.S)
IMAGE = re.compile(r"(!\[[^\]]*\]\(|src(?:set)?=\")" + RELATIVE)
LINK = re.compile(r"\[([^\]]+)\]\(" + RELATIVE + r"([^)]+)\)")


def long_description() -> str:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    address = PROJECT.get("urls", {}).get("Repository")
    if address is None:
        return LINK.sub(r"\1 (`\2`)", PICTURE.sub("", page))
    page = IMAGE.sub(rf"\1{address}/raw/main/", page)
    return LINK.sub(rf"[\1]({address}/blob/main/\2)", page)


setup(long_description=long_description(), long_description_content_type="text/markdown")
