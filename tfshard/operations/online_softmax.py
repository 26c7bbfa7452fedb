"""Attention in blocks with an online softmax: no tensor has a number for each pair of a query and a key.

This is FlashAttention-2 (Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
algorithms 1 and 2) with a TensorFlow loop over pairs of a block of queries and a block of keys. The forward pass keeps
the largest score of each query, and the sum of the exponentials. The backward pass computes the scores of a block
again. With S, the scores of a block, m and l, the maximum and the sum of its queries:

    P = exp(S - m) / l          dV += P^T dO        dP = dO V^T
    dS = P (dP - sum(dO O))     dQ += dS K          dK += dS^T Q

The paper keeps m + log(l). A query that may attend to no key has m = -2.4e38 in Keras, which would absorb log(l).

All functions take local tensors. Each pass is a function with loops, and equal calls share it. XLA can compile it.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from tfshard import _private
from tfshard.devices import local_shards
from tfshard.errors import UnsupportedOperationError
from tfshard.operations.block_masks import BlockMask

# The most queries, and the most keys, of a block.
BLOCK = 512

# The score of a masked pair, as in Keras's TensorFlow backend ("_get_large_negative").
_LOW = -0.7 * 3.38953e38

# A part of the names of the functions.
NAME = f"{local_shards.NAME}_attention_in_blocks"

_Pass: TypeAlias = Callable[..., list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """What attention computes, apart from its tensors.

    Attributes:
        scale: The factor of the scores.
        is_causal: True if query number i may attend to keys 0 to i only.
        soft_cap: The bound of the scores, by a tanh; None for no bound.
        mask: How to compute the mask of a block from its parts; None for no mask.
        empty: What a query gets that may attend to no key: `"mean"`, the mean of all values, as from
            `keras.ops.dot_product_attention`; `"zero"`, as with a `keras.layers.Softmax` with a mask.
        block: The most queries, and the most keys, of a block.
    """

    scale: float
    is_causal: bool = False
    soft_cap: float | None = None
    mask: BlockMask | None = None
    empty: Literal["mean", "zero"] = "mean"
    block: int = BLOCK


class KeyGather(Protocol):
    """Gathers the keys and values of other devices."""

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the keys or values of all devices."""

    def scatter(self, gradient: tf.Tensor) -> tf.Tensor:
        """Return the sum of the devices' gradients of this device's keys or values."""


def attend(
    kind: Attention,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    parts: Sequence[tf.Tensor] = (),
    exchange: KeyGather | None = None,
) -> tf.Tensor:
    """Return the attention of queries to keys, in memory that is linear in their numbers.

    Scores, exponentials and sums are float32 (float64 for float64 tensors); the products take the dtype of `query`.

    Args:
        kind: What to compute.
        query: `(B, T, N, H)`, with static shape.
        key: `(B, S, K, H)`; K divides N: each head of the keys serves N / K heads of the queries.
        value: `(B, S, K, V)`.
        parts: The parts of the mask, `(B or 1, N or 1, T or 1, S or 1)`.
        exchange: Gathers keys and values. The backward pass gathers them again, so no full keys are kept. By default,
            `key` and `value` are full.

    Returns:
        `(B, T, N, V)`, in the dtype of `value`.

    Raises:
        UnsupportedOperationError: A second derivative is taken.
    """
    given = [query, key, value, *parts]

    def full(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        if exchange is None:
            return [query, key, value, *parts]
        return [query, exchange.gather(key), exchange.gather(value), *parts]

    def apply(*given: tf.Tensor) -> tuple[tf.Tensor, Callable[..., list[tf.Tensor | None]]]:
        output, most, total = _call(_forward, kind, full(*given))

        def gradient(upstream: tf.Tensor) -> list[tf.Tensor | None]:
            of_query, *others = _gradients(kind, [*full(*given), output, most, total, upstream])
            if exchange is not None:
                others = [exchange.scatter(each) for each in others]
            return [of_query, *others, *(None for _ in parts)]

        return output, gradient

    result: tf.Tensor = tf.custom_gradient(apply)(*given)
    return result


def _gradients(kind: Attention, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the gradients of queries, keys and values, which you cannot differentiate."""

    def apply(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def refused(*upstream: tf.Tensor) -> Any:
            raise UnsupportedOperationError(
                "Attention in blocks has no second derivative. Use ShardedStrategy(attention='math') for a step that "
                f"differentiates gradients. Received: the gradient of {len(upstream)} gradients of attention"
            )

        return _call(_backward, kind, given), refused

    made: list[tf.Tensor] = tf.custom_gradient(apply)(*given)
    return made


def _call(make: Callable[["_Blocks"], _Pass], kind: Attention, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Call the function of a pass, which nothing differentiates."""
    specs = tuple((tuple(each.shape), each.dtype) for each in given)
    with _private.stop_recording():
        return list(tf.nest.flatten(_function(make, kind, specs)(*given)))


@functools.lru_cache(maxsize=256)
def _function(make: Callable[["_Blocks"], _Pass], kind: Attention, specs: tuple[tuple[Any, Any], ...]) -> Any:
    blocks = _Blocks(kind, *(shape for shape, _ in specs[:3]))
    function = make(blocks)

    def in_blocks(*given: tf.Tensor) -> list[tf.Tensor]:
        return function(*given)

    in_blocks.__name__ = f"{NAME}{make.__name__}_{hashlib.sha256(repr(kind).encode()).hexdigest()[:16]}"
    _passes[in_blocks.__name__] = make, kind
    with tf.init_scope():
        traced = tf.function(in_blocks, autograph=False)
        return traced.get_concrete_function(*(tf.TensorSpec(shape, dtype) for shape, dtype in specs))


# What passes compute, by the names of their functions.
_passes: dict[str, tuple[Callable[["_Blocks"], _Pass], Attention]] = {}
_FORWARD = re.compile(rf"{NAME}_forward_[0-9a-f]+")
_EITHER = re.compile(rf"{NAME}_(forward|backward)_[0-9a-f]+")


def kind_of_call(operation: tf.Operation) -> str | None:
    """Return what a call of a forward pass computes, equal for all shapes; None for other operations."""
    return _name_of(operation, _FORWARD)


def is_call(operation: tf.Operation) -> bool:
    """Return whether an operation calls a forward or a backward pass."""
    return _name_of(operation, _EITHER) is not None


def _name_of(operation: tf.Operation, pattern: re.Pattern[str]) -> str | None:
    match = pattern.search(_private.called_function(operation) or "")
    return None if match is None else match.group()


def call_again(operation: tf.Operation, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Call the pass of an operation with other operands, which may have other shapes."""
    name = _name_of(operation, _EITHER)
    assert name is not None, "The caller asks is_call."
    return _call(*_passes[name], given)


def heads_of_call(operation: tf.Operation) -> tuple[list[int | None], list[int | None]]:
    """Return the dim of the heads in each operand and in each result of a pass.

    It is None where all heads share a tensor. The gradient of such a tensor is a sum over the heads.
    """
    name = _name_of(operation, _EITHER)
    assert name is not None, "The caller asks is_call."
    is_forward = _passes[name][0] is _forward
    shapes = [each.shape for each in operation.inputs]
    count = len(shapes) - (0 if is_forward else 4)
    keys = 2 if shapes[1][2] > 1 or shapes[0][2] == 1 else None
    parts = [1 if shape[1] > 1 else None for shape in shapes[3:count]]
    operands = [2, keys, keys, *parts]
    return (operands, [2, 2, 2]) if is_forward else ([*operands, 2, 2, 2, 2], [2, keys, keys])


def samples_in_results(operation: tf.Operation, dims: Mapping[int, int]) -> dict[int, int] | None:
    """Return the dim of the samples in each result of a forward pass; None if it may combine samples.

    Args:
        operation: The call.
        dims: The dim of the samples in the operands that have samples, by the numbers of the operands.
    """
    for number, each in enumerate(operation.inputs):
        if dims.get(number) != (0 if number < 3 or each.shape[0] > 1 else None):
            return None
    return {0: 0, 1: 1, 2: 1}


class _Blocks:
    """The sizes of attention in blocks, and the operations of a block."""

    def __init__(self, kind: Attention, query: Sequence[int], key: Sequence[int], value: Sequence[int]):
        self.kind = kind
        self.batch, self.queries, self.heads, self.width = query
        self.keys, self.key_heads, self.value_width = key[1], key[2], value[3]
        self.groups = self.heads // self.key_heads
        self.query_blocks, self.key_blocks = -(-self.queries // kind.block), -(-self.keys // kind.block)
        # Blocks of equal sizes: few rows are added at the end.
        self.query_block = -(-self.queries // self.query_blocks)
        self.key_block = -(-self.keys // self.key_blocks)
        # Blocks of keys behind all queries of a block are left out. With a mask a query may have no key at all.
        self.leaves_out = kind.is_causal and (kind.mask is None or kind.empty == "zero")

    @property
    def score_shape(self) -> list[int]:
        return [self.batch, self.heads, self.query_block, self.key_block]

    def split_queries(self, tensor: tf.Tensor) -> tf.Tensor:
        """`(B, T, N, D)` as `(blocks, B, K, N / K * queries, D)`."""
        shape = [self.batch, self.query_blocks, self.query_block, self.key_heads, self.groups, tensor.shape[-1]]
        rows = self.query_blocks * self.query_block - self.queries
        split = tf.reshape(tf.pad(tensor, [[0, 0], [0, rows], [0, 0], [0, 0]]) if rows else tensor, shape)
        return tf.reshape(
            tf.transpose(split, [1, 0, 3, 4, 2, 5]),
            [self.query_blocks, self.batch, self.key_heads, self.groups * self.query_block, tensor.shape[-1]],
        )

    def join_queries(self, blocks: tf.Tensor) -> tf.Tensor:
        """The way back from `split_queries`."""
        width = blocks.shape[-1]
        shape = [self.query_blocks, self.batch, self.key_heads, self.groups, self.query_block, width]
        split = tf.transpose(tf.reshape(blocks, shape), [1, 0, 4, 2, 3, 5])
        rows = self.query_blocks * self.query_block
        return tf.reshape(split, [self.batch, rows, self.heads, width])[:, : self.queries]

    def split_keys(self, tensor: tf.Tensor) -> tf.Tensor:
        """`(B, S, K, D)` as `(blocks, B, K, keys, D)`."""
        rows = self.key_blocks * self.key_block - self.keys
        if rows:
            tensor = tf.pad(tensor, [[0, 0], [0, rows], [0, 0], [0, 0]])
        shape = [self.batch, self.key_blocks, self.key_block, self.key_heads, tensor.shape[-1]]
        return tf.transpose(tf.reshape(tensor, shape), [1, 0, 3, 2, 4])

    def join_keys(self, blocks: tf.Tensor) -> tf.Tensor:
        """The way back from `split_keys`."""
        rows = self.key_blocks * self.key_block
        joined = tf.reshape(tf.transpose(blocks, [1, 0, 3, 2, 4]), [self.batch, rows, self.key_heads, blocks.shape[-1]])
        return joined[:, : self.keys]

    def by_head(self, tensor: tf.Tensor) -> tf.Tensor:
        """`(B, K, N / K * queries, D)` as `(B, N, queries, D)`."""
        return tf.reshape(tensor, [self.batch, self.heads, self.query_block, tensor.shape[-1]])

    def by_key_head(self, tensor: tf.Tensor) -> tf.Tensor:
        """The way back from `by_head`."""
        return tf.reshape(tensor, [self.batch, self.key_heads, self.groups * self.query_block, tensor.shape[-1]])

    def padded_parts(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add rows to the parts of a mask, so that each block has all of its rows."""
        more = [0, 0, self.query_blocks * self.query_block - self.queries, self.key_blocks * self.key_block - self.keys]
        found = []
        for each in parts:
            rows = [0 if size == 1 else n for size, n in zip(each.shape, more, strict=True)]
            found.append(tf.pad(each, [[0, n] for n in rows]) if any(rows) else each)
        return found

    def kept(self, i: tf.Tensor, j: tf.Tensor, parts: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """Return which pairs of a block are not masked, `(B or 1, N or 1, queries, keys)`; None for all."""
        first, sizes = (i * self.query_block, j * self.key_block), (self.query_block, self.key_block)
        found = None if self.kind.mask is None else self.kind.mask.block(parts, first, sizes)
        if self.kind.is_causal:
            query = first[0] + tf.range(self.query_block)
            key = first[1] + tf.range(self.key_block)
            causal = (query[:, None] >= key[None, :])[None, None]
            found = causal if found is None else found & causal
        return found

    def scores(
        self, query: tf.Tensor, key: tf.Tensor, j: tf.Tensor, kept: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Return the scores `(B, N, queries, keys)` of a block, and the tanh of a soft cap."""
        products = tf.matmul(query, key, transpose_b=True)
        dtype = _of_sums(products.dtype)
        scores = tf.cast(tf.reshape(products, self.score_shape), dtype) * tf.cast(self.kind.scale, dtype)
        tanh = None
        if self.kind.soft_cap is not None:
            tanh = tf.tanh(scores / tf.cast(self.kind.soft_cap, dtype))
            scores = tanh * tf.cast(self.kind.soft_cap, dtype)
        if kept is not None:
            scores = tf.where(kept, scores, tf.constant(_LOW, dtype))
        if self.key_blocks * self.key_block > self.keys:
            exists = j * self.key_block + tf.range(self.key_block) < self.keys
            scores = tf.where(exists, scores, tf.constant(-float("inf"), dtype))
        return scores, tanh

    def zeroed(self, shares: tf.Tensor, kept: tf.Tensor | None) -> tf.Tensor:
        """Return the exponentials of scores, with zeros for masked pairs where a query without a key gets zeros."""
        if kept is None or self.kind.empty == "mean":
            return shares
        return tf.where(kept, shares, tf.zeros([], shares.dtype))

    def pairs(self) -> list[tuple[int, int]]:
        """Return the numbers of the pairs of blocks to compute, query blocks first."""
        return [
            (i, j)
            for i in range(self.query_blocks)
            for j in range(self.key_blocks)
            if not self.leaves_out or j * self.key_block < (i + 1) * self.query_block
        ]


def _of_sums(dtype: tf.DType) -> tf.DType:
    return tf.float64 if dtype == tf.float64 else tf.float32


def _loop(
    pairs: Sequence[tuple[int, int]], body: Callable[..., Sequence[tf.Tensor]], state: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Call a body with the numbers of each pair of blocks and the state, one iteration after the other.

    DTensor refuses a loop in a loop.
    """
    numbers = tf.constant(np.asarray(pairs, "int32"))

    def step(n: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (n + 1, *body(numbers[n, 0], numbers[n, 1], *state))

    # Further iterations would begin early, and take memory.
    made = tf.while_loop(lambda n, *state: n < len(pairs), step, (tf.constant(0), *state), parallel_iterations=1)
    return list(made[1:])


class _Stack:
    """A list of tensors of one shape, which loops read and write."""

    def __init__(self, shape: Sequence[int], dtype: tf.DType):
        self._shape, self._dtype = list(shape), dtype

    def full(self, count: int, value: float) -> tf.Tensor:
        tensor = tf.fill([count, *self._shape], tf.constant(value, self._dtype))
        return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=tf.constant(self._shape, tf.int32))

    def get(self, items: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
        found = tf.raw_ops.TensorListGetItem(
            input_handle=items,
            index=n,
            element_shape=tf.constant(self._shape, tf.int32),
            element_dtype=self._dtype,
        )
        return tf.ensure_shape(found, self._shape)

    def set(self, items: tf.Tensor, n: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.TensorListSetItem(input_handle=items, index=n, item=value)

    def add(self, items: tf.Tensor, n: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        return self.set(items, n, self.get(items, n) + tf.cast(value, self._dtype))

    def all(self, items: tf.Tensor, count: int) -> tf.Tensor:
        found = tf.raw_ops.TensorListStack(
            input_handle=items,
            element_shape=tf.constant(self._shape, tf.int32),
            element_dtype=self._dtype,
            num_elements=count,
        )
        return tf.ensure_shape(found, [count, *self._shape])


def _forward(blocks: _Blocks) -> _Pass:
    """Return the forward pass: output `(B, T, N, V)`, maxima and sums `(blocks, B, N, queries, 1)`."""

    def forward(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *parts: tf.Tensor) -> list[tf.Tensor]:
        queries, keys, values = blocks.split_queries(query), blocks.split_keys(key), blocks.split_keys(value)
        parts, dtype = tuple(blocks.padded_parts(parts)), _of_sums(query.dtype)
        rows = [blocks.batch, blocks.heads, blocks.query_block]
        sums = [*rows, blocks.value_width]
        of_outputs, of_rows = _Stack(sums, dtype), _Stack([*rows, 1], dtype)

        def of_block(
            i: tf.Tensor, j: tf.Tensor, outputs: tf.Tensor, maxima: tf.Tensor, totals: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            kept, most = blocks.kept(i, j, parts), of_rows.get(maxima, i)
            scores, _ = blocks.scores(queries[i], keys[j], j, kept)
            larger = tf.maximum(most, tf.reduce_max(scores, -1, keepdims=True))
            shares = blocks.zeroed(tf.exp(scores - larger), kept)
            less = tf.exp(most - larger)
            product = blocks.by_head(tf.matmul(blocks.by_key_head(tf.cast(shares, value.dtype)), values[j]))
            total = of_rows.get(totals, i) * less + tf.reduce_sum(shares, -1, keepdims=True)
            output = of_outputs.get(outputs, i) * less + tf.cast(product, dtype)
            return of_outputs.set(outputs, i, output), of_rows.set(maxima, i, larger), of_rows.set(totals, i, total)

        count = blocks.query_blocks
        state = [of_outputs.full(count, 0.0), of_rows.full(count, -float("inf")), of_rows.full(count, 0.0)]
        lists = _loop(blocks.pairs(), of_block, state)
        made = [each.all(items, count) for each, items in zip((of_outputs, of_rows, of_rows), lists, strict=True)]
        outputs, maxima, totals = made
        # The sum is 0 for a query without a key, where it gets zeros.
        totals = tf.where(totals > 0, totals, tf.ones([], dtype))
        return [tf.cast(blocks.join_queries(outputs / totals), value.dtype), maxima, totals]

    return forward


def _backward(blocks: _Blocks) -> _Pass:
    """Return the backward pass: the gradients of queries, keys and values."""

    def backward(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *more: tf.Tensor) -> list[tf.Tensor]:
        *parts, output, maxima, totals, upstream = more
        parts, dtype = blocks.padded_parts(parts), _of_sums(query.dtype)
        queries, keys, values = blocks.split_queries(query), blocks.split_keys(key), blocks.split_keys(value)
        upstreams = blocks.split_queries(upstream)
        # sum(dO O), in float32.
        along = tf.reduce_sum(tf.cast(output, dtype) * tf.cast(upstream, dtype), -1, keepdims=True)
        alongs = blocks.split_queries(along)
        of_queries = _Stack(queries.shape[1:], dtype)
        of_keys, of_values = _Stack(keys.shape[1:], dtype), _Stack(values.shape[1:], dtype)

        def by_block(
            i: tf.Tensor, j: tf.Tensor, for_queries: tf.Tensor, for_keys: tf.Tensor, for_values: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            taken, above, kept = queries[i], upstreams[i], blocks.kept(i, j, parts)
            scores, tanh = blocks.scores(taken, keys[j], j, kept)
            shares = blocks.zeroed(tf.exp(scores - maxima[i]) / totals[i], kept)
            for_value = tf.matmul(blocks.by_key_head(tf.cast(shares, value.dtype)), above, transpose_a=True)
            for_shares = tf.cast(tf.matmul(above, values[j], transpose_b=True), dtype)
            for_scores = shares * (tf.reshape(for_shares, blocks.score_shape) - blocks.by_head(alongs[i]))
            if kept is not None:
                for_scores = tf.where(kept, for_scores, tf.zeros([], dtype))
            if tanh is not None:
                for_scores *= 1 - tf.square(tanh)
            for_products = blocks.by_key_head(tf.cast(for_scores * tf.cast(blocks.kind.scale, dtype), query.dtype))
            return (
                of_queries.add(for_queries, i, tf.matmul(for_products, keys[j])),
                of_keys.add(for_keys, j, tf.matmul(for_products, taken, transpose_a=True)),
                of_values.add(for_values, j, for_value),
            )

        counts = blocks.query_blocks, blocks.key_blocks, blocks.key_blocks
        state = [each.full(count, 0.0) for each, count in zip((of_queries, of_keys, of_values), counts, strict=True)]
        made = _loop(blocks.pairs(), by_block, state)
        joined = (
            blocks.join_queries(of_queries.all(made[0], counts[0])),
            blocks.join_keys(of_keys.all(made[1], counts[1])),
            blocks.join_keys(of_values.all(made[2], counts[2])),
        )
        return [tf.cast(each, to.dtype) for each, to in zip(joined, (query, key, value), strict=True)]

    return backward
