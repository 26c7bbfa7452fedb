"""What `import tfshard` shows, and public names that moved: the old ones work and warn."""

import importlib
import pathlib
import sys

import pytest

import tfshard
from tfshard import _moved


def test_what_import_tfshard_shows():
    # What a user types; result classes and errors are in their wings.
    expected = """
        initialize create_mesh ShardedStrategy LayoutMap ParameterAnalyzer Model Sequential as_distributed
        CheckpointManager CheckpointCallback export import_weights plan lint verify advise auto_layout_map
        abstract_model profile_step profile_network random_map ShardingError
        errors layers callbacks collectives presets planning measure pipeline pipelining PowerSGD EmbeddingTables
        simulate calibrate local_map psum
    """
    assert sorted(tfshard.__all__) == sorted(expected.split())
    for name in tfshard.__all__:
        assert name in vars(tfshard)


@pytest.mark.parametrize("name", _moved.NAMES)
def test_a_name_that_moved_is_the_same_and_warns_where_it_is_used(name):
    with pytest.warns(DeprecationWarning, match=f"tfshard.{name} has moved; use {_moved.NAMES[name]}.{name}") as told:
        value = getattr(tfshard, name)
    assert value is getattr(importlib.import_module(_moved.NAMES[name]), name)
    assert told[0].filename == __file__


@pytest.mark.parametrize("name", _moved.MODULES)
def test_a_module_that_moved_is_the_same_and_warns_where_it_is_imported(name):
    sys.modules.pop(f"tfshard.{name}", None)
    vars(tfshard).pop(name, None)
    with pytest.warns(DeprecationWarning, match=f"tfshard.{name} has moved; use {_moved.MODULES[name]}") as told:
        exec(compile(f"import tfshard.{name}", __file__, "exec"), {"__name__": "__main__"})
    assert sys.modules[f"tfshard.{name}"] is importlib.import_module(_moved.MODULES[name])
    assert told[0].filename == __file__


def test_the_guide_for_upgrading_has_every_name_that_moved():
    guide = (pathlib.Path(__file__).parent.parent / "docs" / "upgrading.md").read_text().splitlines()
    rows = [f"| `{name}` | `{module}.{name}` |" for name, module in _moved.NAMES.items()]
    rows += [f"| `{name}` | `{module}` |" for name, module in _moved.MODULES.items()]
    assert set(rows) <= set(guide)
    assert (
        len([line for line in guide if line.startswith("| `") and line.count("|") == 3]) == len(rows) + 1
    )  # The head.


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tfshard' has no attribute 'LayoutMaps'"):
        tfshard.LayoutMaps  # noqa: B018
