"""Rewrite rules of products: of 8-bit integers, of samples with samples, of a tensor with itself."""

import itertools

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import transfer
from tfshard.errors import warn
from tfshard.operations import loops, samples, unsized
from tfshard.operations.conditions import batch_axis_has_devices, model_axis_has_devices
from tfshard.operations.registry import rewrite_rule
from tfshard.storage import steps


@rewrite_rule(
    "BatchMatMulV3", graph=True, eager=False, gradient="registered",
    fault="has no expansion: every device computes the full product (int8 in int32, of quantized layers)",
    cases=("product of integers",),
)  # fmt: skip
def multiply_integers(call: _private.Call) -> tf.Tensor:
    """Cast both operands to the dtype of the result, and multiply.

    TensorFlow's kernel on CPU casts them, too. If the summed dim is sharded, DTensor sums integers, which rounds
    nothing.
    """
    x, y = (tf.cast(each, call.get_attr("Tout")) for each in call.inputs)
    product: tf.Tensor = tf.raw_ops.BatchMatMulV2(
        x=x, y=y, adj_x=call.get_attr("adj_x"), adj_y=call.get_attr("adj_y")
    )  # fmt: skip
    return product


# Contrastive losses multiply samples with samples: Chen et al. 2020, SimCLR; Radford et al. 2021, CLIP.
@rewrite_rule(
    "MatMul", "Einsum", graph=True, eager=False, gradient="registered", order=1,
    fault="for samples times samples, replicates one operand in one place and the other operand in another place, "
          "and refuses the sum, transpose or argmax after the product", cases=("product of samples",),
)  # fmt: skip
def multiply_samples(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate the second operand along its samples: each device multiplies its samples with all samples."""
    kept = _kept_dims(call)
    if kept is not None and samples.are_in(call.inputs[1], kept[1]) and samples.are_in(call.inputs[0], kept[0]):
        x, y = call.inputs
        _warn_of_microbatches()
        return _private.same_operation(call, [x, samples.replicated_along(y, kept[1], mesh)])
    return None


@rewrite_rule(
    "MatMul", "Einsum", "BatchMatMulV2", graph=True, eager=False, gradient="registered", when=model_axis_has_devices,
    order=2, fault="gives both operands one layout if a tensor is multiplied by itself: refuses `m @ m`, and gives "
    "wrong gradients of `m @ tf.transpose(m)`", cases=("product of a tensor with itself",),
)  # fmt: skip
def multiply_by_itself(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Remove the model axis from the second operand."""
    if len(call.inputs) != 2:
        return None
    x, y = call.inputs
    if x is not y or not y.shape.is_fully_defined():
        return None
    if unsized.is_nested(y.graph):
        # Nothing is pinned there (unsized.py).
        return _private.same_operation(call, [x, loops.made_here(y)]) if loops.can_make(y.graph) else None
    of_samples = next((dim for dim in range(y.shape.rank) if samples.are_in(y, dim)), None)
    placed = transfer.replicate(y, mesh) if of_samples is None else samples.sharded_along(y, of_samples, mesh)
    return _private.same_operation(call, [x, placed])


# Operations that compare each element with each, by broadcasting.
COMPARISONS = (
    "Add", "AddV2", "Equal", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd",
    "LogicalOr", "Maximum", "Minimum", "Mul", "NotEqual", "RealDiv", "SquaredDifference", "Sub",
)  # fmt: skip


@rewrite_rule(
    *COMPARISONS, graph=True, eager=False, gradient="registered", when=batch_axis_has_devices,
    fault="refuses samples that are broadcast along samples, as in `x[:, None] - x[None]`",
    cases=("each sample with each",),
)  # fmt: skip
def compare_samples(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Replicate one operand along its samples: each device compares its samples with all samples."""
    if len(call.inputs) != 2:
        return None
    x, y = call.inputs
    if x.shape == y.shape or not x.shape.is_fully_defined() or not y.shape.is_fully_defined():
        return None
    # Dims are counted from behind, as shapes are matched.
    if not any(_is_broadcast(x, y, *dims) for dims in itertools.product(_dims(x), _dims(y))):
        return None
    found = [next((dim for dim in _dims(each) if samples.are_in(each, dim % each.shape.rank)), 0) for each in (x, y)]
    if 0 in found or not _is_broadcast(x, y, *found):
        return None
    _warn_of_microbatches()
    number = found.index(max(found))
    tensor = call.inputs[number]
    inputs = [x, y]
    inputs[number] = samples.replicated_along(tensor, found[number] % tensor.shape.rank, mesh)
    return _private.same_operation(call, inputs)


def _warn_of_microbatches() -> None:
    """Warn if the step that is traced takes a microbatch. Call this where samples meet samples."""
    step = steps.current()
    if step is not None and step.batch.microbatch is not None:
        warn(
            "This step compares samples with each other, and takes the batch in microbatches: each sample meets only "
            "the samples of its microbatch, so the loss is not that of the full batch. Leave out microbatches=, and "
            "save memory by strategy.recompute(model). Received: "
            f"microbatches={step.batch.microbatch.count}"
        )


def _dims(tensor: tf.Tensor) -> list[int]:
    """Return the dims of more than one element, counted from behind."""
    return [dim for dim in range(-tensor.shape.rank, 0) if tensor.shape[dim] > 1]


def _is_broadcast(x: tf.Tensor, y: tf.Tensor, of_x: int, of_y: int) -> bool:
    """Return whether an operation on `x` and `y` takes each element of one dim with each element of another."""
    last, first = (x, of_y) if of_x > of_y else (y, of_x)
    return of_x != of_y and (-first > last.shape.rank or last.shape[first] == 1)


def _kept_dims(call: _private.Call) -> tuple[int, int] | None:
    """Return the dims of two matrices that the result keeps; None for other products."""
    if len(call.inputs) != 2 or any(each.shape.rank != 2 for each in call.inputs):
        return None
    if call.type == "MatMul":
        return int(call.get_attr("transpose_a")), 1 - int(call.get_attr("transpose_b"))
    equation = call.get_attr("equation")
    terms, _, result = (equation.decode() if isinstance(equation, bytes) else equation).partition("->")
    kept = [[term.index(letter) for letter in term if letter in result] for term in terms.split(",")]
    return (kept[0][0], kept[1][0]) if len(result) == 2 and all(len(each) == 1 for each in kept) else None
