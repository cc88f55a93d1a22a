"""The house rules: docstrings, the direction of imports, names of modules."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "synchromesh"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EVERYTHING = sorted(
    [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
)
RUN = ("engine", "measure", "state", "adapt", "trainer", "cli", "lab")  # what acts
VOCABULARY = (
    "catalogue", "cluster", "component", "document", "explain", "fault", "holding", "layout",
    "placement", "plan", "schedule", "traffic", "transfer", "word", "workload",
)  # fmt: skip

# part of the package -> parts that it must not import
FORBIDDEN = {
    **dict.fromkeys(VOCABULARY, (*RUN, "cost", "planner")),
    "trace": (*RUN, "cost", "planner", "workloads"),
    "cost": (*RUN, "planner", "workloads"),
    "planner": (*RUN, "workloads"),
    "engine": ("cost", "planner", "measure", "state", "adapt", "trainer", "cli", "workloads"),
    "state": ("cost", "planner", "measure", "adapt", "trainer", "cli", "workloads"),
    "measure": ("cost", "planner", "adapt", "trainer", "cli"),
    "lab": ("trace", "cost", "planner", "workloads", *RUN[:-1]),  # but itself
    "workloads": ("engine", "cost", "planner", "lab", "trainer", "cli"),
}
PURE = (*VOCABULARY, "trace", "cost", "planner", "workloads")  # import no torch.distributed


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """`trace` of `synchromesh.trace.rules.linear`; empty for the package itself."""
    return [*module.split("."), ""][1]


def imports(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, also inside functions."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")
            base = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def parts_imported(path: Path) -> set[str]:
    return {part_of(m) for m in imports(path) if m.startswith("synchromesh.")}


def test_imports_are_seen_whatever_their_form() -> None:
    folder = PACKAGE / "trace"
    assert "state" in parts_imported(PACKAGE / "trainer.py")
    assert "placement" in set().union(*(parts_imported(p) for p in folder.glob("*.py")))
    assert "trace" in set().union(
        *(parts_imported(p) for p in folder.glob("*.py"))
    )  # `from .step`


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_has_a_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring and len(docstring.splitlines()[0]) > 10, "say in one line what the module is"


def test_direction_of_imports() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {part}"
        for path in SOURCES
        for part in sorted(parts_imported(path) & set(FORBIDDEN.get(part_of(name_of(path)), ())))
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_pure_does_not_import_torch_distributed() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if part_of(name_of(path)) in PURE
        and any(m.startswith("torch.distributed") for m in imports(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_named_after_nothing() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
    parts = {part: path for path in EVERYTHING for part in (*path.parts[-3:-1], path.stem)}
    assert not vague & set(parts), [str(parts[v]) for v in vague & set(parts)]
