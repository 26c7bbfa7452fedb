"""Break one function of tfshard at a time, in a copy of the tree, and check that the test that guards it fails.

tests/mutations.py lists the faults and the test that must fail for each. The tests first run on the unbroken copy,
where all of them must pass. tests/mutate.sh sets up the environment and calls this module.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from mutations import DOCS, MARK, MUTATIONS, Mutation, table

ROOT = pathlib.Path(__file__).parents[1]


def copy_tree(to: pathlib.Path) -> None:
    """Copy the files that git tracks, and untracked files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run_tests(tree: pathlib.Path, tests: list[str], timeout: int) -> subprocess.CompletedProcess[str]:
    """Run tests as in an ordinary run, without the sweep. `timeout` is in seconds."""
    environment = {key: value for key, value in os.environ.items() if key != "TFSHARD_SWEEP"}
    environment |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout,
    )  # fmt: skip


def is_killed(mutation: Mutation, tree: pathlib.Path, timeout: int) -> bool:
    """Break the copy, run the test, and restore the copy."""
    path = tree / mutation.file
    text = path.read_text()
    path.write_text(mutation.applied(text))
    try:
        done = run_tests(tree, [mutation.killed_by], timeout)
    except subprocess.TimeoutExpired:
        print(f"{mutation.title}: hung", flush=True)
        return False
    finally:
        path.write_text(text)
    # 1: tests ran and failed. Other codes are errors of pytest or a broken import.
    if done.returncode == 1 and re.search(r"^(FAILED|ERROR) ", done.stdout, re.MULTILINE):
        return True
    print(f"{mutation.title}: NOT KILLED, pytest ended with {done.returncode}:\n{done.stdout[-3000:]}", flush=True)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        default="",
        help="Only mutations with this text in their area, function or wrong behaviour.",
    )
    parser.add_argument(
        "--write", action="store_true", help="Write the table of docs/testing.md if every mutation was killed."
    )
    parser.add_argument("--timeout", type=int, default=600, help="Seconds for one run of pytest.")
    flags = parser.parse_args()
    if flags.write and flags.only:
        parser.error("--write needs every mutation; leave --only out.")
    chosen = [mutation for mutation in MUTATIONS if flags.only in mutation.title]
    survivors = []
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory) / "tfshard"
        copy_tree(tree)
        done = run_tests(tree, sorted({mutation.killed_by for mutation in chosen}), flags.timeout)
        if done.returncode:
            sys.exit(f"The tests do not pass on the unbroken tree:\n{done.stdout[-5000:]}")
        for mutation in chosen:
            begin = time.monotonic()
            killed = is_killed(mutation, tree, flags.timeout)
            survivors += [] if killed else [mutation]
            print(
                f"{'killed' if killed else 'SURVIVED'} in {time.monotonic() - begin:.0f} s: {mutation.title}",
                flush=True,
            )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were killed.")
    if survivors:
        sys.exit(1)
    if flags.write:
        DOCS.write_text(DOCS.read_text().partition(MARK)[0] + MARK + "\n" + table(MUTATIONS))


if __name__ == "__main__":
    main()
