"""Cross entropy with integer labels and its gradient, on one device without a mesh: TensorFlow's kernel, and ours.

    python -m tools.bench.cross_entropy --tokens=512 --classes=8000 --rounds=7

With one thread, as a device of several that share the cores.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags

from tfshard.operations import cross_entropies
from tools.bench import common

_TOKENS = flags.DEFINE_integer("tokens", 512, "How many labels.")
_CLASSES = flags.DEFINE_integer("classes", 8000, "Logits of a token.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Each in turn, so often.")
_CALLS = 5


def step(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """The gradient of the mean loss."""
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    return tape.gradient(value, logits)


def seconds(function: Callable[..., tf.Tensor], logits: tf.Tensor, labels: tf.Tensor) -> float:
    """Of one call."""
    begin = time.perf_counter()
    for _ in range(_CALLS):
        function(logits, labels)
    return (time.perf_counter() - begin) / _CALLS


def main(argv: list[str]) -> None:
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rs = np.random.RandomState(0)
    logits = tf.constant(rs.normal(size=(_TOKENS.value, _CLASSES.value)).astype("float32"))
    labels = tf.constant(rs.randint(0, _CLASSES.value, _TOKENS.value))
    theirs, ours = tf.function(step), tf.function(step)
    expected = theirs(logits, labels)
    with cross_entropies.of_one_device():
        np.testing.assert_allclose(ours(logits, labels), expected, atol=1e-8)
    rounds = [[seconds(each, logits, labels) for each in (theirs, ours)] for _ in range(_ROUNDS.value)]
    for name, times in zip(("TensorFlow's kernel", "ours"), zip(*rounds, strict=True), strict=True):
        each = statistics.median(times) / logits.shape.num_elements()
        print(f"{name}: {common.spread([1e3 * taken for taken in times], '.1f')} ms, {1e9 * each:.1f} ns a logit")
    print(f"ours / theirs: {common.spread([ours / theirs for theirs, ours in rounds], '.2f')}")


if __name__ == "__main__":
    app.run(main)
