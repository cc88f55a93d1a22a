"""The console: tables of texts, and the line that says what a command is doing."""

import time

import pytest

from synchromesh.cli.console import Console, table, working


@pytest.mark.parametrize(
    ("terminal", "seconds", "shown"), [(True, 0.3, True), (True, 0.0, False), (False, 0.3, False)]
)
def test_work_is_told_on_terminals_once_it_takes_long(
    terminal: bool, seconds: float, shown: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    with working(quiet=0.05) as say:
        say("tracing the model [red]")
        time.sleep(seconds)
        say("pricing plan 3 of 7")
        time.sleep(seconds)
    out, err = capsys.readouterr()
    assert out == "" and ("tracing the model [red]" in err) == ("plan 3 of 7" in err) == shown
    assert shown or not err


def test_the_line_goes_with_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(ValueError, match="no such plan"), working(quiet=0.0) as say:
        say("searching")
        time.sleep(0.1)
        raise ValueError("no such plan")
    assert capsys.readouterr().err.endswith("\x1b[2K")  # the line is empty


def test_cells_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of hosts and plans are no markup, and cannot steer the terminal."""
    made = table("ranks [red]", ("host", "rank"), [("a[b]", "0"), ("c\x1b[2J", "1")])
    Console.wide(80).print(made)
    out = capsys.readouterr().out
    assert "a[b]" in out and "ranks [red]" in out and "\x1b" not in out
    assert [column.justify for column in made.columns] == ["left", "right"]
