"""TensorFlow's context and DTensor's device: a process has one of each."""

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


def context_is_initialized() -> bool:
    """Whether TensorFlow has already fixed its devices (`context.context()._initialized`)."""
    return bool(_context.context()._initialized)


def before_first_use(callback: Callable[[], object] | None) -> None:
    """`callback()` is called before TensorFlow fixes its devices (`Context.ensure_initialized`, in the one context that
    there is); None: it is not called any more."""
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
    """Whether DTensor's accelerator system was started (`accelerator_util.is_initialized`)."""
    return bool(_accelerator_util.is_initialized())


def dtensor_has_device() -> bool:
    """Whether DTensor operations have run in this process already (`api._dtensor_singleton`)."""
    return _dtensor_api._dtensor_singleton is not None


def make_dtensor_synchronous() -> None:
    """Makes every DTensor operation end before the call that started it returns (`api.reset_dtensor_device`).

    By default DTensor's device threads run up to eight operations behind Python, and a failure in one of them stays in
    the handles of its results: whoever does not read those never hears of it.
    """
    _dtensor_api.reset_dtensor_device(is_async=False)


@contextlib.contextmanager
def default_mesh(mesh: dtensor.Mesh) -> Iterator[None]:
    """A context in which functions that are called have `mesh` for what depends on no DTensor, such as a loop's counter
    (`DTensorDevice._experimental_default_mesh`). `dtensor.default_mesh` puts all that is made meanwhile there too, and
    stays after an error."""
    chosen = _dtensor_api._dtensor_device()._experimental_default_mesh(mesh)
    chosen.__enter__()
    try:
        yield
    finally:
        chosen.__exit__(None, None, None)


def gradients_without_optionals() -> contextlib.AbstractContextManager[None]:
    """A context in which the gradient of a `tf.cond` takes what the branches computed as it is (TensorFlow's `context`
    module, temporarily_disable_optionals_in_gradients)."""
    disabled: contextlib.AbstractContextManager[None] = _context.temporarily_disable_optionals_in_gradients()
    return disabled


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """A context in which TensorFlow does not log what it sets up (`absl.logging`, which has no such context)."""
    before = _absl_logging.get_verbosity()
    _absl_logging.set_verbosity(_absl_logging.WARNING)
    try:
        yield
    finally:
        _absl_logging.set_verbosity(before)


def wait_for_devices() -> None:
    """Returns when all operations that were started have ended (`context.async_wait`)."""
    _context.async_wait()


def next_number() -> int:
    """TensorFlow's count of operations and functions, which is in the names of functions (`ops.uid`)."""
    return int(_ops.uid())


def checks_all_numbers() -> bool:
    """Whether `tf.debugging.enable_check_numerics` is on in this thread (`check_numerics_callback._state`)."""
    return hasattr(_check_numerics_callback._state, "check_numerics_callback")


def is_eager() -> bool:
    """Whether operations run now rather than being traced."""
    return bool(tf.executing_eagerly())
