"""The form of the package in numbers, each with its limit: `python -m benchmarks.house`.

Exits with 1 where one is missed; `.ci/run` runs it. Lines of a function go from `def` to its
end without its docstring. Complexity is McCabe's, with everything that decides counted: 1, and one
for each `if`, `elif`, loop, `except`, `assert`, `case`, ternary, `and` or `or`, and for each `for`
and `if` of a comprehension; functions inside count for themselves. A public function is one of a
module or of a public class whose name has no leading underscore; `__init__` and properties count.
A bare constant is a number (or several) that stands alone at the level of a module, with no class
that says what it belongs to.
"""

import argparse
import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "synchromesh", ROOT / "tests"
OF_ALL = ("test_house_rules.py", "test_documents.py", "test_wheel.py")  # tests of no one folder
CHARACTERS = 120  # of a line of README and docs
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Figure:
    """One number of the table; `least` says that it must not be below its limit, else above."""

    name: str
    value: float
    limit: float | None = None  # none: for information
    least: bool = False
    where: tuple[str, ...] = ()  # what misses it, or comes nearest

    @property
    def good(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.least else self.value <= self.limit


@dataclass(frozen=True)
class Definition:
    """A function of the package."""

    place: str  # path:line name
    lines: int
    public: bool
    described: bool
    statements: int
    parameters: int
    complexity: int


def definitions(path: Path) -> Iterator[Definition]:
    """All functions of a file, those inside classes and functions too."""

    def inside(node: ast.AST, public: bool) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                own = public and not child.name.startswith("_")
                place = f"{path.relative_to(ROOT)}:{child.lineno} {child.name}"
                described = ast.get_docstring(child) is not None
                yield Definition(
                    place, _lines(child), own, described, len(child.body) - described,
                    _parameters(child.args), 1 + _decisions(child),
                )  # fmt: skip
                yield from inside(child, False)
            elif isinstance(child, ast.ClassDef):
                yield from inside(child, public and not child.name.startswith("_"))
            else:
                yield from inside(child, public)

    yield from inside(ast.parse(path.read_text()), True)


def _lines(function: Function) -> int:
    """Lines of a function without its docstring."""
    body = function.body
    described = ast.get_docstring(function) is not None
    spoken = (body[0].end_lineno or 0) - body[0].lineno + 1 if described else 0
    return (function.end_lineno or 0) - function.lineno + 1 - spoken


def code_lines(path: Path) -> int:
    """Lines of a file without docstrings, imports, comments and empty lines."""
    text = path.read_text()
    other: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            other.update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            other.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        number not in other and line.strip()[:1] not in ("", "#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def _parameters(args: ast.arguments) -> int:
    named = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in named)


DECISIONS = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert,
)  # fmt: skip


def _decisions(node: ast.AST) -> int:
    """What decides inside a function, without the functions and classes in it."""
    count = 0
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case ast.BoolOp():
                count += len(child.values) - 1
            case ast.comprehension():
                count += 1 + len(child.ifs)
            case ast.match_case(pattern=ast.MatchAs(pattern=None, name=None), guard=None):
                pass  # `case _`, as `else`
            case ast.match_case():
                count += 1
            case _:
                count += isinstance(child, DECISIONS)
        count += _decisions(child)
    return count


def bare_constants(path: Path) -> Iterator[str]:
    """Names at the level of a module that stand for a number, or a tuple of numbers."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[target], value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pass
            case _:
                continue
        if _numeric(value):
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for name in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(name)}"


def _numeric(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.UnaryOp(operand=operand):
            return _numeric(operand)
        case ast.BinOp(left=left, right=right):
            return _numeric(left) and _numeric(right)
        case ast.Tuple(elts=[_, *_] as elements):
            return all(map(_numeric, elements))
    return False


def shared_names(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Class names that stand in several files."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return {name: where for name, where in found.items() if len(set(where)) > 1}


def outside_the_tree() -> list[str]:
    """Test files in a folder that the package does not have, or in none; or of benchmarks."""
    places = {p: p.parent.relative_to(TESTS) for p in TESTS.rglob("test_*.py")}
    return [
        str(p.relative_to(ROOT))
        for p, place in places.items()
        if p.name not in OF_ALL and place != Path("benchmarks")
        and (place == Path(".") or not (PACKAGE / place).is_dir())
    ]  # fmt: skip


def pages() -> Iterator[tuple[str, Path, str]]:
    """README, CONTRIBUTING and docs line by line: where, the page, the line."""
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))):
        for i, line in enumerate(path.read_text().splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{i}", path, line


def names_of_nothing() -> list[str]:
    """Files that pages name and that do not exist, and links to a class that its file lacks."""
    found = []
    for place, page, line in pages():
        for name in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|md|txt|yaml))\b", line):
            places = (base / name for base in (ROOT, PACKAGE, TESTS, page.parent))
            if not (name.startswith("path/to/") or any(file.exists() for file in places)):
                found.append(f"{place} {name}")
        if link := re.match(r"\[`(\w+)`\]: (\S+)", line):
            target = page.parent / link[2]
            defined = rf"^(class|def) {link[1]}\b|^{link[1]} = "
            if not (target.is_file() and re.search(defined, target.read_text(), re.M)):
                found.append(f"{place} {link[2]} {link[1]}")
    return found


def cycles() -> list[str]:
    from tests.test_house_rules import cycles

    return sorted(cycles())


def figures() -> list[Figure]:
    """The whole table."""
    paths = sorted(PACKAGE.rglob("*.py"))
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in paths}
    functions = [d for p in paths for d in definitions(p)]
    lines = [d.lines for d in functions]
    public = [d for d in functions if d.public and d.statements > 1]
    silent = [d.place for d in public if not d.described]
    complexity = {d.place: d.complexity for d in functions}
    above = _above(complexity, 10)
    constants = tuple(place for p in paths for place in bare_constants(p))
    parameters = _above({d.place: d.parameters for d in functions}, 8)
    names = shared_names(paths)
    longest = _above({d.place: d.lines for d in functions}, 60)
    circles, astray = cycles(), outside_the_tree()
    wide = _above({place: len(line) for place, _, line in pages()}, CHARACTERS)
    unfounded = names_of_nothing()
    return [
        Figure("files", len(paths), 453),
        Figure("lines of all files", sum(lengths.values()), 72_950),
        Figure("of these code, without imports", sum(map(code_lines, paths))),
        Figure("lines of a file, median", median(lengths.values()), 150),
        Figure("lines of a file, most", max(lengths.values()), 400, where=_above(lengths, 400)),
        Figure("lines of a function, median", median(lines), 8),
        Figure("lines of a function, 90 of 100 below", quantiles(lines, n=10)[-1], 25),
        Figure("lines of a function, most", max(lines), 60, where=longest),
        Figure("complexity, most", max(complexity.values()), 18, where=_above(complexity, 18)),
        Figure("complexity above 10, per cent", 100 * len(above) / len(lines), 4, where=above),
        Figure("modules in import cycles", len(circles), 0, where=tuple(circles)),
        Figure("class names in several files", len(names), 2, where=tuple(sorted(names))),
        Figure("functions of more than 8 parameters", len(parameters), 4, where=parameters),
        Figure("bare constants of modules", len(constants), 40, where=constants),
        Figure(
            "longer public functions with a docstring, %",
            100 * (1 - len(silent) / len(public)), 90, least=True, where=tuple(silent),
        ),
        Figure("test files outside the package's tree", len(astray), 0, where=tuple(astray)),
        Figure(f"lines of the docs above {CHARACTERS} characters", len(wide), 0, where=wide),
        Figure("names in the docs of nothing", len(unfounded), 0, where=tuple(unfounded)),
    ]  # fmt: skip


def _above(values: dict[str, int], limit: int) -> tuple[str, ...]:
    """Places above a limit, the farthest first."""
    chosen = sorted((v, k) for k, v in values.items() if v > limit)[::-1]
    return tuple(f"{k} ({v})" for v, k in chosen)


def show(found: Sequence[Figure], every: bool) -> None:
    for f in found:
        limit = "" if f.limit is None else f"{'>=' if f.least else '<='} {f.limit:g}"
        print(f"{'   ' if f.good else 'NOT'} {f.name:45} {f.value:9.5g} {limit}")
        if not f.good or every:
            for place in f.where:
                print(f"        {place}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="every place, also where all is well")
    parser.add_argument("--json", action="store_true", help="one document on standard output")
    options = parser.parse_args()
    found = figures()
    if options.json:
        print(json.dumps({f.name: f.value for f in found}))
    else:
        show(found, options.all)
    return 0 if all(f.good for f in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
