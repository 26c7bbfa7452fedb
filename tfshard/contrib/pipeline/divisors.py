"""The divisors of the losses of a full batch, which are known before its microbatches are computed."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard import _private
from tfshard.errors import StrategyError
from tfshard.graph import inventory
from tfshard.storage import graph_edits

# From x, y and sample weights on the host to the divisors of the losses, in the order in which Keras divides.
Divisors = Callable[[Any, Any, Any], Sequence[tf.Tensor]]


def of_batch(model: keras.Model, *, training: bool) -> Divisors:
    """Return a function from a batch to the divisors of a model's losses.

    A divisor is a count of unmasked elements, or a sum of weights.

    Args:
        model: A compiled model.
        training: True for a training step.
    """

    def divisors(x: Any, y: Any, sample_weight: Any) -> list[tf.Tensor]:
        found: list[tf.Tensor] = []

        def note(reduced: _private.Reduced) -> tf.Tensor:
            if reduced.divisor is not None:
                found.append(reduced.divisor)
            return reduced.loss

        mapping = [
            (variable, tf.compat.v1.placeholder(variable.dtype, variable.shape))
            for variable, _ in inventory.owned_variables(model)
        ]
        with keras.StatelessScope(state_mapping=mapping), _private.reduced_losses(note):
            predicted = model(x, training=training)
            _private.compute_loss(model, x, y, predicted, sample_weight, training=training)
        values = {placeholder.op for _, placeholder in mapping}
        if not values.isdisjoint(graph_edits.ancestors(found)):
            raise StrategyError(
                "A loss is divided by a value that depends on the model's variables. For the full batch, this value "
                "is not known before the microbatches are computed. Divide the loss by a value that depends only on "
                "the batch."
            )
        return found

    compiled = tf.function(divisors, autograph=False)

    def on_host(x: Any, y: Any, sample_weight: Any) -> Sequence[tf.Tensor]:
        with tf.device("CPU:0"):
            found: list[tf.Tensor] = compiled(x, y, sample_weight)
        return found

    return on_host
