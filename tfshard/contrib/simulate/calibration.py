"""calibrate: measures the cost of a step's work on the devices by small models, and the links between the devices.

Each model stresses a different kind of work. A step's time, minus its collectives, is modelled as the sum of its work
at fixed prices. Calibration finds the prices by non-negative least squares of relative errors (Lawson and Hanson 1974,
by SciPy). It times all models several times in interleaved rounds, so if the machine is slow for some seconds, the
slowdown affects all models.
"""

import dataclasses
import importlib
import itertools
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfshard.command_line import SIZES
from tfshard.devices import create_mesh, startup
from tfshard.errors import NumericsWarning, StrategyError
from tfshard.graph import model_specs
from tfshard.measure import network_profile
from tfshard.planning.links import GROUPS, Link, Links
from tfshard.planning.machine import KINDS_OF_WORK, Machine, Work
from tfshard.planning.step_times import TracedStep, updated_bytes_of
from tfshard.training import ShardedStrategy

# The steps of an epoch, and the number of timed epochs after one warm-up epoch.
_STEPS = 8
_EPOCHS = 4
# The price of work that no model does, and of work with a negligible cost.
_NEXT_TO_NOTHING = 1e-18
# The minimum fraction of a step that remains after subtracting its collectives.
_LEAST_COMPUTE = 0.2


def calibrate(progress: Callable[[str], object] | None = None) -> Machine:
    """Train small models on all devices, and find the prices that explain their step times.

    This takes some minutes on an otherwise idle machine, and needs SciPy (`pip install scipy`). The result lacks
    `peak_flops` and `memory`: write them into the file that `Machine.save` makes, or use `dataclasses.replace`.

    Args:
        progress: Called with a line for each part of the work, for example `print`.

    Returns:
        The machine, for `tfshard.simulate` and `tfshard.advise(machine=)`.

    Raises:
        StrategyError: SciPy is not installed, or the run has only one device and no collective to measure.
    """
    tell = progress or (lambda line: None)
    try:
        importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise StrategyError(
            "Calibration solves for prices with SciPy, which is not installed or cannot be imported. Install it: pip "
            f"install scipy. Nothing was measured yet. Received: {error}"
        ) from error
    started = startup.initialize()
    if started.num_devices < 2:
        raise StrategyError(
            "Calibration also measures collectives, so it needs at least two devices: on a CPU call "
            "tfshard.initialize(num_devices=4), or run tfshard calibrate --num_devices=4. Received: 1 device"
        )
    tell(f"Measuring the links of {started.num_devices} {started.device_type} devices.")
    first = _links()
    cores = len(os.sched_getaffinity(0)) if started.device_type == "CPU" else None
    trained = []
    for number, (make, samples, stage) in enumerate(_MODELS, 1):
        tell(f"Compiling model {number} of {len(_MODELS)}.")
        trained.append(_Trained(make, samples, stage))
    for epoch in range(_EPOCHS):
        tell(f"Timing all models, round {epoch + 1} of {_EPOCHS}.")
        for each in trained:
            each.train()
    tell("Measuring the links again, and solving for prices.")
    links = _quicker(first, _links())
    rows = [each.measured(links, cores) for each in trained]
    name = f"{links.devices_per_host} {started.device_type} devices of {platform.node() or 'a machine'}"
    return Machine.of_prices(_prices_of(rows), name=name, links=links, cores=cores)


def _links() -> Links:
    """Measure the links with the message sizes that determine them."""
    sizes = [size for size in SIZES if size <= network_profile.LARGEST_OF_LINKS]
    return network_profile.profile_network(sizes).links


def _quicker(one: Links, other: Links) -> Links:
    """Return the faster measurement of each link.

    In some measurements, large messages take three times as long. The collective time subtracted from a step must not
    exceed the time the collectives took in the step.
    """

    def seconds(link: Link) -> float:
        return link.seconds(network_profile.LARGEST_OF_LINKS)

    groups: dict[str, Any] = {
        name: {kind: min(link, getattr(other, name)[kind], key=seconds) for kind, link in getattr(one, name).items()}
        for name in GROUPS
    }
    return dataclasses.replace(one, **groups)


def _prices_of(rows: Sequence[tuple[Work, float]]) -> dict[str, float]:
    """Return the seconds per unit of each kind of work that minimize the relative errors of the step times.

    Args:
        rows: The work of each step, and its seconds.
    """
    from scipy import optimize

    scaled = np.array([[getattr(work, name) / seconds for name in KINDS_OF_WORK] for work, seconds in rows])
    largest = np.maximum(scaled.max(0), _NEXT_TO_NOTHING)
    prices, _ = optimize.nnls(scaled / largest, np.ones(len(rows)))
    return dict(zip(KINDS_OF_WORK, np.maximum(prices / largest, _NEXT_TO_NOTHING).tolist(), strict=True))


class _Trained:
    """A model trained on all devices.

    Args:
        make: Builds the model.
        samples: The samples of a step on each device.
        stage: The ZeRO stage.
    """

    def __init__(self, make: Callable[[], keras.Model], samples: int, stage: int):
        self._devices = startup.initialize().num_devices
        self._rows = samples * self._devices
        self._strategy = ShardedStrategy(create_mesh(batch=self._devices), zero_stage=stage)
        self._model = make()
        self._model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False, strategy=self._strategy)
        x = np.random.RandomState(0).randint(0, _TOKENS, (_STEPS * self._rows, *self._model.input_shape[1:]))
        self._x = x.astype(self._model.inputs[0].dtype)
        self._y = np.zeros((len(x), *self._model.output_shape[1:]), "float32")
        self._seconds: list[float] = []
        self.train()
        self._seconds.clear()

    def train(self) -> None:
        """Train one epoch and keep the step times."""
        clock = _StepClock()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericsWarning)  # Only the time matters.
            self._model.fit(self._x, self._y, batch_size=self._rows, verbose=0, callbacks=[clock])
        self._seconds += clock.steps()

    def measured(self, links: Links, cores: int | None) -> tuple[Work, float]:
        """Return a device's work in a step, and the seconds of a step without its collectives.

        If devices share cores, the work is the amount that one device alone on its core would do in the same time.
        """
        placement = self._strategy.placement_of(self._model)
        slots = model_specs.slots_of(self._model.optimizer, placement.specs)
        inputs = self._x[: self._rows]
        step = TracedStep.of(self._model, placement, inputs=inputs)
        free = Machine.of_prices(dict.fromkeys(KINDS_OF_WORK, _NEXT_TO_NOTHING), name="", links=links, cores=cores)
        updated = updated_bytes_of(placement, slots)
        mesh_shape = self._strategy.mesh_shape
        sent = step.on(free, mesh_shape, updated_bytes=updated).collective_seconds
        work = Work.total([step.total, step.synchronizing(mesh_shape), Work(updated_bytes=updated, steps=1)])
        seconds = statistics.median(self._seconds)
        turns = min(self._devices, links.devices_per_host)
        return free.in_turns(work, turns), max(seconds - sent, _LEAST_COMPUTE * seconds)


class _StepClock(keras.callbacks.Callback):  # type: ignore[misc]
    """Records when each step ends, after its loss has reached the host."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        float((logs or {})["loss"])
        self._ends.append(time.perf_counter())

    def steps(self) -> Sequence[float]:
        """Return the seconds from each end to the next."""
        return [after - before for before, after in itertools.pairwise(self._ends)]


# --- The models ----------------------------------------------------------------------------------------

_TOKENS = 500


def _dense(width: int, count: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        hidden = [keras.layers.Dense(width, "relu") for _ in range(count)]
        return keras.Sequential([keras.Input((width,)), *hidden])

    return make


def _frozen(width: int, count: int) -> Callable[[], keras.Model]:
    """Build products that read much memory but send and update nothing."""

    def make() -> keras.Model:
        hidden = [keras.layers.Dense(width, "relu", trainable=False) for _ in range(count)]
        return keras.Sequential([keras.Input((width,)), keras.layers.LayerNormalization(), *hidden])

    return make


def _transformer(blocks: int, width: int, length: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        x = keras.layers.Embedding(_TOKENS, width)(tokens)
        for _ in range(blocks):
            y = keras.layers.LayerNormalization()(x)
            x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
            y = keras.layers.Dense(4 * width, "gelu")(keras.layers.LayerNormalization()(x))
            x = x + keras.layers.Dense(width)(y)
        return keras.Model(tokens, keras.layers.Dense(_TOKENS)(x))

    return make


def _elementwise(make_layer: Callable[[], keras.layers.Layer], count: int) -> Callable[[], keras.Model]:
    """Build a chain of layers without matrix products, after a layer with weights."""

    def make() -> keras.Model:
        layers = [keras.layers.LayerNormalization(), *[make_layer() for _ in range(count)]]
        return keras.Sequential([keras.Input((64, 256)), *layers])

    return make


def _recurrent(units: int, length: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        x = keras.layers.Embedding(_TOKENS, units)(tokens)
        return keras.Model(tokens, keras.layers.Dense(8)(keras.layers.LSTM(units)(x)))

    return make


def _images(filters: int, count: int, size: int, *, kernel: int = 3, depthwise: int = 0) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        found: list[keras.layers.Layer] = [keras.Input((size, size, 3)), keras.layers.Conv2D(filters, 1)]
        for _ in range(count):
            found += [
                keras.layers.DepthwiseConv2D(depthwise, padding="same", use_bias=False)
                if depthwise
                else keras.layers.Conv2D(filters, kernel, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("relu"),
            ]
        return keras.Sequential([*found, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])

    return make


# Each with the samples of a step on a device and the ZeRO stage. At stage 0, every device updates all variables.
_MODELS: tuple[tuple[Callable[[], keras.Model], int, int], ...] = (
    (_dense(1024, 4), 256, 3),
    (_dense(1536, 3), 2, 3),
    (_dense(1536, 3), 2, 0),
    (_frozen(1536, 6), 2, 0),
    (_dense(16, 1), 1, 0),
    (_dense(48, 24), 8, 3),
    (_dense(256, 12), 16, 0),
    (_transformer(2, 96, 48), 2, 3),
    (_transformer(2, 384, 96), 2, 3),
    (_transformer(2, 384, 96), 2, 0),
    (_transformer(6, 160, 64), 2, 3),
    (_transformer(3, 224, 160), 4, 3),
    (_transformer(8, 64, 32), 4, 3),
    (_transformer(10, 112, 56), 2, 3),
    (_elementwise(keras.layers.LayerNormalization, 8), 6, 3),
    (_elementwise(lambda: keras.layers.Activation("relu"), 12), 24, 0),
    (_elementwise(lambda: keras.layers.Activation("gelu"), 6), 4, 3),
    (_elementwise(lambda: keras.layers.Activation("gelu"), 4), 16, 0),
    (_elementwise(keras.layers.Softmax, 8), 4, 3),
    (_recurrent(96, 48), 4, 3),
    (_recurrent(192, 40), 8, 3),
    (_images(24, 6, 48), 2, 3),
    (_images(64, 4, 24), 8, 3),
    (_images(256, 3, 6), 4, 3),
    (_images(384, 6, 8, kernel=1), 4, 3),
    (_images(48, 5, 24, depthwise=3), 4, 3),
    (_images(96, 6, 32, depthwise=3), 4, 0),
    (_images(320, 4, 6, depthwise=5), 4, 3),
    (_images(1024, 3, 3, depthwise=5), 2, 3),
)
