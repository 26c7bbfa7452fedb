"""Predict what devices of a context axis send each other in a step: heads for positions, and parts of masks."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfshard.errors import LayoutError
from tfshard.graph.model_graph import ModelGraph, trace
from tfshard.graph.model_specs import ModelOrSpecs
from tfshard.layouts import variable_layout
from tfshard.layouts.axes import MeshAxes
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.operations import attention, block_masks, context_parallel
from tfshard.operations.contexts import RecordedAttention
from tfshard.planning import activation_traffic
from tfshard.planning.variable_traffic import Collective

_HEADS = "bytes(local queries, keys, values or result), forward and backward: heads for positions"
_MASK = "4 bytes for each position of the local samples: padding masks of attention"


def plan(
    model: ModelOrSpecs, planned: Sequence[VariableLayout], mesh_axes: MeshAxes, inputs: Any = None
) -> tuple[tuple[Collective, ...], str]:
    """Return the collectives over the context axis in a step, and why they are unknown; "" if they are known.

    Args:
        model: A built `keras.Model`. The result is unknown for a list of specs.
        planned: The layouts of its variables.
        mesh_axes: The axes of the mesh.
        inputs: The inputs of a step, for bytes.
    """
    if mesh_axes.contexts == 1:
        return (), ""
    if not isinstance(model, keras.Model):
        return (), "the traffic over a context axis is known only for a keras.Model"
    try:
        with context_parallel.recorded_calls(model, None, is_passive=True) as recorder:
            graph = trace(model, inputs)
    except LayoutError as e:
        return (), str(e)
    samples = 0 if inputs is None else min(int(leaf.shape[0]) for leaf in keras.tree.flatten(inputs))
    if samples % mesh_axes.sample_shards:
        return (), ""  # Every device computes the full batch.
    found: list[Collective] = []
    for number, call in enumerate(recorder.attentions):
        found += _of_call(call, number, graph, planned, mesh_axes, has_bytes=inputs is not None)
    return tuple(found), ""


def _of_call(
    call: RecordedAttention,
    number: int,
    graph: ModelGraph,
    planned: Sequence[VariableLayout],
    axes: MeshAxes,
    *,
    has_bytes: bool,
) -> list[Collective]:
    assert axes.context is not None
    model = _shards_of_heads(call.query, graph, planned, axes)
    heads, key_heads = call.query.shape[2], call.key.shape[2]
    if model > 1 and key_heads % model:
        key_heads = heads
    repeats = attention.heads_of_context(heads // model, key_heads // model, axes.contexts)
    if repeats is None:
        return []
    rows, length, _, width = call.query.shape
    tokens = rows * length // axes.data_size
    item = call.query.dtype.size
    widths = [heads * width, key_heads * repeats * width, key_heads * repeats * call.value.shape[3]]
    sizes = [tokens * each // model * item for each in (*widths, heads * call.value.shape[3])]
    name = f"attention {number + 1}"

    def sent(kind: str, count: int, bytes_: int, formula: str) -> Collective:
        return Collective(
            kind=kind, what=name, axis=axes.context or "", count=count, bytes=bytes_ if has_bytes else None,
            formula=formula,
        )  # fmt: skip

    by_size: dict[int, int] = {}
    for size in sizes:
        by_size[size] = by_size.get(size, 0) + 2
    found = [sent("all-to-all", count, size, _HEADS) for size, count in by_size.items()]
    if call.mask is not None:
        parts = _gathered_parts(call)
        found += [sent("all-gather", 1, part * rows // axes.sample_shards, _MASK) for part in parts]
    return found


def _gathered_parts(call: RecordedAttention) -> list[int]:
    """Return the bytes, for each sample, of each part of a mask that devices gather."""
    mask = tf.convert_to_tensor(call.mask)
    shape = (call.query.shape[0], call.query.shape[2], call.query.shape[1], call.key.shape[1])
    with call.query.graph.as_default():
        by_block, parts = block_masks.mask_of(mask, shape)
        found = block_masks.of_full_sequences(by_block, parts, call.query.shape[0])
    left = [] if found is None else found[1]
    sizes = [max(each.shape[2:]) * (each.dtype.size if each.dtype.size in (4, 8) else 4) for each in left]
    return [size for size, each in zip(sizes, left, strict=True) if max(each.shape[2:]) > 1]


def _shards_of_heads(query: tf.Tensor, graph: ModelGraph, planned: Sequence[VariableLayout], axes: MeshAxes) -> int:
    """Return by how many devices the model axes shard the heads of queries."""
    sizes = []
    for axis in axes.tensor:
        dims = variable_layout.sharded_dims(planned, axis) if axes[axis] > 1 else {}
        if dims and activation_traffic.sharded_dim(graph, dims, axes[axis], query.name) == 2:
            sizes.append(axes[axis])
    return math.prod(sizes)
