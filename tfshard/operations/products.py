"""Products of integers of 8 bits, those of quantized layers, which DTensor does not expand."""

import tensorflow as tf

from tfshard import _private


def of_integers(call: _private.Call) -> tf.Tensor:
    """`BatchMatMulV3`, whose result may have another dtype than its operands, as a product in the dtype of the result.

    That is what TensorFlow's kernel on CPU does, too: it casts the operands. DTensor expands the product however the
    operands are sharded: where the dim that is summed over is, it adds up integers, which rounds nothing.
    """
    x, y = (tf.cast(each, call.get_attr("Tout")) for each in call.inputs)
    product: tf.Tensor = tf.raw_ops.BatchMatMulV2(
        x=x, y=y, adj_x=call.get_attr("adj_x"), adj_y=call.get_attr("adj_y")
    )  # fmt: skip
    return product
