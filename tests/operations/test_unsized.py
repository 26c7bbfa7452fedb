"""Tensors with sizes that depend on values, and stacks of open length, match one device within a step."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from sweeps import each_value, table
from tfshard.devices import transfer
from unsized_shapes import CONSUMERS, LAYERS, LOSSES, MESHES, PRODUCERS, differences, on_mesh, on_one_device, trained

ops = keras.ops


@pytest.mark.sweep(1)
@table(
    "uses of tensors whose size depends on values", ("mesh", "producer", "group"),
    itertools.product(MESHES, PRODUCERS, CONSUMERS), sample=1,
    always=[("batch4", "boolean_mask", "reductions"), ("batch2_model2", "keras.ops.nonzero", "products")],
)  # fmt: skip
def test_what_is_made_of_a_tensor_of_unknown_size_and_its_gradients_match_one_device(mesh, producer, group):
    consumers = CONSUMERS[group]
    assert not differences(on_mesh(producer, consumers, mesh), on_one_device(producer, consumers))


@table(
    "layers of tensors whose size depends on values", ("mesh", "producer", "group"),
    # Recurrent layers refuse such tensors if a model axis shards their kernels (docs/limits.md).
    [
        (mesh, producer, group)
        for mesh, producer, group in itertools.product(MESHES, PRODUCERS, LAYERS)
        if producer != "nothing" and (mesh, group) != ("batch2_model2", "sequences")
    ],
    sample=1,
)  # fmt: skip
def test_layers_of_a_tensor_of_unknown_size_train_as_on_one_device(mesh, producer, group):
    layers = LAYERS[group]
    assert not differences(trained(producer, layers, mesh), trained(producer, layers, None))


@pytest.mark.sweep(1)
@table(
    "losses of tensors whose size depends on values", ("mesh", "producer", "layer", "loss"),
    [
        (mesh, producer, layer, loss)
        for mesh, producer, layer, loss in itertools.product(MESHES, PRODUCERS, ["Dense", "Identity"], LOSSES)
        if producer != "nothing"
    ],
    always=[("batch4", "gather_nd of where", "Dense", "mean"),
            ("batch2_model2", "gather_nd of where", "Identity", "mean of a concat")], sample=1,
)  # fmt: skip
def test_sharded_weights_train_on_losses_of_a_tensor_of_unknown_size(mesh, producer, layer, loss):
    dense, identity = LAYERS["dense"]["Dense without activation"], (keras.layers.Identity, lambda z: z)
    layer = dense if layer == "Dense" else identity
    expected = trained(producer, {loss: layer}, None, LOSSES[loss])
    assert not differences(trained(producer, {loss: layer}, mesh, LOSSES[loss]), expected)


def test_the_producers_give_sizes_that_tensorflow_does_not_know():
    given = [tf.TensorSpec([16, 4]), tf.TensorSpec([16, 6])]
    for name, produce in PRODUCERS.items():
        z = tf.function(produce, autograph=False).get_concrete_function(*given).structured_outputs
        assert z.shape[0] is None, name


def _in_a_step(function, mesh):
    """Return the result and gradient of a function of a sharded matrix in a step, and on one device."""

    @tf.autograph.experimental.do_not_convert
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
        return result, tape.gradient(result, x)

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    sharded = transfer.host_to_mesh(SEQUENCES[:, 0], ("batch", None), strategy.mesh)
    assert dtensor.fetch_layout(sharded).num_shards(0) == MESHES[mesh]["batch"]
    found = strategy.run(tf.function(step), args=(sharded,))
    return [transfer.to_host(each) for each in found], tf.function(step)(tf.constant(SEQUENCES[:, 0]))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", MESHES)
def test_map_fn_of_a_function_with_tensors_of_unknown_size_matches_one_device(mesh):
    found, expected = _in_a_step(
        lambda x: tf.map_fn(lambda row: tf.reduce_sum(tf.boolean_mask(row, row > 0) ** 2), tf.tanh(x)), mesh
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (
            tf.map_fn(
                lambda row: tf.boolean_mask(row, row > 0),
                x,
                fn_output_signature=tf.RaggedTensorSpec([None], x.dtype, 0),
            ).flat_values
        ),
        lambda x: tf.map_fn(
            tf.reduce_sum, tf.RaggedTensor.from_tensor(x, lengths=tf.range(8) % 4), fn_output_signature=x.dtype
        ),
    ],
    ids=["gives", "takes"],
)
def test_map_fn_of_ragged_tensors_is_refused(function):
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match="ragged or sparse tensors"):
        _in_a_step(function, "batch4")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda z, m: tf.cond(tf.reduce_sum(z) > 0, lambda: tf.boolean_mask(z, z[:, 0] > 0), lambda: z[:3]), "branch"),
        (lambda z, m: tf.while_loop(
            lambda i, a: i < 2, lambda i, a: (i + 1, tf.tanh(a @ m)), (0, tf.boolean_mask(z, z[:, 0] > 0))
        )[1], "loop"),
    ],
    ids=["branch", "loop"],
)  # fmt: skip
def test_a_branch_or_a_loop_with_a_tensor_of_unknown_size_is_refused_before_dtensor_ends_the_process(function, words):
    matrix = tf.constant(np.eye(4, dtype="float32"))
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match=rf"several axes cannot have a {words}"):
        _in_a_step(lambda x: function(tf.tanh(x), matrix), "batch2_model2")
    for ours, theirs in zip(*_in_a_step(lambda x: function(tf.tanh(x), matrix), "batch4"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# --- Stacks of open length --------------------------------------------------------------------------------------

SEQUENCES = np.random.RandomState(0).normal(size=(8, 5, 4)).astype("float32")


def _by_loop(size, reverse=False):
    def stack(t):
        def body(i, state, array):
            place = size(t) - 1 - i if reverse else i
            return i + 1, tf.tanh(state + tf.gather(t, place, axis=1)), array.write(i, state)

        array = tf.TensorArray(tf.float32, size=size(t))
        array = tf.while_loop(lambda i, *_: i < size(t), body, (0, tf.zeros_like(t[:, 0]), array))[2]
        return tf.transpose(array.stack(), (1, 0, 2))

    return stack


def _by_writes(t):
    array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    for i in range(5):
        array = array.write(i, t[:, i] * (i + 1.0))
    return tf.transpose(array.stack(), (1, 0, 2))


def _growing(t):
    """Return a stack from a loop that grows its list, so the length is unknown."""
    array = tf.TensorArray(tf.float32, size=0, dynamic_size=True, element_shape=(8, 4))
    array = tf.while_loop(lambda i, _: i < 5, lambda i, a: (i + 1, a.write(i, tf.tanh(t[:, i]))), (0, array))[1]
    return tf.transpose(array.stack(), (1, 0, 2))


def _scanned(step, carry=lambda t: ops.zeros_like(t[0]), pick=lambda ys: ys, **kwargs):
    def stack(t):
        t = ops.transpose(t, (1, 0, 2))
        return ops.transpose(pick(ops.scan(step, carry(t), t, **kwargs)[1]), (1, 0, 2))

    return stack


def _fori(t):
    array = tf.TensorArray(tf.float32, size=tf.shape(t)[1])
    array = ops.fori_loop(0, tf.shape(t)[1], lambda i, a: a.write(i, tf.tanh(tf.gather(t, i, axis=1))), array)
    return tf.transpose(array.stack(), (1, 0, 2))


STACKS = {
    "TensorArray of five": _by_loop(lambda t: 5),
    "TensorArray(size=tf.shape(x)[1])": _by_loop(lambda t: tf.shape(t)[1]),
    "TensorArray(size=tf.shape(x)[1]), backwards": _by_loop(lambda t: tf.shape(t)[1], reverse=True),
    "dynamic_size=True": _by_writes,
    "dynamic_size=True in a loop": _growing,
    "keras.ops.scan": _scanned(lambda c, e: (ops.tanh(c + e),) * 2),
    "keras.ops.scan(length=5)": _scanned(lambda c, e: (ops.tanh(c + e),) * 2, length=5),
    "keras.ops.scan(reverse=True)": _scanned(lambda c, e: (ops.tanh(c + e),) * 2, reverse=True),
    "keras.ops.scan of two carries": _scanned(
        lambda c, e: ((ops.tanh(c[0] + e), c[1] * 0.5 + e), (c[0], c[1] + e)),
        carry=lambda t: (ops.zeros_like(t[0]), ops.ones_like(t[0])), pick=lambda ys: ys[0] + ys[1],
    ),
    "keras.ops.associative_scan": lambda t: ops.associative_scan(lambda a, c: a * 0.5 + c, t, axis=1),
    "keras.ops.associative_scan(reverse=True)": lambda t: ops.associative_scan(
        lambda a, c: a * 0.5 + c, t, axis=1, reverse=True
    ),
    "tf.scan": lambda t: tf.transpose(
        tf.scan(lambda a, e: tf.tanh(a + e), tf.transpose(t, (1, 0, 2))), (1, 0, 2)
    ),
    "tf.scan(reverse=True)": lambda t: tf.scan(lambda a, e: tf.tanh(a + e), t, reverse=True),
    "tf.map_fn over steps": lambda t: tf.transpose(
        tf.map_fn(lambda e: tf.tanh(e) * e, tf.transpose(t, (1, 0, 2))), (1, 0, 2)
    ),
    "keras.ops.map": lambda t: ops.map(lambda e: ops.tanh(e) * ops.sum(e), t),
    "keras.ops.vectorized_map": lambda t: ops.vectorized_map(lambda e: ops.tanh(e) * ops.sum(e), t),
    "keras.ops.fori_loop": _fori,
    "keras.ops.while_loop": lambda t: ops.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, ops.tanh(a) + t), (0, t)
    )[1],
}  # fmt: skip


def _attention(y):
    weights = tf.nn.softmax(tf.matmul(y, y, transpose_b=True))
    return tf.matmul(weights, y)


USES = {
    "Dense": lambda y, kernel: ops.matmul(y, kernel) ** 2,
    "loss": lambda y, kernel: keras.losses.mean_squared_error(tf.zeros_like(y), y),
    "reshape": lambda y, kernel: ops.matmul(tf.reshape(y, (-1, 4)), kernel) ** 2,
    "flatten": lambda y, kernel: tf.reduce_sum(tf.reshape(y, (8, -1)), 1) ** 2,
    "mean over steps": lambda y, kernel: tf.reduce_mean(y, 1) ** 2,
    "normalized over the batch": lambda y, kernel: (y - tf.reduce_mean(y, (0, 1))) * tf.math.rsqrt(
        tf.math.reduce_variance(y, (0, 1)) + 1e-3
    ) * y,
    "transpose": lambda y, kernel: ops.matmul(tf.transpose(y, (1, 0, 2)), kernel) ** 2,
    "last step": lambda y, kernel: ops.matmul(y[:, -1], kernel) ** 2,
    "attention": lambda y, kernel: _attention(y) ** 2,
}  # fmt: skip


@tf.autograph.experimental.do_not_convert
def _stacked(stack, x, kernel):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch((x, kernel))
        y = stack(ops.matmul(x, kernel))
        numbers = [tf.reduce_mean(use(y, kernel)) for use in USES.values()]
    return numbers, [tape.gradient(number, (x, kernel)) for number in numbers]


@pytest.mark.sweep(1)
@table(
    "stacks of open length", ("mesh", "name"),
    # DTensor refuses the second (docs/limits.md).
    [case for case in itertools.product(MESHES, STACKS) if case != ("batch2_model2", "keras.ops.map")], sample=1,
    always=each_value(["batch4", "batch2_model2"], ["TensorArray(size=tf.shape(x)[1])", "keras.ops.scan"]),
)  # fmt: skip
def test_a_stack_of_open_length_in_the_middle_of_a_step_matches_one_device(mesh, name):
    sizes, kernel = MESHES[mesh], np.random.RandomState(1).normal(size=(4, 4)).astype("float32")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**sizes), zero_stage=0)
    sharded = transfer.host_to_mesh(SEQUENCES, ("batch", None, None), strategy.mesh)
    assert dtensor.fetch_layout(sharded).num_shards(0) == sizes["batch"]
    weights = transfer.host_to_mesh(kernel, (None, "model" if "model" in sizes else None), strategy.mesh)
    function = functools.partial(_stacked, STACKS[name])
    expected = tf.nest.flatten(tf.function(function)(tf.constant(SEQUENCES), tf.constant(kernel)))
    found = tf.nest.flatten(strategy.run(tf.function(function), args=(sharded, weights)))
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(transfer.to_host(ours), theirs, rtol=1e-4, atol=1e-6, err_msg=str(number))


@pytest.mark.parametrize("persistent", [False, True])
def test_the_gradient_of_a_loop_in_a_loop_is_refused_before_dtensor_ends_the_process(persistent):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = transfer.host_to_mesh(SEQUENCES, ("batch", None, None), strategy.mesh)
    inner = lambda a, r: (a + r, a * r)  # noqa: E731
    stack = _scanned(lambda c, e: (ops.tanh(c + ops.mean(ops.scan(inner, ops.zeros_like(e[0]), e)[1], 0)), c))

    @tf.autograph.experimental.do_not_convert
    def step(x):
        with tf.GradientTape(persistent=persistent) as tape:
            tape.watch(x)
            loss = tf.reduce_mean(stack(x) ** 2)
        return tape.gradient(loss, x)

    with pytest.raises(tfshard.errors.UnsupportedOperationError, match=r"a loop in a loop .* Unroll one"):
        strategy.run(tf.function(step), args=(sharded,))
    result = strategy.run(tf.function(lambda x: x * 2.0, autograph=False), args=(sharded,))
    np.testing.assert_array_equal(transfer.to_host(result), SEQUENCES * 2, "the process stays usable")


def test_the_stack_of_a_list_of_known_length_is_shared_out():
    """The output of a Dense layer on the stack is sharded over the batch axis, as for other tensors."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    sharded = transfer.host_to_mesh(SEQUENCES, ("batch", None, None), strategy.mesh)

    @tf.autograph.experimental.do_not_convert
    def step(x):
        return STACKS["TensorArray(size=tf.shape(x)[1])"](x) * x

    with strategy.extended.results_stay_sharded():
        result = strategy.run(tf.function(step), args=(sharded,))
    assert dtensor.fetch_layout(result).num_shards(0) == 4


@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_slice_that_ends_at_a_tensor_matches_one_device(count):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=0)
    values = np.arange(32, dtype="float32").reshape(8, 4)

    @tf.autograph.experimental.do_not_convert
    def step(x, n):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows, columns = x[:n], x[:, n // 4 : n // 2 + 1]
            loss = tf.reduce_sum(rows**2) + tf.reduce_sum(columns) ** 2
        return rows, columns, tape.gradient(loss, x)

    sharded = transfer.host_to_mesh(values, ("batch", None), strategy.mesh)
    assert dtensor.fetch_layout(sharded).num_shards(0) == 4
    expected = tf.function(step)(tf.constant(values), tf.constant(count))
    for ours, theirs in zip(strategy.run(tf.function(step), args=(sharded, np.int32(count))), expected, strict=True):
        np.testing.assert_allclose(transfer.to_host(ours), theirs)


class MappedRows(keras.layers.Layer):
    """Computes each row separately, as for per-sample gradients."""

    def __init__(self, mapped):
        super().__init__()
        self.mapped, self.inner = mapped, keras.layers.Dense(3)

    def build(self, shape):
        self.inner.build((1, shape[-1]))

    def call(self, x):
        return self.mapped(lambda row: tf.tanh(self.inner(row[None])[0, ...]), x)


MAPS = {
    "tf.map_fn": lambda function, x: tf.map_fn(function, x, fn_output_signature=tf.float32),
    "tf.vectorized_map": tf.vectorized_map,
    "keras.ops.vectorized_map": ops.vectorized_map,
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", MAPS)
def test_a_layer_that_gives_each_row_a_new_axis_trains_as_on_one_device(name):
    """DTensor alone would end the process, so each device maps its local rows."""

    def history(**options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), MappedRows(MAPS[name])])
        model.compile("sgd", "mse", jit_compile=False, **options)
        x = np.random.RandomState(0).normal(size=(8, 6)).astype("float32")
        losses = model.fit(x, x[:, :3], batch_size=8, epochs=2, verbose=0).history["loss"]
        return [*losses, *model.get_weights()]

    ours = history(strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    for mine, theirs in zip(ours, history(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
