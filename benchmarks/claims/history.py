"""Commits: of the code that is measured, and the last change of what a row depends on."""

import ast
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from benchmarks.claims.claim import Claim
from benchmarks.claims.run import ROOT

PACKAGE = "synchromesh"
SHOWN = 3  # changed files that a sentence names


class Unknown(ValueError):
    """The code has no commit that a figure could name, in one sentence."""


def git(*words: str) -> str:
    """What git prints in this repository; Unknown where it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        raise Unknown(f"git is needed, to know the commit of the code: {error}") from None
    if done.returncode:
        raise Unknown(f"git {words[0]}: {(done.stderr.strip() or 'no reason').splitlines()[0]}")
    return done.stdout.strip()


@cache
def files_of(module: str) -> frozenset[str]:
    """The files of benchmarks/ and tests/ that a module imports, itself among them."""
    found: set[str] = set()
    waiting = [f"benchmarks.{module}"]
    while waiting:
        name = waiting.pop()
        path = Path(*name.split(".")).with_suffix(".py")
        if str(path) not in found and (ROOT / path).is_file():
            found.add(str(path))
            waiting += _imported(ROOT / path)
    return frozenset(found)


def _imported(path: Path) -> Iterator[str]:
    """Absolute names of what a file imports from benchmarks and tests, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.startswith(("benchmarks.", "tests.")))


def depends_on(claim: Claim) -> list[str]:
    """The rooms of a row and the files of its benchmark."""
    return [*claim.rooms, *sorted(files_of(claim.run.module))]


def code_of(claims: Iterable[Claim]) -> list[str]:
    """The package, and all files of the benchmarks of these rows."""
    return [PACKAGE, *sorted({file for claim in claims for file in files_of(claim.run.module)})]


def commit_of(paths: list[str]) -> str:
    """The last commit that changed these; Unknown where they differ from it."""
    if changed := git("status", "--porcelain", "--", *paths).splitlines():
        names = ", ".join(line.split()[-1] for line in changed[:SHOWN])
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise Unknown(f"a figure belongs to a commit: commit or stash {names}{more} first")
    return git("log", "-1", "--format=%h", "--", *paths)


def change_since(commit: str, paths: list[str]) -> str:
    """The last commit after `commit` that changed these, in a line; empty where none did."""
    try:
        return git("log", "-1", "--format=%h %as %s", f"{commit}..HEAD", "--", *paths)
    except Unknown:
        return "its commit is not in this history"
