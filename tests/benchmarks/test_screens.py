"""The README's pictures of a terminal."""

from benchmarks.screens import SCREENS, Screen
from synchromesh.cli import parser


def test_a_screen_has_what_a_command_prints_and_no_address() -> None:
    shown = Screen("synchromesh plan --clusters", 80, lines=3)
    assert shown.text().splitlines() == ["v100x1", "v100x2", "v100x4", "..."]
    picture = shown.svg().replace("&#160;", " ")
    assert "$ synchromesh plan --clusters" in picture and "v100x2" in picture
    assert "url(http" not in picture and "@font-face" not in picture


def test_commands_of_screens_parse() -> None:
    for screen in SCREENS.values():
        assert parser().parse_args(screen.command.split()[1:]).main
