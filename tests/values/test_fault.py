"""What a user sees of an exception."""

import traceback

from synchromesh.values.fault import Fault, Refuted, Stopped, near, printable
from synchromesh.values.plan import Plan


def caught(function, *arguments) -> Fault:
    try:
        function(*arguments)
    except Exception as error:
        return Fault.of(error)
    raise AssertionError("nothing was raised")


def test_our_value_error_is_one_sentence_and_code_2() -> None:
    fault = caught(Plan.parse, "dtaa")
    assert str(fault).startswith("synchromesh: unknown layout 'dtaa'; did you mean 'data'")
    assert "\n" not in str(fault) and fault.code == 2


def test_value_error_from_elsewhere_keeps_its_traceback() -> None:
    fault = caught(int, "x")
    assert "Traceback" in str(fault) and "test_fault.py" in str(fault) and fault.code == 1


def test_missing_file_is_a_sentence_with_its_name() -> None:
    fault = caught(open, "/nowhere/file")
    assert str(fault) == "synchromesh: No such file or directory: /nowhere/file"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31m\r\nb\u202e\tc") == "a\\x1b[31m\\r\\nb\\u202e\tc"
    assert printable("é 模\nb", lines=True) == "é 模\nb"
    fault = caught(Plan.parse, "\x1b[2Jdata")
    assert "\x1b" not in str(fault)


def test_traceback_begins_at_the_users_code() -> None:
    fault = caught(traceback.walk_tb, *())
    assert fault.traceback.splitlines()[-1].startswith("TypeError")


def test_a_rank_that_does_not_answer_is_told_in_words() -> None:
    place = "[/build/gloo/transport/tcp/{}]"
    closed = f"{place.format('pair.cc:553')} Connection closed by peer [127.0.0.1]:29887. GLHF"
    late = f"{place.format('buffer.cc:78')} Timed out waiting 40000ms for recv operation"
    gone, vain = Fault.of(RuntimeError(closed)), Fault.of(RuntimeError(late))
    assert "had ended before (Connection closed by peer)" in gone.sentence and gone.lost
    assert "hangs or is in another call (Timed out waiting 40000ms" in vain.sentence and vain.lost
    assert not Fault.of(RuntimeError(f"sample 3: {closed}")).lost
    assert Fault.of(RuntimeError("connection with rank 1 lost: it has ended")).lost
    assert "Traceback" not in gone.sentence and closed in gone.traceback


def test_an_answer_of_no_is_a_sentence_and_code_1() -> None:
    fault = Fault.of(Refuted("the loss deviates\x1b"))
    assert str(fault) == "synchromesh: the loss deviates\\x1b" and fault.code == 1


class Mute(ValueError):
    def __str__(self) -> str:
        raise KeyError("words")


def test_an_error_that_cannot_be_shown_is_named() -> None:
    fault = Fault.of(Mute())
    assert fault.sentence == "Mute: its __str__ raises KeyError" and "Mute" in fault.traceback


def test_a_stop_has_the_code_of_its_signal() -> None:
    assert (Stopped(15).code, Stopped(2).code) == (143, 130)


def test_an_error_without_words_is_named() -> None:
    assert Fault.of(MemoryError()).sentence == "MemoryError: the memory has run out"
    assert Fault.of(AssertionError()).sentence == "AssertionError"


def test_an_error_of_many_lines_is_one_line_with_what_caused_it() -> None:
    def fail() -> None:
        try:
            {}["weight"]
        except KeyError as error:
            try:
                raise RuntimeError("in between") from error
            except RuntimeError as between:
                raise RuntimeError("\n [Stage 1] failed:\n args: none\n") from between

    fault = caught(fail)
    assert fault.sentence == "RuntimeError: [Stage 1] failed:; caused by KeyError: 'weight'"
    assert "args: none" in fault.traceback


def test_near_names_are_suggested_and_others_not() -> None:
    known = ["data", "tensor", "hybrid"]
    assert near("dta", known) == "; did you mean 'data'"
    assert near("tenzor", iter(known), brackets=True) == " (did you mean tensor?)"
    assert near("xyz", known) == near("xyz", known, brackets=True) == ""
