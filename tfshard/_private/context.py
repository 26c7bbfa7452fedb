"""TensorFlow's context and DTensor's device, of which each process has exactly one."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from absl import logging as _absl_logging
from tensorflow.dtensor.python import accelerator_util as _accelerator_util
from tensorflow.dtensor.python import api as _dtensor_api
from tensorflow.experimental import dtensor
from tensorflow.python.debug.lib import check_numerics_callback as _check_numerics_callback
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import ops as _ops
from tensorflow.python.util._pywrap_util_port import IsMklEnabled


def context_is_initialized() -> bool:
    """Return whether TensorFlow has fixed its devices (`context.context()._initialized`)."""
    return bool(_context.context()._initialized)


def has_onednn() -> bool:
    """Return whether CPU kernels use oneDNN: by default on CPUs with VNNI or AMX (`TF_ENABLE_ONEDNN_OPTS`)."""
    return bool(IsMklEnabled())


def devices_are_listed() -> bool:
    """Return whether TensorFlow has looked for devices, and read its flags (`context.context()._physical_devices`)."""
    return _context.context()._physical_devices is not None


def before_first_use(callback: Callable[[], object] | None) -> None:
    """Call `callback()` just before TensorFlow fixes its devices (`Context.ensure_initialized`). None removes the
    callback."""
    context = _context.context()
    vars(context).pop("ensure_initialized", None)
    if callback is None or context._initialized:
        return

    def ensure_initialized() -> None:
        before_first_use(None)
        callback()
        context.ensure_initialized()

    context.ensure_initialized = ensure_initialized


def dtensor_is_initialized() -> bool:
    """Return whether DTensor's accelerator system has been started (`accelerator_util.is_initialized`)."""
    return bool(_accelerator_util.is_initialized())


def dtensor_has_device() -> bool:
    """Return whether this process has run DTensor operations (`api._dtensor_singleton`)."""
    return _dtensor_api._dtensor_singleton is not None


def make_dtensor_synchronous() -> None:
    """Make every DTensor operation finish before the call that started it returns (`api.reset_dtensor_device`).

    By default, DTensor's device threads run up to eight operations behind Python. If one of these operations fails,
    only the handles of its results hold the error, and a caller who does not read the results never sees it.
    """
    _dtensor_api.reset_dtensor_device(is_async=False)


@contextlib.contextmanager
def default_mesh(mesh: dtensor.Mesh) -> Iterator[None]:
    """Call functions in the context with `mesh` as the default mesh (`DTensorDevice._experimental_default_mesh`).

    DTensor uses the default mesh for values that depend on no DTensor, such as a loop counter. `dtensor.default_mesh`
    would also place every tensor created in the context on the mesh, and it stays active after an error.
    """
    chosen = _dtensor_api._dtensor_device()._experimental_default_mesh(mesh)
    chosen.__enter__()
    try:
        yield
    finally:
        chosen.__exit__(None, None, None)


def gradients_without_optionals() -> contextlib.AbstractContextManager[None]:
    """Make the gradients of `tf.cond` read the branches' intermediates directly inside the context.

    Calls temporarily_disable_optionals_in_gradients of TensorFlow's `context` module.
    """
    disabled: contextlib.AbstractContextManager[None] = _context.temporarily_disable_optionals_in_gradients()
    return disabled


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Silence TensorFlow's setup messages inside the context (through `absl.logging`)."""
    before = _absl_logging.get_verbosity()
    _absl_logging.set_verbosity(_absl_logging.WARNING)
    try:
        yield
    finally:
        _absl_logging.set_verbosity(before)


def wait_for_devices() -> None:
    """Wait until all operations that were started have finished (`context.async_wait`)."""
    _context.async_wait()


def next_number() -> int:
    """Return the next value of the counter that TensorFlow puts into operation and function names (`ops.uid`)."""
    return int(_ops.uid())


def checks_all_numbers() -> bool:
    """Return whether `tf.debugging.enable_check_numerics` is on in this thread (`check_numerics_callback._state`)."""
    return hasattr(_check_numerics_callback._state, "check_numerics_callback")


def is_eager() -> bool:
    """Return whether operations run eagerly, not in a trace."""
    return bool(tf.executing_eagerly())
