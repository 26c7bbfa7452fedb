"""A sharded variable behaves like a tf.Variable and a keras.Variable in the same calls."""

import copy
import math
import operator
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfshard

VALUES = {
    "scalar": np.float32(2.5),
    "integer": np.array(3, "int64"),
    "flag": np.array(True),
    "vector": np.arange(10, dtype="float32"),
    "matrix": np.arange(24, dtype="float32").reshape(8, 3),
}


def slices(values, indices) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices))


def plus_equals(variable):
    variable += 1
    return variable


READS = {
    "float": float, "int": int, "complex": complex, "bool": bool, "len": len, "sqrt": math.sqrt,
    "format": lambda v: f"{v.numpy():.1f}", "if": lambda v: "yes" if v > 1 else "no",
    "iterate": lambda v: [float(tf.reduce_sum(part)) for part in v], "index": lambda v: v[1], "slice": lambda v: v[1:],
    "ellipsis": lambda v: v[..., 0], "==": lambda v: v == 2.5, "!=": lambda v: v != 1, "<": lambda v: v < 3,
    ">=": lambda v: v >= v, "-": operator.neg, "abs": abs, "**": lambda v: v**2, "2 **": lambda v: 2**v,
    "1 -": lambda v: 1 - v, "1 /": lambda v: 1 / v, "//": lambda v: v // 2, "%": lambda v: v % 2, "+=": plus_equals,
    "@": lambda v: v @ tf.ones((3, 2)), "asarray": np.asarray, "float64": lambda v: np.asarray(v, "float64"),
    "np.sum": np.sum, "hash": lambda v: {hash(v): 1} and 1, "ref": lambda v: v.ref().deref() is v,
    "type of numpy()": lambda v: type(v.numpy()).__name__, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)), "sorted": lambda v: [float(part) for part in sorted(v)],
    "sparse_read": lambda v: v.sparse_read([0, 1]), "gather_nd": lambda v: v.gather_nd([[0]]),
    "set_shape": lambda v: v.set_shape(v.shape), "initializer": lambda v: v.initializer,
    "has op": lambda v: hasattr(v, "op"), "has graph": lambda v: hasattr(v, "graph"),
}  # fmt: skip
WRITES = {
    "assign": lambda v: v.assign(v + v), "assign_add": lambda v: v.assign_add(tf.ones(v.shape, v.dtype)),
    "scatter_add": lambda v: v.scatter_add(slices([1, 2], [1, 1])),
    "scatter_sub": lambda v: v.scatter_sub(slices([1, 2], [1, 1])),
    "scatter_update": lambda v: v.scatter_update(slices([7, 8], [1, 2])),
    "scatter_max": lambda v: v.scatter_max(slices([1, 7], [1, 2])),
    "scatter_min": lambda v: v.scatter_min(slices([1, 0], [1, 2])),
    "scatter_nd_add": lambda v: v.scatter_nd_add([[0], [0]], [9.0, 1.0]),
    "scatter_nd_sub": lambda v: v.scatter_nd_sub([[0]], [9.0]),
    "scatter_nd_update": lambda v: v.scatter_nd_update([[0]], [9.0]),
    "part": lambda v: v[1].assign(5.0), "parts": lambda v: v[2:6:2].assign([5.0, 6.0]),
}  # fmt: skip


def outcome(function, variable):
    """Return the result of a function as plain data, or a note that it raised an exception."""
    try:
        result = function(variable)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, tf.errors.OpError):
        return "an exception"
    if isinstance(result, (tf.Variable, keras.Variable)):
        return "a variable", np.asarray(result).tolist()
    if tf.is_tensor(result):
        return "a tensor", result.dtype.name, result.numpy().tolist()
    return result.tolist() if isinstance(result, (np.ndarray, np.generic)) else result


@pytest.mark.parametrize("value", VALUES)
def test_a_sharded_variable_converts_compares_and_copies_as_others_do(value):
    plain = keras.Variable(VALUES[value], name="v")
    with tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)).scope():
        sharded = keras.Variable(VALUES[value], name="v")
    assert isinstance(sharded.value, tfshard.storage.ShardedVariable)
    assert value in ("scalar", "integer", "flag") or "batch" in sharded.value.layout.storage
    for theirs, ours in ((plain, sharded), (plain.value, sharded.value)):
        for name, function in READS.items():
            assert outcome(function, ours) == outcome(function, theirs), name
    if value == "vector":
        for name, function in WRITES.items():
            results = []
            for variable in (sharded.value, plain.value):
                results.append((outcome(function, variable), variable.numpy().tolist()))
                variable.assign(VALUES[value])
            assert results[0] == results[1], name


def test_methods_that_a_sharded_variable_lacks_are_named():
    with tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)).scope():
        variable = tf.Variable([1.0, 2.0], name="v")
    with pytest.raises(tfshard.errors.StrategyError, match=r"no scatter_mul\(\). Use assign.*variable 'v'"):
        variable.scatter_mul(slices([1.0], [0]))


def test_an_optimizers_counters_are_numbers():
    model = tfshard.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.5), "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    model.fit(np.ones((8, 4)), np.ones((8, 4)), batch_size=4, verbose=0)
    assert isinstance(model.optimizer.iterations.value, tfshard.storage.ShardedVariable)
    assert float(model.optimizer.learning_rate) == 0.5
    assert int(model.optimizer.iterations) == 2
    assert f"{model.optimizer.learning_rate.numpy():.2f} {model.optimizer.iterations.numpy():d}" == "0.50 2"


def test_an_eager_step_converts_what_it_has_written_and_reads_what_a_compiled_one_wrote():
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4))
    model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(3)])  # Grouped: a read is cached for its step.
    model.compile("sgd", "mse", strategy=strategy)
    kernel = model.layers[0].kernel.value
    assert kernel.layout.group is not None

    def read():
        return tf.reduce_sum(kernel.value())

    for _ in range(2):
        model.train_on_batch(np.ones((8, 8)), np.ones((8, 3)))
        np.testing.assert_allclose(strategy.run(read), kernel.numpy().sum(), rtol=1e-5)

    def write():
        model.optimizer.iterations.assign(7)
        return int(model.optimizer.iterations)

    assert strategy.run(write) == 7
