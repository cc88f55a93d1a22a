"""A layer profile: what somebody measured of each layer of a model, as CSV or in PipeDream's form.

    node2 -- Conv2d(3, 64, ...) -- forward_compute_time=22.307, backward_compute_time=24.613,
        activation_size=1644167168.000, parameter_size=7168.000           (one line; ms, bytes)
    <tab>node2 -- node3                                                   node 3 reads node 2

Source: Narayanan et al. 2019, "PipeDream" (SOSP), github.com/msr-fiddle/pipedream. Sizes are of
the minibatch that was profiled, on one device. Several values of a layer are a list,
`[1.0; 2.0]`. `Input` nodes contain data loading and are left out.

    component,rows,forward_seconds,backward_seconds,parameter_bytes,output_bytes
    conv1,32,0.0013,0.0027,7168,25690112          each reads what the one before it makes; several
    conv1,64,0.0025,0.0051,7168,51380224          rows of a component are a line of seconds"""

import csv
import heapq
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from math import isfinite
from pathlib import Path

from synchromesh.values.compute import Curve

FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class Layer:
    """A layer with what was measured of one minibatch: bytes, seconds of its parts (1: all)."""

    name: str
    description: str
    forward: Curve
    backward: Curve
    value: float  # bytes that it makes
    parameters: float  # bytes

    @property
    def kept(self) -> float:
        """Bytes that stay for backward: its value, unless that is written over its input's."""
        return 0.0 if "inplace" in self.description else self.value


@dataclass(frozen=True)
class LayerProfile:
    """Layers in an order in which they can run; `readers[i]` are those that read what i makes."""

    layers: tuple[Layer, ...]
    readers: tuple[tuple[int, ...], ...]
    measured_rows: int | None = None  # of the minibatch, where the file says it

    @cached_property
    def over_cuts(self) -> tuple[float, ...]:
        """Bytes of all values made before and read behind each cut, 0 .. n."""
        count = len(self.layers)
        sizes = [0.0] * (count + 1)
        for i, readers in enumerate(self.readers):
            for cut in range(i + 1, max(readers, default=i) + 1):
                sizes[cut] += self.layers[i].value
        return tuple(sizes)

    @property
    def rows(self) -> int | None:
        """Rows of the minibatch, else by the last linear layer (4 bytes a value); None: not
        known."""
        if self.measured_rows is not None:
            return self.measured_rows
        for layer in reversed(self.layers):
            match = re.search(r"\bout_features=([1-9][0-9]{0,8})\b", layer.description)
            if match:
                rows = layer.value / 4 / int(match[1])
                return int(rows) if rows >= 1 and rows == int(rows) else None
        return None

    @property
    def needed_rows(self) -> int:
        """`rows`. ValueError where they are not known."""
        if self.rows is None:
            raise ValueError(
                "the profile does not say of how many rows it is, as it has no linear layer: "
                "--profile-rows N does, in Python `measured_rows`"
            )
        return self.rows


def load(path: Path) -> LayerProfile:
    """The profile of a file. ValueError names the line at fault."""
    try:
        text = path.read_text("utf-8")
        return (parse_csv if path.suffix == ".csv" else parse)(text, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a layer profile: {error}") from error


def parse(text: str, name: str = "profile") -> LayerProfile:
    """The profile that a text describes. ValueError with its name and the line at fault."""
    layers, edges = _lines(text, name)
    for edge, number in edges.items():
        for node in edge:
            if node not in layers:
                raise ValueError(f"{name}: line {number}: there is no layer {node!r}")
    real = {node: layer for node, layer in layers.items() if layer is not None}
    if not real:
        raise ValueError(f"{name}: line 1: there is no layer besides inputs; {_FORM}")
    return _ordered(real, {e: n for e, n in edges.items() if real.keys() >= set(e)}, name)


COLUMNS = (
    "component", "rows", "forward_seconds", "backward_seconds", "parameter_bytes", "output_bytes",
)  # fmt: skip


def parse_csv(text: str, name: str = "profile") -> LayerProfile:
    """The profile of a table, a chain of its components. ValueError with the line at fault."""
    heading, *lines = csv.reader(text.splitlines()) if text.strip() else [[]]
    if tuple(map(str.strip, heading)) != COLUMNS or not lines:
        raise ValueError(f"{name}: line 1 should read `{','.join(COLUMNS)}`, with lines behind it")
    measured: dict[str, dict[int, Sequence[float]]] = {}
    for number, line in enumerate(lines, 2):
        component, rows, figures = _row(line, f"{name}: line {number}")
        if rows in measured.setdefault(component, {}):
            raise ValueError(f"{name}: line {number}: {component} with {rows} rows stands twice")
        measured[component][rows] = figures
    most = max(max(of) for of in measured.values())
    if lacking := [c for c, of in measured.items() if most not in of]:
        raise ValueError(f"{name}: {lacking[0]} has no line with {most} rows, as others have")

    def layer(component: str, of: Mapping[int, Sequence[float]]) -> Layer:
        there, back = (Curve.of((n / most, x[k]) for n, x in of.items()) for k in (0, 1))
        *_, parameters, value = of[most]
        return Layer(component, "", there, back, value, parameters)

    layers = tuple(layer(*item) for item in measured.items())
    readers = tuple((i + 1,) if i + 1 < len(layers) else () for i in range(len(layers)))
    return LayerProfile(layers, readers, most)


def _row(line: Sequence[str], at: str) -> tuple[str, int, Sequence[float]]:
    """Component, rows and the other figures of a line."""
    try:
        component, rows, *figures = (x.strip() for x in line)
        numbers = [float(x) for x in figures]
        count = int(rows)
    except ValueError:
        component, count, numbers = "", 0, []
    good = component and len(numbers) == 4 and all(isfinite(x) and x >= 0 for x in numbers)
    if not good or count < 1:
        raise ValueError(f"{at} should have a name, rows from 1 and four numbers from 0")
    return component, count, numbers


def _lines(
    text: str, name: str, most: int = 10_000
) -> tuple[dict[str, Layer | None], dict[tuple[str, str], int]]:
    """At most so many layers, and the line of each edge."""
    layers: dict[str, Layer | None] = {}  # None: an input
    edges: dict[tuple[str, str], int] = {}  # the line of each
    for number, line in enumerate(text.splitlines(), 1):
        at = f"{name}: line {number}"
        if line.strip() and line.startswith(("\t", " ")):
            edges.setdefault(_edge(line, at), number)
        elif line.strip():
            node, layer = _layer(line, at)
            if node in layers:
                raise ValueError(f"{at}: {node!r} stands there twice")
            if len(layers) == most:
                raise ValueError(f"{at}: more than {most} layers are no profile of a model")
            layers[node] = layer
    return layers, edges


def _edge(line: str, at: str) -> tuple[str, str]:
    ends = [part.strip() for part in line.split(" -- ")]
    if len(ends) != 2 or not all(ends):
        raise ValueError(f"{at} should read `node1 -- node2`, not {line.strip()[:60]!r}")
    return ends[0], ends[1]


_FORM = "a layer reads `node1 -- DESCRIPTION -- " + ", ".join(f"{f}=NUMBER" for f in FIGURES) + "`"


def _layer(line: str, at: str) -> tuple[str, Layer | None]:
    parts = [part.strip() for part in line.split(" -- ")]
    if len(parts) < 3:
        raise ValueError(f"{at} is no layer: {_FORM}")
    node, description, text = parts[:3]
    if not re.fullmatch(r"[A-Za-z0-9_.]{1,80}", node):
        raise ValueError(f"{at}: {node[:60]!r} is no name of a layer")
    given = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", text))
    figures = [_figure(given, name, at) for name in FIGURES]
    if description.startswith("Input"):
        return node, None
    forward, backward, value, parameters = figures
    there, back = (Curve(((1.0, ms / 1e3),)) for ms in (forward, backward))
    return node, Layer(node, description, there, back, value, parameters)


def _figure(given: Mapping[str, str], name: str, at: str) -> float:
    if name not in given:
        raise ValueError(f"{at}: {name} is missing; {_FORM}")
    try:
        numbers = [float(x) for x in re.split(r"[;,]", given[name].strip("[]")) if x.strip()]
    except ValueError:
        numbers = []
    if not numbers or not all(isfinite(x) and x >= 0 for x in numbers):
        raise ValueError(f"{at}: {name}={given[name][:40]} is no number from 0")
    return sum(numbers)


def _ordered(
    layers: Mapping[str, Layer], edges: Mapping[tuple[str, str], int], name: str
) -> LayerProfile:
    """Layers in topological order; of those that can come next the one of the least number."""
    sorter = TopologicalSorter[str](dict.fromkeys(layers, ()))
    behind: dict[str, list[str]] = {node: [] for node in layers}
    for a, b in edges:
        sorter.add(b, a)
        behind[a].append(b)
    with suppress(CycleError):  # which is said below, with its line
        sorter.prepare()
    ready = [(_number(node), node) for node in sorter.get_ready()]
    heapq.heapify(ready)
    order: dict[str, int] = {}
    while ready:
        _, node = heapq.heappop(ready)
        order[node] = len(order)
        sorter.done(node)
        for other in sorter.get_ready():
            heapq.heappush(ready, (_number(other), other))
    if len(order) < len(layers):
        number = min(n for (a, b), n in edges.items() if a not in order and b not in order)
        raise ValueError(f"{name}: line {number}: layers there read each other in a circle")
    return LayerProfile(
        tuple(layers[node] for node in order),
        tuple(tuple(sorted(order[other] for other in behind[node])) for node in order),
    )


def _number(node: str) -> tuple[int, str]:
    digits = re.search(r"[0-9]{1,18}", node)
    return (int(digits[0]) if digits else 0, node)
