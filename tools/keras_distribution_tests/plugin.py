"""Let Keras's distribution tests for JAX run on TensorFlow: a plugin of pytest (__main__.py)."""

from unittest import mock

import keras
import pytest
import stand_in_for_jax
from keras.src import backend

import tfshard

tfshard.initialize(num_devices=8, device_type="CPU")
stand_in_for_jax.install()
_says_jax = mock.patch.object(backend, "backend", lambda: "jax")


def pytest_collection():
    # Marks such as skipif(backend.backend() != "jax") are evaluated while the tests are imported.
    _says_jax.start()


def pytest_collection_finish():
    _says_jax.stop()
    assert keras.backend.backend() == "tensorflow"


@pytest.fixture(autouse=True)
def eager_steps_if_layouts_are_captured(request, monkeypatch):
    """Run eager steps in the test that captures the layout of a layer's output.

    JAX calls back with the sharding when a compiled step runs. DTensor knows the layout of a value, not of a graph's
    tensor.
    """
    if request.node.name == "test_e2e_model_parallel_with_output_sharding":
        compile_ = keras.Model.compile
        monkeypatch.setattr(
            keras.Model, "compile", lambda self, *args, **kwargs: compile_(self, *args, run_eagerly=True, **kwargs)
        )
