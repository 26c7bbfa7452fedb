"""Group small variables that share a buffer, as a `GroupPolicy` says.

Pure Python over layouts: the same input gives the same groups on every client.
"""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.config import GroupPolicy
from tfshard.layouts.variable_layout import FlatForm, FlatMember, VariableLayout


def group(
    policy: GroupPolicy, planned: Sequence[VariableLayout], *, mesh_shape: Mapping[str, int]
) -> tuple[VariableLayout, ...]:
    """Group the small variables of a model.

    Trained variables are grouped at every stage, scalars included. Untrained variables are grouped only if parameters
    are stored sharded and the group has at least `variable_layout.REPLICATED_BELOW_BYTES`. Only floating-point dtypes
    and one-byte integers (the dtypes of quantized kernels) are grouped. A group has at least two members, and its
    variables at least `policy.min_group_bytes`.

    Args:
        policy: The sizes of variables and groups.
        planned: The layout of each variable alone, in the order of the model's layers, without slots. Slots are stored
            like their parameters.
        mesh_shape: Axis name to size.

    Returns:
        The layouts in the same order. The layouts of members have `flat`, `group` and `member` set.
    """
    mesh_axes = MeshAxes.of(mesh_shape)
    # A small untrained variable is stored in full at every stage. A variable of a kind is sharded at every stage.
    shard_params = any(layout.store_sharded for layout in planned if layout.kind is None)
    open_groups: dict[Hashable, _OpenGroup] = {}
    groups: dict[Hashable, list[_OpenGroup]] = {}
    for index, layout in enumerate(planned):
        if not may_group(policy, layout, shard_params=shard_params):
            continue
        trained = layout.spec.trainable
        # A layout map may store some of the trained variables sharded.
        stored = trained and (layout.store_sharded, layout.update_sharded)
        dtypes = (layout.spec.dtype, layout.slot_dtype, layout.gather_dtype)
        key = (dtypes, frozenset(layout.compute) - {None}, trained, stored)
        alone = _OpenGroup(mesh_axes)
        if not alone.add(index, layout, policy.max_group_bytes):
            continue
        if key not in open_groups or not open_groups[key].add(index, layout, policy.max_group_bytes):
            open_groups[key] = alone
            groups.setdefault(key, []).append(alone)
    result = list(planned)
    joined = [each for alike in groups.values() for each in _joined(policy, alike, planned)]
    kept = [each for each in joined if each.worth_it(planned) and each.bytes(planned) >= policy.min_group_bytes]
    kept.sort(key=lambda each: each.indices[0])
    for number, each in enumerate(kept):
        form = FlatForm(members=tuple(each.members), mesh_shape=mesh_axes, word=each.word)
        for member, index in enumerate(each.indices):
            layout = planned[index]
            trained = layout.spec.trainable
            result[index] = dataclasses.replace(
                layout,
                sharded=None,
                flat=form,
                # A small untrained variable is stored in full alone; a group of them is worth sharding.
                store_sharded=layout.store_sharded or not trained,
                update_sharded=layout.update_sharded or not trained,
                group=number,
                member=member,
            )
    return tuple(result)


def may_group(policy: GroupPolicy, layout: VariableLayout, *, shard_params: bool) -> bool:
    """Return True if a variable may join a group.

    Args:
        policy: The sizes of variables and groups.
        layout: The layout of the variable alone.
        shard_params: True if parameters are stored sharded.
    """
    bytes_ = variable_layout.spec_bytes(layout.spec)
    # Scales of quantized kernels take a thousandth of the kernels' bytes, and a step uses both at the same time. A
    # group of scales would need gathers in addition to the gathers of the kernels.
    is_scale = not layout.spec.trainable and layout.spec.path.endswith(("_scale", "_zero", "/g_idx"))
    fits = layout.spec.dtype.startswith(("float", "bfloat")) or variable_layout.is_in_bytes(layout.spec.dtype)
    is_alone = is_scale or layout.kind is not None
    return (
        fits and not is_alone and 0 < bytes_ < policy.group_threshold_bytes and (layout.spec.trainable or shard_params)
    )


def _joined(
    policy: GroupPolicy, groups: "Sequence[_OpenGroup]", planned: Sequence[VariableLayout]
) -> "list[_OpenGroup]":
    """Return groups of one kind after small groups have joined the group before them."""
    result: list[_OpenGroup] = []
    for each in groups:
        if result and min(each.bytes(planned), result[-1].bytes(planned)) < policy.min_group_bytes:
            for index in each.indices:
                result[-1].add(index, planned[index], None)
        else:
            result.append(each)
    return result


class _OpenGroup:
    """A group that is being filled. `add` takes constant time."""

    def __init__(self, mesh_shape: MeshAxes):
        self.mesh_shape = mesh_shape
        self.rows = mesh_shape.shards
        self.indices: list[int] = []
        self.members: list[FlatMember] = []
        self.word = 1

    def add(self, index: int, layout: VariableLayout, max_bytes: int | None) -> bool:
        """Add a variable and return True, unless the buffer would exceed `max_bytes`, if it is given."""
        itemsize = variable_layout.itemsize(layout.spec.dtype)
        member = FlatMember.after(self.members, layout.spec.shape, layout.compute, self.mesh_shape, itemsize)
        shards = math.prod(self.mesh_shape[axis] for axis in layout.compute if axis is not None)
        word = variable_layout.word_elements(itemsize)
        columns = -(-member.end // (self.rows * word)) * word
        if max_bytes is not None and shards * self.rows * columns * itemsize > max_bytes:
            return False
        self.indices.append(index)
        self.members.append(member)
        self.word = word
        return True

    def bytes(self, planned: Sequence[VariableLayout]) -> int:
        """Return the bytes of the group's variables, without padding."""
        return sum(variable_layout.spec_bytes(planned[index].spec) for index in self.indices)

    def worth_it(self, planned: Sequence[VariableLayout]) -> bool:
        if len(self.members) < 2:
            return False
        is_trained = planned[self.indices[0]].spec.trainable
        return is_trained or self.bytes(planned) >= variable_layout.REPLICATED_BELOW_BYTES
