"""The private names that tfshard uses, and the versions with which it runs."""

import ast
import pathlib
import re
import warnings

import pytest

from tfshard._private import names, versions

PRIVATE = pathlib.Path(versions.__file__).parent
LIBRARIES = re.compile(r"keras\.src|tensorflow\.(python|dtensor|tsl)\b")


def names_used(path: pathlib.Path) -> set[str]:
    """Return a module's names from private library modules, and the private attributes of other modules."""
    tree = ast.parse(path.read_text())
    found, modules = set(), set()
    # Attributes that the module's own classes set.
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and LIBRARIES.match(node.module):
            for alias in node.names:
                private = alias.asname is not None and alias.asname.startswith("_")
                (modules if private else found).add(alias.asname if private else alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            own = owner in ("self", "sys") or node.attr.startswith("__") or node.attr in attributes
            if owner in modules or (node.attr.startswith("_") and not own):
                found.add(node.attr)
    return found


def test_the_names_are_where_the_table_says():
    assert names.missing() == []


def test_the_table_has_every_private_name_that_is_used():
    known = {name.path.rpartition(".")[2] for name in names.NAMES}
    # Attributes of our objects.
    own = {"_epochs", "_KINDS"}
    for path in PRIVATE.glob("*.py"):
        assert names_used(path) - own <= known, path.name


def test_the_table_has_no_name_that_is_not_used():
    text = "".join(path.read_text() for path in PRIVATE.glob("*.py") if path.name != "names.py")
    assert [name.path for name in names.NAMES if name.path.rpartition(".")[2] not in text] == []


def test_a_name_that_not_every_version_has_says_what_is_used_instead():
    oldest = {"tensorflow": min(row[1] for row in versions.TRIED), "keras": "3.10"}
    for name in names.NAMES:
        everywhere = name.since == oldest[name.library] and name.until is None
        assert (name.instead is None) == everywhere, name.path


def installed(monkeypatch, python, tensorflow, keras):
    found = {"tensorflow": tensorflow, "keras": keras}
    monkeypatch.setattr(versions.platform, "python_version", lambda: python)
    monkeypatch.setattr(versions, "package_version", found.__getitem__)


@pytest.mark.parametrize("python, tensorflow, keras", versions.TRIED)
def test_versions_that_were_tried_are_taken_in_silence(monkeypatch, python, tensorflow, keras):
    installed(monkeypatch, f"{python}.1", f"{tensorflow}.3", f"{keras}.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check_versions()


@pytest.mark.parametrize(
    "python, tensorflow, keras",
    [("3.14.0", "2.21.0", "3.15.0"), ("3.13.0", "2.22.0-dev1", "3.15.0"), ("3.13.0", "2.19.0", "3.15.0")],
)
def test_versions_that_were_not_tried_are_a_warning(monkeypatch, python, tensorflow, keras):
    installed(monkeypatch, python, tensorflow, keras)
    with pytest.warns(
        versions.VersionWarning,
        match=f"not been tested with.*python=={python}, tensorflow=={tensorflow}, keras=={keras}",
    ):
        versions.check_versions()


def test_versions_that_are_known_to_fail_are_an_error_that_says_what_works(monkeypatch):
    installed(monkeypatch, "3.11.2", "2.19.0", "3.9.2")
    with pytest.raises(ImportError, match=r"does not work with keras before 3\.10.*\(3.10, 2.19, 3.10\).*keras==3.9.2"):
        versions.check_versions()
