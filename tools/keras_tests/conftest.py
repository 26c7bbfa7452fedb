"""Define the names that Keras's tests import from the conftest of Keras's repository, which the wheel does not have."""

import keras
import pytest


def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test on a backend."""
    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)
