"""Which cases of a long table a run takes.

All of them with `TFSHARD_SWEEP=1`. Else those that are always taken, and a sample that is another one each day of
work: its seed is the date of the last commit, so that a commit is tested alike wherever it is. It is printed at the
end of a run, and can be given as `TFSHARD_SAMPLE_SEED`.
"""

import datetime
import os
import pathlib
import random
import subprocess
from collections.abc import Callable, Iterable

import pytest

SWEEP = os.environ.get("TFSHARD_SWEEP") == "1"


def _date() -> str:
    """Of the last commit; today's where there is none, as in an unpacked archive."""
    command = ["git", "log", "-1", "--format=%as"]
    try:
        told = subprocess.run(command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return datetime.date.today().isoformat()
    return told.stdout.strip()


# In the environment, so that the processes of a run take the same.
SEED = os.environ.setdefault("TFSHARD_SAMPLE_SEED", _date())

sweep = pytest.mark.skipif(not SWEEP, reason="a longer check: set TFSHARD_SWEEP=1")


def taken(name: str, cases: Iterable, *, always: Iterable = (), sample: int = 0) -> list:
    """The cases of table `name` that this run takes, in their order: `always`, and `sample` others."""
    cases, always = list(cases), list(always)
    unknown = [case for case in always if case not in cases]
    assert not unknown, f"{unknown} are not in the table {name}."
    if SWEEP:
        return cases
    others = [case for case in cases if case not in always]
    drawn = random.Random(f"{SEED} {name}").sample(others, min(sample, len(others)))
    return [case for case in cases if case in always or case in drawn]


def each_value(*arguments: Iterable) -> list[tuple]:
    """As few cells of the product of arguments as have each value of each."""
    values = [list(argument) for argument in arguments]
    return [tuple(each[i % len(each)] for each in values) for i in range(max(map(len, values)))]


def table(
    name: str, arguments: str | tuple[str, ...], cases: Iterable, *, always: Iterable = (), sample: int = 0
) -> Callable:
    """Like `pytest.mark.parametrize`, with the cases that this run takes; the run prints how many that are of all."""
    cases = list(cases)

    def decorate(test):
        test = pytest.mark.parametrize(arguments, taken(name, cases, always=always, sample=sample))(test)
        return pytest.mark.table(name, len(cases))(test)

    return decorate
