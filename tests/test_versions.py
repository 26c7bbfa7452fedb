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
    # Attributes of our objects, and of every module.
    own = {"_epochs", "_KINDS", "__name__"}
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
    [
        ("3.14.0", "2.21.0", "3.15.0"),
        ("3.13.0", "2.22.0-dev1", "3.15.0"),
        ("3.13.0", "2.19.0", "3.15.0"),
        ("3.13.1", "2.22.0", "3.16.0"),
        ("3.13.1", "2.21.0", "3.16.0.dev2026102704"),
    ],
)
def test_versions_that_were_not_tried_are_a_warning_with_the_commands_that_try_them(
    monkeypatch, python, tensorflow, keras
):
    installed(monkeypatch, python, tensorflow, keras)
    with pytest.warns(
        versions.VersionWarning,
        match=f"not been tested with.*python=={python}, tensorflow=={tensorflow}, keras=={keras}",
    ) as caught:
        versions.check_versions()
    series = ":".join(".".join(version.split(".")[:2]) for version in (python, tensorflow, keras))
    for command in (
        "'tfshard doctor'",
        "'tfshard verify MODULE:FUNCTION --mesh=",
        f"'tools/test_versions.sh {series}'",
    ):
        assert command in str(caught[0].message)


def test_no_version_is_too_new_to_be_installed():
    """A library that is released later is a warning at import, and not a conflict when pip installs tfshard."""
    text = (pathlib.Path(__file__).parent.parent / "setup.cfg").read_text()
    bounds = re.findall(r"^    (tensorflow|keras)([<>=!~]\S*)$", text, re.MULTILINE)
    assert bounds == [("tensorflow", ">=2.19"), ("keras", ">=3.10")]


def test_libraries_are_found_under_the_other_names_of_their_packages(monkeypatch):
    found = {"tf-nightly": "2.22.0.dev20260924", "keras-nightly": "3.16.0.dev2026102704"}

    def version(name):
        if name not in found:
            raise versions.importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions.importlib.metadata, "version", version)
    assert versions.package_version("tensorflow") == "2.22.0.dev20260924"
    assert versions.package_version("keras") == "3.16.0.dev2026102704"
    found["keras"] = "3.15.1"
    assert versions.package_version("keras") == "3.15.1"
    with pytest.raises(versions.importlib.metadata.PackageNotFoundError):
        versions.package_version("numpy")


def test_a_name_is_found_in_either_of_its_places():
    here, elsewhere = (
        "keras.src.trainers.trainer.Trainer._compile_loss",
        "keras.src.trainers.trainer.None._compile_loss",
    )
    for path, also in ((here, elsewhere), (elsewhere, here), (here, None)):
        assert names.Name(path, "3.10", also=also).is_found()
    assert not names.Name(elsewhere, "3.10").is_found()
    moved = [name for name in names.NAMES if name.also is not None]
    assert {name.also.split(".")[-2] for name in moved} == {"Variable", "Trainer", "BaseTrainer", "ops", "rnn"}


def test_versions_that_are_known_to_fail_are_an_error_that_says_what_works(monkeypatch):
    installed(monkeypatch, "3.11.2", "2.19.0", "3.9.2")
    with pytest.raises(ImportError, match=r"does not work with keras before 3\.10.*\(3.10, 2.19, 3.10\).*keras==3.9.2"):
        versions.check_versions()
