"""Telemetry: measurements of a run while `fit` trains.

# Note: where each value is measured

Step times begin where Keras announces a step. They add up to the epoch's training time, including data loading and
other callbacks. The strategy tells the shapes of a step's batch and whether the step compiled (`StepWatcher`).
Collective times come from TensorFlow's trace of a training step. In a launched run, client 0 traces (`step_profile`
says why), and every client knows when. A traced step takes about as long as two more steps, so only one step in some
hundreds is traced. The times of traced steps and of compiling steps do not count.

Stored bytes, sent bytes and FLOPs are the same for all steps. They are computed once, when the first epoch ends.
"""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
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
from tfshard.graph.flops import training_flops
from tfshard.measure import step_profile
from tfshard.measure.peak_memory import peak_of
from tfshard.measure.report import reports_of
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
    """Measures throughput, step times, collective time, memory and FLOP/s of a `fit`, once for each epoch.

    The measurements are added to the `logs` at the end of an epoch. Later callbacks in the list, Keras's progress bar
    and the `History` that `fit` returns include them. In a launched run, every client receives the measurements of the
    run, and client 0 writes the files. Telemetry does not change the training: losses stay bit-identical.

    | name | what |
    |---|---|
    | `samples_per_second`, `tokens_per_second` | samples and tokens of the epoch's steps on all devices per second |
    | `step_seconds_p50`, `step_seconds_p90`, `step_seconds_p99` | percentiles of the time from one step to the next |
    | `collective_seconds` | time with at least one running collective, in the step profiled last |
    | `collective_bytes` | bytes a step sends by its plan: the collectives' tensors on one device |
    | `device_bytes` | bytes stored on the fullest device, by the report |
    | `device_peak_bytes` | peak with a step's tensors: on CPU by the profiled step, on GPU by the allocator |
    | `flops_per_second` | forward and backward matrix products on all devices (`training_flops`) over time |
    | `restarts` | how often the launcher restarted the run |

    The times exclude validation, steps that compiled something, and profiled steps. Unknown values are NaN. With
    several clients, times are the slowest client's and bytes the fullest client's. Only client 0's steps are profiled.

    In plain Keras, Telemetry reports the values that need no mesh: samples (from the count of the loss that `compile`
    made), step times without the first step, and FLOP/s if only the batch dimension of the model is unknown.

    Args:
        csv: A CSV file. Each epoch appends a row.
        log_dir: A TensorBoard directory for `telemetry/...` scalars by epoch.
        profile_every: The number of steps between two profiled steps. The first profiled step follows soon after
            compilation. None: profile no step. A profiled step takes about as long as two more steps. If another
            profiler is running, the next step is profiled instead.
        tokens_per_sample: The number of tokens in a sample, 0 for none. Default: the second dimension of the largest
            2-D integer input.
        metrics: Your own measurements by name: a function that takes the logs of the epoch and returns a number, or
            None for values that you pass to `record`. In a launched run, every client measures, and `Telemetry` reports
            the mean over the clients. Clients whose value is NaN do not count.

    Raises:
        TelemetryError: An argument is wrong. In `fit`: the CSV file has other columns, a function returns no number, or
            clients have different metrics.

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

    Measurements of your own:

    >>> telemetry = tfshard.callbacks.Telemetry(
    ...     metrics={"root_loss": lambda logs: logs["loss"] ** 0.5, "queue": None}, profile_every=None
    ... )
    >>> fill = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: telemetry.record("queue", batch))
    >>> history = model.fit(
    ...     np.ones((64, 8)), np.ones((64, 4)), batch_size=8, verbose=0, callbacks=[fill, telemetry]
    ... ).history
    >>> history["queue"], history["root_loss"][0] == history["loss"][0] ** 0.5
    ([3.5], True)
    """

    # Keras may call the batch-end hook asynchronously, because the hook only notes the number of the batch.
    async_safe = True

    def __init__(
        self,
        csv: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        profile_every: int | None = 500,
        tokens_per_sample: int | None = None,
        metrics: Mapping[str, Callable[[dict[str, Any]], float] | None] | None = None,
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
        self.metrics = _checked_metrics(metrics)
        # The values that `record` got in this epoch.
        self._recorded: dict[str, list[float]] = {}
        self.csv = csv
        self.log_dir = log_dir
        self.profile_every = profile_every
        self.tokens_per_sample = tokens_per_sample
        self._run: _MeasuredFit | None = None

    def record(self, name: str, value: float) -> None:
        """Add a value to a metric of the current epoch. The epoch reports the mean of the values.

        Args:
            name: A name of `metrics` without a function.
            value: A number.

        Raises:
            TelemetryError: `metrics` has no such name, or a function for the name; or the value is no number.
        """
        if name not in self.metrics or self.metrics[name] is not None:
            names = [each for each, function in self.metrics.items() if function is None]
            raise TelemetryError(
                f"record takes a name that Telemetry(metrics={{name: None}}) declares. Declared: {names}. Received: "
                f"name={name!r}"
            )
        self._recorded.setdefault(name, []).append(_number(name, value))

    # --- what Keras calls -----------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        sinks: list[CsvFile | Board] = []
        names = {"metrics": ", ".join(self.metrics)}
        hint = "Give Telemetry the same metrics on all clients."
        clients.here().agree("the metrics of Telemetry", names, error=TelemetryError, hint=hint)
        if clients.here().rank == 0:
            sinks += [CsvFile(self.csv, [*NAMES, *self.metrics])] if self.csv is not None else []
            sinks += [Board(self.log_dir)] if self.log_dir is not None else []
        self._run = _MeasuredFit(self.model, self.profile_every, self.tokens_per_sample, sinks)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._recorded.clear()
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
        values |= _mean_of_clients(self._own_values({**(logs or {}), **values}))
        for sink in self._run.sinks:
            sink.write(epoch, values)
        if logs is not None:
            logs.update(values)

    def _own_values(self, logs: dict[str, Any]) -> dict[str, float]:
        """Return this client's values of the user's metrics for an epoch."""
        taken = [name for name in self.metrics if name in logs]
        if taken:
            raise TelemetryError(
                f"A metric of the model is also called {taken[0]!r}. Give the metric of Telemetry another name. "
                f"Received: metrics={list(self.metrics)}"
            )
        found = {}
        for name, function in self.metrics.items():
            recorded = self._recorded.get(name)
            if function is not None:
                found[name] = _number(name, _measured(name, function, logs))
            else:
                found[name] = math.nan if recorded is None else float(np.mean(recorded))
        return found

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._run = None

    # --- what the strategy calls ----------------------------------------------------------------------

    def watched_step(self, step: WatchedStep) -> contextlib.AbstractContextManager[None]:
        if self._run is None or step.kind != "training step":
            return contextlib.nullcontext()
        return self._run.watched(step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sample:
    """The measurements of a profiled step.

    Attributes:
        collective_seconds: The time with at least one running collective.
        added_bytes: The bytes that the step added on the fullest device. NaN if unknown.
    """

    collective_seconds: float
    added_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Size:
    """The data size of an execution.

    Attributes:
        steps: The number of steps.
        samples: The samples of all steps, over all devices.
        tokens: The tokens, likewise.
    """

    steps: int
    samples: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """The values that are equal for all steps of a run. NaN if unknown.

    Attributes:
        collective_bytes: The bytes that a step sends.
        device_bytes: The bytes stored on this client's fullest device.
        flops_per_sample: The FLOPs of the forward and backward pass.
    """

    collective_bytes: float
    device_bytes: float
    flops_per_sample: float


class _MeasuredFit:
    """The state of a measured `fit`.

    Args:
        model: The model.
        profile_every: See `Telemetry`.
        tokens_per_sample: See `Telemetry`.
        sinks: The outputs of the measurements.

    Attributes:
        pace: The clock of the current epoch.
        done: The number of the last step done in the epoch, plus one.
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
        # The number of steps until the next profiled step.
        self._wait = 0
        self._sample: _Sample | None = None
        self._facts: _Facts | None = None
        # The specs of the model's first input.
        self._inputs: Any = None
        # The data size of steps by their shapes. Reading sizes from tensors takes longer than all other work at a step.
        self._sizes: dict[str, _Size] = {}
        # The samples of the epoch by Keras's count, used if no strategy reports the samples of each step.
        self._counted = math.nan

    def begin_epoch(self) -> None:
        self.pace = Pace()
        self.done = 0

    def end_training(self) -> None:
        """Note the end of the epoch's training steps. Validation may follow."""
        if not self.pace.has_ended:
            self.pace.end(time.perf_counter())
            if self._strategy is None:
                # Validation resets the count.
                self._counted = _private.loss_count(self._model)

    # --- a step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watched(self, step: WatchedStep) -> Iterator[None]:
        """Record an execution's data size, and profile the execution if it is due."""
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

    def _trace(self, stack: contextlib.ExitStack) -> step_profile.ProfileTrace | None:
        """Start a trace if one is due. Returns the trace, which is complete after the stack exits."""
        if self._profile_every is None or self._strategy is None:
            return None
        if self._wait > 0:
            self._wait -= 1
            return None
        try:
            trace = stack.enter_context(step_profile.traced())
        except tf.errors.AlreadyExistsError:
            return None  # Another profiler is running.
        self._wait = self._profile_every - 1
        return trace

    def _note(self, trace: step_profile.ProfileTrace, steps: int) -> None:
        if not trace.written:
            return  # Client 0 reports the trace.
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
        """Return the measurements of the epoch that has ended."""
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
        """Return the times with samples from Keras's count, assuming average steps."""
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
        if None in keras.tree.flatten(self._inputs):  # The data are empty, or lack an input.
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


def _measured(name: str, function: Callable[[dict[str, Any]], float], logs: dict[str, Any]) -> float:
    try:
        return function(logs)
    except Exception as error:
        raise TelemetryError(
            f"The function of metric {name!r} of Telemetry failed with {type(error).__name__}: {error}. It received "
            f"logs with the names {sorted(logs)}"
        ) from error


def _checked_metrics(metrics: Any) -> dict[str, Callable[[dict[str, Any]], float] | None]:
    """Return a user's metrics, checked."""
    if metrics is None:
        return {}
    is_valid = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and name and (function is None or callable(function))
        for name, function in metrics.items()
    )
    if not is_valid:
        raise TelemetryError(
            "metrics must map names to functions of an epoch's logs, or to None for values that record() gets. "
            f"Received: metrics={metrics!r}"
        )
    taken = [name for name in metrics if name in (*NAMES, "epoch", "time", "loss") or name.startswith("val_")]
    if taken:
        raise TelemetryError(
            f"Telemetry or Keras report {taken[0]!r} themselves. Choose other names. Received: metrics={list(metrics)}"
        )
    return dict(metrics)


def _number(name: str, value: Any) -> float:
    """Return a value of a metric as a float."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TelemetryError(f"Metric {name!r} of Telemetry must be a number. Received: {value!r}") from error


def _mean_of_clients(values: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each value over the clients that know the value; NaN if no client does."""
    if not values:
        return {}
    mine = np.array([*values.values()], np.float64)
    known = ~np.isnan(mine)
    totals, counts = collectives.all_reduce(np.stack([np.where(known, mine, 0.0), known.astype(np.float64)]))
    means = [total / count if count else math.nan for total, count in zip(totals, counts, strict=True)]
    return dict(zip(values, map(float, means), strict=True))


def _local_devices(strategy: ShardedStrategy) -> list[str]:
    """Return this client's devices in a strategy, at all positions of a pipeline axis."""
    return [str(device) for each in strategy.ranks for device in each.mesh.local_devices()]


def _known(what: str, find: Callable[[], int | None]) -> float:
    """Return a number derived from the model's graph, or NaN with a warning if the model cannot be traced."""
    try:
        found = find()
    except LayoutError as error:
        warn(f"Telemetry cannot determine the {what} of a step. {error}")
        return math.nan
    return math.nan if found is None else found


def _spec(tensor: Any) -> tf.TensorSpec | None:
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _samples(inputs: Any) -> int:
    """Return the number of rows in a batch."""
    for each in keras.tree.flatten(inputs):
        if each is not None and each.shape.rank:
            return int(each.shape[0])
    return 0


def _sequences(inputs: Any) -> Iterator[Any]:
    """Yield the inputs that hold tokens: 2-D integer tensors."""
    for each in keras.tree.flatten(inputs):
        if each is not None and each.dtype.is_integer and each.shape.rank == 2:
            yield each


def _most(*values: float) -> list[float]:
    """Return the elementwise maximum of all clients' known values. NaN where no client knows the value."""
    known = np.array(values, np.float64)
    largest = collectives.all_reduce(np.nan_to_num(known, nan=-1.0), "max")
    return [float(each) if each >= 0 else math.nan for each in largest]
