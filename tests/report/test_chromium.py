"""The page in Chromium, at the widths of a desk and of a phone, light and dark."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from synchromesh.report.page import page
from tests.report import sample
from tests.report.chromium import Chromium, found

BROWSER = found()
AXE = importlib.util.find_spec("axe_core_python")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(AXE is None, reason="no axe-core-python: pip install axe-core-python"),
]
VIEWS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
NAMES = ("full", "minimal", "hostile", "several", "difficult")

# Texts of one drawing that overlap, or leave it; "1" of slack: boxes of texts have empty edges.
DRAWINGS = """
[...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length).flatMap(s => {
  const frame = s.getBoundingClientRect();
  const texts = [...s.querySelectorAll('text')];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  const out = boxes.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1 ||
    b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => 'outside: ' + t);
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [t, a] = boxes[i], [u, b] = boxes[j];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && tall > 3) out.push('overlap: ' + t + ' | ' + u);
  }
  return out;
})
"""
# Elements that are wider than the page, apart from what scrolls in its own box.
WIDE = """
[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg, .unseen, .skip') &&
  e.getClientRects().length && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 40))
"""
AXE_RUN = """
axe.run({exclude: [['svg']]}, {resultTypes: ['violations']}).then(r => r.violations
  .filter(v => ['serious', 'critical'].includes(v.impact))
  .map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert BROWSER is not None
    chromium = Chromium(BROWSER, tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name in NAMES:
        (folder / f"{name}.html").write_text(page(getattr(sample, name)()), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_asked_cut_or_run(browser: Chromium, pages: dict[str, Path], name: str) -> None:
    for width, dark in VIEWS:
        browser.show(pages[name], width, dark)
        place = f"{name}, {width} px, {'dark' if dark else 'light'}"
        asked = [
            e["request"]["url"] for n, e in browser.events if n == "Network.requestWillBeSent"
        ]
        assert [u for u in asked if not u.startswith("data:")] == [pages[name].as_uri()], place
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded",
                "Page.javascriptDialogOpening")  # fmt: skip
        assert not [event for event in browser.events if event[0] in said], place
        if dark:
            continue  # places are the same
        browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        scrolled, seen = browser.ask(sizes)
        assert scrolled <= seen, place
        assert browser.ask(WIDE) == [], place
        assert browser.ask(DRAWINGS) == [], place


# Left and right ends of the contents, of the widest drawing and the widest paragraph.
PLACES = """
['nav', 'svg.chart', 'main p:not(.first)'].map(kind => {
  const seen = [...document.querySelectorAll(kind)].map(e => e.getBoundingClientRect());
  const widest = seen.sort((a, b) => b.width - a.width)[0];
  return [widest.left, widest.right];
})
"""


def test_the_page_uses_its_width(browser: Chromium, pages: dict[str, Path]) -> None:
    """Contents beside figures where both have room, paragraphs of a readable length everywhere."""
    for width, least in ((1280, 0.9), (1024, 0.9), (390, 0.88)):
        browser.show(pages["several"], width, False)
        (left, nav), (chart, right), (begin, end) = browser.ask(PLACES)
        beside = width == 1280
        assert (right - (left if beside else chart)) / width >= least, width
        assert (nav < chart) is beside and end - begin <= 46 * 16, width


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("full", 1280, False), ("minimal", 1280, True), ("minimal", 390, False)],
)
def test_axe_finds_no_serious_fault(
    browser: Chromium, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    assert AXE is not None and AXE.origin is not None
    script = (Path(AXE.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    browser.show(pages[name], width, dark)
    if name == "minimal":  # hundreds of cells of the same kind take axe seconds
        browser.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    browser.ask(f"{script}; 0")
    assert browser.ask(AXE_RUN) == []


def test_colours_follow_light_and_dark(browser: Chromium, pages: dict[str, Path]) -> None:
    grounds = []
    for dark in (False, True):
        browser.show(pages["minimal"], 1280, dark)
        grounds.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
        fill = "getComputedStyle(document.querySelector('svg.chart text')).fill"
        assert browser.ask(fill) != grounds[-1]
    assert grounds == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]


def test_attacks_are_text_in_the_browser(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.show(pages["hostile"], 1280, False)
    text = browser.ask("document.body.textContent")
    for attack in sample.ATTACKS:
        assert attack in text, attack
    assert browser.ask("document.querySelectorAll('script, img, iframe').length") == 0
