"""Choose the tests and cases of an ordinary run. Every ordinary run takes the same; TFSHARD_SWEEP=1 takes all.

- `table(name, arguments, cases, always=, sample=)` makes a parametrized test from a long table. An ordinary run takes
  the cases in `always` and `sample` others.
- `@pytest.mark.sweep(n)` limits an ordinary run to `n` cases of a parametrized test.
- `@pytest.mark.slow` leaves a test out of the ordinary run.

The other cases are taken at even distances. A quick test (`-m quick`) always runs. Cases that tests/mutations.py names
always run, too, unless the test is slow. Marks do not apply to tests that are named (`-k`, `-m slow`, `file::test`).
"""

import collections
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import pytest

SWEEP = os.environ.get("TFSHARD_SWEEP") == "1"

# The slowest files. They start first when two processes share a run (tools/test.sh).
LONGEST = [
    "test_docs.py",
    "launch/test_faults.py",
    "contrib/compression/test_compression.py",
    "contrib/pipeline/test_pipeline.py",
    "storage/test_recomputing.py",
    "launch/test_launched_failures.py",
    "contrib/embedding_tables/test_embedding_tables.py",
    "verifying/test_verify.py",
    "storage/test_groups.py",
    "training/test_surface.py",
    "training/test_taking_over.py",
    "training/test_microbatches.py",
]

# The tests that an ordinary run leaves out.
LEFT_OUT = pytest.StashKey[set[str]]()

Case = TypeVar("Case")


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases, at even distances."""
    count = min(count, len(cases))
    return [cases[(2 * i + 1) * len(cases) // (2 * count)] for i in range(count)]


def taken(name: str, cases: Iterable[Case], *, always: Iterable[Case] = (), sample: int = 0) -> list[Case]:
    """Return the cases of table `name` that this run takes, in their order: `always`, and `sample` others."""
    cases, always = list(cases), list(always)
    unknown = [case for case in always if case not in cases]
    assert not unknown, f"{unknown} are not in the table {name}."
    if SWEEP:
        return cases
    others = spread([case for case in cases if case not in always], sample)
    return [case for case in cases if case in always or case in others]


def each_value(*arguments: Iterable) -> list[tuple]:
    """Return as few cells of the product of arguments as contain each value of each argument."""
    values = [list(argument) for argument in arguments]
    return [tuple(each[i % len(each)] for each in values) for i in range(max(map(len, values)))]


def table(
    name: str, arguments: str | tuple[str, ...], cases: Iterable, *, always: Iterable = (), sample: int = 0
) -> Callable:
    """Return `pytest.mark.parametrize` with the cases that this run takes."""
    return pytest.mark.parametrize(arguments, taken(name, cases, always=always, sample=sample))


def left_out(items: Iterable[pytest.Item], named: Collection[str]) -> set[str]:
    """Return the names of the cases that an ordinary run does not take.

    Args:
        items: All cases.
        named: Names of cases that run unless their test is slow.
    """
    by_test = collections.defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    out: set[str] = set()
    for cases in by_test.values():
        quick = [case for case in cases if case.get_closest_marker("quick")]
        chosen, mark = [*quick], cases[0].get_closest_marker("sweep")
        if not cases[0].get_closest_marker("slow"):
            chosen += [case for case in cases if case.nodeid in named and case not in quick]
            count = mark.args[0] if mark else len(cases)
            chosen += spread([case for case in cases if case not in chosen], max(count - len(chosen), 0))
        out |= {case.nodeid for case in cases if case not in chosen}
    return out


def place(item: pytest.Item) -> int:
    """Return the place of a test's file in the order of a run. Tests of one file keep their order."""
    file = item.nodeid.partition("::")[0].removeprefix("tests/")
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)
