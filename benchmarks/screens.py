"""The README's screens, of commands that run now: `python -m benchmarks.screens [NAME]`.

    train    docs/screen-train.svg: a run on two local processes, where nothing else runs
    plan     docs/screen-plan.svg: plans for devices that are not here

A screen is what the command prints where its output is no terminal, without moving parts."""

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Screen:
    """A command, the columns that it is given, and the lines of which no more are shown."""

    command: str
    columns: int
    lines: int = 60

    def text(self) -> str:
        """What it prints, in a folder of its own; a failure is one of ours."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-m", *shlex.split(self.command)], cwd=folder, check=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "COLUMNS": str(self.columns), "SYNCHROMESH_CACHE": "off"},
            )  # fmt: skip
        away = f"{folder}/"  # its length stays within a table's frame
        shown = re.sub(rf"{away}(.*)(?=│)", rf"\1{' ' * len(away)}", done.stdout)
        shown = shown.replace(away, "")
        lines = [line.rstrip() for line in shown.splitlines()]
        return "\n".join([*lines[: self.lines], *(["..."] if len(lines) > self.lines else [])])

    def svg(self) -> str:
        console = Console(
            record=True,
            width=self.columns,
            file=io.StringIO(),
            force_terminal=True,
            highlight=False,
        )
        console.print(Text(f"$ {self.command}", "bold green"))
        console.print(Text(self.text()))
        made = console.export_svg(title="", theme=MONOKAI, unique_id="screen")
        return re.sub(r" *@font-face \{.*?\}\n", "", made, flags=re.S)  # of another server


SCREENS = {
    "train": Screen("synchromesh train digits/wide --nproc 2", 118),
    "plan": Screen("synchromesh plan shakespeare/gpt2 --cluster v100x8", 140, lines=24),
}


def main(names: list[str]) -> int:
    for name in names or SCREENS:
        path = DOCS / f"screen-{name}.svg"
        path.write_text(SCREENS[name].svg(), encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
