"""The cases that rewrite rules name: a small function for each, computed in a step and on one device."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard
from tfshard import _private
from tfshard.devices import transfer
from tfshard.operations import registry

RS = np.random.RandomState(0)
MESHES = {"batch4": {"batch": 4}, "batch2_model2": {"batch": 2, "model": 2}}
VALUES = {
    "x": RS.normal(size=(8, 6)).astype("float32"),
    "y": RS.normal(size=(8, 6)).astype("float32"),
    "s": RS.normal(size=(8, 5, 6)).astype("float32"),
    "m": RS.normal(size=(8, 6, 6)).astype("float32") + 3 * np.eye(6, dtype="float32"),
    "i": RS.randint(0, 5, (8, 3)).astype("int32"),
    "image": RS.normal(size=(8, 4, 4, 2)).astype("float32"),
}
KERNEL = RS.normal(size=(3, 3, 2, 2)).astype("float32")
Values = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of `VALUES` that takes rules.

    Attributes:
        function: Returns a structure of tensors.
        mesh: A key of `MESHES`.
        eager: True for an eager step.
        error: A pattern of the message with which the step is refused, if it is.
    """

    function: Callable[[Values], Any]
    mesh: str = "batch4"
    eager: bool = False
    error: str | None = None


def _masked(v: Values) -> tf.Tensor:
    return tf.boolean_mask(v["x"], v["x"][:, 0] > 0)


def _local_slice(v: Values) -> tf.Tensor:
    return tfshard.local_map(lambda x: x[:, None, 1:], [("batch", None)], [("batch", None, None)])(v["x"])


def _unknown_sizes(v: Values) -> list[tf.Tensor]:
    z = _masked(v)
    shape = tf.shape(z)
    return [tf.broadcast_to(z[0], shape) * tf.fill(shape, 2.0), tf.concat([z, v["x"]], 0)[1:]]


def _sampled_softmax(v: Values) -> tf.Tensor:
    weights, biases = (tf.constant(CLASSES[name]) for name in ("weights", "biases"))
    labels = tf.cast(v["i"][:, :1], tf.int64)
    return tf.nn.sampled_softmax_loss(weights, biases, labels, v["x"], 4, 30, seed=1)


CLASSES = {
    "weights": RS.normal(size=(30, 6)).astype("float32"),
    "biases": RS.normal(size=(30,)).astype("float32"),
}


def _list_of_loop(v: Values) -> tf.Tensor:
    x = v["x"]

    def body(i, state, array):
        return i + 1, tf.tanh(state + tf.gather(x, i, axis=1)), array.write(i, state)

    size = tf.shape(x)[1]
    array = tf.TensorArray(tf.float32, size=size)
    return tf.while_loop(lambda i, *_: i < size, body, (0, tf.zeros_like(x[:, 0]), array))[2].stack()


def _scan(v: Values) -> tf.Tensor:
    steps = tf.transpose(v["s"], (1, 0, 2))
    return keras.ops.scan(lambda c, e: (tf.tanh(c + e), c), tf.zeros_like(steps[0]), steps)[1]


def _scan_of_scans(v: Values) -> tf.Tensor:
    def outer(c, e):
        inner = keras.ops.scan(lambda a, r: (a + r, a * r), tf.zeros_like(e[0]), e)[1]
        return tf.tanh(c + tf.reduce_mean(inner, 0)), c

    return keras.ops.scan(outer, tf.zeros_like(v["s"][:, 0]), tf.transpose(v["s"], (1, 0, 2)))[1]


@tf.custom_gradient
def _clipped(x: tf.Tensor, scale: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    return x * scale, lambda upstream: (tf.clip_by_value(upstream * scale, -1.0, 1.0), None)


def _custom_gradient_in_branch(v: Values) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(v["x"]) > -1e9, lambda: _clipped(v["x"], tf.constant(2.0)), lambda: v["x"])


def _update(v: Values) -> tf.Tensor:
    given = tf.stop_gradient(v["s"])  # XLA's operation has no gradient.
    return keras.ops.slice_update(given, [0, 1, 0], given[:, :2])


def _dense(v: Values) -> tf.Tensor:
    places = np.arange(8)[:, None]
    return tf.raw_ops.SparseToDense(
        sparse_indices=places, output_shape=[9], sparse_values=v["x"][:, 0], default_value=0.0
    )


def _draw_by_tensor(v: Values) -> tf.Tensor:
    return tf.random.stateless_normal((8, 6), tf.reduce_sum(v["i"], 0)[:2]) * v["x"]


def _scatter(v: Values) -> tf.Tensor:
    return tf.scatter_nd(v["i"][:, :1], v["x"], (5, 6))


def _scatter_into(v: Values) -> list[tf.Tensor]:
    places = tf.constant([[7], [2]])
    updates = v["y"][:2]
    return [tf.tensor_scatter_nd_update(v["x"], places, updates), tf.tensor_scatter_nd_add(v["x"], places, updates)]


def _integers(v: Values) -> tf.Tensor:
    codes = tf.cast(tf.stop_gradient(v["m"]) * 10.0, tf.int8)
    return tf.raw_ops.BatchMatMulV3(x=codes, y=codes, Tout=tf.int32)


def _conv(v: Values) -> tf.Tensor:
    return tf.nn.conv2d(v["image"], tf.constant(KERNEL), 1, "SAME")


def _masked_conv(v: Values) -> tf.Tensor:
    return tf.nn.conv2d(tf.boolean_mask(v["image"], v["x"][:, 0] > 0), tf.constant(KERNEL), 1, "SAME")


def _segments(v: Values) -> tf.Tensor:
    return tf.math.unsorted_segment_max(v["x"], v["i"][:, 0], 5)


EINSUM = "...a,ab->...b"
SQUARE = tf.constant(RS.normal(size=(6, 6)).astype("float32"))
MODEL = "batch2_model2"
CASES: dict[str, Case] = {
    # Slices.
    "slice": Case(lambda v: v["s"][:, 1], MODEL),
    "slice in an eager step": Case(lambda v: v["s"][:, 1], eager=True),
    "slice of a local shard": Case(_local_slice),
    "slice of samples": Case(lambda v: v["x"][2:6]),
    "slice update": Case(_update, MODEL),
    "slice update in an eager step": Case(_update, eager=True),
    # Products.
    "einsum with an ellipsis": Case(lambda v: tf.einsum(EINSUM, v["s"], SQUARE)),
    "einsum in an eager step": Case(lambda v: tf.einsum(EINSUM, v["s"], SQUARE), eager=True),
    "einsum of unknown size": Case(lambda v: tf.einsum(EINSUM, _masked(v), SQUARE)),
    "product of integers": Case(_integers),
    "product of samples": Case(lambda v: tf.matmul(v["x"], v["y"], transpose_b=True)),
    "product of a tensor with itself": Case(lambda v: tf.matmul(v["m"], v["m"]), MODEL),
    "each sample with each": Case(lambda v: v["x"][:, None] - v["x"][None]),
    # Selections and counts.
    "select by a number": Case(lambda v: tf.where(tf.reduce_sum(v["x"]) > 0, v["x"], v["y"])),
    "select in an eager step": Case(lambda v: tf.where(tf.reduce_sum(v["x"]) > 0, v["x"], v["y"]), eager=True),
    "select of unknown size": Case(lambda v: tf.where(tf.reduce_sum(v["x"]) > 0, _masked(v), 2.0 * _masked(v))),
    "dense of sparse in an eager step": Case(_dense, eager=True),
    "one-hot vectors": Case(lambda v: tf.one_hot(v["i"], 5), MODEL),
    "bincount": Case(lambda v: tf.math.bincount(v["i"], minlength=5, maxlength=5, axis=-1)),
    # Random numbers.
    "random draw": Case(lambda v: tf.random.stateless_normal((8, 6), (1, 2)) * v["x"]),
    "random draw in an eager step": Case(_draw_by_tensor, eager=True),
    "sampled softmax": Case(_sampled_softmax),
    # Scatters and gathers.
    "scatter": Case(_scatter),
    "scatter into a tensor": Case(_scatter_into),
    "scatter in an eager step": Case(lambda v: [_scatter(v), *_scatter_into(v)], eager=True),
    "gather by index tuples": Case(lambda v: tf.gather_nd(v["x"], v["i"][:, :2])),
    "gather in an eager step": Case(
        lambda v: [tf.gather_nd(v["x"], v["i"][:, :2]), tf.gather(v["x"], v["i"], batch_dims=1)], eager=True
    ),
    "gather with batch dims": Case(lambda v: tf.gather(v["x"], v["i"], batch_dims=1)),
    "gather of samples": Case(lambda v: tf.gather(v["x"], [7, 6, 5, 4, 3, 2, 1, 0])),
    "gradient of segments": Case(_segments, MODEL),
    "top k": Case(lambda v: tf.math.top_k(v["x"], 2)),
    "top k in an eager step": Case(lambda v: tf.math.top_k(v["x"], 2), eager=True),
    "where": Case(lambda v: tf.where(v["x"] > 0)),
    "where in an eager step": Case(lambda v: tf.where(v["x"] > 0), eager=True),
    # Samples and dims.
    "concat of samples": Case(lambda v: tf.concat([v["x"], v["y"]], 0)),
    "stack of samples": Case(lambda v: tf.stack([v["x"], v["y"]])),
    "unstack of samples": Case(lambda v: tf.unstack(v["x"])[3]),
    "reshape of samples": Case(lambda v: tf.reshape(tf.transpose(v["x"]), (48,))),
    "concat of features": Case(lambda v: tf.concat([v["x"], v["y"]], 1), MODEL),
    "split": Case(lambda v: tf.split(v["x"], 2, 1)[1], MODEL),
    "tile": Case(lambda v: tf.tile(v["x"], (1, 2)), MODEL),
    "pad": Case(lambda v: tf.pad(v["x"], [[0, 0], [1, 1]]), MODEL),
    "gradient of a tile": Case(lambda v: tf.tile(v["image"][:, None], (1, 3, 1, 1, 1)), MODEL),
    "convolution of a replicated batch": Case(_conv),
    "convolution of a masked batch": Case(_masked_conv),
    "operation of rows": Case(lambda v: tf.linalg.inv(v["m"])),
    "tensor of unknown size": Case(_unknown_sizes),
    # Loops, branches and functions.
    "loop that fills a list": Case(_list_of_loop),
    "item of a list": Case(lambda v: tf.TensorArray(tf.float32, 6).unstack(tf.transpose(v["x"])).read(2)),
    "loop under a persistent tape": Case(_scan),
    "custom gradient in a branch": Case(_custom_gradient_in_branch),
    "gradient of a loop in a loop": Case(_scan_of_scans, error="a loop in a loop"),
    "branch of unknown size": Case(
        lambda v: tf.cond(tf.reduce_sum(v["x"]) > 0, lambda: _masked(v), lambda: v["x"][:3]), MODEL,
        error="cannot have a branch",
    ),
    "print": Case(lambda v: tf.print(v["x"]), error="tf.print"),
}  # fmt: skip


def with_gradients(function: Callable[[Values], Any], values: Values) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the results of a function, and the gradients of the sum of their squares by the floats that it takes."""
    floats = [value for value in values.values() if value.dtype.is_floating]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(floats)
        results = tf.nest.flatten(function(values))
        squares = [tf.reduce_sum(tf.square(each)) for each in results if each is not None and each.dtype.is_floating]
    gradients = tape.gradient(squares, floats) if squares else []
    return results, [tf.convert_to_tensor(each) for each in gradients if each is not None]


@contextlib.contextmanager
def noted_rules(into: set[str]) -> Iterator[None]:
    """Note the names of the rules that replace an operation, change it in place, or refuse it."""
    original = registry.RewriteRule.rewrite

    def rewrite(self: registry.RewriteRule, call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
        if self.function.__annotations__["return"] is None:
            into.add(self.name)
        result = original(self, call, mesh)
        if result is not None:
            into.add(self.name)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry.RewriteRule, "rewrite", rewrite)
        yield


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results and gradients of a case on a mesh, and the rules that it took."""

    values: list[np.ndarray]
    rules: frozenset[str]


@functools.cache
def on_one_device(case: Case) -> list[np.ndarray]:
    """Compute a case on one device, once: the kernel of a sampler keeps its state."""
    values = {name: tf.constant(value) for name, value in VALUES.items()}

    def step() -> Any:
        return with_gradients(case.function, values)

    # Loops and branches have their gradients in graphs only.
    return [np.asarray(each) for each in tf.nest.flatten(tf.function(step, autograph=False)())]


@functools.cache
def outcome(case: Case) -> Outcome:
    """Compute a case on its mesh."""
    rules: set[str] = set()
    strategy, values = on_mesh(case.mesh)
    step = functools.partial(with_gradients, case.function)
    with noted_rules(rules), strategy.extended.results_stay_sharded():
        found = strategy.run(step if case.eager else tf.function(step, autograph=False), args=(values,))
    return Outcome([transfer.to_host(each) for each in tf.nest.flatten(found)], frozenset(rules))


def on_mesh(mesh: str) -> tuple[tfshard.ShardedStrategy, Values]:
    """Return a strategy, and `VALUES` on its mesh, sharded over the batch axis."""
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**MESHES[mesh]), zero_stage=0)
    values = {
        name: transfer.host_to_mesh(value, ("batch", *(None,) * (value.ndim - 1)), strategy.mesh)
        for name, value in VALUES.items()
    }
    assert dtensor.fetch_layout(values["x"]).num_shards(0) == MESHES[mesh]["batch"], "premise"
    return strategy, values


def refused(case: Case) -> frozenset[str]:
    """Run a case that a rule refuses, and return the rules that it took."""
    strategy, values = on_mesh(case.mesh)
    rules: set[str] = set()
    with noted_rules(rules), pytest.raises(tfshard.errors.UnsupportedOperationError, match=case.error):
        strategy.run(tf.function(lambda v: with_gradients(case.function, v), autograph=False), args=(values,))
    return frozenset(rules)


# --- a model with an embedding table -----------------------------------------------------------------


def _two_lookups() -> keras.Model:
    keras.utils.set_random_seed(0)
    ids = keras.Input((3,), dtype="int32")
    table = keras.layers.Embedding(16, 4, name="words")
    return keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(table(ids) * table(ids + 1))))


@functools.cache
def table_rules() -> frozenset[str]:
    """Train a step with an embedding table, compare it with one device, and return the rules that the step took."""
    rules: set[str] = set()
    tables = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), tables=".*words/embeddings")
    trained = []
    for strategy in (tables, None):
        model = _two_lookups()
        with noted_rules(rules):
            if strategy is None:
                model.compile(keras.optimizers.Adagrad(0.5), "mse", jit_compile=False)
            else:
                tfshard.as_distributed(model).compile(keras.optimizers.Adagrad(0.5), "mse", strategy=strategy)
            model.train_on_batch(VALUES["i"], CLASSES["weights"][:8, :2])
        trained.append(model.get_weights())
    for ours, theirs in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return frozenset(rules)


TABLE = "two lookups in a table"
