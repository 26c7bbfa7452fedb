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

projection_heads.py records the tensors of the last layer, and chunked_logits.py has what each device computes.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import local_shards, transfer
from tfshard.errors import StrategyError, UnsupportedOperationError, warn
from tfshard.layouts.config import AUTO_CHUNKS, ChunkedCrossEntropy
from tfshard.layouts.variable_layout import Axes
from tfshard.operations import programs
from tfshard.operations.chunked_logits import ChunkedLogits
from tfshard.operations.projection_heads import Head
from tfshard.storage import graph_edits, steps

_NEEDED = (
    "The last layer must be a keras.layers.Dense without LoRA or quantization, with activation None or 'softmax', or a "
    "ReversibleEmbedding called with reverse=True. The loss must be a SparseCategoricalCrossentropy or "
    "CategoricalCrossentropy of the output of that layer, and only accuracy, top-k and cross-entropy metrics may use "
    "the output"
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _LogitStatistics:
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
    # A label that is no class stays unchanged: on CPUs the step fails and names it. Compiled, its loss is NaN.
    places = transfer.relayout(tf.where(has, labels - first, tf.where(is_known, 0, labels)), layout, head.mesh)
    return _LabelsOfTokens(tensors=[places, tf.cast(has, dtype)], layouts=[layout, layout], is_sparse=True)


def _summed(tensor: tf.Tensor, axis: str | None, axes: Axes, mesh: dtensor.Mesh) -> tf.Tensor:
    """Return the sum of local tensors over the devices of an axis, whose dims `axes` shard."""
    if axis is None:
        return local_shards.from_local(tensor, axes, mesh)
    with local_shards.scope():
        stacked = tf.expand_dims(tensor, 0)
    return tf.reduce_sum(local_shards.from_local(stacked, (axis, *axes), mesh), 0)


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
    device: ChunkedLogits
    places: list[tf.Tensor]
    shares: tf.Tensor | None

    @classmethod
    def of(cls, head: Head, labels: tf.Tensor, dtype: tf.DType, *, is_sparse: bool) -> "_Pass":
        """Return the pass for some labels. Losses and metrics with the same labels share it."""
        key = _root(labels).ref(), is_sparse, dtype
        if key not in head.passes:
            with _private.stop_recording():
                head.passes[key] = cls._made(head, labels, dtype, is_sparse)
        found: _Pass = head.passes[key]
        return found

    @classmethod
    def _made(cls, head: Head, labels: tf.Tensor, dtype: tf.DType, is_sparse: bool) -> "_Pass":
        given = _labels_of(labels, head, is_sparse=is_sparse, dtype=dtype)
        places = [local_shards.local_shard(*each, head.mesh) for each in zip(given.tensors, given.layouts, strict=True)]
        if is_sparse and head.axis is not None:
            with local_shards.scope():
                places = [tf.squeeze(each, 0) for each in places]
        return cls(
            head=head,
            device=ChunkedLogits(
                chunks=head.chunks(),
                classes=head.local_classes,
                is_shared=head.axis is not None,
                is_sparse=is_sparse,
                transposed=head.weights.transposed,
                has_bias=head.weights.bias is not None,
                soft_cap=head.weights.soft_cap,
                dtype=dtype,
                compiled=head.call.compiled,
            ),
            places=places,
            shares=None if is_sparse else tf.reduce_sum(given.tensors[0], -1),
        )

    def _run(self, function: str, *more: tf.Tensor) -> list[tf.Tensor]:
        """Run a function on each device."""
        head = self.head
        tensors = [*head.entered, *self.places, *more]
        try:
            return self.device.run(function, tensors, head.mesh)
        except programs.NotCompiledError as error:
            warn(f"XLA cannot compile the cross entropy by chunks. It runs as without jit_compile=True: {error}")
        head.call.compiled, self.device = False, dataclasses.replace(self.device, compiled=False)
        head.call.note(head, head.chunks())
        return self.device.run(function, tensors, head.mesh)

    @functools.cached_property
    def statistics(self) -> _LogitStatistics:
        """The statistics of the logits of all classes."""
        head, mesh = self.head, self.head.mesh
        with _private.stop_recording():
            local = self._run("forward")
            if head.axis is None:
                most, total, at_label, best = (local_shards.from_local(each, head.token_layout, mesh) for each in local)
                return _LogitStatistics(most=most, total=total, at_label=at_label, best=best)
            mosts, totals, at_labels, bests = (_by_device(each, head) for each in local)
            most = tf.reduce_max(mosts, 0)
            firsts = head.local_classes * tf.range(head.devices, dtype=tf.int32)
            firsts = tf.reshape(firsts, (-1, *[1] * len(head.token_layout)))
            return _LogitStatistics(
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
            at_label = local_shards.local_shard(self.statistics.at_label, head.token_layout, head.mesh)
            (local,) = self._run("above", at_label)
            if head.axis is None:
                return local_shards.from_local(local, head.token_layout, head.mesh)
            return tf.reduce_sum(_by_device(local, head), 0)

    def gradients(self, upstream: tf.Tensor) -> list[tf.Tensor]:
        """Return the gradients of the hidden states and the weights."""
        head, mesh, found = self.head, self.head.mesh, self.statistics
        numbers = [
            local_shards.local_shard(each, head.token_layout, mesh) for each in (found.most, found.total, upstream)
        ]
        of_hidden, *of_weights = self._run("backward", *numbers)
        return [
            _summed(of_hidden, head.axis, head.layouts[0], mesh),
            *(_summed(each, head.data, axes, mesh) for each, axes in zip(of_weights, head.layouts[1:], strict=True)),
        ]


def _by_device(local: tf.Tensor, head: Head) -> tf.Tensor:
    """Return the numbers of all devices that share the classes: `(devices, ...)`, each device with its tokens."""
    with local_shards.scope():
        row = tf.expand_dims(local, 0)
    made = local_shards.from_local(row, (head.axis, *head.token_layout), head.mesh)
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
