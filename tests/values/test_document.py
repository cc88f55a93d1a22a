"""A document: what parsers would let pass is refused; numbers mean what they show."""

from pathlib import Path
from typing import Any

import pytest

from synchromesh.values import document


def test_numbers_and_dates_mean_what_they_show() -> None:
    text = "a: 1e-3\nb: 1.5\nc: 2026-01-31\nd: 12\ne: -3\nf: 2.5e+7"
    value = document.read_yaml(text)
    assert value == {"a": 1e-3, "b": 1.5, "c": "2026-01-31", "d": 12, "e": -3, "f": 2.5e7}


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    for name, text in (("a.json", '{"a": 1}'), ("a.yaml", "a: 1")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert document.read(tmp_path / name) == {"a": 1}


@pytest.mark.parametrize("text", ["a: 010", "a: 0x1f", "a: 1:30", "a: 1_000", "a: 0b11"])
def test_other_spellings_of_integers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"document: .* is not a plain decimal number"):
        document.read_yaml(text)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: document.read_json("x" * 5_000_000, "f"), "f: 5000000 characters are more than"),
        (lambda: document.read_json('{"a": Infinity}', "f"), "f: Infinity is not a number"),
        (lambda: document.read_json('{"a": {"b": 1, "b": 2}}', "f"), "f: the key 'b' stands"),
        (
            lambda: document.read_yaml("{a: {b: 1, b: 2}}", "f"),
            "f: the key 'b' stands there twice",
        ),
        (lambda: document.read_yaml("a: [1, 2", "f"), "f: not YAML: while parsing a flow"),
        (lambda: document.read_yaml("? [1]\n: 2", "f"), "f: "),
        (
            lambda: document.number(10**400, "p"),
            "p: should be a finite number, not a number of more",
        ),
        (lambda: document.number(True, "p"), "p: should be a number, not true"),
        (lambda: document.number(-1, "p"), "p: should be at least 0.0, not -1"),
        (lambda: document.integer(5, "p", 1, 4), "p: should be from 1 to 4, not 5"),
        (lambda: document.boolean("no", "p"), "p: should be true or false, not text 'no'"),
        (lambda: document.sequence({}, "p"), "p: should be a list, not a mapping"),
        (lambda: document.text(None, "p"), "p: should be text, not nothing"),
        (
            lambda: document.mapping({"x": 1}, "p", ("a", "b")),
            "p: unknown key 'x'; known are a, b",
        ),
    ],
)
def test_what_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
