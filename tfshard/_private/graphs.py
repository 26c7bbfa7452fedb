"""Graphs and functions during tracing, their captures, and gradient tapes."""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from tensorflow.dtensor.python import api as _dtensor_api
from tensorflow.python.eager import record as _record
from tensorflow.python.eager import tape as _tape
from tensorflow.python.framework import auto_control_deps as _auto_control_deps
from tensorflow.python.framework import op_def_registry as _op_def_registry
from tensorflow.python.ops import cond_v2 as _cond_v2
from tensorflow.python.ops import control_flow_util_v2 as _control_flow_util_v2
from tensorflow.python.ops import control_flow_v2_func_graphs as _control_flow_v2_func_graphs
from tensorflow.python.ops import handle_data_util as _handle_data_util
from tensorflow.python.ops import resource_variable_ops as _resource_variable_ops
from tensorflow.python.ops import while_v2 as _while_v2

from tfshard._private import patches
from tfshard._private.threads import in_this_thread

# The prefix of the attributes in which TensorFlow keeps an object's tracked dependencies (`AutoTrackable`).
TRACKING_ATTRIBUTE = "_self_"


def record_variable_access(variable: tf.Variable) -> None:
    """Tell every active gradient tape that `variable` was read (`tape.variable_accessed`)."""
    _tape.variable_accessed(variable)


def record_outside_access(variable: tf.Variable) -> None:
    """Tell gradient tapes and functions being traced that a trainable `variable` was read.

    TensorFlow does this for its variables (`resource_variable_ops.variable_accessed`). A later call of the traced
    function tells the tapes that are active then.
    """
    _resource_variable_ops.variable_accessed(variable)


def resource_without_value(shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
    """Return a resource tensor without a value that tapes can watch like a variable's handle.

    Uses `resource_variable_ops._variable_handle_from_shape_and_dtype`.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return _resource_variable_ops._variable_handle_from_shape_and_dtype(
            shape, dtype, shared_name=None, name="watched/", graph_mode=False
        )


_SOURCE_GRADIENT = "TfshardGradientToSource"


@tf.RegisterGradient(_SOURCE_GRADIENT)  # type: ignore[untyped-decorator]  # TensorFlow has no types.
def _gradient_to_source(operation: tf.Operation, upstream: tf.Tensor, _: object) -> tuple[None, tf.Tensor]:
    del operation
    return None, upstream


def with_gradient_to(source: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Return `value` with its gradient redirected to `source`, as if `value` had been read from a resource `source`.

    Calls `record.record_operation` as TensorFlow's `_read_variable_op` does.
    """
    with stop_recording():
        if not tf.executing_eagerly():
            # tf.custom_gradient would also return the source, and a resource that a loop returns has no gradient.
            with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": _SOURCE_GRADIENT}):
                value, _ = tf.raw_ops.IdentityN(input=[value, source])
    _record.record_operation("ReadVariableOp", [value], [source], lambda upstream: [upstream], lambda along: [along])
    return value


def describe_resource(resource: tf.Tensor, shape: tuple[int, ...], dtype: tf.DType) -> None:
    """Tell TensorFlow the shape and dtype of an eager resource's value (`handle_data_util`).

    TensorFlow needs both when a gradient passes a loop that takes the resource.
    """
    data = _handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    _handle_data_util.set_handle_data(resource, data)


def could_record() -> bool:
    """Return whether a gradient tape may be recording (`record.could_possibly_record`)."""
    return bool(_record.could_possibly_record())


def is_recorded(tensor: tf.Tensor) -> bool:
    """Return whether a gradient tape records operations on a tensor (`record.should_record_backprop`)."""
    return bool(_record.should_record_backprop([tensor]))


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """Stop all gradient tapes from recording inside the context (`record.stop_recording`)."""
    context: contextlib.AbstractContextManager[None] = _record.stop_recording()
    return context


def with_gradient(
    function: Callable[..., tuple[list[tf.Tensor], Callable[..., list[tf.Tensor | None]]]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Call a function with a custom gradient, as `tf.custom_gradient` does, for gradient tapes only.

    `tf.custom_gradient` adds an operation that takes all tensors. This function adds none, so that tensors that the
    function does not use need not be computed (`record.record_operation`).

    Args:
        function: Returns its results, and a function of their gradients that returns the gradients of `tensors`.
        tensors: The arguments.
    """
    with stop_recording():
        results, gradient = function(*tensors)
    _record.record_operation(getattr(function, "__name__", "function"), results, list(tensors), gradient)
    return results


def is_stateful(operation: tf.Operation) -> bool:
    """Return whether an operation has side effects, such as drawing random numbers or writing (`op_def_registry.get`).

    `tf.Operation.op_def` is avoided because it makes a description for every operation. When both tracing and the code
    after it used `tf.Operation.op_def`, the process of an EfficientNetB0 kept 300 MiB more. The cause is unknown:
    Python held the same objects, and malloc_trim returned no memory.
    """
    return bool((_op_def_registry.get(operation.type) or operation.op_def).is_stateful)


def graph_is_loop(graph: tf.Graph) -> bool:
    """Return whether a `FuncGraph` is the condition or the body of a `tf.while_loop`."""
    return type(graph).__name__ in ("WhileCondFuncGraph", "WhileBodyFuncGraph")


def function_of_flow(graph: tf.Graph) -> tf.Graph:
    """Return the graph of the function that contains a loop's or branch's graph (`ControlFlowFuncGraph`).

    Returns any other graph unchanged.
    """
    while isinstance(graph, _control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def graph_is_branch(graph: tf.Graph) -> bool:
    """Return whether a `FuncGraph` is a branch of a `tf.cond`."""
    return type(graph).__name__ == "CondBranchFuncGraph"


def outer_graph(graph: tf.Graph) -> tf.Graph | None:
    """Return the graph in which a `FuncGraph` is being built, or None (`FuncGraph.outer_graph`)."""
    return getattr(graph, "outer_graph", None)


def captured(placeholder: tf.Tensor) -> tf.Tensor | None:
    """Return the outer tensor that a `FuncGraph` placeholder captures, or None for an argument (`captures`)."""
    pairs = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in pairs if inner is placeholder), None)


def branch_results(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return what the branches of a `tf.cond` give for its result (`If._true_graph` and `_false_graph`)."""
    graphs = (getattr(tensor.op, name, None) for name in ("_true_graph", "_false_graph"))
    return [graph.outputs[tensor.value_index] for graph in graphs if graph is not None]


def captured_placeholders(graph: tf.Graph) -> set[Hashable]:
    """Return references to the `FuncGraph` placeholders that capture outer tensors (`captures`)."""
    return {inner.ref() for _, inner in getattr(graph, "captures", ())}


def set_captures(function: tf.types.experimental.ConcreteFunction, captures: list[tf.Tensor]) -> None:
    """Replace a traced function's captured tensors, in the order of its `captured_inputs`.

    Uses `ConcreteFunction.set_external_captures`.
    """
    function.set_external_captures(captures)


def element_shape(tensor_list: tf.Tensor) -> list[int] | None:
    """Return the shape of a tensor list's elements: -1 for an unknown size, None for an unknown rank
    (`handle_data_util`)."""
    data = _handle_data_util.get_resource_handle_data(tensor_list)
    if not data.is_set or len(data.shape_and_type) != 1 or data.shape_and_type[0].shape.unknown_rank:
        return None
    return [dim.size for dim in data.shape_and_type[0].shape.dim]


def function_graph(operation: tf.Operation, attribute: str) -> tf.Graph | None:
    """Return the graph of the function that an operation's attribute names (`Graph._get_function`).

    Returns None for a function from TensorFlow 1.
    """
    return getattr(operation.graph._get_function(operation.get_attr(attribute).name), "graph", None)


def called_function(operation: tf.Operation) -> str | None:
    """Return the name of the function that an operation calls; None for other operations."""
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    name: str = operation.get_attr("f").name
    return name


def calls_functions(operation: tf.Operation) -> bool:
    """Return whether an operation calls functions, such as the body of a loop or the branches of a condition."""
    return any(each.HasField("func") or each.list.func for each in operation.node_def.attr.values())


def keeps_lengths(loop: tf.Operation, number: int) -> bool:
    """Return whether a `tf.while_loop` body returns the numbered tensor list with the length it received."""
    body = function_graph(loop, "body")
    if body is None:  # A function from TensorFlow 1.
        return False
    result = body.outputs[number]
    while result.op.type == "Identity" or (
        result.op.type == "TensorListSetItem" and not result.op.get_attr("resize_if_index_out_of_bounds")
    ):
        result = result.op.inputs[0]
    return result is body.inputs[number]


@contextlib.contextmanager
def lists_with_known_elements() -> Iterator[None]:
    """Give the tensor lists that a `tf.while_loop` fills a static element shape (`while_v2._build_while_op`).

    This applies to a list from `TensorListReserve` before the loop that the body fills by `TensorListSetItem`, if only
    the body knows the shape of the elements. The loop may be built in a separate function, as for a persistent tape.
    """
    build = _while_v2._build_while_op

    def knowing(
        loop_vars: Sequence[tf.Tensor], cond_graph: tf.Graph, body_graph: Any, *args: Any, **kwargs: Any
    ) -> Any:
        known = [_with_known_elements(*each) for each in zip(loop_vars, body_graph.outputs, strict=True)]
        return build(known, cond_graph, body_graph, *args, **kwargs)

    _while_v2._build_while_op = in_this_thread(knowing, build)
    try:
        yield
    finally:
        _while_v2._build_while_op = build


def _with_known_elements(tensor: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    if isinstance(tensor, tf.__internal__.EagerTensor):  # The loop runs in eager code.
        return tensor
    if tensor.op.type != "TensorListReserve" or result.op.type != "TensorListSetItem":
        return tensor
    given, count = tensor.op.inputs
    shape, dtype = result.op.inputs[2].shape, result.op.inputs[2].dtype
    if given.shape.rank != 0 or not shape.is_fully_defined():
        return tensor
    element_shape = tf.constant(shape.as_list(), tf.int32)
    return tf.raw_ops.TensorListReserve(element_shape=element_shape, num_elements=count, element_dtype=dtype)


@contextlib.contextmanager
def constants_brought(bring: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Replace each eager tensor that the current `FuncGraph` captures by `bring(tensor)` (`FuncGraph.capture`).

    Calls `bring` once for each tensor. Variable handles and DTensors are captured unchanged. A graph also makes a
    constant of a small tensor (`EagerTensor._capture_as_const`). It takes the value from the given tensor: on a mesh
    without local devices, the brought one has none.
    """
    graph = tf.compat.v1.get_default_graph()
    capture = graph.capture
    # Keeps the tensors alive, because a freed tensor's id may be reused.
    brought: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def bringing(tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        is_constant = isinstance(tensor, tf.__internal__.EagerTensor) and tensor.dtype not in (tf.resource, tf.variant)
        if is_constant:
            if id(tensor) not in brought:
                with tf.init_scope():
                    brought[id(tensor)] = tensor, tensor
                    if not _dtensor_api.is_dtensor(tensor):
                        made = bring(tensor)
                        made._capture_as_const = tensor._capture_as_const
                        brought[id(tensor)] = tensor, made
            tensor = brought[id(tensor)][1]
        return capture(tensor, *args, **kwargs)

    graph.capture = bringing
    try:
        yield
    finally:
        del graph.capture


@contextlib.contextmanager
def captures_brought(outer: tf.Graph, bring: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Make traced functions, loops and branches capture `bring(tensor)` for a tensor of the graph `outer`.

    Changes `FuncGraph.capture`. Calls `bring` once for each tensor, inside the graph `outer`.
    """
    function_graph = tf.__internal__.FuncGraph
    capture = function_graph.capture
    brought: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def bringing(graph: tf.Graph, tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        if graph is not outer and not isinstance(tensor, tf.__internal__.EagerTensor) and tensor.graph is outer:
            if id(tensor) not in brought:
                with outer.as_default():
                    brought[id(tensor)] = tensor, bring(tensor)
            tensor = brought[id(tensor)][1]
        return capture(graph, tensor, *args, **kwargs)

    function_graph.capture = bringing
    try:
        yield
    finally:
        function_graph.capture = capture


_Branch: TypeAlias = Callable[[], Any]
Both: TypeAlias = Callable[[tuple[_Branch, _Branch], Callable[[_Branch, _Branch], Any]], Any]


@contextlib.contextmanager
def known_branches(value_of: Callable[[tf.Tensor], Any], both: Both) -> Iterator[None]:
    """Build only the taken branch of a `tf.cond` if its predicate is known, and a `tf.switch_case` from such
    conditions.

    Changes `cond_v2.cond_v2` and `cond_v2.indexed_case`.

    Args:
        value_of: Returns a predicate's value, or None if the value is unknown.
        both: Builds a `tf.cond` with an unknown predicate. Receives the two branches and a function that makes a
            `tf.cond` of two branches.
    """
    cond, switch = _cond_v2.cond_v2, _cond_v2.indexed_case

    def chosen(
        predicate: tf.Tensor, true_fn: Callable[[], Any], false_fn: Callable[[], Any], name: str = "cond"
    ) -> Any:
        value = value_of(predicate)
        if value is None:
            true_fn, false_fn = (functools.partial(_in_branch, predicate, each) for each in (true_fn, false_fn))
            return both((true_fn, false_fn), lambda one, other: cond(predicate, one, other, name))
        return tf.nest.map_structure(_as_tensor, true_fn() if value else false_fn())

    def nested(index: tf.Tensor, branches: Sequence[Callable[[], Any]], *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        index = tf.convert_to_tensor(index)

        def choose(number: int) -> Any:
            if number == len(branches) - 1:  # Also for an index out of range.
                return branches[number]()
            return tf.cond(tf.equal(index, number), branches[number], lambda: choose(number + 1))

        return tf.nest.map_structure(_as_tensor, choose(0))

    _cond_v2.cond_v2, _cond_v2.indexed_case = in_this_thread(chosen, cond), in_this_thread(nested, switch)
    try:
        yield
    finally:
        _cond_v2.cond_v2, _cond_v2.indexed_case = cond, switch


# The predicates of the branches that are being built, by the branch's graph.
_conditions: dict[tf.Graph, tf.Tensor] = {}


def _in_branch(predicate: tf.Tensor, branch: _Branch) -> Any:
    graph = tf.compat.v1.get_default_graph()
    _conditions[graph] = predicate
    try:
        return branch()
    finally:
        del _conditions[graph]


def unknown_zero(graph: tf.Graph) -> tf.Tensor | None:
    """Return an int32 zero that TensorFlow cannot fold to a constant, in the graph being built.

    The zero derives from the iteration count in a `tf.while_loop` body (the first of `FuncGraph.inputs`), or from the
    predicate in a `tf.cond` branch. Returns None in any other graph.
    """
    if type(graph).__name__ == "WhileBodyFuncGraph":
        return tf.minimum(graph.inputs[0], 0)
    if graph in _conditions:
        return tf.minimum(tf.cast(tf.cast(_conditions[graph], tf.bool), tf.int32), 0)
    return None


def _as_tensor(value: Any) -> Any:
    is_one = value is None or isinstance(value, (tf.__internal__.CompositeTensor, tf.TensorArray, tf.Operation))
    return value if is_one else tf.convert_to_tensor(value)


def copied(
    operation: tf.Operation,
    inputs: Sequence[tf.Tensor],
    *,
    dtype: tf.DType | None = None,
    graph: tf.Graph | None = None,
) -> list[tf.Tensor]:
    """Copy an operation to a graph with other inputs and return its outputs (`Graph._create_op_internal`).

    Functions that the operation calls go with it (`Graph._add_function_recursive`).

    Args:
        operation: The operation to copy.
        inputs: The inputs of the copy.
        dtype: The dtype of the first input, if it differs. Only for operations that return their input's dtype.
        graph: The graph to add the copy to. Default: the operation's graph.
    """
    attrs = dict(operation.node_def.attr)
    dtypes = [output.dtype for output in operation.outputs]
    if dtype is not None:
        attrs["Tparams" if operation.type == "GatherV2" else "T"] = tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
        dtypes = [dtype] * len(dtypes)
    if graph is not None and graph is not operation.graph:
        for attr in attrs.values():
            if attr.HasField("func"):
                graph._add_function_recursive(operation.graph._get_function(attr.func.name))
    made = (graph or operation.graph)._create_op_internal(operation.type, list(inputs), dtypes, attrs=attrs)
    return list(made.outputs)


@contextlib.contextmanager
def marked(name: str) -> Iterator[None]:
    """Give the operations that are added to the current graph an attribute, which copies keep (`Graph._attr_scope`).

    Args:
        name: The attribute. It begins with an underscore: no kernel knows it.
    """
    with tf.compat.v1.get_default_graph()._attr_scope({name: tf.compat.v1.AttrValue(b=True)}):
        yield


def has_mark(operation: tf.Operation, name: str) -> bool:
    """Return whether an operation, or the operation that it is a copy of, was added in `marked`."""
    return name in operation.node_def.attr


def update_input(operation: tf.Operation, number: int, tensor: tf.Tensor) -> None:
    """Replace an input of a graph's operation (Operation._update_input)."""
    operation._update_input(number, tensor)


def operation_types(graph: tf.Graph) -> set[str]:
    """Return the types of the operations of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    types = {node.op for node in definition.node}
    return types.union(node.op for function in definition.library.function for node in function.node_def)


def captured_resources(graph: tf.Graph) -> list[tf.Tensor]:
    """Return the eager resources that a `FuncGraph` captures, such as variable handles (`captures`)."""
    return [
        captured
        for captured, _ in graph.captures
        if captured.dtype == tf.resource and isinstance(captured, tf.__internal__.EagerTensor)
    ]


def resource_name(handle: tf.Tensor) -> str:
    """Return the Keras path or the name of a handle's variable, for an error message. Searches all live objects."""
    # Converted by AutoGraph, the search would raise UnboundLocalError: AutoGraph's placeholders are among the objects.
    name: str = tf.autograph.experimental.do_not_convert(_resource_name)(handle)
    return name


def _resource_name(handle: tf.Tensor) -> str:
    objects = gc.get_objects()
    kinds = (tf.Variable, keras.Variable)
    variables = [o for o in objects if issubclass(type(o), kinds) and getattr(o, "_handle", None) is handle]
    owners = [o for o in objects if issubclass(type(o), keras.Variable) and any(o._value is v for v in variables)]
    names = [owner.path for owner in owners] or [variable.name for variable in variables]
    return f"'{names[0]}'" if names else "a resource without a name"


def traced_arguments() -> list[tf.Tensor | np.ndarray]:
    """Return the eager tensors and arrays passed to the outermost tf.function that is being traced.

    Looks for `PolymorphicFunction.__call__` among the callers.
    """
    found: list[tf.Tensor | np.ndarray] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        function = frame.f_locals.get("self") if frame.f_code.co_name == "__call__" else None
        if isinstance(function, tf.types.experimental.Callable):
            arguments = frame.f_locals.get("args", ()), frame.f_locals.get("kwds", {})
            kinds = (tf.__internal__.EagerTensor, np.ndarray)
            found = [each for each in tf.nest.flatten(arguments) if isinstance(each, kinds)]
        frame = frame.f_back
    return found


def is_called_by(module: str) -> bool:
    """Return whether a function of `module` or of its submodules is among the callers."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(module):
        frame = frame.f_back
    return frame is not None


def func_graph(name: str) -> tf.Graph:
    """Return a graph that captures eager tensors as constants (`tf.__internal__.FuncGraph`)."""
    return tf.__internal__.FuncGraph(name)


def run_when_used(names: Iterable[str]) -> None:
    """Make every `tf.function` traced from now on run operations of these types by data dependency only.

    TensorFlow treats the first versions of these operations this way (`auto_control_deps.ASYNC_STATEFUL_OPS`). It reads
    the set at the end of a trace, so the change applies to all later traces in the process. Otherwise TensorFlow runs
    the operations in the order in which they were added to the graph, even if that contradicts their operands' order.
    """
    reason = "collectives run where their results are used"
    found = _auto_control_deps.ASYNC_STATEFUL_OPS | frozenset(names)
    patches.replace(_auto_control_deps, "ASYNC_STATEFUL_OPS", found, reason)


def run_bodies_apart() -> None:
    """Make loops and branches that are traced from now on run as single operations, throughout the process.

    TensorFlow otherwise lowers a loop or branch into the graph around it
    (`control_flow_util_v2.maybe_set_lowering_attr`). An operation of the body then waits only for its operands, and not
    for the control inputs of the loop or branch.
    """

    def set_if_told(operation: tf.Operation, lower_using_switch_merge: bool | None = None) -> None:
        if lower_using_switch_merge is not None:
            _lower(operation, lower_using_switch_merge)

    reason = "loops and branches wait for the operations before them"
    patches.replace(_control_flow_util_v2, "maybe_set_lowering_attr", set_if_told, reason)


_lower = _control_flow_util_v2.maybe_set_lowering_attr
