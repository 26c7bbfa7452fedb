"""Operations that are exchanged for others, or only seen, as a step is traced or runs."""

import contextlib
import dataclasses
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.dtensor.python import api as _dtensor_api
from tensorflow.python import pywrap_tfe as _pywrap_tfe
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

# Those, and the others that give other numbers each time.
ALL_RANDOM_OPS = RANDOM_OPS | frozenset(
    ("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomGamma", "RandomShuffle",
     "Multinomial", "StatelessMultinomial", "StatelessParameterizedTruncatedNormal", "StatelessRandomBinomial",
     "StatelessRandomGammaV2", "StatelessRandomGammaV3", "StatelessRandomPoisson")
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """An operation of a step: added to a graph, or about to be run in eager code.

    Attributes:
        type: Such as `"StridedSlice"`.
        inputs: Its tensors.
        get_attr: Gives one of its attributes by name.
        outputs: What it gives; None in eager code, where it has not run.
    """

    type: str
    inputs: tuple[tf.Tensor, ...]
    get_attr: Callable[[str], Any]
    outputs: tuple[tf.Tensor, ...] | None = None

    @property
    def is_eager(self) -> bool:
        return self.outputs is None


_RENAMED = {("Split", "split_dim"): "axis", ("SplitV", "split_dim"): "axis"}


def same_operation(call: Call, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same operation on other inputs (`tf.raw_ops`)."""
    function = getattr(tf.raw_ops, call.type)
    waiting = iter(inputs)
    arguments = {}
    for argument in _op_def_registry.get(call.type).input_arg:
        # Python has another name for an argument of two.
        name = _RENAMED.get((call.type, argument.name), argument.name)
        many = argument.number_attr
        arguments[name] = list(itertools.islice(waiting, call.get_attr(many))) if many else next(waiting)
    attributes = {
        name: call.get_attr(name) for name in inspect.signature(function).parameters if name not in (*arguments, "name")
    }
    attributes = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
    results = function(**arguments, **attributes)
    return list(results) if isinstance(results, (list, tuple)) else [results]


# By the type of an operation: what gives the tensors that stand for its outputs, or None.
Exchange: TypeAlias = Mapping[str, Callable[[Call], Sequence[tf.Tensor] | None]]
Bring: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


class _EagerExchanges(threading.local):
    table: Exchange | None = None
    bring: Bring | None = None


_eager_exchanges = _EagerExchanges()
_eager_users = 0
_eager_lock = threading.Lock()
_eager_restore: Callable[[], None] | None = None


@contextlib.contextmanager
def exchanged_operations(
    exchange: Exchange,
    bring: Bring | None = None,
    note: Callable[[tf.Operation], None] = lambda operation: None,
) -> Iterator[None]:
    """A context in which operations of the types in `exchange` are given to `exchange[type](call)`, with a `Call`.

    It gives the tensors that stand for the operation's outputs, or None to leave the operation as it is. What it
    makes itself is not exchanged again.

    In a graph this is `op_callbacks.add_op_callback`, made for TensorFlow's debugger: the operation has been added and
    is left without a use. In eager code such a callback comes after the operation and cannot replace what it gave, so
    the two functions that run operations, `pywrap_tfe.TFE_Py_FastPathExecute` and `execute.execute`, are replaced
    while a thread is in the context; other threads are passed on. Functions run in eager code too
    (`tf.config.run_functions_eagerly`): one that was traced before is not in terms of what is exchanged.

    Every operation that is added to a graph is given to `note`.

    A tensor that an eager operation takes next to tensors on a mesh, and that DTensor does not bring there by itself,
    is replaced by `bring(tensor)`, if it is given; so are sharded tensors that an operation without an expansion takes.
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
        if op_type not in exchange:
            return list(outputs)  # What an earlier callback made of them. TensorFlow has lists here.
        call = Call(type=op_type, inputs=tuple(inputs), get_attr=operation.get_attr, outputs=tuple(outputs))
        replaced = exchange[op_type](call)
        return list(outputs if replaced is None else replaced)

    if is_eager():
        with _eager_exchange(exchange, bring):
            yield
        return
    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)


@contextlib.contextmanager
def _eager_exchange(exchange: Exchange, bring: Bring | None) -> Iterator[None]:
    global _eager_users, _eager_restore
    with _eager_lock:
        _eager_users += 1
        if _eager_users == 1:
            _eager_restore = _install_eager_exchange()
    before = _eager_exchanges.table, _eager_exchanges.bring
    _eager_exchanges.table, _eager_exchanges.bring = exchange, bring
    try:
        yield
    finally:
        _eager_exchanges.table, _eager_exchanges.bring = before
        with _eager_lock:
            _eager_users -= 1
            if _eager_users == 0:
                assert _eager_restore is not None
                _eager_restore()


# DTensor's words for a tensor next to tensors on a mesh, with its number among the inputs.
_OFF_MESH = re.compile(r"got a regular tensor for input (\d+) .*but was expecting a DTensor")

# And for an operation that it does not expand: it runs on the host, if every device has the same.
_SHARDED = "Trying to copy a non-single-device and non-replicated DTensor"


def _bring(inputs: Sequence[tf.Tensor], numbers: Iterable[int], sharded: bool) -> Iterator[tuple[int, tf.Tensor]]:
    """The inputs, by number, that `bring` makes others of."""
    bring = _eager_exchanges.bring
    if bring is None:
        return
    for number in numbers:
        is_on_mesh = _dtensor_api.is_dtensor(inputs[number])
        if is_on_mesh == sharded and not (
            is_on_mesh and _dtensor_api.fetch_layout(inputs[number]).is_fully_replicated()
        ):
            with stop_recording():
                yield number, bring(inputs[number])


def _install_eager_exchange() -> Callable[[], None]:
    """Replaces the two functions, and returns what puts them back."""
    fast, slow = _pywrap_tfe.TFE_Py_FastPathExecute, _execute.execute
    functions_eager = tf.config.functions_run_eagerly()

    # TensorFlow answers this exception by way of execute.execute, with inputs and attributes told apart.
    other_way = _core._FallbackException

    def exchanging_fast(context: Any, op_name: str, *args: Any) -> Any:
        table = _eager_exchanges.table
        if table is not None and op_name in table:
            raise other_way(op_name)
        try:
            return fast(context, op_name, *args)
        except _core._NotOkStatusException as error:
            message = error.message
            if _eager_exchanges.bring is not None and (_OFF_MESH.search(message) or _SHARDED in message):
                raise other_way(op_name) from error
            raise

    def exchanging_slow(
        op_name: str | bytes,
        num_outputs: int,
        inputs: Iterable[tf.Tensor],
        attrs: Sequence[Any],
        ctx: Any,
        name: str | None = None,
    ) -> Any:
        table = _eager_exchanges.table
        op_type = op_name.decode() if isinstance(op_name, bytes) else op_name
        if table is not None and op_type in table and any(_dtensor_api.is_dtensor(each) for each in inputs):
            attributes = dict(zip(attrs[::2], attrs[1::2], strict=True))
            call = Call(type=op_type, inputs=tuple(inputs), get_attr=attributes.__getitem__)
            _eager_exchanges.table = None
            try:
                with stop_recording():  # The caller records the operation that was asked for.
                    replaced = table[op_type](call)
            finally:
                _eager_exchanges.table = table
            if replaced is not None:
                return list(replaced)
        inputs = list(inputs)
        while True:
            try:
                return slow(op_name, num_outputs, inputs, attrs, ctx, name)
            except tf.errors.UnimplementedError as error:
                off_mesh, sharded = _OFF_MESH.search(error.message), _SHARDED in error.message
                numbers = [int(off_mesh[1])] if off_mesh else range(len(inputs)) if sharded else []
                brought = dict(_bring(inputs, numbers, sharded))
                if not brought:
                    raise
                inputs = [brought.get(number, each) for number, each in enumerate(inputs)]

    def restore() -> None:
        _pywrap_tfe.TFE_Py_FastPathExecute, _execute.execute = fast, slow
        tf.config.run_functions_eagerly(functions_eager)

    _pywrap_tfe.TFE_Py_FastPathExecute, _execute.execute = exchanging_fast, exchanging_slow
    tf.config.run_functions_eagerly(True)
    return restore


@contextlib.contextmanager
def recorded_outputs(types: Container[str], record: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """A context in which what uses the output of an operation of `types`, when it is added to a graph, gets
    `record(output)` instead (`op_callbacks.add_op_callback`). It sees what callbacks added before have made of it."""

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
