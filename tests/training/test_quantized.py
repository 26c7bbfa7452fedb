"""Models after `quantize`, with and without LoRA, match one device in training."""

import itertools
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard
from sweeps import table

RS = np.random.RandomState(0)
X = RS.normal(size=(16, 6, 16)).astype("float32")
Y = RS.normal(size=(16, 3)).astype("float32")

# The quantization, whether LoRA is added before, and the dtype in which a kernel is stored then.
WAYS = {
    "int8": ("int8", False, "int8"),
    "int8 and LoRA": ("int8", True, "int8"),
    "int4 and LoRA": ("int4", True, "int8"),
    "float8": ("float8", False, "float32"),
}


def train(way: str, strategy: tfshard.ShardedStrategy | None, export: pathlib.Path | None = None):
    mode, lora, kernel = WAYS[way]
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 16))
    x = keras.layers.Dense(16, activation="gelu")(inputs)
    x = keras.layers.EinsumDense("abc,cd->abd", (None, 16), bias_axes="d")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    quantized = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)]
    for layer in quantized:
        if lora:
            layer.enable_lora(4)
        layer.quantize(mode)
    assert {layer._kernel.dtype for layer in quantized} == {kernel}, "premise: kernels are quantized"
    optimizer = keras.optimizers.Adam(1e-2)
    if strategy is None:
        model.compile(optimizer, "mse", jit_compile=False)
    else:
        tfshard.as_distributed(model).compile(optimizer, "mse", strategy=strategy)
    losses = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
    assert losses[0] - losses[-1] > 1e-2, "premise: it learns"
    if export is not None:
        model.export(export, verbose=False)
    return losses, model.predict(X, verbose=0), {v.path: np.array(v.numpy(), "float32") for v in model.weights}


@pytest.mark.sweep(1)
@table(
    "quantized models", ("way", "stage"), itertools.product(WAYS, (0, 1, 2, 3)), sample=1,
    always=[(way, 3) for way in WAYS],
)  # fmt: skip
def test_a_quantized_model_trains_to_the_numbers_of_one_device(way, stage):
    expected = train(way, None)
    found = train(way, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)
    for path, weight in expected[2].items():
        np.testing.assert_allclose(found[2][path], weight, rtol=0, atol=2e-5, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_quantized_model_is_exported_with_its_values(way, tmp_path):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)
    predictions = train(way, strategy, export=tmp_path / "exported")[1]
    served = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(served.serve(X), predictions, rtol=0, atol=1e-5)
