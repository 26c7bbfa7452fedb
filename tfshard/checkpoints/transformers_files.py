"""Export of a sharded KerasHub model to the format of Hugging Face transformers, one tensor at a time.

KerasHub's own export makes all tensors of the file before it writes the first. Here KerasHub's function that names the
weights is traced instead: it receives placeholders for the variables, and each tensor of the file is computed from the
variables that it needs when it is written. KerasHub writes all other files.
"""

import functools
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.checkpoints import files, safetensors_files
from tfshard.checkpoints.written_files import Files, Put, check_shard_size, tensor_files, write_together
from tfshard.devices import clients, host_memory, process_lock
from tfshard.errors import CheckpointError
from tfshard.operations import layer_patch
from tfshard.storage.variables import ShardedVariable
from tfshard.training import attached_model

_EXPORT = layer_patch.register(
    layer_patch.Change(
        of="KerasHub's backbones and language models",
        attribute="export_to_transformers",
        why="gathers and writes one tensor at a time, where KerasHub makes all tensors of the file first",
        module="transformers_files",
    )
)
_FILE = "model.safetensors"


def export_to_transformers(
    model: keras.Model, path: str | os.PathLike[str], max_shard_size: float | None = None
) -> pathlib.Path:
    """Write a KerasHub model as a directory that Hugging Face transformers loads.

    The function writes the files that KerasHub's `model.export_to_transformers(path)` writes, with the same tensors bit
    for bit. It gathers one variable at a time on the host, and writes each tensor before the next. The method of a
    sharded model calls this function. With several clients, each client calls it, and the first client writes.

    Args:
        model: A built backbone or language model of KerasHub, under a `ShardedStrategy` or not.
        path: The directory. Files in it that have the same names are replaced.
        max_shard_size: The maximum size of one of several safetensors files, in GiB. A larger tensor
            has a file of its own. None for one file, `model.safetensors`.

    Returns:
        The path of `model.safetensors`, or of `model.safetensors.index.json` if there are several files.

    Raises:
        CheckpointError: KerasHub has no export for the model, the model is not built, or a file cannot be written.

    Example:

    >>> import keras_hub, os, tempfile, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    >>> with strategy.scope():
    ...     backbone = keras_hub.models.GPT2Backbone(
    ...         vocabulary_size=32, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=64
    ...     )
    >>> path = tfshard.export_to_transformers(backbone, os.path.join(tempfile.mkdtemp(), "gpt2"))
    >>> sorted(os.listdir(path.parent))
    ['config.json', 'model.safetensors']
    """
    check_shard_size(max_shard_size)
    backbone = _checked_backbone(model)
    directory = pathlib.Path(path)
    with process_lock.held(), clients.here().purpose(f"export_to_transformers of model '{model.name}'"):
        with tempfile.TemporaryDirectory() as temporary:
            traced = _traced(model, backbone, pathlib.Path(temporary))
            planned = tensor_files(traced.specs, traced.put_all, directory / _FILE, max_shard_size)
            others = [each for each in pathlib.Path(temporary).iterdir() if each.name != _FILE]
            try:
                if clients.here().rank == 0:
                    directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"The model could not be written: {error}. Received: path='{path}'") from error
            return write_together(_with_others(planned, others, directory), directory)


def _checked_backbone(model: keras.Model) -> keras.Model:
    maps = _private.hub_weights_maps()
    backbone = getattr(model, "backbone", model)
    if not hasattr(type(model), "export_to_transformers") or type(backbone).__name__ not in maps:
        raise CheckpointError(
            "KerasHub exports only some models to transformers. Use tfshard.export(model, 'model.safetensors') for "
            f"other models. Backbones that it exports: {sorted(maps)}. Received: model={model!r}"
        )
    if not backbone.built:
        raise CheckpointError(f"The model must be built. Received: model={model!r}")
    return backbone


class _TracedWeights:
    """The tensors of a file as functions of variables.

    Args:
        function: The traced function, with an input for each variable.
        variables: The variables.
        outputs: The tensors by name.
    """

    def __init__(self, function: Any, variables: Sequence[keras.Variable], outputs: dict[str, tf.Tensor]):
        self._function = function
        self._outputs = outputs
        self._variables = {
            input_tensor.op.name: variable
            for input_tensor, variable in zip(function.inputs[: len(variables)], variables, strict=True)
        }
        self._inputs = {tensor.op.name: tensor for tensor in function.inputs[: len(variables)]}
        self.specs = [
            safetensors_files.TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype.name)
            for name, tensor in outputs.items()
        ]

    def put_all(self, put: Put) -> None:
        """Compute and pass one tensor after the other. All clients read the variables in this order."""
        for name, output in self._outputs.items():
            needed = self._needed(output)
            if clients.here().rank > 0:
                for each in needed:
                    _host_value(self._variables[each])
                put(name, np.zeros(()))
            elif output.op.name in self._variables:
                put(name, _host_value(self._variables[output.op.name]))
            else:
                put(name, self._computed(output, needed))

    def _computed(self, output: tf.Tensor, needed: Sequence[str]) -> np.ndarray:
        pruned = self._function.prune(feeds=[self._inputs[each] for each in needed], fetches=output)
        with tf.device("CPU:0"):
            return host_memory.view(pruned(*(host_memory.tensor_of(_host_value(self._variables[n])) for n in needed)))

    def _needed(self, output: tf.Tensor) -> list[str]:
        """Return the names of the inputs that a tensor is computed from, in their order."""
        seen, waiting = set(), [output.op]
        while waiting:
            operation = waiting.pop()
            if operation.name not in seen:
                seen.add(operation.name)
                waiting += [tensor.op for tensor in operation.inputs]
        return [name for name in self._inputs if name in seen]


def _host_value(variable: keras.Variable) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _traced(model: keras.Model, backbone: keras.Model, directory: pathlib.Path) -> _TracedWeights:
    """Let KerasHub write all files but the weights to a directory, and trace how it computes the weights."""
    found: list[_TracedWeights] = []

    def trace(weights_map: Any, exported: keras.Model, *args: Any, **kwargs: Any) -> dict[str, Any]:
        variables = exported.variables
        outputs: dict[str, tf.Tensor] = {}

        def computed(*inputs: tf.Tensor) -> list[tf.Tensor]:
            with keras.StatelessScope(state_mapping=list(zip(variables, inputs, strict=True))):
                for name, weight in weights_map(exported, *args, **kwargs).items():
                    outputs[name] = tf.convert_to_tensor(weight.value if isinstance(weight, keras.Variable) else weight)
            return list(outputs.values())

        specs = [tf.TensorSpec(v.shape, keras.backend.standardize_dtype(v.dtype)) for v in variables]
        function = tf.compat.v1.wrap_function(computed, specs)
        found.append(_TracedWeights(function, variables, outputs))
        return {"replaced": np.zeros((1,), np.float32)}

    with _private.replaced_weights_map(backbone, trace):
        type(model).export_to_transformers(model, str(directory))
    return found[0]


def _with_others(planned: Files, others: Sequence[pathlib.Path], directory: pathlib.Path) -> Files:
    """Return a plan that also writes the files that KerasHub has written, before the weights are in place."""

    def move(written: Sequence[pathlib.Path]) -> None:
        for each in others:
            copy = written[0].with_name(each.name)
            copy.write_bytes(each.read_bytes())
            files.sync(copy)
            os.replace(copy, directory / each.name)
        planned.move(written)

    return Files(result=planned.result, write=planned.write, read=planned.read, move=move)


def _install(model: keras.Model) -> None:
    """Let the method of a sharded KerasHub model, and of the models in it, export one tensor at a time."""
    for layer in _private.flatten_layers(model):
        if isinstance(layer, keras.Model) and hasattr(type(layer), "export_to_transformers"):
            layer_patch.apply(_EXPORT, layer, functools.partial(_method, layer))


def _method(model: keras.Model, original: layer_patch.Method) -> layer_patch.Method:
    def export(path: str | os.PathLike[str], max_shard_size: float | None = None) -> None:
        if any(isinstance(_private.backend_variable(variable), ShardedVariable) for variable in model.variables):
            export_to_transformers(model, path, max_shard_size)
        else:
            original(path)

    return export


attached_model.model_patchers.append(_install)
