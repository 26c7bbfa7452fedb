"""Attention in blocks, in place of the full scores that Keras and KerasHub compute (online_softmax.py).

While a step is traced, `keras.ops.dot_product_attention` computes in blocks, and so do the attention layers that call
it. KerasHub's own layers compute scores by themselves. A table has the form of each, and a patch on the layer calls
attention in blocks. Each device computes its rows of the batch, and its heads if a model axis shards them: no tensor
moves. In a compiled block (compiled_blocks.py) the program of the block contains the loops.

What cannot be computed in blocks is computed as before, and `strategy.report` says why.
"""

import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching
from tfshard.errors import UnsupportedLayerError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.config import AttentionChoice, ContextAttention
from tfshard.layouts.sequence_chunks import SequenceChunks
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import block_masks, contexts, layer_patch, online_softmax, vocabulary
from tfshard.operations.block_masks import BlockMask
from tfshard.operations.layer_patch import ATTENTION
from tfshard.operations.local_map import local_map
from tfshard.operations.online_softmax import Attention
from tfshard.storage import steps

# Pairs of a query and a key, from which "auto" computes in blocks.
LEAST_PAIRS = 1024 * 1024


def install(model: keras.Model, mesh: dtensor.Mesh) -> None:
    """Patch a model's attention layers: they compute in blocks, or note why not."""
    for layer in _private.flatten_layers(model):
        if is_attention(layer):
            layer_patch.apply(ATTENTION, layer, functools.partial(AttentionCall, weakref.ref(layer), mesh))


def is_attention(layer: keras.Layer) -> bool:
    """Return whether a layer computes attention in the way of Keras's layers."""
    return callable(getattr(layer, "_compute_attention", None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRun:
    """How an attention layer computed.

    Attributes:
        path: The path of the layer.
        reason: Why the layer did not compute in blocks; empty if it did.
        is_short: True if the sequences are too short for `attention="auto"`.
    """

    path: str
    reason: str
    is_short: bool = False


def attention_runs(model: keras.Model) -> list[AttentionRun]:
    """Return how the attention layers of a model computed in its last traced step."""
    calls = [patch.replacement for patch in layer_patch.patches_of(model) if patch.change is ATTENTION]
    return [each.last for each in calls if isinstance(each, AttentionCall) and each.last is not None]


class _NotInBlocksError(Exception):
    """Attention is not computed in blocks. The message is the reason."""


class _TooShortError(_NotInBlocksError):
    """The sequences are too short for `attention="auto"`."""


_state = threading.local()

_DROPOUT = "it has dropout on its attention weights"


class AttentionCall:
    """A layer's `_compute_attention` that computes in blocks.

    Attributes:
        last: How the layer computed in the last traced step.
    """

    def __init__(self, layer: Callable[[], keras.Layer | None], mesh: dtensor.Mesh, call: layer_patch.Method):
        functools.update_wrapper(self, call)
        self._layer, self._mesh, self._call = layer, mesh, call
        self.last: AttentionRun | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        if layer is None or not _is_traced():
            _check_traced(self._mesh)
            return self._call(*args, **kwargs)
        form = _FORMS.get(_origin(layer))
        try:
            given = None if form is None else form(layer, *args, **kwargs)
            result = None if given is None else _computed_in_blocks(given, self._mesh)
        except _NotInBlocksError as error:
            self.note(error)
            _check_may_compute_otherwise(error, self._mesh, layer)
            return self._call(*args, **kwargs)
        if result is not None:
            self.note(None)
            # Keras's own layers also return the scores.
            return (result, None) if form is _keras else result
        outer, self.noted = getattr(_state, "call", None), False
        _state.call = self
        try:
            result = self._call(*args, **kwargs)
        finally:
            _state.call = outer
        if not self.noted:
            reason = _NotInBlocksError(_why_not(layer, args, kwargs))
            self.note(reason)
            _check_may_compute_otherwise(reason, self._mesh, layer)
        return result

    @property
    def path(self) -> str:
        """The path of the layer."""
        layer = self._layer()
        return "" if layer is None else layer.path or layer.name

    def note(self, error: _NotInBlocksError | None) -> None:
        """Note how the layer computed."""
        self.noted, layer = True, self._layer()
        if layer is not None:
            reason = "" if error is None else str(error)
            self.last = AttentionRun(
                path=layer.path or layer.name, reason=reason, is_short=isinstance(error, _TooShortError)
            )


def dot_product_attention(
    mesh: dtensor.Mesh,
    original: Callable[..., tf.Tensor],
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> tf.Tensor:
    """`dot_product_attention` of Keras's TensorFlow backend: in blocks in a traced step."""
    given: dict[str, Any] = {
        "bias": bias, "mask": mask, "scale": scale, "is_causal": is_causal, "flash_attention": flash_attention,
        "attn_logits_soft_cap": attn_logits_soft_cap,
    }  # fmt: skip
    if not _is_traced():
        _check_traced(mesh)
        return original(query, key, value, **given)
    call: AttentionCall | None = getattr(_state, "call", None)
    try:
        if bias is not None:
            raise _NotInBlocksError("it has a bias for each pair of a query and a key")
        if flash_attention or attn_logits_soft_cap is not None:
            raise _NotInBlocksError("Keras on TensorFlow has no flash attention, and no soft cap in this function")
        query, key, value = _of_one_dtype(query, key, value)
        result = _computed_in_blocks(
            _Given(query, key, value, mask=mask, scale=scale, is_causal=is_causal, empty="mean"), mesh
        )
    except _NotInBlocksError as error:
        if call is not None:
            call.note(error)
        _check_may_compute_otherwise(error, mesh, None if call is None else call.path)
        return original(query, key, value, **given)
    if call is not None:
        call.note(None)
    return result


def _is_traced() -> bool:
    """Return whether a step, or a block that is compiled, is being traced. Not so in loops and branches of a step."""
    if contexts.recorder() is not None:
        return True
    step = steps.current()
    if step is None or step.graph is None:
        return False
    return steps.is_local_trace() or steps.here() is step.graph


def _check_traced(mesh: dtensor.Mesh) -> None:
    """Raise an error for attention outside of a traced step, if devices have chunks of sequences."""
    if steps.current() is not None and axis_sizes(mesh).contexts > 1:
        raise UnsupportedLayerError(
            f"On a mesh with the context axis '{axis_sizes(mesh).context}', attention runs in compiled steps only, "
            "outside of loops and branches: its devices exchange chunks of sequences. Compile the model without "
            "run_eagerly=True, and call attention layers outside of tf.while_loop and tf.cond."
        )


def _check_may_compute_otherwise(error: _NotInBlocksError, mesh: dtensor.Mesh, layer: keras.Layer | str | None) -> None:
    """Raise an error on a mesh with a context axis: computed by Keras, attention would see only one chunk."""
    recorder = contexts.recorder()
    if recorder is not None and recorder.is_passive:
        return
    if axis_sizes(mesh).contexts > 1:
        path = layer.path or layer.name if isinstance(layer, keras.Layer) else layer
        raise UnsupportedLayerError(
            f"{f'Attention layer {path!r}' if path else 'A call of keras.ops.dot_product_attention'} cannot attend "
            f"across the devices of context axis '{axis_sizes(mesh).context}': {error}. Change the layer (see "
            "docs/attention.md for what is computed in blocks), or leave the axis out of the mesh."
        ) from error


def _of_one_dtype(*tensors: Any) -> list[tf.Tensor]:
    """Cast tensors to the dtype that Keras would compute in."""
    found = [keras.ops.convert_to_tensor(each) for each in tensors]
    dtype = keras.backend.result_type(*(each.dtype for each in found))
    return [keras.ops.cast(each, dtype) for each in found]


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    """The arguments of attention.

    Attributes:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, V)`.
        mask: Broadcasts to `(B, N, T, S)`; True, or above 0.5, keeps a pair. None for all pairs.
        scale: The factor of the scores. By default the inverse root of H.
        is_causal: True if query number i attends to keys 0 to i only.
        soft_cap: The bound of the scores.
        empty: As in `Attention`.
    """

    query: tf.Tensor
    key: tf.Tensor
    value: tf.Tensor
    mask: Any = None
    scale: Any = None
    is_causal: bool = False
    soft_cap: float | None = None
    empty: Any = "zero"


def _computed_in_blocks(given: _Given, mesh: dtensor.Mesh) -> tf.Tensor:
    query, key, value = given.query, given.key, given.value
    recorder = contexts.recorder()
    if recorder is not None:
        recorder.attentions.append(contexts.RecordedAttention(query=query, key=key, value=value, mask=given.mask))
        if recorder.is_passive:
            raise _NotInBlocksError("the model is only traced")
        recorder.note_operands([query, key, value], "attention")
        return recorder.new_result((*query.shape[:3], value.shape[3]), value.dtype)
    has_context = axis_sizes(mesh).contexts > 1
    choice = tf.distribute.get_strategy().config.attention
    if choice is AttentionChoice.MATH:
        raise _NotInBlocksError("the strategy has attention='math'")
    if any(each.shape.rank != 4 or not each.shape.is_fully_defined() for each in (query, key, value)):
        raise _NotInBlocksError("the shapes of its queries and keys are not known, or do not have four dims")
    pairs = query.shape[1] * key.shape[1]
    if choice is AttentionChoice.AUTO and pairs < LEAST_PAIRS and not has_context:
        raise _TooShortError(
            f"{query.shape[1]} queries and {key.shape[1]} keys are too few for attention='auto' (from "
            f"{LEAST_PAIRS} pairs)"
        )
    heads, key_heads = query.shape[2], key.shape[2]
    if not (query.dtype == key.dtype == value.dtype and query.dtype.is_floating) or heads % key_heads:
        raise _NotInBlocksError("its queries, keys and values have several dtypes, or heads that do not divide")
    scale = query.shape[3] ** -0.5 if given.scale is None else given.scale
    if tf.is_tensor(scale):
        scale = tf.get_static_value(scale)
        if scale is None:
            raise _NotInBlocksError("the scale of its scores is a tensor")
    mask: BlockMask | None = None
    parts: list[tf.Tensor] = []
    if given.mask is not None:
        shape = (query.shape[0], heads, query.shape[1], key.shape[1])
        mask, parts = block_masks.mask_of(_mask(given.mask, shape), shape)
    if query.dtype == tf.float16:
        # Products of queries and keys may be too large for float16 before they are scaled.
        query, scale = query * tf.cast(scale, query.dtype), 1.0
    kind = Attention(
        scale=float(np.asarray(scale)),
        is_causal=given.is_causal,
        soft_cap=None if given.soft_cap is None else float(given.soft_cap),
        mask=mask,
        empty=given.empty,
        block=online_softmax.BLOCK,
    )
    if has_context:
        return _across_context(kind, query, key, value, parts, mesh)
    if steps.is_local_trace():
        return online_softmax.attend(kind, query, key, value, parts)
    return _on_mesh(kind, query, key, value, parts, mesh)


def _mask(mask: Any, shape: tuple[int, ...]) -> tf.Tensor:
    mask = tf.convert_to_tensor(mask)
    if mask.shape.rank is None or not mask.shape.is_fully_defined() or mask.shape.rank > len(shape):
        raise _NotInBlocksError("the shape of its mask is not known")
    if any(size not in (1, full) for size, full in zip(mask.shape[::-1], shape[::-1], strict=False)):
        raise _NotInBlocksError(f"its mask of shape {mask.shape} does not broadcast to the scores")
    return mask


def _on_mesh(
    kind: Attention, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, parts: Sequence[tf.Tensor], mesh: dtensor.Mesh
) -> tf.Tensor:
    """Run attention on each device's rows and heads."""
    data = axis_sizes(mesh).data
    batch = data if data is not None and batching.batch_axes(tuple(query.shape), mesh)[0] is not None else None
    model = vocabulary.sharded_axis(query, 2)
    if model is not None:
        devices, heads = axis_sizes(mesh)[model], query.shape[2]
        if heads % devices:
            model = None
        elif key.shape[2] % devices and key.shape[2] > 1:
            # A device's heads of the queries share no whole heads of the keys.
            key, value = (tf.repeat(each, heads // each.shape[2], axis=2) for each in (key, value))
    layouts: list[Axes] = [(batch, None, model, None)]
    layouts += [(batch, None, model if each.shape[2] > 1 else None, None) for each in (key, value)]
    for part in parts:
        layouts.append((batch if part.shape[0] > 1 else None, model if part.shape[1] > 1 else None, None, None))

    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
        return online_softmax.attend(kind, query, key, value, parts)

    result: tf.Tensor = local_map(attend, layouts, [layouts[0]], mesh)(query, key, value, *parts)
    return result


def heads_of_context(heads: int, key_heads: int, contexts: int) -> int | None:
    """Return how often devices repeat each head of keys before they exchange heads for positions.

    The devices then get equally many heads of keys. Returns None if the context axis does not divide the heads of the
    queries.

    Args:
        heads: The heads of the queries of a device.
        key_heads: The heads of the keys of a device.
        contexts: The number of devices.
    """
    if heads % contexts:
        return None
    counts = range(1, heads // key_heads + 1)
    return next(n for n in counts if key_heads * n % contexts == 0 and heads % (key_heads * n) == 0)


def _across_context(
    kind: Attention, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, parts: Sequence[tf.Tensor], mesh: dtensor.Mesh
) -> tf.Tensor:
    """Run attention over full sequences. Each device has a chunk of them (contexts.py)."""
    axes = axis_sizes(mesh)
    if query.shape[:2] != key.shape[:2] or query.shape[:2] != value.shape[:2]:
        raise _NotInBlocksError(f"its queries {tuple(query.shape)} and keys {tuple(key.shape)} are of several lengths")
    if steps.is_local_trace():
        raise _NotInBlocksError("it is in a compiled block")
    batch = batching.batch_axes(tuple(query.shape), mesh)[0] if axes.data_size > 1 else None
    model = vocabulary.sharded_axis(query, 2)
    local = query.shape[2] // axes[model] if model is not None and query.shape[2] % axes[model] == 0 else query.shape[2]
    model = model if local < query.shape[2] else None
    if model is not None and key.shape[2] % axes[model]:
        # The model axis does not divide the heads of the keys: each head of the queries gets its own keys.
        key, value = (tf.repeat(each, query.shape[2] // each.shape[2], axis=2) for each in (key, value))
    local_keys = key.shape[2] if model is None else key.shape[2] // axes[model]
    gathers = tf.distribute.get_strategy().config.context_attention is ContextAttention.GATHER
    repeats = 1 if gathers else heads_of_context(local, local_keys, axes.contexts)
    if repeats is None:
        raise _NotInBlocksError(
            f"a device has {local} heads of queries, which are not divisible by the {axes.contexts} devices of axis "
            f"'{axes.context}' (context_attention='gather' takes any number)"
        )
    if kind.mask is not None:
        if query.shape[1] == 1:
            # A part with a value for each position looks like a part with one value for all positions.
            raise _NotInBlocksError("it has a mask, and each device has one position of a sequence only")
        found = block_masks.of_full_sequences(kind.mask, parts, query.shape[0])
        if found is None:
            raise _NotInBlocksError(
                "its mask was not made from a mask of padding and from positions that count: it has a value for each "
                "pair of a query and a key"
            )
        kind, parts = dataclasses.replace(kind, mask=found[0]), found[1]
    layouts: list[Axes] = [(batch, None, model, None)] * 3
    layouts += [(batch if part.shape[0] > 1 else None, None, None, None) for part in parts]
    exchange = contexts.Exchange(mesh, is_sharded=batch is not None)
    if gathers and batch is not None:
        return _with_gathered_keys(kind, [query, key, value, *parts], layouts, exchange, mesh)

    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
        if repeats > 1:
            key, value = (tf.repeat(each, repeats, axis=2) for each in (key, value))
        query, key, value = (exchange.to_heads(each) for each in (query, key, value))
        full = [exchange.all_positions(each) if max(each.shape[2:]) > 1 else each for each in parts]
        return exchange.to_positions(online_softmax.attend(kind, query, key, value, full))

    result: tf.Tensor = local_map(attend, layouts, [layouts[0]], mesh)(query, key, value, *parts)
    return result


def _with_gathered_keys(
    kind: Attention,
    given: Sequence[tf.Tensor],
    layouts: Sequence[Axes],
    exchange: contexts.Exchange,
    mesh: dtensor.Mesh,
) -> tf.Tensor:
    """Run attention of the local queries to the keys of all devices that share the sequences.

    Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2.
    """
    rows, length = given[0].shape[:2]
    first_positions = SequenceChunks.of(axis_sizes(mesh)).chunks_of_rows(rows).astype("int32") * length
    first = tf.constant(first_positions.reshape(rows, 1, 1, 1))

    def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, first: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
        full = [exchange.all_positions(each) if each.shape[3] > 1 else each for each in parts]
        here = kind
        if kind.mask is not None or kind.is_causal:
            # All local rows are chunks with the same number.
            mask, full = block_masks.of_later_queries(kind.mask, full, first[:1], is_causal=kind.is_causal)
            here = dataclasses.replace(kind, mask=mask, is_causal=False)
        return online_softmax.attend(here, query, key, value, full, exchange)

    ins = [*layouts[:3], (layouts[0][0], None, None, None), *layouts[3:]]
    result: tf.Tensor = local_map(attend, ins, [layouts[0]], mesh)(*given[:3], first, *given[3:])
    return result


# --- the forms of layers -----------------------------------------------------------------------------


def _origin(layer: keras.Layer) -> str:
    """Return the module and the class in which a layer's `_compute_attention` is written."""
    function = type(layer)._compute_attention
    package, module = function.__module__.partition(".")[0], function.__module__.rpartition(".")[2]
    name = f"{module}.{function.__qualname__.partition('.')[0]}"
    return name if package in ("keras", "keras_hub") and not _has_helper_of_its_own(layer, function.__module__) else ""


# Methods that attention layers of Keras and KerasHub call while they compute attention.
_HELPERS = ("_masked_softmax", "_mask_sliding_window")


def _has_helper_of_its_own(layer: keras.Layer, module: str) -> bool:
    """Return whether a subclass of a layer computes a step of attention in a way of its own."""
    helpers = [getattr(type(layer), name, None) for name in _HELPERS]
    return any(getattr(each, "__module__", module) != module for each in helpers if each is not None)


def _why_not(layer: keras.Layer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return why a layer did not call `keras.ops.dot_product_attention`."""
    given = inspect.signature(type(layer)._compute_attention).bind_partial(layer, *args, **kwargs).arguments
    if given.get("return_attention_scores") or getattr(layer, "_return_attention_scores", False):
        return "its attention scores are asked for"
    if _dropout(layer):
        return _DROPOUT
    return f"{type(layer).__name__} computes attention in a form of its own"


def _dropout(layer: keras.Layer) -> float:
    for name in ("_dropout", "dropout"):
        given = getattr(layer, name, None)
        given = getattr(given, "rate", given)  # Some layers have a Dropout layer there.
        if isinstance(given, int | float) and given:
            return float(given)
    return 0.0


def _keras(
    layer: Any,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    attention_mask: Any = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> _Given | None:
    """MultiHeadAttention and GroupQueryAttention of Keras, where their dropout does not run.

    Without dropout they call `keras.ops.dot_product_attention`.
    """
    asked = return_attention_scores or getattr(layer, "_return_attention_scores", False)
    if not _dropout(layer) or training is not False or asked or query.shape.rank != 4:
        return None
    scale = getattr(layer, "_inverse_sqrt_key_dim", None) or layer._inverse_sqrt_head_dim
    mask = attention_mask if attention_mask is None or attention_mask.shape.rank == 4 else _of_heads(attention_mask)
    return _Given(query, key, value, mask=mask, scale=scale, is_causal=use_causal_mask)


def _of_heads(mask: Any) -> Any:
    """`(B, T, S)`, or `(T, S)`, as `(B, 1, T, S)`."""
    return None if mask is None else keras.ops.expand_dims(mask, -3)


def _plain(layer: Any, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, attention_mask: Any = None) -> _Given:
    """Llama, Mistral, Mixtral and Phi-3."""
    return _Given(query, key, value, mask=_of_heads(attention_mask), scale=layer._inv_norm_factor)


def _windowed(
    layer: Any,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    attention_mask: Any = None,
    cache_update_index: Any = None,
    **options: Any,
) -> _Given:
    """The Qwens, some with a sliding window."""
    if options:
        raise _NotInBlocksError(f"it was called with {sorted(options)[0]}=")
    if getattr(layer, "use_sliding_window_attention", layer.sliding_window_size):
        attention_mask = layer._mask_sliding_window(attention_mask, cache_update_index=cache_update_index or 0)
    return _plain(layer, query, key, value, attention_mask)


def _neo_x(
    layer: Any,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    attention_mask: Any = None,
    training: bool | None = None,
) -> _Given:
    """GPT-NeoX."""
    _check_no_dropout(layer, training)
    return _plain(layer, query, key, value, attention_mask)


def _gemma(
    layer: Any,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    attention_mask: Any,
    training: bool | None = False,
    cache_update_index: Any = 0,
) -> _Given:
    """Gemma, Gemma 2 and 3: groups of queries, with a soft cap and a sliding window in some."""
    _check_no_dropout(layer, training)
    normalized = layer.query_head_dim_normalize
    scale = (layer.head_dim if normalized else layer.hidden_dim // layer.num_query_heads) ** -0.5
    if layer.use_sliding_window_attention and attention_mask is not None:
        attention_mask = layer._mask_sliding_window(attention_mask, cache_update_index=cache_update_index)
    return _Given(q, k, v, mask=_of_heads(attention_mask), scale=scale, soft_cap=layer.logit_soft_cap)


def _check_no_dropout(layer: keras.Layer, training: bool | None) -> None:
    if _dropout(layer) and training is not False:
        raise _NotInBlocksError(_DROPOUT)


# By the module and the class with the method that is replaced. A subclass with a method of its own has its own form.
_FORMS: Mapping[str, Callable[..., _Given | None]] = {
    "multi_head_attention.MultiHeadAttention": _keras,
    "grouped_query_attention.GroupedQueryAttention": _keras,
    "llama_attention.LlamaAttention": _plain,
    "mistral_attention.CachedMistralAttention": _plain,
    "mixtral_attention.CachedMixtralAttention": _plain,
    "phi3_attention.Phi3Attention": _plain,
    "qwen_attention.QwenAttention": _windowed,
    "qwen_moe_attention.QwenMoeAttention": _windowed,
    "qwen3_attention.Qwen3Attention": _windowed,
    "qwen3_moe_attention.Qwen3MoeAttention": _windowed,
    "qwen3_5_attention.Qwen3_5Attention": _windowed,
    "gpt_neo_x_attention.GPTNeoXAttention": _neo_x,
    "gemma_attention.CachedGemmaAttention": _gemma,
    "gemma3_attention.CachedGemma3Attention": _gemma,
}
