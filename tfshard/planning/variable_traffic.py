"""What a training step sends of variables and their gradients over the batch axis, derived from their layouts."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import keras

from tfshard import _private
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import Axes, VariableLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """What the devices send each other in a step.

    Attributes:
        kind: `"all-gather"`, `"reduce-scatter"` or `"all-reduce"`.
        what: The path of the variable, `"group 3"`, or `"float32 gradients"`.
        axis: The mesh axis over which it runs.
        count: How often in a step.
        bytes: Of the whole tensor on one device: what a gather gives, what a reduction takes. None for activations
            when no `inputs` were given to plan for: they depend on the batch.
        formula: How `bytes` comes about.
        merges: Whether DTensor may merge it with others that do not depend on it: `count` is then the most there are.
    """

    kind: str
    what: str
    axis: str
    count: int
    bytes: int | None
    formula: str
    merges: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathers:
    """How a step gathers a variable or a group.

    Attributes:
        count: How often.
        itemsize: Bytes of an element that is gathered.
    """

    count: int = 1
    itemsize: int


def predict_collectives(
    planned: Sequence[VariableLayout],
    *,
    mesh_shape: Mapping[str, int],
    zero_stage: int,
    uses: Mapping[str, int] | None = None,
    gathers: Mapping[str, Gathers] | None = None,
) -> tuple[Collective, ...]:
    """What a training step sends over the batch axis.

    Stage 3 gathers each group and each variable that rests sharded for the forward pass, and, with
    `reshard_after_forward`, once more for the backward pass. Stages 1 and 2 gather what was updated shard by shard.
    From stage 1 on the gradient of a variable that stands alone and is cut along one of its dims is reduce-scattered
    (on CPU an all-reduce and a local slice). All other gradients of one dtype are merged by DTensor in one all-reduce,
    which the loss and the metrics join; but at stage 3 parts of gradients for which the backward pass waits may stay
    alone.

    Not predicted: what a custom step reduces besides, and batch statistics.

    Args:
        planned: The layout of each variable, groups included.
        mesh_shape: Axis name to size.
        zero_stage: 0 to 3.
        uses: How often the forward pass uses a variable, by path. By default what a functional model tells of its
            layers.
        gathers: How stage 3 gathers a variable or a group, by its name here (`gather_counts`); by default once.
    """
    mesh_axes = MeshAxes.of(mesh_shape)
    axis = mesh_axes.data
    if axis is None or mesh_axes.data_size == 1:
        return ()
    found = functools.partial(Collective, axis=axis)
    collectives = []
    for layout in units(planned):
        if is_gathered(layout, zero_stage):
            name, itemsize = unit_name(layout), variable_layout.itemsize(layout.spec.dtype)
            how = (
                (gathers or {}).get(name, Gathers(itemsize=itemsize)) if zero_stage == 3 else Gathers(itemsize=itemsize)
            )
            what = "buffer" if layout.flat is not None else "variable"
            what += " in the compute dtype" if how.itemsize != itemsize else ""
            when = "before its use" if how.count == 1 else "for each of its turns"
            collectives.append(
                found(
                    kind="all-gather",
                    what=name,
                    count=how.count,
                    bytes=whole_bytes(layout, mesh_shape) * how.itemsize // itemsize,
                    formula=f"bytes({what}) over {axis}, {when if zero_stage == 3 else 'after the update'}",
                )
            )
    merged: dict[str, list[int]] = {"float32": []}
    for layout in planned:
        if not layout.spec.trainable:
            continue
        bytes_ = device_bytes(layout.spec.shape, layout.compute, mesh_shape, layout.spec.dtype)
        scattered, together = _contributions(layout, uses or {})
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
        if scattered and together and zero_stage == 3:
            collectives.append(
                found(
                    kind="all-reduce",
                    what=layout.spec.path,
                    count=together,
                    bytes=bytes_,
                    formula=f"bytes(gradient) over {axis}, for each use that is rearranged before it is scattered",
                    merges=True,
                )
            )
            continue
        merged.setdefault(layout.spec.dtype, []).append(together * bytes_)
    for dtype, parts in merged.items():
        scalars = ", with loss and metrics" if dtype == "float32" else ""
        collectives.append(
            found(
                kind="all-reduce",
                what=f"{dtype} gradients",
                count=1,
                bytes=sum(parts),
                formula=f"bytes(all other {dtype} gradients) over {axis}{scalars}",
            )
        )
    return tuple(collectives)


def _contributions(layout: VariableLayout, known_uses: Mapping[str, int]) -> tuple[int, int]:
    """How many parts of a variable's gradient are reduce-scattered, and how many join the merged all-reduce.

    Each use of a layer in a functional model adds a part, which DTensor reduces by itself. The part of an embedding
    lookup is summed by rows first, so with tied embeddings one of two is fused with its scatter. At stage 1 the parts
    are added up before the scatter, so that more than one are not fused.
    """
    uses = known_uses.get(layout.spec.path) or max(1, len(_private.layer_uses(layout.spec.layer)))
    if not layout.update_sharded or layout.sharded is None or (uses > 1 and not layout.reduce_scatter):
        return 0, uses
    if isinstance(layout.spec.layer, keras.layers.Embedding) and layout.compute[0] is not None:
        return 0, uses  # vocabulary.lookup rearranges what it reduced, and adds the tied logits' part to it.
    if uses > 1 and isinstance(layout.spec.layer, keras.layers.Embedding):
        return 1, uses - 1
    return uses, 0


def updated_bytes(planned: Sequence[VariableLayout], *, mesh_shape: Mapping[str, int]) -> int:
    """Bytes on one device of the parameters in the layouts in which they are updated."""
    updated = [each.slot(each.spec) for each in units(planned) if each.spec.trainable]
    return sum(device_bytes(each.storage_shape, each.storage, mesh_shape, each.spec.dtype) for each in updated)


def is_gathered(layout: VariableLayout, zero_stage: int) -> bool:
    """Whether a step gathers it: at stage 3 to read it, at stages 1 and 2 after the update."""
    return layout.splits and (
        layout.store_sharded if zero_stage == 3 else layout.update_sharded and layout.spec.trainable
    )


def units(planned: Sequence[VariableLayout]) -> list[VariableLayout]:
    """What is communicated as one: variables that stand alone, and of each group its first member."""
    return [layout for layout in planned if layout.group is None or layout.member == 0]


def members_of(planned: Sequence[VariableLayout]) -> dict[str, list[VariableLayout]]:
    """The variables of each unit, by its name."""
    found: dict[str, list[VariableLayout]] = {}
    for layout in planned:
        found.setdefault(unit_name(layout), []).append(layout)
    return found


def unit_name(layout: VariableLayout) -> str:
    return layout.spec.path if layout.group is None else f"group {layout.group}"


def device_bytes(shape: tuple[int, ...], axes: Axes, mesh_shape: Mapping[str, int], dtype: str) -> int:
    """Bytes that one device holds of a tensor in a layout."""
    elements = math.prod(shape) // math.prod(mesh_shape[axis] for axis in axes if axis is not None)
    return elements * variable_layout.itemsize(dtype)


def resting_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int:
    """Bytes that one device holds of a variable, or of its buffer, between steps."""
    shares = math.prod(mesh_shape[axis] for axis in layout.storage if axis is not None)
    return layout.bytes_at_rest(math.prod(layout.storage_shape) // shares)


def whole_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int]) -> int:
    """Bytes of a variable, or of its buffer, on one device once it is gathered over the batch axis."""
    return device_bytes(layout.storage_shape, layout.gathered, mesh_shape, layout.spec.dtype)


def gradient_bytes(layout: VariableLayout, mesh_shape: Mapping[str, int], *, scattered: bool) -> int:
    """Bytes of a gradient on one device, as a shard or as it comes out of the backward pass."""
    if scattered and layout.splits:
        shape, axes = layout.spec.shape, layout.sharded
        if layout.flat is not None:
            shape, axes = layout.flat.buffer_shape, layout.flat.buffer_axes
        assert axes is not None
        return device_bytes(shape, axes, mesh_shape, layout.spec.dtype)
    if layout.grouped:
        return whole_bytes(layout, mesh_shape)
    return device_bytes(layout.spec.shape, layout.compute, mesh_shape, layout.spec.dtype)
