"""random_map gives the same random layers in an input pipeline in every run. Launched: test_launched_failures.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import launched_failures
import tfshard

X = np.random.RandomState(0).rand(24, 8, 8, 3).astype("float32")


def augmented(calls: int | None = None, seed: int = 1) -> tf.data.Dataset:
    augment = keras.Sequential([keras.layers.RandomFlip("horizontal"), keras.layers.RandomRotation(0.3)])
    samples = tf.data.Dataset.from_tensor_slices((X, np.arange(24)))
    return tfshard.random_map(
        samples.batch(4), lambda x, y: (augment(x, training=True), y), seed=seed, num_parallel_calls=calls
    )


def read(dataset: tf.data.Dataset) -> np.ndarray:
    batches = list(dataset)
    np.testing.assert_array_equal(np.concatenate([y.numpy() for _, y in batches]), np.arange(24))
    return np.concatenate([x.numpy() for x, _ in batches])


def test_what_is_drawn_depends_on_seed_epoch_and_place_only():
    dataset = augmented()
    epochs = [read(dataset) for _ in range(2)]
    assert not np.isclose(epochs[0], X).all()
    assert not np.array_equal(*epochs)
    parallel = augmented(calls=4)
    for epoch in epochs:
        np.testing.assert_array_equal(read(parallel), epoch)
    assert not np.array_equal(read(augmented(seed=2)), epochs[0])
    # The samples of a batch and the layers draw different numbers.
    same = tf.data.Dataset.from_tensors(np.repeat(X[:1], 24, axis=0)).unbatch().batch(24)
    layers = [keras.layers.RandomBrightness(0.2, value_range=(0, 1)) for _ in range(2)]
    drawn = next(iter(tfshard.random_map(same, lambda x: [layer(x, training=True) for layer in layers], seed=1)))
    for number in (0, 1):
        assert len({float(tf.reduce_mean(x)) for x in drawn[number]}) > 20
    assert not np.array_equal(drawn[0], drawn[1])


def test_the_layers_themselves_are_as_they_were():
    layer = keras.layers.RandomFlip(seed=3)
    before = layer.generator.state.numpy().copy()
    list(tfshard.random_map(tf.data.Dataset.from_tensors(X), layer, seed=1))
    np.testing.assert_array_equal(layer.generator.state.numpy(), before)


@pytest.mark.slow
def test_fit_resumes_with_the_same_augmented_batches(tmp_path):
    launched_failures.check_augmented_resume(tmp_path)


def test_random_layers_in_dataset_map_are_refused_with_the_remedy(tmp_path):
    layer = keras.layers.RandomFlip("horizontal", seed=1, name="mirror")
    dataset = tf.data.Dataset.from_tensor_slices((X, np.arange(24.0))).batch(4).map(lambda x, y: (layer(x), y))
    model = launched_failures.image_model()
    message = r"mirror.*AssignVariableOp.*tfshard.random_map\(dataset, function"
    with pytest.raises(tfshard.errors.CheckpointError, match=message):
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[tfshard.CheckpointCallback(tmp_path, every_steps=1)])


def test_what_a_pipeline_cannot_do_is_refused():
    normalize = keras.layers.BatchNormalization()
    normalize.build((None, 8, 8, 3))
    with pytest.raises(tfshard.errors.StrategyError, match="writes variable 'batch_normalization.*moving_mean'"):
        tfshard.random_map(tf.data.Dataset.from_tensors(X), lambda x: normalize(x, training=True), seed=1)
    with pytest.raises(tfshard.errors.StrategyError, match="needs an integer seed.*seed=None"):
        tfshard.random_map(tf.data.Dataset.from_tensors(X), normalize, seed=None)
