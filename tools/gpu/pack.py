"""Pack TensorFlow, and what tfshard's checks need beside it, for a machine with an H100 or H200 and no network.

    python tools/gpu/pack.py
    python tools/gpu/pack.py --step=cut --step=split  # Again, without the download.

Downloads the wheels of constraints.txt for Python 3.12 on x86-64 and cuBLAS for CUDA 12, strips the symbols, clears the
GPU code of other architectures (tools/gpu/fatbins.py), compresses both archives in blocks, and writes pieces into
build/quarter, a folder that git ignores. Takes about 10 minutes and 7 GB of disk. benchmarks/GPU.md says how to send
the pieces; `tools/gpu/quarter.sh receive` unpacks them.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools" / "gpu"), str(ROOT / "tools" / "gpu" / "quarter")]

import fatbins  # noqa: E402
import pieces  # noqa: E402

_STEPS = ("download", "cut", "split")
_STEP = flags.DEFINE_multi_enum("step", list(_STEPS), _STEPS, "Steps to run.")
_ARCHITECTURE = flags.DEFINE_integer("architecture", 90, "The GPU's architecture: 90 for an H100 or H200.")
_PYTHON = flags.DEFINE_string("python", "3.12", "The other machine's version of Python.")
# A transfer has 64 MiB, of which the repository takes 7.
_MEBIBYTES = flags.DEFINE_integer("mebibytes", 55, "The size of the largest piece.")
_FOLDER = flags.DEFINE_string("folder", str(ROOT / "build" / "quarter"), "Where to write.")

# Keras and what the tests import; pip adds the dependencies.
PACKAGES = ("tensorflow", "keras", "keras-hub", "pytest", "pytest-xdist", "hypothesis", "pyyaml", "rich")
# What TensorFlow loads with the names of CUDA 12: the profiler's library, and the assembler that XLA runs. The other
# machine has the rest, of CUDA 13 (tools/gpu/quarter/libraries.py).
CUDA = (
    "nvidia-cuda-runtime-cu12==12.5.82",
    "nvidia-cuda-cupti-cu12==12.5.82",
    "nvidia-cuda-nvcc-cu12==12.5.82",
)
CUBLAS = ("nvidia-cublas-cu12==12.5.3.2",)
# The folder of each archive's packages.
TENSORFLOW, SECOND = "tensorflow", "cublas"
# What no check imports. The other machine has a SciPy of its own.
UNUSED = (
    "clang", "hf_xet", "scipy", "scipy.libs", "setuptools", "tensorflow_text", "tensorflow/include",
    "nvidia/cuda_cupti/include", "nvidia/cuda_cupti/lib/libnvperf_*", "nvidia/cuda_nvcc/include",
    "nvidia/cuda_nvcc/nvvm/lib64", "nvidia/cuda_nvcc/nvvm/bin", "nvidia/cuda_runtime/include", "nvidia/cublas/include",
    "nvidia/cublas/lib/libnvblas*", "bin",
)  # fmt: skip
# The versions of glibc that wheels name, up to that of Ubuntu 24.04.
_GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)


def download(packages: tuple[str, ...], folder: pathlib.Path, *, with_dependencies: bool) -> None:
    """Install wheels for the other machine into a folder."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir", "--upgrade",
            f"--target={folder}", f"--python-version={_PYTHON.value}", "--implementation=cp", "--only-binary=:all:",
            *(f"--platform={each}" for each in platforms),
            *(["--constraint", str(ROOT / "constraints.txt")] if with_dependencies else ["--no-deps"]),
            *packages,
        ],
        check=True,
    )  # fmt: skip


def cut(folder: pathlib.Path) -> None:
    """Remove what no check imports, symbols, and the GPU code of other architectures."""
    for pattern in UNUSED:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Stripping breaks the libraries of wheels that auditwheel has changed, such as NumPy's. They are small.
    libraries = [*(folder / "tensorflow").rglob("*.so*"), *(folder / "nvidia").rglob("*.so*")]
    for path in (each for each in libraries if each.is_file() and not each.is_symlink()):
        before = path.stat().st_size
        subprocess.run(["strip", str(path)], check=True)
        kept, cleared = fatbins.clear(path, _ARCHITECTURE.value)
        if cleared:
            print(
                f"{path.name}: {before / 1e6:.0f} MB, without symbols {path.stat().st_size / 1e6:.0f} MB, GPU code "
                f"{kept / 1e6:.0f} MB kept and {cleared / 1e6:.0f} MB cleared"
            )


def split(folder: pathlib.Path, target: pathlib.Path) -> pieces.Manifest:
    """Write the pieces of a folder."""
    for old in target.glob(f"{folder.name}.*"):
        shutil.rmtree(old)
    archive = folder.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    manifest = pieces.split(archive, target, _MEBIBYTES.value << 20)
    archive.unlink()
    return manifest


def main(argv: list[str]) -> None:
    del argv
    target = pathlib.Path(_FOLDER.value)
    raw = {name: target / "raw" / name for name in (TENSORFLOW, SECOND)}
    if "download" in _STEP.value:
        shutil.rmtree(target / "raw", ignore_errors=True)
        download(PACKAGES, raw[TENSORFLOW], with_dependencies=True)
        download(CUDA, raw[TENSORFLOW], with_dependencies=False)
        download(CUBLAS, raw[SECOND], with_dependencies=False)
    if "cut" in _STEP.value:
        for folder in raw.values():
            cut(folder)
    if "split" in _STEP.value:
        for folder in raw.values():
            for each in split(folder, target).pieces:
                path = target / each.file
                print(f"carry {os.path.relpath(path, ROOT)} ({sum(each.blocks) / 1e6:.1f} MB): receive it there")


if __name__ == "__main__":
    app.run(main)
