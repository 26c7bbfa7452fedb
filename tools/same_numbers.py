"""Train nine small models and print a digest of each, to compare two states of the code bit by bit.

    python tools/same_numbers.py > before.json
    python tools/same_numbers.py > after.json        # from another checkout, with PYTHONPATH set to it
    diff before.json after.json

The program prints the losses of four steps. It also prints digests of the final weights, of the plan, and of the
profiled collectives. A change of structure changes none of them.
"""

import dataclasses
import hashlib
import json

import keras
import numpy as np

import tfshard

BATCH, LENGTH, WIDTH, TOKENS = 16, 8, 32, 64

TRAININGS = {
    "stage 0": ({"batch": 4}, {"zero_stage": 0}),
    "stage 1": ({"batch": 4}, {"zero_stage": 1, "slot_dtype": "bfloat16"}),
    "stage 2, microbatches": ({"batch": 4}, {"zero_stage": 2, "microbatches": 2}),
    "stage 3": ({"batch": 4}, {"zero_stage": 3, "reshard_after_forward": ".*block0.*"}),
    "stage 3, no groups": ({"batch": 4}, {"zero_stage": 3, "analyzer": None, "prefetch": 2}),
    "replicas": ({"replica": 2, "batch": 2}, {"zero_stage": 3}),
    "tensor parallel": ({"batch": 2, "model": 2}, {"zero_stage": 3, "layout_map": "auto", "sequence_parallel": True}),
    "compression": ({"batch": 4}, {"zero_stage": 2, "compression": "int8", "analyzer": None}),
    "tables": ({"batch": 4}, {"zero_stage": 1, "tables": ".*tokens/embeddings"}),
}


def build() -> keras.Model:
    """Return a small transformer with a head for sequences."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(TOKENS, WIDTH, name="tokens")(tokens)
    for number in range(2):
        name = f"block{number}"
        y = keras.layers.LayerNormalization(name=f"{name}_norm")(x)
        x = x + keras.layers.MultiHeadAttention(4, WIDTH // 4, name=f"{name}_attention")(y, y)
        y = keras.layers.Dense(512, activation="gelu", name=f"{name}_up")(x)
        x = x + keras.layers.Dense(WIDTH, name=f"{name}_down")(keras.layers.Dropout(0.1)(y))
    return keras.Model(tokens, keras.layers.Dense(TOKENS, name="head")(x), name="lm")


def digest(*arrays: object) -> str:
    hashed = hashlib.sha256()
    for each in arrays:
        hashed.update(each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode())
    return hashed.hexdigest()[:16]


def main() -> None:
    tfshard.initialize(num_devices=4, device_type="CPU")
    random = np.random.RandomState(0)
    x, y = (random.randint(0, TOKENS, (4 * BATCH, LENGTH)).astype("int32") for _ in range(2))
    found = {}
    for name, (axes, options) in TRAININGS.items():
        strategy = tfshard.ShardedStrategy(tfshard.create_mesh(**axes), **options)
        model = tfshard.as_distributed(build())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], strategy=strategy, jit_compile=False)
        losses = [float(model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH])[0]) for i in range(0, len(x), BATCH)]
        plan = strategy.plan(model, inputs=x[:BATCH])
        profile = tfshard.profile_step(model, (x[:BATCH], y[:BATCH]))
        sent = sorted((each.kind, each.count, each.bytes) for each in profile.collectives)
        found[name] = {
            "losses": losses,
            "weights": digest(*model.get_weights()),
            "plan": digest(dataclasses.replace(plan, peak=None).text(detail=True)),
            "collectives": digest(sent),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
