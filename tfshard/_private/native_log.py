"""The log level of TensorFlow's C++ code (`absl::SetMinLogLevel`), which TensorFlow does not expose in Python."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import tensorflow as tf

# The long-term releases of Abseil in TensorFlow 2.19 to 2.21. The function's name contains the release.
_RELEASES = ("20230802", "20240722", "20250127", "20250814")
_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_framework.2.dylib")
_WARNING, _FATAL = 1, 3

_lock = threading.Lock()
# The number of contexts without errors that are open, in all threads.
_silent = 0


def quiet_native_log() -> bool:
    """Log only warnings and errors of C++ code, unless the user has set TF_CPP_MIN_LOG_LEVEL.

    DTensor logs two lines for each function that it compiles. TensorFlow reads the environment variable only at import.

    Returns:
        False if the user has set the variable, or if TensorFlow has an unknown Abseil release. Otherwise True.
    """
    return _set_level(_WARNING)


@contextlib.contextmanager
def without_native_errors() -> Iterator[None]:
    """Log no errors of C++ code inside the context, unless the user has set TF_CPP_MIN_LOG_LEVEL."""
    global _silent
    with _lock:
        _silent += 1
        _set_level(_FATAL)
    try:
        yield
    finally:
        with _lock:
            _silent -= 1
            if not _silent:
                _set_level(_WARNING)


def _set_level(level: int) -> bool:
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return False
    for name in _LIBRARIES:
        path = os.path.join(tf.sysconfig.get_lib(), name)
        if not os.path.exists(path):
            continue
        try:
            library = ctypes.CDLL(path)  # Already loaded.
        except OSError:
            return False
        for release in _RELEASES:
            set_level = getattr(library, f"_ZN4absl12lts_{release}14SetMinLogLevelENS0_18LogSeverityAtLeastE", None)
            if set_level is not None:
                set_level(ctypes.c_int(level))
                return True
    return False
