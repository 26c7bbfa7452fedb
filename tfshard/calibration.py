"""calibrate: measures what devices take for the work of a step, by small models, and how they reach each other.

Each model has much of another kind of work. What a step takes, less its collectives, is the sum of its work at prices
that are found by least squares of relative errors, none below zero (Lawson and Hanson 1974, by SciPy).
"""

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfshard.devices import create_mesh, startup
from tfshard.errors import StrategyError
from tfshard.graph import model_specs
from tfshard.measure import network_profile
from tfshard.planning.links import Links
from tfshard.planning.machine import KINDS_OF_WORK, Machine, Work
from tfshard.planning.step_times import TracedStep, updated_bytes_of
from tfshard.training import ShardedStrategy

# Steps that are timed of each model, after as many that are not.
_STEPS = 8
# Of work that no model does, and of what costs nothing beside the rest.
_NEXT_TO_NOTHING = 1e-18
# Where least squares would say more: what is left of a step without its collectives is at least so much of it.
_LEAST_COMPUTE = 0.2


def calibrate() -> Machine:
    """Trains small models on all devices, and finds the prices with which their steps take what they took.

    Takes some minutes, on a machine that does nothing else. Needs SciPy. `peak_flops` and `memory` are not known
    afterwards: write them into the file that `Machine.save` makes, or use `dataclasses.replace`.

    Returns:
        The machine, for `tfshard.simulate` and `tfshard.advise(machine=)`.

    Raises:
        StrategyError: There is one device only: no collective can be measured.
    """
    started = startup.initialize()
    if started.num_devices < 2:
        raise StrategyError(
            "Calibration measures collectives, too, and needs two devices at least: on a CPU "
            "tfshard.initialize(num_devices=4), or tfshard calibrate --num_devices=4. Received: 1 device"
        )
    links = network_profile.profile_network().links
    cores = len(os.sched_getaffinity(0)) if started.device_type == "CPU" else None
    rows = [_measured(make, samples, stage, links, cores) for make, samples, stage in _MODELS]
    name = f"{links.devices_per_host} {started.device_type} devices of {platform.node() or 'a machine'}"
    return Machine.of_prices(_prices_of(rows), name=name, links=links, cores=cores)


def _prices_of(rows: Sequence[tuple[Work, float]]) -> dict[str, float]:
    """The seconds of one of each kind of work with which steps take what they took, their relative errors being least.

    Args:
        rows: The work of each step, and its seconds.
    """
    from scipy import optimize

    scaled = np.array([[getattr(work, name) / seconds for name in KINDS_OF_WORK] for work, seconds in rows])
    largest = np.maximum(scaled.max(0), _NEXT_TO_NOTHING)
    prices, _ = optimize.nnls(scaled / largest, np.ones(len(rows)))
    return dict(zip(KINDS_OF_WORK, np.maximum(prices / largest, _NEXT_TO_NOTHING).tolist(), strict=True))


def _measured(
    make: Callable[[], keras.Model], samples: int, stage: int, links: Links, cores: int | None
) -> tuple[Work, float]:
    """What a device does in a step of a model, as often as it is done in turns by devices that share cores; and what
    a step takes without its collectives."""
    devices = startup.initialize().num_devices
    strategy = ShardedStrategy(create_mesh(batch=devices), zero_stage=stage)
    model = make()
    model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False, strategy=strategy)
    rows = samples * devices
    x = np.random.RandomState(0).randint(0, _TOKENS, (2 * _STEPS * rows, *model.input_shape[1:]))
    x = x.astype(model.inputs[0].dtype)
    y = np.zeros((len(x), *model.output_shape[1:]), "float32")
    clock = _Clock()
    model.fit(x, y, batch_size=rows, verbose=0, callbacks=[clock])
    seconds = statistics.median(clock.steps()[_STEPS - 1 :])

    placement = strategy.placement_of(model)
    slots = model_specs.slots_of(model.optimizer, placement.specs)
    step = TracedStep.of(
        model,
        placement,
        gathering=strategy.gathering,
        inputs=x[:rows],
        slots=slots,
    )
    free = Machine.of_prices(dict.fromkeys(KINDS_OF_WORK, _NEXT_TO_NOTHING), name="", links=links, cores=cores)
    updated = updated_bytes_of(placement, slots)
    sent = step.on(free, strategy.mesh_shape, updated_bytes=updated).collective_seconds
    work = Work.total([step.total, Work(updated_bytes=updated, steps=1)])
    return free.in_turns(work, min(devices, links.devices_per_host)), max(seconds - sent, _LEAST_COMPUTE * seconds)


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """When each step has ended, its loss on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        float((logs or {})["loss"])
        self._ends.append(time.perf_counter())

    def steps(self) -> Sequence[float]:
        """Seconds from each end to the next."""
        return [after - before for before, after in itertools.pairwise(self._ends)]


# --- What is trained -----------------------------------------------------------------------------------

_TOKENS = 500


def _dense(width: int, count: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        hidden = [keras.layers.Dense(width, "relu") for _ in range(count)]
        return keras.Sequential([keras.Input((width,)), *hidden])

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


def _recurrent(units: int, length: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        tokens = keras.Input((length,), dtype="int32")
        x = keras.layers.Embedding(_TOKENS, units)(tokens)
        return keras.Model(tokens, keras.layers.Dense(8)(keras.layers.LSTM(units)(x)))

    return make


def _images(filters: int, count: int, size: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        found: list[keras.layers.Layer] = [keras.Input((size, size, 3))]
        for _ in range(count):
            found += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Activation("relu"),
            ]
        return keras.Sequential([*found, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])

    return make


# Each with the samples of a step on a device, and the stage: at stage 0 every device updates all.
_MODELS: tuple[tuple[Callable[[], keras.Model], int, int], ...] = (
    (_dense(1024, 4), 256, 3),
    (_dense(1536, 3), 2, 3),
    (_dense(1536, 3), 2, 0),
    (_dense(48, 24), 8, 3),
    (_transformer(2, 96, 48), 2, 3),
    (_transformer(2, 384, 96), 2, 3),
    (_transformer(2, 384, 96), 2, 0),
    (_transformer(6, 160, 64), 2, 3),
    (_transformer(3, 224, 160), 4, 3),
    (_transformer(8, 64, 32), 4, 3),
    (_recurrent(96, 48), 4, 3),
    (_images(24, 6, 48), 2, 3),
    (_images(64, 4, 24), 8, 3),
)
