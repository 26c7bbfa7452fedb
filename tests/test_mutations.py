"""The mutations of tests/mutations.py apply to the sources, and docs/testing.md lists them.

tests/mutate.sh runs them.
"""

import ast
import collections
import os
import pathlib
import subprocess
import sys

import pytest

import sweeps
from mutations import DOCS, MARK, MUTATIONS, Mutation, table

ROOT = pathlib.Path(__file__).parents[1]
TEXT = """
LIMIT = 1
class Storage:
    @property
    def size(self):
        return 1
    @size.setter
    def size(self, value):
        self.given = value
def size():
    def inner():
        return 1
    return inner() + 2
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_mutation_changes_its_function_and_names_an_existing_test(mutation):
    text = (ROOT / mutation.file).read_text()
    broken = mutation.applied(text)
    assert broken != text
    if mutation.file.endswith(".py"):
        ast.parse(broken)
    file, _, test = mutation.killed_by.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_every_test_that_a_mutation_names_is_there(request):
    named = sorted({mutation.killed_by for mutation in MUTATIONS})
    config = request.config
    if sweeps.LEFT_OUT in config.stash and "tests" in config.args:
        # An ordinary run has collected all tests.
        collected = {item.nodeid for item in request.session.items} | config.stash[sweeps.LEFT_OUT]
        collected |= {name.partition("[")[0] for name in collected}
        assert [name for name in named if name not in collected] == []
        return
    environment = {key: value for key, value in os.environ.items() if key != "TFSHARD_SWEEP"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_no_two_mutations_have_the_same_function_and_behaviour():
    counts = collections.Counter((mutation.function, mutation.what) for mutation in MUTATIONS)
    assert [each for each, count in counts.items() if count > 1] == []


def test_docs_list_every_mutation():
    assert len(MUTATIONS) >= 20
    found = DOCS.read_text().partition(MARK)[2].strip()
    assert found == table(MUTATIONS).strip(), "Write the table again: tests/mutate.sh --write"


def mutated(name: str, old: str) -> str:
    mutation = Mutation(area="", function=f"tfshard.devices.startup:{name}", old=old, new="NEW", what="", killed_by="")
    return mutation.applied(TEXT)


@pytest.mark.parametrize(
    "name, old, line",
    [
        ("LIMIT", "1", 1), ("Storage.size", "return 1", 5), ("Storage.size", "value\n", 8), ("Storage", "given", 8),
        ("size.inner", "1", 11), ("size", "1", 11), ("size", "2", 12),
    ],
)  # fmt: skip
def test_mutation_changes_text_that_occurs_again_outside_of_its_function(name, old, line):
    before, after = (
        TEXT.splitlines(),
        mutated(name, old).replace("NEW", "NEW\n" * old.endswith("\n") or "NEW").splitlines(),
    )
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b] == [line]


def test_mutation_finds_a_function_that_has_moved():
    first, second = TEXT.index("class"), TEXT.index("def size():")
    mutation = Mutation(area="", function="m:size", old="return inner()", new="return 0", what="", killed_by="")
    moved = TEXT[:first] + TEXT[second:] + TEXT[first:second]
    assert mutation.applied(moved).replace("return 0", "return inner()") == moved


@pytest.mark.parametrize(
    "name, old, complaint",
    [
        ("Storage", "size", "occurs 3 times"),
        ("size", "self", "occurs 0 times"),
        ("width", "1", "does not define 'width'"),
    ],
)
def test_mutation_of_ambiguous_or_missing_text_is_refused(name, old, complaint):
    with pytest.raises(AssertionError, match=complaint):
        mutated(name, old)
