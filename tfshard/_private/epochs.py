"""The epoch and step counters of Keras's `fit`."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters as _data_adapters


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Make the `fit` call that is starting begin at `epoch`, or at its `initial_epoch` argument if None
    (`Trainer._initial_epoch`)."""
    model._initial_epoch = epoch


def is_of_arrays(dataset: object) -> bool:
    """Return whether `fit`, `evaluate` or `predict` made a dataset from arrays.

    Keras marks these datasets by their options (`ArrayDataAdapter.get_tf_dataset`).
    """
    if not isinstance(dataset, tf.data.Dataset):
        return False
    options = dataset.options()
    return (
        options.experimental_optimization.apply_default_optimizations is False
        and options.experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.DATA
    )


class EpochIterator:
    """Wraps the iterator that counts a fit's steps (`TFEpochIterator` and its data adapter)."""

    _KINDS = {
        _data_adapters.ArrayDataAdapter: "arrays",
        _data_adapters.TFDatasetAdapter: "tf.data",
        _data_adapters.PyDatasetAdapter: "PyDataset",
    }

    def __init__(self, epochs: Any):
        self._epochs = epochs

    @property
    def dataset(self) -> tf.data.Dataset:
        """The dataset as distributed by the strategy (`_distributed_dataset`)."""
        return self._epochs._distributed_dataset

    @property
    def batch_size(self) -> int | None:
        """The number of samples in a batch, or None if the data adapter does not know it (`batch_size`)."""
        size: int | None = self._epochs.data_adapter.batch_size
        return size

    @property
    def first_size(self) -> int | None:
        """The number of samples in the first batch, which may be the only one; None if the data adapter does not know
        it."""
        adapter = self._epochs.data_adapter
        is_only = self.kind == "arrays" and adapter.num_batches == 1 and adapter.has_partial_batch
        size: int | None = adapter.partial_batch_size if is_only else adapter.batch_size
        return size

    def distribute(self, strategy: tf.distribute.Strategy, dataset: Any) -> None:
        """Read another dataset, of another strategy (`_distribute_strategy`, `_distributed_dataset`)."""
        self._epochs._distribute_strategy, self._epochs._distributed_dataset = strategy, dataset

    def first_of_python(self) -> Any:
        """Return the first batch of a PyDataset, which Keras's workers read only during an epoch; else None
        (`PyDatasetAdapter.py_dataset`, `_standardize_batch`)."""
        if self.kind != "PyDataset":
            return None
        adapter = self._epochs.data_adapter
        return adapter._standardize_batch(adapter.py_dataset[0])

    @property
    def kind(self) -> str:
        """`"arrays"`, `"tf.data"`, `"PyDataset"`, or the name of Keras's adapter for other data."""
        adapter = type(self._epochs.data_adapter)
        return self._KINDS.get(adapter, adapter.__name__)

    @property
    def shuffles(self) -> bool | str:
        """True if Keras shuffles the arrays or the PyDataset; `"batch"` if it shuffles arrays batch by batch
        (`ArrayDataAdapter._shuffle`, `PyDatasetAdapter.shuffle`)."""
        adapter = self._epochs.data_adapter
        shuffles: bool | str = adapter._shuffle if self.kind == "arrays" else getattr(adapter, "shuffle", False)
        return shuffles

    @property
    def steps_per_execution(self) -> int:
        return int(self._epochs.steps_per_execution)

    @property
    def spans_epochs(self) -> bool:
        """True if one iterator serves several epochs, because `steps_per_epoch` was given."""
        return self._epochs.steps_per_epoch is not None

    @property
    def num_batches(self) -> int | None:
        """The number of batches in the dataset, or None while it is unknown (`_num_batches`)."""
        batches: int | None = self._epochs._num_batches
        return batches

    @property
    def steps_seen(self) -> int:
        """The number of batches taken from the iterator, including the current step's batches (`_steps_seen`)."""
        return int(self._epochs._steps_seen)

    def start_at(self, *, step: int, consumed: int, num_batches: int | None) -> None:
        """Make the next epoch start at `step` (by replacing `_enumerate_iterator` on this object for one epoch)."""
        epochs = self._epochs
        if epochs._num_batches is None:
            epochs._num_batches = num_batches
        enumerate_steps = epochs._enumerate_iterator

        def enumerate_rest() -> Iterator[tuple[int, int, tf.data.Iterator]]:
            del epochs._enumerate_iterator
            steps = enumerate_steps()
            for begin, end, iterator in steps:
                if begin == 0:
                    epochs._steps_seen += consumed - step
                if begin >= step:
                    yield begin, end, iterator

        epochs._enumerate_iterator = enumerate_rest
