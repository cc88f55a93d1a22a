"""The console: tables and texts on a terminal, a file or a pipe, whose reader may leave early."""

import os

from rich import console


class Console(console.Console):
    """Rich's, without its exit code 1 where the reader, `head` for one, has seen enough."""

    @classmethod
    def wide(cls, columns: int) -> "Console":
        """One of standard output, of so many columns where that is no terminal."""
        found = cls(highlight=False)
        return found if found.is_terminal else cls(highlight=False, width=columns)

    def on_broken_pipe(self) -> None:
        """The command goes on, and what it still writes there is lost."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)
