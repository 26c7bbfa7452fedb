"""Measure the memory of a training step's activations with and without a context axis.

    python tools/bench/context.py
    python tools/bench/context.py --lengths=8192 --layers=2

A GPT of `keras.layers.MultiHeadAttention` with a causal mask trains with SGD at stage 0 on a batch of one sequence.
*Activations* are the requested bytes that the step adds on the device with the largest peak (`tfshard.profile_step`).
Each row is a process.
"""

import json

import common
from absl import app, flags

_LENGTHS = flags.DEFINE_list("lengths", ["2048"], "Sequence lengths.")
_CONTEXTS = flags.DEFINE_list("contexts", ["1", "4"], "Sizes of the context axis.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Blocks.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps whose losses are compared.", lower_bound=1)
_WAY = flags.DEFINE_string("way", None, "Measure this configuration (JSON) in this process, and print JSON.")

WIDTH, HEADS, WORDS = 64, 4, 64


def build(length: int, layers: int):
    """Build a GPT without a strategy."""
    import keras

    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(layers):
        normal = keras.layers.LayerNormalization()(x)
        x += keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normal, normal, use_causal_mask=True)
        up = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
        x += keras.layers.Dense(WIDTH)(up)
    return keras.Model(inputs, keras.layers.Dense(WORDS)(x))


def measure(way: dict) -> dict:
    """Train in this process."""
    import keras
    import numpy as np

    import tfshard

    contexts = way["contexts"]
    tfshard.initialize(num_devices=contexts, device_type="CPU")
    keras.utils.set_random_seed(0)
    mesh = tfshard.create_mesh(batch=1, context=contexts)
    model = tfshard.as_distributed(build(way["length"], way["layers"]))
    strategy = tfshard.ShardedStrategy(mesh, attention="flash", zero_stage=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False, strategy=strategy)
    tokens = np.random.RandomState(0).randint(1, WORDS, (1, way["length"]))
    losses = [float(model.train_on_batch(tokens, tokens)) for _ in range(way["steps"])]
    profile = tfshard.profile_step(model, (tokens, tokens))
    return way | {"added": profile.peak.device_added, "sent": profile.bytes("all-to-all"), "losses": losses}


def main(_) -> None:
    if _WAY.value:
        print(json.dumps(measure(json.loads(_WAY.value))))
        return
    print("| length | context | activations, MiB | share | all-to-all, MiB | loss |\n|---|---|---|---|---|---|")
    for length in map(int, _LENGTHS.value):
        first = None
        for contexts in map(int, _CONTEXTS.value):
            way = {"length": length, "contexts": contexts, "layers": _LAYERS.value, "steps": _STEPS.value}
            found = common.run_child(f"--way={json.dumps(way)}")
            first = first or found["added"]
            print(
                f"| {length} | {contexts} | {found['added'] / 2**20:.1f} | {found['added'] / first:.2f} | "
                f"{found['sent'] / 2**20:.1f} | {found['losses'][-1]:.7f} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
