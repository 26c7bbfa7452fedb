"""A plugin of pytest that has each `compile` of a Keras model come under a strategy (tools/keras_tests/run.py)."""

import keras

import tfshard

tfshard.initialize(num_devices=4, device_type="CPU")
_compile = keras.Model.compile
_strategies: list[tfshard.ShardedStrategy] = []


def _strategy() -> tfshard.ShardedStrategy:
    if not _strategies:
        _strategies.append(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3))
    return _strategies[0]


def compile_sharded(model: keras.Model, *args, strategy=None, **kwargs) -> None:
    """`keras.Model.compile` under the strategy; XLA, which a test asks for by the way, is left out."""
    if strategy is not None or type(model).__name__ == "Sharded":
        _compile(model, *args, **kwargs)
        return
    kwargs.pop("jit_compile", None)
    tfshard.as_distributed(model).compile(*args, strategy=_strategy(), **kwargs)


def pytest_collection_finish():
    keras.Model.compile = compile_sharded
