"""Find the kernel that TensorFlow takes for a node on a GPU, and which of the node's tensors are in host memory.

TensorFlow's wheel for CUDA registers its GPU kernels on every machine (`tensorflow.python.framework.kernels`).
"""

import dataclasses
import functools
from collections.abc import Iterable

from tensorflow.core.framework import kernel_def_pb2, node_def_pb2, op_def_pb2, types_pb2
from tensorflow.python.framework import kernels, op_def_registry

# The dtypes that TensorFlow 2.21 passes to NCCL (ToNcclType in nccl_manager.cc; the mask 0x8020e in its binary).
NCCL_DTYPES = frozenset({"float16", "float32", "float64", "int32", "int64"})
# Handles are in host memory, even if their values are not.
_HANDLES = (types_pb2.DT_STRING, types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT)
# A function keeps its int32 arguments and results in host memory (FunctionArgHasHostMemory in function.cc).
_ON_HOST_IN_CALLS = (*_HANDLES, types_pb2.DT_INT32)
# Nodes that run other functions, or stand for the arguments of one.
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf"})
ARGUMENTS = frozenset({"Placeholder", "_Arg", "_Retval"})
# Nodes that launch no kernel on the device.
_NO_LAUNCH = ARGUMENTS | {
    "AssignVariableOp", "Bitcast", "Const", "EnsureShape", "ExpandDims", "Identity", "IdentityN", "NoOp",
    "PreventGradient", "ReadVariableOp", "Reshape", "Shape", "Squeeze", "StopGradient", "VarHandleOp",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An input or output of a node.

    Attributes:
        name: The name of the operation's argument.
        dtype: The name of the dtype, such as `"float32"`.
        on_host: True if the tensor is in host memory when the node runs on a GPU.
    """

    name: str
    dtype: str
    on_host: bool


@dataclasses.dataclass(frozen=True)
class Placed:
    """A node on a GPU.

    Attributes:
        has_kernel: False if TensorFlow has no GPU kernel for the node's dtypes. The node then runs on the host.
        inputs: The inputs.
        outputs: The outputs.
    """

    has_kernel: bool
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def launches(self) -> bool:
        """True if the node computes on the GPU."""
        return self.has_kernel and any(not tensor.on_host for tensor in self.outputs)


def place(node: node_def_pb2.NodeDef) -> Placed:
    """Return how TensorFlow places a node on a GPU.

    Raises:
        LookupError: TensorFlow does not know the operation.
    """
    definition = op_def_registry.get(node.op)
    if definition is None:
        raise LookupError(f"TensorFlow does not know the operation. Received: {node.op} '{node.name}'")
    if node.op in CALLS or node.op in ARGUMENTS:
        return Placed(
            True, _tensors(node, definition.input_arg, None), _tensors(node, definition.output_arg, None)
        )  # fmt: skip
    kernel = _kernel(node)
    on_host = frozenset(kernel.host_memory_arg) if kernel is not None else _every_argument(definition)
    return Placed(
        kernel is not None,
        _tensors(node, definition.input_arg, on_host),
        _tensors(node, definition.output_arg, on_host),
    )


def launches_nothing(node: node_def_pb2.NodeDef) -> bool:
    """Return whether a node only names, reads or passes on a tensor."""
    return node.op in _NO_LAUNCH or node.op in CALLS


def dtypes(node: node_def_pb2.NodeDef) -> tuple[str, ...]:
    """Return the names of the node's dtypes."""
    given = (value for name, value in sorted(node.attr.items()) if not name.startswith("_"))
    return tuple(_name(value.type) for value in given if value.WhichOneof("value") == "type")


def _kernel(node: node_def_pb2.NodeDef) -> kernel_def_pb2.KernelDef | None:
    label = node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""
    for device_type in ("GPU", "DEFAULT"):
        found = [
            each
            for each in _registered(node.op)
            if each.device_type == device_type and each.label == label and _accepts(each, node)
        ]
        if found:
            return max(found, key=lambda each: each.priority)
    return None


@functools.cache
def _registered(op: str) -> tuple[kernel_def_pb2.KernelDef, ...]:
    return tuple(kernels.get_registered_kernels_for_op(op).kernel)


def _accepts(kernel: kernel_def_pb2.KernelDef, node: node_def_pb2.NodeDef) -> bool:
    for constraint in kernel.constraint:
        if constraint.name not in node.attr:
            return False
        value = node.attr[constraint.name]
        given = [value.type] if value.WhichOneof("value") == "type" else value.list.type
        if not set(given) <= set(constraint.allowed_values.list.type):
            return False
    return True


def _every_argument(definition: op_def_pb2.OpDef) -> frozenset[str]:
    return frozenset(each.name for each in (*definition.input_arg, *definition.output_arg))


def _tensors(
    node: node_def_pb2.NodeDef, arguments: Iterable[op_def_pb2.OpDef.ArgDef], on_host: frozenset[str] | None
) -> tuple[Tensor, ...]:
    """Return the tensors of a node's arguments. `on_host`: the arguments in host memory; None for those of a call."""
    found = []
    for argument in arguments:
        for dtype in _types(node, argument):
            if on_host is None:
                is_on_host = dtype in _ON_HOST_IN_CALLS
            else:
                is_on_host = argument.name in on_host or dtype in _HANDLES
            found.append(Tensor(argument.name, _name(dtype), is_on_host))
    return tuple(found)


def _types(node: node_def_pb2.NodeDef, argument: op_def_pb2.OpDef.ArgDef) -> list[int]:
    if argument.type_list_attr:
        return list(node.attr[argument.type_list_attr].list.type)
    count = node.attr[argument.number_attr].i if argument.number_attr else 1
    return [node.attr[argument.type_attr].type if argument.type_attr else argument.type] * count


def _name(dtype: int) -> str:
    name = types_pb2.DataType.Name(dtype).removeprefix("DT_").lower()
    return {"half": "float16", "float": "float32", "double": "float64"}.get(name, name)
