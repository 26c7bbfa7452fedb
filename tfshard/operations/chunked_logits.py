"""The logits of a device's tokens, chunk by chunk: what each device computes for a cross entropy.

All functions take local tensors. With z, the logits of a token, m, their maximum, and y, the class of its label:

- `forward` returns m, the sum of exp(z - m), z[y], and the first class with the logit m;
- `above` counts the classes with a logit above z[y];
- `backward` computes the logits of a chunk again, and from them the gradient of its hidden states, and its term in the
  gradient of the kernel.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import expansions, local_shards
from tfshard.operations import programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenChunks:
    """Chunks of equal size: the last one is padded.

    Attributes:
        tokens: The tokens of a device.
        count: The number of chunks.
        size: The tokens of a chunk.
    """

    tokens: int
    count: int
    size: int

    @classmethod
    def of(cls, tokens: int, most: int) -> "TokenChunks":
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedLogits:
    """What each device computes. The operands are hidden states, kernel, bias, labels, and further arguments.

    Sparse labels are the class of each token in the local classes. If devices share the classes, the next operand says
    whether the local classes contain the label. Dense labels are probabilities `(..., local classes)`.

    Attributes:
        chunks: The chunks of the local tokens.
        classes: The number of local classes.
        is_shared: True if several devices share the classes.
        is_sparse: True for integer labels.
        transposed: True if the kernel is `(classes, width)`, and not `(width, classes)`.
        has_bias: True with a bias.
        soft_cap: Logits z become `soft_cap * tanh(z / soft_cap)`; None without.
        dtype: The dtype of the logits in the loss.
        compiled: True if each function is one XLA program.
    """

    chunks: TokenChunks
    classes: int
    is_shared: bool
    is_sparse: bool
    transposed: bool
    has_bias: bool
    soft_cap: float | None
    dtype: tf.DType
    compiled: bool

    def run(self, function: str, tensors: Sequence[tf.Tensor], mesh: dtensor.Mesh) -> list[tf.Tensor]:
        """Run a function in a step that is traced, as one operation.

        Args:
            function: `"forward"`, `"above"` or `"backward"`.
            tensors: The operands, local tensors.
            mesh: The mesh.

        Raises:
            NotCompiledError: XLA cannot compile the function.
        """
        expansions.allow_local("GatherNd", "ScatterNdNonAliasingAdd")

        def local(*given: tf.Tensor) -> list[tf.Tensor]:
            found: list[tf.Tensor] = getattr(self, function)(*given)
            return found

        local.__name__ = local_shards.NAME
        specs = tuple(tf.TensorSpec(each.shape, each.dtype) for each in tensors)

        def traced() -> Any:
            return tf.function(local, autograph=False).get_concrete_function(*specs)

        def lowered() -> programs.Program:
            made = traced()
            return programs.lower(made.inputs, made.outputs, mesh)

        with local_shards.scope(), _private.stop_recording():
            if self.compiled:
                key = (self, function, specs, mesh.device_type())
                return _programs.find(key, lowered).call(tensors)
            return list(traced()(*tensors))

    def _given(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Return the chunks of the hidden states, the weights, the chunks of the labels, and what follows."""
        first, weights, width = tensors[0], 2 if self.has_bias else 1, tensors[0].shape[-1]
        labels = 2 if self.is_sparse and self.is_shared else 1
        dims = () if self.is_sparse else (self.classes,)
        given, rest = tensors[1 + weights :][:labels], tensors[1 + weights + labels :]
        split = [self.chunks.split(each, *dims) for each in given]
        return self.chunks.split(first, width), list(tensors[1 : 1 + weights]), split, list(rest)

    def _logits(self, hidden: tf.Tensor, weights: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return the logits of a chunk, and the tanh of the soft cap."""
        logits = tf.matmul(hidden, weights[0], transpose_b=self.transposed)
        if len(weights) > 1:
            logits = logits + weights[1]
        cap = self.soft_cap
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
        # TensorFlow's kernel for CPUs fails for a label that is no class. Other kernels give any value.
        is_class = (labels[0] >= 0) & (labels[0] < self.classes)
        found = tf.where(is_class, found, tf.constant(float("nan"), found.dtype))
        return found if len(labels) == 1 else found * labels[1]

    def _less_at_labels(self, shares: tf.Tensor, labels: tf.Tensor, amounts: tf.Tensor) -> tf.Tensor:
        """Return the shares of the classes, less an amount at the label of each token."""
        if self.compiled:  # XLA computes this in the same loop as the shares.
            is_label = tf.range(self.classes, dtype=labels.dtype) == labels[:, None]
            return shares - tf.where(is_label, amounts[:, None], tf.zeros([], amounts.dtype))
        # In place, where TensorScatterSub might copy.
        return tf.raw_ops.ScatterNdNonAliasingAdd(input=shares, indices=self._places(labels), updates=-amounts)

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
        """Return maximum, sum, logit of the label and best class, each with the local shape of tokens."""
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
        transposed, cap = self.transposed, self.soft_cap
        exact = tf.float64 if self.dtype == tf.float64 else tf.float32

        def body(number: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            its = tf.gather(hidden, number)
            logits, tanh = self._logits(its, weights)
            up = tf.gather(upstream, number)
            shares = tf.exp(logits - tf.gather(most, number)[:, None]) * tf.gather(factor, number)[:, None]
            given = [tf.gather(each, number) for each in labels]
            if self.is_sparse:
                gradient = self._less_at_labels(shares, given[0], up if len(given) == 1 else up * given[1])
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


# Programs by what they compute.
_programs = programs.ProgramCache[programs.Program](programs.NotCompiledError)
