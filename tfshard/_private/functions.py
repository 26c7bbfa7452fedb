"""The functions in TensorFlow's context, including the functions that DTensor compiles from a step."""

import contextlib
import functools
import inspect
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as _context
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic_function
from tensorflow.python.eager.polymorphic_function import polymorphic_function as _polymorphic_function
from tensorflow.python.eager.polymorphic_function import tracing_compilation as _tracing_compilation
from tensorflow.python.framework import func_graph as _func_graph
from tensorflow.python.framework import function as _function
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import ctc_ops as _ctc_ops

from tfshard._private import patches

_known: set[str] = set()
# The new names of the bodies of each function that `give_unique_names` added again.
_added_again: dict[str, list[str]] = {}

_DTENSOR = "DTensor"

# The graphs in which a step was traced, and the graphs around them.
_graphs_with_steps: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
# The names of the functions that run a step. Function names are unique in a process.
_functions_with_steps: set[str] = set()
# The operations that call functions, and the attributes that name the functions.
_CALLS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
}
# The context in which functions with steps run.
_steps_context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
# Called after each function with steps, before its new functions are renamed.
_steps_ended: Callable[[], object] | None = None
# True if constants that give shapes are int32 in functions that DTensor compiles.
_shapes_are_int32 = False
# Operations with an argument that GPUs read in the memory of the host: its number, and the attribute of its dtype.
_SHAPES = {"BroadcastTo": (1, "Tidx"), "Reshape": (1, "Tshape"), "Transpose": (1, "Tperm")}
# Called with the inputs of each traced function before the function runs.
_check_inputs: Callable[[Sequence[Any]], object] | None = None


def give_unique_names(ended: Callable[[], object] = lambda: None) -> None:
    """Rename the loop bodies, branches and collectives that DTensor compiled since the last call, and edit shapes.

    Bodies: DTensor names a body after an operation that its compiler once had at the same memory address. (The
    OpOrArgLocNameMapper of TensorFlow's region_control_flow_to_functional.cc lives as long as its pass and forgets no
    operation.) If two compilations produce the same name, TensorFlow fails with "Cannot add function". This function
    therefore frees every name before the next compilation. Compiled functions already contain their bodies. TensorFlow
    looks the functions up again only after it has dropped the compiled functions.

    Collectives: If the name of a collective's node contains "DTensor", TensorFlow records the collective once for each
    step and never drops a record (`FillCollectiveParams` in collective_ops.cc,
    `CollectiveParamResolverLocal::instance_table_`). Clients of a launched run also ask client 0 for each record. Under
    another name, a collective has a single record, which includes its shape. A collective with a data-dependent shape
    therefore keeps its name. The caller of a renamed function is removed and added again, because the next step must
    not run the caller's old kernels (`EagerContext::RemoveFunction` drops them). The next step instantiates the
    function once more.

    Shapes: see `shapes_in_int32`.

    When TensorFlow frees the function of a step, DTensor removes the functions that it compiled from it, but not the
    renamed bodies. The next call removes them (`_remove_left`).

    Call this after each step. DTensor treats an integer or string input as a constant if it has fewer than 20 elements
    and is replicated (ExtractSmallTensorValue in its small_constant_optimization.cc, whatever made the tensor). DTensor
    compiles the step again when the value first changes. If nothing was compiled, a call takes some 10 us for each
    hundred functions.

    Args:
        ended: Returns when no compiled function is still about to start. Called only if there is something to rename.
    """
    context = _context.context()
    names = set(context.list_function_names())
    _remove_left(names)
    if names <= _known:
        _known.intersection_update(names)  # A removed function may come back.
        return
    new = {name: context.get_function_def(name) for name in names - _known}
    owners = [name for name in new if name.startswith("_func_")]
    reached = {name: _reached(name, new) for name in owners}
    bodies = {name: f"{name}_{_ops.uid()}" for name in dict.fromkeys(itertools.chain(*reached.values()))}
    # The functions that call the owners. DTensor runs one of these callers on each device.
    callers = [name for name in new if any(called.name in owners for called in _called(new[name]))]
    with_collectives = [name for name in (*bodies, *owners) if _has_dtensor_collectives(new[name])]
    with_shapes = [name for name in (*bodies, *owners) if _shapes_are_int32 and _make_shapes_int32(new[name])]
    edited = list(dict.fromkeys([*with_collectives, *with_shapes]))
    changed = [*bodies, *owners] if bodies else edited
    if edited:
        changed = [*changed, *callers]
    if changed:
        ended()
        for name in changed:
            try:
                # The context removes only functions that it was asked to add, even if it refused a duplicate.
                context.add_function_def(new[name])
            except tf.errors.InvalidArgumentError:
                pass
            while context.has_function(name):  # Twice if adding the identical function counted it again.
                context.remove_function(name)
        for name in with_collectives:
            _rename_collectives(new[name])
        for name in changed:
            for called in _called(new[name]):
                called.name = bodies.get(called.name, called.name)
            new[name].signature.name = bodies.get(name, name)
            context.add_function_def(new[name])
        _added_again.update({name: [bodies[body] for body in reached[name]] for name in owners if name in changed})
        names = set(context.list_function_names())
    _known.clear()
    _known.update(names)


def _reached(name: str, functions: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions (of `FunctionDef`s by name) that a function calls, directly or indirectly."""
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        called = [each.name for each in _called(functions[waiting.pop()]) if each.name in functions]
        waiting += [each for each in called if each not in found]
        found.update(dict.fromkeys(called))
    return list(found)


def _remove_left(names: set[str]) -> None:
    """Remove what is left of the functions that `give_unique_names` added again and DTensor has removed.

    DTensor removes a function from the library of functions alone. The context still counts it as added.

    Args:
        names: The functions that the context has. Names that are removed are taken out.
    """
    context = _context.context()
    for name in [name for name in _added_again if name not in names]:
        for each in (name, *_added_again.pop(name)):
            try:
                context.remove_function(each)
            except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
                pass
            names.discard(each)


def function_count() -> int:
    """Return how many functions TensorFlow's context holds, including the functions that DTensor compiled.

    Functions that the next step removes do not count.
    """
    names = set(_context.context().list_function_names())
    _remove_left(names)
    return len(names)


def shapes_in_int32() -> None:
    """Make the constants that give shapes int32, in functions that DTensor compiles from now on.

    DTensor makes them int64. On GPUs, TensorFlow has int64 constants in the memory of the device and int32 constants in
    the memory of the host, where its kernels read shapes. Each int64 shape is therefore copied to the host in each
    step, and the host waits for the copy.
    """
    global _shapes_are_int32
    _shapes_are_int32 = True


def give_unique_names_after(graph: tf.Graph, ended: Callable[[], object]) -> None:
    """Call `give_unique_names` after each call of the function being traced (`Context.call_function`).

    Args:
        graph: The graph of the function, or of a function inside it.
        ended: See `give_unique_names`.
    """
    _graphs_with_steps.add(graph)
    while isinstance(graph.outer_graph, _func_graph.FuncGraph):
        graph = graph.outer_graph
        _graphs_with_steps.add(graph)
    global _steps_ended
    _steps_ended = ended
    _watch_calls()
    _note_functions_with_steps()


def check_inputs(check: Callable[[Sequence[Any]], object]) -> None:
    """Call `check(inputs)`, from now on, before each traced function runs (`Context.call_function`).

    The inputs include the tensors and variables that the function captured. If `check` raises, the function does not
    run.
    """
    global _check_inputs
    _check_inputs = check
    _watch_calls()


def _watch_calls() -> None:
    """Check the inputs of traced functions, and run functions with steps in their context, from now on."""
    context = _context.context()
    if "call_function" in vars(context):
        return
    call = context.call_function

    def call_function(name: bytes, tensor_inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if _check_inputs is not None:
            _check_inputs(tensor_inputs)
        if name.decode() not in _functions_with_steps:
            return call(name, tensor_inputs, *args, **kwargs)
        with _steps_context():
            try:
                return call(name, tensor_inputs, *args, **kwargs)
            finally:
                assert _steps_ended is not None, "set when the step was traced"
                give_unique_names(_steps_ended)

    reason = "a function that runs a step holds the process's lock and waits for its devices; none reads freed buffers"
    patches.replace(context, "call_function", call_function, reason)


@functools.cache
def _note_functions_with_steps() -> None:
    """Note, from now on, each function that runs a step when TensorFlow builds the function from its graph."""
    make = _atomic_function.from_func_graph

    @functools.wraps(make)
    def make_noted(name: str | bytes, graph: Any, *args: Any, **kwargs: Any) -> Any:
        function = make(name, graph, *args, **kwargs)
        if _runs_steps(graph):
            text = name.decode() if isinstance(name, bytes) else name
            _functions_with_steps.add(text)
            weakref.finalize(function, _functions_with_steps.discard, text)
            keep_gradients_with_graphs()
        return function

    reason = "records which functions run a step"
    patches.replace(_atomic_function, "from_func_graph", make_noted, reason)


def _runs_steps(graph: Any) -> bool:
    """Return whether a graph contains a step, is the gradient of such a graph, or calls a function with a step."""
    if any(each in _graphs_with_steps for each in (graph, *_graphs_captured(graph))):
        return True
    calls = ((op, _CALLS[op.type]) for op in graph.get_operations() if op.type in _CALLS)
    return any(op.get_attr(attribute).name in _functions_with_steps for op, names in calls for attribute in names)


def _graphs_captured(graph: Any) -> set[tf.Graph]:
    """Return the graphs from which a function captures tensors. A gradient captures tensors of the forward graph."""
    found = (getattr(tensor, "graph", None) for tensor in graph.external_captures)
    return {each for each in found if each is not None}


# Operations that keep a random generator in their kernel. A new kernel would restart the generator.
_KEEPS_STATE = re.compile(r"\w+CandidateSampler|RandomShuffle|Multinomial|RandomPoissonV2|ParameterizedTruncatedNormal")


def _has_dtensor_collectives(function: Any) -> bool:
    """Return whether a function (`FunctionDef`) has collectives to rename and allows new kernels."""
    if any(_KEEPS_STATE.fullmatch(node.op) for node in function.node_def):
        return False
    return any(_is_dtensor_collective(node) for node in function.node_def)


def _is_dtensor_collective(node: Any) -> bool:
    """Return whether a node (`NodeDef`) is a collective with a static shape that TensorFlow records at each step."""
    return node.op.startswith("Collective") and _DTENSOR in node.name and _has_static_shapes(node)


def _has_static_shapes(node: Any) -> bool:
    shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
    return bool(shapes) and all(not shape.unknown_rank and all(dim.size >= 0 for dim in shape.dim) for shape in shapes)


def _rename_collectives(function: Any) -> None:
    """Replace "DTensor" in the names of a function's collectives (`FunctionDef`)."""
    taken = {node.name for node in function.node_def}
    renamed: dict[str, str] = {}
    for node in function.node_def:
        if _is_dtensor_collective(node):
            name = node.name.replace(_DTENSOR, "Mesh")
            renamed[node.name] = name if name not in taken else f"{name}_{_ops.uid()}"
            node.name = renamed[node.name]

    def output(name: str) -> str:
        """Rename a reference to an output, or with "^" to a node."""
        control, node, rest = re.fullmatch(r"(\^?)([^:]*)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
        return f"{control}{renamed.get(node, node)}{rest}"

    for node in function.node_def:
        for number, name in enumerate(node.input):
            if _DTENSOR in name:
                node.input[number] = output(name)
    for results in (function.ret, function.control_ret):
        for result, name in list(results.items()):
            results[result] = output(name)


def _make_shapes_int32(function: Any) -> bool:
    """Convert the int64 constants of a function (`FunctionDef`) that only give shapes to int32.

    Leaves constants with another use, and those that do not fit. Returns whether any changed.
    """
    constants = {
        f"{node.name}:output:0": node
        for node in function.node_def
        if node.op == "Const" and node.attr["dtype"].type == tf.int64.as_datatype_enum
    }
    uses: dict[str, list[tuple[Any, int]]] = {name: [] for name in constants}
    for node in function.node_def:
        for number, name in enumerate(node.input):
            if name in uses:
                uses[name].append((node, number))
    found = False
    for name, constant in constants.items():
        if name in function.ret.values() or any(
            node.op not in _SHAPES or _SHAPES[node.op][0] != number for node, number in uses[name]
        ):
            continue
        values = tf.make_ndarray(constant.attr["value"].tensor)
        if values.size and np.abs(values).max() > tf.int32.max:
            continue
        found = True
        constant.attr["dtype"].type = tf.int32.as_datatype_enum
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values, tf.int32))
        for node, _ in uses[name]:
            node.attr[_SHAPES[node.op][1]].type = tf.int32.as_datatype_enum
    return found


def keep_gradients_with_graphs() -> None:
    """Tie the lifetime of custom gradients (`tf.custom_gradient`) to the graphs that use them.

    TensorFlow's registry (`ops.gradient_registry`, `Registry._registry`) keeps custom gradients forever, and with them
    the graph of every step that was traced. After this call, graphs keep the custom gradients of their operations, and
    the registry finds a gradient only while one of these graphs lives.
    """
    registry = _ops.gradient_registry._registry
    for name in [
        name for name in list(registry) if name.startswith("CustomGradient-") and name not in _kept_with_graphs
    ]:
        graphs = _graphs_of(registry[name]["type"])
        if graphs:
            _kept_with_graphs.add(name)
            gradient = registry[name]["type"]
            for graph in graphs:
                graph.add_to_collection(_GRADIENTS, gradient)
            registry[name]["type"] = _Weak(gradient)
            weakref.finalize(gradient, _forget_gradient, name)


_kept_with_graphs: set[str] = set()
# The graph collection that keeps a graph's custom gradients.
_GRADIENTS = "tfshard_gradients"


class _Weak:
    """Calls a function that some other object keeps alive."""

    def __init__(self, function: Callable[..., Any]):
        self._function = weakref.ref(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._function()
        assert function is not None, "the gradient of an operation whose graph no longer exists"
        return function(*args, **kwargs)


def _forget_gradient(name: str) -> None:
    _ops.gradient_registry._registry.pop(name, None)
    _kept_with_graphs.discard(name)


def _graphs_of(gradient: Callable[..., Any]) -> list[Any]:
    """Return the graph of a custom gradient's operation and the graphs around it, which may ask for the gradient."""
    # Local variables of `custom_gradient._graph_mode_decorator`.
    tape_function = inspect.getclosurevars(gradient).nonlocals.get("tape_grad_fn")
    result = None if tape_function is None else inspect.getclosurevars(tape_function).nonlocals.get("result")
    graph = next((leaf.graph for leaf in tf.nest.flatten(result) if hasattr(leaf, "graph")), None)
    found = []
    while graph is not None:
        found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    # A graph outside of functions lives as long as the process.
    return [graph for graph in found if graph.building_function]


def _called(function: Any) -> Iterator[Any]:
    """Yield the functions that the attributes of a function's operations name (`FunctionDef`)."""
    for node in function.node_def:
        for attribute in node.attr.values():
            if attribute.func.name:
                yield attribute.func
            yield from attribute.list.func


def converted_by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that AutoGraph converts as it does where this is called (`tf.__internal__.autograph`)."""
    autograph = tf.__internal__.autograph
    converted: Callable[..., Any] = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


def run_functions_with_steps_in(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Run functions with steps in `context()` from now on, also when called as concrete functions."""
    global _steps_context
    _steps_context = context


def around_function_calls(context: Callable[[Any, Any], contextlib.AbstractContextManager[None]]) -> None:
    """Call every `tf.function` in `context(function, arguments)` from now on (`polymorphic_function.Function`)."""
    cls = _polymorphic_function.Function
    call = cls.__call__

    @functools.wraps(call)
    def call_in_context(self: Any, *args: Any, **kwds: Any) -> Any:
        with context(self, (args, kwds)):
            return call(self, *args, **kwds)

    patches.replace(cls, "__call__", call_in_context, "one thread at a time calls a function that runs a step")


class _Tracing(threading.local):
    """The locks of the functions that this thread is tracing, outermost first."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_tracing = _Tracing()


def note_function_locks() -> None:
    """Record, from now on, the locks that a thread holds while it traces a `tf.function`.

    TensorFlow traces through `tracing_compilation.trace_function` and holds the function's lock meanwhile
    (`TracingOptions.lock`).
    """
    trace = _tracing_compilation.trace_function

    @functools.wraps(trace)
    def trace_noted(args: Any = None, kwargs: Any = None, tracing_options: Any = None) -> Any:
        python_function = getattr(tracing_options, "python_function", None)
        if str(getattr(python_function, "__module__", None)).endswith(".tracing_compilation"):
            # TensorFlow's default options, which trace a function that returns None.
            raise RuntimeError(
                "A tf.function that creates a variable was called while another thread was making the first call. "
                "Call the tf.function once before other threads call it."
            )
        _tracing.locks.append(getattr(tracing_options, "lock", None))
        try:
            return trace(args, kwargs, tracing_options)
        finally:
            _tracing.locks.pop()

    reason = "records which functions a thread is tracing, so that a step can release their locks"
    patches.replace(_tracing_compilation, "trace_function", trace_noted, reason)


@contextlib.contextmanager
def function_locks_released() -> Iterator[None]:
    """Release the locks of the functions that this thread traces while the context is active.

    Other threads may then trace the same functions. If a function creates a variable in its first call, other threads
    that call it get an error until that call ends.
    """
    released = [lock for lock in dict.fromkeys(_tracing.locks) if lock is not None for _ in range(_released(lock))]
    try:
        yield
    finally:
        for lock in released:
            lock.acquire()


def _released(lock: Any) -> int:
    """Release a lock (`threading.RLock`) of this thread and return how many times the thread held it."""
    count = 0
    while True:
        try:
            lock.release()
        except RuntimeError:  # This thread does not hold it.
            return count
        count += 1


@contextlib.contextmanager
def ctc_with_unique_names() -> Iterator[None]:
    """Give the loop bodies of `tf.nn.ctc_loss` unique names inside the context (through `Defun` in `ctc_ops.function`).

    TensorFlow names the bodies by their operations and not by their shapes, but DTensor compares the shapes.
    """

    def defun(*dtypes: tf.DType) -> Callable[..., Any]:
        definer: Callable[..., Any] = _function.Defun(*dtypes, func_name=f"ctc_{_ops.uid()}")
        return definer

    _ctc_ops.function = types.SimpleNamespace(Defun=defun)
    try:
        yield
    finally:
        _ctc_ops.function = _function
