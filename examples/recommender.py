"""Train a two-tower recommender on generated data, sharded over a mesh. Its table of items has ten million rows.

    python examples/recommender.py --mesh=batch:4
    python examples/recommender.py --mesh=batch:4 --optimizer=adam --sparse=lazy
    python examples/recommender.py                        # one device, plain Keras
    python examples/recommender.py --mesh=batch:4 --rows=20000 --steps=60     # a small run

Each item has a topic. The ranks of items follow a log-uniform distribution, which makes most of the rows rare. Each
user has a topic and a history of items, mostly of the same topic. Each user is shown an item, either of the user's
topic or of a random topic. The model predicts which of the two cases it is. The program prints the area under the curve
for users outside of the training data, and the bytes that each device holds.
"""

import contextlib
import functools
import math
from typing import NamedTuple

import keras
import numpy as np
from absl import app, flags
from sklearn.metrics import roc_auc_score

import tfshard

# Learning rates that are known to work. Rows that occur once in a thousand have small gradients, so Adagrad's initial
# accumulator is zero.
_OPTIMIZERS = {
    "adagrad": functools.partial(
        keras.optimizers.Adagrad, learning_rate=0.05, initial_accumulator_value=0.0, epsilon=1e-14
    ),
    "adam": functools.partial(keras.optimizers.Adam, learning_rate=0.01),
}

_MESH = flags.DEFINE_string("mesh", "", "Mesh axes, such as 'batch:4'; empty: one device, plain Keras.")
_ROWS = flags.DEFINE_integer("rows", 10_000_000, "Number of items.", 1)
_WIDTH = flags.DEFINE_integer("width", 16, "Width of the embedding of an item.", 1)
_HISTORY = flags.DEFINE_integer("history", 10, "Number of items in a user's history.", 1)
_TOPICS = flags.DEFINE_integer("topics", 16, "Number of topics of the items.", 2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 1024, "Number of users in a step, over all devices.", 1)
_STEPS = flags.DEFINE_integer("steps", 300, "Training steps.", 1)
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adagrad", list(_OPTIMIZERS), "The optimizer.")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", 0.0, "Learning rate; 0: the example's default for the optimizer.", 0.0
)
_SPARSE = flags.DEFINE_enum(
    "sparse",
    "keras",
    ["keras", "lazy", "whole"],
    "Updates of the embedding table; whole: a plain embedding without tables=.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and data.")
_MIN_AUC = flags.DEFINE_float("min_auc", 0.0, "The program fails below this area under the curve.", 0.0, 1.0)

_HELD_OUT = 8192


class Users(NamedTuple):
    """Histories `(n, history)`, shown items `(n, 1)`, and labels `(n, 1)`: 1 for an item of the user's topic."""

    histories: np.ndarray
    items: np.ndarray
    labels: np.ndarray


def make_users(count: int, random: np.random.Generator) -> Users:
    """Draw users, their histories and the items that they are shown."""
    rows, topics = _ROWS.value, _TOPICS.value
    topic = random.integers(0, topics, (count, 1))
    labels = random.integers(0, 2, (count, 1))

    def met(shape: tuple[int, int], is_own: np.ndarray) -> np.ndarray:
        rank = np.exp(random.uniform(size=shape) * math.log(max(rows // topics, 2))).astype(np.int64) - 1
        of = np.where(is_own, topic, random.integers(0, topics, shape))
        # Frequent items lie anywhere in the table.
        return ((rank * topics + of) * _spread(rows) % rows).astype(np.int32)

    histories = met((count, _HISTORY.value), random.uniform(size=(count, _HISTORY.value)) < 0.8)
    return Users(histories, met((count, 1), labels == 1), labels.astype(np.float32))


def _spread(rows: int) -> int:
    """Return a stride that visits every row once."""
    return next(number for number in range(int(0.618 * rows) | 1, 2 * rows + 2, 2) if math.gcd(number, rows) == 1)


def make_strategy() -> tfshard.ShardedStrategy | None:
    """Return the strategy that the flags ask for, or None for one device."""
    axes = {name.strip(): int(size) for name, size in (part.split(":") for part in _MESH.value.split(",") if part)}
    if not axes:
        return None
    tfshard.initialize(num_devices=None if -1 in axes.values() else math.prod(axes.values()))
    tables = None
    if _SPARSE.value != "whole":
        tables = tfshard.EmbeddingTables(".*items/embeddings", sparse=_SPARSE.value)
    return tfshard.ShardedStrategy(tfshard.create_mesh(**axes), tables=tables)


def make_model() -> keras.Model:
    """Return a tower for a history and a tower for an item, over one table. Their dot product is the logit."""
    layers = keras.layers
    history, item = keras.Input((_HISTORY.value,), dtype="int32"), keras.Input((1,), dtype="int32")
    table = layers.Embedding(_ROWS.value, _WIDTH.value, name="items")
    user = layers.GlobalAveragePooling1D()(table(history))
    user = layers.Dense(32, name="user_out")(layers.Dense(64, activation="relu", name="user_hidden")(user))
    shown = layers.Flatten()(table(item))
    shown = layers.Dense(32, name="item_out")(layers.Dense(64, activation="relu", name="item_hidden")(shown))
    return keras.Model([history, item], layers.Dot(axes=1)([user, shown]), name="recommender")


def make_compiled(strategy: tfshard.ShardedStrategy | None) -> keras.Model:
    """Return the compiled model, created under the strategy."""
    rate = {"learning_rate": _LEARNING_RATE.value} if _LEARNING_RATE.value else {}
    optimizer = _OPTIMIZERS[_OPTIMIZER.value](**rate)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make_model()
        model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    return model


def area_under_curve(model: keras.Model, users: Users) -> float:
    """Return the area under the curve for users outside of the training data."""
    scores = model.predict([users.histories, users.items], batch_size=_BATCH_SIZE.value, verbose=0)
    return float(roc_auc_score(users.labels, scores))


def main(argv: list[str]) -> int:
    """Train and measure. Returns 1, the exit status, if the area is below `--min_auc`."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}")
    strategy = make_strategy()  # First: TensorFlow fixes its devices at the first tensor.
    keras.utils.set_random_seed(_SEED.value)
    random = np.random.default_rng(_SEED.value)
    model = make_compiled(strategy)
    users = make_users(_STEPS.value * _BATCH_SIZE.value, random)
    model.fit([users.histories, users.items], users.labels, batch_size=_BATCH_SIZE.value, verbose=2)
    area = area_under_curve(model, make_users(_HELD_OUT, random))
    print(f"area under the curve: {area:.4f} of {_HELD_OUT} users")
    if strategy is not None:
        inputs = [users.histories[: _BATCH_SIZE.value], users.items[: _BATCH_SIZE.value]]
        print(strategy.plan(model, inputs=inputs))
        print(strategy.report(model))
    if area < _MIN_AUC.value:
        print(f"The area is below min_auc={_MIN_AUC.value}.")
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
