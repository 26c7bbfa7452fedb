"""Moving averages of weights (`use_ema`): computed on shards, where each weight would be gathered."""

import functools
from typing import Any

import keras

from tfshard.operations import layer_patch
from tfshard.storage import steps


def install(optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimizer with `use_ema` compute its averages in the layout of its slots."""
    if optimizer.use_ema:
        layer_patch.apply(layer_patch.AVERAGES, optimizer, _in_update)


def _in_update(update: layer_patch.Method) -> layer_patch.Method:
    @functools.wraps(update)
    def updated(*args: Any, **kwargs: Any) -> Any:
        if steps.current() is None:
            return update(*args, **kwargs)
        with steps.update_scope():
            return update(*args, **kwargs)

    return updated
