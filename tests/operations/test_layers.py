"""The built-in Keras layers that train under a ShardedStrategy, as tests/built_in_layers.py lists them."""

import collections
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import parity
import tfshard
from built_in_layers import (
    BATCH,
    DOCS,
    KINDS,
    MARK,
    NOT_LAYERS,
    NOT_RETRIED,
    RANDOM,
    REFUSED,
    SAME,
    build,
    documented,
    layer_names,
    pairs,
    reason,
)
from sweeps import table, taken
from tfshard.operations import unsupported

# Some models end in Flatten after a layer that makes a mask.
pytestmark = pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask attached to it:UserWarning")


TOLERANCE = 1e-5


def loss(target, prediction):
    """Return the sum of the branches' mean squared errors, so each branch trains as it would alone."""
    return keras.ops.sum(keras.ops.square(prediction - target), axis=-1) / 2


def strategy() -> tfshard.ShardedStrategy:
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=3)


def with_sharded_features() -> tfshard.ShardedStrategy:
    """Return a strategy that gives the layer under test features sharded over a model axis."""
    layout_map = tfshard.LayoutMap()
    layout_map.column("stem_.*", axis="model")
    layout_map.replicated("(?!stem_).*")
    return tfshard.ShardedStrategy(tfshard.create_mesh(batch=2, model=2), layout_map, zero_stage=3)


def train(kind: str, calls: list[str], chosen: tfshard.ShardedStrategy | None) -> parity.Run:
    rs = np.random.RandomState(0)
    batches = [(KINDS[kind].sample(rs), np.tile(rs.normal(size=(BATCH, 2)), len(calls))) for _ in range(2)]
    batches = [(x, y.astype("float32")) for x, y in batches]
    run = parity.train(
        lambda: build(kind, calls),
        batches,
        optimizer=lambda: keras.optimizers.SGD(KINDS[kind].rate),
        loss=loss,
        strategy=chosen,
        steps=2,
    )
    if chosen is not None:
        assert len(tf.config.list_logical_devices("CPU")) == 4
        for variable in run.model.trainable_variables:
            assert np.prod(variable.shape) == 1 or "batch" in variable.value.layout.storage, variable.path
        if "model" in chosen.mesh.dim_names:
            assert "model" in parity.shard_axes(run.model)
    return run


def check(kind: str, calls: list[str]) -> None:
    run = train(kind, calls, strategy())
    parity.assert_same(run, reference(kind, *calls), rtol=TOLERANCE, atol=TOLERANCE, slots=False)


@functools.lru_cache(maxsize=1)
def reference(kind: str, *calls: str) -> parity.Run:
    return train(kind, list(calls), None)


def assert_moved(kind: str, calls: list[str], reference: parity.Run) -> None:
    """Assert that each weight changed by far more than the tolerance, or not at all (a bias before a softmax)."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    for before, after in zip(build(kind, calls).trainable_variables, reference.model.trainable_variables, strict=True):
        moved = np.abs(np.array(after.numpy()) - np.array(before.numpy())).max()
        assert moved > 100 * TOLERANCE or moved < TOLERANCE / 10, (before.path, moved)


def test_every_built_in_layer_is_in_a_table():
    exported = {cls.__name__ for cls in vars(keras.layers).values() if isinstance(cls, type)} - NOT_LAYERS
    tried = {getattr(keras.layers, n).__name__ for _, call in pairs(SAME, RANDOM, REFUSED) for n in layer_names(call)}
    assert tried == exported


# Layers with a TensorFlow operation that a sample of the others may not have.
ALONE_IN_THEIR_OPERATIONS = collections.defaultdict(
    list,
    image=[
        "Conv2D(4, 3, groups=4)(x)",
        "SpectralNormalization(Conv2D(4, 3))(x)",
        "GlobalMaxPooling2D()(x)",
        "AdaptiveMaxPooling2D(3)(x)",
        "GroupNormalization(groups=2)(x)",
        "ZeroPadding2D(1)(x)",
        "Resizing(6, 5, interpolation='nearest')(x)",
        "Resizing(6, 5, pad_to_aspect_ratio=True)(x)",
        "AveragePooling2D(2)(x)",
        "Resizing(6, 5, antialias=True)(x)",
    ],
)


@pytest.mark.sweep(1)
@table("layers that match one device", "kind", SAME, always=["features", "sequence", "image", "tokens"], sample=1)
def test_layers_match_one_device(kind):
    """An ordinary run trains a sample of the layers, which has every TensorFlow operation of the kind."""
    calls = taken(f"layers of {kind}", SAME[kind], always=ALONE_IN_THEIR_OPERATIONS[kind], sample=8)
    assert_moved(kind, calls, reference(kind, *calls))
    check(kind, calls)


WITH_STEM = [kind for kind in SAME if KINDS[kind].stem]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:tfshard.errors.LayoutWarning")
@table("layers that get sharded features", "kind", WITH_STEM, always=["features"], sample=1)
def test_layers_that_get_sharded_features_match_one_device(kind):
    run = train(kind, SAME[kind], with_sharded_features())
    parity.assert_same(run, reference(kind, *SAME[kind]), rtol=TOLERANCE, atol=TOLERANCE, slots=False)


@pytest.mark.slow
@table("random layers that match one device", "kind", RANDOM, always=["features"], sample=1)
def test_random_layers_draw_what_they_draw_on_one_device(kind):
    check(kind, RANDOM[kind])


class AlwaysTraining(keras.Model):
    """A random layer that is random in predict, too."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x, training=True)


@pytest.mark.parametrize("name", ["Dropout", "GaussianNoise", "SpatialDropout1D"])
def test_random_layers_draw_for_each_sample_of_each_device(name):
    model = tfshard.as_distributed(AlwaysTraining(getattr(keras.layers, name)(0.5, seed=1)))
    model.compile("sgd", "mse", strategy=strategy())
    same_rows = np.ones((BATCH, 2, 64), "float32")
    first, second = (model.predict(same_rows, batch_size=BATCH, verbose=0) for _ in range(2))
    rows = np.concatenate([first, second]).reshape(2 * BATCH, -1)
    assert len(np.unique(rows, axis=0)) == 2 * BATCH


def test_embedding_matches_the_sparse_gradients_of_one_device_with_sgd():
    rs = np.random.RandomState(0)
    tokens, targets = rs.randint(0, 3, (BATCH, 5)), rs.normal(size=(BATCH, 2)).astype("float32")
    weights = []
    for sharded in (False, True):
        keras.utils.set_random_seed(0)
        model = tfshard.as_distributed(build("tokens", ["Embedding(7, 6)(x)"]))
        # parity.train would make the reference's gradient dense.
        model.compile(keras.optimizers.SGD(0.1), "mse", **({"strategy": strategy()} if sharded else {}))
        for _ in range(2):
            model.train_on_batch(tokens, targets)
        weights.append([np.array(weight.numpy()) for weight in model.weights])
    for reference, ours in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-5)


def test_refusal_names_every_layer_and_its_remedy():
    keras.backend.clear_session()
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.RandomElasticTransform(name="elastic")(inputs)
    words = keras.Input((1,), dtype="string", name="words")
    y = keras.layers.StringLookup(vocabulary=["red"], output_mode="one_hot", name="look")(words)
    x = keras.layers.Concatenate()([keras.layers.Flatten()(x), y])
    model = tfshard.as_distributed(keras.Model([inputs, words], x))
    with pytest.raises(tfshard.errors.UnsupportedLayerError) as caught:
        model.compile("sgd", "mse", strategy=strategy())
    message = str(caught.value)
    assert re.search(r"- 'elastic' \(RandomElasticTransform\): .*random_map", message)
    assert re.search(r"- 'look' \(StringLookup\): .*dataset.map", message)
    assert re.search(r"- 'words' \(InputLayer\): a device mesh cannot hold strings; .*dataset.map", message)
    assert message.endswith("See: tfshard docs layers")


# --- each layer alone, as in docs/layers.md -----------------------------------------------------------


@pytest.mark.sweep(1)
@table("layers that match one device, alone", ("kind", "call"), pairs(SAME), sample=4)
def test_layer_alone_matches_one_device(kind, call):
    check(kind, [call])


@table("random layers, alone", ("kind", "call"), pairs(RANDOM), sample=1)
def test_random_layer_alone_matches_one_device(kind, call):
    check(kind, [call])


@table("layers that compile refuses", ("kind", "call"), pairs(REFUSED), sample=2)
def test_compile_refuses_a_layer_before_anything_changes(kind, call):
    keras.backend.clear_session()
    model = tfshard.as_distributed(build(kind, [call]))
    with pytest.raises(tfshard.errors.UnsupportedLayerError, match=re.escape(reason(kind, call))):
        model.compile("sgd", "mse", strategy=strategy())
    assert not any(isinstance(variable.value, tfshard.storage.ShardedVariable) for variable in model.variables)


@table(
    "refused layers that do fail", ("kind", "call"),
    [pair for pair in pairs(REFUSED) if layer_names(pair[1])[0] not in NOT_RETRIED and pair[0] != "strings"],
)  # fmt: skip
def test_refused_layer_does_fail(kind, call, monkeypatch):
    monkeypatch.setattr(unsupported, "unsupported_reason", lambda layer: None)
    with pytest.raises((tf.errors.OpError, tfshard.errors.UnsupportedOperationError, tfshard.errors.StrategyError)):
        check(kind, [call])


def test_the_docs_say_what_is_in_the_tables():
    """The tests above train or refuse each row of docs/layers.md, for the given reason."""
    found = DOCS.read_text().partition(MARK)[2].strip()
    assert found == documented().strip(), "Write the table again: python tests/built_in_layers.py"
