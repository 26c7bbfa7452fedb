"""The graphs and functions that are being traced, what they take from outside, and the tapes that record."""

import contextlib
import gc
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import record as _record
from tensorflow.python.eager import tape as _tape

# What attributes begin with in which TensorFlow keeps what it tracks of an object (`AutoTrackable`).
TRACKING_ATTRIBUTE = "_self_"


def record_variable_access(variable: tf.Variable) -> None:
    """Tells every active gradient tape that `variable` was read (`tape.variable_accessed`)."""
    _tape.variable_accessed(variable)


def stop_recording() -> contextlib.AbstractContextManager[None]:
    """A context in which no gradient tape records (`record.stop_recording`)."""
    context: contextlib.AbstractContextManager[None] = _record.stop_recording()
    return context


def graph_is_loop(graph: tf.Graph) -> bool:
    """Whether a `FuncGraph` is the condition or the body of a `tf.while_loop`."""
    return type(graph).__name__ in ("WhileCondFuncGraph", "WhileBodyFuncGraph")


def outer_graph(graph: tf.Graph) -> tf.Graph | None:
    """The graph in which a `FuncGraph` is being built, or None (`FuncGraph.outer_graph`)."""
    return getattr(graph, "outer_graph", None)


def captured(placeholder: tf.Tensor) -> tf.Tensor | None:
    """What a placeholder of a `FuncGraph` stands for in the graph around it; None for an argument (`captures`)."""
    pairs = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in pairs if inner is placeholder), None)


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
