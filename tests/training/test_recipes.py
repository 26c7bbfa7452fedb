"""Keras Tuner, scikit-learn and tf.data from TFRecords train sharded models to the numbers of one device."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import launched
import tfshard

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(32, 8)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def sharded(stage: int = 3) -> dict[str, object]:
    return {"strategy": tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=stage)}


def classifier(width: int = 8, **compile_options) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(width, "tanh"), keras.layers.Dense(2, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **compile_options)
    return model


def assert_same(ours, theirs, **tolerances):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-4, **tolerances}), ours, theirs
    )


# --- Keras Tuner --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:(currentThread|getName):DeprecationWarning")  # Of Keras Tuner.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")  # In plain Keras, too.
@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["GridSearch", "RandomSearch", "BayesianOptimization"])
def test_a_tuner_finds_what_it_finds_on_one_device(kind, tmp_path):
    keras_tuner = pytest.importorskip("keras_tuner")

    def search(**compile_options):
        def build(parameters):
            width = parameters.Choice("width", [4, 16])
            model = classifier(width, **compile_options)
            model.optimizer.learning_rate = parameters.Choice("rate", [0.001, 0.1])
            return model

        options = {
            "GridSearch": {"max_trials": 4},
            "RandomSearch": {"max_trials": 3},
            "BayesianOptimization": {"max_trials": 3},
        }[kind]
        # Keras Tuner takes a seed of 0 for none.
        tuner = getattr(keras_tuner, kind)(
            build, "val_loss", seed=1, overwrite=True, directory=tmp_path / str(len(compile_options)), **options
        )
        tuner.search(X, Y, epochs=2, batch_size=8, validation_data=(X, Y), verbose=0, shuffle=False)
        trials = tuner.oracle.get_best_trials(10)
        best = tuner.get_best_models(1)[0]
        return [(trial.hyperparameters.values, trial.score) for trial in trials], best

    expected, plain = search()
    options = sharded()
    found, best = search(**options)
    assert len(found) >= 3 and [values for values, _ in found] == [values for values, _ in expected]
    assert_same([score for _, score in found], [score for _, score in expected])
    # The best model comes back sharded, with its trained weights.
    assert best.distribute_strategy is options["strategy"] and best.layers[0].kernel.value.layout.splits
    assert_same(best.get_weights(), plain.get_weights(), rtol=1e-3, atol=1e-5)


# --- scikit-learn -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scikit_learn_classifier_gives_the_scores_of_one_device():
    pytest.importorskip("sklearn")
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def make(X, y, width=8, stage=None):
        keras.utils.set_random_seed(0)
        outputs = len(np.unique(y)) if y.ndim == 1 else y.shape[1]
        model = keras.Sequential(
            [keras.Input(X.shape[1:]), keras.layers.Dense(width, "tanh"), keras.layers.Dense(outputs, "softmax")]
        )
        options = {} if stage is None else sharded(stage)
        model.compile("adam", "categorical_crossentropy", **options)
        return model

    def wrapped(**arguments):
        return keras.wrappers.SKLearnClassifier(
            make, model_kwargs=arguments, fit_kwargs={"epochs": 3, "batch_size": 8, "verbose": 0, "shuffle": False}
        )

    labels = np.array(["no", "yes"])[Y]
    plain, ours = wrapped().fit(X, labels), wrapped(stage=3).fit(X, labels)
    assert ours.model_.layers[0].kernel.value.layout.splits
    assert (ours.predict(X) == plain.predict(X)).all()
    assert_same(ours.model_.get_weights(), plain.model_.get_weights(), atol=1e-6)
    scores = [
        cross_val_score(make_pipeline(StandardScaler(), wrapped(**options)), X, labels, cv=2)
        for options in ({}, {"stage": 1})
    ]
    assert_same(scores[1], scores[0])
    search = GridSearchCV(
        wrapped(stage=3), {"model_kwargs": [{"width": 2, "stage": 3}, {"width": 16, "stage": 3}]}, cv=2
    )
    search.fit(X, labels)
    assert search.best_estimator_.model_.layers[0].kernel.value.layout.splits


def test_a_scikit_learn_regressor_and_transformer_give_the_values_of_one_device():
    pytest.importorskip("sklearn")

    def make(X, y, stage=None):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", "mse", **({} if stage is None else sharded(stage)))
        return model

    target = X[:, 1]
    for kind in (keras.wrappers.SKLearnRegressor, keras.wrappers.SKLearnTransformer):
        fit = {"epochs": 2, "batch_size": 8, "verbose": 0, "shuffle": False}
        plain, ours = [
            kind(make, model_kwargs=options, fit_kwargs=fit).fit(X, target) for options in ({}, {"stage": 3})
        ]
        name = "predict" if kind is keras.wrappers.SKLearnRegressor else "transform"
        assert_same(getattr(ours, name)(X), getattr(plain, name)(X), atol=1e-5)


# --- tf.data from TFRecords ---------------------------------------------------------------------------


def write_records(folder: pathlib.Path, files: int = 4) -> None:
    for number in range(files):
        with tf.io.TFRecordWriter(str(folder / f"part-{number}.tfrecord")) as writer:
            for row, label in zip(X[number::files], Y[number::files], strict=True):
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=row)),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def records(folder: pathlib.Path, *, batch_size: int = 8, clients: int = 1, client: int = 0) -> tf.data.Dataset:
    """Return batches of the examples in a folder of TFRecord files. Each client reads and parses its own rows."""
    features = {"x": tf.io.FixedLenFeature((8,), tf.float32), "y": tf.io.FixedLenFeature((), tf.int64)}
    data = tf.data.Dataset.list_files(str(folder / "*.tfrecord"), shuffle=False)
    data = data.interleave(tf.data.TFRecordDataset, cycle_length=2, num_parallel_calls=2, deterministic=True)
    data = data.shuffle(32, seed=7).batch(batch_size, drop_remainder=True)
    rows = batch_size // clients
    data = data.map(lambda batch: batch[client * rows : (client + 1) * rows])
    data = data.map(lambda batch: tf.io.parse_example(batch, features), num_parallel_calls=2, deterministic=True)
    data = data.map(lambda each: (each["x"], each["y"])).prefetch(2)
    # Plain Keras 3.15 counts one batch too many in the metrics of an epoch whose length it does not know.
    return data.apply(tf.data.experimental.assert_cardinality(len(X) // batch_size))


def test_records_train_to_the_numbers_of_one_device(tmp_path):
    write_records(tmp_path)
    plain, ours = classifier(), classifier(**sharded())
    for model in (plain, ours):
        model.history_ = model.fit(
            records(tmp_path), epochs=3, verbose=0, shuffle=False, validation_data=records(tmp_path)
        ).history
    assert len(plain.history_["loss"]) == 3 and plain.history_["loss"][-1] < plain.history_["loss"][0]
    assert_same(ours.history_, plain.history_)
    assert_same(ours.get_weights(), plain.get_weights(), atol=1e-6)
    assert_same(ours.predict(records(tmp_path), verbose=0), plain.predict(records(tmp_path), verbose=0), atol=1e-6)


@pytest.mark.slow
def test_clients_that_read_their_part_of_the_records_train_to_the_numbers_of_one_device(tmp_path):
    write_records(tmp_path)
    done = launched.launch(
        "--num_processes=2", "--devices_per_process=2", str(launched.HERE / "launched_records.py"), str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    plain = classifier()
    expected = plain.fit(records(tmp_path), epochs=2, verbose=0, shuffle=False).history
    for found in launched.found(done, 2):
        assert found["rows"] == 4
        assert_same(found["history"], expected)
