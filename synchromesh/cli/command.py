"""A command: how it is declared, and how it says what it has found out."""

import argparse
import json
from collections.abc import Callable
from typing import Any, NoReturn

from synchromesh.values.fault import near, printable

Argument = Callable[[Any], object]  # adds itself to a parser, a group or the list of commands


def option(*names: str, completer: Callable[..., Any] | None = None, **settings: Any) -> Argument:
    """completer: what a shell proposes (cli/completion.py); None: files."""

    def add(parser: Any) -> None:
        parser.add_argument(*names, **settings).completer = completer

    return add


def together(*arguments: Argument) -> Argument:
    return lambda parser: [add(parser) for add in arguments]


def either(*arguments: Argument) -> Argument:
    """At most one of them may be given."""
    return lambda parser: together(*arguments)(parser.add_mutually_exclusive_group())


def command(
    name: str, main: Callable[[argparse.Namespace], int] | None, what: str, description: str, /,
    *arguments: Argument, epilog: str | None = None, **defaults: object,
) -> Argument:  # fmt: skip
    """A command that `main` runs, which returns its exit code; None: it only has commands.
    what: its line in the list of commands. defaults: of arguments."""

    def add(among: Any) -> None:
        parser = among.add_parser(name, help=what, description=description, epilog=epilog)
        together(*arguments)(parser)
        parser.set_defaults(main=main, **defaults)

    return add


def commands(*declared: Argument) -> Argument:
    """One of these commands must follow."""
    return lambda top: together(*declared)(top.add_subparsers(metavar="COMMAND", required=True))


def answer(args: argparse.Namespace, document: object, text: str | Callable[[], object]) -> None:
    """On standard output, with --json the document, else the text, or what `text` shows."""
    if args.json:
        print(json.dumps(document), file=args.out)
    elif isinstance(text, str):
        print(text, file=args.out)
    else:
        text()
    args.out.flush()


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{printable(f'{self.prog}: {message}')}; see {self.prog} --help\n")

    def _check_value(self, action, value) -> None:  # type: ignore[no-untyped-def]
        """As argparse's, but a word that is near a choice is answered with it."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += near(str(value), map(str, action.choices))
            raise

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """As argparse's, but a command refuses what it does not know itself, by its own name."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown
