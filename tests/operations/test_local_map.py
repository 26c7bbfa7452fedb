"""Functions of local shards that call collectives match plain Keras on one device."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.errors import UnsupportedOperationError

RS = np.random.RandomState(0)
MESHES = {
    "batch4": {"batch": 4},
    "batch2_model2": {"batch": 2, "model": 2},
    "replica2_batch2": {"replica": 2, "batch": 2},
    "dp2_tp2": {"dp": 2, "tp": 2},
}


def axes_of(mesh: str) -> tuple[str, str | None]:
    """Return the data axis and the model axis of a mesh."""
    names = MESHES[mesh]
    return ("dp" if "dp" in names else "batch"), next((name for name in ("model", "tp") if name in names), None)


def normalized(data: str, model: str | None, seen: list):
    """Return a function that divides a product by its norm over the full batch. The model axis shards the inner dim."""

    def of_shards(x, w, b):
        seen.append((x.shape.as_list(), w.shape.as_list()))
        y = tf.matmul(x, w)
        y = tf.tanh((y if model is None else tfshard.psum(y, model)) + b)
        total = tfshard.psum(tf.reduce_sum(y * y), data)
        return y / tf.sqrt(total), total

    return tfshard.local_map(of_shards, [(data, model), (model,), ()], [(data,), ()])


def derivatives(function):
    """Return a step with results, and first- and second-order derivatives by all arguments."""

    def step(*arguments):
        with tf.GradientTape() as outer:
            outer.watch(arguments)
            with tf.GradientTape() as tape:
                tape.watch(arguments)
                y, total = function(*arguments)
                loss = tf.reduce_sum(tf.sin(y) * tf.range(6, dtype=tf.float32)) + 0.1 * total
            first = tape.gradient(loss, arguments)
            squares = tf.add_n([tf.reduce_sum(each**2) for each in first])
        return [y, total, loss, *first, *outer.gradient(squares, arguments)]

    return step


def activated(data: str, model: str | None):
    """Return a function that XLA compiles: an activated product, and the norm of each row of its columns."""

    def of_shards(x, w, b):
        y = tf.tanh(tf.matmul(x, w) + b)
        return y, tf.reduce_sum(y * y, 1, keepdims=True)

    return tfshard.local_map(
        of_shards, [(data,), (None, model), (model,)], [(data, model), (data, model)], jit_compile=True
    )


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("mesh", MESHES)
def test_compiled_results_and_two_orders_of_derivatives_match_one_device(mesh, rows):
    data, model = axes_of(mesh)
    columns = 1 if model is None else 2

    def plain(x, w, b):
        y = tf.tanh(tf.matmul(x, w) + b)
        return y, tf.reduce_sum(tf.reshape(y * y, (rows, columns, 6 // columns)), 2)

    def both(function):
        return derivatives(lambda *arguments: (lambda y, norms: (y, tf.reduce_sum(norms**2)))(*function(*arguments)))

    arguments = [tf.constant(RS.normal(size=shape).astype("float32")) for shape in ((rows, 8), (8, 6), (6,))]
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]))
    step = tf.function(both(activated(data, model)))
    found = strategy.run(step, args=tuple(arguments))
    for ours, theirs in zip(found, both(plain)(*arguments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5 * float(tf.reduce_max(tf.abs(theirs))))


def test_a_compiled_function_runs_on_one_device_without_a_strategy():
    x, w, b = (tf.constant(RS.normal(size=shape).astype("float32")) for shape in ((8, 8), (8, 6), (6,)))
    y, norms = activated("batch", None)(x, w, b)
    np.testing.assert_allclose(y, tf.tanh(x @ w + b), rtol=1e-5)
    assert norms.shape == (8, 1)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: tf.strings.length(tf.strings.as_string(x)), r"'AsString'.*test_local_map.py:\d+"),
        (lambda x: tf.boolean_mask(x, x > 0), "shape of result 0 depends on values"),
        (lambda x: x * tfshard.psum(tf.reduce_sum(x), "batch"), "psum cannot run in a function that XLA compiles"),
    ],
    ids=["no kernel", "unknown shape", "psum"],
)
def test_what_xla_cannot_compile_is_named(function, message):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    mapped = tfshard.local_map(function, [("batch",)], [("batch",)], jit_compile=True)
    with pytest.raises(UnsupportedOperationError, match=f"(?s){message}"):
        strategy.run(tf.function(lambda x: mapped(x), autograph=False), args=(tf.ones(8),))


@pytest.mark.parametrize("rows", [8, 6, 7])
@pytest.mark.parametrize("mesh", MESHES)
def test_results_and_two_orders_of_derivatives_match_one_device(mesh, rows):
    data, model = axes_of(mesh)
    arguments = [tf.constant(RS.normal(size=shape).astype("float32")) for shape in ((rows, 8), (8, 6), (6,))]
    expected = derivatives(normalized(data, model, []))(*arguments)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]))
    seen: list = []
    found = strategy.run(tf.function(derivatives(normalized(data, model, seen))), args=tuple(arguments))
    devices = strategy.mesh_shape.data_size
    local = [rows // devices if rows % devices == 0 else rows, 8 if model is None else 4]
    assert [local, [local[1], 6]] == [list(each) for each in seen[0]], "premise: the function gets local shards"
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6 * max(1.0, np.max(np.abs(theirs))))


class OwnDense(keras.layers.Layer):
    """A custom row-parallel Dense layer with an output that is normalized over the batch."""

    def __init__(self, units: int, axes: tuple[str, str | None], **options):
        super().__init__(**options)
        self.units, self.axes = units, axes

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x):
        data, model = self.axes

        def of_shards(x, kernel):
            y = tf.matmul(x, kernel)
            y = y if model is None else tfshard.psum(y, model)
            return y / (1.0 + tf.sqrt(tfshard.psum(tf.reduce_sum(y * y), data)))

        return tfshard.local_map(of_shards, [(data, model), (model, None)], [(data, None)])(x, self.kernel)


@pytest.mark.parametrize(("mesh", "stage"), [("batch4", 3), ("batch2_model2", 1), ("replica2_batch2", 2)])
def test_a_layer_with_local_map_trains_as_on_one_device(mesh, stage):
    def build():
        layers = [keras.layers.Dense(8, "gelu"), OwnDense(6, axes_of(mesh), name="own"), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((5,)), *layers])

    batches = [
        (RS.normal(size=(rows, 5)).astype("float32"), RS.normal(size=(rows, 2)).astype("float32"))
        for rows in (16, 16, 6)
    ]
    # Adam would hide a gradient of another scale.
    how = {"optimizer": lambda: keras.optimizers.SGD(0.1), "loss": "mse", "steps": 6}
    reference = parity.train(build, batches, **how)
    layout_map = tfshard.LayoutMap()
    if "model" in mesh:
        layout_map.replicated(".*")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map, zero_stage=stage)
    trained = parity.train(build, batches, strategy=strategy, **how)
    parity.assert_same(trained, reference, rtol=2e-5, atol=2e-6)


def test_a_model_with_local_map_may_be_built_under_the_scope():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    x = RS.normal(size=(8, 5)).astype("float32")
    with strategy.scope():
        inputs = keras.Input((5,))
        model = keras.Model(inputs, OwnDense(6, ("batch", None))(inputs))
    kernel = model.layers[-1].kernel.numpy()
    expected = x @ kernel / (1.0 + np.sqrt(np.sum((x @ kernel) ** 2)))
    np.testing.assert_allclose(model.predict(x, verbose=0, batch_size=8), expected, rtol=2e-5, atol=2e-6)


def test_microbatches_take_local_map_too():
    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), Squared(), keras.layers.Dense(2)])

    batches = [(RS.normal(size=(16, 5)).astype("float32"), RS.normal(size=(16, 2)).astype("float32"))]
    how = {"optimizer": lambda: keras.optimizers.SGD(0.1), "loss": "mse", "steps": 3}
    reference = parity.train(build, batches, **how)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), microbatches=2)
    parity.assert_same(parity.train(build, batches, strategy=strategy, **how), reference, rtol=2e-5, atol=2e-6)


class Squared(keras.layers.Layer):
    """Works on rows alone, so microbatches change nothing."""

    def call(self, x):
        return tfshard.local_map(lambda x: x * x, [("batch",)], [("batch",)])(x)


def test_integers_and_structures_go_through():
    def of_shards(ids, x):
        return [ids + 1, tfshard.psum({"rows": tf.reduce_sum(ids), "sum": tf.reduce_sum(x)}, "batch")["rows"]]

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    mapped = tfshard.local_map(of_shards, [("batch",), ("batch",)], [("batch",), ()])
    ids, total = strategy.run(tf.function(mapped), args=(tf.range(8), tf.ones((8, 2))))
    np.testing.assert_array_equal(ids, np.arange(8) + 1)
    assert int(total) == 28


def test_without_a_strategy_the_function_gets_full_tensors():
    mapped = tfshard.local_map(lambda x: x / tfshard.psum(tf.reduce_sum(x), "batch"), [("batch",)], [("batch",)])
    np.testing.assert_allclose(mapped(tf.constant([1.0, 3.0])), [0.25, 0.75])


OUTSIDE, VARIABLE = tf.constant([1.0]), tf.Variable(1.0)


def drawing(x):
    return x + tf.random.stateless_uniform(x.shape, (1, 2))


@pytest.mark.parametrize(
    ("function", "layouts", "error", "message"),
    [
        (lambda x: x, ([("rows",)], [()]), "LayoutError", "names axis 'rows', which the mesh does not have"),
        (lambda x: x, ([("batch", None, None)], [()]), "LayoutError", "more entries than the tensor has dims"),
        (lambda x: x, ([("batch", "batch")], [()]), "LayoutError", "shard only one dim of a tensor"),
        (lambda x: x, (["batch"], [()]), "LayoutError", "is a tuple with a mesh axis or None"),
        (lambda x: x, (("batch",), [()]), "LayoutError", r"must be a list of layouts.*\[\('batch',\)\]"),
        (lambda x: x, ([()], None), "LayoutError", "out_layouts must be a list of layouts, one for each result"),
        (lambda x: x, ([3], [()]), "LayoutError", "is a tuple with a mesh axis or None"),
        (lambda x: x, ([("batch",), ()], [()]), "LayoutError", "needs one argument for each entry of in_layouts, 2"),
        (lambda x: (x, x), ([("batch",)], [("batch",)]), "LayoutError", "returned 2 tensors for 1 entries"),
        (lambda x: tfshard.psum(x, "model"), ([("batch",)], [()]), "LayoutError", "psum needs an axis .*axis='model'"),
        (lambda x: x + OUTSIDE, ([("batch",)], [("batch",)]), "UnsupportedOperationError", "captures a tensor"),
        (lambda x: x + VARIABLE, ([("batch",)], [("batch",)]), "UnsupportedOperationError", "captures a variable"),
        (drawing, ([("batch",)], [("batch",)]), "UnsupportedOperationError", "draws random numbers"),
    ],
    ids=[
        "axis", "long", "twice", "text", "one layout", "no list", "number", "arguments", "results", "psum", "outside",
        "variable", "random",
    ],
)  # fmt: skip
def test_mistakes_are_named(function, layouts, error, message):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    with pytest.raises(getattr(tfshard.errors, error), match=message):
        strategy.run(tf.function(lambda x: tfshard.local_map(function, *layouts)(x)), args=(tf.ones((8, 2)),))


def test_an_eager_step_is_told_to_compile():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    mapped = tfshard.local_map(lambda x: x, [("batch",)], [("batch",)])
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match="runs in compiled steps"):
        strategy.run(mapped, args=(tf.ones(8),))


def test_psum_outside_of_local_map_is_an_error():
    with pytest.raises(tfshard.errors.LayoutError, match=r"inside a function of tfshard.local_map"):
        tfshard.psum(tf.ones(2), "batch")


def test_only_one_module_keeps_dtensor_from_expanding_operations():
    package = pathlib.Path(tfshard.__file__).parent
    for word in ("to_parted", '"rows_of_a_device"'):
        assert [path.name for path in package.rglob("*.py") if word in path.read_text()] == ["local_shards.py"], word
