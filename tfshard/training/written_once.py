"""Files that the clients of a launched run write together: one client writes them, and all clients wait for the files.

All clients take part, because only all clients together can read the variables. The other clients write to a temporary
directory, which is deleted.
"""

import contextlib
import functools
import os
import pathlib
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfshard import _private
from tfshard.devices import clients, messages, process_lock
from tfshard.errors import warn
from tfshard.storage.variables import ShardedVariable
from tfshard.training.strategy import ShardedStrategy


class _FileWriting(threading.local):
    # True while this thread writes a file of Keras, or a checkpoint of TensorFlow.
    in_file = False
    in_checkpoint = False
    # `is_shared`: the checkpoint has sharded variables. `writes`: this client writes the files.
    is_shared = False
    writes = True


_here = _FileWriting()


@contextlib.contextmanager
def file(model: keras.Model, method: str, path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    """Yield the path to which this client writes a file. Client 0 writes to `path` itself.

    When the context ends, the file is complete on all clients.
    """
    here = clients.here()
    if _here.in_file:
        yield path
        return
    with process_lock.held(), here.purpose(f"{method} of model '{model.name}'"):
        _here.in_file = True
        try:
            with _elsewhere(here.rank != 0, path) as place:
                yield place
        finally:
            _here.in_file = False
        here.barrier("a saved model")


@contextlib.contextmanager
def _elsewhere(is_elsewhere: bool, path: str | os.PathLike[str]) -> Iterator[str | os.PathLike[str]]:
    if not is_elsewhere:
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        yield pathlib.Path(directory) / pathlib.Path(path).name


@functools.cache
def start() -> None:
    """Make checkpoints and models write on one client only.

    Changes `tf.train.Checkpoint`, `tf.train.CheckpointManager` and `keras.saving.save_model` of the process.
    """
    _private.write_checkpoints_in(_checkpoint, _checkpoint_files, lambda: _here.writes, _is_written_at_once)
    _private.write_models_in(_model_file)


def _model_file(model: keras.Model, path: Any) -> contextlib.AbstractContextManager[Any]:
    if not isinstance(_private.distribute_strategy(model), ShardedStrategy) or not isinstance(path, (str, os.PathLike)):
        return contextlib.nullcontext(path)
    return file(model, "save_model", path)


@contextlib.contextmanager
def _checkpoint() -> Iterator[None]:
    """Surround `save` and `write`. When the context ends, the files and the list of checkpoints exist."""
    here = clients.here()
    if here.count == 1 or _here.in_checkpoint:
        with process_lock.held():
            yield
        return
    _here.in_checkpoint = True
    try:
        with process_lock.held(), here.purpose("a tf.train.Checkpoint"):
            yield
            if _here.is_shared:
                here.barrier("a tf.train.Checkpoint")
    finally:
        _here.in_checkpoint, _here.is_shared, _here.writes = False, False, True


def _is_sharded(trackable: Any) -> bool:
    """Return whether an object of a checkpoint is a sharded variable, or a Keras variable around one."""
    if isinstance(trackable, keras.Variable):
        trackable = _private.backend_variable(trackable)
    return isinstance(trackable, ShardedVariable)


def _is_written_at_once(objects: Iterable[Any]) -> bool:
    """Return True, with a warning, if an asynchronous save must end before `save` returns.

    The thread would read the values of later steps. In addition, a client's thread cannot take part in the collectives
    that read the variables.
    """
    if not any(map(_is_sharded, objects)):
        return False
    warn(
        "A tf.train.Checkpoint with sharded variables is written before save() or write() returns: enable_async=True "
        "has no effect. To write while training goes on, use tfshard.CheckpointCallback, or "
        "tfshard.CheckpointManager with save(..., wait=False).",
        UserWarning,
    )
    return True


@contextlib.contextmanager
def _checkpoint_files(objects: Iterable[Any], prefix: str) -> Iterator[Any]:
    """Surround the writing of a checkpoint's files.

    If several clients write to one path, only the first of them writes.
    """
    if not _here.in_checkpoint or not any(map(_is_sharded, objects)):
        yield prefix
        return
    paths = messages.of_all(zlib.crc32(os.path.abspath(prefix).encode()))
    rank = clients.here().rank
    _here.is_shared, _here.writes = True, paths.index(paths[rank]) == rank
    with _elsewhere(not _here.writes, prefix) as place:
        yield str(place)
