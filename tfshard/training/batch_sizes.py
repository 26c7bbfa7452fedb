"""find_batch_size: the largest batch size that trains, found by training steps."""

import contextlib
import ctypes
import gc
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private, tables
from tfshard.devices import clients, device_memory, startup
from tfshard.errors import DeviceMemoryError, StrategyError
from tfshard.graph import inventory
from tfshard.layouts import option_checks
from tfshard.layouts.axes import axis_sizes
from tfshard.storage.storage import Storage
from tfshard.storage.variables import ShardedVariable
from tfshard.training import automatic
from tfshard.training.attached_model import attached
from tfshard.training.strategy import ShardedStrategy

# The share of the host's available memory that steps may take by default.
_HOST_SHARE = 0.8
_STATUS, _CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def find_batch_size(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    max_batch_size: int = 8192,
    steps: int = 2,
    memory_limit: int | str | None = None,
) -> int:
    """Return the largest batch size with which a compiled model trains, by training on batches of several sizes.

    The function doubles the batch size until a step runs out of memory, and then bisects. It tries only multiples of
    the batch axis, and of the strategy's microbatches. Each try is a new step function, so it takes the time to compile
    a step. Afterwards the weights, the optimizer, the metrics and the random states have the same bits as before. The
    model's and the optimizer's variables are built, if they were not.

    On GPUs and TPUs, a batch is too large if TensorFlow runs out of memory. On CPU devices, the function measures the
    resident memory of the process, because the system would end a process that takes too much: a batch is too large if
    its step takes more than `memory_limit`, or if the smaller batches say that it would. The batch size leaves no room:
    fragmentation may end a long run, so train with a somewhat smaller batch.

    Args:
        model: A compiled Keras model, sharded, with `strategy="auto"`, or plain.
        x: Inputs of some samples, as for `train_on_batch`: arrays, or a structure of arrays. Their rows are repeated to
            batches of any size.
        y: Targets of the same samples.
        sample_weight: Weights of the same samples.
        max_batch_size: The largest size to try.
        steps: The number of steps of a try. The first step also allocates buffers that later steps keep.
        memory_limit: The bytes that the process may hold, or a text such as `"8GiB"`. By default, the present memory of
            the process plus four fifths of the host's available memory. Not for GPUs and TPUs.

    Returns:
        The batch size.

    Raises:
        StrategyError: The model is not compiled; a number is not positive; the data are not arrays of equally many
            samples; `max_batch_size` is smaller than the batch axis; or the run was launched in several processes.
        DeviceMemoryError: Not even the smallest batch trains.

    Example:

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model.compile("sgd", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    >>> tfshard.find_batch_size(model, np.ones((4, 8)), np.ones((4, 4)), max_batch_size=8)
    8
    """
    if not getattr(model, "compiled", False):
        raise StrategyError(
            f"find_batch_size trains the model, so compile it first. Received: model={model!r}, which is not compiled"
        )
    option_checks.positive_integer("max_batch_size", max_batch_size)
    option_checks.positive_integer("steps", steps)
    if clients.here().count > 1:
        raise StrategyError(
            "find_batch_size runs in one process: if one client of a launched run is out of memory, the others wait "
            f"for it. Call it in a process with as many devices. Received: {clients.here().count} clients"
        )
    leaves = [leaf for leaf in keras.tree.flatten((x, y, sample_weight)) if leaf is not None]
    for leaf in leaves:
        if not len(getattr(leaf, "shape", ())):
            raise StrategyError(
                "find_batch_size repeats the rows of arrays. Give x, y and sample_weight as arrays or structures of "
                f"arrays, such as one batch of a dataset. Received: {type(leaf).__name__}"
            )
    counts = sorted({len(leaf) for leaf in leaves})
    if not counts or counts[0] < 1:
        raise StrategyError("find_batch_size needs at least one sample to repeat. Received: no samples")
    if len(counts) > 1:
        raise StrategyError(
            f"x, y and sample_weight must have equally many samples. Received: arrays of {counts} samples"
        )
    tries = _Tries(model, (x, y, sample_weight), steps=steps, limit=_limit_of(memory_limit))
    unit = tries.unit
    if max_batch_size < unit:
        raise StrategyError(
            f"The batch axis and the microbatches make every batch a multiple of {unit}. Received: "
            f"max_batch_size={max_batch_size}"
        )
    with tries.unchanged():
        found = largest(tries.trains, unit, max_batch_size // unit * unit)
    if found == 0:
        raise DeviceMemoryError(
            f"Model '{model.name}' does not train on the smallest batch of {unit} samples: {tries.failure} Use "
            "a strategy that stores less (see: tfshard docs stages), more devices, or a larger memory_limit. Received: "
            f"memory_limit={memory_limit!r}"
        )
    tried_all = found + unit > max_batch_size
    tries.tell(
        f"batch size {found} trains, and max_batch_size={max_batch_size} allows no larger one"
        if tried_all
        else f"the largest batch size that trains is {found}"
    )
    return found


def largest(trains: Callable[[int], bool], unit: int, most: int) -> int:
    """Return the largest multiple of `unit`, up to `most`, for which `trains` holds; 0 if there is none.

    `trains` is called for unit, 2 unit, 4 unit and so on, and then between the last two.

    >>> [largest(lambda size: size <= 44, unit, 64) for unit in (4, 16, 64)]
    [44, 32, 0]
    """
    good, bad = 0, most + unit
    size = unit
    while size < bad:
        if not trains(size):
            bad = size
            break
        good, size = size, min(2 * size, most) if size < most else bad
    while bad - good > unit:
        middle = (good + bad) // (2 * unit) * unit
        if trains(middle):
            good = middle
        else:
            bad = middle
    return good


class _Tries:
    """Trains a model on batches of some sizes.

    Attributes:
        failure: Why the last batch was too large, in a sentence.

    Args:
        model: The model.
        data: Inputs, targets and weights of some samples.
        steps: How many steps a try takes.
        limit: The bytes that the process may hold, on CPU devices.
    """

    def __init__(self, model: keras.Model, data: Any, *, steps: int, limit: int | None):
        self.failure = ""
        self._model, self._data, self._steps, self._limit = model, data, steps, limit
        # The measured peaks of the sizes that trained.
        self._peaks: dict[int, int] = {}

    @property
    def unit(self) -> int:
        """The divisor of all batch sizes."""
        strategy = _private.distribute_strategy(self._model)
        if automatic.state_of(self._model) is not None:
            started = startup.current()
            return 1 if started is None else started.num_devices
        if not isinstance(strategy, ShardedStrategy):
            return 1
        return int(axis_sizes(strategy.mesh).sample_shards) * strategy.microbatches

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the state of the model and of random numbers when the context ends."""
        model = self._model
        self._build()
        generators = random.getstate(), np.random.get_state()
        metrics = {id(metric): len(metric.variables) for metric in model.metrics}
        state = _StoredBits(model)
        try:
            yield
        finally:
            model.train_function = None
            for metric in model.metrics:
                if metrics.get(id(metric)) != len(metric.variables):
                    metric.reset_state()
            state.restore()
            random.setstate(generators[0])
            np.random.set_state(generators[1])
            _free()

    def _build(self) -> None:
        """Build the model and the optimizer as the first step would, and put all that a step needs in its place."""
        model, optimizer = self._model, self._model.optimizer
        is_built = all(layer.built for layer in _private.flatten_layers(model))
        if isinstance(model, keras.Model) and not (is_built and optimizer.built):
            batch = self._batch(self.unit)
            if automatic.state_of(model) is not None or _private.distribute_strategy(model) is not None:
                _private.symbolic_build(model, batch)
            elif not is_built:
                specs = keras.tree.map_structure(
                    lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)), batch[0]
                )
                _private.keras_backend.compute_output_spec(model, specs)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        strategy = _private.distribute_strategy(model)
        if isinstance(strategy, ShardedStrategy):
            attached(model, strategy).refresh()

    def _batch(self, size: int) -> Any:
        """Return a batch: the rows of the samples, repeated."""

        def repeated(leaf: Any) -> Any:
            return leaf if leaf is None else np.take(np.asarray(leaf), np.arange(size) % len(leaf), axis=0)

        return keras.tree.map_structure(repeated, self._data)

    def trains(self, size: int) -> bool:
        """Return whether the model trains on a batch of a size. Prints a line."""
        expected = self._expected(size)
        if self._limit is not None and expected is not None and expected > self._limit:
            return self._fails(
                size, f"would take about {tables.size(expected)} of {tables.size(self._limit)}; not tried"
            )
        batch = self._batch(size)
        self._model.train_function = None
        _free()
        _forget_peak()
        try:
            for _ in range(self._steps):
                self._model.train_on_batch(*batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).strip().partition("\n")[0]
            return self._fails(size, f"out of memory ({text[:120]})")
        finally:
            self._model.train_function = None
        peak = _resident_bytes("VmHWM")
        if self._limit is not None and peak is not None:
            if peak > self._limit:
                return self._fails(size, f"took {tables.size(peak)} of {tables.size(self._limit)}")
            self._peaks[size] = peak
            self.tell(f"batch size {size}: trains, with {tables.size(peak)} of {tables.size(self._limit)}")
        else:
            self.tell(f"batch size {size}: trains")
        return True

    def _fails(self, size: int, why: str) -> bool:
        self.failure = f"A batch of {size} {why}."
        self.tell(f"batch size {size}: {why}")
        return False

    def _expected(self, size: int) -> int | None:
        """Return the memory that a batch would take, by the two largest smaller batches that trained."""
        smaller = sorted(each for each in self._peaks if each < size)[-2:]
        if len(smaller) < 2:
            return None
        less, more = smaller
        slope = max(0.0, (self._peaks[more] - self._peaks[less]) / (more - less))
        return int(self._peaks[more] + slope * (size - more))

    @staticmethod
    def tell(text: str) -> None:
        """Print a line."""
        print(f"tfshard: {text}", file=sys.stderr, flush=True)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a batch does not fit in memory.

    XLA and cuDNN report some failed allocations as internal errors.
    """
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError, DeviceMemoryError)):
        return True
    cause = error.__cause__
    if isinstance(cause, BaseException) and cause is not error and is_out_of_memory(cause):
        return True
    text = str(error).lower()
    return isinstance(error, tf.errors.OpError) and ("out of memory" in text or "oom when allocating" in text)


class _StoredBits:
    """The values of a model's variables, optimizers, metrics and seeds on the host, exactly as they are stored."""

    def __init__(self, model: keras.Model):
        self._storages: dict[Storage, list[np.ndarray]] = {}
        self._plain: list[tuple[keras.Variable, np.ndarray]] = []
        found = [variable for variable, _ in inventory.owned_variables(model)]
        for optimizer in inventory.model_optimizers(model):
            for part in _private.optimizer_chain(optimizer):
                found += _private.variables_of_optimizer(part)
        for metric in model.metrics:
            found += metric.variables
        generator = _private.global_seed_generator()
        found += [] if generator is None else [generator.state]
        # Tries move such a model from strategy to strategy. Its values are stored in their own dtypes.
        moves = automatic.state_of(model) is not None
        seen: set[int] = set()
        for variable in found:
            current = _private.backend_variable(variable)
            if current is None or id(current) in seen:
                continue
            seen.add(id(current))
            if moves or not isinstance(current, ShardedVariable):
                self._plain.append((variable, np.array(current.numpy())))
                continue
            for each in (current, *current.kept.values()):
                if each.storage not in self._storages:
                    self._storages[each.storage] = each.storage.local_copies(share_equal=True)

    def restore(self) -> None:
        """Set all values to what they were."""
        for storage, shards in self._storages.items():
            storage.set_local(shards)
        for variable, value in self._plain:
            variable.assign(value)


def _limit_of(given: int | str | None) -> int | None:
    """Return the bytes that the process may hold on CPU devices, or None on other devices."""
    if given is not None:
        try:
            return tables.parse_size("memory_limit", given)
        except ValueError as error:
            raise StrategyError(str(error)) from None
    if tf.config.list_physical_devices("GPU") or tf.config.list_physical_devices("TPU"):
        return None
    available, held = device_memory.available_bytes(), _resident_bytes("VmRSS")
    return None if available is None or held is None else held + int(_HOST_SHARE * available)


def _resident_bytes(name: str) -> int | None:
    """Return the resident memory of the process by a name of /proc/self/status, or None on other systems."""
    if not _STATUS.exists():
        return None
    return next(
        (int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if line.startswith(name)), None
    )


def _forget_peak() -> None:
    """Set the kernel's record of the process's peak to what the process holds now."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def _free() -> None:
    """Free the graphs of earlier tries, which are cycles, and return freed memory to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
