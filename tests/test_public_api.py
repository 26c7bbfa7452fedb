"""The public names and their parameters match public_api.txt, so changes are made on purpose."""

import difflib

import public_api


def test_the_public_names_are_those_of_the_snapshot():
    known, found = public_api.SNAPSHOT.read_text(), public_api.text()
    before, now = known.splitlines(), found.splitlines()
    changed = list(difflib.unified_diff(before, now, "public_api.txt", "tfshard", lineterm="", n=0))
    assert not changed, (
        "The public names have changed. Old ones stay for one version with a DeprecationWarning (CONTRIBUTING.md). "
        "Then: python tests/public_api.py, and a line in CHANGELOG.md.\n" + "\n".join(changed)
    )
