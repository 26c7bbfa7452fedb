"""VariableLayout: how one variable is computed with and stored, with padding where no dim divides.

Pure Python and numpy: nothing here touches a device, so mistakes are found before any device work.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tfshard.errors import LayoutError
from tfshard.layouts.axes import MeshAxes, Role
from tfshard.layouts.config import ShardingConfig
from tfshard.layouts.gradient_reduction import GradientReduction
from tfshard.layouts.layout_map import LayoutMap, VariableSpec
from tfshard.layouts.shard_rows import ShardRows
from tfshard.layouts.variable_kind import PartialKind, VariableKind

Axes = tuple[str | None, ...]

# Smaller untrained variables stay replicated: batch statistics, counters, seeds, metrics.
REPLICATED_BELOW_BYTES = 1 << 20

# Elements that share a scale if stored in 8 bits, and the bytes of a block: a code for each element, and the scale.
BLOCK_ELEMENTS = 256
BLOCK_BYTES = BLOCK_ELEMENTS + 4
# The words of four bytes in which devices send a block.
BLOCK_WORDS = BLOCK_BYTES // 4

# Smaller gradients are reduced together with others, even on a mesh with replicas.
LEAST_BY_REPLICAS_BYTES = 1 << 16

# DTensor gathers no integers of one byte; a flat form gathers them in words of this many bytes.
WORD_BYTES = 8

# Larger members start at a multiple of this many bytes, so that TensorFlow can read them without a copy.
ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatMember:
    """The position of a variable in a `FlatForm`.

    Attributes:
        shape: The shape of the full variable.
        compute: The compute layout of the variable.
        offset: The first element of the variable, counted in one model shard of the buffer.
        elements: The number of elements in one model shard.
    """

    shape: tuple[int, ...]
    compute: Axes
    offset: int
    elements: int

    @property
    def end(self) -> int:
        """The offset behind the last element."""
        return self.offset + self.elements

    @classmethod
    def after(
        cls,
        members: Sequence["FlatMember"],
        shape: tuple[int, ...],
        compute: Axes,
        mesh_shape: Mapping[str, int],
        itemsize: int,
    ) -> "FlatMember":
        """Return the aligned position of the next variable behind `members`."""
        offset = members[-1].end if members else 0
        elements = math.prod(shape) // math.prod(mesh_shape[axis] for axis in compute if axis is not None)
        if elements * itemsize >= ALIGNMENT_BYTES:
            step = max(1, ALIGNMENT_BYTES // itemsize)
            offset = -(-offset // step) * step
        return cls(shape=shape, compute=compute, offset=offset, elements=elements)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatForm:
    """A padded matrix of one or more variables with a row for each device of the batch axis.

    A group of small variables has a flat form. A single variable has a flat form if the batch axis divides none of its
    dims, or if the mesh has replicas. Sharded one-byte integers have a flat form, too.

    The dims that model axes shard come first, one dim for each such axis (the same axes for all members). Behind them,
    the elements of the members follow each other, padded with zeros to fill the rows: `(model..., shards, columns)`.
    The sharded buffer holds the rows once for each replica, one replica after the other.

    Attributes:
        members: The variables in the form.
        mesh_shape: Axis name to size.
        word: The number of elements that are stored as one (`word_elements`). The length of a row is a multiple of it.
    """

    members: tuple[FlatMember, ...]
    mesh_shape: MeshAxes = dataclasses.field(hash=False)
    word: int = 1

    @classmethod
    def pack(
        cls, variables: Sequence[tuple[tuple[int, ...], Axes]], mesh_shape: Mapping[str, int], itemsize: int = 4
    ) -> "FlatForm":
        """Return the flat form of variables, packed one after the other.

        Args:
            variables: (shape, compute layout) of each variable; all sharded over the same model axes.
            mesh_shape: Axis name to size.
            itemsize: Bytes of an element. The form stores one-byte elements in words.
        """
        members: list[FlatMember] = []
        for shape, compute in variables:
            members.append(FlatMember.after(members, shape, compute, mesh_shape, itemsize))
        form = cls(members=tuple(members), mesh_shape=MeshAxes.of(mesh_shape), word=word_elements(itemsize))
        assert len({frozenset(axis for axis in m.compute if axis) for m in members}) == 1, members
        return form

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The mesh axes except the batch axis that shard every member, in mesh order."""
        used = set(self.members[0].compute)
        return tuple(axis for axis in self.mesh_shape if axis in used)

    @property
    def model_sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh_shape[axis] for axis in self.model_axes)

    @property
    def elements(self) -> int:
        """Elements of one model shard up to the end of the last member."""
        return self.members[-1].end

    @property
    def rows(self) -> int:
        return self.mesh_shape.shards

    @property
    def columns(self) -> int:
        return -(-self.elements // (self.rows * self.word)) * self.word

    @property
    def padding(self) -> int:
        """Elements behind the last member that fill the last row."""
        return self.rows * self.columns - self.elements

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape of a buffer that is gathered over the batch axis, or was never sharded over it."""
        return (*self.model_sizes, self.rows, self.columns)

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        """The shape of a buffer that the batch axis shards."""
        return (*self.model_sizes, self.mesh_shape.data_size, self.columns)

    @property
    def buffer_axes(self) -> Axes:
        """The layout of a buffer that the batch axis shards."""
        return (*self.model_axes, self.mesh_shape.data, None)

    @property
    def gathered_axes(self) -> Axes:
        """The layout of a buffer that is gathered over the batch axis."""
        return (*self.model_axes, None, None)

    def shard_rows(self, member: FlatMember) -> ShardRows:
        """Return the form of a member in the buffer, with its model shards in front."""
        return ShardRows(shape=member.shape, axes=member.compute, mesh_shape=self.mesh_shape)


# Sums of gradients and averages of weights (Keras's names). Small increments need the full precision.
_EXACT_SLOTS = ("gradient_accumulator", "_average")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableLayout:
    """How one variable is stored, read and updated.

    Attributes:
        spec: The variable.
        compute: Compute layout: the mesh axis of each dim when the forward pass reads the variable.
        sharded: Compute layout plus the batch axis on one dim; None when no dim divides or the axis is 1.
        flat: The padded form, of the group or of the variable alone; None without one (`FlatForm` says when).
        store_sharded: True if the batch axis shards the stored variable (parameters: stage 3).
        update_sharded: True if each device updates its local shard (stages 1 to 3; the slots are stored like this).
        reduce_scatter: True if a step reduce-scatters the gradient as soon as it exists (stages 2 and 3).
        group: The number of the group that shares `flat`; None for an ungrouped variable.
        member: The index among the members of `flat`.
        slot_dtype: The dtype in which the moments of the variable are stored; None if they keep their dtype.
        gather_dtype: The dtype of codes in which steps gather the stored variable, with a scale for each block of a
            local shard; None for exact gathers.
        stored_dtype: The dtype in which the variable is stored; None for its dtype. `"int8"`: 8-bit codes, in blocks
            with a scale.
        slots_on_host: True if the host of accelerators stores the moments of the variable, as far as devices update
            local shards of them.
        on_host: True if the host stores the variable.
        reduction: How devices reduce the gradient (`GradientReduction.choose`); None if DTensor or replicas reduce it.
        kind: The kind of the variable or of the slot's variable (variable_kind.py). None: steps read the full variable.
        kind_shape: The shape of the stored tensor of a variable of a `PartialKind`, with padding; None for others.
    """

    spec: VariableSpec
    compute: Axes
    sharded: Axes | None
    flat: FlatForm | None
    store_sharded: bool
    update_sharded: bool
    reduce_scatter: bool
    group: int | None = None
    member: int = 0
    slot_dtype: str | None = None
    gather_dtype: str | None = None
    stored_dtype: str | None = None
    slots_on_host: bool = False
    on_host: bool = False
    reduction: GradientReduction | None = None
    kind: VariableKind | None = None
    kind_shape: tuple[int, ...] | None = None

    def stored_bytes_of(self, elements: int) -> int:
        """Return the bytes of `elements` stored elements."""
        if self.stored_dtype == "int8":
            return -(-elements // BLOCK_ELEMENTS) * BLOCK_BYTES
        return elements * itemsize(self.stored_dtype or self.spec.dtype)

    @property
    def partial_kind(self) -> PartialKind | None:
        """The kind, if steps read and update parts of the variable only."""
        return self.kind if isinstance(self.kind, PartialKind) else None

    @property
    def grouped(self) -> bool:
        """True if the variable shares `flat` with other variables."""
        return self.group is not None

    @property
    def splits(self) -> bool:
        """True if the batch axis can shard the variable."""
        return self.sharded is not None or self.flat is not None

    @property
    def storage(self) -> Axes:
        """The storage layout; for a variable in a flat form, the layout of the buffer."""
        if self.flat is not None:
            return self.flat.buffer_axes if self.store_sharded else self.flat.gathered_axes
        return self.sharded if self.store_sharded and self.sharded is not None else self.compute

    @property
    def update(self) -> Axes:
        """The layout in which an optimizer updates the stored tensor."""
        if self.flat is not None:
            return self.flat.buffer_axes if self.update_sharded else self.flat.gathered_axes
        return self.sharded if self.update_sharded and self.sharded is not None else self.compute

    @property
    def gradient(self) -> Axes:
        """The layout in which the gradient comes out of the backward pass.

        For a variable that is stored or updated in a flat form, the gradient is reduced in full, and cut when it is
        packed.
        """
        return self.sharded if self.reduce_scatter and self.sharded is not None else self.compute

    @property
    def gathered(self) -> Axes:
        """The layout of the stored tensor after a gather over the batch axis."""
        return self.compute if self.flat is None else self.flat.gathered_axes

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor after a gather over the batch axis."""
        return self.spec.shape if self.flat is None else self.flat.gathered_shape

    @property
    def update_shape(self) -> tuple[int, ...]:
        """The shape in which an optimizer updates the stored tensor."""
        if self.flat is None:
            return self.spec.shape
        return self.flat.buffer_shape if self.update_sharded else self.flat.gathered_shape

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor: of the variable, of its flat form, or as its kind pads it."""
        if self.kind_shape is not None:
            return self.kind_shape
        if self.flat is None:
            return self.spec.shape
        return self.flat.buffer_shape if self.store_sharded else self.flat.gathered_shape

    def slot(self, spec: VariableSpec) -> "VariableLayout":
        """Return the layout of an optimizer slot of the same shape: the slot is stored like the variable is updated."""
        is_moment = not spec.path.endswith(_EXACT_SLOTS)
        narrow = spec.dtype == "float32" and is_moment
        return dataclasses.replace(
            self,
            spec=spec,
            store_sharded=self.update_sharded,
            stored_dtype=self.slot_dtype if narrow else None,
            slot_dtype=None,
            gather_dtype=None,
            slots_on_host=False,
            reduction=None,
            on_host=self.slots_on_host and is_moment and self.update_sharded and self.splits,
        )


def plan_variable(
    spec: VariableSpec, config: ShardingConfig, *, mesh_shape: Mapping[str, int], slot: bool = False
) -> VariableLayout:
    """Decide the layout of one variable.

    Args:
        spec: The variable.
        config: The settings. If `config.layout_map` is None, no model axis shards the variable.
        mesh_shape: Axis name to size.
        slot: True for an optimizer variable, which `config.zero_stage.shard_slots` shards.

    Raises:
        LayoutError: Two patterns match, too many dims, or a sharded dim that its axis does not divide.
        StrategyError: A variable cannot be of the kind that `config.kinds` gives it.
    """
    mesh_axes = MeshAxes.of(mesh_shape)
    match = None if config.layout_map is None else config.layout_map.match(spec)
    slot_dtype = config.precision.slot_dtypes.of_variable(spec)
    kind = config.kind_at(spec.path)
    if kind is not None:
        kind.check_variable(spec, match, mesh_axes, slot_dtype)
        return _of_kind(spec, kind, config, mesh_axes, slot_dtype)
    axes: Axes = match[1] if match else (None,) * len(spec.shape)
    if match is not None:
        _check_divides(spec, match[0], axes, mesh_axes)
    data = mesh_axes.data
    compute = tuple(None if axis == data else axis for axis in axes)
    stored_by_rule = _is_stored_by_rule(config, match, data)
    eligible = slot or spec.trainable or spec_bytes(spec) >= REPLICATED_BELOW_BYTES or stored_by_rule
    zero_stage = config.zero_stage
    shard_params = eligible and (zero_stage.shard_params or stored_by_rule)
    shard_slots = eligible and (zero_stage.shard_slots or stored_by_rule)
    sharded, flat = None, None
    if mesh_axes.shards > 1 and math.prod(spec.shape) > 1 and shard_slots:
        preferred = axes.index(data) if data in axes else None
        # A layout cannot say that several devices of an axis hold the same shard.
        alone = mesh_axes.replicas == 1
        dim = _batch_dim(spec.shape, compute, mesh_axes.data_size, preferred) if alone else None
        if dim is not None and not (shard_params and is_in_bytes(spec.dtype)):
            sharded = tuple(data if i == dim else axis for i, axis in enumerate(compute))
        else:
            flat = FlatForm.pack([(spec.shape, compute)], mesh_axes, itemsize(spec.dtype))
    return VariableLayout(
        spec=spec,
        compute=compute,
        sharded=sharded,
        flat=flat,
        store_sharded=shard_slots if slot else shard_params,
        update_sharded=shard_slots,
        reduce_scatter=eligible and (zero_stage.shard_grads or stored_by_rule),
        slot_dtype=slot_dtype,
        gather_dtype=None if slot else config.precision.gather_dtypes.of_variable(spec),
        slots_on_host=config.offload.slots and spec.trainable,
    )


def _is_stored_by_rule(config: ShardingConfig, match: tuple[str, Axes] | None, data: str | None) -> bool:
    """Return True if the layout map stores a variable sharded over the data axis at every stage."""
    if match is None or config.layout_map is None or data not in match[1]:
        return False
    return config.layout_map[match[0]].stores


def _of_kind(
    spec: VariableSpec, kind: VariableKind, config: ShardingConfig, mesh_axes: MeshAxes, slot_dtype: str | None
) -> VariableLayout:
    """Return the layout of a variable of a kind, which is the same at every stage."""
    undivided = (None,) * len(spec.shape)
    by_rows = (mesh_axes.data, *undivided[1:]) if mesh_axes.data_size > 1 else None
    is_partial = isinstance(kind, PartialKind)
    return VariableLayout(
        spec=spec,
        compute=undivided if is_partial or by_rows is None else by_rows,
        sharded=by_rows if is_partial else None,
        flat=None,
        store_sharded=True,
        update_sharded=True,
        reduce_scatter=False,
        slot_dtype=None if is_partial else slot_dtype,
        slots_on_host=not is_partial and config.offload.slots and spec.trainable,
        kind=kind.for_layouts,
        kind_shape=kind.stored_shape(spec.shape, mesh_axes) if isinstance(kind, PartialKind) else None,
    )


def is_added_up_by_replicas(layout: VariableLayout, mesh_axes: MeshAxes) -> bool:
    """Return True if the gradient of a variable is reduced in each replica first, and then between replicas.

    On a mesh with model axes, only the sharded kernels of Dense and EinsumDense are reduced like this.
    """
    if mesh_axes.replicas == 1 or mesh_axes.shards == 1 or layout.grouped:
        return False
    if mesh_axes.shards_by_several and not (any(layout.compute) and layout.spec.is_kernel_of_dense):
        return False
    return spec_bytes(layout.spec) >= LEAST_BY_REPLICAS_BYTES


def joins_reduction(layout: VariableLayout, mesh_axes: MeshAxes, *, is_sum: bool) -> bool:
    """Return True if the gradient of a variable joins the shared all-reduce of full gradients.

    Args:
        layout: The layout of the variable.
        mesh_axes: The mesh.
        is_sum: True for a sum of several gradients, as for a variable that is used twice. DTensor does not fuse the
            reduction of such a sum with the cut that follows.
    """
    is_cut = layout.flat is None and layout.update != layout.compute
    custom_reduction = layout.kind is not None or layout.reduction is not None
    if custom_reduction or is_added_up_by_replicas(layout, mesh_axes):
        return False
    return not is_cut or (is_sum and not layout.reduce_scatter)


def divisor_from(rows: int, count: int) -> int:
    """Return the smallest divisor of `rows` from `count` on: the number of equal parts of a device's rows.

    A larger number keeps each part at most as large as planned.
    """
    return next((number for number in range(count, rows + 1) if rows % number == 0), max(rows, 1))


def is_in_bytes(dtype: str) -> bool:
    """Return True for one-byte integers, as in quantized kernels: a flat form gathers them as words."""
    return dtype in ("int8", "uint8")


def word_elements(itemsize: int) -> int:
    """Return how many elements of a flat form are stored as one."""
    return WORD_BYTES if itemsize == 1 else 1


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    name = "uint16" if dtype == "bfloat16" else "uint8" if dtype.startswith("float8") else dtype
    return np.dtype(name).itemsize


def sharded_dims(planned: Iterable[VariableLayout], axis: str) -> dict[str, int]:
    """Return the dim of the compute layout that `axis` shards, by path, for the variables that have one."""
    return {layout.spec.path: layout.compute.index(axis) for layout in planned if axis in layout.compute}


def spec_bytes(spec: VariableSpec) -> int:
    """Return the bytes of the full variable."""
    return math.prod(spec.shape) * itemsize(spec.dtype)


def _batch_dim(shape: tuple[int, ...], compute: Axes, batch: int, preferred: int | None) -> int | None:
    """Return the dim to shard over the batch axis: the layout map's choice, else the first dim that divides."""
    candidates = [dim for dim, axis in enumerate(compute) if axis is None and shape[dim] % batch == 0 and shape[dim]]
    if preferred in candidates:
        return preferred
    return candidates[0] if candidates else None


def _check_divides(spec: VariableSpec, pattern: str, axes: Axes, mesh_shape: MeshAxes) -> None:
    named = [axis for axis in axes if axis is not None]
    if len(named) != len(set(named)):
        raise LayoutError(
            f"An axis can shard only one dim of a variable. Variable: '{spec.path}' of shape={spec.shape}. Received: "
            f"axes={axes} for pattern '{pattern}'"
        )
    for dim, axis in enumerate(axes):
        # The batch axis may shard another dim, or pad; a model axis must divide.
        if axis is not None and mesh_shape.roles[axis] is Role.TENSOR and spec.shape[dim] % mesh_shape[axis]:
            raise LayoutError(
                f"Axis '{axis}' of size {mesh_shape[axis]} does not divide dim {dim} of '{spec.path}', which has "
                f"size {spec.shape[dim]} (shape={spec.shape}). Change the layer's size to a multiple of "
                f"{mesh_shape[axis]}, shard another dim, or leave it out of the layout map. "
                f"Received: axes={axes} for pattern '{pattern}'"
            )


def check_patterns(layout_map: LayoutMap, specs: Iterable[VariableSpec], owner: str = "") -> None:
    """Raise `LayoutError` for patterns that match none of the variables and are not optional.

    Args:
        layout_map: The patterns.
        specs: The variables.
        owner: The model of the variables, such as " of model 'lm'", for the message.
    """
    paths, matched = [], set()
    for spec in specs:
        paths.append(spec.path)
        match = layout_map.match(spec)
        if match is not None:
            matched.add(match[0])
    unmatched = [pattern for pattern, rule in layout_map.items() if pattern not in matched and not rule.optional]
    if unmatched:
        raise LayoutError(
            f"Patterns of the layout map match no variable{owner}: {unmatched}. A pattern must match the full path "
            "(re.fullmatch); column and row patterns match a layer's path. Correct them, or add them with "
            f"optional=True. First variable paths: {sorted(paths)[:12]}"
        )


def flatten_host_values(values: Iterable[np.ndarray], dtype: np.dtype, form: FlatForm) -> np.ndarray:
    """Pack the members' values, which are taken one after the other, into the padded buffer on the host."""
    buffer = np.zeros((*form.model_sizes, form.rows * form.columns), dtype)
    for value, member in zip(values, form.members, strict=True):
        buffer[..., member.offset : member.end] = form.shard_rows(member).flatten(value)
    return buffer.reshape(form.gathered_shape)


def unflatten_host_value(buffer: np.ndarray, form: FlatForm, member: FlatMember) -> np.ndarray:
    """Return a member's value from a padded buffer on the host."""
    rows = buffer.reshape(*form.model_sizes, form.rows * form.columns)
    return form.shard_rows(member).restore(rows[..., member.offset : member.end])
