"""Train a model of the report with Keras on TensorFlow or on JAX, and serve the measurements (tools/report/serving.py).

    python -m tools.report.on_keras --model='{"kind": "gpt", ...}' --way="stage 3" --devices=4

tools/report/__main__.py starts this program, in the environment of the way.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import pickle
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from tools.report import models, resident, serving

_MODEL = flags.DEFINE_string("model", None, "Sizes, as JSON.", required=True)
_WAY = flags.DEFINE_string("way", None, "The way to train the model.", required=True)
_DEVICES = flags.DEFINE_integer("devices", 4, "Logical CPU devices.")
_MAP_FILE = flags.DEFINE_string("map_file", None, "File of the layout map for Keras on JAX, to read or to write.")

# The strategy options of each way, and a function from the number of devices to the mesh.
SHARDED: dict[str, tuple[dict[str, Any], Any]] = {
    **{f"stage {stage}": ({"zero_stage": stage}, lambda devices: {"batch": devices}) for stage in range(4)},
    "stage 3 alone": ({"zero_stage": 3, "analyzer": None}, lambda devices: {"batch": devices}),
    **{f"stage {stage} compiled": ({"zero_stage": stage}, lambda devices: {"batch": devices}) for stage in (0, 3)},
    "tensor": ({"zero_stage": 0, "layout_map": "auto"}, lambda devices: {"model": devices}),
    "2-D": ({"zero_stage": 3, "layout_map": "auto"}, lambda devices: {"batch": devices // 2, "model": 2}),
    "pipeline": ({"zero_stage": 3}, lambda devices: {"pipeline": 2, "batch": devices // 2}),
}
MICROBATCHES = 4


def compiled(model: models.Model, way: str) -> Any:
    """Return the model, compiled for a way."""
    with _scope(way) if way not in SHARDED else contextlib.nullcontext():
        if way in SHARDED:
            import tfshard

            settings, mesh = SHARDED[way]
            strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**mesh(_DEVICES.value)), **settings)
        built = models.build(model)
        if way == "pipeline":
            built = tfshard.pipeline(built, 2, microbatches=MICROBATCHES)
        is_compiled = way == "one device, XLA" or way.endswith(" compiled") or way.startswith("JAX")
        options = {**models.options(), "jit_compile": is_compiled}
        if way in SHARDED:
            tfshard.as_distributed(built)
            options["strategy"] = strategy
        built.compile(**options)
    return built


def _scope(way: str) -> Any:
    """Return the scope to build and compile the model in, for a way without tfshard."""
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
    """Return the process's only strategy: the collectives of two strategies would use the same keys."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(_DEVICES.value)])


def start(way: str) -> None:
    """Create the devices, before TensorFlow initializes them."""
    if way in SHARDED:
        import tfshard

        tfshard.initialize(num_devices=_DEVICES.value, device_type="CPU")
    elif way == "mirrored":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * _DEVICES.value)


class Timed:
    """A model that is trained one epoch at a time."""

    def __init__(self, model: models.Model, way: str):
        if way == "one device, a quarter":
            model = dataclasses.replace(model, batch=model.batch // 4)
        self._model, self._way = model, way
        self._built = compiled(model, way)
        x, y = models.data(model, model.steps)
        self._data = (models.inputs_of(model, x), y)

    def first(self) -> dict[str, Any]:
        """Train the first epoch, and return the seconds to the end of its first step."""
        begin = time.perf_counter()
        return {"first": self._ends()[0] - begin, "parameters": self._built.count_params(), "versions": _versions()}

    def epoch(self) -> dict[str, Any]:
        """Train another epoch, and return the seconds of its steps but the first."""
        from tools.bench import common

        return {"steps": common.step_times(self._ends())}

    def sent(self) -> dict[str, int]:
        """Return the collectives of a step by trace, and their planned bytes. Empty for ways without tfshard."""
        if self._way not in SHARDED or self._way == "pipeline":
            return {}
        import keras

        import tfshard

        first = keras.tree.map_structure(lambda leaf: leaf[: self._model.batch], self._data)
        sent = tfshard.profile_step(self._built, first).collectives
        plan = self._built.distribute_strategy.plan(self._built, inputs=first[0])
        return {
            "collectives": sum(each.count for each in sent),
            "bytes": sum(each.count * (each.bytes or 0) for each in plan.collectives),
        }

    def kernels(self) -> dict[str, float]:
        """Return the seconds of a step by type of operation, summed over devices, by trace."""
        from tfshard.measure import step_profile, timeline

        with step_profile.traced() as trace:
            self._ends()
        seconds: dict[str, float] = collections.defaultdict(float)
        for each in trace.events():
            if timeline.is_operation(each):
                seconds[each.name.rpartition(":")[2]] += (each.end - each.begin) / self._model.steps
        return seconds

    def _ends(self) -> list[float]:
        from tools.bench import common

        return common.step_ends(self._built, self._data, batch_size=self._model.batch, epochs=1)[0]


def remembered(model: models.Model, way: str) -> dict[str, Any]:
    """Return the bytes per device between two steps and at the peak of a step, minus the bytes before the model."""

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
    model, way = models.Model(**json.loads(_MODEL.value)), _WAY.value
    start(way)
    timed = functools.cache(lambda: Timed(model, way))
    serving.serve({
        "first": lambda: timed().first(),
        "epoch": lambda: timed().epoch(),
        "sent": lambda: timed().sent(),
        "kernels": lambda: timed().kernels(),
        "memory": lambda: {**remembered(model, way), "versions": _versions()},
        "map": lambda: write_map(model),
    })  # fmt: skip


def write_map(model: models.Model) -> dict[str, Any]:
    """Write the layout map with which Keras on JAX shards like tfshard on a model axis."""
    import tfshard

    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(model=_DEVICES.value), "auto", zero_stage=0)
    layout_map = strategy.plan(tfshard.as_distributed(models.build(model))).to_keras_layout_map()
    pathlib.Path(_MAP_FILE.value).write_bytes(pickle.dumps(layout_map))
    return {}


def _versions() -> str:
    import keras

    if keras.backend.backend() == "jax":
        import jax

        return f"Keras {keras.__version__}, JAX {jax.__version__}"
    import tensorflow as tf

    return f"Keras {keras.__version__}, TensorFlow {tf.__version__}"


if __name__ == "__main__":
    app.run(main)
