"""LayoutMap: the old names of its methods."""

import pytest

from tfshard.layouts.layout_map import LayoutMap


def test_the_old_name_of_replicated_works_and_warns():
    layout_map = LayoutMap()
    with pytest.warns(DeprecationWarning, match="replicated"):
        layout_map.whole(".*")
    assert [pattern for pattern, _ in layout_map.items()] == [".*"]
