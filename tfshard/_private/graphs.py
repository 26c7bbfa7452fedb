"""The graphs and functions that are being traced, what they take from outside, and the tapes that record."""

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

# What attributes begin with in which TensorFlow keeps what it tracks of an object (`AutoTrackable`).
TRACKING_ATTRIBUTE = "_self_"


def record_variable_access(variable: tf.Variable) -> None:
    """Tells every active gradient tape that `variable` was read (`tape.variable_accessed`)."""
    _tape.variable_accessed(variable)


def record_outside_access(variable: tf.Variable) -> None:
    """Tells gradient tapes, and the functions that are being traced, that a trainable `variable` was read, as
    TensorFlow does of its own (`resource_variable_ops.variable_accessed`). A call of such a function tells the tapes
    that are active then."""
    _resource_variable_ops.variable_accessed(variable)


def resource_without_value(shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
    """Return a resource tensor that tapes can watch as the handle of a variable; it holds no value
    (`resource_variable_ops._variable_handle_from_shape_and_dtype`)."""
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
    """Return `value`, whose gradient goes to `source`, as that of what is read from a resource goes to the resource
    (`record.record_operation`, as TensorFlow's `_read_variable_op` calls it)."""
    with stop_recording():
        if not tf.executing_eagerly():
            # Not by tf.custom_gradient, which gives the source out, too. A resource that a loop gives out has no
            # gradient.
            with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": _SOURCE_GRADIENT}):
                value, _ = tf.raw_ops.IdentityN(input=[value, source])
    _record.record_operation("ReadVariableOp", [value], [source], lambda upstream: [upstream], lambda along: [along])
    return value


def describe_resource(resource: tf.Tensor, shape: tuple[int, ...], dtype: tf.DType) -> None:
    """Tell TensorFlow the shape and dtype of what an eager resource holds, which it has to know where a gradient passes
    a loop that takes the resource (`handle_data_util`)."""
    data = _handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    _handle_data_util.set_handle_data(resource, data)


def could_record() -> bool:
    """Whether a gradient tape may record what is done now (`record.could_possibly_record`)."""
    return bool(_record.could_possibly_record())


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """A context in which no gradient tape records (`record.stop_recording`)."""
    context: contextlib.AbstractContextManager[None] = _record.stop_recording()
    return context


def is_stateful(operation: tf.Operation) -> bool:
    """Whether an operation does more than give what it computes, such as draw or write (`op_def_registry.get`).

    Not by `tf.Operation.op_def`, which makes a description for every operation that is asked: where both tracing and
    what follows it did so, the process of an EfficientNetB0 rested 300 MiB higher, for a reason that was not found
    (Python held the same objects, and malloc_trim gave no more back).
    """
    return bool((_op_def_registry.get(operation.type) or operation.op_def).is_stateful)


def graph_is_loop(graph: tf.Graph) -> bool:
    """Whether a `FuncGraph` is the condition or the body of a `tf.while_loop`."""
    return type(graph).__name__ in ("WhileCondFuncGraph", "WhileBodyFuncGraph")


def function_of_flow(graph: tf.Graph) -> tf.Graph:
    """Return the graph of the function in which a loop's condition or body, or a branch, is built; another graph as it
    is (`ControlFlowFuncGraph`)."""
    while isinstance(graph, _control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph


def graph_is_branch(graph: tf.Graph) -> bool:
    """Whether a `FuncGraph` is a branch of a `tf.cond`."""
    return type(graph).__name__ == "CondBranchFuncGraph"


def outer_graph(graph: tf.Graph) -> tf.Graph | None:
    """The graph in which a `FuncGraph` is being built, or None (`FuncGraph.outer_graph`)."""
    return getattr(graph, "outer_graph", None)


def captured(placeholder: tf.Tensor) -> tf.Tensor | None:
    """What a placeholder of a `FuncGraph` stands for in the graph around it; None for an argument (`captures`)."""
    pairs = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in pairs if inner is placeholder), None)


def captured_placeholders(graph: tf.Graph) -> set[Hashable]:
    """References to the placeholders of a `FuncGraph` that stand for tensors around it (`captures`)."""
    return {inner.ref() for _, inner in getattr(graph, "captures", ())}


def set_captures(function: tf.types.experimental.ConcreteFunction, captures: list[tf.Tensor]) -> None:
    """Gives a traced function other tensors for those that it takes from outside, in the order of its
    `captured_inputs` (`ConcreteFunction.set_external_captures`)."""
    function.set_external_captures(captures)


def element_shape(tensor_list: tf.Tensor) -> list[int] | None:
    """The shape of the elements of a list of tensors, -1 for an unknown size, None for an unknown rank
    (`handle_data_util`)."""
    data = _handle_data_util.get_resource_handle_data(tensor_list)
    if not data.is_set or len(data.shape_and_type) != 1 or data.shape_and_type[0].shape.unknown_rank:
        return None
    return [dim.size for dim in data.shape_and_type[0].shape.dim]


def function_graph(operation: tf.Operation, attribute: str) -> tf.Graph | None:
    """The graph of a function that an operation runs, by the attribute that names it (`Graph._get_function`); None for
    one of TensorFlow 1."""
    return getattr(operation.graph._get_function(operation.get_attr(attribute).name), "graph", None)


def keeps_lengths(loop: tf.Operation, number: int) -> bool:
    """Whether the body of a `tf.while_loop` gives the list of tensors with this number back as long as it gets it."""
    body = function_graph(loop, "body")
    if body is None:  # Of TensorFlow 1.
        return False
    result = body.outputs[number]
    while result.op.type == "Identity" or (
        result.op.type == "TensorListSetItem" and not result.op.get_attr("resize_if_index_out_of_bounds")
    ):
        result = result.op.inputs[0]
    return result is body.inputs[number]


@contextlib.contextmanager
def lists_with_known_elements() -> Iterator[None]:
    """A context in which a `tf.while_loop` that fills a list of tensors (`TensorListReserve` before it,
    `TensorListSetItem` in its body) gets one that knows of which shape its elements are, where only the body tells
    (`while_v2._build_while_op`).

    The loop itself may be made in a function of its own, as for a persistent tape."""
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
    if isinstance(tensor, tf.__internal__.EagerTensor):  # The loop itself is run in eager code.
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
    """A context in which the `FuncGraph` that is being built takes `bring(tensor)` for an eager tensor from outside
    (`FuncGraph.capture`), once for each. Variables' handles are left, and so are DTensors."""
    graph = tf.compat.v1.get_default_graph()
    capture = graph.capture
    # With the tensors, so that their ids stay their own.
    brought: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def bringing(tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        is_constant = isinstance(tensor, tf.__internal__.EagerTensor) and tensor.dtype not in (tf.resource, tf.variant)
        if is_constant:
            if id(tensor) not in brought:
                with tf.init_scope():
                    brought[id(tensor)] = tensor, tensor if _dtensor_api.is_dtensor(tensor) else bring(tensor)
            tensor = brought[id(tensor)][1]
        return capture(tensor, *args, **kwargs)

    graph.capture = bringing
    try:
        yield
    finally:
        del graph.capture


@contextlib.contextmanager
def captures_brought(outer: tf.Graph, bring: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """A context in which functions that are traced, and their loops and branches, take `bring(tensor)` for a tensor of
    the graph `outer` (`FuncGraph.capture`), once for each; it is made in that graph."""
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
    """A context in which a `tf.cond` is one of its branches where `value_of(predicate)` tells which (None: it cannot
    tell), and a `tf.switch_case` is made of them (`cond_v2.cond_v2` and `cond_v2.indexed_case`).

    Args:
        value_of: Tells which.
        both: Does the others: it is given the branches, and what makes a `tf.cond` of two.
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
            if number == len(branches) - 1:  # And for what is no index.
                return branches[number]()
            return tf.cond(tf.equal(index, number), branches[number], lambda: choose(number + 1))

        return tf.nest.map_structure(_as_tensor, choose(0))

    _cond_v2.cond_v2, _cond_v2.indexed_case = in_this_thread(chosen, cond), in_this_thread(nested, switch)
    try:
        yield
    finally:
        _cond_v2.cond_v2, _cond_v2.indexed_case = cond, switch


# The conditions of the branches that are being built, by their graph.
_conditions: dict[tf.Graph, tf.Tensor] = {}


def _in_branch(predicate: tf.Tensor, branch: _Branch) -> Any:
    graph = tf.compat.v1.get_default_graph()
    _conditions[graph] = predicate
    try:
        return branch()
    finally:
        del _conditions[graph]


def unknown_zero(graph: tf.Graph) -> tf.Tensor | None:
    """A zero of int32, of which TensorFlow does not know that it is one, made in the graph that is being built: in the
    body of a `tf.while_loop` (of how often it was run, the first of `FuncGraph.inputs`) or a branch of a `tf.cond`.
    None elsewhere."""
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
    """The outputs of the same operation on other inputs, added to its graph (`Graph._create_op_internal`).

    Args:
        operation: An operation.
        inputs: What it is to work on.
        dtype: Of the first of them, for an operation that gives what it takes, if it is another one than before.
        graph: To which it is added, if not to its own.
    """
    attrs = dict(operation.node_def.attr)
    dtypes = [output.dtype for output in operation.outputs]
    if dtype is not None:
        attrs["Tparams" if operation.type == "GatherV2" else "T"] = tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
        dtypes = [dtype] * len(dtypes)
    made = (graph or operation.graph)._create_op_internal(operation.type, list(inputs), dtypes, attrs=attrs)
    return list(made.outputs)


def update_input(operation: tf.Operation, number: int, tensor: tf.Tensor) -> None:
    """Gives an operation of a graph another tensor as its input (Operation._update_input)."""
    operation._update_input(number, tensor)


def operation_types(graph: tf.Graph) -> set[str]:
    """The types of operations of a graph, and of the functions that it calls."""
    definition = graph.as_graph_def()
    types = {node.op for node in definition.node}
    return types.union(node.op for function in definition.library.function for node in function.node_def)


def captured_resources(graph: tf.Graph) -> list[tf.Tensor]:
    """The eager resources, such as variables' handles, that a `FuncGraph` takes from outside (`captures`)."""
    return [
        captured
        for captured, _ in graph.captures
        if captured.dtype == tf.resource and isinstance(captured, tf.__internal__.EagerTensor)
    ]


def resource_name(handle: tf.Tensor) -> str:
    """The Keras path or the name of the variable of a handle, for an error: all objects are searched."""
    objects = gc.get_objects()
    kinds = (tf.Variable, keras.Variable)
    variables = [o for o in objects if issubclass(type(o), kinds) and getattr(o, "_handle", None) is handle]
    owners = [o for o in objects if issubclass(type(o), keras.Variable) and any(o._value is v for v in variables)]
    names = [owner.path for owner in owners] or [variable.name for variable in variables]
    return f"'{names[0]}'" if names else "a resource without a name"


def traced_arguments() -> list[tf.Tensor | np.ndarray]:
    """The eager tensors and arrays with which the outermost tf.function that is being traced was called
    (`PolymorphicFunction.__call__` among the callers)."""
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
    """Whether a function of a module, or of one below it, is among the callers."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(module):
        frame = frame.f_back
    return frame is not None


def func_graph(name: str) -> tf.Graph:
    """A graph that takes eager tensors in as constants of its own (`tf.__internal__.FuncGraph`)."""
    return tf.__internal__.FuncGraph(name)


def run_when_used(names: Iterable[str]) -> None:
    """From now on a `tf.function` runs operations of these types where their results are used, and in any order, as it
    does with their first versions (`auto_control_deps.ASYNC_STATEFUL_OPS`). It looks when a trace has ended, so this is
    for all that is traced later, in the whole process.

    Else it would run them in the order in which they were added to the graph, also against that of their operands.
    """
    reason = "collectives run where their results are used"
    found = _auto_control_deps.ASYNC_STATEFUL_OPS | frozenset(names)
    patches.replace(_auto_control_deps, "ASYNC_STATEFUL_OPS", found, reason)


def run_bodies_apart() -> None:
    """Have loops and branches that are traced from now on run as operations of their own, in the whole process.

    TensorFlow otherwise lowers a loop or branch into the graph around it
    (`control_flow_util_v2.maybe_set_lowering_attr`). An operation of its body then waits for its operands only, and not
    for what the loop or branch itself waits for.
    """

    def set_if_told(operation: tf.Operation, lower_using_switch_merge: bool | None = None) -> None:
        if lower_using_switch_merge is not None:
            _lower(operation, lower_using_switch_merge)

    reason = "loops and branches wait for the operations before them"
    patches.replace(_control_flow_util_v2, "maybe_set_lowering_attr", set_if_told, reason)


_lower = _control_flow_util_v2.maybe_set_lowering_attr
