"""Telemetry: what a run measures of itself while `fit` trains.

# Note: what is measured where

Times are taken where Keras announces a step, so that they add up to the time in which an epoch trains, data and other
callbacks included. What a step was run on, and whether it compiled something, the strategy tells (`StepWatcher`). The
collectives of a step are read from TensorFlow's trace of it, of a step that trains. In a launched run client 0 traces
(`step_profile` says why), and the others know when. The trace takes about as long as two steps, so a step of some
hundreds is traced; its own time, and that of steps that compiled, is not counted.

What rests, what a step sends and how many operations it takes are the same for all steps: they are looked up once, when
the first epoch ends.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfshard import _private, collectives
from tfshard.callbacks.pace import Pace, Ran, Times
from tfshard.callbacks.sinks import Board, CsvFile
from tfshard.devices import clients
from tfshard.errors import LayoutError, TelemetryError, warn
from tfshard.graph import model_graph
from tfshard.measure import step_profile
from tfshard.measure.peak_memory import peak_of
from tfshard.measure.report import reports_of
from tfshard.planning.step_flops import training_flops
from tfshard.training.strategy import ShardedStrategy
from tfshard.training.watching import StepWatcher, WatchedStep

NAMES = (
    "samples_per_second",
    "tokens_per_second",
    "step_seconds_p50",
    "step_seconds_p90",
    "step_seconds_p99",
    "collective_seconds",
    "collective_bytes",
    "device_bytes",
    "device_peak_bytes",
    "flops_per_second",
    "restarts",
)


class Telemetry(keras.callbacks.Callback, StepWatcher):  # type: ignore[misc]  # Keras has no types.
    """Measures a `fit`: throughput, step times, time in collectives, memory, FLOP/s, once for each epoch.

    The measures are among the `logs` of the epoch's end: callbacks behind this one in the list, Keras's progress bar
    and the `History` that `fit` returns have them. In a launched run all clients have those of the whole run, and
    client 0 writes the files. Training is not changed: losses have the same bits.

    | name | what |
    |---|---|
    | `samples_per_second`, `tokens_per_second` | of all devices: what the epoch's steps were run on, over their time |
    | `step_seconds_p50`, `step_seconds_p90`, `step_seconds_p99` | percentiles of the time from a step to the next |
    | `collective_seconds` | time of a step in which at least one collective ran, of the step profiled last |
    | `collective_bytes` | what a step sends by its plan: bytes of the collectives' tensors on one device |
    | `device_bytes` | what rests on the fullest device, by the report |
    | `device_peak_bytes` | what that and a step take at most: on CPU by the profiled step, on GPU by the allocator |
    | `flops_per_second` | of all devices: products of forward and backward pass (`training_flops`) over time |
    | `restarts` | how often the launcher restarted the run |

    Steps that compiled something, and those that were profiled, are not among the times; validation is not either. What
    is not known is NaN. With several clients times and bytes are those of the slowest and fullest one; what is profiled
    is client 0's step.

    In plain Keras there is what does not need a mesh: samples (from the count of the loss that `compile` made), step
    times without the first step, and FLOP/s of a model that leaves only its batch open.

    Args:
        csv: A file to which a row for each epoch is added.
        log_dir: A directory of TensorBoard, for scalars `telemetry/...` by epoch.
        profile_every: How many steps lie between two that are profiled, the first soon after what compiles; None: none
            is. One takes the time of about two steps more. A step in which another profiler runs is not profiled; the
            next one is.
        tokens_per_sample: How many tokens a sample has, 0 for none. By default the second dim of the largest input of
            integers with two dims.

    Raises:
        TelemetryError: A wrong argument; in `fit`: the CSV file has other columns.

    Example:

    >>> import keras, numpy as np, tfshard
    >>> _ = tfshard.initialize(num_devices=4, device_type="CPU")
    >>> model = tfshard.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model.compile("adam", "mse", strategy=tfshard.ShardedStrategy(tfshard.create_mesh(batch=4)))
    >>> telemetry = tfshard.callbacks.Telemetry()
    >>> history = model.fit(np.ones((64, 8)), np.ones((64, 4)), batch_size=8, verbose=0, callbacks=[telemetry]).history
    >>> history["samples_per_second"][0] > 0 and history["collective_seconds"][0] > 0
    True
    >>> history["collective_bytes"], history["restarts"]  # A gather and a reduction of 36 numbers, padded to 48.
    ([...], [0])
    """

    # Other callbacks may be called beside training: what this does at the end of a batch is to note its number.
    async_safe = True

    def __init__(
        self,
        csv: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        profile_every: int | None = 500,
        tokens_per_sample: int | None = None,
    ):
        super().__init__()
        for name, value, least in (("profile_every", profile_every, 1), ("tokens_per_sample", tokens_per_sample, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise TelemetryError(
                    f"{name} must be an integer of {least} or more, or None. Received: {name}={value!r}"
                )
        for name, path in (("csv", csv), ("log_dir", log_dir)):
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise TelemetryError(f"{name} must be a path, or None. Received: {name}={path!r}")
        self.csv = csv
        self.log_dir = log_dir
        self.profile_every = profile_every
        self.tokens_per_sample = tokens_per_sample
        self._run: _Run | None = None

    # --- what Keras calls -----------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        sinks: list[CsvFile | Board] = []
        if clients.here().rank == 0:
            sinks += [CsvFile(self.csv, NAMES)] if self.csv is not None else []
            sinks += [Board(self.log_dir)] if self.log_dir is not None else []
        self._run = _Run(self.model, self.profile_every, self.tokens_per_sample, sinks)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._run is not None:
            self._run.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._run is not None:
            self._run.pace.begin(batch, time.perf_counter())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._run is not None:
            self._run.done = batch + 1

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._run is not None:
            self._run.end_training()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._run is not None
        self._run.end_training()
        values = self._run.measures()
        for sink in self._run.sinks:
            sink.write(epoch, values)
        if logs is not None:
            logs.update(values)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._run = None

    # --- what the strategy calls ----------------------------------------------------------------------

    def watched_step(self, step: WatchedStep) -> contextlib.AbstractContextManager[None]:
        if self._run is None or step.kind != "training step":
            return contextlib.nullcontext()
        return self._run.watched(step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sample:
    """What a profiled step tells.

    Attributes:
        collective_seconds: In which at least one collective ran.
        added_bytes: What it added on the fullest device; NaN where that is not told.
    """

    collective_seconds: float
    added_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Size:
    """What an execution is run on.

    Attributes:
        steps: How many it does.
        samples: Of all of them, over all devices.
        tokens: Likewise.
    """

    steps: int
    samples: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """What is the same for all steps of a run; NaN where it is not known.

    Attributes:
        collective_bytes: What a step sends.
        device_bytes: What rests on the fullest device of this client.
        flops_per_sample: Of forward and backward pass.
    """

    collective_bytes: float
    device_bytes: float
    flops_per_sample: float


class _Run:
    """A `fit` that is measured.

    Args:
        model: The model.
        profile_every: As in `Telemetry`.
        tokens_per_sample: Likewise.
        sinks: Where measures are written.

    Attributes:
        pace: The clock of the epoch that runs.
        done: The number of the step behind the last one that was done in it.
    """

    def __init__(
        self,
        model: keras.Model,
        profile_every: int | None,
        tokens_per_sample: int | None,
        sinks: list[CsvFile | Board],
    ):
        self.pace = Pace()
        self.done = 0
        self.sinks = sinks
        self._model = model
        strategy = _private.distribute_strategy(model)
        self._strategy = strategy if isinstance(strategy, ShardedStrategy) else None
        self._profile_every = profile_every
        self._tokens_per_sample = tokens_per_sample
        # Until the next step that is profiled.
        self._wait = 0
        self._sample: _Sample | None = None
        self._facts: _Facts | None = None
        # What the model was called on first, as specs.
        self._inputs: Any = None
        # What steps of some shapes are run on. To ask the tensors takes longer than all else at a step.
        self._sizes: dict[str, _Size] = {}
        # Samples of the epoch, by Keras's count, where nobody tells those of each step.
        self._counted = math.nan

    def begin_epoch(self) -> None:
        self.pace = Pace()
        self.done = 0

    def end_training(self) -> None:
        """The epoch has no further step; what follows is validation."""
        if not self.pace.has_ended:
            self.pace.end(time.perf_counter())
            if self._strategy is None:
                # Validation resets it.
                self._counted = _private.loss_count(self._model)

    # --- a step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self, step: WatchedStep) -> Iterator[None]:
        """An execution of training steps: what it was run on is noted, and one that is due is profiled."""
        size = self._sizes.get(step.shapes) or self._sizes.setdefault(step.shapes, self._size_of(step))
        with contextlib.ExitStack() as stack:
            trace = None if step.compiles else self._trace(stack)
            yield
        if trace is not None:
            self._note(trace, size.steps)
        is_timed = not step.compiles and trace is None
        self.pace.note(Ran(steps=size.steps, samples=size.samples, tokens=size.tokens, is_timed=is_timed))

    def _size_of(self, step: WatchedStep) -> "_Size":
        inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in step.batches]
        if self._inputs is None:
            self._inputs = keras.tree.map_structure(_spec, inputs[0])
        samples = [_samples(each) for each in inputs]
        tokens = [self._tokens(each, count) for each, count in zip(inputs, samples, strict=True)]
        return _Size(steps=len(inputs), samples=sum(samples), tokens=sum(tokens))

    def _trace(self, stack: contextlib.ExitStack) -> step_profile.Trace | None:
        """Begins to trace what is run, if that is due: the trace, once the stack is left."""
        if self._profile_every is None or self._strategy is None:
            return None
        if self._wait > 0:
            self._wait -= 1
            return None
        try:
            trace = stack.enter_context(step_profile.traced())
        except tf.errors.AlreadyExistsError:
            return None  # Another profiler runs.
        self._wait = self._profile_every - 1
        return trace

    def _note(self, trace: step_profile.Trace, steps: int) -> None:
        if not trace.written:
            return  # Client 0 tells.
        assert self._strategy is not None
        events = trace.events()
        local = len(_local_devices(self._strategy))
        peak = peak_of(events, local)
        self._sample = _Sample(
            collective_seconds=step_profile.collective_wall_seconds(events, local) / steps,
            added_bytes=math.nan if peak is None else peak.device_added,
        )

    def _tokens(self, inputs: Any, samples: int) -> int:
        if self._tokens_per_sample is not None:
            return samples * self._tokens_per_sample
        return max((math.prod(each.shape) for each in _sequences(inputs)), default=0)

    # --- an epoch -------------------------------------------------------------------------------------

    def measures(self) -> dict[str, float]:
        """What the epoch that has ended is told by."""
        if self._facts is None:
            self._facts = self._find_facts()
        times, facts, sample = self.pace.times(self.done), self._facts, self._sample
        if self._strategy is None:
            times = self._with_counted(times)
        added = math.nan if sample is None else sample.added_bytes
        seconds, p50, p90, p99, collective_seconds, device_bytes, device_peak_bytes = _most(
            times.seconds or math.nan,
            *times.percentiles,
            math.nan if sample is None else sample.collective_seconds,
            facts.device_bytes,
            self._peak_bytes(facts.device_bytes + added),
        )
        found = {
            "samples_per_second": times.samples / seconds,
            "tokens_per_second": times.tokens / seconds,
            "step_seconds_p50": p50,
            "step_seconds_p90": p90,
            "step_seconds_p99": p99,
            "collective_seconds": collective_seconds,
            "collective_bytes": facts.collective_bytes,
            "device_bytes": device_bytes,
            "device_peak_bytes": device_peak_bytes,
            "flops_per_second": facts.flops_per_sample * times.samples / seconds,
            "restarts": clients.here().restarts,
        }
        assert tuple(found) == NAMES
        return found

    def _with_counted(self, times: Times) -> Times:
        """The times with samples by Keras's count, those of an average step."""
        samples = self._counted / times.steps * times.timed_steps if times.steps else math.nan
        per_sample = math.nan if self._tokens_per_sample is None else self._tokens_per_sample
        return dataclasses.replace(times, samples=samples, tokens=samples * per_sample)

    def _peak_bytes(self, by_profile: float) -> float:
        if self._strategy is None or self._strategy.mesh.device_type().upper() != "GPU":
            return by_profile
        names = [device.rpartition("device:")[2] for device in _local_devices(self._strategy)]
        return max(float(tf.config.experimental.get_memory_info(name)["peak"]) for name in names)

    def _find_facts(self) -> _Facts:
        model, strategy = self._model, self._strategy
        if strategy is None:
            inputs = model_graph.batch_of(model, 1)
            flops = math.nan if inputs is None else _known("FLOPs", lambda: training_flops(model, inputs))
            return _Facts(collective_bytes=math.nan, device_bytes=math.nan, flops_per_sample=flops)
        if None in keras.tree.flatten(self._inputs):  # There were no data, or none for an input.
            return _Facts(collective_bytes=math.nan, device_bytes=math.nan, flops_per_sample=math.nan)

        def sent() -> int:
            found = strategy.plan(model, inputs=self._inputs).collectives
            return sum(each.count * (each.bytes or 0) for each in found)

        flops = _known("FLOPs", lambda: training_flops(model, self._inputs))
        extension_reports = reports_of(model)
        if extension_reports:
            held = max(report.bytes_per_device() for report in extension_reports)
            return _Facts(collective_bytes=math.nan, device_bytes=held, flops_per_sample=flops / _samples(self._inputs))
        return _Facts(
            collective_bytes=_known("bytes of collectives", sent),
            device_bytes=strategy.report(model).bytes_per_device(),
            flops_per_sample=flops / _samples(self._inputs),
        )


def _local_devices(strategy: ShardedStrategy) -> list[str]:
    """The devices of this client that a strategy has, on all places of a pipeline axis."""
    return [str(device) for each in strategy.ranks for device in each.mesh.local_devices()]


def _known(what: str, find: Callable[[], int | None]) -> float:
    """A number that is found in the model's graph; NaN, with a warning, where the model cannot be traced for it."""
    try:
        found = find()
    except LayoutError as error:
        warn(f"Telemetry does not know the {what} of a step. {error}")
        return math.nan
    return math.nan if found is None else found


def _spec(tensor: Any) -> tf.TensorSpec | None:
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _samples(inputs: Any) -> int:
    """The rows of a batch."""
    for each in keras.tree.flatten(inputs):
        if each is not None and each.shape.rank:
            return int(each.shape[0])
    return 0


def _sequences(inputs: Any) -> Iterator[Any]:
    """What has tokens: integers of two dims."""
    for each in keras.tree.flatten(inputs):
        if each is not None and each.dtype.is_integer and each.shape.rank == 2:
            yield each


def _most(*values: float) -> list[float]:
    """The largest of all clients' values that are known, one by one; NaN where none is."""
    known = np.array(values, np.float64)
    largest = collectives.all_reduce(np.nan_to_num(known, nan=-1.0), "max")
    return [float(each) if each >= 0 else math.nan for each in largest]
