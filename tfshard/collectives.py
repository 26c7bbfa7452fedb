"""Collectives on host values of the clients of a launched run: each client passes a value and gets the result.

A process that was not launched is a single client: the collectives run the same checks and return its value. Values are
numpy arrays, numbers and eager tensors. Values on a mesh are already global. All clients must call the same collectives
in the same order, in their main threads. The clients agree on shape and dtype before they use a device, so a mistake
raises an error on all clients instead of a hang.

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

# The axis of the meshes on which collectives run.
AXIS = "world"
REDUCTIONS: dict[str, Callable[..., tf.Tensor]] = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_sum,  # Divided afterwards.
    "min": tf.reduce_min,
    "max": tf.reduce_max,
}
# The dtypes that TensorFlow's CollectiveReduce supports.
_REDUCIBLE = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


def rank() -> int:
    """Return this client's number, from 0. A process that was not launched is client 0."""
    return _started().client_id


def world_size() -> int:
    """Return the number of clients. 1 in a process that was not launched."""
    return _started().num_clients


def barrier(timeout: float | None = None) -> None:
    """Wait for the operations that this client has started on its devices, and for all other clients.

    Args:
        timeout: The seconds to wait for the other clients. Default: the limit of the first step
            (`--first_step_timeout`).

    Raises:
        ClientError: A client did not come in time. Raised on all clients that came.
        CollectiveError: The timeout is not positive.
    """
    if timeout is not None and not timeout > 0:
        raise CollectiveError(f"timeout must be positive, or None. Received: timeout={timeout!r}")
    if not _is_running():
        return
    _private.wait_for_devices()
    clients.here().barrier(timeout=timeout)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Reduce all clients' values elementwise by sum, mean, minimum or maximum. Every client gets the result.

    Args:
        value: An array, a number or an eager tensor. Its shape and dtype must be equal on all clients. The dtype is
            float16, bfloat16, float32, float64, int32 or int64. `"mean"` needs a floating-point dtype.
        op: `"sum"`, `"mean"`, `"min"` or `"max"`.

    Returns:
        The result with the value's shape and dtype: a tensor for a tensor, otherwise a numpy array.

    Raises:
        CollectiveError: The value or `op` is wrong, or clients differ in shape, dtype or `op`.
    """
    array = _checked(value, op)
    if not _agreed("all_reduce", array, op=op):
        return _like(value, array)
    with _operation("all_reduce", array):
        result = reduce([tf.constant(array)], op, _clients_mesh())
        return _like(value, np.asarray(dtensor.unpack(result)[0]))


def all_gather(value: Any, axis: int = 0) -> Any:
    """Concatenate all clients' values along a dim, in client order. Every client gets the result.

    Args:
        value: An array or an eager tensor of numbers or bools, with at least one dim. Its shape and dtype must be equal
            on all clients.
        axis: The dim along which to concatenate.

    Returns:
        The result: a tensor for a tensor, otherwise a numpy array. The values are bit-identical.

    Raises:
        CollectiveError: The value is wrong, or clients differ in shape, dtype or `axis`.
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
    """Reduce all clients' values like `all_reduce`, and return this client's part of the result.

    Args:
        value: As for `all_reduce`. The number of clients must divide the first dim.
        op: `"sum"`, `"mean"`, `"min"` or `"max"`.

    Returns:
        Rows `rank() * n` to `(rank() + 1) * n` of the result, where n is the first dim divided by the number of
            clients.

    Raises:
        CollectiveError: The value or `op` is wrong, or clients differ in shape, dtype or `op`.
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
    """Send one client's value to all clients.

    Args:
        value: An array, a number or an eager tensor of numbers or bools, with the same shape and dtype on all clients.
            Only the contents on `root` count.
        root: The number of the client that sends its value.

    Returns:
        The root's value: a tensor for a tensor, otherwise a numpy array. The values are bit-identical.

    Raises:
        CollectiveError: The value or `root` is wrong, or clients differ in shape, dtype or `root`.
    """
    array, size = _checked(value), world_size()
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise CollectiveError(f"root must be the number of a client, from 0 to {size - 1}. Received: root={root!r}")
    if not _agreed("broadcast", array, root=root):
        return _like(value, array)
    with _operation("broadcast", array):
        words = to_words(array, np.int64)
        # An integer sum with zeros preserves every bit. 32-bit integers would be sent as 64 bits (by the counter).
        words = words if rank() == root else np.zeros_like(words)
        result = reduce([tf.constant(words)], "sum", _clients_mesh())
        return _like(value, from_words(np.asarray(dtensor.unpack(result)[0]), array.shape, array.dtype))


# --- on devices --------------------------------------------------------------------------------------


def reduce(tensors: Sequence[tf.Tensor], op: str, over: dtensor.Mesh, scattered: bool = False) -> tf.Tensor:
    """Reduce one tensor of each device of a mesh that has the single axis `AXIS`.

    Args:
        tensors: The tensors of the local devices, with equal shapes.
        op: A key of `REDUCTIONS`.
        over: The mesh.
        scattered: If True, each device keeps only its shard of the first dim.
    """
    return reduce_packed(pack(tensors, over), op, over, scattered)


def pack(tensors: Sequence[tf.Tensor], over: dtensor.Mesh) -> tf.Tensor:
    """Pack one tensor of each device into a DTensor with a leading device dim."""
    rank_ = tensors[0].shape.rank
    return dtensor.pack([tensor[tf.newaxis] for tensor in tensors], transfer.layout((AXIS, *(None,) * rank_), over))


def reduce_packed(packed: tf.Tensor, op: str, over: dtensor.Mesh, scattered: bool = False) -> tf.Tensor:
    """Reduce the result of `pack`, as `reduce` does."""
    result = REDUCTIONS[op](packed, axis=0)
    axes = (AXIS if scattered else None, *(None,) * (result.shape.rank - 1)) if result.shape.rank else ()
    result = transfer.relayout(result, axes, over)
    return result / tf.cast(over.size, result.dtype) if op == "mean" else result


def gather(rows: Sequence[tf.Tensor], over: dtensor.Mesh) -> tf.Tensor:
    """All-gather a row (1, n) of each device of a mesh that has the single axis `AXIS`. Returns (devices, n)."""
    return gather_packed(dtensor.pack(rows, transfer.layout((AXIS, None), over)), over)


def gather_packed(packed: tf.Tensor, over: dtensor.Mesh) -> tf.Tensor:
    """All-gather rows that are already one DTensor, as `gather` does."""
    with gathers.one_axis_at_once():
        return transfer.relayout(packed, (None, None), over)


@functools.cache
def _clients_mesh() -> dtensor.Mesh:
    """Return a mesh of the first device of each client."""
    over = mesh.distributed_mesh({AXIS: world_size()}, _started())
    transfer.meet(over)
    return over


# --- checks ------------------------------------------------------------------------------------------


def _started() -> startup.Runtime:
    started = startup.current()
    if started is None and startup.place_in_run() is not None:
        started = startup.initialize()
    return started or startup.Runtime(device_type="CPU", num_devices=1)


def _is_running() -> bool:
    """Return whether TensorFlow's devices have started. Listing the devices would start them."""
    _started()
    return _private.context_is_initialized()


def _checked(value: Any, op: str | None = None) -> np.ndarray:
    """Convert a value to an array that the collective supports."""
    if isinstance(value, (tf.Tensor, tf.Variable)) and not hasattr(value, "numpy"):
        raise CollectiveError(f"Collectives take eager values, not tensors of a tf.function. Received: {value!r}")
    if transfer.is_dtensor(value) or isinstance(value, MeshTensor):
        raise CollectiveError(
            "The value is on a mesh and is already global: every client has the same value. Received: a DTensor of "
            f"shape={value.shape}"
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
    """Check that all clients call the same collective. Returns False if the run has only one client."""
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
        _private.give_unique_names()


def _like(value: Any, array: np.ndarray) -> Any:
    """Return the result as a tensor or an array, like the value."""
    return tf.constant(array) if isinstance(value, (tf.Tensor, tf.Variable)) else np.array(array)
