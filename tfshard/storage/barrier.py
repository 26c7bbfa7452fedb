"""Barriers: order operations of a step that no data connects.

An optimization barrier is one `IdentityN`: its outputs become available only when all inputs are. This module makes the
barriers of all steps; `planning` adds others to the graphs that it traces for estimates. Elsewhere an `IdentityN`
belongs to a custom gradient.

# Note: why a barrier looks the way it does

Four compilers rewrite a step's graph after tfshard. Three may drop or cross an order, and one miscomputes around a
barrier:

- **DTensor** merges all-reduces, and then sorts all operations by their operands only
  (dtensor_allreduce_combine_optimization.cc). Control edges do not survive, and a read, which has no operand but its
  handle, may move in front of a write. Therefore operands express the order. The handle of a read that follows a write
  goes through a barrier with the value that is written (`write_then_read`).
- **MLIR** removes an output of an `IdentityN` that nothing uses, together with its input. Therefore every output is
  used.
- **Grappler** removes an `IdentityN` unless its first input is the read of a variable
  (`DependencyOptimizer::SafeToRemoveIdentity`), and prunes outputs that lead to no result (ModelPruner). Therefore the
  first input is a read of the tensor's variable, or of the *token*. The token is a variable with one number, always
  zero. A step sums the tokens that went through its barriers, and assigns the sum to the token's variable at its end.
- **oneDNN** computes the gradients by a convolution's kernel and by its bias in one operation, if both take outputs of
  one operation, even different outputs (mkl_layout_pass.cc). The results are then silently wrong. Therefore no barrier
  gives outputs to both, and callers leave gradients of convolutions alone.

By itself, a barrier copies nothing and changes no number. It also keeps TensorFlow from fusing the operations before
and behind it, and from merging equal operations on its two sides.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import transfer
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes
from tfshard.storage.graph_edits import OpInput

# A tensor, and the inputs of operations to connect to the tied tensor.
Held: TypeAlias = tuple[tf.Tensor, Sequence[OpInput]]


def tie(read: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """Return tied tensors, the read first, which become available only when all are. The caller must use every output.

    Args:
        read: The read of a variable.
        *tensors: Other tensors of the same graph.
    """
    tied: list[tf.Tensor] = tf.raw_ops.IdentityN(input=[read, *tensors])
    return tied


def hold(read: tf.Tensor, *held: Held) -> list[tf.Tensor]:
    """Put tensors behind one barrier, and give each output to the tensor's consumers. Return all outputs, the read
    first."""
    tied = tie(read, *(tensor for tensor, _ in held))
    for (_, inputs), tensor in zip(held, tied[1:], strict=True):
        for each in inputs:
            each.replace(tensor)
    return tied


def write_then_read(variable: dtensor.DVariable, value: tf.Tensor) -> tf.Tensor:
    """Assign a variable, and return a read that stays behind the assignment."""
    handle, value = tf.raw_ops.IdentityN(input=[variable.handle, value])
    written = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
    with tf.control_dependencies([written]):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Barrier:
    """Makes the barriers of one step. The token is the first input of each barrier.

    Attributes:
        read_token: Reads the token.
        tokens: The tokens that went through barriers. The step must use each of them.
    """

    read_token: Callable[[], tf.Tensor]
    tokens: list[tf.Tensor] = dataclasses.field(default_factory=list)

    @classmethod
    def on(cls, mesh: dtensor.Mesh, tokens: list[tf.Tensor]) -> "Barrier":
        """Return the maker of barriers of a step on a mesh."""
        return cls(read_token=lambda: read_token(mesh), tokens=tokens)

    def tie(self, *tensors: tf.Tensor, read: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Return tied tensors, which become available only when all are. The caller must use every output.

        Args:
            *tensors: Tensors of the same graph.
            read: A token that was read already.
        """
        token, *tied = tie(self.read_token() if read is None else read, *tensors)
        self.tokens.append(token)
        return tied

    def hold(self, *held: Held) -> list[tf.Tensor]:
        """Put tensors behind one barrier, give each output to the tensor's consumers, and return the outputs."""
        token, *tied = hold(self.read_token(), *held)
        self.tokens.append(token)
        return tied


def read_token(mesh: dtensor.Mesh, axes: Axes = ()) -> tf.Tensor:
    """Return a read of the token of a mesh.

    `DVariable.value` would tell gradient tapes and custom gradients that the step uses a variable.
    """
    return tf.raw_ops.ReadVariableOp(resource=_token(mesh, axes).handle, dtype=tf.float32)


def use(mesh: dtensor.Mesh, tokens: Sequence[tf.Tensor], axes: Axes = ()) -> None:
    """Assign the sum of tokens to the token of a mesh, so that no compiler drops their barriers.

    Args:
        mesh: The mesh.
        tokens: Numbers, or vectors of one number for each shard over `axes`.
        axes: The layout of the tokens.
    """
    _token(mesh, axes).assign(tf.add_n(list(tokens)), read_value=False)


_tokens: dict[tuple[str, Axes], dtensor.DVariable] = {}


def _token(mesh: dtensor.Mesh, axes: Axes) -> dtensor.DVariable:
    key = mesh.to_string(), axes
    if key not in _tokens:
        shape = [axis_sizes(mesh)[axis] for axis in axes if axis is not None]
        with tf.init_scope():
            _tokens[key] = dtensor.DVariable(transfer.host_to_mesh(np.zeros(shape, np.float32), axes, mesh))
    return _tokens[key]
