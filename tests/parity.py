"""Train one model on one device and under a strategy, from the same weights on the same batches."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfshard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a training run."""

    model: keras.Model
    losses: list[float]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {variable.path: np.array(variable.numpy()) for variable in self.model.weights}

    @property
    def slots(self) -> list[np.ndarray]:
        return [np.array(variable.numpy()) for variable in self.model.optimizer.variables]


def dense_gradients(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Make the embedding gradients of a reference optimizer dense, as they are under the strategy.

    On one device, Keras's TensorFlow backend gives an optimizer `IndexedSlices` for an untied embedding, and squares
    them per occurrence. Keras on JAX and tfshard add up the occurrences of a row first.
    """
    apply = optimizer.apply

    def densified(grads, trainable_variables=None):
        grads = [None if g is None else tf.convert_to_tensor(g) for g in grads]
        return apply(grads, trainable_variables)

    optimizer.apply = densified
    return optimizer


def train(
    build: Callable[[], keras.Model],
    batches: list,
    *,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    loss: object,
    strategy: tfshard.ShardedStrategy | None = None,
    steps: int = 10,
    seed: int = 0,
    eager: bool = False,
) -> Run:
    """Call train_on_batch `steps` times, cycling through `batches`. Eager steps are quicker for a few on one device."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = build()
    chosen = optimizer()
    if strategy is None:
        model.compile(dense_gradients(chosen), loss, jit_compile=False, run_eagerly=eager)
    else:
        tfshard.as_distributed(model).compile(chosen, loss, strategy=strategy, run_eagerly=eager)
    losses = [float(model.train_on_batch(*batches[step % len(batches)])) for step in range(steps)]
    return Run(model=model, losses=losses)


def assert_same(run: Run, reference: Run, *, rtol: float, atol: float, slots: bool = True) -> None:
    """Assert that losses, weights and slots agree."""
    np.testing.assert_allclose(run.losses, reference.losses, rtol=rtol, atol=atol, err_msg="losses")
    expected = reference.weights
    assert run.weights.keys() == expected.keys()
    for path, value in run.weights.items():
        np.testing.assert_allclose(value, expected[path], rtol=rtol, atol=atol, err_msg=path)
    if slots:
        # A gradient may be only rounding, as for a bias of keys: compare with the largest slot of its kind.
        kinds = [variable.name.rpartition("_")[2] for variable in reference.model.optimizer.variables]
        largest = dict.fromkeys(kinds, 0.0)
        for kind, theirs in zip(kinds, reference.slots, strict=True):
            largest[kind] = max(largest[kind], float(np.abs(theirs).max(initial=0.0)))
        for kind, ours, theirs in zip(kinds, run.slots, reference.slots, strict=True):
            far = 10 * atol * largest[kind]
            np.testing.assert_allclose(ours, theirs, rtol=max(rtol, 1e-4), atol=far, err_msg=f"slots, {kind}")


def derivatives_of(function: Callable[[tf.Tensor], tf.Tensor], order: int) -> Callable[[tf.Tensor], tuple]:
    """Return a step that computes a function and its derivatives up to an order, each of a loss over all elements."""

    def derivatives(x, order):
        if not order:
            return [function(x)]
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = derivatives(x, order - 1)
            loss = tf.reduce_sum(found[-1] ** 3)
        return [*found, tape.gradient(loss, x)]

    return tf.function(lambda x: tuple(derivatives(x, order)))


def shard_axes(model: keras.Model) -> set:
    """Return the mesh axes that shard the storage of any trainable variable of the model."""
    return {axis for v in model.trainable_variables for axis in v.value.layout.storage if axis is not None}


def sharded_share(model: keras.Model, axis: str) -> float:
    """Return the share of the trainable bytes in variables that the mesh axis shards."""
    sizes = {v.path: int(np.prod(v.shape)) * v.value.dtype.size for v in model.trainable_variables}
    sharded = [v.path for v in model.trainable_variables if axis in v.value.layout.storage]
    return sum(sizes[path] for path in sharded) / sum(sizes.values())


def assert_moved(reference: Run, initial: dict[str, np.ndarray], *, tolerance: float, share: float = 0.9) -> None:
    """Premise: nearly all trainable elements are in variables that moved by 100 times the tolerance."""
    sizes = {v.path: int(np.prod(v.shape)) for v in reference.model.trainable_variables}
    moved = [p for p in sizes if np.abs(reference.weights[p] - initial[p]).max() >= 100 * tolerance]
    assert sum(sizes[p] for p in moved) >= share * sum(sizes.values()), sizes.keys() - set(moved)


def held_bytes(variables: list[keras.Variable]) -> int:
    """Return the bytes of variables on the fullest device, measured on the devices. A shared buffer counts once."""
    buffers = {id(v.value.buffer): v.value.buffer for v in variables}
    pieces = [[piece.numpy().nbytes for piece in dtensor.unpack(b.value())] for b in buffers.values()]
    assert all(len(sizes) == 4 for sizes in pieces), "premise: a piece for each of four devices"
    return max(sum(sizes) for sizes in zip(*pieces, strict=True))
