"""Keras's metrics in steps: fit and evaluate give the values of plain Keras; what is refused is refused by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sweeps
import tfshard

RANDOM = np.random.RandomState(0)
INPUTS = RANDOM.rand(24, 5).astype("float32")
CLASSES = RANDOM.randint(0, 3, 24)
# Units, activation, loss and labels of each kind of model, and its metrics, all compiled into one model.
KINDS = {
    "yes or no": (
        1, "sigmoid", "binary_crossentropy", RANDOM.randint(0, 2, (24, 1)).astype("float32"),
        lambda m: [
            m.AUC(name="auc"), m.AUC(curve="PR", num_thresholds=20, name="auc_pr"),
            m.AUC(thresholds=[0.1, 0.4, 0.45], name="auc_at"),
            m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5), m.SensitivityAtSpecificity(0.5),
            m.SpecificityAtSensitivity(0.5), m.BinaryIoU(threshold=0.6), m.Precision(), m.Recall(thresholds=[0.3, 0.5]),
            m.TruePositives(), m.FalsePositives(), m.TrueNegatives(), m.FalseNegatives(), m.BinaryAccuracy(),
            m.Accuracy(), m.BinaryCrossentropy(), m.Hinge(), m.SquaredHinge(),
        ],
    ),
    "one of three": (
        3, "softmax", "categorical_crossentropy", np.eye(3, dtype="float32")[CLASSES],
        lambda m: [
            m.AUC(multi_label=True), m.OneHotMeanIoU(3), m.OneHotIoU(3, [1]), m.Precision(top_k=2),
            m.Recall(class_id=1),
            m.F1Score(), m.FBetaScore("macro", 2.0, 0.4), m.CategoricalAccuracy(), m.TopKCategoricalAccuracy(2),
            m.CategoricalCrossentropy(), m.KLDivergence(), m.CategoricalHinge(), m.Poisson(),
        ],
    ),
    "one of three, by number": (
        3, "softmax", "sparse_categorical_crossentropy", CLASSES,
        lambda m: [
            m.MeanIoU(3, sparse_y_pred=False), m.IoU(3, [0, 2], sparse_y_pred=False), m.SparseCategoricalAccuracy(),
            m.SparseTopKCategoricalAccuracy(2), m.SparseCategoricalCrossentropy(),
        ],
    ),
    "numbers": (
        3, None, "mse", RANDOM.rand(24, 3).astype("float32"),
        lambda m: [
            m.MeanSquaredError(), m.RootMeanSquaredError(), m.MeanAbsoluteError(), m.MeanAbsolutePercentageError(),
            m.MeanSquaredLogarithmicError(), m.CosineSimilarity(), m.LogCoshError(), m.R2Score(),
            m.PearsonCorrelation(), m.ConcordanceCorrelation(),
        ],
    ),
}  # fmt: skip


# What DTensor by itself refuses of them.
ORDINARY = [
    ("yes or no", name)
    for name in ("auc", "auc_at", "precision_at_recall", "sensitivity_at_specificity", "binary_io_u")
] + [("one of three, by number", "mean_io_u")]


def named(kind: str) -> dict[str, keras.metrics.Metric]:
    """The metrics of a kind by their names, which Keras makes of their classes."""
    keras.backend.clear_session()
    return {metric.name: metric for metric in KINDS[kind][-1](keras.metrics)}


ALL = [(kind, name) for kind in KINDS for name in named(kind)]
TAKEN = sweeps.taken("metrics", ALL, always=ORDINARY, sample=2)


def fitted(kind: str, strategy: tfshard.ShardedStrategy | None, **options) -> dict[str, np.ndarray]:
    units, activation, loss, labels, _ = KINDS[kind]
    chosen = [metric for name, metric in named(kind).items() if (kind, name) in TAKEN]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(units, activation=activation)])
    if strategy is None:
        options["jit_compile"] = False
    else:
        tfshard.as_distributed(model)
        options["strategy"] = strategy
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=chosen, **options)
    history = model.fit(INPUTS, labels, batch_size=8, verbose=0, shuffle=False).history
    evaluated = model.evaluate(INPUTS, labels, batch_size=8, verbose=0, return_dict=True)
    assert strategy is None or model.trainable_variables[0].value.mesh.size == 4
    return {**{f"fit {k}": np.asarray(v) for k, v in history.items()}, **evaluated}


@sweeps.table("kinds of metrics", "kind", KINDS, always={kind for kind, _ in TAKEN})
def test_metrics_of_fit_and_evaluate_are_those_of_plain_keras(kind: str):
    expected = fitted(kind, None)
    values = fitted(kind, tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=1))
    assert values.keys() == expected.keys() and len(values) >= 4, "loss and a metric, of fit and of evaluate"
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_every_metric_of_keras_is_in_the_table():
    tried = {type(metric).__name__ for *_, metrics in KINDS.values() for metric in metrics(keras.metrics)}
    classes = {name for name, value in vars(keras.metrics).items() if isinstance(value, type)}
    assert classes - tried == {"Metric", "Mean", "Sum", "MeanMetricWrapper"}


class Printing(keras.layers.Layer):
    def call(self, x):
        tf.print("the sum is", tf.reduce_sum(tf.ones_like(x)))
        return x


class Convolving(keras.layers.Layer):
    def call(self, x):
        return x + over_samples(x)


class Spread(keras.metrics.Metric):
    def __init__(self, name: str):
        super().__init__(name=name)
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(over_samples(y_pred))

    def result(self):
        return self.total


class Calling(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(np.negative, [x], tf.float32), x.shape)


def over_samples(x):
    """A convolution over the batch."""
    return tf.reduce_sum(tf.nn.conv1d(x[None], tf.ones((3, x.shape[-1], 1)), 1, "SAME"))


def compiled(layer: keras.Layer, loss="mse", metrics=None, **options) -> keras.Model:
    model = tfshard.Sequential([keras.Input((5,)), keras.layers.Dense(3), layer])
    strategy = tfshard.ShardedStrategy(tfshard.create_mesh(batch=4), zero_stage=1)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics, strategy=strategy, **options)
    return model


LABELS = KINDS["numbers"][3]
REFUSED = {
    "layer": (lambda: compiled(Convolving(name="parts")), "layer 'parts' .Convolving., test_metrics.py:.* in "),
    "metric": (
        lambda: compiled(keras.layers.Identity(), metrics=[Spread("spread")]),
        "metric 'spread' .Spread., test_metrics.py:.* in ",
    ),
    "loss": (
        lambda: compiled(keras.layers.Identity(), loss=lambda y_true, y_pred: over_samples(y_pred)),
        "'Conv2D'.* made by: loss '.*' .LossFunctionWrapper., test_metrics.py:.* in ",
    ),
}


@pytest.mark.parametrize("place", REFUSED)
def test_a_refused_operation_is_told_with_who_made_it_and_the_line(place: str):
    build, message = REFUSED[place]
    with pytest.raises(tfshard.errors.UnsupportedOperationError, match=message):
        build().fit(INPUTS, LABELS, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    ("layer", "message"), [(Printing, "tf.print: every device would print"), (Calling, "a Python function")]
)
def test_print_and_python_functions_in_a_compiled_step_are_refused_by_layer_and_line(layer: type, message: str):
    with pytest.raises(
        tfshard.errors.UnsupportedOperationError, match=f"{message}.*layer 'mine' .*test_metrics.py:.* in call"
    ):
        compiled(layer(name="mine")).fit(INPUTS, LABELS, batch_size=8, verbose=0)


def test_print_in_an_eager_step_prints_the_global_value_once(capfd):
    compiled(Printing(), run_eagerly=True).fit(INPUTS, LABELS, batch_size=8, verbose=0)
    assert capfd.readouterr().err.count("the sum is 24") == 3
