"""ShardedVariable: rests sharded, is read whole, and is written once at the end of a step.

# Note: why writes are deferred

DTensor's all-reduce combiner ends in a topological sort by operands only. A resource read has no operand, so
it can move ahead of the write it should follow: Adam, RMSprop and Adagrad, which write a slot and read it
again, train silently wrong (tests/test_stale_read.py reproduces it). Turning the combiner off cures it and
costs a collective for each gradient. Instead, a step is made a pure function of what it reads:

- inside a step a write only records the new value, and a later read sees the recorded value;
- at the end of the step each written variable is assigned once, in its storage layout.

A write inside a branch of `tf.cond` cannot be recorded for the end of the step, because its value belongs to
the branch. It is assigned in the branch, where it is the last thing that happens to the variable, and touching
the variable after the `tf.cond` in the same step is an error rather than a stale read. A write in the body of a
`tf.while_loop` is an error.
"""

import contextlib
import dataclasses
import threading
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private, placement
from tfshard.errors import LayoutError, StrategyError
from tfshard.layouts import Axes, VariableLayout


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A value written in a step: `flat` when it is in the padded form, else of the variable's own shape."""

    tensor: tf.Tensor
    flat: bool


class Step:
    """One run of a step function under tracing: what it has written so far."""

    def __init__(self, graph: tf.Graph):
        self.graph = graph
        self._recorded: dict[Any, dict[int, _Recorded]] = {graph: {}}
        self._to_flush: dict[int, ShardedVariable] = {}
        # Graph and variable to the number of operations the graph had when a branch below it wrote the variable.
        self._written_below: dict[tuple[Any, int], int] = {}

    def find(self, variable: "ShardedVariable") -> _Recorded | None:
        """The value recorded for `variable` as seen from the graph being built."""
        for graph in self._graphs():
            if self._branch_is_closed(graph, variable):
                raise StrategyError(
                    f"Variable '{variable.path}' was written inside tf.cond and is used again after it in the same "
                    "step, where its value is not known. Use it inside the branches, or in the next step. "
                    "(gradient_accumulation_steps cannot be combined with use_ema or with variable constraints.)"
                )
            found = self._recorded.get(graph, {}).get(id(variable))
            if found is not None:
                return found
        return None

    def record(self, variable: "ShardedVariable", value: _Recorded) -> None:
        """Takes note of a write; the variable itself is written by `flush`, or now inside a branch."""
        graphs = self._graphs()
        graph = graphs[0]
        self.find(variable)  # Raises when a closed branch wrote it.
        if graph is self.graph:
            self._recorded[graph][id(variable)] = value
            self._to_flush[id(variable)] = variable
            return
        if any(_private.graph_is_loop(g) for g in graphs[:-1]):
            raise StrategyError(
                f"Variable '{variable.path}' is written in the body of a tf.while_loop, which a sharded step cannot "
                "do. Unroll the loop in Python, or carry the value as a loop variable and assign it after the loop."
            )
        if id(variable) in self._to_flush:
            # Written before the branch's own write, so that the branch has the last word.
            del self._to_flush[id(variable)]
            recorded = self._recorded[self.graph][id(variable)]
            with self.graph.as_default(), tf.control_dependencies(None):
                variable.write(recorded.tensor, flat=recorded.flat)
        self._recorded.setdefault(graph, {})[id(variable)] = value
        for outer in graphs[1:]:
            self._written_below.setdefault((outer, id(variable)), len(outer.get_operations()))
        variable.write(value.tensor, flat=value.flat)

    def flush(self) -> None:
        """Writes each variable once. Last in the step: a read after this would be stale."""
        for key, variable in self._to_flush.items():
            recorded = self._recorded[self.graph][key]
            variable.write(recorded.tensor, flat=recorded.flat)
        self._to_flush.clear()

    def _graphs(self) -> list:
        """The graphs from the one being built out to the step's own."""
        graph = tf.compat.v1.get_default_graph()
        graphs = [graph]
        while graph is not None and graph is not self.graph:
            graph = _private.outer_graph(graph)
            graphs.append(graph)
        return graphs

    def _branch_is_closed(self, graph: Any, variable: "ShardedVariable") -> bool:
        """Whether a branch that wrote `variable` has become an operation of `graph`.

        While its sibling branch is being traced, that operation does not exist and the old value holds.
        """
        since = self._written_below.get((graph, id(variable)))
        if since is None:
            return False
        return any(op.type in _BRANCH_OPS for op in graph.get_operations()[since:])


_BRANCH_OPS = ("If", "StatelessIf", "Case", "PartitionedCall", "StatefulPartitionedCall")


class _State(threading.local):
    step: Step | None = None
    running_eagerly: bool = False
    updating: bool = False
    flat_updates: bool = False


_state = _State()


def _reading_scope():
    """Reads belong to the step's own graph, also those made in a branch: there, they could follow a write that the
    compiler moved ahead of the branch."""
    step = _state.step
    if step is None or tf.compat.v1.get_default_graph() is step.graph:
        return contextlib.nullcontext()
    return step.graph.as_default()


@contextlib.contextmanager
def step_scope():
    """Opens a step: writes are recorded, and carried out when the outermost scope ends. Eager code writes now."""
    if _state.step is not None:
        yield
        return
    if _private.is_eager():
        before, _state.running_eagerly = _state.running_eagerly, True
        try:
            yield
        finally:
            _state.running_eagerly = before
        return
    _state.step = Step(tf.compat.v1.get_default_graph())
    try:
        yield
        _state.step.flush()
    finally:
        _state.step = None


@contextlib.contextmanager
def update_scope(*, flat: bool):
    """Opens an optimizer's update: variables are read and written in the layout of their slots.

    Args:
        flat: Whether the arithmetic is elementwise, so that padded variables may be updated in their flat form.
    """
    before = _state.updating, _state.flat_updates
    _state.updating, _state.flat_updates = True, flat
    try:
        yield
    finally:
        _state.updating, _state.flat_updates = before


def _relayout_both_ways(value: tf.Tensor, *, forward: Axes, backward: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """`value` in the layout `forward`; its gradient is brought to the layout `backward` as soon as it exists.

    A sparse gradient (IndexedSlices) becomes dense here.
    """

    def gradient(upstream):
        # Pinned to the forward layout first. The backward one alone would travel up into the operations that compute
        # the gradient, and many cannot be expanded with it: convolutions, attention, batch normalization, concat.
        upstream = placement.relayout(upstream, forward, mesh)
        return upstream if backward == forward else placement.scatter(upstream, backward, mesh)

    @tf.custom_gradient
    def apply(x):
        return placement.relayout(x, forward, mesh), gradient

    return apply(value)


class ShardedVariable(tf.Variable):
    """A `tf.Variable` of which each device holds a piece.

    It has the shape of the whole variable. Reading it (`value()`, any operation on it) gives the whole value
    under the compute layout, with one all-gather when it rests sharded over the batch axis. Writing takes whole
    values of any layout. In eager code both happen at once; inside a step writes are deferred (see the note at the
    top of this module).

    Attributes:
        path: The Keras path, for messages.
        layout: Its `VariableLayout`.
        mesh: The mesh it lives on.
    """

    _should_act_as_resource_variable = True

    def __init__(
        self,
        initial_value: np.ndarray,
        *,
        layout: VariableLayout,
        mesh: dtensor.Mesh,
        trainable: bool,
        name: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        """Args:
        initial_value: The whole value, on the host; each device receives its piece only.
        layout: Where it lives.
        mesh: The mesh.
        trainable: Whether gradient tapes watch it by themselves.
        name: A name for messages and TensorFlow.
        options: More arguments of `tf.Variable`: `aggregation`, `synchronization`, `caching_device`, ...
        """
        if tuple(initial_value.shape) != layout.spec.shape:
            raise LayoutError(
                f"The initial value of '{layout.spec.path}' has another shape than its layout was made for. "
                f"Expected: shape={layout.spec.shape}. Received: shape={tuple(initial_value.shape)}"
            )
        self.layout = layout
        self.mesh = mesh
        self.path = layout.spec.path
        self._trainable = trainable
        self._converter = None if layout.flat is None else placement.FlatConverter(layout.flat, mesh)
        self._rests_flat = layout.rests_flat
        self._eager_whole: tuple[int, Any] | None = None
        self._version = 0
        self._buffer = dtensor.DVariable(
            lambda: self._pack(initial_value),
            trainable=trainable and not self._rests_flat,
            name=name,
            **(options or {}),
        )

    # --- what it is ---------------------------------------------------------------------------------

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(self.layout.spec.shape)

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def dtype(self) -> tf.DType:
        return self._buffer.dtype

    @property
    def name(self) -> str:
        return self._buffer.name

    @property
    def trainable(self) -> bool:
        return self._trainable

    @property
    def synchronization(self):
        return self._buffer.synchronization

    @property
    def aggregation(self):
        return self._buffer.aggregation

    @property
    def constraint(self):
        return None

    @property
    def device(self) -> str:
        return self._buffer.device

    @property
    def _unique_id(self) -> str:
        return self._buffer._unique_id

    @property
    def _shared_name(self) -> str:
        return self._buffer._shared_name

    @property
    def buffer(self) -> dtensor.DVariable:
        """The DTensor variable that holds the pieces, padded where `layout.flat` says so."""
        return self._buffer

    @property
    def handle(self):
        """What a gradient tape differentiates with respect to."""
        if self._recorded() is None and not self._rests_flat:
            return self._buffer.handle
        return self._whole()

    def __repr__(self) -> str:
        return (
            f"<ShardedVariable '{self.path}' shape={self.layout.spec.shape} dtype={self.dtype.name} "
            f"storage={self.layout.storage} mesh={dict(zip(self.mesh.dim_names, self.mesh.shape(), strict=True))}>"
        )

    # --- reading ------------------------------------------------------------------------------------

    def value(self) -> tf.Tensor:
        """The whole value under the compute layout; inside an update, in the layout of the slots.

        In eager code outside of `strategy.run`, a copy on the host: `model(x)` and callbacks work as on one device.
        """
        if self._read_from_outside():
            return tf.constant(self.numpy())
        if _state.updating and self.layout.update_sharded and self.layout.splits:
            return self._update_value()
        if self._recorded() is None and not self._rests_flat:
            return self._direct_value()
        if self._trainable:
            _private.record_variable_access(self)
        compute = self.layout.compute
        return _relayout_both_ways(self._whole(), forward=compute, backward=compute, mesh=self.mesh)

    def _read_from_outside(self) -> bool:
        return _private.is_eager() and not (_state.running_eagerly or _state.updating)

    def read_value(self) -> tf.Tensor:
        return self.value()

    def _direct_value(self) -> tf.Tensor:
        """Reads the buffer where the tape can see it; the gradient comes back the way the value went."""
        layout = self.layout
        # Stages 2 and 3: the gradient is scattered at once, so that nothing holds it whole.
        backward = layout.compute
        if layout.reduce_scatter and layout.sharded is not None:
            backward = layout.sharded
        with _reading_scope():
            stored = self._buffer.value()
            return _relayout_both_ways(stored, forward=layout.compute, backward=backward, mesh=self.mesh)

    def _whole(self) -> tf.Tensor:
        """The whole value as one tensor that is the same object until the next write.

        The tape differentiates with respect to it (`handle`), so it need not have seen it being made.
        """
        recorded = self._recorded()
        if _private.is_eager():
            if self._eager_whole is None or self._eager_whole[0] != self._version:
                self._eager_whole = (self._version, self._make_whole(None))
            return self._eager_whole[1]
        cache, graph = self._whole_cache(recorded)
        key = id(self) if recorded is None else id(recorded)
        if key not in cache:
            with graph.as_default(), tf.control_dependencies(None), _private.stop_recording():
                cache[key] = (self._make_whole(recorded), recorded)
        return cache[key][0]

    def _whole_cache(self, recorded: _Recorded | None) -> tuple[dict, tf.Graph]:
        """The cache of the outermost graph in which the value is known, and that graph."""
        graph = tf.compat.v1.get_default_graph()
        if recorded is not None:
            graph = recorded.tensor.graph
        elif _state.step is not None:
            graph = _state.step.graph
        if not hasattr(graph, "_tfshard_whole_values"):
            graph._tfshard_whole_values = {}
        return graph._tfshard_whole_values, graph

    def _make_whole(self, recorded: _Recorded | None) -> tf.Tensor:
        if recorded is None:
            recorded = _Recorded(self._buffer.value(), flat=self._rests_flat)
        return self._unflatten(recorded.tensor) if recorded.flat else self._to_compute(recorded.tensor)

    def _update_value(self) -> tf.Tensor:
        recorded = self._recorded()
        if recorded is None:
            with _reading_scope():
                recorded = _Recorded(self._buffer.value(), flat=self._rests_flat)
        return self.to_update(recorded.tensor, flat=recorded.flat)

    def to_update(self, tensor: Any, *, flat: bool = False) -> tf.Tensor:
        """Brings a value or gradient of this variable to the layout in which it is updated.

        Args:
            tensor: Of the variable's shape, or its flat form when `flat`; a sparse gradient becomes dense.
            flat: Whether `tensor` is in the flat form.
        """
        layout = self.layout
        if not (layout.update_sharded and layout.splits):
            return self._to_compute(self._unflatten(tensor) if flat else tensor)
        if layout.sharded is not None:
            # A gradient of stages 2 and 3 is scattered already; of stage 1, it is now.
            bring = placement.relayout if layout.reduce_scatter else placement.scatter
            return bring(tensor, layout.sharded, self.mesh)
        if _state.flat_updates:
            return tensor if flat else self._flatten(tensor)
        return self._unflatten(tensor) if flat else self._to_compute(tensor)

    def _to_compute(self, tensor: Any) -> tf.Tensor:
        return placement.relayout(tensor, self.layout.compute, self.mesh)

    def _flatten(self, tensor: Any) -> tf.Tensor:
        assert self._converter is not None
        assert self.layout.flat is not None
        return placement.scatter(self._converter.flatten([tensor]), self.layout.flat.buffer_axes, self.mesh)

    def _unflatten(self, tensor: tf.Tensor) -> tf.Tensor:
        assert self._converter is not None
        return self._converter.unflatten(self._converter.rows(tensor), 0)

    def _recorded(self) -> _Recorded | None:
        return None if _state.step is None else _state.step.find(self)

    def numpy(self) -> np.ndarray:
        """The whole value on the host, put together from the devices' pieces. Eager only."""
        if not _private.is_eager():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")
        value = placement.mesh_to_host(self._buffer.value())
        if self._rests_flat:
            assert self._converter is not None
            value = self._converter.host_unflatten(value, 0)
        return value

    def __array__(self, dtype=None, copy=None):
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def _dense_var_to_tensor(self, dtype=None, name=None, as_ref=False):
        del name
        if as_ref:
            raise NotImplementedError("A ShardedVariable has no reference.")
        if dtype is not None and not dtype.is_compatible_with(self.dtype):
            raise ValueError(
                f"Incompatible type conversion requested to type '{dtype.name}' for variable '{self.path}' "
                f"of type '{self.dtype.name}'"
            )
        return self.value()

    def __tf_tensor__(self, dtype=None, name=None):
        return self._dense_var_to_tensor(dtype, name)

    def _as_graph_element(self):
        return None

    def sparse_read(self, indices, name=None):
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices, name=None):
        return tf.gather_nd(self.value(), indices, name=name)

    def is_initialized(self, name=None):
        del name
        return tf.constant(True)

    # --- writing ------------------------------------------------------------------------------------

    def assign(self, value, use_locking=False, name=None, read_value=True):
        """Sets the whole value: from the host in eager code, recorded for the end of a step inside one."""
        del use_locking, name, read_value
        outside = self._read_from_outside() and not placement.is_dtensor(value)
        if outside or (_private.is_eager() and not placement.is_dtensor(value) and not isinstance(value, tf.Variable)):
            self._assign_host(value)
            return self
        flat = self._in_flat_update()
        value = tf.cast(tf.convert_to_tensor(value), self.dtype)
        expected = self.layout.flat.buffer_shape if flat and self.layout.flat is not None else self.layout.spec.shape
        if not value.shape.is_compatible_with(expected):
            raise ValueError(
                f"The shape of the variable and of the value assigned to it must match. Variable '{self.path}': "
                f"shape={expected}. Received: shape={tuple(value.shape)}"
            )
        if _state.step is None:
            self.write(value, flat=flat)
        else:
            _state.step.record(self, _Recorded(value, flat))
        return self

    def assign_add(self, delta, use_locking=False, name=None, read_value=True):
        return self.assign(self.value() + self._like_value(delta))

    def assign_sub(self, delta, use_locking=False, name=None, read_value=True):
        return self.assign(self.value() - self._like_value(delta))

    def _like_value(self, delta: Any) -> tf.Tensor:
        if self._read_from_outside():
            return tf.cast(delta, self.dtype)
        if _private.is_eager() and not placement.is_dtensor(delta) and not isinstance(delta, tf.Variable):
            delta = np.broadcast_to(np.asarray(delta, self.dtype.as_numpy_dtype), self.layout.spec.shape)
            delta = placement.host_to_mesh(delta, self.layout.compute, self.mesh)
            return self.to_update(delta) if _state.updating else delta
        return tf.cast(delta, self.dtype)

    def write(self, value: tf.Tensor, *, flat: bool) -> None:
        """Assigns the buffer now, in the storage layout. For `Step` and eager code only."""
        if self._rests_flat:
            value = value if flat else self._flatten(value)
        elif flat:
            value = self._unflatten(value)
        self._version += 1
        self._eager_whole = None
        self._buffer.assign(placement.relayout(value, self.layout.storage, self.mesh), read_value=False)

    def _assign_host(self, value: Any) -> None:
        host = placement.to_host(value).astype(self.dtype.as_numpy_dtype)
        if self._in_flat_update():
            assert self.layout.flat is not None
            host = np.broadcast_to(host, self.layout.flat.buffer_shape)
            packed = placement.host_to_mesh(host, self.layout.flat.buffer_axes, self.mesh)
            self.write(packed, flat=True)
            return
        if host.shape != self.layout.spec.shape:
            raise ValueError(
                f"The shape of the variable and of the value assigned to it must match. Variable '{self.path}': "
                f"shape={self.layout.spec.shape}. Received: shape={host.shape}"
            )
        self._version += 1
        self._eager_whole = None
        self._buffer.assign(self._pack(host), read_value=False)

    def _in_flat_update(self) -> bool:
        layout = self.layout
        return _state.updating and _state.flat_updates and layout.flat is not None and layout.update_sharded

    def _pack(self, host: np.ndarray) -> tf.Tensor:
        if self._rests_flat:
            assert self._converter is not None
            host = self._converter.host_flatten([host])
        return placement.host_to_mesh(host, self.layout.storage, self.mesh)

    def scatter_add(self, sparse_delta, use_locking=False, name=None):
        return self.assign_add(tf.convert_to_tensor(sparse_delta))

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        return self.assign_sub(tf.convert_to_tensor(sparse_delta))

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        indices = tf.expand_dims(sparse_delta.indices, -1)
        return self.assign(tf.tensor_scatter_nd_update(self.value(), indices, sparse_delta.values))

    # --- TensorFlow checkpoints -----------------------------------------------------------------------

    def _serialize_to_tensors(self):
        return {"VARIABLE_VALUE": tf.constant(self.numpy())}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors["VARIABLE_VALUE"])
