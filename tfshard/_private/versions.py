"""The versions of Python, TensorFlow and Keras that tfshard supports. Imports neither of the two libraries."""

import importlib.metadata
import platform
import warnings


class VersionWarning(UserWarning):
    """Warns that tfshard was not tested with these versions of Python, TensorFlow or Keras."""


# The tested series of Python, TensorFlow and Keras. tools/test_versions.sh runs the quick tests in each combination.
# setup.cfg holds the lower bounds, constraints.txt the newest combination.
TRIED = (
    ("3.10", "2.19", "3.10"),
    ("3.11", "2.20", "3.12"),
    ("3.12", "2.21", "3.13"),
    ("3.13", "2.21", "3.15"),
)

# The names under which a library is installed.
_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "keras": ("keras", "keras-nightly"),
}

# The series before which a library is known to fail, and why.
FAILS_BEFORE = {"keras": ("3.10", "keras.src.utils.rng_utils.get_random_seed does not exist")}


def package_version(package: str) -> str:
    """Return the version of an installed package.

    Raises:
        PackageNotFoundError: The package is not installed, under any of its names.
    """
    for name in _DISTRIBUTIONS.get(package, ()):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return importlib.metadata.version(package)


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def is_before(version: str, series: str) -> bool:
    """Return whether a version precedes a series: `is_before("3.9.2", "3.10")`."""
    return _numbers(version) < _numbers(series)


def check_versions() -> None:
    """Refuse versions that are known to fail, and warn about versions that were not tested.

    The warning names the commands that try the versions: the tests in the repository, and `tfshard doctor` without it.
    TensorFlow and Keras must have been tested with each other, because tfshard uses private names of both. Python may
    have been tested with any of them.

    Raises:
        ImportError: TensorFlow or Keras is not installed, or its version is known to fail.
    """
    works = f"tfshard works with (Python, TensorFlow, Keras) = {', '.join('(' + ', '.join(row) + ')' for row in TRIED)}"
    install = "Install it with: pip install 'tensorflow>=2.19' 'keras>=3.10'"
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "keras"):
        try:
            found[package] = package_version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(f"tfshard needs {package}, which is not installed. {works}. {install}") from None
    received = ", ".join(f"{name}=={version}" for name, version in found.items())
    for package, (series, reason) in FAILS_BEFORE.items():
        if is_before(found[package], series):
            raise ImportError(
                f"tfshard does not work with {package} before {series}: {reason}. {works}. {install}. "
                f"Received: {received}"
            )
    python, *pair = (_series(version) for version in found.values())
    if python not in {row[0] for row in TRIED} or tuple(pair) not in {row[1:] for row in TRIED}:
        # The stack level skips check_versions, tfshard._private and tfshard to reach the user's import.
        warnings.warn(
            f"tfshard has not been tested with these versions. {works}. To try them, run 'tfshard doctor', which "
            "compares a sharded step with one device, and 'tfshard verify MODULE:FUNCTION --mesh=batch:4' for your "
            f"model; in tfshard's repository, run 'tools/test_versions.sh {python}:{pair[0]}:{pair[1]}'. Received: "
            f"{received}",
            VersionWarning,
            4,
        )
