"""KerasHub's `generate()` on a sharded model: forward passes run on the mesh, and the loop over tokens runs in Python.

DTensor cannot expand the `tf.while_loop` of KerasHub's generation. Outside a `tf.function`, TensorFlow runs the same
loop in Python. KerasHub's `generate_step` and samplers then do all other work on the host, and give the same numbers
as on one device.
"""

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching, transfer
from tfshard.errors import UnsupportedOperationError
from tfshard.graph import inventory
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.layout_map import layer_dim
from tfshard.layouts.variable_layout import Axes
from tfshard.storage.variables import ShardedVariable
from tfshard.training import attached_model
from tfshard.training.strategy import ShardedStrategy


def mixins(cls: type) -> tuple[type, ...]:
    """Return additional mixins of a model class: one for KerasHub models that generate."""
    from_hub = any(base.__module__.partition(".")[0] == "keras_hub" for base in cls.__mro__)
    return (_Generates,) if from_hub and hasattr(cls, "generate_step") else ()


class _Active(threading.local):
    generating: "_Generates | None" = None


_active = _Active()


# Makes mypy take the `super()` of a mixin for the Keras model that follows in the bases.
_KerasModel: Any = object


class _Generates(_KerasModel):  # type: ignore[misc]  # KerasHub has no types.
    """Mixed into a KerasHub model's class, to make `generate` work on a sharded model."""

    generate_function: Any  # KerasHub's: the function that `generate` calls, or None.

    def make_generate_function(self) -> Any:
        strategy = _private.distribute_strategy(self)
        if not isinstance(strategy, ShardedStrategy) or self.generate_function is not None:
            return super().make_generate_function()

        def generate(inputs: Any, stop_token_ids: Any = None) -> Any:
            _check_can_generate(self)
            attached_model.attached(self, strategy).refresh()
            before, _active.generating = _active.generating, self
            try:
                # All other operations are arithmetic on the host, even on a machine with accelerators.
                with tf.device("CPU:0"):
                    inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
                    return self.generate_step(inputs, stop_token_ids=stop_token_ids)
            finally:
                _active.generating = before

        self.generate_function = generate
        return generate

    def call_with_cache(self, token_ids: Any, cache: Any, cache_update_index: Any, *args: Any, **kwargs: Any) -> Any:
        """Run KerasHub's forward pass with a cache of keys and values. Within `generate` it runs on the mesh.

        The cache stays on the mesh between calls. It is sharded over the batch axis, and by heads if the key
        projections are.
        """
        forward = super().call_with_cache
        if _active.generating is not self or not _private.is_eager():
            return forward(token_ids, cache, cache_update_index, *args, **kwargs)
        strategy = _private.distribute_strategy(self)
        assert strategy is not None, "Only models of a strategy generate here."
        if not transfer.is_dtensor(cache):
            axes = _cache_axes(self, tuple(cache.shape), strategy.mesh)
            cache = transfer.host_to_mesh(cache.numpy(), axes, strategy.mesh)
        if self not in _steps:
            _steps[self] = _forward_step(self, forward, strategy.mesh)
        with strategy.extended.results_stay_sharded():
            logits, hidden_states, cache = strategy.run(
                _steps[self], args=(token_ids, cache, np.int32(cache_update_index), *args), kwargs=kwargs
            )
        if token_ids.shape[1] == 1:
            # The sampler reads the logits of one position. The many logits of the prompt are not used.
            logits = tf.constant(transfer.to_host(logits))
        return logits, tf.constant(transfer.to_host(hidden_states)), cache


# The compiled forward pass of each model that has generated.
_steps: _private.WeakIdentityDict[keras.Model, Callable[..., Any]] = _private.WeakIdentityDict()


def _forward_step(model: keras.Model, forward: types.MethodType, mesh: dtensor.Mesh) -> Callable[..., Any]:
    """Return a model's `forward` as a step for `strategy.run`. The step does not keep the model alive."""
    reference, function = weakref.ref(model), forward.__func__

    def pin(cache: tf.Tensor) -> tf.Tensor:
        return transfer.relayout(cache, _cache_axes(reference(), tuple(cache.shape), mesh), mesh)

    def pinned(call: _private.Call) -> list[tf.Tensor]:
        assert call.outputs is not None  # The results of the rewrite rule.
        return [pin(output) for output in call.outputs]

    def step(*args: Any, **kwargs: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        # Layout propagation alone may lead to layouts that DTensor cannot transpose in the model's transposes.
        with _private.rewritten_operations(pinned, ("XlaDynamicUpdateSlice",)):
            logits, hidden_states, cache = function(reference(), *args, **kwargs)
        return logits, hidden_states, pin(cache)

    compiled: Callable[..., Any] = tf.function(step, jit_compile=False)
    return compiled


def _cache_axes(model: keras.Model, shape: tuple[int, ...], mesh: dtensor.Mesh) -> Axes:
    """Return the layout of a cache of shape (batch, ..., heads, head size)."""
    axes = list(batching.batch_axes(shape, mesh))
    if len(shape) >= 4:
        axes[-2] = _heads_axis(model, shape[-2])
    return tuple(axes)


def _heads_axis(model: keras.Model, heads: int) -> str | None:
    """Return the mesh axis that shards the heads of the model's key projections."""
    for variable, layer in inventory.owned_variables(model):
        current = _private.backend_variable(variable)
        is_key = isinstance(layer, keras.layers.EinsumDense) and variable.path.endswith("key/kernel")
        if is_key and isinstance(current, ShardedVariable):
            dim = layer_dim(current.layout.spec, "column")
            if dim is not None and variable.shape[dim] == heads:
                return current.layout.compute[dim]
    return None


def _check_can_generate(model: keras.Model) -> None:
    """Raise `UnsupportedOperationError` for other models and for samplers that reorder the cache."""
    from keras_hub.models import CausalLM, Seq2SeqLM
    from keras_hub.samplers import Sampler

    if not isinstance(model, CausalLM) or isinstance(model, Seq2SeqLM) or not hasattr(type(model), "call_with_cache"):
        raise UnsupportedOperationError(
            f"generate() of a sharded model works for KerasHub's decoder-only language models (CausalLM). {_REMEDY} "
            f"Received: model '{model.name}' of type {type(model).__name__}"
        )
    strategy = _private.distribute_strategy(model)
    axes = axis_sizes(strategy.mesh) if isinstance(strategy, ShardedStrategy) else None
    if axes is not None and axes.contexts > 1:
        raise UnsupportedOperationError(
            f"generate() does not work on a mesh with a context axis, which splits sequences. {_REMEDY} Received: "
            f"mesh={axes}"
        )
    if type(model.sampler).__call__ is not Sampler.__call__:
        raise UnsupportedOperationError(
            "generate() of a sharded model works with samplers that choose from one position's probabilities: "
            "greedy, top_k, top_p, random, and custom samplers with get_next_token. Other samplers reorder or copy "
            f"the cache, which stays on the mesh. Compile the model with a supported sampler. {_REMEDY} Received: "
            f"sampler={model.sampler!r}"
        )


_REMEDY = "Or load the saved weights into a model without a strategy, and generate with that."
