"""Producers and consumers of tensors with shapes that depend on values, and a training step with both."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard.devices import transfer

ops = keras.ops
RS = np.random.RandomState(0)
VALUES = RS.normal(size=(16, 6)).astype("float32")
BOXES = RS.uniform(size=(16, 4)).astype("float32")
BOXES = np.concatenate([BOXES[:, :2], BOXES[:, :2] + 0.3 + BOXES[:, 2:]], axis=1)

# Functions of `(h, x)`: h is a matrix that the step has computed, x the batch. Each returns a tensor of floats.
PRODUCERS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "boolean_mask": lambda h, x: tf.boolean_mask(h, x[:, 0] > 0),
    "boolean_mask of elements": lambda h, x: tf.boolean_mask(h, x[:, :4] > 0),
    "gather_nd of where": lambda h, x: tf.gather_nd(h, tf.where(x[:, 0] > 0)),
    "gather_nd of where of elements": lambda h, x: tf.gather_nd(h, tf.where(x[:, :4] > 0)),
    "gather of where": lambda h, x: tf.gather(h, tf.where(x[:, 0] > 0)[:, 0]),
    "unique": lambda h, x: tf.gather(h, tf.unique(tf.cast(tf.abs(x[:, 0]) * 4, tf.int32))[0]),
    "dynamic_partition": lambda h, x: tf.dynamic_partition(h, tf.cast(x[:, 0] > 0, tf.int32), 2)[1],
    "keras.ops.nonzero": lambda h, x: tf.gather(h, ops.nonzero(x[:, 0] > 0)[0]),
    "keras.ops.where": lambda h, x: ops.take(h, ops.where(x[:, 0] > 0)[0], axis=0),
    "non_max_suppression": lambda h, x: tf.gather(h, tf.image.non_max_suppression(BOXES, h[:, 0], 9, 0.2)),
    "RaggedTensor.flat_values": lambda h, x: tf.RaggedTensor.from_tensor(
        h, lengths=tf.cast(x[:, 0] > 0, tf.int32) * 4
    ).flat_values,
    "SparseTensor.values": lambda h, x: tf.sparse.from_dense(tf.nn.relu(h)).values,
    "segments of unknown number": lambda h, x: tf.math.segment_sum(
        h, tf.cumsum(tf.cast(x[:, 0] > 0, tf.int32))
    ),
    "nothing": lambda h, x: tf.boolean_mask(h, x[:, 0] > 100),
}  # fmt: skip


def _zeros(z):
    return tf.zeros(tf.shape(z)[0], tf.int32)


def _matrix(use):
    """Extend a function of matrices to vectors."""
    return lambda z: use(z if z.shape.rank == 2 else z[:, None] * tf.constant([[1.0, -0.5, 0.3, 2.0]]))


# Functions of such a tensor z. Each returns a number, and its gradient is taken.
CONSUMERS: dict[str, dict[str, Callable[[tf.Tensor], tf.Tensor]]] = {
    "reductions": {
        "mean": tf.reduce_mean,
        "sum": lambda z: tf.reduce_sum(z) * 0.1,
        "mean of squares": lambda z: tf.reduce_mean(tf.square(z)),
        "max": tf.reduce_max,
        "min": tf.reduce_min,
        "prod": lambda z: tf.reduce_prod(z * 0.1 + 1),
        "any": lambda z: tf.cast(tf.reduce_any(z > 0.5), tf.float32) * tf.reduce_mean(z),
        "all": lambda z: tf.cast(tf.reduce_all(z > 0.5), tf.float32) + tf.reduce_mean(z),
        "logsumexp": tf.reduce_logsumexp,
        "std": lambda z: tf.math.reduce_std(z),
        "norm": lambda z: tf.norm(z),
        "euclidean norm": lambda z: tf.reduce_sum(tf.math.reduce_euclidean_norm(z, -1)),
        "mean of max": _matrix(lambda z: tf.reduce_mean(tf.reduce_max(z, 1))),
        "logsumexp, axis 0": _matrix(lambda z: tf.reduce_sum(tf.reduce_logsumexp(z, 0))),
        "max, axis 0": _matrix(lambda z: tf.reduce_sum(tf.reduce_max(z, 0) ** 2)),
        "prod, axis 0": _matrix(lambda z: tf.reduce_sum(tf.reduce_prod(z * 0.1 + 1, 0) ** 2)),
        "mean, axis 0": lambda z: tf.reduce_sum(tf.square(tf.reduce_mean(z, 0))),
        "mean, axis 1": _matrix(lambda z: tf.reduce_sum(tf.square(tf.reduce_mean(z, 1)))),
        "mean, axis 1, keepdims": _matrix(lambda z: tf.reduce_sum(tf.square(z - tf.reduce_mean(z, 1, keepdims=True)))),
        "mean, axis 0, keepdims": lambda z: tf.reduce_sum(tf.square(z - tf.reduce_mean(z, 0, keepdims=True))),
        "variance": lambda z: tf.reduce_sum(tf.math.reduce_variance(z, 0)),
        "moments": lambda z: tf.add_n([tf.reduce_sum(each) for each in tf.nn.moments(z, [0])]),
    },
    "losses": {
        "softmax": lambda z: tf.reduce_mean(tf.square(tf.nn.softmax(z))),
        "softmax, axis 0": lambda z: tf.reduce_mean(tf.square(tf.nn.softmax(z, 0))),
        "log_softmax": lambda z: -tf.reduce_mean(tf.nn.log_softmax(z)),
        "cross entropy": _matrix(
            lambda z: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(_zeros(z), z))
        ),
        "dense cross entropy": _matrix(
            lambda z: tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(_zeros(z), 4), z))
        ),
        "sigmoid cross entropy": lambda z: tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros_like(z), z)),
        "keras cross entropy": _matrix(
            lambda z: tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(_zeros(z), z, from_logits=True))
        ),
        "SparseCategoricalCrossentropy": _matrix(
            lambda z: keras.losses.SparseCategoricalCrossentropy(from_logits=True)(_zeros(z), z)
        ),
        "SparseCategoricalCrossentropy of probabilities": _matrix(
            lambda z: keras.losses.SparseCategoricalCrossentropy()(_zeros(z), tf.nn.softmax(z))
        ),
        "CategoricalCrossentropy": _matrix(
            lambda z: keras.losses.CategoricalCrossentropy(from_logits=True)(tf.one_hot(_zeros(z), 4), z)
        ),
        "BinaryCrossentropy": _matrix(lambda z: keras.losses.BinaryCrossentropy()(tf.ones_like(z), tf.sigmoid(z))),
    },
    "more losses": {
        "BinaryFocalCrossentropy": _matrix(
            lambda z: keras.losses.BinaryFocalCrossentropy()(tf.ones_like(z), tf.sigmoid(z))
        ),
        "MeanSquaredError": lambda z: keras.losses.MeanSquaredError()(tf.zeros_like(z), z),
        "mean_squared_error": lambda z: tf.reduce_mean(keras.losses.mean_squared_error(tf.zeros_like(z), z)),
        "Huber": lambda z: keras.losses.Huber()(tf.zeros_like(z), z),
        "LogCosh": lambda z: keras.losses.LogCosh()(tf.zeros_like(z), z),
        "KLDivergence": _matrix(lambda z: keras.losses.KLDivergence()(tf.nn.softmax(-z), tf.nn.softmax(z))),
        "CosineSimilarity": _matrix(lambda z: keras.losses.CosineSimilarity()(tf.ones_like(z), z)),
        "weighted loss": _matrix(
            lambda z: keras.losses.MeanSquaredError()(tf.zeros_like(z), z, sample_weight=tf.abs(z[:, 0]))
        ),
        "Dice": _matrix(lambda z: keras.losses.Dice()(tf.ones_like(z), tf.sigmoid(z))),
    },
    "order": {
        "segment_sum": lambda z: tf.reduce_sum(
            tf.square(tf.math.unsorted_segment_sum(z, tf.range(tf.shape(z)[0]) % 3, 3))
        ),
        "segment_mean": lambda z: tf.reduce_sum(
            tf.square(tf.math.unsorted_segment_mean(z, tf.range(tf.shape(z)[0]) % 3, 3))
        ),
        "keras.ops.segment_sum": lambda z: ops.sum(ops.square(ops.segment_sum(z, ops.arange(ops.shape(z)[0]) % 3, 3))),
        "scatter_nd": _matrix(
            lambda z: tf.reduce_sum(tf.scatter_nd(tf.range(tf.shape(z)[0])[:, None], z, (16 * 8, 4)) ** 2)
        ),
        "cumsum": lambda z: tf.reduce_mean(tf.square(tf.cumsum(z, 0))),
        "cumsum of a row": _matrix(lambda z: tf.reduce_mean(tf.square(tf.cumsum(z, 1)))),
        "cumprod": lambda z: tf.reduce_mean(tf.square(tf.math.cumprod(z, 0))),
        "sort": lambda z: tf.reduce_mean(tf.sort(z, 0)[:1] ** 2) + tf.reduce_mean(tf.sort(z, 0) ** 2),
        "argsort": lambda z: tf.reduce_mean(tf.gather(z, tf.argsort(tf.reshape(z, (-1,))) % tf.shape(z)[0]) ** 2),
        "top_k": _matrix(lambda z: tf.reduce_mean(tf.math.top_k(z, 2)[0] ** 2)),
        "argmax": _matrix(lambda z: tf.reduce_mean(z * tf.one_hot(tf.argmax(z, 1), 4))),
    },
    "shapes": {
        "concat": lambda z: tf.reduce_mean(tf.square(tf.concat([z, z], 0))),
        "concat, axis 1": _matrix(lambda z: tf.reduce_mean(tf.square(tf.concat([z, z * 2], 1)))),
        "concat with a constant": _matrix(lambda z: tf.reduce_mean(tf.square(tf.concat([z, tf.ones((2, 4))], 0)))),
        "stack": lambda z: tf.reduce_mean(tf.square(tf.stack([z, z * 2], 0))),
        "unstack": _matrix(lambda z: tf.reduce_mean(tf.add_n(tf.unstack(z, axis=1)) ** 2)),
        "split": _matrix(lambda z: tf.reduce_mean(tf.multiply(*tf.split(z, 2, axis=1)))),
        "tile": _matrix(lambda z: tf.reduce_mean(tf.square(tf.tile(z, (2, 3))))),
        "repeat": lambda z: tf.reduce_mean(tf.square(tf.repeat(z, 2, axis=0))),
        "pad": _matrix(lambda z: tf.reduce_mean(tf.square(tf.pad(z, ((1, 2), (0, 1)), constant_values=0.5)))),
        "reverse": lambda z: tf.reduce_mean(tf.reverse(z, [0]) * z),
        "roll": lambda z: tf.reduce_mean(tf.roll(z, 1, axis=0) * z),
        "transpose": _matrix(lambda z: tf.reduce_mean(tf.square(tf.reduce_sum(tf.transpose(z), 0)))),
        "reshape": _matrix(lambda z: tf.reduce_mean(tf.square(tf.reduce_sum(tf.reshape(z, (-1, 2)), 0)))),
        "flatten": lambda z: tf.reduce_mean(tf.square(tf.reshape(z, (-1,)))),
    },
    "products": {
        "expand_dims": lambda z: tf.reduce_mean(tf.square(z[None] + z[..., None, None])),
        "pairwise": lambda z: tf.reduce_mean(tf.square(z[:, None] - z[None])),
        "matmul": _matrix(lambda z: tf.reduce_mean(tf.matmul(z, z, transpose_b=True))),
        "matmul, softmax": _matrix(lambda z: tf.reduce_mean(tf.nn.softmax(tf.matmul(z, z, transpose_b=True)) @ z)),
        "covariance": _matrix(lambda z: tf.reduce_mean(tf.matmul(z, z, transpose_a=True) ** 2)),
        "einsum": _matrix(lambda z: tf.reduce_mean(tf.einsum("ni,nj->ij", z, z))),
        "einsum with an ellipsis": _matrix(lambda z: tf.reduce_mean(tf.einsum("...i,...j->...ij", z, z) ** 2)),
        "einsum with an ellipsis that is broadcast": _matrix(
            lambda z: tf.reduce_mean(tf.einsum("...i,...j->...ij", z[None], z[:, None]) ** 2)
        ),
        "keras.ops.einsum": _matrix(lambda z: ops.mean(ops.einsum("ni,mi->nm", z, z))),
        "tensordot": _matrix(lambda z: tf.reduce_mean(tf.tensordot(z, tf.ones((4, 3)), 1) ** 2)),
        "normalize": lambda z: tf.reduce_mean(tf.square(tf.math.l2_normalize(z, 0))),
        "times column": _matrix(lambda z: tf.reduce_mean(z * z[:, :1])),
        "times a vector": _matrix(
            lambda z: tf.reduce_mean(z * tf.reduce_mean(z, 0) + tf.constant([1.0, 2.0, 3.0, 4.0]))
        ),
        "batch normalization by hand": lambda z: tf.reduce_mean(
            tf.square((z - tf.reduce_mean(z, 0)) * tf.math.rsqrt(tf.math.reduce_variance(z, 0) + 1e-3))
        ),
    },
    "elements": {
        "elements": lambda z: tf.reduce_mean(tf.tanh(z) * tf.exp(-tf.abs(z)) + tf.nn.relu(z) * tf.nn.gelu(z)),
        "more elements": lambda z: tf.reduce_mean(
            tf.nn.silu(z) + tf.nn.elu(z) * tf.nn.softplus(z) + tf.clip_by_value(z, -0.5, 0.5) + tf.maximum(z, 0.1) ** 3
        ),
        "where": lambda z: tf.reduce_mean(tf.where(z > 0, z, z * 0.1)),
        "cast": lambda z: tf.cast(tf.reduce_mean(tf.cast(z, tf.float64) ** 2), tf.float32),
        "slice of rows": lambda z: tf.reduce_sum(z[1:] * z[:-1]),
        "every second row": lambda z: tf.reduce_sum(z[::2] ** 2),
        "the last row": lambda z: tf.reduce_sum(z[-1:] ** 2),
        "half of the rows": lambda z: tf.reduce_sum(z[: tf.shape(z)[0] // 2] ** 2),
    },
    "control": {
        "number of rows": lambda z: tf.reduce_sum(z**2) / tf.cast(tf.shape(z)[0] * 2 + 1, tf.float32),
        "number of elements": lambda z: tf.reduce_sum(z**2) / tf.maximum(tf.cast(tf.size(z), tf.float32), 1.0),
        "a branch": lambda z: tf.cond(
            tf.shape(z)[0] > 3, lambda: tf.reduce_mean(z**2), lambda: tf.reduce_sum(z) + 1.0
        ),
        "nothing or the mean": lambda z: tf.where(tf.size(z) > 0, tf.reduce_mean(z), 0.0),
        "divide_no_nan": lambda z: tf.math.divide_no_nan(tf.reduce_sum(z**2), tf.cast(tf.shape(z)[0], tf.float32)),
    },
    "loops": {
        "a loop": lambda z: tf.reduce_mean(
            tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, tf.tanh(a * 1.5)), (0, z))[1] ** 2
        ),
        "a loop over rows": lambda z: tf.while_loop(
            lambda i, s: i < tf.shape(z)[0], lambda i, s: (i + 1, tf.tanh(s) + tf.reduce_sum(z[i] ** 2)), (0, 0.5)
        )[1],
        "map_fn": lambda z: tf.reduce_mean(tf.map_fn(lambda row: row * tf.reduce_sum(row), z)),
        "scan": lambda z: tf.reduce_mean(tf.scan(lambda a, row: tf.tanh(a + row), z, tf.zeros(z.shape[1:]))),
        "boolean_mask again": lambda z: tf.reduce_sum(tf.boolean_mask(z, z > 0.1) ** 2),
        "unique of it": lambda z: tf.reduce_sum(z) * tf.cast(
            tf.size(tf.unique(tf.cast(tf.reshape(z, (-1,)) * 3, tf.int32))[0]), tf.float32
        ),
        "stateless_normal": lambda z: tf.reduce_mean(z * tf.random.stateless_normal(tf.shape(z), [1, 2])),
        "linspace": lambda z: tf.reduce_sum(z * tf.reshape(tf.range(tf.size(z), dtype=tf.float32), tf.shape(z))),
        "BinaryAccuracy": lambda z: keras.metrics.binary_accuracy(
            tf.ones_like(tf.reshape(z, (-1,))), tf.reshape(z, (-1,))
        ) + tf.reduce_sum(z),
        "sparse_categorical_accuracy": _matrix(
            lambda z: tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(_zeros(z), z)) + tf.reduce_sum(z)
        ),
    },
}  # fmt: skip

# Layers, with functions that make their inputs.
LAYERS: dict[str, dict[str, tuple[Callable[[], keras.Layer], Callable[[tf.Tensor], tf.Tensor]]]] = {
    "dense": {
        "Dense": (lambda: keras.layers.Dense(3, activation="relu"), _matrix(lambda z: z)),
        "Dense without activation": (lambda: keras.layers.Dense(3), _matrix(lambda z: z)),
        "Dense of volumes": (lambda: keras.layers.Dense(3), _matrix(lambda z: z[:, None])),
        "EinsumDense": (lambda: keras.layers.EinsumDense("ab,bc->ac", output_shape=3), _matrix(lambda z: z)),
    },
    "convolutions": {
        "Conv1D": (lambda: keras.layers.Conv1D(2, 3), _matrix(lambda z: z[..., None])),
        "Conv1D over rows": (lambda: keras.layers.Conv1D(2, 3, padding="same"), _matrix(lambda z: z[None])),
        "MaxPooling1D": (lambda: keras.layers.MaxPooling1D(2), _matrix(lambda z: z[..., None])),
        "AveragePooling1D": (lambda: keras.layers.AveragePooling1D(2), _matrix(lambda z: z[..., None])),
        "GlobalAveragePooling1D": (keras.layers.GlobalAveragePooling1D, _matrix(lambda z: z[None])),
        "Flatten": (keras.layers.Flatten, _matrix(lambda z: tf.reshape(z, (-1, 2, 2)))),
    },
    "normalizations": {
        "BatchNormalization": (keras.layers.BatchNormalization, _matrix(lambda z: z)),
        "LayerNormalization": (keras.layers.LayerNormalization, _matrix(lambda z: z)),
        "RMSNormalization": (keras.layers.RMSNormalization, _matrix(lambda z: z)),
        "GroupNormalization": (lambda: keras.layers.GroupNormalization(2), _matrix(lambda z: z)),
        "UnitNormalization": (keras.layers.UnitNormalization, _matrix(lambda z: z)),
        "PReLU": (keras.layers.PReLU, _matrix(lambda z: z)),
        "Embedding": (
            lambda: keras.layers.Embedding(6, 3), lambda z: tf.cast(tf.clip_by_value(tf.abs(z) * 4, 0, 5), tf.int32)
        ),
    },
    "sequences": {
        "LSTM": (lambda: keras.layers.LSTM(3), _matrix(lambda z: z[..., None])),
        "GRU": (lambda: keras.layers.GRU(3, return_sequences=True), _matrix(lambda z: z[..., None])),
        "MultiHeadAttention": (lambda: Attention(), _matrix(lambda z: z[None])),
    },
}  # fmt: skip


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 2)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, inputs):
        return self.attention(inputs, inputs)


MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}
KERNEL = RS.normal(size=(6, 4)).astype("float32")


@tf.autograph.experimental.do_not_convert
def step(producer: str, consumers: dict[str, Callable], x: tf.Tensor, kernel: tf.Tensor) -> dict[str, tuple]:
    """Return each consumer's result, and its gradients by the batch and by a kernel before the producer."""
    found = {}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch((x, kernel))
        h = tf.matmul(x, kernel)
        z = PRODUCERS[producer](h, x)
        numbers = {name: consume(z) for name, consume in consumers.items()}
    for name, number in numbers.items():
        found[name] = (number, *tape.gradient(number, (x, kernel), unconnected_gradients="zero"))
    return found


def on_one_device(producer: str, consumers: dict[str, Callable]) -> dict[str, list[np.ndarray]]:
    found = tf.function(functools.partial(step, producer, consumers))(tf.constant(VALUES), tf.constant(KERNEL))
    return {name: [np.asarray(each) for each in tensors] for name, tensors in found.items()}


def on_mesh(producer: str, consumers: dict[str, Callable], mesh: str) -> dict[str, list[np.ndarray]]:
    """Run `step` on a mesh: the batch axis shards the batch, and a model axis the kernel's columns."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    x = transfer.host_to_mesh(VALUES, ("batch", None), strategy.mesh)
    kernel = transfer.host_to_mesh(KERNEL, (None, "model" if "model" in MESHES[mesh] else None), strategy.mesh)
    assert dtensor.fetch_layout(x).num_shards(0) == MESHES[mesh]["batch"]
    found = strategy.run(tf.function(functools.partial(step, producer, consumers)), args=(x, kernel))
    return {name: [transfer.to_host(each) for each in tensors] for name, tensors in found.items()}


def differences(ours: dict[str, list[np.ndarray]], theirs: dict[str, list[np.ndarray]]) -> list[str]:
    """Return the names of differing results. The mean of an empty tensor is NaN on one device, too."""
    return [
        name
        for name, expected in theirs.items()
        if not all(
            np.allclose(mine, value, rtol=1e-4, atol=1e-5, equal_nan=True)
            for mine, value in zip(ours[name], expected, strict=True)
        )
    ]


class _Model(keras.Model):
    """Dense, a producer, and layers. The loss of a step is the sum of `reduce` over the layers' outputs."""

    def __init__(self, producer: str, layers: dict[str, tuple[Callable, Callable]], reduce: Callable) -> None:
        super().__init__()
        self.reduce = reduce
        self.produce = PRODUCERS[producer]
        self.dense = keras.layers.Dense(4)
        self.others = [make() for make, _ in layers.values()]
        self.given = [given for _, given in layers.values()]
        self.made(tf.constant(VALUES))
        self.built = True

    def made(self, x: tf.Tensor, training: bool = False) -> list[tf.Tensor]:
        z = self.produce(self.dense(x), x)
        pairs = zip(self.others, self.given, strict=True)
        return [layer(given(z), training=training) for layer, given in pairs]

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = tf.add_n([self.reduce(each) for each in self.made(x, training=True)])
        variables = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def _mean_and_mean_of_squares(z: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(z)) + tf.reduce_mean(z)


# Losses with gradients of sizes that TensorFlow cannot infer.
LOSSES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "mean": tf.reduce_mean,
    "sum": tf.reduce_sum,
    "mean, axis 0": lambda z: tf.reduce_sum(tf.square(tf.reduce_mean(z, 0))),
    "mean of a concat": lambda z: tf.reduce_mean(tf.square(tf.concat([z, z], 0))),
    "variance": lambda z: tf.reduce_sum(tf.math.reduce_variance(z, 0)),
}


def trained(
    producer: str, layers: dict[str, tuple[Callable, Callable]], mesh: str | None,
    reduce: Callable[[tf.Tensor], tf.Tensor] = _mean_and_mean_of_squares,
) -> dict:  # fmt: skip
    """Return the loss of a step and the weights after it by path, on a mesh or on one device."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = _Model(producer, layers, reduce)
    optimizer = keras.optimizers.SGD(0.1)
    if mesh is None:
        model.compile(optimizer, jit_compile=False, run_eagerly=True)
    else:
        layout_map = tfshard.LayoutMap()
        if "model" in MESHES[mesh]:
            layout_map.column("dense")
            layout_map.replicated("(?!dense/).*", optional=True)
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), layout_map=layout_map)
        tfshard.as_distributed(model).compile(optimizer, strategy=strategy)
        assert any(axis is not None for axis in model.dense.kernel.value.layout.storage)
    loss = model.train_on_batch(VALUES, return_dict=True)["loss"]
    return {"loss": [np.asarray(loss)]} | {weight.path: [np.asarray(weight)] for weight in model.weights}
