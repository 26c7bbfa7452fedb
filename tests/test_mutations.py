"""The mutations of tools/mutations.py can be made, and docs/testing.md lists them. tools/mutate.sh makes them."""

import pathlib

import pytest

from tools.mutations import DOCS, MARK, MUTATIONS, table

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_mutation_breaks_one_place_and_names_a_test(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.applied(text) != text
    file, _, test = mutation.killed_by.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_the_docs_list_them():
    assert len(MUTATIONS) >= 20
    found = DOCS.read_text().partition(MARK)[2].strip()
    assert found == table(MUTATIONS).strip(), "Write the table again: tools/mutate.sh --write"
