"""Datasets with batches on the mesh, and the saved position in them."""

import collections
import contextlib
import dataclasses
import functools
import numbers
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfshard import _private
from tfshard.devices import clients, mesh_tensors, process_lock
from tfshard.devices.batching import StagedBatch, end_of_data, stage_batch
from tfshard.errors import CheckpointError, StrategyError
from tfshard.layouts.config import ShardingConfig
from tfshard.training.read_ahead import ReadAhead


def _check_in_python() -> None:
    if not _private.is_eager():
        raise StrategyError(
            "A sharded dataset is iterated in Python, not inside a tf.function. Move the loop over batches out of the "
            "tf.function, and pass each batch to it."
        )


# How many batches are copied to devices of a type ahead of the step that takes them. Other types: none. On CPU devices
# the shards of a batch are views of it, so a copy ahead of the step would save nothing.
PREFETCH = {"GPU": 1}


def prefetch_of(options: tf.distribute.InputOptions | None, mesh: dtensor.Mesh) -> int:
    """Return how many batches are copied to the devices ahead of the step, by default as `PREFETCH` says."""
    if options is None:
        return PREFETCH.get(mesh.device_type().upper(), 0)
    if options.experimental_place_dataset_on_device:
        raise StrategyError(
            "A sharded dataset is read on the host, and each batch is cut there for the devices. Leave out "
            "experimental_place_dataset_on_device of tf.distribute.InputOptions. Received: True."
        )
    if not options.experimental_fetch_to_device:
        return 0
    depth = options.experimental_per_replica_buffer_size
    if isinstance(depth, bool) or not isinstance(depth, numbers.Integral) or depth < 0:
        raise StrategyError(
            "experimental_per_replica_buffer_size of tf.distribute.InputOptions must be the number of batches that are "
            f"copied to the devices ahead of the step: 0 or more. Received: {depth!r}."
        )
    return int(depth)


class HostBatches:
    """The batches of a dataset on the host. The batches that a saved run had read ahead come first.

    Attributes:
        iterator: The iterator of the dataset.
        saved: The batches that a saved run had read ahead.
    """

    def __init__(self, iterator: Iterator[Any]):
        self.iterator = iterator
        self.saved: collections.deque[Any] = collections.deque()

    def __iter__(self) -> "HostBatches":
        return self

    def __next__(self) -> Any:
        return self.saved.popleft() if self.saved else next(self.iterator)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """A batch on the host and, unless batches stay there, on its way to the mesh."""

    host: Any
    staged: StagedBatch | None


class ShardedIterator:
    """An iterator over the batches of a dataset, each put on the mesh. Without a mesh, batches stay on the host.

    Attributes:
        host: The iterator of the host dataset.
        exhausted: True if the iterator has found the end of the data.
    """

    def __init__(
        self,
        host: Iterator[Any],
        mesh: dtensor.Mesh | None,
        already_sharded: bool = False,
        element_spec: Any = None,
        prefetch: int = 0,
    ):
        self.host = host if isinstance(host, HostBatches) else HostBatches(host)
        self._element_spec = element_spec
        self.exhausted = False
        self._mesh = mesh
        self._already_sharded = already_sharded
        # Python code may compute a batch from the results of the last step. TensorFlow's datasets may be read ahead.
        depth = prefetch if mesh is not None and isinstance(self.host.iterator, tf.data.Iterator) else 0
        read = functools.partial(_read, self.host, mesh, already_sharded, on_devices=depth > 0)
        self._ahead: ReadAhead[_Batch] = ReadAhead(read, depth)

    def __iter__(self) -> "ShardedIterator":
        return self

    def __next__(self) -> Any:
        _check_in_python()
        if self.is_at_end():
            raise StopIteration
        batch = self._ahead.take()
        if batch.staged is None:
            return batch.host
        with process_lock.held():
            on_mesh = batch.staged.on_mesh()
        return mesh_tensors.wrapped(on_mesh, None if self._already_sharded else batch.host)

    def get_next(self) -> Any:
        """Return the next batch.

        Raises:
            tf.errors.OutOfRangeError: The data have ended.
        """
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> "NextBatch":
        """Return the next batch as an optional value, which is empty at the end of the data."""
        _check_in_python()
        return NextBatch(self.element_spec, () if self.is_at_end() else (next(self),))

    @property
    def element_spec(self) -> Any:
        """The specs of a batch."""
        return _specs(self._element_spec, self._mesh)

    def is_at_end(self) -> bool:
        """Return whether the data have ended. Reads the next batch to find out."""
        if not self.exhausted:
            try:
                self._ahead.peek()
            except StopIteration:
                self.exhausted = True
                if self._already_sharded:
                    end_of_data()
        return self.exhausted

    def take_together(self, count: int) -> None:
        """Prefetch `count` batches, if any: a later call takes as many, one after the other."""
        if self._ahead.depth:
            self._ahead.depth = max(self._ahead.depth, count)

    def read_ahead(self) -> list[Any]:
        """Return the batches that were read from the host iterator and not taken yet, in order.

        Waits for the thread that reads. Raises its error, unless the data have ended.
        """
        return [*(batch.host for batch in self._ahead.waiting()), *self.host.saved]

    def start_again(self) -> None:
        """Drop the batches that were read ahead, to take the next batch from a new position of the host iterator."""
        self._ahead.clear()
        self.exhausted = False

    def close(self) -> None:
        """Drop the batches that were read ahead, and read no more ahead."""
        self._ahead.close()


def _read(host: Iterator[Any], mesh: dtensor.Mesh | None, already_sharded: bool, *, on_devices: bool) -> _Batch:
    batch = next(host)
    if mesh is None:
        return _Batch(host=batch, staged=None)
    return _Batch(host=batch, staged=stage_batch(batch, mesh, already_sharded, on_devices=on_devices))


class ShardedDataset:
    """An iterable over the batches of a dataset, with each batch on the mesh.

    Iterate it in eager Python code. Each batch is the full (global) batch. Without a mesh, as for a pipeline, batches
    stay on the host.

    Attributes:
        host: The dataset.
        current: The latest iterator, or None.
    """

    def __init__(
        self, dataset: Iterable[Any], mesh: dtensor.Mesh | None, already_sharded: bool = False, prefetch: int = 0
    ):
        self.host: Any = dataset
        self.current: ShardedIterator | None = None
        self._mesh = mesh
        self._already_sharded = already_sharded
        self._prefetch = prefetch
        self._next: Iterator[Any] | None = None

    def continue_with(self, host: Iterator[Any] | None) -> None:
        """Let the next iterator continue at the position of `host`, an iterator of this dataset.

        With None, the next iterator starts from the beginning.
        """
        self._next = host

    def __iter__(self) -> ShardedIterator:
        _check_in_python()
        host, self._next = self._next, None
        self.current = ShardedIterator(
            iter(self.host) if host is None else host,
            self._mesh,
            self._already_sharded,
            getattr(self.host, "element_spec", None),
            self._prefetch,
        )
        return self.current

    def __len__(self) -> int:
        return len(self.host)

    @property
    def element_spec(self) -> Any:
        return _specs(self.host.element_spec, self._mesh)

    def cardinality(self) -> tf.Tensor:
        """Return the number of batches, or TensorFlow's negative constant if the number is infinite or unknown."""
        count: tf.Tensor = self.host.cardinality()
        return count


def _specs(element_spec: Any, mesh: dtensor.Mesh | None) -> Any:
    return element_spec if mesh is None else mesh_tensors.spec_of(element_spec)


class NextBatch(tf.experimental.Optional):  # type: ignore[misc]  # TensorFlow has no types.
    """The result of `get_next_as_optional`: a batch, or nothing at the end of the data."""

    def __init__(self, element_spec: Any, batches: tuple[Any, ...]):
        self._element_spec = element_spec
        self._batches = batches

    def has_value(self, name: str | None = None) -> tf.Tensor:
        del name
        return tf.constant(bool(self._batches))

    def get_value(self, name: str | None = None) -> Any:
        del name
        if not self._batches:
            raise tf.errors.InvalidArgumentError(None, None, "The given optional does not have a value.")
        return self._batches[0]

    @property
    def element_spec(self) -> Any:
        return self._element_spec

    @property
    def _type_spec(self) -> tf.OptionalSpec:
        return tf.OptionalSpec(self._element_spec)


def without_tuning(dataset: Iterable[Any]) -> Iterable[Any]:
    """Return a dataset that Keras made of arrays with autotuning off; return any other dataset unchanged.

    An iterator of `tf.data` that tunes itself may sleep when it is dropped, as at the end of each epoch
    (benchmarks/LOG.md, "Ends of epochs"). Slicing rows of arrays leaves little to tune.
    """
    if not _private.is_of_arrays(dataset):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    quick: Iterable[Any] = dataset.with_options(options)  # type: ignore[attr-defined]
    return quick


class EpochBatches:
    """The batches that Keras's epoch iterator will read, to look at the first one before the epochs begin.

    Args:
        epochs: The epoch iterator of a `fit` or `evaluate`.
    """

    def __init__(self, epochs: object):
        self._epochs = _private.EpochIterator(epochs)
        self._first: Any = None
        self._iterator: HostBatches | None = None

    def spec(self) -> Any:
        """Return the specs of a full batch, or None if they do not tell every size."""
        dataset: Any = self._epochs.dataset
        dataset = dataset.host if isinstance(dataset, ShardedDataset) else dataset
        size = self._epochs.first_size

        def known(leaf: Any) -> Any:
            if not isinstance(leaf, tf.TensorSpec) or not leaf.shape.rank:
                return leaf
            return tf.TensorSpec([size if leaf.shape[0] is None else leaf.shape[0], *leaf.shape[1:]], leaf.dtype)

        found = tf.nest.map_structure(known, dataset.element_spec)
        leaves = [leaf for leaf in tf.nest.flatten(found) if leaf is not None and not isinstance(leaf, tf.OptionalSpec)]
        is_known = all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves)
        if not is_known:
            return None
        return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, found)

    def first(self) -> Any:
        """Return the first batch, or None if there is no data. The first epoch begins with the same batch."""
        found = self._epochs.first_of_python()
        if found is not None:
            return found
        dataset: Any = self._epochs.dataset
        host = dataset.host if isinstance(dataset, ShardedDataset) else dataset
        self._iterator = HostBatches(iter(host))
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        self._iterator.saved.append(batch)
        if isinstance(dataset, ShardedDataset):
            dataset.continue_with(self._iterator)
        return batch

    def distribute(self, strategy: Any) -> None:
        """Put the batches on the mesh of a strategy."""
        dataset: Any = self._epochs.dataset
        host = dataset.host if isinstance(dataset, ShardedDataset) else dataset
        sharded = strategy.experimental_distribute_dataset(host)
        if self._iterator is not None:
            sharded.continue_with(self._iterator)
        self._epochs.distribute(strategy, sharded)


# Keras's epoch iterator of each model's `fit`. It counts the steps of the epochs.
_epochs: _private.WeakIdentityDict[keras.Model, weakref.ref[object]] = _private.WeakIdentityDict()


# The epoch iterators of the `fit` or `evaluate` that runs on a model.
_running: _private.WeakIdentityDict[keras.Model, list[object]] = _private.WeakIdentityDict()


def note_epochs(model: keras.Model, epochs: object) -> None:
    """Record the epoch iterator of a `fit` or `evaluate` that begins."""
    _epochs[model] = weakref.ref(epochs)
    if (running := _running.get(model)) is not None:
        running.append(epochs)


@contextlib.contextmanager
def read_ahead_dropped(model: keras.Model) -> Iterator[None]:
    """Drop the batches that a `fit` or `evaluate` in this context has read ahead, when the context ends.

    Keras's iterators of a `fit` that stops early refer to each other, and stay until Python looks for such cycles.
    """
    noted: list[object] = []
    outer, _running[model] = _running.get(model), noted
    try:
        yield
    finally:
        _running.pop(model)
        if outer is not None:
            _running[model] = outer
        for epochs in noted:
            dataset = _private.EpochIterator(epochs).dataset
            if isinstance(dataset, ShardedDataset) and dataset.current is not None:
                dataset.current.close()


def epochs_of(model: keras.Model) -> object | None:
    """Return the epoch iterator of the latest `fit`, or None."""
    found = _epochs.get(model)
    return None if found is None else found()


def iterator_savers(strategy: tf.distribute.Strategy | None) -> int:
    """Return how many clients save the state of their iterator: all clients if `already_sharded`, otherwise one."""
    config = getattr(strategy, "config", None)  # Other strategies have no config.
    return clients.here().count if isinstance(config, ShardingConfig) and config.already_sharded else 1


def host_iterator(iterator: object) -> tf.data.Iterator:
    """Return the `tf.data` iterator under an iterator over sharded batches.

    Raises:
        CheckpointError: The iterator is not based on a `tf.data` iterator.
    """
    host = iterator.host if isinstance(iterator, ShardedIterator) else iterator
    host = host.iterator if isinstance(host, HostBatches) else host
    if not isinstance(host, tf.data.Iterator):
        raise CheckpointError(
            "Only two kinds of iterators have a position that can be saved: tf.data iterators, and iter(dataset) of "
            f"a dataset from strategy.experimental_distribute_dataset. Received: iterator={iterator!r}"
        )
    return host


def iterator_state(iterator: object, *, ignore_random: bool = False) -> tf.Tensor:
    """Return the state of an iterator, including elements read ahead and the shuffle order.

    The state is TensorFlow's vector, or a scalar with the vector and the batches that were read ahead.

    Args:
        iterator: As for `host_iterator`.
        ignore_random: True if random operations in the dataset's functions may continue from another state.

    Raises:
        CheckpointError: The dataset runs Python code, or random operations with a state that TensorFlow cannot save.
    """
    host = host_iterator(iterator)
    # First: while a thread reads, the state changes.
    ahead = iterator.read_ahead() if isinstance(iterator, ShardedIterator) else []
    try:
        state = _private.iterator_state(host, ignore_random=ignore_random)
    except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
        operations = _private.stateful_operations(host)
        raise CheckpointError(
            "The position in this tf.data dataset cannot be saved, because a restored dataset would not continue "
            "with the same batches: "
            f"{(str(error).partition('}} ')[2].partition(' [Op:')[0] or str(error)).rstrip('.')}. "
            f"{f'Its functions run {operations[:4]}. ' if operations else ''}"
            "Call Keras layers that draw random numbers in tfshard.random_map(dataset, function, seed=...) instead of "
            "dataset.map(function). Replace Python code (from_generator, py_function) by tf.data operations, and "
            "tf.random operations by tf.random.stateless_* with seeds from tf.data.Dataset.random(seed). The state "
            f"of shuffle() can be saved. Received: a dataset of {host.element_spec}"
        ) from error
    if not ahead:
        return state
    with tf.device("CPU:0"):
        batches = tf.raw_ops.Pack(values=[_variant_of(batch) for batch in ahead])
        return _variant_of((state, batches))


# The specs of a state and of the batches that were read ahead.
_WITH_BATCHES = (tf.TensorSpec([None], tf.variant), tf.TensorSpec([None], tf.variant))


def _variant_of(value: Any) -> tf.Tensor:
    """Return one tensor that holds the tensors of a structure."""
    (variant,) = tf.nest.flatten(tf.experimental.Optional.from_value(value), expand_composites=True)
    return variant


def _value_of(variant: tf.Tensor, spec: Any) -> Any:
    """Invert `_variant_of`."""
    return tf.nest.pack_sequence_as(tf.OptionalSpec(spec), [variant], expand_composites=True).get_value()


def restore_iterator(iterator: object, state: tf.Tensor) -> None:
    """Move an iterator to the position of a state from `iterator_state`.

    Raises:
        CheckpointError: The state holds batches that were read ahead, and the iterator has no place for them.
    """
    host, saved = host_iterator(iterator), []
    with tf.device("CPU:0"):
        if not state.shape.rank:
            state, batches = _value_of(state, _WITH_BATCHES)
            saved = [_value_of(each, host.element_spec) for each in tf.unstack(batches)]
    holder: object = iterator
    if isinstance(iterator, ShardedIterator):
        iterator.start_again()
        holder = iterator.host
    if saved and not isinstance(holder, HostBatches):
        raise CheckpointError(
            "The checkpoint was saved with an iterator over sharded batches that had read batches ahead. Restore it "
            "into iter(strategy.experimental_distribute_dataset(dataset)). Received: "
            f"iterator={iterator!r}, {len(saved)} batches"
        )
    _private.restore_iterator(host, state)
    if isinstance(holder, HostBatches):
        holder.saved = collections.deque(saved)
