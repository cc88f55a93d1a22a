"""Records and tags: what is written and read back, names, whose a namespace is."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from synchromesh.lab import Description
from synchromesh.lab.record import Record, Records, Tag

LAB = Description.alike(2, "200mbit", 0.4)


def test_a_record_is_found_until_it_is_forgotten(tmp_path: Path) -> None:
    records, tag = Records(tmp_path / "labs"), Tag(12, 345)
    own, other = Record("a", tag, "2026-01-31", LAB), Record("b", Tag(13, 9), "2026-01-31", LAB)
    with records.locked():
        for record in (own, other):
            records.write(record)
            records.write_cluster(record.name, "{}")
    assert stat.S_IMODE((tmp_path / "labs").stat().st_mode) == 0o700
    assert records.all() == [own, other] and records.read("a") == own and records.has("b")
    assert records.forget(tag) == ["a"] and records.forget(tag) == []
    assert records.all() == [other] and not records.cluster("a").exists()


def test_a_spoilt_record_is_told_and_keeps_no_lab_alive(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write(Record("b", Tag(12, 345), "", LAB))
    (tmp_path / "a.json").write_text('{"name": "a"}')
    with pytest.raises(ValueError, match=r"a\.json: tag, date, lab is missing"):
        records.all()
    assert records.forget(Tag(12, 345)) == ["b"]


def test_a_lab_that_goes_while_records_are_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(tmp_path)
    records.write(Record("b", Tag(12, 345), "", LAB))
    monkeypatch.setattr(records, "_names", lambda: ["a", "b"])
    assert [record.name for record in records.all()] == ["b"]


@pytest.mark.parametrize("name", ["", "../x", "a.cluster", "-x", "a b", "x" * 62, "a\n"])
def test_names_that_are_no_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot name a lab: use letters, digits, - and _"):
        Records(tmp_path).has(name)


def test_a_folder_that_is_not_ours_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "labs").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ValueError, match="labs is not a folder of user id"),
        Records(tmp_path / "labs").locked(),
    ):
        pass


def test_whose_a_name_is() -> None:
    tag = Tag(12, 345)
    assert tag.part("switch") == "smlab-12-345-switch"
    assert Tag.in_name("smlab-12-345-switch") == Tag.in_name("smlab-12-345-7") == tag
    assert Tag.from_plain(tag.to_plain(), "tag") == tag
    for name in ("smlab-12-345", "smlab-12-345-x", "smlab-12-345-0-1", "xsmlab-12-345-0", "cni-1"):
        assert Tag.in_name(name) is None


def test_a_process_is_told_from_another_of_its_number() -> None:
    own = Tag.of(os.getpid())
    assert own is not None and own.alive and not Tag(own.pid, own.start + 1).alive
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    tag = Tag.of(child.pid)
    assert tag is not None and tag.alive
    Tag(tag.pid, tag.start + 1).end(1)  # another's: left alone
    assert tag.alive
    tag.end(10)
    assert not tag.alive  # a zombie is not
    child.communicate()
    assert child.returncode == -15
    tag.end(1)
