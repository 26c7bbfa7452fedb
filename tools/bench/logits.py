"""Measure the peak memory of a training step of a GPT with a large vocabulary, with whole logits and by chunks.

    python tools/bench/logits.py --sequences=512,2048,8192

Each way runs in a separate process: plain Keras on one device, stage 3 on two devices, and the same with
`chunked_cross_entropy="auto"`. The blocks are few, because only the part of the logits is compared. With
`--noattention` they have no attention, whose memory grows with the square of the sequence. The columns are:

- *resident*: the peak resident memory of the process over two steps.
- *above start*: the same, less the resident memory before the first step.
- *logits*: the bytes of the logits of the batch in float32, once.
- *loss*, *then*: the losses of the two steps.

A way with whole logits is left out if they take more than half of `--limit` gibibytes.
"""

import json
import os

import common
from absl import app, flags

_SEQUENCES = flags.DEFINE_list("sequences", ["512", "2048", "8192"], "Tokens of a sample.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Blocks.")
_WIDTH = flags.DEFINE_integer("width", 256, "Units.")
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1 << 17, "Classes.")
_SAMPLES = flags.DEFINE_integer("samples", 4, "Samples of a batch.")
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of the sharded ways.")
_ATTENTION = flags.DEFINE_bool("attention", True, "False to leave attention out, whose memory grows with the square.")
_CHUNK = flags.DEFINE_string("chunk", "auto", "Tokens of a chunk, or 'auto'.")
_LIMIT = flags.DEFINE_float("limit", 8.0, "Gibibytes that twice the whole logits may take.")
WAYS = ["one device", "stage 3", "stage 3 chunked"]
_WAYS = flags.DEFINE_list("ways", WAYS, "Ways to measure.")
_WAY = flags.DEFINE_string("way", None, "Measure this way and sequence (JSON) in this process, and print JSON.")


def build(sequence: int):
    """Return a model and its batch."""
    import keras
    import numpy as np

    if _ATTENTION.value:
        return common.gpt2(
            layers=_LAYERS.value, width=_WIDTH.value, heads=4, vocabulary=_VOCABULARY.value, sequence=sequence,
            samples=_SAMPLES.value,
        )  # fmt: skip
    inputs = keras.Input((sequence,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(_VOCABULARY.value, _WIDTH.value)
    x = table(inputs)
    for _ in range(_LAYERS.value):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(_WIDTH.value)(keras.layers.Dense(4 * _WIDTH.value, activation="gelu")(normed))
    tokens = np.random.RandomState(0).randint(0, _VOCABULARY.value, (_SAMPLES.value, sequence))
    return keras.Model(inputs, table(x, reverse=True)), (tokens, tokens)


def measure(way: str, sequence: int) -> dict:
    """Train two steps in this process, and measure its memory."""
    import keras

    chunk = int(_CHUNK.value) if _CHUNK.value.isdecimal() else _CHUNK.value
    options = {"chunked_cross_entropy": chunk} if way.endswith("chunked") else {}
    keras.utils.set_random_seed(0)
    with common.scope(way.removesuffix(" chunked"), devices=_DEVICES.value, **options):
        model, (x, y) = build(sequence)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    before = common.resident_bytes("RssAnon")
    losses = [float(model.train_on_batch(x, y)) for _ in range(2)]
    notes = []
    if way != "one device":
        notes = [each for each in model.distribute_strategy.report(model).notes if "ogits" in each or "chunks" in each]
    return {
        "resident": common.resident_bytes(),
        "before": before,
        "loss": losses[0],
        "later": losses[1],
        "notes": notes,
        "origin": common.origin().rpartition(",")[0],
    }


def main(argv):
    del argv
    os.environ.update(common.SYSTEM_ALLOCATOR)
    if _WAY.value:
        print(json.dumps(measure(**json.loads(_WAY.value))))
        return
    heads = f"{'logits, MiB':>12} {'resident, MiB':>14} {'above start':>12} {'loss':>10} {'then':>10}"
    print(f"{'sequence':>8} {'way':>16} {heads}")
    for sequence in map(int, _SEQUENCES.value):
        logits = 4 * _SAMPLES.value * sequence * _VOCABULARY.value
        for way in _WAYS.value:
            left_out = not way.endswith("chunked") and 2 * logits > _LIMIT.value * 2**30
            run = None if left_out else common.run_child(f"--way={json.dumps({'way': way, 'sequence': sequence})}")
            cells = f"{sequence:>8} {way:>16} {logits / 2**20:>12.0f}"
            if run is None:
                print(f"{cells} {'-':>14}", flush=True)
                continue
            print(
                f"{cells} {run['resident'] / 2**20:>14.0f} {(run['resident'] - run['before']) / 2**20:>12.0f} "
                f"{run['loss']:>10.6f} {run['later']:>10.6f} {' '.join(run['notes'])}",
                flush=True,
            )
    if run is not None:
        print(run["origin"])


if __name__ == "__main__":
    app.run(main)
