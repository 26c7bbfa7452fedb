"""Find the CUDA libraries of a machine under the names that TensorFlow loads.

    python tools/gpu/quarter/libraries.py FOLDER PACKAGES...

Writes links into FOLDER for libraries that the unpacked packages lack, and prints the value of LD_LIBRARY_PATH. The
machine's libraries may be of CUDA 13, of which the calls that TensorFlow makes are the same.
"""

import os
import pathlib
import re
import sys
from collections.abc import Iterable

# The names that TensorFlow 2.21 loads.
NAMES = (
    "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.9", "libcufft.so.11", "libcurand.so.10",
    "libcusolver.so.11", "libcusparse.so.12", "libnccl.so.2", "libcupti.so.12", "libnvJitLink.so.12",
)  # fmt: skip


def folders(packages: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Return the folders of Python packages and of the machine that may hold CUDA libraries."""
    found: list[pathlib.Path] = []
    for each in packages:
        found += sorted(path for pattern in ("*/lib", "*/lib64") for path in (each / "nvidia").glob(pattern))
    found.append(pathlib.Path("/usr/local/cuda/lib64"))
    return [each for each in found if each.is_dir()]


def link(target: pathlib.Path, names: Iterable[str], where: list[pathlib.Path]) -> dict[str, pathlib.Path | None]:
    """Link each name to the first library of this name, or else to the newest version of it, or to none."""
    target.mkdir(parents=True, exist_ok=True)
    found: dict[str, pathlib.Path | None] = {}
    for name in names:
        stem = name.partition(".so")[0]
        every = [path for folder in where for path in folder.glob(f"{stem}.so*")]
        exact = [path for path in every if path.name == name]
        found[name] = (exact or sorted(every, key=_version, reverse=True) or [None])[0]
        link = target / name
        link.unlink(missing_ok=True)
        if (library := found[name]) is not None:
            link.symlink_to(library.resolve())
    return found


def _version(path: pathlib.Path) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", path.name.partition(".so")[2])]


def main(target: str, *packages: str) -> None:
    where = folders(pathlib.Path(each) for each in (*packages, *sys.path) if each)
    for name, library in link(pathlib.Path(target), NAMES, where).items():
        print(f"{name}: {library or 'not found'}", file=sys.stderr)
    print(os.pathsep.join([target, *map(str, where), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]))


if __name__ == "__main__":
    main(*sys.argv[1:])
