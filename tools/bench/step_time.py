"""Step time of one GPT configuration: one device, MirroredStrategy, ShardedStrategy stages 0 to 3 on four devices.

    python tools/bench/step_time.py --rounds=5
    python tools/bench/step_time.py --layers=12 --width=128 --vocabulary=1500 --batch_size=8

The second is narrow: 196 variables of 2.6M parameters, where groups matter most ("alone": without groups).

Each way runs in a process of its own, in turn, `rounds` times over, so that a machine whose speed drifts slows all of
them; figures are medians of the rounds, and ratios to one device.
"""

import json
import platform
import statistics
import subprocess
import sys
import time

from absl import app, flags

_LAYERS = flags.DEFINE_integer("layers", 4, "Transformer blocks.")
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model.")
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 8000, "Tokens of the vocabulary.")
_SEQUENCE = flags.DEFINE_integer("sequence_length", 128, "Tokens of a sample.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Samples of a step.")
_STEPS = flags.DEFINE_integer("steps", 6, "Timed steps of a round.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds.")
_WAYS = flags.DEFINE_list("ways", None, "Only these ways; by default all.")
_WAY = flags.DEFINE_string("way", None, "Measure this one here, and print JSON.")

DEVICES = 4
WAYS = ("one device", "mirrored", "stage 0", "stage 1", "stage 2", "stage 3", "stage 3 alone")


def measure(way: str) -> dict:
    """Seconds to the first step, and of a later one, in this process."""
    import contextlib

    import keras
    import keras_hub
    import numpy as np
    import tensorflow as tf

    scope = contextlib.nullcontext()
    if way.startswith("stage"):
        import tfshard

        tfshard.initialize(num_devices=DEVICES, device_type="CPU")
        stage = int(way.split()[1])
        grouping = {"analyzer": None} if way.endswith("alone") else {}
        scope = tfshard.ShardedStrategy(tfshard.create_mesh(batch=DEVICES), zero_stage=stage, **grouping).scope()
    elif way == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
        scope = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)]).scope()
    with scope:
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=_VOCABULARY.value,
            num_layers=_LAYERS.value,
            num_heads=_HEADS.value,
            hidden_dim=_WIDTH.value,
            intermediate_dim=4 * _WIDTH.value,
            max_sequence_length=_SEQUENCE.value,
            dropout=0.0,
        )
        logits = backbone.token_embedding(backbone.output, reverse=True)
        model = keras.Model(backbone.input, logits)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    tokens = np.random.RandomState(0).randint(0, _VOCABULARY.value, (_BATCH_SIZE.value, _SEQUENCE.value))
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    epochs = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            epochs.append(time.perf_counter())

    start = time.perf_counter()
    model.fit(inputs, tokens, batch_size=_BATCH_SIZE.value, epochs=_STEPS.value + 1, verbose=0, callbacks=[Clock()])
    steps = [after - before for before, after in zip(epochs, epochs[1:], strict=False)]
    return {
        "first": epochs[0] - start,
        "step": statistics.median(steps),
        "parameters": model.count_params(),
        "versions": f"Python {platform.python_version()}, TensorFlow {tf.__version__}, Keras {keras.__version__}",
    }


def main(argv):
    del argv
    if _WAY.value:
        print(json.dumps(measure(_WAY.value)))
        return
    ways = _WAYS.value or list(WAYS)
    results = {way: [] for way in ways}
    for _ in range(_ROUNDS.value):
        for way in ways:
            command = [sys.executable, __file__, *sys.argv[1:], f"--way={way}"]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            results[way].append(json.loads(output.splitlines()[-1]))
    first = results["one device"][0]
    print(f"{first['versions']}, {platform.machine()}, {DEVICES} logical CPU devices, median of {_ROUNDS.value} rounds")
    print(f"{first['parameters']:,} parameters, batch {_BATCH_SIZE.value} x {_SEQUENCE.value}, Adam, no XLA")
    print(f"{'':>14} {'step ms':>8} {'/ one device':>13} {'/ mirrored':>11} {'first step s':>13}")
    for way in ways:
        step = statistics.median(r["step"] for r in results[way])
        ratios = [
            statistics.median(
                ours["step"] / theirs["step"] for ours, theirs in zip(results[way], results[base], strict=True)
            )
            for base in ("one device", "mirrored")
        ]
        to_first = statistics.median(r["first"] for r in results[way])
        print(f"{way:>14} {1e3 * step:8.0f} {ratios[0]:13.2f} {ratios[1]:11.2f} {to_first:13.1f}")


if __name__ == "__main__":
    app.run(main)
