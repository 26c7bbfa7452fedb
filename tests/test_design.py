"""The package follows docs/design.md: layered subpackages, no import cycles, and private names in one place."""

import ast
import collections
import dataclasses
import functools
import inspect
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest
import tensorflow as tf

import tfshard
from tfshard.layouts.config import (
    GroupPolicy,
    Microbatches,
    Offload,
    Precision,
    ReshardPolicy,
    ShardingConfig,
)
from tfshard.storage import ShardedVariable, passes, steps
from tfshard.storage.microbatch_step import MicrobatchStep
from tfshard.storage.steps import Step

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "tfshard"
DESIGN = (ROOT / "docs" / "design.md").read_text()
SUBPACKAGES = re.findall(r"^\| `(\w+)` \|", DESIGN.partition("\n## Subpackages")[2].partition("\n## ")[0], re.MULTILINE)
MODULES = {
    ".".join(("tfshard", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
# Libraries that are imported only if they are installed.
OPTIONAL = {"keras_hub", "matplotlib", "safetensors", "scipy"}
# The one module of the runtime that calls plans. It imports them late, inside functions and for types.
SEAM, PLANS = "tfshard.layouts.planner", "tfshard.planning"
# The subpackages that a training step needs.
RUNTIME = {
    "_private", "callbacks", "checkpoints", "clusters",
    "collectives", "devices", "errors", "graph", "launch", "layers", "layouts",
    "operations", "presets", "storage", "training",
}  # fmt: skip


def subpackage(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def imported(module: str) -> frozenset[str]:
    """Return the modules of the package that a module imports, also for types only and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfshard":
            assert node.module
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return frozenset(found - {module, "tfshard"})


def imported_beside_the_seam(module: str) -> set[str]:
    return {name for name in imported(module) if module != SEAM or not name.startswith(PLANS)}


def test_the_subpackages_are_those_of_the_table():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert set(SUBPACKAGES) == folders | files


@pytest.mark.parametrize("module", [name for name in MODULES if subpackage(name) in SUBPACKAGES])
def test_a_module_imports_from_its_subpackage_and_those_above_it(module):
    above = SUBPACKAGES[: SUBPACKAGES.index(subpackage(module)) + 1]
    assert (
        sorted(name for name in imported_beside_the_seam(module) if subpackage(name) not in (*above, "_version")) == []
    )


@pytest.mark.parametrize("module", [name for name in MODULES if subpackage(name) in RUNTIME])
def test_the_runtime_imports_no_plan(module):
    """The runtime imports plans only through the seam, including indirect imports and imports inside functions."""
    reached, left = set(), [module]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += imported_beside_the_seam(name)
    assert sorted(name for name in reached if name.startswith(PLANS)) == []


# Modules that hand the public names of extensions to users. They contain imports only.
HANDED_THROUGH = {"tfshard", "tfshard.layers", "tfshard.pipelining"}


def test_core_imports_no_extension():
    importers = {
        name
        for name in MODULES
        if subpackage(name) != "contrib" and any(subpackage(found) == "contrib" for found in imported(name))
    }
    assert importers == HANDED_THROUGH
    for name in HANDED_THROUGH - {"tfshard"}:
        kinds = {type(node) for node in ast.parse(MODULES[name].read_text()).body}
        assert kinds == {ast.Expr, ast.ImportFrom, ast.Assign}, name


EXTENSIONS = sorted(path.parent.name for path in (PACKAGE / "contrib").glob("*/__init__.py"))


def identifiers(text: str) -> set[str]:
    """Return the identifiers in code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def named(text: str) -> set[str]:
    """Return the identifiers of a module, and the capitalized names in backticks of its comments and strings.

    A public name with the package in front is text for users.
    """
    return identifiers(text) | set(re.findall(r"`(?!tfshard\.)(?:[a-z_]+\.)*([A-Z]\w+)", text))


CORE = [name for name in MODULES if subpackage(name) != "contrib" and name not in HANDED_THROUGH]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_core_names_no_class_of_an_extension(extension):
    """The core asks extension points. It does not know which extensions there are."""
    prefix = f"tfshard.contrib.{extension}"
    trees = [ast.parse(path.read_text()) for name, path in MODULES.items() if f"{name}.".startswith(f"{prefix}.")]
    classes = {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes, "premise: the extension defines classes"
    found = {name: sorted(classes & named(MODULES[name].read_text())) for name in sorted(CORE)}
    assert {name: names for name, names in found.items() if names} == {}


# The option of users. These modules hand its value to the extension that registered the value.
HANDS_OPTION_ON = {"training.strategy", "planning.analyzer", "planning.advice", "planning.links"}
# Formats of files have compression, too.
FILE_FORMATS = {"checkpoints.keras_files"}


@pytest.mark.parametrize("module", CORE)
def test_core_knows_compressed_gradients_only_as_a_reduction(module):
    """The config, layouts, steps, plans and checkpoints know `GradientReduction`."""
    words = identifiers(MODULES[module].read_text())
    found = {name for name in words if re.search("compress|power_?sgd", name, re.IGNORECASE)}
    where = module.removeprefix("tfshard.")
    assert where in FILE_FORMATS or found == ({"compression"} if where in HANDS_OPTION_ON else set())


def test_each_extension_has_a_readme_of_ten_lines():
    for folder in sorted(path.parent for path in (PACKAGE / "contrib").glob("*/__init__.py")):
        lines = (folder / "README.md").read_text().splitlines()
        assert 5 <= len(lines) <= 12, folder
        assert {"**What**", "**For whom**", "**State**", "**Tried on**"} <= set(
            re.findall(r"\*\*[\w ]+\*\*", "\n".join(lines))
        )


def test_no_modules_import_each_other():
    """Includes indirect imports and imports for types. A subpackage's `__init__` only re-exports its modules' names."""
    edges = {name: imported_beside_the_seam(name) - {name.rpartition(".")[0]} for name in MODULES}
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
    allowed = OPTIONAL | ({PLANS} if module == SEAM else set())
    assert {name if name == PLANS else name.partition(".")[0] for name in found} <= allowed


@pytest.mark.parametrize("module", [name for name in MODULES if subpackage(name) != "_private"])
def test_private_names_are_imported_in_one_wing_only(module):
    text = MODULES[module].read_text()
    assert not re.search(r"^\s*(from|import) (keras\.src|tensorflow\.python)", text, re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_stored_on_objects_under_names_of_ours(module):
    """Graphs, tensors and functions belong to TensorFlow. Changes of layers and metrics are `LayerPatch`es."""
    assert not re.search(r"\._tfshard\w* = |setattr\([^)]*\"_tfshard", MODULES[module].read_text())


# Users type these settings; each of these functions packs them into a `ShardingConfig`.
DOORS = {
    "ShardedStrategy.__init__", "ParameterAnalyzer.analyze", "plan", "advise", "simulate", "Simulator.__init__",
}  # fmt: skip


def settings() -> set[str]:
    """Return the names of all settings: user options, and the fields of the config and its policies."""
    typed = set(inspect.signature(tfshard.ShardedStrategy.__init__).parameters) - {"self", "mesh"}
    policies = (ShardingConfig, ReshardPolicy, Precision, Microbatches, Offload, GroupPolicy)
    fields = {field.name for policy in policies for field in dataclasses.fields(policy)}
    return typed | fields | {"shard_slots", "shard_grads", "shard_params"}


def functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions and methods of a module with their qualified names."""
    tree = ast.parse(MODULES[module].read_text())
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                yield f"{node.name}.{child.name}" if isinstance(node, ast.ClassDef) else child.name, child


@pytest.mark.parametrize("module", [name for name in MODULES if name != "tfshard.layouts.config"])
def test_only_the_doors_list_settings(module):
    """All other functions take the full `ShardingConfig`, so a new setting needs one field and its use."""
    known, lists = settings(), {}
    for name, function in functions(module):
        parameters = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
        if len(found := [each for each in parameters if each in known]) > 2:
            lists[name] = found
    assert set(lists) <= DOORS, lists


def test_each_setting_is_one_field():
    policies = (ShardingConfig, ReshardPolicy, Precision, Microbatches, Offload, GroupPolicy)
    names = [field.name for policy in policies for field in dataclasses.fields(policy)]
    grouped = {"reshard", "precision"}  # The names of policies. Their fields are listed separately.
    assert sorted(set(names) - grouped) == sorted(name for name in names if name not in grouped)


def test_no_two_classes_have_the_same_name():
    """A leading underscore makes no difference to a reader."""
    found = collections.defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


# In a pipeline, a stage is a pipeline stage.
@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("tfshard.contrib.pipeline")])
def test_no_code_compares_the_number_of_a_zero_stage(module):
    """Code asks `shard_params`, `shard_grads` and `shard_slots`."""
    found = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            names = [side for side in sides if re.search(r"\bstage$|zero_stage$|\.number$", side)]
            numbers = [side for side in sides if re.fullmatch(r"[0-3]|[\[(]([0-3](, )?)+[\])]", side)]
            if names and numbers:
                found.append(ast.unparse(node))
    assert found == []


# --- Steps --------------------------------------------------------------------------------------------

# IdentityNs that order nothing: custom gradients, and the plan's picture of a step.
OTHER_IDENTITIES = {"tfshard._private.graphs", "tfshard.storage.unshard_schedule"}


@pytest.mark.parametrize("module", [name for name in MODULES if subpackage(name) != "planning"])
def test_barriers_are_made_in_one_module(module):
    """`storage/barrier.py` knows how an operation is ordered so that the compilers leave the order alone."""
    makes_identities = re.search(r"\b(IdentityN|identity_n)\(", MODULES[module].read_text()) is not None
    assert makes_identities == (module in OTHER_IDENTITIES | {"tfshard.storage.barrier"})


def test_passes_are_functions_of_the_record_in_files_of_their_own():
    assert all(list(inspect.signature(each).parameters) == ["record", "barrier"] for each in passes.PASSES)
    assert len({each.__module__ for each in passes.PASSES}) == len(passes.PASSES)


def test_a_step_has_few_attributes():
    assert len(vars(Step(None))) <= 8
    assert len(vars(MicrobatchStep(Step(None), tf.Graph(), {}, None))) <= 10


def test_a_thread_has_one_context():
    """Scopes of steps and updates replace a frozen object. All other code asks `steps` for it."""
    local = {
        name for name in MODULES if "threading.local" in MODULES[name].read_text() and subpackage(name) == "storage"
    }
    assert local == {"tfshard.storage.steps"}
    assert [name for name in vars(steps._Thread) if not name.startswith("_")] == ["context"]
    assert [name for name in MODULES if "steps._thread" in MODULES[name].read_text()] == []


def test_a_variable_asks_the_access_of_the_context():
    """No read or write of a variable looks at the context itself."""
    for method in (
        ShardedVariable.value,
        ShardedVariable.assign,
        ShardedVariable.shape.fget,
        ShardedVariable.handle.fget,
    ):
        source = inspect.getsource(method)
        assert "access.current()." in source and "steps." not in source
