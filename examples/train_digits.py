"""Train a small CNN with batch normalization on scikit-learn's bundled digits, sharded over a mesh.

    python examples/train_digits.py --mesh=batch:4 --zero_stage=3
    python examples/train_digits.py --mesh=batch:2,model:2
    python examples/train_digits.py                       # one device, plain Keras

The example prints the accuracy on held-out digits and the bytes that every device holds. The size of an epoch's last
batch is not divisible by the number of devices. Every sample is still trained on once.
"""

import math
from typing import NamedTuple

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfshard

_MESH = flags.DEFINE_string("mesh", "", "Mesh axes, such as 'batch:4' or 'batch:2,model:2'; empty: one device.")
_ZERO_STAGE = flags.DEFINE_integer("zero_stage", 3, "ZeRO stage.", 0, 3)
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Passes over the training digits.", 1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Digits in a step, over all devices.", 1)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Learning rate of Adam.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights, the split and the order of samples.")
_MIN_ACCURACY = flags.DEFINE_float("min_accuracy", 0.0, "The program fails below this held-out accuracy.", 0.0, 1.0)


class Digits(NamedTuple):
    """Images `(n, 8, 8, 1)` in [0, 1] and labels `(n,)`. A fifth of the images is held out."""

    train_images: np.ndarray
    held_out_images: np.ndarray
    train_labels: np.ndarray
    held_out_labels: np.ndarray


def parse_mesh(text: str) -> dict[str, int]:
    """Parse mesh axes: `"batch:2,model:2"` to `{"batch": 2, "model": 2}`."""
    axes = (part.split(":") for part in text.split(",") if part)
    return {name.strip(): int(size) for name, size in axes}


def make_strategy() -> tfshard.ShardedStrategy | None:
    """Return the strategy that the flags ask for, or None for one device."""
    axes = parse_mesh(_MESH.value)
    if not axes:
        return None
    tfshard.initialize(num_devices=None if -1 in axes.values() else math.prod(axes.values()))
    layout_map = "auto" if "model" in axes else None
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), layout_map, zero_stage=_ZERO_STAGE.value)


def make_model() -> keras.Model:
    """Return a model of two convolutions with batch normalization and two dense layers."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False, name="conv_1"),
            layers.BatchNormalization(momentum=0.9, name="norm_1"),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", use_bias=False, name="conv_2"),
            layers.BatchNormalization(momentum=0.9, name="norm_2"),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu", name="hidden"),
            layers.Dense(10, name="logits"),
        ],
        name="digits",
    )


def load_data() -> Digits:
    """Load the 1797 digits that come with scikit-learn."""
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    return Digits(*train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=_SEED.value))


def main(argv: list[str]) -> int:
    """Train and measure. Returns 1, the exit status, if the accuracy is below `--min_accuracy`."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    strategy = make_strategy()  # First: TensorFlow fixes its devices at the first tensor.
    keras.utils.set_random_seed(_SEED.value)
    data = load_data()
    model = tfshard.as_distributed(make_model())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(_LEARNING_RATE.value), loss, metrics=["accuracy"], strategy=strategy)
    model.fit(data.train_images, data.train_labels, batch_size=_BATCH_SIZE.value, epochs=_EPOCHS.value, verbose=2)
    _, accuracy = model.evaluate(data.held_out_images, data.held_out_labels, batch_size=_BATCH_SIZE.value, verbose=0)
    print(f"held-out accuracy: {accuracy:.4f} of {len(data.held_out_labels)} digits")
    if strategy is not None:
        print(strategy.report(model))
    if accuracy < _MIN_ACCURACY.value:
        print(f"The accuracy is below min_accuracy={_MIN_ACCURACY.value}.")
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
