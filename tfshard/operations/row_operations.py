"""Rewrite rules of operations on one sample after the other: each device computes with its local rows (rows.py).

DTensor would replicate these operations (expansions.py), or has an expansion that gathers first.
"""

import dataclasses
from collections.abc import Callable, Iterable

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.operations import rows
from tfshard.operations.registry import rewrite_rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOperation:
    """The operands and results of an operation that have a dim for the samples.

    Attributes:
        operands: The numbers of the operands with the batch as first dim. All rows use the other operands.
        sizes: The number of an operand that holds a shape with the batch in front; None without such an operand.
        summed: True if the results are sums over all rows, such as the gradient of a kernel.
        when: Returns whether the rows of an operation are independent.
    """

    operands: tuple[int, ...] = (0,)
    sizes: int | None = None
    summed: bool = False
    when: Callable[[_private.Call], bool] = lambda call: True


def _axes_but_the_first(number: int) -> Callable[[_private.Call], bool]:
    """Return a check that the axes in operand `number` are known, and none is the batch."""

    def check(call: _private.Call) -> bool:
        axes, rank = tf.get_static_value(call.inputs[number]), call.inputs[0].shape.rank
        return axes is not None and all(int(axis) % rank != 0 for axis in axes.reshape(-1))

    return check


def _no_padding_in_front(call: _private.Call) -> bool:
    paddings = tf.get_static_value(call.inputs[1])
    return paddings is not None and not paddings[0].any()


def _ranks(least: int) -> Callable[[_private.Call], bool]:
    """Return a check that the first operand has at least this rank, and so a dim for the batch."""
    return lambda call: call.inputs[0].shape.rank >= least


def _like(names: Iterable[str], operation: RowOperation) -> dict[str, RowOperation]:
    return dict.fromkeys(names, operation)


ROW_OPERATIONS: dict[str, RowOperation] = {
    # Pooling and convolution.
    **_like(("AvgPoolGrad", "AvgPool3DGrad"), RowOperation(operands=(1,), sizes=0)),
    "DepthwiseConv2dNativeBackpropInput": RowOperation(operands=(2,), sizes=0),
    "DepthwiseConv2dNativeBackpropFilter": RowOperation(operands=(0, 2), summed=True),
    **_like(("ExtractImagePatches", "ExtractVolumePatches", "SpaceToDepth", "DepthToSpace", "LRN"), RowOperation()),
    "LRNGrad": RowOperation(operands=(0, 1, 2)),
    # Order.
    **_like(
        ("ReverseV2", "Cumprod", "CumulativeLogsumexp"), RowOperation(when=_axes_but_the_first(1))
    ),
    "Roll": RowOperation(when=_axes_but_the_first(2)),
    **_like(("MirrorPad", "MirrorPadGrad"), RowOperation(when=_no_padding_in_front)),
    "ArgMin": RowOperation(when=_axes_but_the_first(1)),
    # Matrices, one for each sample.
    **_like(
        ("MatrixBandPart", "MatrixDiagPartV3", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant",
         "Cholesky", "Qr", "Svd", "SelfAdjointEigV2", "Eig", "Lu", "MatrixLogarithm",
         "MatrixSquareRoot"),
        RowOperation(when=_ranks(3)),
    ),
    "MatrixDiagV3": RowOperation(when=_ranks(2)),
    **_like(
        ("MatrixSetDiagV3", "MatrixSolve", "MatrixTriangularSolve", "MatrixSolveLs", "BandedTriangularSolve"),
        RowOperation(operands=(0, 1), when=_ranks(3)),
    ),
    # Images.
    **_like(
        ("ResizeBicubic", "ResizeArea", "ScaleAndTranslate", "ImageProjectiveTransformV2"), RowOperation(when=_ranks(4))
    ),
    **_like(("ResizeBicubicGrad", "ScaleAndTranslateGrad"), RowOperation(operands=(0, 1), when=_ranks(4))),
    "ImageProjectiveTransformV3": RowOperation(
        operands=(0, 1), when=lambda call: call.inputs[1].shape[0] == call.inputs[0].shape[0]
    ),
    **_like(
        ("RGBToHSV", "HSVToRGB", "AdjustContrastv2", "AdjustHue", "AdjustSaturation"), RowOperation(when=_ranks(4))
    ),
    "Bucketize": RowOperation(),
}  # fmt: skip


@rewrite_rule(
    *ROW_OPERATIONS, graph=True, eager=False, gradient="registered", order=3,
    fault="refuses them, or gathers first", cases=("operation of rows",),
)  # fmt: skip
def local_rows(call: _private.Call, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Compute on each device with its local rows if no row depends on another row."""
    return by_rows(call, ROW_OPERATIONS[call.type], mesh)


def by_rows(call: _private.Call, operation: RowOperation, mesh: dtensor.Mesh) -> list[tf.Tensor] | None:
    """Compute an operation on each device's local rows; return None if its rows are replicated or not independent."""
    made_of_rows = [call.inputs[number] for number in operation.operands]
    if not all(rows.are_sharded(each, mesh) for each in made_of_rows) or not operation.when(call):
        return None
    if len({each.shape[0] for each in made_of_rows}) != 1:
        return None
    inputs = list(call.inputs)
    for number in operation.operands:
        inputs[number] = rows.to_local(inputs[number], mesh)
    if operation.sizes is not None:
        sizes = tf.get_static_value(inputs[operation.sizes])
        if sizes is None:
            return None
        inputs[operation.sizes] = tf.constant([inputs[operation.operands[0]].shape[0], *sizes[1:]], sizes.dtype)
    results = _private.same_operation(call, inputs)
    return [rows.psum(each, mesh) if operation.summed else rows.from_local(each, mesh) for each in results]
