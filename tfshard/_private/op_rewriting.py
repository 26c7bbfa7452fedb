"""Hooks on the operations of a step: rewrite them, or note them, as TensorFlow traces or runs the step."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.dtensor.python import api as _dtensor_api
from tensorflow.python import pywrap_tfe as _pywrap_tfe
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import core as _core
from tensorflow.python.eager import execute as _execute
from tensorflow.python.framework import op_callbacks as _op_callbacks
from tensorflow.python.framework import op_def_registry as _op_def_registry

from tfshard._private.context import is_eager
from tfshard._private.graphs import stop_recording

# The operations that DTensor's RandomOpSPMDExpander expands.
RANDOM_OPS = frozenset(
    ("StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomUniformFullInt",
     "StatelessRandomUniformFullIntV2", "StatelessRandomUniformInt", "StatelessRandomUniformIntV2",
     "StatelessRandomNormal", "StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2")
)  # fmt: skip

# All operations that return other numbers each time.
ALL_RANDOM_OPS = RANDOM_OPS | frozenset(
    ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomGamma", "RandomShuffle",
     "Multinomial", "StatelessMultinomial", "StatelessParameterizedTruncatedNormal", "StatelessRandomBinomial",
     "StatelessRandomGammaV2", "StatelessRandomGammaV3", "StatelessRandomPoisson")
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An operation of a step: added to a graph, or about to run in eager code.

    Attributes:
        type: The type, such as `"StridedSlice"`.
        inputs: The operands.
        get_attr: Returns an attribute by name.
        outputs: The results; None in eager code, before the operation runs.
    """

    type: str
    inputs: tuple[tf.Tensor, ...]
    get_attr: Callable[[str], Any]
    outputs: tuple[tf.Tensor, ...] | None = None

    @property
    def is_eager(self) -> bool:
        return self.outputs is None


# Names of arguments that differ in Python, some for one operation only.
_RENAMED = {
    "split_dim": "axis", "reduction_indices": "axis", ("ExpandDims", "dim"): "axis",
    ("Select", "t"): "x", ("Select", "e"): "y", ("Where", "input"): "condition",
}  # fmt: skip


def same_operation(call: Call, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Run an operation of the same type and attributes on other operands (`tf.raw_ops`)."""
    function = getattr(tf.raw_ops, call.type)
    waiting = iter(inputs)
    arguments = {}
    for argument in _op_def_registry.get(call.type).input_arg:
        name = _RENAMED.get((call.type, argument.name), _RENAMED.get(argument.name, argument.name))
        many = argument.number_attr
        arguments[name] = list(itertools.islice(waiting, call.get_attr(many))) if many else next(waiting)
    attributes = {
        name: call.get_attr(name) for name in inspect.signature(function).parameters if name not in (*arguments, "name")
    }
    attributes = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    results = function(**arguments, **attributes)
    return list(results) if isinstance(results, (list, tuple)) else [results]


# Returns the tensors that replace the outputs of an operation, or None to leave the operation.
Rewrite: TypeAlias = Callable[[Call], Sequence[tf.Tensor] | None]
Bring: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


class _EagerRewrites(threading.local):
    """The arguments of `rewritten_operations` in an eager step of this thread.

    `types` is None outside of a step, and while `rewrite` runs.
    """

    rewrite: Rewrite
    types: Container[str] | None = None
    bring: Bring | None = None


_eager = _EagerRewrites()
_eager_users = 0
_eager_lock = threading.Lock()
_eager_restore: Callable[[], None] | None = None


@contextlib.contextmanager
def rewritten_operations(
    rewrite: Rewrite,
    types: Container[str] | None,
    bring: Bring | None = None,
    note: Callable[[tf.Operation], None] = lambda operation: None,
) -> Iterator[None]:
    """A context in which `rewrite(call)` may replace the outputs of operations.

    TensorFlow does not rewrite the operations that `rewrite` makes.

    In a graph, the context adds a callback made for TensorFlow's debugger (`op_callbacks.add_op_callback`). TensorFlow
    has added the operation before, and the operation stays without a use. In eager code such a callback comes after the
    operation and cannot replace results. There, the context replaces the two functions that run operations,
    `pywrap_tfe.TFE_Py_FastPathExecute` and `execute.execute`. In other threads they do what TensorFlow's do. Functions
    run eagerly, too (`tf.config.run_functions_eagerly`): a function that was traced before has no rewritten operations.

    Args:
        rewrite: Returns the tensors that replace the outputs of an operation, or None to leave the operation.
        types: The types of operations that `rewrite` gets. None: all of them, in a graph only.
        bring: Brings a tensor to the mesh, in eager code: an operand beside tensors on the mesh that DTensor does not
            bring there, or a sharded operand of an operation without an expansion.
        note: Called with each operation that is added to a graph.
    """

    def callback(
        op_type: str,
        inputs: Sequence[tf.Tensor],
        attrs: Any,
        outputs: Sequence[tf.Tensor] | None,
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> list[tf.Tensor] | None:
        del attrs
        if graph is None or outputs is None:
            return None
        operation = outputs[0].op if outputs else graph.get_operation_by_name(op_name)
        note(operation)
        call = Call(type=op_type, inputs=tuple(inputs), get_attr=operation.get_attr, outputs=tuple(outputs))
        replaced = rewrite(call) if types is None or op_type in types else None
        # Without a replacement, what an earlier callback made of the outputs. TensorFlow has lists here.
        return list(outputs if replaced is None else replaced)

    if is_eager():
        assert types is not None, "In eager code each type costs time."
        with _eager_rewrites(rewrite, types, bring):
            yield
        return
    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def _eager_rewrites(rewrite: Rewrite, types: Container[str], bring: Bring | None) -> Iterator[None]:
    global _eager_users, _eager_restore
    with _eager_lock:
        _eager_users += 1
        if _eager_users == 1:
            _eager_restore = _install_eager_rewrites()
    before = dict(vars(_eager))
    vars(_eager).update(rewrite=rewrite, types=types, bring=bring)
    try:
        yield
    finally:
        vars(_eager).clear()
        vars(_eager).update(before)
        with _eager_lock:
            _eager_users -= 1
            if _eager_users == 0:
                assert _eager_restore is not None
                _eager_restore()


# DTensor's error about a tensor next to tensors on a mesh, with the number of the operand.
_OFF_MESH = re.compile(r"got a regular tensor for input (\d+) .*but was expecting a DTensor")

# DTensor's error about a sharded operand of an operation that it does not expand.
_SHARDED = "Trying to copy a non-single-device and non-replicated DTensor"


def _bring(inputs: Sequence[tf.Tensor], numbers: Iterable[int], sharded: bool) -> Iterator[tuple[int, tf.Tensor]]:
    """Yield the operands that `bring` replaces, by number."""
    bring = _eager.bring
    if bring is None:
        return
    for number in numbers:
        is_on_mesh = _dtensor_api.is_dtensor(inputs[number])
        if is_on_mesh == sharded and not (
            is_on_mesh and _dtensor_api.fetch_layout(inputs[number]).is_fully_replicated()
        ):
            with stop_recording():
                yield number, bring(inputs[number])


# DTensor treats tensors with fewer elements and one of these dtypes as constants (small_constant_optimization.cc).
_CONSTANT_ELEMENTS = 20
_CONSTANT_DTYPES = frozenset((tf.float32, tf.int32, tf.int64))
_RESOURCE = tf.resource.as_datatype_enum

# Names of arguments whose values DTensor needs to expand an operation.
_STRUCTURE = re.compile(
    r"(?:.*(?:shape|size|split|dim|dimension|axis|begin|end|stride|multiple|perm|padding|reduction_indices|segments)"
    r"|k|depth|start|limit|delta|shift|diagonal|crops|alg)(?:e?s)?"
)


def is_small_constant(tensor: Any) -> bool:
    """Return whether DTensor treats an eager tensor as a constant where the tensor is replicated."""
    return (
        isinstance(tensor, tf.__internal__.EagerTensor)
        and tensor.dtype in _CONSTANT_DTYPES
        and tensor.shape.num_elements() < _CONSTANT_ELEMENTS
    )


@functools.cache
def _is_structure(op_type: str) -> tuple[bool, ...]:
    """Return for each argument of an operation whether DTensor needs its value; an empty tuple if nobody knows."""
    definition = _op_def_registry.get(op_type)
    if definition is None or definition.is_stateful:
        return ()
    arguments = definition.input_arg
    if any(each.number_attr or each.type_list_attr or each.type == _RESOURCE for each in arguments):
        return ()
    return tuple(_STRUCTURE.fullmatch(each.name) is not None for each in arguments)


def _is_compiled_for_values(op_type: str, arguments: Sequence[Any]) -> bool:
    """Return whether DTensor compiles an eager operation again for other values of its operands.

    `ShouldFoldInput` in dtensor_device_util.h decides. An operation without a sharded operand runs on one device
    (`eager_pure_optimization`) and is not compiled.

    Args:
        op_type: The type of the operation.
        arguments: The operands, perhaps with other arguments between and behind them.
    """
    structure = _is_structure(op_type)
    tensors = [each for each in arguments if isinstance(each, tf.__internal__.EagerTensor)]
    if len(tensors) < 2 or len(tensors) != len(structure):
        return False
    if not any(is_small_constant(each) for each, known in zip(tensors, structure, strict=True) if not known):
        return False
    replicated = [_is_replicated(each) for each in tensors]
    small = [n for n, each in enumerate(tensors) if replicated[n] and not structure[n] and is_small_constant(each)]
    if all(replicated) or not small:
        return False
    if any(_dtensor_api.is_dtensor(tensors[n]) for n in small):
        return True
    values = _host_values[op_type, tuple(each.shape for each in tensors)]
    if len(values) < _HOST_VALUES:
        values.add(tuple(tensors[n].numpy().tobytes() for n in small))
    return len(values) == _HOST_VALUES


def _takes_number(op_type: str, arguments: Sequence[Any]) -> bool:
    """Return whether an operation takes a Python number and a sharded tensor.

    `execute.execute` makes a tensor of the number.

    Args:
        op_type: The type of the operation.
        arguments: The name of the operation, the operands, and the attributes.
    """
    inputs = arguments[1 : 1 + len(_is_structure(op_type))]
    return any(isinstance(each, (int, float)) for each in inputs) and not all(
        _is_replicated(each) for each in inputs if isinstance(each, tf.__internal__.EagerTensor)
    )


def _is_replicated(tensor: tf.Tensor) -> bool:
    """Return whether a tensor is replicated, or on the host."""
    return not _dtensor_api.is_dtensor(tensor) or bool(_dtensor_api.fetch_layout(tensor).is_fully_replicated())


# Functions of one operation, by the type, the attributes, and the shapes and values of the operands.
_operations: dict[tuple[Any, ...], tf.types.experimental.ConcreteFunction] = {}

# Host values that an operation took beside a sharded operand. A step has a few constants.
_host_values: dict[tuple[str, tuple[tf.TensorShape, ...]], set[tuple[bytes, ...]]] = collections.defaultdict(set)
_HOST_VALUES = 4


def _run_for_all_values(
    op_type: str, num_outputs: int, inputs: Sequence[tf.Tensor], attrs: Sequence[Any], operands: Sequence[int]
) -> list[tf.Tensor]:
    """Run an eager operation as a function.

    DTensor compiles a function twice at most: for the values of the first call, and then for all values of the operands
    that change.

    Args:
        op_type: The type of the operation.
        num_outputs: The number of results.
        inputs: The operands.
        attrs: Alternating names and values of the attributes.
        operands: The numbers of the operands whose values DTensor does not need.
    """
    known = {number: np.asarray(each) for number, each in enumerate(inputs) if number not in operands}
    specs = [tf.TensorSpec(inputs[number].shape, inputs[number].dtype) for number in operands]
    structure = tuple((number, each.dtype.name, each.shape, each.tobytes()) for number, each in known.items())
    key = (op_type, repr(attrs), tuple(specs), structure)
    if key not in _operations:
        call = Call(type=op_type, inputs=(), get_attr=dict(zip(attrs[::2], attrs[1::2], strict=True)).__getitem__)

        def operation(*tensors: tf.Tensor) -> list[tf.Tensor]:
            taken = dict(zip(operands, tensors, strict=True))
            return same_operation(call, [taken[n] if n in taken else tf.constant(known[n]) for n in range(len(inputs))])

        _operations[key] = tf.function(operation, autograph=False).get_concrete_function(*specs)
    name = _operations[key].function_def.signature.name.encode()
    return list(_context.context().call_function(name, [inputs[number] for number in operands], num_outputs))


def _install_eager_rewrites() -> Callable[[], None]:
    """Replace the two functions that run operations, and return a function that restores them."""
    fast, slow = _pywrap_tfe.TFE_Py_FastPathExecute, _execute.execute
    functions_eager = tf.config.functions_run_eagerly()

    # TensorFlow answers this exception by way of execute.execute, with inputs and attributes told apart.
    other_way = _core._FallbackException

    def rewriting_fast(context: Any, op_name: str, *args: Any) -> Any:
        types = _eager.types
        if types is not None and (
            op_name in types or _takes_number(op_name, args) or _is_compiled_for_values(op_name, args)
        ):
            raise other_way(op_name)
        try:
            return fast(context, op_name, *args)
        except _core._NotOkStatusException as error:
            message = error.message
            if _eager.bring is not None and (_OFF_MESH.search(message) or _SHARDED in message):
                raise other_way(op_name) from error
            raise

    def rewriting_slow(
        op_name: str | bytes,
        num_outputs: int,
        inputs: Iterable[tf.Tensor],
        attrs: Sequence[Any],
        ctx: Any,
        name: str | None = None,
    ) -> Any:
        types = _eager.types
        op_type = op_name.decode() if isinstance(op_name, bytes) else op_name
        if types is not None and op_type in types and any(_dtensor_api.is_dtensor(each) for each in inputs):
            attributes = dict(zip(attrs[::2], attrs[1::2], strict=True))
            call = Call(type=op_type, inputs=tuple(inputs), get_attr=attributes.__getitem__)
            _eager.types = None
            try:
                with stop_recording():  # The caller records the operation that was asked for.
                    replaced = _eager.rewrite(call)
            finally:
                _eager.types = types
            if replaced is not None:
                return list(replaced)
        inputs = list(inputs)
        while True:
            numbers: Sequence[int] = range(len(inputs))
            try:
                if types is None or not _is_compiled_for_values(op_type, inputs):
                    return slow(op_name, num_outputs, inputs, attrs, ctx, name)
                numbers = [number for number, known in enumerate(_is_structure(op_type)) if not known]
                return _run_for_all_values(op_type, num_outputs, inputs, attrs, numbers)
            except tf.errors.UnimplementedError as error:
                off_mesh, sharded = _OFF_MESH.search(error.message), _SHARDED in error.message
                numbers = [numbers[int(off_mesh[1])]] if off_mesh else numbers if sharded else []
                brought = dict(_bring(inputs, numbers, sharded))
                if not brought:
                    raise
                inputs = [brought.get(number, each) for number, each in enumerate(inputs)]

    def restore() -> None:
        _pywrap_tfe.TFE_Py_FastPathExecute, _execute.execute = fast, slow
        tf.config.run_functions_eagerly(functions_eager)

    _pywrap_tfe.TFE_Py_FastPathExecute, _execute.execute = rewriting_fast, rewriting_slow
    tf.config.run_functions_eagerly(True)
    return restore


@contextlib.contextmanager
def recorded_outputs(types: Container[str], record: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """A context that replaces the outputs of operations of `types` in a graph by `record(output)`.

    `op_callbacks.add_op_callback` calls callbacks in the order in which they were added: `record` sees the outputs of
    earlier ones.
    """

    def callback(
        op_type: str,
        inputs: Any,
        attrs: Any,
        outputs: Sequence[tf.Tensor] | None,
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> list[tf.Tensor] | None:
        del inputs, attrs, op_name
        if graph is None or outputs is None:
            return None
        return [record(output) for output in outputs] if op_type in types else list(outputs)

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)
