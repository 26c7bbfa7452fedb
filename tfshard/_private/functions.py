"""The functions that TensorFlow's context holds, with those that DTensor makes of a step."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import function as _function
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import ctc_ops as _ctc_ops

_known: set[str] = set()


def give_own_names(ended: Callable[[], object] = lambda: None) -> None:
    """Gives the bodies of loops and branches in functions that DTensor has made since the last call names of their own.

    DTensor names them after what its compiler once had at the same address in memory (the OpOrArgLocNameMapper of
    TensorFlow's region_control_flow_to_functional.cc lives as long as its pass, and forgets no operation). A name that
    two compilations give is an error: "Cannot add function". So none of those names is left to the next one. What runs
    has its bodies in it already; the functions are looked up when TensorFlow forgets that
    (`Context.add_function_def`, `get_function_def`, `list_function_names`, `remove_function`).

    After each step: DTensor takes an integer or string input of fewer than 20 elements that is whole on all devices for
    a constant (ExtractSmallTensorValue in its small_constant_optimization.cc, however the tensor was made), and
    compiles the step again at the first one that has another value. Where nothing was compiled, this takes some 10 us
    for each hundred functions.

    Args:
        ended: Returns when nothing that was compiled still begins to run. Called if there is anything to name.
    """
    context = _context.context()
    names = set(context.list_function_names())
    if names <= _known:
        _known.intersection_update(names)  # One that is gone may be made again.
        return
    new = {name: context.get_function_def(name) for name in names - _known}
    owners = [name for name in new if name.startswith("_func_")]
    bodies: dict[str, str] = {}
    waiting = list(owners)
    while waiting:
        for called in _called(new[waiting.pop()]):
            if called.name in new and called.name not in bodies:
                bodies[called.name] = f"{called.name}_{_ops.uid()}"
                waiting.append(called.name)
    if bodies:
        ended()
        for name in [*bodies, *owners]:
            try:
                # The context removes what it was asked to add only, also where it had it and refused.
                context.add_function_def(new[name])
            except tf.errors.InvalidArgumentError:
                pass
            context.remove_function(name)
        for name in [*bodies, *owners]:
            for called in _called(new[name]):
                called.name = bodies.get(called.name, called.name)
            new[name].signature.name = bodies.get(name, name)
            context.add_function_def(new[name])
        names = set(context.list_function_names())
    _known.clear()
    _known.update(names)


def _called(function: Any) -> Iterator[Any]:
    """The functions that are attributes of a function's operations (`FunctionDef`)."""
    for node in function.node_def:
        for attribute in node.attr.values():
            if attribute.func.name:
                yield attribute.func
            yield from attribute.list.func


@contextlib.contextmanager
def ctc_with_own_names() -> Iterator[None]:
    """A context in which the loops of `tf.nn.ctc_loss` have bodies with names of their own (`ctc_ops.function`, of
    which it uses `Defun`): TensorFlow names them by what they do, and not by their shapes, which DTensor compares."""

    def defun(*dtypes: tf.DType) -> Callable[..., Any]:
        own: Callable[..., Any] = _function.Defun(*dtypes, func_name=f"ctc_{_ops.uid()}")
        return own

    _ctc_ops.function = types.SimpleNamespace(Defun=defun)
    try:
        yield
    finally:
        _ctc_ops.function = _function
