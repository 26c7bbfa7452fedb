"""Train a GPT-2 with Keras or tfshard in each variant, and print a line of JSON for each as soon as it has ended.

    python tools/gpu/quarter/training.py --size=124M '{"way": "keras"}' '{"way": "keras", "compiled": true}'
    python tools/gpu/quarter/training.py --size="4 blocks" '{"devices": 4, "options": {"prefetch": 2}, "traced": true}'

A variant is a JSON object:

    way       "tfshard" (the default) or "keras".
    devices   The devices of the mesh, 1 by default. One GPU is split if the machine has fewer. All variants of a
              process have the same number.
    compiled  True to compile with XLA: blocks under tfshard, the whole step with Keras.
    options   Arguments of ShardedStrategy.
    renamed   False to keep the names that DTensor gives collectives.
    traced    True to trace a step.
    watched   True to print the host memory that each step adds.
    label     Printed as it is.

Printed are the step time, tokens and model FLOP/s, the peak memory of a GPU, and the plan's peak.
"""

import contextlib
import gc
import json
import pathlib
import sys
import unittest.mock
from typing import Any

from absl import app, flags

ROOT = pathlib.Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "bench"), str(ROOT / "tools" / "gpu" / "quarter")]

import common  # noqa: E402
import gpu_trace  # noqa: E402
import sizes  # noqa: E402

_SIZE = flags.DEFINE_enum("size", "tiny", list(sizes.SIZES), "The model.")
_POLICY = flags.DEFINE_string("policy", "mixed_bfloat16", "Keras's dtype policy.")
_STEPS = flags.DEFINE_integer("steps", 10, "Timed steps.", lower_bound=2)


def start(variant: dict[str, Any]) -> None:
    """Start the devices of a variant's mesh. Plain Keras runs without DTensor."""
    if variant.get("way") == "keras":
        return
    devices = variant.get("devices", 1)
    if devices > 1 or common.DEVICE_TYPE == "CPU":
        common.start(devices)
        return
    import tfshard

    tfshard.initialize(num_devices=1, device_type="GPU")  # The whole card.


def build(variant: dict[str, Any]) -> tuple[Any, Any]:
    """Return the compiled model of a variant, and samples for the timed steps."""
    import keras

    size = sizes.SIZES[_SIZE.value]
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if variant.get("way") != "keras":
        import tfshard

        mesh = tfshard.create_mesh(batch=variant.get("devices", 1))
        scope = tfshard.ShardedStrategy(mesh, **variant.get("options", {})).scope()
    with scope:
        model, data = common.gpt2(
            layers=size.layers, width=size.width, heads=size.heads, vocabulary=size.vocabulary, sequence=size.length,
            samples=size.batch * _STEPS.value,
        )  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=variant.get("compiled", False))
    return model, data


def measure(variant: dict[str, Any]) -> dict[str, Any]:
    """Train, and return what was measured."""
    import keras
    import tensorflow as tf

    size = sizes.SIZES[_SIZE.value]
    devices = tf.config.list_logical_devices("GPU")
    for device in devices:
        tf.config.experimental.reset_memory_stats(device.name.partition("device:")[2])
    model, data = build(variant)
    times = common.fit_times(model, data, batch_size=size.batch, epochs=2)
    found: dict[str, Any] = {
        **sizes.speed(size, times["step"]),
        "first_step_seconds": round(times["first"], 1),
        "loss": round(float(model.get_metrics_result()["loss"]), 4),
    }
    if variant.get("watched"):
        before = common.resident_bytes("VmRSS")
        model.fit(*data, batch_size=size.batch, epochs=2, verbose=0)
        grown = common.resident_bytes("VmRSS") - before
        found["host_kib_per_step"] = round(grown / common.BYTES_PER_KIBIBYTE / (2 * _STEPS.value), 1)
    if devices:
        peaks = [tf.config.experimental.get_memory_info(each.name.partition("device:")[2])["peak"] for each in devices]
        found["peak_gb"] = round(max(peaks) / 1e9, 3)
    if variant.get("way") != "keras":
        batch = keras.tree.map_structure(lambda leaf: leaf[: size.batch], data)
        planned = model.distribute_strategy.plan(model, inputs=batch[0]).peak
        found["planned_peak_gb"] = round(planned.peak_bytes / 1e9, 3)
        if variant.get("traced"):
            found |= gpu_trace.of_step(model, batch)
    return found


@contextlib.contextmanager
def names(variant: dict[str, Any]) -> Any:
    """Keep DTensor's names of collectives, if the variant says so."""
    if variant.get("renamed", True):
        yield
        return
    from tfshard._private import functions

    with unittest.mock.patch.object(functions, "_has_dtensor_collectives", lambda function: False):
        yield


def main(argv: list[str]) -> None:
    import keras

    keras.config.set_dtype_policy(_POLICY.value)
    variants = [json.loads(each) for each in argv[1:]]
    start(variants[0])
    failed = 0
    for variant in variants:
        line = {"size": _SIZE.value, **variant}
        try:
            with names(variant):
                line |= measure(variant)
        except Exception as error:  # The next variant runs anyway.
            failed += 1
            line |= {"error": f"{type(error).__name__}: {error}"[:1500]}
        print(json.dumps(line), flush=True)
        keras.backend.clear_session()
        gc.collect()
    sys.exit(failed != 0)


if __name__ == "__main__":
    app.run(main)
