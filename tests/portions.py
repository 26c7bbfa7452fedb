"""Which cases of a slow test an ordinary run takes, so that all of it ends in twenty minutes.

tests/seconds.json has the seconds of a case, for each test. Of a test whose cases take longer together than `PORTION`,
a run takes those that the quick tests or tools/mutations.py name (of the latter not those that take longer than
`LONG`), and of the others as many as fit, drawn by the seed of tests/sweeps.py. Of tests of which a case takes longer
than `LONG`, it takes a third in the same way: each of them runs every third day or so. All of them run with
`TFSHARD_SWEEP=1`, and where cases are named (`-k`, `file::test`).

    TFSHARD_WRITE_SECONDS=1 tools/test.sh      # measures them again, those that run
"""

import collections
import json
import math
import os
import pathlib
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

# Seconds that an ordinary run gives a test with several cases, and how many of those that are not named it takes in any
# case.
PORTION = 2.0
LEAST_CASES = 1

# Seconds of a case from which a test runs every third day, and those that run every day nevertheless: what they guard
# changes with documents, not with code.
LONG = 3.0
EACH_DAY = {"tests/test_docs.py::test_every_block_of_python_runs"}

# Of a case of a test that was never measured.
UNKNOWN = 3.0

Item = TypeVar("Item")

FILE = pathlib.Path(__file__).parent / "seconds.json"
WRITES = os.environ.get("TFSHARD_WRITE_SECONDS") == "1"


def known() -> dict[str, float]:
    """The seconds of a case, by the name of its test without cases."""
    return json.loads(FILE.read_text())


def test_of(case: str) -> str:
    """`"file::test"` of `"file::test[case]"`."""
    return case.partition("[")[0]


def long_tests(cases: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Those of which a case takes longer than `LONG`."""
    return [
        test for test in dict.fromkeys(map(test_of, cases)) if seconds.get(test, 0.0) > LONG and test not in EACH_DAY
    ]


def left_out(cases: Sequence[str], always: Collection[str], seconds: Mapping[str, float], seed: str) -> set[str]:
    """The cases that a run does not take.

    Args:
        cases: All, as pytest names them.
        always: Those that are taken in any case.
        seconds: Of a case, by test.
        seed: By which they are drawn.
    """
    by_test: dict[str, list[str]] = collections.defaultdict(list)
    for case in cases:
        by_test[test_of(case)].append(case)
    out: set[str] = set()
    for test, its in by_test.items():
        each = seconds.get(test, UNKNOWN)
        if each * len(its) <= PORTION:
            continue
        named = [case for case in its if case in always]
        others = [case for case in its if case not in always]
        random.Random(f"{seed} {test}").shuffle(others)
        count = max(math.floor(PORTION / each) - len(named), LEAST_CASES)
        out.update(others[count:])
    long = long_tests(cases, seconds)
    another_day = random.Random(f"{seed} long tests").sample(long, len(long) * 2 // 3)
    return out | {case for test in another_day for case in by_test[test]}.difference(always)


def longest_first(items: Iterable[Item], key: Callable[[Item], str]) -> list[Item]:
    """Tests with those of the file that takes longest first, so that processes that take one file after the other end
    at nearly the same time.

    Args:
        items: The tests that run.
        key: The name of a test, as pytest has it.
    """
    seconds, by_file = known(), collections.defaultdict(list)
    for item in items:
        by_file[key(item).partition("::")[0]].append(item)

    def taken(file: str) -> float:
        return sum(seconds.get(test_of(key(item)), UNKNOWN) for item in by_file[file])

    return [item for file in sorted(by_file, key=taken, reverse=True) for item in by_file[file]]


def write(measured: Iterable[tuple[str, float]]) -> None:
    """Writes the file again, with what cases took now: the mean of those of a test.

    Args:
        measured: Each case, and its seconds.
    """
    by_test: dict[str, list[float]] = collections.defaultdict(list)
    for case, seconds in measured:
        by_test[test_of(case)].append(seconds)
    means = {test: round(statistics.mean(each), 1) for test, each in by_test.items()}
    FILE.write_text(json.dumps(dict(sorted((known() | means).items())), indent=1) + "\n")
