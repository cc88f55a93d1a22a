"""Styles that a page's drawings share: a class for each, written once.

<path style="fill:none;stroke:var(--grid)" .../>   ->   <path class="s3" .../>"""

import re

_STYLE = re.compile(r' style="([^"]*)"')


class SharedStyles:
    """The styles of a page's drawings, by the class that stands for each."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def classed(self, drawing: str) -> str:
        """An SVG element with classes for its styles; those with an id in them stay."""

        def named(match: re.Match[str]) -> str:
            style = match[1]
            if "#" in style:
                return match[0]
            known = self._classes
            return f' class="{known.setdefault(style, f"s{len(known)}")}"'

        return _STYLE.sub(named, drawing)

    def rules(self) -> str:
        """The style sheet of all classes so far."""
        return "\n".join(f".chart .{name}{{{style}}}" for style, name in self._classes.items())
