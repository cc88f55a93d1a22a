"""The line that says what a command is doing, where that takes long."""

import time

import pytest

from synchromesh.cli import progress


@pytest.mark.parametrize(
    ("terminal", "seconds", "shown"), [(True, 0.3, True), (True, 0.0, False), (False, 0.3, False)]
)
def test_work_is_told_on_terminals_once_it_takes_long(
    terminal: bool, seconds: float, shown: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.05)
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    with progress.working() as say:
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
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(ValueError, match="no such plan"), progress.working() as say:
        say("searching")
        time.sleep(0.1)
        raise ValueError("no such plan")
    assert capsys.readouterr().err.endswith("\x1b[2K")  # the line is empty
