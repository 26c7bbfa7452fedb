"""Cross entropy of a model's last projection by chunks of tokens: no device ever holds all of its logits.

The logits of a language model are its largest activation: tokens times classes. The loss needs three numbers of the
logits of each token. In a traced step, the loss therefore takes the hidden states and the kernel of the last layer.
Each device takes its local tokens chunk by chunk:

- the forward pass computes the logits of a chunk, and keeps their maximum, the sum of their exponentials, and the
  logit of the label;
- the backward pass computes the logits of a chunk again, and from them the gradient of its hidden states, and its term
  in the gradient of the kernel.

The method is that of Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models": logits are computed
again in the backward pass. Hsu et al. 2024, "Liger Kernel", compute the gradient in the forward pass, one product of
matrices less. Liger needs to know the factor of each token in the loss before; in Keras this factor depends on weights,
masks and reductions that follow the cross entropy.

If a model axis shards the classes, each device has the three numbers of its local classes. The devices combine them
after the last chunk, so a chunk sends nothing.

`HeadCall` records the tensors of the last layer. The layer still adds its logits to the graph of the step. If nothing
but losses and metrics with an implementation by chunks uses them, TensorFlow does not compute them.
"""

import contextlib
import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NoReturn

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import batching, expansions, local_shards, transfer
from tfshard.errors import StrategyError, UnsupportedOperationError
from tfshard.layouts.axes import axis_sizes
from tfshard.layouts.config import AUTO_CHUNKS, ChunkedCrossEntropy
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import layer_patch, programs
from tfshard.operations.layer_patch import HEAD
from tfshard.storage import graph_edits, steps
from tfshard.storage.variables import ShardedVariable

# "auto" takes chunks if the logits of a device take this much, and this many times the bytes of its kernel.
LEAST_BYTES = 64 << 20
LEAST_KERNELS = 4
# The tokens of a chunk of "auto": this share of the width, so that its logits take that share of the kernel.
CHUNK_OF_WIDTH = 1 / 2
LEAST_CHUNK = 64

_NEEDED = (
    "The last layer must be a keras.layers.Dense without LoRA or quantization, with activation None or 'softmax', or a "
    "ReversibleEmbedding called with reverse=True. The loss must be a SparseCategoricalCrossentropy or "
    "CategoricalCrossentropy of the output of that layer, and only accuracy, top-k and cross-entropy metrics may use "
    "the output"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedHead:
    """How the cross entropy of a layer's logits was computed in the last traced step.

    Attributes:
        path: The path of the layer.
        tokens: The tokens of a chunk; 0 if the logits are whole.
        chunks: The number of chunks of a device.
        reason: Why the logits are whole; empty otherwise.
    """

    path: str
    tokens: int
    chunks: int
    reason: str

    def __str__(self) -> str:
        if self.reason:
            return f"The logits of layer '{self.path}' are whole: {self.reason}."
        return (
            f"Layer '{self.path}': each device computes the cross entropy in {self.chunks} chunks of {self.tokens} "
            "tokens."
        )


def install(model: keras.Model, mesh: dtensor.Mesh, option: ChunkedCrossEntropy) -> None:
    """Patch the layers of a model that may be its last projection: they record their tensors in a step."""
    for layer in _private.flatten_layers(model):
        if isinstance(layer, (keras.layers.Dense, keras.layers.ReversibleEmbedding)):
            make = functools.partial(HeadCall, weakref.ref(layer), mesh, option)
            layer_patch.apply(HEAD, layer, make)


def chunked_heads(model: keras.Model) -> list[ChunkedHead]:
    """Return how the cross entropies of a model were computed in its last traced step."""
    calls = [each.replacement for each in layer_patch.patches_of(model) if each.change is HEAD]
    return [each.last for each in calls if isinstance(each, HeadCall) and each.last is not None]


class HeadCall:
    """A layer's `call` that records the tensors of a projection in a step.

    Attributes:
        last: How the cross entropy of its logits was computed in the last traced step.
    """

    def __init__(
        self,
        layer: Callable[[], keras.Layer | None],
        mesh: dtensor.Mesh,
        option: ChunkedCrossEntropy,
        call: layer_patch.Method,
    ):
        functools.update_wrapper(self, call)
        self._layer, self._mesh, self._call = layer, mesh, call
        self.option = option
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

    def note(self, head: "Head", chunks: "_Chunks | None", reason: str = "") -> None:
        """Record how the cross entropy is computed."""
        self.last = ChunkedHead(
            path=head.path,
            tokens=0 if chunks is None else chunks.size,
            chunks=0 if chunks is None else chunks.count,
            reason=reason,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Weights:
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
        axes = [self.axes] if self.bias is None else [self.axes, (self.axes[self.class_dim],)]
        return axes


def _weights_of(layer: keras.Layer, args: Sequence[Any], kwargs: dict[str, Any]) -> _Weights | None:
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
        return _Weights(kernel=tf.convert_to_tensor(layer.kernel), axes=layout, bias=bias)
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
    return _Weights(kernel=kernel, axes=layout, transposed=layer.tie_weights, soft_cap=layer.logit_soft_cap)


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
        passes: The forward passes by their labels.
    """

    call: HeadCall
    path: str
    mesh: dtensor.Mesh
    hidden: tf.Tensor
    weights: _Weights
    logits: tf.Tensor
    operations: Sequence[tf.Operation]
    is_used: bool = False
    passes: "dict[Hashable, _Pass]" = dataclasses.field(default_factory=dict)

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
                _entered(each, axes, self.mesh)
                for each, axes in zip([self.hidden, *self.weights.tensors], self.layouts, strict=True)
            ]

    @property
    def layouts(self) -> list[Axes]:
        """The layouts of the hidden states and the weights."""
        return [(*self.token_layout, None), *self.weights.layouts]

    def chunks(self) -> "_Chunks":
        """Return the chunks of a device."""
        chunk = self.call.option.chunk
        if chunk == AUTO_CHUNKS:
            chunk = max(int(CHUNK_OF_WIDTH * self.hidden.shape[-1]), LEAST_CHUNK)
        return _Chunks.of(self.local_tokens, int(chunk))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """Chunks of equal size: the last one is filled up.

    Attributes:
        tokens: The tokens of a device.
        count: The number of chunks.
        size: The tokens of a chunk.
    """

    tokens: int
    count: int
    size: int

    @classmethod
    def of(cls, tokens: int, most: int) -> "_Chunks":
        count = max(-(-tokens // most), 1)
        return cls(tokens=tokens, count=count, size=-(-tokens // count))

    def split(self, tensor: tf.Tensor, *dims: int, fill: float = 0) -> tf.Tensor:
        """Return a tensor `(chunks, tokens of a chunk, *dims)` of a tensor `(..., *dims)`, filled up with `fill`."""
        flat = tf.reshape(tensor, (self.tokens, *dims))
        missing = self.count * self.size - self.tokens
        if missing:
            flat = tf.concat([flat, tf.fill((missing, *dims), tf.cast(fill, flat.dtype))], 0)
        return tf.reshape(flat, (self.count, self.size, *dims))

    def joined(self, tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Invert `split`."""
        flat = tf.reshape(tensor, (self.count * self.size, *tensor.shape[2:]))
        return tf.reshape(flat if self.count * self.size == self.tokens else flat[: self.tokens], shape)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _NumbersOfTokens:
    """Numbers of the logits of each token, in the layout of tokens.

    Attributes:
        most: The largest logit.
        total: The sum of the exponentials of the logits less `most`.
        at_label: The logit of the label; with dense labels, the sum of the logits times their labels.
        best: The first class with the largest logit.
    """

    most: tf.Tensor
    total: tf.Tensor
    at_label: tf.Tensor
    best: tf.Tensor


# --- the functions of a device -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _LabelsOfTokens:
    """The labels of a step, in layouts for the devices.

    Attributes:
        tensors: Sparse labels: the class of each token in the local classes, and whether the local classes contain the
            label. Dense labels: their shares `(..., classes)`.
        layouts: The layout of each tensor.
        is_sparse: True for integer labels.
    """

    tensors: list[tf.Tensor]
    layouts: list[Axes]
    is_sparse: bool


def _labels_of(labels: tf.Tensor, head: Head, *, is_sparse: bool, dtype: tf.DType) -> _LabelsOfTokens:
    tokens = tuple(head.hidden.shape[:-1])
    if not is_sparse:
        given = tf.cast(tf.reshape(labels, (*tokens, head.classes)), dtype)
        return _LabelsOfTokens(tensors=[given], layouts=[(*head.token_layout, head.axis)], is_sparse=False)
    labels = tf.cast(labels, tf.int32)
    if tuple(labels.shape) != tokens:
        labels = tf.reshape(labels, tokens)
    if head.axis is None:
        return _LabelsOfTokens(tensors=[labels], layouts=[head.token_layout], is_sparse=True)
    # A dim for the devices that share the classes.
    layout = (head.axis, *head.token_layout)
    first = transfer.relayout(head.local_classes * tf.range(head.devices, dtype=tf.int32), (head.axis,), head.mesh)
    first = tf.reshape(first, (head.devices, *[1] * len(tokens)))
    labels = labels[None]
    is_known = (labels >= 0) & (labels < head.classes)
    has = transfer.relayout((labels >= first) & (labels < first + head.local_classes), layout, head.mesh)
    # A label that is no class stays unchanged: the step fails and names it.
    places = transfer.relayout(tf.where(has, labels - first, tf.where(is_known, 0, labels)), layout, head.mesh)
    return _LabelsOfTokens(tensors=[places, tf.cast(has, dtype)], layouts=[layout, layout], is_sparse=True)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Device:
    """What a device computes.

    Attributes:
        head: The projection.
        chunks: The chunks of its tokens.
        is_sparse: True for integer labels.
        dtype: The dtype of the logits in the loss.
    """

    head: Head
    chunks: _Chunks
    is_sparse: bool
    dtype: tf.DType

    def _given(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Return the chunks of the hidden states, the weights, the chunks of the labels, and what follows."""
        first, weights, width = tensors[0], len(self.head.weights.tensors), tensors[0].shape[-1]
        labels = (2 if self.head.axis is not None else 1) if self.is_sparse else 1
        dims = () if self.is_sparse else (self.head.local_classes,)
        given, rest = tensors[1 + weights :][:labels], tensors[1 + weights + labels :]
        split = [self.chunks.split(each, *dims) for each in given]
        return self.chunks.split(first, width), list(tensors[1 : 1 + weights]), split, list(rest)

    def _logits(self, hidden: tf.Tensor, weights: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return the logits of a chunk, and the tanh of the soft cap."""
        logits = tf.matmul(hidden, weights[0], transpose_b=self.head.weights.transposed)
        if len(weights) > 1:
            logits = logits + weights[1]
        cap = self.head.weights.soft_cap
        if cap is None:
            return tf.cast(logits, self.dtype), None
        tanh = tf.tanh(logits / tf.cast(cap, logits.dtype))
        return tf.cast(tanh * tf.cast(cap, logits.dtype), self.dtype), tanh

    def _places(self, labels: tf.Tensor) -> tf.Tensor:
        return tf.stack([tf.range(self.chunks.size, dtype=tf.int32), labels], -1)

    def _at_labels(self, logits: tf.Tensor, labels: Sequence[tf.Tensor]) -> tf.Tensor:
        if not self.is_sparse:
            return tf.reduce_sum(labels[0] * logits, -1)
        found = tf.gather_nd(logits, self._places(labels[0]))
        return found if len(labels) == 1 else found * labels[1]

    def _loop(
        self,
        body: Callable[[tf.Tensor], tuple[list[tf.Tensor], list[tf.Tensor]]],
        kept: Sequence[tuple[tf.DType, tuple[int, ...]]],
        sums: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Run a function of the number of a chunk.

        Args:
            body: Returns tensors to stack and tensors to sum.
            kept: The dtype and shape of each tensor to stack.
            sums: Zeros for each sum.

        Returns:
            The stacks and the sums.
        """
        count = self.chunks.count
        arrays = [tf.TensorArray(dtype, count, element_shape=shape) for dtype, shape in kept]

        def loop(number: tf.Tensor, arrays: Any, sums: Any) -> Any:
            written, terms = body(number)
            arrays = [array.write(number, each) for array, each in zip(arrays, written, strict=True)]
            sums = [total + tf.cast(each, total.dtype) for total, each in zip(sums, terms, strict=True)]
            return number + 1, arrays, sums

        _, arrays, sums = tf.while_loop(
            lambda number, *_: number < count, loop, (tf.constant(0), arrays, list(sums)), parallel_iterations=1,
            maximum_iterations=count,
        )  # fmt: skip
        return [array.stack() for array in arrays], list(sums)

    def forward(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return the numbers of `_NumbersOfTokens`, each with the local shape of tokens."""
        hidden, weights, labels, _ = self._given(tensors)

        def body(number: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            logits, _ = self._logits(tf.gather(hidden, number), weights)
            most = tf.reduce_max(logits, -1)
            at_label = self._at_labels(logits, [tf.gather(each, number) for each in labels])
            best = tf.argmax(logits, -1, output_type=tf.int32)
            # If all local classes are at -inf, so is `most`.
            shift = tf.where(tf.math.is_finite(most), most, tf.zeros_like(most))
            total = tf.reduce_sum(tf.exp(logits - shift[:, None]), -1)
            return [most, total, at_label, best], []

        kept = [(self.dtype, (self.chunks.size,))] * 3 + [(tf.int32, (self.chunks.size,))]
        made, _ = self._loop(body, kept, [])
        shape = tensors[0].shape[:-1]
        return [self.chunks.joined(each, shape) for each in made]

    def above(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return how many local classes score above the label's class. The last argument is the label's logit."""
        hidden, weights, _, (at_label,) = self._given(tensors)
        at_label = self.chunks.split(at_label)

        def body(number: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            logits, _ = self._logits(tf.gather(hidden, number), weights)
            is_above = logits > tf.gather(at_label, number)[:, None]
            return [tf.reduce_sum(tf.cast(is_above, tf.float32), -1)], []

        (made,), _ = self._loop(body, [(tf.float32, (self.chunks.size,))], [])
        return [self.chunks.joined(made, tensors[0].shape[:-1])]

    def backward(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Return the gradients of the hidden states and weights.

        The last three arguments are `most` and `total`, and the gradient of the loss of each token.
        """
        hidden, weights, labels, (most, total, upstream) = self._given(tensors)
        # The tokens that fill up the last chunk have shares of zero, also if their logits are large.
        most = self.chunks.split(most, fill=self.dtype.max)
        factor, upstream = self.chunks.split(upstream / total), self.chunks.split(upstream)
        transposed, cap = self.head.weights.transposed, self.head.weights.soft_cap
        exact = tf.float64 if self.dtype == tf.float64 else tf.float32

        def body(number: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            its = tf.gather(hidden, number)
            logits, tanh = self._logits(its, weights)
            up = tf.gather(upstream, number)
            shares = tf.exp(logits - tf.gather(most, number)[:, None]) * tf.gather(factor, number)[:, None]
            given = [tf.gather(each, number) for each in labels]
            if self.is_sparse:
                amounts = -up if len(given) == 1 else -up * given[1]
                # In place, where TensorScatterSub might copy.
                gradient = tf.raw_ops.ScatterNdNonAliasingAdd(
                    input=shares, indices=self._places(given[0]), updates=amounts
                )
            else:
                gradient = shares - given[0] * up[:, None]
            gradient = tf.cast(gradient, its.dtype)
            if tanh is not None and cap is not None:
                gradient = gradient * (1 - tanh * tanh)
            of_hidden = tf.matmul(gradient, weights[0], transpose_b=not transposed)
            pair = (gradient, its) if transposed else (its, gradient)
            terms = [tf.matmul(*pair, transpose_a=True)]
            if len(weights) > 1:
                terms.append(tf.reduce_sum(tf.cast(gradient, exact), 0))
            return [of_hidden], terms

        kept = [(hidden.dtype, (self.chunks.size, hidden.shape[-1]))]
        zeros = [tf.zeros(each.shape, exact) for each in weights]
        (of_hidden,), sums = self._loop(body, kept, zeros)
        found = [tf.cast(total, each.dtype) for total, each in zip(sums, weights, strict=True)]
        return [self.chunks.joined(of_hidden, tensors[0].shape), *found]


def _called(function: Callable[..., list[tf.Tensor]], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Call a function of local tensors as one operation."""
    expansions.allow_local("GatherNd", "ScatterNdNonAliasingAdd")

    def local(*given: tf.Tensor) -> list[tf.Tensor]:
        return function(*given)

    local.__name__ = local_shards.NAME
    with local_shards.scope(), _private.stop_recording():
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in tensors]
        made: list[tf.Tensor] = list(tf.function(local, autograph=False).get_concrete_function(*specs)(*tensors))
        return made


def _entered(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the local shard of a tensor."""
    if not any(axes):
        return transfer.replicate(tensor, mesh)
    with local_shards.scope():
        return local_shards.to_local(transfer.relayout(tensor, axes, mesh), axes, mesh)


def _left(tensor: tf.Tensor, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the global tensor of local shards."""
    return local_shards.from_local(tensor, axes, mesh)


def _summed(tensor: tf.Tensor, axis: str | None, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the sum of local tensors over the devices of an axis, whose dims `axes` shard."""
    if axis is None:
        return _left(tensor, axes, mesh)
    with local_shards.scope():
        stacked = tf.expand_dims(tensor, 0)
    return tf.reduce_sum(_left(stacked, (axis, *axes), mesh), 0)


# --- losses ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Logits:
    """Logits of a head, perhaps cast to a larger dtype, reshaped, or set to zero at some tokens.

    Attributes:
        head: The head.
        kept: False for tokens whose logits are zero, `(...)`; None if no logits were set to zero. Keras does that for
            labels of `ignore_class`.
    """

    head: Head
    kept: tf.Tensor | None = None


def _logits_of(tensor: Any) -> _Logits | None:
    """Return which logits a tensor is; None if it is something else."""
    step = steps.current()
    if step is None or not step.heads or not isinstance(tensor, tf.Tensor) or steps.here() is not step.graph:
        return None
    kept: tf.Tensor | None = None
    while True:
        head = step.heads.get(tensor.ref())
        if head is not None:
            return _Logits(head=head, kept=kept)
        operation = tensor.op
        if operation.type == "SelectV2" and kept is None:
            kept = _mask_of(operation, tensor)
            if kept is None:
                return None
            tensor = operation.inputs[1]
            continue
        if operation.type not in ("Cast", "EnsureShape", "Identity", "IdentityN", "Relayout", "Reshape"):
            return None
        if programs.has_custom_gradients([operation]):
            return None  # The gradient of the logits is not the head's.
        before = operation.inputs[tensor.value_index if operation.type == "IdentityN" else 0]
        if not before.dtype.is_floating or before.dtype.size > tensor.dtype.size:
            return None
        if before.shape.rank is None or not before.shape.rank or before.shape[-1] != tensor.shape[-1]:
            return None
        tensor = before


def _mask_of(operation: tf.Operation, logits: tf.Tensor) -> tf.Tensor | None:
    """Return the mask `(...)` of a `tf.where(mask[..., None], logits, 0)`; None for another choice."""
    condition, chosen, other = operation.inputs
    zero = tf.get_static_value(other)
    is_zero = zero is not None and not zero.any()
    if not is_zero or chosen.shape != logits.shape or tuple(condition.shape) != (*logits.shape[:-1], 1):
        return None
    return tf.squeeze(condition, -1)


@dataclasses.dataclass(kw_only=True, eq=False)
class _Pass:
    """A forward pass over the chunks of a head, for some labels.

    Attributes:
        head: The head.
        device: What each device computes.
        places: The local shards of the labels.
        shares: The sum of the labels of each token, if they are dense.
    """

    head: Head
    device: _Device
    places: list[tf.Tensor]
    shares: tf.Tensor | None

    @classmethod
    def of(cls, head: Head, labels: tf.Tensor, dtype: tf.DType, *, is_sparse: bool) -> "_Pass":
        """Return the pass for some labels. Losses and metrics with the same labels share it."""
        key = _root(labels).ref(), is_sparse, dtype
        if key not in head.passes:
            with _private.stop_recording():
                head.passes[key] = cls._made(head, labels, dtype, is_sparse)
        return head.passes[key]

    @classmethod
    def _made(cls, head: Head, labels: tf.Tensor, dtype: tf.DType, is_sparse: bool) -> "_Pass":
        given = _labels_of(labels, head, is_sparse=is_sparse, dtype=dtype)
        places = [_entered(*each, head.mesh) for each in zip(given.tensors, given.layouts, strict=True)]
        if is_sparse and head.axis is not None:
            with local_shards.scope():
                places = [tf.squeeze(each, 0) for each in places]
        return cls(
            head=head,
            device=_Device(head=head, chunks=head.chunks(), is_sparse=is_sparse, dtype=dtype),
            places=places,
            shares=None if is_sparse else tf.reduce_sum(given.tensors[0], -1),
        )

    @functools.cached_property
    def statistics(self) -> "_NumbersOfTokens":
        """The statistics of the logits of all classes."""
        head, mesh = self.head, self.head.mesh
        with _private.stop_recording():
            local = _called(self.device.forward, [*head.entered, *self.places])
            if head.axis is None:
                most, total, at_label, best = (_left(each, head.token_layout, mesh) for each in local)
                return _NumbersOfTokens(most=most, total=total, at_label=at_label, best=best)
            mosts, totals, at_labels, bests = (_by_device(each, head) for each in local)
            most = tf.reduce_max(mosts, 0)
            firsts = head.local_classes * tf.range(head.devices, dtype=tf.int32)
            firsts = tf.reshape(firsts, (-1, *[1] * len(head.token_layout)))
            return _NumbersOfTokens(
                most=most,
                total=tf.reduce_sum(tf.where(totals > 0, totals * tf.exp(mosts - most), 0), 0),
                at_label=tf.reduce_sum(at_labels, 0),
                # The first of the largest: the smallest class that reaches the maximum.
                best=tf.reduce_min(tf.where(mosts == most, bests + firsts, head.classes), 0),
            )

    def above(self) -> tf.Tensor:
        """Return how many classes of each token score above the class of its label."""
        head = self.head
        with _private.stop_recording():
            at_label = _entered(self.statistics.at_label, head.token_layout, head.mesh)
            (local,) = _called(self.device.above, [*head.entered, *self.places, at_label])
            if head.axis is None:
                return _left(local, head.token_layout, head.mesh)
            return tf.reduce_sum(_by_device(local, head), 0)

    def gradients(self, upstream: tf.Tensor) -> list[tf.Tensor]:
        """Return the gradients of the hidden states and the weights."""
        head, mesh, found = self.head, self.head.mesh, self.statistics
        numbers = [_entered(each, head.token_layout, mesh) for each in (found.most, found.total, upstream)]
        of_hidden, *of_weights = _called(self.device.backward, [*head.entered, *self.places, *numbers])
        return [
            _summed(of_hidden, head.axis, head.layouts[0], mesh),
            *(_summed(each, head.data, axes, mesh) for each, axes in zip(of_weights, head.layouts[1:], strict=True)),
        ]


def _by_device(local: tf.Tensor, head: Head) -> tf.Tensor:
    """Return the numbers of all devices that share the classes: `(devices, ...)`, each device with its tokens."""
    with local_shards.scope():
        row = tf.expand_dims(local, 0)
    made = _left(row, (head.axis, *head.token_layout), head.mesh)
    return transfer.relayout(made, (None, *head.token_layout), head.mesh)


def _root(labels: tf.Tensor) -> tf.Tensor:
    """Return the tensor of which labels are a cast or reshaped copy."""
    while labels.op.type in ("Cast", "ExpandDims", "Identity", "Relayout", "Reshape", "Squeeze"):
        before = labels.op.inputs[0]
        exact = before.dtype.is_integer or (before.dtype in (tf.float32, tf.float64) and labels.dtype.is_floating)
        if not exact or labels.dtype.size < min(before.dtype.size, 4):
            break
        labels = before
    return labels


def cross_entropy(labels: Any, logits: Any, *, is_sparse: bool) -> tf.Tensor | None:
    """Return the cross entropy of each token by chunks. None if the logits are not those of a head, or stay whole.

    Args:
        labels: Integers `(...)`, or shares of classes `(..., classes)`.
        logits: `(..., classes)`.
        is_sparse: True for integer labels.

    Returns:
        `(...)`, in the dtype of the logits.
    """
    its = _logits_of(logits)
    if its is None or (its.kept is not None and not is_sparse):
        return None
    head, kept = its.head, its.kept
    if not head.hidden.shape.is_fully_defined():
        head.call.note(head, None, "the size of the batch is not known while the step is traced")
        return None
    labels = tf.convert_to_tensor(labels)
    reason = head.reason_against(logits.dtype)
    if not is_sparse and not reason and _has_gradient(labels):
        reason = "the labels are computed from variables"
    if reason:
        head.call.note(head, None, reason)
        return None
    head.is_used = True
    head.call.note(head, head.chunks())

    def loss(*_: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], list[tf.Tensor]]]:
        # TensorFlow's kernels compute in float32, too, if the logits are smaller.
        dtype = tf.float32 if logits.dtype.size < tf.float32.size else logits.dtype
        its = _Pass.of(head, labels, dtype, is_sparse=is_sparse)
        found, tokens = its.statistics, head.hidden.shape[:-1]
        mask = None if kept is None else tf.reshape(kept, tokens)
        with _private.stop_recording():
            value = tf.math.log(found.total) + found.most
            value = (value if its.shares is None else value * its.shares) - found.at_label
            if mask is not None:
                # Logits of zero.
                value = tf.where(mask, value, tf.cast(math.log(head.classes), value.dtype))
            value = tf.cast(value, logits.dtype)

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
            upstream = tf.cast(upstream, dtype)
            if mask is not None:
                upstream = tf.where(mask, upstream, tf.zeros_like(upstream))
            return _unrecorded(its.gradients, upstream, head)

        return value, gradient

    with tf.name_scope("chunked_cross_entropy"):
        made: tf.Tensor = tf.custom_gradient(loss)(head.hidden, *head.weights.tensors)
        return made if made.shape == logits.shape[:-1] else tf.reshape(made, logits.shape[:-1])


def _has_gradient(labels: tf.Tensor) -> bool:
    """Return whether labels depend on variables."""
    return any(each.type == "ReadVariableOp" for each in graph_edits.ancestors([labels]))


def _unrecorded(function: Callable[[tf.Tensor], list[tf.Tensor]], upstream: tf.Tensor, head: Head) -> list[tf.Tensor]:
    """Return gradients that have no gradient themselves."""
    if not _private.could_record():
        return function(upstream)

    def refuse(*_: tf.Tensor) -> Any:
        raise UnsupportedOperationError(
            f"The cross entropy by chunks of layer '{head.path}' has no second derivative. Leave "
            "chunked_cross_entropy out."
        )

    def made(upstream: tf.Tensor, *_: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        with _private.stop_recording():
            return function(upstream), refuse

    return list(tf.custom_gradient(made)(upstream, head.hidden, *head.weights.tensors))


# --- metrics -----------------------------------------------------------------------------------------


def is_used(scores: Any) -> bool:
    """Return whether scores are the output of a head of which a cross entropy was computed by chunks."""
    its = _logits_of(_private.keras_logits(scores))
    return its is not None and its.kept is None and its.head.is_used


def is_best(labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """Return whether the label of each token is the first class with the largest logit, as a bool tensor.

    Args:
        labels: Integers `(...)`.
        scores: The output of a head that `is_used`.

    Returns:
        `(...)`.
    """
    first = next(iter(_used_head(scores).passes.values()))  # The best class does not depend on the labels.
    return labels == _shaped(first.statistics.best, labels)


def is_among_best(labels: tf.Tensor, scores: tf.Tensor, k: int) -> tf.Tensor:
    """Return whether fewer than `k` classes score above the label's class; arguments and result as for `is_best`."""
    head = _used_head(scores)
    known = (labels >= 0) & (labels < head.classes)
    first = next(iter(head.passes.values()))
    its = _Pass.of(head, tf.where(known, labels, 0), first.device.dtype, is_sparse=True)
    above, at_label = _shaped(its.above(), labels), _shaped(its.statistics.at_label, labels)
    return (above < k) & known & tf.math.is_finite(at_label)


def _used_head(scores: tf.Tensor) -> Head:
    its = _logits_of(_private.keras_logits(scores))
    assert its is not None, "The caller asks is_used."
    return its.head


def _shaped(tensor: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.shape == like.shape else tf.reshape(tensor, like.shape)


# --- what a step has done ----------------------------------------------------------------------------


class _Expected(threading.local):
    """The model and kind of step that a thread traces for Keras, such as "training step"."""

    of: tuple[str, str] | None = None


_expected = _Expected()


@contextlib.contextmanager
def expected(model: keras.Model, kind: str, option: ChunkedCrossEntropy | None) -> Iterator[None]:
    """Let `settle` check that a step has a cross entropy by chunks, if the user gave a number of tokens.

    Raises:
        StrategyError: The model runs eagerly.
    """
    outer = _expected.of
    is_strict = option is not None and option.chunk != AUTO_CHUNKS and kind != "prediction step"
    _expected.of = (model.name, kind) if is_strict else None
    try:
        if is_strict and model.run_eagerly:
            _refuse(model.name, kind, "the model was compiled with run_eagerly=True")
        yield
    finally:
        _expected.of = outer


def _refuse(model: str, kind: str, reason: str) -> NoReturn:
    raise StrategyError(
        f"The {kind} of model '{model}' cannot compute its cross entropy by chunks: {reason}. {_NEEDED}. Otherwise "
        "give chunked_cross_entropy='auto', with which such a model computes whole logits."
    )


def settle(results: Any) -> None:
    """End the trace of a step function: note whether the step needs whole logits.

    Args:
        results: What the step function returned.

    Raises:
        StrategyError: A step of Keras with a given number of tokens has no cross entropy by chunks, or needs the
            logits as well.
    """
    step = steps.current()
    if step is None or step.graph is None or steps.here() is not step.graph:
        return
    heads: list[Head] = [head for head in step.heads.values() if head.is_used]
    if _expected.of is not None and not heads:
        reasons = [head.call.last.reason for head in step.heads.values() if head.call.last is not None]
        _refuse(*_expected.of, next(filter(None, reasons), "it has none, or not of the output of a last layer"))
    kept = {each.ref() for each in tf.nest.flatten(results) if isinstance(each, tf.Tensor)}
    kept |= {each.ref() for storage in step.writes.storages for each in step.tensors_of(storage)}
    for head in heads:
        user = _user_of(head.logits, kept)
        if user is None:
            # They are not computed, so the weights are not gathered for them.
            step.record.unused.update(head.operations)
            continue
        head.call.note(head, head.chunks(), "")
        if _expected.of is not None:
            _refuse(*_expected.of, f"the step uses the output of layer '{head.path}' {user}")
        last = head.call.last
        assert last is not None
        head.call.last = dataclasses.replace(last, reason=f"the step uses them {user}")


def _user_of(logits: tf.Tensor, kept: set[Any]) -> str | None:
    """Return in words what a step needs logits for; None if it does not need them."""
    if logits.ref() in kept:
        return "as a result"
    for first in logits.consumers():
        for operation in graph_edits.descendants([first]):
            if _private.is_stateful(operation) or any(each.ref() in kept for each in operation.outputs):
                return f"in operation '{first.name}' ({first.type})"
    return None
