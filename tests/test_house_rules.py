"""The house rules: docstrings, the layers of the package, no cycles, tests in the same tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import synchromesh

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "synchromesh"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EVERYTHING = sorted(
    [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
)

# The rooms in the order in which a plan comes about and is run: a room imports itself and those
# above it. The package's own face, its single files, may import all.
LAYERS = (
    "values",  # what all speak of
    "workloads",
    "catalogue",
    "trace",
    "trace.rules",
    "trace.capture",
    "trace.partition",
    "cost",
    "planner",
    "planner.chain",
    "planner.stages",
    "planner.decision",
    "compression",
    "programs",
    "estimate",
    "results",
    "simulator",
    "report",  # up to here: facts, predictions and documents, no torch.distributed
    "launcher",
    "lab",
    "engine",
    "profiling",
    "planning",
    "checkpoint",
    "data",
    "adapt",
    "training",
    "verify",
    "runs",
    "study",
    "doctor",
    "integrations",
    "cli",
    "",
)
PURE = LAYERS[: LAYERS.index("report") + 1]


def name_of(path: Path) -> str:
    """`trace.rules.linear`; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCES}


def test_no_room_hides_what_the_package_exports() -> None:
    """Importing a room sets its name on the package, over the function of that name."""
    assert not {name for name in MODULES if name in synchromesh.__all__}


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also inside functions; of names that are
    imported from a package, the module where there is one."""
    inside = name_of(path).split(".")
    package = ["synchromesh", *(inside if path.name == "__init__.py" else inside[:-1])]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{module}.{alias.name}"
                found.add(name if name.removeprefix("synchromesh.") in MODULES else module)
    return found


def ours(path: Path) -> set[str]:
    """The modules of the package that a file imports, without the package's name."""
    found = {"" if m == "synchromesh" else m.removeprefix("synchromesh.") for m in imports(path)}
    return (found & set(MODULES)) - {name_of(path)}


ARROWS = {name: ours(path) for name, path in MODULES.items()}


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    found = next((name for name in names if name in LAYERS), None)
    return "" if len(parts) == 1 and found is None else found


def reached(start: str) -> set[str]:
    """All modules that are imported on the way when `start` is."""
    found, open_ = {start}, [start]
    while open_:
        for module in ARROWS[open_.pop()] - found:
            found.add(module)
            open_.append(module)
    return found


def cycles() -> Iterator[str]:
    for name in MODULES:
        if any(name in reached(other) for other in ARROWS[name]):
            yield name


def test_imports_are_seen_whatever_their_form() -> None:
    assert "checkpoint.checkpoint" in ARROWS["training.trainer"]
    assert "planner.chain.problem" in ARROWS["planner.chain.table"]  # `from .problem`
    assert "workloads.target" in ARROWS["cli.train"]  # inside a function
    assert "values.document" in ARROWS["values.plan"]  # `from synchromesh.values import document`


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring and len(docstring.splitlines()[0]) > 10, "say in one line what the module is"


def test_every_file_has_a_layer() -> None:
    assert not [name for name in MODULES if layer_of(name) is None]


def test_contributing_draws_the_layers() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    lines = page.partition("```layers\n")[2].partition("```")[0].splitlines()
    rooms = [name for name in LAYERS if name and (PACKAGE / name.replace(".", "/")).is_dir()]
    drawn = [line.split()[0] for line in lines if line[0] != " "]  # else it goes on
    line = rooms.index(PURE[-1]) + 1  # from which torch.distributed may be imported
    assert [n for n in drawn if not n.startswith("-")] == rooms
    assert drawn[line].startswith("-")


def test_imports_point_down_the_layers() -> None:
    wrong = []
    for name, found in ARROWS.items():
        layer = LAYERS.index(layer_of(name) or "")
        wrong += [f"{name} imports {m}" for m in found if LAYERS.index(layer_of(m) or "") > layer]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_imports_itself_by_others() -> None:
    assert not list(cycles())


def _is_distributed(path: Path) -> bool:
    return any(name.startswith("torch.distributed") for name in imports(path))


def test_what_is_pure_does_not_import_torch_distributed() -> None:
    wrong = [
        name for name, path in MODULES.items() if layer_of(name) in PURE and _is_distributed(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_plan_for_absent_devices_needs_no_process_groups() -> None:
    found = reached("planning.offline")
    assert "programs.compute" in found, "programs are walked on the way"
    wrong = [
        m for m in found if any(n.startswith("torch.distributed") for n in imports(MODULES[m]))
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_tests_lie_in_the_tree_of_what_they_test() -> None:
    tests = ROOT / "tests"
    folders = {p.parent.relative_to(tests) for p in tests.rglob("test_*.py")}
    folders -= {Path("."), Path("benchmarks")}
    assert not [str(f) for f in folders if not (PACKAGE / f).is_dir()]
    of_all = {"test_documents.py", "test_house_rules.py", "test_wheel.py"}
    assert {p.name for p in tests.glob("test_*.py")} == of_all


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    parts = {part: path for path in EVERYTHING for part in (*path.parts[-3:-1], path.stem)}
    assert not vague & set(parts), [str(parts[v]) for v in vague & set(parts)]
