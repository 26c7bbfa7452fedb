"""The wheel: its contents, and that it works without the repository."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import keras
import pytest

import tfshard

ROOT = pathlib.Path(__file__).parent.parent
# The files that setup.cfg packs and reads.
SOURCES = ("tfshard", "docs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


def run(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy, because setuptools writes next to the sources."""
    sources = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    out = pathlib.Path(os.environ.get("TFSHARD_WHEEL_DIR") or tmp_path_factory.mktemp("wheel"))
    # No build isolation, which would fetch packages: setuptools is in this environment, or in Python's.
    script = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    return out / run(sys.executable, "-c", script, out, cwd=sources).splitlines()[-1]


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return a Python with the wheel, and this environment without tfshard: its editable install is a .pth file."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place, symlinks=True)
    purelib = sysconfig.get_path("purelib", vars={"base": place, "platbase": place})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(purelib)
    # Added at the end of the path, without the .pth files in it.
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (pathlib.Path(purelib) / "others.pth").write_text("".join(f"{other}\n" for other in others))
    return place / "bin" / "python"


@pytest.fixture
def environment():
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "120"}


def test_the_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        named = {name for name in archive.namelist() if ".dist-info/" not in name}
    pages = {name for name in named if ".data/data/share/doc/tfshard/" in name}
    assert {pathlib.Path(name).name for name in pages} == {page.name for page in (ROOT / "docs").glob("*.md")}
    packed = named - pages
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tfshard").rglob("*.py")}
    clusters = {str(path.relative_to(ROOT)) for path in (ROOT / "tfshard").rglob("*.yaml")}
    assert packed == modules | clusters | {"tfshard/py.typed"} and len(clusters) == 4
    assert len({name.rpartition("/")[0] for name in modules}) > 1, "there are subpackages"
    assert wheel.name == f"tfshard-{tfshard.__version__}-py3-none-any.whl"


def test_the_version_is_read_without_importing_tensorflow(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"tfshard-{tfshard.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {tfshard.__version__}\n" in metadata
    assert {"hub", "plots", "test"} <= set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.MULTILINE))
    assert "version = attr: tfshard.__version__" in (ROOT / "setup.cfg").read_text()


def test_readmes_first_example_runs_from_the_wheel(python, environment, tmp_path):
    example = (ROOT / "README.md").read_text().partition("## Example\n\n```python\n")[2].partition("```")[0]
    assert "model.fit(" in example
    (tmp_path / "example.py").write_text(f"{example}\nprint('from', tfshard.__file__)\n")
    out = run(python, "example.py", cwd=tmp_path, env=environment)
    assert str(ROOT) not in re.search(r"from (.*)", out)[1]
    assert out.rstrip().endswith(f"from {python.parent.parent}{out.rpartition(str(python.parent.parent))[2].rstrip()}")
    assert "4 devices (batch=4), ZeRO stage 3" in out


@pytest.mark.slow
def test_doctor_runs_from_the_wheel(python, environment, tmp_path):
    # The code of the entry point.
    out = run(python, "-c", "import sys; from tfshard.cli import main; sys.exit(main())", "doctor", cwd=tmp_path,
              env=environment)  # fmt: skip
    assert re.search(rf"tfshard +{tfshard.__version__}\n", out)
    assert re.search(rf"keras +{re.escape(keras.__version__)}\n", out) and "parity       ok" in out
