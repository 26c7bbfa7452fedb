"""Trains a model of the report in this process, with Keras on TensorFlow or on JAX, and prints what it took as JSON.

    python -m tools.report.on_keras --model='{"kind": "gpt", ...}' --way="stage 3" --devices=4

Started by tools/report/__main__.py, in the environment of the way.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

from absl import app, flags

from tools.report import models, resident

_MODEL = flags.DEFINE_string("model", None, "Sizes, as JSON.", required=True)
_WAY = flags.DEFINE_string("way", None, "How it is trained.", required=True)
_DEVICES = flags.DEFINE_integer("devices", 4, "Logical CPU devices.")
_STEPS = flags.DEFINE_integer("steps", 6, "Steps that are timed, of each epoch.", lower_bound=2)
_EPOCHS = flags.DEFINE_integer("epochs", 2, "Epochs that are timed, after one that is not.", lower_bound=1)
_MEMORY = flags.DEFINE_bool("memory", False, "Measure memory in place of time.")
_MAP_FILE = flags.DEFINE_string("map_file", None, "Where the layout map for Keras on JAX is, or goes.")

# Way to the options of a strategy, and its mesh for so many devices.
SHARDED: dict[str, tuple[dict[str, Any], Any]] = {
    **{f"stage {stage}": ({"zero_stage": stage}, lambda devices: {"batch": devices}) for stage in range(4)},
    "stage 3 alone": ({"zero_stage": 3, "analyzer": None}, lambda devices: {"batch": devices}),
    "tensor": ({"zero_stage": 0, "layout_map": "auto"}, lambda devices: {"model": devices}),
    "2-D": ({"zero_stage": 3, "layout_map": "auto"}, lambda devices: {"batch": devices // 2, "model": 2}),
    "pipeline": ({"zero_stage": 3}, lambda devices: {"pipeline": 2, "batch": devices // 2}),
}
MICROBATCHES = 4


def compiled(model: models.Model, way: str) -> Any:
    """The model, compiled as the way says."""
    with _scope(way) if way not in SHARDED else contextlib.nullcontext():
        if way in SHARDED:
            import tfshard

            settings, mesh = SHARDED[way]
            strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh(_DEVICES.value)), **settings)
        built = models.build(model)
        if way == "pipeline":
            built = tfshard.pipeline(built, 2, microbatches=MICROBATCHES)
        options = {**models.options(), "jit_compile": way == "one device, XLA" or way.startswith("JAX")}
        if way in SHARDED:
            tfshard.as_distributed(built)
            options["strategy"] = strategy
        built.compile(**options)
    return built


def _scope(way: str) -> Any:
    """What the model is built and compiled under, of ways without tfshard."""
    import keras

    if way == "mirrored":
        return _mirrored().scope()
    if way == "JAX, data":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    elif way == "JAX, tensor":
        layout_map = pickle.loads(pathlib.Path(_MAP_FILE.value).read_bytes())
        distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        keras.distribution.set_distribution(distribution)
    return contextlib.nullcontext()


@functools.cache
def _mirrored() -> Any:
    """One for all models of a process: those of two would give their collectives the same keys."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(_DEVICES.value)])


def start(way: str) -> None:
    """Makes the devices, before anything else does."""
    if way in SHARDED:
        import tfshard

        tfshard.initialize(num_devices=_DEVICES.value, device_type="CPU")
    elif way == "mirrored":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _DEVICES.value)


def timed(model: models.Model, way: str) -> dict[str, Any]:
    """Seconds to the end of the first step, and of later ones; what a step of tfshard sends."""
    from tools.bench import common

    if way == "one device, a quarter":
        model = dataclasses.replace(model, batch=model.batch // 4)
    built = compiled(model, way)
    x, y = models.data(model, _STEPS.value)
    data = (models.inputs_of(model, x), y)
    found = common.fit_times(built, data, batch_size=model.batch, epochs=_EPOCHS.value)
    if way in SHARDED and way != "pipeline":
        import keras

        import tfshard

        first = keras.tree.map_structure(lambda leaf: leaf[: model.batch], data)
        sent = tfshard.profile_step(built, first).collectives
        plan = built.distribute_strategy.plan(built, inputs=first[0])
        found["collectives"] = sum(each.count for each in sent)
        found["bytes"] = sum(each.count * (each.bytes or 0) for each in plan.collectives)
    return {**found, "parameters": built.count_params()}


def remembered(model: models.Model, way: str) -> dict[str, Any]:
    """Bytes a device between two steps, and at the peak of a step, above what the process had before the model."""

    def trains(model: models.Model) -> Callable[[], object]:
        built = compiled(model, way)
        x, y = models.data(model, 2)
        data = (models.inputs_of(model, x), y)
        return lambda: built.fit(*data, batch_size=model.batch, verbose=0)

    trains(models.tiny(model))()
    before = resident.now()
    steps = trains(model)
    steps()
    return resident.between_and_at_peak(steps, before, _DEVICES.value)


def main(argv: list[str]) -> None:
    del argv
    model = models.Model(**json.loads(_MODEL.value))
    start(_WAY.value)
    if _WAY.value == "plan":
        _write_map(model)
        return
    found = remembered(model, _WAY.value) if _MEMORY.value else timed(model, _WAY.value)
    print(json.dumps({**found, "versions": _versions()}))


def _write_map(model: models.Model) -> None:
    """The layout map with which Keras on JAX shards as tfshard does."""
    import tfshard

    tfshard.initialize(num_devices=_DEVICES.value, device_type="CPU")
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(model=_DEVICES.value), "auto", zero_stage=0)
    layout_map = strategy.plan(tfshard.as_distributed(models.build(model))).to_keras_layout_map()
    pathlib.Path(_MAP_FILE.value).write_bytes(pickle.dumps(layout_map))
    print(json.dumps(dataclasses.asdict(model)))


def _versions() -> str:
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return f"Keras {keras.__version__}, JAX {jax.__version__}"
    import tensorflow as tf

    return f"Keras {keras.__version__}, TensorFlow {tf.__version__}"


if __name__ == "__main__":
    app.run(main)
