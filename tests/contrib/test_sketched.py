"""SketchedDense: its formula, its behavior as a Keras layer, and parity with one device under tensor parallelism."""

import keras
import numpy as np
import pytest

import parity
import tfshard
from tfshard.layers import SketchedDense

INPUTS, HIDDEN = 24, 32


def build() -> keras.Model:
    """Return a feed-forward pair of sketched layers between Dense layers, on sequences."""
    inputs = keras.Input((3, INPUTS))
    x = keras.layers.Dense(INPUTS, name="stem")(inputs)
    x = SketchedDense(HIDDEN, sketch_size=2, num_sketches=2, activation="tanh", seed=3, name="up")(x)
    x = SketchedDense(INPUTS, sketch_size=3, kernel_regularizer="l2", name="down")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


def batches() -> list:
    rs = np.random.RandomState(0)
    samples = [(rs.normal(size=(8, 3, INPUTS)), rs.normal(size=(8, 3, 2))) for _ in range(3)]
    return [(x.astype("float32"), y.astype("float32")) for x, y in samples]


def megatron() -> tfshard.LayoutMap:
    layout_map = tfshard.LayoutMap()
    layout_map.column("up")
    layout_map.row("down")
    layout_map.replicated(".*", optional=True)
    return layout_map


def sharded(mesh: dict, stage: int) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(**mesh), megatron(), zero_stage=stage)


def numpy_weights(layer: SketchedDense) -> dict[str, np.ndarray]:
    return {v.name: np.array(keras.ops.convert_to_numpy(v), "float64") for v in layer.weights}


# --- The formula ---------------------------------------------------------------------------------------


def test_output_is_the_mean_of_the_sketched_products_plus_bias():
    layer = SketchedDense(HIDDEN, sketch_size=2, num_sketches=3, bias_initializer="normal", activation="relu")
    x = np.random.RandomState(0).normal(size=(5, INPUTS)).astype("float32")
    outputs = keras.ops.convert_to_numpy(layer(x))
    w = numpy_weights(layer)
    expected = w["bias"].copy()
    for i in range(3):
        k = slice(2 * i, 2 * i + 2)
        first = w["input_kernel"][:, k] @ w["output_sketch"][k]
        second = w["input_sketch"][:, k] @ w["output_kernel"][k]
        expected = expected + x @ (first + second) / (2 * 3)
    np.testing.assert_allclose(outputs, np.maximum(expected, 0), rtol=1e-5, atol=1e-6)


def test_training_begins_at_the_sketches_of_one_kernel():
    kernel = np.random.RandomState(1).normal(size=(INPUTS, HIDDEN)).astype("float32")
    layer = SketchedDense(HIDDEN, sketch_size=4, kernel_initializer=lambda shape, dtype: kernel)
    layer.build((None, INPUTS))
    w = numpy_weights(layer)
    for name in ("input_sketch", "output_sketch"):
        np.testing.assert_allclose(np.abs(w[name]), 0.5, err_msg=name)
        assert abs(w[name].mean()) < 0.2, name
    np.testing.assert_allclose(w["input_kernel"], kernel @ w["output_sketch"].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(w["output_kernel"], w["input_sketch"].T @ kernel, rtol=1e-4, atol=1e-5)


def test_the_mean_over_sketches_is_the_dense_layer_and_the_variance_as_documented():
    n, m, k = 10, 14, 2
    x = np.random.RandomState(0).normal(size=(n,)).astype("float32")
    means, squares = [], []
    for seed in range(300):
        kernel = np.random.RandomState(1000 + seed).normal(size=(n, m)).astype("float32")
        layer = SketchedDense(m, k, kernel_initializer=lambda shape, dtype, w=kernel: w, use_bias=False, seed=seed)
        y = keras.ops.convert_to_numpy(layer(x[None]))[0]
        means.append((y * (x @ kernel)).mean())  # x @ W with itself, if y is x @ W on average.
        squares.append(np.square(y).mean())
    dense = np.square(x).sum()
    np.testing.assert_allclose(np.mean(means), dense, rtol=0.12)
    np.testing.assert_allclose(np.mean(squares), dense * (1 + (n + m - 2) / (4 * k)), rtol=0.12)


def test_weights_and_multiplications_are_those_of_the_cost_formula():
    n, m, k, sketches = 40, 48, 3, 2
    layer = SketchedDense(m, k, sketches, use_bias=False)
    layer.build((None, n))
    trained = sum(int(np.prod(v.shape)) for v in layer.trainable_weights)
    assert trained == sketches * k * (n + m)
    assert layer.count_params() == 2 * trained < n * m


# --- A Keras layer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["units", "sketch_size", "num_sketches"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_a_size_that_is_no_positive_integer_is_refused(name, value):
    with pytest.raises(tfshard.ShardingError, match=f"{name} must be a positive integer. Received: {name}="):
        SketchedDense(**{"units": 8, "sketch_size": 2, "num_sketches": 1, name: value})


def test_a_sketch_that_costs_more_than_a_dense_layer_warns_with_the_largest_that_does_not():
    # 2 l k (12 + 24) <= 12 * 24 up to l k = 4.
    with pytest.warns(UserWarning, match="must be at most 4 to save weights") as warned:
        SketchedDense(24, sketch_size=5).build((None, 12))
    assert [each.filename for each in warned] == [__file__], "it points to the user's line"
    SketchedDense(24, sketch_size=4).build((None, 12))  # Warnings are errors here.


def test_inputs_of_unknown_size_are_refused():
    with pytest.raises(tfshard.ShardingError, match="last dim of the inputs of layer 'sketched' must be known"):
        SketchedDense(8, 2, name="sketched").build((None, None))


def test_the_same_seed_gives_the_same_sketches_and_another_seed_others():
    def sketch(seed):
        layer = SketchedDense(HIDDEN, 4, seed=seed)
        layer.build((None, INPUTS))
        return numpy_weights(layer)["input_sketch"]

    np.testing.assert_array_equal(sketch(5), sketch(5))
    assert not np.array_equal(sketch(5), sketch(6))
    keras.utils.set_random_seed(1)
    first, other = sketch(None), sketch(None)
    keras.utils.set_random_seed(1)
    np.testing.assert_array_equal(sketch(None), first)
    assert not np.array_equal(first, other)


def test_config_round_trip_keeps_every_argument():
    layer = SketchedDense(
        16, 2, 3, activation="gelu", use_bias=True, kernel_initializer="he_normal", bias_initializer="ones",
        kernel_regularizer="l1", bias_regularizer="l2", activity_regularizer="l2", kernel_constraint="non_neg",
        bias_constraint="unit_norm", seed=9, name="s", dtype="mixed_bfloat16",
    )  # fmt: skip
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, SketchedDense)
    assert keras.saving.serialize_keras_object(again) == config
    assert again.compute_output_shape((None, 5, 64)) == (None, 5, 16)


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_bfloat16", "float16"])
def test_dtype_policy_decides_what_is_stored_and_computed(policy):
    kernel = np.random.RandomState(1).normal(size=(INPUTS, HIDDEN)).astype("float32")
    options = {"seed": 1, "kernel_initializer": lambda shape, dtype: kernel}
    layer, reference = SketchedDense(HIDDEN, 2, dtype=policy, **options), SketchedDense(HIDDEN, 2, **options)
    x = np.random.RandomState(0).normal(size=(5, INPUTS)).astype("float32")
    outputs = layer(x)
    assert keras.backend.standardize_dtype(outputs.dtype) == layer.compute_dtype
    assert {v.dtype for v in layer.weights} == {layer.variable_dtype}
    exact = layer.compute_dtype in ("float32", "float64")
    actual = np.array(keras.ops.convert_to_numpy(outputs), "float64")
    np.testing.assert_allclose(actual, keras.ops.convert_to_numpy(reference(x)), atol=1e-4 if exact else 0.5)


def test_masks_pass_through():
    inputs = keras.Input((4,))
    masked = keras.layers.Embedding(10, INPUTS, mask_zero=True)(inputs)
    assert SketchedDense(HIDDEN, 2)(masked)._keras_mask is not None


# --- Under a strategy ----------------------------------------------------------------------------------


def test_column_shards_what_has_the_output_dim_and_row_what_has_the_input_dim():
    model = tfshard.as_distributed(build())
    model.compile("adam", "mse", strategy=sharded({"model": 4}, 0))
    compute = {v.path: v.value.layout.compute for v in model.weights if v.path.startswith(("up", "down"))}
    assert compute == {
        "up/input_kernel": (None, None),
        "up/input_sketch": (None, None),
        "up/output_kernel": (None, "model"),
        "up/output_sketch": (None, "model"),
        "up/bias": ("model",),
        "down/input_kernel": ("model", None),
        "down/input_sketch": ("model", None),
        "down/output_kernel": (None, None),
        "down/output_sketch": (None, None),
        "down/bias": (None,),
    }


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mesh", [{"model": 4}, {"batch": 2, "model": 2}], ids=["model", "batch x model"])
def test_adam_and_predict_match_one_device(mesh, stage):
    reference = parity.train(build, batches(), optimizer=keras.optimizers.Adam, loss="mse")
    strategy = sharded(mesh, stage)
    run = parity.train(build, batches(), optimizer=keras.optimizers.Adam, loss="mse", strategy=strategy)
    assert strategy.mesh.size == 4 and "model" in parity.shard_axes(run.model)
    parity.assert_same(run, reference, rtol=1e-5, atol=1e-6)
    x = batches()[0][0][:6]
    np.testing.assert_allclose(
        run.model.predict(x, verbose=0), reference.model.predict(x, verbose=0), rtol=1e-5, atol=1e-5
    )


def test_sketches_are_drawn_alike_under_scope_and_on_one_device_and_are_never_trained():
    keras.utils.set_random_seed(0)
    reference = build()
    keras.utils.set_random_seed(0)
    strategy = sharded({"batch": 2, "model": 2}, 3)
    with strategy.scope():
        model = build()
        model.compile("adam", "mse")
    assert "model" in parity.shard_axes(model)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    model.fit(*batches()[0], verbose=0)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        same = np.array_equal(ours.numpy(), theirs.numpy())
        assert same == ours.path.endswith("sketch"), ours.path
    strategy.check_consistency(model)


def test_a_model_saved_from_a_mesh_loads_on_one_device(tmp_path):
    model = tfshard.as_distributed(build())
    model.compile("adam", "mse", strategy=sharded({"batch": 2, "model": 2}, 3))
    x, y = batches()[0]
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.get_layer("up"), SketchedDense)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-5)


def test_a_column_and_row_pair_sends_one_all_reduce_forward_and_one_backward():
    model = tfshard.as_distributed(build())
    model.compile("sgd", "mse", strategy=sharded({"model": 4}, 0))
    assert "model" in parity.shard_axes(model)
    profile = tfshard.profile_step(model, batches()[0])
    assert profile.count("all-reduce") == profile.count() == 2, profile
