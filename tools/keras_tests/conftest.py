"""What Keras's tests import of its repository's conftest, which is not in its wheel."""

import keras
import pytest


def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
    """A mark: the test is not for this backend."""
    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)
