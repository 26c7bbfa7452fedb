"""ShardedVariable: stored sharded, read unsharded, and written once at the end of a step (why: steps.py)."""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, process_lock, transfer
from tfshard.errors import LayoutError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.variable_layout import Axes, VariableLayout, is_added_up_by_replicas
from tfshard.storage import access, gradient, steps
from tfshard.storage.formats import StorageFormat
from tfshard.storage.initial_values import HostValue
from tfshard.storage.storage import SlotKey, Storage
from tfshard.storage.surface import VariableSurface

_serial = itertools.count()


class ShardedVariable(VariableSurface):
    """A `tf.Variable` of which each device stores a shard.

    The variable has the shape of the full variable. The access object of the current context reads and writes it
    (access.py). In a step, a read (`value()`, any operation on the variable) gives the full value in the compute
    layout. If the variable is stored sharded over the batch axis, the read is one all-gather. A write takes full values
    of any layout, and is deferred (see the note at the top of steps.py). In eager code outside of steps, reads and
    writes happen at once, on the host.

    Attributes:
        path: The Keras path, for messages.
        layout: Its `VariableLayout`.
        mesh: The mesh it lives on.
        storage: The `Storage` it lives in, alone or with others.
        member: Its number among the members of the storage.
        slots: Its optimizer slots, by optimizer and number of the slot.
        kept: The state that the reduction of its gradient keeps between steps, by name (`GradientReduction.state`).
        gradient_layout: The layout in which an optimizer got its gradient, in the last step that was traced or ran
            eagerly. None before this step, and if the layout is unknown.
    """

    _should_act_as_resource_variable = True

    def __init__(
        self,
        initial_value: HostValue,
        *,
        layout: VariableLayout,
        mesh: dtensor.Mesh,
        trainable: bool,
        name: str | None = None,
        unique_id: str | None = None,
        storage: Storage | None = None,
        options: Mapping[str, Any] | None = None,
        waits: Callable[["ShardedVariable"], None] | None = None,
    ):
        """Create the variable.

        Args:
            initial_value: The full value, on the host, or the initializer that will give it. Each device receives its
                local shard only.
            layout: The layout.
            mesh: The mesh.
            trainable: True if gradient tapes watch the variable.
            name: A name for messages and TensorFlow.
            unique_id: TensorFlow's id of the variable that this one replaces. Optimizers know the variable by it.
            storage: The storage of the group, if `layout.grouped`. By default a new storage for this variable alone.
            options: More arguments of `tf.Variable`: `aggregation`, `synchronization`, `caching_device`, ...
            waits: If given, the value stays on the host until the variable is used, or moved to its group once the
                model is known. The variable calls it before a value is set, and it may move the variable.
        """
        if tuple(initial_value.shape) != layout.spec.shape:
            raise LayoutError(
                f"The initial value of '{layout.spec.path}' does not have the shape of its layout. Expected: "
                f"shape={layout.spec.shape}. Received: shape={tuple(initial_value.shape)}"
            )
        self.mesh = mesh
        self.path = layout.spec.path
        self.slots: weakref.WeakValueDictionary[SlotKey, ShardedVariable] = weakref.WeakValueDictionary()
        self.kept: dict[str, ShardedVariable] = {}
        self._trainable = trainable
        self._own_name = name or self.path
        self._own_id = unique_id or f"{self._own_name}_{next(_serial)}"
        self._own_dtype = tf.as_dtype(initial_value.dtype)
        self._options = options or {}
        self.layout = layout
        self.member = layout.member
        self.gradient_layout: Axes | None = None
        # The kinds of gradients that reached this variable in the current step: True for a sparse gradient.
        self._gradient_kinds: set[bool] = set()
        self._is_looked_up = False
        # A warning was given that Keras would update this variable differently.
        self.told_of_sparse = False
        self.storage = storage or self._own_storage(layout)
        self.storage.members[self.member] = self
        self.storage.fill(self.member, initial_value)
        self._waits = waits
        if waits is None:
            self.storage.make_if_filled()

    def _own_storage(self, layout: VariableLayout) -> Storage:
        return Storage(
            StorageFormat.of(layout, self.mesh), name=self._own_name, trainable=self._trainable, options=self._options
        )

    def move(self, layout: VariableLayout, storage: Storage | None = None) -> None:
        """Move the value to another storage, or to a new storage of the variable alone. Eager only.

        A value that waits on the host goes on waiting: this method makes no buffer for it.
        """
        value = self.storage.pop_waiting(self.member)
        waited = value is not None
        if value is None:
            value = np.array(self.numpy())
        del self.storage.members[self.member]
        self.path, self.layout, self.member = layout.spec.path, layout, layout.member
        self.gradient_layout = None
        self.storage = storage or self._own_storage(layout)
        self.storage.members[self.member] = self
        self.storage.fill(self.member, value)
        if not waited:
            self.storage.make_if_filled()

    def stay(self) -> None:
        """Stop waiting for a storage: the storage is known. The value goes there when it is set or used."""
        self._waits = None

    # --- attributes ---------------------------------------------------------------------------------

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape(access.current().shape(self))

    def get_shape(self) -> tf.TensorShape:
        return self.shape

    @property
    def dtype(self) -> tf.DType:
        return self._own_dtype

    @property
    def name(self) -> str:
        return f"{self._own_name}:0"

    @property
    def trainable(self) -> bool:
        """True if the variable is trained. Gradient tapes watch trainable variables."""
        return self._trainable

    @property
    def synchronization(self) -> tf.VariableSynchronization:
        """As it was given to the variable's creator; without effect."""
        return self._options.get("synchronization", tf.VariableSynchronization.AUTO)

    @property
    def aggregation(self) -> tf.VariableAggregation:
        """As it was given to the variable's creator; without effect."""
        return self._options.get("aggregation", tf.VariableAggregation.NONE)

    @property
    def constraint(self) -> None:
        return None

    @property
    def device(self) -> str:
        device: str = self.buffer.device
        return device

    @property
    def _unique_id(self) -> str:
        return self._own_id

    @property
    def _shared_name(self) -> str:
        return self._own_id

    @property
    def buffer(self) -> dtensor.DVariable:
        """The DTensor variable that holds the shards, in the flat form if the layout has one."""
        return self.storage.buffer

    @property
    def handle(self) -> tf.Tensor:
        """The tensor or handle that gradient tapes differentiate with respect to."""
        return access.current().handle(self)

    def gradient_source(self) -> tf.Tensor:
        """Return the tensor or handle that a gradient is taken with respect to, if no step has read the variable."""
        return self.buffer.handle if self._is_direct() else self.storage.full_value(self.member)

    @functools.cached_property
    def outside_handle(self) -> tf.Tensor:
        """The resource that gradient tapes watch where no step reads the variable; it holds no value."""
        return _private.resource_without_value(self.layout.spec.shape, self.dtype)

    def _is_direct(self) -> bool:
        """Return whether a read reads the buffer itself."""
        return self.storage.format.direct and self.storage.recorded() is None

    def __repr__(self) -> str:
        return (
            f"<ShardedVariable '{self.path}' shape={self.layout.spec.shape} dtype={self.dtype.name} "
            f"storage={self.layout.storage} mesh={dict(zip(self.mesh.dim_names, self.mesh.shape(), strict=True))}>"
        )

    # --- reading ------------------------------------------------------------------------------------

    def value(self) -> tf.Tensor:
        """Return the value in the current context (access.py): in a step the full value in the compute layout."""
        return access.current().read(self)

    def full(self) -> tf.Tensor:
        """Return the full value in the compute layout, as the current graph sees it."""
        if self._is_direct():
            return self._direct_value()
        gathered, step = self.storage.full_value(self.member), steps.current()
        source = None if step is None else step.reads.source(self)
        with steps.scope_of(gathered):
            if source is not None and source is not gathered:
                # A compiled block has read the variable in a span. The gradient goes to the same tensor.
                with _private.stop_recording():
                    copy = tf.identity(gathered)
                (gathered,) = _private.with_gradient(lambda _: ([copy], lambda upstream: [upstream]), [source])
            if self.storage.format.codes is None or steps.rounds_gathers() or self.storage.recorded() is not None:
                # Other reads are exact reads of a variable that the step gathers in codes. They serve assignments, not
                # the forward pass.
                self._note_read(gathered if source is None else source)
            if self._trainable:
                _private.record_variable_access(self)
            compute = self.layout.compute
            return gradient.with_pinned_gradient(
                gathered,
                forward=compute,
                backward=compute,
                mesh=self.mesh,
                local_gradient=self._local_gradient(),
                note_kind=self._note_kind(),
            )

    def read_in_span(self) -> tf.Tensor:
        """Record a read of the variable through `Storage.full_span`.

        Returns:
            The tensor that tapes differentiate by: the value, if it was read alone or watched before, and otherwise a
            number that stands for it. Its gradient is the reduced gradient of the variable, in the compute layout.
        """
        step = steps.current()
        assert step is not None, "Spans are read in steps that are traced."
        step.check_mesh(self)
        step.check_read(self)
        source = step.reads.source(self)
        if source is None:
            read = step.reads.last(self)
            source = read if read is not None and read.graph is step.graph else tf.zeros([], self.dtype)
            step.reads.set_source(self, source)
        self._note_read(source)
        if self._trainable:
            _private.record_variable_access(self)
        return source

    def is_watched(self) -> bool:
        """Return whether a tape was told to watch the variable in the open step."""
        step = steps.current()
        source = None if step is None else step.reads.source(self)
        if source is None and self._is_direct():
            source = self.buffer.handle
        return source is not None and _private.is_recorded(source)

    def note_dense_gradient(self) -> None:
        """Record that the gradient of a read in a span is no IndexedSlices."""
        self._note_kind()(False)

    def is_reduced_by_dtensor(self) -> bool:
        """Return whether DTensor reduces the gradient of a read in the open step, and nothing else changes it."""
        return self._local_gradient() is None

    def _note_read(self, tensor_or_handle: tf.Tensor) -> None:
        step = steps.current()
        if step is not None and self._trainable:
            step.reads.note(self, tensor_or_handle)

    def read_value(self) -> tf.Tensor:
        return self.value()

    def _direct_value(self) -> tf.Tensor:
        """Read the buffer where the tape sees it. The gradient returns by the layouts of the read."""
        layout = self.layout
        if _private.is_eager():
            self.storage.read_by_eager_step = True
        with steps.reading_scope():
            stored = self.storage.read_stored()
            self._note_read(self.buffer.handle)
            # Stages 2 and 3 scatter the gradient at once, so that nothing holds it unsharded.
            step, note = steps.current(), {}
            if step is not None and layout.update != layout.compute:
                is_scattered = layout.gradient != layout.compute
                note = {"note": functools.partial(step.note_gradient, self.storage, is_scattered)}
            return gradient.with_pinned_gradient(
                stored,
                stored=layout.storage,
                forward=layout.compute,
                backward=layout.gradient,
                mesh=self.mesh,
                local_gradient=self._local_gradient(**note),
                note_kind=self._note_kind(),
                codes=self.storage.codes(None),
                **note,
            )

    def _local_gradient(
        self, note: Callable[[tf.Tensor], object] = lambda gradient: None
    ) -> Callable[[tf.Tensor], tf.Tensor | None] | None:
        """Return a function of an upstream gradient: the unreduced local gradient, or a custom reduction of it.

        A microbatch with a reduction that waits for the last microbatch keeps the local gradient. With replicas, or
        with a reduction in the layout, the step reduces gradients by a custom function. Returns None if DTensor reduces
        the gradient, or if the variable is of a kind: no device reduces its gradient.
        """
        step = steps.current()
        if step is None or not self._trainable or self.layout.kind is not None:
            return None
        custom_reduction = self.layout.reduction is not None or is_added_up_by_replicas(
            self.layout, axis_sizes(self.mesh)
        )
        if step.local_gradient is not None or step.reduce_gradient is None or not custom_reduction:
            return step.local_gradient
        reduce_gradient = step.reduce_gradient

        def reduced(upstream: tf.Tensor) -> tf.Tensor | None:
            made = reduce_gradient(upstream, self)
            if made is not None and self.layout.reduction is not None:
                note(made)
            return made

        return reduced

    @contextlib.contextmanager
    def read_for_lookup(self) -> Iterator[None]:
        """Open a scope in which lookups read rows of the variable. Keras on one device would make their gradient
        sparse."""
        self._is_looked_up = True
        try:
            yield
        finally:
            self._is_looked_up = False

    def _note_kind(self) -> Callable[[bool], object]:
        """Return a function that records the kind of the gradient of the current read."""
        is_looked_up = self._is_looked_up
        return lambda is_sparse: self._gradient_kinds.add(is_sparse or is_looked_up)

    def pop_sparse(self) -> bool:
        """Return whether Keras on one device makes every gradient of this step IndexedSlices, and forget it."""
        kinds = set(self._gradient_kinds)
        self._gradient_kinds.clear()
        return kinds == {True}

    def note_gradient(self, tensor: tf.Tensor | tf.IndexedSlices) -> None:
        """Record the layout of a gradient that came to an optimizer's update."""
        self.gradient_layout = gradient.layout_of(tensor)

    def reduced(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a gradient that was summed over the devices, in the layout of gradients that come out of layers."""
        compute = self.layout.compute
        if self.layout.gradient == compute or self.storage.format.packed:
            return transfer.relayout(tensor, compute, self.mesh)
        return gradient.scatter(tensor, forward=compute, backward=self.layout.gradient, mesh=self.mesh)

    def to_update(self, tensor: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
        """Bring a gradient to the layout in which the variable is updated alone. A sparse gradient becomes dense."""
        compute = self.layout.compute
        update = self.storage.format.members[self.member].update
        # The mean of several microbatches is scattered already.
        if self.layout.reduce_scatter or update in (compute, gradient.layout_of(tensor)):
            return transfer.relayout(tensor, update, self.mesh)
        # Stage 1: a gradient of stages 2 and 3 is scattered already.
        return gradient.scatter(tensor, forward=compute, backward=update, mesh=self.mesh)

    def numpy(self) -> np.ndarray:
        """Return the full value on the host, joined from the devices' shards. Eager only."""
        if not _private.is_eager():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")
        if self.storage.recorded() is not None:
            return transfer.to_host(self.value())[()]  # The value that the eager step has written so far.
        with process_lock.held(), clients.here().purpose(f"the value of variable '{self.path}'"):
            return self.storage.host_value(self.member)[()]  # A scalar is a NumPy scalar, as for other variables.

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        del name
        if as_ref:
            raise NotImplementedError("A ShardedVariable has no reference.")
        if dtype is not None and not dtype.is_compatible_with(self.dtype):
            raise ValueError(
                f"Incompatible type conversion requested to type '{dtype.name}' for variable '{self.path}' "
                f"of type '{self.dtype.name}'"
            )
        return self.value()

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self._dense_var_to_tensor(dtype, name)

    def _as_graph_element(self) -> None:
        return None

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """True, as a tensor: its storage has a value."""
        del name
        return tf.constant(True)

    # --- writing ------------------------------------------------------------------------------------

    def assign(
        self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> "ShardedVariable":
        """Set the full value, as the current context does it (access.py): a step records it until its end."""
        del use_locking, name, read_value
        access.current().write(self, value)
        return self

    def to_tensor(self, value: Any) -> tf.Tensor:
        """Return a value to assign as a tensor of the variable's dtype; in eager code as a DTensor."""
        if _private.is_eager() and not (transfer.is_dtensor(value) or isinstance(value, ShardedVariable)):
            host = transfer.host_view(value).astype(self.dtype.as_numpy_dtype, copy=False)
            self.check_shape(host.shape, self.layout.spec.shape)
            value = transfer.host_to_mesh(host, self.layout.compute, self.mesh)
        return tf.cast(tf.convert_to_tensor(value), self.dtype)

    def set_from_host(self, host: np.ndarray) -> None:
        """Set the full value from the host, in eager code."""
        if self._waits is not None and not _private.scope_callers():  # No layer is being built.
            waits, self._waits = self._waits, None
            waits(self)
        self.storage.set_again(self.member, host)

    def _dense(self, sparse: tf.IndexedSlices | tf.Tensor) -> tf.Tensor:
        update = steps.open_update()
        part = None if update is None or self.layout.partial_kind is None else update.part
        if part is None or not isinstance(sparse, tf.IndexedSlices):
            return super()._dense(sparse)
        return part.dense(self.storage, sparse)

    def check_shape(self, shape: Any, expected: tuple[int, ...] | None = None) -> None:
        """Raise `ValueError` if a value to assign does not have the expected shape, by default the variable's."""
        expected = self.layout.spec.shape if expected is None else expected
        if not tf.TensorShape(shape).is_compatible_with(expected):
            raise ValueError(
                f"The shape of the variable and of the value assigned to it must match. Variable '{self.path}': "
                f"shape={expected}. Received: shape={tuple(shape)}"
            )

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> "ShardedVariable":
        delta = self._like_value(delta)
        with steps.exact_reads():
            return self.assign(self.value() + delta)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> "ShardedVariable":
        delta = self._like_value(delta)
        with steps.exact_reads():
            return self.assign(self.value() - delta)

    def _like_value(self, delta: Any) -> tf.Tensor:
        if steps.is_outside():
            return tf.cast(transfer.to_host(delta), self.dtype)
        if _private.is_eager() and not transfer.is_dtensor(delta) and not isinstance(delta, tf.Variable):
            # A number, or a tensor of the variable's shape, from the host.
            host = np.asarray(delta, self.dtype.as_numpy_dtype)
            return transfer.host_to_mesh(host, (None,) * host.ndim, self.mesh)
        return tf.cast(delta, self.dtype)

    # --- TensorFlow checkpoints -----------------------------------------------------------------------

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": tf.constant(self.numpy())}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        self.assign(restored_tensors["VARIABLE_VALUE"])
