"""Measure the peak resident memory of training steps with attention in blocks, and with the full scores.

    python tools/bench/attention.py
    python tools/bench/attention.py --lengths=8192 --attentions=flash --layers=4

A GPT of `keras.layers.MultiHeadAttention` with a causal mask trains at stage 3 on four devices, with recomputed blocks.
Each row is a process of its own. *Before* is the resident memory before the first step, *peak* the largest during the
steps, which includes tracing.
"""

import json
import pathlib

import common
from absl import app, flags

_LENGTHS = flags.DEFINE_list("lengths", ["512", "2048"], "Sequence lengths.")
_ATTENTIONS = flags.DEFINE_list("attentions", ["math", "flash"], "Ways to compute attention.")
_LAYERS = flags.DEFINE_integer("layers", 12, "Blocks.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 1, "Steps.", lower_bound=1)
_WAY = flags.DEFINE_string("way", None, "Measure this configuration (JSON) in this process, and print JSON.")

WIDTH, HEADS, BATCH, WORDS = 256, 4, 4, 256


def build(length: int, layers: int):
    """Build a GPT without a strategy."""
    import keras

    class Block(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.first, self.second = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
            self.attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
            self.up, self.down = keras.layers.Dense(4 * WIDTH, activation="gelu"), keras.layers.Dense(WIDTH)

        def build(self, shape):
            self.first.build(shape)
            self.second.build(shape)
            self.attention.build(shape, shape)
            self.up.build(shape)
            self.down.build((*shape[:-1], 4 * WIDTH))
            self.built = True

        def call(self, x):
            normal = self.first(x)
            x = x + self.attention(normal, normal, use_causal_mask=True)
            return x + self.down(self.up(self.second(x)))

    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
    for number in range(layers):
        x = Block(name=f"block_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(WORDS)(x))


def measure(way: dict) -> dict:
    """Train in this process."""
    import keras
    import numpy as np

    import tfshard

    tfshard.initialize(num_devices=4, device_type="CPU")
    keras.utils.set_random_seed(0)
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), attention=way["attention"])
    model = tfshard.as_distributed(build(way["length"], way["layers"]))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False, strategy=strategy)
    strategy.recompute(model)
    tokens = np.random.RandomState(0).randint(1, WORDS, (BATCH, way["length"]))
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = common.resident_bytes("VmRSS") / 2**20
    losses = [float(model.train_on_batch(tokens, tokens)) for _ in range(way["steps"])]
    return way | {"before": before, "peak": common.resident_bytes() / 2**20, "losses": losses}


def main(_) -> None:
    if _WAY.value:
        print(json.dumps(measure(json.loads(_WAY.value))))
        return
    print("| length | attention | before, MiB | peak, MiB | added, MiB | loss |\n|---|---|---|---|---|---|")
    for length in map(int, _LENGTHS.value):
        for attention in _ATTENTIONS.value:
            way = {"length": length, "attention": attention, "layers": _LAYERS.value, "steps": _STEPS.value}
            found = common.run_child(f"--way={json.dumps(way)}")
            print(
                f"| {length} | {attention} | {found['before']:.0f} | {found['peak']:.0f} | "
                f"{found['peak'] - found['before']:.0f} | {found['losses'][-1]:.6f} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
