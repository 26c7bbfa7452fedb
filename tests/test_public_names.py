"""The names that `import tfshard` gives."""

import pytest

import tfshard


def test_what_import_tfshard_shows():
    # The names that users type. Result classes and errors are in the subpackages.
    expected = """
        initialize create_mesh ShardedStrategy LayoutMap ParameterAnalyzer Model Sequential as_distributed
        CheckpointManager CheckpointCallback export export_to_transformers import_weights plan lint verify advise
        auto_layout_map abstract_model profile_step profile_network random_map find_batch_size keras_distribution
        strategy_of shutdown spawn ShardingError
        errors layers callbacks collectives presets planning measure pipeline pipelining PowerSGD EmbeddingTables
        simulate calibrate local_map psum sequence_positions
    """
    assert sorted(tfshard.__all__) == sorted(expected.split())
    for name in tfshard.__all__:
        assert name in vars(tfshard)


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tfshard' has no attribute 'LayoutMaps'"):
        tfshard.LayoutMaps  # noqa: B018
