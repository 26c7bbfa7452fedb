"""The history of several outputs' losses matches Keras for batches of several sizes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard

RS = np.random.RandomState(0)
X = RS.randn(22, 6).astype("float32")
# Later samples have larger losses, so the weight of the remainder shows.
P, Q = RS.randint(0, 3, 22), (X[:, :2] * np.linspace(1, 9, 22)[:, None]).astype("float32")
WEIGHTS = np.linspace(0.5, 2, 22).astype("float32")
LOSSES = {"p": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "q": "mse"}


def build(listed: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    outputs = {"p": keras.layers.Dense(3, name="p")(hidden), "q": keras.layers.Dense(2, name="q")(hidden)}
    return keras.Model(inputs, list(outputs.values()) if listed else outputs)


def dataset(**options) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, {"p": P, "q": Q})).batch(8, **options)


def arrays(model, **options):
    return model.fit(X, {"p": P, "q": Q}, batch_size=8, shuffle=False, verbose=0, **options).history


# Functions of a compiled model that return numbers.
RUNS = {
    "remainder": lambda m: [arrays(m, epochs=2), m.evaluate(X, {"p": P, "q": Q}, batch_size=8, verbose=0)],
    "no remainder": lambda m: m.fit(X[:16], {"p": P[:16], "q": Q[:16]}, batch_size=8, shuffle=False, verbose=0).history,
    "one batch size after another": lambda m: [
        m.fit(X[:16], {"p": P[:16], "q": Q[:16]}, batch_size=8, shuffle=False, verbose=0).history,
        arrays(m),
        m.fit(X[:20], {"p": P[:20], "q": Q[:20]}, batch_size=4, shuffle=False, verbose=0).history,
        m.fit(X[:16], {"p": P[:16], "q": Q[:16]}, batch_size=8, shuffle=False, verbose=0).history,
    ],
    "validation": lambda m: arrays(m, epochs=2, validation_data=(X[:18], {"p": P[:18], "q": Q[:18]})),
    "sample weights": lambda m: [
        arrays(m, sample_weight={"p": WEIGHTS, "q": WEIGHTS[::-1]}), arrays(m, sample_weight=WEIGHTS)],
    "dataset": lambda m: [m.fit(dataset(), verbose=0).history, m.evaluate(dataset(), verbose=0)],
    "dropped": lambda m: m.fit(dataset(drop_remainder=True), epochs=2, verbose=0).history,
    "train_on_batch": lambda m: [
        m.train_on_batch(X[begin:end], {"p": P[begin:end], "q": Q[begin:end]})
        for begin, end in ((0, 8), (8, 16), (16, 22), (0, 8), (0, 4))],
    "test_on_batch": lambda m: [
        m.test_on_batch(X[begin:end], {"p": P[begin:end], "q": Q[begin:end]})
        for begin, end in ((0, 6), (8, 16), (0, 8))],
}  # fmt: skip
OPTIONS = {"list": True, "loss_weights": {"p": 0.3, "q": 2.0}, "run_eagerly": True, "steps_per_execution": 2}


def numbers(name: str, strategy: tfshard.ShardedStrategy | None, option: str | None) -> list:
    keras.backend.clear_session()
    model = build(listed=option == "list")
    given = {option: OPTIONS[option]} if option not in (None, "list") else {}
    losses, metrics = LOSSES, {"p": ["accuracy"], "q": ["mae"]}
    if option == "list":
        losses, metrics = list(LOSSES.values()), list(metrics.values())
        given["loss_weights"] = [0.3, 2.0]
    tfshard.as_distributed(model).compile(
        "adam", losses, metrics=metrics, strategy=strategy, jit_compile=False, **given
    )
    if option == "list":
        found = model.fit(X, [P, Q], batch_size=8, shuffle=False, verbose=0).history
        found = [found, model.evaluate(X, [P, Q], batch_size=8, verbose=0)]
    else:
        found = RUNS[name](model)
    if strategy is not None:
        assert parity.shard_axes(model) == {"batch"}, "premise"
    leaves = keras.tree.flatten_with_path(found)
    return [(path, np.array(leaf)) for path, leaf in leaves]


CASES = [*((name, None, 1) for name in RUNS), *(("remainder", option, 1) for option in OPTIONS), ("remainder", None, 2)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "option", "microbatches"), CASES)
def test_losses_of_several_outputs_are_counted_as_on_one_device(name, option, microbatches):
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), microbatches=microbatches)
    ours, theirs = numbers(name, strategy, option), numbers(name, None, option)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    assert len(theirs) >= 5, "premise"
    for (path, our), (_, their) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=2e-5, atol=1e-6, err_msg=str(path))
