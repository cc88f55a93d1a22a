"""Colours of the page: inks, each with a value on light and on dark ground.

An ink is at least 3:1 against both grounds, text at least 4.5:1 (WCAG 2.2, 1.4.3 and 1.4.11).
Nothing rests on colour alone: strategies have a marker, layouts and parts a pattern, all a label.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ink:
    """A colour by its name, `--name` in the style sheet."""

    name: str
    light: str
    dark: str

    @property
    def paint(self) -> str:
        """A colour that stands for the ink in a drawing; `drawing` replaces it by the name."""
        return f"#00{256 + list(INKS).index(self.name):04x}"


@dataclass(frozen=True)
class StrategyMark:
    """How a strategy is drawn everywhere: ink, marker; rivals are hollow and dashed."""

    ink: Ink
    marker: str
    rival: bool = False


@dataclass(frozen=True)
class Fill:
    """How a part of a whole is drawn: ink, pattern (of matplotlib), label."""

    ink: Ink
    hatch: str
    label: str


INKS: dict[str, Ink] = {
    name: Ink(name, light, dark)
    for name, light, dark in (
        ("ground", "#ffffff", "#15181c"), ("text", "#1c2126", "#e7eaee"),
        ("muted", "#57606a", "#a3adb8"), ("grid", "#dde1e6", "#343b44"),
        ("single", "#6b7280", "#9aa3af"), ("data", "#0b6fb8", "#58a9e8"),
        ("tensor", "#008577", "#2fc3b0"), ("pipeline", "#c2570c", "#f4934d"),
        ("hybrid", "#8e3a80", "#d583c8"), ("auto", "#c8102e", "#ff7081"),
        ("ddp", "#3a83ad", "#8fc4e8"), ("fsdp2", "#8a7400", "#d8bf3f"),
        ("torch-pipeline", "#8a5a2b", "#cfa071"),
        ("other-1", "#4b5fb5", "#93a3f0"), ("other-2", "#5f7a1f", "#a9c95c"),
        ("other-3", "#a0446b", "#ef8fb4"), ("other-4", "#3f6f6f", "#8cc0c0"),
        ("computing", "#5577a6", "#7d9fd1"), ("transfer", "#cc5a14", "#f0985a"),
        ("waiting", "#9a7d00", "#dcbc45"), ("rest", "#868e98", "#77808b"),
    )
}  # fmt: skip

_MARKERS = {
    "single": "o", "data": "s", "tensor": "^", "pipeline": "D", "hybrid": "v", "auto": "*",
    "ddp": "s", "fsdp2": "P", "torch-pipeline": "D",
}  # fmt: skip
_RIVALS = ("ddp", "fsdp2", "torch-pipeline")
_OTHERS = (("other-1", "X"), ("other-2", "p"), ("other-3", "h"), ("other-4", "<"))

PARTS: Mapping[str, Fill] = {
    "computation": Fill(INKS["computing"], "", "computation"),
    "hidden": Fill(INKS["computing"], "//", "computation, communication hidden"),
    "transfer": Fill(INKS["transfer"], "\\\\", "exposed communication: transfer"),
    "waiting": Fill(INKS["waiting"], "--", "exposed communication: waiting for slower devices"),
    "other": Fill(INKS["rest"], "", "other"),
}
MEMORY: Mapping[str, Fill] = {
    "parameters": Fill(INKS["data"], "", "parameters"),
    "gradients": Fill(INKS["pipeline"], "//", "gradients"),
    "states": Fill(INKS["tensor"], "\\\\", "optimizer states"),
    "buffers": Fill(INKS["rest"], "", "buffers"),
    "activations": Fill(INKS["hybrid"], "--", "activations"),
}
LAYOUTS: Mapping[str, Fill] = {
    "data": Fill(INKS["data"], "", "data: rows divided"),
    "tensor": Fill(INKS["tensor"], "//", "tensor: parameters divided"),
    "hybrid": Fill(INKS["hybrid"], "xx", "hybrid: rows and parameters divided"),
    "single": Fill(INKS["single"], "--", "single: one device"),
}
_LAYOUT = Fill(INKS["other-1"], "\\\\", "other layouts")


def marks(strategies: Iterable[str]) -> dict[str, StrategyMark]:
    """How each strategy is drawn; plans that were given as text share the further inks."""
    drawn: dict[str, StrategyMark] = {}
    others = 0
    for strategy in dict.fromkeys(strategies):
        name = strategy.partition(":")[0]
        if name in _MARKERS and not any(drawn[s].ink.name == name for s in drawn):
            drawn[strategy] = StrategyMark(INKS[name], _MARKERS[name], name in _RIVALS)
        else:
            ink, marker = _OTHERS[others % len(_OTHERS)]
            drawn[strategy] = StrategyMark(INKS[ink], marker)
            others += 1
    return drawn


def layout_fill(layout: str) -> Fill:
    """How a component's layout is drawn, by its kind: the word before the options."""
    return LAYOUTS.get(layout.partition(":")[0].strip(), _LAYOUT)


def style(dark: bool) -> str:
    """The inks as custom properties of CSS."""
    return "".join(f"--{i.name}:{i.dark if dark else i.light};" for i in INKS.values())
