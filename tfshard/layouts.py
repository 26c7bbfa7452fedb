"""Where each variable is stored: its compute layout, its sharded layout, and padding where no dim divides.

Pure Python and numpy: nothing here touches a device, so that a mistake is found before any device work.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from tfshard.errors import LayoutError
from tfshard.layout_map import LayoutMap, VariableSpec
from tfshard.mesh import BATCH_AXIS

Axes = tuple[str | None, ...]

# Non-trainable variables smaller than this stay whole: batch statistics, counters, seeds, metrics.
WHOLE_BELOW_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatForm:
    """A variable as a padded matrix with a row for each device, for one that has no dim the batch axis divides.

    The dims that model axes shard come first, one dim for each such axis; then one row for each device of
    the batch axis; the rest is flat, padded with zeros to fill the rows: `(model..., batch, columns)`.

    Attributes:
        shape: The shape of the whole variable.
        compute: Its compute layout.
        mesh_shape: Axis name to size.
    """

    shape: tuple[int, ...]
    compute: Axes
    mesh_shape: Mapping[str, int] = dataclasses.field(hash=False)

    @property
    def model_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, axis in enumerate(self.compute) if axis is not None)

    @property
    def model_sizes(self) -> tuple[int, ...]:
        return tuple(self.mesh_shape[str(self.compute[dim])] for dim in self.model_dims)

    @property
    def elements(self) -> int:
        """Elements of one device's part under the compute layout."""
        return math.prod(self.shape) // math.prod(self.model_sizes)

    @property
    def rows(self) -> int:
        return self.mesh_shape[BATCH_AXIS]

    @property
    def columns(self) -> int:
        return -(-self.elements // self.rows)

    @property
    def padding(self) -> int:
        """Elements added to fill the last row."""
        return self.rows * self.columns - self.elements

    @property
    def buffer_shape(self) -> tuple[int, ...]:
        return (*self.model_sizes, self.rows, self.columns)

    @property
    def buffer_axes(self) -> Axes:
        return (*(self.compute[dim] for dim in self.model_dims), BATCH_AXIS, None)

    @property
    def gathered_axes(self) -> Axes:
        """The buffer's layout once it is gathered over the batch axis."""
        return (*(self.compute[dim] for dim in self.model_dims), None, None)

    @property
    def split_shape(self) -> tuple[int, ...]:
        """The variable's shape with each model-sharded dim split in (axis size, rest)."""
        split: list[int] = []
        for dim, size in enumerate(self.shape):
            axis = self.compute[dim]
            split += [size] if axis is None else [self.mesh_shape[axis], size // self.mesh_shape[axis]]
        return tuple(split)

    @property
    def to_front(self) -> tuple[int, ...]:
        """The permutation of `split_shape` that brings the model axes to the front."""
        axis_positions = [dim + i for i, dim in enumerate(self.model_dims)]
        rest = [i for i in range(len(self.split_shape)) if i not in axis_positions]
        return (*axis_positions, *rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableLayout:
    """Where one variable lives at rest and how it is read.

    Attributes:
        spec: The variable.
        compute: Compute layout: the mesh axis of each dim when the forward pass reads it.
        sharded: Compute layout plus the batch axis on one dim; None when no dim divides or the axis is 1.
        flat: The padded form, when the batch axis divides no dim; else None.
        store_sharded: Whether the variable itself rests sharded over the batch axis (parameters: stage 3).
        update_sharded: Whether it is updated shard by shard (stages 1 to 3; the slots rest like this).
        reduce_scatter: Whether its gradient is reduce-scattered as soon as it exists (stages 2 and 3).
    """

    spec: VariableSpec
    compute: Axes
    sharded: Axes | None
    flat: FlatForm | None
    store_sharded: bool
    update_sharded: bool
    reduce_scatter: bool

    @property
    def splits(self) -> bool:
        """Whether there is anything to shard over the batch axis."""
        return self.sharded is not None or self.flat is not None

    @property
    def storage(self) -> Axes:
        """The storage layout, of the buffer for a padded variable."""
        if not self.store_sharded or not self.splits:
            return self.compute
        return self.flat.buffer_axes if self.flat is not None else self.sharded  # type: ignore[return-value]

    @property
    def storage_shape(self) -> tuple[int, ...]:
        return self.flat.buffer_shape if self.flat is not None and self.store_sharded else self.spec.shape

    def slot(self, spec: VariableSpec) -> "VariableLayout":
        """The layout of an optimizer slot of the same shape: it rests as the variable is updated."""
        return dataclasses.replace(self, spec=spec, store_sharded=self.update_sharded)


def plan_variable(
    spec: VariableSpec, *, layout_map: LayoutMap, mesh_shape: Mapping[str, int], zero_stage: int, slot: bool = False
) -> VariableLayout:
    """Decides the layout of one variable.

    Args:
        spec: The variable.
        layout_map: Which dims the model axes shard.
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        slot: Whether it is an optimizer variable, which is sharded from stage 1 on.

    Returns:
        The `VariableLayout`.

    Raises:
        LayoutError: Two patterns match, too many dims, or a sharded dim that its axis does not divide.
    """
    match = layout_map.match(spec)
    axes: Axes = match[1] if match else (None,) * len(spec.shape)
    if match is not None:
        _check_divides(spec, match[0], axes, mesh_shape)
    compute = tuple(None if axis == BATCH_AXIS else axis for axis in axes)
    batch = mesh_shape.get(BATCH_AXIS, 1)
    sharded, flat = None, None
    if batch > 1 and math.prod(spec.shape) > 1:
        dim = _batch_dim(spec.shape, compute, batch, preferred=axes.index(BATCH_AXIS) if BATCH_AXIS in axes else None)
        if dim is not None:
            sharded = tuple(BATCH_AXIS if i == dim else axis for i, axis in enumerate(compute))
        else:
            flat = FlatForm(shape=spec.shape, compute=compute, mesh_shape=mesh_shape)
    bytes_ = math.prod(spec.shape) * np.dtype(_numpy_name(spec.dtype)).itemsize
    eligible = slot or spec.trainable or bytes_ >= WHOLE_BELOW_BYTES
    stage = zero_stage if eligible else 0
    return VariableLayout(
        spec=spec,
        compute=compute,
        sharded=sharded,
        flat=flat,
        store_sharded=stage >= (1 if slot else 3),
        update_sharded=stage >= 1,
        reduce_scatter=stage >= 2,
    )


def _numpy_name(dtype: str) -> str:
    return "uint16" if dtype == "bfloat16" else "uint8" if dtype.startswith("float8") else dtype


def _batch_dim(shape: tuple[int, ...], compute: Axes, batch: int, preferred: int | None) -> int | None:
    """The dim to shard over the batch axis: the layout map's own choice, else the first one that divides."""
    candidates = [dim for dim, axis in enumerate(compute) if axis is None and shape[dim] % batch == 0 and shape[dim]]
    if preferred in candidates:
        return preferred
    return candidates[0] if candidates else None


def _check_divides(spec: VariableSpec, pattern: str, axes: Axes, mesh_shape: Mapping[str, int]) -> None:
    named = [axis for axis in axes if axis is not None]
    if len(named) != len(set(named)):
        raise LayoutError(
            f"An axis can shard one dim of a variable only. Variable: '{spec.path}' of shape={spec.shape}. "
            f"Received: axes={axes} for pattern '{pattern}'"
        )
    for dim, axis in enumerate(axes):
        # The batch axis may pick another dim, or pad; a model axis has to divide.
        if axis is not None and axis != BATCH_AXIS and spec.shape[dim] % mesh_shape[axis]:
            raise LayoutError(
                f"Axis '{axis}' of size {mesh_shape[axis]} does not divide dim {dim} of '{spec.path}', which has "
                f"size {spec.shape[dim]} (shape={spec.shape}). Change the layer's size to a multiple of "
                f"{mesh_shape[axis]}, shard another dim, or leave it out of the layout map. "
                f"Received: axes={axes} for pattern '{pattern}'"
            )


def unmatched_patterns(layout_map: LayoutMap, matched: set[str]) -> list[str]:
    """Patterns that matched no variable and are not optional."""
    return [pattern for pattern, rule in layout_map.items() if pattern not in matched and not rule.optional]


def split_host_value(value: np.ndarray, axes: Axes, mesh_shape: Mapping[str, int], location: Mapping[str, int]):
    """The piece of `value` that belongs to the device at `location` (axis name to index)."""
    index: list[slice] = []
    for dim, axis in enumerate(axes):
        if axis is None:
            index.append(slice(None))
        else:
            size = value.shape[dim] // mesh_shape[axis]
            index.append(slice(location[axis] * size, (location[axis] + 1) * size))
    return value[tuple(index)]


def flatten_host_value(value: np.ndarray, form: FlatForm) -> np.ndarray:
    """The padded buffer of a value on the host."""
    rows = value.reshape(form.split_shape).transpose(form.to_front).reshape(*form.model_sizes, form.elements)
    rows = np.pad(rows, [(0, 0)] * len(form.model_sizes) + [(0, form.padding)])
    return rows.reshape(form.buffer_shape)


def unflatten_host_value(buffer: np.ndarray, form: FlatForm) -> np.ndarray:
    """The value of a padded buffer on the host: the inverse of `flatten_host_value`."""
    rows = buffer.reshape(*form.model_sizes, form.rows * form.columns)[..., : form.elements]
    moved = tuple(form.split_shape[i] for i in form.to_front)
    return rows.reshape(moved).transpose(np.argsort(form.to_front)).reshape(form.shape)
