"""Every module, file and name in backticks in documents, docstrings and comments exists."""

import ast
import builtins
import functools
import importlib
import inspect
import io
import keyword
import pathlib
import pkgutil
import re
import tokenize

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("tfshard", "tests", "tools", "examples")
# The changelog uses the names of its time.
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {ROOT / "CHANGELOG.md"})
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
LIBRARIES = {"tfshard": tfshard, "keras": keras, "tf": tf, "np": np}
# Names of libraries and programs that are not imported here, variables of formulas, and names of examples.
ELSEWHERE = {
    *(
        "Operation._inbound_nodes",
        "Operation._outbound_nodes",
        "AutoTrackable",
        "EnableReplicatedSpmdAsDefault",
        "GetDeviceSeed",
        "caching_device",
        "context.async_wait",
    ),
    *(
        "hashlib.file_digest",
        "saving_lib._save_model_to_fileobj",
        "CUDA_VISIBLE_DEVICES",
        "FSSPEC_S3_KEY",
        "TMPDIR",
        "n_jobs",
        "test_initialize_with_all_job_addresses",
        "test_initialize_with_coordinator_address",
        "div",
        "mul",
    ),
    *("SKLinear", "panther/nn/linear.py", "S1_i", "S2_i", "U1_i", "U2_i", "l", "N"),
    *("auto_shard_dataset", "fully_shard", "mics_shard_size", "min_num_params", "sch_netem"),
    *("dense_kernel_momentum", "block3", "block_3", "train.py"),
    "test_adam_matches_one_device_when_dim_does_not_divide",
    # In TensorFlow's C++ code, and functions nested in TensorFlow's functions.
    *("FillPhiloxRandom", "FillCollectiveParams", "NeedStaging", "ShouldFoldInput", "_read_variable_op"),
    *("eager_pure_optimization", "custom_gradient._graph_mode_decorator"),
}


def modules() -> dict[str, object]:
    """Return the modules of the package by the last part of their names."""
    found = {}
    for info in pkgutil.walk_packages(tfshard.__path__, "tfshard."):
        if not info.name.endswith("__main__"):
            found[info.name.rpartition(".")[2]] = importlib.import_module(info.name)
    return found


MODULES = modules()
CLASSES = {
    name: value
    for module in MODULES.values()
    for name, value in vars(module).items()
    if isinstance(value, type) and value.__module__.startswith("tfshard")
}


@functools.cache
def identifiers() -> set[str]:
    """Return every name in the code, and every word of its non-prose strings."""
    known = [builtins, keras, keras.layers, keras.ops, keras.Model, keras.Layer, keras.Variable, keras.optimizers]
    known += [keras.models, keras.optimizers.Optimizer, keras.distribution, tf, tf.raw_ops, tf.errors, tf.data]
    known += [tf.data.Dataset, tf.Variable, tf.distribute, tf.distribute.Strategy, tf.distribute.StrategyExtended]
    known += [tf.data.experimental, np, np.ndarray]
    found = {name for each in known for name in dir(each)} | set(keyword.kwlist)
    for path in [*ROOT.glob("tools/*.sh"), ROOT / ".ci" / "run", ROOT / "setup.cfg", ROOT / "pyproject.toml"]:
        found |= set(re.findall(r"\w+", path.read_text()))
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.alias):
                found |= set(node.name.split("."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found |= set(re.findall(r"\w+", node.value))
    return found


def prose(path: pathlib.Path) -> str:
    """Return the prose of a file: a document without its blocks of code, or docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".md":
        if path.name == "coming_from.md":  # The first column has names of other libraries.
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        return re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = [t.string for t in tokens if t.type == tokenize.COMMENT or t.string.lstrip("rb").startswith('"""')]
    return re.sub(r"^\s*>>>.*$", "", "\n".join(kept), flags=re.MULTILINE)


def exists(mention: str) -> bool:
    """Return whether a text in backticks names an existing file or name. True for other texts."""
    if re.fullmatch(r"[\w./-]+\.(py|sh|md|cfg|toml|txt|yml)", mention):
        names = [mention, *(f"{folder}/{mention}" for folder in ("tfshard", "docs", "tools", "tests"))]
        return any((ROOT / name).exists() for name in names) or any(path.name == mention for path in SOURCES)
    named = re.fullmatch(r"@?([A-Za-z_][\w.]*)(\(.*\))?", mention)
    if named is None:
        return True
    if named.group(1).startswith("TFSHARD_"):  # The environment of a client has its settings.
        return named.group(1) in identifiers() or named.group(1).removeprefix("TFSHARD_").lower() in identifiers()
    first, *rest = named.group(1).split(".")
    if first in CLASSES and rest:
        return rest[0] in members(CLASSES[first])
    if first in MODULES and rest:
        # `strategy.report`: also an attribute of an object that is called like its module.
        module = MODULES[first]
        classes = [each for each in vars(module).values() if isinstance(each, type)]
        return hasattr(module, rest[0]) or any(rest[0] in members(each) for each in classes)
    if first in LIBRARIES:
        value = LIBRARIES[first]
        for part in rest:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return all(part in identifiers() or part in MODULES for part in (first, *rest) if part)


def members(cls: type) -> set[str]:
    """Return the attributes of an object of a class, as far as the source shows them."""
    found = set(dir(cls))
    for each in cls.__mro__:
        found |= set(getattr(each, "__annotations__", ()))
        if each.__module__.startswith("tfshard"):
            found |= set(re.findall(r"self\.(\w+)", inspect.getsource(each)))
    return found


@pytest.mark.parametrize("path", [*DOCUMENTS, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_mentioned_in_backticks_exists(path):
    mentioned = set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(path)))
    assert sorted(m for m in mentioned if m not in ELSEWHERE and not exists(m)) == []


@pytest.mark.parametrize(
    "wrong",
    ["tfshard.LayoutMaps", "steps.flush_all", "storage/rest.py", "Storage.rests", "keras.layers.Densee"],
)
def test_what_does_not_exist_is_found(wrong):
    assert not exists(wrong)
