"""random_map: random Keras layers in an input pipeline, with the same batches on all clients and after a restart.

A random layer draws from a variable: the state of its seed generator. In `dataset.map` that variable lies outside the
dataset. Its value depends on how far the pipeline has read ahead, and on the order of parallel calls. Two clients
therefore get different batches, and a saved position does not contain the state. `random_map` gives each element a
number from a dataset of random numbers, and the layers draw from that number.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError

# The distance between the seeds of two generators of one element. No generator draws this often for an element.
_APART = 1 << 20


def random_map(
    dataset: tf.data.Dataset, function: Callable[..., Any], *, seed: int, num_parallel_calls: int | None = None
) -> tf.data.Dataset:
    """Apply a function with random Keras layers, such as augmentation, to each element of a dataset.

    The random numbers depend only on `seed`, the epoch and the position of the element in the dataset. They are the
    same on all clients of a launched run, with any number of parallel calls, and in a resumed run. Each epoch draws
    different numbers. The states of the layers' seed generators are not used and not changed.

    Args:
        dataset: Any `tf.data.Dataset`. After `batch`, the elements are batches.
        function: As in `dataset.map`. Layers with weights must be built before, and must not write their weights.
        seed: The seed of all random numbers.
        num_parallel_calls: As in `dataset.map`; `tf.data.AUTOTUNE` uses all cores. The order of the elements is kept.

    Raises:
        StrategyError: `seed` is not an integer, or `function` writes a variable.

    Example:

    >>> import keras, numpy as np, tensorflow as tf, tfshard
    >>> augment = keras.Sequential([keras.layers.RandomFlip("horizontal"), keras.layers.RandomRotation(0.1)])
    >>> samples = tf.data.Dataset.from_tensor_slices((np.random.rand(12, 8, 8, 3), np.arange(12)))
    >>> batches = samples.shuffle(12, seed=0).batch(4)
    >>> batches = tfshard.random_map(batches, lambda x, y: (augment(x, training=True), y), seed=1)
    >>> [tuple(x.shape) for x, y in batches]
    [(4, 8, 8, 3), (4, 8, 8, 3), (4, 8, 8, 3)]
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise StrategyError(
            "random_map needs an integer seed that is the same on all clients and in every start of a run. "
            f"Received: seed={seed!r}"
        )

    def seeded(number: tf.Tensor, element: Any) -> Any:
        with _Seeds(number):
            # As `tf.data` does.
            return function(*element) if type(element) is tuple else function(element)

    numbers = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    # TensorFlow warns if `deterministic` is set for sequential calls.
    order = {} if num_parallel_calls is None else {"deterministic": True}
    return tf.data.Dataset.zip(numbers, dataset).map(seeded, num_parallel_calls=num_parallel_calls, **order)


class _Seeds(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types.
    """Start each seed generator at a different number that depends on the element."""

    def __init__(self, number: tf.Tensor):
        super().__init__()
        self._number = number
        self._generators = 0

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        found = super().get_current_value(variable)
        if found is None and _private.is_seed_state(variable.name):
            seeds = tf.stack([self._number, tf.constant(self._generators * _APART, self._number.dtype)])
            self._generators += 1
            found = tf.cast(seeds, variable.dtype)
            super().add_update((variable, found))
        return found

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, _ = update
        if not _private.is_seed_state(variable.name):
            raise StrategyError(
                f"The function of random_map writes variable '{variable.path}', which an input pipeline cannot do in "
                f"a fixed order. Call its layer with training=False, or put it into the model. Received: {variable!r}"
            )
        super().add_update(update)
