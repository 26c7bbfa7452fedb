"""Predict the collectives over a context axis in a step: of queries, keys, values, results and masks of attention."""

import collections
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
from tfshard.layouts.config import ContextAttention
from tfshard.layouts.placement import ModelPlacement
from tfshard.layouts.variable_layout import VariableLayout
from tfshard.operations import attention, block_masks, context_parallel, contexts
from tfshard.operations.contexts import RecordedAttention
from tfshard.planning import activation_traffic
from tfshard.planning.variable_traffic import Collective

_HEADS = "bytes(local queries, keys, values or result), forward and backward: heads for positions"
_KEYS = "bytes(keys or values) of a device's samples, forward and backward"
_KEY_GRADIENTS = "bytes(keys or values) of a device's samples: sums of their gradients"
_MASK = "4 bytes for each position of the local samples: padding masks of attention"


def plan(model: ModelOrSpecs, placement: ModelPlacement, inputs: Any = None) -> tuple[tuple[Collective, ...], str]:
    """Return the collectives over the context axis in a step, and the reason if they are unknown, or "".

    Args:
        model: A built `keras.Model`. The result is unknown for a list of specs.
        placement: The layouts of its variables.
        inputs: The inputs of a step, for bytes.
    """
    axes = placement.mesh_shape
    if axes.contexts == 1:
        return (), ""
    if not isinstance(model, keras.Model):
        return (), "the traffic over a context axis is known only for a keras.Model"
    try:
        with context_parallel.recorded_calls(model, None, is_passive=True) as recorder:
            graph = trace(model, inputs)
    except LayoutError as e:
        return (), str(e)
    samples = 0 if inputs is None else min(int(leaf.shape[0]) for leaf in keras.tree.flatten(inputs))
    if samples % axes.sample_shards:
        return (), ""  # Every device computes the full batch.
    found: list[Collective] = []
    for number, call in enumerate(recorder.attentions):
        shards = _shards_of_heads(call.query, graph, placement.variables, axes)
        sent = _sent(call, shards, axes, gathers=placement.config.context_attention is ContextAttention.GATHER)
        found += [
            Collective(
                kind=kind, what=f"attention {number + 1}", axis=axes.context or "", count=count,
                bytes=None if inputs is None else bytes_, formula=formula,
            )
            for (kind, bytes_, formula), count in collections.Counter(sent).items()
        ]  # fmt: skip
    return tuple(found), ""


def _sent(call: RecordedAttention, shards: int, axes: MeshAxes, *, gathers: bool) -> list[tuple[str, int, str]]:
    """Return the kind, the bytes and the formula of each collective of a call of attention.

    Args:
        call: The call.
        shards: The number of devices over which the model axes shard the heads.
        axes: The axes of the mesh.
        gathers: True if devices gather keys and values.
    """
    rows, length, heads, width = call.query.shape
    key_heads, value_width = call.key.shape[2], call.value.shape[3]
    if shards > 1 and key_heads % shards:
        key_heads = heads
    tokens, item = rows * length // axes.sample_shards, call.query.dtype.size
    if gathers:
        sizes = [tokens * key_heads // shards * each * item for each in (width, value_width)]
        found = [("all-gather", size, _KEYS) for size in sizes] * 2
        found += [("all-to-all", size, _KEY_GRADIENTS) for size in sizes]
    else:
        repeats = attention.heads_of_context(heads // shards, key_heads // shards, axes.contexts)
        if repeats is None:
            return []
        widths = [heads * width, *(key_heads * repeats * each for each in (width, value_width)), heads * value_width]
        found = [("all-to-all", tokens // axes.contexts * each // shards * item, _HEADS) for each in widths] * 2
    if call.mask is not None:
        parts = _gathered_parts(call, of_keys_only=gathers)
        found += [("all-gather", part * rows // axes.sample_shards, _MASK) for part in parts]
    return found


def _gathered_parts(call: RecordedAttention, *, of_keys_only: bool) -> list[int]:
    """Return the bytes, for each sample, of each part of a mask that devices gather."""
    mask = tf.convert_to_tensor(call.mask)
    shape = (call.query.shape[0], call.query.shape[2], call.query.shape[1], call.key.shape[1])
    with call.query.graph.as_default():
        by_block, parts = block_masks.mask_of(mask, shape)
        found = block_masks.of_full_sequences(by_block, parts, call.query.shape[0])
    left = [] if found is None else found[1]
    gathered = [each for each in left if each.shape[3] > 1 or (each.shape[2] > 1 and not of_keys_only)]
    return [max(each.shape[2:]) * contexts.gathered_dtype(each.dtype).size for each in gathered]


def _shards_of_heads(query: tf.Tensor, graph: ModelGraph, planned: Sequence[VariableLayout], axes: MeshAxes) -> int:
    """Return the number of devices over which the model axes shard the heads of queries."""
    sizes = []
    for axis in axes.tensor:
        dims = variable_layout.sharded_dims(planned, axis) if axes[axis] > 1 else {}
        if dims and activation_traffic.sharded_dim(graph, dims, axes[axis], query.name) == 2:
            sizes.append(axes[axis])
    return math.prod(sizes)
