"""Batches of a distributed dataset and results of steps in eager code: loops written for MirroredStrategy."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from tfshard.devices import transfer

RS = np.random.RandomState(0)
X = RS.randn(16, 4).astype("float32")
Y = RS.randint(0, 3, (16,))
ROWS = {"sharded": 8, "whole": 6}


def strategy(**options) -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), **options)


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])


def compiled(chosen: tfshard.ShardedStrategy | None) -> keras.Model:
    keras.backend.clear_session()
    made = model()
    tfshard.as_distributed(made).compile("sgd", "mse", strategy=chosen, jit_compile=False)
    return made


def accuracy(x, net):
    metric = keras.metrics.SparseCategoricalAccuracy()
    metric.update_state(tf.argmax(x, 1), net(x))
    return metric.result()


# Uses of a batch in eager code. `net` is a model under the strategy.
USES = {
    "numpy": lambda x, net: x.numpy(),
    "np.asarray": lambda x, net: np.asarray(x),
    "np.mean": lambda x, net: np.mean(x, axis=0),
    "NumPy on the left": lambda x, net: np.ones(4, "float32") * x,
    "tf.reduce_sum": lambda x, net: tf.reduce_sum(x, axis=0),
    "arithmetic": lambda x, net: 2 * x - x / 3 + tf.ones(4),
    "comparison": lambda x, net: tf.cast((x > 0) & (x < 1), tf.float32),
    "matrix product": lambda x, net: x @ tf.ones((4, 2)),
    "slice": lambda x, net: x[1:3, ::2],
    "rows": lambda x, net: [row for row in x],
    "length": lambda x, net: len(x),
    "shape": lambda x, net: (x.shape[0], x.ndim, x.get_shape()[1], tf.shape(x)),
    "float": lambda x, net: float(x[0, 0]) + float(tf.reduce_max(x)),
    "print": lambda x, net: [np.frombuffer(f"{x} {x!r} {str(x)}".encode(), "uint8")],
    "tf.print": lambda x, net: tf.strings.format("{}", x) == tf.strings.format("{}", tf.identity(x)),
    "convert": lambda x, net: [tf.convert_to_tensor(x), tf.constant(x), tf.cast(x, "float64"), tf.identity(x)],
    "keras.ops": lambda x, net: [keras.ops.softmax(x), keras.ops.convert_to_numpy(x), keras.ops.concatenate([x, x])],
    "stack": lambda x, net: tf.stack([x, tf.zeros_like(x)]),
    "image": lambda x, net: tf.image.flip_left_right(tf.reshape(x, (1, -1, 2, 1))),
    "model": lambda x, net: net(x, training=False),
    "layer": lambda x, net: net.layers[0](x),
    "predict_on_batch": lambda x, net: net.predict_on_batch(x),
    "predict": lambda x, net: net.predict(x, verbose=0),
    "test_on_batch": lambda x, net: net.test_on_batch(x, x[:, :3]),
    "loss": lambda x, net: keras.losses.MeanSquaredError()(x, net.layers[0](x)[:, :4]),
    "metric": accuracy,
    "function": lambda x, net: [tf.function(net)(x), tf.function(lambda x: x * 2)(x)],
    "dataset": lambda x, net: list(tf.data.Dataset.from_tensor_slices(x).batch(3)),
    "variable": lambda x, net: tf.Variable(x) + 1,
    "assign": lambda x, net: [keras.Variable(np.zeros(x.shape, "float32")).assign(x)],
    "copy": lambda x, net: copy.deepcopy(x) + copy.copy(x),
    "gradient": lambda x, net: by_batch(x, net),
    "is_tensor": lambda x, net: tf.is_tensor(x) and isinstance(x, tf.Tensor),
    "bool": lambda x, net: bool(tf.reduce_all(x < 100)),
    "nest": lambda x, net: tf.nest.map_structure(lambda leaf: leaf + 1, {"a": x, "b": (x,)})["b"],
}  # fmt: skip


def by_batch(x, net):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(net(x) ** 2)
    return tape.gradient(loss, x)


def arrays(found) -> list:
    return [np.array(leaf) for leaf in tf.nest.flatten(found)]


def assert_same(found, expected, name=""):
    found, expected = arrays(found), arrays(expected)
    assert len(found) == len(expected), name
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", ROWS)
def test_a_batch_is_used_in_eager_code_like_a_tensor(rows):
    chosen, size = strategy(), ROWS[rows]
    plain, sharded = compiled(None), compiled(chosen)
    dataset = tf.data.Dataset.from_tensor_slices(X[:size]).batch(size)
    (batch,) = chosen.experimental_distribute_dataset(dataset)
    assert transfer.is_dtensor(batch.on_mesh)
    assert tf.experimental.dtensor.fetch_layout(batch.on_mesh).num_shards(0) == (4 if rows == "sharded" else 1)
    assert parity.shard_axes(sharded) == {"batch"}, "premise"
    for name, use in USES.items():
        assert_same(use(batch, sharded), use(tf.constant(X[:size]), plain), name)
    # Results of a step.
    for result in (
        chosen.run(lambda x: x + 0.0, args=(batch,)),
        chosen.experimental_distribute_values_from_function(lambda context: X[:size]),
        chosen.reduce("SUM", tf.function(lambda x: chosen.run(lambda x: x + 0.0, args=(x,)))(batch), axis=None),
    ):
        for name, use in USES.items():
            if name not in ("function", "tf.print"):
                assert_same(use(result, sharded), use(tf.constant(X[:size]), plain), name)


def test_collective_functions_of_a_strategy_give_tensors_of_the_host():
    chosen = strategy()
    dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": (Y,)}).batch(8)
    batches = list(chosen.experimental_distribute_dataset(dataset))
    assert len(batches) == 2 and all(transfer.is_dtensor(batch["x"].on_mesh) for batch in batches)
    for batch, expected in zip(batches, dataset, strict=True):
        for found in (chosen.gather(batch, axis=0), *chosen.experimental_local_results(batch)):
            assert not any(transfer.is_dtensor(leaf) for leaf in tf.nest.flatten(found))
            assert_same(found, expected)
        assert_same(chosen.reduce("MEAN", batch["x"], axis=0), tf.reduce_mean(expected["x"], 0))
        total = tf.concat(chosen.experimental_local_results(batch["x"]), axis=0)
        assert_same(total, expected["x"])


def test_an_iterator_gives_its_batches_as_optional_values():
    chosen = strategy()
    dataset = chosen.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    assert int(dataset.cardinality()) == 2
    iterator, seen = iter(dataset), []
    following = iterator.get_next_as_optional()
    while following.has_value():
        seen.append(following.get_value())
        following = iterator.get_next_as_optional()
    assert len(seen) == 2 and transfer.is_dtensor(seen[0][0].on_mesh)
    assert_same(tf.concat([x for x, _ in seen], 0), X)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have a value"):
        following.get_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()
    assert iter(dataset).element_spec[0].shape.as_list() == [None, 4]
    with pytest.raises(tfshard.errors.StrategyError, match="iterated in Python"):
        tf.function(lambda: iterator.get_next_as_optional())()


def trained(chosen: tfshard.ShardedStrategy | None, signature: bool = False) -> list:
    """Run a loop of TensorFlow's and Keras's guides, in which only the strategy differs."""
    chosen = chosen or tf.distribute.OneDeviceStrategy("CPU:0")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=signature)
    with chosen.scope():
        net = model()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(net.trainable_variables)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        seen = keras.metrics.SparseCategoricalAccuracy()
    distributed = chosen.experimental_distribute_dataset(dataset)

    def train_step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            logits = net(x, training=True)
            loss = tf.nn.compute_average_loss(loss_object(y, logits), global_batch_size=8)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )
        seen.update_state(y, logits)
        return loss, logits

    def step(inputs):
        return chosen.run(train_step, args=(inputs,))

    step = tf.function(step, input_signature=[distributed.element_spec]) if signature else tf.function(step)
    results = []
    for _ in range(2):
        total, held = 0.0, keras.metrics.SparseCategoricalAccuracy()
        for inputs in distributed:
            loss, logits = step(inputs)
            total += chosen.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)
            logits = chosen.gather(logits, axis=0)
            # A metric and a model in eager code take the batch.
            held.update_state(inputs[1], net(inputs[0]))
            results += [logits, tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == inputs[1], tf.float32))]
        results += [float(total) / 2, seen.result(), held.result()]
        seen.reset_state()
    return [*results, *net.get_weights()]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("signature", [False, True])
def test_a_loop_for_mirrored_strategy_trains_with_only_the_strategy_changed(signature):
    assert_same(trained(strategy(), signature), trained(None, signature))


def test_a_function_gets_a_batch_where_its_step_takes_it():
    """A function that runs a step gets the batch on the mesh. Others get it on the host, together with host tensors."""
    chosen = strategy()
    (batch,) = chosen.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X))
    seen = []

    def step(x):
        seen.append(x)
        return tf.reduce_sum(x**2)

    inner = tf.function(lambda x: chosen.run(step, args=(x,)))
    outer = tf.function(lambda x, y: (inner(x["x"]), x["x"] + 1.0), reduce_retracing=True)
    plain = tf.function(lambda x, y: x["x"] + y)
    for _ in range(2):
        total, more = outer({"x": batch}, 1)
        assert_same(total, np.sum(X**2))
        assert_same(plain({"x": batch}, tf.constant(X)), 2 * X)
    assert transfer.is_dtensor(more) and all(isinstance(x, tf.Tensor) for x in seen)
