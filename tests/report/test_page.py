"""The page: what it says, and that texts of users and machines stay text."""

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from synchromesh.report.page import page
from synchromesh.results.study import StudyMachine, StudyResults
from tests.report import sample


@cache
def rendered(name: str) -> str:
    return page(getattr(sample, name)())


class Elements(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [v or "" for n, v in attrs if n in ("href", "src", "xlink:href", "action")]
        self.ids += [v or "" for n, v in attrs if n == "id"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", ["full", "minimal", "hostile"])
def test_the_page_needs_no_network_and_runs_nothing(name: str) -> None:
    text = rendered(name)
    found = Elements(text)
    assert not found.tags & {"script", "iframe", "img", "object", "embed", "base", "form"}
    assert not [name for name in found.attributes if name.startswith("on")]
    assert all(link.startswith("#") or link == "data:," for link in found.links)
    assert not re.search(r"url\((?!#)|@import", text.partition("</style>")[0])
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert len(found.ids) == len(set(found.ids))
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert len(text.encode()) < 2_000_000


def test_attacks_are_text() -> None:
    found = Elements(rendered("hostile"))
    texts = "\n".join(found.texts)
    for attack in sample.ATTACKS:
        assert attack in texts, attack
    assert "49" not in re.findall(r"\{\{ [^}]*\}\}|49 \{", texts)


def test_sections_without_data_say_why() -> None:
    text = rendered("minimal")
    assert "Only speed was measured" in text and "No step was recorded" in text
    assert "Nothing ran on one device" in text
    assert "Only speed was measured" not in rendered("full")


def test_what_is_emulated_is_said_first_and_in_the_method() -> None:
    text = rendered("full")
    assert text.count("Hosts are emulated") == 2
    assert text.index("Hosts are emulated") < text.index("The answer")
    assert "Hosts are emulated" not in rendered("minimal")


def test_reasons_of_failures_and_the_command_are_there() -> None:
    text = rendered("full")
    assert "out of memory on device 5" in text and "--target accuracy=0.6" in text
    assert "$3.06 per hour for 1 device, us-east-1, of 2026-10-01" in text


def test_workloads_have_a_chapter_each() -> None:
    study = sample.minimal()
    more = tuple(replace(run, workload="digits/vit") for run in study.runs)
    found = Elements(page(replace(study, runs=study.runs + more)))
    assert {"w0", "w1"} <= set(found.ids)


def test_too_much_for_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match=r"would have [\d,]+ bytes, more than 10,000"):
        page(sample.minimal(), most=10_000)


def test_a_study_of_nothing_is_a_page() -> None:
    assert "<h1>t</h1>" in page(StudyResults("t", "", "", StudyMachine(), ()))
