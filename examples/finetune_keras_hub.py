"""Finetune a KerasHub backbone with a classification head, sharded over a mesh.

    python examples/finetune_keras_hub.py --mesh=batch:4 --zero_stage=3
    python examples/finetune_keras_hub.py --mesh=batch:2,model:2 --backbone=gemma
    python examples/finetune_keras_hub.py --mesh=batch:4 --preset=bert_tiny_en_uncased

By default, the backbone is tiny and has random weights, and nothing is downloaded. --preset takes a pretrained
backbone. The example generates its data: the tokens of a sequence come from two groups, and the label names the larger
group.
"""

import math
from typing import NamedTuple

import keras
import keras_hub
import numpy as np
from absl import app, flags

import tfshard

_MESH = flags.DEFINE_string("mesh", "", "Mesh axes, such as 'batch:4' or 'batch:2,model:2'; empty: one device.")
_ZERO_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.", 0, 3)
_BACKBONE = flags.DEFINE_enum("backbone", "bert", ["bert", "gemma"], "The tiny backbone, without --preset.")
_PRESET = flags.DEFINE_string("preset", None, "A KerasHub preset of a text backbone, such as 'bert_tiny_en_uncased'.")
_SEQUENCE_LENGTH = flags.DEFINE_integer(
    "sequence_length", 31, "Tokens in a sequence; an odd number, so that every label is decided."
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Sequences in a step, over all devices.", 1)
_STEPS = flags.DEFINE_integer("steps", 150, "Training steps.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Learning rate of AdamW.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and data.")
_MIN_ACCURACY = flags.DEFINE_float("min_accuracy", 0.0, "The program fails below this held-out accuracy.", 0.0, 1.0)
flags.register_validator("sequence_length", lambda value: value > 0 and value % 2, "must be positive and odd")

HELD_OUT = 512
VOCABULARY = 128  # The vocabulary size of the tiny backbones.
# Tokens 10 to 29 are one group, 30 to 49 the other. Lower ids are special tokens in some vocabularies.
FIRST_TOKEN, GROUP = 10, 20


class Sequences(NamedTuple):
    """Backbone inputs by name, each `(n, sequence_length)`, and labels `(n,)`."""

    inputs: dict[str, np.ndarray]
    labels: np.ndarray


def parse_mesh(text: str) -> dict[str, int]:
    """Parse mesh axes: `"batch:2,model:2"` to `{"batch": 2, "model": 2}`."""
    axes = (part.split(":") for part in text.split(",") if part)
    return {name.strip(): int(size) for name, size in axes}


def start(axes: dict[str, int]) -> None:
    """Start as many devices as the mesh has."""
    if axes:
        tfshard.initialize(num_devices=None if -1 in axes.values() else math.prod(axes.values()))


def make_strategy(axes: dict[str, int]) -> tfshard.ShardedStrategy | None:
    """Return the strategy that the flags ask for, or None for one device."""
    if not axes:
        return None
    layout_map = "auto" if "model" in axes else None
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, zero_stage=_ZERO_STAGE.value)


def make_backbone() -> keras.Model:
    """Return the preset, or a tiny backbone with random weights."""
    if _PRESET.value is not None:
        return keras_hub.models.Backbone.from_preset(_PRESET.value)
    if _BACKBONE.value == "gemma":
        return keras_hub.models.GemmaBackbone(
            vocabulary_size=VOCABULARY,
            num_layers=2,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=64,
            intermediate_dim=256,
            head_dim=16,
        )
    return keras_hub.models.BertBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=256,
        dropout=0.0,
        max_sequence_length=max(64, _SEQUENCE_LENGTH.value),
    )


def add_head(backbone: keras.Model) -> keras.Model:
    """Return the backbone with a mean over its sequence output, and two logits."""
    features = backbone.output["sequence_output"] if isinstance(backbone.output, dict) else backbone.output
    pooled = keras.layers.GlobalAveragePooling1D(name="pool")(features)
    logits = keras.layers.Dense(2, dtype="float32", name="logits")(pooled)
    return keras.Model(backbone.input, logits, name="classifier")


def make_sequences(count: int, input_names: list[str], random: np.random.Generator) -> Sequences:
    """Draw `count` sequences. Each sequence draws its share of tokens from the second group at random."""
    shape = (count, _SEQUENCE_LENGTH.value)
    second = random.random(shape) < random.random((count, 1))
    tokens = FIRST_TOKEN + random.integers(0, GROUP, shape) + GROUP * second
    values = {"token_ids": tokens, "padding_mask": np.ones(shape), "segment_ids": np.zeros(shape)}
    unknown = sorted(set(input_names) - set(values))
    if unknown:
        raise ValueError(f"This example cannot fill these inputs of the backbone: {unknown}. Known: {sorted(values)}")
    inputs = {name: values[name].astype(np.int32) for name in input_names}
    return Sequences(inputs=inputs, labels=(2 * second.sum(axis=1) > shape[1]).astype(np.int32))


def main(argv: list[str]) -> int:
    """Finetune and measure. Returns 1, the exit status, if the accuracy is below `--min_accuracy`."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    axes = parse_mesh(_MESH.value)
    start(axes)  # First: TensorFlow fixes its devices at the first tensor.
    keras.utils.set_random_seed(_SEED.value)
    backbone = make_backbone()
    strategy = make_strategy(axes)
    random = np.random.default_rng(_SEED.value)
    train = make_sequences(_STEPS.value * _BATCH_SIZE.value, list(backbone.input), random)
    held_out = make_sequences(HELD_OUT, list(backbone.input), random)
    model = tfshard.as_distributed(add_head(backbone))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(_LEARNING_RATE.value), loss, metrics=["accuracy"], strategy=strategy)
    model.fit(train.inputs, train.labels, batch_size=_BATCH_SIZE.value, shuffle=False, verbose=2)
    _, accuracy = model.evaluate(held_out.inputs, held_out.labels, batch_size=_BATCH_SIZE.value, verbose=0)
    print(f"held-out accuracy: {accuracy:.4f} of {HELD_OUT} sequences")
    if strategy is not None:
        print(strategy.report(model))
    if accuracy < _MIN_ACCURACY.value:
        print(f"The accuracy is below min_accuracy={_MIN_ACCURACY.value}.")
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
