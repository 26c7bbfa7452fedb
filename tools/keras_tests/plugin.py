"""Compile each Keras model under a strategy: a plugin of pytest (tools/keras_tests/run.py)."""

import threading

import keras

import tfshard

tfshard.initialize(num_devices=4, device_type="CPU")
_compile = keras.Model.compile
_inside = threading.local()
_strategies: list[tfshard.ShardedStrategy] = []


def _strategy() -> tfshard.ShardedStrategy:
    if not _strategies:
        _strategies.append(tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3))
    return _strategies[0]


def compile_sharded(model: keras.Model, *args, **kwargs) -> None:
    """Call `keras.Model.compile` under the strategy, without XLA even if the test asks for XLA."""
    if getattr(_inside, "model", None) is model:
        _compile(model, *args, **kwargs)
        return
    kwargs.pop("jit_compile", None)
    _inside.model = model
    try:
        tfshard.as_distributed(model).compile(*args, strategy=_strategy(), **kwargs)
    finally:
        _inside.model = None


def pytest_collection_finish():
    keras.Model.compile = compile_sharded
