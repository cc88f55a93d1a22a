"""What resembles a mistyped name."""

from synchromesh.values.suggestion import near


def test_near_names_are_suggested_and_others_not() -> None:
    known = ["data", "tensor", "hybrid"]
    assert near("dta", known) == "; did you mean 'data'"
    assert near("tenzor", iter(known), brackets=True) == " (did you mean tensor?)"
    assert near("xyz", known) == near("xyz", known, brackets=True) == ""
