"""A fake nvidia-smi, for tests of what tfshard asks the driver."""

import os
import pathlib
import shlex
import stat

NAME, MEBIBYTES = "NVIDIA H100 80GB HBM3", 81559


def path(directory: pathlib.Path, number: int, *, partitions: int = 0, fails: bool = False) -> str:
    """Return a PATH on which a driver of `number` GPUs comes first.

    Args:
        directory: The folder of the program.
        number: The number of GPUs.
        partitions: The number of MIG devices of each GPU.
        fails: True for a program that finds no driver.
    """
    listed = []
    for each in range(number):
        listed.append(f"GPU {each}: {NAME} (UUID: GPU-0000000{each})")
        listed += [f"  MIG 1g.10gb     Device  {part}: (UUID: MIG-{each}-{part})" for part in range(partitions)]
    matrix = ["\t" + "\t".join(f"GPU{each}" for each in range(number))]
    for each in range(number):
        matrix.append("\t".join([f"GPU{each}", *(" X " if other == each else "NV18" for other in range(number))]))
    answers = {
        "-L": listed,
        "topo -m": matrix,
        "--query-gpu=memory.total --format=csv,noheader,nounits": [str(MEBIBYTES)] * number,
        "--query-gpu=name,memory.total --format=csv,noheader": [f"{NAME}, {MEBIBYTES} MiB"] * number,
    }
    cases = [f"'{arguments}') printf '%s\\n' {shlex.join(lines)} ;;" for arguments, lines in answers.items()]
    body = ["exit 9"] if fails else ['case "$*" in', *cases, "*) exit 2 ;;", "esac"]
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", *body, ""]))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"
