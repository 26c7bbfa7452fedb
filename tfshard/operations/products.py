"""Products that DTensor does not expand: of integers of 8 bits, and of samples with samples."""

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.operations import samples


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


def of_samples(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """`MatMul` and `Einsum` of the samples of a batch with samples, as contrastive losses have it (Chen et al. 2020,
    SimCLR; Radford et al. 2021, CLIP): each device multiplies its samples with all.

    Both operands are sharded along dims of the result then, by the same axis. DTensor takes one of them for whole in
    one place and the other in another: the reduction after it fails, or a transpose.
    """
    if call.is_eager:
        return None
    kept = _kept_dims(call)
    if kept is None:
        return None
    x, y = call.inputs
    if not samples.are_in(y, kept[1]) or not samples.are_in(x, kept[0]):
        return None
    whole = [dtensor.UNSHARDED if dim == kept[1] else dtensor.MATCH for dim in range(y.shape.rank)]
    return _private.same_operation(call, [x, dtensor.relayout(y, dtensor.Layout(whole, mesh))])


def _kept_dims(call: _private.Call) -> tuple[int, int] | None:
    """The dims of two matrices that the result has; None for other products."""
    if len(call.inputs) != 2 or any(each.shape.rank != 2 for each in call.inputs):
        return None
    if call.type == "MatMul":
        return int(call.get_attr("transpose_a")), 1 - int(call.get_attr("transpose_b"))
    equation = call.get_attr("equation")
    terms, _, result = (equation.decode() if isinstance(equation, bytes) else equation).partition("->")
    kept = [[term.index(letter) for letter in term if letter in result] for term in terms.split(",")]
    return (kept[0][0], kept[1][0]) if len(result) == 2 and all(len(each) == 1 for each in kept) else None
