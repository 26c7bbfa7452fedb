"""Products of integers of 8 bits, those of quantized layers, which DTensor does not expand."""

import tensorflow as tf

from tfshard import _private


def of_integers(call: _private.Call) -> tf.Tensor | None:
    """`BatchMatMulV3` whose result has another dtype than its operands, as a product in the dtype of the result.

    That is what TensorFlow's kernel on CPU does, too: it casts the operands. DTensor expands the product wherever the
    operands are sharded: where the dim that is summed over is, it adds up integers, which rounds nothing.
    """
    dtype = call.get_attr("Tout")
    x, y = call.inputs
    if x.dtype == y.dtype == dtype:
        return None
    product: tf.Tensor = tf.raw_ops.BatchMatMulV2(
        x=tf.cast(x, dtype), y=tf.cast(y, dtype), adj_x=call.get_attr("adj_x"), adj_y=call.get_attr("adj_y")
    )
    return product
