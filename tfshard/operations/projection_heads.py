"""The last projection of a model in a step: its hidden states, its weights, and how its logits are computed.

`HeadCall` records the tensors of the layer. The layer still adds its logits to the graph of the step. If nothing but
losses and metrics with an implementation by chunks (chunked_cross_entropy.py) uses them, TensorFlow does not compute
them.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching, local_shards
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.config import AUTO_CHUNKS, ChunkedCrossEntropy
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import layer_patch
from tfshard.operations.chunked_logits import TokenChunks
from tfshard.operations.layer_patch import HEAD
from tfshard.storage import steps
from tfshard.storage.variables import ShardedVariable

# "auto" takes chunks if the logits of a device take this much, and this many times the bytes of its kernel.
LEAST_BYTES = 64 << 20
LEAST_KERNELS = 4
# The tokens of a chunk of "auto": this share of the width, so that its logits take that share of the kernel.
CHUNK_OF_WIDTH = 1 / 2
LEAST_CHUNK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedHead:
    """How the cross entropy of a layer's logits was computed in the last traced step.

    Attributes:
        path: The path of the layer.
        tokens: The tokens of a chunk; 0 if the logits are whole.
        chunks: The number of chunks of a device.
        compiled: True if XLA compiles the chunks.
        reason: Why the logits are whole; empty otherwise.
    """

    path: str
    tokens: int
    chunks: int
    compiled: bool
    reason: str

    def __str__(self) -> str:
        if self.reason:
            return f"The logits of layer '{self.path}' are whole: {self.reason}."
        return (
            f"Layer '{self.path}': each device computes the cross entropy in {self.chunks} chunks of {self.tokens} "
            f"tokens{', which XLA compiles' if self.compiled else ''}."
        )


def install(model: keras.Model, mesh: dtensor.Mesh, option: ChunkedCrossEntropy, *, compiled: bool) -> None:
    """Patch the layers of a model that may be its last projection: they record their tensors in a step.

    Args:
        model: A built model.
        mesh: The mesh.
        option: The strategy's `chunked_cross_entropy`.
        compiled: True if XLA compiles the chunks.
    """
    for layer in _private.flatten_layers(model):
        if isinstance(layer, (keras.layers.Dense, keras.layers.ReversibleEmbedding)):
            make = functools.partial(HeadCall, weakref.ref(layer), mesh, option, compiled)
            call = layer_patch.apply(HEAD, layer, make).replacement
            assert isinstance(call, HeadCall)
            call.option, call.compiled = option, compiled  # The patch may be from an earlier `compile`.


def chunked_heads(model: keras.Model) -> list[ChunkedHead]:
    """Return how the cross entropies of a model were computed in its last traced step."""
    calls = [each.replacement for each in layer_patch.patches_of(model) if each.change is HEAD]
    return [each.last for each in calls if isinstance(each, HeadCall) and each.last is not None]


class HeadCall:
    """A layer's `call` that records the tensors of a projection in a step.

    Attributes:
        option: The strategy's `chunked_cross_entropy`.
        compiled: True if XLA compiles the chunks.
        last: How the cross entropy of its logits was computed in the last traced step.
    """

    def __init__(
        self,
        layer: Callable[[], keras.Layer | None],
        mesh: dtensor.Mesh,
        option: ChunkedCrossEntropy,
        compiled: bool,
        call: layer_patch.Method,
    ):
        functools.update_wrapper(self, call)
        self._layer, self._mesh, self._call = layer, mesh, call
        self.option, self.compiled = option, compiled
        self.last: ChunkedHead | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, layer = steps.current(), self._layer()
        if layer is None or step is None or step.graph is None or steps.here() is not step.graph:
            return self._call(*args, **kwargs)
        weights = _weights_of(layer, args, kwargs)
        if weights is None:
            return self._call(*args, **kwargs)
        inputs = args[0] if args else kwargs["inputs"]
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = self._call(*args, **kwargs)
        logits = _private.keras_logits(result)
        head = Head(
            call=self,
            path=layer.path or layer.name,
            mesh=self._mesh,
            hidden=tf.cast(inputs, logits.dtype),
            weights=weights,
            logits=logits,
            operations=graph.get_operations()[before:],
        )
        step.heads[logits.ref()] = head
        return result

    def note(self, head: "Head", chunks: TokenChunks | None, reason: str = "") -> None:
        """Record how the cross entropy is computed."""
        self.last = ChunkedHead(
            path=head.path,
            tokens=0 if chunks is None else chunks.size,
            chunks=0 if chunks is None else chunks.count,
            compiled=self.compiled,
            reason=reason,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadWeights:
    """The weights of a projection, as a step reads them.

    Attributes:
        kernel: `(width, classes)`, or `(classes, width)` if it is `transposed`.
        axes: The layout of the kernel.
        transposed: True if the kernel is a table of embeddings.
        bias: `(classes,)`, or None.
        soft_cap: Logits z become `soft_cap * tanh(z / soft_cap)`; None without.
    """

    kernel: tf.Tensor
    axes: Axes
    transposed: bool = False
    bias: tf.Tensor | None = None
    soft_cap: float | None = None

    @property
    def class_dim(self) -> int:
        return 0 if self.transposed else 1

    @property
    def tensors(self) -> list[tf.Tensor]:
        return [self.kernel] if self.bias is None else [self.kernel, self.bias]

    @property
    def layouts(self) -> list[Axes]:
        return [self.axes] if self.bias is None else [self.axes, (self.axes[self.class_dim],)]


def _weights_of(layer: keras.Layer, args: Sequence[Any], kwargs: dict[str, Any]) -> HeadWeights | None:
    """Return the weights of a call that projects. None if the call does something else, too."""
    if getattr(layer, "quantization_mode", None) is not None or getattr(layer, "lora_enabled", False):
        return None
    if isinstance(layer, keras.layers.Dense):
        is_head = type(layer).call is keras.layers.Dense.call
        is_head = is_head and layer.activation in (keras.activations.linear, keras.activations.softmax)
        layout = _compute_layout(layer.kernel) if is_head else None
        if layout is None:
            return None
        bias = None if layer.bias is None else tf.convert_to_tensor(layer.bias)
        return HeadWeights(kernel=tf.convert_to_tensor(layer.kernel), axes=layout, bias=bias)
    is_reverse = args[1] if len(args) > 1 else kwargs.get("reverse", False)
    if not is_reverse or type(layer).call is not keras.layers.ReversibleEmbedding.call:
        return None
    table = layer.embeddings if layer.tie_weights else layer.reverse_embeddings
    layout = _compute_layout(table)
    if layout is None:
        return None
    kernel = tf.convert_to_tensor(table)
    if layer.reverse_dtype is not None:
        kernel = tf.cast(kernel, layer.reverse_dtype)
    return HeadWeights(kernel=kernel, axes=layout, transposed=layer.tie_weights, soft_cap=layer.logit_soft_cap)


def _compute_layout(variable: keras.Variable) -> Axes | None:
    current = _private.backend_variable(variable)
    if not isinstance(current, ShardedVariable) or current.layout.kind is not None:
        return None
    return current.layout.compute


@dataclasses.dataclass(kw_only=True, eq=False)
class Head:
    """A call of a projection in a step that is traced.

    Attributes:
        call: The patch of the layer.
        path: The path of the layer.
        mesh: The mesh.
        hidden: `(..., width)`, in the dtype of the logits.
        weights: The weights.
        logits: `(..., classes)`, as the layer added them to the graph.
        operations: The operations that compute the logits.
        is_used: True if a cross entropy was computed by chunks.
        passes: The forward passes by their labels (`chunked_cross_entropy`).
    """

    call: HeadCall
    path: str
    mesh: dtensor.Mesh
    hidden: tf.Tensor
    weights: HeadWeights
    logits: tf.Tensor
    operations: Sequence[tf.Operation]
    is_used: bool = False
    passes: dict[Hashable, Any] = dataclasses.field(default_factory=dict)

    @property
    def classes(self) -> int:
        return int(self.logits.shape[-1])

    @property
    def axis(self) -> str | None:
        """The mesh axis that shards the classes."""
        return self.weights.axes[self.weights.class_dim]

    @property
    def data(self) -> str | None:
        """The mesh axis that shards the tokens; None if every device has all of them."""
        return batching.batch_axes(tuple(self.hidden.shape), self.mesh)[0]

    @property
    def devices(self) -> int:
        """The devices that share the classes."""
        return 1 if self.axis is None else axis_sizes(self.mesh)[self.axis]

    @property
    def token_layout(self) -> Axes:
        """The layout of a tensor with a number for each token."""
        return (self.data, *(None,) * (self.hidden.shape.rank - 2))

    @property
    def local_tokens(self) -> int:
        shares = 1 if self.data is None else axis_sizes(self.mesh).data_size
        return int(math.prod(self.hidden.shape[:-1])) // shares

    @property
    def local_classes(self) -> int:
        return self.classes // self.devices

    def reason_against(self, dtype: tf.DType) -> str:
        """Return why the logits stay whole; empty if they do not."""
        width_axis = self.weights.axes[1 - self.weights.class_dim]
        if width_axis is not None:
            return f"mesh axis '{width_axis}' shards the input dim of the kernel"
        if self.call.option.chunk != AUTO_CHUNKS:
            return ""
        logits = self.local_tokens * self.local_classes * dtype.size
        kernel = self.hidden.shape[-1] * self.local_classes * 4
        if logits < LEAST_BYTES:
            return f"a device's logits take {logits:,} bytes, and 'auto' makes chunks from {LEAST_BYTES:,} bytes on"
        if logits < LEAST_KERNELS * kernel:
            return (
                f"a device's logits take {logits:,} bytes, and 'auto' makes chunks from {LEAST_KERNELS} times the "
                f"{kernel:,} bytes of the kernel's gradient on"
            )
        return ""

    @functools.cached_property
    def entered(self) -> list[tf.Tensor]:
        """The local shards of the hidden states and the weights."""
        with _private.stop_recording():
            return [
                local_shards.local_shard(each, axes, self.mesh)
                for each, axes in zip([self.hidden, *self.weights.tensors], self.layouts, strict=True)
            ]

    @property
    def layouts(self) -> list[Axes]:
        """The layouts of the hidden states and the weights."""
        return [(*self.token_layout, None), *self.weights.layouts]

    def chunks(self) -> TokenChunks:
        """Return the chunks of a device."""
        chunk = self.call.option.chunk
        if chunk == AUTO_CHUNKS:
            chunk = max(int(CHUNK_OF_WIDTH * self.hidden.shape[-1]), LEAST_CHUNK)
        return TokenChunks.of(self.local_tokens, int(chunk))
