"""The package is built as docs/design.md says: wings, each on those above it; no cycle; private names in one place."""

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "tfshard"
DESIGN = (ROOT / "docs" / "design.md").read_text()
WINGS = re.findall(r"^\| `(\w+)` \|", DESIGN.partition("\n## Wings")[2].partition("\n## ")[0], re.MULTILINE)
MODULES = {
    ".".join(("tfshard", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Where a library is wanted only if it is there.
OPTIONAL = {"keras_hub", "matplotlib", "scipy"}


def wing(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def imported(module: str) -> frozenset[str]:
    """The modules of the package that a module imports, for types only too, and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfshard":
            assert node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return frozenset(found - {module, "tfshard"})


def test_the_wings_are_those_of_the_package():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert set(WINGS) == folders | files


@pytest.mark.parametrize("module", [name for name in MODULES if wing(name) in WINGS])
def test_a_module_imports_from_its_own_wing_and_those_above_it(module):
    above = WINGS[: WINGS.index(wing(module)) + 1]
    assert sorted(name for name in imported(module) if wing(name) not in (*above, "_version")) == []


def test_no_modules_import_each_other():
    """Also not through others, nor for their types only. A wing's `__init__` hands on what its modules have."""
    edges = {name: set(imported(name)) - {name.rpartition(".")[0]} for name in MODULES}
    while leaves := [name for name, targets in edges.items() if not targets & set(edges)]:
        for name in leaves:
            del edges[name]
    assert {name: sorted(targets & set(edges)) for name, targets in edges.items()} == {}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_but_optional_libraries_is_imported_inside_a_function(module):
    found = []
    for function in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    found += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    found.append(node.module)
    assert {name.partition(".")[0] for name in found} <= OPTIONAL


@pytest.mark.parametrize("module", [name for name in MODULES if wing(name) != "_private"])
def test_private_names_are_imported_in_one_wing_only(module):
    text = MODULES[module].read_text()
    assert not re.search(r"^\s*(from|import) (keras\.src|tensorflow\.python)", text, re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_stored_on_objects_under_names_of_ours(module):
    """Graphs, tensors and functions belong to TensorFlow. What is changed on layers and metrics is a `LayerPatch`."""
    assert not re.search(r"\._tfshard\w* = |setattr\([^)]*\"_tfshard", MODULES[module].read_text())
