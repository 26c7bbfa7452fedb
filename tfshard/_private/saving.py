"""Hooks around the writing of TensorFlow checkpoints and Keras files."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format as _legacy_h5_format
from keras.src.saving import saving_lib as _saving_lib
from tensorflow.python.checkpoint import checkpoint as _checkpoint
from tensorflow.python.checkpoint import checkpoint_management as _checkpoint_management

from tfshard._private import patches

Context: TypeAlias = contextlib.AbstractContextManager[Any]


def write_checkpoints_in(
    together: Callable[[], Context],
    files: Callable[[Iterable[Any], str], Context],
    writes: Callable[[], bool],
    at_once: Callable[[Iterable[Any]], bool],
) -> None:
    """Make `tf.train.Checkpoint` and `tf.train.CheckpointManager` save inside contexts from now on.

    Args:
        together: Returns the context for each `save` and `write`.
        files: Receives the saved objects and the file prefix. Returns the context for the writing of the files
            (`TrackableSaver.save`), which yields the prefix to write to.
        writes: Returns whether this process keeps the list of checkpoints and deletes old ones
            (`checkpoint_management.update_checkpoint_state_internal`, `_delete_file_if_exists`).
        at_once: Receives the objects that a thread is about to save (`CheckpointOptions(enable_async=True)`). Returns
            True to save them before `save` or `write` returns (`_write`, which reads the graph of `_saver`).
    """

    def save_without_thread(save: Callable[..., Any], self: Any, file_prefix: Any, options: Any = None) -> Any:
        is_async = getattr(options, "experimental_enable_async_checkpoint", False)
        if is_async and at_once(self._saver._graph_view.breadth_first_traversal()[0]):
            options = copy.copy(options)
            options.experimental_enable_async_checkpoint = options.enable_async = False
        return save(self, file_prefix, options=options)

    def save_to(save: Callable[..., Any], self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        prefix = tf.get_static_value(file_prefix) if tf.is_tensor(file_prefix) else file_prefix
        if prefix is None:  # In a graph, the prefix is known only at run time.
            return save(self, file_prefix, *args, **kwargs)
        prefix = prefix.decode() if isinstance(prefix, bytes) else str(prefix)
        with files(self._graph_view.breadth_first_traversal()[0], prefix) as place:
            saved = save(self, place, *args, **kwargs)
        return saved if place == prefix else tf.constant(prefix)

    def save_together(save: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        with together():
            return save(self, *args, **kwargs)

    def write_here(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return write(*args, **kwargs) if writes() else None

    changed = (
        (_checkpoint.TrackableSaver, "save", save_to),
        (tf.train.Checkpoint, "save", save_together),
        (tf.train.Checkpoint, "write", save_together),
        (tf.train.CheckpointManager, "save", save_together),
        (tf.train.Checkpoint, "save", save_without_thread),
        (tf.train.Checkpoint, "_write", save_without_thread),
        (_checkpoint_management, "update_checkpoint_state_internal", write_here),
        (_checkpoint_management, "_delete_file_if_exists", write_here),
    )
    for owner, name, version in changed:
        _replace(owner, name, version, "one client of a launched run writes, and the others wait for the file")


def write_models_in(file: Callable[[keras.Model, str], Context]) -> None:
    """Make `keras.saving.save_model` write inside `file(model, path)`, which yields the path to write to, from now on.

    Changes `saving_lib.save_model` and `legacy_h5_format.save_model_to_hdf5`.
    """

    def save(original: Callable[..., Any], model: keras.Model, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with file(model, filepath) as place:
            return original(model, place, *args, **kwargs)

    reason = "one client of a launched run writes a model"
    _replace(_saving_lib, "save_model", save, reason)
    _replace(_legacy_h5_format, "save_model_to_hdf5", save, reason)


def _replace(owner: Any, name: str, version: Callable[..., Any], reason: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return version(original, *args, **kwargs)

    patches.replace(owner, name, replaced, reason)
