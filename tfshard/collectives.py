"""Collectives on values of the clients of a launched run: each client gives one, and gets the result.

In a process that was not launched there is one client: the same checks, and its own value comes back. Values are
numpy arrays, numbers and eager tensors; what lives on a mesh is global already. All clients have to call the same
collectives in the same order, each from its main thread. They agree on shape and dtype before a device is touched, so
that a mistake is an error on all of them and not a hang.

>>> import numpy as np
>>> from tfshard import collectives
>>> collectives.rank(), collectives.world_size()
(0, 1)
>>> collectives.all_reduce(np.array([1.0, 2.0]), "mean")
array([1., 2.])
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, gathers, mesh, startup, transfer
from tfshard.devices.mesh_tensors import MeshTensor
from tfshard.devices.words import from_words, to_words
from tfshard.errors import CollectiveError

__all__ = ["all_gather", "all_reduce", "barrier", "broadcast", "rank", "reduce_scatter", "world_size"]

# The axis of the meshes that collectives run on.
AXIS = "world"
REDUCTIONS: dict[str, Callable[..., tf.Tensor]] = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_sum,  # Divided afterwards.
    "min": tf.reduce_min,
    "max": tf.reduce_max,
}
# What TensorFlow's CollectiveReduce takes.
_REDUCIBLE = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


def rank() -> int:
    """This client's number, from 0; 0 in a process that was not launched."""
    return _started().client_id


def world_size() -> int:
    """The number of clients; 1 in a process that was not launched."""
    return _started().num_clients


def barrier(timeout: float | None = None) -> None:
    """Waits for what this client has started on its devices, and for all other clients.

    Args:
        timeout: Seconds to wait for the others; by default what the first step may take (`--first_step_timeout`).

    Raises:
        ClientError: Clients did not come in time; on all that came.
    """
    if timeout is not None and not timeout > 0:
        raise CollectiveError(f"timeout must be positive, or None. Received: timeout={timeout!r}")
    if not _is_running():
        return
    _private.wait_for_devices()
    clients.here().barrier(timeout=timeout)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """The sum, mean, minimum or maximum of all clients' values, element by element; on all clients.

    Args:
        value: An array, a number or an eager tensor of any shape, the same on all clients; float16, bfloat16, float32,
            float64, int32 or int64; for `"mean"` a floating one.
        op: `"sum"`, `"mean"`, `"min"` or `"max"`.

    Returns:
        The result, of the value's shape and dtype; a tensor for a tensor, else a numpy array.

    Raises:
        CollectiveError: A wrong value or `op`, or clients that differ in shape, dtype or `op`.
    """
    array = _checked(value, op)
    if not _agreed("all_reduce", array, op=op):
        return _like(value, array)
    with _operation("all_reduce", array):
        result = reduce([tf.constant(array)], op, _clients_mesh())
        return _like(value, np.asarray(dtensor.unpack(result)[0]))


def all_gather(value: Any, axis: int = 0) -> Any:
    """All clients' values, one behind the other along a dim; on all clients.

    Args:
        value: An array or an eager tensor of at least one dim, of the same shape on all clients; any numbers or bools.
        axis: The dim along which they are put.

    Returns:
        The result; a tensor for a tensor, else a numpy array. Every bit arrives as it was.

    Raises:
        CollectiveError: A wrong value, or clients that differ in shape, dtype or `axis`.
    """
    array = _checked(value)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -array.ndim <= axis < array.ndim:
        raise CollectiveError(f"axis must be a dim of the value. Received: axis={axis!r}, shape={array.shape}")
    if not _agreed("all_gather", array, axis=axis):
        return _like(value, array)
    with _operation("all_gather", array):
        words = gather([tf.constant(to_words(array)[np.newaxis])], _clients_mesh())
        rows = np.asarray(dtensor.unpack(words)[0])
        parts = [from_words(row, array.shape, array.dtype) for row in rows]
        return _like(value, np.concatenate(parts, axis=axis))


def reduce_scatter(value: Any, op: str = "sum") -> Any:
    """Each client's part of the sum, mean, minimum or maximum of all clients' values.

    Args:
        value: As for `all_reduce`, with a first dim that the number of clients divides.
        op: `"sum"`, `"mean"`, `"min"` or `"max"`.

    Returns:
        Rows `rank() * n` to `(rank() + 1) * n` of the result, n being the first dim over the number of clients.

    Raises:
        CollectiveError: A wrong value or `op`, or clients that differ in shape, dtype or `op`.
    """
    array, size = _checked(value, op), world_size()
    if array.ndim == 0 or array.shape[0] % size:
        raise CollectiveError(
            f"The first dim must be a multiple of the number of clients, {size}. Received: shape={array.shape}"
        )
    if not _agreed("reduce_scatter", array, op=op):
        return _like(value, array)
    with _operation("reduce_scatter", array):
        result = reduce([tf.constant(array)], op, _clients_mesh(), scattered=True)
        return _like(value, np.asarray(dtensor.unpack(result)[0]))


def broadcast(value: Any, root: int = 0) -> Any:
    """One client's value, on all clients.

    Args:
        value: An array, a number or an eager tensor; any numbers or bools. Of the same shape and dtype on all clients,
            the contents of which count on `root` only.
        root: The number of the client whose value it is.

    Returns:
        The value; a tensor for a tensor, else a numpy array. Every bit arrives as it was.

    Raises:
        CollectiveError: A wrong value or `root`, or clients that differ in shape, dtype or `root`.
    """
    array, size = _checked(value), world_size()
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise CollectiveError(f"root must be the number of a client, from 0 to {size - 1}. Received: root={root!r}")
    if not _agreed("broadcast", array, root=root):
        return _like(value, array)
    with _operation("broadcast", array):
        words = to_words(array, np.int64)
        # A sum with zeros, as integers: every bit stays as it is. Those of 32 bits are sent as 64 (by the counter).
        words = words if rank() == root else np.zeros_like(words)
        result = reduce([tf.constant(words)], "sum", _clients_mesh())
        return _like(value, from_words(np.asarray(dtensor.unpack(result)[0]), array.shape, array.dtype))


# --- on devices --------------------------------------------------------------------------------------


def reduce(pieces: Sequence[tf.Tensor], op: str, over: dtensor.Mesh, scattered: bool = False) -> tf.Tensor:
    """Reduces one tensor of each device of a mesh with the one axis `AXIS`.

    Args:
        pieces: Those of the local devices, of equal shapes.
        op: A key of `REDUCTIONS`.
        over: The mesh.
        scattered: Leave each device its part of the first dim only.
    """
    return reduce_packed(pack(pieces, over), op, over, scattered)


def pack(pieces: Sequence[tf.Tensor], over: dtensor.Mesh) -> tf.Tensor:
    """One tensor of each device as one DTensor, with a dim for the devices in front."""
    rank_ = pieces[0].shape.rank
    return dtensor.pack([piece[tf.newaxis] for piece in pieces], transfer.layout((AXIS, *(None,) * rank_), over))


def reduce_packed(packed: tf.Tensor, op: str, over: dtensor.Mesh, scattered: bool = False) -> tf.Tensor:
    """`reduce` of what `pack` returned."""
    result = REDUCTIONS[op](packed, axis=0)
    axes = (AXIS if scattered else None, *(None,) * (result.shape.rank - 1)) if result.shape.rank else ()
    result = transfer.relayout(result, axes, over)
    return result / tf.cast(over.size, result.dtype) if op == "mean" else result


def gather(rows: Sequence[tf.Tensor], over: dtensor.Mesh) -> tf.Tensor:
    """Gathers one row (1, n) of each device of a mesh with the one axis `AXIS`; (devices, n) on all of them."""
    return gather_packed(dtensor.pack(rows, transfer.layout((AXIS, None), over)), over)


def gather_packed(packed: tf.Tensor, over: dtensor.Mesh) -> tf.Tensor:
    """`gather` of rows that are one DTensor."""
    with gathers.one_axis_at_once():
        return transfer.relayout(packed, (None, None), over)


@functools.cache
def _clients_mesh() -> dtensor.Mesh:
    """The first device of each client."""
    over = mesh.distributed_mesh({AXIS: world_size()}, _started())
    transfer.meet(over)
    return over


# --- checks ------------------------------------------------------------------------------------------


def _started() -> startup.Runtime:
    started = startup.current()
    if started is None and clients.Settings.from_environment() is not None:
        started = startup.initialize()
    return started or startup.Runtime(device_type="CPU", num_devices=1)


def _is_running() -> bool:
    """Whether TensorFlow's devices are started; asking for them would start them."""
    _started()
    return _private.context_is_initialized()


def _checked(value: Any, op: str | None = None) -> np.ndarray:
    """The value as an array that the collective can take."""
    if isinstance(value, (tf.Tensor, tf.Variable)) and not hasattr(value, "numpy"):
        raise CollectiveError(f"Collectives take eager values, not tensors of a tf.function. Received: {value!r}")
    if transfer.is_dtensor(value) or isinstance(value, MeshTensor):
        raise CollectiveError(
            "The value lives on a mesh and is global already: every client has the same one. "
            f"Received: a DTensor of shape={value.shape}"
        )
    array = transfer.to_host(value)
    if op is None:
        if array.dtype == object or array.dtype.kind in "SUO" or array.dtype.hasobject:
            raise CollectiveError(f"Collectives take numbers and bools. Received: dtype={array.dtype}")
        return array
    if op not in REDUCTIONS:
        raise CollectiveError(f"Unknown reduction. Reductions: {tuple(REDUCTIONS)}. Received: op={op!r}")
    if array.dtype.name not in _REDUCIBLE:
        raise CollectiveError(f"Dtypes that can be reduced: {_REDUCIBLE}. Received: dtype={array.dtype}")
    if op == "mean" and array.dtype.kind == "i":
        raise CollectiveError(f"A mean needs a floating dtype. Received: dtype={array.dtype}")
    return array


def _agreed(kind: str, array: np.ndarray, **options: Any) -> bool:
    """Checks that all clients mean the same; False when there is only one."""
    if world_size() == 1:
        return False
    given = {"shape": list(array.shape), "dtype": array.dtype.name, **options}
    clients.here().agree(kind, given, error=CollectiveError)
    return True


_seen: set[tuple[str, tuple[int, ...], str]] = set()


@contextlib.contextmanager
def _operation(kind: str, array: np.ndarray) -> Iterator[None]:
    what = (kind, array.shape, array.dtype.name)
    first = what not in _seen
    _seen.add(what)
    with clients.here().operation(f"{kind} of {array.dtype.name}{list(array.shape)}", first=first):
        yield
    if first:
        _private.give_own_names()


def _like(value: Any, array: np.ndarray) -> Any:
    """The result in the kind of the value."""
    return tf.constant(array) if isinstance(value, (tf.Tensor, tf.Variable)) else np.array(array)
