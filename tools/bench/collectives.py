"""Collectives of one step at stage 3 on four devices, by trace: grouped, and one by one.

    python tools/bench/collectives.py
    python tools/bench/collectives.py --models=gpt2_narrow

Each measurement is a process of its own.
"""

import json

import common
from absl import app, flags

_MODELS = flags.DEFINE_list("models", ["gpt2_narrow", "gpt2_small", "bert", "resnet"], "Which models.")
_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.")
_WAY = flags.DEFINE_string("way", None, "Measure this model:grouped or model:alone here, and print JSON.")

BATCH = 8


def _bert():
    import keras
    import keras_hub
    import numpy as np

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=1500, num_layers=12, num_heads=4, hidden_dim=128, intermediate_dim=512, max_sequence_length=64,
        dropout=0.0,
    )  # fmt: skip
    model = keras.Model(backbone.input, keras.layers.Dense(2)(backbone.output["pooled_output"]))
    tokens = np.random.RandomState(0).randint(0, 1500, (BATCH, 64))
    inputs = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": np.ones_like(tokens)}
    return model, (inputs, tokens[:, 0] % 2)


def _resnet():
    """A residual network in the manner of ResNet-20 for 32x32 images (He et al. 2015, section 4.2)."""
    import keras
    import numpy as np

    def conv(x, filters, strides=1):
        x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        return keras.layers.BatchNormalization()(x)

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(conv(inputs, 16))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if block == 0 and filters > 16 else 1
            y = keras.layers.ReLU()(conv(x, filters, strides))
            y = conv(y, filters)
            if x.shape[-1] != filters:
                x = keras.layers.BatchNormalization()(keras.layers.Conv2D(filters, 1, strides, use_bias=False)(x))
            x = keras.layers.ReLU()(keras.layers.Add()([x, y]))
    model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))
    rs = np.random.RandomState(0)
    return model, (rs.normal(size=(BATCH, 32, 32, 3)).astype("float32"), rs.randint(0, 10, BATCH))


BUILDERS = {
    "gpt2_narrow": lambda: common.gpt2(layers=12, width=128, heads=4, vocabulary=1500, sequence=64, samples=BATCH),
    "gpt2_small": lambda: common.gpt2(layers=12, width=768, heads=12, vocabulary=50257, sequence=64, samples=BATCH),
    "bert": _bert,
    "resnet": _resnet,
}


def measure(name: str, grouped: bool) -> dict:
    """Counts the collectives of one step in this process."""
    import keras

    import tfshard

    with common.scope(f"stage {_STAGE.value}", **({} if grouped else {"analyzer": None})) as strategy:
        model, batch = BUILDERS[name]()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    profile = tfshard.profile_step(model, batch)
    statistics = sum(c.count for c in profile.collectives if "/moments/" in c.name or "batch_norm" in c.name)
    plan = strategy.plan(model)
    return {
        "variables": len(model.trainable_variables),
        "alone": sum(v.kind == "parameter" and v.group is None for v in plan.variables),
        "gathers": profile.count("all-gather"),
        "reductions": profile.count("all-reduce"),
        "statistics": statistics,
        "planned": plan.collective_count(),
        "origin": common.origin(),
    }


def main(argv):
    del argv
    if _WAY.value:
        name, _, way = _WAY.value.partition(":")
        print(json.dumps(measure(name, way == "grouped")))
        return
    print(f"{'':<22} {'variables':>9} {'alone':>6} {'gathers':>8} {'reductions':>11} {'all':>5} {'planned':>8} "
          f"{'batch norm':>11}")  # fmt: skip
    for name in _MODELS.value:
        for way in ("alone", "grouped"):
            r = common.run_child(f"--way={name}:{way}")
            print(
                f"{name + ' ' + way:<22} {r['variables']:>9} {r['alone']:>6} {r['gathers']:>8} {r['reductions']:>11} "
                f"{r['gathers'] + r['reductions']:>5} {r['planned']:>8} {r['statistics']:>11}",
                flush=True,
            )
    print(f"Stage {_STAGE.value}, {r['origin']}")


if __name__ == "__main__":
    app.run(main)
