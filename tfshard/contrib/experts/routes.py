"""Routes: how tokens become the rows that experts compute, and how the results come back.

Each token has `choices` experts. An *item* is a token together with one of its choices. Items are ordered by expert,
then by choice, then by token: an expert with a capacity takes the first choices of all tokens before the second choices
(GShard, Lepikhin et al. 2020). Each device knows how many items every device has for each expert and choice. All tokens
of a batch therefore compete for the capacity in the same order as on one device.

`Routes` is for devices that have all experts. `ExchangedRoutes` is for devices that share the experts: each device
sends a list of tokens to each device, by an all-to-all, and the results come back in the same way.

Every expert gets all of its tokens, or as many as its capacity, and no padding. Only the running step knows the number
of rows. `send` and `collect` are linear, and each is the gradient of the other.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard.devices import expansions, uneven_exchanges
from tfshard.layouts.axes import axis_sizes


class Routes:
    """The routes of the items of one device, which has all experts.

    Args:
        ids: `(tokens, choices)`, int64: the expert of each item. Items with the id `experts` have no expert and are
            dropped.
        experts: The number of experts.
        capacity: The number of items that an expert takes from all devices together, an int64 scalar or an int; None
            for all.
        mesh: The mesh, if several devices have tokens.
    """

    def __init__(self, ids: tf.Tensor, *, experts: int, capacity: tf.Tensor | int | None, mesh: dtensor.Mesh | None):
        _allow()
        self._capacity = capacity
        self._ids, self._experts, self._choices, self._mesh = ids, experts, ids.shape[1], mesh
        choices = self._choices
        groups = experts * choices
        # The last groups are for items without an expert.
        keys = tf.reshape(ids * choices + tf.range(choices, dtype=tf.int64), (-1,))
        self._item_count = keys.shape[0] if keys.shape[0] is not None else tf.size(keys, tf.int64)
        _, order = tf.math.top_k(-keys, k=tf.cast(self._item_count, tf.int32), sorted=True)
        self._order = tf.cast(order, tf.int64)
        self._group = tf.gather(keys, self._order)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(keys), keys, groups + choices)
        place_in_group = tf.range(self._item_count, dtype=tf.int64) - tf.gather(
            tf.cumsum(counts, exclusive=True), self._group
        )
        all_counts = self._counts_of_devices(tf.slice(counts, (0,), (groups,)), capacity is not None)
        # `(devices, experts, choices)`: how many items experts take from each device.
        self._kept = _kept(tf.reshape(all_counts, (-1, experts, choices)), capacity)
        mine = self._kept if self._device is None else tf.gather(self._kept, self._device)
        self._kept_here = tf.reshape(mine, (experts, choices))
        self._is_kept = place_in_group < self._of_item(self._kept_here)
        self._place_in_group = place_in_group
        self._arrange()

    def _counts_of_devices(self, counts: tf.Tensor, are_needed: bool) -> tf.Tensor:
        """Return the counts of all devices, `(devices, ...)`; those of this device, `(1, ...)`, if not `are_needed`."""
        counts = tf.expand_dims(counts, 0)
        self._device = None
        if self._mesh is None or axis_sizes(self._mesh).data_size == 1 or not are_needed:
            return counts
        self._device = uneven_exchanges.device_number(self._mesh)
        return uneven_exchanges.all_gather(counts, self._mesh)

    def _of_item(self, of_group: tf.Tensor) -> tf.Tensor:
        """Look up a number `(experts, choices)` for each item, in the order of items; 0 without an expert."""
        padded = tf.concat([tf.reshape(of_group, (-1,)), tf.zeros((self._choices,), of_group.dtype)], 0)
        return tf.gather(padded, self._group)

    def _in_order_of_tokens(self, of_item: tf.Tensor) -> tf.Tensor:
        """Reorder `(items, ...)`, in the order of items, to `(tokens, choices, ...)`."""
        inner = of_item.shape[1:].as_list()
        if isinstance(self._item_count, int):
            shape: Any = [self._item_count, *inner]
        else:
            shape = tf.stack([self._item_count, *(tf.constant(size, tf.int64) for size in inner)])
        scattered = tf.scatter_nd(tf.expand_dims(self._order, 1), of_item, shape)
        return tf.reshape(scattered, (-1, self._choices, *inner))

    def _arrange(self) -> None:
        """Number the rows, which are the items that experts take, in the order of items."""
        counts = tf.reduce_sum(self._kept_here, 1)
        rows = tf.reduce_sum(counts)
        base = tf.reshape(tf.cumsum(tf.reshape(self._kept_here, (-1,)), exclusive=True), self._kept_here.shape)
        is_kept = tf.cast(self._is_kept, tf.int64)
        # The last row belongs to no expert, and its values are zero.
        row = is_kept * (self._of_item(base) + self._place_in_group) + (1 - is_kept) * rows
        self._row_of_item = self._in_order_of_tokens(row)
        item_of_row = tf.scatter_nd(tf.expand_dims(row, 1), self._order * is_kept, tf.expand_dims(rows + 1, 0))
        self._item_of_row = _split(item_of_row, counts)

    # --- rows

    def send(self, tokens: tf.Tensor, weights: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Return the rows of each local expert, `(rows, width)`: the tokens, multiplied by `weights` if given.

        Args:
            tokens: `(tokens, width)`.
            weights: `(tokens, choices)`.
        """
        return [self._rows_of(items, tokens, weights) for items in self._item_of_row]

    def _rows_of(self, items: tf.Tensor, tokens: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
        rows = tf.gather(tokens, items // self._choices)
        if weights is None:
            return rows
        return rows * tf.expand_dims(tf.gather(tf.reshape(weights, (-1,)), items), -1)

    def collect(self, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return `(tokens, choices, width)`: the rows of each item, and zeros for dropped items."""
        return tf.gather(_with_zeros(rows), self._row_of_item)


class ExchangedRoutes(Routes):
    """The routes of the items of one device, if the devices of the data axis share the experts.

    Device `n` of `devices` has the experts from `n * experts / devices` on.
    """

    def _counts_of_devices(self, counts: tf.Tensor, are_needed: bool) -> tf.Tensor:
        return super()._counts_of_devices(counts, True)

    def _arrange(self) -> None:
        assert self._mesh is not None and self._device is not None
        self._devices = axis_sizes(self._mesh).data_size
        local_experts = self._experts // self._devices
        sent = tf.reduce_sum(self._kept, 2)
        longest = tf.reduce_max(tf.reduce_sum(tf.reshape(sent, (self._devices, self._devices, local_experts)), 2))
        most = self._item_count
        if isinstance(self._capacity, int):
            most = min(most, local_experts * self._capacity)
        length, self._choice = uneven_exchanges.chosen(longest, most)
        self._choices_of_length = len(uneven_exchanges.capacities(most))
        self._arrange_lists(local_experts, length)
        mine = tf.reshape(self._device * local_experts, (1,)) + tf.range(local_experts, dtype=tf.int64)
        self._arrange_rows(tf.gather(sent, mine, axis=1), local_experts, length)

    def _arrange_lists(self, local_experts: int, length: tf.Tensor) -> None:
        """Find the place of each item in the lists that this device sends."""
        is_kept = tf.cast(self._is_kept, tf.int64)
        of_device = tf.reshape(self._kept_here, (self._devices, -1))
        base = tf.reshape(tf.cumsum(of_device, axis=1, exclusive=True), self._kept_here.shape)
        place = tf.stack(
            [
                self._group // (local_experts * self._choices) * is_kept,
                (self._of_item(base) + self._place_in_group) * is_kept,
            ],
            axis=1,
        )
        self._place_of_item = self._in_order_of_tokens(place)
        self._is_sent = self._in_order_of_tokens(is_kept)
        # A place without an item sends the first token. The receiving device ignores the token.
        shape = tf.stack([tf.constant(self._devices, tf.int64), tf.cast(length, tf.int64)])
        self._item_of_place = tf.scatter_nd(place, self._order * is_kept, shape)

    def _arrange_rows(self, counts: tf.Tensor, local_experts: int, length: tf.Tensor) -> None:
        """Number the rows of local experts, by expert and then by the device that sent them.

        Args:
            counts: `(devices, local experts)`: how many items each device sent for each expert.
            local_experts: The number of local experts.
            length: The length of the lists.
        """
        ends = tf.cumsum(counts, axis=1)
        places = tf.range(tf.cast(length, tf.int64), dtype=tf.int64)
        is_behind = tf.expand_dims(tf.expand_dims(places, 0), 2) >= tf.expand_dims(ends, 1)
        # `(devices, length)`: the local expert of each place; `local_experts` for a place without an item.
        expert = tf.reduce_sum(tf.cast(is_behind, tf.int64), 2)
        of_expert = tf.reduce_sum(counts, 0)
        rows = tf.reduce_sum(of_expert)
        first = tf.cumsum(of_expert, exclusive=True) + tf.cumsum(counts, axis=0, exclusive=True)
        # A table of `(devices, local experts + 1)`: the row of the first place, if all places had this expert.
        offset = tf.concat([first - (ends - counts), tf.zeros((self._devices, 1), tf.int64)], 1)
        key = expert + tf.expand_dims(tf.range(self._devices, dtype=tf.int64) * (local_experts + 1), 1)
        is_item = tf.cast(expert < local_experts, tf.int64)
        row = is_item * (tf.gather(tf.reshape(offset, (-1,)), key) + places) + (1 - is_item) * rows
        self._row_of_place = row
        device = tf.zeros_like(row) + tf.expand_dims(tf.range(self._devices, dtype=tf.int64), 1)
        place = tf.stack([device * is_item, (tf.zeros_like(row) + places) * is_item], axis=2)
        shape = tf.stack([rows + 1, tf.constant(2, tf.int64)])
        self._place_of_row = _split(tf.scatter_nd(tf.expand_dims(row, 2), place, shape), of_expert)

    def send(self, tokens: tf.Tensor, weights: tf.Tensor | None = None) -> list[tf.Tensor]:
        came = self._exchanged(self._rows_of(self._item_of_place, tokens, weights))
        return [tf.gather_nd(came, each) for each in self._place_of_row]

    def collect(self, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        came = self._exchanged(tf.gather(_with_zeros(rows), self._row_of_place))
        items = tf.gather_nd(came, self._place_of_item)
        return items * tf.cast(tf.expand_dims(self._is_sent, -1), items.dtype)

    def _exchanged(self, lists: tf.Tensor) -> tf.Tensor:
        return uneven_exchanges.all_to_all(lists, self._choice, self._choices_of_length, self._mesh)


def _kept(counts: tf.Tensor, capacity: tf.Tensor | int | None) -> tf.Tensor:
    """Return how many items experts take from each device.

    Args:
        counts: `(devices, experts, choices)`, int64: how many items each device has.
        capacity: As for `Routes`.
    """
    if capacity is None:
        return counts
    devices, experts, choices = counts.shape
    by_choice = tf.reshape(tf.transpose(counts, (2, 0, 1)), (-1, experts))
    left = tf.maximum(capacity - tf.cumsum(by_choice, axis=0, exclusive=True), 0)
    kept = tf.reshape(tf.minimum(by_choice, left), (choices, devices, experts))
    return tf.transpose(kept, (1, 2, 0))


def _split(of_row: tf.Tensor, counts: tf.Tensor) -> list[tf.Tensor]:
    """Split `(rows + 1, ...)` by expert, without the last row, which belongs to no expert."""
    sizes = tf.concat([counts, tf.ones((1,), counts.dtype)], 0)
    found: list[tf.Tensor] = tf.split(of_row, sizes, num=counts.shape[0] + 1)
    return found[:-1]


def _with_zeros(rows: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate the rows of all experts, and add a row of zeros for items without an expert."""
    return tf.concat([*rows, tf.zeros((1, *rows[0].shape[1:]), rows[0].dtype)], 0)


def _allow() -> None:
    """Let DTensor run the operations of routes on local tensors."""
    expansions.allow_local(
        "ConcatV2", "Cumsum", "GatherNd", "GatherV2", "ScatterNd", "Size", "SplitV", "TopKV2", "UnsortedSegmentSum"
    )  # fmt: skip
