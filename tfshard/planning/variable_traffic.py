"""Predict the collectives of variables and their gradients over the batch axis in a training step, from their
layouts."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfshard import _private
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.config import Microbatches, ShardingConfig, ZeroStage
from tfshard.layouts.gradient_reduction import SentGradient
from tfshard.layouts.layout_map import VariableSpec
from tfshard.layouts.variable_layout import Axes, VariableLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a step.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"`, `"all-reduce"` or `"all-to-all"`.
        what: The path of the variable, `"group 3"`, or `"float32 gradients"`.
        axis: The mesh axis of the collective.
        count: The number of times that a step runs it.
        bytes: Bytes of the full tensor on one device: the result of a gather, the input of a reduction. None for
            activations without `inputs` for the plan: their bytes depend on the batch.
        formula: How `bytes` is computed.
        merges: True if DTensor may merge the collective with others that do not depend on it. `count` is then the
            maximum.
        at_most: True if `bytes` is a maximum: the actual bytes depend on the values of the batch.
    """

    kind: str
    what: str
    axis: str
    count: int
    bytes: int | None
    formula: str
    merges: bool = False
    at_most: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathers:
    """How a step gathers a variable or a group.

    Attributes:
        count: How often.
        itemsize: Bytes of an element that is gathered.
    """

    count: int = 1
    itemsize: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reductions:
    """How a step reduces gradients.

    Attributes:
        dtypes: The dtype of the gradient as it is reduced, by the variable's path. By default the dtype of the
            variable.
        scales_loss: True if the optimizer scales the loss. It then checks whether all gradients are finite, and updates
            in a branch.
    """

    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scales_loss: bool = False

    def dtype_of(self, spec: VariableSpec) -> str:
        """Return the dtype in which a variable's gradient is reduced."""
        return self.dtypes.get(spec.path, spec.dtype)

    def bytes_of(self, layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int:
        """Return the bytes of a variable's gradient that one device sends. A bfloat16 gradient is summed in float32
        (reductions.py)."""
        dtype = self.dtype_of(layout.spec)
        sent = "float32" if dtype == "bfloat16" else dtype
        return device_bytes(layout.spec.shape, layout.compute, mesh_shape, sent)


def inputs_of_microbatch(microbatches: Microbatches, inputs: Any, mesh_shape: Mapping[str, int]) -> Any:
    """Return the shapes and dtypes of one microbatch of `inputs`."""
    if microbatches.count == 1 or inputs is None:
        return inputs
    axes = MeshAxes.of(mesh_shape)

    def of_leaf(leaf: Any) -> Any:
        if not len(leaf.shape):
            return leaf
        rows = leaf.shape[0]
        devices = axes.sample_shards if rows % axes.sample_shards == 0 else 1
        count = variable_layout.divisor_from(rows // devices, microbatches.count)
        return keras.KerasTensor((rows // count, *leaf.shape[1:]), keras.backend.standardize_dtype(leaf.dtype))

    return keras.tree.map_structure(of_leaf, inputs)


def sum_bytes(microbatches: Microbatches, planned: Sequence[VariableLayout], mesh_shape: Mapping[str, int]) -> int:
    """Return the bytes in which a device sums the gradients of microbatches."""
    if microbatches.count == 1:
        return 0
    return sum(
        whole_bytes(each, mesh_shape) if microbatches.reduce_once else gradient_bytes(each, mesh_shape, scattered=True)
        for each in units(planned)
        if each.spec.trainable
    )


def _custom_in_microbatches(each: Collective, microbatches: Microbatches) -> Collective:
    """Return a collective of a custom reduction in a step with microbatches, from the collective without
    microbatches."""
    if microbatches.count == 1:
        return each
    if microbatches.reduce_once:
        return dataclasses.replace(each, count=1)
    formula = f"{each.formula}, in each of {microbatches.count} microbatches"
    return dataclasses.replace(each, count=each.count * microbatches.count, formula=formula)


def _in_microbatches(
    collectives: Sequence[Collective],
    planned: Sequence[VariableLayout],
    mesh_shape: Mapping[str, int],
    config: ShardingConfig,
) -> list[Collective]:
    """Return the collectives of a step with microbatches, from the collectives without microbatches."""
    microbatches, zero_stage = config.microbatches, config.zero_stage
    if microbatches.count == 1:
        return list(collectives)
    axis, found = MeshAxes.of(mesh_shape).data, []
    for each in collectives:
        again = zero_stage.shard_params if each.kind == "all-gather" else not microbatches.reduce_once
        formula = f"{each.formula}, in each of {microbatches.count} microbatches" if again else each.formula
        count = each.count * microbatches.count if again else 1 if each.kind != "all-gather" else each.count
        found.append(dataclasses.replace(each, count=count, formula=formula))
    assert axis is not None, "Nothing else is sent over it."
    if microbatches.reduce_once:
        found.append(
            Collective(
                kind="all-reduce",
                what="loss and metrics",
                axis=axis,
                count=microbatches.count,
                bytes=4,
                formula=f"loss and metrics over {axis}, in each of {microbatches.count} microbatches",
                merges=True,
            )
        )
        return found
    for layout in units(planned):
        if layout.flat is not None and layout.spec.trainable and zero_stage.shard_slots:
            name, formula = f"{unit_name(layout)}, gradients", f"bytes(buffer) over {axis}, when they are added up"
            bytes_ = whole_bytes(layout, mesh_shape)
            found.append(Collective(kind="all-gather", what=name, axis=axis, count=1, bytes=bytes_, formula=formula))
    return found


# Gradients are reduced in the dtypes of their variables.
PLAIN = Reductions()


def predict_collectives(
    planned: Sequence[VariableLayout],
    config: ShardingConfig,
    *,
    mesh_shape: Mapping[str, int],
    uses: Mapping[str, int] | None = None,
    gathers: Mapping[str, Gathers] | None = None,
    reductions: Reductions = PLAIN,
) -> tuple[Collective, ...]:
    """Predict the collectives of a training step over the batch axis.

    Stage 3 gathers each group and each variable that is stored sharded for the forward pass and, with
    `reshard_after_forward`, once more for the backward pass. Stages 1 and 2 gather the variables that devices have
    updated shard by shard. From stage 1 on, a gradient is reduce-scattered if its variable is outside of groups and
    sharded along one of its dims. On CPU, the reduce-scatter is an all-reduce and a local slice. DTensor merges all
    other gradients of one dtype in one all-reduce, with the loss and the metrics.

    An optimizer that scales the loss needs to know whether all gradients are finite. For it, the gradients of stage 1
    are reduced in full, and a flag is reduced if devices have different shards. The optimizer updates in a branch. On a
    mesh of several axes DTensor merges no reduction of this step (`tfshard.devices.merges`), including the metrics. A
    `GradientReduction` gives its own collectives.

    The prediction excludes further reductions of a custom step. `statistics_traffic` predicts the traffic of
    normalization over a batch, which includes the gradients of its scale and offset.

    Args:
        planned: The layout of each variable, groups included.
        config: The settings.
        mesh_shape: Axis name to size.
        uses: How often the forward pass uses a variable, by path. By default the uses of layers in a functional model.
        gathers: How stage 3 gathers a variable or a group, by its name here (`gather_counts`); by default once.
        reductions: How gradients are reduced (`gradient_dtypes`).
    """
    planned = [each for each in planned if each.kind is None]  # `VariableKind.collectives` predicts the others.
    mesh_axes = MeshAxes.of(mesh_shape)
    axis = mesh_axes.data
    collectives = _flags(planned, mesh_axes) if reductions.scales_loss else []
    if axis is None or mesh_axes.data_size == 1:
        return tuple(collectives)
    found = functools.partial(Collective, axis=axis)
    stays_alone = reductions.scales_loss and mesh_axes.shards_by_several
    for layout in units(planned):
        if is_gathered(layout, config.zero_stage):
            name, itemsize = unit_name(layout), variable_layout.itemsize(layout.spec.dtype)
            how = Gathers(itemsize=itemsize)
            if config.zero_stage.shard_params:
                how = (gathers or {}).get(name, how)
            what, coded = "buffer" if layout.flat is not None else "variable", coded_bytes(layout, mesh_shape)
            if coded is not None:
                what += f" in {layout.gather_dtype}, with scales"
            elif how.itemsize != itemsize:
                what += " in the compute dtype"
            when = "before its use" if how.count == 1 else "each time it is unsharded"
            when = when if config.zero_stage.shard_params else "after the update"
            collectives.append(
                found(
                    kind="all-gather",
                    what=name,
                    count=how.count,
                    bytes=coded or whole_bytes(layout, mesh_shape) * how.itemsize // itemsize,
                    formula=f"bytes({what}) over {axis}, {when}",
                )
            )
    merged: dict[str, list[int]] = {"float32": []}
    custom: list[Collective] = []
    for layout in planned:
        if not layout.spec.trainable or _comes_reduced(layout, mesh_axes):
            continue
        bytes_ = reductions.bytes_of(layout, mesh_shape)
        scattered, together = _contributions(layout, uses or {})
        if reductions.scales_loss and not layout.reduce_scatter:
            scattered, together = 0, scattered + together
        if layout.reduction is not None:
            custom += _custom(layout, layout.reduction.sends(layout, mesh_axes), scattered + together, mesh_axes)
            continue
        if scattered:
            collectives.append(
                found(
                    kind="reduce-scatter",
                    what=layout.spec.path,
                    count=scattered,
                    bytes=bytes_,
                    formula=f"bytes(gradient) over {axis}, for each use of the layer",
                )
            )
        if together and variable_layout.is_added_up_by_replicas(layout, mesh_axes):
            collectives += by_replicas(layout.spec.path, bytes_, together, mesh_axes)
            continue
        if stays_alone and together:
            collectives.append(
                found(
                    kind="all-reduce",
                    what=layout.spec.path,
                    count=together,
                    bytes=bytes_,
                    formula=f"bytes(gradient) over {axis}, for each use of the layer, with the loss scaled",
                )
            )
            continue
        if together:
            merged.setdefault(reductions.dtype_of(layout.spec), []).append(together * bytes_)
    for dtype, sizes in merged.items():
        scalars = ", with loss and metrics" if dtype == "float32" else ""
        collectives.append(
            found(
                kind="all-reduce",
                what=f"{dtype} gradients",
                count=1,
                bytes=sum(sizes),
                formula=f"bytes(all other {dtype} gradients) over {axis}{scalars}",
            )
        )
    return (
        *_in_microbatches(collectives, planned, mesh_shape, config),
        *(_custom_in_microbatches(each, config.microbatches) for each in custom),
    )


def by_replicas(path: str, bytes_: int, count: int, mesh_axes: MeshAxes) -> list[Collective]:
    """Return the collectives of a gradient that is reduce-scattered in each replica, all-reduced between replicas, and
    gathered."""
    assert mesh_axes.data is not None and mesh_axes.replica is not None
    when = "for each use of the layer"
    return [
        Collective(
            kind=kind, what=path, axis=axis, count=count, bytes=sent, formula=f"bytes({what}) over {axis}, {when}"
        )
        for kind, axis, sent, what in (
            ("all-to-all", mesh_axes.data, bytes_, "gradient"),
            ("all-reduce", mesh_axes.replica, -(-bytes_ // mesh_axes.shards), "shard of the gradient"),
            ("all-gather", mesh_axes.data, bytes_, "gradient"),
        )
    ]


def _custom(layout: VariableLayout, sends: Sequence[SentGradient], count: int, mesh_axes: MeshAxes) -> list[Collective]:
    """Return the collectives of a gradient with a custom reduction."""
    found, path = [], layout.spec.path
    for sent in sends:
        axis = mesh_axes.replica if sent.between_replicas else mesh_axes.data
        assert axis is not None
        formula = f"bytes({sent.what}) over {axis}, for each use of the layer"
        found.append(Collective(kind=sent.kind, what=path, axis=axis, count=count, bytes=sent.bytes, formula=formula))
    return found


def _flags(planned: Sequence[VariableLayout], mesh_axes: MeshAxes) -> list[Collective]:
    """Return the reductions of the flags that say whether gradients are finite, for gradients with different shards on
    the devices. The flags are merged on one axis."""
    waiting = []
    for layout in planned:
        axes = [axis for axis in layout.gradient if axis is not None and mesh_axes[axis] > 1]
        if layout.spec.trainable and axes:
            waiting.append((layout.spec.path, axes[0]))
    if not mesh_axes.shards_by_several:
        waiting = waiting[:1]
    return [
        Collective(
            kind="all-reduce",
            what=path,
            axis=axis,
            count=1,
            bytes=_FLAG_BYTES,
            formula="4 bytes: the flag that all gradients are finite",
        )
        for path, axis in waiting
    ]


_FLAG_BYTES = 4


def _contributions(layout: VariableLayout, known_uses: Mapping[str, int]) -> tuple[int, int]:
    """Return how many contributions to a variable's gradient are reduce-scattered, and how many join the merged
    all-reduce.

    Each use of a layer in a functional model adds a contribution, which DTensor reduces separately.
    """
    uses = known_uses.get(layout.spec.path) or max(1, len(_private.layer_uses(layout.spec.layer)))
    if not layout.update_sharded or layout.sharded is None or joins(layout, uses):
        return 0, uses
    return uses, 0


def _comes_reduced(layout: VariableLayout, mesh_axes: MeshAxes) -> bool:
    """Return whether the sums that a layer sends include the reduction of its gradient (`statistics_traffic`)."""
    layer = layout.spec.layer
    is_by_batch = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    return is_by_batch and not mesh_axes.has_tensor_parallelism


def joins(layout: VariableLayout, uses: int) -> bool:
    """Return whether the contributions to a sharded gradient join the merged all-reduce. At stage 1, several
    contributions are summed before the scatter, so DTensor cannot fuse the reductions with the scatter.

    Args:
        layout: The layout of a variable that is updated in shards.
        uses: How often it is used.
    """
    return uses > 1 and not layout.reduce_scatter


def updated_bytes(planned: Sequence[VariableLayout], *, mesh_shape: Mapping[str, int]) -> int:
    """Return the bytes on one device of the parameters in their update layouts."""
    updated = [each.slot(each.spec) for each in units(planned) if each.spec.trainable]
    return sum(device_bytes(each.storage_shape, each.storage, mesh_shape, each.spec.dtype) for each in updated)


def is_gathered(layout: VariableLayout, zero_stage: ZeroStage) -> bool:
    """Return True if a step gathers a variable: to read its shards, or after it has updated them."""
    if layout.kind is not None or not layout.splits:
        return False
    return layout.store_sharded if zero_stage.shard_params else layout.update_sharded and layout.spec.trainable


def units(planned: Sequence[VariableLayout]) -> list[VariableLayout]:
    """Return the units of communication: variables outside of groups, and the first member of each group."""
    return [layout for layout in planned if layout.group is None or layout.member == 0]


def members_of(planned: Sequence[VariableLayout]) -> dict[str, list[VariableLayout]]:
    """Return the variables of each unit, by the unit's name."""
    found: dict[str, list[VariableLayout]] = {}
    for layout in planned:
        found.setdefault(unit_name(layout), []).append(layout)
    return found


def unit_name(layout: VariableLayout) -> str:
    return layout.spec.path if layout.group is None else f"group {layout.group}"


def device_bytes(shape: tuple[int, ...], axes: Axes, mesh_shape: Mapping[str, int], dtype: str) -> int:
    """Return the bytes that one device holds of a tensor in a layout."""
    elements = math.prod(shape) // math.prod(mesh_shape[axis] for axis in axes if axis is not None)
    return elements * variable_layout.itemsize(dtype)


def resting_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int:
    """Return the bytes that one device stores of a variable, or of its buffer, between steps."""
    shares = math.prod(mesh_shape[axis] for axis in layout.storage if axis is not None)
    return layout.stored_bytes_of(math.prod(layout.storage_shape) // shares)


def whole_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int:
    """Return the bytes of a variable, or of its buffer, on one device after the gather over the batch axis."""
    return device_bytes(layout.gathered_shape, layout.gathered, mesh_shape, layout.spec.dtype)


def coded_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int | None:
    """Return the bytes of the codes in which a variable, or its buffer, is gathered; None for an exact gather."""
    if layout.gather_dtype is None or layout.storage == layout.gathered:
        return None
    shares = math.prod(mesh_shape[axis] for axis in layout.storage if axis is not None)
    shard = math.prod(layout.storage_shape) // shares
    blocks = -(-shard // variable_layout.BLOCK_ELEMENTS)
    return MeshAxes.of(mesh_shape).shards * blocks * variable_layout.BLOCK_BYTES


def gradient_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int], *, scattered: bool) -> int:
    """Return the bytes of a gradient on one device, as a shard or as the backward pass makes it.

    The gradient of a variable of a `PartialKind` has the parts that the step read, which count as activations.
    """
    if layout.partial_kind is not None:
        return 0
    if scattered and layout.splits:
        shape, axes = layout.spec.shape, layout.sharded
        if layout.flat is not None:
            shape, axes = layout.flat.buffer_shape, layout.flat.buffer_axes
        assert axes is not None
        return device_bytes(shape, axes, mesh_shape, layout.spec.dtype)
    if layout.grouped:
        return whole_bytes(layout, mesh_shape)
    return device_bytes(layout.spec.shape, layout.compute, mesh_shape, layout.spec.dtype)
